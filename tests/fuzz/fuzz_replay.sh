#!/bin/bash
# fuzz_replay.sh - runs build/fuzz/replay, under ASan and UBSan, for FUZZ_SECONDS: on the traces that fuzz_trace has
# found, and on changed rows of bench/traces, with random options, right ones and wrong ones. It ends within a minute,
# with a status that --help names. A trace and options that do otherwise are kept in build/fuzz/.
# Environment: FUZZ_SECONDS, FUZZ_FROM (the seed; the time without it), BUILD.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1
work=${BUILD:-build}/fuzz
RANDOM=$((${FUZZ_FROM:-$(date +%s)} % 32768))
seed=$RANDOM runs=0 taken=0
RANDOM=$seed
end=$((SECONDS + ${FUZZ_SECONDS:-60}))
found=("$work"/fuzz_trace.corpus/*) logs=(bench/traces/*.gz)
options=(--json --no-room --busy --verify --threads --calls --fit --what-if --help --repeat=2 --repeat=0 --repeat=x
    --limit-mib=1 --limit-mib=64 --limit-mib=99999999999999999999 "--timeline=$work/out.csv" "--svg=$work/out.svg"
    "--snapshot=$work/out.json" "--snapshot=$work/out.pickle" --timeline=/nowhere/x --allocator=cudamalloc
    --allocator=x --backend=sim --conf=overhead:0 --conf=like:pytorch --conf=backend:cudaMalloc --conf=x:1
    --conf=history:100,history_stacks:4 --conf=guards:True '--conf=roundup_power2_divisions:[256:1,>:4]' --conf=)
words=(0 1 -1 9 0x7f00 512 4096 99999999 1125899906842624 18446744073709551615 allocate free 12:00:00 nan '' "$RANDOM")

# Rows of a trace, some of them with another word in one field, twice, or left out.
changed() {
    gzip -dc "${logs[RANDOM % ${#logs[@]}]}" | tail -n +$((1 + RANDOM % 2)) | head -n $((2 + RANDOM % 300)) |
        awk -F, -v OFS=, -v seed=$RANDOM -v words="${words[*]}" '
            BEGIN { srand(seed); n = split(words, word, " "); rare = 2 + int(rand() * rand() * 3000) }
            NR > 1 && rand() * rare < 1 { $(1 + int(rand() * 6)) = word[1 + int(rand() * n)] }
            NR == 1 || rand() * rare > 0.3
            NR > 1 && rand() * rare < 0.3'
}

while [ "$SECONDS" -lt "$end" ]; do
    if [ -e "${found[0]}" ] && [ $((RANDOM % 2)) = 0 ]; then cp "${found[RANDOM % ${#found[@]}]}" "$work/replay.csv"
    else changed >"$work/replay.csv" 2>/dev/null; fi
    with=()
    for ((i = RANDOM % 4; i > 0; i--)); do with+=("${options[RANDOM % ${#options[@]}]}"); done
    timeout 60 "$work/replay" "${with[@]}" "$work/replay.csv" >"$work/replay.out" 2>&1
    status=$?
    runs=$((runs + 1))
    [ "$status" != 0 ] || taken=$((taken + 1))
    if [ "$status" -gt 3 ] || grep -qE 'Sanitizer|runtime error' "$work/replay.out"; then
        cp "$work/replay.csv" "$work/replay.finding"
        echo "fuzz_replay.sh: status $status: replay ${with[*]} $work/replay.finding, after $runs runs, seed $seed"
        tail -n 30 "$work/replay.out"
        exit 1
    fi
done
echo "fuzz_replay.sh: $runs runs, $taken of them took the trace, seed $seed"
