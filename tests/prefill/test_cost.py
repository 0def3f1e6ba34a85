"""The part of a prompt that a scoring model may read: all of it, or what the saved time pays for."""

from __future__ import annotations

from typing import Any

import pytest

from skim.models.forwards import lean
from skim.models.forwards.eight_bits import EightBitOps
from skim.models.forwards.few_tokens import PLAIN
from skim.prefill.scoring.cost import CPU_TOKENS, EIGHT_BITS, GPU_TOKENS, Cost
from skim.prefill.scoring.scorer import ScoringTask
from tests import tiny


def task(tokens: int, budget: float) -> ScoringTask:
    return ScoringTask((0,) * tokens, (range(tokens - 1, tokens),), 32, scoring_budget=budget)


@pytest.mark.parametrize(
    ("per_token", "budget", "tokens", "most"),
    [
        (0.5, 0.2, 1000, 400),
        (0.1, 0.2, 1000, 2000),  # all of it, twice
        (2.0, 0.2, 1000, 100),  # the drafter is larger than the target
        (0.1, 0.5, 20_000, CPU_TOKENS),
        (0.1, 1.0, 20_000, 20_000),
        (50.0, 1.0, 20_000, 20_000),
    ],
)
def test_on_a_cpu_the_saved_time_is_the_limit(
    per_token: float, budget: float, tokens: int, most: int
) -> None:
    assert Cost(per_token, on_gpu=False).most_tokens(task(tokens, budget)) == most


@pytest.mark.parametrize(
    ("budget", "tokens", "most"),
    [(0.01, 1000, GPU_TOKENS), (0.5, 3 * GPU_TOKENS, 3 * GPU_TOKENS // 2), (1.0, 1000, 1000)],
)
def test_a_gpu_reads_at_least_a_long_prompt(budget: float, tokens: int, most: int) -> None:
    assert Cost(1.0, on_gpu=True).most_tokens(task(tokens, budget)) == most


@pytest.fixture(scope="module")
def module() -> Any:
    return tiny.with_our_attention("llama")


def test_the_cost_is_that_of_the_layers_that_run(module: Any) -> None:
    costs = [Cost.of(module, module, layers) for layers in range(1, 5)]
    assert [cost.per_token for cost in costs] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.01)
    assert not any(cost.on_gpu for cost in costs)


def test_a_small_drafter_costs_less(module: Any) -> None:
    large = tiny.with_our_attention("gpt_oss")
    assert Cost.of(large, module, 4).per_token < 1 < Cost.of(module, large, 4).per_token


@pytest.mark.parametrize(("budget", "tokens", "most"), [(0.2, 1000, 800), (0.5, 90_000, 2 * CPU_TOKENS)])
def test_a_model_that_reads_twice_as_fast_reads_twice_as_much(budget: float, tokens: int, most: int) -> None:
    assert Cost(0.5, on_gpu=False, speed=2.0).most_tokens(task(tokens, budget)) == most


def test_lean_layers_read_faster_where_products_are_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny.with_our_attention("llama")
    monkeypatch.setattr(lean, "for_ranking", EightBitOps)
    assert Cost.of(module, module, 4).speed == 1.0
    assert lean.lean_layers(module) > 0
    assert Cost.of(module, module, 4).speed == EIGHT_BITS
    monkeypatch.setattr(lean, "for_ranking", lambda: PLAIN)
    assert Cost.of(module, module, 4).speed == 1.0
