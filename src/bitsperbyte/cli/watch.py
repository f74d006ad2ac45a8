"""bpb watch: a run in progress, looked at."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bitsperbyte.run.outcome import EXIT_INTERRUPTED, Terminated

MIN_INTERVAL_S = 0.05


def watch(run_dir: Annotated[Path, typer.Argument(help="the folder of a run, in progress, ended or a copy; or of seed_1, seed_2, ...")],
          once: Annotated[bool, typer.Option("--once", help="print one frame and stop; the default where stdout is no terminal")] = False,
          interval: Annotated[float, typer.Option(min=MIN_INTERVAL_S, help="seconds between two looks")] = 1.0,
          lines: Annotated[int, typer.Option(min=0, help="last lines of the log to show at most")] = 40,
          as_json: Annotated[bool, typer.Option("--json", help="print one look as a JSON object and stop")] = False) -> None:
    """Show how a run is doing, until it has ended. Only looks: nothing is written or locked."""
    from bitsperbyte.records.frame import Frame
    from bitsperbyte.records.watch import open_watch

    watched = open_watch(run_dir, lines)
    if as_json:
        print(json.dumps(watched.look().to_dict(), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console()
    view = watched.look()
    if not once and console.is_terminal and sys.stdout.isatty() and not view.status.ended:
        from rich.live import Live

        try:
            with Live(Frame(view, console.height), console=console, screen=True, auto_refresh=False) as live:
                while not view.status.ended:
                    time.sleep(interval)
                    view = watched.look()
                    live.update(Frame(view, console.height), refresh=True)
        except Terminated:
            raise
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None  # leaving is no failure, so nothing is said
    console.print(Frame(view), crop=False)
