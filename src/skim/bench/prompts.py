"""Prompts for a server whose tokenizer is unknown: natural text, cut by characters to an approximate length.

Two short requests measure the server's characters per token. Lengths are close to the requested ones but not
exact, so the achieved ones are reported. All draws come from the seed.
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
    "a number of tokens (512), a list from which each prompt draws one (200,800), "
    "`uniform:200-800`, or `lognormal:512,0.5` (median, and sigma of the logarithm)"
)
PLAUSIBLE = (0.3, 20.0)
"""Range of characters per token for English. Outside it, the server did not read the text."""

GUESS = 4.5  # characters per token of English in most vocabularies
FIRST = 120  # characters of the first measuring request
LONGEST = 2_048  # maximum tokens of the second one


@dataclass(frozen=True)
class Lengths:
    """Distribution of prompt lengths in tokens, with its command-line spelling."""

    text: str
    typical: int
    draw: Callable[[random.Random], int]


def parse_lengths(text: str) -> Lengths:
    """Parse prompt lengths from the command line."""
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
        raise ConfigError(f"--prompt-tokens: {text!r} is not a length of at least 1 token; write {SYNTAX}")
    return found


def _lognormal(rng: random.Random, middle: float, sigma: float) -> int:
    return max(1, round(middle * math.exp(rng.gauss(0, sigma))))


@dataclass(frozen=True)
class Scale:
    """Linear conversion between characters and tokens at one server."""

    per_char: float
    overhead: float  # tokens of the chat template, or a BOS token

    def tokens(self, chars: int) -> float:
        return self.overhead + self.per_char * chars

    def chars(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.per_char))


def second_measure(first_tokens: int, wanted: int) -> int:
    """Characters of the second measuring request: as long as the prompts, up to a limit."""
    most = min(wanted, LONGEST)
    return max(4 * FIRST, round(most * FIRST / max(first_tokens, FIRST / GUESS)))


def fit_scale(short: tuple[int, int], long: tuple[int, int]) -> Scale:
    """The line through two texts' (characters, tokens). Raise if its slope is implausible for read text."""
    per_char = (long[1] - short[1]) / (long[0] - short[0])
    if not 1 / PLAUSIBLE[1] <= per_char <= 1 / PLAUSIBLE[0]:
        raise MeasurementError(
            f"prompt ignored: the server counts {short[1]} prompt tokens for {short[0]} characters and "
            f"{long[1]} for {long[0]}; it cut, skipped or did not count the text"
        )
    return Scale(per_char, max(0.0, short[1] - per_char * short[0]))


class Book:
    """Endless natural text from the packaged novel."""

    def __init__(self) -> None:
        self._text = packaged_text()

    def passage(self, rng: random.Random, chars: int) -> str:
        """About `chars` characters of whole words, starting at a random word."""
        start = self._text.find(" ", rng.randrange(len(self._text) - 1_000)) + 1
        turned = self._text[start:] + "\n\n"
        while len(turned) < chars + 1_000:
            turned += self._text
        return whole_words(turned, chars)


def whole_words(text: str, chars: int) -> str:
    """The first `chars` characters of a text, extended to the end of the last word."""
    end = chars
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[:end]


def make_prompts(
    book: Book, rng: random.Random, lengths: Lengths, scale: Scale, count: int, shared: float
) -> list[str]:
    """Prompts whose first `shared` fraction is the same text; the rest is from random places.

    The shared part of a shorter prompt is a prefix of a longer prompt's shared part.
    """
    chars = [scale.chars(lengths.draw(rng)) for _ in range(count)]
    common = book.passage(rng, round(max(chars) * shared)) if shared else ""
    prompts = []
    for each in chars:
        begin = whole_words(common, round(each * shared)) if shared else ""
        left = each - len(begin) - 1
        prompts.append(begin if shared and left < 1 else f"{begin} {book.passage(rng, left)}".strip())
    return prompts
