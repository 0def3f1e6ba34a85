"""The engine's inside: sequences, one step at a time. One thread drives it; it knows no threads or queues."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from skim.attention.step import Backend, Role, Row
from skim.config import EngineConfig
from skim.engine.admission import check_request, room_for_reply
from skim.engine.candidates import candidates_of
from skim.engine.flight import Flight
from skim.engine.runner import RowInput
from skim.engine.scheduler import Limits, Tick, decide_tick
from skim.engine.sequence import Delta, Event, Failed, Finished, Request, Sequence
from skim.engine.start import make_runner
from skim.engine.stats import EngineStats
from skim.errors import ConfigError, EngineError, RequestError, SkimError
from skim.memory.budget import is_out_of_memory
from skim.memory.manager import MemoryManager
from skim.memory.prefix import Namespace
from skim.models.load import LoadedModel
from skim.prefill.plan_queue import PlanQueue
from skim.prefill.planner import Planned, Planner
from skim.prefill.reading import Reading
from skim.prefill.scoring.factory import make_scorers
from skim.sampling.batch import SamplerRow, to_device
from skim.sampling.grammar import GrammarCompiler
from skim.sampling.logprobs import Sampled
from skim.sampling.params import SamplingParams
from skim.sampling.sampler import Sampler
from skim.sampling.stop import Detokenizer, StopChecker, quick_decode

log = logging.getLogger(__name__)


class EngineCore:
    """Continuous batching over one model and one pool."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        backend: Backend | None = None,
        drafter: LoadedModel | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.max_model_len = config.model.max_model_len or model.max_positions
        if self.max_model_len > model.max_positions:
            raise ConfigError(
                f"max_model_len {self.max_model_len} is beyond the window of {model.name}, "
                f"which is {model.max_positions} tokens"
            )
        self.overlaps = model.device.type == "cuda"
        """Whether a step is launched before the host has seen what the one before it has drawn."""
        self.runner = make_runner(model, config, self.max_model_len, backend=backend, drafter=drafter)
        pool = self.runner.pool
        if pool.token_capacity < self.max_model_len:
            log.warning(
                "the KV pool holds %d tokens, fewer than the window of %d: longer requests will be refused",
                pool.token_capacity,
                self.max_model_len,
            )
        self.memory = MemoryManager(pool, prefix_caching=config.memory.enable_prefix_caching)
        self.sampler = Sampler(model.vocab_size, model.device)
        self._decoders = {skip: quick_decode(model.tokenizer, skip) for skip in (False, True)}
        self.grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_token_ids)
        self.limits = Limits(
            tokens=config.scheduler.token_budget(on_gpu=model.device.type == "cuda"),
            sequences=config.scheduler.max_num_seqs,
            block_size=config.memory.block_size,
            aging_steps=config.scheduler.aging_steps,
        )
        self.planner = Planner(make_scorers(model, drafter), self.max_model_len, self._cached_tokens)
        self.requests: dict[int, Request] = {}
        self.plans = PlanQueue(self.planner)
        self._flight: Flight | None = None
        self._sequences: dict[int, Sequence] = {}  # by order; followers join when their prompt is computed
        self._orders = itertools.count()
        self._steps = self._generated = self._preemptions = 0
        self._outcomes: Counter[str] = Counter()

    def stats(self) -> EngineStats:
        """Counts as they are now. Asked for while a step runs, they may be of neighbouring moments."""
        running = sum(1 for s in list(self._sequences.values()) if s.table is not None)
        return EngineStats(
            running=running,
            waiting=len(self._sequences) - running + len(self.plans),
            steps=self._steps,
            tokens_computed=self.runner.tokens_computed,
            tokens_generated=self._generated,
            preemptions=self._preemptions,
            outcomes=dict(self._outcomes),
            paths=dict(self.runner.paths),
            pool=self.memory.pool.stats(),
            prefix=self.memory.tree.stats.copy(),
            prefill=self.planner.stats.copy(),
            attention=self.runner.backend.counter.stats(),
        )

    def step(self) -> bool:
        """Run one slice of planning and one forward over what should run next; False if there is neither."""
        planned = self.plans.advance()
        tick = self._decide()
        if not tick.rows and self._flight is None:
            return planned
        rows = [(self._sequences[order], tokens) for order, tokens in tick.rows]
        launched = self._launch(rows) if rows else None
        self._land(launched)
        if launched is not None and (launched.must_land or not self.overlaps):
            self._land()
        return True

    def _launch(self, rows: list[tuple[Sequence, int]]) -> Flight | None:
        """Set one forward going and draw from its logits; None if it failed, which its requests are told."""
        try:
            inputs = self._prepare(rows)
            before = self._flight.draw if self._flight is not None else None
            logits = self.runner.forward(inputs, before)
            flight = self._draw(rows, logits)
            self._steps += 1
            return flight
        except Exception as error:
            if not is_out_of_memory(error):
                self._fail_all([sequence for sequence, _ in rows], error)
                return None
            reason = str(error)
        self._shed(rows, reason)  # not in the handler: there the error still holds the forward's memory
        return None

    def _land(self, launched: Flight | None = None) -> bool:
        """Take in what the step under way has drawn, now that another is or none; False if there was none."""
        flight, self._flight = self._flight, launched
        if flight is None:
            return False
        try:
            self._settle(flight)
        except Exception as error:
            self._fail_all(flight.sequences, error)
        return True

    def _fail_all(self, sequences: Iterable[Sequence], error: Exception) -> None:
        requests = {sequence.request.id: sequence.request for sequence in sequences}
        log.error("a forward failed; its %d requests end with an error", len(requests), exc_info=error)
        for request in requests.values():
            self.fail(request, EngineError(f"the forward failed: {type(error).__name__}: {error}"))

    def _shed(self, rows: list[tuple[Sequence, int]], reason: str) -> None:
        """Memory ran out: the row with most to compute ends with an error, the others are run again."""
        largest, tokens = max(rows, key=lambda row: (row[1], row[0].order))
        log.error(
            "out of memory in a step of %d rows; its largest request is given up: %s", len(rows), reason
        )
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        pool = "gpu_memory_utilization" if self.config.memory.kv_memory == "auto" else "kv_memory"
        self.fail(
            largest.request,
            EngineError(
                f"out of memory while {tokens} of its tokens were computed; lower max_num_batched_tokens "
                f"or {pool}"
            ),
        )

    # -- deciding

    def _decide(self) -> Tick:
        """Ask the scheduler until no more preemption is needed; count who was passed over."""
        while True:
            going = [s for _, s in sorted(self._sequences.items()) if not s.spent(self.max_model_len)]
            candidates = candidates_of(going, self.memory)
            spent = len(self._sequences) - len(going)  # they hold their places until their flight lands
            limits = replace(self.limits, sequences=self.limits.sequences - spent) if spent else self.limits
            tick = decide_tick(candidates, self.memory.available, limits)
            if tick.preempt is None:
                break
            if self._land():
                continue  # what is under way may end sequences; and it must be known before it is given up
            self._preempt(self._sequences[tick.preempt])
        chosen = {order for order, _ in tick.rows}
        for candidate in candidates:
            sequence = self._sequences[candidate.order]
            sequence.waited = 0 if candidate.order in chosen else sequence.waited + 1
        return tick

    # -- one step

    def _prepare(self, rows: list[tuple[Sequence, int]]) -> list[RowInput]:
        """Give every row its blocks. All prefixes are pinned before any block is taken."""
        for sequence, _ in rows:
            if sequence.table is None:
                self._admit(sequence)
        inputs = []
        for sequence, tokens in rows:
            table = sequence.table
            assert table is not None
            self.memory.extend(table, tokens)
            end = table.length + tokens
            decoding = sequence.decoding
            inputs.append(
                RowInput(
                    Row(
                        Role.DECODE if decoding else Role.PREFILL,
                        table.blocks,
                        table.length,
                        tokens,
                        sequence.slots.positions,
                        sequence.slots.ascend(end),
                        policy=None if decoding else sequence.request.policy,
                        prompt=sequence.slots.prompt,
                    ),
                    sequence.tokens[table.length : end],
                    wants_logits=end == len(sequence.tokens),
                    awaited=self._flight.places[sequence.order]
                    if self._flight is not None and sequence.slots.awaited
                    else None,
                )
            )
        return inputs

    def _admit(self, sequence: Sequence) -> None:
        request, match = sequence.request, sequence.match
        if request.cached_tokens is None:
            bypass = None if request.use_prefix_cache else "request"
            self.memory.count_query(sequence.slots.keys, match, bypass)
            request.cached_tokens = match.length
            request.mark_started()
        if match.length:
            self.memory.tree.touch(sequence.slots.keys, request.namespace)
        self._open_sampler_row(sequence)
        sequence.table = self.memory.open(match)
        sequence.verified = match.length

    def _open_sampler_row(self, sequence: Sequence) -> SamplerRow:
        """A sequence keeps its row through preemption: what it has counted is not in the pool."""
        if sequence.sampler_row is None:
            request = sequence.request
            sequence.sampler_row = self.sampler.open(
                request.params,
                request.prompt_token_ids,
                seed=sequence.seed,
                eos_token_ids=self.model.eos_token_ids,
                matcher=request.matcher.copy() if request.matcher is not None else None,
            )
        return sequence.sampler_row

    def _draw(self, rows: list[tuple[Sequence, int]], logits: torch.Tensor) -> Flight:
        """Draw where a sequence has no more to compute, and record what was computed.

        If that fails, nothing is recorded: rows can be run again.
        """
        sampled: list[SamplerRow] = []
        sources: list[int] = []
        ready = [s for s, tokens in rows if s.computed + tokens == len(s.tokens)]
        for source, sequence in enumerate(ready):
            for one in (sequence, *sequence.followers):
                sampled.append(self._open_sampler_row(one))
                sources.append(source)
        draw = None
        if sampled:
            if sources != list(range(len(ready))):
                logits = logits.index_select(0, to_device(torch.tensor(sources), logits.device))
            draw = self.sampler.draw(logits, sampled)
        for sequence, tokens in rows:
            assert sequence.table is not None
            sequence.table.length += tokens
        if draw is None:
            return Flight.without_draw(logits.device)
        sampling = [one for sequence in ready for one in (sequence, *self._fork_followers(sequence))]
        for sequence in sampling:
            sequence.slots.expect()
        return Flight.of(sampling, draw)

    def _settle(self, flight: Flight) -> None:
        """Wait for a step, give its sequences their tokens, and tell."""
        if flight.draw is None:
            if flight.done is not None:
                flight.done.synchronize()
            return
        sampled = self.sampler.read(flight.draw)
        for sequence, length, result in zip(flight.sequences, flight.lengths, sampled, strict=True):
            request = sequence.request
            if sequence.finished or request.id not in self.requests:
                continue  # it ended a step ago, or was aborted, or a sibling has just failed
            if not result.finite:
                self.fail(
                    request,
                    RequestError(result.error)
                    if result.error is not None
                    else EngineError("the model's logits are not finite (NaN or infinity)"),
                )
                continue
            sequence.verified = length
            self._accept(sequence, result)

    def _accept(self, sequence: Sequence, result: Sampled) -> None:
        """Take a sampled token. What goes wrong with one sequence's text is no concern of the others."""
        request, is_first = sequence.request, sequence.generated == 0
        request.mark_first_token()
        self._generated += 1
        try:
            delta = sequence.accept(result, self.model.eos_token_ids, self.max_model_len)
        except Exception as error:
            log.exception("request %d: its text failed", request.id)
            self.fail(request, EngineError(f"the token could not be turned into text: {error}"))
            return
        self.tell(request, delta)
        if sequence.finished:
            self._release(sequence)
            if all(one.finished for one in request.sequences):
                self._end(request, delta.finish_reason or "stop")
        elif is_first:
            self._publish(sequence)

    def _fork_followers(self, sequence: Sequence) -> list[Sequence]:
        """The other sequences of an n > 1 request, set going on the prompt's blocks."""
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            assert sequence.table is not None
            follower.table = self.memory.fork(sequence.table)
            self._sequences[follower.order] = follower
        return followers

    # -- a request's life

    def _cached_tokens(self, reading: Reading, namespace: Namespace) -> int:
        return self.memory.match(reading.slots().keys, namespace).length

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        if request.sparse is not None:
            self.plans.add(
                request.sparse,
                lambda planned, begun_at: self._planned(request, planned, begun_at),
                lambda error: self.fail(request, error),
                request=request.id,
            )
        else:
            self._begin(request, Planned(Reading(request.prompt_token_ids)))

    def _planned(self, request: Request, planned: Planned, begun_at: float) -> None:
        request.scoring_from, request.scoring_until = begun_at, time.perf_counter()
        self._begin(request, planned)

    def _begin(self, request: Request, planned: Planned) -> None:
        """Enter a request's sequences into the schedule, now that it is known what of its prompt is read."""
        request.planned = planned
        try:
            reading = planned.reading
            request.max_tokens = self.room_for_reply(
                len(reading.tokens), reading.end, request.params, planned.problem
            )
            self._make_sequences(request, reading)
        except RequestError as error:
            self.fail(request, error)
        except Exception as error:
            log.exception("a request could not be set up")
            self.fail(request, EngineError(f"the request could not be set up: {error}"))

    def _make_sequences(self, request: Request, reading: Reading) -> None:
        params = request.params
        seed = params.seed if params.seed is not None else secrets.randbits(63)

        for index in range(params.n):
            request.sequences.append(
                Sequence(
                    request=request,
                    index=index,
                    order=next(self._orders),
                    slots=reading.slots(),
                    seed=seed + index,
                    detokenizer=Detokenizer(
                        self._decoders[params.skip_special_tokens], request.prompt_token_ids
                    ),
                    stops=StopChecker(params.stop, params.include_stop_str_in_output),
                )
            )
        leader, *followers = request.sequences
        leader.followers = followers
        self._sequences[leader.order] = leader

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it is computed again later and goes on where it stopped."""
        self._preemptions += 1
        sequence.request.preemptions += 1
        self._give_back(sequence, publish=True)
        sequence.match_version = -1

    def abort(self, request_id: int) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return
        self.plans.drop(request_id)
        unfinished = set(range(request.params.n))
        for sequence in request.sequences:
            if sequence.finished:
                unfinished.remove(sequence.index)
            else:
                sequence.finished = True
                self._release(sequence)
        for index in sorted(unfinished):
            self.tell(request, Delta(index, "", finish_reason="abort"))
        self._end(request, "abort")

    def fail(self, request: Request, error: SkimError) -> None:
        if request.id not in self.requests:
            return  # it ended earlier in the same step
        self.plans.drop(request.id)
        for sequence in request.sequences:
            self._release(sequence, publish=False)
        self._outcomes["error"] += 1
        del self.requests[request.id]
        self.tell(request, Failed(error))

    def _end(self, request: Request, outcome: str) -> None:
        self._outcomes[outcome] += 1
        del self.requests[request.id]
        plan = request.planned.plan if request.planned is not None else None
        self.tell(request, Finished(request.metrics(), plan))

    def tell(self, request: Request, event: Event) -> None:
        """Hand news to the caller; a caller that cannot take it harms nobody else."""
        try:
            request.emit(event)
        except Exception:
            log.exception("request %d: its receiver raised", request.id)

    def _release(self, sequence: Sequence, publish: bool = True) -> None:
        self._give_back(sequence, publish)
        if sequence.sampler_row is not None:
            self.sampler.close(sequence.sampler_row)
        self._sequences.pop(sequence.order, None)

    def _give_back(self, sequence: Sequence, publish: bool) -> None:
        if sequence.table is None:
            return
        if publish:
            self._publish(sequence)
        self.memory.close(sequence.table)
        sequence.table = None

    def _publish(self, sequence: Sequence) -> None:
        """Share what finite logits have followed: a NaN among keys or values would poison later requests."""
        if sequence.table is not None and sequence.request.use_prefix_cache:
            keys = sequence.slots.keys[: sequence.verified]
            self.memory.publish(sequence.table, keys, sequence.request.namespace)

    def check_request(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        check_request(prompt, params, vocab_size=self.model.vocab_size, sequences=self.limits.sequences)

    def room_for_reply(
        self, slots: int, end: int, params: SamplingParams, unskimmed: str | None = None
    ) -> int:
        """The most tokens that may be generated after what is read; an error if there can be none."""
        return room_for_reply(
            slots,
            end,
            params,
            window=self.max_model_len,
            widest_window=self.model.max_positions,
            pool_tokens=self.memory.pool.token_capacity,
            unskimmed=unskimmed,
        )
