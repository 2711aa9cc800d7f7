/* probe_addresses.cu - does cudaMalloc give out addresses again that cudaFree has taken back? Allocates and frees
   blocks of one size at random, and counts at how many different addresses, in steps of 2 MiB, there has been memory
   so far. It tests nothing. */

#include <cuda_runtime.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST = 150, MOST = 300, CALLS = 3000, ROUNDS = 4, STEPS = 1 << 20 };
static const size_t step = 2 << 20;

static unsigned char seen[STEPS]; /* by the lower bits of the address, in steps */
static void *live[MOST];
static int count;

/* Returns at how many addresses there was no memory before. */
static long allocate(size_t bytes)
{
    void *p = NULL;
    long fresh = 0;
    if (cudaMalloc(&p, bytes)) {
        printf("cudaMalloc fails\n");
        exit(1);
    }
    live[count++] = p;
    for (size_t at = (size_t)p / step; at <= ((size_t)p + bytes - 1) / step; at++) {
        fresh += !seen[at % STEPS];
        seen[at % STEPS] = 1;
    }
    return fresh;
}

static void release(int i)
{
    cudaFree(live[i]);
    live[i] = live[--count];
}

int main(void)
{
    static const size_t sizes[] = {2, 20, 64};
    srand(1);
    for (int s = 0; s < 3; s++) {
        long fresh = 0, mallocs = 0;
        memset(seen, 0, sizeof seen);
        for (int round = 1; round <= ROUNDS; round++) {
            for (int i = 0; i < CALLS; i++) {
                if (count >= LEAST && (count == MOST || rand() % 2)) {
                    release(rand() % count);
                } else {
                    fresh += allocate(sizes[s] << 20);
                    mallocs++;
                }
            }
            printf("blocks of %2zu MiB: after %4ld cudaMalloc %3d are live, and %5ld MiB of addresses have been used\n",
                   sizes[s], mallocs, count, fresh * 2);
        }
        while (count) release(0);
    }
    return 0;
}
