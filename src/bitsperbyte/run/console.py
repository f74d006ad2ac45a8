"""The terminal a run talks to."""

import os

from rich.console import Console


class SteadyConsole(Console):
    """A console whose reader may go away: the run goes on, and its files hold everything."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
