"""submission.json has no schema: the names found in public ones are read, with the digits that they are written with."""

import json
from decimal import Decimal

import pytest

from bitsperbyte.golf.check.claims import BPB, LOSS, STEPS, TOTAL, WEIGHTS_OR_TOTAL, Claims, read_claims


def claims(text: str) -> Claims:
    return read_claims(json.loads(text, parse_float=Decimal))


def test_the_names_of_public_submissions() -> None:
    one = claims('{"mean_val_bpb": 1.20287799, "artifact_bytes": 15039175, "seed_results": {"7": {"val_bpb": 1.20406767, "steps": 10605}}}')
    assert one.get(BPB).value == Decimal("1.20287799") and one.get(BPB).decimals == 8
    assert one.get(STEPS, 7).value == 10605 and one.get(WEIGHTS_OR_TOTAL).value == 15039175 and one.seeds == (7,)
    assert one.get(LOSS) is None and one.get(BPB, 8) is None


@pytest.mark.parametrize(("text", "seeds"), [
    ('{"seeds": [42, 0, 1234]}', (42, 0, 1234)), ('{"seeds": {"42": 1.1, "7": 1.2}}', (42, 7)), ('{"seed": 5}', (5,)),
    ('{"seed_results": [{"seed": 1, "val_bpb": 1.0}, {"seed": "seed_2"}]}', (1, 2)), ('{"seeds": "42"}', ()), ('{"seeds": [true, null]}', ()),
    ('{"results": [1, 2]}', ()), ('{"seeds": [1, 1], "seed_results": {"seed1": {}}}', (1,)), ("{}", ()),
])
def test_seeds_in_every_form(text: str, seeds: tuple[int, ...]) -> None:
    assert claims(text).seeds == seeds


def test_a_bare_number_of_a_seed_is_its_score() -> None:
    assert claims('{"seeds": {"42": 1.25}}').get(BPB, 42).value == Decimal("1.25")


@pytest.mark.parametrize("value", ["true", '"1.2"', "null", "[1.2]", "{}", "1e999999999", "1e-999999999", "9" * 40])
def test_what_is_no_number_is_no_claim(value: str) -> None:
    assert claims(f'{{"val_bpb": {value}, "bytes_total": {value}}}').get(BPB) is None


def test_text_under_nested_keys() -> None:
    found = claims('{"artifact": {"sha256": "ab"}, "data": "x", "track": ""}')
    assert found.text("artifact", "sha256") == "ab"
    assert [found.text("data", "y"), found.text("track"), found.text("nothing"), found.text("artifact")] == [None] * 4


def test_a_claim_names_its_key_and_seed() -> None:
    found = claims('{"bytes_total": 15863489, "seed_results": {"3": {"val_bpb": 1.2}}}')
    assert str(found.get(TOTAL)) == "bytes_total 15,863,489" and str(found.get(BPB, 3)) == "val_bpb of seed 3 1.2"
