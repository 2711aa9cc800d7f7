#!/bin/bash
# timeline.sh - memory held over the calls of a trace: galloc, PyTorch with either kind of segments, cudaMallocAsync.
# Writes one file of rows, which bench/plots draws. Run by `make timeline-gpu`, which takes less than a minute.
#
# The trace is moe_multistream, a mixture of experts on five streams: of the ten, the one on which held / live of all
# four allocators is nearest to their means over the ten (least squares of the logarithms). It is neither the best nor
# the worst case of any of them.
#
# Environment
#   FILE         where to (bench/results, a name that begins with that of the GPU)
#   BACKEND=sim  the simulated device, galloc beside galloc with PyTorch's rules, into build/bench-sim/sim-timeline.csv
#   TRACES       names of traces (moe_multistream)
#   PASSES       of the trace in one process and pool, as bench/gpu.sh has them (3)
#   ROUNDS       of each allocator (3)
#   NVCC, GALLOC_COMMIT

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda}
traces=${TRACES:-moe_multistream}
rounds=${ROUNDS:-3}
passes=${PASSES:-3}
if [ "$backend" = sim ]; then
    export BACKEND
    file=${FILE:-build/bench-sim/sim-timeline.csv}
    replay=build/replay
else
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 |
        tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' -)
    [ -n "$device" ] || { echo "no GPU: nothing was measured"; exit 2; }
    file=${FILE:-bench/results/$device-timeline.csv}
    replay=build/replay-cuda
fi
mkdir -p "$(dirname "$file")" || exit 1
rows=$file.rows table=$file.table
trap 'rm -f "$rows" "$table"' EXIT
: >"$table" || exit 1
status=0

# Runs one allocator over one trace and adds its rows, with the round in front.
round() { # number, trace, allocator, settings
    if timeout -k 5 30 "$replay" --json --repeat "$passes" --timeline "$rows" --allocator "$3" --conf "$4" \
        "bench/traces/$2.csv.gz" >/dev/null; then
        sed "1d; s/^/$1,/" "$rows" >>"$table"
    else
        echo "FAILED: $3 $4 on $2" >&2
        status=1
    fi
}

started=$(date +%s)
for trace in $traces; do
    for i in $(seq "$rounds"); do
        round "$i" "$trace" galloc ""
        if [ "$backend" = sim ]; then
            round "$i" "$trace" galloc like:pytorch,expandable_segments:False
        else
            round "$i" "$trace" torch ""
            round "$i" "$trace" torch expandable_segments:True
            round "$i" "$trace" async ""
        fi
    done
done
{
    echo "# bench/timeline.sh: build/replay --backend $backend --repeat $passes --timeline, $rounds rounds;" \
        "bytes are the most since the row before"
    tests/gpu/describe.sh | sed 's/^/# /'
    [ "$backend" = sim ] || sed 's/^/# torch   /' build/bench-cuda/peer_torch.txt
    echo "round,trace,allocator,settings,call,live_bytes,held_bytes"
    cat "$table"
} >"$file" || exit 1

# The peaks, as a glance at what was written.
awk -F, '
    /^#/ || /^round/ { next }
    { key = $2 " " $3 ($4 == "" ? "" : " " $4); if (!seen[key]++) order[++n] = key }
    $6 > live[key] { live[key] = $6 }
    $7 > held[key] { held[key] = $7 }
    END { for (i = 1; i <= n; i++) printf "%-70s held / live %.4f\n", order[i], held[order[i]] / live[order[i]] }
' "$file"
echo "$file, $(($(date +%s) - started)) s"
exit $status
