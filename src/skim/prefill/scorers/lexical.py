"""Scores by shared words: no model, and the honest row beside every scorer that has one.

BM25 over the prompt's own blocks. A question word counts for more the fewer blocks have it, by the square
of its inverse document frequency: one name that stands in a single block must outweigh several everyday
words that meet in another. Two neighbouring words of the question count as a word of their own. Each block
also hears, more softly, the nearest words of its neighbours, so that a sentence cut by the edge of a block
brings both of its halves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from skim.prefill.scorers import ScoringTask
from skim.prefill.scorers.words import stem, words_of

Decode = Callable[[list[int]], str]
Term = str | tuple[str, str]

_SATURATION = 1.2  # BM25's k1: how soon repeating a word stops helping
_MARGIN = 8  # words that a block hears of each neighbour
_SOFTER = 0.5  # what they count
_SLICE = 256  # blocks between two yields


class LexicalScorer:
    """The words of each block against the words of the question.

    The question's own tokens are left out of the blocks they stand in: a block of nothing else has no words.
    """

    name = "lexical"

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        root = cache(stem)
        asked = _content(words_of(self._decode(list(task.tokens[_slice(task.question)]))), root)
        query: set[Term] = {*asked, *pairwise(asked)}
        texts: list[str] = []
        words: list[list[str]] = []
        for block in range(task.blocks):
            texts.append(self._text(task, block))
            words.append(words_of(texts[-1]))
            if block % _SLICE == _SLICE - 1:
                yield
        _join_cut_words(texts, words, query, root)
        weights: list[dict[Term, float]] = [defaultdict(float) for _ in texts]
        spread: Counter[Term] = Counter()  # how many blocks have a term
        before = ""
        for block, raw in enumerate(words):
            content = _content(raw, root)
            own: set[Term] = set()
            for place, word in enumerate(content):
                if word in query:
                    for term in (word, (before, word)):
                        if term in query:
                            own.add(term)
                            weights[block][term] += 1
                            if place < _MARGIN and block > 0:
                                weights[block - 1][term] += _SOFTER
                            if place >= len(content) - _MARGIN and block + 1 < len(weights):
                                weights[block + 1][term] += _SOFTER
                before = word
            spread.update(own)
            if block % _SLICE == _SLICE - 1:
                yield
        scores = _bm25(weights, spread)
        if task.candidates is None:
            return scores
        candidates = set(task.candidates)
        return [value if block in candidates else 0.0 for block, value in enumerate(scores)]

    def _text(self, task: ScoringTask, block: int) -> str:
        start, end = block * task.block_size, (block + 1) * task.block_size
        left = task.tokens[start : min(end, max(start, task.question.start))]
        right = task.tokens[max(start, min(end, task.question.stop)) : end]
        return "\n".join(self._decode(list(part)) for part in (left, right) if part)


def rescue(
    tokens: Sequence[int],
    question: range,
    block_size: int,
    *,
    rare: int = 4,
    hits: int = 2,
    gram: int = 4,
    common: int = 8,
    edge: int = 0,
) -> list[int]:
    """Blocks that share with the question what little else in the prompt has, best first.

    A block is rescued for `hits` tokens that the question has too and the rest of the prompt at most `rare`
    times, or for a run of `gram` tokens of the question that the rest has at most `common` times; a run
    across an edge rescues both blocks. Each thing shared is worth one over its number of occurrences. Rare
    tokens within `edge` tokens of a neighbour rescue it too, for half: the sentence may go on there.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    asked = ids[_slice(question)]
    shared = np.isin(ids, asked)
    shared[_slice(question)] = False
    worth: dict[int, float] = defaultdict(float)

    values, counts = np.unique(ids[shared], return_counts=True)
    times = {int(v): int(c) for v, c in zip(values, counts, strict=True) if c <= rare}
    places: dict[int, list[int]] = defaultdict(list)  # block -> where its rare tokens stand
    for place in np.flatnonzero(shared & np.isin(ids, list(times))).tolist():
        places[place // block_size].append(place)
    for block, found in places.items():
        if len(found) >= hits:
            value = sum(1 / times[token] for token in set(ids[found].tolist()))
            worth[block] += value
            for near in {(place + way) // block_size for place in found for way in (-edge, edge)} - {block}:
                if 0 <= near * block_size < len(ids):
                    worth[near] += value * _SOFTER

    wanted = {tuple(run) for run in _runs(asked, gram).tolist()}
    starts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for start in np.flatnonzero(_runs(shared, gram).all(axis=1)).tolist():
        run = tuple(ids[start : start + gram].tolist())
        if run in wanted:
            starts[run].append(start)
    for found in starts.values():
        if len(found) <= common:
            for start in found:
                for block in {start // block_size, (start + gram - 1) // block_size}:
                    worth[block] += 1 / len(found)
    return sorted(worth, key=lambda block: (-worth[block], block))


def _slice(tokens: range) -> slice:
    return slice(tokens.start, tokens.stop)


def _runs(values: np.ndarray, length: int) -> np.ndarray:
    """Every run of `length` neighbours, [n - length + 1, length]; none if there are too few."""
    if len(values) < length:
        return np.empty((0, length), dtype=values.dtype)
    return np.lib.stride_tricks.sliding_window_view(values, length)


def _content(words: Sequence[str], root: Callable[[str], str]) -> list[str]:
    return [stemmed for stemmed in map(root, words) if stemmed]


def _join_cut_words(
    texts: Sequence[str], words: Sequence[list[str]], query: set[Term], root: Callable[[str], str]
) -> None:
    """Give a word of the question that two neighbouring texts share between them to both.

    Joining only what makes a word of the question is safe with tokenizers whose texts drop a leading space.
    """
    for (left, first), (right, second) in pairwise(zip(texts, words, strict=True)):
        if first and second and left[-1].isalnum() and right[0].isalnum():
            whole = first[-1] + second[0]
            if root(whole) in query:
                first[-1] = second[0] = whole


def _bm25(weights: Sequence[Mapping[Term, float]], spread: Mapping[Term, int]) -> list[float]:
    blocks = len(weights)
    value = {term: math.log(1 + (blocks - n + 0.5) / (n + 0.5)) ** 2 for term, n in spread.items()}
    return [
        math.fsum(
            value[term] * weight * (1 + _SATURATION) / (weight + _SATURATION) for term, weight in own.items()
        )
        for own in weights
    ]
