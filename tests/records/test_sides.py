import json
from pathlib import Path

import pytest

from bitsperbyte.records.sides import check_independent, config_differences, read_sides, same_run, warnings_of


def folders(side) -> list[str]:
    return [run.folder.name for run in side.runs]


def test_runs_in_turn_are_the_sides_in_turn_and_a_folder_of_seeds_is_all_of_them(golf_runs, tmp_path: Path) -> None:
    golf_runs.side("a", [2.5] * 11)
    for name in ("b1", "b2", "a2"):
        golf_runs.make(name, 2.4)
    a, b = read_sides([tmp_path / "a", tmp_path / "b1" / "record.json", tmp_path / "a2", tmp_path / "b2"])
    assert folders(a) == [f"seed_{i}" for i in range(1, 12)] + ["a2"]  # by number, not by letter
    assert folders(b) == ["b1", "b2"] and (a.name, b.name) == ("A", "B") and b.arguments[0].endswith("record.json")
    a, b = read_sides([], [tmp_path / "b1"], [tmp_path / "b2", tmp_path / "a2"])
    assert folders(a) == ["b1"] and folders(b) == ["b2", "a2"]


def test_sides_that_are_none_are_refused(golf_runs, tmp_path: Path) -> None:
    one, two = golf_runs.make("one", 2.5), golf_runs.make("two", 2.4)
    for pairs, a, b, expected in [([one], [], [], "1 run in a row does not pair up"), ([one, two, one], [], [], "do not pair up"),
                                  ([], [one], [], "side B has no run"), ([one, tmp_path / "nowhere"], [], [], "there is no record")]:
        with pytest.raises(ValueError, match=expected):
            read_sides(pairs, a, b)
    golf_runs.side("many", [2.5, 2.6])
    (tmp_path / "many" / "seed_3").mkdir()
    with pytest.raises(ValueError, match="seed_3 has no record.json, so it is running or was killed"):
        read_sides([one, tmp_path / "many"])
    record = json.loads((two / "record.json").read_text())
    (two / "record.json").write_text(json.dumps({**record, "track": "randopt", "scores": []}))
    with pytest.raises(ValueError, match="runs compare within a track"):
        read_sides([one, two])


def test_a_run_counts_once(golf_runs, tmp_path: Path) -> None:
    one, two = golf_runs.make("one", 2.5, seed=1), golf_runs.make("two", 2.6, seed=2)
    check_independent(read_sides([one, two, two, one])[0])
    with pytest.raises(ValueError, match="counts one run twice.*one record"):
        check_independent(read_sides([one, two, one / ".." / "one" / "record.json", two])[0])
    copied = tmp_path / "copied"
    copied.mkdir()
    (copied / "record.json").write_bytes((one / "record.json").read_bytes())
    with pytest.raises(ValueError, match="records are equal"):
        check_independent(read_sides([one, two, copied, two])[0])
    edited = json.loads((one / "record.json").read_text()) | {"notes": "copied and edited", "seed": 7}
    (copied / "record.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match="byte for byte"):
        check_independent(read_sides([one, two, copied, two])[0])
    again = golf_runs.make("again", 2.50001, seed=1)
    with pytest.raises(ValueError, match="has seed 1 twice"):
        check_independent(read_sides([one, two, again, two])[0])
    other = golf_runs.make("other", 2.7, seed=1, config={"model": {"dim": 32}})
    a, b = read_sides([one, two, other, two])
    check_independent(a)  # equal seeds of other configs share no start
    assert any("side A is not one recipe" in line and "model.dim: 16 -> 32" in line for line in warnings_of(a, b))
    assert same_run(a.runs[0], b.runs[0]) is None


def test_seed_name_and_logger_are_no_differences(golf_runs) -> None:
    one = golf_runs.make("one", 2.5, seed=1, config={"name": "x", "logger": {"backend": "none"}, "optim": {"lr": 0.1}})
    two = golf_runs.make("two", 2.5, seed=2, config={"name": "y", "logger": {"backend": "wandb"}, "optim": {"lr": 0.2}})
    a, b = read_sides([one, two])
    assert config_differences(a.runs[0].record, b.runs[0].record) == ["optim.lr: 0.1 -> 0.2"]


def test_what_else_differs_is_warned_about(golf_runs) -> None:
    facts = {"source_sha256": "aa" * 32, "device": "NVIDIA H200", "num_devices": 1, "versions": {"torch": "2.11.0"}, "dirty": False}
    a = golf_runs.make("a", 2.5, provenance=facts)
    same = golf_runs.make("same", 2.5, provenance=facts, config={"model": {"dim": 32}})
    assert warnings_of(*read_sides([a, same])) == []
    other = golf_runs.make("other", 2.5, status="over_cap", data={"train_sha256": "99" * 32}, training={"budget_s": 600.0}, provenance={
        **facts, "source_sha256": "bb" * 32, "num_devices": 8, "versions": {"torch": "2.12.0"}, "dirty": True,
        "attempts": [{"device": "NVIDIA H200", "num_devices": 8}, {"device": "NVIDIA H200", "num_devices": 1}]})
    found = "\n".join(warnings_of(*read_sides([a, other])))
    for expected in ("the budget differs: A 240 s; B 600 s", "the hardware differs: A NVIDIA H200; B 8 x NVIDIA H200", "the code differs",
                     "torch differs: A 2.11.0; B 2.12.0", "the training data differs", "is over the cap", "resumed on other hardware",
                     "changes that no commit holds", "A and B do not differ in their settings"):
        assert expected in found
    unknown = golf_runs.make("unknown", 2.5, config={"model": {"dim": 32}})
    assert "the hardware differs: A NVIDIA H200; B unknown" in warnings_of(*read_sides([a, unknown]))
