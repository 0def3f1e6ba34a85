"""Blocks kept for rare tokens that they share with the question, regardless of their scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

_SOFTER = 0.5  # weight of rare tokens near the edge of a neighbouring block


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
) -> list[int]:
    """Blocks that share rare tokens with the question, best first.

    A block is rescued for `hits` question tokens that occur at most `rare` times in the rest of the prompt,
    or for a run of `gram` question tokens that occurs there at most `common` times. A run across an edge
    rescues both blocks. Each match is worth one over its number of occurrences. Rare tokens within `edge`
    tokens of a neighbour rescue it too, for half: the sentence may continue there.
    """
    ids = np.asarray(tokens, dtype=np.int64)  # no copy if it is such an array
    asked = [ids[run.start : run.stop] for run in question]
    shared = np.isin(ids, np.concatenate([ids[:0], *asked]))
    for own in question:
        shared[own.start : own.stop] = False
    worth: dict[int, float] = defaultdict(float)

    values, counts = np.unique(ids[shared], return_counts=True)
    times = {int(v): int(c) for v, c in zip(values, counts, strict=True) if c <= rare}
    places: dict[int, list[int]] = defaultdict(list)  # block -> indices of its rare tokens
    for place in np.flatnonzero(shared & np.isin(ids, list(times))).tolist():
        places[place // block_size].append(place)
    for block, found in places.items():
        if len(found) >= hits:
            value = sum(1 / times[token] for token in set(ids[found].tolist()))
            worth[block] += value
            for near in {(place + way) // block_size for place in found for way in (-edge, edge)} - {block}:
                if 0 <= near * block_size < len(ids):
                    worth[near] += value * _SOFTER

    wanted = {tuple(run) for part in asked for run in _runs(part, gram).tolist()}
    starts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    whole = _runs(shared, gram)
    for start in np.flatnonzero(np.logical_and.reduce([whole[:, i] for i in range(gram)])).tolist():
        run = tuple(ids[start : start + gram].tolist())
        if run in wanted:
            starts[run].append(start)
    for found in starts.values():
        if len(found) <= common:
            for start in found:
                for block in {start // block_size, (start + gram - 1) // block_size}:
                    worth[block] += 1 / len(found)
    return sorted(worth, key=lambda block: (-worth[block], block))


def _runs(values: np.ndarray, length: int) -> np.ndarray:
    """Every run of `length` neighbours, [n - length + 1, length]; none if there are fewer."""
    if len(values) < length:
        return np.empty((0, length), dtype=values.dtype)
    return np.lib.stride_tricks.sliding_window_view(values, length)
