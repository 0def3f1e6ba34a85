"""A layer of a fast decode step: scores of block summaries, choice of blocks, attention over the chosen.

    PYTHONPATH=src python benchmarks/slow_fast.py

Heads are those of an 8B model. Results are first compared with attention in float32 over the chosen blocks,
and the choice with the plain one. Each part is then timed alone and all of them together, in a captured graph
over several layers, for several tile sizes. Blocks are scattered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attention_kernels import milliseconds
from script import need_cuda, parser_of, positive, run

from skim.attention.cuda import glance as launches
from skim.attention.cuda import launch, metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.coded_launch import attend_codes, coded_config
from skim.attention.cuda.coded_write import write_codes
from skim.attention.cuda.glance import Place, ScoreConfig, choose_blocks, score_blocks, select_blocks
from skim.attention.cuda.launch import Chosen, Config, attend_tiles
from skim.attention.cuda.summaries import write_summaries
from skim.attention.glance import Evidence, Glance, estimate_logs, mass_of, shares_of
from skim.attention.glance_plain import summaries
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.codec import CodedStore
from skim.memory.formats import AUTO, FORMATS
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 64
GROUP = HEADS // KV_HEADS
CALL = AttentionCall(DIM**-0.5)
DEVICE = torch.device("cuda")
FIRST = Place(layer=0, column=0, heads=KV_HEADS)
TURNS = 4  # a graph has all layers this many times

SCORES = [
    ScoreConfig(tile=64, warps=4, stages=2, programs=4),
    ScoreConfig(tile=64, warps=4, stages=2, programs=8),
    ScoreConfig(tile=32, warps=4, stages=3, programs=4),
    ScoreConfig(tile=32, warps=4, stages=3, programs=8),
    ScoreConfig(tile=32, warps=2, stages=3, programs=8),
    ScoreConfig(tile=128, warps=8, stages=2, programs=4),
]
WARPS = (4, 8, 16)  # of the selecting kernel
PLAIN = [Config(16, *one) for one in ((64, 4, 2), (64, 4, 3), (32, 4, 3), (64, 2, 2))]
CODED = [Config(8, *one) for one in ((32, 1, 2, 168), (32, 1, 3, 168), (64, 2, 2, 144))]
PROGRAMS = (2, 4, 8, 12)  # of attention, per multiprocessor


class Recording(TritonBackend):
    """Keeps the blocks that were chosen last."""

    chosen: Chosen | None = None

    def _choose(self, step: Step, layer: int, query: torch.Tensor, call: AttentionCall) -> Chosen | None:
        self.chosen = super()._choose(step, layer, query, call)
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


def check(pool: KVPool) -> None:
    """Print the largest errors of rows of several lengths; exit if one is too large."""
    glances = (Glance(2048), Glance(1024, 64), None, Glance(640, 1), Glance(2048), Glance(512))
    lengths = (6_000, 5_003, 4_999, 3_264, 20_011, 63)
    step = make_step(pool, list(zip(lengths, glances, strict=True)))
    tokens = len(step.rows)
    query, key, value = noise(tokens, HEADS), noise(tokens, KV_HEADS), noise(tokens, KV_HEADS)
    out = step.attend(0, query, key, value, CALL)
    assert isinstance(step.backend, Recording)
    assert step.backend.chosen is not None
    lists = step.backend.chosen.blocks.cpu()
    worst = missed = drift = 0.0
    for index, row in enumerate(step.rows):
        stored = pool.gather(0, pool.runs(row.blocks, 0, row.length))
        keys, values = (t.float().transpose(0, 1) for t in stored)
        seen = torch.ones(KV_HEADS, row.length, dtype=torch.bool, device=DEVICE)
        picks = step.picks[index]
        if picks is not None:
            place = {page: at for at, page in enumerate(row.blocks)}
            pages = lists[index, :, : picks.reads].tolist()
            chosen = torch.tensor([[place[page] for page in own] for own in pages], device=DEVICE)
            assert bool((chosen.diff(dim=1) > 0).all()), "a list does not ascend"
            taken = torch.zeros(KV_HEADS, picks.blocks, dtype=torch.bool, device=DEVICE)
            taken.scatter_(1, chosen, True)
            assert bool(taken[:, : picks.sinks].all()), "a sink is missing"
            assert bool(taken[:, picks.recent :].all()), "a recent block is missing"
            seen = taken.repeat_interleave(BLOCK_SIZE, 1)[:, : row.length]
            turned = pool.stores[0].turn_query(query[index : index + 1])[0]
            shares = shares_of(
                estimate_logs(turned, *summaries(pool, 0, row.blocks[: picks.full]), CALL.scale)
            )
            between = slice(picks.sinks, picks.recent)
            for own, kept in zip(shares[:, between], taken[:, between], strict=True):
                missed = max(missed, float(own[~kept].max() / own[kept].min()) - 1)
            mass = step.metadata.fast.mass[index, :KV_HEADS].mean()  # of the first layer
            drift = max(drift, abs(float(mass - mass_of(shares, chosen, picks))))
        scores = query[index].float().view(KV_HEADS, GROUP, DIM) @ keys.transpose(1, 2) * CALL.scale
        weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=2)
        expected = (weights @ values).view(HEADS, DIM)
        worst = max(worst, float((out[index].float() - expected).norm() / expected.norm()))
    print(f"{pool.kv_format}: error {worst:.1e}, best block missed by {missed:.1e}, mass off by {drift:.1e}")
    if not (worst < 2e-2 and missed < 5e-2 and drift < 1e-2):  # NaN is no success
        raise SystemExit("results are wrong")


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
        self.label = f"{pool.kv_format:5} {batch} x {context:7,}"
        length = context - 8  # the new slot fills no block, as in most steps
        self.step = make_step(pool, [(length, Glance(budget))] * batch)
        self.slow = make_step(pool, [(length, None)] * batch, evidence=False)
        self.renewing = make_step(pool, [(length, None)] * batch)
        self.query, self.key, self.value = (noise(batch, h) for h in (HEADS, KV_HEADS, KV_HEADS))
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

    def turned(self) -> torch.Tensor:
        return self.pool.stores[0].turn_query(self.query).contiguous()

    def score(self, config: ScoreConfig) -> float:
        known, fast, query = self.step.metadata, self.step.metadata.fast, self.turned()
        tiles, tables = known.decode[None], known.of(0)
        return time_layers(
            self.pool,
            lambda layer: score_blocks(
                query, self.pool.planes(layer), CALL.scale, tables, tiles, fast, BLOCK_SIZE, config
            ),
        )

    def select(self, warps: int | None) -> float:
        known, fast = self.step.metadata, self.step.metadata.fast
        tiles, tables = known.decode[None], known.of(0)
        config = launches.score_config(DIM, torch.bfloat16)
        scores = score_blocks(
            self.turned(), self.pool.planes(0), CALL.scale, tables, tiles, fast, BLOCK_SIZE, config
        )
        return time_layers(
            self.pool, lambda _: select_blocks(scores, tables, tiles, fast, FIRST, BLOCK_SIZE, warps)
        )

    def summarize(self) -> float:
        known = self.step.metadata
        return time_layers(
            self.pool,
            lambda layer: write_summaries(
                self.pool.stores[layer], self.pool.planes(layer), known.of(layer), 1, BLOCK_SIZE
            ),
        )

    def attend(self, config: Config | None, programs: int) -> float:
        """Attention over lists that were chosen before, without writes."""
        store = self.pool.stores[0]
        name = "CODED_PROGRAMS" if isinstance(store, CodedStore) else "PROGRAMS"
        default = getattr(metadata, name)
        setattr(metadata, name, programs)
        try:
            known = metadata.CudaMetadata(self.step)
        finally:
            setattr(metadata, name, default)
        tiles, tables, query = known.decode[None], known.of(0), self.turned()
        chosen = choose_blocks(
            query, self.pool.planes(0), CALL.scale, tables, tiles, known.fast, FIRST, BLOCK_SIZE
        )
        out = torch.empty_like(query)
        if isinstance(store, CodedStore):
            coded = config or coded_config(store, GROUP, query.dtype)
            return time_layers(
                self.pool,
                lambda layer: attend_codes(
                    out, query, store, self.pool.planes(layer), CALL, tables, tiles, BLOCK_SIZE, coded, chosen
                ),
            )  # fmt: skip
        plain = config or launch.decode_config(store.shape, GROUP, query.dtype)
        return time_layers(
            self.pool,
            lambda layer: attend_tiles(
                out, query, known.source(layer), CALL, tables, tiles, plain, pack=GROUP, chosen=chosen
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
        coded = isinstance(self.pool.stores[0], CodedStore)
        programs = metadata.CODED_PROGRAMS if coded else metadata.PROGRAMS
        listed = self.scored // (2 * DIM * 2) * GROUP * 4  # bytes of scores
        self.show("score", self.score(launches.score_config(DIM, torch.bfloat16)), self.scored)
        if variants and not coded:
            self.try_all("score", self.scored, SCORES, self.score)
        self.show("select", self.select(None), listed)
        if variants and not coded:
            self.try_all("select, warps", listed, WARPS, self.select)
        self.show("attend", self.attend(None, programs), self.read)
        if variants:
            kinds = CODED if coded else PLAIN
            self.try_all("attend", self.read, kinds, lambda kind: self.attend(kind, programs))
            self.try_all("attend, programs", self.read, PROGRAMS, lambda count: self.attend(None, count))
            self.show("summaries of no block", self.summarize(), 0)
            if coded:
                self.show("write and turn", self.write(), 0)
        fast = self.show("fast layer, all of it", self.whole(self.step), self.scored + self.read)
        slow = self.show("slow layer, all of it", self.whole(self.slow), self.all)
        self.show("slow layer with evidence", self.whole(self.renewing), self.all)
        print(f"{self.label}  a fast layer takes {fast / slow:.2f} of a slow one\n", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--budget", type=positive, default=2048)
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[AUTO, "int8"])
    parser.add_argument("--contexts", nargs="+", type=positive, default=[4096, 32_768, 131_072])
    parser.add_argument("--batches", nargs="+", type=positive, default=[1, 4])
    args = parser.parse_args()
    need_cuda(parser)
    torch.manual_seed(0)
    begun = time.perf_counter()
    most = max(args.batches) * -(-max(args.contexts) // BLOCK_SIZE)
    for kv_format in args.formats:
        pool = make_pool(kv_format, args.layers, max(most, 800))
        check(pool)
        for batch in args.batches:
            for context in args.contexts:
                variants = context == max(args.contexts) and batch == max(args.batches)
                Bench(pool, batch, context, args.budget).run(variants)
        del pool
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    run(main)
