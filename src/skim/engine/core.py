"""The step loop: decide, launch, finish. One thread drives it; it knows nothing of threads or queues."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import torch

from skim.attention.backend import Backend
from skim.attention.step import Role, Row
from skim.config import EngineConfig
from skim.decode.drafts import TOGETHER
from skim.device import to_device
from skim.engine.candidates import candidates_of
from skim.engine.drafting import Drafting
from skim.engine.graphs import launches
from skim.engine.in_flight import Chunks, InFlightStep, Masses, PromptReports, Timer
from skim.engine.intake import Intake
from skim.engine.keeper import Keeper
from skim.engine.lifecycle import Lifecycle
from skim.engine.pace import Pace, Work, prefill_limit
from skim.engine.residency import EngineResidency
from skim.engine.results import Results
from skim.engine.runner import Forward, RowInput
from skim.engine.scheduler import Candidate, Limits, Tick, decide_tick
from skim.engine.sequence import Sequence
from skim.engine.slots import AWAITED, Slots
from skim.engine.slow_fast import SlowFast
from skim.engine.start import make_runner
from skim.engine.stats import EngineStats
from skim.errors import ConfigError, EngineError
from skim.memory.budget import is_out_of_memory
from skim.memory.manager import MemoryManager
from skim.memory.prefix import Namespace
from skim.models.load import LoadedModel
from skim.prefill.plan_queue import Entry
from skim.prefill.planner import Planner
from skim.prefill.reading import Reading
from skim.prefill.scoring.decoding import decoder_of
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.scorer import SLICE_SECONDS
from skim.sampling.batch import SamplerRow
from skim.sampling.sampler import Sampler

log = logging.getLogger(__name__)

# Shares of the step-time target:
SLICE_SHARE = 0.8  # for a slice of scoring on a GPU; decode rows take the rest
GPU_PLAN_SHARE = 0.125  # for planning on the host, while a GPU computes the step before
CPU_PLAN_SHARE = 0.5


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
                f"max_model_len {self.max_model_len} is beyond the context window of {model.name}, "
                f"which is {model.max_positions} tokens; lower it, or leave it out",
                fields="max_model_len",
            )
        self.overlaps = model.device.type == "cuda"
        """True if a step is launched while the previous one is in flight."""
        self.residency = EngineResidency(model, drafter, config.residency.residency)
        self.runner = make_runner(
            model, config, self.max_model_len, self.residency, backend=backend, drafter=drafter
        )
        self.apart = self.runner.graphs is not None
        """True if decode rows and chunks are launched apart, where that lets them run as graphs."""
        pool = self.runner.pool
        if pool.token_capacity < self.max_model_len:
            log.warning(
                "the KV pool holds %d tokens, fewer than the context window of %d: longer requests "
                "will be refused",
                pool.token_capacity,
                self.max_model_len,
            )
        if config.has_summaries and not pool.summarized:
            log.warning("slow_fast has no effect: every layer of the model has a sliding window")
        self.memory = MemoryManager(pool, prefix_caching=config.memory.enable_prefix_caching)
        self.limits = Limits(
            tokens=config.scheduler.token_budget(on_gpu=model.device.type == "cuda"),
            sequences=config.scheduler.max_num_seqs,
            block_size=pool.block_size,
            aging_steps=config.scheduler.aging_steps,
            groups=len(pool.groups),
            samples=max(config.scheduler.max_num_seqs, TOGETHER),
        )
        self.pace = Pace()
        self.target_seconds = (config.scheduler.step_time_target or 0) / 1e3
        """The time that a step with decode rows should take; 0 for no target."""
        share, default = (GPU_PLAN_SHARE, 25.0) if self.overlaps else (CPU_PLAN_SHARE, 150.0)
        self._plan_seconds = share * (self.target_seconds or default / 1e3)
        self.planner = Planner(
            make_scorers(model, drafter),
            self.max_model_len,
            self._cached_tokens,
            decoder_of(model.tokenizer),
            min(SLICE_SECONDS, SLICE_SHARE * self.target_seconds or SLICE_SECONDS),
        )
        sampler = Sampler(model.vocab_size, model.device)
        self.slow_fast = SlowFast(pool, config.decode, self.max_model_len, model.tokenizer.decode)
        self.intake = Intake(model, config, self.max_model_len, pool, self.planner, self.slow_fast)
        self.lifecycle = Lifecycle(
            self.intake, model.eos_token_ids, self.max_model_len, self.memory, sampler, self.planner
        )
        self.keeper = Keeper(model, self.memory, config.memory) if config.memory.checkpoint_dir else None
        self.drafting = Drafting(
            self.lifecycle,
            self.memory,
            self.slow_fast,
            max_model_len=self.max_model_len,
            eos_token_ids=model.eos_token_ids,
            step_tokens=self.limits.tokens,
        )
        self._results = Results(self.lifecycle, self.drafting, self.slow_fast, self.pace)
        drop = self.runner.graphs.drop if self.runner.graphs is not None else lambda: None
        self.residency.serve(self.lifecycle, finish=self._finish, relocated=drop)
        self._in_flight: InFlightStep | None = None
        self._step_sizes: Counter[int] = Counter()

    def _cached_tokens(self, reading: Reading, namespace: Namespace) -> int:
        """Tokens of a prompt that need not be computed: cached, or stored in checkpoints."""
        keys = Slots(reading).keys
        stored = self.keeper.stored_tokens(keys, namespace) if self.keeper is not None else 0
        return max(stored, self.memory.match(keys, namespace).length)

    def stats(self) -> EngineStats:
        """Current counts. Read from another thread, they may differ by a step from each other."""
        lifecycle = self.lifecycle
        running = sum(1 for s in list(lifecycle.sequences.values()) if s.table is not None)
        return EngineStats(
            running=running,
            waiting=len(lifecycle.sequences) - running + len(lifecycle.plans),
            step_sizes=dict(self._step_sizes),
            tokens_computed=self.runner.tokens_computed,
            tokens_generated=lifecycle.tokens_generated,
            prompt_tokens_reported=self.runner.prompt_tokens_reported,
            preemptions=lifecycle.preemptions,
            outcomes=dict(lifecycle.outcomes),
            paths=dict(self.runner.paths),
            pool=self.memory.pool.stats(),
            prefix=self.memory.tree.stats.copy(),
            prefill=self.planner.stats.copy(),
            attention=self.runner.backend.counter.stats(),
            decode=self.slow_fast.stats.copy(),
            checkpoints=self.keeper.stats() if self.keeper is not None else None,
            residency=self.residency.states(),
            residency_policy=self.residency.policy,
        )

    def step(self) -> bool:
        """Run a few slices of planning and one forward; False if there is nothing to do."""
        with self.residency.held():
            return self._step()

    def _step(self) -> bool:
        turn = self.residency.take_turn()
        planned = self._plan(self.residency.may_run(turn))
        if not turn.rows:
            return planned
        # Restores take blocks, so they come before the decision, which relies on cached prefixes.
        restored = self.keeper is not None and self.keeper.advance(self._plan_seconds, wait=False)
        tick, candidates = self._decide()
        if not tick.rows and self._in_flight is None:
            if planned or self.keeper is None:
                return planned
            return self.keeper.advance(self._plan_seconds, wait=True) or restored
        sequences = self.lifecycle.sequences
        self._admit([sequences[order] for order, _ in tick.rows])
        for part in self._launches(tick):
            rows = [(sequences[order], tokens) for order, tokens in part if order in sequences]
            launched = self._launch(rows, Work.of(candidates, part)) if rows else None
            self._finish(launched)
            if launched is not None and (launched.must_finish or not self.overlaps):
                self._finish()
        return True

    def finish(self) -> bool:
        """Finish the step in flight; False if there is none."""
        return self._finish()

    def abort(self, request_id: int) -> None:
        """End a request and publish the verified part of its prompt. A chunk in flight is waited for."""
        chunks = self._in_flight.chunks.sequences if self._in_flight is not None else ()
        if any(sequence.parent.id == request_id for sequence in chunks):
            self._finish()
        self.lifecycle.abort(request_id)

    # -- plan and decide

    @property
    def _decodes(self) -> bool:
        return any(sequence.decoding for sequence in self.lifecycle.sequences.values())

    def _plan(self, may_run: Callable[[Entry], bool]) -> bool:
        """Run slices of planning for a while, or until the device works on one; False without a plan.

        Without decode rows one slice is enough: the next step follows at once.
        """
        plans = self.lifecycle.plans
        planned = plans.advance(may_run)
        if planned and self._decodes:
            end = time.perf_counter() + self._plan_seconds
            while not self.planner.handed_over and time.perf_counter() < end and plans.advance(may_run):
                pass
        return planned

    def _decide(self) -> tuple[Tick, Rows[Candidate]]:
        """Ask the scheduler until no preemption is needed, and count the sequences that were passed over."""
        sequences = self.lifecycle.sequences
        while True:
            if self.drafting.waits:
                self._finish()
            self.drafting.plan(sequences.values())
            going = [s for s in sequences.values() if not s.spent(self.max_model_len)]
            candidates = candidates_of(going, self.memory)
            spent = len(sequences) - len(going)  # they hold their places until the in-flight step is finished
            limits = replace(
                self.limits,
                sequences=self.limits.sequences - spent,
                prefill=prefill_limit(candidates, self.limits, self.pace, self.target_seconds),
            )
            tick = decide_tick(candidates, self.memory.available, limits)
            if tick.preempt is None:
                break
            if self._finish():
                continue  # its tokens must be read before a preemption, and may end sequences
            if self.drafting.drop():
                continue
            self.lifecycle.preempt(sequences[tick.preempt])
        chosen = {order for order, _ in tick.rows}
        if self.keeper is not None:
            keeper = self.keeper
            begun = {o for o in chosen if self.lifecycle.restore(sequences[o], keeper)}
            tick = replace(tick, rows=tuple(row for row in tick.rows if row[0] not in begun))
        for candidate in candidates:
            sequence = sequences[candidate.order]
            sequence.waited = 0 if candidate.order in chosen else sequence.waited + 1
        return tick, candidates

    # -- launch

    def _admit(self, sequences: Rows[Sequence]) -> None:
        """Reference all cached prefixes, before any block is allocated."""
        for sequence in sequences:
            if sequence.table is None:
                try:
                    self.lifecycle.admit(sequence)
                except Exception as error:
                    self.lifecycle.fail_all([sequence], error)

    def _launches(self, tick: Tick) -> list[list[tuple[int, int]]]:
        """The rows of a step, divided into launches; one without rows finishes the step before."""
        sequences = self.lifecycle.sequences
        rows = [row for row in tick.rows if row[0] in sequences]
        if not self.apart or not rows:
            return [rows]
        return launches(rows, [sequences[order].decoding for order, _ in rows])

    def _launch(self, rows: list[tuple[Sequence, int]], work: Work) -> InFlightStep | None:
        """Launch one forward and sample from its logits; None if it failed, which fails its requests."""
        try:
            inputs = self._prepare(rows)
            before = self._in_flight.draw if self._in_flight is not None else None
            timer = Timer(work, self.model.device) if self.target_seconds else None
            launched = self._draw(rows, inputs, self.runner.forward(inputs, before), timer)
            self._step_sizes[sum(tokens for _, tokens in rows)] += 1
            return launched
        except Exception as error:
            if not is_out_of_memory(error):
                self.lifecycle.fail_all([sequence for sequence, _ in rows], error)
                return None
            reason = str(error)
        self._shed(rows, reason)  # outside the handler, where the error still holds the forward's memory
        return None

    def _prepare(self, rows: list[tuple[Sequence, int]]) -> list[RowInput]:
        """Allocate blocks for every row."""
        inputs = []
        for sequence, tokens in rows:
            table = sequence.table
            assert table is not None
            self.memory.extend(table, tokens)
            end = table.length + tokens
            decoding = sequence.decoding
            row = Row(
                Role.DECODE if decoding and tokens == 1 else Role.PREFILL,
                table.blocks,
                table.length,
                tokens,
                sequence.slots.positions,
                sequence.slots.ascend(end),
                policy=None if decoding else sequence.parent.request.policy,
                prompt=sequence.slots.prompt,
                others=table.tables[1:],
            )
            inputs.append(
                RowInput(
                    self.slow_fast.row(sequence, row) if decoding else self.slow_fast.chunk(sequence, row),
                    sequence.tokens[table.length : end],
                    wants_logits=tokens if decoding else int(sequence.samples_after(tokens)),
                    awaited=self._in_flight.places[sequence.order]
                    if self._in_flight is not None and sequence.tokens[end - 1] == AWAITED
                    else None,
                    targets=sequence.targets(tokens),
                )
            )
        return inputs

    def _draw(
        self,
        rows: list[tuple[Sequence, int]],
        inputs: list[RowInput],
        computed: Forward,
        timer: Timer | None,
    ) -> InFlightStep:
        """Sample for each row whose tokens are all computed, then advance the block tables.

        If sampling fails, no table has advanced and the rows can be run again.
        """
        sampler_rows: list[SamplerRow] = []
        sources: list[int] = []
        logits, finite, prompt, mass = computed
        ready = [s for s, tokens in rows if s.samples_after(tokens)]
        unfinished = [s for s, tokens in rows if not s.samples_after(tokens)]
        targets = [(s, wanted) for s, tokens in rows if (wanted := s.targets(tokens)) is not None]
        source = 0
        for sequence in ready:
            own = self.drafting.sampler_rows(sequence)
            sampler_rows += own
            sources += range(source, source + len(own))
            sampler_rows += map(self.lifecycle.sampler_row, sequence.followers)
            sources += [source] * len(sequence.followers)
            source += len(own)
        draw = None
        if sampler_rows:
            if sources != list(range(source)):
                logits = logits.index_select(0, to_device(torch.tensor(sources), logits.device))
            draw = self.lifecycle.sampler.draw(logits, sampler_rows)
        fast = self.slow_fast.launched([s for s, _ in rows], [one.row for one in inputs])
        for sequence, tokens in rows:
            sequence.advance(tokens)
        sampling = [one for sequence in ready for one in self.drafting.expect(sequence)]
        chunks, prompts = Chunks.of(unfinished, finite), PromptReports.of(targets, prompt)
        if timer is not None:
            timer.stop()
        return InFlightStep.of(sampling, draw, chunks, prompts, logits.device, timer, Masses.of(fast, mass))

    def _shed(self, rows: list[tuple[Sequence, int]], reason: str) -> None:
        """Out of memory: fail the request of the row with the most tokens; the other rows are run again."""
        largest, tokens = max(rows, key=lambda row: (row[1], row[0].order))
        log.error("out of memory in a step of %d rows; its largest request fails: %s", len(rows), reason)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        pool = "gpu_memory_utilization" if self.config.memory.kv_memory == "auto" else "kv_memory"
        self.lifecycle.fail(
            largest.parent,
            EngineError(
                f"out of memory while {tokens} of its tokens were computed; lower max_num_batched_tokens "
                f"or {pool}"
            ),
        )

    # -- finish

    def _finish(self, launched: InFlightStep | None = None) -> bool:
        """Finish the in-flight step and put `launched` in its place; False if there was none."""
        step, self._in_flight = self._in_flight, launched
        if step is None:
            return False
        try:
            self._results.read(step)
        except Exception as error:
            self.lifecycle.fail_all(step.sequences, error)
        return True
