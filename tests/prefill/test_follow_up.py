"""Follow-ups: a new question adds prompt blocks to those read for an earlier turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from skim.config import PrefillConfig
from skim.memory.prefix import Namespace
from skim.prefill.anatomy import map_text
from skim.prefill.follow_up import BACKFILL_SHARE, FollowUps
from skim.prefill.plan import Plan, Positions, Reason
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

SKIM = PrefillConfig(sparse_prefill="always")
SIZE = 4
FIRST = tuple(range(100, 140))  # ten blocks
FURTHER = (*FIRST, *range(200, 206))  # the next turn


class Cache:
    """A cache that holds the first `share` of every reading."""

    def __init__(self) -> None:
        self.share = 1.0
        self.counts: Counter[str] = Counter()
        self.follow_ups = FollowUps(self.cached_tokens, self.counts)

    def cached_tokens(self, reading: Reading, namespace: Namespace) -> int:
        return int(self.share * len(reading.tokens))

    def read(self, prompt: tuple[int, ...], kept: set[int], **asked: Any) -> Planned:
        """Read `prompt` by a plan with the blocks `kept`. The last four tokens are the question."""
        size, positions = asked.pop("size", SIZE), asked.pop("positions", "original")
        request = Request(prompt, SamplingParams(), asked.pop("prefill", SKIM), **asked)
        plan = plan_of(len(prompt), kept, size, positions)
        return self.follow_ups.reading_of(request, map_text(prompt, 4), plan)


def plan_of(tokens: int, kept: set[int], size: int, positions: Positions) -> Plan:
    blocks = range(-(-tokens // size))
    reasons = tuple(Reason.SCORED if block in kept else None for block in blocks)
    scores = tuple(float(block in kept) for block in blocks)
    return Plan(size, tokens, reasons, positions, "lexical", scores)


def test_a_first_turn_reads_its_plan() -> None:
    planned = Cache().read(FIRST, {0, 3, 9})
    indices = [0, 1, 2, 3, 12, 13, 14, 15, 36, 37, 38, 39]
    assert planned.reading == Reading.of(FIRST, indices)
    assert planned.follow_up is None


def test_a_follow_up_keeps_earlier_slots_and_puts_late_blocks_before_its_question() -> None:
    cache = Cache()
    first = cache.read(FIRST, {0, 3, 9})
    further = cache.read(FURTHER, {0, 1, 3, 5, 6, 7, 8, 9, 10, 11})
    assert first.reading.positions is not None
    assert further.reading.positions is not None
    earlier = len(first.reading.tokens)
    assert further.reading.positions[:earlier] == first.reading.positions
    assert further.reading.positions[-4:] == tuple(range(42, 46))
    late = further.reading.positions[earlier + 2 : -4]
    assert late == (4, 5, 6, 7, 20, 21, 22, 23, 24, 25, 26, 27)
    assert 6 + len(late) <= BACKFILL_SHARE * 38
    assert further.follow_up == "backfill: 12 tokens"
    assert cache.counts == {"backfill": 1}
    assert further.plan is not None
    assert [b for b, kept in enumerate(further.plan.kept) if kept] == [0, 1, 3, 5, 6, 9, 10, 11]


def test_blocks_read_for_an_earlier_question_have_that_reason() -> None:
    cache = Cache()
    cache.read(FIRST, {0, 3, 9})
    further = cache.read(FURTHER, {0, 9, 10, 11})
    assert further.plan is not None
    assert further.plan.reasons[3] == Reason.EARLIER


@pytest.mark.parametrize(
    ("label", "changed"),
    [
        ("compact", {"positions": "compact"}),
        ("replan", {"prefill": replace(SKIM, follow_up="replan")}),
        ("block_size", {"size": 2}),
        ("evicted", {}),
    ],
)
def test_a_new_plan_for_a_follow_up_has_a_counted_reason(label: str, changed: dict[str, Any]) -> None:
    cache = Cache()
    cache.read(FIRST, {0, 3, 9})
    cache.share = 0.0 if label == "evicted" else 1.0
    planned = cache.read(FURTHER, {0, 1, 10, 11}, **changed)
    assert cache.counts == {label: 1}
    assert (planned.follow_up or "").startswith("replan: ")


@pytest.mark.parametrize("asked", [{"cache_salt": "other"}, {"use_prefix_cache": False}])
def test_other_tenants_and_opted_out_requests_reuse_no_reading(asked: dict[str, Any]) -> None:
    cache = Cache()
    cache.read(FIRST, {0, 3, 9})
    assert cache.read(FURTHER, {0, 1, 10, 11}, **asked).follow_up is None
    assert not cache.counts
