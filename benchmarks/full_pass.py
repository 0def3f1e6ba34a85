"""Time of a drafter's full pass over a prompt, dense and with block-sparse attention.

    PYTHONPATH=src python benchmarks/full_pass.py [--shape qwen3-0.6b] [--contexts 32768 131072]
        [--alphas 0.95 0.97] [--repeats 3]

Weights are random, so attention is nearly uniform: on real text far lower thresholds skip blocks.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from script import parser_of, positive, run

from skim.attention.blocksparse.counter import BlockCounter
from skim.attention.blocksparse.policy import Policy
from skim.bench.inputs import random_prompts
from skim.bench.turns import alone
from skim.config import EngineConfig
from skim.models.forwards.compiled import compile_layers
from skim.models.load import LoadedModel
from skim.models.shapes import build_shape
from skim.prefill.scoring.calibration import default_calibration
from skim.prefill.scoring.full_pass import read_prompt
from skim.prefill.scoring.scorer import run_to_completion

ASKING = 64


def run_pass(model: LoadedModel, context: int, policy: Policy | None, seed: int) -> tuple[float, float]:
    """Return the seconds, and the share of key blocks that were read."""
    tokens = random_prompts(model.vocab_size, seed)(context, 0).tokens
    captures = default_calibration(int(model.module.config.num_hidden_layers)).captures()
    counter = BlockCounter()
    finite: list[torch.Tensor] = []

    def take(layer: int, attention: torch.Tensor) -> None:
        finite.append(torch.isfinite(attention).all())

    begun = time.perf_counter()
    ids = np.array(tokens)
    run_to_completion(
        read_prompt(model.module, model.layers, ids, ASKING, captures, take, policy=policy, counter=counter)
    )
    if not bool(torch.stack(finite).all()):  # waits for the device
        raise SystemExit("the question's attention is not finite")
    stats = counter.stats()
    return time.perf_counter() - begun, stats.read / stats.visible if stats.visible else 1.0


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--contexts", type=positive, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.95, 0.97])
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    try:
        policies = [None, *(Policy(alpha) for alpha in args.alphas)]
    except ValueError as error:
        parser.error(f"--alphas: {error}")

    model = build_shape(args.shape, EngineConfig.of(max_model_len=max(args.contexts) + 1024).model)
    if model.device.type == "cuda":
        compile_layers(model.module)
    print(f"{model.name}, {model.device}, a question of {ASKING} tokens, n = {args.repeats}")
    for context in args.contexts:
        for policy in policies:
            found = [
                alone(
                    lambda policy=policy, seed=seed, context=context: run_pass(model, context, policy, seed)
                )
                for seed in range(args.repeats + 1)
            ][1:]
            seconds = sorted(one for one, _ in found)
            print(
                f"{context:9,} tokens, {'dense' if policy is None else f'alpha {policy.alpha:g}':10}: "
                f"{statistics.median(seconds):.3f} s ({seconds[0]:.3f}-{seconds[-1]:.3f}), "
                f"{found[0][1]:.1%} of blocks read"
            )


if __name__ == "__main__":
    run(main)
