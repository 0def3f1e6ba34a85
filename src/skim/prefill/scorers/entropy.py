"""Scores blocks by the entropy of the drafter's next-token prediction; the question is not read.

For each block: the mean of its tokens' logits, softmax, entropy. Blocks of varied, hard to predict text
score high. A baseline: it measures density of information, not relevance.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from skim.device import arrays_to_device
from skim.prefill.scoring.factory import Models
from skim.prefill.scoring.head import logits_of
from skim.prefill.scoring.scorer import Scorer, ScoringError, ScoringTask
from skim.prefill.scoring.windows import Batch, WindowStep, cut, run, windows_per_batch
from skim.registry import Declaration

WINDOW = 1024  # prompt tokens in a scoring window
_HEAD_BLOCKS = 64  # blocks whose logits exist at once

SCORER = Declaration(
    help="entropy of the next-token prediction, regardless of the question",
    model="drafter",
    order=60,
)


def make(models: Models) -> Scorer:
    return models.adapt(EntropyScorer(models.reader.module))


class EntropyScorer:
    """Entropy of the drafter's mean prediction, block by block.

    Hidden states are averaged by block before the output head. The head is linear, so the head of a mean
    is the mean of the logits, and a tensor of tokens x vocabulary never exists. A soft cap after the head
    (Gemma 2) is applied to the mean: close to the mean of capped logits, not equal.

    Tokens at the start of a scoring window have little context, which raises the entropy of their blocks.
    """

    def __init__(self, module: Any, *, window: int = WINDOW, windows_per_batch: int | None = None) -> None:
        self._module = module
        self._config = module.config.get_text_config()
        self._window = min(window, int(self._config.max_position_embeddings))
        self._per_batch = windows_per_batch

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        blocks: list[int] = task.wanted.tolist()
        places = task.places
        per_batch = self._per_batch or windows_per_batch(
            self._module, self._config.num_hidden_layers, self._window, task.slice_seconds
        )
        total: torch.Tensor | None = None  # [blocks, hidden], sums of hidden states
        for edges in cut(len(places), self._window, per_batch):
            counts = np.diff(edges)
            inside = np.arange(counts.max()) < counts[:, None]  # [windows, length]
            own = np.where(inside, edges[:-1, None] + np.arange(counts.max()), edges[0])
            step = WindowStep(Batch(task.ids[places[own]], counts), self._module.device)
            hidden = run(self._module.base_model, step).last_hidden_state[0].float()
            if total is None:
                total = hidden.new_zeros(task.blocks + 1, hidden.shape[-1])
            owners = np.where(inside, places[own] // task.block_size, task.blocks)  # padding: one extra block
            total.index_add_(0, arrays_to_device([owners], hidden.device)[0].flatten(), hidden)
            task.hand_over()
            yield
        scores = [0.0] * task.blocks
        if total is None:
            return scores
        for first in range(0, len(blocks), _HEAD_BLOCKS):
            some = blocks[first : first + _HEAD_BLOCKS]
            sizes = [min(task.block_size, len(task.tokens) - block * task.block_size) for block in some]
            mean = total[some] / torch.tensor(sizes, device=total.device)[:, None]
            for block, value in zip(some, self._entropy(mean), strict=True):
                scores[block] = value
            yield
        return scores

    @torch.inference_mode()
    def _entropy(self, mean: torch.Tensor) -> list[float]:
        """[blocks, hidden] -> one number per block."""
        p = torch.softmax(logits_of(self._module, mean), dim=-1)
        entropy = -(p * p.clamp_min(1e-9).log()).sum(dim=-1)
        if not bool(torch.isfinite(entropy).all()):
            raise ScoringError(
                "the drafter's logits are not finite (a damaged model, or float16 overflow); "
                "use another dtype or another scorer"
            )
        return entropy.clamp_min(0.0).tolist()  # type: ignore[no-any-return]
