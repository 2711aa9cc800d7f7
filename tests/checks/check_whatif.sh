#!/bin/sh
# check_whatif.sh - replay --what-if: its figures are those of single replays, it says what runs out of memory, fails or
# is no log, twice the same, and the example of docs/what-if.md is what it prints. The rules of what it recommends:
# tests/unit/test_advice.c. Environment: BUILD.

cd "$(dirname "$0")/../.." || exit 1
replay=${BUILD:-build}/replay
work=${BUILD:-build}/check_whatif
small=bench/traces/moe_multistream.csv.gz
header=Thread,Time,Action,Pointer,Size,Stream

. tests/support/verdicts.sh

ends() { # status, arguments
    expected=$1
    shift
    "$replay" --what-if "$@" >"$work/out" 2>"$work/errors"
    status=$?
    cat "$work/errors" >>"$work/out"
    [ $status -eq "$expected" ]
    verdict $? "status $status, not $expected: replay --what-if $*"
}

says() { # pattern, what that means
    grep -q -- "$1" "$work/out"
    verdict $? "$2"
}

# The value of a key in the line of a setting.
value() { # key, settings as they are shown
    grep -F "\"settings\": \"$2\"" "$work/lines" | sed -n "s/.*\"$1\": \([^,}]*\)[,}].*/\1/p"
}

# ---- the example, and that it is the same each time -----------------------------------------------------------------

bench/whatif.sh "$work" >"$work/out" 2>&1 && diff docs/what-if.md "$work/what-if.md" >"$work/out" &&
    cmp docs/what-if.svg "$work/what-if.svg" >"$work/out"
verdict $? 'docs/what-if.md and docs/what-if.svg are what bench/whatif.sh writes'
grep -q '^the defaults .* 8.1 s\|^Recommended: ' docs/what-if.md
verdict $? 'docs/what-if.md has an example'

ends 0 --json "$small"
cp "$work/out" "$work/lines"
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True GALLOC_CONF=growth:1G "$replay" --what-if --json "$small" \
    >"$work/again"
diff "$work/lines" "$work/again" >"$work/out"
verdict $? 'two runs print the same, whatever the environment'

# ---- the figures are those of single replays ------------------------------------------------------------------------

keys='trace settings allocator conf result peak_live_bytes peak_reserved_bytes mean_reserved_bytes reserved_ratio oom'
keys="$keys driver_calls driver_us_model looks looks_us_model moves waits"
pattern='^{'
for key in $keys; do pattern="$pattern\"$key\": .*, "; done
[ "$(grep -c "$pattern\"recommended\": [a-z]*}$" "$work/lines")" -eq 17 ] && [ "$(wc -l <"$work/lines")" -eq 18 ] &&
    [ "$(grep -c '"result": "ok"' "$work/lines")" -eq 17 ] && [ "$(grep -c '"recommended": true' "$work/lines")" -eq 1 ]
verdict $? 'a line with all keys for each of 17 settings, of which one is recommended, and one line more'

same() { # settings as they are shown, options of a single replay
    shown=$1
    shift
    "$replay" --busy --json "$@" "$small" >"$work/single" 2>&1
    for key in peak_live_bytes peak_reserved_bytes mean_reserved_bytes driver_calls driver_us_model moves waits; do
        single=$(sed -n "s/.*\"$key\": \([^,}]*\)[,}].*/\1/p" "$work/single")
        ours=$(value $key "$shown")
        [ "$single" ] && [ "$ours" = "$single" ] || echo "$shown: $key: $single, but $ours"
    done >"$work/out"
    [ ! -s "$work/out" ]
    verdict $? "the same as of a single replay: $shown"
}
same 'the defaults'
for conf in overhead:0 overhead:0.2 growth:64M strategy:pooled reuse:completed+followed expandable_segments:False \
    like:pytorch,expandable_segments:True backend:cudaMalloc; do
    same $conf --conf $conf
done
same "like:pytorch (PyTorch's rules)" --conf like:pytorch,expandable_segments:False
same 'cudaMalloc, without galloc' --allocator cudamalloc
limit=$(sed -n 's/.*"conf": "memory_limit:\([0-9]*\)M".*/\1/p' "$work/lines")
same "memory_limit:${limit}M" --limit-mib "$limit"
"$replay" --busy --json --limit-mib $((limit - 2)) "$small" >"$work/out"
says '"oom": [1-9]' 'a limit below the smallest is too small'
grep -q "\"smallest_limit_bytes\": $((limit * 1048576)), " "$work/lines"
verdict $? 'the last line has the smallest limit'

# Nothing holds less than what is live, at the peak and on the average.
awk '
    { for (key in v) delete v[key] }
    match($0, /"peak_reserved_bytes": [0-9]+/) { peak = substr($0, RSTART + 23, RLENGTH - 23) + 0 }
    match($0, /"mean_reserved_bytes": [0-9]+/) { mean = substr($0, RSTART + 23, RLENGTH - 23) + 0 }
    /"settings": "live bytes/ { live = peak; mean_live = mean }
    /"settings"/ && (peak < live || mean < mean_live) { print }
    END { if (!live || !mean_live) print "no live bytes" }' "$work/lines" >"$work/out"
[ ! -s "$work/out" ]
verdict $? 'nothing holds less than what is live'
{ echo $header; echo 0,0,allocate,0x10,3000000,0; for i in $(seq 2 64); do echo "0,0,allocate,0x${i}00,10,0"; done
    echo 0,0,free,0x10,3000000,0; } >"$work/mean.csv"
ends 0 --json "$work/mean.csv"
grep -q '"settings": "live bytes.*"mean_reserved_bytes": 1500315, ' "$work/out"
verdict $? 'the average of live bytes is of each 64th call'

# ---- times ----------------------------------------------------------------------------------------------------------

timed() { # first, last, what the table says
    printf '%s\n0,%s,allocate,0x10,512,0\n0,0:0:7,allocate,0x20,512,0\n0,%s,free,0x10,512,0\n' $header "$1" "$2" \
        >"$work/timed.csv"
    ends 0 "$work/timed.csv"
    says "^timed: 3 calls$3, 0 MiB live" "the time from $1 to $2"
}
timed 0.5 3.0 ' in 2.5 s'
timed 1e1 1.5e1 ' in 5.0 s'
timed 10:11:12.5 10:12:13.0 ' in 60.5 s'
timed 10:11:12:500000 10:11:13:750000 ' in 1.2 s'
timed 23:59:58.0 0:00:01.0 ' in 3.0 s'
timed 0.5 0.50001 ' in 0.0 s'
says 'the log is too short, its times tell nothing' 'a log shorter than its driver time'
! grep -q "% of the log" "$work/out"
verdict $? 'a log shorter than its driver time has no parts of its time'
timed -1e308 1e308 ''
timed 0 1e300 ''
timed 5.0 1.0 ''
timed 0 1e999 ''
timed . 1 ''
timed 1:2 2:3 ''

# ---- room -----------------------------------------------------------------------------------------------------------

# Others than galloc know no room: there it is no memory, and what grows is copied.
cat >"$work/grow.csv" <<END
$header,Pool,More
1,0.1,allocate,0x400004000000,3145728,2,1,room=1073741824
1,0.2,free,0x400004000000,3145728,2,1,resize
1,0.2,allocate,0x400004000000,8388608,2,1,resize
1,0.3,free,0x400004000000,8388608,2,1,
END
ends 0 --json "$work/grow.csv"
cp "$work/out" "$work/lines"
for settings in 'like:pytorch (PyTorch.s rules)' backend:cudaMalloc 'cudaMalloc, without galloc'; do
    held=$(grep "\"settings\": \"$settings" "$work/lines" | sed -n 's/.*"peak_reserved_bytes": \([0-9]*\),.*/\1/p')
    [ "$held" ] && [ "$held" -le $((20 << 20)) ]
    verdict $? "no room with $settings: $held bytes"
done
[ "$(value peak_reserved_bytes 'expandable_segments:False')" -ge $((1 << 30)) ]
verdict $? "room is memory in galloc's fixed segments"
[ "$(value peak_reserved_bytes 'cudaMalloc, without galloc')" -eq $((12 << 20)) ]
verdict $? 'a copy is made before the old block is freed'
ends 2 --no-room "$work/grow.csv"

# ---- out of memory, failures, what is no log ------------------------------------------------------------------------

ends 0 --limit-mib 6500 "$small"
says '^growth:64M .*  out of memory, [1-9][0-9]* times$' 'a setting that runs out of memory'
says '^the defaults .*[0-9]$' 'one that does not'
ends 0 --limit-mib 4000 --json "$small"
says '"result": "out of memory".*"oom": [1-9]' 'out of memory in JSON'
says '"conf": "memory_limit:[0-9]*M", "result": "ok"' 'the smallest limit is sought without the limit given'
says '"recommended_conf": null, "advice": \["Recommended: none\. .* is more than the limit given\.' 'nothing fits'
printf '%s\n0,1,allocate,0x10,300000000000,0\n' $header >"$work/huge.csv"
ends 0 "$work/huge.csv"
says "^Recommended: none. .* within the device's memory; 286102 MiB are live" 'more than the device has'

printf 'foo\n' >"$work/bad.csv"
ends 1 "$work/bad.csv"
says 'bad.csv:1: not a trace' 'the line is blamed'
ends 1 "$work/timed.csv" "$work/bad.csv" "$small"
says '^timed: ' 'the log before a bad one is told'
head -c 3000 "$small" >"$work/cut.csv.gz"
ends 1 --json "$work/cut.csv.gz"
says 'gzip could not unpack it' 'a damaged file is told'
ends 1 "$work/no such file"

# A replay that is killed is told, and the others go on.
gzip -dc bench/traces/gpt2_varlen.csv.gz >"$work/plain.csv"
"$replay" --what-if "$work/plain.csv" >"$work/killed" 2>&1 &
parent=$!
while kill -0 $parent 2>/dev/null; do
    child=$(awk -v parent=$parent '$4 == parent { print $1 }' /proc/[0-9]*/stat 2>/dev/null | head -n 1)
    [ -z "$child" ] || ! kill -9 "$child" 2>/dev/null || break
done
wait $parent
status=$?
cp "$work/killed" "$work/out"
[ $status -eq 1 ] && grep -q 'ended by signal 9' "$work/out" && grep -q ' failed$' "$work/out" &&
    grep -q '^cudaMalloc, without galloc .*[0-9] ' "$work/out"
verdict $? "a replay that is killed (status $status)"

# ---- the chart ------------------------------------------------------------------------------------------------------

hostile="$work/<script>&\"'.csv"
cp "$work/timed.csv" "$hostile"
ends 0 --svg "$work/chart.svg" --conf overhead:0.3 "$small" "$hostile"
cp "$work/chart.svg" "$work/out"
[ "$(head -c 5 "$work/chart.svg")" = '<svg ' ] && [ "$(tail -n 1 "$work/chart.svg")" = '</svg>' ] &&
    ! grep -q '<script' "$work/chart.svg"
verdict $? 'the chart is a picture, whatever the name of the log'
says '>SIMULATED device, no GPU' 'the chart says that it is simulated'
says 'prefers-color-scheme: dark' 'the chart shows in light and dark'
says '>overhead:0.3</text>' 'the chart has the settings of the user'
! grep -q 'the bar is longer' docs/what-if.svg && ! grep -q '→' docs/what-if.svg
verdict $? 'a chart without an arrow says nothing of arrows'
grep -q '→' "$work/chart.svg" && grep -q 'arrow: the bar is longer' "$work/chart.svg"
verdict $? 'a chart with an arrow explains it'
[ "$(grep -c '^<rect' "$work/chart.svg")" -eq $((5 + 2 * (18 + 17))) ]
verdict $? 'a key of five, and for each of two logs a bar for 18 settings, all but one with driver time'
odd=$(printf '%s/a\001b\377.csv' "$work")
cp "$small" "$odd"
ends 0 --svg "$work/odd.svg" "$odd"
LC_ALL=C grep '[^ -~]' "$work/odd.svg" >"$work/out"
[ ! -s "$work/out" ] && grep -q 'a?b?' "$work/odd.svg"
verdict $? 'the chart has printable letters only, whatever the name of the log'
rm "$odd"
ends 1 --svg "$work/no such folder/chart.svg" "$small"
says 'cannot be written' 'a chart that cannot be written is told'
[ ! -e /dev/full ] || ends 1 --svg /dev/full "$work/timed.csv"

# ---- options --------------------------------------------------------------------------------------------------------

ends 0 --conf growth:4M --conf overhead:0.3,growth:8M --repeat 2 "$small"
says '^growth:4M ' 'a setting of the user'
says '^overhead:0.3,growth:8M ' 'another one'
ends 0 --fit --busy "$work/timed.csv"
ends 2 --conf foo:1 "$small"
ends 2 --allocator galloc "$small"
ends 2 --verify "$small"
ends 2 --calls "$small"
ends 2 --timeline "$work/timeline" "$small"
ends 2 --fit --limit-mib 5000 "$small"
ends 2
# shellcheck disable=SC2046 # words
ends 2 $(for i in $(seq 17); do echo "--conf overhead:0.$i"; done) "$small"
"$replay" --svg "$work/chart.svg" "$small" >"$work/out" 2>&1
[ $? -eq 2 ]
verdict $? '--svg without --what-if'

count_verdicts
