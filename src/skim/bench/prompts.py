"""Prompts for a server whose tokenizer is not at hand: natural text, cut by characters to about the length.

What a character costs is measured with two short requests, so lengths come out near what was asked and not
on it: the achieved ones are reported. All draws come from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from skim.errors import ConfigError
from skim.measure.book import packaged_text
from skim.measure.report import MeasurementError

SYNTAX = (
    "a number of tokens (512), several of which one is drawn for each prompt (200,800), "
    "`uniform:200-800`, or `lognormal:512,0.5` (median, and sigma of the logarithm)"
)
PLAUSIBLE = (0.3, 20.0)
"""Characters of English that one token can stand for; more, and the server did not read the text."""

GUESS = 4.5  # characters a token of English has in most vocabularies
FIRST = 120  # characters of the first measuring request
LONGEST = 2_048  # tokens the second one has at most


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths in tokens, as they were asked for."""

    text: str
    typical: int
    draw: Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """Lengths from their text on the command line."""
    kind, _, rest = text.rpartition(":")
    try:
        match kind:
            case "":
                values = [int(value) for value in rest.split(",")]
                found = Lengths(text, max(values), lambda rng: rng.choice(values))
                bad = min(values) < 1
            case "uniform":
                low, high = (int(value) for value in rest.split("-"))
                found = Lengths(text, (low + high) // 2, lambda rng: rng.randint(low, high))
                bad = not 1 <= low <= high
            case "lognormal":
                middle, sigma = (float(value) for value in rest.split(","))
                found = Lengths(text, round(middle), lambda rng: _lognormal(rng, middle, sigma))
                bad = not (1 <= middle < math.inf and 0 <= sigma <= 5)
            case _:
                bad = True
    except ValueError:
        bad = True
    if bad:
        raise ConfigError(f"--prompt-tokens: {text!r} are no lengths of at least 1 token; write {SYNTAX}")
    return found


def _lognormal(rng: random.Random, middle: float, sigma: float) -> int:
    return max(1, round(middle * math.exp(rng.gauss(0, sigma))))


@dataclass(frozen=True)
class Scale:
    """What a text of some characters has in tokens at one server."""

    per_char: float
    overhead: float  # of the chat template, or the token that begins a text

    def tokens(self, chars: int) -> float:
        return self.overhead + self.per_char * chars

    def chars(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.per_char))


def second_measure(first_tokens: int, wanted: int) -> int:
    """Characters of the second measuring request: near the prompts to come, but not long."""
    most = min(wanted, LONGEST)
    return max(4 * FIRST, round(most * FIRST / max(first_tokens, FIRST / GUESS)))


def fit_scale(short: tuple[int, int], long: tuple[int, int]) -> Scale:
    """The line through two texts' (characters, tokens). A server that did not read them is told by it."""
    per_char = (long[1] - short[1]) / (long[0] - short[0])
    if not 1 / PLAUSIBLE[1] <= per_char <= 1 / PLAUSIBLE[0]:
        raise MeasurementError(
            f"prompt ignored: the server counts {short[1]} prompt tokens for {short[0]} characters and "
            f"{long[1]} for {long[0]}; it cut, skipped or did not count the text"
        )
    return Scale(per_char, max(0.0, short[1] - per_char * short[0]))


class Book:
    """Natural text without end, from the packaged novel."""

    def __init__(self) -> None:
        self._text = packaged_text()

    def passage(self, rng: random.Random, chars: int) -> str:
        """About `chars` characters from the beginning of a random word on, whole words only."""
        start = self._text.find(" ", rng.randrange(len(self._text) - 1_000)) + 1
        turned = self._text[start:] + "\n\n"
        while len(turned) < chars + 1_000:
            turned += self._text
        return whole_words(turned, chars)


def whole_words(text: str, chars: int) -> str:
    """The beginning of a text up to the end of the word that `chars` characters reach."""
    end = chars
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[:end]


def make_prompts(
    book: Book, rng: random.Random, lengths: Lengths, scale: Scale, count: int, shared: float
) -> list[str]:
    """Prompts of which the first `shared` is the same text, and the rest from random places.

    A shorter prompt shares the beginning of what a longer one shares.
    """
    chars = [scale.chars(lengths.draw(rng)) for _ in range(count)]
    common = book.passage(rng, round(max(chars) * shared)) if shared else ""
    prompts = []
    for each in chars:
        begin = whole_words(common, round(each * shared)) if shared else ""
        left = each - len(begin) - 1
        prompts.append(begin if shared and left < 1 else f"{begin} {book.passage(rng, left)}".strip())
    return prompts
