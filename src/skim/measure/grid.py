"""The evidence kept, by kind and context: one grid for each mode, as text or for a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skim.measure.report import Figure, Row, padded, pooled

CELLS = ("kept", "told")  # figures of a cell: the first one that a row has
AXES = {"kind", "context", "mode"}


@dataclass(frozen=True)
class Grid:
    """The cells of one mode. A cell is None if its row failed, and missing if there was no such row."""

    mode: str
    kinds: tuple[str, ...]
    contexts: tuple[int, ...]
    cells: dict[tuple[str, int], Figure | None]


def grids(rows: Sequence[Row]) -> list[Grid]:
    """One grid for each mode; none unless rows with evidence have several kinds or contexts.

    Rows that differ only in other keys, such as depth, are pooled. A failed row fails its cell.
    """
    rows = [row for row in rows if row.key.keys() >= AXES and (row.failed or _figure(row))]
    if all(row.failed for row in rows):
        return []
    kinds = tuple(dict.fromkeys(str(row.key["kind"]) for row in rows))
    contexts = tuple(sorted({int(row.key["context"]) for row in rows}))
    if len(kinds) < 2 and len(contexts) < 2:
        return []
    members: dict[str, dict[tuple[str, int], list[Figure | None]]] = {}
    for row in rows:
        cells = members.setdefault(str(row.key["mode"]), {})
        cells.setdefault((str(row.key["kind"]), int(row.key["context"])), []).append(_figure(row))
    return [
        Grid(mode, kinds, contexts, {place: _pooled(figures) for place, figures in cells.items()})
        for mode, cells in members.items()
    ]


def caption(rows: Sequence[Row]) -> str:
    """The meaning of the cells, and the number of samples in each."""
    counts = sorted(
        {figure.n for grid in grids(rows) for figure in grid.cells.values() if figure is not None}
    )
    text = "evidence kept"
    if counts:
        text += f", n = {counts[0]}{f' to {counts[-1]}' if counts[1:] else ''} in each cell"
    told = dict.fromkeys(str(row.key["kind"]) for row in rows if {*row.figures} & {*CELLS} == {"told"})
    return f"{text}; {', '.join(told)}: prompts read in full or evenly" if told else text


def as_text(rows: Sequence[Row]) -> str:
    """The grids as text, one below the other, under a caption; "" without grids."""
    lines: list[str] = []
    for grid in grids(rows):
        body = [[_cell(grid, kind, context) for context in grid.contexts] for kind in grid.kinds]
        left = padded([["kind"], *([kind] for kind in grid.kinds)], str.ljust)
        right = padded([[f"{context:,}" for context in grid.contexts], *body], str.rjust)
        lines += ["", grid.mode, *(f"  {a}  {b}".rstrip() for a, b in zip(left, right, strict=True))]
    return "\n".join([caption(rows), *lines]) if lines else ""


def _cell(grid: Grid, kind: str, context: int) -> str:
    if (kind, context) not in grid.cells:
        return ""
    figure = grid.cells[kind, context]
    return "failed" if figure is None else f"{figure.value:.0%}"


def _figure(row: Row) -> Figure | None:
    return next((row.figures[name] for name in CELLS if name in row.figures), None)


def _pooled(figures: Sequence[Figure | None]) -> Figure | None:
    found = [figure for figure in figures if figure is not None]
    return pooled(found) if len(found) == len(figures) else None
