"""The CUDA backend: paged kernels in Triton, and torch's fused attention for long chunks.

A layer writes its new keys and values, then attends: rows of one query in one launch, with splits that share
the keys, and chunks in another. Nothing here waits for the device.
"""

from __future__ import annotations

import torch

from skim.attention.backend import CapturableBackend
from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.triton_blocks import attend_sparse, choose
from skim.attention.cuda import dense
from skim.attention.cuda.launch import Prior, attend_tiles, chunk_config, decode_config
from skim.attention.cuda.metadata import CapturedTables, CudaMetadata, refuses_capture
from skim.attention.cuda.write import write_keys_values
from skim.attention.step import AttentionCall, Step
from skim.memory.pool import KVPool
from skim.memory.store import PlainStore

WIDEST = 256  # most elements of a head


class TritonBackend(CapturableBackend):
    """Fast on CUDA devices; on the CPU it runs under Triton's interpreter, for tests."""

    def __init__(self) -> None:
        self.counter = BlockCounter()

    @staticmethod
    def refuses(pool: KVPool) -> str | None:
        """The reason the kernels cannot read this pool; None if they can."""
        if pool.slab_blocks < pool.capacity:
            return "the pool has several slabs"
        if not all(isinstance(store, PlainStore) for store in pool.stores):
            return "the pool stores keys and values in a format that they do not read"
        if pool.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"the pool holds {pool.dtype}"
        widest = max((max(shape.key_dim, shape.value_dim) for shape in pool.layers), default=0)
        if widest > WIDEST:
            return f"a head has {widest} elements, more than {WIDEST}"
        if pool.device.type == "cuda" and torch.cuda.get_device_capability(pool.device) < (8, 0):
            return "the device is older than compute capability 8.0"
        return None

    def prepare(self, step: Step) -> CudaMetadata:
        return CudaMetadata(step)

    def refuses_capture(self, step: Step) -> str | None:
        return refuses_capture(step)

    def graph_buffers(self, pool: KVPool, rows: int, slots: int, queries: int) -> CapturedTables:
        return CapturedTables(pool, rows, slots, queries)

    def attend(
        self,
        step: Step,
        layer: int,
        query: torch.Tensor,  # [tokens, query_heads, key_dim]
        key: torch.Tensor,  # [tokens, kv_heads, key_dim]
        value: torch.Tensor,  # [tokens, kv_heads, value_dim]
        call: AttentionCall,
    ) -> torch.Tensor:
        known = step.pool.layers[layer].window
        if call.window != known:
            raise AssertionError(f"layer {layer} has a sliding window of {call.window}, not {known}")
        metadata: CudaMetadata = step.metadata
        keys, values = metadata.stored(layer)
        write_keys_values(key, value, keys, values, metadata.of(layer).slot_mapping)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        sparse = self.counter.sparse_rows(step, query.shape[1], call)
        short = []
        for index in metadata.chunks:
            if index in sparse:
                self._attend_sparse(out, metadata, layer, index, query, call)
            elif not self._attend_long(out, metadata, layer, index, query, key, value, call):
                short.append(index)
        if short:
            self._attend_chunks(out, metadata, layer, short, query, call)
        if metadata.single:
            self._attend_single(out, metadata, layer, query, call)
        return out

    def _attend_sparse(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        layer: int,
        index: int,
        query: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        """A chunk whose query blocks read the key blocks that the row's policy selects."""
        row = metadata.rows[index]
        assert row.policy is not None
        chosen = choose(metadata, layer, index, query, call.scale, row.policy, prompt=row.prompt)
        self.counter.add(row, chosen.counts)
        attend_sparse(out, query, metadata, layer, index, call, chosen)

    def _attend_single(
        self, out: torch.Tensor, metadata: CudaMetadata, layer: int, query: torch.Tensor, call: AttentionCall
    ) -> None:
        """Rows of one query each."""
        positions = metadata.positions(metadata.single, call.window is not None)
        # Rows masked by position are read from their first slot: a sliding window has too few splits.
        tiles = metadata.decode[call.window if positions is None else None]
        pool = metadata.pool
        shape = pool.layers[layer]
        group = query.shape[1] // shape.kv_heads
        attend_tiles(
            out,
            query,
            *metadata.stored(layer),
            call,
            metadata.of(layer),
            tiles,
            pool.block_size,
            decode_config(shape, group, query.dtype),
            pack=group,
            positions=positions,
        )

    def _attend_chunks(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        layer: int,
        rows: list[int],
        query: torch.Tensor,
        call: AttentionCall,
        prior: Prior | None = None,
    ) -> None:
        """Rows of several queries, in tiles of as many as fit with the heads that share a key head."""
        pool = metadata.pool
        shape = pool.layers[layer]
        group = query.shape[1] // shape.kv_heads
        longest = max(metadata.rows[i].queries for i in rows)
        config = chunk_config(shape, group, longest, query.dtype)
        attend_tiles(
            out,
            query,
            *metadata.stored(layer),
            call,
            metadata.of(layer),
            metadata.tiles(rows, max(1, config.tile_m // group)),
            pool.block_size,
            config,
            pack=group,
            positions=metadata.positions(rows, call.window is not None),
            prior=prior,
        )

    def _attend_long(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        layer: int,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> bool:
        """Attend a long chunk in order with torch's fused kernels; False if they do not apply."""
        row = metadata.rows[index]
        if row.queries < dense.LEAST_QUERIES or not row.sees_all_before or not dense.fits(query, value, call):
            return False
        tokens = slice(metadata.cumulative_lengths[index], metadata.cumulative_lengths[index + 1])
        if row.context == 0:
            out[tokens] = dense.attend_causal(query[tokens], key[tokens], value[tokens], call.scale)
            return True
        heads, dim = query.shape[1:]
        first = row.context // dense.PREFIX_STEP * dense.PREFIX_STEP
        if not first or not dense.prefix_fits(query.device, query.dtype, heads, key.shape[1], dim):
            return False
        keys, values = metadata.prefix(layer, index, first)
        out[tokens], logs = dense.attend_all(query[tokens], keys, values, call)
        every = logs.new_empty(query.shape[0], heads)
        every[tokens] = logs
        self._attend_chunks(out, metadata, layer, [index], query, call, Prior(out, every, first))
        return True
