"""Medians, percentiles and intervals, with the formulas that the field prints."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

Z95 = 1.959963984540054
RESAMPLES = 2_000


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between neighbours by linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95% interval of a share, good for few draws and for shares of 0 and 1."""
    share = hits / count
    scale = 1 + Z95**2 / count
    middle = (share + Z95**2 / (2 * count)) / scale
    half = Z95 / scale * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of a mean: shares of hits by Wilson's formula, other scores by resampling."""
    if set(values) <= {0.0, 1.0}:
        return wilson(int(sum(values)), len(values))
    draw = random.Random(0)
    means = [statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return percentile(means, 0.025), percentile(means, 0.975)


def tpot(e2e: float, ttft: float, output_tokens: int) -> float | None:
    """Time per output token after the first one; there is none for a reply of one token."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None
