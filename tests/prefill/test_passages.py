"""A block passes part of its score to the neighbours that continue its sentence, list or function."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.prefill.passages import LINE, LONGEST_UNIT, PROSE, SENTENCE, SHORT, UNIT, Passages, follow
from skim.prefill.scoring.scorer import run_to_completion

SIZE = 4
LONG = "the men of the boat rowed on and on over a grey sea without a word to each other or to the mate " * 8
"""A sentence that is longer than a paragraph on one line that is one passage."""


class Vocabulary:
    """Tokens are words, runs of newlines, and marks with the quotes that close them."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.looked_up: list[int] = []

    def encode(self, text: str) -> np.ndarray:
        found = re.findall(r" ?\w+|\n+|[.!?:][\"')]*|.", text)
        self.pieces += [piece for piece in dict.fromkeys(found) if piece not in self.pieces]
        return np.array([self.pieces.index(piece) for piece in found], dtype=np.int64)

    def decode(self, runs: Sequence[np.ndarray]) -> list[str]:
        self.looked_up += [token for run in runs for token in run.tolist()]
        return ["".join(self.pieces[token] for token in run.tolist()) for run in runs]


def followed(scores: Sequence[float], carry: np.ndarray) -> list[float]:
    return run_to_completion(follow(scores, carry))


def carry(text: str, size: int = SIZE) -> list[tuple[str, str, float]]:
    """For each edge: the text before it, the text after it, and the part of a score that passes across."""
    words = Vocabulary()
    ids = words.encode(text)
    parts = run_to_completion(Passages(words.decode).carry(ids, size)).tolist()
    edges = range(size, len(ids), size)
    return [(*words.decode([ids[:edge], ids[edge:]]), part) for edge, part in zip(edges, parts, strict=True)]


def inside(text: str, passage: str) -> set[float]:
    """The parts that pass across the edges inside a passage of the text."""
    start = text.index(passage)
    end = start + len(passage)
    found = {part for before, _, part in carry(text) if start < len(before) < end}
    assert found
    return found


def test_a_sentence_continues_up_to_its_end() -> None:
    found = carry(LONG + "and so. They" + LONG.replace("a word to", "a word, to"))
    for before, _, part in found:
        assert part == (0.0 if before.endswith(".") else SENTENCE)


@pytest.mark.parametrize("end", [".", "!", "?", ":", '."', "?')"])
def test_no_passage_crosses_the_end_of_a_sentence(end: str) -> None:
    edges = {before.endswith(end): part for before, _, part in carry(f"{LONG[:-1]}{end} And {LONG}", size=1)}
    assert edges == {True: 0.0, False: SENTENCE}


def test_a_function_is_one_passage() -> None:
    code = "def discount(total):\n    if total > 100:\n        return 15\n    return 0"
    assert inside(f"{LONG}\n\n{code}\n\n{LONG}", code) == {UNIT}


def test_a_list_is_one_passage() -> None:
    rows = "\n".join(f"- station {i}: {i * 7} metres above the sea" for i in range(20))
    assert len(Vocabulary().encode(rows)) > SHORT
    assert inside(f"{LONG}\n\n{rows}\n\n{LONG}", rows) == {UNIT}


def test_a_short_paragraph_is_one_passage_and_a_long_one_is_not() -> None:
    short = "The oil store is locked. Its code is 4417, and the keeper changes it in May."
    assert inside(f"{LONG}\n\n{short}\n\n{LONG}", short) == {UNIT}
    rows = "\n".join(f"{i} {i * 7}" for i in range(LONGEST_UNIT // 2))
    assert UNIT not in inside(rows, rows)


def test_of_a_long_file_a_function_is_one_passage_and_of_a_long_log_a_line_continues() -> None:
    code = "def discount(total):\n    if total > 100:\n        return 15\n    return 0"
    rest = "\n".join(f"# line {i} of the file" for i in range(LONGEST_UNIT // 4))
    assert inside(f"{rest}\n{code}\n{rest}", code) == {UNIT}
    rows = "\n".join(f"{i} worker: {i * 7} tasks of node {i} are done" for i in range(LONGEST_UNIT // 8))
    assert inside(rows, rows) <= {LINE, 0.0}
    assert LINE in inside(rows, rows)


def test_wrapped_prose_is_no_list_of_records() -> None:
    wrapped = "\n".join(["and so the ship went on with all her sails"] * (LONGEST_UNIT // 8))
    assert LINE not in inside(wrapped, wrapped)


@pytest.mark.parametrize("blank", ["\n\n", "\n\n\n"])
def test_no_passage_crosses_a_blank_line(blank: str) -> None:
    """Neither as one token nor as several."""
    for size in range(1, 9):
        for before, _, part in carry(f"one two three{blank}four five six", size):
            assert part == (0.0 if before.endswith(blank) else UNIT)


def plain_carry(pieces: list[str], size: int) -> list[float]:
    """Reference: paragraphs and records are numbered token by token."""
    paragraphs, records, blanks, wraps = [], [], [], []
    number = record = 0
    for place, piece in enumerate(pieces):
        before = pieces[place - 1] if place else ""
        after_newline = "\n" in before
        indented = before.endswith("\n  ") or piece == "  "
        record += after_newline and not indented
        blanks.append(piece.count("\n") > 1 or ("\n" in piece and after_newline))
        ended = any(one in (".", '?"') for one in pieces[max(0, place - 2) : place])
        wraps.append(after_newline and piece[0].islower() and not ended)
        paragraphs.append(number)
        records.append(record)
        number += blanks[-1]
    found = []
    for edge in range(size, len(pieces), size):
        own = [place for place, one in enumerate(paragraphs) if one == paragraphs[edge - 1]]
        line = [place for place, one in enumerate(records) if one == records[edge - 1]]
        lines = 1 + sum("\n" in pieces[place] and not blanks[place] for place in own)
        of_line = sum("\n" in pieces[place] and not blanks[place] for place in line)
        in_line = records[edge] == records[edge - 1] and lines > 2
        last = pieces[edge - 1]
        if paragraphs[edge] != paragraphs[edge - 1]:
            found.append(0.0)
        elif (len(own) <= LONGEST_UNIT and (lines > 2 or len(own) <= SHORT)) or (
            in_line and of_line > 1 and len(line) <= LONGEST_UNIT
        ):
            found.append(UNIT)
        elif in_line and len(line) <= SHORT and sum(wraps[place] for place in own) <= PROSE * lines:
            found.append(LINE)
        else:
            found.append(0.0 if last in (".", '?"') or "\n" in last else SENTENCE)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_texts(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [" a", "b", "  ", ".", '?"', "\n", "\n  ", "\n\n"]
    indents = rng.choice([0.0, 4.0])
    lower, newline, blank = rng.choice([0.0, 40.0]), rng.choice([0.1, 2.0, 8.0]), rng.choice([0.0, 0.3])
    weights = [40, lower, indents, 4, 2, newline, indents, blank]
    words = Vocabulary()
    words.pieces = pieces
    for _ in range(5):
        text = rng.choices(pieces, weights, k=rng.randrange(1, 900))
        ids = np.array([pieces.index(piece) for piece in text])
        size = rng.randrange(1, 40)
        assert run_to_completion(Passages(words.decode).carry(ids, size)).tolist() == plain_carry(text, size)


def test_each_token_is_looked_up_once() -> None:
    words = Vocabulary()
    ids, others = words.encode("one two.\n\nthree " * 9), words.encode("four five\nsix " * 9)
    passages = Passages(words.decode)
    first = run_to_completion(passages.carry(ids, SIZE))
    run_to_completion(passages.carry(others, SIZE))
    assert np.array_equal(run_to_completion(passages.carry(ids, SIZE)), first)
    assert sorted(words.looked_up) == sorted(set(words.looked_up))


@pytest.mark.parametrize(("length", "edges"), [(0, 0), (1, 0), (SIZE, 0), (SIZE + 1, 1)])
def test_one_part_for_each_edge(length: int, edges: int) -> None:
    words = Vocabulary()
    assert len(run_to_completion(Passages(words.decode).carry(words.encode(" x" * length), SIZE))) == edges


# The scores that follow


PARTS = st.sampled_from([0.0, SENTENCE, UNIT])


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[float], np.ndarray]:
    blocks = draw(st.integers(1, 30))
    scores = draw(st.lists(st.floats(0, 1e6), min_size=blocks, max_size=blocks))
    parts = draw(st.lists(PARTS, min_size=blocks - 1, max_size=blocks - 1))
    return scores, np.array(parts)


@given(scored())
def test_no_score_falls_and_none_exceeds_the_best(case: tuple[list[float], np.ndarray]) -> None:
    scores, parts = case
    found = followed(scores, parts)
    assert all(after >= before for before, after in zip(scores, found, strict=True))
    assert max(found) == max(scores)


@given(scored())
def test_following_twice_changes_nothing(case: tuple[list[float], np.ndarray]) -> None:
    scores, parts = case
    found = followed(scores, parts)
    assert followed(found, parts) == found


@given(scored())
def test_no_score_crosses_an_edge_that_nothing_continues_across(case: tuple[list[float], np.ndarray]) -> None:
    scores, parts = case
    edges = [0, *(np.flatnonzero(parts == 0.0) + 1).tolist(), len(scores)]
    apart: list[float] = []
    for a, b in pairwise(edges):
        apart += followed(scores[a:b], parts[a : b - 1])
    assert followed(scores, parts) == apart


@given(scored())
def test_a_score_is_the_largest_part_of_any_block(case: tuple[list[float], np.ndarray]) -> None:
    """Compared with a reference that looks at every pair of blocks."""
    scores, parts = case
    for block, value in enumerate(followed(scores, parts)):
        reach = [
            score * float(np.prod(parts[min(block, other) : max(block, other)]))
            for other, score in enumerate(scores)
        ]
        assert value == pytest.approx(max(reach), rel=1e-9)
