"""Times to first token as a table that fits a terminal. The JSON report adds rates and all ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skim.measure.report import Figure, Row, lay_out
from skim.measure.speedup import speedup

PARTS = {"queue": "queue", "scoring": "scoring", "prefill": "prefill", "first_decode": "1st decode"}
SECONDS_FROM = 100.0  # a table whose longest time is at least this is in seconds


def listing(rows: Sequence[Row]) -> str:
    """A line for each row, with all times in one unit and the speedup over dense."""
    longest = max((row.figures["ttft"].value for row in rows if row.failed is None), default=0.0)
    unit, scale = ("s", 1.0) if longest >= SECONDS_FROM else ("ms", 1e3)

    sparse = any("blocks" in row.figures for row in rows)
    shares = {"kept": "kept", **({"blocks": "blocks"} if sparse else {}), "of_peak": "of peak"}

    def cells(row: Row) -> list[str]:
        figures, ttft = row.figures, row.figures["ttft"]
        low, median, high = (_time(value * scale) for value in (ttft.low, ttft.value, ttft.high))
        parts = [_time(figures[name].value * scale) if name in figures else "" for name in PARTS]
        ratio = speedup(row, rows, "ttft")
        return [
            str(ttft.n),
            median if ttft.n == 1 else f"{median} ({low}-{high})",
            _time(figures["ttft_p99"].value * scale),
            *parts,
            "" if ratio is None else f"{ratio:.2f}x",
            *(_percent(figures, name) for name in shares),
        ]

    head = ["n", f"ttft [{unit}]", "p99", *PARTS.values(), "speedup", *shares.values()]
    note = f"times in {unit}: median of n (min-max); queue, scoring and prefill add up to ttft"
    return f"{note}\n{lay_out(rows, head, cells)}"


def _time(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _percent(figures: Mapping[str, Figure], name: str) -> str:
    return f"{figures[name].value:.0%}" if name in figures else ""
