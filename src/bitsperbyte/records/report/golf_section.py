"""What a report says of golf runs: what they are, their scores under equal evaluation, the figures."""

from collections import defaultdict
from collections.abc import Sequence

from bitsperbyte.records.leaderboard import BEFORE
from bitsperbyte.records.report import golf_figures as figures
from bitsperbyte.records.report.drawing import Plot, letter
from bitsperbyte.records.report.markup import Cell, constant, escaped, number, paragraphs, shown, table, text
from bitsperbyte.records.report.run_facts import columns, common_rows, heads
from bitsperbyte.records.report.sources import Run, Value, sub
from bitsperbyte.records.schema import ScoreRow

Block = Plot | str


def blocks(runs: Sequence[Run]) -> list[Block]:
    """HTML and figures, in the order of the page."""
    made: list[Block] = ["<h2>Golf</h2>", _summary(runs), _scores(runs)]
    for draw in (figures.loss_plot, figures.bpb_plot, *((figures.gap_plot,) if len(runs) > 1 else ()), figures.pace_plot,
                 figures.ledger_plot):
        plot = draw(runs)
        made.append(plot if isinstance(plot, Plot) else paragraphs([escaped(plot)], "absent"))
    if isinstance(plot, Plot):
        made.append(table(["bytes", *heads(runs)], figures.ledger_rows(runs)))
    plot = figures.position_plot(runs)
    made.append(plot if isinstance(plot, Plot) else paragraphs([escaped(plot)], "absent"))
    return made


def _summary(runs: Sequence[Run]) -> str:
    rows = [
        *common_rows(runs),
        ["score of the artifact", *columns(runs, _headline)],
        ["steps", *(_count(run, "/training/num_steps") for run in runs)],
        ["tokens", *(_count(run, "/training/num_tokens") for run in runs)],
        ["tokens a step", *(_count(run, "/training/batch_tokens") for run in runs)],
        ["parameters", *(_count(run, "/training/num_parameters") for run in runs)],
        ["step time, median", *(number(run.at("/training/step_ms_p50"), ",.1f", unit="ms") for run in runs)],
        [f"step time, {constant('95th')} percentile", *(number(run.at("/training/step_ms_p95"), ",.1f", unit="ms") for run in runs)],
        ["training time", *(_budget(run) for run in runs)],
        ["warmdown", *columns(runs, lambda run: text(run.at("/training/warmdown")))],
        ["resumed", *columns(runs, _resumes)],
        ["code and weights", *(number(run.at("/artifact/total_bytes"), ",", unit="bytes") for run in runs)],
        ["margin to the cap", *(number(run.at("/artifact/margin_bytes"), ",", unit="bytes") for run in runs)],
        ["packing", *columns(runs, _packing)],
    ]
    return table(["", *heads(runs)], rows) + _unequal_headlines(runs)


def _unequal_headlines(runs: Sequence[Run]) -> str:
    """What to say where the scores of the artifacts stand side by side and do not compare."""
    keys = {row.evaluation_key for run in runs if (row := run.record.score("artifact"))}
    if len(keys) < 2:
        return ""
    return paragraphs(["The scores of these artifacts were made under unequal evaluations and do not compare: the tables below hold those "
                       "that do."], "remark")


def _count(run: Run, pointer: str) -> Cell:
    return number(run.at(pointer), ",")


def _headline(run: Run) -> str:
    place = next((i for i, row in enumerate(run.record.scores) if row.label == "artifact"), None)
    if place is None:
        return "the artifact was not scored"
    return (f"<strong>{shown(run.at(f'/scores/{place}/bpb'), '.4f')}</strong> bits per byte at "
            f"{shown(run.at(f'/scores/{place}/bytes_per_token'), '.3f')} bytes a token; {windows(run, place)}")


def _budget(run: Run) -> Cell:
    took, limit = number(run.at("/training/train_s"), ",.1f", unit="s"), run.at("/training/budget_s")
    return Cell(took.html + (f" of {shown(limit, ',g')} s" if limit.known else ", limited by steps" if run.at("/training/train_s").known else ""))


def _packing(run: Run) -> str:
    scheme, codec = run.at("/artifact/scheme"), run.at("/artifact/codec")
    return text(scheme) + (f" + {text(codec)}" if codec.known else "")


def _resumes(run: Run) -> str:
    times = run.at("/training/num_resumes")
    if not times.value:
        return "never" if times.known else shown(times)
    return (f"{shown(times)} times; {shown(run.at('/training/lost_steps'), ',')} steps trained again, "
            f"{shown(run.at('/training/charged_lost_s'), ',.1f')} s charged for them")


def windows(run: Run, place: int) -> str:
    """How a score cut its text, in words."""
    row = run.record.scores[place]

    def part(name: str) -> str:
        return shown(run.at(f"/scores/{place}/{name}"))

    cut = f"windows of {part('window')} sliding by {part('stride')}" if row.stride else f"non-overlapping windows of {part('window')}"
    mode = "context across documents" if row.documents == "across" else "documents isolated"
    return f"{cut}, {mode}{', last shorter window left out' if row.drop_tail else ''}"


def _scores(runs: Sequence[Run]) -> str:
    """A table for each evaluation: two scores stand in one only where they compare."""
    groups: dict[tuple, list[tuple[Run, int, ScoreRow]]] = defaultdict(list)
    for run in runs:
        for place, row in enumerate(run.record.scores):
            groups[row.evaluation_key].append((run, place, row))
    if not groups:
        return "<h3>Scores</h3>" + paragraphs(["Nothing was scored."], "absent")
    made = ["<h3>Scores</h3>"]
    if len(groups) > 1:
        made.append("<p>Scores compare within a table only: each has one text, one window, stride and document mode.</p>")
    header = ["run" if len(runs) > 1 else "score", *(["score"] if len(runs) > 1 else []), "bits per byte",
              *([f"gap to {letter(0)}"] if len(runs) > 1 else []), "nats per token", "bytes per token", "tokens", "seconds"]
    for members in sorted(groups.values(), key=lambda group: (runs.index(group[0][0]), group[0][1])):
        run, place, row = members[0]
        split = run.at(f"/scores/{place}/split_sha256")
        which = f", split <code>{text(split, length=12)}</code>" if split.known else ""
        named = f"{text(run.at(f'/scores/{place}/text'))}{which}: {windows(run, place)}"
        rows = [_score_cells(runs, members, *member) for member in members]
        made.append(f'<p class="heading">{named}</p>{table(header, rows)}')
    if len(runs) > 1:
        made.append(paragraphs(_not_compared(runs, groups)))
    return "".join(made)


def _score_cells(runs: Sequence[Run], members: Sequence[tuple[Run, int, ScoreRow]], run: Run, place: int, row: ScoreRow) -> list[Cell | str]:
    def figure(name: str, form: str) -> Cell:
        return number(run.at(f"/scores/{place}/{name}"), form)

    cells: list[Cell | str] = [text(run.at(f"/scores/{place}/label"))]
    if len(runs) > 1:
        cells.insert(0, letter(runs.index(run)))
    cells.append(figure("bpb", ".4f"))
    if len(runs) > 1:
        gap = _gap(runs, members, run, place, row)
        cells.append(Cell("") if gap is None else number(gap, "+.4f"))
    return [*cells, figure("nats_per_token", ".4f"), figure("bytes_per_token", ".3f"), figure("num_tokens", ","), figure("seconds", ",.1f")]


def _gap(runs: Sequence[Run], members: Sequence[tuple[Run, int, ScoreRow]], run: Run, place: int, row: ScoreRow) -> Value | None:
    """bpb less that of the first run's score in the same table: artifact against artifact, weights before quantisation against the same."""
    if run is runs[0]:
        return None
    same = [(other, at) for other, at, score in members if other is runs[0] and (score.label == BEFORE) == (row.label == BEFORE)]
    if not same:
        return None
    return sub(run.at(f"/scores/{place}/bpb"), same[0][0].at(f"/scores/{same[0][1]}/bpb"))


def _not_compared(runs: Sequence[Run], groups: dict[tuple, list[tuple[Run, int, ScoreRow]]]) -> list[str]:
    """Why a run has no gap to the first, where it has none."""
    def keys(run: Run) -> set[tuple]:
        return {key for key, members in groups.items() if any(own is run and row.label != BEFORE for own, _, row in members)}

    said = []
    for place, run in enumerate(runs[1:], 1):
        if not keys(run):
            said.append(f"{letter(place)} has no gap to {letter(0)}: its artifact was not scored.")
        elif not keys(runs[0]):
            said.append(f"{letter(place)} has no gap to {letter(0)}: the artifact of {letter(0)} was not scored.")
        elif not keys(run) & keys(runs[0]):
            said.append(f"{letter(place)} has no gap to {letter(0)}: no score of its artifact shares text, window, stride and document mode with "
                        f"one of {letter(0)}. <code>bpb golf eval</code> with a label adds one.")
    return said
