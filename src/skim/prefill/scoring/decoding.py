"""Decodes many short runs of tokens with the same result as the tokenizer, in a fraction of its time.

A long prompt has thousands of blocks, and the overhead of one `decode` call per block exceeds all other work
on its text. If a run's text is the concatenation of its tokens' bytes, a table of these bytes is enough.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from skim.prefill.scoring.words import WordStarts
from skim.tokenization import byte_alphabet

Decode = Callable[[Sequence[np.ndarray]], list[str]]
"""Runs of tokens to one text each."""

_TEXTS = (
    "The access code for the Oslo office is 16979 .",
    " It 's a `` test '' , is n't it ? Yes !\n\n\tna\u00efve caf\u00e9, 日本語, 🙂",
    "<|im_start|>user\n<s>[INST] <bos> </s>",
)
_RUNS = 64  # runs of random tokens that a decoder is tested on


@lru_cache(maxsize=4)
def decoder_of(tokenizer: Any) -> Decode:
    """The fastest decoder with the same texts as `tokenizer.decode`, special tokens included.

    Each is tested on texts, random tokens and special tokens before it is used.
    """

    def by_tokenizer(runs: Sequence[np.ndarray]) -> list[str]:
        return [str(tokenizer.decode(run.tolist(), skip_special_tokens=False)) for run in runs]

    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return by_tokenizer
    trials = [np.array(run, dtype=np.int64) for run in _trials(tokenizer)]
    expected = by_tokenizer(trials)
    for decode in _faster_decoders(tokenizer, by_tokenizer):
        if decode(trials) == expected:
            return decode
    return by_tokenizer


@lru_cache(maxsize=4)
def starts_of(tokenizer: Any) -> WordStarts | None:
    """The tokens in which words may begin; None if a text is not its tokens' concatenation."""
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


def _faster_decoders(tokenizer: Any, by_tokenizer: Decode) -> Iterator[Decode]:
    backend = tokenizer.backend_tokenizer
    names = _names(tokenizer)
    kind = type(backend.decoder).__name__
    if kind == "ByteLevel":
        yield _Table(list(map(_bytes_of, names)), b"", by_tokenizer)
    if kind == "NoneType":
        yield _Table([None if name is None else name.encode() for name in names], b" ", by_tokenizer)
    yield lambda runs: list(backend.decode_batch([run.tolist() for run in runs], skip_special_tokens=False))


class _Table:
    """Decodes by looking up each token's bytes; runs with unknown tokens go to the tokenizer."""

    def __init__(self, parts: Sequence[bytes | None], between: bytes, by_tokenizer: Decode) -> None:
        self._parts = parts
        self._known = np.array([part is not None for part in parts], dtype=bool)
        own = [b"" if part is None else part + between for part in parts]
        self._lengths = np.array(list(map(len, own)), dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._bytes = np.frombuffer(b"".join(own), dtype=np.uint8)
        self._between = len(between)
        self._by_tokenizer = by_tokenizer

    def texts(self) -> list[str | None]:
        """The text of each token; None if its bytes are no text."""
        return [_text_of(part) for part in self._parts]

    def __call__(self, runs: Sequence[np.ndarray]) -> list[str]:
        tokens = np.concatenate([*runs, np.empty(0, dtype=np.int64)])
        if len(tokens) and (int(tokens.max()) >= len(self._known) or not self._known[tokens].all()):
            return self._by_tokenizer(runs)
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
    """The vocabulary by token id; None for an unused id."""
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
