#!/bin/sh
# like_pytorch.sh [FILE] - how much like:pytorch holds on the ten traces, beside what PyTorch held: the same to within
# 0.02 on nine of them, or the status is 1. The tenth, llm_serve_kvgrow, depends on where cudaMalloc puts its segments.
# Simulated device. Writes FILE, which is bench/results/sim-like-pytorch.csv. Environment: BUILD.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
file=${1:-bench/results/sim-like-pytorch.csv}
conf=like:pytorch,expandable_segments:False

"$build/replay" --conf $conf --json bench/traces/*.csv.gz >"$file.lines" || exit 1
{
    echo "# bench/like_pytorch.sh: build/replay --json --conf $conf bench/traces/*.csv.gz, simulated device;" \
        "torch_reserved: of bench/results/peers-h200.csv; $(date -u +%Y-%m-%d), commit" \
        "$(git describe --always --dirty --abbrev=10 2>/dev/null)"
    echo "trace,galloc_reserved,torch_reserved"
    awk -F, '
        FNR == NR && !/^#/ { torch[$1] = $3 }
        FNR == NR { next }
        match($0, /"trace": "[a-z0-9_]*"/) {
            name = substr($0, RSTART + 10, RLENGTH - 11)
            match($0, /"reserved_ratio": [0-9.]*/)
            ratio = substr($0, RSTART + 18, RLENGTH - 18)
            printf "%s,%.3f,%s\n", name, ratio, torch[name]
        }
    ' bench/results/peers-h200.csv "$file.lines"
} >"$file"
rm "$file.lines"
awk -F, '
    /^#/ || /^trace/ { next }
    { n++; near += ($2 - $3 < 0.02 && $3 - $2 < 0.02) }
    END { print near " of " n " within 0.02"; exit !(n == 10 && near >= 9) }
' "$file"
