"""Sixty concurrent clients, some of them misbehaving, on a KV pool too small for all."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from skim import LLM, SamplingParams
from tests import tiny
from tests.live import ServerProcess

NAME = "tiny"
ADMIN = {"Authorization": "Bearer root"}
JSON = {"Content-Type": "application/json"}
CLIENTS = 60
TOKENS = 120
DOCUMENT = "It was a dark and stormy night; the rain fell in torrents. "
TOKEN_BYTES = 4 * 2 * 16 * 2 * 4  # layers x kv heads x dim x (key, value) x float32


@dataclass
class Client:
    """One client: its request and its result."""

    number: int
    prompt: str
    kind: str  # whole, stream, hang_up or garbage
    patience: int = 0  # events read before hanging up; 0: hang up before the first
    text: str | None = None
    status: int | None = None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[ServerProcess]:
    pool = str(1024 * TOKEN_BYTES)  # a sixth of what 24 sequences of up to 250 tokens would take
    settings = ["--kv-memory", pool, "--max-num-seqs", "24", "--admin-key", "root"]
    with ServerProcess(model, *settings, name=NAME) as server:
        server.wait_for("ready")
        yield server


def draw_clients(seed: int) -> list[Client]:
    """A third hang up, a few send garbage, the others read to the end. Half of the prompts share a prefix."""
    draw = random.Random(seed)
    kinds = ["hang_up"] * 20 + ["garbage"] * 5 + ["whole"] * 15 + ["stream"] * 20
    draw.shuffle(kinds)
    clients = []
    for number, kind in enumerate(kinds):
        shared = DOCUMENT if draw.random() < 0.5 else ""
        prompt = shared + "".join(draw.choices("abcdefgh ", k=draw.randint(1, 70)))
        clients.append(Client(number, prompt, kind, patience=draw.choice([0, 0, 1, 2, 10, 60])))
    return clients


def body(client: Client, **fields: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": client.prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


async def run(client: Client, http: httpx.AsyncClient, draw: random.Random) -> None:
    await asyncio.sleep(draw.random() * 0.3)
    if client.kind == "garbage":
        await send_garbage(client, http, draw)
    elif client.kind == "whole":
        reply = await http.post("/v1/completions", json=body(client))
        client.status = reply.status_code
        client.text = reply.json()["choices"][0]["text"]
    else:
        await read_stream(client, http)


async def read_stream(client: Client, http: httpx.AsyncClient) -> None:
    if client.kind == "hang_up" and client.patience == 0:
        with pytest.raises(httpx.TimeoutException):
            await http.post("/v1/completions", json=body(client, max_tokens=700), timeout=0.05)
        return
    text = ""
    events = 0
    async with http.stream("POST", "/v1/completions", json=body(client, stream=True)) as reply:
        client.status = reply.status_code
        async for line in reply.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            events += 1
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if client.kind == "hang_up" and events >= client.patience:
                return
    client.text = text


async def send_garbage(client: Client, http: httpx.AsyncClient, draw: random.Random) -> None:
    """Send bytes that are not HTTP, a body that never arrives, or a body that is not a request."""
    match client.number % 3:
        case 0:
            raw = draw.randbytes(2000)
        case 1:
            raw = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            raw += b"Content-Length: 5000\r\n\r\n{"
        case _:
            reply = await http.post("/v1/completions", content=draw.randbytes(2000), headers=JSON)
            assert reply.status_code == 400
            return
    url = http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(raw)
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()


async def storm(url: str, clients: list[Client], seed: int) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        await asyncio.gather(*(run(client, http, random.Random(seed + client.number)) for client in clients))


def stats(url: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/admin/stats", headers=ADMIN, timeout=30)
    return dict(reply.json())


async def settled(url: str) -> dict[str, Any]:
    """Wait until nothing runs and return the stats. An aborted request ends with the next step."""
    for _ in range(500):
        now = stats(url)
        if now["running"] == now["waiting"] == 0:
            return now
        await asyncio.sleep(0.02)
    raise AssertionError(f"requests are left running: {now}")


def test_sixty_clients_on_a_pool_that_is_too_small(server: ServerProcess, model: str) -> None:
    url = server.url
    process = psutil.Process(server.process.pid)
    asyncio.run(storm(url, draw_clients(1), seed=1))  # warm-up, for one-time allocations
    asyncio.run(settled(url))
    gc.collect()
    memory = process.memory_info().rss
    before = stats(url)

    clients = draw_clients(2)
    asyncio.run(storm(url, clients, seed=2))
    after = asyncio.run(settled(url))

    assert after["preemptions"] > before["preemptions"], "the pool is too large to force preemptions"
    assert after["outcomes"]["abort"] > before["outcomes"].get("abort", 0), "no request was aborted"
    assert after["outcomes"].get("error", 0) == 0
    assert after["pool"]["live"] == after["pool"]["cold"], "some block is neither free nor only cached"
    assert process.memory_info().rss < memory * 1.05

    finished = [client for client in clients if client.text is not None]
    assert len(finished) >= 35
    assert all(client.status == 200 for client in finished)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(model, progress=False, kv_memory="64M", enable_prefix_caching=False) as calm:
        replies = calm.generate([client.prompt for client in finished], params, use_tqdm=False)
    for client, expected in zip(finished, replies, strict=True):
        assert client.text == expected.outputs[0].text, client

    reset = httpx.post(f"{url}/admin/reset_prefix_cache", headers=ADMIN, timeout=30).json()
    assert reset == {"freed_blocks": after["pool"]["live"]}
    assert stats(url)["pool"]["live"] == 0
    assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
