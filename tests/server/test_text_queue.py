"""Work on texts: small texts never wait for large ones, large ones never wait for ever, all are checked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skim import LLM
from skim.server.errors import ApiError
from skim.server.text_queue import BYTES_PER_SECOND, LANES, SMALL, Job, TextQueue, choose
from tests import tiny
from tests.live import NAME, LiveServer, eventually

MB = 2**20
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"


def job(size: int, arrived: float) -> Job:
    return Job(lambda: None, size, arrived)


sizes = st.integers(0, 20 * MB)


arrivals = st.integers(0, 10**9).map(lambda ms: ms / 1000)  # a clock has no finer differences that matter


@given(st.lists(st.tuples(sizes, arrivals), min_size=1), st.sampled_from(LANES))
def test_work_is_only_passed_over_by_smaller_work_that_came_soon_enough(
    given_jobs: list[tuple[int, float]], largest: int | None
) -> None:
    jobs = [job(size, arrived) for size, arrived in given_jobs]
    chosen = choose(jobs, largest)
    fitting = [one for one in jobs if largest is None or one.size <= largest]
    assert (chosen is None) == (not fitting)
    for passed in fitting:
        assert chosen is not None
        if chosen.arrived > passed.arrived:
            assert chosen.size < passed.size
            assert chosen.arrived - passed.arrived <= (passed.size - chosen.size) / BYTES_PER_SECOND + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_nothing_starves_under_endless_small_work(seed: int) -> None:
    """A simulation: work of up to 1 MB keeps one thread busy for ever, and a work of 15 MB still runs."""
    draw = random.Random(seed)
    waiting, now, next_arrival = [job(15 * MB, 0.0)], 0.0, 0.0
    large = waiting[0]
    while large in waiting:
        while next_arrival <= now:
            waiting.append(job(draw.randint(1, MB), next_arrival))
            next_arrival += draw.random() * 0.2  # five times as much as the thread can do
        chosen = choose(waiting, None)
        assert chosen is not None
        waiting.remove(chosen)
        now += chosen.size / BYTES_PER_SECOND
        assert chosen is large or chosen.arrived < 15, "work that came later than 15 s went first"


async def taken(queue: TextQueue) -> None:
    """Wait until the threads have taken all work."""
    await asyncio.sleep(0)
    while queue._waiting:
        await asyncio.sleep(0.005)


def test_small_work_runs_while_large_work_occupies_the_large_lane() -> None:
    async def scenario() -> None:
        queue = TextQueue(100 * MB)
        gate = threading.Event()
        large = [asyncio.create_task(queue.run(gate.wait, 15 * MB)) for _ in range(3)]
        try:
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(queue.run(lambda: "small", 1000), 30) == "small"
            assert await asyncio.wait_for(queue.run(lambda: "medium", 500_000), 30) == "medium"
            assert not any(task.done() for task in large)
        finally:
            gate.set()
            await asyncio.gather(*large)
            queue.close()

    asyncio.run(scenario())


def test_the_queue_has_a_limit_and_small_texts_have_their_own() -> None:
    async def scenario() -> None:
        queue = TextQueue(20 * MB)
        gate = threading.Event()
        tasks = []
        for size in (15 * MB, MB, SMALL):  # one for each thread
            tasks.append(asyncio.create_task(queue.run(gate.wait, size)))
            await taken(queue)
        tasks.append(asyncio.create_task(queue.run(gate.wait, 15 * MB)))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="--max-queued-text") as refused:
            await queue.run(gate.wait, 15 * MB)
        assert refused.value.status == 429
        tasks.append(asyncio.create_task(queue.run(gate.wait, 15 * MB, admitted=True)))
        tasks.append(asyncio.create_task(queue.run(gate.wait, 100)))
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(*tasks)
        queue.close()

    asyncio.run(scenario())


def test_cancelled_work_does_not_run_and_a_result_is_not_kept() -> None:
    class Text:
        pass

    async def scenario() -> None:
        queue = TextQueue(100 * MB, lanes=(None,))
        gate, ran = threading.Event(), threading.Event()
        first = asyncio.create_task(queue.run(gate.wait, 1))
        await taken(queue)
        second = asyncio.create_task(queue.run(ran.set, 1))
        await asyncio.sleep(0.05)
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        assert not queue._waiting
        gate.set()
        await first
        text = Text()
        alive = weakref.ref(text)
        work = [lambda text=text: None]
        del text
        await queue.run(work.pop(), 1)
        await queue.run(lambda: None, 1)
        gc.collect()
        assert alive() is None
        assert not ran.is_set()
        with pytest.raises(ZeroDivisionError):
            await queue.run(lambda: 1 // 0, 1)
        queue.close()

    asyncio.run(scenario())


# -- a live server


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    with LiveServer(llm) as server, server.client() as client:
        yield client


def test_others_are_answered_while_two_large_texts_are_tokenized(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer stands still on large texts: the attack, without its minutes."""
    gate, entered = threading.Event(), threading.Event()
    encode = llm.encode

    def slow(text: str, **options: Any) -> Any:
        if len(text) > MB:
            entered.set()
            gate.wait(60)
        return encode(text[:1000], **options)

    monkeypatch.setattr(llm, "encode", slow)
    with LiveServer(llm, max_queued_text="8M") as server, server.client() as http:
        replies: list[httpx.Response] = []

        def attack() -> None:
            with server.client() as own:
                replies.append(own.post("/tokenize", json={"prompt": "a" * (5 * MB)}))

        attackers = [threading.Thread(target=attack) for _ in range(4)]
        for thread in attackers:
            thread.start()
        assert entered.wait(60)
        eventually(lambda: len(replies) >= 2)  # one runs, at most one waits
        assert {reply.status_code for reply in replies} == {429}
        assert http.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
        message = {"role": "user", "content": "hi"}
        assert (
            http.post(CHAT, json={"model": NAME, "messages": [message], "max_tokens": 1}).status_code == 200
        )
        assert http.post("/tokenize", json={"prompt": "a" * 500_000}).status_code == 200
        assert http.get("/health").status_code == 200
        gate.set()
        for thread in attackers:
            thread.join(60)
        assert sorted({reply.status_code for reply in replies}) == [200, 429]


LONG = "x" * 3_000_000
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}),
        (CHAT, {"messages": [USER], "tools": [TOOL]}),
        (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}),
        (COMPLETE, {"prompt": LONG}),
        (COMPLETE, {"prompt": ["a", LONG]}),
        (COMPLETE, {"prompt": LONG, "skim": {"sparse_prefill": "auto", "min_prompt_tokens": 2**40}}),
    ],
    ids=["content", "description", "arguments", "parts", "prompt", "prompts", "auto"],
)
def test_every_text_is_checked_before_it_is_tokenized(
    http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def refuse(text: str, *_: Any, **__: Any) -> Any:
        assert len(text) < 10_000, "a text was tokenized that cannot fit"
        return encode(text)

    encode = llm.encode
    monkeypatch.setattr(llm, "encode", refuse)
    monkeypatch.setattr(llm, "_encode_with_offsets", refuse)
    reply = http.post(path, json={"model": NAME, "max_tokens": 1, **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_tokenize_lists_all_ids_of_a_long_text(http: httpx.Client) -> None:
    text = "".join(chr(ord("a") + i % 26) for i in range(200_000))
    found = http.post("/tokenize", json={"prompt": text}).json()
    assert found["count"] == len(found["tokens"]) == 200_000
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == text
    assert set(found) == {"count", "max_model_len", "tokens"}


@pytest.mark.slow  # tokenizes 15 MB with the default model's tokenizer
def test_two_texts_of_15_mb_at_full_scale(default_model_dir: Any) -> None:
    text = "The quick brown fox, lazily. " * (15 * MB // 29)
    with LLM(default_model_dir, progress=False, kv_memory="64M") as llm, LiveServer(llm) as server:

        def attack() -> None:
            with server.client() as own:
                own.post("/tokenize", json={"prompt": text}, timeout=600)

        attackers = [threading.Thread(target=attack) for _ in range(2)]
        for thread in attackers:
            thread.start()
        time.sleep(1)
        longest, answers = 0.0, 0
        with server.client() as http:
            while any(thread.is_alive() for thread in attackers):
                began = time.perf_counter()
                assert http.post("/tokenize", json={"prompt": "hello"}).status_code == 200
                longest, answers = max(longest, time.perf_counter() - began), answers + 1
                time.sleep(0.05)
        print(f"{answers} answers, the slowest after {longest:.2f} s")
        assert answers > 10
        assert longest < 10
