"""Decode and prefill over quantized keys and values, with the achieved bandwidth, for several tile sizes.

    PYTHONPATH=src python benchmarks/coded_kv.py

Heads are those of an 8B model. Every configuration is first compared with attention in float32 over the
stored numbers. Decode is timed in a captured graph over several layers, with writes. Blocks are scattered.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from attention_kernels import milliseconds
from script import need_cuda, parser_of, positive, run

from skim.attention.cuda import coded_launch, metadata
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.codes import kind_of
from skim.attention.cuda.launch import Config
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.codec import CodedStore
from skim.memory.formats import AUTO, FORMATS
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
CALL = AttentionCall(DIM**-0.5)
DEVICE = torch.device("cuda")

CONFIGS = {  # (keys of a tile, warps, stages, registers)
    "int8": [(32, 1, 2, 168), (32, 1, 3, 168), (16, 1, 5, 168)],
    "int4": [(64, 1, 3, 255), (64, 1, 5, 255), (32, 1, 5, 168)],
    "k8v4": [(32, 1, 2, 168), (32, 1, 4, 168)],
    "fp8": [(32, 1, 2, 168), (32, 1, 4, 168)],
}
PROGRAMS = (8, 24)  # per multiprocessor, beside the default


@dataclass
class Timed:
    tile: tuple[int, int, int, int] | None
    programs: int
    ms: float


def noise(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads, DIM, device=DEVICE, dtype=torch.bfloat16)


def make_pool(kv_format: str, layers: int, blocks: int) -> KVPool:
    """A pool of random keys and values, the same in all layers."""
    pool = KVPool.of_blocks(
        [LayerShape(KV_HEADS, DIM, DIM)] * layers,
        blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=DEVICE,
        kv_format=kv_format,
    )
    pool.allocate(blocks)
    step = 4096  # blocks
    for first in range(0, blocks, step):
        some = range(first, min(first + step, blocks))
        slots = len(some) * BLOCK_SIZE
        pool.write(0, pool.runs(some, 0, slots), noise(slots, KV_HEADS), noise(slots, KV_HEADS))
    for layer in range(1, layers):
        for name, plane in pool.planes(layer).blocks.items():
            plane.copy_(pool.planes(0).blocks[name])
    return pool


def make_step(pool: KVPool, rows: list[tuple[int, int]]) -> Step:
    """Rows (context, queries) over scattered blocks."""
    order = list(range(pool.capacity))
    random.Random(0).shuffle(order)
    made = []
    for context, queries in rows:
        count = -(-(context + queries) // BLOCK_SIZE)
        blocks, order = order[:count], order[count:]
        made.append(Row(Role.DECODE if queries == 1 else Role.PREFILL, blocks, context, queries))
    return Step(pool, tuple(made), TritonBackend())


def error_of(pool: KVPool) -> float:
    """Relative error of rows of several lengths, against float32 attention over the stored numbers."""
    step = make_step(pool, [(length - 1, 1) for length in (1, 63, 64, 65, 1000, 5003)])
    tokens = len(step.rows)
    query, key, value = noise(tokens, HEADS), noise(tokens, KV_HEADS), noise(tokens, KV_HEADS)
    out = step.attend(0, query, key, value, CALL)
    worst = 0.0
    for index, row in enumerate(step.rows):
        gathered = pool.gather(0, pool.runs(row.blocks, 0, row.length))
        keys, values = (t.float().transpose(0, 1) for t in gathered)  # [kv_heads, keys, dim]
        grouped = query[index].float().view(KV_HEADS, HEADS // KV_HEADS, DIM)
        weights = torch.softmax(grouped @ keys.transpose(1, 2) * CALL.scale, dim=2)
        expected = (weights @ values).view(HEADS, DIM)
        worst = max(worst, float((out[index].float() - expected).norm() / expected.norm()))
    return worst


def time_decode(pool: KVPool, batch: int, context: int) -> float:
    """Milliseconds of a layer."""
    layers = len(pool.layers)
    step = make_step(pool, [(context - 1, 1)] * batch)
    query, key, value = noise(batch, HEADS), noise(batch, KV_HEADS), noise(batch, KV_HEADS)

    def work() -> None:
        for layer in range(layers):
            step.attend(layer, query, key, value, CALL)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return milliseconds(graph.replay, 7) / layers


def use(pool: KVPool, tile: tuple[int, int, int, int], programs: int) -> None:
    store = pool.stores[0]
    assert isinstance(store, CodedStore)
    coded_launch.CONFIGS[kind_of(store.key), kind_of(store.value)] = Config(8, *tile)
    metadata.CODED_PROGRAMS = programs


def bench_decode(kv_format: str, layers: int, batch: int, context: int, plain: float | None) -> float:
    """Print a line for each configuration; the best time in milliseconds."""
    pool = make_pool(kv_format, layers, batch * -(-context // BLOCK_SIZE) + 400)
    gigabytes = batch * pool.stores[0].read_bytes(context, BLOCK_SIZE) / 1e9
    found: list[Timed] = []

    def measure(tile: tuple[int, int, int, int] | None, programs: int) -> None:
        begun = time.perf_counter()
        if tile is not None:
            use(pool, tile, programs)
        try:
            error = error_of(pool)
            ms = time_decode(pool, batch, context)
        except Exception as reason:  # a configuration may not fit the device; the others still count
            print(f"{kv_format:5} {tile} failed: {type(reason).__name__}: {str(reason)[:200]}", flush=True)
            return
        found.append(Timed(tile, programs, ms))
        ratio = "" if plain is None else f"{ms / plain:6.3f}x"
        print(
            f"{kv_format:5} {tile or ''!s:16} {programs:3} {ms * 1e3:8.1f} us "
            f"{gigabytes / ms * 1e3:6,.0f} GB/s {ratio} error {error:.1e} "
            f"({time.perf_counter() - begun:.0f} s)",
            flush=True,
        )

    if kv_format == AUTO:
        measure(None, metadata.PROGRAMS)
    else:
        default = metadata.CODED_PROGRAMS
        for tile in CONFIGS[kv_format]:
            measure(tile, default)
        if found and len(CONFIGS[kv_format]) > 2:
            best = min(found, key=lambda one: one.ms)
            for programs in PROGRAMS:
                measure(best.tile, programs)
        metadata.CODED_PROGRAMS = default
    return min(one.ms for one in found)


def bench_prefill(kv_format: str, tokens: int, chunk: int, plain: float | None) -> float:
    """The attention of a prompt in chunks, milliseconds of a layer."""
    pool = make_pool(kv_format, 1, -(-tokens // BLOCK_SIZE))
    query, key, value = noise(chunk, HEADS), noise(chunk, KV_HEADS), noise(chunk, KV_HEADS)
    steps = [make_step(pool, [(context, chunk)]) for context in range(0, tokens, chunk)]

    def work() -> None:
        for step in steps:
            step.attend(0, query, key, value, CALL)

    took = milliseconds(work, 3)
    ratio = "" if plain is None else f"{took / plain:6.3f}x"
    print(
        f"{kv_format:5} prefill of {tokens} in chunks of {chunk}: {took:.2f} ms a layer {ratio}", flush=True
    )
    return took


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--context", type=positive, default=131_072)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--formats", nargs="+", choices=FORMATS[1:], default=list(CONFIGS))
    args = parser.parse_args()
    need_cuda(parser)
    torch.manual_seed(0)
    print("a layer's decode: format (tile, warps, stages, registers), programs per multiprocessor")
    plain = bench_decode(AUTO, args.layers, args.batch, args.context, None)
    for kv_format in args.formats:
        bench_decode(kv_format, args.layers, args.batch, args.context, plain)
    for chunk in (8192, 1024):
        whole = bench_prefill(AUTO, 32_768, chunk, None)
        for kv_format in args.formats:
            bench_prefill(kv_format, 32_768, chunk, whole)


if __name__ == "__main__":
    run(main)
