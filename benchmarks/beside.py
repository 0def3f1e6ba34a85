"""How a long prompt slows down running decode rows, and how they slow it down.

Some rows decode; then a long prompt is submitted and skimmed, with the settings of a server. Prints the
intervals between a row's tokens before the prompt, while it is scored, and while its kept tokens are
prefilled. Also prints the prompt's time to first token, alone and beside the rows. Exits with 1 if the
longest interval or the ratio of the two times misses its bound. The bounds are for an H200.

    PYTHONPATH=src python benchmarks/beside.py [--shape qwen3-8b --drafter qwen3-0.6b]
        [--context 131072] [--mode blend:0.05] [--rows 4] [--repeats 5]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from script import positive, prompt_parser, run, start

from skim.bench.drive import Driver
from skim.bench.inputs import Prompt, random_prompts
from skim.bench.turns import alone
from skim.config import PrefillConfig
from skim.engine.sequence import Delta, Event, Failed, Finished
from skim.measure.modes import parse_mode
from skim.prefill.anatomy import map_text
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

SHORT = 1024
MOST_GAP = 40.0  # ms between two tokens of a row while the prompt is scored and prefilled
MOST_TTFT = 1.3  # the prompt's time to first token beside the rows, as a multiple of that alone
CALM = 60  # tokens of each row before the long prompt is submitted


@dataclass(frozen=True)
class Sample:
    """One long prompt beside decode rows; seconds."""

    ttft: float
    calm: Sequence[float]  # intervals between a row's tokens
    scoring: Sequence[float]
    reading: Sequence[float]


def run_beside(driver: Driver, short: Sequence[Prompt], long: Prompt, prefill: PrefillConfig) -> Sample:
    """Let rows decode, submit the long prompt, and step until it has ended with its second token."""
    engine = driver.engine
    written: list[float] = []  # times of the first row's tokens
    ended: list[Event] = []  # last events of rows that ended

    def note(row: int, event: Event) -> None:
        if isinstance(event, Delta) and row == 0:
            written.extend(time.perf_counter() for _ in event.token_ids)
        if isinstance(event, (Failed, Finished)):
            ended.append(event)

    def step() -> None:
        engine.step()
        if ended:
            raise SystemExit(
                f"a row ended early: {ended[0]}; set a longer --context, which extends the context window"
            )

    endless = SamplingParams(temperature=0, max_tokens=8 * CALM + 2000, ignore_eos=True)
    rows = [
        engine.submit(Request(one.tokens, endless, PrefillConfig()), partial(note, row))
        for row, one in enumerate(short)
    ]
    while rows and len(written) < CALM:
        step()
    events: list[tuple[float, Event]] = []
    submitted = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.submit(
        Request(long.tokens, params, prefill, map_text(long.tokens, long.asking)),
        lambda event: events.append((time.perf_counter(), event)),
    )
    while not (events and isinstance(events[-1][1], Finished)):
        step()
        if events and isinstance(failure := events[-1][1], Failed):
            raise failure.error
    for row in rows:
        engine.core.abort(row.id)
    while engine.step():
        pass
    driver.forget()
    end = events[-1][1]
    assert isinstance(end, Finished)
    if end.metrics.scorer is None:
        raise SystemExit(f"the prompt was not skimmed: {end.metrics.fallback}")
    first = events[0][0]
    scored = first - end.metrics.prefill_ms / 1e3  # when scoring ended
    intervals = [(a, b) for a, b in pairwise(written) if b <= first]
    return Sample(
        first - submitted,
        [b - a for a, b in intervals if b <= submitted][CALM // 2 :],
        [b - a for a, b in intervals if submitted < b <= scored],
        [b - a for a, b in pairwise(written) if b > scored and a < first],
    )


def summary(name: str, samples: Sequence[Sequence[float]]) -> str:
    found = sorted(seconds * 1e3 for one in samples for seconds in one)
    if not found:
        return f"  {name}: no tokens"
    middle = statistics.median(found)
    return f"  {name}: median {middle:.2f} ms, longest {found[-1]:.1f} ms, {len(found)} intervals"


def main() -> int:
    parser = prompt_parser(__doc__)
    parser.add_argument("--rows", type=positive, default=4)
    args = parser.parse_args()

    prefill = parse_mode(args.mode).prefill
    if prefill.sparse_prefill == "off":
        parser.error("--mode must skim, such as blend:0.05")
    driver = start(args.shape, args.drafter, serving=True, max_model_len=args.context + SHORT)
    model = driver.model
    prompts = random_prompts(model.vocab_size, 0)
    samples: dict[int, list[Sample]] = {0: [], args.rows: []}
    for repeat in range(-1, args.repeats):
        for rows, kept in samples.items():
            short = [prompts(SHORT, 1000 * row + repeat + 2) for row in range(rows)]
            long = prompts(args.context, 10 * repeat + 10 + (rows > 0))
            found = alone(lambda short=short, long=long: run_beside(driver, short, long, prefill))
            if repeat >= 0:
                kept.append(found)
    without, beside = (statistics.median(one.ttft for one in kept) * 1e3 for kept in samples.values())
    target = 1e3 * driver.engine.core.target_seconds
    print(f"{model.name}, {model.device}, {args.context:,} tokens, {args.mode}, n = {args.repeats}")
    print(f"step_time_target {target:g} ms")
    print(f"time to first token: {without:.0f} ms alone, {beside:.0f} ms beside {args.rows} decode rows")
    print(f"intervals between tokens of one of {args.rows} rows of {SHORT:,} tokens:")
    print(summary("before the prompt", [one.calm for one in samples[args.rows]]))
    print(summary("while it was scored", [one.scoring for one in samples[args.rows]]))
    print(summary("while it was prefilled", [one.reading for one in samples[args.rows]]))
    gap = max((1e3 * s for one in samples[args.rows] for s in (*one.scoring, *one.reading)), default=0.0)
    ratio = beside / without
    for name, found, most in [("longest interval, ms", gap, MOST_GAP), ("TTFT ratio", ratio, MOST_TTFT)]:
        print(f"{name}: {found:.2f} (bound: {most:g}){'' if found <= most else '  MISSED'}")
    return 0 if gap <= MOST_GAP and ratio <= MOST_TTFT else 1


if __name__ == "__main__":
    run(main)
