"""Clients, parks and unparks at random from many threads: a reply is right or a clean 503, nothing hangs."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from skim import LLM
from tests import paths, tiny
from tests.live import LiveServer, eventually

ADMIN = {"Authorization": "Bearer root"}
CLIENTS, CALLS, SECONDS = 8, 16, 120
"""Threads, calls of each, and the time after which a call counts as hanging."""
DOCUMENT = paths.BOOK[5000:5400].encode("ascii", "replace").decode()
PROMPTS = [f"{number} {DOCUMENT[number * 16 : number * 16 + 40 * number]}" for number in range(1, 7)]
QUESTIONS = [f"{DOCUMENT}\n\nWhat is the {word}?" for word in ("code", "name", "sea")]
SKIM = {"sparse_prefill": "always", "scorer": "attention", "keep_ratio": 0.4}

Outcome = tuple[str, int]


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("tiny")
    return tiny.save("llama", directory / "target"), tiny.save("llama", directory / "drafter", seed=1)


@pytest.fixture(params=["both", "keep-target", "swap"])
def llm(request: pytest.FixtureRequest, model_paths: tuple[Path, Path]) -> Iterator[LLM]:
    """Room for few sequences, so that some are preempted, and parks when idle."""
    target, drafter = model_paths
    with LLM(
        target,
        progress=False,
        drafter=str(drafter),
        kv_memory="1M",
        prefill_block_size=8,
        max_num_seqs=4,
        residency=request.param,
        idle_park=0.02,
    ) as llm:
        yield llm


class Client:
    """One thread's calls. It checks every reply by itself."""

    def __init__(self, http: httpx.Client, seed: int, expected: dict[Any, str]) -> None:
        self._http = http
        self._random = random.Random(seed)
        self._expected = expected

    def run(self) -> list[Outcome]:
        calls: list[Callable[[], Outcome]] = [self.complete] * 4 + [self.stream] * 3 + [self.ask] * 3
        calls += [self.plan, self.rank, self.park, self.park, self.unpark, self.unpark, self.look]
        return [self._random.choice(calls)() for _ in range(CALLS)]

    def complete(self) -> Outcome:
        prompt = self._random.choice(PROMPTS)
        reply = self._post("/v1/completions", completion(prompt))
        return self._checked("complete", reply, lambda found: found["choices"][0]["text"], prompt)

    def ask(self) -> Outcome:
        """A skimmed prompt, or one that is read in full because the drafter is parked."""
        question = self._random.choice(QUESTIONS)
        reply = self._post("/v1/chat/completions", asking(question))
        if reply.status_code != 200:
            return self._refused("ask", reply)
        found = reply.json()
        assert found["skim"]["fallback"] in (None, "drafter_parked"), found["skim"]
        key = (question, found["skim"]["fallback"] is None)
        assert found["choices"][0]["message"]["content"] == self._expected[key]
        return "ask", 200

    def stream(self) -> Outcome:
        prompt = self._random.choice(PROMPTS)
        with self._http.stream(
            "POST", "/v1/completions", json={**completion(prompt), "stream": True}
        ) as reply:
            if reply.status_code != 200:
                reply.read()
                return self._refused("stream", reply)
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", lines
        chunks = [json.loads(line) for line in lines[:-1]]
        assert not any("error" in chunk for chunk in chunks), "a running request finishes before a park"
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        assert text == self._expected[prompt]
        return "stream", 200

    def plan(self) -> Outcome:
        reply = self._post("/v1/skim", {"messages": asking(QUESTIONS[0])["messages"], "skim": SKIM})
        return "plan", 200 if reply.status_code == 200 else self._refused("plan", reply)[1]

    def rank(self) -> Outcome:
        reply = self._post(
            "/v1/rerank", {"query": "a code", "documents": PROMPTS, "skim": {"scorer": "attention"}}
        )
        return "rank", 200 if reply.status_code == 200 else self._refused("rank", reply)[1]

    def park(self) -> Outcome:
        chance = self._random
        body = {
            "to": chance.choice(("parked", "released")),
            "wait": chance.random() < 0.7,
            "timeout": chance.choice((0.001, 0.1, 30.0)),
            "models": chance.choice((["target"], ["drafter"], ["target", "drafter"])),
        }
        reply = self._post("/admin/park", body)
        assert reply.status_code in (200, 409), reply.text
        return "park", reply.status_code

    def unpark(self) -> Outcome:
        time.sleep(self._random.random() * 0.02)
        reply = self._post("/admin/unpark", {})
        assert reply.status_code == 200, reply.text
        return "unpark", 200

    def look(self) -> Outcome:
        health = self._http.get("/health")
        assert (health.status_code, health.json()["status"] in ("ok", "parking", "parked")) == (200, True)
        assert self._http.get("/metrics").status_code == 200
        return "look", 200

    def _post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        return self._http.post(route, json=body, headers=ADMIN)

    def _checked(self, kind: str, reply: httpx.Response, text: Callable[[Any], str], prompt: str) -> Outcome:
        if reply.status_code != 200:
            return self._refused(kind, reply)
        assert text(reply.json()) == self._expected[prompt]
        return kind, 200

    def _refused(self, kind: str, reply: httpx.Response) -> Outcome:
        assert reply.status_code == 503, (kind, reply.status_code, reply.text)
        error = reply.json()["error"]
        assert error["code"] == "model_parked", error
        assert ("being unparked" in error["message"]) == ("Retry-After" in reply.headers)
        return kind, 503


def completion(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def asking(question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    skim = {**SKIM, "follow_up": "replan", "use_prefix_cache": False}
    return {"messages": messages, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "skim": skim}


def expected_of(http: httpx.Client) -> dict[Any, str]:
    """The replies of a server that nobody parks: by prompt, and for questions also by whether it skims."""
    found: dict[Any, str] = {}
    for prompt in PROMPTS:
        found[prompt] = http.post("/v1/completions", json=completion(prompt)).json()["choices"][0]["text"]
    for question in QUESTIONS:
        for skimmed in (True, False):
            body = asking(question)
            body["skim"]["sparse_prefill"] = "always" if skimmed else "off"
            reply = http.post("/v1/chat/completions", json=body).json()
            found[question, skimmed] = reply["choices"][0]["message"]["content"]
    assert any(found[question, True] != found[question, False] for question in QUESTIONS)
    return found


def test_replies_are_right_or_a_clean_503_whatever_is_parked_meanwhile(llm: LLM) -> None:
    with LiveServer(llm, admin_key="root") as server, server.client() as http:
        expected = expected_of(http)
        with ThreadPoolExecutor(CLIENTS) as threads:
            calls = [threads.submit(Client(http, seed, expected).run) for seed in range(CLIENTS)]
            outcomes = Counter(outcome for call in calls for outcome in call.result(SECONDS))
        print(sorted(outcomes.items()))
        assert sum(outcomes.values()) == CLIENTS * CALLS
        kinds = ("complete", "stream", "ask")
        for status in (200, 503):
            assert sum(outcomes[kind, status] for kind in kinds) > 0, outcomes
        assert outcomes["park", 200] > 0
        assert http.post("/admin/unpark", json={}, headers=ADMIN).status_code == 200
        assert expected_of(http) == expected
        eventually(lambda: llm.stats().running == llm.stats().waiting == 0)
        llm.engine.core.memory.check()
        assert llm.engine.dead is None
        assert not llm.engine.parks.target_parked
        assert not llm.engine.parks.unparking
