"""Layer groups: layers whose blocks end with the same sliding window.

A block of the pool holds the planes of one group's layers, and a sequence has one block table per group. All
groups have blocks of the same size, so they share one pool, one budget and one count of free blocks. Behind a
sliding window, blocks are given back. Everything here is pure: which groups there are, which slots a window
still needs, and how many blocks a sequence holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skim.memory.store import LayerStore

ABSENT = -1
"""Entry of a block table whose block was given back, or was never needed."""
MOST_GROUPS = 8  # each has a block table; more of them take more time on the host than they save memory
UNBOUNDED = 2**31 - 1  # tokens
LEAST_CHUNK = 128  # tokens of a prefill chunk that a sequence must always have room for: a key block


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share blocks, and the sliding window behind which the blocks end; None for no end."""

    window: int | None
    layers: tuple[int, ...]  # by their place in a block


def one_group(layers: int) -> tuple[LayerGroup, ...]:
    """All layers in one block, and no block ends."""
    return (LayerGroup(None, tuple(range(layers))),)


def group_layers(stores: Sequence[LayerStore], longest: int) -> tuple[LayerGroup, ...]:
    """The groups of a model whose sequences have at most `longest` tokens; full attention comes first.

    A group has as many layers as the rarest window. Of a larger number, the last group has unused places.
    Layers of different sizes cannot share a block: such a model has one group, whose blocks do not end.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, store in enumerate(stores):
        window = store.shape.window
        kinds.setdefault(None if window is None or window >= longest else window, []).append(layer)
    if len(kinds) == 1:
        return tuple(LayerGroup(window, tuple(layers)) for window, layers in kinds.items())
    if len({store.planes for store in stores}) > 1:
        return one_group(len(stores))
    size = min(map(len, kinds.values()))
    while sum(-(-len(layers) // size) for layers in kinds.values()) > max(MOST_GROUPS, len(kinds)):
        size += 1
    return tuple(
        LayerGroup(window, tuple(kinds[window][first : first + size]))
        for window in sorted(kinds, key=lambda window: (window is not None, window or 0))
        for first in range(0, len(kinds[window]), size)
    )


def first_needed(length: int, window: int | None, position: Callable[[int], int] | None = None) -> int:
    """The first slot that queries after `length` slots may read, if positions increase with slots.

    `position` is the position of a slot; None if it is the slot. The next query may come at any position
    after the last one, so this is enough for every continuation.
    """
    if window is None or length == 0:
        return 0
    if position is None:
        return max(0, length - window + 1)
    out_of_reach = position(length - 1) + 1 - window
    return bisect_right(range(length), out_of_reach, key=position)


@dataclass(frozen=True)
class Geometry:
    """The sizes of a sequence's block tables."""

    block_size: int
    windows: tuple[int | None, ...]  # of each group

    @property
    def ends(self) -> bool:
        """True if some blocks are given back behind a sliding window."""
        return any(window is not None for window in self.windows)

    def blocks_of(self, tokens: int, *, whole: bool = False) -> int:
        """The most blocks of all groups that a sequence of `tokens` holds between steps, with a short chunk.

        With `whole`, of a sequence that keeps the blocks behind its windows.
        """
        blocks = -(-tokens // self.block_size)
        if whole:
            return blocks * len(self.windows)
        return sum(blocks if w is None else min(blocks, self._held(w)) for w in self.windows)

    def tokens_at(self, context: int, blocks: int) -> int:
        """Tokens that `blocks` blocks hold in sequences of `context` tokens each."""
        if not self.ends:
            return blocks * self.block_size
        return blocks * context // self.blocks_of(context)

    def tokens_in(self, blocks: int, *, whole: bool = False) -> int:
        """The longest sequence that `blocks` blocks hold; `UNBOUNDED` if every block ends."""
        if not whole and None not in self.windows and self.blocks_of(UNBOUNDED) <= blocks:
            return UNBOUNDED
        low, high = 0, blocks
        while low < high:  # blocks of one group
            middle = (low + high + 1) // 2
            if self.blocks_of(middle * self.block_size, whole=whole) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def _held(self, window: int) -> int:
        """Blocks that overlap a window and a short chunk after it, and one that is about to end."""
        return -(-(window - 1 + LEAST_CHUNK) // self.block_size) + 2
