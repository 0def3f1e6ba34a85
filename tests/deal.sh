#!/usr/bin/env bash
# Tests dealt out to several processes, with nothing but pytest: compiling kernels is work for the CPU.
#   [JOBS=16] bash tests/deal.sh arguments of pytest that say which tests
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1

jobs=${JOBS:-16}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
pids=()
for ((part = 0; part < jobs; part++)); do
    python -m pytest -q -rs -o addopts= -o filterwarnings=ignore -p no:cacheprovider \
        --deal "$part/$jobs" "$@" >"$logs/$part" 2>&1 &
    pids+=($!)
done
failed=0
for part in "${!pids[@]}"; do
    wait "${pids[$part]}"
    status=$?
    if [ $status != 0 ] && [ $status != 5 ]; then # 5: no test was left for it
        failed=1
        cat "$logs/$part"
    fi
done
grep -h '^SKIPPED' "$logs"/* && failed=1
passed=$(cat "$logs"/* | grep -o '[0-9]* passed' | awk '{n += $1} END {print n + 0}')
echo "$passed tests passed, $SECONDS s"
exit $((failed || passed == 0))
