"""Before the first request: compile layers, size the pool, and run the first forwards."""

from __future__ import annotations

import atexit
import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from skim.attention.backend import Backend, CapturableBackend, choose_backend
from skim.attention.hook import FEW_TOKENS
from skim.attention.step import Role, Row
from skim.config import EngineConfig, PrefillConfig
from skim.engine.fitting import place_layers
from skim.engine.graphs import CHUNKS, StepGraphs
from skim.engine.profile import make_pool, score_long
from skim.engine.residency import EngineResidency
from skim.engine.runner import RowInput, Runner
from skim.models.forwards.compiled import compile_layers, compiling
from skim.models.forwards.lean import lean_layers
from skim.models.forwards.packed import pack_products
from skim.models.load import LoadedModel
from skim.prefill.scoring.factory import check_scorer

log = logging.getLogger(__name__)


def make_runner(
    model: LoadedModel,
    config: EngineConfig,
    window: int,
    residency: EngineResidency,
    *,
    backend: Backend | None = None,
    drafter: LoadedModel | None = None,
) -> Runner:
    """A runner over a new pool. On a GPU its layers are compiled, so that no request waits for that. Graphs,
    and kernels for other shapes, are made when first needed. With a target for the time of steps, graphs of
    chunks are made now: a capture takes longer than the target."""
    residency.start()
    place_layers(model, config.model)
    if config.prefill.sparse_prefill != "off":
        check_scorer(config.prefill.scorer, model, drafter)
    elif config.prefill.scorer != PrefillConfig.scorer:
        log.info(
            "sparse_prefill is off: the scorer %s is used only for requests that turn it on",
            config.prefill.scorer,
        )
    fast = model.device.type == "cuda" and not config.model.enforce_eager
    if not config.model.enforce_eager:
        faster = compile_layers if fast else lean_layers
        _make_faster(model, faster)  # before its first park: packing makes new weights
        if drafter is not None:
            residency.arrange_scoring()
            _make_faster(drafter, faster)
        residency.rest()
    with compiling(model.name) if fast else nullcontext():
        pool = make_pool(model, config, window, backend=backend, drafter=drafter, residency=residency)
        chosen = backend or choose_backend(pool)
        graphs = None
        streams = model.layers_on_host > 0
        if fast and isinstance(chosen, CapturableBackend) and not streams:
            most_rows = config.scheduler.max_num_seqs
            graphs = StepGraphs(model.module, pool, chosen, most_rows=most_rows, most_slots=window)
        # A graph has fixed addresses, and a layer on the host comes to another one in every step.
        without = "offload" if streams else "off"
        runner = Runner(model.module, pool, chosen, graphs, model.residency, without_graphs=without)
        if fast:
            _run_first(runner, CHUNKS if config.scheduler.step_time_target else ())
            scores = config.prefill.sparse_prefill != "off" or drafter is not None
            if config.memory.kv_memory != "auto" and scores:
                # With kv_memory "auto", sizing the pool has already checked this.
                residency.arrange_scoring()
                refusal = score_long(model, drafter, config.prefill, window)
                if refusal is not None:
                    raise refusal
                residency.rest()
    model.residency.settle()
    return runner


def park_early(model: LoadedModel, *, eager: bool) -> None:
    """Park a model before an engine starts with it. Packing makes new weights, so it comes first: they are
    copied once."""
    if not eager:
        pack_products(model.module)
    model.residency.park()


def _make_faster(model: LoadedModel, faster: Callable[[Any], object]) -> None:
    """Pack and compile layers. Packing reads the weights, so they must have arrived."""
    model.residency.settle()
    faster(model.module)
    model.residency.forget_replaced()


def settle_heap() -> None:
    """Exclude all current objects from garbage collection, for a process that runs nothing but Skim.

    Libraries and models hold a million objects that never become garbage; scanning them takes as long as many
    steps. `gc.unfreeze()` undoes it, at the latest at exit: libraries complain about leftovers there.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def _run_first(runner: Runner, chunks: Sequence[int]) -> None:
    """Run chunks of few and of many tokens and a decode step in unused blocks, for each is compiled
    separately; then chunks of these lengths. Those that do not fit the pool are left out."""
    pool = runner.pool
    for tokens in (2, FEW_TOKENS + 1, *chunks):
        count = -(-(tokens + 1) // pool.block_size)
        if count * len(pool.groups) > pool.obtainable:
            break
        tables = [pool.allocate(count) for _ in pool.groups]
        chunk = Row(Role.PREFILL, tables[0], 0, tokens, others=tables[1:])
        runner.forward([RowInput(chunk, [0] * tokens, wants_logits=True)])
        if tokens == 2:
            decode = Row(Role.DECODE, tables[0], 2, 1, others=tables[1:])
            runner.forward([RowInput(decode, (0,), wants_logits=True)])
        for blocks in tables:
            pool.release(blocks)
    runner.tokens_computed = 0
    runner.paths.clear()
