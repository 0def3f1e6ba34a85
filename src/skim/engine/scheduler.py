"""The scheduler: one pure function over plain data that decides the rows of the next step.

Decode rows come first, then prefill chunks, all within one token budget. Prompts stand in a *line*, by
arrival and priority, and share a step's prefill tokens:

- The first prompt of the line that can run gets at least half of them. So a prompt of w tokens takes at most
  `w / half` steps, rounded up, after those before it in the line, whatever arrives later.
- *Short* prompts share the rest, the shortest first. A prompt is short if it has at most a quarter of the
  first one's tokens left, and is no less urgent. It takes at most `(w + s) / half` steps, rounded up, where
  s are tokens of still shorter prompts. A prompt that is not short waits for less than 4 w tokens of the
  first one.
- Tokens that are left go to the prompts in line.

A level of priority is worth `LEVEL_SECONDS` of waiting: a request is never overtaken by one that arrives
later than that, times the difference of their priorities. A sequence that has been passed over `aging_steps`
times is aged, and room is reserved for it. So decode rows cannot starve prefill, and small requests cannot
starve a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from skim.memory.manager import blocks_to_allocate

LEVEL_SECONDS = 10.0  # seconds of waiting that one level of priority is worth
SHORT = 4  # a prompt is short if the first of the line has at least this many times its tokens left


def place_in_line(arrived: float, priority: int, order: int) -> tuple[float, int]:
    """The place in the line, lower first. It never changes, so the first can be overtaken only so often."""
    return arrived + priority * LEVEL_SECONDS, order


class Candidate(NamedTuple):
    """An unfinished sequence, as the scheduler sees it."""

    order: int  # identifies it; lower entered the schedule earlier
    running: bool  # has blocks; otherwise it waits for admission
    decoding: bool  # its tokens to compute are generated: one, or several that verify drafts
    pending: int  # tokens still to be computed
    length: int  # computed tokens (of a waiting sequence: those of the cached prefix it would start on)
    blocks: int  # blocks of each layer group it has, or would start on
    copies_tail: bool  # its next write first copies a shared block
    restoring: bool = False  # its blocks are being filled from files: it holds its place and takes no tokens
    revives: int = 0  # evictable blocks that its admission makes unevictable
    ends: int = 0  # of the blocks that the rest of its prompt takes, those given back behind sliding windows
    waited: int = 0  # steps in which it was passed over
    slots: int = 1  # sequences it stands for: n for a prompt with n outputs
    grain: int = 1  # all chunks but the last end at multiples of this many tokens
    priority: int = 0  # lower is more urgent
    arrived: float = 0.0  # seconds, on any clock

    @property
    def place(self) -> tuple[float, int]:
        return place_in_line(self.arrived, self.priority, self.order)


def is_short(candidate: Candidate, first: Candidate) -> bool:
    """True if a prompt may go beside the first of the line: it is short, and no less urgent."""
    return candidate.pending * SHORT <= first.pending and candidate.priority <= first.priority


@dataclass(frozen=True)
class Limits:
    """Limits of one step."""

    tokens: int  # most tokens in one forward
    sequences: int  # most sequences in progress
    block_size: int
    aging_steps: int
    prefill: int | None = None  # most prefill tokens in this step; None for all that decode rows leave
    groups: int = 1  # layer groups: each takes its own blocks
    samples: int | None = None  # most tokens of decode rows, each of which is sampled after; None for all


@dataclass(frozen=True)
class Tick:
    """One decision: the rows of the next step, or a sequence to preempt before deciding again."""

    rows: tuple[tuple[int, int], ...] = ()  # (order, tokens); waiting sequences among them are admitted
    preempt: int | None = None  # order


def blocks_needed(candidate: Candidate, tokens: int, limits: Limits) -> int:
    """Number of blocks to allocate before `candidate` can compute its next `tokens` tokens."""
    end = candidate.length + tokens
    return blocks_to_allocate(end, candidate.blocks, candidate.copies_tail, limits.block_size, limits.groups)


def tokens_that_fit(candidate: Candidate, available: int, limits: Limits) -> int:
    """The most tokens that can be computed with `available` more blocks."""
    each = available // limits.groups
    if each < candidate.copies_tail:
        return 0
    room = (candidate.blocks + each - candidate.copies_tail) * limits.block_size - candidate.length
    return max(0, min(candidate.pending, room))


def chunk(candidate: Candidate, most: int, limits: Limits) -> int:
    """Length of the next prefill chunk: at most `most` tokens, ending at a multiple of `grain`.

    Prefill is guaranteed only half of the token budget. If that is less than a grain, chunks end anywhere.
    """
    tokens = min(candidate.pending, most)
    if tokens == candidate.pending or limits.tokens // 2 < candidate.grain:
        return tokens
    return max(0, tokens - (candidate.length + tokens) % candidate.grain)


def decide_tick(candidates: Sequence[Candidate], available: int, limits: Limits) -> Tick:
    """Return the rows of the next step, or a sequence to preempt first.

    Only the last running sequence of the line is preempted, and the first can always run. So every sequence
    that fits the pool alone is finished in the end.
    """
    line = sorted(candidates, key=lambda c: c.place)
    running = [c for c in line if c.running]
    decodes = sorted((c for c in running if c.decoding), key=lambda c: (-c.waited, c.place))
    prompts = [c for c in line if not c.decoding]

    budget = limits.tokens
    aged = any(c.waited >= limits.aging_steps for c in prompts)
    for_decodes = budget - max(1, budget // 2) if aged else budget
    samples = budget if limits.samples is None else limits.samples

    rows: list[tuple[int, int]] = []
    passed: list[Candidate] = []
    for candidate in decodes:
        if candidate.pending > min(for_decodes, samples):
            passed.append(candidate)
            continue
        needed = blocks_needed(candidate, candidate.pending, limits)
        if needed > available:
            return Tick(preempt=running[-1].order)
        available -= needed
        for_decodes -= candidate.pending
        samples -= candidate.pending
        budget -= candidate.pending
        rows.append((candidate.order, candidate.pending))

    prefill = Prefill(running, prompts, available, limits)
    prefill.share(budget if limits.prefill is None else min(budget, limits.prefill), budget)
    rows += prefill.rows
    budget -= prefill.tokens

    spare = prefill.spare
    for candidate in passed:  # room reserved for prefill that was not used
        needed = blocks_needed(candidate, candidate.pending, limits)
        if min(budget, samples) >= candidate.pending and needed <= max(spare, 0):
            rows.append((candidate.order, candidate.pending))
            samples -= candidate.pending
            spare -= needed
            budget -= candidate.pending
    if any(not c.restoring for c in running) and not rows:  # the room is reserved for prefill, unusable
        if not decodes or blocks_needed(decodes[0], decodes[0].pending, limits) > available:
            return Tick(preempt=running[-1].order)
        rows.append((decodes[0].order, decodes[0].pending))
    return Tick(rows=tuple(rows))


class Prefill:
    """Shares out a step's prefill tokens, within the blocks and places that are left."""

    def __init__(
        self, running: Sequence[Candidate], prompts: Sequence[Candidate], available: int, limits: Limits
    ) -> None:
        self._limits = limits
        self._prompts = prompts
        self._granted: dict[int, int] = {}  # tokens by order
        self._available = available
        promised = sum(self._whole(c) for c in prompts if c.running)
        decoding = sum(1 for c in running if c.decoding)
        # The next blocks of every decode row are spared, so that none has to preempt.
        self.spare = available - promised - decoding * limits.groups
        self._slots = limits.sequences - sum(c.slots for c in running)

    @property
    def rows(self) -> list[tuple[int, int]]:
        return list(self._granted.items())

    @property
    def tokens(self) -> int:
        return sum(self._granted.values())

    def share(self, budget: int, most: int) -> None:
        """Share `budget` tokens. A first chunk that would end inside a grain may take up to `most`."""
        line = self._may_run()
        if not line or budget <= 0:
            return
        first, *others = line
        grain = first.grain - first.length % first.grain
        budget = max(budget, min(most, grain, first.pending))
        self._give(first, max(budget - budget // 2, min(budget, grain)))
        short = [c for c in others if is_short(c, first)]
        for candidate in sorted(short, key=lambda c: (c.pending, c.place)):
            self._give(candidate, budget - self.tokens)
        for candidate in line:
            self._give(candidate, budget - self.tokens)

    def _may_run(self) -> list[Candidate]:
        """The prompts that fit, in line. None of them overtakes an aged one that does not fit."""
        found = []
        for candidate in self._prompts:
            if candidate.restoring:
                continue
            if candidate.running:
                if tokens_that_fit(candidate, self._available, self._limits) > 0:
                    found.append(candidate)
            elif self._fits(candidate):
                found.append(candidate)
            elif candidate.waited >= self._limits.aging_steps:
                later = [c for c in self._prompts if c.running and c.place > candidate.place]
                return [*found, *(c for c in later if not c.restoring)]
        return found

    def _give(self, candidate: Candidate, tokens: int) -> None:
        """Give a prompt up to `tokens` more tokens, and admit it if it waits."""
        before = self._granted.get(candidate.order, 0)
        if not (candidate.running or before or self._fits(candidate)):
            return
        held = blocks_needed(candidate, before, self._limits) + candidate.revives if before else 0
        room = tokens_that_fit(candidate, self._available + held - candidate.revives, self._limits)
        after = chunk(candidate, min(room, before + tokens), self._limits)
        if after <= before:
            return
        self._granted[candidate.order] = after
        self._available -= blocks_needed(candidate, after, self._limits) + candidate.revives - held
        if not candidate.running and not before:
            self.spare -= self._whole(candidate)
            self._slots -= candidate.slots

    def _fits(self, candidate: Candidate) -> bool:
        """True if all of a waiting prompt fits beside what others have been promised."""
        return self._whole(candidate) <= self.spare and candidate.slots <= self._slots

    def _whole(self, candidate: Candidate) -> int:
        """Blocks that the rest of the prompt takes."""
        needed = blocks_needed(candidate, candidate.pending, self._limits)
        return needed + candidate.revives - candidate.ends
