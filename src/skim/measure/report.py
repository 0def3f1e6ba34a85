"""What a measurement found: rows of figures, and all that is needed to run it again.

A row that failed has a reason and no figures, so that nothing failed can be averaged, compared or plotted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

from skim.errors import SkimError
from skim.measure.stats import mean_interval, percentile, share_interval
from skim.version import __version__

FORMAT = 1
Key = str | int | float
Better = Literal["lower", "higher", "neither"]


class MeasurementError(SkimError):
    """A measurement that does not count: a broken run, too few results, a number that is not finite."""


@dataclass(frozen=True)
class Figure:
    """A measured number, with the range that repeating it gave."""

    value: float
    unit: str  # s, ms, tok/s, share, ... ; shares are in [0, 1]
    low: float
    high: float
    n: int
    better: Better

    def __post_init__(self) -> None:
        if self.n < 1 or not all(map(math.isfinite, (self.value, self.low, self.high))):
            raise MeasurementError(
                f"not a measured number: {self.value} ({self.low} to {self.high}), n={self.n}"
            )


def timing(values: Sequence[float], unit: str = "s", *, better: Better = "lower") -> Figure:
    """The median of repeats, from the least to the greatest."""
    _counted(values)
    return Figure(statistics.median(values), unit, min(values), max(values), len(values), better)


def tail(repeats: Sequence[Sequence[float]], unit: str = "s", *, share: float = 0.99) -> Figure:
    """A high percentile of all values, from the least to the greatest of the repeats' own; n is of repeats.

    Where a repeat has one value, that is the range of all values: so few of them have no tail of their own,
    and the range says so.
    """
    for values in repeats:
        _counted(values)
    own = [percentile(values, share) for values in repeats]
    value = percentile([value for values in repeats for value in values], share)
    return Figure(value, unit, min(*own, value), max(*own, value), len(repeats), "lower")


def score(values: Sequence[float], *, better: Better = "higher", unit: str = "share") -> Figure:
    """The mean of scores with its 95% interval. Shares are in [0, 1], other units without bounds."""
    _counted(values)
    mean = statistics.fmean(values)
    if unit != "share":
        return Figure(mean, unit, *mean_interval(values), len(values), better)
    if min(values) < 0 or max(values) > 1:
        raise MeasurementError(f"not shares in [0, 1]: {list(values)}")
    return Figure(mean, unit, *share_interval(values), len(values), better)


def plain(value: float, unit: str, *, better: Better = "neither") -> Figure:
    """A number that was computed or counted, not repeated."""
    return Figure(value, unit, value, value, 1, better)


def _counted(values: Sequence[float]) -> None:
    if not values or not all(map(math.isfinite, values)):
        raise MeasurementError(f"not measured numbers: {list(values)}")


@dataclass(frozen=True)
class Row:
    """What was measured (`key`), and what was found: figures by name, or why there are none."""

    key: Mapping[str, Key]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    failed: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)  # single results, for those who look closer

    def __post_init__(self) -> None:
        if (self.failed is None) != bool(self.figures):
            raise MeasurementError(f"a row has figures or a reason that it failed: {dict(self.key)}")


@dataclass(frozen=True)
class Report:
    """The outcome of one command."""

    kind: str  # bench ttft, eval needle, ...
    command: Sequence[str]
    settings: Mapping[str, Any]  # seeds, model, repeats: what the rows have in common
    rows: Sequence[Row]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def failures(self) -> list[Row]:
        return [row for row in self.rows if row.failed is not None]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote; anything else is refused."""
        try:
            found = json.loads(text)
            if found.pop("format") != FORMAT:
                raise MeasurementError("not a report of this version of Skim")
            rows = [
                Row(
                    row["key"],
                    {k: Figure(**v) for k, v in row["figures"].items()},
                    row["failed"],
                    row["notes"],
                )
                for row in found.pop("rows")
            ]
            return cls(rows=rows, **found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MeasurementError(f"not a report: {error}") from error


def make_report(
    kind: str, command: Sequence[str], settings: Mapping[str, Any], rows: Sequence[Row], *, expected: int
) -> Report:
    """A report on this machine. Fewer rows than asked for are a broken run, not a short report.

    A password in a URL of the command is left out.
    """
    if len(rows) != expected:
        raise MeasurementError(f"{len(rows)} rows came back of {expected}; nothing is reported")
    words = [without_password(word) for word in command]
    return Report(kind, words, settings, list(rows), describe_machine(), describe_versions())


def without_password(text: str) -> str:
    """A text whose URLs have lost who logs in there, and with what."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", text)


def reason_of(error: BaseException) -> str:
    """One line that says what went wrong, with the error's kind where the message alone would not."""
    lines = str(error).strip().splitlines()
    if isinstance(error, SkimError) and lines:
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def describe_machine() -> dict[str, Any]:
    """What the machine is; without psutil, which a run from source may lack, its memory is not told."""
    import torch

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    with contextlib.suppress(ImportError):
        import psutil

        found["memory_bytes"] = psutil.virtual_memory().total
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def describe_versions() -> dict[str, str]:
    found = {"skim": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "xllamacpp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# -- as text


def table(report: Report) -> str:
    """The rows under each other, with units in the head, ranges in brackets, failures spelt out."""
    keys = list(dict.fromkeys(name for row in report.rows for name in row.key))
    figures = {name: figure for row in report.rows for name, figure in row.figures.items()}
    head = [*keys, *(_titled(name, figure) for name, figure in figures.items())]
    body = []
    for row in report.rows:
        cells = [_key(row.key.get(name, "")) for name in keys]
        if row.failed is not None:
            cells += [f"FAILED: {row.failed}"]
        else:
            cells += [show(row.figures[name]) if name in row.figures else "" for name in figures]
        body.append(cells)
    widths = [
        max(len(cells[i]) for cells in [head, *body] if len(cells) == len(head) or i < len(keys))
        for i in range(len(head))
    ]
    lines = [
        "  ".join(
            cell.ljust(width) if i < len(keys) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, [*widths, 0], strict=False))
        ).rstrip()
        for cells in [head, *body]
    ]
    return "\n".join([f"$ {shlex.join(report.command)}", *lines])


def show(figure: Figure) -> str:
    """A figure as it stands in a table: shares in percent, others with three digits, and their range."""
    if figure.unit == "share":
        value = f"{figure.value:.0%}"
        return value if figure.n == 1 else f"{value} ({figure.low * 100:.0f}-{figure.high * 100:.0f})"
    value = _number(figure.value)
    return value if figure.n == 1 else f"{value} ({_number(figure.low)}-{_number(figure.high)})"


def _titled(name: str, figure: Figure) -> str:
    return name if figure.unit in ("", "share") else f"{name} [{figure.unit}]"


def _key(value: Key) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"
