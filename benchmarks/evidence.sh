#!/usr/bin/env bash
# Evidence kept, answers and layouts with the default model: one process per kind, all at once. Reports in DIRECTORY.
#   bash benchmarks/evidence.sh DIRECTORY kept7 kept32 kept128 answers layouts
# Environment: PYTHON, DEVICE, N, KINDS, SHORT, LONG, VERY_LONG (contexts), FACTS.
set -u
cd "$(dirname "$0")/.."
out=$1; shift
mkdir -p "$out"
export PYTHONPATH="$PWD/src:$PWD:${PYTHONPATH:-}" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
n=${N:-40}
kinds=${KINDS:-shared far next two code table logs hops quote agent}
common="--device $device --dtype float32 --kv-memory ${KV:-2G} --enforce-eager --no-controls --n $n"
"$python" -c "from skim.models.source import prepare; from skim.config import DEFAULT_MODEL; print(prepare(DEFAULT_MODEL))"

each() {  # NAME, then the arguments of `skim eval evidence`: one process per kind, then all their tables
    local name=$1; shift
    local began=$SECONDS
    for kind in $kinds; do
        "$python" -m skim eval evidence --kinds "$kind" $common "$@" > "$out/.$name-$kind" 2> "$out/.$name-$kind.err" &
    done
    wait
    { for kind in $kinds; do grep -hE "^(evidence|[a-z]+: )|failed|error" "$out/.$name-$kind" || tail -n 3 "$out/.$name-$kind.err"; done
      echo "$name: $((SECONDS - began)) s"; } | tee "$out/$name.txt"
}

for part in "$@"; do
    case $part in
        kept7) each kept7 --kept-only --contexts "${SHORT:-7000}" --modes blend:0.1 blend:auto lexical:0.1 random:0.1 ;;
        kept32) each kept32 --kept-only --contexts "${LONG:-32000}" --modes blend:1000t lexical:1000t random:1000t ;;
        kept128) each kept128 --kept-only --contexts "${VERY_LONG:-128000}" --modes blend:1000t lexical:1000t random:1000t ;;
        answers) each answers --contexts "${SHORT:-7000}" --modes dense blend:0.1 blend:auto ;;
        layouts) "$python" benchmarks/layouts.py --device "$device" --facts "${FACTS:-40}" --tokens ${LAYOUT_TOKENS:-7000 30000} --processes "${PROCESSES:-8}" | tee "$out/layouts.txt" ;;
        *) echo "unknown part $part"; exit 2 ;;
    esac
done
