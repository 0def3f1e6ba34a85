"""The prefill kernel for pairs of bfloat16 numbers computes only the attention of forwards that rank tokens.

`test_prefill_rounded.py` compares it with the torch backend.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skim.attention.cpu import native_prefill
from skim.attention.cpu.native_prefill import PAIRS, SOURCE, PrefillKernel
from skim.attention.step import AttentionCall
from tests.attention.test_native_prefill import make_kernel
from tests.attention.test_prefill_tiles import HEADS, normal


@pytest.fixture(scope="module")
def pairs() -> PrefillKernel:
    return make_kernel(SOURCE, PAIRS)


def test_precise_calls_have_the_bits_of_the_kernel_by_vectors(pairs: PrefillKernel) -> None:
    given, call = normal(64), AttentionCall(0.125)
    assert torch.equal(pairs.attend_causal(*given, call), make_kernel(SOURCE).attend_causal(*given, call))


@pytest.mark.parametrize(("place", "bad"), [("key", "nan"), ("value", "nan"), ("value", "inf")])
def test_queries_that_read_a_non_finite_number_are_not_finite(
    pairs: PrefillKernel, place: str, bad: str
) -> None:
    query, key, value = normal(40)
    call = AttentionCall(0.2, rounds=True)
    clean = pairs.attend_causal(query, key, value, call)
    (key if place == "key" else value)[0, 150] = float(bad)
    out = pairs.attend_causal(query, key, value, call)
    own = HEADS // key.shape[0]
    assert not out[:own, 150:].isfinite().any()
    assert torch.equal(out[own:], clean[own:])


def test_it_is_chosen_for_rounded_calls_alone(pairs: PrefillKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_prefill, "tile_kernel", lambda: None)
    given, call = normal(64), AttentionCall(0.125)
    chosen = native_prefill.prefill_kernel.__wrapped__()
    for rounds in (False, True):
        one = replace(call, rounds=rounds)
        assert torch.equal(chosen.attend_causal(*given, one), pairs.attend_causal(*given, one))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    plain = native_prefill.prefill_kernel.__wrapped__()
    assert torch.equal(*(plain.attend_causal(*given, replace(call, rounds=r)) for r in (False, True)))
