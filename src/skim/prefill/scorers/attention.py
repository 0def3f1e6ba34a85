"""Scores blocks by the question's attention to them, in scoring windows, at a few retrieval heads.

Choices that were measured (SmolLM2-135M, 7K tokens of natural text, 260 needle tasks):
- heads chosen by calibration, not an average over all: most heads attend to the start, to neighbours or to
  nothing in particular, and drown the few that retrieve;
- the maximum over the question's tokens, not the mean: one word of the question finds the passage, and the
  others match nothing;
- probabilities of the full softmax, so that a scoring window without the answer has low scores (see
  `WindowStep`);
- five neighbouring tokens averaged, then the maximum of a block: an answer is a few words, not one token;
- attention near the edge of a block counts, weighted down, for its neighbour too: of the needles in 20
  prompts of 4K tokens a quarter lay across an edge, and the half without the question's words was lost.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from skim.prefill.scoring.block_scores import BlockScores, join
from skim.prefill.scoring.calibration import Calibration, calibration_of
from skim.prefill.scoring.combine import ATTENTION, attention_logits, log_attention, odds, standardised
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringTask
from skim.prefill.scoring.windows import (
    WINDOW_TOKENS,
    cut,
    question_attention_of_windows,
    windows_per_batch,
)
from skim.registry import Declaration

SCORER = Declaration(
    help="attention from the question, in scoring windows of 512 tokens",
    model="drafter",
    odds=True,
    order=20,
)


def make(models: Models) -> Scorer:
    reader = models.reader
    return models.adapt(AttentionScorer(reader.module, calibration_of(reader)))


class AttentionScorer:
    """Attention from the question to the blocks.

    `module` reads the prompt's token ids. Candidate blocks are read in order, `window` prompt tokens at a
    time, joined across the gaps between them. Memory does not grow with the prompt.
    """

    def __init__(
        self,
        module: Any,
        calibration: Calibration,
        *,
        window: int = WINDOW_TOKENS,
        windows_per_batch: int | None = None,
    ) -> None:
        config = module.config.get_text_config()
        calibration.check_fits(config.num_hidden_layers, config.num_attention_heads)
        self._module = module
        self._heads = calibration.by_layer()
        self._weights = calibration.weights
        self._window = window
        self._per_batch = windows_per_batch
        self._positions = int(config.max_position_embeddings)

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        found = yield from self.score_heads(task)
        read = task.context_blocks
        result = np.zeros(task.blocks)
        if len(read):
            heads = found[:, read]
            if self._weights is None:
                result[read] = odds(ATTENTION * standardised(_standing_out(heads)))
            else:
                result[read] = odds(attention_logits(heads, self._weights))
        return result.tolist()  # type: ignore[no-any-return]

    def score_heads(self, task: ScoringTask) -> Generator[None, None, np.ndarray]:
        """The scores of each captured head, layers ascending. [heads, blocks]

        On a GPU the host launches everything, then yields until it is computed.
        """
        question = task.question_ids
        size = self._context_size(len(question))
        places = task.context_places
        if not len(places):
            return np.zeros((1, task.blocks))
        per_batch = self._per_batch or windows_per_batch(
            self._module, max(self._heads) + 1, size + len(question) + 1, task.slice_seconds
        )
        scores = BlockScores(task)
        for edges in cut(len(places), size, per_batch):
            joined = join(places, edges, task.ids, question)
            scores.add(joined, question_attention_of_windows(self._module, joined.batch, self._heads))
            task.hand_over()
            yield
        return (yield from scores.result())

    def _context_size(self, question: int) -> int:
        """Prompt tokens in a scoring window: more for a long question, which every window computes again.

        At most half of the model's positions: `join` may add as many tokens between them.
        """
        size = min(max(self._window, 4 * question), (self._positions - question) // 2)
        if not 0 < question <= self._window // 2 or size < 1:
            raise ScoringError(
                f"the question has {question} tokens, and scorers by attention read questions of 1 to "
                f"{self._window // 2}, half a scoring window of {self._window}, in {self._positions} "
                "positions; shorten the question or use the lexical scorer"
            )
        return size


def _standing_out(heads: np.ndarray) -> np.ndarray:
    """For uncalibrated heads: each block's deviation from the mean, at the head where it is largest.

    A retrieval head scores one block high and all others low. The many others score all blocks alike, and
    would drown it in a mean. [heads, blocks] -> [blocks]
    """
    found: np.ndarray = log_attention(heads).max(axis=0)
    return found
