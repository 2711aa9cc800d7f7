#!/bin/bash
# gpu.sh - measures galloc on a GPU beside its peers: the cost of an alloc/free pair, the ten traces, the trace that
# came later, the driver's calls (calls.sh), and examples/02_reuse.cu. Writes what the programs say into a folder and
# ends in tables. A part that fails or takes too long is told at the end and keeps none of the others from being
# measured.
#
# Environment
#   OUT          the folder (bench/results); files begin with the name of the GPU
#   BACKEND=sim  the same on the simulated device, into build/bench-sim: shows that it works, says nothing about a GPU
#   VERIFY=1     also replays with queued work that writes and checks every byte of every block
#   CONFS        settings that galloc's pairs are measured with, with blanks between; "default" stands for none. Unset:
#                default, and stream_check:off where galloc knows it
#   ROUNDS       of replays, of which the tables have the median (3; 1 on the simulated device)
#   MINUTES      for everything together (8)
#   MAKE, NVCC, ARCH, PYTHON, GALLOC_COMMIT

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
backend=${BACKEND:-cuda}
[ "$backend" = sim ] && out=${OUT:-build/bench-sim} || out=${OUT:-bench/results}
traces=$(ls bench/traces/*.csv.gz)
later=$(ls bench/traces/later/*.csv.gz)
small="bench/traces/moe_multistream.csv.gz bench/traces/rnn_speech_varlen.csv.gz"
if [ "$backend" = sim ]; then
    export BACKEND
    device=sim
    variables=NVCC=
    peers=
    rounds=${ROUNDS:-1}
    devices="--devices 2"
else
    device=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1 |
        tr 'A-Z' 'a-z' | tr -cs 'a-z0-9\n' -)
    variables=${NVCC:+NVCC=$NVCC}
    peers="async cub torch expandable"
    rounds=${ROUNDS:-3}
    devices=
    [ -n "$device" ] || { echo "no GPU: nothing was measured"; exit 2; }
fi
replay_file=$out/$device-replay.jsonl
later_file=$out/$device-replay-later.jsonl
hotpath_file=$out/$device-hotpath.jsonl
reuse_file=$out/$device-reuse.txt
summary_file=$out/$device-summary.txt
complaints=$out/$device-complaints.txt
deadline=$(($(date +%s) + ${MINUTES:-8} * 60 - 15))
problems=

# ---- measuring ------------------------------------------------------------------------------------------------------

problem() {
    echo "FAILED $*" >&2
    problems="$problems$*
"
}

# Runs a command for so long at most, and no longer than there is time for everything.
limited() { # seconds, what it is, command...
    seconds=$1 what=$2
    shift 2
    left=$((deadline - $(date +%s)))
    [ $left -ge "$seconds" ] || seconds=$left
    [ "$seconds" -gt 0 ] || { problem "$what: no time was left"; return 1; }
    timeout -k 5 "$seconds" "$@"
    status=$?
    case $status in
    0) return 0 ;;
    124 | 137) problem "$what: not done after $seconds s" ;;
    *) problem "$what: exit status $status" ;;
    esac
    return 1
}

build() {
    programs="build/replay build/hotpath"
    [ "$backend" = sim ] || programs="$programs build/examples/02_reuse-cuda"
    # shellcheck disable=SC2086 # words
    limited 200 "the build" ${MAKE:-make} -k $variables $programs >"$out/$device-build.log" 2>&1 &&
        rm -f "$out/$device-build.log" && return
    echo "FAILED the build:"
    tail -n 40 "$out/$device-build.log"
}

# shellcheck disable=SC2086 # words
measure_pairs() {
    : >"$hotpath_file"
    set --
    for conf in $CONFS; do
        [ "$conf" != default ] || conf=
        set -- "$@" --conf "$conf"
    done
    limited 240 hotpath build/hotpath --json --backend "$backend" $devices "$@" >>"$hotpath_file"
}

measure_reuse() {
    [ "$backend" = cuda ] || return 0
    limited 60 02_reuse build/examples/02_reuse-cuda >"$reuse_file"
}

replay() { # what it is, options...
    what=$1
    shift
    limited 60 "replay of $what" build/replay --json --backend "$backend" "$@"
}

has_peer() {
    [ "$1" = expandable ] && set -- torch
    build/hotpath-cuda --list | grep "^ *$1 " | grep -qv 'not built\|without'
}

# All allocators on a trace, one right after the other; all of it so many times, for other work on the machine disturbs
# some of them.
replay_all() {
    : >"$replay_file"
    : >"$later_file"
    for round in $(seq "$rounds"); do
        for trace in $traces; do replay_beside_peers "$trace"; done >>"$replay_file"
        for trace in $later; do replay_beside_peers "$trace"; done >>"$later_file"
    done
    for trace in $small; do
        replay "$(basename "$trace" .csv.gz), cudamalloc" --repeat 2 --allocator cudamalloc "$trace" >>"$replay_file"
    done
    [ -n "$VERIFY" ] || return 0
    for trace in $traces; do
        replay "$(basename "$trace" .csv.gz), verified" --busy --verify "$trace" >>"$replay_file"
    done
}

replay_beside_peers() { # trace
    trace=$1
    name=$(basename "$trace" .csv.gz)
    replay "$name" --repeat 3 "$trace"
    for peer in $present; do
        case $peer in
        torch) replay "$name, torch" --repeat 3 --allocator torch --conf "" "$trace" ;;
        expandable)
            replay "$name, torch expandable" --repeat 3 --allocator torch --conf expandable_segments:True "$trace"
            ;;
        *) replay "$name, $peer" --repeat 3 --allocator "$peer" "$trace" ;;
        esac
    done
}

# ---- tables ---------------------------------------------------------------------------------------------------------

summary() {
    tests/gpu/describe.sh
    echo "peers"
    if [ "$backend" = sim ]; then build/hotpath --list; else build/hotpath-cuda --list; fi
    echo
    bench/compare.sh "$hotpath_file" "$replay_file"
    if [ -s "$reuse_file" ]; then
        cat "$reuse_file"
        echo
    fi
    sed -n '/^== summary/,$p' "$out/$device-calls.txt"
    sed '/^FAILED/d' "$complaints"
    printf '%s' "$problems" | sed 's/^/FAILED /'
    echo "$(printf '%s' "$problems" | grep -c .) parts failed, $(($(date +%s) - started)) s"
}

started=$(date +%s)
tests/gpu/describe.sh
mkdir -p "$out" && rm -f "$reuse_file" "$replay_file" "$later_file" "$hotpath_file" || exit 1
exec 2> >(tee "$complaints" >&2)
echo
build
present=
for peer in $peers; do
    if has_peer $peer; then present="$present $peer"; else problem "$peer was not built"; fi
done
measure_pairs
measure_reuse
replay_all
limited 120 calls env OUT="$out" bench/calls.sh >/dev/null
echo
sleep 1 # until the last complaint is in its file
summary >"$summary_file"
{
    tests/gpu/describe.sh
    printf '\na trace that came later: no rule and no setting was chosen by it\n\n'
    bench/compare.sh /dev/null "$later_file"
} >"$out/$device-later.txt"
sed 1,7d "$out/$device-later.txt"
cat "$summary_file"
rm -f "$complaints"
[ -z "$problems" ]
