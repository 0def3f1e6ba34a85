"""How plots are drawn: with matplotlib, as SVG texts that are the same for the same data.

No date, no random name, nothing fetched; and no text is taken for a formula.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from skim.errors import ConfigError
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
    """A drawing and what it shows."""

    title: str
    svg: str


def require() -> None:
    """Say that the plotting library is missing before the work begins."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--html: plots need matplotlib, which is not installed; pip install 'skim-llm[bench]', "
            "or leave out --html"
        ) from error


@contextmanager
def axes_of(title: str) -> Iterator[tuple[Any, Callable[[], Plot]]]:
    """Axes to draw on and, after the body, what makes a plot of them."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        canvas = Canvas(figsize=(7, 4), layout="constrained")
        axes = canvas.subplots()
        axes.set_title(title)
        text = io.StringIO()
        yield axes, lambda: Plot(title, text.getvalue()[text.getvalue().index("<svg") :])
        canvas.savefig(text, format="svg", metadata=_NAMELESS)


def draw_line(axes: Any, name: str, points: Sequence[tuple[float, Figure]]) -> Any:
    """Points with their ranges; its colour."""
    ys = [figure.value for _, figure in points]
    below = [max(0.0, figure.value - figure.low) for _, figure in points]
    above = [max(0.0, figure.high - figure.value) for _, figure in points]
    drawn = axes.errorbar([x for x, _ in points], ys, [below, above], marker="o", capsize=3, label=name)
    return drawn.lines[0].get_color()


def plain_ticks(axes: Any, places: Sequence[float], write: Callable[[float], str] | None = None) -> None:
    """Ticks where the data stands on a logarithmic x axis, and plain numbers on both."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xticks(places, [(write or short)(place) for place in places])
    if axes.get_yscale() == "log":
        axes.set_yticks(log_ticks(*axes.get_ylim()))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two others: decades, or finer steps where there are too few."""
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
    """The same drawing with ids of its own, so that several can stand in one page."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
