"""What the tests of a RandOpt run show, in words. A gain that a control shows as well is called that, and not a gain of the search.

An interval over questions says whether the ensemble beats the *mean* of the random ensembles. Whether one that nobody selected would have
done as well is another question, which the share of the draws that did answers: both must speak for the selection."""

from collections.abc import Mapping
from dataclasses import dataclass

Interval = tuple[float, float]

SELECTION, PERTURBING, MIXING = "random_k", "base_majority", "random_mixture"
LUCK = 0.05  # from this share of random draws as good as the ensemble on, its rank among them is no evidence
LUCKY = ("it is better than {} on average, but one in twenty of them or more did as well, so that selecting nothing might have given "
         "this result too")
EXPLAINS = {
    SELECTION: "the vote of as many members drawn at random is not shown to be worse, so that the gain may come of voting over "
               "perturbed models and not of selecting the best of them",
    PERTURBING: "the vote of as many samples of the unperturbed model is not shown to be worse, so that the gain may come of voting "
                "and not of perturbing",
    MIXING: "the mixture of as many members drawn at random is not shown to be worse, so that the gain may come of mixing perturbed models "
            "and not of selecting the best of them",
}
BEATEN = {
    SELECTION: "it is better than votes of as many members drawn at random",
    PERTURBING: "it is better than the vote of as many samples of the unperturbed model",
    MIXING: "it is better than mixtures of as many members drawn at random",
}
MISSING = {
    SELECTION: "random ensembles were not run, so that nothing separates selecting from voting",
    PERTURBING: "the vote of samples of the unperturbed model was not run, so that nothing separates perturbing from sampling",
    MIXING: "random mixtures were not run, so that nothing separates selecting from mixing",
}
SINGLE = "the best single member is not shown to be worse, so that nothing here is owed to putting several together"
DRAWN = {SELECTION: "votes of as many members drawn at random", MIXING: "mixtures of as many members drawn at random"}


@dataclass(frozen=True)
class Verdict:
    """`kind`: gain, explained (a gain that a control has too), uncontrolled (a gain, and a control is missing), none (not shown), worse,
    unknown. `headline` and `reasons` say it in sentences."""

    kind: str
    headline: str
    reasons: tuple[str, ...] = ()


def judge(over_base: Interval | None, over_controls: Mapping[str, Interval | None], share_as_good: float | None = None,
          over_single: Interval | None = None) -> Verdict:
    """The verdict on 95% intervals of gains: of the ensemble over the base, and over each control (None: not run). Above zero is better.

    `share_as_good`: of the random ensembles or mixtures, those at least as good as the ensemble; None where it is not known.
    `over_single`: the gain over the best single member, which says whose a gain is and not whether there is one.
    """
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
    lucky = [name for name in beaten if name in DRAWN and share_as_good is not None and share_as_good >= LUCK]
    reasons = tuple(_sentence(words) for words in (
        *(EXPLAINS[n] for n in explains), *(LUCKY.format(DRAWN[n]) for n in lucky), *(BEATEN[n] for n in beaten if n not in lucky),
        *(MISSING[n] for n in missing), *([SINGLE] if over_single is not None and over_single[0] <= 0 else [])))
    if explains or lucky:
        return Verdict("explained", "A gain over the base that the controls may explain: this run shows no gain of the search itself.", reasons)
    if missing:
        return Verdict("uncontrolled", "A gain over the base whose cause is open: a control is missing.", reasons)
    return Verdict("gain", "A gain over the base that the controls do not explain.", reasons)


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:] + "."
