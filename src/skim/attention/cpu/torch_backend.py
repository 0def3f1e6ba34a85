"""The torch backend: the CPU path, and the oracle for faster kernels.

Each row attends over pieces of its keys, and the pieces are merged. A prefill chunk's own keys come from
the forward itself, the others from the pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.plain import attend_blocks
from skim.attention.cpu.flash import attend_flash, flash_fits
from skim.attention.plain import Partial, attend_plain, merge, visible
from skim.attention.step import AttentionCall, Row, Step

SCORE_BYTES = 64 * 2**20  # most memory one tile of written-out scores may take


class Piece(NamedTuple):
    """Some keys of a row, [kv_heads, keys, dim], and the sequence slots they stand for, in order."""

    key: torch.Tensor
    value: torch.Tensor
    slots: tuple[range, ...]
    own: bool = False  # the chunk's own keys, one for each query


class TorchBackend:
    """Correct on every device torch runs on; fast on the CPU."""

    capturable = False

    def __init__(self) -> None:
        self.counter = BlockCounter()

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        write(step, layer, key, value)
        choosing = self.counter.choosing(step, query.shape[1], call)
        rows = []
        for index, row in enumerate(step.rows):
            own_queries = _row(query, step, index)
            if index in choosing:
                keys, values = gather(step, layer, index)
                out, kept = attend_blocks(own_queries.transpose(0, 1), keys, values, row, call)
                self.counter.add(row, kept.sum(dim=2))
                rows.append(out)
                continue
            parts = [
                part
                for piece in pieces(step, layer, index, key, value, call.window)
                for part in attend_piece(own_queries, piece, row, call)
            ]
            rows.append(merge(parts, call.sinks).transpose(0, 1))
        return torch.cat(rows) if len(rows) > 1 else rows[0]


def write(step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the step's new keys and values into their slots."""
    for slab_index, tokens, slots in step.writes:
        slab = step.pool.slabs[slab_index]
        for storage, new in ((slab.key_slots[layer], key), (slab.value_slots[layer], value)):
            storage.index_copy_(0, slots, new if tokens is None else new[tokens])


def gather(step: Step, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All of a row's keys and values, slot by slot: views where they lie side by side, else copies.

    [slots, kv_heads, dim]
    """
    row, shape = step.rows[index], step.pool.layers[layer]
    reads = step.reads(index, 0, row.length)
    if len(reads) == 1 and len(reads[0].slots) == 1:
        slab, at = step.pool.slabs[reads[0].slab], reads[0].at
        return slab.key_slots[layer][at], slab.value_slots[layer][at]
    slots = step.pool.slabs[0].key_slots[layer]
    keys = slots.new_empty(row.length, shape.kv_heads, shape.key_dim)
    values = slots.new_empty(row.length, shape.kv_heads, shape.value_dim)
    for read in reads:
        slab = step.pool.slabs[read.slab]
        for whole, storage in ((keys, slab.key_slots[layer]), (values, slab.value_slots[layer])):
            found = storage[read.at]
            for part in read.slots:
                whole[part.start : part.stop] = found[: len(part)]
                found = found[len(part) :]
    return keys, values


def pieces(
    step: Step, layer: int, index: int, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> Iterator[Piece]:
    """Everything row `index` may have to read; a window drops the slots that are out of its reach."""
    row = step.rows[index]
    chunk = row.queries > 1  # a single query's own key is read from the pool with the others
    for read in step.reads(index, row.first_slot(window), row.context if chunk else row.length):
        slab = step.pool.slabs[read.slab]
        yield Piece(
            slab.key_slots[layer][read.at].transpose(0, 1),
            slab.value_slots[layer][read.at].transpose(0, 1),
            read.slots,
        )
    if chunk:
        slots = (range(row.context, row.length),)
        yield Piece(_row(key, step, index), _row(value, step, index), slots, own=True)


def _row(flat: torch.Tensor, step: Step, index: int) -> torch.Tensor:
    """One row of a flattened step. [tokens, heads, dim] -> [heads, row's tokens, dim]"""
    if len(step.rows) > 1:
        flat = flat[step.starts[index] : step.starts[index + 1]]
    return flat.transpose(0, 1)


def attend_piece(query: torch.Tensor, piece: Piece, row: Row, call: AttentionCall) -> list[Partial]:
    """One row's queries over one piece of its keys, by the cheapest way that is exact."""
    queries, keys = query.shape[1], piece.key.shape[1]
    unmasked = row.sees_all_before and _in_reach(piece, row, call.window)
    if unmasked and flash_fits(piece.key, piece.value, call):
        return attend_flash(query, piece.key, piece.value, call.scale, causal=piece.own)
    positions = None
    if piece.own or not unmasked:
        own_slots = (range(row.context, row.length),)
        positions = _positions(own_slots, row, query.device), _positions(piece.slots, row, query.device)
    tile = max(16, SCORE_BYTES // (4 * query.shape[0] * keys))
    tiles = []
    for start in range(0, queries, tile):
        span = slice(start, start + tile)
        mask = visible(positions[0][span], positions[1], call.window) if positions else None
        if mask is not None and piece.own and not row.sees_all_before:
            # What a chunk holds must not depend on where chunks are cut: no query reads a later slot.
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()[span]
        tiles.append(attend_plain(query[:, span], piece.key, piece.value, call, mask))
    return [Partial(torch.cat([t.out for t in tiles], dim=2), torch.cat([t.lse for t in tiles], dim=2))]


def _in_reach(piece: Piece, row: Row, window: int | None) -> bool:
    """Whether no key of a piece is too far back for the row's last query."""
    if window is None:
        return True
    return row.in_order and row.position(row.length - 1) - row.position(piece.slots[0].start) < window


def _positions(slots: tuple[range, ...], row: Row, device: torch.device) -> torch.Tensor:
    """The positions of a row's slots: the slots themselves unless the row says otherwise."""
    index = torch.cat([torch.arange(part.start, part.stop) for part in slots])
    if row.positions is not None:
        index = torch.as_tensor(row.positions)[index]
    return index.to(device)
