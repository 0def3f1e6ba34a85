"""Fair prefill over simulated time: stated bounds hold in random schedules, and every sequence ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from skim.engine.scheduler import (
    LEVEL_SECONDS,
    SHORT,
    Candidate,
    Limits,
    Tick,
    blocks_needed,
    decide_tick,
    is_short,
)
from skim.sampling.params import SamplingParams
from tests.fake import continuation, fake_engine, submit

SIZE = 4


@dataclass
class Job:
    """A request: a prompt, then generated tokens. Times are steps."""

    order: int
    prompt: int
    reply: int
    arrived: int
    priority: int = 0
    grain: int = 1
    computed: int = 0
    held: int = -1  # blocks; -1 while it waits
    waited: int = 0
    generated: int = 0
    first_token: int | None = None
    ended: int | None = None
    preemptions: int = 0

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.computed == self.prompt + self.generated - 1

    def candidate(self) -> Candidate:
        running = self.held >= 0
        return Candidate(
            self.order,
            running,
            running and self.decoding,
            self.prompt + self.generated - self.computed if running else self.prompt + self.generated,
            self.computed,
            max(self.held, 0),
            False,
            waited=self.waited,
            grain=self.grain,
            priority=self.priority,
            arrived=float(self.arrived),
        )


@dataclass
class World:
    """Runs the scheduler's decisions over a pool of blocks, without a cache: preempted work is lost."""

    limits: Limits
    blocks: int
    jobs: list[Job] = field(default_factory=list)
    now: int = 0
    states: int = 0

    @property
    def open(self) -> list[Job]:
        return [job for job in self.jobs if job.ended is None and job.arrived <= self.now]

    def step(self, watch: Callable[[Tick, list[Candidate]], None] | None = None) -> None:
        while True:
            candidates = [job.candidate() for job in self.open]
            free = self.blocks - sum(max(c.blocks, 0) for c in candidates)
            tick = decide_tick(candidates, free, self.limits)
            self.states += 1
            if tick.preempt is None:
                break
            last = max((c for c in candidates if c.running), key=lambda c: c.place)
            assert tick.preempt == last.order, "only the last of the line is preempted"
            self._preempt(tick.preempt)
        if watch is not None:
            watch(tick, candidates)
        rows = dict(tick.rows)
        by_order = {c.order: c for c in candidates}
        self.now += 1
        for job in list(self.open):
            if job.arrived == self.now:
                continue
            tokens = rows.get(job.order, 0)
            job.waited = 0 if tokens else job.waited + 1
            if not tokens:
                continue
            needed = blocks_needed(by_order[job.order], tokens, self.limits)
            job.held = max(job.held, 0) + needed
            job.computed += tokens
            if job.computed == job.prompt + job.generated:
                job.generated += 1
                job.first_token = job.first_token or self.now
                if job.generated >= job.reply:
                    job.ended, job.held = self.now, -1
        assert sum(max(job.held, 0) for job in self.open) <= self.blocks

    def _preempt(self, order: int) -> None:
        job = next(job for job in self.jobs if job.order == order)
        job.held, job.computed = -1, 0
        job.preemptions += 1

    def run(self, most: int, watch: Callable[[Tick, list[Candidate]], None] | None = None) -> None:
        while any(job.ended is None for job in self.jobs):
            assert self.now < most, "a sequence is starved"
            self.step(watch)


def first_can_have_half(limits: Limits) -> Callable[[Tick, list[Candidate]], None]:
    """Check in each step that the first of the line gets half of the prefill tokens, with blocks to spare.

    Short prompts get the other half, the shortest first. That is the stated bound of a short prompt.
    """

    def watch(tick: Tick, candidates: list[Candidate]) -> None:
        rows = dict(tick.rows)
        prompts = sorted((c for c in candidates if not c.decoding), key=lambda c: c.place)
        if not prompts:
            return
        budget = limits.tokens - sum(1 for c in candidates if c.decoding and c.order in rows)
        if limits.prefill is not None:
            budget = min(budget, limits.prefill)
        first = prompts[0]
        assert rows.get(first.order, 0) >= min(first.pending, budget - budget // 2)
        rest = budget - min(first.pending, budget - budget // 2)
        short = [c for c in prompts[1:] if is_short(c, first)]
        for candidate in sorted(short, key=lambda c: (c.pending, c.place)):
            given = min(candidate.pending, rest)
            assert rows.get(candidate.order, 0) >= given, "short prompts have the other half, shortest first"
            rest -= given
        if any(c.pending > rows.get(c.order, 0) for c in prompts):
            assert sum(rows.get(c.order, 0) for c in prompts) == budget, "no token is wasted"

    return watch


def steps_in_line(job: Job, jobs: list[Job], half: int) -> int:
    """The stated bound: steps from arrival to the first token, given everybody that may be ahead in line."""
    mine = job.candidate().place
    ahead = [
        other
        for other in jobs
        if other.candidate().place <= mine and (other.first_token is None or other.first_token > job.arrived)
    ]
    late = max([0] + [other.arrived - job.arrived for other in ahead])  # a more urgent one may come later
    return late + sum(-(-other.prompt // half) for other in ahead)


def test_nobody_is_slowed_beyond_the_stated_bound() -> None:
    """Prompts alone, in a large pool: half of each step's tokens reach the first of the line."""
    states = 0
    rng = random.Random(0)
    while states < 60_000:
        tokens = rng.choice([4, 9, 16, 64])
        prefill = rng.choice([None, None, tokens // 2])
        limits = Limits(tokens, 1000, SIZE, aging_steps=rng.choice([2, 8]), prefill=prefill)
        longest = rng.choice([tokens, 10 * tokens, 40 * tokens])
        jobs = [
            Job(
                order,
                rng.randrange(1, longest) if rng.random() < 0.3 else rng.randrange(1, max(2, longest // 8)),
                1,
                arrived=rng.randrange(0, rng.choice([1, 20, 200])),
                priority=rng.choice([0, 0, 0, -1, 2]),
            )
            for order in range(rng.randrange(1, 25))
        ]
        world = World(limits, 10**6, jobs)
        world.run(100_000, first_can_have_half(limits))
        budget = prefill or tokens
        for job in jobs:
            assert job.first_token is not None
            assert job.first_token - job.arrived <= steps_in_line(job, jobs, budget - budget // 2)
        states += world.states


def test_everybody_ends_in_a_tight_pool() -> None:
    """Decode rows, little memory, grains and priorities: nobody starves, and preemption terminates."""
    states = preemptions = 0
    rng = random.Random(1)
    while states < 60_000:
        tokens = rng.choice([3, 8, 32])
        blocks = rng.randrange(8, 30)
        limits = Limits(tokens, rng.choice([2, 5, 50]), SIZE, aging_steps=3)
        grain = rng.choice([1, 1, 3, 8])
        jobs = []
        for order in range(rng.randrange(2, 14)):
            prompt = rng.randrange(1, blocks * SIZE)
            reply = rng.randrange(1, min(30, blocks * SIZE + 2 - prompt))
            arrived, priority = rng.randrange(0, 60), rng.choice([0, 0, -3, 4])
            jobs.append(Job(order, prompt, reply, arrived, priority, grain))
        world = World(limits, blocks, jobs)
        world.run(20_000)
        states += world.states
        preemptions += sum(job.preemptions for job in jobs)
    assert preemptions > 300


@pytest.mark.parametrize("prefill", [None, 64])
def test_a_short_prompt_does_not_wait_for_a_long_one(prefill: int | None) -> None:
    limits = Limits(128, 64, SIZE, aging_steps=8, prefill=prefill)
    half = (prefill or 128) // 2
    long, short = Job(0, 12_800, 1, 0), Job(1, 50, 1, 10)
    world = World(limits, 10**6, [long, short])
    world.run(1000)
    assert short.first_token is not None
    assert short.first_token - short.arrived == -(-50 // half)
    alone = -(-12_800 // (prefill or 128))
    assert long.first_token is not None
    assert long.first_token <= alone + 1


def test_the_long_prompt_ends_within_twice_its_time_under_any_load_of_short_ones() -> None:
    limits = Limits(128, 64, SIZE, aging_steps=8)
    long = Job(0, 12_800, 1, 0)
    short = [Job(1 + i, 100, 1, i // 2) for i in range(600)]  # more than the machine can do
    world = World(limits, 10**6, [long, *short])
    while long.ended is None:
        world.step()
    assert world.now <= 200
    served = [job for job in short if job.first_token is not None]
    assert sum(job.prompt for job in served) >= 0.49 * 128 * world.now


def test_short_prompts_are_served_shortest_first_and_only_if_no_less_urgent() -> None:
    limits = Limits(100, 64, SIZE, aging_steps=8)
    line = [
        Candidate(0, True, False, 4000, 0, 0, False),
        Candidate(1, False, False, 45, 0, 0, False, arrived=1),
        Candidate(2, False, False, 20, 0, 0, False, arrived=2),
        Candidate(3, False, False, 30, 0, 0, False, arrived=3),
        Candidate(4, False, False, 4000 // SHORT + 1, 0, 0, False, arrived=4),
    ]
    assert dict(decide_tick(line, 10_000, limits).rows) == {0: 50, 2: 20, 3: 30}
    less = [line[0], *(c._replace(priority=1) for c in line[1:])]
    assert dict(decide_tick(less, 10_000, limits).rows) == {0: 100}
    more = [line[0], *(c._replace(priority=-1) for c in line[1:])]
    assert dict(decide_tick(more, 10_000, limits).rows) == {1: 45, 2: 20, 3: 30, 4: 5}


def test_a_priority_is_worth_seconds_of_waiting_and_no_more() -> None:
    limits = Limits(16, 1, SIZE, aging_steps=8)  # one sequence at a time
    first = Candidate(0, False, False, 8, 0, 0, False, priority=1)
    for late, served in [(LEVEL_SECONDS - 1, 1), (LEVEL_SECONDS + 1, 0)]:
        urgent = Candidate(1, False, False, 8, 0, 0, False, arrived=late)
        assert decide_tick([first, urgent], 100, limits).rows == ((served, 8),)


def test_the_least_urgent_sequence_is_preempted() -> None:
    limits = Limits(16, 8, SIZE, aging_steps=8)
    rows = [Candidate(i, True, True, 1, 4, 1, False, priority=p) for i, p in enumerate([0, 5, 1])]
    assert decide_tick(rows, 0, limits).preempt == 1


def test_a_first_chunk_reaches_the_end_of_its_grain_however_few_tokens_a_step_has() -> None:
    limits = Limits(512, 8, SIZE, aging_steps=8, prefill=40)
    sparse = Candidate(0, True, False, 1000, 128, 32, False, grain=128)
    assert dict(decide_tick([sparse], 10_000, limits).rows) == {0: 128}


def test_priorities_order_requests_in_an_engine() -> None:
    engine = fake_engine(blocks=100, max_num_seqs=1, max_num_batched_tokens=16)
    done: list[int] = []
    for index, priority in enumerate([0, 3, -1, 0, -1]):
        params = SamplingParams(temperature=0, max_tokens=2, priority=priority)
        submit(engine, [index, 5, 6], params, emit=lambda e, i=index: done.append(i))
    while engine.step():
        engine.core.memory.check()
    assert list(dict.fromkeys(done)) == [2, 4, 0, 3, 1]


def test_a_short_prompt_behind_many_long_ones_is_considered() -> None:
    engine = fake_engine(blocks=4000, max_num_batched_tokens=16)
    ended: list[int] = []
    for _ in range(20):
        submit(engine, [7] * 700, SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    submit(
        engine,
        [1, 2, 3],
        SamplingParams(temperature=0, max_tokens=1),
        emit=lambda event: ended.extend(getattr(event, "token_ids", ())),
    )
    engine.step()
    assert ended == continuation([1, 2, 3], 1)
