#!/bin/sh
# fuzz_viewer.sh - writes snapshots with build/fuzz/snapshots, and opens changed ones in docs/viewer.html for
# FUZZ_SECONDS.
# Environment: FUZZ_SECONDS, FUZZ_FROM (the seed; the time without it), NODE, BUILD.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
node=${NODE:-node} work=${BUILD:-build}/fuzz

if ! "$node" -e 'process.exit(typeof DecompressionStream === "undefined" ? 1 : 0)' >/dev/null 2>&1; then
    echo "skipped: fuzz_viewer.js: node 18 or later is not found"
    exit
fi
rm -rf "$work/viewer" && mkdir -p "$work/viewer" || exit 1
"$work/snapshots" "$work/viewer" >/dev/null 2>&1 || exit 1
seed=${FUZZ_FROM:-$(date +%s)}
echo "fuzz_viewer.js, ${FUZZ_SECONDS:-60} s, seed $seed"
"$node" tests/fuzz/fuzz_viewer.js docs/viewer.html "$work/viewer" "${FUZZ_SECONDS:-60}" "$seed"
