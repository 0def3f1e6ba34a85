"""Prompts of an exact number of tokens: natural text that ends in a question, or random ids for a shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skim.errors import ConfigError
from skim.measure.book import packaged_text

QUESTION = "\n\nQuestion: Who was the captain of the ship, and what became of the whale?\nAnswer:"
ASKING = 32  # tokens at the end of a random prompt that form its question
_FIRST_ID = 256  # lower ids are bytes and special tokens in most vocabularies
_CHARS = 8  # upper bound for a book's average characters per token


@dataclass(frozen=True)
class Prompt:
    """A prompt whose last `asking` tokens are the question."""

    tokens: tuple[int, ...]
    asking: int
    text: str | None = None  # None for random tokens

    def __len__(self) -> int:
        return len(self.tokens)


Prompts = Callable[[int, int], Prompt]
"""Makes a prompt from its length in tokens and a number. Equal numbers give equal prompts."""


def book_prompts(tokenizer: Any, longest: int, seed: int) -> Prompts:
    """Passages from random places of the packaged novel, each followed by a question."""

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
    """Random token ids, the last of which are the question."""
    first = min(_FIRST_ID, vocab_size // 2)

    def make(tokens: int, number: int) -> Prompt:
        draw = random.Random(f"{seed} {tokens} {number}")
        ids = tuple(draw.randrange(first, vocab_size) for _ in range(tokens))
        return Prompt(ids, max(1, min(ASKING, tokens // 4)))

    return make


def several(prompts: Prompts, tokens: int, number: int, count: int) -> Sequence[Prompt]:
    """`count` prompts of one length, all different."""
    return [prompts(tokens, number * 1_000 + index) for index in range(count)]
