/* sim.h - a simulated CUDA device whose memory is host memory, for machines without a GPU.

   Link the sources in this folder instead of the CUDA runtime. Compile against the toolkit's headers or against the
   subset in tests/sim/include. The simulated CUDA functions behave as measured on a real device. Functions that only
   tests need begin with sim_ and are declared here: start, work, faults, findings and accounts. A program that never
   calls sim_start gets a device at its first CUDA call, and its findings are printed when it ends: see
   docs/simulated-device.md. Kernels with a body: sim_kernel.h.

   The main service is the ledger. For each byte of each physical page it records the operations that last wrote and
   read it, with a vector clock. Two accesses to the same physical byte, at least one of them a write, must be ordered
   by happens-before. Neither the addresses that they use nor the order in which they run matters. One run of one
   schedule therefore finds every race that the schedule contains.

   Happens-before has these edges and no others:
   - the order within a stream;
   - from the record of an event to a wait for it;
   - between the legacy stream and the blocking streams of its context, in both directions, as CUDA defines it;
   - between launches of the same graph instance;
   - from a completion that the host has seen (a query that returned success, a call that synchronized) to everything
     that is queued afterwards.
   After a race the later access replaces both in the ledger.

   Every function may be called from any thread; one lock guards the device. */

#ifndef SIM_H
#define SIM_H

#include <stddef.h>
#include <stdint.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- start and stop ------------------------------------------------------------------------------------------- */

enum { SIM_LEDGER, /* no memory behind the addresses, any size; the ledger checks accesses */
       SIM_BACKED  /* a memfd is the memory, mapped where cuMemMap maps it, and the ledger checks accesses as well.
                      The host allocates only what is written. At most 1 TiB per device */ };

enum { SIM_PACE_RANDOM = -1, /* each CUDA call lets 0..3 operations begin or end */
       SIM_PACE_STILL = 0,   /* operations run only in calls that synchronize, and in sim_run */
       SIM_PACE_PROMPT = 1   /* every operation that can run has ended before the next call returns */ };

/* How a device differs from what the options say of all; 0: it does not. */
typedef struct sim_unlike {
    size_t memory, granularity;
    int no_vmm, no_rdma, no_pools; /* 1: the device does not support it; pools: cudaMallocAsync too */
} sim_unlike;

typedef struct sim_options {
    int mode;            /* SIM_LEDGER or SIM_BACKED */
    int devices;         /* 1 .. 16 */
    size_t memory;       /* bytes of each device */
    int vmm;             /* virtual memory management is supported */
    int rdma;            /* 1: pages can be created for RDMA; 0: not; -1: the driver does not know the attribute */
    size_t granularity;  /* of cuMemCreate, in bytes; a power of two, 2 MiB by default */
    uint64_t seed;       /* of the scheduler */
    int pace;            /* SIM_PACE_... */
    int lag;             /* an operation begins when so many are queued behind it, or a call waits for it */
    int panic;           /* 1: a call that crashes a real device prints a line and aborts; 0: a finding, error 400 */
    int driver_version;  /* result of cuDriverGetVersion; newer functions have no entry point */
    sim_unlike unlike[16]; /* by device */
} sim_options;

sim_options sim_defaults(void); /* ledger, 1 device of 64 GiB, vmm, rdma, seed 1, random pace, no lag, panic */

/* Starts a new device, as a new process would: no contexts, no streams, counters zero, faults and findings cleared. The
   calling thread has no current context, like any thread before its first call of the runtime. Returns 0, or -1 after
   printing a line to stderr. */
int sim_start(const sim_options *options);
void sim_stop(void);                  /* frees all memory of the simulated device */
void sim_driver_exit(void);           /* from now on every call returns error 4: the driver is shutting down */
void sim_forget_context(void);        /* removes the calling thread's current context */
/* A green context, as cuGreenCtxCreate and cuCtxFromGreenCtx give it; and its end, after which its work goes on
   (seen on a real device). It ends with the primary context of its device at the latest. */
cudaError_t sim_green_create(CUcontext *context, int device);
cudaError_t sim_green_destroy(CUcontext context);

/* ---- work ------------------------------------------------------------------------------------------------------ */

enum { SIM_READ = 1, SIM_WRITE = 2, SIM_CHECK = 4 }; /* CHECK with READ: the bytes must contain `tag` */

typedef struct sim_access {
    const void *ptr;   /* device address */
    size_t bytes;
    int how;           /* SIM_READ, SIM_WRITE, SIM_READ | SIM_CHECK */
    uint64_t tag;      /* written or expected contents */
} sim_access;

/* Queues an operation, which stands for a kernel, with n accesses. On a captured stream it becomes a node of the graph.
   In backed mode a write sets each aligned word of its range, and the first and last 8 bytes, to the tag. A check
   compares the first and last aligned word, and one word in each 4 KiB. cudaMemcpyAsync and cudaMemsetAsync are
   operations too, and move real bytes in backed mode. */
cudaError_t sim_launch(cudaStream_t stream, const sim_access *accesses, int n);
/* The same with a host function that runs together with the operation. In backed mode it may access device memory. */
cudaError_t sim_launch_call(cudaStream_t stream, const sim_access *accesses, int n, void (*call)(void *), void *arg);

void sim_run(long steps);             /* lets this many operations begin or end; -1: all that can */
void sim_hold(cudaStream_t stream, int on); /* 1: no operation of the stream begins, and a wait for one is a deadlock */
long sim_pending(void);               /* operations queued or running */
int sim_stream_done(cudaStream_t stream); /* 1: nothing is pending; no call is counted, and no edge made */

/* Callbacks for tests that control the schedule themselves. NULL removes them; so does sim_start.
   before     called with the name of each CUDA function before it runs, by the calling thread
   at_query   called when an event with unfinished work is queried. If it returns 1, the work that the event waits for
              is completed at once, and the query reports it. It must not call CUDA. */
void sim_hook(void (*before)(const char *function), int (*at_query)(void));
/* Called first of all in each function. It does nothing; a program may have one of its own. */
void sim_called(const char *function);

/* ---- findings -------------------------------------------------------------------------------------------------- */

typedef enum sim_kind {
    SIM_ANY,
    SIM_RACE,           /* two unordered accesses to the same physical bytes, one of them a write */
    SIM_STALE,          /* a checked read found another tag, or bytes never written */
    SIM_HOLE,           /* an access to an address that is not mapped, or that the device has no access rights to */
    SIM_UNMAP_IN_USE,   /* unmapped or freed while an operation queued before could still use the address */
    SIM_DEADLOCK,       /* a call waits, and no operation can run */
    SIM_DEAD_HANDLE,    /* a call on a destroyed stream or event */
    SIM_CAPTURE_BROKEN, /* a call invalidated a capture */
    SIM_BAD_EVENT,      /* an event was recorded on a stream of another context */
    SIM_KINDS
} sim_kind;

long sim_findings(sim_kind kind);               /* findings since the start or the last clear */
const char *sim_finding(long i);                /* text of the i-th finding, or NULL; the first 100 are kept */
void sim_findings_clear(void);
size_t sim_leaks(char *text, size_t size);      /* number of handles, mappings, reservations, events, mallocs left */

/* ---- accounts: kept by the device itself ---------------------------------------------------------------------- */

long sim_calls(const char *function);           /* calls of this function by plain name ("cuMemMap"); NULL: all */
long sim_blocking_calls(void);                  /* calls that waited for operations the host had not seen complete */
double sim_cost_us(void);                       /* estimated time of all calls on a real host */
uint64_t sim_cost_of_ns(const char *function);  /* the part of one function; NULL: all */
double sim_cost_us_of(const char *function);    /* the same in microseconds */
void sim_cost_reset(void);
size_t sim_physical(int device);                /* bytes of physical memory in use: handles and cudaMalloc blocks */
size_t sim_physical_peak(int device);
size_t sim_rdma(int device);                    /* bytes of handles created for RDMA */
int sim_retained(int device);                   /* retains of its primary context, minus releases */
void sim_physical_peak_reset(int device);
size_t sim_mapped(int device);                  /* bytes of addresses that are mapped */
size_t sim_addresses(void);                     /* bytes of addresses reserved */
size_t sim_unmapped_under_work(void);           /* bytes unmapped while operations were still running (legal) */
unsigned long long sim_operations(void);        /* operations queued since the start */

/* Past uses of the physical bytes of a range. */
typedef struct sim_past {
    int moved;            /* handles whose last use was through other addresses */
    int moved_busy;       /* those among them that an operation queued before may still use */
    int handed_over;      /* 1: the last operation on some of the bytes was on another stream */
    int handed_over_busy; /* 1: and such an operation has not completed */
} sim_past;

/* Call it between the allocation of a range and the first operation that `stream` performs on it. Handles that no
   operation has used do not count as moved. No call is counted, and no happens-before edge is made. */
sim_past sim_past_of(cudaStream_t stream, const void *ptr, size_t bytes);

/* ---- faults ---------------------------------------------------------------------------------------------------- */

/* The nth call of `function` from now on (1: the next one) fails with `error`. NULL: of any function that can fail,
   except those of sim.h. 0: with the error that the function returns when out of memory. `on`: all later calls fail
   too. A failed call has no other effect. At most 8 faults are armed at a time. */
void sim_fail(const char *function, long nth, int on, int error);
long sim_failed(void);                          /* calls that have failed because of sim_fail since it was armed */
void sim_fail_clear(void);
void sim_fail_pause(int on);                    /* 1: until 0 no call and no host malloc fails or counts */
/* The context gets a sticky error, an illegal address for example: every later call on it, its streams or its events
   returns the error until the context ends. Its queued work goes on, since nothing says when a device stops it. Other
   contexts are not affected. sim_fail with such an error does the same to the current context of the failing call. */
void sim_context_fail(CUcontext context, int error);

void *sim_malloc(size_t bytes);                 /* for GALLOC_MALLOC and GALLOC_FREE */
void sim_free(void *p);
void sim_fail_malloc(long nth, int on);
long sim_failed_mallocs(void);
size_t sim_malloc_live(void);                   /* blocks of sim_malloc that are not freed */

#ifdef __cplusplus
}
#endif
#endif
