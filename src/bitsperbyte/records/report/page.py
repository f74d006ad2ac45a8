"""The page of one report: a single HTML file without scripts, links or loads, and PNGs of its figures beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bitsperbyte
from bitsperbyte.records.report import golf_section, randopt_section
from bitsperbyte.records.report.drawing import NARROW, WIDE, Plot, colour_rules, letter
from bitsperbyte.records.report.markup import constant, escaped, paragraphs, text
from bitsperbyte.records.report.run_facts import remarks
from bitsperbyte.records.report.sources import Run, read_run
from bitsperbyte.run.folder import write_atomic

REPORT = "report.html"
MAX_RUNS = 24
# `default-src 'none'` lets the page load nothing, whatever a run's files say
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1112px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 44px 0 12px; padding-top: 20px; border-top: 1px solid var(--rule); overflow-wrap: anywhere; }
h3, figure h3 { font-size: 1.05rem; margin: 36px 0 8px; }
p { margin: 8px 0; max-width: 76ch; overflow-wrap: anywhere; }
code { font: 0.9em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.lead, figcaption, .unknown { color: var(--soft); }
.unknown { font-style: italic; }
.absent, .remark { border-left: 3px solid var(--rule); padding: 2px 0 2px 12px; color: var(--soft); }
.remark { border-color: var(--s1); color: var(--ink); }
.verdict { border: 1px solid var(--rule); border-left: 5px solid var(--soft); border-radius: 4px; padding: 6px 16px; margin: 20px 0; }
.verdict.gain { border-left-color: var(--s2); } .verdict.worse, .verdict.explained, .verdict.uncontrolled { border-left-color: var(--s1); }
.heading { font-weight: 600; margin-top: 20px; }
.scroll { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--rule); font-weight: 400; }
thead th { font-weight: 600; } tbody th { color: var(--soft); } .named tbody th { min-width: 7.5rem; }
.number { text-align: right; } td.number, .interval { white-space: nowrap; }
td { min-width: 6rem; overflow-wrap: anywhere; } td.number { min-width: 3.5rem; }
figure { margin: 0; } figcaption { max-width: 76ch; font-size: 0.92rem; margin-top: 6px; }
svg { display: block; width: 100%; height: auto; } svg.narrow { display: none; max-width: 560px; }
.ids code { display: inline-block; margin-right: 8px; } summary { cursor: pointer; margin: 8px 0; }
footer { margin-top: 56px; color: var(--soft); font-size: 0.85rem; border-top: 1px solid var(--rule); padding-top: 12px; }
@media (max-width: 900px) { svg.wide { display: none; } svg.narrow { display: block; } h1 { font-size: 1.35rem; } th, td { padding-right: 10px; } }
@media print { svg.narrow { display: none; } svg.wide { display: block; } }
"""


@dataclass(frozen=True)
class Report:
    """A report as text, and its figures as PNG files by name."""

    html: str
    figures: list[Plot]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of a report, in order. ValueError for none, for too many, for one named twice and for a record that cannot be read."""
    if not paths:
        raise ValueError("a report needs a run: give the folder of one, or several")
    if len(paths) > MAX_RUNS:
        raise ValueError(f"{len(paths)} runs are too many for one report: give at most {MAX_RUNS}")
    runs = [read_run(path, number) for number, path in enumerate(paths)]
    folders = [run.folder.resolve() for run in runs]
    twice = next((path for path, folder in zip(paths, folders, strict=True) if folders.count(folder) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice: a report compares different runs")
    return runs


def make_report(runs: Sequence[Run]) -> Report:
    """The page of these runs: golf runs together, then RandOpt runs."""
    golf, randopt = ([run for run in runs if run.record.track == track] for track in ("golf", "randopt"))
    body, figures = [_opening(runs)], []
    for own, blocks in ((golf, golf_section.blocks), (randopt, randopt_section.blocks)):
        for block in blocks(own) if own else []:
            if isinstance(block, Plot):
                figures.append(block)
                body.append(_figure(block))
            else:
                body.append(block)
    names = ", ".join(escaped(run.record.name) for run in runs)
    html = (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,"><title>{names}</title>'
            f"<style>\n{colour_rules()}{RULES}</style></head>\n<body><main>\n{_lines(body)}\n{_closing(runs)}</main></body></html>\n")
    return Report(html, figures)


def write_report(paths: Sequence[Path], out: Path | None = None) -> tuple[Path, Path]:
    """Write the report of the runs in `paths` and return (the page, the folder of its PNGs).

    Without `out` it is report.html in the folder of the only run, or in the working directory where there are several.
    """
    runs = read_runs(paths)
    out = out or (runs[0].folder / REPORT if len(runs) == 1 else Path(REPORT))
    if out.is_dir():
        raise ValueError(f"{out} is a folder: give a file for --out, such as {out / REPORT}")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {out} must end in .html: the report is one HTML file, its PNGs go into a folder beside it")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; make it first")
    report = make_report(runs)
    folder = out.with_name(f"{out.stem}_png")
    folder.mkdir(exist_ok=True)
    for plot in report.figures:
        write_atomic(folder / f"{plot.name}.png", plot.png())
    for stray in set(folder.glob("*.png")) - {folder / f"{plot.name}.png" for plot in report.figures}:
        stray.unlink()  # of an earlier report in this place: it would pass for one of this
    write_atomic(out, report.html)
    return out, folder


def _opening(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        run = runs[0]
        made = [f"<h1>{text(run.at('/name'))}</h1>", f'<p class="lead">A {text(run.at("/track"))} run, {text(run.at("/status"))}.</p>']
    else:
        named = "; ".join(f"{letter(place)} is {text(run.at('/name'))}, in <code><span data-about={run.number}>{escaped(run.folder)}</span></code>"
                          for place, run in enumerate(_ordered(runs)))
        made = [f"<h1>{' and '.join(text(run.at('/name')) for run in runs[:2]) if len(runs) == 2 else 'Runs side by side'}</h1>",
                f'<p class="lead">{named}.</p>']
    for place, run in enumerate(_ordered(runs)):
        name = f"{letter(place)}: " if len(runs) > 1 else ""
        made.append(paragraphs([name + said for said in remarks(run)], "remark"))
    return "".join(made)


def _ordered(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: (run.record.track != "golf", run.number))


def _figure(plot: Plot) -> str:
    return f"<figure><h3>{escaped(plot.title)}</h3>{plot.svg(WIDE)}{plot.svg(NARROW)}<figcaption>{plot.caption}</figcaption></figure>"


def _closing(runs: Sequence[Run]) -> str:
    files = sorted({name for run in runs for name in ("record.json", *([run.rows_file] if run.steps or run.journal else []))})
    return (f"<footer><p>Made by bitsperbyte {constant(bitsperbyte.__version__)} from {' and '.join(files)} alone. Every number names its place "
            "there: see the attribute data-source of its element.</p></footer>")


def _lines(body: Sequence[str]) -> str:
    return "\n".join(part for part in body if part)
