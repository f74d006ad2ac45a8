"""Reports of real tiny runs: every number is read again from its file by other code, and a browser shows the page as it should be."""

import html.parser
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bitsperbyte.records.report.drawing import Plot
from bitsperbyte.records.report.page import make_report, read_runs, write_report
from bitsperbyte.records.schema import Record


@pytest.fixture(scope="module")
def pages(golf_runs: list[Path], randopt_runs: dict[str, Path], repo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One run, several, all kinds of votes, the repository's records, and runs of long names."""
    home = tmp_path_factory.mktemp("pages")
    for number in range(3):
        folder = Path(shutil.copytree(golf_runs[number % 2], home / ("a_folder_of_a_long_name_" * 6 + str(number))))
        record = json.loads((folder / "record.json").read_text()) | {"name": "a_name_without_a_break_" * 5, "notes": "without_a_break" * 20}
        (folder / "record.json").write_text(json.dumps(record))
    chosen = [golf_runs[:1], list(randopt_runs.values()), sorted(p.parent for p in (repo_dir / "records").glob("*/*/record.json")),
              sorted(home.glob("a_folder*"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plot, "png", lambda self: b"\x89PNG")  # not looked at here
        return [write_report(folders, home / f"{number}.html")[0] for number, folders in enumerate(chosen)]


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
        self.drawn: list[Element] = []  # the same inside figures
        self.bare: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[tuple[str, Element | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in ("meta", "link", "br"):
            return
        is_drawn = any(opened == "svg" for opened, _ in self._open)
        element = Element(found) if {"data-source", "data-constant", "data-about"} & found.keys() or tag in ("style", "title") else None
        if element and "data-source" in found:
            (self.drawn if is_drawn else self.sourced).append(element)
        self._open.append((tag, element))

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = [element for _, element in self._open if element]
        for element in inside:
            element.text.append(data)
        if not inside and not any(opened == "svg" for opened, _ in self._open):  # the ticks of an axis have no source
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


def assert_drawn(element: Element, folders: list[Path]) -> None:
    """A figure's text is its value behind a word, such as `A name` or `sigma 0.001`."""
    value, shown = evaluate(element.attributes["data-source"], folders), "".join(element.text).split()
    if isinstance(value, str):
        said, whole = " ".join(shown[1:]), " ".join("".join(c if c.isprintable() else " " for c in value).split())
        begin, _, end = said.partition("…")
        assert whole == said or (whole.startswith(begin) and whole.endswith(end) and "…" in said), (value, shown)
    else:
        assert float(shown[-1]) == value, (value, shown)


def assert_true_to_files(page: Path, folders: list[Path]) -> Page:
    """Every number of the page stands in its file, and none stands there without saying so."""
    made = Page(page.read_text(encoding="utf-8"))
    for element in made.sourced:
        assert_shown(element, folders)
    for element in made.drawn:
        assert_drawn(element, folders)
    stray = [text for text in made.bare if re.search(r"\d", text) and not re.fullmatch(r"[^\d]*(95%|K = |PNG)?[^\d]*", text)]
    assert not stray, f"numbers without a source: {stray}"
    return made


def test_every_number_of_golf_runs_stands_in_its_file(golf_runs: list[Path], tmp_path: Path) -> None:
    page, figures = write_report(golf_runs, tmp_path / "both.html")
    made = assert_true_to_files(page, golf_runs)
    assert len(made.sourced) > 60 and len(made.drawn) > 10
    sources = {e.attributes["data-source"] for e in made.sourced}
    assert any("metrics.jsonl#L" in source for source in sources), "the course of the runs"
    assert {path.stem for path in figures.iterdir()} == {"loss", "bpb", "gap", "pace", "ledger", "positions"}
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5_000 for path in figures.iterdir())


def test_every_number_of_a_randopt_run_stands_in_its_file(randopt_runs: dict[str, Path], tmp_path: Path) -> None:
    page, figures = write_report([randopt_runs["answers"]], tmp_path / "r.html")
    made = assert_true_to_files(page, [randopt_runs["answers"]])
    assert len(made.sourced) > 100 and len(made.drawn) == 4, "two sigmas in two drawings"
    assert {path.stem for path in figures.iterdir()} == {"ensemble0", "rewards0", "transfer0", "progress0"}


@pytest.mark.usefixtures("quick")
def test_every_number_of_other_runs_stands_in_its_file(golf_runs: list[Path], randopt_runs: dict[str, Path], tmp_path: Path) -> None:
    one = golf_runs[:1]
    page, _ = write_report(one)
    assert page == one[0] / "report.html"
    assert_true_to_files(page, one)
    for number, folders in enumerate(([randopt_runs["documents"]], list(randopt_runs.values()), [randopt_runs["interrupted"], *golf_runs])):
        assert_true_to_files(write_report(folders, tmp_path / f"{number}.html")[0], folders)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("track", ["golf", "randopt"])
def test_published_records_have_true_reports(repo_dir: Path, tmp_path: Path, track: str) -> None:
    """Those of this repository, one by one and side by side."""
    folders = sorted(p.parent for p in (repo_dir / "records" / track).glob("*/record.json"))
    assert folders
    for number, chosen in enumerate([*[[folder] for folder in folders], folders]):
        assert_true_to_files(write_report(chosen, tmp_path / f"{number}.html")[0], chosen)


@pytest.mark.usefixtures("quick")
def test_the_worked_readings_quote_their_reports(repo_dir: Path) -> None:
    """Every decimal, count of thousands and interval of a reading in docs/reports.md stands in the report that it reads."""
    pages = (repo_dir / "docs" / "reports.md").read_text(encoding="utf-8").partition("## Reading a golf report")[2].partition("## Where a number")[0]
    readings = re.split(r"^`bpb report ", pages, flags=re.MULTILINE)[1:]
    assert len(readings) == 3
    for reading in readings:
        command, _, said = reading.partition("`")
        page = Page(make_report(read_runs([repo_dir / name for name in command.split()])).html)
        shown = {"".join(element.text).replace("\N{MINUS SIGN}", "-") for element in page.sourced}
        shown |= {word.strip("()") for text in shown for word in text.split()}
        numbers = re.findall(r"[+-]?\d[\d,]*\.\d+%?|\d{1,3}(?:,\d{3})+|\d+%", re.sub(r"\]\([^)]*\)", "", said))
        assert len(numbers) > 8
        assert not [number for number in numbers if number not in shown], command


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("change", ["value", "scale", "bare"])
def test_a_false_number_would_be_seen(golf_runs: list[Path], tmp_path: Path, change: str) -> None:
    page, _ = write_report(golf_runs, tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    made = {"value": re.sub(r"(/scores/0/bpb\">\d\.\d\d\d)(\d)", lambda m: m[1] + str((int(m[2]) + 5) % 10), text, count=1),
            "scale": text.replace('/training/num_steps"', '/training/num_steps" data-scale="100"', 1),
            "bare": text.replace("<h2>Golf</h2>", "<h2>Golf</h2><p>1.2345 bits per byte</p>")}[change]
    assert made != text
    page.write_text(made, encoding="utf-8")
    with pytest.raises(AssertionError):
        assert_true_to_files(page, golf_runs)


# -- what a page must not do ------------------------------------------------------------------------------------------

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\x1b[31m\n</style></svg>"\' & \u202e'


SPARED = {"created_utc", "track", "status", "documents", "a", "b", "correct"}  # texts that the schema, or the report's logic, reads


def hostile(node: Any, key: str = "") -> Any:
    """The same JSON with something to run in every text that is left free."""
    if isinstance(node, dict):
        return {name: value if name in SPARED else hostile(value, name) for name, value in node.items()}
    if isinstance(node, list):
        return [hostile(value, key) for value in node]
    return HOSTILE if isinstance(node, str) else node


@pytest.mark.parametrize("track", ["golf", "randopt"])
def test_texts_of_a_run_stay_texts(golf_runs: list[Path], randopt_runs: dict[str, Path], tmp_path: Path, track: str) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(golf_runs[0] if track == "golf" else randopt_runs["answers"], folder)
    record = hostile(json.loads((folder / "record.json").read_text())) | {"error": HOSTILE, "notes": HOSTILE}
    assert json.dumps(record).count("onerror") > (20 if track == "golf" else 50)
    (folder / "record.json").write_text(json.dumps(record))
    page, _ = write_report([folder], tmp_path / "page.html")
    text = assert_true_to_files(page, [folder])
    html_text = page.read_text(encoding="utf-8")
    assert HOSTILE not in html_text and "<script" not in html_text and "\x1b" not in html_text and "\u202e" not in html_text
    assert html_text.count("&lt;script&gt;alert(1)") > 5, "it is shown as what it is"
    assert not [tag for tag, _ in text.tags if tag in ("script", "img", "iframe", "object", "a", "foreignobject", "image")]
    assert not [name for _, attributes in text.tags for name in attributes if name.startswith("on")]


def test_a_page_loads_nothing(pages: list[Path]) -> None:
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "default-src 'none'" in text
        loads = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)\)|@import""", text)
        assert all((a or b).startswith(("data:", "#")) for a, b in loads), loads


# -- what is missing --------------------------------------------------------------------------------------------------


STATUSES = ["running", "interrupted", "crashed", "diverged", "over_cap"]
ROWS = {"whole": None, "torn": "was cut short", "none": "There is no metrics.jsonl", "broken": "cannot be read"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("status", "rows"), [(status, rows) for place, status in enumerate(STATUSES) for rows in [*ROWS][place % 2::2]])
def test_unfinished_runs_show_what_there_is(golf_runs: list[Path], tmp_path: Path, status: str, rows: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(golf_runs[0], folder)
    record = json.loads((folder / "record.json").read_text()) | {"status": status}
    record |= {} if status == "over_cap" else {"artifact": None, "scores": []} if status == "diverged" else {
        "artifact": None, "scores": [], "training": {}}
    Record.model_validate(record)
    (folder / "record.json").write_text(json.dumps(record))
    metrics = folder / "metrics.jsonl"
    content = metrics.read_text()
    {"whole": lambda: None, "torn": lambda: metrics.write_text(content + '{"step": 13, "lo'), "none": metrics.unlink,
     "broken": lambda: metrics.write_text("not JSON\n" + content)}[rows]()
    for folders in ([folder], [folder, golf_runs[1]], [golf_runs[1], folder]):
        page, _ = write_report(folders, tmp_path / "page.html")
        if rows != "broken":
            metrics_cut = content if rows == "torn" else None
            if metrics_cut:  # the torn line is no JSON, and no source names it
                metrics.write_text(metrics_cut)
            assert_true_to_files(page, folders)
            if metrics_cut:
                metrics.write_text(content + '{"step": 13, "lo')
        text = page.read_text(encoding="utf-8")
        assert ROWS[rows] is None or ROWS[rows] in text
        assert "not recorded</span> s" not in text and "None" not in text and "nan" not in re.sub(r"<svg.*?</svg>", "", text).lower().split()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("rows", ["whole", "none", "broken"])
@pytest.mark.parametrize("name", ["answers", "documents", "interrupted"])
def test_votes_without_a_journal_or_a_result(randopt_runs: dict[str, Path], tmp_path: Path, name: str, rows: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(randopt_runs[name], folder)
    journal = folder / "journal.jsonl"
    {"whole": lambda: None, "none": journal.unlink, "broken": lambda: journal.write_text('{"phase": "search"}\n')}[rows]()
    page, _ = write_report([folder], tmp_path / "page.html")
    assert_true_to_files(page, [folder])
    text = page.read_text(encoding="utf-8")
    said = {"whole": "", "none": "There is no journal.jsonl", "broken": "lacks its phase, index, reward or seconds"}
    assert said[rows] in text and ("no result on the test set" in text) == (name == "interrupted")
    assert "not recorded</span> questions" not in text and "not recorded</span> s" not in text


@pytest.mark.usefixtures("quick")
def test_a_gap_is_shown_at_equal_evaluation_only(golf_runs: list[Path], tmp_path: Path) -> None:
    """A gap is a `sub` of the two runs' bpb, or a curve; under other windows or another text there is neither, and the page says why."""
    def gaps(folders: list[Path]) -> tuple[list[str], str]:
        text = make_report(read_runs(folders)).html
        subs = [e.attributes["data-source"] for e in Page(text).sourced if e.attributes["data-source"].startswith("sub(")]
        return [s for s in subs if "/scores/" in s and s.endswith("bpb)")], text

    found, text = gaps(golf_runs)
    assert len(found) == 2 and "unequal evaluations" not in text and "is not drawn" not in text
    folder = tmp_path / "other"
    shutil.copytree(golf_runs[1], folder)
    original = json.loads((folder / "record.json").read_text())
    for name, changed in (("stride", {"stride": 4}), ("split_sha256", {"split_sha256": "ab" * 32}), ("window", {"window": 8})):
        record = json.loads(json.dumps(original))
        for score in record["scores"]:
            score |= changed
        record["config"]["eval"]["window"] = 8 if name == "window" else record["config"]["eval"]["window"]
        record["data"]["val_sha256"] = "ab" * 32 if name == "split_sha256" else record["data"]["val_sha256"]
        (folder / "record.json").write_text(json.dumps(record))
        found, text = gaps([golf_runs[0], folder])
        assert not found and "unequal evaluations and do not compare" in text and "B has no gap to A" in text, name
        assert ("The gap to A is not drawn" in text) == (name != "stride"), "the curves of training have no stride"


@pytest.mark.usefixtures("quick")
def test_votes_on_other_questions_are_not_compared(randopt_runs: dict[str, Path], tmp_path: Path) -> None:
    def row(folders: list[Path]) -> str:
        return re.search(r"ensemble less that of A</th>(.*?)</tr>", make_report(read_runs(folders)).html)[1]

    answers, folder = randopt_runs["answers"], Path(shutil.copytree(randopt_runs["answers"], tmp_path / "other"))
    assert "sub(1:record.json#/randopt/ensemble/test/accuracy, 0:" in row([answers, folder])
    record = json.loads((folder / "record.json").read_text())
    record["randopt"]["task"]["test_sha256"] = "ab" * 32
    (folder / "record.json").write_text(json.dumps(record))
    assert "sub(" not in row([answers, folder]) and "not compared" in row([answers, folder])
    assert "no result" in row([answers, randopt_runs["interrupted"]])


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


@pytest.mark.usefixtures("quick")
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

SHOWN_ONCE = """() => [...document.querySelectorAll('figure')].every(f => [...f.querySelectorAll('svg')].filter(
    s => s.getBoundingClientRect().height > 80).length === 1)"""
# WCAG 2's contrast ratio of every text against the page, at least 4.5
CONTRAST = """() => {
    const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                         return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const paper = light(getComputedStyle(document.body).backgroundColor);
    return [...document.querySelectorAll('main *')].filter(e => e.getClientRects().length)
        .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
        .filter(e => { const style = getComputedStyle(e), ink = light(e.closest('svg') ? style.fill : style.color);
                       return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05) < 4.5; })
        .map(e => e.tagName + ' ' + e.textContent.slice(0, 40)); }"""


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


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")])
def test_a_browser_shows_the_page_without_errors_or_overflow(browser: Any, pages: list[Path], width: int, scheme: str) -> None:
    for page in pages:
        tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        tab.on("console", lambda message, said=said: said.append(message.text))
        tab.on("pageerror", lambda error, said=said: said.append(str(error)))
        tab.on("request", lambda request, said=said: said.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
        tab.goto(page.as_uri())
        assert not said, said
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert not tab.evaluate(OVERFLOWING) and not tab.evaluate(CLIPPED)
        assert tab.evaluate(SHOWN_ONCE), "one drawing of each figure, wide or narrow"
        assert tab.evaluate(CONTRAST) == [], "text that its background swallows"
        if folder := os.environ.get("BPB_SCREENSHOTS"):
            tab.screenshot(path=f"{folder}/{page.stem}_{width}_{scheme}.png", full_page=True)
        tab.close()


def test_a_page_that_is_too_wide_would_be_seen(browser: Any, pages: list[Path], tmp_path: Path) -> None:
    text = pages[0].read_text(encoding="utf-8")
    for changed, script in ((text.replace("<h2>", '<h2><span style="white-space:nowrap">' + "too wide " * 60 + "</span>", 1), OVERFLOWING),
                            (text.replace("<text ", '<text dx="-2000" ', 1), CLIPPED),
                            (text.replace("--ink: #1b1f24", "--ink: #f4f4f4"), CONTRAST)):
        assert changed and changed != text
        (tmp_path / "page.html").write_text(changed, encoding="utf-8")
        tab = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        tab.goto((tmp_path / "page.html").as_uri())
        assert tab.evaluate(script)
        tab.close()
