"""Select the prompt blocks to keep: one pure function over plain data.

Blocks are taken in an order that does not depend on the budget; the budget decides where to stop. So a larger
budget keeps every block that a smaller one keeps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from skim.prefill.plan import Reason

MOST_BLOCKS = 1 << 18
"""Blocks of the longest prompts: they have larger blocks, so that selection takes bounded time."""

_SLICE = 1 << 14  # blocks between two yields


def block_size_of(prompt_tokens: int, block_size: int) -> int:
    """The size of a prompt's blocks: `block_size`, or larger if there were more than `MOST_BLOCKS`."""
    return max(block_size, -(-prompt_tokens // MOST_BLOCKS))


@dataclass(frozen=True)
class Budget:
    """The most to keep of a prompt: a fraction of its tokens or scores, or a number of tokens.

    `PrefillConfig` checks the values. Only `mass` may be combined with another limit; both then apply.
    """

    ratio: float | None = None
    tokens: int | None = None
    mass: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not given or {"ratio", "tokens"} <= given.keys():
            raise ValueError(
                "a budget is a ratio or a number of tokens, a mass, or both, got "
                f"{', '.join(given) or 'none of them'}"
            )

    def allowed(self, prompt_tokens: int) -> int:
        """The most tokens to keep of a prompt of this length, including pinned ones."""
        if self.tokens is not None:
            return min(self.tokens, prompt_tokens)
        if self.ratio is not None:
            return min(prompt_tokens, math.floor(self.ratio * prompt_tokens + 1e-6))
        raise ValueError("a mass budget has no number of tokens; it depends on the scores")


def select_blocks(
    *,
    prompt_tokens: int,
    block_size: int,
    scores: Sequence[float],
    pinned: Sequence[range],
    rescued: Sequence[int],
    budget: Budget,
    radius: int = 0,
    min_scored_tokens: int,
    rescue_cap: float,
    beside_pinned: int = 0,
    continued: Collection[int] = (),
) -> Generator[None, None, tuple[Reason | None, ...]]:
    """Return the reason to keep each block; None for skipped blocks. Works in slices.

    Blocks that overlap `pinned` token ranges are always kept, whole. The rest of the budget, and at least
    `beside_pinned` tokens of it, goes to the others: best scores first. They get `min_scored_tokens` and one
    block in any case. Equal scores go to the lower
    index. Only of the blocks with the lowest score, which a scorer has often not read, those nearer to a
    better block come first. Blocks in `continued` have a neighbour's score. At any point of that order, up to
    a fraction `rescue_cap` of its tokens are `rescued` blocks (given best first).
    With `radius`, each block brings its neighbours, which count against the budget too. Selection stops at
    the first block that does not fit. So the kept tokens never exceed the larger of the budget and the pinned
    blocks plus `min_scored_tokens` or `beside_pinned`, rounded up to blocks.

    A mass budget stops when that fraction of the positive scores of unpinned blocks is kept. 1.0 keeps every
    block with a score above 0. The minimum applies to it too.
    """
    sizes = _sizes(prompt_tokens, block_size)
    _check(scores, rescued, len(sizes), radius, rescue_cap)
    reasons = _pinned(pinned, prompt_tokens, block_size)
    free = [reason is None for reason in reasons]
    order: Iterable[tuple[int, Reason]] = _order(scores, free, sizes, rescued, radius, rescue_cap)
    rest: float = math.inf
    if budget.ratio is not None or budget.tokens is not None:
        rest = budget.allowed(prompt_tokens) - sum(s for s, f in zip(sizes, free, strict=True) if not f)
    yield
    missing: Iterable[bool] = itertools.repeat(True)
    if budget.mass is not None:
        blocks, reasons_of = yield from _listed(order)
        order = zip(blocks, reasons_of, strict=True)
        missing = _mass_is_missing(blocks, scores, budget.mass)
        yield
    bought = 0
    for turn, ((block, reason), wanted) in enumerate(zip(order, missing, strict=False), start=1):
        fits = wanted and (bought + sizes[block] <= rest or bought < beside_pinned)
        if not fits and bought >= max(min_scored_tokens, 1):
            break
        follows = reason is Reason.SCORED and block in continued
        reasons[block] = Reason.CONTINUED if follows else reason
        bought += sizes[block]
        if turn % _SLICE == 0:
            yield
    return tuple(reasons)


def _listed(order: Iterable[tuple[int, Reason]]) -> Generator[None, None, tuple[list[int], list[Reason]]]:
    """Blocks and reasons, apart: garbage collection would scan a list of pairs again and again."""
    blocks: list[int] = []
    reasons: list[Reason] = []
    while some := list(itertools.islice(order, _SLICE)):
        blocks += [block for block, _ in some]
        reasons += [reason for _, reason in some]
        yield
    return blocks, reasons


def _pinned(pinned: Sequence[range], prompt_tokens: int, block_size: int) -> list[Reason | None]:
    """A reason for each block: pinned if it overlaps one of these token ranges, else None."""
    reasons: list[Reason | None] = [None] * -(-prompt_tokens // block_size)
    for tokens in pinned:
        if tokens.step != 1 or not 0 <= tokens.start <= tokens.stop <= prompt_tokens:
            raise ValueError(f"{tokens} is not a range of the prompt's {prompt_tokens} tokens")
        for block in range(tokens.start // block_size, -(-tokens.stop // block_size)) if tokens else ():
            reasons[block] = Reason.PINNED
    return reasons


def _sizes(prompt_tokens: int, block_size: int) -> list[int]:
    if prompt_tokens < 1 or block_size < 1:
        raise ValueError(
            f"prompt_tokens and block_size must be at least 1, got {prompt_tokens} and {block_size}"
        )
    return [min(block_size, prompt_tokens - start) for start in range(0, prompt_tokens, block_size)]


def _check(
    scores: Sequence[float], rescued: Sequence[int], blocks: int, radius: int, rescue_cap: float
) -> None:
    if len(scores) != blocks:
        raise ValueError(f"{blocks} blocks need {blocks} scores, got {len(scores)}")
    if not np.isfinite(np.array(scores, dtype=np.float64)).all():
        block, score = next((b, s) for b, s in enumerate(scores) if not math.isfinite(s))
        raise ValueError(f"the score of block {block} is {score}; scores must be finite")
    for block in rescued:
        if not 0 <= block < blocks:
            raise ValueError(f"rescued block {block} is not one of the {blocks} blocks")
    if radius < 0:
        raise ValueError(f"radius must be at least 0, got {radius}")
    if not 0 <= rescue_cap <= 1:
        raise ValueError(f"rescue_cap must be in [0, 1], got {rescue_cap}")


def _order(
    scores: Sequence[float],
    free: Sequence[bool],
    sizes: Sequence[int],
    rescued: Sequence[int],
    radius: int,
    rescue_cap: float,
) -> Iterator[tuple[int, Reason]]:
    """Yield every unpinned block once, in the order of selection."""
    left = list(free)
    ranked = iter(_ranked(scores))
    saved = [block for block in dict.fromkeys(rescued) if free[block]]
    saved.reverse()
    total = spent_on_rescue = 0
    while True:
        while saved and not left[saved[-1]]:
            saved.pop()
        group = [block for block in _around(saved[-1], radius, len(sizes)) if left[block]] if saved else []
        price = sum(sizes[block] for block in group)
        if group and spent_on_rescue + price <= rescue_cap * (total + price) + 1e-6:
            reason = Reason.RESCUED
            spent_on_rescue += price
        else:
            best = next((block for block in ranked if left[block]), None)
            if best is None:
                return
            reason = Reason.SCORED
            group = [block for block in _around(best, radius, len(sizes)) if left[block]]
        for place, block in enumerate(group):
            left[block] = False
            total += sizes[block]
            yield block, reason if place == 0 else Reason.NEIGHBOUR


def _ranked(scores: Sequence[float]) -> list[int]:
    """Blocks by score, best first; those with the lowest score by their distance to a better block."""
    values = np.array(scores)
    order = np.argsort(-values, kind="stable")
    if (
        len(values) > 1 and (lowest := values.min()) == np.partition(values, 1)[1]
    ):  # many are not scored at all
        hits = np.flatnonzero(values > lowest)
        if len(hits):
            tied = np.flatnonzero(values == lowest)
            after = np.searchsorted(hits, tied)
            left = np.abs(tied - hits[np.maximum(after - 1, 0)])
            right = np.abs(hits[np.minimum(after, len(hits) - 1)] - tied)
            order[len(hits) :] = tied[np.argsort(np.minimum(left, right), kind="stable")]
    return order.tolist()  # type: ignore[no-any-return]


def even_blocks(
    prompt_tokens: int, block_size: int, pinned: Sequence[range], most: int
) -> tuple[Reason | None, ...]:
    """Keep blocks at even distances, and those that overlap `pinned` tokens.

    At most `most` tokens are kept, unless the pinned blocks and one other have more.
    """
    sizes = _sizes(prompt_tokens, block_size)
    reasons = _pinned(pinned, prompt_tokens, block_size)
    free = [block for block, reason in enumerate(reasons) if reason is None]
    left = most - sum(size for size, reason in zip(sizes, reasons, strict=True) if reason)
    fits_whole = sum(sizes[block] for block in free) <= left  # the last block may be shorter
    count = len(free) if fits_whole else min(len(free), max(1, left // block_size))
    for index in range(count):
        reasons[free[(2 * index + 1) * len(free) // (2 * count)]] = Reason.EVEN
    return tuple(reasons)


def _around(block: int, radius: int, blocks: int) -> Iterator[int]:
    """Yield the block, then its neighbours, nearest first: at most all blocks, whatever the radius."""
    yield block
    for distance in range(1, min(radius, max(block, blocks - 1 - block)) + 1):
        for neighbour in (block - distance, block + distance):
            if 0 <= neighbour < blocks:
                yield neighbour


def _mass_is_missing(order: Sequence[int], scores: Sequence[float], mass: float) -> list[bool]:
    """For each block True if the blocks before it hold less than `mass` of the positive scores.

    Sums the missing mass from the end, so that rounding cannot leave a mass of 1.0 unreached.
    """
    if not order:
        return []
    own = np.maximum(np.array(scores)[np.array(order)], 0.0) / len(scores)
    missing = np.cumsum(own[::-1])[::-1]
    return (missing > (1 - mass) * missing[0]).tolist()  # type: ignore[no-any-return]
