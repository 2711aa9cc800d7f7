#!/bin/sh
# check_adversaries.sh - small forms of the traces that bench/adversary.c writes: galloc replays each with nothing found
# wrong, and holds no more than it may. Environment: BUILD.

cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
work=$build/check_adversaries

. tests/support/verdicts.sh
mkdir -p "$work/1" "$work/again" "$work/2" || exit 1

ends() { # status, arguments
    expected=$1
    shift
    "$build/adversary" "$@" >"$work/out" 2>&1
    status=$?
    [ $status -eq "$expected" ]
    verdict $? "status $status, not $expected: adversary $*"
}

# ---- the tool -------------------------------------------------------------------------------------------------------

ends 0 --help
ends 0 --list
names=$(cut -d ' ' -f 1 "$work/out")
ends 0 --quick "$work/1"
ends 0 --quick --seed 1 "$work/again"
ends 0 --quick --seed 2 "$work/2"
[ "$names" ] && [ "$(cd "$work/1" && ls)" = "$(for name in $names; do echo "$name.csv"; done | sort)" ]
verdict $? "a trace for each name"
diff -r "$work/1" "$work/again" >"$work/out"
verdict $? "the same seed writes the same traces"
! cmp "$work/1/log_uniform.csv" "$work/2/log_uniform.csv" >"$work/out"
verdict $? "another seed writes others"
ends 0 --quick "$work/again" ramp vectors
ends 2
ends 2 --foo "$work/1"
ends 2 --seed x "$work/1"
ends 2 "$work/1" foo
ends 1 "$work/no such folder"

# ---- what galloc makes of them --------------------------------------------------------------------------------------

# The worst of them, Robson's checkerboard, doubles its blocks from 64 KiB to the 2 MiB of a page five times. Each time
# the blocks that it leaves stand in every page and in the way of the next ones, so an allocator that copies nothing
# needs as much again as the half of live memory that is asked for: 1 + 5 / 2 = 3.5 times what is live. From page size
# on pages can move, so that nothing is gained by going on. What is built less cleverly must not cost more.
bound=3.6

for seed in 1 2; do
    for options in '--busy --verify' '--conf overhead:0 --busy --verify' '--repeat 3 --verify' '--fit' \
        '--conf expandable_segments:False --busy --verify'; do
        # shellcheck disable=SC2086 # words
        "$build/replay" --json $options "$work/$seed"/*.csv >"$work/out" 2>&1
        verdict $? "replay $options, seed $seed"
        [ "$(grep -c '"oom": 0, .*"findings": 0, ' "$work/out")" -eq "$(echo "$names" | wc -l)" ]
        verdict $? "no out-of-memory and nothing wrong: $options, seed $seed"
        case $options in *False*) continue ;; esac
        awk -v bound=$bound -F'"reserved_ratio": ' '$2 + 0 > bound { print; wrong = 1 } END { exit wrong }' \
            "$work/out" >"$work/worse"
        mv "$work/worse" "$work/out"
        [ ! -s "$work/out" ]
        verdict $? "more than $bound times the live memory is held: $options, seed $seed"
    done
done

count_verdicts
