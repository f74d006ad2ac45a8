"""README.md of a submission's folder, generated from the figures of its submission.json and the first seed's record."""

from typing import Any

from bitsperbyte.records.schema import Record


def render_readme(facts: dict[str, Any], record: Record, files: dict[str, int]) -> str:
    """Markdown; `files` maps the other files of the folder to their bytes."""
    parts = [f"# {facts['name']}", _summary(facts)]
    if facts["blurb"]:
        parts.insert(1, facts["blurb"].strip())
    parts += ["## Scores", _scores(facts), "## Size", _size(facts), "## Time and machine", _time(facts, record), "## Data", _data(facts),
              "## How to run it", _commands(facts, record, files),
              "## Where the code comes from", _code(facts, record), "## Files", _files(facts, files)]
    return "\n\n".join(parts) + "\n"


def windows(evaluation: dict[str, Any]) -> str:
    """The evaluation's windows in words."""
    cut = f"sliding windows of {evaluation['window']:,} tokens, stride {evaluation['stride']:,}" if evaluation["stride"] else (
        f"non-overlapping windows of {evaluation['window']:,} tokens")
    return cut + (", context across documents" if evaluation["documents"] == "across" else ", each document by itself") + (
        ", the shorter last chunk left out" if evaluation["drop_tail"] else ", every token scored once")


def _summary(facts: dict[str, Any]) -> str:
    n = len(facts["seeds"])
    spread = f", standard deviation {facts['val_bpb_std']:.6f}, n = {n}" if n > 1 else ", one seed"
    of = f"mean over seeds {', '.join(map(str, facts['seeds']))}" if n > 1 else f"seed {facts['seeds'][0]}"
    return (f"**{facts['val_bpb']:.8f} bits per byte** ({of}{spread}) on the validation text, {windows(facts['evaluation'])}. "
            f"{facts['bytes_total']:,} of {facts['bytes_cap']:,} bytes. {facts['hardware']}.")


def _scores(facts: dict[str, Any]) -> str:
    shipped = facts["artifact"]["seed"]
    rows = ["| seed | val_loss | val_bpb | val_bpb before quantisation | steps | training s | artifact bytes |",
            "|---:|---:|---:|---:|---:|---:|---:|"]
    for seed, r in facts["seed_results"].items():
        rows.append(f"| {seed} | {r['val_loss']:.8f} | {r['val_bpb']:.8f} | {r['pre_quant_val_bpb']:.8f} | {_whole(r['step_stop'])} | "
                    f"{_seconds(r['wallclock_seconds'])} | {r['bytes_artifact']:,} |")
    if len(facts["seeds"]) > 1:
        rows.append(f"| mean | {facts['val_loss']:.8f} | {facts['val_bpb']:.8f} | {facts['pre_quant_val_bpb']:.8f} | "
                    f"{_whole(facts['step_stop'])} | {_seconds(facts['wallclock_seconds'])} | |")
        rows.append(f"| sd | {facts['val_loss_std']:.8f} | {facts['val_bpb_std']:.8f} | | | | |")
    e = facts["evaluation"]
    text = (f"Scored is the artifact of each seed as read back from disk, over {e['num_tokens']:,} tokens that stand for {e['num_bytes']:,} bytes "
            f"({e['bytes_per_token']:.6f} bytes a token): {windows(e)}. val_loss is in nats a token; "
            "val_bpb = summed nats / (ln 2 x bytes of those same tokens).")
    if len(facts["seeds"]) > 1:
        text += f" The figure of this submission is the mean. `artifact.bpb` is that of seed {shipped}, the first listed, whatever its rank."
    return "\n".join(rows) + "\n\n" + text


def _size(facts: dict[str, Any]) -> str:
    rows = [f"| `train_gpt.py` ({facts['code_form']}) | {facts['bytes_code']:,} |",
            f"| `artifact.bpb` ({facts['artifact']['scheme']} + {facts['artifact']['codec']}) | {facts['bytes_artifact']:,} |",
            f"| total | {facts['bytes_total']:,} |", f"| cap | {facts['bytes_cap']:,} |", f"| left | {facts['bytes_margin']:,} |"]
    text = "| | bytes |\n|---|---:|\n" + "\n".join(rows)
    if len(facts["seeds"]) > 1:
        most = max(r["bytes_total"] for r in facts["seed_results"].values())
        text += f"\n\nThe largest total over the seeds is {most:,} bytes."
    return text + "\n\nThe tokenizer is not counted, as in the challenge."


def _time(facts: dict[str, Any], record: Record) -> str:
    budget = facts["budget_seconds"]
    if budget is None:
        clock = "Training ended at a number of steps; it had no budget of time."
    elif facts["within_budget"]:
        clock = (f"Budget of {budget:g} s of training: kept. The last step of every seed began within it; compiling, warm-up, validation and "
                 "saving are off the clock.")
    else:
        clock = f"Budget of {budget:g} s of training: NOT kept by every seed."
    resumed = [f"seed {seed} ({r['num_resumes']} times)" for seed, r in facts["seed_results"].items() if r["num_resumes"]]
    if resumed:
        clock += f" Resumed after an interruption: {', '.join(resumed)}; the seconds of lost steps stay charged."
    lines = [clock, f"- hardware: {facts['hardware']}", f"- PyTorch {facts['pytorch_version']}, Python {facts['python_version']}",
             f"- {_whole(facts['num_parameters'])} parameters, {_whole(facts['train_tokens'])} training tokens"]
    step_ms = record.training.step_ms_p50
    if step_ms is not None:
        lines.append(f"- a step of seed {record.seed}: median {step_ms:.2f} ms")
    if facts["track"] != "track_10min_16mb":
        lines.append("- track: non-record (another machine, time or cap than the record track's 8 x H100 SXM, 600 s and 16,000,000 bytes)")
    return lines[0] + "\n\n" + "\n".join(lines[1:])


def _data(facts: dict[str, Any]) -> str:
    d, t = facts["data"], facts["tokenizer"]
    lines = [f"- source: {d['source']}", f"- sha256 of the training split: `{d['train_sha256']}`",
             f"- sha256 of the validation split: `{d['val_sha256']}`"]
    if d["scored_split_sha256"] != d["val_sha256"]:
        lines.append(f"- scored part of it: `{d['scored_split_sha256']}`")
    lines.append(f"- tokenizer: {t['name']}, {t['vocab_size']:,} pieces, sha256 `{t['sha256']}`")
    return "\n".join(lines) + "\n\nA split's sha256 is over its shards' sha256s and token counts, in order."


def _commands(facts: dict[str, Any], record: Record, files: dict[str, int]) -> str:
    num_devices = record.provenance.get("num_devices") or 1
    launch = "python" if num_devices == 1 else f"torchrun --standalone --nproc-per-node={num_devices}"
    install = "pip install -r requirements.txt\n" if "requirements.txt" in files else ""
    return ("From inside this folder, with the token shards in a folder DATA_PATH:\n\n```sh\n" + install +
            "# train as recorded, pack, read back, score; one process a GPU\n"
            f"DATA_PATH=... SEED={facts['seeds'][0]} {launch} train_gpt.py\n"
            "# score the artifact without training\n"
            "DATA_PATH=... python train_gpt.py --eval-only artifact.bpb\n```\n\n"
            f"The second prints, for this artifact, `val_loss:{facts['artifact']['val_loss']:.8f} "
            f"val_bpb:{facts['artifact']['val_bpb']:.8f}`, and whether the validation tokens are those of the record. The last digits can differ "
            "on another kind of device. Hyperparameters are in the script and not in the environment; it reads DATA_PATH, TOKENIZER_PATH "
            "(default: the tokenizer in this folder), RUN_ID and SEED. Under torchrun it trains on as many devices as there are processes. It "
            "writes logs/RUN_ID.txt and logs/RUN_ID.artifact.bpb.")


def _code(facts: dict[str, Any], record: Record) -> str:
    text = ("`train_gpt.py` is flattened from the modules of bitsperbyte. The logs were written by its own training command, which takes the "
            "same step, from the same modules, that the script takes.")
    if facts["code_as_recorded"]:
        text += " It is, byte for byte, the script that the record of the run counted."
    else:
        counted = record.artifact.code_bytes if record.artifact else None
        what = "the sources as they stood" if facts["code_as_recorded"] is None else "another script (another form of it, or from other sources)"
        text += (f" The record and the log of the run counted {what}, {_whole(counted)} bytes of code; the bytes above are those of this "
                 "folder.")
    if facts["source_commit"]:
        text += f" The run was made from commit `{facts['source_commit']}`" + (", with changes." if facts["source_dirty"] else ".")
    elif facts["source_sha256"]:
        text += f" The run was made from sources whose sha256 is `{facts['source_sha256']}`."
    if facts["code_form"] == "compressed":
        text += ("\n\nThe script is compressed. Its text: `python -c \"import runpy; print(runpy.run_path('train_gpt.py')['SOURCE'])\"`.")
    return text


def _files(facts: dict[str, Any], files: dict[str, int]) -> str:
    about = {"train_gpt.py": "trains, packs, scores", facts["tokenizer"]["file"]: "the tokenizer", "submission.json": "every figure above",
             "artifact.bpb": f"weights of seed {facts['artifact']['seed']}, sha256 `{facts['artifact']['sha256']}`",
             "requirements.txt": "beside torch, numpy, sentencepiece"}
    rows = ["| file | bytes | |", "|---|---:|---|"]
    rows += [f"| `{name}` | {size:,} | {about.get(name, 'log of the recorded run')} |" for name, size in files.items()]
    return "\n".join(rows)


def _whole(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f}"
