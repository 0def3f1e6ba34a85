"""Draw plots with matplotlib as SVG. The same data gives the same text.

The SVG has no date, no random ids and no external resources, and labels are not parsed as formulas.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from skim.errors import ConfigError, missing_package
from skim.measure.report import Figure

_STYLE = {
    "svg.hashsalt": "skim",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
}
_NAMELESS = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Plot:
    """An SVG drawing and its title."""

    title: str
    svg: str


def require() -> None:
    """Raise if matplotlib is missing, before the work begins."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(missing_package("--html", "matplotlib", "bench")) from error


@contextmanager
def axes_of(title: str) -> Iterator[tuple[Any, Callable[[], Plot]]]:
    """Yields axes to draw on, and a function that returns the plot after the body has ended."""
    with _canvas(title, (7, 4)) as (canvas, plot):
        axes = canvas.subplots()
        axes.set_title(title)
        yield axes, plot


@contextmanager
def panels_of(
    title: str, names: Sequence[str], size: tuple[float, float], columns: int = 3
) -> Iterator[tuple[list[Any], Callable[[], Plot]]]:
    """As `axes_of`, with one panel of this size, in inches, for each name."""
    wide = min(columns, len(names))
    high = -(-len(names) // wide)
    with _canvas(title, (size[0] * wide, size[1] * high + 0.4)) as (canvas, plot):
        canvas.suptitle(title)
        panels = list(canvas.subplots(high, wide, squeeze=False).flat)
        for name, axes in zip(names, panels, strict=False):
            axes.set_title(name)
        for axes in panels[len(names) :]:
            axes.set_visible(False)
        yield panels[: len(names)], plot


@contextmanager
def _canvas(title: str, size: tuple[float, float]) -> Iterator[tuple[Any, Callable[[], Plot]]]:
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        canvas = Canvas(figsize=size, layout="constrained")
        text = io.StringIO()
        yield canvas, lambda: Plot(title, text.getvalue()[text.getvalue().index("<svg") :])
        canvas.savefig(text, format="svg", metadata=_NAMELESS)


def draw_cells(
    axes: Any, columns: Sequence[str], rows: Sequence[str], cells: Mapping[tuple[int, int], Figure | None]
) -> None:
    """Draw a heat map of shares by (row, column), with the first row on top. None is a failed cell."""
    grid = [[math.nan] * len(columns) for _ in rows]
    for (y, x), figure in cells.items():
        told, light = "failed", False
        if figure is not None:
            grid[y][x] = figure.value
            told, light = f"{figure.value:.0%}", figure.value < 0.5
        axes.text(x, y, told, ha="center", va="center", color="white" if light else "black")
    axes.grid(False)
    axes.pcolormesh(
        range(len(columns)), range(len(rows)), grid, vmin=0, vmax=1, cmap="viridis", shading="nearest"
    )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("context [tokens]")


def draw_line(axes: Any, name: str, points: Sequence[tuple[float, Figure]]) -> Any:
    """Draw points with their ranges. Returns the line's colour."""
    ys = [figure.value for _, figure in points]
    below = [max(0.0, figure.value - figure.low) for _, figure in points]
    above = [max(0.0, figure.high - figure.value) for _, figure in points]
    drawn = axes.errorbar([x for x, _ in points], ys, [below, above], marker="o", capsize=3, label=name)
    return drawn.lines[0].get_color()


def plain_ticks(axes: Any, places: Sequence[float], write: Callable[[float], str] | None = None) -> None:
    """Ticks at the data on a logarithmic x axis, and plain numbers on both axes."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xticks(places, [(write or short)(place) for place in places])
    if axes.get_yscale() == "log":
        axes.set_yticks(log_ticks(*axes.get_ylim()))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in a range: decades, or finer steps if there are fewer than three."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), range(1, 10), [1 + i / 10 for i in range(90)]):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) >= 3:
            return found
    return [low, high]


def legend(axes: Any) -> None:
    if any(axes.get_legend_handles_labels()[1]):
        axes.legend(fontsize=8)


def short(tokens: Any) -> str:
    return f"{tokens / 1024:g}K" if tokens >= 1024 and tokens % 256 == 0 else f"{tokens:g}"


def own_names(svg: str, prefix: str) -> str:
    """The drawing with prefixed ids, so that a page can hold several."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
