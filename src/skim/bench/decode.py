"""Decode step times over contexts, batches and modes, compared with the time to read a step's bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from skim.bench.ceiling import Ceiling
from skim.bench.drive import Driver, Steps, drivers_of
from skim.bench.inputs import Prompts, several
from skim.bench.llama import LlamaCpp
from skim.bench.peers import Peer
from skim.bench.turns import Turn, take_turns
from skim.bench.work import Work
from skim.measure.modes import Mode
from skim.measure.report import Figure, MeasurementError, Row, plain, tail, timing
from skim.memory.formats import make_stores

LLAMA_DTYPE = torch.float16  # llama.cpp stores keys and values as float16


@dataclass(frozen=True)
class Task:
    """The grid of a run: one row for each context, batch and contender."""

    contexts: Sequence[int]
    batches: Sequence[int]
    modes: Sequence[Mode]
    peers: Sequence[Peer]
    repeats: int
    steps: int  # timed in each repeat


@dataclass(frozen=True)
class Sample:
    """One repeat's steps, and the bytes that each step must read."""

    steps: Steps
    bytes: int  # a mean, if steps differ
    differ: bool = False  # slow and fast steps: the median hides the slow ones

    @property
    def seconds(self) -> float:
        """Of a typical step."""
        return (statistics.fmean if self.differ else statistics.median)(self.steps.seconds)


def measure_decode(
    driver: Driver,
    task: Task,
    prompts: Prompts,
    work: Work,
    ceiling: Ceiling,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure one row for each context, batch and contender."""
    contenders: list[Mode | Peer] = [*task.modes, *task.peers]
    drivers = drivers_of(driver, task.modes)
    turns = [
        Turn(
            [{"context": context, "batch": batch, "mode": contender.name}],
            _measure(
                drivers.get(contender.name, driver), contender, prompts, work, context, batch, task.steps
            ),
        )
        for context in task.contexts
        for batch in task.batches
        for contender in contenders
    ]
    outcomes = take_turns(turns, task.repeats, tell)
    return [
        outcome.row(task.repeats, lambda samples: figures_of(samples, ceiling.bandwidth))
        for outcome in outcomes
    ]


def _measure(
    driver: Driver,
    contender: Mode | Peer,
    prompts: Prompts,
    work: Work,
    context: int,
    batch: int,
    steps: int,
) -> Callable[[int], Iterator[Sample]]:
    def measure(repeat: int) -> Iterator[Sample]:
        if isinstance(contender, Mode):
            driver.check_room(context, contender.prefill, batch, steps)
        each = several(prompts, context, repeat, batch)
        pool = driver.engine.core.memory.pool
        stores, own = pool.stores, work
        if isinstance(contender, Mode):
            taken = driver.decode(each, contender.prefill, steps, contender.decode)
        else:
            taken = contender.decode(each, steps)
            if isinstance(contender, LlamaCpp):
                stores = make_stores(work.layers, LLAMA_DTYPE)
                own = replace(work, weight_bytes=contender.weight_bytes(), expert_bytes=0)
        if len(taken.contexts) != batch or not taken.seconds:
            raise MeasurementError(
                f"expected steps of {batch} rows, got {len(taken.seconds)} of {len(taken.contexts)} rows"
            )
        read = [round(tokens * taken.read) for tokens in taken.contexts]
        differ = isinstance(contender, Mode) and contender.decode is not None
        size = round(taken.forwards * own.step_bytes(read, stores, pool.block_size))
        yield Sample(taken, size, differ)

    return measure


def figures_of(samples: Sequence[Sample], bandwidth: float) -> dict[str, Figure]:
    """The median step of each repeat, and the share of it that reading the bytes at full bandwidth takes.

    `of_floor` is 1 at the limit. It exceeds 1 only if data fits the processor's caches or rows choose the
    same experts. Its range spans the repeats. The bandwidth is measured once for all repeats, so `of_floor`
    also varies with it between runs.
    """
    medians = [statistics.median(sample.steps.seconds) for sample in samples]
    typical = [sample.seconds for sample in samples]
    floors = [sample.bytes / bandwidth for sample in samples]
    batch = len(samples[0].steps.contexts)
    shares = [floor / seconds for floor, seconds in zip(floors, typical, strict=True)]
    return {
        "step": timing([seconds * 1e3 for seconds in medians], "ms"),
        "step_mean": timing([statistics.fmean(sample.steps.seconds) * 1e3 for sample in samples], "ms"),
        "step_p99": tail([[seconds * 1e3 for seconds in sample.steps.seconds] for sample in samples], "ms"),
        "throughput": timing([batch / seconds for seconds in typical], "tok/s", better="higher"),
        "floor": plain(statistics.median(floors) * 1e3, "ms"),
        "of_floor": timing(shares, "share", better="higher"),
    }
