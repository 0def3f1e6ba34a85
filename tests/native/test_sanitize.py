"""The C kernels under sanitizers, and kernels with a bug, which the sanitizers must find."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    ("sanitizer", "right", "wrong", "found"),
    [
        ("thread", "__ATOMIC_ACQ_REL", "__ATOMIC_RELAXED", "data race"),
        ("address", "row->runs_end - 1;", "row->runs_end;", "AddressSanitizer"),
        ("thread", "layer->scale", "0.5 * layer->scale", "expected"),
    ],
)
def test_a_kernel_with_a_bug_is_not_clean(
    sanitizer: str, right: str, wrong: str, found: str, tmp_path: Path
) -> None:
    source = (SOURCES / "decode_attention.c").read_text()
    assert right in source
    (tmp_path / "decode_attention.c").write_text(source.replace(right, wrong))
    assert found in sanitize("drive_attention.c", sanitizer, tmp_path)
