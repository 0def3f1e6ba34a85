"""Percentiles, 95% intervals and time per output token, by the usual formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy

Z95 = statistics.NormalDist().inv_cdf(0.975)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by linear interpolation between neighbours."""
    return float(numpy.quantile(values, share))


def share_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of scores in [0, 1]: Wilson's formula with the mean as the share of hits.

    For hits and misses this is Wilson's interval, which holds for few draws and near 0 and 1. For scores in
    between it is conservative: the variance of a score in [0, 1] with mean p is at most p (1 - p), that of
    hits. So equal scores do not look certain. (scipy's version takes whole numbers of hits only.)
    """
    count, share = len(values), statistics.fmean(values)
    scale = 1 + Z95**2 / count
    middle = (share + Z95**2 / (2 * count)) / scale
    half = Z95 / scale * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of unbounded values, by Student's t. A single value has no interval."""
    count, mean = len(values), statistics.fmean(values)
    if count == 1:
        return mean, mean
    half = t95(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half


def t95(freedom: int) -> float:
    """Student's t at 97.5%. Imports `scipy.special`, which loads in a third of the time of `scipy.stats`."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def tpot(e2e: float, ttft: float, output_tokens: int) -> float | None:
    """Time per output token after the first; None for a reply of one token."""
    return (e2e - ttft) / (output_tokens - 1) if output_tokens > 1 else None
