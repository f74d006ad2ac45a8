"""Checkpoints: exact round trips, damage of any kind, and a kill between any two steps of saving."""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bitsperbyte.golf import checkpoint as module
from bitsperbyte.golf.checkpoint import load_checkpoint, save_checkpoint


def tensors_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(5, 7, generator=generator),
        "model/half": torch.randn(4, 3, generator=generator).bfloat16(),
        "model/turned": torch.randn(4, 6, generator=generator).T,
        "optim/step": torch.tensor(float(step)),
        "random": torch.randint(0, 256, (100,), generator=generator, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
    }


def save(folder: Path, step: int) -> Path:
    return save_checkpoint(
        folder, step, tensors_of(step), {"clock": {"elapsed_s": step / 3}, "position": step * 8, "note": "§"}
    )


def assert_is(folder: Path, step: int, num_notes: int = 0) -> None:
    found = load_checkpoint(folder)
    assert found is not None and found.step == step and len(found.notes) == num_notes, found and found.notes
    assert found.meta == {"clock": {"elapsed_s": step / 3}, "position": step * 8, "note": "§"}
    expected = tensors_of(step)
    assert found.tensors.keys() == expected.keys()
    for name, t in expected.items():
        assert found.tensors[name].dtype == t.dtype and torch.equal(found.tensors[name], t), name


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoint").iterdir())


def test_none_before_the_first(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    (tmp_path / "checkpoint").mkdir()
    assert load_checkpoint(tmp_path) is None


def test_round_trip_and_the_newest_two_are_kept(tmp_path: Path) -> None:
    for step in (0, 100, 200, 300):
        path = save(tmp_path, step)
        assert path == tmp_path / "checkpoint" / f"step_{step:08d}.safetensors" and path.is_file()
        assert_is(tmp_path, step)
    assert files(tmp_path) == ["latest.json", "step_00000200.safetensors", "step_00000300.safetensors"]
    latest = json.loads((tmp_path / "checkpoint/latest.json").read_text())
    assert latest["file"] == "step_00000300.safetensors" and latest["step"] == 300
    assert latest["num_bytes"] == path.stat().st_size


def test_saving_the_same_step_again_keeps_the_one_before(tmp_path: Path) -> None:
    for step in (100, 200, 200):
        save(tmp_path, step)
    assert_is(tmp_path, 200)
    assert files(tmp_path) == ["latest.json", "step_00000100.safetensors", "step_00000200.safetensors"]


def test_checkpoints_of_an_abandoned_future_go(tmp_path: Path) -> None:
    for step in (100, 200):
        save(tmp_path, step)
    flip(tmp_path / "checkpoint/step_00000200.safetensors", random.Random(0))
    assert_is(tmp_path, 100, num_notes=1)
    save(tmp_path, 150)
    assert_is(tmp_path, 150)
    assert files(tmp_path) == ["latest.json", "step_00000100.safetensors", "step_00000150.safetensors"]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoint/step_final.safetensors").write_text("the user's own")
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert "step_final.safetensors" in files(tmp_path)


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 9)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (100, 200):
        save(folder, step)
    return folder


def check_damage(saved: Path, folder: Path, damage: Callable[[Path, random.Random], None], seed: int) -> None:
    shutil.copytree(saved, folder)
    rng = random.Random(seed)
    newest, older = (folder / f"checkpoint/step_{step:08d}.safetensors" for step in (200, 100))
    damage(newest, rng)
    found = load_checkpoint(folder)
    assert found is not None and "step 200 is not used" in found.notes[0] and str(newest) in found.notes[0]
    assert_is(folder, 100, num_notes=1)
    damage(older, rng)
    with pytest.raises(ValueError, match=r"no checkpoint can be used.*step 200.*step 100.*new run folder"):
        load_checkpoint(folder)


DAMAGES = [truncate, flip, lengthen, remove]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(saved: Path, tmp_path: Path, damage: Callable, seed: int) -> None:
    check_damage(saved, tmp_path / "run", damage, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1050))
@pytest.mark.parametrize("damage", [truncate, flip])
def test_damage_anywhere(saved: Path, tmp_path: Path, damage: Callable, seed: int) -> None:
    check_damage(saved, tmp_path / "run", damage, seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_list_never_gives_a_wrong_checkpoint(saved: Path, tmp_path: Path, seed: int) -> None:
    """A flipped bit in latest.json: a right checkpoint, or a sentence."""
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    flip(folder / "checkpoint/latest.json", random.Random(seed))
    try:
        found = load_checkpoint(folder)
    except ValueError as error:
        assert "start again in a new run folder" in str(error).lower()
    else:
        assert found is not None
        assert_is(folder, found.step, num_notes=len(found.notes))


def test_a_lost_list_is_not_taken_for_a_fresh_start(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run/checkpoint/latest.json").unlink()
    with pytest.raises(ValueError, match="latest.json is missing"):
        load_checkpoint(tmp_path / "run")


@pytest.mark.parametrize(
    "entry",
    [
        {"file": "../../elsewhere.safetensors", "step": 200, "sha256": "0" * 64, "num_bytes": 3},
        {"file": "step_00000200.safetensors", "step": "200", "sha256": "0" * 64, "num_bytes": 3},
        {"file": "step_00000200.safetensors"},
        "text",
        7,
    ],
)
def test_a_hostile_list_is_refused(saved: Path, tmp_path: Path, entry: object) -> None:
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "run/checkpoint/latest.json").write_text(json.dumps({"kept": [entry]}))
    with pytest.raises(ValueError, match="latest.json is damaged"):
        load_checkpoint(tmp_path / "run")


# -- a kill between any two steps ------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and no clean-up runs for it."""


def system_calls(monkeypatch: pytest.MonkeyPatch, before: Callable[[str], None]) -> None:
    """Call `before` with a name ahead of every change that saving makes to the disk."""

    def wrap(owner: object, attribute: str) -> None:
        original = getattr(owner, attribute)

        def wrapped(*args, **kwargs):
            before(attribute)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, wrapped)

    for owner, attribute in [(os, "replace"), (os, "fsync"), (module, "_write_synced"), (Path, "unlink")]:
        wrap(owner, attribute)


@pytest.fixture
def call_names(tmp_path: Path) -> Iterator[list[str]]:
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for step in (100, 200):
            save(tmp_path / "counted", step)
        system_calls(patch, names.append)
        save(tmp_path / "counted", 300)
    yield names


def test_a_kill_at_any_point_of_saving_leaves_a_whole_checkpoint(tmp_path: Path, call_names: list[str]) -> None:
    assert call_names.count("replace") == 2 and call_names.count("unlink") == 1 and call_names.count("fsync") >= 3
    for num_earlier in range(3):
        outcomes = []
        for kill_at in range(len(call_names)):
            folder = tmp_path / f"run_{num_earlier}_{kill_at}"
            for step in range(100, 100 + 100 * num_earlier, 100):
                save(folder, step)
            previous, new = 100 * num_earlier, 100 * num_earlier + 100
            remaining = [kill_at]

            def kill(name: str, remaining: list[int] = remaining) -> None:
                if remaining[0] == 0:
                    raise Killed
                remaining[0] -= 1

            with pytest.MonkeyPatch.context() as patch:
                system_calls(patch, kill)
                try:
                    save(folder, new)
                except Killed:
                    pass
            found = load_checkpoint(folder)
            outcomes.append(found.step if found else 0)
            if found:
                assert_is(folder, found.step)
            # a resumed run saves on: the new one, then one more, and nothing is left over
            for step in (new, new + 100):
                save(folder, step)
                assert_is(folder, step)
            assert files(folder) == ["latest.json", *(f"step_{step:08d}.safetensors" for step in (new, new + 100))]
        assert set(outcomes) == {previous, new} and outcomes == sorted(outcomes)


def test_a_kill_while_only_the_temporary_name_exists_survives_the_next_save_too(tmp_path: Path) -> None:
    """The list vouches for a file that was not renamed; saving the next must keep it as the one to fall back to."""
    save(tmp_path, 100)
    path = save(tmp_path, 200)
    path.rename(path.with_name(path.name + ".partial"))
    assert_is(tmp_path, 200)
    newest = save(tmp_path, 300)
    truncate(newest, random.Random(1))
    assert_is(tmp_path, 200, num_notes=1)


def test_a_torn_temporary_file_is_not_used(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    (tmp_path / "checkpoint/step_00000200.safetensors.partial").write_bytes(path.read_bytes()[:50])
    assert_is(tmp_path, 100)


# -- a full disk -----------------------------------------------------------------------------------------------------


def test_a_disk_that_takes_no_more_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """A real limit on file size stands for the full disk: the system refuses in the middle of the write."""
    save(tmp_path, 100)
    before = files(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write the checkpoint of step 200, .* bytes.*make room"):
            save(tmp_path, 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(tmp_path) == before
    assert_is(tmp_path, 100)
    save(tmp_path, 200)
    assert_is(tmp_path, 200)


@pytest.mark.parametrize("fail_at", range(6))
def test_an_error_of_the_disk_at_any_sync_or_rename_leaves_a_checkpoint(tmp_path: Path, fail_at: int) -> None:
    save(tmp_path, 100)
    remaining = [fail_at]

    def fail(name: str) -> None:
        if name in ("replace", "fsync"):
            if remaining[0] == 0:
                raise OSError(28, "No space left on device")
            remaining[0] -= 1

    with pytest.MonkeyPatch.context() as patch:
        system_calls(patch, fail)
        with pytest.raises(OSError, match=r"No space left on device.*--resume"):
            save(tmp_path, 200)
    assert_is(tmp_path, 100 if fail_at < 4 else 200)  # the fifth call renames, after the list was replaced
    if fail_at < 4:
        assert files(tmp_path) == ["latest.json", "step_00000100.safetensors"]


def test_meta_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, 1, tensors_of(1), {"loss": float("nan")})
    assert load_checkpoint(tmp_path) is None


# -- what is no list and no folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [[], {}, "", 0])
def test_a_list_of_nothing_is_refused_by_name(tmp_path: Path, kept: object) -> None:
    (tmp_path / "checkpoint").mkdir()
    path = tmp_path / "checkpoint/latest.json"
    path.write_text(json.dumps({"kept": kept}))
    with pytest.raises(ValueError, match=r"is damaged \(it lists no checkpoint\).*start again in a new run folder") as caught:
        load_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_a_file_in_the_place_of_the_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("the user's own")
    with pytest.raises(ValueError, match=r"checkpoint is a file where the folder of checkpoints belongs: put the folder back"):
        load_checkpoint(tmp_path)
    with pytest.raises(OSError, match=r"cannot write the checkpoint of step 1.*is a file where.*move it away"):
        save(tmp_path, 1)
    assert (tmp_path / "checkpoint").read_text() == "the user's own"
