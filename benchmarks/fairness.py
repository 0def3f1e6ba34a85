"""A short prompt that arrives while a long one is read, and ten short ones a second beside it.

In one run, with the settings of a server: the time to first token (TTFT) of both alone, of a short prompt
that arrives one second into a long dense prefill, of that long prompt, and of a long prompt while short ones
keep arriving. Prints each figure with its bound; exits with 1 if one is missed. Needs an idle machine.

    python benchmarks/fairness.py [--context 7000] [--short 200] [--repeats 3]
    python benchmarks/fairness.py --shape qwen3-8b --context 131072  # on a GPU
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from script import parser_of, positive, run, start

from skim.bench.drive import Driver
from skim.bench.inputs import Prompt, Prompts, random_prompts
from skim.bench.turns import alone, check_interrupt
from skim.config import PrefillConfig
from skim.engine.engine import RequestHandle
from skim.engine.sequence import Delta, Event, Failed
from skim.errors import SkimError
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

ARRIVES = 1.0  # seconds into the long prefill
A_SECOND = 10  # short prompts, in the last part
MOST_SHORT, MOST_LONG, MOST_LOADED = 3.0, 1.25, 2.0
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclass
class Run:
    """Seconds of one run."""

    long: float = 0.0  # TTFT
    short: list[float] = field(default_factory=list)  # TTFT of each, from the time it was due
    longest_step: float = 0.0


def read(driver: Driver, long: Prompt | None, short: Iterator[tuple[float, Prompt]]) -> Run:
    """Submit the long prompt, and short ones when they are due, until the long one has its first token.

    Without a long prompt, until the first short one has.
    """
    engine, found = driver.engine, Run()
    failures: list[SkimError] = []
    began = time.perf_counter()

    def submit(prompt: Prompt, due: float, is_long: bool) -> RequestHandle:
        def take(event: Event) -> None:
            if isinstance(event, Failed):
                failures.append(event.error)
            elif isinstance(event, Delta) and is_long:
                found.long = time.perf_counter() - due
            elif isinstance(event, Delta):
                found.short.append(time.perf_counter() - due)

        return engine.submit(Request(prompt.tokens, PARAMS, PrefillConfig()), take)

    handles = [submit(long, began, is_long=True)] if long is not None else []
    upcoming = next(short, None)
    while not (found.long if long is not None else found.short):
        check_interrupt()
        before = time.perf_counter()
        while upcoming is not None and began + upcoming[0] <= before:
            handles.append(submit(upcoming[1], began + upcoming[0], is_long=False))
            upcoming = next(short, None)
        engine.step()
        found.longest_step = max(found.longest_step, time.perf_counter() - before)
        if failures:
            raise failures[0]
    for handle in handles:
        handle.abort()
    while engine.step():
        pass
    driver.forget()
    return found


def one_by_one(prompts: Prompts, tokens: int, numbers: Iterator[int]) -> Iterator[tuple[float, Prompt]]:
    """Short prompts, `A_SECOND` of them."""
    for index in itertools.count():
        yield index / A_SECOND, prompts(tokens, next(numbers))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", help="random weights of this shape (default: the default model)")
    parser.add_argument("--context", type=positive, default=7000, help="tokens of the long prompt")
    parser.add_argument("--short", type=positive, default=200, help="tokens of a short prompt")
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()

    driver = start(args.shape, serving=True, max_model_len=args.context + 16)
    prompts = random_prompts(driver.model.vocab_size, 0)
    numbers = itertools.count()

    def short(*due: float) -> Iterator[tuple[float, Prompt]]:
        return iter([(at, prompts(args.short, next(numbers))) for at in due])

    def long() -> Prompt:
        return prompts(args.context, next(numbers))

    runs: dict[str, list[Run]] = {"short alone": [], "long alone": [], "both": [], "loaded": []}
    for repeat in range(-1, args.repeats):  # the first repeat warms up
        for kind, kept in runs.items():
            if kind == "loaded":
                due = one_by_one(prompts, args.short, numbers)
            else:
                due = short(0.0) if kind == "short alone" else short(ARRIVES) if kind == "both" else short()
            text = None if kind == "short alone" else long()
            found = alone(lambda text=text, due=due: read(driver, text, due))
            if repeat >= 0:
                kept.append(found)

    short_alone = statistics.median(one.short[0] for one in runs["short alone"])
    long_alone = statistics.median(one.long for one in runs["long alone"])
    step = statistics.median(one.longest_step for one in runs["long alone"])
    if not all(one.short for one in runs["both"]):
        raise SystemExit("the long prompt ended before the short one; set a longer --context")
    beside = statistics.median(one.short[0] for one in runs["both"])
    figures = [
        (
            f"short prompt beside the long one: {1e3 * beside:.0f} ms",
            f"{MOST_SHORT:g} times alone and one step: {1e3 * (MOST_SHORT * short_alone + step):.0f} ms",
            beside <= MOST_SHORT * short_alone + step,
        )
    ]
    for name, kind, most in [
        ("a short one", "both", MOST_LONG),
        (f"{A_SECOND} short ones a second", "loaded", MOST_LOADED),
    ]:
        ratio = statistics.median(one.long for one in runs[kind]) / long_alone
        figures.append((f"long prompt beside {name}: {ratio:.2f} times alone", f"{most:g}", ratio <= most))

    model, target = driver.model, driver.engine.core.target_seconds
    print(f"{model.name}, {model.device}, {args.context:,} and {args.short} tokens, n = {args.repeats}")
    print(f"step_time_target {1e3 * target:g} ms; longest step of the long prompt alone: {1e3 * step:.0f} ms")
    print(f"time to first token alone: short {1e3 * short_alone:.0f} ms, long {1e3 * long_alone:.0f} ms")
    for text, bound, kept in figures:
        print(f"{text} (bound: {bound}){'' if kept else '  MISSED'}")
    return 0 if all(kept for *_, kept in figures) else 1


if __name__ == "__main__":
    run(main)
