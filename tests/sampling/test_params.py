"""SamplingParams are valid once constructed; errors name the field, the value and the allowed range."""

import dataclasses
import math

import pytest

from skim.errors import RequestError
from skim.sampling import SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = [
    *[("n", v) for v in (0, -1, True, 1.0, "2", None)],
    *[("temperature", v) for v in (-0.1, NAN, INF, True, "1", None, 10**400)],
    *[("top_p", v) for v in (0, 0.0, -0.5, 1.01, NAN, INF, True, None)],
    *[("top_k", v) for v in (-2, 1.5, True, None)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN, INF, False)],
    *[("seed", v) for v in (1.0, True, 2**64, -(2**63) - 1, "7")],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, INF, True)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, -INF, None)],
    *[("repetition_penalty", v) for v in (0, -1.0, 1e-300, 1e300, NAN, INF, True)],
    *[("logit_bias", v) for v in ([1], {"1": 1.0}, {-1: 1.0}, {True: 1.0})],
    *[("logit_bias", v) for v in ({1: 100.5}, {1: NAN}, {1: -INF}, {1: "x"}, {1: True})],
    *[("logprobs", v) for v in (-1, 21, True, 1.0)],
    *[("stop", v) for v in ("", [""], ["a", ""], [1], 7, {"a"})],
    *[("stop_token_ids", v) for v in ("12", [-1], [1.0], [True], 7)],
    *[("shown_special_tokens", v) for v in ("12", [-1], [1.0], [True], 7)],
    *[("ignore_eos", v) for v in (1, None, "yes")],
    *[("min_tokens", v) for v in (-1, True, 1.0)],
    *[("priority", v) for v in (-101, 101, True, 1.0, "high")],
    *[("max_tokens", v) for v in (-1, True, 2.0)],
    *[("prompt_logprobs", v) for v in (-1, 21, True, 1.0)],
    *[("allowed_token_ids", v) for v in ("12", [-1], [1.0], [True], 7)],
    *[("bad_words", v) for v in ("word", [""], [" "], [1], 7)],
    *[("include_stop_str_in_output", v) for v in (0, "no")],
    *[("skip_special_tokens", v) for v in (1, None)],
    *[("grammar", v) for v in ("json", {"type": "object"}, 7)],
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:24])
def test_an_invalid_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.fields == (name,)
    message = str(caught.value)
    assert name in message
    assert "must" in message
    inner = next(iter(value.items())) if isinstance(value, dict) and value else value
    parts = inner if isinstance(inner, (list, tuple)) else [inner]
    assert any(repr(part)[:40] in message for part in parts) or repr(value) in message


def test_every_field_is_covered_by_a_refusal() -> None:
    assert {name for name, _ in REFUSED} == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_p": 1},
        {"min_p": 1},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"max_tokens": None, "min_tokens": 10_000},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": {0: -100, 5: 100}},
        {"repetition_penalty": 0.5},
        {"n": 3, "temperature": 0.0},
    ],
)
def test_boundary_values_are_accepted(settings: dict[str, object]) -> None:
    params = SamplingParams(**settings)
    assert {name: getattr(params, name) for name in settings} == settings


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens.*max_tokens \(16\).*17") as caught:
        SamplingParams(min_tokens=17)
    assert caught.value.fields == ("min_tokens", "max_tokens")


def test_stops_are_kept_as_tuples() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_the_bias_is_a_copy() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 500.0
    assert params.logit_bias == {1: 1.0}


def test_params_can_be_replaced_but_not_changed() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1])
    assert dataclasses.replace(params, seed=3) == SamplingParams(stop="x", stop_token_ids=(1,), seed=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"logit_bias": {9: 1.0}}, "logit_bias"), ({"stop_token_ids": [9]}, "stop_token_ids")],
)
def test_token_ids_are_checked_against_the_vocabulary(settings: dict[str, object], name: str) -> None:
    params = SamplingParams(**settings)
    params.check_vocab(10)
    with pytest.raises(RequestError, match=rf"{name}.*9.*0 to 8") as caught:
        params.check_vocab(9)
    assert caught.value.fields == (name,)
