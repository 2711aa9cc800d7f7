#!/bin/sh
# check_variants.sh - each of GALLOC_NO_PYTORCH, _BACKENDS, _POOLED and _HEURISTIC leaves out what it names: galloc
# compiles without a warning, a setting that needs what is left out is refused in words, and everything else works.
# Environment: CC, BUILD (a folder to work in), GRID (set: all programs run with all 16 combinations, two minutes; else
# each define is compiled alone, and some programs run with all four).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/check_variants
include="-I. -Itests/support -Itests/sim -isystem tests/sim/include"
warnings="-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Werror"

. tests/support/verdicts.sh
device=$(tests/support/device.sh "$work/sim") || exit 1

# The words with which a test names what a define leaves out.
words() {
    case $1 in
    PYTORCH) echo 'like:pytorch\|LIKE_PYTORCH\|torch_stats' ;;
    BACKENDS) echo 'backend:cuda\|BACKEND_CUDA' ;;
    POOLED) echo 'pooled\|POOLED' ;;
    HEURISTIC) echo 'heuristic\|HEURISTIC' ;;
    esac
}

programs() { # defines...
    for file in tests/unit/test_*.c; do
        case $file in *test_sim*) continue ;; esac
        for define in "$@"; do
            grep -q "$(words "$define")" "$file" && continue 2
        done
        grep -q '^#include "inside.c"' "$file" || basename "$file" .c
    done
}

# Every setting that is left out is refused by its define's name, every other one is taken.
cat >"$work/refused.c" <<'END'
#define GALLOC_IMPLEMENTATION
#include "galloc.h"
#include <stdio.h>

static int wrong(const char *text, const char *by)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    char message[200];
    cudaError_t error = galloc_config_parse(&config, text, message, sizeof message);
    int refused = error == cudaErrorInvalidValue && by && strstr(message, by) != NULL;
    if (!error) error = galloc_pool_create(&pool, &config);
    if (!error) error = galloc_pool_destroy(pool);
    if (by ? refused : !error) return 0;
    printf("%s: %s\n", text, error ? message : "taken");
    return 1;
}

/* A config that was filled without a text. */
static int wrong_config(int like, int backend, int strategy, const char *by)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    cudaError_t error;
    config.like = like;
    config.backend = backend;
    config.strategy = strategy;
    error = galloc_pool_create(&pool, &config);
    if (by && error == cudaErrorInvalidValue && strstr(galloc_last_message(), by)) return 0;
    if (!by && !error && !galloc_pool_destroy(pool)) return 0;
    printf("%d %d %d: %s\n", like, backend, strategy, error ? galloc_last_message() : "taken");
    return 1;
}

#if defined(GALLOC_NO_PYTORCH)
#define TORCH "GALLOC_NO_PYTORCH"
#else
#define TORCH NULL
#endif
#if defined(GALLOC_NO_BACKENDS)
#define BACKENDS "GALLOC_NO_BACKENDS"
#else
#define BACKENDS NULL
#endif
#if defined(GALLOC_NO_POOLED)
#define POOLED "GALLOC_NO_POOLED"
#else
#define POOLED NULL
#endif
#if defined(GALLOC_NO_HEURISTIC)
#define HEURISTIC "GALLOC_NO_HEURISTIC"
#else
#define HEURISTIC NULL
#endif

int main(void)
{
    int bad = wrong("like:pytorch", TORCH) + wrong("backend:cudaMalloc", BACKENDS) +
              wrong("backend:cudaMallocAsync", BACKENDS) + wrong("strategy:pooled", POOLED) +
              wrong("strategy:heuristic", HEURISTIC) + wrong("like:galloc,backend:native,strategy:caching", NULL);
    bad += wrong_config(GALLOC_LIKE_PYTORCH, 0, 0, TORCH) + wrong_config(0, GALLOC_BACKEND_CUDA_MALLOC, 0, BACKENDS);
    bad += wrong_config(0, 0, GALLOC_STRATEGY_POOLED, POOLED) + wrong_config(0, 0, 0, NULL);
    return bad != 0;
}
END

compiles() { # name, flags...
    name=$1
    shift
    if "$cc" -std=c11 $warnings $include "$work/refused.c" "$@" >"$work/out" 2>&1; then
        right
    else
        wrong "$name does not compile without a warning"
    fi
}

run_programs() { # name, flags, programs...
    name=$1 flags=$2
    shift 2
    "$cc" -std=c11 -w -O1 $flags $include -c tests/support/inside.c -o "$work/inside.o" >"$work/out" 2>&1 ||
        wrong "$name: inside.c"
    for program in "$@"; do
        [ -e "$work/$program.o" ] ||
            "$cc" -std=c11 -w -O0 $include -c "tests/unit/$program.c" -o "$work/$program.o" >"$work/out" 2>&1
        "$cc" "$work/$program.o" "$work/inside.o" "$device"/*.o -o "$work/program" -lpthread -lm >"$work/out" 2>&1 &&
            timeout 120 "$work/program" >"$work/out" 2>&1
        if [ $? -eq 0 ]; then right; else wrong "$name: $program"; fi
    done
}

try() { # defines...
    flags= name=nothing
    for define in "$@"; do flags="$flags -DGALLOC_NO_$define" name=$name-$define; done
    if [ ! "$GRID" ] && [ $# -ne 4 ]; then
        [ $# -eq 1 ] || return
        compiles $name $flags -fsyntax-only
        return
    fi
    compiles $name $flags -O0 "$device"/*.o -o "$work/refused" -lpthread -lm
    if "$work/refused" >"$work/out" 2>&1; then right; else wrong "$name: refusals"; fi
    # shellcheck disable=SC2046 # words
    if [ "$GRID" ]; then run_programs $name "$flags" $(programs "$@")
    else run_programs $name "$flags" test_api test_capture test_moves; fi
}

for pytorch in '' PYTORCH; do
    for backends in '' BACKENDS; do
        for pooled in '' POOLED; do
            for heuristic in '' HEURISTIC; do
                try $pytorch $backends $pooled $heuristic
            done
        done
    done
done

count_verdicts
