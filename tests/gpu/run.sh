#!/bin/bash
# run.sh - builds the tests of this folder and the examples, runs them on the GPU, and runs one of them again, briefly,
# under compute-sanitizer's memcheck and racecheck where that is found. Ends in a table and one line "N passed, M
# failed"; fails when a test fails and when nothing ran.
#
# Environment
#   OUT_LOG          also write everything to this file
#   CONTENT_SECONDS  how long gpu_content runs (24)
#   GRAPHS_SECONDS   how long gpu_graphs does (8)
#   PRESSURE_SECONDS  how long gpu_pressure does, about (9)
#   ONLY             programs to run, instead of all of them and the examples and compute-sanitizer
#   PROBE=1          run probe_context_sync, probe_graphs, probe_copies, probe_addresses too, and show what they say
#   BACKEND=sim      the same programs on the simulated device: shows that they work, says nothing about a GPU
#   NVCC, ARCH, CXX, CC, BUILD, GALLOC_COMMIT

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}/gpu
backend=${BACKEND:-cuda}
content_seconds=${CONTENT_SECONDS:-24}
graphs_seconds=${GRAPHS_SECONDS:-8}
pressure_seconds=${PRESSURE_SECONDS:-9}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
programs="gpu_backends gpu_behaviour gpu_content gpu_devices gpu_graph_updates gpu_graphs gpu_ipc gpu_pdl"
programs="$programs gpu_pressure gpu_reset"
examples=$(cd examples && ls -- *.c *.cu *.cpp | sed 's/\.[^.]*$//' | sort)
[ -n "$PROBE" ] && [ "$backend" = cuda ] &&
    programs="$programs probe_context_sync probe_graphs probe_copies probe_addresses"
[ -n "$ONLY" ] && programs=$ONLY examples=
passed=0 failed=0 table=

# ---- building -------------------------------------------------------------------------------------------------------

gpu_arch() {
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
    echo "${ARCH:-${capability:+sm_$capability}}"
}

build_cuda() { # source, program
    driver=; case $2 in probe*) driver=-lcuda ;; esac
    "$nvcc" -O2 "-arch=$arch" -I. "$1" -o "$build/$2" -lpthread $driver >"$build/$2.log" 2>&1
}

build_sim() { # source, program
    if [ "${1#examples/*.c[up]}" != "$1" ]; then
        SIM_OBJECTS=$(echo "$build"/sim_*.o) tests/sim/nvcc.sh -O1 -g -w -I. "$1" -o "$build/$2"
    elif [ "${1%.c}" != "$1" ]; then
        "${CC:-gcc}" -O1 -g -w -I. -isystem tests/sim/include "$1" tests/sim/*.c -o "$build/$2" -lpthread -lm
    else
        "${CXX:-g++}" -x c++ -std=c++14 -O1 -g -w -DGALLOC_ON_SIM -I. -Itests/sim -isystem tests/sim/include \
            -c "$1" -o "$build/$2.o" && "${CXX:-g++}" "$build/$2.o" "$build"/sim_*.o -o "$build/$2" -lpthread -lm
    fi >"$build/$2.log" 2>&1
}

build_all() {
    rm -rf "$build" && mkdir -p "$build" || return 1
    if [ "$backend" = sim ]; then
        for file in tests/sim/*.c; do
            "${CC:-gcc}" -std=c11 -O2 -w -Itests/sim -isystem tests/sim/include -c "$file" \
                -o "$build/$(basename "$file" .c).o" || return 1
        done
    else
        command -v "$nvcc" >/dev/null || { echo "nvcc is not found (Debian: nvidia-cuda-toolkit)"; return 1; }
        arch=$(gpu_arch)
        : "${arch:=native}"
    fi
    for name in $programs; do "build_$backend" "tests/gpu/$name.cu" "$name" & done
    for name in $examples; do "build_$backend" "$(ls examples/"$name".c*)" "$name" & done
    wait
    for name in $programs $examples; do
        [ -x "$build/$name" ] && continue
        echo "$name does not compile:"
        cat "$build/$name.log"
        return 1
    done
}

# ---- running --------------------------------------------------------------------------------------------------------

add_row() { # name, what to say, seconds
    table="$table$(printf '%-28s %-28s %6s' "$1" "$2" "$3")"$'\n'
}

# A program and what its last line says. An example, or a probe, passes by its exit status; a program that says
# "skipped: ..." last counts for nothing.
run() { # name, seconds at most, command...
    name=$1 limit=$2
    shift 2
    echo
    echo "== $name"
    SECONDS=0
    timeout -k 10 "$limit" "$@" 2>&1 </dev/null | tee "$build/output"
    status=${PIPESTATUS[0]}
    skipped=$(tail -n 1 "$build/output" | grep '^skipped: ')
    if [ "$status" -eq 0 ] && [ -n "$skipped" ]; then
        add_row "$name" "$skipped" "$SECONDS"
        return
    fi
    result=$(grep -xE '[0-9]+ passed, [0-9]+ failed' "$build/output" | tail -n 1)
    case $name in
    0*|probe*) [ "$status" -eq 0 ] && result="1 passed, 0 failed" ;;
    esac
    [ -n "$result" ] || result="0 passed, 1 failed"
    if [ "$status" -ne 0 ] && [ "${result% 0 failed}" != "$result" ]; then result="${result% 0 failed} 1 failed"; fi
    [ "$status" -eq 124 ] && echo "stopped after $limit s"
    [ "$status" -ne 0 ] && echo "exit status $status"
    passed=$((passed + ${result%% *}))
    failed=$((failed + $(echo "$result" | sed 's/.*, \([0-9]*\) failed/\1/')))
    add_row "$name" "$result" "$SECONDS"
}

sanitizer() {
    command -v compute-sanitizer 2>/dev/null || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null
}

# Errors that galloc handles are not the program's: only what kernels do to memory is looked at.
run_sanitizer() { # tool of compute-sanitizer, threads (racecheck loses launches of several), options...
    name="$1 of gpu_content" tool=$1 threads=$2
    shift 2
    if [ "$backend" = sim ] || [ -z "$(sanitizer)" ]; then
        add_row "$name" "not run: no compute-sanitizer" -
        return
    fi
    "$(sanitizer)" --tool "$tool" "$build/01_first_program" >"$build/output" 2>&1
    if grep -q 'Device not supported' "$build/output"; then
        add_row "$name" "not run: device not supported" -
        return
    fi
    run "$name" 120 "$(sanitizer)" --tool "$tool" "$@" --error-exitcode 9 \
        "$build/gpu_content" --seconds 4 --threads "$threads" --limit-mib 256
}

main() {
    tests/gpu/describe.sh
    echo
    echo "building"
    build_all || { echo "0 passed, 1 failed"; return 1; }
    for name in $programs; do
        case $name in
        gpu_content) run "$name" 300 "$build/$name" --seconds "$content_seconds" ;;
        gpu_graphs) run "$name" $((graphs_seconds + 90)) "$build/$name" --seconds "$graphs_seconds" ;;
        gpu_pressure) run "$name" $((pressure_seconds + 120)) "$build/$name" $((pressure_seconds / 3)) ;;
        *) run "$name" 180 "$build/$name" ;;
        esac
    done
    for name in $examples; do run "$name" 120 "$build/$name"; done
    if [ -z "$ONLY" ]; then
        run_sanitizer memcheck 2 --report-api-errors no
        run_sanitizer racecheck 1
    fi
    echo
    tests/gpu/describe.sh
    echo
    printf '%-28s %-28s %6s\n' test result seconds
    printf '%s\n' "$table"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
}

if [ -n "$OUT_LOG" ]; then
    main 2>&1 | tee "$OUT_LOG"
    exit "${PIPESTATUS[0]}"
fi
main
