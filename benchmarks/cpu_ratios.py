"""CPU ratios against transformers on the same weights, in one process.

    python benchmarks/cpu_ratios.py [--tokens 7000] [--repeats 3]

Absolute times vary from machine to machine and run to run; both sides are measured in turn, so that
their ratio does not. Exits with 1 if a ratio misses its target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from skim import LLM, SamplingParams

DECODE_TOKENS = 24
T = TypeVar("T")


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def alone(work: Callable[[], T]) -> T:
    """Run in a thread that ends with the work: OpenMP workers it leaves behind would slow the other side."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7000, help="prompt length")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    args = parser.parse_args()

    settings = {"enable_prefix_caching": False}
    if args.max_num_batched_tokens:
        settings["max_num_batched_tokens"] = args.max_num_batched_tokens
    llm = LLM(args.model, device="cpu", **settings)
    reference = alone(
        lambda: AutoModelForCausalLM.from_pretrained(
            llm.model_path, attn_implementation="sdpa", dtype=torch.float32
        )
    )
    torch.manual_seed(0)
    prompt = torch.randint(100, llm.engine.model.vocab_size, (1, args.tokens))
    cache = DynamicCache(config=reference.config)

    @torch.inference_mode()
    def transformers_prefill() -> None:
        nonlocal cache
        cache = DynamicCache(config=reference.config)
        reference(prompt, past_key_values=cache, logits_to_keep=1)

    @torch.inference_mode()
    def transformers_step() -> None:
        reference(prompt[:, :1], past_key_values=cache, logits_to_keep=1)

    def skim(tokens: int, rows: int = 1, length: int = args.tokens) -> tuple[float, float]:
        """(seconds to the first token, seconds a decode step) with `rows` requests at once."""
        prompts = [prompt[0, i : i + length].tolist() for i in range(rows)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        metrics = [output.metrics for output in llm.generate(prompts, params, use_tqdm=False)]
        first = max(m.ttft_ms for m in metrics) / 1e3
        return first, max(m.decode_ms for m in metrics) / 1e3 / max(tokens - 1, 1)

    skim(2, length=64)
    prefill: list[tuple[float, float]] = []
    decode: list[tuple[float, float]] = []
    batch: list[tuple[float, float]] = []
    for _ in range(args.repeats):
        theirs = alone(lambda: timed(transformers_prefill))
        their_step = alone(lambda: statistics.median(timed(transformers_step) for _ in range(DECODE_TOKENS)))
        ours, our_step = skim(DECODE_TOKENS)
        prefill.append((ours, theirs))
        decode.append((our_step, their_step))
        one = skim(DECODE_TOKENS, length=32)[1]
        eight = skim(DECODE_TOKENS, rows=8, length=32)[1]
        batch.append((8 * one, eight))  # tokens/s of eight rows over that of one

    def row(name: str, pairs: list[tuple[float, float]], target: float, at_most: bool) -> bool:
        ratios = sorted(a / b for a, b in pairs)
        middle = statistics.median(ratios)
        met = middle <= target if at_most else middle >= target
        sign = "<=" if at_most else ">="
        a, b = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        print(
            f"{name:46} {a:10.1f} {b:10.1f} {middle:7.2f}  ({ratios[0]:.2f}-{ratios[-1]:.2f})  "
            f"{sign} {target:<5} {'ok' if met else 'MISSED'}"
        )
        return met

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, n={args.repeats}, medians")
    print(f"{'':46} {'a (ms)':>10} {'b (ms)':>10} {'a / b':>7}")
    results = [
        row(f"prefill {args.tokens}: Skim / transformers SDPA one-pass", prefill, 1.15, at_most=True),
        row(f"decode step at {args.tokens}: Skim / DynamicCache", decode, 0.5, at_most=True),
        row("8 rows: tokens/s of eight / of one", batch, 3.0, at_most=False),
    ]
    llm.close()
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
