"""The part of a prompt that a scoring model may read: all of it, or what the saved time pays for."""

from __future__ import annotations

from typing import Any

import pytest

from skim.models.forwards import lean
from skim.models.forwards.eight_bits import EightBitOps
from skim.models.forwards.few_tokens import PLAIN
from skim.prefill.scoring.cost import (
    CPU_LEAST,
    CPU_TOKENS,
    CPU_WHOLE,
    EIGHT_BITS,
    GPU_TOKENS,
    Cost,
)
from skim.prefill.scoring.scorer import ScoringTask
from skim.prefill.scoring.windows import weights_read
from tests import tiny


def task(tokens: int, budget: float) -> ScoringTask:
    return ScoringTask((0,) * tokens, (range(tokens - 1, tokens),), 32, scoring_budget=budget)


@pytest.mark.parametrize(
    ("per_token", "budget", "tokens", "most"),
    [
        (0.5, 0.2, 10_000, 4000),
        (0.1, 0.2, 10_000, 10_000),  # twice as many could be paid for
        (2.0, 0.3, 18_000, 2700),  # the drafter is larger than the target
        (2.0, 0.2, 10_000, CPU_LEAST),
        (2.0, 0.2, 1000, 1000),
        (0.1, 0.5, CPU_WHOLE, CPU_WHOLE),
        (0.1, 0.5, CPU_WHOLE + 1, CPU_TOKENS),
        (0.5, 0.1, 30_000, 6000),
        (0.1, 1.0, 20_000, 20_000),
        (50.0, 1.0, 20_000, 20_000),
    ],
)
def test_on_a_cpu_the_saved_time_is_the_limit(
    per_token: float, budget: float, tokens: int, most: int
) -> None:
    assert Cost(per_token, on_gpu=False).most_tokens(task(tokens, budget)) == most


def test_attention_makes_a_long_prompt_cheaper_to_skim() -> None:
    """With a thousandth of a token's products for each key, 6,000 tokens cost four times their products."""
    cost = Cost(0.5, on_gpu=False, per_key=0.001)
    assert [cost.most_tokens(task(tokens, 0.1)) for tokens in (6000, 10_000, 12_000)] == [
        4800,
        10_000,
        12_000,
    ]


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
    config = module.config
    weights = weights_read(module, config.num_hidden_layers)
    keys = 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    assert {cost.per_key for cost in costs} == {keys / weights}


def test_keys_count_in_layers_without_a_sliding_window() -> None:
    module = tiny.with_our_attention("gemma3")
    config = module.config.get_text_config()
    full = config.layer_types.count("full_attention")
    assert 0 < full < config.num_hidden_layers
    keys = 2 * config.num_attention_heads * config.head_dim * full
    assert Cost.of(module, module, 1).per_key == keys / weights_read(module, config.num_hidden_layers)


def test_a_small_drafter_costs_less(module: Any) -> None:
    large = tiny.with_our_attention("gpt_oss")
    assert Cost.of(large, module, 4).per_token < 1 < Cost.of(module, large, 4).per_token


@pytest.mark.parametrize(("budget", "tokens", "most"), [(0.2, 10_000, 8000), (0.5, 90_000, 2 * CPU_TOKENS)])
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
