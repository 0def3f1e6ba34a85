"""Attention of one row over pieces of its keys, each by the cheapest exact way."""

from __future__ import annotations

from typing import NamedTuple

import torch

from skim.attention.cpu.flash import attend_flash, flash_fits
from skim.attention.cpu.native_prefill import kernel_for
from skim.attention.plain import Partial, attend_plain, merge, visible
from skim.attention.step import AttentionCall, Role, Row

SCORE_BYTES = 64 * 2**20  # most memory that one tile of explicit scores may take


class Piece(NamedTuple):
    """Some keys of a row, [kv_heads, keys, dim], and their slots in the sequence, in order."""

    key: torch.Tensor
    value: torch.Tensor
    slots: tuple[range, ...]
    own: bool = False  # the chunk's own keys, one for each query


def attend_causal(
    query: torch.Tensor,  # [heads, tokens, key_dim]
    key: torch.Tensor,  # [kv_heads, tokens, key_dim]
    value: torch.Tensor,  # [kv_heads, tokens, value_dim]
    call: AttentionCall,
) -> torch.Tensor:
    """Causal attention of a run of tokens over its own keys. [heads, tokens, value_dim]"""
    native = kernel_for(query, key, value, call)
    if native is not None:
        return native.attend_causal(query, key, value, call)
    tokens = query.shape[1]
    own = Piece(key, value, (range(tokens),), own=True)
    return merge(attend_piece(query, own, Row(Role.PREFILL, (), 0, tokens), call), call.sinks)


def attend_piece(query: torch.Tensor, piece: Piece, row: Row, call: AttentionCall) -> list[Partial]:
    """Attend one row's queries over one piece of its keys, by the cheapest exact way."""
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
        some = slice(start, start + tile)
        mask = visible(positions[0][some], positions[1], call.window) if positions else None
        if mask is not None and piece.own and not row.sees_all_before:
            # No query reads a later slot, so the result does not depend on where chunks are cut.
            mask = mask & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()[some]
        tiles.append(attend_plain(query[:, some], piece.key, piece.value, call, mask))
    return [Partial(torch.cat([t.out for t in tiles], dim=2), torch.cat([t.lse for t in tiles], dim=2))]


def _in_reach(piece: Piece, row: Row, window: int | None) -> bool:
    """True if the row's last query reaches every key of the piece through the sliding window."""
    if window is None:
        return True
    return row.in_order and row.position(row.length - 1) - row.position(piece.slots[0].start) < window


def _positions(slots: tuple[range, ...], row: Row, device: torch.device) -> torch.Tensor:
    """The positions of some of a row's slots."""
    index = torch.cat([torch.arange(part.start, part.stop) for part in slots])
    if row.positions is not None:
        index = torch.as_tensor(row.positions)[index]
    return index.to(device)
