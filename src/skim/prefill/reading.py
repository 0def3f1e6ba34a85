"""What of a prompt is computed: a token for every slot, and where in the prompt it stands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_OFFSET_SHIFT = 32  # token ids are smaller than this many bits
AWAITED = -1  # stands for a token that the device has drawn and the host has not seen yet


def slot_key(slot: int, token: int, position: int) -> int:
    """What the prefix tree compares in a slot: the token, and how far its position is from the slot.

    A slot's keys and values follow from its token, its position, and the same of all slots before it. So two
    sequences whose slots have equal keys may share them, exactly; and a slot after a skipped span, which
    stands further along in the prompt than in memory, never equals a slot of a prompt that was read in full.
    There the key is the token itself.
    """
    return token + ((position - slot) << _OFFSET_SHIFT)


@dataclass(frozen=True)
class Reading:
    """The slots a prompt fills. `positions` is None where slot i holds position i."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...] | None = None

    @classmethod
    def of(cls, prompt: Sequence[int], indices: Sequence[int]) -> Reading:
        """The prompt's tokens at `indices`, in this order, at their own positions."""
        tokens = tuple(prompt[index] for index in indices)
        in_place = all(slot == index for slot, index in enumerate(indices))
        return cls(tokens, None if in_place else tuple(indices))

    @property
    def end(self) -> int:
        """The position after the last one."""
        return len(self.tokens) if self.positions is None else max(self.positions, default=-1) + 1

    def slots(self) -> Slots:
        """A sequence's own slots, to go on with."""
        return Slots(self)


class Slots:
    """What a sequence's slots hold: the tokens that are read of its prompt, then those it generates."""

    def __init__(self, reading: Reading) -> None:
        self.prompt = len(reading.tokens)
        self.end = reading.end
        """The position of the next token."""
        self.tokens = list(reading.tokens)
        self.positions: list[int] | None = None
        self.awaited = 0
        """How many of the last tokens the host has not seen yet."""
        self.keys = self.tokens
        if reading.positions is not None:
            self.positions = list(reading.positions)
            if len(self.positions) != len(self.tokens):
                raise AssertionError(f"{len(self.positions)} positions for {len(self.tokens)} tokens")
            self.keys = list(map(slot_key, range(len(self.tokens)), self.tokens, self.positions))
        pairs = enumerate(itertools.pairwise(self.positions or ()), start=1)
        self._descends_at = next((slot for slot, (a, b) in pairs if a >= b), math.inf)

    @property
    def known(self) -> int:
        """How many tokens there are before the first one that is awaited."""
        return len(self.tokens) - self.awaited

    def ascend(self, end: int) -> bool:
        """Whether the slots before `end` stand at ascending positions. Generated tokens come last in both."""
        return end <= self._descends_at

    def expect(self) -> None:
        """There is a next token, which the host has yet to see."""
        if self.positions is not None:
            self.positions.append(self.end)
            self.keys.append(AWAITED)
        self.tokens.append(AWAITED)
        self.awaited += 1
        self.end += 1

    def fill(self, token: int) -> None:
        """The first of the awaited tokens has come."""
        slot = self.known
        self.tokens[slot] = token
        if self.positions is not None:
            self.keys[slot] = slot_key(slot, token, self.positions[slot])
        self.awaited -= 1

    def forget_awaited(self) -> None:
        """The sequence has ended: what was computed beyond its last token is not part of it."""
        known, self.end = self.known, self.end - self.awaited
        self.awaited = 0
        for entries in (self.tokens, self.keys, self.positions):
            if entries is not None:
                del entries[known:]
