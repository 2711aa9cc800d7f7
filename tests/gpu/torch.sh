#!/bin/bash
# torch.sh - real programs of PyTorch under its own allocators and under galloc (examples/pytorch), each in a process of
# its own: the results must be equal. Ends in a table, and one line "N passed, M failed". Without a PyTorch that sees a
# GPU it says so, and nothing counts.
#
# Environment
#   ROUNDS   how often each program runs under each allocator (1); the table has medians
#   STEPS    steps of each program
#   OUT      file that gets one line of JSON per run (build/gpu/torch.jsonl)
#   PYTHON, CC, CUDA_HOME, BUILD

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
python=${PYTHON:-python3}
out=${OUT:-$build/gpu/torch.jsonl}
mkdir -p "$build/gpu" "$(dirname "$out")" && : >"$out" || exit 1

"$python" -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || {
    echo "no PyTorch that sees a GPU: $python -c 'import torch; torch.cuda.is_available()'"
    echo "0 passed, 0 failed"
    exit 0
}
make -s "$build/libgalloc_torch.so" || exit 1
export GALLOC_TORCH_LIBRARY=$PWD/$build/libgalloc_torch.so PYTHONPATH=$PWD/examples/pytorch

failed=0
one() { # program, allocator
    timeout 240 "$python" tests/gpu/torch_programs.py "$1" "$2" >"$build/gpu/torch.out" 2>"$build/gpu/torch.err" &&
        tail -n 1 "$build/gpu/torch.out" >>"$out" && return
    failed=$((failed + 1))
    echo "FAILED $1 under $2:"
    tail -n 15 "$build/gpu/torch.err"
}

for round in $(seq "${ROUNDS:-1}"); do
    for program in ${PROGRAMS:-train generate prefetch graph}; do
        for allocator in native expandable async galloc galloc-full; do one $program $allocator; done
    done
    [ "$round" = 1 ] && [ -z "$PROGRAMS" ] || continue
    for program in streams exhaust compiled failed; do
        for allocator in native galloc galloc-full; do one $program $allocator; done
    done
    for allocator in native galloc-full; do one counters $allocator; done
    for allocator in native galloc-fixed galloc-sender; do one share $allocator; done
    [ "$(nvidia-smi -L | grep -c '^GPU')" -lt 2 ] ||
        for allocator in native expandable galloc galloc-full; do one devices $allocator; done
    for allocator in native galloc-pool; do one pool $allocator; done
done

# The table, and the results compared.
FAILED=$failed "$python" - "$out" <<'END'
import json, os, statistics, sys
runs = [json.loads(line) for line in open(sys.argv[1])]
passed, failed = 0, int(os.environ["FAILED"])
print(f"{'program':10}{'allocator':12}{'held MiB':>10}{'live MiB':>10}{'held/live':>10}{'step ms':>10}{'spread':>8}")
for program in dict.fromkeys(r["program"] for r in runs):
    results = {}
    for allocator in dict.fromkeys(r["allocator"] for r in runs if r["program"] == program):
        mine = [r for r in runs if r["program"] == program and r["allocator"] == allocator]
        times = [r["step_ms"] for r in mine]
        held, live = (statistics.median(r[k] for r in mine) for k in ("held", "live"))
        ratio = held / live if live else 0
        print(f"{program:10}{allocator:12}{held / 2**20:10.1f}{live / 2**20:10.1f}{ratio:10.3f}"
              f"{statistics.median(times):10.3f}{(max(times) - min(times)) / statistics.median(times):8.1%}")
        results[allocator] = {r["result"] for r in mine}
    if len(set.union(*results.values())) == 1:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {program}: results differ: {results}")
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
END
