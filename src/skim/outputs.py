"""The result of a request: a prompt, its continuations and what they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, RequestMetrics
from skim.prefill.plan import Plan
from skim.sampling.logprobs import TokenLogprob
from skim.sampling.params import SamplingParams


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None  # one per token, if they were requested
    finish_reason: str  # stop, length or abort
    stop_reason: str | int | None  # the stop string or token id that ended it


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics
    plan: Plan | None = None  # None if the whole prompt was read
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # one per prompt token; the first is None


def collect(
    handle: RequestHandle, prompt: str | None, tokens: tuple[int, ...], params: SamplingParams
) -> RequestOutput:
    """Wait for a request to finish, and join its deltas. Raises its error if it fails."""
    deltas: list[list[Delta]] = [[] for _ in range(params.n)]
    for event in handle:
        if isinstance(event, Delta):
            deltas[event.index].append(event)
        else:
            outputs = tuple(_completion(index, parts, params) for index, parts in enumerate(deltas))
            found = deltas[0][0].prompt_logprobs
            scored = tuple(found) if found is not None else None
            return RequestOutput(prompt, tokens, outputs, event.metrics, event.plan, scored)
    raise AssertionError("a request's events ended without Finished")


def _completion(index: int, deltas: Sequence[Delta], params: SamplingParams) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs)
        if params.logprobs is not None
        else None,
        finish_reason=deltas[-1].finish_reason or "abort",
        stop_reason=deltas[-1].stop_reason,
    )
