"""What one forward needs to know about its rows: the metadata object that travels to every layer.

A step is one flattened run of tokens without padding: the new tokens of every row, one row after the
other. A row is a prefill chunk or a decode token of one sequence; the layers do not care which.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from skim.attention.blocksparse.policy import Policy
from skim.attention.cpu.reads import Read, Run, find_runs, plan_reads
from skim.memory.pool import KVPool

if TYPE_CHECKING:
    from skim.attention.blocksparse.counter import BlockCounter


class Role(Enum):
    """Why a row is in the step."""

    PREFILL = "prefill"
    DECODE = "decode"


class Row(NamedTuple):
    """One sequence's part in a step: `queries` new tokens after `context` slots that are already written."""

    role: Role
    blocks: Sequence[int]  # the block table; slot i is at blocks[i // block_size], offset i % block_size
    context: int
    queries: int
    positions: Sequence[int] | None = None
    """Positions of at least `context + queries` slots, in any order; None where slot i holds position i."""
    ascending: bool = False
    """Whether those of its own slots are known to ascend: faster to read, and right in any case."""
    policy: Policy | None = None
    """Which blocks of keys a prefill chunk reads; None for all. Backends may always read more."""
    prompt: int = 0
    """With a policy, the slots of the whole prompt: queries in its last blocks read everything."""

    @property
    def length(self) -> int:
        return self.context + self.queries

    @property
    def in_order(self) -> bool:
        """Whether later slots stand at later positions: then what a query sees through a window is a run."""
        return self.positions is None or self.ascending

    @property
    def sees_all_before(self) -> bool:
        """Whether every query may read all slots before its own, windows aside.

        So may a decode token, whatever the order before it: it comes after all of them.
        """
        return self.in_order or self.role is Role.DECODE

    def position(self, slot: int) -> int:
        return slot if self.positions is None else self.positions[slot]

    def first_slot(self, window: int | None) -> int:
        """The first slot that any of the row's queries may have to read."""
        if window is None or not self.in_order:
            return 0
        out_of_reach = self.position(self.context) - window
        if self.positions is None:
            return max(0, out_of_reach + 1)
        return bisect.bisect_right(self.positions, out_of_reach, hi=self.context)


@dataclass(frozen=True)
class AttentionCall:
    """How one layer wants its scores computed, read from the call transformers makes."""

    scale: float
    window: int | None = None  # a query at position p reads keys at positions above p - window
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [query_heads] logits that take part in the softmax and add nothing


class Attention(Protocol):
    """What a forward's `skim_step` must be able to do.

    What it is given is its own for the call alone: in a compiled layer the memory is used again afterwards.
    """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor: ...  # [tokens, query_heads, value_dim]


@dataclass
class Step:
    """The rows of one forward over one pool. Built once a step; every layer reads it."""

    pool: KVPool
    rows: tuple[Row, ...]
    backend: Backend
    notes: dict[type, Any] = field(default_factory=dict, repr=False)
    """What a backend has worked out for all layers of this step, under a class of its own."""
    _reads: dict[tuple[int, int, int], list[Read]] = field(default_factory=dict, repr=False)

    @cached_property
    def starts(self) -> list[int]:
        """Cumulative query lengths: row i's tokens are `starts[i] : starts[i + 1]` of the flattened run."""
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + row.queries)
        return starts

    @cached_property
    def with_policy(self) -> list[int]:
        """The chunks that have a policy; a single query always reads everything."""
        return [i for i, row in enumerate(self.rows) if row.policy is not None and row.queries > 1]

    @cached_property
    def positions(self) -> list[int]:
        """The position of every new token."""
        flat: list[int] = []
        for row in self.rows:
            slots = range(row.length) if row.positions is None else row.positions
            flat.extend(slots[row.context : row.length])
        return flat

    @cached_property
    def writes(self) -> list[tuple[int, torch.Tensor | None, torch.Tensor]]:
        """Where new keys and values go: (slab, which tokens or None for all, slots within the slab)."""
        slots: dict[int, list[torch.Tensor]] = {}
        tokens: dict[int, list[torch.Tensor]] = {}
        for row, start in zip(self.rows, self.starts, strict=False):
            for run in self._find_runs(row, row.context, row.length):
                first = start + run.slots.start - row.context
                slots.setdefault(run.slab, []).append(torch.arange(run.start, run.start + len(run.slots)))
                tokens.setdefault(run.slab, []).append(torch.arange(first, first + len(run.slots)))
        device = self.pool.device
        return [
            (
                slab,
                None if len(slots) == 1 else torch.cat(tokens[slab]).to(device),
                torch.cat(slots[slab]).to(device),
            )
            for slab in slots
        ]

    def reads(self, row: int, first: int, end: int) -> list[Read]:
        """How to read the slots `first : end` of a row's sequence; worked out once, used by every layer."""
        key = (row, first, end)
        if key not in self._reads:
            self._reads[key] = plan_reads(self._find_runs(self.rows[row], first, end), self.pool.device)
        return self._reads[key]

    def _find_runs(self, row: Row, first: int, end: int) -> list[Run]:
        return find_runs(row.blocks, first, end, self.pool.block_size, self.pool.slab_blocks)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor:
        return self.backend.attend(self, layer, query, key, value, call)


class Backend(Protocol):
    """Writes a step's new keys and values into the pool and attends over what each row may read."""

    counter: BlockCounter
    capturable: bool  # whether decode steps may be captured as CUDA graphs

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> torch.Tensor: ...
