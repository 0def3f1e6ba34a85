"""A request and its sequences: plain state that the engine moves through time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skim.attention.blocksparse.policy import Policy
from skim.errors import SkimError
from skim.memory.manager import BlockTable
from skim.memory.prefix import Match, Namespace
from skim.prefill.plan import Plan
from skim.prefill.planner import Planned, SparseTask
from skim.prefill.reading import Reading, Slots
from skim.sampling.batch import SamplerRow
from skim.sampling.grammar import Matcher
from skim.sampling.logprobs import Sampled
from skim.sampling.params import SamplingParams
from skim.sampling.stop import Detokenizer, StopChecker


@dataclass(frozen=True)
class RequestMetrics:
    """What was done for a request, and how long each phase took. Phases add up to the total."""

    prompt_tokens: int
    kept_tokens: int  # prompt tokens that were read: all of them without sparse prefill
    cached_tokens: int  # of these, those whose keys and values were already in the pool
    generated_tokens: int
    preemptions: int
    queue_ms: float  # waiting: for the scorer, and for the first step with a token of this request in it
    scoring_ms: float  # ranking the blocks of the prompt
    prefill_ms: float  # from the first step to the first generated token
    decode_ms: float  # from there to the last one
    scorer: str | None = None  # None where the prompt was read in full
    fallback: str | None = None  # why it was, although it was to be skimmed
    follow_up: str | None = None  # how it built on an earlier turn of its conversation

    @property
    def ttft_ms(self) -> float:
        """Time to first token, from arrival."""
        return self.queue_ms + self.scoring_ms + self.prefill_ms


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
    plan: Plan | None = None  # what was read of the prompt; None for all of it


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
    emit: Callable[[Event], None]
    use_prefix_cache: bool = True
    policy: Policy | None = None  # which blocks attention reads in its prompt; None for all
    sparse: SparseTask | None = None  # how to skim the prompt; None to read it in full
    planned: Planned | None = None  # once it is known what is read
    max_tokens: int = 0  # most to generate; known with it
    matcher: Matcher | None = None  # its grammar, compiled; sequences take copies
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None
    preemptions: int = 0
    arrived_at: float = field(default_factory=time.perf_counter)
    scoring_from: float | None = None
    scoring_until: float | None = None
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
        scoring = (self.scoring_until or now) - (self.scoring_from or now) if self.scoring_from else 0.0
        planned = self.planned or Planned(Reading(self.prompt_token_ids))
        return RequestMetrics(
            prompt_tokens=len(self.prompt_token_ids),
            kept_tokens=len(planned.reading.tokens),
            cached_tokens=self.cached_tokens or 0,
            generated_tokens=sum(sequence.generated for sequence in self.sequences),
            preemptions=self.preemptions,
            queue_ms=(started - self.arrived_at - scoring) * 1e3,
            scoring_ms=scoring * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(now - first) * 1e3,
            scorer=planned.plan.scorer if planned.plan is not None else None,
            fallback=planned.fallback,
            follow_up=planned.follow_up,
        )


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt. `slots` only grow; what has been streamed stays."""

    request: Request
    index: int
    order: int
    slots: Slots
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
    def tokens(self) -> list[int]:
        """What its slots hold, or will: the prompt's tokens that are read, then the generated ones."""
        return self.slots.tokens

    @property
    def generated(self) -> int:
        """Tokens generated so far, without those the host has not seen yet."""
        return self.slots.known - self.slots.prompt

    @property
    def computed(self) -> int:
        return self.table.length if self.table is not None else 0

    @property
    def decoding(self) -> bool:
        """Whether one generated token is to be computed, and nothing else. Asked of each row in each step."""
        last = len(self.slots.tokens) - 1
        return self.table is not None and self.table.length == last >= self.slots.prompt

    def spent(self, max_model_len: int) -> bool:
        """Whether the token it awaits is its last, whatever that is."""
        full = len(self.tokens) - self.slots.prompt >= self.request.max_tokens
        return self.slots.awaited > 0 and (full or self.slots.end >= max_model_len)

    def accept(self, sampled: Sampled, eos_token_ids: frozenset[int], max_model_len: int) -> Delta:
        """Take the token that was awaited first, and say what is new."""
        params = self.request.params
        token = sampled.token_id
        self.slots.fill(token)
        generated = self.generated
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        may_stop = generated >= params.min_tokens
        if may_stop and (
            (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
        ):
            finish_reason = "stop"
            stop_reason = token if token in params.stop_token_ids else None
            text = self.stops.push(self.detokenizer.flush(), active=False)[0] + self.stops.flush()
        else:
            text, matched = self.stops.push(self.detokenizer.push(token), active=may_stop)
            if matched is None and (
                generated >= self.request.max_tokens or self.slots.end - self.slots.awaited >= max_model_len
            ):
                finish_reason = "length"
                rest, matched = self.stops.push(self.detokenizer.flush(), active=may_stop)
                text += rest if matched is not None else rest + self.stops.flush()
            if matched is not None:
                finish_reason, stop_reason = "stop", matched
        self.finished = finish_reason is not None
        if self.finished:
            self.slots.forget_awaited()
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampled.logprob is not None:
            logprobs = (TokenLogprob(token, sampled.logprob, sampled.top_logprobs or ()),)
        return Delta(self.index, text, (token,), logprobs, finish_reason, stop_reason)
