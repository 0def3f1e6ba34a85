"""Refuse requests that can never be served, by plain numbers, before they take any memory."""

from __future__ import annotations

from typing import Any

from skim.errors import ConfigError, PromptTooLongError, RequestError, shown
from skim.models.head import has_head
from skim.prefill.request import Request, slices
from skim.sampling.params import SamplingParams


def check_support(
    request: Request, module: Any, drafter: str | None, *, summarized: bool, on_gpu: bool
) -> None:
    """Refuse options that this engine or its model does not support."""
    check_drafter(request, drafter)
    check_prompt_logprobs(request, module)
    check_slow_fast(request, summarized=summarized, on_gpu=on_gpu)


def check_request(request: Request, *, vocab_size: int, max_sequences: int) -> None:
    """Refuse token ids outside the vocabulary, an empty prompt, and more sequences than ever run at once."""
    request.params.check_vocab(vocab_size)
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token")
    if any(min(part) < 0 or max(part) >= vocab_size for part in slices(prompt)):
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(
            f"prompt token {wrong} is outside the vocabulary of {vocab_size}; use this model's tokenizer"
        )
    if request.params.n > max_sequences:
        raise RequestError(
            f"n={request.params.n} is more than max_num_seqs={max_sequences}; lower n, or raise that",
            fields=("n", "max_num_seqs"),
        )


def check_drafter(request: Request, loaded: str | None) -> None:
    """Refuse a drafter other than the one that was loaded at start."""
    drafter = request.prefill.drafter
    if drafter not in (None, loaded):
        raise RequestError(
            f"drafter {shown(drafter)} is not loaded: all requests share one drafter; set it at start",
            fields="drafter",
        )


def check_prompt_logprobs(request: Request, module: Any) -> None:
    """Refuse log-probabilities of prompt tokens if the model's output head cannot be run alone."""
    if request.params.prompt_logprobs is not None and not has_head(module):
        raise RequestError(
            f"prompt_logprobs is not supported for this model: {type(module).__name__} does not separate its "
            "output head from its layers",
            fields="prompt_logprobs",
        )


def check_slow_fast(request: Request, *, summarized: bool, on_gpu: bool) -> None:
    """Refuse slow-fast decode if blocks have no summaries, which are planned at start, and candidates that
    the device has no kernel for."""
    decode = request.decode
    if decode is None or decode.slow_fast == "off":
        return
    try:
        decode.candidates(on_gpu)
    except ConfigError as error:
        raise RequestError(str(error), fields=error.fields) from error
    if not summarized:
        raise RequestError(
            f"slow_fast {shown(decode.slow_fast)} needs an engine that started with slow-fast decode (auto, "
            "on or exact), and a model with layers without a sliding window",
            fields="slow_fast",
        )


def room_for_reply(
    slots: int,  # prompt tokens that are computed
    end: int,  # the position after the last of them
    params: SamplingParams,
    *,
    window: int,  # the context window that is served
    widest_window: int,  # the model's context window
    pool_tokens: int,  # tokens that the KV pool holds
    unskimmed: str | None = None,  # the reason that planning failed, if the prompt was to be skimmed
) -> int:
    """The most tokens that the request may generate; an error if it cannot fit the context window or pool."""
    room = window - end
    if room < (1 if params.max_tokens is None else min(1, params.max_tokens)):
        wider = (
            f" or raise max_model_len (the model allows {widest_window})" if window < widest_window else ""
        )
        remedy = f"; shorten it, or have it skimmed (sparse_prefill){wider}"
        if unskimmed is not None:
            remedy = f", and it could not be skimmed: {unskimmed}"
        raise PromptTooLongError(
            f"the prompt has {end} tokens, which leaves no room for output in the context window of "
            f"{window}{remedy}"
        )
    fits = pool_tokens + 1 - slots  # the last generated token is never computed
    room = min(room, max(fits, 1) if params.max_tokens is None else params.max_tokens)
    if max(room, 1) > fits:
        raise PromptTooLongError(
            f"{slots} prompt tokens and {room} generated ones can never fit the KV pool of {pool_tokens} "
            f"tokens; raise kv_memory{' or lower max_tokens' if fits > 0 else ''}",
            fields=("max_tokens", "kv_memory") if fits > 0 else "kv_memory",
        )
    return room
