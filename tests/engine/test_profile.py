"""The pool's size on a GPU: the arithmetic, and the profiling pass that measures a step's memory.

The pass runs on the CPU here, with a fake memory meter.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import Role, Row, Step
from skim.config import EngineConfig, MemoryConfig, ModelConfig, PrefillConfig
from skim.decode.drafts import TOGETHER
from skim.engine import profile
from skim.engine.largest_step import worst_rows
from skim.engine.profile import peak_bytes, pool_bytes
from skim.engine.residency import EngineResidency
from skim.errors import ConfigError
from skim.memory.budget import GRAPH_RESERVE, TENSOR_ROUNDING, gpu_pool_bytes, is_out_of_memory
from skim.memory.pool import KVPool
from skim.models import scratch
from skim.models.load import LoadedModel, load
from skim.models.residency_state import Place
from skim.prefill.scoring.scorer import ScoringTask
from skim.prefill.scoring.windows import LONGEST_QUESTION
from skim.registry import scorers
from tests import tiny
from tests.fake import EOS, SHAPE, TOKEN_BYTES, VOCAB, FakeTokenizer

GIB = 2**30
ROUNDING = 2 * TENSOR_ROUNDING  # one layer


class FakeMeter:
    """A device of 8 GiB whose step takes 1 GiB. `used` has the bytes in use for each call of `in_use`."""

    def __init__(self, *used: int, peak: int = GIB, total: int = 8 * GIB) -> None:
        self._used = list(used) or [2 * GIB, 2 * GIB]
        self._peak = peak
        self._total = total
        self.calls: list[str] = []

    def reset(self) -> None:
        self.calls.append("reset")

    def peak(self) -> int:
        self.calls.append("peak")
        return self._peak

    def in_use(self) -> tuple[int, int]:
        self.calls.append("in_use")
        return self._used.pop(0), self._total


class Recorder(torch.nn.Module):
    """A model that records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(VOCAB))
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.rows: tuple[Row, ...] = ()
        self.wanted: list[int] = []
        self.pool: weakref.ref[KVPool] | None = None
        self.storage: list[weakref.ref[torch.Tensor]] = []
        self.raises: Exception | None = None
        self.steps: list[tuple[Row, ...]] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        logits_to_keep: torch.Tensor,
        skim_step: Step,
    ) -> Any:
        self.tokens = input_ids[0].tolist()
        self.positions = position_ids[0].tolist()
        self.rows = skim_step.rows
        self.steps.append(skim_step.rows)
        self.wanted = logits_to_keep.tolist()
        self.pool = weakref.ref(skim_step.pool)
        self.capacity = skim_step.pool.capacity
        self.storage = [weakref.ref(slab.layers[0].blocks["key"]) for slab in skim_step.pool.slabs]
        skim_step.metadata = skim_step  # worse than any backend: a reference cycle
        if self.raises is not None:
            raise self.raises
        return SimpleNamespace(logits=torch.zeros(1, len(self.wanted), VOCAB))

    def alive(self) -> list[Any]:
        """The parts of the pool that are still alive."""
        assert self.pool is not None
        return [alive for ref in (self.pool, *self.storage) if (alive := ref()) is not None]


def recording_model() -> LoadedModel:
    return LoadedModel(
        name="recorder",
        path=Path("recorder"),
        module=Recorder(),
        tokenizer=FakeTokenizer(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_positions=4096,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({EOS}),
        layers=(SHAPE,),
    )


# -- the arithmetic

sizes = st.integers(0, 200 * GIB)
shares = st.floats(0.01, 1.0)


@given(sizes, sizes, sizes, shares, st.integers(1, 100), st.integers(1, GIB))
def test_the_total_stays_within_the_share_or_is_refused(
    total: int, used: int, peak: int, share: float, layers: int, least: int
) -> None:
    beside = used + peak + GRAPH_RESERVE + layers * ROUNDING
    try:
        budget = gpu_pool_bytes(
            total=total, used=used, peak=peak, utilization=share, tensors=2 * layers, least=least
        )
    except ConfigError:
        assert int(share * total) - beside < least
    else:
        assert budget >= least
        assert beside + budget <= share * total
        assert beside + budget + 1 > share * total - 1  # no byte is wasted


@given(sizes, sizes, shares, shares)
def test_a_larger_share_never_means_a_smaller_pool(used: int, peak: int, one: float, other: float) -> None:
    def budget(share: float) -> int:
        try:
            return gpu_pool_bytes(
                total=200 * GIB, used=used, peak=peak, utilization=share, tensors=2, least=1
            )
        except ConfigError:
            return 0

    assert budget(min(one, other)) <= budget(max(one, other))


def test_a_refusal_names_the_memory_in_use_and_the_remedies() -> None:
    with pytest.raises(ConfigError) as refused:
        gpu_pool_bytes(
            total=24 * GIB, used=16 * GIB, peak=5 * GIB, utilization=0.9, tensors=64, least=200 * 2**20
        )
    text = str(refused.value)
    for part in (
        "0.9 of its 24.00 GiB",
        "16.00 GiB are in use",
        "step or scoring takes 5.00 GiB",
        "takes 200.0 MiB",
    ):
        assert part in text
    for remedy in ("max_num_batched_tokens", "raise gpu_memory_utilization", "smaller model"):
        assert remedy in text


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), True, "0.9", None])
def test_a_share_out_of_range_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization must be in \(0, 1\]"):
        MemoryConfig(gpu_memory_utilization=share)
    assert EngineConfig.of(gpu_memory_utilization=1).memory.gpu_memory_utilization == 1


# -- the largest step


@given(st.integers(1, 600), st.integers(1, 80), st.integers(1, 700))
def test_the_largest_step_has_the_most_tokens_and_rows(tokens: int, sequences: int, window: int) -> None:
    rows = worst_rows(tokens, sequences, window)
    assert len(rows) == min(tokens, sequences)
    assert sum(queries for _, queries in rows) == min(tokens, len(rows) * window)
    assert all(queries >= 1 and context + queries == window for context, queries in rows)
    assert rows[0][1] == min(window, tokens - len(rows) + 1)  # one chunk has the greatest possible length


def test_the_largest_step_is_one_long_chunk_beside_decode_rows() -> None:
    assert worst_rows(8192, 4, 40960) == [(40960 - 8189, 8189), (40959, 1), (40959, 1), (40959, 1)]


def test_the_pass_runs_the_largest_step_over_a_small_pool_and_samples_every_row() -> None:
    model, meter = recording_model(), FakeMeter(peak=123)
    rows = worst_rows(100, 5, 1000)
    assert peak_bytes(model, meter, rows, block_size=16, backend=TorchBackend()) == (123, 0)
    seen = model.module
    assert meter.calls == ["reset", "peak"]
    assert len(seen.tokens) == 100
    assert [(row.context, row.queries) for row in seen.rows] == rows
    assert [row.role for row in seen.rows] == [Role.PREFILL] + [Role.DECODE] * 4
    assert seen.wanted == [95, 96, 97, 98, 99]  # logits for the last token of each row
    assert seen.positions == [*range(904, 1000), *[999] * 4]
    assert seen.capacity == 11  # blocks: 7 for slots 904 to 1000, 1 for each of the others


def test_with_slow_fast_decode_the_pass_runs_fast_rows_and_samples_what_drafts_may_need() -> None:
    model = recording_model()
    rows = worst_rows(300, 5, 1000)
    peak_bytes(model, FakeMeter(), rows, block_size=16, backend=TorchBackend(), slow_fast=True)
    fast, slow = model.module.steps
    for (context, queries), first, second in zip(rows, fast, slow, strict=True):
        assert (first.context, first.queries) == (second.context, second.queries) == (context, queries)
        if queries == 1:
            assert first.picks(16) is not None
            assert second.fast is None
            assert first.evidence is not None
            assert first.evidence is second.evidence  # it stays, like that of running sequences
            assert second.evidence.shares.shape[2] == -(-1000 // 16)
    assert len(model.module.wanted) == TOGETHER


def test_new_tokens_have_distinct_slots_and_the_prefix_is_fragmented() -> None:
    model = recording_model()
    peak_bytes(model, FakeMeter(), worst_rows(100, 5, 1000), block_size=16, backend=TorchBackend())
    written = [
        (row.blocks[slot // 16], slot % 16)
        for row in model.module.rows
        for slot in range(row.context, row.length)
    ]
    assert len(set(written)) == len(written) == 100
    before = model.module.rows[0].blocks[: 904 // 16]
    assert all(later != earlier + 1 for earlier, later in itertools.pairwise(before))
    assert max(before) < model.module.capacity


def test_the_pass_frees_its_pool() -> None:
    gc.disable()
    try:
        model = recording_model()
        peak_bytes(model, FakeMeter(), worst_rows(64, 4, 100), block_size=16, backend=TorchBackend())
        assert model.module.alive() == []
    finally:
        gc.enable()


def test_a_step_that_does_not_fit_is_refused_and_frees_its_pool() -> None:
    model = recording_model()
    model.module.raises = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
    with pytest.raises(ConfigError) as refused:
        peak_bytes(model, FakeMeter(), worst_rows(64, 4, 100), block_size=16, backend=TorchBackend())
    assert "a step of 64 tokens in 4 sequences does not fit cpu: CUDA out of memory" in str(refused.value)
    assert "lower max_num_batched_tokens" in str(refused.value)
    model.module.raises = None
    gc.collect()
    assert model.module.alive() == []


def test_with_block_sparse_prefill_the_step_runs_sparse_and_dense() -> None:
    model, seen = recording_model(), []
    model.module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["skim_step"].rows), with_kwargs=True
    )
    config = EngineConfig.of(prefill_attention="blocksparse", max_num_batched_tokens=300, max_num_seqs=3)
    pool_bytes(model, config, 2000, FakeMeter(), backend=TorchBackend())
    choosing, dense = seen
    assert [row.policy is not None for row in choosing] == [True, False, False]
    assert choosing[0].prompt == 2000
    assert [row.policy for row in dense] == [None] * 3
    assert [row.queries for row in choosing] == [row.queries for row in dense] == [298, 1, 1]


# -- scoring


class RecordingScorer:
    """A scorer that records its task."""

    def __init__(self, error: Exception | None = None) -> None:
        self.task: ScoringTask | None = None
        self.error = error
        self.ended = False

    def score(self, task: ScoringTask) -> Any:
        self.task = task
        yield
        if self.error is not None:
            raise self.error
        self.ended = True
        return [0.0] * task.blocks


def size_with(
    recording: RecordingScorer, monkeypatch: pytest.MonkeyPatch, window: int = 4096, **settings: Any
) -> int:
    monkeypatch.setattr(profile, "make_scorers", lambda target, drafter: lambda name: recording)
    config = EngineConfig.of(sparse_prefill="auto", max_num_batched_tokens=64, **settings)
    return pool_bytes(recording_model(), config, window, FakeMeter(), backend=TorchBackend())


def test_scoring_is_measured_with_a_long_prompt_and_the_longest_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = RecordingScorer()
    size_with(scorer, monkeypatch)
    assert scorer.ended
    assert scorer.task is not None
    assert len(scorer.task.tokens) == profile.SCORED_TOKENS
    assert len(scorer.task.question_ids) == LONGEST_QUESTION
    assert max(scorer.task.tokens) < VOCAB
    assert scorer.task.policy is None


def test_a_full_pass_is_measured_with_the_longest_readable_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions = recording_model().max_positions
    for at_least, window, longest in ((1000, 1500, 1500), (1500, 1000, 1500), (10**6, 10, positions - 2)):
        scorer = RecordingScorer()
        monkeypatch.setattr(profile, "SCORED_TOKENS", at_least)
        size_with(scorer, monkeypatch, window, scorer="full", prefill_attention="blocksparse")
        assert scorer.task is not None
        assert len(scorer.task.tokens) == longest
        assert scorer.task.policy is not None


@pytest.mark.parametrize("scorer", scorers())
def test_a_scorer_whose_memory_grows_is_measured_in_the_drafters_tokens(
    scorer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other scorers are measured as in a request: with the target's tokens, mapped for a drafter."""
    target, drafter, recording = recording_model(), recording_model(), RecordingScorer()
    drafter = dataclasses.replace(drafter, vocab_size=50)
    made: list[Any] = []
    monkeypatch.setattr(profile, "make_scorers", lambda *models: made.append(models) or (lambda _: recording))
    assert profile.score_long(target, drafter, PrefillConfig(scorer=scorer), 1500) is None
    grows = scorers()[scorer].grows
    assert made == [(drafter, None) if grows else (target, drafter)]
    assert recording.task is not None
    assert max(recording.task.tokens) == (49 if grows else VOCAB - 1)


def test_a_failing_scorer_does_not_stop_the_engine_from_starting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = size_with(RecordingScorer(), monkeypatch)
    assert "could not be measured" not in caplog.text
    assert size_with(RecordingScorer(ValueError("no heads")), monkeypatch) == sound
    assert sound == int(0.9 * 8 * GIB) - 2 * GIB - GIB - GRAPH_RESERVE - ROUNDING
    assert "could not be measured: no heads" in caplog.text
    with pytest.raises(
        ConfigError,
        match=r"scoring \d+ tokens with the scorer 'blend' does not fit .*: CUDA.*another `scorer`",
    ):
        size_with(RecordingScorer(torch.OutOfMemoryError("CUDA out of memory")), monkeypatch)


@pytest.mark.parametrize(
    ("settings", "drafter", "scored"),
    [({}, False, False), ({"sparse_prefill": "auto"}, False, True), ({}, True, True)],
)
def test_scoring_is_part_of_the_pass_if_requests_may_use_it(
    settings: dict[str, Any], drafter: bool, scored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = RecordingScorer()
    monkeypatch.setattr(profile, "make_scorers", lambda target, drafter: lambda name: scorer)
    model = recording_model()
    pool_bytes(
        model,
        EngineConfig.of(**settings),
        4096,
        FakeMeter(),
        backend=TorchBackend(),
        drafter=recording_model() if drafter else None,
    )
    assert scorer.ended is scored


# -- the budget


def test_the_pool_gets_the_memory_that_the_pass_leaves(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = recording_model()
    meter = FakeMeter(2 * GIB, 3 * GIB)  # memory that the pass keeps counts as in use
    config = EngineConfig.of(gpu_memory_utilization=0.75, max_num_batched_tokens=300, max_num_seqs=7)
    budget = pool_bytes(model, config, 2000, meter, backend=TorchBackend())
    assert budget == 6 * GIB - 3 * GIB - GIB - GRAPH_RESERVE - ROUNDING
    assert meter.calls == ["in_use", "reset", "peak", "in_use"]
    assert len(model.module.tokens) == 300
    assert len(model.module.rows) == 7
    assert max(model.module.positions) == 1999
    assert "profiled a step of 300 tokens" in caplog.text
    assert f"{budget // (16 * TOKEN_BYTES) * 16} tokens" in caplog.text


def test_no_sequence_of_the_pass_is_longer_than_the_largest_possible_pool() -> None:
    model = recording_model()
    room = GRAPH_RESERVE + ROUNDING + 1500 * TOKEN_BYTES
    meter = FakeMeter(8 * GIB - room, 8 * GIB - room, peak=0)
    config = EngineConfig.of(gpu_memory_utilization=1.0, max_num_batched_tokens=300)
    pool_bytes(model, config, 4096, meter, backend=TorchBackend())
    assert max(model.module.positions) == 1500 // 16 * 16 - 1  # whole blocks


def test_neither_a_set_size_nor_the_cpu_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    model, meter = recording_model(), FakeMeter()
    monkeypatch.setattr(profile, "free_bytes", lambda device: 1000)
    assert pool_bytes(model, EngineConfig.of(kv_memory="3M"), 4096, meter) == 3 * 2**20
    assert pool_bytes(model, EngineConfig.of(gpu_memory_utilization=0.1), 4096, None) == 400
    assert meter.calls == []
    assert model.module.rows == ()


def test_a_full_device_is_refused_before_anything_is_run() -> None:
    model = recording_model()
    with pytest.raises(ConfigError, match=r"7\.50 GiB are in use.*raise gpu_memory_utilization") as refused:
        pool_bytes(model, EngineConfig.of(), 4096, FakeMeter(int(7.5 * GIB)))
    assert "step takes" not in str(refused.value)
    assert model.module.rows == ()


@pytest.mark.parametrize(("window", "fits"), [(4096, False), (512, True)])
def test_a_pool_too_small_for_a_request_is_refused(window: int, fits: bool) -> None:
    """The pool must hold a thousand tokens, or the context window if that is smaller."""
    model = dataclasses.replace(recording_model(), max_positions=window)
    room = GRAPH_RESERVE + ROUNDING + 1000 * TOKEN_BYTES
    config = EngineConfig.of(gpu_memory_utilization=1.0, max_num_batched_tokens=64)
    meter = FakeMeter(2 * GIB, 2 * GIB, peak=6 * GIB - room)
    if fits:
        assert pool_bytes(model, config, window, meter, backend=TorchBackend()) == 1000 * TOKEN_BYTES
    else:
        with pytest.raises(ConfigError, match="too little memory for a KV pool"):
            pool_bytes(model, config, window, meter, backend=TorchBackend())


@pytest.mark.parametrize("scorer", [name for name, one in scorers().items() if one.model != "none"])
def test_the_pass_runs_with_a_real_model(
    scorer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "SCORED_TOKENS", 2048)
    model = load(tiny.save("llama", tmp_path), ModelConfig(model="llama", device="cpu"))
    config = EngineConfig.of(
        sparse_prefill="always", scorer=scorer, max_num_batched_tokens=200, max_num_seqs=6
    )
    budget = pool_bytes(model, config, 1024, FakeMeter())
    assert budget == int(0.9 * 8 * GIB) - 3 * GIB - GRAPH_RESERVE - 4 * ROUNDING
    assert "could not be measured" not in caplog.text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("no more"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("a sync"), False),
        (ValueError("the note 'out of memory' is not a number"), False),
    ],
    ids=repr,
)
def test_only_errors_of_the_machine_mean_that_memory_ran_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


# -- residency


class WeighingMeter(FakeMeter):
    """A device whose use follows from where the models are; `peaks` are those of scoring and of a step."""

    def __init__(self, residency: EngineResidency, *peaks: int, total: int = 8 * GIB) -> None:
        super().__init__(total=total)
        self._residency, self._peaks = residency, list(peaks)
        self.seen: list[tuple[Place, ...]] = []

    def reset(self) -> None:
        self.seen.append(tuple(one.place for one in self._residency.models.values()))

    def peak(self) -> int:
        return self._peaks.pop(0)

    def in_use(self) -> tuple[int, int]:
        return GIB + self._residency.device_bytes, self._total


def weighing_model(name: str, values: int) -> LoadedModel:
    model = dataclasses.replace(recording_model(), name=name)
    model.module.weight = torch.nn.Parameter(torch.zeros(values), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("policy", "scoring", "step", "taken"),
    [
        ("both", 300, 500, 4000 + 1200 + 500),
        ("both", 700, 500, 4000 + 1200 + 700),
        ("keep-target", 300, 2000, 4000 + 2000),
        ("keep-target", 300, 500, 4000 + 1200 + 300),
        ("swap", 300, 500, 4000 + 500),
        ("swap", 9000, 500, 1200 + 9000),
    ],
)
def test_the_pool_is_sized_by_the_policy(
    policy: str, scoring: int, step: int, taken: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))
    target, drafter = weighing_model("target", 1000), weighing_model("drafter", 300)
    monkeypatch.setattr(profile, "make_scorers", lambda *_: lambda name: RecordingScorer())
    residency = EngineResidency(target, drafter, policy)
    meter = WeighingMeter(residency, scoring, step)
    config = EngineConfig.of(max_num_batched_tokens=64, gpu_memory_utilization=1.0)
    budget = pool_bytes(
        target, config, 512, meter, backend=TorchBackend(), drafter=drafter, residency=residency
    )
    assert budget == 7 * GIB - GRAPH_RESERVE - ROUNDING - taken
    here, away = Place.RESIDENT, Place.PARKED
    assert (
        meter.seen
        == {
            "both": [(here, here), (here, here)],
            "keep-target": [(here, here), (here, away)],
            "swap": [(away, here), (here, away)],
        }[policy]
    )


@pytest.mark.parametrize(
    ("step", "scoring", "room", "chosen", "why"),
    [
        (500, 400, 1200 + 500, "both", "it leaves"),
        (2000, 400, 2000, "keep-target", "it leaves .*; both would leave"),
        (500, 10**6, 500, "swap", "it leaves .*; both would leave .*; keep-target would leave"),
        (500, 10**6, 0, "swap", "no policy has room for one sequence"),
    ],
)
def test_auto_chooses_by_the_measured_sizes(
    step: int,
    scoring: int,
    room: int,
    chosen: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`room`: bytes of the device besides the target's weights and one sequence of the context window."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))
    monkeypatch.setattr(profile, "USEFUL_TOKENS", 1)
    monkeypatch.setattr(profile, "make_scorers", lambda *_: lambda name: RecordingScorer())
    target, drafter = weighing_model("target", 10**6), weighing_model("drafter", 300)
    residency = EngineResidency(target, drafter, "auto")
    total = GIB + GRAPH_RESERVE + ROUNDING + 4 * 10**6 + 512 * TOKEN_BYTES + room
    meter = WeighingMeter(residency, scoring, step, total=total)
    config = EngineConfig.of(max_num_batched_tokens=64, gpu_memory_utilization=1.0)
    pool_bytes(target, config, 512, meter, backend=TorchBackend(), drafter=drafter, residency=residency)
    assert residency.policy == chosen
    assert re.search(f"residency {chosen}: {why}", caplog.text)


def test_auto_measures_one_model_at_a_time_if_both_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))
    refused = iter([torch.OutOfMemoryError("CUDA out of memory"), None])
    monkeypatch.setattr(profile, "make_scorers", lambda *_: lambda name: RecordingScorer(next(refused)))
    target, drafter = weighing_model("target", 1000), weighing_model("drafter", 300)
    residency = EngineResidency(target, drafter, "auto")
    meter = WeighingMeter(residency, 100, 100)
    config = EngineConfig.of(max_num_batched_tokens=64)
    pool_bytes(target, config, 512, meter, backend=TorchBackend(), drafter=drafter, residency=residency)
    assert meter.seen == [
        (Place.RESIDENT, Place.RESIDENT),
        (Place.PARKED, Place.RESIDENT),
        (Place.RESIDENT, Place.PARKED),
    ]


@pytest.mark.parametrize(
    ("room", "scoring", "chosen"),
    [
        (1200 + 500, 400, "both"),
        (1200 + 499, 400, "keep-target"),
        (1200 + 400, 400, "keep-target"),
        (1200 + 400, 500_000, "swap"),
    ],
)
def test_auto_with_a_set_size_asks_whether_the_pool_fits_beside_steps_and_scoring(
    room: int, scoring: int, chosen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`room`: bytes of the device besides the target's weights and the pool."""
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))
    monkeypatch.setattr(profile, "USEFUL_TOKENS", 1)
    monkeypatch.setattr(profile, "make_scorers", lambda *_: lambda name: RecordingScorer())
    target, drafter = weighing_model("target", 10**6), weighing_model("drafter", 300)
    residency = EngineResidency(target, drafter, "auto")
    size = 512 * TOKEN_BYTES
    meter = WeighingMeter(
        residency, scoring, 500, total=GIB + GRAPH_RESERVE + ROUNDING + 4 * 10**6 + size + room
    )
    config = EngineConfig.of(kv_memory=size, max_num_batched_tokens=64)
    budget = pool_bytes(
        target, config, 512, meter, backend=TorchBackend(), drafter=drafter, residency=residency
    )
    assert (budget, residency.policy) == (size, chosen)


def test_auto_keeps_both_models_in_the_memory_of_a_cpu() -> None:
    target, drafter = weighing_model("target", 1000), weighing_model("drafter", 300)
    residency = EngineResidency(target, drafter, "auto")
    config = EngineConfig.of(kv_memory=5000)
    assert pool_bytes(target, config, 512, None, drafter=drafter, residency=residency) == 5000
    assert residency.policy == "both"
