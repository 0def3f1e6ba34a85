"""The parts of a layer of a fast decode step, each timed in a captured graph: for `slow_fast.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from attention_kernels import milliseconds

from skim.attention.cuda import launch, metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.coded_launch import attend_codes, coded_config
from skim.attention.cuda.coded_write import write_codes
from skim.attention.cuda.glance import NewTokens, Place, ScoreConfig, choose_blocks
from skim.attention.cuda.launch import Chosen, Config, attend_tiles
from skim.attention.cuda.layout import Tiles
from skim.attention.cuda.summaries import write_summaries
from skim.attention.glance import Evidence, Glance
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.codec import CodedStore
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 64
GROUP = HEADS // KV_HEADS
CALL = AttentionCall(DIM**-0.5)
DEVICE = torch.device("cuda")
FIRST = Place(layer=0, column=0, heads=KV_HEADS)
TURNS = 4  # a graph has all layers this many times

CODED = [Config(8, *one) for one in ((32, 1, 3, 168), (64, 2, 2, 144))]


class Recording(TritonBackend):
    """Keeps the blocks that were chosen last."""

    chosen: Chosen | None = None

    def _choose(self, *args: Any) -> Chosen | None:
        self.chosen = super()._choose(*args)
        return self.chosen


def noise(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, DIM, device=DEVICE, dtype=torch.bfloat16)


def make_pool(kv_format: str, layers: int, blocks: int) -> KVPool:
    """A pool of random keys and values, the same in all layers. Each block has its own mean."""
    pool = KVPool.of_blocks(
        [LayerShape(KV_HEADS, DIM, DIM)] * layers,
        blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=DEVICE,
        kv_format=kv_format,
        summaries=True,
    )
    pool.allocate(blocks)
    step = 1024  # blocks
    for first in range(0, blocks, step):
        some = range(first, min(first + step, blocks))
        slots = len(some) * BLOCK_SIZE
        keys = noise(slots, KV_HEADS) + noise(len(some), KV_HEADS).repeat_interleave(BLOCK_SIZE, 0)
        pool.write(0, pool.runs(some, 0, slots), keys, noise(slots, KV_HEADS))
    for layer in range(1, layers):
        for name, plane in pool.planes(layer).blocks.items():
            plane.copy_(pool.planes(0).blocks[name])
    return pool


def make_step(pool: KVPool, rows: list[tuple[int, Glance | None]], evidence: bool = True) -> Step:
    """Decode rows of some lengths over scattered blocks."""
    order = list(range(pool.capacity))
    random.Random(0).shuffle(order)
    made = []
    for length, fast in rows:
        count = -(-length // BLOCK_SIZE)
        blocks, order = order[:count], order[count:]
        shares = torch.zeros(len(pool.layers), KV_HEADS, count, device=DEVICE)
        known = Evidence(shares) if evidence else None
        made.append(Row(Role.DECODE, blocks, length - 1, 1, fast=fast, evidence=known))
    return Step(pool, tuple(made), Recording())


def time_layers(pool: KVPool, work: Callable[[int], object]) -> float:
    """Microseconds of a layer, in a graph of all layers."""
    layers = range(len(pool.layers))

    def every() -> None:
        for _ in range(TURNS):
            for layer in layers:
                work(layer)

    for layer in layers:
        work(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    return milliseconds(graph.replay, 7) * 1e3 / (TURNS * len(layers))


class Bench:
    """One batch and context: the parts of a layer."""

    def __init__(self, pool: KVPool, batch: int, context: int, budget: int) -> None:
        self.pool = pool
        self.coded = isinstance(pool.stores[0], CodedStore)
        self.label = f"{pool.kv_format:5} {batch} x {context:7,}"
        length = context - 8  # the new slot fills no block, as in most steps
        self.step = make_step(pool, [(length, Glance(budget))] * batch)
        self.slow = make_step(pool, [(length, None)] * batch, evidence=False)
        self.renewing = make_step(pool, [(length, None)] * batch)
        self.query, self.key, self.value = (noise(batch, h) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.turned, self.out = (
            pool.stores[0].turn_query(self.query).contiguous(),
            torch.empty_like(self.query),
        )
        summary = 2 * KV_HEADS * DIM * 2  # bytes of a block
        self.scored = batch * (context // BLOCK_SIZE) * summary
        slot = pool.stores[0].read_bytes(BLOCK_SIZE, BLOCK_SIZE) - summary
        self.read = batch * slot * min(budget, context) // BLOCK_SIZE
        self.all = batch * slot * context // BLOCK_SIZE

    def show(self, part: str, took: float, size: int) -> float:
        speed = f"{size / 1e6:7.1f} MB {size / took / 1e3:6,.0f} GB/s" if size else ""
        print(f"{self.label}  {part:40} {took:8.2f} us {speed}", flush=True)
        return took

    def try_all(self, part: str, size: int, kinds: Sequence[object], timed: Callable[[Any], float]) -> None:
        """Time variants of a part. One that does not fit the device is reported; the others still count."""
        for kind in kinds:
            try:
                self.show(f"{part} {kind}", timed(kind), size)
            except Exception as reason:
                print(f"{self.label}  {part} {kind} failed: {type(reason).__name__}: {str(reason)[:200]}")

    def known(self, programs: int | None = None) -> metadata.CudaMetadata:
        """The step's metadata, with other splits if `programs` per multiprocessor share them."""
        name = "CODED_PROGRAMS" if self.coded else "FAST_PROGRAMS"
        default = getattr(metadata, name)
        setattr(metadata, name, programs or default)
        try:
            return metadata.CudaMetadata(self.step)
        finally:
            setattr(metadata, name, default)

    def choose(
        self, layer: int, known: metadata.CudaMetadata, new: NewTokens | None, config: ScoreConfig | None
    ) -> Chosen:
        planes, tiles = self.pool.planes(layer), known.decode[None]
        return choose_blocks(
            self.turned, new, planes, CALL.scale, known.of(0), tiles, known.fast, FIRST, BLOCK_SIZE, config
        )

    def time_choice(self, config: ScoreConfig | None) -> float:
        known = self.known()
        return time_layers(self.pool, lambda layer: self.choose(layer, known, None, config))

    def attend(
        self, layer: int, known: metadata.CudaMetadata, chosen: Chosen, tiles: Tiles, config: Config | None
    ) -> None:
        store, out, tables = self.pool.stores[0], self.out, known.of(0)
        if isinstance(store, CodedStore):
            attend_codes(
                out, self.turned, None, store, self.pool.planes(layer), CALL, tables, tiles, BLOCK_SIZE,
                config or coded_config(store, GROUP, out.dtype), chosen,
            )  # fmt: skip
            return
        plain = config or launch.decode_config(store.shape, GROUP, out.dtype, few=known.few)
        attend_tiles(
            out, self.turned, known.source(layer), CALL, tables, tiles, plain, pack=GROUP, chosen=chosen
        )

    def time_attention(self, config: Config | None, programs: int | None, merges: bool = True) -> float:
        """Attention over lists that were chosen before, without writes."""
        known = self.known(programs)
        tiles, chosen = known.decode[None], self.choose(0, known, None, None)
        tiles = tiles if merges else replace(tiles, ended=None)
        return time_layers(self.pool, lambda layer: self.attend(layer, known, chosen, tiles, config))

    def summarize(self) -> float:
        known = self.step.metadata
        return time_layers(
            self.pool,
            lambda layer: write_summaries(
                self.pool.stores[layer], self.pool.planes(layer), known.of(layer), 1, BLOCK_SIZE
            ),
        )

    def whole(self, step: Step) -> float:
        return time_layers(
            self.pool, lambda layer: step.attend(layer, self.query, self.key, self.value, CALL)
        )

    def write(self) -> float:
        """Only codes: the write of plain keys is part of the whole."""
        store = self.pool.stores[0]
        assert isinstance(store, CodedStore)
        slots = self.step.metadata.of(0).slot_mapping
        return time_layers(
            self.pool,
            lambda layer: write_codes(
                store, self.pool.planes(layer), self.query, self.key, self.value, slots
            ),
        )

    def run(self, variants: bool) -> None:
        self.show("score and list", self.time_choice(None), self.scored)
        self.show("attend", self.time_attention(None, None), self.read)
        if variants and self.coded:
            self.try_all("attend", self.read, CODED, lambda kind: self.time_attention(kind, None))
            self.show("summaries of no block", self.summarize(), 0)
            self.show("write and turn", self.write(), 0)
        fast = self.show("fast layer, all of it", self.whole(self.step), self.scored + self.read)
        slow = self.show("slow layer, all of it", self.whole(self.slow), self.all)
        self.show("slow layer with evidence", self.whole(self.renewing), self.all)
        print(f"{self.label}  a fast layer takes {fast / slow:.2f} of a slow one\n", flush=True)
