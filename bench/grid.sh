#!/bin/sh
# grid.sh - strategy:heuristic beside a grid of configurations set by hand, over the ten traces on the simulated device:
# memory held and driver time. Writes bench/results/sim-grid.csv; with --table prints that file's summary as
# docs/experiments.md has it.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
file=bench/results/sim-grid.csv

# For each trace: the best of the grid in either figure; what heuristic has; how far that is from the best in memory
# (held), in driver time (time), in the time of those of the grid that hold no more (time so), in the memory of those
# that take no more time (held so), and in both weighed together (both): a percent of memory is worth the time of
# creating the peak of live bytes once, in pages of 64 MiB (2.37 us a MiB with the model's costs).
table() {
    awk -F, '
        /^#/ || /^name,/ { next }
        { name[NR] = $1; trace[NR] = $3; held[NR] = $5; ms[NR] = $6 / 1000
          both[NR] = held[NR] + ms[NR] / ($4 * 0.00237) / 100
          if (!($3 in seen)) { order[++rows] = $3; seen[$3] = 1 } }
        END {
            print "| trace | least held | least time | heuristic | held | time | time so | held so | both |"
            print "|---|---|---|---|---|---|---|---|---|"
            for (i = 1; i <= rows; i++) {
                t = order[i]
                for (l in name) if (trace[l] == t && name[l] == "heuristic") h = l
                m = d = b = 1e9
                at = ms[h]
                in_time = held[h]
                for (l in name) {
                    if (trace[l] != t || name[l] == "heuristic") continue
                    if (held[l] < m) m = held[l]
                    if (ms[l] < d) d = ms[l]
                    if (held[l] <= held[h] && ms[l] < at) at = ms[l]
                    if (ms[l] <= ms[h] && held[l] < in_time) in_time = held[l]
                    if (both[l] < b) b = both[l]
                }
                printf "| %s | %.3f | %.1f ms | %.3f, %.1f ms | ", t, m, d, held[h], ms[h]
                printf "%+.1f %% | %+.0f %% | %+.0f %% | %+.1f %% | %+.1f %% |\n", 100 * (held[h] / m - 1),
                    100 * (ms[h] / d - 1), 100 * (ms[h] / at - 1),
                    100 * (held[h] / in_time - 1), 100 * (both[h] / b - 1)
            }
        }' "$file"
}

measure() { # name, configuration
    build/replay --json --conf "$2" bench/traces/*.csv.gz | awk -v name="$1" -v conf="$2" '
        function value(key) {
            if (!match($0, "\"" key "\": [^,}]+")) exit 1
            text = substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4)
            gsub(/"/, "", text)
            return text
        }
        {
            gsub(/,/, " ", conf)
            printf "%s,%s,%s,%.0f,%s,%s,%s,%s\n", name, conf, value("trace"), value("peak_live_bytes") / 1048576,
                value("reserved_ratio"), value("driver_us_model"), value("driver_calls"), value("moves")
        }'
}

measure_all() {
    commit=${GALLOC_COMMIT:-$(git describe --always --dirty --abbrev=10 2>/dev/null || echo unknown)}
    echo "# bench/grid.sh: build/replay --json --conf CONFIGURATION bench/traces/*.csv.gz, simulated device (141 GiB," \
        "costs measured on an H200); $(uname -m), $(date -u +%Y-%m-%d), commit $commit"
    echo "name,configuration,trace,peak_live_mib,reserved_ratio,driver_us_model,driver_calls,moves"
    for overhead in 0 0.01 0.02 0.05 0.1 0.2 1; do
        for growth in auto 2M 16M 64M 256M; do
            measure "pages-$overhead-$growth" "overhead:$overhead,growth:$growth" || exit 1
        done
    done
    measure fixed expandable_segments:False || exit 1
    measure fixed-large expandable_segments:False,large_segment_size:64M || exit 1
    measure heuristic strategy:heuristic || exit 1
}

if [ "$1" = --table ]; then
    table
    exit
fi
make build/replay >/dev/null && measure_all >"$file.new" && mv "$file.new" "$file" && table
