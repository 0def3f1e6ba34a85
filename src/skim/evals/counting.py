"""Counts tokens of texts. Drawing long documents counts the same sentences again and again."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

LONG = 2**16  # characters of a text that is worth counting in pieces
_CACHED_PIECES = 2**17
_SEAMS = re.compile(r"(?<=[.!?])(?= )|(?<=\S\n)(?=\S)")


class Counter:
    """Token counts by a tokenizer, with a cache for short texts.

    A long text is counted as the sum over its sentences and lines. Most tokenizers never join characters
    across these seams. The first long text is also counted as a whole. If the two counts differ, all texts
    are counted as a whole.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._whole = count
        self._adds_up: bool | None = None  # None: not checked yet
        self.piece = lru_cache(_CACHED_PIECES)(count)

    def text(self, text: str) -> int:
        """Tokens in a text of any length."""
        if len(text) < LONG or self._adds_up is False:
            return self._whole(text)
        total = sum(map(self.piece, _SEAMS.split(text)))
        if self._adds_up is None:
            whole = self._whole(text)
            self._adds_up = total == whole
            return whole
        return total
