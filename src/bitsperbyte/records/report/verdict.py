"""What the tests of a RandOpt run show, in words. A gain that a control shows as well is called that, and not a gain of the search."""

from collections.abc import Mapping
from dataclasses import dataclass

Interval = tuple[float, float]

SELECTION, PERTURBING = "random_k", "base_majority"
EXPLAINS = {
    SELECTION: "the vote of as many members drawn at random is as good, so that the gain comes of voting over perturbed models and not of "
               "selecting the best of them",
    PERTURBING: "the vote of as many samples of the unperturbed model is as good, so that the gain comes of voting and not of perturbing",
    "random_mixture": "the mixture of as many members drawn at random is as good, so that the gain comes of mixing perturbed models and not of "
                      "selecting the best of them",
}
BEATEN = {
    SELECTION: "it is better than votes of as many members drawn at random",
    PERTURBING: "it is better than the vote of as many samples of the unperturbed model",
    "random_mixture": "it is better than mixtures of as many members drawn at random",
}
MISSING = {
    SELECTION: "random ensembles were not run, so that nothing separates selecting from voting",
    PERTURBING: "the vote of samples of the unperturbed model was not run, so that nothing separates perturbing from sampling",
    "random_mixture": "random mixtures were not run, so that nothing separates selecting from mixing",
}


@dataclass(frozen=True)
class Verdict:
    """`kind`: gain, explained (a gain that a control has too), uncontrolled (a gain, and a control is missing), none (not shown), worse,
    unknown. `headline` and `reasons` say it in sentences."""

    kind: str
    headline: str
    reasons: tuple[str, ...] = ()


def judge(over_base: Interval | None, over_controls: Mapping[str, Interval | None]) -> Verdict:
    """The verdict on 95% intervals of gains: of the ensemble over the base, and over each control (None: not run). Above zero is better."""
    if over_base is None:
        return Verdict("unknown", "The record states no test of the ensemble against the base.")
    low, high = over_base
    if high < 0:
        return Verdict("worse", "The ensemble is worse than the base.")
    if low <= 0:
        return Verdict("none", "No gain over the base is shown: the interval of the difference includes zero. That does not show that there "
                               "is none; a larger test set could tell.")
    explains = [name for name, gain in over_controls.items() if gain is not None and gain[0] <= 0]
    missing = [name for name, gain in over_controls.items() if gain is None]
    beaten = [name for name, gain in over_controls.items() if gain is not None and gain[0] > 0]
    reasons = tuple(_sentence(words) for words in (*(EXPLAINS[n] for n in explains), *(BEATEN[n] for n in beaten), *(MISSING[n] for n in missing)))
    if explains:
        return Verdict("explained", "A gain over the base that the controls explain: this run shows no gain of the search itself.", reasons)
    if missing:
        return Verdict("uncontrolled", "A gain over the base whose cause is open: a control is missing.", reasons)
    return Verdict("gain", "A gain over the base that the controls do not explain.", reasons)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."
