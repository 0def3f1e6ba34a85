"""Scores blocks by the question's attention to them, in scoring windows, at calibrated heads.

Choices that were measured (SmolLM2-135M, 7K tokens of natural text, 260 needle tasks):
- heads chosen by calibration, not an average over all: most heads attend to the start, to neighbours or to
  nothing in particular, and drown the few that retrieve;
- alone, the maximum over the question's tokens is better than the mean: one word of the question finds the
  passage, and the others match nothing. A calibration weighs both, and more statistics, by what they add;
- probabilities of the full softmax, so that a scoring window without the answer has low scores (see
  `WindowStep`);
- five neighbouring tokens averaged, then the maximum of a block: an answer is a few words, not one token;
- attention near the edge of a block counts, weighted down, for its neighbour too: of the needles in 20
  prompts of 4K tokens a quarter lay across an edge, and the half without the question's words was lost.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch

from skim.device import to_device
from skim.prefill.scoring.block_scores import BlockScores, Reduce, join
from skim.prefill.scoring.calibration import Calibration, calibration_of
from skim.prefill.scoring.combine import ATTENTION, log_attention, odds, standardised
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.features import weights_of
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringTask
from skim.prefill.scoring.statistics import stacked
from skim.prefill.scoring.windows import (
    LONGEST_QUESTION,
    WINDOW_TOKENS,
    WindowStep,
    cut,
    run,
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
    time, joined across the gaps between them. But for the scores of its blocks, memory does not
    grow with the prompt.
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
        self._captures = calibration.captures()
        features = calibration.features
        self._weights = None if features is None else weights_of(features, self._captures)
        self._window = window
        self._per_batch = windows_per_batch
        self._positions = int(config.max_position_embeddings)

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        result = np.zeros(task.blocks)
        read = task.context_blocks
        if self._weights is None:
            heads = yield from self.reduced(task, _side_by_side)
            if len(read):
                result[read] = odds(ATTENTION * standardised(_standing_out(heads)))
        else:
            logits = yield from self.reduced(task, self._weighted)
            result[read] = odds(logits)
        return result.tolist()  # type: ignore[no-any-return]

    def reduced(self, task: ScoringTask, reduce: Reduce) -> Generator[None, None, np.ndarray]:
        """Read the blocks, then reduce the rows of captured attention to them on the device.

        On a GPU the host launches everything, then yields until it is computed.
        """
        scores = BlockScores(task, self._module.device)
        yield from self._read_windows(task, scores)
        if not len(task.context_blocks):
            return np.zeros(0)
        return (yield from scores.result(reduce))

    def _read_windows(self, task: ScoringTask, scores: BlockScores) -> Generator[None, None, None]:
        question = task.question_ids
        size = self._context_size(len(question))
        places = task.context_places
        per_batch = self._per_batch or windows_per_batch(
            self._module, max(self._captures) + 1, size + len(question) + 1, task.slice_seconds
        )
        for edges in cut(len(places), size, per_batch):
            joined = join(places, edges, task.ids, question)
            take = scores.taker(joined)
            run(self._module, WindowStep(joined.batch, self._module.device, self._captures, take))
            task.hand_over()
            yield

    def _weighted(self, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The logits of the blocks: the sum of all features by their weights. [blocks]"""
        found = stacked(rows, self._captures)
        weights = to_device(torch.tensor(self._weights, dtype=torch.float32), found.device)
        return weights @ found

    def _context_size(self, question: int) -> int:
        """Prompt tokens in a scoring window: more for a long question, which every window computes again.

        At most half of the model's positions: `join` may add as many tokens between them.
        """
        size = min(max(self._window, 4 * question), (self._positions - question) // 2)
        if not 0 < question <= LONGEST_QUESTION or size < 1:
            raise ScoringError(
                f"the question has {question} tokens, and scorers by attention read questions of 1 to "
                f"{LONGEST_QUESTION}, half a scoring window of {WINDOW_TOKENS}, in {self._positions} "
                "positions; shorten the question or use the lexical scorer"
            )
        return size


def _side_by_side(rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The rows of all layers. [rows, blocks]"""
    return torch.cat(list(rows.values()))


def _standing_out(heads: np.ndarray) -> np.ndarray:
    """For uncalibrated heads: each block's deviation from the mean, at the head where it is largest.

    A retrieval head scores one block high and all others low. The many others score all blocks alike, and
    would drown it in a mean. [heads, blocks] -> [blocks]
    """
    found: np.ndarray = log_attention(heads).max(axis=0)
    return found
