"""Written facts, hidden between the sentences of a natural text, and the questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skim.evals.grading import found_phrases
from skim.evals.haystack import Haystack, insert
from skim.evals.room import Turns
from skim.evals.task import Draw, Grades, Sample
from skim.prefill.pairs import Kind, Pair, held_out

MAX_TOKENS = 32
BLOCK = "\n\n{passage}\n\n"  # a passage of several lines, apart from the sentences around it


class Pairs:
    """Pairs that calibration never sees. Each sample has another text around its pair."""

    kinds = tuple(kind.value for kind in Kind)

    def __init__(self, haystack: Haystack) -> None:
        self._haystack = haystack

    def draw(self, draw: Draw) -> Sample:
        rng = draw.rng
        pair = choose(Kind(draw.kind), draw.number, draw.seed)
        depths = [rng.random() for _ in pair.passages]
        if draw.depth is not None:
            depths[0] = draw.depth
        facts = list(zip(depths, map(set_apart, pair.passages), strict=True))

        def build(sentences: Sequence[str]) -> Turns:
            return ((insert(sentences, facts) + "\n", pair.question),)

        turns = draw.room.fill(self._haystack.sentences_from(rng), build, MAX_TOKENS)
        return Sample(turns, (pair.answer,), MAX_TOKENS, pair.evidence)

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_phrases(sample.expected, reply)}


def choose(kind: Kind, number: int, seed: int) -> Pair:
    """The held-out pair of a sample. All are used once, in an order by the seed, before one is repeated."""
    pairs = held_out(kind)
    order = random.Random(f"{seed}/{kind}").sample(range(len(pairs)), len(pairs))
    return pairs[order[number % len(pairs)]]


def set_apart(passage: str) -> str:
    """A passage as it stands in the text: several lines as a block, others as sentences."""
    return BLOCK.format(passage=passage) if "\n" in passage else passage
