"""Bad words as runs of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skim.errors import RequestError, shown


def encode_words(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word, alone and after a space. The same text in other tokens is not covered."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens:
                raise RequestError(f"bad_words: {shown(word)} has no tokens; remove it", fields="bad_words")
            found[tokens] = None
    return tuple(found)
