"""Counts of the key blocks that block-sparse chunks saw and read, and of chunks that read all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from skim.attention.blocksparse.policy import visible_blocks
from skim.attention.step import AttentionCall, Row, Step


class FullRead(StrEnum):
    """The reason that a chunk reads every key block in a layer despite its policy; a label in the metrics."""

    WINDOW = "window"  # the layer has a sliding window, which reads little anyway
    SHORT = "short"  # the first and last blocks, which are always read, are all of them
    END = "end"  # its queries are in the last blocks of the prompt
    ORDER = "order"  # its positions do not increase from slot to slot


def why_dense(row: Row, call: AttentionCall) -> FullRead | None:
    """The reason a chunk reads every block in this layer despite its policy; None if blocks are selected."""
    assert row.policy is not None
    if call.window is not None:
        return FullRead.WINDOW
    if row.policy.always_all(row.length):
        return FullRead.SHORT
    if row.policy.dense_from(row.context, row.queries, row.prompt) == 0:
        return FullRead.END
    return None if row.sees_all_before else FullRead.ORDER


@dataclass
class BlockStats:
    """Key blocks that chunks with a policy saw and read, summed over query blocks, query heads and layers."""

    visible: int = 0
    read: int = 0
    chunks: Counter[str] = field(default_factory=Counter)
    """Chunks times layers: `sparse` if blocks were selected, otherwise the reason to read all."""


class BlockCounter:
    """Counts blocks since start without waiting for the device.

    Only the device knows how many blocks were selected. The sum is kept there and copied to the host in
    stream order, so the count of a step is complete when its logits are read.
    """

    def __init__(self) -> None:
        self._visible = self._dense = 0
        self._chunks: Counter[str] = Counter()
        self._sparse: torch.Tensor | None = None  # on the device
        self._host: torch.Tensor | None = None  # its copy

    def sparse_rows(self, step: Step, heads: int, call: AttentionCall) -> list[int]:
        """The rows that select blocks in this layer. Other chunks with a policy are counted as dense."""
        found = []
        for index in step.with_policy:
            reason = why_dense(step.rows[index], call)
            if reason is None:
                found.append(index)
            else:
                self._add_dense(step.rows[index], heads, reason)
        return found

    def _add_dense(self, row: Row, heads: int, reason: FullRead) -> None:
        self._chunks[reason] += 1
        if reason is not FullRead.WINDOW:
            blocks = heads * visible_blocks(row.context, row.queries)
            self._visible += blocks
            self._dense += blocks

    def add(self, row: Row, counts: torch.Tensor) -> None:
        """Count a row that selected `counts` blocks. [query_blocks, heads]"""
        self._chunks["sparse"] += 1
        self._visible += counts.shape[1] * visible_blocks(row.context, row.queries)
        if self._sparse is None or self._host is None:
            self._sparse = self._host = torch.zeros((), dtype=torch.long, device=counts.device)
            if counts.is_cuda:
                self._host = torch.zeros((), dtype=torch.long, device="cpu", pin_memory=True)
        self._sparse += counts.sum()
        if self._host is not self._sparse:
            self._host.copy_(self._sparse, non_blocking=True)

    def stats(self) -> BlockStats:
        chosen = int(self._host) if self._host is not None else 0
        return BlockStats(self._visible, self._dense + chosen, self._chunks.copy())
