"""A look at a run (records/watch.py) as lines for a terminal, of whatever width and height, Unicode or not."""

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from bitsperbyte.records.watch import GolfView, RandOptView, SeedView, View, duration

CHART_ROWS = 5
MIN_LOG_LINES = 3
COLOURS = {"running": "green", "starting": "cyan", "finished": "bold green", "stale": "yellow", "interrupted": "yellow", "over_cap": "red",
           "diverged": "red", "crashed": "red"}
_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_PHASES = {"base_train": "base on the train set", "search": "search", "base_test": "base on the test set", "test": "test set",
           "base_sample": "samples of the base", "heldout": "held-out text"}


class Frame:
    """Renders a view. With a `height`, of a screen, the log lines are as many as it has room for and no longer than it is wide; without,
    all of them are shown whole (print it with crop=False)."""

    def __init__(self, view: View, height: int | None = None) -> None:
        self.view, self.height = view, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, plain = self.view, options.ascii_only
        head: list[Text | Table] = [_title(view), Text(_shown(view.status.detail), style="dim")]
        head += [Text(f"note: {_shown(note)}", style="yellow") for note in view.notes]
        if view.seeds:
            head.append(Text("   ".join(_seed(seed) for seed in view.seeds)))
        if view.golf:
            head.append(_golf_table(view.golf, plain))
            head += chart(view.golf.loss_curve, options.max_width, CHART_ROWS, "loss", plain)
        if view.randopt:
            head += _randopt_parts(view.randopt, options.max_width, plain)
        overflow = ("crop" if plain else "ellipsis") if self.height is not None else "ignore"  # an ellipsis is not ASCII
        lines = [Text(_shown(line), style="dim", no_wrap=True, overflow=overflow) for line in view.log]
        if self.height is not None:
            used = sum(len(console.render_lines(part, options, pad=False)) for part in head)
            lines = lines[-max(MIN_LOG_LINES, self.height - used - 2):]  # a blank line above them, and the cursor's below
        yield from head
        if lines:
            yield Text("")
            yield from lines


def _title(view: View) -> Text:
    text = Text(f"{_shown(view.name or view.run_dir)}", style="bold")
    text.append(f"  {view.track or 'run'} in {_shown(view.run_dir)}  ", style="not bold")
    text.append(view.status.name.replace("_", " "), style=f"not bold {COLOURS.get(view.status.name, 'white')}")
    return text


def _seed(seed: SeedView) -> str:
    reached = f" {seed.bpb:.4f} bpb" if seed.bpb is not None else f" at step {seed.step:,}" if seed.step else ""
    return f"{seed.name} {seed.status.replace('_', ' ')}{reached}"


# -- golf -------------------------------------------------------------------------------------------------------------


def _golf_table(g: GolfView, plain: bool) -> Table:
    table = _table()
    of = f" of {g.max_steps:,}" if g.max_steps else ""
    tokens = f"   {g.tokens:,} tokens" if g.tokens else ""
    _row(table, "step", f"{g.step:,}{of}{tokens}" if g.step else "before the first step")
    if g.loss is not None:
        _row(table, "loss", f"{g.loss_mean:.4f}   (last step {g.loss:.4f})")
    if g.val_bpb is not None:
        _row(table, "val bpb", f"{g.val_bpb:.4f} at step {g.val_step:,}")
    if g.step_ms is not None:
        _row(table, "speed", f"{g.step_ms:,.1f} ms a step" + (f", {g.tokens_per_s:,.0f} tokens/s" if g.tokens_per_s else ""))
    if g.lr_scale is not None:
        rates = ", ".join(f"{name} {rate:.4g}" for name, rate in g.learning_rates.items())
        _row(table, "lr", f"x {g.lr_scale:.3f}" + (f"   {rates}" if rates else ""))
    share = max([g.elapsed_s / g.budget_s if g.budget_s else 0.0, g.step / g.max_steps if g.max_steps else 0.0])
    limit = f" of {g.budget_s:,.0f} s" if g.budget_s else ""
    left = f", {duration(g.left_s)} left" if g.left_s else ""
    _row(table, "budget", f"{bar(share, 30, plain)} {g.elapsed_s:,.1f}{limit}{' s' * (not g.budget_s)} used{left}")
    if g.num_resumes:
        _row(table, "resumed", f"{g.num_resumes} time{'s' * (g.num_resumes > 1)}, {g.num_lost_steps:,} steps trained again")
    for label, bpb in g.scores.items():
        _row(table, "score", f"{bpb:.4f} bpb, {_shown(label.replace('_', ' '))}")
    if "total" in g.bytes:
        b = g.bytes
        cap = f" of {b['cap']:,}, {b['cap'] - b['total']:,} left" if "cap" in b else ""
        parts = f"   ({b['weight']:,} weights + {b['code']:,} code)" if {"weight", "code"} <= set(b) else ""
        _row(table, "bytes", f"{b['total']:,}{cap}{parts}")
    elif "cap" in g.bytes:
        _row(table, "bytes", f"known when the artifact is written; the cap is {g.bytes['cap']:,}")
    return table


# -- randopt ----------------------------------------------------------------------------------------------------------


def _randopt_parts(r: RandOptView, width: int, plain: bool) -> list[Text | Table]:
    table = _table()
    done = r.num_rows.get("search", 0)
    _row(table, "phase", _PHASES.get(r.phase, _shown(r.phase)) if r.phase else "before the first row")
    share = done / r.population if r.population else 0.0
    left = f", {duration(r.left_s)} left" if r.left_s else ""
    _row(table, "seeds", f"{bar(share, 30, plain)} {done:,}" + (f" of {r.population:,}" if r.population else "") + left)
    if r.seeds_per_s is not None:
        _row(table, "speed", f"{r.seeds_per_s:.3g} seeds/s, {r.tokens_per_s:,.0f} tokens/s")
    if r.base_reward is not None:
        _row(table, "base", f"reward {r.base_reward:.4f}")
    if r.best is not None:
        _row(table, "best", f"reward {r.best['reward']:.4f}   (seed {r.best['seed']}, sigma {r.best['sigma']:g})")
    if r.truncated_share is not None:
        _row(table, "truncated", f"{100 * r.truncated_share:.1f}% of the answers")
    others = [f"{_PHASES.get(phase, _shown(phase))} {num:,}" for phase, num in r.num_rows.items() if phase not in ("base_train", "search")]
    if others:
        _row(table, "also run", ", ".join(others))
    _row(table, "time", f"{duration(r.elapsed_s)} in rows")
    if r.result:
        _row(table, "result", _shown(r.result))
    parts: list[Text | Table] = [table]
    if r.per_sigma:
        sigmas = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("sigma", "seeds", "mean reward", "best", "above base"):
            sigmas.add_column(name, justify="right", overflow="crop" if plain else "ellipsis")
        for s in r.per_sigma:
            error = f" ± {s.standard_error:.4f}" if s.standard_error is not None else ""
            sigmas.add_row(f"{s.sigma:g}", f"{s.num:,}", f"{s.mean:.4f}{error.replace('±', '+-') if plain else error}", f"{s.best:.4f}",
                           f"{100 * s.share_above_base:.0f}%" if s.share_above_base is not None else "")
        parts.append(sigmas)
    if len(r.rewards) > 1:
        low, high = r.rewards[0], r.rewards[-1]
        counts = histogram(r.rewards, max(8, min(40, width - 40)))
        parts.append(Text(f"rewards   {low:.4f} {sparkline(counts, 0, max(counts), plain)} {high:.4f}", no_wrap=True))
    return parts


def histogram(values: Sequence[float], num_bins: int) -> list[int]:
    """How many values lie in each of so many equal bins from the least to the greatest; one bin where all are equal."""
    low, high = min(values), max(values)
    if not high > low:
        return [len(values)]
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - low) / (high - low) * num_bins))] += 1
    return counts


# -- drawing ----------------------------------------------------------------------------------------------------------


def _table() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=9, overflow="crop")
    table.add_column(overflow="fold")
    return table


def _row(table: Table, name: str, value: str) -> None:
    table.add_row(name, Text(value))  # as Text, for in a bare string rich would take a file's brackets for markup


def bar(share: float, width: int, plain: bool) -> str:
    """A bar of which `share` (0 to 1, clipped) is full."""
    full = round(width * min(1.0, max(0.0, share)))
    return ("#" if plain else "█") * full + ("." if plain else "░") * (width - full)


def sparkline(values: Sequence[float], low: float, high: float, plain: bool) -> str:
    """One character for each value, higher for greater; the lowest is drawn too, so that 0 of a positive count is blank only at `low`."""
    blocks = _ASCII_BLOCKS if plain else _BLOCKS
    top = len(blocks) - 1
    scale = top / (high - low) if high > low else 0.0
    return "".join(blocks[min(top, max(0, math.ceil((value - low) * scale)))] for value in values)


def chart(points: Sequence[tuple[float, float]], width: int, rows: int, name: str, plain: bool) -> list[Text]:
    """A curve as `rows` lines with its range at the left. The range is that of the last nine tenths: a loss falls by far the most in the
    first few steps, which would press the rest flat; what lies above is drawn at the top. Nothing where there are too few points."""
    if len(points) < 4:
        return []
    shown = [y for _, y in points[len(points) // 10:]]
    low, high = min(shown), max(shown)
    labels = [f"{high:.4f}", f"{low:.4f}"]
    margin = max(len(name), *map(len, labels)) + 2
    num_columns = min(len(points), max(8, width - margin - 1))
    columns = [points[int((i + 0.5) * len(points) / num_columns)][1] for i in range(num_columns)]
    blocks = _ASCII_BLOCKS if plain else _BLOCKS
    steps = len(blocks) - 1
    span = high - low
    heights = [1 + round((min(max(y, low), high) - low) / span * (rows * steps - 1)) if span > 0 else 1 for y in columns]
    lines = []
    for row in reversed(range(rows)):
        label = labels[0] if row == rows - 1 else labels[1] if row == 0 else name if row == rows // 2 else ""
        drawn = "".join(blocks[min(steps, max(0, height - row * steps))] for height in heights)
        lines.append(Text.assemble((label.rjust(margin - 1) + " ", "dim"), drawn, no_wrap=True))
    return lines


def _shown(text: str) -> str:
    """What a file says must not steer the terminal."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text.expandtabs(4))
