#!/bin/sh
# mutants.sh [NAME...] - breaks galloc.h on purpose, one way after the other, and sees to it that the tests notice.
#
# A mutant is a file tests/mutants/NAME.txt: what it breaks, in lines that begin with '#'; a line `tests: PROGRAM[:TEST]
# ...` with the programs, and perhaps the tests, one of which must notice, or a line `each: ...`, all of which must; a
# line `--- old`, the lines to replace, exactly as they stand once in galloc.h; a line `--- new`, what to put there;
# perhaps more such pairs; and a line `---` at the end. A program notices when it fails, crashes or does not end.
# With a line `tsan: ...` in place of `tests: ...` the programs are built with ThreadSanitizer, for breaks of the order
# in which memory is written; such mutants are skipped where the compiler, or the machine, cannot do that.
# For each mutant tests/inside.c is compiled once. Programs are compiled once for all mutants and linked with it, except
# those that include it.
# Environment: CC, BUILD (a folder to work in), CUDA_INCLUDE (headers to use), JOBS (how many at once), SECONDS_EACH,
# PART (of all: 2/4 is the second of every four).

cd "$(dirname "$0")/.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/mutants
include=${CUDA_INCLUDE:-tests/sim/include}
jobs=${JOBS:-2}
seconds=${SECONDS_EACH:-60}
flags="-std=c11 -O0 -w"

tsan="-g -fsanitize=thread"

rm -rf "$work/tests" "$work/tests_tsan"
mkdir -p "$work/sim" "$work/sim_tsan" "$work/tests" "$work/tests_tsan" || exit 1

is_whole() { grep -q '^#include "inside.c"' "tests/$1.c"; } # the program has a galloc of its own

# Compiles a file of tests/ with the folder's galloc.h.
compile() { # folder, file, flags, more of what the compiler is told
    "$cc" $flags $3 -I"$1" -Itests -Itests/sim -isystem "$include" "tests/$2.c" $4
}

declarations() { sed '/^\/\* ==== IMPLEMENTATION/q' "$1/galloc.h"; }

# Makes a program with the folder's galloc.h.
build() { # folder, program, flags, and for ThreadSanitizer: _tsan
    if is_whole "$2"; then
        compile "$1" "$2" "$3" "$work/sim$4/*.o -o $1/$2 -lpthread -lm"
        return
    fi
    object=$work/tests$4/$2.o
    if [ "$(declarations "$1")" != "$(declarations .)" ]; then
        object=$1/$2.o
        compile "$1" "$2" "$3" "-c -o $object" || return
    fi
    [ -e "$1/inside.o" ] || compile "$1" inside "$3" "-c -o $1/inside.o" || return
    "$cc" $3 "$object" "$1/inside.o" "$work/sim$4"/*.o -o "$1/$2" -lpthread -lm
}

# Compiles and runs PROGRAM[:TEST]; the status is 0 when it fails, as it should, and says why.
fails() { # folder, test, and for ThreadSanitizer: tsan
    program=${2%%:*} filter= options=
    case $2 in *:*) filter=${2#*:} ;; esac
    [ "$3" ] && options=$tsan
    if [ ! -x "$1/$program" ]; then
        build "$1" "$program" "$options" "${3:+_$3}" >"$1/$program.out" 2>&1 || {
            echo "does not compile"
            return 2
        }
    fi
    TSAN_OPTIONS=halt_on_error=1 timeout "$seconds" "$1/$program" $filter >"$1/$program.out" 2>&1
    status=$?
    case $status in
    0) return 1 ;;
    2) echo "no such test: $2" && return 2 ;;
    esac
    grep -m 1 '^FAILED' "$1/$program.out" ||
        sed -n 's/^WARNING: \(ThreadSanitizer: [a-z ]*\) (.*/\1/p' "$1/$program.out" | grep . || echo "status $status"
}

# Can the compiler build programs for ThreadSanitizer, and do they run here?
has_tsan() {
    echo 'int main(void) { return 0; }' >"$work/tsan.c"
    "$cc" $tsan "$work/tsan.c" -o "$work/tsan" >"$work/tsan.out" 2>&1 && "$work/tsan" >"$work/tsan.out" 2>&1
}

objects() { # folder, flags
    for file in tests/sim/*.c; do
        "$cc" -std=c11 -O2 -w $2 -Itests/sim -isystem "$include" -c "$file" -o "$1/$(basename "$file" .c).o" &
    done
    wait
}

# The programs that mutants name, each once.
programs() { # what the line begins with: tests, each or tsan; mutants...
    key=$1
    shift
    (cd tests/mutants && printf '%s.txt\n' "$@" | xargs sed -n "s/^\($key\): *//p") | tr ' ' '\n' | sed 's/:.*//' |
        sort -u
}

# Compiles those that need it once only, `jobs` at a time.
compile_programs() { # folder, flags, programs...
    folder=$1 options=$2 running=0
    shift 2
    for program in "$@"; do
        is_whole "$program" && continue
        compile . "$program" "$options" "-c -o $folder/$program.o" &
        running=$((running + 1))
        [ $running -lt "$jobs" ] || { wait; running=0; }
    done
    wait
}

# Do the programs notice this header? Writes what happened into the folder's file `result`.
try() { # name
    dir=$work/$1 each= threads=
    grep -q '^each:' "tests/mutants/$1.txt" && each=1
    grep -q '^tsan:' "tests/mutants/$1.txt" && threads=tsan
    [ ! "$threads" ] || [ "$can_tsan" ] || {
        echo "skipped: $cc cannot build and run programs with ThreadSanitizer here" >"$dir/result"
        return
    }
    for test in $(sed -n 's/^tests: *//p; s/^each: *//p; s/^tsan: *//p' "tests/mutants/$1.txt"); do
        why=$(fails "$dir" "$test" $threads)
        case $? in
        0) caught="caught by $test: $why" ;;
        1) caught="NOT CAUGHT${each:+ by $test}" ;;
        *) echo "$why" >"$dir/result" && return ;;
        esac
        echo "$caught" >"$dir/result"
        case $caught in
        caught*) [ $each ] || return ;;
        *) [ $each ] && return ;;
        esac
    done
}

if [ $# -eq 0 ]; then
    part=${PART:-1/1} n=0
    for file in tests/mutants/*.txt; do
        n=$((n + 1))
        [ $((n % ${part#*/})) -ne $((${part%/*} % ${part#*/})) ] || set -- "$@" "$(basename "$file" .txt)"
    done
fi

objects "$work/sim"
compile_programs "$work/tests" '' $(programs 'tests\|each' "$@")
can_tsan=
if (cd tests/mutants && printf '%s.txt\n' "$@" | xargs grep -q '^tsan:') && has_tsan; then
    can_tsan=1
    objects "$work/sim_tsan" "$tsan"
    compile_programs "$work/tests_tsan" "$tsan" $(programs tsan "$@")
fi

passed=0 failed=0 skipped=0 running=0
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
    skipped*) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    printf '%-40s %s\n' "$name" "$result"
done
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
