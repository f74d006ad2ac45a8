"""Reports of real tiny runs: every number is read again from its file by other code, and a browser shows the page as it should be."""

import html.parser
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.golf.config import GolfConfig
from bitsperbyte.golf.session import train
from bitsperbyte.records.report.page import make_report, read_runs, write_report
from bitsperbyte.records.schema import Record
from bitsperbyte.records.store import write_record
from bitsperbyte.text.prepare import prepare

TEXTS = [f"Übung {n} – {n * n} naïve cafés, and {n % 7} more." for n in range(80)]
SVG_NUMBERS = re.compile(r"<svg.*?</svg>", re.DOTALL)


@pytest.fixture(scope="module")
def golf_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of twelve steps under two seeds; the first had its last steps trained twice, as after a kill."""
    home = tmp_path_factory.mktemp("report")
    (home / "source.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare(str(home / "source.jsonl"), "byte", home / "data", val_docs=10)
    runs = []
    for seed in (1, 2):
        config = GolfConfig.model_validate({
            "name": f"tiny{seed}", "data": {"path": str(home / "data")},
            "model": {"vocab_size": 260, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "order": [0], "skips": []},
            "schedule": {"wallclock_s": None, "max_steps": 12, "warmdown": {"steps": 4}, "warmup_steps": 0},
            "train": {"batch_tokens": 64, "seq_len": 16, "micro_batch_tokens": 64, "device": "cpu", "seed": seed},
            "eval": {"every_steps": 4, "max_tokens": 300}})
        train(config, home / f"run{seed}")
        runs.append(home / f"run{seed}")
    return runs


@pytest.fixture
def randopt_run(tmp_path: Path, answers_part: dict[str, Any]) -> Path:
    """A record whose figures agree, and a journal of its eight seeds and of the test set."""
    folder = tmp_path / "randopt"
    folder.mkdir()
    record = Record.model_validate({"track": "randopt", "name": "votes", "status": "finished", "created_utc": "2026-01-31T12:00:00+00:00",
                                    "seed": 42, "randopt": answers_part})
    write_record(folder / "record.json", record)
    rows: list[dict[str, Any]] = [{"phase": "base_train", "index": -1, "seed": 0, "sigma": 0.0, "reward": 0.5, "seconds": 0.5}]
    rewards = [0.6, 0.3, 0.4, 0.7, 0.35, 0.45, 0.5, 0.55]
    rows += [{"phase": "search", "index": i, "seed": 10 + i, "sigma": 1e-3 * (1 + i % 2), "reward": reward, "seconds": 0.5 + i / 8}
             for i, reward in enumerate(rewards)]
    rows += [{"phase": "test", "index": i, "seed": 10 + i, "sigma": 1e-3 * (1 + i % 2), "reward": 0.3, "seconds": 0.5} for i in (3, 0)]
    (folder / "journal.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# -- numbers, read again ----------------------------------------------------------------------------------------------


@dataclass
class Element:
    attributes: dict[str, str | None]
    text: list[str] = field(default_factory=list)


class Page(html.parser.HTMLParser):
    """Elements with a source, and the text that has neither a source nor another excuse."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sourced: list[Element] = []
        self.bare: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, Element | None]] = []
        self.feed(SVG_NUMBERS.sub("", text))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in ("meta", "link", "br"):
            return
        element = Element(found) if {"data-source", "data-constant", "data-about"} & found.keys() or tag in ("style", "title") else None
        if element and "data-source" in found:
            self.sourced.append(element)
        self._open.append((tag, element))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = [element for _, element in self._open if element]
        for element in inside:
            element.text.append(data)
        if not inside:
            self.bare.append(data)


def evaluate(source: str, folders: list[Path]) -> Any:
    """A source's value, by code that shares nothing with the report's."""
    call = re.fullmatch(r"(sub|sum|max|min|num|only)\((.*)\)", source, re.DOTALL)
    if call:
        parts, depth, begin = [], 0, 0
        for place, character in enumerate(call[2]):
            depth += (character == "(") - (character == ")")
            if character == "," and depth == 0:
                parts.append(call[2][begin:place])
                begin = place + 1
        values = [evaluate(part.strip(), folders) for part in (*parts, call[2][begin:])]
        if call[1] == "sub":
            return values[0] - values[1]
        if call[1] == "only":
            return sum(1 for a, b in zip(*values, strict=True) if (a, b) == ("1", "0"))
        of = [v for v in (values[0] if isinstance(values[0], list) else [values[0]]) if v is not None]
        return {"sum": sum, "max": max, "min": min, "num": len}[call[1]](of)
    number, file, place = re.fullmatch(r"(\d+):([a-z]+\.jsonl?)#(.*)", source, re.DOTALL).groups()
    content = (folders[int(number)] / file).read_text(encoding="utf-8")
    if file == "record.json":
        return walk(json.loads(content), [part.replace("~1", "/").replace("~0", "~") for part in place.split("/")[1:]])
    rows = [json.loads(line) for line in content.splitlines()]
    where, key = place.split("/")
    if where.startswith("phase="):
        return [row.get(key) for row in rows if row.get("phase") == where[6:]]
    return rows[int(where[1:]) - 1][key]


def walk(node: Any, path: list[str]) -> Any:
    if not path:
        return node
    first, *rest = path
    if isinstance(node, dict):
        return walk(node[first], rest) if first in node else None
    if first == "*" or "|" in first:
        return [walk(node[i], rest) for i in (range(len(node)) if first == "*" else map(int, first.split("|")))]
    return walk(node[int(first)], rest)


def assert_shown(element: Element, folders: list[Path]) -> None:
    value, shown = evaluate(element.attributes["data-source"], folders), "".join(element.text)
    where = (element.attributes, shown, value)
    if isinstance(value, str):
        whole = " ".join("".join(c if c.isprintable() else " " for c in value).split())
        assert shown == whole or (element.attributes.get("title") == whole and whole.startswith(shown)), where
        return
    assert isinstance(value, int | float) and not isinstance(value, bool), where
    plain = shown.replace("\N{MINUS SIGN}", "-").replace(",", "").replace("+", "")
    scale = float(element.attributes.get("data-scale") or 1) * (100 if plain.endswith("%") else 1)
    plain = plain.rstrip("%")
    mantissa, _, exponent = plain.partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    assert abs(float(plain) - value * scale) <= 0.5000001 * 10.0 ** -digits, where


def assert_true_to_files(page: Path, folders: list[Path]) -> Page:
    """Every number of the page stands in its file, and none stands there without saying so."""
    made = Page(page.read_text(encoding="utf-8"))
    for element in made.sourced:
        assert_shown(element, folders)
    stray = [text for text in made.bare if re.search(r"\d", text) and not re.fullmatch(r"[^\d]*(95%|K = |PNG)?[^\d]*", text)]
    assert not stray, f"numbers without a source: {stray}"
    return made


def test_every_number_of_golf_runs_stands_in_its_file(golf_runs: list[Path], tmp_path: Path) -> None:
    page, figures = write_report(golf_runs, tmp_path / "both.html")
    made = assert_true_to_files(page, golf_runs)
    assert len(made.sourced) > 60
    sources = {e.attributes["data-source"] for e in made.sourced}
    assert any("metrics.jsonl#L" in source for source in sources), "the course of the runs"
    names = {path.stem for path in figures.iterdir()}
    assert len(names) >= 6, names
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5_000 for path in figures.iterdir())


def test_every_number_of_one_golf_run_stands_in_its_file(golf_runs: list[Path]) -> None:
    page, _ = write_report(golf_runs[:1])
    assert page == golf_runs[0] / "report.html"
    assert_true_to_files(page, golf_runs)


def test_every_number_of_a_randopt_run_stands_in_its_file(randopt_run: Path, tmp_path: Path) -> None:
    page, figures = write_report([randopt_run], tmp_path / "r.html")
    made = assert_true_to_files(page, [randopt_run])
    assert len(made.sourced) > 60 and list(figures.iterdir())


@pytest.mark.parametrize("track", ["golf", "randopt"])
def test_published_records_have_true_reports(repo_dir: Path, tmp_path: Path, track: str) -> None:
    """Those of this repository, one by one and side by side."""
    folders = sorted(p.parent for p in (repo_dir / "records" / track).glob("*/record.json"))
    assert folders
    for number, chosen in enumerate([*[[folder] for folder in folders], folders]):
        assert_true_to_files(write_report(chosen, tmp_path / f"{number}.html")[0], chosen)


def test_mixed_tracks_stand_on_one_page(golf_runs: list[Path], randopt_run: Path, tmp_path: Path) -> None:
    folders = [randopt_run, *golf_runs]
    assert_true_to_files(write_report(folders, tmp_path / "mixed.html")[0], folders)


# -- what a page must not do ------------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m\n</style></svg>"\' & \u202e'


def hostile(node: Any) -> Any:
    """The same JSON with something to run in every text that a schema leaves free."""
    if isinstance(node, dict):
        return {key: HOSTILE if key in FREE and isinstance(value, str) else hostile(value) for key, value in node.items()}
    return [hostile(value) for value in node] if isinstance(node, list) else node


FREE = ("name", "notes", "text", "model", "error", "device", "cpu_model", "commit", "slice", "why", "codec", "scheme")


@pytest.mark.parametrize("track", ["golf", "randopt"])
def test_texts_of_a_run_stay_texts(golf_runs: list[Path], randopt_run: Path, tmp_path: Path, track: str) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(golf_runs[0] if track == "golf" else randopt_run, folder)
    record = json.loads((folder / "record.json").read_text())
    changed = 0
    for key in FREE:  # one at a time, and only those that the schema lets be any text
        made = hostile({**record}) if key == "all" else {**record, key: HOSTILE} if key in record else record
        try:
            Record.model_validate(made)
        except ValueError:
            continue
        changed += made is not record
        record = made
    record["error"], record["notes"] = HOSTILE, HOSTILE
    (folder / "record.json").write_text(json.dumps(record))
    page, _ = write_report([folder], tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    made = Page(text)
    assert changed and HOSTILE not in text and "<script" not in text and "\x1b" not in text
    assert "&lt;script&gt;alert(1)" in text, "it is shown as what it is"
    assert not [tag for tag, _ in made.tags if tag in ("script", "img", "iframe", "object", "a")]
    assert not [name for _, attributes in made.tags for name in attributes if name.startswith("on")]


def test_a_page_loads_nothing(golf_runs: list[Path], randopt_run: Path, tmp_path: Path) -> None:
    text = write_report([*golf_runs, randopt_run], tmp_path / "page.html")[0].read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    loads = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)\)|@import""", text)
    assert all((a or b).startswith(("data:", "#")) for a, b in loads), loads


# -- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["running", "interrupted", "crashed", "diverged", "over_cap"])
@pytest.mark.parametrize("rows", ["whole", "torn", "none", "broken"])
def test_unfinished_runs_show_what_there_is(golf_runs: list[Path], tmp_path: Path, status: str, rows: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(golf_runs[0], folder)
    record = json.loads((folder / "record.json").read_text())
    record["status"] = status
    for part in ("artifact", "scores"):
        record[part] = None if part == "artifact" else []
    if status in ("running", "crashed", "interrupted"):
        record["training"] = None
    try:
        Record.model_validate(record)
    except ValueError:
        record = json.loads((golf_runs[0] / "record.json").read_text()) | {"status": status}
    (folder / "record.json").write_text(json.dumps(record))
    metrics = folder / "metrics.jsonl"
    content = metrics.read_text()
    {"whole": lambda: None, "torn": lambda: metrics.write_text(content + '{"step": 13, "lo'), "none": metrics.unlink,
     "broken": lambda: metrics.write_text("not JSON\n" + content)}[rows]()
    page, _ = write_report([folder, golf_runs[1]], tmp_path / "page.html")
    if rows in ("whole", "none"):
        assert_true_to_files(page, [folder, golf_runs[1]])
    text = page.read_text(encoding="utf-8")
    said = {"torn": "was cut short", "none": "There is no metrics.jsonl", "broken": "cannot be read"}
    assert rows == "whole" or said[rows] in text


def test_a_gap_is_shown_at_equal_evaluation_only(golf_runs: list[Path], tmp_path: Path) -> None:
    """A gap is a `sub` of the two runs' bpb; under another stride there is none and the page says why."""
    def gaps(folders: list[Path]) -> list[str]:
        page = Page(make_report(read_runs(folders)).html)
        subs = [e.attributes["data-source"] for e in page.sourced if e.attributes["data-source"].startswith("sub(")]
        return [s for s in subs if "/scores/" in s and s.endswith("bpb)")]

    assert gaps(golf_runs), "equal: the gap to the first run stands there"
    folder = tmp_path / "other"
    shutil.copytree(golf_runs[1], folder)
    record = json.loads((folder / "record.json").read_text())
    for score in record["scores"]:
        score["stride"] = 4
    (folder / "record.json").write_text(json.dumps(record))
    assert not gaps([golf_runs[0], folder])


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_reported_is_refused(golf_runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder.html").mkdir()
    for arguments, words in (([], "needs a run"), ([tmp_path / "empty"], "empty"), ([tmp_path / "none"], "none"),
                             ([golf_runs[0], golf_runs[0]], "named twice"), ([tmp_path] * 30, "too many")):
        with pytest.raises(ValueError, match=words):
            write_report(arguments, tmp_path / "page.html")
    for out, words in ((tmp_path / "folder.html", "is a folder"), (tmp_path / "page.txt", "must end in .html"),
                       (tmp_path / "no" / "page.html", "make it first")):
        with pytest.raises(ValueError, match=words):
            write_report(golf_runs[:1], out)
    assert not (tmp_path / "page.html").exists()


def test_figures_of_an_earlier_report_go(golf_runs: list[Path], tmp_path: Path) -> None:
    _, figures = write_report(golf_runs[:1], tmp_path / "page.html")
    (figures / "old.png").write_bytes(b"x")
    (figures / "notes.txt").write_text("kept")
    write_report(golf_runs[:1], tmp_path / "page.html")
    assert not (figures / "old.png").exists() and (figures / "notes.txt").exists()


# -- in a browser -----------------------------------------------------------------------------------------------------

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]
OVERFLOWING = """() => [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll') && !e.closest('svg')
    && e.getClientRects().length && (e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5))
    .map(e => e.tagName + ' ' + e.textContent.slice(0, 60))"""
CLIPPED = """() => [...document.querySelectorAll('svg text')].filter(e => e.getClientRects().length).filter(e => {
    const t = e.getBoundingClientRect(), s = e.closest('svg').getBoundingClientRect();
    return t.left < s.left - 1 || t.right > s.right + 1 || t.top < s.top - 1 || t.bottom > s.bottom + 1; })
    .map(e => e.textContent)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("BPB_REQUIRE_BROWSER"):
            pytest.fail("BPB_REQUIRE_BROWSER is set and there is no Chromium on the path: install it (apt-get install chromium)")
        pytest.skip("no Chromium on the path: install it (apt-get install chromium) to have pages looked at")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_the_page_without_errors_or_overflow(browser: Any, golf_runs: list[Path], randopt_run: Path, repo_dir: Path,
                                                             tmp_path: Path, width: int) -> None:
    published = sorted(p.parent for p in (repo_dir / "records").glob("*/*/record.json"))
    pages = [write_report(folders, tmp_path / f"{number}.html")[0]
             for number, folders in enumerate([golf_runs[:1], golf_runs, [randopt_run], published])]
    for page in pages:
        tab = browser.new_page(viewport={"width": width, "height": 900})
        errors: list[str] = []
        tab.on("console", lambda message, errors=errors: errors.append(message.text))
        tab.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
        tab.on("request", lambda request, errors=errors: errors.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
        tab.goto(page.as_uri())
        assert not errors, errors
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert not tab.evaluate(OVERFLOWING) and not tab.evaluate(CLIPPED)
        assert tab.evaluate("[...document.querySelectorAll('figure')].every(f => [...f.querySelectorAll('svg')].filter("
                            "s => s.getBoundingClientRect().height > 80).length === 1)"), "one drawing of each figure, wide or narrow"
        if folder := os.environ.get("BPB_SCREENSHOTS"):
            tab.screenshot(path=f"{folder}/{page.stem}_{width}.png", full_page=True)
        tab.close()


def test_a_report_takes_seconds(golf_runs: list[Path], tmp_path: Path) -> None:
    begin = time.perf_counter()
    write_report(golf_runs, tmp_path / "page.html")
    assert time.perf_counter() - begin < 60 and not math.isnan(begin)
