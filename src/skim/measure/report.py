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
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path, PurePath
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
        except ValueError as error:
            raise MeasurementError(f"it is not JSON: {error}") from error
        if not isinstance(found, dict) or "format" not in found:
            raise MeasurementError("it is JSON, but not a report")
        try:
            if (version := found.pop("format")) != FORMAT:
                raise MeasurementError(
                    f"it is a report of format {version!r}, and this version of Skim reads {FORMAT}"
                )
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
            raise MeasurementError(f"it is a damaged report: {reason_of(error)}") from error


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
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    with contextlib.suppress(ImportError):
        import psutil

        found["memory_bytes"] = psutil.virtual_memory().total
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name where the system tells it, or else its architecture."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(\S.*?)\s*$", info.read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    found = {"skim": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "xllamacpp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# -- as text


def headline(report: Report) -> str:
    """Where and with what it was measured, in one line."""
    machine, settings = report.machine, report.settings
    if settings["device"].startswith("cuda"):
        where = machine["gpu"]
    else:
        where = f"{machine['cpu']} ({machine['instructions']}), {_several(machine['cores'], 'core')}, "
        where += _several(machine["threads"], "thread")
    told = [where, f"{', '.join(settings['models'])} in {settings['dtype']}"]
    if ceiling := settings.get("ceiling"):
        flops, bandwidth = (_number(ceiling[name] / 1e9) for name in ("flops", "bandwidth"))
        told.append(f"measured ceiling {flops} GFLOP/s, {bandwidth} GB/s")
    return "; ".join(told)


def table(rows: Sequence[Row]) -> str:
    """The rows under each other, with units in the head, ranges in brackets, failures spelt out."""
    figures = {name: figure for row in rows for name, figure in row.figures.items()}

    def cells(row: Row) -> list[str]:
        count = max((figure.n for figure in row.figures.values()), default=0)
        return [str(count), *(show(row.figures[name]) if name in row.figures else "" for name in figures)]

    return lay_out(rows, ["n", *(titled(name, figure.unit) for name, figure in figures.items())], cells)


def lay_out(rows: Sequence[Row], head: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> str:
    """Keys on the left, then a row's cells under the head, or why it failed. One model is not repeated."""
    keys = list(dict.fromkeys(name for row in rows for name in row.key))
    models = _short_names({str(row.key.get("model", "")) for row in rows})
    if len(models) == 1:
        keys = [name for name in keys if name != "model"]
    named = [{**row.key, "model": models[str(row.key.get("model", ""))]} for row in rows]
    left = _padded([keys, *([_key(key.get(name, "")) for name in keys] for key in named)], str.ljust)
    good = iter(_padded([head, *(cells(row) for row in rows if row.failed is None)], str.rjust))
    right = [next(good), *(next(good) if row.failed is None else f"FAILED: {row.failed}" for row in rows)]
    return "\n".join(f"{one}  {other}".rstrip() for one, other in zip(left, right, strict=True))


def _short_names(models: Set[str]) -> dict[str, str]:
    """Models without the directories they lie in, if that tells them apart."""
    ends = {model: PurePath(model).name for model in models}
    return ends if len(set(ends.values())) == len(ends) else {model: model for model in models}


def _padded(lines: Sequence[Sequence[str]], justify: Callable[[str, int], str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(justify, line, widths)) for line in lines]


def show(figure: Figure) -> str:
    """A figure as it stands in a table: shares in percent, others with three digits, and their range."""
    if figure.unit == "share":
        value = f"{figure.value:.0%}"
        spread = f" ({figure.low * 100:.0f}-{figure.high * 100:.0f})"
        return value if figure.low == figure.high else value + spread
    value = _number(figure.value)
    return value if figure.low == figure.high else f"{value} ({_number(figure.low)}-{_number(figure.high)})"


def titled(name: str, unit: str) -> str:
    return name if unit in ("", "share") else f"{name} [{unit}]"


def _several(count: int | None, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _key(value: Key) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"
