import json
import math
from pathlib import Path

import pytest
from scipy import stats as scipy_stats

from bitsperbyte.records.compare import compare_golf, equal_labels, view_of
from bitsperbyte.records.sides import read_sides

from .conftest import golf_score


def test_figures_are_scipys_and_bpb_is_the_same_test(golf_runs) -> None:
    losses_a, losses_b = [2.500, 2.502, 2.499], [2.480, 2.483, 2.481]
    a, b = read_sides([golf_runs.side("a", losses_a), golf_runs.side("b", losses_b, config={"model": {"dim": 32}})])
    made = compare_golf(a, b)
    assert made.units == ["nats_per_token", "bpb"] and made.differences == ["model.dim: 16 -> 32"]
    nats, bpb = made.tests["nats_per_token"], made.tests["bpb"]
    assert nats.p_two_sided == pytest.approx(scipy_stats.ttest_ind(losses_a, losses_b, equal_var=False).pvalue)
    above = scipy_stats.ttest_ind([x - 0.005 for x in losses_a], losses_b, equal_var=False, alternative="greater")
    assert nats.p_margin == pytest.approx(above.pvalue) and nats.p_guard is None
    # 2.5 bytes a token: nats / ln 2 / 2.5 are bits a byte, and a change of units changes no p
    assert made.margin == {"nats_per_token": 0.005, "bpb": pytest.approx(0.005 / math.log(2) / 2.5)}
    assert made.gain["bpb"] == pytest.approx(made.gain["nats_per_token"] / math.log(2) / 2.5)
    assert (bpb.t, bpb.df, bpb.p_two_sided, bpb.p_margin) == tuple(
        pytest.approx(value, rel=1e-6) for value in (nats.t, nats.df, nats.p_two_sided, nats.p_margin))
    assert made.shown and "shown at 0.01" in made.verdict[-1] and made.num_needed is None
    row = made.rows[0]
    assert (row["side"], row["seed"], row["nats_per_token"], row["bytes_per_token"], row["num_steps"], row["total_bytes"]) == (
        "A", 1, 2.5, 2.5, 100, 15)
    swapped = compare_golf(b, a)
    assert swapped.gain["bpb"] == -made.gain["bpb"] and not swapped.shown and "More runs will not decide it" in swapped.verdict[-1]
    assert json.loads(json.dumps(made.to_dict(), allow_nan=False))["tests"]["bpb"]["p_margin"] == bpb.p_margin


def test_a_single_run_is_no_test(golf_runs) -> None:
    made = compare_golf(*read_sides([golf_runs.make("one", 2.5), golf_runs.side("two", [2.4, 2.41])]))
    assert made.tests == {} and made.shown is None and "side A has a single run" in made.no_test
    assert made.gain["nats_per_token"] == pytest.approx(0.095) and "not tested" in made.verdict[0]


def test_equal_values_are_no_test(golf_runs) -> None:
    made = compare_golf(*read_sides([golf_runs.side("one", [2.5, 2.5]), golf_runs.side("two", [2.4, 2.4])]))
    assert made.tests == {} and "no spread" in made.no_test and made.shown is None


def test_what_is_not_decided_says_how_many_runs_would(golf_runs) -> None:
    made = compare_golf(*read_sides([golf_runs.side("a", [2.510, 2.514, 2.506]), golf_runs.side("b", [2.500, 2.503, 2.497, 2.501])]))
    assert made.shown is False and made.num_needed > 4
    assert f"{made.num_needed - 3} more of A and {made.num_needed - 4} more of B" in made.verdict[-1]
    assert made.tests["bpb"].p_guard > made.tests["bpb"].p_margin and "Behrens and Fisher" in made.verdict[1]
    looser = compare_golf(*read_sides([golf_runs.root / "a", golf_runs.root / "b"]), margin_nats=0.0, alpha=0.05)
    assert looser.shown and looser.margin["bpb"] == 0.0


@pytest.mark.parametrize(("change", "expected"), [
    ({"stride": 256}, r"the stride is none \(non-overlapping\) in .* and 256 in"), ({"window": 512}, "the window is 1024 in .* and 512"),
    ({"documents": "isolated"}, "the document mode is across in .* and isolated"), ({"drop_tail": True}, "dropping of the tail is off .* and on"),
    ({"split_sha256": "ef" * 32}, "the text .* is abababababab .* and efefefefefef"), ({"split_sha256": None}, "does not say the text")])
def test_unequal_evaluations_are_refused(golf_runs, change: dict, expected: str) -> None:
    a = golf_runs.make("a", 2.5, more=[golf_score(2.4, "both", window=64)])
    b = golf_runs.make("b", 2.4, score=change, more=[golf_score(2.3, "both", window=64), golf_score(2.45, "like a's", text="elsewhere")])
    with pytest.raises(ValueError, match=expected) as refused:
        compare_golf(*read_sides([a, b]))
    assert "--label both; --label-a artifact --label-b 'like a'\"'\"'s'" in str(refused.value) and "--explain" in str(refused.value)
    assert compare_golf(*read_sides([a, b]), ("artifact", "like a's")).gain["nats_per_token"] == pytest.approx(0.05)


def test_equal_labels_must_be_equal_in_every_run_and_of_what_ships(golf_runs) -> None:
    before = golf_score(2.4, "before_quantisation")
    a, b = read_sides([golf_runs.side("a", [2.5, 2.6], more=[before]), golf_runs.make("b", 2.4, more=[before])])
    assert equal_labels(a, b) == [("artifact", "artifact"), ("before_quantisation", "before_quantisation")]
    golf_runs.make("a/seed_3", 2.5, seed=3, score={"stride": 8}, more=[before])
    assert equal_labels(*read_sides([golf_runs.root / "a", golf_runs.root / "b"])) == [("before_quantisation", "before_quantisation")]
    warned = compare_golf(a, b, ("before_quantisation", "before_quantisation")).warnings
    assert "do not ship" in warned[0]


def test_a_run_does_not_compare_with_itself_or_without_a_score(golf_runs) -> None:
    one, dead = golf_runs.make("one", 2.5), golf_runs.make("dead", 2.5, status="crashed", error="out of memory")
    record = json.loads((dead / "record.json").read_text())
    (dead / "record.json").write_text(json.dumps({**record, "scores": []}))
    with pytest.raises(ValueError, match="a run does not compare with itself"):
        compare_golf(*read_sides([one, one]))
    with pytest.raises(ValueError, match=r"dead \(crashed: out of memory\) has no score 'artifact'; it has none at all"):
        compare_golf(*read_sides([one, dead]))
    with pytest.raises(ValueError, match="has no score 'other'; it has artifact: choose with --label"):
        compare_golf(*read_sides([one, dead]), ("other", "other"))
    two = golf_runs.make("two", 2.4, seed=2)
    for options, expected in [({"alpha": 0.0}, "--alpha"), ({"margin_nats": -1.0}, "--margin-nats"), ({"margin_nats": math.nan}, "--margin-nats")]:
        with pytest.raises(ValueError, match=expected):
            compare_golf(*read_sides([one, two]), **options)


def test_records_that_contradict_one_evaluation_are_refused(golf_runs) -> None:
    a, b = golf_runs.make("a", 2.5), golf_runs.make("b", 2.4, score={"num_tokens": 999})
    with pytest.raises(ValueError, match="1,000 tokens and .* 999 under what both state as one evaluation"):
        compare_golf(*read_sides([a, b]))


def test_other_tokenizers_compare_in_bits_per_byte_by_the_stricter_margin(golf_runs) -> None:
    text = {"text": "held_out.jsonl", "split_sha256": "77" * 32}
    a = golf_runs.side("a", [2.500, 2.502, 2.499], score=text)
    b = golf_runs.side("b", [3.400, 3.405, 3.402], score={**text, "num_tokens": 700, "num_bytes": 2499}, data={"tokenizer_sha256": "ee" * 32})
    made = compare_golf(*read_sides([a, b]))
    assert made.units == ["bpb"] and made.margin == {"bpb": pytest.approx(0.005 / math.log(2) / 2.5)} and "stricter" in made.margin_how
    assert "nats per token do not compare" in made.warnings[0] and "2,499 and 2,500 bytes" in made.warnings[1]
    c = golf_runs.side("c", [3.4, 3.5], score={**text, "num_tokens": 700, "drop_tail": True}, data={"tokenizer_sha256": "ee" * 32})
    d = golf_runs.make("d", 2.5, score={**text, "drop_tail": True})
    with pytest.raises(ValueError, match="drops another tail"):
        compare_golf(*read_sides([d, c]))
    golf_runs.make("c/seed_3", 3.4, seed=3, score={**text, "drop_tail": False})
    golf_runs.make("e/seed_1", 3.4, seed=1, score=text, data={"tokenizer_sha256": "ee" * 32})
    golf_runs.make("e/seed_2", 3.4, seed=2, score=text)
    with pytest.raises(ValueError, match="the tokenizer differs within a side"):
        compare_golf(*read_sides([a, golf_runs.root / "e"]))
    unknown = golf_runs.make("unknown", 2.5, data={"tokenizer_sha256": None}, score=text)
    assert compare_golf(*read_sides([a, unknown])).units == ["bpb"]


def imported(root: Path, name: str, scores: list[dict], stated: dict) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "record.json").write_text(json.dumps({
        "schema_version": 2, "track": "golf", "name": name, "status": "imported", "created_utc": "2026-01-31T12:00:00+00:00",
        "imported": {"source": "train.log", "scores": scores, "stated": stated}}))
    return folder


def test_an_imported_run_compares_only_where_its_evaluation_is_known(golf_runs, tmp_path: Path) -> None:
    own = golf_runs.make("own", 2.5)
    score = {"label": "artifact", "nats_per_token": 2.4, "bpb": 1.385, "digits": 8}
    unknown = imported(tmp_path, "unknown", [score], {})
    with pytest.raises(ValueError, match="was imported, and its source does not say the text .*, the window, the stride, .* nothing is guessed"):
        compare_golf(*read_sides([own, unknown]))
    stated = {"split_sha256": "ab" * 32, "window": 1024, "documents": "across", "drop_tail": False}
    partly = imported(tmp_path, "partly", [score], stated)
    with pytest.raises(ValueError, match="does not say the stride of 'artifact'"):
        compare_golf(*read_sides([own, partly]))
    known = imported(tmp_path, "known", [score], {**stated, "stride": None})
    made = compare_golf(*read_sides([own, known]))
    assert made.units == ["bpb"] and any("is imported" in line for line in made.warnings)
    assert any("published in 8 decimals: its score is sure to 5e-09" in line for line in made.warnings)
    assert view_of(read_sides([own, known])[1].runs[0], "artifact").bytes_per_token == pytest.approx(2.4 / math.log(2) / 1.385)
    lossy = imported(tmp_path, "lossy", [{"label": "artifact", "nats_per_token": 2.4}], {**stated, "stride": None})
    with pytest.raises(ValueError, match="share no unit"):
        compare_golf(*read_sides([own, lossy]))
