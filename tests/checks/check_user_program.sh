#!/bin/sh
# check_user_program.sh - a program that knows nothing of the simulated device, linked with it by README's command: its
# bytes are right, it is told at its end what was found, and its exit status says so.
# Environment: CC, CXX, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc}
work=${BUILD:-build}/check_user_program
. tests/support/verdicts.sh
said=$work/err
unset SIM_MODE SIM_MEMORY SIM_DEVICES SIM_SEED SIM_PACE SIM_FINDINGS SIM_LEAKS

# The first program by the command as README has it, the others with its objects.
build() { # program, files or objects of the device
    name=$1
    shift
    "$cc" -w -I. -isystem tests/sim/include "$work/$name.c" "$@" -lpthread -lm -o "$work/$name" 2>"$work/err" || {
        verdict 1 "$name does not compile and link"
        return 1
    }
}

# Runs it, in an environment; its output, what it is told, its exit status.
run() { # program, variables...
    program=$1
    shift
    env "$@" "$work/$program" >"$work/out" 2>"$work/err" </dev/null
    status=$?
}

is() { # status, what it means
    [ "$status" -eq "$1" ]
    verdict $? "$2: exit status $status instead of $1"
}
says() { # text, what it means that the device tells it
    grep -qF "$1" "$work/err"
    verdict $? "$2"
}
silent() {
    [ ! -s "$work/err" ]
    verdict $? "$1"
}
prints() { # text, what it means that the program prints it
    grep -qxF "$1" "$work/out"
    verdict $? "$2"
}

cat >"$work/copy.c" <<'END'
#define GALLOC_IMPLEMENTATION
#include "galloc.h"
#include <stdio.h>
int main(void)
{
    static unsigned char a[1 << 20], b[1 << 20];
    void *p, *plain;
    int wrong = 0;
    size_t left, total, i;
    cudaStream_t s;
    for (i = 0; i < sizeof a; i++) a[i] = (unsigned char)(i * 7);
    if (cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) || galloc_malloc(&p, sizeof a, s)) return 3;
    if (cudaMalloc(&plain, sizeof a) || cudaMemGetInfo(&left, &total)) return 4;
    cudaMemcpyAsync(p, a, sizeof a, cudaMemcpyHostToDevice, s);
    cudaMemcpyAsync(plain, p, sizeof a, cudaMemcpyDeviceToDevice, s);
    cudaMemcpyAsync(b, plain, sizeof a, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    for (i = 0; i < sizeof a; i++) wrong += a[i] != b[i];
    printf("%d wrong of %d MiB\n", wrong, (int)(total >> 20));
    galloc_free(p, s);
    return 0;
}
END
build copy tests/sim/*.c || exit 1
run copy
is 0 "a program without mistakes"
prints "0 wrong of 4096 MiB" "a round trip of bytes comes back as it went"
silent "a program without mistakes is told something"
run copy SIM_MEMORY=16G
prints "0 wrong of 16384 MiB" "SIM_MEMORY sets the device's memory"
run copy SIM_LEAKS=1
says "sim: note: never given back:" "SIM_LEAKS=1 tells what was not given back"
is 0 "what was not given back is only a note"
run copy SIM_LEAKS=2
is 2 "SIM_LEAKS=2 is refused"
run copy SIM_MEMORY=lots
is 2 "a value that means nothing"
says "SIM_MEMORY=lots" "a value that means nothing is named"
for value in 16T 1025G 1M 0 99999999999999999999999; do
    run copy SIM_MEMORY=$value
    is 2 "SIM_MEMORY=$value is refused"
    says "SIM_MEMORY=$value is out of range: it may be a number of bytes from 2M to 1T" "SIM_MEMORY=$value: its range"
done
run copy SIM_MODE=ledger SIM_MEMORY=17T
says "SIM_MEMORY=17T is out of range: it may be a number of bytes from 2M to 16T" "a ledger's range is its own"
run copy SIM_DEVICES=17
says "SIM_DEVICES=17 is out of range: it may be 1 to 16" "SIM_DEVICES=17 is out of range"
run copy SIM_SEED=-1
says "SIM_SEED=-1: it may be a number" "a seed has no sign"
run copy SIM_MODE=ledger SIM_MEMORY=100G
is 0 "a program on a device without memory behind it"

build copy -DCUDA_API_PER_THREAD_DEFAULT_STREAM tests/sim/*.c && {
    run copy
    is 0 "the device's files compiled for per-thread default streams, too"
}

sim=$(tests/support/device.sh "$work/sim") || exit 1

# argument 1: how it ends
cat >"$work/race.c" <<'END'
#define GALLOC_IMPLEMENTATION
#include "galloc.h"
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    void *p;
    int i, how = argc > 1 ? atoi(argv[1]) : 0;
    cudaStream_t s, t;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking);
    for (i = 0; i < 10; i++) {
        galloc_malloc(&p, 1 << 20, s);
        cudaMemsetAsync(p, 1, 1 << 20, s);
        cudaMemsetAsync(p, 2, 1 << 20, t);
        galloc_free(p, s);
    }
    puts("end of main");
    fflush(stdout);
    if (how == 1) _exit(0);
    if (how == 2) abort();
    if (how == 3 && !fork()) exit(0);
    if (how == 3) wait(&i);
    return how == 4 ? 7 : 0;
}
END
build race "$sim"/*.o || exit 1
run race
is 1 "a program with races that ends well otherwise"
prints "end of main" "a program with races runs to its end"
says "race: in cudaMemsetAsync: operation" "a race is told"
says "and 9 more like it)" "repeats are told once"
says "SIM_FINDINGS=ignore" "there is a hint what to do"
[ "$(grep -c "^sim:   race" "$work/err")" -le 2 ]
verdict $? "repeats are folded"
run race SIM_FINDINGS=print
is 0 "SIM_FINDINGS=print"
says "race: in cudaMemsetAsync: operation" "SIM_FINDINGS=print tells of races"
run race SIM_FINDINGS=ignore
is 0 "SIM_FINDINGS=ignore"
silent "SIM_FINDINGS=ignore tells something"
run race SIM_MODE=ledger
is 1 "a program with races on a device without memory"
for how in 1 2; do
    program=$work/race
    "$program" $how >"$work/out" 2>"$work/err"
    says "sim: found: race" "the first finding is told at once, however the program ends ($how)"
done 2>/dev/null
"$work/race" 3 >"$work/out" 2>"$work/err"
[ "$(grep -c "findings on the simulated device" "$work/err")" -eq 1 ]
verdict $? "a child that was forked tells nothing"
"$work/race" 4 >"$work/out" 2>"$work/err"
status=$?
is 7 "an exit status of the program's own stays"

# What was queued is run at the end; the mistake shows when it runs, or when it is queued. A thread is still there.
cat >"$work/late.c" <<'END'
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static void say(void *text) { puts(text); }
static void *wait_for_ever(void *unused) { cudaFree(0); pause(); return unused; }
int main(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_ever, NULL);
    cudaLaunchHostFunc(0, say, "ran at the end");
    return 0;
}
END
build late "$sim"/*.o || exit 1
run late SIM_PACE=still
is 0 "a program that never waits"
prints "ran at the end" "what was queued is run at the end"

cat >"$work/kernel.c" <<'END'
#include <stdio.h>
#include "tests/sim/sim_kernel.h"
SIM_KERNEL(scale, (float *, p), (float, by), (int, n))
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] *= by;
}
int main(int argc, char **argv)
{
    float host[100], *p;
    dim3 grid = {1, 1, 1}, block = {128, 1, 1};
    cudaStream_t s, t;
    for (int i = 0; i < 100; i++) host[i] = (float)i;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking);
    cudaMalloc((void **)&p, sizeof host);
    cudaMemcpyAsync(p, host, sizeof host, cudaMemcpyHostToDevice, s);
    if (scale_launch(grid, block, 0, argc > 1 ? t : s, p, 3.0f, 100)) return 3;
    cudaMemcpyAsync(host, p, sizeof host, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    if (argc == 1) printf("%g\n", host[99]);
    (void)argv;
    return 0;
}
END
build kernel "$sim"/*.o || exit 1
run kernel
is 0 "a program with a kernel"
prints 297 "a kernel's body runs"
"$work/kernel" race >"$work/out" 2>"$work/err"
status=$?
is 1 "a kernel on the wrong stream"
says "race: in cudaLaunchKernel" "a kernel on the wrong stream is told of"

# The same file as C++.
if command -v "${CXX:-g++}" >/dev/null; then
    cp "$work/kernel.c" "$work/kernel_cxx.cpp"
    "${CXX:-g++}" -std=c++11 -Wall -I. -isystem tests/sim/include "$work/kernel_cxx.cpp" "$sim"/*.o -lpthread -lm \
        -o "$work/kernel_cxx" 2>"$work/err" && run kernel_cxx
    is 0 "a program with a kernel, in C++"
    prints 297 "a kernel's body runs in C++"
fi

# CUDA C++ as it is, by the command of docs/simulated-device.md: launches of each form, atomics, errors, a race.
cat >"$work/launches.cu" <<'END'
#include <stdio.h>
#include <utility>
#include <vector>
#include "galloc.h"
namespace shapes {
__global__ void fill(unsigned *p, unsigned value, int n)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] = value;
}
}
template <class T, int by> static __global__ void add(T *sum, const T *p, int n)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) atomicAdd(sum, by * p[i]);
}
namespace shapes {
template <typename T, int times = 2> // T follows from the arguments
static __global__ void __launch_bounds__(256) scale(T *to, /* (of n */ const T *from,
    size_t n)
{
    for (size_t i = 0; i < n; i++) to[i] = times * from[i];
}
}
static __device__ unsigned threads() { return gridDim.x * gridDim.y * blockDim.x * blockDim.y; }
static __global__ void count(unsigned *at, const unsigned *unused) { if (!unused) atomicMax(at, threads()); }
static __global__ void turn(unsigned *at) { atomicInc(at, 1), atomicInc(at, 1), atomicDec(at, 5), atomicDec(at, 5); }
static __global__ void nothing() {}
template <class T> __global__ __launch_bounds__(2 * 128) void warps(T *p) { *p = (T)blockDim.x / warpSize; }
template <class P, size_t by> static __global__ void second(P *p) { p->second.second = (int)by * __ldg(&p->first); }
#define LAUNCH(kernel, ...) kernel<<<1, 1>>>(__VA_ARGS__)
typedef std::pair<int, std::pair<int, int>> nested;
int main(int argc, char **)
{
    unsigned *p, host = 0;
    cudaStream_t s, t;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking);
    if (cudaMalloc(&p, 1000 * sizeof *p)) return 3;
    shapes::fill<<<(1000 + 127) / 128, 128, 0, s>>>(p, 2, 1000);
    add<unsigned, 3><<<4, dim3(256), 0, s>>>(p, p + 1,
        999);
    cudaMemcpyAsync(&host, p, sizeof host, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    printf("%u\n", host);
    count<<<dim3(3, 2), dim3(2, 5), 0, argc > 1 ? t : s>>>(p + 1, nullptr);
    count <<< 1, 1, 0, s >>> (p + 1, nullptr);
    puts("usage: x <<<b>>> (c)"); /* not a<<<1, 1>>>(p) */ puts("a \"<<<1, 2>>>(p)"); // nor f<<<1>>>(p); it's one
    printf("%d\n", '"' + 1'000 /* <<<"*/); puts(R"(f<<<1>>>(")"); puts(R"x(f<<<1>>>(")")x");
    puts("<<<"), nothing<<<1, 1>>>(), puts(">>>("); /* f<<<1,
       1>>>("); */ puts("g<<<1\
        >>>(");
    cudaMemcpyAsync(&host, p + 1, sizeof host, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    if (argc == 1) printf("%u\n", host);
    shapes::scale<<<1, 1, 0, s>>>(p + 500, p, 7); /* both only read p */
    shapes::scale<unsigned, 5><<<1, 1, 0, t>>>(p + 600, p, 7);
    cudaMemcpyAsync(&host, p + 506, sizeof host, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    printf("scaled %u\n", host);
    turn<<<1, 1, 0, s>>>(p + 700); /* of 2: 0, 1, 0, 5 */
    cudaMemcpyAsync(&host, p + 700, sizeof host, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    printf("turned %u\n", host);
    warps<<<1, 96, 0, s>>>(p + 800);
    cudaMemcpyAsync(&host, p + 800, sizeof host, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    printf("%u warps\n", host);
    nested pair(7, {8, 9}), *pairs;
    if (cudaMalloc(&pairs, sizeof pair)) return 3;
    cudaMemcpy(pairs, &pair, sizeof pair, cudaMemcpyHostToDevice);
    second<std::pair<int, std::pair<int, int>>, (1 > 0) + sizeof(char)> /* as nvcc */
        <<<1, 1>>> // a launch
        (pairs);
    cudaMemcpy(&pair, pairs, sizeof pair, cudaMemcpyDeviceToHost);
    printf("second %d of %zu\n", pair.second.second, std::vector<std::vector<std::vector<int>>>(3).size());
    LAUNCH(nothing);
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    nothing<<<1, 2048>>>();
    printf("%s\n", cudaGetErrorName(cudaGetLastError()));
    return 0;
}
END
if command -v "${CXX:-g++}" >/dev/null; then
    mkdir -p "$work/other"
    echo 'static __global__ void other() {} void launch_other() { other<<<1, 1>>>(); }' >"$work/other/launches.cu"
    SIM_OBJECTS=$(echo "$sim"/*.o) tests/sim/nvcc.sh -Wall -Wextra -Werror -I. "$work/launches.cu" \
        "$work/other/launches.cu" -o "$work/launches" 2>"$work/err" && run launches
    is 0 "CUDA C++"
    prints 5996 "kernels of a namespace and of a template run, and add atomically"
    prints 60 "launches have shapes"
    prints 'scaled 4' "the arguments of a launch decide on the kernel of a template"
    prints 'turned 5' "counters turn at their limits"
    prints '3 warps' "a kernel template may have launch bounds before its type"
    prints 'second 14 of 3' "arguments of a template have brackets and parentheses"
    prints 'usage: x <<<b>>> (c)' "a string stays"
    prints 'a "<<<1, 2>>>(p)' "a string with a quote stays"
    prints 1034 "a quote as a character, and one between digits"
    prints 'f<<<1>>>("' "a raw string stays"
    prints 'f<<<1>>>(")"' "a raw string with a name stays"
    prints 'g<<<1        >>>(' "a string of two lines stays"
    prints cudaSuccess "a launch without arguments works"
    prints cudaErrorInvalidConfiguration "a launch leaves its error"
    "$work/launches" race >"$work/out" 2>"$work/err"
    status=$?
    is 1 "a launch on the wrong stream"
    says "race: in cudaLaunchKernel" "a launch on the wrong stream is told of"
    sed 's/<<<1, 2048>>>()/<<<1, 2048>>>(); no_such_name()/' "$work/launches.cu" >"$work/mistake.cu"
    ! tests/sim/nvcc.sh -c -I. "$work/mistake.cu" -o "$work/mistake.o" 2>"$work/err"
    verdict $? "a mistake in CUDA C++ compiles"
    says "mistake.cu:$(grep -n no_such_name "$work/mistake.cu" | cut -d: -f1):" "a mistake is told by its line"
fi

# What the device has not got does not link.
cat >"$work/missing.c" <<'END'
#include <cuda_runtime_api.h>
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned int flags);
int main(void) { void *p; return cudaMallocManaged(&p, 1, 1) != 0; }
END
! "$cc" -w -isystem tests/sim/include "$work/missing.c" "$sim"/*.o -lpthread -lm -o "$work/missing" 2>"$work/err"
verdict $? "a function that is not there links"

# The list of functions in the text is that of the objects.
if command -v nm >/dev/null; then
    nm -g --defined-only "$sim"/*.o | sed -n 's/.* T \(cu[A-Za-z0-9_]*\)$/\1/p' |
        sed 's/_ptsz$//; s/_ptds$//; s/_v[0-9]$//' |
        sort -u >"$work/have"
    sed -n '/^<!-- functions -->/,/^<!-- end -->/p' docs/simulated-device.md | grep -oE '\bcu[A-Za-z0-9]+' | sort -u \
        >"$work/listed"
    diff "$work/have" "$work/listed" >"$work/err"
    verdict $? "docs/simulated-device.md lists other functions than there are (<: not listed)"
fi

count_verdicts
