"""`lm-eval`: lm-evaluation-harness' `local-completions`, compared with the harness over transformers.

Needs the extra `evals`; `make test-evals` installs it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.update({"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.live import NAME

CLOSE = 2e-3  # of a sum of log-probabilities

ITEMS = [
    ("The capital of France is", ["Paris", "Rome", "Cairo"], 0),
    ("The capital of Italy is", ["Oslo", "Rome", "Lima"], 1),
    ("The capital of Japan is", ["Madrid", "Berlin", "Tokyo"], 2),
    ("The opposite of hot is", ["cold", "warm", "green"], 0),
    ("The opposite of up is", ["left", "down", "over"], 1),
    ("Two plus two equals", ["five", "seven", "four"], 2),
    ("Water freezes into", ["ice", "steam", "sand"], 0),
    ("The color of the sky on a clear day is", ["red", "blue", "brown"], 1),
    ("Bees make", ["milk", "wool", "honey"], 2),
    ("The sun rises in the", ["east", "west", "north"], 0),
    ("A baby dog is called a", ["kitten", "puppy", "calf"], 1),
    ("There are seven days in a", ["month", "year", "week"], 2),
    ("Cows eat", ["grass", "stones", "iron"], 0),
    ("The first month of the year is", ["June", "January", "May"], 1),
    ("Romeo and Juliet was written by", ["Dante", "Homer", "Shakespeare"], 2),
    ("Fish live in", ["water", "trees", "books"], 0),
    ("The planet closest to the sun is", ["Mars", "Mercury", "Neptune"], 1),
    ("A triangle has this many sides:", ["four", "nine", "three"], 2),
    ("The chemical symbol of gold is", ["Au", "Fe", "Pb"], 0),
    ("The moon orbits the", ["sun", "Earth", "ocean"], 1),
]


@pytest.fixture(scope="module")
def ours(base_url: str, default_model_dir: Path) -> Any:
    return LocalCompletionsAPI(
        model=NAME,
        base_url=f"{base_url}/completions",
        tokenizer_backend="huggingface",
        tokenizer=str(default_model_dir),
        batch_size=8,
        max_length=2048,
        max_retries=1,
    )


@pytest.fixture(scope="module")
def theirs(default_model_dir: Path) -> Any:
    return HFLM(
        pretrained=str(default_model_dir), device="cpu", dtype="float32", batch_size=1, max_length=2048
    )


def instances(kind: str, arguments: list[tuple[str, ...]]) -> list[Any]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_continuations_of_twenty_items_have_the_same_likelihood(ours: Any, theirs: Any) -> None:
    """Loglikelihood: 20 questions with 3 answers each have the values that transformers gives."""
    wanted = [(question, f" {choice}") for question, choices, _ in ITEMS for choice in choices]
    found = ours.loglikelihood(instances("loglikelihood", wanted), disable_tqdm=True)
    expected = theirs.loglikelihood(instances("loglikelihood", wanted), disable_tqdm=True)
    assert len(found) == len(expected) == 60
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=CLOSE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert any(greedy for _, greedy in found)
    assert not all(greedy for _, greedy in found)


def test_whole_texts_have_the_same_likelihood(ours: Any, theirs: Any) -> None:
    """Perplexity: a whole text has the likelihood that transformers gives."""
    texts = [(" ".join(f"{question} {choices[right]}." for question, choices, right in ITEMS),)]
    found = ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    expected = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", texts), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-4)
