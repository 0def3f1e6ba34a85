"""Words of texts, and the prompt tokens in which a word can begin; no model.

The lexical scorer compares words. Decoding a whole prompt to look for them is slow. So `WordStarts` searches
the vocabulary instead, once per question, and looks the prompt's tokens up in the result.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence

import numpy as np

# Scripts written without spaces give one word per character; pairs of neighbours then act as words.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")

_ANY = np.uint64(2**64 - 1)
_SLICE = 1 << 19  # tokens between two yields
_AFTER = "\U0010ffff"  # sorts after every continuation
_ODD = "\u03a3\u0130"  # letters whose lower case depends on the next letter, or ends in a combining mark


def words_of(text: str) -> list[str]:
    """The words of a text in order: lower case, split at everything that is neither letter nor digit."""
    return _WORD.findall(text.lower())


# Words that rarely distinguish passages. Document frequencies cover other words that are common in a prompt.
_FUNCTION_WORDS = frozenset(
    words_of(
        """a about all am an and any are as at be been but by can could did do does for from had has have he
        her here his how i if in into is it its me my no not of on or our please s she should so some t than
        that the their them then there these they this those to was we were what when where which who whom
        whose why will with would you your"""
    )
)


def stem(word: str) -> str:
    """One form for `office` and `offices`, `open`, `opened` and `opening`; "" for a function word.

    Light on purpose: a wrong merge costs a little precision. Words with a digit (codes, versions, years) are
    left unchanged.
    """
    if word in _FUNCTION_WORDS:
        return ""
    if len(word) <= 3 or not word.isalpha():
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for suffix in ("ing", "ed", "ly"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
                word = word[:-1]
            break
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


class WordStarts:
    """The pieces of words in every token of a vocabulary, sorted.

    `texts` has the text of each token, or None for a token without one, such as part of a character. Such a
    token may begin any word.
    """

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._unknown = np.zeros(len(texts), dtype=bool)
        self._first = np.zeros(len(texts), dtype=np.uint64)  # the character that continues an open word
        pieces: list[tuple[str, int, bool]] = []  # text, token, True if it ends the token
        for token, text in enumerate(texts):
            if text is None or any(letter in text for letter in _ODD):
                self._unknown[token] = True
                self._first[token] = _ANY
                continue
            lowered = text.lower()
            self._first[token] = _bit(lowered[0]) if lowered else _ANY
            for found in _WORD.finditer(lowered):
                pieces.append((found[0], token, found.end() == len(lowered)))
        pieces.sort()
        self._pieces = [piece for piece, _, _ in pieces]
        self._tokens = np.array([token for _, token, _ in pieces], dtype=np.int64)
        self._ends = np.array([ends for _, _, ends in pieces], dtype=bool)

    def find(self, ids: np.ndarray, beginnings: Sequence[str]) -> Generator[None, None, np.ndarray]:
        """Indices of the tokens in which a word with one of these beginnings can start. Works in slices.

        Finds all of them, and a few false ones. Beginnings are in lower case and no longer than their words.
        """
        if len(ids) and int(ids.max()) >= len(self._first):
            return np.arange(len(ids))
        begins = self._unknown.copy()
        continues = np.zeros_like(self._first)  # bits of the characters that must follow
        for wanted in beginnings:
            whole = slice(bisect_left(self._pieces, wanted), bisect_left(self._pieces, wanted + _AFTER))
            begins[self._tokens[whole]] = True
            for cut in range(1, len(wanted)):
                part = slice(
                    bisect_left(self._pieces, wanted[:cut]), bisect_right(self._pieces, wanted[:cut])
                )
                continues[self._tokens[part][self._ends[part]]] |= _bit(wanted[cut])
        found = [np.arange(0)]
        for start in range(0, len(ids), _SLICE):
            own, after = ids[start : start + _SLICE], ids[start + 1 : start + _SLICE + 1]
            there = begins[own]
            there[: len(after)] |= (continues[own[: len(after)]] & self._first[after]) != 0
            found.append(np.flatnonzero(there) + start)
            yield
        return np.concatenate(found)


def _bit(character: str) -> np.uint64:
    """One of 64 classes of characters. Different characters may share one."""
    return np.uint64(1 << (ord(character) % 64))
