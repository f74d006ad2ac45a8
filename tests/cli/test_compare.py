"""bpb records compare, as typed, on real runs: two seeds a side at unequal strides, made equal by what --explain prints; a search, twice."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from scipy import stats as scipy_stats

from bitsperbyte.__main__ import guarded, run_command
from bitsperbyte.records.store import read_record

REPO = Path(__file__).resolve().parents[2]
TEXT = [" ".join(f"{word} {n * n % 97} of {n % 13} and" for word in ("dogs", "birds", "stones")) for n in range(60)]
TINY = """
name: {name}
data: {{path: data}}
model: {{vocab_size: 260, dim: 16, num_heads: 2, num_kv_heads: 1, order: [0, 1], skips: [[0, 1]]}}
schedule: {{wallclock_s: null, max_steps: {steps}, warmdown: {{steps: 0}}, warmup_steps: 0}}
train: {{batch_tokens: 128, seq_len: 32, micro_batch_tokens: 128}}
eval: {{every_steps: 100, stride: {stride}}}
"""
SMOKE = [str(REPO / "configs" / "randopt" / "smoke_cpu.yaml"), "--set", "model.golf.num_docs=2000", "--set", "task.num_test=16",
         "--set", "model.golf.settings.schedule.max_steps=8", "--set", "search.population=6", "--set", "search.top_k=2", "--set",
         "search.secondary_k=[]", "--set", "task.num_train=12", "--set", "controls.control_pool=4", "--set", "heldout.num_docs=8", "--set",
         "heldout.random_mixtures=2"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with data, runs a and b (two seeds each, strides 8 and none), as the current one."""
    home = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr("torch.cuda.is_available", lambda: False)
        (home / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
        assert run("data", "prepare", "--source", "text.jsonl", "--tokenizer", "byte", "--out", "data", "--val-docs", "8") == 0
        for name, steps, stride in (("a", 2, 8), ("b", 8, "null")):
            (home / f"{name}.yaml").write_text(TINY.format(name=name, steps=steps, stride=stride))
            assert run("golf", "train", f"{name}.yaml", "--run-dir", name, "--seeds", "1,2") == 0
        yield home


def run(*arguments: str) -> int:
    return guarded(lambda: run_command([str(a) for a in arguments]))


@pytest.fixture
def compare(home: Path, capsys: pytest.CaptureFixture):
    def compare(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run("records", "compare", *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return compare


def test_unequal_strides_are_refused_and_the_printed_commands_make_them_equal(home: Path, compare) -> None:
    code, out, err = compare("a", "b")
    assert (code, out, err.count("\n")) == (2, "", 1) and "the stride is 8 in a/seed_1 (artifact) and none (non-overlapping) in b/seed_1" in err
    assert "--explain" in err
    code, out, _ = compare("a", "b", "--explain")
    commands = re.findall(r"^  (bpb .*)$", out, re.MULTILINE)
    assert code == 0 and commands == [
        "bpb golf eval b/seed_1 --window 32 --stride 8 --label w32_s8", "bpb golf eval b/seed_2 --window 32 --stride 8 --label w32_s8",
        "bpb records compare a b --label-a artifact --label-b w32_s8"]
    explained = json.loads(compare("a", "b", "--explain", "--json")[1])
    assert [*explained["commands"], explained["compare"]] == commands and explained["labels"] == []
    for command in commands[:2]:
        assert run(*shlex.split(command)[1:]) == 0
    code, out, err = compare(*shlex.split(commands[2])[3:], "--json")
    made = json.loads(out)
    assert code == 0 and made["evaluation"]["stride"] == 8
    assert [row["run"] for row in made["rows"]] == ["a/seed_1", "a/seed_2", "b/seed_1", "b/seed_2"]
    losses = [[read_record(home / side / f"seed_{seed}").score(label).nats_per_token for seed in (1, 2)]
              for side, label in (("a", "artifact"), ("b", "w32_s8"))]
    assert made["tests"]["nats_per_token"]["p_two_sided"] == pytest.approx(scipy_stats.ttest_ind(*losses, equal_var=False).pvalue)
    assert made["gain"]["nats_per_token"] > 0, "eight steps train further than two"
    assert any(line.startswith("schedule.max_steps") for line in made["differences"])
    assert any("the budget differs: A 2 steps; B 8 steps" in line for line in made["warnings"])
    assert json.loads(compare("a", "b", "--explain", "--json")[1])["labels"] == [["artifact", "w32_s8"]]


def test_the_table_fits_in_100_columns_and_shows_every_run(home: Path, compare) -> None:
    code, out, _ = compare("--a", "a/seed_1", "--a", "a/seed_2", "--b", "a/seed_1/../../a/seed_1", "--label", "artifact")
    assert code == 2  # a run on both sides
    code, out, err = compare("b/seed_1", "b/seed_2", "--margin-nats", "0.001")
    assert code == 0 and not err and "sides A and B have a single run" in out
    framed = [line for line in out.splitlines() if line and line[0] in "┏┃┡│└"]
    assert framed and max(map(len, framed)) <= 100
    for seed in (1, 2):
        row = read_record(home / "b" / f"seed_{seed}").score("artifact")
        assert f"{row.nats_per_token:.6f}" in out and f"{row.bpb:.6f}" in out and f"seed_{seed}" in out
    assert "0.001 nats a token / (ln 2 *" in out and "A and B do not differ in their settings" in out


def test_two_results_of_one_search_and_a_record_made_again_from_its_journal(home: Path, compare) -> None:
    assert run("randopt", "run", *SMOKE, "--run-dir", "search") == 0
    code, out, _ = compare("search", "search", "--label-a", "base", "--label-b", "ensemble", "--json")
    made, part = json.loads(out), read_record(home / "search").randopt
    questions, held = made["tests"]
    assert code == 0 and questions["gain"] == pytest.approx(part.ensemble.test.accuracy - part.base.test.accuracy)
    stated = next(row for row in part.tests if (row.a, row.b) == ("ensemble", "base"))
    assert (questions["only_b"], questions["only_a"], questions["p_mcnemar"]) == (stated.only_a, stated.only_b, stated.p_mcnemar)
    mixture = next(row for row in part.heldout.differences if (row.a, row.b) == ("mixture", "base"))
    assert held["gain"] == pytest.approx(-mixture.difference_bpb) and held["interval"]["low"] == pytest.approx(-mixture.high, rel=1e-6)
    code, out, _ = compare("search", "search", "--label-a", "base", "--label-b", "ensemble")
    assert code == 0 and "exact McNemar p" in out and max(map(len, (line for line in out.splitlines() if line[:1] in "┏┃│"))) <= 100
    # as a record was before results were kept item by item
    record = json.loads((home / "search" / "record.json").read_text())
    record["randopt"]["items"] = record["randopt"]["heldout"]["items"] = None
    (home / "search" / "record.json").write_text(json.dumps(record))
    code, _, err = compare("search", "search", "--label-a", "base", "--label-b", "ensemble")
    assert code == 2 and "move record.json away" in err
    code, out, _ = compare("search", "search", "--label-a", "base", "--label-b", "best_single", "--json")
    assert code == 0 and json.loads(out)["tests"][0]["value_b"] == part.controls.best_single.test.accuracy
    journal = (home / "search" / "journal.jsonl").read_bytes()
    (home / "search" / "record.json").rename(home / "away.json")
    assert run("randopt", "run", *SMOKE, "--run-dir", "search", "--resume") == 0
    assert (home / "search" / "journal.jsonl").read_bytes() == journal, "no model was run again"
    assert read_record(home / "search").randopt.items == part.items
    assert compare("search", "search", "--label-a", "base", "--label-b", "ensemble")[0] == 0


def test_mistakes_are_one_line(home: Path, compare) -> None:
    for arguments, expected in [((), "side A has no run"), (("a/seed_1",), "1 run in a row does not pair up"), (("a", "nowhere"), "no record"),
                                (("a", "a"), "does not compare with itself"),
                                (("a", "b", "--label", "other"), "it has before_quantisation, artifact"),
                                (("b/seed_1", "b/seed_2", "--alpha", "1"), "--alpha")]:
        code, out, err = compare(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1) and expected in err, arguments
