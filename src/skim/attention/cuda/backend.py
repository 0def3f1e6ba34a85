"""The CUDA backend: paged kernels in Triton, and torch's fused attention for long chunks.

A layer writes its new keys and values, then attends: rows of one query in one launch, with splits that share
the keys, and chunks in another. Of coded layers, decode reads codes; the slots of a chunk's row are read into
scratch memory first, and then attended over like plain ones. In layers with summaries, those of filled
blocks are written, and fast rows choose the blocks that they read. Nothing here waits for the device.
"""

from __future__ import annotations

import torch

from skim.attention.backend import CapturableBackend
from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.triton_blocks import attend_sparse, choose
from skim.attention.cuda import dense
from skim.attention.cuda.captured import CapturedTables, refuses_capture
from skim.attention.cuda.coded_launch import attend_codes, coded_config
from skim.attention.cuda.coded_write import turn_back, write_codes
from skim.attention.cuda.codes import KINDS
from skim.attention.cuda.glance import Place, choose_blocks, make_masses, renew_evidence
from skim.attention.cuda.launch import (
    Chosen,
    Config,
    Masses,
    Prior,
    attend_tiles,
    chunk_config,
    decode_config,
)
from skim.attention.cuda.layout import Source
from skim.attention.cuda.metadata import CudaMetadata
from skim.attention.cuda.restore import restore_row
from skim.attention.cuda.summaries import write_summaries
from skim.attention.cuda.write import Summaries, write_keys_values
from skim.attention.reading import Reading, reading
from skim.attention.step import AttentionCall, Step
from skim.memory.codec import CodedStore
from skim.memory.pool import KVPool
from skim.memory.store import LayerStore, PlainStore
from skim.memory.summary import MEAN, VARIANCE

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
        if not all(_is_known(store) for store in pool.stores):
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
        out = query.new_empty(*query.shape[:2], value.shape[2])
        store = step.pool.stores[layer]
        if isinstance(store, CodedStore):
            self._attend_coded(out, step, layer, store, query, key, value, call)
        else:
            self._attend_plain(out, step, layer, query, key, value, call)
        return out

    def _attend_plain(
        self,
        out: torch.Tensor,
        step: Step,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        """A layer whose keys and values are stored as they are."""
        metadata: CudaMetadata = step.metadata
        source = metadata.source(layer)
        store, slots = step.pool.stores[layer], metadata.of(layer).slot_mapping
        one_each = store.summarized and not metadata.chunks
        summaries = _summaries(step.pool, layer) if one_each else None
        write_keys_values(key, value, source.keys, source.values, slots, summaries)
        if store.summarized and not one_each:
            self._summarize(step, layer)
        chosen = self._choose(step, layer, query, call)
        sparse = self.counter.sparse_rows(step, query.shape[1], call)
        short = []
        for index in metadata.chunks:
            if index in sparse:
                self._attend_sparse(out, metadata, source, index, query, call)
            elif not self._attend_long(out, metadata, source, index, query, (key, value), call):
                short.append(index)
        if short:
            self._attend_chunks(out, metadata, source, short, query, call)
        if metadata.single:
            config = decode_config(source.shape, query.shape[1] // source.shape.kv_heads, query.dtype)
            masses = self._masses(step, layer, config)
            self._attend_single(out, metadata, source, query, call, config, chosen, masses)
            self._renew(step, layer, masses, query.shape[1])

    def _attend_coded(
        self,
        out: torch.Tensor,
        step: Step,
        layer: int,
        store: CodedStore,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        """A layer whose keys and values are stored as codes. Chunks read their own keys as stored."""
        metadata: CudaMetadata = step.metadata
        tables, size = metadata.of(layer), step.pool.block_size
        planes = step.pool.planes(layer)
        turned = write_codes(store, planes, query, key, value, tables.slot_mapping)
        plain = reading(store, call) is Reading.DEQUANTIZED
        if store.summarized:
            self._summarize(step, layer)
        chosen = self._choose(step, layer, turned, call)
        if metadata.single:
            config = coded_config(store, query.shape[1] // store.shape.kv_heads, query.dtype)
            masses = self._masses(step, layer, config)
            attend_codes(
                out,
                turned,
                store,
                planes,
                call,
                tables,
                metadata.decode[None],
                size,
                config,
                chosen,
                masses,
            )
            self._renew(step, layer, masses, query.shape[1])
        sparse = self.counter.sparse_rows(step, query.shape[1], call)
        own = query if plain else turned
        restored_rows = metadata.chunks + metadata.hidden()
        for index in restored_rows:
            room = metadata.room(index)
            restored = restore_row(store, planes, tables.rows, tables.blocks, index, room, size, plain)
            source = metadata.copied(*restored)
            if index in sparse:
                self._attend_sparse(out, metadata, source, index, own, call)
            elif not self._attend_long(out, metadata, source, index, own, None, call):
                self._attend_chunks(out, metadata, source, [index], own, call)
        for index in restored_rows if not plain else ():  # after all of them: captured rows have padding
            turn_back(store, out[metadata.tokens(index)])

    def _summarize(self, step: Step, layer: int) -> None:
        """Summarize the blocks that the step has filled."""
        pool, metadata = step.pool, step.metadata
        most, size = metadata.most_filled(), pool.block_size
        write_summaries(pool.stores[layer], pool.planes(layer), metadata.of(layer), most, size)

    def _choose(self, step: Step, layer: int, query: torch.Tensor, call: AttentionCall) -> Chosen | None:
        """Choose the blocks that fast rows read; None if all rows read everything.

        The query is in the basis of the keys.
        """
        pool, metadata = step.pool, step.metadata
        fast = metadata.fast
        if fast is None or not pool.stores[layer].summarized:
            return None
        tables, tiles, place = metadata.of(layer), metadata.decode[None], _place(pool, layer)
        planes, size = pool.planes(layer), pool.block_size
        chosen = choose_blocks(query, planes, call.scale, tables, tiles, fast, place, size)
        if layer == pool.summarized[-1]:
            step.mass = fast.mass.mean(dim=1)
        return chosen

    def _masses(self, step: Step, layer: int, config: Config) -> Masses | None:
        """Room for the masses of keys, if some row renews its evidence in this layer."""
        renewing, pool = step.metadata.renewing, step.pool
        if renewing is None or not pool.stores[layer].summarized:
            return None
        heads = pool.layers[layer].kv_heads
        return make_masses(step.metadata.decode[None], heads, config, renewing, pool.block_size)

    def _renew(self, step: Step, layer: int, masses: Masses | None, heads: int) -> None:
        """Renew the evidence of slow rows."""
        if masses is None:
            return
        pool, metadata = step.pool, step.metadata
        group, place = heads // pool.layers[layer].kv_heads, _place(pool, layer)
        tables, tiles = metadata.of(layer), metadata.decode[None]
        renew_evidence(masses, group, tables, tiles, metadata.renewing, place, pool.block_size)

    def _attend_sparse(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        source: Source,
        index: int,
        query: torch.Tensor,
        call: AttentionCall,
    ) -> None:
        """A chunk whose query blocks read the key blocks that the row's policy selects."""
        row = metadata.rows[index]
        assert row.policy is not None
        chosen = choose(metadata, source, index, query, call.scale, row.policy, prompt=row.prompt)
        self.counter.add(row, chosen.counts)
        attend_sparse(out, query, metadata, source, index, call, chosen)

    def _attend_single(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        source: Source,
        query: torch.Tensor,
        call: AttentionCall,
        config: Config,
        chosen: Chosen | None,
        masses: Masses | None,
    ) -> None:
        """Rows of one query each."""
        positions = metadata.positions(metadata.single, call.window is not None)
        # Rows masked by position are read from their first slot: a sliding window has too few splits.
        tiles = metadata.decode[call.window if positions is None else None]
        attend_tiles(
            out,
            query,
            source,
            call,
            metadata.tables.groups[source.group],
            tiles,
            config,
            pack=query.shape[1] // source.shape.kv_heads,
            positions=positions,
            chosen=chosen,
            masses=masses,
        )

    def _attend_chunks(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        source: Source,
        rows: list[int],
        query: torch.Tensor,
        call: AttentionCall,
        prior: Prior | None = None,
    ) -> None:
        """Rows of several queries, in tiles of as many as fit with the heads that share a key head."""
        shape = source.shape
        group = query.shape[1] // shape.kv_heads
        longest = max(metadata.rows[i].queries for i in rows)
        config = chunk_config(shape, group, longest, query.dtype)
        attend_tiles(
            out,
            query,
            source,
            call,
            metadata.tables.groups[source.group],
            metadata.tiles(rows, max(1, config.tile_m // group)),
            config,
            pack=group,
            positions=metadata.positions(rows, call.window is not None),
            prior=prior,
        )

    def _attend_long(
        self,
        out: torch.Tensor,
        metadata: CudaMetadata,
        source: Source,
        index: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None,
        call: AttentionCall,
    ) -> bool:
        """Attend a long chunk in order with torch's fused kernels; False if they do not apply.

        `new` are the step's keys and values; without them the chunk's own are read from the source.
        """
        row = metadata.rows[index]
        if row.queries < dense.LEAST_QUERIES or not row.sees_all_before:
            return False
        if not dense.fits(query, source.values, call):
            return False
        tokens = metadata.tokens(index)
        if row.context == 0:
            keys, values = (
                metadata.prefix(source, index, row.length) if new is None else (t[tokens] for t in new)
            )
            out[tokens] = dense.attend_causal(query[tokens], keys, values, call.scale)
            return True
        heads, dim = query.shape[1:]
        first = row.context // dense.PREFIX_STEP * dense.PREFIX_STEP
        if not first or not dense.prefix_fits(query.device, query.dtype, heads, source.keys.shape[1], dim):
            return False
        keys, values = metadata.prefix(source, index, first)
        out[tokens], logs = dense.attend_all(query[tokens], keys, values, call)
        every = logs.new_empty(query.shape[0], heads)
        every[tokens] = logs
        self._attend_chunks(out, metadata, source, [index], query, call, Prior(out, every, first))
        return True


def _place(pool: KVPool, layer: int) -> Place:
    """The place of a layer among those with summaries."""
    heads = [pool.layers[one].kv_heads for one in pool.summarized]
    place = pool.summarized.index(layer)
    return Place(place, sum(heads[:place]), max(heads))


def _summaries(pool: KVPool, layer: int) -> Summaries:
    blocks = pool.planes(layer).blocks
    return Summaries(blocks[MEAN], blocks[VARIANCE], pool.block_size)


def _is_known(store: LayerStore) -> bool:
    """True if the kernels read this storage format."""
    if isinstance(store, CodedStore):
        return type(store.key) in KINDS and type(store.value) in KINDS
    return isinstance(store, PlainStore)
