"""Write a quantized copy of a model as a compressed-tensors checkpoint, which other engines read too.

Matrices of linear layers are packed (`pack-quantized`). Embeddings, the output head, routers and everything
else stay as they are. Tensors are read, quantized and written one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from skim.errors import ModelError, first_line
from skim.models.quantized.checkpoint import Checkpoint
from skim.models.quantized.format import CodedWeight, unpack
from skim.models.quantized.packed import fit_group, pack_words
from skim.models.quantized.quantize import can_quantize, quantize, scale_type
from skim.models.quantized.stream import NAMES, Piece, Promise, write_shards
from skim.progress import byte_bar

BITS = {"int4": 4, "int8": 8}
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*")
NOT_COPIED = ("config.json", "model.safetensors.index.json")
ROUTERS = ("gate", "router", "shared_expert_gate")


def write_quantized(source: Path, name: str, how: str, target: Path, *, progress: bool = True) -> None:
    """Write the model in the directory `source`, quantized, to the new directory `target`."""
    checkpoint = Checkpoint(source, name)
    linear, tables = _layers(source, name)
    coded = sorted(one for one in linear if f"{one}.weight" in checkpoint.names())
    plan = {one: Promise(*checkpoint.kind(f"{one}.weight")) for one in coded}
    plan = {one: promise for one, promise in plan.items() if can_quantize(promise.shape)}
    if linear and not coded:
        raise ModelError(
            f"{name}: its files name no linear layer as transformers does, so Skim cannot tell what to "
            "quantize; use --quantization when you load it"
        )
    if not plan:
        raise ModelError(f"{name} has no linear layers that can be quantized; use it as it is")
    group = 128
    for promise in plan.values():
        group = fit_group(promise.shape[1], group) or group
    pieces = [
        _packed(checkpoint, one, plan[one], how, group)
        if (one := weight.removesuffix(".weight")) in plan
        else _plain(checkpoint, weight)
        for weight in sorted(checkpoint.names())
    ]
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    matrices = {one.removesuffix(".weight") for one in checkpoint.names() if _is_matrix(checkpoint, one)}
    config["quantization_config"] = _settings(how, group, sorted((linear | matrices) - tables - set(plan)))
    with (
        _new_directory(target) as directory,
        byte_bar(f"quantizing {name}", sum(piece.nbytes for piece in pieces), progress) as advance,
    ):
        write_shards(directory, pieces, advance)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in {file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}:
            if file.name not in NOT_COPIED:
                shutil.copyfile(file, directory / file.name)


def packed_parts(weight: CodedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a quantized weight, by their endings."""
    codes = weight.low if weight.bits == 8 else unpack(weight.low, weight.high, weight.bits)
    parts = {
        "weight_packed": pack_words(codes, weight.bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor([weight.rows, weight.columns]),
    }
    if weight.bits == 4:
        zeros = torch.full(weight.scale.shape, weight.zero, dtype=torch.uint8)
        zeros = zeros if weight.offset is None else weight.offset
        parts["weight_zero_point"] = pack_words(zeros.t(), weight.bits).t().contiguous()
    return parts


def _packed(checkpoint: Checkpoint, module: str, promise: Promise, how: str, group: int) -> Piece:
    def make() -> dict[str, torch.Tensor]:
        name = f"{module}.weight"
        value = checkpoint.coded(name).restore() if checkpoint.is_coded(name) else checkpoint.plain(name)
        parts = packed_parts(quantize(value, how, name, group))
        return {f"{module}.{ending}": part for ending, part in parts.items()}

    rows, columns = promise.shape
    bits, groups = BITS[how], columns // group
    promised = {
        f"{module}.weight_packed": Promise(torch.int32, (rows, columns * bits // 32)),
        f"{module}.weight_scale": Promise(scale_type(promise.dtype), (rows, groups)),
        f"{module}.weight_shape": Promise(torch.int64, (2,)),
    }
    if bits == 4:
        zeros = Promise(torch.int32, (-(-rows * bits // 32), groups))
        promised[f"{module}.weight_zero_point"] = zeros
    return Piece(promised, make)


def _plain(checkpoint: Checkpoint, name: str) -> Piece:
    def make() -> dict[str, torch.Tensor]:
        if checkpoint.is_coded(name):
            return {name: checkpoint.coded(name).restore()}
        return {name: checkpoint.plain(name)}

    dtype, shape = checkpoint.kind(name)
    if dtype not in NAMES:
        raise ModelError(f"the tensor {name} has the type {dtype}, which Skim does not write")
    return Piece({name: Promise(dtype, shape)}, make)


def _is_matrix(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(".weight") and len(checkpoint.kind(name)[1]) == 2


def _layers(source: Path, name: str) -> tuple[set[str], set[str]]:
    """Names of the model's linear layers, without the output head and routers, and of its tables."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # a family's config code may raise anything
        raise ModelError(
            f"{name}: cannot build its model: {first_line(error)}; check its config.json"
        ) from error
    head = module.get_output_embeddings()
    linear = {
        one
        for one, part in module.named_modules()
        if isinstance(part, torch.nn.Linear) and part is not head and one.rpartition(".")[2] not in ROUTERS
    }
    return linear, {one for one, part in module.named_modules() if isinstance(part, torch.nn.Embedding)}


def _settings(how: str, group: int, ignored: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": BITS[how],
        "type": "int",
        "symmetric": how == "int8",
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
    }
    one = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": one},
        "ignore": sorted({"lm_head", *ignored}),
        "kv_cache_scheme": None,
    }


@contextlib.contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """An empty directory that becomes `target` at the end, or is removed."""
    target = target.expanduser().absolute()
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ModelError(f"{target} exists and is not empty; name a new directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cannot write {target}: {error.strerror or error}; free some space or name another directory"
        ) from error
