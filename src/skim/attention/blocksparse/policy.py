"""The policy of block-sparse prefill, and the decisions that need lengths alone.

A key block is `BLOCK` neighbouring slots of a row. A query block is `BLOCK` queries, counted from the chunk's
first query. So a query block may begin anywhere in a key block. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

BLOCK = 128


@dataclass(frozen=True)
class Policy:
    """Blocks to read in addition to those that score at least `alpha` times the best."""

    alpha: float
    sinks: int = 2  # first blocks of the prompt
    recent: int = 4  # last blocks up to the query's own
    dense: int = 2  # last blocks of the prompt, whose queries read everything
    sample: int = 1  # score with every `sample`-th query of a block

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in [0, 1], got {self.alpha}")
        if self.recent < 2:  # a query block may overlap two blocks of slots
            raise ValueError(f"recent must be at least 2, so that queries read themselves, got {self.recent}")
        if self.sample not in (1, 2, 4, 8):
            raise ValueError(f"sample must be 1, 2, 4 or 8, got {self.sample}")

    def always_all(self, slots: int) -> bool:
        """True if every block of a row of `slots` slots is read, regardless of scores."""
        return -(-slots // BLOCK) <= self.sinks + self.recent

    def dense_from(self, context: int, queries: int, prompt: int) -> int:
        """The first query block of a chunk that reads everything; the number of query blocks if none does.

        Query blocks that end in the prompt's last `dense` key blocks do, regardless of where chunks are cut.
        """
        edge = (-(-prompt // BLOCK) - self.dense) * BLOCK  # the first slot of those blocks
        if context + queries <= edge:
            return -(-queries // BLOCK)
        return max(0, -(-(edge + 1 - context) // BLOCK) - 1)


@lru_cache(maxsize=64)
def visible_blocks(context: int, queries: int) -> int:
    """Key blocks that the query blocks of a chunk may see, in total."""
    ends = (context + min(at + BLOCK, queries) for at in range(0, queries, BLOCK))
    return sum(-(-end // BLOCK) for end in ends)
