"""Scores as the attention scorer does, but from one pass over the whole prompt instead of windows.

A passage is judged by all that stands before it: what "the second one" means may be a page away. That costs a
pass of the drafter that grows with the square of the prompt, which block-sparse attention makes shorter, and
it needs a drafter whose window the prompt fits.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from skim.attention.blocksparse.counter import BlockCounter
from skim.memory.store import LayerShape
from skim.prefill.plan import DenseReason
from skim.prefill.scorers.attention import AttentionScorer, Best, join
from skim.prefill.scoring.calibration import Calibration
from skim.prefill.scoring.full_pass import listen_in_full
from skim.prefill.scoring.task import ScoringTask
from skim.prefill.scoring.windows import ScoringError

log = logging.getLogger(__name__)


class FullScorer(AttentionScorer):
    """Attention from the question to the blocks in one pass, by the task's policy if it has one.

    The question is read behind the prompt, wherever it stood in it. All blocks are read, also where only
    candidates are scored.
    """

    def __init__(
        self,
        module: Any,
        layers: Sequence[LayerShape],  # of the module
        calibration: Calibration,
        *,
        chunk: int | None = None,
    ) -> None:
        super().__init__(module, calibration, name="full")
        self._layers = layers
        self._chunk = chunk

    def score_heads(self, task: ScoringTask) -> Generator[None, None, torch.Tensor]:
        question = task.ids[task.question.start : task.question.stop]
        if not len(question):
            raise ScoringError("the question is empty, and the full scorer needs one; ask something")
        places = task.only(range(task.blocks)).places(question=False)
        if not len(places):
            return torch.zeros(1, task.blocks)
        joined = join(places, np.array([0, len(places)]), task.ids, question)
        [tokens] = joined.batch.tokens
        if len(tokens) > self._positions:
            raise ScoringError(
                f"the prompt has {len(task.tokens)} tokens, and the full scorer reads no more than fit the "
                f"window of the model that scores, {self._positions} positions; use the scorer cascade or "
                "attention, which read in windows, or a drafter with a wider one",
                DenseReason.SCORER_WINDOW,
            )
        best, counter = Best(task), BlockCounter()
        heard = yield from listen_in_full(
            self._module,
            self._layers,
            tokens,
            len(question),
            self._heads,
            policy=task.policy,
            counter=counter,
            chunk=self._chunk,
        )
        best.note(joined, heard)
        scores = best.scores()
        read = counter.stats()
        if read.visible:
            log.info(
                "[prefill] the drafter's pass over %d tokens read %.1f%% of the blocks of keys",
                len(tokens),
                100 * read.read / read.visible,
            )
        return scores
