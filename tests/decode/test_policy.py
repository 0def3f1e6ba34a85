"""When a decode step is slow: reasons, gaps and controls, as pure functions."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from skim.attention.glance import RECENT, picks_of
from skim.config import DecodeConfig, EngineConfig
from skim.decode.policy import LEAST_GAP, Pulse, Refresh, glance_of, refresh_reason
from skim.decode.sentences import SentenceEnds, ends_sentence
from skim.decode.stats import DecodeStats
from skim.errors import ConfigError
from skim.measure.modes import FastOnly, RefreshOnly

ON = DecodeConfig(slow_fast="on", decode_budget=512, refresh_interval=32, refresh_mass=0.4)


def test_the_first_step_is_slow_and_then_one_in_each_interval() -> None:
    pulse, slow = Pulse(), []
    for length in range(1000, 1100):
        reason = refresh_reason(pulse, length, ON)
        if reason is not None:
            slow.append((length, reason))
            pulse = pulse.slow(length)
        pulse = pulse.read(length, ends_sentence=False, mass=1.0)
    firsts = [(1000, Refresh.FIRST), (1032, Refresh.INTERVAL), (1064, Refresh.INTERVAL)]
    assert slow == [*firsts, (1096, Refresh.INTERVAL)]


@pytest.mark.parametrize(
    ("ends", "mass", "reason"),
    [(True, 1.0, Refresh.SENTENCE), (False, 0.39, Refresh.MASS), (False, 0.4, None)],
)
def test_a_sentence_or_a_low_mass_acts_once_a_few_tokens_have_passed(
    ends: bool, mass: float, reason: Refresh | None
) -> None:
    pulse = Pulse().slow(100)
    pulse = pulse.read(101, ends_sentence=ends, mass=mass)
    assert refresh_reason(pulse, 102, ON) is None
    assert refresh_reason(pulse, 100 + LEAST_GAP, ON) is reason
    assert refresh_reason(pulse.slow(108), 116, ON) is None  # a slow step settles it
    later = pulse.read(102, ends_sentence=False, mass=1.0)
    assert refresh_reason(later, 100 + LEAST_GAP, ON) is reason
    if reason is Refresh.MASS:
        assert refresh_reason(pulse, 100 + LEAST_GAP, replace(ON, refresh_mass=0.0)) is None


def test_a_doubt_acts_at_once_until_a_slow_step() -> None:
    pulse = Pulse().slow(100).doubt()
    assert refresh_reason(pulse, 101, ON) is Refresh.MARGIN
    assert refresh_reason(pulse, 100 + 32, ON) is Refresh.MARGIN
    assert refresh_reason(pulse.read(101, ends_sentence=True, mass=0.0), 102, ON) is Refresh.MARGIN
    assert refresh_reason(pulse.slow(101), 102, ON) is None
    assert refresh_reason(Pulse().doubt(), 101, ON) is Refresh.FIRST
    assert refresh_reason(pulse, 101, FastOnly(slow_fast="on")) is None


@pytest.mark.parametrize(
    ("slow_fast", "least"), [("off", 0.0), ("auto", 0.3), ("on", 0.3), ("exact", math.inf)]
)
def test_only_greedy_tokens_of_fast_steps_have_a_least_margin(slow_fast: str, least: float) -> None:
    config = DecodeConfig(slow_fast=slow_fast, refresh_margin=0.3)
    assert config.least_margin(greedy=True) == least
    assert config.least_margin(greedy=False) == (math.inf if slow_fast == "exact" else 0.0)
    assert FastOnly(slow_fast="on", refresh_margin=0.3).least_margin(greedy=True) == 0.0


def test_results_of_steps_before_a_slow_step_do_not_count() -> None:
    pulse = Pulse().slow(100).read(99, ends_sentence=True, mass=0.0)
    assert pulse == Pulse(100)
    assert pulse.read(100, ends_sentence=False, mass=0.0).mass == 1.0  # no estimate of a slow step
    assert pulse.read(100, ends_sentence=True, mass=1.0).sentence  # but its token may end a sentence


def test_every_step_is_slow_with_an_interval_of_one() -> None:
    each = DecodeConfig(slow_fast="on", refresh_interval=1)
    assert refresh_reason(Pulse().slow(100), 101, each) is Refresh.INTERVAL


def test_everything_since_the_last_slow_step_is_always_read() -> None:
    generator = random.Random(1)
    for _ in range(300):
        slow_at, since = generator.randrange(1, 9000), generator.randrange(1, 900)
        length, block_size = slow_at + since, generator.choice([1, 4, 16, 64])
        config = DecodeConfig(slow_fast="on", decode_budget=generator.randrange(1, 3000))
        glance = glance_of(Pulse().slow(slow_at), length, config, block_size, 1.5)
        assert glance.candidates == 1.5
        picks = picks_of(glance, length, block_size)
        assert picks.recent * block_size <= max(0, length - max(since, RECENT))
        control = glance_of(Pulse().slow(slow_at), length, RefreshOnly(**vars(config)), block_size, 1.5)
        positional = picks_of(control, length, block_size)
        assert positional.best == positional.compares == 0
        assert positional.reads == picks.reads  # the same budget


def test_keys_are_compared_where_the_device_has_a_kernel() -> None:
    assert DecodeConfig().candidates(on_gpu=False) == 1.5
    assert DecodeConfig().candidates(on_gpu=True) == 1
    assert DecodeConfig(decode_candidates=1).candidates(on_gpu=True) == 1
    assert DecodeConfig(decode_candidates=4).candidates(on_gpu=False) == 4
    with pytest.raises(ConfigError, match=r"decode_candidates must be 1 on a GPU, got 1\.5"):
        DecodeConfig(decode_candidates=1.5).candidates(on_gpu=True)


def test_a_fast_only_control_has_no_slow_step_but_the_first() -> None:
    control = FastOnly(**vars(ON))
    assert refresh_reason(Pulse(), 1000, control) is Refresh.FIRST
    pulse = Pulse().slow(1000).read(1001, ends_sentence=True, mass=0.0)
    assert refresh_reason(pulse, 5000, control) is None


@pytest.mark.parametrize(
    ("slow_fast", "context", "applies"),
    [
        ("off", 10**6, False),
        ("on", 512, False),
        ("on", 513, True),
        ("auto", 4095, False),
        ("auto", 4096, True),
    ],
)
def test_slow_fast_decode_applies_to_long_contexts(slow_fast: str, context: int, applies: bool) -> None:
    config = DecodeConfig(slow_fast=slow_fast, decode_budget=512, slow_fast_min_context=4096)
    assert config.applies(context) is applies


@pytest.mark.parametrize(
    ("piece", "ends"),
    [
        (".", True),
        (" end.", True),
        ('?"', True),
        ("!\n", True),
        ("\u3002", True),
        ("\n\n", True),
        ("\n", False),
        (",", False),
        (" Mr", False),
        (".5", False),
        ("", False),
    ],
)
def test_pieces_that_end_a_sentence(piece: str, ends: bool) -> None:
    assert ends_sentence(piece) is ends


def test_a_token_is_decoded_once() -> None:
    seen: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        seen.append(ids)
        return "." if ids == [7] else "a"

    ends = SentenceEnds(decode)
    assert [ends(7), ends(8), ends(7), ends(8)] == [True, False, True, False]
    assert seen == [[7], [8]]


def test_a_token_without_a_text_ends_no_sentence() -> None:
    def decode(tokens: list[int]) -> str:
        raise ValueError(f"no text for {tokens}")

    assert not SentenceEnds(decode)(7)


def test_counts_are_json_data() -> None:
    stats = DecodeStats(1, 3, 40, 20, Counter(first=1), 1.5, 2, 8, 7)
    assert json.loads(json.dumps(stats.copy().as_json())) == {
        "slow": 1,
        "fast": 3,
        "blocks": 40,
        "blocks_read": 20,
        "refreshes": {"first": 1},
        "mean_mass": 0.75,
        "drafted": 8,
        "accepted": 7,
    }


def test_counts_in_words() -> None:
    assert DecodeStats(slow=10, fast=30).in_words() == "30 fast steps of 40"
    assert DecodeStats(slow=10, fast=30, drafted=30, accepted=25).in_words() == "25 of 30 drafts accepted"


def test_blocks_with_summaries_on_a_gpu_are_powers_of_two() -> None:
    config = EngineConfig.of(slow_fast="on", block_size=48)
    assert config.block_size(on_gpu=False) == 48
    with pytest.raises(ConfigError, match="power of two"):
        config.block_size(on_gpu=True)
    assert EngineConfig.of(slow_fast="on").block_size(on_gpu=True) == 64
