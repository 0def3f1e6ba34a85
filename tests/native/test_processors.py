"""Kernels as they are compiled on other processors than this one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests import paths


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other flags")
def test_a_tokens_bits_do_not_depend_on_its_batch_with_avx2_alone(tmp_path: Path) -> None:
    """gcc fuses fewer multiply-adds where it tunes for AMD, and not the same in every loop."""
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("tests/models/quantized/test_cpu.py", "-k", "same_bits"),
        ],
        cwd=paths.ROOT,
        env={**os.environ, "CC": "cc -mno-avx512f -mtune=znver2", "SKIM_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout
    assert "skipped" not in found.stdout
