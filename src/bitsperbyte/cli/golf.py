"""bpb golf: plan, train, eval, sample, submit, check."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, help="Train the best model whose artifact fits under a cap, within a time budget.")

ConfigPath = Annotated[Path, typer.Argument(help="a YAML config, e.g. configs/golf/baseline.yaml")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="override a setting, e.g. --set schedule.wallclock_s=120")]
RunDir = Annotated[Path, typer.Argument(help="the folder of a finished run")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")]


@app.command()
def plan(config: ConfigPath, set_: Overrides = None, device: Device = "auto", as_json: AsJson = False,
         measure: Annotated[bool, typer.Option(help="time a step on this machine")] = True) -> None:
    """Say what a config costs before it trains: parameters, bytes, arithmetic, steps in the budget."""
    from bitsperbyte.golf.config import GolfConfig
    from bitsperbyte.golf.devices import pick_device
    from bitsperbyte.golf.plan import measure_step
    from bitsperbyte.golf.plan import plan as make_plan
    from bitsperbyte.run.config import load_config

    loaded = load_config(config, GolfConfig, set_ or [])
    made = make_plan(loaded, measure_step(loaded, pick_device(device)) if measure else None)
    if as_json:
        print(json.dumps(made.to_dict(), indent=2))
        return
    rows: list[tuple[str, str]] = [(f"parameters, {part}", f"{n:,}") for part, n in made.parameters.items()]
    rows += [("blocks, unique / applied", f"{made.blocks[0]} / {made.blocks[1]}"),
             ("training bytes (embedding bf16, rest float32)", f"{made.fp_bytes:,}"), ("int8 payload", f"{made.int8_bytes:,}")]
    if made.payload_bytes != made.int8_bytes:
        rows.append((f"{loaded.artifact.scheme} payload", f"{made.payload_bytes:,}"))
    rows.append(("training bytes / payload", f"{made.payload_ratio:.2f}"))
    if made.file_bytes:
        rows.append((f"expected file ({loaded.artifact.codec})", f"{made.file_bytes[0]:,} to {made.file_bytes[1]:,}"))
    rows += [("code", f"{made.code_bytes:,}, one {made.code_form} script"), ("cap", f"{made.cap_bytes:,}"),
             ("floating-point operations a token", f"{made.flops_per_token / 1e6:,.1f} million"),
             ("memory, about", f"{made.memory_bytes / 2**30:.1f} GiB")]
    rows += [(f"{g.optimizer}, {g.name}", f"lr {g.base_lr}, {len(g.param_names)} tensors, {g.num_parameters:,} parameters")
             for g in made.groups]
    if made.step:
        rows += [(f"step on this {made.step.device}", f"{made.step.step_s * 1e3:,.1f} ms"), ("measured on", made.step.how)]
    if made.num_steps:
        rows += [("steps in the budget", f"{made.num_steps:,}"), ("tokens in the budget", f"{made.num_tokens:,}")]
    if made.warmdown:
        rows.append(("learning rate", made.warmdown))
    _print_table(f"plan of {loaded.name}", rows)
    for warning in made.warnings:
        Console().print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


@app.command()
def train(config: ConfigPath, run_dir: Annotated[Path, typer.Option(help="where everything of this run goes")],
          set_: Overrides = None,
          seeds: Annotated[str | None, typer.Option(help="several runs, e.g. 1,2,3: RUN_DIR/seed_1 and so on")] = None,
          resume: Annotated[bool, typer.Option("--resume", help="go on with an interrupted or killed run")] = False) -> None:
    """Train a config; under torchrun on several GPUs. Ends with the artifact's score and the record."""
    from bitsperbyte.golf.config import GolfConfig
    from bitsperbyte.golf.session import train as run_training
    from bitsperbyte.run.config import load_config

    if seeds is None:
        _print_result(run_training(load_config(config, GolfConfig, set_ or []), run_dir, resume=resume), run_dir)
        return
    from bitsperbyte.golf.seeds import parse_seeds, train_seeds

    overrides = set_ or []
    configs = {seed: load_config(config, GolfConfig, [*overrides, f"train.seed={seed}"]) for seed in parse_seeds(seeds)}
    for seed, record in train_seeds(configs, run_dir, resume=resume).items():
        _print_result(record, run_dir / f"seed_{seed}")


@app.command("eval")
def evaluate(run_dir: RunDir,
             text: Annotated[Path | None, typer.Option(help="text, Markdown, JSONL or Parquet, file or folder")] = None,
             data: Annotated[Path | None, typer.Option(help="a folder of shards: its validation split")] = None,
             window: Annotated[int | None, typer.Option(help="tokens of context and targets; default: the run's")] = None,
             stride: Annotated[int | None, typer.Option(help="slide, scoring the last STRIDE tokens; default: non-overlapping")] = None,
             isolated: Annotated[bool, typer.Option("--isolated", help="context never crosses a document")] = False,
             drop_tail: Annotated[bool, typer.Option("--drop-tail", help="leave out a shorter last chunk (the challenge)")] = False,
             label: Annotated[str | None, typer.Option(help="also add the score to the run's record under this label")] = None,
             device: Device = "auto", as_json: AsJson = False) -> None:
    """Score a finished run's artifact: bits per byte of a text under stated windows."""
    from bitsperbyte.golf.scoring import score_run

    row = score_run(run_dir, text=text, data=data, window=window, stride=stride, isolated=isolated, drop_tail=drop_tail,
                    label=label, device_name=device, show_progress=not as_json)
    if as_json:
        print(json.dumps(row.model_dump(mode="json"), indent=2))
        return
    windows = f"stride {row.stride} of {row.window}" if row.stride else f"non-overlapping {row.window}"
    _print_table(f"score of {run_dir}", [
        ("text", row.text), ("bits per byte", f"{row.bpb:.6f}"), ("nats per token", f"{row.nats_per_token:.6f}"),
        ("bytes per token", f"{row.bytes_per_token:.4f}"), ("tokens / bytes", f"{row.num_tokens:,} / {row.num_bytes:,}"),
        ("windows, documents", f"{windows}, {row.documents}"), ("split sha256", row.split_sha256), ("seconds", f"{row.seconds:.1f}")])


@app.command()
def sample(run_dir: RunDir, prompt: Annotated[str, typer.Option(help="text to continue")] = "",
           num_tokens: Annotated[int, typer.Option(min=1)] = 200, temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.8,
           top_k: Annotated[int, typer.Option(min=1)] = 50, seed: int = 0, device: Device = "auto") -> None:
    """Continue a prompt with a finished run's artifact."""
    from bitsperbyte.golf.devices import pick_device
    from bitsperbyte.golf.sample import sample as continue_prompt
    from bitsperbyte.golf.scoring import trained_window
    from bitsperbyte.golf.session import load_run

    model, tokenizer, _ = load_run(run_dir)
    model.place(pick_device(device))
    continuation = continue_prompt(model, tokenizer, prompt, num_tokens=num_tokens, temperature=temperature, top_k=top_k, seed=seed,
                                   context=trained_window(run_dir))
    print(tokenizer.decode(tokenizer.encode(prompt)) + continuation)  # the prompt as the model saw it: normalised


@app.command()
def submit(run_dir: Annotated[Path, typer.Argument(help="the folder of a finished run, or of its seed_1, seed_2, ...")],
           out: Annotated[Path, typer.Option(help="the folder to write; it must not exist")],
           code: Annotated[str, typer.Option(help="form of the script: plain, minified, compressed, or auto: the most readable "
                                                  "that fits")] = "auto",
           author: Annotated[str | None, typer.Option(help="your name, for submission.json")] = None,
           github_id: Annotated[str | None, typer.Option(help="your GitHub account")] = None,
           name: Annotated[str | None, typer.Option(help="title of the submission; default: the run's name")] = None,
           blurb: Annotated[str | None, typer.Option(help="what it does, in a sentence or two")] = None) -> None:
    """Write the challenge's submission folder: one script, the artifact, logs, submission.json, README."""
    from bitsperbyte.golf.submit import submit as write_submission

    made = write_submission(run_dir, out, code=code, author=author, github_id=github_id, name=name, blurb=blurb)
    f = made.facts
    rows = [(file, f"{size:,} bytes") for file, size in made.files.items()]
    rows += [("counted", f"{f['bytes_code']:,} of {f['code_form']} code + {f['bytes_artifact']:,} of weights = {f['bytes_total']:,}"),
             ("left under the cap", f"{f['bytes_margin']:,} of {f['bytes_cap']:,} bytes"),
             ("val_bpb", f"{f['val_bpb']:.8f}, " + (f"mean of {len(f['seeds'])} seeds, sd {f['val_bpb_std']:.6f}" if f["val_bpb_std"] is not None
                                                    else f"seed {f['seeds'][0]}"))]
    if missing := [option for option, key in (("--author", "author"), ("--github-id", "github_id"), ("--blurb", "blurb")) if f[key] is None]:
        rows.append(("null in submission.json", ", ".join(missing)))
    _print_table(str(made.path), rows)


@app.command()
def check(folder: Annotated[Path, typer.Argument(help="a submission folder of the challenge, yours or anyone's")],
          data: Annotated[Path | None, typer.Option(help="a folder of shards: score the artifact on its validation split again")] = None,
          budget_s: Annotated[float, typer.Option(help="seconds of training that are allowed")] = 600.0,
          eval_budget_s: Annotated[float, typer.Option(help="seconds of evaluation that are allowed")] = 600.0,
          run: Annotated[bool, typer.Option("--run", help="also run a few steps of its script, without the network")] = False,
          limit_s: Annotated[float, typer.Option(help="seconds after which a script of the folder that was run is ended")] = 600.0,
          device: Device = "auto", as_json: AsJson = False) -> None:
    """Check a submission folder without trusting it: files, code, sizes, logs, seeds, budget, score. Exit code 1 where a check fails."""
    from rich.markup import escape

    from bitsperbyte.golf.check.checker import check_submission
    from bitsperbyte.golf.findings import failed

    findings = check_submission(folder, data=data, budget_s=budget_s, evaluation_budget_s=eval_budget_s, run=run, device_name=device,
                                limit_s=limit_s)
    wrong = failed(findings)
    if as_json:
        print(json.dumps({"folder": str(folder), "failed": [f.check for f in wrong], "findings": [f.to_dict() for f in findings]}, indent=2))
    else:
        _print_table(f"check of {folder}", [(f.check, escape(f.line)) for f in findings])
    if wrong:
        raise typer.Exit(1)


@app.command()
def legal(artifact: Annotated[Path, typer.Argument(help="an artifact.bpb, or the folder of a finished run")],
          tokenizer: Annotated[Path | None, typer.Option(help="its tokenizer; default: the one beside it")] = None,
          text: Annotated[Path | None, typer.Option(help="text to check with; default: the documentation that Python carries")] = None,
          data: Annotated[Path | None, typer.Option(help="a folder of shards: check with its validation split")] = None,
          window: Annotated[int | None, typer.Option(help="default: that of the config beside it, else 1024")] = None,
          stride: Annotated[int | None, typer.Option(help="slide, scoring the last STRIDE tokens")] = None,
          isolated: Annotated[bool | None, typer.Option("--isolated/--across", help="whether documents are scored alone")] = None,
          cuts: Annotated[int, typer.Option(min=1, help="places at which later tokens are changed, in windows of full length")] = 64,
          exhaustive: Annotated[bool, typer.Option("--exhaustive", help="every such place: slow without a GPU")] = False,
          seed: int = 0, device: Device = "auto", as_json: AsJson = False) -> None:
    """Check that an artifact's predictions follow from earlier tokens alone and are distributions. Exit code 1 where a check fails."""
    from rich.markup import escape

    from bitsperbyte.golf.findings import failed
    from bitsperbyte.golf.legal_artifact import check_artifact

    console = Console(stderr=True)
    with console.status("reading") as status:
        made = check_artifact(artifact, tokenizer=tokenizer, text=text, data=data, window=window, stride=stride, isolated=isolated,
                              num_cuts=cuts, exhaustive=exhaustive, seed=seed, device_name=device,
                              progress=lambda check: status.update(f"checking {check}"))
    wrong = failed(made.findings)
    if as_json:
        print(json.dumps({"artifact": str(made.artifact), "text": made.text, "protocol": made.protocol.describe(), "device": made.device,
                          "seed": seed, "failed": [f.check for f in wrong], "findings": [f.to_dict() for f in made.findings]}, indent=2))
    else:
        rows = [(f.check, escape(f.line)) for f in made.findings]
        _print_table(f"legality of {made.artifact}", [*rows, ("checked with", f"{escape(made.text)}; {made.protocol.describe()}; {made.device}")])
    if wrong:
        raise typer.Exit(1)


def _print_result(record: Any, run_dir: Path) -> None:
    from bitsperbyte.golf.session import ARTIFACT, RECORD

    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the main rank speaks for all
    t, a = record.training, record.artifact
    rows = [("status", record.status), ("steps / tokens", f"{t.num_steps:,} / {t.num_tokens:,}"),
            ("training", f"{t.train_s:.1f} s")]
    if t.step_ms_p50 is not None:
        rows.append(("step", f"p50 {t.step_ms_p50:.1f} ms, p95 {t.step_ms_p95:.1f} ms"))
    if t.num_resumes:
        lost = f"{t.lost_steps} steps trained again, {t.charged_lost_s:.1f} s charged for them"
        rows.append(("resumed", f"{t.num_resumes} times, {lost}"))
    rows += [(f"bpb, {s.label.replace('_', ' ')}", f"{s.bpb:.4f} ({s.bytes_per_token:.3f} bytes/token; {_windows(s)})")
             for s in record.scores]
    if a:
        rows += [("artifact", f"{a.weight_bytes:,} bytes, {a.scheme} + {a.codec}, {a.bits_per_weight:.2f} bits a weight"),
                 ("code", f"{a.code_bytes:,} bytes, one {a.code_form} script"),
                 ("total against the cap", f"{a.total_bytes:,} of {a.cap_bytes:,} bytes, {a.margin_bytes:,} left")]
    rows += [("record", str(run_dir / RECORD)), ("artifact file", str(run_dir / ARTIFACT)),
             ("log, metrics", f"{run_dir}/train.log, metrics.jsonl")]
    _print_table(f"{record.name}, seed {record.seed}", rows)


def _windows(row: Any) -> str:
    return f"stride {row.stride} of {row.window}" if row.stride else f"non-overlapping {row.window}"


def _print_table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, highlight=False)
