"""Kernels of forwards that only rank tokens on a CPU, beside the precise ones: the CPU time of one thread.

    PYTHONPATH=src python benchmarks/ranking_kernels.py [--tokens 540]

Shapes are those of SmolLM2-135M with 4-bit codes. Both sides take turns, and the fastest of all repeats
counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from coded_weights import KINDS, SHAPES, random_weight
from script import parser_of, positive, run

from skim.attention.cpu.native_prefill import prefill_kernel
from skim.attention.step import AttentionCall
from skim.models.quantized.cpu_many import many_tokens
from skim.native.build import NativeUnavailable

HEADS, KV_HEADS, DIM = 9, 3, 64


def compare(name: str, work: float, repeats: int, *sides: Callable[[], object]) -> None:
    """Print the times of the precise and the ranking kernel. work: multiply-adds"""
    taken: list[list[float]] = [[], []]
    for _ in range(repeats):
        for side, into in zip(sides, taken, strict=True):
            start = time.thread_time()
            side()
            into.append(time.thread_time() - start)
    precise, ranking = (min(times) for times in taken)
    print(
        f"{name:24} precise {precise * 1e3:7.3f} ms  ranking {ranking * 1e3:7.3f} ms "
        f"({work / ranking / 1e9:4.0f} G multiply-adds a second)  {ranking / precise:.2f}x",
        flush=True,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positive, default=540, help="default: a scoring window's")
    parser.add_argument("--repeats", type=positive, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    products, attention, tokens = many_tokens(), prefill_kernel(), args.tokens
    if products is None or attention is None:
        raise NativeUnavailable("the native kernels are not available here")
    for rows, columns in SHAPES["smollm2-135m"][:4]:
        weight, given = random_weight(KINDS[0], rows, columns), torch.randn(tokens, columns)
        sides = [partial(products.product, given, weight, None, parts) for parts in (3, 1)]
        compare(f"product {rows} x {columns}", rows * columns * tokens, args.repeats, *sides)
    query, key, value = (torch.randn(tokens, n, DIM).transpose(0, 1) for n in (HEADS, KV_HEADS, KV_HEADS))
    calls = [AttentionCall(DIM**-0.5, rounds=rounds) for rounds in (False, True)]
    sides = [partial(attention.attend_causal, query, key, value, call) for call in calls]
    compare("attention", HEADS * DIM * tokens * (tokens + 1), args.repeats, *sides)


if __name__ == "__main__":
    run(main)
