"""Checkpoints of other projects, packed by plain loops over the documented bit positions.

Every function takes a `Source` and returns the tensors of one module, and the settings for config.json.
`Source.values` are the weights they describe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the output at each place of a word


@dataclass
class Source:
    """Codes, scales and zero points of a matrix. All are unsigned."""

    bits: int
    group: int
    codes: np.ndarray  # [rows, columns]
    scale: torch.Tensor  # [rows, groups]
    zeros: np.ndarray  # [rows, groups]
    index: np.ndarray  # [columns]: the group of every column

    @property
    def values(self) -> torch.Tensor:
        """float32 [rows, columns], computed without rounding and rounded once."""
        scale = self.scale.double().numpy()[:, self.index]
        zeros = self.zeros.astype(np.float64)[:, self.index]
        return torch.from_numpy((scale * (self.codes - zeros)).astype(np.float32))


def random_source(
    bits: int,
    group: int,
    rows: int,
    columns: int,
    seed: int,
    *,
    symmetric: bool = False,
    ordered: bool = True,
    dtype: torch.dtype = torch.float16,
    lowest_zero: int = 0,
) -> Source:
    draw = np.random.default_rng(seed)
    groups = columns // group
    codes = draw.integers(0, 2**bits, (rows, columns))
    zeros = draw.integers(lowest_zero, 2**bits, (rows, groups))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scale = torch.from_numpy(draw.normal(0, 0.02, (rows, groups))).to(dtype)
    index = np.arange(columns) // group
    return Source(bits, group, codes, scale, zeros, index if ordered else draw.permutation(index))


def pack_line(values: list[int], bits: int) -> list[int]:
    """Words of 32 bits as signed numbers, value i at bit i * bits."""
    per = 32 // bits
    words = []
    for first in range(0, len(values), per):
        word = 0
        for place, value in enumerate(values[first : first + per]):
            word |= int(value) << (bits * place)
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def words(lines: list[list[int]], bits: int) -> torch.Tensor:
    return torch.tensor([pack_line(line, bits) for line in lines], dtype=torch.int32)


def gptq(source: Source, *, version: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """qweight packs along the inputs, qzeros along the outputs."""
    zeros = (source.zeros - (1 if version == 1 else 0)) % 2**source.bits
    tensors = {
        "qweight": words(source.codes.tolist(), source.bits).t().contiguous(),
        "qzeros": words(zeros.T.tolist(), source.bits),
        "scales": source.scale.t().contiguous(),
        "g_idx": torch.tensor(source.index, dtype=torch.int32),
    }
    settings = {"quant_method": "gptq", "bits": source.bits, "group_size": source.group, "sym": False}
    return tensors, settings | ({"checkpoint_format": "gptq_v2"} if version == 2 else {})


def awq_line(values: list[int]) -> list[int]:
    shuffled = [values[first + place] for first in range(0, len(values), 8) for place in AWQ_ORDER]
    return pack_line(shuffled, 4)


def awq(source: Source) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "qweight": torch.tensor([awq_line(line) for line in source.codes.T.tolist()], dtype=torch.int32),
        "qzeros": torch.tensor([awq_line(line) for line in source.zeros.T.tolist()], dtype=torch.int32),
        "scales": source.scale.t().contiguous(),
    }
    settings = {"bits": 4, "group_size": source.group, "version": "gemm", "zero_point": True}
    return tensors, {"quant_method": "awq"} | settings


def awq_gemv(source: Source) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    groups = source.scale.shape[1]
    multiple = {64: 2, 32: 4}.get(source.group, 1)
    width = -(-groups // (8 * multiple)) * multiple
    zeros = np.zeros((len(source.codes), width * 8), dtype=np.int64)
    zeros[:, :groups] = source.zeros
    scale = torch.zeros(len(source.codes), width * 8, dtype=source.scale.dtype)
    scale[:, :groups] = source.scale
    tensors = {
        "qweight": words(source.codes.tolist(), 4),
        "qzeros": words(zeros.tolist(), 4),
        "scales": scale,
    }
    settings = {"bits": 4, "group_size": source.group, "version": "gemv", "zero_point": True}
    return tensors, {"quant_method": "awq"} | settings


def compressed_settings(format_: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def compressed(source: Source, *, symmetric: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight_packed": words(source.codes.tolist(), source.bits),
        "weight_scale": source.scale.clone(),
        "weight_shape": torch.tensor(source.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(source.zeros.T.tolist(), source.bits).t().contiguous()
    if (np.diff(source.index) < 0).any():
        tensors["weight_g_idx"] = torch.tensor(source.index, dtype=torch.int32)
    whole = source.group == source.codes.shape[1]
    strategy: dict[str, Any] = {"strategy": "channel", "group_size": None}
    if not whole:
        strategy = {"strategy": "group", "group_size": source.group}
    settings = {"num_bits": source.bits, "type": "int", "symmetric": symmetric, **strategy}
    return tensors, compressed_settings("pack-quantized", **settings)


def compressed_int8(source: Source, *, symmetric: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {
        "weight": torch.from_numpy((source.codes - 128).astype(np.int8)),
        "weight_scale": source.scale.clone(),
    }
    if not symmetric:
        tensors["weight_zero_point"] = torch.from_numpy((source.zeros - 128).astype(np.int8))
    return tensors, compressed_settings(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=symmetric
    )


def write(directory: Path, modules: dict[str, dict[str, torch.Tensor]], settings: dict[str, Any]) -> Path:
    """A directory with these modules, and some plain tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{module}.{name}": value for module, parts in modules.items() for name, value in parts.items()
    }
    tensors["model.norm.weight"] = torch.linspace(0, 1, 8)
    tensors["lm_head.weight"] = torch.linspace(-1, 1, 64).view(8, 8).to(torch.bfloat16)
    save_file({name: value.contiguous() for name, value in tensors.items()}, directory / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
