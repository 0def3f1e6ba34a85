"""Sampling parameters from a request's fields, within the server's limits. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from skim.config import ServerConfig, parse_bytes
from skim.sampling.params import SamplingParams
from skim.server.errors import ApiError
from skim.server.protocol.requests import ChatRequest, CompletionRequest, SamplingFields

# Fields of a request that are fields of `SamplingParams` too. Left out, they keep the engine's default.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "priority",
)


def chat_params(request: ChatRequest, config: ServerConfig) -> SamplingParams:
    """Sampling parameters of a chat request. Without a token limit the reply may fill the context window."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    newer, older = request.max_completion_tokens, request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, config, max_tokens=newer if newer is not None else older, logprobs=logprobs)


def completion_params(request: CompletionRequest, config: ServerConfig) -> SamplingParams:
    max_tokens = request.max_tokens if request.max_tokens is not None else SamplingParams.max_tokens
    return _params(request, config, max_tokens=max_tokens, logprobs=request.logprobs)


def _params(request: SamplingFields, config: ServerConfig, **more: Any) -> SamplingParams:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    at_most("n", request.n or 1, config.max_n)
    at_most("stop", max(map(len, stops), default=0), config.max_stop_length, "characters")
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    return SamplingParams(**given, **more, logit_bias=bias or None)


def at_most(name: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        allowed = f"{limit} {unit}".strip()
        raise ApiError(400, f"{name}: this server allows at most {allowed}, got {value}", param=name)


def check_schemas(schemas: Sequence[Any], param: str, config: ServerConfig) -> None:
    """Refuse JSON schemas and grammars that are larger together than the server allows."""
    size = sum(len(json.dumps(schema)) for schema in schemas)
    limit = parse_bytes("max_schema_size", config.max_schema_size)
    if size > limit:
        raise ApiError(
            400,
            f"{param}: schemas and grammars may take at most {limit} bytes on this server, got {size}",
            param=param,
        )
