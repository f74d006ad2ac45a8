"""Several seeds of one config."""

import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from bitsperbyte.golf import seeds as module
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.seeds import parse_seeds, train_seeds
from bitsperbyte.golf.train import Trainer
from bitsperbyte.run.outcome import RunFailed


def test_parse() -> None:
    assert parse_seeds("1, 2,30") == [1, 2, 30] and parse_seeds("7") == [7]


@pytest.mark.parametrize("text", ["", "1,", "a", "1;2", "-1", "1.5"])
def test_what_is_no_list_of_seeds(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers with commas"):
        parse_seeds(text)


def test_a_seed_named_twice() -> None:
    with pytest.raises(ValueError, match="names a seed twice"):
        parse_seeds("1,2,01")


@pytest.fixture(scope="module")
def configs(tiny: Callable) -> Callable[..., dict[int, GolfConfig]]:
    def build(seeds: tuple[int, ...] = (1, 2, 3), **sections: dict) -> dict[int, GolfConfig]:
        return {seed: tiny({"schedule": {"max_steps": 4}, **sections, "train": {"seed": seed}}) for seed in seeds}

    return build


def test_each_seed_has_a_folder_and_the_spread_is_said(tmp_path: Path, configs: Callable, capsys) -> None:
    records = train_seeds(configs(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["seed_1", "seed_2", "seed_3"]
    assert [record.seed for record in records.values()] == [1, 2, 3] == list(records)
    bpbs = [record.score("artifact").bpb for record in records.values()]
    assert len(set(bpbs)) == 3
    mean, sd = statistics.mean(bpbs), statistics.stdev(bpbs)
    said = " ".join(capsys.readouterr().err.split())
    assert f"artifact bpb over 3 seeds: mean {mean:.4f}, sd {sd:.4f}, each " + " ".join(f"{b:.4f}" for b in bpbs) in said


def test_resume_keeps_what_is_finished_and_goes_on_with_the_rest(tmp_path: Path, configs: Callable, capsys,
                                                                 monkeypatch: pytest.MonkeyPatch, losses: Callable) -> None:
    class Dead(BaseException):
        pass

    original = Trainer.train_step

    def die_in_seed_2(self: Trainer, *arguments: object) -> object:
        if self.config.train.seed == 2 and self.step == 2:
            raise Dead
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", die_in_seed_2)
        with pytest.raises(Dead):
            train_seeds(configs(), tmp_path)
    first = {p: p.read_bytes() for p in (tmp_path / "seed_1").rglob("*") if p.is_file()}
    capsys.readouterr()
    records = train_seeds(configs(), tmp_path, resume=True)
    said = capsys.readouterr().err
    assert "seed 1 is finished: kept" in said and "artifact bpb over 3 seeds" in said
    assert {p: p.read_bytes() for p in first} == first
    assert [records[seed].training.num_resumes for seed in (1, 2, 3)] == [0, 1, 0]
    assert train_seeds(configs(), tmp_path, resume=True) == records
    for seed in (1, 2, 3):
        assert len(losses(tmp_path / f"seed_{seed}")) == 4


def test_a_seed_kept_from_another_config_would_spoil_the_mean(tmp_path: Path, configs: Callable) -> None:
    train_seeds(configs((1,)), tmp_path)
    with pytest.raises(ValueError, match=r"optim\.matrix_lr: 0\.04 -> 0\.02"):
        train_seeds(configs((1, 2), optim={"matrix_lr": 0.02}), tmp_path, resume=True)
    assert not (tmp_path / "seed_2").exists()


def test_without_resume_nothing_is_overwritten(tmp_path: Path, configs: Callable) -> None:
    train_seeds(configs((1,)), tmp_path)
    with pytest.raises(ValueError, match="already holds a run"):
        train_seeds(configs((1,)), tmp_path)


def test_a_seed_over_the_cap_does_not_keep_the_others_from_their_turn(tmp_path: Path, configs: Callable) -> None:
    over = configs((1, 2), artifact={"cap_bytes": 1000})
    for resume in (False, True):  # the first call trains both, the second keeps both; each is a failure
        with pytest.raises(RunFailed, match="seeds 1, 2 are over the cap") as caught:
            train_seeds(over, tmp_path, resume=resume)
        assert caught.value.code == 1 and (tmp_path / "seed_2/record.json").exists()


def test_one_seed_has_no_spread(tmp_path: Path, configs: Callable, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "summarize", lambda values: pytest.fail("two are needed"))
    train_seeds(configs((5,)), tmp_path)
    assert not re.search("over 1 seeds", capsys.readouterr().err)
