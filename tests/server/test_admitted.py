"""What was admitted is answered, whatever happens meanwhile, and keeps no memory that it gave back."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from skim import LLM
from skim.server.body import SMALL_BODY, BodyRoom, IncomingBody
from skim.server.errors import ApiError
from skim.server.service import Service
from skim.server.text_queue import LANES
from tests import paths, tiny
from tests.live import NAME, LiveServer, eventually, held_engine

COMPLETE = "/v1/completions"
SHORT = {"model": NAME, "prompt": "a", "max_tokens": 1}
SKIM = {"sparse_prefill": "always", "keep_tokens": 200, "report": "spans"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M", scorer="lexical", prefill_block_size=16) as llm:
        yield llm


class Asking(threading.Thread):
    """A client that waits for its reply."""

    def __init__(self, server: LiveServer, body: dict[str, Any], padding: int = 0) -> None:
        super().__init__()
        self._server, self._raw = server, json.dumps(body) + " " * padding
        self.start()

    def run(self) -> None:
        with self._server.client() as http:
            self._reply = http.post(COMPLETE, content=self._raw, headers={"Content-Type": "application/json"})

    def reply(self) -> httpx.Response:
        self.join(60)
        return self._reply


@pytest.mark.parametrize("condition", [("draining", None), ("stalled", "the step hangs")])
def test_a_request_that_waits_to_be_tokenized_outlives_the_servers_state(
    llm: LLM, condition: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveServer(llm) as server:
        service, gate = server.service, threading.Event()
        for _ in LANES:  # all threads for texts are busy
            asyncio.run_coroutine_threadsafe(service.off_loop(gate.wait, 0), server.loop)
        try:
            asking = Asking(server, SHORT)
            eventually(lambda: len(service._running) == 1 and len(service._text_queue._waiting) == 1)
            monkeypatch.setattr(Service, "condition", condition)
            with server.client() as http:
                assert http.post(COMPLETE, json=SHORT).status_code == 503
        finally:
            gate.set()
        reply = asking.reply()
        assert reply.status_code == 200, reply.text


def test_a_finished_reply_is_not_refused_for_its_report(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue for texts has become full since the request was admitted."""
    prompt = paths.BOOK[5000:5600] + "\n\nWhat did the sailor in the third boat say?"
    with LiveServer(llm) as server, held_engine(llm) as go:
        service = server.service
        asking = Asking(server, {**SHORT, "prompt": prompt, "skim": SKIM})
        eventually(lambda: any(each._handles for each in service._running))

        def full(size: int) -> None:
            raise ApiError(429, f"no room for {size} bytes")

        monkeypatch.setattr(service._text_queue, "_admit", full)
        go.set()
        reply = asking.reply()
        assert reply.status_code == 200, reply.text
        assert reply.json()["skim"]["spans"]


def test_the_bytes_of_a_body_are_freed_before_its_reply(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bytes(bytearray):
        """Unlike bytearray, it can be referred to weakly."""

    read, seen = IncomingBody.read, []

    async def watched(self: IncomingBody, timeout: float) -> bytearray:
        raw = Bytes(await read(self, timeout))
        seen.append(weakref.ref(raw))
        return raw

    monkeypatch.setattr(IncomingBody, "read", watched)
    with LiveServer(llm) as server, held_engine(llm) as go:
        replies = [Asking(server, SHORT), Asking(server, SHORT, padding=2 * SMALL_BODY)]
        eventually(lambda: sum(bool(each._handles) for each in server.service._running) == 2)
        gc.collect()
        assert len(seen) == 2
        assert [ref() for ref in seen] == [None, None]
        go.set()
        assert [each.reply().status_code for each in replies] == [200, 200]


def test_the_bytes_of_a_refused_body_are_freed_before_the_rest_is_discarded() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"a" * 100_000, "more_body": True}

    body = IncomingBody({"headers": []}, receive, limit=10**6, room=BodyRoom(250_000))  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="--max-body-memory") as refused:
        asyncio.run(body.read(60))
    frame, kept = refused.value.__traceback__, []
    while frame is not None:
        kept += [value for value in frame.tb_frame.f_locals.values() if isinstance(value, bytearray)]
        frame = frame.tb_next
    assert kept == [bytearray()]
