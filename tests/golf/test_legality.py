"""Honest models pass every check; each kind of cheating is caught by the check that is there for it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitsperbyte.golf.evaluate import Protocol
from bitsperbyte.golf.findings import LegalityFinding, failed
from bitsperbyte.golf.legality import TOLERANCES, assert_legal, batch_changes, check_legal
from bitsperbyte.golf.model import GolfModel, ModelConfig
from bitsperbyte.golf.probes import Text, made_up_tokens
from bitsperbyte.golf.scorers import NetworkScorer, Scored

VOCAB, BOS = 24, 1
QUICK: dict[str, Any] = {"window": 16, "short": 16, "num_cuts": 12, "vocab_size": VOCAB}


def golf_model(seed: int = 0, **changes: Any) -> GolfModel:
    torch.manual_seed(seed)
    model = GolfModel(ModelConfig(**{"vocab_size": VOCAB, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "order": (0, 1, 1, 0),
                                     "skips": ((1, 2), (0, 3)), **changes}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def network(model: GolfModel) -> Callable[[Tensor], Tensor]:
    def logits(tokens: Tensor) -> Tensor:
        hidden = model.hidden(tokens)
        return model.logits(hidden.flatten(0, 1)).unflatten(0, tokens.shape)

    return logits


def named(findings: Sequence[LegalityFinding]) -> dict[str, LegalityFinding]:
    assert len({f.check for f in findings}) == len(findings)
    return {f.check: f for f in findings}


# -- honest -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"attention_window": 5}, {"tie_embeddings": False, "num_kv_heads": 2},
                                     {"order": (0, 1, 2), "skips": ()}])
@pytest.mark.parametrize("settings", [{}, {"stride": 5}, {"documents": "isolated", "bos_id": BOS}])
def test_golf_models_are_legal(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    findings = assert_legal(golf_model(**changes), **QUICK, **settings)
    assert {f.check for f in findings if f.ok} >= {"state", "coverage", "causality", "normalisation", "batch"}
    assert (named(findings)["isolation"].ok is True) == (settings.get("documents") == "isolated")
    assert named(findings)["bytes"].ok is None, "no tokenizer was given, and that is said instead of passed"


def test_a_bare_function_and_log_probabilities_are_legal() -> None:
    logits = network(golf_model())
    assert_legal(logits, **QUICK)
    assert_legal(lambda tokens: logits(tokens).log_softmax(-1), outputs="log_probs", **QUICK)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rounding_stays_within_its_tolerance_with_room(precision: str) -> None:
    """What other batches change by rounding alone, by the check's own comparison; bench/legality_rounding.py measures more."""
    limits = TOLERANCES[precision]
    for seed in range(3):
        model = golf_model(seed, dim=64, order=(0, 1, 2, 2, 1, 0), skips=((2, 3), (1, 4), (0, 5)))
        model.compute_dtype = getattr(torch, precision)
        assert_legal(model, **QUICK, stride=4)
        text = Text(made_up_tokens(VOCAB, seed=seed), VOCAB, None, keep_bos=False, seed=seed)
        exact, loose, mean = batch_changes(NetworkScorer(model, Protocol(16, 4)), text, 64)
        assert exact.worst == 0 and loose.worst < limits.reshaped / 2 and mean < limits.mean / 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_prediction_that_follows_from_the_size_of_the_batch_is_caught_in_both_precisions(precision: str) -> None:
    """Other texts beside it change nothing, so only the comparison that rounding disturbs can see it: it must not be blind."""
    model = golf_model()
    model.compute_dtype = getattr(torch, precision)
    logits = network(model)
    found = named(check_legal(lambda t: logits(t) * (1.05 if len(t) > 8 else 1.0), precision=precision, **QUICK))
    assert found["batch"].ok is False and "batch's size" in found["batch"].detail
    assert found["state"].ok and found["causality"].ok


def test_other_targets_in_another_batch_are_a_finding() -> None:
    class Choosy(Own):
        def score(self, streams: Sequence[np.ndarray]) -> list[Scored]:
            made = super().score(streams)
            return made if len(made) < 3 else [Scored(m.positions[1:], m.nats[1:], m.log_probs[1:]) for m in made]

    assert named(check_legal(Choosy(plain), **QUICK))["batch"].ok is False


def test_a_scorer_that_learns_from_what_it_has_scored_is_legal_if_it_says_so() -> None:
    """Counts of bigrams, each token scored before it is counted; nothing is left at the next evaluation."""
    assert_legal(Counting(before=False), adapts=True, **QUICK)
    caught = named(check_legal(Counting(before=False), **QUICK))
    assert caught["batch"].ok is False, "undeclared, what it learnt from the text before is a dependence on the batch"


# -- cheating ---------------------------------------------------------------------------------------------------------


class Counting:
    """Bigram counts over an evaluation, mixed with a uniform distribution; with `before` it counts a target before it scores it."""

    vocab_size = VOCAB

    def __init__(self, before: bool, kept: bool = False, look: int = 0) -> None:
        self.before, self.kept, self.look = before, kept, look
        self.seen: dict[int, np.ndarray] = {}

    def score(self, streams: Sequence[np.ndarray]) -> list[Scored]:
        counts = self.seen if self.kept else {}
        made = []
        for stream in streams:
            rows = []
            for at in range(1, len(stream)):
                row = counts.setdefault(int(stream[at - 1]), np.full(VOCAB, 0.5))
                if self.before:
                    row[stream[at]] += 1
                rows.append(np.log(row / row.sum()))
                if not self.before:
                    row[stream[at]] += 1
            log_probs = np.array(rows)
            made.append(Scored(np.arange(1, len(stream)), -log_probs[np.arange(len(rows)), stream[1:]], log_probs))
        return made


def leak(offset: int, strength: float = 0.05, only: Callable[[Tensor], Tensor] | None = None) -> Callable[[Tensor], Tensor]:
    """Logits that know the token `offset` places after the input, weakly; `only` chooses at which places of a window."""
    honest = network(golf_model())

    def logits(tokens: Tensor) -> Tensor:
        out = honest(tokens)
        peek = F.one_hot(tokens.roll(-offset, 1), VOCAB) * strength
        peek[:, tokens.shape[1] - offset :] = 0
        if only is not None:
            peek = peek * only(torch.arange(tokens.shape[1]))[None, :, None]
        return out + peek

    return logits


def whole_window_statistics(tokens: Tensor) -> Tensor:
    return network(golf_model())(tokens) + 1e-3 * F.one_hot(tokens, VOCAB).float().mean(1, keepdim=True)


def first_of_the_batch(tokens: Tensor) -> Tensor:
    return network(golf_model())(tokens) + 0.1 * F.one_hot(tokens[:1, :1], VOCAB).float()


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = golf_model()

    def forward(self, tokens: Tensor) -> Tensor:
        out = network(self.model)(tokens)
        return out / (1e-3 + out.std((0, 1), correction=0, keepdim=True))


class Remembering(nn.Module):
    """Keeps how often it met each token, in a buffer, from one evaluation to the next."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.model, self.used = golf_model(), used
        self.register_buffer("met", torch.zeros(VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        out = network(self.model)(tokens) + (1e-3 * self.met if self.used else 0.0)
        self.met += torch.bincount(tokens.flatten(), minlength=VOCAB)
        return out


class LearningOnce(nn.Module):
    """Learns from its first evaluation, and changes nothing afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.model = golf_model()
        self.register_buffer("met", torch.zeros(VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        out = network(self.model)(tokens) + 1e-3 * self.met
        if not self.met.any():
            self.met.copy_(torch.bincount(tokens.flatten(), minlength=VOCAB))
        return out


class Caching(nn.Module):
    """Honest: keeps a table that grows to the longest window that it met."""

    def __init__(self) -> None:
        super().__init__()
        self.model = golf_model()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        if len(self.table) < tokens.shape[1]:
            self.table = torch.arange(tokens.shape[1]).cos()
        return network(self.model)(tokens) + self.table[: tokens.shape[1], None]


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.drop = golf_model(), nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(network(self.model)(tokens))


class Own:
    """A scorer around the honest network that does its own accounting, which `change` falsifies."""

    vocab_size = VOCAB

    def __init__(self, change: Callable[[np.ndarray, np.ndarray, np.ndarray], Scored], model: GolfModel | None = None) -> None:
        self.logits, self.change = network(model or golf_model()), change

    def score(self, streams: Sequence[np.ndarray]) -> list[Scored]:
        made = []
        for stream in streams:
            with torch.no_grad():
                rows = self.logits(torch.from_numpy(stream[None, :-1])).float().log_softmax(-1)[0].double().numpy()
            nats = -rows[np.arange(len(rows)), stream[1:]]
            made.append(self.change(stream, nats, rows))
        return made


def plain(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    return Scored(np.arange(1, len(stream)), nats, rows)


def hides_rows_and_scales(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    return Scored(np.arange(1, len(stream)), nats * 0.97)


def shows_other_rows(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    return Scored(np.arange(1, len(stream)), nats - 0.01, rows)


def best_of_two(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    """Two honest experts, and of each target the better one's nats: the choice looks at the target."""
    other = np.roll(rows, 1, axis=0)
    other[0] = np.log(1 / VOCAB)
    second = -other[np.arange(len(rows)), stream[1:]]
    return Scored(np.arange(1, len(stream)), np.minimum(nats, second))


def skips_the_hard_ones(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    kept = nats < np.quantile(nats, 0.9) if len(nats) > 4 else np.ones(len(nats), bool)
    return Scored(np.flatnonzero(kept) + 1, nats[kept], rows[kept])


def counts_the_easy_one_twice(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    easy = np.sort(np.append(np.arange(len(nats)), nats.argmin()))
    return Scored(easy + 1, nats[easy], rows[easy])


def second_pass_first(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    back = np.arange(len(nats))[::-1]
    return Scored(back + 1, nats[back], rows[back])


def not_a_number(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
    return Scored(np.arange(1, len(stream)), np.where(nats > np.median(nats), np.nan, nats))


def late(tokens_T: Tensor) -> Tensor:
    return tokens_T >= len(tokens_T) - 4


CHEATS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "sees its target": (lambda: leak(1), {}, "causality"),
    "sees the token after its target": (lambda: leak(2), {}, "causality"),
    "sees far ahead, weakly": (lambda: leak(7, 1e-4), {}, "causality"),
    "sees ahead at the end of a window only": (lambda: leak(2, only=late), {"stride": 5}, "causality"),
    "statistics of the whole window": (lambda: whole_window_statistics, {}, "causality"),
    "counts a target before it scores it": (lambda: Counting(before=True), {"adapts": True}, "causality"),
    "the batch's first token": (lambda: first_of_the_batch, {}, "batch"),
    "normalised over the batch": (BatchNorm, {}, "batch"),
    "remembers in a buffer": (lambda: Remembering(used=True), {}, "state"),
    "writes a buffer it does not use yet": (lambda: Remembering(used=False), {}, "state"),
    "learns in its first evaluation only": (LearningOnce, {}, "state"),
    "remembers in a dict": (lambda: Counting(before=False, kept=True), {"adapts": True}, "state"),
    "draws random numbers": (lambda: Dropping().train(), {}, "state"),
    "log-probabilities without their normaliser": (lambda: network(golf_model()), {"outputs": "log_probs"}, "normalisation"),
    "log-probabilities a little too high": (lambda: lambda t: network(golf_model())(t).log_softmax(-1) + 1e-3, {"outputs": "log_probs"},
                                            "normalisation"),
    "nats scaled, distributions hidden": (lambda: Own(hides_rows_and_scales), {}, "normalisation"),
    "nats below the distributions shown": (lambda: Own(shows_other_rows), {}, "normalisation"),
    "the better of two experts": (lambda: Own(best_of_two), {}, "normalisation"),
    "not a number": (lambda: Own(not_a_number), {}, "normalisation"),
    "leaves out hard targets": (lambda: Own(skips_the_hard_ones), {}, "coverage"),
    "counts an easy target twice": (lambda: Own(counts_the_easy_one_twice), {}, "coverage"),
    "scores backwards": (lambda: Own(second_pass_first), {}, "coverage"),
    "context of the document before": (lambda: Own(plain), {"documents": "isolated", "bos_id": BOS}, "isolation"),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_each_way_of_cheating_is_caught_by_its_check(cheat: str) -> None:
    make, settings, check = CHEATS[cheat]
    found = named(check_legal(make(), **QUICK, **settings))[check]
    assert found.ok is False, found.detail
    assert found.detail and "\n" not in found.detail
    with pytest.raises(AssertionError, match=f"not legal:\n(.*\n)*  {check}: "):
        assert_legal(make(), **QUICK, **settings)


def test_every_check_has_a_cheat() -> None:
    checks = {f.check for f in check_legal(golf_model(), **QUICK)}
    assert checks == {check for _, _, check in CHEATS.values()} | {"bytes"}, "bytes: tests/golf/test_byte_counts.py"


def test_the_honest_parts_of_the_cheats_are_legal() -> None:
    """So that what is caught is the cheat and not the frame around it."""
    assert_legal(Own(plain), **QUICK)
    assert_legal(lambda tokens: network(golf_model())(tokens), **QUICK)
    assert_legal(Dropping().eval(), **QUICK)
    assert_legal(Caching(), **QUICK)


def test_a_leak_is_found_at_its_place() -> None:
    """A scorer that looks ahead only when it predicts targets 9 to 11 is found at 9."""
    def peeks(stream: np.ndarray, nats: np.ndarray, rows: np.ndarray) -> Scored:
        following = np.append(stream[2:], 0)  # of each target, the token after it
        known = np.isin(np.arange(1, len(stream)), (9, 10, 11))
        return Scored(np.arange(1, len(stream)), nats + np.where(known, 1e-3 * following, 0.0))

    found = named(check_legal(Own(peeks), **QUICK))["causality"]
    assert (found.ok, found.position) == (False, 9)
    assert found.change is not None and 1e-3 <= found.change < 1e-3 * VOCAB


def test_the_same_seed_gives_the_same_findings() -> None:
    one, two = (check_legal(golf_model(), **QUICK, seed=3) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("settings, words", [
    ({"short": 4}, "at least 8"), ({"num_cuts": 0}, "at least 1"), ({"documents": "isolated"}, "need bos_id"),
    ({"precision": "int3"}, "float32, bfloat16"), ({"tokens": np.full(100, VOCAB)}, "another tokenizer"),
    ({"tokens": np.arange(5)}, "too short"),
])
def test_what_cannot_be_checked_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_legal(golf_model(), **{**QUICK, **settings})


def test_failed_lists_what_failed_only() -> None:
    findings = check_legal(leak(1), **QUICK)
    assert {f.check for f in failed(findings)} >= {"causality"}
    assert all(f.ok is False for f in failed(findings))
