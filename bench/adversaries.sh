#!/bin/sh
# adversaries.sh - what galloc makes of traces that are built to hurt (bench/adversary.c), on the simulated device:
# memory held, the least limit, driver time, moves. Writes bench/results/sim-adversaries.csv and prints a table of it;
# with --table prints that of the file there is, in the form that docs/experiments.md has. Takes a few minutes.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
file=bench/results/sim-adversaries.csv
traces=build/adversaries

table() {
    awk -F, '
        /^#/ || /^trace,/ { next }
        !($1 in calls) { order[++rows] = $1 }
        { calls[$1] = $3; held[$1, $2] = $5; ms[$1, $2] = $8 }
        $2 == "defaults" { fit[$1] = $6; moves[$1] = $11 }
        $2 == "repeat 3" { warm[$1] = 1e6 * $9 / $3 }
        $2 == "busy" { busy[$1] = $13 ? sprintf("%.0f %%", 100 * $14 / $13) : "-" }
        END {
            print "| trace | held over live | overhead 0 | busy | least limit | driver time | overhead 0" \
                " | third pass | moves | in use |"
            print "|---|---|---|---|---|---|---|---|---|---|"
            for (i = 1; i <= rows; i++) {
                t = order[i]
                printf "| %s | %.3f | %.3f | %.3f | %.3f | %.0f ms | %.0f ms | %.0f ns | %d | %s |\n", t,
                    held[t, "defaults"], held[t, "overhead 0"], held[t, "busy"], fit[t], ms[t, "defaults"],
                    ms[t, "overhead 0"], warm[t], moves[t], busy[t]
            }
        }' "$file"
}

measure() { # what the run is called, options...
    run=$1
    shift
    for trace in $traces/*.csv; do
        build/replay --json "$@" "$trace" || { echo "replay $* $trace: exit status $?" >&2; exit 1; }
    done | awk -v run="$run" '
        function value(key) {
            if (!match($0, "\"" key "\": [^,}]+")) exit 1
            text = substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4)
            gsub(/"/, "", text)
            return text == "null" ? "" : text
        }
        function ms(key) {
            return value(key) == "" ? "" : sprintf("%.1f", value(key) / 1000)
        }
        {
            printf "%s,%s,%s,%.0f,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s\n", value("trace"), run, value("ops"),
                value("peak_live_bytes") / 1048576, value("reserved_ratio"), value("fit_ratio"), value("oom"),
                ms("driver_us_model"), ms("driver_us_model_warm"), value("driver_calls"), value("moves"),
                value("waits"), value("moves_seen"), value("moves_busy"), value("handovers"), value("handovers_busy")
        }'
}

measure_all() {
    commit=${GALLOC_COMMIT:-$(git describe --always --dirty --abbrev=10 2>/dev/null || echo unknown)}
    echo "# bench/adversaries.sh: build/replay --json over the traces of build/adversary, seed 1; defaults: --fit;" \
        "overhead 0: --conf overhead:0; busy: --busy --verify; repeat 3: --repeat 3; simulated device (141 GiB, costs" \
        "measured on an H200); $(uname -m), $(date -u +%Y-%m-%d), commit $commit"
    columns='trace,run,calls,peak_live_mib,reserved_ratio,fit_ratio,oom,driver_ms_model,driver_ms_model_warm'
    echo "$columns,driver_calls,moves,waits,moves_seen,moves_busy,handovers,handovers_busy"
    measure defaults --fit
    measure 'overhead 0' --conf overhead:0
    measure busy --busy --verify
    measure 'repeat 3' --repeat 3
}

if [ "$1" = --table ]; then
    table
    exit
fi
make build/replay build/adversary >/dev/null && rm -rf $traces && mkdir -p $traces && build/adversary $traces || exit 1
measure_all >"$file.new" && [ "$(wc -l <"$file.new")" -eq $((2 + 4 * $(ls $traces | wc -l))) ] || exit 1
mv "$file.new" "$file" && table
