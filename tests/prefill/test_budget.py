"""The budget of a request by its settings."""

from __future__ import annotations

from typing import Any

import pytest

from skim.config import AUTO_MASS, AUTO_RATIO, PrefillConfig
from skim.prefill.budget import SCORED_BESIDE_PINNED, beside_pinned, budget_of
from skim.prefill.select import Budget


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Budget(ratio=AUTO_RATIO, mass=AUTO_MASS)),
        ({"keep_ratio": 0.2}, Budget(ratio=0.2)),
        ({"keep_tokens": 700}, Budget(tokens=700)),
        ({"keep_mass": 0.5}, Budget(mass=0.5)),
    ],
)
def test_a_setting_decides_the_budget(settings: dict[str, Any], expected: Budget) -> None:
    assert budget_of(PrefillConfig(**settings)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep_tokens": 1000}, 512),  # 15.6 blocks
        ({"keep_ratio": 0.1}, 384),  # 12.5 blocks
        ({"keep_tokens": 6000}, SCORED_BESIDE_PINNED),
        ({"keep_tokens": 100}, 32),  # half of what the ends of the prompt leave
        ({}, round(AUTO_RATIO * 8000 / 2 / 32) * 32),
        ({"keep_mass": 0.5}, 0),
    ],
)
def test_half_of_a_budget_is_for_scores_within_limits(settings: dict[str, Any], expected: int) -> None:
    assert beside_pinned(PrefillConfig(**settings), 8000, 32, [range(7980, 8000)]) == expected


def test_the_question_and_the_ends_come_before_scores() -> None:
    config = PrefillConfig(keep_tokens=600, head_tokens=32, tail_tokens=32)
    assert beside_pinned(config, 8000, 32, [range(7980, 8000)]) == 288  # 9.4 blocks
    assert beside_pinned(config, 8000, 32, [range(7680, 8000)]) == 256  # 11 blocks of 18.75 come first
    assert beside_pinned(config, 8000, 32, [range(7000, 8000)]) == 0
