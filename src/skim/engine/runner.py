"""One forward: rows of tokens in, logits out. Knows neither requests nor scheduling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from skim.attention.backend import Backend
from skim.attention.step import Row, Step
from skim.device import to_device
from skim.engine.graphs import StepGraphs
from skim.memory.pool import KVPool
from skim.sampling.logprobs import Draw


class RowInput(NamedTuple):
    """A row and its new tokens; `wants_logits` if a token is sampled after the last of them."""

    row: Row
    token_ids: Sequence[int]
    wants_logits: bool
    awaited: int | None = None  # index of its token in the previous draw, if the host has not read it yet


class Forward(NamedTuple):
    """The results of a forward, on the device."""

    logits: torch.Tensor  # [rows that want logits, vocab]
    finite: torch.Tensor | None  # [the other rows]: True if the new keys and values are finite


class Runner:
    """Runs a transformers module over the pool without waiting for the device."""

    def __init__(self, module: Any, pool: KVPool, backend: Backend, graphs: StepGraphs | None = None) -> None:
        self.module = module
        self.pool = pool
        self.backend = backend
        self.graphs = graphs
        self.tokens_computed = 0
        self.paths: Counter[str] = Counter()
        """Steps by path: `graph`, or the reason for running kernel by kernel."""

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput], before: Draw | None = None) -> Forward:
        """Compute every row's new tokens. Rows that want no logits are checked for finite keys and values.

        Awaited tokens are taken from the draw `before`, on the device.
        """
        checked = tuple(i for i, one in enumerate(inputs) if not one.wants_logits)
        step = Step(self.pool, tuple(one.row for one in inputs), self.backend, checked)
        tokens = [token for one in inputs for token in one.token_ids]
        if len(tokens) != step.cumulative_lengths[-1]:
            raise AssertionError(f"{len(tokens)} tokens for rows of {step.cumulative_lengths[-1]}")
        last = [step.cumulative_lengths[i + 1] - 1 for i, one in enumerate(inputs) if one.wants_logits]
        awaited = [
            (end - 1, one.awaited)
            for end, one in zip(step.cumulative_lengths[1:], inputs, strict=True)
            if one.awaited is not None
        ]
        places, sources = [place for place, _ in awaited], [source for _, source in awaited]
        parts = [tokens, step.positions, last, places, sources]
        entries = to_device(torch.tensor([entry for part in parts for entry in part]), self.pool.device)
        ids, positions, keep, to, source = entries.split_with_sizes([len(part) for part in parts])
        if before is not None and awaited:
            ids.index_copy_(0, to, before.tokens.index_select(0, source).long())
        refusal = "off"
        if self.graphs is not None:
            refusal = self.graphs.refusal(step) or ""
            if not refusal:
                computed, path = self.graphs.forward(step, ids, positions)
                self._count(step, path)
                return Forward(computed.logits[: len(last)], computed.finite if checked else None)
        output = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            skim_step=step,
        )
        self._count(step, refusal)
        return Forward(output.logits[0], step.finite)

    def _count(self, step: Step, path: str) -> None:
        self.tokens_computed += step.cumulative_lengths[-1]
        self.paths[path] += 1
