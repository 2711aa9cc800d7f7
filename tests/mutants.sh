#!/bin/sh
# mutants.sh [NAME...] - breaks galloc.h on purpose, one way after the other, and sees to it that the tests notice.
#
# A mutant is a file tests/mutants/NAME.txt: what it breaks, in lines that begin with '#'; a line `tests: PROGRAM[:TEST]
# ...` with the programs, and perhaps the test, that must notice; a line `--- old`, the lines to replace, exactly as they
# stand once in galloc.h; a line `--- new`, what to put there; and at the end a line `---`. A mutant is caught when one of
# its programs fails, crashes or does not end.
# Environment: CC, BUILD (a folder to work in), CUDA_INCLUDE (headers to use), JOBS (how many at once), SECONDS_EACH.

cd "$(dirname "$0")/.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/mutants
include=${CUDA_INCLUDE:-tests/sim/include}
jobs=${JOBS:-2}
seconds=${SECONDS_EACH:-60}
flags="-std=gnu11 -O1 -w"

mkdir -p "$work/sim" || exit 1

# Writes galloc.h with the replacement made, or says what is wrong with the mutant.
apply() { # mutant, result
    awk -v mutant="$1" '
        FNR == 1 { file++ }
        file == 1 && /^--- old$/ { part = "old"; next }
        file == 1 && /^--- new$/ { part = "new"; next }
        file == 1 && /^---$/ { part = ""; next }
        file == 1 { if (part != "") text[part] = text[part] $0 "\n"; next }
        { whole = whole $0 "\n" }
        END {
            old = text["old"]
            if (old == "" || old == text["new"]) { print mutant ": no text to replace" > "/dev/stderr"; exit 1 }
            at = index(whole, old)
            if (!at) { print mutant ": its text is not in galloc.h" > "/dev/stderr"; exit 1 }
            rest = substr(whole, at + length(old))
            if (index(rest, old)) { print mutant ": its text is there twice" > "/dev/stderr"; exit 1 }
            printf "%s%s%s", substr(whole, 1, at - 1), text["new"], rest
        }' "$1" galloc.h >"$2"
}

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
            echo "caught by $test: $(grep -m 1 -E '^FAILED' "$dir/$program.out" || echo "status $status")" >"$dir/result"
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
    apply "tests/mutants/$name.txt" "$work/$name/galloc.h" || exit 1
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
