"""Sparse prefill end to end: its promises, on the default model and on small ones."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skim import LLM, RequestOutput, SamplingParams
from skim.config import EngineConfig, PrefillConfig
from skim.engine.sequence import Finished
from skim.errors import ConfigError, ModelError, PromptTooLongError
from skim.memory.prefix import Namespace
from skim.prefill.plan import DenseReason
from skim.prefill.planner import Planner
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.prefill.scorers.random import RandomScorer
from skim.prefill.scoring.decoding import decoder_of
from skim.prefill.scoring.scorer import ScoringTask
from skim.registry import scorers
from tests import paths, tiny
from tests.broken import FAILURES, Broken
from tests.fake import submit

BOOK = paths.BOOK.replace("\u2014", "-")
NEEDLE = "The access code for the Oslo office is 16979."
QUESTION = "What is the access code for the Oslo office?"
GREEDY = SamplingParams(temperature=0, max_tokens=16)
OFF = PrefillConfig()
SKIM = PrefillConfig(
    sparse_prefill="always",
    scorer="lexical",
    keep_ratio=0.2,
    head_tokens=32,
    tail_tokens=32,
    min_scored_tokens=64,
)


def document(words: int, start: int = 5000, needle: str = NEEDLE) -> str:
    text = BOOK[start:].split()[:words]
    text.insert(len(text) * 2 // 3, needle)
    return " ".join(text)


def messages(text: str, question: str = QUESTION, system: str | None = None) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text}, {"type": "text", "text": question}]
    told = [{"role": "system", "content": system}] if system is not None else []
    return [*told, {"role": "user", "content": parts}]


@pytest.fixture(
    scope="module", params=["sketch_dir", pytest.param("default_model_dir", marks=pytest.mark.slow)]
)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(request.getfixturevalue(request.param), progress=False, kv_memory="256M") as llm:
        yield llm


@pytest.fixture(scope="module")
def real(default_model_dir: Path) -> Iterator[LLM]:
    with LLM(default_model_dir, progress=False, kv_memory="256M") as llm:
        yield llm


@pytest.fixture
def small(tmp_path: Path) -> Iterator[LLM]:
    with LLM(tiny.save("llama", tmp_path), progress=False, kv_memory="4M") as llm:
        yield llm


@pytest.fixture(autouse=True)
def clean_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts without cached prefixes and must leave no block in use."""
    engines = [
        request.getfixturevalue(name).engine
        for name in ("llm", "real", "small")
        if name in request.fixturenames
    ]
    yield
    for engine in engines:
        if engine.dead is None:
            stats = engine.stats()
            assert stats.pool.live == stats.pool.evictable
            engine.reset_prefix_cache()
            engine.core.memory.check()
            assert engine.stats().pool.live == 0


def ask(llm: LLM, conversation: list[dict[str, Any]], prefill: PrefillConfig = OFF) -> RequestOutput:
    return llm.chat(conversation, GREEDY, prefill=prefill, use_tqdm=False)[0]


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


# -- keeping everything is dense


@pytest.mark.parametrize("scorer", scorers())
def test_keeping_everything_is_token_identical_to_dense(llm: LLM, scorer: str) -> None:
    conversation = messages(document(250))
    dense = ask(llm, conversation)
    llm.engine.reset_prefix_cache()
    everything = ask(llm, conversation, replace(SKIM, scorer=scorer, keep_ratio=1.0))
    assert everything.outputs[0].token_ids == dense.outputs[0].token_ids
    assert everything.metrics.kept_tokens == everything.metrics.prompt_tokens
    assert everything.plan is not None
    assert everything.plan.scorer == scorer


@pytest.mark.parametrize("positions", ["auto", "original"])
def test_keeping_everything_is_dense_up_to_the_end_of_the_context_window(small: LLM, positions: str) -> None:
    """A prompt that fits is read at its original positions, even if the reply has no length limit."""
    window = small.engine.model.max_positions
    prompt = BOOK[: window - 8]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [dense] = small.generate(prompt, params, use_tqdm=False)
    small.engine.reset_prefix_cache()
    config = replace(SKIM, keep_ratio=1.0, positions=positions)
    [everything] = small.generate(prompt, params, prefill=config, use_tqdm=False)
    assert everything.outputs[0].token_ids == dense.outputs[0].token_ids
    assert everything.metrics.kept_tokens == everything.metrics.prompt_tokens
    assert everything.plan is not None
    assert everything.plan.positions == "original"


def test_off_never_plans(llm: LLM) -> None:
    before = llm.stats().prefill.activations
    assert ask(llm, messages(document(100))).plan is None
    assert llm.stats().prefill.activations == before


# -- the prefix cache


def test_dense_and_sparse_requests_do_not_change_each_other(llm: LLM) -> None:
    conversation = messages(document(400))
    dense = text_of(ask(llm, conversation))
    llm.engine.reset_prefix_cache()
    sparse = text_of(ask(llm, conversation, SKIM))
    assert text_of(ask(llm, conversation)) == dense  # after a sparse one
    assert text_of(ask(llm, conversation, SKIM)) == sparse  # after a dense one
    llm.engine.reset_prefix_cache()
    assert text_of(ask(llm, conversation)) == dense
    assert text_of(ask(llm, conversation, SKIM)) == sparse


def test_the_prefix_before_the_first_gap_is_shared_both_ways(llm: LLM) -> None:
    conversation = messages(document(400), system="You answer briefly. " * 12)
    first = ask(llm, conversation, SKIM)
    assert first.plan is not None
    gap = first.plan.first_gap
    assert 0 < gap < first.metrics.prompt_tokens
    shared = gap - gap % 16
    assert ask(llm, conversation).metrics.cached_tokens == shared
    llm.engine.reset_prefix_cache()
    ask(llm, conversation)
    assert ask(llm, conversation, SKIM).metrics.cached_tokens == shared


def test_the_same_question_asked_twice_hits_the_cache(llm: LLM) -> None:
    conversation = messages(document(400))
    first = ask(llm, conversation, SKIM)
    again = ask(llm, conversation, SKIM)
    assert first.metrics.cached_tokens == 0
    assert again.metrics.cached_tokens >= first.metrics.kept_tokens - 16
    assert text_of(again) == text_of(first)


# -- pinned text


def test_system_text_tools_and_question_are_always_kept(llm: LLM) -> None:
    system = "The password of the day is albatross. " * 10
    tool = {"role": "user", "content": "<tool_response>\nwind 12 knots\n</tool_response>"}
    conversation = messages(document(500), system=system)
    conversation[1:1] = [tool, {"role": "assistant", "content": "Noted."}]
    config = replace(SKIM, keep_ratio=0.01, head_tokens=0, tail_tokens=0, min_scored_tokens=64)
    prompt, planned = llm.plan(conversation, prefill=config)
    assert planned.plan is not None
    kept = llm.tokenizer.decode([prompt.tokens[i] for i in planned.plan.token_indices()])
    assert kept.count("albatross") == 10
    assert "wind 12 knots" in kept
    assert QUESTION in kept
    assert kept.endswith("<|im_start|>assistant\n")
    assert planned.plan.ratio < 0.5


# -- the dense fallback


@pytest.mark.parametrize(("how", "reason"), FAILURES.items())
def test_a_failing_scorer_leads_to_dense_prefill(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, reason: str
) -> None:
    conversation = messages(document(200))
    dense = ask(llm, conversation)
    llm.engine.reset_prefix_cache()
    monkeypatch.setattr(llm.engine.core.planner, "_scorers", lambda name: Broken(how))
    before = llm.stats().prefill
    with caplog.at_level(logging.WARNING, logger="skim.prefill.planner"):
        output = ask(llm, conversation, SKIM)
    assert output.outputs[0].token_ids == dense.outputs[0].token_ids
    assert (output.metrics.fallback, output.plan, output.metrics.scorer) == (reason, None, None)
    assert output.metrics.kept_tokens == output.metrics.prompt_tokens
    after = llm.stats().prefill
    assert after.fallbacks[reason] == before.fallbacks[reason] + 1
    assert after.activations == before.activations
    assert len(caplog.records) == 1


def test_a_question_that_cannot_be_found_leads_to_dense_prefill(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    output = ask(llm, messages(document(100)), SKIM)
    assert (output.metrics.fallback, output.plan) == ("unmappable", None)


def test_a_prompt_no_longer_than_a_block_is_read_in_full(llm: LLM) -> None:
    output = ask(llm, [{"role": "user", "content": "Hi."}], SKIM)
    assert (output.metrics.fallback, output.plan) == ("short", None)


# -- computed tokens and counters


def test_only_the_kept_tokens_are_computed(real: LLM, caplog: pytest.LogCaptureFixture) -> None:
    before = real.stats()
    with caplog.at_level(logging.INFO, logger="skim.prefill.planner"):
        output = ask(real, messages(document(600)), SKIM)
    after = real.stats()
    metrics, plan = output.metrics, output.plan
    assert plan is not None
    assert plan.kept_tokens == metrics.kept_tokens < 0.5 * metrics.prompt_tokens
    assert (
        after.tokens_computed - before.tokens_computed == metrics.kept_tokens + metrics.generated_tokens - 1
    )
    assert "16979" in text_of(output)
    assert metrics.scorer == "lexical"
    assert metrics.scoring_ms > 0
    assert metrics.ttft_ms == metrics.queue_ms + metrics.scoring_ms + metrics.prefill_ms
    assert after.prefill.activations == before.prefill.activations + 1
    assert after.prefill.blocks_kept - before.prefill.blocks_kept == sum(plan.kept)
    assert after.prefill.blocks_total - before.prefill.blocks_total == len(plan.kept)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"[prefill] plan: {plan.summary()}"


def test_auto_reads_short_prompts_in_full_and_counts_them(llm: LLM) -> None:
    auto = replace(SKIM, sparse_prefill="auto", min_prompt_tokens=300)
    before = llm.stats().prefill
    assert ask(llm, messages(document(100)), auto).plan is None
    assert ask(llm, messages(document(300)), auto).plan is not None
    after = llm.stats().prefill
    assert after.below_threshold == before.below_threshold + 1
    assert after.activations == before.activations + 1


def test_auto_reads_a_mostly_cached_prompt_in_full(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The uncached rest is shorter than a prompt that is too short to skim."""
    auto = replace(SKIM, sparse_prefill="auto", min_prompt_tokens=300)
    conversation = messages(document(300))
    dense = ask(llm, conversation)
    before = llm.stats().prefill
    with caplog.at_level(logging.INFO, logger="skim.prefill.planner"):
        again = ask(llm, conversation, auto)
    after = llm.stats().prefill
    assert again.outputs[0].token_ids == dense.outputs[0].token_ids
    assert (again.plan, again.metrics.fallback, again.metrics.scorer) == (None, "mostly_cached", None)
    assert again.metrics.cached_tokens > again.metrics.prompt_tokens - 300
    assert after.fallbacks - before.fallbacks == {DenseReason.MOSTLY_CACHED: 1}
    assert after.activations == before.activations
    [line] = [record.getMessage() for record in caplog.records]
    known = again.metrics.cached_tokens
    assert (
        line == f"[prefill] dense (mostly_cached): {known} of {again.metrics.prompt_tokens} tokens are cached"
    )
    assert ask(llm, conversation, replace(auto, sparse_prefill="always")).plan is not None
    assert ask(llm, messages(document(300, start=50_000)), auto).plan is not None


@pytest.mark.parametrize(
    ("mode", "known", "use_cache", "skimmed"),
    [
        ("auto", 700, True, False),
        ("auto", 501, True, False),  # 499 are new
        ("auto", 500, True, True),
        ("auto", 0, True, True),
        ("auto", 700, False, True),  # it must not use cached prefixes
        ("always", 700, True, True),
    ],
)
def test_auto_counts_the_uncached_tokens_of_a_prompt(
    mode: str, known: int, use_cache: bool, skimmed: bool
) -> None:
    assert plan_of(1000, mode, known, use_cache, window=1001) is skimmed


def test_a_prompt_beyond_the_context_window_is_skimmed_even_if_cached() -> None:
    assert plan_of(1000, "auto", 999, True, window=1000)


def plan_of(tokens: int, mode: str, known: int, use_cache: bool, window: int) -> bool:
    """True if a prompt with `known` cached tokens is skimmed."""
    asked: list[Reading] = []

    def is_cached(reading: Reading, namespace: Namespace) -> int:
        asked.append(reading)
        return known

    planner = Planner(lambda name: RandomScorer(), window, is_cached, decoder_of(tiny.tokenizer()))
    config = replace(SKIM, sparse_prefill=mode, min_prompt_tokens=500)
    prompt, params = tuple(range(tokens)), SamplingParams(max_tokens=16)
    work = planner.plan(Request(prompt, params, config, use_prefix_cache=use_cache))
    while True:
        try:
            next(work)
        except StopIteration as done:
            planned: Planned = done.value
            break
    assert planned.fallback is (None if planned.plan else DenseReason.MOSTLY_CACHED)
    assert all(reading == Reading(prompt) for reading in asked)
    assert planner.stats.fallbacks[DenseReason.MOSTLY_CACHED] == (planned.plan is None)
    return planned.plan is not None


def test_a_mass_budget_reaches_its_coverage(llm: LLM) -> None:
    _, planned = llm.plan(messages(document(600)), prefill=replace(SKIM, keep_ratio=None, keep_mass=0.5))
    assert planned.plan is not None
    assert planned.plan.coverage is not None
    assert planned.plan.coverage >= 0.5


# -- beside other requests


def test_sparse_and_dense_rows_in_one_step_do_not_change_each_other(llm: LLM) -> None:
    conversations = [messages(document(120 + 60 * i, start=3000 * i)) for i in range(4)]
    alone = [text_of(ask(llm, one, SKIM if i % 2 else OFF)) for i, one in enumerate(conversations)]
    llm.engine.reset_prefix_cache()
    handles = []
    for i, one in enumerate(conversations):
        prompt = llm.encode_chat(one, skimmed=True)
        prefill = SKIM if i % 2 else OFF
        handles.append(submit(llm.engine, prompt.tokens, GREEDY, prefill=prefill, anatomy=prompt.anatomy))
    texts = ["".join(getattr(event, "text", "") for event in handle) for handle in handles]
    assert texts == alone


def test_preemption_keeps_the_plan(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    config = replace(SKIM, keep_ratio=0.5, prefill_block_size=16)
    prompts = [BOOK[i * 5000 : i * 5000 + 300] for i in range(6)]

    def run(kv_memory: int) -> tuple[list[str], int, int]:
        with LLM(path, progress=False, kv_memory=kv_memory) as llm:
            outputs = llm.generate(prompts, params, prefill=config, use_tqdm=False)
            stats = llm.stats()
            assert all(output.plan is not None for output in outputs)
            return [text_of(output) for output in outputs], stats.preemptions, stats.prefill.activations

    large, none, _ = run(16 * 2**20)
    tight, some, plans = run(400 * 1024)
    assert (none, plans) == (0, 6)
    assert some > 0
    assert tight == large


def test_an_abort_while_scoring_ends_the_request(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def score(self, task: ScoringTask) -> Generator[None, None, list[float]]:
            while True:
                yield

    monkeypatch.setattr(small.engine.core.planner, "_scorers", lambda name: Endless())
    handle = submit(small.engine, list(range(200)), GREEDY, prefill=SKIM)
    other = small.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(other[0].outputs[0].token_ids) == 4  # steps run between slices of scoring
    handle.abort()
    *deltas, _ = list(handle)
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    assert small.stats().waiting == 0


# -- beyond the context window


def test_beyond_the_context_window_a_skimmed_prompt_equals_the_shortened_prompt(small: LLM) -> None:
    """The small model has a context window of 1,024 tokens of one byte. Positions are compact."""
    text = BOOK[:5000]
    config = replace(SKIM, keep_ratio=None, keep_tokens=400)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [output] = small.generate(text, params, prefill=config, use_tqdm=False)
    plan = output.plan
    assert plan is not None
    assert (plan.positions, plan.prompt_tokens) == ("compact", 5000)
    assert plan.kept_tokens <= 400
    small.engine.reset_prefix_cache()
    short = [output.prompt_token_ids[i] for i in plan.token_indices()]
    [dense] = small.generate([short], params, use_tqdm=False)
    assert output.outputs[0].token_ids == dense.outputs[0].token_ids


def test_a_budget_beyond_the_context_window_is_reduced_to_fit(small: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    [output] = small.generate(BOOK[:20_000], params, prefill=replace(SKIM, keep_ratio=0.5), use_tqdm=False)
    assert output.plan is not None
    assert 700 < output.plan.kept_tokens <= 1024 - 100


def test_a_prompt_that_can_never_fit_is_refused(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PromptTooLongError, match="sparse_prefill"):
        small.generate(BOOK[:5000], GREEDY, use_tqdm=False)
    with pytest.raises(PromptTooLongError, match="original positions") as raised:
        small.generate(BOOK[:5000], GREEDY, prefill=replace(SKIM, positions="original"), use_tqdm=False)
    assert raised.value.fields == ("positions",)
    long_call = {"role": "assistant", "content": f"<tool_call>{BOOK[:3000]}</tool_call>"}
    with pytest.raises(PromptTooLongError, match="must be kept") as raised:
        ask(small, [long_call, {"role": "user", "content": "Why?"}], SKIM)
    assert raised.value.fields == ("head_tokens", "tail_tokens", "max_model_len")
    with pytest.raises(
        PromptTooLongError,
        match=r"has 5000 tokens.* window of 1024, .*could not be skimmed: .*use the scorer blend",
    ):
        small.generate(BOOK[:5000], GREEDY, prefill=replace(SKIM, scorer="full"), use_tqdm=False)
    assert small.stats().prefill.fallbacks["scorer_window"] == 1
    monkeypatch.setattr(small.engine.core.planner, "_scorers", lambda name: Broken("raises"))
    with pytest.raises(PromptTooLongError, match=r"window of 1024, .*could not be skimmed: no idea"):
        small.generate(BOOK[:5000], GREEDY, prefill=SKIM, use_tqdm=False)


@pytest.mark.parametrize("role", ["system", "tool", "user"])
def test_a_document_in_any_message_is_skimmed_if_it_does_not_fit(small: LLM, role: str) -> None:
    """A recent tool result is kept while it fits, so it is the first to give way."""
    text = f"<tool_response>{BOOK[:3000]}</tool_response>" if role == "user" else BOOK[:3000]
    question = {"role": "user", "content": "Who is called Ishmael in this book?"}
    document = {"role": role, "content": text}
    order = [document, question] if role == "system" else [question, document]
    output = ask(small, order, replace(SKIM, keep_ratio=None, keep_tokens=400))
    assert output.plan is not None
    assert 300 < output.plan.kept_tokens < 500


@pytest.mark.parametrize(("setting", "kept"), [("keep", True), ("aged", True), ("skim", False)])
def test_a_tool_result_that_fits_is_kept_as_the_setting_says(llm: LLM, setting: str, kept: bool) -> None:
    result = {"role": "user", "content": f"<tool_response>{document(600)}</tool_response>"}
    conversation = [{"role": "user", "content": QUESTION}, result]
    _, planned = llm.plan(conversation, prefill=replace(SKIM, tool_results=setting))
    assert planned.plan is not None
    assert (planned.plan.ratio > 0.9) is kept


def test_a_prompt_that_asks_nothing_is_read_in_full(llm: LLM) -> None:
    output = ask(llm, [{"role": "user", "content": "The sea is wide. " * 300}], SKIM)
    assert (output.metrics.fallback, output.plan) == ("no_question", None)


# -- follow-ups


def test_a_follow_up_adds_blocks_to_those_already_read(llm: LLM) -> None:
    second = "The harbour master of Bergen is called Ingrid Solheim."
    text = document(900)
    at = len(text) // 4
    text = f"{text[:at]} {second} {text[at:]}"
    conversation = messages(text)
    first = ask(llm, conversation, SKIM)
    further = [
        *conversation,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And what is the name of the harbour master of Bergen?"},
    ]
    before = llm.stats()
    follow = ask(llm, further, SKIM)
    after = llm.stats()
    assert (follow.metrics.follow_up or "").startswith("backfill")
    assert follow.plan is not None
    assert follow.plan.kept_tokens == follow.metrics.kept_tokens
    computed = after.tokens_computed - before.tokens_computed - follow.metrics.generated_tokens + 1
    assert computed == follow.metrics.kept_tokens - follow.metrics.cached_tokens
    llm.engine.reset_prefix_cache()
    fresh = ask(llm, further, replace(SKIM, follow_up="replan"))
    assert fresh.metrics.follow_up is None, "the conversation is forgotten with the cache"
    assert computed <= 0.5 * fresh.metrics.kept_tokens + SKIM.prefill_block_size
    assert after.prefill.follow_ups["backfill"] == before.prefill.follow_ups["backfill"] + 1
    prompt = llm.tokenizer.decode([follow.prompt_token_ids[i] for i in follow.plan.token_indices()])
    assert second in prompt


def test_a_follow_up_whose_prefix_was_evicted_is_planned_anew(llm: LLM) -> None:
    conversation = messages(document(400))
    first = ask(llm, conversation, SKIM)
    memory = llm.engine.core.memory
    assert memory.tree.evict(memory.pool.capacity)  # as other prompts would; nothing runs now
    further = [
        *conversation,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Why?"},
    ]
    assert (ask(llm, further, SKIM).metrics.follow_up or "").startswith("replan")


@pytest.mark.parametrize("first", [900, 3500])
def test_beyond_the_context_window_a_follow_up_is_planned_anew(small: LLM, first: int) -> None:
    config = replace(SKIM, keep_ratio=None, keep_tokens=300)
    params = SamplingParams(temperature=0, max_tokens=5)
    small.generate(BOOK[:first], params, prefill=config, use_tqdm=False)
    [further] = small.generate(BOOK[:4000], params, prefill=config, use_tqdm=False)
    assert further.plan is not None
    assert further.plan.positions == "compact"
    assert further.metrics.follow_up == "replan: positions are compact"
    assert small.stats().prefill.follow_ups["compact"] == 1


def test_a_second_document_is_skimmed_like_the_first(llm: LLM) -> None:
    conversation = messages(document(400))
    first = ask(llm, conversation, SKIM)
    fact = "The harbour master of Bergen is Ingrid Solheim."
    question = "What is the name of the harbour master of Bergen?"
    added = messages(document(400, start=90_000, needle=fact), question)
    follow = ask(llm, [*conversation, {"role": "assistant", "content": text_of(first)}, *added], SKIM)
    assert (follow.metrics.follow_up or "").startswith("backfill")
    assert follow.plan is not None
    assert follow.plan.kept_tokens == follow.metrics.kept_tokens
    assert follow.metrics.kept_tokens < 0.5 * follow.metrics.prompt_tokens
    assert follow.metrics.cached_tokens >= first.metrics.kept_tokens - 32
    assert fact in llm.tokenizer.decode([follow.prompt_token_ids[i] for i in follow.plan.token_indices()])


def test_a_tool_result_reuses_the_blocks_already_read(llm: LLM) -> None:
    """The question is still the earlier one, and no block is read twice."""
    conversation = messages(document(400))
    first = ask(llm, conversation, SKIM)
    result = "The door of the Oslo office was opened at noon."
    further = [
        *conversation,
        {"role": "assistant", "content": text_of(first)},
        {"role": "tool", "content": result},
    ]
    follow = ask(llm, further, SKIM)
    assert (follow.metrics.follow_up or "").startswith("backfill")
    assert follow.metrics.cached_tokens >= first.metrics.kept_tokens - 32
    assert follow.plan is not None
    assert follow.plan.kept_tokens == follow.metrics.kept_tokens
    assert result in llm.tokenizer.decode([follow.prompt_token_ids[i] for i in follow.plan.token_indices()])


def test_a_request_that_bypasses_the_cache_reuses_no_reading(llm: LLM) -> None:
    conversation = messages(document(400))
    first = ask(llm, conversation, SKIM)
    further = [
        *conversation,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "Why?"},
    ]
    prompt = llm.encode_chat(further, skimmed=True)
    handle = submit(
        llm.engine, prompt.tokens, GREEDY, prefill=SKIM, anatomy=prompt.anatomy, use_prefix_cache=False
    )
    [finished] = [event for event in handle if isinstance(event, Finished)]
    assert finished.metrics.cached_tokens == 0
    assert finished.metrics.follow_up is None


# -- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[
            ({"keep_ratio": value}, f"keep_ratio must be in \\(0, 1\\], got {value!r}")
            for value in (0, 0.0, -0.1, 1.01, float("nan"), float("inf"), True, "0.5")
        ],
        *[
            ({"keep_mass": value}, f"keep_mass must be in \\(0, 1\\], got {value!r}")
            for value in (0, 1.01, float("nan"), True)
        ],
        *[
            ({"keep_tokens": value}, f"keep_tokens must be a whole number of at least 1, got {value!r}")
            for value in (0, -1, 1.5, True, "9")
        ],
        ({"prefill_block_size": 0}, "prefill_block_size"),
        ({"keep_tokens": 100, "head_tokens": 80, "tail_tokens": 80}, "head_tokens 80 and tail_tokens 80"),
        ({"keep_tokens": 100, "keep_ratio": 0.5}, "keep_ratio and keep_tokens"),
        ({"scorer": "magic"}, "scorer must be one of"),
        ({"sparse_prefill": "maybe"}, "sparse_prefill must be one of"),
        ({"positions": "none"}, "positions must be one of"),
        ({"follow_up": "none"}, "follow_up must be one of"),
        ({"drafter": ""}, "drafter"),
        ({"min_scored_tokens": 0}, "min_scored_tokens"),
    ],
)
def test_invalid_settings_are_refused_at_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**settings)


def test_a_drafter_with_another_tokenizer_scores_for_the_target(
    default_model_dir: Path, tmp_path: Path
) -> None:
    """The small model's tokens are bytes, the default model's are words. Characters map one to the other."""
    target = tiny.save("llama", tmp_path)
    prefill = replace(SKIM, scorer="attention", keep_ratio=0.3)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(target, progress=False, kv_memory="4M", drafter=str(default_model_dir)) as llm:
        [output] = llm.generate(BOOK[:800], params, prefill=prefill, use_tqdm=False)
        assert output.metrics.fallback is None
        assert output.plan is not None
        assert output.plan.scorer == "attention"
        assert 0.2 < output.plan.ratio < 0.5


@pytest.mark.parametrize(("own", "dtype"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_drafter_scores_in_its_own_dtype(own: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    target, drafter = tiny.save("llama", tmp_path / "target"), tiny.save("qwen3", tmp_path / "drafter")
    prefill = replace(SKIM, scorer="entropy", keep_ratio=0.3)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"kv_memory": "4M", "device": "cpu", "dtype": "float32", "drafter_dtype": own}
    with LLM(target, progress=False, drafter=str(drafter), **settings) as llm:
        assert llm.engine.model.dtype == torch.float32
        assert llm.engine.drafter is not None
        assert llm.engine.drafter.dtype == llm.engine.drafter.module.dtype == dtype
        [output] = llm.generate(BOOK[:800], params, prefill=prefill, use_tqdm=False)
        assert output.metrics.fallback is None
        assert output.plan is not None
        assert output.plan.scorer == "entropy"


def test_a_drafter_that_cannot_be_found_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such drafter"):
        LLM(tiny.save("llama", tmp_path), progress=False, drafter="no such drafter")
