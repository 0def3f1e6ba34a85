"""The engine as a contender: driven step by step on the turn's thread and timed from outside."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from skim.bench.inputs import Prompt
from skim.bench.turns import alone, check_interrupt
from skim.config import DecodeConfig, EngineConfig, PrefillConfig
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Event, Failed, Finished, RequestMetrics
from skim.errors import ConfigError
from skim.measure.modes import Mode
from skim.measure.report import MeasurementError
from skim.memory.pool import KVPool
from skim.memory.prefix import Namespace
from skim.models.load import LoadedModel
from skim.prefill.anatomy import map_text
from skim.prefill.plan import DenseReason
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

TimedEvents = list[tuple[float, Event]]
"""Events of a request with the times at which they arrived."""

_READ_IN_FULL = "the prompt was not skimmed but read in full"
FILLED_SLOTS = 8192  # slots that get random keys and values at once
SLACK = 64  # tokens that a row may generate while another row's prompt is read,
SLICE = 256  # plus one for each of this many tokens of that prompt


@dataclass(frozen=True)
class Phases:
    """The time to first token split into parts, in seconds, and the tokens it covered."""

    queue: float  # everything but scoring and prefill
    scoring: float
    prefill: float
    kept: int
    cached: int
    read: float | None = None  # share of key blocks read by block-sparse attention; None without it


@dataclass(frozen=True)
class FirstToken:
    """Times of a prompt's first token and of the decode step after it."""

    ttft: float
    first_decode: float | None
    prompt_tokens: int
    phases: Phases | None = None  # None if the contender does not report them


@dataclass(frozen=True)
class Steps:
    """Decode steps of a batch: seconds of each, for one token of each row, and tokens in memory half-way."""

    seconds: tuple[float, ...]
    contexts: tuple[int, ...]
    read: float = 1.0  # share of the contexts' blocks that slow-fast decode reads in a forward
    forwards: float = 1.0  # for one token of each row: others than 1 if tokens are drafted


class Driver:
    """An engine without its thread. Steps run synchronously, so its phases and our clock are comparable."""

    def __init__(self, model: LoadedModel, config: EngineConfig, drafter: LoadedModel | None = None) -> None:
        self.model = model
        self._config = config
        self._drafter = drafter
        self.engine = alone(lambda: Engine(model, config, drafter=drafter))  # it tries out its kernels

    @property
    def config(self) -> EngineConfig:
        return self._config

    def with_settings(self, config: EngineConfig) -> Driver:
        """A separate engine with other settings over the same module; this one if it has the settings."""
        return self if config == self._config else Driver(self.model, config, self._drafter)

    @property
    def window(self) -> int:
        return self.engine.core.max_model_len

    def forget(self) -> None:
        """Empty the prefix cache."""
        memory = self.engine.core.memory
        memory.tree.evict(memory.pool.capacity)

    # -- the first token

    def first_token(self, prompt: Prompt, prefill: PrefillConfig, *, warm: bool = False) -> FirstToken:
        """Read a prompt and generate two tokens. Raise if the prompt was not read as its mode says."""
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        before = self.engine.stats().attention
        begun = time.perf_counter()
        with self._request(prompt, params, prefill) as (_, events):
            self._step_until(lambda: bool(events) and isinstance(events[-1][1], Finished), [events])
        after = self.engine.stats().attention
        stamps = [at for at, event in events if isinstance(event, Delta) for _ in event.token_ids]
        metrics = _metrics(events)
        if len(stamps) != 2 or metrics.generated_tokens != 2:
            raise MeasurementError(f"the reply has {len(stamps)} tokens instead of 2")
        _check_reading(metrics, len(prompt), prefill, warm)
        ttft = stamps[0] - begun
        scoring, prefilling = metrics.scoring_ms / 1e3, metrics.prefill_ms / 1e3
        if scoring + prefilling > ttft * (1 + 1e-6):
            raise MeasurementError(
                f"the engine reports {scoring + prefilling:.6f} s of scoring and prefill, but the first "
                f"token came after {ttft:.6f} s"
            )
        seen = after.visible - before.visible
        phases = Phases(
            ttft - scoring - prefilling,
            scoring,
            prefilling,
            metrics.kept_tokens,
            metrics.cached_tokens,
            (after.read - before.read) / seen if seen else None,
        )
        return FirstToken(ttft, stamps[1] - stamps[0], len(prompt), phases)

    # -- decode steps

    def check_room(self, tokens: int, prefill: PrefillConfig, batch: int = 1, steps: int = 0) -> None:
        """Raise, before prompts are made, if they can never be read or never share a step."""
        core = self.engine.core
        if not prefill.skims(tokens):
            core.intake.room_for_reply(tokens, tokens, SamplingParams(max_tokens=1))
        if batch > core.limits.sequences:
            raise MeasurementError(
                f"a batch of {batch} is more than max_num_seqs, {core.limits.sequences}; raise it"
            )
        pool, length = core.memory.pool, tokens + steps
        needed = batch * pool.geometry.blocks_of(length)
        if needed > pool.capacity and not prefill.skims(tokens):
            raise MeasurementError(
                f"{batch} rows of {length} tokens take {needed} blocks, and the pool has {pool.capacity}; "
                "raise kv_memory"
            )

    def decode(
        self,
        prompts: Sequence[Prompt],
        prefill: PrefillConfig,
        steps: int,
        decode: DecodeConfig | None = None,
        *,
        filled: bool = False,
    ) -> Steps:
        """Time decode steps with a row for every prompt, after all prompts have been read.

        A dense prompt's keys and values are random numbers: the time of a step does not depend on them, and
        computing them would take longer than the measurement. With `filled`, they are in the prefix cache
        already (`fill`), and stay there.
        """
        batch, context = len(prompts), len(prompts[0])
        room = self.window - context
        most = steps + 2 + (SLACK + context // SLICE) * batch
        params = SamplingParams(
            temperature=0, max_tokens=min(most, room) if room > 0 else most, ignore_eos=True
        )
        try:
            skims = prefill.skims(context)
            if not skims and not filled:
                self.fill(prompts)
            with contextlib.ExitStack() as stack:
                rows = [
                    stack.enter_context(self._request(prompt, params, prefill, decode)) for prompt in prompts
                ]
                watched = [events for _, events in rows]
                self._step_until(lambda: all(_written(events) >= 2 for events in watched), watched)
                ids = [handle.id for handle, _ in rows]
                if skims:
                    self._check_skimmed(ids)
                decode = decode or self._config.decode
                return self._timed_steps(ids, steps, drafts=decode.least_margin(greedy=True) > 0)
        finally:
            if not filled:
                self.forget()

    def fill(self, prompts: Sequence[Prompt]) -> None:
        """Put random keys and values for prompts into the prefix cache."""
        for prompt in prompts:
            self._fill(prompt.tokens)

    def _check_skimmed(self, ids: Sequence[int]) -> None:
        for one in ids:
            planned = self.engine.core.lifecycle.requests[one].planned
            if planned is None or planned.plan is None:
                reason = planned.fallback if planned is not None else None
                raise MeasurementError(f"{_READ_IN_FULL}: {reason or 'no reason given'}")

    def _timed_steps(self, ids: Sequence[int], steps: int, *, drafts: bool = False) -> Steps:
        """With `drafts`, a step may write several tokens or none: its time is shared by those it writes.

        Rows of a batch write at different steps, so tokens are counted until each row has one on average.
        """
        core = self.engine.core
        seconds: list[float] = []
        contexts: tuple[int, ...] = ()
        decoded = core.slow_fast.stats.copy()
        first = before = core.stats().tokens_generated
        forwards, pending, start = 0, 0, time.perf_counter()
        while len(seconds) < steps:
            check_interrupt()
            self.engine.step()
            forwards += 1
            after = core.stats().tokens_generated
            written, before = after - before, after
            ended = any(one not in core.lifecycle.requests for one in ids)
            if ended or (written != len(ids) and not drafts):
                raise MeasurementError(
                    f"a step wrote {written} tokens for {len(ids)} rows: some ended or failed"
                )
            pending += written
            whole = pending // len(ids)  # tokens of each row
            if not whole:
                continue
            spent = (time.perf_counter() - start) * whole * len(ids) / pending  # with the time between steps
            seconds += [spent / whole] * whole
            start, pending = start + spent, pending - whole * len(ids)
            if not contexts and len(seconds) > steps // 2:
                contexts = tuple(core.lifecycle.requests[one].sequences[0].computed for one in ids)
        stats = core.slow_fast.stats
        blocks = stats.blocks - decoded.blocks
        read = (stats.blocks_read - decoded.blocks_read) / blocks if blocks else 1.0
        return Steps(tuple(seconds), contexts, read, forwards * len(ids) / (after - first))

    def _fill(self, tokens: tuple[int, ...]) -> None:
        memory = self.engine.core.memory
        known = len(tokens) - 1
        if not memory.prefix_caching or known < memory.pool.block_size:
            return
        table = memory.open()
        try:
            for first in range(0, known, FILLED_SLOTS):
                end = min(first + FILLED_SLOTS, known)
                memory.extend(table, end - first)
                _write_random(memory.pool, table.tables, first, end)
                table.length = end
                memory.slide(table, end, tokens, Namespace(), publishable=end)
            memory.publish(table, tokens[:known], Namespace())
        finally:
            memory.close(table)

    # -- driving

    @contextlib.contextmanager
    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        prefill: PrefillConfig,
        decode: DecodeConfig | None = None,
    ) -> Iterator[tuple[RequestHandle, TimedEvents]]:
        """Submit a request and collect its events with their times; abort it on exit."""
        events: TimedEvents = []
        anatomy = map_text(prompt.tokens, prompt.asking)
        request = Request(prompt.tokens, params, prefill, anatomy, decode=decode)
        handle = self.engine.submit(request, lambda event: events.append((time.perf_counter(), event)))
        try:
            yield handle, events
        finally:
            if handle.id in self.engine.core.lifecycle.requests:
                self.engine.core.abort(handle.id)
            else:
                handle.abort()  # the engine may not have received it yet

    def _step_until(self, done: Callable[[], bool], watched: Sequence[TimedEvents]) -> None:
        """Run steps until `done`. A failed request raises, and so does an engine without work."""
        while not done():
            check_interrupt()
            busy = self.engine.step()
            for events in watched:
                if events and isinstance(failure := events[-1][1], Failed):
                    raise failure.error
            if not busy and not done():
                raise MeasurementError("the engine stopped before the reply was complete")


def free_memory() -> None:
    """Free the memory of engines and models that are not used any more. They have reference cycles."""
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def drivers_of(driver: Driver, modes: Sequence[Mode]) -> dict[str, Driver]:
    """An engine for each mode, by its name. Modes that need the same settings share one."""
    if others := [mode.name for mode in modes if mode.quantization is not None]:
        raise ConfigError(
            f"mode {others[0]!r}: bench measures one format of the weights in a run; use --quantization"
        )
    configs = {mode.name: mode.engine(driver.config) for mode in modes}
    made = {config: driver.with_settings(config) for config in dict.fromkeys(configs.values())}
    return {name: made[config] for name, config in configs.items()}


def _metrics(events: TimedEvents) -> RequestMetrics:
    end = events[-1][1]
    assert isinstance(end, Finished)
    return end.metrics


def _written(events: TimedEvents) -> int:
    return sum(len(event.token_ids) for _, event in events if isinstance(event, Delta))


def _check_reading(metrics: RequestMetrics, tokens: int, prefill: PrefillConfig, warm: bool) -> None:
    """Raise unless the prompt was read as its mode says, with the prefix cache as cold or warm as its row."""
    if metrics.prompt_tokens != tokens:
        raise MeasurementError(f"the engine counts {metrics.prompt_tokens} prompt tokens, not {tokens}")
    skims = prefill.skims(tokens)  # `auto` is dense below its threshold
    if not skims and (metrics.kept_tokens != tokens or metrics.scorer is not None):
        raise MeasurementError(f"dense, but {metrics.kept_tokens} of {tokens} tokens were read")
    if skims and metrics.scorer is None and metrics.fallback is not DenseReason.MOSTLY_CACHED:
        raise MeasurementError(f"{_READ_IN_FULL}: {metrics.fallback or 'no reason given'}")
    if warm and not metrics.cached_tokens:
        raise MeasurementError("warm, but nothing was found in the prefix cache; is it enabled?")
    if not warm and metrics.cached_tokens:
        raise MeasurementError(f"cold, but {metrics.cached_tokens} tokens were found in the prefix cache")


@torch.inference_mode()
def _write_random(pool: KVPool, tables: Sequence[Sequence[int]], first: int, end: int) -> None:
    """Write random keys and values into the slots `first : end` of a sequence, in every layer."""
    runs = [pool.runs(table, first, end) for table in tables]
    for layer, shape in enumerate(pool.layers):
        sizes = ((end - first, shape.kv_heads, dim) for dim in (shape.key_dim, shape.value_dim))
        key, value = (torch.randn(size, dtype=pool.dtype, device=pool.device) for size in sizes)
        pool.write(layer, runs[pool.group_of[layer]], key, value)
