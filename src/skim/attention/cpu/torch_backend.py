"""The torch backend: the CPU path, and the reference for faster kernels.

Each row attends over pieces of its keys, and the pieces are merged. A prefill chunk's own keys come from the
forward, unless the pool rounds them; all others from the pool: long runs of slots in place, short runs
gathered, so a row is read in few pieces, however fragmented the pool is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from skim.attention.backend import Backend
from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.plain import attend_blocks
from skim.attention.glance_plain import attend_glance, renew_evidence
from skim.attention.pieces import Piece, attend_piece
from skim.attention.plain import merge
from skim.attention.reading import Reading, reading
from skim.attention.step import AttentionCall, Step
from skim.memory.pool import KVPool
from skim.memory.runs import Run
from skim.memory.summary import filled_in, summarize

IN_PLACE_SLOTS = 256  # shorter runs cost more in calls than a gather costs in copies


@dataclass(frozen=True)
class Read:
    """Slots of one slab that are read as one piece."""

    slab: int
    at: slice | torch.Tensor  # the slab's slots: a run of them, or an index to gather by
    slots: tuple[range, ...]  # the sequence's slots, in the same order


class SlabWrite(NamedTuple):
    """The part of a step's slot mapping that lies in one slab."""

    slab: int
    tokens: torch.Tensor | None  # the step's tokens; None for all
    slots: torch.Tensor  # their slots within the slab


class TorchMetadata:
    """A step's slot mapping and the reads of its rows, shared by all layers."""

    def __init__(self, step: Step) -> None:
        self._pool = step.pool
        self._rows = step.rows
        self._cumulative_lengths = step.cumulative_lengths
        self._slot_mappings: dict[int, list[SlabWrite]] = {}
        self._reads: dict[tuple[int, int, int, int], list[Read]] = {}
        self._runs: dict[tuple[int, int], list[Run]] = {}
        self._filled: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def slot_mapping(self, group: int) -> list[SlabWrite]:
        """The slot mapping of the step's new tokens in a layer group, slab by slab."""
        if group not in self._slot_mappings:
            self._slot_mappings[group] = self._map_slots(group)
        return self._slot_mappings[group]

    def _map_slots(self, group: int) -> list[SlabWrite]:
        slots: dict[int, list[torch.Tensor]] = {}
        tokens: dict[int, list[torch.Tensor]] = {}
        for row, start in zip(self._rows, self._cumulative_lengths, strict=False):
            for run in self._pool.runs(row.table(group), row.context, row.length):
                first = start + run.slots.start - row.context
                slots.setdefault(run.slab, []).append(torch.arange(run.start, run.start + len(run.slots)))
                tokens.setdefault(run.slab, []).append(torch.arange(first, first + len(run.slots)))
        device = self._pool.device
        return [
            SlabWrite(
                slab,
                None if len(slots) == 1 else torch.cat(tokens[slab]).to(device),
                torch.cat(slots[slab]).to(device),
            )
            for slab in slots
        ]

    def filled(self, group: int) -> list[tuple[int, torch.Tensor]]:
        """The blocks that the step fills in a layer group: slabs, and indices in them."""
        if group not in self._filled:
            new = [
                r for row in self._rows for r in self._pool.runs(row.table(group), row.context, row.length)
            ]
            self._filled[group] = [
                (slab, torch.tensor(blocks, device=self._pool.device))
                for slab, blocks in filled_in(new, self._pool.block_size).items()
            ]
        return self._filled[group]

    def runs(self, row: int, group: int) -> list[Run]:
        """All slots of a row's sequence in a layer group, as runs of neighbouring slots."""
        key = (row, group)
        if key not in self._runs:
            self._runs[key] = self._pool.runs(self._rows[row].table(group), 0, self._rows[row].length)
        return self._runs[key]

    def reads(self, row: int, group: int, first: int, end: int) -> list[Read]:
        """The reads that cover the slots `first : end` of a row's sequence in a layer group."""
        key = (row, group, first, end)
        if key not in self._reads:
            runs = self._pool.runs(self._rows[row].table(group), first, end)
            self._reads[key] = group_runs(runs, self._pool.device)
        return self._reads[key]


def group_runs(runs: Sequence[Run], device: torch.device) -> list[Read]:
    """Read long runs and a single run in place; gather the others, one read per slab."""
    reads: list[Read] = []
    short: dict[int, list[Run]] = {}
    for run in runs:
        count = len(run.slots)
        if count >= IN_PLACE_SLOTS or len(runs) == 1:
            reads.append(Read(run.slab, slice(run.start, run.start + count), (run.slots,)))
        else:
            short.setdefault(run.slab, []).append(run)
    for slab, group in short.items():
        index = torch.cat([torch.arange(run.start, run.start + len(run.slots)) for run in group])
        reads.append(Read(slab, index.to(device), tuple(run.slots for run in group)))
    return reads


class TorchBackend(Backend):
    """Correct on every device that torch supports; fast on the CPU."""

    def __init__(self) -> None:
        self.counter = BlockCounter()

    def prepare(self, step: Step) -> TorchMetadata:
        return TorchMetadata(step)

    def store(self, step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        write(step.pool, step.metadata, layer, key, value)
        return True

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        metadata: TorchMetadata = step.metadata
        write(step.pool, metadata, layer, key, value)
        store = step.pool.stores[layer]
        dequantizes = reading(store, call) is Reading.DEQUANTIZED
        if not dequantizes:
            query = store.turn_query(query)
        sparse = self.counter.sparse_rows(step, query.shape[1], call)
        rows = []
        for index, row in enumerate(step.rows):
            own_queries = _row(query, step, index)
            picks = step.picks[index] if store.summarized else None
            if picks is not None:
                out, mass = attend_glance(step.pool, layer, row, picks, own_queries[:, 0], call)
                step.add_mass(index, mass)
                rows.append(out[None])
                continue
            if store.summarized and row.evidence is not None:
                renew_evidence(step.pool, layer, row, own_queries[:, 0], call)
            if index in sparse:
                get = step.pool.gather if dequantizes else step.pool.read
                keys, values = get(layer, metadata.runs(index, step.pool.group_of[layer]))
                out, kept = attend_blocks(own_queries.transpose(0, 1), keys, values, row, call)
                self.counter.add(row, kept.sum(dim=2))
                rows.append(out)
                continue
            parts = [
                part
                for piece in pieces(step, metadata, layer, index, key, value, call.window, dequantizes)
                for part in attend_piece(own_queries, piece, row, call)
            ]
            rows.append(merge(parts, call.sinks).transpose(0, 1))
        out = torch.cat(rows) if len(rows) > 1 else rows[0]
        return out if dequantizes else store.turn_out(out)


def write(pool: KVPool, metadata: TorchMetadata, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store the step's new keys and values in their slots, and the summaries of blocks that they fill."""
    for slab, tokens, slots in metadata.slot_mapping(pool.group_of[layer]):
        new_keys, new_values = (key, value) if tokens is None else (key[tokens], value[tokens])
        pool.stores[layer].write(pool.slabs[slab].layers[layer], slots, new_keys, new_values)
    if pool.stores[layer].summarized:
        for slab, blocks in metadata.filled(pool.group_of[layer]):
            summarize(pool.stores[layer], pool.slabs[slab].layers[layer], blocks)


def pieces(
    step: Step,
    metadata: TorchMetadata,
    layer: int,
    index: int,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    dequantizes: bool,
) -> Iterator[Piece]:
    """All keys that row `index` may read; slots outside the sliding window are left out."""
    row, pool = step.rows[index], step.pool
    store, group = pool.stores[layer], pool.group_of[layer]
    get = store.gather if dequantizes else store.read
    chunk = row.queries > 1  # a single query's own key is read from the pool with the others
    for read in metadata.reads(index, group, row.first_slot(window), row.context if chunk else row.length):
        keys, values = get(pool.slabs[read.slab].layers[layer], read.at)
        yield Piece(keys.transpose(0, 1), values.transpose(0, 1), read.slots)
    if chunk:
        slots = (range(row.context, row.length),)
        if store.exact:
            own = _row(key, step, index), _row(value, step, index)
        else:  # as stored, so that results do not depend on where chunks are cut
            runs = pool.runs(row.table(group), row.context, row.length)
            keys, values = (pool.gather if dequantizes else pool.read)(layer, runs)
            own = keys.transpose(0, 1), values.transpose(0, 1)
        yield Piece(*own, slots, own=True)


def _row(flat: torch.Tensor, step: Step, index: int) -> torch.Tensor:
    """One row of a flattened step. [tokens, heads, dim] -> [heads, row's tokens, dim]"""
    if len(step.rows) > 1:
        flat = flat[step.cumulative_lengths[index] : step.cumulative_lengths[index + 1]]
    return flat.transpose(0, 1)
