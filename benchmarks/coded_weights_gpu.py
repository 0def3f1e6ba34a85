"""Speed of products with coded weights on a GPU, against bfloat16.

    PYTHONPATH=src python benchmarks/coded_weights_gpu.py --shape qwen3-8b --bits 4 --group 128 --tokens 1 16

First every product is checked against the restored weight. Then each is timed in a captured graph, over so
many copies of the weight that no cache holds them, with several launches. `own` is the one that the
engine chooses. The last line adds up a decode step's products. Each number of tokens takes about a minute:
there are many kernels to compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
from script import need_cuda, parser_of, positive, run
from torch.nn import functional as F
from triton.errors import TritonError

from skim.models.forwards import triton_product
from skim.models.quantized import triton_halves, triton_matrix, triton_pairs, triton_vector
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.product import look_up, multiply, restore_stored
from skim.models.shapes import SHAPES

PEAK = 4.8e12  # bytes per second of an H200
COLD = 2**28  # bytes of all copies of a weight: several times the GPU's cache
MOST_CHECKED = 4096  # rows
BOUND = 2e-2  # of the error, relative to the size of the whole result
HEAD = "head"
LEAST_PROGRAMS, MOST_PROGRAMS = 90, 800  # of launches that are worth a trial
Launch = triton_vector.Launch | triton_halves.Launch | triton_matrix.Launch | triton_pairs.Launch
VECTORS = [triton_vector.Launch(rows, 32 * warps, warps) for rows, warps in [(8, 4), (8, 2), (8, 8), (4, 2)]]
HALVES = [triton_halves.Launch(rows, warps) for rows in (4, 8) for warps in (1, 2, 4, 8)]
MATRICES = [(64, 4, 3), (128, 8, 3)]  # rows, warps and stages
PAIRS = [(128, 4, 4), (64, 4, 4), (128, 8, 4), (256, 8, 4)]


def products_of(shape: str) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's products and of the head."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "out": (hidden, heads * dim),
        "gate-up": (2 * inner, hidden),
        "down": (hidden, inner),
        HEAD: (config["vocab_size"], hidden),
    }


def random_weight(rows: int, columns: int, bits: int, group: int, offsets: str) -> CodedWeight:
    def codes(width: int, end: int = 256) -> torch.Tensor:
        return torch.randint(0, end, (rows, width), dtype=torch.uint8, device="cuda")

    def floats() -> torch.Tensor:
        return torch.randn(rows, columns // group, device="cuda").mul_(0.01).bfloat16()

    added = {"none": None, "floats": floats(), "zeros": codes(columns // group, 2**bits)}[offsets]
    return CodedWeight(
        bits,
        group,
        codes(columns if bits == 8 else columns // 2),
        floats(),
        codes(columns * (bits - 4) // 8) if bits in (5, 6) else None,
        added,
        0 if added is not None else 2 ** (bits - 1),
    )


def copy_of(weight: CodedWeight) -> CodedWeight:
    return weight.chosen_rows(torch.arange(weight.rows, device=weight.device))


def microseconds(works: Sequence[Callable[[], object]]) -> float:
    """Time of one of these works, which run one after another in a captured graph."""
    for work in works[:2]:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    times: list[float] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(8):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(works))
    return statistics.median(times[2:])


def error_of(out: torch.Tensor, exact: torch.Tensor) -> float:
    return ((out.double() - exact).abs().max() / exact.abs().max()).item()


def check(name: str, weight: CodedWeight, dtype: torch.dtype, most: int) -> bool:
    """Compare the kernels with the plain twin. Returns whether they agree."""
    some = weight.some_rows(0, min(MOST_CHECKED, weight.rows))
    plain = some.restore()
    restored = all(torch.equal(restore_stored(some, one), plain.to(one)) for one in (dtype, torch.float32))
    ids = torch.tensor([3, 0, some.rows - 1], device="cuda")
    restored = restored and torch.equal(look_up(weight, ids, dtype), plain.to(dtype)[ids])
    worst = 0.0
    for tokens in (1, 2, 7, 16, 17, 64, 65):
        if tokens > most:
            continue
        given = torch.randn(tokens, weight.columns, device="cuda").to(dtype)
        error = error_of(multiply(given, some), given.double() @ plain.double().T)
        worst = error if not error <= worst else worst  # NaN stays
    good = restored and worst <= BOUND
    print(
        f"  {name:8} error {worst:.1e}, rows {'equal' if restored else 'DIFFER'}{'' if good else '  WRONG'}"
    )
    return good


def launches_for(weight: CodedWeight, tokens: int, dtype: torch.dtype) -> list[Launch]:
    if triton_pairs.can_multiply(weight, tokens, dtype) and tokens > 1:
        pairs: list[Launch] = [
            triton_pairs.Launch(rows, splits, warps, stages)
            for rows, warps, stages in PAIRS
            for splits in (1, 2, 4, 8)
            if LEAST_PROGRAMS <= triton.cdiv(weight.rows, rows) * splits <= MOST_PROGRAMS
        ]
        return [triton_matrix.choose(weight, tokens), *pairs]
    if tokens > 1:
        return [
            triton_matrix.Launch(rows, 16, splits, warps, stages)
            for rows, warps, stages in MATRICES
            for splits in (1, 2, 4, 8)
        ]
    if not triton_halves.can_multiply(weight, dtype):
        return [*VECTORS]
    return [*VECTORS, *HALVES]


def product_with(launch: Launch) -> Callable[..., torch.Tensor]:
    if isinstance(launch, triton_vector.Launch):
        return partial(triton_vector.multiply_one, bias=None, launch=launch)
    if isinstance(launch, triton_halves.Launch):
        return partial(triton_halves.multiply_halves, bias=None, launch=launch)
    if isinstance(launch, triton_pairs.Launch):
        return partial(triton_pairs.multiply_pairs, bias=None, launch=launch)
    return partial(triton_matrix.multiply_few, bias=None, launch=launch)


def bench(name: str, weight: CodedWeight, tokens: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """Time one product with all launches.

    Returns microseconds: with the engine's launch, with the best one, and in 16 bits.
    """
    given = torch.randn(tokens, weight.columns, device="cuda").to(dtype)
    plain = [weight.some_rows(0, weight.rows).restore_stored(dtype)]
    exact = given.double() @ plain[0][:MOST_CHECKED].double().T
    copies = [weight] + [copy_of(weight) for _ in range(min(63, COLD // weight.nbytes))]
    own = microseconds([partial(multiply, given, one) for one in copies])
    tried = {}
    for launch in launches_for(weight, tokens, dtype):
        product = product_with(launch)
        label = f"{type(launch).__module__.rsplit('_')[-1]} {','.join(str(one) for one in launch)}"
        try:
            error = error_of(product(given, weight)[:, :MOST_CHECKED], exact)
        except (RuntimeError, TritonError) as problem:
            print(f"  {name:8} {label} FAILS: {problem}")
            continue
        if error <= BOUND:
            tried[label] = microseconds([partial(product, given, one) for one in copies])
        else:
            print(f"  {name:8} {label} is WRONG: error {error:.1e}")
    best = min(tried, key=lambda one: tried[one])
    del copies
    plain += [plain[0].clone() for _ in range(min(15, COLD // plain[0].nbytes))]
    torchs = microseconds([partial(F.linear, given, one) for one in plain])
    ours = torchs
    if tokens == 1:
        ours = microseconds([partial(triton_product.multiply, given, one, None) for one in plain])
    share = weight.nbytes / own / PEAK * 1e8
    print(
        f"  {name:8} {weight.columns:6} -> {weight.rows:6}, {tokens:2} tokens: own {own:6.1f} us"
        f" {weight.nbytes / own / 1e3:5.0f} GB/s {share:3.0f}%, best {tried[best]:6.1f} ({best});"
        f" torch {torchs:6.1f}, ours in 16 bits {ours:6.1f}: {own / min(torchs, ours):.2f}x",
        flush=True,
    )
    others = "; ".join(f"{one} {time:.1f}" for one, time in sorted(tried.items(), key=lambda item: item[1]))
    print(f"           {others}")
    return own, tried[best], min(torchs, ours)


def bench_many(weights: dict[str, CodedWeight], tokens: int, dtype: torch.dtype) -> None:
    """Time a layer's products with many tokens."""
    coded, plain = 0.0, 0.0
    for name, weight in weights.items():
        if name == HEAD:
            continue
        given = torch.randn(tokens, weight.columns, device="cuda").to(dtype)
        restored = weight.restore_stored(dtype)
        coded += microseconds([partial(multiply, given, weight)] * 4)
        plain += microseconds([partial(F.linear, given, restored)] * 4)
    print(f"layer with {tokens} tokens: {coded:.0f} us, {dtype} {plain:.0f}: {coded / plain:.2f}x")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 5, 6, 8))
    parser.add_argument("--group", type=int, default=128, choices=(16, 32, 64, 128))
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--many", type=positive, help="also time a layer with this many tokens")
    parser.add_argument("--offsets", default="zeros", choices=("none", "zeros", "floats"))
    parser.add_argument("--head", action="store_true", help="also time the head, in 8 bits")
    arguments = parser.parse_args()
    need_cuda(parser)
    torch.manual_seed(0)
    dtype = torch.bfloat16
    weights = {
        name: random_weight(
            rows, columns, 8 if name == HEAD else arguments.bits, arguments.group, arguments.offsets
        )
        for name, (rows, columns) in products_of(arguments.shape).items()
        if name != HEAD or arguments.head
    }
    print("check")
    good = [check(name, weight, dtype, max(arguments.tokens)) for name, weight in weights.items()]
    if not all(good):
        return 1
    layers = SHAPES[arguments.shape]["num_hidden_layers"]
    for tokens in arguments.tokens:
        times = {name: bench(name, weight, tokens, dtype) for name, weight in weights.items()}
        coded, best, plain = (
            sum(time[side] * (1 if name == HEAD else layers) for name, time in times.items()) / 1e3
            for side in range(3)
        )
        print(
            f"step of {tokens} tokens, products alone: {coded:.2f} ms, best {best:.2f}, bfloat16 {plain:.2f}"
        )
    if arguments.many:
        bench_many(weights, arguments.many, dtype)
    return 0


if __name__ == "__main__":
    run(main)
