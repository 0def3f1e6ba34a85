"""The pace of steps, against simulated machines."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest

from skim.config import SchedulerConfig
from skim.engine.pace import LONE, OUTLIER, Pace, Work, prefill_limit, rounded
from skim.engine.scheduler import Candidate, Limits
from skim.sampling.params import SamplingParams
from tests.fake import continuation, fake_engine, submit

LIMITS = Limits(tokens=8192, sequences=64, block_size=16, aging_steps=8)


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: of its decode rows, per token, and per token and earlier token."""

    decode: float
    token: float
    depth: float
    noise: float = 0.0
    launch: float = 0.0  # least time of a step with prefill: the host launches its kernels one by one

    def seconds(self, work: Work, rng: random.Random) -> float:
        cost = work.tokens * (self.token + self.depth * work.depth)
        least = self.launch if work.tokens else 0.0
        return max(least, self.decode * (work.rows > 0) + cost) * (1 + self.noise * rng.random())


GPU = Machine(5e-3, 27e-6, 0.5e-9)
DEEP_GPU = Machine(8e-3, 27e-6, 1.0e-9, noise=0.1)
CPU = Machine(40e-3, 900e-6, 0.15e-6, noise=0.2)
H200 = Machine(5.4e-3, 20e-6, 0.2e-9, noise=0.05, launch=26e-3)  # 8B weights


def read_prompt(
    machine: Machine, tokens: int, target: float, *, rows: int, most: int, pace: Pace | None = None
) -> list[tuple[int, float]]:
    """(tokens, seconds) of each step of one prompt beside `rows` decode rows."""
    rng = random.Random(0)
    pace = pace or Pace()
    for _ in range(5):
        pace.observe(Work(rows, 0, 0.0), machine.seconds(Work(rows, 0, 0.0), rng))
    limits = replace(LIMITS, tokens=most)
    steps = []
    done = 0
    decodes = [Candidate(1 + i, True, True, 1, 100, 7, False) for i in range(rows)]
    while done < tokens:
        prompt = Candidate(0, True, False, tokens - done, done, done // 16, False)
        chunk = min(prefill_limit([prompt, *decodes], limits, pace, target) or most, tokens - done)
        work = Work.of([prompt, *decodes], [(0, chunk), *((c.order, 1) for c in decodes)])
        seconds = machine.seconds(work, rng)
        pace.observe(work, seconds)
        steps.append((chunk, seconds))
        done += chunk
    return steps


@pytest.mark.parametrize(
    ("machine", "tokens", "target", "most"),
    [(GPU, 131_072, 0.025, 8192), (DEEP_GPU, 131_072, 0.025, 8192), (CPU, 7000, 0.15, 512)],
    ids=["gpu", "deep", "cpu"],
)
def test_steps_beside_decode_rows_take_about_the_target(
    machine: Machine, tokens: int, target: float, most: int
) -> None:
    steps = read_prompt(machine, tokens, target, rows=4, most=most)
    assert max(seconds for _, seconds in steps) <= 1.6 * target  # 40 ms for 25
    settled = [seconds for _, seconds in steps[4:-1]]
    assert sum(settled) / len(settled) >= 0.6 * target, "tokens are not wasted"
    assert len({chunk for chunk, _ in steps[:-1]}) <= 12, "few lengths"


@pytest.mark.parametrize("known", [False, True])
def test_the_time_to_launch_a_step_is_used(known: bool) -> None:
    """A step of few tokens takes as long as one of a thousand, so chunks of few tokens are wasted."""
    pace = Pace()
    if known:  # from prompts that were alone
        read_prompt(H200, 30_000, 0.03, rows=0, most=8192, pace=pace)
    steps = read_prompt(H200, 6554, 0.03, rows=4, most=8192, pace=pace)
    assert max(seconds for _, seconds in steps) <= 0.04
    assert sum(seconds for _, seconds in steps) <= 0.25


def test_a_target_below_the_time_to_launch_a_step_does_not_stop_prefill() -> None:
    """The step takes longer than the target anyway."""
    pace = Pace()
    for _ in range(3):
        read_prompt(H200, 6554, 0.01, rows=4, most=8192, pace=pace)
    steps = read_prompt(H200, 6554, 0.01, rows=4, most=8192, pace=pace)
    assert max(seconds for _, seconds in steps) <= 0.04
    assert sum(seconds for _, seconds in steps) <= 0.35


def test_a_lone_prompt_takes_steps_of_a_few_targets_or_half_of_the_budget() -> None:
    steps = read_prompt(GPU, 131_072, 0.025, rows=0, most=8192)
    assert all(chunk >= 4096 or seconds <= 1.2 * LONE * 0.025 for chunk, seconds in steps[:-1])
    assert all(chunk >= 4096 for chunk, _ in steps[:-1])
    assert read_prompt(CPU, 7000, 0.15, rows=0, most=512)[3][0] >= 384


def test_nothing_is_limited_without_a_target_or_without_prompts() -> None:
    prompt = Candidate(0, True, False, 9000, 0, 0, False)
    row = Candidate(1, True, True, 1, 9, 1, False)
    assert prefill_limit([prompt, row], LIMITS, Pace(), 0.0) is None
    assert prefill_limit([row], LIMITS, Pace(), 0.025) is None


def test_a_short_prompt_makes_steps_short() -> None:
    pace = Pace()
    for _ in range(5):
        pace.observe(Work(0, 8192, 4096.0), 0.3)
    long, short = (
        Candidate(0, True, False, 90_000, 4096, 256, False),
        Candidate(1, False, False, 200, 0, 0, False),
    )
    lone, both = (prefill_limit(found, LIMITS, pace, 0.025) for found in ([long], [long, short]))
    assert lone is not None
    assert both is not None
    assert both < 1000 < lone
    many = [short._replace(order=1 + i) for i in range(100)]
    assert prefill_limit([long, *many], LIMITS, pace, 0.025) == lone, "many short prompts need long steps"
    as_long = short._replace(pending=50_000)
    assert prefill_limit([long, as_long], LIMITS, pace, 0.025) == lone


def test_prefill_goes_on_however_slow_decode_rows_are() -> None:
    pace = Pace()
    for _ in range(20):
        pace.observe(Work(64, 0, 0.0), 0.5)
        pace.observe(Work(64, 64, 100.0), 0.5 + 64 * 30e-6)
    assert pace.tokens_within(0.025, depth=100, most=8192) >= 1


def test_small_chunks_do_not_become_ever_smaller() -> None:
    """Without a step of decode rows alone, the fixed cost of a step looks like a cost of its tokens."""
    pace = Pace()
    rows = [Candidate(1, True, True, 1, 100, 7, False)]
    limits = replace(LIMITS, tokens=512)
    for _ in range(200):
        prompt = Candidate(0, True, False, 5000, 0, 0, False)
        tokens = prefill_limit([prompt, *rows], limits, pace, 0.15)
        assert tokens is not None
        pace.observe(Work(1, tokens, tokens / 2), 0.2 + 1e-3 * tokens)
    assert tokens >= 32


def test_one_slow_step_does_not_stop_prefill() -> None:
    """The first step of a kind compiles kernels."""
    pace = Pace()
    for _ in range(10):
        pace.observe(Work(4, 768, 1000.0), 0.02)
    before = pace.tokens_within(0.025, depth=1000, most=8192)
    pace.observe(Work(4, 768, 1000.0), 5.0)
    after = pace.tokens_within(0.025, depth=1000, most=8192)
    assert before / OUTLIER <= after < before
    for _ in range(10):
        pace.observe(Work(4, 768, 1000.0), 0.02)
    assert pace.tokens_within(0.025, depth=1000, most=8192) == before


def test_a_new_machine_begins_carefully_and_doubles() -> None:
    pace = Pace()
    seen = []
    for _ in range(5):
        tokens = pace.tokens_within(10.0, depth=0, most=8192)
        seen.append(tokens)
        pace.observe(Work(0, tokens, tokens / 2), 1e-6)
    assert seen == [1024, 2048, 4096, 8192, 8192]


def test_any_measurements_give_a_usable_answer() -> None:
    rng = random.Random(3)
    for _ in range(300):
        pace = Pace()
        for _ in range(rng.randrange(0, 30)):
            work = Work(rng.randrange(0, 9), rng.choice([0, rng.randrange(1, 9000)]), rng.random() * 1e5)
            pace.observe(work, rng.choice([0.0, 1e-7, rng.random(), 100.0]))
            answer = pace.tokens_within(0.025, depth=rng.randrange(10**6), most=512)
            assert 1 <= answer <= 512


def test_short_prompts_do_not_make_the_chunks_of_a_long_one_short() -> None:
    """A prompt of a few words takes almost as long as a chunk: the weights are read once for both."""
    pace = Pace()
    for _ in range(100):
        for _ in range(20):
            pace.observe(Work(0, 20, 10.0), 6e-3)
        pace.observe(Work(4, 0, 0.0), 5e-3)
        tokens = pace.tokens_within(0.025, depth=0, most=8192)
        pace.observe(Work(4, tokens, tokens / 2), 5e-3 + 25e-6 * tokens)
    assert pace.tokens_within(0.025, depth=0, most=8192) >= 512


def test_short_chunks_that_cost_more_are_noticed_after_long_ones() -> None:
    """cuDNN reads long chunks faster than the kernel for short ones does."""
    pace = Pace()
    for _ in range(30):
        pace.observe(Work(0, 8192, 4096.0), 8192 * 25e-6)
    seconds = []
    for _ in range(12):
        tokens = pace.tokens_within(0.025, depth=30_000, most=8192)
        seconds.append(tokens * 75e-6)
        pace.observe(Work(4, tokens, 30_000.0), seconds[-1])
    assert max(seconds[4:]) <= 0.03


def test_lengths_are_rounded_to_few_values() -> None:
    values = sorted({rounded(tokens) for tokens in range(1, 8193)})
    assert len(values) <= 26
    assert all(0.8 * tokens <= rounded(tokens) <= 1.2 * tokens for tokens in range(8, 8193))
    assert all(b <= 2 * a for a, b in itertools.pairwise(values))


def test_a_server_has_a_target_and_the_offline_api_has_none() -> None:
    plain = SchedulerConfig()
    assert plain.step_time_target is None
    assert plain.for_serving(on_gpu=True).step_time_target == 28
    assert plain.for_serving(on_gpu=False).step_time_target == 150
    assert replace(plain, step_time_target=0.0).for_serving(on_gpu=True).step_time_target == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_sizes_chunks_by_the_time_they_take(ahead: bool) -> None:
    engine = fake_engine(blocks=2000, max_num_batched_tokens=256, step_time_target=100)
    core = engine.core
    core.overlaps = ahead
    core.pace.observe = lambda work, seconds: Pace.observe(core.pace, work, 1e-3 * work.tokens)  # type: ignore[method-assign]
    said: list[int] = []
    take = lambda event: said.extend(getattr(event, "token_ids", ()))  # noqa: E731
    submit(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), emit=take)
    engine.step()
    prompt = [i % 60 for i in range(2000)]
    submit(engine, prompt, SamplingParams(temperature=0, max_tokens=1))
    chunks = []
    while core.lifecycle.requests:
        before = core.runner.tokens_computed
        engine.step()
        chunks.append(core.runner.tokens_computed - before)
        engine.core.memory.check()
    assert said == continuation([1, 2, 3], 60)
    beside = chunks[6:20]
    assert set(beside) == {96 + 1}, chunks  # 100 ms at 1 ms a token


def test_without_a_target_a_lone_prompt_takes_the_whole_budget() -> None:
    engine = fake_engine(blocks=2000, max_num_batched_tokens=256)
    submit(engine, [i % 60 for i in range(700)], SamplingParams(temperature=0, max_tokens=1))
    chunks = []
    while not chunks or engine.core.lifecycle.requests:
        before = engine.core.runner.tokens_computed
        engine.step()
        chunks.append(engine.core.runner.tokens_computed - before)
    assert chunks == [256, 256, 188]


@pytest.mark.parametrize("hands_over_at", [1, 5, None])
@pytest.mark.parametrize("decodes", [False, True])
def test_slices_of_planning_run_together_until_one_hands_over(
    hands_over_at: int | None, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone would cost running rows a step, and the prompt the time of that step."""
    engine = fake_engine(blocks=50, step_time_target=60_000)
    core = engine.core
    if decodes:
        submit(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        engine.step()
    count = 0

    def advance(_: object) -> bool:
        nonlocal count
        count += 1
        core.planner.handed_over = count == hands_over_at
        return count < 20

    monkeypatch.setattr(core.lifecycle.plans, "advance", advance)
    engine.step()
    assert count == (hands_over_at or 20 if decodes else 1)


def test_a_prompt_that_is_less_urgent_does_not_make_steps_short() -> None:
    pace = Pace()
    for _ in range(5):
        pace.observe(Work(0, 8192, 4096.0), 0.3)
    long = Candidate(0, True, False, 90_000, 4096, 256, False)
    later = Candidate(1, False, False, 200, 0, 0, False, priority=1)
    limits = [prefill_limit(found, LIMITS, pace, 0.025) for found in ([long], [long, later])]
    assert limits[0] == limits[1]
