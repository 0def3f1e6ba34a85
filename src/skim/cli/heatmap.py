"""A plan as a heat map in text: the prompt as cells, shaded by score, with marks for kept blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skim.prefill.plan import Plan, Reason

SHADES = " .:-=+*#"
COLOURS = (234, 236, 58, 94, 136, 172, 208, 196)  # of the 256 colours: from almost black to red
MARKS = {reason: reason.value[0] for reason in Reason} | {Reason.EVEN: "v"}  # e is for earlier
MOST_ROWS = 16
LABELS = 256  # labels that decide on the width of all

_TELLING = (
    Reason.SCORED,
    Reason.RESCUED,
    Reason.CONTINUED,
    Reason.NEIGHBOUR,
    Reason.EVEN,
    Reason.EARLIER,
    Reason.PINNED,
)
"""Priority of reasons that share a cell: those that say most about the question come first."""


@dataclass(frozen=True)
class Cell:
    """Neighbouring prompt blocks that share one place in the map."""

    blocks: range
    heat: float  # of the hottest of them, from 0 to 1
    reason: Reason | None  # the reason one of them is kept; None if all are skipped


def heats(plan: Plan) -> list[float]:
    """For each block, the square root of its score divided by the highest score, from 0 to 1.

    Pinned blocks are left out of the highest: the question resembles itself most and would darken everything
    else. The root makes low scores visible.
    """
    scores = plan.scores or (0.0,) * len(plan.reasons)
    free = [score for score, why in zip(scores, plan.reasons, strict=True) if why != Reason.PINNED]
    top = max(free or scores)
    return [math.sqrt(min(max(score, 0.0), top) / top) if top > 0 else 0.0 for score in scores]


def cells(plan: Plan, most: int) -> list[Cell]:
    """The prompt in at most `most` cells of equally many blocks; the last may have fewer."""
    count = len(plan.reasons)
    each = -(-count // max(1, most))
    heat = heats(plan)
    found = []
    for start in range(0, count, each):
        blocks = range(start, min(start + each, count))
        held = {plan.reasons[block] for block in blocks}
        reason = next((why for why in _TELLING if why in held), None)
        found.append(Cell(blocks, max(heat[block] for block in blocks), reason))
    return found


def heat_map(plan: Plan, *, width: int, colour: bool, label: Callable[[int], str]) -> list[str]:
    """The map in lines of at most `width` columns (but at least one cell), then the legend.

    `label` names the first block of a row. With colours, marks are in their cells; without, below them.
    """
    count = len(plan.reasons)
    wide = max(len(label(block)) for block in range(0, count, -(-count // LABELS)))
    across = max(1, width - wide - 3)
    shown = cells(plan, across * MOST_ROWS)
    lines = []
    for start in range(0, len(shown), across):
        row = shown[start : start + across]
        begin = f"{label(row[0].blocks.start)[-wide:]:>{wide}} "
        if colour:
            lines.append(begin + _coloured(row))
            continue
        lines.append(f"{begin}|{''.join(SHADES[_level(cell)] for cell in row)}|")
        marks = "".join(mark_of(cell.reason) for cell in row)
        if marks.strip():
            lines.append(f"{'':{wide}} |{marks}|")
    return [*lines, *legend(plan, shown)]


def legend(plan: Plan, shown: Sequence[Cell]) -> list[str]:
    """The size of a cell, and the meaning of the marks in the map."""
    size = len(shown[0].blocks)
    block = f"a block of {plan.block_size} tokens"
    each = block if size == 1 else f"{size} blocks of {plan.block_size} tokens, as hot as its hottest"
    held = {cell.reason for cell in shown}
    marks = ", ".join(f"{mark} {why}" for why, mark in MARKS.items() if why in held)
    return [f"each cell is {each}; kept: {marks or 'none'}"]


def mark_of(reason: Reason | None) -> str:
    return " " if reason is None else MARKS[reason]


def _level(cell: Cell) -> int:
    return round(cell.heat * (len(SHADES) - 1))


def _coloured(row: Sequence[Cell]) -> str:
    """Cells as backgrounds; a run of equal ones is coloured once."""
    text, last = "", -1
    for cell in row:
        background = COLOURS[_level(cell)]
        if background != last:
            text += f"\x1b[48;5;{background}m\x1b[38;5;231m"
            last = background
        text += mark_of(cell.reason)
    return text + "\x1b[0m"
