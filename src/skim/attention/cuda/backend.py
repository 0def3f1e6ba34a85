"""The CUDA backend: paged kernels in Triton, and torch's own attention for long chunks.

A layer writes its new keys and values, then attends: rows of one query in one launch whose splits share the
keys, chunks in another. Nothing here waits for the device; what depends on the step alone is in its `Plan`.
"""

from __future__ import annotations

import torch

from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.triton_blocks import attend_sparse, choose
from skim.attention.cuda import dense
from skim.attention.cuda.launch import Prior, attend_tiles, chunk_config, decode_config
from skim.attention.cuda.metadata import Plan
from skim.attention.cuda.write import write_keys_values
from skim.attention.step import AttentionCall, Step
from skim.memory.pool import KVPool

WIDEST = 256  # of a head


class TritonBackend:
    """Fast on CUDA devices; on the CPU it runs under Triton's interpreter, for tests."""

    capturable = True

    def __init__(self) -> None:
        self.counter = BlockCounter()

    @staticmethod
    def refuses(pool: KVPool) -> str | None:
        """Why the kernels cannot read this pool, if they cannot."""
        if pool.slab_blocks < pool.capacity:
            return "the pool has several slabs"
        if pool.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"the pool holds {pool.dtype}"
        widest = max((max(shape.key_dim, shape.value_dim) for shape in pool.layers), default=0)
        if widest > WIDEST:
            return f"a head has {widest} elements, more than {WIDEST}"
        if pool.device.type == "cuda" and torch.cuda.get_device_capability(pool.device) < (8, 0):
            return "the device is older than compute capability 8.0"
        return None

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
            raise AssertionError(f"layer {layer} reads through a window of {call.window}, not {known}")
        plan: Plan | None = step.notes.get(Plan)
        if plan is None:
            plan = step.notes[Plan] = Plan(step)
        slab = step.pool.slabs[0]
        write_keys_values(key, value, slab.key_slots[layer], slab.value_slots[layer], plan.tables.slots)
        out = query.new_empty(*query.shape[:2], value.shape[2])
        choosing = self.counter.choosing(step, query.shape[1], call)
        short = []
        for index in plan.chunks:
            if index in choosing:
                self._attend_chosen(out, plan, layer, index, query, call)
            elif not self._attend_long(out, plan, layer, index, query, key, value, call):
                short.append(index)
        if short:
            self._attend_chunks(out, plan, layer, short, query, call)
        if plan.single:
            self._attend_single(out, plan, layer, query, call)
        return out

    def _attend_chosen(
        self, out: torch.Tensor, plan: Plan, layer: int, index: int, query: torch.Tensor, call: AttentionCall
    ) -> None:
        """A chunk whose blocks of queries each read the blocks of keys that the row's policy chooses."""
        row = plan.step.rows[index]
        assert row.policy is not None
        chosen = choose(plan, layer, index, query, call.scale, row.policy, prompt=row.prompt)
        self.counter.add(row, chosen.counts)
        attend_sparse(out, query, plan, layer, index, call, chosen)

    def _attend_single(
        self, out: torch.Tensor, plan: Plan, layer: int, query: torch.Tensor, call: AttentionCall
    ) -> None:
        """The rows of one query each."""
        positions = plan.positions(plan.single, call.window is not None)
        # A row that is seen by position is read from its first slot on: splits of a window are too few.
        tiles = plan.decode[call.window if positions is None else None]
        pool = plan.step.pool
        shape = pool.layers[layer]
        group = query.shape[1] // shape.kv_heads
        attend_tiles(
            out,
            query,
            pool.slabs[0].key_slots[layer],
            pool.slabs[0].value_slots[layer],
            call,
            plan.tables,
            tiles,
            pool.block_size,
            decode_config(shape, group, query.dtype),
            pack=group,
            positions=positions,
        )

    def _attend_chunks(
        self,
        out: torch.Tensor,
        plan: Plan,
        layer: int,
        rows: list[int],
        query: torch.Tensor,
        call: AttentionCall,
        prior: Prior | None = None,
    ) -> None:
        """Rows of several queries, in tiles of as many as fit beside the heads that share a key head."""
        pool = plan.step.pool
        shape = pool.layers[layer]
        group = query.shape[1] // shape.kv_heads
        longest = max(plan.step.rows[i].queries for i in rows)
        config = chunk_config(shape, group, longest, query.dtype)
        attend_tiles(
            out,
            query,
            pool.slabs[0].key_slots[layer],
            pool.slabs[0].value_slots[layer],
            call,
            plan.tables,
            plan.tiles(rows, max(1, config.tile_m // group)),
            pool.block_size,
            config,
            pack=group,
            positions=plan.positions(rows, call.window is not None),
            prior=prior,
        )

    def _attend_long(
        self,
        out: torch.Tensor,
        plan: Plan,
        layer: int,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> bool:
        """A long chunk in order: as much as can be by torch. False if that is nothing."""
        step = plan.step
        row = step.rows[index]
        if row.queries < dense.LEAST_QUERIES or not row.sees_all_before or not dense.fits(query, value, call):
            return False
        span = slice(step.starts[index], step.starts[index + 1])
        if row.context == 0:
            out[span] = dense.attend_causal(query[span], key[span], value[span], call.scale)
            return True
        heads, dim = query.shape[1:]
        first = row.context // dense.PREFIX_STEP * dense.PREFIX_STEP
        if not first or not dense.prefix_fits(query.device, query.dtype, heads, key.shape[1], dim):
            return False
        keys, values = plan.prefix(layer, index, first)
        out[span], logs = dense.attend_all(query[span], keys, values, call)
        every = logs.new_empty(query.shape[0], heads)
        every[span] = logs
        self._attend_chunks(out, plan, layer, [index], query, call, Prior(out, every, first))
        return True
