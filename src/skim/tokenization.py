"""Token ids, character offsets and byte letters of a transformers tokenizer.

A tokenizer holds Python's lock while it converts its result: nearly two seconds for the offsets of 15 MB, in
which no other thread runs. So long texts are encoded in pieces that overlap. Neighbours must agree on the
tokens around their seam. Neighbours that disagree, as in a long run of dashes, are joined. If joined pieces
grow too long, the text is encoded as a whole.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from skim.errors import SkimError

Offsets = np.ndarray
"""For each token the characters it stands for: start and end. [tokens, 2]"""

PIECE = 2**16  # characters in a piece of a long text
OVERLAP = 256  # characters that a piece shares with the piece before it, and with the next
AGREEING = 16  # tokens on each side of a seam that must be the same in both pieces
JOINED = 16  # a joined piece has at most this many times the characters of a piece
_SAMPLE = 2**13  # characters that are also encoded as a whole, to check this text with this tokenizer
_SAMPLES = 16  # samples taken until one can be cut
_SAMPLE_PIECES = 4  # a sample of fewer pieces proves too little
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


def _in_pieces(tokenizer: Any, text: str, *, with_offsets: bool) -> tuple[list[int], Offsets] | None:
    """Ids and offsets of a long text, without special tokens; None if it must be encoded as a whole."""
    if len(text) <= 2 * PIECE or not getattr(tokenizer, "is_fast", False):
        return None
    return _cut(tokenizer, text, PIECE, with_offsets=with_offsets) if _can_cut(tokenizer, text) else None


def _can_cut(tokenizer: Any, text: str) -> bool:
    """True if the pieces of a sample have the tokens of the whole sample.

    If too few neighbours agree, as in a run of dashes, another sample is taken. Places are random, so that no
    text can have such runs at all of them.
    """
    for _ in range(_SAMPLES):
        start = random.randrange(max(1, len(text) - _SAMPLE))
        sample = text[start : start + _SAMPLE]
        pieces = list(_agreeing(tokenizer, sample, _SAMPLE // 16))
        if None not in pieces and len(pieces) >= _SAMPLE_PIECES:
            ids = [token for piece in pieces if piece is not None for token in piece.own_ids]
            return ids == list(_encoded(tokenizer, sample)["input_ids"])
    return False


def _cut(tokenizer: Any, text: str, size: int, *, with_offsets: bool) -> tuple[list[int], Offsets] | None:
    """Ids and offsets of a text, encoded in pieces; None if too many neighbours disagree."""
    ids: list[int] = []
    offsets: list[Offsets] = []
    for piece in _agreeing(tokenizer, text, size):
        if piece is None:
            return None
        ids += piece.own_ids
        if with_offsets:
            offsets.append(piece.own_offsets())
    return ids, np.concatenate(offsets) if offsets else _array([])


def _agreeing(tokenizer: Any, text: str, size: int) -> Iterator[_Piece | None]:
    """The pieces of a text, each of which agrees with the next; None, as the last, if this is impossible.

    A piece that disagrees with the next is joined with as many as double its length. So a text is encoded
    about three times at most.
    """
    cuts = seams(text, size)
    last, piece = None, _Piece(tokenizer, text, 0, cuts[1])
    at = 1  # the cut at which `piece` ends
    while at + 1 < len(cuts):
        after = _Piece(tokenizer, text, cuts[at], cuts[at + 1])
        if piece.agrees_with(after):
            yield piece
            last, piece, at = piece, after, at + 1
            continue
        at += 1
        while at + 1 < len(cuts) and cuts[at] - piece.start < 2 * (piece.stop - piece.start):
            at += 1
        if cuts[at] - piece.start > JOINED * size:
            yield None
            return
        piece = _Piece(tokenizer, text, piece.start, cuts[at])
        if last is not None and not last.agrees_with(piece):
            yield None
            return
    yield piece


def seams(text: str, size: int) -> list[int]:
    """Places to cut a text, with its beginning and its end. Pieces have `size` to twice `size` characters."""
    found = [0]
    while len(text) - found[-1] > 2 * size:
        at = found[-1] + size
        match = _SEAM.search(text, at, at + size - OVERLAP)
        found.append(match.start() if match is not None else at)
    return [*found, len(text)]


class _Piece:
    """The text from `start` to `stop`, encoded with some text before and after it."""

    def __init__(self, tokenizer: Any, text: str, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.low = max(0, start - OVERLAP)
        high = min(len(text), stop + OVERLAP)
        part = text[self.low : high]
        found = _encoded(tokenizer, part)
        self.ids: list[int] = found["input_ids"]
        self.encoding = found.encodings[0]
        self.first = 0 if start == 0 else self._token_at(start)
        self.end = len(self.ids) if stop == len(text) else self._token_at(stop)
        _, covered = self.encoding.token_to_chars(max(0, len(self.ids) - 1)) or (0, 0)
        self.exact = covered == len(part)
        """False if the tokenizer's offsets drift: where all tokens are alike, they would agree by chance."""

    @property
    def own_ids(self) -> list[int]:
        """Ids between the seams."""
        return self.ids[self.first : self.end]

    def own_offsets(self) -> Offsets:
        """Places in the text of the tokens between the seams."""
        own = _array(self.encoding.offsets[self.first : self.end])
        return np.where(own[:, 1:] > 0, own + self.low, 0)

    def _token_at(self, seam: int) -> int | None:
        """The token of the character after the seam: the seam itself may be a space that no token claims."""
        found = self.encoding.char_to_token(seam + 1 - self.low)
        return int(found) if found is not None else None

    def agrees_with(self, after: _Piece) -> bool:
        """True if both pieces have the same tokens around the seam between them."""
        if self.end is None or after.first is None or not (self.exact and after.exact):
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
