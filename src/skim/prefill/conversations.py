"""Skimmed prompts that a follow-up question may continue: digests and spans, within a fixed number of bytes.

No token of a prompt is kept. A digest finds the conversation, and the follow-up's own prompt has the tokens.
If digests of different prompts were equal, the prefix cache would not have the follow-up's slots, and nothing
would be reused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from skim.memory.prefix import Namespace
from skim.prefill.plan import Positions

MOST_BYTES = 16 << 20
_ENTRY_BYTES = 1024  # most that an entry takes without its spans and its namespace
_SLICE = 1 << 20  # tokens hashed between two yields


@dataclass(frozen=True)
class Conversation:
    """A skimmed prompt: its length, and the spans of its tokens that were read, in slot order."""

    tokens: int
    block_size: int
    positions: Positions
    spans: np.ndarray  # [spans, 2]: start and stop; none at compact positions, which no follow-up builds on

    def indices(self) -> np.ndarray:
        """The indices of the tokens that were read, in slot order."""
        return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in self.spans)])


@dataclass(frozen=True)
class _Key:
    namespace: Namespace
    tokens: int
    digest: bytes

    @property
    def bytes(self) -> int:
        return _ENTRY_BYTES + 4 * (len(self.namespace.salt) + len(self.namespace.policy))


class Conversations:
    """Remembers conversations within `most_bytes`. The least recently used are forgotten first."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.bytes = 0
        self._most_bytes = most_bytes
        self._found: OrderedDict[_Key, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def lengths(self, namespace: Namespace, prompt_tokens: int) -> set[int]:
        """The lengths of remembered prompts that a prompt of this length may continue."""
        return {
            key.tokens for key in self._found if key.namespace == namespace and key.tokens < prompt_tokens
        }

    def find(self, namespace: Namespace, digests: dict[int, bytes]) -> Conversation | None:
        """The longest remembered prompt with one of these digests, by length."""
        for tokens in sorted(digests, reverse=True):
            key = _Key(namespace, tokens, digests[tokens])
            if (found := self._found.get(key)) is not None:
                self._found.move_to_end(key)
                return found
        return None

    def remember(self, namespace: Namespace, digest: bytes, conversation: Conversation) -> None:
        key = _Key(namespace, conversation.tokens, digest)
        self._forget(key)
        self._found[key] = conversation
        self.bytes += key.bytes + conversation.spans.nbytes
        while self.bytes > self._most_bytes:
            self._forget(next(iter(self._found)))

    def clear(self) -> None:
        self._found.clear()
        self.bytes = 0

    def _forget(self, key: _Key) -> None:
        if (old := self._found.pop(key, None)) is not None:
            self.bytes -= key.bytes + old.spans.nbytes


def digests_of(ids: np.ndarray, lengths: Iterable[int]) -> Generator[None, None, dict[int, bytes]]:
    """Digests of a prompt's beginnings of these lengths, in one pass and in slices."""
    state = hashlib.blake2b(digest_size=16)
    found: dict[int, bytes] = {}
    done = 0
    for length in sorted(lengths):
        while done < length:
            end = min(length, done + _SLICE)
            state.update(ids[done:end].astype(np.uint32).tobytes())
            if end - done == _SLICE:
                yield
            done = end
        found[length] = state.digest()
    return found


def spans_of(indices: Sequence[int]) -> np.ndarray:
    """Runs of neighbouring indices in this order, as start and stop. [spans, 2]"""
    places = np.asarray(indices, dtype=np.int64)
    torn = np.diff(places) != 1
    starts, ends = np.ones((2, len(places)), dtype=bool)
    starts[1:], ends[:-1] = torn, torn
    return np.stack([places[starts], places[ends] + 1], axis=1)
