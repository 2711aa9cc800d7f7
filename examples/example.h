/* example.h - what the examples share: the check of CUDA's errors, the comparison with other allocators, the table.

   The examples call galloc_malloc and galloc_free, as your program would. Their code is measured three times: while
   cudaMalloc or cudaMallocAsync has its turn, the macros at the end of this file send the same calls there. Without
   this file they are galloc's. Include it after galloc.h. C99 with POSIX (-std=gnu99), C++11; galloc does not need it.

   Environment: EXAMPLES_JSON, a file that gets a line of JSON for each row of a table (bench/examples.sh). */

#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __cplusplus
#include <chrono>
#else
#include <time.h>
#endif

enum { CUDA_MALLOC, CUDA_MALLOC_ASYNC, GALLOC, NO_ALLOCATION, EXAMPLE_ALLOCATORS };
enum { EXAMPLE_ROUNDS = 7, EXAMPLE_ROUNDS_SIMULATED = 3, EXAMPLE_KEPT = 8 };

static const char *const example_allocator_name[] = {"cudaMalloc", "cudaMallocAsync", "galloc", "no allocation"};
static const char *example_name;
static struct cudaDeviceProp example_gpu;
static int example_with = GALLOC;             /* whose turn it is */
static int example_rounds = EXAMPLE_ROUNDS;   /* of a comparison, without the first one */
static void *example_kept[EXAMPLE_KEPT];      /* for NO_ALLOCATION: buffers that are handed out in turn */
static int example_n_kept, example_next_kept;
static long example_checked, example_wrong;   /* results */
static int example_details;                   /* 1: calls of the allocator are timed, which takes time itself */
static __thread double example_allocator_us;  /* the time that this thread has spent in the allocator */

/* ---- errors ------------------------------------------------------------------------------------------------------ */

/* Ends the program with a message if a call failed; for want of memory with galloc's report on it. */
#define CHECK(call) example_expect_success(call, #call, __FILE__, __LINE__)

static inline void example_expect_success(cudaError_t error, const char *call, const char *file, int line)
{
    static char text[GALLOC_REPORT_TEXT];
    static galloc_report report;
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(error));
    if (error == cudaErrorMemoryAllocation && galloc_oom_report(&report) == cudaSuccess &&
        galloc_report_text(&report, text, sizeof text) == cudaSuccess)
        fputs(text, stderr);
    exit(1);
}

/* Counts a result of the example; example_end tells them. */
static inline void example_result(int right)
{
    example_checked++;
    example_wrong += !right;
}

/* A result that galloc's default settings have, and others (GALLOC_CONF) need not have. */
static inline void example_result_by_default(int right)
{
    const char *conf = getenv("GALLOC_CONF");
    example_result(right || (conf && *conf));
}

/* ---- clock ------------------------------------------------------------------------------------------------------- */

/* The simulated device (docs/simulated-device.md) adds up what CUDA calls take on the host of an H200. */
#ifdef __cplusplus
extern "C"
#endif
double sim_cost_us(void) __attribute__((weak));

static inline int example_is_simulated(void) { return sim_cost_us != NULL; }

static inline double example_now_us(void)
{
    if (example_is_simulated()) return sim_cost_us();
#ifdef __cplusplus
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch()).count();
#else
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
#endif
}

/* ---- begin and end ----------------------------------------------------------------------------------------------- */

/* Says what runs where. cudaMallocAsync is measured at its best: its pool returns nothing to the device. */
static inline void example_begin(const char *name)
{
    cudaMemPool_t pool;
    uint64_t all = UINT64_MAX;
    int device, devices = 0;
    example_name = name;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        fprintf(stderr, "%s: no GPU\n", name);
        exit(2);
    }
    if (example_is_simulated()) example_rounds = EXAMPLE_ROUNDS_SIMULATED;
    for (device = 0; device < devices; device++) {
        CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
        CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
    }
    CHECK(cudaGetDeviceProperties(&example_gpu, 0));
    printf("%s on %s\n", name, example_is_simulated() ?
           "the simulated device: what its CUDA calls take on the host of an H200" : example_gpu.name);
}

/* Ends galloc, which fails while blocks are in use. Returns the exit status. */
static inline int example_end(void)
{
    int i;
    for (i = 0; i < example_n_kept; i++) CHECK(cudaFree(example_kept[i]));
    CHECK(galloc_shutdown());
    printf("%ld results, %ld wrong\n", example_checked, example_wrong);
    return example_wrong || !example_checked;
}

/* ---- comparison -------------------------------------------------------------------------------------------------- */

typedef struct example_timing {
    double us, in_allocator; /* for each step */
} example_timing;

static inline int example_is_shorter(const void *a, const void *b)
{
    double x = ((const example_timing *)a)->us, y = ((const example_timing *)b)->us;
    return (x > y) - (x < y);
}

/* Compares with buffers that are made beforehand too: `n` of them, handed out in turn. */
static inline void example_keep(int n, size_t bytes)
{
    for (; example_n_kept < n; example_n_kept++) CHECK(cudaMalloc(&example_kept[example_n_kept], bytes));
}

static inline void example_row(const char *unit, int with, const example_timing *round, double galloc_us)
{
    const char *path = getenv("EXAMPLES_JSON");
    FILE *file = path && *path ? fopen(path, "a") : NULL;
    example_timing median = round[example_rounds / 2];
    double least = round[0].us, most = round[example_rounds - 1].us;
    printf("%-16s %13.2f", example_allocator_name[with], median.us);
    if (median.in_allocator > 0) printf(" %22.2f", median.in_allocator);
    else printf(" %22s", "-"); /* other threads called it, or nobody did */
    if (with < GALLOC) printf(" %8.2f times", median.us / galloc_us);
    else printf(" %14s", "");
    printf("   %.2f - %.2f\n", least, most);
    if (!file) return;
    fprintf(file, "{\"example\": \"%s\", \"unit\": \"us per %s\", \"allocator\": \"%s\", \"device\": \"%s\", "
            "\"median\": %.3f, \"least\": %.3f, \"most\": %.3f, \"in_allocator\": %.3f, \"rounds\": %d}\n",
            example_name, unit, example_allocator_name[with], example_gpu.name, median.us, least, most,
            median.in_allocator, example_rounds);
    fclose(file);
}

/* One turn of an allocator. */
static inline example_timing example_measure(int with, int steps, void (*work)(void *state), void *state)
{
    example_timing t;
    double begin;
    example_with = with;
    example_details = example_is_simulated();
    example_allocator_us = 0;
    begin = example_now_us();
    work(state);
    t.us = (example_now_us() - begin) / steps;
    if (!example_details) { /* the same again */
        example_details = 1;
        work(state);
    }
    t.in_allocator = example_allocator_us / steps;
    return t;
}

/* Measures work(state), which does `steps` steps and waits for the device at its end, with each allocator. The first
   round warms up. The allocators take turns, so that a slow moment of the machine hits them alike. */
static inline void example_compare(const char *unit, int steps, void (*work)(void *state), void *state)
{
    static example_timing timing[EXAMPLE_ALLOCATORS][EXAMPLE_ROUNDS];
    char head[32];
    int with, round, all = example_n_kept ? EXAMPLE_ALLOCATORS : NO_ALLOCATION;
    for (round = -1; round < example_rounds; round++) {
        for (with = 0; with < all; with++) {
            example_timing t = example_measure(with, steps, work, state);
            if (round >= 0) timing[with][round] = t;
        }
    }
    example_with = GALLOC;
    for (with = 0; with < all; with++)
        qsort(timing[with], (size_t)example_rounds, sizeof timing[with][0], example_is_shorter);
    snprintf(head, sizeof head, "us per %s", unit);
    printf("%-16s %13s %22s %14s   least - most\n", "", head, "of that in malloc/free", "galloc's gain");
    for (with = 0; with < all; with++) example_row(unit, with, timing[with], timing[GALLOC][example_rounds / 2].us);
}

/* ---- calls of the example, sent to the allocator whose turn it is ------------------------------------------------ */

static inline double example_call_begins(void) { return example_details ? example_now_us() : 0; }

static inline void example_call_ends(double begin)
{
    if (example_details) example_allocator_us += example_now_us() - begin;
}

static inline cudaError_t example_malloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    double begin = example_call_begins();
    cudaError_t error = cudaSuccess;
    if (example_with == CUDA_MALLOC) error = cudaMalloc(ptr, bytes);
    else if (example_with == CUDA_MALLOC_ASYNC) error = cudaMallocAsync(ptr, bytes, stream);
    else if (example_with == GALLOC) error = galloc_malloc(ptr, bytes, stream);
    else *ptr = example_kept[example_next_kept++ % example_n_kept];
    example_call_ends(begin);
    return error;
}

static inline cudaError_t example_free(void *ptr, cudaStream_t stream)
{
    double begin = example_call_begins();
    cudaError_t error = cudaSuccess;
    if (example_with == CUDA_MALLOC) error = cudaFree(ptr);
    else if (example_with == CUDA_MALLOC_ASYNC) error = cudaFreeAsync(ptr, stream);
    else if (example_with == GALLOC) error = galloc_free(ptr, stream);
    example_call_ends(begin);
    return error;
}

/* The others have no block that grows. */
static inline cudaError_t example_malloc_growable(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    double begin = example_call_begins();
    cudaError_t error = cudaSuccess;
    if (example_with != GALLOC) return example_malloc(ptr, bytes, stream);
    error = galloc_malloc_growable(ptr, bytes, max_bytes, stream);
    example_call_ends(begin);
    return error;
}

static inline cudaError_t example_resize(void *ptr, size_t bytes, cudaStream_t stream)
{
    double begin = example_call_begins();
    cudaError_t error = cudaErrorNotSupported;
    if (example_with == GALLOC) error = galloc_resize(ptr, bytes, stream);
    example_call_ends(begin);
    return error;
}

static inline cudaError_t example_alloc(void **ptr, const galloc_request *request)
{
    double begin = example_call_begins();
    cudaError_t error = cudaSuccess;
    if (example_with != GALLOC) return example_malloc(ptr, request->bytes, request->stream);
    error = galloc_alloc(ptr, request);
    example_call_ends(begin);
    return error;
}

#define galloc_malloc(ptr, bytes, stream) example_malloc((void **)(ptr), bytes, stream)
#define galloc_free(ptr, stream)          example_free(ptr, stream)
#define galloc_malloc_growable(ptr, bytes, max_bytes, stream) \
    example_malloc_growable((void **)(ptr), bytes, max_bytes, stream)
#define galloc_alloc(ptr, request)        example_alloc((void **)(ptr), request)
#define galloc_resize(ptr, bytes, stream) example_resize(ptr, bytes, stream)

#endif
