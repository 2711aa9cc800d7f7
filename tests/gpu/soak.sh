#!/bin/bash
# soak.sh - one long run on the GPU in which pages move all the time while eight streams write and check every byte
# (gpu_soak.cu). First two short runs that must find wrong words: blocks freed on a stream that was not made to wait,
# and a galloc.h whose moved pages forget who still uses them. Ends in a table and one line "N passed, M failed".
#
# Environment
#   OUT_LOG          also write everything to this file
#   SOAK_SECONDS     how long the run lasts (480)
#   CONTROL_SECONDS  how long each of the short ones does (5)
#   BACKEND=sim      on the simulated device: shows that it works, says nothing about a GPU
#   NVCC, ARCH, CXX, CC, BUILD, GALLOC_COMMIT

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}/soak
backend=${BACKEND:-cuda}
soak_seconds=${SOAK_SECONDS:-480}
control_seconds=${CONTROL_SECONDS:-5}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
mutant=moved_pages_forget_their_marks
passed=0 failed=0 table=

# ---- building -------------------------------------------------------------------------------------------------------

# From a folder with galloc.h and tests/ in it.
build_one() { # folder, program
    if [ "$backend" = sim ]; then
        "${CXX:-g++}" -x c++ -std=c++14 -O1 -g -w -DGALLOC_ON_SIM "-I$1" -Itests/sim -isystem tests/sim/include \
            -c "$1/tests/gpu/gpu_soak.cu" -o "$2.o" && "${CXX:-g++}" "$2.o" "$build"/sim_*.o -o "$2" -lpthread -lm
    else
        "$nvcc" -O2 "-arch=${ARCH:-native}" "-I$1" "$1/tests/gpu/gpu_soak.cu" -o "$2" -lpthread
    fi >"$2.log" 2>&1
}

build_all() {
    rm -rf "$build" && mkdir -p "$build/mutant/tests/gpu" "$build/mutant/tests/support" || return 1
    cp tests/support/test.h "$build/mutant/tests/support" || return 1
    cp tests/gpu/*.h tests/gpu/gpu_soak.cu "$build/mutant/tests/gpu" || return 1
    tests/mutate.sh "$mutant" "$build/mutant/galloc.h" || return 1
    if [ "$backend" = sim ]; then
        for file in tests/sim/*.c; do
            "${CC:-gcc}" -std=c11 -O2 -w -Itests/sim -isystem tests/sim/include -c "$file" \
                -o "$build/sim_$(basename "$file" .c).o" || return 1
        done
    fi
    build_one . "$build/gpu_soak" &
    build_one "$build/mutant" "$build/gpu_soak_$mutant" &
    wait
    for program in gpu_soak "gpu_soak_$mutant"; do
        [ -x "$build/$program" ] && continue
        cat "$build/$program.log"
        return 1
    done
}

# ---- running --------------------------------------------------------------------------------------------------------

# Of the last line, which is names and numbers by turns.
field() { # name
    awk -v name="$1" '/^seconds / { for (i = 1; i < NF; i += 2) if ($i == name) print $(i + 1) }' "$build/output"
}

add_row() {
    table="$table$(printf '%-36s %7s %9s %11s %9s %9s %11s  %s' "$@")"$'\n'
}

# Did it go as it must? What goes wrong in a short run beside wrong words, an error of the device say, is expected too.
run() { # what it is, must words be wrong?, seconds, program, options...
    what=$1 must=$2 limit=$3
    shift 3
    echo
    echo "== $what"
    timeout -k 10 $((limit + 60)) "$@" 2>&1 </dev/null | tee "$build/output"
    status=${PIPESTATUS[0]}
    wrong=$(field wrong_words)
    result=no
    if [ "$must" = wrong ]; then
        [ "${wrong:-0}" -gt 0 ] && result=yes
    else
        [ "$status" -eq 0 ] && [ "$wrong" = 0 ] && result=yes
    fi
    [ $result = yes ] && passed=$((passed + 1)) || failed=$((failed + 1))
    add_row "$what" "$(field seconds)" "$(field blocks)" "$(field gib_checked)" "$(field moved)" "$(field at_work)" \
        "$wrong" "$result"
}

main() {
    tests/gpu/describe.sh
    echo
    echo "building"
    build_all || { echo "0 passed, 1 failed"; return 1; }
    add_row run seconds blocks 'GiB checked' moved 'at work' 'wrong words' 'as it must be'
    run "freed on the wrong stream" wrong "$control_seconds" \
        "$build/gpu_soak" --seconds "$control_seconds" --wrong-order
    run "moved pages forget their marks" wrong "$control_seconds" \
        "$build/gpu_soak_$mutant" --seconds "$control_seconds"
    run "soak" right "$soak_seconds" "$build/gpu_soak" --seconds "$soak_seconds"
    echo
    tests/gpu/describe.sh
    echo
    printf '%s\n' "$table"
    echo "at work: pages that moved while work that used them at the old address was not finished"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ] && [ "$passed" -eq 3 ]
}

if [ -n "$OUT_LOG" ]; then
    main 2>&1 | tee "$OUT_LOG"
    exit "${PIPESTATUS[0]}"
fi
main
