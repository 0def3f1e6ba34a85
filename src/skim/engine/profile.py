"""Sizing the KV pool on a GPU: run the largest step once, and give the pool the memory that is left.

This is also the first forward, so kernels are compiled and libraries loaded before the first request.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from skim.attention.backend import Backend, choose_backend
from skim.attention.blocksparse.policy import Policy
from skim.config import EngineConfig, PrefillConfig
from skim.decode.drafts import TOGETHER
from skim.engine.fitting import fit_layers, graph_bytes
from skim.engine.largest_step import (
    row_input,
    small_pool,
    with_evidence,
    with_glance,
    with_policy,
    worst_rows,
)
from skim.engine.residency import EngineResidency
from skim.engine.runner import Runner
from skim.engine.turns import AUTO as AUTO_POLICY
from skim.engine.turns import BOTH, POLICIES, SWAP, choose_policy
from skim.errors import ConfigError, EngineError, first_line
from skim.memory.budget import USEFUL_TOKENS, free_bytes, gpu_memory, gpu_pool_bytes, in_words
from skim.memory.formats import AUTO, make_stores, refusal
from skim.memory.groups import Geometry, LayerGroup, group_layers
from skim.memory.pool import KVPool, bytes_of_block
from skim.memory.store import LayerStore
from skim.models.load import LoadedModel
from skim.prefill.request import policy_of
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.scorer import ScoringTask, run_to_completion
from skim.prefill.scoring.windows import LONGEST_QUESTION
from skim.registry import scorers
from skim.sampling.params import MAX_LOGPROBS, SamplingParams
from skim.sampling.sampler import Sampler

log = logging.getLogger(__name__)

SCORED_TOKENS = 1 << 17  # prompt tokens that are scored: at least one batch of scoring windows
DEMANDING = SamplingParams(  # uses every part of the sampler that takes memory
    temperature=1.0,
    top_p=0.9,
    min_p=1e-6,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=MAX_LOGPROBS,
)


class Meter(Protocol):
    """Measures a device's memory."""

    def reset(self) -> None:
        """Start measuring; memory in use now is not part of the peak."""

    def peak(self) -> int:
        """Most bytes in use since `reset`, beyond those in use then."""
        ...

    def in_use(self) -> tuple[int, int]:
        """Bytes in use now, by all processes, and the device's total bytes, or its cap."""
        ...


class CudaMeter:
    """Measures a GPU by the memory that torch reserves, gaps between tensors included.

    A library's workspace that is allocated meanwhile and stays is counted twice, once as in use. That errs
    on the safe side by some tens of megabytes.
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
        free, total = gpu_memory(self._device)
        return total - free, total


def make_pool(
    model: LoadedModel,
    config: EngineConfig,
    window: int,
    *,
    backend: Backend | None = None,
    drafter: LoadedModel | None = None,
    residency: EngineResidency | None = None,
) -> KVPool:
    """The engine's pool. On a GPU it takes the memory that is left, so all weights must be loaded.

    On a GPU its memory is allocated at once, before another program can take it. The policy of `residency`
    is chosen here if it is `auto`, and the models are where they rest.
    """
    if (reason := refusal(config.memory.kv_cache_dtype, model.device)) is not None:
        raise ConfigError(reason, fields="kv_cache_dtype")
    residency = residency or EngineResidency(model, drafter)
    meter = CudaMeter(model.device) if model.device.type == "cuda" else None
    budget = pool_bytes(model, config, window, meter, backend=backend, drafter=drafter, residency=residency)
    residency.rest()
    groups = groups_of(model, config, window)
    pool = KVPool(
        model.layers,
        block_size=config.block_size(model.device.type == "cuda"),
        budget_bytes=budget,
        dtype=model.dtype,
        device=model.device,
        kv_format=config.memory.kv_cache_dtype,
        groups=groups,
        summaries=config.has_summaries,
    )
    if pool.windowed and not pool.geometry.ends:
        log.info(
            "blocks behind sliding windows are kept: windows are as long as the context, or the layers' "
            "blocks differ in size"
        )
    if model.device.type == "cuda":
        try:
            pool.release(pool.allocate(1))
        except torch.OutOfMemoryError as error:
            remedy = "gpu_memory_utilization" if config.memory.kv_memory == "auto" else "kv_memory"
            raise ConfigError(
                f"a KV pool of {in_words(budget)} does not fit {model.device}: {first_line(error)}; lower "
                f"{remedy}",
                fields=remedy,
            ) from None
    return pool


def groups_of(model: LoadedModel, config: EngineConfig, window: int) -> tuple[LayerGroup, ...]:
    """The layer groups of the engine's pool, for sequences up to the context window."""
    return group_layers(stores_of(model, config), window)


def stores_of(model: LoadedModel, config: EngineConfig) -> tuple[LayerStore, ...]:
    kv_format = config.memory.kv_cache_dtype
    return make_stores(model.layers, model.dtype, kv_format, summaries=config.has_summaries)


def pool_bytes(
    model: LoadedModel,
    config: EngineConfig,
    window: int,
    meter: Meter | None,
    *,
    backend: Backend | None = None,
    drafter: LoadedModel | None = None,
    residency: EngineResidency | None = None,
) -> int:
    """The pool's byte budget: as set, a share of a CPU's free memory, or the part of a GPU's memory that the
    largest step and scoring, measured by `meter`, leave free under the policy of `residency`. If the layers
    on the host are to be chosen, that is done after measuring: as many as fit come to the device."""
    memory, residency = config.memory, residency or EngineResidency(model, drafter)
    chooses_layers = model.host_layers is not None and config.model.layers_on_host is None
    chooses = chooses_layers or residency.policy == AUTO_POLICY
    if meter is None or (memory.kv_memory != "auto" and not chooses):
        if residency.policy == AUTO_POLICY:
            residency.choose(BOTH, "a CPU has both models in host memory, and the pool beside them")
        return memory.kv_bytes(free_bytes(model.device))

    stores = stores_of(model, config)
    block_size = config.block_size(model.device.type == "cuda")
    groups = groups_of(model, config, window)
    geometry = Geometry(block_size, tuple(group.window for group in groups))
    size = bytes_of_block(stores, groups, block_size)
    budget_of = partial(
        gpu_pool_bytes,
        utilization=memory.gpu_memory_utilization if memory.kv_memory == "auto" else 1.0,
        tensors=sum(len(store.planes) for store in stores),
        least=geometry.blocks_of(min(window, USEFUL_TOKENS)) * size,
    )

    begun = time.perf_counter()
    used, total = meter.in_use()
    weights = residency.sizes
    frugal = SWAP if residency.policy == AUTO_POLICY else residency.policy
    needed = weights.kept(frugal) + weights.peak(frugal)
    used += needed - residency.device_bytes
    most = budget_of(total=total, used=used, peak=None, graphs=graph_bytes(model))
    tokens = config.scheduler.token_budget(on_gpu=model.device.type == "cuda")
    deepest = min(window, geometry.tokens_in(most // size))  # no sequence is longer than the pool
    scores = config.prefill.sparse_prefill != "off" or drafter is not None
    measure = partial(
        peak_bytes,
        model,
        meter,
        worst_rows(tokens, config.scheduler.max_num_seqs, deepest),
        block_size=block_size,
        kv_format=memory.kv_cache_dtype,
        backend=backend,
        policy=policy_of(config.prefill),
        slow_fast=config.has_summaries,
        score=partial(score_long, model, drafter, config.prefill, window) if scores else None,
        residency=residency,
    )
    peaks = _measured(measure, residency)
    used, total = meter.in_use()
    sizes = replace(weights, step=peaks.step, scoring=peaks.scoring)
    others = used - residency.device_bytes
    wanted = geometry.blocks_of(window) * size if memory.kv_memory == "auto" else memory.kv_bytes(0)

    def room(policy: str, **more: int) -> int:
        graphs = graph_bytes(model)
        used, peak = others + sizes.kept(policy), sizes.peak(policy)
        return budget_of(**{"total": total, "used": used, "peak": peak, "graphs": graphs, **more})

    if residency.policy == AUTO_POLICY:
        rooms = {one: room(one, least=-total - used) for one in POLICIES}
        residency.choose(*choose_policy(rooms, wanted))
    policy = residency.policy
    if chooses_layers:
        fit_layers(model, room(policy, graphs=0) - wanted)
        sizes = replace(sizes, target=residency.sizes.target)
        others = meter.in_use()[0] - residency.device_bytes
    budget = room(policy) if memory.kv_memory == "auto" else memory.kv_bytes(0)
    log.info(
        "profiled a step of %d tokens, %s%s, in %.1f s: of %s, %s are in use, %s by weights; with residency "
        "%s all else takes %s and the KV pool gets %s, %d tokens",
        tokens,
        in_words(peaks.step),
        f", and scoring, {in_words(peaks.scoring)}" if scores else "",
        time.perf_counter() - begun,
        in_words(total),
        in_words(others + sizes.kept(policy)),
        in_words(sizes.kept(policy)),
        policy,
        in_words(sizes.peak(policy)),
        in_words(budget),
        geometry.tokens_at(window, budget // size),
    )
    return budget


class Peaks(NamedTuple):
    """Most memory that a step with its sampling takes besides weights and pool, and that scoring takes."""

    step: int
    scoring: int


def _measured(measure: Callable[[], Peaks], residency: EngineResidency) -> Peaks:
    """Measure with the models where they will be. Under `auto` with both on the device or, if that does not
    fit, one at a time."""
    if residency.policy != AUTO_POLICY:
        return measure()
    try:
        residency.policy = BOTH
        return measure()
    except (ConfigError, EngineError):
        residency.policy = SWAP
        return measure()
    finally:
        residency.policy = AUTO_POLICY


def peak_bytes(
    model: LoadedModel,
    meter: Meter,
    rows: list[tuple[int, int]],
    *,
    block_size: int,
    kv_format: str = AUTO,
    backend: Backend | None = None,
    policy: Policy | None = None,
    slow_fast: bool = False,
    score: Callable[[], ConfigError | None] | None = None,
    residency: EngineResidency | None = None,
) -> Peaks:
    """The memory of a step and of scoring, with models as `residency` arranges them for each. With a policy,
    the step runs block-sparse and dense, since requests may ask for either. With `slow_fast`, its decode rows
    are also run as slow and as fast ones that have evidence, and more tokens are sampled, to verify drafts.

    Everything is freed afterwards. It runs in a thread that ends with it, because libraries keep workers and
    workspaces for every thread that has computed. Raises ConfigError if the step or the scoring does not fit;
    `score` returns the message for the latter.
    """
    make = partial(small_pool, model, rows, block_size, kv_format, slow_fast)
    step = f"a step of {sum(queries for _, queries in rows)} tokens in {len(rows)} sequences does not fit"
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="skim-profile") as thread:
            found = thread.submit(
                _run, model, meter, rows, make, backend, policy, slow_fast, score, residency
            ).result()
    except torch.OutOfMemoryError as error:
        found = ConfigError(
            f"{step} {model.device}: {first_line(error)}; lower max_num_batched_tokens or max_num_seqs, or "
            "use a smaller model",
            fields=("max_num_batched_tokens", "max_num_seqs", "model"),
        )
    finally:
        gc.collect()  # the pool is freed now, even if a reference cycle holds it
    if isinstance(found, ConfigError):  # raised here, where no traceback holds the pool
        raise found
    return found


def _run(
    model: LoadedModel,
    meter: Meter,
    rows: list[tuple[int, int]],
    make: Callable[[], KVPool],
    backend: Backend | None,
    policy: Policy | None,
    slow_fast: bool,
    score: Callable[[], ConfigError | None] | None,
    residency: EngineResidency | None,
) -> Peaks | ConfigError:
    """The peaks in bytes, or the reason that scoring does not fit."""
    pool, scoring = make(), 0
    if score is not None:
        if residency is not None:
            residency.arrange_scoring()
        meter.reset()
        if (refusal := score()) is not None:
            return refusal
        scoring = meter.peak()
    if residency is not None:
        residency.rest()
    meter.reset()
    sampler = Sampler(model.vocab_size, model.device)
    runner = Runner(model.module, pool, backend or choose_backend(pool))
    inputs = [row_input(pool, model, *row) for row in rows]
    if policy is not None:
        runner.forward([with_policy(one, policy) for one in inputs])
    if slow_fast and pool.summarized:
        inputs = [with_evidence(one, pool) for one in inputs]  # it stays, like that of running sequences
        runner.forward([with_glance(one) for one in inputs])
        chunk = inputs[0]
        inputs[0] = chunk._replace(wants_logits=min(chunk.row.queries, max(1, TOGETHER - len(inputs) + 1)))
    samples = sum(one.wants_logits for one in inputs)
    sampled = [
        sampler.open(DEMANDING, (0,), seed=0, eos_token_ids=model.eos_token_ids) for _ in range(samples)
    ]
    sampler.sample(runner.forward(inputs).logits, sampled)
    return Peaks(meter.peak(), scoring)


def score_long(
    target: LoadedModel, drafter: LoadedModel | None, config: PrefillConfig, window: int
) -> ConfigError | None:
    """Score a long prompt with the longest question. Returns an error if memory runs out.

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
        asked = range(count - min(LONGEST_QUESTION, count // 2), count)
        task = ScoringTask(ids, (asked,), block_size=64, policy=policy_of(config))
        scorer = make_scorers(target, drafter)(config.scorer)
        with torch.inference_mode():
            run_to_completion(scorer.score(task))
    except torch.OutOfMemoryError as error:
        return ConfigError(
            f"scoring {count} tokens with the scorer {config.scorer!r} does not fit {reader.device}: "
            f"{first_line(error)}; set another `scorer`, or use a smaller `drafter`",
            fields=("scorer", "drafter"),
        )
    except Exception as error:
        log.warning("the memory that scoring takes could not be measured: %s", first_line(error))
    return None
