#!/bin/sh
# enumerate.sh [PART...] - enumerate.c as far as it goes, its parts one after the other, each shared by JOBS processors
# (all there are). Prints the sums of what they did.
# Environment: ENUMERATOR (the program), JOBS, OUT (a folder for what each process says), STOP_AFTER (seconds for each
# part; what was not complete by then does not count).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
program=${ENUMERATOR:-build/bundled/enumerate}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
out=${OUT:-build/enumerate}
cores=$(getconf _NPROCESSORS_ONLN)
passed=0 failed=0

# Each process stays on one processor: not all on the same.
on() { # which, command...
    core=$(($1 % cores))
    shift
    if command -v taskset >/dev/null 2>&1; then taskset -c "$core" "$@"; else "$@"; fi
}

[ $# -gt 0 ] || set -- $(sed -n 's/^TEST(\(.*\))$/\1/p' tests/stress/enumerate.c)
mkdir -p "$out" || exit 1

for part in "$@"; do
    i=0
    while [ $i -lt "$jobs" ]; do
        (
            on "$i" env SLICE=$i/$jobs ENUMERATE=full timeout "${STOP_AFTER:-100000}" "$program" "$part"
            echo "status $?"
        ) >"$out/$part.$i" 2>&1 &
        i=$((i + 1))
    done
    wait
    echo "$part"
    awk -v jobs="$jobs" '
        /operations,/ {
            key = $1 " operations, " $3 " preemptions, " $5 " answers"
            if (!(key in n)) order[++keys] = key
            n[key]++
            programs[key] += $7
            schedules[key] += $9
            points[key] += $11
            refused[key] += $13
            time[key] += $18
        }
        /^status/ && $2 != 0 && $2 != 124 { wrong++ }
        END {
            for (k = 1; k <= keys; k++) {
                key = order[k]
                if (n[key] < jobs) continue
                printf "    %s: %.0f programs, %.0f schedules, %.0f points, %.0f mallocs had no memory, ", key,
                    programs[key], schedules[key], points[key], refused[key]
                printf "%.0f s of a processor\n", time[key]
            }
            exit wrong > 0
        }' "$out/$part".*
    if [ $? -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        grep -h "wrong\|FAILED" "$out/$part".* | head -20
    fi
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
