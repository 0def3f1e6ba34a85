"""`Request` is validated at construction, and its derived values follow from its fields."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from skim.attention.blocksparse.policy import Policy
from skim.config import PrefillConfig
from skim.errors import RequestError
from skim.memory.prefix import Namespace
from skim.prefill.plan import DenseReason
from skim.prefill.request import Request
from skim.sampling.params import SamplingParams

DENSE = PrefillConfig()
SPARSE = PrefillConfig(prefill_attention="blocksparse", blocksparse_alpha=0.2)


def request(prompt: Any = (1, 2, 3), prefill: PrefillConfig = DENSE, **options: Any) -> Request:
    return Request(prompt, SamplingParams(), prefill, **options)


@pytest.mark.parametrize("prompt", [[1, 2, 3], range(1, 4), np.array([1, 2, 3])])
def test_token_ids_become_a_tuple_of_plain_integers(prompt: Any) -> None:
    found = request(prompt).prompt_token_ids
    assert found == (1, 2, 3)
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize("prompt", [["a"], [1.0], [None], 5, "text"])
def test_a_prompt_that_is_not_a_list_of_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="a text or a list of token ids"):
        request(prompt)


def test_a_request_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        request().cache_salt = "other"  # type: ignore[misc]


def test_prefixes_are_shared_by_salt_and_attention_policy() -> None:
    assert request().policy is None
    assert request().namespace == Namespace()
    assert request(prefill=SPARSE).policy == Policy(0.2)
    found = [
        request(cache_salt=salt, prefill=prefill).namespace
        for salt in ("", "a")
        for prefill in (DENSE, SPARSE, replace(SPARSE, blocksparse_alpha=0.3))
    ]
    assert len(set(found)) == 6
    assert request(prefill=replace(DENSE, sparse_prefill="always")).namespace == Namespace()


def test_reasons_to_read_densely_keep_their_names() -> None:
    assert {str(reason) for reason in DenseReason} == {
        "short",
        "no_question",
        "unmappable",
        "whole",
        "mostly_cached",
        "scorer_window",
        "non_finite",
        "out_of_memory",
        "drafter_parked",
        "scorer_failed",
        "prompt_logprobs",
    }
