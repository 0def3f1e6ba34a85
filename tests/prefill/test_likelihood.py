"""The likelihood of the question after a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from skim.prefill.scoring import likelihood
from skim.prefill.scoring.likelihood import BETWEEN, LEAST, MOST, LikelihoodScorer, gains_of
from skim.prefill.scoring.scorer import ScoringError, ScoringTask, run_to_completion
from skim.tokenization import token_ids
from tests import paths, tiny
from tests.prefill.small import drive

TEXT = paths.BOOK.encode("ascii", "ignore")


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def module(family: str) -> Any:
    return tiny.with_our_attention(family)


def task_of(blocks: int = 6, candidates: tuple[int, ...] | None = None) -> ScoringTask:
    """A prompt whose question begins inside a block and is followed by other text."""
    tokens = (*TEXT[: 16 * blocks + 5], *b"a white whale?", *TEXT[500:511])
    return ScoringTask(tokens, (range(16 * blocks + 5, 16 * blocks + 19),), 16, candidates)


def plain_logs(module: Any, task: ScoringTask) -> np.ndarray:
    """Reference: one forward of the whole model for each block, without padding."""
    between = token_ids(tiny.tokenizer(), BETWEEN, add_special_tokens=False)
    found = []
    for block in task.wanted.tolist():
        places = range(block * 16, min(len(task.tokens), block * 16 + 16))
        own = [task.tokens[place] for place in places if not task.is_question[place]]
        if not own:
            continue
        asked = task.question_ids.tolist()
        row = torch.tensor([[task.tokens[0], *own, *between, *asked]])
        with torch.inference_mode():
            logs = module(input_ids=row, use_cache=False).logits[0].float().log_softmax(dim=-1)
        before = row.shape[1] - len(asked) - 1
        found.append([float(logs[before + index, token]) for index, token in enumerate(asked)])
    return np.array(found)


@pytest.mark.parametrize("candidates", [None, (1, 3, 4), (6,)])
def test_gains_are_those_of_the_models_own_probabilities(
    family: str, module: Any, candidates: tuple[int, ...] | None
) -> None:
    task = task_of(candidates=candidates)
    found = run_to_completion(LikelihoodScorer(module, tiny.tokenizer()).gains(task))
    expected = gains_of(plain_logs(tiny.build(family), task))
    assert found.shape == (len(task.context_blocks),)
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_token_counts_by_how_much_likelier_it_is_than_after_most_blocks() -> None:
    logs = np.array([[-3.0, -9.0], [-3.0, -9.0], [-2.5, -1.0], [-30.0, -9.0]])
    assert gains_of(logs).tolist() == [0.0, 0.0, 0.5 + MOST, LEAST]


def test_blocks_that_are_no_candidates_score_0_and_others_more(module: Any) -> None:
    scores = drive(LikelihoodScorer(module, tiny.tokenizer()), task_of(candidates=(1, 3)))
    assert [block for block, score in enumerate(scores) if score > 0] == [1, 3]
    assert max(scores) == 1.0


def test_slices_of_the_output_head_do_not_change_the_result(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = LikelihoodScorer(module, tiny.tokenizer())
    whole = run_to_completion(scorer.gains(task_of()))
    monkeypatch.setattr(likelihood, "windows_per_batch", lambda *_: 4)
    batched = run_to_completion(scorer.gains(task_of()))
    monkeypatch.setattr(likelihood, "_MOST_LOGITS", 1)
    sliced = run_to_completion(scorer.gains(task_of()))
    assert batched == pytest.approx(whole, abs=1e-3)
    assert sliced == pytest.approx(whole, abs=1e-3)


def test_the_same_prompt_has_the_same_gains(module: Any) -> None:
    scorer = LikelihoodScorer(module, tiny.tokenizer())
    once = run_to_completion(scorer.gains(task_of()))
    run_to_completion(scorer.gains(task_of(9)))
    assert np.array_equal(run_to_completion(scorer.gains(task_of())), once)


def test_logits_that_are_not_finite_fail(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        likelihood, "logits_of", lambda _, hidden: hidden.new_full((*hidden.shape[:2], 300), torch.nan)
    )
    with pytest.raises(ScoringError, match="not finite"):
        run_to_completion(LikelihoodScorer(module, tiny.tokenizer()).gains(task_of()))


def test_a_prompt_without_a_question_fails(module: Any) -> None:
    task = ScoringTask(tuple(TEXT[:64]), (), 16)
    with pytest.raises(ScoringError, match="needs a question"):
        run_to_completion(LikelihoodScorer(module, tiny.tokenizer()).gains(task))
