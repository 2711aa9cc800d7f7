#!/bin/bash
# inside.sh - what it costs on a GPU to see inside: ns of an alloc/free pair of 64 KiB, over and over, and of a call in
# the fourth pass over four traces, with a history, stacks and guards, beside no such setting and stats:exact (which
# closes the stream caches too). The least of so many rounds, since other work on a host only adds.
#
# Environment
#   ROUNDS   3
#   BACKEND  sim: shows that it works, says nothing about a GPU

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda}
program=; [ "$backend" = sim ] || program=-cuda
settings="stats:exact history:100000 history:100000,history_stacks:8 debug:guards,debug_sample:1000
    debug:guards,debug_sample:10000 debug:guards+poison+quarantine,debug_sample:1000 debug:guards+poison+quarantine"
traces="gpt2_varlen llm_serve_kvgrow resnet_multiscale moe_multistream"

one_round() {
    for conf in '' $settings; do
        build/hotpath$program --backend "$backend" --only galloc --conf "$conf" --json |
            sed -n "s|.*\"case\": \"hot\",.*\"bytes\": 65536,.*\"ns_per_pair\": \([0-9.]*\).*|pair ${conf:-none} \1|p"
        case $conf in *stacks*) continue ;; esac
        for trace in $traces; do
            build/replay$program --backend "$backend" --json --repeat 4 --conf "$conf" "bench/traces/$trace.csv.gz" |
                sed -n "s|.*\"ns_per_op_warm\": \([0-9.]*\).*|$trace ${conf:-none} \1|p"
        done
    done
}

${MAKE:-make} -s build/hotpath build/replay >/dev/null || exit 1
tests/gpu/describe.sh
echo
for round in $(seq "${ROUNDS:-3}"); do one_round; done | awk -v traces="$traces" '
    { if (!(($1, $2) in least) || $3 < least[$1, $2]) least[$1, $2] = $3; if (!seen[$2]++) conf[++n] = $2 }
    END {
        columns = split("pair " traces, column)
        printf "%-50s", "ns, the least of the rounds"
        for (i = 1; i <= columns; i++) printf " %18s", column[i]
        print ""
        for (r = 1; r <= n; r++) {
            printf "%-50s", conf[r]
            for (i = 1; i <= columns; i++)
                printf " %18s", (column[i], conf[r]) in least ? sprintf("%.1f", least[column[i], conf[r]]) : "-"
            print ""
        }
    }'
