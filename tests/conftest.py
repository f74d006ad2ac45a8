"""Fixtures shared by all tests."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

REPO = Path(__file__).resolve().parents[1]

settings.register_profile("steady", deadline=None)  # a busy machine makes an example slow, not wrong
settings.load_profile("steady")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a job that a script put into the background, whose children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repo_dir() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of reference data beside the checkout; its absence fails in CI and skips elsewhere."""
    path = REPO.parent / "shared"
    if not (path / "data").is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"the reference data folder {path} is missing, and CI must have it")
        pytest.skip(f"the reference data folder {path} is not on this machine")
    return path


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests run only when asked for by name (-m soak); GPU tests say why they do not run."""
    wants_soak = "soak" in (config.getoption("-m") or "")
    for item in items:
        if item.get_closest_marker("soak") and not wants_soak:
            item.add_marker(pytest.mark.skip(reason="long fault test: run make soak"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and this machine has none"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
