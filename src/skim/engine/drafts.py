"""The drafts of one sequence in exact mode: tokens that fast steps drew and no slow step has verified.

Fast steps compute slots whose keys are approximate. The slow step that verifies begins at the first of these
slots and writes them all again. It draws a token after each, from the sampler's state at that point. Drafts
are accepted as long as they are the tokens drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skim.decode.drafts import MOST
from skim.sampling.batch import SamplerRow
from skim.sampling.sampler import Sampler


@dataclass(eq=False)
class Drafts:
    """One round. It begins after a slow step, and ends when its drafts are verified or dropped."""

    base: int  # the first slot that a fast step computes
    most: int  # drafts of the round
    count: int = 0  # drafts that are drawn
    usable: int = MOST  # leading drafts that may be accepted: a step whose logits are not finite ends them
    due: bool = False  # no more are drawn: the next row verifies them
    branches: list[SamplerRow] = field(default_factory=list)  # the sampler's state after each draft

    @property
    def full(self) -> bool:
        return self.count >= self.most

    def states(self, row: SamplerRow) -> list[SamplerRow]:
        """The sampler's states before and after each draft; `row` is the one before."""
        return [row, *self.branches[: self.count]]

    def branch(self, sampler: Sampler, row: SamplerRow) -> SamplerRow:
        """The state that the next draft is drawn with. A step that failed may have made it."""
        if len(self.branches) == self.count:
            self.branches.append(sampler.branch(self.states(row)[-1]))
        return self.branches[self.count]
