"""Figures of a load's replies, with the names and formulas of `vllm bench serve`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skim.bench.load import Reply
from skim.measure.report import Figure, Row, plain, show, timing
from skim.measure.stats import percentile, tpot

RESAMPLES = 500
NAMES = {
    "successful": "Successful requests",
    "duration": "Benchmark duration (s)",
    "prompt_tokens": "Input tokens per request",
    "output_tokens": "Generated tokens per request",
    "cached": "Input tokens from the server's cache",
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_throughput": "Total token throughput (tok/s)",
    **{
        f"{name}_{word.lower()}": f"{word} {name.upper()} (ms)"
        for name in ("ttft", "tpot", "itl")
        for word in ("Mean", "Median", "P99")
    },
}


@dataclass(frozen=True)
class Run:
    """One load from its first request to its last reply."""

    seconds: float
    replies: Sequence[Reply]


def latencies(replies: Sequence[Reply]) -> dict[str, list[list[float]]]:
    """Latencies in milliseconds by name, grouped by reply. Replies without a latency are left out of it.

    TPOT needs a second token, ITL a second chunk.
    """
    each = {
        "ttft": [[reply.ttft] for reply in replies],
        "tpot": [
            [] if (one := tpot(reply.e2e, reply.ttft, reply.output_tokens)) is None else [one]
            for reply in replies
        ],
        "itl": [list(reply.gaps) for reply in replies],
    }
    found = {name: [[one * 1e3 for one in of] for of in all_ if of] for name, all_ in each.items()}
    return {name: groups for name, groups in found.items() if groups}


def figures(runs: Sequence[Run]) -> dict[str, Figure]:
    """All of a row's figures. Rates have the range of the runs, latencies a 95% interval."""
    replies = [reply for run in runs for reply in run.replies]
    prompt, output = ([getattr(r, f"{name}_tokens") for r in replies] for name in ("prompt", "output"))
    found = {
        "successful": plain(len(replies), ""),
        "duration": timing([run.seconds for run in runs], "s"),
        "prompt_tokens": _spread(prompt),
        "output_tokens": _spread(output),
    }
    cached = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
    if len(cached) == len(replies):
        found["cached"] = plain(sum(cached) / sum(prompt), "share")
    found |= {
        "request_throughput": _rate(runs, "req/s", lambda reply: 1),
        "output_throughput": _rate(runs, "tok/s", lambda reply: reply.output_tokens),
        "total_throughput": _rate(runs, "tok/s", lambda reply: reply.prompt_tokens + reply.output_tokens),
    }
    for name, groups in latencies(replies).items():
        found |= {f"{name}_{word}": figure for word, figure in summarize(groups).items()}
    return found


def summarize(groups: Sequence[Sequence[float]]) -> dict[str, Figure]:
    """Mean, median and p99 of all values, each with its 95% bootstrap interval.

    Whole replies are resampled: the gaps within one are not independent of each other.
    """
    import numpy

    words: dict[str, Callable[[Any], Any]] = {
        "mean": numpy.mean,
        "median": numpy.median,
        "p99": lambda values: numpy.percentile(values, 99),
    }
    values = [value for group in groups for value in group]
    arrays = [numpy.asarray(group) for group in groups]
    rng = numpy.random.default_rng(0)
    drawn: dict[str, list[float]] = {word: [] for word in words}
    for _ in range(RESAMPLES):
        sample = numpy.concatenate([arrays[i] for i in rng.integers(len(arrays), size=len(arrays))])
        for word, take in words.items():
            drawn[word].append(float(take(sample)))
    found = {}
    for word, take in words.items():
        value = float(take(values))
        low, high = percentile(drawn[word], 0.025), percentile(drawn[word], 0.975)
        found[word] = Figure(value, "ms", min(low, value), max(high, value), len(groups), "lower")
    return found


def notes(runs: Sequence[Run]) -> dict[str, Any]:
    """Every request, and percentiles 0 to 100 of each latency, for plots."""
    replies = [reply for run in runs for reply in run.replies]
    curves = {
        name: [round(percentile([v for group in groups for v in group], i / 100), 3) for i in range(101)]
        for name, groups in latencies(replies).items()
    }
    requests = [
        {
            "prompt_tokens": reply.prompt_tokens,
            "cached_tokens": reply.cached_tokens,
            "output_tokens": reply.output_tokens,
            "ttft_ms": round(reply.ttft * 1e3, 3),
            "e2e_ms": round(reply.e2e * 1e3, 3),
            "chunks": len(reply.gaps) + 1,
        }
        for reply in replies
    ]
    return {"percentiles": curves, "requests": requests}


def _spread(values: Sequence[int]) -> Figure:
    return Figure(statistics.fmean(values), "tokens", min(values), max(values), len(values), "neither")


def _rate(runs: Sequence[Run], unit: str, count: Callable[[Reply], int]) -> Figure:
    return timing([sum(map(count, run.replies)) / run.seconds for run in runs], unit, better="higher")


def listing(rows: Sequence[Row]) -> str:
    """Figures as lines, with a column for each successful row; then the failed rows."""
    good = [row for row in rows if row.failed is None]
    lines = []
    if good:
        head = ["", *("\n".join(f"{k} {v}" for k, v in row.key.items()) for row in good)]
        body = [
            [title, *(_cell(row, name) for row in good)]
            for name, title in NAMES.items()
            if any(name in row.figures for row in good)
        ]
        heads = [list(cells) for cells in zip(*(_tall(cell, head) for cell in head), strict=True)]
        widths = [max(len(line[i]) for line in [*heads, *body]) for i in range(len(head))]
        for cells in [*heads, *body]:
            rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
            lines.append("  ".join([cells[0].ljust(widths[0]), *rest]).rstrip())
    for row in rows:
        if row.failed is not None:
            lines.append(f"FAILED {', '.join(f'{k} {v}' for k, v in row.key.items())}: {row.failed}")
    return "\n".join(lines)


def _cell(row: Row, name: str) -> str:
    if name == "successful":
        return f"{row.figures[name].value:.0f}"
    return show(row.figures[name]) if name in row.figures else "-"


def _tall(cell: str, head: Sequence[str]) -> list[str]:
    """The lines of a header cell, padded to the tallest cell."""
    lines = cell.split("\n")
    return lines + [""] * (max(other.count("\n") + 1 for other in head) - len(lines))
