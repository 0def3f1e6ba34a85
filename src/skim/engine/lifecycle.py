"""A request's life: planned, scheduled, and ended. Knows nothing of steps or threads.

`intake.py` checks a request before, and makes its sequences.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from skim.engine.candidates import grain_of
from skim.engine.intake import Intake
from skim.engine.keeper import Keeper
from skim.engine.sequence import Delta, Event, Failed, Finished, RequestState, Sequence
from skim.errors import EngineError, RequestError, SkimError
from skim.memory.manager import MemoryManager
from skim.prefill.plan_queue import PlanQueue
from skim.prefill.planner import Planner
from skim.prefill.reading import Planned
from skim.sampling.batch import SamplerRow
from skim.sampling.logprobs import Sampled
from skim.sampling.sampler import Sampler

log = logging.getLogger(__name__)

NOT_FINITE = "the model's logits are not finite (NaN or infinity)"


class Lifecycle:
    """The open requests and their sequences, with the blocks and sampler rows that they hold.

    All methods run on the engine's thread.
    """

    def __init__(
        self,
        intake: Intake,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        memory: MemoryManager,
        sampler: Sampler,
        planner: Planner,
    ) -> None:
        self.requests: dict[int, RequestState] = {}
        self.sequences: dict[int, Sequence] = {}
        """Scheduled sequences by order. Followers are added when their prompt is computed."""
        self.plans = PlanQueue(planner)
        self.sampler = sampler
        self.outcomes: Counter[str] = Counter()
        self.preemptions = 0
        self.tokens_generated = 0
        self._intake = intake
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._memory = memory
        self._planner = planner

    # -- from arrival to the schedule

    def add(self, state: RequestState) -> None:
        """Queue the prompt for planning, or schedule its sequences at once."""
        self.requests[state.id] = state
        if state.skims:
            self.plans.add(
                state.id,
                state.request,
                lambda planned, begun_at: self._planned(state, planned, begun_at),
                lambda error: self.fail(state, error),
                begin=state.tracker.scoring,
            )
        else:
            self._begin(state, self._planner.unplanned(state.request))

    def _planned(self, state: RequestState, planned: Planned, begun_at: float) -> None:
        state.scoring_from, state.scoring_until = begun_at, time.perf_counter()
        self._begin(state, planned)

    def _begin(self, state: RequestState, planned: Planned) -> None:
        """Schedule the sequences of a planned request."""
        state.planned = planned
        try:
            state.tracker.queued(len(planned.reading.tokens))
            leader = self._intake.make_sequences(state, planned)
            self.sequences[leader.order] = leader
        except RequestError as error:
            self.fail(state, error)
        except Exception as error:
            log.exception("a request could not be set up")
            self.fail(state, EngineError(f"the request could not be set up: {error}"))

    # -- in the schedule

    def admit(self, sequence: Sequence) -> None:
        """Open a block table on the cached prefix `sequence.match`, and a sampler row."""
        state, match = sequence.parent, sequence.match
        request = state.request
        if state.cached_tokens is None:
            bypass = None if request.use_prefix_cache else "request"
            if state.prompt_logprobs is not None:
                bypass = "prompt_logprobs"
            self._memory.count_query(sequence.slots.keys, match, bypass)
            state.cached_tokens = match.length
            state.mark_started()
        if match.length:
            self._memory.tree.touch(sequence.slots.keys, request.namespace, match.length)
        self.sampler_row(sequence)
        sequence.table = self._memory.open(match, whole=sequence.slots.is_late)
        sequence.verified = match.length

    def restore(self, sequence: Sequence, keeper: Keeper) -> bool:
        """Admit a sequence and fill its table from checkpoint files, if they hold more than is cached.

        True if the sequence cannot run in this step, because it is being restored or waits for that.
        """
        state = sequence.parent
        request = state.request
        if sequence.table is not None or not request.use_prefix_cache or state.prompt_logprobs is not None:
            return False
        keys = sequence.slots.keys[: sequence.cacheable + 1]  # an offer leaves the last one out
        offer = keeper.offer(keys, request.namespace, sequence.match.length, grain_of(sequence))
        if offer is None:
            return False
        if keeper.is_full:
            return True
        found, end = offer
        first = state.cached_tokens is None
        self.admit(sequence)
        table = sequence.table
        assert table is not None

        def advance(tokens: int) -> None:
            sequence.advance(tokens)
            sequence.verified = sequence.computed
            self.slide(sequence, sequence.computed)
            if first:
                state.restored_tokens += tokens
                state.cached_tokens = (state.cached_tokens or 0) + tokens

        def finish() -> None:
            sequence.restoring = False
            self._publish(sequence)

        sequence.restoring = True
        keeper.restore(
            table, found, end, alive=lambda: sequence.table is table, advance=advance, finish=finish
        )
        return True

    def is_open(self, sequence: Sequence) -> bool:
        """False if it has ended, alone or with its request."""
        return not sequence.finished and sequence.parent.id in self.requests

    def sampler_row(self, sequence: Sequence) -> SamplerRow:
        """The sequence's sampler row, opened on first use and kept through preemption with its counts."""
        if sequence.sampler_row is None:
            state = sequence.parent
            sequence.sampler_row = self.sampler.open(
                state.request.params,
                state.request.prompt_token_ids,
                seed=sequence.seed,
                eos_token_ids=self._eos_token_ids,
                bad_words=state.bad_words,
                matcher=state.matcher.copy() if state.matcher is not None else None,
            )
        return sequence.sampler_row

    def fork_followers(self, sequence: Sequence) -> list[Sequence]:
        """Schedule the other sequences of an n > 1 request on the prompt's blocks."""
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            assert sequence.table is not None
            follower.table, follower.reported = self._memory.fork(sequence.table), sequence.reported
            follower.evidence = sequence.evidence.copy() if sequence.evidence is not None else None
            self.sequences[follower.order] = follower
        return followers

    def preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. It is computed again later and continues where it stopped."""
        self.preemptions += 1
        sequence.parent.preemptions += 1
        self._free_blocks(sequence, publish=True)
        self.forget_drafts(sequence)
        sequence.forget_steps()
        sequence.match_version = -1
        if sequence.index == 0:
            sequence.parent.tracker.queued(sequence.slots.prompt)

    def accept(self, sequence: Sequence, sampled: Sampled) -> None:
        """Append a sampled token and emit it. An error in its text fails this request only."""
        state, is_first = sequence.parent, sequence.generated == 0
        state.mark_first_token()
        self.tokens_generated += 1
        try:
            delta = sequence.accept(sampled, self._eos_token_ids, self._max_model_len)
        except Exception as error:
            log.exception("request %d: its text failed", state.id)
            self.fail(state, EngineError(f"the token could not be turned into text: {error}"))
            return
        if is_first and sequence.index == 0:
            delta = replace(delta, prompt_logprobs=state.prompt_logprobs)
        self.emit(state, delta)
        if sequence.finished:
            self._release(sequence)
            if all(one.finished for one in state.sequences):
                self._end(state, delta.finish_reason or "stop")
        elif is_first:
            self._publish(sequence)

    def take(self, sequence: Sequence, length: int, sampled: Sampled) -> None:
        """Take over a token that was drawn after `length` slots. Without one, the request fails."""
        if not sampled.finite:
            error = EngineError(NOT_FINITE) if sampled.error is None else RequestError(sampled.error)
            self.fail(sequence.parent, error)
            return
        sequence.verify(length, finite=True)
        self.accept(sequence, sampled)
        self.slide(sequence, length)

    def slide(self, sequence: Sequence, length: int) -> None:
        """Give back blocks behind sliding windows, after a step that computed up to `length` slots."""
        table, request = sequence.table, sequence.parent.request
        if table is not None and length >= table.slides_at:
            publishable = sequence.publishable if request.use_prefix_cache else 0
            self._memory.slide(table, length, sequence.slots.keys, request.namespace, publishable)

    def report(self, sequence: Sequence, part: Tensor) -> None:
        """Keep log-probabilities of the next prompt tokens. If one is NaN, the request fails."""
        state = sequence.parent
        if state.id not in self.requests:
            return
        assert state.prompt_logprobs is not None
        if not state.prompt_logprobs.add(part):
            self.fail(state, EngineError(NOT_FINITE))

    def end_of_prompt(self, sequence: Sequence) -> None:
        """End a request that generates no tokens, now that its prompt is computed."""
        state = sequence.parent
        if state.id not in self.requests:
            return
        if not state.finite:
            self.fail(state, EngineError("the prompt's keys and values are not finite (NaN or infinity)"))
            return
        state.mark_first_token()
        self._release(sequence)
        found = state.prompt_logprobs
        for one in state.sequences:
            one.finished = True
            self.emit(state, Delta(one.index, "", finish_reason="length", prompt_logprobs=found))
            found = None
        self._end(state, "length")

    # -- the end

    def abort(self, request_id: int) -> None:
        """End a request and keep its text so far. Unknown and finished ids are ignored."""
        state = self.requests.get(request_id)
        if state is None:
            return
        self.plans.drop(request_id)
        unfinished = set(range(state.request.params.n))
        for sequence in state.sequences:
            if sequence.finished:
                unfinished.remove(sequence.index)
            else:
                sequence.finished = True
                self._release(sequence)
        for index in sorted(unfinished):
            self.emit(state, Delta(index, "", finish_reason="abort"))
        self._end(state, "abort")

    def fail(self, state: RequestState, error: SkimError) -> None:
        """End a request with an error; its blocks are not published."""
        if state.id not in self.requests:
            return  # it ended earlier in the same step
        self.plans.drop(state.id)
        for sequence in state.sequences:
            self._release(sequence, publish=False)
        self.outcomes["error"] += 1
        del self.requests[state.id]
        self.emit(state, Failed(error))

    def fail_all(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """Fail the requests of a step that raised."""
        states = {sequence.parent.id: sequence.parent for sequence in sequences}
        log.error("a forward failed; its %d requests end with an error", len(states), exc_info=error)
        for state in states.values():
            self.fail(state, EngineError(f"the forward failed: {type(error).__name__}: {error}"))

    def _end(self, state: RequestState, outcome: str) -> None:
        self.outcomes[outcome] += 1
        del self.requests[state.id]
        plan = state.planned.plan if state.planned is not None else None
        self.emit(state, Finished(state.metrics(self._memory.pool), plan))

    def emit(self, state: RequestState, event: Event) -> None:
        """Send an event to the caller. An exception in the receiver is logged and harms no other request."""
        try:
            state.emit(event)
        except Exception:
            log.exception("request %d: its receiver raised", state.id)

    def _release(self, sequence: Sequence, publish: bool = True) -> None:
        """Free a sequence's blocks and sampler row, and take it out of the schedule."""
        self._free_blocks(sequence, publish)
        self.forget_drafts(sequence)
        if sequence.sampler_row is not None:
            self.sampler.close(sequence.sampler_row)
        sequence.evidence = None
        self.sequences.pop(sequence.order, None)

    def forget_drafts(self, sequence: Sequence) -> None:
        """End its round, and close the sampler's states of drafts."""
        drafts, sequence.drafts = sequence.drafts, None
        for row in drafts.branches if drafts is not None else ():
            self.sampler.close(row)

    def _free_blocks(self, sequence: Sequence, publish: bool) -> None:
        if sequence.table is None:
            return
        if publish:
            self._publish(sequence)
        self._memory.close(sequence.table)
        sequence.table, sequence.restoring = None, False

    def _publish(self, sequence: Sequence) -> None:
        """Share the verified slots. A NaN among keys or values would spread to other requests."""
        request = sequence.parent.request
        if sequence.table is not None and request.use_prefix_cache:
            slots = sequence.publishable
            self._memory.publish(sequence.table, sequence.slots.keys, request.namespace, slots)
