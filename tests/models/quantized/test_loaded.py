"""A model in the files of another project computes with the weights that they describe."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skim.config import EngineConfig
from skim.models.load import load
from skim.models.quantized.checkpoint import Checkpoint
from tests import tiny
from tests.models.quantized import packers
from tests.models.quantized.packers import Source, compressed_settings, random_source
from tests.models.quantized.restored import restored, restored_model

Packed = tuple[dict[str, torch.Tensor], dict[str, Any]]


def fp8(source: Source) -> Packed:
    stored = (source.values * 50).to(torch.float8_e4m3fn)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"weight": stored, "weight_scale_inv": torch.full((1, 1), 0.02)}, settings


def float_quantized(source: Source) -> Packed:
    parts = fp8(source)[0]
    settings = compressed_settings("float-quantized", num_bits=8, type="float", strategy="channel")
    scale = torch.linspace(0.01, 0.03, len(source.codes))[:, None].to(torch.bfloat16)
    return {"weight": parts["weight"], "weight_scale": scale}, settings


FORMATS: dict[str, Callable[[int, int, int], Packed]] = {
    "gptq": lambda rows, columns, seed: packers.gptq(random_source(4, 32, rows, columns, seed)),
    "gptq-ordered": lambda *size: packers.gptq(random_source(8, 32, *size, ordered=False), version=2),
    "awq": lambda *size: packers.awq(random_source(4, 32, *size)),
    "packed": lambda *size: packers.compressed(random_source(4, 32, *size), symmetric=False),
    "fp8": lambda *size: fp8(random_source(4, 32, *size, symmetric=True)),
    "float": lambda *size: float_quantized(random_source(4, 32, *size, symmetric=True)),
}


def save_quantized(directory: Path, name: str) -> Path:
    """A tiny model whose linear layers are in the given format, with random codes."""
    tiny.save("llama", directory)
    tensors, settings = load_file(directory / "model.safetensors"), {}
    for seed, weight in enumerate(sorted(tensors)):
        module = weight.removesuffix(".weight")
        if not module.endswith("_proj"):
            continue
        parts, settings = FORMATS[name](*tensors.pop(weight).shape, seed)
        tensors |= {f"{module}.{ending}": value.contiguous() for ending, value in parts.items()}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_restored_weights(name: str, tmp_path: Path) -> None:
    directory = save_quantized(tmp_path / "model", name)
    model = load(directory, EngineConfig.of(model=str(directory), device="cpu").model)
    expected = restored_model(directory)
    with torch.no_grad():
        wanted = expected(torch.arange(65, 97)[None]).logits
    torch.testing.assert_close(tiny.logits(model.module, 32), wanted, rtol=1e-3, atol=1e-3)


def test_packed_experts_are_restored(tmp_path: Path) -> None:
    directory = tiny.save("gpt_oss", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=draw, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    model = load(directory, EngineConfig.of(model=str(directory), device="cpu").model)
    expected = restored(Checkpoint(directory, "tiny"))
    found = model.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
