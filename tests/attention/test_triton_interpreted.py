"""Run the Triton tests on the CPU under Triton's interpreter, and test a machine without Triton.

The interpreter is chosen at triton's import for the whole process, so the tests run in a separate process.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skim.attention.backend import choose_backend
from skim.attention.cpu.torch_backend import TorchBackend
from tests import paths
from tests.deal import KERNEL_TESTS

ROOT = paths.ROOT


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_pass_their_tests_under_the_interpreter() -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.attention.interpreter",
            *KERNEL_TESTS,
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout
    assert "skipped" not in found.stdout


def test_a_pool_on_the_cpu_needs_no_triton() -> None:
    program = (
        "import sys, torch\n"
        "from skim.attention.backend import choose_backend\n"
        "from skim.memory.pool import KVPool\n"
        "from skim.memory.store import LayerShape\n"
        "pool = KVPool([LayerShape(1, 64, 64)], block_size=16, budget_bytes=2**20,\n"
        "              dtype=torch.bfloat16, device=torch.device('cpu'))\n"
        "print(type(choose_backend(pool)).__name__, 'skim.attention.cuda.backend' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["TorchBackend", "False"]


def test_without_triton_the_log_says_why_torch_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "skim.attention.cuda.backend", None)
    pool: Any = SimpleNamespace(device=torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_backend(pool), TorchBackend)
    assert "Triton is not available" in caplog.text
