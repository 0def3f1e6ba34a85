"""How many tokens fast steps draft before a slow step verifies them, in exact mode. Everything here is pure.

With a chance p that a draft is accepted, k drafts yield 1 + p + ... + p^k tokens: the accepted ones, and one
that the slow step draws itself. They take k fast steps and one slow step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 15  # drafts of a round: with the token before them, the slow step computes at most 16
TOGETHER = 128  # tokens that one forward verifies, or more if there may be more sequences than that
SLOW = 4.0  # fast steps that take as long as a slow one: on an H200, 8B, 4 rows of 128K tokens
FADE = 0.9  # weight of earlier drafts after a round


@dataclass(frozen=True)
class Acceptance:
    """The drafts of a sequence that were accepted, of those that were judged. Earlier ones fade."""

    accepted: float = 9.0
    judged: float = 10.0

    def after(self, drafted: int, accepted: int) -> Acceptance:
        """After a round. The first draft that is not accepted was judged; those after it were not."""
        judged = accepted + (accepted < drafted)
        return Acceptance(FADE * self.accepted + accepted, FADE * self.judged + judged)

    @property
    def rate(self) -> float:
        return self.accepted / self.judged

    @property
    def drafts(self) -> int:
        """The number of drafts that yields most tokens in the time."""
        return max(range(1, MOST + 1), key=lambda count: yield_of(self.rate, count) / (count + SLOW))


def yield_of(rate: float, drafts: int) -> float:
    """Tokens that a round of so many drafts yields, on average."""
    return sum(rate**power for power in range(drafts + 1))


def count_accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """The leading drafts that dense decode has drawn as well. `drawn` has one token more."""
    pairs = enumerate(zip(drafts, drawn, strict=False))
    return next((place for place, (draft, token) in pairs if draft != token), len(drafts))
