"""Runs tests in parallel processes with plain pytest, because compiling kernels is CPU-bound.

    PYTHONPATH=src python tests/deal.py PYTEST_ARGUMENTS...
    PYTHONPATH=src python tests/deal.py -m gpu  # only imports files with tests for a GPU

Slow imports happen once, before the processes fork.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Every kernel against its reference, compiled on a GPU or under Triton's interpreter.
KERNEL_TESTS = [
    "tests/attention/test_triton.py",
    "tests/models/test_triton_few.py",
    "tests/models/test_triton_product.py",
    "tests/models/quantized/test_triton_coded_weights.py",
    "tests/models/quantized/test_triton_halves.py",
    "tests/models/quantized/test_triton_pairs.py",
    "tests/attention/test_triton_blocks.py",
    "tests/attention/test_ended_triton.py",
    "tests/attention/test_triton_coded.py",
    "tests/attention/test_triton_glance.py",
]
JOBS = 16
ROOT = Path(__file__).parent.parent
OPTIONS = ["-q", "-rs", "-o", "addopts=", "-o", "filterwarnings=ignore", "-p", "no:cacheprovider"]
NOTHING_TO_DO = pytest.ExitCode.NO_TESTS_COLLECTED


def is_for_gpu(path: Path) -> bool:
    """Whether a file has tests that need a CUDA device."""
    return re.search(r"\bpytest\.mark\.gpu\b", path.read_text()) is not None


def deal(tests: list[str], jobs: int = JOBS) -> bool:
    """Run the tests and print a summary. True if some ran and none failed or was skipped."""
    import transformers  # noqa: F401
    import triton  # noqa: F401

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(part) for part in range(jobs)]
        children = [_start(tests, part, jobs, log) for part, log in enumerate(logs)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        outputs = [log.read_text() for log in logs]
    passed = sum(int(count) for text in outputs for count in re.findall(r"(\d+) passed", text))
    lines = [line for text in outputs for line in text.splitlines()]
    skipped = list(dict.fromkeys(line for line in lines if line.startswith("SKIPPED")))
    for status, text in zip(statuses, outputs, strict=True):
        if status not in (0, NOTHING_TO_DO):
            print(text)
    print("\n".join([*skipped, f"{passed} tests passed, {time.perf_counter() - start:.0f} s"]), flush=True)
    return passed > 0 and not skipped and all(status in (0, NOTHING_TO_DO) for status in statuses)


def _start(tests: list[str], part: int, jobs: int, log: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(ROOT)
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the other processes use the other cores
        status = int(pytest.main([*OPTIONS, "--deal", f"{part}/{jobs}", *tests]))
        sys.stdout.flush()
    finally:
        os._exit(status)  # without cleanup: open files belong to the parent


if __name__ == "__main__":
    sys.exit(not deal(sys.argv[1:]))
