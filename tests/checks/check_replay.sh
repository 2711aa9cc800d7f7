#!/bin/sh
# check_replay.sh - build/replay on the ten traces (nothing wrong is found, hardly more is held than is live), on traces
# that are none, and with options that are wrong. Environment: BUILD.

cd "$(dirname "$0")/../.." || exit 1
replay=${BUILD:-build}/replay
work=${BUILD:-build}/check_replay
header=Thread,Time,Action,Pointer,Size,Stream

. tests/support/verdicts.sh

# replay, with these arguments, ends with the status that is expected.
ends() { # status, arguments
    expected=$1
    shift
    "$replay" "$@" >"$work/out" 2>&1
    status=$?
    [ $status -eq "$expected" ]
    verdict $? "status $status, not $expected: replay $*"
}

says() { # pattern, what that means
    grep -q "$1" "$work/out"
    verdict $? "$2"
}

# ---- the ten traces -------------------------------------------------------------------------------------------------

keys='trace allocator backend ops peak_live_bytes peak_reserved_bytes reserved_ratio fit_ratio oom ns_per_op'
keys="$keys ns_per_op_warm ns_per_op_own driver_calls driver_us_model moves verify_errors conf driver_calls_warm waits"
keys="$keys findings races unfinished_at_free looks looks_us_model driver_us_model_warm looks_us_model_warm moves_seen"
keys="$keys moves_busy"
keys="$keys handovers handovers_busy mean_reserved_bytes"
pattern='^{'
for key in $keys; do pattern="$pattern\"$key\": [^ ]*, "; done
pattern="$pattern\"collections\": [^ ]*}$"

# Means that peers reach with expandable segments: 1.132, at worst 1.661.
held() {
    awk -F'"reserved_ratio": ' '
        { ratio = $2 + 0; sum += log(ratio); if (ratio > worst) worst = ratio }
        END { print "mean", exp(sum / NR), "worst", worst; exit !(NR == 10 && exp(sum / NR) <= 1.15 && worst <= 1.70) }
    ' "$1" >"$work/out"
}

# With queued work well behind the host most pages move while their work goes on, and memory changes hands too.
busy() {
    awk '
        function value(key) {
            return match($0, "\"" key "\": ") ? substr($0, RSTART + RLENGTH) + 0 : -1
        }
        {
            if (value("moves_busy") > value("moves_seen") || value("handovers_busy") > value("handovers")) wrong = 1
            moves += value("moves_seen")
            moves_busy += value("moves_busy")
            handovers_busy += value("handovers_busy")
        }
        END {
            print "moves", moves, "busy", moves_busy, "busy hand-overs", handovers_busy, "more than all:", wrong + 0
            exit !(!wrong && moves && moves_busy >= 0.3 * moves && handovers_busy)
        }
    ' "$1" >"$work/out"
}

for options in '' '--busy --verify' '--conf expandable_segments:False --busy --verify'; do
    ends 0 --json $options bench/traces/*.csv.gz
    cp "$work/out" "$work/lines"
    [ "$(grep -c "$pattern" "$work/lines")" -eq 10 ]
    verdict $? "ten lines with all keys: $options"
    [ "$(grep -c '"oom": 0, .*"findings": 0, ' "$work/lines")" -eq 10 ]
    verdict $? "no out-of-memory and nothing wrong: $options"
    case $options in
    *False*) ;;
    *) held "$work/lines"; verdict $? "held memory: $options" ;;
    esac
    case $options in
    --busy*) busy "$work/lines"; verdict $? "moves and hand-overs of memory in use: $options" ;;
    esac
done

# No trace costs more than the file of docs/tuning.md says, with the defaults and with other settings: memory at most
# and on the average, driver calls, moves, waits. Time plays no part in them.
costs() { # options, settings as in that file, the file, lines of replay
    awk -F, -v options="$1" -v conf="$2" '
        function value(key) { return match($0, "\"" key "\": ") ? substr($0, RSTART + RLENGTH) + 0 : -1 }
        function more(what, now, then) { if (now > then) print name ": " what " " now ", not " then }
        FNR == NR && $1 == options && $2 == conf {
            most[$3] = $4; mean[$3] = $5; calls[$3] = $7; moves[$3] = $8; waits[$3] = $9
        }
        FNR == NR { next }
        match($0, /"trace": "[a-z0-9_]*"/) {
            name = substr($0, RSTART + 10, RLENGTH - 11)
            if (!(name in most)) { print name ": no row"; next }
            traces++
            more("held at most", value("reserved_ratio"), most[name] + 0.00005)
            more("held on the average", value("mean_reserved_bytes") / value("peak_live_bytes"), mean[name] + 0.00005)
            more("driver calls", value("driver_calls"), calls[name])
            more("moves", value("moves"), moves[name])
            more("waits", value("waits"), waits[name])
        }
        END { if (traces != 10) print traces + 0 " traces" }
    ' "$3" "$4"
}
for options in '' --busy; do
    for conf in default overhead:0 overhead:0.2 growth:16M expandable_segments:False reuse:none; do
        grep -q "^$options,$conf," bench/results/sim-tuning.csv || continue
        "$replay" --json $options --conf "$(echo "$conf" | sed s/default//)" bench/traces/*.csv.gz >"$work/lines"
        costs "$options" "$conf" bench/results/sim-tuning.csv "$work/lines" >"$work/more"
        empty "costs more than it did: $options $conf" "$work/more"
    done
done

# The profile of PyTorch holds what PyTorch held, also while blocks are used by work that is far behind.
BUILD=${BUILD:-build} bench/like_pytorch.sh "$work/like_pytorch.csv" >"$work/out" 2>&1
verdict $? 'like:pytorch holds what PyTorch held'
# The trace that came after all rules were chosen.
for options in '' '--busy --verify'; do
    ends 0 --json $options bench/traces/later/*.csv.gz
    [ "$(grep -c '"oom": 0, .*"findings": 0, ' "$work/out")" -eq 1 ] &&
        awk -F'"reserved_ratio": ' '$2 + 0 > 1.15 { exit 1 }' "$work/out"
    verdict $? "the later trace: $options"
done

ends 0 --json --conf like:pytorch,expandable_segments:False --busy --verify bench/traces/*.csv.gz
[ "$(grep -c '"oom": 0, .*"findings": 0, ' "$work/out")" -eq 10 ]
verdict $? 'no out-of-memory and nothing wrong: like:pytorch'

small=bench/traces/moe_multistream.csv.gz
gzip -dc "$small" >"$work/plain.csv"
ends 0 --json --fit --repeat 3 "$work/plain.csv"
says '"fit_ratio": 1\.[01]' 'a limit that fits is found, near live bytes'
says '"ns_per_op_warm": [0-9]' 'the last pass is timed'
says '"looks": [1-9][0-9]*, "looks_us_model": [1-9][0-9.]*, ' 'looks are counted, and priced'
says '"driver_us_model_warm": [0-9]' 'the driver time of the last pass is told'
says '"looks_us_model_warm": [1-9]' 'so are those of the last pass'
says '"moves_seen": null, "moves_busy": null, "handovers": null' 'without work nobody saw what blocks went through'

# The peaks over the calls are those of the whole replay, and the rows count the calls of all passes.
ends 0 --json --repeat 2 --timeline "$work/timeline" --conf overhead:0.1,growth:64M "$small"
awk -F'[ ,}]+' '
    FNR == NR { for (i = 1; i < NF; i++) fact[$i] = $(i + 1); next }
    FNR == 1 { head = $0; next }
    {
        wrong += NF != 7 || $1 != "moe_multistream" || $2 != "galloc" || $3 " " $4 != "overhead:0.1 growth:64M"
        wrong += $5 <= call || $6 > $7
        call = $5
        if ($6 > live) live = $6
        if ($7 > held) held = $7
    }
    END {
        print "wrong rows", wrong + 0, "calls", call, "live", live, "held", held
        exit wrong || head != "trace,allocator,settings,call,live_bytes,held_bytes" || FNR < 200 ||
            call != 2 * fact["\"ops\":"] || live != fact["\"peak_live_bytes\":"] ||
            held != fact["\"peak_reserved_bytes\":"]
    }' "$work/out" "$work/timeline" >"$work/said"
status=$?
cat "$work/said" >>"$work/out"
verdict $status 'the timeline agrees with the figures'
ends 2 --fit --timeline "$work/timeline" "$small"
ends 1 --timeline "$work/no such folder/file" "$small"

ends 0 --json --limit-mib 4000 "$small"
says '"oom": [1-9]' 'too low a limit is out-of-memory, not a failure'
ends 0 --allocator cudamalloc --busy --verify "$small"
says 'moe_multistream' 'a table'

# The driver is watched from outside: nothing waits while memory lasts, and when it does not, that is seen.
ends 0 --busy --calls bench/traces/*.csv.gz
says '^0 calls of a function that can wait for the device' 'no wait while memory lasts'
says '^cuMemMap .* no$' 'the driver is watched'
ends 1 --busy --calls --limit-mib 5000 "$small"
says '^[1-9][0-9]* calls of a function that can wait' 'a wait is counted'
says 'found: deadlock' 'a wait for the device is found'
ends 2 --calls --fit "$small"
ends 2 --calls --allocator cudamalloc "$small"

# ---- what is no trace -----------------------------------------------------------------------------------------------

row=0,0.1,allocate,0x10,512,0
refused() { # line that is blamed, text of the file
    printf "$2" >"$work/bad.csv"
    ends 1 "$work/bad.csv"
    says "bad.csv:$1: " "line $1 is blamed: $2"
}

refused 1 ''
refused 1 'foo\n'
refused 2 "$header\n"
refused 2 "$header\n\n"
refused 2 "$header\n0,0.1,allocat,0x10,512,0\n"
refused 2 "$header\n0,0.1,allocate,0x10,-512,0\n"
refused 2 "$header\n0,0.1,allocate,0x10,99999999999999999999,0\n"
refused 2 "$header\n0,0.1,allocate,0x10,1125899906842625,0\n"
refused 2 "$header\n0,0.1,allocate,0x1ffffffffffffffff,512,0\n"
refused 2 "$header\n0,0.1,allocate,0,512,0\n"
refused 2 "$header\n0,0.1,allocate,0x10,512\n"
refused 2 "$header\n$row,1\n"
refused 2 "$header\nx,0.1,allocate,0x10,512,0\n"
refused 2 "$header\n0,x,allocate,0x10,512,0\n"
refused 2 "$header\n0,0.1,allocate,0x10,512,\n"
refused 2 "$header\n0,0.1,allocate,0x10,512,\033[1m0\n"
refused 3 "$header\n$row\n$row\n"
refused 3 "$header\n$row\n$(printf '%300s' '')\n"
head -c 3000 "$small" >"$work/cut.csv.gz"
ends 1 "$work/cut.csv.gz"
says 'gzip could not unpack it' 'a damaged file is told'
ends 1 "$work/no such file"
ends 1 "$work"

# What real logs have: no end of the last line, frees of what was allocated before, failures, other notations.
printf '%s\r\n%s' "$header" "$row" >"$work/good.csv"
ends 0 "$work/good.csv"
printf '%s\n7,10:11:12.5,allocate failure,(nil),512,0\n7,10:11:12.5,free,0x20,512,0\n%s\n' "$header" \
    '7,10:11:13.5,allocate,0x10,512,0x7f0000000000' >"$work/good.csv"
ends 0 "$work/good.csv"

# ---- options --------------------------------------------------------------------------------------------------------

ends 0 --help
ends 2
ends 2 --foo "$small"
ends 2 --allocator torch "$small"
ends 2 --allocator foo "$small"
ends 2 --conf foo:1 "$small"
ends 0 --conf trace:nowhere.csv "$small"
says 'trace: no effect but in the variable GALLOC_CONF' "a setting without effect is told"
ends 2 --limit-mib 0 "$small"
ends 2 --limit-mib 1e3 "$small"
ends 2 --repeat 0 "$small"
ends 2 --backend foo "$small"
ends 2 --fit --limit-mib 5000 "$small"

count_verdicts
