"""Pool, prefix tree, scheduler and engine under random operations, with a check after each.

The fake model reads its context through the block tables. So every correct text also proves that no block was
aliased, lost or overwritten.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from skim.config import PrefillConfig
from skim.engine import keeper, slow_fast
from skim.engine.core import EngineCore
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Failed, Finished, RequestState, Sequence
from skim.memory import groups
from skim.memory.formats import FORMATS
from skim.memory.summary import MEAN, VARIANCE, summary_of
from skim.prefill.reading import Planned, Reading
from skim.sampling.params import SamplingParams
from tests.fake import continuation, fake_engine, submit

OPERATIONS: Counter[str] = Counter()
SEEN: Counter[str] = Counter()
NEVER_SURE = 1e9  # a margin that no token exceeds
ROUNDS = 5  # most rounds of random operations

SKIM = PrefillConfig(
    sparse_prefill="always",
    scorer="lexical",
    keep_ratio=0.4,
    prefill_block_size=3,
    head_tokens=3,
    tail_tokens=2,
    min_scored_tokens=3,
)
FAMILIES = [[(7 * f + i * i) % 60 for i in range(40)] for f in range(3)]


class EngineMachine(RuleBasedStateMachine):
    """Submits and aborts requests, runs steps, evicts prefixes, makes forwards fail."""

    @initialize(
        blocks=st.integers(12, 40),
        block_size=st.sampled_from([1, 2, 4, 5]),
        budget=st.sampled_from([1, 3, 8, 64]),
        sequences=st.sampled_from([2, 4, 16]),
        caching=st.sampled_from([True, True, True, False]),
        overlaps=st.booleans(),
        apart=st.booleans(),
        windows=st.sampled_from([(), (3,), (6,), (4, 4, 4), (2, 9)]),
        kv_format=st.sampled_from(["auto", "auto", "auto", "int8", "int4", "k8v4"]),
        keeps=st.booleans(),
        slow_fast=st.sampled_from(["off", "on", "exact", "exact"]),
        guesses=st.booleans(),
        decode_budget=st.integers(1, 12),
        refresh_interval=st.sampled_from([1, 2, 5, 64]),
        refresh_margin=st.sampled_from([0.0, 0.2, NEVER_SURE]),
    )
    def start(
        self,
        blocks: int,
        block_size: int,
        budget: int,
        sequences: int,
        caching: bool,
        overlaps: bool,
        apart: bool,
        windows: tuple[int, ...],
        kv_format: str,
        keeps: bool,
        slow_fast: str,
        guesses: bool,
        decode_budget: int,
        refresh_interval: int,
        refresh_margin: float,
    ) -> None:
        keeps = keeps and caching
        self.directory = tempfile.mkdtemp() if keeps else None
        self.engine = fake_engine(
            blocks=blocks * (1 + len(windows)),
            block_size=block_size,
            slab_blocks=5,
            windows=windows,
            max_num_batched_tokens=budget,
            max_num_seqs=sequences,
            enable_prefix_caching=caching,
            aging_steps=3,
            kv_cache_dtype=kv_format,
            checkpoint_dir=self.directory,
            slow_fast=slow_fast,
            slow_fast_min_context=1,
            decode_budget=decode_budget,
            refresh_interval=refresh_interval,
            refresh_margin=refresh_margin,
        )
        SEEN[kv_format] += 1
        self.engine.model.module.guesses = guesses and (slow_fast == "exact" or refresh_margin == NEVER_SURE)
        self.engine.core.overlaps = overlaps
        self.engine.core.apart = apart
        pool = self.engine.core.memory.pool
        self.capacity = pool.token_capacity
        self.whole = pool.geometry.tokens_in(pool.capacity, whole=True)  # without blocks that end
        self.handles: list[tuple[RequestHandle, SamplingParams]] = []
        self.prompts: list[list[int]] = []
        self.readings: dict[int, Reading] = {}
        begin = self.engine.core.lifecycle._begin

        def record(state: RequestState, planned: Planned) -> None:
            self.readings[state.id] = planned.reading
            SEEN["skimmed"] += planned.plan is not None
            SEEN["backfilled"] += (planned.follow_up or "").startswith("backfill")
            begin(state, planned)

        self.engine.core.lifecycle._begin = record  # type: ignore[method-assign]
        self.resumed = 0
        admit = self.engine.core.lifecycle.admit

        def count(sequence: Sequence) -> None:
            admit(sequence)
            assert sequence.table is not None
            self.resumed += any(sequence.table.starts)

        self.engine.core.lifecycle.admit = count  # type: ignore[method-assign]
        self.may_fail = self.may_abort = False

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 30),
        own=st.lists(st.integers(0, 60), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2]),
        salt=st.sampled_from(["", "", "", "other"]),
        use_cache=st.sampled_from([True, True, True, False]),
        prefill=st.sampled_from([None, None, SKIM, SKIM]),
    )
    def submit(
        self,
        family: list[int],
        shared: int,
        own: list[int],
        max_tokens: int,
        n: int,
        salt: str,
        use_cache: bool,
        prefill: PrefillConfig | None,
    ) -> None:
        capacity = self.capacity if prefill is None else self.whole
        prompt = (family[:shared] + own)[: max(1, capacity - max_tokens)]
        max_tokens = min(max_tokens, capacity - len(prompt))
        if max_tokens < 1:
            return
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=n)
        handle = submit(
            self.engine, prompt, params, cache_salt=salt, use_prefix_cache=use_cache, prefill=prefill
        )
        self.handles.append((handle, params))
        self.prompts.append(prompt)
        OPERATIONS["submit"] += 1

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 50), own=st.lists(st.integers(0, 60), min_size=4, max_size=9))
    def ask_further(self, which: int, own: list[int]) -> None:
        """Submit a prompt that continues an earlier one, like the next turn of a conversation."""
        prompt = self.prompts[which % len(self.prompts)] + own
        if len(prompt) + 4 > self.whole:
            return
        params = SamplingParams(temperature=0, max_tokens=4)
        self.handles.append((submit(self.engine, prompt, params, prefill=SKIM), params))
        self.prompts.append(prompt)
        OPERATIONS["ask further"] += 1

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.engine.core.memory.check()
            check_summaries(self.engine.core)
            OPERATIONS["step"] += 1

    @precondition(lambda self: self.handles)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        self.may_abort = True
        self.handles[which % len(self.handles)][0].abort()
        OPERATIONS["abort"] += 1

    @rule(most=st.sampled_from([1, 1, 2, 3, 1000]))
    def evict(self, most: int) -> None:
        count = min(most, self.engine.core.memory.pool.evictable)
        assert self.engine.core.memory.tree.evict(count) >= count
        SEEN["evicted by hand"] += count
        OPERATIONS["evict"] += 1

    @precondition(lambda self: self.handles)
    @rule(
        really=st.sampled_from([False, False, False, True]),
        kind=st.sampled_from([RuntimeError, torch.OutOfMemoryError]),
    )
    def forward_fails(self, really: bool, kind: type[Exception]) -> None:
        if not really:
            return
        self.may_fail = True
        self.engine.model.module.fail_next = kind("a forward that fails")
        OPERATIONS["fail"] += 1

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.core.memory.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for _ in range(20_000):
            if not engine.step():
                break
            engine.core.memory.check()
            OPERATIONS["step"] += 1
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0), "a request was never finished"
        for handle, params in self.handles:
            self.judge(handle, params)
        assert not engine.core.memory.tables
        assert engine.core.memory.pool.stats().live == len(engine.core.memory.tree)
        engine.core.memory.tree.evict(engine.core.memory.pool.evictable)
        engine.core.memory.check()
        assert engine.core.memory.pool.stats().live == 0
        SEEN["preempted"] += stats.preemptions
        SEEN["evicted"] += stats.prefix.evicted_blocks
        SEEN["hits"] += stats.prefix.hits
        SEEN["ended"] += stats.pool.ended
        SEEN["slow rows"] += stats.decode.slow
        SEEN["fast rows"] += stats.decode.fast
        SEEN["accepted"] += stats.decode.accepted
        SEEN["rejected"] += stats.decode.drafted - stats.decode.accepted
        SEEN["resumed after an end"] += self.resumed
        engine.close()
        if self.directory is not None:
            kept = engine.keeper.stats()
            SEEN["spilled"] += kept.spills
            SEEN["restored"] += kept.restores
            # A longer file may replace one that is about to be read.
            assert set(kept.refused) <= {"missing"}, kept.refused
            SEEN["replaced while read"] += kept.refused["missing"]
            shutil.rmtree(self.directory)

    def judge(self, handle: RequestHandle, params: SamplingParams) -> None:
        """Check that the request ended exactly once and that every streamed token is correct."""
        events: list[Any] = []
        while not handle.events.empty():
            events.append(handle.events.get())
        assert isinstance(events[-1], (Finished, Failed))
        assert all(isinstance(event, Delta) for event in events[:-1])
        assert self.may_fail or isinstance(events[-1], Finished)
        reading = self.readings.get(handle.id)
        if reading is None:
            assert self.may_abort, "a request was never planned"
            return
        expected = continuation(reading.tokens, params.max_tokens or 0, reading.positions)
        for index in range(params.n):
            mine = [event for event in events[:-1] if event.index == index]
            tokens = [token for event in mine for token in event.token_ids]
            text = "".join(event.text for event in mine)
            reason = mine[-1].finish_reason if mine else None
            SEEN[f"finished: {reason}"] += 1
            if reason == "length":
                assert tokens == expected
                assert text == "".join(f" {token}" for token in expected)
            else:
                assert tokens == expected[: len(tokens)]
                assert (reason == "abort" and self.may_abort) or isinstance(events[-1], Failed)
        SEEN["forked"] += params.n > 1


def check_summaries(core: EngineCore) -> None:
    """The full blocks of every sequence have the summaries of their keys; fast slots are not shared."""
    pool = core.memory.pool
    for sequence in core.lifecycle.sequences.values():
        table = sequence.table
        if table is None:
            continue
        for layer in pool.summarized:
            blocks = table.tables[pool.group_of[layer]]
            for index in range(table.length // pool.block_size):
                first = index * pool.block_size
                keys, _ = pool.read(layer, pool.runs(blocks, first, first + pool.block_size))
                slab, place = divmod(blocks[index], pool.slab_blocks)
                planes = pool.slabs[slab].layers[layer].blocks
                for name, wanted in zip((MEAN, VARIANCE), summary_of(keys[None]), strict=True):
                    assert torch.allclose(planes[name][place], wanted[0], rtol=1e-4, atol=1e-3)
                SEEN["summaries"] += 1
                if first + pool.block_size > sequence.exact:
                    assert not pool.cached(blocks[index]), "a slot of a fast step is shared"


def test_random_operations_keep_every_invariant_and_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_fast, "WATCHED", 3)  # of short prompts; these tokens never come from the cache
    monkeypatch.setattr(groups, "LEAST_CHUNK", 1)  # so that a sequence may be longer than its blocks
    for name, few in (("TOKENS", 8), ("SHORTEST", 2), ("LEAST_GAIN", 1), ("WAIT_SECONDS", 1e-4)):
        monkeypatch.setattr(keeper, name, few)
    OPERATIONS.clear()
    SEEN.clear()
    wanted = [
        "preempted",
        "evicted",
        "evicted by hand",
        "hits",
        "forked",
        "finished: length",
        "finished: abort",
        "skimmed",
        "backfilled",
        "ended",
        "resumed after an end",
        "spilled",
        "restored",
        "slow rows",
        "summaries",
        "fast rows",
        "accepted",
        "rejected",
        *(name for name in FORMATS if name != "fp8"),  # which needs a GPU
    ]
    # Threads that read and write files decide what happens, too: rounds follow until everything has happened.
    for number in range(ROUNDS):
        run_state_machine_as_test(
            seed(number)(EngineMachine),
            settings=settings(
                max_examples=150,
                stateful_step_count=40,
                derandomize=False,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if all(SEEN[name] > 0 for name in wanted):
            break
    assert all(SEEN[name] > 0 for name in wanted), SEEN
    assert OPERATIONS.total() >= 2000, OPERATIONS
    assert all(OPERATIONS[name] > 0 for name in ["submit", "step", "abort", "evict", "fail"]), OPERATIONS
