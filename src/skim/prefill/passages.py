"""Passages that continue across the edge of a prompt block, and the scores that follow them.

A block is cut at a token count, not where a thought ends. The rest of a sentence, of a function or of a list
stands in the next block, and it often shares no word with the question. So a block passes a part of its score
on to the neighbours that continue its passage.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from skim.prefill.scoring.decoding import Decode
from skim.prefill.scoring.scorer import run_to_completion

UNIT = 0.8  # part of a score that passes on inside a paragraph of several lines, or a short one
SENTENCE = 0.05  # the same inside a sentence
LONGEST_UNIT = 384  # tokens of the longest paragraph that is one passage
SHORT = 128  # tokens of the longest paragraph on one line that is one passage

_NEWLINE, _BLANK, _END = 1, 2, 4
_SLICE = 8192  # ids looked up between two yields


class Passages:
    """Finds the edges that passages continue across, for one tokenizer."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._marks = np.zeros(0, dtype=np.int8)  # by token id

    def carry(self, ids: np.ndarray, block_size: int) -> np.ndarray:
        """For each edge between two blocks, the part of a score that passes across it. [blocks - 1]"""
        run_to_completion(self.learn(ids))
        marks = self._marks[ids]
        edges = np.arange(block_size, len(ids), block_size)
        newline = (marks & _NEWLINE) != 0
        blank = (marks & _BLANK) != 0
        blank[1:] |= newline[1:] & newline[:-1]
        paragraph = np.cumsum(blank) - blank  # a blank line belongs to the paragraph before it
        tokens = np.bincount(paragraph)
        lines = np.bincount(paragraph, weights=newline & ~blank) + 1
        whole = (tokens <= LONGEST_UNIT) & ((lines > 2) | (tokens <= SHORT))
        before, after = paragraph[edges - 1], paragraph[edges]
        same = before == after
        running = ((marks[edges - 1] & _END) == 0) & ~newline[edges - 1]
        found: np.ndarray = np.where(same & whole[before], UNIT, np.where(same & running, SENTENCE, 0.0))
        return found

    def learn(self, ids: np.ndarray) -> Generator[None, None, None]:
        """Look up the marks of all ids up to the highest, in slices; later prompts need them too."""
        end = int(ids.max()) + 1 if len(ids) else 0
        while len(self._marks) < end:
            more = np.arange(len(self._marks), min(end, len(self._marks) + _SLICE))
            texts = self._decode(np.split(more, len(more)))
            self._marks = np.concatenate([self._marks, np.array(list(map(_mark, texts)), dtype=np.int8)])
            yield


def follow(scores: Sequence[float], carry: np.ndarray) -> list[float]:
    """Raise each block's score to the part of its neighbours' scores that passes on to it."""
    found = list(scores)
    edges = [(block, float(carry[block])) for block in np.flatnonzero(carry).tolist()]
    for block, part in edges:
        found[block + 1] = max(found[block + 1], part * found[block])
    for block, part in reversed(edges):
        found[block] = max(found[block], part * found[block + 1])
    return found


def _mark(text: str) -> int:
    lines = text.count("\n")
    ends = (
        text.rstrip().rstrip("\"')]\u201d\u2019").endswith((".", "!", "?", ":", "\u3002", "\uff01", "\uff1f"))
    )
    return (lines > 0) * _NEWLINE | (lines > 1) * _BLANK | ends * _END
