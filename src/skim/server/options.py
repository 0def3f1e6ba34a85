"""Options of one request (`"skim": {...}`): settings of prefill and decode that a request may override."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, create_model
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from skim.config import BUDGETS, DecodeConfig, EngineConfig, PrefillConfig, ServerConfig
from skim.config.declare import Declared, declared, field_docs, parts
from skim.errors import ConfigError, RequestError, with_names
from skim.server.protocol import StrictBody

_Config = TypeVar("_Config", PrefillConfig, DecodeConfig)


@dataclass(frozen=True)
class _OneOf:
    """Choices that are read at each validation, and whenever the schema is generated."""

    choices: Callable[[], Mapping[str, str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.choices())}

    def _check(self, value: str) -> str:
        if value not in self.choices():
            choices = ", ".join(self.choices())
            raise PydanticCustomError("choice", "must be one of {choices}", {"choices": choices})
        return value


def overridable(kind: type) -> list[Declared]:
    """The fields of a config dataclass that a request may set."""
    return [one for one in declared(kind) if one.limits.per_request]


def overrides(kind: type, only: Collection[str] | None = None) -> type[StrictBody]:
    """A request body with the overridable fields of a config dataclass, or `only` these; none is required."""
    docs = field_docs(kind)
    fields: dict[str, Any] = {
        one.name: (_type_of(one) | None, Field(default=None, description=docs.get(one.name)))
        for one in overridable(kind)
        if only is None or one.name in only
    }
    return create_model(f"{kind.__name__}Overrides", __base__=StrictBody, **fields)


def _type_of(one: Declared) -> Any:
    limits = one.limits
    if callable(limits.choices):
        return Annotated[str, _OneOf(limits.choices)]
    if limits.choices is not None:
        return Literal[limits.choices]
    kind: Any = functools.reduce(operator.or_, one.types)
    return Annotated[kind, Field(ge=limits.at_least, gt=limits.above, le=limits.at_most)]


_AT_START = {
    one.name: f"it is set when the server starts (--{one.name.replace('_', '-')})"
    for kind in (*parts(EngineConfig).values(), ServerConfig)
    for one in declared(kind)
}


class SkimOptions(overrides(DecodeConfig), overrides(PrefillConfig)):  # type: ignore[misc]
    """Options of this request. Those named like a setting of the server override it."""

    refused: ClassVar = _AT_START  # of these, the ones that are no fields

    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Share cached prefixes only with requests of the same salt."
    )
    use_prefix_cache: bool | None = Field(
        default=None, description="False neither reads nor stores cached prefixes."
    )
    control_tokens: Literal["text", "parse"] | None = Field(
        default=None, description="`parse` reads control tokens of the template inside messages as such."
    )
    report: Literal["summary", "spans"] | None = Field(
        default=None, description="`spans` adds the kept spans and their texts to the reply's report."
    )
    progress: bool | None = Field(
        default=None, description="True adds chunks with `skim.progress` to a stream, one for each change."
    )


@dataclass(frozen=True)
class PrefixCache:
    """A request's use of the prefix cache."""

    salt: str = ""
    used: bool = True


def prefix_cache_of(
    options: SkimOptions | None, cache_prompt: bool | None, cache_salt: str | None
) -> PrefixCache:
    """By `skim`, by llama.cpp's `cache_prompt` and by vLLM's `cache_salt`."""
    options = options or SkimOptions()
    for name, own, other in (
        ("cache_salt", options.cache_salt, cache_salt),
        ("cache_prompt", options.use_prefix_cache, cache_prompt),
    ):
        if own is not None and other is not None and own != other:
            raise RequestError(f"{name} and its option in skim differ; give one of them", fields=name)
    used = options.use_prefix_cache if options.use_prefix_cache is not None else cache_prompt
    return PrefixCache(options.cache_salt or cache_salt or "", used is not False)


def control_tokens_of(options: SkimOptions | None, config: ServerConfig) -> str:
    """The request's own choice, or the server's."""
    return (options.control_tokens if options is not None else None) or config.control_tokens


def wants_spans(options: SkimOptions | None) -> bool:
    return options is not None and options.report == "spans"


def wants_progress(options: SkimOptions | None, *, stream: bool) -> bool:
    wanted = options is not None and bool(options.progress)
    if wanted and not stream:
        raise RequestError("skim.progress needs stream to be true", fields="skim.progress")
    return wanted


def refuse_progress(options: SkimOptions | None) -> None:
    """For protocols whose streams have no event for the progress."""
    if options is not None and options.progress:
        raise RequestError(
            "skim.progress is for /v1/chat/completions and /v1/completions", fields="skim.progress"
        )


def prefill_of(options: SkimOptions | None, config: PrefillConfig) -> PrefillConfig:
    """The server's prefill settings with the request's overrides. A budget replaces any other budget."""
    return _overridden(options, config)


def decode_of(options: SkimOptions | None, config: DecodeConfig) -> DecodeConfig | None:
    """The server's decode settings with the request's overrides; None without any.

    Refuses details without effect. The engine refuses slow-fast decode that it did not start with.
    """
    changed = _overridden(options, config)
    details = [one.name for one in overridable(DecodeConfig) if one.name != "slow_fast"]
    given = next((name for name in details if getattr(options, name, None) is not None), None)
    if given is not None and changed.slow_fast == "off":
        why = "the request turns slow_fast off; leave it out"
        if config.slow_fast == "off":
            why = "the server started with slow_fast off; start it with auto, on or exact"
        raise RequestError(f"skim.{given} has no effect: {why}", fields=f"skim.{given}")
    return changed if changed != config else None


def _overridden(options: SkimOptions | None, config: _Config) -> _Config:
    names = {one.name for one in overridable(type(config))}
    given = options.model_dump(include=names, exclude_none=True) if options is not None else {}
    if not given.keys().isdisjoint(BUDGETS):
        given = dict.fromkeys(BUDGETS) | given
    try:
        return replace(config, **given)
    except ConfigError as error:
        own = {name: f"skim.{name}" for name in error.fields}
        field = own[error.fields[0]] if len(own) == 1 else "skim"
        raise RequestError(with_names(str(error), own), fields=field) from error
