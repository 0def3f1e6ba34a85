"""The plots of a report. A plot without data is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from skim.config import BUDGETS
from skim.errors import ConfigError
from skim.measure.drawing import (
    Plot,
    axes_of,
    draw_cells,
    draw_line,
    legend,
    own_names,
    panels_of,
    plain_ticks,
    require,
    short,
)
from skim.measure.grid import caption, grids
from skim.measure.modes import DENSE, parse_mode
from skim.measure.report import Figure, Report, Row, plain, pooled
from skim.measure.speedup import speedups


def plots(report: Report) -> list[Plot]:
    """All plots that a report of this kind has data for."""
    require()
    draws = _EVALS if report.kind.split()[0] == "eval" else _BENCHES.get(report.kind, ())
    found = [plot for draw in draws for plot in draw(report)]
    return [Plot(plot.title, own_names(plot.svg, f"p{i}-")) for i, plot in enumerate(found)]


# -- the data of plots


Points = dict[str, list[tuple[float, Figure]]]


def lines_of(rows: Sequence[Row], x: str, figure: str) -> Points:
    """Figures against the key `x`: one line per combination of the other keys, named by those that vary."""
    rows = [row for row in rows if figure in row.figures and isinstance(row.key.get(x), (int, float))]
    found: Points = {}
    for row in rows:
        found.setdefault(label_of(row, rows, (x,)), []).append((float(row.key[x]), row.figures[figure]))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def label_of(row: Row, rows: Sequence[Row], without: Sequence[str]) -> str:
    """The keys that distinguish a row's line from others, or its mode if there is only one line."""
    names = [name for name in row.key if name not in without]
    varied = [name for name in names if len({other.key.get(name) for other in rows}) > 1]
    chosen = varied or [name for name in names if name == "mode"]
    return ", ".join(str(row.key[name]) if name == "mode" else f"{name} {row.key[name]}" for name in chosen)


def family_of(mode: str) -> str | None:
    """A mode's name without its budget; None for dense and for names that are not modes."""
    try:
        if parse_mode(mode).is_dense:
            return None
    except ConfigError:
        return None
    first, *extra = mode.split(",")
    others = [one for one in extra if one.partition("=")[0] not in BUDGETS]
    return ",".join([first.partition(":")[0], *others])


def quality_lines(rows: Sequence[Row]) -> Points:
    """Scores against the share that was read, not the share requested; one point per mode.

    The two differ by the tokens that are always kept, most of all for short prompts.
    """
    modes: dict[str, list[Row]] = {}
    for row in rows:
        if family_of(str(row.key["mode"])) is not None and "read" in row.figures:
            modes.setdefault(str(row.key["mode"]), []).append(row)
    found: Points = {}
    for mode, members in modes.items():
        read = pooled([row.figures["read"] for row in members]).value
        point = (read, pooled([row.figures["score"] for row in members]))
        found.setdefault(family_of(mode) or mode, []).append(point)
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def spaced(places: Sequence[float], ratio: float = 1.15) -> list[float]:
    """Places on a logarithmic axis, without those too close to the previous one to be labelled."""
    found: list[float] = []
    for place in sorted(places):
        if not found or place >= ratio * found[-1]:
            found.append(place)
    return found


# -- the plots


def _against_context(figure: str, title: str) -> Callable[[Report], Iterator[Plot]]:
    def draw(report: Report) -> Iterator[Plot]:
        lines = lines_of(report.rows, "context", figure)
        if not lines:
            return
        floors = lines_of(report.rows, "context", "floor")
        unit = next(iter(lines.values()))[0][1].unit
        with axes_of(title) as (axes, plot):
            for name, points in lines.items():
                drawn = draw_line(axes, name, points)
                if name in floors:
                    xs, ys = zip(*((x, one.value) for x, one in floors[name]), strict=True)
                    axes.plot(xs, ys, linestyle=":", color=drawn, label=f"{name} (floor)".strip())
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            plain_ticks(axes, sorted({x for points in lines.values() for x, _ in points}))
            axes.set_xlabel("context [tokens]")
            axes.set_ylabel(f"{figure} [{unit}]")
            legend(axes)
        yield plot()

    return draw


def _speedup(report: Report) -> Iterator[Plot]:
    """Speedups over dense against context, one line per other mode or peer."""
    rows = [
        Row(row.key, {"speedup": plain(ratio, "x", better="higher")})
        for row, ratio in zip(report.rows, speedups(report), strict=False)
        if ratio is not None and row.key["mode"] != DENSE
    ]
    lines = lines_of(rows, "context", "speedup")
    if not lines:
        return
    with axes_of("speedup over dense against context") as (axes, plot):
        for name, points in lines.items():
            draw_line(axes, name, points)
        axes.axhline(1, linestyle="--", color="grey", label=DENSE)
        axes.set_xscale("log", base=2)
        plain_ticks(axes, sorted({x for points in lines.values() for x, _ in points}))
        axes.set_xlabel("context [tokens]")
        axes.set_ylabel("times as fast as dense")
        axes.set_ylim(bottom=0)
        legend(axes)
    yield plot()


def _needle_grid(report: Report) -> Iterator[Plot]:
    """Depth against context, one panel per mode; failed cells are marked."""
    rows = [row for row in report.rows if {"context", "depth"} <= row.key.keys()]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(label_of(row, rows, ("context", "depth")), []).append(row)
    for name, cells in panels.items():
        if not any("score" in row.figures for row in cells):
            continue
        contexts, depths = (sorted({row.key[axis] for row in cells}) for axis in ("context", "depth"))
        places = {
            (depths.index(row.key["depth"]), contexts.index(row.key["context"])): row.figures.get("score")
            for row in cells
        }
        with axes_of(f"found by depth and context: {name or report.kind}") as (axes, plot):
            draw_cells(axes, [short(one) for one in contexts], [_depth(one) for one in depths], places)
            axes.set_ylabel("depth of the needle")
        yield plot()


def _evidence_grid(report: Report) -> Iterator[Plot]:
    """Evidence kept by kind and context, one panel per mode; failed cells are marked."""
    found = grids(report.rows)
    if not found:
        return
    size = (1.2 + 0.8 * len(found[0].contexts), 0.9 + 0.3 * len(found[0].kinds))
    with panels_of(caption(report.rows), [grid.mode for grid in found], size) as (panels, plot):
        for axes, grid in zip(panels, found, strict=True):
            places = {
                (grid.kinds.index(kind), grid.contexts.index(context)): figure
                for (kind, context), figure in grid.cells.items()
            }
            draw_cells(axes, [f"{context:,}" for context in grid.contexts], grid.kinds, places)
    yield plot()


def _quality(report: Report) -> Iterator[Plot]:
    """Scores against the share read, with intervals, one plot per task; dense is a horizontal line."""
    rows = [row for row in report.rows if "score" in row.figures and "mode" in row.key]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label_of(row, rows, ("mode", "depth")), []).append(row)
    for group, members in groups.items():
        lines = quality_lines(members)
        dense = [row.figures["score"] for row in members if row.key["mode"] == DENSE]
        if not lines:
            continue
        with axes_of(f"quality against share read: {group or report.kind}") as (axes, plot):
            for name, points in lines.items():
                draw_line(axes, name, points)
            if dense:
                axes.axhline(pooled(dense).value, linestyle="--", color="grey", label=DENSE)
            axes.set_xscale("log")
            places = [share for points in lines.values() for share, _ in points]
            plain_ticks(axes, spaced(places), "{:.3g}".format)
            axes.set_xlabel("share of the prompt that was read")
            axes.set_ylabel("score, 95% interval")
            if members[0].figures["score"].unit == "share":
                axes.set_ylim(-0.02, 1.02)
            legend(axes)
        yield plot()


def _percentiles(name: str, title: str) -> Callable[[Report], Iterator[Plot]]:
    def draw(report: Report) -> Iterator[Plot]:
        rows = [row for row in report.rows if row.failed is None and name in row.notes.get("percentiles", {})]
        if not rows:
            return
        with axes_of(title) as (axes, plot):
            for row in rows:
                values = row.notes["percentiles"][name]
                shares = [100 * i / (len(values) - 1) for i in range(len(values))]
                axes.plot(shares, values, label=label_of(row, rows, ()) or "all requests")
            axes.set_xlabel("percentile")
            axes.set_ylabel(f"{name.upper()} [ms]")
            axes.set_ylim(bottom=0)
            legend(axes)
        yield plot()

    return draw


Draw = Callable[[Report], Iterator[Plot]]
_BENCHES: Mapping[str, Sequence[Draw]] = {
    "bench ttft": (_against_context("ttft", "time to first token against context"), _speedup),
    "bench decode": (_against_context("step", "decode step against context"), _speedup),
    "bench serve": (
        _percentiles("ttft", "time to first token by percentile"),
        _percentiles("itl", "inter-token latency by percentile"),
    ),
}
_EVALS: Sequence[Draw] = (_needle_grid, _evidence_grid, _quality)


def _depth(depth: Any) -> str:
    return f"{depth:.0%}" if isinstance(depth, float) and depth <= 1 else str(depth)
