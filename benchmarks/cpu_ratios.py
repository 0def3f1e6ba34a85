"""Ratios of CPU times, Skim against transformers on the same weights, in one process.

    python benchmarks/cpu_ratios.py [--tokens 7000] [--repeats 5]

Absolute times vary between machines and over minutes. The two sides take turns, so that their ratio does
not. Each turn runs in a short-lived thread: OpenMP keeps a worker pool for every thread that has computed,
and one side's pool would slow the other. Exits with 1 if a ratio misses its target.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from skim import SamplingParams
from skim.bench.turns import alone
from skim.config import EngineConfig
from skim.engine.engine import Engine
from skim.engine.sequence import Finished
from skim.models.load import LoadedModel, load
from skim.models.source import prepare
from skim.prefill.request import Request

DECODE_STEPS = 24
SHORT = 32


@dataclass(frozen=True)
class Timing:
    """Medians of one turn, in seconds."""

    prefill: float
    step: float


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def run_transformers(module: Any, prompt: torch.Tensor) -> Timing:
    """One pass over the prompt with SDPA, then decode steps on a `DynamicCache`."""
    cache = DynamicCache(config=module.config)
    prefill = timed(lambda: module(prompt, past_key_values=cache, logits_to_keep=1))
    steps = [
        timed(lambda: module(prompt[:, :1], past_key_values=cache, logits_to_keep=1))
        for _ in range(DECODE_STEPS)
    ]
    return Timing(prefill, statistics.median(steps))


def run_skim(model: LoadedModel, config: EngineConfig, prompts: list[list[int]]) -> Timing:
    """All prompts at once on an engine with its own thread, as users run it."""
    engine = Engine(model, config)
    engine.start()
    params = SamplingParams(temperature=0, max_tokens=DECODE_STEPS + 1, ignore_eos=True)
    handles = [engine.submit(Request(tuple(prompt), params, config.prefill)) for prompt in prompts]
    stamps: list[float] = []
    prefill = 0.0
    for handle in handles:
        for event in handle:
            if handle is handles[0]:
                stamps.append(time.perf_counter())
            if isinstance(event, Finished):
                prefill = max(prefill, event.metrics.ttft_ms / 1e3)
    engine.close()
    gaps = [b - a for a, b in itertools.pairwise(stamps[:-1])]  # the last stamp is the end event's
    return Timing(prefill, statistics.median(gaps))


def report(name: str, pairs: list[tuple[float, float]], target: float, at_most: bool) -> bool:
    ratios = sorted(a / b for a, b in pairs)
    middle = statistics.median(ratios)
    met = middle <= target if at_most else middle >= target
    a, b = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    print(
        f"{name:52} {a:9.1f} {b:9.1f} {middle:7.2f}  ({ratios[0]:.2f}-{ratios[-1]:.2f})  "
        f"{'<=' if at_most else '>='} {target:<5}{'ok' if met else 'MISSED'}"
    )
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7000, help="prompt length")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    args = parser.parse_args()

    settings = {"max_num_batched_tokens": args.max_num_batched_tokens} if args.max_num_batched_tokens else {}
    config = EngineConfig.of(model=args.model, device="cpu", **settings)
    path = prepare(args.model)
    model = load(path, config.model)
    reference = alone(
        lambda: AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    )
    torch.manual_seed(0)
    prompt = torch.randint(100, model.vocab_size, (1, args.tokens))
    ids = prompt[0].tolist()
    run_skim(model, config, [ids[:SHORT]])

    prefill, decode, batch = [], [], []
    for _ in range(args.repeats):
        theirs = alone(lambda: run_transformers(reference, prompt))
        ours = run_skim(model, config, [ids])
        prefill.append((ours.prefill, theirs.prefill))
        decode.append((ours.step, theirs.step))
        one = run_skim(model, config, [ids[:SHORT]])
        eight = run_skim(model, config, [ids[i : i + SHORT] for i in range(8)])
        batch.append((8 * one.step, eight.step))

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, n={args.repeats}, medians")
    print(f"{'':52} {'a (ms)':>9} {'b (ms)':>9} {'a / b':>7}")
    met = [
        report(f"prefill of {args.tokens}: Skim / transformers SDPA, one pass", prefill, 1.15, at_most=True),
        report(f"decode step at {args.tokens}: Skim / transformers DynamicCache", decode, 0.5, at_most=True),
        report("8 rows: 8 x step of one row / step of eight", batch, 3.0, at_most=False),
    ]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
