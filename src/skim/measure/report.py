"""A measurement's report: rows of figures, and everything needed to run it again.

A failed row has a reason and no figures, so failures cannot be averaged, compared or plotted.
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

from skim.errors import SkimError, first_line
from skim.measure.stats import mean_interval, percentile, share_interval
from skim.version import __version__

FORMAT = 1
Key = str | int | float
Better = Literal["lower", "higher", "neither"]


class MeasurementError(SkimError):
    """A measurement that does not count: a broken run, too few results, a non-finite number."""


@dataclass(frozen=True)
class Figure:
    """A measured number with its range over repeats, or its interval."""

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
    """The median of repeats, with the range from the least to the greatest."""
    _counted(values)
    return Figure(statistics.median(values), unit, min(values), max(values), len(values), better)


def tail(repeats: Sequence[Sequence[float]], unit: str = "s", *, share: float = 0.99) -> Figure:
    """A high percentile of all values. Its range covers each repeat's own percentile; n counts repeats.

    If repeats have one value each, the range is that of all values: too few for a tail.
    """
    for values in repeats:
        _counted(values)
    own = [percentile(values, share) for values in repeats]
    value = percentile([value for values in repeats for value in values], share)
    return Figure(value, unit, min(*own, value), max(*own, value), len(repeats), "lower")


def score(values: Sequence[float], *, better: Better = "higher", unit: str = "share") -> Figure:
    """The mean of scores with its 95% interval. Shares are in [0, 1]; other units are unbounded."""
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


def pooled(figures: Sequence[Figure]) -> Figure:
    """Scores of several rows as one: the mean weighted by n, and the interval of independent samples."""
    n = sum(figure.n for figure in figures)
    mean = math.fsum(figure.value * figure.n for figure in figures) / n
    below = math.hypot(*((figure.value - figure.low) * figure.n / n for figure in figures))
    above = math.hypot(*((figure.high - figure.value) * figure.n / n for figure in figures))
    low, high = mean - below, mean + above
    if figures[0].unit == "share":
        low, high = max(0.0, low), min(1.0, high)
    return Figure(mean, figures[0].unit, low, high, n, figures[0].better)


def _counted(values: Sequence[float]) -> None:
    if not values or not all(map(math.isfinite, values)):
        raise MeasurementError(f"not measured numbers: {list(values)}")


@dataclass(frozen=True)
class Row:
    """One measured case: its `key`, and figures by name or the reason it failed."""

    key: Mapping[str, Key]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    failed: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)  # single results

    def __post_init__(self) -> None:
        if (self.failed is None) != bool(self.figures):
            raise MeasurementError(f"a row has figures or a reason that it failed: {dict(self.key)}")


@dataclass(frozen=True)
class Report:
    """The outcome of one command."""

    kind: str  # bench ttft, eval needle, ...
    command: Sequence[str]
    settings: Mapping[str, Any]  # common to all rows: seeds, model, repeats
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
        """Parse the output of `to_json`; refuse anything else."""
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
    """A report on this machine. Raises if rows are missing: that is a broken run, not a short report.

    Passwords in URLs of the command are removed.
    """
    if len(rows) != expected:
        raise MeasurementError(f"{len(rows)} rows came back of {expected}; nothing is reported")
    words = [without_password(word) for word in command]
    return Report(kind, words, settings, list(rows), describe_machine(), describe_versions())


def without_password(text: str) -> str:
    """The text with user names and passwords removed from its URLs."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", text)


def reason_of(error: BaseException) -> str:
    """The error in one line, with its class unless it is Skim's own."""
    line, name = first_line(error), type(error).__name__
    return line if isinstance(error, SkimError) or line == name else f"{name}: {line}"


def describe_machine() -> dict[str, Any]:
    """The machine's hardware. Memory is left out without psutil, which a run from source may lack."""
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
    """The processor's model name, or its architecture if the system does not give one."""
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
    """Machine, models with the bits of their weights, dtype and measured ceiling in one line."""
    machine, settings = report.machine, report.settings
    if settings["device"].startswith("cuda"):
        where = machine["gpu"]
    else:
        where = f"{machine['cpu']} ({machine['instructions']}), {_several(machine['cores'], 'core')}, "
        where += _several(machine["threads"], "thread")
    models = [_with_bits(name, facts) for name, facts in settings["models"].items()]
    told = [where, f"{', '.join(models)} in {settings['dtype']}"]
    if ceiling := settings.get("ceiling"):
        flops, bandwidth = (_number(ceiling[name] / 1e9) for name in ("flops", "bandwidth"))
        told.append(f"measured ceiling {flops} GFLOP/s, {bandwidth} GB/s")
    return "; ".join(told)


def _with_bits(model: str, facts: Mapping[str, Any]) -> str:
    """The model's name, with the bits of a weight in memory if they were measured."""
    return f"{model} (weights of {facts['weight_bits']:.1f} bits)" if "weight_bits" in facts else model


def table(rows: Sequence[Row]) -> str:
    """The rows as a text table: units in the head, ranges in brackets, failures with their reasons."""
    figures = {name: figure for row in rows for name, figure in row.figures.items()}

    def cells(row: Row) -> list[str]:
        count = max((figure.n for figure in row.figures.values()), default=0)
        return [str(count), *(show(row.figures[name]) if name in row.figures else "" for name in figures)]

    return lay_out(rows, ["n", *(titled(name, figure.unit) for name, figure in figures.items())], cells)


def lay_out(rows: Sequence[Row], head: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> str:
    """Keys on the left, then a row's cells or its failure. A model common to all rows is left out."""
    keys = list(dict.fromkeys(name for row in rows for name in row.key))
    models = _short_names({str(row.key.get("model", "")) for row in rows})
    if len(models) == 1:
        keys = [name for name in keys if name != "model"]
    named = [{**row.key, "model": models[str(row.key.get("model", ""))]} for row in rows]
    left = padded([keys, *([_key(key.get(name, "")) for name in keys] for key in named)], str.ljust)
    good = iter(padded([head, *(cells(row) for row in rows if row.failed is None)], str.rjust))
    right = [next(good), *(next(good) if row.failed is None else f"FAILED: {row.failed}" for row in rows)]
    return "\n".join(f"{one}  {other}".rstrip() for one, other in zip(left, right, strict=True))


def _short_names(models: Set[str]) -> dict[str, str]:
    """Model names without their directories, if these are still distinct."""
    ends = {model: PurePath(model).name for model in models}
    return ends if len(set(ends.values())) == len(ends) else {model: model for model in models}


def padded(lines: Sequence[Sequence[str]], justify: Callable[[str, int], str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(justify, line, widths)) for line in lines]


def show(figure: Figure) -> str:
    """A figure as text: shares in percent, others with three digits, and the range."""
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
