"""Slow-fast decode in the native kernels: the C structures of fast rows and of evidence, for one step.

`native/glance.h` says how they are used. C is given addresses; the objects here own the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure, c_double, c_float, c_int64, c_void_p

import torch

from skim.attention.glance import KEPT, WEIGHT, near_blocks
from skim.attention.step import Step
from skim.memory.pool import KVPool
from skim.memory.summary import MEAN, VARIANCE

TILE = 32  # as in `native/decode.h`
FLOAT = 4  # bytes


class CGlance(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("count", c_int64),
        ("full", c_int64),
        ("sinks", c_int64),
        ("recent", c_int64),
        ("reads", c_int64),
        ("sure", c_int64),
        ("compares", c_int64),
        ("last", c_int64),
        ("evidence", c_void_p),
        ("layer_stride", c_int64),
        ("head_stride", c_int64),
        ("trust", c_double),
        ("kept", c_double),
        ("spread", c_double),
        ("near", c_int64),
        ("scratch", c_void_p),
        ("total", c_void_p),
        ("weight", c_float),
        ("mass", c_float),
    )


class CSummaries(Structure):
    _fields_ = (
        ("mean", c_void_p),
        ("variance", c_void_p),
        ("slab_blocks", c_int64),
        ("block_size", c_int64),
        ("place", c_int64),
    )

    @classmethod
    def of(cls, pool: KVPool, layer: int, planes: Mapping[str, int]) -> CSummaries:
        place = pool.summarized.index(layer)
        return cls(planes[MEAN], planes[VARIANCE], pool.slab_blocks, pool.block_size, place)


class Glances:
    """The rows of a step under slow-fast decode, as kernels see them: a fast row once for each KV head."""

    def __init__(
        self, step: Step, rows: Sequence[int], group: int, heads: int, kv_heads: int, key_dim: int
    ) -> None:
        self.kv_heads = kv_heads
        self._step = step.rows  # they own the evidence
        self._tables: list[torch.Tensor] = []
        size, each = step.pool.block_size, heads // kv_heads
        made: list[CGlance] = []
        scratch: list[int] = []  # floats of each
        if any(step.picks[index] is not None for index in rows):
            step.start_mass()
        for index in rows:
            row, picks = step.rows[index], step.picks[index]
            one = CGlance(full=row.length // size)
            if row.evidence is not None:
                shares = row.evidence.shares
                one.evidence, one.near = shares.data_ptr(), near_blocks(size)
                one.trust, one.kept = WEIGHT, KEPT
                one.layer_stride, one.head_stride = shares.stride(0), shares.stride(1)
            if picks is None:
                made.append(one)
                scratch.append(heads * -(-row.length // TILE) * (1 + TILE) if one.evidence else 0)
                continue
            assert step.mass is not None
            table = torch.tensor(row.table(group)[: picks.blocks])
            self._tables.append(table)
            one.blocks, one.count, one.last = (
                table.data_ptr(),
                picks.blocks,
                row.length - (picks.blocks - 1) * size,
            )
            one.sinks, one.recent, one.reads = picks.sinks, picks.recent, picks.reads
            one.sure, one.compares, one.spread = picks.sure, picks.compares, picks.spread
            one.total = step.mass.data_ptr() + FLOAT * index
            one.weight = 1 / (kv_heads * len(step.pool.summarized))
            for _ in range(kv_heads):
                made.append(CGlance.from_buffer_copy(one))
                scratch.append((each + 7) * picks.full + 2 * each * key_dim)
        self._scratch = torch.empty(sum(scratch))
        at = self._scratch.data_ptr()
        for one, floats in zip(made, scratch, strict=True):
            one.scratch = at
            at += FLOAT * floats
        self.array = (CGlance * len(made))(*made)
