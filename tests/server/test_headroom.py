"""A huge prompt in progress does not hold up others."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from skim import LLM
from skim.tokenization import OVERLAP, PIECE
from tests import tiny
from tests.live import NAME, LiveServer, ServerProcess
from tests.paths import BOOK

SKIMMED = {"sparse_prefill": "always", "scorer": "lexical", "keep_tokens": 200}
QUESTION = "\n\nHow many feet long was the skeleton of the Sperm Whale at Tranque?"


class Watched:
    """A tokenizer that notes the length of every text and the thread that encodes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.calls: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        self.calls.append((len(text), threading.get_ident()))
        return self._tokenizer(text, **options)


@pytest.mark.parametrize("chat", [True, False])
def test_a_huge_prompt_is_encoded_in_short_calls_off_the_event_loop(tmp_path: Path, chat: bool) -> None:
    text = BOOK[: 6 * PIECE] + QUESTION
    body: dict[str, Any] = {"model": NAME, "max_tokens": 2, "skim": SKIMMED}
    if chat:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", text
    with LLM(tiny.save("llama", tmp_path), progress=False, kv_memory="16M") as llm:
        watched = Watched(llm.tokenizer)
        object.__setattr__(llm.engine.model, "tokenizer", watched)
        with LiveServer(llm) as server, server.client() as http:
            loop = server._thread.ident
            reply = http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            health = http.get("/health")
    assert health.status_code == 200
    assert reply.json()["skim"]["prompt_tokens"] > 5 * PIECE
    assert sum(length for length, _ in watched.calls) > len(text)
    assert max(length for length, _ in watched.calls) <= 2 * (PIECE + OVERLAP)
    assert loop not in {thread for _, thread in watched.calls}


@pytest.mark.slow  # it measures time
def test_health_answers_within_100_ms_while_15_mb_are_tokenized_planned_and_read(
    default_model_dir: Path,
) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": (BOOK * 13)[:15_000_000] + QUESTION}],
        "max_tokens": 4,
        "stream": True,
        "skim": {**SKIMMED, "keep_tokens": 2000},
    }
    took: list[float] = []
    lines: list[str] = []

    def ask(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as reply:
            lines.extend(line for line in reply.iter_lines() if line)

    with ServerProcess(str(default_model_dir), "--kv-memory", "1G", name="default") as server:
        server.wait_for("ready")
        asking = threading.Thread(target=ask, args=(server.url,))
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as http:
            asking.start()
            while asking.is_alive():
                began = time.perf_counter()
                assert http.get("/health").status_code == 200
                took.append(time.perf_counter() - began)
                time.sleep(0.02)
    assert lines[-1] == "data: [DONE]", lines[-1]
    took.sort()
    median, most, longest = (took[int(len(took) * share)] * 1e3 for share in (0.5, 0.99, 0.9999))
    print(f"/health, {len(took)} calls: median {median:.1f} ms, 99% {most:.1f} ms, longest {longest:.1f} ms")
    assert most < 100
