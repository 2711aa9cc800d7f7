#define _GNU_SOURCE
#include "pairs.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { REPETITIONS = 7 };
#define REPETITION_NS 15e6 /* a repetition is made at least so long */

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

void pairs_check(const allocator *a, cudaError_t error)
{
    if (!error) return;
    fprintf(stderr, "%s failed with %d (%s): %s\n", a->name, (int)error, cudaGetErrorName(error), a->message());
    exit(1);
}

/* ---- pairs ------------------------------------------------------------------------------------------------------- */

static cudaError_t pair_at_once(worker *w)
{
    void *ptr;
    size_t bytes = w->size ? w->size[w->next++ % PAIRS_SIZES] : w->bytes;
    cudaError_t error = w->a->alloc(&ptr, bytes, w->stream);
    return error ? error : w->a->free(ptr, w->stream);
}

static cudaError_t pair_replaced(worker *w)
{
    void **ptr = &w->live[w->next * 2654435761u % PAIRS_LIVE];
    cudaError_t error = w->a->free(*ptr, w->stream);
    return error ? error : w->a->alloc(ptr, w->size[w->next++ % PAIRS_SIZES], w->stream);
}

static cudaError_t set_device(const allocator *a, int device)
{
    cudaError_t error = cudaSetDevice(device);
    return error || !a->set_device ? error : a->set_device(device);
}

static cudaError_t pairs_in_turn(worker *w)
{
    cudaError_t error = cudaSuccess;
    for (long i = 0; i < w->pairs && !error; i++) {
        int device = i / PAIRS_IN_A_TURN % 2;
        if (i % PAIRS_IN_A_TURN == 0) error = set_device(w->a, device);
        w->stream = w->turn[device];
        if (!error) error = pair_at_once(w);
    }
    return error ? error : set_device(w->a, 0);
}

/* A thread that waits spins, since to be woken by the system would cost more than the pairs; but with fewer processors
   than threads it must let the other one run. */
static void wait_for_turn(const worker *w)
{
    for (unsigned spins = 1; __atomic_load_n(w->whose, __ATOMIC_ACQUIRE) != w->index; spins++)
        if (spins % 10000 == 0) sched_yield();
}

static cudaError_t pairs_between_threads(worker *w)
{
    cudaError_t error = cudaSuccess;
    for (long i = 0; i < w->pairs; i += w->in_turn) {
        wait_for_turn(w);
        for (long k = i; k < w->pairs && k < i + w->in_turn && !error; k++) error = pair_at_once(w);
        __atomic_store_n(w->whose, (w->index + 1) % w->threads, __ATOMIC_RELEASE);
    }
    return error;
}

static void *work(void *arg)
{
    worker *w = arg;
    cudaError_t error = set_device(w->a, 0);
    if (w->barrier) pthread_barrier_wait(w->barrier);
    w->start = now_ns();
    if (w->turns) error = error ? error : pairs_in_turn(w);
    else if (w->in_turn) error = pairs_between_threads(w);
    else if (w->live)
        for (long i = 0; i < w->pairs && !error; i++) error = pair_replaced(w);
    else
        for (long i = 0; i < w->pairs && !error; i++) error = pair_at_once(w);
    w->end = now_ns();
    w->error = error;
    return NULL;
}

/* ---- time -------------------------------------------------------------------------------------------------------- */

static void start_threads(worker *w, int n)
{
    for (int i = 0; i < n; i++) {
        if (!pthread_create(&w[i].thread, NULL, work, &w[i])) continue;
        fprintf(stderr, "no thread could be started\n");
        exit(1);
    }
    for (int i = 0; i < n; i++) pthread_join(w[i].thread, NULL);
}

/* Nanoseconds that n workers take together for `pairs` pairs each: from the first one's start to the last one's end. */
static double elapsed(worker *w, int n, long pairs)
{
    pthread_barrier_t barrier;
    long whose = 0;
    pthread_barrier_init(&barrier, NULL, (unsigned)n);
    for (int i = 0; i < n; i++) w[i].pairs = pairs;
    for (int i = 0; i < n; i++) {
        w[i].index = i;
        w[i].threads = n;
        w[i].whose = &whose;
    }
    for (int i = 0; i < n; i++) w[i].barrier = n > 1 ? &barrier : NULL;
    if (n == 1) work(w);
    else start_threads(w, n);
    pthread_barrier_destroy(&barrier);
    double start = w->start, end = w->end;
    for (int i = 0; i < n; i++) {
        pairs_check(w[i].a, w[i].error);
        if (w[i].start < start) start = w[i].start;
        if (w[i].end > end) end = w[i].end;
    }
    return (end - start) / (w->in_turn ? n : 1);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double pairs_ns(worker *w, int n)
{
    double ns[REPETITIONS];
    long pairs = 16;
    while (elapsed(w, n, pairs) < REPETITION_NS) pairs *= 2;
    for (int i = 0; i < REPETITIONS; i++) ns[i] = elapsed(w, n, pairs) / (double)pairs;
    qsort(ns, REPETITIONS, sizeof *ns, by_value);
    return ns[REPETITIONS / 2];
}
