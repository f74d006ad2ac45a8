"""Scripts in the sandbox: no network with or without a namespace, ended in time with all they started, little of the environment."""

import os
import time
from pathlib import Path

import psutil
import pytest

from bitsperbyte.golf.check.sandbox import Outcome, namespace_command, run_offline


@pytest.fixture(params=["namespace", "hook alone"])
def prefix(request: pytest.FixtureRequest) -> list[str]:
    found = namespace_command()
    if request.param == "namespace" and not found:
        pytest.skip("this system allows no network namespace")
    return found if request.param == "namespace" else []


def run(tmp_path: Path, source: str, prefix: list[str], limit_s: float = 60, **variables: str) -> Outcome:
    (tmp_path / "code").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "code" / "train_gpt.py").write_text(source, encoding="utf-8")
    return run_offline(["train_gpt.py"], tmp_path / "code", tmp_path / "scratch", limit_s=limit_s, prefix=prefix, variables=variables)


def test_tries_of_the_network_are_refused_and_named(tmp_path: Path, prefix: list[str]) -> None:
    outcome = run(tmp_path, "import urllib.request\ntry:\n    urllib.request.urlopen('http://192.0.2.1/')\nexcept OSError as error:\n"
                            "    print('stopped', error)\nimport os\ntry:\n    os.system('curl http://192.0.2.1/')\nexcept OSError:\n"
                            "    print('stopped')\n", prefix)
    assert outcome.code == 0 and outcome.output.count("stopped") == 2
    assert any("192.0.2.1" in what for what in outcome.network) and any("curl" in what for what in outcome.network)


def test_a_namespace_stops_what_python_does_not_see(tmp_path: Path) -> None:
    found = namespace_command()
    if not found:
        pytest.skip("this system allows no network namespace")
    outcome = run(tmp_path, "import subprocess\nprint(subprocess.run(['cat', '/proc/net/dev'], capture_output=True, text=True).stdout)\n", found)
    devices = [line.split(":")[0].strip() for line in outcome.output.splitlines() if ":" in line]
    assert outcome.code == 0 and set(devices) <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "ip6gre0"}


def test_the_package_that_made_a_submission_is_out_of_reach(tmp_path: Path, prefix: list[str]) -> None:
    outcome = run(tmp_path, "import bitsperbyte\n", prefix)
    assert outcome.code == 1 and outcome.imports == ["import bitsperbyte"]


def test_the_time_limit_ends_the_script_and_what_it_started(tmp_path: Path) -> None:
    source = ("import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(100)'])\n"
              "print(child.pid)\ntime.sleep(100)\n")
    outcome = run(tmp_path, source, namespace_command() or pytest.skip("processes are refused without a namespace"), limit_s=3)
    assert outcome.code is None and 3 <= outcome.seconds < 20
    time.sleep(0.2)
    pid = int(outcome.output.split()[0])
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_few_variables_arrive(tmp_path: Path, prefix: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    outcome = run(tmp_path, "import os\nprint(sorted(os.environ))\nprint(os.environ['DATA_PATH'])\n", prefix, DATA_PATH="/somewhere")
    assert outcome.code == 0 and "SECRET_TOKEN" not in outcome.output and "/somewhere" in outcome.output


def test_a_report_that_the_script_spoils_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    source = "open(%r, 'a').write('not json\\n[1]\\n{\"kind\": 1}\\n')\nimport socket\nsocket.getaddrinfo('example.org', 1)\n"
    outcome = run(tmp_path, source % os.fspath(tmp_path / "scratch" / "tried.jsonl"), [])
    assert outcome.code == 1 and outcome.network == ["socket.getaddrinfo example.org"]
