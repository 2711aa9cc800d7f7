#!/bin/bash
# sanitizer.sh - does compute-sanitizer, told by GALLOC_NVTX, find mistakes inside galloc's memory, and name their
# tags? Mistakes are planted, one per process, and there are programs without any. Counted is galloc as it is, whose
# segments are fixed then. Beside it, as knowledge, not counted: heaps that are ranges of mapped pages
# (GAI_NVTX_FIXED=0), frees that do not wait (GAI_NVTX_WAITS=0), and no GALLOC_NVTX. Ends in a table and one line
# "N passed, M failed". Runs go on at once, those of initcheck one by one, each with a limit of 40 seconds.
#
# Environment
#   OUT_LOG    also write everything, with all that the tool says, to this file
#   SANITIZER  compute-sanitizer
#   NVCC, ARCH, CUDA_HOME, BUILD

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
cuda=${CUDA_HOME:-/usr/local/cuda}
nvcc=${NVCC:-$(command -v nvcc || echo "$cuda/bin/nvcc")}
sanitizer=${SANITIZER:-$(PATH=$PATH:$cuda/bin:$cuda/compute-sanitizer command -v compute-sanitizer)}
work=${BUILD:-build}/gpu/sanitizer
rm -rf "$work" && mkdir -p "$work" || exit 1

# ---- building -------------------------------------------------------------------------------------------------------

defines() { # way
    case $1 in
    nvtx) echo "-DGALLOC_NVTX" ;;
    pages) echo "-DGALLOC_NVTX -DGAI_NVTX_FIXED=0" ;;
    unwaited) echo "-DGALLOC_NVTX -DGAI_NVTX_WAITS=0" ;;
    esac
}

build() { # way
    # shellcheck disable=SC2046 # several options
    "$nvcc" -O1 -lineinfo "-arch=$arch" -I. $(defines "$1") tests/gpu/sanitizer_program.cu -o "$work/$1" \
        >"$work/$1.built" 2>&1
}

# ---- running --------------------------------------------------------------------------------------------------------

# One run: its output is a file. The status says nothing: a leak makes galloc_shutdown fail.
one() { # way, tool, case
    options="--tool $2 --report-api-errors no"
    [ "$2" != memcheck ] || options="$options --leak-check full"
    # shellcheck disable=SC2086 # several options
    timeout -k 5 40 "$sanitizer" $options "$work/$1" "$3" >"$work/$1.$2.$3" 2>&1
    echo "exit status $?" >>"$work/$1.$2.$3"
}

errors() { # file: the number of errors that the tool counts; nothing if it did not come so far
    sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p' "$1" | head -n 1
}

# What was found, and was it to be found? Each way but the first may be wrong. A leak must be named by its tag, since
# galloc's segments are left as well then.
judge() { # way, tool, case
    file=$work/$1.$2.$3
    count=$(errors "$file") named="not named" want=1
    case $3 in clean | graph | late) want=0 ;; esac
    ! grep '========' "$file" | grep -q 'kv cache\|galloc' || named="galloc or its tag is named"
    ! grep '========' "$file" | grep -q 'kv cache' || named="the tag is named"
    what="$count errors"
    [ -n "$count" ] || what="no summary"
    right=1
    [ $want -eq 0 ] && [ "$count" = 0 ] && right=0
    [ $want -eq 1 ] && [ "${count:-0}" -gt 0 ] && right=0
    [ "$3" != leak ] || { grep -q 'Leaked' "$file" && [ "$named" = "the tag is named" ]; } || right=1
    segments=$(sed -n 's/^segments: //p' "$file")
    verdict=ok
    [ $right -eq 0 ] || verdict=NOT
    printf '%-9s %-9s %-15s %-4s %-12s %-28s %s\n' "$1" "$2" "$3" "$verdict" "$what" "$named" "${segments:-?}" \
        >>"$work/table"
    [ "$1" = nvtx ] || return 0
    passed=$((passed + (right == 0))) failed=$((failed + (right != 0)))
}

memcheck="clean graph late overrun use_after_free shrunk leak"
initcheck="clean graph uninitialised"

each() { # command: for each run, with way, tool and case
    for name in $memcheck; do "$1" nvtx memcheck "$name"; done
    for name in $initcheck; do "$1" nvtx initcheck "$name"; done
    for name in $memcheck; do "$1" pages memcheck "$name"; done
    for name in $initcheck; do "$1" pages initcheck "$name"; done
    for name in late use_after_free; do "$1" unwaited memcheck "$name"; done
    for name in overrun use_after_free; do "$1" plain memcheck "$name"; done
    "$1" plain initcheck uninitialised
}

# Of two processes under initcheck at the same time one was reported for reads of what it had written.
begin_one() { [ "$2" = initcheck ] || one "$@" & }
one_by_one() { [ "$2" != initcheck ] || one "$@"; }
show() {
    echo
    echo "==== $*"
    cat "$work/$1.$2.$3"
}

main() {
    if ! nvidia-smi -L 2>/dev/null | grep -q GPU || ! command -v "$nvcc" >/dev/null || [ -z "$sanitizer" ]; then
        echo "skipped: no GPU with its driver, no nvcc, or no compute-sanitizer (SANITIZER=... names one)"
        echo "0 passed, 0 failed"
        return
    fi
    tests/gpu/describe.sh
    "$sanitizer" --version | tail -n 2
    arch=${ARCH:-sm_$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)}
    SECONDS=0
    for way in nvtx pages unwaited plain; do build $way & done
    wait
    for way in nvtx pages unwaited plain; do
        [ -x "$work/$way" ] && continue
        cat "$work/$way.built"
        echo "0 passed, 1 failed"
        return 1
    done
    echo "built in $SECONDS s"
    passed=0 failed=0
    each begin_one
    each one_by_one
    wait
    each judge
    each show
    echo
    echo "way       tool      case            ok?  found        names                        segments"
    cat "$work/table"
    echo "$SECONDS s"
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
}

if [ -n "$OUT_LOG" ]; then
    main 2>&1 | tee "$OUT_LOG" | tail -n 60
    exit "${PIPESTATUS[0]}"
fi
main
