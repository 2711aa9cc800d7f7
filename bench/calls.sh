#!/bin/bash
# calls.sh - does galloc ever make the host wait for the device while there is memory left? The ten traces are replayed
# and every function of the driver that galloc calls is counted and timed by one that stands before it (calls.c), while
# a kernel runs that ends only after the replay: a call that waits for the device would not return. Then the same with
# too low a limit, when galloc has to wait: that this is seen shows that it would have been.
#
# Environment
#   OUT          where DEVICE-calls.txt is written (bench/results)
#   BACKEND=sim  on the simulated device, into build/bench-sim
#   MAKE, NVCC, ARCH, GALLOC_COMMIT

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda}
if [ "$backend" = sim ]; then
    export BACKEND
    out=${OUT:-build/bench-sim}
    device=sim
    variables=NVCC=
else
    out=${OUT:-bench/results}
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 |
        tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' -)
    variables=${NVCC:+NVCC=$NVCC}
    [ -n "$device" ] || { echo "no GPU: nothing was measured"; exit 2; }
fi
file=$out/$device-calls.txt
failed=0 summary=

replay() { # options...
    echo
    echo "== replay $*"
    timeout 240 build/replay --backend "$backend" "$@" >"$file.run" 2>&1
    status=$?
    cat "$file.run"
    waits=$(sed -n 's/ calls of a function that can wait for the device$//p' "$file.run")
    longest=$(awk '$1 == "all" && NF == 4 { print $4 }' "$file.run")
}

verdict() { # what was tried, whether it went as it must
    echo "$2" | grep -q '^yes' || failed=1
    summary="$summary$(printf '%-44s %8s %12s  %s' "$1" "${waits:--}" "${longest:--}" "$2")"$'\n'
}

# No call that can wait, no call that did, no failure.
never_waits() { # what it is, options...
    what=$1
    shift
    replay --calls "$@" bench/traces/*.csv.gz
    [ $status -eq 0 ] && [ "$waits" = 0 ] && verdict "$what" yes || verdict "$what" "NO, status $status"
}

# Both are noticed: that a function was called which can wait, and that one did.
must_wait() { # what it is, options...
    what=$1
    shift
    replay --calls "$@" bench/traces/moe_multistream.csv.gz
    [ $status -eq 1 ] && [ "${waits:-0}" -gt 0 ] && grep -q '^  found: ' "$file.run" &&
        verdict "$what" "yes: the wait was seen" || verdict "$what" "NO, status $status"
}

main() {
    tests/gpu/describe.sh
    never_waits 'ten traces, work well behind the host' --busy
    never_waits 'ten traces twice, overhead:0' --conf overhead:0 --repeat 2
    must_wait 'too low a limit' --busy --limit-mib 5000
    echo
    echo "== summary"
    printf '%-44s %8s %12s  %s\n' "the driver's calls" 'can wait' 'us, longest' 'as it must be'
    printf '%s' "$summary"
}

mkdir -p "$out" || exit 1
# shellcheck disable=SC2086 # words
if ! ${MAKE:-make} $variables build/replay >"$file.run" 2>&1; then
    cat "$file.run"
    exit 1
fi
main >"$file"
rm -f "$file.run"
cat "$file"
[ $failed -eq 0 ]
