"""How many tokens are drafted, and which drafts are accepted."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from skim.decode.drafts import MOST, SLOW, Acceptance, count_accepted, yield_of

tokens = st.lists(st.integers(0, 3), max_size=MOST)


@given(tokens, tokens, st.integers(0, 3))
def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn(
    drafts: list[int], drawn: list[int], last: int
) -> None:
    drawn = [*(drawn + drafts)[: len(drafts)], last]
    accepted = count_accepted(drafts, drawn)
    assert drafts[:accepted] == drawn[:accepted]
    assert accepted == len(drafts) or drafts[accepted] != drawn[accepted]


def test_the_number_of_drafts_grows_with_the_share_that_is_accepted() -> None:
    found = [Acceptance(accepted, 1000).drafts for accepted in range(1001)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, MOST)


@given(st.lists(st.booleans(), max_size=40))
def test_a_rate_is_a_share_whatever_was_seen(rounds: list[bool]) -> None:
    seen = Acceptance()
    for full in rounds:
        drafted = seen.drafts
        seen = seen.after(drafted, drafted if full else 0)
        assert 0 <= seen.rate <= 1
        assert 1 <= seen.drafts <= MOST


def test_rounds_settle_near_the_best_number_for_any_chance() -> None:
    rng = random.Random(0)
    for chance in (0.3, 0.6, 0.8, 0.9, 0.95):
        seen, written, cost = Acceptance(), 0, 0.0
        for _ in range(4000):
            drafted = seen.drafts
            accepted = next((n for n in range(drafted) if rng.random() >= chance), drafted)
            seen = seen.after(drafted, accepted)
            written += accepted + 1
            cost += drafted + SLOW
        best = max(yield_of(chance, count) / (count + SLOW) for count in range(1, MOST + 1))
        assert written / cost > 0.93 * best
