#!/bin/sh
# check_examples.sh - the examples are what they promise: each says in its opening comment what it shows, what the gain
# is and what to look up, which is there and which it calls, in fewer than 200 lines; one that computes something wrong
# ends with status 1; the table and the picture of bench/examples.sh are those of their file. `make test` runs the
# examples themselves.
# Environment: CC, CXX, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/check_examples
. tests/support/verdicts.sh
said=

# ---- texts ----------------------------------------------------------------------------------------------------------

for file in examples/*.c examples/*.cu examples/*.cpp; do
    sed '/\*\//q' "$file" >"$work/comment"
    [ "$(grep -cE '^   (Shows  |Gain   |Look up)  [^ ]' "$work/comment")" -eq 3 ] && [ "$(wc -l <"$file")" -lt 200 ]
    verdict $? "$file: says not what it Shows, Gain, Look up; or has 200 lines" "$work/comment"
    sed -n '/^   Look up/,$p' "$work/comment" | grep -oE 'galloc_[a-z_]+' | sort -u | while read -r name; do
        grep -qE "^GALLOC_API .*\b$name\(" galloc.h || echo "$name is not a function of galloc.h"
        sed '1,/\*\//d' "$file" | grep -q "\b$name\b" || echo "$name is not called"
    done >"$work/names"
    grep -q 'galloc_' "$work/comment" && [ ! -s "$work/names" ]
    verdict $? "$file: functions to look up:" "$work/names"
done

# ---- wrong results --------------------------------------------------------------------------------------------------

device=$(tests/support/device.sh "$work/sim") || exit 1
cp examples/example.h "$work"
echo '#include "galloc.h"' | "$cc" -w -DGALLOC_IMPLEMENTATION -I. -isystem tests/sim/include -x c -c - \
    -o "$work/galloc.o" || exit 1

# Breaks an example by a command of sed, and runs it.
break_and_run() { # file, command
    sed "$2" "$1" >"$work/broken.${1##*.}"
    ! cmp -s "$1" "$work/broken.${1##*.}"
    verdict $? "$1 has no place for: $2"
    if [ "${1##*.}" = c ]; then
        "$cc" -w -DGALLOC_IMPLEMENTATION_DONE -I. -isystem tests/sim/include "$work/broken.c" "$work/galloc.o" \
            "$device"/*.o -lpthread -lm -o "$work/broken"
    else
        SIM_OBJECTS=$(echo "$device"/*.o) tests/sim/nvcc.sh -w -DGALLOC_IMPLEMENTATION_DONE -I. "$work/broken.cu" \
            "$work/galloc.o" -o "$work/broken"
    fi >"$work/out" 2>&1 && "$work/broken" >"$work/out" 2>&1
    status=$?
    [ $status -eq 1 ] && tail -n 1 "$work/out" | grep -qE '^[0-9]+ results, [1-9][0-9]* wrong$'
    verdict $? "$1 after $2: exit status $status" "$work/out"
}
break_and_run examples/01_first_program.c 's/MemsetAsync(p, 7/MemsetAsync(p, 9/'
if command -v "${CXX:-g++}" >/dev/null 2>&1; then
    break_and_run examples/03_two_streams.cu 's/sum += a\[i\] \* b\[i\];/sum += a[i] * b[i] + (i == 77);/'
else
    echo "skipped: examples in CUDA C++: ${CXX:-g++} is not found"
fi

# ---- table and picture ----------------------------------------------------------------------------------------------

line='{"example": "02_reuse", "unit": "us per step", "allocator": "%s", "device": "A & B", "median": %s, "least": %s, '
line=$line'"most": %s, "in_allocator": 1, "rounds": 5}\n'
{
    echo '# make run-examples; A & B, driver 1'
    # shellcheck disable=SC2059 # a format
    printf "$line" cudaMalloc 84.0 80.0 90.0 cudaMallocAsync 31.5 31.0 32.0 galloc 21.0 20.0 22.0
} >"$work/results.jsonl"
bench/examples.sh --table "$work/results.jsonl" >"$work/out"
grep -qx '02_reuse us per step  *84.00  *31.50  *21.00  *4.00 times  *1.50 times' "$work/out" &&
    grep -qx 'A & B' "$work/out"
verdict $? "the table of the examples" "$work/out"
bench/examples.sh --svg "$work/results.jsonl" >"$work/out"
grep -q '^<svg .*xmlns=' "$work/out" && [ "$(tail -n 1 "$work/out")" = '</svg>' ] &&
    grep -q '>4.00</text>' "$work/out" && grep -q 'A &amp; B, driver 1' "$work/out" &&
    grep -q prefers-color-scheme "$work/out"
verdict $? "the picture of the examples" "$work/out"

count_verdicts
