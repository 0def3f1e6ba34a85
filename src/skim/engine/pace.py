"""The pace of steps: how many prefill tokens fit in a step of a given time, by measured cost.

The cost of a prefill token is the time of its whole step, divided by the step's prefill tokens. It grows with
the token's context, and with a step's fixed costs it falls with the length of chunks. So lengths approach the
one whose step takes the target, step by step, whatever the fixed costs are. Old measurements fade. Lengths
are taken from few values, because kernels are set up for each length.

The caller measures. Knows nothing of devices or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skim.engine.scheduler import Candidate, Limits, is_short

LONE = 4
"""A prompt alone takes steps of up to this many targets, or of half of the token budget. A request that
arrives meanwhile waits for one such step."""

FADE = 0.8  # weight of the earlier measurements after a new one
OUTLIER = 4.0  # a step that takes longer than this many times its estimate counts as this many times
LEAST = 16  # prefill tokens of a step, or a 64th of the token budget: smaller chunks cost more than they save
FLOOR = 1.3  # where even a step with hardly any prefill misses the target, one may take this much longer


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
        """Seconds of a step without prefill, lately."""
        self.floor = 0.0
        """Seconds of a step with decode rows and hardly any prefill, lately; 0 before the first."""
        self.longest = 0
        """Most prefill tokens in a step so far. The next step has at most twice as many."""
        self._weight = 0.0  # faded sums over steps with prefill: of 1, cost, depth, and their products
        self._cost = self._depth = self._depth2 = self._product = 0.0
        self._slope = 0.0
        self._target, self._planned = 0.0, 1  # the last question and its answer

    def observe(self, work: Work, seconds: float) -> None:
        """A step of this work took so long. Chunks much shorter than planned show fixed costs, not theirs."""
        if not work.tokens:
            self.decode = _faded(self.decode, seconds)
            return
        self.longest = max(self.longest, work.tokens)
        if work.rows and work.tokens <= max(LEAST, self.longest // 32):
            self.floor = _faded(self.floor, seconds)
        elif work.rows:  # the first short step may have waited for kernels to be compiled
            self.floor = min(self.floor, seconds)
        if 2 * work.tokens < self._planned and seconds < self._target:
            return
        rows = 0.0 if work.rows else self.decode  # that they would have added
        cost = (seconds + rows) / work.tokens
        if self._weight:
            cost = min(cost, OUTLIER * self.token_seconds(work.depth))
        depth = work.depth
        self._weight = FADE * self._weight + 1
        self._cost = FADE * self._cost + cost
        self._depth = FADE * self._depth + depth
        self._depth2 = FADE * self._depth2 + depth**2
        self._product = FADE * self._product + depth * cost
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
        """Prefill tokens of a step that takes about `seconds`, from 1 to `most`.

        The answer is remembered: it tells whether the next step is as long as planned.
        """
        fits = careful = max(1, most // 8)
        if self._weight:
            most_seconds = seconds if self.floor < seconds else FLOOR * self.floor
            fits = int(most_seconds / max(self.token_seconds(depth), 1e-9))
            careful = max(2 * self.longest, careful)
        self._target, self._planned = seconds, min(rounded(max(1, min(fits, careful))), most)
        return self._planned


def _faded(before: float, seconds: float) -> float:
    """The mean of measurements, in which old ones fade; 0 before the first."""
    return FADE * before + (1 - FADE) * seconds if before else seconds


def rounded(tokens: int) -> int:
    """Round to a power of two, or one and a half times that. Rounded down, lengths might never grow."""
    power = 1 << (tokens.bit_length() - 1)
    if tokens < power * 5 // 4:
        return power
    return power * 3 // 2 if tokens < power * 7 // 4 else power * 2


def prefill_limit(candidates: Sequence[Candidate], limits: Limits, pace: Pace, target: float) -> int | None:
    """Most prefill tokens of the next step. None for no limit: all that decode rows leave.

    Beside decode rows, the step should take about `target` seconds. Otherwise it may take `LONE` times that,
    or have half of the token budget. Beside short prompts alone, it has room for them in their half, so that
    their first tokens come soon and the steps of many stay long enough to be efficient.
    """
    prompts = sorted((c for c in candidates if not c.decoding), key=lambda c: c.place)
    if not target or not prompts:
        return None
    depth = max(c.length for c in prompts)
    alone = pace.tokens_within(LONE * target, depth=depth, most=limits.tokens)
    alone = max(alone, limits.tokens // 2)
    short = sum(c.pending for c in prompts[1:] if is_short(c, prompts[0]))
    decoding = len(candidates) > len(prompts)
    if not decoding and not short:
        return alone
    steady = pace.tokens_within(target, depth=depth, most=limits.tokens)
    if decoding:
        return max(steady, min(max(limits.tokens // 64, LEAST), alone))
    return min(alone, max(steady, 2 * short))
