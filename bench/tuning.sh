#!/bin/sh
# tuning.sh - what settings trade, over the ten traces on the simulated device: memory held at most and on the average
# against driver time. Writes bench/results/sim-tuning.csv; with --table prints that file's summary as docs/tuning.md
# has it. Rows of --busy have queued work, well behind the host, use every block; rows of a limit are held to 1.25
# times the trace's peak of live bytes, of which gc_threshold is a fraction; rows of --fit find the smallest limit that
# serves.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
file=bench/results/sim-tuning.csv

table() {
    awk -F, '
        /^#/ || /^options,/ { next }
        { s = $1 == "" ? $2 : $1 " " $2 }
        !(s in n) { order[++rows] = s }
        { n[s]++; logs[s] += log($4); means[s] += log($5); ms[s] += $6; calls[s] += $7; moves[s] += $8 }
        { waits[s] += $9; collections[s] += $10; fit[s] += $11 == "null" ? 0 : log($11) }
        END {
            printf "| settings | held at most | on the average | driver time | calls | moves | waits |"
            print " collections | fits |"
            print "|---|---|---|---|---|---|---|---|---|"
            for (i = 1; i <= rows; i++) {
                s = order[i]
                printf "| %s | %.3f | %.3f | %.0f ms | %d | %d | %d | %d | %s |\n", s, exp(logs[s] / n[s]),
                    exp(means[s] / n[s]), ms[s], calls[s], moves[s], waits[s], collections[s],
                    fit[s] ? sprintf("%.3f", exp(fit[s] / n[s])) : ""
            }
        }' "$file"
}

run() { # options for the file, settings, trace, options of replay
    options=$1 conf=$2 trace=$3
    shift 3
    shown=$(echo "${conf:-default}" | tr ',' ' ')
    build/replay --json "$@" --conf "$conf" "$trace" | awk -v options="$options" -v conf="$shown" '
        function value(key) {
            if (!match($0, "\"" key "\": [^,}]+")) exit 1
            return substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4)
        }
        {
            trace = value("trace")
            gsub(/"/, "", trace)
            printf "%s,%s,%s,%s,%.4f,%.1f,%s,%s,%s,%s,%s\n", options, conf, trace, value("reserved_ratio"),
                value("mean_reserved_bytes") / value("peak_live_bytes"), value("driver_us_model") / 1000,
                value("driver_calls"), value("moves"), value("waits"), value("collections"),
                value("fit_ratio")
        }'
}

measure() {
    commit=${GALLOC_COMMIT:-$(git describe --always --dirty --abbrev=10 2>/dev/null || echo unknown)}
    echo "# bench/tuning.sh: build/replay --json OPTIONS --conf SETTINGS bench/traces/*.csv.gz, simulated device" \
        "(141 GiB, costs measured on an H200); $(uname -m), $(date -u +%Y-%m-%d), commit $commit"
    echo "options,settings,trace,reserved_ratio,mean_reserved_ratio,driver_ms_model,driver_calls,moves,waits"\
",collections,fit_ratio"
    for conf in "" overhead:0 overhead:0.2 growth:2M growth:16M growth:64M growth:256M expandable_segments:False; do
        for trace in bench/traces/*.csv.gz; do run "" "$conf" "$trace" || return 1; done
    done
    for conf in "" reuse:completed+followed reuse:none expandable_segments:False; do
        for trace in bench/traces/*.csv.gz; do run --busy "$conf" "$trace" --busy || return 1; done
    done
    for conf in "" expandable_segments:False; do
        for trace in bench/traces/*.csv.gz; do run --fit "$conf" "$trace" --fit || return 1; done
    done
    for conf in "" gc_threshold:0.8 gc_threshold:0.6 gc_threshold:0.4 growth:16M growth:16M,gc_threshold:0.6; do
        for trace in bench/traces/*.csv.gz; do
            live=$(build/replay --json "$trace" | sed 's/.*"peak_live_bytes": \([0-9]*\).*/\1/')
            run limit "$conf" "$trace" --limit-mib $((live / 1048576 * 5 / 4)) || return 1
        done
    done
}

if [ "$1" = --table ]; then
    table
    exit
fi
make build/replay >/dev/null && measure >"$file.new" && mv "$file.new" "$file" && table
