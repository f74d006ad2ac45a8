"""bpb randopt: run, plan, export."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Improve a pretrained model by random perturbations and a vote, without gradients.")

ConfigPath = Annotated[Path, typer.Argument(help="a YAML config, e.g. configs/randopt/smoke_cpu.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="override a setting, e.g. --set search.population=128")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")]


@app.command()
def run(config: ConfigPath,
        run_dir: Annotated[Path | None, typer.Option(help="where everything of this run goes; default: runs/NAME")] = None,
        set_: Overrides = None,
        probe_top: Annotated[int | None, typer.Option(min=0, help="also run so many of the best members alone on the test set")] = None,
        resume: Annotated[bool, typer.Option("--resume", help="go on with a killed run, or grow a population")] = False) -> None:
    """Search a population, let the best K vote, run the controls, and record it all."""
    from bitsperbyte.randopt.config import RandOptConfig
    from bitsperbyte.randopt.session import run as run_search
    from bitsperbyte.run.config import load_config

    overrides = [*(set_ or []), *([] if probe_top is None else [f"probes.top={probe_top}"])]
    loaded = load_config(config, RandOptConfig, overrides)
    run_dir = run_dir or Path("runs") / loaded.name
    print_result(run_search(loaded, run_dir, resume=resume), run_dir)


@app.command()
def plan(config: ConfigPath, set_: Overrides = None, as_json: AsJson = False) -> None:
    """Say what a config needs before it runs: memory by part and GPU, seconds a seed, hours."""
    from bitsperbyte.randopt.config import RandOptConfig
    from bitsperbyte.randopt.plan import plan as make_plan
    from bitsperbyte.run.config import load_config

    made = make_plan(load_config(config, RandOptConfig, set_ or []))
    if as_json:
        print(json.dumps(made.to_dict(), indent=2))
        return
    _print_table(made.title, made.rows())
    for warning in made.warnings:
        Console().print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


@app.command()
def export(record: Annotated[Path, typer.Argument(help="the record.json of a finished run, or its folder")],
           out: Annotated[Path, typer.Option(help="the folder to make")],
           rank: Annotated[int, typer.Option(min=1, help="the member's place by train reward, 1 is the best")] = 1,
           model: Annotated[str | None, typer.Option(help="where the base model lies now, if elsewhere")] = None) -> None:
    """Write one member as a checkpoint of its own, which transformers loads without bitsperbyte."""
    from bitsperbyte.randopt.export import export_member

    print(export_member(record, rank, out, model=model, say=lambda text: Console(stderr=True).print(text, highlight=False)))


def _print_table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)


def print_result(record: Any, run_dir: Path) -> None:
    """What the run found, and where it lies."""
    from bitsperbyte.randopt.summary import summary

    print(f"{record.name}, seed {record.seed}: {record.status}")
    print("\n".join(summary(record.randopt.model_dump())))
    print(f"record, journal, log: {run_dir}/record.json, journal.jsonl, run.log")
