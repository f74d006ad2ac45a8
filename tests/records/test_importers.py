"""Figures are those of public submissions of the challenge and of RandOpt's files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitsperbyte.records.import_randopt import is_randopt
from bitsperbyte.records.importers import import_runs, read_state
from bitsperbyte.records.published import implausible
from bitsperbyte.records.store import add_record, iter_records, read_record
from bitsperbyte.run.metrics import read_metrics

LOG = """\
val_loader:shards pattern=/data/fineweb10B_sp1024/fineweb_val_*.bin tokens:63779840
model_params:17059912
world_size:8 grad_accum_steps:1
train_batch_tokens:524288 train_seq_len:1024 iterations:20000 warmup_steps:20 max_wallclock_seconds:600.000
seed:1337
step:0/20000 val_loss:6.9370 val_bpb:4.0978 train_time:0ms step_avg:0.01ms
step:1/20000 train_loss:6.9408 train_time:24ms step_avg:23.99ms
step:200/20000 train_loss:2.8041 train_time:8677ms step_avg:43.38ms
step:200/20000 val_loss:2.8397 val_bpb:1.6774 train_time:8699ms step_avg:43.49ms
step:13780/20000 val_loss:2.0606 val_bpb:1.2172 train_time:600038ms step_avg:43.54ms
stopping_early: wallclock_cap train_time:600038ms step:13780/20000
peak memory allocated: 10184 MiB reserved: 10200 MiB
Serialized model: 67224983 bytes
Code size: 47642 bytes
Total submission size: 67272625 bytes
Serialized model int8+zlib: 15815847 bytes (payload:17178912 raw_torch:17224025 payload_ratio:3.91x)
Total submission size int8+zlib: 15863489 bytes
final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2244 eval_time:1401ms
final_int8_zlib_roundtrip_exact val_loss:2.07269931 val_bpb:1.22436570
"""  # the published baseline, 2026-03-17_NaiveBaseline
TABLE = {"author": "Baseline", "github_id": "openai", "name": "Naive Baseline", "date": "2026-03-18T14:56:29Z", "val_loss": 2.07269931,
         "val_bpb": 1.2243657, "bytes_total": 15863489, "bytes_code": 47642}
RESULTS = {"dataset": "gsm8k", "model": "Qwen/Qwen2.5-3B-Instruct", "train_samples": 200, "test_samples": 256, "base_train_reward": 0.6,
           "base_test_accuracy": 0.61, "sigma_stats": {"0.001": {"mean": 0.6, "count": 8}}, "best_sigma": 0.001,
           "ensemble_results": {"2": {"accuracy": 62.5, "correct": 160}}, "top_k_perturbs": [[952224740, 0.001], [12, 0.002]],
           "top_k_train_rewards": [0.7942, 0.7]}
SEEDS = {"base_model_path": "Qwen/Qwen2.5-3B-Instruct", "best_sigma": 0.001, "top_k_models": [
    {"rank": 1, "seed": 952224740, "sigma": 0.001, "train_reward": 0.7942}, {"rank": 2, "seed": 12, "sigma": 0.002, "train_reward": 0.7}]}


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)

    def write(self, name: str, what: str | dict[str, Any]) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(what if isinstance(what, str) else json.dumps(what), encoding="utf-8")
        return path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "2026-03-17_NaiveBaseline")
    made.write("train.log", LOG)
    made.write("submission.json", TABLE)
    made.write("train_gpt.py", "import torch\n")
    made.write("requirements.txt", "torch\n")
    return made


def test_a_submission_becomes_a_record(folder: Folder, tmp_path: Path) -> None:
    [(place, record)] = import_runs([folder.path], tmp_path / "out")
    assert place == tmp_path / "out" / "2026-03-17_NaiveBaseline" and read_record(place) == record
    assert sorted(p.name for p in place.iterdir()) == ["metrics.jsonl", "record.json", "submission.json", "train.log"]
    assert (place / "train.log").read_bytes() == (folder.path / "train.log").read_bytes()
    assert (record.status, record.track, record.seed, record.created_utc) == ("imported", "golf", 1337, "2026-03-18T14:56:29+00:00")
    training, artifact = record.training, record.artifact
    assert (training.num_steps, training.step_ms_mean, training.train_s, training.budget_s) == (13_780, 43.54, 600.038, 600.0)
    assert (training.num_parameters, training.batch_tokens, training.peak_memory_bytes) == (17_059_912, 524_288, 10_184 * 2**20)
    assert (training.step_ms_p50, training.num_tokens, training.final_train_loss) == (None, None, None)  # the log does not say
    assert (artifact.scheme, artifact.codec, artifact.code_bytes, artifact.weight_bytes, artifact.total_bytes, artifact.payload_bytes) == (
        "int8", "zlib", 47_642, 15_815_847, 15_863_489, 17_178_912)
    scores = {score.label: score for score in record.imported.scores}
    assert list(scores) == ["last_validation", "final_int8_zlib_roundtrip", "submission.json"]
    final = scores["final_int8_zlib_roundtrip"]
    assert (final.bpb, final.nats_per_token, final.digits, final.seconds) == (1.2243657, 2.07269931, 8, 1.401)
    assert (final.window, final.stride, final.documents, final.text, final.split_sha256) == (None,) * 5
    assert record.imported.figures["val_tokens"] == 63_779_840 and record.imported.figures["submission"] == TABLE
    assert record.imported.unread == [] and record.scores == []
    assert [f["name"] for f in record.imported.files] == ["train.log", "submission.json"]


def test_curves_are_read_as_own_ones_are(folder: Folder, tmp_path: Path) -> None:
    [(place, _)] = import_runs([folder.path], tmp_path / "out")
    metrics = read_metrics(place / "metrics.jsonl")
    assert [(row["step"], row["loss"], row["elapsed_s"], row["step_ms"]) for row in metrics.steps] == [
        (1, 6.9408, 0.024, None), (200, 2.8041, 8.677, None)]
    assert [(row["step"], row["val_loss"], row["val_bpb"], row["elapsed_s"]) for row in metrics.validations] == [
        (0, 6.937, 4.0978, 0.0), (200, 2.8397, 1.6774, 8.699), (13_780, 2.0606, 1.2172, 600.038)]


def test_times_that_the_second_dialect_leaves_out(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("0/20000 val_loss: 8.9980 val_bpb: 4.1114\n500/20000 train_loss: 2.7320 train_time: 0.8m tok/s: 8425708\n"
                   "3000/20000 val_loss: 2.5 val_bpb: 1.1423\n5025/20000 val_loss: 2.3485 val_bpb: 1.0731\n"
                   "stopping_early: wallclock_cap train_time: 599675ms step: 5025/20000\n")
    [(place, record)] = import_runs([log], tmp_path / "out")
    assert [(row["step"], row["elapsed_s"]) for row in read_metrics(place / "metrics.jsonl").validations] == [(0, 0.0), (5025, 599.675)]
    assert any("no training time (the first is step 3,000)" in sentence for sentence in record.imported.unread)
    assert record.training.train_s == 599.675 and record.training.step_ms_mean is None and record.artifact is None


@pytest.mark.parametrize(("changes", "says"), [
    # the version of the baseline's submission.json that was first published, beside the log of another run
    ({"val_loss": 2.06035852, "val_bpb": 1.21687994, "bytes_total": 15863068, "bytes_code": 48140},
     ["states val_bpb 1.21687994, and no score of the log is that (its last is 1.22436570)", "states val_loss 2.06035852",
      "states 15,863,068 bytes (total_bytes), and the log 15,863,489", "states 48,140 bytes (code_bytes), and the log 47,642"]),
    ({"val_bpb": 1.0108}, ["submission.json does not follow from its val_loss 2.07269931", "states val_bpb 1.0108"]),
    ({"date": "spring"}, ["the date 'spring' is not understood"]),
    ({"val_bpb": 1.2244, "val_loss": 2.0727}, []),
    ({"val_bpb": 1.22436, "val_loss": 2.07269}, []),  # some cut their digits off
    ({"val_bpb": "1.1"}, []),  # no number, so no claim; it stays in the figures as it stands
])
def test_a_table_against_its_log(folder: Folder, tmp_path: Path, changes: dict[str, Any], says: list[str]) -> None:
    folder.write("submission.json", TABLE | changes)
    [(_, record)] = import_runs([folder.path], tmp_path / "out")
    unread = record.imported.unread
    assert all(any(expected in sentence for sentence in unread) for expected in says), unread
    assert bool(unread) == bool(says), unread
    assert record.artifact.total_bytes == 15_863_489  # the log's figures stand


def seeds_folder(tmp_path: Path) -> Folder:
    """As 2026-04-09 states its seeds; the losses belong to these scores."""
    made = Folder(tmp_path / "three")
    bpbs = {42: "1.08079", 314: "1.08103", 999: "1.08118"}
    for seed, bpb in bpbs.items():
        made.write(f"train_seed{seed}.log", f"seed: {seed}\nquantized_ttt val_loss:{float(bpb) * 2.58308:.8f} val_bpb:{bpb}000 eval_time:366525ms\n"
                                            "Code size: 16630 bytes\nSerialized model quantized+brotli: 15975300 bytes\n"
                                            "Total submission size quantized+brotli: 15991930 bytes\n")
    by_seed = {str(s): {"val_bpb": float(b), "artifact_bytes": 15991930} for s, b in bpbs.items()}
    made.write("submission.json", {"val_bpb": 1.08100, "val_bpb_std": 0.0002, "seeds": list(bpbs), "hardware": "8xH100 80GB SXM",
                                   "date": "2026-04-09", "seed_results": by_seed})
    return made


def test_each_seed_is_a_record_of_its_own(tmp_path: Path) -> None:
    made = import_runs([seeds_folder(tmp_path).path], tmp_path / "out")
    assert sorted(place.name for place, _ in made) == ["three_seed314", "three_seed42", "three_seed999"]
    for place, record in made:
        assert record.imported.unread == [] and record.provenance["device"] == "8xH100 80GB SXM" and record.name == "three"
        labels = [score.label for score in record.imported.scores]
        assert labels == ["quantized_ttt", "submission.json", f"submission.json:seed_results.{record.seed}"], place
        assert record.artifact.total_bytes == 15_991_930 and (place / "train.log").read_text().startswith(f"seed: {record.seed}\n")
        assert len(record.imported.files) == 2
    for folder, _ in made:
        add_record(folder, tmp_path / "records")
    assert len(list(iter_records(tmp_path / "records"))) == 3


def test_a_seed_against_its_own_log(tmp_path: Path) -> None:
    folder = seeds_folder(tmp_path)
    table = json.loads((folder.path / "submission.json").read_text())
    table["seed_results"]["42"]["val_bpb"] = 1.08118  # another seed's
    folder.write("submission.json", table)
    unread = {record.seed: record.imported.unread for _, record in import_runs([folder.path], tmp_path / "out")}
    assert not unread[314] and not unread[999] and any("seed_results.42 states val_bpb 1.08118" in sentence for sentence in unread[42])


def test_a_headline_may_be_of_any_log_and_its_mean_of_logs_that_are_not_here(tmp_path: Path) -> None:
    """Totals and weights that the table states of one seed contradict no other seed's log; the mean of its own seeds is no contradiction."""
    folder = seeds_folder(tmp_path)
    table = json.loads((folder.path / "submission.json").read_text()) | {"bytes_total": 15_991_930, "bytes_model_quantized_brotli": 15_975_300}
    folder.write("submission.json", table)
    folder.write("train_seed314.log", (folder.path / "train_seed314.log").read_text().replace("15975300", "15975301").replace("15991930", "15991931"))
    table["seed_results"]["314"]["artifact_bytes"] = 15_991_931
    folder.write("submission.json", table)
    assert [record.imported.unread for _, record in import_runs([folder.path], tmp_path / "out")] == [[], [], []]
    for seed in (314, 999):
        (folder.path / f"train_seed{seed}.log").unlink()
    [(_, record)] = import_runs([folder.path], tmp_path / "one")
    assert record.imported.unread == []
    folder.write("submission.json", table | {"val_bpb": 1.0805, "bytes_model_quantized_brotli": 15_975_301})
    [(_, record)] = import_runs([folder.path], tmp_path / "two")
    assert len(record.imported.unread) == 2 and "15,975,301 bytes (weight_bytes)" in record.imported.unread[0]
    table["seed_results"]["42"]["artifact_bytes"] = 15_991_929
    folder.write("submission.json", table)
    [(_, record)] = import_runs([folder.path], tmp_path / "three")
    assert record.imported.unread == ["submission.json:seed_results.42 states 15,991,929 bytes, and the log 15,991,930, 15,975,300"]


@pytest.mark.parametrize(("steps", "named"), [(13_780, False), (13_779, True)])
def test_claimed_steps_against_the_log(folder: Folder, tmp_path: Path, steps: int, named: bool) -> None:
    folder.write("submission.json", TABLE | {"step_stop": steps})
    [(_, record)] = import_runs([folder.path], tmp_path / "out")
    assert bool(record.imported.unread) == named and all("13,779 steps" in sentence for sentence in record.imported.unread)


@pytest.mark.parametrize(("end", "window", "stride"), [
    ("eval_seq_len:512 eval_stride:0", 512, None), ("seq_len:512 stride:64", 512, 64), ("", None, None)])
def test_windows_of_a_score_are_those_of_its_line(folder: Folder, tmp_path: Path, end: str, window: int | None, stride: int | None) -> None:
    log = folder.write("train_s7.log", LOG.replace("seed:1337\n", "") + f"final_z val_loss:2.0 val_bpb:1.1814 eval_time:5ms {end}".rstrip() + "\n")
    [(_, record)] = import_runs([log], tmp_path / "out")
    assert (record.imported.scores[-1].window, record.imported.scores[-1].stride, record.seed) == (window, stride, 7)


def test_sizes_that_do_not_sum(tmp_path: Path) -> None:
    """2026-03-20_PaidPrefix counts a further file, so that code and weights are not the total."""
    log = tmp_path / "train.log"
    log.write_text("Code size: 67890 bytes\nSerialized model int6+zstd: 11684730 bytes\nPaid prefix blob: 4772268 bytes\n"
                   "Total submission size int6+zstd: 16524888 bytes\nfinal_int6_roundtrip_exact val_loss:2.01010302 val_bpb:1.19049623\n")
    [(_, record)] = import_runs([log], tmp_path / "out", name="prefix")
    assert (record.artifact.code_bytes, record.artifact.weight_bytes, record.artifact.total_bytes) == (67_890, None, 16_524_888)
    assert any("11,684,730" in sentence and "16,524,888" in sentence for sentence in record.imported.unread)


def test_what_is_stated_is_kept_apart(folder: Folder, tmp_path: Path) -> None:
    state = ["window=1024", "stride=none", "documents=across", "drop_tail=true", "text=fineweb validation", "split_sha256=ab"]
    [(_, record)] = import_runs([folder.path], tmp_path / "out", state=state)
    assert record.imported.stated == {"window": 1024, "stride": None, "documents": "across", "drop_tail": True, "text": "fineweb validation",
                                      "split_sha256": "ab"}
    assert record.imported.scores[0].window is None
    log = folder.write("train.log", LOG + "final_sliding_window val_loss:2.0132 val_bpb:1.1892 eval_time:3ms stride:64 seq_len:1024\n")
    [(_, record)] = import_runs([log], tmp_path / "two", state=["stride=256", "window=1024"])
    assert record.imported.scores[-1].stride == 64 and record.imported.scores[-1].window == 1024
    assert any("stride is stated as 256, and the files say 64" in sentence for sentence in record.imported.unread)


@pytest.mark.parametrize("state", ["window=0", "window=x", "stride=-1", "stride=", "documents=both", "drop_tail=yes", "seed=1", "window", "=3"])
def test_statements_that_are_not_understood(state: str) -> None:
    with pytest.raises(ValueError, match="--state"):
        read_state([state])


def test_a_statement_twice() -> None:
    with pytest.raises(ValueError, match="window twice"):
        read_state(["window=1", "window=1"])


def test_a_table_alone(tmp_path: Path) -> None:
    path = tmp_path / "submission.json"
    path.write_text(json.dumps(TABLE))
    [(place, record)] = import_runs([path], tmp_path / "out", name="alone")
    assert [(s.label, s.bpb) for s in record.imported.scores] == [("submission.json", 1.2243657)] and record.training.num_steps is None
    assert (record.artifact.total_bytes, record.artifact.code_bytes, record.artifact.weight_bytes) == (15_863_489, 47_642, None)
    assert not (place / "metrics.jsonl").exists()


def test_impossible_bytes_a_token_are_named(tmp_path: Path) -> None:
    path = tmp_path / "submission.json"
    path.write_text(json.dumps({"val_bpb": 0.2665, "val_loss": 2.23}))  # as a bpb over bytes that were not scored comes out
    [(_, record)] = import_runs([path], tmp_path / "out", name="x")
    assert any("12.07 bytes a token" in sentence for sentence in record.imported.unread)
    assert implausible("x", None, None) is None


def test_nothing_is_overwritten_and_all_or_none_is_made(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    [(place, _)] = import_runs([folder.path], out)
    before = {p.name: p.read_bytes() for p in place.iterdir()}
    with pytest.raises(ValueError, match="nothing is overwritten"):
        import_runs([folder.path], out)
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    other = seeds_folder(tmp_path)
    (out / "three_seed999").mkdir()
    with pytest.raises(ValueError, match="three_seed999 exists"):
        import_runs([other.path], out)
    (out / "three_seed999").rmdir()
    calls = []

    def fails(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise OSError("no space left")
        Path(source).replace(target)

    monkeypatch.setattr("bitsperbyte.records.importers.os.rename", fails)
    with pytest.raises(OSError, match="no space"):
        import_runs([other.path], out)
    assert sorted(p.name for p in out.iterdir()) == ["2026-03-17_NaiveBaseline"]


@pytest.mark.parametrize(("files", "says"), [
    ({"readme.md": "# x"}, "holds no train log"), ({"notes.log": "nothing here\n"}, "no result of a run can be read"),
    ({"submission.json": "{"}, "is not JSON"), ({"submission.json": '{"val_bpb": NaN}'}, "is not JSON"), ({"submission.json": "{}"}, "no result"),
    ({"a.json": {"val_bpb": 1.0}, "b.json": {"val_bpb": 1.1}}, "2 tables"), ({"record.json": {"schema_version": 2, "track": "golf"}}, "records add"),
])
def test_folders_without_a_run(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    made = Folder(tmp_path / "x")
    for name, what in files.items():
        made.write(name, what)
    with pytest.raises(ValueError, match=says) as caught:
        import_runs([made.path], tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_paths_that_are_refused(folder: Folder, tmp_path: Path) -> None:
    for paths, says in (([], "nothing to import"), ([tmp_path / "gone.log"], "there is no file"), ([folder.write("a.pt", "x")], "neither a log"),
                        ([folder.write("list.json", "[]")], "holds a list")):
        with pytest.raises(ValueError, match=says):
            import_runs(paths, tmp_path / "out")
    with pytest.raises(ValueError, match="--name is for one"):
        import_runs([folder.path, seeds_folder(tmp_path).path], tmp_path / "out", name="x")


def test_a_log_of_several_runs_gives_no_curve(folder: Folder, tmp_path: Path) -> None:
    folder.write("train.log", LOG + LOG.replace("2.8041", "2.9041").replace("seed:1337", "seed:42"))
    [(place, record)] = import_runs([folder.path], tmp_path / "out")
    assert record.training.num_steps is None and record.training.train_s is None and record.seed is None
    assert not (place / "metrics.jsonl").exists() and any("several runs" in sentence for sentence in record.imported.unread)


# -- RandOpt ------------------------------------------------------------------------------------------------------------


def randopt_folder(tmp_path: Path, **changes: Any) -> Folder:
    made = Folder(tmp_path / "gsm8k_20260301")
    made.write("results.json", RESULTS | changes)
    made.write("model_saves/top_k_seeds.json", SEEDS)
    made.write("args.json", {"population_size": 30, "global_seed": 42, "model_name": RESULTS["model"], "sigma_values": "0.001,0.002"})
    return made


def test_results_of_randopt(tmp_path: Path) -> None:
    [(place, record)] = import_runs([randopt_folder(tmp_path).path], tmp_path / "out")
    assert (record.track, record.status, record.seed, record.randopt) == ("randopt", "imported", 42, None)
    figures = record.imported.figures
    assert figures["results"] == RESULTS and figures["top_k_seeds"] == SEEDS and figures["arguments"]["population_size"] == 30
    assert record.imported.unread == [] and record.imported.scores == []
    assert sorted(p.name for p in place.iterdir()) == ["args.json", "record.json", "results.json", "top_k_seeds.json"]
    assert read_record(add_record(place, tmp_path / "records")).imported == record.imported


@pytest.mark.parametrize(("changes", "says"), [
    ({"ensemble_results": {"2": {"accuracy": 64.5, "correct": 160}}}, "K = 2 has 160 of 256 right, and states 64.5%"),
    ({"top_k_train_rewards": [0.7, 0.7942]}, "falling order"),
    ({"top_k_train_rewards": [0.7]}, "2 members have 1 train rewards"),
    ({"top_k_perturbs": [[1, 0.001], [12, 0.002]]}, "are not the same"),
    ({"model": "other"}, "more than one model"),
    ({"base_train_accuracy": 0.72715}, "mean reward"),
    ({"base_test_accuracy": 61.0}, "percentage or a reward"),
    ({"ensemble_results": {"2": 64.5}}, "ensemble_results of K = 2"),
])
def test_results_that_contradict_themselves(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    [(_, record)] = import_runs([randopt_folder(tmp_path, **changes).path], tmp_path / "out")
    assert any(says in sentence for sentence in record.imported.unread), record.imported.unread


def test_results_of_several_data_sets_and_arguments_beside_them(tmp_path: Path) -> None:
    """As forks write them: a table for each data set, and the arguments under `config`."""
    sets = {"gsm8k": {"2": {"accuracy": 62.5, "correct": 160}}, "countdown": {"2": {"accuracy": 12.5, "correct": 32}}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(RESULTS | {"ensemble_results": sets, "config": {"global_seed": 17}}))
    [(_, record)] = import_runs([path], tmp_path / "out", name="sets")
    assert record.imported.unread == [] and record.seed == 17 and record.imported.figures["results"]["ensemble_results"] == sets
    sets["gsm8k"]["2"]["accuracy"] = 162.5
    path.write_text(json.dumps(RESULTS | {"ensemble_results": sets}))
    [(_, record)] = import_runs([path], tmp_path / "two", name="sets")
    assert record.imported.unread == ["the ensemble of K = 2 of gsm8k states 162.5%"] and record.seed is None


def test_the_best_seeds_alone_and_the_record_of_the_fast_fork(tmp_path: Path) -> None:
    path = tmp_path / "top_k_seeds.json"
    path.write_text(json.dumps(SEEDS))
    [(_, record)] = import_runs([path], tmp_path / "out", name="seeds")
    assert record.track == "randopt" and record.imported.figures == {"results": SEEDS}
    fork = {"git_commit": "abc", "hardware": {"gpu": "NVIDIA H100", "gpu_count": 4}, "population_size": 64, "ensemble_accuracy": {"8": 82.0},
            "fineweb": {"base": {"bpb": 0.2665, "nats_per_token": 2.231, "n_scored_tokens": 10279, "n_bytes": 124142}, "manifest_sha256": "46"}}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(fork))
    [(place, record)] = import_runs([path], tmp_path / "out", name="fork")
    assert record.imported.scores[0].bpb == 0.2665 and record.provenance["num_devices"] == 4 and record.provenance["commit"] == "abc"
    assert any("124142 bytes to 10279 scored tokens" in sentence for sentence in record.imported.unread)
    assert (place / "published_record.json").is_file()


@pytest.mark.parametrize(("table", "expected"), [(RESULTS, True), (SEEDS, True), (TABLE, False), ({}, False), ({"population_size": 3}, False)])
def test_files_of_randopt_are_known(table: dict[str, Any], expected: bool) -> None:
    assert is_randopt(table) == expected


# -- properties ---------------------------------------------------------------------------------------------------------


def numbers_in(value: Any) -> set[float]:
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, (int, float)):
        return {float(value)}
    if isinstance(value, dict):
        return set().union(*(numbers_in(item) for item in value.values())) if value else set()
    return set().union(*(numbers_in(item) for item in value)) if isinstance(value, list) and value else set()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, len(LOG) - 1), st.sampled_from(["", "9", " ", "\n", ":", "x", ","]), st.integers(0, 4)), max_size=5),
       claims=st.dictionaries(st.sampled_from(["val_bpb", "val_loss", "bytes_total", "bytes_code", "seed", "x"]),
                              st.one_of(st.integers(0, 10**8), st.floats(0, 10, allow_nan=False), st.text(max_size=3), st.none()), max_size=5))
def test_every_number_of_a_record_stands_in_its_files(tmp_path_factory: pytest.TempPathFactory, edits: list, claims: dict[str, Any]) -> None:
    text = LOG
    for place, what, removed in edits:
        text = text[:place] + what + text[place + removed:]
    folder = Folder(tmp_path_factory.mktemp("x") / "run")
    folder.write("train.log", text)
    folder.write("submission.json", claims)
    [(place, record)] = import_runs([folder.path], folder.path.parent / "out")
    printed = re.findall(r"\d+(?:,\d{3})+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", text + " " + json.dumps(claims))
    standing = {float(n.replace(",", "")) for n in printed} | {float(n) for n in re.findall(r"\d+(?:\.\d+)?", text)}
    standing |= {n / 1e3 for n in standing} | {n * 2**20 for n in standing}  # milliseconds as seconds, MiB as bytes
    data = record.model_dump(mode="json")
    said = [data[part] for part in ("training", "artifact", "data", "seed")] + [[{**s, "digits": None} for s in data["imported"]["scores"]]]
    said.append({name: value for name, value in data["imported"]["figures"].items() if name != "submission"})
    assert numbers_in(said) <= standing
    for line in (place / "metrics.jsonl").read_text().splitlines() if (place / "metrics.jsonl").exists() else ():
        assert numbers_in(json.loads(line)) <= standing | {0.0}
