"""Decode steps under slow-fast decode against dense ones, at long contexts, with the bounds of both.

    PYTHONPATH=src python benchmarks/slow_fast_steps.py [--shapes qwen3-8b qwen3-4b qwen3-0.6b]

One engine per shape runs all modes over the same contexts, whose keys and values are random numbers. A step
is the mean over all steps, slow ones included, or over the tokens of exact mode. Random weights and keys say
nothing about text, so four things are set or simulated here:

- `refresh_mass` is 0. Attention over random keys is flat: no selection holds much of it, and the default
  would make every ninth step or so slow.
- `refresh_margin` is 0 in the mode *slow-fast*: a model with random weights is never sure of a token. In the
  mode *sure*, a fast step's token is unsure with a chance of `--unsure`, whatever its margin.
- No token ends a sentence. Slow steps follow the interval alone; their number is printed.
- A draft of exact mode is accepted with a chance of `--accept`.

Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from script import parser_of, positive, run, start, tell

from skim.bench.drive import Driver
from skim.bench.inputs import random_prompts, several
from skim.config import DecodeConfig, PrefillConfig
from skim.engine import drafting
from skim.engine.drafts import Drafts
from skim.sampling.logprobs import Sampled

BUDGET = 2048
WARM_UP = 72  # steps: more than one interval, so that all graphs are captured
ROOM = 1024  # tokens after the context
MODES = {
    "dense": DecodeConfig(slow_fast="off"),
    "slow-fast": DecodeConfig(slow_fast="on", decode_budget=BUDGET, refresh_mass=0.0, refresh_margin=0.0),
    "sure": DecodeConfig(slow_fast="on", decode_budget=BUDGET, refresh_mass=0.0),
    "exact": DecodeConfig(slow_fast="exact", decode_budget=BUDGET, slow_fast_min_context=BUDGET + 1),
}


class Line(NamedTuple):
    """One measurement."""

    shape: str
    batch: int
    context: int
    mode: str

    def __str__(self) -> str:
        return f"{self.shape}, {self.batch} x {self.context:,}, {self.mode}"


class Bound(NamedTuple):
    """A line's step may take so many times as long as another's, or so many milliseconds."""

    line: Line
    most: float
    against: Line | None = None


LONG, SHORT = 131_072, 4096
CONTEXTS = {
    "qwen3-8b": {(4, LONG): ("dense", "slow-fast", "sure", "exact"), (1, LONG): ("dense", "slow-fast"),
                 (4, SHORT): ("dense", "slow-fast")},
    "qwen3-4b": {(4, LONG): ("dense", "slow-fast")},
    "qwen3-0.6b": {(64, 8192): ("dense", "slow-fast")},
}  # fmt: skip
"""The modes of each shape, by batch and context."""


def bounds() -> Iterator[Bound]:
    for shape, batch, context, mode, faster in (
        ("qwen3-8b", 4, LONG, "slow-fast", 3.8),
        ("qwen3-4b", 4, LONG, "slow-fast", 5.0),
        ("qwen3-8b", 1, LONG, "slow-fast", 1.6),
        ("qwen3-0.6b", 64, 8192, "slow-fast", 1.0),
        ("qwen3-8b", 4, LONG, "exact", 2.5),
    ):
        line = Line(shape, batch, context, mode)
        yield Bound(line, 1 / faster, line._replace(mode="dense"))
    large = Line("qwen3-8b", 4, LONG, "slow-fast")
    yield Bound(large, 6.0)
    yield Bound(large, 1.35, large._replace(context=SHORT))


def simulated(chance: float) -> Callable[[Sequence[int], Sequence[int]], int]:
    """Stands in for `count_accepted`: a draft is accepted by chance, whatever was drawn."""
    rng = random.Random(0)

    def count(drafts: Sequence[int], drawn: Sequence[int]) -> int:
        return next((n for n in range(len(drafts)) if rng.random() >= chance), len(drafts))

    return count


def sure_by_chance(unsure: float) -> Callable[[Drafts, int, Sampled], bool]:
    """Stands in for `Drafts.settles`: the first draft that is left is unsure by chance. Not in exact mode."""
    rng = random.Random(0)

    def settles(drafts: Drafts, slot: int, result: Sampled) -> bool:
        return drafts.settling and slot == drafts.base + 1 and rng.random() >= unsure

    return settles


def measure(driver: Driver, shape: str, steps: int, repeats: int) -> dict[Line, float]:
    """The middle of the mean steps, in milliseconds. Prints a line for each."""
    found: dict[Line, float] = {}
    random_ids = random_prompts(driver.model.vocab_size, 0)
    for (batch, context), modes in CONTEXTS[shape].items():
        prompts = several(random_ids, context, 0, batch)
        driver.fill(prompts)
        try:
            for mode in modes:
                line = Line(shape, batch, context, mode)
                driver.decode(prompts, PrefillConfig(), WARM_UP, MODES[mode], filled=True)
                before = driver.engine.core.slow_fast.stats.copy()
                taken = [
                    driver.decode(prompts, PrefillConfig(), steps, MODES[mode], filled=True)
                    for _ in range(repeats)
                ]
                means = [1e3 * statistics.fmean(one.seconds) for one in taken]
                found[line] = statistics.median(means)
                now = driver.engine.core.slow_fast.stats
                slow, fast = now.slow - before.slow, now.fast - before.fast
                told = f"{slow:,} slow and {fast:,} fast rows" if slow + fast else "all rows read everything"
                if mode == "sure":
                    told += f", {now.refreshes['margin'] - before.refreshes['margin']:,} unsure (simulated)"
                if mode == "exact":
                    drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
                    told += f", {accepted:,} of {drafted:,} drafts taken (simulated)"
                print(
                    f"{line!s:42} {found[line]:7.2f} ms ({min(means):.2f}-{max(means):.2f})  {told}",
                    flush=True,
                )
        finally:
            driver.forget()
    return found


def judge(found: dict[Line, float]) -> bool:
    """Print the bounds of the lines that were measured; False if one is missed."""
    met = True
    for line, most, against in bounds():
        if line not in found:
            continue
        if against is None:
            value, told = found[line], f"{found[line]:.2f} ms, bound {most:.2f} ms"
        else:
            value = found[line] / found[against]
            told = f"{value:.3f} times ({1 / value:.2f} times as fast), bound {most:.3f}: {against}"
        met = met and value <= most
        print(f"{'met   ' if value <= most else 'MISSED'} {line}: {told}", flush=True)
    return met


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(CONTEXTS), default=list(CONTEXTS))
    parser.add_argument("--steps", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--accept", type=float, default=0.95, help="chance that a draft is accepted")
    parser.add_argument("--unsure", type=float, default=0.15, help="chance that a fast step is unsure")
    args = parser.parse_args()
    Drafts.settles = sure_by_chance(args.unsure)  # type: ignore[method-assign]
    drafting.count_accepted = simulated(args.accept)  # type: ignore[assignment]
    begun = time.perf_counter()
    print(
        f"n = {args.repeats}, {args.steps} steps each, budget {BUDGET:,}, refresh_mass 0 (flat attention of "
        f"random keys), no sentence ends, a fast step is unsure with a chance of {args.unsure} in the mode "
        f"sure, drafts are accepted with a chance of {args.accept}"
    )
    found: dict[Line, float] = {}
    for shape in args.shapes:
        batch = max(batch for batch, _ in CONTEXTS[shape])
        longest = max(context for _, context in CONTEXTS[shape])
        settings = {"slow_fast": "on", "decode_budget": BUDGET, "refresh_mass": 0.0}
        driver = start(shape, max_model_len=longest + ROOM, max_num_seqs=batch, **settings)
        found |= measure(driver, shape, args.steps, args.repeats)
        tell(f"{time.perf_counter() - begun:.0f} s")
        del driver
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return int(not judge(found))


if __name__ == "__main__":
    run(main)
