#!/usr/bin/env bash
# In one command, under 9 minutes on one H200: each kernel against its oracle, then the figures that are promised, as a
# table. Runs from source with what is installed, in .venv if there is one: torch, Triton, transformers, pytest.
#   bash benchmarks/gpu.sh [arguments of gpu.py]
cd "$(dirname "$0")/.." && PATH="$PWD/.venv/bin:$PATH" PYTHONPATH=src:. PYTHONUNBUFFERED=1 exec python benchmarks/gpu.py --kernels "$@"
