#!/bin/sh
# check_trace.sh - logs of the setting trace, replayed by build/replay: the same calls with the same settings lead to
# the same state, addresses and all; readers of RMM's format and other allocators take them; and logs that are damaged
# are refused, but for what a crash does to one. Environment: CC, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
replay=${BUILD:-build}/replay
work=${BUILD:-build}/check_trace
header=Thread,Time,Action,Pointer,Size,Stream,Pool,More

. tests/support/verdicts.sh

sim=$(tests/support/device.sh "$work/sim") || exit 1
"$cc" -std=c11 -O1 -Wall -Wextra -I. -Itests/sim -isystem tests/sim/include tests/checks/log_of_run.c "$sim"/*.o \
    -o "$work/log_of_run" -lpthread -lm >"$work/out" 2>&1
verdict $? "log_of_run.c does not compile"

timeless() { cut -d, -f1,3- "$1"; } # log

# ---- a program and its replay ---------------------------------------------------------------------------------------

# Its log is replayed, and leads to the same state.
replays() { # settings, and perhaps: legacy
    settings=$1
    seed=$((seed + 1))
    GALLOC_CONF=trace:$work/log.csv "$work/log_of_run" 3000 $seed "$work/state.json" "$@" >"$work/out" 2>&1
    verdict $? "a program runs: $*"
    for word in resize room= align= long tag= after= recorded=; do
        grep -q "[, ]$word" "$work/log.csv"
        verdict $? "the log has $word: $*"
    done
    GALLOC_CONF=trace:$work/again.csv "$replay" --conf "$settings" --snapshot "$work/again.json" "$work/log.csv" \
        >"$work/out" 2>&1
    verdict $? "its log is replayed: $*"
    cmp "$work/state.json" "$work/again.json" >"$work/out" 2>&1
    verdict $? "the replay leads to the same state: $*"
    timeless "$work/again.csv" | head -n "$(wc -l <"$work/log.csv")" >"$work/calls.again"
    timeless "$work/log.csv" | diff - "$work/calls.again" >"$work/out" 2>&1
    verdict $? "the replay's own log has the same rows: $*"
}

seed=0
for settings in '' overhead:0 memory_limit:400M strategy:pooled like:pytorch expandable_segments:False reuse:none \
    backend:cudaMalloc backend:cudaMallocAsync \
    stats:exact,growth:64M,roundup_power2_divisions:4; do
    replays "$settings"
done
for settings in overhead:0 overhead:0.1 memory_limit:400M reuse:completed strategy:pooled expandable_segments:False; do
    replays "$settings" legacy
done

# Its streams are the legacy one and others also where the work runs behind the host, and with other settings.
for options in '' '--conf like:pytorch' '--allocator cudamalloc' --threads; do
    # shellcheck disable=SC2086
    "$replay" --json --verify --busy $options "$work/log.csv" >"$work/out" 2>&1 &&
        grep -q '"findings": 0, "races": 0' "$work/out"
    verdict $? "a log with the legacy stream is replayed: --verify --busy $options"
done

# Without a log of its own, a replay takes the same paths if it has a history with stacks.
"$replay" --conf "$settings,history:1,history_stacks:1" --snapshot "$work/again.json" "$work/log.csv" >"$work/out" 2>&1
verdict $? "its log is replayed with a history"
for file in state again; do grep -o '"address":[0-9]*,"size":[0-9]*' "$work/$file.json" >"$work/$file.blocks"; done
[ -s "$work/state.blocks" ] && cmp "$work/state.blocks" "$work/again.blocks" >"$work/out" 2>&1
verdict $? "a replay with a history leads to the same blocks"

# ---- work that runs behind the host: waits --------------------------------------------------------------------------

gzip -dc bench/traces/moe_multistream.csv.gz >"$work/moe.csv"
conf=overhead:0.01
GALLOC_CONF=trace:$work/log.csv "$replay" --json --busy --conf $conf "$work/moe.csv" >"$work/first" 2>"$work/out"
verdict $? "a replay writes a log"
GALLOC_CONF=trace:$work/again.csv "$replay" --json --busy --conf $conf "$work/log.csv" >"$work/second" 2>"$work/out"
verdict $? "which is replayed"
grep -q 'waits=' "$work/log.csv" && timeless "$work/log.csv" >"$work/calls" &&
    timeless "$work/again.csv" | diff "$work/calls" - >"$work/out" 2>&1
verdict $? "with the same waits and addresses"
"$replay" --json --verify --busy "$work/log.csv" >"$work/out" 2>&1 && grep -q '"findings": 0, "races": 0' "$work/out"
verdict $? "other settings have no race"
GALLOC_CONF=trace:$work/log.csv "$work/log_of_run" 3000 9 "$work/state.json" '' >"$work/out" 2>&1
"$replay" --json --verify --busy --conf overhead:0 "$work/log.csv" >"$work/out" 2>&1 &&
    grep -q '"findings": 0, "races": 0' "$work/out"
verdict $? "nor has a program's log, with resizes"

# ---- threads: the log of their replay names them in the same order ---------------------------------------------------

awk -F, -v OFS=, 'NR > 1 { $1 = /resize/ ? 41 : 40 + NR % 7 % 3 } { print }' "$work/log.csv" >"$work/threads.csv"
"$replay" --snapshot "$work/state.json" "$work/threads.csv" >"$work/out" 2>&1
verdict $? "rows of several threads by one"
GALLOC_CONF=trace:$work/again.csv "$replay" --threads --conf history:1 --snapshot "$work/again.json" \
    "$work/threads.csv" >"$work/out" 2>&1
verdict $? "and by as many"
ranked='NR > 1 { if (!($1 in rank)) rank[$1] = ++n; print rank[$1], $3, $5, $6 }'
rows=$(wc -l <"$work/log.csv")
awk -F, "$ranked" "$work/threads.csv" >"$work/calls"
head -n "$rows" "$work/again.csv" | awk -F, "$ranked" | diff "$work/calls" - >"$work/out" 2>&1
verdict $? "each thread's calls are made by one thread, in the order of the log"
[ "$(cut -d' ' -f1 "$work/calls" | sort -u | wc -l)" -eq 3 ]
verdict $? "there were three"
"$replay" --threads --calls "$work/threads.csv" >"$work/out" 2>&1
[ $? -eq 2 ]
verdict $? "calls are counted of one thread"

# ---- others ---------------------------------------------------------------------------------------------------------

# What RMM's reader asks for: columns by their names, numbers, two actions; and that no live pointer comes again.
awk -F, -v header=$header '
    NR == 1 { wrong += $0 != header; next }
    { wrong += NF != 8 || $1 !~ /^[0-9]+$/ || $4 !~ /^0x[0-9a-f]+$/ || $5 !~ /^[0-9]+$/ || $6 !~ /^[0-9]+$/ }
    $3 == "allocate" { wrong += $4 in live; live[$4] = $5; next }
    $3 == "free" { wrong += live[$4] != $5; delete live[$4]; next }
    { wrong++ }
    END { print NR " rows, " wrong + 0 " wrong"; exit wrong || NR < 3000 }' "$work/log.csv" >"$work/out"
verdict $? "a reader that knows RMM's columns takes it"
"$replay" --json --allocator cudamalloc "$work/log.csv" >"$work/out" 2>&1 &&
    grep -q '"allocator": "cudamalloc"' "$work/out"
verdict $? "so does an allocator that cannot resize"
"$replay" --snapshot "$work/again.json" --allocator cudamalloc "$work/log.csv" >"$work/out" 2>&1
[ $? -eq 2 ]
verdict $? "which has no snapshot"

# ---- many streams ---------------------------------------------------------------------------------------------------

# A stream for each request, as a server has; every tenth one's block is freed much later, on another stream and after
# one that was not heard of before; every hundredth's stays. A few streams come again and again.
awk -v header=$header 'BEGIN {
    print header
    for (i = 1; i <= 5000; i++) {
        p = sprintf("0x%x", 4096 * i); s = i % 50 ? i + 100 : i % 7
        print "1," i ".0,allocate," p "," 1000 * (1 + i % 90) "," s ",1,"
        if (i % 10) print "1," i ".1,free," p ",0," s ",1,"
        late = sprintf("0x%x", 4096 * (i - 2500))
        if (i > 2500 && i % 10 == 0 && i % 100) print "1," i ".2,free," late ",0," s ",1,after=" i + 9000 " recorded=3"
    }
}' >"$work/many.csv"
for options in --busy --verify '--repeat 3 --verify --busy' '--threads --verify' '--conf like:pytorch --verify' \
    '--conf stream_check:off --verify' '--allocator cudamalloc --verify'; do
    # shellcheck disable=SC2086 # words
    "$replay" --json $options "$work/many.csv" >"$work/out" 2>&1 && grep -q '"oom": 0, .*"findings": 0' "$work/out"
    verdict $? "a log of 5000 streams: $options"
done
awk -v header=$header 'BEGIN { # 1000 streams, none of which has ended before all have begun
    print header
    for (i = 1; i <= 1000; i++) print "1,0.1,allocate,0x" i "00,1000," i ",1,"
    for (i = 1; i <= 1000; i++) print "1,0.2,free,0x" i "00,1000," 1001 - i ",1,"
}' >"$work/many.csv"
"$replay" --json --verify "$work/many.csv" >"$work/out" 2>&1 && grep -q '"oom": 0, .*"findings": 0' "$work/out"
verdict $? "1000 streams at once"
"$replay" --what-if "$work/many.csv" >"$work/out" 2>&1 && grep -q '^Recommended' "$work/out"
verdict $? "what if, with as many streams"

# ---- resizes that are copies ----------------------------------------------------------------------------------------

# 3, 8 and 16 MiB with room for 1 GiB. Where the room is memory, or bytes are copied since there is none, more is held.
cat >"$work/grow.csv" <<END
$header
1,0.1,allocate,0x400004000000,3145728,2,1,room=1073741824 tag=7
1,0.2,free,0x400004000000,3145728,2,1,resize
1,0.2,allocate,0x400004000000,8388608,2,1,resize
1,0.3,free,0x400004000000,8388608,2,1,resize
1,0.3,allocate,0x400004000000,16777216,2,1,resize
1,0.4,free,0x400004000000,16777216,2,1,
END
holds() { # MiB, options
    mib=$1
    shift
    "$replay" --json --verify "$@" "$work/grow.csv" >"$work/out" 2>&1 &&
        grep -q "\"peak_reserved_bytes\": $((mib << 20)), .*\"oom\": 0, .*\"findings\": 0" "$work/out"
    verdict $? "$mib MiB are held: $*"
}
holds 16
holds 1024 --conf backend:cudaMalloc
holds 24 --allocator cudamalloc
holds 24 --conf backend:cudaMalloc --no-room

# ---- damaged logs ---------------------------------------------------------------------------------------------------

row=1,0.000100,allocate,0x100000,4096,2,1

# A log of a row, and perhaps further text, ends with this status and says that.
reads() { # status, pattern, further text
    printf '%s\n%s,\n%s' $header $row "$3" >"$work/bad.csv"
    "$replay" --json "$work/bad.csv" >"$work/out" 2>&1
    status=$?
    [ $status -eq "$1" ] && grep -q "$2" "$work/out"
    verdict $? "status $status, not $1, or not '$2': $3"
}

end='
'
next=1,0.000200,allocate,0x200000,8192,3,1
reads 0 '"ops": 1,' ''
reads 0 '"ops": 2,' "$next,$end"
reads 0 '"ops": 1,' "$next,room=10"                   # the last row has no end: it was cut
reads 0 '"ops": 1,' '1,0.0002,fre'
reads 1 'bad.csv:3: a row has 8 fields' "1,0.0002,fre$end"
reads 1 'bad.csv:3: a row has 8 fields' "1,0.0002,free,0x100000,4096,2$end"
reads 1 'bad.csv:3: a row has 8 fields' "$next,,$end"
reads 1 'pool "x" is no number' "1,0.0002,free,0x100000,4096,2,x,$end"
reads 1 'pool "" is no number' "1,0.0002,free,0x100000,4096,2,,$end"
for word in rooms room= room=x room=99999999999999999999 room=36028797018963969 align=3 tag=4294967296 long=1 after= \
    after=2+ after=x resize=1 waits=-1 capture= 'after=1 recorded=2 after=3'; do
    reads 1 'bad.csv:3:' "$next,$word$end"
done
reads 0 '"ops": 2,' "$next,room=67108864 align=4096 long tag=9 waits=3 capture=8$end"
reads 0 '"ops": 2,' "1,0.0002,free,0x100000,4096,2,1,after=3+4+4 recorded=2$end"
reads 0 '"ops": 1,' "1,0.0002,free,0x100000,4096,2,1,resize$end"               # cut between the rows of a resize
reads 0 '"ops": 3,' "1,0.0002,allocate,0x100000,8192,2,1,resize$end"
reads 0 '"ops": 2,' "1,0.0002,allocate,0x900000,8192,2,1,resize$end"           # of a block that is not in the log
reads 1 'no device has so many' "1,0.0002,allocate,0x100000,1125899906842624,2,1,resize${end}$next,$end"
reads 1 'is allocated twice' "$row,$end"
many=$(awk 'BEGIN { for (i = 0; i < 460; i++) printf "%s%d", i ? "+" : "", i % 10 }')
reads 0 '"ops": 2,' "1,0.0002,free,0x100000,4096,2,1,after=$many$end"
reads 1 'longer than 1024 bytes' "1,0.0002,free,0x100000,4096,2,1,after=$many+$many$end"

count_verdicts
