"""Style: one look for every picture, the same pixels at every run.

A picture is a card of light paper with round corners, transparent outside of them: it has one set of pixels, and the
page under it may be dark. It is as wide as a phone or half a screen shows whole, because no notebook can draw it anew
for a narrower page: front ends scale it down, and at 440 px its smallest words (SMALL) are still nine pixels high. So
panels stand under one another, and legends under their title.

Blue is the terminal chain, and whatever is said of a whole run; orange is what the policy sampled, grey is context;
each colour has a second channel beside it (hatch, line weight, marker, underline), so nothing is said by hue alone. Agg
is used through `Figure` objects, never through pyplot: no global state, no back end switched under the reader's feet.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import FancyBboxPatch

INK = "#1f2933"
MUTED = "#7b8794"
FAINT = "#cbd2d9"
PAPER = "#ffffff"
GRID = "#e4e7eb"
BLUE = "#1f5fa8"
CARRY = "#b8cfe8"
SAMPLED = "#e8872b"
REJECTED = "#8a1c4a"
SERIES = ("#1f5fa8", "#e8872b", "#3f8f6b", "#8a1c4a", "#6b5b95", "#7b8794")
MARKERS = ("o", "s", "^", "D", "v", "P")

DPI = 180
DISPLAY_WIDTH_PX = 640
FIGURE_WIDTH_IN = 5.8
_PAD_IN = 0.1
"""Between the edge of the card and what is drawn on it."""
SMALL = 8.5
"""Points of the smallest words."""

_RC: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "grid.color": GRID,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "svg.hashsalt": "workbench",
    "text.parse_math": False,
}


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """The look, for as long as something is drawn; the reader's own matplotlib settings are left alone."""
    with mpl.rc_context(_RC):  # type: ignore[arg-type]  # its keys are typed one by one
        yield


def new_figure(height_in: float) -> Figure:
    """An empty figure of notebook width and the given height (inches)."""
    figure = Figure(figsize=(FIGURE_WIDTH_IN, height_in), dpi=DPI)
    FigureCanvasAgg(figure)
    _lay_card(figure)
    return figure


def _lay_card(figure: Figure) -> None:
    """The paper under everything: light, with round corners and a quiet edge."""
    width, height = figure.get_size_inches()
    paper = FancyBboxPatch(
        (0.01, 0.01), width - 0.02, height - 0.02, boxstyle="round,pad=0,rounding_size=0.07", facecolor=PAPER,
        edgecolor=FAINT, lw=0.8, transform=figure.dpi_scale_trans, zorder=-10,
    )  # fmt: skip
    figure.patch.set_alpha(0.0)
    figure.add_artist(paper)
    paper.set_in_layout(False)


def panels(height_in: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` × `columns` panels, axes in reading order, with a quiet horizontal grid."""
    figure = Figure(
        figsize=(FIGURE_WIDTH_IN, height_in), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=_PAD_IN, h_pad=_PAD_IN)
    )
    FigureCanvasAgg(figure)
    _lay_card(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid or None).flat)
    for ax in axes:
        ax.grid(axis="y", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def legend_under_title(ax: Axes, columns: int = 3, handles: list[Any] | None = None) -> None:
    """The legend between the title, which moves up, and the panel, where it hides no mark; without `handles` of what
    is drawn."""
    marks = handles or ax.get_legend_handles_labels()[0]
    ax.legend(
        handles=marks, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, fontsize=SMALL, borderaxespad=0.1,
        borderpad=0.2, handlelength=1.5, columnspacing=1.0, labelspacing=0.3,
    )  # fmt: skip
    lines = -(-len(marks) // columns)
    ax.set_title(ax.get_title("left"), pad=6 + 13 * lines)


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG without the metadata (software, time) that would change between machines and runs."""
    buffer = io.BytesIO()
    with house_style():
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def step_ticks(ax: Axes, steps: list[int], most: int = 12) -> None:
    """Whole-number ticks at the steps themselves, thinned to `most` of them."""
    stride = max(1, -(-len(steps) // most))
    ax.set_xticks(steps[::stride])
    ax.set_xlim(min(steps) - 0.5, max(steps) + 0.5)


def say_nothing_to_show(ax: Axes, reason: str) -> None:
    """Grey out a panel and say why it is empty."""
    ax.set_facecolor("#f5f7fa")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.text(0.5, 0.5, reason, transform=ax.transAxes, ha="center", va="center", color=MUTED, wrap=True)


def bar_list(ax: Axes, names: list[str], counts: list[int], title: str, total: int | None = None) -> None:
    """Hatched bars under one another, each with its number, and its share of `total` where that is given."""
    ax.barh(range(len(names)), counts, height=0.62, color=REJECTED, hatch="////", edgecolor="white", lw=0)
    for y, value in enumerate(counts):
        share = f" ({value / total:.1%})" if total else ""
        ax.text(value, y, f" {value:,}{share}", va="center", fontsize=SMALL)
    ax.grid(visible=False)
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks([])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, max(counts) * 1.6)
    ax.set_title(title)
