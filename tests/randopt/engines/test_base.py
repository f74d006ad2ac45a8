import pytest

from bitsperbyte.randopt.engines.base import Sampling


@pytest.mark.parametrize(("settings", "sentence"), [
    ({"max_new_tokens": 0}, "at least one token"), ({"max_new_tokens": 1, "temperature": -0.1}, "0 is greedy"),
    ({"max_new_tokens": 1, "temperature": float("nan")}, "means nothing"), ({"max_new_tokens": 1, "top_p": 0.0}, "top_p is 0.0"),
    ({"max_new_tokens": 1, "top_p": 1.5}, "at most at 1"), ({"max_new_tokens": 1, "temperature": 1e-300}, "leaves the range of float32"),
])
def test_sampling_that_means_nothing_is_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Sampling(**settings)
    assert Sampling(1).temperature == 0.0
