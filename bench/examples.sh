#!/bin/bash
# examples.sh PROGRAM... - runs the examples and ends in one table of what galloc gains, and a picture of it. `make
# run-examples` calls it: on a GPU where there is one, else on the simulated device.
#     examples.sh --table FILE, --svg FILE    the table or the picture of a file of results
#
# Environment
#   OUT          the folder of the results, NAME-examples.jsonl and NAME-examples.txt, where NAME is that of the GPU or
#                "sim" (build). With bench/results they can be committed
#   SVG          the picture (build/examples.svg)
#   GALLOC_COMMIT, NVCC

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1

# ---- a table, a picture ---------------------------------------------------------------------------------------------

# Reads the lines of JSON, one for each allocator; then each case, in order, is a row of what `write` gives.
# shellcheck disable=SC2016 # awk
read_results='
    function member(name,    text) {
        text = $0
        if (!sub(".*\"" name "\": *\"?", "", text)) return ""
        sub(/[",}].*/, "", text)
        return text
    }
    /^#/ { source = substr($0, 3) }
    /^{/ {
        key = member("example") " us per " substr(member("unit"), 8)
        if (!(key in seen)) { seen[key] = 1; cases[++n] = key }
        who = member("allocator")
        device = member("device")
        median[key, who] = member("median")
        least[key, who] = member("least")
        most[key, who] = member("most")
    }'

table() { # file
    awk "$read_results"'
        function gain(key, who) {
            if (median[key, who] == "" || median[key, "galloc"] <= 0) return "-"
            return sprintf("%.2f times", median[key, who] / median[key, "galloc"])
        }
        function us(key, who) { return median[key, who] == "" ? "-" : sprintf("%.2f", median[key, who]) }
        END {
            print device == "simulated device" ? "simulated device: what CUDA calls take on an H200'"'"'s host" : device
            printf "%-34s %11s %15s %9s   %s\n", "", "cudaMalloc", "cudaMallocAsync", "galloc",
                   "gain over cudaMalloc, cudaMallocAsync"
            for (i = 1; i <= n; i++) {
                k = cases[i]
                printf "%-34s %11s %15s %9s   %14s %14s\n", k, us(k, "cudaMalloc"), us(k, "cudaMallocAsync"),
                       us(k, "galloc"), gain(k, "cudaMalloc"), gain(k, "cudaMallocAsync")
            }
        }' "$1"
}

# Bars on a logarithmic axis, with the spread over the rounds of both sides.
svg() { # file
    awk "$read_results"'
        function x(gain) { return 250 + (gain < low ? 0 : log(gain / low) / log(high / low)) * 480 }
        function bar(key, who, y, class,    m, l, h) {
            if (median[key, who] == "") return
            m = median[key, who] / median[key, "galloc"]
            l = least[key, who] / most[key, "galloc"]
            h = most[key, who] / least[key, "galloc"]
            printf "<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"11\"/>\n", class,
                   m < 1 ? x(m) : x(1), y, m < 1 ? x(1) - x(m) : x(m) - x(1)
            printf "<path class=\"spread\" d=\"M%.1f %.1fH%.1f\"/>\n", x(l), y + 5.5, x(h)
            printf "<text x=\"%.1f\" y=\"%d\">%.2f</text>\n", x(h > 1 ? h : 1) + 5, y + 10, m
        }
        END {
            low = 0.5; high = 2
            for (i = 1; i <= n; i++) {
                m = median[cases[i], "cudaMalloc"] / (median[cases[i], "galloc"] + 1e-9)
                while (m > high * 0.8) high *= 2
            }
            height = 96 + 40 * n
            printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 800 %d\" font-family=\"sans-serif\" " \
                   "font-size=\"12\">\n<title>Examples: time with other allocators, galloc = 1</title>\n", height
            print "<style>text{fill:#222}.faint{fill:#666}.malloc{fill:#b3541e}.async{fill:#2a6fb0}" \
                  ".spread,.axis{stroke:#222;fill:none}.grid{stroke:#ddd}.back{fill:#fff}" \
                  "@media(prefers-color-scheme:dark){text{fill:#eee}.faint{fill:#aaa}.malloc{fill:#e58a50}" \
                  ".async{fill:#6fb1ee}.spread,.axis{stroke:#eee}.grid{stroke:#444}.back{fill:#151515}}</style>"
            printf "<rect class=\"back\" width=\"800\" height=\"%d\"/>\n", height
            printf "<text x=\"12\" y=\"22\" font-size=\"15\">Time per step with other allocators, galloc = 1%s</text>" \
                   "\n", device == "simulated device" ? "; simulated: what the CUDA calls take" : ""
            print "<rect class=\"malloc\" x=\"12\" y=\"34\" width=\"11\" height=\"11\"/><text x=\"28\" y=\"44\">" \
                  "cudaMalloc</text><rect class=\"async\" x=\"110\" y=\"34\" width=\"11\" height=\"11\"/>" \
                  "<text x=\"126\" y=\"44\">cudaMallocAsync</text><text class=\"faint\" x=\"250\" y=\"44\">" \
                  "logarithmic; lines: the spread over the rounds</text>"
            for (t = 1; t <= high; t *= high > 64 ? 4 : 2) {
                printf "<path class=\"%s\" d=\"M%.1f 56V%d\"/><text class=\"faint\" x=\"%.1f\" y=\"%d\">%d</text>\n",
                       t == 1 ? "axis" : "grid", x(t), height - 36, x(t) - 4, height - 22, t
            }
            for (i = 1; i <= n; i++) {
                label = cases[i]
                sub(/ us per /, ", ", label)
                printf "<text x=\"12\" y=\"%d\">%s</text>\n", 40 * i + 40, label
                bar(cases[i], "cudaMalloc", 40 * i + 24, "malloc")
                bar(cases[i], "cudaMallocAsync", 40 * i + 37, "async")
            }
            gsub(/&/, "\\&amp;", source)
            gsub(/</, "\\&lt;", source)
            printf "<text class=\"faint\" x=\"12\" y=\"%d\" font-size=\"10\">%s</text>\n</svg>\n", height - 6, source
        }' "$1"
}

case $1 in
--table) table "$2" && exit ;;
--svg) svg "$2" && exit ;;
esac

# ---- running --------------------------------------------------------------------------------------------------------

out=${OUT:-build}
picture=${SVG:-build/examples.svg}
case $1 in
*-cuda) gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1) ;;
*) export BACKEND=sim gpu= ;;
esac
name=${gpu:-sim}
name=$(printf '%s\n' "$name" | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' -)
export EXAMPLES_JSON=$out/$name-examples.jsonl
log=$out/$name-examples.txt
mkdir -p "$out" build || exit 1

# One line: what was called, on what, when.
tests/gpu/describe.sh >"$log"
awk -v command="make run-examples" '
    { name = $1; sub(/^[^ ]+ +(none: )?/, ""); of[name] = $0 }
    END {
        text = "# " command "; " of["GPU"]
        if (of["driver"] != "") text = text ", driver " of["driver"] ", CUDA " of["CUDA"]
        print text ", " of["host"] ", " of["date"] ", galloc " of["galloc"]
    }' "$log" >"$EXAMPLES_JSON"

failed=
for program; do
    {
        echo
        timeout "${EXAMPLE_SECONDS:-300}" "$program" 2>&1
        status=$?
        [ $status -eq 0 ] || echo "FAILED $program: exit status $status"
    } | tee -a "$log"
    tail -n 1 "$log" | grep -q "^FAILED" && failed="$failed $program"
done

svg "$EXAMPLES_JSON" >"$picture"
{
    echo
    table "$EXAMPLES_JSON"
    for program in $failed; do echo "FAILED $program"; done
} | tee -a "$log"
echo
echo "$log, $EXAMPLES_JSON, $picture"
[ -z "$failed" ]
