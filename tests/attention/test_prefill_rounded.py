"""Rounded calls of the prefill kernels for pairs of bfloat16 numbers and for tile registers.

These are the calls of forwards that only rank tokens.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from skim.attention.cpu.native import NativeBackend
from skim.attention.cpu.native_kernel import Kernel
from skim.attention.cpu.native_prefill import PAIRS, SOURCE, TILES, PrefillKernel
from skim.attention.cpu.torch_backend import TorchBackend
from skim.attention.step import AttentionCall
from tests.attention.test_native_prefill import (
    BAD,
    CASES,
    SHAPE,
    Case,
    Chunks,
    expect_non_finite_values_to_stay,
    make_kernel,
)
from tests.attention.test_prefill_tiles import (
    HEADS,
    attend_precisely,
    dominated,
    expect_a_query_to_spoil_its_own_result,
    large,
    normal,
)


@pytest.fixture(scope="module", params=["pairs", "tiles"])
def kernel(request: pytest.FixtureRequest) -> PrefillKernel:
    return make_kernel(SOURCE, PAIRS) if request.param == "pairs" else make_kernel(TILES)


@pytest.fixture(scope="module")
def native(kernel: PrefillKernel) -> NativeBackend:
    return NativeBackend(Kernel(), None, kernel)


@settings(max_examples=150)
@given(case=CASES)
def test_it_equals_the_torch_backend_up_to_rounding(native: NativeBackend, case: Case) -> None:
    chunks, call = case._replace(sharpness=1.0).make(rounds=True)
    torch.testing.assert_close(
        chunks.attend(native, call), chunks.attend(TorchBackend(), call), atol=3e-2, rtol=3e-2
    )


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("window", [None, 90])
def test_rounding_costs_what_bfloat16_loses(kernel: PrefillKernel, dim: int, window: int | None) -> None:
    given = normal(dim)
    exact, rounded = (
        kernel.attend_causal(*given, AttentionCall(dim**-0.5, window=window, rounds=rounds))
        for rounds in (False, True)
    )
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("draw", [large, dominated])
def test_rounding_costs_little_where_scores_are_large(kernel: PrefillKernel, draw: object, dim: int) -> None:
    assert callable(draw)
    given = draw(dim)
    call = AttentionCall(dim**-0.5, rounds=True)
    expected = attend_precisely(*given, call.scale)
    assert (kernel.attend_causal(*given, call) - expected).norm() < 3e-2 * expected.norm()


@pytest.mark.parametrize("window", [None, 1, 100])
def test_a_run_begins_with_the_bits_of_a_shorter_run(kernel: PrefillKernel, window: int | None) -> None:
    given, call = normal(40), AttentionCall(0.2, window, sinks=torch.randn(HEADS), rounds=True)
    whole = kernel.attend_causal(*given, call)
    for end in (1, 5, 31, 33, 64, 127, 129, 300):
        query, key, value = (t[:, :end] for t in given)
        assert torch.equal(kernel.attend_causal(query, key, value, call), whole[:, :end])


@pytest.mark.parametrize("window", [None, 50])
def test_a_token_has_the_same_bits_wherever_chunks_are_cut_and_with_any_number_of_threads(
    native: NativeBackend, window: int | None
) -> None:
    call = AttentionCall(0.3, window=window, rounds=True)
    whole = Chunks(SHAPE, 3, [(70, 230)])
    expected = whole.attend(native, call)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(whole.attend_in_parts(native, call, [0, 2, 59, 62, 150, 230]), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_non_finite_values_are_kept_and_stay_in_their_row(
    native: NativeBackend, bad: float, place: str
) -> None:
    expect_non_finite_values_to_stay(native, AttentionCall(0.125, rounds=True), bad, place)


def test_a_query_that_is_not_finite_spoils_its_own_result(kernel: PrefillKernel) -> None:
    expect_a_query_to_spoil_its_own_result(kernel, AttentionCall(0.2, rounds=True))
