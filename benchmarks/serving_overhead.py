"""Overhead of HTTP: tokens/s of eight concurrent streams, through the server and straight from the engine.

    python benchmarks/serving_overhead.py [--streams 8] [--tokens 64] [--repeats 5]

Both sides use one engine in one process and take turns. The HTTP clients run in another process, as in
practice, and share the cores with the server. Exits with 1 if the ratio misses its target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import threading
import time

import uvicorn

from skim import LLM, SamplingParams
from skim.config import ServerConfig
from skim.engine.sequence import Delta
from skim.prefill.request import Request
from skim.server.run import application, listen
from skim.server.service import Service

TARGET = 0.9
MODEL = "smollm2-135m"


def engine_rate(llm: LLM, prompts: list[str], tokens: int) -> float:
    """Return tokens/s of the streams, read straight from the engine."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    handles = [
        llm.engine.submit(Request(llm.encode(prompt), params, llm.config.prefill, use_prefix_cache=False))
        for prompt in prompts
    ]
    count = sum(len(event.token_ids) for handle in handles for event in handle if isinstance(event, Delta))
    return count / (time.perf_counter() - start)


def http_rate(port: int, prompts: list[str], tokens: int) -> float:
    """Return tokens/s of the same streams, read by another process over HTTP."""
    command = [sys.executable, __file__, "--client", str(port), str(tokens)]
    found = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=True)
    report = json.loads(found.stdout)
    assert report["tokens"] == tokens * len(prompts), report
    return float(report["tokens"] / report["seconds"])


async def client(port: int, prompts: list[str], tokens: int) -> dict[str, float]:
    """Read all streams to the end; the last event's usage has the number of tokens."""

    async def read(prompt: str) -> int:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "skim": {"use_prefix_cache": False},
        }
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(raw)}\r\n\r\n"
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + raw)
        last = b""
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                last = line
        writer.close()
        return int(json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"])

    start = time.perf_counter()
    counts = await asyncio.gather(*(read(prompt) for prompt in prompts))
    return {"tokens": sum(counts), "seconds": time.perf_counter() - start}


def serve(llm: LLM) -> int:
    """Serve the engine from a daemon thread; return the port."""
    listener = listen("127.0.0.1", 0)

    async def run() -> None:
        service = Service(ServerConfig(), MODEL)
        service.ready(llm)
        config = uvicorn.Config(application(service), lifespan="off", log_config=None, access_log=False)
        await uvicorn.Server(config).serve(sockets=[listener])

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    return int(listener.getsockname()[1])


def main() -> int:
    if sys.argv[1:2] == ["--client"]:
        print(json.dumps(asyncio.run(client(int(sys.argv[2]), json.load(sys.stdin), int(sys.argv[3])))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    logging.disable(logging.INFO)
    llm = LLM(MODEL)
    port = serve(llm)
    prompts = [f"Chapter {i}. It was a dark and stormy night;" for i in range(args.streams)]
    engine_rate(llm, prompts, 8)
    http_rate(port, prompts, 8)
    pairs = []
    for _ in range(args.repeats):
        pairs.append((http_rate(port, prompts, args.tokens), engine_rate(llm, prompts, args.tokens)))
    ratios = sorted(http / engine for http, engine in pairs)
    middle = statistics.median(ratios)
    http, engine = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{args.streams} streams of {args.tokens} tokens, n={args.repeats}, medians")
    print(
        f"HTTP {http:.1f} tokens/s, engine {engine:.1f}: {middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
        end="  ",
    )
    print(f">= {TARGET} {'ok' if middle >= TARGET else 'MISSED'}")
    return 0 if middle >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
