"""Scores blocks by the likelihood of the question after each of them.

A question is likelier after the passage that it asks about, whether or not they share words. Every block is
read alone, followed by the question: text beside the evidence makes the question less likely.

A question token counts by how much likelier it is after this block than after most of the blocks, within
limits: one surprising token should not outweigh all others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from skim.device import arrays_to_device, to_host, until_computed
from skim.prefill.scoring.combine import odds
from skim.prefill.scoring.head import logits_of
from skim.prefill.scoring.scorer import ScoringError, ScoringTask, handing_over
from skim.prefill.scoring.windows import Batch, WindowStep, run, windows_per_batch
from skim.tokenization import token_ids

BETWEEN = "\n\nQuestion: "
LEAST, MOST = -1.0, 4.0  # nats by which one token of the question counts
_MOST_LOGITS = 1 << 26  # that exist at once


class LikelihoodScorer:
    """The likelihood of the question after each block. `module` reads the prompt's token ids."""

    def __init__(self, module: Any, tokenizer: Any) -> None:
        self._module = module
        self._layers = int(module.config.get_text_config().num_hidden_layers)
        self._between = np.array(token_ids(tokenizer, BETWEEN, add_special_tokens=False), dtype=np.int64)

    def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
        result = np.zeros(task.blocks)
        read = task.context_blocks
        result[read] = odds((yield from self.gains(task)))
        return result.tolist()  # type: ignore[no-any-return]

    def gains(self, task: ScoringTask) -> Generator[None, None, np.ndarray]:
        """For each of the task's `context_blocks`, the nats by which the question is likelier after it."""
        if not len(task.context_blocks):
            return np.zeros(0)
        found = yield from self._read(task)
        if not np.isfinite(found).all():
            raise ScoringError(
                "the drafter's logits are not finite (a damaged model, or float16 overflow); "
                "use another dtype or another scorer"
            )
        return gains_of(found)

    def _read(self, task: ScoringTask) -> Generator[None, None, np.ndarray]:
        """The log of the probability of each question token after each block. [blocks, question]"""
        question = task.question_ids
        if not len(question):
            raise ScoringError("the likelihood of a question needs a question")
        after = np.concatenate([self._between, question])
        blocks = np.split(task.context_places, np.cumsum(task.context_counts[task.context_blocks])[:-1])
        length = 1 + task.block_size + len(after)
        some = windows_per_batch(self._module, self._layers, length, task.slice_seconds)
        parts: list[torch.Tensor] = []
        for first in range(0, len(blocks), some):
            rows = [
                np.concatenate([task.ids[:1], task.ids[places], after])
                for places in blocks[first : first + some]
            ]
            parts.append(self._of_rows(rows, question))
            task.hand_over()
            yield
        [found] = to_host([torch.cat(parts)])
        yield from handing_over(until_computed(self._module.device), task)
        return found.numpy()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _of_rows(self, rows: Sequence[np.ndarray], question: np.ndarray) -> torch.Tensor:
        """The log of the probability of each question token at the end of each row. [rows, question]"""
        ends = np.array([len(row) for row in rows])
        tokens = np.zeros((len(rows), ends.max()), dtype=np.int64)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
        step = WindowStep(Batch(tokens, ends, len(question)), self._module.device)
        hidden = run(self._module.base_model, step).last_hidden_state.view(*tokens.shape, -1)
        places, asked = arrays_to_device(
            [ends[:, None] - len(question) - 1 + np.arange(len(question)), question], self._module.device
        )
        own = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[2]))  # predict the question
        vocabulary = int(self._module.config.get_text_config().vocab_size)
        found = []
        for part in own.split(max(1, _MOST_LOGITS // (len(question) * vocabulary))):
            logits = logits_of(self._module, part)
            chosen = logits.gather(2, asked.expand(len(part), -1)[..., None])[..., 0]
            found.append(chosen - logits.logsumexp(dim=2))
        return torch.cat(found)


def gains_of(logs: np.ndarray) -> np.ndarray:
    """The nats by which the question is likelier after each block than after most. [blocks, question]"""
    above = logs - np.median(logs, axis=0)
    found: np.ndarray = np.clip(above, LEAST, MOST).sum(axis=1)
    return found
