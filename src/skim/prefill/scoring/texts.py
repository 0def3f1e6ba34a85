"""Many short runs of tokens to their texts, as a tokenizer decodes each of them, at a fraction of its time.

A long prompt has thousands of blocks, and what a tokenizer spends on each call is more than all that is done
with its text. Where the text of a run is that of its tokens, one after the other, a table of these will do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from skim.prefill.scoring.starts import WordStarts
from skim.tokenization import byte_alphabet

Decode = Callable[[Sequence[np.ndarray]], list[str]]
"""Runs of tokens to a text for each."""

_TEXTS = (
    "The access code for the Oslo office is 16979 .",
    " It 's a `` test '' , is n't it ? Yes !\n\n\tna\u00efve caf\u00e9, 日本語, 🙂",
    "<|im_start|>user\n<s>[INST] <bos> </s>",
)
_RUNS = 64  # of random tokens, that a way to decode is tried on


@lru_cache(maxsize=4)
def decoder_of(tokenizer: Any) -> Decode:
    """The fastest way that gives the same texts as `tokenizer.decode`, special tokens included.

    It is tried on texts, on random tokens and on special ones, so nothing depends on guessing right.
    """

    def plainly(runs: Sequence[np.ndarray]) -> list[str]:
        return [str(tokenizer.decode(run.tolist(), skip_special_tokens=False)) for run in runs]

    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return plainly
    trials = [np.array(run, dtype=np.int64) for run in _trials(tokenizer)]
    expected = plainly(trials)
    for way in _ways(tokenizer, plainly):
        if way(trials) == expected:
            return way
    return plainly


@lru_cache(maxsize=4)
def starts_of(tokenizer: Any) -> WordStarts | None:
    """Where words may begin in this tokenizer's tokens; None if its texts are more than theirs in a row."""
    decode = decoder_of(tokenizer)
    return WordStarts(decode.texts()) if isinstance(decode, _Table) else None


def _trials(tokenizer: Any) -> Iterator[list[int]]:
    yield []
    for text in _TEXTS:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        yield from (ids, ids[1:], ids[2:-1])
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}))
    draw = random.Random(0)
    for _ in range(_RUNS):
        run = [draw.randrange(len(tokenizer)) for _ in range(16)]
        yield run
        if added:
            yield [run[0], draw.choice(added), *run[1:4]]


def _ways(tokenizer: Any, plainly: Decode) -> Iterator[Decode]:
    backend = tokenizer.backend_tokenizer
    names = _names(tokenizer)
    kind = type(backend.decoder).__name__
    if kind == "ByteLevel":
        yield _Table(list(map(_bytes_of, names)), b"", plainly)
    if kind == "NoneType":
        yield _Table([None if name is None else name.encode() for name in names], b" ", plainly)
    yield lambda runs: list(backend.decode_batch([run.tolist() for run in runs], skip_special_tokens=False))


class _Table:
    """Decodes by looking up each token's bytes; tokens that are in no table are left to the tokenizer."""

    def __init__(self, parts: Sequence[bytes | None], between: bytes, plainly: Decode) -> None:
        self._parts = parts
        self._known = np.array([part is not None for part in parts], dtype=bool)
        own = [b"" if part is None else part + between for part in parts]
        self._lengths = np.array(list(map(len, own)), dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._bytes = np.frombuffer(b"".join(own), dtype=np.uint8)
        self._between = len(between)
        self._plainly = plainly

    def texts(self) -> list[str | None]:
        """Of each token by itself; None where it is no text."""
        return [_text_of(part) for part in self._parts]

    def __call__(self, runs: Sequence[np.ndarray]) -> list[str]:
        tokens = np.concatenate([*runs, np.empty(0, dtype=np.int64)])
        if len(tokens) and (int(tokens.max()) >= len(self._known) or not self._known[tokens].all()):
            return self._plainly(runs)
        lengths = self._lengths[tokens]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        flat = self._bytes[np.repeat(self._starts[tokens] - (ends - lengths), lengths) + np.arange(total)]
        text = flat.tobytes()
        edges = np.concatenate([[0], ends])[np.cumsum([0, *map(len, runs)])].tolist()
        return [
            text[start : max(start, end - self._between)].decode(errors="replace")
            for start, end in pairwise(edges)
        ]


def _text_of(part: bytes | None) -> str | None:
    try:
        return None if part is None else part.decode()
    except UnicodeDecodeError:
        return None


def _names(tokenizer: Any) -> list[str | None]:
    """The vocabulary by token; None where a number stands for no token."""
    known = tokenizer.get_vocab()
    names: list[str | None] = [None] * (max(known.values(), default=-1) + 1)
    for name, token in known.items():
        names[token] = name
    return names


def _bytes_of(name: str | None) -> bytes | None:
    """The bytes of a byte-level name; one in other letters, such as a special token's, stands for itself."""
    try:
        return None if name is None else bytes(map(byte_alphabet().__getitem__, name))
    except KeyError:
        return str(name).encode()
