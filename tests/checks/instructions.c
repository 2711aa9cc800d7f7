/* instructions.c - pairs of alloc and free for check_instructions.sh to count: `pairs CASE N [SETTINGS]` makes N of
   them in a function of its own, with looks at the stream that cost next to nothing, so that what is counted is
   galloc. */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

enum { SIZES = 1024, LIVE = 2048, HOLES = 4096, GROWING = 600 };

static unsigned long long the_id;
static size_t size[SIZES];
static void *live[LIVE];
static unsigned state = 1;

static CUresult CUDAAPI is_capturing(CUstream stream, CUstreamCaptureStatus *status)
{
    (void)stream;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult CUDAAPI get_id(CUstream stream, unsigned long long *id)
{
    (void)stream;
    *id = the_id;
    return CUDA_SUCCESS;
}

static unsigned roll(void)
{
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static void must(cudaError_t error)
{
    if (!error) return;
    printf("%s\n", galloc_last_message());
    exit(1);
}

static void *get(size_t bytes, cudaStream_t stream)
{
    void *ptr = NULL;
    must(galloc_malloc(&ptr, bytes, stream));
    return ptr;
}

static void *get_growable(cudaStream_t stream)
{
    void *ptr = NULL;
    must(galloc_malloc_growable(&ptr, (size_t)1 << 20, (size_t)64 << 20, stream));
    return ptr;
}

/* Counted: the same block over and over. */
__attribute__((noinline)) static void count_hot(long n, cudaStream_t stream)
{
    for (long i = 0; i < n; i++) {
        void *ptr = NULL;
        must(galloc_malloc(&ptr, 65536, stream));
        must(galloc_free(ptr, stream));
    }
}

/* Counted: the same with a block that no cache takes. */
__attribute__((noinline)) static void count_large(long n, cudaStream_t stream)
{
    for (long i = 0; i < n; i++) {
        void *ptr = NULL;
        must(galloc_malloc(&ptr, 20 << 20, stream));
        must(galloc_free(ptr, stream));
    }
}

/* Counted: never the size that was freed last. */
__attribute__((noinline)) static void count_miss(long n, cudaStream_t stream)
{
    for (long i = 0; i < n; i++) {
        void *ptr = NULL;
        must(galloc_malloc(&ptr, size[i % SIZES], stream));
        must(galloc_free(ptr, stream));
    }
}

/* Counted: one of many blocks is replaced by one of another size. */
__attribute__((noinline)) static void count_churn(long n, cudaStream_t stream)
{
    for (long i = 0; i < n; i++) {
        void **ptr = &live[roll() % LIVE];
        must(galloc_free(*ptr, stream));
        must(galloc_malloc(ptr, size[roll() % SIZES], stream));
    }
}

/* Counted: the same, after another stream has had a block. */
__attribute__((noinline)) static void count_churn_two_streams(long n, cudaStream_t stream)
{
    count_churn(n, stream);
}

/* Counted: half of all that is held, when nothing is live and some thousand pages are parked. */
__attribute__((noinline)) static void count_parked(long n, cudaStream_t stream)
{
    for (long i = 0; i < n; i++) must(galloc_free(get((size_t)20 << 30, stream), stream));
}

/* Counted: each of many streams frees its block; with the last one nothing is live, and all merge. */
__attribute__((noinline, noclone)) static void count_streams(long n, const cudaStream_t *streams)
{
    for (long i = 0; i < n; i++) must(galloc_free(live[i], streams[i]));
}

/* Counted: a block that grows beside many others. */
__attribute__((noinline)) static void count_growable(long n, cudaStream_t stream)
{
    for (long i = 0; i < n; i++) {
        void *ptr = get_growable(stream);
        must(galloc_resize(ptr, (size_t)5 << 20, stream));
        must(galloc_free(ptr, stream));
    }
}

static void prepare_streams(long n, cudaStream_t *streams)
{
    for (long i = 0; i < n; i++) {
        must(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        live[i] = get(65536, streams[i]);
        must(cudaMemsetAsync(live[i], 0, 64, streams[i]));
    }
}

/* All sizes from 1 KiB on in mixed order, and between them used blocks. */
static void prepare_miss(cudaStream_t stream)
{
    void *block[2 * HOLES];
    for (size_t i = 0; i < SIZES; i++) size[i] = 1024 + i * 512;
    for (size_t i = SIZES - 1; i > 0; i--) {
        size_t other = roll() % (i + 1), swap = size[i];
        size[i] = size[other];
        size[other] = swap;
    }
    for (int i = 0; i < 2 * HOLES; i++) block[i] = get(size[roll() % SIZES], stream);
    for (int i = 0; i < 2 * HOLES; i += 2) must(galloc_free(block[i], stream));
}

/* 512 bytes to 32 MiB, every order of magnitude as likely as the others. */
static void prepare_churn(cudaStream_t stream)
{
    for (int i = 0; i < SIZES; i++) size[i] = ((size_t)512 << roll() % 16) * (1024 + roll() % 1024) / 1024;
    for (int i = 0; i < LIVE; i++) live[i] = get(size[roll() % SIZES], stream);
}

/* A few sizes of 200 bytes to 400 KB. */
static void prepare_few(cudaStream_t stream)
{
    for (int i = 0; i < SIZES; i++) size[i] = ((size_t)200 << i % 12) + 3 * (size_t)(i % 12);
    for (int i = 0; i < LIVE; i++) live[i] = get(size[roll() % SIZES], stream);
}

/* Half of them end, so that their addresses and pages are there again. */
static void prepare_growable(cudaStream_t stream)
{
    for (int i = 0; i < GROWING; i++) live[i] = get_growable(stream);
    for (int i = 0; i < GROWING; i += 2) must(galloc_free(live[i], stream));
}

static void prepare_parked(cudaStream_t stream)
{
    for (int i = 0; i < LIVE; i++) live[i] = get((size_t)20 << 20, stream);
    for (int i = 0; i < LIVE; i++) must(galloc_free(live[i], stream));
}

int main(int argc, char **argv)
{
    sim_options options = sim_defaults();
    cudaStream_t stream = NULL;
    long n = argc > 2 ? atol(argv[2]) : 0;
    options.memory = (size_t)141 << 30;
    if (argc < 3 || sim_start(&options)) return 2;
    if (argc > 3) setenv("GALLOC_CONF", argv[3], 1);
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must(cudaStreamGetId(stream, &the_id));
    must(galloc_free(get(65536, stream), stream));
    if (!strcmp(argv[1], "churn_two_streams")) {
        cudaStream_t other = NULL;
        must(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        must(galloc_free(get((size_t)1 << 20, other), other));
    }
    if (!strcmp(argv[1], "streams")) {
        static cudaStream_t streams[LIVE];
        prepare_streams(n, streams);
        count_streams(n, streams);
    }
    gai_cu.StreamIsCapturing = is_capturing;
    gai_cu.StreamGetId = get_id;
    if (!strcmp(argv[1], "hot")) count_hot(n, stream);
    if (!strcmp(argv[1], "large")) count_large(n, stream);
    if (!strcmp(argv[1], "miss")) prepare_miss(stream), count_miss(n, stream);
    if (!strcmp(argv[1], "churn")) prepare_churn(stream), count_churn(n, stream);
    if (!strcmp(argv[1], "churn_two_streams")) prepare_churn(stream), count_churn_two_streams(n, stream);
    if (!strcmp(argv[1], "few")) prepare_few(stream), count_churn(n, stream);
    if (!strcmp(argv[1], "parked")) prepare_parked(stream), count_parked(n, stream);
    if (!strcmp(argv[1], "growable")) prepare_growable(stream), count_growable(n, stream);
    return 0;
}
