"""Passages that continue across the edge of a prompt block, and the scores that follow them.

A block is cut at a token count, not where a thought ends. The rest of a sentence, of a function or of a list
stands in the next block, and it often shares no word with the question. So a block passes a part of its score
on to the neighbours that continue its passage.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from skim.prefill.scoring.decoding import Decode

UNIT = 0.8  # part of a score that passes on inside a paragraph of several lines, or a short one
SENTENCE = 0.05  # the same inside a sentence
LONGEST_UNIT = 384  # tokens of the longest paragraph that is one passage
SHORT = 128  # tokens of the longest paragraph on one line that is one passage

_NEWLINE, _BLANK, _END = 1, 2, 4
_SLICE = 4096  # ids looked up between two yields
_TOKENS = 1 << 19  # tokens of the prompt between two yields
_EDGES = 1 << 16  # edges between two yields


class Passages:
    """Finds the edges that passages continue across, for one tokenizer."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._marks = np.zeros(0, dtype=np.int8)  # by token id

    def carry(self, ids: np.ndarray, block_size: int) -> Generator[None, None, np.ndarray]:
        """For each edge between two blocks, the part of a score that passes across it. [blocks - 1]"""
        yield from self._learn(ids)
        edges = np.arange(block_size, len(ids), block_size)
        paragraph = np.empty(len(ids), dtype=np.int32)
        lines = np.zeros(len(ids), dtype=bool)
        ended, after_newline = 0, False
        for start in range(0, len(ids), _TOKENS):
            part = slice(start, start + _TOKENS)
            marks = self._marks[ids[part]]
            newline = (marks & _NEWLINE) != 0
            blank = (marks & _BLANK) != 0
            blank |= newline & np.concatenate([[after_newline], newline[:-1]])
            paragraph[part] = ended + np.cumsum(blank) - blank  # a blank line belongs to the one before it
            lines[part] = newline & ~blank
            ended, after_newline = ended + int(blank.sum()), bool(newline[-1])
            yield
        tokens = np.bincount(paragraph)
        yield
        lines_in = np.bincount(paragraph[lines], minlength=len(tokens)) + 1
        yield
        whole = (tokens <= LONGEST_UNIT) & ((lines_in > 2) | (tokens <= SHORT))
        before, after = paragraph[edges - 1], paragraph[edges]
        same = before == after
        last = self._marks[ids[edges - 1]]
        running = (last & (_END | _NEWLINE)) == 0
        found: np.ndarray = np.where(same & whole[before], UNIT, np.where(same & running, SENTENCE, 0.0))
        return found

    def _learn(self, ids: np.ndarray) -> Generator[None, None, None]:
        """Look up the marks of all ids up to the highest, in slices; later prompts need them too."""
        end = int(ids.max()) + 1 if len(ids) else 0
        while len(self._marks) < end:
            more = np.arange(len(self._marks), min(end, len(self._marks) + _SLICE))
            texts = self._decode(np.split(more, len(more)))
            self._marks = np.concatenate([self._marks, np.array(list(map(_mark, texts)), dtype=np.int8)])
            yield


def follow(scores: Sequence[float], carry: np.ndarray) -> Generator[None, None, list[float]]:
    """Raise each block's score to the part of its neighbours' scores that passes on to it."""
    found = list(scores)
    blocks = np.flatnonzero(carry)
    slices = [blocks[first : first + _EDGES] for first in range(0, len(blocks), _EDGES)]
    for some in slices:
        for block, part in zip(some.tolist(), carry[some].tolist(), strict=True):
            found[block + 1] = max(found[block + 1], part * found[block])
        yield
    for some in reversed(slices):
        back = some[::-1]
        for block, part in zip(back.tolist(), carry[back].tolist(), strict=True):
            found[block] = max(found[block], part * found[block + 1])
        yield
    return found


def _mark(text: str) -> int:
    lines = text.count("\n")
    ends = (
        text.rstrip().rstrip("\"')]\u201d\u2019").endswith((".", "!", "?", ":", "\u3002", "\uff01", "\uff1f"))
    )
    return (lines > 0) * _NEWLINE | (lines > 1) * _BLANK | ends * _END
