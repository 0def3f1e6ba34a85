"""The C kernels under sanitizers, and kernels with a bug, which the sanitizers must find."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skim.native.build import SOURCES, NativeUnavailable, _compiler
from tests.native.sanitize import DRIVERS, SANITIZERS, sanitize

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _compiler_is_there() -> None:
    try:
        _compiler()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("driver", DRIVERS)
def test_kernels_are_clean(driver: str, sanitizer: str) -> None:
    assert sanitize(driver, sanitizer) == ""


@pytest.mark.parametrize(
    ("driver", "sanitizer", "file", "right", "wrong", "found"),
    [
        ("attention", "thread", "decode.h", "__ATOMIC_ACQ_REL", "__ATOMIC_RELAXED", "data race"),
        ("attention", "address", "glance.h", "[row->runs_end - 1]", "[row->runs_end]", "Sanitizer"),
        ("attention", "thread", "decode_attention.c", "layer->scale", "0.5 * layer->scale", "expected"),
        ("codes", "address", "glance.h", "[row->runs_end - 1]", "[row->runs_end]", "Sanitizer"),
        ("codes", "undefined", "codes.h", "both >> 4", "both >> 3", "expected"),
        ("codes", "undefined", "codes.h", "(high + low + by) / 2", "(high + low) / 3", "expected"),
        ("glance", "thread", "decode.h", "await(&step->ready[index]);", ";", "data race"),
        ("glance", "address", "glance.h", ": highest[", ": shares[", "expected"),
        ("glance", "undefined", "glance.h", "* glance->spread", "", "expected"),
        ("coded", "address", "coded.h", "count * sizeof(float)", "(count + 1) * sizeof(float)", "Sanitizer"),
        ("coded_narrow", "undefined", "coded.h", "both >> 4", "both >> 3", "expected"),
        ("coded", "address", "coded_digits.h", "left >= BLOCK ?", "left > 0 ?", "Sanitizer"),
        ("prefill_tiles", "address", "bfloat16.h", "(1 << most) - 1", "0xffff", "expected"),
        ("prefill_tiles", "undefined", "bfloat16.h", "0xaaaaaaaa", "0x55555555", "expected"),
        ("prefill_tiles", "thread", "prefill_tiles.c", "from - start", "from - start - 999", "scratch"),
        ("prefill_pairs", "thread", "prefill_pairs.c", "(from - start);", "(from - start) / 2;", "scratch"),
        (
            "prefill_pairs",
            "address",
            "prefill_bfloat16.h",
            "(1 << (p->value_dim - column)) - 1",
            "0xffff",
            "results",
        ),
        (
            "prefill_pairs",
            "undefined",
            "prefill_pairs.c",
            "panel->all_since > slot + first ||",
            "",
            "prefill",
        ),
        ("coded_many", "undefined", "coded_activations.h", "one, half), 8", "one, half), 7", "expected"),
        ("coded_tiles", "address", "coded_tiles.c", "(1u << rows) - 1", "0xffffu", "Sanitizer"),
        ("coded_tiles", "undefined", "bfloat16.h", "0x88", "0x89", "expected"),
        (
            "coded_tiles",
            "address",
            "coded_tiles.c",
            "first * high_bytes(RUN, bits)",
            "first * RUN",
            "Sanitizer",
        ),
        ("question", "address", "question.c", "at >= 0 && at < count", "at < count", "Sanitizer"),
        ("question", "undefined", "question.c", "sides[i] & AFTER", "sides[i]", "block"),
    ],
)
def test_a_kernel_with_a_bug_is_not_clean(
    driver: str, sanitizer: str, file: str, right: str, wrong: str, found: str, tmp_path: Path
) -> None:
    if file in ("coded_digits.h", "coded_activations.h") and not torch.cpu._is_vnni_supported():
        pytest.skip("this processor does not multiply 8-bit integers")
    if driver == "prefill_pairs" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("this processor multiplies no pairs of bfloat16 numbers")
    by_tiles = driver.endswith("_tiles")
    if by_tiles and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no tile registers (AMX)")
    for source in SOURCES.glob("*.[ch]"):
        text = source.read_text()
        assert source.name != file or right in text
        (tmp_path / source.name).write_text(text.replace(right, wrong) if source.name == file else text)
    assert found in sanitize(f"drive_{driver}.c", sanitizer, tmp_path)
