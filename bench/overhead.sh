#!/bin/sh
# overhead.sh - what the setting `overhead` trades: memory held against driver time, over the ten traces on the
# simulated device. Writes bench/results/sim-overhead.csv; with --table prints that file's summary in the form that
# docs/experiments.md has.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
file=bench/results/sim-overhead.csv

table() {
    awk -F, '
        /^#/ || /^overhead,/ { next }
        !($1 in n) { order[++rows] = $1 }
        { n[$1]++; logs[$1] += log($3); ms[$1] += $4; moves[$1] += $6; looks[$1] += $8 }
        $3 > worst[$1] { worst[$1] = $3 }
        END {
            print "| overhead | held over live, mean | worst | driver time, all traces | looks | moves |"
            print "|---|---|---|---|---|---|"
            for (i = 1; i <= rows; i++) {
                o = order[i]
                printf "| %s | %.3f | %.3f | %.0f ms | %.0f ms | %d |\n", o, exp(logs[o] / n[o]), worst[o], ms[o],
                    looks[o], moves[o]
            }
        }' "$file"
}

measure() {
    commit=${GALLOC_COMMIT:-$(git describe --always --dirty --abbrev=10 2>/dev/null || echo unknown)}
    echo "# bench/overhead.sh: build/replay --json --conf overhead:VALUE bench/traces/*.csv.gz, simulated device" \
        "(141 GiB, costs measured on an H200); $(uname -m), $(date -u +%Y-%m-%d), commit $commit"
    echo "overhead,trace,reserved_ratio,driver_ms_model,driver_calls,moves,waits,looks_ms_model"
    for overhead in 0 0.01 0.02 0.03 0.05 0.1 0.2 1; do
        build/replay --json --conf "overhead:$overhead" bench/traces/*.csv.gz | awk -v overhead="$overhead" '
            function value(key) {
                if (!match($0, "\"" key "\": [^,}]+")) exit 1
                return substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4)
            }
            {
                trace = value("trace")
                gsub(/"/, "", trace)
                printf "%s,%s,%s,%.1f,%s,%s,%s,%.1f\n", overhead, trace, value("reserved_ratio"),
                    value("driver_us_model") / 1000, value("driver_calls"), value("moves"), value("waits"),
                    value("looks_us_model") / 1000
            }' || exit 1
    done
}

if [ "$1" = --table ]; then
    table
    exit
fi
make build/replay >/dev/null && measure >"$file.new" && mv "$file.new" "$file" && table
