"""Steps launched while the previous one is in flight: the same text, one step later."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from skim.engine.engine import Engine
from skim.engine.in_flight import Chunks, InFlightStep, PromptReports, Sampling
from skim.engine.runner import Forward
from skim.engine.sequence import Delta, Failed, Finished, Sequence
from skim.sampling.batch import SamplerRow
from skim.sampling.logprobs import Draw
from skim.sampling.params import SamplingParams
from tests.fake import EOS, FakeModule, continuation, fake_engine, submit


def overlapped(*, apart: bool = False, **settings: Any) -> Engine:
    engine = fake_engine(**settings)
    engine.core.overlaps = True
    engine.core.apart = apart
    return engine


def collect(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[Any]]:
    collected: list[list[Any]] = [[] for _ in prompts]
    for prompt, one, events in zip(prompts, params, collected, strict=True):
        submit(engine, prompt, one, emit=events.append)
    while engine.step():
        engine.core.memory.check()
    assert not engine.core.memory.tables
    return collected


def without_times(events: list[Any]) -> list[Any]:
    """Events without times: deltas as they are, the last event as its type and error."""
    return [e if isinstance(e, Delta) else (type(e), getattr(e, "error", None)) for e in events]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_overlapped_steps_emit_the_same_events(seed: int, apart: bool) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(60) for _ in range(rng.randrange(1, 20))] for _ in range(8)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(1000),
            max_tokens=rng.randrange(1, 15),
            n=rng.choice([1, 1, 2]),
            presence_penalty=rng.choice([0.0, 1.5]),
            stop=rng.choice([(), (" 1",), (" 5", " 12 ")]),
            stop_token_ids=rng.choice([(), (3, 4, 5)]),
            logprobs=rng.choice([None, 2]),
            min_tokens=rng.choice([0, 0, 1]),
        )
        for _ in prompts
    ]
    settings = {"blocks": rng.choice([20, 200]), "max_num_batched_tokens": rng.choice([5, 64])}
    plain = collect(fake_engine(**settings), prompts, params)
    ahead = collect(overlapped(apart=apart, **settings), prompts, params)
    assert [without_times(events) for events in ahead] == [without_times(events) for events in plain]
    assert all(isinstance(events[-1], Finished) for events in ahead)


def test_the_next_step_is_launched_before_a_token_is_emitted() -> None:
    engine = overlapped(blocks=50)
    steps_when_emitted: list[int] = []
    submit(
        engine,
        [1, 2, 3],
        SamplingParams(temperature=0, max_tokens=5),
        emit=lambda event: steps_when_emitted.append(engine.core.stats().steps),
    )
    while engine.step():
        pass
    # The first token is emitted at once, and no step follows the last one.
    assert steps_when_emitted == [1, 3, 4, 5, 5, 5]


def test_an_unforeseen_end_costs_one_row_of_one_step() -> None:
    engine = overlapped(blocks=50)
    expected = continuation([1, 2, 3], 8)
    stop = expected[2]
    events: list[Any] = []
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,))
    submit(engine, [1, 2, 3], params, emit=events.append)
    while engine.step():
        engine.core.memory.check()
    length = expected.index(stop) + 1
    assert [t for e in events[:-1] for t in e.token_ids] == expected[:length]
    assert events[-1].metrics.generated_tokens == length
    assert engine.stats().tokens_computed == 3 + length  # including the last token, whose row is discarded


def test_an_abort_between_launch_and_finish_ends_the_request_once() -> None:
    engine = overlapped(blocks=50)
    kept, gone = [], []
    params = SamplingParams(temperature=0, max_tokens=9)
    submit(engine, [1, 2], params, emit=kept.append)
    handle = submit(engine, [3, 4], params, emit=gone.append)
    for _ in range(3):
        engine.step()
    handle.abort()
    while engine.step():
        engine.core.memory.check()
    assert [type(e) for e in gone].count(Finished) == 1
    assert gone[-2].finish_reason == "abort"
    said = [t for e in gone[:-1] for t in e.token_ids]
    assert said == continuation([3, 4], len(said))
    assert gone[-1].metrics.generated_tokens == len(said)
    assert [t for e in kept[:-1] for t in e.token_ids] == continuation([1, 2], 9)


@pytest.mark.parametrize("ahead", [False, True])
def test_running_out_of_memory_fails_the_largest_request_only(ahead: bool) -> None:
    engine = fake_engine(blocks=100, max_num_batched_tokens=64)
    engine.core.overlaps = ahead
    small, large, later = [], [], []
    params = SamplingParams(temperature=0, max_tokens=6)
    submit(engine, [1, 2], params, emit=small.append)
    engine.step()
    submit(engine, list(range(40)), params, emit=large.append)
    module = engine.model.module
    assert isinstance(module, FakeModule)
    module.fail_next = torch.OutOfMemoryError("CUDA out of memory")
    while engine.step():
        engine.core.memory.check()
    assert isinstance(large[-1], Failed)
    assert "out of memory while 40 of its tokens" in str(large[-1].error)
    assert [t for e in small[:-1] for t in e.token_ids] == continuation([1, 2], 6)
    submit(engine, list(range(40)), params, emit=later.append)
    while engine.step():
        pass
    assert [t for e in later[:-1] for t in e.token_ids] == continuation(list(range(40)), 6)


def test_non_finite_logits_fail_the_request_a_step_later() -> None:
    engine = overlapped(blocks=50)
    bad, good = [], []
    params = SamplingParams(temperature=0, max_tokens=6)
    submit(engine, [1, 2], params, emit=bad.append)
    submit(engine, [EOS - 1, 4], params, emit=good.append)
    engine.step()
    engine.model.module.nan_next = True
    while engine.step():
        engine.core.memory.check()
    assert isinstance(bad[-1], Failed)
    assert "not finite" in str(bad[-1].error)
    assert [t for e in good[:-1] for t in e.token_ids] == continuation([EOS - 1, 4], 6)


@pytest.mark.parametrize("fails", range(1, 9))
def test_running_out_of_memory_while_drawing_fails_one_request(
    monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """The others have not advanced yet, so they run again with the same result."""
    engine = overlapped(blocks=100, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=6, presence_penalty=0.1, logprobs=1)
    one, several = [], []
    submit(engine, [1, 2], params, emit=one.append)
    engine.step()
    wide = SamplingParams(temperature=0, max_tokens=6, n=3, presence_penalty=0.1)
    submit(engine, list(range(40)), wide, emit=several.append)
    calls = []
    sampler = engine.core.lifecycle.sampler
    for name in ("open", "choose"):
        real = getattr(sampler, name)

        def spy(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) == fails:
                raise RuntimeError("CUDA error: out of memory")
            return real(*args, **kwargs)

        monkeypatch.setattr(sampler, name, spy)
    while engine.step():
        engine.core.memory.check()
    assert not engine.core.lifecycle.requests
    assert not engine.core.memory.tables
    ended = [events[-1] for events in (one, several)]
    assert sum(isinstance(event, Failed) for event in ended) == 1
    if isinstance(ended[0], Finished):
        assert [t for e in one[:-1] for t in e.token_ids] == continuation([1, 2], 6)
    if isinstance(ended[1], Finished):
        for index in range(3):
            said = [t for e in several[:-1] if e.index == index for t in e.token_ids]
            assert said == continuation(list(range(40)), 6)


def test_sequences_in_progress_never_exceed_the_limit() -> None:
    engine = overlapped(blocks=100, max_num_seqs=2)
    most = 0
    for _ in range(6):
        submit(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=3))
    forward = engine.core.runner.forward

    def watched(*args: Any) -> Forward:
        nonlocal most
        most = max(most, len(engine.core.memory.tables))
        return forward(*args)

    engine.core.runner.forward = watched  # type: ignore[method-assign]
    while engine.step():
        pass
    assert most == 2


def in_flight(sequence: Sequence, draw: Draw) -> InFlightStep:
    sampling = [Sampling(sequence, sequence.computed)]
    return InFlightStep.of(sampling, draw, Chunks(), PromptReports(), torch.device("cpu"))


def test_a_step_with_a_grammar_is_finished_before_the_next_one() -> None:
    plain, held = (SamplerRow(SamplingParams(), 0, matcher=matcher) for matcher in (None, object()))  # type: ignore[arg-type]
    engine = overlapped(blocks=50)
    submit(engine, [1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    [sequence] = engine.core.lifecycle.sequences.values()
    assert sequence.generated == 1
    packed = torch.zeros(1, 2, dtype=torch.int32)
    assert not in_flight(sequence, Draw.of(packed, (plain,), 0)).must_finish
    assert in_flight(sequence, Draw.of(packed, (held,), 0)).must_finish
