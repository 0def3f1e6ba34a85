"""The drafts of one sequence: tokens that fast steps drew and that are not final.

Fast steps compute slots whose keys are approximate. The slow step that verifies begins at the first of these
slots and writes them all again. It draws a token after each, from the sampler's state at that point. Drafts
are accepted as long as they are the tokens drawn.

In exact mode all drafts are verified. Otherwise none is: a draft that the model was sure of, because its
margin exceeds that of the round, is final. The first that it was not sure of is dropped, with those after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from skim.decode.drafts import MOST
from skim.sampling.batch import SamplerRow
from skim.sampling.logprobs import Sampled
from skim.sampling.sampler import Sampler


@dataclass(eq=False)
class Drafts:
    """One round. It begins after a slow step, and ends when its drafts are verified or dropped."""

    base: int  # the first slot that a fast step computes, of the drafts that are left
    most: int  # drafts that end the round, if so many are left
    margin: float = math.inf  # drafts above this margin are final
    count: int = 0  # drafts that are drawn and left
    usable: int = MOST  # leading drafts that may be accepted: a step whose logits are not finite ends them
    due: bool = False  # no more are drawn: the next row verifies them
    branches: list[SamplerRow] = field(default_factory=list)  # the sampler's state after each draft

    @property
    def settling(self) -> bool:
        """True if drafts that the model is sure of are final without a slow step: not in exact mode."""
        return self.margin < math.inf

    @property
    def full(self) -> bool:
        return self.count >= self.most

    def settles(self, slot: int, result: Sampled) -> bool:
        """True if the draft for this slot is final: the first that is left, and one the model is sure of."""
        first = slot == self.base + 1
        return first and result.finite and result.margin is not None and result.margin > self.margin

    def settle(self) -> SamplerRow:
        """The first draft is final. Returns the sampler's state after it."""
        self.base, self.count = self.base + 1, self.count - 1
        row = self.branches.pop(0)
        row.wants_margin = False  # a slow step has no use for it
        return row

    def states(self, row: SamplerRow) -> list[SamplerRow]:
        """The sampler's states before and after each draft; `row` is the one before."""
        return [row, *self.branches[: self.count]]

    def branch(self, sampler: Sampler, row: SamplerRow) -> SamplerRow:
        """The state that the next draft is drawn with. A step that failed may have made it."""
        if len(self.branches) == self.count:
            self.branches.append(sampler.branch(self.states(row)[-1]))
        return self.branches[self.count]
