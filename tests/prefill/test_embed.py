"""Embeddings are transformers' own last hidden states: mean, then unit length."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModel

from skim import LLM
from skim.errors import EngineError
from skim.prefill.embed import embed, normalised
from skim.prefill.scoring.scorer import run_to_completion
from tests import tiny


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt_oss"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save(family, tmp_path_factory.mktemp("tiny") / family)
    with LLM(path, progress=False, kv_memory="8M") as llm:
        yield llm


def texts(seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [
        tuple(rng.randrange(256) for _ in range(length)) for length in (1, 2, 33, rng.randrange(100, 200))
    ]


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
def test_vectors_are_those_of_transformers(llm: LLM, chunk: int | None) -> None:
    model = llm.engine.model
    plain = AutoModel.from_pretrained(llm.model_path, attn_implementation="eager").float().eval()
    given = texts(chunk or 0)
    if chunk is None:
        found = llm.engine.embed(given).result(60)
    else:
        found = run_to_completion(embed(model.module, model.layers, given, chunk=chunk))
    for text, vector in zip(given, found, strict=True):
        with torch.inference_mode():
            states = plain(input_ids=torch.tensor([text])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.double().mean(dim=0), dim=0).numpy()
        assert np.linalg.norm(vector) == pytest.approx(1.0)
        np.testing.assert_allclose(vector, expected, atol=2e-5)


def test_nothing_remains_in_the_pool(llm: LLM) -> None:
    before = llm.stats().pool
    llm.engine.embed(texts(3)).result(60)
    assert llm.stats().pool == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_vector_without_a_direction_is_an_error(value: float) -> None:
    with pytest.raises(EngineError, match="not finite, or zero"):
        normalised(np.array([value, 0.0]))
