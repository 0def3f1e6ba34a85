"""KV formats side by side: bytes per token, tokens that fit the budget, decode step time.

A format is an engine's representation of keys and values. Each format has a separate engine over the same
module, and they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from skim.bench.ceiling import Ceiling
from skim.bench.decode import Sample, figures_of
from skim.bench.drive import Driver
from skim.bench.inputs import Prompts, several
from skim.bench.turns import Turn, take_turns
from skim.bench.work import Work
from skim.config import EngineConfig, PrefillConfig
from skim.measure.report import Figure, Row, plain
from skim.memory.formats import AUTO, CODED, refusal
from skim.models.load import LoadedModel


def formats(model: LoadedModel, config: EngineConfig) -> dict[str, EngineConfig]:
    """The KV formats by name, each with the settings that select it: the model's dtype first, then the one
    that `config` sets, or all that the device has."""
    chosen = config.memory.kv_cache_dtype
    others = [chosen] if chosen != AUTO else [name for name in CODED if refusal(name, model.device) is None]
    own = str(model.dtype).removeprefix("torch.")
    return {
        own if name == AUTO else name: replace(config, memory=replace(config.memory, kv_cache_dtype=name))
        for name in (AUTO, *others)
    }


def measure_kv(
    drivers: Mapping[str, Driver],
    contexts: Sequence[int],
    batches: Sequence[int],
    steps: int,
    repeats: int,
    prompts: Prompts,
    work: Work,
    ceiling: Ceiling,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure one row for each format, context and batch."""
    turns = [
        Turn(
            [{"format": name, "context": context, "batch": batch}],
            _measure(driver, prompts, work, context, batch, steps),
        )
        for name, driver in drivers.items()
        for context in contexts
        for batch in batches
    ]
    rows = []
    for outcome in take_turns(turns, repeats, tell):
        stored = storage_figures(drivers[str(outcome.key["format"])], int(outcome.key["context"]))

        def figures(samples: Sequence[Sample], stored: dict[str, Figure] = stored) -> dict[str, Figure]:
            return {**stored, **figures_of(samples, ceiling.bandwidth)}

        rows.append(outcome.row(repeats, figures))
    return rows


def storage_figures(driver: Driver, context: int) -> dict[str, Figure]:
    """Bytes per token, as the pool allocates them, and the tokens that fit in sequences of `context` tokens.

    Both depend on the context, if blocks end behind sliding windows.
    """
    pool = driver.engine.core.memory.pool
    tokens = pool.tokens_at(context)
    return {
        "bytes_per_token": plain(pool.capacity * pool.block_bytes / tokens, "B", better="lower"),
        "capacity": plain(tokens, "tok", better="higher"),
    }


def _measure(
    driver: Driver, prompts: Prompts, work: Work, context: int, batch: int, steps: int
) -> Callable[[int], Iterator[Sample]]:
    def measure(repeat: int) -> Iterator[Sample]:
        driver.check_room(context, PrefillConfig(), batch, steps)
        taken = driver.decode(several(prompts, context, repeat, batch), PrefillConfig(), steps)
        pool = driver.engine.core.memory.pool
        yield Sample(taken, work.step_bytes(taken.contexts, pool.stores, pool.block_size))

    return measure
