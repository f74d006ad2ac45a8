"""bpb report: one page of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="folders of runs, or of records; several are compared with the first")],
    out: Annotated[
        Path | None, typer.Option(help="the HTML file; default: report.html in the run's folder, or here where there are several runs")
    ] = None,
) -> None:
    """Write one self-contained HTML page of a run, or of several, and PNGs of its figures beside it."""
    from bitsperbyte.records.report.page import write_report

    page, figures = write_report(runs, out)
    if out is None and len(runs) > 1:
        print(f"several runs and no --out: the report goes to {page}")
    print(f"wrote {page}, and its figures as PNG to {figures}")
