#!/usr/bin/env bash
# Everything about the GPU in one command, under 9 minutes on one H200: the figures that are promised, as a table,
# then each kernel against its oracle. Runs from source with what is installed: torch, Triton, transformers, pytest.
#   bash benchmarks/gpu.sh [arguments of gpu.py]
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1

python benchmarks/gpu.py "$@"
missed=$?
echo "figures after $SECONDS s"

# Compiling kernels is work for the CPU, so the tests are dealt out to as many processes as it can feed.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
files=(tests/test_triton.py tests/test_triton_sparse.py tests/test_gpu_blocksparse.py)
python -m pytest --collect-only -q -o addopts= -o filterwarnings=ignore "${files[@]}" >"$work/collected" || exit 1
grep '::' "$work/collected" >"$work/all"
split -n "r/${JOBS:-12}" "$work/all" "$work/part."
pids=()
for part in "$work"/part.*; do
    xargs -d '\n' -a "$part" python -m pytest -q -o addopts= -p no:cacheprovider -o filterwarnings=ignore >"$part.log" 2>&1 &
    pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do
    wait "$pid" || failed=1
done
[ "$failed" = 0 ] || grep -h -A40 '^FAILED\|^ERROR\|^E  ' "$work"/*.log
all=$(wc -l <"$work/all")
passed=$(cat "$work"/*.log | grep -o '[0-9]* passed' | awk '{n += $1} END {print n + 0}')
echo "kernels against their oracles: $passed of $all tests passed; $SECONDS s in all"
exit $((failed || missed || passed < all))
