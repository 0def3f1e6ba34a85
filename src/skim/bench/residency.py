"""Time to first token by residency: without sparse prefill, and with each policy for target and drafter.

Every case is a separate engine over the same modules, and its memory is free before the next one starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from skim.bench.drive import Driver, FirstToken, free_memory
from skim.bench.inputs import Prompts
from skim.bench.ttft import figures_of
from skim.bench.turns import Turn, alone, take_turns
from skim.config import EngineConfig, PrefillConfig
from skim.engine.fitting import place_layers
from skim.engine.start import park_early, settle_heap
from skim.engine.turns import POLICIES as BY_MEMORY
from skim.measure.modes import Mode
from skim.measure.report import Figure, Key, Row, lay_out, reason_of, timing
from skim.models.load import LoadedModel

POLICIES = BY_MEMORY[::-1]  # the fastest comes last
WITHOUT = "no sparse prefill"


@dataclass(frozen=True)
class Task:
    """The cases of a run: without sparse prefill first, then the policies, each at every context."""

    contexts: Sequence[int]
    mode: Mode  # a sparse one
    repeats: int
    policies: Sequence[str] = POLICIES


class Models(NamedTuple):
    """Both are loaded once and shared by all cases."""

    target: LoadedModel
    drafter: LoadedModel


class Sample(NamedTuple):
    first: FirstToken
    transfer: float  # seconds of all copies of weights, which may overlap the rest


def measure_residency(
    models: Models,
    config: EngineConfig,
    task: Task,
    prompts: Prompts,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """One row for each context and case, by context. A case that cannot run has failed rows."""
    rows: list[Row] = []
    for case in (None, *task.policies):
        tell(f"starting an engine: {case or WITHOUT}")
        rows += _rows_of(models, config, task, prompts, case, tell)
        free_memory()
    return sorted(rows, key=lambda row: task.contexts.index(int(row.key["context"])))


def _rows_of(
    models: Models,
    config: EngineConfig,
    task: Task,
    prompts: Prompts,
    policy: str | None,
    tell: Callable[[str], None],
) -> list[Row]:
    """The rows of one engine: with a policy, or without sparse prefill and drafter."""
    name = policy or WITHOUT
    try:
        driver = start(models, config, task.mode, policy)
    except Exception as error:  # the other cases are still measured
        return [Row(_key(context, name), failed=reason_of(error)) for context in task.contexts]
    if models.target.layers_on_host:
        total = len(models.target.layers)
        name = f"{name}, {models.target.layers_on_host} of {total} layers on the host"
    prefill = task.mode.prefill if policy else PrefillConfig(drafter=config.prefill.drafter)
    for context in task.contexts:
        with contextlib.suppress(Exception):  # it recurs in the timed runs
            alone(partial(driver.first_token, prompts(context, -1), prefill))
        driver.forget()
    turns = [
        Turn([_key(context, name)], partial(_measure, driver, prefill, prompts, context))
        for context in task.contexts
    ]
    outcomes = take_turns(turns, task.repeats, tell)
    driver.engine.close()
    return [outcome.row(task.repeats, _figures) for outcome in outcomes]


def start(models: Models, config: EngineConfig, mode: Mode, policy: str | None) -> Driver:
    """An engine for one case. Without a policy the drafter leaves the device, and if the target does not fit
    beside its keys and values, its last layers stay on the host (`offload_layers` auto)."""
    target, drafter = models
    config = mode.engine(config)
    if policy is None:
        park_early(drafter, eager=config.model.enforce_eager)
        offloads = "auto" if target.host_layers is not None else 0
        driver = Driver(target, replace(config, model=replace(config.model, offload_layers=offloads)))
    else:
        if target.device.type == "cuda":
            _leave(models, config)
        own = replace(
            config,
            model=replace(config.model, offload_layers=0),
            residency=replace(config.residency, residency=policy),
            prefill=mode.prefill,
        )
        driver = Driver(target, own, drafter)
    settle_heap()  # as a server does
    return driver


def _leave(models: Models, config: EngineConfig) -> None:
    """Have no weights on the GPU. Those of earlier cases came back piece by piece and lie between gaps that
    no other tensor fits; the next engine brings them to fresh memory, as a server does."""
    place_layers(models.target, replace(config.model, offload_layers=0))
    for model in models:
        model.residency.park()
    free_memory()


def _key(context: int, name: str) -> Mapping[str, Key]:
    return {"context": context, "mode": name}


def _measure(
    driver: Driver, prefill: PrefillConfig, prompts: Prompts, context: int, repeat: int
) -> Iterator[Sample]:
    driver.check_room(context, prefill)
    prompt = prompts(context, repeat)
    driver.forget()
    before = _transfer_seconds(driver)
    try:
        first = driver.first_token(prompt, prefill)
        yield Sample(first, _transfer_seconds(driver) - before)
    finally:
        driver.forget()


def _transfer_seconds(driver: Driver) -> float:
    states = driver.engine.stats().residency
    return sum(one.seconds for state in states for one in state.transfers.values())


def _figures(samples: Sequence[Sample]) -> dict[str, Figure]:
    found = figures_of([sample.first for sample in samples])
    return {**found, "transfer": timing([sample.transfer for sample in samples])}


# -- as text

COLUMNS = {"transfer": "transfer", "scoring": "scoring", "prefill": "prefill"}


def listing(rows: Sequence[Row]) -> str:
    """A line for each row, with the speed relative to the first row of its model and context."""
    bases: dict[tuple[Key, Key], float] = {}
    for row in rows:
        if row.failed is None:
            bases.setdefault(_group(row), row.figures["ttft"].value)

    def cells(row: Row) -> list[str]:
        figures = row.figures
        ttft = figures["ttft"]
        first = next(one for one in rows if _group(one) == _group(row))
        speed = "" if first.failed is not None else f"{bases[_group(row)] / ttft.value:.2f}x"
        return [
            str(ttft.n),
            f"{_ms(ttft.value)} ({_ms(ttft.low)}-{_ms(ttft.high)})" if ttft.n > 1 else _ms(ttft.value),
            *(_ms(figures[name].value) for name in COLUMNS),
            f"{figures['kept'].value:.0%}",
            speed,
        ]

    head = ["n", "ttft [ms]", *COLUMNS.values(), "kept", "speed"]
    note = "times in ms: median of n (min-max); transfers of weights overlap the other parts, and those of "
    note += "layers on the host are not timed"
    return f"{note}\n{lay_out(rows, head, cells)}"


def _group(row: Row) -> tuple[Key, Key]:
    return row.key.get("model", ""), row.key["context"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"
