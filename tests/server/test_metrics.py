"""`/metrics` of a live server with a small random model: names and meanings are vLLM's, under `skim:`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from skim import LLM
from skim.config import DecodeConfig
from skim.server.metrics import engine, registry
from tests import tiny
from tests.live import NAME, LiveServer, slow_steps

COMPLETE = "/v1/completions"
ENDLESS = {"model": NAME, "prompt": "once", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with LLM(path, progress=False, kv_memory="8M", max_num_seqs=8) as llm:
        yield llm


@pytest.fixture
def http(llm: LLM) -> Iterator[httpx.Client]:
    """A client of a new server: its request metrics begin at 0, the engine's do not."""
    with LiveServer(llm) as server, server.client() as http:
        yield http


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry these labels."""
    total = 0.0
    for line in http.get("/metrics").text.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == f"skim:{name}" and all(
            f'{k}="{v}"' in sample for k, v in labels.items()
        ):
            total += float(value)
    return total


def test_metrics_count_requests_and_tokens(http: httpx.Client, llm: LLM) -> None:
    generated = metric(http, "generation_tokens_total")
    for _ in range(2):
        body = {"model": NAME, "prompt": "m" * 64, "max_tokens": 5, "ignore_eos": True}
        assert http.post(COMPLETE, json=body).status_code == 200
    http.post(COMPLETE, json={"model": NAME, "prompt": ""})
    http.post(COMPLETE, json={"model": "other", "prompt": "a"})
    http.post(COMPLETE, json={**ENDLESS, "max_tokens": 1, "skim": {"use_prefix_cache": False}})
    assert metric(http, "generation_tokens_total") == generated + 11
    assert metric(http, "time_to_first_token_seconds_count") == 3
    assert metric(http, "inter_token_latency_seconds_count") == 8
    assert metric(http, "request_time_per_output_token_seconds_count") == 2
    for phase in ("queue", "prefill", "decode"):
        assert metric(http, f"request_{phase}_time_seconds_count") == 3
    assert metric(http, "e2e_request_latency_seconds_count") == 3
    assert metric(http, "prompt_tokens_total") == 64 + 64 + 4
    assert metric(http, "prompt_tokens_cached_total") >= 48
    assert metric(http, "request_success_total", finished_reason="length") == 3
    assert metric(http, "request_failures_total", reason="invalid") == 1
    assert metric(http, "request_failures_total", reason="unknown_model") == 1
    assert metric(http, "prefix_cache_bypasses_total", reason="request") >= 1
    assert metric(http, "prefix_cache_hits_total") >= 48
    assert metric(http, "prefix_cache_queries_total") >= 128
    assert metric(http, "num_requests_running") == metric(http, "num_requests_waiting") == 0
    assert metric(http, "kv_cache_usage_perc") == 0
    assert metric(http, "num_preemptions_total") == llm.stats().preemptions


def histogram(http: httpx.Client, name: str) -> tuple[dict[float, float], float]:
    """A histogram's counts by upper bound, cumulative, and the sum of its values."""
    counts = {
        float(bound): float(count)
        for bound, count in re.findall(
            rf'^skim:{name}_bucket{{le="([^"]+)",[^}}]*}} (\S+)$', http.get("/metrics").text, re.MULTILINE
        )
    }
    assert sorted(counts) == list(counts)
    assert metric(http, f"{name}_count") == counts[math.inf]
    return counts, metric(http, f"{name}_sum")


def test_metrics_show_the_sizes_of_requests(http: httpx.Client, llm: LLM) -> None:
    """Names and meanings are vLLM's, whose dashboards ask for them."""
    for size, given in ((64, {"max_tokens": 5, "n": 3}), (30, {"max_tokens": 2})):
        body = {"model": NAME, "prompt": "m" * size, "ignore_eos": True, **given}
        assert http.post(COMPLETE, json=body).status_code == 200
    unlimited = {"model": NAME, "messages": [{"role": "user", "content": "m" * 200}], "stop": ["a", "e", "s"]}
    usage = http.post("/v1/chat/completions", json=unlimited).json()["usage"]
    asked, free = usage["prompt_tokens"], usage["completion_tokens"]
    counts, total = histogram(http, "request_prompt_tokens")
    assert (counts[20], counts[50], counts[100], total) == (0, 1, 2, 64 + 30 + asked)
    assert list(counts)[:5] == [1, 2, 5, 10, 20]
    assert histogram(http, "request_generation_tokens")[1] == 3 * 5 + 2 + free
    counts, total = histogram(http, "request_params_n")
    assert (counts, total) == ({1: 2, 2: 2, 5: 3, 10: 3, 20: 3, math.inf: 3}, 5)
    counts, total = histogram(http, "request_params_max_tokens")
    assert (counts[1], counts[2], counts[5], counts[math.inf], total) == (0, 1, 2, 2, 5 + 2)
    running = metric(http, "request_inference_time_seconds_sum")
    phases = [metric(http, f"request_{phase}_time_seconds_sum") for phase in ("prefill", "decode")]
    assert running == pytest.approx(sum(phases))
    assert metric(http, "request_inference_time_seconds_count") == 3


def test_metrics_show_the_sizes_of_steps(http: httpx.Client, llm: LLM) -> None:
    before, tokens = histogram(http, "iteration_tokens_total")
    fresh = {"use_prefix_cache": False}
    body = {"model": NAME, "prompt": "s" * 40, "max_tokens": 6, "ignore_eos": True, "skim": fresh}
    assert http.post(COMPLETE, json=body).status_code == 200
    after, total = histogram(http, "iteration_tokens_total")
    change = {bound: after[bound] - before[bound] for bound in after}
    assert list(change) == [1, *(2**power for power in range(3, 15)), math.inf]
    assert total - tokens == 40 + 5
    assert (change[1], change[32], change[64], change[math.inf]) == (5, 5, 6, 6)
    assert after[math.inf] == metric(http, "engine_steps_total") == llm.stats().steps


def test_metrics_show_the_settings_of_the_cache(http: httpx.Client, llm: LLM) -> None:
    blocks, size = str(llm.stats().pool.capacity), str(llm.engine.core.memory.pool.block_size)
    labels = {"num_gpu_blocks": blocks, "block_size": size, "cache_dtype": "auto"}
    assert metric(http, "cache_config_info", enable_prefix_caching="True", **labels) == 1


def test_the_kv_format_and_its_bytes_are_shown(llm: LLM) -> None:
    memory = replace(llm.config.memory, kv_cache_dtype="int8")
    with llm.with_settings(replace(llm.config, memory=memory)) as small:
        for shown, name, size in (
            (llm, "float32", 4 * 2 * 2 * 16 * 4),
            (small, "int8", 4 * 2 * 2 * (16 + 4)),
        ):
            with LiveServer(shown) as server, server.client() as http:
                body = {"model": NAME, "prompt": "m" * 40, "max_tokens": 5, "ignore_eos": True}
                report = http.post(COMPLETE, json=body).json()["skim"]
                assert (report["kv_format"], report["kv_bytes"]) == (name, 45 * size)
                kv = http.get("/health").json()["kv"]
                assert (kv["format"], kv["bytes_per_token"]) == (name, size)
                assert kv["used_bytes"] == metric(http, "kv_cache_used_bytes") > 0
                assert kv["reserved_bytes"] >= kv["used_bytes"]
                assert metric(http, "kv_cache_bytes_per_token") == size
                assert metric(http, "cache_config_info", cache_dtype="auto" if shown is llm else "int8") == 1


def test_slow_and_fast_steps_are_shown_and_a_request_may_override_them(llm: LLM) -> None:
    decode = DecodeConfig(slow_fast="on", decode_budget=64, refresh_interval=10)
    body = {"model": NAME, "prompt": "m" * 500, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    with LiveServer(llm) as server, server.client() as http:
        dense = http.post(COMPLETE, json=body).json()
        assert dense["skim"]["decode"] is None
        refused = http.post(COMPLETE, json={**body, "skim": {"slow_fast": "on"}})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "skim.slow_fast"
        assert error["message"].startswith("skim.slow_fast 'on' needs an engine that started with slow-fast")
        assert http.get("/health").json()["decode"]["slow"] == 0
    with (
        llm.with_settings(replace(llm.config, decode=decode)) as other,
        LiveServer(other) as server,
        server.client() as http,
    ):
        report = http.post(COMPLETE, json=body).json()["skim"]["decode"]
        assert report["slow"] == sum(report["refreshes"].values()) >= 4
        assert report["slow"] + report["fast"] - report["refreshes"].get("margin", 0) == 39
        assert 0 < report["blocks_read"] < report["blocks"]
        assert 0 < report["mean_mass"] <= 1
        off = http.post(COMPLETE, json={**body, "skim": {"slow_fast": "off"}}).json()
        assert off["skim"]["decode"] is None
        assert off["choices"][0]["text"] == dense["choices"][0]["text"]
        each = http.post(COMPLETE, json={**body, "skim": {"refresh_interval": 1}}).json()
        assert each["skim"]["decode"]["fast"] == 0
        assert each["choices"][0]["text"] == dense["choices"][0]["text"]
        assert metric(http, "slow_fast_fast_rows_total") == report["fast"]
        assert metric(http, "slow_fast_slow_rows_total") == report["slow"] + 39
        assert metric(http, "slow_fast_refreshes_total", reason="first") == 2
        assert http.get("/health").json()["decode"]["fast"] == report["fast"]
        exact = {"slow_fast": "exact", "slow_fast_min_context": 1}
        same = http.post(COMPLETE, json={**body, "skim": exact}).json()
        assert same["choices"][0]["text"] == dense["choices"][0]["text"]
        drafts = same["skim"]["decode"]
        assert 0 < drafts["accepted"] <= drafts["drafted"] == drafts["fast"]
        assert metric(http, "slow_fast_drafted_total") == drafts["drafted"]
        assert metric(http, "slow_fast_accepted_total") == drafts["accepted"]
        assert http.get("/health").json()["decode"]["accepted"] == drafts["accepted"]


def test_a_row_in_a_table_adds_a_metric(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Follows "To add a metric" in `docs/architecture.md`."""
    gauge = ("kv_cache_blocks_free", "Free KV blocks.", lambda s: s.pool.free)
    counter = ("reply_tokens", "Tokens of finished replies.", lambda m: m.generated_tokens)
    monkeypatch.setattr(engine, "ENGINE_GAUGES", (*engine.ENGINE_GAUGES, gauge))
    monkeypatch.setattr(registry, "REQUEST_COUNTERS", (*registry.REQUEST_COUNTERS, counter))
    with LiveServer(llm) as server, server.client() as http:
        assert http.post(COMPLETE, json={**ENDLESS, "max_tokens": 3}).status_code == 200
        assert metric(http, "kv_cache_blocks_free") == llm.stats().pool.free > 0
        assert metric(http, "reply_tokens_total") == 3


def test_running_requests_show_in_the_metrics(http: httpx.Client, llm: LLM) -> None:
    with (
        slow_steps(llm, 0.01),
        http.stream("POST", COMPLETE, json={**ENDLESS, "n": 3, "stream": True}) as reply,
    ):
        lines = reply.iter_lines()  # a reference keeps the stream open
        next(lines)
        assert metric(http, "num_requests_running") == 3
        assert metric(http, "kv_cache_usage_perc") > 0
