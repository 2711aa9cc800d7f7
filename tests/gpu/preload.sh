#!/bin/bash
# preload.sh - programs that know nothing of galloc, with and without examples/preload (libgalloc_preload.so in
# LD_PRELOAD), each in a process of its own: the results must be equal, and galloc must have served allocations. Ends in
# a table, and one line "N passed, M failed". What is missing (CuPy, PyTorch, JAX) is left out, and said. "held" is the
# memory of the device that was in use at most, beyond what was in use before: as samples show it (">"), which may miss
# the most; for galloc, what it held itself.
#
# Environment
#   SECONDS_AT_MOST  no program begins after this time (85)
#   PROGRAMS         the programs to run, instead of all
#   OUT              file that gets one line of JSON per run (build/gpu/preload.jsonl)
#   PYTHON, NVCC, ARCH, CC, CUDA_HOME, BUILD

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
python=${PYTHON:-python3}
nvcc=${NVCC:-$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")}
out=${OUT:-$build/gpu/preload.jsonl}
at_most=${SECONDS_AT_MOST:-85}
work=$build/gpu
mkdir -p "$work" "$(dirname "$out")" && : >"$out" || exit 1
SECONDS=0
unset GALLOC_CONF GALLOC_PRELOAD_FREE GALLOC_PRELOAD_REPORT

if ! nvidia-smi -L 2>/dev/null | grep -q GPU || ! command -v "$nvcc" >/dev/null; then
    echo "no GPU with its driver, or no nvcc: nothing is tried"
    echo "0 passed, 0 failed"
    exit 0
fi
tests/gpu/describe.sh
echo

# The runtime linked statically, as nvcc does, and as a library.
: "${ARCH:=sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)}"
make -s "$build/libgalloc_preload.so" &
make=$!
"$nvcc" -O2 "-arch=$ARCH" tests/gpu/preload_program.cu -o "$work/preload_static" &
static=$!
"$nvcc" -O2 "-arch=$ARCH" -cudart shared tests/gpu/preload_program.cu -o "$work/preload_shared" &
shared=$!
wait $make && wait $static && wait $shared || { echo "0 passed, 1 failed"; exit 1; }
library=$PWD/$build/libgalloc_preload.so
# Where the toolkit's libcudart is, unless the machine finds one itself.
runtime=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$(dirname "$(dirname "$nvcc")")/lib64

failed=0 skipped=
one() { # way, program, command...
    way=$1 program=$2
    shift 2
    left=$((at_most - SECONDS))
    case " ${PROGRAMS:-$program} " in *" $program "*) ;; *) return ;; esac
    case " $skipped " in *" $program "*) return ;; esac
    if [ $left -le 0 ]; then
        echo "no time for $program, $way"
        return
    fi
    [ $left -lt 30 ] || left=30
    preload=$library free=wait
    [ "$way" = cuda ] && preload=
    [ "$way" = galloc-async ] && free=async
    timeout -k 5 $((left + 10)) env LD_PRELOAD="$preload" GALLOC_PRELOAD_REPORT=1 GALLOC_PRELOAD_FREE=$free "$@" \
        >"$work/preload.out" 2>"$work/preload.err" </dev/null
    status=$?
    if [ $status -eq 3 ] && [ "$way" = cuda ]; then
        echo "skipped: $program: $(tail -n 1 "$work/preload.err")"
        skipped="$skipped $program"
        return
    fi
    line=$(grep '^{' "$work/preload.out" | tail -n 1)
    report=$(grep '^galloc_preload: process .*device 0:' "$work/preload.err" | tail -n 1)
    if [ $status -ne 0 ] || [ -z "$line" ]; then
        failed=$((failed + 1))
        echo "FAILED $program, $way: status $status"
        tail -n 15 "$work/preload.err"
        [ -n "$line" ] || return
    fi
    echo "{\"program\": \"$program\", \"way\": \"$way\", \"report\": \"$report\", \"run\": $line}" >>"$out"
}

for part in malloc ordered; do
    for way in cuda galloc galloc-async; do one $way $part "$work/preload_static" $part; done
done
for part in threads graph free_waits questions copies pools reset; do
    for way in cuda galloc; do one $way $part "$work/preload_static" $part; done
done
one galloc-async free_waits "$work/preload_static" free_waits
one galloc-async threads "$work/preload_static" threads
for way in cuda galloc; do one $way all-shared env "LD_LIBRARY_PATH=$runtime" "$work/preload_shared"; done
for program in cupy-no-pool torch-no-cache jax cupy-pool cupy-async torch-async; do
    for way in cuda galloc; do one $way $program "$python" tests/gpu/preload_programs.py $program; done
    [ $program = cupy-no-pool ] && one galloc-async $program "$python" tests/gpu/preload_programs.py $program
done

# The table, and the results compared.
FAILED=$failed "$python" - "$out" <<'END'
import json, os, re, sys
runs = [json.loads(line) for line in open(sys.argv[1])]
passed, failed = 0, int(os.environ["FAILED"])
print(f"\n{'program':15}{'way':14}{'held MiB':>10}{'in use':>9}{'us':>10}{'allocations':>13}{'driver calls':>14}"
      f"{'left':>6}")
for program in dict.fromkeys(r["program"] for r in runs):
    results = {}
    for r in (r for r in runs if r["program"] == program):
        said = re.search(r"(\d+) allocations and (\d+) frees took (\d+) driver calls; held ([\d.]+) MiB at most, "
                         r"([\d.]+) MiB in use; (\d+) allocations left", r["report"])
        held, in_use = (said[4], said[5]) if said else (f">{r['run']['held'] / 2**20:.1f}", "")
        print(f"{program:15}{r['way']:14}{held:>10}{in_use:>9}{r['run']['us']:10.2f}"
              f"{said[1] if said else '':>13}{said[3] if said else '':>14}{said[6] if said else '':>6}")
        results[r["way"]] = r["run"]["result"]
        if r["way"] != "cuda" and (not said or said[1] == "0"):
            failed += 1
            print(f"FAILED {program}, {r['way']}: galloc served nothing")
    for way in results:
        if way == "cuda":
            continue
        if results[way] == results.get("cuda", results[way]):
            passed += 1
        else:
            failed += 1
            print(f"FAILED {program}, {way}: {results[way]} and {results['cuda']} differ")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
END
