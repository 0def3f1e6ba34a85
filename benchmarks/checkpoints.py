"""Time to first token of a long prompt: computed, and restored from a checkpoint in the page cache.

    PYTHONPATH=src python benchmarks/checkpoints.py [--shape qwen3-8b] [--context 131072] [--repeats 3]
        [--kv-cache-dtype FORMAT] [--dir DIR] [--least-ratio 10] [--most-seconds 2.5]

Without a shape it has the default model. Prefill and restores run on the same engine. A restored prompt must
be continued as the same prompt in the pool: both compute one more token alone. Exits with 1 if the restore
misses a limit: at least 10 times as fast as prefill on a CPU, at most 2.5 s on a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from script import parser_of, positive, run, tell

from skim.bench.inputs import random_prompts
from skim.config import DEFAULT_MODEL, EngineConfig
from skim.engine.engine import Engine
from skim.engine.sequence import Delta, Finished, RequestMetrics
from skim.errors import EngineError
from skim.models.load import load
from skim.models.shapes import build_shape
from skim.models.source import prepare
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

REPLY = 8  # tokens


def reply(engine: Engine, prompt: tuple[int, ...]) -> tuple[float, list[int], RequestMetrics]:
    """Seconds to the first token, the tokens, and the request's metrics."""
    params = SamplingParams(temperature=0, max_tokens=REPLY, ignore_eos=True)
    begun = time.perf_counter()
    first, tokens = 0.0, []
    for event in engine.submit(Request(prompt, params, engine.config.prefill)):
        if isinstance(event, Delta):
            first = first or time.perf_counter() - begun
            tokens += event.token_ids
        elif isinstance(event, Finished):
            return first, tokens, event.metrics
    raise EngineError("the reply has no end")


def measure(engine: Engine, context: int, repeats: int) -> tuple[float, list[float], float]:
    """Seconds of prefill and of each restore, and the checkpoint's bytes."""
    vocabulary = engine.model.vocab_size
    reply(engine, random_prompts(vocabulary, 1)(min(context, 64), 0).tokens)  # the first request is slower
    prompt = random_prompts(vocabulary, 0)(context, 0).tokens
    cold, _, _ = reply(engine, prompt)
    tell(f"prefill: {cold:.3f} s")
    asked = (*prompt, prompt[0])  # the prompt and one token more, the only one to compute after either
    _, expected, _ = reply(engine, asked)  # the prompt is in the pool
    saved = engine.save_checkpoint(
        "benchmark", prompt, Request(prompt, SamplingParams(), engine.config.prefill).namespace
    )
    restored = []
    for _ in range(repeats):
        engine.reset_prefix_cache()
        seconds, tokens, metrics = reply(engine, asked)
        if tokens != expected:
            raise EngineError(f"the restored prompt was continued with {tokens}, the cached one {expected}")
        if metrics.restored_tokens < context:
            raise EngineError(f"{metrics.restored_tokens} of {context} tokens were restored")
        tell(f"restore: {seconds:.3f} s")
        restored.append(seconds)
    return cold, restored, saved.bytes


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape")
    parser.add_argument("--context", type=positive, default=7000)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--kv-cache-dtype", metavar="FORMAT")
    parser.add_argument("--dir", help="parent of the checkpoint directory (default: the system's)")
    parser.add_argument("--least-ratio", type=float, default=10.0)
    parser.add_argument("--most-seconds", type=float, default=2.5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        settings: dict[str, Any] = {"checkpoint_dir": directory, "checkpoint_size": "64G"}
        if args.kv_cache_dtype is not None:
            settings["kv_cache_dtype"] = args.kv_cache_dtype
        if args.shape is not None:
            settings["max_model_len"] = args.context + 64
        config = EngineConfig.of(**settings)
        tell(f"starting {args.shape or DEFAULT_MODEL}")
        if args.shape is not None:
            model = build_shape(args.shape, config.model)
        else:
            model = load(prepare(DEFAULT_MODEL), config.model)
        engine = Engine(model, config)
        engine.start()
        try:
            cold, restored, size = measure(engine, args.context, args.repeats)
        finally:
            engine.close()
        files = len(list(Path(directory).glob("*/*.safetensors")))
    middle = statistics.median(restored)
    on_gpu = model.device.type == "cuda"
    met = middle <= args.most_seconds if on_gpu else cold / middle >= args.least_ratio
    wanted = f"<= {args.most_seconds:g} s" if on_gpu else f">= {args.least_ratio:g}x"
    print(
        f"{model.name}, {model.device}, {args.kv_cache_dtype or 'auto'}: {args.context:,} tokens, "
        f"{size / 1e9:.2f} GB in {files} files; prefill {cold:.3f} s, restored in {middle:.3f} s "
        f"({min(restored):.3f}-{max(restored):.3f}, n = {len(restored)}), {cold / middle:.1f}x, "
        f"{size / middle / 1e9:.2f} GB/s; {wanted} {'ok' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    run(main)
