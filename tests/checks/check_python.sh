#!/bin/sh
# check_python.sh - the modules of examples/python on the simulated device, with stand-ins for the packages that they
# serve. Environment: CC, BUILD (a folder to work in).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
work=${BUILD:-build}/check_python

command -v python3 >/dev/null 2>&1 || {
    echo "skipped: python3 is not found"
    echo "0 passed, 0 failed"
    exit 0
}
rm -rf "$work" && mkdir -p "$work" || exit 1
cp examples/python/*.py "$work"
# The same flags as the Makefile's, and all warnings are errors.
"${CC:-gcc}" -std=gnu11 -g -Wall -Wextra -Wshadow -Werror -fPIC -I. -isystem tests/sim/include \
    -c examples/python/galloc_python.c -o "$work/galloc_python.o" || exit 1
"${CC:-gcc}" -std=gnu11 -O1 -w -fPIC -shared -Itests/sim -isystem tests/sim/include tests/sim/*.c \
    "$work/galloc_python.o" -o "$work/libgalloc_python.so" -lpthread -lm -ldl || exit 1
SIM_DEVICES=2 timeout 120 python3 tests/plugin/python_modules.py "$work"
