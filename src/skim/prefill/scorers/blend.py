"""The default scorer: attention over the whole prompt, blended with shared and similar words.

Words alone throw away what only a model can find, and a few attention heads throw away what words find.
Blended, each finds what the other misses. Where reading the whole prompt would cost too much of the time that
skimming saves, words choose the part that the model reads (see `Cost`).

On a GPU, the model reads the best blocks again, if it is calibrated for that (see `SecondLook`). Then
links are followed: the names in the best passages lead to passages that the question does not name.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from skim.prefill.scorers import attention, lexical
from skim.prefill.scorers.lexical import LexicalScorer
from skim.prefill.scoring.calibration import calibration_of
from skim.prefill.scoring.combine import UNCALIBRATED, WORDS, odds, outstanding, word_logits
from skim.prefill.scoring.cost import Cost
from skim.prefill.scoring.embedding import EmbeddingScorer
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.likelihood import LikelihoodScorer
from skim.prefill.scoring.links import links
from skim.prefill.scoring.scorer import Scorer, ScoringTask, together
from skim.prefill.scoring.second_look import SecondLook
from skim.prefill.scoring.statistics import ENOUGH
from skim.registry import Declaration

SPREAD = 0.7  # part of a block's score that counts for its neighbours when words choose what to read
_GOLDEN = (5**0.5 - 1) / 2

CONFIDENT = 0.25  # chance of a block and its neighbours from which links are followed
STANDS_OUT = 4.0  # standardised score of its shared words
LEAST_LINK = 12.0  # BM25 of a link: about that of one name in five blocks of two hundred
LINKED = 0.6  # part of the best link's score that other blocks must have
MOST_LINKED = 3  # blocks that one look adds
FEW_LINKED = 2  # blocks of one look that are one passage: the blocks beside them may continue it
BESIDE = 1.5  # by how much those count less, as a logarithm
MOST_NAMES = 8  # names that one look follows: a sentence with more is a list, which leads everywhere
SHORTEST_NAME = 3  # letters; shorter ones are the beginnings of too many words
FARTHER = 0.25  # each linked block counts less than the one before it by this much, as a logarithm: a
# passage's continuation comes first, and links that lead everywhere do not fill a budget

SCORER = Declaration(
    help="attention over the whole prompt, with shared and similar words",
    model="drafter",
    odds=True,
    order=10,
)


def make(models: Models) -> Scorer:
    words = lexical.make(models)
    assert isinstance(words, LexicalScorer)
    reader = models.reader
    calibration = calibration_of(reader)
    cost = Cost.of(models.target.module, reader.module, calibration.layers[-1] + 1)
    similar = EmbeddingScorer(models.target.module)
    found = attention.make(models)
    if calibration.words is None:
        return BlendScorer(words, similar, found, cost, words_of_most=UNCALIBRATED, words_of_few=UNCALIBRATED)
    again = None
    if (second := calibration.second) is not None:
        own = attention.AttentionScorer(reader.module, second.calibration(), window=second.window)
        asked = LikelihoodScorer(reader.module, reader.tokenizer)
        again = SecondLook(models.adapt(own), models.adapt(asked), second)
    return BlendScorer(words, similar, found, cost, words_of_most=calibration.words, again=again)


class BlendScorer:
    """Attention from the question to every block, plus standardised scores of shared and similar words.

    If the prompt has more tokens than `cost` allows, words choose the blocks that the model reads. These
    score above all others, which keep the order of their words.

    Calibration fits the weights of words where the model reads every block. They hold where it reads most
    blocks. In a smaller part, which words chose, words count as before the fit.
    """

    def __init__(
        self,
        words: LexicalScorer,
        similar: Scorer,
        attention: Scorer,
        cost: Cost,
        *,
        words_of_most: tuple[float, float] = WORDS,  # weights if the model reads half of the blocks or more
        words_of_few: tuple[float, float] = WORDS,  # and if it reads less
        again: SecondLook | None = None,
    ) -> None:
        self._words = words
        self._similar = similar
        self._attention = attention
        self._cost = cost
        self._words_of_most = words_of_most
        self._words_of_few = words_of_few
        self._again = again

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        cheap = [self._words.score(task), self._similar.score(task)]
        most = self._cost.most_tokens(task)
        if most >= len(task.tokens):  # a GPU computes while the host compares words
            read = task.wanted
            found, *both = yield from together([self._attention.score(task), *cheap])
        else:
            both = yield from together(cheap)
            read = narrow(task, _shares(both[0]) + _shares(both[1]), most)
            found = yield from self._attention.score(task.only(read.tolist()))
        shared, alike = map(np.array, both)
        logits = np.full(task.blocks, -np.inf)
        scored = read[np.array(found)[read] > 0]
        is_most = 2 * len(read) >= len(task.wanted)
        weights = self._words_of_most if is_most else self._words_of_few
        if len(scored) < ENOUGH:  # too few to standardise features over them as calibration did
            weights = UNCALIBRATED
        by_words = word_logits(shared, alike, weights)
        logits[scored] = np.log(np.array(found)[scored]) + by_words[scored]
        may_again = is_most and self._cost.may_read_again(task)
        if self._again is not None and may_again and self._again.is_worthwhile(len(scored)):
            yield from self._again.rank(task, logits, (outstanding(shared), outstanding(alike)))
        if len(scored):
            yield from self._follow_links(task, logits, outstanding(shared))
        return _rest_below(logits, word_logits(shared, alike), task.wanted)

    def _follow_links(
        self, task: ScoringTask, logits: np.ndarray, shared: np.ndarray
    ) -> Generator[None, None, None]:
        """Raise blocks with names that stand beside the question's words in the best blocks.

        Each look takes names from the blocks that the last one found. Blocks that share rare words with the
        question come first: only they are certain enough to lead anywhere.
        """
        if task.hops < 2:
            return
        chance = odds(logits)
        chance /= chance.sum()
        best = np.argsort(-chance, kind="stable")[:2]
        near = np.convolve(chance, np.ones(3), "same")  # a sentence across an edge divides its chance
        front = [b for b in best.tolist() if near[b] >= CONFIDENT and shared[b] >= STANDS_OUT]
        level = float(logits.max())
        known = self._words.question_words(task)
        via, seen = known, set(front)
        for _ in range(task.hops - 1):
            names = links([self._words.text_around(task, block) for block in front], via)
            names = [name for name in names if name not in known and _is_long(name)][:MOST_NAMES]
            if not names:
                return
            via = set(names)
            known = known | via
            found = np.array((yield from self._words.score_words(task, names)))
            for block in seen:
                found[max(0, block - 1) : block + 2] = 0.0
            best = np.argsort(-found, kind="stable")[:MOST_LINKED]
            least = max(LEAST_LINK, LINKED * float(found.max()))
            front = [block for block in best.tolist() if found[block] >= least]
            seen.update(front)
            for block in front:
                level -= FARTHER
                logits[block] = max(logits[block], level)
                if len(front) <= FEW_LINKED:
                    around = slice(max(0, block - 1), block + 2)
                    logits[around] = np.maximum(logits[around], level - BESIDE)


def narrow(task: ScoringTask, scores: np.ndarray, most: int) -> np.ndarray:
    """The best blocks of up to `most` tokens, ascending. Equal scores are spread over the prompt."""
    near = scores.copy()
    near[1:] = np.maximum(near[1:], SPREAD * scores[:-1])
    near[:-1] = np.maximum(near[:-1], SPREAD * scores[1:])
    blocks = task.wanted
    blocks = blocks[np.lexsort((blocks * _GOLDEN % 1.0, -near[blocks]))]
    sizes = task.context_counts[blocks]
    blocks, sizes = blocks[sizes > 0], sizes[sizes > 0]
    count = max(1, int(np.searchsorted(np.cumsum(sizes), most, side="right")))
    return np.sort(blocks[:count])


def _is_long(name: str) -> bool:
    return len(name) >= SHORTEST_NAME or not name.isalpha()


def _shares(values: Sequence[float]) -> np.ndarray:
    found = np.array(values)
    total = found.sum()
    return found / total if total > 0 else found


def _rest_below(logits: np.ndarray, by_words: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Odds of the blocks with a logit; those that were not read follow, in the order of their words."""
    known = np.isfinite(logits)
    scores = np.zeros(len(logits))
    scores[known] = odds(logits[known])
    rest = wanted[~known[wanted]]
    if len(rest):
        lowest = scores[known].min() / 2 if known.any() else 1.0
        scores[rest] = lowest * (1e-6 + by_words[rest]) / (1e-6 + by_words[rest].max())
    return scores.tolist()  # type: ignore[no-any-return]
