"""Natural text in which tasks hide facts, sentence by sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from skim.errors import RequestError


class Haystack:
    """The sentences of a text, one line each. A document uses each at most once."""

    def __init__(self, text: str) -> None:
        self.sentences = re.split(r"(?<=[.!?]) ", " ".join(text.split()))
        if len(self.sentences) < 2:
            raise RequestError("the text has fewer than two sentences; give a longer --text")

    def sentences_from(self, rng: random.Random) -> Iterator[str]:
        """Every sentence once, starting at a random one and wrapping around at the end."""
        start = rng.randrange(len(self.sentences))
        yield from self.sentences[start:]
        yield from self.sentences[:start]


def insert(sentences: Sequence[str], facts: Sequence[tuple[float, str]], separator: str = " ") -> str:
    """Insert facts between sentences, each at its depth: the fraction of characters before it."""
    ends = [0, *accumulate(len(sentence) + len(separator) for sentence in sentences)]
    where = [_nearest(ends, depth * ends[-1]) for depth, _ in facts]
    document: list[str] = []
    for place in range(len(ends)):
        document += [fact for at, (_, fact) in zip(where, facts, strict=True) if at == place]
        document += sentences[place : place + 1]
    return separator.join(document)


def _nearest(ordered: Sequence[int], value: float) -> int:
    return min(range(len(ordered)), key=lambda i: abs(ordered[i] - value))
