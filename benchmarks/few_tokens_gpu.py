"""Products of few tokens on a GPU: our kernel against torch's product.

    PYTHONPATH=src python benchmarks/few_tokens_gpu.py [--shape qwen3-8b] [--tokens 1 2 4 8 16 32 64]

Every product is first compared with the product in float64. Then it is timed in a captured graph, over so
many copies of the weight that no cache holds them. The last lines add up a decode step. Exits with 1 if a
result is wrong.
"""

from __future__ import annotations

from functools import partial

import torch
from coded_weights_gpu import COLD, HEAD, error_of, microseconds, products_of
from script import need_cuda, parser_of, positive, run
from torch.nn import functional as F

from skim.models.forwards.packed import linear
from skim.models.shapes import SHAPES

BOUND = 1e-2  # of the error, relative to the size of the whole result
MOST_CHECKED = 4096  # rows


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    need_cuda(parser)
    torch.manual_seed(0)
    wrong, size = False, 0
    layers = SHAPES[args.shape]["num_hidden_layers"]
    ours, theirs = dict.fromkeys(args.tokens, 0.0), dict.fromkeys(args.tokens, 0.0)
    print(f"{args.shape}, us, ours / torch's")
    for name, (rows, columns) in products_of(args.shape).items():
        count = max(2, COLD // (rows * columns * 2))
        weights = [torch.randn(rows, columns, device="cuda").mul_(0.02).bfloat16() for _ in range(count)]
        times = 1 if name == HEAD else layers
        size += times * weights[0].nbytes
        line = f"{name:8} {columns:6} -> {rows:6}:"
        for tokens in args.tokens:
            given = torch.randn(tokens, columns, device="cuda").bfloat16()
            exact = given.double() @ weights[0][:MOST_CHECKED].double().T
            error = error_of(linear(given, weights[0])[:, :MOST_CHECKED], exact)
            if not error <= BOUND:  # NaN is wrong too
                print(f"{name}, {tokens} tokens: error {error:.1e}: WRONG")
                wrong = True
            own = microseconds([partial(linear, given, weight) for weight in weights])
            other = microseconds([partial(F.linear, given, weight) for weight in weights])
            ours[tokens] += times * own
            theirs[tokens] += times * other
            line += f"  {tokens}: {own:.1f} / {other:.1f}"
        print(line, flush=True)
        del weights
    for tokens in args.tokens:
        print(
            f"step of {tokens} tokens, products alone: {ours[tokens] / 1e3:.2f} ms, "
            f"{size / ours[tokens] / 1e6:.2f} TB/s; torch {theirs[tokens] / 1e3:.2f} ms"
        )
    return int(wrong)


if __name__ == "__main__":
    run(main)
