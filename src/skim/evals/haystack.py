"""Natural text to hide things in, sentence by sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from skim.errors import RequestError


class Haystack:
    """The sentences of a text, on one line each. None comes twice in a document."""

    def __init__(self, text: str) -> None:
        self.sentences = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
        if len(self.sentences) < 2:
            raise RequestError("the text has fewer than two sentences; give a longer --text")

    def read_from(self, rng: random.Random) -> Iterator[str]:
        """Every sentence once, from a random one on, past the end to the beginning."""
        start = rng.randrange(len(self.sentences))
        yield from self.sentences[start:]
        yield from self.sentences[:start]


def insert(sentences: Sequence[str], facts: Sequence[tuple[float, str]], joint: str = " ") -> str:
    """A document with facts between its sentences, each at its depth: the share of characters before it."""
    ends = [0, *accumulate(len(sentence) + len(joint) for sentence in sentences)]
    where = [_nearest(ends, depth * ends[-1]) for depth, _ in facts]
    document: list[str] = []
    for place in range(len(ends)):
        document += [fact for at, (_, fact) in zip(where, facts, strict=True) if at == place]
        document += sentences[place : place + 1]
    return joint.join(document)


def _nearest(ordered: Sequence[int], value: float) -> int:
    return min(range(len(ordered)), key=lambda i: abs(ordered[i] - value))
