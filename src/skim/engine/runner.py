"""One forward: rows of tokens in, logits out. Knows nothing of requests or scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from skim.attention.step import Backend, Row, Step
from skim.memory.pool import KVPool


@dataclass(frozen=True)
class RowInput:
    """A row and its new tokens; `wants_logits` if a token is to be sampled after the last of them."""

    row: Row
    token_ids: Sequence[int]
    wants_logits: bool


class Runner:
    """Runs a transformers module over the pool."""

    def __init__(self, module: Any, pool: KVPool, backend: Backend) -> None:
        self.module = module
        self.pool = pool
        self.backend = backend
        self.tokens_computed = 0

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput]) -> torch.Tensor:
        """Compute every row's new tokens into the pool; logits of the rows that want them. [rows, vocab]"""
        step = Step(self.pool, tuple(one.row for one in inputs), self.backend)
        tokens = [token for one in inputs for token in one.token_ids]
        if len(tokens) != step.starts[-1]:
            raise AssertionError(f"{len(tokens)} tokens for rows of {step.starts[-1]}")
        last = [step.starts[i + 1] - 1 for i, one in enumerate(inputs) if one.wants_logits]
        device = self.pool.device
        output = self.module(
            input_ids=torch.tensor([tokens], dtype=torch.long, device=device),
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=torch.tensor(last, dtype=torch.long, device=device),
            skim_step=step,
        )
        self.tokens_computed += len(tokens)
        return output.logits[0]  # type: ignore[no-any-return]
