"""A shape with quantized weights on a GPU: memory, decode steps and prefill, against 16-bit weights.

    PYTHONPATH=src python benchmarks/quantized_shape.py [--shape qwen3-8b] [--quantization int4]
    PYTHONPATH=src python benchmarks/quantized_shape.py --shape qwen3-32b --alone --most-gb 20 --most-ms 8

Both models are in one process and take turns; `--alone` leaves the one in 16 bits out. Exits with 1 if a
bound is missed: `--most-ms` for the step of one row, `--most-batch` and `--most-prefill` for the ratio of a
step of 16 rows and of the prefill of 8,192 tokens, `--most-gb` for the peak of loading.
"""

from __future__ import annotations

import statistics

import torch
from script import need_cuda, parser_of, positive, run, tell

from skim.bench.drive import Driver
from skim.bench.inputs import random_prompts, several
from skim.config import EngineConfig, PrefillConfig
from skim.models.shapes import build_shape

PREFILL = 8192
BATCH = 16
STEPS = 60


class Side:
    """One of the two models, and its figures."""

    def __init__(self, shape: str, quantization: str, longest: int) -> None:
        tell(f"starting {shape} in {quantization}")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        settings = {"quantization": quantization, "kv_memory": "8G", "max_model_len": longest}
        config = EngineConfig.of(**settings)
        model = build_shape(shape, config.model)
        self.peak = torch.cuda.max_memory_allocated() - before
        self.weights = model.weights
        self.driver = Driver(model, config)
        self.prompts = random_prompts(model.vocab_size, 0)
        self.steps: dict[int, list[float]] = {1: [], BATCH: []}
        self.prefill: list[float] = []

    def measure(self, repeat: int, context: int) -> None:
        """Take all figures once. The first time warms up."""
        for batch, found in self.steps.items():
            taken = self.driver.decode(
                several(self.prompts, context, repeat, batch), PrefillConfig(), STEPS
            ).seconds
            found += [1e3 * statistics.median(taken)] if repeat else []
        first = self.driver.first_token(self.prompts(PREFILL, repeat), PrefillConfig())
        self.driver.forget()
        self.prefill += [1e3 * first.ttft] if repeat else []


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--context", type=positive, default=1000)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--most-gb", type=float, default=float("inf"))
    parser.add_argument("--most-ms", type=float, default=2.6)
    parser.add_argument("--most-batch", type=float, default=0.9)
    parser.add_argument("--most-prefill", type=float, default=1.1)
    args = parser.parse_args()
    need_cuda(parser)
    names = [args.quantization] if args.alone else [args.quantization, "none"]
    sides = {name: Side(args.shape, name, PREFILL + 1024) for name in names}
    for repeat in range(args.repeats + 1):
        tell(f"repeat {repeat} of {args.repeats}")
        for side in sides.values():
            side.measure(repeat, args.context)
    for name, side in sides.items():
        steps = ", ".join(f"batch {n} {statistics.median(found):.2f} ms" for n, found in side.steps.items())
        print(
            f"{args.shape} {name}: {side.weights.bytes / 1e9:.2f} GB in {side.weights.bits:.2f} bits, "
            f"peak of loading {side.peak / 1e9:.2f} GB; step at {args.context:,} tokens: {steps}; "
            f"prefill of {PREFILL:,} {statistics.median(side.prefill):.1f} ms (n = {args.repeats})"
        )
    own, *others = sides.values()
    bounds = [
        ("step of one row, ms", statistics.median(own.steps[1]), args.most_ms),
        ("peak while loading, GB", own.peak / 1e9, args.most_gb),
    ]
    for other in others:
        pairs = zip(own.steps[BATCH], other.steps[BATCH], strict=True)
        bounds.append(
            (f"step of {BATCH} rows, ratio", statistics.median(a / b for a, b in pairs), args.most_batch)
        )
        read = zip(own.prefill, other.prefill, strict=True)
        bounds.append(("prefill, ratio", statistics.median(a / b for a, b in read), args.most_prefill))
    for what, value, most in bounds:
        print(f"{what}: {value:.3f} (bound {most:g}) {'ok' if value <= most else 'MISSED'}")
    return int(any(value > most for _, value, most in bounds))


if __name__ == "__main__":
    run(main)
