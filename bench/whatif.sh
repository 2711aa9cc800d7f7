#!/bin/sh
# whatif.sh [FOLDER] - writes the example of docs/what-if.md anew, text and chart: replay --what-if on one of the ten
# traces, on the simulated device. FOLDER, docs without it, gets what-if.md and what-if.svg. Environment: BUILD.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
folder=${1:-docs}
replay=${BUILD:-build}/replay

"$replay" --what-if --svg "$folder/what-if.svg" bench/traces/moe_multistream.csv.gz >"$folder/what-if.new" || exit 1
awk '
    NR == FNR { text = text $0 "\n"; next }
    /^```text$/ && !done { print; printf "%s", text; inside = done = 1; next }
    /^```$/ { inside = 0 }
    !inside
    END { exit !done }' "$folder/what-if.new" docs/what-if.md >"$folder/what-if.page" &&
    mv "$folder/what-if.page" "$folder/what-if.md" && rm "$folder/what-if.new"
