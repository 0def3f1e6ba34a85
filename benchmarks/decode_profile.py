"""Profile a decode step on the CPU, and compare it with the time to read the same bytes.

python benchmarks/decode_profile.py [--tokens 7000] [--steps 20] [--torch] [--eager]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from skim import SamplingParams
from skim.attention import pieces
from skim.attention.cpu import native_kernel
from skim.attention.cpu.torch_backend import TorchBackend
from skim.config import EngineConfig
from skim.engine.engine import Engine
from skim.models.forwards import few_tokens
from skim.models.forwards.lean import Lean
from skim.models.load import load
from skim.models.source import prepare
from skim.prefill.request import Request


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7000, help="context length")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch", action="store_true", help="use torch's attention, not the native kernel")
    parser.add_argument("--eager", action="store_true", help="use transformers' forward in all layers")
    args = parser.parse_args()

    config = EngineConfig.of(model=args.model, device="cpu", enforce_eager=args.eager)
    model = load(prepare(args.model), config.model)
    chosen = TorchBackend() if args.torch else None
    engine = Engine(model, config, chosen)  # not started: steps are called from here, and nothing else runs
    prompt = torch.randint(100, model.vocab_size, (args.tokens,)).tolist()
    params = SamplingParams(temperature=0, max_tokens=args.steps + 2, ignore_eos=True)
    engine.submit(Request(tuple(prompt), params, config.prefill))
    while engine.stats().tokens_generated < 2:
        engine.step()

    spent: defaultdict[str, float] = defaultdict(float)

    def watch(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name)

        def timed(*positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = inner(*positional, **named)
            spent[label] += time.perf_counter() - start
            return result

        setattr(owner, name, timed)

    watch(torch.nn.Linear, "forward", "products with weights")
    watch(few_tokens.NativeOps, "product", "products with weights")
    watch(native_kernel.Kernel, "decode", "attention kernel")
    watch(pieces, "attend_flash", "attention kernel")
    watch(type(engine.core.runner.backend), "attend", "attention in total")
    samples: defaultdict[str, list[float]] = defaultdict(list)
    weights = [parameter.data for parameter in model.module.parameters()]
    pool = engine.core.memory.pool
    slots = pool.runs(range(pool.allocated), 0, args.tokens)
    stored = [tensor for layer in range(len(pool.layers)) for tensor in pool.gather(layer, slots)]
    for _ in range(args.steps):
        spent.clear()
        start = time.perf_counter()
        engine.step()
        samples["whole step"].append(time.perf_counter() - start)
        for label, seconds in spent.items():
            samples[label].append(seconds)
        for label, tensors in (("reading the weights", weights), ("reading keys and values", stored)):
            start = time.perf_counter()
            for tensor in tensors:
                tensor.sum()
            samples[label].append(time.perf_counter() - start)

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.steps} steps, medians")
    lean = sum(isinstance(vars(part).get("forward"), Lean) for part in model.module.modules())
    print(
        f"attention by {type(engine.core.runner.backend).__name__}, {lean} of {len(model.layers)} layers lean"
    )
    for label, seconds in samples.items():
        print(f"{label:26} {statistics.median(seconds) * 1e3:7.1f} ms")
    for label, tensors in (("weights", weights), ("keys and values", stored)):
        print(f"{label:26} {sum(t.numel() * t.element_size() for t in tensors) / 1e6:7.0f} MB")


if __name__ == "__main__":
    main()
