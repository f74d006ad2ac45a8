"""Figures by matplotlib: each drawn for a wide and a narrow page as inline SVG, whose colours follow the page's, and as a PNG.

The SVG is drawn in placeholder colours that become CSS variables, so that one picture serves light and dark pages. One unit of its
viewBox is one CSS pixel at the width it is made for; text stays text.
"""

import functools
import io
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bitsperbyte.records.report.markup import attribute, one_line
from bitsperbyte.records.report.sources import Value
from bitsperbyte.records.report.thin import Limits, thin

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS_PER_INCH = 72  # matplotlib writes SVG in points
PNG_DOTS_PER_INCH = 144
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = "osD^vP"
NUM_SERIES = 6
# Okabe and Ito's colours, told apart with every common colour blindness; darker where white paper needs it, lighter on black
LIGHT = {"ink": "#1b1f24", "soft": "#57606a", "rule": "#d8dee4", "paper": "#ffffff", "spare": "#c9d1d9",
         "s0": "#0072b2", "s1": "#d55e00", "s2": "#00805f", "s3": "#b0508a", "s4": "#8a6d00", "s5": "#2f95c9"}
DARK = {"ink": "#e6edf3", "soft": "#9aa7b4", "rule": "#30363d", "paper": "#0f1419", "spare": "#3d4651",
        "s0": "#56b4e9", "s1": "#f08a3c", "s2": "#2fc49a", "s3": "#dd94be", "s4": "#e0c341", "s5": "#8ab8d8"}
PLACEHOLDERS = {name: f"#fe01{place:02x}" for place, name in enumerate(LIGHT)}


@dataclass(frozen=True)
class Sheet:
    """What a figure is drawn on: its width in CSS pixels, and whether panels stand beside each other."""

    kind: str
    width: int
    is_wide: bool
    font: float
    colours: dict[str, str]


WIDE = Sheet("wide", 1080, True, 12.0, PLACEHOLDERS)
NARROW = Sheet("narrow", 366, False, 11.0, PLACEHOLDERS)
PNG = Sheet("png", 1080, True, 12.0, LIGHT)


@dataclass
class Canvas:
    """One drawing of a figure: colours by name, panels, and texts whose source is kept."""

    sheet: Sheet
    figure: "Figure"
    sources: list[str] = field(default_factory=list)

    def colour(self, name: str | int) -> str:
        """The colour of that name, or of series number `name`."""
        return self.sheet.colours[f"s{name % NUM_SERIES}" if isinstance(name, int) else name]

    def style(self, series: int, marked: bool = False) -> dict[str, Any]:
        """How the line of a series looks: told apart by dash and mark too, and beyond six by another pairing of colour and dash."""
        turn = series + series // NUM_SERIES
        return {"color": self.colour(series), "linestyle": DASHES[turn % len(DASHES)], "linewidth": 1.6,
                "marker": MARKERS[turn % len(MARKERS)] if marked else None, "markersize": 4.5}

    def panels(self, num: int, *, stacked: bool = False, **options: Any) -> "list[Axes]":
        """`num` axes, beside each other where there is room for it (and not `stacked`)."""
        rows, columns = (1, num) if self.sheet.is_wide and not stacked else (num, 1)
        axes = self.figure.subplots(rows, columns, squeeze=False, **options).ravel().tolist()
        for axis in axes:
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(True, axis="y")
        return axes

    def sourced(self, artist: "Artist", value: Value) -> None:
        """Keep where the text of `artist` comes from, as its data-source in the SVG."""
        artist.set_gid(f"source-{len(self.sources)}")
        self.sources.append(value.source)

    def line(self, axis: "Axes", x: Sequence[float], y: Sequence[float], series: int, *, top: Limits | None = None, marked: bool = False) -> None:
        """A line of series number `series`, thinned to the width; what lies above `top` becomes marks at the edge."""
        colour, per_panel = self.colour(series), self.sheet.width if not self.sheet.is_wide else self.sheet.width // 2
        xs, ys = thin(x, y, per_panel)
        axis.plot(xs, ys, **self.style(series, marked))
        if top is not None:
            axis.set_ylim(top.low, top.high)
            over = top.above(ys)
            if over.any():  # an empty line counts as a point at (0, 0), which the layout would make room for wherever that lies
                axis.plot(xs[over], [top.high] * int(over.sum()), linestyle="none", marker="^", markersize=7, color=colour, clip_on=False,
                          zorder=5)

    def legend(self, names: Sequence[Value], *, marked: bool = False) -> None:
        """Names of the series 0, 1, ... above the panels; nothing for a single one."""
        if len(names) < 2:
            return
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], **self.style(i, marked)) for i in range(len(names))]
        self.key(handles, [f"{letter(i)} {shortened(str(name.value))}" for i, name in enumerate(names)], names)

    def key(self, handles: Sequence[Any], labels: Sequence[str], values: Sequence[Value | None] = ()) -> None:
        """A legend above the panels, so many entries in a row as the width holds."""
        longest = max(map(len, labels))
        columns = max(1, min(len(labels), int(self.sheet.width / (0.62 * self.sheet.font * longest + 50))))
        legend = self.figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False, borderaxespad=0.2)
        for text, value in zip(legend.get_texts(), values, strict=False):
            if value is not None:
                self.sourced(text, value)


@dataclass(frozen=True)
class Plot:
    """A figure of a report: `draw(canvas)` draws it on any sheet. `heights`: in CSS pixels, wide and narrow. `says` is what a reader who
    cannot see it is told, and `caption` (HTML) what stands below."""

    name: str
    title: str
    says: str
    caption: str
    heights: tuple[int, int]
    draw: Callable[[Canvas], None]

    def svg(self, sheet: Sheet) -> str:
        """The drawing as an element to stand in HTML, ids its own."""
        canvas, raw = self._drawn(sheet, "svg")
        return _inline(raw.decode(), f"{self.name}-{sheet.kind}", sheet, self.says, canvas.sources)

    def png(self) -> bytes:
        """The wide drawing in light colours at two dots a CSS pixel."""
        return self._drawn(PNG, "png")[1]

    def _drawn(self, sheet: Sheet, kind: str) -> tuple[Canvas, bytes]:
        with _settings(sheet), warnings.catch_warnings():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure

            height = self.heights[0 if sheet.is_wide else 1]
            figure = Figure(figsize=(sheet.width / UNITS_PER_INCH, height / UNITS_PER_INCH), layout="constrained")
            FigureCanvasAgg(figure)
            canvas = Canvas(sheet, figure)
            self.draw(canvas)
            file = io.BytesIO()
            warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)  # a browser has fonts that this one lacks
            metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            figure.savefig(file, format=kind, metadata=metadata, dpi=PNG_DOTS_PER_INCH if kind == "png" else UNITS_PER_INCH,
                           transparent=kind == "svg")
        return canvas, file.getvalue()


@contextmanager
def _settings(sheet: Sheet) -> Any:
    """matplotlib's own defaults and ours, whatever the user's configuration says; put back afterwards."""
    import matplotlib
    import matplotlib.style

    c = sheet.colours
    with matplotlib.style.context("default", after_reset=True), matplotlib.rc_context({
        "font.family": "DejaVu Sans", "font.size": sheet.font, "axes.labelsize": sheet.font, "axes.titlesize": sheet.font,
        "xtick.labelsize": sheet.font - 1, "ytick.labelsize": sheet.font - 1, "legend.fontsize": sheet.font, "axes.titlelocation": "left",
        "text.color": c["ink"], "axes.labelcolor": c["ink"], "axes.edgecolor": c["soft"], "xtick.color": c["soft"], "ytick.color": c["soft"],
        "xtick.labelcolor": c["ink"], "ytick.labelcolor": c["ink"], "grid.color": c["rule"], "grid.linewidth": 0.8, "axes.axisbelow": True,
        "figure.facecolor": c["paper"], "axes.facecolor": c["paper"], "svg.fonttype": "none", "svg.hashsalt": "bitsperbyte",
        "axes.formatter.useoffset": False, "axes.formatter.limits": (-5, 7), "figure.constrained_layout.w_pad": 0.08, "text.usetex": False,
        "text.parse_math": False,
    }):
        yield


def _inline(text: str, name: str, sheet: Sheet, says: str, sources: Sequence[str]) -> str:
    """An SVG file's element with ids of its own, CSS variables for colours, and the sources of its texts."""
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{name}-', text)
    for place, source in enumerate(sources):
        mark = f'id="{name}-source-{place}"'
        text = text.replace(mark, f"{mark} data-source={attribute(source)}")
    for colour, placeholder in PLACEHOLDERS.items():
        text = text.replace(placeholder, f"var(--{colour})")
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    view = re.search(r'viewBox="([^"]*)"', text)
    assert view is not None, "matplotlib writes a viewBox"
    body = text[text.index(">") + 1 : text.rindex("</svg>")].strip()
    return (f'<svg class="{sheet.kind}" viewBox="{view[1]}" role="img" aria-label={attribute(says)} xmlns="http://www.w3.org/2000/svg">'
            f"{body}</svg>")


def letter(place: int) -> str:
    """A, B, ... Z, AA, ...: what runs are called in a report."""
    return (letter(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def shortened(text: str, longest: int = 32) -> str:
    """One line of at most `longest` characters; of a longer text the beginning and the end."""
    text = one_line(text)
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


@functools.cache
def colour_rules() -> str:
    """CSS that gives the colours their values, light and dark."""
    light, dark = (" ".join(f"--{name}: {value};" for name, value in palette.items()) for palette in (LIGHT, DARK))
    return f":root {{ color-scheme: light dark; {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
