"""A finite weight that becomes infinite in the model's dtype is named; others load as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from skim.config import ModelConfig
from skim.errors import ModelError
from skim.models import overflow
from skim.models.load import LoadedModel, load
from skim.models.overflow import can_overflow, check_codes, convert
from skim.models.quantized.format import CodedWeight
from skim.models.quantized.shards import Shards
from tests import tiny

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WEIGHT = "model.layers.1.mlp.up_proj.weight"
CPU = torch.device("cpu")


def loaded(path: Path, dtype: str, quantization: str = "auto") -> LoadedModel:
    return load(path, ModelConfig(model="mine", device="cpu", dtype=dtype, quantization=quantization))


def change(path: Path, name: str, value: float, dtype: torch.dtype = torch.float32) -> None:
    """Set one value of a weight, and store all weights in the dtype."""
    [file] = path.glob("*.safetensors")
    tensors = {key: one.to(dtype) for key, one in load_file(file).items()}
    tensors[name].view(-1)[7] = value
    save_file(tensors, file, metadata={"format": "pt"})


@given(
    stored=st.sampled_from(FLOATS),
    dtype=st.sampled_from(FLOATS),
    values=st.lists(
        st.floats(allow_nan=True, allow_infinity=True)
        | st.floats(-1e39, 1e39)
        | st.floats(65000, 66000)
        | st.floats(-1, 1),
        max_size=6,
    ),
)
def test_conversion_refuses_exactly_the_finite_values_that_become_infinite(
    stored: torch.dtype, dtype: torch.dtype, values: list[float]
) -> None:
    value = torch.tensor(values, dtype=torch.float64).to(stored)
    plain = value.to(dtype)
    lost = [
        float(before)
        for before, after in zip(value.tolist(), plain.tolist(), strict=True)
        if math.isfinite(before) and not math.isfinite(after)
    ]
    if lost:
        assert can_overflow(stored, dtype)
        with pytest.raises(ModelError, match=r"^mine has values up to ") as caught:
            convert(value, CPU, dtype, "mine")
        named = float(str(caught.value).split("up to ")[1].split(",")[0])
        assert named == pytest.approx(max(map(abs, lost)), rel=1e-5)
    else:
        torch.testing.assert_close(convert(value, CPU, dtype, "mine"), plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", ["auto", "none", "int4", "int8", "fp8"])
@pytest.mark.parametrize("name", [WEIGHT, "model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_too_large_for_float16_is_named(
    stored: torch.dtype, quantization: str, name: str, tmp_path: Path
) -> None:
    path = tiny.save("llama", tmp_path)
    change(path, name, -98304.0, stored)
    says = (
        rf"^mine: {name} has values up to 98304, but float16 ends at 65504; use --dtype bfloat16 or float32"
    )
    with pytest.raises(ModelError, match=says):
        loaded(path, "float16", quantization)
    if quantization in ("auto", "none"):
        for dtype in ("bfloat16", "float32"):
            weight = loaded(path, dtype, quantization).module.state_dict()[name]
            assert weight.view(-1)[7] == -98304


def test_a_weight_too_large_for_bfloat16_or_float32_is_named(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    change(path, WEIGHT, torch.finfo(torch.float32).max)
    with pytest.raises(ModelError, match=rf"{WEIGHT} has values up to 3.40282e\+38.*use --dtype float32 "):
        loaded(path, "bfloat16")
    change(path, WEIGHT, 1e300, torch.float64)
    with pytest.raises(
        ModelError, match=rf"{WEIGHT} has values up to 1e\+300, but float32.*use other weights"
    ):
        loaded(path, "float32")


def test_values_that_round_to_the_largest_one_are_fine(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    change(path, WEIGHT, 65519.0)
    assert loaded(path, "float16").module.state_dict()[WEIGHT].view(-1)[7] == 65504


def test_a_tied_weight_has_its_name_in_the_file(tmp_path: Path) -> None:
    path = tiny.save("qwen3", tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    [file] = path.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("lm_head.weight", None)
    save_file(tensors, file, metadata={"format": "pt"})
    change(path, "model.embed_tokens.weight", 1e6)
    with pytest.raises(ModelError, match=r"mine: model\.embed_tokens\.weight has values up to 1e\+06"):
        loaded(path, "float16")


def test_a_weight_that_transformers_renames_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save("llama", tmp_path)
    change(path, WEIGHT, 1e6)
    monkeypatch.setattr(Shards, "__contains__", lambda self, name: False)
    with pytest.raises(ModelError, match=rf"mine: {WEIGHT} has values that are not finite, but float16"):
        loaded(path, "float16")


def test_a_value_that_is_not_finite_in_the_file_is_no_overflow(tmp_path: Path) -> None:
    path = tiny.save("llama", tmp_path)
    for value in (math.inf, math.nan):
        change(path, WEIGHT, value)
        with pytest.raises(ModelError, match="its logits are not finite"):
            loaded(path, "float16")


def test_nothing_is_read_if_no_type_in_the_files_can_overflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.save("llama", tmp_path)

    def forbidden(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(overflow, "_finite", forbidden)
    for stored, dtype in (
        (torch.float32, "float32"),
        (torch.bfloat16, "float32"),
        (torch.float16, "bfloat16"),
    ):
        change(path, WEIGHT, 1.0, stored)
        loaded(path, dtype)


@given(
    bits=st.sampled_from([4, 8]),
    scale=st.sampled_from([1e-3, 100.0, 300.0, 4000.0, 5000.0, 60000.0]),
    zero=st.integers(0, 15),
    code=st.integers(0, 15),
)
def test_codes_are_refused_if_a_restored_value_is_infinite(
    bits: int, scale: float, zero: int, code: int
) -> None:
    low = torch.full((2, 32 if bits == 8 else 16), code if bits == 8 else 17 * code, dtype=torch.uint8)
    weight = CodedWeight(bits, 32, low, torch.full((2, 1), scale), zero=zero)
    if bool(weight.restore().half().isfinite().all()):
        check_codes(weight, torch.float16, "mine")
    else:
        with pytest.raises(ModelError, match=r"mine has values up to .* but float16 ends at 65504"):
            check_codes(weight, torch.float16, "mine")
    check_codes(weight, torch.bfloat16, "mine")
