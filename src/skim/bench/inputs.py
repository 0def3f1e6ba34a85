"""Prompts of an exact number of tokens: natural text that ends in a question, or random ids for a shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skim.errors import ConfigError
from skim.measure.book import packaged_text

QUESTION = "\n\nQuestion: Who was the captain of the ship, and what became of the whale?\nAnswer:"
ASKING = 32  # tokens at the end of a random prompt that are its question
_FIRST_ID = 256  # below lie bytes and special tokens in most vocabularies
_CHARS = 8  # of English that a token stands for at most, on the average of a book


@dataclass(frozen=True)
class Prompt:
    """Tokens of which the last `asking` are the question."""

    tokens: tuple[int, ...]
    asking: int
    text: str | None = None  # None where the tokens mean nothing

    def __len__(self) -> int:
        return len(self.tokens)


Prompts = Callable[[int, int], Prompt]
"""A prompt of so many tokens, by a number: another number gives another text, the same gives the same."""


def book_prompts(tokenizer: Any, longest: int, seed: int) -> Prompts:
    """Passages of the packaged novel, each with a question behind it. They begin at random places."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    book = encode(packaged_text()[: max(_CHARS * 2 * longest, 100_000)])
    while len(book) < 2 * longest:
        book += book
    question = encode(QUESTION)

    def make(tokens: int, number: int) -> Prompt:
        if tokens < 2 * len(question):
            raise ConfigError(
                f"contexts must have at least {2 * len(question)} tokens, got {tokens}: the question alone "
                f"has {len(question)}"
            )
        start = random.Random(f"{seed} {tokens} {number}").randrange(len(book) - tokens)
        ids = (*book[start : start + tokens - len(question)], *question)
        return Prompt(ids, len(question), str(tokenizer.decode(list(ids), skip_special_tokens=False)))

    return make


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Random ids; the last of them are the question."""
    first = min(_FIRST_ID, vocab_size // 2)

    def make(tokens: int, number: int) -> Prompt:
        draw = random.Random(f"{seed} {tokens} {number}")
        ids = tuple(draw.randrange(first, vocab_size) for _ in range(tokens))
        return Prompt(ids, max(1, min(ASKING, tokens // 4)))

    return make


def several(prompts: Prompts, tokens: int, number: int, count: int) -> Sequence[Prompt]:
    """`count` prompts of one length, all different."""
    return [prompts(tokens, number * 1_000 + index) for index in range(count)]
