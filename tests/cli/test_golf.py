"""bpb golf, as typed: plan, train, eval and sample on a run of a few steps, made once through the command itself."""

import gzip
import json
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.records.store import read_record

SENTENCES = [f"The {animal} of house {n} sees {n * n % 97} {thing} and says nothing about {n % 13} of them."
             for n in range(60) for animal, thing in [("dog", "stones"), ("cat", "birds"), ("horse", "carts")]]
DOCUMENTS = [" ".join(SENTENCES[n : n + 3]) for n in range(0, len(SENTENCES), 3)]
TINY = """
name: tiny
data: {{path: {data}}}
model: {{vocab_size: {vocab}, dim: 16, num_heads: 2, num_kv_heads: 1, order: [0, 1, 0], skips: [[0, 2]]}}
schedule: {{wallclock_s: null, max_steps: 4, warmdown: {{steps: 0}}, warmup_steps: 1}}
train: {{batch_tokens: 128, seq_len: 32, micro_batch_tokens: 64, log_every: 2}}
eval: {{every_steps: 2}}
artifact: {{scheme: int6, codec: zlib}}
"""


@pytest.fixture
def bpb(capsys: pytest.CaptureFixture):
    def bpb(*arguments: object) -> tuple[int, str, str]:
        code = guarded(lambda: run_command([str(a) for a in arguments]))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return bpb


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    """The same figures on every machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, on_the_cpu: None) -> Path:
    """Data, a config, and a finished run with what its training printed."""
    home = tmp_path_factory.mktemp("golf")
    source = write_jsonl(home / "source.jsonl", DOCUMENTS)
    assert guarded(lambda: run_command(["data", "prepare", "--source", str(source), "--tokenizer", "train:330", "--val-docs", "6",
                                        "--out", str(home / "data")])) == 0
    (home / "tiny.yaml").write_text(TINY.format(data=home / "data", vocab=330))
    return home


@pytest.fixture(scope="module")
def trained(home: Path) -> tuple[Path, str]:
    printed = StringIO()
    with redirect_stdout(printed):
        code = guarded(lambda: run_command(["golf", "train", str(home / "tiny.yaml"), "--run-dir", str(home / "run")]))
    assert code == 0
    return home / "run", printed.getvalue()


@pytest.fixture
def run(trained: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The dog of house 7 sees 49 stones and says nothing. " * 5 + "End")
    return path


def refused(result: tuple[int, str, str]) -> str:
    """The one sentence of a refusal: code 2, nothing on stdout, no traceback."""
    code, out, err = result
    assert (code, out) == (2, "") and err.startswith("bpb: ") and err.count("\n") == 1, result
    return err


# -- plan -------------------------------------------------------------------------------------------------------------

PARAMETERS = {"baseline": 17_059_912, "recurrent_v2": 17_316_896, "recurrent_v4": 7_874_592, "recurrent_v5": 7_874_592,
              "recurrent_v6": 14_541_744, "recurrent_v7": 14_541_744}


@pytest.mark.parametrize("name", PARAMETERS)
def test_plan_prints_the_published_parameters(bpb, repo_dir: Path, name: str) -> None:
    code, out, err = bpb("golf", "plan", repo_dir / f"configs/golf/{name}.yaml", "--no-measure", "--json")
    assert (code, err) == (0, "") and json.loads(out)["parameters"]["total"] == PARAMETERS[name]
    code, out, _ = bpb("golf", "plan", repo_dir / f"configs/golf/{name}.yaml", "--no-measure")
    assert code == 0 and f"{PARAMETERS[name]:,}" in out and "training bytes / payload" in out and "16,000,000" in out


def test_every_config_has_a_plan(bpb, repo_dir: Path) -> None:
    configs = sorted((repo_dir / "configs/golf").glob("*.yaml"))
    assert len(configs) == 11
    for path in configs:
        code, out, err = bpb("golf", "plan", path, "--no-measure", "--json")
        assert (code, err) == (0, "") and json.loads(out)["memory_bytes"] > 0


def test_plan_measures_a_step_and_says_what_to_expect(bpb, home: Path) -> None:
    budget = ("--set", "schedule.wallclock_s=30", "--set", "schedule.max_steps=null", "--set", "schedule.warmdown.steps=100000000")
    code, out, _ = bpb("golf", "plan", home / "tiny.yaml", "--device", "cpu", *budget)
    assert code == 0 and "step on this cpu" in out and "steps in the budget" in out and "tokens in the budget" in out
    assert "warning: the learning rate decays from the first step" in out
    code, out, _ = bpb("golf", "plan", home / "tiny.yaml", "--device", "cpu", *budget, "--json")
    made = json.loads(out)
    assert made["num_steps"] > 1 and made["num_tokens"] == 128 * made["num_steps"] and len(made["warnings"]) == 1


def test_plan_refuses_what_cannot_be(bpb, home: Path) -> None:
    assert "multiple of num_heads" in refused(bpb("golf", "plan", home / "tiny.yaml", "--set", "model.dim=15"))
    assert "nonsense" in refused(bpb("golf", "plan", home / "tiny.yaml", "--set", "model.nonsense=1"))


# -- train ------------------------------------------------------------------------------------------------------------


def test_train_prints_the_record_the_size_against_the_cap_and_where_everything_lies(trained: tuple[Path, str]) -> None:
    run, printed = trained
    record = read_record(run)
    joined = re.sub(r"[│\s]+", " ", printed)
    assert "finished" in printed and "4 / 512" in joined
    assert f"{record.artifact.total_bytes:,} of 16,000,000 bytes, {record.artifact.margin_bytes:,} left" in joined
    for row in record.scores:
        assert f"{row.bpb:.4f} ({row.bytes_per_token:.3f} bytes/token" in joined
    assert [row.label for row in record.scores] == ["before_quantisation", "artifact"]
    folded = re.sub(r"[│\s]+", "", printed)
    for name in ("record.json", "artifact.bpb", "train.log"):
        assert f"{run}/{name}" in folded and (run / name).is_file()
    assert (run / "metrics.jsonl").is_file() and (run / "artifact.bpb").stat().st_size == record.artifact.weight_bytes


def test_train_refuses_a_folder_that_holds_a_run(bpb, home: Path, trained: tuple[Path, str]) -> None:
    assert "--resume" in refused(bpb("golf", "train", home / "tiny.yaml", "--run-dir", trained[0]))
    # a progress line may come first: the data is checked before the record is looked at
    code, out, err = bpb("golf", "train", home / "tiny.yaml", "--run-dir", trained[0], "--resume")
    assert (code, out) == (2, "") and "is finished" in err.splitlines()[-1] and "Traceback" not in err


def test_over_the_cap_is_an_error_and_a_record(bpb, home: Path, tmp_path: Path) -> None:
    code, _, err = bpb("golf", "train", home / "tiny.yaml", "--run-dir", tmp_path / "run", "--set", "artifact.cap_bytes=1000")
    assert code == 1 and "bpb: the artifact is over the cap" in err and "Traceback" not in err
    record = read_record(tmp_path / "run")
    assert record.status == "over_cap" and record.artifact.margin_bytes < 0 and record.score("artifact")


def test_another_vocabulary_than_the_data_is_refused(bpb, home: Path, tmp_path: Path) -> None:
    code, out, err = bpb("golf", "train", home / "tiny.yaml", "--run-dir", tmp_path / "run", "--set", "model.vocab_size=331")
    assert (code, out) == (2, "") and "330 pieces" in err and "331" in err


# -- eval -------------------------------------------------------------------------------------------------------------


def test_eval_of_the_validation_split_is_the_score_of_the_record(bpb, trained: tuple[Path, str]) -> None:
    code, out, err = bpb("golf", "eval", trained[0], "--json")
    row, recorded = json.loads(out), read_record(trained[0]).score("artifact")
    assert (code, err) == (0, "")
    for name in ("nats", "num_bytes", "num_tokens", "bpb", "window", "stride", "documents", "split_sha256"):
        assert row[name] == getattr(recorded, name)


def test_eval_adds_its_score_to_the_record_and_repeats_it_to_the_last_digit(bpb, run: Path, text: Path) -> None:
    options = ("--text", text, "--stride", 8, "--isolated")
    code, out, err = bpb("golf", "eval", run, *options, "--label", "dogs", "--json")
    first = json.loads(out)
    assert (code, err) == (0, "") and (first["window"], first["stride"], first["documents"]) == (32, 8, "isolated")
    record = read_record(run)
    assert [row.label for row in record.scores] == ["before_quantisation", "artifact", "dogs"]
    again = json.loads(bpb("golf", "eval", run, *options, "--json")[1])
    ignored = {"seconds", "label"}
    assert {k: v for k, v in first.items() if k not in ignored} == {k: v for k, v in again.items() if k not in ignored}
    assert record.score("dogs").nats == first["nats"] and record.score("dogs").bpb == first["bpb"]
    bpb("golf", "eval", run, "--text", text, "--label", "dogs")  # the label holds one score
    scores = read_record(run).scores
    assert [row.label for row in scores] == ["before_quantisation", "artifact", "dogs"] and scores[-1].stride is None
    code, out, err = bpb("golf", "eval", run, *options)
    assert (code, err) == (0, "") and f"{first['bpb']:.6f}" in out and "stride 8 of 32, isolated" in out


@pytest.mark.parametrize("label", ["artifact", "before_quantisation"])
def test_the_runs_own_scores_are_not_overwritten(bpb, run: Path, text: Path, label: str) -> None:
    before = (run / "record.json").read_bytes()
    assert "choose another" in refused(bpb("golf", "eval", run, "--text", text, "--label", label))
    assert (run / "record.json").read_bytes() == before


def test_the_same_documents_score_the_same_from_every_kind_of_file(bpb, trained: tuple[Path, str], tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = DOCUMENTS[:3]
    jsonl = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "c.parquet")
    (tmp_path / "d").mkdir()
    for n, (document, suffix) in enumerate(zip(texts, (".md", ".txt", ".markdown"), strict=True)):
        (tmp_path / f"d/{n}{suffix}").write_text(document)
    rows = []
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d"):
        code, out, err = bpb("golf", "eval", trained[0], "--text", tmp_path / name, "--json")
        assert (code, err) == (0, "")
        rows.append(json.loads(out))
    assert len({(row["nats"], row["num_bytes"], row["num_tokens"], row["split_sha256"]) for row in rows}) == 1
    assert rows[0]["num_bytes"] == sum(len(document.encode()) for document in texts)


@pytest.mark.parametrize("options, sentence", [
    (("--stride", 33), "--stride 33 must not exceed the window of 32"),
    (("--window", 8, "--stride", 9), "must not exceed the window of 8"),
    (("--stride", 0), "stride 0"), (("--stride", -1), "stride -1"), (("--window", 0), "window length 0"),
    (("--stride", 8, "--drop-tail"), "--drop-tail goes with"), (("--isolated", "--drop-tail"), "drop_tail"),
    (("--data", "x"), "not both"), (("--device", "cuda"), "GPU"),
])
def test_eval_refuses_windows_that_mean_nothing(bpb, trained: tuple[Path, str], text: Path, options: tuple, sentence: str) -> None:
    assert sentence in refused(bpb("golf", "eval", trained[0], "--text", text, *options))


@pytest.mark.parametrize("name, content, sentence", [
    ("empty.txt", b"", "holds no document"), ("blank.txt", b" \n\n ", "holds no document"), ("empty.jsonl", b"", "holds no document"),
    ("bad.txt", b"\xff\xfe\x00", "not valid UTF-8"), ("bad.jsonl", b"{", "bad.jsonl:1"), ("bad.gz", b"x", "suffix"),
    ("bad.jsonl.gz", b"no gzip", "cannot be unpacked"), ("bad.parquet", b"PAR1", "cannot be read as Parquet"),
    ("other.pdf", b"text", "suffix"),
])
def test_texts_that_cannot_be_read(bpb, trained: tuple[Path, str], tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert sentence in refused(bpb("golf", "eval", trained[0], "--text", tmp_path / name))
    assert "no such file" in refused(bpb("golf", "eval", trained[0], "--text", tmp_path / "absent.txt"))


def test_a_text_that_the_normaliser_changes(bpb, trained: tuple[Path, str], tmp_path: Path) -> None:
    """A little is a warning in one line on stderr and leaves the output as it is; much is a refusal."""
    path = tmp_path / "spaces.txt"
    path.write_text("The dog of house 7 sees 49 stones. " * 20 + " ")  # one space too many at the end, and one more
    code, out, err = bpb("golf", "eval", trained[0], "--text", path, "--json")
    assert code == 0 and json.loads(out)["num_bytes"] == 20 * 35 - 1
    assert err.startswith("bpb: warning: the normaliser of tokenizer sp330 changes 0.29% of the text") and err.count("\n") == 1
    path.write_text("The  dog  of  house  7. " * 20)
    assert "above 1% it is refused" in refused(bpb("golf", "eval", trained[0], "--text", path))


def test_a_warning_is_one_line_and_leaves_no_trace(capsys: pytest.CaptureFixture) -> None:
    shown, filters = warnings.showwarning, list(warnings.filters)

    def warn() -> int:
        warnings.warn("two\n  lines", stacklevel=1)
        return 0

    assert guarded(warn) == 0
    assert capsys.readouterr().err == "bpb: warning: two lines\n"
    assert warnings.showwarning is shown and warnings.filters == filters


def test_eval_of_prepared_shards(bpb, run: Path, home: Path, tmp_path: Path) -> None:
    code, out, _ = bpb("golf", "eval", run, "--data", home / "data", "--json")
    assert code == 0 and json.loads(out)["nats"] == read_record(run).score("artifact").nats
    assert bpb("data", "prepare", "--source", home / "source.jsonl", "--tokenizer", "byte", "--out", tmp_path / "bytes")[0] == 0
    sentence = refused(bpb("golf", "eval", run, "--data", tmp_path / "bytes"))
    assert "another tokenizer" in sentence and f"--tokenizer {run}" in sentence
    # and what the sentence advises works
    assert bpb("data", "prepare", "--source", home / "source.jsonl", "--tokenizer", run, "--out", tmp_path / "again")[0] == 0
    assert bpb("golf", "eval", run, "--data", tmp_path / "again")[0] == 0


def test_a_changed_validation_split_is_no_longer_the_runs(bpb, home: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(home / "data", tmp_path / "data"))
    assert bpb("golf", "train", home / "tiny.yaml", "--run-dir", tmp_path / "run", "--set", f"data.path={data}")[0] == 0
    shard = data / "val_000000.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[-2] ^= 1
    shard.write_bytes(damaged)
    assert "sha256" in refused(bpb("golf", "eval", tmp_path / "run"))
    shutil.rmtree(data)
    code, _, _ = bpb("data", "prepare", "--source", home / "source.jsonl", "--tokenizer", home / "data/tokenizer.model",
                     "--val-docs", "5", "--out", data)
    assert code == 0
    assert "has changed since the run" in refused(bpb("golf", "eval", tmp_path / "run"))
    assert bpb("golf", "eval", tmp_path / "run", "--data", data)[0] == 0


def test_parts_that_do_not_belong_together(bpb, run: Path, home: Path, text: Path) -> None:
    from bitsperbyte.text.tokenizers import ByteTokenizer, train_sentencepiece

    original = (run / "tokenizer.model").read_bytes()
    train_sentencepiece(DOCUMENTS[:30], 330, run)
    assert (run / "tokenizer.model").read_bytes() != original
    assert "tokenizer" in refused(bpb("golf", "eval", run, "--text", text))
    ByteTokenizer().save(run)
    assert "exactly one tokenizer" in refused(bpb("golf", "eval", run, "--text", text))
    (run / "tokenizer.json").unlink()
    (run / "tokenizer.model").unlink()
    assert "exactly one tokenizer" in refused(bpb("golf", "eval", run, "--text", text))
    (run / "tokenizer.model").write_bytes(original)
    assert bpb("golf", "eval", run, "--text", text)[0] == 0
    (run / "artifact.bpb").unlink()
    assert "holds no artifact.bpb" in refused(bpb("golf", "eval", run, "--text", text))
    assert "holds no artifact.bpb" in refused(bpb("golf", "sample", run))
    assert refused(bpb("golf", "eval", run / "absent", "--text", text))


def test_a_score_goes_only_into_the_record_of_its_artifact(bpb, run: Path, home: Path, text: Path, tmp_path: Path) -> None:
    assert bpb("golf", "train", home / "tiny.yaml", "--run-dir", tmp_path / "other", "--set", "train.seed=1")[0] == 0
    shutil.copy(tmp_path / "other/artifact.bpb", run / "artifact.bpb")
    assert "is not the record of" in refused(bpb("golf", "eval", run, "--text", text, "--label", "x"))
    assert bpb("golf", "eval", run, "--text", text)[0] == 0
    (run / "record.json").unlink()
    assert "no record" in refused(bpb("golf", "eval", run, "--text", text, "--label", "x"))


def flip_bits(bpb, run: Path, text: Path, name: str, count: int) -> None:
    """No place in the file may be flipped unnoticed, whatever the bit."""
    path = run / name
    intact, rng = path.read_bytes(), random.Random(name)
    for _ in range(count):
        damaged = bytearray(intact)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert name in refused(bpb("golf", "eval", run, "--text", text)) or name.startswith("tokenizer")
    for length in (0, 1, len(intact) // 2, len(intact) - 1):
        path.write_bytes(intact[:length])
        refused(bpb("golf", "eval", run, "--text", text))
    path.write_bytes(intact)
    assert bpb("golf", "eval", run, "--text", text)[0] == 0


@pytest.mark.parametrize("name", ["artifact.bpb", "tokenizer.model"])
def test_a_flipped_bit_never_gives_a_score(bpb, run: Path, text: Path, name: str) -> None:
    flip_bits(bpb, run, text, name, 5)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["artifact.bpb", "tokenizer.model"])
def test_fifty_flipped_bits_never_give_a_score(bpb, run: Path, text: Path, name: str) -> None:
    flip_bits(bpb, run, text, name, 50)


# -- sample -----------------------------------------------------------------------------------------------------------


def test_sample_repeats_under_a_seed_and_needs_none_when_greedy(bpb, trained: tuple[Path, str]) -> None:
    def draw(*options: object) -> str:
        code, out, err = bpb("golf", "sample", trained[0], "--prompt", "The dog", "--num-tokens", 20, *options)
        assert (code, err) == (0, "") and out.startswith("The dog")
        return out

    assert draw("--seed", 1) == draw("--seed", 1) != draw("--seed", 2)
    assert draw("--temperature", 0, "--seed", 1) == draw("--temperature", 0, "--seed", 2)
    assert bpb("golf", "sample", trained[0], "--num-tokens", 5)[0] == 0  # without a prompt
    assert "must be 0 or more" in refused(bpb("golf", "sample", trained[0], "--temperature", -1))


def test_several_seeds_are_several_runs(bpb, home: Path, tmp_path: Path) -> None:
    code, out, _ = bpb("golf", "train", home / "tiny.yaml", "--run-dir", tmp_path, "--seeds", "1,2", "--set", "schedule.max_steps=2")
    assert code == 0
    records = [read_record(tmp_path / f"seed_{seed}") for seed in (1, 2)]
    assert [record.seed for record in records] == [1, 2] and records[0].scores[0].nats != records[1].scores[0].nats
    assert all(f"tiny, seed {seed}" in out for seed in (1, 2))


# -- legal ------------------------------------------------------------------------------------------------------------


def test_legal_prints_each_check_and_its_exit_code_says_whether_one_failed(bpb, run: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--window", 24, "--cuts", 4, "--text", text)
    code, out, _ = bpb("golf", "legal", run, *options)
    assert code == 0
    for check in ("state", "coverage", "causality", "normalisation", "batch", "isolation", "bytes", "evaluation"):
        assert re.search(rf"\W{check}\W+(passed|not checked): ", out), (check, out)
    code, out, _ = bpb("golf", "legal", run, *options, "--json")
    made = json.loads(out)
    assert (code, made["failed"]) == (0, []) and {f["check"] for f in made["findings"]} >= {"causality", "bytes"}
    import bitsperbyte.golf.model as golf_model
    honest = golf_model.GolfModel.hidden
    monkeypatch.setattr(golf_model.GolfModel, "hidden", lambda self, tokens: honest(self, tokens).flip(1))  # sees all but the first token
    code, out, _ = bpb("golf", "legal", run, *options)
    assert code == 1 and re.search(r"\Wcausality\W+FAILED: ", out)
    assert "causality" in json.loads(bpb("golf", "legal", run, *options, "--json")[1])["failed"]


def test_legal_refuses_in_one_sentence(bpb, run: Path, tmp_path: Path, text: Path) -> None:
    assert "no such artifact" in refused(bpb("golf", "legal", tmp_path / "none"))
    assert "not both" in refused(bpb("golf", "legal", run, "--text", text, "--data", tmp_path))
    (run / "artifact.bpb").write_bytes(b"BPB")
    assert "artifact.bpb" in refused(bpb("golf", "legal", run, "--text", text))
