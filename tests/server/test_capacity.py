"""Admission by sequences and by prompt tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from hypothesis.strategies import integers

from skim import LLM
from skim.server.capacity import SMALL_PART, Capacity, default_queued_tokens
from skim.server.errors import ApiError
from tests import tiny
from tests.live import NAME, LiveServer, eventually, held_engine

COMPLETE = "/v1/completions"


class Admission(RuleBasedStateMachine):
    """Requests come, are read and end in any order."""

    waiting = Bundle("waiting")  # (sequences, tokens)
    read = Bundle("read")

    @initialize(sequences=integers(1, 10), tokens=integers(1, 100) | integers(500, 1000))
    def start(self, sequences: int, tokens: int) -> None:
        self.capacity = Capacity(sequences, tokens)
        self.sequences = 0
        self.small = max(1, tokens // SMALL_PART)
        self.tokens: list[int] = []

    def alike(self, tokens: int) -> list[int]:
        """The waiting requests that share a limit with one of so many tokens."""
        return [each for each in self.tokens if (each <= self.small) == (tokens <= self.small)]

    @rule(target=waiting, sequences=integers(1, 12), tokens=integers(1, 20) | integers(1, 1500))
    def come(self, sequences: int, tokens: int) -> tuple[int, int]:
        capacity = self.capacity
        fits = self.sequences + sequences <= capacity.max_sequences
        try:
            capacity.take_sequences(sequences)
        except ApiError:
            assert not fits
            return (0, 0)
        assert fits
        try:
            capacity.take_tokens(tokens)
        except ApiError:
            assert self.alike(tokens)
            assert sum(self.alike(tokens)) + tokens > capacity.max_tokens
            capacity.release_sequences(sequences)
            return (0, 0)
        self.sequences += sequences
        self.tokens.append(tokens)
        return (sequences, tokens)

    @rule(target=read, request=consumes(waiting))
    def generate(self, request: tuple[int, int]) -> tuple[int, int]:
        sequences, tokens = request
        if tokens:
            for part in (tokens // 3, tokens - tokens // 3):  # two prompts
                self.capacity.release_tokens(part, of=tokens)
            self.tokens.remove(tokens)
        return sequences, 0

    @rule(request=consumes(read))
    def end(self, request: tuple[int, int]) -> None:
        self.capacity.release_sequences(request[0])
        self.sequences -= request[0]

    @invariant()
    def counts_are_exact_and_bounded(self) -> None:
        if hasattr(self, "capacity"):
            capacity = self.capacity
            assert (capacity.sequences, capacity.tokens) == (self.sequences, sum(self.tokens))
            assert capacity.sequences <= capacity.max_sequences
            small, large = self.alike(1), self.alike(self.small + 1)
            assert sum(small) <= capacity.max_tokens
            assert sum(large) <= capacity.max_tokens or len(large) == 1


TestAdmission = Admission.TestCase


def test_the_default_grows_with_the_context_window() -> None:
    assert default_queued_tokens(8192) == 2**20
    assert default_queued_tokens(2**17) == 2**21


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M", max_num_seqs=8) as llm:
        yield llm


def ask(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "x" * tokens, "max_tokens": 1, "stream": True, **fields}


def test_prompt_tokens_that_wait_are_limited(llm: LLM) -> None:
    with LiveServer(llm, max_queued_tokens=100) as server, server.client() as http:
        capacity = server.service.capacity
        with held_engine(llm) as go, http.stream("POST", COMPLETE, json=ask(150)) as first:
            assert first.status_code == 200, "alone, a prompt may exceed the limit"
            assert capacity.tokens == 150
            full = http.post(COMPLETE, json=ask(2))
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert "150 prompt tokens of large requests" in full.json()["error"]["message"]
            assert "limit is 100" in full.json()["error"]["message"]
            go.set()
            first.read()
        eventually(lambda: capacity.tokens == capacity.sequences == 0)
        with held_engine(llm) as go, http.stream("POST", COMPLETE, json=ask(60)) as first:
            refused = http.post(COMPLETE, json=ask(50))
            assert refused.status_code == 429
            message = refused.json()["error"]["message"]
            assert "60 prompt tokens of large requests are waiting, this request has 50" in message
            assert 'skim:queued_prompt_tokens{model_name="smollm2-135m"} 60.0' in http.get("/metrics").text
            with http.stream("POST", COMPLETE, json=ask(40)) as second:
                assert (second.status_code, capacity.tokens) == (200, 100)
                go.set()
                second.read()
            first.read()
        eventually(lambda: capacity.tokens == capacity.sequences == 0)


def test_a_short_prompt_is_admitted_while_one_over_the_limit_waits(llm: LLM) -> None:
    with LiveServer(llm, max_queued_tokens=640) as server, server.client() as http:
        capacity = server.service.capacity
        with held_engine(llm) as go, http.stream("POST", COMPLETE, json=ask(700)) as long:
            assert long.status_code == 200
            short = ask(10)
            with (
                http.stream("POST", COMPLETE, json=short) as one,
                http.stream("POST", COMPLETE, json={**short, "prompt": ["x" * 5] * 2}) as two,
            ):
                assert (one.status_code, two.status_code, capacity.tokens) == (200, 200, 720)
                assert http.post(COMPLETE, json=ask(11)).status_code == 429
                go.set()
                assert all("[DONE]" in each.read().decode() for each in (one, two))
            assert "[DONE]" in long.read().decode()
        eventually(lambda: capacity.tokens == capacity.sequences == 0)


def test_small_prompts_have_a_limit_too(llm: LLM) -> None:
    with LiveServer(llm, max_queued_tokens=64) as server, server.client() as http, held_engine(llm):
        capacity = server.service.capacity
        for _ in range(64):
            capacity.take_tokens(1)
        refused = http.post(COMPLETE, json=ask(1))
        assert refused.status_code == 429
        assert "64 prompt tokens of small requests are waiting" in refused.json()["error"]["message"]


def test_a_prompt_stops_waiting_with_its_first_token(llm: LLM) -> None:
    with LiveServer(llm) as server, server.client() as http:
        capacity = server.service.capacity
        with http.stream("POST", COMPLETE, json=ask(60, max_tokens=900, ignore_eos=True)):
            eventually(lambda: capacity.tokens == 0)
            assert capacity.sequences == 1
        eventually(lambda: capacity.sequences == 0)


@pytest.mark.parametrize("how", ["refused", "disconnected", "timeout"])
def test_tokens_are_released_however_a_request_ends(llm: LLM, how: str) -> None:
    timeout = 0.2 if how == "timeout" else 60
    with held_engine(llm) as go, LiveServer(llm, request_timeout=timeout) as server, server.client() as http:
        capacity = server.service.capacity
        fields = {"n": 8, "prompt": ["a"] * 3, "logit_bias": {"999": 1}} if how == "refused" else {}
        with http.stream("POST", COMPLETE, json=ask(60, **fields)) as reply:
            assert reply.status_code == (400 if how == "refused" else 200)
            if how == "timeout":
                reply.read()
        eventually(lambda: capacity.tokens == capacity.sequences == 0)
        go.set()
