"""`bpb golf legal`: a finished run's artifact passes; what cannot be read or does not belong to it is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bitsperbyte.golf.artifact import read_artifact
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.findings import failed
from bitsperbyte.golf.legal_artifact import Legality, check_artifact, check_evaluation
from bitsperbyte.golf.model import GolfModel
from bitsperbyte.golf.session import train
from bitsperbyte.text.prepare import prepare
from bitsperbyte.text.tokenizers import ByteTable, ByteTokenizer, train_sentencepiece

TEXTS = [f"Übung {n} – {n * n} naïve cafés, and {n % 7} more." for n in range(80)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on bytes, scored at a stride in documents of their own."""
    home = tmp_path_factory.mktemp("legal")
    (home / "source.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(str(home / "source.jsonl"), "byte", home / "data", val_docs=10)
    config = GolfConfig.model_validate({
        "data": {"path": str(home / "data")},
        "model": {"vocab_size": 260, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "order": [0], "skips": []},
        "schedule": {"wallclock_s": None, "max_steps": 3, "warmdown": {"steps": 0}, "warmup_steps": 0},
        "train": {"batch_tokens": 64, "seq_len": 16, "micro_batch_tokens": 64, "device": "cpu"},
        "eval": {"every_steps": None, "window": 24, "stride": 5, "documents": "isolated", "max_tokens": 300}})
    train(config, home / "run")
    return home


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "run", tmp_path / "run"))


def check(path: Path, **options) -> Legality:
    return check_artifact(path, num_cuts=8, device_name="cpu", **options)


def test_an_artifact_is_checked_under_the_windows_of_its_run(home: Path) -> None:
    for made in (check(home / "run", data=home / "data"), check(home / "run" / "artifact.bpb", text=home / "source.jsonl")):
        assert made.protocol == Protocol(24, 5, "isolated") and made.device == "cpu"
        assert not failed(made.findings), [f.line for f in made.findings]
        assert {f.check for f in made.findings if f.ok} == {
            "state", "coverage", "causality", "normalisation", "batch", "isolation", "bytes", "evaluation"}


@pytest.mark.parametrize("options, expected", [
    ({"window": 16}, Protocol(16, None, "isolated")), ({"stride": 12}, Protocol(24, 12, "isolated")),
    ({"isolated": False}, Protocol(24, 5)), ({"window": 20, "stride": 20, "isolated": True}, Protocol(20, 20, "isolated"))])
def test_windows_that_are_given_win(home: Path, options: dict, expected: Protocol) -> None:
    made = check(home / "run", text=home / "source.jsonl", **options)
    assert made.protocol == expected and not failed(made.findings)


def test_an_artifact_without_its_run_is_checked_in_the_challenges_windows(home: Path, run: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(run / "artifact.bpb", alone)
    with pytest.raises(ValueError, match="tokenizer"):
        check(alone / "artifact.bpb")
    assert check(alone / "artifact.bpb", tokenizer=run, text=home / "source.jsonl").protocol == Protocol(1024)


@pytest.mark.parametrize("offset", [0, 20, -40, -1])
def test_a_damaged_artifact_is_refused(run: Path, offset: int) -> None:
    file = run / "artifact.bpb"
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="artifact.bpb") as caught:
        check(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 10, 200])
def test_a_cut_artifact_is_refused(run: Path, size: int) -> None:
    file = run / "artifact.bpb"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match="artifact.bpb"):
        check(run)


def test_what_does_not_belong_to_the_artifact_is_refused(home: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = train_sentencepiece(TEXTS, 330, tmp_path / "other")
    other.save(tmp_path / "other")
    with pytest.raises(ValueError, match="tokenizer"):
        check(run, tokenizer=tmp_path / "other")
    prepare(str(home / "source.jsonl"), str(tmp_path / "other"), tmp_path / "data", val_docs=10)
    with pytest.raises(ValueError, match="another tokenizer"):
        check(run, data=tmp_path / "data")
    with pytest.raises(ValueError, match="not both"):
        check(run, data=home / "data", text=home / "source.jsonl")
    with pytest.raises(ValueError, match="no such artifact"):
        check(tmp_path / "nothing")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError):
        check(run, text=tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="stride 30"):
        check(run, stride=30)
    (run / "config.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match="config.yaml does not give"):
        check(run)


def test_an_evaluation_whose_sums_are_not_those_of_the_predictions_is_caught(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsperbyte.golf.evaluate as evaluation

    artifact = read_artifact(home / "run" / "artifact.bpb")
    model, tokenizer, protocol = GolfModel(artifact.model), ByteTokenizer(), Protocol(24, 5)
    model.load_state_dict(artifact.state)
    tokens = np.concatenate([[1], tokenizer.encode("".join(TEXTS)[:150])])
    assert check_evaluation(model, tokens, tokenizer, protocol).ok is True
    honest = evaluation._window_nats
    monkeypatch.setattr(evaluation, "_window_nats", lambda *arguments: honest(*arguments) * 0.9999)
    found = check_evaluation(model, tokens, tokenizer, protocol)
    assert found.ok is False and "nats" in found.detail
    monkeypatch.setattr(evaluation, "_window_nats", honest)
    mixed, answers = ByteTable.target_bytes, iter([1])  # one byte more in one batch of the evaluation
    monkeypatch.setattr(ByteTable, "target_bytes", lambda self, prev, target: mixed(self, prev, target) + next(answers, 0))
    found = check_evaluation(model, tokens, tokenizer, protocol)
    assert found.ok is False and "bytes" in found.detail
