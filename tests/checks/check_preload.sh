#!/bin/sh
# check_preload.sh - examples/preload under programs that do not know galloc, on the simulated device: a libcuda.so.1
# made of it, the library in LD_PRELOAD, and a program that finds the driver as the CUDA runtime does. Each test runs in
# a process of its own. Environment: CC, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work="$PWD/${BUILD:-build}/check_preload with blanks" # as galloc's own path may have them
flags="-std=gnu11 -g -I. -Itests/sim -Itests/support -isystem tests/sim/include"

. tests/support/verdicts.sh
unset GALLOC_CONF GALLOC_PRELOAD_FREE GALLOC_PRELOAD_REPORT LD_PRELOAD

# The same flags for the library as the Makefile's, all warnings are errors, and nothing may be missing: it needs no
# library of CUDA. The driver binds its own calls to itself, as NVIDIA's does. --disable-new-dtags: the run path comes
# before LD_LIBRARY_PATH, which leads to NVIDIA's driver in its containers.
# shellcheck disable=SC2086
"$cc" $flags -Wall -Wextra -Wshadow -Werror -fPIC -shared -fvisibility=hidden -Wl,-z,defs \
    examples/preload/galloc_preload.c -o "$work/libgalloc_preload.so" -lpthread -ldl &&
    "$cc" $flags -std=c11 -w -fPIC -shared -Wl,-Bsymbolic -Wl,-soname,libcuda.so.1 tests/sim/*.c \
        tests/plugin/preload_driver.c -o "$work/libcuda.so.1" -lpthread -lm &&
    "$cc" $flags -Wall -Wextra tests/plugin/preload_host.c "$work/libcuda.so.1" -o "$work/host" -lpthread -ldl \
        -Wl,--disable-new-dtags "-Wl,-rpath,$work" &&
    "$cc" -fPIC -shared tests/plugin/preload_next.c -o "$work/next_1.so" -ldl &&
    cp "$work/next_1.so" "$work/next_2.so" || exit 1
cd "$work" || exit 1 # the names in LD_PRELOAD cannot have blanks
preload="./libgalloc_preload.so ./next_1.so ./next_2.so"

runs() { # test, settings of the environment...
    name=$1
    shift
    env LD_PRELOAD="$preload" "$@" timeout 120 "$work/host" "$name" >"$work/out" 2>&1 &&
        [ "$(tail -n 1 "$work/out")" = "1 passed, 0 failed" ]
    verdict $? "$name $*"
}

for name in $("$work/host" --list); do
    case $name in
    free_on_request_*) runs "$name" GALLOC_PRELOAD_FREE=async ;;
    *) runs "$name" WAY=look_up ;;
    esac
done
for name in serves_alloc_and_free serves_stream_ordered_memory per_thread_streams captured_streams pools threads; do
    for way in dlsym linked; do runs "$name" "WAY=$way"; done
done
runs threads GALLOC_PRELOAD_FREE=async
for name in $("$work/host" --list | grep cop); do runs "$name" WAY=look_up GALLOC_CONF=backend:cudaMallocAsync; done

# What the library says at the end, and only on request.
env LD_PRELOAD="$preload" GALLOC_PRELOAD_REPORT=1 "$work/host" report >"$work/out" 2>&1
line='device 0: 2 allocations and 2 frees took [1-9][0-9]* driver calls; held [0-9.]* MiB at most'
[ "$(grep -c "$line" "$work/out")" = 1 ]
verdict $? "a line at the end on request"
env LD_PRELOAD="$preload" GALLOC_PRELOAD_REPORT=1 "$work/host" pool_high >"$work/out" 2>&1
grep -q 'device 0: 2 allocations and 2 frees took [1-9][0-9]* driver calls; held 10[0-9.]* MiB at most' "$work/out"
verdict $? "the program's reset of a peak leaves that line alone"
env LD_PRELOAD="$preload" "$work/host" report >"$work/out" 2>&1
! grep -q galloc_preload "$work/out"
verdict $? "no line without a request"
env LD_PRELOAD="$preload" GALLOC_PRELOAD_FREE=Async GALLOC_PRELOAD_REPORT=0 "$work/host" report >"$work/out" 2>&1
[ "$(grep galloc_preload "$work/out")" = "galloc_preload: GALLOC_PRELOAD_FREE=Async has no effect: its value is async" ]
verdict $? "a line for a value that is none"

# What galloc says of its settings, each line once; but one line alone where it cannot serve.
env LD_PRELOAD="$preload" GALLOC_CONF="trace:$work/nowhere/trace,reuse:none,wait_limit_ms:5,max_split_size:40M" \
    "$work/host" report >"$work/out" 2>&1
[ "$(grep -c '^galloc: .*trace.*nowhere' "$work/out")" = 1 ] &&
    [ "$(grep -c '^galloc: .*max_split_size' "$work/out")" = 1 ]
verdict $? "settings without effect are named"
env LD_PRELOAD="$preload" GALLOC_CONF="memory_limit:none_at_all" "$work/host" report >"$work/out" 2>&1
! grep '^galloc: ' "$work/out" && [ "$(grep -c '^galloc_preload: device 0 is left to CUDA' "$work/out")" = 1 ]
verdict $? "one line where it cannot serve"

# Programs that have nothing to do with CUDA.
env LD_PRELOAD="$preload" GALLOC_PRELOAD_REPORT=1 sh -c 'ls -d / && cat /dev/null' >"$work/out" 2>&1 &&
    ! grep -q galloc "$work/out"
verdict $? "other programs notice nothing"

# It exports what it replaces and nothing else: no name of the runtime, which the program may have in a library.
nm -D --defined-only "$work/libgalloc_preload.so" | sed 's/.* //' | grep -v '^cu[A-Z]' >"$work/out"
[ "$(cat "$work/out")" = dlsym ] && ! nm -D "$work/libgalloc_preload.so" | grep -q ' [TU] cuda'
verdict $? "it exports only substitutes"

count_verdicts
