"""How much faster a row is than dense in the same report."""

from __future__ import annotations

from collections.abc import Sequence

from skim.measure.modes import DENSE
from skim.measure.report import Report, Row

MAIN = {"bench ttft": "ttft", "bench decode": "step"}
"""The time that a kind of report compares."""


def speedup(row: Row, rows: Sequence[Row], time: str) -> float | None:
    """Speedup over dense with the same other keys, such as model and context; None if dense has no time."""
    if row.failed is not None or time not in row.figures:
        return None
    wanted = {**row.key, "mode": DENSE}
    dense = next((other for other in rows if other.key == wanted and other.failed is None), None)
    return None if dense is None else dense.figures[time].value / row.figures[time].value


def speedups(report: Report) -> list[float | None]:
    """The speedup of each row; empty if the report compares no modes or peers with dense."""
    time = MAIN.get(report.kind)
    if time is None or len({row.key.get("mode") for row in report.rows}) < 2:
        return []
    found = [speedup(row, report.rows, time) for row in report.rows]
    return found if any(ratio is not None for ratio in found) else []
