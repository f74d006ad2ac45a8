"""Which task a config names."""

import importlib

from bitsperbyte.randopt.config import TaskSection
from bitsperbyte.randopt.tasks.base import Task

# each module has open_task(section) -> Task
TASKS = {name: f"bitsperbyte.randopt.tasks.{name}" for name in ("gsm8k", "math500", "countdown", "arithmetic", "likelihood", "jsonl")}


def open_task(section: TaskSection) -> Task:
    """The task of `section`; ValueError for settings or data that it cannot work with."""
    return importlib.import_module(TASKS[section.name]).open_task(section)
