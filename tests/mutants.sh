#!/bin/sh
# mutants.sh [NAME...] - breaks galloc.h on purpose, one way after the other, and sees to it that the tests notice.
#
# A mutant is a file tests/mutants/NAME.txt: what it breaks, in lines that begin with '#'; a line `tests: PROGRAM[:TEST]
# ...` with the programs, and perhaps the tests, that must notice; a line `--- old`, the lines to replace, exactly as
# they stand once in galloc.h; a line `--- new`, what to put there; perhaps more such pairs; and a line `---` at the
# end. A mutant is caught when one of its programs fails, crashes or does not end.
# Environment: CC, BUILD (a folder to work in), CUDA_INCLUDE (headers to use), JOBS (how many at once), SECONDS_EACH.

cd "$(dirname "$0")/.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/mutants
include=${CUDA_INCLUDE:-tests/sim/include}
jobs=${JOBS:-2}
seconds=${SECONDS_EACH:-60}
flags="-std=c11 -O1 -w"

mkdir -p "$work/sim" || exit 1

# Is there a program that fails with this header? Writes what happened into the folder's file `result`.
try() { # name
    dir=$work/$1
    for test in $(sed -n 's/^tests: *//p' "tests/mutants/$1.txt"); do
        program=${test%%:*} filter=
        case $test in *:*) filter=${test#*:} ;; esac
        if [ ! -x "$dir/$program" ]; then
            "$cc" $flags -I"$dir" -Itests -Itests/sim -isystem "$include" "tests/$program.c" "$work"/sim/*.o \
                -o "$dir/$program" -lpthread -lm >"$dir/$program.out" 2>&1 || {
                echo "does not compile" >"$dir/result"
                return
            }
        fi
        timeout "$seconds" "$dir/$program" $filter >"$dir/$program.out" 2>&1
        status=$?
        if [ $status -eq 2 ]; then
            echo "no such test: $test" >"$dir/result"
            return
        elif [ $status -ne 0 ]; then
            why=$(grep -m 1 '^FAILED' "$dir/$program.out" || echo "status $status")
            echo "caught by $test: $why" >"$dir/result"
            return
        fi
    done
    echo "NOT CAUGHT" >"$dir/result"
}

for file in tests/sim/*.c; do
    "$cc" -std=c11 -O2 -w -Itests/sim -isystem "$include" -c "$file" -o "$work/sim/$(basename "$file" .c).o" &
done
wait

if [ $# -eq 0 ]; then
    for file in tests/mutants/*.txt; do set -- "$@" "$(basename "$file" .txt)"; done
fi

passed=0 failed=0 running=0
for name in "$@"; do
    rm -rf "$work/$name" && mkdir -p "$work/$name" || exit 1
    tests/mutate.sh "tests/mutants/$name.txt" "$work/$name/galloc.h" || exit 1
done
for name in "$@"; do
    try "$name" &
    running=$((running + 1))
    if [ $running -ge "$jobs" ]; then
        wait
        running=0
    fi
done
wait
for name in "$@"; do
    result=$(cat "$work/$name/result")
    case $result in
    caught*) passed=$((passed + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    printf '%-40s %s\n' "$name" "$result"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
