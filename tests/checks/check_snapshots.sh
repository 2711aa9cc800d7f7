#!/bin/sh
# check_snapshots.sh - snapshots of the eleven traces at five points each, read by Python's json and pickle: the formats
# are one dictionary, the sums are the counters, and going back in time no block or page is missing, also where the ring
# has lost the beginning. build/check_snapshots/sizes-* has the bytes and the time that an event took in the files.
# Environment: CC, BUILD (a folder to work in), PYTHON, FULL=1 (all traces with a long history too; minutes).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} python=${PYTHON:-python3}
work=${BUILD:-build}/check_snapshots

. tests/support/verdicts.sh

sim=$(tests/support/device.sh "$work/sim") || exit 1
"$cc" -std=c11 -Wall -Wextra -I. -Itests/sim -isystem tests/sim/include tests/checks/trace_snapshots.c \
    bench/trace.c "$sim"/*.o -o "$work/trace_snapshots" -lpthread -lm >"$work/out" 2>&1
verdict $? "trace_snapshots.c does not compile:" "$work/out"

# Of each trace: five points, all of them whole or overwritten as is said.
read_back() { # entries of the ring, a pattern of the last line, traces
    entries=$1 said=$2
    shift 2
    for trace; do
        name=$(basename "$trace" .csv.gz)
        folder=$work/$entries-$name
        mkdir -p "$folder"
        "$work/trace_snapshots" "$folder" "$entries" "$trace" >"$folder/counters" 2>"$work/out"
        verdict $? "$name, $entries entries: no snapshots:" "$work/out"
        "$python" tests/checks/trace_snapshots.py "$folder" >"$work/sizes-$entries-$name" 2>&1 &&
            grep -q "^$said, 0 wrong$" "$work/sizes-$entries-$name"
        verdict $? "$name, $entries entries: the snapshots:" "$work/sizes-$entries-$name"
        rm -r "$folder"
    done
}

if command -v "$python" >/dev/null 2>&1; then
    read_back 2000 '[01] whole, [45] overwritten, 0 large' bench/traces/*.csv.gz bench/traces/later/*.csv.gz
    read_back 100000 '5 whole, 0 overwritten, 0 large' bench/traces/moe_*.csv.gz bench/traces/rnn_*.csv.gz
    read_back 100000 '3 whole, 2 overwritten, 3 large' bench/traces/gpt2_*.csv.gz
    [ -z "$FULL" ] ||
        read_back 1000000 '5 whole, 0 overwritten, [0-5] large' bench/traces/*.csv.gz bench/traces/later/*.csv.gz
else
    echo "skipped: reading the snapshots back: python3 is not found"
fi

count_verdicts
