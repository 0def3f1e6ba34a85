"""Sampling parameters from a request's fields, within the server's limits. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skim.config import ServerConfig, parse_bytes
from skim.llm import Prepared
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
    "allowed_token_ids",
    "bad_words",
)

Defaults = Mapping[str, Any]
"""Values of `SamplingParams` for what a request leaves out, from the model's generation config."""


def chat_params(request: ChatRequest, config: ServerConfig, defaults: Defaults) -> SamplingParams:
    """Sampling parameters of a chat request. Without a token limit the reply may fill the context window."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    newer, older = request.max_completion_tokens, request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = newer if newer is not None else older
    scored = request.prompt_logprobs
    return _params(
        request, config, defaults, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=scored
    )


def completion_params(request: CompletionRequest, config: ServerConfig, defaults: Defaults) -> SamplingParams:
    """Sampling parameters of a completion. `best_of` sequences are generated, with their logprobs."""
    max_tokens = request.max_tokens if request.max_tokens is not None else SamplingParams.max_tokens
    n, best_of = request.n or 1, request.best_of or request.n or 1
    at_most("best_of", best_of, config.max_n)
    if best_of < n:
        raise ApiError(400, f"best_of must be at least n ({n}), got {best_of}", param="best_of")
    if best_of > n and request.stream:
        raise ApiError(
            400, "best_of cannot be streamed: the best are known only at the end; use n", param="best_of"
        )
    logprobs, scored = request.logprobs, request.prompt_logprobs
    if request.echo and logprobs is not None:
        scored = max(logprobs, scored or 0)
    made = _params(
        request,
        config,
        defaults,
        max_tokens=max_tokens,
        logprobs=logprobs if best_of == n else logprobs or 0,
        prompt_logprobs=scored,
        echoed=bool(request.echo),
    )
    return replace(made, n=best_of)


def _params(
    request: SamplingFields, config: ServerConfig, defaults: Defaults, *, echoed: bool = False, **more: Any
) -> SamplingParams:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    at_most("n", request.n or 1, config.max_n)
    at_most("stop", max(map(len, stops), default=0), config.max_stop_length, "characters")
    at_most(
        "bad_words", max(map(len, request.bad_words or ()), default=0), config.max_stop_length, "characters"
    )
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(
            400, "prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs"
        )
    if more["max_tokens"] == 0 and more["prompt_logprobs"] is None and not echoed:
        raise ApiError(
            400,
            "max_tokens must be at least 1, unless the reply has the prompt's text (echo in a completion) or "
            "its log-probabilities (prompt_logprobs)",
            param="max_tokens",
        )
    given = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
    return SamplingParams(**{**defaults, **given, **more, "logit_bias": bias or None})


def truncated(prompt: Prepared, request: SamplingFields, params: SamplingParams, window: int) -> Prepared:
    """The prompt's last `truncate_prompt_tokens`; for -1, as many as leave room for the reply."""
    most = request.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == -1:
        most = max(1, window - (1 if params.max_tokens is None else params.max_tokens))
    return prompt if len(prompt.tokens) <= most else Prepared(None, prompt.tokens[-most:])


def check_scored(prompts: Sequence[Prepared], params: SamplingParams, config: ServerConfig) -> None:
    """Refuse more log-probabilities of prompt tokens than one reply may have."""
    if params.prompt_logprobs is None:
        return
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    each = params.prompt_logprobs + 1
    if tokens * each * params.n > config.max_prompt_logprobs:
        raise ApiError(
            400,
            f"the reply would have {tokens * each * params.n} log-probabilities of prompt tokens ({tokens} "
            f"tokens, {each} for each, n = {params.n}); this server allows {config.max_prompt_logprobs} "
            "(--max-prompt-logprobs): send fewer prompts or tokens, or ask for fewer alternatives",
            param="prompt_logprobs",
        )


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
