"""A quantized drafter: agreement of its ranking with that of full precision, and the memory it saves.

Held-out questions are asked about facts in a novel, in prompts of about 4,000 tokens. The scorer `attention`
ranks their blocks with the drafter in full precision and in other formats, without words to help. `agreement`
is the share of the best tenth of blocks that both have, mean over prompts, and `worst` that of the worst one.
Bytes are those of all weights, in relation to the same model in float32 and in 16 bits.

    python benchmarks/drafter_agreement.py [--prompts 24] [--formats int8 int4] [--scorer attention]

Exits with 1 if int8 agrees on less than 95%, or takes more than 0.6 times the bytes of the device's dtype.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import torch
from script import parser_of, positive, run, tell

from skim.calibrate.trials import Prompt, Prompts, judged_orders
from skim.config import DEFAULT_MODEL, EngineConfig
from skim.measure.book import packaged_text
from skim.models.load import LoadedModel, load
from skim.models.source import prepare
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.scorer import Scorer, ScoringTask, run_to_completion

TOP = 0.1
LEAST_AGREEMENT, MOST_BYTES = 0.95, 0.6  # of int8
BLOCK = EngineConfig().prefill.prefill_block_size


def scores_of(scorer: Scorer, prompt: Prompt) -> np.ndarray:
    """The scores of the prompt's blocks."""
    task = ScoringTask(tuple(prompt.tokens.tolist()), (prompt.question,), BLOCK).with_ids(prompt.tokens)
    scores = np.array(run_to_completion(scorer.score(task)))
    if not np.isfinite(scores).all():
        raise SystemExit("the scorer gave scores that are not finite")
    return scores


def agreement(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The share of the best tenth of blocks that both rankings have."""
    count = max(1, round(TOP * len(ours)))
    best = [set(np.argsort(-scores, kind="stable")[:count].tolist()) for scores in (ours, theirs)]
    return len(best[0] & best[1]) / count


def plain_bytes(model: LoadedModel, dtype: torch.dtype) -> int:
    """Bytes of a model in full precision if its floats had the dtype. Tied weights count once."""
    tensors = {one.data_ptr(): one for one in (*model.module.parameters(), *model.module.buffers())}
    return sum(
        one.numel() * (dtype.itemsize if one.is_floating_point() else one.itemsize)
        for one in tensors.values()
    )


@torch.inference_mode()
def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=positive, default=24)
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"], choices=["int8", "int4", "fp8"])
    parser.add_argument("--scorer", default="attention")
    parser.add_argument("--drafter", default=DEFAULT_MODEL)
    parser.add_argument("--drafter-dtype", help="default: the device's")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    path = prepare(options.drafter)

    def drafter(how: str) -> LoadedModel:
        tell(f"loading {options.drafter}, {how}")
        settings = EngineConfig.of(
            device=options.device, drafter_dtype=options.drafter_dtype, drafter_quantization=how
        )
        return load(path, settings.drafter_model(options.drafter))

    full = drafter("none")
    draw = Prompts(full.tokenizer, packaged_text(), seed=0)
    prompts = [draw.draw(order) for order in judged_orders(agents=False, trials=options.prompts)]

    def ranked(how: str, other: LoadedModel) -> list[np.ndarray]:
        scorer, found = make_scorers(full, other)(options.scorer), []
        for number, prompt in enumerate(prompts, 1):
            tell(f"{how}: prompt {number} of {len(prompts)}")
            found.append(scores_of(scorer, prompt))
        return found

    expected = ranked("none", full)
    tokens = statistics.mean(len(prompt.tokens) for prompt in prompts)
    print(
        f"{len(prompts)} prompts of {tokens:.0f} tokens, scorer {options.scorer}, {full.dtype}, {full.device}"
    )
    print(f"| format | agreement | worst | bytes / float32 | bytes / 16 bits |\n|{'---|' * 5}")
    met = True
    for how in options.formats:
        other = drafter(how)
        found = [agreement(*both) for both in zip(ranked(how, other), expected, strict=True)]
        size = other.weights.bytes
        ratios = [size / plain_bytes(full, dtype) for dtype in (torch.float32, torch.bfloat16)]
        mean = statistics.mean(found)
        print(f"| {how} | {mean:.1%} | {min(found):.1%} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)
        if how == "int8":
            met &= passed(mean, size / full.weights.bytes)
    return 0 if met else 1


def passed(mean: float, ratio: float) -> bool:
    """Print the two requirements, and whether int8 meets them."""
    checks: Sequence[tuple[str, bool]] = [
        (f"int8 agrees on {mean:.1%}; >= {LEAST_AGREEMENT:.0%}", mean >= LEAST_AGREEMENT),
        (f"int8 takes {ratio:.2f} of the dtype's bytes; <= {MOST_BYTES:g}", ratio <= MOST_BYTES),
    ]
    for text, is_met in checks:
        print(f"{text} {'ok' if is_met else 'MISSED'}")
    return all(is_met for _, is_met in checks)


if __name__ == "__main__":
    run(main)
