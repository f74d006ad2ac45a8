"""Scoring a finished run again: from its artifact, under stated windows, on a text or on prepared shards."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.evaluate import Protocol, evaluate
from bitsperbyte.golf.scoring import score_run, trained_window
from bitsperbyte.golf.session import load_run, train
from bitsperbyte.records.store import read_record
from bitsperbyte.text.prepare import prepare

TEXTS = [f"Übung {n} – {n * n} naïve cafés, and {n % 7} more." for n in range(80)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on bytes, scored with windows of its own."""
    home = tmp_path_factory.mktemp("scoring")
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


def quiet(run_dir: Path, **options):
    return score_run(run_dir, device_name="cpu", show_progress=False, **options)


@pytest.mark.parametrize("protocol", [Protocol(24), Protocol(24, 7), Protocol(16, 4, "isolated"), Protocol(24, drop_tail=True)],
                         ids=Protocol.describe)
def test_a_text_is_scored_behind_a_bos_for_each_document(home: Path, protocol: Protocol) -> None:
    row = quiet(home / "run", text=home / "source.jsonl", window=protocol.window, stride=protocol.stride,
                isolated=protocol.documents == "isolated", drop_tail=protocol.drop_tail)
    model, tokenizer, _ = load_run(home / "run")
    tokens = np.array([token for text in TEXTS for token in [1, *(4 + byte for byte in text.encode())]], np.uint16)
    expected = evaluate(model, tokens, tokenizer.table, 1, protocol).score
    assert (row.nats, row.num_bytes, row.num_tokens) == (expected.nats, expected.num_bytes, expected.num_tokens)
    assert (row.window, row.stride, row.documents, row.drop_tail) == (
        protocol.window, protocol.stride, protocol.documents, protocol.drop_tail)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert row.num_bytes == num_bytes if not protocol.drop_tail else num_bytes - 24 <= row.num_bytes <= num_bytes
    if protocol.documents == "isolated":
        assert row.num_tokens == num_bytes  # bytes are tokens here, and no BOS is a target


def test_the_window_is_the_runs_unless_another_is_given(home: Path) -> None:
    assert trained_window(home / "run") == 24
    assert quiet(home / "run").window == 24
    assert quiet(home / "run", window=16).window == 16


def test_the_recorded_score_comes_out_again_under_the_recorded_windows(home: Path) -> None:
    """The run scored the first 300 tokens of its validation split; the same tokens as a text give the same nats."""
    recorded = read_record(home / "run").score("artifact")
    assert recorded.split_sha256.endswith(":first-300") and (recorded.stride, recorded.documents) == (5, "isolated")
    model, tokenizer, _ = load_run(home / "run")
    tokens = np.array([token for text in TEXTS[:10] for token in [1, *(4 + byte for byte in text.encode())]], np.uint16)
    again = evaluate(model, tokens[:300], tokenizer.table, 1, Protocol(24, 5, "isolated")).score
    assert again.nats == recorded.nats and again.num_bytes == recorded.num_bytes
    whole = quiet(home / "run", stride=5, isolated=True)
    assert whole.num_tokens > recorded.num_tokens and whole.split_sha256 != recorded.split_sha256
    assert whole.evaluation_key != recorded.evaluation_key


def test_the_hash_of_a_text_is_of_its_documents(home: Path, tmp_path: Path) -> None:
    def split_of(texts: list[str]) -> str:
        path = tmp_path / "text.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return quiet(home / "run", text=path).split_sha256

    long = "x" * 20
    assert split_of(["ab" + long, "c" + long]) == split_of(["ab" + long, "c" + long])
    cut_otherwise = (["ab" + long, "c" + long], ["ab" + long + "c", long], ["ab" + long + "c" + long], ["c" + long, "ab" + long])
    assert len({split_of(texts) for texts in cut_otherwise}) == 4


def test_text_and_shards_at_once_are_refused(home: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        quiet(home / "run", text=home / "source.jsonl", data=home / "data")


def test_a_label_is_kept_with_its_score(home: Path) -> None:
    row = quiet(home / "run", text=home / "source.jsonl", label="all")
    kept = read_record(home / "run").score("all")
    assert kept == row and kept.text == str(home / "source.jsonl")


def test_a_text_of_one_character(home: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x")  # no window is filled, and none overlaps
    row = quiet(home / "run", text=tmp_path / "one.txt", isolated=True, stride=3)
    assert (row.num_tokens, row.num_bytes) == (1, 1)


@pytest.mark.parametrize("label", ["", "  "])
def test_an_empty_label_is_refused(home: Path, label: str) -> None:
    with pytest.raises(ValueError, match="--label is empty"):
        quiet(home / "run", label=label)


def test_the_record_of_another_artifact_is_a_warning_and_refused_with_a_label(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "run", run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = quiet(run)
    record = json.loads((run / "record.json").read_text())
    record["artifact"]["sha256"] = "0" * 64
    (run / "record.json").write_text(json.dumps(record))
    with pytest.warns(UserWarning, match="not the record of the artifact"):
        row = quiet(run)
    assert row.nats == expected.nats
    with pytest.raises(ValueError, match="not the record of the artifact.*score it without --label"):
        quiet(run, label="x")
    (run / "record.json").write_text("{")
    with pytest.warns(UserWarning, match="is not JSON"):
        assert quiet(run).nats == expected.nats
    (run / "record.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quiet(run).nats == expected.nats


@pytest.mark.parametrize("text", [
    "name: x\n", "eval:\ntrain: {seq_len: 8}\n", "eval: {window: }\ntrain: {}\n", "eval: {window: wide}\n"])
def test_a_config_without_a_window_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="does not give eval.window or train.seq_len") as caught:
        trained_window(tmp_path)
    assert str(tmp_path / "config.yaml") in str(caught.value)
