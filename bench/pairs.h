/* pairs.h - the host time of pairs of an alloc and a free, on one thread or several. */

#ifndef BENCH_PAIRS_H
#define BENCH_PAIRS_H

#include <pthread.h>

#include "allocator.h"

enum {
    PAIRS_SIZES = 1024,  /* in worker.size */
    PAIRS_LIVE = 2048,   /* in worker.live */
    PAIRS_THREADS = 16,  /* at most */
    PAIRS_IN_A_TURN = 64 /* on one device, before the other has its turn */
};

/* One thread's share of a measurement. */
typedef struct worker {
    const allocator *a;
    cudaStream_t stream;
    size_t bytes;
    size_t *size;        /* PAIRS_SIZES of them; NULL: always `bytes` */
    void **live;         /* PAIRS_LIVE blocks to be replaced; NULL: each block is freed at once */
    cudaStream_t turn[2];
    bool turns;          /* devices 0 and 1 have turns, on these streams, each as the current device */
    long in_turn;        /* so many pairs, then the next thread has its turn and this one waits; 0: all at once */
    int index, threads;
    long *whose;         /* the thread that has its turn */
    long pairs;
    unsigned next;       /* in `size` and `live` */
    double start, end;   /* ns */
    pthread_barrier_t *barrier;
    pthread_t thread;
    cudaError_t error;
} worker;

/* The median time of a pair on its thread, with n workers at once or in turn, after a warm-up. Ends the process when a call
   fails. */
double pairs_ns(worker *w, int n);

/* Ends the process, with a line on stderr, unless error is cudaSuccess. */
void pairs_check(const allocator *a, cudaError_t error);

#endif
