"""The scheduler's decisions, as a pure function and over simulated time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.engine.scheduler import Candidate, Limits, blocks_needed, decide_tick, tokens_that_fit

LIMITS = Limits(tokens=16, sequences=8, block_size=4, aging_steps=3)


def decode(order: int, length: int = 4, **more: int) -> Candidate:
    return Candidate(order, True, True, 1, length, -(-length // 4), False, **more)  # type: ignore[arg-type]


def prefill(order: int, pending: int, length: int = 0, **more: int) -> Candidate:
    return Candidate(order, True, False, pending, length, -(-length // 4), False, **more)  # type: ignore[arg-type]


def waiting(order: int, pending: int, **more: int) -> Candidate:
    return Candidate(order, False, False, pending, 0, 0, False, **more)  # type: ignore[arg-type]


candidates = st.lists(
    st.builds(
        lambda running, decoding, pending, length, waited, slots, copies, revives, grain: Candidate(
            order=0,
            running=running,
            decoding=running and decoding,
            pending=max(1, pending - 50) if running and decoding else pending,
            length=length,
            blocks=-(-length // 4),
            copies_tail=copies and length % 4 > 0,
            revives=0 if running else min(revives, -(-length // 4)),
            waited=waited,
            slots=slots,
            grain=grain,
        ),
        st.booleans(),
        st.booleans(),
        st.integers(1, 60),
        st.integers(0, 60),
        st.integers(0, 5),
        st.integers(1, 3),
        st.booleans(),
        st.integers(0, 3),
        st.sampled_from([1, 3, 8]),
    ),
    max_size=12,
).map(lambda found: [c._replace(order=i) for i, c in enumerate(found)])


@settings(max_examples=400)
@given(
    candidates,
    st.integers(0, 40),
    st.sampled_from([1, 2, 3, 16, 40]),
    st.sampled_from([1, 1, 3]),
    st.sampled_from([None, 10, 20]),
)
def test_a_decision_keeps_every_limit(
    found: list[Candidate], available: int, budget: int, groups: int, samples: int | None
) -> None:
    limits = replace(LIMITS, tokens=budget, groups=groups, samples=samples)
    found = [c._replace(pending=min(c.pending, max(1, budget // 2))) if c.decoding else c for c in found]
    if groups > 1:  # the last group has a sliding window
        found = [c._replace(ends=max(0, -(-(c.length + c.pending) // 4) - c.blocks - 1)) for c in found]
    tick = decide_tick(found, available, limits)
    by_order = {c.order: c for c in found}
    if tick.preempt is not None:
        assert not tick.rows
        assert tick.preempt == max(c.order for c in found if c.running)
        return
    rows = dict(tick.rows)
    assert len(rows) == len(tick.rows)
    assert sum(rows.values()) <= budget
    assert all(1 <= n <= by_order[order].pending for order, n in rows.items())
    decoded = [order for order in rows if by_order[order].decoding]
    assert all(rows[order] == by_order[order].pending for order in decoded), "a verification is never cut"
    assert samples is None or sum(rows[order] for order in decoded) <= samples
    for cut in (by_order[order] for order, n in rows.items() if n < by_order[order].pending):
        assert budget // 2 < cut.grain or (cut.length + rows[cut.order]) % cut.grain == 0
    taken = sum(blocks_needed(by_order[o], n, limits) + by_order[o].revives for o, n in rows.items())
    assert taken <= available
    admitted = [by_order[o] for o in rows if not by_order[o].running]
    if admitted:
        running = sum(c.slots for c in found if c.running)
        assert running + sum(c.slots for c in admitted) <= LIMITS.sequences
    if any(c.running for c in found):
        assert rows, "a step has rows if sequences are running"


def test_decode_rows_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    tick = decide_tick([prefill(0, 100), decode(1), decode(2), waiting(3, 50)], 100, LIMITS)
    assert tick.rows == ((1, 1), (2, 1), (0, 14))


def test_rows_that_verify_drafts_take_turns_within_the_samples_of_a_step() -> None:
    limits = replace(LIMITS, samples=12)
    rows = [decode(order)._replace(pending=8) for order in range(3)]
    turns: list[tuple[int, int]] = []
    waited = [0, 0, 0]
    for _ in range(3):
        tick = decide_tick([row._replace(waited=n) for row, n in zip(rows, waited, strict=True)], 99, limits)
        turns += tick.rows
        waited = [0 if (order, 8) in tick.rows else n + 1 for order, n in enumerate(waited)]
    assert turns == [(0, 8), (1, 8), (2, 8)]
    assert decide_tick([*rows, decode(3)], 99, limits).rows == ((0, 8), (3, 1))


def test_prompts_are_admitted_in_order_of_arrival() -> None:
    tick = decide_tick([waiting(2, 6), waiting(0, 6), waiting(1, 6)], 100, LIMITS)
    assert tick.rows == ((0, 6), (1, 6), (2, 4))


def test_the_newest_sequence_is_preempted_if_a_decode_row_gets_no_block() -> None:
    assert decide_tick([decode(0), decode(5), prefill(7, 9)], 0, LIMITS).preempt == 7


def test_a_prompt_is_admitted_only_if_it_fits_beside_the_blocks_promised_to_others() -> None:
    running = prefill(0, 24, length=4)  # needs 6 more blocks, 4 of them now
    assert dict(decide_tick([running, waiting(1, 8)], 7, LIMITS).rows) == {0: 16}
    limits = replace(LIMITS, tokens=64)
    assert dict(decide_tick([running, waiting(1, 8)], 8, limits).rows) == {0: 24, 1: 8}
    assert dict(decide_tick([running, waiting(1, 8)], 7, limits).rows) == {0: 24}


def test_a_small_request_may_overtake_a_large_one_until_that_has_aged() -> None:
    large, small = waiting(0, 400), waiting(1, 4)
    assert decide_tick([decode(9), large, small], 50, LIMITS).rows == ((9, 1), (1, 4))
    aged = large._replace(waited=LIMITS.aging_steps)
    assert decide_tick([decode(9), aged, small], 50, LIMITS).rows == ((9, 1),)


def test_many_decode_rows_starve_neither_a_prompt_nor_each_other() -> None:
    limits = Limits(tokens=4, sequences=64, block_size=4, aging_steps=3)
    rows = [decode(i) for i in range(12)] + [prefill(50, 30)]
    served = dict.fromkeys([c.order for c in rows], 0)
    for _ in range(120):
        tick = decide_tick(rows, 10_000, limits)
        chosen = dict(tick.rows)
        for order, tokens in chosen.items():
            served[order] += tokens
        rows = [c._replace(waited=0 if c.order in chosen else c.waited + 1) for c in rows]
    assert served[50] >= 30
    shares = [count for order, count in served.items() if order != 50]
    assert min(shares) > 0
    assert max(shares) - min(shares) <= max(shares) // 2


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_tokens_that_fit_is_the_inverse_of_blocks_needed(groups: int) -> None:
    limits = replace(LIMITS, groups=groups)
    for length in range(12):
        for available in range(5):
            for copies in (False, True):
                c = Candidate(0, True, False, 50, length, -(-length // 4), copies)
                fits = tokens_that_fit(c, available, limits)
                assert fits == 0 or blocks_needed(c, fits, limits) <= available
                assert blocks_needed(c, fits + 1, limits) > available
