"""Scores as the attention scorer does, from one pass over the whole prompt instead of scoring windows.

A passage is scored with all earlier text in view: the meaning of "the second one" may be a page away. The
drafter's pass is quadratic in the prompt, less with block-sparse attention, and the prompt must fit the
drafter's context window.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from skim.attention.blocksparse.counter import BlockCounter
from skim.memory.store import LayerShape
from skim.prefill.plan import DenseReason
from skim.prefill.scorers.attention import AttentionScorer
from skim.prefill.scoring.block_scores import BlockScores, Reduce, join
from skim.prefill.scoring.calibration import Calibration, calibration_of
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.full_pass import read_prompt
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringTask, handing_over
from skim.registry import Declaration

log = logging.getLogger(__name__)

SCORER = Declaration(
    help="as `attention`, in one slower pass over a prompt that fits the context window",
    model="drafter",
    grows=True,
    odds=True,
    order=40,
)


def make(models: Models) -> Scorer:
    reader = models.reader
    return models.adapt(FullScorer(reader.module, reader.layers, calibration_of(reader)))


class FullScorer(AttentionScorer):
    """Attention from the question to the blocks in one pass, block-sparse if the task has a policy.

    The question is moved to the end of the prompt. All blocks are read, even if only candidates are scored.
    """

    def __init__(
        self,
        module: Any,
        layers: Sequence[LayerShape],  # of the module
        calibration: Calibration,
        *,
        chunk: int | None = None,
    ) -> None:
        super().__init__(module, calibration)
        self._layers = layers
        self._chunk = chunk

    def reduced(self, task: ScoringTask, reduce: Reduce) -> Generator[None, None, np.ndarray]:
        scores, counter = BlockScores(task, self._module.device), BlockCounter()
        tokens = yield from self._read_whole(task, scores, counter)
        if not len(task.context_blocks):
            return np.zeros(0)
        found = yield from scores.result(reduce)
        read = counter.stats()
        if read.visible:
            log.info(
                "[prefill] the drafter's pass over %d tokens read %.1f%% of the key blocks",
                tokens,
                100 * read.read / read.visible,
            )
        return found

    def _read_whole(
        self, task: ScoringTask, scores: BlockScores, counter: BlockCounter
    ) -> Generator[None, None, int]:
        """Read the whole prompt; return the number of tokens."""
        question = task.question_ids
        if not len(question):
            raise ScoringError("the question is empty, and the full scorer needs one; ask something")
        places = task.only(range(task.blocks)).context_places
        if not len(places):
            return 0
        joined = join(places, np.array([0, len(places)]), task.ids, question)
        [tokens] = joined.batch.tokens
        if len(tokens) > self._positions:
            raise ScoringError(
                f"the prompt has {len(task.tokens)} tokens, and the full scorer reads only prompts that fit "
                f"the context window of the scoring model, {self._positions} positions; use the scorer "
                "blend or attention, which read in scoring windows, or a drafter with a wider context "
                "window",
                DenseReason.SCORER_WINDOW,
            )
        reading = read_prompt(
            self._module,
            self._layers,
            tokens,
            len(question),
            self._captures,
            scores.taker(joined),
            policy=task.policy,
            counter=counter,
            chunk=self._chunk,
            seconds=task.slice_seconds,
        )
        yield from handing_over(reading, task)
        return len(tokens)
