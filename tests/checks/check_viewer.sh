#!/bin/sh
# check_viewer.sh - docs/viewer.html: what it reads and adds up is what the counters say, in each format; hostile files
# end in words; in a browser the page shows the same, runs nothing of a file and asks no host for anything.
# Environment: CC, BUILD (a folder to work in), NODE, CHROMIUM (a headless browser; unset: one of that name; where it
# shows no page, that part is skipped).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} node=${NODE:-node}
work=${BUILD:-build}/check_viewer
viewer=docs/viewer.html

. tests/support/verdicts.sh
said=

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
"$cc" -std=c11 -Wall -Wextra -I. -Itests/sim -isystem tests/sim/include tests/checks/snapshots.c "$sim"/*.o \
    -o "$work/snapshots" -lpthread -lm >"$work/out" 2>&1 && "$work/snapshots" "$work" >"$work/counters" 2>"$work/out"
verdict $? "snapshots.c does not compile and run:" "$work/out"
for file in "$work"/*.json "$work"/*.pickle; do gzip -c "$file" >"$file.gz"; done

# A string that would end a script, and one that would end an attribute, as a file's name.
sed 's|"version":"[^"]*"|"version":"</script><script>document.title=\\"broken\\"</script><img src=x onerror=a()>"|' \
    "$work/many.json" >"$work/hostile.json"
grep -q '</script>' "$work/hostile.json"
verdict $? "the hostile snapshot is none"
cp "$work/hostile.json" "$work/\"><script>document.title=1<"
for name in many hostile past; do
    bench/galloc-view.sh "$work/$name.json" >"$work/$name.html" || failed=$((failed + 1))
done
bench/galloc-view.sh "$work/\"><script>document.title=1<" >"$work/name.html"
for name in many hostile name; do
    [ "$(grep -c '<script' "$work/$name.html")" = 2 ] && [ "$(grep -c '</script>' "$work/$name.html")" = 2 ]
    verdict $? "a snapshot becomes part of the page: $work/$name.html"
done
bench/galloc-view.sh "$work/nothing" >"$work/out" 2>&1
[ $? -eq 2 ]
verdict $? "galloc-view.sh takes a file that is not there"

# The history as a trace: each allocation is in it, and each free of such a block.
bench/galloc-trace.sh "$work/past.json.gz" >"$work/trace" 2>"$work/out"
[ $? -eq 0 ] && grep -q '^galloc-trace.sh: [0-9]* blocks are older than the history$' "$work/out"
verdict $? "galloc-trace.sh:" "$work/out"
allocations=$(grep -o '"action":"alloc"' "$work/past.json" | wc -l)
frees=$(grep -o '"action":"free_requested"' "$work/past.json" | wc -l)
older=$(sed 's/[^0-9]//g' "$work/out")
awk -F, -v allocations="$allocations" -v frees=$((frees - older)) '
    NR == 1 { wrong = $0 != "Thread,Time,Action,Pointer,Size,Stream" }
    NR > 1 && (NF != 6 || $2 < before || $5 <= 0) { wrong = 1 }
    NR > 1 { before = $2 }
    $3 == "allocate" { if ($4 in size) wrong = 1; size[$4] = $5; allocations-- }
    $3 == "free" { if (size[$4] != $5) wrong = 1; delete size[$4]; frees-- }
    END { exit wrong || allocations || frees }' "$work/trace"
verdict $? "galloc-trace.sh: the trace is not the history" "$work/trace"
tr '{' '\n' <"$work/past.json" | sed -n 's/^"action":"alloc",.*"addr":\([0-9]*\).*/\1/p' |
    while read -r addr; do printf '0x%x\n' "$addr"; done >"$work/addresses"
awk -F, '$3 == "allocate" { print $4 }' "$work/trace" | diff "$work/addresses" - >"$work/out"
verdict $? "galloc-trace.sh: addresses are not those of the history" "$work/out"

# Addresses of all digits, and two devices, whose histories follow one another in a snapshot.
cat >"$work/devices.json" <<'END'
{"device_traces":[[{"action":"alloc","addr":140144784965632,"size":1,"stream":0,"time_us":1795651215001600},
{"action":"free_requested","addr":140144784965632,"size":1,"stream":0,"time_us":1795651215001900}],
[{"action":"alloc","addr":140144789159936,"size":2,"stream":0,"time_us":1795651215001500},
{"action":"free_requested","addr":140144789159936,"size":2,"stream":0,"time_us":1795651215001800}]]}
END
cat >"$work/expected" <<'END'
Thread,Time,Action,Pointer,Size,Stream
0,0.000000,allocate,0x7f7600600000,2,0
0,0.000100,allocate,0x7f7600200000,1,0
0,0.000300,free,0x7f7600600000,2,0
0,0.000400,free,0x7f7600200000,1,0
END
bench/galloc-trace.sh "$work/devices.json" 2>&1 | diff "$work/expected" - >"$work/out"
verdict $? "galloc-trace.sh: two devices:" "$work/out"
bench/galloc-trace.sh "$work/many.json" >"$work/out" 2>&1
[ $? -eq 1 ]
verdict $? "galloc-trace.sh takes a snapshot without a history"

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

CHROMIUM=${CHROMIUM-$(command -v chromium || command -v chromium-browser || command -v google-chrome)}
echo '<p>shown</p>' >"$work/plain.html"
if [ "$CHROMIUM" ] && dumped "$work/plain.html" "$work/dom" && grep -q '<p>shown</p>' "$work/dom"; then
    for name in many hostile name past; do
        read -r _ live reserved blocks graphs <<END
$(grep "^$([ $name = past ] && echo past || echo many) " "$work/counters")
END
        dumped "$work/$name.html" "$work/dom"
        [ "$(value live) $(value reserved) $(value blocks) $(value graphs)" = "$live $reserved $blocks $graphs" ]
        verdict $? "in the browser $name has other sums than $live $reserved $blocks $graphs" "$work/browser"
        grep -q '<div id="warnings" class="notes hidden"' "$work/dom"
        verdict $? "in the browser $name has warnings"
        ! grep -qE '<title>(broken|1)|<img' "$work/dom"
        verdict $? "in the browser $name has run what stands in it"
        if [ $name = past ]; then
            grep -q "<p id=\"then\"[^>]* data-live=\"$live\">Event .* of .*After .*step 9 &lt;/script" "$work/dom"
            verdict $? "in the browser the history does not end with $live live bytes, after an annotation"
            grep -q '<td[^>]*>tag 3 (&lt;img src=x&gt; weights)</td>' "$work/dom"
            verdict $? "in the browser the name of a tag is not among who holds most"
        else
            grep -q '<div id="past" class="hidden">' "$work/dom"
            verdict $? "in the browser $name shows a history that it has not"
        fi
        grep -oE '"url":"(https?|wss?)://[^"]*' "$work/net.json" | grep -vE '(google|gvt1|googleapis)\.com' >"$work/out"
        [ ! -s "$work/out" ]
        verdict $? "in the browser $name asks hosts:" "$work/out"
    done
    # What is no snapshot ends in words, in the page too.
    head -c 300000 /dev/zero | tr '\0' '[' >"$work/deep.json"
    head -c 5000 "$work/many.json" >"$work/cut.json"
    head -c 5000 "$work/past.pickle" >"$work/cut.pickle"
    echo '{"segments":[{"address":0,"total_size":1e300,"blocks":[{"address":0,"size":1e300,"state":"inactive"}]}]}' \
        >"$work/endless.json"
    for name in deep.json cut.json cut.pickle endless.json; do
        bench/galloc-view.sh "$work/$name" >"$work/$name.html"
        dumped "$work/$name.html" "$work/dom"
        grep -q "<div id=\"error\" class=\"notes\" role=\"alert\">$name: [A-Za-z]" "$work/dom"
        verdict $? "in the browser $name does not end in words"
    done
else
    echo "skipped: in a browser: no headless Chromium shows a page; CHROMIUM names one"
fi

count_verdicts
