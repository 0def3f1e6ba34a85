"""How large the pool may be on a GPU: the largest step is run once, and the pool gets what it leaves.

The pass is also the first forward, so kernels are compiled and libraries loaded before the first request.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from typing import Protocol

import torch

from skim.attention.blocksparse.policy import Policy
from skim.attention.cpu.native import choose_backend
from skim.attention.step import Backend, Role, Row
from skim.config import EngineConfig, PrefillConfig
from skim.engine.runner import RowInput, Runner
from skim.errors import ConfigError
from skim.memory.budget import USEFUL_TOKENS, free_bytes, gpu_pool_bytes, in_words
from skim.memory.pool import KVPool
from skim.models.load import LoadedModel
from skim.models.probe import first_line
from skim.prefill.planner import policy_of
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.scorer import ScoringTask, run_to_completion
from skim.prefill.scoring.windows import LONGEST_QUESTION
from skim.registry import scorers
from skim.sampling.params import MAX_LOGPROBS, SamplingParams
from skim.sampling.sampler import Sampler

log = logging.getLogger(__name__)

SCORED_TOKENS = 1 << 17  # prompt tokens that are scored: at least one batch of scoring windows
DEMANDING = SamplingParams(  # all of the sampler that takes memory, for every row
    temperature=1.0,
    top_p=0.9,
    min_p=1e-6,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=MAX_LOGPROBS,
)


class Meter(Protocol):
    """A device's memory, as the pass sees it."""

    def reset(self) -> None:
        """Begin to watch: what is there now is not part of the peak."""

    def peak(self) -> int:
        """Most bytes that were there since, beyond what was there then."""
        ...

    def in_use(self) -> tuple[int, int]:
        """Bytes in use now, by this process and all others, and bytes that the device has."""
        ...


class CudaMeter:
    """Of a GPU. Counted is what torch takes from the device, gaps between tensors included.

    A library's workspace that is made during the pass and stays is counted twice, once as in use: some tens
    of megabytes on the safe side.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._before)

    def in_use(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free, total


def make_pool(
    model: LoadedModel,
    config: EngineConfig,
    window: int,
    *,
    backend: Backend | None = None,
    drafter: LoadedModel | None = None,
) -> KVPool:
    """The engine's pool. All weights must have been loaded: on a GPU it takes what is left.

    There its memory is taken at once. Later, another program might have it.
    """
    meter = CudaMeter(model.device) if model.device.type == "cuda" else None
    budget = pool_bytes(model, config, window, meter, backend=backend, drafter=drafter)
    pool = KVPool(
        model.layers,
        block_size=config.memory.block_size,
        budget_bytes=budget,
        dtype=model.dtype,
        device=model.device,
    )
    if model.device.type == "cuda":
        try:
            pool.unuse(pool.allocate(1))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a KV pool of {in_words(budget)} does not fit {model.device}: {first_line(error)}; lower "
                f"{'gpu_memory_utilization' if config.memory.kv_memory == 'auto' else 'kv_memory'}"
            ) from None
    return pool


def pool_bytes(
    model: LoadedModel,
    config: EngineConfig,
    window: int,
    meter: Meter | None,
    *,
    backend: Backend | None = None,
    drafter: LoadedModel | None = None,
) -> int:
    """The pool's byte budget: as it was set, a share of a CPU's free memory, or, by `meter`, what the largest
    step leaves of a GPU's."""
    memory = config.memory
    if meter is None or memory.kv_memory != "auto":
        return memory.kv_bytes(free_bytes(model.device))

    token_bytes = sum(layer.width for layer in model.layers) * model.dtype.itemsize
    block_bytes = memory.block_size * token_bytes
    budget_of = partial(
        gpu_pool_bytes,
        utilization=memory.gpu_memory_utilization,
        layers=len(model.layers),
        least=-(-min(window, USEFUL_TOKENS) // memory.block_size) * block_bytes,
    )

    begun = time.perf_counter()
    used, total = meter.in_use()
    most = budget_of(total=total, used=used, peak=None)
    tokens = config.scheduler.token_budget(on_gpu=model.device.type == "cuda")
    deepest = min(window, most // token_bytes)  # no sequence is longer than the pool
    scores = config.prefill.sparse_prefill != "off" or drafter is not None
    peak = peak_bytes(
        model,
        meter,
        worst_rows(tokens, config.scheduler.max_num_seqs, deepest),
        block_size=memory.block_size,
        backend=backend,
        policy=policy_of(config.prefill),
        score=partial(score_long, model, drafter, config.prefill, window) if scores else None,
    )
    used, total = meter.in_use()
    budget = budget_of(total=total, used=used, peak=peak)
    log.info(
        "profiled a step of %d tokens%s in %.1f s: of %s, %s are in use, %s of it by weights; the step takes "
        "%s and the KV pool gets %s, %d tokens",
        tokens,
        " and scoring" if scores else "",
        time.perf_counter() - begun,
        in_words(total),
        in_words(used),
        in_words(sum(_weight_bytes(one) for one in (model, drafter) if one is not None)),
        in_words(peak),
        in_words(budget),
        budget // block_bytes * memory.block_size,
    )
    return budget


def worst_rows(tokens: int, sequences: int, window: int) -> list[tuple[int, int]]:
    """The largest step: (context, queries) of each row. As many tokens and rows as there may be, all at the
    end of the window, in one chunk as long as it may be and decode rows beside it."""
    rows = min(sequences, tokens)
    found = []
    for others in range(rows - 1, -1, -1):
        queries = min(window, tokens - others)
        tokens -= queries
        found.append((window - queries, queries))
    return found


def peak_bytes(
    model: LoadedModel,
    meter: Meter,
    rows: list[tuple[int, int]],
    *,
    block_size: int,
    backend: Backend | None = None,
    policy: Policy | None = None,
    score: Callable[[], str | None] | None = None,
) -> int:
    """Most memory that such a step, sampling after it, and scoring take beside weights and pool. With a
    policy, the step is run both ways: its requests may also be dense.

    Nothing of it stays. It is run in a thread that ends with it, since libraries keep workers and workspaces
    for every thread that has computed. What does not fit is a ConfigError; of scoring, `score` says so.
    """
    step = f"a step of {sum(queries for _, queries in rows)} tokens in {len(rows)} sequences does not fit"
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="skim-profile") as thread:
            found = thread.submit(_run, model, meter, rows, block_size, backend, policy, score).result()
    except torch.OutOfMemoryError as error:
        found = (
            f"{step} {model.device}: {first_line(error)}; lower max_num_batched_tokens or max_num_seqs, or "
            "take a smaller model"
        )
    finally:
        gc.collect()  # a step and what a backend notes of it refer to each other, and both to the pool
    if isinstance(found, str):  # not raised above: there the error's traceback would still hold the pool
        raise ConfigError(found)
    return found


def _run(
    model: LoadedModel,
    meter: Meter,
    rows: list[tuple[int, int]],
    block_size: int,
    backend: Backend | None,
    policy: Policy | None,
    score: Callable[[], str | None] | None,
) -> int | str:
    """The peak, or why scoring does not fit."""
    pool = _small_pool(model, rows, block_size)
    meter.reset()
    if score is not None and (refusal := score()) is not None:
        return refusal
    sampler = Sampler(model.vocab_size, model.device)
    sampled = [sampler.open(DEMANDING, (0,), seed=0, eos_token_ids=model.eos_token_ids) for _ in rows]
    runner = Runner(model.module, pool, backend or choose_backend(pool))
    inputs = [_row_input(pool, model, *row) for row in rows]
    if policy is not None:
        runner.forward([_with_policy(one, policy) for one in inputs])
    sampler.sample(runner.forward(inputs), sampled)
    return meter.peak()


def _small_pool(model: LoadedModel, rows: list[tuple[int, int]], block_size: int) -> KVPool:
    """A pool with room for the new tokens of the rows and no more, filled with zeros."""
    blocks = sum(_own_blocks(*row, block_size) for row in rows)
    width = sum(layer.width for layer in model.layers)
    pool = KVPool(
        model.layers,
        block_size=block_size,
        budget_bytes=blocks * block_size * width * model.dtype.itemsize,
        dtype=model.dtype,
        device=model.device,
    )
    pool.unuse(pool.allocate(blocks))
    for slab in pool.slabs:
        for storage in (*slab.keys, *slab.values):
            storage.zero_()
    return pool


def _own_blocks(context: int, queries: int, block_size: int) -> int:
    """Blocks that new tokens go to."""
    return -(-(context + queries) // block_size) - context // block_size


def _row_input(pool: KVPool, model: LoadedModel, context: int, queries: int) -> RowInput:
    """A row whose tokens before the new ones lie in any blocks, the same ones again and again.

    So a long context needs no memory. The blocks are no neighbours, so what copies such a prefix does so.
    """
    before = islice(cycle(range(pool.capacity - 1, -1, -1)), context // pool.block_size)
    blocks = [*before, *pool.allocate(_own_blocks(context, queries, pool.block_size))]
    role = Role.DECODE if queries == 1 else Role.PREFILL
    ids = [token % model.vocab_size for token in range(queries)]
    return RowInput(Row(role, blocks, context, queries), ids, wants_logits=True)


def _with_policy(one: RowInput, policy: Policy) -> RowInput:
    """The same row, if it is a chunk, where chunks choose the blocks they read."""
    if one.row.role is Role.DECODE:
        return one
    return one._replace(row=one.row._replace(policy=policy, prompt=one.row.length))


def score_long(
    target: LoadedModel, drafter: LoadedModel | None, config: PrefillConfig, window: int
) -> str | None:
    """Score a long prompt with the longest question. Returns an error message if memory runs out.

    Other failures are logged: later prompts that fail the same way are prefilled densely.
    """
    declared = scorers()[config.scorer]
    reader = target if drafter is None or declared.model == "target" else drafter
    count = SCORED_TOKENS
    try:
        if declared.grows:  # the longest prompt in the reader's own tokens, not mapped from the target's
            count = min(reader.max_positions - 2, max(window, count))
            target, drafter = reader, None
        ids = tuple(token % target.vocab_size for token in range(count))
        question = min(LONGEST_QUESTION, count // 2)
        task = ScoringTask(ids, range(count - question, count), block_size=64, policy=policy_of(config))
        scorer = make_scorers(target, drafter)(config.scorer)
        with torch.inference_mode():
            run_to_completion(scorer.score(task))
    except torch.OutOfMemoryError as error:
        return (
            f"scoring {count} tokens with the scorer {config.scorer!r} does not fit {reader.device}: "
            f"{first_line(error)}; set another scorer, or take a smaller drafter"
        )
    except Exception as error:
        log.warning("the memory that scoring takes could not be measured: %s", first_line(error))
    return None


def _weight_bytes(model: LoadedModel) -> int:
    return sum(int(tensor.nbytes) for tensor in (*model.module.parameters(), *model.module.buffers()))
