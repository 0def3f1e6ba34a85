"""Per-request options derive from `PrefillConfig` and `DecodeConfig`, and errors name the field at fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import ValidationError

from skim.cli.settings.fields import settings_of
from skim.config import BUDGETS, DecodeConfig, PrefillConfig
from skim.config.declare import Declared, Limits, declared, field_docs
from skim.engine.admission import check_slow_fast
from skim.errors import PromptTooLongError, RequestError
from skim.prefill import scorers
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams
from skim.server.errors import from_skim
from skim.server.options import SkimOptions, decode_of, overridable, overrides, prefill_of

every_override = pytest.mark.parametrize("one", overridable(PrefillConfig), ids=lambda one: one.name)


def options(**given: Any) -> SkimOptions:
    """Options as a client sends them."""
    return SkimOptions.model_validate_json(json.dumps(given))


def other_value(one: Declared) -> Any:
    """A valid value other than the default."""
    if one.choices is not None:
        return next(choice for choice in one.choices if choice != one.default)
    [kind] = one.types
    return {bool: not one.default, int: 999, float: 0.5, str: "some text"}[kind]


@every_override
def test_every_prefill_setting_has_an_option_that_overrides_it(one: Declared) -> None:
    value = other_value(one)
    server = PrefillConfig()
    assert getattr(server, one.name) != value
    assert prefill_of(options(**{one.name: value}), server) == dataclasses.replace(
        server, **{one.name: value}
    )


@every_override
def test_the_schema_has_the_limits_and_help_of_the_setting(one: Declared) -> None:
    schema = SkimOptions.model_json_schema()["properties"][one.name]
    [allowed] = [variant for variant in schema["anyOf"] if variant["type"] != "null"]
    [kind] = one.types
    assert allowed.pop("type") == {int: "integer", float: "number", str: "string", bool: "boolean"}[kind]
    choices = list(one.choices) if one.choices is not None else []
    limits = {
        "enum": choices if len(choices) > 1 else None,
        "const": choices[0] if len(choices) == 1 else None,
        "minimum": one.limits.at_least,
        "exclusiveMinimum": one.limits.above,
        "maximum": one.limits.at_most,
    }
    assert allowed == {name: value for name, value in limits.items() if value is not None}
    assert schema["description"] == field_docs(PrefillConfig)[one.name]


def test_only_the_drafter_cannot_be_set_per_request() -> None:
    settings = {one.name for one in declared(PrefillConfig)}
    drafter = {"drafter", "drafter_dtype", "drafter_quantization"}
    assert settings - SkimOptions.model_fields.keys() == drafter
    others = {"cache_salt", "use_prefix_cache", "control_tokens", "report", "progress"}
    decode = {one.name for one in declared(DecodeConfig)}
    assert SkimOptions.model_fields.keys() - settings == others | decode


def test_every_decode_setting_has_an_option_that_overrides_it() -> None:
    server = DecodeConfig(slow_fast="auto")
    for one in declared(DecodeConfig):
        value = "on" if one.name == "slow_fast" else 1.0 if float in one.types else 7
        found = decode_of(options(**{one.name: value}), server)
        assert found == dataclasses.replace(server, **{one.name: value})
    assert decode_of(options(keep_ratio=0.5), server) is None
    assert decode_of(None, server) is None


def test_only_the_engine_refuses_slow_fast_decode_that_it_did_not_start_with() -> None:
    wanted = decode_of(options(slow_fast="on", decode_budget=64), DecodeConfig())
    assert wanted == DecodeConfig(slow_fast="on", decode_budget=64)
    with pytest.raises(RequestError) as caught:
        check_slow_fast(
            Request((1,), SamplingParams(), PrefillConfig(), decode=wanted), summarized=False, on_gpu=False
        )
    refused = from_skim(caught.value)
    assert refused.message.startswith(
        "skim.slow_fast 'on' needs an engine that started with slow-fast decode"
    )
    assert refused.param == "skim.slow_fast"


def test_candidates_without_a_kernel_are_refused() -> None:
    wanted = decode_of(options(decode_candidates=2), DecodeConfig(slow_fast="on"))
    request = Request((1,), SamplingParams(), PrefillConfig(), decode=wanted)
    check_slow_fast(request, summarized=True, on_gpu=False)
    with pytest.raises(RequestError, match=r"must be 1 on a GPU, got 2; leave it out") as caught:
        check_slow_fast(request, summarized=True, on_gpu=True)
    assert from_skim(caught.value).param == "skim.decode_candidates"


def test_decode_settings_without_slow_fast_decode_are_refused() -> None:
    off, on = DecodeConfig(), DecodeConfig(slow_fast="on")
    assert decode_of(options(slow_fast="off"), on) == off
    for given, server, why in (
        ({"decode_budget": 64}, off, "the server started with slow_fast off"),
        ({"refresh_interval": 9}, off, "the server started with slow_fast off"),
        ({"slow_fast": "off", "decode_budget": 64}, on, "the request turns slow_fast off"),
    ):
        with pytest.raises(RequestError, match=why) as caught:
            decode_of(options(**given), server)
        assert caught.value.fields[0].startswith("skim.")


@dataclasses.dataclass(frozen=True)
class Later(PrefillConfig):
    """Prefill settings with a new field."""

    depth: Annotated[int | None, Limits(at_least=2, at_most=5)] = None
    """How deep."""


def test_a_new_field_becomes_a_flag_a_variable_and_an_option() -> None:
    setting = settings_of(Later)[-1]
    assert (setting.flag, setting.variable, setting.doc) == ("--depth", "SKIM_DEPTH", "How deep.")
    body = overrides(Later)
    assert body.model_validate({"depth": 3}).model_dump(exclude_none=True) == {"depth": 3}
    for wrong in (1, 6, "3", True):
        with pytest.raises(ValidationError):
            body.model_validate({"depth": wrong})
        with pytest.raises(ValueError, match="depth must be a whole number from 2 to 5"):
            Later(depth=wrong)  # type: ignore[arg-type]


def test_the_scorer_option_accepts_a_scorer_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValidationError, match="must be one of blend, "):
        options(scorer="newest")
    (tmp_path / "newest.py").write_text('SCORER = Declaration(help="a new one")\n')
    monkeypatch.setattr(scorers, "__path__", [*scorers.__path__, str(tmp_path)])
    assert prefill_of(options(scorer="newest"), PrefillConfig()).scorer == "newest"
    assert "newest" in json.dumps(SkimOptions.model_json_schema()["properties"]["scorer"])


@pytest.mark.parametrize("name", BUDGETS)
@pytest.mark.parametrize("before", BUDGETS)
def test_one_budget_replaces_another(name: str, before: str) -> None:
    values: dict[str, Any] = {"keep": "auto", "keep_ratio": 0.5, "keep_tokens": 999, "keep_mass": 0.25}
    merged = prefill_of(options(**{name: values[name]}), PrefillConfig(**{before: values[before]}))
    assert {budget: getattr(merged, budget) for budget in BUDGETS} == {
        **dict.fromkeys(BUDGETS),
        name: values[name],
    }


def test_without_options_the_servers_settings_apply() -> None:
    server = PrefillConfig(keep_tokens=300, scorer="lexical")
    assert prefill_of(None, server) == prefill_of(SkimOptions(cache_salt="a"), server) == server


def test_options_that_contradict_a_setting_are_reported_as_skim() -> None:
    why = r"^skim.head_tokens 32 and skim.tail_tokens 32 are more than skim.keep_tokens 20; raise skim.keep_"
    with pytest.raises(RequestError, match=why) as caught:
        prefill_of(options(keep_tokens=20), PrefillConfig())
    assert from_skim(caught.value).param == "skim"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ("seed", "seed"),
        (("min_tokens", "max_tokens"), "min_tokens"),
        (("anatomy", "min_tokens"), "min_tokens"),
        ("skim.keep_ratio", "skim.keep_ratio"),
        ("anatomy", None),
        ((), None),
    ],
)
@pytest.mark.parametrize("kind", [RequestError, PromptTooLongError])
def test_the_param_of_an_error_is_its_first_field_that_exists_in_requests(
    kind: type[RequestError], fields: str | tuple[str, ...], param: str | None
) -> None:
    error = from_skim(kind("the text mentions seed", fields=fields))
    assert (error.status, error.param) == (400, param)
