#!/bin/sh
# run_programs.sh PROGRAM... - runs test programs, JOBS at once, and adds up what they say in their last lines, which
# are of the form "N passed, M failed"; so is its own last line. Before it stand the programs and tests that failed.
# Each program has a line when it ends, with how many have ended so far: start with those that take longest.
#
# A program that ends without such a line, or with an exit status that does not fit it, or not within TEST_SECONDS,
# counts as a failure. An example counts as one test: it ends with status 0 after "N results, 0 wrong".

export LC_ALL=C # numbers have a point, whatever the locale
build=${BUILD:-build}
out=$build/out

# One program, with its output in a file; a line that says how it went.
if [ "$1" = --one ]; then
    all=$2 program=$3
    file=$out/log.$(echo "$program" | tr / .)
    begin=$(date +%s)
    timeout "${TEST_SECONDS:-300}" "$program" >"$file" 2>&1 </dev/null
    status=$?
    seconds=$(($(date +%s) - begin))
    case $program in
    */examples/*)
        [ $status -eq 0 ] && tail -n 1 "$file" | grep -qxE '[1-9][0-9]* results, 0 wrong' &&
            echo "1 passed, 0 failed" >>"$file"
        ;;
    esac
    result=$(tail -n 1 "$file" | grep -xE '[0-9]+ passed, [0-9]+ failed')
    case $result in
    '') result="0 passed, 1 failed" why=" (no result: status $status)" ;;
    *", 0 failed") [ $status -eq 0 ] || result="${result% 0 failed} 1 failed" why=" (status $status)" ;;
    esac
    echo "$result" >"$file.result"
    n=1
    while ! mkdir "$out/ended.$n" 2>/dev/null && [ $n -lt "$all" ]; do n=$((n + 1)); done
    sed -n "s|^skipped|$program: &|p" "$file"
    case $result in
    *", 0 failed") printf '[%d/%d] %-40s %s, %d s\n' $n "$all" "$program" "$result" $seconds ;;
    *)
        printf '[%d/%d] %-40s %s%s: %s ends in\n' $n "$all" "$program" "$result" "$why" "$file"
        tail -n 40 "$file" | sed 's/^/    /'
        {
            echo "failed: $program$why"
            sed -n 's/^FAILED /    /p' "$file"
        } >"$file.failed"
        ;;
    esac
    exit 0
fi

rm -rf "$out" && mkdir -p "$out" || exit 1
[ $# -gt 0 ] && printf '%s\n' "$@" | xargs -P "${JOBS:-2}" -I '{}' "$0" --one $# '{}'
cat "$out"/*.failed 2>/dev/null
cat "$out"/*.result 2>/dev/null | awk '
    { passed += $1; failed += $3 }
    END { print passed + 0 " passed, " failed + 0 " failed"; exit failed || !passed }'
