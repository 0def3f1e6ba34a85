"""Slots of one sequence: its prompt tokens that are read, then its generated tokens."""

from __future__ import annotations

import itertools
import math

from skim.memory.prefix import OFFSET_SHIFT
from skim.prefill.reading import Reading

AWAITED = -1  # placeholder for a token that the device has sampled and the host has not read


def slot_key(slot: int, token: int, position: int) -> int:
    """Prefix-tree key of a slot: its token, and the distance between its position and the slot.

    A slot's keys and values depend only on the tokens and positions of this slot and all earlier ones. So two
    sequences may share slots whose keys are equal. A slot after a skipped span has a position above its slot
    number, so it never equals a slot of a dense prompt. Where position equals slot, the key is the token.
    """
    return token + ((position - slot) << OFFSET_SHIFT)


class Slots:
    """Tokens, positions and prefix-tree keys of a sequence's slots. They grow with each generated token."""

    def __init__(self, reading: Reading) -> None:
        self.prompt = len(reading.tokens)
        """Number of slots that hold prompt tokens."""
        self.end = reading.end
        """Position of the next token."""
        self.tokens = list(reading.tokens)
        self.positions: list[int] | None = None
        """None where slot i holds position i."""
        self.awaited = 0
        """Number of tokens at the end that the host has not read, or that are drafts."""
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
        """Number of tokens that are final: the host has read them, and they are not drafts."""
        return len(self.tokens) - self.awaited

    @property
    def is_late(self) -> bool:
        """True if some slot has an earlier position than the one before it."""
        return self._descends_at < math.inf

    def ascend(self, end: int) -> bool:
        """True if positions increase over the slots before `end`. Generated tokens always come last."""
        return end <= self._descends_at

    def expect(self) -> None:
        """Append a slot for a token that the host will read later."""
        if self.positions is not None:
            self.positions.append(self.end)
            self.keys.append(AWAITED)
        self.tokens.append(AWAITED)
        self.awaited += 1
        self.end += 1

    def fill(self, token: int) -> None:
        """Set the first awaited token."""
        slot = self.known
        self.tokens[slot] = token
        if self.positions is not None:
            self.keys[slot] = slot_key(slot, token, self.positions[slot])
        self.awaited -= 1

    def draft(self, slot: int, token: int) -> None:
        """Set an awaited token to a draft. It stays awaited: verification fills it or drops it."""
        self.tokens[slot] = token

    def forget_awaited(self) -> None:
        """Drop the awaited tokens: the sequence has ended before them, or they are rejected drafts."""
        known, self.end = self.known, self.end - self.awaited
        self.awaited = 0
        for entries in (self.tokens, self.keys, self.positions):
            if entries is not None:
                del entries[known:]
