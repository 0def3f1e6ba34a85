"""Blocks kept for rare tokens that they share with the question, regardless of their scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence

import numpy as np

_SOFTER = 0.5  # weight of rare tokens near the edge of a neighbouring block
_SLICE = 1 << 19  # tokens between two yields


def rescue(
    tokens: Sequence[int] | np.ndarray,
    question: Sequence[range],
    block_size: int,
    *,
    rare: int = 4,
    hits: int = 2,
    gram: int = 4,
    common: int = 8,
    edge: int = 0,
) -> Generator[None, None, list[int]]:
    """Blocks that share rare tokens with the question, best first. Works in slices.

    A block is rescued for `hits` question tokens that occur at most `rare` times in the rest of the prompt,
    or for a run of `gram` question tokens that occurs there at most `common` times. A run across an edge
    rescues both blocks. Each match is worth one over its number of occurrences. Rare tokens within `edge`
    tokens of a neighbour rescue it too, for half: the sentence may continue there.
    """
    ids = np.asarray(tokens, dtype=np.int64)  # no copy if it is such an array
    shared = yield from _Shared.of(ids, question)
    worth: dict[int, float] = defaultdict(float)

    counts, found = yield from shared.places_of_rare(1, shared.alphabet, rare)
    places: dict[int, list[int]] = defaultdict(list)  # block -> indices of its rare tokens
    for place in found:
        places[place // block_size].append(place)
    for block, here in places.items():
        if len(here) >= hits:
            value = sum(1 / counts[code] for code in {int(shared.codes[place]) for place in here})
            worth[block] += value
            for near in {(place + way) // block_size for place in here for way in (-edge, edge)} - {block}:
                if 0 <= near * block_size < len(ids):
                    worth[near] += value * _SOFTER

    asked = [shared.runs_of(ids[run.start : run.stop], gram) for run in question]
    wanted = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *asked]))
    counts, found = yield from shared.places_of_rare(gram, wanted, common)
    for start in found:
        for block in {start // block_size, (start + gram - 1) // block_size}:
            worth[block] += 1 / counts[shared.run_at(start, gram)]
    return sorted(worth, key=lambda block: (-worth[block], block))


class _Shared:
    """The prompt in the question's alphabet: a code from 1 for each of its tokens, 0 for all others.

    The question's own places are 0 too. A run of tokens is one number, with a digit for each token.
    """

    def __init__(self, codes: np.ndarray, code_of: np.ndarray, alphabet: np.ndarray) -> None:
        self.codes = codes
        self.alphabet = alphabet  # 1 and up
        self._code_of = code_of  # by token id

    @classmethod
    def of(cls, ids: np.ndarray, question: Sequence[range]) -> Generator[None, None, _Shared]:
        asked = np.unique(np.concatenate([ids[:0], *(ids[run.start : run.stop] for run in question)]))
        alphabet = np.arange(1, len(asked) + 1)
        code_of = np.zeros(int(ids.max(initial=0)) + 1, dtype=np.int64)
        code_of[asked] = alphabet
        codes = np.empty(len(ids), dtype=np.int64)
        for part in _slices(len(ids)):
            codes[part] = code_of[ids[part]]
            yield
        for run in question:
            codes[run.start : run.stop] = 0
        return cls(codes, code_of, alphabet)

    def runs_of(self, ids: np.ndarray, length: int) -> np.ndarray:
        """The number of every run of `length` tokens of the question; none if there are fewer."""
        return self._runs(self._code_of[ids], length)

    def run_at(self, start: int, length: int) -> int:
        return int(self._runs(self.codes[start : start + length], length)[0])

    def places_of_rare(
        self, length: int, wanted: np.ndarray, most: int
    ) -> Generator[None, None, tuple[dict[int, int], list[int]]]:
        """Of the sorted runs `wanted`, those that occur 1 to `most` times: their counts, and all starts."""
        totals = np.zeros(len(wanted) + 1, dtype=np.int64)
        for _, index in self._find(length, wanted):
            totals += np.bincount(index, minlength=len(totals))
            yield
        is_rare = (totals <= most) & (totals > 0)
        is_rare[-1] = False
        places: list[int] = []
        if is_rare.any():
            for start, index in self._find(length, wanted):
                places += (np.flatnonzero(is_rare[index]) + start).tolist()
                yield
        return dict(zip(wanted[is_rare[:-1]].tolist(), totals[is_rare].tolist(), strict=True)), places

    def _find(self, length: int, wanted: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """For each slice, its start and the index in `wanted` of the run at every place; the last if none."""
        if not len(wanted):
            return
        for part in _slices(len(self.codes) - length + 1):
            runs = self._runs(self.codes[part.start : part.stop + length - 1], length)
            index = np.searchsorted(wanted, runs)
            index[wanted[np.minimum(index, len(wanted) - 1)] != runs] = len(wanted)
            yield part.start, index

    def _runs(self, codes: np.ndarray, length: int) -> np.ndarray:
        """Runs as numbers; 0 for those with a token that the question does not have."""
        count = max(0, len(codes) - length + 1)
        found, whole = np.zeros(count, dtype=np.int64), np.ones(count, dtype=bool)
        for i in range(length):
            digit = codes[i : i + count]
            found = found * (len(self.alphabet) + 1) + digit
            whole &= digit > 0
        return np.where(whole, found, 0)


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, _SLICE):
        yield slice(start, min(count, start + _SLICE))
