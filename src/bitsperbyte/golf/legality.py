"""Whether a scorer may be scored: does each prediction follow from earlier tokens alone, and is it a distribution? Measured from outside.

Shapes: S streams of an evaluation, n tokens of one, N targets scored, V vocabulary.

Each check changes what a legal scorer cannot see and looks for any change in what it answers. docs/golf.md says what each proves
and what none can. `assert_legal` is for the tests of whoever writes a model; golf/legal_artifact.py puts an artifact through the same.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from bitsperbyte.golf.byte_counts import check_bytes
from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.findings import LegalityFinding, failed
from bitsperbyte.golf.probes import Case, Changes, Text, cases, choose_cuts, differences, later_tokens, made_up_tokens, unaffected
from bitsperbyte.golf.scorers import NetworkScorer, Scorer, as_scorer, evaluation, state_digests

MAX_ROW_SUM = 1e-4  # nats by which a distribution may miss 1: a softmax in float32 misses by some 1e-6, one in bfloat16 by more
BATCH_TEXT = 4  # times `short`: tokens of the texts of the batch check, so that rounding evens out in their mean
ENUMERATED_STREAMS = 8_192  # streams that normalisation from outside may take, one for each token of the vocabulary at each position


@dataclass(frozen=True)
class Tolerance:
    """Nats by which rounding alone may change a log-probability.

    same: between two evaluations of equal shapes, where a causal network repeats the same operations on the same numbers. reshaped: in
    another batch, where matrix products are cut and summed in another order. mean: the mean of the latter over targets, with its sign,
    which rounding leaves near 0 and a leak does not. docs/golf.md has what was measured.
    """

    same: float
    reshaped: float
    mean: float


TOLERANCES = {"float32": Tolerance(1e-6, 1e-3, 1e-4), "bfloat16": Tolerance(1e-6, 1.0, 5e-3)}


def assert_legal(model: Any, **settings: Any) -> list[LegalityFinding]:
    """AssertionError that lists every check that `model` failed; arguments and findings as of check_legal."""
    findings = check_legal(model, **settings)
    if wrong := failed(findings):
        raise AssertionError("not legal:\n" + "\n".join(f"  {f.check}: {f.detail}" for f in wrong))
    return findings


def check_legal(model: Any, *, vocab_size: int | None = None, window: int = 64, stride: int | None = None, documents: str = "across",
                bos_id: int | None = None, outputs: str = "logits", adapts: bool = False, batch_tokens: int = 65_536,
                tokens: np.ndarray | None = None, tokenizer: Any = None, texts: Iterable[str] | None = None, table: Any = None,
                short: int = 40, num_cuts: int = 64, exhaustive: bool = False, precision: str | None = None,
                tolerance: Tolerance | None = None, seed: int = 0, progress: Callable[[str], None] | None = None) -> list[LegalityFinding]:
    """Every check on `model`: a network as in scorers.NetworkScorer, scored under `window`, `stride` and `documents`, or an object with
    `score(streams)` (scorers.Scorer), for which these only say how long the streams should be and where to look.

    adapts: it learns from tokens that it has scored, within one evaluation; each prediction may then follow from everything scored
    before it, in the same or in another stream. tokens: the text to score, ids below vocab_size; without it one is made up.
    tokenizer, texts, table: with a tokenizer its byte counts are proven on `texts`, and those of `table` (a ByteTable or anything with
    its target_bytes) and of the scorer compared with them. Every cut of streams of `short` tokens is tried, and `num_cuts` of longer
    ones (`exhaustive`: every one). precision: float32 or bfloat16, what the scorer computes in, if it cannot be seen from its
    parameters; or `tolerance`. The same seed gives the same checks. ValueError for a model or a text that cannot be scored at all.
    """
    protocol = Protocol(window, stride, documents)
    if documents == "isolated" and bos_id is None:
        raise ValueError("isolated documents need bos_id, the token that begins each of them")
    if short < 8 or num_cuts < 1:
        raise ValueError(f"short {short} must be at least 8 tokens and num_cuts {num_cuts} at least 1")
    scorer = as_scorer(model, protocol, vocab_size=vocab_size, bos_id=bos_id, outputs=outputs, batch_tokens=batch_tokens)
    text = Text(made_up_tokens(scorer.vocab_size, seed=seed) if tokens is None else tokens, scorer.vocab_size, bos_id,
                keep_bos=documents == "isolated", seed=seed)
    limits = tolerance or _tolerance(model, precision)
    say = progress or (lambda what: None)
    findings = []
    for name, check in (("state", lambda: check_state(scorer, text, short, limits, adapts, model)),  # first: a cache is still empty
                        ("coverage", lambda: check_coverage(scorer, text, short, window)),
                        ("causality", lambda: check_causality(cases(scorer, window, stride, short, num_cuts, exhaustive), text, limits, adapts)),
                        ("normalisation", lambda: check_normalisation(scorer, text, short, window, adapts)),
                        ("batch", lambda: check_batch(scorer, text, short, limits, adapts)),
                        ("isolation", lambda: check_isolation(scorer, text, short, limits, adapts, documents)),
                        ("bytes", lambda: check_bytes(tokenizer, texts, table, scorer))):
        say(name)
        findings.append(check())
    return findings


def _tolerance(model: Any, precision: str | None) -> Tolerance:
    if precision is None:
        dtype = getattr(model, "compute_dtype", None)
        if dtype is None and isinstance(model, nn.Module):
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        precision = "bfloat16" if dtype in (torch.bfloat16, torch.float16) else "float32"
    if precision not in TOLERANCES:
        raise ValueError(f"precision {precision!r} is unknown: choose one of {', '.join(TOLERANCES)}")
    return TOLERANCES[precision]


# -- the checks -------------------------------------------------------------------------------------------------------


def check_state(scorer: Scorer, text: Text, short: int, limits: Tolerance, adapts: bool, owner: Any) -> LegalityFinding:
    """Score A, B, A, B: each must equal itself, and (unless it adapts) the second pair may change nothing that the scorer holds. What the
    first pair changes may be a cache that fills; where it is more, the scores differ."""
    a, b = ([text.stream(short) for _ in range(2)] for _ in range(2))
    first = [evaluation(scorer, streams) for streams in (a, b)]
    before = state_digests(owner)
    again = [evaluation(scorer, streams) for streams in (a, b)]
    seen = Changes()
    for one, two in zip(first, again, strict=True):
        for earlier, later in zip(one, two, strict=True):
            seen.compare(earlier, later)
    changed = [name for name, digest in state_digests(owner).items() if before.get(name, digest) != digest]
    if seen.worst > limits.same:
        return _fail("state", seen, limits.same, f"scoring a text a second time, with another between, changes its log-probabilities by up to "
                     f"{seen.worst:.3g} nats, first at target {seen.first(limits.same)}: something is kept from one evaluation to the next, "
                     "or the scorer draws random numbers (a network in train mode does: call eval())")
    if changed and not adapts:
        return LegalityFinding("state", False, f"evaluation changes {len(changed)} of the scorer's tensors, first {changed[0]}: it learns from "
                               "what it scores; a scorer that does so only after scoring must be declared (adapts) and reset")
    held = f"; its {len(before)} tensors are unchanged" if before and not adapts else ""
    return LegalityFinding("state", True, f"a text scores the same before and after another one ({_size(seen.worst)}){held}")


def check_coverage(scorer: Scorer, text: Text, short: int, window: int) -> LegalityFinding:
    """Every target once, and in each stream from its first to its last. A tail shorter than a window may be left out, as the challenge
    does; of isolated documents the BOS is context only."""
    dropped = 0
    for n in (2, 3, short, short + 1, window + 1, window + window // 3 + 2):
        stream = text.stream(n)
        (scored,) = evaluation(scorer, [stream])
        counts = np.bincount(scored.positions, minlength=n)[1:n]
        if text.keep_bos:
            counts = np.where((stream[1:] == text.bos_id) & (counts == 0), 1, counts)
        tail = n - 1 - int(np.max(np.flatnonzero(counts), initial=-1)) - 1
        if 0 < tail < window:
            dropped = max(dropped, tail)
            counts[n - 1 - tail :] = 1
        for wrong, what in ((counts > 1, "more than once, so that the sum counts it again"), (counts == 0, "not at all")):
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0]) + 1
                return LegalityFinding("coverage", False, f"of a stream of {n} tokens {int(wrong.sum())} targets are scored {what}, first "
                                       f"target {at}", at, float(np.abs(counts - 1).max()))
        if (np.diff(scored.positions) < 0).any() or (np.diff(scored.steps) < 0).any():
            at = int(scored.positions[1:][(np.diff(scored.positions) < 0) | (np.diff(scored.steps) < 0)][0])
            return LegalityFinding("coverage", False, f"target {at} is scored after a later one of its stream: each prediction must come before "
                                   "what follows it is known", at)
    return LegalityFinding("coverage", True, "every target is scored exactly once, and in order, in streams of six lengths"
                           + (f", but for a tail of up to {dropped}" if dropped else ""))


def check_causality(tried: Sequence[Case], text: Text, limits: Tolerance, adapts: bool) -> LegalityFinding:
    """At each cut all later tokens are changed: no earlier log-probability may change, nor the distribution that the first of the changed
    tokens is scored by."""
    num, worst, notes = 0, 0.0, []
    for case in tried:
        streams = [text.stream(case.num_tokens) for _ in range(3 if adapts else 1)]
        base = evaluation(case.scorer, streams)
        cuts = choose_cuts(case, streams, base, text.rng)
        if not cuts:
            raise ValueError(f"the scorer scores no target of a stream of {case.num_tokens} tokens, so nothing can be checked there: give longer "
                             "streams (short)")
        bad: list[tuple[int, int | None, float]] = []  # target, the cut if it lies in the same stream, change
        for index, (s, p) in enumerate(cuts):
            later = later_tokens(base, streams, s, p)
            other = [text.changed(stream, where, from_text=bool(index % 2)) for stream, where in zip(streams, later, strict=True)]
            for i, (one, two) in enumerate(zip(base, evaluation(case.scorer, other), strict=True)):
                hit = Changes()
                hit.compare(one, two, *unaffected(base, i, s, p))
                if hit.worst > limits.same:
                    bad.append((hit.first(limits.same), p if i == s else None, hit.worst))
                worst = max(worst, hit.worst)
        num += len(cuts)
        if bad:
            target, p, change = min(bad, key=lambda found: (found[0], found[2]))
            what = (f"the distribution that target {target} is scored by changes when the target itself and what follows it do" if target == p else
                    f"the prediction of target {target} changes when only tokens {f'from {p} on' if p else 'scored after it'} do")
            return LegalityFinding("causality", False, f"{what}, by up to {change:.3g} nats; found at {len(bad)} of {len(cuts)} cuts, at most "
                                   f"{worst:.3g} nats ({case.name}, {case.num_tokens} tokens)", target, worst)
        total = sum(len(stream) - 1 for stream in streams)
        notes.append(f"{case.name}: {'all' if len(cuts) == total else f'{len(cuts)} of'} {total}")
    shown = base[0].log_probs is not None
    return LegalityFinding("causality", True, f"later tokens change no earlier {'distribution' if shown else 'log-probability'} at {num} cuts "
                           f"({'; '.join(notes)}; {_size(worst)})")


def check_normalisation(scorer: Scorer, text: Text, short: int, window: int, adapts: bool) -> LegalityFinding:
    """The distributions shown sum to 1 and hold the nats that are used; and from outside: the probabilities that each token of the
    vocabulary gets when it is put in a target's place sum to 1."""
    num_rows = 0
    for n in (short, window + window // 2):
        for scored in evaluation(scorer, [text.stream(n) for _ in range(2)]):
            if not np.isfinite(scored.nats).all() or (scored.nats < -MAX_ROW_SUM).any():
                at = int(np.flatnonzero(~np.isfinite(scored.nats) | (scored.nats < -MAX_ROW_SUM))[0])
                return LegalityFinding("normalisation", False, f"target {scored.positions[at]} is scored with {scored.nats[at]:.6g} nats: a "
                                       "probability lies above 0 and not above 1", int(scored.positions[at]))
            for at, row in enumerate(() if scored.log_probs is None else scored.log_probs):
                num_rows += 1
                target, off = int(scored.positions[at]), _log_sum(row)
                if not abs(off) <= MAX_ROW_SUM:
                    return LegalityFinding("normalisation", False, f"the probabilities at target {target} sum to {np.exp(off):.6g}, not to 1",
                                           target, abs(float(np.expm1(off))))
    finding = _entries(scorer, text, short)
    if finding:
        return finding
    shown = bool(num_rows)
    stream = np.resize(text.stream(max(6, short // 4)), short)  # its contexts come back, for caches to act on
    most = max(1, ENUMERATED_STREAMS // scorer.vocab_size)
    positions = _spread(short, min(most, 2 if shown or adapts else 8))
    if text.keep_bos:
        stream[1:] = np.where(stream[1:] == text.bos_id, (text.bos_id + 1) % scorer.vocab_size, stream[1:])
    (base,) = evaluation(scorer, [stream])
    positions = [p for p in positions if p in base.positions]
    worst = 0.0
    for position in positions:
        total = _outside_sum(scorer, stream, position, adapts, text.bos_id if text.keep_bos else None)
        worst = max(worst, abs(total - 1))
        if not abs(total - 1) <= MAX_ROW_SUM:
            return LegalityFinding("normalisation", False, f"put in the place of target {position}, the {scorer.vocab_size} tokens of the "
                                   f"vocabulary get probabilities that sum to {total:.6g}, not to 1: the scorer is not normalised, or it has "
                                   "seen the target", position, abs(total - 1))
    inside = f"{num_rows} distributions sum to 1 and hold the nats used; " if shown else ""
    return LegalityFinding("normalisation", True, f"{inside}measured from outside, the vocabulary sums to 1 at {len(positions)} targets (off by at "
                           f"most {worst:.1g})")


def _entries(scorer: Scorer, text: Text, short: int) -> LegalityFinding | None:
    """Whether the nats are minus the log of the target's entry."""
    stream = text.stream(short)
    (scored,) = evaluation(scorer, [stream])
    if scored.log_probs is None:
        return None
    entries = -scored.log_probs[np.arange(len(scored.positions)), stream[scored.positions]]
    off = differences(entries, scored.nats)
    if not (off <= MAX_ROW_SUM).all():
        at = int(np.flatnonzero(~(off <= MAX_ROW_SUM))[0])
        return LegalityFinding("normalisation", False, f"target {scored.positions[at]} is charged {scored.nats[at]:.6g} nats where the distribution "
                               f"shown gives it {entries[at]:.6g}", int(scored.positions[at]), float(off.max()))
    return None


def check_batch(scorer: Scorer, text: Text, short: int, limits: Tolerance, adapts: bool) -> LegalityFinding:
    """A stream's scores do not follow from what is scored beside it, from its place among them, or from their number."""
    if adapts:
        return LegalityFinding("batch", None, "it adapts, so that a text's score follows from what was scored before; causality has covered "
                               "what is scored after")
    exact, loose, mean = batch_changes(scorer, text, BATCH_TEXT * short)
    if exact.worst > limits.same:
        return _fail("batch", exact, limits.same, f"the scores of a text change by up to {exact.worst:.3g} nats, first at target "
                     f"{exact.first(limits.same)}, with the text that is scored beside it: something is computed across the batch or kept between "
                     "texts")
    if loose.worst > limits.reshaped or mean > limits.mean:
        return _fail("batch", loose, min(limits.reshaped, loose.worst / 2), f"the scores of a text change by up to {loose.worst:.3g} nats "
                     f"({mean:.3g} in the mean) with its place in the batch or the batch's size, more than rounding explains ({limits.reshaped:g}, "
                     f"{limits.mean:g} in the mean)")
    return LegalityFinding("batch", True, f"other texts beside it change nothing ({_size(exact.worst)}); other places and sizes of the batch "
                           f"change {'nothing' if loose.worst == 0 else f'{loose.worst:.2g} nats at most, {mean:.1g} in the mean'}")


def batch_changes(scorer: Scorer, text: Text, num_tokens: int) -> tuple[Changes, Changes, float]:
    """What the batch check compares, for bench/legality_rounding.py too: the changes of a text's scores with other texts beside it at equal
    shapes, those between being scored alone and in other batches, and the largest mean of the latter, in nats a target."""
    x, *others = (text.stream(num_tokens) for _ in range(6))
    exact, loose, means = Changes(), Changes(), [0.0]
    (alone,) = evaluation(scorer, [x])
    variants = []
    for place in range(3):
        beside = [*others[:place], x, *others[place:2]]
        swapped = [text.changed(s, np.arange(len(s)) > 0, from_text=False) if i != place else s for i, s in enumerate(beside)]
        variants.append(evaluation(scorer, beside)[place])
        exact.compare(variants[-1], evaluation(scorer, swapped)[place])
    variants += [evaluation(scorer, [*others, x])[-1], evaluation(scorer, [x, x])[1], evaluation(scorer, [others[0][: num_tokens // 2], x])[1]]
    if isinstance(scorer, NetworkScorer):  # windows alone: below some 16 rows a matrix product takes another path
        variants.append(evaluation(scorer.under(scorer.protocol, batch_tokens=1), [x, *others])[0])
    for varied in variants:
        loose.compare(alone, varied)
        if len(alone.nats) == len(varied.nats):  # else other targets were scored, which compare has noted
            means.append(abs(float((alone.nats - varied.nats).mean())))
    return exact, loose, max(means)


def check_isolation(scorer: Scorer, text: Text, short: int, limits: Tolerance, adapts: bool, documents: str) -> LegalityFinding:
    """With isolated documents, none is scored by the text of the one before it in the stream."""
    if documents != "isolated" or adapts:
        return LegalityFinding("isolation", None, "it adapts: context may cross documents" if adapts else
                               "documents are scored across: context runs over their borders, as in the challenge")
    seen, n = Changes(), short
    for half in (2, n // 2, n - 3):
        stream = text.stream(n)
        stream[1:] = np.where(stream[1:] == text.bos_id, (stream[1:] + 1) % text.vocab_size, stream[1:])
        stream[half] = text.bos_id
        (base,) = evaluation(scorer, [stream])
        (other,) = evaluation(scorer, [text.changed(stream, np.arange(n) < half, from_text=False)])
        after = base.positions > half
        seen.compare(base, other, after, after)
    if seen.worst > limits.same:
        return _fail("isolation", seen, limits.same, f"the text before a BOS changes what is predicted after it, first target "
                     f"{seen.first(limits.same)}, by up to {seen.worst:.3g} nats: documents are not isolated")
    return LegalityFinding("isolation", True, f"the text before a BOS changes nothing after it ({_size(seen.worst)})")


# -- parts of them ----------------------------------------------------------------------------------------------------


def _fail(check: str, seen: Changes, limit: float, detail: str) -> LegalityFinding:
    return LegalityFinding(check, False, detail, seen.first(limit), seen.worst)


def _size(change: float) -> str:
    return "bit for bit" if change == 0 else f"to {change:.2g} nats"


def _log_sum(row: np.ndarray) -> float:
    """logsumexp in float64."""
    row = row.astype(np.float64)
    top = row.max()
    return float(top + np.log(np.exp(row - top).sum())) if np.isfinite(top) else float(top)


def _spread(num_tokens: int, count: int) -> list[int]:
    """`count` targets of a stream, none of them its last, so that a scorer that looks ahead can."""
    return sorted({int(p) for p in np.linspace(num_tokens - 2, num_tokens // 2, count)})


def _outside_sum(scorer: Scorer, stream: np.ndarray, position: int, adapts: bool, unscored: int | None) -> float:
    """Sum of exp(-nats) of the target at `position` over all tokens put there. `unscored` is a token that would begin a document there
    and is no target: its probability is the one shown, or, if none is, what is missing to 1."""
    total, at_once, shown = 0.0, 1 if adapts else 256, None
    tokens = np.array([token for token in range(scorer.vocab_size) if token != unscored])
    for begin in range(0, len(tokens), at_once):
        put = tokens[begin : begin + at_once]
        variants = np.tile(stream, (len(put), 1))
        variants[:, position] = put
        for scored in evaluation(scorer, list(variants)):
            here = np.flatnonzero(scored.positions == position)[:1]
            total += float(np.exp(-scored.nats[here]).sum())
            if unscored is not None and scored.log_probs is not None and len(here):
                shown = float(np.exp(scored.log_probs[here[0], unscored]))
    if unscored is None:
        return total
    return total + shown if shown is not None else max(total, 1.0)
