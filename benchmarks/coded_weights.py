"""Products with coded weights on the CPU: time, bandwidth, and the ratio to products with float32 weights.

    PYTHONPATH=src python benchmarks/coded_weights.py [--shapes smollm2-135m qwen3-8b] [--tokens 1 4 16 512]

Weights are random, with so many copies that they do not stay in the processor's caches. `read` is the
bandwidth of summing a large tensor. Both sides take turns, and the fastest of all repeats counts.

`--tiles` compares products of 4-bit codes with many tokens by vectors and by tile registers (AMX) instead:
the CPU time of one thread, and the time with all threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from script import parser_of, positive, run, tell

from skim.models.forwards.few_tokens import FEW_TOKENS, PLAIN, for_few_tokens
from skim.models.quantized.cpu import kernels
from skim.models.quantized.cpu_many import ManyTokens
from skim.models.quantized.format import CodedWeight, pack
from skim.models.quantized.product import multiply
from skim.native.build import NativeUnavailable

SHAPES = {  # [outputs, inputs] of a layer's packed products, and of a part of the head
    "smollm2-135m": [(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    "llama-8b": [(6144, 4096), (28672, 4096), (4096, 14336)],
    "qwen3-8b": [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)],
}
CACHES = 100e6  # bytes: more than caches hold


@dataclass(frozen=True)
class Kind:
    """Codes of a GGUF type or a checkpoint's."""

    name: str
    bits: int
    group: int
    offsets: bool


KINDS = (
    Kind("Q4_1", 4, 32, True),
    Kind("Q5_1", 5, 32, True),
    Kind("6 bits", 6, 16, False),
    Kind("Q8_0", 8, 32, False),
    Kind("int4", 4, 128, True),
)


def random_weight(kind: Kind, rows: int, columns: int) -> CodedWeight:
    codes = torch.randint(0, 2**kind.bits, (rows, columns), dtype=torch.uint8)
    low, high = (codes, None) if kind.bits == 8 else pack(codes, kind.bits)
    scale = (torch.rand(rows, columns // kind.group) * 0.01).half()
    offset = scale * -(2 ** (kind.bits - 1)) if kind.offsets else None
    zero = 0 if kind.offsets else 2 ** (kind.bits - 1)
    return CodedWeight(kind.bits, kind.group, low, scale, high, offset, zero)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def each(
    product: Callable[[torch.Tensor, Any, None], torch.Tensor], given: torch.Tensor, weights: list[Any]
) -> float:
    """Seconds of one product."""
    return seconds(lambda: [product(given, weight, None) for weight in weights]) / len(weights)


def read_bandwidth() -> float:
    """Bytes per second of reading memory."""
    large = torch.ones(int(CACHES))
    return large.nbytes / min(seconds(large.sum) for _ in range(5))


def measure(kind: Kind, shape: tuple[int, int], counts: list[int], repeats: int, read: float) -> None:
    rows, columns = shape
    if columns % kind.group:
        return
    first = random_weight(kind, rows, columns)
    copies = max(1, min(40, int(CACHES // first.nbytes)))
    coded = [first, *(random_weight(kind, rows, columns) for _ in range(copies - 1))]
    plain_copies = max(1, min(copies, int(2 * CACHES // (4 * rows * columns))))
    plain = [torch.randn(rows, columns) for _ in range(plain_copies)]
    few = for_few_tokens()
    for tokens in counts:
        given = torch.randn(tokens, columns)
        ops = few if tokens <= FEW_TOKENS else PLAIN
        times = [(each(multiply, given, coded), each(ops.product, given, plain)) for _ in range(repeats)]
        ours, theirs = (min(side) for side in zip(*times, strict=True))
        print(
            f"{kind.name:7} {rows:6} x {columns:5} {tokens:4} tokens {ours * 1e3:9.3f} ms "
            f"{first.nbytes / ours / 1e9:6.1f} GB/s ({first.nbytes / ours / read:4.0%} of read) "
            f"{ours / theirs:5.2f}x of float32's {theirs * 1e3:.3f} ms",
            flush=True,
        )


def measure_tiles(shape: tuple[int, int], tokens: int, repeats: int) -> None:
    rows, columns = shape
    weight, given = random_weight(KINDS[0], rows, columns), torch.randn(tokens, columns)
    vectors, tiles = ManyTokens(tiles=False), ManyTokens(tiles=True)
    threads = torch.get_num_threads()
    for parts in (3, 1):
        texts = []
        for count, clock in ((1, time.thread_time), (threads, time.perf_counter)):
            torch.set_num_threads(count)
            taken: list[list[float]] = [[], []]
            for _ in range(repeats):
                for kernel, into in zip((vectors, tiles), taken, strict=True):
                    start = clock()
                    kernel.product(given, weight, None, parts)
                    into.append(clock() - start)
            one, other = (min(side) * 1e3 for side in taken)
            texts.append(
                f"{count} threads {one:8.2f} ms by vectors {other:8.2f} by tiles {one / other:5.2f}x"
            )
        print(f"{rows:6} x {columns:5} {tokens:4} tokens {parts} parts: {', '.join(texts)}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2-135m", "qwen3-8b"])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[1, 4, 16, 512])
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=["Q4_1", "Q8_0"])
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--tiles", action="store_true", help="compare tiles with vectors")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.tiles:
        try:
            ManyTokens(tiles=True)
        except NativeUnavailable as reason:
            raise SystemExit(f"{reason}; leave out --tiles") from None
        for name in args.shapes:
            for shape in SHAPES[name]:
                for tokens in args.tokens:
                    measure_tiles(shape, tokens, args.repeats)
        return
    if kernels() is None:
        tell("native products are not available: all figures are torch's")
    read = read_bandwidth()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, read {read / 1e9:.1f} GB/s")
    with torch.inference_mode():
        for name in args.shapes:
            for kind in (kind for kind in KINDS if kind.name in args.kinds):
                for shape in SHAPES[name]:
                    measure(kind, shape, args.tokens, args.repeats, read)


if __name__ == "__main__":
    run(main)
