"""Checkpoints of other projects are read to the values they describe, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from skim.errors import ModelError
from skim.models.quantized.checkpoint import Checkpoint
from skim.models.quantized.packed import pack_words, unpack_words
from tests.models.quantized import packers
from tests.models.quantized.packers import Source, compressed_settings, random_source, write

NAME = "model.layers.0.mlp.up_proj"
SCALES = [torch.float16, torch.bfloat16]


def check(
    directory: Path, values: torch.Tensor, tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> Checkpoint:
    """Write a checkpoint and compare the restored weight, bit for bit."""
    checkpoint = Checkpoint(write(directory, {NAME: tensors}, config), "some/model")
    assert checkpoint.format == config["quant_method"]
    assert checkpoint.names() == {f"{NAME}.weight", "model.norm.weight", "lm_head.weight"}
    assert checkpoint.is_coded(f"{NAME}.weight")
    assert not checkpoint.is_coded("lm_head.weight")
    assert checkpoint.plain("lm_head.weight").dtype == torch.bfloat16
    assert torch.equal(checkpoint.coded(f"{NAME}.weight").restore(), values)
    return checkpoint


@given(
    bits=st.sampled_from([4, 8]), lines=st.integers(1, 3), count=st.integers(1, 40), seed=st.integers(0, 99)
)
def test_words_are_packed_from_their_lowest_bits(bits: int, lines: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (lines, count))
    words = packers.words(codes.tolist(), bits)
    assert torch.equal(pack_words(torch.from_numpy(codes.astype(np.uint8)), bits), words)
    assert np.array_equal(unpack_words(words, bits)[:, :count].numpy(), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_gptq(bits: int, version: int, ordered: bool, group: int, tmp_path: Path) -> None:
    source = random_source(bits, group, 24, 256, bits + group, ordered=ordered)
    checkpoint = check(tmp_path, source.values, *packers.gptq(source, version=version))
    assert (checkpoint.coded(f"{NAME}.weight").order is None) == (ordered or group == 256)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_with_rules_for_some_modules(bits: int, tmp_path: Path) -> None:
    source = random_source(bits, 64, 16, 128, 0)
    tensors, config = packers.gptq(source)
    check(tmp_path, source.values, tensors, config | {"bits": 12 - bits, "dynamic": {"+:.*": {"bits": bits}}})


def test_gptq_of_equal_zero_points_has_no_offsets(tmp_path: Path) -> None:
    source = random_source(4, 128, 16, 256, 0, symmetric=True)
    checkpoint = check(tmp_path, source.values, *packers.gptq(source))
    weight = checkpoint.coded(f"{NAME}.weight")
    assert weight.offset is None
    assert weight.zero == 8


def test_gptq_without_an_index_is_in_order(tmp_path: Path) -> None:
    source = random_source(4, 128, 16, 256, 0)
    tensors, config = packers.gptq(source)
    check(tmp_path / "zeros", source.values, tensors | {"g_idx": torch.zeros(256, dtype=torch.int32)}, config)
    del tensors["g_idx"]
    check(tmp_path / "none", source.values, tensors, config)


@pytest.mark.parametrize("packer", [packers.awq, packers.awq_gemv])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", SCALES)
def test_awq(packer: Callable[[Source], Any], group: int, dtype: torch.dtype, tmp_path: Path) -> None:
    source = random_source(4, group, 24, 384, group, dtype=dtype)
    check(tmp_path, source.values, *packer(source))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 384])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("dtype", SCALES)
def test_compressed_tensors(
    bits: int, group: int, symmetric: bool, ordered: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A group of 384 is all columns: a scale for each output."""
    source = random_source(bits, group, 21, 384, group, symmetric=symmetric, ordered=ordered, dtype=dtype)
    check(tmp_path, source.values, *packers.compressed(source, symmetric=symmetric))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [96, 576, 640])
def test_compressed_tensors_of_int8(symmetric: bool, columns: int, tmp_path: Path) -> None:
    source = random_source(8, columns, 21, columns, 0, symmetric=symmetric, dtype=torch.bfloat16)
    tensors, config = packers.compressed_int8(source, symmetric=symmetric)
    check(tmp_path, source.values, tensors, config)
    check(tmp_path / "naive", source.values, tensors, config | {"format": "naive-quantized"})


def fp8(rows: int, columns: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw) * 40).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (200, 576), (40, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_in_blocks(rows: int, columns: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """The last block of a row or a column may be smaller."""
    stored = fp8(rows, columns, 0)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)).to(dtype) * 0.01
    values = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(0, columns, 32):
            one = float(scale[row // 128, column // 128])
            values[row, column : column + 32] = stored[row, column : column + 32].float() * one
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    check(tmp_path, values, {"weight": stored, "weight_scale_inv": scale}, config)


def test_fp8_with_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    stored = fp8(256, 256, 0)
    scale = torch.tensor([[0.5, 2.0**-9], [2.0**-100, 4.0]])
    values = stored.float() * scale.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    parts = {"weight": stored, "weight_scale_inv": scale.to(torch.float8_e8m0fnu)}
    check(tmp_path, values, parts, {"quant_method": "fp8", "scale_fmt": "ue8m0"})


def test_mxfp4_is_restored_as_transformers_does(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(0, 252, (3, 10, 4), generator=draw, dtype=torch.uint8)
    experts = "model.layers.0.mlp.experts"
    directory = write(
        tmp_path,
        {
            experts: {
                "down_proj_blocks": blocks,
                "down_proj_scales": scales,
                "down_proj_bias": torch.ones(3, 10),
            }
        },
        {"quant_method": "mxfp4"},
    )
    checkpoint = Checkpoint(directory, "some/model")
    assert checkpoint.format == "mxfp4"
    weights = {f"{experts}.down_proj", f"{experts}.down_proj_bias", "model.norm.weight", "lm_head.weight"}
    assert checkpoint.names() == weights
    assert not any(checkpoint.is_coded(name) for name in weights)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(checkpoint.plain(f"{experts}.down_proj").float(), expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (40, 1), (40,), (40, 3)])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_with_other_scales(shape: tuple[int, ...], method: str, tmp_path: Path) -> None:
    stored = fp8(40, 192, 0)
    scale = torch.rand(shape) * 0.01
    wide = scale[:, None] if shape == (40,) else scale
    wide = wide.repeat_interleave(64, dim=1) if shape == (40, 3) else wide
    config: dict[str, Any] = {"quant_method": "fp8"}
    if method != "fp8":
        config = compressed_settings("float-quantized", num_bits=8, type="float", strategy="channel")
    parts = {"weight": stored, "weight_scale": scale, "input_scale": torch.ones(1)}
    check(tmp_path, stored.float() * wide, parts, config)


def test_a_plain_directory_has_no_format(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, 2), "b.low": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path, "some/model")
    assert checkpoint.format is None
    assert checkpoint.names() == {"a.weight", "b.low"}
    assert torch.equal(checkpoint.plain("a.weight"), torch.ones(2, 2))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2), "old.weight": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b.weight": torch.zeros(2)}, tmp_path / "two.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Checkpoint(tmp_path, "some/model").names() == {"a.weight", "b.weight"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "quantization method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "2 bits"),
        ({"quant_method": "gptq", "bits": "4"}, "bits '4'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version 'gemv_fast'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        (compressed_settings("marlin-24", num_bits=4), "format 'marlin-24'"),
        (compressed_settings("nvfp4-pack-quantized", num_bits=4), "format 'nvfp4-pack-quantized'"),
        (compressed_settings("pack-quantized", num_bits=3), "3 bits"),
        (
            compressed_settings("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config of the format 'sparse-24'",
        ),
        (
            compressed_settings("pack-quantized", num_bits=4) | {"transform_config": {"a": 1}},
            "transform_config",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"some/model: .*{named}.*; .*use"):
        Checkpoint(write(tmp_path, {}, change), "some/model")


def test_packed_weights_without_settings_are_refused(tmp_path: Path) -> None:
    directory = write(tmp_path, {NAME: packers.gptq(random_source(4, 64, 8, 64, 0))[0]}, {})
    (directory / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"{NAME}.qweight .*no quantization_config"):
        Checkpoint(directory, "some/model")


def test_columns_that_no_group_divides_are_refused(tmp_path: Path) -> None:
    source = random_source(4, 8, 8, 24, 0)
    directory = write(tmp_path, {NAME: packers.gptq(source)[0]}, packers.gptq(source)[1])
    with pytest.raises(ModelError, match=f"groups of 8 for the 24 columns of {NAME}"):
        Checkpoint(directory, "some/model").coded(f"{NAME}.weight")
