#!/bin/sh
# compare.sh HOTPATH REPLAY - tables of galloc beside its peers, of the lines of JSON that build/hotpath and
# build/replay print. A ratio is the best peer's figure over galloc's: above 1 galloc is better; where it is not, LOSS
# and the peer's name are said. Either file may be missing or empty.

export LC_ALL=C # numbers have a point, whatever the locale
hotpath=$1 replay=$2

# Fields of a flat line of JSON, and how an allocator with its settings is called in a table.
common='
function field(name, text) {
    if (!match($0, "\"" name "\": *(\"[^\"]*\"|[^,}]*)")) return ""
    text = substr($0, RSTART, RLENGTH)
    sub(/^"[^"]*": */, "", text)
    gsub(/"/, "", text)
    return text
}
function column(allocator, conf) {
    if (allocator == "torch" && conf ~ /expandable_segments:True/) return "expandable"
    if (allocator == "galloc" && conf ~ /stream_check:off/) return "unchecked"
    return allocator
}
function is_peer(name) { return name == "async" || name == "cub" || name == "torch" || name == "expandable" }
# The lowest figure of a peer in a row; sets best_name.
function best_of(row, i, best) {
    best = ""
    best_name = ""
    for (i = 1; i <= PEERS; i++) {
        if (!((row, peer[i]) in figure)) continue
        if (best == "" || figure[row, peer[i]] < best) { best = figure[row, peer[i]]; best_name = peer[i] }
    }
    return best
}
function cell(row, name, digits) {
    if (!((row, name) in figure)) return sprintf(" %10s", "-")
    return sprintf(" %10." digits "f", figure[row, name])
}
BEGIN { PEERS = split("async cub torch expandable", peer, " ") }'

hotpath_table() {
    awk "$common"'
        {
            conf = field("conf")
            name = column(field("allocator"), conf)
            row = field("case") SUBSEP field("bytes") SUBSEP field("holes") SUBSEP field("threads")
            if (name == "driver" || name == "malloc" || (conf != "" && name == "galloc")) next
            if (!(row in seen)) { order[++rows] = row; seen[row] = 1 }
            figure[row, name] = field("ns_per_pair") + 0
        }
        END {
            if (!rows) { print "nothing was measured"; exit 1 }
            printf "%-30s %9s %5s %3s", "ns per pair", "bytes", "holes", "thr"
            printf " %10s %10s %10s %10s %10s %10s %10s  %s\n", "galloc", "unchecked", "cudamalloc", "async", "cub",
                "torch", "expandable", "best peer / galloc, / unchecked"
            for (r = 1; r <= rows; r++) {
                row = order[r]
                split(row, key, SUBSEP)
                printf "%-30s %9d %5d %3d", key[1], key[2], key[3], key[4]
                printf "%s%s%s", cell(row, "galloc", 1), cell(row, "unchecked", 1), cell(row, "cudamalloc", 1)
                for (i = 1; i <= PEERS; i++) printf "%s", cell(row, peer[i], 1)
                best = best_of(row)
                ours = (row, "galloc") in figure ? figure[row, "galloc"] : ""
                off = (row, "unchecked") in figure ? figure[row, "unchecked"] : ""
                if (best != "" && ours != "") {
                    compared++
                    printf "  %6.2f", best / ours
                    if (off != "") printf " %6.2f", best / off
                    if (best < ours) { losses++; printf "  LOSS to %s", best_name }
                } else if (best != "") printf "  galloc is missing"
                print ""
            }
            printf "%d cases beside a peer, in %d of them a peer is faster than galloc with its defaults\n", compared,
                losses
        }' "$hotpath"
}

# What is measured beside the allocators: the floor.
floor_table() {
    awk "$common"'
        function key(case_, conf, threads) { return case_ SUBSEP conf SUBSEP threads }
        field("allocator") == "malloc" { printf "C library, malloc + free of 512 bytes: %s ns\n", field("ns_per_pair") }
        field("allocator") == "driver" {
            conf = field("conf")
            if (!(conf in seen)) { order[++n] = conf; seen[conf] = 1 }
            ns[key(field("case"), conf, field("threads"))] = field("ns_per_pair") + 0
            rate[key(field("case"), conf, field("threads"))] = field("pairs_per_s") / 1e6
        }
        END {
            if (!n) exit
            printf "%-42s %10s %10s %16s %16s\n", "looks, at alloc and at free", "ns", "stream 0", "16 threads, M/s",
                "on one stream"
            for (i = 1; i <= n; i++)
                printf "%-42s %10.1f %10.1f %16.1f %16.1f\n", order[i], ns[key("looks", order[i], 1)],
                    ns[key("looks_default_stream", order[i], 1)], rate[key("looks", order[i], 16)],
                    rate[key("looks_one_stream", order[i], 16)]
        }' "$hotpath"
}

# One figure of every allocator on every trace, without those that were verified: the median of the rounds.
replay_figure() { # title, key, digits
    awk -v title="$1" -v key="$2" -v digits="$3" "$common"'
        function note(row, name, value, at) {
            at = ++rounds[row, name]
            for (; at > 1 && said[row, name, at - 1] > value; at--) said[row, name, at] = said[row, name, at - 1]
            said[row, name, at] = value
            figure[row, name] = said[row, name, int((rounds[row, name] + 1) / 2)]
        }
        field("verify_errors") == "null" && field(key) != "null" {
            row = field("trace")
            if (field("oom") > 0 || (field("allocator") == "galloc" && field("conf") != "")) next
            if (!(row in seen)) { order[++rows] = row; seen[row] = 1 }
            note(row, column(field("allocator"), field("conf")), field(key) + 0)
        }
        END {
            printf "%-24s %10s", title, "galloc"
            for (i = 1; i <= PEERS; i++) printf " %10s", peer[i]
            print "  best peer / galloc"
            for (r = 1; r <= rows; r++) {
                row = order[r]
                printf "%-24s%s", row, cell(row, "galloc", digits)
                for (i = 1; i <= PEERS; i++) printf "%s", cell(row, peer[i], digits)
                best = best_of(row)
                if (best != "" && (row, "galloc") in figure) {
                    ratio = best / figure[row, "galloc"]
                    printf "  %6.2f%s", ratio, ratio < 1 ? "  LOSS to " best_name : ""
                    ratios++
                    ratio_sum += log(ratio)
                    if (lowest == "" || ratio < lowest) lowest = ratio
                }
                print ""
                for (i = 0; i <= PEERS; i++) {
                    name = i ? peer[i] : "galloc"
                    if (!((row, name) in figure)) continue
                    n[name]++
                    sum[name] += log(figure[row, name])
                    if (figure[row, name] > most[name]) most[name] = figure[row, name]
                }
            }
            if (!rows) exit
            means = sprintf("%-24s", "geometric mean")
            worsts = sprintf("%-24s", "worst")
            for (i = 0; i <= PEERS; i++) {
                name = i ? peer[i] : "galloc"
                means = means (n[name] ? sprintf(" %10." digits "f", exp(sum[name] / n[name])) : sprintf(" %10s", "-"))
                worsts = worsts (n[name] ? sprintf(" %10." digits "f", most[name]) : sprintf(" %10s", "-"))
                if (n[name] && n[name] < rows) short = short " " name ": " n[name] " of " rows " traces."
            }
            if (ratios) means = means sprintf("  %6.2f", exp(ratio_sum / ratios))
            if (ratios) worsts = worsts sprintf("  %6.2f", lowest)
            print means
            print worsts
            if (short != "") print "incomplete:" short
            print ""
        }' "$replay"
}

# What only galloc and cudaMalloc can be asked, for the account sees their calls, and replays that were verified.
calls_table() {
    awk "$common"'
        BEGIN {
            printf "%-24s %-10s %8s %9s %9s %8s %12s %12s %6s %6s\n", "calls", "allocator", "calls", "ns, first",
                "ns, last", "held", "driver calls", "in last pass", "oom", "wrong"
        }
        field("driver_calls") != "null" && !seen[field("trace"), field("allocator"), field("verify_errors")]++ {
            wrong = field("verify_errors") == "null" ? "-" : field("verify_errors")
            warm = field("driver_calls_warm") == "null" ? "-" : field("driver_calls_warm")
            last = field("ns_per_op_warm") == "null" ? "-" : field("ns_per_op_warm")
            printf "%-24s %-10s %8d %9.1f %9s %8.4f %12d %12s %6d %6s\n", field("trace"), field("allocator"),
                field("ops"), field("ns_per_op"), last, field("reserved_ratio"), field("driver_calls"), warm,
                field("oom"), wrong
        }' "$replay"
}

if [ -s "$hotpath" ]; then
    hotpath_table
    echo
    floor_table
else
    echo "no pair was measured"
fi
echo
if [ -s "$replay" ]; then
    replay_figure 'ns per call, first pass' ns_per_op 1
    replay_figure 'ns per call, last pass' ns_per_op_warm 1
    replay_figure 'held / live, peaks' reserved_ratio 4
    calls_table
else
    echo "nothing was replayed"
fi
