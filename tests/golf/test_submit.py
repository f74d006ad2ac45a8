"""The submission folder: what it holds, that its figures are the records', and every run that is refused."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import pytest
from rich.console import Console

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.golf import submit as module
from bitsperbyte.golf.bundle import FORMS, bundle
from bitsperbyte.golf.seeds import train_seeds
from bitsperbyte.golf.session import train
from bitsperbyte.golf.submit import SeedRun, budget_kept, hardware_of, read_run, settings_of, submit, track_of
from bitsperbyte.records.store import read_record, write_record
from bitsperbyte.run.folder import RunFolder

ONE = {"train_gpt.py", "artifact.bpb", "tokenizer.json", "submission.json", "README.md"}


@pytest.fixture(scope="session")
def seeds_dir(tmp_path_factory: pytest.TempPathFactory, tiny: Callable) -> Path:
    """Three seeds of a tiny run. Not to be changed."""
    root = tmp_path_factory.mktemp("seeds") / "run"
    train_seeds({seed: tiny({"train": {"seed": seed}, "schedule": {"max_steps": 4}}) for seed in (10, 2, 33)}, root)
    return root


@pytest.fixture
def run_dir(seeds_dir: Path, tmp_path: Path) -> Path:
    """One finished run, to be spoilt."""
    shutil.copytree(seeds_dir / "seed_2", tmp_path / "run")
    return tmp_path / "run"


def spoil(run_dir: Path, change: Callable) -> None:
    record = read_record(run_dir)
    change(record)
    write_record(run_dir / "record.json", record)


# -- what it holds -----------------------------------------------------------------------------------------------------


def test_the_folder_of_several_seeds(seeds_dir: Path, tmp_path: Path) -> None:
    made = submit(seeds_dir, tmp_path / "out", author="A", github_id="a", blurb="Small.", name="Tiny seeds")
    files = {path.name: path.read_bytes() for path in made.path.iterdir()}
    assert set(files) == ONE | {"train_seed2.log", "train_seed10.log", "train_seed33.log"}
    facts = json.loads(files["submission.json"])
    assert facts == json.loads(json.dumps(made.facts)) and made.files == {name: len(content) for name, content in files.items()}
    records = {seed: read_record(seeds_dir / f"seed_{seed}") for seed in (2, 10, 33)}
    finals = {seed: record.score("artifact") for seed, record in records.items()}
    assert facts["seeds"] == [2, 10, 33] and list(facts["seed_results"]) == ["2", "10", "33"], "in the order of the seeds, not of the names"
    assert facts["val_bpb"] == pytest.approx(mean(row.bpb for row in finals.values()), rel=1e-12)
    assert facts["val_bpb_std"] == pytest.approx(stdev(row.bpb for row in finals.values()), rel=1e-9)
    assert facts["val_loss"] == pytest.approx(mean(row.nats_per_token for row in finals.values()), rel=1e-12)
    for seed, record in records.items():
        row = facts["seed_results"][str(seed)]
        assert row["val_bpb"] == finals[seed].bpb and row["pre_quant_val_bpb"] == record.score("before_quantisation").bpb
        assert row["artifact_sha256"] == record.artifact.sha256 and row["bytes_artifact"] == record.artifact.weight_bytes
        assert row["bytes_total"] == row["bytes_artifact"] + facts["bytes_code"] and row["step_stop"] == 4
        assert files[row["log"]] == (seeds_dir / f"seed_{seed}/train.log").read_bytes()
        assert row["log_sha256"] == hashlib.sha256(files[row["log"]]).hexdigest()
    assert facts["artifact"]["seed"] == 2 and facts["artifact"]["val_bpb"] == finals[2].bpb
    assert hashlib.sha256(files["artifact.bpb"]).hexdigest() == facts["artifact"]["sha256"] == records[2].artifact.sha256
    assert (facts["author"], facts["github_id"], facts["blurb"], facts["name"]) == ("A", "a", "Small.", "Tiny seeds")
    assert facts["data"]["val_sha256"] == records[2].data.val_sha256 and facts["budget_seconds"] is facts["within_budget"] is None
    assert hashlib.sha256(files["tokenizer.json"]).hexdigest() == facts["tokenizer"]["sha256"] == records[2].data.tokenizer_sha256


def test_the_bytes_are_those_of_the_files_and_of_the_record(seeds_dir: Path, tmp_path: Path) -> None:
    """The code that the record counts is this very script."""
    facts = submit(seeds_dir / "seed_2", tmp_path / "out").facts
    artifact = read_record(seeds_dir / "seed_2").artifact
    assert (tmp_path / "out/train_gpt.py").stat().st_size == facts["bytes_code"] == artifact.code_bytes
    assert hashlib.sha256((tmp_path / "out/train_gpt.py").read_bytes()).hexdigest() == facts["code_sha256"] == artifact.code_sha256
    assert facts["code_as_recorded"] is True and facts["code_form"] == artifact.code_form == "plain"
    assert facts["bytes_artifact"] == artifact.weight_bytes and facts["bytes_total"] == artifact.total_bytes
    assert facts["bytes_margin"] == artifact.margin_bytes == artifact.cap_bytes - artifact.total_bytes
    assert facts["val_loss_std"] is facts["val_bpb_std"] is None and facts["seeds"] == [2]


@pytest.mark.parametrize("form", FORMS)
def test_another_form_than_recorded_is_said(form: str, seeds_dir: Path, tmp_path: Path) -> None:
    facts = submit(seeds_dir / "seed_2", tmp_path / "out", code=form).facts
    readme = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    artifact = read_record(seeds_dir / "seed_2").artifact
    assert facts["code_form"] == form and facts["bytes_code"] == (tmp_path / "out/train_gpt.py").stat().st_size
    assert facts["code_as_recorded"] is (form == "plain")
    assert ("byte for byte, the script that the record" in readme) == (form == "plain")
    assert ("another script" in readme and f"{artifact.code_bytes:,} bytes of code" in readme) == (form != "plain")
    assert ("['SOURCE']" in readme) == (form == "compressed")


def test_the_readme_states_every_figure(seeds_dir: Path, tmp_path: Path) -> None:
    facts = submit(seeds_dir, tmp_path / "out", blurb="Small.").facts
    readme = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    first, figures = readme.splitlines()[0], readme.partition("## Scores")[0]
    assert first == "# tiny" and "Small." in figures
    assert f"**{facts['val_bpb']:.8f} bits per byte** (mean over seeds 2, 10, 33" in figures, "the mean is the headline"
    best = min(row["val_bpb"] for row in facts["seed_results"].values())
    assert f"{best:.8f}" not in figures, "the best seed is not"
    for row in facts["seed_results"].values():
        assert f"| {row['val_loss']:.8f} | {row['val_bpb']:.8f} | {row['pre_quant_val_bpb']:.8f} | 4 |" in readme
    for text in (f"{facts['bytes_total']:,}", f"{facts['bytes_margin']:,}", "non-overlapping windows of 16 tokens", facts["data"]["val_sha256"],
                 facts["data"]["train_sha256"], facts["tokenizer"]["sha256"], "499 tokens that stand for", facts["hardware"], "it had no budget",
                 "--eval-only artifact.bpb", f"val_bpb:{facts['artifact']['val_bpb']:.8f}", "that of seed 2, the first listed", "non-record"):
        assert text in readme, text
    for path in (tmp_path / "out").iterdir():
        assert path.name == "README.md" or f"| `{path.name}` | {path.stat().st_size:,} |" in readme


def test_a_codec_beyond_the_standard_library_is_named(tmp_path: Path, tiny: Callable) -> None:
    train(tiny({"schedule": {"max_steps": 1}, "artifact": {"codec": "zstd"}, "eval": {"stride": 3}}), tmp_path / "run")
    submit(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/requirements.txt").read_text() == "zstandard\n"
    readme = (tmp_path / "out/README.md").read_text()
    assert "pip install -r requirements.txt" in readme and "sliding windows of 16 tokens, stride 3" in readme


def test_the_same_run_gives_the_same_bytes(seeds_dir: Path, tmp_path: Path) -> None:
    folders = [submit(seeds_dir, tmp_path / name).path for name in ("a", "b")]
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    assert contents[0] == contents[1]


def test_the_command_prints_the_bytes(seeds_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert guarded(lambda: run_command(["golf", "submit", str(seeds_dir), "--out", str(tmp_path / "out"), "--code", "minified"])) == 0
    out = capsys.readouterr().out
    facts = json.loads((tmp_path / "out/submission.json").read_text())
    for text in (f"{facts['bytes_total']:,}", f"{facts['bytes_code']:,} of minified code", f"{facts['val_bpb']:.8f}, mean of 3 seeds", "--author"):
        assert text in out, text
    assert guarded(lambda: run_command(["golf", "submit", str(seeds_dir), "--out", str(tmp_path / "out")])) == 2
    err = capsys.readouterr().err
    assert "exists, and a submission is never overwritten" in err and err.count("\n") == 1


# -- the cap -----------------------------------------------------------------------------------------------------------


def capped(run_dir: Path, cap: int) -> None:
    """The run as if its config and record had that cap."""
    text = (run_dir / "config.yaml").read_text()
    assert "cap_bytes: 16000000" in text
    (run_dir / "config.yaml").write_text(text.replace("cap_bytes: 16000000", f"cap_bytes: {cap}"))

    def change(record) -> None:
        record.config["artifact"]["cap_bytes"] = cap
        record.artifact = None or {**record.artifact.model_dump(), "cap_bytes": cap, "margin_bytes": cap - record.artifact.total_bytes}

    spoil(run_dir, change)


def test_auto_takes_the_form_that_the_cap_allows(run_dir: Path, tmp_path: Path) -> None:
    weights = (run_dir / "artifact.bpb").stat().st_size
    settings = dataclasses.replace(settings_of(read_run(run_dir)), cap_bytes=10_000_000)
    sizes = {form: bundle(settings, form).num_bytes for form in FORMS}
    before = 16_000_000
    for form in ("minified", "compressed"):
        cap = weights + sizes[form] + 200  # room for a cap of fewer digits in the script's settings
        (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace(f"cap_bytes: {before}", "cap_bytes: 16000000"))
        spoil(run_dir, lambda record: record.config["artifact"].update(cap_bytes=16_000_000))
        capped(run_dir, cap)
        before = cap
        facts = submit(run_dir, tmp_path / form).facts
        assert facts["code_form"] == form and 0 <= facts["bytes_margin"] <= 400


def test_over_the_cap_is_refused_with_what_would_help(run_dir: Path, tmp_path: Path) -> None:
    capped(run_dir, 60_000)
    with pytest.raises(ValueError, match="over the cap by [0-9,]+ bytes: the artifact of seed 2 .* --code compressed makes the script .* and fits"):
        submit(run_dir, tmp_path / "out", code="plain")
    (run_dir / "config.yaml").write_text((run_dir / "config.yaml").read_text().replace("cap_bytes: 60000", "cap_bytes: 16000000"))
    spoil(run_dir, lambda record: record.config["artifact"].update(cap_bytes=16_000_000))
    capped(run_dir, 20_000)
    with pytest.raises(ValueError, match="over the cap by .* the compressed script .* of 20,000; take fewer or narrower blocks"):
        submit(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*partial"))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "match"), [
    ("running", "is not finished .its record says running.: go on with .*--resume"), ("interrupted", "says interrupted.*--resume"),
    ("crashed", "says crashed"), ("diverged", "diverged: lower the learning rates"), ("over_cap", "ended over the cap.*int6"),
])
def test_a_run_that_did_not_finish_well_is_refused(status: str, match: str, run_dir: Path, tmp_path: Path) -> None:
    spoil(run_dir, lambda record: setattr(record, "status", status))
    with pytest.raises(ValueError, match=match):
        submit(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def replace_artifact(run_dir: Path) -> None:
    content = bytearray((run_dir / "artifact.bpb").read_bytes())
    content[100] ^= 1
    (run_dir / "artifact.bpb").write_bytes(content)


def change_width(run_dir: Path) -> None:
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("matrix_lr: 0.04", "matrix_lr: 0.05"))


@pytest.mark.parametrize(("damage", "match"), [
    (replace_artifact, "artifact.bpb has sha256 .* and the record beside it is of"),
    (lambda run: (run / "artifact.bpb").unlink(), "holds no artifact.bpb"),
    (lambda run: (run / "train.log").unlink(), "holds no train.log"),
    (lambda run: (run / "tokenizer.json").unlink(), "exactly one tokenizer"),
    (lambda run: (run / "record.json").unlink(), "there is no record at"),
    (lambda run: (run / "record.json").write_text("{"), "is not JSON"),
    (change_width, "config.yaml is not the config in record.json .*matrix_lr"),
    (lambda run: spoil(run, lambda record: setattr(record, "scores", record.scores[:1])), "lacks the artifact, its score"),
    (lambda run: spoil(run, lambda record: setattr(record.data, "tokenizer_sha256", "0" * 64)), "names another tokenizer"),
    (lambda run: spoil(run, lambda record: setattr(record, "track", "randopt")), "holds a randopt run"),
])
def test_a_run_whose_parts_do_not_go_together_is_refused(damage: Callable, match: str, run_dir: Path, tmp_path: Path) -> None:
    damage(run_dir)
    with pytest.raises(ValueError, match=match):
        submit(run_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_in_use_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with RunFolder.open(run_dir, resume=True, kind="golf"), pytest.raises(ValueError, match="is in use by process"):
        submit(run_dir, tmp_path / "out")


def test_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such run folder"):
        submit(tmp_path / "absent", tmp_path / "out")
    (tmp_path / "seed_x").mkdir()
    with pytest.raises(ValueError, match="neither record.json nor folders seed_1"):
        submit(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="no form 'zip'.*--code takes one of auto, plain"):
        submit(tmp_path, tmp_path / "out", code="zip")


@pytest.mark.parametrize(("change", "match"), [
    (lambda record: record.data.__setattr__("train_sha256", "0" * 64), "was trained on other data"),
    (lambda record: setattr(record, "scores", [row.model_copy(update={"stride": 3}) for row in record.scores]), "was scored on another text"),
    (lambda record: setattr(record, "seed", 2), "are both of seed 2"),
])
def test_seeds_that_differ_in_more_than_their_seed_are_refused(change: Callable, match: str, seeds_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(seeds_dir, tmp_path / "run")
    spoil(tmp_path / "run/seed_33", change)
    with pytest.raises(ValueError, match=match):
        submit(tmp_path / "run", tmp_path / "out")


def test_seeds_of_two_configs_are_refused(seeds_dir: Path, tmp_path: Path, tiny: Callable) -> None:
    shutil.copytree(seeds_dir, tmp_path / "run")
    train(tiny({"train": {"seed": 40}, "schedule": {"max_steps": 3}}), tmp_path / "run/seed_40", console=Console(quiet=True))
    with pytest.raises(ValueError, match="seed_40 was trained under another config .*max_steps"):
        submit(tmp_path / "run", tmp_path / "out")


def test_the_folder_appears_whole_or_not_at_all(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.write_atomic
    for last in ("train_gpt.py", "README.md"):
        def fail(path: Path, data: bytes, last: str = last) -> None:
            if path.name == last:
                raise OSError(28, "No space left on device")
            original(path, data)

        monkeypatch.setattr(module, "write_atomic", fail)
        with pytest.raises(OSError, match="No space"):
            submit(run_dir, tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    monkeypatch.setattr(module, "write_atomic", original)
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="out exists"):
        submit(run_dir, tmp_path / "out")


# -- time and machine --------------------------------------------------------------------------------------------------


def as_if(run: SeedRun, *, budget: float | None, began: float | None, train_s: float = 600.03, device: str = "NVIDIA H100 80GB HBM3",
          num_devices: int = 8) -> SeedRun:
    record = run.record.model_copy(deep=True)
    record.training.train_s = train_s
    record.provenance |= {"device": device, "num_devices": num_devices}
    schedule = run.config.schedule.model_copy(update={"wallclock_s": budget})
    return dataclasses.replace(run, record=record, config=run.config.model_copy(update={"schedule": schedule}), last_step_began_s=began)


def test_the_budget_is_kept_where_the_last_step_began_within_it(seeds_dir: Path) -> None:
    run = read_run(seeds_dir / "seed_2")
    assert budget_kept([as_if(run, budget=None, began=3.0)]) is None
    assert budget_kept([as_if(run, budget=600.0, began=599.99)]) is True
    assert budget_kept([as_if(run, budget=600.0, began=600.01)]) is False
    assert budget_kept([as_if(run, budget=600.0, began=1.0), as_if(run, budget=600.0, began=601.0)]) is False
    assert budget_kept([as_if(run, budget=600.0, began=None)]) is False and budget_kept([as_if(run, budget=601.0, began=None)]) is True
    steps = [json.loads(line) for line in (seeds_dir / "seed_2/metrics.jsonl").read_text().splitlines()]
    last = [row for row in steps if "loss" in row][-1]
    assert run.last_step_began_s == pytest.approx(last["elapsed_s"] - last["step_ms"] / 1e3)


def test_only_the_challenges_machine_time_and_cap_make_a_record(seeds_dir: Path) -> None:
    run = read_run(seeds_dir / "seed_2")
    fits = as_if(run, budget=600.0, began=599.99)
    assert track_of([fits]) == track_of([fits, fits]) == "track_10min_16mb"
    for other in (as_if(run, budget=600.0, began=599.99, num_devices=1), as_if(run, budget=600.0, began=599.99, device="NVIDIA H200"),
                  as_if(run, budget=14_400.0, began=1.0), as_if(run, budget=None, began=1.0), as_if(run, budget=600.0, began=700.0)):
        assert track_of([other]) == "track_non_record_16mb"
    assert track_of([fits, as_if(run, budget=600.0, began=599.99, num_devices=4)]) == "track_non_record_16mb", "every seed on that machine"
    assert hardware_of(fits.record) == "8 x NVIDIA H100 80GB HBM3" and hardware_of(run.record).startswith("CPU: ")
