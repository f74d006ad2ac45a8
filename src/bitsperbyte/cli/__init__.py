"""The command line: one file for each subcommand, put together here. Heavy imports wait until a command runs."""

from typing import Annotated

import typer

import bitsperbyte
from bitsperbyte.cli import data, golf, randopt, records, report, watch

app = typer.Typer(
    name="bpb",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # __main__ turns errors into sentences
    epilog="Exit codes: 0 done; 1 the run failed (diverged, over the cap, crashed); 2 bad input; "
    "3 the disk or the system refused; 130 interrupted; 143 terminated.",
)
app.add_typer(golf.app, name="golf")
app.add_typer(randopt.app, name="randopt")
app.add_typer(data.app, name="data")
app.add_typer(records.app, name="records")
app.command("report")(report.report)
app.command("watch")(watch.watch)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"bitsperbyte {bitsperbyte.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None:
    """Train, pack, score and record language models in bits per byte."""
