#!/bin/sh
# check_peers.sh - the frame in which galloc is measured beside others: build/hotpath's options and lines, what happens
# when an allocator fails or is not built in, and the tables that are made of the figures. Environment: BUILD, CXX.

cd "$(dirname "$0")/../.." || exit 1
hotpath=${BUILD:-build}/hotpath
work=${BUILD:-build}/check_peers

. tests/support/verdicts.sh

ends() { # status, command...
    expected=$1
    shift
    "$@" >"$work/out" 2>&1
    status=$?
    [ $status -eq "$expected" ]
    verdict $? "status $status, not $expected: $*"
}

says() { # pattern, what that means
    grep -q "$1" "$work/out"
    verdict $? "$2"
}

# ---- hotpath --------------------------------------------------------------------------------------------------------

pattern='^{'
for key in case allocator bytes holes threads conf ns_per_pair; do pattern="$pattern\"$key\": [^ ]*, "; done
pattern="$pattern\"pairs_per_s\": [0-9]*}\$"

ends 0 "$hotpath" --json --only malloc
says "$pattern" 'a line with all keys'
ends 0 "$hotpath" --allocator malloc
says '^case .*allocator' 'the table has a head'
ends 0 "$hotpath" --json --only driver --conf capturing+id,capturing
says '"looks", "allocator": "driver", "bytes": 0, "holes": 0, "threads": 16, ' 'looks from 16 threads'
ends 0 "$hotpath" --list
says '^  torch  *with --backend cuda' 'what is not built in is listed'

ends 1 env GALLOC_CONF=foo:1 "$hotpath" --json --allocator galloc --allocator malloc
says 'galloc with settings "" failed' 'the allocator that failed is named'
says '"allocator": "malloc"' 'the others are measured all the same'
ends 1 "$hotpath" --allocator driver --conf capturing,foo
ends 1 "$hotpath" --allocator malloc --conf foo:1
says 'malloc has none' 'settings for an allocator that has none are refused'
ends 2 "$hotpath" --allocator torch
says 'torch is not built in' 'an allocator that is not built in is told'
ends 2 "$hotpath" --allocator foo
ends 2 "$hotpath" --conf foo:1
ends 2 "$hotpath" --devices 0
ends 2 "$hotpath" --backend foo
ends 2 "$hotpath" foo

# ---- PyTorch is not there, or not fit -------------------------------------------------------------------------------

torch() { # what a Python says that is asked for PyTorch
    printf '#!/bin/sh\n%s\n' "$1" >"$work/python" && chmod +x "$work/python"
    ends 0 env PYTHON="$PWD/$work/python" bench/peer_torch.sh "$work/peer.so"
    [ ! -e "$work/peer.so" ]
    verdict $? 'nothing is built'
    cat "$work/peer.txt" >"$work/out"
}
torch 'exit 1'
says '^not built: .* has no PyTorch' 'no PyTorch'
torch 'echo /nowhere 2.11.0+cpu None'
says '^not built: PyTorch 2.11.0+cpu is not for CUDA' 'PyTorch for the CPU'
torch 'echo /no where 2.11.0 13.0'
says '^not built: PyTorch 2.11.0 has no libc10_cuda.so in /no where/lib' 'PyTorch without its library'
if command -v "${CXX:-g++}" >/dev/null 2>&1; then
    mkdir -p "$work/torch/lib" "$work/torch/include/c10/cuda"
    : >"$work/torch/lib/libc10_cuda.so"
    echo '#error "of another kind"' >"$work/torch/include/c10/cuda/CUDACachingAllocator.h"
    torch "echo $PWD/$work/torch 9.9.9 13.0"
    says '^not built: PyTorch 9.9.9 does not compile: .*error' 'PyTorch that does not compile'
else
    echo "skipped: no C++ compiler, which PyTorch needs"
fi

# ---- tables ---------------------------------------------------------------------------------------------------------

pair() { # case, allocator, settings, ns
    echo "{\"case\": \"$1\", \"allocator\": \"$2\", \"bytes\": 512, \"holes\": 0, \"threads\": 1, \"conf\": \"$3\"," \
        "\"ns_per_pair\": $4, \"pairs_per_s\": 1000}"
}
trace() { # trace, allocator, settings, ns of the first pass, of the last, held over live, out-of-memory
    echo "{\"trace\": \"$1\", \"allocator\": \"$2\", \"ops\": 10, \"reserved_ratio\": $6, \"oom\": $7," \
        "\"ns_per_op\": $4, \"ns_per_op_warm\": $5, \"driver_calls\": null, \"driver_calls_warm\": null," \
        "\"verify_errors\": null, \"conf\": \"$3\"}"
}
{
    pair hot galloc '' 80.0
    pair hot galloc stream_check:off 20.0
    pair hot galloc overhead:1 1.0
    pair hot cudamalloc '' 5.0
    pair hot async '' 800.0
    pair hot torch '' 600.0
    pair hot torch expandable_segments:True 400.0
    pair churn galloc '' 200.0
    pair churn cub '' 100.0
    pair holes torch '' 100.0
} >"$work/pairs"
{
    trace a galloc '' 100 10 1.02 0
    trace a torch '' 400 80 1.5 0
    trace a torch expandable_segments:True 900 90 1.1 0
    trace b galloc '' 100 10 1.2 0
    trace b torch '' 100 20 1.5 0
    trace b torch expandable_segments:True 25 50 1.1 0
    trace b async '' 1 1 1.0 7
} >"$work/traces"
ends 0 bench/compare.sh "$work/pairs" "$work/traces"
says '^hot .* 80.0 *20.0 *5.0 *800.0 *- *600.0 *400.0 *5.00  20.00$' 'peers by their settings, ratios to the best'
says '^churn .* 0.50  LOSS to cub$' 'a case that galloc loses'
says '^holes .*galloc is missing$' 'a case that galloc has not done'
says '^2 cases beside a peer, in 1 of them' 'losses are counted'
says '^a  *100.0 *- *- *400.0 *900.0 *4.00$' 'the first pass'
says '^b  *10.0 *- *- *20.0 *50.0 *2.00$' 'the last pass; what ran out of memory does not count'
says '^b  *1.2000 .* 0.92  LOSS to expandable$' 'memory that is lost'
says '^geometric mean  *10.0 *- *- *40.0 *67.1 *4.00$' 'geometric means'
says '^worst  *1.2000 *- *- *1.5000 *1.1000 *0.92$' 'worst figures'
{
    cat "$work/traces"
    trace a galloc '' 900 9 1.02 0
    trace a galloc '' 200 8 1.02 0
} >"$work/rounds"
ends 0 bench/compare.sh "$work/pairs" "$work/rounds"
says '^a  *200.0 *- *- *400.0 *900.0 *2.00$' 'the median of three rounds'
says '^a  *9.0 *- *- *80.0 *90.0 *8.89$' 'each figure its own'
head -n 5 "$work/traces" >"$work/short"
ends 0 bench/compare.sh "$work/nothing" "$work/short"
says '^no pair was measured' 'no pairs'
says '^incomplete: expandable: 1 of 2 traces' 'an allocator that did not do all traces'

count_verdicts
