"""bpb records: render, list, show, add, compare."""

import json
from pathlib import Path
from typing import Annotated

import typer

from bitsperbyte.cli.compare import compare

app = typer.Typer(no_args_is_help=True, help="Evidence of finished runs, and the leaderboard made of it.")
app.command()(compare)

Root = Annotated[Path, typer.Option(help="the folder of the records")]


@app.command()
def render(
    root: Root = Path("records"),
    out: Annotated[Path | None, typer.Option(help="default: RECORDS.md beside the folder of the records")] = None,
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail when the file is not current")] = False,
) -> None:
    """Write RECORDS.md from the records."""
    from bitsperbyte.records.leaderboard import render as render_text
    from bitsperbyte.run.folder import write_atomic

    path = out or root.parent / "RECORDS.md"
    text = render_text(root)
    current = path.is_file() and path.read_bytes() == text.encode()
    if check and not current:
        raise ValueError(f"{path} is not what the records in {root} generate: run `bpb records render`")
    if not current:
        write_atomic(path, text)
    print(f"{path} is current" if current else f"wrote {path}")


@app.command("list")
def list_records(root: Root = Path("records")) -> None:
    """One line for each record: folder, status, and its result: bpb and bytes of an artifact; base, ensemble and random ensembles."""
    from bitsperbyte.records.leaderboard import randopt_result
    from bitsperbyte.records.store import iter_records

    for folder, record in iter_records(root):
        if record.imported:
            published = ", ".join(f"{s.label} {s.bpb:.{s.digits or 0}f}" for s in record.imported.scores if s.bpb is not None)
            print(f"{folder}  imported  {f'{published} bpb as published' if published else 'no score'}")
            continue
        if record.track == "randopt":
            print(f"{folder}  {record.status}  {randopt_result(record.randopt)}")
            continue
        row = record.score("artifact")
        bpb = f"{row.bpb:.4f} bpb ({row.bytes_per_token:.3f} bytes/token)" if row else "no score"
        size = (
            f"{record.artifact.total_bytes:,} bytes"
            if record.artifact and record.artifact.total_bytes
            else "no artifact"
        )
        print(f"{folder}  {record.status}  {bpb}  {size}")


@app.command()
def show(path: Annotated[Path, typer.Argument(help="a record.json, or a folder that holds one")]) -> None:
    """Check a record and print it as JSON."""
    from bitsperbyte.records.store import read_record

    print(json.dumps(read_record(path).model_dump(mode="json"), indent=2, ensure_ascii=False))


@app.command()
def add(
    run_dir: Annotated[Path, typer.Argument(help="the folder of a run that has ended")],
    root: Root = Path("records"),
    slug: Annotated[str | None, typer.Option(help="end of the folder's name; default: the run's name and seed")] = None,
) -> None:
    """Copy a run's record, config and log to the records; `render` then lists it."""
    from bitsperbyte.records.store import add_record

    print(f"added {add_record(run_dir, root, slug)}; now run `bpb records render`")


@app.command("import")
def import_runs(
    paths: Annotated[list[Path], typer.Argument(help="a submission's folder, train logs, submission.json, RandOpt's results.json")],
    out: Annotated[Path, typer.Option(help="the folder that the records' folders are written to")] = Path("imported"),
    name: Annotated[str | None, typer.Option(help="the run's name; default: that of the folder or file")] = None,
    state: Annotated[list[str] | None, typer.Option(help="what the files do not say of the scores: window=1024, stride=64 or none, "
                                                         "documents=across, drop_tail=false, text=..., split_sha256=...")] = None,
) -> None:
    """Make records of runs that others published; `add` then takes them as it takes own runs."""
    from bitsperbyte.records.importers import import_runs as read_and_write

    for folder, record in read_and_write(paths, out, name=name, state=state or ()):
        part = record.imported
        scores = [f"{s.label} {s.bpb:.{s.digits or 0}f} bpb" for s in part.scores if s.bpb is not None]
        print(f"{folder}: {'; '.join(scores) or 'no score in bits per byte'}")
        for sentence in part.unread:
            print(f"  not understood, or contradicts itself: {sentence}")
