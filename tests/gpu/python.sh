#!/bin/bash
# python.sh - the modules of examples/python under the packages that they serve, on a GPU: CuPy, Numba with its own
# tests, cuda.core. A package that is not installed is left out. Ends in a table and one line "N passed, M failed".
#
# Environment
#   NUMBA_TESTS    modules of numba.cuda.tests to run with and without galloc; "" for none
#   SECONDS_EACH   limit of one run (100)
#   PYTHON, CC, CUDA_HOME, BUILD

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
build=${BUILD:-build}
python=${PYTHON:-python3}
limit=${SECONDS_EACH:-100}
tests=${NUMBA_TESTS-numba.cuda.tests.cudadrv numba.cuda.tests.cudapy.test_array numba.cuda.tests.cudapy.test_atomics}
work=$build/gpu
mkdir -p "$work" && make -s "$build/libgalloc_python.so" || exit 1
export GALLOC_PYTHON_LIBRARY=$PWD/$build/libgalloc_python.so PYTHONPATH=$PWD/examples/python${PYTHONPATH:+:$PYTHONPATH}
passed=0 failed=0 table=

row() { table="$table$(printf '%-34s %s' "$1" "$2")"$'\n'; }

has() { "$python" -c "import $1" >/dev/null 2>&1; }

# Does Numba itself compile and run a kernel? Some releases of it do not work with some of NumPy.
numba_works() {
    NUMBA_CUDA_MEMORY_MANAGER= "$python" -c "
from numba import cuda
cuda.jit(lambda a: None)[1, 1](cuda.device_array(1))" >/dev/null 2>&1
}

# A program of python_programs.py: its last line is its result.
program() { # name, package
    if ! has "$2"; then row "$1" "left out: no $2"; return; fi
    if [ "$1" = numba ] && ! numba_works; then row numba "left out: Numba fails without galloc, too"; return; fi
    if timeout "$limit" "$python" tests/gpu/python_programs.py "$1" >"$work/python.out" 2>&1; then
        passed=$((passed + 1))
        row "$1" "$(tail -n 1 "$work/python.out")"
    else
        failed=$((failed + 1))
        row "$1" FAILED
        tail -n 15 "$work/python.out"
    fi
}

# Numba's own tests; those that fail with galloc and pass without it are named.
numba() { # module
    for manager in "" galloc_numba; do
        NUMBA_CUDA_MEMORY_MANAGER=$manager timeout "$limit" "$python" -m numba.runtests -v "$1" \
            >"$work/numba.$manager" 2>&1
        grep -E ' \.\.\. (FAIL|ERROR)$' "$work/numba.$manager" | sort >"$work/numba.$manager.failed"
        row "$1 ${manager:-numba}" "$(grep -E '^Ran ' "$work/numba.$manager"), $(tail -n 1 "$work/numba.$manager")"
    done
    grep -q '^Ran [1-9]' "$work/numba." || { row "$1" "left out: these tests do not run without galloc"; return; }
    comm -13 "$work/numba..failed" "$work/numba.galloc_numba.failed" >"$work/numba.new"
    if [ -s "$work/numba.new" ] || ! grep -q '^Ran [1-9]' "$work/numba.galloc_numba"; then
        failed=$((failed + 1))
        cat "$work/numba.new"
    else
        passed=$((passed + 1))
    fi
}

for name in cupy cupy_streams cupy_exhaust; do program $name cupy; done
[ "$(nvidia-smi -L | grep -c '^GPU')" -lt 2 ] || program cupy_devices cupy
program numba numba.cuda
program cuda_core cuda.core
has numba.cuda && numba_works && for module in $tests; do numba "$module"; done

echo
printf '%s' "$table"
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
