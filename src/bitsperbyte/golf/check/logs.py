"""Whether the logs are those of the runs that submission.json speaks of, and agree with themselves: the finding `log`.

A log is another run's where its scores, its hash or the source that it embeds are not this submission's. What else is checked then
leaves it aside, so that one wrong file is named once.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal

from bitsperbyte.golf.check.claims import BPB, LOSS, STEPS, Claim, Claims
from bitsperbyte.golf.check.folder import FACTS, MAX_TEXT_BYTES, SCRIPT, LogFile, Submission
from bitsperbyte.golf.check.inspection import Inspection
from bitsperbyte.golf.check.readings import Scored, last_step, scores_of, timed_steps
from bitsperbyte.golf.findings import Finding
from bitsperbyte.metric.bpb import Score
from bitsperbyte.run.log_lines import contradictions_of

MOSTLY = 0.9  # of a log's lines that must agree on something before those that do not are called wrong
PUBLISHED_BYTES = (151_080_354, 155_769_000)  # of the validation text: the published export, and the one the first record was scored on
PUBLISHED_TOKENS = (20_000_000, 160_000_000)  # a log with so many validation tokens of fineweb10B scores one of these, whatever its tokenizer
BYTES_TOLERANCE = 0.02
MAX_BESIDE = 20  # further scripts of the folder that a log's source is looked for in


@dataclass(frozen=True)
class Clause:
    """Something wrong; `of_another_run` where it shows that the log is not of this submission, and not only that a figure was miscopied."""

    text: str
    of_another_run: bool = True


@dataclass(frozen=True)
class LogCheck:
    finding: Finding
    foreign: frozenset[str]  # names of logs that are another run's


def check_logs(found: Submission, code: Inspection | None) -> LogCheck:
    """The finding `log`, and the logs that are not of this submission's runs."""
    if not found.logs:
        return LogCheck(Finding("log", None, "there is no train log"), frozenset())
    wrong: list[str] = []
    foreign: set[str] = set()
    for log in found.logs:
        own = [*_wrong_identity(log, found, code), *(_against_seed(log, found.claims) if found.claims else ())]
        if any(clause.of_another_run for clause in own):
            foreign.add(log.name)
        wrong += [clause.text for clause in own]
        wrong += _within(log)
    kept = [log for log in found.logs if log.name not in foreign]
    if found.claims and kept and not foreign and not _seeds_without_log(found):  # a mean is over all of its runs
        against = list(_against_whole(kept, found.claims))
        foreign |= {log.name for log in kept if any(clause.of_another_run for clause in against)}
        wrong += [clause.text for clause in against]
    if wrong:
        return LogCheck(Finding("log", False, "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")), frozenset(foreign))
    scored = [s for log in found.logs for s in scores_of(log.log)]
    if not scored:
        return LogCheck(Finding("log", None, f"no score can be read in {', '.join(log.name for log in found.logs)}"), frozenset())
    if found.claims is None:
        return LogCheck(Finding("log", None, f"there is no readable {FACTS} to hold the log against"), frozenset())
    if not any(found.claims.all(BPB + LOSS)) and not any(found.claims.get(BPB, seed) for seed in found.claims.by_seed):
        return LogCheck(Finding("log", None, f"{FACTS} claims no val_bpb and no val_loss that the log could be held against"), frozenset())
    return LogCheck(Finding("log", True, _summary(found, code)), frozenset())


def _summary(found: Submission, code: Inspection | None) -> str:
    finals = [scores_of(log.log)[-1] for log in found.logs if scores_of(log.log)]
    best = ", ".join(f"{s.bpb}" for s in finals if s.bpb is not None)
    embedded = {_source_of(log, found, code) for log in found.logs if log.log.source and code is not None}
    source = f"; the source in it is {' and '.join(sorted(filter(None, embedded)))}" if embedded else "; it embeds no source"
    several = [log.name for log in found.logs if log.log.num_runs > 1]
    more = f"; {', '.join(several)} repeats steps, as a resumed run does" if several else ""
    return f"final val_bpb {best}, and every line agrees with its own and with {FACTS}{_headline(found)}{source}{more}"


def _headline(found: Submission) -> str:
    """Which score is claimed, where it is not the last of the one log and not the mean over the logs: nothing is wrong in that, and a reader
    takes it for either."""
    claim = found.claims.get(BPB) if found.claims else None
    same = [(log, s) for log in found.logs for s in _final(log) if claim and s.bpb is not None and _is_same(claim.value, s.bpb)]
    if claim is None or not same:
        return ""
    log, scored = same[-1]
    alike = [found_s.bpb for other in found.logs for found_s in _final(other) if found_s.name == scored.name and found_s.bpb is not None]
    if len(found.logs) == 1:
        last = _final(log)[-1]
        return "" if last.bpb is None or _is_same(claim.value, last.bpb) else f"; claimed is {scored.name} ({scored.bpb}), not the last"
    mean = sum(alike) / len(alike)
    if _is_same(claim.value, mean) or len(alike) < len(found.logs):
        return ""
    return f"; claimed is the score of {log.name} alone, and the mean of the {len(alike)} is {mean:.5f}"


# -- a log and the submission -------------------------------------------------------------------------------------------


def _wrong_identity(log: LogFile, found: Submission, code: Inspection | None) -> Iterator[Clause]:
    """Whether the file, the seed or the embedded source is another's."""
    for seed, result in found.claims.by_seed.items() if found.claims else ():
        claimed = result.get("log_sha256")
        if result.get("log") == log.name and isinstance(claimed, str) and claimed != log.sha256:
            yield Clause(f"{log.name} is not the log that {FACTS} names for seed {seed} (sha256 {log.sha256[:16]}..., not {claimed[:16]}...)")
            return
    if log.log.seed is not None and log.named_seed is not None and log.log.seed != log.named_seed:
        yield Clause(f"{log.name} is the log of seed {log.log.seed}")
    if log.log.source and code is not None and code.layers and _source_of(log, found, code) is None:
        line, number = _first_difference(log.log.source, code.layers[0].source)
        yield Clause(f"{log.name} embeds another source than {SCRIPT}: they part at line {line:,}"
                     + (f" and differ in {number:,} lines" if number > 1 else ""))


def _source_of(log: LogFile, found: Submission, code: Inspection) -> str | None:
    """In words what the source that a log embeds is: the script, what the script unpacks, the same program written otherwise, or another
    file of the folder; None for none of them."""
    assert log.log.source is not None
    for layer in code.layers:
        if _same_text(log.log.source, layer.source):
            return layer.name
    embedded = _program(log.log.source)
    if embedded is not None and any(_program(layer.source) == embedded for layer in code.layers):
        return f"{SCRIPT} but for comments and layout"
    beside = [path for path in sorted(found.path.glob("*.py")) if path.name != SCRIPT and path.is_file() and not path.is_symlink()]
    for path in beside[:MAX_BESIDE]:
        if path.stat().st_size <= MAX_TEXT_BYTES and _same_text(log.log.source, path.read_text(encoding="utf-8", errors="replace")):
            return f"{path.name}, which lies beside {SCRIPT}"
    return None


def _program(source: str) -> str | None:
    """The syntax tree as text, None for what does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _lines(source: str) -> list[str]:
    return [line.rstrip() for line in source.strip().splitlines()]


def _same_text(one: str, other: str) -> bool:
    """Equal but for ends of lines and of the file: a byte more at the end is the sizes' concern."""
    return _lines(one) == _lines(other)


def _first_difference(one: str, other: str) -> tuple[int, int]:
    """Number of the first line that differs (from 1), and how many differ or are missing, line by line."""
    a, b = _lines(one), _lines(other)
    different = [i for i, (x, y) in enumerate(zip(a, b, strict=False), 1) if x != y]
    return (different[0] if different else min(len(a), len(b)) + 1), len(different) + abs(len(a) - len(b))


def _against_seed(log: LogFile, claims: Claims) -> Iterator[Clause]:
    """What submission.json says of this seed against its log."""
    if log.seed is None or log.seed not in claims.by_seed:
        return
    yield from _against_scores(claims.get(BPB, log.seed), claims.get(LOSS, log.seed), [log])
    steps = claims.get(STEPS, log.seed)
    if steps and (last := last_step(log.log)) is not None and steps.value != last:
        yield Clause(f"{FACTS} claims {steps}, and {log.name} ends at step {last:,}", False)


def _against_whole(logs: Sequence[LogFile], claims: Claims) -> Iterator[Clause]:
    """The headline against the logs: one of them, or their mean."""
    yield from _against_scores(claims.get(BPB), claims.get(LOSS), logs)
    steps, ends = claims.get(STEPS), [last for log in logs if (last := last_step(log.log)) is not None]
    if steps and ends and steps.value not in ends and abs(Decimal(sum(ends)) / len(ends) - steps.value) > 1:
        where = f"the log ends at step {ends[0]:,}" if len(ends) == 1 else f"the logs end at steps {', '.join(f'{end:,}' for end in ends)}"
        yield Clause(f"{FACTS} claims {steps}, and {where}", False)


def _against_scores(bpb: Claim | None, loss: Claim | None, logs: Sequence[LogFile]) -> Iterator[Clause]:
    """Claimed bits per byte and loss against the final lines of the logs."""
    for claim, field, other in ((bpb, "bpb", "loss"), (loss, "loss", "bpb")):
        if claim is None or _matches(claim, field, logs, finals=True):
            continue
        values = [getattr(s, field) for log in logs for s in scores_of(log.log) if getattr(s, field) is not None]
        if not values:
            continue
        name = ", ".join(log.name for log in logs)
        last = _last(logs, field)
        if not last:
            continue
        if _matches(claim, other, logs, finals=True):
            yield Clause(f"{FACTS} claims {claim}, which is the val_{other} of {name}", False)
        elif _matches(claim, field, logs, finals=False):
            yield Clause(f"{FACTS} claims {claim}, which is not the final score of {name} ({', '.join(str(v) for v in last)}) but one before it",
                         False)
        else:
            yield Clause(f"{FACTS} claims {claim}, and the final val_{field} of {name} is {', '.join(str(v) for v in last)}",
                         not _matches_other(bpb, loss, claim, logs))
        return  # a loss that follows from a wrong bpb is the same news


def _matches_other(bpb: Claim | None, loss: Claim | None, claim: Claim, logs: Sequence[LogFile]) -> bool:
    """Whether the other of the two claims is the logs' own: then these are the logs, and one figure is wrong."""
    return any(other is not None and other is not claim and _matches(other, field, logs, finals=True)
               for other, field in ((bpb, "bpb"), (loss, "loss")))


def _final(log: LogFile) -> list[Scored]:
    """The scores of the packed model, each in the most digits that it is written in; of a log without any, the last validation."""
    scores = scores_of(log.log)
    finals = [s for s in scores if s.is_final]
    return [s for s in finals if not any(_is_rounded(s, other) for other in finals)] or scores[-1:]


def _is_rounded(scored: Scored, other: Scored) -> bool:
    """Whether `other` is the same score in more digits."""
    a, b = scored.bpb, other.bpb
    return a is not None and b is not None and _exponent(b) < _exponent(a) and abs(a - b) <= Decimal(1).scaleb(_exponent(a)) / 2


def _last(logs: Sequence[LogFile], field: str) -> list[Decimal]:
    return [values[-1] for log in logs if (values := [v for s in _final(log) if (v := getattr(s, field)) is not None])]


def _matches(claim: Claim, field: str, logs: Sequence[LogFile], *, finals: bool) -> bool:
    """Whether a claim is a score of one log, or the mean over all logs of scores with one name: of final ones, or of those before."""
    by_name: dict[str, list[Decimal]] = {}
    for log in logs:
        for scored in _final(log) if finals else [s for s in scores_of(log.log) if not s.is_final]:
            value = getattr(scored, field)
            if value is not None:
                if _is_same(claim.value, value):
                    return True
                by_name.setdefault(scored.name, []).append(value)
    for values in by_name.values():
        slack = Decimal(1).scaleb(max(map(_exponent, values))) / 2  # what rounding the values can do to their mean
        if len(values) == len(logs) > 1 and _is_same(claim.value, sum(values) / len(values), slack):
            return True
    return False


def _exponent(value: Decimal) -> int:
    exponent = value.as_tuple().exponent
    return exponent if isinstance(exponent, int) else 0


def _is_same(one: Decimal, other: Decimal, slack: Decimal = Decimal(0)) -> bool:
    """Whether two figures are one, of which the coarser is rounded, or cut off after the fourth decimal or later. Fewer than three
    decimals are not taken for a rounding: a score claimed as 1.2 says 1.200."""
    coarse, fine = (one, other) if _exponent(one) >= _exponent(other) else (other, one)
    exponent = min(_exponent(coarse), -3)
    unit, over = Decimal(1).scaleb(exponent), fine - coarse
    return -unit / 2 - slack <= over <= unit / 2 + slack or (exponent <= -4 and 0 <= over < unit + slack)


# -- a log by itself ----------------------------------------------------------------------------------------------------


def _within(log: LogFile) -> Iterator[str]:
    """Lines of one log that cannot all be true: bits per byte and loss, times and steps. A log of a resumed run repeats steps, and
    says nothing by that."""
    read = log.log
    for clause in contradictions_of(read.steps, read.validations, [*read.diagnostics, *read.finals], read.stopped, read.num_runs):
        yield f"{log.name}: {clause}"
    known = [t for t in timed_steps(read) if t.average_ms is not None and t.rounding_ms < 1]
    off = [t for t in known if abs(t.train_ms - t.step * (t.average_ms or 0)) > 0.006 * t.step + 1.01]
    if off and len(off) <= (1 - MOSTLY) * len(known):
        yield f"{log.name}: at step {off[0].step:,} {off[0].train_ms:,.0f} ms of training are not {off[0].step:,} steps of {off[0].average_ms} ms"


def _bytes_per_token(nats_a_bit_per_byte: Decimal) -> float:
    return Score(float(nats_a_bit_per_byte), 1, 1).bpb


def check_bytes(found: Submission, logs: Sequence[LogFile]) -> Finding:
    """The finding `bytes`: whether the byte count behind the scores is that of the published validation text.

    A tokenizer changes the number of tokens and not that of bytes, so tokens times bytes a token must come out; a count that is too
    high makes a score too low by as much.
    """
    if found.logs and not logs:
        return Finding("bytes", None, "the logs are of other runs")
    for log in logs:
        tokens = log.log.val_tokens
        pairs = [s for s in scores_of(log.log) if s.loss and s.bpb and s.bpb > 0]
        if tokens is None or not pairs or not PUBLISHED_TOKENS[0] <= tokens <= PUBLISHED_TOKENS[1] or not _is_published(log):
            continue
        exact = max(pairs, key=lambda s: -s.bpb.as_tuple().exponent if s.bpb else 0)
        assert exact.loss is not None and exact.bpb is not None
        counted = tokens * _bytes_per_token(exact.loss / exact.bpb)
        near = min(PUBLISHED_BYTES, key=lambda n: abs(n - counted))
        said = f"{log.name} scores {tokens:,} tokens at {counted / tokens:.4f} bytes each, {counted:,.0f} bytes"
        if abs(counted / near - 1) > BYTES_TOLERANCE:
            return Finding("bytes", False, f"{said}, and the published validation text has {near:,}: its val_bpb is "
                                           f"{'too low' if counted > near else 'too high'} by a factor of {counted / near:.4f}")
        export = "the published validation text" if near == PUBLISHED_BYTES[0] else "an earlier export of the validation text"
        return Finding("bytes", True, f"{said}, as {export} has")
    return Finding("bytes", None, "the log does not say that it scores the published validation text, so its bytes have nothing to be held against")


def _is_published(log: LogFile) -> bool:
    return log.log.val_pattern is not None and "fineweb10b" in log.log.val_pattern.lower()


# -- seeds --------------------------------------------------------------------------------------------------------------


def claims_a_record(found: Submission) -> bool | None:
    """Whether the submission is for the track of records, None where neither submission.json nor the folder's path says."""
    said = " ".join(filter(None, [found.claims.text("track") if found.claims else None, found.path.resolve().as_posix()])).lower()
    if re.search(r"non[_-]?record|unlimited|notable", said):
        return False
    return True if "10min" in said else None


def _seeds_without_log(found: Submission) -> list[int]:
    """Seeds that submission.json lists and no log is of; none where a log does not tell its seed."""
    seeds = [_seed_of(log) for log in found.logs]
    return [seed for seed in found.claims.seeds if seed not in seeds] if found.claims and None not in seeds else []


def _seed_of(log: LogFile) -> int | None:
    """The seed that a log is filed under; one that is another's is `log`'s finding."""
    return log.named_seed if log.named_seed is not None else log.seed


def check_seeds(found: Submission, least: int = 3) -> Finding:
    """The finding `seeds`: a log for every seed that is listed, and at least three for a record."""
    if not found.logs:
        return Finding("seeds", None, "there is no train log")
    seeds = [_seed_of(log) for log in found.logs]
    distinct = sorted({seed for seed in seeds if seed is not None})
    unnamed = seeds.count(None)
    said = ", ".join(filter(None, [f"seed{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}" if distinct else "",
                                   f"{unnamed} log{'s' if unnamed > 1 else ''} without a seed" if unnamed else ""]))
    if found.missing_logs:
        return Finding("seeds", None, f"logs are missing ({', '.join(found.missing_logs)}); there are those of {said}")
    if missing := _seeds_without_log(found):
        return Finding("seeds", False, f"{FACTS} lists seed{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} without a log; there "
                                       f"are those of {said}")
    record = claims_a_record(found)
    if record and len(distinct) + unnamed < least:
        return Finding("seeds", False, f"a record takes at least {least} seeds, and the logs are of {said}")
    return Finding("seeds", True, f"logs of {said}" + {True: "", False: "; no record is claimed", None: "; no track is named"}[record])
