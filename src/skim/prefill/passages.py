"""Passages that continue across the edge of a prompt block, and the scores that follow them.

A block is cut at a token count, not where a thought ends. The rest of a sentence, of a function or of a list
stands in the next block, and it often shares no word with the question. So a block passes a part of its score
on to the neighbours that continue its passage.

A paragraph that is short enough is one passage. A longer one may be a file, a log or a table without blank
lines: its passages are *records*, a line and the indented lines after it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from skim.prefill.scoring.decoding import Decode

UNIT = 0.8  # part of a score that passes on inside a paragraph of several lines, or a short one
LINE = 0.2  # the same inside a line of a log or a table
SENTENCE = 0.05  # the same inside a sentence
PROSE = (
    0.25  # part of the lines that end and go on inside a sentence, from which a paragraph is wrapped prose
)
LONGEST_UNIT = 384  # tokens of the longest paragraph that is one passage
SHORT = 128  # tokens of the longest paragraph on one line that is one passage

_NEWLINE, _BLANK, _END, _INDENTS, _INDENTED, _LOWER = 1, 2, 4, 8, 16, 32
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
        paragraph, record = np.empty((2, len(ids)), dtype=np.int32)
        lines, wraps = np.zeros((2, len(ids)), dtype=bool)
        paragraphs = records = last = ending = 0  # `ending`: marks before those of `last`
        for start in range(0, len(ids), _TOKENS):
            part = slice(start, start + _TOKENS)
            marks = self._marks[ids[part]]
            before = np.concatenate([[last], marks[:-1]])
            earlier = np.concatenate([[ending, last], marks[:-2]])[: len(marks)]
            newline, after_newline = ((some & _NEWLINE) != 0 for some in (marks, before))
            blank = ((marks & _BLANK) != 0) | (newline & after_newline)
            indented = ((before & _INDENTS) != 0) | ((marks & _INDENTED) != 0)
            paragraph[part] = paragraphs + np.cumsum(blank) - blank  # a blank line belongs to the one before
            record[part] = records + np.cumsum(after_newline & ~indented)
            lines[part] = newline & ~blank
            wraps[part] = after_newline & ((marks & _LOWER) != 0) & (((before | earlier) & _END) == 0)
            paragraphs, records = paragraphs + int(blank.sum()), int(record[part][-1])
            ending, last = int(before[-1]), int(marks[-1])
            yield
        tokens, of_record = np.bincount(paragraph), np.bincount(record)
        yield
        lines_in = np.bincount(paragraph[lines], minlength=len(tokens)) + 1
        yield
        wrapped = np.bincount(paragraph[wraps], minlength=len(tokens)) > PROSE * lines_in
        yield
        lines_of = np.bincount(record[lines], minlength=len(of_record))
        yield
        edges = np.arange(block_size, len(ids), block_size)
        own, line = paragraph[edges - 1], record[edges - 1]
        same = own == paragraph[edges]
        running = same & ((self._marks[ids[edges - 1]] & (_END | _NEWLINE)) == 0)
        inside = same & (line == record[edges]) & (lines_in[own] > 2)
        whole = (tokens <= LONGEST_UNIT) & ((lines_in > 2) | (tokens <= SHORT))
        found: np.ndarray = np.select(
            [
                same & whole[own],
                inside & (lines_of[line] > 1) & (of_record[line] <= LONGEST_UNIT),
                inside & (of_record[line] <= SHORT) & ~wrapped[own],
                running,
            ],
            [UNIT, UNIT, LINE, SENTENCE],
            0.0,
        )
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
    last = text.rpartition("\n")[2]  # what stands on the line that the token begins
    indents = lines > 0 and last != "" and last.isspace()
    indented = not lines and (text.isspace() or text.startswith(("\t", "  ")))
    return (
        (lines > 0) * _NEWLINE
        | (lines > 1) * _BLANK
        | ends * _END
        | indents * _INDENTS
        | indented * _INDENTED
        | text[:1].islower() * _LOWER
    )
