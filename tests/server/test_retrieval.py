"""Rankings and plans over HTTP: they generate nothing, and share the engine with requests that do."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from skim import LLM
from skim.prefill.plan import Reason
from skim.prefill.rank import ranking_of
from tests import paths, tiny
from tests.live import NAME, LiveServer, eventually, held_engine, slow_steps
from tests.server.test_skimming import NEEDLE, QUESTION, SETTINGS, body, document, messages

EMBED, RERANK, SKIM = "/v1/embeddings", "/v1/rerank", "/v1/skim"
PASSAGES = [paths.BOOK[at : at + 200] for at in range(20_000, 24_000, 1000)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, **{**SETTINGS, "scorer": "blend"}) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with LiveServer(llm, max_documents=16, max_rerank_tokens=2048, max_queued_requests=8) as server:
        yield server


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """Every test leaves no work, no reserved capacity and no KV block."""
    with server.client() as client:
        yield client
    engine, capacity = server.service.llm.engine, server.service.capacity
    eventually(lambda: engine.stats().waiting == engine.stats().running == 0)
    engine.reset_prefix_cache()
    assert engine.stats().pool.live == 0
    assert (capacity.sequences, capacity.tokens) == (0, 0)


def ok(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


# -- embeddings


def embedded(http: httpx.Client, given: Any, **more: Any) -> list[np.ndarray]:
    data = ok(http.post(EMBED, json={"input": given, **more}))["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    if more.get("encoding_format") == "base64":
        return [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data]
    return [np.array(one["embedding"], dtype=np.float32) for one in data]


def test_every_shape_of_input_gives_the_same_vectors(http: httpx.Client, llm: LLM) -> None:
    texts = [PASSAGES[0], "a", PASSAGES[1]]
    ids = [list(llm.encode(text)) for text in texts]
    expected = [
        vector.astype(np.float32) for vector in llm.engine.embed([tuple(one) for one in ids]).result(60)
    ]
    for given in (texts, ids):
        for encoding in ("float", "base64"):
            np.testing.assert_array_equal(embedded(http, given, encoding_format=encoding), expected)
    np.testing.assert_array_equal(embedded(http, texts[0]), expected[:1])
    np.testing.assert_array_equal(embedded(http, ids[0], dimensions=64), expected[:1])
    usage = ok(http.post(EMBED, json={"input": texts}))["usage"]
    assert usage == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a"] * 17}, "input"),
        ({"input": [258]}, "input"),
        ({"input": [-1]}, "input[0]"),
        ({"input": "a" * 1025}, "input"),
        ({"input": "a" * 100_000}, "input"),
        ({"dimensions": 32}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_an_embedding_that_cannot_be_made_names_the_field(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    reply = http.post(EMBED, json={"input": "a", **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_client_that_leaves_ends_its_embeddings(http: httpx.Client, llm: LLM, server: LiveServer) -> None:
    with held_engine(llm) as go, server.client() as leaving:
        with pytest.raises(httpx.ReadTimeout):
            leaving.post(EMBED, json={"input": PASSAGES}, timeout=0.5)
        eventually(lambda: server.service.capacity.sequences == 0)
        go.set()
    eventually(lambda: len(llm.engine.core.lifecycle.plans) == 0)


# -- rankings


def test_documents_are_ranked_as_the_engine_ranks_them(http: httpx.Client, llm: LLM) -> None:
    documents = [*PASSAGES, NEEDLE]
    reply = ok(http.post(RERANK, json={"model": NAME, "query": QUESTION, "documents": documents}))
    encode = lambda text: llm.encode(text, add_special_tokens=False)  # noqa: E731
    ranking = ranking_of(encode, 256, QUESTION, documents, scorer="blend", block_size=16)
    expected = llm.engine.rank(ranking).result(60)
    results = reply["results"]
    assert [one["index"] for one in results] == sorted(range(5), key=lambda i: (-expected[i], i))
    assert [one["relevance_score"] for one in results] == sorted(expected, reverse=True)
    assert all(one["document"] == {"text": documents[one["index"]]} for one in results)
    tokens = len(encode(QUESTION)) + sum(len(encode(text)) for text in documents)
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert reply["skim"] == {"scorer": "blend"}


@pytest.mark.parametrize("path", ["/v2/rerank", "/rerank"])
def test_other_paths_and_shapes_of_documents_give_the_same(http: httpx.Client, path: str) -> None:
    plain = ok(http.post(RERANK, json={"query": QUESTION, "documents": [*PASSAGES, NEEDLE]}))
    objects = [{"text": text, "title": "ignored"} for text in [*PASSAGES, NEEDLE]]
    asked = {"query": QUESTION, "documents": objects, "top_n": 2, "return_documents": False}
    reply = http.post(path, json=asked)
    assert ok(reply)["results"] == [{**one, "document": None} for one in plain["results"][:2]]
    assert reply.headers["x-skim-ignored"] == "documents[].title"


def test_a_request_chooses_the_scorer_and_cuts_documents(http: httpx.Client) -> None:
    documents = [f"{'x' * 40} {NEEDLE}", QUESTION[:20], "x" * 3000]
    asked = {"query": QUESTION, "documents": documents, "skim": {"scorer": "lexical"}}
    assert http.post(RERANK, json=asked).status_code == 400  # too many tokens
    reply = ok(http.post(RERANK, json={**asked, "max_tokens_per_doc": 40}))
    assert reply["skim"] == {"scorer": "lexical"}
    assert [one["index"] for one in reply["results"]] == [1, 0, 2]
    assert [one["relevance_score"] for one in reply["results"]] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": "x" * 257}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 17}, "documents"),
        ({"documents": ["a" * 3000]}, "documents"),
        ({"documents": ["a" * 50_000]}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents[0].text"),
        ({"documents": [1]}, "documents[0]"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"skim": {"scorer": "best"}}, "skim.scorer"),
        ({"skim": {"keep_ratio": 0.5}}, "skim.keep_ratio"),
        ({"documents": ["a" * 1500], "skim": {"scorer": "full"}}, "documents"),
        ({"model": "other"}, "model"),
    ],
)
def test_a_ranking_that_cannot_be_served_names_the_field(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    reply = http.post(RERANK, json={"query": QUESTION, "documents": ["a", "b"], **change})
    assert reply.status_code == (404 if param == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == param


def test_a_scorer_that_fails_is_a_server_error(
    http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(llm.engine.core.planner, "_scorers", broken)
    reply = http.post(RERANK, json={"query": QUESTION, "documents": ["a"]})
    assert reply.status_code == 500
    assert "boom" in reply.json()["error"]["message"]


# -- a task's life


def test_a_client_that_leaves_ends_its_ranking(http: httpx.Client, llm: LLM, server: LiveServer) -> None:
    with held_engine(llm) as go, server.client() as leaving:
        with pytest.raises(httpx.ReadTimeout):
            leaving.post(RERANK, json={"query": QUESTION, "documents": PASSAGES}, timeout=0.5)
        eventually(lambda: server.service.capacity.sequences == 0)
        go.set()
    eventually(lambda: len(llm.engine.core.lifecycle.plans) == 0)


def test_a_ranking_counts_against_the_capacity(http: httpx.Client, llm: LLM, server: LiveServer) -> None:
    capacity = server.service.capacity
    asked = {"query": QUESTION, "documents": PASSAGES}
    with held_engine(llm) as go:
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(http.post(RERANK, json=asked)))
        thread.start()
        eventually(lambda: capacity.tokens > 0)
        assert capacity.sequences == 1
        capacity.take_sequences(capacity.max_sequences - 1)
        try:
            with server.client() as other:
                refused = other.post(RERANK, json=asked)
        finally:
            capacity.release_sequences(capacity.max_sequences - 1)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        go.set()
        thread.join(60)
    ok(replies[0])


def test_running_rows_go_on_while_documents_are_ranked(
    http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two slices of the ranking there is a step of the other request."""
    core, plans = llm.engine.core, llm.engine.core.lifecycle.plans
    advance, launch = plans.advance, core._launch
    seen: list[str] = []

    def slice_of_ranking(may_run: Any) -> bool:
        seen.append("s" if len(plans) else "")
        return advance(may_run)

    def step(*args: Any) -> Any:
        seen.append(".")
        return launch(*args)

    monkeypatch.setattr(plans, "advance", slice_of_ranking)
    monkeypatch.setattr(core, "_launch", step)
    monkeypatch.setattr(core, "_plan_seconds", 0.0)
    talk = {"prompt": "abc", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "model": NAME}
    with slow_steps(llm, 0.005):
        thread = threading.Thread(target=lambda: ok(http.post("/v1/completions", json=talk)))
        thread.start()
        eventually(lambda: llm.stats().running == 1)
        ok(http.post(RERANK, json={"query": QUESTION, "documents": PASSAGES * 2}))
        assert llm.stats().running == 1
        thread.join(60)
    order = "".join(seen)
    assert order.count("s") > 3
    assert "ss" not in order, order


def test_a_ranking_that_takes_too_long_ends_with_408(llm: LLM) -> None:
    with LiveServer(llm, request_timeout=0.3) as server, server.client() as http:
        with held_engine(llm):
            reply = http.post(RERANK, json={"query": QUESTION, "documents": PASSAGES})
        assert reply.status_code == 408
        eventually(lambda: len(llm.engine.core.lifecycle.plans) == 0)
        assert server.service.capacity.sequences == server.service.capacity.tokens == 0


def test_tasks_are_in_metrics(http: httpx.Client) -> None:
    tokens = ok(http.post(RERANK, json={"query": QUESTION, "documents": ["a"]}))["usage"]["total_tokens"]
    lines = http.get("/metrics").text.splitlines()
    counted = next(one for one in lines if one.startswith("skim:task_tokens_total{") and 'task="rank"' in one)
    assert float(counted.split()[-1]) >= tokens
    assert any(one.startswith("skim:task_seconds_count{") and 'task="rank"' in one for one in lines)


# -- plans


def test_a_plan_is_that_of_a_skimmed_request(http: httpx.Client) -> None:
    reply = ok(http.post(SKIM, json={"model": NAME, "messages": messages(document()), "max_tokens": 8}))
    chat = ok(http.post("/v1/chat/completions", json=body(skim={"report": "spans"})))
    assert reply["spans"] == chat["skim"]["spans"]
    assert reply["question"] == chat["skim"]["question"] == QUESTION
    assert reply["usage"]["prompt_tokens"] == chat["skim"]["prompt_tokens"]
    assert reply["usage"]["kept_tokens"] == chat["skim"]["kept_tokens"] < chat["skim"]["prompt_tokens"]
    assert reply["scorer"] == "blend"
    assert reply["budget"] == {"setting": "keep", "value": "auto"}
    assert reply["fallback"] is reply["problem"] is None
    assert {one["reason"] for one in reply["spans"]} <= set(Reason)


@pytest.mark.parametrize("keep", [0.2, 0.5, 1.0])
def test_kept_messages_have_the_read_texts_in_order(http: httpx.Client, keep: float) -> None:
    text = document()
    given = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": QUESTION},
    ]
    options = {"keep_ratio": keep, "scorer": "lexical"}
    reply = ok(http.post(SKIM, json={"messages": given, "gap": "\x00", "skim": options}))
    kept, skipped = reply["messages"], reply["skipped_chars"]
    assert [one["role"] for one in kept] == [one["role"] for one in given]
    assert [kept[i] for i in (0, 2, 3)] == [given[i] for i in (0, 2, 3)]
    pieces = [piece for piece in kept[1]["content"].split("\x00") if piece]
    assert len(text) == sum(map(len, pieces)) + skipped[1]
    at = 0
    for piece in pieces:
        at = text.index(piece, at) + len(piece)
    assert (skipped[1] == 0) == (keep == 1.0)
    assert "code for the Oslo office" in kept[1]["content"]
    read = "".join(span["text"] for span in reply["spans"])
    assert all(piece in read for piece in pieces)
    assert reply["budget"] == {"setting": "keep_ratio", "value": keep}


def test_the_default_gap_stands_on_its_own_line(http: httpx.Client) -> None:
    reply = ok(http.post(SKIM, json={"messages": messages(document()), "skim": {"keep_ratio": 0.3}}))
    assert "\n[...]\n" in reply["messages"][0]["content"]


def test_a_prompt_without_a_plan_is_kept_whole_with_the_reason(http: httpx.Client) -> None:
    given = messages(document(), "Summarize the whole text.")
    reply = ok(http.post(SKIM, json={"messages": given}))
    assert (reply["fallback"], reply["spans"]) == ("whole", None)
    assert reply["messages"] == given
    assert reply["usage"]["kept_tokens"] == reply["usage"]["prompt_tokens"]
    short = ok(
        http.post(
            SKIM, json={"messages": given, "skim": {"sparse_prefill": "auto", "min_prompt_tokens": 10**6}}
        )
    )
    assert short["spans"] is None


def test_a_plan_leaves_no_trace(http: httpx.Client, llm: LLM) -> None:
    """The chat that follows is planned as if there had been no plan before."""
    llm.engine.reset_prefix_cache()
    ok(http.post(SKIM, json={"messages": messages(document())}))
    assert llm.stats().pool.live == llm.stats().pool.evictable == 0
    follow = [*messages(document()), {"role": "assistant", "content": "16979"}, *messages("Well.", QUESTION)]
    assert ok(http.post("/v1/chat/completions", json=body(follow)))["skim"]["follow_up"] is None


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"skim": {"sparse_prefill": "off"}}, "skim.sparse_prefill"),
        ({"skim": {"progress": True}}, "skim.progress"),
        ({"skim": {"keep_ratio": 2}}, "skim.keep_ratio"),
        ({"gap": "x" * 257}, "gap"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_plan_that_cannot_be_made_names_the_field(
    http: httpx.Client, change: dict[str, Any], param: str
) -> None:
    reply = http.post(SKIM, json={"messages": messages(document()), **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_prompt_that_chat_would_refuse_is_refused(http: httpx.Client) -> None:
    given = messages(document(3000), "Summarize the whole text.")
    options = {"positions": "original"}
    asked, chat = (
        http.post(SKIM, json={"messages": given, "skim": options}),
        http.post("/v1/chat/completions", json=body(given, skim={**options, "sparse_prefill": "always"})),
    )
    assert asked.status_code == chat.status_code == 400
    assert asked.json()["error"]["code"] == chat.json()["error"]["code"] == "context_length_exceeded"


def test_a_drain_ends_plans_that_still_run(llm: LLM) -> None:
    with LiveServer(llm) as server, server.client() as http:
        with held_engine(llm):
            replies: list[httpx.Response] = []
            asked = {"messages": messages(document())}
            thread = threading.Thread(target=lambda: replies.append(http.post(SKIM, json=asked)))
            thread.start()
            eventually(lambda: server.service.capacity.tokens > 0)
            server.loop.call_soon_threadsafe(server.service.cut_off)
            thread.join(30)
        assert replies[0].status_code == 503
        assert server.service.capacity.sequences == 0
