"""Compare two reports of one kind: the figures that moved beyond the noise, and their direction.

The noise of a figure is its reported range or interval. Figures whose ranges overlap did not move. Ranges of
few repeats can be disjoint by chance: for two runs of the same thing, in 1 of 126 cases with 5 repeats each,
in 1 of 10 with 3, in 1 of 3 with 2. Therefore disjoint ranges count with at least `ENOUGH` repeats. With at
least `LEAST` they count if the gap exceeds both the wider range and `MARGIN` of the value, which happens by
chance in less than 1 of 100 cases with 3 repeats. With fewer repeats there is no verdict. Counted or computed
figures have no noise; their unit identifies them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from skim.measure.report import Figure, MeasurementError, Report, Row, show, titled

ENOUGH = 5  # repeats of both; disjoint ranges count
LEAST = 3  # repeats of both; disjoint ranges count if they are far apart
MARGIN = 0.05  # least gap of such ranges, as a share of the larger value
MEASURED = ("ceiling", "crossover")  # settings that are measured, so they always differ
_TIMES = ("s", "ms", "us", "ns")


class Verdict(StrEnum):
    """The verdict on a figure that both reports have."""

    BETTER = "better"
    WORSE = "worse"
    CHANGED = "changed"  # neither direction is better
    SAME = "within noise"
    UNKNOWN = "one run, noise unknown"
    FEW = "too few runs to tell"  # the ranges are disjoint, but that may be chance
    INCOMPARABLE = "other unit"


@dataclass(frozen=True)
class Change:
    """One figure in both reports."""

    key: str
    name: str
    before: Figure
    after: Figure
    verdict: Verdict

    @property
    def ratio(self) -> float | None:
        """After divided by before; None if before is zero or the units differ."""
        if self.verdict is Verdict.INCOMPARABLE or self.before.value == 0:
            return None
        return self.after.value / self.before.value


@dataclass(frozen=True)
class Comparison:
    """The figures that two reports share, and the rows and figures that only one has."""

    changes: Sequence[Change]
    lost: Sequence[str]  # rows and figures that only the first has, or that failed in the second only
    others: Sequence[str]  # rows that failed in both or in the first, or are only in the second
    notes: Sequence[str]  # other differences: machine, versions, settings

    @property
    def regressions(self) -> list[str]:
        """Figures that got worse beyond the noise, and missing ones: a gate must not ignore them."""
        worse = [f"{one.key}: {one.name}" for one in self.changes if one.verdict is Verdict.WORSE]
        return [*worse, *self.lost]


def compare(before: Report, after: Report) -> Comparison:
    """Compare the second report with the first. Raises if they are of different kinds."""
    if before.kind != after.kind:
        raise MeasurementError(
            f"the first is a report of `skim {before.kind}`, the second of `skim {after.kind}`; "
            "give two of one command"
        )
    old, new = _by_key(before), _by_key(after)
    changes: list[Change] = []
    lost: list[str] = []
    others = [f"{key}: only in B" + _failed(row) for key, row in new.items() if key not in old]
    for key, row in old.items():
        other = new.get(key)
        if row.failed is not None:
            fate = ", not in B" if other is None else " and in B" if other.failed else " only"
            others.append(f"{key}: failed in A{fate}: {row.failed}")
        elif other is None:
            lost.append(f"{key}: only in A")
        elif other.failed is not None:
            lost.append(f"{key}: failed in B: {other.failed}")
        else:
            lost += [f"{key}: {name} only in A" for name in row.figures if name not in other.figures]
            changes += [
                Change(key, name, figure, other.figures[name], judge(figure, other.figures[name]))
                for name, figure in row.figures.items()
                if name in other.figures
            ]
    return Comparison(changes, lost, others, differences(before, after))


def judge(before: Figure, after: Figure) -> Verdict:
    """The verdict: the direction in which a figure moved, if it did."""
    if before.unit != after.unit or before.better != after.better:
        return Verdict.INCOMPARABLE
    if _single(before) or _single(after):
        return Verdict.UNKNOWN
    if before.low <= after.high and after.low <= before.high:
        return Verdict.SAME
    if not _apart(before, after):
        return Verdict.FEW
    if before.better == "neither":
        return Verdict.CHANGED
    return Verdict.BETTER if (after.value < before.value) == (before.better == "lower") else Verdict.WORSE


def _apart(before: Figure, after: Figure) -> bool:
    """True if disjoint ranges are enough for a verdict."""
    if _exact(before) and _exact(after):
        return True
    repeats = min(before.n, after.n)
    if repeats >= ENOUGH:
        return True
    gap = max(after.low - before.high, before.low - after.high)
    widest = max(before.high - before.low, after.high - after.low)
    return repeats >= LEAST and gap > max(widest, MARGIN * max(abs(before.value), abs(after.value)))


def _single(figure: Figure) -> bool:
    """True for a noisy figure that was measured once."""
    return figure.n == 1 and figure.low == figure.high and not _exact(figure)


def _exact(figure: Figure) -> bool:
    """True for a figure that was counted or computed; times, rates and scores are measured."""
    noisy = figure.unit in _TIMES or figure.unit.endswith("/s")
    scored = figure.unit in ("share", "nats") and figure.better != "neither"
    return figure.n == 1 and figure.low == figure.high and not noisy and not scored


def differences(before: Report, after: Report) -> list[str]:
    """Differences of machine, versions and settings, one line each. Measured settings are left out."""
    found = []
    for what in ("machine", "versions", "settings"):
        old: Mapping[str, Any] = getattr(before, what)
        new: Mapping[str, Any] = getattr(after, what)
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name) and not (what == "settings" and name in MEASURED):
                a, b = (_plain(side[name]) if name in side else "nothing" for side in (old, new))
                found.append(f"{what}: {name} is {a} in A, {b} in B")
    return found


def _by_key(report: Report) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in report.rows:
        name = ", ".join(f"{key} {value}" for key, value in sorted(row.key.items())) or "all"
        if name in found:
            raise MeasurementError(
                f"two rows of the {report.kind!r} report are both {name}; nothing is compared"
            )
        found[name] = row
    return found


def _failed(row: Row) -> str:
    return "" if row.failed is None else f", failed: {row.failed}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- as text


_SIGNS = {Verdict.BETTER: "+", Verdict.WORSE: "!", Verdict.CHANGED: "~"}


def listing(found: Comparison) -> str:
    """One line per figure, signed if it moved beyond the noise, then the rows and figures without a pair."""
    lines: list[str] = []
    for key in dict.fromkeys(change.key for change in found.changes):
        mine = [change for change in found.changes if change.key == key]
        cells = [
            (
                _SIGNS.get(one.verdict, " "),
                titled(one.name, one.before.unit),
                show(one.before),
                show(one.after),
                "-" if one.ratio is None else f"x{one.ratio:.3f}",
                str(one.verdict),
            )
            for one in mine
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(6)]
        lines += [key] if not lines else ["", key]
        for sign, name, a, b, ratio, verdict in cells:
            left = f"{sign} {name.ljust(widths[1])}  {a.rjust(widths[2])} -> {b.rjust(widths[3])}"
            lines.append(f"{left}  {ratio.rjust(widths[4])}  {verdict}")
    for title, entries in (("missing", found.lost), ("not compared", found.others), ("differs", found.notes)):
        lines += ["", *(f"{title}: {entry}" for entry in entries)] if entries else []
    counts = {verdict: sum(one.verdict is verdict for one in found.changes) for verdict in Verdict}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return "\n".join(
        [*lines, "", f"{len(found.changes)} figures in both" + (f": {told}" if told else "")]
    ).lstrip()
