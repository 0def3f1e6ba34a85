"""The planner's decisions: budgets, questions about a whole text, prompts without a question, bad input."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from skim import LLM, SamplingParams
from skim.config import AUTO_RATIO, PrefillConfig
from skim.errors import PromptTooLongError
from skim.prefill.anatomy import Anatomy
from skim.prefill.plan import DenseReason, Plan, Reason
from skim.prefill.planner import Planner
from skim.prefill.reading import Planned, Reading
from skim.prefill.request import Request
from skim.prefill.scoring.decoding import decoder_of
from skim.prefill.scoring.factory import make_scorers
from skim.prefill.scoring.scorer import Scorer, run_to_completion
from skim.prefill.select import MOST_BLOCKS
from skim.registry import scorers
from tests import paths, tiny
from tests.prefill.small import Fixed, Model

AUTO = PrefillConfig(sparse_prefill="always")
PARAMS = SamplingParams(temperature=0, max_tokens=16)
BOOK = paths.BOOK.encode("ascii", "ignore").decode()
WHOLE = "\n\nSummarise the text."
FACT = "\n\nWhat is the code for the oil store?"


def planner(scorer: Scorer | Callable[[str], Scorer], window: int = 1 << 20) -> Planner:
    """A planner of prompts whose tokens are bytes, with nothing cached."""
    make = scorer if callable(scorer) else lambda name: scorer
    return Planner(make, window, lambda reading, namespace: 0, decoder_of(tiny.tokenizer()))


def request(text: str, question: str = "", prefill: PrefillConfig = AUTO, pinned: int = 0) -> Request:
    """A prompt that ends with its question. The first `pinned` tokens must be kept."""
    tokens = tuple(tiny.tokenizer()(text + question, add_special_tokens=False).input_ids)
    asked = (range(len(tokens) - len(question.encode()), len(tokens)),) if question else ()
    kept = tuple(run for run in (range(pinned), *asked) if run)
    return Request(tokens, PARAMS, prefill, Anatomy(tokens, kept, asked))


def plan(by: Planner, asked: Request) -> Planned:
    return run_to_completion(by.plan(asked))


def reasons(planned: Planned) -> set[Reason]:
    assert planned.plan is not None
    return {reason for reason in planned.plan.reasons if reason is not None}


def even(found: Plan) -> list[int]:
    return [block for block, reason in enumerate(found.reasons) if reason is Reason.EVEN]


def peaked(blocks: int, *peaks: int) -> Fixed:
    return Fixed([1.0 if block in peaks else 1e-9 for block in range(blocks)])


# Questions about the whole text


@pytest.mark.parametrize("config", [AUTO, replace(AUTO, keep="auto")])
def test_a_prompt_about_the_whole_text_is_read_in_full_without_scoring(config: PrefillConfig) -> None:
    scorer = peaked(0)
    by, asked = planner(scorer), request(BOOK[:4000], WHOLE, config)
    planned = plan(by, asked)
    assert (planned.plan, planned.fallback) == (None, DenseReason.WHOLE)
    assert planned.reading == Reading(asked.prompt_token_ids)
    assert scorer.asked == []
    assert by.stats.fallbacks == {DenseReason.WHOLE: 1}
    assert by.stats.activations == 0


def test_beyond_the_context_window_it_is_covered_evenly() -> None:
    asked = request(BOOK[:20_000], WHOLE)
    planned = plan(planner(peaked(0), window=1024), asked)
    assert planned.plan is not None
    assert reasons(planned) == {Reason.PINNED, Reason.EVEN}
    assert planned.plan.positions == "compact"
    assert 1024 - 16 - 64 < planned.plan.kept_tokens <= 1024 - 16
    assert planned.plan.asked == ((20_000, 20_000 + len(WHOLE)),)
    steps = [b - a for a, b in pairwise(even(planned.plan))]
    assert max(steps) - min(steps) <= 1
    assert even(planned.plan)[0] <= max(steps)


@pytest.mark.parametrize(
    ("config", "most"),
    [({"keep_ratio": 0.25}, 1000), ({"keep_tokens": 600}, 600), ({"keep_ratio": 1.0}, 4021)],
)
@pytest.mark.parametrize("window", [1 << 20, 2000])
def test_an_explicit_budget_is_kept_and_covered_evenly(
    config: dict[str, Any], most: int, window: int
) -> None:
    scorer = peaked(0)
    planned = plan(planner(scorer, window), request(BOOK[:4000], WHOLE, replace(AUTO, **config)))
    assert planned.plan is not None
    assert reasons(planned) == {Reason.PINNED, Reason.EVEN}
    room = min(most, window - 16)
    assert room - 64 < planned.plan.kept_tokens <= room
    assert scorer.asked == []


def test_an_explicit_mass_reads_everything_that_fits() -> None:
    config = replace(AUTO, keep_mass=0.5)
    planned = plan(planner(peaked(0)), request(BOOK[:4000], WHOLE, config))
    assert planned.plan is None
    assert planned.fallback is DenseReason.WHOLE


@pytest.mark.parametrize("scorer", ["lexical", "blend"])
def test_a_scorer_that_finds_nothing_means_a_full_reading(scorer: str) -> None:
    config = replace(AUTO, scorer=scorer)
    asked = request(BOOK[:4000], FACT, config)
    nothing = plan(planner(Fixed([0.0] * -(-len(asked.prompt_token_ids) // 32))), asked)
    assert (nothing.plan, nothing.fallback) == (None, DenseReason.WHOLE)


@pytest.mark.parametrize(("scorer", "read"), [("entropy", False), ("blend", True)])
def test_flat_scores_say_something_only_if_they_are_chances(scorer: str, read: bool) -> None:
    config = replace(AUTO, scorer=scorer)
    asked = request(BOOK[:4000], FACT, config)
    flat = plan(planner(Fixed([1.0] * -(-len(asked.prompt_token_ids) // 32))), asked)
    assert (flat.fallback is DenseReason.WHOLE) == read


def test_a_prompt_about_the_whole_text_must_fit_with_its_pinned_tokens() -> None:
    """A long system message leaves no room. No scorer is asked, so the planner itself must notice."""
    asked = request(BOOK[:6000], WHOLE, pinned=3000)
    why = r"tokens that must be kept.* window of 2048.*calls or the question, send fewer messages"
    with pytest.raises(PromptTooLongError, match=why) as raised:
        plan(planner(peaked(0), window=2048), asked)
    assert raised.value.fields == ("head_tokens", "tail_tokens", "max_model_len")


def test_a_prompt_whose_pinned_tokens_cannot_fit_is_refused_before_it_is_scored() -> None:
    scorer = peaked(0)
    with pytest.raises(PromptTooLongError, match="must be kept"):
        plan(planner(scorer, window=2048), request(BOOK[:6000], FACT, pinned=3000))
    assert scorer.asked == []


def test_scores_that_are_spread_evenly_are_a_question_about_the_whole_text() -> None:
    blocks = -(-(4000 + len(FACT)) // 32)
    flat, almost = [1.0] * blocks, [1.0] * (blocks // 3) + [1e-9] * (blocks - blocks // 3)
    asked = request(BOOK[:4000], FACT)
    assert plan(planner(Fixed(flat)), asked).fallback is DenseReason.WHOLE
    assert plan(planner(Fixed(almost)), asked).plan is not None
    told = plan(planner(Fixed(flat)), replace(asked, prefill=replace(AUTO, keep_ratio=0.2)))
    assert reasons(told) >= {Reason.SCORED}  # a budget that was asked for is used for scores
    beyond = plan(planner(Fixed(flat), window=1024), asked)
    assert Reason.EVEN in reasons(beyond)


# No question


def test_a_prompt_without_a_question_is_read_in_full() -> None:
    for config in (AUTO, replace(AUTO, keep_ratio=0.2)):
        planned = plan(planner(peaked(0)), request(BOOK[:4000], "", config))
        assert (planned.plan, planned.fallback) == (None, DenseReason.NO_QUESTION)
        assert planned.problem is not None
        assert "add a question" in planned.problem


def test_beyond_the_context_window_a_prompt_without_a_question_is_covered_evenly() -> None:
    planned = plan(planner(peaked(0), window=1024), request(BOOK[:4000]))
    assert planned.plan is not None
    assert reasons(planned) == {Reason.PINNED, Reason.EVEN}
    assert planned.plan.asked == ()


# Budgets


@pytest.mark.parametrize("length", [8000, 40_000])
def test_the_default_budget_stops_when_little_of_the_score_is_missing(length: int) -> None:
    """One block has nearly all of the score: the minimum is kept. Many have it: the most is kept."""
    blocks = -(-(length + len(FACT)) // 32)
    asked = request("x" * length, FACT)  # one long word: nothing is rescued, no sentence ends
    one = plan(planner(peaked(blocks, blocks // 2)), asked)
    many = plan(planner(peaked(blocks, *range(0, blocks, 3))), asked)
    assert one.plan is not None
    assert many.plan is not None
    pinned = sum(reason is Reason.PINNED for reason in one.plan.reasons)
    chosen = sum(one.plan.kept) - pinned
    assert chosen == AUTO.min_scored_tokens // 32
    most = max(AUTO_RATIO * length, 32 * (pinned + chosen))
    assert most - 64 < many.plan.kept_tokens <= most + 32


@pytest.mark.parametrize(("budget", "tokens"), [({"keep_tokens": 1000}, 512), ({"keep_ratio": 0.1}, 416)])
def test_pinned_blocks_leave_half_of_a_fixed_budget_to_scores(budget: dict[str, Any], tokens: int) -> None:
    asked = request(BOOK[:8000], FACT, replace(AUTO, rescue_cap=0.0, **budget), pinned=2000)
    scores = [1.0 / (1 + block) for block in range(-(-len(asked.prompt_token_ids) // 32), 0, -1)]
    found = plan(planner(Fixed(scores)), asked).plan
    assert found is not None
    beside = sum(reason in (Reason.SCORED, Reason.CONTINUED) for reason in found.reasons) * 32
    assert beside == tokens


def test_a_passage_is_kept_beyond_the_edge_of_its_block() -> None:
    """The function begins in a block with a high score and ends in the next ones, which have none."""
    code = "def discount(total):\n    if total > 100:\n        return total * 15\n    return 0\n"
    text = f"{BOOK[:3200]}\n\n{code}\n\n{BOOK[5000:8000]}"
    start = text.index(code)
    blocks = -(-(len(text) + len(FACT)) // 32)
    config = replace(AUTO, keep_tokens=320, rescue_cap=0.0)
    planned = plan(planner(peaked(blocks, start // 32)), request(text, FACT, config))
    assert planned.plan is not None
    own = range(start // 32, (start + len(code) - 2) // 32 + 1)
    assert len(own) > 2
    assert planned.plan.reasons[own[0]] is Reason.SCORED
    assert {planned.plan.reasons[block] for block in own[1:]} == {Reason.CONTINUED}
    assert planned.plan.scores == tuple(peaked(blocks, start // 32).scores)  # as the scorer gave them


# Determinism


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save("llama", Path(tmp_path_factory.mktemp("planner")))
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


@pytest.mark.parametrize("length", [900, 5000])  # the context window has 1,024 tokens
@pytest.mark.parametrize("budget", [{}, {"keep_tokens": 300}], ids=["auto", "tokens"])
def test_a_plan_depends_on_nothing_but_its_prompt(llm: LLM, length: int, budget: dict[str, Any]) -> None:
    """Not on prompts planned, read or cached before it, with the same text or another."""
    config = replace(AUTO, **budget)

    def one() -> tuple[Plan | None, DenseReason | None, Reading]:
        _, planned = llm.plan(chat(length, FACT), prefill=config)
        found = planned.plan and replace(planned.plan, timings_ms={})
        return found, planned.fallback, planned.reading

    def chat(size: int, question: str, start: int = 0) -> list[dict[str, Any]]:
        parts = [BOOK[start : start + size], question]
        return [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]

    llm.engine.reset_prefix_cache()
    first = one()
    for size, question, start in [(length, "\n\nWho speaks?", 0), (700, FACT, 30_000), (length, WHOLE, 0)]:
        llm.plan(chat(size, question, start), prefill=config)
        assert one() == first
        llm.chat(chat(size, question, start), PARAMS, prefill=config, use_tqdm=False)
        assert one() == first
    llm.chat(chat(length, FACT), PARAMS, prefill=config, use_tqdm=False)
    assert one() == first
    llm.engine.reset_prefix_cache()
    assert one() == first


# Bad input


@pytest.fixture(scope="module")
def small() -> Callable[[str], Scorer]:
    return make_scorers(Model(tiny.with_our_attention("llama")), None)


def noise(length: int) -> tuple[int, ...]:
    rng = random.Random(0)
    return tuple(rng.randrange(tiny.VOCAB) for _ in range(length))


def of_tokens(tokens: tuple[int, ...], asked: range) -> Anatomy:
    return Anatomy(tokens, (asked,) if asked else (), (asked,) if asked else ())


BAD = {
    "noise": of_tokens(noise(3000), range(2980, 3000)),
    "noise that asks in the middle": of_tokens(noise(3000), range(1500, 1510)),
    "all of it is the question": of_tokens(noise(200), range(200)),
    "a long question": of_tokens(noise(5200), range(200, 5200)),
    "one token beyond a block": of_tokens(noise(33), range(32, 33)),
    "spaces": of_tokens(tuple(b" " * 3000), range(2990, 3000)),
    "newlines": of_tokens(tuple(b"\n" * 3000), range(2990, 3000)),
    "special tokens": of_tokens((256, 257) * 1500, range(2990, 3000)),
}


@pytest.mark.parametrize("name", scorers())
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_a_plan_or_a_reason(small: Callable[[str], Scorer], case: str, name: str) -> None:
    anatomy = BAD[case]
    for config in (AUTO, replace(AUTO, keep_ratio=0.3)):
        asked = Request(anatomy.tokens, PARAMS, replace(config, scorer=name), anatomy)
        planned = plan(planner(small), asked)
        assert (planned.plan is None) == (planned.fallback is not None)
        assert (planned.problem is None) == (planned.fallback is None)
        assert planned.fallback in (None, DenseReason.WHOLE, DenseReason.SCORER_WINDOW) or (
            case == "a long question" and "the question has 5000 tokens" in (planned.problem or "")
        )
        if planned.plan is None:
            assert planned.reading == Reading(anatomy.tokens)


@pytest.mark.parametrize("window", [1 << 20, 1024])
@pytest.mark.parametrize("name", ["blend", "lexical"])
def test_one_character_two_hundred_thousand_times(
    small: Callable[[str], Scorer], name: str, window: int
) -> None:
    tokens = tuple(b"a" * 200_000)
    planned = plan(planner(small, window), Request(tokens, PARAMS, replace(AUTO, scorer=name)))
    assert planned.plan is not None or planned.fallback is DenseReason.WHOLE
    if window < len(tokens):
        assert planned.plan is not None
        assert planned.plan.kept_tokens <= window - 16


# Slices


@pytest.mark.parametrize("text", ["novel", "words of the question", "no word", "one line"])
def test_no_slice_of_a_plan_for_a_long_prompt_takes_most_of_the_time(text: str) -> None:
    """By this thread's CPU time, which other processes do not change."""
    body = {
        "novel": BOOK[:500_000],
        "words of the question": "the oil store code " * 26_000,
        "no word": "!?" * 250_000,
        "one line": "x" * 500_000,
    }[text]
    config = replace(AUTO, scorer="lexical", prefill_block_size=8, keep_ratio=0.5)
    models = make_scorers(Model(tiny.build("llama")), None)
    plan(planner(models), request(body[:20_000], FACT, config))  # what is made once
    work = planner(models).plan(request(body, FACT, config))
    gc.collect()
    times = [time.thread_time()]
    for _ in work:
        times.append(time.thread_time())
    slices = [b - a for a, b in pairwise([*times, time.thread_time()])]
    assert len(slices) > 20
    assert max(slices) < max(sum(slices) / 3, 0.15), sorted(slices)[-5:]


def test_a_prompt_has_a_bounded_number_of_blocks() -> None:
    config = replace(AUTO, scorer="random", prefill_block_size=1, keep_tokens=500)
    planned = plan(
        planner(make_scorers(Model(tiny.build("llama")), None)), request("x" * 300_000, FACT, config)
    )
    assert planned.plan is not None
    assert planned.plan.block_size == 2
    assert len(planned.plan.reasons) <= MOST_BLOCKS
