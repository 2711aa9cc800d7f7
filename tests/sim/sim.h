/* sim.h - a CUDA device made of host memory, for programs that have no GPU to run on.

   Link the sources beside it instead of the CUDA runtime and compile against either the toolkit's headers or the subset
   in tests/sim/include. The functions of CUDA that it knows behave as a real device was measured to behave; what only a
   test needs (start, work, faults, findings, accounts) is declared here and begins with sim_. A program that never
   calls sim_start has a device by its first call of CUDA, and is told at its end what was found:
   docs/simulated-device.md.
   Kernels with a body: sim_kernel.h.

   The main service is the LEDGER: for each physical page it keeps which operation last wrote and read which bytes, with
   a vector clock. Two accesses to the same physical bytes, one of them a write, must be ordered by happens-before,
   through whatever addresses they were made and in whatever order they happened to run. A single run of a single
   schedule therefore finds every race that lies in it.

   Happens-before has these edges and no others: order within a stream; event recorded -> wait on it; the legacy stream
   with the blocking streams of its context (both ways, as CUDA defines it); launches of the same graph instance; a
   completion that the host has seen (a query that said so, a synchronising call that returned) -> everything that is
   queued afterwards. After a race the later access stands for both.

   Threads: every function may be called from any thread; one lock inside. */

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

enum { SIM_LEDGER, /* no memory behind the addresses; any size; accesses are looked up in the ledger */
       SIM_BACKED  /* a memfd behind them, mapped where cuMemMap says, and the ledger too; the host gives
                       memory for what is written; 1 TiB of a device at most */ };

enum { SIM_PACE_RANDOM = -1, /* every CUDA call lets 0..3 begins or ends of operations happen */
       SIM_PACE_STILL = 0,   /* nothing happens until something synchronises, or sim_run says so */
       SIM_PACE_PROMPT = 1   /* all that can happen has happened before the next call returns */ };

typedef struct sim_options {
    int mode;            /* SIM_LEDGER */
    int devices;         /* 1 .. 8 */
    size_t memory;       /* bytes of each device */
    int vmm;             /* virtual memory management is supported */
    int rdma;            /* 1: pages can be made capable of RDMA; 0: not; -1: the driver does not know the attribute */
    size_t granularity;  /* of cuMemCreate, bytes; 2 MiB */
    uint64_t seed;       /* of the scheduler */
    int pace;            /* SIM_PACE_... */
    int lag;             /* an operation may begin only when so many were queued after it, or a call waits for it */
    int panic;           /* 1: a call that crashes on the real device prints a line, aborts; 0: a finding, error 400 */
    int driver_version;  /* what cuDriverGetVersion says; functions newer than it have no entry point */
} sim_options;

sim_options sim_defaults(void); /* ledger, 1 device of 64 GiB, vmm, rdma, seed 1, random pace, no lag, panic */

/* Begins anew, as a new process would: no contexts, no streams, counters zero, faults and findings cleared. The calling
   thread has no current context, like any thread until it calls the runtime. Returns 0, or -1 with a line on stderr. */
int sim_start(const sim_options *options);
void sim_stop(void);                  /* frees everything of the sim's own */
void sim_driver_exit(void);           /* from now on every call says that the driver is shutting down (4) */
void sim_forget_context(void);        /* the calling thread has no current context any more */
/* A green context, as cuGreenCtxCreate and cuCtxFromGreenCtx give it; and its end, after which its work goes on (seen on
   a real device). It ends with the primary context of its device at the latest. */
cudaError_t sim_green_create(CUcontext *context, int device);
cudaError_t sim_green_destroy(CUcontext context);

/* ---- work ------------------------------------------------------------------------------------------------------ */

enum { SIM_READ = 1, SIM_WRITE = 2, SIM_CHECK = 4 }; /* CHECK with READ: the bytes must carry `tag` */

typedef struct sim_access {
    const void *ptr;   /* device address */
    size_t bytes;
    int how;           /* SIM_READ, SIM_WRITE, SIM_READ | SIM_CHECK */
    uint64_t tag;      /* what is written, or expected */
} sim_access;

/* Queues an operation (a kernel) that makes n accesses. Work on a captured stream becomes a node of the graph.
   In backed mode each aligned word of a written range, and its first and last 8 bytes, really are set to the tag; a
   check looks at the first and last aligned word, and at one in each 4 KiB. cudaMemcpyAsync and cudaMemsetAsync are
   operations too, and move real bytes in backed mode. */
cudaError_t sim_launch(cudaStream_t stream, const sim_access *accesses, int n);
/* The same with a host function that runs when the operation does (backed mode: it may touch device memory). */
cudaError_t sim_launch_call(cudaStream_t stream, const sim_access *accesses, int n, void (*call)(void *), void *arg);

void sim_run(long steps);             /* lets so many begins and ends happen; -1: until nothing is left that can */
void sim_hold(cudaStream_t stream, int on); /* while on, none of its operations begins; a wait for it is a deadlock */
long sim_pending(void);               /* operations queued or running */
int sim_stream_done(cudaStream_t stream); /* 1 when nothing is pending on it; no call is counted, no edge made */

/* For tests that decide themselves what happens when; NULL takes them away, and so does sim_start.
   before: called with the name of each CUDA function before it does anything, by the thread that calls it.
   at_query: called when an event is queried whose work is not done; if it returns 1, just what the event waits for is
   done now, and the query says so. It must not call CUDA. */
void sim_hook(void (*before)(const char *function), int (*at_query)(void));

/* ---- findings -------------------------------------------------------------------------------------------------- */

typedef enum sim_kind {
    SIM_ANY,
    SIM_RACE,           /* two accesses to the same physical bytes, not ordered */
    SIM_STALE,          /* a checked read found another tag, or bytes never written */
    SIM_HOLE,           /* an access to an address that is not mapped, or without access rights */
    SIM_UNMAP_IN_USE,   /* unmapped (or freed) while an operation queued before it still could use the address */
    SIM_DEADLOCK,       /* something waits and nothing can run */
    SIM_DEAD_HANDLE,    /* a call on a stream or event that was destroyed */
    SIM_CAPTURE_BROKEN, /* a call invalidated somebody's capture */
    SIM_BAD_EVENT,      /* recorded on a stream of another context than its own */
    SIM_KINDS
} sim_kind;

long sim_findings(sim_kind kind);               /* how many since the start or the last clear */
const char *sim_finding(long i);                /* text of the i-th (of all kinds; the first 100 are kept), or NULL */
void sim_findings_clear(void);
size_t sim_leaks(char *text, size_t size);      /* living handles, mappings, reservations, events, mallocs */

/* ---- accounts: the device's own, whatever the program says ---------------------------------------------------- */

long sim_calls(const char *function);           /* of this CUDA function by its plain name ("cuMemMap"); NULL: all */
long sim_blocking_calls(void);                  /* calls that waited for operations not yet seen complete */
double sim_cost_us(void);                       /* what all calls would have cost on a real host */
uint64_t sim_cost_of_ns(const char *function);  /* the part of it that is this function's; NULL: all of it */
double sim_cost_us_of(const char *function);    /* the same in microseconds */
void sim_cost_reset(void);
size_t sim_physical(int device);                /* bytes of physical memory taken: handles and cudaMalloc blocks */
size_t sim_physical_peak(int device);
size_t sim_rdma(int device);                    /* bytes of handles that are capable of RDMA */
int sim_retained(int device);                   /* times that its primary context was retained, less releases */
void sim_physical_peak_reset(int device);
size_t sim_mapped(int device);                  /* bytes of addresses that have a page */
size_t sim_addresses(void);                     /* bytes of addresses reserved */
size_t sim_unmapped_under_work(void);           /* bytes unmapped while operations were still running (legal) */
unsigned long long sim_operations(void);        /* queued since the start */

/* What the physical bytes of a range have seen. */
typedef struct sim_past {
    int moved;            /* handles that were used last through other addresses than these */
    int moved_busy;       /* of those, the ones that operations queued before may still be using */
    int handed_over;      /* 1: the last operation on some of the bytes was another stream's */
    int handed_over_busy; /* 1: and such a one is not done */
} sim_past;

/* To be asked between the allocation of a range and the first operation that `stream` is given on it. Handles that no
   operation has used yet were not moved. No call is counted, no edge made. */
sim_past sim_past_of(cudaStream_t stream, const void *ptr, size_t bytes);

/* ---- faults ---------------------------------------------------------------------------------------------------- */

/* The nth (1 ..) call of `function` from now (NULL: of any function that can fail, sim_ ones excepted) fails with
   `error` (0: the error which that function gives when it has no memory); with `on` also all later ones.
   A call that fails has no other effect. At most 8 faults are armed at once. */
void sim_fail(const char *function, long nth, int on, int error);
long sim_failed(void);                          /* how many calls failed by sim_fail since it was armed */
void sim_fail_clear(void);

void *sim_malloc(size_t bytes);                 /* give these to the header as GALLOC_MALLOC and GALLOC_FREE */
void sim_free(void *p);
void sim_fail_malloc(long nth, int on);
long sim_failed_mallocs(void);
size_t sim_malloc_live(void);                   /* blocks of sim_malloc not yet freed */

#ifdef __cplusplus
}
#endif
#endif
