"""One forward: rows of tokens in, logits out. Knows neither requests nor scheduling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch

from skim.attention.backend import Backend
from skim.attention.step import Row, Step
from skim.device import to_device
from skim.engine.graphs import StepGraphs
from skim.memory.pool import KVPool
from skim.models.head import Head
from skim.models.residency import Residency
from skim.sampling.logprobs import Draw, report_prompt

PIECE = 2**23  # logits of prompt tokens that exist at once


class Targets(NamedTuple):
    """Prompt tokens whose log-probabilities are wanted: those after the row's new tokens, from `first`."""

    first: int
    tokens: Sequence[int]
    top: int  # likeliest tokens to report beside each


class RowInput(NamedTuple):
    """A row and its new tokens. A token is sampled after each of the last `wants_logits`."""

    row: Row
    token_ids: Sequence[int]
    wants_logits: int
    awaited: int | None = None  # index of its token in the previous draw, if the host has not read it yet
    targets: Targets | None = None


class Forward(NamedTuple):
    """The results of a forward, on the device."""

    logits: torch.Tensor  # [tokens that logits are wanted after, vocab]
    finite: torch.Tensor | None  # [the other rows]: True if the new keys and values are finite
    prompt: torch.Tensor | None = None  # [targets of all rows, 2 + 2 * top] as `report_prompt` makes it
    mass: torch.Tensor | None = None  # [rows] as `Step.mass`; None if no row is fast


class Runner:
    """Runs a transformers module over the pool without waiting for the device."""

    def __init__(
        self,
        module: Any,
        pool: KVPool,
        backend: Backend,
        graphs: StepGraphs | None = None,
        residency: Residency | None = None,
        *,
        without_graphs: str = "off",
    ) -> None:
        """`without_graphs`: the reason for having no graphs, as a metric label."""
        self.module = module
        self.pool = pool
        self.backend = backend
        self.graphs = graphs
        self._residency = residency
        self._without_graphs = without_graphs
        self.tokens_computed = 0
        self.prompt_tokens_reported = 0
        """Prompt tokens whose log-probabilities were computed."""
        self.paths: Counter[str] = Counter()
        """Steps by path: `graph`, or the reason for running kernel by kernel."""

    @torch.inference_mode()
    def forward(self, inputs: Sequence[RowInput], before: Draw | None = None) -> Forward:
        """Compute every row's new tokens. Rows that want no logits are checked for finite keys and values.

        Awaited tokens are taken from the draw `before`, on the device. Raises ParkedError, and runs nothing,
        if the weights are not on the device.
        """
        if self._residency is not None:
            self._residency.check()
        checked = tuple(i for i, one in enumerate(inputs) if not one.wants_logits)
        reports = any(one.targets is not None for one in inputs)
        ends = None if reports else tuple(one.wants_logits for one in inputs)
        step = Step(self.pool, tuple(one.row for one in inputs), self.backend, checked, ends=ends)
        tokens = [token for one in inputs for token in one.token_ids]
        if len(tokens) != step.cumulative_lengths[-1]:
            raise AssertionError(f"{len(tokens)} tokens for rows of {step.cumulative_lengths[-1]}")
        stops = step.cumulative_lengths[1:]
        wanted = (range(stop - one.wants_logits, stop) for one, stop in zip(inputs, stops, strict=True))
        last = [place for places in wanted for place in places]
        awaited = [
            (stop - 1, one.awaited)
            for stop, one in zip(stops, inputs, strict=True)
            if one.awaited is not None
        ]
        places, sources = [place for place, _ in awaited], [source for _, source in awaited]
        parts = [tokens, step.positions, last, places, sources]
        entries = to_device(torch.tensor([entry for part in parts for entry in part]), self.pool.device)
        ids, positions, keep, to, source = entries.split_with_sizes([len(part) for part in parts])
        if before is not None and awaited:
            ids.index_copy_(0, to, before.tokens.index_select(0, source).long())
        refusal = self._without_graphs
        if self._residency is not None and self._residency.streams:
            refusal = "offload"  # another engine may have moved layers to the host since the start
        elif self.graphs is not None:
            verifies = any(one.wants_logits > 1 for one in inputs)
            if reports:
                refusal = "prompt_logprobs"
            elif verifies and any(one.wants_logits < one.row.queries for one in inputs):
                refusal = "verify"
            else:
                refusal = self.graphs.refusal(step, verifies=verifies) or ""
            if not refusal:
                if self._residency is not None:
                    self._residency.settle()
                computed, path = self.graphs.forward(step, ids, positions, verifies=verifies)
                self._count(step, path)
                finite = computed.finite if checked else None
                return Forward(computed.logits[: len(last)], finite, mass=computed.mass)
        seeing: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        with self._head.seeing_hidden() if reports else seeing as hidden:
            output = self.module(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                skim_step=step,
            )
        self._count(step, refusal)
        report = self._report(step, inputs, hidden[0]) if reports else None
        return Forward(output.logits[0], step.finite, report, step.mass)

    @cached_property
    def _head(self) -> Head:
        return Head(self.module)

    def _report(self, step: Step, inputs: Sequence[RowInput], hidden: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the rows' targets, from the hidden states [tokens, width], piece by piece."""
        places: list[int] = []
        tokens: list[int] = []
        top = 0
        for start, one in zip(step.cumulative_lengths, inputs, strict=False):
            if one.targets is not None:
                first = start + one.targets.first
                places.extend(range(first, first + len(one.targets.tokens)))
                tokens.extend(one.targets.tokens)
                top = max(top, one.targets.top)
        wanted = to_device(torch.tensor([places, tokens]), hidden.device)  # [2, targets]
        self.prompt_tokens_reported += len(tokens)
        size, top = max(1, PIECE // self._head.vocab_size), min(top, self._head.vocab_size)
        pieces = [wanted[:, start : start + size] for start in range(0, len(tokens), size)]
        return torch.cat(
            [
                report_prompt(self._head.logits(hidden.index_select(0, place)), token, top)
                for place, token in pieces
            ]
        )

    def _count(self, step: Step, path: str) -> None:
        self.tokens_computed += step.cumulative_lengths[-1]
        self.paths[path] += 1
