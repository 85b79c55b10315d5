"""How figures look: one style, as PNG files and as SVG that follows the page's light or dark.

Figures are drawn in the colours of ROLES. In the SVG each becomes a CSS variable of the page, and
text stays text. Knows nothing of runs.
"""

import dataclasses
import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The page's names of these colours are in templates/style.css, with their dark counterparts.
INK, MUTED, GRID, PAPER = "#1b2430", "#596472", "#dbe0e6", "#ffffff"
# After Okabe and Ito: told apart with every common kind of colour blindness.
BLUE, ORANGE, GREEN, PURPLE, OCHRE, GREY = (
    "#0072b2", "#d05a00", "#00805d", "#a8588a", "#8f6b00", "#7a8592",
)  # fmt: skip
ROLES = {
    INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper", BLUE: "--blue",
    ORANGE: "--orange", GREEN: "--green", PURPLE: "--purple", OCHRE: "--ochre", GREY: "--grey",
}  # fmt: skip
MAP = "cividis"  # of heat maps: its lightness rises evenly, on a light and on a dark page
BAND = 0.18  # opacity
WIDTH, DPI = 4.9, 200  # inches; as wide as a phone, so that text keeps its size there

STYLE: Any = {
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "font.family": "sans-serif", "font.size": 9.5, "axes.titlesize": 9.5, "axes.labelsize": 9.5,
    "xtick.labelsize": 9, "ytick.labelsize": 9, "legend.fontsize": 9,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": MUTED, "axes.titlecolor": INK,
    "xtick.color": MUTED, "ytick.color": MUTED, "grid.color": GRID, "axes.titlelocation": "left",
    "axes.grid": True, "axes.axisbelow": True, "grid.linewidth": 0.8, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.width": 0.8,
    "ytick.major.width": 0.8, "xtick.major.size": 3, "ytick.major.size": 0, "lines.linewidth": 1.8,
    "lines.markersize": 4, "legend.frameon": False, "legend.handlelength": 1.6,
    "svg.fonttype": "none", "axes.unicode_minus": True,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure, ready for a page."""

    name: str  # of its file and of its anchor
    title: str
    caption: str  # what is shown, of how many, what a band is
    healthy: str  # what it looks like when all is well
    alt: str  # what it shows, in numbers, for who cannot see it
    svg: str
    png: bytes


@contextmanager
def canvas(height: float, rows: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure in our style and its axes, one below the other."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=rows > 1, squeeze=False)[:, 0]
        yield figure, list(axes)


def drawn(
    figure: Figure, *, name: str, title: str, caption: str, healthy: str, alt: str
) -> Drawn:  # fmt: skip
    """Turns a figure into what a page and a folder hold. Call it inside `canvas`."""
    svg = _svg(figure, name, alt)
    figure.set_layout_engine("none")  # it is laid out; again would take as long as drawing
    return Drawn(
        name=name,
        title=title,
        caption=caption,
        healthy=healthy,
        alt=alt,
        svg=svg,
        png=_png(figure),
    )


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, facecolor=PAPER, metadata={"Software": None})
    return stream.getvalue()


def _svg(figure: Figure, name: str, alt: str) -> str:
    """Inline SVG: sized by the page, coloured by it, its ids its own."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # would reach the whole page
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, variable in ROLES.items():
        text = text.replace(colour, f"var({variable})")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    opening = (
        f'<svg role="img" aria-label="{html.escape(alt)}" {box[0]} '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return opening + text[text.index(">") + 1 :]


def band(axes: Axes, steps: list[int], low: list[float], high: list[float], colour: str) -> None:
    """An interval around a curve."""
    axes.fill_between(steps, low, high, color=colour, alpha=BAND, linewidth=0)
