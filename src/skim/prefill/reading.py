"""The prompt tokens that are computed, in slot order, with their positions; and the plan behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skim.prefill.plan import DenseReason, Plan


@dataclass(frozen=True)
class Reading:
    """The slots that a prompt fills. `positions` is None where slot i holds position i."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...] | None = None

    @classmethod
    def of(cls, prompt: Sequence[int], indices: Sequence[int]) -> Reading:
        """The prompt's tokens at `indices`, in this order, at their original positions."""
        tokens = tuple(prompt[index] for index in indices)
        in_place = all(slot == index for slot, index in enumerate(indices))
        return cls(tokens, None if in_place else tuple(indices))

    @property
    def end(self) -> int:
        """The position after the highest one."""
        return len(self.tokens) if self.positions is None else max(self.positions, default=-1) + 1


@dataclass(frozen=True)
class Planned:
    """The result of planning: the slots to compute, and the plan or the reason for its absence."""

    reading: Reading
    plan: Plan | None = None  # None: the whole prompt is read
    fallback: DenseReason | None = None  # the reason, if it was to be skimmed
    problem: str | None = None  # the reason as a sentence
    follow_up: str | None = None  # follow-up mode, or the reason for starting afresh
