"""GGUF's quantized types become coded weights with the same values."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from skim.errors import ModelError
from skim.models.gguf import coded as reader
from skim.models.gguf.coded import coded, covers
from skim.models.gguf.file import GGUFFile
from skim.models.quantized.checks import why_unusable
from skim.models.quantized.format import CodedWeight

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HALVES = {  # where each type's blocks have float16 numbers
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
ODD = [0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0, -0.013]


def random_blocks(kind: str, rows: int, columns: int, seed: int, *, odd: bool = True) -> np.ndarray:
    """Random bytes with finite scales, some of them extreme. uint8 [rows, bytes]"""
    draw = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = draw.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for start in HALVES[kind]:
        scales = draw.normal(0, 0.02, len(blocks))
        if odd:
            chosen = draw.random(len(blocks)) < 0.3
            scales[chosen] = draw.choice(ODD, chosen.sum())
        blocks[:, start : start + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def from_bytes(raw: np.ndarray, kind: str, columns: int) -> CodedWeight:
    flat = torch.from_numpy(raw).view(-1)
    return coded(lambda first, end: flat[first:end], GGMLQuantizationType[kind], (len(raw), columns))


def write_one(path: Path, kind: str, raw: np.ndarray) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 5), supers=st.integers(1, 3), seed=st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_a_restored_weight_has_the_values_of_the_gguf_package(
    kind: str, rows: int, supers: int, seed: int
) -> None:
    raw = random_blocks(kind, rows, 256 * supers, seed)
    weight = from_bytes(raw, kind, 256 * supers)
    assert why_unusable(weight) is None
    expected = quants.dequantize(raw, GGMLQuantizationType[kind]).reshape(rows, -1)
    np.testing.assert_array_equal(weight.restore().numpy(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_unpacked_in_parts_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(kind, 7, 512, 0)
    whole = from_bytes(raw, kind, 512)
    monkeypatch.setattr(reader, "_AT_ONCE", raw.size // 3)
    parts = from_bytes(raw, kind, 512)
    assert whole.planes.keys() == parts.planes.keys()
    assert all(torch.equal(whole.planes[name], parts.planes[name]) for name in whole.planes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_coded_weight_is_as_small_as_the_file(kind: str, tmp_path: Path) -> None:
    raw = random_blocks(kind, 8, 512, 0)
    write_one(tmp_path / "one.gguf", kind, raw)
    with GGUFFile(tmp_path / "one.gguf") as file:
        # Two scales of 6 bits have 8 bits each in a coded weight.
        assert file.coded("x").nbytes <= raw.nbytes * 1.03


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused_by_name(kind: str, scale: float, tmp_path: Path) -> None:
    for start in HALVES[kind]:
        raw = random_blocks(kind, 3, 256, 0)
        raw[1, start : start + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        write_one(tmp_path / "one.gguf", kind, raw)
        with (
            GGUFFile(tmp_path / "one.gguf") as file,
            pytest.raises(
                ModelError, match=r"one\.gguf.*tensor 'x' has \w+ with values that are not finite; download"
            ),
        ):
            file.coded("x")


def test_other_types_are_not_covered() -> None:
    covered = {kind.name for kind in GGMLQuantizationType if covers(kind)}
    assert covered == set(KINDS)
