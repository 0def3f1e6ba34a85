"""The pace of steps: how many prefill tokens fit in a step of a given time, by measured cost.

A step takes the time of its decode rows, plus its prefill tokens times a cost that grows with their context.
Both are measured, and old measurements fade. Chunk lengths are taken from few values, because kernels are set
up for each length.

Pure: the caller measures. Knows nothing of devices or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skim.engine.scheduler import SHORT, Candidate, Limits

LONE = 4
"""A prompt alone takes steps of up to this many targets, or of half of the token budget. A request that
arrives meanwhile waits for one such step."""

FADE = 0.8  # weight of the earlier measurements after a new one
OUTLIER = 4.0  # a step that takes longer than this many times its estimate counts as this many times
LEAST_SHARE = 0.25  # of the target, for prefill: however long the decode rows take


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    rows: int  # decode rows
    tokens: int  # prefill tokens
    depth: float  # mean number of earlier tokens that a prefill token reads

    @classmethod
    def of(cls, candidates: Sequence[Candidate], rows: Sequence[tuple[int, int]]) -> Work:
        by_order = {c.order: c for c in candidates}
        chunks = [(by_order[order], tokens) for order, tokens in rows if not by_order[order].decoding]
        total = sum(tokens for _, tokens in chunks)
        read = sum(tokens * (c.length + tokens / 2) for c, tokens in chunks)
        return cls(len(rows) - len(chunks), total, read / total if total else 0.0)


class Pace:
    """Estimates the time of a step from the times of earlier steps."""

    def __init__(self) -> None:
        self.decode = 0.0
        """Seconds of a step without prefill, lately. A step with prefill takes at least as long."""
        self.longest = 0
        """Most prefill tokens in a step so far. The next step has at most twice as many."""
        self._weight = 0.0  # faded sums over steps with prefill: of 1, cost, depth, and their products
        self._cost = self._depth = self._depth2 = self._product = 0.0
        self._slope = 0.0
        self._planned = 1  # the last answer

    def observe(self, work: Work, seconds: float) -> None:
        """A step of this work took so long. Chunks shorter than planned count less: they show fixed costs."""
        if not work.tokens:
            self.decode = seconds if not self.decode else FADE * self.decode + (1 - FADE) * seconds
            return
        cost = max(seconds - self.decode, seconds / 4) / work.tokens
        if self._weight:
            cost = min(cost, OUTLIER * self.token_seconds(work.depth))
        self.longest = max(self.longest, work.tokens)
        depth, weight = work.depth, min(1.0, work.tokens / self._planned) ** 2
        fade = FADE**weight
        self._weight = fade * self._weight + weight
        self._cost = fade * self._cost + weight * cost
        self._depth = fade * self._depth + weight * depth
        self._depth2 = fade * self._depth2 + weight * depth**2
        self._product = fade * self._product + weight * depth * cost
        mean, middle = self._cost / self._weight, self._depth / self._weight
        variance = self._depth2 / self._weight - middle**2
        if variance > (0.05 * middle) ** 2:  # else the depths are too close together to tell
            slope = (self._product / self._weight - middle * mean) / variance
            self._slope = min(max(slope, 0.0), mean / max(middle, 1.0))

    def token_seconds(self, depth: float) -> float:
        """Seconds per prefill token at this depth; 0 before the first measurement."""
        if not self._weight:
            return 0.0
        mean = self._cost / self._weight
        return max(mean + self._slope * (depth - self._depth / self._weight), mean / 4)

    def tokens_within(self, seconds: float, *, depth: int, most: int) -> int:
        """Prefill tokens of a step that takes about `seconds`, from 1 to `most`."""
        fits = careful = max(1, most // 8)
        if self._weight:
            left = max(seconds - self.decode, LEAST_SHARE * seconds)
            fits = int(left / max(self.token_seconds(depth), 1e-9))
            careful = max(2 * self.longest, careful)
        self._planned = rounded(max(1, min(fits, careful, most)))
        return self._planned


def rounded(tokens: int) -> int:
    """Round down to a power of two, or one and a half times that."""
    power = 1 << (tokens.bit_length() - 1)
    return power * 3 // 2 if tokens >= power * 3 // 2 else power


def prefill_limit(candidates: Sequence[Candidate], limits: Limits, pace: Pace, target: float) -> int | None:
    """Most prefill tokens of the next step. None for no limit: all that decode rows leave.

    Beside decode rows or a short prompt, the step should take about `target` seconds. Otherwise it may take
    `LONE` times that, or have half of the token budget.
    """
    prompts = sorted((c for c in candidates if not c.decoding), key=lambda c: c.place)
    if not target or not prompts:
        return None
    rows = len(candidates) - len(prompts)
    depth = max(c.length for c in prompts)
    shared = rows > 0 or any(c.pending * SHORT <= prompts[0].pending for c in prompts[1:])
    if shared:
        return pace.tokens_within(target, depth=depth, most=limits.tokens)
    alone = pace.tokens_within(LONE * target, depth=depth, most=limits.tokens)
    return max(alone, limits.tokens // 2)
