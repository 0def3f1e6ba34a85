"""Decode steps at long contexts under several settings, one after the other in one process.

Each setting has the whole card for its pool, which `skim bench decode` divides among its modes. The first is
the reference. Prints a line for each; exits with 1 if one misses its bound, `RATIO` times the reference.

    PYTHONPATH=src python benchmarks/long_decode.py [--shape qwen3-8b] [--batch 4] [--context 131072]
        [--settings auto int8<=0.65 int4<=0.5]

`slow_fast_steps.py` does the same for slow-fast decode.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch
from script import parser_of, positive, run, tell

from skim.bench.drive import Driver
from skim.bench.inputs import random_prompts, several
from skim.config import EngineConfig, PrefillConfig
from skim.engine.start import settle_heap
from skim.memory.formats import FORMATS
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape

SETTINGS = ["auto", "int8<=0.65", "int4<=0.5", "k8v4", "fp8"]


def settings_of(text: str) -> dict[str, Any]:
    """Engine settings of `int8` or `NAME=VALUE,...`; numbers are whole."""
    if text in FORMATS:
        return {"kv_cache_dtype": text}
    pairs = (one.partition("=") for one in text.split(","))
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


def step_of(
    model: LoadedModel, options: dict[str, Any], context: int, batch: int, steps: int, repeats: int
) -> list[float]:
    """The mean step of each repeat, in milliseconds."""
    driver = Driver(model, EngineConfig.of(max_model_len=context + 1024, max_num_seqs=batch, **options))
    settle_heap()
    prompts = random_prompts(model.vocab_size, 0)
    found = []
    for repeat in range(repeats + 1):
        taken = driver.decode(several(prompts, context, repeat, batch), PrefillConfig(), steps)
        if repeat:  # the first captures graphs
            found.append(1e3 * statistics.fmean(taken.seconds))
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--context", type=positive, default=131_072)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--steps", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    args = parser.parse_args()
    model = build_shape(args.shape, EngineConfig.of(max_model_len=args.context + 1024).model)
    reference, missed = None, False
    print(f"{model.name}, {model.device}, {args.batch} x {args.context:,} tokens, n = {args.repeats}")
    for text in args.settings:
        tell(text)
        name, _, bound = text.partition("<=") if "<=" in text else (text, "", "")
        found = step_of(model, settings_of(name), args.context, args.batch, args.steps, args.repeats)
        middle = statistics.median(found)
        reference = reference or middle
        ratio = middle / reference
        met = not bound or ratio <= float(bound)
        missed = missed or not met
        told = f" (bound {bound}{'' if met else ': MISSED'})" if bound else ""
        print(
            f"{name:36} {middle:7.2f} ms ({min(found):.2f}-{max(found):.2f})  {ratio:.3f}x{told}", flush=True
        )
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return int(missed)


if __name__ == "__main__":
    run(main)
