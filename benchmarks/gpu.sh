#!/usr/bin/env bash
# Everything about the GPU in one command, under 9 minutes on one H200: each kernel against its oracle, then the
# figures that are promised, as a table. Runs from source with what is installed: torch, Triton, transformers, pytest.
#   bash benchmarks/gpu.sh [arguments of gpu.py]
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1

echo "kernels against their oracles:"
bash tests/deal.sh tests/test_triton.py tests/test_triton_sparse.py
failed=$?
python benchmarks/gpu.py "$@"
missed=$?
echo "$SECONDS s in all"
exit $((failed || missed))
