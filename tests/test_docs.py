"""What the README and docs/ say, compared with the disk, the command line and the code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml

from bitsperbyte.__main__ import COMMAND_LINE_ERROR
from bitsperbyte.cli import app
from bitsperbyte.golf.codecs import CODECS
from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.ledger import CAP_BYTES
from bitsperbyte.golf.model import parameter_counts
from bitsperbyte.golf.quantize import SCHEMES, payload_bytes
from bitsperbyte.metric.windows import WindowPlan, non_overlapping, sliding
from bitsperbyte.randopt import noise
from bitsperbyte.randopt.config import RandOptConfig
from bitsperbyte.randopt.tasks.registry import TASKS
from bitsperbyte.run import outcome
from bitsperbyte.run.config import load_config

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "src" / "bitsperbyte"
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
README = (REPO / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
METRIC = (REPO / "docs" / "metric.md").read_text(encoding="utf-8")
GOLF = (REPO / "docs" / "golf.md").read_text(encoding="utf-8")
RANDOPT = (REPO / "docs" / "randopt.md").read_text(encoding="utf-8")
NAMED_FILE = re.compile(
    r"(?<![\w/.<>-])(?:src|docs|tests|configs|bench|cli|golf|metric|records|run|stats|text)/[\w/]+\.(?:py|md|yaml)\b"
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODELS = {"golf": GolfConfig, "randopt": RandOptConfig}
# of the machines this was written on; the project's text must hold everywhere
FORBIDDEN = ("../shared", "/work/", "/root/", "/tmp/")


def page_id(path: Path) -> str:
    return path.relative_to(REPO).as_posix()


def blocks(text: str, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(text) if found == language]


# -- the tree ---------------------------------------------------------------------------------------------------------


def tree_paths(tree: str) -> list[str]:
    """Paths of a tree drawn by indentation: two spaces a level, a name that ends in / is a folder."""
    paths, parents = [], []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        assert depth <= len(parents), f"no folder above {name!r}"
        parents = parents[:depth]
        paths.append("".join(parents) + name)
        if name.endswith("/"):
            parents.append(name)
    return paths


def test_tree_paths_of_a_small_tree() -> None:
    assert tree_paths("a/   x\n  b/\n    c.py  y\n  d.py\ne.md") == ["a/", "a/b/", "a/b/c.py", "a/d.py", "e.md"]


def test_the_tree_is_the_disk() -> None:
    [tree] = blocks(ARCHITECTURE, "tree")
    named = tree_paths(tree)
    assert len(named) == len(set(named)), "a path stands twice in the tree"
    gone = [p for p in named if not ((REPO / p).is_dir() if p.endswith("/") else (REPO / p).is_file())]
    assert not gone, f"docs/architecture.md names what is not on the disk: {gone}"
    on_disk = [*PACKAGE.rglob("*.py"), *(REPO / "docs").glob("*.md"), *(REPO / "bench").glob("*.py")]
    expected = {p.relative_to(REPO).as_posix() for p in on_disk if p.name != "__init__.py"}
    missing = sorted(expected - set(named))
    assert not missing, f"docs/architecture.md does not name {missing}"


def test_invariants_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", ARCHITECTURE)
    assert len(named) > 15
    for file, function in named:
        assert re.search(rf"^def {function}\(", (REPO / file).read_text(encoding="utf-8"), re.MULTILINE), (file, function)


# -- commands ---------------------------------------------------------------------------------------------------------


def command_lines(text: str) -> list[list[str]]:
    """Words of every line in a sh block, comments left out."""
    joined = [body.replace("\\\n", " ") for body in blocks(text, "sh")]
    lines = [shlex.split(line, comments=True) for body in joined for line in body.splitlines()]
    return [words for words in lines if words]


def arguments_of(words: list[str]) -> list[str] | None:
    """What follows `bpb` or `torchrun ... -m bitsperbyte`; None for a line that starts something else."""
    if words[0] == "bpb":
        return words[1:]
    if words[0] == "torchrun" and "bitsperbyte" in words:
        return words[words.index("bitsperbyte") + 1 :]
    return None


def subcommand(arguments: list[str]) -> tuple[Any, list[str]]:
    """The click command that `arguments` reach, and what is left for it; AssertionError for an unknown name."""
    command, rest = typer.main.get_command(app), list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"there is no command {rest[0]!r} in {arguments}"
        command = command.commands[rest.pop(0)]
    return command, rest


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


def documented() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for words in command_lines(page.read_text(encoding="utf-8")):
            if (arguments := arguments_of(words)) is not None:
                yield page_id(page), arguments


@pytest.mark.parametrize(
    ("page", "arguments"), list(documented()), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_documented_commands_parse(page: str, arguments: list[str]) -> None:
    command, rest = subcommand(arguments)
    if hasattr(command, "commands"):
        assert set(rest) <= options_of(command), f"{page}: {arguments}"
        return
    context = command.make_context(command.name, rest)  # parses every value; runs nothing
    config = context.params.get("config")
    if config is not None:  # the file exists and takes the overrides
        load_config(REPO / config, MODELS[arguments[0]], context.params["set_"] or [])


def test_a_wrong_command_would_be_seen() -> None:
    for line in ("golf trian", "golf train", "golf train c.yaml --run-dir r --sedes 1", "golf sample r --num-tokens many"):
        with pytest.raises((AssertionError, COMMAND_LINE_ERROR)):
            command, rest = subcommand(line.split())
            command.make_context(command.name, rest)


def test_options_in_running_text_exist() -> None:
    known = set()
    for _, arguments in documented():
        known |= options_of(subcommand(arguments)[0])
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        for code in re.findall(r"`([^`\n]+)`", prose):
            words = code.split()
            if words[0] == "bpb" and len(words) > 1:
                subcommand([word for word in words[1:] if word != "..."])
            unknown = {word for word in words if re.fullmatch(r"--[a-z-]+", word)} - known
            assert not unknown, f"{page_id(page)}: {code}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = {words[1] for words in command_lines(text) if words[0] == "make"} | set(re.findall(r"`make (\w+)`", text))
        assert named <= targets, f"{page_id(page)}: {named - targets}"


def test_every_command_is_in_the_readme() -> None:
    reached = {" ".join(arguments[:n]) for page, arguments in documented() if page == "README.md" for n in (1, 2)}
    names = set()
    for name, member in typer.main.get_command(app).commands.items():
        names |= {f"{name} {command}" for command in member.commands} if hasattr(member, "commands") else {name}
    assert names <= reached, names - reached


# -- links, paths, words ----------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """The anchor of a Markdown heading, as GitHub forms it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?://", target):
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page_id(page)} links to {target}, which is not there"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{page_id(page)} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_files_named_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in set(NAMED_FILE.findall(text)):
        assert (REPO / path).is_file() or (PACKAGE / path).is_file(), f"{page_id(page)} names {path}"


def test_forbidden_words_are_absent() -> None:
    files = [*PAGES, REPO / "Makefile", *PACKAGE.rglob("*.py"), *(REPO / "configs").rglob("*.yaml"), *(REPO / "bench").glob("*.py")]
    found = [(page_id(path), word) for path in files for word in FORBIDDEN if word in path.read_text(encoding="utf-8")]
    assert not found


# -- figures ----------------------------------------------------------------------------------------------------------


def table_rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_readme_is_short_and_starts_with_the_metric() -> None:
    assert README.count("\n") < 200
    section = README.partition("## Read these five files first\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\d\. \[([^\]]+)\]\(([^)]+)\)", section, re.MULTILINE)
    assert len(files) == 5 and all(shown == target for shown, target in files)
    assert files[0][0] == "src/bitsperbyte/metric/bpb.py" and "bits per byte" in section.splitlines()[1]


def test_exit_codes_are_those_of_the_code() -> None:
    stated = {int(row[0]) for row in table_rows(README) if row[0].isdigit()}
    assert stated == {value for name, value in vars(outcome).items() if name.startswith("EXIT_")}


def test_configs_are_listed_with_their_sizes() -> None:
    stated = {row[0].strip("`"): row[2:] for row in table_rows(GOLF) if row[0].startswith("`configs/")}
    assert set(stated) == {p.relative_to(REPO).as_posix() for p in (REPO / "configs" / "golf").glob("*.yaml")}
    for path, figures in stated.items():
        model = load_config(REPO / path, GolfConfig).model_dataclass()
        assert figures == [f"{parameter_counts(model)['total']:,}", f"{payload_bytes(model, 'reference_int8'):,}"], path


def test_schemes_codecs_and_the_cap_are_named() -> None:
    for name in (*SCHEMES, *CODECS):
        assert f"`{name}`" in GOLF, name
    assert f"{CAP_BYTES:,}" in README and f"{CAP_BYTES:,}" in GOLF


def test_the_layout_table_is_the_one_beside_the_code() -> None:
    source = (PACKAGE / "golf" / "codecs.py").read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    figures = {row[0]: row[1:] for row in table_rows(GOLF)}
    for layout in ("one byte", "split 4+2", "4 in 3 bytes", "bit planes"):
        [line] = re.findall(rf"^ +{re.escape(layout)} +([\d. ]+)$", source, re.MULTILINE)
        assert figures[layout] == line.split(), layout


@pytest.mark.parametrize(("title", "plan"), [("non-overlapping", non_overlapping(10, 4)), ("sliding by 2", sliding(10, 4, 2))])
def test_the_worked_windows_are_what_the_code_plans(title: str, plan: WindowPlan) -> None:
    section = METRIC.partition(f"| {title}: feeds | scores |\n")[2].partition("\n\n")[0]
    stated = [row for row in table_rows(section) if ".." in row[0]]
    assert stated == [[f"{w.start}..{w.end - 1}", f"{w.first}..{w.end}"] for w in plan]


def test_randopt_configs_are_listed_with_what_they_hold() -> None:
    stated = {row[0].strip("`"): row[1:] for row in table_rows(RANDOPT) if row[0].startswith("`configs/")}
    assert set(stated) == {p.relative_to(REPO).as_posix() for p in (REPO / "configs" / "randopt").glob("*.yaml")}
    for path, row in stated.items():
        c = load_config(REPO / path, RandOptConfig)
        model = c.model.path.rpartition("/")[2] if c.model.path else "made by a golf run"
        secondary = f" ({', '.join(map(str, c.search.secondary_k))})" if c.search.secondary_k else ""
        gpu = f"{c.hardware.num_gpus} x {c.hardware.gpu}" if c.hardware.num_gpus > 1 else c.hardware.gpu or ""
        assert row == [model, f"{c.task.name} {c.task.num_train} / {c.task.num_test}",
                       f"{c.search.population}: {', '.join(map(str, c.noise.sigmas))}", f"{c.search.top_k}{secondary}", gpu], path


def test_tasks_and_schemes_of_randopt_are_named() -> None:
    named = {row[0].strip("`") for row in table_rows(RANDOPT)}
    assert {*TASKS, *noise.SCHEMES} <= named


def test_known_answers_of_the_noise_are_those_of_the_code() -> None:
    answers = {row[0]: row[1] for row in table_rows(RANDOPT) if len(row) == 2}
    name = "model.layers.0.self_attn.q_proj.weight"
    identity, words = noise.tensor_id(name), lambda counter, key: noise.philox(np.array([counter], np.uint32), key)[0]
    found = {
        "Philox of counter 0 0 0 0, key 0 0": " ".join(f"{w:08x}" for w in words([0] * 4, 0)),
        "Philox of counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0": " ".join(
            f"{w:08x}" for w in words([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822)),
        f"tensor id of `{name}`": f"{identity:016x}",
        "its block 0 under seed 12345": " ".join(f"{w:08x}" for w in words([0, 0, identity & 0xFFFFFFFF, identity >> 32], 12345)),
        "its first eight signs (`rademacher`)": " ".join("+" if z > 0 else "-" for z in noise.noise(name, 12345, 0, 8)),
        "its first four z (`binomial`)": " ".join(str(z) for z in noise.noise(name, 12345, 0, 4, "binomial")),
        "bfloat16 0.02 (3ca4) as its first four weights, sigma 0.001": " ".join(f"{bits & 0xFFFF:04x}" for bits in noise.perturbed_reference(
            torch.full((4,), 0.02, dtype=torch.bfloat16), name, 12345, 1e-3).view(torch.int16).tolist()),
        "float32 1.0 as its weights 4 to 7, sigma 0.001": " ".join(f"{bits:08x}" for bits in noise.perturbed_reference(
            torch.ones(4), name, 12345, 1e-3, offset=4).view(torch.int32).tolist()),
    }
    assert {what: answers.get(what) for what in found} == found


def test_the_example_questions_are_a_config_away() -> None:
    from bitsperbyte.randopt.tasks.registry import open_task

    [text] = blocks(RANDOPT, "yaml")
    section = RandOptConfig.model_validate(yaml.safe_load(text.replace("1e-3, 2e-3", "0.001, 0.002"))).task
    train, test = open_task(section.model_copy(update={"data": str(REPO / section.data)})).items()
    assert (len(train), len(test)) == (section.num_train, section.num_test)
