#!/bin/sh
# check_compile.sh - galloc.h in every language and standard that it promises, with every compiler that is found,
# against the bundled and the toolkit's headers, without a warning; and a program of several files that runs. A toolkit
# before 12.0 is left out.
# Environment: CC, CXX, CLANG, CLANGXX, NVCC, CUDA_HOME, BUILD (a folder to work in), GRID (set: also the standards
# between the oldest and the newest, all of it with the toolkit's headers, and every compiler at every level of
# optimisation, since warnings differ; some minutes).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} cxx=${CXX:-g++} clang=${CLANG:-clang} clangxx=${CLANGXX:-clang++}
cuda=${CUDA_HOME:-/usr/local/cuda}
nvcc=${NVCC-$cuda/bin/nvcc}
work=${BUILD:-build}/check_compile
parts=tests/compile
include="-I. -I$parts -isystem tests/sim"

strict_cpp='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual -Werror'
strict_c="$strict_cpp -Wstrict-prototypes -Wmissing-prototypes"

rm -rf "$work" && mkdir -p "$work" || exit 1

# A command is right when it succeeds and says nothing.
check() {
    name=$1
    shift
    if "$@" >"$work/$name.out" 2>&1 && [ ! -s "$work/$name.out" ]; then
        echo "passed $name" >>"$work/results"
    else
        echo "FAILED $name" >>"$work/results"
        echo "FAILED $name: $*"
        head -20 "$work/$name.out"
    fi
}

found() { command -v "$1" >/dev/null 2>&1; }

# Does a compiler know a standard?
speaks() { # compiler, language, standard
    echo 'int nothing;' | "$1" -std=$3 -x $2 -fsyntax-only - >/dev/null 2>&1
}

# Every file that can stand alone, by compiler and standard. Only warnings are asked for, no code.
languages() { # header set, include folder, standards of C, of C++, compilers of C, of C++
    for compiler in $5; do
        found "$compiler" || continue
        label=$1-$(basename "$compiler")
        for std in $3; do
            speaks "$compiler" c $std || continue
            check "$label-$std" "$compiler" -std=$std $strict_c -fsyntax-only $include -isystem "$2" \
                -x c $parts/main.c $parts/header.c
        done
        [ "$whole" ] || continue
        check "$label-static" "$compiler" -std=c99 $strict_c -fsyntax-only $include -isystem "$2" -x c $parts/static.c
        # Without the implementation gcc has one warning, which the manual explains.
        check "$label-static-types" "$compiler" -std=c99 $strict_c -Wno-unused-function -DGALLOC_STATIC -fsyntax-only \
            $include -isystem "$2" -x c $parts/header.c
    done
    for compiler in $6; do
        found "$compiler" || continue
        label=$1-$(basename "$compiler")
        for std in $4; do
            speaks "$compiler" c++ $std || continue
            check "$label-$std" "$compiler" -std=$std $strict_cpp -fsyntax-only $include -isystem "$2" \
                -x c++ $parts/main.c $parts/header.c $parts/typed.cpp
        done
        [ "$whole" ] || continue
        check "$label-static" "$compiler" -std=c++11 $strict_cpp -fsyntax-only $include -isystem "$2" \
            -x c++ $parts/static.c
        # What programs include, with a warning that the implementation, which is C, does not avoid.
        check "$label-public" "$compiler" -std=c++11 $strict_cpp -Wold-style-cast -fsyntax-only $include -isystem "$2" \
            -x c++ $parts/header.c $parts/typed.cpp $parts/override_typed.cpp
        check "$label-bare" "$compiler" -std=c++17 -fno-exceptions -fno-rtti $strict_cpp -fsyntax-only $include \
            -isystem "$2" -x c++ ${GRID:+$parts/main.c} $parts/all.c
        [ "$GRID$compiler" != "$clangxx" ] || continue
        check "$label-extern-c" "$compiler" -std=c++17 $strict_cpp -fsyntax-only $include -isystem "$2" \
            $parts/extern_c.cpp
    done
}

# A program of four files, its implementation compiled as C and as C++, run on the simulated device.
program() { # header set, include folder, objects of the device
    dir=$work/$1 device=$3
    mkdir -p "$dir"
    flags="$include -isystem $2"
    for file in two_heaps another_heap; do
        check "$1-$file" "$cc" -std=c99 $strict_c $flags -c $parts/$file.c -o "$dir/$file.heap"
    done
    check "$1-link-heaps" "$cc" "$device"/*.o "$dir"/*.heap -o "$dir/program_heaps" -lpthread -lm
    check "$1-run-heaps" "$dir/program_heaps"
    check "$1-use" "$cc" -std=c99 $strict_c $flags -c $parts/use.c -o "$dir/use.o"
    check "$1-per-thread" "$cc" -std=c99 $strict_c $flags -DCUDA_API_PER_THREAD_DEFAULT_STREAM -c $parts/per_thread.c \
        -o "$dir/per_thread.o"
    check "$1-main-c" "$cc" -std=c99 $strict_c $flags -c $parts/main.c -o "$dir/main_c.main"
    linked_and_run "$1" c main_c "$cc"
    check "$1-main-per-thread" "$cc" -std=c99 $strict_c $flags -DCUDA_API_PER_THREAD_DEFAULT_STREAM -c $parts/main.c \
        -o "$dir/main_per_thread.main"
    linked_and_run "$1" per-thread main_per_thread "$cc"
    if found "$cxx"; then
        check "$1-typed" "$cxx" -std=c++11 $strict_cpp $flags -c $parts/typed.cpp -o "$dir/typed.o"
        linked_and_run "$1" mixed main_c "$cxx"
        check "$1-main-cpp" "$cxx" -std=c++11 $strict_cpp $flags -x c++ -c $parts/main.c -o "$dir/main_cpp.main"
        linked_and_run "$1" cpp main_cpp "$cxx"
    fi
}

# The implementation of `main` with the other files that have been compiled by now.
linked_and_run() { # header set, name, main, compiler
    check "$1-link-$2" "$4" "$device"/*.o "$dir"/*.o "$dir/$3.main" -o "$dir/program_$2" -lpthread -lm
    check "$1-run-$2" "$dir/program_$2" $([ ! -e "$dir/typed.o" ] || echo with_cpp)
}

# GALLOC_OVERRIDE_CUDA: a program of three files that runs; and as per-thread, with a heap of its own, in a .cu file.
override() { # header set, include folder, objects of the device
    dir=$work/$1_override device=$3
    mkdir -p "$dir"
    flags="$include -isystem $2"
    log='-DGALLOC_LOG(text)=((void)(text))'
    check "$1-override-use" "$cc" -std=c99 $strict_c $flags -c $parts/override_use.c -o "$dir/use.o"
    check "$1-override-use-per-thread" "$cc" -std=c99 $strict_c $flags -DCUDA_API_PER_THREAD_DEFAULT_STREAM \
        -c $parts/override_per_thread.c -o "$dir/use_per_thread.o"
    check "$1-override-c" "$cc" -std=c99 $strict_c $flags "$log" -c $parts/override.c -o "$dir/c.main"
    check "$1-override-c-link" "$cc" "$device"/*.o "$dir"/*.o "$dir/c.main" -o "$dir/c" -lpthread -lm
    check "$1-override-c-run" "$dir/c"
    [ "$1" != bundled ] || override_libraries
    check "$1-override-per-thread" "$cc" -std=c99 $strict_c $flags -DCUDA_API_PER_THREAD_DEFAULT_STREAM -fsyntax-only \
        $parts/override_use.c
    check "$1-override-static" "$cc" -std=c99 $strict_c $flags -DGALLOC_STATIC -DGALLOC_IMPLEMENTATION -fsyntax-only \
        $parts/override_use.c
    found "$cxx" || return
    check "$1-override-typed" "$cxx" -std=c++11 $strict_cpp $flags -c $parts/override_typed.cpp -o "$dir/typed.o"
    check "$1-override-cpp" "$cxx" -std=c++11 $strict_cpp $flags "$log" -x c++ -c $parts/override.c -o "$dir/cpp.main"
    check "$1-override-cpp-link" "$cxx" "$device"/*.o "$dir"/*.o "$dir/cpp.main" -o "$dir/cpp" -lpthread -lm
    check "$1-override-cpp-run" "$dir/cpp"
}

# Two shared libraries with a heap each, whose functions are bound within the library and whose data are not.
override_libraries() {
    for name in first second; do
        check "override-$name-library" "$cc" -std=c99 $strict_c $flags -fPIC -shared -Wl,-Bsymbolic-functions \
            "-DNAME=override_$name" $parts/override_library.c -o "$dir/lib$name.so" -lpthread
    done
    check override-libraries-program "$cc" -std=c99 $strict_c -Wl,--export-dynamic $parts/override_libraries.c \
        "$device"/*.o "$dir/libfirst.so" "$dir/libsecond.so" "-Wl,-rpath,$PWD/$dir" -o "$dir/libraries" -lpthread -lm
    check override-libraries-run "$dir/libraries"
    for n in 1 2 3 4 5 6 7 8 9 10 11 12; do cp "$dir/libfirst.so" "$dir/lib$n.so"; done
    check override-unloaded-program "$cc" -std=c99 $strict_c $flags -Wl,--export-dynamic \
        $parts/override_unloaded.c "$device"/*.o -o "$dir/unloaded" -lpthread -lm -ldl
    check override-unloaded-run "$dir/unloaded" "$dir"/lib[0-9]*.so
    override_users
}

# Two libraries whose functions are bound within the library use the heap of a third one.
override_users() {
    check override-heap-library "$cc" -std=c99 $strict_c $flags -fPIC -shared -x c -DGALLOC_IMPLEMENTATION \
        galloc.h -o "$dir/libheap.so" -lpthread
    for name in first second; do
        check "override-$name-user" "$cc" -std=c99 $strict_c $flags -O1 -fPIC -shared -Wl,-Bsymbolic-functions \
            "-DNAME(f)=${name}_##f" $parts/override_user.c -o "$dir/libuser_$name.so"
    done
    check override-users-program "$cc" -std=c99 $strict_c $flags -Wl,--export-dynamic $parts/override_users.c \
        "$device"/*.o "$dir/libuser_first.so" "$dir/libuser_second.so" "$dir/libheap.so" "-Wl,-rpath,$PWD/$dir" \
        -o "$dir/users" -lpthread -lm
    check override-users-run env SIM_PACE=still "$dir/users"
}

# The opposite: the compiler refuses, and its first message has the text.
refuses() { # name, text, options
    name=$1 text=$2
    shift 2
    check "$name" sh -c '"$@" 2>&1 | grep -q "$0"' "$text" \
        "$cc" -std=c99 -fsyntax-only -Wfatal-errors $include "$@" -isystem tests/sim/include $parts/static.c
}

# GALLOC_NVTX, with NVTX's headers of the toolkit, and without.
nvtx() {
    folders=$("$cc" -E -v -x c /dev/null 2>&1 | sed -n '/^#include </,/^End/s/^ *\(\/.*\)/-isystem \1/p' |
        grep -v local)
    # shellcheck disable=SC2086 # several options
    refuses nvtx-without-headers 'GALLOC_NVTX needs nvtx3/nvToolsExtMem.h' -DGALLOC_NVTX -nostdinc $folders
    [ -f "$cuda/include/nvtx3/nvToolsExtMem.h" ] || { echo "skipped: GALLOC_NVTX, for want of nvtx3" && return; }
    headers="$include -isystem tests/sim/include -idirafter $cuda/include"
    check nvtx-c "$cc" -std=c99 $strict_c $headers -DGALLOC_NVTX -fsyntax-only $parts/main.c
    check nvtx-static "$cc" -std=c99 $strict_c $headers -DGALLOC_NVTX -fsyntax-only $parts/static.c
    found "$cxx" || return
    check nvtx-cpp "$cxx" -std=c++11 $strict_cpp $headers -DGALLOC_NVTX -fsyntax-only -x c++ $parts/main.c
}

# Programs of older toolkits, each with a runtime of another version within 12.x.
older() {
    for runtime in 12000 12040; do
        objects=
        for file in "$device"/*.o; do
            name=$(basename "$file" .o)
            case $name in sim_runtime* | sim_ptsz)
                file=$work/${name}_$runtime.o
                check "older-$name-$runtime" "$cc" -std=gnu11 -w -DCUDART_VERSION=$runtime -Itests/sim \
                    -isystem tests/sim/include -c "tests/sim/$name.c" -o "$file"
            esac
            objects="$objects $file"
        done
        toolkit=$((24040 - runtime))
        # shellcheck disable=SC2086 # several objects
        check older-$toolkit-$runtime "$cc" -std=c99 $strict_c -DCUDART_VERSION=$toolkit $include \
            -isystem tests/sim/include $parts/older.c $objects -o "$work/older_$toolkit" -lpthread -lm
        check older-run-$toolkit-$runtime "$work/older_$toolkit"
    done
}

options() {
    bundled="$include -isystem tests/sim/include"
    check optimised "$cc" -std=c11 $strict_c -O2 $bundled -c -o "$work/static.o" $parts/all.c
    set -- "$cc" -std=c99 $strict_c $bundled -fsyntax-only
    check with-assert-and-allocator "$@" -include assert.h -DGALLOC_ASSERT=assert -include stdlib.h \
        -DGALLOC_MALLOC=malloc -DGALLOC_FREE=free $parts/main.c
    check with-statements-as-macros "$@" -include stdlib.h '-DGALLOC_ASSERT(c)=do { if (!(c)) abort(); } while (0)' \
        -DGALLOC_MALLOC=malloc '-DGALLOC_FREE(p)=do { free(p); } while (0)' $parts/main.c
    check with-the-macros-of-windows "$@" -Dnear= -Dfar= -Dsmall=char -Dinterface=struct $parts/main.c
    check oldest-toolkit "$@" -DCUDART_VERSION=12000 $parts/main.c
    check toolkit-12-5 "$@" -DCUDART_VERSION=12050 $parts/main.c
    nvtx
    refuses half-an-allocator 'define GALLOC_MALLOC and GALLOC_FREE together' -DGALLOC_MALLOC=malloc
    printf '#include <stdint.h>\n#undef UINTPTR_MAX\n#define UINTPTR_MAX 0xffffffffu\n' >"$work/narrow.h"
    refuses 32-bits 'needs 64-bit addresses' -include "$work/narrow.h"
    refuses too-old-a-toolkit 'needs the CUDA Toolkit 12.0' -DCUDART_VERSION=11080
    if found "$nvcc"; then
        check nvcc "$nvcc" -std=c++17 -I. -Xcompiler -Wall,-Wextra -c $parts/device.cu -o "$work/device.o"
        check nvcc-override "$nvcc" -x cu -std=c++17 -I. -I$parts -Xcompiler -Wall,-Wextra \
            -c $parts/override_typed.cpp -o "$work/override.o"
    fi
}

# What an optimiser sees: a compiler at each level, with the functions exported, or static and all of them or two used.
grid_of() { # compiler
    compiler=$1 language=c std=c99 strict=$strict_c
    case $compiler in *++*) language=c++ std=c++11 strict="$strict_cpp -fno-exceptions -fno-rtti" ;; esac
    for level in -O0 -O1 -O2 -O3 -Os '-O2 -flto'; do
        for file in $parts/main.c $parts/all.c "$work/two.c"; do
            cell=$(basename "$compiler")$(echo "$level" | tr -d ' ')-$(basename "$file" .c)
            check "grid-$cell" "$compiler" -std=$std $strict $level $include -isystem tests/sim/include \
                -c -o "$work/grid-$cell.o" -x $language "$file"
            # With -flto=1 the linker warns that it works alone.
            [ "$compiler$level" = "$cc-O2 -flto" ] && [ "$file" != $parts/main.c ] || continue
            check "link-$cell" "$cc" -Wall -O2 -flto=2 "$work/grid-$cell.o" "$device"/*.o \
                -o "$work/$cell" -lpthread -lm
        done
    done
}

grid() {
    printf '%s\n' '#define GALLOC_STATIC' '#define GALLOC_IMPLEMENTATION' '#include "galloc.h"' 'int main(void) {' \
        '    void *p;' '    return galloc_malloc(&p, 1, 0) != cudaSuccess || galloc_free(p, 0) != cudaSuccess;' '}' \
        >"$work/two.c"
    for compiler in "$cc" "$cxx" "$clang" "$clangxx"; do
        if found "$compiler"; then grid_of "$compiler" & fi
    done
    wait
}

# Side by side: a check's outcome is a line of the file `results`.
if [ -n "$GRID" ]; then
    standards='c99 c11 c17 c2x' cpp_standards='c++11 c++14 c++17 c++20 c++2b'
else
    standards='c99 c2x' cpp_standards='c++11 c++2b'
fi
device=$(tests/support/device.sh "$work/sim") || exit 1
whole=1
languages bundled tests/sim/include "$standards" "$cpp_standards" "$cc $clang" "$cxx $clangxx" &
program bundled tests/sim/include "$device" &
override bundled tests/sim/include "$device" &
if [ -f "$cuda/include/cuda_runtime_api.h" ]; then
    toolkit=$cuda/include
    # Where Debian has it: the compilers look there by themselves, and g++ finds nothing when it is told to as well.
    [ ! "$toolkit" -ef /usr/include ] || toolkit=$parts
    if [ -n "$GRID" ]; then
        languages toolkit "$toolkit" c99 c++17 "$cc $clang" "$cxx $clangxx" &
        toolkit_device=$(INCLUDE=$toolkit tests/support/device.sh "$work/toolkit_sim")
        program toolkit "$toolkit" "$toolkit_device" &
        override toolkit "$toolkit" "$toolkit_device" &
    else
        whole=
        languages toolkit "$toolkit" c99 c++17 "$cc" "$cxx" &
    fi
fi
options &
older &
wait

# A toolkit that is too old for galloc is as none to `make test`, which needs none.
old=$work/old
mkdir -p "$old/include" "$old/bin"
echo '#define CUDART_VERSION  11080' >"$old/include/cuda_runtime_api.h"
printf '#!/bin/sh\nexit 1\n' >"$old/bin/nvcc"
chmod +x "$old/bin/nvcc"
env -u MAKEFLAGS -u MAKELEVEL -u NVCC make -n CUDA_HOME="$PWD/$old" test >"$old/steps" 2>&1
# shellcheck disable=SC2016 # the inner shell's
check old-toolkit sh -c 'grep -q build/bundled/test_api "$0" && ! grep -v "left out" "$0" |
    grep -E "check_compile/old/|build/toolkit/"' "$old/steps"

[ -z "$GRID" ] || grid
passed=$(grep -c '^passed' "$work/results") failed=$(grep -c '^FAILED' "$work/results")
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
