"""Speed of the CUDA backend per layer, with the achieved bandwidth or FLOP/s.

    PYTHONPATH=src python benchmarks/attention_kernels.py

Contents are random, and blocks are scattered over the pool unless a line says otherwise. Decode is timed in a
captured graph over several layers, so that neither launches nor caches distort it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from script import need_cuda, parser_of, run

from skim.attention.blocksparse.policy import BLOCK, Policy
from skim.attention.blocksparse.triton_blocks import attend_sparse, choose
from skim.attention.cuda import dense
from skim.attention.cuda.backend import TritonBackend
from skim.attention.cuda.launch import BlockList
from skim.attention.step import AttentionCall, Role, Row, Step
from skim.memory.pool import KVPool
from skim.memory.store import LayerShape

DIM = 128
CALL = AttentionCall(DIM**-0.5)
DEVICE = torch.device("cuda")


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the median time, after one warm-up run."""
    work()
    times: list[float] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(repeats):
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


def noise(tokens: int, heads: int) -> torch.Tensor:
    """Random values in transformers' memory layout: heads before tokens. [tokens, heads, DIM]"""
    return torch.randn(heads, tokens, DIM, device=DEVICE, dtype=torch.bfloat16).transpose(0, 1)


def make_step(
    rows: Sequence[tuple[int, int]],
    layers: int = 1,
    kv_heads: int = 8,
    scattered: bool = True,
    window: int | None = None,
) -> Step:
    """Build a step of rows (context, queries) over a pool of random keys and values."""
    shape = LayerShape(kv_heads, DIM, DIM, window)
    need = [-(-(context + queries) // 16) for context, queries in rows]
    pool = KVPool.of_blocks([shape] * layers, sum(need), block_size=16, dtype=torch.bfloat16, device=DEVICE)
    order = pool.allocate(sum(need))
    if scattered:
        random.Random(0).shuffle(order)
    slots = pool.runs(range(pool.capacity), 0, pool.token_capacity)
    for layer in range(layers):
        pool.write(layer, slots, noise(pool.token_capacity, kv_heads), noise(pool.token_capacity, kv_heads))
    made = []
    for (context, queries), count in zip(rows, need, strict=True):
        blocks, order = order[:count], order[count:]
        made.append(Row(Role.DECODE if queries == 1 else Role.PREFILL, blocks, context, queries))
    return Step(pool, tuple(made), TritonBackend())


def bench_decode(name: str, heads: int, batch: int, length: int, layers: int) -> None:
    step = make_step([(length - 1, 1)] * batch, layers)
    query, key = noise(batch, heads), noise(batch, 8)

    def work() -> None:
        for layer in range(layers):
            step.attend(layer, query, key, key, CALL)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    took = milliseconds(graph.replay) / layers
    gigabytes = 2 * batch * length * 8 * DIM * 2 / 1e9
    print(f"decode {name}: {took * 1e3:.1f} us a layer, {gigabytes / took * 1e3:,.0f} GB/s", flush=True)


def bench_chunk(name: str, context: int, queries: int, call: AttentionCall = CALL) -> None:
    step = make_step([(context, queries)], window=call.window)
    query, key = noise(queries, 32), noise(queries, 8)
    keys = queries * context + queries * queries / 2 if call.window is None else queries * call.window
    took = milliseconds(lambda: step.attend(0, query, key, key, call))
    rate = 4 * 32 * DIM * keys / took / 1e9
    print(f"prefill {name}: {took:.2f} ms a layer, {rate:.0f} TFLOP/s", flush=True)


def random_blocks(query_blocks: int, share: float) -> BlockList:
    """For each query block, a random share of the key blocks that it may read, and its own."""
    at = torch.arange(query_blocks, device=DEVICE)
    kept = torch.rand(query_blocks, 32, query_blocks, device=DEVICE) < share
    kept = (kept | (at[None, :] == at[:, None])[:, None]) & (at[None, :] <= at[:, None])[:, None]
    place = torch.where(kept, kept.cumsum(-1, dtype=torch.int32) - 1, query_blocks).long()
    blocks = torch.empty(query_blocks, 32, query_blocks + 1, dtype=torch.int32, device=DEVICE)
    blocks.scatter_(2, place, at.int().expand_as(place))
    return BlockList(blocks, kept.sum(-1, dtype=torch.int32), BLOCK)


def bench_sparse(tokens: int) -> None:
    query, key = noise(tokens, 32), noise(tokens, 8)
    whole = milliseconds(lambda: dense.attend_causal(query, key, key, CALL.scale), 3)
    print(f"dense {tokens} tokens: {whole:.1f} ms a layer")
    out = torch.empty(tokens, 32, DIM, device=DEVICE, dtype=torch.bfloat16)
    for scattered in (True, False):
        step = make_step([(0, tokens)], scattered=scattered)
        for share in (0.10, 0.05):
            chosen = random_blocks(tokens // BLOCK, share)
            read = int(chosen.counts.sum()) * BLOCK * BLOCK
            work = partial(attend_sparse, out, query, step.metadata, step.metadata.source(0), 0, CALL, chosen)
            took = milliseconds(work, 3)
            print(
                f"sparse {tokens} tokens, {read / 32 / (tokens * tokens / 2):.1%} of the blocks, "
                f"{'scattered' if scattered else 'in one piece'}: {took:.1f} ms, "
                f"{4 * DIM * read / took / 1e9:.0f} TFLOP/s, {whole / took:.1f}x dense",
                flush=True,
            )
            del chosen
        if scattered:
            for sample in (1, 4):
                policy = Policy(0.5, sample=sample)
                took = milliseconds(
                    partial(
                        choose,
                        step.metadata,
                        step.metadata.source(0),
                        0,
                        query,
                        CALL.scale,
                        policy,
                        prompt=tokens,
                    ),
                    3,
                )
                print(f"choosing blocks, sampling every {sample}. query: {took:.2f} ms", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.parse_args()
    need_cuda(parser)
    bench_decode("8B, batch 4, 128K", 32, 4, 131072, 2)
    bench_decode("8B, batch 1, 128K", 32, 1, 131072, 4)
    bench_decode("8B, batch 4, 8K", 32, 4, 8192, 8)
    bench_decode("8B, batch 1, 1K", 32, 1, 1024, 16)
    bench_decode("8B, batch 64, 1K", 32, 64, 1024, 8)
    bench_decode("0.6B, batch 64, 1K", 16, 64, 1024, 8)
    bench_chunk("8K after 120K", 122880, 8192)
    sinks = torch.zeros(32, device=DEVICE)
    bench_chunk(
        "8K after 120K, with sinks (our kernel)", 122880, 8192, AttentionCall(CALL.scale, sinks=sinks)
    )
    bench_chunk("8K after 120K, softcap (our kernel)", 122880, 8192, AttentionCall(CALL.scale, softcap=50.0))
    bench_chunk(
        "8K after 16K, sliding window 1K (our kernel)", 16384, 8192, AttentionCall(CALL.scale, window=1024)
    )
    bench_chunk("8K", 0, 8192)
    bench_chunk("2K (our kernel)", 0, 2048)
    bench_sparse(131072)


if __name__ == "__main__":
    run(main)
