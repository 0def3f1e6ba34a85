"""Plans take turns: short prompts first, and none starves."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.config import PrefillConfig
from skim.errors import EngineError
from skim.prefill.plan_queue import OLDEST_SHARE, PlanQueue
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

LONGEST_SLICE = 5


class Slices:
    """Stands in for a planner, with a clock. A plan has a slice per prompt token, of that many seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: set[Request] = set()
        self.most_at_once = 0

    def plan(self, request: Request) -> Generator[None, None, Planned]:
        self.running.add(request)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            for seconds in request.prompt_token_ids:
                self.now += seconds
                yield
        finally:
            self.running.remove(request)
        return Planned(Reading(request.prompt_token_ids))


class Queue:
    """A queue with a clock that runs only while plans run. `ended` has the time of each result."""

    def __init__(self) -> None:
        self.planner = Slices()
        self.plans = PlanQueue(self.planner, lambda: self.planner.now)  # type: ignore[arg-type]
        self.ended: dict[int, float] = {}

    def add(self, name: int, slices: list[int], scorer: str = "lexical") -> None:
        request = Request(tuple(slices), SamplingParams(), PrefillConfig(scorer=scorer), cache_salt=str(name))

        def finish(planned: Planned, begun_at: float) -> None:
            assert planned.reading.tokens == tuple(slices)
            assert begun_at <= self.planner.now
            assert name not in self.ended
            self.ended[name] = self.planner.now

        self.plans.add(name, request, finish, lambda error: pytest.fail(str(error)))

    def run(self) -> None:
        while self.plans.advance():
            pass


def test_a_short_prompt_overtakes_a_long_one_that_has_begun() -> None:
    queue = Queue()
    queue.add(0, [1] * 1000)
    for _ in range(10):
        queue.plans.advance()
    queue.add(1, [1] * 30)
    queue.run()
    assert queue.ended[1] <= 10 + 30 / (1 - OLDEST_SHARE) + 1
    assert queue.ended[0] == 1030


def test_a_stream_of_short_prompts_leaves_a_quarter_of_the_time_to_a_long_one() -> None:
    queue = Queue()
    queue.add(0, [1] * 1000)
    name = 1
    while 0 not in queue.ended:
        if len(queue.plans) < 3:
            queue.add(name, [1] * 10)
            name += 1
        queue.plans.advance()
    assert queue.ended[0] <= 1000 / OLDEST_SHARE + 1
    assert len(queue.ended) > 250


@given(
    st.lists(
        st.tuples(
            st.integers(0, 60),
            st.lists(st.integers(1, LONGEST_SLICE), min_size=1, max_size=40),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_nobody_waits_longer_than_the_bound(arrivals: list[tuple[int, list[int], bool]]) -> None:
    """`arrivals`: slices run before the next arrival, its own slices, and True if it must be alone."""
    queue = Queue()
    added: list[tuple[float, int]] = []
    for name, (before, slices, alone) in enumerate(arrivals):
        for _ in range(before):
            queue.plans.advance()
        added.append((queue.planner.now, sum(slices)))
        queue.add(name, slices, "full" if alone else "lexical")
    queue.run()
    assert len(queue.ended) == len(arrivals)
    for name, (at, _) in enumerate(added):
        ahead = sum(work for _, work in added[: name + 1])
        slack = LONGEST_SLICE * (name + 2) / OLDEST_SHARE  # a slice is not cut short
        assert queue.ended[name] - at <= ahead / OLDEST_SHARE + slack
    assert queue.planner.now == sum(work for _, work in added), "the queue was idle"


def test_plans_whose_memory_grows_with_the_prompt_are_not_in_progress_together() -> None:
    queue = Queue()
    queue.add(0, [1] * 50, "full")
    queue.plans.advance()
    for name in range(1, 4):
        queue.add(name, [1] * 10, "full")
    queue.run()
    assert queue.planner.most_at_once == 1
    assert queue.ended[0] == 50


def test_dropped_plans_stop_and_the_others_fail_when_the_queue_is_emptied() -> None:
    queue, failed = Queue(), list[Any]()
    for name in range(3):
        request = Request((1,) * 9, SamplingParams(), PrefillConfig())
        queue.plans.add(name, request, lambda *_: None, failed.append)
    queue.plans.advance()
    queue.plans.drop(0)
    assert not queue.planner.running
    error = EngineError("closed")
    queue.plans.fail_all(error)
    assert failed == [error, error]
    assert not queue.plans.advance()
