"""The torch backend: the CPU path, and the oracle for faster kernels.

Each row attends over pieces of its keys, and the pieces are merged. Long runs of neighbouring blocks are
read in place; short ones are gathered into a single piece, so the number of pieces stays small however
fragmented the pool is. A prefill chunk's own keys come from the forward itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from skim.attention.plain import Partial, attend_plain, merge, visible
from skim.attention.step import AttentionCall, Row, Run, Step

IN_PLACE_SLOTS = 256  # shorter runs cost more in calls than a gather costs in copies
SCORE_BYTES = 64 * 2**20  # most memory one tile of written-out scores may take


class Piece(NamedTuple):
    """Some keys of a row, [kv_heads, keys, dim], and the sequence slots they stand for, in order."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor | range
    own: bool = False  # the chunk's own keys, one for each query


class TorchBackend:
    """Correct on every device torch runs on; fast on the CPU."""

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
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for index, row in enumerate(step.rows):
            tokens = slice(step.starts[index], step.starts[index + 1])
            q = query[tokens].transpose(0, 1)  # [query_heads, queries, key_dim]
            own = Piece(
                key[tokens].transpose(0, 1),
                value[tokens].transpose(0, 1),
                range(row.context, row.length),
                own=True,
            )
            parts = [
                attend_piece(q, piece, row, call) for piece in pieces(step, layer, index, own, call.window)
            ]
            out[tokens] = merge(parts, call.sinks).transpose(0, 1)
        return out


def write(step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Put the step's new keys and values into their slots."""
    for slab_index, tokens, slots in step.writes:
        slab = step.pool.slabs[slab_index]
        for storage, new in ((slab.keys[layer], key), (slab.values[layer], value)):
            storage.flatten(0, 1).index_copy_(0, slots, new if tokens is None else new[tokens])


def pieces(step: Step, layer: int, index: int, own: Piece, window: int | None) -> Iterator[Piece]:
    """Everything row `index` may have to read; a window drops the slots that are out of its reach."""
    row = step.rows[index]
    first = 0
    if window is not None and row.positions is None:
        first = max(0, row.context - window + 1)
    if row.queries == 1:  # its own key is in the pool by now, next to the others
        yield from pool_pieces(step, layer, step.runs(index, first, row.length))
        return
    if first < row.context:
        yield from pool_pieces(step, layer, step.runs(index, first, row.context))
    yield own


def pool_pieces(step: Step, layer: int, runs: list[Run]) -> Iterator[Piece]:
    """Long runs as views of the pool, the short ones gathered into one copy."""
    pool = step.pool
    short: list[Run] = []
    for run in runs:
        if run.count < IN_PLACE_SLOTS and len(runs) > 1:
            short.append(run)
            continue
        span = slice(run.start, run.start + run.count)
        slab = pool.slabs[run.slab]
        yield Piece(
            slab.keys[layer].flatten(0, 1)[span].transpose(0, 1),
            slab.values[layer].flatten(0, 1)[span].transpose(0, 1),
            range(run.first, run.first + run.count),
        )
    if short:
        spans = [(pool.slabs[run.slab], slice(run.start, run.start + run.count)) for run in short]
        yield Piece(
            torch.cat([slab.keys[layer].flatten(0, 1)[span] for slab, span in spans]).transpose(0, 1),
            torch.cat([slab.values[layer].flatten(0, 1)[span] for slab, span in spans]).transpose(0, 1),
            torch.cat([torch.arange(run.first, run.first + run.count) for run in short]),
        )


def attend_piece(query: torch.Tensor, piece: Piece, row: Row, call: AttentionCall) -> Partial:
    """One row's queries over one piece of its keys, by the cheapest way that is exact."""
    queries, keys = query.shape[1], piece.key.shape[1]
    in_reach = call.window is None or row.length - int(piece.slots[0]) <= call.window
    if row.positions is None and in_reach:
        if _flash_fits(piece, call):
            return attend_flash(query, piece.key, piece.value, call.scale, causal=piece.own)
        if not piece.own:
            return attend_plain(query, piece.key, piece.value, call)
    key_positions = _positions(piece.slots, row, query.device)
    query_positions = _positions(range(row.context, row.length), row, query.device)
    tile = max(16, SCORE_BYTES // (4 * query.shape[0] * keys))
    tiles = [
        attend_plain(
            query[:, start : start + tile],
            piece.key,
            piece.value,
            call,
            visible(query_positions[start : start + tile], key_positions, call.window),
        )
        for start in range(0, queries, tile)
    ]
    return Partial(torch.cat([t.out for t in tiles], dim=1), torch.cat([t.lse for t in tiles], dim=1))


def attend_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> Partial:
    """torch's tiled CPU attention: every key visible, or each query sees the keys up to its own index.

    Query heads that share a key head become a group of that head, so keys are read without repeating them.
    """
    heads, queries, dim = query.shape
    kv_heads, keys, _ = key.shape
    group = heads // kv_heads
    shape = (kv_heads, group, queries) if causal else (kv_heads, 1, group * queries)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.reshape(*shape, dim),
        key[:, None].expand(kv_heads, shape[1], keys, key.shape[2]),
        value[:, None].expand(kv_heads, shape[1], keys, value.shape[2]),
        is_causal=causal,
        scale=scale,
    )
    return Partial(out.reshape(heads, queries, -1), lse.reshape(heads, queries))


def _flash_fits(piece: Piece, call: AttentionCall) -> bool:
    return piece.key.is_cpu and call.softcap is None and piece.key.shape[2] == piece.value.shape[2]


def _positions(slots: torch.Tensor | range, row: Row, device: torch.device) -> torch.Tensor:
    """The positions of a row's slots: the slots themselves unless the row says otherwise."""
    index = torch.arange(slots.start, slots.stop) if isinstance(slots, range) else slots
    if row.positions is not None:
        index = torch.as_tensor(row.positions)[index]
    return index.to(device)
