"""The pure decisions about residency: memory by policy, the policy of `auto`, and whose turn it is."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.engine.turns import (
    BOTH,
    DRAFTER,
    KEEP_TARGET,
    POLICIES,
    ROLES,
    STAY,
    SWAP,
    TARGET,
    Demand,
    Sizes,
    Turn,
    choose_policy,
    decide_turn,
)

GIB = 2**30
EIGHT = Sizes(target=16 * GIB, drafter=2 * GIB, table=GIB, step=3 * GIB, scoring=2 * GIB)
size = st.integers(0, 2**40)


@pytest.mark.parametrize(
    ("policy", "kept", "peak"),
    [(BOTH, 18, 3), (KEEP_TARGET, 16, 4), (SWAP, 0, 19)],  # in GiB
)
def test_memory_by_policy(policy: str, kept: int, peak: int) -> None:
    assert (EIGHT.kept(policy), EIGHT.peak(policy)) == (kept * GIB, peak * GIB)


@given(size, size, size, size, size)
def test_later_policies_need_no_more_memory(
    target: int, drafter: int, table: int, step: int, scoring: int
) -> None:
    sizes = Sizes(target, drafter, min(table, target), step, scoring)
    both, keep, swap = (sizes.kept(policy) + sizes.peak(policy) for policy in POLICIES)
    assert both >= keep >= swap
    assert swap >= max(target + step, drafter + scoring)


@pytest.mark.parametrize(
    ("rooms", "chosen", "why"),
    [
        ((5, 6, 8), BOTH, r"leaves 5.00 GiB for keys and values, and one sequence .* takes 4.00 GiB$"),
        ((4, 6, 8), BOTH, "leaves 4.00 GiB"),
        ((3, 6, 8), KEEP_TARGET, "leaves 6.00 GiB.*; both would leave 3.00 GiB"),
        ((-1, 3, 8), SWAP, r"; both would leave 0.0 MiB; keep-target would leave 3.00 GiB"),
        ((1, 2, 3), SWAP, "no policy has room for one sequence .*most for keys and values: 3.00 GiB"),
        ((2, 2, 2), BOTH, "no policy has room"),
        ((-3, -2, -2), KEEP_TARGET, "no policy has room"),
    ],
)
def test_auto_takes_the_fastest_policy_that_has_room(
    rooms: tuple[int, int, int], chosen: str, why: str
) -> None:
    found, reason = choose_policy(
        {policy: room * GIB for policy, room in zip(POLICIES, rooms, strict=True)}, 4 * GIB
    )
    assert found == chosen
    assert re.search(why, reason)


def test_turns_as_a_table() -> None:
    both, target = Turn(frozenset(ROLES)), Turn(frozenset({TARGET}))
    assert not STAY.rows
    assert not STAY.is_visit
    visits = {KEEP_TARGET: Turn(frozenset(ROLES), rows=False), SWAP: Turn(frozenset({DRAFTER}), rows=False)}
    for values in itertools.product([False, True], repeat=5):
        demand = Demand(*values)
        assert decide_turn(BOTH, demand) == (both if demand.visitors else target)
        begins = demand.visitors and not demand.undecided and (demand.rested or not demand.target)
        for policy, visit in visits.items():
            rest = STAY if policy == SWAP and demand.undecided and not demand.target else target
            assert decide_turn(policy, demand) == (visit if demand.visiting or begins else rest)


def test_a_steady_load_of_prompts_leaves_the_target_half_of_the_time() -> None:
    """Simulated: a prompt always waits, and a visit takes three times as long as a step."""
    now, rest_until, began, visiting = 0.0, 0.0, 0.0, 0
    time_of = {TARGET: 0.0, DRAFTER: 0.0}
    for _ in range(1000):
        demand = Demand(True, visiting > 0, undecided=False, target=True, rested=now >= rest_until)
        if decide_turn(SWAP, demand).is_visit:
            if not visiting:
                began, visiting = now, 3
            visiting -= 1
            role = DRAFTER
        else:
            role = TARGET
        time_of[role] += 1
        now += 1
        if role == DRAFTER and not visiting:
            rest_until = 2 * now - began
    assert abs(time_of[TARGET] - time_of[DRAFTER]) <= 3
