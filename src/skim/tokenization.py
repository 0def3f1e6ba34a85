"""Character offsets and byte letters of a transformers tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from skim.errors import SkimError

Offsets = list[tuple[int, int]]
"""For each token the characters it stands for, `start, end`."""


class OffsetsError(SkimError):
    """A tokenizer without character offsets, such as one without a tokenizer.json."""


def token_ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Asks for nothing else: masks of a long text take as long as its tokens."""
    found = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return list(found["input_ids"])


def encode_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], Offsets]:
    """Token ids of a text, without special tokens, and the characters of each. Raises `OffsetsError`.

    A token without characters has the offsets (0, 0), at any place.
    """
    try:
        found = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(found["input_ids"]), [(int(a), int(b)) for a, b in found["offset_mapping"]]
    except Exception as error:  # tokenizers without offsets refuse them in many ways, or leave them out
        raise OffsetsError(f"the tokenizer has no character offsets: {error!r}") from error


@cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each letter stands for in a byte-level BPE vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
