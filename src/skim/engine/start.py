"""Before the first request: layers are compiled, the pool is sized, and the first forwards are run."""

from __future__ import annotations

import atexit
import gc
from contextlib import nullcontext

from skim.attention.cpu.native import choose_backend
from skim.attention.step import Backend, Role, Row
from skim.config import EngineConfig
from skim.engine.graphs import DecodeGraphs
from skim.engine.profile import make_pool, score_long
from skim.engine.runner import RowInput, Runner
from skim.models.forwards.compiled import compile_layers, compiling
from skim.models.forwards.lean import lean_layers
from skim.models.load import LoadedModel


def make_runner(
    model: LoadedModel,
    config: EngineConfig,
    window: int,
    *,
    backend: Backend | None = None,
    drafter: LoadedModel | None = None,
) -> Runner:
    """A runner over a pool of its own. On a GPU layers are compiled by then, so that no request waits for it;
    graphs, and kernels that only other shapes need, are made when they are first met."""
    fast = model.device.type == "cuda" and not config.model.enforce_eager
    if not config.model.enforce_eager:
        for one in (model, drafter):
            if one is not None:
                (compile_layers if fast else lean_layers)(one.module)
    with compiling(model.name) if fast else nullcontext():
        pool = make_pool(model, config, window, backend=backend, drafter=drafter)
        chosen = backend or choose_backend(pool)
        graphs = None
        if fast and chosen.capturable:
            most_rows = config.scheduler.max_num_seqs
            graphs = DecodeGraphs(model.module, pool, most_rows=most_rows, most_slots=window)
        runner = Runner(model.module, pool, chosen, graphs)
        if fast:
            _run_first(runner)
            scores = config.prefill.sparse_prefill != "off" or drafter is not None
            if config.memory.kv_memory != "auto" and scores:
                # Otherwise the pool was sized by it.
                refusal = score_long(model, drafter, config.prefill, window)
                if refusal is not None:
                    raise refusal
    return runner


def settle_heap() -> None:
    """Have Python's collector leave alone what is there now, for a process that is ours alone.

    A million objects of libraries and models do not become garbage, but now and then it would look through
    them all, which takes as long as many steps. `gc.unfreeze()` takes it back, at the latest when the process
    ends: libraries complain of what is left then.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def _run_first(runner: Runner) -> None:
    """A chunk and a decode step, in blocks that nobody has yet."""
    pool = runner.pool
    blocks = pool.allocate(-(-3 // pool.block_size))
    runner.forward([RowInput(Row(Role.PREFILL, blocks, 0, 2), (0, 0), wants_logits=True)])
    runner.forward([RowInput(Row(Role.DECODE, blocks, 2, 1), (0,), wants_logits=True)])
    pool.unuse(blocks)
    runner.tokens_computed = 0
    runner.paths.clear()
