"""Error messages show the beginning of a long value and its length, and take no longer for it."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim.config import EngineConfig, PrefillConfig, ServerConfig
from skim.errors import ConfigError, RequestError, shown, with_names
from skim.sampling.params import SamplingParams
from skim.server.errors import ApiError

LONG = "x" * 10_000_000
MOST = 120  # characters of a shown value, with its length

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=60,
)


@given(values)
def test_any_value_is_shown_shortly(value: Any) -> None:
    assert len(shown(value)) <= MOST
    assert "\n" not in shown(value)


@pytest.mark.parametrize("value", ["text", 7, -1.5, None, True, ["a", 1], {"a": [1]}, float("nan")])
def test_short_values_are_shown_whole(value: Any) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (LONG, "(10,000,000 characters)"),
        (LONG.encode(), "(10,000,000 bytes)"),
        ([1] * 5_000_000, "(5,000,000 items)"),
        ({str(i): i for i in range(100_000)}, "(100,000 items)"),
        (10 ** (sys.get_int_max_str_digits() + 10), "whole number of 14,3"),
        ([[LONG] * 1000] * 1000, "(1,000 items)"),
    ],
    ids=["text", "bytes", "list", "object", "number", "nested"],
)
def test_long_values_are_cut_and_their_length_is_stated(value: Any, size: str) -> None:
    began = time.perf_counter()
    text = shown(value)
    assert time.perf_counter() - began < 5
    assert size in text
    assert len(text) <= MOST


def test_names_are_not_quoted() -> None:
    assert shown("messages[0]", quoted=False) == "messages[0]"
    assert shown(LONG, quoted=False).startswith("xxx")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(temperature=LONG),  # type: ignore[arg-type]
        lambda: SamplingParams(n=-(10**5000)),
        lambda: SamplingParams(stop=[LONG, 1]),  # type: ignore[list-item]
        lambda: SamplingParams(seed=10**5000),
        lambda: PrefillConfig(scorer=LONG),
        lambda: PrefillConfig(keep_tokens=-(10**5000)),
        lambda: ServerConfig(max_body_size=LONG),
        lambda: ServerConfig(log_level=LONG),
        lambda: EngineConfig.of(**{LONG: 1}),
        lambda: EngineConfig.of(device=LONG),
    ],
)
def test_no_message_repeats_a_long_value(make: Any) -> None:
    with pytest.raises((ConfigError, RequestError)) as refused:
        make()
    assert len(str(refused.value)) < 2500


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("keep_ratio must be low, got 'keep_ratio'", "--keep-ratio must be low, got 'keep_ratio'"),
        ("keep and keep_ratio are both set", "SKIM_KEEP and --keep-ratio are both set"),
        ("the model's keep_ratio, skim.keep_ratio", "the model's --keep-ratio, skim.keep_ratio"),
        ("raise `keep` to keep more", "raise `SKIM_KEEP` to keep more"),
        ("keep_ratios are kept", "keep_ratios are kept"),
        ("keep files of this size", "keep files of this size"),
        ("keep 'most' is unknown", "SKIM_KEEP 'most' is unknown"),
        ("/data/keep_ratio/x.gguf is missing", "/data/keep_ratio/x.gguf is missing"),
        ("a/keep_ratio.toml: set keep_ratio.", "a/keep_ratio.toml: set --keep-ratio."),
    ],
)
def test_fields_go_by_the_names_that_the_user_wrote(message: str, expected: str) -> None:
    names = {"keep": "SKIM_KEEP", "keep_ratio": "--keep-ratio"}
    assert with_names(message, names) == expected
    assert with_names(expected, names) == expected
    assert with_names(message, {}) == message


def test_a_message_that_is_long_all_the_same_is_cut() -> None:
    assert len(ApiError(400, LONG).message) < 2100
    assert "(10,000,000 characters)" in str(RequestError(LONG))
