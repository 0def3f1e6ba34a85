"""Where words that are looked for may begin in a prompt, by its tokens alone: no text is put together.

What a token can begin is known from its text. So the vocabulary is searched, once for each question, instead
of the prompt, and the prompt's tokens are looked up in what was found.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from skim.prefill.scoring.words import WORD

_ANY = np.uint64(2**64 - 1)
_AFTER = "\U0010ffff"  # sorts behind all that goes on
_ODD = "\u03a3\u0130"  # letters whose lower case depends on what follows, or ends in a mark


class WordStarts:
    """The pieces of words in every token of a vocabulary, in order.

    `texts` are the tokens' own; None for one that has no text by itself, such as a part of a character: that
    one may begin anything.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._unknown = np.zeros(len(texts), dtype=bool)
        self._first = np.zeros(len(texts), dtype=np.uint64)  # what it goes on with, where a word goes on
        pieces: list[tuple[str, int, bool]] = []  # text, token, whether it is the token's end
        for token, text in enumerate(texts):
            if text is None or any(letter in text for letter in _ODD):
                self._unknown[token] = True
                self._first[token] = _ANY
                continue
            lowered = text.lower()
            self._first[token] = _bit(lowered[0]) if lowered else _ANY
            for found in WORD.finditer(lowered):
                pieces.append((found[0], token, found.end() == len(lowered)))
        pieces.sort()
        self._pieces = [piece for piece, _, _ in pieces]
        self._tokens = np.array([token for _, token, _ in pieces], dtype=np.int64)
        self._ends = np.array([ends for _, _, ends in pieces], dtype=bool)

    def find(self, ids: np.ndarray, beginnings: Sequence[str]) -> np.ndarray:
        """The places of all tokens in which a word with one of these beginnings starts, and of a few others.

        Beginnings are in lower case and no longer than the words they stand for.
        """
        if len(ids) and int(ids.max()) >= len(self._first):
            return np.arange(len(ids))
        begins = self._unknown.copy()
        goes_on = np.zeros_like(self._first)  # with which characters it would
        for wanted in beginnings:
            whole = slice(bisect_left(self._pieces, wanted), bisect_left(self._pieces, wanted + _AFTER))
            begins[self._tokens[whole]] = True
            for cut in range(1, len(wanted)):
                part = slice(
                    bisect_left(self._pieces, wanted[:cut]), bisect_right(self._pieces, wanted[:cut])
                )
                goes_on[self._tokens[part][self._ends[part]]] |= _bit(wanted[cut])
        there = begins[ids]
        there[:-1] |= (goes_on[ids[:-1]] & self._first[ids[1:]]) != 0
        return np.flatnonzero(there)


def _bit(character: str) -> np.uint64:
    """One of 64 kinds of characters: different ones may share a kind."""
    return np.uint64(1 << (ord(character) % 64))
