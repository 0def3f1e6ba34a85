"""Runtime state of a request and its sequences, and the events that callers receive."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skim.attention.glance import Evidence
from skim.decode.drafts import Acceptance
from skim.decode.policy import Pulse
from skim.decode.stats import DecodeStats
from skim.engine.drafts import Drafts
from skim.engine.runner import Targets
from skim.engine.slots import Slots
from skim.engine.tracking import Tracker
from skim.errors import SkimError
from skim.memory.manager import BlockTable
from skim.memory.pool import KVPool
from skim.memory.prefix import Match
from skim.prefill.plan import DenseReason, Plan
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.sampling.batch import SamplerRow
from skim.sampling.grammar import Matcher
from skim.sampling.logprobs import PromptLogprobs, Sampled, TokenLogprob
from skim.sampling.stop import Detokenizer, StopChecker


@dataclass(frozen=True)
class RequestMetrics:
    """Token counts of a request, and the time of each phase. Phases add up to the total."""

    prompt_tokens: int
    kept_tokens: int  # prompt tokens that were read: all of them without sparse prefill
    cached_tokens: int  # of these, the ones found in the prefix cache or restored
    generated_tokens: int
    preemptions: int
    queue_ms: float  # waiting: for the scorer, and for the request's first step
    scoring_ms: float  # planning: ranking the prompt blocks
    prefill_ms: float  # from the first step to the first generated token
    decode_ms: float  # from there to the last one
    scorer: str | None = None  # None if the prompt was read densely
    fallback: DenseReason | None = None  # the reason for that, if it was to be skimmed
    follow_up: str | None = None  # follow-up mode, or the reason for starting afresh
    restored_tokens: int = 0  # of the cached ones, those that came from checkpoint files
    kv_format: str = ""  # format of stored keys and values: a dtype, or a quantized format
    kv_bytes: int = 0  # keys and values of the tokens read and generated
    decode: DecodeStats | None = None  # None if slow-fast decode did not apply

    @property
    def ttft_ms(self) -> float:
        """Time to first token, from arrival."""
        return self.queue_ms + self.scoring_ms + self.prefill_ms


@dataclass(frozen=True)
class Delta:
    """New output of one sequence: a token, the text that is final by now, and the finish reason if any."""

    index: int  # index among the request's n sequences
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # stop, length or abort
    stop_reason: str | int | None = None  # the stop string or token id that matched
    prompt_logprobs: PromptLogprobs | None = None  # on the first delta of a request that wants them


@dataclass(frozen=True)
class Finished:
    """The last event of a request whose sequences have all ended."""

    metrics: RequestMetrics
    plan: Plan | None = None  # None if the whole prompt was read


@dataclass(frozen=True)
class Failed:
    """The last event of a request that could not be finished."""

    error: SkimError


Event = Delta | Finished | Failed


@dataclass(eq=False)
class RequestState:
    """Runtime state of one request."""

    id: int
    request: Request
    emit: Callable[[Event], None]
    skims: bool = False  # True if its prompt is planned before it is read
    bad_words: tuple[tuple[int, ...], ...] = ()  # token ids of each
    matcher: Matcher | None = None  # its compiled grammar; each sequence gets a copy
    planned: Planned | None = None  # set once planning is done
    max_tokens: int = 0  # most tokens to generate; set together with `planned`
    sequences: list[Sequence] = field(default_factory=list)
    cached_tokens: int | None = None  # set at first admission
    restored_tokens: int = 0  # taken from checkpoint files
    preemptions: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # None if the request does not want them
    finite: bool = True  # False once keys or values of its prompt are known not to be
    decode_stats: DecodeStats = field(default_factory=DecodeStats)
    arrived_at: float = field(default_factory=time.perf_counter)
    scoring_from: float | None = None
    scoring_until: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    tracker: Tracker = field(init=False)

    def __post_init__(self) -> None:
        self.tracker = Tracker(len(self.request.prompt_token_ids))
        top = self.request.params.prompt_logprobs
        if top is not None:
            self.prompt_logprobs = PromptLogprobs(self.request.prompt_token_ids, top)

    def mark_started(self) -> None:
        self.started_at = self.started_at or time.perf_counter()

    def mark_first_token(self) -> None:
        self.first_token_at = self.first_token_at or time.perf_counter()

    def metrics(self, pool: KVPool) -> RequestMetrics:
        """The account of the request so far, whose keys and values are stored in `pool`."""
        now = time.perf_counter()
        started = self.started_at or now
        first = self.first_token_at or now
        scoring = (self.scoring_until or now) - (self.scoring_from or now) if self.scoring_from else 0.0
        planned = self.planned or Planned(Reading(self.request.prompt_token_ids))
        read, generated = (
            len(planned.reading.tokens),
            sum(sequence.generated for sequence in self.sequences),
        )
        return RequestMetrics(
            prompt_tokens=len(self.request.prompt_token_ids),
            kept_tokens=read,
            cached_tokens=self.cached_tokens or 0,
            generated_tokens=generated,
            preemptions=self.preemptions,
            queue_ms=(started - self.arrived_at - scoring) * 1e3,
            scoring_ms=scoring * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(now - first) * 1e3,
            scorer=planned.plan.scorer if planned.plan is not None else None,
            fallback=planned.fallback,
            follow_up=planned.follow_up,
            restored_tokens=self.restored_tokens,
            kv_format=pool.format_name,
            kv_bytes=(read + generated) * pool.token_bytes,
            decode=self.decode_stats.copy() if self.decode_stats.rows else None,
        )


@dataclass(eq=False)
class Sequence:
    """One continuation of a prompt. Its slots only grow, and emitted text never changes."""

    parent: RequestState
    index: int  # among the request's n sequences
    order: int  # by arrival, over all requests
    slots: Slots
    seed: int
    detokenizer: Detokenizer
    stops: StopChecker
    sampler_row: SamplerRow | None = None  # opened at admission: waiting sequences hold no device memory
    table: BlockTable | None = None  # None while it waits
    verified: int = 0  # computed tokens with finite keys and values: these may be published
    restoring: bool = False  # its table is being filled from checkpoint files
    reported: int = 0  # leading slots whose next tokens have log-probabilities, read or in flight
    waited: int = 0  # steps in which it was passed over
    followers: list[Sequence] = field(default_factory=list)  # forked once the prompt is computed
    match: Match = field(default_factory=Match)  # the cached prefix it would start on
    match_version: int = -1  # version of the prefix tree at which `match` was looked up
    pulse: Pulse = field(default_factory=Pulse)  # its slow and fast decode steps
    evidence: Evidence | None = None  # what the end of its prompt and slow steps found
    watched: int = 0  # last prompt slots that give evidence for slow-fast decode: they are always computed
    drafts: Drafts | None = None  # of slow-fast decode: a round of drafts that are not final yet
    acceptance: Acceptance = field(default_factory=Acceptance)  # of earlier rounds, for exact mode
    exact: float = math.inf  # leading slots that no fast step computed: only these may be published
    finished: bool = False

    @property
    def tokens(self) -> list[int]:
        """Tokens of its slots: the prompt tokens that are read, then the generated ones."""
        return self.slots.tokens

    @property
    def generated(self) -> int:
        """Number of generated tokens that are final."""
        return self.slots.known - self.slots.prompt

    @property
    def computed(self) -> int:
        return self.table.length if self.table is not None else 0

    @property
    def decoding(self) -> bool:
        """True if exactly one token is left to compute, a generated one, or drafts are due for verification.

        Called for each row in each step.
        """
        if self.table is None:
            return False
        last = len(self.slots.tokens) - 1
        due = self.drafts is not None and self.drafts.due
        return due or self.table.length == last >= self.slots.prompt

    @property
    def cacheable(self) -> int:
        """Most leading slots that may come from the prefix cache: it holds no logits.

        With `prompt_logprobs`, they are those that were computed before a preemption. Watched slots are
        computed again, so that the text does not depend on what was cached.
        """
        wanted = self.slots.prompt - 1 if self.parent.prompt_logprobs is not None else 0
        most = self.slots.prompt - self.watched if self.watched else len(self.tokens)
        return min(most, self.reported) if self.reported < wanted else most

    def targets(self, tokens: int) -> Targets | None:
        """The prompt tokens after the next `tokens` slots whose log-probabilities are still wanted."""
        if self.parent.prompt_logprobs is None:
            return None
        first = max(self.computed, self.reported)
        end = min(self.computed + tokens, self.slots.prompt - 1)
        if first >= end:
            return None
        top = self.parent.prompt_logprobs.top
        return Targets(first - self.computed, self.tokens[first + 1 : end + 1], top)

    def samples_after(self, tokens: int) -> bool:
        """True if a token is sampled after the next `tokens` slots."""
        return self.computed + tokens == len(self.tokens) and self.parent.max_tokens > 0

    def advance(self, tokens: int) -> None:
        """Count the next `tokens` slots as computed. The first sequence shows the request's progress."""
        assert self.table is not None
        self.table.length += tokens
        self.reported = max(self.reported, min(self.table.length, self.slots.prompt - 1))
        if self.index == 0:
            length = self.table.length
            self.parent.tracker.advanced(length, self.slots.prompt, left=length < len(self.slots.tokens))

    def end_round(self) -> None:
        """Draft no more. The next row computes all slots of the round again."""
        assert self.table is not None
        assert self.drafts is not None
        self.drafts.due, self.table.length = True, self.drafts.base

    def inexact(self, slot: int) -> None:
        """A fast step computes this slot. Other requests must not share it."""
        self.exact = min(self.exact, slot)

    def forget_steps(self) -> None:
        """Its blocks are gone. They will be computed again, all of them densely."""
        self.pulse, self.evidence, self.exact = Pulse(), None, math.inf

    @property
    def publishable(self) -> int:
        """Leading slots that other requests may share."""
        return int(min(self.verified, self.exact))

    def verify(self, length: int, finite: bool) -> None:
        """The next tokens up to `length` are computed. Nothing after a non-finite one is ever published."""
        self.parent.finite &= finite
        if self.parent.finite:
            self.verified = length

    def spent(self, max_model_len: int) -> bool:
        """True if nothing is left to compute: the token it awaits is its last by count, or it awaits none."""
        if self.computed == len(self.tokens):
            return True
        full = len(self.tokens) - self.slots.prompt >= self.parent.max_tokens
        return self.slots.awaited > 0 and (full or self.slots.end >= max_model_len)

    def accept(self, sampled: Sampled, eos_token_ids: frozenset[int], max_model_len: int) -> Delta:
        """Append the sampled token, check for stops, and return the new output."""
        params = self.parent.request.params
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
                generated >= self.parent.max_tokens or self.slots.end - self.slots.awaited >= max_model_len
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
