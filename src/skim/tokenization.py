"""Token ids, character offsets and byte letters of a transformers tokenizer.

A tokenizer holds Python's lock while it converts its result: nearly two seconds for the offsets of 15 MB, in
which no other thread runs. So long texts are encoded in pieces that overlap. Neighbours must agree on the
tokens around their seam. Otherwise the text is encoded as a whole.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from skim.errors import SkimError

Offsets = np.ndarray
"""For each token the characters it stands for: start and end. [tokens, 2]"""

PIECE = 2**16  # characters in a piece of a long text
OVERLAP = 256  # characters that a piece shares with the piece before it, and with the next
AGREEING = 16  # tokens on each side of a seam that must be the same in both pieces
_SAMPLE = 2**13  # characters that are also encoded as a whole, to check this text with this tokenizer
_SEAM = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\n)(?=[^\W\d_])|(?<=[。！？，、])(?=[^\W\d_])")  # noqa: RUF001


class OffsetsError(SkimError):
    """A tokenizer without character offsets, such as one without a tokenizer.json."""


def token_ids(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text of any length."""
    found = _in_pieces(tokenizer, text, with_offsets=False)
    if found is None:
        return list(_encoded(tokenizer, text, add_special_tokens=add_special_tokens)["input_ids"])
    ids, _ = found
    if add_special_tokens:
        sample = text[:OVERLAP]
        marked = list(_encoded(tokenizer, sample, add_special_tokens=True)["input_ids"])
        plain = list(_encoded(tokenizer, sample)["input_ids"])
        before = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
        ids[:0], ids[len(ids) :] = marked[:before], marked[before + len(plain) :]
    return ids


def encode_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], Offsets]:
    """Token ids of a text, without special tokens, and the characters of each. Raises `OffsetsError`.

    A token without characters has the offsets (0, 0), at any place.
    """
    try:
        pieces = _in_pieces(tokenizer, text, with_offsets=True)
        if pieces is not None:
            return pieces
        found = _encoded(tokenizer, text, return_offsets_mapping=True)
        return list(found["input_ids"]), _array(found["offset_mapping"])
    except Exception as error:  # tokenizers without offsets refuse them in many ways, or leave them out
        raise OffsetsError(f"the tokenizer has no character offsets: {error!r}") from error


def _encoded(tokenizer: Any, text: str, *, add_special_tokens: bool = False, **options: Any) -> Any:
    """Masks are left out: for a long text they take as long as its ids."""
    return tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
        **options,
    )


def _array(pairs: Any) -> Offsets:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


# -- pieces


def _in_pieces(
    tokenizer: Any, text: str, *, with_offsets: bool, size: int = PIECE
) -> tuple[list[int], Offsets] | None:
    """Ids and offsets of a long text, without special tokens; None if it must be encoded as a whole."""
    if len(text) <= 2 * size or not getattr(tokenizer, "is_fast", False):
        return None
    if size == PIECE:
        sample = text[:_SAMPLE]
        found = _in_pieces(tokenizer, sample, with_offsets=False, size=_SAMPLE // 16)
        if found is None or found[0] != list(_encoded(tokenizer, sample)["input_ids"]):
            return None
    ids: list[int] = []
    offsets: list[Offsets] = []
    last: _Piece | None = None
    for start, end in pairwise(seams(text, size)):
        piece = _Piece(tokenizer, text, start, end)
        if last is not None and not last.agrees_with(piece):
            return None
        if piece.first is None or piece.end is None:
            return None
        ids += piece.ids[piece.first : piece.end]
        if with_offsets:
            own = _array(piece.encoding.offsets[piece.first : piece.end])
            offsets.append(np.where(own[:, 1:] > 0, own + piece.low, 0))
        last = piece
    return ids, np.concatenate(offsets) if offsets else _array([])


def seams(text: str, size: int) -> list[int]:
    """Places to cut a text, with its beginning and its end. Pieces have `size` to twice `size` characters."""
    found = [0]
    while len(text) - found[-1] > 2 * size:
        at = found[-1] + size
        match = _SEAM.search(text, at, at + size - OVERLAP)
        found.append(match.start() if match is not None else at)
    return [*found, len(text)]


class _Piece:
    """The text from `start` to `end`, encoded with some text before and after it."""

    def __init__(self, tokenizer: Any, text: str, start: int, end: int) -> None:
        self.low = max(0, start - OVERLAP)
        high = min(len(text), end + OVERLAP)
        found = _encoded(tokenizer, text[self.low : high])
        self.ids: list[int] = found["input_ids"]
        self.encoding = found.encodings[0]
        self.first = 0 if start == 0 else self._token_at(start)
        self.end = len(self.ids) if end == len(text) else self._token_at(end)

    def _token_at(self, seam: int) -> int | None:
        """The token of the character after the seam: the seam itself may be a space that no token claims."""
        found = self.encoding.char_to_token(seam + 1 - self.low)
        return int(found) if found is not None else None

    def agrees_with(self, after: _Piece) -> bool:
        """True if both pieces have the same tokens around the seam between them."""
        if self.end is None or after.first is None:
            return False
        mine, others = self._around(self.end), after._around(after.first)
        return mine == others and len(mine) == 2 * AGREEING

    def _around(self, token: int) -> list[tuple[int, int, int]]:
        """Ids and places of the tokens around `token`."""
        found = []
        for index in range(max(0, token - AGREEING), min(len(self.ids), token + AGREEING)):
            a, b = self.encoding.token_to_chars(index) or (0, 0)
            found.append((self.ids[index], a + self.low, b + self.low))
        return found


# -- bytes


@cache
def byte_alphabet() -> dict[str, int]:
    """The byte that each letter stands for in a byte-level BPE vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
