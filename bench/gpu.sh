#!/bin/bash
# gpu.sh - measures galloc on a GPU: the ten traces, the driver's calls (calls.sh), the cost of an alloc/free pair, and
# examples/02_reuse. Writes what the programs say into a folder and ends in short tables.
#
# Environment
#   OUT          the folder (bench/results); files begin with the name of the GPU
#   BACKEND=sim  the same on the simulated device, into build/bench-sim: shows that it works, says nothing about a GPU
#   VERIFY=1     also replays with queued work that writes and checks every byte of every block
#   MAKE, NVCC, ARCH, GALLOC_COMMIT

cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda}
[ "$backend" = sim ] && out=${OUT:-build/bench-sim} || out=${OUT:-bench/results}
traces=$(ls bench/traces/*.csv.gz)
small="bench/traces/moe_multistream.csv.gz bench/traces/rnn_speech_varlen.csv.gz"
if [ "$backend" = sim ]; then
    export BACKEND
    device=sim
    variables=NVCC=
else
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 |
        tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' -)
    variables=${NVCC:+NVCC=$NVCC}
    [ -n "$device" ] || { echo "no GPU: nothing was measured"; exit 2; }
fi
replay_file=$out/$device-replay.jsonl
hotpath_file=$out/$device-hotpath.jsonl
reuse_file=$out/$device-reuse.txt
summary_file=$out/$device-summary.txt

# ---- measuring ------------------------------------------------------------------------------------------------------

# The work does not count what goes wrong here: a line that is missing from the file is missing from the table.
replay() { # options...
    timeout 120 build/replay --json --backend "$backend" "$@" >>"$replay_file"
    status=$?
    [ $status -eq 0 ] || { echo "replay $*: exit status $status"; failed=1; }
}

replay_all() {
    : >"$replay_file"
    for trace in $traces; do
        echo "replay $(basename "$trace" .csv.gz)"
        replay --repeat 2 "$trace"
    done
    for trace in $small; do
        echo "replay $(basename "$trace" .csv.gz) with cudaMalloc"
        replay --repeat 2 --allocator cudamalloc "$trace"
    done
    [ -n "$VERIFY" ] || return 0
    for trace in $traces; do
        echo "replay $(basename "$trace" .csv.gz), every byte verified"
        replay --busy --verify "$trace"
    done
}

measure_pairs() {
    echo "hotpath"
    timeout 180 build/hotpath --json --backend "$backend" >"$hotpath_file" || { echo "hotpath failed"; failed=1; }
}

measure_reuse() {
    [ "$backend" = cuda ] || return 0
    echo "02_reuse"
    timeout 120 build/examples/02_reuse-cuda >"$reuse_file" || { echo "02_reuse failed"; failed=1; }
}

# ---- tables ---------------------------------------------------------------------------------------------------------

# Fields of a flat line of JSON, for awk.
fields='function field(name, text) {
    if (!match($0, "\"" name "\": *(\"[^\"]*\"|[^,}]*)")) return ""
    text = substr($0, RSTART, RLENGTH)
    sub(/^"[^"]*": */, "", text)
    gsub(/"/, "", text)
    return text
}'

replay_table() {
    awk "$fields"'
        BEGIN {
            printf "%-22s %-10s %8s %9s %9s %10s %10s %6s\n", "trace", "allocator", "calls", "ns, cold", "ns, warm",
                "reserved", "driver", "wrong"
        }
        {
            printf "%-22s %-10s %8d %9.1f %9.1f %10.4f %10d %6s\n", field("trace"), field("allocator"), field("ops"),
                field("ns_per_op"), field("ns_per_op_warm"), field("reserved_ratio"), field("driver_calls"),
                field("verify_errors") == "null" ? "-" : field("verify_errors")
            if (field("allocator") != "galloc" || field("verify_errors") != "null") next
            n++
            cold += log(field("ns_per_op"))
            warm += log(field("ns_per_op_warm"))
            ratio += log(field("reserved_ratio"))
            if (field("reserved_ratio") > worst) worst = field("reserved_ratio")
        }
        END {
            if (!n) { print "no replay succeeded"; exit 1 }
            printf "%-22s %-10s %8s %9.1f %9.1f %10.4f  worst %.4f\n", "geometric mean", "galloc", "", exp(cold / n),
                exp(warm / n), exp(ratio / n), worst
        }' "$replay_file"
    echo "reserved: peak memory held over peak live; driver: driver calls of both passes"
}

hotpath_table() {
    awk "$fields"'
        BEGIN { printf "%-20s %-11s %10s %7s %8s %12s %14s\n", "case", "allocator", "bytes", "holes", "threads",
            "ns per pair", "pairs per s" }
        {
            printf "%-20s %-11s %10d %7d %8d %12.1f %14.0f\n", field("case"), field("allocator"), field("bytes"),
                field("holes"), field("threads"), field("ns_per_pair"), field("pairs_per_s")
        }
        END { if (!NR) { print "nothing was measured"; exit 1 } }' "$hotpath_file"
}

summary() {
    tests/gpu/describe.sh
    echo
    hotpath_table || failed=1
    echo
    if [ -s "$reuse_file" ]; then
        cat "$reuse_file"
        echo
    fi
    replay_table || failed=1
    echo
    sed -n '/^== summary/,$p' "$out/$device-calls.txt"
}

failed=0
tests/gpu/describe.sh
mkdir -p "$out" && rm -f "$reuse_file" || exit 1
echo
programs="build/replay build/hotpath"
[ "$backend" = cuda ] && programs="$programs build/examples/02_reuse-cuda"
# shellcheck disable=SC2086 # words
if ! ${MAKE:-make} $variables $programs >"$out/$device-build.log" 2>&1; then
    cat "$out/$device-build.log"
    exit 1
fi
rm -f "$out/$device-build.log"
measure_pairs
measure_reuse
replay_all
OUT=$out bench/calls.sh >/dev/null || { echo "calls.sh failed: see $out/$device-calls.txt"; failed=1; }
echo
summary >"$summary_file"
cat "$summary_file"
[ $failed -eq 0 ]
