"""The prefill kernel for tile registers is as precise as float32.

`test_native_prefill.py` compares it with the torch backend, `test_prefill_rounded.py` tests rounded calls.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from skim.attention.cpu import native_prefill
from skim.attention.cpu.native_prefill import SOURCE, TILES, PrefillKernel
from skim.attention.step import AttentionCall
from skim.native import build
from skim.native.build import NativeUnavailable
from tests.attention.test_native_prefill import make_kernel

HEADS, KV_HEADS, TOKENS = 6, 2, 400


@pytest.fixture(scope="module")
def floats() -> PrefillKernel:
    return make_kernel(SOURCE)


@pytest.fixture(scope="module")
def tiles() -> PrefillKernel:
    return make_kernel(TILES)


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def normal(dim: int, tokens: int = TOKENS) -> Inputs:
    """Queries, keys and values. [heads, tokens, dim]"""
    torch.manual_seed(dim)
    query, key, value = (torch.randn(heads, tokens, dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return query, key, value


def large(dim: int) -> Inputs:
    """Scores of 60 and more."""
    query, key, value = normal(dim)
    return query * 15, key, value


def dominated(dim: int) -> Inputs:
    """Each query has a score of about 60 for the first key, and for a few keys that are almost the same."""
    query, key, value = normal(dim)
    key[:, 1:4] = key[:, :1] + 0.02 * key[:, 1:4]
    target = key[:, 0].repeat_interleave(HEADS // KV_HEADS, dim=0)[:, None]
    return 0.3 * query + target * 60 / dim**0.5, key, value


def attend_precisely(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention in float64."""
    key, value = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=0) for t in (key, value))
    scores = query.double() @ key.transpose(1, 2) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ value


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("draw", [normal, large, dominated])
def test_errors_are_no_larger_than_those_of_float32(
    tiles: PrefillKernel, floats: PrefillKernel, draw: object, dim: int
) -> None:
    assert callable(draw)
    given = draw(dim)
    call = AttentionCall(dim**-0.5)
    expected = attend_precisely(*given, call.scale)
    ours, theirs = ((kernel.attend_causal(*given, call) - expected).abs() for kernel in (tiles, floats))
    assert ours.norm() < theirs.norm()
    assert ours.max() < 2 * theirs.max()


def test_without_tile_registers_nothing_is_rounded(floats: PrefillKernel) -> None:
    given = normal(64)
    exact, rounded = (floats.attend_causal(*given, AttentionCall(0.125, rounds=r)) for r in (False, True))
    assert torch.equal(exact, rounded)


@pytest.mark.parametrize("window", [None, 1, 100])
def test_a_run_begins_with_the_bits_of_a_shorter_run(tiles: PrefillKernel, window: int | None) -> None:
    given, call = normal(40), AttentionCall(0.2, window, sinks=torch.randn(HEADS))
    whole = tiles.attend_causal(*given, call)
    for end in (1, 5, 31, 33, 64, 127, 129, 300):
        query, key, value = (t[:, :end] for t in given)
        assert torch.equal(tiles.attend_causal(query, key, value, call), whole[:, :end])


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("window", [None, 30])
def test_only_queries_that_read_a_non_finite_number_are_not_finite(
    tiles: PrefillKernel, rounds: bool, bad: float, place: str, window: int | None
) -> None:
    query, key, value = normal(40)
    call = AttentionCall(0.2, window, rounds=rounds)
    clean = tiles.attend_causal(query, key, value, call)
    (key if place == "key" else value)[0, 150, 3] = bad
    out = tiles.attend_causal(query, key, value, call)
    own, end = HEADS // KV_HEADS, TOKENS if window is None else 150 + window
    assert not out[:own, 150:end].isfinite().any()
    out[:own, 150:end] = clean[:own, 150:end]
    assert torch.equal(out, clean)


def test_a_query_that_is_not_finite_spoils_its_own_result(tiles: PrefillKernel) -> None:
    expect_a_query_to_spoil_its_own_result(tiles, AttentionCall(0.2))


def expect_a_query_to_spoil_its_own_result(kernel: PrefillKernel, call: AttentionCall) -> None:
    query, key, value = normal(40)
    clean = kernel.attend_causal(query, key, value, call)
    for bad in (float("nan"), float("inf")):
        query[2, 70, 39] = bad
        out = kernel.attend_causal(query, key, value, call)
        assert out[2, 70].isnan().all()
        out[2, 70] = clean[2, 70]
        assert torch.equal(out, clean)


def test_values_that_bfloat16_would_round_to_infinity_fail(tiles: PrefillKernel) -> None:
    query, key, value = normal(40)
    value[0, 150, 3] = torch.finfo(torch.float32).max
    out = tiles.attend_causal(query, key, value, AttentionCall(0.2))
    assert out[0, :150].isfinite().all()
    assert out[0, 150:].isnan().all()


def test_a_system_that_refuses_tile_registers(floats: PrefillKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    load = build.load
    refusing = SimpleNamespace(skim_permitted=lambda: 0)
    monkeypatch.setattr(build, "load", lambda source: refusing if source == TILES else load(source))
    with pytest.raises(NativeUnavailable, match="does not let this process use tile registers"):
        PrefillKernel(TILES)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert native_prefill.tile_kernel() is None
    assert native_prefill.prefill_kernel.__wrapped__() is not None
