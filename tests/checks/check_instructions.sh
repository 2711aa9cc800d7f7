#!/bin/sh
# check_instructions.sh - how many instructions a pair of alloc and free takes, counted by valgrind: a number that is
# the same on every machine, unlike a time. The bounds stand a little above what gcc 12 makes at -O2. Without valgrind,
# or with another processor or compiler than they were found with, nothing is checked.
# Environment: CC, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/check_instructions
include=tests/sim/include

. tests/support/verdicts.sh
mkdir -p "$work/sim" || exit 1

skip() { # why
    echo "skipped: $1"
    echo "0 passed, 0 failed"
    exit 0
}

command -v valgrind >/dev/null 2>&1 || skip "valgrind is not found. On Debian: apt install valgrind"
[ "$(uname -m)" = x86_64 ] || skip "the bounds are for x86_64"
"$cc" --version 2>/dev/null | grep -qi 'free software' || skip "the bounds are for gcc"

for file in tests/sim/*.c; do
    "$cc" -std=c11 -O1 -w -Itests/sim -isystem $include -c "$file" -o "$work/sim/$(basename "$file" .c).o" || exit 1
done
"$cc" -std=c11 -O2 -w -I. -Itests/sim -isystem $include tests/checks/instructions.c "$work"/sim/*.o \
    -o "$work/pairs" -lpthread -lm || exit 1

# Counts what one case does for each pair and compares it.
count() { # case, pairs, bound, settings
    ir=$(valgrind --tool=callgrind --toggle-collect="count_$1" --callgrind-out-file=/dev/null \
        "$work/pairs" "$1" "$2" $4 2>&1 | sed -n 's/.*Collected : *//p')
    ir=$((${ir:-0} / $2))
    if [ $ir -gt 0 ] && [ $ir -le "$3" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $1 $4: $ir instructions a pair, at most $3"
    fi
    echo "$1 $4: $ir"
}

count hot 2000 255
count hot 2000 212 stream_check:off
count large 10000 300
count miss 10000 1200
count churn 20000 1690
count churn_two_streams 20000 2250
count hot 2000 2100 stats:exact
count hot 2000 2180 history:1000
count hot 2000 3150 history:1000,history_stacks:8
count hot 20000 265 debug:guards+poison+quarantine,debug_sample:1000
count miss 10000 1270 debug:guards,debug_sample:1000
count parked 4 6000000 memory_limit:120G
count streams 256 15000
count streams 512 27000 # twice as many: for each one twice as much, not four times
count growable 100 230000

count_verdicts
