"""The points of golf figures, against the rows of metrics.jsonl read by other code."""

import json
from pathlib import Path

import numpy as np
import pytest

from bitsperbyte.records.report.drawing import Canvas
from bitsperbyte.records.report.page import make_report, read_runs


@pytest.fixture
def canvases(quick: list[tuple[str, Canvas]], golf_runs: list[Path]) -> dict[str, Canvas]:
    make_report(read_runs(golf_runs))
    return {name: canvas for name, canvas in quick if canvas.sheet.is_wide}


def rows_of(folder: Path, key: str) -> dict[int, dict]:
    """By step, the last row that has the key: the first trials of steps trained twice are superseded."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if key in row}


def curves(canvas: Canvas, panel: int) -> list[list[tuple[float, float]]]:
    """Data lines of a panel, without marks at the edge and lines across."""
    lines = canvas.figure.axes[panel].lines
    return [list(zip(*map(np.ndarray.tolist, map(np.asarray, line.get_data())), strict=True)) for line in lines if line.get_linestyle() != "None"
            and len(line.get_xdata()) > 0 and list(line.get_xdata()) != [0, 1]]


def test_curves_are_the_rows_that_count(canvases: dict[str, Canvas], golf_runs: list[Path]) -> None:
    for name, key, panels in (("loss", "loss", {0: "step", 1: "elapsed_s"}), ("bpb", "val_bpb", {0: "step", 1: "elapsed_s"})):
        for panel, along in panels.items():
            assert curves(canvases[name], panel) == [[(row[along], row[key]) for row in rows_of(folder, key).values()] for folder in golf_runs]
    for panel, key in ((0, "lr_scale"), (1, "step_ms")):
        assert curves(canvases["pace"], panel) == [[(row["step"], row[key]) for row in rows_of(folder, key).values()] for folder in golf_runs]
    assert max(y for _, y in curves(canvases["loss"], 0)[0]) < 99, "the lost steps' loss is not drawn"


def test_the_gap_is_b_less_a(canvases: dict[str, Canvas], golf_runs: list[Path]) -> None:
    a, b = (rows_of(folder, "val_bpb") for folder in golf_runs)
    [at_steps] = curves(canvases["gap"], 0)
    assert at_steps == [(step, b[step]["val_bpb"] - a[step]["val_bpb"]) for step in (4, 8, 12)]
    [at_seconds] = curves(canvases["gap"], 1)
    for seconds, gap in at_seconds:
        before, after = (max((r for r in a.values() if r["elapsed_s"] <= seconds), key=lambda r: r["elapsed_s"]),
                         min((r for r in a.values() if r["elapsed_s"] >= seconds), key=lambda r: r["elapsed_s"]))
        width = after["elapsed_s"] - before["elapsed_s"]
        share = (seconds - before["elapsed_s"]) / width if width else 0.0
        mine = next(r["val_bpb"] for r in b.values() if r["elapsed_s"] == seconds)
        assert gap == pytest.approx(mine - before["val_bpb"] - share * (after["val_bpb"] - before["val_bpb"]), abs=1e-12)


def test_the_bar_adds_up_to_the_artifact(canvases: dict[str, Canvas], golf_runs: list[Path]) -> None:
    artifacts = [json.loads((folder / "record.json").read_text())["artifact"] for folder in golf_runs]
    bars = [patch for patch in canvases["ledger"].figure.axes[0].patches]
    for height, artifact in enumerate(artifacts):
        own = [bar for bar in bars if abs(bar.get_y() + bar.get_height() / 2 - height) < 0.01]
        ends = [bar.get_x() + bar.get_width() for bar in own]
        assert max(ends) == pytest.approx(artifact["cap_bytes"] / 1e6)
        alone = sum(tensor["compressed_bytes"] for tensor in artifact["tensors"])
        assert ends[-2] == pytest.approx((artifact["code_bytes"] + max(artifact["weight_bytes"], alone)) / 1e6)
        assert own[0].get_width() == pytest.approx(artifact["code_bytes"] / 1e6)


def test_loss_by_position_is_the_records(canvases: dict[str, Canvas], golf_runs: list[Path]) -> None:
    for drawn, folder in zip(curves(canvases["positions"], 0), golf_runs, strict=True):
        scores = json.loads((folder / "record.json").read_text())["scores"]
        part = next(score for score in scores if score["label"] == "artifact")["per_position"]
        assert [y for _, y in drawn] == [y for y in part["nats_per_token"] if y is not None]
        assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)
