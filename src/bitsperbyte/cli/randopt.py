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
    """The run's end as a table: base, ensemble and controls with their intervals, tests, and where everything lies."""
    found = record.randopt.model_dump()
    k = found["ensemble"]["k"]
    rows = [("status", record.status),
            ("population", f"{found['population']['size']} seeds, sigmas {', '.join(f'{s:g}' for s in found['population']['sigmas'])}, "
                           f"best mean at {found['population']['best_sigma']:g}"),
            ("train reward, base", f"{found['base']['train_reward']:.4f}"),
            ("test, base", _figure(found["base"]["test"])),
            (f"test, ensemble of the best {k}", _figure(found["ensemble"]["test"]))]
    rows += [(f"  secondary: best {row['k']}", _figure(row["test"])) for row in found["secondary"]]
    rows += [(f"control: {name.replace('_', ' ')}", _control(control)) for name, control in found["controls"].items()]
    rows += [(f"{test['a']} - {test['b']}".replace("_", " "), _test(test)) for test in found["tests"]]
    rows += _more_rows(found)
    rows += [("record", str(run_dir / "record.json")), ("journal, log", f"{run_dir}/journal.jsonl, run.log")]
    _print_table(f"{record.name}, seed {record.seed}", rows)


def _figure(test: dict[str, Any]) -> str:
    if "bpb" in test:
        return f"{test['bpb']:.4f} bpb ({test['bytes_per_token']:.2f} bytes/token)"
    return f"{test['accuracy']:.4f} [{test['low']:.4f}, {test['high']:.4f}]  {test['num_correct']} of {test['num']}"


def _control(control: dict[str, Any]) -> str:
    if not control["enabled"]:
        return f"off: {control['why']}"
    if "mean" in control:
        return (f"mean {control['mean']:.4f}, range {control['low']:.4f} to {control['high']:.4f} ({control['num_subsets']} draws of "
                f"{control['k']})")
    return _figure(control["test"])


def _test(test: dict[str, Any]) -> str:
    text = f"{test['difference']:+.4f} [{test['low']:+.4f}, {test['high']:+.4f}]"
    return text + (f", McNemar p = {test['p_mcnemar']:.2g}" if test.get("p_mcnemar") is not None else "")


def _more_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    correlation = found.get("spearman") or {}
    if correlation.get("rho") is not None:
        interval = f"[{correlation['low']:+.3f}, {correlation['high']:+.3f}]"
        rows.append(("Spearman, train reward and test", f"{correlation['rho']:+.3f} {interval} over {correlation['num']} members"))
    heldout = found.get("heldout") or {}
    for name in ("base", "mixture", "mean_member"):
        if heldout.get(name):
            rows.append((f"held-out bpb, {name.replace('_', ' ')}", _figure(heldout[name])))
    if mixtures := heldout.get("random_mixture"):
        spread = f"range {mixtures['low']:.4f} to {mixtures['high']:.4f}"
        rows.append(("held-out bpb, random mixtures", f"mean {mixtures['mean_bpb']:.4f}, {spread}"))
    sampling = found.get("throughput", {}).get("search")
    if sampling:
        rows.append(("speed of the search", f"{sampling['seeds_per_s']:.2f} seeds/s, {sampling['generated_tokens_per_s']:,.0f} tok/s, "
                                            f"{sampling['prompts_per_s']:.1f} prompts/s"))
    return rows
