"""The points of RandOpt figures and the lists of questions, against record and journal read by other code."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bitsperbyte.records.report.drawing import Canvas
from bitsperbyte.records.report.page import make_report, read_runs
from bitsperbyte.records.report.randopt_figures import bins_of


def part_of(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())["randopt"]


def search_rows(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("phase") == "search"]


@pytest.fixture(params=["answers", "documents"])
def drawn(request: pytest.FixtureRequest, quick: list[tuple[str, Canvas]], randopt_runs: dict[str, Path]) -> tuple[Path, dict[str, Canvas]]:
    make_report(read_runs([randopt_runs[request.param]]))
    return randopt_runs[request.param], {name: canvas for name, canvas in quick if canvas.sheet.is_wide}


def test_histograms_count_every_member_once(drawn: tuple[Path, dict[str, Canvas]]) -> None:
    folder, canvases = drawn
    by_sigma: dict[float, list[float]] = {}
    for row in search_rows(folder):
        by_sigma.setdefault(row["sigma"], []).append(row["reward"])
    axes = canvases["rewards0"].figure.axes
    assert [axis.get_title() for axis in axes] == [f"sigma {sigma:g}" for sigma in sorted(by_sigma)]
    for axis, sigma in zip(axes, sorted(by_sigma), strict=True):
        assert sum(bar.get_height() for bar in axis.patches) == len(by_sigma[sigma])
        for bar in axis.patches:
            left, right = bar.get_x(), bar.get_x() + bar.get_width()
            assert bar.get_height() == pytest.approx(sum(left <= reward < right or reward == right == max(by_sigma[sigma])
                                                         for reward in by_sigma[sigma])), (left, right)
        assert axis.lines[0].get_xdata()[0] == part_of(folder)["base"]["train_reward"]


@pytest.mark.parametrize("rewards", [[0.5], [0.5, 0.5], [0.0, 1.0], [0.25, 0.5, 0.75], list(np.linspace(-1.3, -1.2, 300))])
def test_bins_hold_every_reward(rewards: list[float]) -> None:
    edges = bins_of(np.array(rewards))
    assert (np.diff(edges) > 0).all() and np.histogram(rewards, edges)[0].sum() == len(rewards)


def test_results_against_k_and_their_controls(drawn: tuple[Path, dict[str, Canvas]]) -> None:
    folder, canvases = drawn
    part, [axis] = part_of(folder), canvases["ensemble0"].figure.axes
    name = "bpb" if "bpb" in part["base"]["test"] else "accuracy"
    expected = sorted((row["k"], row["test"][name]) for row in (part["ensemble"], *part["secondary"]))
    lines = [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axis.lines]
    assert expected in [[(int(x), y) for x, y in line] for line in lines if len(line) == len(expected)]
    heights = {float(y) for line in lines for _, y in line}
    controls = part["controls"]
    wanted = [part["base"]["test"][name], controls["best_single"]["test"][name], controls["random_k"]["mean" if name == "accuracy" else "mean_bpb"]]
    wanted += [controls["base_majority"]["test"][name]] if controls["base_majority"]["enabled"] else []
    assert set(wanted) <= heights
    bars = [[tuple(map(float, point)) for point in segment] for collection in axis.collections for segment in collection.get_segments()]
    ends = [tuple(sorted((low[1], high[1]))) for low, high in bars]
    intervals = [(controls["random_k"]["low"], controls["random_k"]["high"])]
    intervals += [(row["test"]["low"], row["test"]["high"]) for row in (part["ensemble"], *part["secondary"])] if name == "accuracy" else []
    for low, high in intervals:
        assert any(low == pytest.approx(a) and high == pytest.approx(b) for a, b in ends), (low, high)


def test_train_reward_against_test_result(drawn: tuple[Path, dict[str, Canvas]]) -> None:
    folder, canvases = drawn
    part, [axis] = part_of(folder), canvases["transfer0"].figure.axes
    key = "test_bpb" if "bpb" in part["base"]["test"] else "test_accuracy"
    members = [part["controls"]["random_k"]["pool"], part["selection"]["members"]]
    for collection, own in zip(axis.collections, members, strict=True):
        assert {tuple(point) for point in collection.get_offsets().tolist()} == {(m["train_reward"], m[key]) for m in own if m.get(key) is not None}


def test_the_best_so_far_only_rises(drawn: tuple[Path, dict[str, Canvas]]) -> None:
    folder, canvases = drawn
    members, best = canvases["progress0"].figure.axes[0].lines[:2]
    rows = search_rows(folder)
    assert list(members.get_ydata()) == [row["reward"] for row in rows]
    assert members.get_xdata()[-1] == pytest.approx(sum(row["seconds"] for row in rows))
    assert list(best.get_ydata()) == [max(row["reward"] for row in rows[: n + 1]) for n in range(len(rows))]


@pytest.mark.usefixtures("quick")
def test_fixed_and_broken_questions_are_named(randopt_runs: dict[str, Path]) -> None:
    folder = randopt_runs["answers"]
    items = part_of(folder)["items"]
    text = make_report(read_runs([folder])).html
    for word, a, b in (("fixed", "ensemble", "base"), ("broke", "base", "ensemble")):
        expected = [name for name, x, y in zip(items["ids"], items["correct"][a], items["correct"][b], strict=True) if (x, y) == ("1", "0")]
        [block] = re.findall(rf"<details[^>]*><summary><span[^>]*>(\d+)</span> {word}(.*?)</details>", text)
        assert int(block[0]) == len(expected) and re.findall(r"<code><span[^>]*>([^<]*)</span></code>", block[1]) == expected


@pytest.mark.usefixtures("quick")
def test_documents_that_changed_most_are_named(randopt_runs: dict[str, Path]) -> None:
    folder = randopt_runs["documents"]
    items = part_of(folder)["items"]
    gaps = sorted((a - b, name) for a, b, name in zip(items["nats"]["mixture"], items["nats"]["base"], items["ids"], strict=True))
    text = make_report(read_runs([folder])).html.partition("Documents, one by one")[2].partition("</table>")[0]
    assert re.findall(r"<code><span[^>]*>([^<]*)</span></code>", text) == [name for _, name in (*gaps[:5], *gaps[-5:])]
