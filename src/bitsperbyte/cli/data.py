"""`bpb data`: text from this machine or the hub into token shards and held-out slices."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.shards import MANIFEST
from bitsperbyte.text.slices import MAX_CHARS, MIN_CHARS, Request, make_slice
from bitsperbyte.text.tokenizers import WARN_LOST_SHARE

app = typer.Typer(no_args_is_help=True, help="Make token shards and held-out slices from text.")


@app.callback()
def data() -> None:
    """Make token shards from text, with exact byte counts, and held-out slices pinned by sha256."""


@app.command(name="prepare")
def prepare_command(
    source: Annotated[str, typer.Option(help="embedded | FILE | DIR | fineweb | challenge. Files: .txt, .md, .jsonl "
                                             "(plain, .gz, "
                                             ".xz, .zst), .parquet")],
    out: Annotated[Path, typer.Option(help="The folder to make; its manifest.json is written last.")],
    tokenizer: Annotated[str | None, typer.Option(help="train:N | byte | sp1024 (the challenge's) | a .model or "
                                                       "tokenizer.json. "
                                                       "Default: train:1024; for the challenge sp1024.")] = None,
    val_source: Annotated[str | None, typer.Option(help="Take all of this (embedded | FILE | DIR) for validation, and all "
                                                        "of --source for training.")] = None,
    val_fraction: Annotated[float | None, typer.Option(help="Share of documents for validation, chosen by the hash of "
                                                            "their text. Default: 0.05.")] = None,
    val_docs: Annotated[int | None, typer.Option(help="Take the first so many documents for validation "
                                                      "instead.")] = None,
    limit_docs: Annotated[int | None, typer.Option(help="Stop after so many documents of --source.")] = None,
    field: Annotated[str, typer.Option(help="The field or column that holds the text, in .jsonl and .parquet "
                                            "files.")] = "text",
    seed: Annotated[int, typer.Option(help="Another seed puts other documents into validation.")] = 0,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of one shard.")] = 100_000_000,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub; resolved once and pinned. "
                                                      "Default: main.")] = None,
    num_shards: Annotated[int, typer.Option(help="Train shards of the challenge, or Parquet files (2 GB each) of "
                                                 "fineweb.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON and nothing else.")] = False,
) -> None:
    """Split, tokenise and check documents; write shards and a manifest with the sha256 of every file."""
    there = (out / MANIFEST).exists()
    with _progress(as_json) as show, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the tokenizer's loss: the summary below says it
        manifest = prepare(source, tokenizer, out, val_source=val_source, val_fraction=val_fraction, val_docs=val_docs,
                           limit_docs=limit_docs, field=field, seed=seed, shard_tokens=shard_tokens, revision=revision,
                           num_shards=num_shards, progress=show)
    if as_json:
        typer.echo(json.dumps(manifest, indent=1))
    else:
        _print_summary(Console(), manifest, out, there)


@app.command(name="slice")
def slice_command(
    source: Annotated[str, typer.Option(help="fineweb | fineweb-edu (the last Parquet file of the sample of 10 billion tokens, "
                                             "2 GB once) | embedded | FILE | DIR")],
    out: Annotated[Path, typer.Option(help="The .jsonl file to make; FILE.manifest.json is written beside it, last.")],
    num_docs: Annotated[int, typer.Option(help="Documents to take.")] = 256,
    min_chars: Annotated[int, typer.Option(help="Pass over documents that are shorter.")] = MIN_CHARS,
    max_chars: Annotated[int, typer.Option(help="Pass over documents that are longer.")] = MAX_CHARS,
    skip_docs: Annotated[int, typer.Option(help="Leave out the first so many of those that remain.")] = 0,
    field: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub; resolved once and pinned. "
                                                      "Default: main.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON and nothing else.")] = False,
) -> None:
    """Pin documents that models are scored on and never trained on: the same bytes for everybody, by sha256."""
    request = Request(source, num_docs, min_chars, max_chars, skip_docs, field, revision)
    with _progress(as_json) as show:
        manifest, there = make_slice(request, out, progress=show)
    if as_json:
        typer.echo(json.dumps(manifest, indent=1))
        return
    of = manifest["source"] + (f" at {manifest['revision']}" if manifest["revision"] else "")
    Console().print(f"{'already there' if there else 'written'}: {out} ({manifest['num_docs']:,} documents of {of}, "
                    f"{manifest['num_bytes']:,} bytes, sha256 {manifest['sha256']})", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar on a terminal's standard error, and the function that moves it: (what is being done, units done, units in all)."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"),
               TimeElapsedColumn())
    with Progress(*columns, console=console, disable=as_json or not console.is_terminal, transient=True) as bars:
        task = bars.add_task("reading documents", total=None, amount="")
        yield lambda what, done, total: bars.update(task, description=what, completed=done, total=total,
                                                    amount=_amount(what, done, total))


def _amount(what: str, done: int, total: int | None) -> str:
    if what == "fetching":
        return f"{done / 1e6:,.0f} of {(total or 0) / 1e6:,.0f} MB"
    return (f"{done:,}" if total is None else f"{done:,} of {total:,}") if done else ""


def _print_summary(console: Console, manifest: dict[str, Any], out: Path, there: bool) -> None:
    table = Table("split", "documents", "tokens", "bytes", "bytes per token", "lost in normalising", "shards")
    for split, part in manifest["splits"].items():
        raw, counted = part["num_bytes"], part["counted_bytes"]
        lost = manifest["proof"].get(split, {}).get("lost_share")
        num_bytes = counted if raw is None else raw
        table.add_row(split, f"{part['num_documents']:,}", f"{part['num_tokens']:,}", f"{num_bytes:,}",
                      f"{counted / part['num_tokens']:.4f}", "not known" if lost is None else f"{lost:.4%}",
                      str(len(part["files"])))
        if lost is not None and lost > WARN_LOST_SHARE:
            console.print(f"warning: the tokenizer's normaliser changed {lost:.2%} of the bytes of "
                          f"{split}", style="yellow")
    console.print(table)
    if manifest["num_duplicates_dropped"]:
        console.print(f"{manifest['num_duplicates_dropped']:,} exact copies of validation documents dropped")
    for reason, count in manifest["skipped"].items():
        console.print(f"{count:,} {reason} passed over")
    tokenizer = manifest["tokenizer"]
    revision = f" at {manifest['revision']}" if manifest["revision"] else ""
    console.print(f"{'already there' if there else 'written'}: {out} ({manifest['source']}{revision}, tokenizer "
                  f"{tokenizer['name']}, "
                  f"{tokenizer['vocab_size']} pieces)", highlight=False, soft_wrap=True)
