"""Whether a claimed score comes out again: by the submission's own script without the network, and by this package's own reading.

Both score the artifact that lies in the folder on the text that the caller gives. They must agree with each other to eight decimals,
since they run here one after the other; the claim may come from another machine, and how far it may then differ is stated.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from bitsperbyte.golf.artifact import NAME, Artifact, read_artifact
from bitsperbyte.golf.check.claims import BPB, Claim, Claims, number
from bitsperbyte.golf.check.folder import SCRIPT, Submission
from bitsperbyte.golf.check.sandbox import Outcome, run_offline
from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.findings import Finding
from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.ranks import pick_device
from bitsperbyte.run.train_log import parse_train_log
from bitsperbyte.text.shards import DataFolder, open_shard
from bitsperbyte.text.tokenizers import load_tokenizer

DECIMALS = 8
SAME_KIND_TOLERANCE = {"cpu": 2e-6, "cuda": 1e-4}  # of a claim made on the same kind of device: sums run in another order
OTHER_KIND_TOLERANCE = 1e-3  # float32 on a CPU against bfloat16 on a GPU
MAX_WINDOW = 1 << 16
MAX_COPY_BYTES = 1 << 30
FEW_STEPS = {"ITERATIONS": "3", "WARMUP_STEPS": "1", "VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "1", "RUN_ID": "check"}


class CannotScore(Exception):
    """Why a score could not be checked, a clause."""


@dataclass(frozen=True)
class Text:
    """The tokens that a claim is about, and the folder that they come from."""

    data: DataFolder
    tokens: np.ndarray
    protocol: Protocol


def check_score(found: Submission, data_dir: Path | None, *, device_name: str = "auto", limit_s: float = 600.0,
                run: bool = False) -> list[Finding]:
    """A finding `score`, and a finding `run` where the script was run. ValueError for a data folder that cannot be used."""
    if data_dir is None:
        return [Finding("score", None, "no --data was given, so the claimed score is not scored again")] + (
            [_check_run(found, None, limit_s)] if run else [])
    data = DataFolder.open(data_dir, tokenizer_path=found.tokenizer if not (data_dir / "manifest.json").exists() else None)
    findings = _reproduce(found, data, device_name, limit_s)
    if run and not any(finding.check == "run" for finding in findings):
        findings.append(_check_run(found, data, limit_s))
    return findings


def _reproduce(found: Submission, data: DataFolder, device_name: str, limit_s: float) -> list[Finding]:
    try:
        artifact, claim = _own_artifact(found), _claim(found)
        text = _text(found.claims, artifact, data, found)
    except CannotScore as error:
        return [Finding("score", None, f"not scored again: {error}")]
    except ValueError as error:
        return [Finding("score", False, str(error))]
    device = pick_device(device_name)
    model = GolfModel(artifact.model)
    model.load_state_dict(artifact.state)
    model.place(device)
    table = data.tokenizer.table
    try:
        ours = evaluate(model, text.tokens, table, data.tokenizer.bos_id, text.protocol).score.bpb
    except ValueError as error:
        return [Finding("score", False, f"the artifact cannot be scored: {error}")]
    differs, allowed = abs(ours - float(claim.value)), _tolerance(found.claims, device.type, claim)
    said = f"the artifact scores {ours:.{DECIMALS}f} bits per byte here, and {claim} is claimed"
    if differs > allowed:
        return [Finding("score", False, f"{said}: {differs:.{DECIMALS}f} apart, where {allowed:.1g} could come from another machine")]
    if found.script is None or "--eval-only" not in found.script and not _decoded_mentions(found, "--eval-only"):
        return [Finding("score", True, f"{said}; the script has no --eval-only, so this package's reading alone was made")]
    theirs, run = _eval_only(found, data, limit_s)
    if theirs is None:
        return [Finding("score", True, f"{said}; its own script gave no score to compare"), run]
    if f"{theirs:.{DECIMALS}f}" != f"{ours:.{DECIMALS}f}":
        return [Finding("score", False, f"{said}, but its own script makes it {theirs:.{DECIMALS}f}"), run]
    return [Finding("score", True, f"{said}; its own script agrees to {DECIMALS} decimals"), run]


def _own_artifact(found: Submission) -> Artifact:
    if found.artifact is None:
        raise CannotScore("the folder holds no artifact")
    with found.artifact.open("rb") as file:
        if file.read(len(NAME)) != NAME:
            raise CannotScore(f"{found.artifact.name} has a format of its own, which only its script reads; --run tries that script")
    return read_artifact(found.artifact)


def _claim(found: Submission) -> Claim:
    """The score claimed of the artifact in the folder."""
    claims = found.claims
    if claims is None:
        raise CannotScore("there is no submission.json to claim a score")
    named = claims.facts.get("artifact")
    if isinstance(named, dict) and (value := number(named.get("val_bpb"))) is not None:
        return Claim("val_bpb", Decimal(value))
    if len(claims.seeds) <= 1 and (claim := claims.get(BPB)):
        return claim
    raise CannotScore("submission.json gives no val_bpb of the artifact in the folder (artifact.val_bpb), only of several seeds")


def _text(claims: Claims | None, artifact: Artifact, data: DataFolder, found: Submission) -> Text:
    """The tokens and windows of the claim. CannotScore where the data are of another text than the claim."""
    assert claims is not None
    if found.tokenizer and load_tokenizer(found.tokenizer).sha256 != artifact.tokenizer_sha256:
        raise ValueError(f"{found.tokenizer.name} is not the tokenizer of the artifact beside it")
    if data.tokenizer.sha256 != artifact.tokenizer_sha256:
        raise CannotScore(f"the shards in {data.path} were made with another tokenizer than the artifact's")
    data.verify("val")
    split, claimed = data.split_sha256("val"), claims.text("data", "val_sha256")
    if claimed and claimed != split:
        raise CannotScore(f"the claim is of the validation split {claimed[:16]}..., and that of {data.path} is {split[:16]}...")
    stated = claims.facts.get("evaluation")
    if not isinstance(stated, dict):
        raise CannotScore("submission.json does not state the windows of its score (evaluation)")
    tokens = np.concatenate([open_shard(info.path) for info in data.shards("val")])
    _, mark, first = (claims.text("data", "scored_split_sha256") or "").partition(":first-")
    if mark:
        tokens = tokens[: int(first)] if first.isdecimal() and len(first) < 16 else tokens
    return Text(data, tokens, _protocol(stated))


def _protocol(stated: Mapping[str, Any]) -> Protocol:
    window, stride, documents = stated.get("window"), stated.get("stride"), stated.get("documents", "across")
    sizes_fit = isinstance(window, int) and 0 < window <= MAX_WINDOW and (stride is None or isinstance(stride, int) and 0 < stride <= window)
    if not sizes_fit or documents not in ("across", "isolated"):
        raise CannotScore(f"the stated windows (window {window}, stride {stride}, documents {documents}) are none that are known here")
    return Protocol(window, stride, documents, bool(stated.get("drop_tail", False)))


def _tolerance(claims: Claims | None, device: str, claim: Claim) -> float:
    """How far a repeated score may lie from its claim: its own rounding, and what another machine adds."""
    hardware = (claims.text("hardware") if claims else None) or ""
    same = ("cpu" in hardware.lower()) == (device == "cpu")
    return (SAME_KIND_TOLERANCE[device] if same else OTHER_KIND_TOLERANCE) + 0.5 * 10.0 ** -claim.decimals


def _decoded_mentions(found: Submission, text: str) -> bool:
    from bitsperbyte.golf.check.inspection import inspect_code

    return found.script is not None and inspect_code(found.path / SCRIPT, found.script).mentions(text)


# -- running the script -------------------------------------------------------------------------------------------------


def _eval_only(found: Submission, data: DataFolder, limit_s: float) -> tuple[float | None, Finding]:
    """The score that the script's --eval-only prints, None where it gives none, and the finding `run`."""
    assert found.artifact is not None
    try:
        outcome = _run_copy(found, ["--eval-only", found.artifact.name], _variables(found, data), limit_s)
    except CannotScore as error:
        return None, Finding("run", None, f"the script was not run: {error}")
    finding = _run_finding(outcome, "--eval-only", limit_s, must_end=True)
    finals = parse_train_log(outcome.output).finals if outcome.code == 0 else ()
    return (float(finals[-1].val_bpb) if finals else None), finding


def _check_run(found: Submission, data: DataFolder | None, limit_s: float) -> Finding:
    """A few steps of the script without the network; the limit may end it."""
    if found.script is None:
        return Finding("run", None, f"there is no {SCRIPT} to run")
    try:
        outcome = _run_copy(found, [], FEW_STEPS | (_variables(found, data) if data else {}), limit_s)
    except CannotScore as error:
        return Finding("run", None, f"the script was not run: {error}")
    return _run_finding(outcome, "a few steps", limit_s, must_end=False)


def _variables(found: Submission, data: DataFolder) -> dict[str, str]:
    tokenizer = found.tokenizer or (None if data.bare else data.path / data.manifest["tokenizer"]["file"])
    return {"DATA_PATH": str(data.path.resolve())} | ({"TOKENIZER_PATH": str(tokenizer.resolve())} if tokenizer else {})


def _run_copy(found: Submission, arguments: list[str], variables: dict[str, str], limit_s: float) -> Outcome:
    """Run the script in a scratch copy of its folder, links left out."""
    files = [p for p in sorted(found.path.rglob("*")) if p.is_file() and not p.is_symlink()]
    if (size := sum(p.stat().st_size for p in files)) > MAX_COPY_BYTES:
        raise CannotScore(f"the folder holds {size:,} bytes, too many to copy")
    with tempfile.TemporaryDirectory(prefix="bpb_check_") as temporary:
        copy, scratch = Path(temporary) / "submission", Path(temporary) / "scratch"
        scratch.mkdir()
        for path in files:
            target = copy / path.relative_to(found.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        return run_offline([SCRIPT, *arguments], copy, scratch, limit_s=limit_s, variables=variables)


def _run_finding(outcome: Outcome, what: str, limit_s: float, *, must_end: bool) -> Finding:
    """The network tried fails; how a script ends that was not made for this machine does not."""
    under = f"under {outcome.isolation}"
    if outcome.network:
        return Finding("run", False, f"the script tried to reach the network ({'; '.join(outcome.network[:3])}), {under}")
    if outcome.imports:
        return Finding("run", False, f"the script needs what is not in its folder ({'; '.join(outcome.imports[:3])})")
    if outcome.code is None:
        return Finding("run", None if must_end else True, f"{what} was ended after {limit_s:g} s and had not tried the network, {under}")
    if outcome.code != 0:
        last = next((line.strip() for line in reversed(outcome.output.splitlines()) if line.strip()), "no output")
        return Finding("run", None, f"{what} ended with exit code {outcome.code} ({last[:200]}), and had not tried the network, {under}")
    return Finding("run", True, f"{what} ran for {outcome.seconds:.1f} s and tried no network, {under}")
