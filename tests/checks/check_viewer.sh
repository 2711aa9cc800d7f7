#!/bin/sh
# check_viewer.sh - docs/viewer.html: what it reads and adds up is what the counters say, in each format; hostile files
# end in words; in a browser the page shows the same, runs nothing of a file and asks no host for anything.
# Environment: CC, BUILD (a folder to work in), NODE, CHROMIUM (a headless browser; without one that part is skipped).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} node=${NODE:-node}
work=${BUILD:-build}/check_viewer
viewer=docs/viewer.html
passed=0 failed=0

rm -rf "$work" && mkdir -p "$work" || exit 1

verdict() { # 0 when it holds, what does, file that says more
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED $2"
        [ -z "$3" ] || head -20 "$3"
    fi
}

# ---- the file -------------------------------------------------------------------------------------------------------

[ "$(wc -c <$viewer)" -lt 150000 ]
verdict $? "$viewer has 150 KB or more"
grep -nE -e 'https?://|innerHTML|outerHTML|insertAdjacent|document\.write|[^a-z]eval\(|new Function' \
    -e 'XMLHttpRequest|fetch\(|WebSocket|importScripts|import\(' $viewer >"$work/out"
[ ! -s "$work/out" ]
verdict $? "$viewer makes HTML or code of data, or asks a host:" "$work/out"
[ "$(grep -c '<script' $viewer)" = 1 ]
verdict $? "$viewer has more than one script"

# ---- snapshots, and the tool that puts one into the page ------------------------------------------------------------

sim=$(tests/support/device.sh "$work/sim") || exit 1
"$cc" -std=c11 -O1 -Wall -Wextra -I. -Itests/sim -isystem tests/sim/include tests/checks/snapshots.c "$sim"/*.o \
    -o "$work/snapshots" -lpthread -lm >"$work/out" 2>&1 && "$work/snapshots" "$work" >"$work/counters" 2>"$work/out"
verdict $? "snapshots.c does not compile and run:" "$work/out"
for file in "$work"/*.json "$work"/*.pickle; do gzip -c "$file" >"$file.gz"; done

# A string that would end a script, and one that would end an attribute, as a file's name.
sed 's|"version":"[^"]*"|"version":"</script><script>document.title=\\"broken\\"</script><img src=x onerror=a()>"|' \
    "$work/many.json" >"$work/hostile.json"
grep -q '</script>' "$work/hostile.json"
verdict $? "the hostile snapshot is none"
cp "$work/hostile.json" "$work/\"><script>document.title=1<"
for name in many hostile; do bench/galloc-view.sh "$work/$name.json" >"$work/$name.html" || failed=$((failed + 1)); done
bench/galloc-view.sh "$work/\"><script>document.title=1<" >"$work/name.html"
for name in many hostile name; do
    [ "$(grep -c '<script' "$work/$name.html")" = 2 ] && [ "$(grep -c '</script>' "$work/$name.html")" = 2 ]
    verdict $? "a snapshot becomes part of the page: $work/$name.html"
done
bench/galloc-view.sh "$work/nothing" >"$work/out" 2>&1
[ $? -eq 2 ]
verdict $? "galloc-view.sh takes a file that is not there"

# ---- reading and adding up, without a page --------------------------------------------------------------------------

if command -v "$node" >/dev/null 2>&1 &&
    "$node" -e 'process.exit(typeof DecompressionStream === "undefined" ? 1 : 0)' >/dev/null 2>&1; then
    "$node" tests/checks/viewer.js $viewer "$work" >"$work/out" 2>&1
    verdict $? "what the page reads and adds up:" "$work/out"
else
    echo "skipped: reading and adding up: node 18 or later is not found"
fi

# ---- in a browser ---------------------------------------------------------------------------------------------------

# The page after its script; what it asks for is in the log.
dumped() { # page, file
    mkdir -p "$work/home"
    HOME=$work/home timeout 60 "$CHROMIUM" --headless --no-sandbox --disable-gpu --no-first-run \
        --user-data-dir="$work/home/data" --host-resolver-rules='MAP * ~NOTFOUND' --virtual-time-budget=8000 \
        --log-net-log="$PWD/$work/net.json" --dump-dom "file://$PWD/$1" >"$2" 2>"$work/browser"
}
value() { sed -n "s/.*id=\"sum-$1\" data-value=\"\([0-9]*\)\".*/\1/p" "$work/dom"; }

if [ "$CHROMIUM" ] && [ -x "$CHROMIUM" ]; then
    read -r _ live reserved blocks graphs <<END
$(grep '^many ' "$work/counters")
END
    for name in many hostile name; do
        dumped "$work/$name.html" "$work/dom"
        [ "$(value live) $(value reserved) $(value blocks) $(value graphs)" = "$live $reserved $blocks $graphs" ]
        verdict $? "in the browser $name has other sums than $live $reserved $blocks $graphs" "$work/browser"
        grep -q '<div id="warnings" class="notes hidden"' "$work/dom"
        verdict $? "in the browser $name has warnings"
        ! grep -qE '<title>(broken|1)|<img' "$work/dom"
        verdict $? "in the browser $name has run what stands in it"
        grep -oE '"url":"(https?|wss?)://[^"]*' "$work/net.json" | grep -vE '(google|gvt1|googleapis)\.com' >"$work/out"
        [ ! -s "$work/out" ]
        verdict $? "in the browser $name asks hosts:" "$work/out"
    done
else
    echo "skipped: in a browser: CHROMIUM names none"
fi

echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
