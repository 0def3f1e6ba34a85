"""Needles in natural text: is the needle's block kept, is the answer right, and how long is the first token?

    python benchmarks/needles.py [--tokens 7000] [--draws 20] [--modes dense cascade lexical random]

A fact with a random number stands between two sentences of a random piece of Moby-Dick, one for all modes.
Kept: every block the fact touches was read. Right: its number is in the reply. TTFT includes scoring.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from importlib import resources

from skim import LLM, SamplingParams
from skim.config import PrefillConfig
from skim.engine import planning
from skim.prefill.scorers.random import RandomScorer

PLACES = ["Oslo", "Bergen", "Lisbon", "Cairo", "Quito", "Lima", "Hanoi", "Perth", "Turin", "Dakar"]
WORDINGS = {
    "plain": "What is the access code for the {place} office?",
    "reworded": "Which number opens the door at the {place} branch?",
}


def draw(rng: random.Random, text: str, words: int, similar: int) -> tuple[str, str, str]:
    """(document, the needle's place, its number), with `similar` facts about other places."""
    pieces = text.split(" ")
    start = rng.randrange(len(pieces) - words)
    body = pieces[start : start + words]
    places = rng.sample(PLACES, 1 + similar)
    numbers = [str(rng.randint(10_000, 99_999)) for _ in places]
    for place, number in zip(places, numbers, strict=True):
        ends = [i + 1 for i, word in enumerate(body) if word.endswith(".")]
        body.insert(rng.choice(ends), f"The access code for the {place} office is {number}.")
    return " ".join(body), places[0], numbers[0]


def interval(hits: int, count: int) -> str:
    """A share in percent with its 95% interval (Wilson)."""
    share, z = hits / count, 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return f"{share:4.0%} ({max(0, middle - half):.0%}-{min(1, middle + half):.0%})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=7000, help="about how long prompts are")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--modes", nargs="+", default=["dense", "cascade", "lexical", "random"])
    parser.add_argument("--wording", choices=sorted(WORDINGS), default="plain")
    parser.add_argument("--similar", type=int, default=0, help="facts of the same kind about other places")
    parser.add_argument("--keep-tokens", type=int, default=None, help="default: a tenth of the prompt")
    args = parser.parse_args()

    text = (resources.files("skim") / "data" / "moby-dick.txt").read_text(encoding="utf-8")
    llm = LLM(args.model, progress=False, kv_memory="2G")
    inner, rescue_cap = llm.engine.core.planner._scorers, planning.RESCUE_CAP
    rng = random.Random(args.tokens)
    draws = [draw(rng, text, int(args.tokens / 1.37), args.similar) for _ in range(args.draws)]
    print(f"{args.tokens} tokens, {args.wording}, {args.similar} similar facts, n={args.draws}")
    print(f"{'mode':10} {'needle kept':>18} {'answer right':>18} {'TTFT median':>12} {'read':>7}")
    for mode in args.modes:
        budget = {"keep_tokens": args.keep_tokens} if args.keep_tokens else {"keep_ratio": 0.1}
        scorer = "lexical" if mode in ("dense", "random") else mode
        prefill = PrefillConfig(
            sparse_prefill="off" if mode == "dense" else "always", scorer=scorer, **budget
        )
        kept = right = 0
        seconds, shares = [], []
        for index, (document, place, number) in enumerate(draws):
            planning.RESCUE_CAP = 0.0 if mode == "random" else rescue_cap
            if mode == "random":
                llm.engine.core.planner._scorers = lambda name, seed=index: RandomScorer(seed)
            parts = [document + "\n", WORDINGS[args.wording].format(place=place)]
            messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
            params = SamplingParams(temperature=0, max_tokens=24)
            [output] = llm.chat(messages, params, prefill=prefill, use_tqdm=False)
            llm.engine.core.planner._scorers = inner
            llm.engine.reset_prefix_cache()
            assert mode == "dense" or output.plan is not None, output.metrics.fallback
            seen = output.prompt_token_ids
            if output.plan is not None:
                seen = tuple(seen[i] for i in output.plan.token_indices())
            kept += f"{place} office is {number}" in llm.tokenizer.decode(seen)
            right += number in output.outputs[0].text
            seconds.append(output.metrics.ttft_ms / 1e3)
            shares.append(output.metrics.kept_tokens / output.metrics.prompt_tokens)
        print(
            f"{mode:10} {interval(kept, args.draws):>18} {interval(right, args.draws):>18} "
            f"{statistics.median(seconds):10.2f} s {statistics.mean(shares):7.1%}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
