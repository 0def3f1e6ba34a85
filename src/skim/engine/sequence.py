"""A request and its sequences: plain state that the engine moves through time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skim.errors import SkimError
from skim.memory.manager import BlockTable
from skim.memory.prefix import Match, Namespace
from skim.sampling.batch import SamplerRow
from skim.sampling.grammar import Matcher
from skim.sampling.logprobs import Sampled
from skim.sampling.params import SamplingParams
from skim.sampling.stop import Detokenizer, StopChecker


@dataclass(frozen=True)
class RequestMetrics:
    """What was done for a request, and how long each phase took. Phases add up to the total."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose keys and values were already in the pool
    generated_tokens: int
    preemptions: int
    queue_ms: float  # from arrival to the first step with a token of this request in it
    prefill_ms: float  # from there to the first generated token
    decode_ms: float  # from there to the last one

    @property
    def ttft_ms(self) -> float:
        """Time to first token, from arrival."""
        return self.queue_ms + self.prefill_ms


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token's log-probability under the model, and the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Delta:
    """News of one sequence: a token, the text that became safe to show, and how it ended if it did."""

    index: int  # which of the request's n sequences
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: str | int | None = None  # the stop string or token id that matched


@dataclass(frozen=True)
class Finished:
    """Every sequence of the request has ended; nothing follows."""

    metrics: RequestMetrics


@dataclass(frozen=True)
class Failed:
    """The request could not be finished; nothing follows."""

    error: SkimError


Event = Delta | Finished | Failed


@dataclass(eq=False)
class Request:
    """One prompt, its sampling parameters, and where its news goes."""

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    namespace: Namespace
    max_tokens: int
    emit: Callable[[Event], None]
    use_prefix_cache: bool = True
    matcher: Matcher | None = None  # its grammar, compiled; sequences take copies
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    preemptions: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None

    def mark_started(self) -> None:
        self.started_at = self.started_at or time.perf_counter()

    def mark_first_token(self) -> None:
        self.first_token_at = self.first_token_at or time.perf_counter()

    def metrics(self) -> RequestMetrics:
        now = time.perf_counter()
        started = self.started_at or now
        first = self.first_token_at or now
        return RequestMetrics(
            prompt_tokens=len(self.prompt_token_ids),
            cached_tokens=self.cached_tokens or 0,
            generated_tokens=sum(sequence.generated for sequence in self.sequences),
            preemptions=self.preemptions,
            queue_ms=(started - self.arrived_at) * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(now - first) * 1e3,
        )


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt. `tokens` only grows; what has been streamed stays."""

    request: Request
    index: int
    order: int
    tokens: list[int]
    seed: int
    detokenizer: Detokenizer
    stops: StopChecker
    sampler_row: SamplerRow | None = None  # from admission on: a queue of any length holds no device memory
    table: BlockTable | None = None
    verified: int = 0  # computed tokens that finite logits have followed
    waited: int = 0
    followers: list[Sequence] = field(default_factory=list)  # share the prompt once it is computed
    match: Match = field(default_factory=Match)
    match_version: int = -1
    finished: bool = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def computed(self) -> int:
        return self.table.length if self.table is not None else 0

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.computed == len(self.tokens) - 1

    def accept(self, sampled: Sampled, eos_token_ids: frozenset[int], max_model_len: int) -> Delta:
        """Take the next token, and say what is new."""
        params = self.request.params
        token = sampled.token_id
        self.tokens.append(token)
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        may_stop = self.generated >= params.min_tokens
        if may_stop and (
            (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        ):
            finish_reason = "stop"
            stop_reason = token if token in params.stop_token_ids else None
            text = self.stops.push(self.detokenizer.flush(), active=False)[0] + self.stops.flush()
        else:
            text, matched = self.stops.push(self.detokenizer.push(token), active=may_stop)
            if matched is None and (
                self.generated >= self.request.max_tokens or len(self.tokens) >= max_model_len
            ):
                finish_reason = "length"
                rest, matched = self.stops.push(self.detokenizer.flush(), active=may_stop)
                text += rest if matched is not None else rest + self.stops.flush()
            if matched is not None:
                finish_reason, stop_reason = "stop", matched
        self.finished = finish_reason is not None
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampled.logprob is not None:
            logprobs = (TokenLogprob(token, sampled.logprob, sampled.top_logprobs or ()),)
        return Delta(self.index, text, (token,), logprobs, finish_reason, stop_reason)
