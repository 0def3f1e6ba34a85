"""Frequent words: find the three most frequent words in a long list of made-up words."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from skim.errors import RequestError
from skim.evals.grading import found_words
from skim.evals.task import Draw, Grades, Sample, Task

ASKED = 3
WORDS = 60
STEEPNESS = 2.0  # the k-th word is k ** -STEEPNESS times as frequent as the first
LEAD = "Below is a long list of words.\n"
QUESTION = "Which three words come most often in the list? Answer with the three words only."
MAX_TOKENS = 32
ATTEMPTS = 32


class Count(Task):
    """Score: the fraction of the three right words in the reply.

    No single passage has the answer, and a fair sample of the list answers as well as the whole. So it shows
    the cost of skipping where all passages matter equally.
    """

    name = "count"
    help = "the most frequent words of a long list"
    kinds = ("words",)
    default_kinds = kinds
    source = None
    has_evidence = False

    def __init__(self, source: str) -> None:
        pass

    def draw(self, draw: Draw) -> Sample:
        for _ in range(ATTEMPTS):
            turns = draw.room.fill(_stream(draw.rng), _turns, MAX_TOKENS)
            counts = Counter(turns[0][0].removeprefix(LEAD).split()).most_common(ASKED + 1)
            if len(counts) > ASKED and counts[ASKED - 1][1] > counts[ASKED][1]:
                return Sample(turns, tuple(word for word, _ in counts[:ASKED]), MAX_TOKENS)
        raise RequestError(
            f"a context of {draw.room.context} tokens is too short to distinguish its {ASKED} most frequent "
            "words from the next one; raise --contexts"
        )

    def grade(self, sample: Sample, reply: str) -> Grades:
        return {"score": found_words(sample.expected, reply)}


def _turns(words: Sequence[str]) -> tuple[tuple[str, str]]:
    return ((f"{LEAD}{' '.join(words)}\n", QUESTION),)


def _stream(rng: random.Random) -> Iterator[str]:
    """An endless stream of words, a few of them much more frequent than the others."""
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = [
        "".join(parts) for parts in rng.sample(list(itertools.product(syllables[::3], syllables)), WORDS)
    ]
    weights = [rank**-STEEPNESS for rank in range(1, WORDS + 1)]
    while True:
        yield from rng.choices(words, weights, k=64)
