"""Parks and unparks over HTTP: requests are served or refused as a whole, and replies stay the same."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from skim import LLM, SamplingParams
from skim.errors import MoveError, ParkedError
from skim.models.residency import Residency
from tests import paths, tiny
from tests.live import NAME, LiveServer, eventually, slow_steps
from tests.server.test_metrics import metric

ADMIN = {"Authorization": "Bearer root"}
COMPLETE = "/v1/completions"
SHORT = {"prompt": "once upon a time there was", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "prompt": "a long reply", "max_tokens": 600, "stream": True}
TEXT = paths.BOOK[5000:5500].encode("ascii", "replace").decode() + "\n\nWhat is the code?"
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4, "temperature": 0}
REFUSED: dict[str, dict[str, Any]] = {
    COMPLETE: SHORT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "a code", "documents": ["a code", "another"]},
    "/v1/skim": {"messages": CHAT["messages"]},
}


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tiny")
    return tiny.save("llama", directory / "target"), tiny.save("llama", directory / "drafter", seed=1)


@pytest.fixture(scope="module")
def llm(model_paths: tuple[Path, Path]) -> Iterator[LLM]:
    target, drafter = model_paths
    with LLM(target, progress=False, kv_memory="8M", drafter=str(drafter), prefill_block_size=8) as llm:
        yield llm


@pytest.fixture
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm, admin_key="root") as server:
        yield server
        llm.engine.unpark()
        eventually(lambda: llm.stats().running == llm.stats().waiting == 0)
        llm.engine.core.memory.check()


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def admin(http: httpx.Client, what: str, **body: Any) -> httpx.Response:
    return http.post(f"/admin/{what}", json=body, headers=ADMIN)


def places(reply: httpx.Response) -> dict[str, str]:
    assert reply.status_code == 200, reply.text
    return {one["role"]: one["place"] for one in reply.json()["models"]}


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def refused(reply: httpx.Response, status: int, message: str) -> None:
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]["message"]


@contextlib.contextmanager
def running(http: httpx.Client, llm: LLM) -> Iterator[Iterator[str]]:
    """A streamed reply, written slowly until its rest is read: the lines that are yielded."""
    slow = contextlib.ExitStack()
    slow.enter_context(slow_steps(llm, 0.01))
    with slow, http.stream("POST", COMPLETE, json=LONG) as reply:
        lines = reply.iter_lines()
        next(lines)

        def rest() -> Iterator[str]:
            slow.close()
            yield from lines

        yield rest()


def test_a_parked_server_refuses_requests_and_returns_with_the_same_text(
    http: httpx.Client, llm: LLM
) -> None:
    before = text_of(http.post(COMPLETE, json=SHORT))
    for to in ("parked", "released"):
        assert places(admin(http, "park", to=to)) == {"target": to, "drafter": to}
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "parked")
        assert "skim unpark" in health.json()["reason"]
        for route, body in REFUSED.items():
            for stream in (False, True):
                reply = http.post(route, json={**body, "stream": stream} if "max_tokens" in body else body)
                refused(reply, 503, "parked by an administrator; unpark it")
                assert "Retry-After" not in reply.headers, "nothing says when it comes back"
                assert reply.headers["content-type"] == "application/json"
        assert http.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
        assert http.get("/v1/models").json()["data"][0]["id"] == NAME
        assert http.get("/admin/stats", headers=ADMIN).status_code == 200
        assert places(admin(http, "unpark")) == {"target": "resident", "drafter": "resident"}
        assert http.get("/health").json()["status"] == "ok"
        again = http.post(COMPLETE, json=SHORT)
        assert text_of(again) == before
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the KV pool was kept"
    assert metric(http, "request_failures_total", reason="parked") == 2 * 2 * len(REFUSED)


def test_health_and_metrics_show_places_bytes_and_transfers(http: httpx.Client, llm: LLM) -> None:
    whole = llm.engine.model.weights.bytes
    moves = metric(http, "model_transfers_total", model="target", direction="to_disk")
    admin(http, "park", models=["target"])
    shown = http.get("/health").json()["residency"]
    assert shown["policy"] == "both"
    target, drafter = shown["models"]
    assert (target["role"], target["place"], target["device_bytes"]) == ("target", "parked", 0)
    assert target["disk_bytes"] >= whole
    assert target["last_transfer"]["direction"] == "to_disk"
    assert target["last_transfer"]["seconds"] > 0
    assert (drafter["place"], drafter["device_bytes"] > 0) == ("resident", True)
    assert "path" not in json.dumps(shown), "/health needs no key"
    assert str(llm.model_path) not in json.dumps(shown)
    for place in ("resident", "parked", "released"):
        assert metric(http, "model_place", model="target", place=place) == (place == "parked")
    assert metric(http, "model_bytes", model="target", where="device") == 0
    assert metric(http, "model_bytes", model="target", where="disk") == target["disk_bytes"]
    assert metric(http, "model_bytes", model="drafter", where="device") == drafter["device_bytes"]
    assert metric(http, "model_transfers_total", model="target", direction="to_disk") == moves + 1
    admin(http, "unpark")
    total = target["transfers"].get("to_device", {}).get("bytes", 0)
    copied = metric(http, "model_transfer_bytes_total", model="target", direction="to_device")
    assert copied == total + target["disk_bytes"]
    assert metric(http, "model_transfer_seconds_total", model="target", direction="to_device") > 0


def test_without_its_drafter_a_server_reads_prompts_in_full(http: httpx.Client) -> None:
    skimmed = {**CHAT, "skim": {"sparse_prefill": "always", "scorer": "attention", "keep_ratio": 0.3}}
    assert http.post("/v1/chat/completions", json=skimmed).json()["skim"]["fallback"] is None
    assert places(admin(http, "park", models=["drafter"])) == {"target": "resident", "drafter": "parked"}
    assert http.get("/health").json()["status"] == "ok"
    fresh = {**skimmed, "skim": {**skimmed["skim"], "cache_salt": "another"}}
    report = http.post("/v1/chat/completions", json=fresh).json()["skim"]
    assert report["fallback"] == "drafter_parked"
    assert report["kept_tokens"] == report["prompt_tokens"]
    assert places(admin(http, "unpark", models=["drafter"]))["drafter"] == "resident"


def test_a_park_waits_for_running_replies_and_refuses_new_ones(http: httpx.Client, llm: LLM) -> None:
    with ThreadPoolExecutor(1) as thread, running(http, llm) as lines:
        parking = thread.submit(admin, http, "park")
        eventually(lambda: llm.engine.parks.target_parked)
        refused(http.post(COMPLETE, json=SHORT), 503, "parked by an administrator")
        refused(http.post(COMPLETE, json=LONG), 503, "parked by an administrator")
        assert not parking.done()
        assert llm.stats().residency[0].device_bytes > 0
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"length"' in rest[-4]
    assert places(parking.result(30))["target"] == "parked"


@pytest.mark.parametrize(
    ("body", "message"),
    [({"wait": False}, "requests are running"), ({"timeout": 0.05}, "time to wait for them is over")],
)
def test_a_park_that_does_not_happen_changes_nothing(
    http: httpx.Client, llm: LLM, body: dict[str, Any], message: str
) -> None:
    with running(http, llm):
        reply = admin(http, "park", **body)
        refused(reply, 409, message)
        assert reply.json()["error"]["code"] == "busy"
        assert http.get("/health").json()["status"] == "ok"
        text_of(http.post(COMPLETE, json=SHORT))


def test_a_client_that_disconnects_withdraws_its_park(http: httpx.Client, llm: LLM) -> None:
    with running(http, llm):
        with pytest.raises(httpx.ReadTimeout):
            http.post("/admin/park", json={}, headers=ADMIN, timeout=0.2)
        eventually(lambda: not llm.engine.parks.target_parked)
        text_of(http.post(COMPLETE, json=SHORT))


def test_an_unpark_ends_a_park_that_waits(http: httpx.Client, llm: LLM) -> None:
    with ThreadPoolExecutor(1) as thread, running(http, llm):
        parking = thread.submit(admin, http, "park")
        eventually(lambda: llm.engine.parks.target_parked)
        assert places(admin(http, "unpark"))["target"] == "resident"
        refused(parking.result(30), 409, "ended by an unpark")
        text_of(http.post(COMPLETE, json=SHORT))


def test_the_end_of_one_park_admits_nothing_while_another_waits(http: httpx.Client, llm: LLM) -> None:
    with ThreadPoolExecutor(1) as thread, running(http, llm) as lines:
        refused_at_once = admin(http, "park", timeout=0.01)
        parking = thread.submit(admin, http, "park")
        eventually(lambda: llm.engine.parks.target_parked)
        refused(refused_at_once, 409, "time to wait")
        refused(admin(http, "park", wait=False), 409, "requests are running")
        refused(http.post(COMPLETE, json=SHORT), 503, "parked")
        list(lines)
    assert places(parking.result(30))["target"] == "parked"
    refused(http.post(COMPLETE, json=SHORT), 503, "parked")


def test_while_a_model_comes_back_requests_are_told_when_to_retry(
    http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, unpark = threading.Event(), Residency.unpark

    def held(self: Residency) -> None:
        assert go.wait(30)
        unpark(self)

    admin(http, "park")
    monkeypatch.setattr(Residency, "unpark", held)
    with ThreadPoolExecutor(1) as thread:
        returning = thread.submit(admin, http, "unpark")
        eventually(lambda: llm.engine.parks.unparking)
        reply = http.post(COMPLETE, json=LONG)
        refused(reply, 503, "is being unparked; try again in a few seconds")
        assert int(reply.headers["Retry-After"]) > 0
        assert reply.json()["error"]["code"] == "model_parked"
        health = http.get("/health").json()
        assert (health["status"], "being brought back" in health["reason"]) == ("parked", True)
        go.set()
        assert places(returning.result(30))["target"] == "resident"
    text_of(http.post(COMPLETE, json=SHORT))


def test_a_server_that_was_idle_serves_the_next_request(model_paths: tuple[Path, Path]) -> None:
    with (
        LLM(model_paths[0], progress=False, kv_memory="8M", idle_park=0.05) as llm,
        LiveServer(llm) as server,
        server.client() as http,
    ):
        first = text_of(http.post(COMPLETE, json=SHORT))
        for _ in range(3):
            eventually(lambda: llm.stats().residency[0].place == "parked")
            health = http.get("/health").json()
            assert (health["status"], health["residency"]["models"][0]["device_bytes"]) == ("ok", 0)
            assert health["residency"]["models"][0]["standing"] == "idle"
            assert "the next request brings them back" in health["reason"]
            assert text_of(http.post(COMPLETE, json=SHORT)) == first


def test_a_parked_server_ends(model_paths: tuple[Path, Path]) -> None:
    with LLM(model_paths[0], progress=False, kv_memory="8M") as llm:
        llm.engine.park()
        assert llm.engine.close(timeout=30)


BODIES: list[tuple[Any, str]] = [
    ({"models": []}, "models"),
    ({"models": ["draughter"]}, "models"),
    ({"models": "target"}, "models"),
    ({"models": ["target"] * 3}, "models"),
    ({"models": [["target"]]}, "models"),
    ({"models": {"target": 1}}, "models"),
    ({"to": "resident"}, "to"),
    ({"to": "disk"}, "to"),
    ({"to": 1}, "to"),
    ({"wait": "yes"}, "wait"),
    ({"wait": 1}, "wait"),
    *(({"timeout": value}, "timeout") for value in (0, -1, 1e308, 10**400, 86_401, "5", True, [1])),
    ({"tiemout": 5}, "tiemout"),
    ({"modles": ["drafter"]}, "modles"),
    ([], ""),
    (None, ""),
]
RAW = [b" ", b"{", b'{"timeout": NaN}', b'{"timeout": Infinity}', b"\xff\xfe", b'"park"', b"[" * 100_000]


@pytest.mark.parametrize("route", ["park", "unpark"])
def test_wrong_bodies_are_refused_and_move_nothing(route: str, http: httpx.Client, llm: LLM) -> None:
    for body, name in BODIES:
        reply = http.post(f"/admin/{route}", content=json.dumps(body), headers={**ADMIN, **JSON})
        assert reply.status_code == 400, (body, reply.text)
        assert name in reply.json()["error"]["message"]
    for raw in RAW:
        reply = http.post(f"/admin/{route}", content=raw, headers={**ADMIN, **JSON})
        assert reply.status_code == 400, (raw[:20], reply.text)
    assert all(one.place == "resident" for one in llm.stats().residency)
    assert http.post(f"/admin/{route}", content="{}", headers=ADMIN).status_code == 415
    assert http.post(f"/admin/{route}", json={}).status_code == 401
    assert admin(http, route, models=None, **({"to": None, "wait": None} if route == "park" else {}))


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("headers", [{}, JSON])
def test_a_body_is_optional(headers: dict[str, str], http: httpx.Client) -> None:
    assert places(http.post("/admin/park", headers={**ADMIN, **headers}))["target"] == "parked"
    assert places(http.post("/admin/unpark", headers={**ADMIN, **headers}))["target"] == "resident"


def test_a_timeout_that_is_no_number_is_named(http: httpx.Client) -> None:
    reply = http.post("/admin/park", content=b'{"timeout": NaN}', headers={**ADMIN, **JSON})
    refused(reply, 400, "timeout must be a finite number, got nan")


def standings(http: httpx.Client) -> tuple[str, str | None, list[str]]:
    health = http.get("/health")
    assert health.status_code == 200
    found = health.json()
    return found["status"], found["reason"], [one["standing"] for one in found["residency"]["models"]]


def test_health_tells_apart_why_models_are_parked(http: httpx.Client, llm: LLM) -> None:
    assert standings(http) == ("ok", None, ["ready", "ready"])
    with ThreadPoolExecutor(1) as thread, running(http, llm) as lines:
        parking = thread.submit(admin, http, "park")
        eventually(lambda: llm.engine.parks.target_parked)
        status, reason, models = standings(http)
        assert (status, models) == ("parking", ["park_waits", "park_waits"])
        assert reason is not None
        assert "waits for running requests" in reason
        assert metric(http, "model_standing", model="target", standing="park_waits") == 1
        list(lines)
        parking.result(30)
    status, _, models = standings(http)
    assert (status, models) == ("parked", ["held", "held"])
    assert metric(http, "weight_bytes") == 0
    admin(http, "unpark")
    assert metric(http, "weight_bytes") > 0
    admin(http, "park", models=["drafter"])
    status, reason, models = standings(http)
    assert (status, models) == ("ok", ["ready", "held"])
    assert reason is not None
    assert "read in full" in reason


def test_a_transfer_has_a_time(http: httpx.Client) -> None:
    before = time.time()
    admin(http, "park")
    target = http.get("/health").json()["residency"]["models"][0]
    assert before <= target["last_transfer"]["at"] <= time.time()


def test_a_refused_request_is_not_counted_as_one_that_was_read(http: httpx.Client, llm: LLM) -> None:
    admin(http, "park")
    before = llm.stats().prefill.below_threshold
    auto = replace(llm.config.prefill, sparse_prefill="auto")
    with pytest.raises(ParkedError):
        llm.generate([[1, 2, 3]], prefill=auto, use_tqdm=False)
    assert llm.stats().prefill.below_threshold == before
    admin(http, "unpark")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), prefill=auto, use_tqdm=False)
    assert llm.stats().prefill.below_threshold == before + 1


def test_another_engine_with_another_format_of_the_drafter_loads_its_own(llm: LLM) -> None:
    same = llm.with_settings(llm.config)
    assert same.engine.drafter is llm.engine.drafter
    same.close()
    coded = replace(llm.config, prefill=replace(llm.config.prefill, drafter_quantization="int8"))
    other = llm.with_settings(coded)
    assert other.engine.model is llm.engine.model
    assert other.engine.drafter is not None
    assert llm.engine.drafter is not None
    assert other.engine.drafter.weights.bits < llm.engine.drafter.weights.bits
    other.close()


def test_a_drafter_that_is_not_there_cannot_be_parked(model_paths: tuple[Path, Path]) -> None:
    with (
        LLM(model_paths[0], progress=False, kv_memory="8M") as llm,
        LiveServer(llm, admin_key="root") as server,
        server.client() as http,
    ):
        for route in ("park", "unpark"):
            reply = admin(http, route, models=["drafter"])
            refused(reply, 400, f"no drafter to {route}")
            assert reply.json()["error"]["param"] == "models"
        assert places(admin(http, "park")) == {"target": "parked"}


def test_a_park_that_fails_leaves_the_server_as_it_was_and_logs_no_traceback(
    http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MoveError("the target could not be parked: No space left on device; it stays resident")

    with monkeypatch.context() as patch:
        patch.setattr(Residency, "park", full)
        refused(admin(http, "park"), 500, "No space left on device")
    assert [record for record in caplog.records if record.exc_info] == []
    assert http.get("/health").json()["status"] == "ok"
    text_of(http.post(COMPLETE, json=SHORT))
