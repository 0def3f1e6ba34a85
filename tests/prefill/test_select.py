"""Selection, a pure function: pins first, then the best blocks within the budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.prefill.plan import Reason
from skim.prefill.scoring.scorer import run_to_completion
from skim.prefill.select import Budget, even_blocks, select_blocks

P, S, R, N = Reason.PINNED, Reason.SCORED, Reason.RESCUED, Reason.NEIGHBOUR
C, E = Reason.CONTINUED, Reason.EVEN
SHARES = st.floats(0.001, 1.0)
FEW_TIES = st.integers(0, 5).map(float) | st.floats(-10, 1e6, allow_subnormal=False)


@dataclass(frozen=True)
class Case:
    prompt_tokens: int = 40
    block_size: int = 4
    scores: tuple[float, ...] = (0.0,) * 10
    pinned: tuple[range, ...] = ()
    rescued: tuple[int, ...] = ()
    radius: int = 0
    min_scored_tokens: int = 0
    rescue_cap: float = 0.25
    beside_pinned: int = 0
    continued: frozenset[int] = frozenset()

    def select(self, budget: Budget) -> tuple[Reason | None, ...]:
        return run_to_completion(select_blocks(**vars(self), budget=budget))

    def size(self, block: int) -> int:
        return min(self.block_size, self.prompt_tokens - block * self.block_size)

    def tokens(self, reasons: tuple[Reason | None, ...], *of: Reason) -> int:
        return sum(self.size(b) for b, reason in enumerate(reasons) if reason in (of or tuple(Reason)))

    def rank(self, block: int) -> tuple[float, int, int]:
        """Sorts blocks, best first; those with the lowest score by their distance to a better one."""
        score, lowest = self.scores[block], min(self.scores)
        better = [abs(block - other) for other, one in enumerate(self.scores) if one > lowest]
        return (-score, min(better, default=0) if score == lowest else 0, block)

    @property
    def pinned_blocks(self) -> set[int]:
        return {token // self.block_size for tokens in self.pinned for token in tokens}

    @property
    def pinned_tokens(self) -> int:
        return sum(map(self.size, self.pinned_blocks))


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    block_size = draw(st.integers(1, 8))
    prompt_tokens = draw(st.integers(1, 120))
    blocks = -(-prompt_tokens // block_size)
    score = draw(st.sampled_from([st.sampled_from([0.0, 0.0, 0.0, 1.0, 2.0]), FEW_TIES]))
    ends = st.tuples(st.integers(0, prompt_tokens), st.integers(0, prompt_tokens))
    return Case(
        prompt_tokens=prompt_tokens,
        block_size=block_size,
        scores=tuple(draw(st.lists(score, min_size=blocks, max_size=blocks))),
        pinned=tuple(range(*sorted(pair)) for pair in draw(st.lists(ends, max_size=3))),
        rescued=tuple(draw(st.lists(st.integers(0, blocks - 1), max_size=6))),
        radius=fixed.get("radius", draw(st.integers(0, 3))),
        min_scored_tokens=draw(st.integers(0, 30)),
        beside_pinned=draw(st.sampled_from([0, 0, 9])),
        rescue_cap=draw(st.floats(0, 1)),
    )


TOKENS = SHARES.map(lambda x: Budget(ratio=x)) | st.integers(1, 130).map(lambda x: Budget(tokens=x))
BUDGETS = st.one_of(
    TOKENS,
    SHARES.map(lambda x: Budget(mass=x)),
    st.tuples(TOKENS, SHARES).map(lambda both: replace(both[0], mass=both[1])),
)


@given(cases(), BUDGETS)
def test_pins_are_always_kept_and_no_other_block_has_that_reason(case: Case, budget: Budget) -> None:
    reasons = case.select(budget)
    assert {block for block, reason in enumerate(reasons) if reason is P} == case.pinned_blocks


@given(cases(), BUDGETS)
def test_any_budget_keeps_blocks_beside_the_pins(case: Case, budget: Budget) -> None:
    reasons = case.select(budget)
    free = case.prompt_tokens - case.pinned_tokens
    assert case.tokens(reasons, S, R, N) >= min(free, max(1, case.min_scored_tokens))


@given(cases(), BUDGETS.filter(lambda budget: budget.ratio is not None or budget.tokens is not None))
def test_only_pins_and_the_minimum_exceed_the_budget(case: Case, budget: Budget) -> None:
    kept = case.tokens(case.select(budget))
    minimum = max(1, case.min_scored_tokens, case.beside_pinned) + case.block_size - 1
    assert kept <= max(budget.allowed(case.prompt_tokens), case.pinned_tokens + minimum)


@given(cases(), SHARES.map(lambda x: Budget(ratio=x)))
def test_the_budget_is_used(case: Case, budget: Budget) -> None:
    """The rest of the budget is too small for one more block."""
    reasons = case.select(budget)
    if None in reasons:
        assert case.tokens(reasons) > budget.allowed(case.prompt_tokens) - case.block_size


@given(cases(), st.sampled_from(["ratio", "tokens", "mass"]), st.data())
def test_a_larger_budget_keeps_the_blocks_of_a_smaller_one(
    case: Case, kind: str, data: st.DataObject
) -> None:
    amounts = st.integers(1, 130) if kind == "tokens" else SHARES
    small, large = sorted([data.draw(amounts), data.draw(amounts)])
    also = {"mass": data.draw(SHARES)} if kind != "mass" and data.draw(st.booleans()) else {}
    less, more = (case.select(Budget(**{kind: amount}, **also)) for amount in (small, large))
    for before, after in zip(less, more, strict=True):
        assert before is None or after == before


@given(cases(), BUDGETS, st.integers(0, 60))
def test_a_larger_minimum_keeps_the_blocks_of_a_smaller_one(case: Case, budget: Budget, more: int) -> None:
    less = case.select(budget)
    raised = replace(case, min_scored_tokens=case.min_scored_tokens + more).select(budget)
    assert all(after == before for before, after in zip(less, raised, strict=True) if before is not None)


@given(cases())
def test_a_ratio_of_one_keeps_all_blocks(case: Case) -> None:
    assert None not in case.select(Budget(ratio=1.0))
    assert None not in case.select(Budget(tokens=case.prompt_tokens))


@given(cases(radius=0), BUDGETS)
def test_no_skipped_block_scores_higher_than_a_scored_one(case: Case, budget: Budget) -> None:
    reasons = case.select(budget)
    scored = [case.rank(b) for b, reason in enumerate(reasons) if reason is S]
    skipped = [case.rank(b) for b, reason in enumerate(reasons) if reason is None]
    assert not scored or not skipped or max(scored) < min(skipped)


@given(cases(radius=0), BUDGETS)
def test_rescue_stays_inside_its_cap(case: Case, budget: Budget) -> None:
    reasons = case.select(budget)
    assert case.tokens(reasons, R) <= case.rescue_cap * case.tokens(reasons, R, S) + 1e-5
    assert {block for block, reason in enumerate(reasons) if reason is R} <= set(case.rescued)


@given(cases(), BUDGETS)
def test_every_neighbour_is_beside_a_chosen_block(case: Case, budget: Budget) -> None:
    reasons = case.select(budget)
    chosen = [block for block, reason in enumerate(reasons) if reason in (S, R)]
    for block, reason in enumerate(reasons):
        if reason is N:
            assert any(0 < abs(block - other) <= case.radius for other in chosen)


@given(cases(radius=0), SHARES)
def test_a_mass_budget_reaches_its_share_and_stops_there(case: Case, share: float) -> None:
    case = replace(case, min_scored_tokens=0, rescued=())
    reasons = case.select(Budget(mass=share))
    free = {b: max(case.scores[b], 0.0) for b in range(len(reasons)) if b not in case.pinned_blocks}
    kept = {b: mass for b, mass in free.items() if reasons[b] is not None}
    wanted = share * math.fsum(free.values())
    assert math.fsum(kept.values()) >= wanted * (1 - 1e-9)
    if len(kept) > 1:
        assert math.fsum(kept.values()) - min(kept.values()) < wanted * (1 + 1e-9)


@given(cases())
def test_a_mass_of_one_keeps_every_positive_score(case: Case) -> None:
    reasons = case.select(Budget(mass=1.0))
    assert all(reason is not None for reason, score in zip(reasons, case.scores, strict=True) if score > 0)


@given(cases(), BUDGETS)
def test_the_selection_is_a_prefix_of_the_whole_order(case: Case, budget: Budget) -> None:
    """Compared with a reference that sorts all blocks first and then takes them up to the budget."""
    pinned = case.pinned_blocks
    sizes = list(map(case.size, range(len(case.scores))))
    order = plain_order(case, sizes)
    enough = len(order)
    if budget.ratio is not None or budget.tokens is not None:
        left, enough = budget.allowed(case.prompt_tokens) - case.pinned_tokens, 0
        while enough < len(order) and sizes[order[enough][0]] <= left:
            left -= sizes[order[enough][0]]
            enough += 1
        bought = 0
        for place, (block, _) in enumerate(order):
            if bought < case.beside_pinned:
                bought, enough = bought + sizes[block], max(enough, place + 1)
    if budget.mass is not None:
        masses = [max(case.scores[block], 0.0) / len(sizes) for block, _ in order]
        missing = [0.0]
        for mass in reversed(masses):
            missing.insert(0, missing[0] + mass)
        reached = next(i for i, rest in enumerate(missing) if rest <= (1 - budget.mass) * missing[0])
        enough = min(enough, reached)
    expected: list[Reason | None] = [P if block in pinned else None for block in range(len(sizes))]
    bought = 0
    for place, (block, reason) in enumerate(order):
        if place < enough or bought < max(1, case.min_scored_tokens):
            expected[block] = reason
            bought += sizes[block]
    assert case.select(budget) == tuple(expected)


def plain_order(case: Case, sizes: list[int]) -> list[tuple[int, Reason]]:
    left = set(range(len(sizes))) - case.pinned_blocks
    rescued = [block for block in case.rescued if block in left]
    order: list[tuple[int, Reason]] = []
    spent = total = 0

    def group(block: int) -> list[int]:
        near = sorted(range(len(sizes)), key=lambda other: (abs(other - block), other))
        return [other for other in near if abs(other - block) <= case.radius and other in left]

    while left:
        rescued = [block for block in rescued if block in left]
        saved = group(rescued[0]) if rescued else []
        price = sum(sizes[block] for block in saved)
        if saved and spent + price <= case.rescue_cap * (total + price) + 1e-6:
            chosen, reason = saved, R
            spent += price
        else:
            best = min(left, key=case.rank)
            chosen, reason = group(best), S
        for place, block in enumerate(chosen):
            left.remove(block)
            total += sizes[block]
            order.append((block, reason if place == 0 else N))
    return order


def test_the_best_blocks_are_kept_and_ties_go_to_the_lower_index() -> None:
    case = Case(scores=(0, 5, 0, 7, 7, 5, 0, 5, 0, 0))
    assert case.select(Budget(tokens=16)) == (None, S, None, S, S, S, None, None, None, None)
    assert Case().select(Budget(tokens=12)) == (S, S, S, *[None] * 7)


def test_blocks_without_a_score_are_kept_near_those_with_one() -> None:
    case = Case(scores=(0, 0, 0, 0, 0, 0, 7, 0, 0, 0))
    assert case.select(Budget(tokens=16)) == (*[None] * 4, S, S, S, S, None, None)
    assert replace(case, scores=(*[0] * 9, 7)).select(Budget(tokens=12)) == (*[None] * 7, S, S, S)


@given(cases(), BUDGETS, st.sets(st.integers(0, 120)))
def test_a_block_with_a_neighbours_score_is_named_after_it(
    case: Case, budget: Budget, continued: set[int]
) -> None:
    """The same blocks are kept. Only blocks that were chosen for their score are renamed."""
    plain = case.select(budget)
    named = replace(case, continued=frozenset(continued)).select(budget)
    expected = (C if why is S and block in continued else why for block, why in enumerate(plain))
    assert named == tuple(expected)


def test_a_mass_stops_before_the_ratio_does_and_the_ratio_before_the_mass() -> None:
    case = Case(scores=(6, 3, 1, 0, 0, 0, 0, 0, 0, 0))
    assert case.select(Budget(ratio=0.8, mass=0.85)) == (S, S, *[None] * 8)
    assert case.select(Budget(ratio=0.1, mass=0.85)) == (S, *[None] * 9)
    assert case.select(Budget(ratio=0.8, mass=1.0)) == (S, S, S, *[None] * 7)
    assert replace(case, min_scored_tokens=16).select(Budget(ratio=0.1, mass=0.5)) == (
        S,
        S,
        S,
        S,
        *[None] * 6,
    )


@given(cases(), TOKENS, SHARES)
def test_two_limits_keep_no_more_than_either(case: Case, tokens: Budget, mass: float) -> None:
    both = case.select(replace(tokens, mass=mass))
    for alone in (case.select(tokens), case.select(Budget(mass=mass))):
        assert all(other == one for one, other in zip(both, alone, strict=True) if one is not None)


def test_the_budget_includes_the_pins() -> None:
    case = Case(scores=tuple(range(10)), pinned=(range(5), range(39, 40)))
    assert case.select(Budget(ratio=0.5)) == (P, P, None, None, None, None, None, S, S, P)


def test_with_pins_beyond_the_budget_the_minimum_is_still_kept() -> None:
    case = Case(scores=tuple(range(10)), pinned=(range(30),), min_scored_tokens=5)
    assert case.select(Budget(ratio=0.1)) == (*[P] * 8, S, S)
    assert replace(case, min_scored_tokens=4).select(Budget(ratio=0.1)) == (*[P] * 8, None, S)


def test_the_partial_last_block_costs_only_its_tokens() -> None:
    case = Case(prompt_tokens=37, scores=(5, 4, 3, 0, 0, 0, 0, 0, 0, 9))
    assert case.tokens(case.select(Budget(tokens=9))) == 9  # 1 in the last block, and two whole blocks
    assert case.tokens(case.select(Budget(tokens=8))) == 5


def test_selection_stops_at_the_first_block_that_does_not_fit() -> None:
    """Otherwise a budget of 5 would keep the small last block and a budget of 8 would not."""
    case = Case(prompt_tokens=37, scores=(9, 8, 0, 0, 0, 0, 0, 0, 0, 7))
    assert case.select(Budget(tokens=5)) == (S, *[None] * 9)
    assert case.select(Budget(tokens=9)) == (S, S, *[None] * 7, S)


def test_rescued_blocks_take_their_share_and_the_rest_is_scored() -> None:
    case = Case(scores=(9, 8, 7, 6, 5, 4, 0, 0, 0, 0), rescued=(9, 8, 7))
    assert case.select(Budget(tokens=16)) == (S, S, S, *[None] * 6, R)
    assert case.select(Budget(tokens=32)) == (S, S, S, S, S, S, None, None, R, R)
    assert replace(case, rescue_cap=0.0).select(Budget(tokens=16)) == (S, S, S, S, *[None] * 6)
    assert replace(case, rescue_cap=1.0).select(Budget(tokens=16)) == (S, *[None] * 6, R, R, R)


def test_a_block_that_scores_well_does_not_use_up_the_rescue() -> None:
    case = Case(scores=(9, 8, 7, 6, 5, 4, 0, 0, 0, 0), rescued=(0, 9))
    assert case.select(Budget(tokens=16)) == (S, S, S, *[None] * 6, R)


def test_neighbours_count_against_the_budget() -> None:
    case = Case(scores=(0, 0, 0, 9, 0, 0, 0, 8, 0, 0), radius=1)
    assert case.select(Budget(tokens=12)) == (None, None, N, S, N, *[None] * 5)
    assert case.select(Budget(tokens=20)) == (None, None, N, S, N, None, N, S, None, None)
    pinned = replace(case, pinned=(range(8, 12),))
    assert pinned.select(Budget(tokens=12)) == (None, None, P, S, N, *[None] * 5)


@pytest.mark.parametrize("rescued", [(), (9,)])
def test_a_radius_beyond_the_prompt_takes_no_longer_than_the_prompt(rescued: tuple[int, ...]) -> None:
    case = Case(scores=(0, 9, 0, 0, 0, 8, 0, 0, 0, 0), rescued=rescued, radius=9)
    for budget in (Budget(tokens=4), Budget(tokens=24), Budget(mass=0.5)):
        assert replace(case, radius=10**12).select(budget) == case.select(budget)


def test_neighbours_of_rescued_blocks_count_against_the_rescue_cap() -> None:
    case = Case(scores=(0, 9, 0, 0, 0, 8, 0, 0, 0, 0), rescued=(9,), radius=1)
    assert case.select(Budget(tokens=24)) == (N, S, N, None, N, S, N, None, None, None)
    assert case.select(Budget(tokens=32)) == (N, S, N, None, N, S, N, None, N, R)
    assert replace(case, rescue_cap=0.2).select(Budget(tokens=32)) == (N, S, N, S, N, S, N, S, None, None)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"scores": (0.0,) * 9}, "10 scores, got 9"),
        ({"scores": (math.nan,) * 10}, "block 0 is nan"),
        ({"scores": (*[0.0] * 9, -math.inf)}, "block 9 is -inf"),
        ({"pinned": (range(30, 41),)}, "40 tokens"),
        ({"pinned": (range(-1, 4),)}, "40 tokens"),
        ({"pinned": (range(0, 8, 2),)}, "40 tokens"),
        ({"rescued": (10,)}, "rescued block 10"),
        ({"rescued": (-1,)}, "rescued block -1"),
        ({"radius": -1}, "radius"),
        ({"rescue_cap": 1.5}, "rescue_cap"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_invalid_arguments_are_refused_by_name(change: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        replace(Case(), **change).select(Budget(ratio=0.5))


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({}, "none of them"),
        ({"ratio": 0.5, "tokens": 10}, "ratio, tokens"),
        ({"ratio": 0.5, "tokens": 10, "mass": 0.5}, "ratio, tokens, mass"),
    ],
    ids=str,
)
def test_a_budget_has_at_most_one_number_of_tokens(fields: dict[str, Any], got: str) -> None:
    with pytest.raises(ValueError, match=f"got {got}$"):
        Budget(**fields)


@pytest.mark.parametrize(
    ("budget", "prompt", "allowed"),
    [
        (Budget(ratio=0.1), 1000, 100),
        (Budget(ratio=0.29), 100, 29),  # 28.999999999999996 in floating point
        (Budget(ratio=0.1), 9, 0),
        (Budget(ratio=1.0), 7, 7),
        (Budget(tokens=50), 1000, 50),
        (Budget(tokens=50), 10, 10),
    ],
)
def test_tokens_allowed(budget: Budget, prompt: int, allowed: int) -> None:
    assert budget.allowed(prompt) == allowed


def test_a_mass_budget_has_no_number_of_tokens() -> None:
    with pytest.raises(ValueError, match="mass"):
        Budget(mass=0.5).allowed(100)


@given(cases(), st.integers(1, 130))
def test_even_blocks_are_spread_over_the_unpinned_ones(case: Case, most: int) -> None:
    reasons = even_blocks(case.prompt_tokens, case.block_size, case.pinned, most)
    assert {block for block, reason in enumerate(reasons) if reason is P} == case.pinned_blocks
    free = [block for block, reason in enumerate(reasons) if reason is not P]
    places = [index for index, block in enumerate(free) if reasons[block] is E]
    steps = [b - a for a, b in pairwise(places)]
    assert max(steps, default=0) - min(steps, default=0) <= 1
    if places:
        before, after = places[0], len(free) - 1 - places[-1]
        assert abs(before - after) <= 1
        assert max(before, after) <= max(steps, default=len(free))


@given(cases(), st.integers(1, 130))
def test_even_blocks_use_their_budget_and_no_more(case: Case, most: int) -> None:
    reasons = even_blocks(case.prompt_tokens, case.block_size, case.pinned, most)
    kept = case.tokens(reasons)
    assert kept <= max(most, case.pinned_tokens + case.block_size)
    assert None not in reasons or E in reasons
    assert None not in reasons or kept > most - 2 * case.block_size


@given(cases())
def test_even_blocks_of_a_whole_budget_are_all_blocks(case: Case) -> None:
    assert None not in even_blocks(case.prompt_tokens, case.block_size, case.pinned, case.prompt_tokens)


def test_even_blocks_of_a_long_text() -> None:
    assert even_blocks(40, 4, (range(2), range(39, 40)), 16) == (
        P,
        None,
        None,
        E,
        None,
        None,
        None,
        E,
        None,
        P,
    )
    assert even_blocks(40, 4, (range(36),), 16) == (*[P] * 9, E)  # at least one


def test_pinned_blocks_leave_a_part_of_the_budget_to_scores_while_mass_is_missing() -> None:
    case = Case(scores=(0, 0, 0, 0, 0, 0, 1, 9, 40, 50), pinned=(range(24),), beside_pinned=8)
    assert case.select(Budget(ratio=0.1)) == (*[P] * 6, None, None, S, S)
    assert case.select(Budget(ratio=0.1, mass=0.97)) == (*[P] * 6, None, None, S, S)
    assert case.select(Budget(ratio=0.1, mass=0.4)) == (*[P] * 6, None, None, None, S)
    assert replace(case, beside_pinned=0).select(Budget(ratio=0.1, mass=0.97)) == (*[P] * 6, *[None] * 3, S)
