"""Engines whose models come and go: the same replies, under every policy, whoever parks them and when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skim.config import EngineConfig, ModelConfig, PrefillConfig
from skim.engine import parking as parking_module
from skim.engine.engine import Engine
from skim.engine.parking import Parking
from skim.engine.residency import EngineResidency
from skim.engine.sequence import Finished
from skim.engine.turns import DRAFTER, POLICIES, ROLES, TARGET
from skim.errors import BusyError, EngineError, MoveError, ParkedError, RequestError
from skim.models import scratch
from skim.models.load import LoadedModel, load
from skim.models.residency import Residency
from skim.models.residency_state import Direction, Place
from skim.prefill.plan import DenseReason
from skim.prefill.rank import lay_out
from skim.sampling.params import SamplingParams
from tests import paths, tiny
from tests.fake import continuation, fake_engine, run_together, submit

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = [ord(letter) % 256 for letter in paths.BOOK[3000:9000]]
DENSE = TEXT[:90]
LONG = [TEXT[start : start + 300] for start in (0, 700, 1500)]
SETTINGS: dict[str, Any] = {
    "kv_memory": "4M",
    "sparse_prefill": "auto",
    "min_prompt_tokens": 200,
    "scorer": "blend",  # it reads embeddings of the target, too
    "keep_ratio": 0.5,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,  # a cached prompt would not be skimmed again
}


PARK: dict[str, Any] = {"to": "parked", "wait": True, "timeout": None}


@pytest.fixture(autouse=True)
def in_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "cache", SimpleNamespace(root=lambda: tmp_path))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: tiny.save(family, tmp_path_factory.mktemp(family), seed)
        for seed, family in enumerate(("llama", "qwen3"))
    }


def loaded(path: Path, kind: str = "packed") -> LoadedModel:
    quantization = kind if kind in ("int8", "int4") else "auto"
    model = load(path, ModelConfig(model=str(path), device="cpu", quantization=quantization))
    if kind == "tied":
        model.module.lm_head.weight = model.module.model.embed_tokens.weight
    return model


@pytest.fixture
def models(saved: dict[str, Path]) -> tuple[LoadedModel, LoadedModel]:
    return loaded(saved["llama"]), loaded(saved["qwen3"])


def engine_of(target: LoadedModel, drafter: LoadedModel | None, policy: str = "both", **more: Any) -> Engine:
    config = EngineConfig.of(**{**SETTINGS, "residency": policy, **more})
    if drafter is not None:
        config = replace(config, prefill=replace(config.prefill, drafter=drafter.name))
    return Engine(target, config, drafter=drafter)


def tokens_of(handle: Any) -> list[int]:
    *deltas, last = handle
    assert isinstance(last, Finished)
    return [token for delta in deltas for token in delta.token_ids]


def place_of(engine: Engine, role: str) -> Place:
    return engine.core.residency.models[role].place


# -- the same replies


@pytest.mark.parametrize("kind", ["plain", "tied", "packed", "int8", "int4"])
def test_replies_are_identical_after_any_moves_under_every_policy(kind: str, saved: dict[str, Path]) -> None:
    draw = random.Random(kind)
    target, drafter = loaded(saved["llama"], kind), loaded(saved["qwen3"], kind)
    prompts = [DENSE, *LONG]
    for reader in (None, drafter):
        eager = kind == "plain"
        expected = [
            run_together(engine_of(target, reader, enforce_eager=eager), [prompt], GREEDY)[0]
            for prompt in prompts
        ]
        for policy in POLICIES if reader is not None else ("auto",):
            engine = engine_of(target, reader, policy, enforce_eager=eager)
            assert engine.core.residency.policy == ("both" if reader is None else policy)
            for _ in range(3):
                for _ in range(draw.randrange(3)):
                    roles = draw.sample(ROLES, draw.randrange(1, 3))
                    engine.core.residency.park(roles, draw.choice([Place.PARKED, Place.RELEASED]))
                chosen = draw.sample(range(len(prompts)), draw.randrange(1, 4))
                found = run_together(engine, [prompts[i] for i in chosen], GREEDY)
                assert found == [expected[i] for i in chosen]
            stats = engine.stats()
            assert sum(stats.prefill.fallbacks.values()) == 0
            assert stats.residency_policy == engine.core.residency.policy
            assert [state.role for state in stats.residency] == list(
                ROLES if reader is not None else [TARGET]
            )


def test_one_visit_scores_all_waiting_prompts_while_rows_pause_and_keep_their_blocks(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    target, drafter = models
    alone = run_together(engine_of(target, drafter), [DENSE], replace(GREEDY, max_tokens=40))[0]
    for policy in ("keep-target", "swap"):
        engine = engine_of(target, drafter, policy)
        before = engine.core.residency.models[DRAFTER].state(DRAFTER).transfers
        row = submit(engine, DENSE, replace(GREEDY, max_tokens=40))
        for _ in range(6):
            engine.step()
        [sequence] = engine.core.lifecycle.sequences.values()
        table, computed, generated = sequence.table, sequence.computed, sequence.generated
        assert generated > 0
        skimmed = [submit(engine, prompt, GREEDY) for prompt in LONG]
        seen = set()
        while engine.core.lifecycle.plans or engine._inbox.qsize():
            engine.step()
            engine.core.memory.check()
            if place_of(engine, DRAFTER) is Place.RESIDENT:
                if not seen:
                    table, computed, generated = sequence.table, sequence.computed, sequence.generated
                seen.add(place_of(engine, TARGET))
                assert (sequence.table, sequence.computed) == (table, computed)
        assert seen == {Place.RESIDENT if policy == "keep-target" else Place.PARKED}
        while engine.step():
            engine.core.memory.check()
        assert tokens_of(row) == alone
        assert all(tokens_of(handle) for handle in skimmed)
        after = engine.core.residency.models[DRAFTER].state(DRAFTER).transfers
        counts = [one.get(Direction.TO_DEVICE) for one in (before, after)]
        assert counts[1].count - (counts[0].count if counts[0] else 0) == 1
        assert engine.stats().preemptions == 0
        assert (place_of(engine, TARGET), place_of(engine, DRAFTER)) == (Place.RESIDENT, Place.PARKED)


def test_a_conversation_that_is_mostly_cached_brings_no_drafter(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    engine = engine_of(*models, policy="swap", enable_prefix_caching=True)
    dense = replace(engine.config.prefill, sparse_prefill="off")
    first = submit(engine, LONG[0], GREEDY, prefill=dense)
    while engine.step():
        pass
    tokens_of(first)
    before = engine.core.residency.states()
    run_together(engine, [[*LONG[0], 65, 66]], GREEDY)
    assert engine.stats().prefill.fallbacks == {DenseReason.MOSTLY_CACHED: 1}
    assert [state.last for state in engine.core.residency.states()] == [state.last for state in before]


def test_embeddings_and_rankings_find_their_model(models: tuple[LoadedModel, LoadedModel]) -> None:
    def results(engine: Engine) -> list[Any]:
        documents = [tuple(TEXT[start : start + 80]) for start in (0, 100, 200)]
        ranking = lay_out(
            tuple(TEXT[110:120]), documents, scorer="attention", block_size=32, first=256, filler=10
        )
        futures = [engine.embed(documents), engine.rank(ranking)]
        while engine.step():
            pass
        embedded, ranked = (future.result(timeout=0) for future in futures)
        return [[vector.tolist() for vector in embedded], ranked]

    expected = results(engine_of(*models))
    for policy in ("keep-target", "swap"):
        engine = engine_of(*models, policy=policy)
        assert results(engine) == expected
        engine.core.residency.park(ROLES, Place.PARKED)
        assert results(engine) == expected


# -- failures


@contextmanager
def broken(residency: Residency) -> Iterator[None]:
    """Meanwhile this model cannot be brought to the device."""

    def fail() -> None:
        raise EngineError("no memory for it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "unpark", fail)
        yield


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_are_read_densely_if_the_drafter_cannot_come(
    policy: str, models: tuple[LoadedModel, LoadedModel]
) -> None:
    engine = engine_of(*models, policy=policy)
    dense = replace(engine.config.prefill, sparse_prefill="off")
    expected = [tokens_of(_run(engine, prompt, dense)) for prompt in (DENSE[:5], LONG[0])]
    engine.core.residency.park_idle()
    with broken(engine.core.residency.models[DRAFTER]):
        assert run_together(engine, [DENSE[:5]], GREEDY) == expected[:1]
        assert run_together(engine, [DENSE[:5], LONG[0]], GREEDY) == expected
    assert engine.stats().prefill.fallbacks == {DenseReason.SCORER_FAILED: 1}
    run_together(engine, LONG[:1], GREEDY)
    assert engine.stats().prefill.activations == 1


def _run(engine: Engine, prompt: list[int], prefill: PrefillConfig) -> Any:
    handle = submit(engine, prompt, GREEDY, prefill=prefill)
    while engine.step():
        engine.core.memory.check()
    return handle


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_fail_if_the_target_cannot_come_and_later_ones_are_served(
    policy: str, models: tuple[LoadedModel, LoadedModel]
) -> None:
    engine = engine_of(*models, policy=policy)
    expected = run_together(engine, [DENSE, LONG[0]], GREEDY)
    engine.core.residency.park(ROLES, Place.PARKED)
    with broken(engine.core.residency.models[TARGET]):
        handles = [submit(engine, prompt, GREEDY) for prompt in (DENSE, LONG[0])]
        while engine.step():
            engine.core.memory.check()
    for handle in handles:
        with pytest.raises(EngineError, match="no memory"):
            tokens_of(handle)
    assert run_together(engine, [DENSE, LONG[0]], GREEDY) == expected


def test_after_an_idle_park_a_long_prompt_under_swap_brings_each_model_once(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    engine = engine_of(*models, policy="swap")
    expected = run_together(engine, LONG[:1], GREEDY)

    def returns() -> list[int]:
        moves = [state.transfers[Direction.TO_DEVICE] for state in engine.stats().residency]
        return [one.count for one in moves]

    engine.core.residency.park_idle()
    before = returns()
    assert run_together(engine, LONG[:1], GREEDY) == expected
    assert [after - was for after, was in zip(returns(), before, strict=True)] == [1, 1]


def test_a_park_of_both_models_happens_as_a_whole_or_not_at_all(
    models: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = engine_of(*models).core.residency

    def full(*_: Any, **__: Any) -> int:
        raise OSError(27, "File too large")

    for to in (Place.PARKED, Place.RELEASED):
        with monkeypatch.context() as patch:
            patch.setattr(residency.models[DRAFTER], "_copy", full_of(residency.models[DRAFTER], full))
            with pytest.raises(MoveError, match=r"the drafter .*could not be parked: .*File too large"):
                residency.park(ROLES, to)
        assert [one.place for one in residency.models.values()] == [Place.RESIDENT] * 2
        assert all(one.device_bytes == one.size for one in residency.models.values())
    residency.park([TARGET], Place.PARKED)
    with monkeypatch.context() as patch:
        patch.setattr(residency.models[DRAFTER], "_copy", full_of(residency.models[DRAFTER], full))
        with pytest.raises(MoveError, match="the drafter"):
            residency.park(ROLES, Place.RELEASED)
    assert [one.place for one in residency.models.values()] == [Place.PARKED, Place.RESIDENT]


def full_of(residency: Residency, fail: Callable[..., int]) -> Callable[..., int]:
    """A `_copy` that fails as a full disk makes it fail."""

    def copy(*_: Any, **__: Any) -> int:
        try:
            return fail()
        except OSError as error:
            raise residency._stays(error) from error

    return copy


def test_a_half_parked_pair_that_cannot_be_undone_is_reported_exactly(
    models: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = engine_of(*models).core.residency

    def full(*_: Any, **__: Any) -> None:
        raise MoveError("the drafter could not be parked")

    monkeypatch.setattr(residency.models[DRAFTER], "park", full)
    with broken(residency.models[TARGET]), pytest.raises(MoveError) as raised:
        residency.park(ROLES, Place.PARKED)
    assert str(raised.value) == "the drafter could not be parked; no memory for it"
    assert residency.models[TARGET].place is Place.PARKED


def test_the_runner_never_runs_parked_weights(models: tuple[LoadedModel, LoadedModel]) -> None:
    engine = engine_of(*models)
    engine.core.residency.park([TARGET], Place.PARKED)
    with pytest.raises(ParkedError, match="weights are not on cpu"):
        engine.core.runner.forward([])


# -- an administrator


@pytest.fixture
def started(models: tuple[LoadedModel, LoadedModel]) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(policy: str = "both", **more: Any) -> Engine:
        engine = engine_of(*models, policy=policy, **more)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        assert engine.close(timeout=30)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_administrators_park_holds_until_the_unpark(policy: str, started: Callable[..., Engine]) -> None:
    engine = started(policy)
    expected = tokens_of(submit(engine, DENSE, GREEDY))
    states = engine.park(to="released")
    assert [(state.role, state.place, state.device_bytes) for state in states] == [
        (role, Place.RELEASED, 0) for role in ROLES
    ]
    assert engine.parks.target_parked
    for ask in (lambda: submit(engine, DENSE, GREEDY), lambda: engine.embed([(1, 2)])):
        with pytest.raises(ParkedError, match="parked by an administrator"):
            ask()
    states = engine.unpark()
    assert states[0].place is Place.RESIDENT
    assert states[1].place is (Place.RESIDENT if policy == "both" else Place.RELEASED)
    assert not engine.parks.target_parked
    assert tokens_of(submit(engine, DENSE, GREEDY)) == expected
    assert tokens_of(submit(engine, LONG[0], GREEDY))
    assert engine.stats().prefill.activations == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_without_its_drafter_an_engine_reads_prompts_densely(
    policy: str, started: Callable[..., Engine]
) -> None:
    engine = started(policy)
    engine.park([DRAFTER])
    assert not engine.parks.target_parked
    assert tokens_of(submit(engine, LONG[0], GREEDY))
    assert engine.stats().prefill.fallbacks == {DenseReason.DRAFTER_PARKED: 1}
    ranking = lay_out((1, 2), [(3, 4)], scorer="attention", block_size=32, first=256, filler=10)
    with pytest.raises(ParkedError, match="drafter was parked"):
        engine.rank(ranking).result(timeout=30)
    engine.unpark([DRAFTER])
    assert tokens_of(submit(engine, LONG[1], GREEDY))
    assert engine.stats().prefill.activations == 1


def test_a_park_waits_for_running_requests_or_refuses(started: Callable[..., Engine]) -> None:
    engine = started()
    long = replace(GREEDY, max_tokens=400)
    handle = submit(engine, DENSE, long)
    next(iter(handle))
    with pytest.raises(BusyError, match="requests are running"):
        engine.park(wait=False)
    with pytest.raises(BusyError, match="time to wait"):
        engine.park(timeout=0.0)
    assert not engine.parks.target_parked
    assert engine.park()[0].place is Place.PARKED
    assert sum(len(delta.token_ids) for delta in list(handle)[:-1]) >= 399 - 1
    engine.unpark()


def test_a_refused_park_is_refused_at_once_and_turns_no_request_away(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    """The engine's thread runs nothing meanwhile."""
    engine = engine_of(*models)
    handle = submit(engine, DENSE, GREEDY)
    engine.step()
    park = engine.parks.park(to="parked", wait=False, timeout=None)
    with pytest.raises(BusyError, match="requests are running"):
        park.result(timeout=0)
    second = submit(engine, DENSE, GREEDY)
    while engine.step():
        assert not engine.parks.target_parked
    assert tokens_of(handle) == tokens_of(second)
    third = submit(engine, DENSE, GREEDY)  # not yet seen by the engine's thread
    park = engine.parks.park(to="parked", wait=False, timeout=None)
    fourth = submit(engine, DENSE, GREEDY)
    while engine.step():
        assert not engine.parks.target_parked
    with pytest.raises(BusyError, match="requests are running"):
        park.result(timeout=0)
    assert tokens_of(third) == tokens_of(fourth)
    park = engine.parks.park(to="parked", wait=False, timeout=None)
    engine.step()
    assert [state.place for state in park.result(timeout=0)] == [Place.PARKED] * 2
    assert engine.parks.target_parked


def test_parks_that_do_not_wait_do_not_wait_for_each_other(models: tuple[LoadedModel, LoadedModel]) -> None:
    engine = engine_of(*models)
    parks = [engine.parks.park(to="parked", wait=False, timeout=None) for _ in range(3)]
    engine.start()
    for park in parks:
        assert [state.place for state in park.result(timeout=30)] == [Place.PARKED] * 2
    assert engine.close(timeout=30)


def test_requests_are_told_to_retry_only_while_the_target_comes_back(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    engine = engine_of(*models)
    parked = engine.parks.park(**PARK)
    engine.step()
    parked.result(timeout=0)
    engine.parks.unpark([DRAFTER])
    assert not engine.parks.unparking
    with pytest.raises(ParkedError, match="was parked by an administrator") as refused:
        submit(engine, DENSE, GREEDY)
    assert not refused.value.returning
    engine.parks.unpark()
    assert engine.parks.unparking
    with pytest.raises(ParkedError, match="is being unparked") as refused:
        submit(engine, DENSE, GREEDY)
    assert refused.value.returning
    engine.step()
    assert not engine.parks.unparking


def test_an_unpark_of_a_park_that_waits_admits_requests_at_once(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    engine = engine_of(*models)
    handle = submit(engine, DENSE, GREEDY)
    engine.step()
    park = engine.parks.park(**PARK)
    engine.step()
    assert {str(one) for one in engine.parks.standing.values()} == {"park_waits"}
    with pytest.raises(ParkedError):
        submit(engine, DENSE, GREEDY)
    unpark = engine.parks.unpark()
    assert not engine.parks.unparking
    second = submit(engine, DENSE, GREEDY)
    while engine.step():
        pass
    with pytest.raises(BusyError, match="ended by an unpark"):
        park.result(timeout=0)
    assert [state.place for state in unpark.result(timeout=0)] == [Place.RESIDENT] * 2
    assert tokens_of(handle) == tokens_of(second)


def test_an_unpark_that_fails_still_holds(models: tuple[LoadedModel, LoadedModel]) -> None:
    engine = engine_of(*models)
    park = engine.parks.park(**PARK)  # not yet seen by the engine's thread: the unpark takes its hold away
    unpark = engine.parks.unpark()
    with broken(engine.core.residency.models[TARGET]):
        engine.step()
    assert [state.place for state in park.result(timeout=0)] == [Place.PARKED] * 2
    with pytest.raises(EngineError, match="no memory"):
        unpark.result(timeout=0)
    with pytest.raises(ParkedError):
        submit(engine, DENSE, GREEDY)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_models_standing_says_what_brings_it_back(policy: str, started: Callable[..., Engine]) -> None:
    engine = started(policy, idle_park=0.02)
    rest = "ready" if policy == "both" else "policy"
    engine.park([DRAFTER])
    assert engine.parks.standing[DRAFTER] == "held"
    wait_until(lambda: engine.parks.standing[TARGET] == "idle")
    engine.unpark()
    assert engine.parks.standing == {TARGET: "ready", DRAFTER: rest}
    wait_until(lambda: engine.parks.standing[TARGET] == "idle")
    assert engine.parks.standing[DRAFTER] == ("idle" if policy == "both" else "policy")
    engine.park()
    assert [str(state.standing) for state in engine.stats().residency] == ["held", "held"]


def test_an_unpark_ends_a_park_that_waits(started: Callable[..., Engine]) -> None:
    engine = started()
    handle = submit(engine, DENSE, replace(GREEDY, max_tokens=800))
    next(iter(handle))
    with ThreadPoolExecutor(1) as thread:
        parking = thread.submit(engine.park)
        while not engine.parks.target_parked:
            time.sleep(0.001)
        assert engine.unpark()[0].place is Place.RESIDENT
        with pytest.raises(BusyError, match="ended by an unpark"):
            parking.result(timeout=30)
    handle.abort()
    assert tokens_of(submit(engine, LONG[0], GREEDY))


def test_an_unpark_during_a_visit_leaves_the_drafter_alone(models: tuple[LoadedModel, LoadedModel]) -> None:
    engine = engine_of(*models, policy="swap")
    expected = run_together(engine, LONG[:1], GREEDY)

    def visited() -> Any:
        handle = submit(engine, LONG[0], GREEDY)
        while place_of(engine, DRAFTER) is not Place.RESIDENT:
            engine.step()
        return handle

    handle, unpark = visited(), engine.parks.unpark()
    engine._inbox.run()
    assert [state.place for state in unpark.result(timeout=0)] == [Place.PARKED, Place.RESIDENT]
    while engine.step():
        pass
    assert tokens_of(handle) == expected[0]
    visited().abort()  # nobody waits for the drafter any more, and it is still there
    unpark = engine.parks.unpark()
    engine._inbox.run()
    assert [state.place for state in unpark.result(timeout=0)] == [Place.RESIDENT, Place.PARKED]


@pytest.mark.parametrize("method", ["park", "states"])
def test_a_move_that_kills_the_engine_answers_the_administrator(
    method: str, models: tuple[LoadedModel, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    for name in ("park", "unpark") if method == "states" else ("park",):
        engine = engine_of(*models)
        engine.start()
        with monkeypatch.context() as broken:
            broken.setattr(engine.core.residency, method, fail)
            with pytest.raises(EngineError, match="the engine died: a bug"):
                getattr(engine.parks, name)(**PARK if name == "park" else {}).result(timeout=30)
            assert engine._thread is not None
            engine._thread.join(30)
        assert isinstance(engine.dead, RuntimeError)
        assert not engine.parks.target_parked
        assert not engine.parks.unparking


def test_a_closed_engine_ends_a_park_that_waits(models: tuple[LoadedModel, LoadedModel]) -> None:
    engine = engine_of(*models)
    engine.start()
    next(iter(submit(engine, DENSE, replace(GREEDY, max_tokens=900))))
    with ThreadPoolExecutor(1) as thread:
        parking = thread.submit(engine.park)
        while not engine.parks.target_parked:
            time.sleep(0.001)
        assert engine.close(timeout=30)
        with pytest.raises(EngineError, match="closed"):
            parking.result(timeout=30)
    with pytest.raises(EngineError, match="not running"):
        engine.park()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.park(["judge"]), "models must be of target, drafter, got 'judge'"),
        (lambda engine: engine.park(["drafter"]), "no drafter to park"),
        (lambda engine: engine.park(to="resident"), "to must be parked or released, got 'resident'"),
        (lambda engine: engine.unpark([]), "no drafter to unpark"),
    ],
)
def test_wrong_names_are_refused(call: Callable[[Engine], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call(fake_engine(blocks=8))


# -- idle


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


@pytest.mark.parametrize("policy", POLICIES)
def test_idle_models_are_parked_and_the_next_request_brings_them_back(
    policy: str, started: Callable[..., Engine]
) -> None:
    engine = started(policy, idle_park=0.02)
    parked = lambda: all(place_of(engine, role) is Place.PARKED for role in ROLES)  # noqa: E731
    replies = []
    for _ in range(3):
        replies.append([tokens_of(submit(engine, prompt, GREEDY)) for prompt in (DENSE, LONG[0])])
        wait_until(parked)
    assert replies[0] == replies[1] == replies[2]
    assert not engine.parks.target_parked
    assert engine.stats().residency[0].device_bytes == 0


def test_an_administrators_unpark_is_not_undone_by_an_idle_park_that_was_due() -> None:
    engine = fake_engine(blocks=8)
    parking = Parking(engine.core.residency, lambda: None, idle_park=0.01)
    parking.note(ran=False)
    time.sleep(0.02)
    assert parking.idle_seconds == 0
    parking.unpark({TARGET: frozenset()}, Future())
    parking.when_idle()
    assert place_of(engine, TARGET) is Place.RESIDENT
    parking.note(ran=False)
    assert parking.idle_seconds is not None
    assert 0 < parking.idle_seconds <= 0.01


def test_an_idle_park_that_fails_is_tried_again_later_each_time_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_engine(blocks=8)
    now = [0.0]
    monkeypatch.setattr(parking_module.time, "monotonic", lambda: now[0])
    parking = Parking(engine.core.residency, lambda: None, idle_park=10.0)

    def full() -> None:
        raise MoveError("the target could not be parked: no space")

    caplog.clear()
    parking.note(ran=False)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.residency, "park_idle", full)
        for pause in (10, 20, 40):
            assert parking.idle_seconds == pause
            now[0] += pause
            parking.when_idle()
    assert [record.levelname for record in caplog.records if "no space" in record.message] == ["WARNING"]
    now[0] += 80
    parking.when_idle()
    assert place_of(engine, TARGET) is Place.PARKED


def test_an_idle_park_leaves_released_models_on_disk_and_frees_a_table(
    models: tuple[LoadedModel, LoadedModel],
) -> None:
    residency = engine_of(*models).core.residency
    residency.park([TARGET], Place.RELEASED)
    residency.park_idle()
    assert [residency.models[role].place for role in ROLES] == [Place.RELEASED, Place.PARKED]
    residency.models[TARGET].unpark()
    residency.models[TARGET].park(keep_table=True)
    residency.park_idle()
    assert residency.device_bytes == 0


def test_engines_that_share_a_model_do_not_park_it_under_each_other(
    started: Callable[..., Engine],
) -> None:
    one, other = started(idle_park=0.005), started("swap")
    expected = tokens_of(submit(other, DENSE, GREEDY))
    for _ in range(10):
        assert tokens_of(submit(other, DENSE, GREEDY)) == expected
        assert tokens_of(submit(one, DENSE, GREEDY)) == expected
        time.sleep(0.006)
    one.park()
    with pytest.raises(ParkedError):
        submit(other, DENSE, GREEDY)
    other.unpark()
    assert tokens_of(submit(one, DENSE, GREEDY)) == expected


def test_nothing_is_parked_under_an_engine_that_starts(models: tuple[LoadedModel, LoadedModel]) -> None:
    engine = engine_of(*models, policy="swap")
    expected = run_together(engine, LONG[:1], GREEDY)
    starting = EngineResidency(*models, "swap")
    starting.start()
    starting.arrange_scoring()  # it now runs the drafter, outside of steps
    submit(engine, LONG[0], GREEDY)
    while engine.step():
        assert place_of(engine, DRAFTER) is Place.RESIDENT
    starting.rest()
    starting.models[DRAFTER].unpark()
    handle = submit(engine, LONG[0], GREEDY)
    while engine.step():
        assert place_of(engine, TARGET) is Place.RESIDENT
    assert tokens_of(handle) == expected[0]
    del starting
    assert run_together(engine, LONG[:1], GREEDY) == expected
    assert place_of(engine, DRAFTER) is Place.PARKED


def test_a_policy_without_a_drafter_is_said_to_have_no_effect(
    models: tuple[LoadedModel, LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    for policy in ("both", "auto", "swap"):
        assert not caplog.messages
        assert EngineResidency(models[0], None, policy).policy == "both"
    assert caplog.messages == [
        "residency swap has no effect without a drafter: the target stays on the device"
    ]


# -- everything at once


@pytest.mark.parametrize(("policy", "seed"), [("both", 1), ("keep-target", 2), ("swap", 3)])
def test_requests_parks_and_unparks_from_many_threads(
    policy: str, seed: int, started: Callable[..., Engine]
) -> None:
    engine = started(policy, idle_park=0.003)
    prompts = [DENSE, DENSE[:30], *LONG]
    expected = [tokens_of(submit(engine, prompt, GREEDY)) for prompt in prompts]
    without = replace(engine.config.prefill, sparse_prefill="off")
    dense = [tokens_of(submit(engine, prompt, GREEDY, prefill=without)) for prompt in prompts]
    outcomes = {"right": 0, "refused": 0, "parked": 0, "busy": 0}
    done, lock = threading.Event(), threading.Lock()

    def count(what: str) -> None:
        with lock:
            outcomes[what] += 1

    def ask(number: int) -> None:
        draw = random.Random(100 * seed + number)
        asked, answered = 0, False
        while asked < 12 or not answered:  # at some time the model is there
            asked += 1
            which = draw.randrange(len(prompts))
            try:
                handle = submit(engine, prompts[which], GREEDY)
                if draw.random() < 0.1:
                    handle.abort()
                    continue
                assert tokens_of(handle) in (expected[which], dense[which])
                count("right")
                answered = True
            except ParkedError:
                count("refused")
                time.sleep(draw.random() * 0.01)

    def administer(number: int) -> None:
        draw = random.Random(1000 * seed + number)
        while not done.is_set():
            roles = draw.choice([ROLES, (TARGET,), (DRAFTER,)])
            try:
                if draw.random() < 0.5:
                    engine.park(
                        roles,
                        to=draw.choice(["parked", "released"]),
                        wait=draw.random() < 0.7,
                        timeout=draw.choice([None, 0.01]),
                    )
                    count("parked")
                else:
                    engine.unpark(roles)
            except BusyError:
                count("busy")
            time.sleep(draw.random() * 0.005)
        engine.unpark()

    with ThreadPoolExecutor(6) as threads:
        administrators = [threads.submit(administer, number) for number in range(2)]
        asking = [threads.submit(ask, number) for number in range(4)]
        for future in asking:
            future.result(timeout=120)
        done.set()
        for future in administrators:
            future.result(timeout=120)
    engine.unpark()
    assert tokens_of(submit(engine, DENSE, GREEDY)) == expected[0]
    assert engine.dead is None
    engine.core.memory.check()
    assert outcomes["right"] >= 4
    assert outcomes["parked"] > 0


def test_the_fake_model_can_be_parked_too() -> None:
    engine = fake_engine(blocks=32)
    assert run_together(engine, [[1, 2, 3]], GREEDY) == [continuation([1, 2, 3], 6)]
    engine.core.residency.park([TARGET], Place.PARKED)
    assert place_of(engine, TARGET) is Place.PARKED
    assert run_together(engine, [[1, 2, 3]], GREEDY) == [continuation([1, 2, 3], 6)]
