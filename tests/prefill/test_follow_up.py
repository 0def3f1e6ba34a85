"""Follow-ups: a new question adds prompt blocks to those read for an earlier turn."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.config import PrefillConfig
from skim.memory.prefix import Namespace
from skim.prefill.anatomy import map_text
from skim.prefill.conversations import Conversation, Conversations, digests_of, spans_of
from skim.prefill.follow_up import BACKFILL_SHARE, FollowUps
from skim.prefill.plan import Plan, Positions, Reason
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.prefill.scoring.scorer import run_to_completion
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
        work = self.follow_ups.reading_of(request, np.array(prompt), map_text(prompt, 4), plan)
        return run_to_completion(work)


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


def test_an_equal_prompt_is_no_follow_up_and_the_longest_beginning_is_continued() -> None:
    cache = Cache()
    cache.read(FIRST, {0, 3, 9})
    assert cache.read(FIRST, {0, 9}).follow_up is None
    longer = cache.read(FURTHER, {0, 9, 10, 11}).reading
    assert longer.positions is not None
    longest = cache.read((*FURTHER, *range(300, 306)), {0, 9, 10, 11, 12}).reading
    assert longest.positions is not None
    assert longest.positions[: len(longer.positions)] == longer.positions


def test_a_prompt_that_differs_in_one_token_is_no_follow_up() -> None:
    for place in (0, 17, 39):
        cache = Cache()
        cache.read(FIRST, {0, 3, 9})
        other = (*FURTHER[:place], 99, *FURTHER[place + 1 :])
        assert cache.read(other, {0, 1, 10, 11}).follow_up is None


def test_remembered_prompts_take_no_memory_for_their_tokens() -> None:
    cache = Cache()
    cache.read(tuple(range(1000, 3000)), {0, 3, 9})  # what is allocated once
    tracemalloc.start()
    try:
        for turn in range(1, 5):
            cache.read(tuple(range(turn * 10**6, turn * 10**6 + 100_000)), {0, 3, 9})
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache.follow_ups.conversations) == 5
    assert kept < 100_000, f"{kept} bytes for 400,000 tokens"
    cache.follow_ups.conversations.clear()
    assert cache.read(FURTHER, {0, 1}).follow_up is None


@given(
    st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 99), unique=True)), max_size=40),
    st.integers(1, 8) | st.integers(0, 12_000),
)
def test_conversations_keep_within_their_bytes_and_forget_the_oldest(
    added: list[tuple[int, list[int]]], most: int
) -> None:
    """Against a plain list: the newest that fit are found, the others are not."""
    known, model = Conversations(most), list[tuple[bytes, Conversation]]()
    space = Namespace("tenant")
    for tokens, indices in added:
        digest = bytes([tokens])
        conversation = Conversation(tokens, 4, "original", spans_of(indices))
        assert conversation.indices().tolist() == indices
        known.remember(space, digest, conversation)
        model = [pair for pair in model if pair[0] != digest] + [(digest, conversation)]
        assert known.bytes <= most
        newest = model[len(model) - len(known) :]
        for old, one in model:  # oldest first, so that finding them does not change their order
            assert (known.find(space, {one.tokens: old}) is one) == any(one is kept for _, kept in newest)
    assert known.find(Namespace("other"), {tokens: bytes([tokens]) for tokens, _ in added}) is None
    known.clear()
    assert known.bytes == len(known) == 0


def test_digests_of_beginnings_are_those_of_shorter_prompts() -> None:
    ids = np.arange(2_500_000) % 50_000
    lengths = (1, 17, 1 << 20, (1 << 20) + 1, len(ids))
    found = run_to_completion(digests_of(ids, lengths))
    for length in lengths:
        assert run_to_completion(digests_of(ids[:length], [length])) == {length: found[length]}
    assert len(set(found.values())) == len(lengths)
