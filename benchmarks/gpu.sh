#!/usr/bin/env bash
# Check each kernel against its oracle, then measure the promised figures and print them as a table. Takes under 9 minutes
# on one H200. Runs from source, in .venv if it exists; needs torch, Triton, transformers and pytest.
#   bash benchmarks/gpu.sh [arguments of gpu.py]
cd "$(dirname "$0")/.." && PATH="$PWD/.venv/bin:$PATH" PYTHONPATH=src:. PYTHONUNBUFFERED=1 exec python benchmarks/gpu.py --kernels "$@"
