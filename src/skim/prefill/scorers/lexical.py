"""Scores by shared words: no model, and the honest row beside every scorer that has one.

BM25 over the prompt's own blocks. A question word counts for more the fewer blocks have it, by the square
of its inverse document frequency: one name that stands in a single block must outweigh several everyday
words that meet in another. Two neighbouring words of the question count as a word of their own. Each block
also hears, more softly, the nearest words of its neighbours, so that a sentence cut by the edge of a block
brings both of its halves.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np

from skim.prefill.scoring.starts import WordStarts
from skim.prefill.scoring.task import ScoringTask
from skim.prefill.scoring.texts import Decode
from skim.prefill.scoring.words import stem, words_of

Term = str | tuple[str, str]

_SATURATION = 1.2  # BM25's k1: how soon repeating a word stops helping
_MARGIN = 8  # words that a block hears of each neighbour
_SOFTER = 0.5  # what they count
_SLICE = 512  # blocks between two yields
_LEAST = 512  # blocks from which on it saves time to look at tokens first
_MOST_ROOTS = 1 << 17
_BEGINNING = 16  # characters of a word that tell it from most others


class _Roots(dict[str, str]):
    """The stems of words, each found once. Between prompts as well: texts have most words in common."""

    def __missing__(self, word: str) -> str:
        if len(self) >= _MOST_ROOTS:
            self.clear()
        self[word] = found = stem(word)
        return found


_root = _Roots().__getitem__


class LexicalScorer:
    """The words of each block against the words of the question.

    The question's own tokens are left out of the blocks they stand in: a block of nothing else has no words.
    """

    name = "lexical"

    def __init__(
        self, decode: Decode, starts: Callable[[], WordStarts | None] = lambda: None, *, least: int = _LEAST
    ) -> None:
        """`starts` of the tokenizer are asked for at the first prompt of at least so many blocks."""
        self._decode = decode
        self._starts = starts
        self._least = least

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        asked = _content(words_of(self._decode([task.ids[_slice(task.question)]])[0]))
        query: set[Term] = {*asked, *pairwise(asked)}
        if not query:
            return [0.0] * task.blocks
        beginnings = sorted({_beginning(stemmed)[:_BEGINNING] for stemmed in asked})
        blocks = self._worth_a_look(task, beginnings)
        yield
        texts = _Texts(task, self._decode)
        needed = sorted({near for block in blocks for near in (block, block + 1) if near < task.blocks})
        for first in range(0, len(needed), _SLICE):
            texts.load(needed[first : first + _SLICE])
            yield
        near = _Near(texts, blocks, beginnings, query)
        yield
        weights: dict[int, dict[Term, float]] = defaultdict(lambda: defaultdict(float))
        spread: Counter[Term] = Counter()  # how many blocks have a term
        for block in near.blocks:
            content = _content(near.words[block])
            own: set[Term] = set()
            for place, word in enumerate(content):
                if word in query:
                    before = content[place - 1] if place else near.last_word_before(block)
                    for term in (word, (before, word)):
                        if term in query:
                            own.add(term)
                            weights[block][term] += 1
                            if place < _MARGIN and block > 0:
                                weights[block - 1][term] += _SOFTER
                            if place >= len(content) - _MARGIN and block + 1 < task.blocks:
                                weights[block + 1][term] += _SOFTER
            spread.update(own)
        candidates = None if task.candidates is None else set(task.candidates)
        scores = [0.0] * task.blocks
        for block, value in _bm25(weights, spread, task.blocks).items():
            if candidates is None or block in candidates:
                scores[block] = value
        return scores

    def _worth_a_look(self, task: ScoringTask, beginnings: Sequence[str]) -> list[int]:
        """Blocks in which a word with one of these beginnings may begin, in order."""
        starts = self._starts() if task.blocks >= self._least else None
        if starts is None:
            return list(range(task.blocks))
        found = np.zeros(task.blocks, dtype=bool)
        found[starts.find(task.ids, beginnings) // task.block_size] = True
        asked = _blocks_of(task.question, task.block_size)
        if asked:  # other tokens come together there than the prompt has in a row
            found[max(0, asked.start - 1) : asked.stop] = True
        return np.flatnonzero(found).tolist()  # type: ignore[no-any-return]


class _Texts(dict[int, str]):
    """The texts of blocks without the question's tokens, put together when they are asked for."""

    def __init__(self, task: ScoringTask, decode: Decode) -> None:
        super().__init__()
        self.count = task.blocks
        self._task = task
        self._decode = decode
        self._asked = _blocks_of(task.question, task.block_size)

    def __missing__(self, block: int) -> str:
        self.load([block])
        return self[block]

    def load(self, blocks: Sequence[int]) -> None:
        """Many at once, at a fraction of the time."""
        ids, size, question = self._task.ids, self._task.block_size, self._task.question
        runs = [ids[block * size : (block + 1) * size] for block in blocks]
        self.update(zip(blocks, self._decode(runs), strict=True))
        for block in blocks:
            if block in self._asked:
                start, end = block * size, (block + 1) * size
                left = ids[start : min(end, max(start, question.start))]
                right = ids[max(start, min(end, question.stop)) : end]
                self[block] = "\n".join(self._decode([part for part in (left, right) if len(part)]))


class _Near:
    """The blocks that may have a word of the question, of those worth a look, and their words.

    A word begins as its stem does, so a text in which no stem of the question is found has none of its words,
    and is not cut into words at all. Most texts are like that.
    """

    def __init__(
        self, texts: _Texts, blocks: Sequence[int], beginnings: Sequence[str], query: set[Term]
    ) -> None:
        self.words = _WordsOf(texts)
        pattern = re.compile(_any_of(beginnings))
        lowered = {block: texts[block].lower() for block in blocks}
        found = {block for block, text in lowered.items() if pattern.search(text)}
        begun = tuple({whole[:end] for whole in beginnings for end in range(1, len(whole))})
        cut = []
        for block, end in lowered.items():
            if (
                block + 1 < texts.count
                and texts[block][-1:].isalnum()
                and texts[block + 1][:1].isalnum()
                # one letter can become two marks
                and (block in found or end.endswith(begun) or not end[-1].isalnum())
            ):
                cut.append(block)
        found.update(self._join_cut_words(texts, cut, query))
        self.blocks = sorted(found)

    def _join_cut_words(self, texts: _Texts, cut: Sequence[int], query: set[Term]) -> set[int]:
        """Give a word of the question that two neighbouring texts share between them to both; which do.

        Joining only what makes a word of the question is safe with tokenizers whose texts drop a leading
        space. A text that is one piece of a longer word is looked at again with its next neighbour.
        """
        joined: set[int] = set()
        waiting = list(reversed(cut))
        while waiting:
            block = waiting.pop()
            first, second = self.words[block], self.words[block + 1]
            if not (first and second and texts[block][-1].isalnum() and texts[block + 1][0].isalnum()):
                continue
            whole = first[-1] + second[0]
            if _root(whole) in query:
                first[-1] = second[0] = whole
                joined |= {block, block + 1}
                if block + 2 < texts.count and texts[block + 2] and block + 1 not in waiting[-1:]:
                    waiting.append(block + 1)
        return joined

    def last_word_before(self, block: int) -> str:
        for earlier in range(block - 1, -1, -1):
            if content := _content(self.words[earlier]):
                return content[-1]
        return ""


class _WordsOf(dict[int, list[str]]):
    """The words of each text, found when they are asked for."""

    def __init__(self, texts: _Texts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, block: int) -> list[str]:
        self[block] = words = words_of(self._texts[block])
        return words


def _any_of(texts: Sequence[str]) -> str:
    """A pattern for these texts, which are sorted, or for whatever begins with one; what they share, once."""
    branches = []
    for first, same in groupby(texts, key=lambda text: text[0]):
        rest = [text[1:] for text in same]
        branches.append(re.escape(first) + (_any_of(rest) if rest[0] else ""))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _beginning(stemmed: str) -> str:
    """How every word with this stem begins: with the stem, but `stories` not with `story`."""
    return stemmed[:-1] if stemmed.endswith("y") and len(stemmed) > 1 else stemmed


def rescue(
    tokens: Sequence[int] | np.ndarray,
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
    ids = np.asarray(tokens, dtype=np.int64)  # as it is, if it is such an array already
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


def _blocks_of(tokens: range, size: int) -> range:
    return range(tokens.start // size, -(-tokens.stop // size)) if tokens else range(0)


def _slice(tokens: range) -> slice:
    return slice(tokens.start, tokens.stop)


def _runs(values: np.ndarray, length: int) -> np.ndarray:
    """Every run of `length` neighbours, [n - length + 1, length]; none if there are too few."""
    if len(values) < length:
        return np.empty((0, length), dtype=values.dtype)
    return np.lib.stride_tricks.sliding_window_view(values, length)


def _content(words: Iterable[str]) -> list[str]:
    return [stemmed for stemmed in map(_root, words) if stemmed]


def _bm25(
    weights: Mapping[int, Mapping[Term, float]], spread: Mapping[Term, int], blocks: int
) -> dict[int, float]:
    value = {term: math.log(1 + (blocks - n + 0.5) / (n + 0.5)) ** 2 for term, n in spread.items()}
    return {
        block: math.fsum(
            value[term] * weight * (1 + _SATURATION) / (weight + _SATURATION) for term, weight in own.items()
        )
        for block, own in weights.items()
    }
