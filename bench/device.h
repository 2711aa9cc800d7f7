/* device.h - what the programs here need of a device besides CUDA's own functions: queued work that uses blocks, and an
   account of memory and calls that is not galloc's. device_sim.c gives it for the simulated device; device_cuda.cu and
   account_cuda.c for a GPU. A program is linked with one of the two. */

#ifndef BENCH_DEVICE_H
#define BENCH_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- start and stop ---------------------------------------------------------------------------------------------- */

extern const char *const device_backend; /* "sim" or "cuda" */

/* A device without memory in use; `behind`: the work queued on it is to run well behind the host. Returns 0, or -1 with
   a line on stderr. */
int device_start(bool behind);
void device_count(int devices); /* how many a simulated host has from the next start on; before that 1 */
void device_stop(void);
void device_describe(char *text, size_t size); /* one line: what the figures were measured on */

/* ---- work -------------------------------------------------------------------------------------------------------- */

/* Queues a write of all bytes of a block. `tag` decides what is written. */
cudaError_t device_write(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag);
/* Queues a read of them that expects what `tag` wrote. */
cudaError_t device_check(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag);
/* Queues work that uses the block and knows nothing of what is in it. */
cudaError_t device_use(cudaStream_t stream, void *ptr, size_t bytes);
/* What is queued on `later` from now on comes after what `earlier` has been given. */
cudaError_t device_order(cudaStream_t earlier, cudaStream_t later);
/* A non-blocking stream begins and ends, beside the account; queued work goes on. */
cudaError_t device_stream_open(cudaStream_t *stream);
cudaError_t device_stream_close(cudaStream_t stream);
bool device_idle(cudaStream_t stream); /* all work of the stream is done */
cudaError_t device_finish(void);       /* waits for all work */

/* Starts work on a stream of its own that does not end before device_let_go, so that a call which waits for the device
   meanwhile does not return. Lest that be the end of it, the work gives up when the host has made no sign for two
   seconds, which device_findings tells. Returns 0, or -1 with a line on stderr. */
int device_hold(void);
void device_sign(void);
void device_let_go(void);
/* What the memory of a block went through before its stream was given work on it: to be asked between its allocation
   and its first use. */
typedef struct device_past {
    int moved;      /* pages that were used last through other addresses */
    int moved_busy; /* of those, the ones that queued work may still have used */
    bool handed_over, handed_over_busy; /* another stream used some of the bytes last; and was not done with them */
} device_past;

bool device_past_of(cudaStream_t stream, void *ptr, size_t bytes, device_past *past); /* false: cannot be told */

/* What was found wrong since the start: bytes that a check did not expect, and on the simulated device also races and
   whatever else it finds. The first few are printed in words. */
long device_findings(FILE *out);
long device_races(void); /* those that are races; -1: this device cannot tell */

/* ---- account ----------------------------------------------------------------------------------------------------- */

void account_reset(void);                     /* begins anew, with nothing held */
size_t account_held(void);                    /* bytes of physical memory */
size_t account_peak(void);
uint64_t account_calls(const char *function); /* calls of a CUDA function, by its plain name */
/* May put a counting function before one of the driver's that somebody has fetched. */
void account_stand_before(const char *symbol, void **function);
/* A look only asks which stream or context something is, and whether it is being captured. */
int64_t account_looks(void);                  /* how many; -1: they are not counted */
double account_looks_us(void);                /* what they cost by the device's model; NAN: it has none */
double account_us(void);                      /* what all other calls cost; likewise */

#ifdef __cplusplus
}
#endif
#endif
