"""Medians, percentiles and intervals, with the formulas that the field prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Z95 = 1.959963984540054
T95 = (  # Student's t at 97.5%, for 1 to 30 degrees of freedom
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between neighbours by linear interpolation."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def share_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of scores in [0, 1], by Wilson's formula with the mean as the share of hits.

    For hits and misses that is Wilson's interval, which is good for few draws and near 0 and 1. For scores
    in between it is wider than need be: a variable in [0, 1] with mean p varies by at most p (1 - p), which
    is what hits with that share do. So equal scores do not pass for certainty.
    """
    count, share = len(values), statistics.fmean(values)
    scale = 1 + Z95**2 / count
    middle = (share + Z95**2 / (2 * count)) / scale
    half = Z95 / scale * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of values without bounds, by Student's t; of a single one nothing is known."""
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return mean, mean
    half = t95(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half


def t95(freedom: int) -> float:
    """Student's t at 97.5%: from the table, and beyond it by the first terms of its series in 1 / freedom."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def tpot(e2e: float, ttft: float, output_tokens: int) -> float | None:
    """Time per output token after the first one; there is none for a reply of one token."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None
