"""Every launch with coded weights passes the first stage of Triton's compiler, on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.attention.test_triton_types import Recorder, recorder  # isort: skip (skips where nothing compiles)

from skim.models.quantized import triton_pairs
from skim.models.quantized.triton_product import multiply_few_tokens
from skim.models.quantized.triton_restore import restore_stored
from tests.models.quantized.weights import every_kind, random_weight

__all__ = ["recorder"]  # the fixture
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WEIGHTS = dict(list(every_kind(5, 2000))[::5])  # steps of 5: all kinds, numbers of bits and groups


@pytest.mark.parametrize("name", WEIGHTS)
def test_launches_with_a_coded_weight(name: str, recorder: Recorder) -> None:
    seed = list(WEIGHTS).index(name)
    weight, dtype = WEIGHTS[name], DTYPES[seed % 3]
    bias = torch.zeros(5, dtype=dtype) if seed % 2 else None
    for tokens in (1, 2 + seed * 11 % 63):
        multiply_few_tokens(torch.zeros(tokens, weight.columns, dtype=dtype), weight, bias)
    restore_stored(weight, dtype)
    restore_stored(weight, dtype, torch.tensor([2, 0]))
    assert {"vector_kernel", "restore_kernel"} < set(recorder.kernels)
    assert len({"matrix_kernel", "pairs_kernel"} & set(recorder.kernels)) == 1


@pytest.mark.parametrize("assembly", [False, True])
@pytest.mark.parametrize("kind", ["zeros", "zero"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_launches_with_pairs_of_codes(
    dtype: torch.dtype, kind: str, assembly: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_pairs, "has_assembly", lambda _: assembly)
    for group, splits in ((64, 1), (128, 3)):
        weight = random_weight(kind, 4, group, 70, 512, 0)
        launch = triton_pairs.Launch(64, splits, 4, 4)
        triton_pairs.multiply_pairs(torch.zeros(20, 512, dtype=dtype), weight, None, launch)
    assert set(recorder.kernels) == {"pairs_kernel"}
