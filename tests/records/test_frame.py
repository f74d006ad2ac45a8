"""A look drawn for any terminal: it fits, steers nothing, and needs no Unicode."""

import io
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bitsperbyte.records.frame import Frame, bar, chart, histogram, sparkline
from bitsperbyte.records.watch import GolfView, RandOptView, SeedView, SigmaView, Status, View

GOLF = GolfView(step=1200, max_steps=20_000, tokens=629_145_600, loss=2.5, loss_mean=2.51, loss_curve=[(s, 7 / (1 + s / 50)) for s in range(240)],
                val_bpb=1.31, val_step=1000, val_curve=[(500.0, 1.5), (1000.0, 1.31)], step_ms=239.5, tokens_per_s=2_189_000.0, lr_scale=0.5,
                learning_rates={"matrix": 0.02, "embed": 0.3}, elapsed_s=287.4, budget_s=600.0, left_s=312.6, num_resumes=2, num_lost_steps=7,
                bytes={"code": 40_000, "weight": 15_000_000, "total": 15_040_000, "cap": 16_000_000}, scores={"artifact": 1.3012})
RANDOPT = RandOptView(phase="search", num_rows={"base_train": 1, "search": 300, "test": 4}, population=512, base_reward=0.5,
                      best={"reward": 0.61, "seed": 77, "sigma": 1e-3, "index": 8},
                      per_sigma=[SigmaView(1e-3, 150, 0.5, 0.01, 0.61, 0.4), SigmaView(2e-3, 150, 0.4, None, 0.5, None)],
                      rewards=sorted(0.3 + i / 1000 for i in range(300)), truncated_share=0.02, seeds_per_s=2.1, tokens_per_s=34_000.0,
                      elapsed_s=150.0, left_s=101.0, result="52.1% [50, 54]")
HOSTILE = "\x1b[2J\x1b]0;owned\x07\rgone\u202e\t[bold]not markup[/bold]"


def view(**changes: object) -> View:
    base = View("runs/x", "tiny", "golf", Status("running", "process 7 here", False), None, 1.0, GOLF, None, [f"step:{s} loss" for s in range(50)],
                ["a note"], [SeedView("seed_1", "finished", 10, 1.2), SeedView("seed_2", "running", 4, None)])
    return replace(base, **changes)


def drawn(made: View, width: int, height: int | None = None, encoding: str = "utf-8") -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, height=height or 50, force_terminal=False, legacy_windows=False, highlight=False)
    console.print(Frame(made, height), crop=False)
    out.flush()
    return out.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width, height", list(itertools.product([30, 40, 80, 200], [12, 24, 60])))
def test_a_frame_fits_its_screen(width: int, height: int, encoding: str) -> None:
    for made in (view(), view(track="randopt", golf=None, randopt=RANDOPT), view(golf=None, log=["x" * 500])):
        lines = drawn(made, width, height, encoding).splitlines()
        assert all(cell_len(line) <= width for line in lines), max(lines, key=cell_len)
        if width >= 80 and height >= 60:
            assert len(lines) < height


def test_figures_of_a_golf_run_are_there() -> None:
    text = drawn(view(), 100)
    for part in ("1,200 of 20,000", "2.5100", "1.3100 at step 1,000", "239.5 ms", "287.4 of 600 s", "2 times, 7 steps trained again", "1.3012 bpb",
                 "15,040,000 of 16,000,000, 960,000 left", "15,000,000 weights + 40,000 code", "seed_1 finished 1.2000 bpb", "note: a note"):
        assert part in text, (part, text)


def test_figures_of_a_randopt_run_are_there() -> None:
    text = drawn(view(track="randopt", golf=None, randopt=RANDOPT), 100)
    for part in ("300 of 512", "2.1 seeds/s", "reward 0.6100", "seed 77", "2.0% of the answers", "test set 4", "52.1% [50, 54]", "0.001", "40%"):
        assert part in text, (part, text)


def test_the_log_is_shown_whole_without_a_screen_and_by_its_end_on_one() -> None:
    assert "step:0 loss" in drawn(view(), 100)
    text = drawn(view(), 100, 40)
    assert "step:49 loss" in text and "step:0 loss" not in text


def test_what_a_file_says_does_not_steer_the_terminal() -> None:
    made = view(name=HOSTILE, run_dir=HOSTILE, log=[HOSTILE], notes=[HOSTILE], status=Status("running", HOSTILE, False),
                golf=replace(GOLF, scores={HOSTILE: 1.0}))
    other = view(golf=None, randopt=replace(RANDOPT, phase=HOSTILE, result=HOSTILE, num_rows={HOSTILE: 3, "search": 1}))
    for text in (drawn(made, 120), drawn(other, 120)):
        assert not {"\x1b", "\x07", "\r", "\u202e", "\t"} & set(text) and "notmarkup[/bold]" in "".join(text.split())


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.integers(1, 30))
def test_a_histogram_counts_every_value_once(values: list[float], num_bins: int) -> None:
    assert sum(histogram(values, num_bins)) == len(values)


@given(st.floats(-1, 2), st.integers(1, 60), st.booleans())
def test_a_bar_is_as_wide_as_asked(share: float, width: int, plain: bool) -> None:
    made = bar(share, width, plain)
    assert len(made) == width and made.isascii() == plain
    assert made.count("#" if plain else "█") == round(width * min(1, max(0, share)))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.booleans())
def test_a_sparkline_rises_with_its_values(values: list[float], plain: bool) -> None:
    made = sparkline(values, min(values), max(values), plain)
    blocks = " .:-=+*#@" if plain else " ▁▂▃▄▅▆▇█"
    assert len(made) == len(values)
    for (a, x), (b, y) in itertools.combinations(zip(values, made, strict=True), 2):
        assert a > b or blocks.index(x) <= blocks.index(y)


def test_a_chart_has_its_range_and_no_more_lines_than_rows(tmp_path: Path) -> None:
    assert chart([(1, 2.0)] * 3, 80, 5, "loss", False) == []
    made = chart([(s, 9.0 if s < 5 else 3 - s / 100) for s in range(100)], 60, 5, "loss", True)
    lines = [line.plain for line in made]
    assert len(lines) == 5 and all(len(line) <= 60 and line.isascii() for line in lines)
    assert lines[0].strip().startswith("2.9") and lines[-1].strip().startswith("2.01"), lines
