/* inside.h - what tests may know of galloc's private parts. galloc is compiled once, by inside.c, and the tests are
   linked with it: they use its public functions and these. A program that needs galloc compiled with macros of its own
   includes inside.c instead. */

#ifndef INSIDE_H
#define INSIDE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>

#include "galloc.h"

/* ---- what galloc calls, and constants ---------------------------------------------------------------------------- */

void inside_log(const char *text); /* GALLOC_LOG; each program defines it */
uint64_t inside_clock(void);       /* GALLOC_CLOCK; the system's clock, unless the program defines it */

/* Descriptors are allocated in chunks of this size; 0: of one descriptor or two. */
extern size_t inside_chunk_bytes;

/* The driver's functions that tests replace, by their names without cu. The table is full after the first pool is
   created. */
#define INSIDE_DRIVER(X)                                                                                               \
    X(DeviceGetAttribute, (int *, CUdevice_attribute, CUdevice))                                                       \
    X(DeviceTotalMem, (size_t *, CUdevice))                                                                            \
    X(EventRecord, (CUevent, CUstream))                                                                                \
    X(StreamWaitEvent, (CUstream, CUevent, unsigned int))                                                              \
    X(StreamIsCapturing, (CUstream, CUstreamCaptureStatus *))                                                          \
    X(MemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                             \
    X(MemAlloc, (CUdeviceptr *, size_t))                                                                               \
    X(MemFree, (CUdeviceptr))                                                                                          \
    X(MemFreeAsync, (CUdeviceptr, CUstream))                                                                           \
    X(UserObjectCreate, (CUuserObject *, void *, CUhostFn, unsigned int, unsigned int))
#define INSIDE_POINTER(name, arguments) CUresult(CUDAAPI *name) arguments;

typedef struct inside_driver {
    INSIDE_DRIVER(INSIDE_POINTER)
} inside_driver;

inside_driver inside_driver_in_use(void);
void inside_driver_use(inside_driver driver);

/* ---- the process ------------------------------------------------------------------------------------------------- */

void inside_log_level(int level); /* GALLOC_LOG_... */
void inside_log_anew(void);       /* as before the first line: GALLOC_CONF is read again */
void inside_hold_log(int on);     /* the log's lock, by this thread */
void inside_hold_names(int on);   /* the lock of tags, by this thread */
void inside_hold_trace(void);     /* the latch of the first log, for good */
void inside_hold_global(int on);  /* the global lock, by this thread */
void inside_hold_budget(int on);  /* that of the limits of all devices, likewise */
size_t inside_message_size(void); /* bytes of what galloc_last_message returns */
void inside_forget_pools(void);   /* those that a failed test left behind */
int inside_page_class(size_t bytes);
void inside_forget_tool(void); /* the next pool looks for a tool; in a program with GALLOC_NVTX */
extern int inside_nvtx_fixed;  /* GALLOC_NVTX: with a tool segments are fixed (1) */
int inside_in_mapping(void); /* this thread is in on_map or on_unmap */
int inside_rests(void); /* this thread is in no call: it is in no callback, holds no lock, and owes no message */
pthread_mutex_t *inside_map_lock(void);
void inside_latch(int on); /* a latch that is in no pool */
extern void (*inside_on_malloc)(size_t bytes); /* called before each allocation of host memory, if not NULL */
extern void (*inside_on_free)(void);           /* and before each end of one */
extern void (*inside_on_budget)(void);         /* and before the limits of all devices are locked */
extern void (*inside_on_map)(void);            /* and before the nodes of the address maps are */
/* Called in any thread before a lock is taken, after one is released, before a key is made (function: NULL) and before
   a function of the driver is called, while it holds `locks` locks, none of them a pool's short one or one that comes
   after that. */
extern void (*inside_on_step)(const char *function, int locks);

/* ---- a pool's locks ---------------------------------------------------------------------------------------------- */

void inside_count_max(uint64_t *p, uint64_t n);
void inside_hold_locks(galloc_pool *pool, int on);  /* all that there are, by this thread */
void inside_hold_paging(galloc_pool *pool, int on); /* only the one around everything that changes pages */
void inside_hold_cache(galloc_pool *pool, unsigned long long id, int on); /* only the latch of a stream's cache */
int inside_unlocked(galloc_pool *pool);             /* none of them is held */
int inside_may_free(galloc_pool *pool);             /* the one that a free takes is not held */

/* ---- what a pool keeps of its streams ---------------------------------------------------------------------------- */

typedef struct inside_stream {
    int known; /* 0: the pool keeps nothing of it, and the rest is 0 */
    unsigned long long id;
    size_t blocks, bytes;             /* in the stream's cache */
    size_t fresh_blocks, fresh_bytes; /* of those: not in a bin of the cache */
    size_t unmarked;                  /* bytes freed since the last event, not in the cache */
    uint64_t mallocs;                 /* that the cache served */
    int open;                         /* the cache may be used */
} inside_stream;

inside_stream inside_stream_of(galloc_pool *pool, unsigned long long id);
inside_stream inside_stream_at(galloc_pool *pool, size_t i); /* the i-th, in the pool's order */
/* One of the stream's epochs, 0, 1, ..., runs ahead of the present one, or is as it was again; 0: there is no such. */
int inside_ahead(galloc_pool *pool, unsigned long long id, int which, int on);
/* Spoils the word of this number, 0, 1, ..., among those that galloc_pool_check compares; the second time it is as it
   was again. Returns its name; NULL: there are no more. */
const char *inside_spoil(galloc_pool *pool, int which);
size_t inside_streams(galloc_pool *pool);
int inside_cache_is_aligned(galloc_pool *pool); /* the first stream's, and what frees write to, begin cache lines */
size_t inside_unused_streams(galloc_pool *pool); /* states of streams that others may have next */
void inside_hold_cache(galloc_pool *pool, unsigned long long id, int on); /* the latch of the stream's cache */
void inside_ask_for_event(galloc_pool *pool, unsigned long long id); /* the stream's next call is to record one */
int inside_remembers(cudaStream_t stream, const galloc_pool *pool);  /* this thread has the stream's state cached */

/* Bounds. */
size_t inside_most_blocks(void);       /* inside_stream.blocks */
size_t inside_most_fresh_blocks(void); /* inside_stream.fresh_blocks */
size_t inside_streams_kept(void);      /* more are forgotten again */
size_t inside_most_old_mappings(void);

/* ---- what else a pool has ---------------------------------------------------------------------------------------- */

/* After so many more pools in this pool's memory their handles repeat. */
void inside_leave_handles(galloc_pool *pool, size_t n);
int inside_ended(galloc_pool *pool); /* or is about to: no call comes into it any more */
void inside_set_memory_limit(galloc_pool *pool, size_t bytes);
void inside_count_all(galloc_pool *pool, uint64_t n); /* each counter of what happened rises by n */
void inside_count_live(galloc_pool *pool, long long bytes); /* the counter of live bytes is off by so many */
void inside_charge(galloc_pool *pool, size_t bytes, int on); /* the device's limits are charged more, or as before */
void inside_set_live_peak(galloc_pool *pool, size_t bytes);
void inside_never_look_for_idle(galloc_pool *pool); /* frees give nothing back because of its age */
CUmemoryPool inside_driver_pool(galloc_pool *pool);
size_t inside_captures(galloc_pool *pool);     /* that go on and use it */
size_t inside_headroom(galloc_pool *pool);     /* bytes until a limit is met */
size_t inside_free_pages(galloc_pool *pool);   /* bytes of pages that are free as a whole: what can move */
size_t inside_parked(galloc_pool *pool);       /* bytes of pages between two addresses */
size_t inside_old_mappings(galloc_pool *pool); /* that no page is at any more */
uint64_t inside_plans(galloc_pool *pool);      /* ranges planned so far */
/* The search finds the plan that a look at each place alone finds, for a request of the stream with that id. */
int inside_plan_is_best(galloc_pool *pool, unsigned long long id, size_t bytes, int far, int may_wait);
uint64_t inside_early_moves(galloc_pool *pool, uint64_t n); /* of the last n, those from under work that was not done */
uintptr_t inside_memo_first(galloc_pool *pool);             /* of the memo that is looked at next: the first block */
uintptr_t inside_memo_at(galloc_pool *pool);                /* and the address */
void *inside_live_block(galloc_pool *pool);                 /* some block that the program has; NULL: it has none */
int inside_has_default_pool(int device);                    /* that calls find */
uint32_t inside_stack_number(void *const *at, uint32_t n);  /* in the depot, which it enters if it is new */
int inside_block_is_found(const void *ptr);                 /* by a look without a lock */
int inside_segment_is_lost(const void *ptr);                /* a reset took it */
size_t inside_most_marks(galloc_pool *pool);                /* the longest list of them that a block has */
void inside_move_mark(void *ptr, ptrdiff_t begin, ptrdiff_t end); /* moves the ends of a block's first mark */
size_t inside_list_holes(galloc_pool *pool, int on); /* the list of holes is as it was, or 0: empty. How many it had */
/* The end of a list by age is as it was, or 0: the oldest block. 0: no list has two. */
int inside_list_newest(galloc_pool *pool, int on);
int inside_list_parked(galloc_pool *pool, int on); /* the same for the first of the parked pages */

/* Takes all host memory for descriptors that nobody was promised: of blocks and marks, or of all. */
void inside_drain_blocks(galloc_pool *pool);
void inside_drain_marks(galloc_pool *pool);
void inside_drain_all(galloc_pool *pool);
int inside_leave_marks(galloc_pool *pool, size_t spare); /* after a drain: so many can be taken */
void inside_promise_mark(galloc_pool *pool, int on);     /* one more than blocks and jobs need, or one less again */

/* A descriptor of the pool: of blocks (kind 0), of marks (1), and so on; NULL: there is no such kind, or no memory. */
enum { INSIDE_MARKS = 1 };
void *inside_descriptor_take(galloc_pool *pool, int kind);
void inside_descriptor_give(galloc_pool *pool, int kind, void *descriptor);

/* The pool behind `pool` in the list of its device's, or with NULL the first; the visit to `pool` ends. */
typedef struct inside_device inside_device;
inside_device *inside_device_of(galloc_pool *pool);
galloc_pool *inside_visit(inside_device *device, galloc_pool *pool);

/* ---- marks: which part of a block waits for which stream --------------------------------------------------------- */

typedef struct inside_mark {
    int stream;
    uint64_t epoch;
    uint32_t begin, end; /* units of 512 bytes */
} inside_mark;

typedef struct inside_marks inside_marks; /* a list of them; the pool is locked while there is one */

inside_marks *inside_marks_new(galloc_pool *pool, int streams);
int inside_marks_begin(inside_marks *marks); /* an empty list; 0: no host memory */
void inside_marks_add(inside_marks *marks, inside_mark mark);
void inside_marks_cut(inside_marks *marks, uint32_t at); /* in two, that are joined again */
void inside_marks_coarsen(inside_marks *marks);
int inside_marks_get(const inside_marks *marks, int i, inside_mark *mark); /* 0: there are fewer */
uint64_t inside_marks_clear(inside_marks *marks); /* returns how often streams are still held */
void inside_marks_end(inside_marks *marks);

/* ---- descriptors and bins, for checks of the check --------------------------------------------------------------- */

size_t inside_reserve(galloc_pool *pool);      /* marks at hand, in a pool as inside_pool returns it */
size_t inside_reserve_take(galloc_pool *pool); /* takes those that are promised to nobody; how many that were */
void inside_reserve_give(galloc_pool *pool);   /* gives them back */
void *inside_wait_take(galloc_pool *pool);
void inside_wait_give(galloc_pool *pool, void *wait);
int inside_misfile(void *p, size_t bytes); /* puts a free block into the bin of another size; or 0: back */
int inside_swap_bins(void *p, void *q); /* puts each of two free blocks into the other's bin; or back */

#endif
