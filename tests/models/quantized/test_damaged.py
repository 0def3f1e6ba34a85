"""Damaged quantized files give a ModelError: never another exception, a crash or a large allocation.

Some damage is harmless, such as another code. Then all restored values are finite.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from skim.errors import ModelError
from skim.models.gguf import convert
from skim.models.gguf.file import GGUFFile
from skim.models.quantized.checkpoint import Checkpoint
from skim.models.quantized.planes import describe
from skim.models.quantized.quantize import quantize
from tests.models.quantized import packers
from tests.models.quantized.packers import compressed_settings, random_source
from tests.models.quantized.test_gguf_types import KINDS, random_blocks, write_one
from tests.models.quantized.weights import random_weight
from tests.models.test_gguf import quantized, write_gguf

NAME = "model.layers.0.mlp.up_proj"
ROOM = 2**28  # bytes that a case may allocate

Tensors = dict[str, torch.Tensor]
Case = tuple[Tensors, dict[str, Any]]


def planes(kind: str, bits: int, group: int) -> Case:
    weight = random_weight(kind, bits, group, 16, 256, 0)
    return dict(weight.planes), describe({NAME: weight})


def fp8() -> Case:
    weight = quantize(torch.randn(64, 128), "fp8")
    parts = {"weight": weight.low, "weight_scale_inv": torch.rand(1, 1)}
    return parts, {"quant_method": "fp8", "weight_block_size": [128, 128]}


def float_quantized() -> Case:
    weight = quantize(torch.randn(64, 128), "fp8")
    settings = compressed_settings("float-quantized", num_bits=8, type="float", strategy="group")
    return {"weight": weight.low, "weight_scale": torch.rand(64, 2)}, settings


SOUND: dict[str, Callable[[], Case]] = {
    "skim-offset": lambda: planes("offset", 5, 32),
    "skim-super": lambda: planes("super-offset", 4, 32),
    "skim-ordered": lambda: planes("ordered", 8, 64),
    "gptq": lambda: packers.gptq(random_source(4, 64, 16, 128, 0, ordered=False)),
    "awq": lambda: packers.awq(random_source(4, 64, 16, 128, 0)),
    "awq-gemv": lambda: packers.awq_gemv(random_source(4, 64, 16, 128, 0)),
    "packed": lambda: packers.compressed(random_source(4, 64, 16, 128, 0, ordered=False), symmetric=False),
    "int8": lambda: packers.compressed_int8(random_source(8, 128, 16, 128, 0), symmetric=False),
    "fp8": fp8,
    "float": float_quantized,
}


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let larger allocations fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_all(directory: Path) -> dict[str, torch.Size]:
    """Read every weight. Raises a ModelError, or all coded values are finite. Returns their shapes."""
    shapes = {}
    with little_memory():
        checkpoint = Checkpoint(directory, "damaged/model")
        for name in checkpoint.names():
            if not checkpoint.is_coded(name):
                checkpoint.plain(name)
                continue
            values = checkpoint.coded(name).restore()
            assert values.isfinite().all()
            shapes[name] = values.shape
    return shapes


def why_refused(act: Callable[[], Any]) -> str | None:
    """The ModelError's message, or None."""
    try:
        act()
    except ModelError as error:
        return str(error)
    return None


# -- damage to tensors and settings, which must be noticed


def other_shape(draw: random.Random, tensors: Tensors, settings: dict[str, Any]) -> None:
    name = draw.choice([name for name, value in tensors.items() if value.numel() > 3])
    value = tensors[name]
    changes = [
        lambda: value.reshape(-1)[:-1],
        lambda: value[None],
        lambda: value[:0],
        lambda: value[: len(value) - 1],
        lambda: torch.cat((value, value)),
        lambda: torch.cat((value, value, value), dim=-1),
        lambda: value.reshape(-1),
        lambda: value.reshape(1, -1),
        lambda: value.reshape(-1, 1),
        lambda: value[:1],
        lambda: value[..., :1],
    ]
    changed = draw.choice(changes)()
    tensors[name] = changed if changed.shape != value.shape else changed[None]


def other_type(draw: random.Random, tensors: Tensors, settings: dict[str, Any]) -> None:
    name = draw.choice(sorted(tensors))
    dtypes = [torch.int16, torch.float64, torch.bool, torch.float8_e5m2, torch.complex64]
    tensors[name] = tensors[name].float().to(draw.choice(dtypes))


def lost_tensor(draw: random.Random, tensors: Tensors, settings: dict[str, Any]) -> None:
    optional = {"g_idx", "weight_g_idx", "weight_zero_point", "qweight", "weight", "order", "offset"}
    del tensors[draw.choice(sorted(set(tensors) - optional))]


def absurd_scale(draw: random.Random, tensors: Tensors, settings: dict[str, Any]) -> None:
    name = draw.choice([name for name in tensors if "scale" in name or name == "factor"])
    if not tensors[name].dtype.is_floating_point:
        name = "factor"
    value = tensors[name].clone()
    bad = [float("nan"), float("inf"), -float("inf")]
    if value.dtype == torch.float32:
        bad += [3e38, -3e38]
    value.view(-1)[0 if name == "scales" else draw.randrange(value.numel())] = draw.choice(bad)
    tensors[name] = value


def bad_settings(draw: random.Random, tensors: Tensors, settings: dict[str, Any]) -> None:
    """Values that no setting has, in places that are read."""
    method = settings["quant_method"]
    odd = draw.choice([-3, 7, "4", [4], {"a": 1}, 10**30])
    match method:
        case "skim":
            settings["weights"][NAME][draw.choice(["bits", "group", "zero"])] = odd if odd != 7 else 999
        case "gptq":
            settings[draw.choice(["bits", "checkpoint_format"])] = odd
        case "awq":
            settings[draw.choice(["bits", "group_size", "version"])] = odd
        case "compressed-tensors":
            group = settings["config_groups"]["group_0"]
            draw.choice(
                [
                    lambda: settings.update(format=odd),
                    lambda: settings.update(config_groups=[odd]),
                    lambda: group.update(weights=[odd]),
                    lambda: group["weights"].update(num_bits=odd),
                    lambda: settings.update(sparsity_config={"format": "sparse-24-bitmask"}),
                ]
            )()
        case _:
            settings["fmt"] = odd


def wrong_index(draw: random.Random, tensors: Tensors, settings: dict[str, Any]) -> None:
    """Groups or an order that are out of range or uneven; fp8 codes that are no numbers."""
    for name in ("g_idx", "weight_g_idx", "order"):
        if name in tensors:
            value = tensors[name].clone()
            place = draw.randrange(1, len(value))
            bad = [int(value[place]) + 1, -5 if name != "weight_g_idx" else 99, 2**31 - 1, len(value)]
            value[place] = draw.choice([one for one in bad if one != int(value[place])])
            tensors[name] = value
            return
    if "weight_shape" in tensors:
        tensors["weight_shape"] = torch.tensor(draw.choice([[-16, 128], [16, 2**60], [0, 0], [2**40, 2**40]]))
        return
    for name in ("weight", "low"):
        if name in tensors and tensors[name].dtype == torch.float8_e4m3fn:
            value = tensors[name].clone()
            value.view(torch.uint8).view(-1)[draw.randrange(value.numel())] = draw.choice([0x7F, 0xFF])
            tensors[name] = value
            return
    absurd_scale(draw, tensors, settings)


DAMAGE = [other_shape, other_type, lost_tensor, absurd_scale, bad_settings, wrong_index]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", SOUND)
def test_damaged_tensors_and_settings_are_refused_by_name(name: str, damage: Any, tmp_path: Path) -> None:
    made = SOUND[name]()
    sound = read_all(packers.write(tmp_path / "sound", {NAME: made[0]}, made[1]))
    for seed in range(8 if damage is other_shape else 4):
        tensors, settings = dict(made[0]), json.loads(json.dumps(made[1]))
        damage(random.Random(seed), tensors, settings)
        directory = packers.write(tmp_path / str(seed), {NAME: tensors}, settings)
        refusal = why_refused(lambda where=directory: read_all(where))
        if refusal is None and damage is other_shape:  # a sound weight of another size, which loading notices
            assert read_all(directory) != sound
            continue
        assert refusal is not None, seed
        assert refusal.startswith("damaged/model: ")
        assert len(refusal) < 1500


# -- damage to the bytes of files


def edit_header(content: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + size :]


def lie(draw: random.Random, header: dict[str, Any]) -> None:
    """Shapes and places that the file does not have."""
    entry = header[draw.choice(sorted(set(header) - {"__metadata__"}))]
    which = draw.randrange(6)
    if which == 0:
        entry["shape"] = [2**40, 2**20]
    elif which == 1:
        entry["shape"] = [-1, *entry["shape"][1:]]
    elif which == 2:
        entry["data_offsets"] = [0, 2**50]
    elif which == 3:
        entry["data_offsets"] = [entry["data_offsets"][1], entry["data_offsets"][0]]
    elif which == 4:
        entry["dtype"] = "F99"
    else:
        entry["shape"] = [2**63, 2]


@pytest.mark.parametrize("name", SOUND)
def test_damaged_bytes_raise_nothing_but_model_errors(name: str, tmp_path: Path) -> None:
    directory = packers.write(tmp_path, {NAME: SOUND[name]()[0]}, SOUND[name]()[1])
    file = directory / "model.safetensors"
    whole, draw, refused = file.read_bytes(), random.Random(name), 0
    for attempt in range(20):
        content = bytearray(whole)
        if attempt < 5:
            content = content[: draw.randrange(len(content))]
        elif attempt < 12:
            content = bytearray(edit_header(whole, lambda header: lie(draw, header)))
        else:
            for _ in range(draw.randrange(1, 8)):
                content[draw.randrange(len(content))] = draw.randrange(256)
        file.unlink()
        file.write_bytes(content)
        refusal = why_refused(lambda: read_all(directory))
        assert attempt >= 12 or refusal is not None, "a truncated or lying file was read"
        assert refusal is None or refusal.startswith("damaged/model: ")
        refused += refusal is not None
    assert refused >= 12


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b""),
        ("config.json", b"[1]"),
        ("config.json", b"\xff{}"),
        ("config.json", b'{"quantization_config": 5}'),
        ("config.json", b'{"quantization_config": {"quant_method": ["awq"]}}'),
        ("config.json", b"[" * 100_000),
        ("model.safetensors.index.json", b'{"weight_map": []}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "../../etc/passwd"}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "nowhere.safetensors"}}'),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "other.safetensors"}}'),
    ],
)
def test_damaged_json_is_refused(file: str, content: bytes, tmp_path: Path) -> None:
    tensors, settings = SOUND["gptq"]()
    directory = packers.write(tmp_path, {NAME: tensors}, settings)
    if "index" in file:
        (directory / "model.safetensors").rename(directory / "other.safetensors")
    (directory / file).write_bytes(content)
    with pytest.raises(ModelError, match="damaged/model: "):
        read_all(directory)


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        (torch.zeros(2, 4, 3, 16, dtype=torch.uint8), None),
        (torch.zeros(2, 4, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, 4, dtype=torch.uint8)),
        (torch.zeros(2, 4, 3, 8, dtype=torch.uint8), torch.zeros(2, 4, 3, dtype=torch.uint8)),
        (torch.zeros(2, 4, 3, 16, dtype=torch.int32), torch.zeros(2, 4, 3, dtype=torch.uint8)),
        (torch.zeros(2, 4, 3, 16, dtype=torch.uint8), torch.full((2, 4, 3), 255, dtype=torch.uint8)),
        (torch.zeros(48, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)),
    ],
)
def test_damaged_mxfp4_is_refused(blocks: torch.Tensor, scales: torch.Tensor | None, tmp_path: Path) -> None:
    tensors = {"up_blocks": blocks} | ({} if scales is None else {"up_scales": scales})
    directory = packers.write(tmp_path, {NAME: tensors}, {"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"damaged/model: .*up_"):
        read_all(directory)


@pytest.mark.parametrize("kind", KINDS)
def test_random_gguf_blocks_are_finite_or_refused(kind: str, tmp_path: Path) -> None:
    draw, refused = np.random.default_rng(0), 0
    for attempt in range(12):
        raw = random_blocks(kind, 2, 512, attempt)
        where = draw.random(raw.shape) < 0.2
        raw[where] = draw.integers(0, 256, int(where.sum()))
        write_one(tmp_path / "one.gguf", kind, raw)
        with GGUFFile(tmp_path / "one.gguf") as file, little_memory():
            refusal = why_refused(lambda file=file: file.coded("x"))
            assert refusal is None or "tensor 'x' has" in refusal
            assert refusal is not None or file.coded("x").restore().isfinite().all()
            refused += refusal is not None
    assert refused < 12


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_damaged_gguf_files_raise_nothing_but_model_errors(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "tiny.gguf"
    write_gguf(source, "qwen2", edit=quantized(kind))
    whole, draw, refused = source.read_bytes(), random.Random(kind), 0
    with GGUFFile(source) as file:
        first = min(tensor.start for tensor in file.tensors.values())
        entry = file.tensors["blk.0.ffn_up.weight"]
        assert entry.kind == GGMLQuantizationType[kind]
    for attempt in range(40):
        content = bytearray(whole)
        if attempt < 10:
            content = content[: draw.randrange(len(content) - 64)]
        elif attempt < 20:
            block = (20 if kind == "Q4_1" else 34) * draw.randrange(20)
            content[entry.start + block : entry.start + block + 2] = struct.pack("<H", 0x7C00)
        else:
            for _ in range(3):
                content[draw.randrange(4, first + 200)] = draw.randrange(256)
        source.write_bytes(content)
        directory = tmp_path / f"out{attempt}"
        directory.mkdir()
        with little_memory():
            refusal = why_refused(lambda where=directory: convert.convert(source, where, progress=False))
        assert attempt >= 20 or refusal is not None, "a truncated file or an infinite scale was converted"
        assert refusal is None or "tiny.gguf" in refusal
        refused += refusal is not None
        if refusal is None:
            read_all(directory)
    assert refused >= 20
