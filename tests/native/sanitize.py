"""Run the C kernels under sanitizers: `make sanitize`. Addresses, undefined behaviour, and data races.

The kernels are compiled into drivers that compare them with plain loops. Threads are the drivers' own:
OpenMP's runtime is not instrumented, and a sanitizer would not see how it synchronizes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from skim.native.build import SOURCES, _compiler

HERE = Path(__file__).parent
DRIVERS = (
    "drive_attention.c",
    "drive_codes.c",
    "drive_few_tokens.c",
    "drive_glance.c",
    "drive_coded.c",
    "drive_coded_floats.c",
    "drive_coded_narrow.c",
    "drive_coded_many.c",
    "drive_coded_tiles.c",
    "drive_eight_bits.c",
    "drive_many_tokens.c",
    "drive_prefill.c",
    "drive_prefill_pairs.c",
    "drive_prefill_tiles.c",
    "drive_question.c",
)
SANITIZERS = ("address", "undefined", "thread")
FLAGS = ("-std=gnu11", "-O1", "-g", "-march=native", "-fopenmp-simd", "-fno-math-errno", "-pthread")
STRICT = "-fno-sanitize-recover=all"  # the first problem ends the program
SECONDS = 300


def sanitize(driver: str, sanitizer: str, kernels: Path = SOURCES) -> str:
    """Build and run a driver under a sanitizer. Returns the problem, or an empty text if there is none."""
    with tempfile.TemporaryDirectory() as temporary:
        program = str(Path(temporary) / "driver")
        source = [
            f"-I{kernels}",
            f"-I{SOURCES}",
            f"-I{HERE}",
            str(HERE / driver),
            "-o",
            program,
            "-lm",
            "-pthread",
        ]
        for command in (
            [*_compiler(), *FLAGS, f"-fsanitize={sanitizer}", STRICT, *source],
            [program],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                return done.stderr or f"exit status {done.returncode}"
    return ""


def main() -> int:
    failed = False
    for driver in DRIVERS:
        for sanitizer in SANITIZERS:
            problem = sanitize(driver, sanitizer)
            print(f"{driver:<22} {sanitizer:<10} {'FAILED' if problem else 'clean'}", flush=True)
            if problem:
                print(problem, file=sys.stderr)
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
