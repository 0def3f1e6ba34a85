"""Scores blocks by words shared with the question: no model, the baseline for every scorer with one.

BM25 over the prompt's blocks. A question word is weighted by the square of its inverse document frequency:
one name in a single block must outweigh several everyday words in another. Two neighbouring words of the
question count as a term too. The nearest words of a block's neighbours count for it, weighted down, so that a
sentence across a block edge brings both of its halves.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np

from skim.prefill.scoring.background import in_thread
from skim.prefill.scoring.decoding import Decode, decoder_of, starts_of
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.scorer import Scorer, ScoringTask, handing_over
from skim.prefill.scoring.words import WordStarts, stem, words_of
from skim.registry import Declaration

Term = str | tuple[str, str]

_SATURATION = 1.2  # BM25's k1: how soon repeating a word stops helping
_MARGIN = 8  # words of each neighbour that count for a block
_SOFTER = 0.5  # their weight
_SLICE = 512  # blocks between two yields
_LOOK_BACK = 64  # blocks searched for the word before a block's first
_LEAST = 512  # blocks of the shortest prompt whose tokens are searched first, which then saves time
_MOST_ROOTS = 1 << 17
_BEGINNING = 16  # characters of a word that distinguish it from most others

SCORER = Declaration(help="words shared with the question, by BM25", order=50)


def make(models: Models) -> Scorer:
    tokenizer = models.target.tokenizer
    return LexicalScorer(decoder_of(tokenizer), lambda: starts_of(tokenizer))


class _Roots(dict[str, str]):
    """Cache of stems by word, kept between prompts: texts have most words in common."""

    def __missing__(self, word: str) -> str:
        if len(self) >= _MOST_ROOTS:
            self.clear()
        self[word] = found = stem(word)
        return found


_root = _Roots().__getitem__


class LexicalScorer:
    """Compares the words of each block with the words of the question.

    The question's own tokens are left out of their blocks: a block of nothing else has no words.
    """

    def __init__(
        self, decode: Decode, starts: Callable[[], WordStarts | None] = lambda: None, *, least: int = _LEAST
    ) -> None:
        """`starts` is called at the first prompt of at least `least` blocks."""
        self._decode = decode
        self._starts = starts
        self._least = least

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        asked = [_content(words_of(text)) for text in self._decode(task.question_runs)]
        return (yield from self._rank(task, asked))

    def score_words(self, task: ScoringTask, words: Sequence[str]) -> Generator[None, None, list[float]]:
        """Scores by these words, given as stems, instead of the question's. Neighbours do not count."""
        return (yield from self._rank(task, [[word] for word in words], softer=0.0))

    def question_words(self, task: ScoringTask) -> set[str]:
        """Stems of the question's words, without function words."""
        return {word for text in self._decode(task.question_runs) for word in _content(words_of(text))}

    def text_around(self, task: ScoringTask, block: int) -> str:
        """The text of a block and its neighbours: a sentence may begin or end there."""
        size = task.block_size
        return self._decode([task.ids[max(0, block - 1) * size : (block + 2) * size]])[0]

    def _rank(
        self, task: ScoringTask, asked: Sequence[Sequence[str]], *, softer: float = _SOFTER
    ) -> Generator[None, None, list[float]]:
        """BM25 over the blocks, for runs of stems. Neighbours in a run count as a term too."""
        words = [word for run in asked for word in run]
        query: set[Term] = {*words, *(pair for run in asked for pair in pairwise(run))}
        if not query:
            return [0.0] * task.blocks
        beginnings = sorted({_beginning(stemmed)[:_BEGINNING] for stemmed in words})
        blocks = yield from self._possible_blocks(task, beginnings)
        yield
        texts = _Texts(task, self._decode)
        needed = sorted({near for block in blocks for near in (block, block + 1) if near < task.blocks})
        for first in range(0, len(needed), _SLICE):
            texts.load(needed[first : first + _SLICE])
            yield
        near = yield from _Near.among(blocks, texts, beginnings, query)
        terms = {term: index for index, term in enumerate(sorted(query, key=str))}
        weights: dict[int, float] = defaultdict(float)  # by block * len(terms) + term
        spread = [0] * len(terms)  # document frequencies
        for turn, block in enumerate(near.blocks, start=1):
            if turn % _SLICE == 0:
                yield
            content = _content(near.words[block])
            own: set[int] = set()
            for place, word in enumerate(content):
                if word in query:
                    before = content[place - 1] if place else near.last_word_before(block)
                    for term in (word, (before, word)):
                        if (index := terms.get(term)) is not None:
                            own.add(index)
                            key = block * len(terms) + index
                            weights[key] += 1
                            if place < _MARGIN and block > 0:
                                weights[key - len(terms)] += softer
                            if place >= len(content) - _MARGIN and block + 1 < task.blocks:
                                weights[key + len(terms)] += softer
            for index in own:
                spread[index] += 1
        candidates = None if task.candidates is None else set(task.candidates)
        scores = [0.0] * task.blocks
        values = yield from _bm25(weights, spread, task.blocks)
        for block, value in values.items():
            if candidates is None or block in candidates:
                scores[block] = value
        return scores

    def _possible_blocks(
        self, task: ScoringTask, beginnings: Sequence[str]
    ) -> Generator[None, None, list[int]]:
        """Blocks in which a word with one of these beginnings may begin, ascending."""
        starts = None
        if task.blocks >= self._least:
            # The first time, it sorts the vocabulary.
            starts = yield from handing_over(in_thread(self._starts), task)
        if starts is None:
            return list(range(task.blocks))
        found = np.zeros(task.blocks, dtype=bool)
        places = yield from starts.find(task.ids, beginnings)
        found[places // task.block_size] = True
        for run in task.question:  # tokens on both sides of it are adjacent there, but not in the prompt
            own = _blocks_of(run, task.block_size)
            if own:
                found[max(0, own.start - 1) : own.stop] = True
        return np.flatnonzero(found).tolist()  # type: ignore[no-any-return]


class _Texts(dict[int, str]):
    """The texts of blocks without the question's tokens, decoded on first use."""

    def __init__(self, task: ScoringTask, decode: Decode) -> None:
        super().__init__()
        self.count = task.blocks
        self._task = task
        self._decode = decode
        self._question_blocks = {b for run in task.question for b in _blocks_of(run, task.block_size)}

    def __missing__(self, block: int) -> str:
        self.load([block])
        return self[block]

    def load(self, blocks: Sequence[int]) -> None:
        """Decode many blocks in one call, in a fraction of the time."""
        ids, size = self._task.ids, self._task.block_size
        runs = [ids[block * size : (block + 1) * size] for block in blocks]
        self.update(zip(blocks, self._decode(runs), strict=True))
        for block in blocks:
            if block in self._question_blocks:
                own = slice(block * size, (block + 1) * size)
                rest = np.flatnonzero(~self._task.is_question[own])
                runs = np.split(ids[own][rest], np.flatnonzero(np.diff(rest) > 1) + 1)
                self[block] = "\n".join(self._decode([run for run in runs if len(run)]))


class _Near:
    """The blocks among `blocks` that may have a word of the question, and their words.

    A word begins with its stem. So a text without any stem of the question has none of its words, and is not
    split into words. Most texts are like that.
    """

    def __init__(self, texts: _Texts) -> None:
        self.words = _WordsOf(texts)
        self.blocks: list[int] = []

    @classmethod
    def among(
        cls, blocks: Sequence[int], texts: _Texts, beginnings: Sequence[str], query: set[Term]
    ) -> Generator[None, None, _Near]:
        near = cls(texts)
        pattern = re.compile(_any_of(beginnings))
        begun = tuple({whole[:end] for whole in beginnings for end in range(1, len(whole))})
        found: set[int] = set()
        for first in range(0, len(blocks), _SLICE):
            cut = []
            for block in blocks[first : first + _SLICE]:
                end = texts[block].lower()
                if pattern.search(end):
                    found.add(block)
                if (
                    block + 1 < texts.count
                    and texts[block][-1:].isalnum()
                    and texts[block + 1][:1].isalnum()
                    # lower case may turn one letter into a letter and a mark
                    and (block in found or end.endswith(begun) or not end[-1].isalnum())
                ):
                    cut.append(block)
            found.update(near._join_cut_words(texts, cut, query))
            yield
        near.blocks = sorted(found)
        return near

    def _join_cut_words(self, texts: _Texts, cut: Sequence[int], query: set[Term]) -> set[int]:
        """Give a question word that is split across two neighbouring texts to both; return these blocks.

        Joining only question words is safe with tokenizers whose texts drop a leading space. A text that is
        one piece of a longer word is checked again with its next neighbour.
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
        for earlier in range(block - 1, max(-1, block - 1 - _LOOK_BACK), -1):
            if content := _content(self.words[earlier]):
                return content[-1]
        return ""


class _WordsOf(dict[int, list[str]]):
    """The words of each text, split on first use."""

    def __init__(self, texts: _Texts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, block: int) -> list[str]:
        self[block] = words = words_of(self._texts[block])
        return words


def _any_of(texts: Sequence[str]) -> str:
    """A pattern for texts that begin with one of these, which are sorted. Common prefixes appear once."""
    branches = []
    for first, same in groupby(texts, key=lambda text: text[0]):
        rest = [text[1:] for text in same]
        branches.append(re.escape(first) + (_any_of(rest) if rest[0] else ""))
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _beginning(stemmed: str) -> str:
    """The beginning of every word with this stem: the stem, without a final `y` (`story`, `stories`)."""
    return stemmed[:-1] if stemmed.endswith("y") and len(stemmed) > 1 else stemmed


def _blocks_of(tokens: range, size: int) -> range:
    return range(tokens.start // size, -(-tokens.stop // size)) if tokens else range(0)


def _content(words: Iterable[str]) -> list[str]:
    return [stemmed for stemmed in map(_root, words) if stemmed]


def _bm25(
    weights: Mapping[int, float], spread: Sequence[int], blocks: int
) -> Generator[None, None, dict[int, float]]:
    """Scores by block. `weights` are by block * terms + term, `spread` has the blocks of each term.

    One flat mapping: garbage collection would scan a mapping per block again and again.
    """
    value = [math.log(1 + (blocks - n + 0.5) / (n + 0.5)) ** 2 for n in spread]
    found: dict[int, float] = {}
    keys = sorted(weights)
    yield
    for turn, (block, own) in enumerate(groupby(keys, key=lambda key: key // len(spread)), start=1):
        found[block] = math.fsum(
            value[key % len(spread)] * (weight := weights[key]) * (1 + _SATURATION) / (weight + _SATURATION)
            for key in own
        )
        if turn % (8 * _SLICE) == 0:
            yield
    return found
