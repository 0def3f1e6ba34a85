"""When a decode row reads its whole context: a slow step, for a reason that is counted.

Everything here is pure. A `Pulse` is the state of one sequence. A step may be decided before the results of
the one before it are known. Then the end of a sentence and a low mass act one step late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from skim.attention.glance import RECENT, Glance, picks_of
from skim.config import DecodeConfig

LEAST_GAP = 8  # tokens after a slow step in which neither a sentence nor a low mass causes another


class Refresh(Enum):
    """The reason for a slow step."""

    FIRST = "first"
    INTERVAL = "interval"
    SENTENCE = "sentence"
    MASS = "mass"
    MARGIN = "margin"
    VERIFY = "verify"


@dataclass(frozen=True)
class Pulse:
    """The decode steps of a sequence so far. A sequence without blocks starts over."""

    slow_at: int | None = None  # length of the context, the new token included, at the last slow step
    sentence: bool = False  # a sentence has ended since
    mass: float = 1.0  # the least that the blocks of a fast step since then have held
    unsure: bool = False  # the last fast step was not sure of its token, which is dropped

    def slow(self, length: int) -> Pulse:
        """After the launch of a slow step that computes the last of `length` slots."""
        return Pulse(length)

    def doubt(self) -> Pulse:
        """After a fast step that was not sure of its token."""
        return replace(self, unsure=True)

    def read(self, length: int, *, ends_sentence: bool, mass: float) -> Pulse:
        """After the results of the step that computed the last of `length` slots.

        They count if no slow step has been launched after it.
        """
        if self.slow_at is None or length < self.slow_at:
            return self
        least = min(self.mass, mass) if length > self.slow_at else self.mass
        return replace(self, sentence=self.sentence or ends_sentence, mass=least)


def refresh_reason(pulse: Pulse, length: int, config: DecodeConfig) -> Refresh | None:
    """The reason that the step that computes the last of `length` slots must be slow; None if it is fast."""
    if pulse.slow_at is None:
        return Refresh.FIRST
    if config.fast_only:
        return None
    if pulse.unsure:
        return Refresh.MARGIN
    gap = length - pulse.slow_at
    if gap >= config.refresh_interval:
        return Refresh.INTERVAL
    if gap < LEAST_GAP:
        return None
    if pulse.sentence:
        return Refresh.SENTENCE
    return Refresh.MASS if pulse.mass < config.refresh_mass else None


def glance_of(
    pulse: Pulse, length: int, config: DecodeConfig, block_size: int, candidates: float = 1
) -> Glance:
    """The choice of blocks of a fast step, after a slow one."""
    since = length - (pulse.slow_at or 0)
    glance = Glance(config.decode_budget, max(RECENT, since), candidates)
    if not config.positional:
        return glance
    picks = picks_of(glance, length, block_size)
    return glance._replace(recent=length - (picks.recent - picks.best) * block_size)
