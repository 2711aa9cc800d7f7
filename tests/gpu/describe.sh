#!/bin/bash
# describe.sh - what a log of figures or tests begins with: when, on what, with which galloc. BACKEND=sim: on the
# simulated device. GALLOC_COMMIT overrides the commit, for copies without a .git.

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/../.." || exit 1

first_line() { "$@" 2>/dev/null | head -n 1; }

commit=${GALLOC_COMMIT:-$(git describe --always --dirty --abbrev=10 2>/dev/null)}
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
echo "date    $(date -u '+%Y-%m-%d %H:%M UTC')"
if [ "${BACKEND:-cuda}" = sim ]; then
    echo "GPU     none: simulated device"
else
    gpu=$(first_line nvidia-smi --query-gpu=name,memory.total --format=csv,noheader)
    echo "GPU     ${gpu:-none found}${gpu:+ x $(nvidia-smi -L | wc -l)}"
    echo "driver  $(first_line nvidia-smi --query-gpu=driver_version --format=csv,noheader)"
    echo "CUDA    $("$nvcc" --version 2>/dev/null | sed -n 's/.*release [0-9.]*, V\([0-9.]*\).*/\1/p')"
fi
echo "host    $(nproc) cores, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
echo "galloc  $(sed -n 's/^#define GALLOC_VERSION_STRING "\(.*\)"/\1/p' galloc.h), commit ${commit:-unknown}"
