#!/bin/sh
# galloc-trace.sh SNAPSHOT.json >TRACE - the history in a snapshot (JSON, perhaps with gzip) as a trace in RMM's format,
# which build/replay replays: with other settings, on the simulated device. A history does not know of threads. Only
# blocks that it has from their allocation on are in the trace.

export LC_ALL=C # numbers have a point, whatever the locale
[ $# -eq 1 ] && [ -f "$1" ] && [ -r "$1" ] || {
    echo "usage: galloc-trace.sh SNAPSHOT.json >TRACE; the snapshot of a pool with a history" >&2
    exit 2
}
[ "$(gzip -cdf <"$1" 2>/dev/null | head -c 1)" = "{" ] || {
    echo "galloc-trace.sh: $1 is no snapshot in JSON: save one as galloc_snapshot_save(pool, \"name.json\")" >&2
    exit 2
}
gzip -cdf <"$1" | awk '
    function number(key,   text) {
        if (!match($0, "\"" key "\":[0-9]+")) return ""
        text = substr($0, RSTART, RLENGTH)
        sub(/.*:/, "", text)
        return text
    }
    BEGIN { RS = "{" }
    /^"action":"(alloc|free_requested)",/ {
        action = /^"action":"alloc"/ ? "allocate" : "free"
        print number("time_us"), action, number("addr"), number("size"), number("stream")
    }' | sort -s -n -k 1,1 | awk ' # the history of each device has its own order
    # A number below 2^53 in hexadecimal digits. (%x of mawk ends at 2^32.)
    function hex(n,   text) {
        for (text = ""; n >= 16; n = int(n / 16)) text = substr("0123456789abcdef", n % 16 + 1, 1) text
        return "0x" substr("0123456789abcdef", n + 1, 1) text
    }
    function row(size) {
        if (begun == "") begun = $1
        printf "0,%.6f,%s,%s,%s,%s\n", ($1 - begun) / 1e6, $2, hex($3 + 0), size, $5
    }
    BEGIN { print "Thread,Time,Action,Pointer,Size,Stream" }
    $2 == "allocate" {
        row(bytes[$3] = $4)
        rows++
        next
    }
    !($3 in bytes) { older++; next }
    {
        row(bytes[$3])
        delete bytes[$3]
    }
    END {
        if (older) print "galloc-trace.sh: " older " blocks are older than the history" >"/dev/stderr"
        if (!rows) print "galloc-trace.sh: no allocation is in the history" >"/dev/stderr"
        exit !rows
    }'
