"""Looking at run folders: whatever moment a look falls into, it shows what stands in whole lines, and leaves no trace."""

import json
import os
import random
import shutil
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import write_record
from bitsperbyte.records.watch import MAX_POINTS, STALE_AFTER_S, RunWatch, SeedsWatch, duration, grouped, open_watch, status_of
from bitsperbyte.run.folder import LOCK, RunFolder, write_atomic
from bitsperbyte.run.metrics import read_metrics
from bitsperbyte.run.owner import Owner

CONFIG = {"name": "tiny", "schedule": {"wallclock_s": 100.0, "max_steps": 400}, "train": {"batch_tokens": 1000},
          "optim": {"matrix_lr": 0.04, "embed_lr": 0.05, "scalar_lr": 0.06}, "artifact": {"cap_bytes": 5000}}
RANDOPT_CONFIG = {"name": "ro", "search": {"population": 8}, "noise": {"sigmas": [0.1, 0.2]}}


def record_of(status: str = "running", **changes: Any) -> Record:
    return Record(**{"track": "golf", "name": "tiny", "status": status, "created_utc": "2026-01-31T12:00:00+00:00", **changes})


def make_run(path: Path, config: dict[str, Any] = CONFIG) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    return path


def step_row(step: int, loss: float = 2.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "elapsed_s": step / 10, "step_ms": 100.0 + step % 2, "lr_scale": 0.5, "tokens": 1000 * step}


def seed_row(index: int, reward: float, sigma: float, phase: str = "search") -> dict[str, Any]:
    return {"phase": phase, "index": index, "seed": 50 + index, "sigma": sigma, "reward": reward, "rewards": [reward], "num_prompts": 4,
            "num_tokens": 30, "num_truncated": 1, "seconds": 0.25}


def append(path: Path, *rows: dict[str, Any], tail: str = "") -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + tail)


# -- golf -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(lives=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5), seed=st.integers(0, 999))
def test_however_the_rows_arrive_a_look_agrees_with_what_stands_in_the_file(tmp_path_factory: pytest.TempPathFactory,
                                                                           lives: list[tuple[int, int]], seed: int) -> None:
    """Rows of killed and resumed lives, written in pieces that end anywhere, looked at after each piece."""
    run_dir, rng, rows, at = make_run(tmp_path_factory.mktemp("watch")), random.Random(seed), [], 0
    for life, (back, forward) in enumerate(lives):
        if life:
            at = max(0, at - back)
            rows.append({"event": "resume", "from_step": at, "charged_s": 0.0, "elapsed_s": at / 10})
        for _ in range(forward):
            at += 1
            rows.append(step_row(at, rng.random()))
        rows.append({"step": at, "val_loss": 3.0, "val_bpb": 1 + rng.random(), "elapsed_s": at / 10})
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    cuts = sorted(rng.sample(range(len(data) + 1), min(4, len(data) + 1)))
    watch, path = RunWatch(run_dir), run_dir / "metrics.jsonl"
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        with open(path, "ab") as file:
            file.write(data[begin:end])
        g, metrics = watch.look().golf, read_metrics(path)
        losses = [row["loss"] for row in metrics.steps]
        assert (g.step, g.num_resumes, g.num_lost_steps) == (metrics.last_step, metrics.num_resumes, metrics.num_lost_steps)
        assert g.elapsed_s == metrics.last_elapsed_s and g.loss == (losses[-1] if losses else None)
        assert g.loss_mean == (pytest.approx(statistics.fmean(losses[-20:])) if losses else None)
        assert g.val_bpb == (metrics.validations[-1]["val_bpb"] if metrics.validations else None)
        assert [y for _, y in g.loss_curve] == losses


def test_figures_of_a_golf_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    append(run_dir / "metrics.jsonl", *(step_row(step) for step in range(1, 101)))
    g = RunWatch(run_dir).look().golf
    assert g.step_ms == 100.5 and g.tokens_per_s == pytest.approx(1000 / 0.1005) and g.tokens == 100_000
    assert g.learning_rates == {"matrix": 0.02, "embed": 0.025, "scalar": 0.03}
    assert g.left_s == pytest.approx(min(100 - 10.0, 300 * 0.1005)) and g.bytes == {"cap": 5000}
    (run_dir / "config.yaml").write_text(json.dumps({**CONFIG, "schedule": {"wallclock_s": None, "max_steps": None}}))
    assert RunWatch(run_dir).look().golf.left_s is None


def test_the_record_that_appears_at_the_end_ends_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    watch = None
    with RunFolder.open(run_dir, resume=False, kind="golf") as folder:
        watch = RunWatch(run_dir)
        assert watch.look().status.name == "starting"
        make_run(run_dir)
        write_record(run_dir / "record.json", record_of())
        append(run_dir / "metrics.jsonl", step_row(1), tail='{"step": 2, "lo')
        view = watch.look()
        assert (view.status.name, view.status.ended, view.golf.step, view.track) == ("running", False, 1, "golf")
        assert view.status.detail.startswith(f"process {os.getpid()}, last written ")
        score = {"label": "artifact", "text": "v", "window": 8, "documents": "across", "nats": 0.0, "num_bytes": 5, "num_tokens": 2, "bpb": 0.0,
                 "nats_per_token": 0.0, "bytes_per_token": 2.5}
        artifact = {"code_bytes": 1000, "weight_bytes": 2500, "total_bytes": 3500, "cap_bytes": 5000, "margin_bytes": 1500}
        write_record(folder.path / "record.json", record_of("finished", scores=[score], artifact=artifact))
        view = watch.look()
        assert view.status.name == "running" and "its record says finished" in view.status.detail and not view.status.ended
    view = watch.look()
    assert (view.status.name, view.status.ended) == ("finished", True) and view.golf.scores == {"artifact": 0.0}
    assert view.golf.bytes == {"code": 1000, "weight": 2500, "total": 3500, "cap": 5000}


def test_a_file_that_was_replaced_counts_from_its_beginning(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    watch, path = RunWatch(run_dir), run_dir / "metrics.jsonl"
    append(path, *(step_row(step) for step in range(1, 9)))
    assert watch.look().golf.step == 8
    write_atomic(path, json.dumps(step_row(1, 7.0)) + "\n")
    assert watch.look().golf.step == 1
    path.write_text("")
    assert watch.look().golf.step == 0
    path.unlink()
    assert watch.look().golf.step == 0
    append(path, step_row(1), step_row(2))
    assert watch.look().golf.step == 2


@pytest.mark.parametrize("line", ["nonsense", "[1]", "null", '{"step": 4}', '{"step": "x", "loss": 1, "elapsed_s": 1}', "[" * 100_000,
                                  '{"step": 4, "loss": 1, "elapsed_s": 1' + "0" * 400 + "}", "\x00\x00"])
def test_a_line_that_is_no_row_is_noted_and_the_rest_is_shown(tmp_path: Path, line: str) -> None:
    run_dir = make_run(tmp_path / "run")
    append(run_dir / "metrics.jsonl", step_row(1), tail=line + "\n")
    append(run_dir / "metrics.jsonl", step_row(2))
    view = RunWatch(run_dir).look()
    assert view.golf.step == 2 and len(view.notes) == 1 and "metrics.jsonl:2 is left out here" in view.notes[0]


def test_a_damaged_record_or_config_is_noted_and_what_it_said_before_stands(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_record(run_dir / "record.json", record_of("finished"))
    watch = RunWatch(run_dir)
    assert watch.look().status.name == "finished" and not watch.look().notes
    (run_dir / "record.json").write_text("{")
    (run_dir / "config.yaml").write_text("name: [")
    view = watch.look()
    assert view.status.name == "finished" and len(view.notes) == 2 and view.golf.budget_s == 100.0
    write_record(run_dir / "record.json", record_of("crashed", error="out of\nmemory"))
    view = watch.look()
    assert (view.status.name, view.status.detail) == ("crashed", "out of memory") and len(view.notes) == 1


@pytest.mark.parametrize("config", [{"schedule": 7}, {"schedule": {"wallclock_s": "soon", "max_steps": True}, "train": [1], "optim": None},
                                    {"schedule": {}, "name": ["x"]}])
def test_a_strangers_config_of_other_types(tmp_path: Path, config: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path / "run", config)
    append(run_dir / "metrics.jsonl", {"step": 1, "loss": float("nan"), "elapsed_s": 1.0, "step_ms": None})
    view = RunWatch(run_dir).look()
    assert view.golf.step == 1 and view.golf.loss is None and view.golf.budget_s is None and view.golf.step_ms is None
    json.dumps(view.to_dict(), allow_nan=False)


# -- randopt ----------------------------------------------------------------------------------------------------------


def test_figures_of_a_randopt_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", RANDOPT_CONFIG)
    watch = RunWatch(run_dir)
    assert watch.look().randopt.phase is None and watch.look().track == "randopt"
    journal = run_dir / "journal.jsonl"
    append(journal, {"journal": 1, "identity": {}}, seed_row(-1, 0.5, 0.0, "base_train"))
    rewards = [0.25, 0.75, 0.5, 1.0, 0.5]
    for i, reward in enumerate(rewards):
        append(journal, seed_row(i, reward, [0.1, 0.2][i % 2]))
        r = watch.look().randopt
        assert r.best["reward"] == max(rewards[: i + 1]) and r.num_rows["search"] == i + 1
    assert (r.phase, r.population, r.base_reward, r.truncated_share) == ("search", 8, 0.5, 0.25)
    assert r.seeds_per_s == 4.0 and r.tokens_per_s == 120.0 and r.left_s == 0.75 and r.best == {"reward": 1.0, "seed": 53, "sigma": 0.2, "index": 3}
    assert [(s.sigma, s.num, s.best) for s in r.per_sigma] == [(0.1, 3, 0.5), (0.2, 2, 1.0)]
    for sigma, of in zip(r.per_sigma, ([0.25, 0.5, 0.5], [0.75, 1.0]), strict=True):
        assert sigma.mean == pytest.approx(statistics.fmean(of)) and sigma.share_above_base == sum(x > 0.5 for x in of) / len(of)
        assert sigma.standard_error == pytest.approx(statistics.stdev(of) / len(of) ** 0.5)
    append(journal, seed_row(3, 0.5, 0.2, "test"), {"phase": "search", "reward": 1.0, "seconds": 1.0}, {"phase": 3})
    view = watch.look()
    assert view.randopt.phase == "test" and view.randopt.num_rows == {"base_train": 1, "search": 5, "test": 1} and len(view.notes) == 2


# -- status -----------------------------------------------------------------------------------------------------------


def owner(state: str) -> Owner:
    return Owner(7, "node17", "golf", state, state == "alive")


@pytest.mark.parametrize(("of", "record", "age_s", "expected", "ended"), [
    ("alive", None, 0.0, "running", False), ("alive", "running", 9e9, "running", False), ("alive", "interrupted", 1.0, "running", False),
    ("gone", "running", 0.0, "stale", True), ("gone", None, 0.0, "stale", True), ("gone", "interrupted", 0.0, "interrupted", True),
    ("elsewhere", "running", 1.0, "running", False), ("elsewhere", "running", STALE_AFTER_S + 1, "stale", False),
    ("elsewhere", "finished", 1.0, "finished", True), (None, "running", 1.0, "running", False),
    (None, "running", STALE_AFTER_S + 1, "stale", True), (None, "over_cap", None, "over_cap", True), (None, None, None, "stale", True),
])
def test_status(of: str | None, record: str | None, age_s: float | None, expected: str, ended: bool) -> None:
    found = status_of(owner(of) if of else None, record_of(record) if record else None, age_s, has_config=True)
    assert (found.name, found.ended) == (expected, ended)
    if of == "elsewhere" and expected != "finished":
        assert "process 7 on node17 cannot be asked from here" in found.detail


def test_a_copy_of_a_run_in_progress_is_stale_and_one_on_another_host_may_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with RunFolder.open(run_dir, resume=False, kind="golf"):
        make_run(run_dir)
        write_record(run_dir / "record.json", record_of())
        shutil.copytree(run_dir, tmp_path / "copy")
        assert RunWatch(run_dir).look().status.name == "running"
    assert RunWatch(tmp_path / "copy").look().status.name == "stale"
    (tmp_path / "copy" / LOCK).write_text(json.dumps({"kind": "golf", "pid": 1, "host": socket.gethostname() + "-other"}))
    view = RunWatch(tmp_path / "copy").look()
    assert view.status.name == "running" and view.owner == f"process 1 on {socket.gethostname()}-other"
    for path in (tmp_path / "copy").iterdir():
        os.utime(path, (time.time() - 2 * STALE_AFTER_S,) * 2)
    assert RunWatch(tmp_path / "copy").look().status.name == "stale"


def test_looking_leaves_no_trace_and_holds_no_lock(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    append(run_dir / "metrics.jsonl", step_row(1), tail='{"torn')
    (run_dir / "train.log").write_text("one\ntwo\n")
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.iterdir()}
    watch = RunWatch(run_dir, num_log_lines=1)
    assert watch.look().log == ["two"]
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.iterdir()} == before
    with RunFolder.open(run_dir, resume=True, kind="golf"):
        assert watch.look().status.name == "running", "what looks on keeps nobody out, and sees who came"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for path, match in ((tmp_path / "none", "there is no folder .*none"), (tmp_path, "holds no run: give the folder of a run")):
        with pytest.raises(ValueError, match=match):
            open_watch(path).look()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="there is no folder"):
        open_watch(tmp_path / "file").look()
    run_dir = make_run(tmp_path / "run")
    watch = open_watch(run_dir)
    watch.look()
    shutil.rmtree(run_dir)
    with pytest.raises(ValueError, match="there is no folder"):
        watch.look()


# -- several seeds ----------------------------------------------------------------------------------------------------


def test_of_several_seeds_the_running_one_is_shown(tmp_path: Path) -> None:
    for n in (1, 2, 10):
        make_run(tmp_path / f"seed_{n}")
        os.utime(tmp_path / f"seed_{n}" / "config.yaml", (1e9 + n, 1e9 + n))
        write_record(tmp_path / f"seed_{n}" / "record.json", record_of("finished"))
        append(tmp_path / f"seed_{n}" / "metrics.jsonl", *(step_row(step) for step in range(1, n + 1)))
    watch = open_watch(tmp_path)
    assert isinstance(watch, SeedsWatch)
    view = watch.look()
    assert [(s.name, s.status, s.step) for s in view.seeds] == [("seed_1", "finished", 1), ("seed_2", "finished", 2), ("seed_10", "finished", 10)]
    assert view.run_dir.endswith("seed_10") and view.status.ended, "the one that began last"
    with RunFolder.open(tmp_path / "seed_2", resume=True, kind="golf"):
        view = watch.look()
        assert view.run_dir.endswith("seed_2") and (view.status.name, view.status.ended) == ("running", False)
    view = watch.look()
    assert not view.status.ended and "is between two seeds or about to end" in view.status.detail, "its process, this one, still runs"
    (tmp_path / "seed_2" / LOCK).unlink()
    assert watch.look().status.ended


# -- values -----------------------------------------------------------------------------------------------------------


@given(points=st.lists(st.tuples(st.floats(0, 1e6), st.floats()), max_size=600), most=st.integers(1, 50))
def test_a_curve_keeps_its_mean_and_its_end(points: list[tuple[float, float]], most: int) -> None:
    found = grouped(points, most)
    finite = [(x, y) for x, y in points if abs(y) < float("inf") and y == y]
    assert len(found) <= most and bool(found) == bool(finite)
    if finite:
        assert found[-1][0] == finite[-1][0]
        low, high = min(y for _, y in finite), max(y for _, y in finite)
        assert all(low <= y <= high or y == pytest.approx(low) or y == pytest.approx(high) for _, y in found)


def test_short_curves_are_themselves() -> None:
    points = [(float(i), i * 0.5) for i in range(MAX_POINTS)]
    assert grouped(points) == points and len(grouped([*points, (240.0, 1.0)])) == 121


def test_durations() -> None:
    assert [duration(s) for s in (0.04, 9.94, 9.96, 59.7, 60, 185, 7620, 90_000, 180_000)] == [
        "0.0 s", "9.9 s", "10 s", "59 s", "1 min 00 s", "3 min 05 s", "2 h 07 min", "1 day 1 h", "2 days 2 h"]
