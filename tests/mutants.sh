#!/bin/sh
# mutants.sh [NAME...] - breaks galloc.h on purpose, one way after the other, and sees to it that the tests notice. A
# NAME is that of a mutant, alone or with its folder, or of a folder of tests/mutants; without any it tries all of them.
# Each has a line when it is done; those that the tests did not notice are named again at the end. Their form:
# tests/mutants/README.md. `mutants.sh --list [NAME...]` only says which mutants that means.
#
# A program notices when it fails or crashes, or does not end where the mutant says so. For each mutant
# tests/support/inside.c is compiled once. Programs are compiled once for all mutants and linked with it, except those
# that include it.
# Environment: CC, BUILD (a folder to work in), CUDA_INCLUDE (headers to use), JOBS (how many at once; all processors),
# SECONDS_EACH, PART (of all, sorted by name: 2/4 is the second of every four).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/mutants
include=${CUDA_INCLUDE:-tests/sim/include}
jobs=${JOBS:-$(getconf _NPROCESSORS_ONLN)}
seconds=${SECONDS_EACH:-60}
flags="-std=c11 -O0 -w"
tsan="-g -fsanitize=thread -fno-builtin-memcpy -fno-builtin-memmove -fno-builtin-memset -fno-builtin-memcmp"

# ---- files ----------------------------------------------------------------------------------------------------------

mutants() { # folder
    find "$1" -name '*.txt' | sed 's|.*/||; s|\.txt$||' | LC_ALL=C sort
}

named() { # folder, mutant, folder/mutant, or the path of one of these: the mutants that it means
    name=${1#tests/mutants/} name=${name%.txt} name=${name%/}
    if [ -d "tests/mutants/$name" ]; then
        mutants "tests/mutants/$name"
    elif [ -e "tests/mutants/$name.txt" ]; then
        basename "$name"
    else
        echo "$name"
    fi
}

file_of() { find tests/mutants -name "$1.txt"; } # mutant
source_of() { ls tests/*/"$1.c"; }               # program

is_whole() { grep -q '^#include "inside.c"' "$(source_of "$1")"; } # the program has a galloc of its own

declarations() { sed '/^\/\* ==== IMPLEMENTATION/q' "$1/galloc.h"; }

# The programs that mutants name, each once.
programs() { # what the line begins with: tests, each or tsan; files of mutants...
    key=$1
    shift
    sed -n "s/^\($key\): *//p" "$@" | tr ' ' '\n' | sed 's/:.*//' | sort -u
}

# ---- building -------------------------------------------------------------------------------------------------------

# Compiles a program with the folder's galloc.h.
compile() { # folder, program, flags, more of what the compiler is told
    "$cc" $flags $3 -I"$1" -Itests/support -Itests/sim -isystem "$include" \
        -idirafter "${CUDA_HOME:-/usr/local/cuda}/include" "$(source_of "$2")" $4
}

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
    if [ ! -e "$1/inside.o" ]; then
        mkdir -p "$1/held" && awk -f tests/support/held.awk "$1/galloc.h" >"$1/held/galloc.h" &&
            compile "$1/held" inside "$3" "-c -o $1/inside.o" || return
    fi
    "$cc" $3 "$object" "$1/inside.o" "$work/sim$4"/*.o -o "$1/$2" -lpthread -lm -rdynamic
}

# Can the compiler build programs for ThreadSanitizer, and do they run here?
has_tsan() {
    echo 'int main(void) { return 0; }' >"$work/tsan.c"
    "$cc" $tsan "$work/tsan.c" -o "$work/tsan" >"$work/tsan.out" 2>&1 && "$work/tsan" >"$work/tsan.out" 2>&1
}

# ---- one mutant -----------------------------------------------------------------------------------------------------

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
    limit=$seconds
    [ ! "$hangs" ] || limit=$((seconds / 3))
    TSAN_OPTIONS=halt_on_error=1 timeout "$limit" "$1/$program" $filter >"$1/$program.out" 2>&1
    status=$?
    case $status in
    0)
        grep '^skipped: ' "$1/$program.out" && return 2
        return 1
        ;;
    2) echo "no such test: $2" && return 2 ;;
    124)
        [ ! "$hangs" ] || { echo "does not end" && return 0; }
        grep -q '^FAILED' "$1/$program.out" || { echo "$2 did not end within $limit s" && return 2; }
        ;;
    esac
    grep -m 1 '^FAILED' "$1/$program.out" ||
        sed -n 's/^WARNING: \(ThreadSanitizer: [a-z ]*\) (.*/\1/p' "$1/$program.out" | grep . || echo "status $status"
}

# Do the programs notice this mutant? Says what happened.
try() { # name
    dir=$work/$1 file=$(file_of "$1") each= threads= caught= hangs=
    grep -q '^hangs:' "$file" && hangs=1
    grep -q '^each:' "$file" && each=1
    grep -q '^tsan:' "$file" && threads=tsan
    [ ! "$threads" ] || [ -e "$work/can_tsan" ] || {
        echo "skipped: $cc cannot build and run programs with ThreadSanitizer here"
        return
    }
    for test in $(sed -n 's/^tests: *//p; s/^each: *//p; s/^tsan: *//p; s/^hangs: *//p' "$file"); do
        why=$(fails "$dir" "$test" $threads)
        case $? in
        0) caught="caught by $test: $why" ;;
        1) caught="NOT CAUGHT${each:+ by $test}" ;;
        *) caught=$why && break ;;
        esac
        case $caught in
        caught*) [ $each ] || break ;;
        *) [ $each ] && break ;;
        esac
    done
    echo "$caught"
}

# ---- all of them ----------------------------------------------------------------------------------------------------

# This script calls itself for what goes on side by side: `jobs` at a time, the next one when any of them has ended.
side_by_side() { xargs -r -P "$jobs" -n 1 tests/mutants.sh "$@"; }

case $1 in
--device | --device_tsan)
    options= folder=$work/sim${1#--device}
    [ "$1" = --device ] || options=$tsan
    exec "$cc" -std=c11 -O2 -w $options -Itests/sim -isystem "$include" -c "$2" -o "$folder/$(basename "$2" .c).o"
    ;;
--program | --program_tsan)
    options= folder=$work/tests${1#--program}
    [ "$1" = --program ] || options=$tsan
    is_whole "$2" || compile . "$2" "$options" "-c -o $folder/$2.o"
    exit
    ;;
--try)
    begin=$(date +%s)
    try "$2" >"$work/$2/result"
    printf '%-40s %s, %d s\n' "$2" "$(cat "$work/$2/result")" $(($(date +%s) - begin))
    exit 0
    ;;
esac

list=
[ "$1" != --list ] || { list=1 && shift; }
if [ $# -eq 0 ]; then
    part=${PART:-1/1}
    set -- $(mutants tests/mutants | awk -v k="${part%/*}" -v n="${part#*/}" 'NR % n == k % n')
else
    set -- $(for name in "$@"; do named "$name"; done)
fi

[ ! "$list" ] || { printf '%s\n' "$@" && exit; }

rm -rf "$work"
mkdir -p "$work/sim" "$work/sim_tsan" "$work/tests" "$work/tests_tsan" || exit 1

echo "$# mutants, $jobs at a time; first the programs are compiled"
files= unfit=
for name in "$@"; do
    files="$files $(file_of "$name")"
    mkdir -p "$work/$name" && tests/mutate.sh "$name" "$work/$name/galloc.h" || unfit=1
done
[ ! "$unfit" ] || exit 1
ls tests/sim/*.c | side_by_side --device
programs 'tests\|each\|hangs' $files | side_by_side --program
if grep -q '^tsan:' $files && has_tsan; then
    touch "$work/can_tsan"
    ls tests/sim/*.c | side_by_side --device_tsan
    programs tsan $files | side_by_side --program_tsan
fi

all=$#
printf '%s\n' "$@" | side_by_side --try | {
    n=0
    while read -r line; do
        n=$((n + 1))
        printf '[%d/%d] %s\n' $n "$all" "$line"
    done
}

passed=0 failed=0 skipped=0
for name in "$@"; do
    result=$(cat "$work/$name/result")
    case $result in
    caught*) passed=$((passed + 1)) ;;
    skipped*) skipped=$((skipped + 1)) ;;
    *)
        failed=$((failed + 1))
        echo "failed: $name: ${result:-no result}"
        ;;
    esac
done
[ $skipped -eq 0 ] || echo "$skipped skipped"
echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $((passed + skipped)) -gt 0 ]
