"""The engine's promises, on the fake model, which makes every block and token visible."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skim.config import PrefillConfig
from skim.engine.engine import Engine
from skim.engine.handle import RequestHandle
from skim.engine.sequence import Delta, Failed, Finished
from skim.errors import ConfigError, EngineError, RequestError
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams
from tests.fake import EOS, VOCAB, continuation, fake_engine, submit

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def run(engine: Engine) -> None:
    while engine.step():
        engine.core.memory.check()


def events(handle: RequestHandle) -> list[Any]:
    found = []
    while not handle.events.empty():
        found.append(handle.events.get())
    return found


def tokens(handle: RequestHandle, index: int = 0) -> list[int]:
    return [t for e in events(handle) if isinstance(e, Delta) and e.index == index for t in e.token_ids]


def test_a_request_sharing_a_thousand_token_prefix_allocates_only_its_suffix() -> None:
    engine = fake_engine(blocks=400, block_size=16, max_num_batched_tokens=2048)
    prefix = [(i * i) % 60 for i in range(1000)]
    submit(engine, [*prefix, 1, 2, 3], SamplingParams(temperature=0, max_tokens=40))
    engine.step()
    before = engine.stats()
    assert before.running == 1
    second = submit(engine, [*prefix, 9, 9, 9, 9], SamplingParams(temperature=0, max_tokens=40))
    engine.step()
    after = engine.stats()
    # 992 of the 1000 tokens are in full blocks, which are shared. The other 8 and the suffix take one block.
    assert after.pool.live - before.pool.live == 1
    assert after.tokens_computed - before.tokens_computed == 1 + 12
    assert after.prefix.hit_tokens - before.prefix.hit_tokens == 992
    run(engine)
    assert tokens(second) == continuation([*prefix, 9, 9, 9, 9], 40)


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_an_aged_prompt_that_does_not_fit_blocks_no_running_request(budget: int) -> None:
    engine = fake_engine(blocks=4, block_size=4, max_num_batched_tokens=budget, aging_steps=3)
    first = submit(engine, [1], SamplingParams(temperature=0, max_tokens=14))
    engine.step()
    engine.step()
    second = submit(engine, [5, 6, 7, 8, 9, 10, 11, 12], SamplingParams(temperature=0, max_tokens=3))
    run(engine)
    assert tokens(first) == continuation([1], 14)
    assert tokens(second) == continuation([5, 6, 7, 8, 9, 10, 11, 12], 3)


def test_a_prompt_is_shared_after_its_first_token_and_before_its_second() -> None:
    engine = fake_engine(blocks=400, block_size=16, max_num_batched_tokens=2048)
    shared: list[int] = []
    submit(
        engine,
        [i % 60 for i in range(100)],
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        emit=lambda event: shared.append(len(engine.core.memory.tree)),
    )
    run(engine)
    assert shared[:2] == [0, 6]


def test_a_small_pool_with_preemptions_gives_the_text_of_a_large_one() -> None:
    prompts = [[(3 * i + j) % 60 for j in range(10 + i)] for i in range(6)]
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=25, presence_penalty=0.5, ignore_eos=True)
    texts = []
    for blocks in (12, 400):
        engine = fake_engine(blocks=blocks, max_num_batched_tokens=32)
        handles = [submit(engine, prompt, params) for prompt in prompts]
        run(engine)
        texts.append([tokens(handle) for handle in handles])
        assert (engine.stats().preemptions > 0) == (blocks == 12)
    assert texts[0] == texts[1]


def test_streamed_tokens_are_never_repeated_by_preemption() -> None:
    engine = fake_engine(blocks=9, max_num_batched_tokens=16)
    handles = [submit(engine, [i] * 9, SamplingParams(temperature=0, max_tokens=20)) for i in range(3)]
    seen: dict[int, list[int]] = {handle.id: [] for handle in handles}
    while engine.step():
        for handle in handles:
            for event in events(handle):
                if isinstance(event, Delta):
                    seen[handle.id] += event.token_ids
                    expected = continuation([handles.index(handle)] * 9, 20)
                    assert seen[handle.id] == expected[: len(seen[handle.id])]
    assert engine.stats().preemptions > 0
    assert all(len(found) == 20 for found in seen.values())


def test_n_sequences_share_the_prompts_blocks_and_are_sampled_independently() -> None:
    engine = fake_engine(blocks=100)
    prompt = list(range(18))
    handle = submit(engine, prompt, SamplingParams(temperature=5.0, seed=1, max_tokens=4, n=3))
    engine.step()
    assert engine.stats().pool.live == 5  # the prompt's blocks, shared: no sequence has written yet
    assert engine.stats().tokens_computed == 18
    run(engine)
    found = events(handle)
    outputs = [[t for e in found[:-1] if e.index == i for t in e.token_ids] for i in range(3)]
    assert all(len(output) == 4 for output in outputs)
    assert len({tuple(output) for output in outputs}) == 3
    again = submit(engine, prompt, SamplingParams(temperature=5.0, seed=1, max_tokens=4, n=3))
    submit(engine, [5, 5], GREEDY)
    run(engine)
    found = events(again)
    assert [[t for e in found[:-1] if e.index == i for t in e.token_ids] for i in range(3)] == outputs


def test_abort_frees_the_blocks_at_the_next_step_and_leaves_others_running() -> None:
    engine = fake_engine(blocks=60, enable_prefix_caching=False)
    doomed = submit(engine, list(range(30)), SamplingParams(temperature=0, max_tokens=50, n=2))
    other = submit(engine, [1, 2, 3], GREEDY)
    for _ in range(3):
        engine.step()
    doomed.abort()
    engine.step()
    assert engine.stats().pool.live == 2
    found = events(doomed)
    assert [e.finish_reason for e in found[-3:-1]] == ["abort", "abort"]
    assert isinstance(found[-1], Finished)
    run(engine)
    assert tokens(other) == continuation([1, 2, 3], 8)
    assert engine.stats().pool.live == 0
    assert engine.stats().outcomes == {"abort": 1, "length": 1}


def test_a_failing_forward_fails_its_requests_and_no_others() -> None:
    engine = fake_engine(blocks=60)
    broken = submit(engine, [1, 2, 3, 4, 5], GREEDY)
    engine.step()
    engine.model.module.fail_next = RuntimeError("the device fell over")
    engine.step()
    engine.core.memory.check()
    last = events(broken)[-1]
    assert isinstance(last, Failed)
    assert "the device fell over" in str(last.error)
    broken.events.put(last)
    with pytest.raises(EngineError, match="fell over"):
        list(broken)
    later = submit(engine, [1, 2, 3, 4, 5], GREEDY)
    run(engine)
    assert tokens(later) == continuation([1, 2, 3, 4, 5], 8)
    assert engine.stats().outcomes == {"error": 1, "length": 1}


def test_blocks_of_a_failed_forward_are_never_shared() -> None:
    engine = fake_engine(blocks=60)
    engine.model.module.fail_next = RuntimeError("in the first forward")
    submit(engine, list(range(20)), GREEDY)
    engine.step()
    assert engine.stats().pool.live == 0
    assert len(engine.core.memory.tree) == 0


def test_non_finite_logits_fail_only_their_request() -> None:
    engine = fake_engine(blocks=60)
    broken, fine = submit(engine, [1, 2], GREEDY), submit(engine, [3, 4], GREEDY)
    engine.model.module.nan_next = True
    run(engine)
    assert "not finite" in str(events(broken)[-1].error)
    assert tokens(fine) == continuation([3, 4], 8)


def test_a_prompt_with_non_finite_logits_is_not_shared() -> None:
    engine = fake_engine(blocks=60, max_num_batched_tokens=8)
    prompt = list(range(30))
    submit(engine, prompt, GREEDY)
    for _ in range(3):
        engine.step()
    engine.model.module.nan_next = True
    run(engine)
    assert engine.stats().outcomes == {"error": 1}
    assert len(engine.core.memory.tree) == 0


def test_a_decoding_error_fails_only_its_request() -> None:
    engine = fake_engine(blocks=60)
    decode = engine.model.tokenizer.decode

    def failing(ids: list[int], skip_special_tokens: bool = True) -> str:
        if ids[:2] == [1, 2]:
            raise ValueError("no such character")
        return str(decode(ids, skip_special_tokens))

    engine.model.tokenizer.decode = failing
    broken, fine = submit(engine, [1, 2], GREEDY), submit(engine, [3, 4], GREEDY)
    run(engine)
    assert "no such character" in str(events(broken)[-1].error)
    assert tokens(fine) == continuation([3, 4], 8)
    assert engine.stats().outcomes == {"error": 1, "length": 1}


@pytest.mark.parametrize("min_tokens", range(6))
def test_a_stop_string_may_begin_before_min_tokens(min_tokens: int) -> None:
    engine = fake_engine(blocks=60)
    expected = continuation([1, 2], 8)
    stop = f" {expected[1]} {expected[2]} {expected[3]}"  # complete with the fourth token
    params = SamplingParams(temperature=0, max_tokens=8, stop=stop, min_tokens=min_tokens)
    handle = submit(engine, [1, 2], params)
    run(engine)
    found = events(handle)
    assert found[-2].finish_reason == ("stop" if min_tokens <= 4 else "length")
    shown = expected[:1] if min_tokens <= 4 else expected
    assert "".join(e.text for e in found[:-1]) == "".join(f" {t}" for t in shown)


def test_a_budget_of_one_token_serves_all_requests() -> None:
    engine = fake_engine(blocks=100, max_num_batched_tokens=1)
    long = submit(engine, [1], SamplingParams(temperature=0, max_tokens=200))
    for _ in range(5):
        engine.step()
    short = submit(engine, [5, 6], SamplingParams(temperature=0, max_tokens=3))
    for _ in range(60):
        engine.step()
    assert isinstance(events(short)[-1], Finished)
    run(engine)
    assert tokens(long) == continuation([1], 200)


def test_a_receiver_that_raises_does_not_harm_the_engine() -> None:
    engine = fake_engine(blocks=60)

    def refuse(_: object) -> None:
        raise ValueError("no more")

    submit(engine, [1, 2], GREEDY, emit=refuse)
    fine = submit(engine, [3, 4], GREEDY)
    run(engine)
    assert tokens(fine) == continuation([3, 4], 8)
    assert engine.stats().running == 0


def test_a_request_with_a_partly_cached_prefix_may_need_every_block() -> None:
    engine = fake_engine(blocks=4)
    submit(engine, list(range(13)), SamplingParams(temperature=0, max_tokens=4))
    run(engine)
    whole = submit(engine, [*range(10), 40, 41, 42], SamplingParams(temperature=0, max_tokens=4))
    run(engine)
    assert tokens(whole) == continuation([*range(10), 40, 41, 42], 4)


def test_stop_token_and_length_and_end_of_text() -> None:
    engine = fake_engine(blocks=60, max_positions=12)
    expected = continuation([1, 2], 8)
    stopped = submit(
        engine, [1, 2], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(expected[3],))
    )
    windowed = submit(engine, [1, 2], SamplingParams(temperature=0, max_tokens=None))
    biased = submit(engine, [1, 2], SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 100}))
    held = submit(
        engine, [1, 2], SamplingParams(temperature=0, max_tokens=5, min_tokens=2, logit_bias={EOS: 100})
    )
    ignoring = submit(
        engine, [1, 2], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={EOS: 100})
    )
    run(engine)
    last = {h: events(h) for h in (stopped, windowed, biased, held, ignoring)}
    final = {h: found[-2] for h, found in last.items()}
    assert (final[stopped].finish_reason, final[stopped].stop_reason) == ("stop", expected[3])
    assert "".join(e.text for e in last[stopped][:-1]) == "".join(f" {t}" for t in expected[:3])
    assert final[windowed].finish_reason == "length"
    assert last[windowed][-1].metrics.generated_tokens == 10
    assert (final[biased].finish_reason, final[biased].stop_reason) == ("stop", None)
    assert last[biased][-1].metrics.generated_tokens == 1
    assert last[held][-1].metrics.generated_tokens == 3
    assert [t for e in last[ignoring][:-1] for t in e.token_ids] == [EOS] * 3


def test_stop_strings_end_the_text_before_them_even_across_tokens() -> None:
    engine = fake_engine(blocks=60)
    expected = continuation([1, 2], 8)
    text = "".join(f" {t}" for t in expected)
    stop = f"{expected[2]} {expected[3]}"
    handle = submit(engine, [1, 2], SamplingParams(temperature=0, max_tokens=8, stop=stop))
    run(engine)
    found = events(handle)
    assert "".join(e.text for e in found[:-1]) == text[: text.index(stop)]
    assert (found[-2].finish_reason, found[-2].stop_reason) == ("stop", stop)


def test_other_tenants_and_opted_out_requests_share_nothing() -> None:
    engine = fake_engine(blocks=100)
    prompt = list(range(20))
    for options in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"use_prefix_cache": False}, {}):
        submit(engine, prompt, GREEDY, **options)  # type: ignore[arg-type]
        run(engine)
    stats = engine.stats().prefix
    assert (stats.hits, stats.misses, dict(stats.bypasses)) == (2, 2, {"request": 1})


def test_metrics_have_cached_tokens_and_phases_within_the_total_time() -> None:
    begun = time.perf_counter()
    engine = fake_engine(blocks=100)
    prompt = list(range(20))
    found = []
    for _ in range(2):
        handle = submit(engine, prompt, GREEDY)
        run(engine)
        found.append(events(handle)[-1].metrics)
    assert [m.cached_tokens for m in found] == [0, 19]
    for metrics in found:
        assert metrics.prompt_tokens == 20
        assert metrics.generated_tokens == 8
        assert min(metrics.queue_ms, metrics.prefill_ms, metrics.decode_ms) >= 0
        assert (
            metrics.queue_ms + metrics.prefill_ms + metrics.decode_ms <= (time.perf_counter() - begun) * 1e3
        )


@pytest.mark.parametrize(
    ("prompt", "params", "message", "fields"),
    [
        ([], GREEDY, "prompt is empty", ()),
        ([1] * 50, GREEDY, "50 tokens.*window of 40", ()),
        ([1] * 40, GREEDY, "no room for output", ()),
        ([1, VOCAB], GREEDY, f"token {VOCAB} is outside", ()),
        ([1, -1], GREEDY, "token -1 is outside", ()),
        ([1], SamplingParams(n=9), "n=9 is more than max_num_seqs=8", ("n", "max_num_seqs")),
        (
            [1] * 20,
            SamplingParams(max_tokens=15),
            "can never fit the KV pool of 32 tokens",
            ("max_tokens", "kv_memory"),
        ),
        ([1] * 33, GREEDY, "can never fit the KV pool of 32 tokens", ("kv_memory",)),
        ([1], SamplingParams(logit_bias={VOCAB: 1}), f"{VOCAB}", ("logit_bias",)),
        ([1], SamplingParams(stop_token_ids=(VOCAB,)), f"{VOCAB}", ("stop_token_ids",)),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_at_once(
    prompt: list[int], params: SamplingParams, message: str, fields: tuple[str, ...]
) -> None:
    engine = fake_engine(blocks=8, max_positions=40, max_num_seqs=8)
    with pytest.raises(RequestError, match=message) as raised:
        submit(engine, prompt, params)
    assert raised.value.fields == fields
    assert not engine.step()


def test_a_request_that_just_fits_is_served() -> None:
    engine = fake_engine(blocks=8)
    handle = submit(engine, [1] * 20, SamplingParams(temperature=0, max_tokens=13))
    run(engine)
    assert tokens(handle) == continuation([1] * 20, 13)


def test_an_empty_pool_and_a_context_beyond_the_models_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="holds no block"):
        fake_engine(blocks=1, kv_memory=8)
    with pytest.raises(ConfigError, match=r"max_model_len 100 is beyond the context window of fake.*40"):
        fake_engine(blocks=8, max_positions=40, max_model_len=100)


def test_the_thread_serves_many_callers_and_close_ends_running_requests() -> None:
    engine = fake_engine(blocks=40)
    engine.start()
    results: dict[int, list[int]] = {}

    def call(i: int) -> None:
        handle = submit(engine, [i, i + 1], GREEDY)
        results[i] = [t for e in handle if isinstance(e, Delta) for t in e.token_ids]

    callers = [threading.Thread(target=call, args=(i,)) for i in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == {i: continuation([i, i + 1], 8) for i in range(20)}
    endless = submit(engine, [1], SamplingParams(temperature=0, max_tokens=150))
    engine.close()
    engine.close()
    last = [event for event in endless if isinstance(event, Delta)][-1]
    assert last.finish_reason in ("abort", "length")
    with pytest.raises(EngineError, match="closed"):
        submit(engine, [1], GREEDY)


def test_iterating_an_ended_request_again_repeats_its_end_without_waiting() -> None:
    engine = fake_engine(blocks=40)
    good, bad = submit(engine, [1, 2], GREEDY), submit(engine, [3], GREEDY)
    engine._inbox.run()
    engine.core.lifecycle.fail(engine.core.lifecycle.requests[bad.id], EngineError("no"))
    while engine.step():
        pass
    events = list(good)
    assert isinstance(events[-1], Finished)
    assert list(good) == events[-1:]
    for _ in range(2):
        with pytest.raises(EngineError, match="no"):
            list(bad)


def test_resetting_the_prefix_cache_forgets_skimmed_conversations() -> None:
    engine = fake_engine(blocks=64, block_size=4)
    skim = PrefillConfig(sparse_prefill="always", scorer="random", prefill_block_size=4, keep_tokens=64)
    submit(engine, [i % 50 for i in range(120)], GREEDY, prefill=skim)
    while engine.step():
        pass
    known = engine.core.planner._follow_ups.conversations
    assert len(known) == 1
    engine.start()
    engine.reset_prefix_cache()
    assert len(known) == known.bytes == 0
    engine.close()


def test_closing_wakes_a_thread_that_is_about_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` runs after the thread has checked for it and before the thread reads its inbox."""
    engine = fake_engine(blocks=8)
    closer = threading.Thread(target=engine.close, daemon=True)
    step, begun = engine.core.step, threading.Event()

    def between() -> bool:
        if closer.ident is None:
            closer.start()
            while engine._inbox.empty():
                time.sleep(0.001)
            begun.set()
        return step()

    monkeypatch.setattr(engine.core, "step", between)
    engine.start()
    assert begun.wait(60)
    closer.join(60)
    assert not closer.is_alive()


@pytest.mark.parametrize("dies", [False, True])
def test_waiting_for_a_plan_raises_if_the_engine_ends(dies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(blocks=64)
    stuck, proceed = threading.Event(), threading.Event()

    def step() -> bool:
        stuck.set()
        assert proceed.wait(60)
        if dies:
            raise RuntimeError("boom")
        return True

    monkeypatch.setattr(engine.core, "step", step)
    engine.start()
    assert stuck.wait(60)
    with ThreadPoolExecutor() as threads:
        request = Request(tuple(range(1, 40)), GREEDY, engine.config.prefill)
        asked = threads.submit(lambda: engine.plan(request).result(60))
        while engine._inbox.empty():
            time.sleep(0.001)
        ended = threads.submit(engine.close)
        proceed.set()
        with pytest.raises(EngineError, match="the engine died: boom" if dies else "the engine was closed"):
            asked.result(60)
        ended.result(60)


def test_resetting_the_cache_raises_if_that_kills_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(blocks: int) -> int:
        raise RuntimeError("the tree is broken")

    engine = fake_engine(blocks=8)
    monkeypatch.setattr(engine.core.memory.tree, "evict", evict)
    engine.start()
    with ThreadPoolExecutor() as threads, pytest.raises(EngineError, match="died: the tree is broken"):
        threads.submit(engine.reset_prefix_cache).result(60)
    engine.close()


def test_a_dead_engine_that_cannot_clean_up_still_fails_all_requests() -> None:
    engine = fake_engine(blocks=40)
    handles = [submit(engine, [i], GREEDY) for i in range(3)]
    life: Any = engine.core.lifecycle
    life.add = lambda state: life.requests.__setitem__(state.id, state)
    engine.core._decide = life.fail = life.abort = None  # type: ignore[method-assign, assignment]
    for handle in handles:
        handle.abort()
    engine.start()
    for handle in handles:
        with pytest.raises(EngineError, match="the engine died"):
            list(handle)


def test_queued_requests_with_penalties_hold_no_counts() -> None:
    engine = fake_engine(blocks=40, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3)
    handles = [submit(engine, [i, i + 1], params) for i in range(20)]
    engine.step()
    counts = engine.core.lifecycle.sampler.counts
    assert counts.capacity - counts.free == 2
    run(engine)
    assert all(isinstance(events(handle)[-1], Finished) for handle in handles)
    assert counts.capacity == counts.free == 4


def test_the_receiver_of_the_last_event_may_close_the_engine() -> None:
    engine = fake_engine(blocks=40)
    done = threading.Event()

    def close(event: object) -> None:
        if isinstance(event, Finished):
            engine.close()
            done.set()

    submit(engine, [1], GREEDY, emit=close)
    engine.start()
    assert done.wait(30)


@pytest.mark.parametrize("prompt", [["a", "b"], [1.5], [None], 5])
def test_a_prompt_that_is_not_a_list_of_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="a text or a list of token ids"):
        submit(fake_engine(blocks=8), prompt, GREEDY)


def test_a_dead_engine_fails_everything_and_says_why() -> None:
    engine = fake_engine(blocks=40)
    waiting = submit(engine, [1], GREEDY)

    def broken() -> None:
        raise MemoryError("the scheduler is broken")

    engine.core._decide = broken  # type: ignore[method-assign, assignment]
    engine.start()
    with pytest.raises(EngineError, match="the scheduler is broken"):
        list(waiting)
    engine.close()
    with pytest.raises(EngineError, match="the scheduler is broken"):
        submit(engine, [1], GREEDY)
