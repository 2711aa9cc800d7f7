#!/bin/sh
# device.sh FOLDER - prints a folder with the objects of the simulated device: those that `make` has built, where they
# are as new as their sources, else compiled into FOLDER.
# Environment: CC, BUILD, INCLUDE (other headers of CUDA than the bundled ones).

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
built=${BUILD:-build}/bundled/sim
fresh=1
[ -z "$INCLUDE" ] || fresh=
for file in tests/sim/*.c; do
    object=$built/$(basename "$file" .c).o
    [ "$fresh" ] && [ -e "$object" ] && [ -z "$(find tests/sim -newer "$object" -name '*.[ch]')" ] || fresh=
done
[ -z "$fresh" ] || { echo "$built" && exit; }
mkdir -p "$1" || exit 1
for file in tests/sim/*.c; do
    "${CC:-gcc}" -std=c11 -O1 -w -Itests/sim -isystem "${INCLUDE:-tests/sim/include}" -c "$file" \
        -o "$1/$(basename "$file" .c).o" || exit 1
done
echo "$1"
