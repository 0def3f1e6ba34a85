"""Skimmed requests over HTTP: overrides, reports and metrics; and scorer errors at start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import ByT5Tokenizer

from skim import LLM, SamplingParams
from skim.attention.blocksparse.policy import visible_blocks
from skim.errors import ConfigError
from skim.prefill.plan import Reason
from skim.prefill.scoring.calibration import FILE_NAME, Calibration
from skim.registry import scorers
from skim.server.logs import JsonFormatter
from tests import paths, tiny
from tests.broken import FAILURES, Broken
from tests.live import NAME, LiveServer, eventually

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
NEEDLE = "The access code for the Oslo office is 16979."
QUESTION = "What is the access code for the Oslo office?"
FOLLOW_UP = "And what did the sailor in the third boat say?"
BOOK = paths.BOOK.encode()
SETTINGS: dict[str, Any] = {  # for a byte-level model with a context window of 1,024 tokens
    "sparse_prefill": "auto",
    "min_prompt_tokens": 300,
    "scorer": "lexical",
    "prefill_block_size": 16,
    "head_tokens": 16,
    "tail_tokens": 16,
    "min_scored_tokens": 32,
    "kv_memory": "8M",
}


def document(size: int = 600) -> str:
    text = BOOK[5000 : 5000 + size].decode("ascii", "replace").replace("\ufffd", "-")
    at = text.index(" ", size * 2 // 3)
    return f"{text[:at]} {NEEDLE}{text[at:]}"


def messages(text: str, question: str = QUESTION) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": part} for part in (text, question)]}]


def body(conversation: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "messages": conversation or messages(document()),
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def http(llm: LLM) -> Iterator[httpx.Client]:
    with LiveServer(llm) as server, server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def clean_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts with an empty prefix cache and leaves no KV block in use."""
    engine = request.getfixturevalue("llm").engine if "http" in request.fixturenames else None
    yield
    if engine is not None:
        engine.reset_prefix_cache()
        assert engine.stats().pool.live == 0


def post(http: httpx.Client, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    reply = http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def said(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


class Counted:
    """Changes of the sparse prefill metrics since construction."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._before = self._read()

    def _read(self) -> dict[str, float]:
        """Values by short name: `activations`, `fallbacks scorer_failed` and so on."""
        found = {}
        for line in self._http.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            name, _, labels = sample.partition("{")
            if name.startswith("skim:sparse_prefill_") and name.endswith("_total"):
                _, _, reason = labels.partition('reason="')
                short = name.removeprefix("skim:sparse_prefill_").removesuffix("_total")
                found[f"{short} {reason.partition(chr(34))[0]}".strip()] = float(value)
        return found

    def since(self) -> dict[str, float]:
        """The metrics that changed, and by how much."""
        now = self._read()
        moved = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        return {name: value for name, value in moved.items() if value}


# -- overrides


def test_the_openapi_document_lists_the_scorers(http: httpx.Client) -> None:
    options = http.get("/openapi.json").json()["components"]["schemas"]["SkimOptions"]["properties"]
    [named] = [one for one in options["scorer"]["anyOf"] if one.get("type") == "string"]
    assert named["enum"] == list(scorers())


@pytest.mark.parametrize("scorer", scorers())
def test_a_request_may_choose_any_scorer(http: httpx.Client, scorer: str) -> None:
    counted = Counted(http)
    report = post(http, **body(skim={"scorer": scorer, "keep_tokens": 200, "rescue_cap": 0}))["skim"]
    assert (report["scorer"], report["fallback"]) == (scorer, None)
    assert report["kept_tokens"] <= 200
    assert counted.since()["activations"] == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_ratio", 1.7),
        ("keep_ratio", 0),
        ("keep_tokens", 0),
        ("keep_mass", 1.1),
        ("scorer", "nope"),
        ("scorer", 3),
        ("rescue_cap", -0.1),
        ("rescue_cap", 1.5),
        ("prefill_block_size", 0),
        ("sparse_prefill", "maybe"),
        ("positions", "left"),
        ("follow_up", "never"),
        ("tool_results", "drop"),
        ("report", "everything"),
        ("prefill_attention", "sparse"),
        ("blocksparse_alpha", 1.5),
        ("blocksparse_alpha", "high"),
        ("drafter", "another-model"),
        ("drafter_dtype", "float16"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_an_invalid_override_is_refused_by_name(http: httpx.Client, path: str, name: str, value: Any) -> None:
    counted = Counted(http)
    asked = body() if path == CHAT else {"model": NAME, "prompt": document()}
    reply = http.post(path, json={**asked, "skim": {name: value}})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (f"skim.{name}", "invalid_request_error")
    assert error["message"].startswith(f"skim.{name}")
    assert repr(value) in error["message"] or error["code"] == "unsupported_parameter"
    if name == "scorer" and isinstance(value, str):
        assert all(scorer in error["message"] for scorer in scorers())
    assert counted.since() == {}


def test_overrides_that_contradict_server_settings_are_refused(http: httpx.Client) -> None:
    reply = http.post(CHAT, json=body(skim={"keep_tokens": 20}))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "skim"
    assert "skim.head_tokens 16 and skim.tail_tokens 16 are more than skim.keep_tokens 20" in error["message"]


# -- reports and metrics


def test_a_skimmed_reply_reports_what_was_read_and_metrics_count_it(http: httpx.Client) -> None:
    counted = Counted(http)
    reply = post(http, **body(skim={"sparse_prefill": "always", "keep_tokens": 200}))
    report = reply["skim"]
    prompt = report["prompt_tokens"]
    assert prompt == reply["usage"]["prompt_tokens"] > 600
    assert 100 < report["kept_tokens"] <= 200
    assert (report["scorer"], report["fallback"], report["follow_up"]) == ("lexical", None, None)
    assert report["scoring_ms"] > 0
    assert report["generated_tokens"] == 8
    blocks = counted.since()
    assert blocks.keys() == {"activations", "blocks", "blocks_kept"}
    assert (blocks["activations"], blocks["blocks"]) == (1, -(-prompt // 16))
    assert blocks["blocks_kept"] == -(-report["kept_tokens"] // 16)
    text = http.get("/metrics").text
    assert "skim:request_scoring_time_seconds_count" in text
    assert "skim:prompt_tokens_kept_total" in text


def test_a_skimmed_reply_names_its_question_and_on_request_its_spans(http: httpx.Client) -> None:
    told = [{"role": "system", "content": f"Be brief. {QUESTION}"}, {"role": "user", "content": document()}]
    reply = post(http, **body(told, skim={"keep_tokens": 200}))["skim"]
    assert reply["question"].splitlines()[0] == QUESTION
    assert reply["spans"] is None
    spans = post(http, **body(skim={"keep_tokens": 200, "report": "spans"}))["skim"]["spans"]
    assert spans[0]["start"] == 0
    assert {span["reason"] for span in spans} <= set(Reason)
    assert all(span["end"] - span["start"] == len(span["text"].encode()) for span in spans[1:-1])
    assert sum(span["end"] - span["start"] for span in spans) <= 200
    assert any(QUESTION in span["text"] for span in spans)
    dense = post(http, **body(skim={"sparse_prefill": "off", "report": "spans"}))["skim"]
    assert (dense["question"], dense["spans"]) == (None, None)


def test_texts_of_a_prompt_are_not_logged(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="skim.requests")
    reply = http.post(CHAT, json=body(skim={"keep_tokens": 200, "report": "spans"}))
    assert "Oslo" in reply.text

    def line() -> str:
        lines = [JsonFormatter().format(record) for record in caplog.records]
        return "".join(one for one in lines if reply.headers["x-request-id"] in one)

    eventually(lambda: bool(line()))
    assert "kept_tokens" in line()
    assert "Oslo" not in line()


def test_a_prompt_that_asks_nothing_is_read_in_full_and_counted(http: httpx.Client) -> None:
    counted = Counted(http)
    report = post(http, **body([{"role": "user", "content": "The sea is wide. " * 40}]))["skim"]
    assert (report["fallback"], report["question"]) == ("no_question", None)
    assert counted.since() == {"fallbacks no_question": 1}


def test_a_long_prompt_that_asks_nothing_is_covered_evenly_and_names_no_question(http: httpx.Client) -> None:
    told = [{"role": "user", "content": "The sea is wide. " * 100}]
    report = post(http, **body(told, skim={"report": "spans"}))["skim"]
    assert report["question"] is None
    assert {span["reason"] for span in report["spans"]} == {"pinned", "even"}
    assert http.post("/v1/skim", json={"messages": told}).json()["question"] is None


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_has_the_report_on_its_last_chunk(
    http: httpx.Client, path: str, include_usage: bool
) -> None:
    asked = body() if path == CHAT else {**body(), "prompt": document()}
    if path == COMPLETE:
        del asked["messages"]
    if include_usage:
        asked["stream_options"] = {"include_usage": True}
    skim = {"sparse_prefill": "always", "keep_tokens": 200, "report": "spans"}
    with http.stream("POST", path, json={**asked, "stream": True, "skim": skim}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines[:-1]]
    assert not any("skim" in chunk for chunk in chunks)
    report = last["skim"]
    assert report["kept_tokens"] <= 200 < report["prompt_tokens"]
    assert (report["scorer"], report["scoring_ms"] > 0) == ("lexical", True)
    assert sum(span["end"] - span["start"] for span in report["spans"]) == report["kept_tokens"]
    assert report["question"]
    assert not include_usage or last["usage"]["prompt_tokens"] == report["prompt_tokens"]


def test_health_shows_the_counters_of_sparse_prefill(http: httpx.Client, llm: LLM) -> None:
    before = http.get("/health").json()["prefill"]
    post(http, **body(skim={"keep_tokens": 200}))
    health = http.get("/health").json()
    assert health["status"] == "ok"
    after = health["prefill"]
    assert after["activations"] == before["activations"] + 1
    assert 0 < after["blocks_kept"] - before["blocks_kept"] < after["blocks_total"] - before["blocks_total"]
    stats = llm.stats().prefill
    assert (after["activations"], after["below_threshold"]) == (stats.activations, stats.below_threshold)
    assert (after["fallbacks"], after["follow_ups"]) == (dict(stats.fallbacks), dict(stats.follow_ups))


def test_tiles_read_by_block_sparse_attention_are_counted(http: httpx.Client, llm: LLM) -> None:
    """All key blocks here: the prompt is no longer than the part that is always read."""

    def counts() -> dict[str, float]:
        samples = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines()]
        return {
            name.removeprefix("skim:blocksparse_"): float(value)
            for name, _, value in samples
            if name.startswith("skim:blocksparse_") and "_total{" in name
        }

    dense = post(http, **body(skim={"sparse_prefill": "off"}))
    before = counts()
    reply = post(http, **body(skim={"sparse_prefill": "off", "prefill_attention": "blocksparse"}))
    assert said(reply) == said(dense)
    assert reply["skim"]["cached_tokens"] == 0
    moved = {
        name.partition("{")[0] + name.partition("reason")[2]: value - before.get(name, 0.0)
        for name, value in counts().items()
    }
    tokens, budget = dense["usage"]["prompt_tokens"], llm.engine.core.limits.tokens
    chunks = [(at, min(budget, tokens - at)) for at in range(0, tokens, budget)]
    blocks = 4 * 4 * sum(visible_blocks(*chunk) for chunk in chunks)  # 4 heads x 4 layers
    assert moved == {
        "blocks_total": blocks,
        "blocks_read_total": blocks,
        'chunks_total="short"}': 4 * len(chunks),
    }


def test_auto_reads_a_short_prompt_in_full_and_counts_it(http: httpx.Client) -> None:
    counted = Counted(http)
    report = post(http, **body(messages(document(100))))["skim"]
    assert report["kept_tokens"] == report["prompt_tokens"] < 300
    assert (report["scorer"], report["fallback"], report["scoring_ms"]) == (None, None, 0)
    assert counted.since() == {"below_threshold": 1}
    assert post(http, **body())["skim"]["scorer"] == "lexical"
    assert post(http, **body(skim={"min_prompt_tokens": 5000}))["skim"]["scorer"] is None
    assert post(http, **body(skim={"sparse_prefill": "off"}))["skim"]["scorer"] is None
    assert {name: counted.since()[name] for name in ("activations", "below_threshold")} == {
        "activations": 1,
        "below_threshold": 2,
    }


def test_a_prompt_beyond_the_context_window_is_skimmed_or_refused(http: httpx.Client) -> None:
    asked = {"model": NAME, "prompt": document(4000), "max_tokens": 4}
    report = post(http, COMPLETE, **asked, skim={"keep_tokens": 400})["skim"]
    assert report["prompt_tokens"] > 4000
    assert report["kept_tokens"] <= 400
    for skim in ({"sparse_prefill": "off"}, {"positions": "original"}):
        reply = http.post(COMPLETE, json={**asked, "skim": skim})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "a" * 3000,
            "?" * 3000,
            "\n" * 3000 + "a",
            "\x00\x01\ufffd" * 800,
            "<document>" * 300,
            "</document>" * 300,
        ),
        *(
            "Why? " * 600,
            QUESTION * 60,
            "<question>" + "a" * 3000 + "</question>",
            "<tool_response>" * 200,
            "```\n" * 900,
        ),
    ],
)
def test_no_text_is_a_server_error(http: httpx.Client, path: str, text: str) -> None:
    """It is skimmed, read in full if it fits, or refused because it does not fit."""
    asked: dict[str, Any] = body([{"role": "user", "content": text}])
    if path == COMPLETE:
        asked = {**asked, "prompt": text}
        del asked["messages"]
    for scorer in ("lexical", "blend"):
        reply = http.post(path, json={**asked, "skim": {"sparse_prefill": "always", "scorer": scorer}})
        if reply.status_code == 400:
            assert reply.json()["error"]["code"] == "context_length_exceeded"
        else:
            assert reply.status_code == 200


# -- follow-up questions


@pytest.mark.parametrize("how", ["backfill", "replan"])
def test_a_second_turn_reports_how_it_built_on_the_first(http: httpx.Client, how: str) -> None:
    skim = {"keep_tokens": 200, "follow_up": how, "cache_salt": how}
    first = post(http, **body(skim=skim))["skim"]
    counted = Counted(http)
    conversation = [
        *messages(document()),
        {"role": "assistant", "content": "It is 16979."},
        {"role": "user", "content": FOLLOW_UP},
    ]
    second = post(http, **body(conversation, skim=skim))["skim"]
    assert first["follow_up"] is None
    assert second["follow_up"].startswith(f"{how}: ")
    assert (second["scorer"], second["kept_tokens"] < second["prompt_tokens"]) == ("lexical", True)
    assert counted.since()[f"follow_ups {how}"] == 1
    if how == "backfill":
        assert second["cached_tokens"] >= first["kept_tokens"] // 2


# -- a failed scorer means a dense prefill


@pytest.mark.parametrize(("how", "reason"), FAILURES.items())
def test_a_scorer_that_fails_is_counted_by_reason_and_the_answer_is_the_dense_one(
    http: httpx.Client, llm: LLM, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    dense = post(http, **body(skim={"sparse_prefill": "off"}))
    llm.engine.reset_prefix_cache()
    assert said(post(http, **body())) != said(dense)
    llm.engine.reset_prefix_cache()
    monkeypatch.setattr(llm.engine.core.planner, "_scorers", lambda name: Broken(how))
    counted = Counted(http)
    reply = post(http, **body())
    assert said(reply) == said(dense)
    assert (reply["skim"]["fallback"], reply["skim"]["scorer"]) == (reason, None)
    assert reply["skim"]["kept_tokens"] == reply["skim"]["prompt_tokens"]
    assert counted.since() == {f"fallbacks {reason}": 1}
    assert http.get("/health").json()["prefill"]["fallbacks"][reason] > 0


# -- a scorer that cannot work is an error at start


def save_without_offsets(path: Path) -> Path:
    """Save a small model with a slow (Python) tokenizer, which has no offset mapping."""
    tiny.save("llama", path)
    template = tiny.tokenizer().chat_template
    for file in path.glob("*token*"):
        file.unlink()
    ByT5Tokenizer(chat_template=template).save_pretrained(path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path / "model")


@pytest.mark.parametrize(
    ("calibration", "message"),
    [("{", "is not JSON"), (Calibration((99,)).to_json(), "names layer 99 .* the model has 4 layers")],
    ids=["damaged", "of another model"],
)
@pytest.mark.parametrize("scorer", ["blend", "attention", "self"])
def test_a_calibration_that_cannot_be_used_is_an_error_at_start(
    model: Path, scorer: str, calibration: str, message: str
) -> None:
    (model / FILE_NAME).write_text(calibration)
    with pytest.raises(ConfigError, match=f"{FILE_NAME}.*{message}.*calibrate.*set another scorer") as raised:
        LLM(model, progress=False, **{**SETTINGS, "scorer": scorer})
    assert f"the scorer '{scorer}' cannot be used: " in str(raised.value)
    assert raised.value.fields == ("scorer",)


def test_a_scorer_that_only_a_request_asks_for_fails_with_the_request(model: Path) -> None:
    """The server's scorer needs no calibration, so a damaged one does not prevent the start."""
    (model / FILE_NAME).write_text("{")
    with LLM(model, progress=False, **SETTINGS) as llm, LiveServer(llm) as server, server.client() as http:
        dense = post(http, **body(skim={"sparse_prefill": "off"}))
        counted = Counted(http)
        reply = post(http, **body(skim={"scorer": "attention", "use_prefix_cache": False}))
        assert said(reply) == said(dense)
        assert (reply["skim"]["fallback"], reply["skim"]["scorer"]) == ("scorer_failed", None)
        assert counted.since() == {"fallbacks scorer_failed": 1}
        assert post(http, **body(skim={"use_prefix_cache": False}))["skim"]["scorer"] == "lexical"


def test_without_sparse_prefill_no_scorer_is_built_at_start(model: Path) -> None:
    (model / FILE_NAME).write_text("{")
    with LLM(model, progress=False, kv_memory="8M") as llm:
        assert llm.config.prefill.scorer == "blend"


def test_the_drafter_calibration_is_checked_if_the_drafter_scores(model: Path, tmp_path: Path) -> None:
    drafter = tiny.save("qwen3", tmp_path / "drafter")
    (drafter / FILE_NAME).write_text("{")
    settings = {**SETTINGS, "drafter": str(drafter)}
    with pytest.raises(ConfigError, match=f"{drafter / FILE_NAME} is not JSON"):
        LLM(model, progress=False, **{**settings, "scorer": "blend"})
    LLM(model, progress=False, **{**settings, "scorer": "self"}).close()


@pytest.mark.parametrize("role", ["drafter", "model"])
def test_a_tokenizer_without_offsets_is_an_error_at_start_if_they_are_needed(
    model: Path, tmp_path: Path, role: str
) -> None:
    without = save_without_offsets(tmp_path / "without")
    pair = {"model": model, "drafter": without} if role == "drafter" else {"model": without, "drafter": model}
    settings = {**SETTINGS, "drafter": str(pair["drafter"]), "scorer": "attention"}
    message = f"the {role} {without} has a tokenizer without character offsets, .*; choose a {role}"
    with pytest.raises(ConfigError, match=message) as raised:
        LLM(pair["model"], progress=False, **settings)
    assert raised.value.fields == ("scorer", role)
    LLM(pair["model"], progress=False, **{**settings, "scorer": "lexical"}).close()


def test_a_chat_with_a_tokenizer_without_offsets_is_read_in_full(tmp_path: Path) -> None:
    with LLM(save_without_offsets(tmp_path), progress=False, **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        [output] = llm.chat(messages(document()), params, use_tqdm=False)
        assert (output.plan, output.metrics.fallback) == (None, "unmappable")
