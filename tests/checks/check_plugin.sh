#!/bin/sh
# check_plugin.sh - libraries with galloc inside are loaded, used, unloaded without a word while threads live that have
# used them, and loaded again; programs free memory when all is over. Environment: CC, CXX, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} cxx=${CXX:-g++}
work=${BUILD:-build}/check_plugin
flags="-O0 -I. -Itests/sim -isystem tests/sim/include"
libs="-lpthread -lm -ldl"

. tests/support/verdicts.sh

device=$(tests/support/device.sh "$work/sim") || exit 1

ends() { # what is wrong otherwise, command...
    what=$1
    shift
    timeout 60 "$@" >"$work/out" 2>&1
    status=$?
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $what: status $status: $*"
        head -20 "$work/out"
    fi
}

# The simulated device is the host's: it stays, as a driver would.
"$cc" -std=gnu11 $flags -rdynamic tests/plugin/host.c "$device"/*.o -o "$work/host" $libs || exit 1
"$cc" -std=c99 -Wall -Wextra $flags -fPIC -shared tests/plugin/plugin.c -o "$work/plugin.so" -lpthread || exit 1

ends "unloaded without a word" "$work/host" "$work/plugin.so"
ends "unloaded after galloc_shutdown" "$work/host" "$work/plugin.so" end
ends "unloaded while a thread ends" "$work/host" "$work/plugin.so" ending
ends "unloaded after galloc_shutdown, while a thread ends" "$work/host" "$work/plugin.so" end ending

if command -v "$cxx" >/dev/null 2>&1; then
    "$cxx" -std=c++11 -Wall -Wextra $flags -fPIC -shared -x c++ tests/plugin/plugin.c -o "$work/plugin++.so" \
        -lpthread || exit 1
    "$cxx" -std=c++11 -Wall -Wextra -Wno-unused-function $flags tests/plugin/exit.cpp "$device"/*.o \
        -o "$work/exit" $libs || exit 1
    ends "unloaded without a word, C++" "$work/host" "$work/plugin++.so"
    ends "unloaded after galloc_shutdown, C++" "$work/host" "$work/plugin++.so" end
    ends "memory that is freed at the end" "$work/exit"
    ends "memory that is freed after the driver's end" "$work/exit" gone
else
    echo "skipped: C++: $cxx is not found. On Debian: apt install g++"
fi

count_verdicts
