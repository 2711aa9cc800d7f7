/* galloc.h - v0.1.0 - a caching allocator for CUDA device memory, in one C header - MIT-0 or public domain

   galloc serves device memory from a heap of its own, so that most calls do not enter the driver. It reuses freed
   memory in the order of your streams. It maps physical pages into one address range per pool and remaps free pages to
   the addresses that need them, so that memory of any size serves any other. Counters and reports show its state.
   Languages: C99, C++11, CUDA C++, 64 bits. Compilers: gcc, clang, nvcc; the code for MSVC has never been compiled.
   galloc needs CUDA 12.0 or later and nothing else.

   DO THIS
     In one file:                                       In all others:
       #define GALLOC_IMPLEMENTATION                      #include "galloc.h"
       #include "galloc.h"

       float *p;
       if (galloc_malloc((void **)&p, bytes, stream) == cudaSuccess) {
           my_kernel<<<grid, block, 0, stream>>>(p);
           galloc_free(p, stream);               // does not wait; later work on the same stream may reuse the memory
       }

     Link the CUDA runtime (-lcudart, or nvcc), and with a glibc older than 2.34 also -lpthread; libcuda is not needed.

   DOES NOT
     - access device memory, except with the setting debug: all bookkeeping is on the host
     - change the current device, or the error that cudaGetLastError returns
     - allocate managed, pinned or peer-mapped memory

   OPTIONS             default   define where           effect
     GALLOC_STATIC        off    every file             All functions are static. Each file has a heap and limits of
                                                        its own: memory of one file cannot be freed in another. Each
                                                        must define GALLOC_IMPLEMENTATION, too (else gcc -Wall warns)
     GALLOC_NO_PYTORCH    off    implementation         Leaves out like:pytorch. GALLOC_NO_BACKENDS leaves out other
                                                        backends, GALLOC_NO_POOLED and GALLOC_NO_HEURISTIC leave out
                                                        these strategies. Settings that need them are then refused
     GALLOC_OVERRIDE_CUDA off    any file               There, cudaMalloc, cudaFree, cudaMallocAsync and cudaFreeAsync
                                                        allocate and free galloc's memory: "Override" in >>api
     GALLOC_MALLOC, _FREE malloc implementation         Allocate and free host memory, about 300 bytes per block. Define
                                                        both. Called with locks held: they call neither galloc nor CUDA
     GALLOC_LOG(text)     stderr implementation         Gets each log line, no lock held; at run time: galloc_set_log
     GALLOC_CLOCK()       system implementation         Nanoseconds (uint64_t) of a clock that never goes back
     GALLOC_ASSERT(c)     none   implementation         Internal checks; they cost nothing when it is not defined
     GALLOC_NVTX          off    implementation         compute-sanitizer learns of each block: docs/nvtx.md

   STEP BY STEP
     1  galloc_malloc and galloc_free use the default pool of the stream's device. The first call creates it.
     2  galloc_malloc_growable allocates a block that galloc_resize can grow in place. galloc_resize takes any block,
        but without reserved addresses it may return cudaErrorNotSupported; then copy the contents to a new block.
     3  galloc_pool_create makes a pool of your own: for another limit, another device, or a heap that ends as a whole.
        Start from galloc_config_default(). galloc_pool_malloc allocates from that pool; galloc_alloc takes a
        galloc_request with all parameters. galloc_free and galloc_resize find the pool of a block themselves.
     4  galloc_pool_reserve creates memory in advance, so that later allocations need not create any.
     5  galloc_pool_stats and galloc_pool_streams show the state of a pool (galloc_pool_default gives the default pool).
        galloc_pointer_info describes an address, galloc_snapshot_save writes all blocks for PyTorch's memory viewer.
        galloc_pool_trim gives free memory back to the device.
     6  Call galloc_stream_retire before cudaStreamDestroy. Call galloc_shutdown at the end if you want to find leaks.
     The variable GALLOC_CONF sets the default pools' settings: GALLOC_CONF=memory_limit:20G,growth:64M ./program

   ON STREAMS
     Free a block on the stream that used it last: all work queued on that stream before galloc_free may still use the
     block, and galloc reuses the memory only in an order that is safe for this work:
       - Later work on the same stream may reuse the memory at once. No event is recorded and nothing waits.
       - Work on another stream may reuse it when the earlier work is known to be complete (reuse:completed); when a
         wait that galloc queued already orders that stream after the earlier work (reuse:followed); or after galloc
         queues such a wait (reuse:wait). It does so before it creates pages beyond `overhead` (or any fixed segment),
         even if the device has memory left; in a small pool only when no more pages can be had (ON RUNNING OUT, 3, 5).
     Stream 0: CUDA orders work on the legacy stream with that of blocking streams. But a galloc call queues no work, so
     one for stream 0 orders no blocking streams. Name the stream that uses the block.
     Several streams: if more than one stream uses a block, name them all. Free it with galloc_free_after, or call
     galloc_record_stream for each further stream before galloc_free.
     New memory: memory from galloc_malloc is ready for work queued on that stream after the call, and for work ordered
     after such work. cudaMemcpy right after galloc_malloc on a non-blocking stream is a race: cudaMemcpy runs on the
     legacy stream, which is not ordered after yours. Use cudaMemcpyAsync on the same stream.
     Destroyed streams: call galloc_stream_retire before cudaStreamDestroy, and for cudaStreamPerThread in each thread
     that used it, before it ends. Reuse is safe without the call, since galloc identifies streams by id, but galloc
     finds what the stream freed last only when memory runs out. It is required with stream_check:off (ON THREADS), and
     if galloc_record_stream named the stream for a block still used. CUDA crashes if a call names a destroyed stream.
     Deadlocks: set reuse:completed+followed if streams synchronise by other means than events (NCCL kernels on two
     streams, cuStreamWaitValue, spinning kernels). There, a wait that galloc queues can cause a deadlock.
     Events: galloc records an event on a stream only in a call that names it (with galloc_record_stream: at the free).
     A lone stream gets one only on demand (collection, moved pages, a freed block with room, galloc_stream_retire);
     each of several gets about one per 2 MiB freed, or per its share of 1/128 of the heap if that is more. An event on
     the legacy stream makes all blocking streams wait for each other: there galloc records one only on demand.
     Contexts: streams of any context of the device may be used. galloc learns of a context other than the primary one
     at the first allocation on one of its streams. Before that, free nothing on its streams, unless all streams are
     retired: galloc could take a reused handle for the old stream and not wait for the new stream's work. While a
     context is destroyed or a device is reset, no other thread may be inside a galloc call that may use it. The work of
     a green context goes on after its end: what was freed on streams of a context that has ended is reused only after
     a wait for the device (when memory runs out, galloc_pool_trim). A reset of the pool's device needs no such wait.
     Programmatic dependent launch orders less than a stream does: end such a chain before you free what it uses.

   ON MEMORY
     A pool keeps freed memory for later requests and gives it back only as ON LIMITS AND COLLECTION says. Sizes are
     rounded up to 512 bytes. Free neighbours merge. Each pool has one address range for all sizes and streams. Physical
     pages of 2 MiB to 256 MiB (with `growth`: 1 GiB) are mapped into it.
     Moving pages: when the memory held would exceed the peak of live bytes by more than `overhead`, galloc remaps pages
     that are completely free instead of creating new ones. Nothing is copied and nothing waits. The old addresses stay
     mapped, so that a page can return without a driver call. A program that repeats itself, and frees everything each
     time, soon makes no driver calls for pages. The first move of a page, or its creation, costs about 50 us of host
     time. docs/tuning.md shows what overhead costs. Under a memory_limit pages are small, to use nearly all of it.
     Stream cache: each stream has a cache of recently freed blocks, of size lane_bytes; a lone stream's may have one
     larger block. It serves requests of exactly their sizes, without the pool's lock. One it cannot serve empties it.
     Growing in place: galloc_resize extends a block into the free memory and unused addresses behind it. The room of a
     block is what galloc_malloc_growable (galloc_request.max_bytes) reserves behind it: addresses, or in fixed segments
     memory. Blocks with room are multiples of 2 MiB and can grow until memory runs out. When one is freed its pages
     stay mapped; the next block with the same max_bytes reuses them once the work that used them is complete. A page
     that exceeds a step of growth is not moved there: beyond `overhead`, small new pages replace a large free one.
     Rounding: roundup_power2_divisions rounds requests, except those with room and galloc_resize, to fewer sizes.
     strategy:pooled is for programs with few sizes. It rounds requests of up to 1 MiB to size classes (512 bytes apart
     up to 4 KiB, then eight per power of two, or as roundup_power2_divisions says) and keeps a freed block for its
     class. Blocks with room, alignment above 512 or GALLOC_LIFETIME_LONG are exempt.
     strategy:heuristic adapts overhead and growth to the program: more overhead once moving and creating pages has cost
     more than the memory is worth, larger pages while the program only grows. galloc_pool_decisions gives its few
     changes with reasons; galloc_pool_freeze stops it.
     Fixed segments replace pages with expandable_segments:False, with GALLOC_NVTX under a tool, or where the device has
     no virtual memory management: cudaMalloc segments of 2 MiB for requests up to 1 MiB, of 20 MiB (large_segment_size)
     below 10 MiB, else of the request rounded up to 2 MiB. Blocks of max_split_size and more are not split there.

   ON LIMITS AND COLLECTION
     memory_limit bounds a pool (galloc_pool_set_limit changes it), device_limit all pools of a device: a pool holds at
     most the least of memory_limit, per_process_memory_fraction of the device, and what the lowest device_limit of its
     pools leaves. Bytes are charged before the driver call, so concurrent calls never exceed a limit (exception: ON
     BACKENDS). A pool that device_limit or a full device stops gets unused memory of the device's other pools; at last
     it waits for memory that they have freed. `growth` sets the size of new pages; close to a limit they are smaller.
     galloc returns cached memory to the device when memory runs out, where smaller pages replace it (growing in place),
     in galloc_pool_trim and galloc_pool_sync_point, and by collection. Collection returns whole pages that no work and
     no launchable graph can still use:
       - gc_threshold: when more than this fraction of the limit is held, the longest idle pages are returned, until
         1/16 less than the threshold is held; above the threshold pages move rather than new ones are created.
       - gc_age: pages that have been idle for this time are returned.
     Collection waits for nothing, and pauses when the program soon needs the memory again. It runs in calls that no
     stream cache serves, since galloc has no thread: a program that makes no such calls keeps its memory. Only
     like:pytorch collects fixed segments, since cudaFree waits. docs/tuning.md says which setting helps when.

   LIKE PYTORCH
     like:pytorch makes a pool hold about what PyTorch's caching allocator holds for the same calls: its segments,
     splitting, best fit, settings, collection and order when memory runs out. Its defaults are
     expandable_segments:False and reuse:none. galloc_pool_torch_stats has PyTorch's counters.
     garbage_collection_threshold needs a limit. Any wait_limit_ms disables all steps that wait. Differences:
       - A block that is freed on another stream returns to its own stream once the freeing stream's work is complete.
         PyTorch does so only with record_stream.
       - Free segments of a stream that was retired and forgotten serve the next stream that lacks memory.
       - A captured graph has segments of its own. Those of a group (galloc_graph_begin) are shared per stream.
       - Before a request fails, other pools of the device are asked for memory.
     `reuse` and `stats` have no effect, there is no stream cache, and every call takes the pool's lock. With
     expandable_segments:True the heap is galloc's own, with PyTorch's rounding.

   ON BACKENDS
     The other backends are for debugging and comparison: the driver serves each allocation, and galloc caches nothing.
     backend:cudaMalloc makes one cudaMalloc of the requested size per block (more with room or alignment above 512),
     which suits memory checkers. A freed block gets an event, also on the legacy stream. Then a later allocation that
     is not captured, or trim, calls cudaFree, which waits for the device.
     backend:cudaMallocAsync uses a memory pool of the driver. A block that only the freeing stream used, and was
     allocated for, returns to the driver at the free; others once all their streams' work is complete. `reuse` and
     release_threshold set the driver's pool attributes of that meaning. Memory that the driver keeps counts as held and
     free, as of the last allocation or trim; until then, and by the driver's rounding, a limit can be exceeded.
     Captured allocations, and those on the legacy stream while a blocking stream is captured, are cudaMalloc's with
     both backends, and go by cudaFree in a later call that may wait (wait_limit_ms); the captured ones once their graph
     is gone (ON GRAPHS).
     With both, a block can be resized only up to the size requested for it; room is memory, in steps of 512 bytes;
     galloc_pool_reserve returns cudaErrorNotSupported.

   ON GRAPHS
     Allocate and free on a captured stream as on any other; the memory then belongs to the graph, which uses the same
     addresses at each launch; no other work gets it until the graph can no longer be launched.
       - An allocation in a capture gets memory that the graph owns, free memory that no queued work can still use, or
         new pages. It neither waits nor records an event. If that does not suffice it fails; the capture stays valid.
       - A block that is freed on a captured stream, or was recorded for one (galloc_free_after,
         galloc_record_stream), belongs to the graph once it is freed. Later captured work of the same stream may reuse
         it at once. Captured work of another stream may if the graph orders that work after the free (reuse:followed):
         its stream waited for an event recorded after the free, or joined the capture by such a wait. Other captured
         work never gets it. A block in use before the capture is not reused in it: when that use ends is not known.
       - A result is a block that was allocated in a capture and not freed there. The program holds it until it frees
         it; then it belongs to the graph again, since each launch writes to it. If it is freed outside the capture, it
         counts as used by the stream that it was allocated for and by its recorded streams.
       - An input is a block that a graph uses but did not allocate. Either call galloc_record_stream for the captured
         stream during the capture, and free the block after the capture has ended (an earlier free may give it to later
         captured work, which would overwrite it). Or free it after the graph is gone.
       - The memory returns to the pool when the graph, its instances, its clones, its parent graphs and all their
         launches are gone. A failed capture returns its memory too; if it was a capture into an existing graph
         (cudaStreamBeginCaptureToGraph), CUDA destroys that graph, and only its instances and clones keep memory.
       - After cudaGraphExecUpdate or cudaGraphExecChildGraphNodeSetParams an instance keeps the new graph's memory; the
         old graph's is released when earlier launches are done. Destroying a child graph node or a conditional node
         releases the memory of the graph inside; destroying other nodes releases nothing.
       - Instances, clones and children of one graph use the same memory: no two may run at once. Addresses in nodes
         that the program adds or changes itself are unknown to galloc: those blocks are inputs.
     Sharing: graphs captured between galloc_graph_begin and galloc_graph_end share memory, until galloc_graph_release.
     Rules: calls on captured streams read the graph, so threads that capture into one graph must take turns with them
     (CUDA Runtime API, "Graph object thread safety"). During a capture the program may destroy a stream whose work is
     joined, but not the one on which the capture began, nor one that it has recorded for a block. With stream_check:off
     nothing may be captured. If the program moves a captured stream to another position of the graph (by
     cudaStreamUpdateCaptureDependencies or a second capture into it), first free there what it used; it reuses earlier
     frees only if the new position comes after the old one. A conditional node's body is a graph of its own.
     No galloc call ends a capture or adds a stream to one, in any thread and capture mode. The exception is a capture
     that another thread begins during the call: on the stream of the call, or, if the call names the legacy stream or a
     block recorded for it, on a blocking stream. A free on a stream whose capture was invalidated succeeds.
     galloc_stats.graph_bytes counts the free memory that graphs own. galloc_pool_trim leaves it alone, and
     galloc_pool_destroy and galloc_shutdown fail while there is any.

   ON RUNNING OUT
     A request that fits no free block takes these steps until one serves it; when all fail it returns
     cudaErrorMemoryAllocation. galloc_oom_report lists the steps singly, several per number. like:pytorch has others.
       1  use memory freed earlier in the capture, or whose work is complete; collect idle memory (gc_threshold, gc_age)
       2  move or create pages within overhead; use parts of parked pages (free pages that are kept whole)
       3  make the stream wait for memory that other streams freed (reuse:wait), as it is or moved within overhead; only
          in a pool that holds at least 1/64 of the most that it may hold, and not on the legacy or a captured stream
       4  create pages up to the limit; return free pages and create others; use idle memory of other pools
       5  make the stream wait, in a smaller pool
       6  wait on the host for events, then for the device; return free pages again; wait for other pools' idle memory
       7  call the callback on_oom (galloc_pool_set_callbacks); if it returns 1, begin again, at most max_retries times
     The message names the bytes requested, live and held, and the cause. galloc_oom_report has all figures: which
     streams keep free memory, what each step gained, what else the device holds. galloc_report_text adds advice.
     GALLOC_CONF=history:100000,history_stacks:8,snapshot_on_oom:FILE writes the state, its history and who called to a
     file; trace:FILE logs each allocation and free from the beginning on (docs/history.md).
     Host waits: a host wait is a wait for your own queued work, and other threads that need the driver for this pool
     wait too. If that work depends on what one of these threads does next, the wait is a deadlock. wait_limit_ms bounds
     the host waits of one allocation to within 2 ms (not the time in which other threads use the driver). With it,
     galloc polls events, and leaves out what it cannot bound: cudaFree of fixed segments, and waiting for the device
     (so memory that a live stream freed after its last event is out of reach). throw_on_cudamalloc_oom fails a request
     instead of any step that waits, queues a wait or returns memory; other backends still free blocks in the driver.

   ON THREADS
     Any thread may call any function at any time, on any stream. Calls that a stream cache serves take only the lock of
     that cache. All other calls take the pool's lock, which is never held around a driver call: while a thread creates
     pages, others that need none go on. The child process of a fork gets cudaErrorInitializationError.
     stream_check: each call asks CUDA whether its stream is being captured, and for the stream's id (on default
     streams: for the current context), since CUDA reuses handles. stream_check:off skips that in calls that a stream
     cache serves. It is a promise: nothing is captured while galloc is in use; each stream is retired
     (galloc_stream_retire) before it is destroyed, the default streams before cudaDeviceReset; on each device the
     program uses the default streams of one context only; and a block that was allocated on a default stream is not
     freed on another device's. A broken promise is a race, or a call on a destroyed stream.

   ON LIFETIMES
     A pool lives until galloc_pool_destroy, which fails while blocks of it are in use or graphs own its memory. Calls
     with the handle of an ended pool or group return cudaErrorInvalidResourceHandle, also while another thread ends it.
     An address of an ended pool is foreign. Its host memory serves later pools; galloc_shutdown frees it.
     Unloading: a library that contains galloc can be unloaded while threads that used it still live. Before, destroy
     its pools, which otherwise keep their memory, and all graphs that used them: CUDA calls galloc's code when a graph
     ends. Static destructors and atexit functions may call galloc. At unload and thread end galloc calls no CUDA.

   ERRORS AND LOGGING
     All functions return cudaError_t, and a call that fails changes nothing. galloc_last_message gives the error in
     words, and the log gets a line (GALLOC_LOG, galloc_set_log, GALLOC_CONF=log:...); repeated lines are folded.
     Resets: after an error that ends the context (an illegal address, for example) its pools refuse requests until
     cudaDeviceReset, which galloc detects. Pools of other contexts go on, without what was freed on that one's streams
     until it has ended. Pages survive the reset, cudaMalloc segments do not. A block there counts until it is freed;
     once the driver hands out its addresses again they belong to the new block, and the old one counts as freed.
     Exit: once the driver has shut down, calls that free, release or end something succeed and do nothing, and calls
     that need the device return cudaErrorCudartUnloading. Wrong writes by the program: see docs/guards.md.

   The licence is at the end of the file. Words and invariants stand above the private structs. */

/* SECTIONS (search for the tag; each section of the implementation calls only those before it)
  >>config        version, requirements                     >>types         public types
  >>api           public functions                          >>platform      locks, atomics, clock; POSIX, Windows
  >>process       state outside of pools; fork; messages    >>cuda          the driver's functions; looks at streams
  >>structs       private types; words; invariants          >>slab          host memory of descriptors
  >>map           from addresses to blocks and pages        >>bins          free sets: lists of free blocks by size
  >>marks         whose work must end before reuse          >>blocks        split, merge and file blocks
  >>budget        limits of a device and its pools          >>statistics    the counters of a pool
  >>history       what a pool did lately                    >>trace         the log of a run, as it goes
  >>take          cut a free block, take back a used one    >>streamcache   blocks freed last, by exact size
  >>capture       captured graphs: order, lifetime          >>streams       stream states
  >>events        when they are recorded; predictors        >>nvtx          what tools learn of segments and blocks
  >>pages         create, map and unmap pages               >>callbacks     on_map, on_unmap
  >>fixed         cudaMalloc segments                       >>release       give spare pages back
  >>parking       whole free pages kept out of the bins     >>rounding      sizes of requests
  >>users         calls that are in a pool; handles         >>collection    gc_threshold, gc_age
  >>guards        debug: guards, poison, their checks       >>search        the free block for a request
  >>behind        what a growing block can grow into        >>waits         waits queued between streams
  >>planner       where pages move                          >>supply        carry a plan out; create pages
  >>ladder        steps when memory runs out                >>devicewait    wait for devices and contexts
  >>borrow        idle memory of other pools; gai_ladder    >>outofmemory   the report of a refused request
  >>job           one request from search to answer         >>alloc         allocation
  >>free          galloc_free                               >>several       frees after several streams
  >>resize        galloc_resize                             >>graphs        groups of graphs
  >>configuration GALLOC_CONF                               >>idle          settings without effect
  >>log           log lines and their repetition            >>report        the report in words
  >>check         the heap walk: every invariant            >>torch         like:pytorch
  >>backends      cudaMalloc, cudaMallocAsync               >>pooled        strategy:pooled
  >>heuristic     strategy:heuristic                        >>pools         a pool begins
  >>poolend       trim; a pool ends                         >>snapshot      galloc_snapshot
  >>snapshotfile  files of it; what is live                 >>defaultpools  default pools; address to pool
  >>threadcache   the fast path; ends of threads            >>public        the public functions */

#ifndef GALLOC_H
#define GALLOC_H

#if defined(__cplusplus)
extern "C++" { /* also inside an extern "C" block of the including file; CUDA's headers contain templates */
#endif

#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

/* ==== CONFIG ==================================================================================================== */
/* >>config */

/* The version, the requirements, and the linkage of the public functions. Calls nothing. */

#define GALLOC_VERSION_MAJOR 0
#define GALLOC_VERSION_MINOR 1
#define GALLOC_VERSION_PATCH 0
#define GALLOC_VERSION (GALLOC_VERSION_MAJOR * 10000 + GALLOC_VERSION_MINOR * 100 + GALLOC_VERSION_PATCH)
#define GALLOC_VERSION_STRING "0.1.0"

#if !defined(CUDART_VERSION) || CUDART_VERSION < 12000
#error "galloc.h: needs the CUDA Toolkit 12.0 or later"
#endif
#if UINTPTR_MAX < 0xffffffffffffffff
#error "galloc.h: needs 64-bit addresses, as CUDA does: this is compiled for 32 bits"
#endif
#if defined(GALLOC_MALLOC) != defined(GALLOC_FREE)
#error "galloc.h: define GALLOC_MALLOC and GALLOC_FREE together, or neither"
#endif

#if defined(__cplusplus) && !defined(GALLOC_STATIC)
#define GAI_LINKAGE extern "C"
#else
#define GAI_LINKAGE
#endif
#if !defined(GALLOC_STATIC)
#define GALLOC_API GAI_LINKAGE
#elif defined(__GNUC__)
#define GALLOC_API static __attribute__((unused))
#else
#define GALLOC_API static
#endif

/* Stream 0 means what it means in the including file: the per-thread default stream if that file is compiled for it
   (nvcc --default-stream per-thread), otherwise the legacy stream. CUDA's own headers rename functions in the same way,
   so that files compiled either way can share a pool. */
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
#define galloc_malloc galloc_malloc_ptsz
#define galloc_malloc_growable galloc_malloc_growable_ptsz
#define galloc_free galloc_free_ptsz
#define galloc_free_after galloc_free_after_ptsz
#define galloc_alloc galloc_alloc_ptsz
#define galloc_pool_malloc galloc_pool_malloc_ptsz
#define galloc_record_stream galloc_record_stream_ptsz
#define galloc_stream_retire galloc_stream_retire_ptsz
#define galloc_resize galloc_resize_ptsz
#define galloc_graph_begin galloc_graph_begin_ptsz
#define galloc_graph_release galloc_graph_release_ptsz
#endif

/* ==== TYPES ===================================================================================================== */
/* >>types */

/* The public types: settings, requests, counters and reports. Sizes are in bytes and times in nanoseconds, unless a
   member says otherwise. */

/* A heap on one device: its settings, its limit, its memory. Opaque. */
typedef struct galloc_pool galloc_pool;

/* A group of captured graphs that share memory of a pool; see ON GRAPHS. Opaque. */
typedef struct galloc_graph galloc_graph;

/* Ways in which a stream may reuse memory that another stream freed; see ON STREAMS. Reuse on the same stream is always
   allowed. */
enum {
    GALLOC_REUSE_COMPLETED = 1, /* the freeing stream's work is known to be complete: galloc polls events */
    GALLOC_REUSE_FOLLOWED = 2,  /* the requesting stream is already ordered after that work, by a wait that galloc
                                   queued, or in the graph that both streams are captured into */
    GALLOC_REUSE_WAIT = 4       /* galloc makes the requesting stream wait for that work: steps 3 and 5 of ON RUNNING
                                   OUT */
};

/* The source of a pool's memory; see ON BACKENDS. */
enum {
    GALLOC_BACKEND_NATIVE = 0,           /* galloc's own heap */
    GALLOC_BACKEND_CUDA_MALLOC = 1,      /* one cudaMalloc per block: slow; for memory checkers */
    GALLOC_BACKEND_CUDA_MALLOC_ASYNC = 2 /* a memory pool of the driver */
};

/* How the native heap places blocks; see ON MEMORY. */
enum {
    GALLOC_STRATEGY_CACHING = 0,  /* blocks of any size, split and merged */
    GALLOC_STRATEGY_POOLED = 1,   /* requests up to 1 MiB get blocks of a few sizes, which are kept for their size */
    GALLOC_STRATEGY_HEURISTIC = 2 /* as caching, and some settings adapt to the program */
};

/* Whose rules the native heap follows. */
enum {
    GALLOC_LIKE_GALLOC = 0,
    GALLOC_LIKE_PYTORCH = 1 /* those of PyTorch's caching allocator; see LIKE PYTORCH */
};

/* How much the process logs: GALLOC_CONF=log:off, error, info or debug; see galloc_set_log. */
enum {
    GALLOC_LOG_OFF = 0,   /* no line; but as GALLOC_LOG_ERROR once GALLOC_CONF (or PyTorch's variable) was refused */
    GALLOC_LOG_ERROR = 1, /* one line for each call that fails. Of lines that differ only in numbers, the first, the
                             10th, the 100th and so on are logged, and otherwise one a second, with a count: "(and 89
                             similar lines)"; but each line about a damaged block (debug) is. galloc counts 16
                             kinds of lines; a new kind takes the place of the oldest, whose count then starts anew */
    GALLOC_LOG_INFO = 2,  /* (default) also the decisions of strategy:heuristic, and settings that have no effect */
    GALLOC_LOG_DEBUG = 3  /* as info, and every repeated line */
};

/* What a pool does to find mistakes of the program: GALLOC_CONF=debug:guards+poison; see docs/guards.md. */
enum {
    GALLOC_DEBUG_GUARDS = 1, /* a pattern behind each block, checked at the free: finds writes beyond its ends */
    GALLOC_DEBUG_POISON = 2, /* freed memory is set to 0xff, which is NaN: uses after the free become visible */
    GALLOC_DEBUG_QUARANTINE = 4 /* poisoned memory is kept from reuse for a while, and its poison is checked then: finds
                                   writes after the free */
};

#define GALLOC_DIVISIONS 16     /* length of galloc_config.roundup_power2_divisions */
#define GALLOC_CONFIG_TEXT 2048 /* bytes that suffice for galloc_config_print */

/* Settings of a pool. Start from galloc_config_default() and change members: a zero is a value, not the default. Each
   member except `device` is the key of the same name in GALLOC_CONF (stats_exact: stats); see galloc_config_parse. */
typedef struct galloc_config {
    int device;              /* ordinal of the device; -1 (default): the current device */
    int like;                /* GALLOC_LIKE_...; in a text it must come first, since it changes the defaults of other
                                settings */
    int backend;             /* GALLOC_BACKEND_... */
    int strategy;            /* GALLOC_STRATEGY_... */
    int expandable_segments; /* 1 (default): pages are mapped into one address range; 0: fixed segments of cudaMalloc */
    int reuse;               /* GALLOC_REUSE_... or-ed together; default: all three */
    int stream_check;        /* 1 (default): every call asks CUDA about its stream; 0: calls that a stream cache serves
                                do not, which requires a promise; see ON THREADS */
    int stats_exact;         /* 1: peaks in galloc_stats are exact, and every call takes the pool's lock; 0
                                (default): peaks may miss blocks that the stream caches reuse. In a text:
                                stats:exact, stats:fast */
    size_t memory_limit;     /* the most that the pool may hold; SIZE_MAX (default): the device's memory */
    double per_process_memory_fraction; /* the same as a fraction of the device's memory, 0 .. 1 (default); the lower of
                                           the two limits counts */
    size_t device_limit;     /* the most that all pools of the device may hold together; the lowest that any pool names
                                counts; SIZE_MAX (default): none */
    double overhead;         /* the memory held may exceed the peak of live bytes by this fraction before pages move
                                instead of being created; 0 .. 100, default 0.02; see ON MEMORY */
    size_t growth;           /* size of new pages: a power of two, 2 MiB .. 1 GiB; 0 (default): chosen by the size of
                                the heap. The memory held may exceed `overhead` by one such page */
    size_t lane_bytes;       /* the size of each stream cache, 0 .. 64 MiB, default 1 MiB; 0: no cache. While one stream
                                is in use, its cache holds at most this, and at most 1/256 of the device's memory (the
                                legacy stream's also later, until another stream needs its memory). With several streams
                                a cache takes no block while it holds more than this, nor one that would make it exceed
                                2 MiB */
    size_t large_segment_size; /* fixed segments: size of a segment for requests above 1 MiB and below 10 MiB; more than
                                  10 MiB, rounded up to 2 MiB; default 20 MiB */
    size_t max_split_size;   /* fixed segments: blocks of this size and more are not split, and serve only requests of
                                this size and more; at least large_segment_size, better more: else a segment of that
                                size, once free, serves no smaller request; SIZE_MAX (default): all blocks are split */
    size_t max_non_split_rounding; /* such a block may exceed its request by less than this; at least
                                      large_segment_size; 0 (default): large_segment_size */
    unsigned roundup_power2_divisions[GALLOC_DIVISIONS]; /* sizes are rounded up to this many steps between two powers
                                                            of two; a power of two up to 2^30; 0 (default) or 1: to 512
                                                            bytes only. [0] is for sizes below 2 MiB, [i] for sizes from
                                                            2^i MiB, [15] from 32 GiB */
    double gc_threshold;     /* idle pages are collected when the pool holds more than this fraction of its limit; up to
                                0.999999; 0 (default): never. In a text also garbage_collection_threshold */
    uint64_t gc_age;         /* pages that have been idle for this many nanoseconds (whole milliseconds) are collected;
                                UINT64_MAX (default): never. In a text with a unit: 500ms, 30s, 5m */
    size_t release_threshold; /* bytes that galloc_pool_sync_point leaves in the pool; SIZE_MAX (default): all */
    uint64_t wait_limit_ms;  /* milliseconds that one allocation may wait on the host, at most 10^9; 0: it never waits;
                                UINT64_MAX (default): no bound; see ON RUNNING OUT */
    uint64_t max_retries;    /* how often on_oom can ask for another attempt, for one allocation; 0 .. 1000, default
                                8 */
    int throw_on_cudamalloc_oom; /* 1: a request that needs new pages beyond the limit or the device's memory fails
                                    at once: galloc neither waits nor returns memory, and does not call on_oom;
                                    default 0. Other backends still free blocks in the driver, and cudaFree waits */
    uint64_t history;        /* entries of the history; 0 (default): none. While a pool has one, its stream caches are
                                closed; see galloc_pool_history */
    uint64_t history_stacks; /* frames of the stack of calls that each allocation and free in the history has, at most
                                32; 0 (default): no stacks; see galloc_pool_history_stacks */
    int debug;               /* GALLOC_DEBUG_... or-ed together: what the pool does to find mistakes of the program; 0
                                (default): nothing. With debug_sample below 64, stream caches are closed then.
                                Allocations on a default stream wait for what earlier frees have queued there; with a
                                wait_limit_ms frees queue nothing there. See docs/guards.md. In a text:
                                debug:guards+poison */
    size_t quarantine_bytes; /* debug:quarantine keeps the blocks freed last, of so many bytes; 0 (default): 1/16 of the
                                limit, at most 256 MiB. In a text also auto */
    uint64_t debug_sample;   /* that is done to one allocation in so many, on the average, 1 (default: to all) ..
                                1000000000. From 64 on, guards alone are set only where rounding leaves 16 bytes or
                                more, and poison and quarantine apply only to requests of at most 1 MiB */
    int gpu_direct_rdma;     /* 1: pages support GPUDirect RDMA, if the device does (then galloc_pool_config gives 1); 0
                                (default): only pages that are created while on_map is set. Memory of cudaMalloc always
                                does */
} galloc_config;

/* Expected lifetime of a block. Long-lived blocks are placed at the far end of a free block, apart from short-lived
   ones. A hint: it changes no guarantee. */
enum { GALLOC_LIFETIME_ANY = 0, GALLOC_LIFETIME_LONG = 1 };

/* One request with all parameters, for galloc_alloc. With all members except `bytes` and `stream` zero, galloc_alloc
   does what galloc_malloc does. */
typedef struct galloc_request {
    size_t bytes;        /* size; 0: success with NULL */
    size_t max_bytes;    /* galloc_resize can grow the block at least to this size; less than `bytes` counts as `bytes`;
                            0: no room is reserved */
    size_t alignment;    /* a power of two, 1 .. 2^55 bytes; 0: 512 */
    cudaStream_t stream; /* the stream that uses the memory first */
    galloc_pool *pool;   /* NULL: the default pool of the stream's device */
    uint32_t tag;        /* any number; galloc_pointer_info returns it */
    int lifetime;        /* GALLOC_LIFETIME_... */
} galloc_request;

/* Formats of galloc_snapshot. */
enum {
    GALLOC_SNAPSHOT_JSON = 0,
    GALLOC_SNAPSHOT_PICKLE = 1 /* for torch.cuda._memory_viz and PyTorch's viewer: Python's pickle, protocol 2 */
};

/* Receives a part of a snapshot; returns 0, or another number to stop. */
typedef int (*galloc_write)(void *user, const void *data, size_t bytes);

typedef enum galloc_state {
    GALLOC_STATE_FOREIGN, /* not in galloc's memory */
    GALLOC_STATE_USED,    /* inside a block that the program holds */
    GALLOC_STATE_FREE     /* inside free memory that galloc keeps */
} galloc_state;

/* Description of an address; see galloc_pointer_info. */
typedef struct galloc_pointer {
    galloc_pool *pool;
    void *base;                   /* start of the block that contains the address */
    size_t requested;             /* bytes that were requested; 0 for free memory */
    size_t usable;                /* bytes that may be used: requested, rounded up to 512 or, with room, to 2 MiB; with
                                     other backends the bytes asked of the driver; of a block with a guard
                                     (debug:guards) the bytes requested */
    size_t room;                  /* bytes of addresses (in fixed segments: of memory) that belong to the block, its
                                     room included; at least `usable` */
    unsigned long long stream_id; /* cudaStreamGetId of the stream that it was allocated for or freed on; 0: the legacy
                                     stream, or a captured stream, whose id cannot be asked */
    unsigned long long capture_id; /* the capture (cudaStreamGetCaptureInfo) whose graph owns the block; 0: none */
    int device;
    uint32_t tag;                 /* galloc_request.tag */
    galloc_state state;
} galloc_pointer;

/* A quantity over time. */
typedef struct galloc_stat {
    size_t current, peak, total; /* now; highest since the last reset; sum of all increases since then */
} galloc_stat;

/* Driver calls that galloc counts and times, by kind. Queries of a stream, its context or its capture are not
   counted. */
#define GALLOC_DRIVER_CALLS(X)                                                                                         \
    X(reserve, "cuMemAddressReserve") X(unreserve, "cuMemAddressFree") X(create, "cuMemCreate")                        \
    X(release, "cuMemRelease") X(map, "cuMemMap") X(unmap, "cuMemUnmap") X(set_access, "cuMemSetAccess")               \
    X(mem_alloc, "cuMemAlloc") X(mem_free, "cuMemFree") X(event_create, "cuEventCreate")                               \
    X(event_destroy, "cuEventDestroy") X(event_record, "cuEventRecord") X(event_query, "cuEventQuery")                 \
    X(event_synchronize, "cuEventSynchronize") X(stream_wait, "cuStreamWaitEvent")                                     \
    X(host_alloc, "cuMemHostAlloc") X(host_free, "cuMemFreeHost") X(stream_synchronize, "cuStreamSynchronize")         \
    X(pool_create, "cuMemPoolCreate") X(pool_destroy, "cuMemPoolDestroy") X(pool_set, "cuMemPoolSetAttribute")         \
    X(pool_get, "cuMemPoolGetAttribute") X(pool_trim, "cuMemPoolTrimTo") X(pool_alloc, "cuMemAllocFromPoolAsync")      \
    X(pool_free, "cuMemFreeAsync") X(memset, "cuMemsetD8Async") X(copy, "cuMemcpyDtoHAsync")
#define GAI_CALL_FIELD(name, function) uint64_t name;

/* One number for each kind of driver call. */
typedef struct galloc_driver {
    GALLOC_DRIVER_CALLS(GAI_CALL_FIELD)
} galloc_driver;

/* The pages of one size class. */
typedef struct galloc_pages {
    size_t count, bytes; /* number of pages, and their total size */
} galloc_pages;

#define GALLOC_PAGE_SIZES 16

/* Counters of a pool; see galloc_pool_stats. Bytes satisfy, at any moment:
     live <= allocated,  allocated + cached == reserved,  the bytes of all `pages` added up == reserved
   and while no call is under way:
     free_bytes + quarantined == cached
   With stats:exact the peaks of live, allocated, cached and blocks are exact. With stats:fast they are exact while one
   stream is in use, except for the rounding of blocks that its cache reuses; with several streams, or strategy:pooled,
   they can miss blocks that the stream caches reused between two updates.
   Each driver counter is exact by itself. A call that is under way in another thread may be in one counter and not yet
   in the next. Measuring a driver call takes two reads of the system's clock, about 50 ns; the cheapest of these calls
   takes 0.2 us, a call that makes a page 50 us. */
typedef struct galloc_stats {
    galloc_stat live;      /* bytes that the program requested and has not freed */
    galloc_stat allocated; /* the same after rounding */
    galloc_stat reserved;  /* bytes of physical memory that the pool holds */
    galloc_stat cached;    /* bytes held that are in no used block */
    galloc_stat blocks;    /* number of used blocks */
    uint64_t mallocs;      /* successful allocations */
    uint64_t frees;        /* successful frees */
    uint64_t failures;     /* failed allocations; without a pool, not those of a NULL ptr or a stream that is refused */
    uint64_t rejections;   /* of the failures, those refused at once: with throw_on_cudamalloc_oom, or for more bytes
                              than the pool may ever hold */
    uint64_t hits;         /* allocations that created and moved no page */
    uint64_t grows;        /* times that pages or segments were created */
    uint64_t splits, merges; /* blocks split and merged */
    uint64_t marks;        /* events recorded in streams */
    uint64_t waits;        /* waits queued in streams for other streams' work */
    uint64_t moves;        /* pages moved to other addresses */
    uint64_t moved_bytes;  /* their total size */
    uint64_t collections;  /* times that gc_threshold or gc_age returned pages to the device */
    uint64_t collected_bytes; /* the total size of these pages */
    uint64_t checks;       /* debug: guards, and blocks in quarantine, that were looked at */
    uint64_t unchecked;    /* debug: those that were not; docs/guards.md says when */
    uint64_t damages;      /* debug: blocks that were found damaged; each has an error line in the log, but
                              for those beyond 8 in one call, which share one; none is folded */
    size_t leaving;        /* bytes of stale aliases: addresses that are still mapped after their page moved */
    size_t addresses;      /* bytes of address space reserved */
    size_t quarantined;    /* bytes that the driver failed to take back, not the blocks that debug:quarantine keeps;
                              galloc_pool_trim tries again */
    size_t graph_bytes;    /* bytes of free blocks that captured graphs own; see ON GRAPHS */
    size_t graphs;         /* captures that used the pool and whose graphs or instances still exist */
    size_t free_bytes;     /* bytes of free blocks */
    size_t largest_free;   /* size of the largest free block, or up to 3.1 % less; blocks in stream caches count
                              unmerged */
    double external_fragmentation; /* 1 - largest_free / free_bytes; 0: the free memory is one block, or there is none.
                                      Moving pages makes large blocks of small ones all the same */
    double internal_fragmentation; /* allocated / live, the cost of rounding; 1 when nothing is live */
    galloc_pages pages[GALLOC_PAGE_SIZES]; /* the physical pages (or fixed segments) held: [i] counts those of at least
                                              2 MiB << i and less than twice that, the last also all larger ones. With
                                              other backends: the blocks, [0] also smaller ones, and the bytes that the
                                              driver's pool keeps */
    galloc_driver driver;  /* number of driver calls, by kind */
    galloc_driver driver_ns; /* host time spent in them, nanoseconds */
    galloc_driver driver_longest_ns; /* time of the longest call of each kind, nanoseconds */
} galloc_stats;

/* A quantity of a pool with like:pytorch: for all requests, for those up to 1 MiB, and for larger ones. */
typedef struct galloc_torch_stat {
    galloc_stat all, small_pool, large_pool;
} galloc_torch_stat;

/* The counters of torch.cuda.memory_stats that a pool with like:pytorch and fixed segments has, under the same names.
   Differences: requested_bytes falls together with allocated_bytes, at the free; `total` is PyTorch's `allocated`; and
   PyTorch's `freed` is total - current. At any moment
     allocated_bytes + inactive_split_bytes <= reserved_bytes,  allocated_bytes <= active_bytes
   and the same for counts. */
typedef struct galloc_torch_stats {
    galloc_torch_stat allocation;     /* number of used blocks */
    galloc_torch_stat segment;        /* number of segments held */
    galloc_torch_stat active;         /* number of used blocks and of free blocks that another stream may still use */
    galloc_torch_stat inactive_split; /* number of free blocks that are not a whole segment */
    galloc_torch_stat allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes;
    galloc_torch_stat requested_bytes; /* of used blocks, before rounding */
    galloc_stat oversize_allocations; /* number of used blocks of max_split_size and more */
    galloc_stat oversize_segments;
    uint64_t num_alloc_retries;       /* times that all cached segments were returned for a request */
    uint64_t num_ooms;                /* requests that failed because memory ran out */
    uint64_t num_sync_all_streams;    /* times that galloc waited for all streams */
    uint64_t num_device_alloc;        /* segments created */
    uint64_t num_device_free;         /* segments returned */
} galloc_torch_stats;

#define GALLOC_DECISIONS 32 /* the most decisions of one pool */

/* One change of settings by strategy:heuristic. */
typedef struct galloc_decision {
    double overhead;    /* in effect from this decision on */
    size_t growth;      /* likewise; 0: auto */
    size_t live, held;  /* bytes at that time */
    const char *reason; /* a text that is never freed */
} galloc_decision;

/* The state of one stream in a pool. */
typedef struct galloc_stream_stats {
    unsigned long long stream_id;  /* cudaStreamGetId; 0: a legacy stream */
    unsigned long long context_id; /* cuCtxGetId: distinguishes the legacy streams of several devices */
    size_t stranded;               /* free bytes that other streams cannot reuse yet, since this stream's work with them
                                      is not known to be complete. Bytes that several streams used count for each */
    size_t unmarked;               /* bytes freed on the stream since the last event recorded on it: until the next
                                      event no other stream can reuse them, not even by a wait */
} galloc_stream_stats;

#define GALLOC_REPORT_STREAMS 8
#define GALLOC_REPORT_STEPS 16
#define GALLOC_REPORT_TEXT 8192 /* bytes that suffice for galloc_report_text and galloc_live_text */

/* Free bytes that the requesting stream cannot have because of the work of one other stream alone. */
typedef struct galloc_stranded {
    unsigned long long stream_id, context_id;  /* as in galloc_stream_stats; both 0: the streams are not known */
    size_t bytes;
} galloc_stranded;

/* One step of the ladder: a part of a step of ON RUNNING OUT. */
typedef struct galloc_step {
    const char *name;
    const char *left_out;  /* why the step was left out, in words; NULL: it was taken, or there was nothing to do */
    size_t gained;         /* bytes that it made available to the requesting stream, or that the pool returned */
} galloc_step;

/* The state of pool and device when an allocation (or the growth of a block) failed because memory ran out, as seen by
   the requesting stream. Bytes of the pool:
     live + rounding + cached == held
     usable + stranded + graph_bytes + quarantined + busy == cached
     the bytes of streams[] and more_stranded added up == stranded
     usable_in_pages <= usable,  in_slots <= usable,  largest_usable <= usable - in_slots
     held + room <= limit, or held > limit and room == 0; equal but for a device_limit that pools share
   Bytes of the device, if device_known:
     held + others_held + outside + device_free == device_total, but for changes while it is read */
typedef struct galloc_report {
    galloc_pool *pool;       /* the pool; valid as long as the pool exists */
    int device;
    char cause[224];         /* the last obstacle, in words */
    size_t asked;            /* bytes requested; for a growth, the bytes that were missing */
    size_t rounded;          /* the same after rounding; for a growth, the bytes of the pages that were missing */
    int room_is_memory;      /* 1: `rounded` is the block's room (max_bytes), which is memory in fixed segments */
    unsigned long long stream_id; /* the requesting stream; 0: legacy, captured, or none (galloc_pool_reserve) */
    int captured;            /* 1: that stream was being captured */
    int grows;               /* 1: the request was to grow a block in place */
    int rejected;            /* 1: the request failed at once; see galloc_stats.rejections */
    unsigned rounds;         /* how often on_oom asked for another attempt */

    size_t live;             /* bytes that the program had requested */
    size_t rounding;         /* bytes by which used blocks were larger */
    size_t shrunk;           /* the part of `rounding` that blocks with room have kept when they shrank */
    size_t cached;           /* bytes held that were in no used block */
    size_t held;

    size_t usable;           /* free bytes that the stream could have used, had they been in one piece */
    size_t usable_in_pages;  /* the part of `usable` that cannot move, since used blocks lie in the same pages; in fixed
                                segments all of it */
    size_t in_slots;         /* the part of `usable` in slots of strategy:pooled, which serve other sizes */
    size_t stranded;         /* free bytes whose earlier work on other streams was not known to be complete */
    size_t graph_bytes;      /* free bytes that captured graphs owned */
    size_t quarantined;      /* bytes that the driver failed to take back (galloc_stats.quarantined) */
    size_t busy;             /* bytes that other calls were mapping or returning */
    size_t largest_usable;   /* size of the largest piece of `usable`, slots aside */
    size_t largest_possible; /* about the largest block that was possible by moving and creating pages */
    double fragmentation;    /* galloc_stats.external_fragmentation at that time, over the free blocks of all streams */

    galloc_stranded streams[GALLOC_REPORT_STREAMS]; /* streams that strand most bytes, in descending order; then 0
                                                       bytes */
    size_t more_streams, more_stranded; /* the number of further such streams, and their bytes */

    size_t limit;            /* the most that the pool may hold: the least of its limits and the device's memory */
    size_t room;             /* bytes that the limits still left, whether or not the driver had them */
    int device_known;        /* 1: the figures of the device are valid */
    size_t device_total, device_free;
    size_t other_pools, others_held, others_cached; /* galloc's other pools of the device: their number, their bytes */
    size_t outside;          /* bytes held outside galloc: by other processes, by CUDA, by the program's own
                                cudaMalloc */

    int backend, like, expandable_segments, reuse; /* settings of the pool that matter here */
    uint64_t wait_limit_ms;
    int steps_taken;         /* 0: no step was taken, since none could have helped */
    galloc_step steps[GALLOC_REPORT_STEPS]; /* in order, with the gains of all rounds; the end has name NULL */
} galloc_report;

/* Functions of the program that a pool calls; see galloc_pool_set_callbacks. Each may be NULL. */
typedef struct galloc_callbacks {
    int (*on_oom)(const galloc_report *report, void *user);
    void (*on_reject)(const galloc_report *report, void *user);
    void (*on_map)(galloc_pool *pool, void *addr, size_t bytes, void *user);
    void (*on_unmap)(galloc_pool *pool, void *addr, size_t bytes, void *user);
    void *user; /* the last argument of each */
} galloc_callbacks;

/* ==== API ======================================================================================================= */
/* >>api */

/* The public functions. Unless a function says otherwise:
     Returns  cudaSuccess; cudaErrorInvalidValue for an argument out of range; cudaErrorInvalidResourceHandle for a pool
              or group that has ended; cudaErrorInitializationError in the child of a fork; otherwise the driver's
              error. A call that fails changes nothing, nor a place for a result whose description does not say so; it
              keeps its error for galloc_last_message, and sends it to the log (GALLOC_LOG_ERROR: repeated lines are
              folded; GALLOC_LOG_OFF: no line). The runtime's last error stays as it was.
     Streams  may be captured (ON GRAPHS), except with galloc_resize (cudaErrorNotSupported), galloc_stream_retire and
              galloc_graph_release (cudaErrorStreamCaptureUnsupported). Stream 0 is the legacy or the per-thread default
              stream, as in the calling file. cudaStreamPerThread is refused while a green context is current, as in
              CUDA.
     Threads  may be called by any thread at any time.
     Device   does not wait for the device. With backend:cudaMalloc, allocations may wait, as cudaFree does, even with
              throw_on_cudamalloc_oom.
   Arguments that a function does not describe:
     void *ptr  start of a used block
     void **ptr, bytes, stream  as in galloc_malloc
     pool     a pool that has not ended (galloc_pool_create, galloc_pool_default)
     graph    a group that has not ended (galloc_graph_begin)
     n        length of `streams` or `array` */

/* Allocates `bytes` bytes of device memory for `stream`, from the default pool of the stream's device (for the default
   streams: of the current device). Work queued on `stream` after this call, and work that is ordered after such work,
   may use the memory. Its contents are undefined.
     ptr      receives the address, aligned to 512 bytes; NULL if bytes is 0, and after every failure
     bytes    0 .. SIZE_MAX; more than the device can hold fails
     stream   the stream that uses the memory first
     Returns  also cudaErrorMemoryAllocation: the device or the pool's limit has no more memory (ON RUNNING OUT);
              cudaErrorStreamCaptureInvalidated: the stream's capture has been invalidated
     Device   waits only when memory has run out, for no longer than it needs to, and never in a capture. There are
              three exceptions, but none with a wait_limit_ms: like:pytorch waits before it collects fixed segments
              (gc_threshold); a request waits once for each 64 new streams while the pool knows more than 1024, because
              streams were destroyed without galloc_stream_retire; and with debug a request on a default stream waits
              for the checks of blocks freed there */
GALLOC_API cudaError_t galloc_malloc(void **ptr, size_t bytes, cudaStream_t stream);

/* Frees a block. Work queued on `stream` before this call may still use it: later work of the same stream may reuse the
   memory at once, other streams when that is safe (ON STREAMS).
     ptr      from any allocating function; NULL does nothing
     stream   any stream of any device; all work that uses the block must be ordered before this point of the stream, by
              work or waits that are queued there: the call queues none (for stream 0: ON STREAMS)
     Returns  also cudaErrorInvalidDevicePointer: `ptr` is not the start of a used block. The message says whether it is
              foreign, inside a block, or already freed
     Device   does not wait, with one exception: if the host has no memory for a stream that the pool has not seen
              before, it waits for that stream; if that stream is being captured, it returns cudaErrorMemoryAllocation
              or the driver's error instead, and the block stays used */
GALLOC_API cudaError_t galloc_free(void *ptr, cudaStream_t stream);

/* Frees a block that several streams use: it is reused after the work queued so far on each of them.
     streams  array of n streams, n >= 1; a stream may occur more than once
     Returns  as galloc_free; also cudaErrorMemoryAllocation: no host memory to note the streams; the block is still
              used */
GALLOC_API cudaError_t galloc_free_after(void *ptr, const cudaStream_t *streams, int n);

/* Allocates with all parameters; the other allocating functions are shorthands of this one.
     request  see galloc_request; read during the call only
     Returns  as galloc_malloc
     Device   as galloc_malloc */
GALLOC_API cudaError_t galloc_alloc(void **ptr, const galloc_request *request);

/* Allocates a block with room to grow, for growing vectors and key/value caches: galloc keeps the addresses behind the
   block up to max_bytes, so that galloc_resize can grow it in place until memory runs out. Unused room takes addresses,
   not memory (in fixed segments it takes memory). galloc_alloc does the same with galloc_request.max_bytes, also for a
   pool of your own.
     bytes      as in galloc_malloc (0 gives NULL, and no room); rounded up to 2 MiB
     max_bytes  the block can reach at least this size, rounded up to 2 MiB; less than `bytes` counts as `bytes`
     Returns    as galloc_malloc; cudaErrorMemoryAllocation also if there are no addresses for max_bytes
     Device     as galloc_malloc */
GALLOC_API cudaError_t galloc_malloc_growable(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream);

/* Grows or shrinks a block in place. The contents up to the smaller size stay; nothing is copied. A block grows into
   free memory that follows it and into unused addresses, for which pages move or are created as for an allocation; when
   memory is short, the stream may be made to wait for other streams (reuse:wait). A block with room always finds its
   addresses free; it grows in steps of 2 MiB, and keeps its memory when it shrinks. Any other block gives back the end
   that is cut off, as by galloc_free. Work queued on `stream` after this call may use the new bytes; their contents are
   undefined, even if the block had them before.
     ptr      start of a used block
     bytes    the new size, at least 1
     stream   shrinking: as for galloc_free; growing: as for galloc_malloc; it must not be captured
     Returns  also cudaErrorInvalidDevicePointer; cudaErrorNotSupported: the block cannot grow at these addresses, or
              not before another stream's work is complete, or the stream is being captured;
              cudaErrorMemoryAllocation: the addresses are free, but device memory or host memory has run out. After an
              error the block and its room are as before, but the room may have got some of its memory already
     Threads  one call at a time for each block
     Device   waits only when memory has run out, or for a block with room of which another stream may still use what
              it grows into, if `stream` cannot be made to wait: with reuse:wait off, or if one of the two is the legacy
              stream. wait_limit_ms and throw_on_cudamalloc_oom limit and forbid these waits too */
GALLOC_API cudaError_t galloc_resize(void *ptr, size_t bytes, cudaStream_t stream);

/* Notes that `stream` uses a block too. When the block is freed, all work queued on `stream` until then counts as use:
   no stream, the freeing stream included, gets the memory before that work is complete or waited for.
     ptr      start of a used block
     stream   must live until the block is freed, or be retired before it is destroyed. For a stream that is being
              captured, the use is that of the capture's graph; its other work needs a call before or after the capture
     Returns  also cudaErrorInvalidDevicePointer, cudaErrorMemoryAllocation (host), cudaErrorStreamCaptureInvalidated */
GALLOC_API cudaError_t galloc_record_stream(void *ptr, cudaStream_t stream);

/* Announces cudaStreamDestroy: memory freed on the stream becomes available to other streams as soon as the stream's
   work is complete, and galloc forgets the stream once that memory is used again or returned. Queue no work on it
   between this call and cudaStreamDestroy. Without this call reuse is still safe, but the memory that the stream freed
   last is found only when memory runs out, or after a thousand such streams: up to 2 MiB, or the stream's share of
   1/128 of the heap if that is more (of half of the heap in a program that repeats itself). It is all that the stream
   freed if it was the pool's only stream. A stream that is passed to galloc again counts as not retired.
     stream   not captured. It is retired in all pools, or after an error in none
     Returns  also cudaErrorStreamCaptureImplicit: the legacy stream, while a blocking stream is captured */
GALLOC_API cudaError_t galloc_stream_retire(cudaStream_t stream);

/* Begins a group of captured graphs that share memory, so that a hundred graphs (one for each batch size, say) need the
   memory of the largest. Captures of `stream` until galloc_graph_end, one after the other or the one that is under way,
   and of the streams that they fork to, belong to the group: memory that one capture frees, later captures may reuse.
   The program promises that
     - each launch of a graph of the group is ordered after the previous one, so that no two run at once;
     - no graph relies on what another one left in memory that was freed in the other one's capture.
   A result (a block that is not freed in its capture) and a recorded input are not given to other captures of the group
   until the program has freed them. Graphs captured after that may write to them. So may graphs that were captured
   before a result's graph and freed the same memory: launch them only after all use of the result.
     graph    the group; if it holds NULL, a new group is made
     pool     the pool for captured allocations; NULL: the group's, for a new group the default pool of the stream's
              device
     stream   not the legacy stream; it must live until galloc_graph_end
     Returns  also cudaErrorNotPermitted: the group has begun already, or another one of the pool has with this stream
              or capture; cudaErrorStreamCaptureInvalidated; cudaErrorMemoryAllocation (host). After an error *graph is
              as before */
GALLOC_API cudaError_t galloc_graph_begin(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream);

/* Ends the capturing of a group: later captures do not belong to it. Call it after the last capture has ended. The
   group keeps its memory.
     Returns  also cudaErrorNotPermitted: the group has not begun */
GALLOC_API cudaError_t galloc_graph_end(galloc_graph *graph);

/* Returns the memory of a group to its pool and ends the group; `graph` is invalid afterwards. The program promises
   that the group's graphs are not launched again, and that all their launches are ordered before this point of
   `stream`, as work is before galloc_free. The graphs may still exist, and their work may still run. The memory of a
   group that is never released returns when its graphs are gone; the group then ends with its pool.
     stream   not captured; GALLOC_NO_STREAM: nothing is promised, the graphs keep the memory until they are gone, and
              the group ends with the last of them
     Returns  also cudaErrorNotPermitted before galloc_graph_end; cudaErrorMemoryAllocation (host), nothing has changed
     Device   does not wait; takes time in proportion to the pool's blocks */
#if defined(__cplusplus)
#define GALLOC_NO_STREAM reinterpret_cast<cudaStream_t>(~static_cast<uintptr_t>(0))
#else
#define GALLOC_NO_STREAM ((cudaStream_t)(uintptr_t)-1)
#endif
GALLOC_API cudaError_t galloc_graph_release(galloc_graph *graph, cudaStream_t stream);

/* Returns the default settings. */
GALLOC_API galloc_config galloc_config_default(void);

/* Changes settings by a text of key:value pairs, separated by commas; GALLOC_CONF has the same syntax. The keys are the
   members of galloc_config; PyTorch's garbage_collection_threshold and any size's key with _mb appended (in MiB) are
   accepted too. Values, by their kind or key:
     bytes       a number, or one with K, M or G; `none` for a limit that may be absent (SIZE_MAX); `auto` where galloc
                 chooses (0)
     fractions   such as 0.02; digits after the sixth behind the point do not count
     switches    True or False; stream_check: on or off; stats: exact or fast
     times       a whole number with ms, s, m or h, or none; wait_limit_ms: a plain number, or none
     reuse       none, or completed, followed, wait joined by '+'
     roundup_power2_divisions   one number for all sizes, or [256:1,512:2,>:4]: below 512 MiB, from 512 MiB, from 1 GiB
     log         off, error, info or debug: what the process logs (GALLOC_LOG_...); only in GALLOC_CONF
     snapshot_on_oom   a file of galloc_snapshot_save(NULL, ...), written when an allocation fails since memory has run
                 out, after on_oom: by the first such call of each pool; %p stands for the process, %d for the device,
                 %% for %; no comma, at most 200 bytes; only in GALLOC_CONF
     trace       a file, named likewise, for a log of all allocations and frees; pools with equal names share it; only
                 in GALLOC_CONF
   release_lock_on_cudamalloc is accepted without effect. Anything else is an error, and then no setting changes. The
   arguments:
     config   the settings to change, from galloc_config_default, say
     text     terminated by 0
     message  receives what is wrong, where, and what would be right; on success the settings of the text that have no
              effect beside others, else "". NULL with size 0 if it is not wanted
     size     bytes at `message` */
GALLOC_API cudaError_t galloc_config_parse(galloc_config *config, const char *text, char *message, size_t size);

/* Writes all settings except `device` as a text that galloc_config_parse accepts, each key once.
     config   the settings
     text     receives the text, terminated by 0
     size     bytes at `text`; GALLOC_CONFIG_TEXT always suffices
     Returns  also cudaErrorInvalidValue: the text does not fit. After an error `text` is "" */
GALLOC_API cudaError_t galloc_config_print(const galloc_config *config, char *text, size_t size);

/* Creates a pool.
     pool     receives the pool; NULL after a failure
     config   NULL: the defaults, for the current device
     Returns  also cudaErrorInvalidDevice, cudaErrorMemoryAllocation (host memory or address space) */
GALLOC_API cudaError_t galloc_pool_create(galloc_pool **pool, const galloc_config *config);

/* Destroys a pool and returns its memory to the device. Its handle is refused from then on; after more than 250,000
   other pools a new one may have it.
     Returns  also cudaErrorNotPermitted: blocks of the pool are still used, or graphs own memory of it; it is a default
              pool; the call comes from a callback while another call is in the pool; or it comes from on_map or
              on_unmap and the pool has one of these callbacks and holds memory. After a driver's error the pool
              still exists
     Threads  no other thread should use this pool: the call waits for calls in the pool, and later calls fail
     Device   waits for the device if work may still use memory of the pool, or if the pool has fixed segments; calls
              on other pools go on meanwhile */
GALLOC_API cudaError_t galloc_pool_destroy(galloc_pool *pool);

/* Gives the default pool of a device: the pool of galloc_malloc. The first use creates it, with the settings of the
   environment variable GALLOC_CONF. If that begins with like:pytorch, galloc first reads PYTORCH_CUDA_ALLOC_CONF (or,
   if that is not set, PYTORCH_ALLOC_CONF), except its settings on pinned host memory, on addresses reserved by class,
   and on reuse in captures.
     pool     receives the pool; NULL after a failure
     device   ordinal; -1: the current device
     Returns  also cudaErrorInvalidDevice; cudaErrorInvalidValue: GALLOC_CONF is not understood */
GALLOC_API cudaError_t galloc_pool_default(galloc_pool **pool, int device);

/* Allocates from a pool of your own; all else as galloc_malloc. If the stream belongs to another device than the pool,
   the program must enable that device's access to the memory.
     Returns  as galloc_malloc
     Device   as galloc_malloc */
GALLOC_API cudaError_t galloc_pool_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream);

/* Makes sure that `bytes` bytes, in one piece or in several, can be allocated on any stream without a driver call for
   memory; events may still be recorded. One exception, where the host has run far ahead of the device: a request of
   2 MiB or more may leave this memory to other streams and get what its own stream has freed, by moving pages, which
   creates none. Pieces count with their rounding (ON MEMORY), so reserve more with strategy:pooled or
   roundup_power2_divisions. With like:pytorch it makes a segment for the first stream that needs one of its kind. A
   segment of max_split_size or more, if that is set, is for one request of as much: none smaller gets a part of it.
     bytes    0 .. SIZE_MAX
     Returns  also cudaErrorMemoryAllocation; cudaErrorNotSupported with other backends
     Device   as galloc_malloc */
GALLOC_API cudaError_t galloc_pool_reserve(galloc_pool *pool, size_t bytes);

/* Returns free memory to the device until the pool holds at most `keep_bytes`, or nothing more can go. Single pages go,
   also from the middle of segments. Of the free blocks of one stream the least recently freed go first; there is no
   such order between streams.
     keep_bytes  0: all that can go; SIZE_MAX: nothing, but galloc notices which recorded events are complete
     released  receives the bytes returned, also after a failure; NULL if it is not wanted
     Device    waits for the device if the memory known to be unused does not suffice */
GALLOC_API cudaError_t galloc_pool_trim(galloc_pool *pool, size_t keep_bytes, size_t *released);

/* Tells galloc that the program has synchronised with the device, or with all streams that freed memory of the pool.
   Memory known to be unused returns to the device until the pool holds at most its release_threshold, as with a
   cudaMemPool. With the default threshold nothing is returned.
     released  receives the bytes returned, also after a failure; NULL if it is not wanted
     Device    does not wait for work that an event shows to be unfinished, and keeps the memory of such work. Work
               without an event (a single stream records none) is waited for as in galloc_pool_trim, which takes no time
               after a synchronisation */
GALLOC_API cudaError_t galloc_pool_sync_point(galloc_pool *pool, size_t *released);

/* Sets the most that the pool may hold, in place of its memory_limit and per_process_memory_fraction; device_limit
   stays. Growth that begins after this call keeps to the new limit. A pool that holds more keeps it, and serves
   requests from it. One that needs new memory first returns what the pool holds above the limit and does not use, and
   fails if that does not suffice. galloc_pool_trim(pool, bytes, NULL) returns it at once. galloc_pool_config gives the
   new limit.
     bytes    0 .. SIZE_MAX; SIZE_MAX: the device's memory. With backend:cudaMallocAsync the driver's pool keeps the
              limit that it was made with: a higher one has no effect */
GALLOC_API cudaError_t galloc_pool_set_limit(galloc_pool *pool, size_t bytes);

/* Sets functions that the pool calls. They run in the thread whose call leads to them, with no lock of galloc held.
   They may call galloc, also for this pool, but not this function. They must return (no longjmp, no exception) and
   leave the current device as it was. In the child of a fork that they make they must not return.
     on_oom     an allocation is about to fail, after all steps of ON RUNNING OUT. Return 1 to try all steps again,
                after freeing memory, say: at most max_retries times for one allocation; or 0 to let it fail. It must
                not free the block that a galloc_resize under way grows. Not called for requests that exceed what the
                pool may ever hold, nor for allocations within a callback
     on_reject  an allocation has failed at once (galloc_stats.rejections); not called within on_oom or on_reject
     on_map     [addr, addr + bytes) has memory from now on, and no block uses it yet; to register it with a network
                library, say. The pool's device is current. A page that moves appears at a second address. Pages that
                are created while on_map is set support GPUDirect RDMA if the device does, earlier ones only with
                gpu_direct_rdma
     on_unmap   the same range loses its memory when this returns; no work uses it any more. A range is unmapped as a
                whole, as it was mapped. Memory lost by cudaDeviceReset is not reported
   Within on_map and on_unmap galloc serves requests from the memory of the pool, without mapping or unmapping anything.
   With on_map set, this function calls it for all present mappings before it returns; the pool returns no memory
   meanwhile. It waits for the pool's old callbacks in other threads. Once it has returned, none of them runs or begins,
   so `user` may go. Hold no lock that they take, and let none of them wait for this thread. The wait is long where
   threads map all the time, or where on_oom takes long.
     callbacks  copied; NULL: none from now on
     Returns    also cudaErrorNotPermitted within on_map or on_unmap, while one of the pool runs; cudaErrorNotSupported
                for on_map or on_unmap with another backend than native; cudaErrorMemoryAllocation (host) */
GALLOC_API cudaError_t galloc_pool_set_callbacks(galloc_pool *pool, const galloc_callbacks *callbacks);

/* Reads the report of the calling thread's last failed allocation (or growth of a block).
     report   receives the report
     Returns  also cudaErrorNotReady: none has failed, or the last one failed for another reason than device memory */
GALLOC_API cudaError_t galloc_oom_report(galloc_report *report);

/* Writes a report as a text of about 30 lines, with advice.
     report   of galloc_oom_report, or the argument of a callback
     text     receives the text, terminated by 0
     size     bytes at `text`; GALLOC_REPORT_TEXT always suffices
     Returns  also cudaErrorInvalidValue: the text does not fit. After an error `text` is "" */
GALLOC_API cudaError_t galloc_report_text(const galloc_report *report, char *text, size_t size);

/* Reads the settings in effect: `device` is an ordinal; expandable_segments is 0 where the device does not support it,
   and with other backends, for which stats_exact is 1. With strategy:heuristic, overhead and growth are
   those of the last decision.
     config   receives the settings */
GALLOC_API cudaError_t galloc_pool_config(galloc_pool *pool, galloc_config *config);

/* Reads the decisions of strategy:heuristic with their reasons. Each was also logged as one line, unless the same call
   logged an error.
     array    receives the first `n` decisions, in order; may be NULL when n is 0
     count    receives their number, at most GALLOC_DECISIONS; NULL if it is not wanted */
GALLOC_API cudaError_t galloc_pool_decisions(galloc_pool *pool, galloc_decision *array, int n, int *count);

/* Ends strategy:heuristic: the pool keeps the settings in effect and continues as strategy:caching. galloc_pool_config
   then gives settings, and galloc_config_print writes them, with which other pools behave alike. Does nothing with
   another strategy. */
GALLOC_API cudaError_t galloc_pool_freeze(galloc_pool *pool);

/* Reads the counters. Takes the pool's lock, and time in proportion to the streams, the stale aliases and the free
   blocks of graphs.
     stats    receives the counters */
GALLOC_API cudaError_t galloc_pool_stats(galloc_pool *pool, galloc_stats *stats);

/* Sets peaks to the current values, and totals, counts and times to zero. */
GALLOC_API cudaError_t galloc_pool_stats_reset(galloc_pool *pool);

/* Reads the counters of torch.cuda.memory_stats; galloc_pool_stats_reset resets these as well.
     stats    receives the counters
     Returns  also cudaErrorNotSupported: the pool is not like:pytorch with expandable_segments:False */
GALLOC_API cudaError_t galloc_pool_torch_stats(galloc_pool *pool, galloc_torch_stats *stats);

/* Reads the state of each stream that has allocated or freed and is not forgotten. Work in captures is not included
   (see galloc_stats.graph_bytes). The driver is not asked: work whose end galloc has not noticed counts as unfinished
   (galloc_pool_trim(pool, SIZE_MAX, NULL) notices it where an event was recorded after it, which galloc does not do for
   a pool's only stream; it returns no memory). Streams that are ordered after a stream may still have some of its
   stranded bytes. Takes time in proportion to the stranded free blocks, with the pool's lock held.
     array    receives the first `n` streams, in no particular order; may be NULL when n is 0
     count    receives the number of streams, which may exceed n; NULL if it is not wanted */
GALLOC_API cudaError_t galloc_pool_streams(galloc_pool *pool, galloc_stream_stats *array, int n, int *count);

/* Begins a history of the pool, for snapshots: the last `entries` allocations, frees, resizes, mappings, moves, waits
   and failures for want of memory, with times, streams and tags. A history that the pool has already is dropped. An
   entry takes 64 bytes of host memory. With a history every call takes the pool's lock, as with stats:exact, and reads
   the clock for each entry. The setting `history` does the same from the pool's beginning.
     entries  at most 2^24; 0: no history from now on
     Returns  also cudaErrorMemoryAllocation (host); the history is as before */
GALLOC_API cudaError_t galloc_pool_history(galloc_pool *pool, size_t entries);

/* Sets how many frames of the calling stack the history keeps of each allocation and free, from now on. Snapshots have
   them as PyTorch's "frames", also of blocks that are in use; galloc_live_text names the stacks that hold most. The
   process keeps each distinct stack once, in at most 10 MiB of host memory until galloc_shutdown: 65535 stacks, of 2^20
   frames together. Allocations and frees beyond that have no stack, and are counted. A stack costs tens of nanoseconds
   if galloc knows it (x86-64 with glibc), otherwise as much as the C library's backtrace(), microseconds. Without a
   history it has no effect. The setting `history_stacks` does the same from the pool's beginning. docs/history.md says
   how to get lines of source, and when a stack is known.
     frames   at most 32; 0: no stacks from now on
     Returns  also cudaErrorNotSupported: the system gives no stacks; cudaErrorMemoryAllocation (host); it is as before
              then */
GALLOC_API cudaError_t galloc_pool_history_stacks(galloc_pool *pool, size_t frames);

/* Notes a text in the history of each pool that has one: "step 12", say. Also writes to the file what the setting
   `trace` has logged so far.
     text     at most 47 bytes of it are kept; all else than printable ASCII becomes '?' */
GALLOC_API cudaError_t galloc_annotate(const char *text);

/* Gives a tag (galloc_request.tag) a name, for snapshots and galloc_live_text. 64 tags can have names.
     tag      any number; 0, that of blocks without a tag, has its name in galloc_live_text only
     name     as the text of galloc_annotate; NULL or "": the tag has no name from now on
     Returns  also cudaErrorMemoryAllocation: 64 other tags have names */
GALLOC_API cudaError_t galloc_tag_name(uint32_t tag, const char *name);

/* Writes the state of a pool, or of all: each segment and block, the pages, the counters and the settings. The keys are
   those of PyTorch's torch.cuda.memory._snapshot(), so that its viewer and its tools read it; galloc's own stand under
   "galloc". A segment is a range of addresses with memory and without a gap. Blocks are "active_allocated" (the
   program's), "active_pending_free" (free; a graph owns it, or several streams' work may still use it) or "inactive".
   Of each pool, at one time: the sizes of its segments and kept_by_driver (galloc_stats.quarantined is in it) add up to
   galloc_stats.reserved, the requested sizes of its allocated blocks to galloc_stats.live. device_traces are the
   histories of the device's pools (galloc_pool_history), in order of time: going back from the segments, each entry
   undoes the one before. A free is requested and complete at once; a resize is a free and an allocation, a move
   ("moved") an unmapping and a mapping. time_us agrees with the time of day within a second. With a history, segments
   have stream 0, and pending blocks are "inactive" with the key "pending". A snapshot that is taken while on_map or
   on_unmap runs has no history.
     pool     NULL: all pools of the process, each as it is when its turn comes
     format   GALLOC_SNAPSHOT_...
     write    called with consecutive parts of up to 4096 bytes; returns 0, or another number to stop. No lock is held,
              and it may call galloc, but not galloc_shutdown
     user     its first argument
     Returns  also cudaErrorMemoryAllocation: no host memory for a copy of the state, 60 bytes for each block and page,
              64 for each entry of the history; cudaErrorOperatingSystem: write has stopped it
     Threads  waits for driver calls that other threads make for the pool; then calls on the pool wait while the state
              is copied. While on_map or on_unmap runs, its pages are missing in the sums */
GALLOC_API cudaError_t galloc_snapshot(galloc_pool *pool, int format, galloc_write write, void *user);

/* Writes galloc_snapshot to a file: a pickle if its name ends in ".pickle" or ".pkl", otherwise JSON.
     pool     NULL: all pools of the process
     path     an existing file is replaced at the end, so that no reader meets a part: a file PATH.*.partial, of this
              call alone, becomes PATH. What is no plain file (a device, a link) is not replaced
     Returns  as galloc_snapshot; cudaErrorOperatingSystem: the file cannot be written; the message has the reason */
GALLOC_API cudaError_t galloc_snapshot_save(galloc_pool *pool, const char *path);

/* Writes what the program holds, to find leaks: the used blocks by tag, size and stream, the 16 kinds with most bytes
   in lines of their own; of blocks with a stack (galloc_pool_history_stacks) the 3 stacks with most bytes.
   galloc_pool_destroy and galloc_shutdown, when they fail since blocks are used, name the first kind in their message.
     pool     NULL: all pools of the process
     text     receives the text, terminated by 0
     size     bytes at `text`; GALLOC_REPORT_TEXT always suffices
     Returns  also cudaErrorInvalidValue: the text does not fit; cudaErrorMemoryAllocation (host). After an error
              `text` is "" */
GALLOC_API cudaError_t galloc_live_text(galloc_pool *pool, char *text, size_t size);

/* Checks the whole heap, for tests and debugging. Takes time in proportion to the number of blocks.
     Returns  the number of violated invariants, 0 for a healthy heap; -1 for a pool that is NULL or has ended, and in
              the child of a fork */
GALLOC_API int galloc_pool_check(galloc_pool *pool);

/* Describes any address, at any time. For an address outside galloc's memory it returns cudaSuccess, with the state
   GALLOC_STATE_FOREIGN.
     ptr      any address
     info     receives the description */
GALLOC_API cudaError_t galloc_pointer_info(const void *ptr, galloc_pointer *info);

/* Destroys the default pools and all other state; afterwards galloc may be used again from the beginning.
     Returns  cudaErrorNotPermitted: blocks are still used, graphs own memory, or a pool of your own still exists;
              default pools that nothing uses have ended all the same, with their handles, limits, callbacks,
              histories and groups; others have returned unused memory
     Threads  no other thread may be inside galloc
     Device   as galloc_pool_destroy, for each default pool */
GALLOC_API cudaError_t galloc_shutdown(void);

/* Allocates memory that every stream may use at once, for GALLOC_OVERRIDE_CUDA, whose cudaMalloc calls it. It comes
   from a pool of its own for the current device, with the settings of the default pool at the first call;
   galloc_shutdown ends it with the default pools. Free it by galloc_override_free only.
     ptr      receives the address; NULL after an error
     bytes    as galloc_malloc
     Returns  as galloc_pool_malloc, which a message may name
     Device   as galloc_malloc; with cudaMallocAsync it waits for the legacy stream */
GALLOC_API cudaError_t galloc_override_malloc(void **ptr, size_t bytes);

/* Ways to free of galloc_override_free. */
enum { GALLOC_OVERRIDE_DEVICE = 0, GALLOC_OVERRIDE_STREAM = 1, GALLOC_OVERRIDE_ORDERED = 2 };

/* Frees a block for GALLOC_OVERRIDE_CUDA, whose cudaFree and cudaFreeAsync call it.
     ptr      the block
     stream   the legacy stream if 0, in every file
     how      GALLOC_OVERRIDE_DEVICE: after a wait for all work of the block's device (of the current context, the
              primary one, and those with streams that galloc has been passed), on the legacy stream of that device
              GALLOC_OVERRIDE_STREAM: after a wait for `stream`, likewise
              GALLOC_OVERRIDE_ORDERED: as galloc_free; if `stream` is the legacy one, other blocking streams come after
              it, as after work of the program. For memory of galloc_override_malloc as GALLOC_OVERRIDE_STREAM
     Returns  also what galloc_free returns, and the error of an earlier launch. When a captured stream would have to be
              waited for, the block stays in use: cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated
              after the capture has failed, cudaErrorStreamCaptureImplicit for the legacy stream while a blocking one
              is captured
     Device   waits as `how` says, and a wait for the device invalidates captures that are under way there */
GALLOC_API cudaError_t galloc_override_free(void *ptr, cudaStream_t stream, int how);

/* Returns the calling thread's last error in words, with the name of the function that failed; "" if there was none.
   The text is valid until the thread's next error. */
GALLOC_API const char *galloc_last_message(void);

/* Sends all log lines of the process to a function of the program, in place of GALLOC_LOG: a macro that the file with
   the implementation can define, and that otherwise writes to stderr. GALLOC_CONF=log:... sets how much is logged; it
   is read with the first line.
     call   called by the thread whose call logs, with no lock held; level is GALLOC_LOG_ERROR or GALLOC_LOG_INFO, text
            is valid during the call. It may call galloc: calls that fail there return their errors and are not logged.
            Another thread may still be in a function that has just been replaced. NULL: GALLOC_LOG again
     user   its last argument */
GALLOC_API void galloc_set_log(void (*call)(int level, const char *text, void *user), void *user);

#ifdef __cplusplus
/* Typed variants, as CUDA has for cudaMalloc: float *p; galloc_malloc(&p, bytes, stream). */
template <class T> static inline cudaError_t galloc_malloc(T **ptr, size_t bytes, cudaStream_t stream)
{
    void *p = nullptr;
    cudaError_t err = galloc_malloc(ptr ? &p : static_cast<void **>(nullptr), bytes, stream);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
template <class T>
static inline cudaError_t galloc_malloc_growable(T **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    void *p = nullptr;
    cudaError_t err = galloc_malloc_growable(ptr ? &p : static_cast<void **>(nullptr), bytes, max_bytes, stream);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
template <class T> static inline cudaError_t galloc_alloc(T **ptr, const galloc_request *request)
{
    void *p = nullptr;
    cudaError_t err = galloc_alloc(ptr ? &p : static_cast<void **>(nullptr), request);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
template <class T>
static inline cudaError_t galloc_pool_malloc(galloc_pool *pool, T **ptr, size_t bytes, cudaStream_t stream)
{
    void *p = nullptr;
    cudaError_t err = galloc_pool_malloc(pool, ptr ? &p : static_cast<void **>(nullptr), bytes, stream);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
#endif

#ifdef GALLOC_OVERRIDE_CUDA

/* Override: in a file that defines GALLOC_OVERRIDE_CUDA before it includes this header, four functions of CUDA are
   galloc's, under their own names. Include the header before the first use of them.
     cudaMalloc       memory that every stream may use at once. It comes from a pool of its own for each device, with
                      the settings of the default pool
     cudaFree         waits for the device of the memory, as in CUDA: for the current context, the primary one, and
                      those whose streams galloc has been passed. It must not be called while a stream is captured
     cudaMallocAsync  galloc_malloc
     cudaFreeAsync    galloc_free; for memory of cudaMalloc it waits for the stream
   On the legacy stream cudaFreeAsync also records an event, so that it orders blocking streams, as in CUDA.
   Both functions that free take memory of either kind, of galloc_malloc too, and pass other memory to CUDA. Pass no
   memory of cudaMalloc to galloc_free. Errors are galloc's: cudaGetLastError does not return them, and messages name
   galloc's functions, for cudaMalloc galloc_pool_malloc, for cudaFree galloc_override_free or galloc_free. Needs gcc or
   clang, also under nvcc; C++ includes cuda_runtime.h. */

#ifndef __GNUC__
#error "galloc.h: GALLOC_OVERRIDE_CUDA needs gcc or clang"
#endif
#ifdef __cplusplus
#include <cuda_runtime.h> /* its templates have the names that become macros */
#endif

#define GAI_OVERRIDE static __attribute__((unused)) cudaError_t
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
#define GAI_OVERRIDE_ZERO_IS_LEGACY 0
#else
#define GAI_OVERRIDE_ZERO_IS_LEGACY 1
#endif

/* In a file compiled for per-thread default streams, 0 is one of those. */
static __attribute__((unused)) cudaStream_t gai_override_stream(cudaStream_t stream)
{
    return stream || GAI_OVERRIDE_ZERO_IS_LEGACY ? stream : cudaStreamPerThread;
}

GAI_OVERRIDE gai_override_free(void *ptr)
{
    galloc_pointer info;
    if (galloc_pointer_info(ptr, &info) || info.state == GALLOC_STATE_FOREIGN) return cudaFree(ptr);
    return galloc_override_free(ptr, NULL, GALLOC_OVERRIDE_DEVICE);
}

GAI_OVERRIDE gai_override_free_async(void *ptr, cudaStream_t stream)
{
    galloc_pointer info;
    if (!ptr) return cudaSuccess; /* of 0 bytes */
    if (galloc_pointer_info(ptr, &info) || info.state == GALLOC_STATE_FOREIGN) return cudaFreeAsync(ptr, stream);
    return galloc_override_free(ptr, gai_override_stream(stream), GALLOC_OVERRIDE_ORDERED);
}

GAI_OVERRIDE gai_override_malloc_async(void **ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_malloc(ptr, bytes, stream);
}

#ifdef __cplusplus
template <class T> static inline cudaError_t galloc_override_malloc(T **ptr, size_t bytes)
{
    void *p = nullptr;
    cudaError_t error = galloc_override_malloc(ptr ? &p : static_cast<void **>(nullptr), bytes);
    if (ptr) *ptr = static_cast<T *>(p);
    return error;
}
template <class T> static inline cudaError_t gai_override_malloc_async(T **ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_malloc(ptr, bytes, stream);
}
/* CUDA's own form with an explicit pool. */
template <class T>
static inline cudaError_t gai_override_malloc_async(T **ptr, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    return cudaMallocFromPoolAsync(ptr, bytes, pool, stream);
}
#endif

#undef cudaMallocAsync /* per-thread default streams: macros of CUDA's headers */
#undef cudaFreeAsync
#define cudaMalloc galloc_override_malloc
#define cudaFree gai_override_free
#define cudaMallocAsync gai_override_malloc_async
#define cudaFreeAsync gai_override_free_async

#endif /* GALLOC_OVERRIDE_CUDA */

#ifdef __cplusplus
} /* extern "C++" */
#endif

#endif /* GALLOC_H */

/* ==== IMPLEMENTATION ============================================================================================ */

#if defined(GALLOC_IMPLEMENTATION) && !defined(GALLOC_IMPLEMENTATION_DONE)
#define GALLOC_IMPLEMENTATION_DONE

#if defined(__cplusplus)
extern "C++" {
#endif

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda.h>

#if defined(GALLOC_NVTX)
#if defined(__has_include)
#if !__has_include(<nvtx3/nvToolsExtMem.h>)
#error "galloc.h: GALLOC_NVTX needs nvtx3/nvToolsExtMem.h, which CUDA Toolkit 13.0 has"
#endif
#endif
#include <nvtx3/nvToolsExtMem.h>
#endif

#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#include <intrin.h>
#else
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__GLIBC__)
#include <execinfo.h>
#endif
#endif

/* The body defines the plain names and the per-thread ones side by side. */
#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
#undef galloc_malloc
#undef galloc_malloc_growable
#undef galloc_free
#undef galloc_free_after
#undef galloc_alloc
#undef galloc_pool_malloc
#undef galloc_record_stream
#undef galloc_stream_retire
#undef galloc_resize
#undef galloc_graph_begin
#undef galloc_graph_release
#endif

#ifndef GALLOC_MALLOC
#define GALLOC_MALLOC(bytes) malloc(bytes)
#define GALLOC_FREE(p) free(p)
#endif
#ifndef GALLOC_ASSERT
#define GALLOC_ASSERT(condition) ((void)0)
#endif
#ifndef GALLOC_LOG
#define GALLOC_LOG(text) ((void)fprintf(stderr, "galloc: %s\n", text))
#endif

/* ==== PLATFORM ================================================================================================== */
/* >>platform */

/* Compilers, locks, atomics, clock, threads and the error message: everything that differs between operating systems
   and compilers. Calls no other section and not CUDA. */

#if defined(__GNUC__)
#define GAI_FORMAT(string, first) __attribute__((format(printf, string, first)))
#else
#define GAI_FORMAT(string, first)
#endif

/* The fast path is inlined into the few functions that take it (GAI_INLINE). Its slow branches stay out of line
   (GAI_APART), so that the fast path saves and restores no registers for them. */
#if defined(__GNUC__)
#define GAI_THREAD_LOCAL __thread
#define GAI_INLINE inline __attribute__((always_inline))
#define GAI_APART __attribute__((noinline))
#define GAI_FRAME() ((uintptr_t)__builtin_frame_address(0))
#define GAI_MOSTLY(condition) __builtin_expect((condition), 1)
#else
#define GAI_THREAD_LOCAL __declspec(thread)
#define GAI_INLINE __forceinline
#define GAI_APART __declspec(noinline)
#define GAI_FRAME() ((uintptr_t)_AddressOfReturnAddress())
#define GAI_MOSTLY(condition) (condition)
#endif

#if defined(_WIN32)
#define GAI_LOCK_STATIC SRWLOCK_INIT
typedef SRWLOCK gai_lock;

static void gai_lock_init(gai_lock *lock) { InitializeSRWLock(lock); }
static void gai_lock_end(gai_lock *lock) { (void)lock; }
static void gai_lock_on(gai_lock *lock) { AcquireSRWLockExclusive(lock); }
static void gai_lock_off(gai_lock *lock) { ReleaseSRWLockExclusive(lock); }
static int gai_lock_try(gai_lock *lock) { return TryAcquireSRWLockExclusive(lock) != 0; }
#else
#define GAI_LOCK_STATIC PTHREAD_MUTEX_INITIALIZER
typedef pthread_mutex_t gai_lock;

static void gai_lock_init(gai_lock *lock) { (void)pthread_mutex_init(lock, NULL); }
static void gai_lock_end(gai_lock *lock) { (void)pthread_mutex_destroy(lock); }
static void gai_lock_on(gai_lock *lock) { (void)pthread_mutex_lock(lock); }
static void gai_lock_off(gai_lock *lock) { (void)pthread_mutex_unlock(lock); }
static int gai_lock_try(gai_lock *lock) { return !pthread_mutex_trylock(lock); }
#endif

/* Atomic access to pointers and counters that are read without a lock. A pointer is published (release) after the data
   it points to, and loaded with acquire. Who loads what gai_next has made sees what its thread has written before. */
#if defined(__GNUC__)
static void *gai_load_pointer(void *const *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void gai_store_pointer(void **p, void *value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static void gai_count(uint64_t *p, uint64_t n) { (void)__atomic_fetch_add(p, n, __ATOMIC_RELAXED); }
static uint64_t gai_counted(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static void gai_set_relaxed(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }
static uint64_t gai_load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void gai_store(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static uint64_t gai_next(uint64_t *p) { return __atomic_add_fetch(p, 1, __ATOMIC_ACQ_REL); }
static int gai_swap(uint64_t *p, uint64_t from, uint64_t to)
{
    return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}
#elif defined(_MSC_VER)
static void *gai_load_pointer(void *const *p) { return InterlockedCompareExchangePointer((void **)p, NULL, NULL); }
static void gai_store_pointer(void **p, void *value) { (void)InterlockedExchangePointer(p, value); }
static void gai_count(uint64_t *p, uint64_t n) { (void)InterlockedExchangeAdd64((volatile LONG64 *)p, (LONG64)n); }
static uint64_t gai_counted(const uint64_t *p)
{
    return (uint64_t)InterlockedCompareExchange64((volatile LONG64 *)p, 0, 0);
}
static void gai_set_relaxed(uint64_t *p, uint64_t value) { *(volatile uint64_t *)p = value; }
static uint64_t gai_load(const uint64_t *p) { return gai_counted(p); }
static void gai_store(uint64_t *p, uint64_t value) { (void)InterlockedExchange64((volatile LONG64 *)p, (LONG64)value); }
static uint64_t gai_next(uint64_t *p) { return (uint64_t)InterlockedIncrement64((volatile LONG64 *)p); }
static int gai_swap(uint64_t *p, uint64_t from, uint64_t to)
{
    return InterlockedCompareExchange64((volatile LONG64 *)p, (LONG64)to, (LONG64)from) == (LONG64)from;
}
#else
#error "galloc.h: needs gcc, clang, nvcc or MSVC"
#endif

/* Raises a counter to `n` if it is lower. */
static void gai_count_max(uint64_t *p, uint64_t n)
{
    uint64_t most = gai_counted(p);
    while (most < n && !gai_swap(p, most, n)) most = gai_counted(p);
}

#ifndef GALLOC_CLOCK
#define GALLOC_CLOCK() gai_clock()
#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define GAI_TICKS() gai_ticks()
/* The processor's counter, at half the cost of the clock, for the entries of a history (gai_history_convert). */
static GAI_INLINE uint64_t gai_ticks(void)
{
    uint32_t low, high;
    __asm__ __volatile__("rdtsc" : "=a"(low), "=d"(high));
    return (uint64_t)high << 32 | low;
}
#endif
#if defined(_WIN32)
static uint64_t gai_clock(void)
{
    LARGE_INTEGER ticks, second;
    (void)QueryPerformanceCounter(&ticks);
    (void)QueryPerformanceFrequency(&second);
    return (uint64_t)(ticks.QuadPart / second.QuadPart) * 1000000000u +
           (uint64_t)(ticks.QuadPart % second.QuadPart) * 1000000000u / (uint64_t)second.QuadPart;
}
#else
#if defined(CLOCK_MONOTONIC)
#define GAI_CLOCK CLOCK_MONOTONIC
#else
#define GAI_CLOCK 1 /* <time.h> hides it under strict C; the number and the types are fixed by the ABI */
extern int clock_gettime(int clock, struct timespec *now);
#endif
static uint64_t gai_clock(void)
{
    struct timespec now;
    (void)clock_gettime(GAI_CLOCK, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
#endif
#endif

#define GAI_CACHE_LINE 64

/* A spin lock, mostly for critical sections of a few dozen instructions in which no other lock is taken. Only
   gai_pool_lock_caches holds several latches at once, for a consistent count or check of the pool. Locking and
   unlocking take one atomic read-modify-write together, where a mutex needs two. A waiting thread first spins, then
   yields, then sleeps, so that an owner of lower priority gets to run. Value: 0 free, 1 taken. */
typedef uint64_t gai_latch;

#define GAI_LATCH_SPINS 8 /* pauses, the first about as long as twenty short holds */
#define GAI_LATCH_YIELDS 96

/* Pauses for 256, 1024, 4096 iterations, and then for 16384 each time. Long pauses let the thread that has the latch go
   on with its next calls, whose cache lines it has. */
static void gai_pause(unsigned round)
{
    volatile unsigned n = 256u << 2 * (round < 3 ? round : 3); /* volatile keeps the compiler from removing the loop */
    while (n > 0) n = n - 1;
}

/* Waits a little before the next attempt, longer in each round. */
static void gai_latch_rest(unsigned round)
{
    if (round < GAI_LATCH_SPINS) {
        gai_pause(round);
        return;
    }
#if defined(_WIN32)
    if (round < GAI_LATCH_YIELDS) (void)SwitchToThread();
    else Sleep(1);
#else
    if (round < GAI_LATCH_YIELDS) (void)sched_yield();
    else (void)poll(NULL, 0, 1);
#endif
}

GAI_APART
static void gai_latch_wait(gai_latch *latch)
{
    unsigned round = 0;
    do {
        do gai_latch_rest(round++);
        while (gai_load(latch));
    } while (!gai_swap(latch, 0, 1));
}

static GAI_INLINE void gai_latch_on(gai_latch *latch)
{
    if (!GAI_MOSTLY(gai_swap(latch, 0, 1))) gai_latch_wait(latch);
}

static GAI_INLINE void gai_latch_off(gai_latch *latch) { gai_store(latch, 0); }

/* Files: gai_rename replaces a file that has the name already, and returns 0 or an errno. What has the name
   and is no plain file (gai_path_is_special), a device or a link, must not be replaced. */
#if defined(_WIN32)
static unsigned long gai_process_id(void) { return GetCurrentProcessId(); }
static int gai_rename(const char *from, const char *to)
{
    return MoveFileExA(from, to, MOVEFILE_REPLACE_EXISTING) ? 0 : EACCES; /* mostly: another process has it open */
}
static int gai_path_is_special(const char *path)
{
    DWORD is = GetFileAttributesA(path), no_file = FILE_ATTRIBUTE_DEVICE | FILE_ATTRIBUTE_DIRECTORY;
    return is != INVALID_FILE_ATTRIBUTES && (is & (no_file | FILE_ATTRIBUTE_REPARSE_POINT)) != 0;
}
#else
static unsigned long gai_process_id(void) { return (unsigned long)getpid(); }
static int gai_rename(const char *from, const char *to) { return rename(from, to) ? errno : 0; }
#if !defined(__cplusplus)
extern int lstat(const char *path, struct stat *is); /* <sys/stat.h> hides it under strict C */
#endif
static int gai_path_is_special(const char *path)
{
    struct stat is;
    return !lstat(path, &is) && !S_ISREG(is.st_mode);
}
#endif

/* Thread keys: `call` runs when a thread ends that set a value for the key. */
#if defined(_WIN32)
#define GAI_AT_THREAD_END NTAPI
typedef DWORD gai_thread_key;
static int gai_thread_key_new(gai_thread_key *key, void(GAI_AT_THREAD_END *call)(void *))
{
    *key = FlsAlloc(call);
    return *key != FLS_OUT_OF_INDEXES;
}
static int gai_thread_key_set(gai_thread_key key, void *value) { return FlsSetValue(key, value) != 0; }
static void gai_thread_key_end(gai_thread_key key) { (void)FlsFree(key); }
#else
#define GAI_AT_THREAD_END
typedef pthread_key_t gai_thread_key;
static int gai_thread_key_new(gai_thread_key *key, void (*call)(void *)) { return !pthread_key_create(key, call); }
static int gai_thread_key_set(gai_thread_key key, void *value) { return !pthread_setspecific(key, value); }
static void gai_thread_key_end(gai_thread_key key) { (void)pthread_key_delete(key); }
#endif

/* Registers a function that runs before the code is unloaded: at dlclose (FreeLibrary) or when the process ends. */
#if defined(__GNUC__)
#define GAI_AT_UNLOAD __attribute__((destructor))
static int gai_watch_unload(void (*call)(void)) { return call != NULL; }
#else
#define GAI_AT_UNLOAD
static int gai_watch_unload(void (*call)(void)) { return !atexit(call); } /* in a DLL, atexit runs when the DLL is
                                                                             unloaded */
#endif

/* ---- stacks of calls ---- */

/* What is known of an address; the layout of Dl_info. */
typedef struct gai_code {
    const char *file; /* NULL: nothing is known */
    void *file_begin;
    const char *name; /* of the function; NULL: not known */
    void *name_begin;
} gai_code;

/* The unwinder that the C library's backtrace() calls. Only it says where a return address lies on the stack; `walk` is
   NULL where that is not known. */
typedef struct gai_unwinder {
    int (*walk)(int (*see)(void *frame, void *user), void *user); /* _Unwind_Backtrace; `see` returns 0 to go on */
    uintptr_t (*address)(void *frame);                            /* _Unwind_GetIP */
    uintptr_t (*base)(void *frame);                               /* _Unwind_GetCFA, of the next inner frame */
} gai_unwinder;

#if defined(_WIN32)
#define GAI_RETURN_ADDRESS() _ReturnAddress()
static int gai_plain_backtrace(void **at, int most) { return CaptureStackBackTrace(0, (DWORD)most, at, NULL); }
static void gai_code_look(gai_code *place, void *at, char *room, size_t size)
{
    HMODULE module = NULL;
    memset(place, 0, sizeof *place);
    if (!GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                            (const char *)at, &module)) return;
    place->file = GetModuleFileNameA(module, room, (DWORD)size) ? room : NULL;
    place->file_begin = module;
}
#else
#define GAI_RETURN_ADDRESS() __builtin_return_address(0)
/* <dlfcn.h> and <pthread.h> hide some of this, and of what stands below, under strict C. With a glibc older than 2.34
   it is in libdl, which programs need not link. */
extern int gai_dladdr(const void *at, gai_code *place) __asm__("dladdr") __attribute__((weak));
#if defined(__GLIBC__)
static int gai_plain_backtrace(void **at, int most) { return backtrace(at, most); }
#else
static int gai_plain_backtrace(void **at, int most) { return (void)at, (void)most, 0; } /* CUDA needs glibc */
#endif
static void gai_code_look(gai_code *place, void *at, char *room, size_t size)
{
    (void)room, (void)size;
    if (!gai_dladdr || !gai_dladdr(at, place)) memset(place, 0, sizeof *place);
}
#endif

#if defined(__GLIBC__) && defined(__x86_64__)
extern void *gai_dlopen(const char *file, int flags) __asm__("dlopen") __attribute__((weak));
extern void *gai_dlsym(void *library, const char *name) __asm__("dlsym") __attribute__((weak));
extern int gai_attr_of(pthread_t thread, pthread_attr_t *attr) __asm__("pthread_getattr_np") __attribute__((weak));
extern int gai_attr_stack(const pthread_attr_t *attr, void **lowest, size_t *bytes) __asm__("pthread_attr_getstack")
    __attribute__((weak));

static void gai_unwinder_load(gai_unwinder *unwinder)
{
    void *library = NULL; /* RTLD_DEFAULT */
    memset(unwinder, 0, sizeof *unwinder);
    if (!gai_dlopen || !gai_dlsym) return;
    if (!gai_dlsym(NULL, "_Unwind_Backtrace")) library = gai_dlopen("libgcc_s.so.1", 1 /* RTLD_LAZY */);
    *(void **)(void *)&unwinder->address = gai_dlsym(library, "_Unwind_GetIP");
    *(void **)(void *)&unwinder->base = gai_dlsym(library, "_Unwind_GetCFA");
    if (!unwinder->address || !unwinder->base) return;
    *(void **)(void *)&unwinder->walk = gai_dlsym(library, "_Unwind_Backtrace");
}

/* The bounds of this thread's stack; both 1: not known. The C library may allocate for it. */
static void gai_stack_bounds(uintptr_t *begin, uintptr_t *end)
{
    pthread_attr_t attr;
    void *lowest = NULL;
    size_t bytes = 0;
    *begin = *end = 1;
    if (!gai_attr_of || !gai_attr_stack || gai_attr_of(pthread_self(), &attr)) return;
    if (!gai_attr_stack(&attr, &lowest, &bytes)) {
        *begin = (uintptr_t)lowest;
        *end = *begin + bytes;
    }
    (void)pthread_attr_destroy(&attr);
}
#else
static void gai_unwinder_load(gai_unwinder *unwinder) { memset(unwinder, 0, sizeof *unwinder); }
static void gai_stack_bounds(uintptr_t *begin, uintptr_t *end) { *begin = *end = 1; }
#endif

typedef struct gai_unwinding {
    const gai_unwinder *unwinder;
    void **at;
    uintptr_t *places;
    int n, most;
} gai_unwinding;

static int gai_unwind_see(void *frame, void *user)
{
    gai_unwinding *walk = (gai_unwinding *)user;
    uintptr_t at = walk->unwinder->address(frame);
    if (!at || walk->n == walk->most) return 5; /* _URC_END_OF_STACK */
    walk->at[walk->n] = (void *)at;
    walk->places[walk->n++] = walk->unwinder->base(frame) - sizeof(void *);
    return 0;
}

/* Writes up to `most` return addresses, the innermost first, and returns their number. places: where each lies; 0: not
   known. It allocates nothing, but for its first call, which may load a library. */
static int gai_backtrace(const gai_unwinder *unwinder, void **at, uintptr_t *places, int most)
{
    gai_unwinding walk = {unwinder, at, places, 0, most};
    if (unwinder->walk) {
        (void)unwinder->walk(gai_unwind_see, &walk);
        return walk.n;
    }
    memset(places, 0, (size_t)most * sizeof *places);
    return gai_plain_backtrace(at, most);
}

/* Frees allocations that are linked by their first word. */
static void gai_list_free(void *list)
{
    while (list) {
        void *next = *(void **)list;
        GALLOC_FREE(list);
        list = next;
    }
}

/* ---- sizes ---- */

#define GAI_UNIT ((size_t)512)       /* block sizes are multiples of this; cudaMalloc aligns to at least as much */
#define GAI_UNIT_LOG2 9
#define GAI_MIB ((size_t)1 << 20)
#define GAI_ADDRESS_BITS 57          /* the reach of five-level page tables */

static size_t gai_min(size_t a, size_t b) { return a < b ? a : b; }
static size_t gai_max(size_t a, size_t b) { return a > b ? a : b; }

static int gai_is_power_of_two(size_t n) { return n && !(n & (n - 1)); }
static size_t gai_down(size_t n, size_t multiple) { return n & ~(multiple - 1); }
static size_t gai_up(size_t n, size_t multiple) { return gai_down(n + (multiple - 1), multiple); }

/* Rounds up a size given by the caller; 0 when the result exceeds the address range. */
static int gai_round(size_t n, size_t multiple, size_t *out)
{
    if (n > ((size_t)1 << GAI_ADDRESS_BITS) - multiple) return 0;
    *out = gai_up(n, multiple);
    return 1;
}

/* Index of the highest bit set; requires n > 0. */
static int gai_log2(uint64_t n)
{
#if defined(__GNUC__)
    return 63 - __builtin_clzll(n);
#else
    unsigned long at;
    _BitScanReverse64(&at, n);
    return (int)at;
#endif
}

/* Index of the lowest bit set; requires n > 0. */
static int gai_lowest(uint64_t n) { return gai_log2(n & (~n + 1)); }

/* The largest power of two <= n; requires n > 0. */
static size_t gai_power_below(size_t n) { return (size_t)1 << gai_log2(n); }

/* Rounds up to one of `divisions` equal steps between two powers of two, or to 512 bytes where the steps would be
   smaller. */
static size_t gai_up_by_steps(size_t bytes, size_t divisions)
{
    if (divisions < 2 || bytes <= GAI_UNIT * divisions) return gai_up(bytes, GAI_UNIT);
    return gai_up(bytes, gai_power_below(bytes) / divisions);
}

/* ==== PROCESS =================================================================================================== */
/* >>process */

/* The state outside of pools: of the process (gai_process, gai_locks) and of each thread (gai_thread); fork; the error
   message. Only the driver table (gai_cu), which is filled once, and the thread cache (gai_tcache) stand in sections of
   their own. Calls the platform only. */

#define GAI_MAP_ROOT_LOG2 14

/* A radix tree from addresses to descriptors: see section map. */
typedef struct gai_map {
    void *root[1 << GAI_MAP_ROOT_LOG2];
    void *nodes; /* all inner nodes, linked by their first word */
} gai_map;

#define GAI_DEVICES 64 /* that can be used; CUDA itself stops at fewer */

/* What the pools of a device hold together, and may hold. Guarded by the budget lock.
   held == sum of pool->taken over `pools`;  held <= most
   limit: the lowest device_limit that a pool names;  limit <= most
   most > limit: more than the limit is held, since a pool named a lower one or the driver's own pool has grown over it;
   most falls with held then, down to the limit */
typedef struct gai_budget {
    galloc_pool *pools; /* linked by next_sharing */
    size_t held, limit, most;
} gai_budget;

#define GAI_REPEAT_KINDS 16 /* kinds of messages that are counted separately, the latest ones */

#define GAI_NOTE_TEXT 48 /* bytes of an annotation and of a tag's name, with the terminating 0 */
#define GAI_TAG_NAMES 64

/* The locks of gai_process. `global` is taken before any other lock. The others come after the locks of a pool and
   after the latches of stream caches; no lock is taken while one of them is held, but for the latch of a log while
   `trace` is. */
static struct {
    gai_lock global, map, budget, log, context, tags, depot, trace;
} gai_locks = {GAI_LOCK_STATIC, GAI_LOCK_STATIC, GAI_LOCK_STATIC, GAI_LOCK_STATIC, GAI_LOCK_STATIC,
               GAI_LOCK_STATIC, GAI_LOCK_STATIC, GAI_LOCK_STATIC};

/* Zero-initialised, so that it takes no space in the object file. */
static struct {
    /* Read without a lock, some of it by every call, and hardly ever written. */
    uint64_t generation; /* of what threads remember of pools (their thread cache entries). It grows when a pool ends or
                            changes something that entries depend on, and entries of an older generation are ignored.
                            0: there is nothing to remember yet, or this is a child of fork */
    void *forked;        /* not NULL: this is a child of fork */
    void *driver_ready;  /* not NULL once gai_cu is filled */
    uint64_t driver_loads; /* calls that fill gai_cu, or have filled it */
    uint64_t forks_are_watched; /* 0 or 1 */
    uint64_t process, forks; /* its number when it forked last; calls of fork under way */
    void *known_pools;   /* `pools`, `ended_pools`, and those about to begin or to end */
    void *default_pool[GAI_DEVICES]; /* written with the global lock */
    void *override_pool[GAI_DEVICES]; /* handles, of galloc_override_malloc; the same */
    uint64_t given_pools; /* number of pools with variant.around; written with the global lock */
    uint64_t ends;       /* GAI_UNWATCHED, GAI_WATCHED or GAI_UNLOADED */
    gai_thread_key end_key; /* while `ends` is GAI_WATCHED */
    char apart[GAI_CACHE_LINE];

    /* The global lock guards: */
    galloc_pool *pools;       /* all of them */
    galloc_pool *ended_pools; /* what serves the next ones */
    int unload_is_watched;
    int tool;                 /* GALLOC_NVTX: GAI_TOOL_...; 0: not known yet */
    void *nvtx_domain;        /* the same: galloc's; written before any pool has `tool` */

    uint64_t epoch_us; /* microseconds from 1970 until GALLOC_CLOCK() was 0, within a second; atomic; 0: no pool has had
                          a history */
    void *traces;        /* gai_trace; NULL: no pool writes a log; written with the lock of logs */
    uint64_t trace_due;  /* they are to be written: see gai_trace_want; atomic */
    void *depot;         /* gai_depot; NULL: no pool has kept stacks; written with the lock of the depot */
    uint64_t threads, lives, groups; /* numbers given to threads, lives given out, groups created so far; atomic */
    uint64_t graph_ends; /* captures whose graphs are gone, so far; atomic */

    /* The budget lock guards: */
    gai_budget budgets[GAI_DEVICES];

    /* The context lock guards: */
    struct gai_known_context *known_contexts;

    /* The lock of tags guards: */
    struct {
        uint32_t tag;
        char name[GAI_NOTE_TEXT]; /* "": this place is free */
    } tag_names[GAI_TAG_NAMES];

    /* The log lock guards: */
    int log_is_read;         /* log_level is set; 0: GALLOC_CONF has not been read yet */
    int log_level;           /* GALLOC_LOG_... */
    struct {                 /* the other one is written, then becomes current: fork finds a whole one */
        void (*call)(int level, const char *text, void *user); /* NULL: GALLOC_LOG */
        void *user;
    } log_functions[2];
    uint64_t log_function;   /* the current one */
    struct {                 /* counts of messages that differ in numbers only */
        uint64_t key, count;
        uint64_t when, hidden; /* time of the last message shown, and messages suppressed since then */
    } log_repeats[GAI_REPEAT_KINDS];
    unsigned repeat_kinds;   /* kinds that have used an element so far */

    gai_map block_map, page_map; /* inner nodes are added with the map lock; read without one */
} gai_process;

/* Starts a new generation: all thread cache entries become invalid. */
static void gai_generation_end(void) { (void)gai_next(&gai_process.generation); }

#define GAI_NOTE 2

/* A damaged block that was found, until the end of the call that found it. */
typedef struct gai_damage {
    uintptr_t addr, first; /* the block, and its first damaged byte */
    size_t requested, count;
    uint64_t tag, stream_id; /* with the stack of its allocation, as in gai_block */
    uint32_t freed;          /* the stack of its free */
    uintptr_t next;          /* the used block behind it, or 0 */
    unsigned char value;     /* of that byte */
    char poison;             /* 1: it was freed, and kept in quarantine */
} gai_damage;

#define GAI_DAMAGES 8 /* that one call reports singly */

/* What galloc keeps for each thread, besides its thread cache. The message is logged at the end of the public function,
   with no lock held, so that GALLOC_LOG may call anything.
   A thread that is in a callback starts no other of the same kind, so callbacks cannot recurse. */
static GAI_THREAD_LOCAL struct {
    char message[544];       /* the error or note of the call under way */
    char last[544];          /* what galloc_last_message returns: the error of the last call that failed */
    int message_is_new;      /* 1 or GAI_NOTE: it still has to be logged */
    int in_mapping;          /* callbacks on_map and on_unmap that the thread is in */
    int in_shortage;         /* on_oom and on_reject */
    int in_log;              /* it is in the log function */
    int has_report;          /* its last allocation failed for lack of memory */
    int ran_out;             /* gai_dump is due: an allocation failed after all steps */
    uint64_t number;         /* of the thread; 0: none so far */
    CUcontext capture_context; /* the first one that its per-thread default stream was captured in */
    uint64_t watched;        /* the generation in which gai_thread_watch was called last */
    uint64_t call_began;     /* when its present driver call began */
    void *caller;            /* the full call under way returns there: to its public function, or to the program */
    uint32_t stack;          /* its number in the depot; 0: none */
    uintptr_t stack_begin, stack_end; /* the bounds of the thread's stack; 0: not asked for so far */
    galloc_report report;    /* the last one */
    gai_damage damages[GAI_DAMAGES]; /* the first of those found in this call */
    uint64_t damaged;        /* their number */
} gai_thread;

/* A child of fork inherits the heap but not the driver, so it must use neither. It may still log an error, and without
   a driver call in the parent it may do all. So its locks of the log and of tags are new ones, since other threads may
   have held the old ones; what those guard is of use at any moment. Nothing but the driver's first call and
   galloc_annotate, which reads, takes the global lock before the driver is ready.
   Fork handlers of the program may call what needs no driver, in the child even before galloc's own handler has run
   there. Stream caches ask nothing about forks: other calls are refused only after that handler. */
#if !defined(_WIN32)
static void gai_before_fork(void)
{
    gai_store(&gai_process.process, gai_process_id());
    (void)gai_next(&gai_process.forks); /* gai_fork_look of another thread sees `process`, too */
}
static void gai_after_fork(void) { gai_count(&gai_process.forks, (uint64_t)-1); }
static void gai_on_fork(void)
{
    if (!gai_load(&gai_process.forks)) return; /* gai_fork_look has been here */
    gai_lock_init(&gai_locks.log);
    gai_lock_init(&gai_locks.tags);
    gai_store(&gai_process.forks, 0);
    if (gai_load(&gai_process.driver_loads)) {
        gai_store_pointer(&gai_process.forked, &gai_process.forked);
        gai_store(&gai_process.generation, 0);
    } else {
        gai_lock_init(&gai_locks.global);
    }
}

/* For calls that fork handlers of the program may make: is this a child in which galloc's own has not run yet? */
static void gai_fork_look(void)
{
    if (gai_load(&gai_process.forks) && gai_load(&gai_process.process) != gai_process_id()) gai_on_fork();
}

/* Comes before the first use of a lock that a fork could find taken. Returns 0 unless host memory is missing. */
static int gai_watch_forks(void)
{
    if (gai_load(&gai_process.forks_are_watched)) return 0;
    if (pthread_atfork(gai_before_fork, gai_after_fork, gai_on_fork)) return 1;
    gai_store(&gai_process.forks_are_watched, 1);
    return 0;
}
#else
static void gai_fork_look(void) {}
static int gai_watch_forks(void) { return 0; }
#endif

/* Records the error message at the place where the error is found. The first message of a call is the most specific
   one; later ones are ignored. */
GAI_FORMAT(2, 3)
static cudaError_t gai_fail(cudaError_t error, const char *format, ...)
{
    va_list arguments;
    if (gai_thread.message_is_new == 1) return error;
    gai_thread.message_is_new = 1;
    va_start(arguments, format);
    (void)vsnprintf(gai_thread.message, sizeof gai_thread.message, format, arguments);
    va_end(arguments);
    return error;
}

/* Records a message for the log although the call succeeds. */
GAI_FORMAT(1, 2)
static void gai_note(const char *format, ...)
{
    va_list arguments;
    if (gai_thread.message_is_new) return;
    gai_thread.message_is_new = GAI_NOTE;
    va_start(arguments, format);
    (void)vsnprintf(gai_thread.message, sizeof gai_thread.message, format, arguments);
    va_end(arguments);
}

/* The reasons why a file cannot be written, in words; strerror is not for several threads. */
static const char *gai_errno_words(int code)
{
    static const struct {
        int code;
        const char *words;
    } reasons[] = {
        {EACCES, "permission denied"},
        {EEXIST, "it is no plain file"},
        {EPERM, "operation not permitted"},
        {ENOENT, "no such folder"},
        {ENOTDIR, "a part of the path is no folder"},
        {ENOSPC, "no space is left"},
        {EFBIG, "the file is too large"},
        {EROFS, "the file system is read-only"},
        {ENAMETOOLONG, "the name is too long"},
        {EMFILE, "the process has too many open files"},
        {ENFILE, "the system has too many open files"},
        {ENOMEM, "no host memory"},
        {EIO, "input or output error"},
    };
    size_t i;
    for (i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        if (reasons[i].code == code) return reasons[i].words;
    return "unknown reason";
}

/* Fails with the reason in words; the number tells what the table does not name. */
static cudaError_t gai_file_failed(const char *name, const char *what, int code)
{
    return gai_fail(cudaErrorOperatingSystem, "%s cannot be %s: %s (errno %d)", name, what, gai_errno_words(code),
                    code);
}

/* What stands under the name of a file to be written, and is no plain file, stays. */
static int gai_path_refused(const char *path)
{
    int is = gai_path_is_special(path);
    if (is) (void)gai_fail(cudaErrorOperatingSystem, "%s is no plain file, and is not replaced", path);
    return is;
}

/* The position in a text that is being written. */
typedef struct gai_string {
    char *at;
    size_t left; /* with the terminating 0; 0: the text did not fit */
} gai_string;

/* Appends formatted text. After an overflow `left` stays 0. */
GAI_FORMAT(2, 3)
static void gai_print(gai_string *string, const char *format, ...)
{
    va_list arguments;
    int length;
    va_start(arguments, format);
    length = vsnprintf(string->at, string->left, format, arguments);
    va_end(arguments);
    if (length < 0 || (size_t)length >= string->left) {
        string->left = 0;
    } else {
        string->at += length;
        string->left -= (size_t)length;
    }
}

/* ==== CUDA ====================================================================================================== */
/* >>cuda */

/* The driver table, the contexts that are known, and call sites (gai_site): the stream, context and capture of one
   call. The driver table is filled under the global lock and constant afterwards; the known contexts have a lock of
   their own. Calls the platform and CUDA only. */

/* galloc fetches the driver's functions through the runtime, so that no program has to link libcuda. It calls the
   driver instead of the runtime: that leaves the runtime's last error untouched, and a stream query takes a third of
   the time. The driver's result codes equal the runtime's (see driver_types.h). */
#define GAI_DRIVER_FUNCTIONS(X)                                                                                        \
    X(Init, (unsigned int))                                                                                            \
    X(CtxGetCurrent, (CUcontext *))                                                                                    \
    X(CtxPushCurrent, (CUcontext))                                                                                     \
    X(CtxPopCurrent, (CUcontext *))                                                                                    \
    X(CtxGetId, (CUcontext, unsigned long long *))                                                                     \
    X(CtxGetDevice, (CUdevice *))                                                                                      \
    X(CtxSynchronize, (void))                                                                                          \
    X(DeviceGetCount, (int *))                                                                                         \
    X(DeviceGetAttribute, (int *, CUdevice_attribute, CUdevice))                                                       \
    X(DeviceTotalMem, (size_t *, CUdevice))                                                                            \
    X(DevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                 \
    X(DevicePrimaryCtxRelease, (CUdevice))                                                                             \
    X(DevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *))                                                     \
    X(StreamCreate, (CUstream *, unsigned int))                                                                        \
    X(StreamDestroy, (CUstream))                                                                                       \
    X(StreamGetCtx, (CUstream, CUcontext *))                                                                           \
    X(StreamGetId, (CUstream, unsigned long long *))                                                                   \
    X(StreamIsCapturing, (CUstream, CUstreamCaptureStatus *))                                                          \
    X(StreamGetCaptureInfo, GAI_CAPTURE_INFO)                                                                          \
    X(StreamSynchronize, (CUstream))                                                                                   \
    X(StreamWaitEvent, (CUstream, CUevent, unsigned int))                                                              \
    X(EventCreate, (CUevent *, unsigned int))                                                                          \
    X(EventRecord, (CUevent, CUstream))                                                                                \
    X(EventQuery, (CUevent))                                                                                           \
    X(EventSynchronize, (CUevent))                                                                                     \
    X(EventDestroy, (CUevent))                                                                                         \
    X(MemAlloc, (CUdeviceptr *, size_t))                                                                               \
    X(MemFree, (CUdeviceptr))                                                                                          \
    X(MemGetInfo, (size_t *, size_t *))                                                                                \
    X(MemHostAlloc, (void **, size_t, unsigned int))                                                                   \
    X(MemFreeHost, (void *))                                                                                           \
    X(MemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream))                                                   \
    X(MemcpyDtoHAsync, (void *, CUdeviceptr, size_t, CUstream))                                                        \
    X(MemGetAllocationGranularity,                                                                                     \
      (size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags))                                       \
    X(MemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                             \
    X(MemAddressFree, (CUdeviceptr, size_t))                                                                           \
    X(MemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long))            \
    X(MemRelease, (CUmemGenericAllocationHandle))                                                                      \
    X(MemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))                         \
    X(MemUnmap, (CUdeviceptr, size_t))                                                                                 \
    X(MemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                            \
    X(ThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *))                                                        \
    X(MemPoolCreate, (CUmemoryPool *, const CUmemPoolProps *))                                                         \
    X(MemPoolDestroy, (CUmemoryPool))                                                                                  \
    X(MemPoolSetAttribute, (CUmemoryPool, CUmemPool_attribute, void *))                                                \
    X(MemPoolGetAttribute, (CUmemoryPool, CUmemPool_attribute, void *))                                                \
    X(MemPoolTrimTo, (CUmemoryPool, size_t))                                                                           \
    X(MemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream))                                          \
    X(MemFreeAsync, (CUdeviceptr, CUstream))                                                                           \
    X(UserObjectCreate, (CUuserObject *, void *, CUhostFn, unsigned int, unsigned int))                                \
    X(UserObjectRelease, (CUuserObject, unsigned int))                                                                 \
    X(GraphRetainUserObject, (CUgraph, CUuserObject, unsigned int, unsigned int))                                      \
    X(GraphNodeGetDependencies, GAI_NODE_AFTER)

/* CUDA 12.3 added longer forms of these two functions. Runtimes 12.3 and 12.4 return the long forms; later ones return
   the requested version (12.0). A graph edge that is weaker than full completion ordering is an error for the short
   forms, and for the long forms when they get no array for the edge data. */
#if CUDART_VERSION >= 12030 && CUDART_VERSION < 12050
#define GAI_CAPTURE_INFO \
    (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, const void *, size_t *)
#define GAI_NODE_AFTER (CUgraphNode, CUgraphNode *, void *, size_t *)
#define GAI_NO_EDGES NULL,
#else
#define GAI_CAPTURE_INFO (CUstream, CUstreamCaptureStatus *, cuuint64_t *, CUgraph *, const CUgraphNode **, size_t *)
#define GAI_NODE_AFTER (CUgraphNode, CUgraphNode *, size_t *)
#define GAI_NO_EDGES
#endif

#define GAI_DRIVER_POINTER(name, arguments) CUresult(CUDAAPI *name) arguments;
#define GAI_DRIVER_LOAD(name, arguments) \
    if (!error) error = gai_load_function("cu" #name, &gai_cu.name, sizeof gai_cu.name);

static struct {
    GAI_DRIVER_FUNCTIONS(GAI_DRIVER_POINTER)
} gai_cu;

/* Clears the runtime's last error if one of galloc's own runtime calls set it. */
static cudaError_t gai_forget_error(cudaError_t before, cudaError_t error)
{
    if (error != cudaSuccess && before == cudaSuccess) (void)cudaGetLastError();
    return error;
}

/* Fetches one driver function, in its 12.0 form where the runtime offers the choice. */
static cudaError_t gai_load_function(const char *name, void *into, size_t size)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t before = cudaPeekAtLastError(), error;
#if CUDART_VERSION >= 12050
    error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableLegacyStream, &found);
#else
    error = cudaGetDriverEntryPoint(name, &function, cudaEnableLegacyStream, &found);
#endif
    if (gai_forget_error(before, error)) return gai_fail(error, "no CUDA driver: %s", cudaGetErrorString(error));
    if (found != cudaDriverEntryPointSuccess || !function)
        return gai_fail(cudaErrorInsufficientDriver, "the CUDA driver has no %s: it must be 12.0 or later", name);
    /* After galloc_shutdown the table is still full, and threads may read it that another one overtakes. */
    if (memcmp(into, &function, size)) memcpy(into, &function, size);
    return cudaSuccess;
}

/* Fills the driver table and initialises the driver. [global lock] */
static cudaError_t gai_driver_load(void)
{
    cudaError_t error = cudaSuccess;
    CUresult result;
    GAI_DRIVER_FUNCTIONS(GAI_DRIVER_LOAD)
    if (error) return error;
    result = gai_cu.Init(0);
    if (result) return gai_fail((cudaError_t)(int)result, "cuInit: %s", cudaGetErrorString((cudaError_t)(int)result));
    return cudaSuccess;
}

/* The first call of public functions that need no driver: it refuses in a child of fork. */
static cudaError_t gai_begin_apart(void)
{
    gai_fork_look();
    if (gai_load_pointer(&gai_process.forked))
        return gai_fail(cudaErrorInitializationError, "CUDA cannot be used in a child made by fork");
    if (gai_watch_forks()) return gai_fail(cudaErrorMemoryAllocation, "pthread_atfork: no host memory");
    return cudaSuccess;
}

/* The first call of all others, which also fills the driver table once. */
static cudaError_t gai_begin(void)
{
    cudaError_t error = gai_begin_apart();
    if (error) return error;
    if (gai_load_pointer(&gai_process.driver_ready)) return cudaSuccess;
    gai_count(&gai_process.driver_loads, 1);
    gai_lock_on(&gai_locks.global);
    if (!gai_process.driver_ready) {
        error = gai_driver_load();
        if (!error) gai_store_pointer(&gai_process.driver_ready, &gai_cu);
        if (!error) gai_generation_end();
    }
    gai_lock_off(&gai_locks.global);
    if (error) gai_count(&gai_process.driver_loads, (uint64_t)-1);
    return error;
}

/* Gives a thread without a context the one that the runtime would make current for it. */
static cudaError_t gai_bind_context(void)
{
    cudaError_t before = cudaPeekAtLastError();
    int device = 0;
    cudaError_t error = gai_forget_error(before, cudaGetDevice(&device));
    if (!error) error = gai_forget_error(before, cudaSetDevice(device));
    if (error) return gai_fail(error, "no CUDA context for this thread: %s", cudaGetErrorString(error));
    return cudaSuccess;
}

/* A result that CUDA does not use: host memory was missing before the driver was called. */
#define GAI_NO_HOST_MEMORY ((CUresult)1023)

/* Reports a failed driver call and turns its result into the runtime's error. */
static cudaError_t gai_driver_failed(CUresult result, const char *function)
{
    cudaError_t error = (cudaError_t)(int)result;
    if (result == GAI_NO_HOST_MEMORY) return gai_fail(cudaErrorMemoryAllocation, "no host memory for %s", function);
    if (error == cudaErrorCudartUnloading) return error; /* gai_end has the words */
    return gai_fail(error, "%s: %s", function, cudaGetErrorString(error));
}

/* Errors after which the context or the driver is unusable, so that retrying is pointless. */
static int gai_is_sticky(CUresult result)
{
    int code = (int)result;
    return code == 214 /* uncorrectable ECC error */ || code == 220 /* uncorrectable NVLINK error */ ||
           code == 226 /* contained error */ || code == 721 /* tensor memory leak */ || code == 810 /* MPS */ ||
           code == 911 /* external device */ || code == 700 /* illegal address */ || code == 702 /* launch timeout */ ||
           code == 709 /* context gone */ || code == 710 /* device assert */ ||
           (code >= 714 && code <= 719) /* hardware and launch failures */;
}

static int gai_is_driver_gone(CUresult result) { return result == CUDA_ERROR_DEINITIALIZED; }

enum gai_health { GAI_ALIVE, GAI_DEAD, GAI_UNKNOWN };

/* Finds out whether the context with this id still exists. An unexpected error leaves that unknown. In an unknown
   context no work may count as complete, and no event or stream may be queried: such a call on a destroyed object
   crashes. */
static CUresult gai_context_look(CUcontext context, unsigned long long context_id, enum gai_health *health)
{
    unsigned long long id = 0;
    CUresult result = gai_cu.CtxGetId(context, &id);
    if (!result) *health = id == context_id ? GAI_ALIVE : GAI_DEAD;
    else if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) *health = GAI_DEAD;
    else *health = GAI_UNKNOWN;
    return result;
}

static enum gai_health gai_context_health(CUcontext context, unsigned long long context_id)
{
    enum gai_health health;
    (void)gai_context_look(context, context_id, &health);
    return health;
}

/* The contexts of streams that were passed to galloc, besides the primary contexts of the pools. CUDA has no list of a
   process's contexts, and work on unknown streams may be in any of them. Entries are never freed before
   galloc_shutdown; one whose context has ended is used again. Guarded by the context lock. */
typedef struct gai_known_context {
    struct gai_known_context *next;
    CUcontext context;
    unsigned long long id;
} gai_known_context;

/* The n-th known context. 0: there are no more. */
static int gai_context_known(size_t n, CUcontext *context, unsigned long long *id)
{
    const gai_known_context *known;
    gai_lock_on(&gai_locks.context);
    for (known = gai_process.known_contexts; known && n; n--) known = known->next;
    if (known) *context = known->context;
    if (known) *id = known->id;
    gai_lock_off(&gai_locks.context);
    return known != NULL;
}

/* Looks up a known context. NULL: there is none. [context lock] */
static gai_known_context *gai_context_find(CUcontext context, unsigned long long id)
{
    gai_known_context *known = gai_process.known_contexts;
    while (known && (known->context != context || known->id != id)) known = known->next;
    return known;
}

/* 0: no host memory. The driver is asked with no lock held: another thread may have made an entry meanwhile. */
static int gai_context_know(CUcontext context, unsigned long long id)
{
    gai_known_context *known;
    CUcontext other, ended = NULL;
    unsigned long long other_id, ended_id = 0;
    size_t n;
    for (n = 0; gai_context_known(n, &other, &other_id); n++) {
        if (other == context && other_id == id) return 1;
        if (gai_context_health(other, other_id) != GAI_DEAD) continue;
        ended = other;
        ended_id = other_id;
    }
    gai_lock_on(&gai_locks.context);
    known = gai_context_find(context, id);
    if (!known) known = gai_context_find(ended, ended_id);
    if (!known) {
        known = (gai_known_context *)GALLOC_MALLOC(sizeof *known);
        if (known) known->next = gai_process.known_contexts;
        if (known) gai_process.known_contexts = known;
    }
    if (known) known->context = context;
    if (known) known->id = id;
    gai_lock_off(&gai_locks.context);
    return known != NULL;
}

/* A call site: the stream, context and capture of one call. Handles are reused after cudaStreamDestroy, ids never, so
   a stream is identified by its id. Two kinds of streams have no id that can be queried at all times. The legacy
   stream has stream_id 0 here and is identified by its context. A captured stream is identified by the capture and the
   key of its handle (gai_stream_key), which names one stream for the duration of the capture. */
typedef struct gai_site {
    CUstream handle;
    unsigned long long stream_id;
    struct gai_stream *stream; /* the stream state that the call reached, if any, and its life at that time */
    uint64_t life;
    CUcontext context; /* NULL: not queried yet */
    unsigned long long context_id;
    unsigned long long capture; /* the capture that the stream takes part in; 0: none */
    CUresult refused; /* the driver's error when its context or its capture could not be recorded */
    char broken;    /* the capture was invalidated: its work will never run */
    char capture_forbids; /* captured, or legacy while a blocking stream is: most calls would break the capture */
    char own_context; /* the stream's context is the pool's context */
} gai_site;

/* Handles 0, 1 and 2 name default streams. */
static int gai_is_default_stream(CUstream stream) { return (uintptr_t)stream <= (uintptr_t)CU_STREAM_PER_THREAD; }

/* Queries the context of the site's stream once. For a default stream that is the thread's current context. */
static CUresult gai_site_context(gai_site *site)
{
    CUresult result;
    if (site->context) return CUDA_SUCCESS;
    if (gai_is_default_stream(site->handle))
        result = gai_cu.CtxGetCurrent(&site->context);
    else
        result = gai_cu.StreamGetCtx(site->handle, &site->context);
    if (!result && !site->context) result = CUDA_ERROR_INVALID_CONTEXT;
    if (!result) result = gai_cu.CtxGetId(site->context, &site->context_id);
    if (result) site->context = NULL;
    return result;
}

static unsigned long long gai_thread_number(void)
{
    if (!gai_thread.number) gai_thread.number = gai_next(&gai_process.threads);
    return gai_thread.number;
}

/* The key of a stream within a capture: its handle, or for the per-thread default stream of a context the number of the
   thread, with the context unless that is the first one in which the thread captured it. Handles of created streams are
   never as small as a thread's number, nor have they the highest bit. */
static unsigned long long gai_stream_key_in(CUstream stream, CUcontext context)
{
    if (stream != CU_STREAM_PER_THREAD) return (unsigned long long)(uintptr_t)stream;
    if (!gai_thread.capture_context) gai_thread.capture_context = context;
    if (context == gai_thread.capture_context) return gai_thread_number();
    return 1ull << 63 | (unsigned long long)(uintptr_t)context << 16 | (gai_thread_number() & 0xfffff);
}

static unsigned long long gai_stream_key(CUstream stream)
{
    CUcontext context = NULL;
    if (stream == CU_STREAM_PER_THREAD) (void)gai_cu.CtxGetCurrent(&context);
    return gai_stream_key_in(stream, context);
}

/* The id of the capture that the stream takes part in; 0: none. */
static CUresult gai_capture_of(CUstream stream, CUstreamCaptureStatus *status, unsigned long long *id, CUgraph *graph)
{
    cuuint64_t number = 0;
    CUresult result = gai_cu.StreamGetCaptureInfo(stream, status, &number, graph, NULL, GAI_NO_EDGES NULL);
    *id = !result && *status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? number : 0;
    return result;
}

/* Copies the graph nodes on which the stream's next captured work will depend: all its work so far is among them or
   precedes them. 0: the query failed, there are more than `most` nodes, or this capture has ended. */
static int gai_capture_nodes(CUstream stream, unsigned long long capture, CUgraphNode *nodes, size_t *n, size_t most)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cuuint64_t id = 0;
    CUgraph graph = NULL;
    const CUgraphNode *found = NULL;
    *n = 0;
    if (gai_cu.StreamGetCaptureInfo(stream, &status, &id, &graph, &found, GAI_NO_EDGES n)) return 0;
    if (status != CU_STREAM_CAPTURE_STATUS_ACTIVE || id != capture || *n > most) return 0;
    if (*n) memcpy(nodes, found, *n * sizeof *nodes);
    return 1;
}

/* Queries the capture status first. Querying the id or flags of a captured stream invalidates its capture in every
   mode, and so does any query of the legacy stream while a blocking stream is captured (measured: docs/design.md). */
static CUresult gai_site_look(gai_site *site)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = gai_cu.StreamIsCapturing(site->handle, &status);
    site->capture_forbids = result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (result && !site->capture_forbids) return result;
    if (status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        result = gai_capture_of(site->handle, &status, &site->capture, NULL);
        if (result) return result;
    }
    site->broken = status == CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    if (status != CU_STREAM_CAPTURE_STATUS_NONE) {
        site->capture_forbids = 1;
        site->stream_id = gai_stream_key(site->handle);
        return CUDA_SUCCESS;
    }
    if (site->handle == CU_STREAM_LEGACY) return gai_site_context(site);
    return gai_cu.StreamGetId(site->handle, &site->stream_id);
}

/* Fills the call site for a stream passed to galloc. Without a current context it binds one and tries again. */
static cudaError_t gai_site_of(cudaStream_t stream, gai_site *site)
{
    CUresult result;
    memset(site, 0, sizeof *site);
    site->handle = stream ? (CUstream)stream : CU_STREAM_LEGACY;
    result = gai_site_look(site);
    if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
        cudaError_t error = gai_bind_context();
        if (error) return error;
        result = gai_site_look(site);
    }
    return result ? gai_driver_failed(result, "looking at the stream") : cudaSuccess;
}

/* For operations that are impossible on a captured stream. */
static cudaError_t gai_site_is_free(const gai_site *site)
{
    if (!site->capture && !site->broken) return cudaSuccess;
    return gai_fail(cudaErrorStreamCaptureUnsupported, "this cannot be done on a stream that is being captured");
}

/* For operations that would serve the capture only. */
static cudaError_t gai_site_is_sound(const gai_site *site)
{
    if (!site->broken) return cudaSuccess;
    return gai_fail(cudaErrorStreamCaptureInvalidated, "the capture that the stream is part of has been invalidated");
}

/* Between enter and leave, `context` is current and the thread is in relaxed capture mode, so that its calls break no
   capture of another thread. */
typedef struct gai_scope {
    CUstreamCaptureMode mode;
    int pushed, relaxed;
} gai_scope;

/* Makes the context current only: enough to create or record an event and to queue a wait, which in any mode break no
   capture of another stream (bench/results/nvidia-h200-capture-probe.txt). */
static CUresult gai_scope_push(gai_scope *scope, CUcontext context)
{
    CUcontext current = NULL;
    CUresult result = gai_cu.CtxGetCurrent(&current);
    scope->pushed = scope->relaxed = 0;
    if (!result && current != context) {
        result = gai_cu.CtxPushCurrent(context);
        scope->pushed = !result;
    }
    return result;
}

static void gai_scope_leave(gai_scope *scope)
{
    CUcontext popped;
    if (scope->relaxed) (void)gai_cu.ThreadExchangeStreamCaptureMode(&scope->mode);
    if (scope->pushed) (void)gai_cu.CtxPopCurrent(&popped);
}

static CUresult gai_scope_enter(gai_scope *scope, CUcontext context)
{
    CUresult result = gai_scope_push(scope, context);
    if (result) return result;
    scope->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    result = gai_cu.ThreadExchangeStreamCaptureMode(&scope->mode);
    scope->relaxed = !result;
    if (result) gai_scope_leave(scope);
    return result;
}

/* Returns the sticky error of a context, if it has one: then all its calls return it. */
static CUresult gai_context_error(CUcontext context)
{
    size_t left, total;
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, context);
    if (result) return result;
    result = gai_cu.MemGetInfo(&left, &total);
    gai_scope_leave(&scope);
    return result;
}

/* ==== STRUCTS =================================================================================================== */
/* >>structs */

/* All private types. The equations above each struct hold whenever the pool's lock is free; galloc_pool_check evaluates
   them. Calls nothing. The words, in short (docs/design.md has all of them):

   page              one physical memory handle; in a fixed segment, its one cudaMalloc
   mapping           a range of addresses that shows a page
   segment           a contiguous range of addresses: expandable (reserved, pages come and go) or fixed (one cudaMalloc)
   block             a part of a segment; the blocks tile it:
     used            the program's, or in a stream cache
     free            mapped, in exactly one free set
     slot            strategy:pooled: free, but kept whole for requests of its size class
     hole            addresses without a page
     room            a hole kept for the used block before it, which may grow into it
     busy            reserved: the driver is called on it, a plan holds it, the driver refused to undo a step there, or
                     its memory was lost in a reset of the context (gai_segment_lose)
     alias           mapped, but in no use: its page is at another address (a stale alias), or is parked here
   room of a block   the addresses, or memory, reserved behind a growable block: room blocks, stale aliases, parked
                     pages, and what the driver refused to undo
   parked page       a whole free page that has left the bins; a plan takes it up again
   quarantine        mappings that the driver refused to unmap, counted and tried again by trim
   guard, poison     debug: a pattern behind a used block; what the bytes of a freed one are set to
   check             debug: a copy of a guard or of poison to the host, and its comparison there
   kept block        debug:quarantine: a freed block that is kept from reuse. To the rest of the pool it is a used one;
                     only `lent` tells that the program does not have it
   run               up to 16 slots cut from one free block; coalesced to a free block when all of them are free
   stream state      what a pool knows of one stream
   life              a number never given twice. Stream states are reused for other streams; the life tells which use
   epoch             a counter of each stream state. A free is stamped with the current epoch. Recording an event closes
                     the current epoch e. The event covers all frees with epoch <= e
   mark              a byte range, a stream state and an epoch: other streams may use the bytes once the work of that
                     stream up to that epoch is complete, or once they wait for it
   recorded use      a further stream that galloc_record_stream named for a block
   stream cache      blocks freed recently on a stream, by exact size. Calls on the stream need only its latch. To the
                     rest of the pool they are used blocks; only `lent` tells that the program does not have them
   cache bin         the blocks of one size in a stream cache, the last one freed first
   unconfirmed       freed blocks whose stream id no later call has confirmed yet
   orphans           unconfirmed blocks set aside for a wait for all known contexts; then any stream may have them
   capture           a stream capture of the program's that uses memory of the pool. A stream in it has a stream state
                     of its own, whose work does not end before the graph, its instances and their launches are gone
   graph position    a position of a captured stream, as nodes of the graph. It stands in for an event: the graph tells
                     which work comes after it
   group             captures that share memory (galloc_graph)
   unknown streams   the stream state of streams that used memory before it was freed in a capture, and that cannot be
                     identified (galloc_pool.unknown_streams)
   free set          free blocks with marks of one stream state, of several (mixed), or without marks (common)
   block pool        like:pytorch: the segments for small, or for large, requests of one stream, or of one stream in the
                     captures of a group. Its free blocks are in its own set, or in `mixed` while another stream may
                     still use them
   params            what an allocation asks for, after rounding
   to stamp          to give a mark the current epoch of its stream, at a free
   to file           to put a free block into its free set, merged with its neighbours where they allow it
   to claim          to take a used block from the program: `lent` becomes NULL
   to record         to record an event on a stream. The public galloc_stats.marks counts events, and `unmarked` bytes
                     are those freed since the last one
   occasion          a moment at which an event is due on a stream; the event predictor may skip it
   site              (gai_site) the stream of one call, as the driver describes it: id, context, capture
   job, ladder       (gai_job) one request that no short path served, and the steps that it takes until it has memory
   variant           (gai_variant) what like:pytorch, the other backends and the strategies do in their own way */

/* Kinds up to GAI_SLOT (gai_block_is_mapped): every byte has a page, whose current mapping is here. The addresses of
   GAI_ALIAS are mapped too, but their bytes are in no use. */
enum gai_kind { GAI_USED, GAI_FREE, GAI_SLOT, GAI_HOLE, GAI_ROOM, GAI_BUSY, GAI_ALIAS };

typedef struct gai_stream gai_stream;
typedef struct gai_set gai_set;
typedef struct gai_block_pool gai_block_pool;
typedef struct gai_segment gai_segment;
typedef struct gai_asking gai_asking;

/* begin < end, both within the block;  the mark is complete == (epoch <= stream->done)
   No two marks of a block name the same stream state and a common byte: the later one stands for both. */
typedef struct gai_mark {
    struct gai_mark *next;
    gai_stream *stream;
    uint64_t epoch;
    uintptr_t begin, end; /* the bytes it covers */
} gai_mark;

/* `lent` says whether the program has a block: (lent != NULL) == it has it, and the block is a used one then. It
   points to a stream state of the pool, and the latch of that stream's cache guards it. The thread that sets it to NULL
   under that latch has freed the block and owns it from there on. A second free finds NULL and is refused, in whatever
   thread and on whatever stream. Mostly the block is freed on the same stream, so that no other latch is needed.

   addr % GAI_UNIT == 0,  bytes % GAI_UNIT == 0,  bytes > 0
   next->addr == addr + bytes, next->prev == this              (segments are tiled without gaps)
   (kind == GAI_FREE || kind == GAI_SLOT)  ==  (set != NULL)
   free: set == gai_set_of(marks), where a complete mark counts until it is dropped; with a block pool:
   gai_block_pool_set
   kind == GAI_SLOT implies slot != 0;  slot != 0: bytes are those of a class
   used, free, slot: found in the block map under addr and nowhere else, and every byte has a page
   holes and rooms: no byte has a page;  (kind == GAI_ALIAS)  ==  (alias != NULL), and then alias->block == this
   used: stream->blocks counts it, and GAI_FREE_MARKS marks are promised to it    (a free needs no host memory)
   used: requested <= bytes */
typedef struct gai_block {
    struct gai_block *next_bin;      /* same bin of the set, or cache bin; also links unused descriptors */
    void *lent;                      /* read without a lock, also by calls that come too late */
    uintptr_t addr;
    size_t bytes;
    uint64_t requested;              /* in a stream cache: of its last use */
    uint64_t tag;                    /* the program's 32 bits, and GAI_CACHED to GAI_STACK_SHIFT */
    uint64_t life; /* used: of the stream state that it was given to, or that freed it onto a cache bin */
    gai_stream *stream;                  /* used: of the stream that it was given to. An allocation and a free
                                            that a stream cache serves access no member behind this one */
    struct gai_block *prev_bin;
    struct gai_block *next, *prev;   /* by address, within the segment */
    struct gai_block *newer, *older; /* of the set, by time of free */
    gai_set *set;
    gai_mark *marks;
    enum gai_kind kind;
    unsigned char row, column;       /* in a set: its bin */
    unsigned char slot;              /* GAI_RUN_...; second cache line ends here: a merge reads no more of neighbours */
    void *pool;                      /* read without a lock; a descriptor never changes its pool */
    void **map_entry;                /* used, free: its entry in the block map */
    uint64_t stream_id;
    uint64_t age;                    /* time of the free, counted in frees; used: see GAI_DROPPED */
    gai_segment *segment;
    gai_mark *recorded_uses; /* used: streams of galloc_record_stream; their epochs are set at the free */
    struct gai_mapping *alias; /* GAI_ALIAS: the mapping that remains here */
    size_t room;  /* used: bytes from its start on that are kept for it, addresses or memory; 0: it asked for none
                     GAI_ALIAS: distance from the start of the used block in whose room it lies; 0: in no room */
} gai_block;

#define GAI_RUN_SLOT 1  /* a block that was cut as a slot, and has kept its size */
#define GAI_RUN_FIRST 2 /* the first of its run */

#define GAI_CACHED                                                                                                     \
    ((uint64_t)1 << 32) /* the stream of `life` used it before it got it again, and no mark tells of that first use. If
                           another stream frees it, gai_block_stamp_cache makes that mark */
#define GAI_SPECIAL ((uint64_t)1 << 33) /* a stream cache cannot do all that its free demands */
#define GAI_DROPPED ((uint64_t)1 << 34) /* with GAI_CACHED: the epoch of that first use is known, and is in `age` */
#define GAI_IN_CACHE ((uint64_t)1 << 35)    /* only while a snapshot is copied: it is in a stream cache */
#define GAI_WATCHED_BLOCK ((uint64_t)1 << 36) /* debug: its guard is set, and is to be checked at its free */
#define GAI_TO_KEEP ((uint64_t)1 << 37) /* debug: it is poisoned, and its free takes it into the quarantine */
#define GAI_REGION ((uint64_t)1 << 38) /* GALLOC_NVTX: it has a region, and its segment is not open */
#define GAI_STACK_SHIFT 40 /* the bits from here on: the stack that allocated it, see gai_depot; 0: not known */

/* shown: all mappings with mapping->page == this, `mappings` of them mapped (addr != 0); current is NULL or one of them
   Each of them but current is a stale alias.  (current->block->kind == GAI_ALIAS) == the page is parked; its bytes are
   in no used or free block then.  Stale aliases stay, so that a page can return to them without a driver call. */
typedef struct gai_page {
    struct gai_page *next_unused; /* links unused descriptors, and lists of pages */
    uint64_t order; /* by which such a list is sorted */
    CUmemGenericAllocationHandle handle; /* 0 in fixed segments */
    struct gai_mapping *current; /* the mapping at whose addresses blocks use the page; parked: where it is parked;
                                    NULL: the page is being created or released, or is in quarantine */
    struct gai_mapping *shown;
    struct gai_block *holder; /* planning: the free block that may give it up, or over which it is parked, or NULL */
    uint64_t used;            /* when a part of it was freed last, or it was created, counted in frees; see collects */
    uint64_t looked;          /* planning: when `holder` was determined, counted in plans */
    size_t bytes;
    int mappings; /* ranges of addresses that show it */
    int counted;  /* in reserved */
    int stuck;    /* in quarantined */
    int taken;    /* planning: it is to come to the range under examination */
} gai_page;

/* bytes == page->bytes
   this is a stale alias or parked == (block && block->kind == GAI_ALIAS && block->alias == this) */
typedef struct gai_mapping {
    struct gai_mapping *next; /* links unused descriptors, batches, the quarantine */
    struct gai_mapping *newer, *older; /* stale alias or parked: by the time that it became so */
    struct gai_mapping *next_shown;    /* of the page */
    void *pool;               /* read without a lock; a descriptor never changes its pool */
    gai_segment *segment;
    gai_page *page;
    gai_block *block; /* over the same addresses: busy during driver calls, GAI_ALIAS for a stale alias or a parked
                         page; NULL: used and free blocks lie here, or the addresses are unmapped */
    uintptr_t addr;   /* 0: unmapped */
    size_t bytes;
    uintptr_t within; /* a hint: where the free block began in which it was found last; or 0 */
    uint64_t number; /* mappings are numbered as they are made */
    int was_mapped;    /* in a batch: it is mapped already, as a stale alias or with a parked page, and becomes that
                          again if the batch is undone */
} gai_mapping;

/* bytes == sum of the blocks' bytes;  first->addr == addr */
struct gai_segment {
    gai_segment *next, *prev;
    struct galloc_pool *pool;
    gai_block *first;
    uintptr_t addr;
    size_t bytes;
    int fixed;
    gai_mapping *whole; /* fixed: its one mapping */
    gai_block_pool *block_pool;     /* NULL: it is for all streams and sizes */
    uint64_t searches;  /* the pool's, when its last used block was freed */
    uint64_t age;       /* of that block */
    size_t given; /* other backends, with one used block at most: bytes requested from the driver; else 0. Such
                     addresses are not in the page map: several segments may share 2 MiB */
    int outside; /* cudaMallocAsync: made by cudaMalloc, outside the driver's pool */
    int traced; /* the same: the trace has the free of its block already */
    int lost; /* its context was reset: the memory is gone, and the addresses may be given out again */
    void *heap; /* GALLOC_NVTX: that of the tool; NULL: none */
    int open;   /* the same: all its bytes are in some region; see >>nvtx */
};

/* An event that was recorded on the stream, or waits to be used again. */
typedef struct gai_event {
    struct gai_event *next;
    CUevent event;
    uint64_t epoch; /* it stands for all frees stamped so or less */
    uint64_t clock; /* when it was recorded, counted in frees */
    uint64_t occasion; /* its number in pool->event_predictor; 0: none, or judged already */
} gai_event;

/* "`stream` has a wait in its queue for all memory that `on` freed up to `epoch`" */
typedef struct gai_wait {
    struct gai_wait *next;
    gai_stream *on;
    uint64_t epoch;
} gai_wait;

#define GAI_POSITION_NODES 13

/* A graph position: all work captured on the stream up to it comes before these nodes of the graph or is among them. */
typedef struct gai_graph_position {
    struct gai_graph_position *older;
    uint64_t epoch; /* it stands for all frees stamped so or less */
    size_t n;
    CUgraphNode nodes[GAI_POSITION_NODES];
} gai_graph_position;

#define GAI_WALK_WIDTH 64 /* dependencies of one node, or of a stream's next work, that are looked at */

/* The nodes that a captured stream's next work would have followed at its last call. n > GAI_WALK_WIDTH: not known */
typedef struct gai_graph_place {
    size_t n;
    CUgraphNode nodes[GAI_WALK_WIDTH];
} gai_graph_place;

/* Two-level segregated fit. In units of 512 bytes: sizes below 32 have a bin each; above, every power of two is cut
   into 32 bins, so that neighbours are 1/32 = 3.1 % apart at most. */
#define GAI_COLUMNS_LOG2 5
#define GAI_COLUMNS 32
#define GAI_ROWS (GAI_ADDRESS_BITS - GAI_UNIT_LOG2 - GAI_COLUMNS_LOG2 + 1)

/* Slots have rows of their own behind the others, which the search for a larger block never reaches. Each bin there has
   slots of one size. */
#define GAI_SLOT_MOST GAI_MIB /* the largest class: no slot has a page of its own */
#define GAI_SLOT_ROWS 8

/* bit r of rows == (columns[r] != 0) for r < GAI_ROWS, and 0 for the rows of slots
   bit c of columns[r] == (bins[r][c] != NULL);  bytes == sum of the blocks' bytes */
struct gai_set {
    gai_stream *stream; /* NULL: common or mixed */
    uint64_t rows;
    uint32_t columns[GAI_ROWS + GAI_SLOT_ROWS];
    gai_block *bins[GAI_ROWS + GAI_SLOT_ROWS][GAI_COLUMNS];
    gai_block *oldest, *newest;
    size_t bytes;
    int counted;   /* variant.unfiled is called for blocks that leave it */
    gai_set *next; /* of the pool: common, mixed, then the others, the newest first */
};

/* streams == stream states with block_pool[small] == this;  segments == segments with segment->block_pool == this
   streams + segments + awaited > 0
   Stream states that share a block pool are ordered with each other. When the last of them is forgotten, the next
   request that lacks memory takes over the segments that are free as a whole, unless they were a graph's. */
struct gai_block_pool {
    gai_block_pool *next; /* of the pool */
    gai_stream *stream; /* one of them; NULL: it is gone */
    int small, captured;
    size_t streams, segments;
    size_t awaited; /* segments being created for it, while `paging` may be released */
    gai_set free;
};

#define GAI_CACHE_BINS_LOG2 6
#define GAI_CACHE_BINS 64

typedef struct gai_cache_bin {
    size_t bytes;
    gai_block *first;
} gai_cache_bin;

/* Guarded by the latch, which is taken after the pool's locks. `open`, `most`, `enough`, `alone` and `trusted` are
   changed only with the pool's lock held as well, so either suffices to read them.
   bit i of filled == 0: bins[i] is empty, whatever its members say;  else bins[i].first != NULL
   blocks, bytes == number and bytes of the blocks in all bins
   unconfirmed_blocks, unconfirmed_bytes == number and bytes of the blocks in `unconfirmed` and `orphans`
   blocks + unconfirmed_blocks <= GAI_CACHE_BLOCKS,  bytes - large + unconfirmed_bytes <= most,  alone <= most
   large == 0 || some block in a bin, or unconfirmed, has `large` bytes
   unconfirmed_blocks <= GAI_UNCONFIRMED_BLOCKS;  !trusted: their bytes without `large` <= GAI_EVENT_BYTES
   open == 0 || open == the stream state's life;  the stream state is asked or retired: open == 0
   seen <= mallocs <= serves
   Counters since the last flush, which adds them to the pool's counters: mallocs and allocated_in, number and bytes of
   the blocks that the cache has served; live_in, the bytes requested for them. The blocks freed into the cache since
   then are those served and those in the bins now; live_out is the sum of their requested bytes. Unconfirmed blocks are
   not counted yet.

   Why unconfirmed frees are safe. A stream's handle comes back after cudaStreamDestroy, its id never. A free looks only
   whether the handle is captured. It does not check that the handle still means the stream S of this stream state. So
   its block is `unconfirmed`: it may have been freed on another stream. A later call that is given the stream, and asks
   for its id, finds S. Then S is alive, so it was alive since it was seen first, and because one handle means one
   living stream, each handle that led here in between was S. The call confirms all unconfirmed blocks. If S is dead no
   such call ever comes. Hence:
     - only a call that has asked for the id takes blocks out, or hands unconfirmed blocks to the pool
     - a flush for the sake of others leaves unconfirmed blocks where they are
     - a free that finds no room here asks for the id; so a stream that ends without galloc_stream_retire leaves no more
       behind than GAI_EVENT_BYTES and GAI_UNCONFIRMED_BLOCKS, and one `large` block if it was the pool's only stream,
       which never records an event by itself anyway
     - once all known contexts have been waited for, any stream may have the unconfirmed blocks from before that wait;
       during it they are `orphans`
     - the cache of a retired stream is closed
   Where every call asks (default streams) or none does (stream_check:off) the cache is trusted.

   busy_frees plus the stream state's busy_frees: frees since the stream state last held no block. The part here may be
   below 0 (it wraps). The stream state holds stream->blocks - blocks - unconfirmed_blocks blocks, apart from blocks
   that were given to another stream state and freed here. After GAI_EVENT_FREES frees or more the free that leaves it
   nothing goes to the pool, because it may be the last for long.

   Where threads share a stream cache, a pair transfers two cache lines between processors; both begin here. Counters
   that change together are kept apart: as neighbours the compiler would turn them into one vector. */
typedef struct gai_cache {
    gai_latch latch;
    uint64_t open;     /* the stream state's life while calls may use the stream cache, else 0 */
    size_t unconfirmed_blocks;
    gai_block *unconfirmed;  /* linked by next_bin, as `orphans` */
    size_t unconfirmed_bytes;
    size_t alone;      /* an empty stream cache takes a block of up to this size without further checks */
    size_t blocks;
    size_t mallocs;
    size_t live_in;    /* begins the second line */
    uint64_t busy_frees;
    size_t live_out;
    uint64_t filled;
    size_t allocated_in;
    size_t most;
    size_t bytes;
    size_t large;      /* bytes of the one block that came while it was empty and exceeds `most` */
    size_t serves;     /* after so many mallocs since the last flush the next goes to the pool: gai_cache_renew */
    size_t seen;       /* mallocs since the last flush that gai_cache_see has counted */
    size_t enough;     /* while it holds more than this (lane_bytes), besides that, it takes no further block */
    gai_block *orphans;
    int trusted;
    gai_cache_bin bins[GAI_CACHE_BINS];
    char after[GAI_CACHE_LINE];
} gai_cache;

/* One capture, as a pool knows it. CUDA's graph owns it too (a user object) as long as the graph, an instance of it or
   one of their launches lasts; the second owner to release it frees it. So the graph may be gone before the pool, or
   outlive it, and the user object's destructor touches nothing else.

   owners: 2, then 1 once the pool or the graph has released it */
typedef struct gai_capture {
    struct gai_capture *next; /* of the pool */
    unsigned long long id;
    galloc_graph *graph; /* the group whose memory it shares; NULL: it has its own */
    uint64_t owners;
    int lost; /* its context was reset: the graph will not run any more */
    int gone; /* gai_pool_forget_captures takes it */
} gai_capture;

/* A group: captures that share memory.
   captures: how many of the pool's have graph == this */
struct galloc_graph {
    galloc_graph *next;   /* of the pool */
    galloc_graph *handle; /* what the program has: a number never given twice; NULL: it is released */
    CUstream captured;      /* captures of it are of the group; NULL: none is any more */
    unsigned long long key; /* of that handle */
    CUcontext context;      /* of a per-thread default stream; of others NULL */
    unsigned long long context_id;
    size_t captures;
};

#define GAI_UNKNOWN_STREAMS (~0ull)

/* done < epoch;  freed, handed <= epoch;  done < recorded->epoch < recorded->next->epoch < ... < epoch
   newest: the last of `recorded`;  events: how many these are
   epoch > positions->epoch > positions->older->epoch > ... > done;  positions != NULL: capture != NULL
   uses == marks that name it, in `marks` and `recorded_uses` of blocks of any kind
   (capture_id == GAI_UNKNOWN_STREAMS) == (this is pool->unknown_streams);  plain: capture_id == 0, capture == NULL
   Captured, or the unknown streams: asked != 0, so its stream cache is closed and empty;  due == 0;  recorded == NULL,
   idle == NULL.  Captured: done == 0 while capture != NULL, done + 1 == epoch afterwards: its marks complete when the
   capture is forgotten, none does before. It queues no waits; the streams that it follows in its own capture, by the
   graph, are noted in `waits` as if it did. A used block that was given to it has a mark of it over all its bytes.
   Unknown streams: waits == NULL */
struct gai_stream {
    gai_cache cache; /* begins a cache line, as the stream state does */
    void *memory;    /* the allocation that contains it; the members from `next` on are cleared for the next use */
    gai_stream *next, *next_indexed;
    unsigned long long capture_id; /* of a captured stream; 0: plain; GAI_UNKNOWN_STREAMS: of the unknown streams */
    gai_capture *capture; /* the same, while its graph may be launched */
    CUcontext context;
    unsigned long long context_id;
    unsigned long long stream_id; /* 0: legacy, or captured, whose id cannot be asked for */
    unsigned long long key;       /* by which it is found: the id; captured: what stands for the handle */
    CUstream handle;     /* only good during a call that was given it, and for recorded uses (see ON STREAMS) */
    int asked;           /* the next call on the stream shall record an event */
    uint64_t debug_queued;  /* pieces of work that debug has queued, if this is a default stream */
    uint64_t debug_settled; /* so many of them an allocation has waited for */
    int wanted;          /* an allocation has needed an event of this stream once; the legacy stream gets events without
                            a request only after that */
    int due;             /* gai_pool_record_due has to record an event (docs/design.md, Streams, rule 6) */
    short retired;       /* its stream is, or is about to be, destroyed */
    short silent;        /* its context did not answer whether it exists, or has an error: no call is made on it */
    short ended;         /* its context has ended, but perhaps not its work: a wait for all devices completes that */
    int busy;            /* calls that hold on to it with no lock held */
    uint64_t epoch;      /* of frees from now on */
    uint64_t done;       /* all frees stamped so or less are complete */
    uint64_t freed;      /* the latest stamp given to freed memory; unused for captured streams */
    uint64_t handed;     /* this stream may have work up to this epoch that no mark tells of, because the stream got the
                            block again, its cache served the block, or the driver freed it in stream order. Until
                            `done` reaches it the stream state must not be forgotten */
    uint64_t waited_for; /* the epoch that a wait for the device, now under way, will complete */
    uint64_t uses;
    uint64_t life;       /* never changes while the stream state is in the pool; 0: unused */
    size_t unmarked;     /* bytes freed since the last event or occasion, apart from those in the stream cache */
    size_t skipped;      /* skipped bytes: freed since the last event, and before an occasion that got no event */
    uint64_t occasion;   /* the number of the last occasion, if no event was recorded at it; else 0 */
    uint64_t blocks; /* used ones that the pool gave to it, those in stream caches among them; read without a lock */
    uint64_t busy_frees;      /* with the stream cache's: frees since it last held nothing; read without a lock */
    size_t stranded;     /* its bytes in a report under construction that the asking stream may not have */
    size_t events;
    gai_event *recorded; /* in order of epoch */
    gai_event *newest;   /* NULL: none is recorded */
    gai_event *idle;
    gai_wait *waits;
    gai_block_pool *block_pool[2]; /* for large and for small requests; NULL: none so far */
    gai_graph_position *positions; /* captured; the newest first */
    gai_graph_place here;      /* captured */
    gai_set free;
    unsigned long long thread; /* the number of the thread whose per-thread stream it is; 0: no such stream */
};

/* Unused descriptors of one kind; chunks stay until the pool ends.
   made == available + those in use: which these are is said above galloc_pool */
typedef struct gai_slab {
    size_t size;      /* of a descriptor */
    void *unused;     /* linked by their first word */
    size_t made;      /* descriptors in the chunks */
    size_t available; /* length of that list */
    size_t promised;  /* of these, kept for steps that must not fail; <= available while the pool's lock is free */
    void *chunks;
} gai_slab;

#define GAI_PLAN_KEYS 2048 /* powers of two: a program that has more plans, or occasions for marks, before it repeats */
#define GAI_EVENT_KEYS 8192 /* itself, meets none again */

/* What a program that repeats itself did the last time: a ring of `size` keys, numbered from 1 on.
   latest[key % size]: the number under which such a key was noted last
   next: the number under which the expected key was noted before, which is the one behind the previous occurrence of
   the last key; 0, or so old that the ring has lost it: no key is expected
   agreed: how often in a row the expected key came */
typedef struct gai_predictor {
    uint64_t *keys, *latest;
    uint64_t size, noted, next, agreed;
} gai_predictor;

/* A plan that was carried out with stale aliases and parked pages alone. */
typedef struct gai_memo {
    struct gai_mapping *first; /* the descriptor may have another number by now, and be another mapping's */
    uint64_t number;
    uintptr_t at;
    size_t bytes;
} gai_memo;

#define GAI_SAMPLES 16

/* When free pages are given back unasked; see gai_pool_collect. */
typedef struct gai_collector {
    uint64_t look;     /* the pool's clock at which the next check is due; UINT64_MAX: never */
    uint64_t stride;   /* frees from one check to the next */
    uint64_t sampled;  /* samples taken so far */
    uint64_t aged;     /* pages not used since then, counted in frees, have been collected for their age */
    uint64_t rest;     /* above gc_threshold nothing is collected before this free */
    uint64_t patience; /* so many frees it rests */
    uint64_t ns;       /* the time when `patience` was changed last */
    size_t collected;  /* bytes collected above gc_threshold since `ns` */
    size_t created;    /* bytes of pages created since `ns` */
    struct {
        uint64_t frees, ns;
    } samples[GAI_SAMPLES]; /* how many frees there had been at some time; a ring */
} gai_collector;

/* What strategy:heuristic has set and seen. Without it the settings are those of the configuration.
   decided <= GALLOC_DECISIONS */
typedef struct gai_tuning {
    int watching;    /* settings may still change */
    int frozen;      /* by galloc_pool_freeze */
    double overhead; /* in effect */
    size_t growth;
    int pressed;     /* memory is nearly used up; `eased` is the overhead for better times */
    double eased;
    double asked;    /* bytes that misses asked for */
    size_t moves;    /* pages that moved since the last decision */
    size_t created;  /* pages created since then */
    int churned;     /* the program frees as well as it allocates */
    galloc_decision decisions[GALLOC_DECISIONS];
    int decided;
} gai_tuning;

/* What an entry of a history says; gai_history_actions has PyTorch's words for them. */
enum gai_action {
    GAI_ALLOCATED,
    GAI_FREED,
    GAI_MAPPED,        /* pages of an expandable segment; other: 1 if a page came from another address */
    GAI_UNMAPPED_PART, /* the same, or a part of a fixed segment that a reset took; other: 1 if the page went to another
                          address */
    GAI_SEGMENT_MADE,  /* a whole fixed segment */
    GAI_SEGMENT_GONE,
    GAI_WAITED,        /* the stream waits for the bytes; other: the stream that has used them */
    GAI_RAN_OUT,       /* bytes: those asked for; other: free bytes of the device */
    GAI_SNAPSHOT_TAKEN,
    GAI_ANNOTATED
};

/* One cache line. */
typedef struct gai_history_entry {
    uint64_t time; /* ticks; of the first `converted` entries: ns of GALLOC_CLOCK */
    uint32_t action; /* enum gai_action */
    uint32_t tag;
    union {
        struct {
            uintptr_t addr;
            size_t bytes;
            uint64_t stream_id, other;
            uint32_t stack; /* GAI_ALLOCATED, GAI_FREED: its number in the depot; 0: none */
        } at;
        char text[GAI_NOTE_TEXT]; /* GAI_ANNOTATED */
    } is;
} gai_history_entry;

/* What a pool did lately: a ring of entries, the next of which is written at ring[next].
   (ring == NULL) == (size == 0);  next == noted % size
   ring != NULL, or the pool writes a log: caches_off has bit 2, else it does not
   ring != NULL and entries have stacks, or the pool writes a log: special has GAI_ROUTE_HISTORY, else it does not */
typedef struct gai_history {
    gai_history_entry *ring; /* NULL: nothing is noted */
    size_t size, next;
    uint64_t noted;          /* entries since it began, the overwritten ones among them */
    uint64_t converted;      /* so many of them have the clock's time; the others have ticks */
    uint64_t ticks, ns;      /* of the last conversion, or when it began */
    uint64_t latest;         /* ticks of the last entry; none has less than the one before it */
} gai_history;

/* A range of addresses of the device. */
typedef struct gai_range {
    uintptr_t addr;
    size_t bytes;
} gai_range;

/* A copy of a block's guard or poison on its way to the host, where it is compared once it has arrived.
   stream == NULL: unused.  It has arrived when the stream state has another life, or has done this epoch, which
   stream->handed reaches. epoch == UINT64_MAX: it is not queued yet */
typedef struct gai_check {
    gai_stream *stream;
    uint64_t life, epoch;
    gai_range parts[2]; /* what is copied, the second one behind the first */
    unsigned char pattern; /* what is expected */
    gai_damage block;  /* what to say of the block if it is damaged */
} gai_check;

/* The checks of a pool with debug, and its quarantine. Blocks there are used ones to the rest of the pool. They have
   the marks of their free, and no others are promised to them.
   pending == checks in use;  host == NULL: there is none
   kept, kept_bytes, kept_live == number of blocks from `oldest` on, their bytes, and their requested bytes */
typedef struct gai_guards {
    uint64_t looks;    /* calls that looked at the checks; atomic */
    uint64_t pending;  /* also read without a lock */
    uint64_t stuck;    /* the least pending since events were last queried for their sake; atomic */
    gai_check *checks; /* GAI_CHECKS of them; NULL: none was needed so far */
    unsigned char *host; /* pinned memory of GAI_CHECK_BYTES for each */
    unsigned long long context_id; /* of the pool's context when that was allocated */
    int begins;        /* a call is allocating it */
    size_t next;       /* where the search for an unused check begins */
    gai_block *oldest, *newest; /* linked by next_bin; `age` is the stack of the free */
    size_t kept, kept_bytes, kept_live;
} gai_guards;

#define GAI_STREAM_INDEX 64

/* What an allocation asks for, after rounding. */
typedef struct gai_params {
    size_t bytes, alignment, room; /* rounded; room: addresses wanted from the start of the block on, 0: just bytes */
    size_t requested;
    uint32_t tag;
    int just_ready; /* galloc_pool_reserve: make it available, do not take it */
    int growable;   /* it has room, be it addresses or, in fixed segments, memory */
    int room_is_memory; /* of `bytes` a part is room */
    int lasting;    /* GALLOC_LIFETIME_LONG */
    int far;        /* place it at the far end of a free block */
    int slot;       /* it has a class */
    int own_only;   /* move only pages that no other stream may use, and create none */
    gai_stream *stream; /* NULL: for no stream in particular, so only memory that any stream may have */
} gai_params;

/* What a variant counts. */
enum gai_count {
    GAI_COUNT_USED,      /* a block became used */
    GAI_COUNT_UNUSED,    /* a used block ended */
    GAI_COUNT_NO_MEMORY, /* a request got no memory */
    GAI_COUNT_RETRY,     /* all cached memory is given back for a request */
    GAI_COUNT_WAIT,      /* the host waited for all streams */
    GAI_COUNT_RESET      /* the statistics were reset */
};

/* What a search looks at, from cheap to costly. */
enum gai_reach {
    GAI_REACH_OWN, /* the stream's own set, the common set, and the sets of streams that CUDA keeps in order with it */
    GAI_REACH_ALL  /* any part of any block whose marks allow it */
};

struct gai_job;
struct gai_survey;
struct gai_ladder_step;

/* What like:pytorch, other backends and the strategies do in another way than a native pool. Each of these variants has
   a section of its own, which fills this table when the pool begins. NULL and 0 stand for the native way. The functions
   are called with the pool's lock, unless stated otherwise. */
typedef struct gai_variant {
    uint64_t route;  /* GAI_ROUTE_...: requests do not take the short path of a miss */
    int no_caches;   /* its streams have no caches */
    int no_events;   /* a free records no event unless a call has asked for one */
    int low;         /* long-lived blocks are placed at the low end, too */
    int one_each;    /* each block is one allocation of the driver, and goes back to it once its work is done. So each
                        free records an event, requests are not rounded, and no free memory is searched */
    const struct gai_ladder_step *ladder; /* of allocations; NULL: gai_ladder */
    /* Files a block that became free. Returns the block that it is part of now. */
    gai_block *(*file)(galloc_pool *pool, gai_block *block, int all);
    /* A block is about to leave a set that is `counted`. */
    void (*unfiled)(const gai_set *set, const gai_block *block);
    /* Searches free memory for an allocation that needs no room; takes the block. */
    void (*search)(struct gai_job *job, enum gai_reach reach);
    /* Takes a part of a free block for a request. NULL: no host memory, nothing changed. */
    gai_block *(*take)(galloc_pool *pool, gai_block *block, uintptr_t at, const gai_params *params);
    /* Serves a rounded request of at most GAI_SLOT_MOST bytes from cached blocks. NULL: there is none. */
    gai_block *(*take_near)(galloc_pool *pool, const gai_site *site, size_t bytes, size_t requested, uint32_t tag);
    /* Makes blocks that stand apart ordinary free blocks; all: even if that takes long for what it may gain. */
    void (*coalesce)(galloc_pool *pool, int all);
    /* Creates memory for an allocation and takes its block. [paging] */
    void (*supply)(struct gai_job *job);
    /* give_back: returns blocks whose work is complete to the driver, until about `wanted` bytes are returned; for
       gai_step_poll. release: the same for gai_pool_release; returns how many bytes less the pool holds then.
       [paging] */
    void (*give_back)(galloc_pool *pool, size_t wanted, int no_wait);
    size_t (*release)(galloc_pool *pool, size_t wanted, int no_wait);
    /* Asks the driver how much it holds. [paging] */
    void (*refresh)(galloc_pool *pool);
    /* alloc: allocates a fixed segment. dealloc: frees one whose making failed in a later step, and no other: those end
       in variant.free, or in gai_mapping_undo_fixed by cuMemFree. [paging] */
    CUresult (*alloc)(galloc_pool *pool, gai_segment *segment, CUdeviceptr *addr, size_t bytes, const gai_site *site);
    CUresult (*dealloc)(galloc_pool *pool, CUdeviceptr addr, const gai_site *site);
    /* Charges a new segment to the budget, which `bytes` are added to. [paging] */
    CUresult (*charge)(galloc_pool *pool, gai_segment *segment, size_t bytes);
    /* A segment that was charged is about to be counted in `reserved`. */
    void (*charged)(galloc_pool *pool, gai_segment *segment);
    /* Ends such a charge, once the segment is in a set or in quarantine. */
    void (*settle)(galloc_pool *pool);
    /* A segment was given back. Returns 1 if the driver keeps its memory for the pool. */
    int (*keep)(galloc_pool *pool, gai_segment *segment);
    /* The block of the pool that contains an address, or NULL. */
    gai_block *(*around)(const galloc_pool *pool, uintptr_t addr);
    /* Frees a claimed block after n streams. 0: it shall be freed by marks. May release the lock meanwhile. */
    int (*free)(galloc_pool *pool, gai_block *block, const gai_site *sites, size_t n);
    /* A block is freed by these marks: adds more. */
    void (*freed)(galloc_pool *pool, gai_block *block, const gai_mark *marks);
    /* After a miss; asked: bytes of the request that got memory, or 0. [paging, lock] */
    void (*tune)(galloc_pool *pool, size_t asked, int refused);
    /* Counts an occasion; block: for the first two. */
    void (*count)(galloc_pool *pool, enum gai_count what, const gai_block *block);
    /* Counts a used block that had other sizes before. */
    void (*resized)(galloc_pool *pool, const gai_block *block, size_t bytes, size_t requested);
    /* A segment, or a stream state, ends. */
    void (*segment_ends)(galloc_pool *pool, gai_segment *segment);
    void (*stream_ends)(galloc_pool *pool, gai_stream *stream);
    /* A capture was forgotten: work of its streams counts as complete now. */
    void (*capture_ended)(galloc_pool *pool);
    /* Adds the sets of the variant to a survey. [lock, latches] */
    void (*survey)(struct gai_survey *survey, const galloc_pool *pool);
    /* Checks its equations of a block, and those of the pool. Return the number of breaks. */
    int (*check_block)(galloc_pool *pool, const gai_block *block);
    int (*check)(galloc_pool *pool);
    /* The pool begins, with its settings and its context. [no lock] */
    CUresult (*begin)(galloc_pool *pool);
    /* The pool ends: gives back what the driver holds for it [paging], and then its host memory. */
    CUresult (*close)(galloc_pool *pool);
    void (*end)(galloc_pool *pool);
} gai_variant;

/* stats.reserved.current == bytes of pages in blocks + parked + bytes in quarantine + kept
   taken == the same + pages on their way in, which are charged to the budget before the driver call
   stats.leaving + parked == bytes of the mappings under GAI_ALIAS blocks;  stale == number of those that are not parked
   kept: with cudaMallocAsync, bytes that the driver's pool holds beyond galloc's blocks; else 0
   stats.allocated.current == bytes of used blocks, those in stream caches included; likewise live and blocks.
   gai_stats_now adds the counters of the stream caches, which lowers these, and hardly ever raises them.

   Descriptors in use, of each slab (gai_slab.made):
     blocks      == blocks of all segments
     marks       == `marks` and `recorded_uses` of all blocks
     pages       == current mappings under used and free blocks and those that are parked + pages in quarantine +
                    lost segments whose page is not there
     mappings    == current mappings under used and free blocks + GAI_ALIAS blocks + mappings in quarantine +
                    lost segments whose mapping is not there
     events      == `recorded` and `idle` of all stream states
     waits, positions == those of all stream states
   A call that is busy with a stream state may have marks and events in hand, and while on_map or on_unmap runs a call
   has blocks, pages and mappings in hand: then there are no more than that.

   Locks. Brackets in a function's comment name the locks that its caller holds: [lock], [paging], [paging, lock],
   [lock, latches], [latch], [global lock], [budget lock], [context lock], [no lock].
   A pool has three locks (those that all pools share: section process). `lock` guards everything else and is held for
   short times: no driver call is made while it is held. `paging` is held around everything that creates, maps or unmaps
   pages, or forgets events and stream states; it is taken before `lock`, and released around the program's callbacks,
   while the blocks concerned are busy. A stream state enters the pool's list under `lock` and leaves it under both, so
   either suffices to walk along the list. Under `lock` alone, a free parks pages and ends the segment of a block that
   cudaMallocAsync has freed, and memory lost in a reset leaves the sets.
   `recording` is held while events are recorded on streams that the call was not given (docs/design.md, Streams,
   rule 6), and while groups of graphs begin, end, and are asked for their streams; it is taken before `lock`, never
   together with `paging`. The latches of the stream caches come after these three.

   Handles. The program may name a pool that has ended, in a call or by an address, while another thread ends it. So
   what is read without a lock goes back to the host at galloc_shutdown only and is never used for another type: the
   pool with its locks, its stream states, the descriptors of blocks and mappings. All that serves the next pool. A
   handle is never dereferenced. Handle = address of the pool's memory + one byte per reuse of that memory, modulo
   sizeof(galloc_pool), so after as many reuses handles repeat. A call with a handle, or with an address that it has
   looked up, counts among the users before it does anything, and the thread that ends the pool waits for them. Calls
   through a stream cache do not: the life of the stream state tells them whether it is still the one they mean. */
struct galloc_pool {
    /* Read by every call, without a lock. Not changed while the pool exists, except memory_limit and
       per_process_memory_fraction, which the budget lock guards. */
    galloc_config config;
    int is_default;
    int one_context; /* by promise all calls with default streams are made in it */
    void *key;       /* by which thread cache entries find it: the handle, or NULL for a default pool. Read by threads
                        that come late */
    char apart[GAI_CACHE_LINE];

    gai_lock lock, paging, recording;
    galloc_pool *next; /* guarded by the global lock */

    /* From here to `users` gai_pool_init clears everything. Set when the pool begins, and not changed any more: */
    gai_variant variant;
    CUcontext context;
    size_t granularity, device_bytes;
    size_t divisions;    /* strategy:pooled: size classes between two powers of two; else 0 */
    size_t plain;        /* requests up to here are rounded to 512 bytes and no further */
    int lost_on_reset;   /* its memory is of cudaMalloc, and goes with `context` */
    int collects;        /* pages record their use, for gc_threshold or gc_age */
    int oversize;        /* there are blocks that are never cut: max_split_size */
    int tool;            /* GALLOC_NVTX: a tool is told of its segments and blocks */
    int rdma;            /* the device can have pages capable of GPUDirect RDMA */
    gai_budget *budget;  /* of its device */

    /* Guarded by the budget lock; `retires` by the global lock. */
    galloc_pool *next_sharing;
    size_t taken;        /* bytes charged to the budget */
    int visitors;        /* threads of other pools that look for idle memory here */
    int retires;         /* the call that retires a stream everywhere has been here */

    /* Guarded by `paging`. */
    size_t replaceable;  /* bytes of large pages given back for rooms, in whose place no pages were created yet */
    int telling;         /* calls of on_map and on_unmap that are under way */
    int walking;         /* 1: on_map is being told of all pages */
    void *fence;         /* pinned host memory that the driver refused to take back; see gai_device_wait */
    CUcontext fence_context; /* where that was allocated */
    unsigned long long fence_context_id;

    /* Guarded by `paging` and `lock`: either suffices to read them. */
    unsigned long long context_id; /* of `context`; another one after a reset */
    galloc_callbacks callbacks;
    uint64_t settings;   /* how often these were set */
    int separate;        /* streams reuse their own memory before common memory: gai_pool_note_separate */

    /* `lock` guards all groups from here to `users`. Its state, which decides the way that requests take: */
    uint64_t watch_at;   /* debug: once stats.mallocs is so large, the next allocation gets a guard; else not reached.
                            What gai_cache_see has counted is taken off */
    uint64_t look_at;    /* likewise: until then, stream caches need not ask for that */
    uint64_t watch_draw; /* the last number of gai_pool_draw */
    uint64_t special;    /* GAI_ROUTE_...: reasons why requests do not take the short path of a miss */
    uint64_t broken;     /* a sticky error, or the driver is gone: the pool refuses from then on; also read
                            without a lock */
    gai_asking *asking;  /* calls of on_oom and on_reject that are under way */
    int due;             /* a stream state is due */
    int lost;            /* segments that are lost */
    int caches_off;      /* no stream cache is used. Bit 0: by stats_exact, which other backends imply, or
                            variant.no_caches; bit 1: the pool is about to end; bit 2: it has a history or a log;
                            bit 3: debug of most blocks (gai_pool_debugs_all); bit 4: tool */
    uint64_t clock;      /* frees so far */
    void *latest;        /* the block given last, if its stream cache may take it whatever its size; NULL once a free
                            block was filed or another stream came. Read with a latch alone */
    size_t live_peak;    /* of live bytes, since the pool exists */

    /* Segments, pages, and their descriptors. */
    gai_segment *segments;
    gai_block *holes;    /* linked by next_bin, prev_bin */
    gai_set common, mixed; /* the first two of the list of all free sets */
    gai_mapping *oldest_alias, *newest_alias; /* stale aliases and parked pages */
    size_t parked;       /* bytes of parked pages */
    size_t stale;        /* number of stale aliases */
    gai_mapping *quarantine; /* that the driver would not unmap, or whose page it would not release */
    uint64_t freed_slots; /* slots that became free since runs were examined */
    gai_slab blocks, marks, pages, mappings, events, waits, positions;

    /* Streams and captures. */
    gai_stream *streams,
        *unused_streams;            /* threads may still look at one that they used once, in this pool or another */
    size_t stream_count;            /* plain stream states in use */
    uint64_t streams_made, streams_swept, streams_waited; /* stream states so far; made until the last sweep of idle
                                       ones, and until the last wait for abandoned ones */
    gai_stream *stream_index[GAI_STREAM_INDEX]; /* by key */
    gai_stream unknown_streams;     /* one state for all of them; in `streams` once it is needed */
    gai_capture *captures;
    uint64_t graph_ends; /* gai_process.graph_ends when gai_pool_reap looked last; GAI_REAP: it has to look */
    galloc_graph *graphs;

    /* Plans, parking, collection, strategy:heuristic, and when events are recorded. */
    uint64_t plans, numbers; /* ranges planned and mappings made so far */
    gai_predictor plan_predictor, event_predictor;
    uint64_t plan_keys[2 * GAI_PLAN_KEYS], event_keys[2 * GAI_EVENT_KEYS]; /* their `keys` and `latest` */
    gai_memo memos[GAI_PLAN_KEYS]; /* the plans of plan_predictor's keys */
    char useless[GAI_EVENT_KEYS];  /* event_predictor: when the event was looked at, a later one was complete, too */
    uint64_t occasion_clock;       /* when an event was due last, counted in frees */
    uint64_t looks;                /* at the progress of streams, since then */
    struct { /* when pages are parked; see gai_pool_should_park */
        uint64_t mapped;   /* times that pages were mapped since the last parking */
        uint64_t calm;     /* times in a row that none was */
        uint64_t calm_most; /* parking ends after so many */
    } parking;
    gai_collector collector;
    gai_tuning tuning;

    /* like:pytorch and the other backends. */
    gai_block_pool *block_pools;
    uint64_t searches; /* of large requests: only their segments are collected */
    galloc_torch_stats torch_stats;
    CUmemoryPool driver_pool; /* cudaMallocAsync: where the memory comes from; NULL: the context was reset */
    size_t kept, outside;     /* cudaMallocAsync: see above; bytes of segments with `outside` */

    /* What the pool tells. */
    galloc_stats stats;
    gai_history history;
    size_t frames;         /* of stacks, in a history */
    uint64_t frames_taken; /* the same while there is one, else 0; also read without a lock */
    struct gai_trace *trace; /* the log that it writes, or NULL; set when it begins */
    uint64_t traced;         /* its number in that log */
    uint64_t dumped; /* 1: snapshot_on_oom has had its file; atomic */
    gai_guards guards;

    /* Kept when the memory serves the next pool. */
    uint64_t users;  /* atomic: calls that are in the pool, GAI_USER_OF_ALL, and GAI_ENDED */
    galloc_pool *handle;
    size_t lives;    /* pools that this has been; of the handles used up */
    void *known;     /* the next of gai_process.known_pools */
};

#define GAI_USER_OF_ALL ((uint64_t)1 << 32) /* added by a call that concerns all pools and makes no callback here */
#define GAI_ENDED ((uint64_t)1 << 63) /* there is no pool here, or it is about to end: no call comes in */

#define GAI_ROUTE_LONG 1    /* like:pytorch, oversize */
#define GAI_ROUTE_HISTORY 2 /* none: each call is noted, with its stack or in a log */
#define GAI_ROUTE_ROUNDED 4 /* some sizes are rounded further than to 512 bytes */
#define GAI_ROUTE_ENDS 8    /* none: the pool is about to end */
#define GAI_ROUTE_TOOL 16   /* none: a tool is told of each block */
#define GAI_ROUTE_SETTLE 32 /* none for default streams on which debug has queued work */

/* ==== SLAB ====================================================================================================== */
/* >>slab */

/* Slabs: fixed-size host descriptors (blocks, marks, pages ...) in chunks of GAI_CHUNK_BYTES, which stay at least
   until the pool ends. The slabs of a pool are guarded by its lock. Calls the platform only. */

#ifndef GAI_CHUNK_BYTES
#define GAI_CHUNK_BYTES ((size_t)32 << 10)
#endif

static void gai_slab_give(gai_slab *slab, void *descriptor)
{
    *(void **)descriptor = slab->unused;
    slab->unused = descriptor;
    slab->available++;
}

/* Descriptors start at a cache line boundary: those whose size is a multiple of a line share no line. */
static void gai_slab_spread(gai_slab *slab, char *chunk)
{
    size_t at = gai_up((uintptr_t)chunk + sizeof(void *), GAI_CACHE_LINE) - (uintptr_t)chunk;
    for (; at + slab->size <= GAI_CHUNK_BYTES; at += slab->size, slab->made++) gai_slab_give(slab, chunk + at);
}

/* Ensures that `n` descriptors can be taken besides the promised ones. New ones are zeroed. 0: no host memory. */
static int gai_slab_has(gai_slab *slab, size_t n)
{
    while (slab->available < slab->promised + n) {
        char *chunk = (char *)GALLOC_MALLOC(GAI_CHUNK_BYTES);
        if (!chunk) return 0;
        memset(chunk, 0, GAI_CHUNK_BYTES);
        *(void **)(void *)chunk = slab->chunks;
        slab->chunks = chunk;
        gai_slab_spread(slab, chunk);
    }
    return 1;
}

/* A reserve for giving memory back, which must not fail for lack of host memory. */
#define GAI_SLAB_KEPT 4

/* The same, and leaves the reserve untouched. 0: no host memory. */
static GAI_INLINE int gai_slab_need(gai_slab *slab, size_t n)
{
    return slab->available >= slab->promised + n + GAI_SLAB_KEPT || gai_slab_has(slab, n + GAI_SLAB_KEPT);
}

/* Cannot fail after gai_slab_need or gai_slab_has, nor for a promised descriptor. */
static void *gai_slab_take(gai_slab *slab)
{
    void *descriptor = slab->unused;
    GALLOC_ASSERT(slab->available > 0);
    slab->unused = *(void **)descriptor;
    slab->available--;
    return descriptor;
}

/* Marks all descriptors as unused. */
static void gai_slab_reset(gai_slab *slab)
{
    char *chunk;
    slab->unused = NULL;
    slab->made = slab->available = slab->promised = 0;
    for (chunk = (char *)slab->chunks; chunk; chunk = *(char **)(void *)chunk) gai_slab_spread(slab, chunk);
}

static void gai_slab_end(gai_slab *slab)
{
    gai_list_free(slab->chunks);
    slab->chunks = NULL;
    gai_slab_reset(slab);
}

/* ==== MAP ======================================================================================================= */
/* >>map */

/* Two radix trees of fixed depth that all pools share and that are read without a lock. The block map leads from the
   address of a block to its descriptor. The page map leads from any address, rounded down to 2 MiB, to the current
   mapping there (gai_mapping). Entries are written under the lock of the pool that owns the address. Inner nodes are
   added under the map lock and stay until galloc_shutdown. Calls the platform only.

   The block map has one entry per 64 KiB: empty, or the one block that begins there, or (lowest bit set) a leaf with
   one slot per 512 bytes. Large blocks need no leaf, which saves 1 KiB each. Only expandable segments may go without
   leaves: addresses of other segments may pass to another pool before galloc notices that they are lost. */

#define GAI_MAP_LEVELS 4
#define GAI_PAGE_LOG2 21
#define GAI_LEAF_LOG2 16
#define GAI_LEAF_SLOTS (1 << (GAI_LEAF_LOG2 - GAI_UNIT_LOG2))

static const int gai_map_log2[GAI_MAP_LEVELS] = {GAI_MAP_ROOT_LOG2, 13, 9, 5}; /* bits of each level, root first */
static const int gai_map_shift[GAI_MAP_LEVELS] = {43, 30, 21, GAI_LEAF_LOG2}; /* bits below each level */

/* The number of levels; the page map lacks the last one. */
static int gai_map_levels(const gai_map *map)
{
    return map == &gai_process.block_map ? GAI_MAP_LEVELS : GAI_MAP_LEVELS - 1;
}

/* The children begin after the link to the next node. */
static void **gai_map_node_new(gai_map *map, size_t children)
{
    size_t bytes = (1 + children) * sizeof(void *);
    void **node = (void **)GALLOC_MALLOC(bytes);
    if (!node) return NULL;
    memset(node, 0, bytes);
    node[0] = map->nodes;
    map->nodes = node;
    return node + 1;
}

static size_t gai_map_digit(int level, uintptr_t addr)
{
    return (size_t)(addr >> gai_map_shift[level]) & (((size_t)1 << gai_map_log2[level]) - 1);
}

/* An entry of the block map holds a block, or a leaf with the lowest bit set. */
static int gai_is_leaf(const void *in) { return (int)((uintptr_t)in & 1); }

static void **gai_leaf(void *in) { return (void **)((uintptr_t)in - 1); }

static size_t gai_leaf_digit(uintptr_t addr) { return (size_t)(addr >> GAI_UNIT_LOG2) & (GAI_LEAF_SLOTS - 1); }

/* The slot of the 2 MiB around an address, or NULL where the nodes are missing. */
static GAI_INLINE void **gai_map_entry_at(gai_map *map, uintptr_t addr)
{
    void **children;
    if (addr >> GAI_ADDRESS_BITS) return NULL;
    children = (void **)gai_load_pointer(&map->root[addr >> 43]);
    if (children) children = (void **)gai_load_pointer(&children[addr >> 30 & 0x1fff]);
    return children ? &children[addr >> GAI_PAGE_LOG2 & 0x1ff] : NULL;
}

/* The entry of an address in the block map, or NULL. */
static GAI_INLINE void **gai_block_entry(uintptr_t addr)
{
    void **children = gai_map_entry_at(&gai_process.block_map, addr);
    if (children) children = (void **)gai_load_pointer(children);
    return children ? &children[addr >> GAI_LEAF_LOG2 & 0x1f] : NULL;
}

/* For readers without a lock. */
static uintptr_t gai_block_addr(const gai_block *block)
{
    return (uintptr_t)gai_counted((const uint64_t *)&block->addr);
}

static GAI_INLINE void gai_block_set_addr(gai_block *block, uintptr_t addr)
{
    gai_set_relaxed((uint64_t *)&block->addr, addr);
}

/* The only used or free block that may begin at an address, or NULL. The caller compares the block's address. */
static GAI_INLINE gai_block *gai_block_at(uintptr_t addr)
{
    void **entry = gai_block_entry(addr), *in = entry ? gai_load_pointer(entry) : NULL;
    return (gai_block *)(gai_is_leaf(in) ? gai_load_pointer(&gai_leaf(in)[gai_leaf_digit(addr)]) : in);
}

/* Creates the nodes for an address. The only map operation that can fail, besides gai_leaf_new. 0: no host memory. */
static int gai_map_need(gai_map *map, uintptr_t addr)
{
    void **children = map->root;
    int level;
    if (addr >> GAI_ADDRESS_BITS) return 0;
    if (map == &gai_process.block_map ? gai_block_entry(addr) : gai_map_entry_at(map, addr)) return 1;
    gai_lock_on(&gai_locks.map);
    for (level = 0; level < gai_map_levels(map) - 1 && children; level++) {
        void **child = &children[gai_map_digit(level, addr)];
        if (!*child) gai_store_pointer(child, gai_map_node_new(map, (size_t)1 << gai_map_log2[level + 1]));
        children = (void **)*child;
    }
    gai_lock_off(&gai_locks.map);
    return children != NULL;
}

/* Not 0 when one of the two slots is in use. */
static uintptr_t gai_map_pair(void *const *children)
{
    return (uintptr_t)gai_load_pointer(children) | (uintptr_t)gai_load_pointer(children + 1);
}

/* The index after the last used slot among the first `n`; 0: none is used. Most slots are empty, so it tests eight at
   once. */
static size_t gai_map_last(void *const *children, size_t n)
{
    while (n >= 8) {
        void *const *at = &children[n - 8];
        if (gai_map_pair(at) | gai_map_pair(at + 2) | gai_map_pair(at + 4) | gai_map_pair(at + 6)) break;
        n -= 8;
    }
    while (n > 0 && !gai_load_pointer(&children[n - 1])) n--;
    return n;
}

/* The last block of an entry that begins at or before an address. */
static gai_block *gai_entry_last(void *in, uintptr_t addr)
{
    size_t n;
    if (!in) return NULL;
    if (!gai_is_leaf(in)) return gai_block_addr((gai_block *)in) <= addr ? (gai_block *)in : NULL;
    n = gai_map_last(gai_leaf(in), gai_leaf_digit(addr) + 1);
    return n ? (gai_block *)gai_load_pointer(&gai_leaf(in)[n - 1]) : NULL;
}

/* The same for the subtree of a node. Only the child on the address's own path can hold blocks after the address. */
static gai_block *gai_block_floor(void **children, int level, uintptr_t addr)
{
    size_t own = gai_map_digit(level, addr), n;
    for (n = gai_map_last(children, own + 1); n > 0; n = gai_map_last(children, n - 1)) {
        uintptr_t last = n - 1 == own ? addr : ~(uintptr_t)0;
        void *in = gai_load_pointer(&children[n - 1]);
        gai_block *block = NULL;
        if (level >= GAI_MAP_LEVELS - 1) block = gai_entry_last(in, last);
        else block = gai_block_floor((void **)in, level + 1, last);
        if (block) return block;
    }
    return NULL;
}

/* The last used or free block that begins at or before an address, or NULL. */
static gai_block *gai_block_before(uintptr_t addr)
{
    return addr >> GAI_ADDRESS_BITS ? NULL : gai_block_floor(gai_process.block_map.root, 0, addr);
}

/* Creates a leaf for an entry and moves the entry's single block into it. That block is of the same pool, since only
   expandable segments do without leaves. 0: no host memory. */
static int gai_leaf_new(void **entry)
{
    void *in;
    gai_lock_on(&gai_locks.map);
    in = gai_load_pointer(entry);
    if (!gai_is_leaf(in)) {
        gai_block *block = (gai_block *)in;
        void **leaf = gai_map_node_new(&gai_process.block_map, GAI_LEAF_SLOTS);
        if (leaf && block) {
            block->map_entry = &leaf[gai_leaf_digit(block->addr)];
            *block->map_entry = block;
        }
        if (leaf) gai_store_pointer(entry, (void *)((uintptr_t)leaf + 1));
    }
    gai_lock_off(&gai_locks.map);
    return gai_is_leaf(gai_load_pointer(entry));
}

/* Ensures that a block can be entered at an address whatever else begins in the 64 KiB around it. 0: no host memory. */
static int gai_block_map_need(uintptr_t addr)
{
    void **entry;
    if (!gai_map_need(&gai_process.block_map, addr)) return 0;
    entry = gai_block_entry(addr);
    return gai_is_leaf(gai_load_pointer(entry)) || gai_leaf_new(entry);
}

/* The same for a block that is entered before the pool's lock is released, with at most one more block at `other`. In
   an expandable segment such a block may need no leaf. */
static GAI_INLINE int gai_block_map_need_for(const gai_segment *segment, uintptr_t addr, uintptr_t other)
{
    void **entry = gai_block_entry(addr), *in = entry ? gai_load_pointer(entry) : NULL;
    if (gai_is_leaf(in)) return 1;
    if (entry && !in && !segment->fixed && addr >> GAI_LEAF_LOG2 != other >> GAI_LEAF_LOG2) return 1;
    return gai_block_map_need(addr);
}

/* Enters the block into the map, which has room for it. */
static GAI_INLINE void gai_block_show(gai_block *block)
{
    void **entry = gai_block_entry(block->addr), *in = gai_load_pointer(entry);
    block->map_entry = gai_is_leaf(in) ? &gai_leaf(in)[gai_leaf_digit(block->addr)] : entry;
    gai_store_pointer(block->map_entry, block);
}

/* Removes the block from the map, unless another pool's block has taken its entry already. */
static GAI_INLINE void gai_block_hide(const gai_block *block)
{
    if (block->map_entry && gai_load_pointer(block->map_entry) == block) gai_store_pointer(block->map_entry, NULL);
}

static void gai_map_end(gai_map *map)
{
    gai_list_free(map->nodes);
    memset(map, 0, sizeof *map);
}

/* ==== BINS ====================================================================================================== */
/* >>bins */

/* Free sets: bins by size (two-level segregated fit), bins of slots, and a list by age. Insertion, removal and the
   search for the best fit. A set belongs to a pool and is guarded by the pool's lock. Tells the variant of blocks that
   leave a set (variant.unfiled). Calls the platform only. */

#define GAI_LOOKS 4 /* blocks compared within a bin for the best fit; more gain nothing (docs/design.md) */

typedef struct gai_bin {
    int row, column;
} gai_bin;

/* The bin whose range contains a size. */
static GAI_INLINE gai_bin gai_bin_of(size_t bytes)
{
    uint64_t units = bytes >> GAI_UNIT_LOG2;
    gai_bin bin = {0, (int)units};
    if (units >= GAI_COLUMNS) {
        int shift = gai_log2(units) - GAI_COLUMNS_LOG2;
        bin.row = shift + 1;
        bin.column = (int)(units >> shift) & (GAI_COLUMNS - 1);
    }
    return bin;
}

/* Advances to the next bin with a block in it, strictly after this one; 0 when there is none. */
static GAI_INLINE int gai_bin_next(const gai_set *set, gai_bin *bin)
{
    uint32_t columns = bin->column + 1 < GAI_COLUMNS ? set->columns[bin->row] & (~(uint32_t)0 << (bin->column + 1)) : 0;
    if (!columns) {
        uint64_t rows = set->rows & (~(uint64_t)0 << (bin->row + 1));
        if (!rows) return 0;
        bin->row = gai_lowest(rows);
        columns = set->columns[bin->row];
    }
    bin->column = gai_lowest(columns);
    return 1;
}

/* Inserts a free block at the head of its bin. */
static GAI_INLINE void gai_bin_insert(gai_set *set, gai_block *block)
{
    gai_bin bin = gai_bin_of(block->bytes);
    gai_block **head = &set->bins[bin.row][bin.column];
    block->row = (unsigned char)bin.row;
    block->column = (unsigned char)bin.column;
    block->prev_bin = NULL;
    block->next_bin = *head;
    if (*head) (*head)->prev_bin = block;
    *head = block;
    set->rows |= (uint64_t)1 << bin.row;
    set->columns[bin.row] |= (uint32_t)1 << bin.column;
}

static GAI_INLINE void gai_bin_remove(gai_set *set, gai_block *block)
{
    int row = block->row, column = block->column;
    if (block->next_bin) block->next_bin->prev_bin = block->prev_bin;
    if (block->prev_bin) {
        block->prev_bin->next_bin = block->next_bin;
        return;
    }
    set->bins[row][column] = block->next_bin;
    if (block->next_bin) return;
    set->columns[row] &= ~((uint32_t)1 << column);
    if (!set->columns[row]) set->rows &= ~((uint64_t)1 << row);
}

/* The list by age is sorted near both ends, where most blocks are inserted: a freed block is the newest, only a split
   block may belong elsewhere. The insertion looks at GAI_AGE_STEPS blocks from either end. A block that belongs
   further inside is placed GAI_AGE_STEPS from the oldest. */
#define GAI_AGE_STEPS 32

static void gai_age_insert(gai_set *set, gai_block *block)
{
    gai_block *older = set->newest, *newer = NULL;
    int steps;
    for (steps = 0; older && older->age > block->age && steps < GAI_AGE_STEPS; steps++) older = older->older;
    if (older && older->age > block->age) {
        for (older = NULL, newer = set->oldest, steps = 0; newer->age < block->age && steps < GAI_AGE_STEPS; steps++) {
            older = newer;
            newer = newer->newer;
        }
    } else {
        newer = older ? older->newer : set->oldest;
    }
    block->older = older;
    block->newer = newer;
    if (older) older->newer = block;
    else set->oldest = block;
    if (newer) newer->older = block;
    else set->newest = block;
}

static void gai_age_remove(gai_set *set, gai_block *block)
{
    if (block->older) block->older->newer = block->newer;
    else set->oldest = block->newer;
    if (block->newer) block->newer->older = block->older;
    else set->newest = block->older;
}

static void gai_set_insert(gai_set *set, gai_block *block)
{
    block->set = set;
    set->bytes += block->bytes;
    gai_bin_insert(set, block);
    gai_age_insert(set, block);
}

static void gai_set_remove(gai_block *block)
{
    gai_set *set = block->set;
    if (set->counted) block->segment->pool->variant.unfiled(set, block);
    gai_bin_remove(set, block);
    gai_age_remove(set, block);
    set->bytes -= block->bytes;
    block->set = NULL;
}

/* Adds a set to the list of all sets of its pool, or removes it. */
static void gai_set_link(galloc_pool *pool, gai_set *set)
{
    set->next = pool->mixed.next;
    pool->mixed.next = set;
}

static void gai_set_unlink(galloc_pool *pool, const gai_set *set)
{
    gai_set *before = &pool->mixed;
    while (before->next != set) before = before->next;
    before->next = set->next;
}

/* The address within [begin, end) for the requested bytes; 0 when they do not fit. */
static uintptr_t gai_place(uintptr_t begin, uintptr_t end, const gai_params *params)
{
    uintptr_t at;
    if (end - begin < params->bytes) return 0;
    at = params->far ? gai_down(end - params->bytes, params->alignment) : gai_up(begin, params->alignment);
    return at >= begin && at <= end - params->bytes ? at : 0;
}

/* Best fit: the smaller block, or of equal ones the one at the lower address. */
static int gai_is_better(const gai_block *a, const gai_block *b)
{
    return !b || a->bytes < b->bytes || (a->bytes == b->bytes && a->addr < b->addr);
}

/* The best block that fits among the first GAI_LOOKS of a bin, or NULL. */
static gai_block *gai_bin_best(const gai_set *set, gai_bin bin, const gai_params *params)
{
    gai_block *best = NULL, *block = set->bins[bin.row][bin.column];
    int looks;
    for (looks = 0; block && looks < GAI_LOOKS; looks++, block = block->next_bin) {
        if (block->bytes < params->bytes || !gai_is_better(block, best)) continue;
        if (gai_place(block->addr, block->addr + block->bytes, params)) best = block;
    }
    return best;
}

/* The same without alignment and placement: any block that is large enough serves, and an exact fit ends the search. */
static GAI_INLINE gai_block *gai_bin_best_plain(gai_block *block, size_t bytes)
{
    gai_block *best = NULL;
    size_t least = SIZE_MAX;
    int looks;
    for (looks = 0; block && looks < GAI_LOOKS; looks++, block = block->next_bin) {
        size_t has = block->bytes;
        if (has < bytes || has > least || (has == least && block->addr > best->addr)) continue;
        best = block;
        least = has;
        if (has == bytes) break;
    }
    return best;
}

/* Searches `bin`, which is that of the size itself, then the first bin in which every block suffices. */
static GAI_INLINE gai_block *gai_set_find_plain(const gai_set *set, gai_bin bin, size_t bytes)
{
    gai_block *best = NULL;
    if (!(set->rows >> bin.row)) return NULL;
    if (set->columns[bin.row] >> bin.column & 1) best = gai_bin_best_plain(set->bins[bin.row][bin.column], bytes);
    if (best || !gai_bin_next(set, &bin)) return best;
    return gai_bin_best_plain(set->bins[bin.row][bin.column], bytes);
}

/* The same with an alignment. A block of the requested size may not fit; one that also covers the worst case of the
   alignment does. */
static gai_block *gai_set_find(const gai_set *set, const gai_params *params)
{
    size_t sizes[2];
    int i;
    sizes[0] = params->bytes;
    sizes[1] = params->bytes + params->alignment - GAI_UNIT;
    for (i = 0; i < 2; i++) {
        gai_bin bin = gai_bin_of(sizes[i]);
        gai_block *best = gai_bin_best(set, bin, params);
        while (!best && gai_bin_next(set, &bin)) {
            best = gai_bin_best(set, bin, params);
            if (i == 0) break;
        }
        if (best) return best;
    }
    return NULL;
}

/* The largest free block of the set, among the first GAI_LOOKS of the highest bin: the largest of all is at most
   1/GAI_COLUMNS larger. 0: the set is empty. */
static size_t gai_set_largest(const gai_set *set)
{
    const gai_block *block;
    size_t largest = 0;
    int row, looks;
    for (row = GAI_ROWS; row < GAI_ROWS + GAI_SLOT_ROWS; row++)
        if (set->columns[row]) largest = set->bins[row][gai_log2(set->columns[row])]->bytes;
    if (!set->rows) return largest;
    row = gai_log2(set->rows);
    block = set->bins[row][gai_log2(set->columns[row])];
    for (looks = 0; block && looks < GAI_LOOKS; looks++, block = block->next_bin)
        largest = gai_max(largest, block->bytes);
    return largest;
}

/* ==== MARKS ===================================================================================================== */
/* >>marks */

/* Marks and their lists: "these bytes may be used by others after this point of that stream". Which stream may use
   which bytes, and the free set that follows from a block's marks. Without a wait, work is ordered only within a
   stream, and between captures of a group. Guarded by the pool's lock. Calls slabs and bins, and takes the latch of
   a stream cache to shut it. */

#define GAI_MARKS_MAX 16 /* a longer list is coarsened: one mark per stream state over all bytes that its marks span */

static gai_mark *gai_mark_new(galloc_pool *pool, gai_stream *stream, uint64_t epoch, uintptr_t begin, uintptr_t end)
{
    gai_mark *mark = (gai_mark *)gai_slab_take(&pool->marks);
    mark->next = NULL;
    mark->stream = stream;
    mark->epoch = epoch;
    mark->begin = begin;
    mark->end = end;
    stream->uses++;
    return mark;
}

/* Releases a mark that is in no list. */
static void gai_mark_end(galloc_pool *pool, gai_mark *mark)
{
    mark->stream->uses--;
    gai_slab_give(&pool->marks, mark);
}

static int gai_mark_is_complete(const gai_mark *mark) { return mark->epoch <= mark->stream->done; }

static size_t gai_marks_count(const gai_mark *mark)
{
    size_t n = 0;
    for (; mark; mark = mark->next) n++;
    return n;
}

/* Removes a mark from its list and releases it. */
static void gai_mark_drop(galloc_pool *pool, gai_mark **at)
{
    gai_mark *mark = *at;
    *at = mark->next;
    gai_mark_end(pool, mark);
}

/* Drops the complete marks of a list. */
static void gai_marks_prune(galloc_pool *pool, gai_mark **list)
{
    while (*list) {
        if (gai_mark_is_complete(*list)) gai_mark_drop(pool, list);
        else list = &(*list)->next;
    }
}

/* Drops all marks of a list. */
static void gai_marks_end(galloc_pool *pool, gai_mark **list)
{
    while (*list) gai_mark_drop(pool, list);
}

/* Resolves the overlap of two marks of one stream state: there the later one counts. Returns the mark that has become
   redundant, or NULL. */
static gai_mark *gai_mark_settle(gai_mark *a, gai_mark *b)
{
    gai_mark *late = a->epoch > b->epoch ? a : b, *early = late == a ? b : a;
    if (early->begin >= late->begin && early->end <= late->end) return early;
    if (early->begin < late->begin && early->end > late->end) { /* demands a little more than needed */
        early->epoch = late->epoch;
        return late;
    }
    if (early->begin < late->begin) early->end = late->begin;
    else early->begin = late->end;
    return NULL;
}

/* Adds a mark. Marks of one stream state and epoch that touch become one, and marks of one stream state do not
   overlap. One pass suffices: a mark that was merged touches no mark before it, since neither of its parts did. */
static void gai_marks_add(galloc_pool *pool, gai_mark **list, gai_mark *mark)
{
    gai_mark **at = list;
    while (*at) {
        gai_mark *other = *at, *void_one = NULL;
        int near = other->stream == mark->stream && mark->begin <= other->end && other->begin <= mark->end;
        if (near && other->epoch == mark->epoch) {
            mark->begin = gai_min(mark->begin, other->begin);
            mark->end = gai_max(mark->end, other->end);
            void_one = other;
        } else if (near && mark->begin < other->end && other->begin < mark->end) {
            void_one = gai_mark_settle(mark, other);
        }
        if (void_one == mark) {
            gai_mark_end(pool, mark);
            return;
        }
        if (void_one) gai_mark_drop(pool, at);
        else at = &other->next;
    }
    mark->next = *list;
    *list = mark;
}

/* Joins the mark lists of two adjacent blocks, left before right. The usual case comes first: one mark on the right,
   of the stream state and epoch of the first one on the left. */
static GAI_INLINE gai_mark *gai_marks_meet(galloc_pool *pool, gai_mark *left, gai_mark *right)
{
    if (!left || !right) return left ? left : right;
    if (!right->next && left->stream == right->stream && left->epoch == right->epoch && left->end == right->begin) {
        left->end = right->end;
        gai_mark_end(pool, right);
        return left;
    }
    while (right) {
        gai_mark *next = right->next;
        gai_marks_add(pool, &left, right);
        right = next;
    }
    return left;
}

/* Coarsens a list: each stream state keeps one mark, its latest epoch over all bytes that its marks span. The result
   demands more than the exact list, never less. */
static void gai_marks_coarsen(galloc_pool *pool, gai_mark *list)
{
    for (; list; list = list->next) {
        gai_mark **rest = &list->next;
        while (*rest) {
            gai_mark *mark = *rest;
            if (mark->stream == list->stream) {
                if (mark->epoch > list->epoch) list->epoch = mark->epoch;
                list->begin = gai_min(list->begin, mark->begin);
                list->end = gai_max(list->end, mark->end);
                *rest = mark->next;
                gai_mark_end(pool, mark);
            } else {
                rest = &mark->next;
            }
        }
    }
}

/* Keeps a list short: drops complete marks and coarsens what is longer than GAI_MARKS_MAX. */
static void gai_marks_trim(galloc_pool *pool, gai_mark **list)
{
    if (!*list || (!(*list)->next && !gai_mark_is_complete(*list))) return;
    gai_marks_prune(pool, list);
    if (gai_marks_count(*list) > GAI_MARKS_MAX) gai_marks_coarsen(pool, *list);
}

/* Leaves the marks of bytes before `at` in *left and returns the others. Takes one new mark for each mark that it
   cuts. */
static gai_mark *gai_marks_cut(galloc_pool *pool, gai_mark **left, uintptr_t at)
{
    gai_mark *right = NULL;
    while (*left) {
        gai_mark *mark = *left;
        if (mark->end <= at) {
            left = &mark->next;
        } else if (mark->begin >= at) {
            *left = mark->next;
            mark->next = right;
            right = mark;
        } else {
            gai_mark *cut = gai_mark_new(pool, mark->stream, mark->epoch, at, mark->end);
            mark->end = at;
            cut->next = right;
            right = cut;
            left = &mark->next;
        }
    }
    return right;
}

/* The free set of a block with these marks: common without a mark, a stream state's own if all name it, else mixed. */
static gai_set *gai_set_of(galloc_pool *pool, const gai_mark *marks)
{
    const gai_mark *mark;
    if (!marks) return &pool->common;
    for (mark = marks->next; mark; mark = mark->next)
        if (mark->stream != marks->stream) return &pool->mixed;
    return &marks->stream->free;
}

/* The program promises that graphs of one group never run at once. That orders different captures of a group, but not
   two streams within one capture. */
static int gai_captures_share(const gai_capture *a, const gai_capture *b)
{
    return a && b && a->graph && a->graph == b->graph && a->id != b->id;
}

/* Is later work of `after` ordered behind earlier work of `before` without a wait? Captures of a group are. The legacy
   stream and blocking streams are not: only work that is queued on legacy would order them (docs/design.md, Streams,
   rule 7). */
static int gai_stream_is_ordered(const gai_stream *after, const gai_stream *before)
{
    return after == before || gai_captures_share(after->capture, before->capture);
}

/* Is the stream not captured? */
static int gai_stream_is_plain(const gai_stream *stream) { return !stream->capture_id; }

/* The epoch of `on` up to which `stream` has queued a wait; 0: none. */
static uint64_t gai_stream_waited(const gai_stream *stream, const gai_stream *on)
{
    const gai_wait *wait = stream->waits;
    while (wait && wait->on != on) wait = wait->next;
    return wait ? wait->epoch : 0;
}

/* The recorded event that covers the mark; NULL while there is none, or none that may be queried. */
static gai_event *gai_mark_event(const gai_mark *mark)
{
    const gai_stream *stream = mark->stream;
    gai_event *event = stream->recorded;
    if (stream->silent || !stream->newest || stream->newest->epoch < mark->epoch) return NULL;
    while (event->epoch < mark->epoch) event = event->next;
    return event;
}

/* May `stream` use the bytes of this mark without a wait? */
static int gai_mark_allows(const galloc_pool *pool, const gai_mark *mark, const gai_stream *stream)
{
    if (gai_mark_is_complete(mark)) return 1;
    if (!stream) return 0;
    if (gai_stream_is_ordered(stream, mark->stream)) return 1;
    return (pool->config.reuse & GALLOC_REUSE_FOLLOWED) && gai_stream_waited(stream, mark->stream) >= mark->epoch;
}

/* The bytes of [begin, end) that only `stream` may use: it has unfinished work there, and no other stream has any. 0 if
   another one has. */
static size_t gai_marks_own(const gai_mark *mark, uintptr_t begin, uintptr_t end, const gai_stream *stream)
{
    size_t own = 0;
    for (; mark; mark = mark->next) {
        if (mark->end <= begin || mark->begin >= end || gai_mark_is_complete(mark)) continue;
        if (mark->stream != stream) return 0;
        own += gai_min(mark->end, end) - gai_max(mark->begin, begin);
    }
    return own;
}

/* Shuts a stream cache: later calls go to the pool. [lock] */
static void gai_cache_shut(gai_cache *cache)
{
    if (!cache->open) return;
    gai_latch_on(&cache->latch);
    cache->open = 0;
    gai_latch_off(&cache->latch);
}

/* Requests an event on the stream. Its next call must reach the pool to record it, so its stream cache is shut. */
static void gai_stream_ask(gai_stream *stream)
{
    stream->asked = 1;
    gai_cache_shut(&stream->cache);
}

/* The same for an event that an allocation needs. */
static void gai_stream_want_event(gai_stream *stream)
{
    gai_stream_ask(stream);
    stream->wanted = 1;
}

/* The first mark that forbids [at, at + bytes) to `params`. With `may_wait`, a mark with an event forbids nothing.
   Requests an event where one is missing. */
static const gai_mark *gai_marks_forbid(const galloc_pool *pool, const gai_mark *mark, uintptr_t at,
                                        const gai_params *params, int may_wait)
{
    for (; mark; mark = mark->next) {
        if (mark->end <= at || mark->begin >= at + params->bytes) continue;
        if (gai_mark_allows(pool, mark, params->stream)) continue;
        if (may_wait && gai_mark_event(mark)) continue;
        if (!gai_mark_event(mark)) gai_stream_want_event(mark->stream);
        return mark;
    }
    return NULL;
}

/* The first address in a block that its marks allow; 0: none. */
static uintptr_t gai_block_place(const galloc_pool *pool, const gai_block *block, const gai_params *params,
                                 int may_wait)
{
    uintptr_t begin = block->addr, end = block->addr + block->bytes;
    for (;;) {
        uintptr_t at = gai_place(begin, end, params);
        const gai_mark *mark = at ? gai_marks_forbid(pool, block->marks, at, params, may_wait) : NULL;
        if (!mark) return at;
        if (params->far) end = mark->begin;
        else begin = mark->end;
        if (begin >= end) return 0;
    }
}

/* ==== BLOCKS ==================================================================================================== */
/* >>blocks */

/* Blocks: splitting, merging, filing into free sets, holes, and the rooms of growable blocks. Guarded by the pool's
   lock. Calls slabs, the block map, bins and marks; no driver call is made here. */

/* The caller has ensured a descriptor. Each field is set by itself because compilers turn a memset this short into a
   slow string instruction. */
static gai_block *gai_block_new(galloc_pool *pool, gai_segment *segment, uintptr_t addr, size_t bytes,
                                enum gai_kind kind)
{
    gai_block *block = (gai_block *)gai_slab_take(&pool->blocks);
    GALLOC_ASSERT(!block->lent);
    gai_store_pointer(&block->pool, pool);
    block->next_bin = block->prev_bin = block->next = block->prev = block->newer = block->older = NULL;
    gai_block_set_addr(block, addr);
    block->bytes = bytes;
    block->requested = block->tag = block->life = block->stream_id = block->age = 0;
    block->stream = NULL;
    block->segment = segment;
    block->set = NULL;
    block->marks = block->recorded_uses = NULL;
    block->map_entry = NULL;
    block->alias = NULL;
    block->kind = kind;
    block->slot = 0;
    block->room = 0;
    return block;
}

static int gai_block_is_free(const gai_block *block) { return block->kind == GAI_FREE || block->kind == GAI_SLOT; }

static int gai_block_is_mapped(const gai_block *block) { return block->kind <= GAI_SLOT; }

/* Is a page parked at the block? Then the block's mapping is the page's current one, and no stale alias. */
static int gai_block_is_parked(const gai_block *block)
{
    return block && block->kind == GAI_ALIAS && block->alias->page->current == block->alias;
}

/* Are the block's addresses the current mapping of pages? True if the block is used, free, a slot or parked. */
static int gai_block_has_pages(const gai_block *block)
{
    return gai_block_is_mapped(block) || gai_block_is_parked(block);
}

/* Splits a block at `at` and returns the right part, of the given kind, with the marks of its bytes. The block is in
   no set. The caller has ensured a descriptor, one mark per mark of the block, and map nodes for `at` if the right
   part is mapped. */
static gai_block *gai_block_split(galloc_pool *pool, gai_block *block, uintptr_t at, enum gai_kind kind)
{
    gai_block *right = gai_block_new(pool, block->segment, at, block->addr + block->bytes - at, kind);
    right->age = block->age;
    right->stream_id = block->stream_id;
    block->bytes = at - block->addr;
    right->prev = block;
    right->next = block->next;
    if (right->next) right->next->prev = right;
    block->next = right;
    right->marks = gai_marks_cut(pool, &block->marks, at);
    if (gai_block_is_mapped(right)) {
        gai_block_show(right);
        pool->stats.splits++;
    }
    return right;
}

/* Merges the right neighbour into the block. Both are of one kind and in no set. */
static void gai_block_absorb(galloc_pool *pool, gai_block *block, gai_block *right)
{
    GALLOC_ASSERT(block->next == right && !right->set && !right->recorded_uses && !right->slot);
    gai_block_hide(right);
    pool->stats.merges += (uint64_t)gai_block_is_mapped(right);
    block->bytes += right->bytes;
    if (right->age > block->age && block->kind != GAI_USED) {
        block->age = right->age;
        block->stream_id = right->stream_id;
    }
    block->next = right->next;
    if (right->next) right->next->prev = block;
    block->marks = gai_marks_meet(pool, block->marks, right->marks);
    gai_slab_give(&pool->blocks, right);
}

/* Free neighbours merge when the streams that may use one may use the other: both are in one set, or one of them is in
   common. Any other merge would take from each of two streams memory that it may use without a wait. `all`: merges
   regardless. */
static int gai_sets_merge(const galloc_pool *pool, const gai_set *a, const gai_set *b, int all)
{
    return all || a == b || a == &pool->common || b == &pool->common;
}

/* A capture whose graph owns bytes of the block, or NULL. */
static const gai_capture *gai_block_capture(const gai_block *block)
{
    const gai_mark *mark = block->marks;
    while (mark && !mark->stream->capture) mark = mark->next;
    return mark ? mark->stream->capture : NULL;
}

/* The id of the capture whose graph owns a block; 0: there is none. */
static unsigned long long gai_block_capture_id(const gai_block *block)
{
    const gai_capture *capture = gai_block_capture(block);
    return capture ? capture->id : 0;
}

/* Do the captures of two free blocks, the first one of this set, let them merge? Memory that graphs own merges only
   with memory of the same captures or their group, since the graphs may own it for long. */
GAI_APART
static int gai_captures_merge(const galloc_pool *pool, const gai_set *set, const gai_block *a, const gai_block *b)
{
    const gai_capture *of_a = gai_block_capture(a), *of_b = gai_block_capture(b);
    if (set == b->set && set != &pool->mixed) return 1;
    return of_a == of_b || gai_captures_share(of_a, of_b);
}

/* Does a free block of this set merge with this neighbour, if there is one? */
static GAI_INLINE int gai_block_meets(const galloc_pool *pool, const gai_set *set, const gai_block *block,
                                      const gai_block *other, int all)
{
    return other && other->kind == GAI_FREE && gai_sets_merge(pool, other->set, set, all) &&
           (!pool->captures || gai_captures_merge(pool, set, block, other));
}

/* The neighbour that a free block merges with, or NULL. */
static GAI_INLINE gai_block *gai_block_partner(galloc_pool *pool, const gai_block *block, int all)
{
    const gai_set *set = gai_set_of(pool, block->marks);
    if (gai_block_meets(pool, set, block, block->prev, all)) return block->prev;
    return gai_block_meets(pool, set, block, block->next, all) ? block->next : NULL;
}

/* Merges a free block with all neighbours that allow it, and inserts the result into a set. */
static GAI_INLINE gai_block *gai_block_file_merged(galloc_pool *pool, gai_block *block, int all)
{
    gai_block *partner;
    while ((partner = gai_block_partner(pool, block, all)) != NULL) {
        gai_block *left = partner == block->prev ? partner : block;
        gai_set_remove(partner);
        gai_block_absorb(pool, left, left->next);
        block = left;
        gai_marks_trim(pool, &block->marks);
    }
    gai_set_insert(gai_set_of(pool, block->marks), block);
    return block;
}

/* Makes a block free: drops complete marks, merges it with its neighbours and inserts it into a set. Returns the block
   that it is part of now. */
static gai_block *gai_block_file(galloc_pool *pool, gai_block *block, int all)
{
    block->kind = GAI_FREE;
    gai_marks_prune(pool, &block->marks);
    return pool->variant.file ? pool->variant.file(pool, block, all) : gai_block_file_merged(pool, block, all);
}

static void gai_hole_link(galloc_pool *pool, gai_block *hole)
{
    hole->kind = GAI_HOLE;
    hole->prev_bin = NULL;
    hole->next_bin = pool->holes;
    if (pool->holes) pool->holes->prev_bin = hole;
    pool->holes = hole;
}

static void gai_hole_unlink(galloc_pool *pool, gai_block *hole)
{
    if (hole->next_bin) hole->next_bin->prev_bin = hole->prev_bin;
    if (hole->prev_bin) hole->prev_bin->next_bin = hole->next_bin;
    else pool->holes = hole->next_bin;
}

/* The used block in whose room this block lies, or NULL. */
static gai_block *gai_room_owner(const gai_block *block)
{
    gai_block *owner = block->prev;
    while (owner && (owner->kind == GAI_ROOM || owner->kind == GAI_BUSY || (owner->kind == GAI_ALIAS && owner->room)))
        owner = owner->prev;
    return owner && owner->kind == GAI_USED && block->addr - owner->addr < owner->room ? owner : NULL;
}

/* Turns a block without pages into a hole and merges it with adjacent holes. Inside the room of a used block it
   becomes part of that room instead. */
static void gai_block_to_hole(galloc_pool *pool, gai_block *block)
{
    enum gai_kind kind = gai_room_owner(block) ? GAI_ROOM : GAI_HOLE;
    gai_block_hide(block);
    gai_marks_end(pool, &block->marks);
    block->kind = kind;
    block->room = 0;
    if (block->next && block->next->kind == kind) {
        if (kind == GAI_HOLE) gai_hole_unlink(pool, block->next);
        gai_block_absorb(pool, block, block->next);
    }
    if (block->prev && block->prev->kind == kind) {
        block = block->prev;
        if (kind == GAI_HOLE) gai_hole_unlink(pool, block);
        gai_block_absorb(pool, block, block->next);
    }
    if (kind == GAI_HOLE) gai_hole_link(pool, block);
}

/* May a stale alias or a parked page be part of a room? Only if no running work can touch it: then the block may reuse
   its page or its addresses without a wait. */
static int gai_block_suits_room(const gai_block *block)
{
    const gai_mark *mark = block->marks;
    while (mark && gai_mark_is_complete(mark)) mark = mark->next;
    return block->kind == GAI_ALIAS && !block->room && !mark;
}

/* Reserves the holes and stale aliases behind a block for it, up to `room` bytes from its start. Without host memory
   to split the last hole, it reserves all of that hole. [lock] */
static void gai_block_reserve_room(galloc_pool *pool, gai_block *block, size_t room)
{
    uintptr_t end = block->addr + room;
    gai_block *piece = block->next;
    for (; piece && piece->addr < end; piece = piece->next) {
        if (piece->kind == GAI_HOLE) {
            gai_hole_unlink(pool, piece);
            if (piece->addr + piece->bytes > end && gai_slab_need(&pool->blocks, 1))
                gai_hole_link(pool, gai_block_split(pool, piece, end, GAI_HOLE));
            piece->kind = GAI_ROOM;
        } else if (gai_block_suits_room(piece)) {
            piece->room = piece->addr - block->addr;
        } else {
            return;
        }
        block->room = piece->addr + piece->bytes - block->addr;
    }
}

/* Releases the room of a block. [lock] */
static void gai_block_give_room(galloc_pool *pool, gai_block *block)
{
    uintptr_t end = block->addr + block->room;
    gai_block *piece = block->next, *next;
    block->room = 0;
    for (; piece && piece->addr < end; piece = next) {
        next = piece->next && piece->next->addr < end ? piece->next : NULL; /* a hole behind the room is absorbed */
        piece->room = 0;
        if (piece->kind == GAI_ROOM) gai_block_to_hole(pool, piece);
    }
}

/* The most marks that the free of a used block on one stream takes. Every used block has them promised. */
#define GAI_FREE_MARKS 2

/* Ensures host memory for cutting [at, at + bytes) out of a block and using it, so that no later step fails. */
static GAI_INLINE int gai_block_need(galloc_pool *pool, const gai_block *block, uintptr_t at, size_t bytes)
{
    uintptr_t end = at + bytes;
    if (at == block->addr && bytes == block->bytes) return gai_slab_need(&pool->marks, 3);
    return gai_slab_need(&pool->blocks, 2) && gai_slab_need(&pool->marks, 2 * gai_marks_count(block->marks) + 3) &&
           (at == block->addr || gai_block_map_need_for(block->segment, at, end)) &&
           gai_block_map_need_for(block->segment, end, at);
}

/* ==== BUDGET ====================================================================================================== */
/* >>budget */

/* How much memory pools may hold: their own limits and those of their device (gai_process.budgets), guarded by the
   budget lock. Bytes are charged to every limit before the driver call, so that concurrent growth never exceeds one.
   Calls nothing but the platform. */

/* The limit from the pool's own settings. [budget lock] */
static size_t gai_pool_share(const galloc_pool *pool)
{
    double fraction = pool->config.per_process_memory_fraction * (double)pool->device_bytes;
    size_t most = pool->config.memory_limit;
    return fraction < (double)most ? (size_t)fraction : most;
}

/* The most that the pool can hold when the device's other pools hold nothing. */
static size_t gai_pool_capacity(const galloc_pool *pool)
{
    size_t most;
    gai_lock_on(&gai_locks.budget);
    most = gai_min(gai_pool_share(pool), pool->budget->limit);
    gai_lock_off(&gai_locks.budget);
    return most;
}

/* The most that one request can get: as much, or what the pool holds if a limit was lowered below that, since it keeps
   that and serves requests from it. With other backends only the driver could. */
static size_t gai_pool_most(const galloc_pool *pool)
{
    size_t most = gai_pool_capacity(pool);
    gai_lock_on(&gai_locks.budget);
    if (!pool->variant.one_each) most = gai_max(most, pool->taken);
    gai_lock_off(&gai_locks.budget);
    return most;
}

static size_t gai_left(size_t most, size_t held) { return most > held ? most - held : 0; }

/* What the pool may take now. [budget lock] */
static size_t gai_budget_left(const galloc_pool *pool)
{
    size_t own = gai_left(gai_pool_share(pool), pool->taken);
    return gai_min(own, gai_left(pool->budget->limit, pool->budget->held));
}

/* Bytes that the pool may request from the driver now. May be stale: another pool can take the bytes first. */
static size_t gai_pool_headroom(const galloc_pool *pool)
{
    size_t left;
    gai_lock_on(&gai_locks.budget);
    left = gai_budget_left(pool);
    gai_lock_off(&gai_locks.budget);
    return left;
}

/* Bytes that must return to the driver before the pool may request `bytes` more; 0: none. What is held above a limit
   that was lowered counts too, also for no bytes. May be stale. */
static size_t gai_pool_lacks(const galloc_pool *pool, size_t bytes)
{
    size_t left, above;
    gai_lock_on(&gai_locks.budget);
    left = gai_budget_left(pool);
    above = gai_max(gai_left(pool->taken, gai_pool_share(pool)), gai_left(pool->budget->held, pool->budget->limit));
    gai_lock_off(&gai_locks.budget);
    return gai_left(bytes, left) + above;
}

/* Sets the pool's own limit, in place of both that it was made with. */
static void gai_budget_set_own(galloc_pool *pool, size_t bytes)
{
    gai_lock_on(&gai_locks.budget);
    pool->config.memory_limit = bytes;
    pool->config.per_process_memory_fraction = 1;
    gai_lock_off(&gai_locks.budget);
}

/* Charges bytes to all limits; called before the driver allocates them. 0: a limit forbids it. */
static int gai_budget_take(galloc_pool *pool, size_t bytes)
{
    int taken;
    gai_lock_on(&gai_locks.budget);
    taken = bytes <= gai_budget_left(pool);
    if (taken) pool->taken += bytes;
    if (taken) pool->budget->held += bytes;
    gai_lock_off(&gai_locks.budget);
    return taken;
}

/* Returns bytes to all limits; called after the driver has freed them or refused to allocate them. */
static void gai_budget_give(galloc_pool *pool, size_t bytes)
{
    gai_budget *budget = pool->budget;
    gai_lock_on(&gai_locks.budget);
    pool->taken -= bytes;
    budget->held -= bytes;
    budget->most = gai_max(budget->limit, gai_min(budget->most, budget->held));
    gai_lock_off(&gai_locks.budget);
}

/* A device's limit is the lowest that one of its pools names. [budget lock] */
static void gai_budget_set_limit(gai_budget *budget)
{
    const galloc_pool *pool;
    budget->limit = SIZE_MAX;
    for (pool = budget->pools; pool; pool = pool->next_sharing)
        budget->limit = gai_min(budget->limit, pool->config.device_limit);
    budget->most = gai_max(budget->limit, budget->held);
}

/* Adds a new pool to its device; its device_limit counts from now on. */
static void gai_budget_join(galloc_pool *pool)
{
    gai_lock_on(&gai_locks.budget);
    pool->next_sharing = pool->budget->pools;
    pool->budget->pools = pool;
    gai_budget_set_limit(pool->budget);
    gai_lock_off(&gai_locks.budget);
}

/* Moves a visit from `pool` (NULL: from none) to the next pool, of the device, or (budget == NULL) of all devices. A
   pool that is visited does not leave. */
static galloc_pool *gai_pool_visit(galloc_pool *pool, const gai_budget *budget)
{
    const gai_budget *at = budget ? budget : gai_process.budgets, *end = budget ? at : at + GAI_DEVICES - 1;
    galloc_pool *next;
    if (pool) at = pool->budget + 1;
    gai_lock_on(&gai_locks.budget);
    next = pool ? pool->next_sharing : NULL;
    for (; !next && at <= end; at++) next = at->pools;
    if (pool) pool->visitors--;
    if (next) next->visitors++;
    gai_lock_off(&gai_locks.budget);
    return next;
}

/* Returns the whole charge when a pool ends, and waits until its visitors have gone. */
static void gai_budget_leave(galloc_pool *pool)
{
    galloc_pool **at = &pool->budget->pools;
    unsigned round;
    gai_budget_give(pool, pool->taken);
    gai_lock_on(&gai_locks.budget);
    for (round = 0; pool->visitors; round++) {
        gai_lock_off(&gai_locks.budget);
        gai_latch_rest(round);
        gai_lock_on(&gai_locks.budget);
    }
    while (*at != pool) at = &(*at)->next_sharing;
    *at = pool->next_sharing;
    gai_budget_set_limit(pool->budget);
    gai_lock_off(&gai_locks.budget);
}

/* ==== STATISTICS ================================================================================================== */
/* >>statistics */

/* The counters of a pool, galloc_stats. Owns pool->stats, guarded by the pool's lock, except for the counters of
   driver calls, which are atomic. Calls served by a stream cache are counted there and added on request. Calls the
   budget, bins and blocks. */

static void gai_stat_add(galloc_stat *stat, size_t bytes)
{
    stat->current += bytes;
    stat->total += bytes;
    stat->peak = gai_max(stat->peak, stat->current);
}

/* Updates the cached bytes, which follow from reserved and allocated. */
static void gai_stat_cached(galloc_pool *pool)
{
    galloc_stat *cached = &pool->stats.cached;
    size_t now = pool->stats.reserved.current - pool->stats.allocated.current;
    if (now > cached->current) cached->total += now - cached->current;
    cached->current = now;
    cached->peak = gai_max(cached->peak, now);
}

/* The index of a page size in galloc_stats.pages. Only blocks of other backends are smaller than 2 MiB. */
static int gai_page_class(size_t bytes)
{
    return (int)gai_min((size_t)gai_log2(bytes >> GAI_PAGE_LOG2 | 1), GALLOC_PAGE_SIZES - 1);
}

/* Counts a page as held. */
static void gai_stat_page(galloc_pool *pool, gai_page *page)
{
    galloc_pages *pages = &pool->stats.pages[gai_page_class(page->bytes)];
    if (page->counted) return;
    page->counted = 1;
    page->used = pool->clock + 1; /* later than all samples, so that none counts it as old */
    pool->collector.created += page->bytes;
    pool->tuning.created++;
    pages->count++;
    pages->bytes += page->bytes;
    gai_stat_add(&pool->stats.reserved, page->bytes);
}

/* Subtracts `bytes` of a page from what is held; `last`: the whole page is gone. */
static void gai_stat_page_gone(galloc_pool *pool, const gai_page *page, size_t bytes, int last)
{
    galloc_pages *pages = &pool->stats.pages[gai_page_class(page->bytes)];
    gai_budget_give(pool, bytes);
    if (!page->counted) return;
    pages->count -= (size_t)last;
    pages->bytes -= bytes;
    pool->stats.reserved.current -= bytes;
}

/* cudaMallocAsync: sets what the driver's pool holds beyond the blocks. It counts among the smallest pages, since its
   page sizes are unknown. */
static void gai_stat_kept(galloc_pool *pool, size_t kept)
{
    pool->stats.pages[0].bytes += kept - pool->kept;
    pool->stats.reserved.current += kept - pool->kept;
    pool->kept = kept;
}

/* Adds the counts of a stream cache's bins that the pool's counters lack. */
static void gai_cache_tell(const gai_cache *cache, galloc_stats *stats)
{
    stats->mallocs += cache->mallocs;
    stats->hits += cache->mallocs;
    stats->frees += cache->mallocs + cache->blocks;
    stats->blocks.current -= cache->blocks;
    stats->blocks.total += cache->mallocs;
    stats->live.current += cache->live_in - cache->live_out;
    stats->live.total += cache->live_in;
    stats->allocated.current -= cache->bytes;
    stats->allocated.total += cache->allocated_in;
    stats->cached.current += cache->bytes;
    stats->cached.total += cache->allocated_in + cache->bytes;
}

/* Requested bytes of the unconfirmed blocks and the orphans. */
static size_t gai_unconfirmed_live(const gai_cache *cache)
{
    const gai_block *block;
    size_t live = 0;
    for (block = cache->unconfirmed; block; block = block->next_bin) live += (size_t)block->requested;
    for (block = cache->orphans; block; block = block->next_bin) live += (size_t)block->requested;
    return live;
}

/* Adds the counts of unconfirmed blocks, or of those in quarantine, that the pool's counters lack. */
static void gai_unconfirmed_tell(galloc_stats *stats, size_t blocks, size_t bytes, size_t live)
{
    stats->frees += blocks;
    stats->blocks.current -= blocks;
    stats->live.current -= live;
    stats->allocated.current -= bytes;
    stats->cached.current += bytes;
    stats->cached.total += bytes;
}

static void gai_stat_peak(galloc_stat *stat) { stat->peak = gai_max(stat->peak, stat->current); }

/* Takes the latches of all stream caches, so that their counts are consistent. [lock] */
static void gai_pool_lock_caches(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) gai_latch_on(&stream->cache.latch);
}

static void gai_pool_unlock_caches(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) gai_latch_off(&stream->cache.latch);
}

/* All counters except those of driver calls, with the counts of the stream caches. [lock, latches] */
static void gai_stats_locked(const galloc_pool *pool, galloc_stats *stats)
{
    const gai_stream *stream;
    memcpy(stats, &pool->stats, offsetof(galloc_stats, driver));
    for (stream = pool->streams; stream; stream = stream->next) {
        const gai_cache *cache = &stream->cache;
        gai_cache_tell(cache, stats);
        gai_unconfirmed_tell(stats, cache->unconfirmed_blocks, cache->unconfirmed_bytes, gai_unconfirmed_live(cache));
    }
    gai_unconfirmed_tell(stats, pool->guards.kept, pool->guards.kept_bytes, pool->guards.kept_live);
    stats->cached.current = stats->reserved.current - stats->allocated.current;
    gai_stat_peak(&stats->live);
    gai_stat_peak(&stats->allocated);
    gai_stat_peak(&stats->cached);
    gai_stat_peak(&stats->blocks);
}

/* The same, with the latches taken here. [lock] */
static void gai_stats_now(galloc_pool *pool, galloc_stats *stats)
{
    gai_pool_lock_caches(pool);
    gai_stats_locked(pool, stats);
    gai_pool_unlock_caches(pool);
}

/* Counts an occasion for the variant. [no lock] */
static void gai_pool_count(galloc_pool *pool, enum gai_count what)
{
    if (!pool->variant.count) return;
    gai_lock_on(&pool->lock);
    pool->variant.count(pool, what, NULL);
    gai_lock_off(&pool->lock);
}

/* Bytes that the pool holds. [no lock] */
static size_t gai_pool_held(galloc_pool *pool)
{
    size_t held;
    gai_lock_on(&pool->lock);
    held = pool->stats.reserved.current;
    gai_lock_off(&pool->lock);
    return held;
}

/* Bytes in use by the program, as requested. */
static size_t gai_pool_live(galloc_pool *pool)
{
    const gai_stream *stream;
    size_t live = pool->stats.live.current - pool->guards.kept_live;
    gai_pool_lock_caches(pool);
    for (stream = pool->streams; stream; stream = stream->next)
        live += stream->cache.live_in - stream->cache.live_out - gai_unconfirmed_live(&stream->cache);
    gai_pool_unlock_caches(pool);
    return live;
}

/* Keeps the peaks of figures that were corrected. */
static void gai_stat_keep_peaks(galloc_pool *pool, const galloc_stats *now)
{
    pool->stats.live.peak = now->live.peak;
    pool->stats.allocated.peak = now->allocated.peak;
    pool->stats.cached.peak = now->cached.peak;
    pool->stats.blocks.peak = now->blocks.peak;
    pool->live_peak = gai_max(pool->live_peak, now->live.current);
}

/* Updates the peaks. The pool's counters overstate usage, since they count the blocks in stream caches as used. So the
   stream caches are read, and the counters corrected, only when a counter exceeds its peak. */
static void gai_stat_peaks(galloc_pool *pool)
{
    galloc_stats now, *stats = &pool->stats;
    if (stats->live.current <= stats->live.peak && stats->allocated.current <= stats->allocated.peak &&
        stats->blocks.current <= stats->blocks.peak)
        return;
    gai_stats_now(pool, &now);
    gai_stat_keep_peaks(pool, &now);
}

/* Counts a block given to the program, or the bytes by which one grows. */
static void gai_stat_used(galloc_pool *pool, size_t bytes, size_t requested)
{
    pool->stats.allocated.current += bytes;
    pool->stats.allocated.total += bytes;
    pool->stats.live.current += requested;
    pool->stats.live.total += requested;
    gai_stat_cached(pool);
    gai_stat_peaks(pool);
}

static void gai_stat_unused(galloc_pool *pool, size_t bytes, size_t requested)
{
    pool->stats.allocated.current -= bytes;
    pool->stats.live.current -= requested;
    gai_stat_cached(pool);
}

/* The longest row of adjacent parked pages, which one plan can turn into a block. */
static size_t gai_pool_largest_parked(const galloc_pool *pool)
{
    const gai_mapping *mapping;
    size_t largest = 0;
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer) {
        const gai_block *block = mapping->block;
        size_t bytes = 0;
        if (gai_block_is_parked(block->prev)) continue;
        for (; gai_block_is_parked(block); block = block->next) bytes += block->bytes;
        largest = gai_max(largest, bytes);
    }
    return largest;
}

static size_t gai_blocks_largest(const gai_block *block)
{
    size_t largest = 0;
    for (; block; block = block->next_bin) largest = gai_max(largest, block->bytes);
    return largest;
}

static size_t gai_cache_largest(const gai_cache *cache)
{
    size_t largest = gai_max(gai_blocks_largest(cache->unconfirmed), gai_blocks_largest(cache->orphans));
    uint64_t filled = cache->filled;
    for (; filled; filled &= filled - 1) largest = gai_max(largest, cache->bins[gai_lowest(filled)].bytes);
    return largest;
}

/* Figures that are computed from the bins, the stream caches and the parked pages. [lock, latches] */
static void gai_stats_derive(const galloc_pool *pool, galloc_stats *stats)
{
    const gai_stream *stream;
    const gai_set *set;
    stats->free_bytes = pool->parked + pool->kept + pool->guards.kept_bytes;
    /* How much of `kept` is contiguous is unknown. */
    stats->largest_free = gai_max(pool->kept, gai_pool_largest_parked(pool));
    stats->largest_free = gai_max(stats->largest_free, gai_blocks_largest(pool->guards.oldest));
    for (set = &pool->common; set; set = set->next) {
        stats->free_bytes += set->bytes;
        stats->largest_free = gai_max(stats->largest_free, gai_set_largest(set));
    }
    for (stream = pool->streams; stream; stream = stream->next) {
        stats->free_bytes += stream->cache.bytes + stream->cache.unconfirmed_bytes;
        stats->largest_free = gai_max(stats->largest_free, gai_cache_largest(&stream->cache));
    }
    stats->external_fragmentation = 0;
    if (stats->free_bytes) stats->external_fragmentation = 1 - (double)stats->largest_free / (double)stats->free_bytes;
    stats->internal_fragmentation = 1;
    if (stats->live.current)
        stats->internal_fragmentation = (double)stats->allocated.current / (double)stats->live.current;
}

/* `now` includes the counts that stream caches have not reported yet. The total may wrap below 0 here, and becomes
   exact when they report. */
static void gai_stat_reset(galloc_stat *stat, const galloc_stat *now)
{
    stat->peak = now->current;
    stat->total -= now->total;
}

/* ==== HISTORY ===================================================================================================== */
/* >>history */

/* The history of a pool: what it did lately, one entry each, for snapshots. Each note is made under the pool's lock, in
   the same hold of it as the change that it tells of, so that a snapshot can be followed back in time. It allocates
   nothing. Owns pool->history, guarded by the pool's lock, the depot of stacks, and the names of tags. Calls platform
   and process. */

#define GAI_HISTORY_MOST (1 << 24) /* entries: 1 GiB */

/* ---- stacks ---- */

/* Other frames of the stack are read, which AddressSanitizer would take for an overrun. */
#if defined(__SANITIZE_ADDRESS__) || defined(__clang__)
#define GAI_READS_STACK GAI_APART __attribute__((no_sanitize_address))
#else
#define GAI_READS_STACK
#endif

#define GAI_STACK_MOST 32 /* frames of a stack */
#define GAI_STACKS_LOG2 16
#define GAI_STACKS (1 << GAI_STACKS_LOG2)
#define GAI_STACK_ADDRESSES (1 << 20)
#define GAI_KNOWN_LOG2 12

/* A stack that was taken, and where its return addresses lay. It is the stack of a later call as well if that call has
   the same `here` and `caller` and finds each address in its place: the size of a function's frame at a return address
   is fixed, so the place of one address determines that of the next. */
typedef struct gai_known_stack {
    uintptr_t here; /* the frame of gai_stack_take; 0: unused */
    void *caller;   /* gai_thread.caller */
    uint32_t number, frames; /* of the stack; that were asked for */
    uint32_t offsets[GAI_STACK_MOST + 1]; /* of each address, from `here` */
} gai_known_stack;

/* Each distinct stack once, for all pools; nothing leaves it before galloc_shutdown. Stacks have numbers from 1 on.
   Who has got a number from a pool, under its lock, reads that stack without a lock.
   stack i: addresses[begins[i] .. begins[i + 1]);  n: of stacks;  table: an open hash of their numbers, 0: free */
typedef struct gai_depot {
    gai_unwinder unwinder;
    gai_known_stack known[1 << GAI_KNOWN_LOG2];
    uint32_t table[2 * GAI_STACKS];
    uint32_t begins[GAI_STACKS + 1];
    uint32_t n;
    uint64_t lost; /* allocations and frees without a stack, since the depot was full */
    void *addresses[GAI_STACK_ADDRESSES]; /* the last member: not cleared, so that it takes memory as it fills */
} gai_depot;

/* Makes the depot, unless there is one. The first call of gai_backtrace is here, with no lock held. [no lock] */
static cudaError_t gai_depot_begin(void)
{
    void *at[4];
    uintptr_t places[4];
    gai_unwinder unwinder;
    gai_depot *depot;
    memset(&unwinder, 0, sizeof unwinder);
    if (gai_backtrace(&unwinder, at, places, 4) < 2)
        return gai_fail(cudaErrorNotSupported, "history_stacks: this system gives no stacks of calls");
    if (gai_load_pointer(&gai_process.depot)) return cudaSuccess;
    depot = (gai_depot *)GALLOC_MALLOC(sizeof *depot);
    if (!depot) return gai_fail(cudaErrorMemoryAllocation, "no host memory for stacks: %zu bytes", sizeof *depot);
    memset(depot, 0, offsetof(gai_depot, addresses));
    gai_unwinder_load(&depot->unwinder);
    gai_lock_on(&gai_locks.depot);
    if (!gai_process.depot) {
        gai_store_pointer(&gai_process.depot, depot);
        depot = NULL;
    }
    gai_lock_off(&gai_locks.depot);
    if (depot) GALLOC_FREE(depot);
    return cudaSuccess;
}

/* The number of a stack, which enters the depot if it is new. 0: the depot is full. With the lock of the depot. */
static uint32_t gai_depot_number(gai_depot *depot, void *const *at, uint32_t n)
{
    uint64_t key = n;
    uint32_t i, number, begin = depot->begins[depot->n + 1];
    for (i = 0; i < n; i++) key = (key ^ key >> 32 ^ (uintptr_t)at[i]) * 0x9e3779b97f4a7c15u;
    for (i = (uint32_t)(key >> (63 - GAI_STACKS_LOG2)); (number = depot->table[i]) != 0; i = (i + 1) % (2 * GAI_STACKS))
        if (depot->begins[number + 1] - depot->begins[number] == n &&
            !memcmp(&depot->addresses[depot->begins[number]], at, n * sizeof *at)) return number;
    if (depot->n == GAI_STACKS - 1 || begin + n > GAI_STACK_ADDRESSES) {
        if (!depot->lost++) gai_note("no room for more stacks: %u are kept", (unsigned)depot->n);
        return 0;
    }
    memcpy(&depot->addresses[begin], at, n * sizeof *at);
    number = depot->table[i] = ++depot->n;
    depot->begins[number + 1] = begin + n;
    return number;
}

#define GAI_STACK_OWN 4       /* frames of galloc's, mostly */
#define GAI_STACK_OWN_MOST 24 /* without optimisation */

/* The entry of a call in the table of known stacks. With the lock of the depot. */
static gai_known_stack *gai_depot_known(gai_depot *depot, uintptr_t here)
{
    uint64_t key = (here ^ (uintptr_t)gai_thread.caller) * (uint64_t)0x9e3779b97f4a7c15u;
    return &depot->known[key >> (64 - GAI_KNOWN_LOG2)];
}

/* The number of this call's stack if it is a known one, otherwise 0. It reads the thread's own stack only, which a
   stack of the program's own need not be. With the lock of the depot. */
GAI_READS_STACK
static uint32_t gai_depot_recall(gai_depot *depot, uintptr_t here, uint32_t frames)
{
    const gai_known_stack *known = gai_depot_known(depot, here);
    void *const *stack = &depot->addresses[depot->begins[known->number]];
    uint32_t n = depot->begins[known->number + 1] - depot->begins[known->number], i;
    if (known->here != here || known->caller != gai_thread.caller || known->frames != frames ||
        here < gai_thread.stack_begin || here + known->offsets[n - 1] >= gai_thread.stack_end) return 0;
    for (i = 0; i < n; i++)
        if (*(void *const volatile *)(here + known->offsets[i]) != stack[i]) return 0;
    return known->number;
}

/* Makes a stack a known one if all its places are. With the lock of the depot. */
GAI_READS_STACK
static void gai_depot_remember(gai_depot *depot, uintptr_t here, uint32_t frames, uint32_t number, void *const *at,
                               const uintptr_t *places, uint32_t n)
{
    gai_known_stack *known = gai_depot_known(depot, here);
    uintptr_t last = here;
    uint32_t i;
    known->here = 0;
    for (i = 0; i < n; last = places[i++]) {
        if (places[i] <= last || places[i] >= gai_thread.stack_end || places[i] - here > UINT32_MAX ||
            *(void *const volatile *)places[i] != at[i]) return;
        known->offsets[i] = (uint32_t)(places[i] - here);
    }
    known->here = here;
    known->caller = gai_thread.caller;
    known->number = number;
    known->frames = frames;
}

/* Takes the stack of this call, without galloc's own frames but perhaps the outermost. Returns its number. [no lock] */
GAI_APART
static uint32_t gai_stack_unwind(gai_depot *depot, uintptr_t here, int frames)
{
    void *at[GAI_STACK_OWN_MOST + GAI_STACK_MOST + 1];
    uintptr_t places[GAI_STACK_OWN_MOST + GAI_STACK_MOST + 1];
    int own = GAI_STACK_OWN, wanted = frames + 1, n, first, found;
    uint32_t number = 0;
    for (;; own = GAI_STACK_OWN_MOST) {
        n = gai_backtrace(&depot->unwinder, at, places, own + wanted);
        for (first = 0; first < n && at[first] != gai_thread.caller; first++) continue;
        if (first <= own || n < own + wanted || own == GAI_STACK_OWN_MOST) break;
    }
    found = first < n;
    if (!found) first = 0;
    n = (int)gai_min((size_t)(n - first), (size_t)wanted);
    if (!gai_thread.stack_end) gai_stack_bounds(&gai_thread.stack_begin, &gai_thread.stack_end);
    gai_lock_on(&gai_locks.depot);
    if (n > 0) number = gai_depot_number(depot, at + first, (uint32_t)n);
    if (number && found && here >= gai_thread.stack_begin)
        gai_depot_remember(depot, here, (uint32_t)frames, number, at + first, places + first, (uint32_t)n);
    gai_lock_off(&gai_locks.depot);
    return number;
}

/* The same; the unwinder is called only if the stack is not a known one. [no lock] */
GAI_APART
static uint32_t gai_stack_take(int frames)
{
    gai_depot *depot = (gai_depot *)gai_load_pointer(&gai_process.depot);
    uint32_t number = 0;
    if (!depot) return 0;
    gai_lock_on(&gai_locks.depot);
    if (gai_thread.stack_end) number = gai_depot_recall(depot, GAI_FRAME(), (uint32_t)frames);
    gai_lock_off(&gai_locks.depot);
    return number ? number : gai_stack_unwind(depot, GAI_FRAME(), frames);
}

/* Begins a call that allocates or frees: takes its stack, if the history keeps stacks. [no lock] */
static GAI_INLINE void gai_stack_note(const galloc_pool *pool)
{
    uint64_t frames = gai_counted(&pool->frames_taken);
    gai_thread.stack = frames ? gai_stack_take((int)frames) : 0;
}

/* ---- entries ---- */

#if !defined(GAI_TICKS)
#define GAI_TICKS() GALLOC_CLOCK()
static void gai_history_convert(gai_history *history) { (void)history; }
#else
/* Converts the times of the entries since the last conversion to those of the clock: both were read then and are read
   now. [lock] */
static void gai_history_convert(gai_history *history)
{
    uint64_t ticks = gai_max(history->latest, GAI_TICKS()), ns = GALLOC_CLOCK(), i;
    uint64_t n = gai_min(history->noted - history->converted, history->size);
    double scale = ticks > history->ticks ? (double)(ns - history->ns) / (double)(ticks - history->ticks) : 0;
    size_t at = history->next;
    for (i = 0; i < n; i++) {
        at = (at ? at : history->size) - 1;
        history->ring[at].time = history->ns + (uint64_t)((double)(history->ring[at].time - history->ticks) * scale);
    }
    history->converted = history->noted;
    history->ticks = ticks;
    history->ns = ns;
}
#endif

/* Replaces the ring, and begins with no entry. Returns the ring before. [lock] */
static gai_history_entry *gai_history_begin(galloc_pool *pool, gai_history_entry *ring, size_t entries)
{
    gai_history_entry *before = pool->history.ring;
    memset(&pool->history, 0, sizeof pool->history);
    pool->history.ring = ring;
    pool->history.size = entries;
    pool->history.latest = pool->history.ticks = GAI_TICKS();
    pool->history.ns = GALLOC_CLOCK();
    if (ring) (void)gai_swap(&gai_process.epoch_us, 0, (uint64_t)time(NULL) * 1000000 - GALLOC_CLOCK() / 1000);
    return before;
}

/* While there is a history or a log, no call is served by a stream cache. Logs and entries with stacks need the full
   path. [lock] */
static void gai_pool_route_history(galloc_pool *pool)
{
    uint64_t frames = pool->history.ring ? pool->frames : 0;
    pool->caches_off = (pool->caches_off & ~4) | (pool->history.ring || pool->trace) << 2;
    pool->special = (pool->special & ~(uint64_t)GAI_ROUTE_HISTORY) | (frames || pool->trace ? GAI_ROUTE_HISTORY : 0);
    gai_set_relaxed(&pool->frames_taken, frames);
}

/* The next entry of the ring, the oldest one once it is full. */
static gai_history_entry *gai_history_next(gai_history *history, enum gai_action action)
{
    gai_history_entry *entry = &history->ring[history->next++];
    if (history->next == history->size) history->next = 0;
    history->noted++;
    entry->time = history->latest = gai_max(history->latest, GAI_TICKS());
    entry->action = (uint32_t)action;
    entry->tag = 0;
    return entry;
}

GAI_APART
static gai_history_entry *gai_history_note(gai_history *history, enum gai_action action, uintptr_t addr, size_t bytes,
                                           uint64_t stream_id, uint64_t other)
{
    gai_history_entry *entry = gai_history_next(history, action);
    entry->is.at.addr = addr;
    entry->is.at.bytes = bytes;
    entry->is.at.stream_id = stream_id;
    entry->is.at.other = other;
    return entry;
}

static GAI_INLINE void gai_history_event(galloc_pool *pool, enum gai_action action, uintptr_t addr, size_t bytes,
                                         uint64_t stream_id, uint64_t other)
{
    if (pool->history.ring) (void)gai_history_note(&pool->history, action, addr, bytes, stream_id, other);
}

/* The program gets a block, or gives it back, in a call with this stack. */
static GAI_INLINE void gai_history_block(galloc_pool *pool, enum gai_action action, gai_block *block, uint32_t stack)
{
    gai_history_entry *entry;
    if (!pool->history.ring) return;
    entry = gai_history_note(&pool->history, action, block->addr, (size_t)block->requested, block->stream_id, 0);
    entry->tag = (uint32_t)block->tag;
    entry->is.at.stack = stack;
    if (action != GAI_ALLOCATED) return;
    gai_set_relaxed(&block->tag, (block->tag & (((uint64_t)1 << GAI_STACK_SHIFT) - 1)) |
                                     (uint64_t)stack << GAI_STACK_SHIFT);
}

/* A mapping is about to become its page's current one. A page that moves leaves another address; a parked one is in
   place already. */
static void gai_history_mapped(galloc_pool *pool, const gai_mapping *mapping)
{
    const gai_mapping *from = mapping->page->current;
    if (from == mapping) return;
    if (from) gai_history_event(pool, GAI_UNMAPPED_PART, from->addr, from->bytes, 0, 1);
    gai_history_event(pool, mapping->segment->fixed ? GAI_SEGMENT_MADE : GAI_MAPPED, mapping->addr, mapping->bytes, 0,
             from != NULL);
}

/* The mapping's page is about to be given back. */
static void gai_history_unmapped(galloc_pool *pool, const gai_mapping *mapping)
{
    enum gai_action action = mapping->segment->fixed ? GAI_SEGMENT_GONE : GAI_UNMAPPED_PART;
    gai_history_event(pool, action, mapping->addr, mapping->bytes, 0, 0);
}

/* A wait is queued on a stream for the work that a mark stands for. */
static void gai_history_wait(galloc_pool *pool, const gai_stream *stream, const gai_mark *mark)
{
    gai_history_event(pool, GAI_WAITED, mark->begin, mark->end - mark->begin, stream->stream_id,
                      mark->stream->stream_id);
}

/* A request has failed since memory ran out. [no lock] */
static void gai_history_shortage(galloc_pool *pool, const galloc_report *report)
{
    size_t left = report->device_known ? report->device_free : 0;
    gai_lock_on(&pool->lock);
    gai_history_event(pool, GAI_RAN_OUT, 0, report->asked, report->stream_id, left);
    gai_lock_off(&pool->lock);
}

/* ---- texts ---- */

/* Copies as much of a text as fits, all else than printable ASCII as '?'. `to` may be `text`. */
static void gai_text_copy(char *to, size_t size, const char *text)
{
    size_t i;
    for (i = 0; i < size - 1 && text[i]; i++) to[i] = text[i] >= ' ' && text[i] <= '~' ? text[i] : '?';
    to[i] = 0;
}

/* The same for a text of the program: at most 47 bytes of it. */
static void gai_history_text(char *to, const char *text) { gai_text_copy(to, GAI_NOTE_TEXT, text); }

/* The place of a tag, or that of a name without a tag (""); GAI_TAG_NAMES: there is none. */
static int gai_tag_at(uint32_t tag, int named)
{
    int i = 0;
    while (i < GAI_TAG_NAMES && (!gai_process.tag_names[i].name[0] != !named ||
                                (named && gai_process.tag_names[i].tag != tag))) i++;
    return i;
}

/* Gives a tag a name, or takes it away (NULL or ""). Returns 0 if all places are taken. */
static int gai_tag_set(uint32_t tag, const char *name)
{
    int at;
    gai_lock_on(&gai_locks.tags);
    at = gai_tag_at(tag, 1);
    if (at == GAI_TAG_NAMES) at = gai_tag_at(tag, 0);
    if (at < GAI_TAG_NAMES) {
        gai_process.tag_names[at].tag = tag;
        gai_history_text(gai_process.tag_names[at].name, name ? name : "");
    }
    gai_lock_off(&gai_locks.tags);
    return at < GAI_TAG_NAMES || !name || !name[0];
}

/* Copies the name of a tag. Returns 0 if it has none. */
static int gai_tag_get(uint32_t tag, char *name)
{
    int at;
    gai_lock_on(&gai_locks.tags);
    at = gai_tag_at(tag, 1);
    if (at < GAI_TAG_NAMES) memcpy(name, gai_process.tag_names[at].name, GAI_NOTE_TEXT);
    gai_lock_off(&gai_locks.tags);
    return at < GAI_TAG_NAMES;
}

/* A frame in words. Its texts are copies, since a library can be unloaded at any time. */
typedef struct gai_symbol {
    void *at;
    size_t into;     /* bytes from the function's beginning, more than 0 */
    size_t position; /* in the file, as addr2line takes it: of the call, which is before its return address */
    char name[256], file[240]; /* "??": not known */
} gai_symbol;

static void gai_symbol_find(gai_symbol *symbol, void *at)
{
    gai_code place;
    const char *head;
    gai_code_look(&place, (char *)at - 1, symbol->file, sizeof symbol->file);
    head = (const char *)place.file_begin;
    symbol->at = at;
    symbol->into = place.name ? (size_t)((char *)at - (char *)place.name_begin) : 0;
    symbol->position = (uintptr_t)at - 1;
    /* A program that is not position-independent (ET_EXEC) lies at the addresses that its file has. */
    if (head && !(!memcmp(head, "\177ELF", 4) && head[16] == 2)) symbol->position -= (uintptr_t)head;
    gai_text_copy(symbol->name, sizeof symbol->name, place.name ? place.name : "??");
    gai_text_copy(symbol->file, sizeof symbol->file, place.file ? place.file : "??");
}

/* The program's annotation. [lock] */
static void gai_history_annotation(galloc_pool *pool, const char *text)
{
    if (pool->history.ring) gai_history_text(gai_history_next(&pool->history, GAI_ANNOTATED)->is.text, text);
}

/* ==== TRACE ======================================================================================================= */
/* >>trace */

/* The log of a run (setting trace): rows of text in RMM's format for the blocks that the program gets and gives back.
   They are added where the history notes the same, under the pool's lock, and go to the file when the call ends, with
   no lock of a pool held. A crash loses at most both halves of the text. Owns gai_process.traces and the files, guarded
   by the lock of logs, which comes after the locks of pools, and their text, guarded by the latch of each log. Calls
   process and cuda. */

#define GAI_TRACE_HALF (32 << 10) /* bytes */
#define GAI_TRACE_ROW 1024        /* the longest row is shorter, also with so many bytes of words */
#define GAI_TRACE_WORDS 800
#define GAI_TRACE_STREAMS 16      /* the most that a word names */

/* A log: one for each file name that the setting stands for, until galloc_shutdown. */
typedef struct gai_trace {
    struct gai_trace *next;
    char *path;
    FILE *file;
    uint64_t began, pools; /* its time 0; pools that have written it */
    int failed, told;      /* errno of a write, after which none is made; the log line was said */
    gai_latch latch;       /* guards the rest, except that the lock of logs suffices to read text[!at] */
    int at;                /* rows are added to text[at]; text[!at] is empty, or to be written */
    size_t filled[2];
    char text[2][GAI_TRACE_HALF];
} gai_trace;

/* 1: the logs are written at the end of this call, or of the next one; 2: of each, since the process ends. */
static void gai_trace_want(uint64_t due)
{
    if (gai_load_pointer(&gai_process.traces)) gai_count_max(&gai_process.trace_due, due);
}

/* Writes both halves. With the lock of logs. */
static void gai_trace_write(gai_trace *trace)
{
    int half, round;
    size_t n;
    for (round = 0; round < 2; round++) {
        gai_latch_on(&trace->latch);
        half = trace->filled[!trace->at] ? !trace->at : trace->at;
        trace->at = !half;
        n = trace->filled[half];
        gai_latch_off(&trace->latch);
        errno = 0;
        if (!trace->failed && fwrite(trace->text[half], 1, n, trace->file) != n) trace->failed = errno ? errno : EIO;
        gai_latch_on(&trace->latch);
        trace->filled[half] = 0;
        gai_latch_off(&trace->latch);
    }
}

/* Adds a row. Only if both halves are full, since nobody has written them yet, this call does. */
static void gai_trace_add(gai_trace *trace, const char *row, size_t n)
{
    gai_latch_on(&trace->latch);
    while (trace->filled[trace->at] + n > GAI_TRACE_HALF) {
        if (!trace->filled[!trace->at]) {
            trace->at = !trace->at;
            gai_trace_want(1);
            continue;
        }
        gai_latch_off(&trace->latch);
        gai_lock_on(&gai_locks.trace);
        gai_trace_write(trace);
        gai_lock_off(&gai_locks.trace);
        gai_latch_on(&trace->latch);
    }
    memcpy(trace->text[trace->at] + trace->filled[trace->at], row, n);
    trace->filled[trace->at] += n;
    gai_latch_off(&trace->latch);
}

static void gai_trace_row(galloc_pool *pool, const char *action, uintptr_t addr, size_t bytes, uint64_t stream,
                          const char *words)
{
    uint64_t us = (GALLOC_CLOCK() - pool->trace->began) / 1000;
    char row[GAI_TRACE_ROW];
    int n = snprintf(row, sizeof row, "%llu,%llu.%06llu,%s,0x%llx,%zu,%llu,%llu,%s\n",
                     gai_thread_number(), (unsigned long long)(us / 1000000),
                     (unsigned long long)(us % 1000000), action, (unsigned long long)addr, bytes,
                     (unsigned long long)stream, (unsigned long long)pool->traced, words + (words[0] == ' '));
    gai_trace_add(pool->trace, row, (size_t)n);
}

/* A captured stream, whose id cannot be asked for, has the number of its handle. A per-thread default stream has one
   that is no stream's id, of its thread and its context. */
static uint64_t gai_trace_stream(const gai_stream *stream)
{
    if (!stream->capture_id) return stream->stream_id;
    if (!stream->thread) return (uint64_t)(uintptr_t)stream->handle;
    return 1ull << 63 | (uint64_t)(uintptr_t)stream->context << 16 | (stream->thread & 0xfffff);
}

/* Adds a word "name=2+3" for the streams of marks, but not for the unknown streams. */
static void gai_trace_streams(gai_string *words, const char *name, const gai_mark *marks)
{
    int n = 0;
    for (; marks && n < GAI_TRACE_STREAMS; marks = marks->next) {
        if (marks->stream->capture_id == GAI_UNKNOWN_STREAMS) continue;
        if (!n++) gai_print(words, " %s=", name);
        gai_print(words, "%s%llu", n > 1 ? "+" : "", (unsigned long long)gai_trace_stream(marks->stream));
    }
}

/* The program gets a block, after so many waits for other streams. [lock] */
GAI_APART
static void gai_trace_got(galloc_pool *pool, const gai_block *block, const gai_params *params, int waits)
{
    char text[GAI_TRACE_WORDS] = "";
    gai_string words = {text, sizeof text};
    int one_each = pool->variant.one_each, roomy = one_each ? params->room_is_memory : params->growable;
    size_t unit = roomy && !one_each ? pool->granularity : GAI_UNIT;
    if (roomy) gai_print(&words, " room=%zu", gai_max(params->room, params->bytes));
    if (params->alignment > unit) gai_print(&words, " align=%zu", params->alignment);
    if (params->lasting) gai_print(&words, " long");
    if (params->tag) gai_print(&words, " tag=%u", (unsigned)params->tag);
    if (params->stream->capture_id) gai_print(&words, " capture=%llu", params->stream->capture_id);
    if (waits) gai_print(&words, " waits=%d", waits);
    gai_trace_row(pool, "allocate", block->addr, params->requested, gai_trace_stream(params->stream), text);
}

/* The program gives a block back, after the work of the streams of `marks`. NULL: the free names no stream. [lock] */
GAI_APART
static void gai_trace_freed(galloc_pool *pool, const gai_block *block, const gai_mark *marks)
{
    char text[GAI_TRACE_WORDS] = "";
    gai_string words = {text, sizeof text};
    if (marks && marks->stream->capture_id) gai_print(&words, " capture=%llu", marks->stream->capture_id);
    if (marks) gai_trace_streams(&words, "after", marks->next);
    gai_trace_streams(&words, "recorded", block->recorded_uses);
    gai_trace_row(pool, "free", block->addr, (size_t)block->requested,
                  marks ? gai_trace_stream(marks->stream) : block->stream_id, text);
}

/* A block has another size, at the same address. [lock] */
GAI_APART
static void gai_trace_resized(galloc_pool *pool, const gai_block *block, size_t bytes, const gai_stream *stream)
{
    gai_trace_row(pool, "free", block->addr, (size_t)block->requested, gai_trace_stream(stream), "resize");
    gai_trace_row(pool, "allocate", block->addr, bytes, gai_trace_stream(stream), "resize");
}

/* ==== TAKE ======================================================================================================== */
/* >>take */

/* Cuts a free block to a request and gives it to the program; takes a used block back from it. Guarded by the pool's
   lock; a used block's `lent` is guarded by the latch of a stream cache. Calls slabs, the block map, bins, blocks,
   marks and statistics. */

/* Would the rest of a block of this set, once filed, again be one block of this set? */
static int gai_block_stays(galloc_pool *pool, const gai_block *rest, const gai_set *set)
{
    const gai_mark *mark = rest->marks;
    if (mark && (mark->stream != set->stream || mark->next || gai_mark_is_complete(mark))) return 0;
    return (mark || set == &pool->common) && !gai_block_partner(pool, rest, 0);
}

/* Puts the rest of a block that is in no bin any more into its place in the list by age, and into a bin. */
static void gai_set_replace(gai_set *set, gai_block *block, gai_block *rest)
{
    if (rest != block) {
        rest->older = block->older;
        rest->newer = block->newer;
        if (rest->older) rest->older->newer = rest;
        else set->oldest = rest;
        if (rest->newer) rest->newer->older = rest;
        else set->newest = rest;
        block->set = NULL;
        rest->set = set;
    }
    rest->kind = GAI_FREE;
    gai_bin_insert(set, rest);
}

/* Does the part of a free block behind `cut` belong to the same set as the whole? */
static GAI_INLINE int gai_block_is_even(const galloc_pool *pool, const gai_block *block, uintptr_t cut)
{
    const gai_mark *mark = block->marks;
    if (!mark) return block->set == &pool->common;
    return mark->stream == block->set->stream && !mark->next && mark->end > cut && !gai_mark_is_complete(mark);
}

/* Cuts off the beginning of a free block whose rest stays in its set. The rest keeps the descriptor, its place by age
   and its cache lines. The part cut off has no marks yet. */
static GAI_INLINE gai_block *gai_block_cut_off(galloc_pool *pool, gai_block *rest, size_t bytes)
{
    gai_block *block = gai_block_new(pool, rest->segment, rest->addr, bytes, GAI_USED);
    gai_bin_remove(rest->set, rest);
    block->age = rest->age;
    block->next = rest;
    block->prev = rest->prev;
    if (rest->prev) rest->prev->next = block;
    else rest->segment->first = block;
    rest->kind = GAI_FREE;
    rest->prev = block;
    gai_block_set_addr(rest, rest->addr + bytes);
    rest->bytes -= bytes;
    block->map_entry = rest->map_entry;
    gai_store_pointer(block->map_entry, block);
    gai_block_show(rest);
    rest->set->bytes -= bytes;
    gai_bin_insert(rest->set, rest);
    pool->stats.splits++;
    return block;
}

/* Cuts [at, at + bytes) out of a free block; the rest stays free. The caller has called gai_block_need. */
static gai_block *gai_block_cut_out(galloc_pool *pool, gai_block *block, uintptr_t at, size_t bytes,
                                    enum gai_kind kind)
{
    gai_block *before = NULL, *after = NULL, *whole = block;
    gai_set *set = block->set;
    if (set->counted) block->segment->pool->variant.unfiled(set, block);
    gai_bin_remove(set, block);
    set->bytes -= block->bytes;
    if (at + bytes < block->addr + block->bytes) after = gai_block_split(pool, block, at + bytes, GAI_FREE);
    if (at > block->addr) {
        before = block;
        block = gai_block_split(pool, before, at, kind);
    }
    block->kind = kind;
    if (!before != !after && gai_block_stays(pool, before ? before : after, set)) {
        gai_set_replace(set, whole, before ? before : after);
        set->bytes += before ? before->bytes : after->bytes;
    } else {
        gai_age_remove(set, whole);
        whole->set = NULL;
        if (before) (void)gai_block_file(pool, before, 0);
        if (after) (void)gai_block_file(pool, after, 0);
    }
    gai_marks_prune(pool, &block->marks);
    return block;
}

/* A block given to a captured stream belongs to the graph from then on, whichever stream frees it. Its marks may
   change while the program has it, when a group is released, so no call may read them without the pool's lock
   (GAI_SPECIAL). */
static void gai_block_mark_captured(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    block->tag |= GAI_SPECIAL;
    gai_marks_add(pool, &block->marks,
                  gai_mark_new(pool, stream, stream->epoch, block->addr, block->addr + block->bytes));
}

/* Replaces the capture's marks on a resized block by one over all its bytes: growing and shrinking may have added
   marks of the same stream. */
static void gai_block_renew_captured(galloc_pool *pool, gai_block *block)
{
    gai_mark **at = &block->marks, *own = NULL;
    if (!block->stream->capture) return;
    while (*at) {
        gai_mark *mark = *at;
        if (mark->stream != block->stream || !own) {
            if (mark->stream == block->stream) own = mark;
            at = &mark->next;
        } else {
            gai_mark_drop(pool, at);
        }
    }
    if (!own) return;
    own->begin = block->addr;
    own->end = block->addr + block->bytes;
    own->epoch = block->stream->epoch;
}

/* A stream state's earlier use of a block precedes all its later work. So its own mark is dropped when it gets the
   block again, and `handed` keeps the epoch. If another stream frees the block, the mark is made again. */
static GAI_INLINE void gai_stream_drops(gai_stream *stream, const gai_mark *mark)
{
    if (mark->epoch > stream->handed) stream->handed = mark->epoch;
}

/* Drops the block's only mark if it is the stream state's own. */
static GAI_INLINE void gai_block_drop_own(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    gai_mark *mark = block->marks;
    if (!mark || mark->next || mark->stream != stream) return;
    gai_stream_drops(stream, mark);
    block->marks = NULL;
    block->tag |= GAI_CACHED | GAI_DROPPED;
    block->age = mark->epoch;
    gai_mark_end(pool, mark);
}

/* Assigns a used block that was just cut out, and promises the marks for its free. */
static GAI_INLINE void gai_block_assign(galloc_pool *pool, gai_block *block, gai_stream *stream, size_t requested,
                                        uint64_t tag)
{
    pool->marks.promised += GAI_FREE_MARKS;
    block->requested = requested;
    block->tag = tag;
    block->stream_id = stream->stream_id;
    block->life = stream->life;
    block->stream = stream;
    gai_block_drop_own(pool, block, stream);
    if (!stream->blocks) gai_set_relaxed(&stream->busy_frees, 0);
    gai_set_relaxed(&stream->blocks, stream->blocks + 1);
    if (stream->capture) gai_block_mark_captured(pool, block, stream);
}

/* Gives bytes of a free block to the program. Marks of other streams stay: a third stream must honour them if the
   block is freed on a stream other than the one it is given to. NULL: no host memory, nothing changed. */
static gai_block *gai_block_take(galloc_pool *pool, gai_block *block, uintptr_t at, const gai_params *params)
{
    if (!gai_block_need(pool, block, at, params->bytes)) return NULL;
    block = gai_block_cut_out(pool, block, at, params->bytes, GAI_USED);
    block->room = params->growable ? params->bytes : 0;
    gai_block_assign(pool, block, params->stream, params->requested,
                     params->growable ? params->tag | GAI_SPECIAL : params->tag);
    return block;
}

/* The same for the beginning of a block found by a search, for a stream state that is not captured, without room. Such
   a block has merged with all that it can, so its rest has too. Its marks, if any, are the stream state's own: that on
   the part that is cut off is dropped at once. */
static GAI_INLINE gai_block *gai_block_take_first(galloc_pool *pool, gai_block *block, size_t bytes, gai_stream *stream,
                                                  size_t requested, uint64_t tag)
{
    uintptr_t cut = block->addr + bytes;
    gai_mark *mark = block->marks;
    if (!gai_block_need(pool, block, block->addr, bytes)) return NULL;
    if (bytes < block->bytes && gai_block_is_even(pool, block, cut)) {
        block = gai_block_cut_off(pool, block, bytes);
        if (mark && mark->begin < cut) {
            gai_stream_drops(stream, mark);
            mark->begin = cut;
            tag |= GAI_CACHED | GAI_DROPPED;
            block->age = mark->epoch;
        }
    } else if (bytes < block->bytes) {
        block = gai_block_cut_out(pool, block, block->addr, bytes, GAI_USED);
    } else {
        gai_set_remove(block);
        block->kind = GAI_USED;
        gai_marks_prune(pool, &block->marks);
    }
    gai_block_assign(pool, block, stream, requested, tag);
    return block;
}

/* Removes a block from the program; it is in no set yet. */
static void gai_block_untake(galloc_pool *pool, gai_block *block)
{
    block->requested = 0;
    block->tag = 0;
    block->room = 0;
    pool->marks.promised -= GAI_FREE_MARKS;
    gai_set_relaxed(&block->stream->blocks, block->stream->blocks - 1);
    block->stream = NULL;
    block->kind = GAI_BUSY;
}

/* The block that the program has and that begins at this address, or NULL. [lock] */
static gai_block *gai_block_used(galloc_pool *pool, const void *ptr)
{
    gai_block *block = gai_block_at((uintptr_t)ptr);
    if (!block || gai_load_pointer(&block->pool) != pool || !gai_load_pointer(&block->lent)) return NULL;
    return block->addr == (uintptr_t)ptr ? block : NULL;
}

/* Claims a used block from the program: no other call can have it until it is released or given out again. 0: it was
   not held. See gai_block for `lent`. */
static int gai_block_acquire(gai_block *block, const void *ptr)
{
    gai_stream *guard = (gai_stream *)gai_load_pointer(&block->lent);
    int had;
    if (!guard) return 0;
    gai_latch_on(&guard->cache.latch);
    had = gai_load_pointer(&block->lent) == guard && block->addr == (uintptr_t)ptr;
    if (had) gai_store_pointer(&block->lent, NULL);
    gai_latch_off(&guard->cache.latch);
    return had;
}

/* Claims the used block of the pool that begins at this address. NULL: there is none. */
static gai_block *gai_block_claim(galloc_pool *pool, const void *ptr)
{
    gai_block *block = gai_block_at((uintptr_t)ptr);
    if (!block || gai_load_pointer(&block->pool) != pool) return NULL;
    return gai_block_acquire(block, ptr) ? block : NULL;
}

/* Gives a block to the program, for the first time or again. */
static void gai_block_let_go(gai_block *block) { gai_store_pointer(&block->lent, block->stream); }

/* The block must be claimed. `stream`: of the call. */
static void gai_block_set_requested(galloc_pool *pool, gai_block *block, size_t bytes, const gai_stream *stream)
{
    size_t before = (size_t)block->requested;
    if (pool->trace) gai_trace_resized(pool, block, bytes, stream);
    gai_history_block(pool, GAI_FREED, block, gai_thread.stack);
    gai_set_relaxed(&block->requested, bytes);
    gai_history_block(pool, GAI_ALLOCATED, block, gai_thread.stack);
    pool->stats.live.current += bytes - before;
    if (bytes > before) pool->stats.live.total += bytes - before;
    gai_stat_peaks(pool);
}

/* ==== STREAM CACHE ================================================================================================ */
/* >>streamcache */

/* Stream caches: recently freed blocks by exact size, which calls on their stream use under the cache's latch alone.
   The first part runs without the pool's lock, the others with it: they stamp frees with marks and return cached
   blocks to the free sets. gai_cache explains unconfirmed and trusted blocks.
   Calls slabs, the maps, marks, blocks, statistics and take. */

/* An event is recorded on a stream once this many bytes, and at least its share of 1/GAI_EVENT_PART of the heap, were
   freed on it. This bounds both the memory that a stream destroyed without notice leaves unmarked and the number of
   events. More events saved no memory (docs/design.md). */
#define GAI_EVENT_BYTES (2 * GAI_MIB)
#define GAI_EVENT_PART 128 /* 1/128 of the heap may stay without an event, over all streams */
#define GAI_EVENT_FREES 64 /* frees after which a stream that holds nothing more gets an event */
#define GAI_EVENTS 128    /* pending events of a stream before its threshold doubles */

/* Blocks in a stream cache do not merge, so large blocks stay out of it unless lane_bytes allows them: on the ten
   traces blocks of 2 MiB and more would cost 0.2 to 1 % of memory. But an empty cache of a lone stream
   takes the block that the pool gave last, whatever its size, if no block was filed since: the search would give the
   next request of that size the same place, so the memory held does not change. */
#define GAI_CACHE_BLOCKS 256
#define GAI_CACHE_BYTES GAI_MIB /* default of lane_bytes */
#define GAI_CACHE_MOST (64 * GAI_MIB) /* its maximum */
#define GAI_UNCONFIRMED_BLOCKS 64
#define GAI_SPARSE 64 /* debug_sample from which on stream caches serve the other requests */
#define GAI_CACHE_BIN_PROBES 4      /* adjacent cache bins that may hold a size */

static int gai_pool_has_one_stream(const galloc_pool *pool) { return !pool->streams || !pool->streams->next; }

static int gai_stream_is_unknown(const gai_stream *stream) { return stream->capture_id == GAI_UNKNOWN_STREAMS; }

/* With debug, do too many blocks get a guard for stream caches? */
static int gai_pool_debugs_all(const galloc_pool *pool)
{
    return pool->config.debug && pool->config.debug_sample < GAI_SPARSE;
}

/* Does the next allocation get a guard? Reset statistics make the difference wrap, hence the sign. */
static GAI_INLINE int gai_pool_is_to_watch(const galloc_pool *pool)
{
    return (int64_t)(pool->stats.mallocs - pool->watch_at) >= 0;
}

/* Sets how many mallocs the stream cache serves until the pool sees whether the next one gets a guard. Half of
   debug_sample at most, because the mallocs of other stream caches count as well. [lock], [latch] */
GAI_APART
static void gai_cache_renew(const galloc_pool *pool, gai_cache *cache)
{
    int64_t left = (int64_t)(pool->look_at - pool->stats.mallocs - (cache->mallocs - cache->seen));
    cache->serves = cache->mallocs + gai_min((size_t)(left > 0 ? left : 0), (size_t)pool->config.debug_sample / 2);
}

/* Counts the mallocs of a stream cache since its last flush towards the next guard. The flush counts them in
   stats.mallocs, so it takes that back (gai_cache_unsee). [lock], [latch] */
static void gai_cache_see(galloc_pool *pool, gai_cache *cache)
{
    pool->watch_at -= cache->mallocs - cache->seen;
    pool->look_at -= cache->mallocs - cache->seen;
    cache->seen = cache->mallocs;
}

GAI_APART
static void gai_cache_unsee(galloc_pool *pool, gai_cache *cache)
{
    pool->watch_at += cache->seen;
    pool->look_at += cache->seen;
    cache->seen = 0;
}

/* ---- without the pool's lock ---- */

/* The first cache bin to probe for a size. */
static size_t gai_cache_bin_of(size_t bytes)
{
    return (size_t)((uint64_t)(bytes >> GAI_UNIT_LOG2) * 0x9e3779b97f4a7c15u >> (64 - GAI_CACHE_BINS_LOG2));
}

/* Puts a block into a cache bin of its size. 0: all bins probed have other sizes. */
static int gai_cache_bin_push(gai_cache *cache, gai_block *block)
{
    size_t at = gai_cache_bin_of(block->bytes), probes;
    for (probes = 0; probes < GAI_CACHE_BIN_PROBES; probes++, at = (at + 1) % GAI_CACHE_BINS) {
        gai_cache_bin *bin = &cache->bins[at];
        if (cache->filled >> at & 1 && bin->bytes != block->bytes) continue;
        block->next_bin = cache->filled >> at & 1 ? bin->first : NULL;
        bin->first = block;
        bin->bytes = block->bytes;
        cache->filled |= (uint64_t)1 << at;
        cache->blocks++;
        cache->bytes += block->bytes;
        cache->live_out += (size_t)block->requested;
        return 1;
    }
    return 0;
}

/* Takes the latest block of a size from its cache bin, or NULL. */
static gai_block *gai_cache_bin_pop(gai_cache *cache, size_t bytes)
{
    size_t at = gai_cache_bin_of(bytes), probes;
    for (probes = 0; probes < GAI_CACHE_BIN_PROBES; probes++, at = (at + 1) % GAI_CACHE_BINS) {
        gai_cache_bin *bin = &cache->bins[at];
        gai_block *block = bin->first;
        if (!(cache->filled >> at & 1) || bin->bytes != bytes) continue;
        bin->first = block->next_bin;
        if (!bin->first) cache->filled ^= (uint64_t)1 << at;
        if (bytes == cache->large) cache->large = 0;
        cache->blocks--;
        cache->bytes -= bytes;
        return block;
    }
    return NULL;
}

static GAI_INLINE void gai_unconfirmed_push(gai_cache *cache, gai_block *block)
{
    block->next_bin = cache->unconfirmed;
    cache->unconfirmed = block;
    cache->unconfirmed_blocks++;
    cache->unconfirmed_bytes += block->bytes;
}

static GAI_INLINE gai_block *gai_unconfirmed_pop(gai_cache *cache, gai_block **list)
{
    gai_block *block = *list;
    *list = block->next_bin;
    if (block->bytes == cache->large) cache->large = 0;
    cache->unconfirmed_blocks--;
    cache->unconfirmed_bytes -= block->bytes;
    return block;
}

/* Prepends the reversed list to another. */
static gai_block *gai_blocks_join(gai_block *list, gai_block *rest)
{
    while (list) {
        gai_block *block = list;
        list = block->next_bin;
        block->next_bin = rest;
        rest = block;
    }
    return rest;
}

/* The stream is confirmed: moves the unconfirmed blocks to the cache bins, the oldest first. Blocks for which there is
   no bin stay unconfirmed. */
static void gai_cache_confirm(gai_cache *cache)
{
    gai_block *list = gai_blocks_join(cache->orphans, gai_blocks_join(cache->unconfirmed, NULL));
    cache->unconfirmed = cache->orphans = NULL;
    cache->unconfirmed_blocks = cache->unconfirmed_bytes = 0;
    while (list) {
        gai_block *block = list;
        list = block->next_bin;
        if (!gai_cache_bin_push(cache, block)) gai_unconfirmed_push(cache, block);
    }
}

/* Confirms the unconfirmed blocks, then looks for the size in the cache bins. */
GAI_APART
static gai_block *gai_cache_search(gai_cache *cache, size_t bytes)
{
    if (cache->unconfirmed_blocks) gai_cache_confirm(cache);
    return gai_cache_bin_pop(cache, bytes);
}

/* How a call ends that has found its stream state without the pool's lock. */
enum gai_outcome {
    GAI_DONE,  /* the stream cache served it */
    GAI_FOREIGN, /* another stream state's latch guards the block, or the program does not have it */
    GAI_ASK,   /* the stream cache would take the block after a query of the stream's id */
    GAI_TAKEN, /* the pool must do it; the block has been claimed from the program */
    GAI_TAKEN_EMPTY, /* the same, and the stream cache was empty */
    GAI_KNOWN, /* the pool must do it; the stream has been queried */
    GAI_KNOWN_EMPTY, /* the same, and the stream cache was empty */
    GAI_DUE,   /* the pool must see first whether the allocation gets a guard; the stream has been queried */
    GAI_LONG   /* the whole call is the pool's */
};

/* Is the cache empty and without counts to report, except for busy_frees? Then a call need not flush it to see
   all free memory. */
static GAI_INLINE int gai_cache_is_empty(const gai_cache *cache)
{
    return !(cache->unconfirmed_blocks | cache->blocks | cache->mallocs);
}

/* The most recently freed block of this size, which becomes the program's; NULL: there is none, and *outcome becomes
   GAI_KNOWN, GAI_KNOWN_EMPTY or GAI_DUE. The stream cache is open, and the caller has confirmed the stream. [latch] */
static GAI_INLINE gai_block *gai_cache_pop(gai_cache *cache, size_t bytes, size_t requested, uint32_t tag,
                                           enum gai_outcome *outcome)
{
    gai_block *block = NULL;
    if (cache->mallocs >= cache->serves) {
        *outcome = GAI_DUE;
        return NULL;
    }
    if (cache->unconfirmed && cache->unconfirmed->bytes == bytes) {
        block = gai_unconfirmed_pop(cache, &cache->unconfirmed);
        cache->live_out += (size_t)block->requested;
    } else if (cache->unconfirmed_blocks > 1 || cache->filled) { /* blocks besides the one just compared */
        block = gai_cache_search(cache, bytes);
    }
    if (block) {
        cache->mallocs++;
        cache->live_in += requested;
        cache->allocated_in += bytes;
        gai_set_relaxed(&block->requested, requested);
        gai_set_relaxed(&block->tag, GAI_CACHED | tag);
    } else {
        *outcome = gai_cache_is_empty(cache) ? GAI_KNOWN_EMPTY : GAI_KNOWN;
    }
    return block;
}

/* The bytes that count against `most` and `enough`. */
static size_t gai_cache_held(const gai_cache *cache) { return cache->bytes - cache->large + cache->unconfirmed_bytes; }

/* See galloc_pool.latest. [latch] */
static int gai_block_is_latest(const gai_block *block)
{
    const galloc_pool *pool = (const galloc_pool *)gai_load_pointer(&block->pool);
    return gai_load_pointer(&pool->latest) == block;
}

/* The rest of gai_cache_put: checks the bounds and confirms blocks. The stream cache is open. */
GAI_APART
static enum gai_outcome gai_cache_put_more(gai_cache *cache, gai_block *block, int confirmed)
{
    size_t held = gai_cache_held(cache), blocks = cache->blocks + cache->unconfirmed_blocks;
    if (!blocks && block->bytes > cache->most && gai_block_is_latest(block)) {
        cache->large = block->bytes;
        gai_unconfirmed_push(cache, block);
        return GAI_DONE;
    }
    if (block->bytes > cache->most - held || held > cache->enough || blocks >= GAI_CACHE_BLOCKS)
        return gai_cache_is_empty(cache) ? GAI_TAKEN_EMPTY : GAI_TAKEN;
    if (cache->unconfirmed_blocks < GAI_UNCONFIRMED_BLOCKS &&
        (cache->trusted || cache->unconfirmed_bytes + block->bytes <= GAI_EVENT_BYTES)) {
        gai_unconfirmed_push(cache, block);
        return GAI_DONE;
    }
    if (!cache->trusted && !confirmed) return GAI_ASK;
    gai_cache_confirm(cache);
    return gai_cache_bin_push(cache, block) ? GAI_DONE : GAI_TAKEN;
}

/* Must the pool see this free, because it leaves the stream state nothing after many frees? See busy_frees in the
   comment of gai_cache. */
static GAI_INLINE int gai_cache_shows(gai_cache *cache, const gai_stream *stream, const gai_block *block)
{
    if (cache->blocks + cache->unconfirmed_blocks + 1 != gai_counted(&stream->blocks) || block->stream != stream)
        return 0;
    if (cache->busy_frees + gai_counted(&stream->busy_frees) >= GAI_EVENT_FREES) return 1;
    cache->busy_frees = 0 - gai_counted(&stream->busy_frees); /* the sum of both becomes 0 */
    return 0;
}

/* May the stream cache give a block that was freed on its stream out again without looking at its marks? Yes if the
   block was given to this very stream state: that use came after all its marks. */
static GAI_INLINE int gai_block_suits(const gai_block *block, uint64_t life)
{
    return block->life == life && !(block->tag & (GAI_SPECIAL | GAI_WATCHED_BLOCK));
}

/* Claims a block from the program and puts it into the stream cache. GAI_TAKEN and GAI_TAKEN_EMPTY leave the claimed
   block to the pool. With any other outcome the program keeps it; GAI_LONG: the stream cache is shut. [latch] */
static GAI_INLINE enum gai_outcome gai_cache_put(gai_stream *stream, uint64_t life, gai_block *block, const void *ptr,
                                                 int confirmed)
{
    gai_cache *cache = &stream->cache;
    enum gai_outcome outcome = GAI_LONG;
    if (gai_load_pointer(&block->lent) != stream || block->addr != (uintptr_t)ptr) {
        outcome = GAI_FOREIGN;
    } else if (cache->open == life) {
        if (!gai_block_suits(block, life) || gai_cache_shows(cache, stream, block)) {
            outcome = GAI_TAKEN;
        } else if (!cache->unconfirmed_blocks && !cache->blocks &&
                   block->bytes <= cache->alone) { /* typical of malloc-free pairs */
            gai_unconfirmed_push(cache, block);
            outcome = GAI_DONE;
        } else {
            outcome = gai_cache_put_more(cache, block, confirmed);
        }
        if (outcome != GAI_ASK) gai_store_pointer(&block->lent, NULL);
        cache->busy_frees += outcome == GAI_DONE;
    }
    return outcome;
}

/* ---- with the pool's lock ---- */

static int gai_cache_has_large(gai_cache *cache)
{
    int has;
    gai_latch_on(&cache->latch);
    has = cache->large != 0;
    gai_latch_off(&cache->latch);
    return has;
}

/* The epoch of frees made now on the stream. A retired stream has had its last event. */
static uint64_t gai_stream_stamp(const gai_stream *stream)
{
    return stream->retired ? stream->epoch - 1 : stream->epoch;
}

/* Drops the marks that a free on `stream` covers: complete ones, earlier ones of the same stream, and those that it
   waits for already. Others stay: the block was given to another stream, which need not have used it. */
static void gai_block_inherit(galloc_pool *pool, gai_block *block, const gai_stream *stream)
{
    gai_mark **at = &block->marks;
    while (*at) {
        const gai_mark *mark = *at;
        if (gai_mark_is_complete(mark) || mark->stream == stream ||
            gai_stream_waited(stream, mark->stream) >= mark->epoch)
            gai_mark_drop(pool, at);
        else at = &(*at)->next;
    }
}

/* Stamps [begin, end) as freed now on the mark's stream. */
static GAI_INLINE void gai_mark_stamp(gai_mark *mark, uintptr_t begin, uintptr_t end)
{
    gai_stream *stream = mark->stream;
    stream->uses++;
    mark->epoch = stream->freed = gai_stream_stamp(stream);
    mark->begin = begin;
    mark->end = end;
    stream->unmarked += end - begin;
}

/* Takes a mark that names a stream state only, until it is stamped: one promised to a used block for its free, or one
   that the caller has ensured. */
static gai_mark *gai_mark_of(galloc_pool *pool, gai_stream *stream)
{
    gai_mark *mark = (gai_mark *)gai_slab_take(&pool->marks);
    mark->next = NULL;
    mark->stream = stream;
    return mark;
}

/* Stamps a used block without marks as freed now on the stream. */
static GAI_INLINE void gai_block_stamp_own(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    block->marks = gai_mark_of(pool, stream);
    gai_mark_stamp(block->marks, block->addr, block->addr + block->bytes);
}

/* Stamps marks that name only their stream states, and adds them to the block's. */
static void gai_block_stamp(galloc_pool *pool, gai_block *block, gai_mark *marks)
{
    while (marks) {
        gai_mark *mark = marks, *own = block->marks;
        marks = mark->next;
        if (own && !own->next && own->stream == mark->stream) { /* usual case: only the stamp changes */
            own->stream->uses--;
            gai_mark_stamp(own, block->addr, block->addr + block->bytes);
            gai_slab_give(&pool->marks, mark);
            continue;
        }
        gai_block_inherit(pool, block, mark->stream);
        gai_mark_stamp(mark, block->addr, block->addr + block->bytes);
        if (block->marks) {
            gai_marks_add(pool, &block->marks, mark);
        } else {
            mark->next = NULL;
            block->marks = mark;
        }
    }
}

/* The current mapping at an address. NULL: there is none, only a stale alias, or the memory of another backend. */
static GAI_INLINE gai_mapping *gai_page_at(uintptr_t addr)
{
    void **child = gai_map_entry_at(&gai_process.page_map, addr);
    return child ? (gai_mapping *)gai_load_pointer(child) : NULL;
}

/* Notes that the block's pages were in use until now. */
static void gai_block_touch(const galloc_pool *pool, const gai_block *block)
{
    uintptr_t at = block->addr, end = block->addr + block->bytes;
    while (at < end) {
        gai_mapping *mapping = gai_page_at(at);
        mapping->page->used = pool->clock;
        at = mapping->addr + mapping->bytes;
    }
}

/* The bytes of a free block of a lost segment are gone. */
GAI_APART
static void gai_block_lose(galloc_pool *pool, const gai_block *block)
{
    gai_history_event(pool, GAI_UNMAPPED_PART, block->addr, block->bytes, 0, 0);
    gai_stat_page_gone(pool, block->segment->whole->page, block->bytes, 0);
    gai_stat_cached(pool);
}

/* Files a free block, or drops it where its segment is lost. */
static void gai_block_give(galloc_pool *pool, gai_block *block)
{
    block->age = ++pool->clock;
    gai_store_pointer(&pool->latest, NULL);
    block->kind = GAI_BUSY;
    if (!block->segment->lost) {
        if (pool->collects) gai_block_touch(pool, block);
        (void)gai_block_file(pool, block, 0);
        return;
    }
    gai_block_lose(pool, block);
}

/* ---- back to the pool ---- */

/* The stream state with this life, or NULL if it has been forgotten. */
static gai_stream *gai_stream_of_life(const galloc_pool *pool, uint64_t life)
{
    gai_stream *stream = pool->streams;
    while (stream && stream->life != life) stream = stream->next;
    return stream;
}

/* The most bytes that the stream cache may hold. With several streams its content counts as unmarked bytes, except on
   legacy, where nothing is recorded unless requested. */
static GAI_INLINE size_t gai_cache_bound(const galloc_pool *pool, const gai_stream *stream)
{
    if (gai_pool_has_one_stream(pool) || (stream->handle == CU_STREAM_LEGACY && !stream->wanted))
        return gai_min(pool->device_bytes / 256, pool->config.lane_bytes);
    if (!pool->config.lane_bytes) return 0;
    return GAI_EVENT_BYTES - gai_min(stream->unmarked + 1, GAI_EVENT_BYTES);
}

/* The last step of an allocation: may the stream cache take this block though it exceeds the bound? Not with several
   streams, where the bound also limits the bytes without a mark. */
static GAI_INLINE void gai_block_note_latest(galloc_pool *pool, gai_block *block, const gai_stream *stream)
{
    if (block->bytes > stream->cache.most && gai_pool_has_one_stream(pool) && pool->config.lane_bytes)
        gai_store_pointer(&pool->latest, block);
}

GAI_APART
static void gai_cache_change(const galloc_pool *pool, gai_stream *stream, uint64_t open, size_t most)
{
    gai_cache *cache = &stream->cache;
    gai_latch_on(&cache->latch);
    cache->open = open;
    cache->most = gai_max(most, gai_cache_held(cache));
    cache->enough = pool->config.lane_bytes;
    cache->serves = SIZE_MAX;
    if (pool->config.debug) gai_cache_renew(pool, cache);
    cache->trusted = !pool->config.stream_check || gai_is_default_stream(stream->handle);
    cache->alone = cache->trusted ? most : gai_min(most, GAI_EVENT_BYTES);
    gai_latch_off(&cache->latch);
}

/* Opens the stream cache for calls that bypass the pool, or shuts it, and sets its bounds. */
static GAI_INLINE void gai_cache_set(const galloc_pool *pool, gai_stream *stream)
{
    int shut = pool->lost | pool->caches_off | stream->retired | stream->asked;
    uint64_t open = shut || pool->broken ? 0 : stream->life;
    size_t most = gai_cache_bound(pool, stream);
    if (stream->cache.open != open || stream->cache.most != most) gai_cache_change(pool, stream, open, most);
}

/* A block that its own stream uses again has lost the mark of its earlier use. A free on another stream restores it,
   with the current epoch if its own is unknown; an event covers that epoch only if the stream makes another call. A
   forgotten stream state has no pending work. */
static void gai_block_stamp_cache(galloc_pool *pool, gai_block *block)
{
    gai_stream *stream = gai_stream_of_life(pool, block->life);
    uintptr_t end = block->addr + block->bytes;
    if (!stream || (block->tag & GAI_DROPPED && block->age <= stream->done)) return;
    if (block->tag & GAI_DROPPED) {
        gai_marks_add(pool, &block->marks, gai_mark_new(pool, stream, block->age, block->addr, end));
        return;
    }
    gai_block_stamp(pool, block, gai_mark_of(pool, stream));
    gai_cache_set(pool, stream); /* its unmarked bytes have grown */
}

/* Files a block of a stream cache as free. Its stamp is the current epoch, which is never earlier than that of the
   free. */
static void gai_block_uncache(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    if (block->marks) gai_block_stamp(pool, block, gai_mark_of(pool, stream));
    else gai_block_stamp_own(pool, block, stream);
    gai_block_untake(pool, block);
    gai_block_give(pool, block);
}

/* Flushes the stream cache into the free sets, where its blocks merge and other streams may use them as their marks
   allow. Unconfirmed blocks move only if the stream is confirmed or trusted. Returns 0 if there was nothing. */
static int gai_stream_flush(galloc_pool *pool, gai_stream *stream, int confirmed)
{
    gai_cache *cache = &stream->cache;
    gai_block *list = NULL;
    gai_latch_on(&cache->latch);
    if (gai_cache_is_empty(cache) && !cache->busy_frees) {
        gai_latch_off(&cache->latch);
        return 0;
    }
    if (cache->unconfirmed_blocks && (confirmed || cache->trusted)) {
        gai_unconfirmed_tell(&pool->stats, cache->unconfirmed_blocks, cache->unconfirmed_bytes,
                             gai_unconfirmed_live(cache));
        list = gai_blocks_join(cache->unconfirmed, gai_blocks_join(cache->orphans, NULL));
        cache->unconfirmed = cache->orphans = NULL;
        cache->unconfirmed_blocks = cache->unconfirmed_bytes = cache->large = 0;
    }
    if (cache->busy_frees) gai_set_relaxed(&stream->busy_frees, stream->busy_frees + cache->busy_frees);
    cache->busy_frees = 0;
    if (cache->mallocs || cache->blocks) {
        gai_cache_tell(cache, &pool->stats);
        if (cache->mallocs) stream->handed = gai_stream_stamp(stream);
        cache->serves -= cache->mallocs;
        if (cache->seen) gai_cache_unsee(pool, cache);
        cache->mallocs = 0;
        cache->live_in = cache->live_out = cache->allocated_in = 0;
        cache->blocks = cache->bytes = 0;
    }
    for (; cache->filled; cache->filled &= cache->filled - 1) {
        const gai_cache_bin *bin = &cache->bins[gai_lowest(cache->filled)];
        if (bin->bytes == cache->large) cache->large = 0;
        list = gai_blocks_join(bin->first, list);
    }
    gai_latch_off(&cache->latch);
    while (list) {
        gai_block *block = list;
        list = block->next_bin;
        gai_block_uncache(pool, block, stream);
    }
    return 1;
}

/* Turns all unconfirmed blocks into orphans before a wait for all known contexts (gai_pool_wait_for_orphans), which
   completes their uses on whatever stream they were freed. Returns whether there are any. */
static int gai_pool_gather_orphans(galloc_pool *pool)
{
    gai_stream *stream;
    int some = 0;
    for (stream = pool->streams; stream; stream = stream->next) {
        gai_cache *cache = &stream->cache;
        gai_latch_on(&cache->latch);
        cache->orphans = gai_blocks_join(cache->unconfirmed, cache->orphans);
        cache->unconfirmed = NULL;
        some |= cache->orphans != NULL;
        gai_latch_off(&cache->latch);
    }
    return some;
}

/* Files the orphans after that wait; they need no mark. */
static void gai_pool_file_orphans(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) {
        gai_cache *cache = &stream->cache;
        for (;;) {
            gai_block *block = NULL;
            gai_latch_on(&cache->latch);
            if (cache->orphans) block = gai_unconfirmed_pop(cache, &cache->orphans);
            gai_latch_off(&cache->latch);
            if (!block) break;
            gai_unconfirmed_tell(&pool->stats, 1, block->bytes, (size_t)block->requested);
            gai_block_untake(pool, block);
            gai_block_give(pool, block);
        }
    }
}

/* Flushes all stream caches. Unconfirmed blocks stay where they are, except in caches that are trusted. */
static void gai_pool_flush(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) (void)gai_stream_flush(pool, stream, 0);
}

/* From now on every call goes to the pool. */
static void gai_pool_shut_caches(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) gai_cache_shut(&stream->cache);
}

/* ==== CAPTURE =================================================================================================== */
/* >>capture */

/* Captures: the order of work within a captured graph, and the lifetime of the graphs that use memory of a pool. Owns
   pool->captures, guarded by the pool's lock. The driver is asked about a graph without that lock, with `recording`
   held at most. Calls the driver table, slabs, bins, marks and blocks. */

/* ---- the order that is captured ---- */

#define GAI_WALK 512       /* nodes that a walk visits at most, backwards from the stream's present end */
#define GAI_WALK_INDEX 1024

/* Nodes that precede everything captured on a stream from now on. */
typedef struct gai_walk {
    size_t n;
    int partial; /* some nodes could not be read, or are too far away */
    CUgraphNode nodes[GAI_WALK];
    unsigned short index[GAI_WALK_INDEX]; /* hash table: 1 + a node's place in `nodes`; 0: empty */
} gai_walk;

/* The index slot of a node, or the empty slot for it. */
static size_t gai_walk_find(const gai_walk *walk, CUgraphNode node)
{
    size_t at = (size_t)((uint64_t)(uintptr_t)node * 0x9e3779b97f4a7c15u >> 54) % GAI_WALK_INDEX;
    while (walk->index[at] && walk->nodes[walk->index[at] - 1] != node) at = (at + 1) % GAI_WALK_INDEX;
    return at;
}

static void gai_walk_add(gai_walk *walk, const CUgraphNode *nodes, size_t n)
{
    for (; n > 0; n--, nodes++) {
        size_t at = gai_walk_find(walk, *nodes);
        if (!*nodes || walk->index[at]) continue;
        walk->partial |= walk->n == GAI_WALK;
        if (walk->n == GAI_WALK) return;
        walk->nodes[walk->n++] = *nodes;
        walk->index[at] = (unsigned short)walk->n;
    }
}

/* Starts a walk at the stream's present end. */
static void gai_walk_begin(gai_walk *walk, CUstream stream, unsigned long long capture)
{
    CUgraphNode nodes[GAI_WALK_WIDTH];
    size_t n;
    memset(walk, 0, sizeof *walk);
    walk->partial = !gai_capture_nodes(stream, capture, nodes, &n, GAI_WALK_WIDTH);
    if (!walk->partial) gai_walk_add(walk, nodes, n);
}

/* Adds the direct dependencies of the node at `at`. */
static void gai_walk_on(gai_walk *walk, size_t at)
{
    CUgraphNode nodes[GAI_WALK_WIDTH];
    size_t n = GAI_WALK_WIDTH;
    CUresult result = gai_cu.GraphNodeGetDependencies(walk->nodes[at], nodes, GAI_NO_EDGES &n);
    walk->partial |= result || n >= GAI_WALK_WIDTH;
    if (!result) gai_walk_add(walk, nodes, gai_min(n, GAI_WALK_WIDTH));
}

/* Are all these nodes among those found? */
static int gai_walk_covers(const gai_walk *walk, const CUgraphNode *nodes, size_t n)
{
    size_t i = 0;
    while (i < n && walk->index[gai_walk_find(walk, nodes[i])]) i++;
    return i == n;
}

/* Does the stream's next work come after these nodes? If the walk is partial and finds no answer, it counts as yes. */
static int gai_walk_reaches(gai_walk *walk, const CUgraphNode *nodes, size_t n)
{
    size_t at = 0;
    while (!gai_walk_covers(walk, nodes, n)) {
        if (at == walk->n) return walk->partial;
        gai_walk_on(walk, at++);
    }
    return 1;
}

/* ---- captures ---- */

/* Gives up one of the two shares in a capture; the last one frees it. */
static void gai_capture_drop(gai_capture *capture)
{
    if (gai_swap(&capture->owners, 2, 1)) return;
    (void)gai_load(&capture->owners); /* orders the other owner's accesses before the free */
    GALLOC_FREE(capture);
}

/* CUDA calls this when the graph, its instances and their launches are gone. It may run in any thread, with locks of
   the driver or of the pool held, so it takes no lock and makes no CUDA call. */
static void CUDAAPI gai_capture_ends(void *capture)
{
    gai_capture_drop((gai_capture *)capture);
    (void)gai_next(&gai_process.graph_ends); /* gai_pool_reap then sees the drop */
}

#define GAI_REAP UINT64_MAX

/* Can the graph of the capture no longer run? */
static int gai_capture_has_ended(const gai_capture *capture)
{
    return capture->lost || gai_load(&capture->owners) == 1;
}

static gai_capture *gai_capture_find(const galloc_pool *pool, unsigned long long id)
{
    gai_capture *capture = pool->captures;
    while (capture && capture->id != id) capture = capture->next;
    return capture;
}

/* Gives the captured graph a share in the capture, through a user object that ends with the graph. In a scope. */
static CUresult gai_capture_share(gai_capture *capture, CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    CUuserObject object = NULL;
    unsigned long long id = 0;
    CUresult result = gai_capture_of(stream, &status, &id, &graph);
    if (!result && id != capture->id) result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!result)
        result = gai_cu.UserObjectCreate(&object, capture, gai_capture_ends, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    if (result) {
        capture->owners = 1;
        return result;
    }
    result = gai_cu.GraphRetainUserObject(graph, object, 1, CU_GRAPH_USER_OBJECT_MOVE);
    if (result) (void)gai_cu.UserObjectRelease(object, 1); /* this gives up the graph's share */
    return result;
}

/* A new capture with a share for its graph. NULL: site->refused has the driver's error, or there is no host memory. */
static gai_capture *gai_capture_new(gai_site *site)
{
    gai_scope scope;
    gai_capture *capture = (gai_capture *)GALLOC_MALLOC(sizeof *capture);
    if (!capture) return NULL;
    memset(capture, 0, sizeof *capture);
    capture->id = site->capture;
    capture->owners = 1;
    site->refused = gai_scope_enter(&scope, site->context);
    if (!site->refused) {
        capture->owners = 2;
        site->refused = gai_capture_share(capture, site->handle);
        gai_scope_leave(&scope);
    }
    if (!site->refused) return capture;
    gai_capture_drop(capture);
    return NULL;
}

/* The n-th group that has begun and has not ended, or NULL. */
static galloc_graph *gai_graph_begun(galloc_pool *pool, size_t n)
{
    galloc_graph *graph;
    gai_lock_on(&pool->lock);
    for (graph = pool->graphs; graph; graph = graph->next)
        if (graph->captured && !n--) break;
    gai_lock_off(&pool->lock);
    return graph;
}

/* Is the group's stream part of the site's capture? That stream lives until the group ends. The per-thread default
   stream of another thread has the same handle but is another stream. */
static int gai_graph_has(const galloc_graph *graph, const gai_site *site)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    gai_scope scope;
    CUcontext context = graph->context;
    if (graph->key == site->stream_id) return 1;
    if (context && gai_context_health(context, graph->context_id) != GAI_ALIVE) return 0;
    if (context && gai_scope_push(&scope, context)) return 0;
    if (graph->key == gai_stream_key_in(graph->captured, context))
        (void)gai_capture_of(graph->captured, &status, &id, NULL);
    if (context) gai_scope_leave(&scope);
    return id == site->capture;
}

/* Records a capture that is new to the pool, and its group. Two threads may record the same one; both records end with
   its graph. `recording` keeps groups and their streams alive. A capture cannot wait for the device, so streams that
   skipped marks are requested to record one. */
static void gai_pool_note_capture(galloc_pool *pool, gai_site *site)
{
    gai_capture *capture = gai_capture_new(site);
    galloc_graph *graph;
    gai_stream *stream;
    size_t n = 0;
    if (!capture) return;
    gai_lock_on(&pool->recording);
    while ((graph = gai_graph_begun(pool, n)) != NULL && !gai_graph_has(graph, site)) n++;
    gai_lock_on(&pool->lock);
    capture->graph = graph;
    if (graph) graph->captures++;
    capture->next = pool->captures;
    pool->captures = capture;
    if (gai_capture_has_ended(capture)) pool->graph_ends = GAI_REAP; /* it was not in the list when it ended */
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->skipped) gai_stream_ask(stream);
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->recording);
}

static void gai_stream_forget_positions(galloc_pool *pool, gai_stream *stream)
{
    while (stream->positions) {
        gai_graph_position *position = stream->positions;
        stream->positions = position->older;
        gai_slab_give(&pool->positions, position);
    }
}

/* The graph will not run again, so all frees on this captured stream are complete. [lock] */
static void gai_stream_end_capture(galloc_pool *pool, gai_stream *stream)
{
    gai_stream_forget_positions(pool, stream);
    stream->done = stream->epoch++;
    stream->unmarked = stream->skipped = 0;
    stream->retired = 1;
    stream->capture = NULL;
}

/* Ends the groups that are released and have no captures. [lock] */
static void gai_pool_part_graphs(galloc_pool *pool)
{
    galloc_graph **at = &pool->graphs, *graph;
    while ((graph = *at) != NULL) {
        if (!graph->handle && !graph->captures) {
            *at = graph->next;
            GALLOC_FREE(graph);
        } else {
            at = &graph->next;
        }
    }
}

/* Removes the captures that are gone: their graphs are, or their group was released. All at once, since a program may
   end thousands of graphs together. [lock] */
static void gai_pool_forget_captures(galloc_pool *pool)
{
    gai_capture **at = &pool->captures, *capture;
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->capture && stream->capture->gone) gai_stream_end_capture(pool, stream);
    while ((capture = *at) != NULL) {
        if (!capture->gone) {
            at = &capture->next;
            continue;
        }
        *at = capture->next;
        if (capture->graph) capture->graph->captures--;
        gai_capture_drop(capture);
    }
    if (pool->variant.capture_ended) pool->variant.capture_ended(pool);
    gai_pool_part_graphs(pool);
}

/* Does a graph that may still be launched own memory of the pool? */
static int gai_pool_has_captured(const galloc_pool *pool)
{
    const gai_stream *stream = pool->streams;
    while (stream && !(stream->capture && stream->uses)) stream = stream->next;
    return stream != NULL;
}

/* Bytes of a free block that others cannot use before this stream has done more work; stream == NULL: that graphs own.
   Bytes of two graphs may count twice, within the block's size. */
static size_t gai_block_stranded(const gai_block *block, const gai_stream *stream)
{
    const gai_mark *mark;
    size_t bytes = 0;
    for (mark = block->marks; mark; mark = mark->next)
        if (stream ? mark->stream == stream && !gai_mark_is_complete(mark) : mark->stream->capture != NULL)
            bytes += mark->end - mark->begin;
    return gai_min(bytes, block->bytes);
}

/* The same of the pool's free memory, without stream caches. [lock] */
static size_t gai_pool_stranded(const galloc_pool *pool, const gai_stream *stream)
{
    const gai_set *set;
    const gai_block *block;
    const gai_mapping *mapping;
    size_t bytes = 0;
    for (set = &pool->mixed; set; set = set->next)
        if (!set->stream || (stream ? set->stream == stream : set->stream->capture != NULL))
            for (block = set->oldest; block; block = block->newer) bytes += gai_block_stranded(block, stream);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (gai_block_is_parked(mapping->block)) bytes += gai_block_stranded(mapping->block, stream);
    return bytes;
}

/* Bytes of free memory that graphs own. [lock] */
static size_t gai_pool_captured(const galloc_pool *pool)
{
    return gai_pool_has_captured(pool) ? gai_pool_stranded(pool, NULL) : 0;
}

/* ==== STREAMS =================================================================================================== */
/* >>streams */

/* Stream states: looking them up, creating, holding and removing them. Also handles contexts that were reset. Guarded
   by the pool's lock, which is released while the driver is asked about a new stream. Calls the driver table and the
   sections from slab to capture. */

/* The segment's memory is gone with its context. Free blocks of the segment become unavailable; used ones stay until
   the program frees them. Then the segment ends without a driver call. [lock] */
static void gai_segment_lose(galloc_pool *pool, gai_segment *segment)
{
    gai_block *block;
    segment->lost = 1;
    pool->lost++;
    if (segment->outside) pool->outside -= segment->bytes;
    for (block = segment->first; block; block = block->next) {
        if (!gai_block_is_free(block)) continue;
        gai_set_remove(block);
        block->kind = GAI_BUSY;
        gai_block_lose(pool, block);
    }
}

/* The pool's context was reset: gives up all memory that ended with it. [lock] */
static void gai_pool_lose_context(galloc_pool *pool)
{
    gai_segment *segment;
    for (segment = pool->segments; segment; segment = segment->next)
        if (segment->fixed && !segment->lost) gai_segment_lose(pool, segment);
    gai_budget_give(pool, pool->kept);
    gai_stat_kept(pool, 0);
    pool->driver_pool = NULL; /* it ended with its context */
    if (!pool->lost) return;
    gai_pool_shut_caches(pool);
    gai_pool_flush(pool);
    (void)gai_pool_gather_orphans(pool); /* no work can use lost memory, so no confirmation is needed */
    gai_pool_file_orphans(pool);
}

static gai_stream **gai_stream_bucket(galloc_pool *pool, unsigned long long key)
{
    return &pool->stream_index[key % GAI_STREAM_INDEX];
}

#define GAI_STREAMS_KEPT 64 /* with more plain stream states than this, idle ones are forgotten even if not retired */

/* Have so many stream states been made since the last sweep that idle ones may have piled up? [lock] */
static int gai_pool_is_crowded(const galloc_pool *pool)
{
    return pool->streams_made - pool->streams_swept > GAI_STREAMS_KEPT;
}

/* Adds a stream state and gives it a new life. The second one bounds the cache of the first, whose frees may matter to
   another stream from now on. The next free looks for idle ones if many were added. [lock] */
static void gai_stream_link(galloc_pool *pool, gai_stream *stream)
{
    stream->life = gai_next(&gai_process.lives);
    stream->epoch = 1;
    stream->free.stream = stream;
    gai_set_link(pool, &stream->free);
    stream->next = pool->streams;
    pool->streams = stream;
    pool->stream_count += (size_t)gai_stream_is_plain(stream);
    pool->streams_made++;
    if (gai_pool_is_crowded(pool)) pool->collector.look = 0;
    if (!stream->next || stream->next->next) return;
    stream = stream->next; /* the first stream state is no longer alone */
    /* Before the look at the cache: a free under way has already put its block there, or will see NULL. */
    gai_store_pointer(&pool->latest, NULL);
    if (stream->cache.most > GAI_EVENT_BYTES || gai_cache_has_large(&stream->cache)) {
        gai_cache_shut(&stream->cache);
        (void)gai_stream_flush(pool, stream, 0);
        if (gai_cache_has_large(&stream->cache)) gai_stream_ask(stream); /* its next call confirms and flushes it */
    }
    gai_cache_set(pool, stream);
}

/* The stream state for work on unknown streams. Such work is complete once all known contexts have been waited for. */
static gai_stream *gai_pool_unknown_streams(galloc_pool *pool)
{
    if (!pool->unknown_streams.life) {
        pool->unknown_streams.capture_id = GAI_UNKNOWN_STREAMS;
        pool->unknown_streams.asked = 1;
        gai_stream_link(pool, &pool->unknown_streams);
    }
    return &pool->unknown_streams;
}

/* Looks a stream up by its id, or within a capture by the capture's id and the key of the handle. A handle alone does
   not identify a stream, since handles are reused after cudaStreamDestroy. */
static gai_stream *gai_stream_find(galloc_pool *pool, const gai_site *site)
{
    gai_stream *stream = *gai_stream_bucket(pool, site->stream_id ^ site->capture);
    if (site->broken) return gai_pool_unknown_streams(pool);
    while (stream && (stream->key != site->stream_id || stream->capture_id != site->capture ||
                    (site->capture && !stream->capture) || /* its group was released during the capture */
                    (!site->stream_id && stream->context_id != site->context_id)))
        stream = stream->next_indexed;
    return stream;
}

static void gai_stream_unindex(galloc_pool *pool, gai_stream *stream)
{
    gai_stream **at = gai_stream_bucket(pool, stream->key ^ stream->capture_id);
    while (*at != stream) at = &(*at)->next_indexed;
    *at = stream->next_indexed;
}

static void gai_stream_index_by(galloc_pool *pool, gai_stream *stream, unsigned long long key)
{
    gai_stream **at = gai_stream_bucket(pool, key ^ stream->capture_id);
    stream->key = key;
    stream->next_indexed = *at;
    *at = stream;
}

static gai_stream *gai_stream_create(void)
{
    void *memory = GALLOC_MALLOC(sizeof(gai_stream) + GAI_CACHE_LINE);
    gai_stream *stream;
    if (!memory) return NULL;
    stream = (gai_stream *)gai_up((uintptr_t)memory, GAI_CACHE_LINE);
    memset(stream, 0, sizeof *stream);
    stream->memory = memory;
    return stream;
}

/* A stream state to use: a forgotten one or a new one. A forgotten stream cache is shut and empty and keeps its latch,
   because late threads may still look at it. */
static gai_stream *gai_stream_unused(galloc_pool *pool)
{
    gai_stream *stream = pool->unused_streams;
    if (!stream) return gai_stream_create();
    pool->unused_streams = stream->next;
    memset((char *)stream + offsetof(gai_stream, next), 0, sizeof *stream - offsetof(gai_stream, next));
    return stream;
}

/* Creates a stream state for the site's stream. A new id of the pool's context shows that it was reset. NULL: no host
   memory. */
static gai_stream *gai_stream_new(galloc_pool *pool, const gai_site *site)
{
    gai_stream *stream = gai_stream_unused(pool);
    if (!stream) return NULL;
    stream->context = site->context;
    stream->context_id = site->context_id;
    stream->stream_id = site->capture ? 0 : site->stream_id;
    stream->thread = site->handle == CU_STREAM_PER_THREAD ? gai_thread_number() : 0;
    stream->capture_id = site->capture;
    if (stream->context == pool->context && stream->context_id != pool->context_id) gai_pool_lose_context(pool);
    gai_stream_link(pool, stream);
    gai_stream_index_by(pool, stream, site->stream_id);
    return stream;
}

/* A call was given this stream. */
static GAI_INLINE void gai_stream_note(gai_stream *stream, const gai_site *site)
{
    if (stream->handle != site->handle) stream->handle = site->handle;
    stream->retired = 0;
}

/* The same, and flushes its stream cache, so that the call sees all free memory. Returns whether there was anything. */
static int gai_stream_see(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    gai_stream_note(stream, site);
    return gai_stream_flush(pool, stream, 1);
}

#define GAI_DRAIN_MISSES 8 /* incomplete blocks passed before younger ones are assumed to be incomplete */

/* Re-files the blocks of a set that have a completed mark, so that they merge and other streams may use them. */
static void gai_set_drain(galloc_pool *pool, gai_set *set, int all)
{
    gai_block *block = set->oldest;
    int misses = 0;
    while (block && (all || misses < GAI_DRAIN_MISSES)) {
        gai_block *newer = block->newer;
        const gai_mark *mark = block->marks;
        while (mark && !gai_mark_is_complete(mark)) mark = mark->next;
        if (mark) {
            gai_set_remove(block);
            block = gai_block_file(pool, block, 0);
            if (newer && (newer == block || newer->set != set)) newer = set->oldest; /* it has merged */
        } else {
            misses++;
        }
        block = newer;
    }
}

/* Forgets captures whose graphs are gone, and re-files the memory that they owned. Takes no time if no graph of the
   process has ended since the last time. [lock] */
static void gai_pool_reap(galloc_pool *pool)
{
    gai_capture *capture;
    gai_set *set;
    uint64_t ends = gai_load(&gai_process.graph_ends);
    int some = 0;
    if (pool->graph_ends == ends) return;
    pool->graph_ends = ends;
    for (capture = pool->captures; capture; capture = capture->next) {
        capture->gone = gai_capture_has_ended(capture);
        some |= capture->gone;
    }
    if (!some) return;
    gai_pool_forget_captures(pool);
    for (set = pool->mixed.next; set; set = set->next)
        if (!set->stream || set->stream->capture_id) gai_set_drain(pool, set, 1);
    gai_set_drain(pool, &pool->mixed, 1);
}

/* Creates the stream state of a stream. For a captured one it records its capture if that is new, and forgets captures
   whose graphs are gone: a program that only captures may have no other occasion for that. NULL: no host memory, or the
   driver refused its context or capture. [lock], released to ask the driver. */
static gai_stream *gai_stream_introduce(galloc_pool *pool, gai_site *site)
{
    gai_capture *capture = site->capture ? gai_capture_find(pool, site->capture) : NULL;
    gai_stream *stream;
    gai_lock_off(&pool->lock);
    site->refused = gai_site_context(site);
    if (!site->refused && site->context != pool->context && !gai_context_know(site->context, site->context_id))
        site->refused = GAI_NO_HOST_MEMORY;
    if (site->capture && !capture && !site->refused) gai_pool_note_capture(pool, site);
    gai_lock_on(&pool->lock);
    if (site->capture) {
        gai_pool_reap(pool);
        capture = gai_capture_find(pool, site->capture);
    }
    if (site->refused || (site->capture && !capture)) return NULL;
    stream = gai_stream_find(pool, site);
    if (!stream) stream = gai_stream_new(pool, site);
    if (stream && capture) {
        stream->capture = capture;
        stream->asked = 1;
    }
    return stream;
}

/* Does the captured stream continue from its last position? If not, its earlier frees do not precede its next work.
   Several captures into one graph share an id (cudaStreamBeginCaptureToGraph), and cudaStreamUpdateCaptureDependencies
   resets dependencies. [lock], released to ask the driver. */
static int gai_stream_goes_on(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    gai_walk walk;
    gai_graph_place was = stream->here, is;
    int goes_on;
    stream->busy++;
    gai_lock_off(&pool->lock);
    gai_walk_begin(&walk, site->handle, site->capture);
    is.n = walk.partial ? GAI_WALK_WIDTH + 1 : walk.n;
    if (is.n <= GAI_WALK_WIDTH) memcpy(is.nodes, walk.nodes, is.n * sizeof *is.nodes);
    goes_on = was.n > GAI_WALK_WIDTH || gai_walk_reaches(&walk, was.nodes, was.n);
    gai_lock_on(&pool->lock);
    stream->here = is;
    stream->busy--;
    return goes_on;
}

/* The stream state of a captured stream. If the stream does not continue from its last position, the old state remains
   part of the capture but is not found any more, and a new one takes its place. */
static gai_stream *gai_stream_captured(galloc_pool *pool, gai_site *site)
{
    gai_stream *stream = gai_stream_find(pool, site);
    if (stream && gai_stream_goes_on(pool, stream, site)) return stream;
    if (stream) gai_stream_unindex(pool, stream);
    if (stream) gai_stream_index_by(pool, stream, 0); /* no captured stream has key 0 */
    stream = gai_stream_introduce(pool, site);
    if (stream) (void)gai_stream_goes_on(pool, stream, site); /* records its first position */
    return stream;
}

/* The stream state of the call's stream, held until gai_stream_release. NULL: no host memory for a new one, or the
   driver refused its context. [lock], released to ask the driver about a new stream. */
static gai_stream *gai_stream_hold(galloc_pool *pool, gai_site *site)
{
    gai_stream *stream = site->stream;
    if (!site->life || stream->life != site->life) {
        stream = site->capture ? gai_stream_captured(pool, site) : gai_stream_find(pool, site);
        if (!stream && !site->capture) stream = gai_stream_introduce(pool, site);
        if (!stream) return NULL;
        site->stream = stream;
        site->life = stream->life;
        site->context = stream->context;
        site->context_id = stream->context_id;
        site->own_context = stream->context == pool->context;
    }
    stream->busy++;
    (void)gai_stream_see(pool, stream, site);
    return stream;
}

/* The error for a stream state that could not be made. */
static cudaError_t gai_stream_refused(gai_site *site)
{
    CUresult result = gai_site_context(site);
    if (result) return gai_driver_failed(result, "cuStreamGetCtx");
    if (site->capture && site->refused) return gai_driver_failed(site->refused, "noting a captured stream");
    return gai_fail(cudaErrorMemoryAllocation, "no host memory for the state of a new stream");
}

/* Forgets the waits that `stream` has queued on `on`; NULL: on all streams. */
static void gai_stream_forget_waits(galloc_pool *pool, gai_stream *stream, const gai_stream *on)
{
    gai_wait **at = &stream->waits;
    while (*at) {
        gai_wait *wait = *at;
        if (!on || wait->on == on) {
            *at = wait->next;
            gai_slab_give(&pool->waits, wait);
        } else {
            at = &wait->next;
        }
    }
}

/* Removes a stream state from the pool. The caller drops its events. */
static void gai_stream_detach(galloc_pool *pool, gai_stream *gone)
{
    gai_stream **at = &pool->streams, *stream;
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    gai_set_unlink(pool, &gone->free);
    pool->stream_count -= (size_t)gai_stream_is_plain(gone);
    gai_stream_unindex(pool, gone);
    gone->life = 0; /* threads that remember it must not find it */
    if (pool->variant.stream_ends) pool->variant.stream_ends(pool, gone);
    gai_stream_forget_positions(pool, gone);
    for (stream = pool->streams; stream; stream = stream->next) gai_stream_forget_waits(pool, stream, gone);
    gai_stream_forget_waits(pool, gone, NULL);
}

/* ==== EVENTS ====================================================================================================== */
/* >>events */

/* When an event is recorded on a stream, and what completed events prove. Owns the events of stream states and the
   event predictor, guarded by the pool's lock; events are recorded and queried with at most `paging` or `recording`
   held. Calls the driver table, slabs, marks, blocks, stream caches and streams. */

/* A call records events only on streams that it was given. The exceptions are streams of galloc_record_stream
   (gai_pool_record_due; docs/design.md, Streams, rule 6). An event is recorded when one was requested (gai_stream_ask),
   when the stream is retired, and with other backends at every free. If several streams are in use, a stream also gets
   an event when many bytes were freed on it, and when it has freed everything, since its next call may be long in
   coming. The legacy stream gets none without a request, since an event there makes all blocking streams wait for each
   other. A lone stream gets requests from collection, moved pages, freed blocks with room, and blocks with room that
   have memory which it may still use beyond what was requested. */

/* Were enough bytes or blocks freed for an event? The threshold doubles with every GAI_EVENTS pending events, so that
   their number stays bounded however far the device is behind. */
static int gai_stream_is_ripe(const galloc_pool *pool, const gai_stream *stream)
{
    size_t bytes = gai_max(GAI_EVENT_BYTES, pool->stats.reserved.current / GAI_EVENT_PART / pool->stream_count);
    int scarce = (int)gai_min(stream->events / GAI_EVENTS, 24);
    return stream->unmarked >> scarce >= bytes || (!stream->blocks && stream->busy_frees >> scarce >= GAI_EVENT_FREES);
}

/* Has the stream that the block was given to used it before, with no mark that tells of it (gai_block_leave_cache adds
   one for another stream) and no event that stands for it? */
static int gai_block_lacks_event(const gai_block *block, const gai_stream *stream)
{
    if (!(block->tag & GAI_DROPPED) || block->age <= stream->done) return 0;
    return !stream->newest || stream->newest->epoch < block->age;
}

/* The next call may grow a block with room within its memory on another stream, for which no page and no place is
   needed. So an event must stand for the work of this call's stream on the bytes that the block has beyond the
   requested ones. Requests one if there is none, since no call on another stream could record it. Not on the legacy
   stream, whose events other streams would wait for. [lock] */
static void gai_block_ask_rest(const galloc_pool *pool, const gai_block *block, gai_stream *stream)
{
    const gai_mark *mark;
    if (!block->room || !gai_stream_is_plain(stream)) return;
    if (stream->handle == CU_STREAM_LEGACY && !gai_pool_has_one_stream(pool)) return;
    if (block->life == stream->life && gai_block_lacks_event(block, stream)) gai_stream_ask(stream);
    for (mark = block->marks; mark; mark = mark->next)
        if (mark->stream == stream && mark->end > block->addr + block->requested && !gai_mark_is_complete(mark) &&
            !gai_mark_event(mark)) gai_stream_ask(stream);
}

/* ---- predictors ---- */

/* `keys`: 2 * size zeros. */
static void gai_predictor_begin(gai_predictor *predictor, uint64_t *keys, uint64_t size)
{
    predictor->keys = keys;
    predictor->latest = keys + size;
    predictor->size = size;
}

/* Is the key with this number still in the ring? */
static int gai_predictor_has(const gai_predictor *predictor, uint64_t number)
{
    return number && predictor->noted - number < predictor->size;
}

static uint64_t *gai_predictor_key(const gai_predictor *predictor, uint64_t number)
{
    return &predictor->keys[number & (predictor->size - 1)];
}

/* Notes a key. Returns the number of its previous occurrence; 0: there is none. */
static uint64_t gai_predictor_note(gai_predictor *predictor, uint64_t key)
{
    uint64_t before = predictor->next, *latest = &predictor->latest[key & (predictor->size - 1)];
    if (gai_predictor_has(predictor, before) && *gai_predictor_key(predictor, before) == key) {
        predictor->agreed++;
    } else {
        predictor->agreed = 0;
        before = *latest;
        if (!gai_predictor_has(predictor, before) || *gai_predictor_key(predictor, before) != key) before = 0;
    }
    predictor->next = before ? before + 1 : 0;
    *latest = ++predictor->noted;
    *gai_predictor_key(predictor, *latest) = key;
    return before;
}

/* Mixes a number into a key. */
static uint64_t gai_key_mix(uint64_t key, uint64_t number) { return (key + number) * 0x9e3779b97f4a7c15u; }

/* The event predictor skips events that will be useless. Most are: when a call queries the event, a later one is
   complete as well. A program that repeats itself repeats its occasions for events, so an occasion that was useless
   last time gets no event. After a deviation from the expected sequence, or with too much freed memory that no event
   covers, no event is skipped. */
#define GAI_EVENT_PREDICTOR_TRUST 64 /* occasions in a row that came as expected */
#define GAI_SKIPPED_PART 2  /* 1/2 of the heap may be freed with events skipped, over all streams */

/* Bytes freed since the last event: with none so far, or with events skipped. */
static size_t gai_stream_unmarked(const gai_stream *stream) { return stream->unmarked + stream->skipped; }

/* An event is due: does the predictor skip it? [lock] */
GAI_APART
static int gai_stream_skips(galloc_pool *pool, gai_stream *stream)
{
    gai_predictor *predictor = &pool->event_predictor;
    uint64_t since = gai_key_mix(0, pool->clock - pool->occasion_clock) + pool->looks;
    uint64_t key = gai_key_mix(gai_key_mix(gai_key_mix(0, stream->life), since), stream->unmarked);
    uint64_t before = gai_predictor_note(predictor, key ^ key >> 32);
    size_t most = pool->stats.reserved.current / GAI_SKIPPED_PART / pool->stream_count;
    char *useless = &pool->useless[predictor->noted % GAI_EVENT_KEYS];
    pool->occasion_clock = pool->clock;
    pool->looks = 0;
    stream->occasion = predictor->noted;
    *useless = 0;
    if (!before || predictor->agreed < GAI_EVENT_PREDICTOR_TRUST || !pool->useless[before % GAI_EVENT_KEYS]) return 0;
    if (gai_stream_unmarked(stream) > most) return 0;
    /* A stream without events requires a wait for the device, which a capture or a wait_limit_ms may forbid. */
    if (pool->captures || pool->config.wait_limit_ms != UINT64_MAX) return 0;
    *useless = 1;
    stream->skipped += stream->unmarked;
    stream->unmarked = 0;
    return 1;
}

/* Notes whether an event was useless. Called when the event is found complete or is waited for. The first call counts:
   an event that was waited for is of use, though it is found complete together with a later one afterwards. [lock] */
static void gai_event_judge(galloc_pool *pool, gai_event *event, int useless)
{
    if (gai_predictor_has(&pool->event_predictor, event->occasion))
        pool->useless[event->occasion % GAI_EVENT_KEYS] = (char)useless;
    event->occasion = 0;
}

/* Is a mark due? */
static int gai_stream_wants_event(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    if (site->capture_forbids || stream->retired) return 0;
    if ((stream->asked || pool->variant.one_each) && gai_stream_unmarked(stream)) return 1;
    if (pool->variant.no_events) return 0;
    if (gai_pool_has_one_stream(pool) || (stream->handle == CU_STREAM_LEGACY && !stream->wanted)) return 0;
    return stream->unmarked && gai_stream_is_ripe(pool, stream) && !gai_stream_skips(pool, stream);
}

/* Records an error after which the pool's context or the driver is unusable. A sticky error may be that of another
   context, whose stream or event took part in the call: so the pool's context is asked. */
static void gai_pool_note(galloc_pool *pool, CUresult result)
{
    if (gai_is_sticky(result)) result = gai_context_error(pool->context);
    if (!gai_is_sticky(result) && !gai_is_driver_gone(result)) return;
    gai_lock_on(&pool->lock);
    if (!pool->broken || gai_is_driver_gone(result)) gai_store(&pool->broken, (uint64_t)result);
    gai_pool_shut_caches(pool);
    gai_lock_off(&pool->lock);
}

static void gai_call_begin(uint64_t *calls)
{
    gai_count(calls, 1);
    gai_thread.call_began = GALLOC_CLOCK();
}

static CUresult gai_call_end(uint64_t *ns, uint64_t *longest, CUresult result)
{
    uint64_t spent = GALLOC_CLOCK() - gai_thread.call_began;
    gai_count(ns, spent);
    gai_count_max(longest, spent);
    return result;
}

/* Calls the driver, and counts the call and its time. */
#define GAI_CALL(pool, kind, function, arguments) \
    (gai_call_begin(&(pool)->stats.driver.kind),  \
     gai_call_end(&(pool)->stats.driver_ns.kind, &(pool)->stats.driver_longest_ns.kind, gai_cu.function arguments))

/* Waits for the work that comes before a stream's next operation. For a blocking stream that includes earlier work of
   the legacy stream, which cuStreamSynchronize leaves out until an operation follows in the stream: an event is one.
   The stream's context is current. [no lock] */
static CUresult gai_stream_finish(galloc_pool *pool, CUstream stream)
{
    CUstreamCaptureStatus status;
    CUevent event;
    CUresult result = CUDA_SUCCESS;
    if (stream && stream != CU_STREAM_LEGACY) {
        result = GAI_CALL(pool, event_create, EventCreate, (&event, CU_EVENT_DISABLE_TIMING));
        if (result) {
            result = gai_cu.StreamIsCapturing(CU_STREAM_LEGACY, &status);
            if (!result) result = GAI_CALL(pool, stream_synchronize, StreamSynchronize, (CU_STREAM_LEGACY));
        } else {
            result = GAI_CALL(pool, event_record, EventRecord, (event, stream));
            (void)GAI_CALL(pool, event_destroy, EventDestroy, (event));
        }
    }
    return result ? result : GAI_CALL(pool, stream_synchronize, StreamSynchronize, (stream));
}

/* An event to record: an idle one or a new one. [lock], released meanwhile. */
static gai_event *gai_event_get(galloc_pool *pool, gai_stream *stream, CUresult *result)
{
    gai_event *event = stream->idle;
    gai_scope scope;
    *result = CUDA_SUCCESS;
    if (event) {
        stream->idle = event->next;
        return event;
    }
    if (!gai_slab_need(&pool->events, 1)) {
        *result = GAI_NO_HOST_MEMORY;
        return NULL;
    }
    event = (gai_event *)gai_slab_take(&pool->events);
    gai_lock_off(&pool->lock);
    *result = gai_scope_push(&scope, stream->context);
    if (!*result) {
        *result = GAI_CALL(pool, event_create, EventCreate, (&event->event, CU_EVENT_DISABLE_TIMING));
        gai_scope_leave(&scope);
    }
    gai_lock_on(&pool->lock);
    if (!*result) return event;
    gai_slab_give(&pool->events, event);
    return NULL;
}

/* Publishes a recorded event, or keeps it as idle if a wait for the device has covered its epoch meanwhile. */
static void gai_event_publish(gai_stream *stream, gai_event *event)
{
    int pending = event->epoch > stream->done;
    gai_event **at = pending ? &stream->recorded : &stream->idle;
    if (pending && stream->newest && stream->newest->epoch < event->epoch) at = &stream->newest->next;
    while (pending && *at && (*at)->epoch < event->epoch) at = &(*at)->next; /* another thread was faster */
    event->next = *at;
    *at = event;
    stream->events += (size_t)pending;
    if (pending && !event->next) stream->newest = event;
}

/* Another thread may have begun to capture the stream since it was queried. An event recorded in a capture is harmless
   while no call queries it, so it counts as not recorded. */
static CUresult gai_event_record(galloc_pool *pool, gai_stream *stream, gai_event *event, CUstream handle)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    gai_scope scope;
    CUresult result = gai_scope_push(&scope, stream->context);
    if (result) return result;
    result = GAI_CALL(pool, event_record, EventRecord, (event->event, handle));
    if (!result && handle != CU_STREAM_LEGACY) result = gai_cu.StreamIsCapturing(handle, &status);
    if (status != CU_STREAM_CAPTURE_STATUS_NONE) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    gai_scope_leave(&scope);
    return result;
}

/* Records an event that covers all frees on the stream so far. The order matters: the epoch advances first, so that
   concurrent frees are not covered; then the event is recorded; then it is published. After a failure the next call
   tries again. [lock], released meanwhile. */
static CUresult gai_stream_record(galloc_pool *pool, gai_stream *stream, CUstream handle, int retire)
{
    CUresult result;
    gai_event *event;
    size_t unmarked;
    event = gai_event_get(pool, stream, &result);
    if (event) {
        if (retire) gai_cache_shut(&stream->cache); /* it may have been opened while the lock was free */
        if (retire) (void)gai_stream_flush(pool, stream, 1);
        event->clock = pool->clock;
        event->epoch = stream->epoch++;
        event->occasion = stream->occasion;
        stream->retired = (short)retire;
        unmarked = gai_stream_unmarked(stream);
        stream->unmarked = stream->skipped = 0;
        stream->occasion = 0;
        stream->asked = 0;
        gai_lock_off(&pool->lock);
        result = gai_event_record(pool, stream, event, handle);
        gai_lock_on(&pool->lock);
        if (!result) {
            gai_event_publish(stream, event);
            pool->stats.marks++;
            return CUDA_SUCCESS;
        }
        event->next = stream->idle;
        stream->idle = event;
        stream->unmarked += unmarked;
    }
    gai_stream_ask(stream);
    gai_lock_off(&pool->lock);
    gai_pool_note(pool, result);
    gai_lock_on(&pool->lock);
    return result;
}

/* Positions kept per stream state. Beyond that every second one goes, since the next one covers its frees. */
#define GAI_POSITIONS \
    64

/* Drops every second position once there are too many. */
static void gai_stream_thin_positions(galloc_pool *pool, gai_stream *stream)
{
    gai_graph_position *position;
    size_t n = 0;
    for (position = stream->positions; position; position = position->older) n++;
    if (n <= GAI_POSITIONS) return;
    for (position = stream->positions; position && position->older; position = position->older) {
        gai_graph_position *gone = position->older;
        position->older = gone->older;
        gai_slab_give(&pool->positions, gone);
    }
}

/* Publishes a position. If its nodes equal those of the last position, it replaces that one. [lock] */
static void gai_stream_show_position(galloc_pool *pool, gai_stream *stream, uint64_t epoch, const CUgraphNode *nodes,
                                     size_t n)
{
    gai_graph_position *position = stream->positions;
    if (!stream->capture || epoch <= stream->done) return;
    if (position && position->epoch >= epoch) return; /* another thread was faster: its later position covers this */
    if (!position || position->n != n || memcmp(position->nodes, nodes, n * sizeof *nodes)) {
        if (!gai_slab_need(&pool->positions, 1)) return;
        position = (gai_graph_position *)gai_slab_take(&pool->positions);
        position->n = n;
        memcpy(position->nodes, nodes, n * sizeof *nodes);
        position->older = stream->positions;
        stream->positions = position;
    }
    position->epoch = epoch;
    gai_stream_thin_positions(pool, stream);
}

/* Records the stream's present position in the graph, which covers all frees on it so far. As for a mark, the epoch
   advances first. A later position covers what this one cannot. [lock], released meanwhile. */
GAI_APART
static void gai_stream_position(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    CUgraphNode nodes[GAI_POSITION_NODES];
    uint64_t epoch = stream->epoch++;
    size_t n, unmarked = stream->unmarked;
    int known;
    stream->unmarked = 0;
    gai_lock_off(&pool->lock);
    known = gai_capture_nodes(site->handle, site->capture, nodes, &n, GAI_POSITION_NODES);
    gai_lock_on(&pool->lock);
    if (known) gai_stream_show_position(pool, stream, epoch, nodes, n);
    else if (stream->capture) stream->unmarked += unmarked;
}

/* The last thing that a call does with a stream state it held: records an event or a graph position if one is due, and
   lets go of the state. [lock], released while the event is recorded. */
static void gai_stream_release(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    if (gai_stream_wants_event(pool, stream, site)) (void)gai_stream_record(pool, stream, site->handle, 0);
    else if (stream->capture && stream->unmarked) gai_stream_position(pool, stream, site);
    stream->busy--;
    gai_cache_set(pool, stream);
}

/* All frees stamped up to `epoch` are complete; their events become idle. */
static void gai_stream_complete(gai_stream *stream, uint64_t epoch)
{
    if (epoch > stream->done) stream->done = epoch;
    while (stream->recorded && stream->recorded->epoch <= stream->done) {
        gai_event *event = stream->recorded;
        stream->recorded = event->next;
        if (!stream->recorded) stream->newest = NULL;
        stream->events--;
        event->next = stream->idle;
        stream->idle = event;
    }
}

/* Does the context of the stream still exist? After cudaDeviceReset its address may belong to a context with another
   id: then its work is gone, and querying its events would crash. */
static enum gai_health gai_stream_health(const gai_stream *stream)
{
    return gai_context_health(stream->context, stream->context_id);
}

/* Returns whether an event may be recorded on a recorded use's stream, which this call was not given: not if the handle
   means another thread's default stream, and not during a capture. The id of a created stream is not queried, because
   that would invalidate a capture that another thread begins. In the stream's context. */
static int gai_stream_is_reachable(const gai_stream *stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    if (gai_cu.StreamIsCapturing(stream->handle, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE) return 0;
    if (stream->handle != CU_STREAM_PER_THREAD) return 1;
    return !gai_cu.StreamGetId(stream->handle, &id) && id == stream->stream_id;
}

/* Gives up the stream state's events. `destroy`: destroys them, in their own context if that can be entered, since the
   pool's may be broken; otherwise drops them without a driver call, as a dead context requires. [no lock] */
static void gai_stream_drop_events(galloc_pool *pool, gai_stream *stream, int destroy)
{
    gai_event *list, *event;
    gai_scope scope;
    int entered;
    gai_lock_on(&pool->lock);
    if (stream->newest) stream->newest->next = stream->idle;
    list = stream->newest ? stream->recorded : stream->idle;
    stream->recorded = stream->newest = stream->idle = NULL;
    stream->events = 0;
    gai_lock_off(&pool->lock);
    entered = destroy && list && !gai_scope_push(&scope, stream->context);
    for (event = list; destroy && event; event = event->next)
        (void)GAI_CALL(pool, event_destroy, EventDestroy, (event->event));
    if (entered) gai_scope_leave(&scope);
    gai_lock_on(&pool->lock);
    while (list) {
        event = list;
        list = event->next;
        gai_slab_give(&pool->events, event);
    }
    gai_lock_off(&pool->lock);
}

/* The stream's context has ended: its events are gone. After a reset of the pool's context all its frees are complete.
   Work of other contexts may go on: that of a destroyed green context does, and graphs captured there can be launched
   elsewhere. */
static void gai_stream_died(galloc_pool *pool, gai_stream *stream)
{
    gai_lock_on(&pool->lock);
    if (stream->context == pool->context) {
        stream->done = stream->epoch++;
        stream->unmarked = stream->skipped = 0;
        if (stream->capture) stream->capture->lost = 1;
        pool->graph_ends = GAI_REAP;
    }
    stream->ended = 1;
    gai_lock_off(&pool->lock);
    gai_stream_drop_events(pool, stream, 0);
}

/* Runs before any event is queried. The events of contexts that have ended are gone. Streams whose context gives no
   answer become silent until it does. [paging] */
static void gai_pool_end_dead_streams(galloc_pool *pool)
{
    gai_stream *stream, *last = NULL;
    enum gai_health health = GAI_ALIVE;
    gai_lock_on(&pool->lock);
    stream = pool->streams;
    gai_lock_off(&pool->lock);
    for (; stream; last = stream, stream = stream->next) {
        if (!last || last->context != stream->context || last->context_id != stream->context_id)
            health = gai_stream_health(stream);
        if (gai_stream_is_unknown(stream)) continue;
        if (health == GAI_DEAD) gai_stream_died(pool, stream);
        gai_lock_on(&pool->lock);
        stream->silent = health == GAI_UNKNOWN;
        gai_lock_off(&pool->lock);
    }
}

/* The next event to query: the newest, since often all are complete; if it is not, the oldest, which each answer brings
   one further. `open`: the oldest event known to be incomplete. NULL: nothing is left to query. */
static gai_event *gai_stream_next_to_ask(const gai_stream *stream, const gai_event *open)
{
    if (stream->recorded == open || stream->silent) return NULL;
    return open ? stream->recorded : stream->newest;
}

/* Finds out how far the stream has come, in a scope. [paging] */
static void gai_stream_poll(galloc_pool *pool, gai_stream *stream)
{
    const gai_event *open = NULL;
    CUresult result = CUDA_SUCCESS;
    while (!result || result == CUDA_ERROR_NOT_READY) {
        gai_event *event, *old;
        gai_lock_on(&pool->lock);
        event = gai_stream_next_to_ask(stream, open);
        gai_lock_off(&pool->lock);
        if (!event) return;
        result = GAI_CALL(pool, event_query, EventQuery, (event->event));
        gai_lock_on(&pool->lock);
        for (old = stream->recorded; !result && old && old->epoch <= event->epoch; old = old->next)
            gai_event_judge(pool, old, old != event);
        if (!result) gai_stream_complete(stream, event->epoch);
        gai_lock_off(&pool->lock);
        if (result) open = event;
    }
    gai_pool_note(pool, result);
}

/* Polls all streams and re-files the blocks whose marks have completed. */
static void gai_pool_poll(galloc_pool *pool)
{
    gai_stream *stream;
    gai_set *set;
    gai_lock_on(&pool->lock);
    stream = pool->streams;
    pool->looks++;
    gai_lock_off(&pool->lock);
    for (; stream; stream = stream->next) gai_stream_poll(pool, stream);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    for (set = pool->mixed.next; set; set = set->next)
        if (set->bytes) gai_set_drain(pool, set, 0);
    gai_set_drain(pool, &pool->mixed, 1);
    gai_lock_off(&pool->lock);
}

/* The statistics of one stream state. [lock] */
static void gai_stream_read(const galloc_pool *pool, gai_stream *stream, galloc_stream_stats *stats)
{
    gai_cache *cache = &stream->cache;
    size_t in_cache;
    memset(stats, 0, sizeof *stats);
    stats->stream_id = stream->stream_id;
    stats->context_id = stream->context_id;
    gai_latch_on(&cache->latch);
    in_cache = cache->bytes + cache->unconfirmed_bytes;
    gai_latch_off(&cache->latch);
    stats->stranded = in_cache + gai_pool_stranded(pool, stream);
    stats->unmarked = gai_stream_unmarked(stream) + in_cache;
}

/* Can the stream state be forgotten without losing a mark, a block, an event or a reuse to wait for? */
static int gai_stream_is_idle(const gai_stream *stream)
{
    return !stream->uses && !stream->blocks && !stream->busy && !stream->recorded && stream->handed <= stream->done &&
           !gai_stream_is_unknown(stream);
}

/* Forgets idle stream states: those of retired streams, and any while there are more than GAI_STREAMS_KEPT. [paging] */
static void gai_pool_sweep_streams(galloc_pool *pool)
{
    gai_stream *stream, *next, *gone = NULL;
    gai_lock_on(&pool->lock);
    pool->streams_swept = pool->streams_made;
    for (stream = pool->streams; stream; stream = next) {
        next = stream->next;
        if (!gai_stream_is_idle(stream) || (!stream->retired && pool->stream_count <= GAI_STREAMS_KEPT)) continue;
        if (stream->silent) continue; /* its events cannot be destroyed now */
        gai_cache_shut(&stream->cache);
        (void)gai_stream_flush(pool, stream, 0);
        if (!gai_stream_is_idle(stream) || stream->cache.unconfirmed_blocks) {
            gai_cache_set(pool, stream);
            continue;
        }
        gai_stream_detach(pool, stream);
        stream->next = gone;
        gone = stream;
    }
    gai_lock_off(&pool->lock);
    for (; gone; gone = next) {
        next = gone->next;
        gai_stream_drop_events(pool, gone, gai_stream_health(gone) != GAI_DEAD);
        gai_lock_on(&pool->lock);
        gone->next = pool->unused_streams;
        pool->unused_streams = gone;
        gai_lock_off(&pool->lock);
    }
}

/* ==== NVTX ======================================================================================================== */
/* >>nvtx */

/* GALLOC_NVTX: tells a tool such as compute-sanitizer which bytes the program may access, by NVTX's memory extension. A
   segment is a heap of the tool. The bytes requested for a used block are a region of that heap, named by the block's
   tag. The tool reports an access to bytes of a heap that are in no region. A region begins before the program has the
   address, and ends before another allocation can have the bytes.
   A segment is `open` once a graph has used it: launches use memory that was freed in the capture, and other blocks of
   the graph had parts of it. So all its bytes are in some region then, until the segment ends.
   Owns galloc_pool.tool, and heap and open of gai_segment. The pool's lock guards `open`, and a segment is opened and
   regions are resized with it; else NVTX is called without it. Calls history, take, events. */

#if defined(GALLOC_NVTX)

/* NVIDIA documents heaps for compute-sanitizer that are each one cudaMalloc. So a pool has fixed segments while there
   is a tool. 0: it keeps its setting, and a range of addresses is a heap, whatever is mapped there. */
#ifndef GAI_NVTX_FIXED
#define GAI_NVTX_FIXED 1
#endif

/* A free is in stream order, but the tool learns of it at once: queued kernels could be reported for accesses before
   the free. So the free waits for them. 0: it does not. */
#ifndef GAI_NVTX_WAITS
#define GAI_NVTX_WAITS 1
#endif

/* What is done only in a pool that a tool looks at. */
#define GAI_TELL(pool, call) ((pool)->tool ? (void)(call) : (void)0)

#define GAI_TOOL_NONE 1 /* gai_process.tool; 0: not known */
#define GAI_TOOL_LOOKS 2

#define GAI_NVTX_BEGIN(desc)                                                                                           \
    (memset(&(desc), 0, sizeof(desc)), (desc).extCompatID = NVTX_EXT_COMPATID_MEM,                                     \
     (desc).structSize = (uint16_t)sizeof(desc))

static nvtxDomainHandle_t gai_nvtx_domain(void) { return (nvtxDomainHandle_t)gai_process.nvtx_domain; }

static nvtxMemVirtualRangeDesc_t gai_nvtx_range(uintptr_t addr, size_t bytes)
{
    nvtxMemVirtualRangeDesc_t range;
    range.size = bytes;
    range.ptr = (const void *)addr;
    return range;
}

/* ---- heaps ---- */

/* NULL: no tool handles heaps. */
static void *gai_heap_begin(nvtxDomainHandle_t domain, uintptr_t addr, size_t bytes)
{
    nvtxMemVirtualRangeDesc_t range = gai_nvtx_range(addr, bytes);
    nvtxMemHeapDesc_t desc;
    nvtxMemHeapHandle_t heap;
    GAI_NVTX_BEGIN(desc);
    desc.usage = NVTX_MEM_HEAP_USAGE_TYPE_SUB_ALLOCATOR;
    desc.type = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    desc.typeSpecificDescSize = sizeof range;
    desc.typeSpecificDesc = &range;
    desc.messageType = NVTX_MESSAGE_TYPE_ASCII;
    desc.message.ascii = "galloc";
    heap = nvtxMemHeapRegister(domain, &desc);
    return (intptr_t)heap == -1 ? NULL : (void *)heap; /* NVTX_MEM_HEAP_HANDLE_NO_TOOL, which is no C++ */
}

/* A segment has memory, or addresses for it. */
static void gai_segment_tell(gai_segment *segment, uintptr_t addr, size_t bytes)
{
    segment->heap = gai_heap_begin(gai_nvtx_domain(), addr, bytes);
}

/* They are about to go, or were lost in a reset. Regions end with their heap. */
static void gai_segment_untell(gai_segment *segment)
{
    if (segment->heap) nvtxMemHeapUnregister(gai_nvtx_domain(), (nvtxMemHeapHandle_t)segment->heap);
    segment->heap = NULL;
}

/* Finds out whether a tool handles heaps. NVTX does not say, so a heap is registered, which must be memory of
   cudaMalloc. If there is none, the next pool asks. The first of several threads is right. In the pool's context. [no
   lock] */
static int gai_tool_ask(void)
{
    CUdeviceptr addr = 0;
    nvtxDomainHandle_t domain;
    void *heap;
    int tool;
    if (gai_cu.MemAlloc(&addr, GAI_UNIT)) return 0;
    domain = nvtxDomainCreateA("galloc");
    heap = gai_heap_begin(domain, (uintptr_t)addr, GAI_UNIT);
    if (heap) nvtxMemHeapUnregister(domain, (nvtxMemHeapHandle_t)heap);
    (void)gai_cu.MemFree(addr);
    gai_lock_on(&gai_locks.global);
    if (!gai_process.tool) gai_process.nvtx_domain = domain;
    if (!gai_process.tool) gai_process.tool = heap ? GAI_TOOL_LOOKS : GAI_TOOL_NONE;
    tool = gai_process.tool;
    gai_lock_off(&gai_locks.global);
    return tool;
}

/* A new pool looks for a tool, which changes its settings: `debug` is off, since guards lie outside of regions. With
   other backends the tool knows each block from the driver. [no lock] */
static void gai_pool_find_tool(galloc_pool *pool)
{
    gai_scope scope;
    int tool;
    if (pool->config.backend) return;
    gai_lock_on(&gai_locks.global);
    tool = gai_process.tool;
    gai_lock_off(&gai_locks.global);
    if (!tool && !gai_scope_enter(&scope, pool->context)) {
        tool = gai_tool_ask();
        gai_scope_leave(&scope);
    }
    pool->tool = tool == GAI_TOOL_LOOKS;
    if (pool->tool) pool->config.debug = 0;
    if (pool->tool && GAI_NVTX_FIXED) pool->config.expandable_segments = 0;
}

/* ---- regions ---- */

static void gai_region_name(uintptr_t addr, uint32_t tag)
{
    char text[GAI_NOTE_TEXT]; /* compute-sanitizer takes 49 characters */
    nvtxMemRegionNameDesc_t name;
    nvtxMemRegionsNameBatch_t batch;
    if (!gai_tag_get(tag, text)) (void)snprintf(text, sizeof text, "galloc tag %lu", (unsigned long)tag);
    memset(&name, 0, sizeof name);
    name.regionRefType = NVTX_MEM_REGION_REF_TYPE_POINTER;
    name.nameType = NVTX_MESSAGE_TYPE_ASCII;
    name.region.pointer = (const void *)addr;
    name.name.ascii = text;
    GAI_NVTX_BEGIN(batch);
    batch.regionCount = 1;
    batch.regionElementSize = sizeof name;
    batch.regionElements = &name;
    nvtxMemRegionsName(gai_nvtx_domain(), &batch);
}

static void gai_region_begin(void *heap, uintptr_t addr, uintptr_t end, uint32_t tag)
{
    nvtxMemVirtualRangeDesc_t range = gai_nvtx_range(addr, end - addr);
    nvtxMemRegionsRegisterBatch_t batch;
    if (addr >= end) return;
    GAI_NVTX_BEGIN(batch);
    batch.regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    batch.heap = (nvtxMemHeapHandle_t)heap;
    batch.regionCount = 1;
    batch.regionDescElementSize = sizeof range;
    batch.regionDescElements = &range;
    nvtxMemRegionsRegister(gai_nvtx_domain(), &batch);
    gai_region_name(addr, tag);
}

static void gai_region_resize(uintptr_t addr, size_t bytes)
{
    nvtxMemVirtualRangeDesc_t range = gai_nvtx_range(addr, bytes);
    nvtxMemRegionsResizeBatch_t batch;
    GAI_NVTX_BEGIN(batch);
    batch.regionType = NVTX_MEM_TYPE_VIRTUAL_ADDRESS;
    batch.regionDescCount = 1;
    batch.regionDescElementSize = sizeof range;
    batch.regionDescElements = &range;
    nvtxMemRegionsResize(gai_nvtx_domain(), &batch);
}

static void gai_region_end(uintptr_t addr)
{
    nvtxMemRegionRef_t ref;
    nvtxMemRegionsUnregisterBatch_t batch;
    ref.pointer = (const void *)addr;
    GAI_NVTX_BEGIN(batch);
    batch.refType = NVTX_MEM_REGION_REF_TYPE_POINTER;
    batch.refCount = 1;
    batch.refElementSize = sizeof ref;
    batch.refElements = &ref;
    nvtxMemRegionsUnregister(gai_nvtx_domain(), &batch);
}

/* ---- blocks ---- */

/* Opens a segment. The regions of its blocks stay, with what the tool knows of their contents. [lock] */
static void gai_segment_open(gai_segment *segment)
{
    uintptr_t at = segment->addr;
    gai_block *block;
    if (!segment->heap || segment->open) return;
    segment->open = 1;
    for (block = segment->first; block; block = block->next) {
        if (!(block->tag & GAI_REGION)) continue;
        gai_region_begin(segment->heap, at, block->addr, 0);
        at = block->addr + (size_t)block->requested;
        gai_set_relaxed(&block->tag, block->tag & ~GAI_REGION);
    }
    gai_region_begin(segment->heap, at, segment->addr + segment->bytes, 0);
}

/* The program is about to get the block. [no lock] */
static void gai_block_tell(galloc_pool *pool, gai_block *block, int captured)
{
    uint32_t tag = 0;
    void *heap;
    gai_lock_on(&pool->lock);
    if (captured) gai_segment_open(block->segment);
    heap = block->segment->open ? NULL : block->segment->heap;
    if (heap) gai_set_relaxed(&block->tag, block->tag | GAI_REGION);
    if (heap) tag = (uint32_t)block->tag; /* another thread may change its flags once the lock is free */
    gai_lock_off(&pool->lock);
    if (heap) gai_region_begin(heap, block->addr, block->addr + (size_t)block->requested, tag);
}

/* Waits for the work of a stream that the call was given, or that is a recorded use of the claimed block. A captured
   one cannot be waited for, and its graph will use the block: so the segment is opened. [lock], released meanwhile. */
static void gai_block_await(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    gai_scope scope;
    CUresult result = CUDA_SUCCESS;
    if (!gai_stream_is_plain(stream)) gai_segment_open(block->segment);
    if (!gai_stream_is_plain(stream) || stream->retired || !GAI_NVTX_WAITS) return;
    stream->busy++;
    gai_lock_off(&pool->lock);
    if (gai_stream_health(stream) == GAI_ALIVE && !gai_scope_enter(&scope, stream->context)) {
        if (gai_stream_is_reachable(stream)) result = gai_stream_finish(pool, stream->handle);
        gai_scope_leave(&scope);
    }
    if (result) gai_pool_note(pool, result);
    gai_lock_on(&pool->lock);
    stream->busy--;
}

/* Has a claimed block a region, and may it change after the work of these streams and the recorded uses? Waits for
   them. stream: or NULL. [lock], released meanwhile. */
static int gai_region_may_change(galloc_pool *pool, gai_block *block, gai_stream *stream, const gai_mark *marks)
{
    const gai_mark *use = block->recorded_uses;
    if (!(block->tag & GAI_REGION) || !block->segment->heap) return 0;
    if (stream) gai_block_await(pool, block, stream);
    for (; marks; marks = marks->next) gai_block_await(pool, block, marks->stream);
    for (; use; use = use->next) gai_block_await(pool, block, use->stream);
    return block->tag & GAI_REGION && block->segment->heap;
}

/* A claimed block is about to be freed. stream, marks: where; see above. [lock], released meanwhile. */
static void gai_block_untell(galloc_pool *pool, gai_block *block, gai_stream *stream, const gai_mark *marks)
{
    uintptr_t addr = block->addr;
    if (!gai_region_may_change(pool, block, stream, marks)) return;
    gai_lock_off(&pool->lock);
    gai_region_end(addr);
    gai_lock_on(&pool->lock);
    gai_set_relaxed(&block->tag, block->tag & ~GAI_REGION);
    /* Another thread may have opened the segment, and left out what had a region. */
    if (block->segment->open) gai_region_begin(block->segment->heap, addr, addr + (size_t)block->requested, 0);
}

/* A claimed block is about to shrink: its end may be given out before the call returns. [lock], released meanwhile. */
static void gai_block_tell_less(galloc_pool *pool, gai_block *block, size_t bytes, gai_stream *stream)
{
    if (gai_region_may_change(pool, block, stream, NULL)) gai_region_resize(block->addr, bytes);
}

/* A block has another size, or has kept it since the resize failed. [lock] */
static void gai_block_tell_size(galloc_pool *pool, void *ptr)
{
    gai_block *block = gai_block_claim(pool, ptr);
    if (!block) return;
    if (block->tag & GAI_REGION && block->segment->heap) gai_region_resize(block->addr, (size_t)block->requested);
    gai_block_let_go(block);
}

#else
#define GAI_TELL(pool, call) ((void)0)
#endif

/* ==== PAGES ===================================================================================================== */
/* >>pages */

/* Physical pages and their mappings: reserving addresses, creating, mapping and unmapping pages, fixed segments, and
   batches of mappings that enter or leave together. An alias is a mapping in no use: its page has moved away (a stale
   alias), or is parked there. `returning` means that a page moves back to one of its aliases.
   No address is unmapped before every mark on it is complete; a page is released when its last mapping is gone. (The
   free of cudaMallocAsync's memory is ordered by the stream instead.) The callers see to that: gai_mapping_is_spare
   and gai_page_is_quiet (release) choose the pages that may go or move, gai_pool_drop_stale (parking) the stale
   aliases, gai_whole_from (like:pytorch) and gai_pool_return_given (other backends) their segments. gai_marks_copy
   takes the marks along when a page moves.
   [paging], in a scope of the pool's context; `lock` guards the changes of state between driver calls. For
   gai_mapping_settle `lock` suffices (gai_block_give_up, in a free). Calls the sections from cuda to events. */

#define GAI_PAGE_MAX (64 * GAI_MIB) /* a larger handle costs less per byte, but is harder to move or give back */
#define GAI_OVERHEAD_FRUGAL 0.01
#define GAI_FIXED_SMALL (2 * GAI_MIB) /* PyTorch's cudaMalloc sizes (c10/core/AllocatorConfig.h): 2 MiB for requests */
#define GAI_FIXED_LARGE (20 * GAI_MIB) /* up to 1 MiB, 20 MiB below 10 MiB, else the request rounded up to 2 MiB */
#define GAI_FIXED_OWN (10 * GAI_MIB)

/* With on_map pages are made capable of GPUDirect RDMA too, since the callback may register them. */
static CUmemAllocationProp gai_page_properties(const galloc_pool *pool)
{
    CUmemAllocationProp properties;
    memset(&properties, 0, sizeof properties);
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = pool->config.device;
    if (pool->rdma) properties.allocFlags.gpuDirectRDMACapable = pool->config.gpu_direct_rdma || pool->callbacks.on_map;
    return properties;
}

/* Makes a segment that consists of one hole. NULL: no host memory. */
static gai_segment *gai_segment_new(galloc_pool *pool)
{
    gai_segment *segment = (gai_segment *)GALLOC_MALLOC(sizeof *segment);
    if (!segment) return NULL;
    memset(segment, 0, sizeof *segment);
    segment->pool = pool;
    gai_lock_on(&pool->lock);
    if (gai_slab_need(&pool->blocks, 1)) segment->first = gai_block_new(pool, segment, 0, 0, GAI_HOLE);
    gai_lock_off(&pool->lock);
    if (segment->first) return segment;
    GALLOC_FREE(segment);
    return NULL;
}

/* Enters a segment in the pool's list once its addresses are known. */
static void gai_segment_link(galloc_pool *pool, gai_segment *segment, uintptr_t addr, size_t bytes)
{
    segment->addr = addr;
    gai_block_set_addr(segment->first, addr);
    segment->bytes = segment->first->bytes = bytes;
    segment->next = pool->segments;
    if (segment->next) segment->next->prev = segment;
    pool->segments = segment;
}

/* Returns whether blocks of this size are never cut: max_split_size. */
static int gai_pool_is_oversize(const galloc_pool *pool, size_t bytes) { return bytes >= pool->config.max_split_size; }

/* Unlinks a segment and ends its descriptors. Its memory was released before, or never existed. */
static void gai_segment_end(galloc_pool *pool, gai_segment *segment)
{
    if (segment->next) segment->next->prev = segment->prev;
    if (segment->prev) segment->prev->next = segment->next;
    else if (pool->segments == segment) pool->segments = segment->next;
    pool->lost -= segment->lost;
    if (pool->variant.segment_ends) pool->variant.segment_ends(pool, segment);
    while (segment->first) {
        gai_block *block = segment->first;
        segment->first = block->next;
        gai_slab_give(&pool->blocks, block);
    }
    GALLOC_FREE(segment);
}

/* Enters a mapping in the page map, or removes it. */
static void gai_mapping_show(gai_mapping *mapping, int show)
{
    const uintptr_t page = (uintptr_t)1 << GAI_PAGE_LOG2;
    uintptr_t at, end = mapping->addr + mapping->bytes;
    void **child = NULL;
    if (mapping->segment->given) return;
    for (at = mapping->addr; at < end; at += page) {
        child = child && gai_map_digit(2, at) ? child + 1 : gai_map_entry_at(&gai_process.page_map, at);
        if (show) gai_store_pointer(child, mapping);
        else if (child && gai_load_pointer(child) == mapping) gai_store_pointer(child, NULL);
    }
}

/* Removes the segment's addresses from the block map and the page map, and ends the blocks' marks. */
static void gai_segment_hide(galloc_pool *pool, gai_segment *segment)
{
    gai_block *block;
    uintptr_t at;
    GAI_TELL(pool, gai_segment_untell(segment));
    for (block = segment->first; block; block = block->next) {
        gai_marks_end(pool, &block->marks);
        gai_block_hide(block);
        for (at = block->addr; !segment->fixed && gai_block_has_pages(block) && at < block->addr + block->bytes;) {
            gai_mapping *mapping = gai_page_at(at);
            if (!mapping || mapping->segment != segment) break;
            at = mapping->addr + mapping->bytes;
            gai_mapping_show(mapping, 0);
        }
    }
    if (segment->whole) gai_mapping_show(segment->whole, 0);
}

/* Ends a used block of lost memory, whose address the driver has given out again. The block counts as freed. [lock] */
static void gai_block_abandon(galloc_pool *pool, gai_block *block)
{
    if (block->kind != GAI_USED || !gai_block_acquire(block, (void *)block->addr)) return;
    if (pool->trace) gai_trace_freed(pool, block, NULL);
    gai_history_block(pool, GAI_FREED, block, 0);
    gai_stat_unused(pool, block->bytes, (size_t)block->requested);
    pool->stats.blocks.current--;
    pool->stats.frees++;
    if (pool->variant.count) pool->variant.count(pool, GAI_COUNT_UNUSED, block);
    gai_marks_end(pool, &block->recorded_uses);
    gai_block_untake(pool, block);
    gai_block_give(pool, block);
}

/* The driver has given [addr, addr + bytes) out again. Removes the lost segments there from the maps. If the context
   has ended, every segment there is lost; if it is alive, only those marked lost are: the others are on their way to
   the driver. */
static void gai_pool_leave_range(galloc_pool *pool, enum gai_health health, uintptr_t addr, size_t bytes)
{
    gai_segment *segment;
    gai_block *block;
    gai_lock_on(&pool->lock);
    for (segment = pool->segments; segment; segment = segment->next) {
        if (segment->addr >= addr + bytes || addr >= segment->addr + segment->bytes) continue;
        if (!segment->whole->page->current) continue; /* being given back */
        if (health == GAI_ALIVE && !segment->lost) continue;
        /* An address that comes back shows that the context has ended: all cudaMalloc segments are lost. */
        if (!segment->lost) gai_pool_lose_context(pool);
        for (block = segment->first; block; block = block->next) gai_block_abandon(pool, block);
        gai_segment_hide(pool, segment);
    }
    gai_lock_off(&pool->lock);
}

/* Returns whether the pool may have lost memory by a reset of its context. */
static int gai_pool_may_have_lost(galloc_pool *pool, enum gai_health *health)
{
    CUcontext context;
    unsigned long long id;
    int lost;
    gai_lock_on(&pool->lock);
    context = pool->context;
    id = pool->context_id;
    lost = pool->lost;
    gai_lock_off(&pool->lock);
    *health = gai_context_health(context, id);
    return lost || *health != GAI_ALIVE;
}

/* The driver has given these addresses out. After a reset, any pool may still list them as addresses of lost memory,
   even a pool that has made no call since. [no lock] */
static void gai_addresses_are_new(uintptr_t addr, size_t bytes)
{
    galloc_pool *pool = NULL;
    enum gai_health health;
    while ((pool = gai_pool_visit(pool, NULL)) != NULL)
        if (pool->lost_on_reset && gai_pool_may_have_lost(pool, &health))
            gai_pool_leave_range(pool, health, addr, bytes);
}

/* Reserves an address range of twice the device's memory; if the driver refuses, a smaller one of at least
   `at_least` bytes. Address space is plentiful, and one range serves blocks of all sizes and streams. */
static CUresult gai_segment_reserve(galloc_pool *pool, size_t at_least)
{
    size_t bytes = gai_up(gai_max(2 * pool->device_bytes, at_least), pool->granularity);
    CUdeviceptr addr = 0;
    CUresult result;
    gai_segment *segment = gai_segment_new(pool);
    if (!segment) return GAI_NO_HOST_MEMORY;
    for (;;) {
        result = GAI_CALL(pool, reserve, MemAddressReserve, (&addr, bytes, pool->granularity, 0, 0));
        if (!result || bytes == at_least || gai_is_sticky(result)) break;
        bytes = gai_up(gai_max(bytes / 2, at_least), pool->granularity);
    }
    if (!result) gai_addresses_are_new((uintptr_t)addr, bytes);
    if (!result) GAI_TELL(pool, gai_segment_tell(segment, (uintptr_t)addr, bytes));
    gai_lock_on(&pool->lock);
    if (result) {
        gai_segment_end(pool, segment);
    } else {
        gai_segment_link(pool, segment, (uintptr_t)addr, bytes);
        gai_hole_link(pool, segment->first);
        pool->stats.addresses += bytes;
    }
    gai_lock_off(&pool->lock);
    return result;
}

/* Makes the nodes of the page map for a range. 0: no host memory. */
static int gai_page_map_need(uintptr_t addr, size_t bytes)
{
    const uintptr_t node = (uintptr_t)1 << gai_map_shift[1];
    uintptr_t at;
    for (at = gai_down(addr, node); at < addr + bytes; at += node)
        if (!gai_map_need(&gai_process.page_map, at)) return 0;
    return 1;
}

/* Maps a page at an address, and creates its physical memory first if it has none. `function` becomes the name of the
   last function that was called. */
static CUresult gai_mapping_do(galloc_pool *pool, gai_mapping *mapping, uintptr_t addr, const char **function)
{
    CUmemAllocationProp properties = gai_page_properties(pool);
    gai_page *page = mapping->page;
    CUresult result = CUDA_SUCCESS;
    *function = "cuMemCreate";
    if (!page->handle) result = GAI_CALL(pool, create, MemCreate, (&page->handle, page->bytes, &properties, 0));
    if (result) {
        page->handle = 0;
        return result;
    }
    *function = "cuMemMap";
    result = GAI_CALL(pool, map, MemMap, ((CUdeviceptr)addr, page->bytes, 0, page->handle, 0));
    if (result) return result;
    mapping->addr = addr;
    page->mappings++;
    return CUDA_SUCCESS;
}

/* How far the driver has undone a mapping. */
enum gai_undone { GAI_STUCK, GAI_UNMAPPED, GAI_RELEASED };

/* gai_mapping_undo for a fixed segment, whose one mapping ends with its memory. Memory lost by a reset counts as
   released. Only in quarantine can work still use it (gai_segment_fixed): then it is stuck. */
static enum gai_undone gai_mapping_undo_fixed(galloc_pool *pool, gai_mapping *mapping)
{
    const gai_mark *mark;
    CUresult result;
    int lost;
    gai_lock_on(&pool->lock);
    lost = mapping->segment->lost;
    for (mark = mapping->block->marks; mark && gai_mark_is_complete(mark);) mark = mark->next;
    gai_block_hide(mapping->block); /* another pool may get the address while this call lasts */
    gai_lock_off(&pool->lock);
    GAI_TELL(pool, gai_segment_untell(mapping->segment));
    if (lost) return GAI_RELEASED;
    if (mark) return GAI_STUCK;
    result = GAI_CALL(pool, mem_free, MemFree, ((CUdeviceptr)mapping->addr));
    if (result) gai_pool_note(pool, result);
    return result ? GAI_STUCK : GAI_RELEASED;
}

/* Unmaps a mapping, and releases the page if it has no other mapping. */
static enum gai_undone gai_mapping_undo(galloc_pool *pool, gai_mapping *mapping)
{
    gai_page *page = mapping->page;
    CUresult result = CUDA_SUCCESS;
    if (mapping->segment->fixed) return gai_mapping_undo_fixed(pool, mapping);
    if (mapping->addr) result = GAI_CALL(pool, unmap, MemUnmap, ((CUdeviceptr)mapping->addr, mapping->bytes));
    /* From here on the handle alone is left: if the release fails, a later try must not unmap again. */
    if (!result && mapping->addr) {
        mapping->addr = 0;
        page->mappings--;
    }
    if (!result && page->mappings) return GAI_UNMAPPED;
    if (!result && page->handle) result = GAI_CALL(pool, release, MemRelease, (page->handle));
    if (!result) return GAI_RELEASED;
    gai_pool_note(pool, result);
    return GAI_STUCK;
}

/* Puts a mapping that the driver did not undo into the quarantine, to be tried again later. [lock] */
static void gai_mapping_quarantine(galloc_pool *pool, gai_mapping *mapping)
{
    gai_page *page = mapping->page;
    gai_stat_page(pool, page);
    /* A page with a current mapping is in use, and only this alias is stuck. */
    if (!page->current && !page->stuck) pool->stats.quarantined += page->bytes;
    page->stuck = !page->current;
    mapping->next = pool->quarantine;
    pool->quarantine = mapping;
}

/* Books the outcome of gai_mapping_undo. [lock] */
static void gai_mapping_settle(galloc_pool *pool, gai_mapping *mapping, enum gai_undone undone)
{
    gai_segment *segment = mapping->segment;
    /* Addresses that were unmapped can be used again even if the page is stuck. */
    if (mapping->block && (undone != GAI_STUCK || !mapping->addr)) {
        gai_block_to_hole(pool, mapping->block);
        mapping->block = NULL;
    }
    if (undone == GAI_STUCK) {
        gai_mapping_quarantine(pool, mapping);
    } else {
        gai_page *page = mapping->page;
        gai_mapping **at = &page->shown;
        int kept = pool->variant.keep && pool->variant.keep(pool, segment);
        while (*at != mapping) at = &(*at)->next_shown;
        *at = mapping->next_shown;
        gai_slab_give(&pool->mappings, mapping);
        /* A page that is kept in the driver's pool stays in the counters; other mappings of a page may remain. */
        if (!kept && undone == GAI_RELEASED) gai_stat_page_gone(pool, page, page->bytes, 1);
        if (kept || undone == GAI_RELEASED) gai_slab_give(&pool->pages, page);
        if (segment->fixed) {
            gai_hole_unlink(pool, segment->first);
            gai_segment_end(pool, segment);
        }
    }
    gai_stat_cached(pool);
}

/* Mappings that are to be mapped, unmapped or parked together. Those to be mapped are in order of address. Each has a
   busy block of its own, except in a batch of the quarantine: there the addresses may be unmapped already. */
typedef struct gai_batch {
    gai_mapping *first, *last; /* first == NULL: it is empty, and `last` means nothing */
} gai_batch;

static void gai_batch_add(gai_batch *batch, gai_mapping *mapping, gai_block *block)
{
    mapping->next = NULL;
    mapping->block = block;
    if (batch->first) batch->last->next = mapping;
    else batch->first = mapping;
    batch->last = mapping;
}

/* Makes the mapping's block an alias: the page is parked there, or is mapped elsewhere. [lock] */
static void gai_alias_add(galloc_pool *pool, gai_mapping *mapping)
{
    mapping->was_mapped = 0;
    mapping->block->kind = GAI_ALIAS;
    mapping->block->alias = mapping;
    mapping->newer = NULL;
    mapping->older = pool->newest_alias;
    if (mapping->older) mapping->older->newer = mapping;
    else pool->oldest_alias = mapping;
    pool->newest_alias = mapping;
    if (mapping->page->current == mapping) pool->parked += mapping->bytes;
    else pool->stats.leaving += mapping->bytes;
    pool->stale += mapping->page->current != mapping;
}

/* Makes the alias's block busy. The counters depend on whether the page is parked there (page->current == mapping),
   which must not have changed since gai_alias_add. */
static void gai_alias_remove(galloc_pool *pool, gai_mapping *mapping)
{
    if (mapping->older) mapping->older->newer = mapping->newer;
    else pool->oldest_alias = mapping->newer;
    if (mapping->newer) mapping->newer->older = mapping->older;
    else pool->newest_alias = mapping->older;
    mapping->block->kind = GAI_BUSY;
    mapping->block->alias = NULL;
    if (mapping->page->current == mapping) pool->parked -= mapping->bytes;
    else pool->stats.leaving -= mapping->bytes;
    pool->stale -= mapping->page->current != mapping;
}

/* Unmaps the batch. A mapping that was an alias before (`was_mapped`) stays mapped and becomes an alias again. */
static void gai_batch_undo(galloc_pool *pool, gai_batch *batch)
{
    while (batch->first) {
        gai_mapping *mapping = batch->first;
        enum gai_undone undone = GAI_STUCK;
        batch->first = mapping->next;
        if (!mapping->was_mapped) undone = gai_mapping_undo(pool, mapping);
        gai_lock_on(&pool->lock);
        if (mapping->was_mapped) gai_alias_add(pool, mapping);
        else gai_mapping_settle(pool, mapping, undone);
        gai_lock_off(&pool->lock);
    }
}

/* Cuts [addr, addr + bytes) out of a hole or a room, as a busy block. The caller has reserved two block
   descriptors. [lock] */
static gai_block *gai_hole_cut(galloc_pool *pool, gai_block *hole, uintptr_t addr, size_t bytes)
{
    int room = hole->kind == GAI_ROOM;
    gai_block *rest = NULL;
    if (!room) gai_hole_unlink(pool, hole);
    if (addr + bytes < hole->addr + hole->bytes) rest = gai_block_split(pool, hole, addr + bytes, hole->kind);
    if (rest && !room) gai_hole_link(pool, rest);
    if (addr > hole->addr) {
        gai_block *right = gai_block_split(pool, hole, addr, GAI_BUSY);
        gai_hole_link(pool, hole);
        hole = right;
    }
    hole->kind = GAI_BUSY;
    return hole;
}

/* Makes a mapping for all of a busy block. page: NULL for a new one. The caller has reserved the descriptors. */
static gai_mapping *gai_mapping_new(galloc_pool *pool, gai_block *block, gai_page *page)
{
    gai_mapping *mapping = (gai_mapping *)gai_slab_take(&pool->mappings);
    if (!page) {
        page = (gai_page *)gai_slab_take(&pool->pages);
        memset(page, 0, sizeof *page);
        page->bytes = block->bytes;
    }
    gai_store_pointer(&mapping->pool, pool);
    mapping->segment = block->segment;
    mapping->page = page;
    mapping->block = NULL;
    mapping->addr = mapping->within = 0;
    mapping->bytes = page->bytes;
    mapping->was_mapped = 0;
    mapping->number = ++pool->numbers;
    mapping->next_shown = page->shown;
    page->shown = mapping;
    return mapping;
}

/* Copies marks to the block to which a page moves: the bytes are the same, so the same work must complete before
   reuse. */
static void gai_marks_copy(galloc_pool *pool, const gai_block *from, gai_block *to)
{
    const gai_mark *mark;
    for (mark = from->marks; mark; mark = mark->next) {
        uintptr_t begin = mark->begin - from->addr + to->addr;
        gai_mark *copy = gai_mark_new(pool, mark->stream, mark->epoch, begin, begin + (mark->end - mark->begin));
        copy->next = to->marks;
        to->marks = copy;
    }
}

/* The pages that come into a planned range. Some return to their aliases there. The hole in the range, if there is one,
   is filled first with donors' pages, then with new pages.
   donors: current mappings of pages that move into the hole
   returning_blocks: current mappings of pages that return to aliases in the range
   moved, new_bytes: bytes of donors' pages and of new pages;  page_bytes: size of a new page */
typedef struct gai_supply {
    gai_batch returning;       /* aliases in the range, in order of address */
    gai_batch donors, returning_blocks; /* their blocks are busy */
    size_t moved, new_bytes, page_bytes;
} gai_supply;

/* Counts the marks of a batch's blocks. */
static size_t gai_batch_marks(const gai_batch *batch)
{
    const gai_mapping *mapping;
    size_t n = 0;
    for (mapping = batch->first; mapping; mapping = mapping->next) n += gai_marks_count(mapping->block->marks);
    return n;
}

/* Reserves the descriptors and map nodes for a supply, except marks. 0: no host memory. [lock] */
static int gai_supply_need(galloc_pool *pool, const gai_supply *supply, uintptr_t addr)
{
    size_t n = (supply->new_bytes + supply->page_bytes - 1) / supply->page_bytes, moved = 0;
    const gai_mapping *donor;
    for (donor = supply->donors.first; donor; donor = donor->next) moved++;
    return gai_slab_need(&pool->pages, n) && gai_slab_need(&pool->mappings, n + moved) &&
           gai_slab_need(&pool->blocks, n + moved + 6) &&
           gai_page_map_need(addr, supply->moved + supply->new_bytes) && gai_block_map_need(addr);
}

/* Covers [addr, ...) of a hole with mappings, each with a busy block: donors' pages first, then new ones. The caller
   has reserved the descriptors. [lock] */
static void gai_batch_over_hole(galloc_pool *pool, gai_batch *batch, gai_block *hole, uintptr_t addr,
                               const gai_supply *supply)
{
    const gai_mapping *donor = supply->donors.first;
    size_t left = supply->moved + supply->new_bytes;
    gai_block *block = gai_hole_cut(pool, hole, addr, left);
    while (left) {
        size_t bytes = donor ? donor->bytes : gai_min(supply->page_bytes, left);
        gai_block *rest = bytes < left ? gai_block_split(pool, block, block->addr + bytes, GAI_BUSY) : NULL;
        gai_batch_add(batch, gai_mapping_new(pool, block, donor ? donor->page : NULL), block);
        if (donor) gai_marks_copy(pool, donor->block, block);
        if (donor) donor = donor->next;
        left -= bytes;
        block = rest;
    }
}

/* Adds the next alias of the supply to the batch, with the marks of its page's current block. They replace the alias's
   own marks: the page's later users are ordered after its earlier ones. The caller has reserved the marks. [lock] */
static void gai_batch_add_returning(galloc_pool *pool, gai_batch *batch, gai_supply *supply)
{
    gai_mapping *mapping = supply->returning.first;
    gai_block *block = mapping->block;
    supply->returning.first = mapping->next;
    if (mapping->page->current != mapping) {
        gai_marks_end(pool, &block->marks);
        gai_marks_copy(pool, mapping->page->current->block, block);
    }
    gai_batch_add(batch, mapping, block);
}

/* Maps the mappings of a batch that are not mapped yet. They form one range of addresses. `function` becomes the name
   of the last function that was called. */
static CUresult gai_batch_map(galloc_pool *pool, gai_batch *batch, const char **function)
{
    CUmemAccessDesc access;
    CUresult result = CUDA_SUCCESS;
    gai_mapping *mapping;
    uintptr_t addr = 0;
    size_t bytes = 0;
    for (mapping = batch->first; mapping && !result; mapping = mapping->next) {
        if (mapping->was_mapped) continue;
        if (!bytes) addr = mapping->block->addr;
        bytes += mapping->bytes;
        result = gai_mapping_do(pool, mapping, mapping->block->addr, function);
    }
    if (result || !bytes) return result;
    /* One call gives access to all new mappings, since they are contiguous. */
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = pool->config.device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    *function = "cuMemSetAccess";
    return GAI_CALL(pool, set_access, MemSetAccess, ((CUdeviceptr)addr, bytes, &access, 1));
}

/* The batch is mapped: its mappings become current, its pages count in `reserved`, and its blocks become one busy
   block. [lock] */
static gai_block *gai_batch_publish(galloc_pool *pool, gai_batch *batch)
{
    gai_block *block = batch->first->block;
    gai_mapping *mapping;
    for (mapping = batch->first; mapping; mapping = mapping->next) {
        gai_page *page = mapping->page;
        gai_mapping_show(mapping, 1);
        mapping->was_mapped = 0;
        gai_history_mapped(pool, mapping);
        page->current = mapping;
        gai_stat_page(pool, page);
        if (mapping->block != block) gai_block_absorb(pool, block, mapping->block);
        mapping->block = NULL;
    }
    gai_block_show(block);
    return block;
}

/* ==== CALLBACKS =================================================================================================== */
/* >>callbacks */

/* The program's callbacks on_map and on_unmap, which report changes of mappings. [paging], released while the program's
   function runs. The mappings concerned are in no free set meanwhile, and their blocks are busy, so no other call can
   use them. Calls pages, statistics. */

/* The message of the call under way before a callback. The callback may call galloc, which overwrites it. */
typedef struct gai_callback_frame {
    char text[sizeof gai_thread.message];
    int is_new;
    uint32_t stack; /* of the call outside */
} gai_callback_frame;

static void gai_callback_begin(int *in, gai_callback_frame *saved)
{
    saved->is_new = gai_thread.message_is_new;
    if (saved->is_new) memcpy(saved->text, gai_thread.message, sizeof gai_thread.message);
    saved->stack = gai_thread.stack;
    gai_thread.message_is_new = 0;
    *in += 1;
}

static void gai_callback_end(int *in, const gai_callback_frame *saved)
{
    *in -= 1;
    if (saved->is_new) memcpy(gai_thread.message, saved->text, sizeof gai_thread.message);
    gai_thread.message_is_new = saved->is_new;
    gai_thread.stack = saved->stack;
}

/* Returns whether this thread is in on_map or on_unmap: then its calls must not map or unmap. */
static int gai_pool_is_still(const galloc_pool *pool)
{
    return gai_thread.in_mapping && (pool->callbacks.on_map || pool->callbacks.on_unmap);
}

/* Returns whether nothing may be unmapped: as above, or because all mappings are being reported to on_map. */
static int gai_pool_stays_mapped(const galloc_pool *pool) { return pool->walking || gai_pool_is_still(pool); }

/* Calls `tell` for each mapping of the batch that was not mapped before as an alias. Releases `paging` meanwhile. */
static void gai_pool_tell_all(galloc_pool *pool, const gai_batch *batch,
                              void (*tell)(galloc_pool *pool, void *addr, size_t bytes, void *user))
{
    void *user = pool->callbacks.user;
    const gai_mapping *mapping;
    gai_callback_frame saved;
    pool->telling++;
    gai_lock_off(&pool->paging);
    gai_callback_begin(&gai_thread.in_mapping, &saved);
    for (mapping = batch->first; mapping; mapping = mapping->next)
        if (!mapping->was_mapped) tell(pool->handle, (void *)mapping->addr, mapping->bytes, user);
    gai_callback_end(&gai_thread.in_mapping, &saved);
    gai_lock_on(&pool->paging);
    pool->telling--;
}

/* Reports a batch that is mapped and not published yet. Releases `paging` meanwhile. The pages count as held before
   that: other threads must not create as much once more. */
static void gai_pool_tell_mapped(galloc_pool *pool, const gai_batch *batch)
{
    const gai_mapping *mapping;
    if (!pool->callbacks.on_map) return;
    gai_lock_on(&pool->lock);
    for (mapping = batch->first; mapping; mapping = mapping->next) gai_stat_page(pool, mapping->page);
    gai_stat_cached(pool);
    gai_lock_off(&pool->lock);
    gai_pool_tell_all(pool, batch, pool->callbacks.on_map);
}

/* Reports a batch that is about to be unmapped. Releases `paging` meanwhile. */
static void gai_pool_tell_unmap(galloc_pool *pool, const gai_batch *batch)
{
    if (batch->first && pool->callbacks.on_unmap) gai_pool_tell_all(pool, batch, pool->callbacks.on_unmap);
}

/* ==== FIXED SEGMENTS ============================================================================================== */
/* >>fixed */

/* Fixed segments: each is one allocation of the driver, by cudaMalloc unless the variant has another source. The state
   changes under `paging` and `lock`. No driver call is made while `lock` is held. Calls pages, callbacks, budget,
   statistics. */

/* Returns bytes to the budget that were taken for a segment. */
static void gai_segment_refund(galloc_pool *pool, size_t bytes, const gai_site *site)
{
    if (!pool->variant.charge || site->capture_forbids) gai_budget_give(pool, bytes);
}

/* Makes a fixed segment that has no addresses yet: a busy block and a mapping for it. NULL: no host memory. */
static gai_segment *gai_segment_new_fixed(galloc_pool *pool, size_t bytes)
{
    gai_segment *segment = gai_segment_new(pool);
    if (!segment) return NULL;
    gai_lock_on(&pool->lock);
    segment->fixed = 1;
    segment->first->kind = GAI_BUSY;
    segment->first->bytes = bytes;
    if (gai_slab_need(&pool->pages, 1) && gai_slab_need(&pool->mappings, 1)) {
        segment->whole = gai_mapping_new(pool, segment->first, NULL);
    } else {
        gai_segment_end(pool, segment);
        segment = NULL;
    }
    gai_lock_off(&pool->lock);
    return segment;
}

/* Allocates the memory of a fixed segment. If a later step fails and the memory cannot be freed again, its address
   stays in the mapping. */
static CUresult gai_segment_fetch(galloc_pool *pool, gai_segment *segment, size_t bytes, const gai_site *site)
{
    size_t unit = segment->given ? GAI_UNIT : (size_t)1 << GAI_PAGE_LOG2;
    size_t exact = segment->given ? segment->given : bytes;
    CUdeviceptr addr = 0;
    CUresult result, undone;
    if (pool->variant.alloc) result = pool->variant.alloc(pool, segment, &addr, exact, site);
    else result = GAI_CALL(pool, mem_alloc, MemAlloc, (&addr, exact));
    if (result) return result;
    segment->whole->addr = (uintptr_t)addr;
    gai_addresses_are_new((uintptr_t)addr, exact);
    /* The block map needs multiples of 512 bytes, the page map of 2 MiB. */
    if (addr % unit) result = CUDA_ERROR_NOT_SUPPORTED;
    else if ((!segment->given && !gai_page_map_need((uintptr_t)addr, bytes)) ||
             !gai_block_map_need((uintptr_t)addr))
        result = GAI_NO_HOST_MEMORY;
    else if (pool->variant.charge) result = pool->variant.charge(pool, segment, bytes);
    if (!result) return CUDA_SUCCESS;
    if (pool->variant.dealloc) undone = pool->variant.dealloc(pool, addr, site);
    else undone = GAI_CALL(pool, mem_free, MemFree, (addr));
    if (!undone) segment->whole->addr = 0;
    return result;
}

/* Makes a segment of one driver allocation; *block is its busy block. The bytes were taken from the budget, unless the
   variant charges them afterwards. given: with a backend, the exact bytes to allocate; else 0. */
static CUresult gai_segment_fixed(galloc_pool *pool, size_t bytes, size_t given, const gai_site *site,
                                  gai_block **block)
{
    gai_batch batch = {NULL, NULL};
    CUresult result;
    gai_segment *segment = gai_segment_new_fixed(pool, bytes);
    if (!segment) {
        gai_segment_refund(pool, bytes, site);
        return GAI_NO_HOST_MEMORY;
    }
    segment->given = given;
    result = gai_segment_fetch(pool, segment, bytes, site);
    if (!result) GAI_TELL(pool, gai_segment_tell(segment, segment->whole->addr, bytes));
    gai_lock_on(&pool->lock);
    if (segment->whole->addr) gai_segment_link(pool, segment, segment->whole->addr, bytes);
    segment->whole->page->mappings = segment->whole->addr != 0;
    gai_batch_add(&batch, segment->whole, segment->first);
    if (!result) {
        gai_lock_off(&pool->lock);
        gai_pool_tell_mapped(pool, &batch);
        gai_lock_on(&pool->lock);
        if (pool->variant.charged) pool->variant.charged(pool, segment);
        *block = gai_batch_publish(pool, &batch);
        pool->stats.grows++;
    } else if (segment->whole->addr) {
        /* The allocation succeeded, a later step failed, and the memory could not be freed. The driver may have given
           the stream memory that the stream still uses. */
        if (segment->outside) pool->outside += bytes;
        else if (pool->variant.dealloc) gai_block_stamp_own(pool, segment->first, site->stream);
        gai_mapping_quarantine(pool, segment->whole);
    } else {
        gai_segment_refund(pool, bytes, site);
        gai_slab_give(&pool->pages, segment->whole->page);
        gai_slab_give(&pool->mappings, segment->whole);
        gai_segment_end(pool, segment);
    }
    if (pool->variant.settle) pool->variant.settle(pool);
    gai_lock_off(&pool->lock);
    if (result && pool->variant.refresh) pool->variant.refresh(pool); /* the driver may have trimmed its pool */
    return result;
}

/* Size of a new fixed segment for a request. */
static size_t gai_fixed_bytes(const galloc_pool *pool, size_t bytes)
{
    if (bytes <= GAI_MIB) return GAI_FIXED_SMALL;
    return gai_up(bytes < GAI_FIXED_OWN ? pool->config.large_segment_size : bytes, GAI_FIXED_SMALL);
}

/* ==== RELEASE ===================================================================================================== */
/* >>release */

/* Spare pages: pages that lie in free blocks as a whole, or are parked. This section selects them by a page filter, for
   a request or to be given back, and gives pages back to the driver. A page can only be given back or moved as a whole,
   so a block's spare pages are those that lie in it with all their bytes. Slots keep their bytes from being spare until
   their run is coalesced.
   [paging]; sets and blocks are changed under `lock`. gai_block_to_batch and gai_pool_coalesce make no driver call and
   need `lock` only: a free reaches them through parking. Calls marks, stream caches, pages, callbacks. */

/* A page filter says which pages are spare, and how many bytes of them are still needed: at least `wanted` if possible,
   never more than `most`, in pages of at least `least` bytes.
   params != NULL: for this request. may_wait: its stream may wait for recorded events of others.
   params == NULL: to be given back. No unfinished work may use the page through any of its mappings. */
typedef struct gai_page_filter {
    const gai_params *params;
    size_t wanted, most, least;
    int may_wait;
    int one_place;   /* the planner looks at one place, not at all of them */
    int no_wait;     /* cudaMallocAsync: what cudaMalloc made stays, since cudaFree waits */
    uint64_t before; /* to be given back: only pages that were not used later, counted in frees */
} gai_page_filter;

/* All pages that suit the request, or that may be given back. */
static gai_page_filter gai_page_filter_for(const gai_params *params)
{
    gai_page_filter filter;
    filter.params = params;
    filter.wanted = filter.most = SIZE_MAX;
    filter.least = 0;
    filter.may_wait = filter.one_place = filter.no_wait = 0;
    filter.before = UINT64_MAX;
    return filter;
}

/* Returns whether the work that used a page at its stale aliases is complete. */
static int gai_page_is_quiet(const gai_page *page)
{
    const gai_mapping *mapping;
    const gai_mark *mark;
    for (mapping = page->shown; mapping; mapping = mapping->next_shown) {
        if (mapping == page->current) continue;
        if (!mapping->block || mapping->block->kind != GAI_ALIAS) return 0; /* in quarantine */
        for (mark = mapping->block->marks; mark; mark = mark->next)
            if (!gai_mark_is_complete(mark)) return 0;
    }
    return 1;
}

/* Returns whether all of a mapping's bytes are memory that only the stream may use. */
static int gai_mapping_is_own(const gai_mapping *mapping, const gai_mark *mark, const gai_stream *stream)
{
    return gai_marks_own(mark, mapping->addr, mapping->addr + mapping->bytes, stream) == mapping->bytes;
}

/* Returns whether a mapping's page passes the filter. `mark`: the marks of the block that it lies in. In a native heap
   this keeps a free page in place while work may use it. To be given back, every mark on it must be complete, at its
   stale aliases as well. To be moved, every mark on it here must be complete, or the request's stream must be ordered
   after it, or (may_wait) able to wait for it: the old addresses stay mapped. */
static int gai_mapping_is_spare(const galloc_pool *pool, const gai_mapping *mapping, const gai_mark *mark,
                                const gai_page_filter *filter)
{
    if (mapping->bytes < filter->least) return 0;
    if (filter->params && filter->params->own_only) return gai_mapping_is_own(mapping, mark, filter->params->stream);
    if (!filter->params && (mapping->page->used > filter->before || !gai_page_is_quiet(mapping->page))) return 0;
    for (; mark; mark = mark->next) {
        if (mark->end <= mapping->addr || mark->begin >= mapping->addr + mapping->bytes) continue;
        if (gai_mark_allows(pool, mark, filter->params ? filter->params->stream : NULL)) continue;
        if (!filter->may_wait || !gai_mark_event(mark)) return 0;
    }
    return 1;
}

/* Finds the last row of whole pages in a free block that pass the filter. It takes the high end, since blocks are
   placed at the low one. Returns the row's length, 0 if there is none. */
static size_t gai_block_spare_pages(const galloc_pool *pool, const gai_block *block, const gai_page_filter *filter,
                                    uintptr_t *begin)
{
    uintptr_t end = 0, at = block->addr + block->bytes;
    size_t bytes = 0;
    if (block->bytes < GAI_FIXED_SMALL) return 0;
    while (at > block->addr && bytes < filter->wanted) {
        const gai_mapping *mapping = gai_page_at(at - 1);
        int fits = mapping->addr >= block->addr && mapping->addr + mapping->bytes <= block->addr + block->bytes;
        /* A page that does not fit or pass ends a row that has begun, and is skipped before one has. */
        if (fits && bytes + mapping->bytes <= filter->most &&
            gai_mapping_is_spare(pool, mapping, block->marks, filter)) {
            if (!end) end = mapping->addr + mapping->bytes;
            bytes = end - mapping->addr;
            *begin = mapping->addr;
        } else if (end) {
            break;
        }
        at = mapping->addr;
    }
    return bytes;
}

/* Cuts [begin, begin + bytes) out of a free block and adds its pages to the batch. Each gets a busy block, with the
   marks of its bytes. 0: no host memory, nothing changed. [lock] */
static int gai_block_to_batch(galloc_pool *pool, gai_block *block, uintptr_t begin, size_t bytes, gai_batch *batch)
{
    uintptr_t end = begin + bytes, at;
    size_t cuts = (size_t)(begin > block->addr) + (size_t)(end < block->addr + block->bytes);
    for (at = gai_page_at(begin)->bytes + begin; at < end; at += gai_page_at(at)->bytes) cuts++;
    if (!gai_slab_has(&pool->blocks, cuts) || !gai_slab_has(&pool->marks, (cuts + 1) * gai_marks_count(block->marks)))
        return 0;
    if (end < block->addr + block->bytes && !gai_block_map_need(end)) return 0;
    block = gai_block_cut_out(pool, block, begin, bytes, GAI_BUSY);
    while (begin < end) {
        gai_mapping *mapping = gai_page_at(begin);
        gai_block *rest = NULL;
        begin += mapping->bytes;
        if (begin < end) rest = gai_block_split(pool, block, begin, GAI_BUSY);
        gai_mapping_show(mapping, 0);
        gai_batch_add(batch, mapping, block);
        block = rest;
    }
    return 1;
}

/* The same for a page filter. A move may fail and put the pages back, so the map's nodes for that are made first. */
static int gai_spare_to_batch(galloc_pool *pool, gai_block *block, const gai_page_filter *filter, uintptr_t begin,
                              size_t bytes, gai_batch *batch)
{
    if (filter->params && !gai_block_map_need(begin)) return 0;
    return gai_block_to_batch(pool, block, begin, bytes, batch);
}

/* Takes pages out of a set's free blocks, least recently freed first, and reduces the filter's counts. 0: no host
   memory for all of them. [lock] */
static int gai_set_to_batch(galloc_pool *pool, gai_set *set, gai_page_filter *filter, gai_batch *batch)
{
    gai_block *block = set->oldest;
    int enough = 1;
    while (block && filter->wanted && enough) {
        uintptr_t begin = 0;
        gai_block *newer = block->newer;
        size_t bytes = gai_block_spare_pages(pool, block, filter, &begin);
        if (bytes) {
            enough = gai_spare_to_batch(pool, block, filter, begin, bytes, batch);
            if (!enough) { /* takes one page now; the caller's next round takes the rest */
                gai_page_filter one = *filter;
                one.wanted = 1;
                bytes = gai_block_spare_pages(pool, block, &one, &begin);
                if (!gai_spare_to_batch(pool, block, filter, begin, bytes, batch)) return 0;
            }
            filter->wanted -= gai_min(bytes, filter->wanted);
            filter->most -= bytes;
            if (newer && newer->set != set) newer = set->oldest; /* `newer` was merged with another block */
        }
        block = newer;
    }
    return enough;
}

/* Adds a parked page to a batch and reduces the filter's counts. */
static void gai_parked_take(galloc_pool *pool, gai_mapping *mapping, gai_page_filter *filter, gai_batch *batch)
{
    gai_alias_remove(pool, mapping);
    mapping->was_mapped = 1;
    gai_batch_add(batch, mapping, mapping->block);
    filter->wanted -= gai_min(mapping->bytes, filter->wanted);
    filter->most -= mapping->bytes;
}

/* Returns whether the alias is a parked page that passes the filter. */
static int gai_parked_serves(const galloc_pool *pool, const gai_mapping *mapping, const gai_page_filter *filter)
{
    return mapping->page->current == mapping && mapping->bytes <= filter->most &&
           gai_mapping_is_spare(pool, mapping, mapping->block->marks, filter);
}

/* The parked page that lies farthest behind the start of its room: the room's block needs it last. NULL: none passes
   the filter. */
static gai_mapping *gai_parked_farthest(const galloc_pool *pool, const gai_page_filter *filter)
{
    gai_mapping *mapping, *best = NULL;
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (mapping->block->room > (best ? best->block->room : 0) && gai_parked_serves(pool, mapping, filter))
            best = mapping;
    return best;
}

/* ---- lists of pages ---- */

/* Adds a page to a list, which can be sorted by the pages' `order`. */
static void gai_page_list(gai_page *page, uint64_t order, gai_page **list)
{
    page->order = order;
    page->next_unused = *list; /* free while the page is in use */
    *list = page;
}

/* Merges two sorted lists. Of equal pages those of `a` come first. */
static gai_page *gai_pages_merge(gai_page *a, gai_page *b)
{
    gai_page *merged = NULL, **at = &merged;
    while (a && b) {
        gai_page **least = a->order <= b->order ? &a : &b;
        *at = *least;
        at = &(*at)->next_unused;
        *least = *at;
    }
    *at = a ? a : b;
    return merged;
}

/* Merge sort; sorted[i] has 2^i pages or none. */
static gai_page *gai_pages_sort(gai_page *list)
{
    gai_page *sorted[64] = {NULL}, *all = NULL;
    int i;
    while (list) {
        gai_page *some = list;
        list = list->next_unused;
        some->next_unused = NULL;
        for (i = 0; sorted[i]; i++) {
            some = gai_pages_merge(sorted[i], some);
            sorted[i] = NULL;
        }
        sorted[i] = some;
    }
    for (i = 0; i < 64; i++) all = gai_pages_merge(sorted[i], all);
    return all;
}

/* The parked pages in rooms, sorted, the farthest from the start of its room first: a search for each would be
   quadratic. */
static gai_page *gai_parked_in_rooms(const galloc_pool *pool)
{
    gai_page *list = NULL;
    gai_mapping *mapping;
    for (mapping = pool->newest_alias; mapping; mapping = mapping->older)
        if (mapping->block->room && gai_block_is_parked(mapping->block))
            gai_page_list(mapping->page, UINT64_MAX - mapping->block->room, &list);
    return gai_pages_sort(list);
}

/* Takes parked pages that pass the filter, those parked longest first, and those in rooms last. */
static void gai_parked_to_batch(galloc_pool *pool, gai_page_filter *filter, gai_batch *batch)
{
    gai_mapping *mapping, *next;
    gai_page *page;
    for (mapping = pool->oldest_alias; mapping && filter->wanted; mapping = next) {
        next = mapping->newer;
        if (!mapping->block->room && gai_parked_serves(pool, mapping, filter))
            gai_parked_take(pool, mapping, filter, batch);
    }
    mapping = filter->wanted && pool->parked ? gai_parked_farthest(pool, filter) : NULL;
    if (!mapping) return;
    gai_parked_take(pool, mapping, filter, batch);
    for (page = filter->wanted ? gai_parked_in_rooms(pool) : NULL; page && filter->wanted; page = page->next_unused)
        if (gai_parked_serves(pool, page->current, filter)) gai_parked_take(pool, page->current, filter, batch);
}

/* Takes parked pages, then pages of free blocks: of the common set, of the requesting stream's own set, then of all
   others. */
static void gai_pool_to_batch(galloc_pool *pool, gai_page_filter *filter, gai_batch *batch)
{
    gai_stream *own = filter->params ? filter->params->stream : NULL;
    gai_set *set;
    int enough;
    gai_parked_to_batch(pool, filter, batch);
    enough = gai_set_to_batch(pool, &pool->common, filter, batch);
    if (enough && own) enough = gai_set_to_batch(pool, &own->free, filter, batch);
    for (set = &pool->mixed; set && enough; set = set->next)
        if (!own || set != &own->free) enough = gai_set_to_batch(pool, set, filter, batch);
}

/* Adds the stale aliases of a batch's pages to the batch, since the pages are going to be given back. [lock] */
static void gai_batch_add_aliases(galloc_pool *pool, gai_batch *batch)
{
    gai_mapping *mapping, *last = batch->last, *alias;
    for (mapping = batch->first; mapping; mapping = mapping->next) {
        mapping->was_mapped = 0;
        gai_history_unmapped(pool, mapping);
        gai_mapping_show(mapping, 0);
        mapping->page->current = NULL;
        for (alias = mapping->page->shown; alias; alias = alias->next_shown) {
            if (alias == mapping) continue;
            gai_alias_remove(pool, alias);
            gai_batch_add(batch, alias, alias->block);
        }
        /* The aliases added here follow `last`; they have no aliases of their own to add. */
        if (mapping == last) break;
    }
}

/* Gives back spare pages that pass the filter, until the bytes it wants are given or there are no more. Returns the
   bytes given. With other backends only the bytes count. Releases `paging` while on_unmap runs. */
static size_t gai_pool_release_by(galloc_pool *pool, const gai_page_filter *which)
{
    size_t wanted = which->wanted, held, given = 0;
    int some;
    if (gai_pool_stays_mapped(pool)) return 0;
    if (pool->variant.release) return pool->variant.release(pool, wanted, which->no_wait);
    do {
        gai_page_filter filter = *which;
        gai_batch batch = {NULL, NULL};
        filter.wanted = wanted - given;
        filter.most = gai_left(which->most, given);
        gai_lock_on(&pool->lock);
        if (given) gai_pool_flush(pool); /* a callback may have allocated and freed */
        if (pool->variant.coalesce) pool->variant.coalesce(pool, 1);
        gai_pool_to_batch(pool, &filter, &batch);
        gai_batch_add_aliases(pool, &batch);
        gai_lock_off(&pool->lock);
        /* Host memory may have sufficed for a part only: the loop ends when a round finds nothing. */
        some = batch.first != NULL;
        gai_pool_tell_unmap(pool, &batch);
        held = gai_pool_held(pool);
        gai_batch_undo(pool, &batch);
        given += held - gai_pool_held(pool);
    } while (some && given < wanted);
    return given;
}

/* Gives back pages that were not used after `before`: `wanted` bytes if there are as many, never more than `most`. */
static size_t gai_pool_release_within(galloc_pool *pool, size_t wanted, size_t most, uint64_t before)
{
    gai_page_filter filter = gai_page_filter_for(NULL);
    filter.wanted = wanted;
    filter.most = most;
    filter.before = before;
    return gai_pool_release_by(pool, &filter);
}

static size_t gai_pool_release(galloc_pool *pool, size_t wanted)
{
    return gai_pool_release_within(pool, wanted, SIZE_MAX, UINT64_MAX);
}

/* ==== PARKING ===================================================================================================== */
/* >>parking */

/* Parked pages, stale aliases, and the pages of a move that fails. A parked page is mapped but in no free set: its
   block is an alias. A program that repeats itself makes the same requests in each pass. If each pass finds the heap in
   the same state, each request is served as before, and pages return to their stale aliases without a driver call. So
   when nothing is live, all pages are parked and later used in the order in which they were first mapped.
   [paging], and `lock` for changes of state. gai_pool_park and gai_pool_park_room run in frees, under `lock` alone, and
   make no driver call. Calls release, pages, callbacks. */

/* Puts the pages of donors back into free blocks, since their move failed. [lock] */
static void gai_donors_restore(galloc_pool *pool, gai_batch *donors)
{
    gai_block *block = NULL;
    while (donors->first) {
        gai_mapping *mapping = donors->first;
        donors->first = mapping->next;
        if (mapping->was_mapped) {
            gai_alias_add(pool, mapping);
            continue;
        }
        gai_mapping_show(mapping, 1);
        if (!block) block = mapping->block;
        else gai_block_absorb(pool, block, mapping->block);
        mapping->block = NULL;
        /* Neighbouring pages become one block before that is filed. */
        if (donors->first && !donors->first->was_mapped && donors->first->block == block->next) continue;
        gai_block_show(block);
        (void)gai_block_file(pool, block, 0);
        block = NULL;
    }
}

/* Puts back donors' pages of up to `surplus` bytes. Returns the bytes put back. If the page behind one that goes back
   is kept, a block may begin at it later, which needs map nodes. */
static size_t gai_donors_trim(galloc_pool *pool, gai_batch *donors, size_t surplus)
{
    gai_batch kept = {NULL, NULL}, back = {NULL, NULL};
    size_t bytes = 0;
    gai_mapping *mapping, *next;
    for (mapping = donors->first; mapping; mapping = next) {
        next = mapping->next;
        if (bytes + mapping->bytes <= surplus && gai_block_map_need(mapping->addr) &&
            (!next || gai_block_map_need(next->addr))) {
            bytes += mapping->bytes;
            gai_batch_add(&back, mapping, mapping->block);
        } else {
            gai_batch_add(&kept, mapping, mapping->block);
        }
    }
    *donors = kept;
    gai_donors_restore(pool, &back);
    return bytes;
}

/* The move succeeded: the old ranges stay mapped as stale aliases. Their marks remain and say when they may be
   unmapped; streams without an event for them are asked for one. [lock] */
static void gai_donors_leave(galloc_pool *pool, gai_batch *donors)
{
    while (donors->first) {
        gai_mapping *mapping = donors->first;
        gai_mark *mark;
        donors->first = mapping->next;
        gai_block_hide(mapping->block);
        gai_mapping_show(mapping, 0);
        for (mark = mapping->block->marks; mark; mark = mark->next)
            if (!gai_mark_is_complete(mark) && !gai_mark_event(mark)) gai_stream_ask(mark->stream);
        gai_alias_add(pool, mapping);
        pool->tuning.moves++;
        pool->stats.moves++;
        pool->stats.moved_bytes += mapping->bytes;
    }
}

/* Finds the whole pages in a free block, which lie side by side. Returns their bytes, 0 if there are none. */
static size_t gai_block_whole_pages(const gai_block *block, uintptr_t *begin)
{
    uintptr_t at = block->addr, end = block->addr + block->bytes;
    while (at < end && gai_page_at(at)->addr < at) at = gai_page_at(at)->addr + gai_page_at(at)->bytes;
    *begin = at;
    while (at < end && at + gai_page_at(at)->bytes <= end) at += gai_page_at(at)->bytes;
    return at > end ? 0 : at - *begin;
}

/* Parks the pages of a batch. Returns the last one's block. [lock] */
static gai_block *gai_batch_park(galloc_pool *pool, gai_batch *batch)
{
    gai_block *block = NULL;
    while (batch->first) {
        gai_mapping *mapping = batch->first;
        batch->first = mapping->next;
        gai_block_hide(mapping->block);
        gai_mapping_show(mapping, 1);
        gai_alias_add(pool, mapping);
        block = mapping->block;
    }
    return block;
}

/* Parks the whole pages in a free block. Returns the next block. [lock] */
static gai_block *gai_block_park(galloc_pool *pool, gai_block *block)
{
    uintptr_t begin;
    size_t bytes = gai_block_whole_pages(block, &begin);
    gai_batch batch = {NULL, NULL};
    if (!bytes || !gai_block_to_batch(pool, block, begin, bytes, &batch)) return block->next;
    return gai_batch_park(pool, &batch)->next;
}

/* Returns whether the block is a free one of this pool that contains the mapping. */
static int gai_mapping_is_within(const galloc_pool *pool, const gai_mapping *mapping, const gai_block *block)
{
    return block && gai_load_pointer(&block->pool) == pool && block->kind == GAI_FREE &&
           block->addr <= mapping->addr && block->addr + block->bytes >= mapping->addr + mapping->bytes;
}

/* Parks the pages of a freed block that had room, for the next block there. It goes from high to low addresses:
   other requests take parked pages in that order, so the start of the room lasts longest. Each next page lies in the
   free block before the one just cut out. */
static void gai_pool_park_room(galloc_pool *pool, uintptr_t begin, uintptr_t end)
{
    gai_block *block = gai_block_before(end - 1);
    while (begin < end) {
        gai_mapping *mapping = gai_page_at(end - 1);
        gai_batch batch = {NULL, NULL};
        end = mapping->addr;
        if (gai_mapping_is_within(pool, mapping, block) && gai_block_to_batch(pool, block, end, mapping->bytes, &batch))
            block = gai_batch_park(pool, &batch)->prev;
    }
}

/* Merges the blocks of a set with free neighbours of other sets, whichever streams freed those. */
static void gai_set_join(galloc_pool *pool, gai_set *set)
{
    gai_block *block, *newer;
    for (block = set->oldest; block; block = newer) {
        const gai_block *first = block, *last = block;
        newer = block->newer;
        if (block->kind == GAI_SLOT || !gai_block_partner(pool, block, 1)) continue;
        while (first->prev && first->prev->kind == GAI_FREE) first = first->prev;
        while (last->next && last->next->kind == GAI_FREE) last = last->next;
        /* The blocks from `first` to `last` may all merge with this one, so the loop goes on behind them. */
        while (newer && newer->addr >= first->addr && newer->addr <= last->addr) newer = newer->newer;
        gai_set_remove(block);
        (void)gai_block_file(pool, block, 1);
    }
}

/* Merges free neighbours of different streams when memory is short: the next user waits anyway. Neighbours with
   marks of one stream are merged already, so one stream's set, the largest, can be left out. */
static void gai_pool_join(galloc_pool *pool)
{
    gai_set *largest = pool->mixed.next, *set;
    if (pool->variant.coalesce) pool->variant.coalesce(pool, 1);
    for (set = pool->mixed.next; set; set = set->next)
        if (set->bytes > largest->bytes) largest = set;
    for (set = &pool->mixed; set; set = set->next)
        if (set != largest) gai_set_join(pool, set);
}

/* Returns whether pages are to be parked: nothing is live, and either pages were mapped since the last time, or
   fewer than `calm_most` times in a row have passed without. Each return of a parked page costs a plan, hence the
   limit. */
static int gai_pool_should_park(galloc_pool *pool)
{
    if (!pool->config.expandable_segments) return 0;
    return (pool->parking.mapped || pool->parking.calm < pool->parking.calm_most) && !gai_pool_live(pool);
}

/* Parks all pages that are free as a whole. Streams with frees that have no mark yet are asked for one. */
static void gai_pool_park(galloc_pool *pool)
{
    gai_segment *segment;
    gai_block *block, *next;
    gai_stream *stream;
    gai_pool_flush(pool);
    gai_pool_join(pool);
    for (segment = pool->segments; segment; segment = segment->next) {
        if (segment->fixed) continue;
        for (block = segment->first; block; block = next)
            next = block->kind == GAI_FREE ? gai_block_park(pool, block) : block->next;
    }
    for (stream = gai_pool_has_one_stream(pool) ? NULL : pool->streams; stream; stream = stream->next)
        if (gai_stream_unmarked(stream)) gai_stream_ask(stream);
    /* Parking had stopped, and then pages were mapped: the next time it stops after twice as many quiet passes. */
    if (pool->parking.mapped && pool->parking.calm >= pool->parking.calm_most) pool->parking.calm_most *= 2;
    pool->parking.calm = pool->parking.mapped ? 0 : pool->parking.calm + 1;
    pool->parking.mapped = 0;
}

/* Makes parked pages that overlap [begin, end) free blocks again, except those in rooms. Requests may then take
   parts of a page. */
static void gai_pool_unpark(galloc_pool *pool, uintptr_t begin, uintptr_t end)
{
    gai_mapping *mapping, *newer;
    for (mapping = pool->oldest_alias; mapping; mapping = newer) {
        gai_block *block = mapping->block;
        newer = mapping->newer;
        if (mapping->addr >= end || mapping->addr + mapping->bytes <= begin || block->room) continue;
        if (!gai_block_is_parked(block) || !gai_block_map_need(mapping->addr)) continue;
        gai_alias_remove(pool, mapping);
        mapping->block = NULL;
        gai_block_show(block);
        (void)gai_block_file(pool, block, 0);
    }
}

/* Limits of what is kept: bytes of stale aliases and reserved addresses as multiples of the memory held, and the
   number of stale aliases, unless there are many pages. More would not save more driver calls; each alias costs host
   memory and planning time. */
#define GAI_STALE_KEPT 8
#define GAI_STALE_MAX 2048
#define GAI_ADDRESSES_KEPT 12

/* Unmaps stale aliases that overlap [begin, end), oldest first, until at most `keep` bytes and `most` aliases remain
   in the pool. Aliases with unfinished work stay. Never waits. Releases `paging` while on_unmap runs. */
static void gai_pool_drop_stale(galloc_pool *pool, uintptr_t begin, uintptr_t end, size_t keep, size_t most)
{
    gai_batch batch = {NULL, NULL};
    gai_mapping *mapping, *newer;
    if (gai_pool_stays_mapped(pool)) return;
    gai_lock_on(&pool->lock);
    for (mapping = pool->oldest_alias; mapping && (pool->stats.leaving > keep || pool->stale > most); mapping = newer) {
        newer = mapping->newer;
        gai_marks_prune(pool, &mapping->block->marks);
        /* Parked pages are no stale aliases, and marks that remain after the pruning are of unfinished work. */
        if (mapping->page->current == mapping || mapping->block->marks) continue;
        if (mapping->addr >= end || mapping->addr + mapping->bytes <= begin) continue;
        gai_alias_remove(pool, mapping);
        gai_batch_add(&batch, mapping, mapping->block);
    }
    gai_lock_off(&pool->lock);
    gai_pool_tell_unmap(pool, &batch);
    gai_batch_undo(pool, &batch);
}

/* Drops the stale aliases beyond the limits. */
static void gai_pool_limit_stale(galloc_pool *pool)
{
    /* A program that repeats itself uses all its aliases in turn. With a few too few kept, each would be dropped
       just before its use, in every pass. The number it needs grows with the number of pages. */
    size_t held, pages = 0;
    int i;
    gai_lock_on(&pool->lock);
    held = pool->stats.reserved.current;
    for (i = 0; i < GALLOC_PAGE_SIZES; i++) pages += pool->stats.pages[i].count;
    gai_lock_off(&pool->lock);
    gai_pool_drop_stale(pool, 0, UINTPTR_MAX, held > SIZE_MAX / GAI_STALE_KEPT ? SIZE_MAX : GAI_STALE_KEPT * held,
                      gai_max(GAI_STALE_MAX, pages + pages / 2));
}

/* Tries again to undo the mappings in the quarantine. */
static void gai_pool_retry(galloc_pool *pool)
{
    gai_batch batch;
    gai_mapping *mapping;
    gai_lock_on(&pool->lock);
    batch.first = pool->quarantine;
    for (mapping = pool->quarantine; mapping; mapping = mapping->next) mapping->page->stuck = 0;
    pool->quarantine = NULL;
    pool->stats.quarantined = 0;
    gai_lock_off(&pool->lock);
    gai_batch_undo(pool, &batch);
}

static int gai_segment_is_used(const gai_segment *segment)
{
    const gai_block *block = segment->first;
    while (block && block->kind != GAI_USED) block = block->next;
    return block != NULL;
}

/* Ends the lost segments that have no used block. */
static void gai_pool_sweep_lost(galloc_pool *pool)
{
    gai_segment *segment, *next;
    gai_lock_on(&pool->lock);
    for (segment = pool->lost ? pool->segments : NULL; segment; segment = next) {
        next = segment->next;
        if (!segment->lost || gai_segment_is_used(segment) || !segment->whole->page->current) continue;
        gai_segment_hide(pool, segment);
        gai_stat_page_gone(pool, segment->whole->page, 0, 1);
        gai_slab_give(&pool->pages, segment->whole->page);
        gai_slab_give(&pool->mappings, segment->whole);
        gai_segment_end(pool, segment);
    }
    gai_lock_off(&pool->lock);
}

/* Turns a used block, which carries all its marks, into a free block and counts the free. [lock] */
static GAI_INLINE void gai_block_put(galloc_pool *pool, gai_block *block)
{
    const gai_stream *stream = block->stream;
    gai_stat_unused(pool, block->bytes, (size_t)block->requested);
    pool->stats.blocks.current--;
    pool->stats.frees++;
    gai_block_untake(pool, block);
    gai_block_give(pool, block);
    if (!stream->blocks && gai_pool_should_park(pool)) gai_pool_park(pool);
}

/* ==== ROUNDING ==================================================================================================== */
/* >>rounding */

/* How many bytes a request gets. Derived from the settings when a pool
   begins, and not changed. Calls the platform. */

/* Bytes to allocate for a request: sizes between two powers of two are rounded up to the configured number of steps. */
static size_t gai_rounded(const galloc_pool *pool, size_t bytes)
{
    size_t divisions;
    int at;
    if (bytes <= pool->plain || bytes > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_up(bytes, GAI_UNIT);
    /* roundup_power2_divisions has an entry for each power of two from 1 MiB on. The first one also serves smaller
       sizes. */
    at = gai_log2(bytes) - 20;
    divisions = pool->config.roundup_power2_divisions[at < 1 ? 0 : gai_min((size_t)at, GALLOC_DIVISIONS - 1)];
    if (pool->divisions && bytes <= GAI_SLOT_MOST) divisions = pool->divisions;
    return gai_up_by_steps(bytes, divisions);
}

/* Derives `plain` and `special` from the settings. */
static void gai_pool_choose_rounding(galloc_pool *pool)
{
    int i;
    pool->plain = pool->divisions ? GAI_UNIT * pool->divisions : SIZE_MAX;
    for (i = 0; i < GALLOC_DIVISIONS; i++) {
        size_t divisions = pool->config.roundup_power2_divisions[i];
        if (divisions > 1) pool->plain = gai_min(pool->plain, GAI_UNIT * divisions);
    }
    if (pool->variant.one_each) pool->plain = SIZE_MAX;
    pool->special = pool->variant.route;
    if (pool->oversize) pool->special = GAI_ROUTE_LONG;
    else if (!pool->special && pool->plain != SIZE_MAX) pool->special = GAI_ROUTE_ROUNDED;
}

/* ==== USERS ======================================================================================================= */
/* >>users */

/* Calls that are in a pool keep it from ending. pool->users counts them without a lock; the call that ends a pool sets
   GAI_ENDED there, after which no other call comes in, and waits until it is the only user. This section also looks up
   handles of pools and detects a reset of the pool's context.
   gai_pool_enter takes `paging`; the rest takes no lock for longer than a change of state. Calls streams, parking. */

/* Counts a call (1 or GAI_USER_OF_ALL) as a user of the pool that is at this address now. The pool does not end before
   the call goes out. 0: there is no pool. */
static int gai_pool_come_in(galloc_pool *pool, uint64_t call)
{
    uint64_t users = gai_load(&pool->users);
    while (!(users & GAI_ENDED)) {
        if (gai_swap(&pool->users, users, users + call)) return 1;
        users = gai_load(&pool->users);
    }
    return 0;
}

static void gai_pool_go_out(galloc_pool *pool, uint64_t call)
{
    uint64_t users = gai_load(&pool->users);
    while (!gai_swap(&pool->users, users, users - call)) users = gai_load(&pool->users);
}

static int gai_pool_pin(galloc_pool *pool) { return gai_pool_come_in(pool, 1); }

static void gai_pool_unpin(galloc_pool *pool) { gai_pool_go_out(pool, 1); }

static cudaError_t gai_pool_is_gone(const galloc_pool *handle)
{
    return gai_fail(cudaErrorInvalidResourceHandle, "%p is no pool: it has been destroyed, or never was one",
                    (const void *)handle);
}

/* Looks up a handle and pins its pool. The handle is compared, never dereferenced. */
static cudaError_t gai_pool_find(galloc_pool **pool)
{
    galloc_pool *at = (galloc_pool *)gai_load_pointer(&gai_process.known_pools);
    /* A handle is an address within the pool, a different one for each pool that was made in this memory. */
    while (at && (uintptr_t)*pool - (uintptr_t)at >= sizeof *at) at = (galloc_pool *)at->known;
    if (at && gai_pool_pin(at)) {
        int same = at->handle == *pool;
        if (same) *pool = at;
        if (same) return cudaSuccess;
        gai_pool_unpin(at);
    }
    return gai_pool_is_gone(*pool);
}

/* After cudaDeviceReset the primary context is a new one at the same address. Pages and their mappings survive a
   reset; memory of cudaMalloc does not. */
static cudaError_t gai_pool_check_context(galloc_pool *pool)
{
    CUcontext context = NULL;
    unsigned long long id = 0;
    enum gai_health health;
    CUresult result = gai_context_look(pool->context, pool->context_id, &health);
    if (health == GAI_ALIVE) return cudaSuccess;
    if (health == GAI_UNKNOWN) return gai_driver_failed(result, "cuCtxGetId");
    result = gai_cu.DevicePrimaryCtxRetain(&context, pool->config.device);
    if (result) return gai_driver_failed(result, "cuDevicePrimaryCtxRetain");
    result = gai_cu.CtxGetId(context, &id);
    if (result) {
        (void)gai_cu.DevicePrimaryCtxRelease(pool->config.device);
        return gai_driver_failed(result, "cuCtxGetId");
    }
    gai_lock_on(&pool->lock);
    pool->context_id = id;
    /* A sticky error ends with the context that had it. */
    gai_store(&pool->broken, 0);
    gai_pool_lose_context(pool);
    gai_lock_off(&pool->lock);
    return cudaSuccess;
}

/* Makes the pool's context current, empties all stream caches, and ends lost segments, dead streams and ended
   graphs. On failure `paging` is released and the context is unchanged. [paging] */
static cudaError_t gai_pool_enter_locked(galloc_pool *pool, gai_scope *scope)
{
    CUresult result;
    cudaError_t error = gai_pool_check_context(pool);
    if (!error) {
        result = gai_scope_enter(scope, pool->context);
        if (result) error = gai_driver_failed(result, "cuCtxPushCurrent");
    }
    if (error) {
        gai_lock_off(&pool->paging);
        return error;
    }
    gai_lock_on(&pool->lock);
    gai_pool_flush(pool);
    gai_stat_peaks(pool);
    gai_lock_off(&pool->lock);
    gai_pool_sweep_lost(pool);
    gai_pool_end_dead_streams(pool);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    gai_lock_off(&pool->lock);
    return cudaSuccess;
}

/* Asks how far the streams are, unless another thread changes pages now. [no lock] */
static void gai_pool_try_poll(galloc_pool *pool)
{
    int is_new = gai_thread.message_is_new;
    gai_scope scope;
    if (gai_load(&pool->broken) || !gai_lock_try(&pool->paging)) return;
    if (!gai_pool_enter_locked(pool, &scope)) {
        gai_pool_poll(pool);
        gai_scope_leave(&scope);
        gai_lock_off(&pool->paging);
    }
    gai_thread.message_is_new = is_new;
}

static cudaError_t gai_pool_enter(galloc_pool *pool, gai_scope *scope)
{
    gai_lock_on(&pool->paging);
    return gai_pool_enter_locked(pool, scope);
}

/* ==== COLLECTION ================================================================================================== */
/* >>collection */

/* Gives idle pages back: above gc_threshold, and after gc_age without use. It takes the pages that were unused for
   longest and that no unfinished work can touch, so no thread or stream waits. Fixed segments are left alone, since
   cudaFree waits for the device; only like:pytorch collects them (gai_step_torch_collect), and waits. [paging]; `lock`
   guards the collector's state. Calls release, events, users. */

/* Age: each free stores its number in the pages of its block, and samples record how many frees there were at what
   time. A page last used before a sample that is gc_age old is that old itself.
   Threshold: a collection stops a little below gc_threshold. Then collection rests for some frees: for twice as many
   if half of the bytes that it gave back were soon created again, for half as many after 10 s without a change. So a
   program whose use of memory oscillates does not pay in each cycle.
   Three waits grow by doubling, and are apart because each counts other events and ends by another one: `patience`,
   frees without collection, halves with time; `stride`, frees between two looks at the clock, ends at a late sample;
   `calm_most`, parkings in a row after which no page was mapped, never falls. */
#define GAI_COLLECT_BELOW 16 /* collect to a 16th below gc_threshold */
#define GAI_COLLECT_SOON 10000000000u /* 10 s */
#define GAI_REST_LEAST 64
#define GAI_REST_MOST ((uint64_t)1 << 20)
#define GAI_SAMPLE_LEAST 1000000u /* at least 1 ms between samples */
#define GAI_STRIDE_MOST 16

static int gai_pool_has_age(const galloc_pool *pool) { return pool->config.gc_age != UINT64_MAX; }

/* Bytes that may be held before collection begins. */
static size_t gai_pool_threshold(const galloc_pool *pool)
{
    if (!pool->collects || !(pool->config.gc_threshold > 0)) return SIZE_MAX;
    return (size_t)(pool->config.gc_threshold * (double)gai_pool_capacity(pool));
}

/* Bytes that a collection for gc_threshold has to give back, 0 if none is due. [lock] */
static size_t gai_pool_excess(const galloc_pool *pool)
{
    size_t held = pool->stats.reserved.current, begin = gai_pool_threshold(pool);
    if (held <= begin || pool->clock < pool->collector.rest) return 0;
    return held - (begin - begin / GAI_COLLECT_BELOW);
}

/* The time of the last sample. */
static uint64_t gai_collector_last(const gai_collector *collector)
{
    return collector->samples[(collector->sampled + GAI_SAMPLES - 1) % GAI_SAMPLES].ns;
}

/* Takes a sample if it is time for one. Returns the number of the last free that is known to be gc_age old. [lock] */
static uint64_t gai_pool_aged(galloc_pool *pool, uint64_t now)
{
    gai_collector *collector = &pool->collector;
    uint64_t age = pool->config.gc_age, aged = 0, at;
    if (!gai_pool_has_age(pool)) return 0;
    for (at = 0; at < GAI_SAMPLES && at < collector->sampled; at++) {
        uint64_t ns = collector->samples[at].ns;
        if (now >= ns && now - ns >= age) aged = gai_max(aged, collector->samples[at].frees);
    }
    /* Half of the samples span gc_age, so one that old is still there when it is needed. */
    if (!collector->sampled || now - gai_collector_last(collector) >= age / (GAI_SAMPLES / 2) + GAI_SAMPLE_LEAST) {
        at = collector->sampled++ % GAI_SAMPLES;
        collector->samples[at].frees = pool->clock;
        collector->samples[at].ns = now;
    }
    return aged;
}

/* Lists the spare pages of one set's blocks. */
static void gai_set_list_spare(const galloc_pool *pool, const gai_set *set, const gai_page_filter *filter,
                               gai_page **list)
{
    const gai_block *block;
    for (block = set->oldest; block; block = block->newer) {
        uintptr_t begin, at;
        size_t bytes = block->bytes < GAI_FIXED_SMALL ? 0 : gai_block_whole_pages(block, &begin);
        for (at = bytes ? begin : 0; bytes && at < begin + bytes;) {
            gai_mapping *mapping = gai_page_at(at);
            at += mapping->bytes;
            if (gai_mapping_is_spare(pool, mapping, block->marks, filter))
                gai_page_list(mapping->page, mapping->page->used, list);
        }
    }
}

/* Lists the pages that may be given back, unsorted. [lock] */
static gai_page *gai_pool_list_spare(const galloc_pool *pool, const gai_page_filter *filter)
{
    gai_page *list = NULL;
    const gai_set *set;
    const gai_mapping *mapping;
    for (set = &pool->common; set; set = set->next) gai_set_list_spare(pool, set, filter, &list);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (mapping->page->current == mapping && gai_mapping_is_spare(pool, mapping, mapping->block->marks, filter))
            gai_page_list(mapping->page, mapping->page->used, &list);
    return list;
}

/* Gives back up to `excess` bytes of pages, those unused for longest first, but keeps `leave` bytes of spare pages,
   which can move to a request. */
static size_t gai_pool_collect_oldest(galloc_pool *pool, size_t excess, size_t leave)
{
    gai_page_filter filter = gai_page_filter_for(NULL);
    gai_page *list, *page;
    size_t spare = 0, chosen = 0;
    uint64_t before = 0;
    gai_lock_on(&pool->lock);
    list = gai_pages_sort(gai_pool_list_spare(pool, &filter));
    for (page = list; page; page = page->next_unused) spare += page->bytes;
    /* Pages are chosen up to `spare` and `excess`, but at least one if `spare` allows it; `before` is the last one's
       use. */
    spare = gai_left(spare, leave);
    for (page = list; page && chosen + page->bytes <= spare; page = page->next_unused) {
        if (chosen && chosen + page->bytes > excess) break;
        chosen += page->bytes;
        before = page->used;
    }
    gai_lock_off(&pool->lock);
    return chosen ? gai_pool_release_within(pool, chosen, chosen, before) : 0;
}

/* Sets how long collection for gc_threshold rests. [lock] */
static void gai_collector_rest(galloc_pool *pool, size_t given, uint64_t now)
{
    gai_collector *collector = &pool->collector;
    uint64_t rest = GAI_STRIDE_MOST; /* nothing was given: perhaps events have not completed yet */
    if (given) {
        int late = now - collector->ns >= GAI_COLLECT_SOON;
        int soon = collector->collected && collector->created >= collector->collected / 2;
        if (late) collector->patience = gai_max(collector->patience / 2, GAI_REST_LEAST);
        else if (soon) collector->patience = gai_min(2 * collector->patience, GAI_REST_MOST);
        if (late || soon) {
            collector->collected = collector->created = 0;
            collector->ns = now;
        }
        collector->collected += given;
        rest = collector->patience;
    }
    collector->rest = pool->clock + rest;
}

/* Asks streams to record an event at their next call, since a lone stream never records one by itself. The legacy
   stream is asked only if it is the only one: an event there makes blocking streams wait for each other. [lock] */
static void gai_pool_ask_streams(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next)
        if (gai_stream_unmarked(stream) && (stream->handle != CU_STREAM_LEGACY || gai_pool_has_one_stream(pool)))
            gai_stream_ask(stream);
}

/* Gives back pages that are due; `leave`: bytes that are about to be requested. Never waits. In the pool's scope.
   [paging] */
static void gai_pool_collect(galloc_pool *pool, size_t leave)
{
    gai_collector *collector = &pool->collector;
    uint64_t now = GALLOC_CLOCK(), aged;
    size_t excess, old = 0, given = 0;
    if (!pool->collects) return;
    gai_pool_poll(pool);
    gai_lock_on(&pool->lock);
    aged = gai_pool_aged(pool, now);
    if (aged > collector->aged || gai_pool_excess(pool)) gai_pool_ask_streams(pool);
    gai_lock_off(&pool->lock);
    /* First all pages that are gc_age old, then as many others as gc_threshold demands. */
    if (aged > collector->aged) old = gai_pool_release_within(pool, SIZE_MAX, SIZE_MAX, aged);
    gai_lock_on(&pool->lock);
    if (aged > collector->aged) collector->aged = aged;
    excess = gai_pool_excess(pool);
    gai_lock_off(&pool->lock);
    if (excess) given = gai_pool_collect_oldest(pool, excess, leave);
    gai_lock_on(&pool->lock);
    if (excess) gai_collector_rest(pool, given, now);
    pool->stats.collections += old || given;
    pool->stats.collected_bytes += old + given;
    gai_lock_off(&pool->lock);
}

/* Sets the clock of the next look; the next free, if a sample was taken late. [lock] */
static void gai_collector_stride(galloc_pool *pool, uint64_t now)
{
    gai_collector *collector = &pool->collector;
    uint64_t step = pool->config.gc_age / (GAI_SAMPLES / 2) + GAI_SAMPLE_LEAST;
    collector->stride = gai_min(2 * collector->stride, GAI_STRIDE_MOST);
    if (gai_pool_has_age(pool) && now - gai_collector_last(collector) > step) collector->stride = 1;
    collector->look = pool->collects ? pool->clock + collector->stride : UINT64_MAX;
}

/* Collects what is due, and forgets idle stream states. [paging], released at the end. */
static void gai_pool_collect_due(galloc_pool *pool)
{
    gai_scope scope;
    if (gai_pool_enter_locked(pool, &scope)) {
        gai_thread.message_is_new = 0; /* the free has succeeded nevertheless */
        return;
    }
    gai_pool_collect(pool, 0);
    gai_lock_on(&pool->lock);
    gai_stat_cached(pool);
    gai_lock_off(&pool->lock);
    gai_pool_sweep_streams(pool);
    gai_scope_leave(&scope);
    gai_lock_off(&pool->paging);
}

/* Looks whether a collection or a sweep is due; called after a free that reached the pool. It does not wait for
   `paging` if another thread holds it. The pool may have ended, since the free is over. */
GAI_APART
static void gai_pool_tend(galloc_pool *pool)
{
    uint64_t now = GALLOC_CLOCK();
    int due;
    if (!gai_pool_pin(pool)) return;
    gai_lock_on(&pool->lock);
    gai_collector_stride(pool, now);
    due = gai_pool_aged(pool, now) > pool->collector.aged || gai_pool_excess(pool);
    due = due || gai_pool_is_crowded(pool);
    gai_lock_off(&pool->lock);
    if (due && !gai_load(&pool->broken) && gai_lock_try(&pool->paging)) gai_pool_collect_due(pool);
    gai_pool_unpin(pool);
}

/* ==== GUARDS ====================================================================================================== */
/* >>guards */

/* The setting `debug`: finds writes beyond the ends of blocks, and makes uses of freed memory visible. A guard is a
   pattern behind a block. So the bytes before a block are the guard of its neighbour, and pointers stay as they are.
   The stream that a block is given to sets the guard. The stream that frees the block copies the guard to the host,
   where it is compared once that stream has come so far. No call waits for that. What cannot be checked in order is
   left out and counted: blocks of captured streams, and blocks freed on a stream that is not known to follow the one
   that set the guard. The pool's lock guards the checks and the quarantine; the driver is called without it. Calls
   events, users, take. */

#define GAI_GUARD 0xa5  /* what guards consist of */
#define GAI_POISON 0xff /* what freed memory is set to */
#define GAI_GUARD_BYTES 256 /* that are added to a request; rounding makes more of them */
#define GAI_GUARD_FIRST 512 /* what is longer than this and the next is checked at both ends only */
#define GAI_GUARD_LAST 256
#define GAI_CHECK_BYTES (GAI_GUARD_FIRST + GAI_GUARD_LAST)
#define GAI_CHECKS 1024
#define GAI_CHECKS_LEFT 64 /* so many wait for the program's own events if debug_sample >= GAI_SPARSE */
#define GAI_QUARANTINE_MOST (256 * GAI_MIB)
#define GAI_GUARD_LEAST 16 /* bytes left by rounding that are used as a guard if debug_sample >= GAI_SPARSE */
#define GAI_GUARD_LOOKS 16 /* so often in debug_sample allocations a due guard makes stream caches ask the pool */
#define GAI_SAMPLE_MOST GAI_MIB /* larger blocks are not poisoned and kept then: pages would move */
#define GAI_POLLS 8 /* every so many calls ask how far the streams are */

/* Does the rounding of a request leave bytes that suffice as a guard? `most`: its max_bytes */
static int gai_rounding_guards(const galloc_pool *pool, size_t bytes, size_t most)
{
    return !most && bytes <= (size_t)1 << (GAI_ADDRESS_BITS - 2) &&
           gai_rounded(pool, bytes) - bytes >= GAI_GUARD_LEAST;
}

/* Is the check of a sampled guard all that differs from a call without debug? Then that call takes the path that it
   takes without debug, and what it leaves in the pool is the same. */
static int gai_pool_checks_apart(const galloc_pool *pool)
{
    return pool->config.debug == GALLOC_DEBUG_GUARDS && pool->config.debug_sample >= GAI_SPARSE;
}

/* A random number from 0 to `most`. Each run of a program draws the same ones. [lock] */
static uint64_t gai_pool_draw(galloc_pool *pool, uint64_t most)
{
    pool->watch_draw = pool->watch_draw * 0x5851f42d4c957f2d + 0x14057b7ef767814f; /* MMIX, by D. E. Knuth */
    return (pool->watch_draw >> 32) % (most + 1);
}

/* Is what is due done to this request? A sample of few allocations is to change nothing else than what it checks: sizes
   stay as they are, and hence places and pages. So for guards alone requests are chosen whose rounding leaves one.
   After another request, stream caches serve a few before they ask again: a random number, since a step that is
   repeated may have one request that fits. [lock] */
GAI_APART
static int gai_request_chosen(galloc_pool *pool, size_t bytes, size_t most)
{
    uint64_t sample = pool->config.debug_sample;
    int chosen = gai_pool_checks_apart(pool) ? gai_rounding_guards(pool, bytes, most) : bytes <= GAI_SAMPLE_MOST;
    if (sample < GAI_SPARSE) return 1;
    if (!chosen) pool->look_at = pool->stats.mallocs + gai_pool_draw(pool, 2 * (sample / GAI_GUARD_LOOKS));
    return chosen;
}

/* An allocation gets the guard that was due. The distance to the next one varies between 1/2 and 3/2 of debug_sample.
   Else a program with a fixed number of allocations in each step might have the same one guarded in each. [lock] */
static void gai_pool_note_watch(galloc_pool *pool)
{
    uint64_t sample = pool->config.debug_sample;
    pool->watch_at = pool->stats.mallocs + sample - sample / 2 + gai_pool_draw(pool, 2 * (sample / 2));
    pool->look_at = pool->watch_at;
}

/* Is this full call one of those whose block gets a guard? If all get one, so do those that other threads make before
   this one is counted. [no lock] */
static int gai_pool_samples(galloc_pool *pool, const galloc_request *request)
{
    uint64_t sample = pool->config.debug_sample;
    int chosen;
    gai_lock_on(&pool->lock);
    chosen = gai_pool_is_to_watch(pool) && gai_request_chosen(pool, request->bytes, request->max_bytes);
    if (chosen && sample > 1) gai_pool_note_watch(pool);
    gai_lock_off(&pool->lock);
    return chosen;
}

static size_t gai_pool_guard(const galloc_pool *pool)
{
    return pool->config.debug & GALLOC_DEBUG_GUARDS ? GAI_GUARD_BYTES : 0;
}

/* The request with a guard. A sample has only what rounding leaves, and sizes that are refused stay as they are. */
static galloc_request gai_request_guarded(const galloc_pool *pool, const galloc_request *request)
{
    galloc_request guarded = *request;
    size_t most = (size_t)1 << (GAI_ADDRESS_BITS - 2);
    if (pool->config.debug_sample >= GAI_SPARSE) return guarded;
    if (request->bytes <= most) guarded.bytes += gai_pool_guard(pool);
    if (request->max_bytes && request->max_bytes <= most) guarded.max_bytes += gai_pool_guard(pool);
    return guarded;
}

/* May work be queued on the stream of this call? Captured work would run with each launch of the graph. A stream of
   another context outlives a reset of the pool's, which takes the memory of the checks, or it is another device's. */
static int gai_site_may_act(const gai_site *site)
{
    return !site->capture_forbids && site->own_context;
}

/* May debug queue work at this call? On a default stream the next allocation waits for it: not with a limit. */
static int gai_site_may_check(const galloc_pool *pool, const gai_site *site)
{
    int unlimited = pool->config.wait_limit_ms == UINT64_MAX;
    return gai_site_may_act(site) && (unlimited || !gai_is_default_stream(site->handle));
}

/* The parts of a range that are set and checked: all of it, or both ends. */
static void gai_range_ends(uintptr_t begin, uintptr_t end, gai_range *parts)
{
    int whole = end - begin <= GAI_CHECK_BYTES;
    parts[0].addr = begin;
    parts[0].bytes = whole ? end - begin : GAI_GUARD_FIRST;
    parts[1].addr = end - GAI_GUARD_LAST;
    parts[1].bytes = whole ? 0 : GAI_GUARD_LAST;
}

static void gai_block_guard(const gai_block *block, gai_range *parts)
{
    gai_range_ends(block->addr + (size_t)gai_counted(&block->requested), block->addr + block->bytes, parts);
}

static CUresult gai_range_set(galloc_pool *pool, const gai_range *part, int value, const gai_site *site)
{
    if (!part->bytes) return CUDA_SUCCESS;
    return GAI_CALL(pool, memset, MemsetD8Async, (part->addr, (unsigned char)value, part->bytes, site->handle));
}

/* Makes the context of the call's stream current. Fails after a reset of the pool's context that no call has noticed
   yet: cudaMalloc segments are gone with it. */
static CUresult gai_pool_reach(const galloc_pool *pool, const gai_site *site, gai_scope *scope)
{
    if (gai_context_health(pool->context, pool->context_id) != GAI_ALIVE) return CUDA_ERROR_INVALID_CONTEXT;
    return gai_scope_push(scope, site->context);
}

/* The work queued on the block's stream until now uses the block; no mark tells of it. [lock] */
static void gai_block_used_until_now(gai_block *block, gai_stream *stream)
{
    block->age = stream->epoch;
    stream->handed = stream->epoch;
    gai_set_relaxed(&block->tag, block->tag | GAI_CACHED | GAI_DROPPED);
}

/* Records an event that stands for the guard of a block with room, which may grow over it on another stream. In a call
   on the stream that the block was given to. [lock], released meanwhile. */
static void gai_block_record_guard(galloc_pool *pool, const gai_block *block, const gai_site *site)
{
    gai_stream *stream = block->stream;
    if (!block->room || block->life != site->life || stream->retired || !gai_block_lacks_event(block, stream)) return;
    if (site->capture_forbids || (site->handle == CU_STREAM_LEGACY && !gai_pool_has_one_stream(pool))) return;
    stream->busy++;
    (void)gai_stream_record(pool, stream, site->handle, 0);
    stream->busy--;
}

/* Sets the guard of a block on the stream that it was given to, in a call on that stream. Nobody else has the block
   now. [no lock] */
static void gai_block_watch(galloc_pool *pool, gai_block *block, const gai_site *site)
{
    gai_range parts[2];
    gai_scope scope;
    int guards = gai_pool_guard(pool) != 0, may = gai_site_may_check(pool, site);
    CUresult result = CUDA_SUCCESS;
    gai_block_guard(block, parts);
    if (guards && may) result = gai_pool_reach(pool, site, &scope);
    if (guards && may && !result) {
        result = gai_range_set(pool, &parts[0], GAI_GUARD, site);
        if (!result) result = gai_range_set(pool, &parts[1], GAI_GUARD, site);
        gai_scope_leave(&scope);
    }
    gai_lock_on(&pool->lock);
    if (guards && may) gai_block_used_until_now(block, site->stream);
    if (may && !result) gai_set_relaxed(&block->tag, block->tag | GAI_WATCHED_BLOCK);
    else pool->stats.unchecked += (uint64_t)guards;
    gai_block_record_guard(pool, block, site);
    gai_lock_off(&pool->lock);
    if (result) gai_pool_note(pool, result);
}

/* ---- the quarantine ---- */

/* Takes a freed block, which has the marks of its free, into the quarantine. [lock] */
static void gai_block_keep(galloc_pool *pool, gai_block *block)
{
    gai_guards *guards = &pool->guards;
    block->age = gai_thread.stack;
    block->next_bin = NULL;
    if (guards->newest) guards->newest->next_bin = block;
    else guards->oldest = block;
    guards->newest = block;
    guards->kept++;
    guards->kept_bytes += block->bytes;
    guards->kept_live += (size_t)block->requested;
    pool->marks.promised -= GAI_FREE_MARKS;
}

/* Takes the oldest block out of the quarantine. Marks are promised to it again; *can: and there are such marks, so that
   the lock may be released before it is freed. [lock] */
static gai_block *gai_kept_pop(galloc_pool *pool, int *can)
{
    gai_guards *guards = &pool->guards;
    gai_block *block = guards->oldest;
    *can = gai_slab_need(&pool->marks, GAI_FREE_MARKS);
    pool->marks.promised += GAI_FREE_MARKS;
    guards->oldest = block->next_bin;
    if (!guards->oldest) guards->newest = NULL;
    guards->kept--;
    guards->kept_bytes -= block->bytes;
    guards->kept_live -= (size_t)block->requested;
    return block;
}

/* Frees all blocks in quarantine, unchecked. [lock] */
static void gai_kept_free_all(galloc_pool *pool)
{
    int can;
    while (pool->guards.kept) {
        pool->stats.unchecked++;
        gai_block_put(pool, gai_kept_pop(pool, &can));
    }
}

/* ---- checks ---- */

/* Allocates memory for the checks, in the pool's context. [lock], released meanwhile. */
static void gai_guards_begin(galloc_pool *pool)
{
    gai_guards *guards = &pool->guards;
    gai_check *checks = guards->checks;
    unsigned long long id = 0;
    void *host = NULL;
    gai_scope scope;
    CUresult result;
    guards->begins = 1;
    gai_lock_off(&pool->lock);
    if (!checks) {
        checks = (gai_check *)GALLOC_MALLOC(GAI_CHECKS * sizeof *checks);
        if (checks) memset(checks, 0, GAI_CHECKS * sizeof *checks);
    }
    result = checks ? gai_scope_enter(&scope, pool->context) : GAI_NO_HOST_MEMORY;
    if (!result) {
        result = gai_cu.CtxGetId(pool->context, &id);
        if (!result)
            result = GAI_CALL(pool, host_alloc, MemHostAlloc,
                              (&host, (size_t)GAI_CHECKS * GAI_CHECK_BYTES, 0));
        gai_scope_leave(&scope);
    }
    gai_lock_on(&pool->lock);
    guards->begins = 0;
    guards->checks = checks;
    guards->context_id = id;
    guards->host = result ? NULL : (unsigned char *)host;
}

/* Allocates that memory in advance, so that no thread finds another one at it. If that fails, a free tries again. [no
   lock] */
static void gai_guards_ready(galloc_pool *pool)
{
    if (!(pool->config.debug & ~GALLOC_DEBUG_POISON)) return;
    gai_lock_on(&pool->lock);
    if (!pool->guards.host && !pool->guards.begins) gai_guards_begin(pool);
    gai_lock_off(&pool->lock);
}

/* [lock] */
static void gai_check_end(gai_guards *guards, gai_check *check)
{
    check->stream = NULL;
    guards->next = gai_min(guards->next, (size_t)(check - guards->checks));
    gai_set_relaxed(&guards->pending, guards->pending - 1);
}

/* The reset of the context has taken the memory that was copied to, and perhaps that of blocks. [lock] */
static void gai_guards_lose(galloc_pool *pool)
{
    gai_guards *guards = &pool->guards;
    gai_check *check;
    for (check = guards->checks; guards->pending; check++) {
        if (!check->stream) continue;
        pool->stats.unchecked++;
        gai_check_end(guards, check);
    }
    guards->host = NULL;
    gai_kept_free_all(pool);
}

/* Does that memory still exist? [lock], released meanwhile. */
static int gai_guards_last(galloc_pool *pool)
{
    unsigned long long id = pool->guards.context_id;
    enum gai_health health;
    gai_lock_off(&pool->lock);
    health = gai_context_health(pool->context, id);
    gai_lock_on(&pool->lock);
    if (id != pool->guards.context_id) return 0;
    if (health == GAI_DEAD) gai_guards_lose(pool);
    return health == GAI_ALIVE;
}

/* Are events to be recorded and queried for the sake of the checks? They change what is known of the streams, and so
   which memory is reused: a sample of few allocations leaves a few checks until the pool learns of their streams. */
static int gai_guards_press(const galloc_pool *pool)
{
    const gai_guards *guards = &pool->guards;
    uint64_t most = gai_min((size_t)gai_counted(&guards->stuck) + GAI_CHECKS_LEFT, GAI_CHECKS / 2);
    return pool->config.debug_sample < GAI_SPARSE || gai_counted(&guards->pending) > most;
}

/* An unused check, for a stream state. NULL: none is left, or no memory. [lock], may be released meanwhile. */
static gai_check *gai_check_new(galloc_pool *pool, gai_stream *stream)
{
    gai_guards *guards = &pool->guards;
    gai_check *check;
    if (guards->host && !gai_guards_last(pool) && guards->host) return NULL;
    if (!guards->host && !guards->begins) gai_guards_begin(pool);
    if (!guards->host) return NULL;
    while (guards->next < GAI_CHECKS && guards->checks[guards->next].stream) guards->next++;
    if (guards->next == GAI_CHECKS) return NULL;
    check = &guards->checks[guards->next++];
    check->stream = stream;
    check->life = stream->life;
    check->epoch = UINT64_MAX;
    gai_set_relaxed(&guards->pending, guards->pending + 1);
    return check;
}

static unsigned char *gai_check_host(const gai_guards *guards, const gai_check *check)
{
    return guards->host + (size_t)(check - guards->checks) * GAI_CHECK_BYTES;
}

/* The driver refused to queue all of a check: nothing will be compared. But its memory may still be written to, so it
   stays in use until then. [lock] */
static void gai_check_fail(gai_check *check) { check->parts[0].bytes = check->parts[1].bytes = 0; }

/* Compares what has arrived. Damage is told at the end of this call. [lock] */
static void gai_check_compare(galloc_pool *pool, const gai_check *check)
{
    const unsigned char *host = gai_check_host(&pool->guards, check);
    gai_damage damage = check->block;
    size_t i, bytes = check->parts[0].bytes + check->parts[1].bytes;
    int sound = bytes && host[0] == check->pattern && !memcmp(host, host + 1, bytes - 1);
    for (i = 0; i < bytes && !sound; i++) {
        const gai_range *part = &check->parts[i >= check->parts[0].bytes];
        if (host[i] == check->pattern || damage.count++) continue;
        damage.first = part->addr + i - (part == check->parts ? 0 : check->parts[0].bytes);
        damage.value = host[i];
    }
    pool->stats.checks += check->parts[0].bytes != 0;
    if (!damage.count) return;
    pool->stats.damages++;
    if (gai_thread.damaged++ < GAI_DAMAGES) gai_thread.damages[gai_thread.damaged - 1] = damage;
}

/* Compares all guards that have arrived. [no lock] */
static void gai_guards_look(galloc_pool *pool)
{
    gai_guards *guards = &pool->guards;
    gai_check *check;
    uint64_t left;
    if (!gai_counted(&guards->pending)) return;
    gai_lock_on(&pool->lock);
    left = gai_guards_last(pool) ? guards->pending : 0;
    for (check = guards->checks; left; check++) {
        left -= check->stream != NULL;
        if (!check->stream || check->epoch == UINT64_MAX) continue;
        if (check->stream->life == check->life && check->epoch > check->stream->done) continue;
        gai_check_compare(pool, check);
        gai_check_end(guards, check);
    }
    gai_lock_off(&pool->lock);
}

/* Asks now and then how far the streams are, and compares the guards that have arrived. The call has done all else, and
   the pool may have ended. [no lock] */
static void gai_guards_tend(galloc_pool *pool)
{
    int is_new = gai_thread.message_is_new;
    if (!gai_pool_pin(pool)) return;
    if (gai_counted(&pool->guards.pending)) {
        int polls = gai_guards_press(pool) && gai_next(&pool->guards.looks) % GAI_POLLS == 0;
        if (polls) gai_pool_try_poll(pool);
        gai_guards_look(pool);
        if (polls || gai_counted(&pool->guards.pending) < gai_counted(&pool->guards.stuck))
            gai_set_relaxed(&pool->guards.stuck, gai_counted(&pool->guards.pending));
    }
    gai_thread.message_is_new = is_new;
    gai_pool_unpin(pool);
}

/* Is later work of the stream ordered after all that the block's marks tell of? [lock] */
static int gai_block_marks_precede(const gai_block *block, const gai_stream *stream)
{
    const gai_mark *mark = block->marks;
    while (mark && (mark->stream == stream || gai_mark_is_complete(mark) ||
                    gai_stream_waited(stream, mark->stream) >= mark->epoch)) mark = mark->next;
    return !mark;
}

/* Is it ordered after the work that set the block's guard? The stream that the block was given to is; another one
   must also follow all that used the block before. A watched block has GAI_CACHED together with GAI_DROPPED. [lock] */
static int gai_block_precedes(const galloc_pool *pool, const gai_block *block, const gai_stream *stream)
{
    const gai_stream *owner;
    if (stream->life == block->life) return 1;
    if (!gai_block_marks_precede(block, stream)) return 0;
    owner = gai_stream_of_life(pool, block->life); /* not always block->stream; NULL: forgotten, without pending work */
    return !(block->tag & GAI_CACHED) || !owner || block->age <= owner->done;
}

/* Queues the copy of a guard, and poison over what the program had. [no lock] */
static CUresult gai_block_look_at(galloc_pool *pool, const gai_block *block, const gai_check *check, int poison,
                                  const gai_site *site)
{
    gai_scope scope;
    gai_range whole;
    unsigned char *to = check ? gai_check_host(&pool->guards, check) : NULL;
    CUresult result = gai_pool_reach(pool, site, &scope);
    int i;
    if (result) return result;
    whole.addr = block->addr;
    whole.bytes = (size_t)gai_counted(&block->requested);
    for (i = 0; check && i < 2 && !result; i++) {
        if (check->parts[i].bytes)
            result = GAI_CALL(pool, copy, MemcpyDtoHAsync,
                              (to, check->parts[i].addr, check->parts[i].bytes, site->handle));
        to += check->parts[i].bytes;
    }
    if (poison && !result) result = gai_range_set(pool, &whole, GAI_POISON, site);
    gai_scope_leave(&scope);
    return result;
}

/* Programs let all streams use memory of a default stream once the device has been waited for: galloc_free on stream 0
   after cudaDeviceSynchronize, cudaMalloc of GALLOC_OVERRIDE_CUDA. What debug queues at the free comes after that wait.
   So the next allocation on the default stream waits for it (gai_stream_settle), and takes no short path. [lock] */
static void gai_stream_unsettle(galloc_pool *pool, gai_stream *stream)
{
    if (!gai_is_default_stream(stream->handle)) return;
    stream->debug_queued++;
    pool->special |= GAI_ROUTE_SETTLE;
}

static GAI_INLINE int gai_stream_is_unsettled(const gai_stream *stream)
{
    return stream->debug_settled != stream->debug_queued;
}

/* What to say of a block that turns out to be damaged. */
static gai_damage gai_block_describe(const gai_block *block)
{
    gai_damage damage;
    memset(&damage, 0, sizeof damage);
    damage.addr = block->addr;
    damage.requested = (size_t)block->requested;
    damage.tag = block->tag;
    damage.stream_id = block->stream_id;
    damage.freed = gai_thread.stack;
    if (block->next && block->next->kind == GAI_USED && gai_load_pointer(&block->next->lent))
        damage.next = block->next->addr;
    return damage;
}

/* The bytes that the quarantine may have. */
static size_t gai_pool_quarantine(const galloc_pool *pool)
{
    if (pool->config.quarantine_bytes) return pool->config.quarantine_bytes;
    return gai_min(gai_pool_capacity(pool) / 16, GAI_QUARANTINE_MOST);
}

/* Shall this block, which is poisoned, be kept from reuse? Rooms are not, and like:pytorch counts blocks in its own
   way. */
static int gai_block_is_to_keep(const galloc_pool *pool, const gai_block *block)
{
    return pool->config.debug & GALLOC_DEBUG_QUARANTINE && !block->room && !pool->mixed.counted &&
           block->bytes <= gai_pool_quarantine(pool);
}

/* Queues a check of the guard of a claimed block, in a call on a stream whose state is held. `frees`: the call frees
   the block, and no other stream uses it, so it is poisoned as well. Then the block is not watched any more. [lock],
   released meanwhile. */
static void gai_block_check(galloc_pool *pool, gai_block *block, const gai_site *site, int frees)
{
    gai_stream *stream = site->stream;
    gai_check *check = NULL;
    int guards = gai_pool_guard(pool) != 0, poison = frees && pool->config.debug & ~GALLOC_DEBUG_GUARDS;
    int may = gai_site_may_check(pool, site) && !stream->retired && !block->segment->lost &&
              gai_block_precedes(pool, block, stream);
    CUresult result = CUDA_SUCCESS;
    gai_set_relaxed(&block->tag, block->tag & ~GAI_WATCHED_BLOCK);
    /* The release of a group leaves marks of recorded uses on a block that is in use. */
    poison = poison && !block->recorded_uses && gai_block_marks_precede(block, stream);
    if (may && guards) check = gai_check_new(pool, stream);
    if (check) {
        check->pattern = GAI_GUARD;
        check->block = gai_block_describe(block);
        gai_block_guard(block, check->parts);
    }
    if (check || (may && poison)) {
        gai_lock_off(&pool->lock);
        result = gai_block_look_at(pool, block, check, poison, site);
        if (result) gai_pool_note(pool, result);
        gai_lock_on(&pool->lock);
        stream->handed = stream->epoch;
        if (gai_guards_press(pool)) gai_stream_ask(stream);
        if (poison && !result && gai_block_is_to_keep(pool, block))
            gai_set_relaxed(&block->tag, block->tag | GAI_TO_KEEP);
    }
    if (check && result) gai_check_fail(check);
    if (check) check->epoch = stream->epoch;
    gai_stream_unsettle(pool, stream); /* unchecked, too: the guard may still be about to be set */
    pool->stats.unchecked += guards && (!check || result);
}

/* Before a resize on a stream: checks the guard, which will lie elsewhere. Returns the bytes of the next one; 0: there
   will be none, since other streams may use the bytes that it needs. [lock], released meanwhile. */
static size_t gai_block_check_end(galloc_pool *pool, gai_block *block, const gai_site *site)
{
    if (block->life != site->life) {
        gai_set_relaxed(&block->tag, block->tag & ~GAI_WATCHED_BLOCK);
        pool->stats.unchecked += gai_pool_guard(pool) != 0;
        return 0;
    }
    gai_block_check(pool, block, site, 0);
    gai_block_used_until_now(block, site->stream); /* by the copy; the block may be freed on another stream */
    if (!gai_pool_debugs_all(pool)) return 0; /* a sampled guard enlarges no block */
    return block->recorded_uses || !gai_block_marks_precede(block, site->stream) ? 0 : gai_pool_guard(pool);
}

/* After the resize: sets the guard behind the new end, or if it failed leaves the old one in place. [no lock] */
static void gai_block_watch_again(galloc_pool *pool, void *ptr, const gai_site *site, size_t guard, int failed)
{
    gai_block *block;
    gai_lock_on(&pool->lock);
    block = gai_block_claim(pool, ptr);
    if (block && (failed || !gai_pool_guard(pool)))
        gai_set_relaxed(&block->tag, block->tag | GAI_WATCHED_BLOCK);
    gai_lock_off(&pool->lock);
    if (!block) return;
    if (!failed && guard) gai_block_watch(pool, block, site);
    gai_lock_on(&pool->lock);
    gai_block_record_guard(pool, block, site); /* the copy of the old guard, too, may still be under way */
    gai_block_let_go(block);
    gai_lock_off(&pool->lock);
}

/* Queues a check of the poison on a stream that may use the block. `waits`: waits for it; if the wait fails, the check
   stays in use until the pool ends. Returns whether the copies may still read the block. [lock], released meanwhile. */
static int gai_kept_check(galloc_pool *pool, gai_block *block, const gai_site *site, int waits)
{
    gai_stream *stream = waits ? block->stream : site->stream;
    gai_check *check = block->segment->lost ? NULL : gai_check_new(pool, stream);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (check) {
        check->pattern = GAI_POISON;
        check->block = gai_block_describe(block);
        check->block.freed = (uint32_t)block->age;
        check->block.poison = 1;
        gai_range_ends(block->addr, block->addr + block->requested, check->parts);
        gai_lock_off(&pool->lock);
        result = gai_block_look_at(pool, block, check, 0, site);
        if (!result && waits) result = GAI_CALL(pool, stream_synchronize, StreamSynchronize, (site->handle));
        if (result) gai_pool_note(pool, result);
        gai_lock_on(&pool->lock);
    }
    if (check && result) gai_check_fail(check);
    if (check && !result && waits) {
        gai_check_compare(pool, check);
        gai_check_end(&pool->guards, check);
    } else if (check && !waits) {
        check->epoch = stream->handed = stream->epoch;
        if (gai_guards_press(pool)) gai_stream_ask(stream);
        gai_stream_unsettle(pool, stream);
    }
    pool->stats.unchecked += result != CUDA_SUCCESS;
    return check && (!waits || result);
}

/* While the quarantine has too many bytes, frees the oldest block, and checks it if the stream of this call may use it.
   The stream's state is held. [lock], released meanwhile. */
static void gai_pool_limit_kept(galloc_pool *pool, const gai_site *site)
{
    size_t most = gai_pool_quarantine(pool);
    while (pool->guards.kept_bytes > most) {
        int may;
        gai_block *block = gai_kept_pop(pool, &may);
        may = may && gai_site_may_check(pool, site) && !site->stream->retired &&
              gai_block_marks_precede(block, site->stream);
        if (!may) pool->stats.unchecked++;
        else if (gai_kept_check(pool, block, site, 0))
            gai_block_stamp(pool, block, gai_mark_of(pool, site->stream)); /* it reads the block until then */
        gai_block_put(pool, block);
    }
}

/* gai_kept_free_all for a caller without the lock. Returns whether there were any blocks. [no lock] */
static int gai_pool_free_kept(galloc_pool *pool)
{
    int any;
    gai_lock_on(&pool->lock);
    any = pool->guards.kept != 0;
    gai_kept_free_all(pool);
    gai_lock_off(&pool->lock);
    return any;
}

/* ==== SEARCH ====================================================================================================== */
/* >>search */

/* Finds the free block that serves a request, and takes it. A gai_job carries one allocation through this and all
   later sections. [lock], unless stated otherwise. Calls bins, marks, take, pages, release, parking. */

/* One allocation, or the growth of a block in place, on its way through the heap.
   grows != NULL: params.bytes is what the growth still lacks, see gai_job_look. */
typedef struct gai_job {
    galloc_pool *pool;
    gai_params params;
    gai_site site;
    gai_block *got;     /* a new job is zero from here on */
    void *grows;        /* the block that is to become grow_to bytes long in place; NULL: an allocation */
    size_t grow_to;
    size_t guard;       /* bytes that it keeps behind them */
    int frugal;         /* create pages only within the overhead */
    int thrifty;        /* and leave a part of the overhead for a new peak of live bytes */
    int may_wait;       /* the stream may be made to wait for others' pages */
    int waited;         /* how many waits for other streams' events were queued for it */
    size_t lacks;       /* bytes of a room beyond the overhead for which no spare page is small enough */
    int grown;          /* how often pages were created or moved for it */
    int overgrown;      /* cudaMallocAsync: what the driver's pool keeps did not serve it, and a limit was exceeded */
    int own_tried;      /* its stream's own pages do not serve it: from then on it takes what a search finds */
    int searched;       /* like:pytorch: its searches were counted (as one) */
    int asked;          /* like:pytorch: events were queried for it */
    cudaError_t error;  /* set: the job ends, whatever steps remain */
    CUresult refusal;   /* the driver's result when it refused memory */
    const char *who;
    uint64_t waited_ns; /* time spent in waits on the host, with wait_limit_ms */
    const char *left_out; /* why the current step of the ladder was not taken */
    int rejected;       /* refused at once: the request exceeds what the pool may ever hold, or
                           throw_on_cudamalloc_oom leaves only the steps with at_once */
    int reported;       /* it failed for lack of memory, and a report was made */
} gai_job;

static int gai_job_is_done(const gai_job *job) { return job->got || job->error; }

/* The result of a search: a free block, and the address in it where the request is placed. at == 0: none. */
typedef struct gai_found {
    gai_block *block;
    uintptr_t at;
} gai_found;

/* Replaces the result if the block is better. */
static void gai_found_add(gai_found *best, gai_block *block, uintptr_t at)
{
    if (!block || !at || !gai_is_better(block, best->block)) return;
    best->block = block;
    best->at = at;
}

static void gai_found_in_set(gai_found *best, const gai_set *set, const gai_params *params)
{
    gai_block *block = gai_set_find(set, params);
    if (block) gai_found_add(best, block, gai_place(block->addr, block->addr + block->bytes, params));
}

/* Finds the smallest block that the stream may take at once, where every block that is large enough will do. */
static GAI_INLINE gai_block *gai_find_plain(const galloc_pool *pool, const gai_stream *stream, size_t bytes)
{
    gai_bin bin = gai_bin_of(bytes);
    gai_block *best = stream ? gai_set_find_plain(&stream->free, bin, bytes) : NULL, *block;
    if (best && (best->bytes == bytes || pool->separate)) return best; /* an exact fit, or the stream's own memory */
    block = gai_set_find_plain(&pool->common, bin, bytes);
    return block && gai_is_better(block, best) ? block : best;
}

/* Searches the sets of GAI_REACH_OWN (gai_find has searched those of a captured stream). No mark needs to be looked at:
   all blocks there may be used at once. */
static gai_found gai_find_own(galloc_pool *pool, const gai_params *params)
{
    gai_found best = {NULL, 0};
    if (params->alignment <= GAI_UNIT) {
        best.block = gai_find_plain(pool, params->stream, params->bytes);
        if (best.block) best.at = gai_place(best.block->addr, best.block->addr + best.block->bytes, params);
        return best;
    }
    gai_found_in_set(&best, &params->stream->free, params);
    if (best.block && best.block->bytes == params->bytes) return best;
    gai_found_in_set(&best, &pool->common, params);
    return best;
}

#define GAI_SCAN 256 /* blocks of a set, oldest first, whose marks are checked */

/* Returns whether the block's size and kind suit the request. */
static int gai_block_is_for(const gai_block *block, const gai_params *params)
{
    if (block->kind == GAI_SLOT) return params->slot && block->bytes == params->bytes;
    return block->bytes >= params->bytes;
}

/* Searches a set for a block of which the marks allow some part. */
static void gai_found_by_marks(gai_found *best, const galloc_pool *pool, const gai_set *set, const gai_params *params,
                               int may_wait)
{
    gai_block *block = set->oldest;
    int looks;
    for (looks = 0; block && looks < GAI_SCAN; looks++, block = block->newer)
        if (gai_block_is_for(block, params)) gai_found_add(best, block, gai_block_place(pool, block, params, may_wait));
}

/* Searches as GAI_REACH_ALL does. may_wait: marks with a recorded event count as allowed. */
static gai_found gai_find_all(galloc_pool *pool, const gai_params *params, int may_wait)
{
    gai_found best = gai_find_own(pool, params);
    const gai_set *set;
    if (best.block) return best;
    for (set = &pool->mixed; set; set = set->next) gai_found_by_marks(&best, pool, set, params, may_wait);
    return best;
}

/* Searches the memory that the graphs of a capture and its group own already, which is of no use to others for long.
   Only when there is none does the capture take free memory of the pool. */
static gai_found gai_find_captured(galloc_pool *pool, const gai_params *params)
{
    gai_found best = {NULL, 0};
    const gai_stream *stream;
    const gai_block *block;
    for (stream = pool->streams; stream; stream = stream->next)
        if (gai_stream_is_ordered(params->stream, stream)) gai_found_in_set(&best, &stream->free, params);
    for (block = pool->mixed.oldest; block && !gai_block_capture(block); block = block->newer) continue;
    if (block) gai_found_by_marks(&best, pool, &pool->mixed, params, 0);
    return best;
}

/* Streams are kept apart while their work is far behind the host. Then no other stream can use what a stream has freed
   until a step of the program ends. Common memory that it takes in its place is lost to the others for as long, and
   pages are created for them. So each stream reuses its own memory first, and a large request moves the stream's own
   pages before it takes common memory. */

#define GAI_SEPARATE_HELD 1.25 /* times the peak of live bytes; where streams keep up, heaps hold less */
#define GAI_SEPARATE_PART 32   /* requests below this part of the heap are not worth moves */

/* Pages were created for `stream`: notes whether streams are to be kept apart from now on. They are if the heap is much
   larger than what was ever live, and another stream has an event that is not complete. [paging, lock] */
static void gai_pool_note_separate(galloc_pool *pool, const gai_stream *stream)
{
    const gai_stream *other = pool->streams;
    while (other && (other == stream || !other->recorded)) other = other->next;
    pool->separate = other && (double)pool->stats.reserved.current > GAI_SEPARATE_HELD * (double)pool->live_peak;
}

/* Returns whether free blocks of the stream's own set have `bytes` of pages that only the stream may use. */
static int gai_stream_has_pages(const gai_stream *stream, size_t bytes)
{
    gai_bin bin = gai_bin_of(GAI_FIXED_SMALL);
    size_t own = 0;
    do {
        const gai_block *block = stream->free.bins[bin.row][bin.column];
        for (; block && own < bytes; block = block->next_bin) {
            uintptr_t at, end;
            for (end = gai_block_whole_pages(block, &at), end += at; at < end; at += gai_page_at(at)->bytes)
                if (gai_mapping_is_own(gai_page_at(at), block->marks, stream)) own += gai_page_at(at)->bytes;
        }
    } while (own < bytes && gai_bin_next(&stream->free, &bin));
    return own >= bytes;
}

/* Returns whether a request of this size is to move the stream's own pages rather than take common memory. */
static int gai_stream_keeps(const galloc_pool *pool, const gai_stream *stream, size_t bytes)
{
    return pool->separate && bytes >= GAI_FIXED_SMALL && bytes >= pool->stats.reserved.current / GAI_SEPARATE_PART &&
           gai_stream_is_plain(stream) && stream->free.bytes >= bytes && gai_stream_has_pages(stream, bytes);
}

/* Returns whether [at, at + bytes) of a block that a search found is to be left to other streams: most of it is
   common memory, and the stream has pages of its own. */
GAI_APART
static int gai_stream_leaves(const galloc_pool *pool, const gai_stream *stream, const gai_block *block, uintptr_t at,
                             size_t bytes)
{
    return gai_marks_own(block->marks, at, at + bytes, stream) < bytes / 2 && gai_stream_keeps(pool, stream, bytes);
}

static gai_found gai_find(const gai_job *job, enum gai_reach reach)
{
    const gai_params *params = &job->params;
    gai_found found = {NULL, 0};
    if (params->stream && params->stream->capture) found = gai_find_captured(job->pool, params);
    if (found.block) return found;
    if (reach != GAI_REACH_OWN) return gai_find_all(job->pool, params, 0);
    found = gai_find_own(job->pool, params);
    if (found.block && !job->own_tried && !params->just_ready &&
        gai_stream_leaves(job->pool, params->stream, found.block, found.at, params->bytes)) found.block = NULL;
    return found;
}

static void gai_job_took(gai_job *job, gai_block *block)
{
    job->got = block;
    if (!block) job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for the description of a block");
}

static gai_block *gai_pool_take(galloc_pool *pool, gai_block *block, uintptr_t at, const gai_params *params)
{
    if (pool->variant.take) return pool->variant.take(pool, block, at, params);
    return gai_block_take(pool, block, at, params);
}

/* Returns whether a request may take the smallest block that it fits in. Blocks of max_split_size and more are kept
   for requests of that size and more, and these take a block only if it is hardly larger. */
static int gai_block_may_serve(const galloc_pool *pool, const gai_block *block, size_t bytes)
{
    size_t rounding = pool->config.max_non_split_rounding;
    if (!rounding) rounding = pool->config.large_segment_size;
    if (!gai_pool_is_oversize(pool, bytes)) return !gai_pool_is_oversize(pool, block->bytes);
    return block->bytes < bytes || block->bytes - bytes < rounding;
}

/* Takes a block where max_split_size is set: an oversize request gets all of the block, if the block may serve it. A
   block just made for this job always may, and is cut if alignment requires it. */
static void gai_job_take_uncut(gai_job *job, gai_found found)
{
    galloc_pool *pool = job->pool;
    gai_params params = job->params;
    /* job->grown: the block was made for this job. */
    if (!job->grown && !gai_block_may_serve(pool, found.block, params.bytes)) return;
    if (gai_pool_is_oversize(pool, params.bytes)) {
        uintptr_t at;
        params.bytes = found.block->bytes;
        at = gai_block_place(pool, found.block, &params, 0);
        if (!at && !job->grown) return;
        if (at) found.at = at;
        else params.bytes = job->params.bytes;
    }
    if (params.just_ready) job->got = found.block;
    else gai_job_took(job, gai_pool_take(pool, found.block, found.at, &params));
}

/* Takes the block that a search found, if it found one. */
static void gai_job_take(gai_job *job, gai_found found)
{
    if (!found.block) return;
    if (job->pool->oversize) gai_job_take_uncut(job, found);
    else if (job->params.just_ready) job->got = found.block;
    else gai_job_took(job, gai_pool_take(job->pool, found.block, found.at, &job->params));
}

/* Returns the free block that contains the mapping and can give up its page, or NULL. `within` guesses where the
   block begins: in a program that repeats itself mostly where it did before. */
static gai_block *gai_mapping_donor(const galloc_pool *pool, gai_mapping *mapping, const gai_page_filter *filter)
{
    gai_block *block = gai_block_at(mapping->within);
    if (!gai_mapping_is_within(pool, mapping, block)) block = gai_block_before(mapping->addr);
    if (!gai_mapping_is_within(pool, mapping, block)) return NULL;
    mapping->within = block->addr;
    return gai_mapping_is_spare(pool, mapping, block->marks, filter) ? block : NULL;
}

/* Returns the free block that can give up the page of an alias, or the alias block over which the page is parked, or
   NULL. Pages in free blocks were noted before (gai_set_note_pages), except when only one place is considered. */
static gai_block *gai_plan_holder(const galloc_pool *pool, gai_page *page, const gai_page_filter *filter)
{
    gai_mapping *current = page->current;
    if (page->looked == pool->plans) return page->holder;
    page->looked = pool->plans;
    page->holder = NULL;
    if (!current) return NULL;
    if (!gai_block_is_parked(current->block))
        page->holder = filter->one_place ? gai_mapping_donor(pool, current, filter) : NULL;
    else if (gai_mapping_is_spare(pool, current, current->block->marks, filter))
        page->holder = current->block;
    return page->holder;
}

/* ==== GROW IN PLACE =============================================================================================== */
/* >>behind */

/* Growth in place: examines the blocks that follow a used block, and takes them if its stream may use them. The search
   reports the worst obstacle, from which the ladder chooses a step: pages fill holes, waits remove marks, and busy
   memory outside the block's room ends the growth.
   The section also has the search functions of a job, which the ladder calls after each step. [lock] Calls search,
   take, marks. */

/* The worst obstacle between a block and its new end; each is worse than those before it. */
enum gai_obstacle {
    GAI_OBSTACLE_NONE,   /* all is free memory that the stream may use */
    GAI_OBSTACLE_HOLE,   /* holes, or own aliases whose pages can return; the rest is free memory */
    GAI_OBSTACLE_MARKED, /* free memory that another stream's work may still use */
    GAI_OBSTACLE_BUSY, /* other aliases, quarantined mappings, blocks in a stream cache, or slots */
    GAI_OBSTACLE_SHUT  /* a used block, another block's room, or the end of the segment */
};

/* What follows a block that grows, up to its new end. */
typedef struct gai_growth_range {
    gai_block *block; /* the block that grows */
    uintptr_t end;    /* its new end */
    gai_block *hole;  /* the next to fill: a hole, or in the block's own room an alias. Holes outside the room come
                         first, so that a failure leaves the room alone */
    gai_mark mark;    /* the first mark that is an obstacle */
    int foreign;        /* an obstacle lies outside the block and its room */
    int plain;          /* the block has no room */
} gai_growth_range;

/* Returns the first mark over [begin, end) that the job's stream must wait for, and asks its stream for an event.
   Marks that a queued wait of the job covers are skipped, and marks of `holder`, which only say which graph owns the
   block. */
static const gai_mark *gai_job_obstacle(const gai_job *job, const gai_mark *mark, const gai_stream *holder,
                                        uintptr_t begin, uintptr_t end)
{
    for (; mark; mark = mark->next) {
        if (mark->end <= begin || mark->begin >= end || mark->stream == holder) continue;
        if (gai_mark_allows(job->pool, mark, job->params.stream)) continue;
        if (job->waited && gai_stream_waited(job->params.stream, mark->stream) >= mark->epoch) continue;
        if (!gai_mark_event(mark)) gai_stream_want_event(mark->stream);
        return mark;
    }
    return NULL;
}

/* Notes the first mark in the way. */
static void gai_growth_range_note(gai_growth_range *range, enum gai_obstacle *obstacle, const gai_mark *mark,
                                  int foreign)
{
    if (*obstacle < GAI_OBSTACLE_MARKED) range->mark = *mark;
    if (*obstacle < GAI_OBSTACLE_MARKED) *obstacle = GAI_OBSTACLE_MARKED;
    range->foreign |= foreign;
}

/* Returns whether the page of an alias in the room can return to it without a driver call. */
static int gai_job_returns(gai_job *job, const gai_block *piece, const gai_growth_range *range)
{
    gai_page_filter filter = gai_page_filter_for(&job->params);
    const gai_block *holder;
    if (gai_block_is_parked(piece)) return 1;
    filter.one_place = 1;
    job->pool->plans++;
    holder = gai_plan_holder(job->pool, piece->alias->page, &filter);
    return holder && (holder->addr < range->block->addr || holder->addr >= range->end);
}

/* Notes a hole or alias to fill, if it comes before the one noted: holes outside the room first, then the room from
   its start on. */
static enum gai_obstacle gai_growth_range_fill(gai_growth_range *range, gai_block *piece, enum gai_obstacle obstacle)
{
    if (!range->hole || (piece->kind == GAI_HOLE && range->hole->kind != GAI_HOLE)) range->hole = piece;
    return obstacle < GAI_OBSTACLE_HOLE ? GAI_OBSTACLE_HOLE : obstacle;
}

/* Examines one block behind the growing one. Returns the worse of its obstacle and the one so far. */
static enum gai_obstacle gai_job_look_at(gai_job *job, gai_block *piece, gai_growth_range *range,
                                         enum gai_obstacle obstacle)
{
    uintptr_t end = gai_min(range->end, piece->addr + piece->bytes);
    int own = piece->addr - range->block->addr < range->block->room;
    const gai_mark *mark;
    switch (piece->kind) {
    case GAI_FREE:
        mark = gai_job_obstacle(job, piece->marks, NULL, piece->addr, end);
        if (mark) gai_growth_range_note(range, &obstacle, mark, 1);
        return obstacle;
    case GAI_HOLE:
    case GAI_ROOM:
        job->params.bytes += end - piece->addr;
        return gai_growth_range_fill(range, piece, obstacle);
    case GAI_ALIAS:
        /* All other aliases are obstacles; gai_job_clear_behind drops them where it can. */
        if (own && gai_job_returns(job, piece, range)) return gai_growth_range_fill(range, piece, obstacle);
        break;
    default: break; /* slots, used and busy blocks */
    }
    range->foreign |= !own;
    return piece->kind == GAI_USED && gai_load_pointer(&piece->lent) ? GAI_OBSTACLE_SHUT : GAI_OBSTACLE_BUSY;
}

/* Examines all blocks up to the new end, and sets params.bytes to the bytes of holes there. [lock] */
static enum gai_obstacle gai_job_look(gai_job *job, gai_growth_range *range)
{
    galloc_pool *pool = job->pool;
    gai_block *block = gai_block_used(pool, job->grows), *piece;
    enum gai_obstacle obstacle = GAI_OBSTACLE_NONE;
    size_t bytes = gai_up(job->grow_to + job->guard, GAI_UNIT);
    const gai_mark *mark;
    memset(range, 0, sizeof *range);
    if (!block) return GAI_OBSTACLE_SHUT;
    range->block = block;
    range->end = block->addr + bytes;
    range->plain = !block->room;
    job->params.bytes = 0;
    job->params.requested = job->grow_to - gai_min(job->grow_to, (size_t)block->requested);
    /* The bytes beyond the requested ones were free memory before, and may have marks. */
    mark = gai_job_obstacle(job, block->marks, block->stream->capture ? block->stream : NULL,
                            block->addr + block->requested, gai_min(range->end, block->addr + block->bytes));
    if (mark) gai_growth_range_note(range, &obstacle, mark, 0);
    for (piece = block->next; piece && piece->addr < range->end; piece = piece->next) {
        obstacle = gai_job_look_at(job, piece, range, obstacle);
        if (obstacle == GAI_OBSTACLE_SHUT) return obstacle;
    }
    return range->end > block->segment->addr + block->segment->bytes ? GAI_OBSTACLE_SHUT : obstacle;
}

/* Reserves the host memory for taking all of a growth range without obstacles. [lock] */
static int gai_growth_range_need(galloc_pool *pool, const gai_growth_range *range)
{
    const gai_block *last = range->block;
    while (last->next && last->next->addr < range->end) last = last->next;
    return last == range->block || gai_block_need(pool, last, last->addr, range->end - last->addr);
}

/* Extends the block to its new end: all behind it is free memory that its stream may use. The marks come along. [lock]
   */
static void gai_job_take_growth_range(gai_job *job, const gai_growth_range *range)
{
    galloc_pool *pool = job->pool;
    gai_block *block = range->block;
    size_t before = block->bytes, requested = (size_t)block->requested;
    if (!gai_growth_range_need(pool, range)) {
        job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for growing a block");
        return;
    }
    /* Another thread may free the block while this one looked behind it. */
    if (!gai_block_claim(pool, job->grows)) {
        job->error = gai_fail(cudaErrorInvalidDevicePointer, "%p is being freed by another thread while it grows",
                              job->grows);
        return;
    }
    while (block->addr + block->bytes < range->end) {
        gai_block *piece = block->next;
        size_t bytes = gai_min(piece->bytes, range->end - piece->addr);
        piece = gai_block_cut_out(pool, piece, piece->addr, bytes, GAI_USED);
        gai_block_absorb(pool, block, piece);
        gai_stat_used(pool, bytes, 0);
    }
    /* A block of another size is no slot any more. */
    if (block->bytes != before) block->slot = 0;
    gai_marks_trim(pool, &block->marks);
    gai_block_renew_captured(pool, block);
    gai_block_set_requested(pool, block, job->grow_to, job->params.stream);
    if (pool->variant.resized) pool->variant.resized(pool, block, before, requested);
    gai_block_ask_rest(pool, block, job->params.stream);
    gai_block_let_go(block);
    job->got = block;
}

/* The error of a growth whose addresses are taken. `block` is the one that grows; NULL: on_oom has freed it. */
static cudaError_t gai_job_say_not_there(const gai_job *job, const gai_block *block)
{
    if (!block) return gai_fail(cudaErrorInvalidDevicePointer, "the block at %p was freed while it grew", job->grows);
    return gai_fail(cudaErrorNotSupported, "the block at %p cannot grow in place to %zu bytes: copy it to a new block, "
                    "or reserve room for it with galloc_malloc_growable", job->grows, job->grow_to);
}

/* Tries the growth in place. [lock] */
static void gai_job_search_behind(gai_job *job)
{
    gai_growth_range range;
    enum gai_obstacle obstacle = gai_job_look(job, &range);
    if (obstacle == GAI_OBSTACLE_NONE) gai_job_take_growth_range(job, &range);
    if (obstacle == GAI_OBSTACLE_SHUT) job->error = gai_job_say_not_there(job, range.block);
}

/* Searches once for what the job needs. A block with room never comes from the bins, since its room must follow it.
   [lock] */
static void gai_job_search_locked(gai_job *job, enum gai_reach reach)
{
    if (job->grows) gai_job_search_behind(job);
    if (job->grows || job->params.room || job->pool->variant.one_each) return;
    if (job->pool->variant.search) job->pool->variant.search(job, reach);
    else gai_job_take(job, gai_find(job, reach));
}

/* Searches once; takes `lock` itself. Returns whether the job is done. */
static int gai_job_search(gai_job *job, enum gai_reach reach)
{
    gai_lock_on(&job->pool->lock);
    gai_job_search_locked(job, reach);
    gai_lock_off(&job->pool->lock);
    return gai_job_is_done(job);
}

/* ==== WAITS ======================================================================================================= */
/* >>waits */

/* Waits that galloc queues on one stream for events of another (reuse:wait). A wait is noted per pair of streams, with
   the epoch of the event: from then on all frees of the other stream stamped so or less may be reused at once.
   [paging], so recorded events stay recorded; `lock` guards the notes, and is not held around driver calls. Calls
   events, search, behind. */

/* Finds or makes the note of how far `stream` waits for `on`. NULL: no host memory. [lock] */
static gai_wait *gai_stream_wait_on(galloc_pool *pool, gai_stream *stream, gai_stream *on)
{
    gai_wait *wait = stream->waits;
    while (wait && wait->on != on) wait = wait->next;
    if (wait || !gai_slab_need(&pool->waits, 1)) return wait;
    wait = (gai_wait *)gai_slab_take(&pool->waits);
    wait->on = on;
    wait->epoch = 0;
    wait->next = stream->waits;
    stream->waits = wait;
    return wait;
}

/* A wait has failed: returns the error with which the job ends, or CUDA_SUCCESS. A sticky error of another context than
   the pool's does not end the job: it only makes the memory freed on `stream` (NULL: on some streams) unusable, as if
   no event were recorded for it. */
static CUresult gai_job_wait_failed(gai_job *job, gai_stream *stream, CUresult result)
{
    if (!gai_is_sticky(result) || gai_is_sticky(gai_context_error(job->pool->context))) return result;
    gai_lock_on(&job->pool->lock);
    if (stream) stream->silent = 1;
    gai_lock_off(&job->pool->lock);
    return CUDA_ERROR_NOT_READY;
}

/* Queues one wait, then notes it: if the note came first, another call could rely on a wait that is not queued yet. */
static CUresult gai_job_wait_for(gai_job *job, const gai_mark *mark)
{
    galloc_pool *pool = job->pool;
    gai_event *event;
    gai_wait *wait;
    gai_scope scope;
    CUresult result;
    gai_lock_on(&pool->lock);
    event = gai_mark_event(mark);
    wait = gai_stream_wait_on(pool, job->params.stream, mark->stream);
    gai_lock_off(&pool->lock);
    if (!wait) return GAI_NO_HOST_MEMORY;
    if (!event) return CUDA_ERROR_NOT_READY;
    result = gai_scope_push(&scope, job->params.stream->context);
    if (result) return result;
    result = GAI_CALL(pool, stream_wait, StreamWaitEvent, (job->site.handle, event->event, 0));
    gai_scope_leave(&scope);
    if (result) return gai_job_wait_failed(job, mark->stream, result);
    gai_lock_on(&pool->lock);
    gai_event_judge(pool, event, 0);
    if (event->epoch > wait->epoch) wait->epoch = event->epoch;
    pool->stats.waits++;
    job->waited++;
    gai_history_wait(pool, job->params.stream, mark);
    gai_lock_off(&pool->lock);
    return CUDA_SUCCESS;
}

/* Makes the job's stream wait for all marks of a list. No other call changes the list meanwhile. */
static CUresult gai_job_wait_for_all(gai_job *job, const gai_mark *marks)
{
    const gai_mark *mark;
    CUresult result = CUDA_SUCCESS;
    do {
        gai_lock_on(&job->pool->lock);
        mark = gai_job_obstacle(job, marks, NULL, 0, UINTPTR_MAX);
        gai_lock_off(&job->pool->lock);
        if (mark) result = gai_job_wait_for(job, mark);
    } while (mark && !result);
    return result;
}

/* Makes the job's stream wait for every mark of the block just taken. On failure the block becomes free again, with
   all its marks. */
static void gai_job_wait(gai_job *job)
{
    galloc_pool *pool = job->pool;
    CUresult result = gai_job_wait_for_all(job, job->got->marks);
    if (!result) return;
    gai_lock_on(&pool->lock);
    gai_block_give_room(pool, job->got);
    gai_block_untake(pool, job->got);
    (void)gai_block_file(pool, job->got, 0);
    gai_lock_off(&pool->lock);
    job->got = NULL;
    if (result == CUDA_ERROR_NOT_READY) return; /* no event stands for one of the marks: the ladder goes on */
    job->error = gai_driver_failed(result, "cuStreamWaitEvent");
    gai_pool_note(pool, result);
}

/* Makes the stream of a growing block wait for one mark after the other, then extends the block. Nothing changes
   before that. */
static void gai_job_wait_behind(gai_job *job)
{
    galloc_pool *pool = job->pool;
    CUresult result;
    for (;;) {
        gai_growth_range range;
        enum gai_obstacle obstacle;
        gai_lock_on(&pool->lock);
        obstacle = gai_job_look(job, &range);
        if (obstacle == GAI_OBSTACLE_NONE) gai_job_take_growth_range(job, &range);
        gai_lock_off(&pool->lock);
        if (obstacle != GAI_OBSTACLE_MARKED) return;
        result = gai_job_wait_for(job, &range.mark);
        if (result == CUDA_ERROR_NOT_READY) return; /* no event is recorded for it yet */
        if (result) break;
    }
    job->error = gai_driver_failed(result, "cuStreamWaitEvent");
    gai_pool_note(pool, result);
}

/* ==== PLANNER ===================================================================================================== */
/* >>planner */

/* Plans where pages move to, and how large new pages are. A plan is an address range to fill. A gap is a sequence of
   neighbouring holes and aliases; a window is the part of a gap that is considered for a plan. The
   plan predictor expects the plan that followed the same plan the last time, so that a program that repeats itself
   needs no search.
   [paging, lock] Calls search, release, parking, collection, budget. */

/* A plan, here with both free blocks beside the range:
     | left   | alias | hole | alias |   right |
          at  begin                  end  until
   [begin, end) is filled with pages; then [at, until) is free, and the requested block is taken there. The range has
   aliases, whose pages can return, and at most one hole.
   left == NULL or left->addr <= at < begin == left->addr + left->bytes
   right == NULL or end == right->addr < until <= right->addr + right->bytes
   alias == sum of the aliases' bytes,  newest == the highest number of their mappings
   gai_plan_created == bytes of the hole that are to be filled
   Growth in place: [begin, end) is the next hole or alias behind the block, and `until` is the block's new end. */
typedef struct gai_plan {
    gai_block *left, *right;
    gai_block *pieces; /* free blocks behind a growing block, made busy; linked by next_bin */
    gai_block *first, *hole;
    uintptr_t begin, end, at, until;
    size_t alias;
    uint64_t newest;
} gai_plan;

static size_t gai_plan_created(const gai_plan *plan) { return plan->end - plan->begin - plan->alias; }

/* Returns whether the block is free and the stream may use all of it at once. */
static int gai_block_is_own(const galloc_pool *pool, const gai_block *block, const gai_params *params)
{
    if (!block || block->kind != GAI_FREE) return 0;
    if (params->own_only)
        return gai_marks_own(block->marks, block->addr, block->addr + block->bytes, params->stream) == block->bytes;
    return block->set == &pool->common || (params->stream && block->set == &params->stream->free);
}

/* Returns whether the block is a hole or an alias outside rooms: a part of a gap. */
static int gai_block_is_unused(const gai_block *block)
{
    return block && (block->kind == GAI_HOLE || (block->kind == GAI_ALIAS && !block->room));
}

/* Notes the block in its whole pages that have an alias to return to: those with more than one mapping. */
static void gai_block_note_pages(const galloc_pool *pool, gai_block *block, const gai_page_filter *filter)
{
    uintptr_t begin, at;
    size_t bytes = gai_block_whole_pages(block, &begin);
    for (at = begin; at < begin + bytes;) {
        gai_mapping *mapping = gai_page_at(at);
        at += mapping->bytes;
        if (mapping->page->mappings == 1) continue;
        mapping->page->looked = pool->plans;
        mapping->page->holder = gai_mapping_is_spare(pool, mapping, block->marks, filter) ? block : NULL;
    }
}

/* gai_block_note_pages for all free blocks of a set that may have whole pages. */
static void gai_set_note_pages(const galloc_pool *pool, const gai_set *set, const gai_page_filter *filter)
{
    gai_bin bin = gai_bin_of(GAI_FIXED_SMALL);
    do {
        gai_block *block;
        for (block = set->bins[bin.row][bin.column]; block; block = block->next_bin)
            gai_block_note_pages(pool, block, filter);
    } while (gai_bin_next(set, &bin));
}

/* A window: the part from `first` to `last` of a gap. It is extended at its end and shrunk at its start, so that all
   windows of a gap are tried in one pass.
   last == NULL: it is empty;  hole == its only hole or NULL;  alias == bytes of its aliases
   page->taken: an alias of this page is in the window */
typedef struct gai_window {
    gai_block *left; /* the free block before the gap, if the requested range begins there */
    gai_block *first, *last, *hole;
    const gai_block *newest; /* the newest of its aliases; NULL: not known */
    size_t alias;
} gai_window;

/* Extends a window by one block. 0: the block is neither a hole nor an alias whose page can return, or a second
   hole. */
static int gai_window_add(const galloc_pool *pool, gai_window *window, gai_block *block, const gai_page_filter *filter)
{
    if (!gai_block_is_unused(block)) return 0;
    if (block->kind == GAI_HOLE) {
        if (window->hole) return 0;
        window->hole = block;
    } else {
        gai_page *page = block->alias->page;
        const gai_block *holder = filter->params->room ? NULL : gai_plan_holder(pool, page, filter);
        if (!holder || holder == window->left || page->taken) return 0;
        page->taken = 1;
        window->alias += block->bytes;
        if (!window->last || (window->newest && window->newest->alias->number < block->alias->number))
            window->newest = block;
    }
    window->last = block;
    return 1;
}

/* Shrinks a window by its first block, whose page may then be used elsewhere in the window. */
static void gai_window_drop_first(gai_window *window)
{
    gai_block *block = window->first;
    if (window->hole == block) window->hole = NULL;
    if (window->last && block->kind == GAI_ALIAS) {
        block->alias->page->taken = 0;
        window->alias -= block->bytes;
    }
    if (window->last == block) window->last = NULL;
    if (window->newest == block) window->newest = NULL;
    window->first = block->next;
}

/* Returns whether the free block holds a page of the window: then it cannot be part of the requested range itself. */
static int gai_window_needs(const gai_window *window, const gai_block *holder)
{
    const gai_block *block = window->first;
    for (;; block = block->next) {
        if (block->kind == GAI_ALIAS && block->alias->page->holder == holder) return 1;
        if (block == window->last) return 0;
    }
}

/* Returns the highest number of the window's aliases; 0 if it has none. */
static uint64_t gai_window_newest(gai_window *window)
{
    const gai_block *block = window->first, *newest = window->newest;
    for (; block && !window->newest; block = block == window->last ? NULL : block->next)
        if (block->kind == GAI_ALIAS && (!newest || block->alias->number > newest->alias->number)) newest = block;
    window->newest = newest;
    return newest ? newest->alias->number : 0;
}

/* Makes a plan of the window, without `newest`. 0: the window does not suffice. */
static int gai_window_plan(const galloc_pool *pool, gai_window *window, const gai_params *params, uintptr_t at,
                           gai_plan *plan)
{
    const gai_block *first = window->first, *last = window->last;
    uintptr_t needed = at + params->bytes, last_end = last->addr + last->bytes;
    memset(plan, 0, sizeof *plan);
    plan->begin = first->addr;
    /* The range begins in the free block before the gap, or in the gap's first block. */
    if (at < first->addr) plan->left = window->left;
    else if (first->kind == GAI_HOLE) plan->begin = gai_down(at, pool->granularity);
    if (needed <= first->addr) return 0;
    plan->end = last_end;
    /* The range ends in the free block behind the window, or in the window. New pages need not fill a hole to its
       end. */
    if (last_end < needed) {
        plan->right = last->next;
        if (params->room || !gai_block_is_own(pool, plan->right, params) || gai_window_needs(window, plan->right))
            return 0;
        if (plan->right->addr + plan->right->bytes < needed) return 0;
    } else if (last->kind == GAI_HOLE) {
        plan->end = gai_up(needed, pool->granularity);
    }
    /* A room lies in holes and aliases only. */
    if (params->room && at + params->room > last_end) return 0;
    plan->first = window->first;
    plan->hole = window->hole;
    plan->alias = window->alias;
    plan->at = at;
    plan->until = needed;
    return 1;
}

/* Returns whether plan a is better than b: fewer new bytes; for long-lived blocks then the highest address. With no
   new bytes, then the older `newest`: aliases that did not exist in the last pass must not change the choice. Then
   fewer aliases, then the lowest address. */
static int gai_plan_is_better(const gai_page_filter *filter, const gai_plan *a, const gai_plan *b)
{
    size_t new_a = gai_plan_created(a), new_b = gai_plan_created(b);
    if (!b->first) return 1;
    if (new_a != new_b) return new_a < new_b;
    if (filter->params->far) return a->at > b->at;
    if (!new_a && a->newest != b->newest) return a->newest < b->newest;
    if (a->alias != b->alias) return a->alias < b->alias;
    return a->at < b->at;
}

/* Extends the window, if possible, until it holds the requested bytes from `at` on, and compares its plan with the
   best. */
static void gai_window_try(const galloc_pool *pool, gai_window *window, uintptr_t at, const gai_page_filter *filter,
                           gai_plan *best)
{
    gai_plan plan;
    while (!window->last || window->last->addr + window->last->bytes < at + filter->params->bytes)
        if (!gai_window_add(pool, window, window->last ? window->last->next : window->first, filter)) break;
    if (!window->last || !gai_window_plan(pool, window, filter->params, at, &plan)) return;
    if (best->first && gai_plan_created(&plan) > gai_plan_created(best)) return;
    plan.newest = gai_window_newest(window);
    if (gai_plan_is_better(filter, &plan, best)) *best = plan;
}

static void gai_window_clear(gai_window *window)
{
    while (window->last) gai_window_drop_first(window);
}

/* Tries all windows of one gap: first from the free block before it, then from each block of the gap. */
static void gai_plan_in_gap(const galloc_pool *pool, gai_block *first, const gai_page_filter *filter, gai_plan *best)
{
    const gai_params *params = filter->params;
    gai_window window;
    memset(&window, 0, sizeof window);
    window.first = first;
    if (!params->room && gai_block_is_own(pool, first->prev, params)) {
        uintptr_t at = gai_up(first->prev->addr, params->alignment);
        window.left = first->prev;
        if (at < first->addr) gai_window_try(pool, &window, at, filter, best);
        gai_window_clear(&window);
        window.first = first;
        window.left = NULL;
    }
    for (; gai_block_is_unused(window.first); gai_window_drop_first(&window)) {
        uintptr_t at = gai_up(window.first->addr, params->alignment);
        if (at < window.first->addr + window.first->bytes) gai_window_try(pool, &window, at, filter, best);
    }
}

static int gai_block_starts_gap(const gai_block *block) { return !gai_block_is_unused(block->prev); }

/* Finds the best plan over all gaps. */
static int gai_plan_best(galloc_pool *pool, const gai_page_filter *filter, gai_plan *best)
{
    const gai_set *set;
    gai_block *hole;
    gai_mapping *mapping;
    memset(best, 0, sizeof *best);
    pool->plans++;
    /* First notes for each page which free block holds it; page->looked == pool->plans says that the note is of this
       plan. */
    for (set = &pool->common; set; set = set->next) gai_set_note_pages(pool, set, filter);
    for (hole = pool->holes; hole; hole = hole->next_bin)
        if (gai_block_starts_gap(hole)) gai_plan_in_gap(pool, hole, filter, best);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (gai_block_starts_gap(mapping->block)) gai_plan_in_gap(pool, mapping->block, filter, best);
    return best->first != NULL;
}

/* Rounds up to a room's place. Rooms of one length are aligned from their segment's start, so a new room finds an
   old one's place. */
static uintptr_t gai_room_up(const gai_segment *segment, uintptr_t addr, const gai_params *params)
{
    size_t unit = gai_up(params->room, params->alignment);
    return segment->addr + (addr - segment->addr + unit - 1) / unit * unit;
}

/* Returns whether [at, at + room) consists of holes and aliases that suit a room. An alias must not be longer than
   the request: a block that grows by little must not get much. *there: bytes of pages parked there. */
static int gai_room_is_there(const gai_block *block, uintptr_t at, const gai_params *params, size_t *there)
{
    uintptr_t end = at + params->room;
    *there = 0;
    for (; block && block->addr < end; block = block->next) {
        if (block->kind == GAI_HOLE && block->addr + block->bytes >= end) return 1;
        if (block->kind == GAI_HOLE) continue;
        if (!gai_block_suits_room(block) || block->bytes > params->bytes) return 0;
        if (gai_block_is_parked(block)) *there += block->bytes;
    }
    return block && block->addr == end;
}

/* The same for the part of the room behind a block that has pages. 1 without a room. */
static int gai_room_is_left(const gai_block *block, const gai_params *params)
{
    size_t there;
    return params->room <= block->bytes || gai_room_is_there(block->next, block->addr, params, &there);
}

/* Considers a room from `at` on, which lies in a hole or at an alias. */
static void gai_room_try(const galloc_pool *pool, gai_block *block, uintptr_t at, const gai_page_filter *filter,
                         gai_plan *best, size_t *most)
{
    gai_params params = *filter->params;
    gai_page_filter empty = *filter;
    gai_window window;
    gai_plan plan;
    size_t there;
    if (at >= block->addr + block->bytes || at % params.alignment || !gai_room_is_there(block, at, &params, &there))
        return;
    memset(&window, 0, sizeof window);
    memset(&plan, 0, sizeof plan);
    window.first = block;
    /* Only the bytes requested now are filled; the rest of the room stays as it is until the block grows. */
    params.room = 0;
    empty.params = &params;
    empty.one_place = 1;
    gai_window_try(pool, &window, at, &empty, &plan);
    gai_window_clear(&window);
    if (!plan.first || plan.end != plan.until) return;
    if (best->first && (there < *most || (there == *most && !gai_plan_is_better(&empty, &plan, best)))) return;
    *best = plan;
    *most = there;
}

/* Finds a place for a room: preferably one where pages of an earlier room are parked. */
static int gai_plan_room(galloc_pool *pool, const gai_page_filter *filter, gai_plan *best)
{
    gai_block *hole;
    gai_mapping *mapping;
    size_t most = 0;
    memset(best, 0, sizeof *best);
    if (!filter->params->room) return 0;
    pool->plans++;
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (gai_room_up(mapping->segment, mapping->addr, filter->params) == mapping->addr)
            gai_room_try(pool, mapping->block, mapping->addr, filter, best, &most);
    for (hole = pool->holes; hole; hole = hole->next_bin)
        gai_room_try(pool, hole, gai_room_up(hole->segment, hole->addr, filter->params), filter, best, &most);
    return best->first != NULL;
}

/* Makes a plan of a memo, if aliases alone suffice there again. */
static int gai_plan_by_memo(const galloc_pool *pool, const gai_memo *memo, const gai_page_filter *filter,
                            gai_plan *plan)
{
    const gai_params *params = filter->params;
    gai_window window;
    memset(&window, 0, sizeof window);
    window.first = memo->first->block; /* NULL: the mapping has ended */
    if (memo->first->number != memo->number || !gai_block_is_unused(window.first)) return 0;
    if (memo->bytes != params->bytes || gai_up(memo->at, params->alignment) != memo->at) return 0;
    /* The plan began in the free block before the gap: it must be free again, and reach as far down. */
    if (memo->at < window.first->addr) {
        window.left = window.first->prev;
        if (!gai_block_is_own(pool, window.left, params) || memo->at < window.left->addr) return 0;
    }
    gai_window_try(pool, &window, memo->at, filter, plan);
    gai_window_clear(&window);
    return plan->first && !gai_plan_created(plan);
}

#define GAI_TRUST 8 /* correct predictions in a row before the search is skipped */

/* Makes the predicted plan without a search, once predictions are trusted. */
static int gai_plan_again(galloc_pool *pool, gai_page_filter *filter, gai_plan *plan)
{
    const gai_predictor *predictor = &pool->plan_predictor;
    int found = 0;
    memset(plan, 0, sizeof *plan);
    if (filter->params->room || predictor->agreed < GAI_TRUST || !gai_predictor_has(predictor, predictor->next))
        return 0;
    pool->plans++;
    filter->one_place = 1;
    found = gai_plan_by_memo(pool, &pool->memos[predictor->next % GAI_PLAN_KEYS], filter, plan);
    filter->one_place = 0;
    return found;
}

/* Where the part of the hole begins that is to be filled. */
static uintptr_t gai_plan_supply_begin(const gai_plan *plan) { return gai_max(plan->begin, plan->hole->addr); }

#define GAI_OVERHEAD_SPARED 0.02 /* spared below the peak of live bytes, for a new peak. Saves 0.3 % */

/* Bytes that may be created before pages are moved instead. Above gc_threshold none. */
static size_t gai_job_allowance(const gai_job *job)
{
    galloc_pool *pool = job->pool;
    size_t peak = gai_max(pool->live_peak, gai_pool_live(pool) + job->params.requested);
    double overhead = pool->tuning.overhead - (job->thrifty ? GAI_OVERHEAD_SPARED : 0);
    double most = (double)peak * (1 + (overhead > 0 ? overhead : 0)), held = (double)pool->stats.reserved.current;
    double threshold = (double)gai_pool_threshold(pool);
    if (most > threshold) most = threshold;
    return gai_min(gai_pool_headroom(pool), most > held ? (size_t)(most - held) : 0);
}

/* The size of new pages, a power of two. Large pages keep their number small as the heap grows; but only a page that
   is free as a whole can move, so a page is at most half of what may still be created. */
static size_t gai_page_size(const galloc_pool *pool, size_t more, size_t allowance)
{
    double held = (double)(pool->stats.reserved.current + more), overhead = pool->tuning.overhead;
    int frugal = gai_pool_capacity(pool) < pool->device_bytes || overhead < GAI_OVERHEAD_FRUGAL;
    size_t finest = (size_t)(held / 1024), coarsest = finest, wish;
    /* config.growth sets the size. Else, under a limit or with hardly any overhead, every page counts: 1/1024 of the
       heap. */
    if (pool->tuning.growth) return gai_max(pool->tuning.growth, pool->granularity);
    /* Otherwise between overhead / 8 and min(2 * overhead, 1/16) of the heap; small heaps grow by a few MiB. */
    if (!frugal) {
        finest = gai_max((size_t)(held * overhead / 8), gai_min((size_t)held / 8, 8 * GAI_MIB));
        coarsest = (size_t)(held * (overhead < 1.0 / 32 ? overhead * 2 : 1.0 / 16));
    }
    wish = gai_max(finest, gai_min(coarsest, allowance / 2));
    /* Pages above GAI_PAGE_MAX need an allowance for several of them. */
    wish = gai_min(wish, gai_max(GAI_PAGE_MAX, gai_min(allowance / 3, 4 * GAI_PAGE_MAX)));
    return gai_power_below(gai_max(wish, pool->granularity));
}

/* Rounds the new bytes up to whole pages, if the hole and `most` allow it. */
static void gai_plan_round(gai_plan *plan, size_t page_bytes, size_t most)
{
    uintptr_t begin = gai_plan_supply_begin(plan), hole_end = plan->hole->addr + plan->hole->bytes;
    size_t bytes = gai_up(plan->end - begin, page_bytes);
    if (bytes <= hole_end - begin && bytes <= most) plan->end = begin + bytes;
}

/* Makes the plan's free blocks busy: no other call takes them, and their pages do not move. */
static void gai_plan_hold(gai_plan *plan, const gai_block *grows)
{
    gai_block *piece = grows ? grows->next : NULL;
    for (; piece && piece->addr < plan->until; piece = piece->next) {
        if (piece->kind != GAI_FREE) continue;
        gai_set_remove(piece);
        piece->kind = GAI_BUSY;
        piece->next_bin = plan->pieces;
        plan->pieces = piece;
    }
    if (plan->left) gai_set_remove(plan->left);
    if (plan->right) gai_set_remove(plan->right);
    if (plan->left) plan->left->kind = GAI_BUSY;
    if (plan->right) plan->right->kind = GAI_BUSY;
}

/* Makes the plan's blocks free again. */
static void gai_plan_let_go(galloc_pool *pool, gai_plan *plan)
{
    if (plan->left) (void)gai_block_file(pool, plan->left, 0);
    if (plan->right) (void)gai_block_file(pool, plan->right, 0);
    while (plan->pieces) {
        gai_block *piece = plan->pieces;
        plan->pieces = piece->next_bin;
        (void)gai_block_file(pool, piece, 0);
    }
}

/* Merges the new pages with `left` and `right`, before any other neighbour can. */
static gai_block *gai_plan_join(galloc_pool *pool, gai_plan *plan, gai_block *block)
{
    block->kind = GAI_FREE;
    if (plan->right) {
        plan->right->kind = GAI_FREE;
        gai_block_absorb(pool, block, plan->right);
    }
    if (!plan->left) return block;
    plan->left->kind = GAI_FREE;
    gai_block_absorb(pool, plan->left, block);
    return plan->left;
}

/* ==== SUPPLY ====================================================================================================== */
/* >>supply */

/* Carries a plan out: moves and creates pages, or allocates fixed segments. All decisions are made and all host
   memory is reserved first (gai_job_prepare), so that afterwards only the driver can refuse. If it does, every step
   is undone. [paging]; `lock` is not held around driver calls. Calls planner, waits, fixed, pages, parking, budget. */

/* Takes the requested block from the planned range. It is cut before the range merges with neighbours, whose marks
   it need not wait for. [lock] */
static void gai_job_take_supplied(gai_job *job, gai_plan *plan, gai_block *block)
{
    galloc_pool *pool = job->pool;
    gai_found found = {NULL, 0};
    found.block = gai_plan_join(pool, plan, block);
    found.at = plan->at;
    if (!gai_room_is_left(found.block, &job->params)) { /* taken while on_map ran: gai_step_supply tries again */
        (void)gai_block_file(pool, found.block, 0);
        return;
    }
    job->params.bytes = plan->until - plan->at;
    /* Inserted without merging, so that the job takes its block out of just this one. */
    gai_marks_prune(pool, &found.block->marks);
    gai_set_insert(gai_set_of(pool, found.block->marks), found.block);
    gai_job_take(job, found);
    if (!job->got || job->params.just_ready) {
        gai_set_remove(found.block);
        found.block = gai_block_file(pool, found.block, 0);
        if (job->got) job->got = found.block;
    }
    if (job->got) gai_block_reserve_room(pool, job->got, job->params.room);
}

/* Adds the planned range to the growing block if it lies in its room, even if the growth fails later; else leaves it
   free. Then tries the growth again. [lock] */
static void gai_job_take_behind(gai_job *job, gai_plan *plan, gai_block *block)
{
    galloc_pool *pool = job->pool;
    gai_block *owner = gai_room_owner(block);
    job->grown++;
    if (owner) {
        gai_stat_used(pool, block->bytes, 0);
        block->kind = GAI_USED;
        gai_block_absorb(pool, owner, block);
        gai_block_renew_captured(pool, owner);
    } else {
        (void)gai_block_file(pool, block, 0);
    }
    gai_plan_let_go(pool, plan);
    gai_job_search_behind(job);
}

/* Notes the driver's result. Out of memory, and a wait that cannot be had (CUDA_ERROR_NOT_READY), let the ladder go on;
   any other error ends the job. */
static void gai_job_refused(gai_job *job, CUresult result, const char *function)
{
    if (result == CUDA_ERROR_NOT_READY) return;
    job->refusal = result;
    job->who = function;
    if (!result || result == CUDA_ERROR_OUT_OF_MEMORY || job->error) return;
    gai_pool_note(job->pool, result);
    job->error = gai_driver_failed(result, function);
}

/* Plans to fill the next hole behind a block that grows. 0: its obstacle is not a lack of pages. [lock] */
static int gai_job_plan_behind(gai_job *job, gai_plan *plan)
{
    gai_growth_range range;
    memset(plan, 0, sizeof *plan);
    if (gai_job_look(job, &range) != GAI_OBSTACLE_HOLE) return 0;
    plan->begin = plan->at = range.hole->addr;
    plan->until = range.end;
    gai_plan_hold(plan, range.block);
    if (range.hole->kind == GAI_ALIAS) {
        plan->first = range.hole;
        plan->alias = range.hole->bytes;
        plan->end = plan->begin + plan->alias;
        return 1;
    }
    plan->hole = range.hole;
    plan->end = gai_min(range.hole->addr + range.hole->bytes, gai_up(range.end, job->pool->granularity));
    return 1;
}

/* Finds more addresses: if many are reserved, by dropping half of the stale aliases, then all; else by a new
   reservation. */
static CUresult gai_job_find_addresses(gai_job *job, int tries)
{
    galloc_pool *pool = job->pool;
    size_t space = gai_max(job->params.bytes, job->params.room) + gai_max(job->params.alignment, pool->granularity);
    if (tries < 2 && pool->stats.addresses / GAI_ADDRESSES_KEPT > pool->stats.reserved.current) {
        gai_pool_drop_stale(pool, 0, UINTPTR_MAX, tries ? 0 : pool->stats.leaving / 2, tries ? 0 : GAI_STALE_MAX);
        return CUDA_SUCCESS;
    }
    return gai_segment_reserve(pool, gai_up(space, pool->granularity));
}

/* Finds the best plan, and reserves addresses if there is none; `lock` is released meanwhile. 0: no plan, the job
   has the reason. [lock] */
static int gai_job_plan(gai_job *job, gai_plan *plan)
{
    galloc_pool *pool = job->pool;
    gai_page_filter filter = gai_page_filter_for(&job->params);
    CUresult result = CUDA_SUCCESS;
    int found, tries;
    if (job->grows) return gai_job_plan_behind(job, plan);
    filter.may_wait = job->may_wait;
    found = gai_plan_room(pool, &filter, plan) || gai_plan_again(pool, &filter, plan) ||
            gai_plan_best(pool, &filter, plan);
    for (tries = 0; tries < 3 && !found && !result; tries++) {
        gai_lock_off(&pool->lock);
        result = gai_job_find_addresses(job, tries);
        if (result) gai_job_refused(job, result, "cuMemAddressReserve");
        gai_lock_on(&pool->lock);
        found = !result && gai_plan_best(pool, &filter, plan);
    }
    /* Only a request with room fails for a lack of addresses: no later step finds a room. */
    if (result && job->params.room && !job->error)
        job->error = gai_fail(cudaErrorMemoryAllocation, "out of memory: no address range of %zu bytes is left",
                              job->params.room);
    if (found) gai_plan_hold(plan, NULL);
    return found;
}

/* Puts a free block into its set without merging it. */
static void gai_block_set_aside(galloc_pool *pool, gai_block *block)
{
    block->kind = GAI_FREE;
    gai_set_insert(gai_set_of(pool, block->marks), block);
}

/* Cuts the pages marked `taken` out of a free block that is in no set. The rest is free, but does not merge yet: its
   neighbours may give pages too. The caller has reserved the host memory. */
static void gai_block_give_pages(galloc_pool *pool, gai_block *block, gai_batch *returning_blocks)
{
    uintptr_t at = block->addr;
    while (at < block->addr + block->bytes) {
        gai_mapping *mapping = gai_page_at(at);
        gai_block *after = NULL;
        at = mapping->addr + mapping->bytes;
        if (!mapping->page->taken || mapping->addr < block->addr) continue;
        if (at < block->addr + block->bytes) after = gai_block_split(pool, block, at, GAI_FREE);
        if (mapping->addr > block->addr) {
            gai_block *right = gai_block_split(pool, block, mapping->addr, GAI_BUSY);
            gai_block_set_aside(pool, block);
            block = right;
        }
        block->kind = GAI_BUSY;
        mapping->page->taken = 0;
        gai_mapping_show(mapping, 0);
        gai_batch_add(returning_blocks, mapping, block);
        block = after;
        if (!block) return;
    }
    gai_block_set_aside(pool, block);
}

/* Reserves the host memory for gai_block_give_pages. 0: there is none. */
static int gai_block_give_pages_need(galloc_pool *pool, const gai_block *block)
{
    size_t n = 0;
    uintptr_t at, end = block->addr + block->bytes;
    for (at = block->addr; at < end;) {
        const gai_mapping *mapping = gai_page_at(at);
        at = mapping->addr + mapping->bytes;
        if (mapping->page->taken && !gai_block_map_need(mapping->addr)) return 0;
        if (mapping->page->taken && at < end && !gai_block_map_need(at)) return 0;
        n += (size_t)mapping->page->taken;
    }
    return gai_slab_has(&pool->blocks, 2 * n) && gai_slab_has(&pool->marks, 2 * n * gai_marks_count(block->marks));
}

/* Takes a returning page out of its current place, with all other pages marked `taken` there. 0: no host memory. */
static int gai_supply_borrow(galloc_pool *pool, gai_supply *supply, gai_page *page)
{
    gai_block *holder = page->holder;
    if (holder->kind == GAI_ALIAS) {
        page->taken = 0;
        gai_alias_remove(pool, page->current);
        page->current->was_mapped = 1;
        gai_batch_add(&supply->returning_blocks, page->current, holder);
        return 1;
    }
    if (!gai_block_give_pages_need(pool, holder)) return 0;
    gai_set_remove(holder);
    gai_block_give_pages(pool, holder, &supply->returning_blocks);
    return 1;
}

/* Merges the rests of the blocks that gave pages with their neighbours. */
static void gai_returning_merge(galloc_pool *pool, const gai_batch *returning_blocks)
{
    const gai_mapping *donor;
    for (donor = returning_blocks->first; donor; donor = donor->next) {
        gai_block *beside[2];
        int i;
        beside[0] = donor->block->prev;
        beside[1] = donor->block->next;
        for (i = 0; i < 2; i++) {
            if (!beside[i] || beside[i]->kind != GAI_FREE) continue;
            gai_set_remove(beside[i]);
            (void)gai_block_file(pool, beside[i], 0);
        }
    }
}

/* Takes the aliases in the planned range, and the pages that return to them, out of their lists and sets. 0: no host
   memory. [lock] */
static int gai_plan_fetch(galloc_pool *pool, const gai_plan *plan, gai_supply *supply)
{
    gai_block *block;
    gai_mapping *mapping;
    int ready = 1;
    for (block = plan->first; block && block->addr < plan->end; block = block->next) {
        mapping = block->kind == GAI_ALIAS ? block->alias : NULL;
        if (!mapping) continue;
        ready &= gai_block_map_need(block->addr);
        gai_alias_remove(pool, mapping);
        mapping->was_mapped = 1;
        /* A parked page is in place already; any other one must be taken from where it is. */
        mapping->page->taken = mapping->page->current != mapping;
        gai_batch_add(&supply->returning, mapping, block);
    }
    for (mapping = supply->returning.first; mapping && ready; mapping = mapping->next)
        if (mapping->page->taken) ready = gai_supply_borrow(pool, supply, mapping->page);
    for (mapping = supply->returning.first; mapping && !ready; mapping = mapping->next) mapping->page->taken = 0;
    gai_returning_merge(pool, &supply->returning_blocks);
    return ready;
}

/* Decides how the hole in the planned range is filled, and how far. exact: the device has just refused new pages, so
   that spare pages come first. 0: the limit does not allow it. The plan's blocks are busy. [lock] */
static int gai_job_choose(gai_job *job, gai_plan *plan, gai_supply *supply, int exact)
{
    galloc_pool *pool = job->pool;
    gai_page_filter filter = gai_page_filter_for(&job->params);
    size_t bytes = gai_plan_created(plan), most, allowance = gai_job_allowance(job), headroom = gai_pool_headroom(pool);
    size_t within;
    int fits;
    int room = job->params.room || (plan->hole && plan->hole->kind == GAI_ROOM);
    int open = plan->hole && plan->end <= plan->hole->addr + plan->hole->bytes;
    supply->page_bytes = gai_page_size(pool, bytes, allowance);
    if (!bytes) return 1;
    if (job->params.own_only) allowance = headroom = 0;
    filter.wanted = bytes;
    /* New pages come first, as far as the overhead allows; moved pages cover the rest. */
    if (!exact) filter.wanted -= gai_min(bytes, gai_down(allowance, pool->granularity));
    filter.may_wait = job->may_wait;
    most = open ? plan->hole->addr + plan->hole->bytes - gai_plan_supply_begin(plan) : bytes;
    if (job->params.room) most = gai_min(most, job->params.room);
    supply->moved = filter.most = room ? bytes : most;
    if (filter.wanted) gai_pool_to_batch(pool, &filter, &supply->donors);
    supply->moved -= filter.most;
    /* All pages of a room are its block's, so larger pages than requested move there only if no new ones can be had. */
    if (room && (exact || bytes > supply->moved + headroom)) {
        filter.most = most - supply->moved;
        gai_pool_to_batch(pool, &filter, &supply->donors);
        supply->moved = most - filter.most;
    }
    /* Pages come whole: the donors may have given more than is needed. */
    if (supply->moved > bytes) supply->moved -= gai_donors_trim(pool, &supply->donors, supply->moved - bytes);
    within = room ? gai_min(gai_max(allowance, pool->replaceable), headroom) : allowance;
    fits = bytes <= supply->moved + (job->frugal ? within : headroom);
    job->lacks = room && !fits ? bytes - supply->moved : 0;
    if (open && !supply->moved && !exact && !room)
        gai_plan_round(plan, supply->page_bytes, pool->tuning.growth ? headroom : allowance);
    bytes = gai_plan_created(plan);
    supply->new_bytes = bytes - gai_min(bytes, supply->moved);
    plan->end += supply->moved + supply->new_bytes - bytes;
    if (job->params.room) plan->until = plan->end;
    return fits;
}

/* Adds a plan that aliases alone fill to the plan predictor. */
static void gai_plan_remember(galloc_pool *pool, const gai_plan *plan, gai_mapping *first, size_t bytes)
{
    uint64_t key = gai_key_mix(gai_key_mix(gai_key_mix(0, first->number), plan->at), bytes);
    gai_memo *memo;
    (void)gai_predictor_note(&pool->plan_predictor, key ^ key >> 32);
    memo = &pool->memos[pool->plan_predictor.noted % GAI_PLAN_KEYS];
    memo->first = first;
    memo->number = first->number;
    memo->at = plan->at;
    memo->bytes = bytes;
}

/* Chooses without the spared part of the overhead (thrifty), then with it. */
static int gai_job_choose_within(gai_job *job, gai_plan *plan, gai_supply *supply, int exact)
{
    uintptr_t end = plan->end;
    int chosen;
    job->thrifty = job->frugal && gai_pool_live(job->pool) + job->params.requested <= job->pool->live_peak;
    chosen = gai_job_choose(job, plan, supply, exact);
    if (chosen || !job->thrifty) return chosen;
    gai_donors_restore(job->pool, &supply->donors);
    supply->donors.first = NULL;
    plan->end = end;
    job->thrifty = 0;
    return gai_job_choose(job, plan, supply, exact);
}

/* Reserves the host memory for taking the block later: the marks of pages that move are copied, and the block is cut
   at both ends. Other threads may use some of it meanwhile, but a lone thread does not fail late. */
static int gai_job_need(gai_job *job, const gai_plan *plan, const gai_supply *supply)
{
    galloc_pool *pool = job->pool;
    const gai_block *piece;
    size_t marks = gai_batch_marks(&supply->donors) + gai_batch_marks(&supply->returning_blocks);
    uintptr_t addr = plan->hole ? gai_plan_supply_begin(plan) : 0;
    for (piece = plan->pieces; piece; piece = piece->next_bin) marks += gai_marks_count(piece->marks);
    if (plan->left) marks += gai_marks_count(plan->left->marks);
    if (plan->right) marks += gai_marks_count(plan->right->marks);
    return gai_slab_need(&pool->marks, 3 * marks + 3) && gai_block_map_need(plan->at) &&
           gai_block_map_need(plan->until) && gai_supply_need(pool, supply, addr);
}

/* Covers the planned range with mappings, in order of address. The caller has reserved all descriptors. */
static void gai_batch_over_plan(galloc_pool *pool, gai_batch *batch, const gai_plan *plan, gai_supply *supply)
{
    uintptr_t hole = plan->hole ? plan->hole->addr : plan->end;
    while (supply->returning.first && supply->returning.first->addr < hole)
        gai_batch_add_returning(pool, batch, supply);
    if (plan->hole) gai_batch_over_hole(pool, batch, plan->hole, gai_plan_supply_begin(plan), supply);
    while (supply->returning.first) gai_batch_add_returning(pool, batch, supply);
}

/* Makes all decisions and reserves all host memory; afterwards only the driver can refuse. 0: growth is not possible
   (the job may have an error). [lock] */
static int gai_job_prepare(gai_job *job, gai_plan *plan, gai_supply *supply, gai_batch *batch, int exact)
{
    galloc_pool *pool = job->pool;
    int fetched;
    memset(supply, 0, sizeof *supply);
    if (!gai_job_plan(job, plan)) return 0;
    fetched = gai_plan_fetch(pool, plan, supply);
    if (!fetched || gai_job_choose_within(job, plan, supply, exact)) {
        if (!fetched || !gai_job_need(job, plan, supply)) {
            job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for the description of %zu bytes",
                                  (size_t)(plan->end - plan->begin));
        } else if (gai_budget_take(pool, supply->new_bytes)) { /* else another pool took it first */
            /* Only plans that aliases alone fill can be repeated as they are. */
            if (!plan->hole && !job->grows) gai_plan_remember(pool, plan, supply->returning.first, job->params.bytes);
            pool->replaceable = gai_left(pool->replaceable, supply->new_bytes);
            gai_batch_over_plan(pool, batch, plan, supply);
            return 1;
        }
    }
    gai_donors_restore(pool, &supply->returning);
    gai_donors_restore(pool, &supply->returning_blocks);
    gai_donors_restore(pool, &supply->donors);
    gai_plan_let_go(pool, plan);
    return 0;
}

/* Adds pages at the best place: whole pages of the heap's page size, or with `exact` just the bytes needed. */
static CUresult gai_job_supply_expandable(gai_job *job, int exact)
{
    galloc_pool *pool = job->pool;
    gai_plan plan;
    gai_supply supply;
    gai_batch batch = {NULL, NULL};
    const gai_mapping *donor;
    CUresult result = CUDA_SUCCESS;
    const char *function = "cuStreamWaitEvent";
    int ready;
    gai_lock_on(&pool->lock);
    ready = gai_job_prepare(job, &plan, &supply, &batch, exact);
    gai_lock_off(&pool->lock);
    if (!ready) return CUDA_SUCCESS;
    /* The bytes of a growing block may be used by its stream at once, so waits come before the pages. */
    donor = job->grows && job->may_wait ? supply.donors.first : NULL;
    for (; donor && !result; donor = donor->next) result = gai_job_wait_for_all(job, donor->block->marks);
    if (!result) result = gai_batch_map(pool, &batch, &function);
    if (result) gai_batch_undo(pool, &batch);
    else gai_pool_tell_mapped(pool, &batch);
    gai_lock_on(&pool->lock);
    if (result) {
        gai_donors_restore(pool, &supply.returning_blocks);
        gai_donors_restore(pool, &supply.donors);
        gai_plan_let_go(pool, &plan);
    } else {
        gai_block *block = gai_batch_publish(pool, &batch);
        pool->stats.grows += supply.new_bytes != 0;
        if (supply.new_bytes) gai_pool_note_separate(pool, job->params.stream);
        pool->parking.mapped += supply.new_bytes || supply.moved;
        if (!job->grows) job->grown += supply.new_bytes || supply.moved || supply.returning_blocks.first;
        gai_donors_leave(pool, &supply.returning_blocks);
        gai_donors_leave(pool, &supply.donors);
        if (job->grows) gai_job_take_behind(job, &plan, block);
        else gai_job_take_supplied(job, &plan, block);
    }
    gai_lock_off(&pool->lock);
    gai_job_refused(job, result, function);
    /* A new block's waits come after the pages: the block is not used before this call returns. */
    if (job->got && job->may_wait && !job->grows) gai_job_wait(job);
    return result;
}

/* Takes the job's block from a segment that was just made for it. [lock] */
static void gai_job_take_fixed(gai_job *job, gai_block *block)
{
    gai_found found;
    found.block = gai_block_file(job->pool, block, 0);
    found.at = gai_place(found.block->addr, found.block->addr + found.block->bytes, &job->params);
    job->grown = 1;
    gai_job_take(job, found);
}

/* Makes a fixed segment of cudaMalloc for the job: of the usual size, or of the least size if that is refused. */
static void gai_job_supply_fixed(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block *block = NULL;
    CUresult result;
    size_t space = job->params.bytes + job->params.alignment - GAI_UNIT, bytes = gai_fixed_bytes(pool, space);
    size_t least = gai_up(space, GAI_FIXED_SMALL);
    if (!gai_budget_take(pool, bytes)) {
        bytes = least;
        if (!gai_budget_take(pool, bytes)) return;
    }
    result = gai_segment_fixed(pool, bytes, 0, &job->site, &block);
    if (result == CUDA_ERROR_OUT_OF_MEMORY && bytes > least && gai_budget_take(pool, least))
        result = gai_segment_fixed(pool, least, 0, &job->site, &block);
    if (!result) {
        gai_lock_on(&pool->lock);
        gai_job_take_fixed(job, block);
        gai_lock_off(&pool->lock);
    }
    gai_job_refused(job, result, "cuMemAlloc");
}

/* ==== LADDER ====================================================================================================== */
/* >>ladder */

/* The steps of the ladder, which a job climbs when nothing at hand fits. Their order is in gai_ladder (section borrow),
   with like:pytorch in gai_torch_ladder. Each gai_step_ function returns whether the job is done: it has a block, or an
   error that ends it. A step that is not allowed notes why in left_out; a step that finds nothing to do may return 0
   without a note. [paging] Calls supply, waits, behind, search, collection, parking. */

/* Notes why a step is not taken. Returns the step's result. */
static int gai_job_leave_out(gai_job *job, const char *why)
{
    job->left_out = why;
    return 0;
}

/* gai_job_look for a caller that does not hold `lock`. */
static enum gai_obstacle gai_job_obstacle_behind(gai_job *job, gai_growth_range *range)
{
    enum gai_obstacle obstacle;
    gai_lock_on(&job->pool->lock);
    obstacle = gai_job_look(job, range);
    gai_lock_off(&job->pool->lock);
    return obstacle;
}

/* Unmaps the stale aliases behind a growing block whose pages cannot return there, and makes parked pages there free
   blocks. */
static void gai_job_clear_behind(gai_job *job)
{
    galloc_pool *pool = job->pool;
    uintptr_t begin = (uintptr_t)job->grows;
    gai_growth_range range;
    if (gai_job_obstacle_behind(job, &range) != GAI_OBSTACLE_BUSY) return;
    gai_lock_on(&pool->lock);
    gai_pool_unpark(pool, begin, begin + job->grow_to + job->guard);
    gai_lock_off(&pool->lock);
    gai_pool_drop_stale(pool, begin, begin + job->grow_to + job->guard, 0, 0);
}

#define GAI_ROOM_TRIES 8 /* places for a room that other calls may take while on_map runs */

/* Grows the pool. A growing block may need several holes filled, one after the other: filling one may use up the
   page that was to return to the next. A room may be lost to a call that comes while on_map runs. */
static int gai_step_supply(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int grown, tries = 0;
    job->refusal = CUDA_SUCCESS;
    if (gai_pool_is_still(pool)) return gai_job_leave_out(job, "on_map or on_unmap is running");
    if (job->params.bytes > gai_pool_most(pool)) return 0;
    if (pool->variant.supply && !job->grows) pool->variant.supply(job);
    else if (!pool->config.expandable_segments && !job->grows) gai_job_supply_fixed(job);
    if (!pool->config.expandable_segments) return gai_job_is_done(job);
    do {
        grown = job->grown;
        if (job->grows) gai_job_clear_behind(job);
        /* The device refused whole pages of the heap's size: a second try asks for just the bytes needed. */
        if (gai_job_supply_expandable(job, 0) == CUDA_ERROR_OUT_OF_MEMORY) (void)gai_job_supply_expandable(job, 1);
        tries++;
    } while ((job->grows || (job->params.room && tries < GAI_ROOM_TRIES)) && job->grown > grown &&
             !gai_job_is_done(job));
    return gai_job_is_done(job);
}

/* Gives back pages that pass the filter, but none that the growing block is about to take: filling its place again
   would undo that. */
static size_t gai_job_release_by(gai_job *job, const gai_page_filter *filter)
{
    galloc_pool *pool = job->pool;
    gai_plan plan;
    size_t given;
    memset(&plan, 0, sizeof plan);
    plan.until = (uintptr_t)job->grows + job->grow_to + job->guard;
    gai_lock_on(&pool->lock);
    gai_plan_hold(&plan, job->grows ? gai_block_used(pool, job->grows) : NULL);
    gai_lock_off(&pool->lock);
    given = gai_pool_release_by(pool, filter);
    gai_lock_on(&pool->lock);
    gai_plan_let_go(pool, &plan);
    gai_lock_off(&pool->lock);
    return given;
}

/* A room takes in no page larger than what it lacks. Gives back the smallest spare page that is larger, so that the
   pool can create smaller ones in its place. If unfinished work keeps all of them, streams are asked for events, for
   the next growth. 0: none was given back. */
static int gai_job_return_larger(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_page_filter filter = gai_page_filter_for(NULL);
    size_t given = 0;
    int i, larger = 0;
    filter.wanted = 1;
    filter.least = job->lacks + 1;
    for (i = gai_page_class(job->lacks); i < GALLOC_PAGE_SIZES && job->lacks && !given; i++) {
        filter.most = i + 1 < GALLOC_PAGE_SIZES ? ((size_t)2 << (GAI_PAGE_LOG2 + i)) - 1 : SIZE_MAX;
        if (!pool->stats.pages[i].count) continue;
        given = gai_job_release_by(job, &filter);
        larger |= i > gai_page_class(job->lacks);
    }
    gai_lock_on(&pool->lock);
    if (larger && !given) gai_pool_ask_streams(pool);
    gai_lock_off(&pool->lock);
    pool->replaceable += given;
    return given != 0;
}

/* The same within the overhead: pages are moved rather than created. */
static int gai_step_supply_within(gai_job *job)
{
    int done;
    if (!job->pool->config.expandable_segments) return gai_job_leave_out(job, "expandable_segments is False");
    job->frugal = 1;
    do {
        job->lacks = 0;
        done = gai_step_supply(job);
    } while (!done && gai_job_return_larger(job));
    job->frugal = 0;
    return done;
}

/* Where streams are kept apart: moves pages that only the job's stream may use. Returns whether the job is done. */
static int gai_job_move_own(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int keeps;
    if (job->grows || job->params.room || job->params.just_ready) return 0;
    gai_lock_on(&pool->lock);
    keeps = gai_stream_keeps(pool, job->params.stream, job->params.bytes);
    gai_lock_off(&pool->lock);
    job->own_tried = 1;
    if (!keeps) return 0;
    job->params.own_only = 1;
    (void)gai_step_supply(job);
    job->params.own_only = 0;
    return gai_job_is_done(job) || gai_job_search(job, GAI_REACH_OWN);
}

/* Returns whether the job's stream is captured. Captured work runs later, perhaps elsewhere and more than once, so
   waiting now does not help it. */
static int gai_job_is_captured(const gai_job *job) { return job->params.stream && job->params.stream->capture_id; }

/* ---- the order that is captured ---- */

/* The newest graph position of `stream` that `other` does not follow yet. NULL: it follows all of them, or the graph
   cannot order the two. */
static const gai_graph_position *gai_stream_ahead(const gai_stream *stream, const gai_stream *other)
{
    const gai_graph_position *position = stream->positions;
    /* A graph orders only streams of its capture. A stream that no mark names has freed nothing that could be taken. */
    if (stream == other || stream->capture != other->capture || !stream->uses || !position) return NULL;
    return position->epoch > gai_stream_waited(other, stream) ? position : NULL;
}

/* Returns whether the order of the graph may make free memory usable. [lock] */
static int gai_job_may_follow(const gai_job *job)
{
    const galloc_pool *pool = job->pool;
    const gai_stream *stream = pool->streams;
    if (!job->params.stream || !job->params.stream->capture || !(pool->config.reuse & GALLOC_REUSE_FOLLOWED)) return 0;
    for (; stream; stream = stream->next)
        if (gai_stream_ahead(stream, job->params.stream) && stream->free.bytes + pool->mixed.bytes + pool->parked)
            return 1;
    return 0;
}

/* Notes, as waits, up to which position the job's stream follows the other streams of its capture: the graph will
   order them so. [lock] */
static void gai_job_note_followed(gai_job *job, const gai_walk *walk)
{
    gai_stream *stream, *own = job->params.stream;
    for (stream = own->capture ? job->pool->streams : NULL; stream; stream = stream->next) {
        const gai_graph_position *position = gai_stream_ahead(stream, own);
        gai_wait *wait;
        /* Up to the newest position that the walk reached. */
        while (position && !gai_walk_covers(walk, position->nodes, position->n)) position = position->older;
        if (!position || position->epoch <= gai_stream_waited(own, stream)) continue;
        wait = gai_stream_wait_on(job->pool, own, stream);
        if (wait) wait->epoch = position->epoch;
    }
}

/* Finds memory that other streams of the same capture freed before a position that this stream follows in the graph.
   The graph is walked only here, where nothing at hand fits. Whatever cannot be found out counts as not followed. */
static int gai_step_follow(gai_job *job)
{
    gai_walk *walk;
    gai_scope scope;
    size_t at = 0;
    int useful;
    if (!gai_job_is_captured(job)) return gai_job_leave_out(job, "the stream is not captured");
    gai_lock_on(&job->pool->lock);
    useful = gai_job_may_follow(job);
    gai_lock_off(&job->pool->lock);
    walk = useful ? (gai_walk *)GALLOC_MALLOC(sizeof *walk) : NULL;
    if (!walk) return 0;
    if (!gai_scope_push(&scope, job->params.stream->context)) { /* a per-thread stream is the current context's */
        gai_walk_begin(walk, job->site.handle, job->params.stream->capture_id);
        while (at < walk->n) gai_walk_on(walk, at++);
        gai_scope_leave(&scope);
        gai_lock_on(&job->pool->lock);
        gai_job_note_followed(job, walk);
        gai_lock_off(&job->pool->lock);
    }
    GALLOC_FREE(walk);
    return gai_job_search(job, GAI_REACH_ALL);
}

/* Returns whether waits are limited: then no wait is begun that cannot be ended. */
static int gai_job_waits_are_limited(const gai_job *job) { return job->pool->config.wait_limit_ms != UINT64_MAX; }

/* Completes other streams' marks whose events are done, coalesces runs of slots, and retries what failed before. */
static int gai_step_poll(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int aliases, no_wait = gai_job_waits_are_limited(job) || pool->config.throw_on_cudamalloc_oom;
    gai_pool_retry(pool);
    gai_pool_sweep_lost(pool);
    gai_lock_on(&pool->lock);
    aliases = pool->oldest_alias != NULL; /* a free may park pages meanwhile */
    gai_lock_off(&pool->lock);
    if ((pool->config.reuse & GALLOC_REUSE_COMPLETED) || pool->variant.one_each || aliases) gai_pool_poll(pool);
    gai_pool_limit_stale(pool);
    if (pool->variant.give_back && !gai_job_is_captured(job)) pool->variant.give_back(pool, SIZE_MAX, no_wait);
    gai_lock_on(&pool->lock);
    if (pool->variant.coalesce) pool->variant.coalesce(pool, 0);
    gai_lock_off(&pool->lock);
    if (job->grows) gai_job_clear_behind(job);
    return gai_job_search(job, GAI_REACH_ALL);
}

/* Gives back idle pages before new ones are created. */
static int gai_step_collect(gai_job *job)
{
    if (!job->pool->collects) return gai_job_leave_out(job, "neither gc_threshold nor gc_age is in effect");
    gai_pool_collect(job->pool, job->params.bytes);
    return 0;
}

/* Makes parked pages free blocks, so that the request may take parts of them. */
static int gai_step_unpark(gai_job *job)
{
    if (job->grows || job->params.room) return gai_job_leave_out(job, "the request needs whole pages");
    gai_lock_on(&job->pool->lock);
    gai_pool_unpark(job->pool, 0, UINTPTR_MAX);
    gai_lock_off(&job->pool->lock);
    return gai_job_search(job, GAI_REACH_ALL);
}

/* Returns why the job's stream may not be made to wait; NULL: it may. The legacy stream never is: every blocking stream
   would wait with it. */
static const char *gai_job_why_no_wait(const gai_job *job)
{
    if (!(job->pool->config.reuse & GALLOC_REUSE_WAIT)) return "reuse:wait is off";
    if (gai_job_is_captured(job)) return "the stream is captured";
    if (job->pool->variant.one_each) return "each block is the driver's, which decides who gets freed memory";
    if (!job->params.stream) return "no stream asks";
    return job->params.stream->handle == CU_STREAM_LEGACY ? "the legacy stream is never made to wait" : NULL;
}

/* Ends a growth whose addresses are taken: no page helps there. The stream is made to wait for work on the block's own
   bytes or its room, but not for memory beyond these. Where that is not possible the host may wait for a block with
   room, which is to grow in any case. Any other block can be copied. */
static int gai_step_addresses(gai_job *job)
{
    gai_growth_range range;
    enum gai_obstacle obstacle;
    if (!job->grows) return gai_job_leave_out(job, "the request does not grow a block");
    obstacle = gai_job_obstacle_behind(job, &range);
    if (obstacle == GAI_OBSTACLE_SHUT || (obstacle > GAI_OBSTACLE_HOLE && range.foreign))
        job->error = gai_job_say_not_there(job, range.block);
    else if (obstacle == GAI_OBSTACLE_BUSY)
        job->error = gai_fail(cudaErrorMemoryAllocation, "out of memory: the driver does not unmap the pages reserved "
                              "behind the block at %p", job->grows);
    else if (obstacle == GAI_OBSTACLE_MARKED && !gai_job_why_no_wait(job))
        gai_job_wait_behind(job);
    if (obstacle == GAI_OBSTACLE_MARKED && range.plain && !gai_job_is_done(job))
        job->error = gai_fail(cudaErrorNotSupported, "the block at %p cannot grow in place on this stream yet: work of "
                              "another stream may still use its bytes", job->grows);
    return gai_job_is_done(job);
}

/* Gives back spare pages and creates new ones in one piece: as many bytes as the limit lacks, or all if the device
   has refused. */
static int gai_step_recycle(gai_job *job)
{
    galloc_pool *pool = job->pool;
    size_t space = gai_up(job->params.bytes, pool->granularity) + pool->granularity;
    gai_page_filter filter = gai_page_filter_for(NULL);
    gai_growth_range range;
    if (job->grows && gai_job_obstacle_behind(job, &range) != GAI_OBSTACLE_HOLE) return 0;
    if (!pool->config.expandable_segments) { /* cuMemFree waits for the device, but not for memory of a driver's pool */
        if (gai_job_is_captured(job)) return gai_job_leave_out(job, "cudaFree waits, which a capture forbids");
        if (gai_job_waits_are_limited(job) && !pool->variant.refresh)
            return gai_job_leave_out(job, "wait_limit_ms cannot limit cudaFree");
        filter.no_wait = gai_job_waits_are_limited(job);
    }
    /* The driver refused nothing, so it is the limit: only what it lacks goes. */
    if (!job->refusal) {
        if (job->params.bytes > gai_pool_capacity(pool)) return 0;
        filter.wanted = gai_max(gai_pool_lacks(pool, space), pool->granularity);
    }
    return gai_job_release_by(job, &filter) && gai_step_supply(job);
}

/* Makes the stream wait for memory that another stream still uses: a block as it is, or else pages moved from
   several blocks. */
static int gai_step_wait(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int done;
    if (gai_job_why_no_wait(job)) return gai_job_leave_out(job, gai_job_why_no_wait(job));
    gai_lock_on(&pool->lock);
    gai_pool_join(pool);
    if (!job->params.room && !job->grows) gai_job_take(job, gai_find_all(pool, &job->params, 1));
    gai_lock_off(&pool->lock);
    if (job->got) gai_job_wait(job);
    if (gai_job_is_done(job)) return 1;
    job->may_wait = 1;
    if (job->grows) gai_job_wait_behind(job);
    done = gai_job_is_done(job) || gai_step_supply_within(job);
    job->may_wait = 0;
    job->left_out = NULL;
    return done;
}

/* While the pool holds less than 1/64 of its capacity, a wait would save little memory: it is left for a last
   resort. */
#define GAI_WAIT_FRACTION 64

/* gai_step_wait at its earlier place on the ladder, before the pool grows to its limit. */
static int gai_step_wait_early(gai_job *job)
{
    galloc_pool *pool = job->pool;
    if (gai_pool_held(pool) >= gai_pool_capacity(pool) / GAI_WAIT_FRACTION) return gai_step_wait(job);
    return gai_job_leave_out(job, "the pool is small");
}

/* Chooses the stream to wait for on the host: of those with pending events, the one with most free memory, and of
   equals the one with the oldest event. *event is its oldest event. */
static gai_stream *gai_pool_best_stream(galloc_pool *pool, gai_event **event)
{
    gai_stream *stream, *best = NULL;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = stream->next) {
        if (!stream->recorded || !stream->uses || stream->silent) continue;
        if (best && best->free.bytes > stream->free.bytes) continue;
        if (best && best->free.bytes == stream->free.bytes && best->recorded->clock < stream->recorded->clock) continue;
        best = stream;
    }
    if (best) *event = best->recorded;
    gai_lock_off(&pool->lock);
    return best;
}

#define GAI_MS ((uint64_t)1000000) /* nanoseconds */

/* Waits for an event within wait_limit_ms. The driver has no wait with a time limit, so the event is queried again
   and again, after pauses of up to a millisecond. CUDA_ERROR_NOT_READY: the time is up. */
static CUresult gai_job_poll_event(gai_job *job, const gai_event *event)
{
    uint64_t most = job->pool->config.wait_limit_ms * GAI_MS, before = job->waited_ns, began = GALLOC_CLOCK();
    CUresult result = CUDA_ERROR_NOT_READY;
    unsigned round;
    for (round = 0; result == CUDA_ERROR_NOT_READY && job->waited_ns < most; round++) {
        if (round) gai_latch_rest(round - 1);
        result = GAI_CALL(job->pool, event_query, EventQuery, (event->event));
        job->waited_ns = before + (GALLOC_CLOCK() - began);
    }
    return result;
}

static CUresult gai_job_wait_for_event(gai_job *job, const gai_event *event)
{
    if (gai_job_waits_are_limited(job)) return gai_job_poll_event(job, event);
    return GAI_CALL(job->pool, event_synchronize, EventSynchronize, (event->event));
}

/* Waits on the host for one event after another until something fits. */
static int gai_step_wait_host(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_stream *stream;
    gai_event *event;
    if (gai_job_is_captured(job)) return gai_job_leave_out(job, "the stream is captured");
    if (!pool->config.wait_limit_ms) return gai_job_leave_out(job, "wait_limit_ms is 0");
    while ((stream = gai_pool_best_stream(pool, &event)) != NULL) {
        CUresult result = gai_job_wait_for_event(job, event);
        if (gai_is_sticky(result) && gai_job_wait_failed(job, stream, result) != result) continue;
        if (result && result != CUDA_ERROR_NOT_READY) {
            gai_job_refused(job, result, gai_job_waits_are_limited(job) ? "cuEventQuery" : "cuEventSynchronize");
            return 1;
        }
        gai_lock_on(&pool->lock);
        /* Complete, whatever a later query of the event returns: so each turn leaves one event less. */
        if (!result) gai_stream_complete(stream, event->epoch);
        gai_lock_off(&pool->lock);
        gai_pool_poll(pool);
        gai_pool_limit_stale(pool);
        if (gai_job_search(job, GAI_REACH_ALL) || gai_step_supply(job) || gai_step_recycle(job)) return 1;
        job->left_out = NULL;
        if (result) return gai_job_leave_out(job, "wait_limit_ms has passed");
    }
    return 0;
}

/* ==== DEVICE WAIT ================================================================================================= */
/* >>devicewait */

/* Waits on the host for all work of a context or device, after which all frees before it are complete, marked or not. A
   wait first ends the current epoch of each stream it covers, and completes that epoch afterwards: frees made meanwhile
   belong to the next one.
   [paging]; neither `lock` nor a latch is held during a wait. Calls events, streams, ladder. */

/* Frees pinned host memory. What the driver does not know went with its context, and what a context with a sticky error
   has will go. If the context has ended, the driver is not asked: the address may be the program's by now. */
static CUresult gai_pinned_free(galloc_pool *pool, void *host, CUcontext context, unsigned long long context_id)
{
    enum gai_health health;
    CUresult result = gai_context_look(context, context_id, &health);
    if (health == GAI_UNKNOWN) return result;
    if (health == GAI_ALIVE) result = GAI_CALL(pool, host_free, MemFreeHost, (host));
    if (health == GAI_ALIVE && result && result != CUDA_ERROR_INVALID_VALUE && !gai_is_sticky(result)) return result;
    return CUDA_SUCCESS;
}

/* Frees the fence, which the driver refused to free before. */
static CUresult gai_fence_drop(galloc_pool *pool)
{
    CUresult result;
    if (!pool->fence) return CUDA_SUCCESS;
    result = gai_pinned_free(pool, pool->fence, pool->fence_context, pool->fence_context_id);
    if (!result) pool->fence = NULL;
    return result;
}

/* Waits for all work of the current context's device: cuMemFreeHost waits, needs no device memory, and harms no
   capture (measured: docs/design.md), whereas cuCtxSynchronize would invalidate any capture under way. A fence that
   is not freed is tried again next time, without counting as a wait: it may be another context's. */
static CUresult gai_device_wait(galloc_pool *pool)
{
    void *fence = NULL;
    CUresult result = gai_fence_drop(pool);
    /* The fence's context is noted, in case the driver refuses to free the fence. */
    if (!result) result = gai_cu.CtxGetCurrent(&pool->fence_context);
    if (!result) result = gai_cu.CtxGetId(pool->fence_context, &pool->fence_context_id);
    if (!result) result = GAI_CALL(pool, host_alloc, MemHostAlloc, (&fence, GAI_UNIT, 0));
    if (result) return result;
    result = GAI_CALL(pool, host_free, MemFreeHost, (fence));
    if (result) pool->fence = fence;
    return result;
}

/* Returns whether a wait for the context completes the stream's frees. It does not for a captured stream: its graph
   may be launched later. */
static int gai_stream_is_of(const gai_stream *stream, CUcontext context, unsigned long long context_id)
{
    return stream->context == context && stream->context_id == context_id && gai_stream_is_plain(stream);
}

/* Waits for all work queued in a context, and completes all frees on its streams, marked or not. */
static CUresult gai_context_wait(galloc_pool *pool, CUcontext context, unsigned long long context_id)
{
    gai_scope scope;
    gai_stream *stream;
    enum gai_health health;
    CUresult result = gai_context_look(context, context_id, &health);
    if (health == GAI_DEAD) return CUDA_SUCCESS;
    if (!result) result = gai_scope_enter(&scope, context);
    if (result) return result;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = stream->next)
        /* Frees made during the wait get the next epoch: the wait proves nothing about them. */
        if (gai_stream_is_of(stream, context, context_id)) stream->waited_for = stream->epoch++;
    gai_lock_off(&pool->lock);
    result = gai_device_wait(pool);
    gai_scope_leave(&scope);
    if (result) return result;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = stream->next)
        if (gai_stream_is_of(stream, context, context_id)) gai_stream_complete(stream, stream->waited_for);
    gai_lock_off(&pool->lock);
    return CUDA_SUCCESS;
}

/* Returns whether some free on the stream is not known to be complete. */
static int gai_stream_has_more(const gai_stream *stream)
{
    return (stream->uses && stream->freed > stream->done) || stream->handed > stream->done;
}

/* Waits in a context for all work of its device. */
static CUresult gai_device_wait_in(galloc_pool *pool, CUcontext context)
{
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, context);
    if (result) return result;
    result = gai_device_wait(pool);
    gai_scope_leave(&scope);
    return result;
}

/* The same in a context that is known by its id. One that has ended needs no wait. */
static CUresult gai_known_context_wait(galloc_pool *pool, CUcontext context, unsigned long long context_id)
{
    enum gai_health health;
    CUresult result = gai_context_look(context, context_id, &health);
    if (health == GAI_DEAD) return CUDA_SUCCESS;
    return result ? result : gai_device_wait_in(pool, context);
}

/* Waits for all work of a device's primary context, if it is active. *context: the context, or NULL. */
static CUresult gai_primary_wait(galloc_pool *pool, CUdevice device, CUcontext *context)
{
    unsigned int flags = 0;
    int active = 0;
    CUresult result = gai_cu.DevicePrimaryCtxGetState(device, &flags, &active);
    *context = NULL;
    if (result || !active) return result;
    result = gai_cu.DevicePrimaryCtxRetain(context, device);
    if (result) return result;
    result = gai_device_wait_in(pool, *context);
    (void)gai_cu.DevicePrimaryCtxRelease(device);
    return result;
}

/* Waits for all known contexts that are not a device's primary one. */
static CUresult gai_known_contexts_wait(galloc_pool *pool, const CUcontext *primary, int devices)
{
    CUcontext context;
    unsigned long long id;
    CUresult result = CUDA_SUCCESS;
    size_t n;
    int device;
    for (n = 0; !result && gai_context_known(n, &context, &id); n++) {
        for (device = 0; device < devices && primary[device] != context; device++) continue;
        if (device == devices) result = gai_known_context_wait(pool, context, id);
    }
    return result;
}

/* Returns whether only a wait for all devices completes the stream's frees: those of unknown streams, and those in a
   context that has ended. */
static int gai_stream_needs_all_devices(const gai_stream *stream)
{
    return gai_stream_is_unknown(stream) || (stream->ended && gai_stream_is_plain(stream));
}

/* Waits for all devices: for all primary contexts and all known others. */
static CUresult gai_devices_wait(galloc_pool *pool)
{
    CUcontext primary[GAI_DEVICES];
    int devices = 0, device;
    CUresult result = gai_cu.DeviceGetCount(&devices);
    devices = (int)gai_min((size_t)devices, GAI_DEVICES);
    for (device = 0; device < devices && !result; device++) result = gai_primary_wait(pool, device, &primary[device]);
    return result ? result : gai_known_contexts_wait(pool, primary, devices);
}

/* Completes the orphans and the frees of such streams, which any context may have. */
static CUresult gai_pool_wait_for_orphans(galloc_pool *pool)
{
    gai_stream *stream;
    CUresult result = gai_devices_wait(pool);
    if (result) return result;
    gai_lock_on(&pool->lock);
    gai_pool_file_orphans(pool);
    for (stream = pool->streams; stream; stream = stream->next)
        if (gai_stream_needs_all_devices(stream)) gai_stream_complete(stream, stream->waited_for);
    gai_lock_off(&pool->lock);
    gai_pool_sweep_lost(pool);
    return CUDA_SUCCESS;
}

/* CUDA may report a graph's end a little after its last launch or the call that destroyed it. So the report is
   looked for this many times, with yields in between; more often before a pool is reported to be in use. */
#define GAI_GRAPH_LOOKS GAI_LATCH_YIELDS
#define GAI_GRAPH_LOOKS_LAST (GAI_LATCH_YIELDS + 64)

/* Waits for the pool's own context and those of all captured stream states. [paging], so stream states
   stay. */
static CUresult gai_pool_wait_for_launches(galloc_pool *pool)
{
    gai_stream *stream, *last = NULL;
    CUresult result = gai_device_wait(pool);
    gai_lock_on(&pool->lock);
    stream = pool->streams;
    gai_lock_off(&pool->lock);
    for (; stream && !result; stream = stream->next) {
        if (!stream->capture_id || gai_stream_is_unknown(stream) || stream->context == pool->context) continue;
        if (!last || last->context != stream->context)
            result = gai_known_context_wait(pool, stream->context, stream->context_id);
        last = stream;
    }
    return result;
}

/* Waits for launches of destroyed graphs, and for CUDA's report of their end. 1: no graph owns memory any more. The
   caller is in the pool's scope. */
static int gai_pool_await_graphs(galloc_pool *pool, unsigned looks, CUresult *result)
{
    unsigned round;
    int captured = 1;
    for (round = 0; captured && round < looks; round++) {
        gai_lock_on(&pool->lock);
        gai_pool_reap(pool);
        captured = gai_pool_has_captured(pool);
        gai_lock_off(&pool->lock);
        if (captured && !round) *result = gai_pool_wait_for_launches(pool);
        else if (captured) gai_latch_rest(round);
    }
    return !captured;
}

/* Waits for every context with incomplete frees, so that all free memory becomes usable by any stream. */
static CUresult gai_pool_wait(galloc_pool *pool)
{
    CUresult result = CUDA_SUCCESS;
    gai_stream *stream;
    int orphans;
    (void)gai_pool_await_graphs(pool, GAI_GRAPH_LOOKS, &result);
    gai_lock_on(&pool->lock);
    /* Gathered before the wait: unconfirmed blocks of now are orphans, later ones are not. */
    orphans = gai_pool_gather_orphans(pool);
    for (stream = pool->streams; stream; stream = stream->next) {
        if (!gai_stream_needs_all_devices(stream) || !gai_stream_has_more(stream)) continue;
        stream->waited_for = stream->epoch++;
        orphans = 1;
    }
    stream = pool->streams;
    gai_lock_off(&pool->lock);
    if (orphans && !result) result = gai_pool_wait_for_orphans(pool);
    for (; stream; stream = stream->next) {
        CUresult waited = CUDA_SUCCESS;
        int more;
        gai_lock_on(&pool->lock);
        more = gai_stream_has_more(stream);
        gai_lock_off(&pool->lock);
        if (more && gai_stream_is_plain(stream))
            waited = gai_context_wait(pool, stream->context, stream->context_id);
        if (waited) result = waited;
    }
    gai_pool_poll(pool);
    gai_pool_limit_stale(pool);
    return result;
}

/* Returns whether the job may wait for a device, however long that takes. If not, left_out says why. */
static int gai_job_can_wait_for_devices(gai_job *job)
{
    if (gai_job_is_captured(job)) return gai_job_leave_out(job, "the stream is captured");
    if (gai_job_waits_are_limited(job)) return gai_job_leave_out(job, "wait_limit_ms cannot limit this wait");
    return 1;
}

/* Waits for all devices and contexts that have frees of the pool, searches once more, and then moves and creates pages
   beside the memory that the wait has freed. */
static int gai_step_wait_device(gai_job *job)
{
    galloc_pool *pool = job->pool;
    CUresult result;
    if (!gai_job_can_wait_for_devices(job)) return 0;
    result = gai_job_wait_failed(job, NULL, gai_pool_wait(pool));
    if (result && result != CUDA_ERROR_OUT_OF_MEMORY) gai_job_refused(job, result, "cuMemFreeHost");
    gai_lock_on(&pool->lock);
    if (pool->variant.coalesce) pool->variant.coalesce(pool, 1);
    gai_lock_off(&pool->lock);
    return gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL) || gai_step_supply(job);
}

/* ==== BORROW ====================================================================================================== */
/* >>borrow */

/* Borrowing: when a limit or the device has no memory left, other pools of the device give back their idle memory. And
   the table of the ladder: the steps that a request takes when no cached block fits. Steps run under `paging` and take
   the pool's lock for each search. The budget lock guards the list of pools while it is walked. A thread that holds the
   `paging` lock of its pool only tries to take that of another pool, and never blocks on it. May call release,
   devicewait and all sections before them. */

/* What other pools of the device give back. */
enum gai_borrowing {
    GAI_BORROW_IDLE, /* idle memory, but nothing by cudaMalloc, whose release waits. Pools whose `paging` lock is busy
                        or that have an on_unmap callback give none */
    GAI_BORROW_KEPT, /* the same, and what is in quarantine, unchecked */
    GAI_BORROW_ALL   /* both from every pool, after a wait for the device: it releases this pool's `paging` lock while
                        it holds the other one, and may call on_unmap */
};

/* Makes other pools of the device give back memory. */
static size_t gai_pool_borrow(galloc_pool *pool, size_t wanted, enum gai_borrowing how)
{
    galloc_pool *other = NULL;
    gai_page_filter filter = gai_page_filter_for(NULL);
    size_t given = 0;
    filter.no_wait = how != GAI_BORROW_ALL;
    while ((other = gai_pool_visit(other, pool->budget)) != NULL) {
        gai_scope scope;
        if (other == pool || given >= wanted) continue;
        if (how == GAI_BORROW_ALL) {
            gai_lock_off(&pool->paging);
            gai_lock_on(&other->paging);
        } else if (!gai_lock_try(&other->paging)) {
            continue;
        }
        if (how != GAI_BORROW_ALL && other->callbacks.on_unmap) {
            gai_lock_off(&other->paging);
        } else if (gai_pool_enter_locked(other, &scope)) {
            gai_thread.message_is_new = 0; /* an error there is not this pool's error */
        } else {
            int gives = how == GAI_BORROW_ALL || other->config.expandable_segments || other->variant.refresh;
            gai_pool_poll(other);
            filter.wanted = gai_left(wanted, given);
            if (gives) given += gai_pool_release_by(other, &filter);
            if (how == GAI_BORROW_ALL && given < wanted && gai_pool_held(other) && !gai_pool_wait(other))
                given += gai_pool_release(other, wanted - given);
            filter.wanted = gai_left(wanted, given);
            if (how != GAI_BORROW_IDLE && gives && given < wanted && gai_pool_free_kept(other))
                given += gai_pool_release_by(other, &filter);
            gai_scope_leave(&scope);
            gai_lock_off(&other->paging);
        }
        if (how == GAI_BORROW_ALL) gai_lock_on(&pool->paging);
    }
    return given;
}

/* Are new segments as large as PyTorch makes them, whatever the limits leave? */
static int gai_pool_has_torch_segments(const galloc_pool *pool)
{
    return pool->config.like && !pool->config.backend && !pool->config.expandable_segments;
}

/* Returns the bytes that the alignment adds to a new segment. PyTorch's segments of cudaMalloc begin at multiples of
   2 MiB. */
static size_t gai_job_slack(const gai_job *job)
{
    const galloc_config *config = &job->pool->config;
    size_t alignment = job->params.alignment;
    if (!config->backend && config->expandable_segments) return 0;
    if (gai_pool_has_torch_segments(job->pool)) return alignment > GAI_FIXED_SMALL ? alignment : 0;
    return alignment - GAI_UNIT;
}

/* Returns the bytes of the smallest segment that may be made for the request. */
static size_t gai_job_segment(const gai_job *job)
{
    size_t space = job->params.bytes + gai_job_slack(job);
    if (gai_pool_has_torch_segments(job->pool)) return gai_fixed_bytes(job->pool, space);
    return job->pool->config.backend ? space : gai_up(space, GAI_FIXED_SMALL);
}

/* Makes other pools give back up to `wanted` bytes, unless this pool's own limit causes the shortage. Returns whether
   they gave any. */
static int gai_job_have_others_give(gai_job *job, size_t wanted, enum gai_borrowing how)
{
    galloc_pool *pool = job->pool;
    size_t headroom = gai_pool_headroom(pool), share, own, excess;
    int alone;
    gai_lock_on(&gai_locks.budget);
    share = gai_pool_share(pool);
    own = gai_left(share, pool->taken);
    excess = gai_left(pool->budget->held, pool->budget->limit); /* held before the limit was set */
    alone = pool->budget->pools == pool && !pool->next_sharing;
    gai_lock_off(&gai_locks.budget);
    if (alone) return gai_job_leave_out(job, "there is no other pool");
    if (!job->refusal) {
        if (own <= headroom)
            return gai_job_leave_out(job, share < pool->device_bytes ? "the pool's own limit is the cause"
                                                                     : "the device's memory is the cause");
        wanted = gai_left(wanted, headroom) + excess;
    }
    return wanted && gai_pool_borrow(pool, wanted, how);
}

/* Makes other pools give back enough for the request and one more page, and then tries to serve it. Where a limit lacks
   less than the device does, only the second try knows what the device lacks. */
static int gai_job_borrow(gai_job *job, enum gai_borrowing how, int (*serve)(gai_job *))
{
    size_t wanted = gai_job_segment(job) + job->pool->granularity;
    int tries;
    for (tries = 0; tries < 2 && gai_job_have_others_give(job, wanted, how); tries++)
        if (serve(job)) return 1;
    return 0;
}

static int gai_job_serve(gai_job *job)
{
    return gai_job_search(job, GAI_REACH_ALL) || gai_step_supply(job) || gai_step_recycle(job);
}

static enum gai_borrowing gai_job_borrowing(gai_job *job)
{
    return gai_job_can_wait_for_devices(job) ? GAI_BORROW_ALL : GAI_BORROW_KEPT;
}

static int gai_step_borrow(gai_job *job) { return gai_job_borrow(job, GAI_BORROW_IDLE, gai_job_serve); }
static int gai_step_borrow_last(gai_job *job) { return gai_job_borrow(job, gai_job_borrowing(job), gai_job_serve); }

/* A step of the ladder. `take` returns 1 when the job is done, successfully or not. */
typedef struct gai_ladder_step {
    const char *name;
    int at_once; /* taken even with throw_on_cudamalloc_oom, since it neither waits nor gives usable memory back. But
                    gai_step_poll frees what is of no use to the heap: pages in quarantine, surplus stale aliases, and
                    blocks of other backends (cudaFree waits); gai_step_supply_within replaces large pages */
    int (*take)(gai_job *);
} gai_ladder_step;

/* The steps in order, with their numbers in ON RUNNING OUT. A step that makes memory usable searches for it itself,
   because another thread may take it before the next step. A step that creates or moves pages takes its block from
   them. gai_step_collect and gai_step_addresses make nothing usable. */
static const gai_ladder_step gai_ladder[GALLOC_REPORT_STEPS] = {
    /* 1 */ {"use memory freed earlier in the capture", 1, gai_step_follow},
    /* 1 */ {"use memory whose work is complete", 1, gai_step_poll},
    /* 1 */ {"collect idle memory", 0, gai_step_collect},
    /* 2 */ {"move or create pages within overhead", 1, gai_step_supply_within},
    /* 2 */ {"use parts of parked pages", 1, gai_step_unpark},
    /* 3 */ {"make the stream wait, in a large pool", 0, gai_step_wait_early},
    /* 4 */ {"find addresses behind the block", 1, gai_step_addresses},
    /* 4 */ {"create pages up to the limit", 1, gai_step_supply},
    /* 4 */ {"return free pages and create others", 0, gai_step_recycle},
    /* 4 */ {"use idle memory of other pools", 0, gai_step_borrow},
    /* 5 */ {"make the stream wait", 0, gai_step_wait},
    /* 6 */ {"wait on the host for events", 0, gai_step_wait_host},
    /* 6 */ {"wait for the device", 0, gai_step_wait_device},
    /* 6 */ {"return free pages again", 0, gai_step_recycle},
    /* 6 */ {"use idle memory of other pools, with a wait", 0, gai_step_borrow_last},
};

/* ==== OUT OF MEMORY =============================================================================================== */
/* >>outofmemory */

/* Out of memory: the counts, the survey of free memory and the text of galloc_report, and the loop that takes the steps
   of a ladder. The survey runs under the pool's lock with all stream caches latched; the other functions run under
   `paging` unless a comment says otherwise. May call all sections before it. */

/* Writes into `text` which limit refuses `bytes` more bytes. */
static void gai_pool_say_limit(const galloc_pool *pool, size_t bytes, char *text, size_t size)
{
    size_t share, memory_limit, held, limit, own, left;
    gai_lock_on(&gai_locks.budget);
    share = gai_pool_share(pool);
    memory_limit = pool->config.memory_limit;
    held = pool->budget->held;
    limit = pool->budget->limit;
    own = gai_left(share, pool->taken);
    gai_lock_off(&gai_locks.budget);
    if (limit < share || (bytes <= share && own > gai_left(limit, held)))
        (void)snprintf(text, size, "the device_limit is %zu, of which the device's pools hold %zu", limit, held);
    else if (share < gai_min(memory_limit, pool->device_bytes))
        (void)snprintf(text, size, "per_process_memory_fraction leaves the pool %zu", share);
    else if (memory_limit <= pool->device_bytes)
        (void)snprintf(text, size, "the pool's memory_limit is %zu", memory_limit);
    else
        (void)snprintf(text, size, "the device has %zu", pool->device_bytes);
    left = gai_min(own, gai_left(limit, held));
    if (!pool->variant.one_each && bytes <= left && gai_up(bytes, pool->granularity) > left) {
        size_t length = strlen(text);
        (void)snprintf(text + length, size - length, "; pages have %zu bytes", pool->granularity);
    }
}

/* On cudaMalloc segments and other backends, alignment costs memory: the segment is as long as the alignment. Returns
   whether the alignment exceeds the device's memory. */
static int gai_job_is_misaligned(const gai_job *job)
{
    const galloc_config *config = &job->pool->config;
    return (config->backend || !config->expandable_segments) && job->params.alignment > job->pool->device_bytes;
}

/* Returns whether no step can help: the request exceeds all that there can be, or its alignment exceeds the device. */
static int gai_job_is_hopeless(const gai_job *job)
{
    if (job->grows) return 0;
    return job->params.bytes > gai_pool_most(job->pool) || gai_job_is_misaligned(job);
}

/* Returns what a step of the ladder gained, and updates two counts that it may change.
   usable bytes that the job's stream can take without waiting
   held   bytes that the pool holds */
static size_t gai_job_gained(const gai_job *job, size_t *usable, size_t *held)
{
    galloc_pool *pool = job->pool;
    size_t usable_before = *usable, held_before = *held;
    gai_lock_on(&pool->lock);
    *usable = pool->common.bytes + (job->params.stream ? job->params.stream->free.bytes : 0);
    *held = pool->stats.reserved.current;
    gai_lock_off(&pool->lock);
    return gai_left(*usable, usable_before) + gai_left(held_before, *held);
}

/* ---- survey of free memory ---- */

/* The counts of free memory in a report, from the view of the job's stream. `movable`: bytes of pages that can be
   mapped elsewhere. */
typedef struct gai_survey {
    const galloc_pool *pool;
    gai_stream *stream;
    galloc_report *report;
    size_t movable;
} gai_survey;

/* Returns a mark that keeps the byte at `at` from the stream, preferably one of a graph; NULL if there is none. Sets
   *until to the end of the range for which the answer holds; *until <= end. */
static const gai_mark *gai_survey_bar(const gai_survey *survey, const gai_mark *mark, uintptr_t at, uintptr_t end,
                                      uintptr_t *until)
{
    const gai_mark *bar = NULL;
    *until = end;
    for (; mark; mark = mark->next) {
        if (mark->end <= at || gai_mark_allows(survey->pool, mark, survey->stream)) continue;
        *until = gai_min(*until, mark->begin > at ? mark->begin : mark->end);
        if (mark->begin <= at && (!bar || !bar->stream->capture)) bar = mark;
    }
    return bar;
}

static void gai_survey_strand(gai_survey *survey, gai_stream *stream, size_t bytes)
{
    survey->report->stranded += bytes;
    stream->stranded += bytes;
}

/* Adds the free range [at, end) of one block to the counts: each byte counts once, as usable, graph_bytes or
   stranded. */
static void gai_survey_range(gai_survey *survey, const gai_mark *marks, uintptr_t at, uintptr_t end, int slot)
{
    galloc_report *report = survey->report;
    uintptr_t begin = at, until;
    for (; at < end; at = until) {
        const gai_mark *bar = gai_survey_bar(survey, marks, at, end, &until);
        if (!bar) {
            report->usable += until - at;
            if (slot) report->in_slots += until - at;
            else report->largest_usable = gai_max(report->largest_usable, until - begin);
            continue;
        }
        begin = until;
        if (bar->stream->capture) report->graph_bytes += until - at;
        else gai_survey_strand(survey, bar->stream, until - at);
    }
}

/* Returns the bytes of those whole pages in a free block that can be remapped for the stream. */
static size_t gai_survey_movable(const gai_survey *survey, const gai_block *block)
{
    gai_params params;
    gai_page_filter filter;
    uintptr_t at, begin = 0, end = block->addr + block->bytes;
    size_t bytes = 0;
    if (block->segment->fixed || !gai_block_whole_pages(block, &begin)) return 0;
    memset(&params, 0, sizeof params);
    params.stream = survey->stream;
    filter = gai_page_filter_for(&params);
    for (at = begin; at < end && at + gai_page_at(at)->bytes <= end; at += gai_page_at(at)->bytes)
        if (gai_mapping_is_spare(survey->pool, gai_page_at(at), block->marks, &filter)) bytes += gai_page_at(at)->bytes;
    return bytes;
}

static void gai_survey_set(gai_survey *survey, const gai_set *set)
{
    const gai_block *block;
    for (block = set->oldest; block; block = block->newer) {
        gai_survey_range(survey, block->marks, block->addr, block->addr + block->bytes, block->kind == GAI_SLOT);
        survey->movable += gai_survey_movable(survey, block);
    }
}

/* Blocks in a stream cache are usable by their own stream only. They are not coalesced, so each counts by itself for
   `largest_usable`. */
static void gai_survey_cache(gai_survey *survey, gai_stream *stream)
{
    const gai_cache *cache = &stream->cache;
    size_t bytes = cache->bytes + cache->unconfirmed_bytes;
    if (stream != survey->stream) {
        gai_survey_strand(survey, stream, bytes);
        return;
    }
    survey->report->usable += bytes;
    survey->report->largest_usable = gai_max(survey->report->largest_usable, gai_cache_largest(cache));
}

/* Surveys all free sets, stream caches and parked pages. [lock, latches] */
static void gai_survey_all(gai_survey *survey, galloc_pool *pool)
{
    const gai_mapping *mapping;
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) stream->stranded = 0;
    gai_survey_set(survey, &pool->common);
    gai_survey_set(survey, &pool->mixed);
    if (pool->variant.survey) pool->variant.survey(survey, pool);
    for (stream = pool->streams; stream; stream = stream->next) {
        gai_survey_set(survey, &stream->free);
        gai_survey_cache(survey, stream);
    }
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer) {
        size_t before = survey->report->usable;
        if (!gai_block_is_parked(mapping->block)) continue;
        gai_survey_range(survey, mapping->block->marks, mapping->addr, mapping->addr + mapping->bytes, 0);
        if (survey->report->usable - before == mapping->bytes) survey->movable += mapping->bytes;
    }
}

/* Lists the streams that strand the most bytes, in descending order, and adds up the rest. */
static void gai_report_streams(galloc_report *report, galloc_pool *pool)
{
    gai_stream *stream, *most;
    int i;
    for (i = 0; i < GALLOC_REPORT_STREAMS; i++) {
        for (most = NULL, stream = pool->streams; stream; stream = stream->next)
            if (stream->stranded && (!most || stream->stranded > most->stranded)) most = stream;
        if (!most) return;
        report->streams[i].stream_id = most->stream_id;
        report->streams[i].context_id = most->context_id;
        report->streams[i].bytes = most->stranded;
        most->stranded = 0;
    }
    for (stream = pool->streams; stream; stream = stream->next) {
        report->more_streams += stream->stranded != 0;
        report->more_stranded += stream->stranded;
    }
}

/* ---- the report ---- */

/* Writes into `text` why the request was refused. */
static void gai_job_cause(const gai_job *job, char *text, size_t size)
{
    const galloc_pool *pool = job->pool;
    const char *at_once = job->rejected && !gai_job_is_hopeless(job) ? "refused at once: " : "";
    size_t length = strlen(at_once), slack = gai_job_slack(job), segment = gai_job_segment(job);
    (void)snprintf(text, size, "%s", at_once);
    if (job->refusal)
        (void)snprintf(text + length, size - length, "%s: %s", job->who,
                       cudaGetErrorString((cudaError_t)(int)job->refusal));
    else if (job->params.bytes > pool->device_bytes)
        (void)snprintf(text, size, "the device has %zu", pool->device_bytes);
    else if (gai_job_is_misaligned(job))
        (void)snprintf(text, size, "alignment %zu needs a segment of that size here, and the device has %zu",
                       job->params.alignment, pool->device_bytes);
    else if (gai_pool_is_still(pool))
        (void)snprintf(text, size, "no page can be mapped while on_map or on_unmap is running");
    else
        gai_pool_say_limit(pool, job->params.bytes + slack, text + length, size - length);
    length = strlen(text);
    if (segment <= gai_up(job->params.bytes, GAI_FIXED_SMALL) || gai_job_is_misaligned(job)) return;
    (void)snprintf(text + length, size - length, "; the request needs a segment of %zu", segment);
    length = strlen(text);
    if (slack) (void)snprintf(text + length, size - length, " with alignment %zu", job->params.alignment);
}

/* Returns the bytes that blocks with room would not have if they were allocated anew: they keep their memory when they
   shrink. In fixed segments the room itself is memory, so that a new block has as much. [lock] */
static size_t gai_pool_shrunk(const galloc_pool *pool)
{
    const gai_segment *segment;
    const gai_block *block;
    size_t bytes = 0;
    for (segment = pool->segments; segment; segment = segment->next) {
        if (segment->fixed) continue;
        for (block = segment->first; block; block = block->next) {
            size_t needed = gai_up((size_t)gai_counted(&block->requested), pool->granularity);
            if (block->kind == GAI_USED && block->room && block->bytes > needed) bytes += block->bytes - needed;
        }
    }
    return bytes;
}

/* Fills in the counts of the pool. They satisfy the equations above galloc_report, since `busy` is what remains of the
   cached bytes. [lock] */
static void gai_report_pool(galloc_report *report, gai_job *job)
{
    galloc_pool *pool = job->pool;
    galloc_stats stats;
    gai_survey survey;
    gai_pool_lock_caches(pool);
    gai_stats_locked(pool, &stats);
    gai_stats_derive(pool, &stats);
    survey.pool = pool;
    survey.stream = job->params.stream;
    survey.report = report;
    survey.movable = 0;
    gai_survey_all(&survey, pool);
    report->usable += pool->kept;
    /* Only the driver knows the pieces of what it keeps; none is as large as what it has just refused. */
    report->largest_usable = gai_max(report->largest_usable, gai_min(pool->kept, job->params.bytes - GAI_UNIT));
    gai_pool_unlock_caches(pool);
    gai_report_streams(report, pool);
    report->live = stats.live.current;
    report->rounding = stats.allocated.current - stats.live.current;
    if (report->rounding >= pool->granularity) report->shrunk = gai_pool_shrunk(pool);
    report->held = stats.reserved.current;
    report->cached = stats.reserved.current - stats.allocated.current;
    report->quarantined = stats.quarantined;
    report->busy = report->cached - report->usable - report->stranded - report->graph_bytes - report->quarantined;
    report->usable_in_pages = report->usable - survey.movable;
    report->fragmentation = stats.external_fragmentation;
    report->limit = gai_pool_capacity(pool);
    report->room = gai_pool_headroom(pool);
    report->largest_possible = survey.movable;
}

/* Fills in what the device has and the largest request that could succeed. The query is legal during a capture. Values
   that the driver does not report stay 0. In the pool's context. */
static void gai_report_device(galloc_report *report, const galloc_pool *pool)
{
    size_t more = report->room;
    report->device_total = pool->device_bytes;
    report->device_known = !gai_cu.MemGetInfo(&report->device_free, &report->device_total);
    if (!report->device_known) report->device_free = 0;
    if (report->device_known) more = gai_min(more, report->device_free);
    more = gai_down(more, pool->granularity);
    if (gai_pool_has_torch_segments(pool) && more < GAI_FIXED_OWN) more = gai_min(more, GAI_MIB); /* a small segment */
    report->largest_possible += more;
    report->largest_possible = gai_max(report->largest_possible, report->largest_usable);
}

/* Fills the report of a failed job; keeps only its steps and rounds. In the pool's context. [paging] */
static void gai_report_fill(galloc_report *report, gai_job *job)
{
    galloc_pool *pool = job->pool;
    galloc_report blank;
    memset(&blank, 0, sizeof blank);
    memcpy(blank.steps, report->steps, sizeof blank.steps);
    blank.rounds = report->rounds;
    blank.steps_taken = report->steps_taken;
    *report = blank;
    report->pool = pool->handle;
    report->device = pool->config.device;
    gai_job_cause(job, report->cause, sizeof report->cause);
    report->asked = job->params.requested;
    report->rounded = job->grows ? gai_up(job->params.bytes, pool->granularity) : job->params.bytes;
    report->stream_id = job->params.stream ? job->params.stream->stream_id : 0;
    report->captured = gai_job_is_captured(job);
    report->grows = job->grows != NULL;
    report->room_is_memory = job->params.room_is_memory;
    report->rejected = job->rejected;
    report->backend = pool->config.backend;
    report->like = pool->config.like;
    report->expandable_segments = pool->config.expandable_segments;
    report->reuse = pool->config.reuse;
    report->wait_limit_ms = pool->config.wait_limit_ms;
    gai_lock_on(&pool->lock);
    gai_report_pool(report, job);
    gai_lock_off(&pool->lock);
    gai_report_device(report, pool);
}

/* Adds the memory of the other pools of the device. [no lock] */
static void gai_report_add_pools(galloc_report *report)
{
    galloc_pool *pool;
    size_t known;
    report->other_pools = report->others_held = report->others_cached = 0;
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool; pool = pool->next) {
        galloc_stats now;
        if (pool->handle == report->pool || pool->config.device != report->device) continue;
        gai_lock_on(&pool->lock);
        gai_stats_now(pool, &now);
        gai_lock_off(&pool->lock);
        report->other_pools++;
        report->others_held += now.reserved.current;
        report->others_cached += now.cached.current;
    }
    gai_lock_off(&gai_locks.global);
    known = report->held + report->others_held + report->device_free;
    if (report->device_known) report->outside = report->device_total - gai_min(report->device_total, known);
}

static void gai_job_say_no_memory(gai_job *job, const galloc_report *report)
{
    char room[64] = "", graphs[48] = "", stranded[64] = "";
    if (report->room_is_memory)
        (void)snprintf(room, sizeof room, ", with its room %zu bytes of memory,", report->rounded);
    if (report->graph_bytes) (void)snprintf(graphs, sizeof graphs, ", graphs own %zu", report->graph_bytes);
    if (report->stranded)
        (void)snprintf(stranded, sizeof stranded, ", %zu wait for other streams", report->stranded);
    job->error = gai_fail(cudaErrorMemoryAllocation,
                          "out of memory: asked for %zu %sbytes%s on device %d; live %zu, held %zu%s%s; %s",
                          report->asked, job->grows ? "more " : "", room, report->device, report->live, report->held,
                          graphs, stranded, report->cause);
}

/* ---- the end of a call, and the steps ---- */

/* Streams that the program destroys without galloc_stream_retire leave their stream states behind. Above this number,
   one wait for the device completes them all, and the stream states without blocks are removed. The next wait comes
   after GAI_STREAMS_KEPT new ones. */
#define GAI_STREAMS_MANY 1024

/* [lock] */
static int gai_pool_has_abandoned(const galloc_pool *pool)
{
    return pool->stream_count > GAI_STREAMS_MANY && pool->streams_made - pool->streams_waited > GAI_STREAMS_KEPT;
}

/* Removes stream states that are not needed any more, leaves the pool's context and releases `paging`. `may_wait`: this
   call may wait for the device. */
static void gai_pool_leave(galloc_pool *pool, gai_scope *scope, int may_wait)
{
    int many;
    gai_lock_on(&pool->lock);
    many = may_wait && gai_pool_has_abandoned(pool);
    if (many) pool->streams_waited = pool->streams_made;
    gai_lock_off(&pool->lock);
    if (many) (void)gai_pool_wait(pool);
    gai_pool_sweep_streams(pool);
    gai_scope_leave(scope);
    gai_lock_off(&pool->paging);
}

/* Counts a block as allocated and then publishes `lent`, after which the program can free it. [lock] */
static void gai_block_count(galloc_pool *pool, gai_block *block, int hit)
{
    pool->stats.blocks.current++;
    pool->stats.blocks.total++;
    gai_stat_used(pool, block->bytes, (size_t)block->requested);
    pool->stats.mallocs++;
    pool->stats.hits += (uint64_t)hit;
    gai_block_let_go(block);
}

/* The same for a block that the short path of a miss has found. */
static GAI_INLINE void gai_block_count_near(galloc_pool *pool, gai_block *block)
{
    gai_history_block(pool, GAI_ALLOCATED, block, 0);
    gai_block_count(pool, block, 1);
}

static void gai_job_count(gai_job *job)
{
    if (!job->got || job->params.just_ready || job->grows) return;
    gai_history_block(job->pool, GAI_ALLOCATED, job->got, gai_thread.stack);
    if (job->pool->trace) gai_trace_got(job->pool, job->got, &job->params, job->waited);
    gai_block_count(job->pool, job->got, !job->grown);
    if (job->pool->variant.count) job->pool->variant.count(job->pool, GAI_COUNT_USED, job->got);
}

/* A block that grows takes the steps of galloc's own ladder in any case. */
static const gai_ladder_step *gai_job_ladder(const gai_job *job)
{
    const gai_ladder_step *ladder = job->pool->variant.ladder;
    return ladder && !job->grows ? ladder : gai_ladder;
}

/* Takes the steps of the ladder until the job is done, and records what each step gained. */
static void gai_job_take_steps(gai_job *job, galloc_report *report)
{
    const galloc_pool *pool = job->pool;
    size_t usable = 0, held = 0;
    int i, hopeless = gai_job_is_hopeless(job);
    report->steps_taken = !hopeless;
    job->rejected = hopeless || pool->config.throw_on_cudamalloc_oom;
    if (hopeless) return;
    (void)gai_job_gained(job, &usable, &held);
    for (i = 0; i < GALLOC_REPORT_STEPS; i++) {
        const gai_ladder_step *step = &gai_job_ladder(job)[i];
        if (!step->take) return;
        job->left_out = job->rejected && !step->at_once ? "throw_on_cudamalloc_oom is on" : NULL;
        if (!job->left_out && step->take(job)) return;
        report->steps[i].left_out = job->left_out;
        report->steps[i].gained += gai_job_gained(job, &usable, &held);
    }
}

/* ==== JOB ========================================================================================================= */
/* >>job */

/* The slow path of one request: the ladder, the callbacks on_oom and on_reject, and the report. A job takes `paging`
   while it climbs the ladder, and calls the program with no lock held. May call all sections before it. */

/* Climbs the ladder once. Threads that miss at the same time serialize on `paging`, and each searches again first.
   After on_oom the stream cache is flushed once more, to find blocks that the callback freed; the stream of this call
   is alive, which confirms them. */
static void gai_job_climb(gai_job *job, galloc_report *report)
{
    galloc_pool *pool = job->pool;
    gai_scope scope;
    job->refusal = CUDA_SUCCESS;
    job->error = gai_pool_enter(pool, &scope);
    if (job->error) return;
    if (report->rounds && job->params.stream) {
        gai_lock_on(&pool->lock);
        (void)gai_stream_flush(pool, job->params.stream, 1);
        gai_lock_off(&pool->lock);
    }
    if (!gai_job_search(job, GAI_REACH_OWN) && !gai_job_move_own(job)) {
        gai_job_take_steps(job, report);
        if (!gai_job_is_done(job)) gai_report_fill(report, job);
    }
    gai_lock_on(&pool->lock);
    gai_job_count(job);
    gai_stat_cached(pool);
    if (pool->variant.tune)
        pool->variant.tune(pool, job->got ? job->params.requested : 0, job->refusal == CUDA_ERROR_OUT_OF_MEMORY);
    gai_lock_off(&pool->lock);
    gai_pool_leave(pool, &scope, gai_job_can_wait_for_devices(job));
}

/* Forgets abandoned streams although the request was served from free memory: a pool that never grows has no other
   occasion. The request has succeeded whatever happens. [no lock] */
static void gai_job_tidy(gai_job *job)
{
    gai_scope scope;
    if (!gai_job_can_wait_for_devices(job) || !gai_lock_try(&job->pool->paging)) return;
    if (!gai_pool_enter_locked(job->pool, &scope)) gai_pool_leave(job->pool, &scope, 1);
}

/* A call of on_oom or on_reject, on the stack of its thread. The pool lists them for gai_pool_await_asked. */
struct gai_asking {
    gai_asking *next;
    uint64_t settings; /* of the pool when the call began: the number of its functions */
    galloc_callbacks call;
    gai_callback_frame saved;
};

/* Copies the functions to call, and lists the call. [no lock] */
static void gai_asking_begin(galloc_pool *pool, gai_asking *asking)
{
    gai_lock_on(&pool->lock);
    asking->call = pool->callbacks;
    asking->settings = pool->settings;
    asking->next = pool->asking;
    pool->asking = asking;
    gai_lock_off(&pool->lock);
    gai_callback_begin(&gai_thread.in_shortage, &asking->saved);
}

static void gai_asking_end(galloc_pool *pool, const gai_asking *asking)
{
    gai_asking **at;
    gai_callback_end(&gai_thread.in_shortage, &asking->saved);
    gai_lock_on(&pool->lock);
    for (at = &pool->asking; *at != asking;) at = &(*at)->next;
    *at = asking->next;
    gai_lock_off(&pool->lock);
}

/* After a failed ladder: calls on_oom. Returns 1 if the ladder is to be climbed again. [no lock] */
static int gai_job_asks(gai_job *job, galloc_report *report)
{
    gai_asking asking;
    int again;
    gai_report_add_pools(report);
    if (job->rejected || gai_thread.in_shortage || gai_thread.in_mapping) return 0;
    if (report->rounds >= job->pool->config.max_retries) return 0;
    gai_asking_begin(job->pool, &asking);
    again = asking.call.on_oom && asking.call.on_oom(report, asking.call.user);
    gai_asking_end(job->pool, &asking);
    report->rounds += (unsigned)again;
    return again;
}

/* Ends a job that has no memory: calls on_reject and stores the report. */
static void gai_job_refuse(gai_job *job, const galloc_report *report)
{
    gai_asking asking;
    if (job->rejected && !gai_thread.in_shortage) {
        gai_asking_begin(job->pool, &asking);
        if (asking.call.on_reject) asking.call.on_reject(report, asking.call.user);
        gai_asking_end(job->pool, &asking);
    }
    gai_pool_count(job->pool, GAI_COUNT_NO_MEMORY);
    gai_history_shortage(job->pool, report);
    if (job->pool->trace) gai_trace_row(job->pool, "allocate failure", 0, report->asked, report->stream_id, "");
    gai_thread.report = *report;
    job->reported = 1;
    gai_thread.ran_out = !job->rejected;
    gai_job_say_no_memory(job, report);
}

/* After a failed ladder: ends a growth that lacks no memory, but a wait that no step was allowed. [no lock] */
static int gai_job_is_kept_waiting(gai_job *job)
{
    gai_growth_range range;
    if (!job->grows || gai_job_obstacle_behind(job, &range) != GAI_OBSTACLE_MARKED || range.foreign) return 0;
    job->error = gai_fail(cudaErrorNotSupported, "the block at %p cannot grow on this stream yet: work of another "
                          "stream may still use its bytes, and no wait for that is allowed", job->grows);
    return 1;
}

/* Climbs the ladder again as long as the quarantine or on_oom gives reason to. [no lock] */
static void gai_job_run(gai_job *job)
{
    galloc_report report;
    int i;
    memset(report.steps, 0, sizeof report.steps);
    for (i = 0; i < GALLOC_REPORT_STEPS; i++) report.steps[i].name = gai_job_ladder(job)[i].name;
    report.rounds = 0;
    do gai_job_climb(job, &report);
    while (!gai_job_is_done(job) && !gai_job_is_kept_waiting(job) &&
           (gai_pool_free_kept(job->pool) || gai_job_asks(job, &report)));
    if (!gai_job_is_done(job)) gai_job_refuse(job, &report);
}

/* ==== ALLOC ======================================================================================================= */
/* >>alloc */

/* Allocation: checks and rounds a request, and serves it from cached blocks or by a job. The short path
   (gai_pool_take_near) takes the pool's lock once and skips the job. May call all sections before it. */

/* After a sticky error the pool refuses allocations until the context has been replaced. */
static cudaError_t gai_pool_refuses(galloc_pool *pool)
{
    unsigned long long known;
    uint64_t broken;
    gai_lock_on(&pool->lock);
    broken = pool->broken;
    known = pool->context_id;
    gai_lock_off(&pool->lock);
    if (!broken || gai_context_health(pool->context, known) == GAI_DEAD) return cudaSuccess;
    return gai_fail((cudaError_t)(int)broken, "the pool of device %d refuses requests after: %s", pool->config.device,
                    cudaGetErrorString((cudaError_t)(int)broken));
}

/* Validates a request and fills the alloc parameters with rounded sizes. */
static cudaError_t gai_params_of(const galloc_pool *pool, const galloc_request *request, gai_params *params)
{
    size_t alignment = request->alignment ? request->alignment : GAI_UNIT;
    size_t room = request->max_bytes ? gai_max(request->max_bytes, request->bytes) : 0;
    size_t unit = room && !pool->variant.one_each ? pool->granularity : GAI_UNIT;
    memset(params, 0, sizeof *params);
    if (!gai_is_power_of_two(alignment) || alignment > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_fail(cudaErrorInvalidValue, "alignment %zu: must be a power of two, at most 2^55",
                        request->alignment);
    if (request->lifetime != GALLOC_LIFETIME_ANY && request->lifetime != GALLOC_LIFETIME_LONG)
        return gai_fail(cudaErrorInvalidValue, "lifetime %d: must be one of GALLOC_LIFETIME_...", request->lifetime);
    if (!gai_round(request->bytes, unit, &params->bytes) || !gai_round(room, unit, &params->room) ||
        params->bytes > ((size_t)1 << (GAI_ADDRESS_BITS - 2)) || params->room > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_fail(cudaErrorMemoryAllocation, "out of memory: %zu bytes exceed the address space",
                        gai_max(request->bytes, room));
    if (!room) params->bytes = gai_rounded(pool, request->bytes);
    if (room && !pool->config.expandable_segments) {
        params->room_is_memory = params->room > (pool->variant.one_each ? request->bytes : params->bytes);
        params->bytes = params->room;
        params->room = 0;
    }
    params->alignment = gai_max(alignment, unit);
    params->requested = request->bytes;
    params->tag = request->tag;
    params->growable = room != 0 || pool->variant.one_each; /* the block keeps the size requested from the driver */
    params->lasting = request->lifetime == GALLOC_LIFETIME_LONG;
    params->far = params->lasting && !pool->variant.low;
    params->slot = pool->divisions && !room && !params->far && params->alignment <= GAI_UNIT &&
                   params->bytes <= GAI_SLOT_MOST;
    return cudaSuccess;
}

/* A stream of another context survives a reset of the pool's context, so its calls must check whether the pool's
   cudaMalloc segments still exist. [lock], released meanwhile. */
static cudaError_t gai_pool_look_for_reset(galloc_pool *pool)
{
    cudaError_t error = cudaSuccess;
    CUcontext context = pool->context;
    unsigned long long id = pool->context_id;
    gai_lock_off(&pool->lock);
    if (gai_context_health(context, id) != GAI_ALIVE) {
        gai_lock_on(&pool->paging);
        error = gai_pool_check_context(pool);
        gai_lock_off(&pool->paging);
    }
    gai_lock_on(&pool->lock);
    return error;
}

/* Serves the request from cached blocks, or else by the ladder. */
static cudaError_t gai_job_do(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int crowded;
    gai_lock_on(&pool->lock);
    job->params.stream = gai_stream_hold(pool, &job->site);
    if (!job->params.stream) {
        gai_lock_off(&pool->lock);
        return gai_stream_refused(&job->site);
    }
    if (pool->lost_on_reset && !job->site.own_context) job->error = gai_pool_look_for_reset(pool);
    if (!job->error) gai_job_search_locked(job, GAI_REACH_OWN);
    if (!job->error) gai_job_count(job);
    crowded = gai_job_is_done(job) && gai_pool_has_abandoned(pool);
    if (!gai_job_is_done(job)) {
        gai_lock_off(&pool->lock);
        gai_job_run(job);
        gai_lock_on(&pool->lock);
    }
    if (job->got && job->params.growable) gai_block_ask_rest(pool, job->got, job->params.stream);
    gai_stream_release(pool, job->params.stream, &job->site);
    if (job->got) gai_block_note_latest(pool, job->got, job->params.stream);
    gai_lock_off(&pool->lock);
    if (crowded) gai_job_tidy(job);
    return job->got ? cudaSuccess : job->error;
}

/* rejected: the request was refused at once. */
static void gai_pool_count_failure(galloc_pool *pool, int rejected)
{
    gai_lock_on(&pool->lock);
    pool->stats.failures++;
    pool->stats.rejections += (uint64_t)rejected;
    gai_lock_off(&pool->lock);
}

/* Waits for what debug has queued on a stream. While a blocking stream is captured, nothing may be asked of the legacy
   stream. [no lock] */
static CUresult gai_settle_wait(galloc_pool *pool, const gai_site *site)
{
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, site->context); /* other threads may capture */
    if (result) return result;
    if (site->capture_forbids) {
        gai_lock_on(&pool->paging);
        result = gai_device_wait(pool);
        gai_lock_off(&pool->paging);
    } else {
        result = GAI_CALL(pool, stream_synchronize, StreamSynchronize, (site->handle));
    }
    gai_scope_leave(&scope);
    return result;
}

/* After an allocation or a growth. A captured stream is not waited for. [no lock] */
static void gai_stream_settle(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    CUresult result;
    uint64_t queued;
    gai_lock_on(&pool->lock);
    queued = stream->life == site->life && gai_stream_is_unsettled(stream) ? stream->debug_queued : 0;
    gai_lock_off(&pool->lock);
    if (!queued || site->capture || !site->own_context ||
        gai_context_health(pool->context, pool->context_id) != GAI_ALIVE) return;
    result = gai_settle_wait(pool, site);
    if (result) gai_pool_note(pool, result);
    gai_lock_on(&pool->lock);
    if (!result && stream->life == site->life) stream->debug_settled = gai_max(stream->debug_settled, queued);
    pool->special &= ~(uint64_t)GAI_ROUTE_SETTLE;
    for (stream = pool->streams; stream; stream = stream->next)
        if (gai_stream_is_unsettled(stream)) pool->special |= GAI_ROUTE_SETTLE;
    gai_lock_off(&pool->lock);
}

/* The full call of an allocation. On success *site contains the stream state, for a thread cache entry. */
static cudaError_t gai_pool_alloc(galloc_pool *pool, void **ptr, const galloc_request *request, gai_site *site)
{
    gai_job job;
    galloc_request guarded;
    int watched = pool->config.debug && gai_pool_samples(pool, request);
    cudaError_t error = cudaSuccess;
    memset((char *)&job + offsetof(gai_job, got), 0, sizeof job - offsetof(gai_job, got));
    job.pool = pool;
    job.site = *site;
    gai_stack_note(pool);
    if (watched) guarded = gai_request_guarded(pool, request);
    if (gai_load(&pool->broken)) error = gai_pool_refuses(pool);
    if (!error) error = gai_params_of(pool, watched ? &guarded : request, &job.params);
    job.params.requested = request->bytes;
    if (!error) error = gai_job_do(&job);
    if (!error) GAI_TELL(pool, gai_block_tell(pool, job.got, job.site.capture != 0));
    if (!error && watched) gai_block_watch(pool, job.got, &job.site);
    if (!error && pool->config.debug) gai_stream_settle(pool, job.params.stream, &job.site);
    if (pool->config.debug) gai_guards_tend(pool);
    if (job.site.life != site->life) *site = job.site;
    if (!error) {
        *ptr = (void *)job.got->addr;
        return cudaSuccess;
    }
    gai_thread.has_report = job.reported;
    gai_pool_count_failure(pool, job.reported && job.rejected);
    return error;
}

/* Ends a call on the short path, which has held the lock throughout. The full gai_stream_release is needed only if the
   stream cache was flushed, other streams share the pool, or a mark was requested. */
static GAI_INLINE void gai_stream_release_near(galloc_pool *pool, gai_stream *stream, const gai_site *site, int changed)
{
    if (!changed && stream->cache.open == stream->life) return; /* a requested mark would have shut the cache */
    stream->busy++;
    gai_stream_release(pool, stream, site);
}

/* Does this plain request get the guard that may be due? [lock] */
static GAI_INLINE int gai_pool_watches_next(galloc_pool *pool, size_t bytes)
{
    return gai_pool_is_to_watch(pool) && gai_request_chosen(pool, bytes, 0);
}

/* A block for a request that was not served because the pool had to see whether a guard is due (GAI_DUE). It does not
   flush the cache, so that blocks have the places that they have without debug. NULL: the cache has no such block, or
   the full call is to set the guard. [no lock] */
GAI_APART
static gai_block *gai_cache_pop_seen(galloc_pool *pool, const gai_site *site, size_t bytes, uint32_t tag)
{
    gai_stream *stream = site->stream;
    gai_cache *cache = &stream->cache;
    gai_block *block = NULL;
    enum gai_outcome outcome;
    int apart = 0;
    gai_lock_on(&pool->lock);
    gai_latch_on(&cache->latch);
    if (cache->open == site->life && cache->mallocs >= cache->serves) {
        int watch;
        gai_cache_see(pool, cache);
        watch = gai_pool_watches_next(pool, bytes);
        apart = watch && gai_pool_checks_apart(pool);
        cache->serves = SIZE_MAX;
        if (watch == apart) block = gai_cache_pop(cache, gai_rounded(pool, bytes), bytes, tag, &outcome);
        if (block) gai_store_pointer(&block->lent, stream);
        if (block && apart) gai_pool_note_watch(pool);
        gai_cache_renew(pool, cache);
    }
    gai_latch_off(&cache->latch);
    gai_lock_off(&pool->lock);
    if (block && apart) gai_block_watch(pool, block, site);
    return block;
}

/* The short path for rounded sizes. [lock] */
GAI_APART
static gai_block *gai_pool_take_rounded(galloc_pool *pool, const gai_site *site, size_t bytes, uint32_t tag)
{
    gai_stream *stream = site->stream;
    size_t wanted = gai_rounded(pool, bytes);
    gai_block *block = NULL;
    int changed;
    if (pool->broken || pool->special & ~(uint64_t)(GAI_ROUTE_ROUNDED | GAI_ROUTE_SETTLE) ||
        gai_stream_is_unsettled(stream) || stream->life != site->life ||
        gai_pool_watches_next(pool, bytes))
        return NULL;
    if (pool->variant.take_near && wanted <= GAI_SLOT_MOST)
        return pool->variant.take_near(pool, site, wanted, bytes, tag);
    changed = gai_stream_see(pool, stream, site);
    block = gai_find_plain(pool, stream, wanted);
    if (block && pool->separate && gai_stream_leaves(pool, stream, block, block->addr, wanted)) block = NULL;
    if (block) block = gai_block_take_first(pool, block, wanted, stream, bytes, tag);
    if (block) gai_block_count_near(pool, block);
    gai_stream_release_near(pool, stream, site, changed);
    return block;
}

/* The short path of a plain request on a known stream state: one lock, no job. Returns NULL if the slow path is needed;
   at most the stream cache has been flushed then. `empty`: the caller found the stream cache empty. */
static GAI_INLINE gai_block *gai_pool_take_near(galloc_pool *pool, const gai_site *site, size_t bytes, uint32_t tag,
                                                int empty)
{
    gai_block *block = NULL;
    gai_stream *stream = site->stream;
    size_t wanted = gai_up(bytes, GAI_UNIT);
    uint64_t special;
    int apart = 0;
    gai_lock_on(&pool->lock);
    special = pool->special;
    if (special == GAI_ROUTE_SETTLE && !gai_stream_is_unsettled(stream)) special = 0;
    if (stream->life == site->life && !(pool->broken | special)) {
        int changed = (!empty || stream->retired) && gai_stream_see(pool, stream, site);
        int watch = gai_pool_watches_next(pool, bytes);
        apart = watch && gai_pool_checks_apart(pool);
        if (watch == apart) block = gai_find_plain(pool, stream, wanted);
        if (block && pool->separate && gai_stream_leaves(pool, stream, block, block->addr, wanted)) block = NULL;
        if (block) block = gai_block_take_first(pool, block, wanted, stream, bytes, tag);
        if (block) gai_block_count_near(pool, block);
        gai_stream_release_near(pool, stream, site, changed);
        if (block) gai_block_note_latest(pool, block, stream);
        if (block && apart) gai_pool_note_watch(pool);
    } else if (special & GAI_ROUTE_ROUNDED) {
        block = gai_pool_take_rounded(pool, site, bytes, tag);
    }
    gai_lock_off(&pool->lock);
    if (block && apart) gai_block_watch(pool, block, site);
    return block;
}

/* ==== FREE ======================================================================================================== */
/* >>free */

/* Free: from a claimed block and the marks of its users to a free block with stamped marks, for one stream or several;
   the calls on one stream; their error messages. Everything runs under the pool's lock unless a comment says otherwise;
   recording events for recorded uses takes `recording` first. May call alloc and all sections before it. */

/* Blocks of some variants are not in the page map, so an address inside one is looked up in all of their pools. */
static galloc_pool *gai_pool_of_given(const void *ptr)
{
    galloc_pool *pool;
    gai_block *block = gai_block_at((uintptr_t)ptr);
    int found = 0;
    if (!gai_load(&gai_process.given_pools)) return NULL;
    if (block) return (galloc_pool *)gai_load_pointer(&block->pool);
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool; pool = pool->next) {
        if (!pool->variant.around) continue;
        gai_lock_on(&pool->lock);
        found = pool->variant.around(pool, (uintptr_t)ptr) != NULL;
        gai_lock_off(&pool->lock);
        if (found) break;
    }
    gai_lock_off(&gai_locks.global);
    return pool;
}

/* Returns the pool that an address may belong to, or NULL. Needs no lock, so the pool may end meanwhile. */
static galloc_pool *gai_pool_of(const void *ptr)
{
    const gai_mapping *mapping = gai_page_at((uintptr_t)ptr);
    return mapping ? (galloc_pool *)gai_load_pointer(&mapping->pool) : gai_pool_of_given(ptr);
}

/* Returns the block that contains an address of a page: used, free or parked, or in transit, without pages. The page
   map is checked first, because the block found before a foreign address may belong to another pool, whose lock is not
   held. [lock] */
static gai_block *gai_block_around(const galloc_pool *pool, uintptr_t addr)
{
    const gai_mapping *mapping = gai_page_at(addr);
    if (pool->variant.around) return pool->variant.around(pool, addr);
    if (!mapping || gai_load_pointer(&mapping->pool) != pool) return NULL;
    return mapping->block ? mapping->block : gai_block_before(addr);
}

#if defined(GALLOC_STATIC)
#define GAI_OTHER_COPIES ", or another file's: with GALLOC_STATIC each file has a heap of its own"
#else
#define GAI_OTHER_COPIES ""
#endif

/* Returns the error for a pointer that is not the start of a used block. */
static cudaError_t gai_pointer_refused(galloc_pool *pool, const void *ptr)
{
    gai_block *block;
    uintptr_t base = 0;
    size_t bytes = 0;
    int used = 0;
    if (pool) {
        gai_lock_on(&pool->lock);
        block = gai_block_around(pool, (uintptr_t)ptr);
        used = block && gai_load_pointer(&block->lent);
        if (used) base = block->addr;
        if (used) bytes = (size_t)gai_counted(&block->requested);
        gai_lock_off(&pool->lock);
    }
    if (used)
        return gai_fail(cudaErrorInvalidDevicePointer, "%p lies inside the block of %zu bytes at %p: pass its start",
                        ptr, bytes, (void *)base);
    if (pool) return gai_fail(cudaErrorInvalidDevicePointer, "%p is free memory of galloc: freed already?", ptr);
    return gai_fail(cudaErrorInvalidDevicePointer, "%p is not memory of galloc: of another allocator, or already "
                    "returned to the device%s", ptr, GAI_OTHER_COPIES);
}

/* ---- marks and recorded uses ---- */

/* Requests an event on the stream of a recorded use. A pool with a single stream needs none. */
static void gai_use_is_due(galloc_pool *pool, gai_stream *stream)
{
    stream->due = !stream->retired && gai_stream_is_plain(stream) && !gai_pool_has_one_stream(pool);
    pool->due |= stream->due;
}

/* Counts a free on each stream of the marks; see busy_frees in the comment of gai_cache. */
static void gai_marks_count_free(const gai_mark *mark)
{
    for (; mark; mark = mark->next) gai_set_relaxed(&mark->stream->busy_frees, mark->stream->busy_frees + 1);
}

/* Stamps the recorded uses of a block that is freed, as if their streams had used it until now. Events become due on
   these streams, and are recorded when the lock is released. */
static void gai_block_free_uses(galloc_pool *pool, gai_block *block)
{
    gai_mark *use;
    gai_marks_count_free(block->recorded_uses);
    for (use = block->recorded_uses; use; use = use->next) {
        gai_use_is_due(pool, use->stream);
        use->stream->uses--; /* gai_mark_stamp increments it again */
    }
    gai_block_stamp(pool, block, block->recorded_uses);
    block->recorded_uses = NULL;
}

/* A graph's result may be freed on streams outside its capture. Their frees are not ordered with captured work, so all
   work captured up to now may use the block, not only the work captured before its allocation. [lock] */
GAI_APART
static void gai_block_stamp_result(gai_block *block, gai_stream *stream, const gai_mark *users)
{
    gai_mark *mark;
    for (; users; users = users->next)
        if (users->stream->capture_id == stream->capture_id) return;
    for (mark = block->marks; mark; mark = mark->next)
        if (mark->stream == stream) mark->epoch = stream->epoch;
    stream->unmarked += block->bytes;
}

/* Requests events on the streams of the marks of a block with room, because a room accepts only completed pages. [lock]
   */
static void gai_marks_ask(const galloc_pool *pool, const gai_mark *marks)
{
    for (; marks; marks = marks->next)
        if (marks->stream->handle != CU_STREAM_LEGACY || gai_pool_has_one_stream(pool)) gai_stream_ask(marks->stream);
}

/* Frees a used block. `marks` name the streams whose work submitted so far may still use it. [lock] */
static void gai_block_free(galloc_pool *pool, gai_block *block, gai_mark *marks)
{
    uintptr_t addr = block->addr;
    size_t bytes = block->bytes;
    int roomy = block->room && pool->config.expandable_segments;
    if (roomy) gai_marks_ask(pool, marks);
    if (block->stream->capture) gai_block_stamp_result(block, block->stream, marks);
    if (marks) block->stream_id = marks->stream->stream_id;
    if (pool->trace && !block->segment->traced) gai_trace_freed(pool, block, marks);
    gai_history_block(pool, GAI_FREED, block, gai_thread.stack);
    if (block->tag & GAI_CACHED && !(marks && marks->stream->life == block->life))
        gai_block_stamp_cache(pool, block);
    gai_marks_count_free(marks);
    if (pool->variant.freed) pool->variant.freed(pool, block, marks);
    gai_block_stamp(pool, block, marks);
    if (block->recorded_uses) gai_block_free_uses(pool, block);
    if (block->tag & GAI_TO_KEEP) {
        gai_block_keep(pool, block);
        return;
    }
    if (block->room) gai_block_give_room(pool, block);
    if (pool->variant.count) pool->variant.count(pool, GAI_COUNT_UNUSED, block);
    gai_block_put(pool, block);
    if (roomy) gai_pool_park_room(pool, addr, addr + bytes);
}

/* Records the events that are due on streams of recorded uses. A stream that cannot record one now does so in its next
   call. On return no other thread still records on these streams, so the program may destroy them. [lock], released
   meanwhile. */
static void gai_pool_record_due(galloc_pool *pool)
{
    gai_stream *stream;
    if (!pool->due) return;
    gai_lock_off(&pool->lock);
    gai_lock_on(&pool->recording);
    gai_lock_on(&pool->lock);
    while (pool->due) {
        gai_scope scope;
        int reachable = 0;
        for (stream = pool->streams; stream && !stream->due; stream = stream->next) continue;
        pool->due = stream != NULL;
        if (!stream) break;
        stream->due = 0;
        gai_stream_ask(stream);
        stream->busy++;
        gai_lock_off(&pool->lock);
        if (gai_stream_health(stream) == GAI_ALIVE && !gai_scope_enter(&scope, stream->context)) {
            reachable = gai_stream_is_reachable(stream);
            gai_scope_leave(&scope);
        }
        gai_lock_on(&pool->lock);
        if (reachable && stream->asked) (void)gai_stream_record(pool, stream, stream->handle, 0);
        stream->busy--;
    }
    gai_lock_off(&pool->recording);
}

/* When host memory for a new stream state is missing, waits for the stream instead: a free must not fail, and completed
   work needs no mark. */
static cudaError_t gai_free_after_waiting(galloc_pool *pool, void *ptr, gai_site *site)
{
    gai_scope scope;
    gai_block *block;
    CUresult result = site->capture_forbids ? CUDA_ERROR_OUT_OF_MEMORY : gai_site_context(site);
    if (site->capture) return gai_stream_refused(site); /* a captured stream cannot be waited for */
    if (!result) result = gai_scope_enter(&scope, site->context);
    if (!result) {
        result = gai_stream_finish(pool, site->handle);
        gai_scope_leave(&scope);
    }
    if (result) return gai_driver_failed(result, "no host memory for the state of a stream; the wait for it");
    gai_lock_on(&pool->lock);
    block = gai_block_claim(pool, ptr);
    if (block && block->tag & GAI_WATCHED_BLOCK) pool->stats.unchecked += gai_pool_guard(pool) != 0;
    if (block) GAI_TELL(pool, gai_block_untell(pool, block, NULL, NULL));
    if (block) gai_block_free(pool, block, NULL);
    if (block) gai_pool_record_due(pool);
    gai_lock_off(&pool->lock);
    return block ? cudaSuccess : gai_pointer_refused(pool, ptr);
}

/* Returns whether a free on a captured stream needs a mark of the unknown streams: streams that used the block before
   the capture may still do so when the graph is gone, and the driver does not identify a captured stream. A block
   allocated in the same capture has no earlier use. */
static int gai_stream_leaves_out(const gai_stream *stream, const gai_block *block)
{
    return stream->capture_id && !gai_stream_is_unknown(stream) && block->stream->capture_id != stream->capture_id;
}

/* Appends a mark of the unknown streams if a free on a captured stream needs one. Returns 0 if host memory is missing.
   [lock] */
static int gai_marks_name_unknown(galloc_pool *pool, const gai_block *block, gai_mark *marks)
{
    gai_mark *mark, *last = NULL;
    int outside = 0;
    for (mark = marks; mark; last = mark, mark = mark->next) outside |= gai_stream_leaves_out(mark->stream, block);
    if (!outside) return 1;
    if (!gai_slab_has(&pool->marks, 1)) return 0;
    last->next = gai_mark_of(pool, gai_pool_unknown_streams(pool));
    return 1;
}

/* The short path of a free, for a claimed block that was allocated on the stream that frees it and needs no other mark.
   Returns 0 if the slow path is needed. `empty`: the caller found the stream cache empty; the stream may have been
   retired since. */
static GAI_INLINE int gai_pool_free_near(galloc_pool *pool, gai_block *block, const gai_site *site, int empty)
{
    gai_stream *stream = site->stream;
    int own, changed, due;
    gai_lock_on(&pool->lock);
    own = stream->life == site->life && gai_block_suits(block, stream->life) && !block->marks;
    if (own) {
        changed = ((!empty || stream->retired) && gai_stream_see(pool, stream, site)) || !gai_pool_has_one_stream(pool);
        gai_block_stamp_own(pool, block, stream);
        gai_set_relaxed(&stream->busy_frees, stream->busy_frees + 1);
        gai_block_put(pool, block);
        gai_stream_release_near(pool, stream, site, changed);
    }
    due = pool->clock >= pool->collector.look;
    gai_lock_off(&pool->lock);
    if (own && due) gai_pool_tend(pool); /* last: a call from a callback may replace the entry */
    return own;
}

/* Before the short path of a free, in a call on the stream that the claimed block was given to: queues the check of its
   guard, and watches the block no more. Flushes no stream cache. [no lock] */
static void gai_pool_check_near(galloc_pool *pool, gai_block *block, const gai_site *site)
{
    gai_stream *stream = site->stream;
    gai_lock_on(&pool->lock);
    if (stream->life == site->life && block->life == site->life) {
        gai_stream_note(stream, site);
        stream->busy++;
        gai_block_check(pool, block, site, 1);
        gai_stream_release(pool, stream, site);
    }
    gai_lock_off(&pool->lock);
}

/* Frees a claimed block on a stream. Returns 0 if host memory is missing; nothing has changed then. [lock], released
   meanwhile if there is a tool. */
static int gai_block_free_on(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    gai_mark *mark;
    GAI_TELL(pool, gai_block_untell(pool, block, stream, NULL));
    mark = gai_mark_of(pool, stream);
    if (stream->capture_id && !gai_marks_name_unknown(pool, block, mark)) {
        gai_slab_give(&pool->marks, mark);
        gai_block_let_go(block);
        return 0;
    }
    gai_block_free(pool, block, mark);
    gai_pool_record_due(pool);
    return 1;
}

/* ---- the full call ---- */

static cudaError_t gai_free_unnoted(void)
{
    return gai_fail(cudaErrorMemoryAllocation, "no host memory to record a free on a captured stream");
}

/* The full call of a free on one stream. variant.free may have the driver free the block; else it is freed by marks.
   `taken`: the block, if the caller has already claimed it. [no lock] */
static cudaError_t gai_pool_free(galloc_pool *pool, void *ptr, gai_site *site, gai_block *taken)
{
    gai_block *block = taken;
    gai_stream *stream;
    int freed = 0, due, debug;
    gai_stack_note(pool);
    gai_lock_on(&pool->lock);
    debug = pool->config.debug;
    stream = gai_stream_hold(pool, site);
    if (stream && !block) block = gai_block_claim(pool, ptr);
    if (stream && block && block->tag & GAI_WATCHED_BLOCK) gai_block_check(pool, block, site, 1);
    if (stream && block && pool->variant.free) freed = pool->variant.free(pool, block, site, 1);
    if (!stream && block) gai_block_let_go(block);
    if (stream && block && !freed) freed = gai_block_free_on(pool, block, stream);
    if (stream && pool->guards.kept) gai_pool_limit_kept(pool, site);
    if (stream) gai_stream_release(pool, stream, site);
    due = pool->clock >= pool->collector.look;
    gai_lock_off(&pool->lock);
    if (due) gai_pool_tend(pool);
    if (debug) gai_guards_tend(pool);
    if (!stream) return gai_free_after_waiting(pool, ptr, site);
    if (block && !freed) return gai_free_unnoted();
    return block ? cudaSuccess : gai_pointer_refused(pool, ptr);
}

/* ==== SEVERAL STREAMS ============================================================================================= */
/* >>several */

/* Calls that name streams besides the one that a block was allocated on: galloc_free_after, galloc_record_stream and
   galloc_stream_retire. Marks are added under the pool's lock; retiring also takes `recording`, and the global lock to
   visit all pools. May call free and all sections before it. */

/* Adds marks of n streams to a list. Their stream states stay held until gai_stream_release. After an error the list
   contains the marks that were added before it. */
static cudaError_t gai_marks_name(galloc_pool *pool, gai_mark **list, gai_site *sites, const cudaStream_t *streams,
                                  int n, cudaStream_t zero)
{
    int i;
    for (i = 0; i < n; i++) {
        gai_stream *stream;
        gai_mark *mark = NULL;
        cudaError_t error = gai_site_of(streams[i] ? streams[i] : zero, &sites[i]);
        if (error) return error;
        gai_lock_on(&pool->lock);
        stream = gai_stream_hold(pool, &sites[i]);
        if (stream && gai_slab_need(&pool->marks, 1)) {
            mark = gai_mark_of(pool, stream);
            mark->next = *list;
            *list = mark;
        } else if (stream) {
            stream->busy--;
        }
        gai_lock_off(&pool->lock);
        if (mark) continue;
        if (sites[i].capture && sites[i].refused) return gai_stream_refused(&sites[i]);
        return gai_fail(cudaErrorMemoryAllocation, "no host memory to record %d streams", n);
    }
    return cudaSuccess;
}

/* The site on whose stream the block's guard is checked: that of the stream that the block was given to, if it is among
   them. A captured one comes first, since then no check is possible. */
static gai_site *gai_sites_first(gai_site *sites, size_t n, const gai_block *block)
{
    gai_site *best = sites;
    size_t i;
    for (i = 0; i < n; i++) {
        if (!gai_site_may_act(&sites[i])) return &sites[i];
        if (sites[i].life == block->life) best = &sites[i];
    }
    return best;
}

/* Frees the block; after an error only frees the marks. Then releases the stream states. The list is in reverse order
   of `sites`. */
static cudaError_t gai_pool_free_named(galloc_pool *pool, void *ptr, gai_mark *marks, gai_site *sites,
                                       cudaError_t error)
{
    gai_block *block = NULL;
    size_t named = gai_marks_count(marks);
    int due, gone, debug;
    gai_stack_note(pool);
    gai_lock_on(&pool->lock);
    debug = pool->config.debug;
    if (!error) block = gai_block_claim(pool, ptr);
    gone = block && pool->variant.free && pool->variant.free(pool, block, sites, named);
    if (gone) block = NULL;
    if (block && !gai_marks_name_unknown(pool, block, marks)) {
        error = gai_free_unnoted();
        gai_block_let_go(block);
        block = NULL;
    }
    if (block && block->tag & GAI_WATCHED_BLOCK)
        gai_block_check(pool, block, gai_sites_first(sites, named, block), named == 1);
    if (block) GAI_TELL(pool, gai_block_untell(pool, block, NULL, marks));
    if (block) gai_block_free(pool, block, marks);
    if (block) gai_pool_record_due(pool);
    if (block && pool->guards.kept) gai_pool_limit_kept(pool, &sites[0]);
    while (!block && marks) {
        gai_mark *mark = marks;
        marks = mark->next;
        gai_slab_give(&pool->marks, mark);
    }
    for (; named > 0; named--) gai_stream_release(pool, sites[named - 1].stream, &sites[named - 1]);
    due = pool->clock >= pool->collector.look;
    gai_lock_off(&pool->lock);
    if (due) gai_pool_tend(pool);
    if (debug) gai_guards_tend(pool);
    return error || block || gone ? error : gai_pointer_refused(pool, ptr);
}

#define GAI_SITES 16 /* streams that galloc_free_after handles without allocating host memory */

static cudaError_t gai_pool_free_after(galloc_pool *pool, void *ptr, const cudaStream_t *streams, int n,
                                       cudaStream_t zero)
{
    gai_site few[GAI_SITES], *sites = few;
    gai_mark *marks = NULL;
    cudaError_t error;
    if (n > GAI_SITES) sites = (gai_site *)GALLOC_MALLOC((size_t)n * sizeof *sites);
    if (!sites) return gai_fail(cudaErrorMemoryAllocation, "no host memory to record %d streams", n);
    error = gai_marks_name(pool, &marks, sites, streams, n, zero);
    error = gai_pool_free_named(pool, ptr, marks, sites, error);
    if (sites != few) GALLOC_FREE(sites);
    return error;
}

/* Adds a recorded use to a block, and removes recorded uses by captured streams whose graphs are gone. Those by retired
   streams stay: a retired stream may be passed to galloc again. Returns 0 if host memory is missing. [lock] */
static int gai_block_add_use(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    gai_mark *mark, **at = &block->recorded_uses;
    while (*at) {
        const gai_stream *use = (*at)->stream;
        if (use == stream) return 1;
        if (!gai_stream_is_plain(use) && !use->capture) gai_mark_drop(pool, at);
        else at = &(*at)->next;
    }
    if (!gai_slab_need(&pool->marks, 1)) return 0;
    mark = gai_mark_new(pool, stream, 0, 0, 0);
    mark->next = block->recorded_uses;
    block->recorded_uses = mark;
    return 1;
}

/* Adds a recorded use. The block then has GAI_SPECIAL, so that its free bypasses the stream cache. A program may do no
   more than this with the pool in each of many captures: then the call forgets the earlier ones. */
static cudaError_t gai_pool_record_stream(galloc_pool *pool, void *ptr, gai_site *site)
{
    gai_block *block = NULL;
    gai_stream *stream;
    int noted = 0, crowded;
    gai_lock_on(&pool->lock);
    stream = gai_stream_hold(pool, site);
    if (stream) {
        block = gai_block_claim(pool, ptr);
        noted = block && gai_block_add_use(pool, block, stream);
        if (noted) block->tag |= GAI_SPECIAL;
        if (block) gai_block_let_go(block);
        gai_stream_release(pool, stream, site);
    }
    crowded = gai_pool_is_crowded(pool);
    gai_lock_off(&pool->lock);
    if (noted && crowded) gai_pool_tend(pool);
    if (noted) return cudaSuccess;
    if (stream && !block) return gai_pointer_refused(pool, ptr);
    return gai_stream_refused(site);
}

/* Records the stream's last event in this pool. It also covers later frees of blocks with recorded uses by this stream,
   and with cudaMallocAsync of blocks that were allocated on it (gai_block_stamp_first). `recording` excludes a
   concurrent record on the stream. */
static cudaError_t gai_pool_retire(galloc_pool *pool, const gai_site *site)
{
    CUresult result = CUDA_SUCCESS;
    gai_stream *stream;
    gai_lock_on(&pool->recording);
    gai_lock_on(&pool->lock);
    stream = gai_stream_find(pool, site);
    pool->retires = stream && !stream->retired;
    if (stream) {
        int named;
        short before = stream->retired;
        gai_cache_shut(&stream->cache);
        (void)gai_stream_flush(pool, stream, 1);
        named = stream->uses || stream->busy || stream->handed > stream->done ||
                (pool->variant.freed && stream->blocks);
        stream->busy++;
        if (named && site->capture_forbids) result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        else if (named) result = gai_stream_record(pool, stream, site->handle, 1);
        else stream->retired = 1;
        stream->due = 0; /* last: a free may have set it while the lock was released */
        stream->busy--;
        if (result) stream->retired = before;
        gai_cache_set(pool, stream);
    }
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->recording);
    return result ? gai_driver_failed(result, "recording an event on the stream before it goes") : cudaSuccess;
}

/* Undoes gai_pool_retire after another pool has failed. The extra event is harmless: the program submits no work to a
   stream while it retires it, so the event also covers what was freed meanwhile. */
static void gai_pool_unretire(galloc_pool *pool, const gai_site *site)
{
    gai_stream *stream;
    gai_lock_on(&pool->lock);
    stream = pool->retires ? gai_stream_find(pool, site) : NULL; /* NULL also if the stream state was removed */
    if (stream) stream->retired = 0;
    if (stream) gai_cache_set(pool, stream);
    gai_lock_off(&pool->lock);
}

/* Retires the stream in all pools or in none. [global lock] */
static cudaError_t gai_retire(const gai_site *site)
{
    galloc_pool *pool, *done;
    cudaError_t error = cudaSuccess;
    for (pool = gai_process.pools; pool && !error; pool = error ? pool : pool->next) {
        pool->retires = 0;
        if (!gai_pool_come_in(pool, GAI_USER_OF_ALL)) continue; /* it is being destroyed, and has no blocks */
        error = gai_pool_retire(pool, site);
        gai_pool_go_out(pool, GAI_USER_OF_ALL);
    }
    for (done = error ? gai_process.pools : NULL; done != pool; done = done->next) gai_pool_unretire(done, site);
    return error;
}

/* ==== RESIZE ====================================================================================================== */
/* >>resize */

/* galloc_resize. Shrinking frees the end of a block, and growing extends the block into its room. What fits without a
   driver call is done under the pool's lock; the rest is a job (gai_job_run). May call job, free and all sections
   before them. */

/* Returns marks of the stream state and of the block's recorded uses. The caller has reserved the marks. [lock] */
static gai_mark *gai_block_users(galloc_pool *pool, const gai_block *block, gai_stream *stream)
{
    const gai_mark *use;
    gai_mark *users = gai_mark_of(pool, stream);
    for (use = block->recorded_uses; use; use = use->next) {
        gai_mark *user = gai_mark_of(pool, use->stream);
        user->next = users->next;
        users->next = user;
    }
    return users;
}

/* Adds marks for a range that stays part of a used block. */
static void gai_block_stamp_used(galloc_pool *pool, gai_block *block, gai_mark *users, uintptr_t begin, uintptr_t end)
{
    while (users) {
        gai_mark *user = users;
        users = user->next;
        gai_mark_stamp(user, begin, end);
        gai_marks_add(pool, &block->marks, user);
    }
    gai_marks_trim(pool, &block->marks);
}

/* Shrinks a block: frees its end on the stream, behind a guard of so many bytes. The part that remains in the block, up
   to the unit or the room, is marked as well, because the block may grow into it again on another stream. Returns 0 if
   host memory is missing; nothing has changed then. [lock] */
static int gai_block_shrink(galloc_pool *pool, gai_block *block, gai_stream *stream, size_t bytes, size_t guard)
{
    gai_mark *use;
    uintptr_t begin = block->addr + bytes, end = block->addr + block->requested, cut = block->addr + block->bytes;
    size_t marks = 2 * gai_marks_count(block->marks) + 2 * gai_marks_count(block->recorded_uses) + 4;
    if (begin == end) return 1;
    if (!block->room && !block->slot) cut = block->addr + gai_up(bytes + guard, GAI_UNIT);
    if (!gai_block_need(pool, block, cut, 0) || !gai_slab_need(&pool->marks, marks)) return 0;
    if (cut < block->addr + block->bytes) {
        gai_block *tail = gai_block_split(pool, block, cut, GAI_USED);
        tail->stream_id = stream->stream_id;
        if (block->stream->capture) gai_block_stamp_result(tail, block->stream, NULL);
        gai_block_stamp(pool, tail, gai_block_users(pool, block, stream));
        gai_stat_unused(pool, tail->bytes, 0);
        gai_block_give(pool, tail);
    }
    if (begin < gai_min(cut, end))
        gai_block_stamp_used(pool, block, gai_block_users(pool, block, stream), begin, gai_min(cut, end));
    gai_block_renew_captured(pool, block);
    for (use = block->recorded_uses; use; use = use->next) gai_use_is_due(pool, use->stream);
    return 1;
}

/* Prepares a claimed block for a resize on another stream than the one whose stream cache may hold it: no stream cache
   accepts it afterwards, and its list of marks covers all earlier uses. Returns 0, with nothing changed, if host memory
   is missing. [lock] */
static int gai_block_leave_cache(galloc_pool *pool, gai_block *block, const gai_stream *stream)
{
    if (block->life == stream->life) return 1;
    if (block->tag & GAI_CACHED) {
        if (!gai_slab_need(&pool->marks, 1)) return 0;
        gai_block_stamp_cache(pool, block);
    }
    gai_set_relaxed(&block->tag, (block->tag & ~(GAI_CACHED | GAI_DROPPED)) | GAI_SPECIAL);
    return 1;
}

/* Returns how many bytes of the block the program may use: with another backend, no more than was requested from the
   driver. */
static size_t gai_block_usable(const gai_block *block)
{
    const gai_segment *segment = block->segment;
    return segment->given ? gai_min(block->bytes, segment->addr + segment->given - block->addr) : block->bytes;
}

/* Resizes a claimed block as far as no driver call is needed, and publishes `lent` again. [lock] */
static void gai_job_resize(gai_job *job, gai_block *block)
{
    galloc_pool *pool = job->pool;
    gai_stream *stream = job->params.stream;
    int grows = job->grow_to > block->requested;
    size_t before = block->bytes, requested = (size_t)block->requested;
    if (block->segment->given && job->grow_to > gai_block_usable(block)) {
        job->error = gai_job_say_not_there(job, block);
    } else if (!gai_block_leave_cache(pool, block, stream) ||
               (!grows && !gai_block_shrink(pool, block, stream, job->grow_to, job->guard))) {
        job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for the rest of a block that shrinks");
    } else if (!grows) {
        gai_block_set_requested(pool, block, job->grow_to, job->params.stream);
        if (pool->variant.resized) pool->variant.resized(pool, block, before, requested);
        gai_block_ask_rest(pool, block, stream);
        job->got = block;
    }
    gai_block_let_go(block);
    if (job->got) gai_pool_record_due(pool);
    if (grows && !job->error && !gai_load(&pool->broken)) gai_job_search_locked(job, GAI_REACH_OWN);
}

/* Resizes a block under the lock if possible. Otherwise a job on the ladder brings pages into the room. *reported
   becomes 1 if memory ran out. */
GAI_APART
static cudaError_t gai_pool_resize(galloc_pool *pool, void *ptr, size_t bytes, gai_site *site, int *reported)
{
    gai_job job;
    gai_block *block;
    int watched, recorded;
    gai_thread.caller = GAI_RETURN_ADDRESS();
    gai_stack_note(pool);
    memset(&job, 0, sizeof job);
    job.pool = pool;
    job.site = *site;
    job.grows = ptr;
    job.grow_to = bytes;
    job.params.alignment = GAI_UNIT;
    gai_lock_on(&pool->lock);
    job.params.stream = gai_stream_hold(pool, &job.site);
    block = job.params.stream ? gai_block_claim(pool, ptr) : NULL;
    watched = block && block->tag & GAI_WATCHED_BLOCK;
    if (watched) job.guard = gai_block_check_end(pool, block, &job.site);
    if (block && bytes < block->requested)
        GAI_TELL(pool, gai_block_tell_less(pool, block, bytes, job.params.stream));
    if (block) gai_job_resize(&job, block);
    gai_lock_off(&pool->lock);
    if (!job.params.stream) return gai_stream_refused(&job.site);
    if (block && !gai_job_is_done(&job)) {
        job.error = gai_pool_refuses(pool);
        if (!job.error) gai_job_run(&job);
    }
    *reported = job.reported;
    if (watched) gai_block_watch_again(pool, ptr, &job.site, job.guard, job.error != cudaSuccess);
    if (pool->config.debug && !job.error) gai_stream_settle(pool, job.params.stream, &job.site);
    gai_lock_on(&pool->lock);
    if (block) GAI_TELL(pool, gai_block_tell_size(pool, ptr));
    recorded = job.params.stream->asked;
    gai_stream_release(pool, job.params.stream, &job.site);
    /* A block that shrinks and grows again and again has an event recorded each time, and no call that polls. */
    recorded = recorded && job.params.stream->events && job.params.stream->events % GAI_EVENTS == 0;
    gai_lock_off(&pool->lock);
    if (recorded) gai_pool_try_poll(pool);
    if (pool->config.debug) gai_guards_tend(pool);
    return block ? job.error : gai_pointer_refused(pool, ptr);
}

/* ==== GRAPHS ====================================================================================================== */
/* >>graphs */

/* galloc_graph_begin, _end and _release: groups, which are captures that share memory. `recording` guards the beginning
   and the end of a group, and the pool's lock guards its list. A handle is a number that is never reused, and is not a
   pointer. May call capture, free and all sections before them. */

/* Returns the group with a handle, or NULL. [lock] */
static galloc_graph *gai_graph_at(const galloc_pool *pool, const galloc_graph *handle)
{
    galloc_graph *graph = pool->graphs;
    while (graph && graph->handle != handle) graph = graph->next;
    return graph;
}

static cudaError_t gai_graph_is_gone(const galloc_graph *handle)
{
    return gai_fail(cudaErrorInvalidResourceHandle, "%p is no galloc_graph: it has been released, its pool has been "
                    "destroyed, or it never was one", (const void *)handle);
}

/* Finds the pool of a group and pins it. */
static cudaError_t gai_graph_find(const galloc_graph *handle, galloc_pool **out)
{
    galloc_pool *pool;
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool; pool = pool->next) {
        int found;
        gai_lock_on(&pool->lock);
        found = gai_graph_at(pool, handle) != NULL;
        gai_lock_off(&pool->lock);
        if (found) break;
    }
    if (pool && !gai_pool_pin(pool)) pool = NULL;
    gai_lock_off(&gai_locks.global);
    *out = pool;
    return pool ? cudaSuccess : gai_graph_is_gone(handle);
}

/* Adds a capture that is under way to a group. What it has freed may merge with memory of the group from now on.
   [lock] */
static void gai_capture_join(galloc_pool *pool, gai_capture *capture, galloc_graph *graph)
{
    const gai_segment *segment;
    gai_block *block;
    if (capture->graph) capture->graph->captures--;
    capture->graph = graph;
    graph->captures++;
    for (segment = pool->segments; segment; segment = segment->next) {
        for (block = segment->first; block; block = block->next) {
            if (block->set != &pool->mixed || !gai_block_capture(block)) continue;
            gai_set_remove(block);
            block = gai_block_file(pool, block, 0);
        }
    }
}

/* Adds the later captures of the site's stream to the group, and also the capture that is in progress. Fails if the
   group has begun already, or if the stream or its capture belongs to another group of the pool. `made`: a new group to
   be linked. */
static cudaError_t gai_graph_begin(galloc_pool *pool, const galloc_graph *handle, galloc_graph *made,
                                   gai_site *site)
{
    galloc_graph *graph = made;
    const galloc_graph *other;
    gai_capture *capture;
    unsigned long long key = gai_stream_key(site->handle);
    int taken, per_thread = site->handle == CU_STREAM_PER_THREAD;
    CUresult result = per_thread ? gai_site_context(site) : CUDA_SUCCESS;
    if (result) return gai_driver_failed(result, "cuCtxGetId");
    gai_lock_on(&pool->recording);
    gai_lock_on(&pool->lock);
    if (!made) graph = gai_graph_at(pool, handle);
    taken = !graph || graph->captured;
    for (other = pool->graphs; other; other = other->next) taken |= other->captured && other->key == key;
    for (capture = site->capture ? pool->captures : NULL; capture; capture = capture->next)
        taken |= capture->id == site->capture && capture->graph && capture->graph != graph;
    if (!taken) {
        graph->captured = site->handle;
        graph->key = key;
        graph->context = per_thread ? site->context : NULL;
        graph->context_id = per_thread ? site->context_id : 0;
        for (capture = site->capture ? pool->captures : NULL; capture; capture = capture->next)
            if (capture->id == site->capture) gai_capture_join(pool, capture, graph);
        if (made) made->next = pool->graphs;
        if (made) pool->graphs = made;
    }
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->recording);
    if (!taken) return cudaSuccess;
    if (!graph) return gai_graph_is_gone(handle);
    return gai_fail(cudaErrorNotPermitted, "the group has begun already, or the stream with another group");
}

/* Creates a group and begins it. */
static cudaError_t gai_graph_begin_new(galloc_graph **out, galloc_pool *pool, gai_site *site)
{
    cudaError_t error;
    galloc_graph *graph, *handle;
    graph = (galloc_graph *)GALLOC_MALLOC(sizeof *graph);
    if (!graph) return gai_fail(cudaErrorMemoryAllocation, "no host memory for a galloc_graph");
    memset(graph, 0, sizeof *graph);
    graph->handle = handle = (galloc_graph *)(uintptr_t)(gai_next(&gai_process.groups) * sizeof *graph);
    error = gai_graph_begin(pool, handle, graph, site);
    if (error) GALLOC_FREE(graph);
    else *out = handle;
    return error;
}

static cudaError_t gai_graph_end(galloc_pool *pool, const galloc_graph *handle)
{
    galloc_graph *graph;
    int begun;
    gai_lock_on(&pool->recording);
    gai_lock_on(&pool->lock);
    graph = gai_graph_at(pool, handle);
    begun = graph && graph->captured;
    if (graph) graph->captured = NULL;
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->recording);
    if (!graph) return gai_graph_is_gone(handle);
    if (!begun) return gai_fail(cudaErrorNotPermitted, "the group has not begun: call galloc_graph_begin first");
    return cudaSuccess;
}

static int gai_stream_is_graphs(const gai_stream *stream, const galloc_graph *graph)
{
    return stream->capture && stream->capture->graph == graph;
}

/* Does a mark name a stream state of the group? */
static int gai_marks_have(const gai_mark *mark, const galloc_graph *graph)
{
    while (mark && !gai_stream_is_graphs(mark->stream, graph)) mark = mark->next;
    return mark != NULL;
}

/* Moves a list of marks to `out`. Marks of the group's stream states become marks of `to` with its current epoch. */
static void gai_marks_hand_over(galloc_pool *pool, gai_mark *list, const galloc_graph *graph, gai_stream *to,
                                gai_mark **out)
{
    while (list) {
        gai_mark *mark = list;
        list = mark->next;
        mark->next = NULL;
        if (gai_stream_is_graphs(mark->stream, graph)) {
            mark->stream->uses--;
            mark->stream = to;
            gai_mark_stamp(mark, mark->begin, mark->end);
        }
        gai_marks_add(pool, out, mark);
    }
}

/* Turns the marks and recorded uses of the group's stream states in a block into marks of `to`. Returns the block,
   which may have been coalesced with its neighbours. [lock] */
static gai_block *gai_block_hand_over(galloc_pool *pool, gai_block *block, const galloc_graph *graph, gai_stream *to)
{
    gai_mark **at = &block->recorded_uses, *marks;
    int is_free = gai_block_is_free(block);
    while (*at) {
        gai_mark *use = *at;
        if (!gai_stream_is_graphs(use->stream, graph)) {
            at = &use->next;
            continue;
        }
        *at = use->next;
        use->begin = block->addr;
        use->end = block->addr + block->bytes;
        use->next = NULL;
        gai_marks_hand_over(pool, use, graph, to, &block->marks);
    }
    if (!gai_marks_have(block->marks, graph)) return block;
    if (is_free) gai_set_remove(block);
    marks = block->marks;
    block->marks = NULL;
    gai_marks_hand_over(pool, marks, graph, to, &block->marks);
    return is_free ? gai_block_file(pool, block, 0) : block;
}

/* Lets a group end with the last of its graphs. */
static cudaError_t gai_graph_leave(galloc_pool *pool, const galloc_graph *handle)
{
    galloc_graph *graph;
    int begun;
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    graph = gai_graph_at(pool, handle);
    begun = graph && graph->captured;
    if (graph && !begun) {
        graph->handle = NULL;
        gai_pool_part_graphs(pool);
    }
    gai_lock_off(&pool->lock);
    if (!graph) return gai_graph_is_gone(handle);
    return begun ? gai_fail(cudaErrorNotPermitted, "call galloc_graph_end first") : cudaSuccess;
}

/* Ends a group: memory of its graphs becomes free after the current position of the site's stream. In the pool's
   context. */
static cudaError_t gai_graph_release(galloc_pool *pool, const galloc_graph *handle, gai_site *site)
{
    galloc_graph *graph, **at = &pool->graphs;
    gai_segment *segment;
    gai_block *block;
    gai_capture *capture;
    gai_stream *stream, *held;
    int begun;
    gai_lock_on(&pool->lock);
    stream = held = gai_stream_hold(pool, site);
    graph = gai_graph_at(pool, handle);
    begun = graph && graph->captured;
    if (!graph || begun) stream = NULL;
    for (segment = stream ? pool->segments : NULL; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next)
            do block = gai_block_hand_over(pool, block, graph, stream);
            while (gai_marks_have(block->marks, graph)); /* it has merged with one whose turn has not come yet */
    for (capture = stream ? pool->captures : NULL; capture; capture = capture->next)
        capture->gone |= capture->graph == graph;
    if (stream) gai_pool_forget_captures(pool);
    while (stream && *at != graph) at = &(*at)->next;
    if (stream) *at = graph->next;
    if (held) gai_stream_release(pool, held, site);
    gai_lock_off(&pool->lock);
    if (!graph) return gai_graph_is_gone(handle);
    if (begun) return gai_fail(cudaErrorNotPermitted, "call galloc_graph_end first");
    if (!stream) return gai_stream_refused(site);
    GALLOC_FREE(graph);
    return cudaSuccess;
}

/* ==== CONFIGURATION ============================================================================================= */
/* >>configuration */

/* galloc_config as text: the table of keys, validation, the parser of GALLOC_CONF and galloc_config_parse, and the
   printer. It owns no shared state and needs no lock. May call platform; it also uses constants of stream cache and
   pages. */

#define GAI_OVERHEAD_MAX 100
#define GAI_MILLION ((uint64_t)1000000) /* fractions have six decimal places */
#define GAI_MESSAGE 480 /* longest message of galloc_config_parse; `message` has as many bytes */

/* A range of the text that is parsed. */
typedef struct gai_text {
    const char *at;
    size_t length;
} gai_text;

enum gai_form {
    GAI_WORDS,     /* int: index in `words` */
    GAI_FLAGS,     /* int: words joined by '+', one bit each; the first word stands for 0 */
    GAI_BYTES,     /* size_t */
    GAI_NUMBER,    /* uint64_t */
    GAI_TIME,      /* uint64_t, nanoseconds */
    GAI_FRACTION,  /* double */
    GAI_ROUNDING,  /* roundup_power2_divisions */
    GAI_NO_SETTING, /* accepted for compatibility with PyTorch, and ignored */
    GAI_OF_PROCESS, /* a setting of the process, not of a pool: the log level */
    GAI_PATH        /* the same: the name of a file */
};

/* One key of the language. For numbers, `words` is the name of the one special value `odd`, such as none. All other
   values lie between `least` and `most`; fractions are given in millionths. */
typedef struct gai_key {
    const char *name;
    enum gai_form form;
    size_t at; /* offset in galloc_config, or a number where there is no member; equal for keys of the same setting */
    const char *words;
    uint64_t odd, least, most;
    const char *values; /* description of valid values, for messages */
} gai_key;

#define GAI_MEMBER(member) offsetof(galloc_config, member)
/* The same for GAI_NUMBER and GAI_TIME; does not compile unless the member has 64 bits. */
#define GAI_MEMBER64(member)                                                                                           \
    (offsetof(galloc_config, member) * sizeof(char[sizeof(((galloc_config *)0)->member) == sizeof(uint64_t) ? 1 : -1]))
#define GAI_SWITCHED "False|True", 0, 0, 1, "True or False"
#define GAI_BYTES_LIKE "bytes, or a number with K, M or G"
#define GAI_LOG_LEVELS "off|error|info|debug"

/* To add a setting:
     galloc_config        the member, and its comment
     gai_keys             a row here (at most 64, the bits of gai_seen): parsing, printing, the check of the
                          range and snapshots follow from it. A size that may be absent:
                          {"foo", GAI_BYTES, GAI_MEMBER(foo), "none", SIZE_MAX, 0, SIZE_MAX, GAI_BYTES_LIKE ", or none"}
                          A number: {"foo", GAI_NUMBER, GAI_MEMBER64(foo), "", 0, 0, 100, "a number from 0 to 100"}
     gai_config_default   the default, unless it is 0; gai_config_like, if like:pytorch has another
     gai_key_is_right, gai_config_misfit, if a range does not describe the values, or another setting bounds them; then
                          also gai_say_misfit and gai_parse, which name the setting that bounds
     gai_config_say_idle  its rules, if it can be without effect (GAI_IF_BACKEND: in all but a native pool), with a new
                          circumstance also gai_config_circumstances
     gai_pool_read_config, if the value in effect can differ from the one given
     galloc_config_parse  the comment, if the form of its values is new
     the manual above, if users should know of it; docs/settings.md; tests/unit/test_config.c
   Code reads it as pool->config.foo, without a lock, since it does not change while the pool exists. */
static const gai_key gai_keys[] = {
    {"like", GAI_WORDS, GAI_MEMBER(like), "galloc|pytorch", 0, 0, 1, "galloc or pytorch"},
    {"backend", GAI_WORDS, GAI_MEMBER(backend), "native|cudaMalloc|cudaMallocAsync", 0, 0, 2,
     "native, cudaMalloc or cudaMallocAsync"},
    {"strategy", GAI_WORDS, GAI_MEMBER(strategy), "caching|pooled|heuristic", 0, 0, 2, "caching, pooled or heuristic"},
    {"expandable_segments", GAI_WORDS, GAI_MEMBER(expandable_segments), GAI_SWITCHED},
    {"reuse", GAI_FLAGS, GAI_MEMBER(reuse), "none|completed|followed|wait", 0, 0, 7,
     "none, or completed, followed, wait joined by '+'"},
    {"stream_check", GAI_WORDS, GAI_MEMBER(stream_check), "off|on", 0, 0, 1, "on or off"},
    {"stats", GAI_WORDS, GAI_MEMBER(stats_exact), "fast|exact", 0, 0, 1, "exact or fast"},
    {"memory_limit", GAI_BYTES, GAI_MEMBER(memory_limit), "none", SIZE_MAX, 0, SIZE_MAX, GAI_BYTES_LIKE ", or none"},
    {"per_process_memory_fraction", GAI_FRACTION, GAI_MEMBER(per_process_memory_fraction), "", 0, 0, GAI_MILLION,
     "a fraction from 0 to 1"},
    {"device_limit", GAI_BYTES, GAI_MEMBER(device_limit), "none", SIZE_MAX, 0, SIZE_MAX, GAI_BYTES_LIKE ", or none"},
    {"overhead", GAI_FRACTION, GAI_MEMBER(overhead), "", 0, 0, GAI_OVERHEAD_MAX * GAI_MILLION,
     "a fraction such as 0.02, from 0 to 100"},
    {"growth", GAI_BYTES, GAI_MEMBER(growth), "auto", 0, 2 * GAI_MIB, GAI_MIB << 10,
     "a power of two from 2M to 1G, or auto"},
    {"lane_bytes", GAI_BYTES, GAI_MEMBER(lane_bytes), "", 0, 0, GAI_CACHE_MOST,
     "0 to 64M, " GAI_BYTES_LIKE},
    {"large_segment_size", GAI_BYTES, GAI_MEMBER(large_segment_size), "", 0, GAI_FIXED_OWN + 1, GAI_MIB << 20,
     "more than 10M, at most 1024G"},
    {"max_split_size", GAI_BYTES, GAI_MEMBER(max_split_size), "none", SIZE_MAX, 0, SIZE_MAX,
     GAI_BYTES_LIKE ", or none"},
    {"max_non_split_rounding", GAI_BYTES, GAI_MEMBER(max_non_split_rounding), "auto", 0, 0, SIZE_MAX,
     GAI_BYTES_LIKE ", or auto"},
    {"roundup_power2_divisions", GAI_ROUNDING, GAI_MEMBER(roundup_power2_divisions), "", 0, 0, 0,
     "0 or a power of two up to 1073741824, or a list such as [256:1,512:2,>:4] of MiB, rising powers of two up to "
     "32768"},
    {"gc_threshold", GAI_FRACTION, GAI_MEMBER(gc_threshold), "", 0, 0, GAI_MILLION - 1,
     "a fraction from 0 to 0.999999"},
    {"garbage_collection_threshold", GAI_FRACTION, GAI_MEMBER(gc_threshold), "", 0, 0, GAI_MILLION - 1,
     "a fraction from 0 to 0.999999"},
    {"gc_age", GAI_TIME, GAI_MEMBER64(gc_age), "none", UINT64_MAX, 0, UINT64_MAX,
     "whole ms, as a number with ms, s, m or h, or none"},
    {"release_threshold", GAI_BYTES, GAI_MEMBER(release_threshold), "none", SIZE_MAX, 0, SIZE_MAX,
     GAI_BYTES_LIKE ", or none"},
    {"wait_limit_ms", GAI_NUMBER, GAI_MEMBER64(wait_limit_ms), "none", UINT64_MAX, 0, 1000000000,
     "milliseconds, at most 1000000000, or none"},
    {"max_retries", GAI_NUMBER, GAI_MEMBER64(max_retries), "", 0, 0, 1000, "a number from 0 to 1000"},
    {"throw_on_cudamalloc_oom", GAI_WORDS, GAI_MEMBER(throw_on_cudamalloc_oom), GAI_SWITCHED},
    {"history", GAI_NUMBER, GAI_MEMBER64(history), "off", 0, 0, GAI_HISTORY_MOST,
     "a number of entries up to 16777216, or off"},
    {"history_stacks", GAI_NUMBER, GAI_MEMBER64(history_stacks), "off", 0, 0, GAI_STACK_MOST,
     "a number of frames up to 32, or off"},
    {"debug", GAI_FLAGS, GAI_MEMBER(debug), "off|guards|poison|quarantine", 0, 0, 7,
     "off, or guards, poison, quarantine joined by '+'"},
    {"quarantine_bytes", GAI_BYTES, GAI_MEMBER(quarantine_bytes), "auto", 0, 0, SIZE_MAX, GAI_BYTES_LIKE ", or auto"},
    {"debug_sample", GAI_NUMBER, GAI_MEMBER64(debug_sample), "", 0, 1, 1000000000, "a number from 1 to 1000000000"},
    {"gpu_direct_rdma", GAI_WORDS, GAI_MEMBER(gpu_direct_rdma), GAI_SWITCHED},
    {"release_lock_on_cudamalloc", GAI_NO_SETTING, 0, GAI_SWITCHED},
    {"log", GAI_OF_PROCESS, 0, GAI_LOG_LEVELS, 0, 0, 3, "off, error, info or debug"},
    {"snapshot_on_oom", GAI_PATH, 0, "", 0, 0, 0, "a file name of up to 200 bytes; of '%' only %p, %d and %%"},
    {"trace", GAI_PATH, 1, "", 0, 0, 0, "a file name of up to 200 bytes; of '%' only %p, %d and %%"},
};
#define GAI_KEYS ((int)(sizeof gai_keys / sizeof gai_keys[0]))

static galloc_config gai_config_default(void)
{
    galloc_config config;
    memset(&config, 0, sizeof config);
    config.device = -1;
    config.expandable_segments = 1;
    config.reuse = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT;
    config.stream_check = 1;
    config.memory_limit = config.device_limit = SIZE_MAX;
    config.per_process_memory_fraction = 1;
    config.overhead = 0.02;
    config.lane_bytes = GAI_CACHE_BYTES;
    config.large_segment_size = GAI_FIXED_LARGE;
    config.max_split_size = SIZE_MAX;
    config.gc_age = UINT64_MAX;
    config.release_threshold = SIZE_MAX;
    config.wait_limit_ms = UINT64_MAX;
    config.max_retries = 8;
    config.debug_sample = 1;
    return config;
}

/* Applies the defaults of like:pytorch, or of galloc. */
static void gai_config_like(galloc_config *config, int like)
{
    galloc_config defaults = gai_config_default();
    if (config->like == like) return;
    config->like = like;
    config->expandable_segments = like == GALLOC_LIKE_PYTORCH ? 0 : defaults.expandable_segments;
    config->reuse = like == GALLOC_LIKE_PYTORCH ? 0 : defaults.reuse;
}

/* ---- units ---- */

static const uint64_t gai_byte_units[] = {1, 1 << 10, 1 << 20, 1 << 30};
static const uint64_t gai_time_units[] = {1000000, 1000000000, 60000000000, 3600000000000}; /* ms, s, m, h */

#define GAI_BYTE_WORDS "|K|M|G"
#define GAI_TIME_WORDS "ms|s|m|h"

/* ---- validation ---- */

static gai_text gai_text_of(const char *string)
{
    gai_text text;
    text.at = string;
    text.length = strlen(string);
    return text;
}

static int gai_texts_are_equal(gai_text a, gai_text b)
{
    return a.length == b.length && !memcmp(a.at, b.at, a.length);
}

static int gai_text_is(gai_text text, const char *word) { return gai_texts_are_equal(text, gai_text_of(word)); }

/* Cuts the text before the first `separator` off the front of `rest`. Returns 1 if the separator was found. */
static int gai_text_cut(gai_text *rest, char separator, gai_text *piece)
{
    size_t i = 0;
    int found;
    while (i < rest->length && rest->at[i] != separator) i++;
    found = i < rest->length;
    piece->at = rest->at;
    piece->length = i;
    rest->at += i + (size_t)found;
    rest->length -= i + (size_t)found;
    return found;
}

static uint64_t gai_key_number(const galloc_config *config, const gai_key *key)
{
    const void *at = (const char *)config + key->at;
    if (key->form == GAI_WORDS || key->form == GAI_FLAGS) return (uint64_t) * (const int *)at;
    return key->form == GAI_BYTES ? *(const size_t *)at : *(const uint64_t *)at;
}

static double gai_key_fraction(const galloc_config *config, const gai_key *key)
{
    return *(const double *)(const void *)((const char *)config + key->at);
}

#define GAI_DIVISIONS_MOST (1u << 30) /* of roundup_power2_divisions */

/* Returns whether the setting is in its range. */
static int gai_key_is_right(const galloc_config *config, const gai_key *key)
{
    uint64_t n;
    int i;
    if (key->form >= GAI_NO_SETTING) return 1;
    if (key->form == GAI_FRACTION) {
        double x = gai_key_fraction(config, key);
        return x >= 0 && x <= (double)key->most / (double)GAI_MILLION;
    }
    if (key->form == GAI_ROUNDING) {
        for (i = 0; i < GALLOC_DIVISIONS; i++) {
            unsigned divisions = config->roundup_power2_divisions[i];
            if (divisions > GAI_DIVISIONS_MOST || (divisions && !gai_is_power_of_two(divisions))) return 0;
        }
        return 1;
    }
    n = gai_key_number(config, key);
    if (key->at == GAI_MEMBER(growth) && n && !gai_is_power_of_two((size_t)n)) return 0;
    if (key->form == GAI_TIME && n != key->odd && n % gai_time_units[0]) return 0;
    return (n >= key->least && n <= key->most) || (key->words[0] && n == key->odd);
}

/* Returns the index of the first key of the same setting. */
static int gai_key_index(const gai_key *key)
{
    int i = 0;
    while (gai_keys[i].form != key->form || gai_keys[i].at != key->at) i++;
    return i;
}

static const gai_key *gai_key_at(size_t member)
{
    const gai_key *key = gai_keys;
    while (key->at != member) key++;
    return key;
}

/* Values whose variant is left out by a define. */
static const struct {
    size_t member;
    int value;
    const char *by;
} gai_left_out[] = {
#if defined(GALLOC_NO_PYTORCH)
    {GAI_MEMBER(like), GALLOC_LIKE_PYTORCH, "GALLOC_NO_PYTORCH"},
#endif
#if defined(GALLOC_NO_BACKENDS)
    {GAI_MEMBER(backend), GALLOC_BACKEND_CUDA_MALLOC, "GALLOC_NO_BACKENDS"},
    {GAI_MEMBER(backend), GALLOC_BACKEND_CUDA_MALLOC_ASYNC, "GALLOC_NO_BACKENDS"},
#endif
#if defined(GALLOC_NO_POOLED)
    {GAI_MEMBER(strategy), GALLOC_STRATEGY_POOLED, "GALLOC_NO_POOLED"},
#endif
#if defined(GALLOC_NO_HEURISTIC)
    {GAI_MEMBER(strategy), GALLOC_STRATEGY_HEURISTIC, "GALLOC_NO_HEURISTIC"},
#endif
    {SIZE_MAX, 0, ""},
};

/* Returns the index in gai_left_out of a value that the settings have, or that of the last row. */
static int gai_config_left_out(const galloc_config *config)
{
    int i = 0;
    while (gai_left_out[i].by[0] && *(const int *)(const void *)((const char *)config + gai_left_out[i].member) !=
                                     gai_left_out[i].value)
        i++;
    return i;
}

/* Returns a setting whose variant is left out, or that is smaller than large_segment_size although it must not be, or
   NULL. */
static const gai_key *gai_config_misfit(const galloc_config *config)
{
    size_t least = config->large_segment_size, rounding = config->max_non_split_rounding;
    int left_out = gai_config_left_out(config);
    if (gai_left_out[left_out].by[0]) return gai_key_at(gai_left_out[left_out].member);
    if (config->max_split_size < least) return gai_key_at(GAI_MEMBER(max_split_size));
    return rounding && rounding < least ? gai_key_at(GAI_MEMBER(max_non_split_rounding)) : NULL;
}

static void gai_print_word(gai_string *string, const char *words, int number)
{
    gai_text rest = gai_text_of(words), word = rest;
    int i;
    for (i = 0; i <= number; i++) (void)gai_text_cut(&rest, '|', &word);
    gai_print(string, "%.*s", (int)word.length, word.at);
}

/* Prints n in the largest unit that divides it. `words`: the names of the four units. */
static void gai_print_units(gai_string *string, uint64_t n, const char *words, const uint64_t *units)
{
    int i = 3;
    while (i && (!n || n % units[i])) i--;
    gai_print(string, "%llu", (unsigned long long)(n / units[i]));
    gai_print_word(string, words, i);
}

/* `place`: position of the setting in the text, or of the later one of two; 0: the text does not contain it. */
static void gai_say_misfit(const galloc_config *config, const gai_key *key, size_t place, char *message)
{
    gai_string string = {message, GAI_MESSAGE};
    if (place) gai_print(&string, "at %zu: ", place);
    gai_print(&string, "%s is ", key->name);
    if (key->form == GAI_WORDS) {
        gai_print_word(&string, key->words, (int)gai_key_number(config, key));
        gai_print(&string, ": left out of this program by %s", gai_left_out[gai_config_left_out(config)].by);
        return;
    }
    gai_print_units(&string, gai_key_number(config, key), GAI_BYTE_WORDS, gai_byte_units);
    gai_print(&string, ": must be at least large_segment_size, which is ");
    gai_print_units(&string, config->large_segment_size, GAI_BYTE_WORDS, gai_byte_units);
}

/* Checks all settings, and writes the first that is out of range into `message`. */
static int gai_config_is_right(const galloc_config *config, char *message)
{
    const gai_key *misfit;
    int i;
    for (i = 0; i < GAI_KEYS; i++) {
        if (gai_key_is_right(config, &gai_keys[i])) continue;
        (void)snprintf(message, GAI_MESSAGE, "%s is out of range: must be %s", gai_keys[i].name, gai_keys[i].values);
        return 0;
    }
    misfit = gai_config_misfit(config);
    if (misfit) gai_say_misfit(config, misfit, 0, message);
    return !misfit;
}

/* ---- parsing ---- */

/* text = [pair {"," pair}];  pair = key ":" value. A comma in brackets does not separate pairs. The name of a size key
   may end in _mb; its value is then in MiB, without a unit. */

/* Accepts digits only, up to `most`. */
static int gai_parse_number(gai_text text, uint64_t most, uint64_t *value)
{
    uint64_t n = 0;
    size_t i;
    for (i = 0; i < text.length; i++) {
        uint64_t digit = (uint64_t)(text.at[i] - '0');
        if (text.at[i] < '0' || text.at[i] > '9' || digit > most || n > (most - digit) / 10) return 0;
        n = n * 10 + digit;
    }
    *value = n;
    return text.length > 0;
}

/* Returns the index of a word in `words`, or -1. */
static int gai_word_number(const char *words, gai_text text)
{
    gai_text rest = gai_text_of(words), word;
    int i, more = 1;
    for (i = 0; more; i++) {
        more = gai_text_cut(&rest, '|', &word);
        if (gai_texts_are_equal(word, text)) return i;
    }
    return -1;
}

/* Accepts a number followed by the name of a unit, one of `words`. */
static int gai_parse_units(gai_text text, const char *words, const uint64_t *units, uint64_t most, uint64_t *value)
{
    gai_text suffix;
    size_t digits = 0;
    int unit;
    while (digits < text.length && text.at[digits] >= '0' && text.at[digits] <= '9') digits++;
    suffix.at = text.at + digits;
    suffix.length = text.length - digits;
    text.length = digits;
    unit = gai_word_number(words, suffix);
    if (unit < 0 || !gai_parse_number(text, most / units[unit], value)) return 0;
    *value *= units[unit];
    return 1;
}

/* Accepts digits with at most one decimal point, in every locale. */
static int gai_parse_fraction(gai_text text, double *value)
{
    double whole = 0, scale = 1;
    int points = 0;
    size_t i, digits = 0;
    for (i = 0; i < text.length; i++) {
        char c = text.at[i];
        if (c == '.' && !points++) continue;
        if (c < '0' || c > '9') return 0;
        digits++;
        if (points && scale >= (double)GAI_MILLION) continue;
        whole = whole * 10 + (c - '0');
        if (points) scale *= 10;
    }
    *value = whole / scale;
    return digits > 0;
}

/* Parses words joined by '+', each at most once, or the word that stands for 0. */
static int gai_parse_flags(const char *words, gai_text text, int *value)
{
    int flags = 0, more = 1, i;
    gai_text word;
    if (gai_word_number(words, text) == 0) {
        *value = 0;
        return 1;
    }
    while (more) {
        more = gai_text_cut(&text, '+', &word);
        i = gai_word_number(words, word);
        if (i < 1 || flags & 1 << (i - 1)) return 0;
        flags |= 1 << (i - 1);
    }
    *value = flags;
    return 1;
}

/* Parses one pair of a list of divisions. `next` is the first index that no earlier pair has set. */
static int gai_parse_division(gai_text pair, unsigned *divisions, int *next)
{
    gai_text boundary;
    uint64_t mib = 0, n = 0;
    int from = *next, i;
    if (!gai_text_cut(&pair, ':', &boundary) || !gai_parse_number(pair, GAI_DIVISIONS_MOST, &n)) return 0;
    if (!gai_text_is(boundary, ">")) {
        if (!gai_parse_number(boundary, (uint64_t)1 << 40, &mib) || !gai_is_power_of_two((size_t)mib)) return 0;
        from = gai_log2(mib);
        if (from < *next || from >= GALLOC_DIVISIONS) return 0;
    }
    for (i = *next ? from : 0; i < GALLOC_DIVISIONS; i++)
        if (i <= from || !mib) divisions[i] = (unsigned)n;
    *next = mib ? from + 1 : GALLOC_DIVISIONS;
    return 1;
}

/* Parses one number for all sizes, or pairs in brackets. The first pair also applies to smaller sizes. Sizes without a
   pair are not rounded further. */
static int gai_parse_divisions(gai_text text, unsigned *divisions)
{
    uint64_t n = 0;
    int i, next = 0, more = 1;
    gai_text pair;
    for (i = 0; i < GALLOC_DIVISIONS; i++) divisions[i] = 0;
    if (gai_parse_number(text, GAI_DIVISIONS_MOST, &n)) {
        for (i = 0; i < GALLOC_DIVISIONS; i++) divisions[i] = (unsigned)n;
        return 1;
    }
    if (text.length < 2 || text.at[0] != '[' || text.at[text.length - 1] != ']') return 0;
    text.at++;
    text.length -= 2;
    while (more) {
        more = gai_text_cut(&text, ',', &pair);
        if (next == GALLOC_DIVISIONS || !gai_parse_division(pair, divisions, &next)) return 0;
    }
    return 1;
}

/* Parses a number, with its unit if the key has one, or the name of the special value. */
static int gai_parse_plain(const gai_key *key, gai_text text, int mib, uint64_t *n)
{
    if (key->words[0] && gai_text_is(text, key->words)) {
        *n = key->odd;
        return 1;
    }
    if (key->form == GAI_NUMBER) return gai_parse_number(text, UINT64_MAX, n);
    if (key->form == GAI_TIME) return gai_parse_units(text, GAI_TIME_WORDS, gai_time_units, UINT64_MAX, n);
    if (!mib) return gai_parse_units(text, GAI_BYTE_WORDS, gai_byte_units, SIZE_MAX, n);
    if (!gai_parse_number(text, SIZE_MAX >> 20, n)) return 0;
    *n <<= 20;
    return 1;
}

#define GAI_PATH_MOST 200  /* bytes of snapshot_on_oom and trace */
#define GAI_PATH_BYTES 512 /* its file name, expanded */

/* Writes the name of a file with %p and %d replaced by the process and the device. 0: it is no value, or too long. */
static int gai_path_expand(gai_text text, int device, gai_string *path)
{
    size_t i;
    if (!text.length || text.length > GAI_PATH_MOST) return 0;
    for (i = 0; i < text.length; i++) {
        unsigned char c = (unsigned char)text.at[i];
        if (c < ' ' || c == 127) return 0;
        if (c != '%') {
            gai_print(path, "%c", c);
            continue;
        }
        switch (++i < text.length ? text.at[i] : 0) {
        case 'p': gai_print(path, "%lu", gai_process_id()); break;
        case 'd': gai_print(path, "%d", device); break;
        case '%': gai_print(path, "%%"); break;
        default: return 0;
        }
    }
    return path->left != 0;
}

/* Parses the value of a key into its setting. `mib`: the value is in MiB. */
static int gai_parse_value(galloc_config *config, const gai_key *key, gai_text text, int mib)
{
    void *at = (char *)config + key->at;
    char buffer[GAI_PATH_BYTES];
    gai_string path = {buffer, sizeof buffer};
    int worded = key->form == GAI_WORDS || key->form == GAI_NO_SETTING || key->form == GAI_OF_PROCESS;
    int word = worded ? gai_word_number(key->words, text) : 0;
    uint64_t n = 0;
    if (word < 0) return 0;
    switch (key->form) {
    case GAI_NO_SETTING:
    case GAI_OF_PROCESS: return 1;
    case GAI_PATH: return gai_path_expand(text, 0, &path);
    case GAI_FLAGS: return gai_parse_flags(key->words, text, (int *)at);
    case GAI_FRACTION: return gai_parse_fraction(text, (double *)at);
    case GAI_ROUNDING: return gai_parse_divisions(text, (unsigned *)at);
    case GAI_WORDS:
        if (key->at == GAI_MEMBER(like)) gai_config_like(config, word);
        else *(int *)at = word;
        return 1;
    default: break;
    }
    if (!gai_parse_plain(key, text, mib, &n)) return 0;
    if (key->form == GAI_BYTES) *(size_t *)at = (size_t)n;
    else *(uint64_t *)at = n;
    return 1;
}

/* Returns the key with a name; names of sizes may end in _mb. NULL: there is none. */
static const gai_key *gai_key_find(gai_text name, int *mib)
{
    gai_text stem = name;
    int i;
    *mib = name.length > 3 && !memcmp(name.at + name.length - 3, "_mb", 3);
    if (*mib) stem.length -= 3;
    for (i = 0; i < GAI_KEYS; i++)
        if (gai_text_is(stem, gai_keys[i].name) && (!*mib || gai_keys[i].form == GAI_BYTES)) return &gai_keys[i];
    return NULL;
}

/* Cuts the first key:value pair off a text of settings. A list in brackets keeps its commas; a file name has none. */
static int gai_text_cut_pair(gai_text *rest, gai_text *pair)
{
    gai_text all = *rest, value, name;
    int found = gai_text_cut(rest, ',', pair), mib;
    const gai_key *key;
    value = *pair;
    if (!gai_text_cut(&value, ':', &name) || !value.length || value.at[0] != '[') return found;
    key = gai_key_find(name, &mib);
    if (key && key->form == GAI_PATH) return found;
    *rest = all;
    (void)gai_text_cut(rest, ']', pair);
    found = gai_text_cut(rest, ',', pair);
    pair->length += (size_t)(pair->at - all.at);
    pair->at = all.at;
    return found;
}

static int gai_is_letter(char a, char of) { return (a >= 'A' && a <= 'Z' ? a + ('a' - 'A') : a) == of; }

/* Returns how many letters two names share at the start and at the end, ignoring case. */
static size_t gai_names_share(gai_text a, const char *b)
{
    size_t n = gai_min(a.length, strlen(b)), i, j;
    for (i = 0; i < n && gai_is_letter(a.at[i], b[i]); i++) continue;
    for (j = 0; j < n - i && gai_is_letter(a.at[a.length - 1 - j], b[strlen(b) - 1 - j]); j++) continue;
    return i + j;
}

/* Returns the key that is most similar to an unknown name, or NULL if none is similar. */
static const char *gai_key_near(gai_text name)
{
    size_t best = 0, shared;
    int i, at = 0;
    for (i = 0; i < GAI_KEYS; i++) {
        shared = 2 * gai_names_share(name, gai_keys[i].name);
        shared = shared * 64 / (name.length + strlen(gai_keys[i].name) + 1);
        if (shared > best) at = i;
        best = gai_max(best, shared);
    }
    return best >= 32 ? gai_keys[at].name : NULL;
}

/* Returns the key that accepts the word as one of its joined values: a comma may stand where '+' was meant. */
static const char *gai_flags_with(gai_text word)
{
    int i;
    for (i = 0; i < GAI_KEYS; i++)
        if (gai_keys[i].form == GAI_FLAGS && gai_word_number(gai_keys[i].words, word) > 0) return gai_keys[i].name;
    return NULL;
}

static void gai_say_unknown(gai_text key, gai_string *message)
{
    const char *near = gai_key_near(key), *flags = gai_flags_with(key);
    int shown = (int)gai_min(key.length, 40);
    if (memchr(key.at, '=', key.length))
        gai_print(message, "'%.*s': write key:value, with ':' for '='", shown, key.at);
    else if (flags)
        gai_print(message, "'%.*s' is no key but a value of %s: join its values with '+'", shown, key.at, flags);
    else if (near)
        gai_print(message, "unknown key '%.*s'; perhaps %s?", shown, key.at, near);
    else
        gai_print(message, "unknown key '%.*s'; the keys are the members of galloc_config, such as memory_limit, "
                           "overhead, gc_threshold", shown, key.at);
}

/* The keys of a text. Bit i: gai_keys[i], as it is, or with _mb. */
typedef struct gai_seen {
    uint64_t plain, in_mib;
} gai_seen;

/* Returns the key by which a text gave this key's setting, or NULL. *in_mib: with _mb. */
static const gai_key *gai_key_seen(const gai_seen *seen, const gai_key *key, int *in_mib)
{
    uint64_t any = seen->plain | seen->in_mib;
    int i = 0;
    while (i < GAI_KEYS && (!(any >> i & 1) || gai_key_index(&gai_keys[i]) != gai_key_index(key))) i++;
    *in_mib = i < GAI_KEYS && !(seen->plain >> i & 1);
    return i < GAI_KEYS ? &gai_keys[i] : NULL;
}

/* The state of the parser. */
typedef struct gai_parsing {
    galloc_config config;
    gai_seen seen;
    size_t places[GAI_KEYS]; /* their positions in the text, counted from 1 */
    char *message;
} gai_parsing;

/* Returns whether a value that cannot be parsed is just too large: its last digit, with what follows, can be. */
static int gai_value_is_too_large(const gai_key *key, gai_text text, int mib)
{
    uint64_t n;
    size_t digits = 0;
    while (digits < text.length && text.at[digits] >= '0' && text.at[digits] <= '9') digits++;
    if (!digits) return 0;
    text.at += digits - 1;
    text.length -= digits - 1;
    if (key->form == GAI_ROUNDING) return gai_parse_number(text, 9, &n);
    return key->form >= GAI_BYTES && key->form <= GAI_TIME && gai_parse_plain(key, text, mib, &n);
}

/* Says of a value that it is out of range, and what the range is. `values` tells it, but for the largest numbers. */
static void gai_say_range(const gai_key *key, gai_text name, gai_text value, const char *values, gai_string *message)
{
    const char *most = key->form == GAI_TIME ? "less than 2^64 ns: " : "less than 2^64 bytes: ";
    if (key->most < SIZE_MAX) {
        most = "";
        values = key->values;
    }
    gai_print(message, "'%.*s' is out of range for %.*s: must be %s%s", (int)gai_min(value.length, 40), value.at,
              (int)name.length, name.at, most, values);
}

/* Parses one key:value pair. On an error writes the message and returns 0; else the message means nothing. */
static int gai_parse_pair(gai_parsing *parsing, gai_text pair, size_t place)
{
    gai_text name;
    int mib, before, has_value = gai_text_cut(&pair, ':', &name), shown = (int)gai_min(pair.length, 40);
    const gai_key *key = gai_key_find(name, &mib);
    const char *values = mib ? "a whole number of MiB" : key ? key->values : "";
    gai_string message = {parsing->message, GAI_MESSAGE};
    gai_print(&message, "at %zu: ", place);
    if (!name.length)
        gai_print(&message, "a key is missing; settings are key:value pairs with commas between");
    else if (!key)
        gai_say_unknown(name, &message);
    else if (!has_value)
        gai_print(&message, "'%.*s' needs ':' and a value: %s", (int)name.length, name.at, values);
    else if (gai_key_seen(&parsing->seen, key, &before))
        gai_print(&message, "'%s' is given twice", key->name);
    else if (key->at == GAI_MEMBER(like) && (parsing->seen.plain | parsing->seen.in_mib))
        gai_print(&message, "'like' must come first");
    else if (!gai_parse_value(&parsing->config, key, pair, mib) && gai_value_is_too_large(key, pair, mib))
        gai_say_range(key, name, pair, values, &message);
    else if (!gai_parse_value(&parsing->config, key, pair, mib))
        gai_print(&message, "'%.*s' is no value for %.*s: must be %s", shown, pair.at, (int)name.length, name.at,
                  values);
    else if (!gai_key_is_right(&parsing->config, key))
        gai_say_range(key, name, pair, values, &message);
    else {
        *(mib ? &parsing->seen.in_mib : &parsing->seen.plain) |= (uint64_t)1 << (key - gai_keys);
        parsing->places[gai_key_index(key)] = place;
        return 1;
    }
    return 0;
}

/* Replaces control characters, which a message may quote from the program's text. */
static void gai_make_one_line(char *message)
{
    for (; *message; message++)
        if ((unsigned char)*message < ' ' || *message == 127) *message = '?';
}

/* Parses a text; changes `config` only if the whole text is valid. `stood` maps each character and the end of the text
   to its position in what the user wrote; NULL: the positions are the same. */
static int gai_parse(galloc_config *config, const char *text, const uint32_t *stood, gai_seen *seen, char *message)
{
    gai_parsing parsing;
    gai_text rest = gai_text_of(text), pair;
    const gai_key *misfit;
    int more = text[0] != 0;
    memset(&parsing, 0, sizeof parsing);
    parsing.config = *config;
    parsing.message = message;
    while (more) {
        size_t at = (size_t)(rest.at - text), place = (stood ? stood[at] : at) + 1;
        more = gai_text_cut_pair(&rest, &pair);
        if (gai_parse_pair(&parsing, pair, place)) continue;
        gai_make_one_line(message);
        return 0;
    }
    misfit = gai_config_misfit(&parsing.config);
    if (misfit) {
        size_t place = parsing.places[gai_key_index(misfit)];
        if (misfit->form != GAI_WORDS)
            place = gai_max(place, parsing.places[gai_key_index(gai_key_at(GAI_MEMBER(large_segment_size)))]);
        gai_say_misfit(&parsing.config, misfit, place, message);
        return 0;
    }
    *config = parsing.config;
    *seen = parsing.seen;
    return 1;
}

/* ---- printing ---- */

/* Prints up to six decimal places without trailing zeros, in every locale. */
static void gai_print_fraction(gai_string *string, double x)
{
    uint64_t millionths = (uint64_t)(x * (double)GAI_MILLION + 0.5);
    unsigned below = (unsigned)(millionths % GAI_MILLION);
    int digits = 6;
    while (digits > 1 && below % 10 == 0) {
        below /= 10;
        digits--;
    }
    gai_print(string, "%llu", (unsigned long long)(millionths / GAI_MILLION));
    if (below) gai_print(string, ".%0*u", digits, below);
}

/* Prints one number if all sizes have the same value, or else a list of pairs. */
static void gai_print_divisions(gai_string *string, const unsigned *divisions)
{
    int i, last = GALLOC_DIVISIONS - 1;
    while (last && divisions[last] == divisions[last - 1]) last--;
    if (!last) {
        gai_print(string, "%u", divisions[0]);
        return;
    }
    for (i = 0; i < last; i++) gai_print(string, "%c%u:%u", i ? ',' : '[', 1u << i, divisions[i]);
    gai_print(string, ",>:%u]", divisions[last]);
}

static void gai_print_flags(gai_string *string, const char *words, int flags)
{
    int i, printed = 0;
    if (!flags) gai_print_word(string, words, 0);
    for (i = 0; flags >> i; i++) {
        if (!(flags >> i & 1)) continue;
        if (printed++) gai_print(string, "+");
        gai_print_word(string, words, i + 1);
    }
}

static void gai_print_value(gai_string *string, const galloc_config *config, const gai_key *key)
{
    uint64_t n = 0;
    if (key->form == GAI_FRACTION) {
        gai_print_fraction(string, gai_key_fraction(config, key));
        return;
    }
    if (key->form == GAI_ROUNDING) {
        gai_print_divisions(string, config->roundup_power2_divisions);
        return;
    }
    n = gai_key_number(config, key);
    if (key->form == GAI_WORDS) gai_print_word(string, key->words, (int)n);
    else if (key->form == GAI_FLAGS) gai_print_flags(string, key->words, (int)n);
    else if (key->words[0] && n == key->odd) gai_print(string, "%s", key->words);
    else if (key->form == GAI_BYTES) gai_print_units(string, n, GAI_BYTE_WORDS, gai_byte_units);
    else if (key->form == GAI_TIME) gai_print_units(string, n, GAI_TIME_WORDS, gai_time_units);
    else gai_print(string, "%llu", (unsigned long long)n);
}

/* Prints all settings as a text that can be parsed again. Returns 0 if the text does not fit. */
static int gai_config_print(const galloc_config *config, char *text, size_t size)
{
    gai_string string = {text, size};
    int i;
    for (i = 0; i < GAI_KEYS; i++) {
        const gai_key *key = &gai_keys[i];
        if (key->form >= GAI_NO_SETTING || gai_key_index(key) != i) continue;
        gai_print(&string, "%s%s:", i ? "," : "", key->name);
        gai_print_value(&string, config, key);
    }
    return string.left != 0;
}

/* ==== SETTINGS WITHOUT EFFECT =================================================================================== */
/* >>idle */

/* Idle settings: which settings of a text have no effect in combination with others. (Idle memory is in collection.) It
   owns nothing and needs no lock. May call configuration. */

/* The circumstances under which a setting has no effect. */
#define GAI_IF_NATIVE 1u
#define GAI_IF_BACKEND 2u
#define GAI_IF_CUDA_MALLOC 4u
#define GAI_IF_PAGES 8u   /* native, expandable segments */
#define GAI_IF_FIXED 16u  /* native, fixed segments */
#define GAI_IF_LIKE 32u   /* native, like:pytorch */
#define GAI_IF_TUNED 64u  /* strategy:heuristic, in effect or not */
#define GAI_IF_SPLIT 128u /* no max_split_size */
#define GAI_IF_LIMIT 256u
#define GAI_IF_EXACT 512u /* native, stats:exact where it has an effect */
#define GAI_IF_THROW 1024u
#define GAI_IF_HISTORY 2048u
#define GAI_IF_DEBUG 4096u
#define GAI_IF_KEEPS 8192u /* debug:quarantine */

static unsigned gai_config_circumstances(const galloc_config *config)
{
    int native = !config->backend, pages = native && config->expandable_segments;
    int torch = native && config->like && !pages;
    int limit = config->memory_limit != SIZE_MAX || config->device_limit != SIZE_MAX ||
                config->per_process_memory_fraction < 1;
    return (native ? GAI_IF_NATIVE : GAI_IF_BACKEND) | (pages ? GAI_IF_PAGES : 0) |
           (config->backend == GALLOC_BACKEND_CUDA_MALLOC ? GAI_IF_CUDA_MALLOC : 0) |
           (native && !pages ? GAI_IF_FIXED : 0) | (native && config->like ? GAI_IF_LIKE : 0) |
           (config->strategy == GALLOC_STRATEGY_HEURISTIC && !config->like ? GAI_IF_TUNED : 0) |
           (config->max_split_size == SIZE_MAX ? GAI_IF_SPLIT : 0) | (limit ? GAI_IF_LIMIT : 0) |
           (native && config->stats_exact && !torch ? GAI_IF_EXACT : 0) |
           (config->throw_on_cudamalloc_oom ? GAI_IF_THROW : 0) | (config->history ? GAI_IF_HISTORY : 0) |
           (config->debug ? GAI_IF_DEBUG : 0) | (config->debug & GALLOC_DEBUG_QUARANTINE ? GAI_IF_KEEPS : 0);
}

/* Appends "a, b: no effect ..." to the message, of the settings named "a,b" those that the text gave, by its keys. */
static void gai_say_idle(const gai_seen *seen, const char *names, const char *because, char *message)
{
    gai_text rest = gai_text_of(names), name;
    int more = 1, mib, said = 0;
    size_t length = strlen(message);
    gai_string string = {message + length, GAI_MESSAGE - length};
    while (more) {
        const gai_key *key;
        more = gai_text_cut(&rest, ',', &name);
        key = gai_key_seen(seen, gai_key_find(name, &mib), &mib);
        if (!key) continue;
        gai_print(&string, "%s%s%s", said++ ? ", " : length ? "; " : "", key->name, mib ? "_mb" : "");
    }
    if (said) gai_print(&string, ": no effect %s", because);
}

/* Lists the settings of a text that have no effect in combination with others. */
static void gai_config_say_idle(const galloc_config *config, const gai_seen *seen, char *message)
{
    static const struct {
        unsigned with, without; /* all of these circumstances, none of those */
        const char *names, *because;
    } rules[] = {
        {GAI_IF_BACKEND, 0, "strategy,expandable_segments,stats,overhead,growth,lane_bytes,large_segment_size,"
                            "max_split_size,max_non_split_rounding,roundup_power2_divisions,gc_threshold,gc_age,"
                            "stream_check,gpu_direct_rdma,debug,debug_sample,quarantine_bytes",
         "unless backend is native"},
        {GAI_IF_PAGES, 0, "large_segment_size,max_split_size,max_non_split_rounding",
         "unless expandable_segments is False"},
        {GAI_IF_FIXED | GAI_IF_TUNED, 0, "strategy,overhead,growth,gc_age,gpu_direct_rdma",
         "unless expandable_segments is True"},
        {GAI_IF_FIXED, GAI_IF_TUNED, "overhead,growth,gc_age,gpu_direct_rdma", "unless expandable_segments is True"},
        {GAI_IF_CUDA_MALLOC, 0, "reuse,release_threshold", "with backend:cudaMalloc"},
        {GAI_IF_FIXED | GAI_IF_SPLIT, 0, "max_non_split_rounding", "unless max_split_size is given"},
        {GAI_IF_FIXED, GAI_IF_LIKE, "gc_threshold", "on fixed segments, since cudaFree waits"},
        {GAI_IF_LIKE, 0, "strategy", "with like:pytorch"},
        {GAI_IF_LIKE | GAI_IF_FIXED, 0, "reuse,stats,stream_check,lane_bytes",
         "with like:pytorch unless expandable_segments is True"},
        {GAI_IF_LIKE | GAI_IF_FIXED, GAI_IF_LIMIT, "gc_threshold", "with like:pytorch unless there is a limit"},
        {GAI_IF_EXACT, 0, "stream_check", "with stats:exact, since every call looks then"},
        {GAI_IF_EXACT, 0, "lane_bytes", "with stats:exact, since no cache is used then"},
        {GAI_IF_THROW, 0, "wait_limit_ms,max_retries", "with throw_on_cudamalloc_oom:True"},
        {0, GAI_IF_HISTORY, "history_stacks", "without history"},
        {GAI_IF_NATIVE, GAI_IF_DEBUG, "debug_sample", "without debug"},
        {GAI_IF_NATIVE, GAI_IF_KEEPS, "quarantine_bytes", "without debug:quarantine"},
        {0, 0, "release_lock_on_cudamalloc", "since such a lock is never held there"},
    };
    unsigned is = gai_config_circumstances(config);
    size_t i;
    message[0] = 0;
    for (i = 0; i < sizeof rules / sizeof rules[0]; i++)
        if ((is & rules[i].with) == rules[i].with && !(is & rules[i].without))
            gai_say_idle(seen, rules[i].names, rules[i].because, message);
}

/* ==== LOG ======================================================================================================= */
/* >>log */

/* Messages to the program: the level, the limit on repeated messages, and the end of every public function (gai_end).
   The log lock guards all of its state and is released before the program's log function is called. May call
   configuration, callbacks and platform. */

#define GAI_REPEAT_REST 1000000000 /* ns after which a repeated message is shown again */

/* Finds the value of a key of GALLOC_CONF, even if the rest of the text (NULL: none) is invalid: the log level is that
   of its errors too, and pools of the program's own do not read the text. 0: there is none. */
static int gai_conf_value(const char *text, const char *key, gai_text *value)
{
    gai_text rest = gai_text_of(text ? text : ""), name;
    int more = 1;
    while (more) {
        more = gai_text_cut(&rest, ',', value);
        if (gai_text_cut(value, ':', &name) && gai_text_is(name, key)) return 1;
    }
    return 0;
}

/* Returns a hash that is equal for texts that differ in numbers or addresses only. */
static uint64_t gai_repeat_key(const char *text)
{
    uint64_t key = 14695981039346656037u;
    const char *digits = "0123456789";
    for (; *text; text++) {
        if (text[0] == '0' && text[1] == 'x') {
            text++;
            digits = "0123456789abcdef";
        } else if (!strchr(digits, *text)) {
            key = (key ^ (unsigned char)*text) * 1099511628211u;
            digits = "0123456789";
        }
    }
    return key;
}

static int gai_is_power_of_ten(uint64_t n)
{
    while (n >= 10 && n % 10 == 0) n /= 10;
    return n == 1;
}

/* Returns whether to show a repeated message: when its count is a power of ten, or when the last one shown is long ago.
   *hidden: how many were suppressed since then. */
static int gai_repeat_shows(const char *text, uint64_t *hidden)
{
    uint64_t key = gai_repeat_key(text), now = GALLOC_CLOCK();
    unsigned i = 0;
    while (i < GAI_REPEAT_KINDS && gai_process.log_repeats[i].key != key) i++;
    if (i == GAI_REPEAT_KINDS) {
        i = gai_process.repeat_kinds++ % GAI_REPEAT_KINDS;
        memset(&gai_process.log_repeats[i], 0, sizeof gai_process.log_repeats[i]);
        gai_process.log_repeats[i].key = key;
    }
    if (!gai_is_power_of_ten(++gai_process.log_repeats[i].count) &&
        now - gai_process.log_repeats[i].when < GAI_REPEAT_REST) {
        gai_process.log_repeats[i].hidden++;
        return 0;
    }
    *hidden = gai_process.log_repeats[i].hidden;
    gai_process.log_repeats[i].hidden = 0;
    gai_process.log_repeats[i].when = now;
    return 1;
}

/* Reads the level once, with the first line. Guarded by the log's own lock. */
static void gai_log_level_read(void)
{
    gai_text value;
    int level = -1;
    if (gai_process.log_is_read) return;
    if (gai_conf_value(getenv("GALLOC_CONF"), "log", &value)) level = gai_word_number(GAI_LOG_LEVELS, value);
    gai_process.log_level = level < 0 ? GALLOC_LOG_INFO : level;
    gai_process.log_is_read = 1;
}

/* A failure of gai_watch_forks is told by the calls that need the driver. */
static void gai_log_lock(void)
{
    (void)gai_watch_forks();
    gai_fork_look();
    gai_lock_on(&gai_locks.log);
}

/* Ends log:off: a mistake in the variables that set the log is logged in any case, since it refuses all requests. */
static void gai_log_failures(void)
{
    gai_log_lock();
    gai_log_level_read();
    if (gai_process.log_level == GALLOC_LOG_OFF) gai_process.log_level = GALLOC_LOG_ERROR;
    gai_lock_off(&gai_locks.log);
}

/* Passes this thread's message to the log function; `folds`: unless it repeats one that was logged lately. A failure of
   galloc inside that function is not logged, which prevents endless recursion. What the thread knows of this call and
   of earlier errors is restored afterwards. */
GAI_APART
static void gai_log_line(int level, int folds)
{
    char text[sizeof gai_thread.message + 64], last[sizeof gai_thread.last];
    size_t length = strlen(gai_thread.message);
    int has_report = gai_thread.has_report;
    galloc_report report;
    gai_callback_frame saved;
    void (*call)(int level, const char *text, void *user);
    void *user;
    uint64_t hidden = 0;
    int shows;
    if (gai_thread.in_log) return;
    gai_log_lock();
    gai_log_level_read();
    shows = level <= gai_process.log_level &&
            (!folds || gai_process.log_level == GALLOC_LOG_DEBUG || gai_repeat_shows(gai_thread.message, &hidden));
    call = gai_process.log_functions[gai_process.log_function].call;
    user = gai_process.log_functions[gai_process.log_function].user;
    gai_lock_off(&gai_locks.log);
    if (!shows) return;
    memcpy(text, gai_thread.message, length + 1);
    if (hidden)
        (void)snprintf(text + length, sizeof text - length, " (and %llu similar lines)", (unsigned long long)hidden);
    memcpy(last, gai_thread.last, sizeof last);
    report = gai_thread.report;
    gai_callback_begin(&gai_thread.in_log, &saved);
    if (call) call(level, text, user);
    else GALLOC_LOG(text);
    gai_callback_end(&gai_thread.in_log, &saved);
    gai_thread.has_report = has_report;
    gai_thread.report = report;
    memcpy(gai_thread.last, last, sizeof last);
}

/* Prefixes the message with the name of the function that failed. */
static void gai_message_begin(const char *function)
{
    size_t length = strlen(function), most = sizeof gai_thread.message - 3 - length;
    size_t told = gai_min(strlen(gai_thread.message), most);
    memmove(gai_thread.message + length + 2, gai_thread.message, told);
    memcpy(gai_thread.message, function, length);
    memcpy(gai_thread.message + length, ": ", 2);
    gai_thread.message[length + 2 + told] = 0;
}

/* Writes what is due of the logs, and logs a line for one that cannot be written. [no lock] */
GAI_APART
static void gai_trace_tend(void)
{
    gai_trace *trace;
    if (gai_load_pointer(&gai_process.forked) || gai_thread.in_log) return;
    gai_lock_on(&gai_locks.trace);
    (void)gai_swap(&gai_process.trace_due, 1, 0);
    for (trace = (gai_trace *)gai_process.traces; trace; trace = trace->next) {
        gai_trace_write(trace);
        if (!trace->failed || trace->told || gai_thread.message_is_new) continue;
        (void)gai_file_failed(trace->path, "written", trace->failed);
        trace->told = 1;
    }
    gai_lock_off(&gai_locks.trace);
    if (!gai_thread.message_is_new) return;
    gai_thread.message_is_new = 0;
    gai_message_begin("trace");
    gai_log_line(GALLOC_LOG_ERROR, 1);
}

#define GAI_DAMAGE_FRAMES 3

/* Appends the first frames of a stack, but for public functions of galloc's at its beginning: function+0x12, or
   program(+0x1234) where the function has no name. `first` stands before the first one, `next` before the others. With
   `files` also the name of the function's program is appended. */
static void gai_print_frames(gai_string *string, uint32_t stack, uint32_t most, const char *first, const char *next,
                             int files)
{
    const gai_depot *depot = (const gai_depot *)gai_load_pointer(&gai_process.depot);
    uint32_t i, shown = 0;
    if (!stack || !depot) return;
    for (i = depot->begins[stack]; i < depot->begins[stack + 1] && shown < most; i++) {
        gai_symbol symbol;
        const char *slash;
        gai_symbol_find(&symbol, depot->addresses[i]);
        if (!shown && !strncmp(symbol.name, "galloc_", 7)) continue;
        slash = strrchr(symbol.file, '/');
        slash = slash ? slash + 1 : symbol.file;
        gai_print(string, "%s", shown++ ? next : first);
        if (!symbol.into) gai_print(string, "%.60s(+0x%zx)", slash, symbol.position);
        else gai_print(string, "%.*s+0x%zx", files ? 100 : 40, symbol.name, symbol.into);
        if (symbol.into && files) gai_print(string, " (%.60s)", slash);
    }
}

static void gai_damage_print(gai_string *string, const gai_damage *damage)
{
    char name[GAI_NOTE_TEXT];
    size_t at = damage->first - damage->addr, beyond = at - damage->requested;
    gai_print(string, "debug: the program wrote %s the block at %p of %zu bytes",
              damage->poison ? "after its free into" : "behind", (void *)damage->addr, damage->requested);
    if ((uint32_t)damage->tag) gai_print(string, ", tag %u", (unsigned)(uint32_t)damage->tag);
    if (gai_tag_get((uint32_t)damage->tag, name)) gai_print(string, " (%s)", name);
    gai_print(string, ", stream %llu: %zu bytes, the first ", (unsigned long long)damage->stream_id, damage->count);
    if (damage->poison) gai_print(string, "%zu from its start", at);
    else gai_print(string, "%zu behind its end", beyond);
    if (damage->next && !damage->poison)
        gai_print(string, " and %zu before the block at %p", damage->next - damage->first, (void *)damage->next);
    gai_print(string, ", 0x%02x", damage->value);
    gai_print_frames(string, (uint32_t)(damage->tag >> GAI_STACK_SHIFT), GAI_DAMAGE_FRAMES, "; allocated by ", " < ",
                     0);
    gai_print_frames(string, damage->freed, GAI_DAMAGE_FRAMES, "; freed by ", " < ", 0);
}

/* Logs the damages that this call has found, one line each: each is a mistake of its own, so no line is folded. The
   message of the call itself stays. */
GAI_APART
static void gai_damages_say(void)
{
    char kept[sizeof gai_thread.message];
    gai_damage damages[GAI_DAMAGES];
    uint64_t i, n = gai_thread.damaged;
    if (gai_thread.in_log) return; /* they are told when that has returned */
    gai_thread.damaged = 0;
    memcpy(damages, gai_thread.damages, sizeof damages);
    memcpy(kept, gai_thread.message, sizeof kept);
    for (i = 0; i < n && i <= GAI_DAMAGES; i++) {
        gai_string string = {gai_thread.message, sizeof gai_thread.message};
        if (i < GAI_DAMAGES) gai_damage_print(&string, &damages[i]);
        else gai_print(&string, "debug: and %llu more blocks", (unsigned long long)(n - i));
        gai_log_line(GALLOC_LOG_ERROR, 0);
    }
    memcpy(gai_thread.message, kept, sizeof kept);
}

/* Every public function that can fail returns through this one. */
static cudaError_t gai_end(const char *function, cudaError_t error)
{
    int is_new;
    if (gai_thread.damaged) gai_damages_say();
    if (error == cudaErrorCudartUnloading) (void)gai_fail(error, "the CUDA driver is shutting down");
    is_new = gai_thread.message_is_new;
    gai_thread.message_is_new = 0;
    if (is_new == GAI_NOTE) {
        gai_log_line(GALLOC_LOG_INFO, 1);
    } else if (error && is_new) {
        gai_message_begin(function);
        memcpy(gai_thread.last, gai_thread.message, sizeof gai_thread.last);
        gai_log_line(GALLOC_LOG_ERROR, 1);
    }
    if (gai_load(&gai_process.trace_due)) gai_trace_tend();
    return error;
}

/* The same for a call that gives something back: nothing is left to give back once the driver has shut down. */
static cudaError_t gai_end_giving(const char *function, cudaError_t error)
{
    if (error != cudaErrorCudartUnloading) return gai_end(function, error);
    gai_thread.message_is_new = 0;
    return cudaSuccess;
}

/* Writes the file name that a key has in GALLOC_CONF. 0: there is none. */
static int gai_conf_path(const char *key, int device, char *buffer, size_t size)
{
    gai_text value;
    gai_string path = {buffer, size};
    return gai_conf_value(getenv("GALLOC_CONF"), key, &value) && gai_path_expand(value, device, &path);
}

/* ==== REPORT ==================================================================================================== */
/* >>report */

/* The text of a galloc_report (galloc_report_text), with advice. It reads only the report, so it needs no lock. Calls
   process only. */

/* Prints a size in MiB and in bytes. */
static void gai_print_size(gai_string *string, const char *what, size_t bytes, const char *more)
{
    gai_print(string, "  %-26s %12.2f MiB  %zu%s%s\n", what, (double)bytes / (double)GAI_MIB, bytes,
              more[0] ? "  " : "", more);
}

static void gai_report_print_pool(gai_string *string, const galloc_report *report)
{
    char text[96];
    int i;
    gai_print(string, "the pool holds\n");
    gai_print_size(string, "live", report->live, "");
    gai_print_size(string, "rounding", report->rounding, "");
    gai_print_size(string, "cached", report->cached, "of it:");
    (void)snprintf(text, sizeof text, "in pieces of up to %zu", report->largest_usable);
    gai_print_size(string, "  free for the stream", report->usable, report->usable ? text : "");
    if (report->usable_in_pages) gai_print_size(string, "    that cannot move", report->usable_in_pages, "");
    if (report->in_slots) gai_print_size(string, "    in slots of other sizes", report->in_slots, "strategy:pooled");
    gai_print_size(string, "  stranded by streams", report->stranded, "");
    for (i = 0; i < GALLOC_REPORT_STREAMS && report->streams[i].bytes; i++) {
        (void)snprintf(text, sizeof text, "    stream %llu", report->streams[i].stream_id);
        gai_print_size(string, text, report->streams[i].bytes, "");
    }
    (void)snprintf(text, sizeof text, "    %zu more streams", report->more_streams);
    if (report->more_streams) gai_print_size(string, text, report->more_stranded, "");
    if (report->graph_bytes) gai_print_size(string, "  graphs' own", report->graph_bytes, "");
    if (report->quarantined) gai_print_size(string, "  not taken back", report->quarantined, "");
    if (report->busy) gai_print_size(string, "  on the way", report->busy, "");
    gai_print_size(string, "held", report->held, "");
    gai_print_size(string, "of at most", report->limit, "");
    gai_print_size(string, "largest possible block", report->largest_possible, "");
    gai_print(string, "  %-26s %12.3f\n", "fragmentation", report->fragmentation);
}

static void gai_report_print_device(gai_string *string, const galloc_report *report)
{
    char text[96];
    gai_print(string, "device %d\n", report->device);
    gai_print_size(string, "total", report->device_total, "");
    if (report->device_known) gai_print_size(string, "free", report->device_free, "");
    gai_print_size(string, "this pool", report->held, "");
    (void)snprintf(text, sizeof text, "%zu of it cached", report->others_cached);
    if (report->other_pools) gai_print_size(string, "galloc's other pools", report->others_held, text);
    if (report->device_known) gai_print_size(string, "outside galloc", report->outside, "");
}

static void gai_report_print_steps(gai_string *string, const galloc_report *report)
{
    int i;
    if (!report->steps_taken) {
        gai_print(string, "no step was taken: the pool can never hold that much\n");
        return;
    }
    gai_print(string, "steps taken, and the bytes gained");
    if (report->rounds) gai_print(string, " in %u rounds", report->rounds + 1);
    gai_print(string, "\n");
    for (i = 0; i < GALLOC_REPORT_STEPS && report->steps[i].name; i++) {
        const galloc_step *step = &report->steps[i];
        gai_print(string, "  %-43s  ", step->name);
        if (step->left_out) gai_print(string, "left out: %s\n", step->left_out);
        else gai_print(string, "%zu\n", step->gained);
    }
}

/* Returns the bytes that the pool lacks for the request. */
static size_t gai_report_lacks(const galloc_report *report)
{
    return report->rounded > report->largest_possible ? report->rounded - report->largest_possible : 1;
}

/* Prints advice that applies to this report. It never suggests a setting that is already in effect. */
static void gai_report_advise_pool(gai_string *string, const galloc_report *report)
{
    size_t lacks = gai_report_lacks(report);
    int heeds_reuse = !report->backend && (!report->like || report->expandable_segments);
    if (report->stranded >= lacks && report->captured)
        gai_print(string, "- a captured stream cannot wait for others, and %zu bytes wait for other streams: run the "
                         "work before the capture, or reserve memory for it\n", report->stranded);
    else if (report->stranded >= lacks && heeds_reuse && !(report->reuse & GALLOC_REUSE_WAIT))
        gai_print(string, "- reuse:wait is off while %zu bytes are stranded by other streams\n", report->stranded);
    if (report->stranded >= lacks && !report->captured && report->wait_limit_ms != UINT64_MAX)
        gai_print(string, "- wait_limit_ms is %llu while %zu bytes are stranded by other streams\n",
                  (unsigned long long)report->wait_limit_ms, report->stranded);
    if (report->stranded && report->more_streams)
        gai_print(string, "- many streams strand memory: galloc_stream_retire before cudaStreamDestroy\n");
    if (!report->backend && !report->expandable_segments && report->usable - report->in_slots >= report->rounded)
        gai_print(string, "- expandable_segments is False: %zu bytes are free, but the largest piece has %zu\n",
                  report->usable - report->in_slots, report->largest_usable);
    if (report->in_slots >= lacks)
        gai_print(string, "- strategy:pooled keeps %zu bytes for requests of other sizes: strategy:caching does not\n",
                  report->in_slots);
    if (report->expandable_segments && report->usable_in_pages >= lacks)
        gai_print(string, "- %zu bytes lie beside used blocks in their pages: GALLOC_LIFETIME_LONG for blocks "
                         "that stay keeps them apart\n", report->usable_in_pages);
    if (report->graph_bytes >= lacks)
        gai_print(string, "- graphs own %zu bytes: destroy those that are not launched any more, or let them "
                         "share memory (galloc_graph_begin)\n", report->graph_bytes);
    if (report->quarantined)
        gai_print(string, "- the driver refused to take back %zu bytes: galloc_pool_trim tries again\n",
                  report->quarantined);
    if (report->rejected && report->rounded <= report->limit)
        gai_print(string, "- throw_on_cudamalloc_oom is on: the request neither waited nor returned memory\n");
    if (report->room_is_memory)
        gai_print(string, "- the block takes %zu bytes since its room (max_bytes) is memory here; less room takes "
                         "less%s\n", report->rounded,
                  report->backend ? "" : "; in pages (expandable_segments:True) room takes only addresses");
    if (report->shrunk >= lacks)
        gai_print(string, "- blocks with room have shrunk and keep %zu bytes: free them and allocate them again\n",
                  report->shrunk);
}

static void gai_report_advise_device(gai_string *string, const galloc_report *report)
{
    size_t beyond = report->device_free - gai_min(report->device_free, report->room);
    int limited = report->limit < report->device_total && beyond >= gai_report_lacks(report);
    int full = report->device_known && report->device_free < report->rounded && !limited;
    int shared = report->held < report->limit && report->room < report->limit - report->held; /* by other pools */
    if (limited)
        gai_print(string, "- the limit of %zu is the cause: the device has %zu free\n", report->limit,
                  report->device_free);
    if (report->others_cached && (full || shared))
        gai_print(string, "- other pools of galloc hold %zu bytes that they do not use: galloc_pool_trim\n",
                  report->others_cached);
    if (full && report->outside >= report->device_total / 16)
        gai_print(string, "- %zu bytes are held outside galloc: by other processes, CUDA, or cudaMalloc\n",
                  report->outside);
}

/* Returns 0 if the text does not fit. */
static int gai_report_print(const galloc_report *report, char *text, size_t size)
{
    gai_string string = {text, size};
    const char *before;
    gai_print(&string, "out of memory: %zu %sbytes (%zu %s) on stream %llu%s\ncause: %s\n", report->asked,
              report->grows ? "more " : "", report->rounded,
              report->grows ? "in further pages"
              : report->room_is_memory ? "with its room, which is memory here" : "after rounding",
              report->stream_id, report->captured ? ", which is being captured" : "", report->cause);
    gai_report_print_pool(&string, report);
    gai_report_print_device(&string, report);
    gai_report_print_steps(&string, report);
    gai_print(&string, "what would help\n");
    before = string.at;
    gai_report_advise_pool(&string, report);
    gai_report_advise_device(&string, report);
    if (string.at == before) gai_print(&string, "- fewer bytes live at once, or more memory\n");
    return string.left != 0;
}

/* ==== CHECK ===================================================================================================== */
/* >>check */

/* galloc_pool_check: each function returns how many of the equations above the structs are violated. All functions run
   under `paging`, the pool's lock and the latches of all stream caches. May call all sections before it. */

static int gai_check_bin(const gai_set *set, int row, int column, size_t *in_bins)
{
    const gai_block *block;
    enum gai_kind kind = row < GAI_ROWS ? GAI_FREE : GAI_SLOT;
    int broken = 0;
    for (block = set->bins[row][column]; block; block = block->next_bin) {
        gai_bin bin = gai_bin_of(block->bytes);
        broken += bin.row != row % GAI_ROWS || bin.column != column || block->set != set || block->kind != kind;
        broken += kind == GAI_SLOT && block->next_bin && block->next_bin->bytes != block->bytes;
        (*in_bins)++;
    }
    return broken;
}

static int gai_check_bins(const gai_set *set, size_t *in_bins)
{
    int broken = 0, row, column;
    for (row = 0; row < GAI_ROWS + GAI_SLOT_ROWS; row++) {
        uint32_t columns = 0;
        for (column = 0; column < GAI_COLUMNS; column++)
            columns |= (uint32_t)(set->bins[row][column] != NULL) << column;
        broken += columns != set->columns[row];
        broken += ((set->rows >> row & 1) != 0) != (columns != 0 && row < GAI_ROWS);
        for (; columns; columns &= columns - 1) broken += gai_check_bin(set, row, gai_lowest(columns), in_bins);
    }
    return broken;
}

/* Checks the equations above gai_set. */
static int gai_check_set(const gai_set *set)
{
    const gai_block *block, *older = NULL;
    size_t bytes = 0, in_list = 0, in_bins = 0;
    int broken = gai_check_bins(set, &in_bins);
    for (block = set->oldest; block; older = block, block = block->newer) {
        broken += block->set != set || block->older != older;
        bytes += block->bytes;
        in_list++;
    }
    return broken + (set->newest != older) + (bytes != set->bytes) + (in_list != in_bins);
}

/* used: descriptors that were found in use;  in_hand: calls under way may have others */
static int gai_check_slab(const gai_slab *slab, size_t used, int in_hand)
{
    void *const *unused = (void *const *)slab->unused;
    size_t n = 0;
    for (; unused && n <= slab->made; unused = (void *const *)*unused) n++;
    used += slab->available;
    return (n != slab->available) + (slab->promised > slab->available) +
           (in_hand ? used > slab->made : used != slab->made);
}

typedef struct gai_census {
    size_t used, requested, blocks, free, largest, holes, bytes, promised;
    size_t large; /* blocks in a stream cache with gai_cache.large bytes */
    galloc_pages pages[GALLOC_PAGE_SIZES];
    struct {
        size_t blocks, marks, mappings, events, waits, positions;
    } found; /* descriptors */
    int busy; /* calls are busy with a stream state */
} gai_census;

/* Checks that the stream state is in the index, and that its waits are possible. */
static int gai_check_stream_links(galloc_pool *pool, const gai_stream *stream, gai_census *census)
{
    const gai_stream *other = *gai_stream_bucket(pool, stream->key ^ stream->capture_id);
    const gai_wait *wait;
    int broken = stream->free.stream != stream || (stream->due && !pool->due);
    while (other && other != stream) other = other->next_indexed;
    for (wait = stream->waits; wait; wait = wait->next) {
        broken += wait->epoch >= wait->on->epoch || (wait->epoch && wait->on->capture_id != stream->capture_id);
        census->found.waits++;
    }
    return broken + (other == NULL && stream != &pool->unknown_streams);
}

static int gai_check_positions(const gai_stream *stream, gai_census *census)
{
    const gai_graph_position *position;
    uint64_t newer = stream->epoch;
    int broken = stream->positions && !stream->capture;
    for (position = stream->positions; position; position = position->older) {
        broken += position->epoch >= newer || position->epoch <= stream->done || position->n > GAI_POSITION_NODES;
        newer = position->epoch;
        census->found.positions++;
    }
    return broken;
}

/* Checks the equations for stream states of captured streams and of the unknown streams. */
static int gai_check_captured(const galloc_pool *pool, const gai_stream *stream, gai_census *census)
{
    const gai_capture *capture = pool->captures;
    const gai_cache *cache = &stream->cache;
    if (gai_stream_is_plain(stream)) return (stream->capture != NULL) + (stream->positions != NULL);
    while (capture && capture != stream->capture) capture = capture->next;
    return !stream->asked + (cache->blocks + cache->unconfirmed_blocks != 0) + stream->due +
           gai_check_positions(stream, census) + (stream == &pool->unknown_streams && stream->waits != NULL) +
           (stream->recorded != NULL || stream->idle != NULL) +
           (gai_stream_is_unknown(stream) != (stream == &pool->unknown_streams)) +
           (stream->capture && (!capture || capture->id != stream->capture_id || stream->done)) +
           (stream != &pool->unknown_streams && !stream->capture && stream->done + 1 != stream->epoch);
}

/* Checks the equation above galloc_graph, and that the groups of all captures exist. */
static int gai_check_graphs(const galloc_pool *pool)
{
    const galloc_graph *graph;
    const gai_capture *capture;
    size_t members = 0;
    int broken = 0;
    for (capture = pool->captures; capture; capture = capture->next) members += capture->graph != NULL;
    for (graph = pool->graphs; graph; graph = graph->next) {
        size_t captures = 0;
        for (capture = pool->captures; capture; capture = capture->next) captures += capture->graph == graph;
        broken += captures != graph->captures;
        members -= captures;
    }
    return broken + (members != 0);
}

static void gai_census_page(gai_census *census, const gai_page *page, size_t bytes, size_t n)
{
    galloc_pages *pages = &census->pages[gai_page_class(page->bytes)];
    pages->bytes += bytes;
    pages->count += n;
}

/* Checks a list of blocks in a stream cache or in quarantine (stream: NULL), and moves them from used to free in the
   census, whose change tells how many these are. bytes != 0: all have that size. */
static int gai_check_blocks(const galloc_pool *pool, const gai_stream *stream, const gai_block *block, size_t bytes,
                            gai_census *census)
{
    int broken = 0;
    for (; block; block = block->next_bin) {
        broken += block->kind != GAI_USED || block->pool != pool || gai_load_pointer(&block->lent) || block->room;
        broken += (bytes && block->bytes != bytes) ||
                  (stream && (block->life != stream->life || block->recorded_uses));
        census->large += stream && block->bytes == stream->cache.large;
        census->blocks--;
        census->used -= block->bytes;
        census->requested -= (size_t)block->requested;
        census->free += block->bytes;
        census->largest = gai_max(census->largest, block->bytes);
    }
    return broken;
}

/* Checks the equations above gai_cache, and moves the blocks of the stream cache from used to free in the census. */
static int gai_check_cache(const galloc_pool *pool, const gai_stream *stream, gai_census *census)
{
    const gai_cache *cache = &stream->cache;
    const gai_census before = *census;
    gai_census between; /* after the unconfirmed blocks */
    size_t i;
    int broken = cache->blocks + cache->unconfirmed_blocks > GAI_CACHE_BLOCKS ||
                 cache->unconfirmed_blocks > GAI_UNCONFIRMED_BLOCKS || (cache->open && cache->open != stream->life);
    broken += cache->open && (stream->asked || stream->retired);
    broken += gai_check_blocks(pool, stream, cache->unconfirmed, 0, census);
    broken += gai_check_blocks(pool, stream, cache->orphans, 0, census);
    between = *census;
    for (i = 0; i < GAI_CACHE_BINS; i++) {
        const gai_cache_bin *bin = &cache->bins[i];
        if (!(cache->filled >> i & 1)) continue;
        broken += !bin->first;
        broken += gai_check_blocks(pool, stream, bin->first, bin->bytes, census);
    }
    broken += before.blocks - between.blocks != cache->unconfirmed_blocks;
    broken += between.free - before.free != cache->unconfirmed_bytes;
    broken += between.blocks - census->blocks != cache->blocks || census->free - between.free != cache->bytes;
    broken += gai_cache_held(cache) > cache->most || cache->alone > cache->most;
    broken += cache->large && census->large == before.large;
    broken += cache->seen > cache->mallocs || cache->mallocs > cache->serves;
    broken += !cache->trusted && between.free - before.free - (between.large > before.large ? cache->large : 0) >
                                     GAI_EVENT_BYTES;
    return broken;
}

/* Checks the equations above gai_stream, and counts the descriptors that the stream state has. */
static int gai_check_stream(galloc_pool *pool, const gai_stream *stream, gai_census *census)
{
    const gai_event *event, *newest = NULL;
    const gai_segment *segment;
    const gai_block *block;
    uint64_t last = stream->done, uses = 0;
    size_t events = 0;
    int broken = stream->done >= stream->epoch || stream->freed > stream->epoch || stream->handed > stream->epoch;
    for (event = stream->recorded; event; event = event->next) {
        broken += event->epoch <= last || event->epoch >= stream->epoch;
        last = event->epoch;
        newest = event;
        events++;
    }
    broken += newest != stream->newest || events != stream->events;
    for (event = stream->idle; event; event = event->next) events++;
    census->found.events += events;
    census->busy |= stream->busy != 0;
    for (segment = pool->segments; segment; segment = segment->next) {
        for (block = segment->first; block; block = block->next) {
            const gai_mark *mark;
            for (mark = block->marks; mark; mark = mark->next) uses += mark->stream == stream;
            for (mark = block->recorded_uses; mark; mark = mark->next) uses += mark->stream == stream;
        }
    }
    return broken + (uses != stream->uses) + gai_check_stream_links(pool, stream, census) +
        gai_check_cache(pool, stream, census) + gai_check_captured(pool, stream, census);
}

/* Checks the equations above gai_mark. */
static int gai_check_marks(const gai_block *block)
{
    const gai_mark *mark, *other;
    int broken = 0;
    for (mark = block->marks; mark; mark = mark->next) {
        broken += mark->begin >= mark->end || mark->begin < block->addr || mark->end > block->addr + block->bytes;
        for (other = mark->next; other; other = other->next)
            broken += mark->stream == other->stream && mark->begin < other->end && other->begin < mark->end;
    }
    return broken;
}

/* Checks that a used block of a captured stream has a mark of it over all its bytes, and cannot enter a stream
   cache. */
static int gai_check_given(const gai_block *block)
{
    const gai_mark *mark = block->marks;
    if (!block->stream || !block->stream->capture) return 0;
    while (mark && !(mark->stream == block->stream && mark->begin == block->addr &&
                     mark->end == block->addr + block->bytes))
        mark = mark->next;
    return !mark + !(block->tag & GAI_SPECIAL);
}

/* Checks the equations above gai_page and gai_mapping. */
static int gai_check_page(const gai_page *page)
{
    const gai_mapping *mapping;
    int mapped = 0, broken = page->current != NULL;
    for (mapping = page->shown; mapping; mapping = mapping->next_shown) {
        mapped += mapping->addr != 0;
        broken -= mapping == page->current;
        broken += mapping->page != page || mapping->bytes != page->bytes;
    }
    return broken + (mapped != page->mappings);
}

/* Checks that every byte of used and free blocks has a page and none of holes and rooms does, and counts the pages that
   begin in the block. Busy blocks are in transit. */
static int gai_check_pages(const gai_block *block, gai_census *census)
{
    uintptr_t at = block->addr, end = block->addr + block->bytes;
    const gai_segment *segment = block->segment;
    int broken = 0, mapped = gai_block_is_mapped(block);
    if (block->kind == GAI_BUSY) return 0;
    if (segment->given && mapped && block == segment->first) {
        gai_census_page(census, segment->whole->page, segment->bytes, 1);
        census->found.mappings++;
    }
    if (segment->given) return !segment->whole->page->current;
    if (block->kind == GAI_ALIAS) return gai_page_at(at) != (gai_block_is_parked(block) ? block->alias : NULL);
    while (at < end && mapped) {
        const gai_mapping *mapping = gai_page_at(at);
        if (!mapping) return broken + 1;
        broken += at < mapping->addr || at >= mapping->addr + mapping->bytes || mapping->segment != segment;
        at = mapping->addr + mapping->bytes;
        if (mapping->addr < block->addr) continue;
        gai_census_page(census, mapping->page, mapping->bytes, 1);
        census->found.mappings++;
        broken += gai_check_page(mapping->page);
    }
    for (; at < end && at - block->addr < 64 * GAI_FIXED_SMALL; at += GAI_FIXED_SMALL)
        broken += gai_page_at(at) != NULL;
    return broken;
}

/* Checks that the block map finds the block by its addresses. A block that has been freed and awaits its return to the
   driver is exempt, because another block may already have its address. */
static int gai_check_found(const gai_block *block)
{
    int leaves = block->segment->given && block->kind == GAI_USED && !gai_load_pointer(&block->lent);
    if (leaves || !gai_block_is_mapped(block)) return 0;
    return (!block->map_entry || gai_load_pointer(block->map_entry) != block) + (gai_block_at(block->addr) != block) +
           (gai_block_before(block->addr + block->bytes - 1) != block);
}

/* Checks the equations above gai_block. */
static int gai_check_block(galloc_pool *pool, const gai_block *block, gai_census *census)
{
    const gai_block *next = block->next;
    const void *held = gai_load_pointer(&block->lent);
    int broken = block->bytes == 0 || block->bytes % GAI_UNIT || block->addr % GAI_UNIT;
    if (next) broken += next->addr != block->addr + block->bytes || next->prev != block;
    broken += gai_block_is_free(block) != (block->set != NULL);
    broken += block->kind == GAI_USED && block->requested > block->bytes;
    broken += held && (block->kind != GAI_USED || !block->stream);
    broken += gai_check_found(block);
    if (block->kind == GAI_FREE && !pool->mixed.counted) {
        broken += block->set != gai_set_of(pool, block->marks);
        broken += gai_block_meets(pool, gai_set_of(pool, block->marks), block, next, 0);
    }
    broken += pool->variant.check_block ? pool->variant.check_block(pool, block) : block->slot;
    broken += block->kind == GAI_HOLE && next && next->kind == GAI_HOLE;
    broken += block->kind == GAI_ROOM && next && next->kind == GAI_ROOM;
    if (block->kind != GAI_USED && block->kind != GAI_BUSY)
        broken += (block->kind == GAI_ROOM || block->room) != (gai_room_owner(block) != NULL);
    broken += block->room && block->kind != GAI_USED && block->kind != GAI_BUSY && block->kind != GAI_ALIAS;
    return broken + gai_check_marks(block) + gai_check_given(block) + gai_check_pages(block, census);
}

static int gai_check_segment(galloc_pool *pool, const gai_segment *segment, gai_census *census)
{
    const gai_block *block;
    size_t bytes = 0;
    int broken = segment->first->addr != segment->addr || segment->first->prev != NULL;
    if (segment->lost && segment->whole->page->current) {
        gai_census_page(census, segment->whole->page, 0, 1);
        census->found.mappings++;
    }
    for (block = segment->first; block; block = block->next) {
        if (!segment->lost) broken += gai_check_block(pool, block, census);
        bytes += block->bytes;
        census->found.blocks++;
        census->found.marks += gai_marks_count(block->marks) + gai_marks_count(block->recorded_uses);
        broken += segment->lost && gai_block_is_free(block);
        census->holes += block->kind == GAI_HOLE;
        census->free += gai_block_is_free(block) ? block->bytes : 0;
        if (gai_block_is_free(block)) census->largest = gai_max(census->largest, block->bytes);
        if (block->kind != GAI_USED) continue;
        census->promised += GAI_FREE_MARKS;
        if (segment->lost) gai_census_page(census, segment->whole->page, block->bytes, 0);
        census->used += block->bytes;
        census->requested += (size_t)block->requested;
        census->blocks++;
    }
    return broken + (bytes != segment->bytes);
}

/* Compares the running statistics with the counts of this check. */
static int gai_check_stats(galloc_pool *pool, const gai_census *census)
{
    galloc_stats stats;
    size_t held = 0, i;
    int broken = 0;
    gai_stats_locked(pool, &stats);
    gai_stats_derive(pool, &stats);
    for (i = 0; i < GALLOC_PAGE_SIZES; i++) {
        broken += stats.pages[i].count != census->pages[i].count || stats.pages[i].bytes != census->pages[i].bytes;
        held += census->pages[i].bytes;
    }
    broken += census->bytes != stats.addresses;
    broken += census->free != stats.free_bytes;
    broken += stats.largest_free > census->largest;
    broken += stats.largest_free < census->largest - census->largest / GAI_COLUMNS;
    broken += census->used != stats.allocated.current;
    broken += census->requested != stats.live.current;
    broken += census->blocks != stats.blocks.current;
    broken += held != stats.reserved.current;
    broken += stats.allocated.current + stats.cached.current != stats.reserved.current;
    return broken + (stats.live.current > stats.allocated.current);
}

/* Checks the bytes taken by all pools of the device against the limits. Other pools may grow at the same time. */
static int gai_check_budget(const galloc_pool *pool)
{
    const gai_budget *budget = pool->budget;
    const galloc_pool *other;
    size_t held = 0;
    int broken;
    gai_lock_on(&gai_locks.budget);
    for (other = budget->pools; other; other = other->next_sharing) held += other->taken;
    broken = held != budget->held;
    broken += budget->held > budget->most || budget->limit > budget->most || budget->limit > pool->config.device_limit;
    broken += pool->taken != pool->stats.reserved.current;
    gai_lock_off(&gai_locks.budget);
    return broken;
}

/* Checks the equations of the history. */
static int gai_check_history(const galloc_pool *pool)
{
    const gai_history *history = &pool->history;
    int on = history->ring != NULL;
    return (on != (history->size != 0)) + (on && history->next != history->noted % history->size) +
           (gai_counted(&pool->frames_taken) != (on ? pool->frames : 0)) +
           ((on || pool->trace) != (pool->caches_off >> 2 & 1)) +
           (((on && pool->frames) || pool->trace) != !!(pool->special & GAI_ROUTE_HISTORY));
}

/* Checks the quarantine, and moves its blocks from used to free in the census. */
static int gai_check_kept(const galloc_pool *pool, gai_census *census)
{
    const gai_guards *guards = &pool->guards;
    const gai_block *newest = guards->oldest;
    const gai_census before = *census;
    size_t kept;
    int broken = gai_check_blocks(pool, NULL, guards->oldest, 0, census);
    while (newest && newest->next_bin) newest = newest->next_bin;
    kept = before.blocks - census->blocks;
    census->promised -= kept * GAI_FREE_MARKS;
    return broken + (newest && guards->newest != newest) + (kept != guards->kept) +
           (census->free - before.free != guards->kept_bytes) +
           (before.requested - census->requested != guards->kept_live);
}

/* Checks the equations of the guards. */
static int gai_check_guards(const galloc_pool *pool)
{
    const gai_guards *guards = &pool->guards;
    size_t i, used = 0;
    int broken = (!guards->host && guards->pending) || !guards->oldest != !guards->kept;
    for (i = 0; guards->checks && i < GAI_CHECKS; i++) {
        const gai_check *check = &guards->checks[i];
        if (!check->stream) continue;
        used++;
        if (check->stream->life == check->life && check->epoch != UINT64_MAX)
            broken += check->epoch > check->stream->handed;
    }
    return broken + (used != guards->pending) + (gai_pool_debugs_all(pool) != (pool->caches_off >> 3 & 1)) +
           (pool->tool != (pool->caches_off >> 4 & 1));
}

/* Checks that each descriptor is unused or has been found in use, once. */
static int gai_check_slabs(const galloc_pool *pool, const gai_census *census)
{
    size_t pages = 0, i;
    for (i = 0; i < GALLOC_PAGE_SIZES; i++) pages += census->pages[i].count;
    return gai_check_slab(&pool->blocks, census->found.blocks, pool->telling) +
           gai_check_slab(&pool->marks, census->found.marks, census->busy) +
           gai_check_slab(&pool->pages, pages, pool->telling) +
           gai_check_slab(&pool->mappings, census->found.mappings, pool->telling) +
           gai_check_slab(&pool->events, census->found.events, census->busy) +
           gai_check_slab(&pool->waits, census->found.waits, 0) +
           gai_check_slab(&pool->positions, census->found.positions, 0);
}

static int gai_check_holes(const galloc_pool *pool, const gai_census *census)
{
    const gai_block *hole;
    size_t holes = 0;
    int broken = 0;
    for (hole = pool->holes; hole; hole = hole->next_bin) {
        holes++;
        broken += hole->kind != GAI_HOLE || (hole->next_bin && hole->next_bin->prev_bin != hole);
    }
    return broken + (census->holes != holes);
}

/* Checks the equations above galloc_pool, and all segments, stream states and mappings of the pool. */
static int gai_check_pool(galloc_pool *pool)
{
    gai_census census;
    const gai_set *set;
    const gai_segment *segment;
    const gai_stream *stream;
    const gai_mapping *mapping;
    size_t quarantined = 0, leaving = 0, parked = 0, old = 0, streams = 0, outside = 0;
    int broken = gai_check_graphs(pool), lost = 0;
    memset(&census, 0, sizeof census);
    census.pages[0].bytes = census.free = census.largest = pool->kept;
    for (segment = pool->segments; segment; segment = segment->next) {
        broken += gai_check_segment(pool, segment, &census);
        if (!segment->fixed) census.bytes += segment->bytes;
        if (segment->outside && !segment->lost) outside += segment->bytes;
        broken += segment->next && segment->next->prev != segment;
        lost += segment->lost;
    }
    for (stream = pool->streams; stream; stream = stream->next) {
        broken += gai_check_stream(pool, stream, &census);
        streams += (size_t)gai_stream_is_plain(stream);
    }
    broken += streams != pool->stream_count;
    for (set = &pool->common; set; set = set->next) broken += gai_check_set(set);
    if (pool->variant.check) broken += pool->variant.check(pool);
    broken += gai_check_history(pool) + gai_check_guards(pool) + gai_check_kept(pool, &census);
    for (mapping = pool->quarantine; mapping; mapping = mapping->next) {
        census.found.mappings++;
        if (!mapping->page->stuck || mapping->page->shown != mapping) continue;
        quarantined += mapping->bytes;
        gai_census_page(&census, mapping->page, mapping->bytes, 1);
    }
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer) {
        int is_parked = mapping->page->current == mapping;
        census.found.mappings++;
        if (is_parked) parked += mapping->bytes;
        else leaving += mapping->bytes;
        old += (size_t)!is_parked;
        if (is_parked) gai_census_page(&census, mapping->page, mapping->bytes, 1);
        broken += mapping->block->kind != GAI_ALIAS || mapping->block->addr != mapping->addr ||
                  mapping->block->bytes != mapping->bytes || mapping->page->mappings < 1 || !mapping->page->current ||
                  mapping->block->alias != mapping || mapping->page->taken;
    }
    broken += lost != pool->lost || leaving != pool->stats.leaving || parked != pool->parked || old != pool->stale;
    broken += pool->tuning.decided > GALLOC_DECISIONS;
    broken += gai_check_holes(pool, &census);
    broken += gai_check_slabs(pool, &census);
    broken += pool->marks.promised != census.promised;
    broken += quarantined != pool->stats.quarantined;
    broken += outside != pool->outside;
    census.free += parked;
    census.largest = gai_max(census.largest, gai_pool_largest_parked(pool));
    broken += gai_check_budget(pool);
    if (pool->telling) return broken; /* some bytes are in transit */
    return broken + gai_check_stats(pool, &census);
}

/* ==== PYTORCH ===================================================================================================== */
/* >>torch */

/* With like:pytorch: blocks are chosen, cut, counted and collected as in PyTorch's caching allocator
   (c10/cuda/CUDACachingAllocator.cpp). There each segment belongs to the block pool of one stream and one kind of
   request, small or large, and a free block stays in its block pool's set. Sets and counters are guarded by `lock`; the
   functions that give segments back are called under `paging`. GALLOC_NO_PYTORCH leaves the section out. May call
   check and all sections before it. */

#if !defined(GALLOC_NO_PYTORCH)

#define GAI_TORCH_SMALL GAI_MIB  /* rounded requests up to this size get small segments */
#define GAI_TORCH_REMAINS GAI_MIB /* at most this much is left uncut at the end of a block of a large segment */

/* ---- torch_stats ---- */

/* Adds to the current value, or subtracts from it. `new_ones`: what is added counts in the total as well. */
static void gai_torch_move_one(galloc_stat *stat, size_t n, int enters, int new_ones)
{
    stat->current += enters ? n : 0 - n;
    stat->total += enters && new_ones ? n : 0;
    if (stat->current > stat->peak) stat->peak = stat->current;
}

/* torch_stats counts each number for all blocks and for the small or the large ones. */
static void gai_torch_move(galloc_torch_stat *stat, int small, size_t n, int enters, int new_ones)
{
    gai_torch_move_one(&stat->all, n, enters, new_ones);
    gai_torch_move_one(small ? &stat->small_pool : &stat->large_pool, n, enters, new_ones);
}

/* Does the block span its whole segment? */
static int gai_block_is_whole(const gai_block *block) { return block->bytes == block->segment->bytes; }

/* Counts a free block of a block pool that enters a set, or leaves it with the size that it had there. */
static void gai_torch_count_free(const gai_set *set, const gai_block *block, int enters)
{
    const gai_segment *segment = block->segment;
    galloc_torch_stats *stats = &segment->pool->torch_stats;
    int small = segment->block_pool->small;
    if (set == &segment->pool->mixed) {
        gai_torch_move(&stats->active, small, 1, enters, 0);
        gai_torch_move(&stats->active_bytes, small, block->bytes, enters, 0);
    } else if (!gai_block_is_whole(block)) {
        gai_torch_move(&stats->inactive_split, small, 1, enters, 1);
        gai_torch_move(&stats->inactive_split_bytes, small, block->bytes, enters, 1);
    }
}

static void gai_torch_unfiled(const gai_set *set, const gai_block *block) { gai_torch_count_free(set, block, 0); }

/* Counts a block that becomes used, or whose use ends. */
static void gai_torch_count_used(galloc_pool *pool, const gai_block *block, int begins)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    int small = block->segment->block_pool->small;
    gai_torch_move(&stats->allocation, small, 1, begins, 1);
    gai_torch_move(&stats->active, small, 1, begins, 1);
    gai_torch_move(&stats->allocated_bytes, small, block->bytes, begins, 1);
    gai_torch_move(&stats->active_bytes, small, block->bytes, begins, 1);
    gai_torch_move(&stats->requested_bytes, small, (size_t)block->requested, begins, 1);
    if (gai_pool_is_oversize(pool, block->bytes)) gai_torch_move_one(&stats->oversize_allocations, 1, begins, 1);
}

static void gai_torch_change(galloc_torch_stat *stat, int small, size_t before, size_t now)
{
    gai_torch_move(stat, small, now > before ? now - before : before - now, now > before, 1);
}

/* Counts the new size of a used block in torch_stats. */
static void gai_torch_count_resized(galloc_pool *pool, const gai_block *block, size_t bytes, size_t requested)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    int small = block->segment->block_pool->small;
    gai_torch_change(&stats->allocated_bytes, small, bytes, block->bytes);
    gai_torch_change(&stats->active_bytes, small, bytes, block->bytes);
    gai_torch_change(&stats->requested_bytes, small, requested, (size_t)block->requested);
    if (gai_pool_is_oversize(pool, bytes)) gai_torch_move_one(&stats->oversize_allocations, 1, 0, 0);
    if (gai_pool_is_oversize(pool, block->bytes)) gai_torch_move_one(&stats->oversize_allocations, 1, 1, 0);
}

static void gai_torch_stat_reset(galloc_torch_stat *stat)
{
    gai_stat_reset(&stat->all, &stat->all);
    gai_stat_reset(&stat->small_pool, &stat->small_pool);
    gai_stat_reset(&stat->large_pool, &stat->large_pool);
}

static void gai_torch_stats_reset(galloc_torch_stats *stats)
{
    gai_torch_stat_reset(&stats->allocation);
    gai_torch_stat_reset(&stats->segment);
    gai_torch_stat_reset(&stats->active);
    gai_torch_stat_reset(&stats->inactive_split);
    gai_torch_stat_reset(&stats->allocated_bytes);
    gai_torch_stat_reset(&stats->reserved_bytes);
    gai_torch_stat_reset(&stats->active_bytes);
    gai_torch_stat_reset(&stats->inactive_split_bytes);
    gai_torch_stat_reset(&stats->requested_bytes);
    gai_stat_reset(&stats->oversize_allocations, &stats->oversize_allocations);
    gai_stat_reset(&stats->oversize_segments, &stats->oversize_segments);
    stats->num_alloc_retries = stats->num_ooms = stats->num_sync_all_streams = 0;
    stats->num_device_alloc = stats->num_device_free = 0;
}

static void gai_torch_count(galloc_pool *pool, enum gai_count what, const gai_block *block)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    switch (what) {
    case GAI_COUNT_USED: gai_torch_count_used(pool, block, 1); break;
    case GAI_COUNT_UNUSED: gai_torch_count_used(pool, block, 0); break;
    case GAI_COUNT_NO_MEMORY: stats->num_ooms++; break;
    case GAI_COUNT_RETRY: stats->num_alloc_retries++; break;
    case GAI_COUNT_WAIT: stats->num_sync_all_streams++; break;
    case GAI_COUNT_RESET: gai_torch_stats_reset(stats); break;
    }
}

/* ---- block pools ---- */

/* Returns whether the request is one for small segments. */
static int gai_is_small(const gai_params *params)
{
    return params->bytes <= GAI_TORCH_SMALL && params->alignment <= GAI_FIXED_SMALL;
}

/* May the streams of the block pool use the bytes of an incomplete mark without a wait? */
static int gai_block_pool_allows(const gai_block_pool *block_pool, const gai_mark *mark)
{
    if (mark->stream->block_pool[block_pool->small] == block_pool) return 1;
    return block_pool->stream && gai_stream_is_ordered(block_pool->stream, mark->stream);
}

/* The free set of a block in a block pool: the block pool's own, or mixed while another stream may still use it. */
static gai_set *gai_block_pool_set(galloc_pool *pool, const gai_block *block)
{
    gai_block_pool *block_pool = block->segment->block_pool;
    const gai_mark *mark = block->marks;
    while (mark && gai_block_pool_allows(block_pool, mark)) mark = mark->next;
    return mark ? &pool->mixed : &block_pool->free;
}

/* Requests events on streams of other block pools that used the block. Once these are complete the block returns to
   its block pool's set. */
static void gai_block_ask_users(const gai_block *block)
{
    const gai_mark *mark;
    for (mark = block->marks; mark; mark = mark->next)
        if (!gai_block_pool_allows(block->segment->block_pool, mark) && !gai_mark_event(mark))
            gai_stream_ask(mark->stream);
}

/* Is a free block in its block pool's own set, and not in mixed? */
static int gai_block_is_at_block_pool(const gai_block *block)
{
    return block && block->kind == GAI_FREE && block->set == &block->segment->block_pool->free;
}

/* A segment that has become free as a whole notes the number of searches so far. */
static void gai_segment_note_search(const galloc_pool *pool, const gai_block *block)
{
    gai_segment *segment = block->segment;
    if (!gai_block_is_whole(block) || segment->age == block->age) return; /* refiled, not newly free */
    segment->age = block->age;
    segment->searches = pool->searches;
}

/* Files a block of a block pool. Merges it with free neighbours, except while it or they are in mixed. */
static gai_block *gai_block_file_block_pool(galloc_pool *pool, gai_block *block, int all)
{
    gai_set *set = gai_block_pool_set(pool, block);
    int i;
    (void)all;
    if (set == &pool->mixed) gai_block_ask_users(block);
    for (i = 0; i < 2 && set != &pool->mixed; i++) {
        gai_block *partner = i ? block->next : block->prev;
        if (!gai_block_is_at_block_pool(partner)) continue;
        gai_set_remove(partner);
        block = i ? block : partner;
        gai_block_absorb(pool, block, block->next);
        gai_marks_trim(pool, &block->marks);
    }
    if (set != &pool->mixed) gai_segment_note_search(pool, block);
    gai_set_insert(set, block);
    gai_torch_count_free(set, block, 1);
    return block;
}

/* Re-sorts free blocks after a stream state entered the block pool or a capture ended. Blocks that its streams may use
   without a wait move from mixed into its set, the others move to mixed. [lock] */
static void gai_block_pool_sort(galloc_pool *pool, gai_block_pool *block_pool)
{
    gai_block *block = block_pool->free.oldest, *newer;
    while (block) {
        newer = block->newer;
        if (gai_block_pool_set(pool, block) == &pool->mixed) {
            gai_set_remove(block);
            (void)gai_block_file(pool, block, 0); /* it merges with none: its neighbours are in another set */
        }
        block = newer;
    }
    for (block = pool->mixed.oldest; block;) {
        if (block->segment->block_pool != block_pool || gai_block_pool_set(pool, block) == &pool->mixed) {
            block = block->newer;
        } else {
            gai_set_remove(block);
            (void)gai_block_file(pool, block, 0);
            block = pool->mixed.oldest; /* other blocks may have merged with it */
        }
    }
}

/* Ends a block pool without streams, segments and pending segments. [lock] */
static void gai_block_pool_end(galloc_pool *pool, gai_block_pool *block_pool)
{
    gai_block_pool **at = &pool->block_pools;
    if (block_pool->streams || block_pool->segments || block_pool->awaited) return;
    while (*at != block_pool) at = &(*at)->next;
    *at = block_pool->next;
    gai_set_unlink(pool, &block_pool->free);
    GALLOC_FREE(block_pool);
}

/* A new block pool without streams. NULL: no host memory. [lock] */
static gai_block_pool *gai_block_pool_new(galloc_pool *pool, int small)
{
    gai_block_pool *block_pool = (gai_block_pool *)GALLOC_MALLOC(sizeof *block_pool);
    if (!block_pool) return NULL;
    memset(block_pool, 0, sizeof *block_pool);
    block_pool->small = small;
    block_pool->free.counted = 1;
    block_pool->next = pool->block_pools;
    pool->block_pools = block_pool;
    gai_set_link(pool, &block_pool->free);
    return block_pool;
}

/* Gives a stream state this block pool. */
static gai_block_pool *gai_block_pool_enter(gai_block_pool *block_pool, gai_stream *stream)
{
    if (!block_pool) return NULL;
    block_pool->captured = stream->capture_id != 0;
    block_pool->stream = stream;
    block_pool->streams++;
    stream->block_pool[block_pool->small] = block_pool;
    return block_pool;
}

static void gai_stream_leave_block_pools(galloc_pool *pool, gai_stream *stream)
{
    int small;
    for (small = 0; small < 2; small++) {
        gai_block_pool *block_pool = stream->block_pool[small];
        if (!block_pool) continue;
        stream->block_pool[small] = NULL;
        if (block_pool->stream == stream) block_pool->stream = NULL;
        block_pool->streams--;
        gai_block_pool_end(pool, block_pool);
    }
}

/* May a captured stream join the block pool of another capture of its group and stream? None may be there with which
   the new one shares no memory: two captures into one graph do not share, though both share with another graph of the
   group. Captures whose graph is gone do not count. */
static int gai_block_pool_admits(const galloc_pool *pool, const gai_stream *with, const gai_stream *stream, int small)
{
    const gai_stream *other;
    if (!with->block_pool[small] || !with->capture || with->key != stream->key ||
        !gai_captures_share(with->capture, stream->capture)) return 0;
    for (other = pool->streams; other; other = other->next)
        if (other->block_pool[small] == with->block_pool[small] && other->capture &&
            !gai_captures_share(other->capture, stream->capture)) return 0;
    return 1;
}

/* The block pool of a stream state for large or small blocks, or NULL. Captures of one group on the same stream share
   one. Without a stream state: the one for memory reserved for no stream. [lock] */
static gai_block_pool *gai_block_pool_of(galloc_pool *pool, gai_stream *stream, int small)
{
    gai_stream *other;
    gai_block_pool *block_pool = pool->block_pools;
    if (!stream) {
        while (block_pool && (block_pool->streams || block_pool->captured || block_pool->small != small))
            block_pool = block_pool->next;
        return block_pool;
    }
    if (stream->block_pool[small] || !stream->capture) return stream->block_pool[small];
    other = pool->streams;
    while (other && !gai_block_pool_admits(pool, other, stream, small)) other = other->next;
    if (!other) return NULL;
    block_pool = gai_block_pool_enter(other->block_pool[small], stream);
    gai_block_pool_sort(pool, block_pool);
    return block_pool;
}

/* The same, created if it is missing. NULL: no host memory. [lock] */
static gai_block_pool *gai_block_pool_for(galloc_pool *pool, gai_stream *stream, int small)
{
    gai_block_pool *block_pool = gai_block_pool_of(pool, stream, small);
    if (block_pool) return block_pool;
    block_pool = gai_block_pool_new(pool, small);
    return stream ? gai_block_pool_enter(block_pool, stream) : block_pool;
}

/* Assigns a new segment to a block pool. [lock] */
static void gai_segment_enter_block_pool(galloc_pool *pool, gai_segment *segment, gai_block_pool *block_pool)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    segment->block_pool = block_pool;
    segment->searches = pool->searches;
    block_pool->segments++;
    gai_torch_move(&stats->segment, block_pool->small, 1, 1, 1);
    gai_torch_move(&stats->reserved_bytes, block_pool->small, segment->bytes, 1, 1);
    if (gai_pool_is_oversize(pool, segment->bytes)) gai_torch_move_one(&stats->oversize_segments, 1, 1, 1);
    stats->num_device_alloc++;
}

/* Removes a segment that is given back from its block pool. */
static void gai_segment_leave_block_pool(galloc_pool *pool, gai_segment *segment)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    gai_block_pool *block_pool = segment->block_pool;
    if (!block_pool) return;
    gai_torch_move(&stats->segment, block_pool->small, 1, 0, 0);
    gai_torch_move(&stats->reserved_bytes, block_pool->small, segment->bytes, 0, 0);
    if (gai_pool_is_oversize(pool, segment->bytes)) gai_torch_move_one(&stats->oversize_segments, 1, 0, 0);
    stats->num_device_free++;
    block_pool->segments--;
    gai_block_pool_end(pool, block_pool);
}

/* The streams of captured block pools have no work under way any more. */
static void gai_torch_capture_ended(galloc_pool *pool)
{
    gai_block_pool *block_pool;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        if (block_pool->captured) gai_block_pool_sort(pool, block_pool);
}

static void gai_torch_end(galloc_pool *pool)
{
    while (pool->block_pools) {
        gai_block_pool *next = pool->block_pools->next;
        gai_set_unlink(pool, &pool->block_pools->free);
        GALLOC_FREE(pool->block_pools);
        pool->block_pools = next;
    }
}

/* ---- search ---- */

/* Finds the smallest block in which the request fits, among equals the one with the lowest address: PyTorch's order.
   It looks at every block of a bin. */
static gai_block *gai_block_pool_find(const gai_block_pool *block_pool, const gai_params *params)
{
    gai_bin bin = gai_bin_of(params->bytes);
    gai_block *best = NULL, *block;
    if (!block_pool || block_pool->free.bytes < params->bytes) return NULL;
    do {
        for (block = block_pool->free.bins[bin.row][bin.column]; block; block = block->next_bin)
            if (block->bytes >= params->bytes && gai_is_better(block, best) &&
                gai_place(block->addr, block->addr + block->bytes, params))
                best = block;
    } while (!best && gai_bin_next(&block_pool->free, &bin));
    return best;
}

/* Bytes that the request gets of a block, from its place on: to where the block is cut, or to the end. */
static size_t gai_block_pool_cut(const galloc_pool *pool, const gai_block *block, uintptr_t at,
                                 const gai_params *params)
{
    size_t all = block->addr + block->bytes - at, remains = all - params->bytes;
    /* Blocks of small segments are cut down to 512 bytes. */
    if (gai_is_small(params)) return remains >= GAI_UNIT ? params->bytes : all;
    return remains > GAI_TORCH_REMAINS && !gai_pool_is_oversize(pool, params->bytes) ? params->bytes : all;
}

/* The first free segment from `block` on in a set, by time of free, whose work is done. NULL: there is none. */
static gai_block *gai_whole_from(gai_block *block)
{
    while (block && (!gai_block_is_whole(block) || block->marks)) block = block->newer;
    return block;
}

/* Finds the smallest segment that is free as a whole, whose work is done, and whose block pool has no stream and no
   graph any more. */
static gai_block *gai_pool_find_ownerless(const galloc_pool *pool, const gai_params *params)
{
    const gai_block_pool *block_pool;
    gai_block *best = NULL, *block;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        if (block_pool->streams || block_pool->small != gai_is_small(params)) continue;
        for (block = gai_whole_from(block_pool->free.oldest); block; block = gai_whole_from(block->newer))
            if (gai_is_better(block, best) && gai_place(block->addr, block->addr + block->bytes, params)) best = block;
    }
    return best;
}

/* Moves a free segment to another block pool. [lock] */
static void gai_segment_move(galloc_pool *pool, gai_segment *segment, gai_block_pool *block_pool)
{
    gai_block_pool *before = segment->block_pool;
    gai_set_remove(segment->first);
    before->segments--;
    block_pool->segments++;
    segment->block_pool = block_pool;
    gai_block_pool_end(pool, before);
    (void)gai_block_file(pool, segment->first, 0);
}

/* Returns whether free memory waits for a stream outside its block pool, and an event is recorded that may show it
   done. */
static int gai_pool_awaits(const galloc_pool *pool)
{
    const gai_stream *stream = pool->mixed.oldest ? pool->streams : NULL;
    while (stream && !stream->recorded) stream = stream->next;
    return stream != NULL;
}

/* Takes a block of a block pool, cut as PyTorch does. */
static void gai_job_take_at_block_pool(gai_job *job, gai_block *block)
{
    gai_params params = job->params;
    uintptr_t at = gai_place(block->addr, block->addr + block->bytes, &params);
    params.bytes = gai_block_pool_cut(job->pool, block, at, &params);
    gai_job_took(job, params.just_ready ? block : gai_block_take(job->pool, block, at, &params));
}

/* Searches the stream's block pool. Before events were queried it finds nothing if a query may free more: that is a
   later step. [lock] */
static void gai_job_search_block_pool(gai_job *job, enum gai_reach reach)
{
    galloc_pool *pool = job->pool;
    gai_block *block;
    (void)reach;
    pool->searches += !job->searched && !gai_is_small(&job->params);
    job->searched = 1;
    /* PyTorch queries its events before it searches. */
    if (!job->asked && gai_pool_awaits(pool)) return;
    block = gai_block_pool_find(gai_block_pool_of(pool, job->params.stream, gai_is_small(&job->params)), &job->params);
    if (block && gai_block_may_serve(pool, block, job->params.bytes)) gai_job_take_at_block_pool(job, block);
}

/* ---- collecting ---- */

/* The age of a free segment: searches since its last block was freed. PyTorch measures time in the same way. */
static double gai_segment_age(const galloc_pool *pool, const gai_segment *segment)
{
    return (double)(pool->searches - segment->searches);
}

/* Returns whether free segments of the block pool are collected: large ones are, except those of graphs. */
static int gai_block_pool_is_collected(const gai_block_pool *block_pool)
{
    return !block_pool->small && !block_pool->captured;
}

/* The mean age of the segments that can be collected; -1: there are none. */
static double gai_pool_mean_age(const galloc_pool *pool)
{
    const gai_block_pool *block_pool;
    const gai_block *block;
    double sum = 0, count = 0;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        if (!gai_block_pool_is_collected(block_pool)) continue;
        for (block = gai_whole_from(block_pool->free.oldest); block; block = gai_whole_from(block->newer)) {
            sum += gai_segment_age(pool, block->segment);
            count++;
        }
    }
    return count > 0 ? sum / count : -1;
}

/* Takes all segments of an age, even if fewer would do, so that collection is not needed again soon. Returns the bytes
   taken. [lock] */
static size_t gai_pool_collect_older(galloc_pool *pool, double least, gai_batch *batch)
{
    gai_block_pool *block_pool;
    gai_block *block, *newer;
    size_t taken = 0;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        if (!gai_block_pool_is_collected(block_pool)) continue;
        for (block = gai_whole_from(block_pool->free.oldest); block; block = newer) {
            size_t bytes = block->bytes;
            newer = gai_whole_from(block->newer);
            if (gai_segment_age(pool, block->segment) < least) continue;
            if (!gai_block_to_batch(pool, block, block->addr, bytes, batch)) return 0;
            taken += bytes;
        }
    }
    return taken;
}

/* Gives back the segments of a batch. [lock], which is released */
static void gai_wholes_give_back(galloc_pool *pool, gai_batch *batch)
{
    gai_batch_add_aliases(pool, batch);
    gai_lock_off(&pool->lock);
    gai_pool_tell_unmap(pool, batch);
    gai_batch_undo(pool, batch);
}

/* Gives old segments back until `wanted` bytes are given or there are no more: those as old as the mean or older, then
   of the others those as old as their mean, and so on. */
static void gai_torch_collect(galloc_pool *pool, size_t wanted)
{
    gai_batch batch = {NULL, NULL};
    size_t taken = 0, more = 1;
    if (gai_pool_stays_mapped(pool)) return;
    gai_lock_on(&pool->lock);
    for (; taken < wanted && more; taken += more) {
        double mean = gai_pool_mean_age(pool);
        more = mean < 0 ? 0 : gai_pool_collect_older(pool, mean, &batch);
    }
    gai_wholes_give_back(pool, &batch);
}

/* Finds the smallest segment of a block pool that is free as a whole, has at least `bytes`, and whose work is done;
   with `largest`, the largest such segment. */
static gai_block *gai_block_pool_whole(const gai_block_pool *block_pool, size_t bytes, int largest)
{
    gai_block *best = NULL, *block;
    for (block = gai_whole_from(block_pool->free.oldest); block; block = gai_whole_from(block->newer)) {
        if (block->bytes < bytes) continue;
        if (!best || (largest ? block->bytes > best->bytes : gai_is_better(block, best))) best = block;
    }
    return best;
}

/* Gives back segments of max_split_size and more, which smaller requests cannot use: one of at least `bytes`, or
   else the largest ones until `bytes` are given. */
static void gai_block_pool_release_oversize(galloc_pool *pool, const gai_block_pool *block_pool, size_t bytes)
{
    gai_batch batch = {NULL, NULL};
    gai_block *block;
    size_t wanted = gai_max(bytes, pool->config.max_split_size), taken = 0;
    if (gai_pool_stays_mapped(pool)) return;
    gai_lock_on(&pool->lock);
    block = gai_block_pool_whole(block_pool, wanted, 0);
    if (!block) block = gai_block_pool_whole(block_pool, pool->config.max_split_size, 1);
    while (block && taken < wanted) {
        size_t more = block->bytes;
        if (!gai_block_to_batch(pool, block, block->addr, more, &batch)) break;
        taken += more;
        block = gai_block_pool_whole(block_pool, pool->config.max_split_size, 1);
    }
    gai_wholes_give_back(pool, &batch);
}

/* ---- steps ---- */

/* Moves blocks whose marks of other streams have completed back to their block pools, then searches again. */
static int gai_step_torch_poll(gai_job *job)
{
    gai_pool_retry(job->pool);
    gai_pool_sweep_lost(job->pool);
    gai_pool_poll(job->pool);
    job->asked = 1;
    return gai_job_search(job, GAI_REACH_ALL);
}

/* Takes over a segment of a block pool that has no stream and no graph left. */
static int gai_step_torch_adopt(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_stream *stream = job->params.stream;
    gai_block_pool *block_pool;
    gai_block *block;
    if (!stream) return 0;
    gai_pool_sweep_streams(pool);
    gai_lock_on(&pool->lock);
    block = gai_pool_find_ownerless(pool, &job->params);
    if (block && !gai_block_may_serve(pool, block, job->params.bytes)) block = NULL;
    block_pool = block ? gai_block_pool_for(pool, stream, gai_is_small(&job->params)) : NULL;
    if (block_pool) {
        gai_segment_move(pool, block->segment, block_pool);
        gai_job_search_block_pool(job, GAI_REACH_ALL);
    }
    gai_lock_off(&pool->lock);
    return gai_job_is_done(job);
}

/* Returns the bytes that like:pytorch holds above gc_threshold, which is a fraction of the capacity. 0 if no limit is
   set below the device's memory. */
static size_t gai_torch_excess(galloc_pool *pool)
{
    size_t limit = gai_pool_capacity(pool), held;
    double most = pool->config.gc_threshold * (double)limit;
    if (limit >= pool->device_bytes || !(pool->config.gc_threshold > 0)) return 0;
    gai_lock_on(&pool->lock);
    held = pool->torch_stats.reserved_bytes.all.current;
    gai_lock_off(&pool->lock);
    return (double)held > most ? held - (size_t)most : 0;
}

/* Returns whether a free segment of at least `bytes` bytes still has marks, meaning its work may be unfinished. Looks
   into the block pool `only`, or if it is NULL into all block pools that garbage collection covers. */
static int gai_pool_has_unfinished(galloc_pool *pool, const gai_block_pool *only, size_t bytes)
{
    const gai_block_pool *block_pool;
    const gai_block *block;
    int found = 0;
    gai_lock_on(&pool->lock);
    for (block_pool = pool->block_pools; block_pool && !found; block_pool = block_pool->next) {
        if (only ? block_pool != only : !gai_block_pool_is_collected(block_pool)) continue;
        for (block = block_pool->free.oldest; block && !found; block = block->newer)
            found = gai_block_is_whole(block) && block->marks && block->bytes >= bytes;
    }
    gai_lock_off(&pool->lock);
    return found;
}

/* cuMemFree waits for the device. Waiting beforehand completes the marks, so that more segments can be released. */
static void gai_job_finish(gai_job *job, const gai_block_pool *only, size_t bytes)
{
    if (gai_pool_has_unfinished(job->pool, only, bytes))
        gai_job_refused(job, gai_job_wait_failed(job, NULL, gai_pool_wait(job->pool)), "cuMemFreeHost");
}

/* Releases idle segments as PyTorch's garbage_collection_threshold does. */
static int gai_step_torch_collect(gai_job *job)
{
    galloc_pool *pool = job->pool;
    size_t excess = gai_torch_excess(pool);
    if (!(pool->config.gc_threshold > 0)) return gai_job_leave_out(job, "gc_threshold is 0");
    if (!excess || !gai_job_can_wait_for_devices(job)) return 0;
    gai_job_finish(job, NULL, 0);
    if (!job->error) gai_torch_collect(pool, excess);
    return gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL);
}

/* Allocates a new segment for the request and files it in the block pool of the stream. As in PyTorch the size of the
   segment is not reduced to fit a limit. */
static int gai_step_torch_grow(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block *block = NULL;
    gai_block_pool *block_pool;
    size_t bytes = gai_job_segment(job);
    CUresult result;
    job->refusal = CUDA_SUCCESS;
    if (gai_pool_is_still(pool)) return gai_job_leave_out(job, "on_map or on_unmap is running");
    if (!gai_budget_take(pool, bytes)) return 0;
    gai_lock_on(&pool->lock);
    block_pool = gai_block_pool_for(pool, job->params.stream, gai_is_small(&job->params));
    if (block_pool) block_pool->awaited++;
    gai_lock_off(&pool->lock);
    if (!block_pool) gai_budget_give(pool, bytes);
    result = block_pool ? gai_segment_fixed(pool, bytes, 0, &job->site, &block) : GAI_NO_HOST_MEMORY;
    gai_lock_on(&pool->lock);
    if (block_pool) block_pool->awaited--;
    if (!result) {
        gai_segment_enter_block_pool(pool, block->segment, block_pool);
        job->grown = 1;
        gai_job_take_at_block_pool(job, gai_block_file(pool, block, 0));
    } else if (block_pool) {
        gai_block_pool_end(pool, block_pool);
    }
    gai_lock_off(&pool->lock);
    gai_job_refused(job, result, "cuMemAlloc");
    return gai_job_is_done(job);
}

/* Releases the stream's own oversize segments (max_split_size), which smaller requests cannot use, and allocates
   anew. */
static int gai_step_torch_oversize(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block_pool *block_pool;
    if (!pool->oversize) return gai_job_leave_out(job, "max_split_size is none");
    if (!gai_job_can_wait_for_devices(job)) return 0;
    gai_lock_on(&pool->lock);
    block_pool = gai_block_pool_of(pool, job->params.stream, gai_is_small(&job->params));
    gai_lock_off(&pool->lock);
    if (!block_pool) return 0;
    gai_job_finish(job, block_pool, pool->config.max_split_size);
    if (gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL)) return 1;
    gai_block_pool_release_oversize(pool, block_pool, job->params.bytes);
    return gai_step_torch_grow(job);
}

/* Waits for all streams, which returns every free block to its block pool with its marks complete. */
static int gai_step_torch_wait(gai_job *job)
{
    if (!gai_job_can_wait_for_devices(job)) return 0;
    gai_job_refused(job, gai_job_wait_failed(job, NULL, gai_pool_wait(job->pool)), "cuMemFreeHost");
    gai_pool_count(job->pool, GAI_COUNT_WAIT);
    return gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL);
}

/* Releases all segments that are entirely free. */
static int gai_step_torch_empty(gai_job *job)
{
    if (!gai_job_can_wait_for_devices(job)) return 0;
    gai_pool_count(job->pool, GAI_COUNT_RETRY);
    (void)gai_pool_release(job->pool, SIZE_MAX);
    return gai_step_torch_grow(job) || gai_job_search(job, GAI_REACH_ALL);
}

/* PyTorch's allocator knows no other pools, so these two steps come after PyTorch's own. */
static int gai_job_torch_serve(gai_job *job)
{
    return gai_job_search(job, GAI_REACH_ALL) || gai_step_torch_grow(job);
}

static int gai_step_torch_borrow(gai_job *job) { return gai_job_borrow(job, GAI_BORROW_IDLE, gai_job_torch_serve); }

static int gai_step_torch_borrow_last(gai_job *job)
{
    return gai_job_borrow(job, gai_job_borrowing(job), gai_job_torch_serve);
}

/* PyTorch's order. */
static const gai_ladder_step gai_torch_ladder[GALLOC_REPORT_STEPS] = {
    {"use memory whose work is complete", 1, gai_step_torch_poll},
    {"use a segment of a stream that is gone", 1, gai_step_torch_adopt},
    {"collect idle memory", 0, gai_step_torch_collect},
    {"create a segment", 1, gai_step_torch_grow},
    {"return oversize segments and create one", 0, gai_step_torch_oversize},
    {"wait for the device", 0, gai_step_torch_wait},
    {"return all cached segments and create one", 0, gai_step_torch_empty},
    {"use idle memory of other pools", 0, gai_step_torch_borrow},
    {"use idle memory of other pools, with a wait", 0, gai_step_torch_borrow_last},
};

/* ---- report and check ---- */

/* A block of another stream's block pool is stranded even when its work has completed. A block pool whose streams and
   graphs are gone counts as usable. */
static void gai_torch_survey(gai_survey *survey, const galloc_pool *pool)
{
    const gai_block_pool *block_pool;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        gai_stream *stream = block_pool->stream;
        if (stream == survey->stream || !block_pool->streams) gai_survey_set(survey, &block_pool->free);
        else if (!stream || block_pool->captured) survey->report->graph_bytes += block_pool->free.bytes;
        else gai_survey_strand(survey, stream, block_pool->free.bytes);
    }
}

/* Checks that a free block is in a set that its block pool allows, and is coalesced. Once the stream of the block pool
   is gone, the marks do not determine the set. */
static int gai_check_at_block_pool(galloc_pool *pool, const gai_block *block)
{
    const gai_block_pool *block_pool = block->segment->block_pool;
    if (block->kind != GAI_FREE) return block->kind == GAI_SLOT;
    if (!block_pool || (block->set != &pool->mixed && block->set != &block_pool->free)) return 1;
    if (gai_block_is_at_block_pool(block) && gai_block_is_at_block_pool(block->next)) return 1;
    return block_pool->stream && block->set != gai_block_pool_set(pool, block);
}

/* Checks the equations above gai_block_pool, and compares the statistics with what is found. Segments lost in a reset,
   and those that the driver did not take back, are not counted. */
static int gai_check_block_pool(galloc_pool *pool, const gai_block_pool *block_pool)
{
    galloc_torch_stats found, *stats = &pool->torch_stats;
    const gai_segment *segment;
    const gai_block *block;
    const gai_stream *stream;
    size_t segments = 0, streams = 0;
    int broken = 0;
    memset(&found, 0, sizeof found);
    for (stream = pool->streams; stream; stream = stream->next)
        streams += stream->block_pool[block_pool->small] == block_pool;
    for (segment = pool->segments; segment; segment = segment->next) {
        segments += segment->block_pool == block_pool;
        if (!segment->block_pool || segment->block_pool->small != block_pool->small) continue;
        gai_torch_move(&found.segment, block_pool->small, 1, 1, 0);
        gai_torch_move(&found.reserved_bytes, block_pool->small, segment->bytes, 1, 0);
        for (block = segment->first; block; block = block->next) {
            if (block->kind == GAI_USED) {
                gai_torch_move(&found.allocated_bytes, block_pool->small, block->bytes, 1, 0);
                gai_torch_move(&found.allocation, block_pool->small, 1, 1, 0);
                gai_torch_move(&found.requested_bytes, block_pool->small, (size_t)block->requested, 1, 0);
            }
            if (block->kind != GAI_FREE || block->set == &pool->mixed || gai_block_is_whole(block)) continue;
            gai_torch_move(&found.inactive_split, block_pool->small, 1, 1, 0);
            gai_torch_move(&found.inactive_split_bytes, block_pool->small, block->bytes, 1, 0);
        }
    }
#define GAI_TORCH_DIFFERS(field)                                                                       \
    (block_pool->small ? stats->field.small_pool.current != found.field.small_pool.current                   \
                 : stats->field.large_pool.current != found.field.large_pool.current)
    broken += GAI_TORCH_DIFFERS(segment) + GAI_TORCH_DIFFERS(reserved_bytes) + GAI_TORCH_DIFFERS(allocation);
    broken += GAI_TORCH_DIFFERS(allocated_bytes) + GAI_TORCH_DIFFERS(requested_bytes);
    broken += GAI_TORCH_DIFFERS(inactive_split) + GAI_TORCH_DIFFERS(inactive_split_bytes);
    broken += stats->active_bytes.all.current != stats->allocated_bytes.all.current + pool->mixed.bytes;
    return broken + (segments != block_pool->segments) + (streams != block_pool->streams) +
           (!segments && !streams && !block_pool->awaited);
}

/* ---- the table ---- */

static int gai_check_torch(galloc_pool *pool)
{
    const gai_block_pool *block_pool;
    int broken = 0;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        broken += gai_check_block_pool(pool, block_pool);
    return broken;
}

static void gai_variant_torch(gai_variant *variant)
{
    variant->route = GAI_ROUTE_LONG;
    variant->no_caches = 1;
    variant->no_events = 1; /* no other stream uses memory of a block pool */
    variant->low = 1;      /* PyTorch always takes the low end of a free block */
    variant->ladder = gai_torch_ladder;
    variant->file = gai_block_file_block_pool;
    variant->unfiled = gai_torch_unfiled;
    variant->search = gai_job_search_block_pool;
    variant->count = gai_torch_count;
    variant->resized = gai_torch_count_resized;
    variant->segment_ends = gai_segment_leave_block_pool;
    variant->stream_ends = gai_stream_leave_block_pools;
    variant->capture_ended = gai_torch_capture_ended;
    variant->survey = gai_torch_survey;
    variant->check_block = gai_check_at_block_pool;
    variant->check = gai_check_torch;
    variant->end = gai_torch_end;
}

#endif /* GALLOC_NO_PYTORCH */

/* ==== BACKENDS ==================================================================================================== */
/* >>backends */

/* With backend:cudaMalloc and backend:cudaMallocAsync: each block is one allocation of the driver, which is freed once
   the work on the block is complete, by cudaMallocAsync in stream order where it can be. The state changes under
   `paging` and `lock`. No driver call is made while `lock` is held. GALLOC_NO_BACKENDS leaves the section out. May call
   check and all sections before it.

   To add a backend:
     GALLOC_BACKEND_...   its number; gai_keys: its word, the highest number, the valid values; gai_left_out: a row
     GALLOC_DRIVER_CALLS and the functions in >>cuda: what it calls of the driver
     gai_config_circumstances and the rules of gai_config_say_idle: the settings that it ignores
     gai_variant_...      here: a function that fills its table, mostly on top of gai_variant_cuda_malloc;
                          gai_variant_choose calls it
     gai_mapping_undo_fixed frees every fixed segment by cuMemFree: memory of another source needs a branch there
     gai_job_supply_given, gai_pool_close   name the driver's function for messages
     lost_on_reset        (gai_pool_begin_variant) says that the memory goes with the context; is that so?
     variant.freed, .alloc, .refresh   are also read as "is cudaMallocAsync": look at their uses
     gai_pool_lose_context, if it has a handle that ends with the context
     ON BACKENDS, galloc_config.backend, docs/settings.md, tests
   Marks, search, the ladder and the free stay as they are. Another source of pages has no hook: see gai_mapping_do.
   variant.alloc runs under `paging`. If it calls the program it must release that first, as gai_pool_tell_all does. */

#if !defined(GALLOC_NO_BACKENDS)

/* ---- the driver's pool ---- */

/* Creates the driver's memory pool, with the settings of the pool that have a counterpart there. */
static CUresult gai_driver_pool_new(galloc_pool *pool)
{
    static const struct { CUmemPool_attribute name; int reuse; } ways[] = {
        {CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, GALLOC_REUSE_COMPLETED},
        {CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, GALLOC_REUSE_FOLLOWED},
        {CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, GALLOC_REUSE_WAIT}};
    cuuint64_t threshold = pool->config.release_threshold == SIZE_MAX ? UINT64_MAX : pool->config.release_threshold;
    size_t i, share;
    CUmemPoolProps properties;
    CUmemoryPool made = NULL;
    CUresult result;
    gai_lock_on(&gai_locks.budget);
    share = gai_pool_share(pool);
    gai_lock_off(&gai_locks.budget);
    memset(&properties, 0, sizeof properties);
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = pool->config.device;
#if CUDART_VERSION >= 12020
    if (share < pool->device_bytes) /* it grows in 2 MiB steps; 0 means no limit */
        properties.maxSize = gai_max(gai_down(share, GAI_FIXED_SMALL), GAI_FIXED_SMALL);
#endif
    (void)share;
    result = GAI_CALL(pool, pool_create, MemPoolCreate, (&made, &properties));
    if (result) return result;
    result = GAI_CALL(pool, pool_set, MemPoolSetAttribute, (made, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    for (i = 0; i < sizeof ways / sizeof ways[0] && !result; i++) {
        int allowed = (pool->config.reuse & ways[i].reuse) != 0;
        result = GAI_CALL(pool, pool_set, MemPoolSetAttribute, (made, ways[i].name, &allowed));
    }
    if (result) (void)GAI_CALL(pool, pool_destroy, MemPoolDestroy, (made));
    else pool->driver_pool = made;
    return result;
}

/* cudaMallocAsync: the driver's pool holds `held` bytes, of which `coming` are for a block under way.
   kept = held - bytes of all blocks. */
static void gai_stat_held(galloc_pool *pool, size_t held, size_t coming)
{
    galloc_stat *reserved = &pool->stats.reserved;
    size_t before = reserved->current, blocks = before - pool->kept - pool->outside + coming;
    gai_stat_kept(pool, gai_left(held, blocks));
    if (reserved->current + coming > before) reserved->total += reserved->current + coming - before;
    reserved->peak = gai_max(reserved->peak, reserved->current + coming);
    reserved->total -= coming;
}

/* cudaMallocAsync: sets the charge to all that is held. 0: a limit forbids that, even if it is no more than before.
   [lock] */
static int gai_budget_raise(galloc_pool *pool, size_t total)
{
    size_t others;
    int allowed;
    gai_lock_on(&gai_locks.budget);
    others = pool->budget->held - pool->taken;
    allowed = total <= gai_pool_share(pool) && others + total <= pool->budget->limit;
    if (allowed) pool->taken = total;
    if (allowed) pool->budget->held = others + total;
    gai_lock_off(&gai_locks.budget);
    return allowed;
}

/* Sets the charge to what the pool holds, regardless of limits. [lock] */
static void gai_budget_settle(galloc_pool *pool)
{
    gai_budget *budget = pool->budget;
    gai_lock_on(&gai_locks.budget);
    budget->held += pool->stats.reserved.current - pool->taken;
    pool->taken = pool->stats.reserved.current;
    budget->most = gai_max(budget->most, budget->held);
    gai_lock_off(&gai_locks.budget);
}

#define GAI_NOT_SAID SIZE_MAX

/* Bytes that the driver's pool holds; GAI_NOT_SAID if the driver does not tell. */
static size_t gai_driver_pool_held(galloc_pool *pool)
{
    cuuint64_t held = 0;
    CUmemPool_attribute name = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    if (!pool->driver_pool) return GAI_NOT_SAID;
    if (GAI_CALL(pool, pool_get, MemPoolGetAttribute, (pool->driver_pool, name, &held))) return GAI_NOT_SAID;
    return (size_t)held;
}

/* Updates `kept` and `reserved` to what the driver's pool holds. [paging] */
static void gai_pool_ask_held(galloc_pool *pool)
{
    size_t held = gai_driver_pool_held(pool);
    if (held == GAI_NOT_SAID) return;
    gai_lock_on(&pool->lock);
    gai_stat_held(pool, held, 0);
    gai_budget_settle(pool);
    gai_stat_cached(pool);
    gai_lock_off(&pool->lock);
}

/* Trims the driver's pool to `less` bytes less than it is known to hold. [paging] */
static void gai_driver_pool_cut(galloc_pool *pool, size_t less)
{
    size_t held;
    if (!pool->driver_pool) return;
    gai_lock_on(&pool->lock);
    held = pool->stats.reserved.current - pool->outside;
    gai_lock_off(&pool->lock);
    gai_pool_note(pool, GAI_CALL(pool, pool_trim, MemPoolTrimTo, (pool->driver_pool, gai_left(held, less))));
    gai_pool_ask_held(pool);
}

/* Allocates from the driver's pool. A capture gets memory by cudaMalloc, which its graph owns as it does with the other
   backends: a node would allocate again with each launch, and only while the graph is there could anybody free that.
   So does the legacy stream while a blocking stream is captured. The context of a default stream must be current. */
static CUresult gai_async_alloc(galloc_pool *pool, gai_segment *segment, CUdeviceptr *addr, size_t bytes,
                                const gai_site *site)
{
    gai_scope scope;
    CUresult result;
    segment->outside = site->capture_forbids;
    if (segment->outside) return GAI_CALL(pool, mem_alloc, MemAlloc, (addr, bytes));
    result = pool->driver_pool ? CUDA_SUCCESS : gai_driver_pool_new(pool);
    if (!result) result = gai_scope_enter(&scope, site->context);
    if (result) return result;
    result = GAI_CALL(pool, pool_alloc, MemAllocFromPoolAsync, (addr, bytes, pool->driver_pool, site->handle));
    gai_scope_leave(&scope);
    return result;
}

/* Frees memory in the order of the stream at `site`. A trim of the driver's pool waits for this position. */
static CUresult gai_async_free(galloc_pool *pool, CUdeviceptr addr, const gai_site *site)
{
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, site->context);
    if (result) return result;
    result = GAI_CALL(pool, pool_free, MemFreeAsync, (addr, site->handle));
    gai_scope_leave(&scope);
    if (result) return result;
    gai_lock_on(&pool->lock);
    site->stream->handed = gai_stream_stamp(site->stream);
    gai_lock_off(&pool->lock);
    return CUDA_SUCCESS;
}

/* Frees a block whose making failed. The driver's pool may have grown for it beyond a limit, so it is trimmed to what
   it held before. Work queued on the stream before the block can delay that: until then it counts as held. */
static CUresult gai_async_take_back(galloc_pool *pool, CUdeviceptr addr, const gai_site *site)
{
    CUresult result;
    if (site->capture_forbids) return GAI_CALL(pool, mem_free, MemFree, (addr));
    result = gai_async_free(pool, addr, site);
    if (!result) gai_driver_pool_cut(pool, 0);
    return result;
}

/* Charges the growth of the driver's pool to the budget, since only now it is known; an estimate if the driver does not
   tell. */
static CUresult gai_async_charge(galloc_pool *pool, gai_segment *segment, size_t bytes)
{
    size_t held;
    int allowed;
    if (segment->outside) return CUDA_SUCCESS;
    held = gai_driver_pool_held(pool);
    gai_lock_on(&pool->lock);
    if (held == GAI_NOT_SAID)
        held = pool->stats.reserved.current - pool->outside + gai_left(bytes, pool->kept);
    allowed = gai_budget_raise(pool, held + pool->outside);
    gai_lock_off(&pool->lock);
    return allowed ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; /* the driver refused nothing */
}

/* The block is counted together with what it leaves of `kept`, so that nobody sees one without the other. `taken` is
   what was charged. [paging, lock] */
static void gai_async_charged(galloc_pool *pool, gai_segment *segment)
{
    if (segment->outside) pool->outside += segment->bytes;
    else gai_stat_held(pool, pool->taken - pool->outside, segment->bytes);
}

/* Memory that returns to the driver's pool (cudaMallocAsync) stays in `reserved`, which does not change even for a
   moment. 0: the segment does not belong to that pool. [lock] */
static int gai_async_keep(galloc_pool *pool, gai_segment *segment)
{
    gai_page *page = segment->whole->page;
    galloc_pages *pages = pool->stats.pages, *of_its_size = &pages[gai_page_class(page->bytes)];
    if (segment->lost) return 0;
    if (segment->outside) pool->outside -= segment->bytes;
    if (segment->outside) return 0;
    of_its_size->count--;
    of_its_size->bytes -= page->bytes;
    pages[0].bytes += page->bytes;
    pool->kept += page->bytes;
    return 1;
}

/* ---- blocks of the driver ---- */

/* As gai_job_take_fixed. Work queued on the job's stream may still use memory of cudaMallocAsync: if the job has no
   host memory to take it, the block gets a mark of that stream. */
static void gai_job_take_given(gai_job *job, gai_block *block)
{
    gai_stream *stream = job->params.stream;
    gai_job_take_fixed(job, block);
    if (job->got || !stream || stream->capture || !job->pool->variant.freed) return;
    gai_set_remove(block);
    gai_block_stamp_own(job->pool, block, stream);
    (void)gai_block_file(job->pool, block, 0);
}

/* Takes the bytes from the budget. The driver's pool may hold them already (`kept`), so for it only the headroom is
   checked, and gai_segment_fixed settles the budget afterwards. What it keeps above a limit goes first; if it cannot
   serve the request, as it cannot serve a captured one, so much goes as the limit lacks. */
static int gai_pool_may_ask(gai_job *job, size_t bytes)
{
    galloc_pool *pool = job->pool;
    size_t kept, above;
    int outside = job->site.capture_forbids, replaces = outside || job->overgrown;
    if (!pool->variant.charge) return gai_budget_take(pool, bytes);
    above = gai_pool_lacks(pool, replaces && !pool->config.throw_on_cudamalloc_oom ? bytes : 0);
    if (above) gai_driver_pool_cut(pool, above);
    if (outside) return gai_budget_take(pool, bytes);
    gai_lock_on(&pool->lock);
    kept = pool->kept;
    gai_lock_off(&pool->lock);
    return !gai_pool_lacks(pool, gai_left(bytes, kept));
}

/* Allocates one block from the driver: the bytes requested, so that a memory checker knows where it ends. With room the
   room's rounded bytes are allocated, and slack is added for an alignment above 512. */
static void gai_job_supply_given(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block *block = NULL;
    CUresult result = GAI_NO_HOST_MEMORY;
    size_t slack = job->params.alignment - GAI_UNIT, bytes = job->params.bytes + slack;
    int whole = job->params.room_is_memory || job->params.bytes - job->params.requested >= GAI_UNIT; /* or a guard */
    size_t given = whole ? job->params.bytes : job->params.requested;
    int promised, asked = 0;
    gai_lock_on(&pool->lock);
    promised = gai_slab_need(&pool->marks, 1);
    pool->marks.promised += (size_t)promised; /* for the job itself: gai_job_take_given */
    gai_lock_off(&pool->lock);
    if (promised) {
        asked = gai_pool_may_ask(job, bytes);
        if (asked) result = gai_segment_fixed(pool, bytes, given + slack, &job->site, &block);
        job->overgrown |= result == CUDA_ERROR_NOT_READY;
        gai_lock_on(&pool->lock);
        pool->marks.promised--;
        if (block) gai_job_take_given(job, block);
        gai_lock_off(&pool->lock);
    }
    if (promised && !asked) return;
    gai_job_refused(job, result, pool->variant.alloc && !job->site.capture_forbids ? "cuMemAllocFromPoolAsync"
                                                                                  : "cuMemAlloc");
}

/* Gives freed blocks of a backend back to the driver that no unfinished work uses, least recently freed first, until
   `wanted` bytes are given or there are no more. no_wait: see gai_page_filter. */
static void gai_pool_return_given(galloc_pool *pool, size_t wanted, int no_wait)
{
    gai_batch batch = {NULL, NULL};
    gai_block *block, *newer;
    size_t given = 0;
    gai_lock_on(&pool->lock);
    for (block = pool->common.oldest; block && given < wanted; block = newer) {
        gai_segment *segment = block->segment;
        newer = block->newer;
        if (block->bytes != segment->bytes) continue; /* the free rest beside a used block, left by alignment */
        if (segment->outside && no_wait) continue;
        gai_set_remove(block);
        block->kind = GAI_BUSY;
        gai_history_unmapped(pool, segment->whole);
        segment->whole->page->current = NULL;
        gai_batch_add(&batch, segment->whole, block);
        given += segment->bytes;
    }
    gai_lock_off(&pool->lock);
    gai_batch_undo(pool, &batch);
}

/* The same, and trims the driver's pool by as much. Returns by how much less is held. */
static size_t gai_pool_release_given(galloc_pool *pool, size_t wanted, int no_wait)
{
    size_t before = gai_pool_held(pool);
    gai_pool_retry(pool); /* what is stuck until its stream's work is done */
    /* All freed blocks return to the driver's pool first, since only the memory there can be trimmed. */
    gai_pool_return_given(pool, pool->variant.refresh ? SIZE_MAX : wanted, no_wait);
    if (pool->variant.refresh) {
        gai_pool_ask_held(pool);
        gai_driver_pool_cut(pool, wanted);
    }
    return gai_left(before, gai_pool_held(pool));
}

/* Returns the block of a pool with another backend that contains an address. [lock] */
static gai_block *gai_given_around(const galloc_pool *pool, uintptr_t addr)
{
    const gai_segment *segment = pool->segments;
    gai_block *block = gai_block_at(addr);
    if (block && gai_load_pointer(&block->pool) == pool && block->addr == addr) return block;
    while (segment && (addr - segment->addr >= segment->bytes || (segment->lost && !gai_segment_is_used(segment))))
        segment = segment->next;
    block = segment ? segment->first : NULL;
    while (block && addr - block->addr >= block->bytes) block = block->next;
    return block;
}

/* ---- free in stream order ---- */

/* The driver's pool may hand a stream memory that the stream itself is still using. The block therefore also waits for
   the stream that it was allocated on, whichever stream frees it. */
static void gai_block_stamp_first(galloc_pool *pool, gai_block *block, const gai_mark *marks)
{
    if (block->segment->outside) return;
    for (; marks; marks = marks->next)
        if (marks->stream == block->stream) return;
    gai_block_stamp(pool, block, gai_mark_of(pool, block->stream));
}

/* Returns whether the driver can free a block in stream order: only the freeing stream has used it. */
static int gai_block_is_drivers(const gai_block *block, const gai_site *sites, size_t n)
{
    const gai_segment *segment = block->segment;
    return n == 1 && !segment->lost && !segment->outside && !block->recorded_uses && !block->marks &&
           !sites->capture_forbids && block->stream == sites->stream;
}

/* Merges all blocks of a driver-allocated segment, one used block and the free ones beside it, into one busy block. */
static gai_block *gai_block_gather(galloc_pool *pool, gai_block *block)
{
    gai_block *at, *next;
    gai_block_untake(pool, block);
    gai_marks_end(pool, &block->recorded_uses);
    gai_marks_end(pool, &block->marks);
    for (at = block->segment->first; at; at = at->next) {
        if (at == block) continue;
        gai_set_remove(at);
        gai_marks_end(pool, &at->marks);
        at->kind = GAI_BUSY;
    }
    for (at = block->segment->first; (next = at->next) != NULL;) gai_block_absorb(pool, at, next);
    return at;
}

/* Removes a claimed block and its segment after the driver has freed them. [lock] */
static void gai_block_give_up(galloc_pool *pool, gai_block *block)
{
    gai_mapping *whole = block->segment->whole;
    gai_history_block(pool, GAI_FREED, block, gai_thread.stack);
    gai_history_unmapped(pool, whole);
    gai_stat_unused(pool, block->bytes, (size_t)block->requested);
    pool->stats.blocks.current--;
    pool->stats.frees++;
    whole->page->current = NULL;
    whole->block = gai_block_gather(pool, block);
    gai_mapping_settle(pool, whole, GAI_RELEASED);
}

/* Makes the driver free a claimed block in the order of the stream that alone has used it. Returns whether it has; else
   nothing has changed, and the block is freed by marks. [lock], released meanwhile. */
static int gai_async_block_free(galloc_pool *pool, gai_block *block, const gai_site *sites, size_t n)
{
    gai_segment *segment = block->segment;
    CUcontext context = pool->context;
    unsigned long long id = pool->context_id;
    CUresult result = CUDA_ERROR_INVALID_CONTEXT; /* of a dead one: the address may be reused */
    if (!gai_block_is_drivers(block, sites, n)) return 0;
    if (pool->trace) gai_trace_freed(pool, block, NULL); /* before another thread gets the address */
    segment->traced = pool->trace != NULL;
    gai_lock_off(&pool->lock);
    if (gai_context_health(context, id) == GAI_ALIVE)
        result = gai_async_free(pool, (CUdeviceptr)segment->whole->addr, sites);
    if (result) gai_pool_note(pool, result);
    gai_lock_on(&pool->lock);
    if (result || segment->lost) return 0;
    gai_block_give_up(pool, block);
    return 1;
}

/* Creates the driver's pool for backend:cudaMallocAsync. */
static CUresult gai_async_begin(galloc_pool *pool)
{
    int pools = 0;
    CUresult result =
        gai_cu.DeviceGetAttribute(&pools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, pool->config.device);
    if (!result && !pools) result = CUDA_ERROR_NOT_SUPPORTED;
    return result ? result : gai_driver_pool_new(pool);
}

/* Gives the driver's pool back. */
static CUresult gai_async_close(galloc_pool *pool)
{
    CUresult result = CUDA_SUCCESS;
    if (pool->driver_pool) result = GAI_CALL(pool, pool_destroy, MemPoolDestroy, (pool->driver_pool));
    if (!result) pool->driver_pool = NULL;
    return result;
}

static void gai_variant_cuda_malloc(gai_variant *variant)
{
    variant->one_each = 1;
    variant->supply = gai_job_supply_given;
    variant->give_back = gai_pool_return_given;
    variant->release = gai_pool_release_given;
    variant->around = gai_given_around;
}

static void gai_variant_cuda_malloc_async(gai_variant *variant)
{
    gai_variant_cuda_malloc(variant);
    variant->begin = gai_async_begin;
    variant->close = gai_async_close;
    variant->alloc = gai_async_alloc;
    variant->dealloc = gai_async_take_back;
    variant->charge = gai_async_charge;
    variant->charged = gai_async_charged;
    variant->settle = gai_budget_settle;
    variant->keep = gai_async_keep;
    variant->refresh = gai_pool_ask_held;
    variant->free = gai_async_block_free;
    variant->freed = gai_block_stamp_first;
}

#endif /* GALLOC_NO_BACKENDS */

/* ==== POOLED ====================================================================================================== */
/* >>pooled */

/* With strategy:pooled: small requests are rounded to size classes and served from slots, which are free blocks that
   keep the size of their class. Slots are cut in runs, and coalesced to free blocks when all slots of a run are free.
   Everything runs under the pool's lock. GALLOC_NO_POOLED leaves the section out. May call check and all sections
   before it. */

#if !defined(GALLOC_NO_POOLED)

#define GAI_SLOT_DIVISIONS 8

/* The bin of the slots of one size. */
static GAI_INLINE gai_block **gai_slot_bin(gai_set *set, gai_bin bin)
{
    return &set->bins[GAI_ROWS + bin.row][bin.column];
}

/* Inserts a slot; searches for blocks do not visit its rows. */
static void gai_slot_insert(gai_set *set, gai_block *block)
{
    gai_bin bin = gai_bin_of(block->bytes);
    gai_block **head = gai_slot_bin(set, bin);
    block->row = (unsigned char)(GAI_ROWS + bin.row);
    block->column = (unsigned char)bin.column;
    block->prev_bin = NULL;
    block->next_bin = *head;
    if (*head) (*head)->prev_bin = block;
    *head = block;
    set->columns[block->row] |= (uint32_t)1 << bin.column;
}

/* Files a slot. Slots never merge here. */
static gai_block *gai_block_file_slot(galloc_pool *pool, gai_block *block)
{
    gai_set *set = gai_set_of(pool, block->marks);
    block->kind = GAI_SLOT;
    block->set = set;
    set->bytes += block->bytes;
    gai_slot_insert(set, block);
    gai_age_insert(set, block);
    pool->freed_slots++;
    return block;
}

static gai_block *gai_block_file_pooled(galloc_pool *pool, gai_block *block, int all)
{
    return block->slot ? gai_block_file_slot(pool, block) : gai_block_file_merged(pool, block, all);
}

/* Finds a slot that the stream may take at once: the one that was freed last. */
static gai_block *gai_find_slot(galloc_pool *pool, gai_stream *stream, size_t bytes)
{
    gai_bin bin = gai_bin_of(bytes);
    gai_block *block = stream ? *gai_slot_bin(&stream->free, bin) : NULL;
    gai_stream *other;
    if (!block) block = *gai_slot_bin(&pool->common, bin);
    if (block || !stream || !stream->capture) return block;
    for (other = pool->streams; other && !block; other = other->next)
        if (other != stream && gai_stream_is_ordered(stream, other)) block = *gai_slot_bin(&other->free, bin);
    return block;
}

/* Searches slots first; a block that is larger is cut into a run. */
static void gai_job_search_slots(gai_job *job, enum gai_reach reach)
{
    gai_found found = {NULL, 0};
    if (job->params.slot) found.block = gai_find_slot(job->pool, job->params.stream, job->params.bytes);
    if (found.block) found.at = found.block->addr;
    else found = gai_find(job, reach);
    gai_job_take(job, found);
}

/* Limits of a run: number of slots and bytes. Measured: docs/design.md. */
#define GAI_RUN_SLOTS 16
#define GAI_RUN_BYTES GAI_MIB

/* The number of slots to cut at once from `at` on. It reserves the host memory for them. 0: there is none. */
static size_t gai_run_need(galloc_pool *pool, const gai_block *block, uintptr_t at, size_t bytes)
{
    size_t i, n = gai_min(GAI_RUN_SLOTS, gai_min(GAI_RUN_BYTES, block->addr + block->bytes - at) / bytes);
    size_t marks = gai_marks_count(block->marks);
    if (n < 2) return (size_t)gai_block_need(pool, block, at, bytes);
    for (i = 1; i < n; i++)
        if (!gai_block_map_need(at + i * bytes)) n = 1;
    if (n > 1 && gai_block_need(pool, block, at, n * bytes) && gai_slab_need(&pool->blocks, n + 2) &&
        gai_slab_need(&pool->marks, (n + 2) * marks + 3))
        return n;
    return (size_t)gai_block_need(pool, block, at, bytes);
}

/* Allocates a slot: a free one, or the first of a run that is cut out of a free block. NULL: no host memory, nothing
   changed. */
static gai_block *gai_slot_take(galloc_pool *pool, gai_block *block, uintptr_t at, const gai_params *params)
{
    size_t i, n;
    uint64_t freed_slots = pool->freed_slots;
    if (!params->slot || block->kind == GAI_SLOT) return gai_block_take(pool, block, at, params);
    n = gai_run_need(pool, block, at, params->bytes);
    if (!n) return NULL;
    block = gai_block_cut_out(pool, block, at, n * params->bytes, GAI_USED);
    for (i = n - 1; i > 0; i--) {
        gai_block *slot = gai_block_split(pool, block, at + i * params->bytes, GAI_FREE);
        slot->slot = GAI_RUN_SLOT;
        (void)gai_block_file(pool, slot, 0);
    }
    /* The slots of a new run do not count as freed: there is nothing to coalesce yet. */
    pool->freed_slots = freed_slots;
    block->slot = GAI_RUN_SLOT | GAI_RUN_FIRST;
    gai_block_assign(pool, block, params->stream, params->requested, params->tag);
    return block;
}

/* The short path of a miss. It leaves the stream cache as it is, because its blocks are slots of other sizes. */
static gai_block *gai_slot_take_near(galloc_pool *pool, const gai_site *site, size_t bytes, size_t requested,
                                     uint32_t tag)
{
    gai_stream *stream = site->stream;
    gai_block *block;
    gai_stream_note(stream, site);
    block = gai_find_slot(pool, stream, bytes);
    if (block) block = gai_block_take_first(pool, block, bytes, stream, requested, tag);
    if (block) gai_block_count_near(pool, block);
    gai_stream_release_near(pool, stream, site, 0);
    return block;
}

/* Returns whether the block is the first of a run whose slots are all free. Only the last slot of a run can grow, after
   which it is none any more, so that what remains of a run has its first slot. */
static int gai_run_is_idle(const gai_block *block)
{
    /* A run ends before the next first slot, or before a block that is no slot. */
    if (!(block->slot & GAI_RUN_FIRST)) return 0;
    do {
        if (block->kind != GAI_SLOT) return 0;
        block = block->next;
    } while (block && block->slot && !(block->slot & GAI_RUN_FIRST));
    return 1;
}

/* Makes the slots of such a run ordinary free blocks. Returns the last block that contains them. */
static gai_block *gai_run_coalesce(galloc_pool *pool, gai_block *block)
{
    gai_block *next = block;
    do {
        block = next;
        gai_set_remove(block);
        block->slot = 0;
        block = gai_block_file(pool, block, 0);
        next = block->next;
    } while (next && next->kind == GAI_SLOT && !(next->slot & GAI_RUN_FIRST));
    return block;
}

/* Looking at all runs of slots takes time for each block. At a miss it is done once at least 1/16 as many slots have
   become free as there are blocks. */
#define GAI_COALESCE_PART 16

/* Coalesces all runs whose slots are all free. [lock] */
static void gai_pool_coalesce(galloc_pool *pool, int all)
{
    gai_segment *segment;
    gai_block *block;
    if (pool->freed_slots <= (all ? 0 : pool->stats.blocks.current / GAI_COALESCE_PART)) return;
    pool->freed_slots = 0;
    for (segment = pool->segments; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next)
            if (block->kind == GAI_SLOT && gai_run_is_idle(block)) block = gai_run_coalesce(pool, block);
}

/* Checks that a slot has the size of a class, that a free slot is in its set, and that no block of kind GAI_FREE is a
   slot. */
static int gai_check_slot(galloc_pool *pool, const gai_block *block)
{
    int broken = block->slot && (block->bytes != gai_rounded(pool, block->bytes));
    if (block->kind == GAI_SLOT) broken += !block->slot + (block->set != gai_set_of(pool, block->marks));
    return broken + (block->kind == GAI_FREE && block->slot);
}

/* More divisions than GAI_COLUMNS would put two classes into one bin. */
static CUresult gai_pooled_begin(galloc_pool *pool)
{
    unsigned divisions = pool->config.roundup_power2_divisions[0];
    gai_lock_on(&pool->lock);
    pool->divisions = divisions < 2 ? GAI_SLOT_DIVISIONS : gai_min(divisions, GAI_COLUMNS);
    gai_lock_off(&pool->lock);
    return CUDA_SUCCESS;
}

static void gai_variant_pooled(gai_variant *variant)
{
    variant->file = gai_block_file_pooled;
    variant->search = gai_job_search_slots;
    variant->take = gai_slot_take;
    variant->take_near = gai_slot_take_near;
    variant->coalesce = gai_pool_coalesce;
    variant->check_block = gai_check_slot;
    variant->begin = gai_pooled_begin;
}

#endif /* GALLOC_NO_POOLED */

/* ==== HEURISTIC =================================================================================================== */
/* >>heuristic */

/* The tuner of strategy:heuristic, which changes overhead and growth while the program runs. Runs under `paging` and
   the pool's lock. GALLOC_NO_HEURISTIC leaves the section out. May call check and all sections before it. */

#if !defined(GALLOC_NO_HEURISTIC)

/* The tuner runs at misses only. It compares memory with driver calls at one exchange rate: 1 % of the peak of live
   bytes is worth the time to create that peak once in pages of 64 MiB. On an H200, moving a page costs about a quarter
   of creating and releasing a page of 64 MiB. Only this ratio matters. Its rules:
   gai_tune_pressure     memory is nearly used up: no overhead
   gai_tune_growth       the program only grows: large pages
   gai_tune_creations    pages are created too often: more overhead
   gai_tune_moves        pages move too often: more overhead */
#define GAI_TUNE_MOVES 4.0       /* moves that cost as much as creating one page of 64 MiB */
#define GAI_TUNE_PAGES 64        /* a smaller heap counts as this many pages: its moves are too few to judge */
#define GAI_TUNE_OVERHEAD_MAX 100u /* percent */
#define GAI_TUNE_CREATIONS 2.25  /* creations of small pages that cost as much as one of 64 MiB, without the part of
                                    the cost that grows with the size */
#define GAI_TUNE_CREATED 16      /* in pages of 64 MiB: a smaller heap does not tune creations */
#define GAI_TUNE_CREATED_MAX 50u /* thousandths: the overhead does not rise above this to save creations */
#define GAI_TUNE_CHURN 1.125     /* bytes requested / peak: up to this ratio the program only grows */
#define GAI_TUNE_PRESSED 0.9375  /* of the capacity */
#define GAI_TUNE_EASED 0.75

/* Applies new settings and records the reason. Tuning stops when the list of decisions is full. */
static void gai_pool_decide(galloc_pool *pool, double overhead, size_t growth, const char *reason)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision *decision = &tuning->decisions[tuning->decided++];
    decision->overhead = tuning->overhead = overhead;
    decision->growth = tuning->growth = growth;
    tuning->watching = tuning->decided < GALLOC_DECISIONS;
    tuning->moves = tuning->created = 0;
    decision->live = gai_pool_live(pool);
    decision->held = pool->stats.reserved.current;
    decision->reason = reason;
    gai_note("heuristic: overhead %u.%04u, growth %zu MiB from now on, at %zu bytes live, %zu held: %s",
             (unsigned)overhead, (unsigned)(overhead * 10000 + 0.5) % 10000, growth / GAI_MIB, decision->live,
             decision->held, reason);
}

/* When the driver refuses memory, or above 15/16 of the capacity, the overhead drops to 0, so that all memory is
   usable: small pages, and moves before new pages. Below 3/4 of the capacity the former overhead returns. */
static int gai_tune_pressure(galloc_pool *pool, int refused)
{
    gai_tuning *tuning = &pool->tuning;
    double held = (double)pool->stats.reserved.current, most = (double)gai_pool_capacity(pool);
    if (!tuning->pressed && (refused || held > most * GAI_TUNE_PRESSED)) {
        tuning->pressed = 1;
        tuning->eased = tuning->overhead;
        gai_pool_decide(pool, 0, 0, refused ? "the device has no more memory" : "memory is nearly used up");
    } else if (tuning->pressed && !refused && held < most * GAI_TUNE_EASED) {
        tuning->pressed = 0;
        gai_pool_decide(pool, tuning->eased, pool->config.growth, "there is memory again");
    }
    return tuning->pressed;
}

/* A program that only grows fills every page, so larger pages save driver calls. When it begins to free, pages return
   to the configured growth. */
static void gai_tune_growth(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    double held = (double)pool->stats.reserved.current;
    size_t page;
    if (tuning->churned || tuning->overhead < GAI_OVERHEAD_FRUGAL) return;
    if (tuning->asked > GAI_TUNE_CHURN * (double)pool->live_peak) {
        tuning->churned = 1;
        if (tuning->growth == pool->config.growth) return;
        gai_pool_decide(pool, tuning->overhead, pool->config.growth, "blocks come and go: pages that can move");
        return;
    }
    page = gai_power_below(gai_max((size_t)(held * tuning->overhead / 2), 1));
    page = gai_min(page, 4 * GAI_PAGE_MAX);
    if (page <= gai_max(GAI_PAGE_MAX, tuning->growth)) return;
    gai_pool_decide(pool, tuning->overhead, page, "the program only grows: large pages will be full");
}

/* Returns by how many percent the held bytes exceed the peak of live bytes. */
static unsigned gai_percents_above(const galloc_pool *pool)
{
    size_t held = pool->stats.reserved.current, peak = gai_max(pool->live_peak, 1);
    return held > peak ? (unsigned)((double)(held - peak) * 100 / (double)peak) : 0;
}

/* The rule of rent or buy: when the moves have cost as much as the memory that would have avoided them, the overhead
   rises by its own value, or by 1 % if it is 0. The rise starts from what is held already, which costs nothing more. */
static void gai_tune_moves(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    double peak = (double)pool->live_peak, most = (double)gai_pool_capacity(pool);
    double pages = (double)gai_max(pool->live_peak / GAI_PAGE_MAX, GAI_TUNE_PAGES);
    unsigned now = (unsigned)(tuning->overhead * 100 + 0.5), held = gai_percents_above(pool), from, to;
    from = now > held ? now : held;
    to = from + (now ? now : 1);
    if (to > GAI_TUNE_OVERHEAD_MAX) to = GAI_TUNE_OVERHEAD_MAX;
    if (to <= now || peak * (1 + to / 100.0) > most * GAI_TUNE_EASED) return;
    if ((double)tuning->moves < GAI_TUNE_MOVES * pages * (to > from ? to - from : 1)) return;
    gai_pool_decide(pool, to / 100.0, tuning->growth, "moves have cost more than the memory that spares them");
}

/* The page size follows from the overhead: more overhead gives larger and fewer pages. When creations have cost twice
   what the overhead is worth, it rises by a quarter. A configured page size or a limit turns this rule off. */
static void gai_tune_creations(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    double pages = (double)(pool->live_peak / GAI_PAGE_MAX), rent = (double)tuning->created / GAI_TUNE_CREATIONS;
    unsigned now = (unsigned)(tuning->overhead * 1000 + 0.5);
    if (tuning->growth || gai_pool_capacity(pool) < pool->device_bytes || pages < GAI_TUNE_CREATED) return;
    if (tuning->overhead < GAI_OVERHEAD_FRUGAL || now >= GAI_TUNE_CREATED_MAX) return;
    if (rent < 2 * tuning->overhead * 100 * pages) return;
    gai_pool_decide(pool, (double)gai_min(now + now / 4, GAI_TUNE_CREATED_MAX) / 1000.0, tuning->growth,
                    "pages are created for more than the memory that spares them");
}

/* After a miss. `refused`: the driver reported that it has no more memory. At most one rule decides, since a decision
   resets what the later rules count. [paging, lock] */
static void gai_pool_tune(galloc_pool *pool, size_t asked, int refused)
{
    if (!pool->tuning.watching) return;
    pool->tuning.asked += (double)asked;
    if (gai_tune_pressure(pool, refused) || !pool->tuning.watching) return;
    gai_tune_growth(pool);
    gai_tune_creations(pool);
    gai_tune_moves(pool);
}

static CUresult gai_tuned_begin(galloc_pool *pool)
{
    pool->tuning.watching = pool->config.expandable_segments;
    return CUDA_SUCCESS;
}

static void gai_variant_heuristic(gai_variant *variant)
{
    variant->tune = gai_pool_tune;
    variant->begin = gai_tuned_begin;
}

#endif /* GALLOC_NO_HEURISTIC */

/* ==== POOLS ======================================================================================================= */
/* >>pools */

/* Pools begin here, and tell callbacks of the mappings they have. The global lock guards the lists of pools. May call
   all sections before it. */

/* ---- creation ---- */

/* A config that galloc_config_default has initialized never has 0 here. */
static int gai_config_is_begun(const galloc_config *config) { return config->large_segment_size != 0; }

static cudaError_t gai_config_check(const galloc_config *config, int *devices)
{
    char message[GAI_MESSAGE];
    CUresult result = gai_cu.DeviceGetCount(devices);
    if (result) return gai_driver_failed(result, "cuDeviceGetCount");
    if (config->device < -1 || config->device >= *devices)
        return gai_fail(cudaErrorInvalidDevice, "device %d does not exist: must be -1 or below %d, the number of "
                        "devices", config->device, *devices);
    if (!gai_config_is_right(config, message))
        return gai_fail(cudaErrorInvalidValue, "config: %s%s", message, gai_config_is_begun(config) ? "" :
                        "; start from what galloc_config_default() returns");
    return cudaSuccess;
}

static cudaError_t gai_current_device(int *device)
{
    CUresult result = gai_cu.CtxGetDevice(device);
    if (result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
        cudaError_t error = gai_bind_context();
        if (error) return error;
        result = gai_cu.CtxGetDevice(device);
    }
    return result ? gai_driver_failed(result, "cuCtxGetDevice") : cudaSuccess;
}

/* Fills the table of the variant that the settings name; that of a native pool is empty. */
static void gai_variant_choose(gai_variant *variant, const galloc_config *config)
{
#if !defined(GALLOC_NO_BACKENDS)
    if (config->backend == GALLOC_BACKEND_CUDA_MALLOC) gai_variant_cuda_malloc(variant);
    if (config->backend == GALLOC_BACKEND_CUDA_MALLOC_ASYNC) gai_variant_cuda_malloc_async(variant);
#endif
    if (config->backend) return;
#if !defined(GALLOC_NO_PYTORCH)
    if (config->like == GALLOC_LIKE_PYTORCH && !config->expandable_segments) gai_variant_torch(variant);
#endif
    if (config->like) return;
#if !defined(GALLOC_NO_POOLED)
    if (config->strategy == GALLOC_STRATEGY_POOLED) gai_variant_pooled(variant);
#endif
#if !defined(GALLOC_NO_HEURISTIC)
    if (config->strategy == GALLOC_STRATEGY_HEURISTIC) gai_variant_heuristic(variant);
#endif
    (void)variant;
}

/* Begins the variant, and sets the flags that follow from the settings and from what the device supports. */
static CUresult gai_pool_begin_variant(galloc_pool *pool)
{
    const galloc_config *config = &pool->config;
    CUresult result = CUDA_SUCCESS;
    gai_lock_on(&pool->lock);
    gai_variant_choose(&pool->variant, config);
    gai_lock_off(&pool->lock);
    if (pool->variant.begin) result = pool->variant.begin(pool);
    gai_lock_on(&pool->lock);
    pool->oversize = !config->expandable_segments && !config->backend && config->max_split_size != SIZE_MAX;
    pool->lost_on_reset = !config->expandable_segments;
    gai_pool_choose_rounding(pool);
    pool->caches_off = (pool->variant.no_caches || config->stats_exact) | gai_pool_debugs_all(pool) << 3;
    pool->watch_at = pool->look_at = pool->stats.mallocs + (config->debug ? 0 : INT64_MAX);
    pool->caches_off |= pool->tool << 4;
    pool->special |= pool->tool ? GAI_ROUTE_TOOL : 0;
    gai_pool_route_history(pool);
    pool->mixed.counted = pool->variant.unfiled != NULL;
    if (pool->variant.no_events) pool->config.reuse = 0; /* it has no effect, and galloc_pool_config says so */
    gai_lock_off(&pool->lock);
    return result;
}

/* Determines the page size. If the device supports GPUDirect RDMA of mapped pages, all pages use the size that RDMA
   needs, whether they are created for RDMA or not. */
static CUresult gai_pool_open_pages(galloc_pool *pool)
{
    CUmemAllocationProp properties = gai_page_properties(pool);
    int can = 0;
    pool->rdma = !gai_cu.DeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                            pool->config.device) && can;
    properties.allocFlags.gpuDirectRDMACapable = (unsigned char)pool->rdma;
    return gai_cu.MemGetAllocationGranularity(&pool->granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}

/* Queries the device and retains its primary context until the pool ends. */
static CUresult gai_pool_open(galloc_pool *pool)
{
    CUdevice device = pool->config.device;
    int mapping = 0;
    CUresult result = device < GAI_DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    if (!result) result = gai_cu.DevicePrimaryCtxRetain(&pool->context, device);
    if (result) return result;
    pool->budget = &gai_process.budgets[device];
    result = gai_cu.CtxGetId(pool->context, &pool->context_id);
    if (!result) result = gai_cu.DeviceTotalMem(&pool->device_bytes, device);
    if (!result)
        result = gai_cu.DeviceGetAttribute(&mapping, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
    if (!mapping || pool->config.backend) pool->config.expandable_segments = 0;
#if defined(GALLOC_NVTX)
    if (!result) gai_pool_find_tool(pool);
#endif
    if (!result) result = gai_pool_begin_variant(pool);
    pool->granularity = GAI_FIXED_SMALL;
    if (!result && pool->config.expandable_segments) result = gai_pool_open_pages(pool);
    pool->config.gpu_direct_rdma &= pool->rdma;
    if (!gai_is_power_of_two(pool->granularity)) pool->granularity = 2 * gai_power_below(pool->granularity);
    pool->granularity = gai_max(pool->granularity, GAI_FIXED_SMALL);
    if (result) (void)gai_cu.DevicePrimaryCtxRelease(device);
    return result;
}

/* Returns the memory of an ended pool, or allocates new memory. NULL: host memory is missing. */
static galloc_pool *gai_pool_memory(void)
{
    galloc_pool *pool;
    gai_lock_on(&gai_locks.global);
    pool = gai_process.ended_pools;
    if (pool) gai_process.ended_pools = pool->next;
    gai_lock_off(&gai_locks.global);
    if (pool) return pool;
    pool = (galloc_pool *)GALLOC_MALLOC(sizeof *pool);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->users = GAI_ENDED;
    gai_lock_init(&pool->lock);
    gai_lock_init(&pool->paging);
    gai_lock_init(&pool->recording);
    gai_lock_on(&gai_locks.global);
    pool->known = gai_process.known_pools;
    gai_store_pointer(&gai_process.known_pools, pool);
    gai_lock_off(&gai_locks.global);
    return pool;
}

/* Initializes a pool, and keeps the stream states and descriptors of the former pool in this memory: a thread with
   an old handle may still read them. [lock] */
static void gai_pool_init(galloc_pool *pool, const galloc_config *config)
{
    gai_stream *unused = pool->unused_streams;
    gai_slab blocks = pool->blocks, mappings = pool->mappings;
    memset(&pool->variant, 0, offsetof(galloc_pool, users) - offsetof(galloc_pool, variant));
    pool->unused_streams = unused;
    pool->blocks = blocks;
    pool->mappings = mappings;
    pool->config = *config;
    if (config->backend) pool->config.stats_exact = 1; /* closes all stream caches */
    if (config->backend) pool->config.debug = 0;
    gai_predictor_begin(&pool->plan_predictor, pool->plan_keys, GAI_PLAN_KEYS);
    gai_predictor_begin(&pool->event_predictor, pool->event_keys, GAI_EVENT_KEYS);
    pool->common.next = &pool->mixed;
    pool->parking.calm_most = 8;
    pool->collector.look = UINT64_MAX;
    pool->tuning.overhead = config->overhead;
    pool->tuning.growth = config->growth;
    pool->blocks.size = sizeof(gai_block);
    pool->marks.size = sizeof(gai_mark);
    pool->pages.size = sizeof(gai_page);
    pool->mappings.size = sizeof(gai_mapping);
    pool->events.size = sizeof(gai_event);
    pool->waits.size = sizeof(gai_wait);
    pool->positions.size = sizeof(gai_graph_position);
}

/* Empties a stream cache without returning its blocks, which have been released by other means. */
static void gai_cache_clear(gai_cache *cache)
{
    gai_latch_on(&cache->latch);
    cache->open = 0;
    cache->unconfirmed = cache->orphans = NULL;
    cache->unconfirmed_blocks = cache->unconfirmed_bytes = cache->mallocs = cache->live_in = cache->live_out = 0;
    cache->blocks = cache->bytes = cache->large = cache->allocated_in = 0;
    cache->filled = cache->busy_frees = 0;
    gai_latch_off(&cache->latch);
}

/* Ends all stream states. Their memory stays valid, because threads may have entries that point to it. */
static void gai_streams_end(galloc_pool *pool)
{
    while (pool->streams) {
        gai_stream *stream = pool->streams;
        pool->streams = stream->next;
        stream->life = 0; /* thread cache entries must not match it */
        gai_cache_clear(&stream->cache);
        if (gai_stream_is_unknown(stream)) continue;
        stream->next = pool->unused_streams;
        pool->unused_streams = stream;
    }
}

/* Frees the pool's host memory, except what threads with old handles may still read. [lock] */
static void gai_pool_free_host(galloc_pool *pool)
{
    gai_history_entry *ring;
    gai_capture *capture;
    while (pool->segments) {
        gai_segment_hide(pool, pool->segments);
        gai_segment_end(pool, pool->segments);
    }
    if (pool->variant.end) pool->variant.end(pool);
    for (capture = pool->captures; capture; capture = capture->next) capture->gone = 1;
    gai_pool_forget_captures(pool);
    gai_list_free(pool->graphs);
    pool->graphs = NULL;
    gai_streams_end(pool);
    gai_slab_reset(&pool->blocks);
    gai_slab_reset(&pool->mappings);
    gai_slab_end(&pool->marks);
    gai_slab_end(&pool->pages);
    gai_slab_end(&pool->events);
    gai_slab_end(&pool->waits);
    gai_slab_end(&pool->positions);
    ring = gai_history_begin(pool, NULL, 0);
    if (ring) GALLOC_FREE(ring);
    pool->trace = NULL;
    gai_trace_want(1);
    if (pool->guards.checks) GALLOC_FREE(pool->guards.checks);
    pool->guards.checks = NULL;
}

/* Ends a pool. Its memory is kept for the next pool. */
static void gai_pool_discard(galloc_pool *pool)
{
    gai_lock_on(&pool->lock);
    gai_pool_free_host(pool);
    gai_lock_off(&pool->lock);
    gai_lock_on(&gai_locks.global);
    pool->next = gai_process.ended_pools;
    gai_process.ended_pools = pool;
    gai_lock_off(&gai_locks.global);
}

/* Closes all logs. No pool writes them any more. */
static void gai_traces_end(void)
{
    gai_trace *trace, *next;
    gai_lock_on(&gai_locks.trace);
    for (trace = (gai_trace *)gai_process.traces; trace; trace = next) {
        next = trace->next;
        gai_trace_write(trace);
        (void)fclose(trace->file);
        GALLOC_FREE(trace);
    }
    gai_store_pointer(&gai_process.traces, NULL);
    gai_lock_off(&gai_locks.trace);
}

/* Frees the memory that was kept for late readers. No pool exists, and no thread is inside. [global lock] */
static void gai_pools_free(void)
{
    galloc_pool *pool = (galloc_pool *)gai_process.known_pools;
    gai_store_pointer(&gai_process.known_pools, NULL);
    gai_process.ended_pools = NULL;
    while (pool) {
        galloc_pool *next = (galloc_pool *)pool->known;
        gai_streams_end(pool);
        while (pool->unused_streams) {
            gai_stream *stream = pool->unused_streams;
            pool->unused_streams = stream->next;
            GALLOC_FREE(stream->memory);
        }
        gai_slab_end(&pool->blocks);
        gai_slab_end(&pool->mappings);
        gai_lock_end(&pool->lock);
        gai_lock_end(&pool->paging);
        gai_lock_end(&pool->recording);
        GALLOC_FREE(pool);
        pool = next;
    }
    if (gai_process.depot) GALLOC_FREE(gai_process.depot);
    gai_store_pointer(&gai_process.depot, NULL);
    gai_traces_end();
}

/* Turns the collector on if gc_threshold or gc_age needs it. */
static void gai_pool_start_collector(galloc_pool *pool)
{
    gai_collector *collector = &pool->collector;
    pool->collects = pool->config.expandable_segments && (pool->config.gc_threshold > 0 || gai_pool_has_age(pool));
    collector->patience = GAI_REST_LEAST;
    collector->stride = 1;
    if (pool->collects) collector->look = 0;
}

/* Gives the pool the next handle of its memory. Handles repeat after sizeof(galloc_pool) pools, see
   galloc_pool_destroy. */
static void gai_pool_name(galloc_pool *pool)
{
    pool->handle = (galloc_pool *)(void *)((char *)pool + pool->lives);
    pool->lives = (pool->lives + 1) % sizeof *pool;
    gai_store_pointer(&pool->key, pool->is_default ? NULL : (void *)pool->handle);
}

/* Publishes a new pool. If another thread has published the default pool first, returns that one instead. */
static galloc_pool *gai_pool_publish(galloc_pool *pool)
{
    void **place = pool->is_default ? &gai_process.default_pool[pool->config.device] : NULL;
    galloc_pool *first;
    gai_lock_on(&gai_locks.global);
    first = place ? (galloc_pool *)*place : NULL;
    if (!first) {
        gai_pool_name(pool);
        gai_budget_join(pool);
        pool->next = gai_process.pools;
        gai_process.pools = pool;
        if (pool->variant.around) gai_store(&gai_process.given_pools, gai_load(&gai_process.given_pools) + 1);
        gai_store(&pool->users, 0);
        if (place) gai_store_pointer(place, pool);
    }
    gai_lock_off(&gai_locks.global);
    return first;
}

/* Begins an empty history of so many entries, or ends it (0). Calls that stream caches serve cannot be noted, so all
   caches are flushed and shut while there is one. [no lock] */
static cudaError_t gai_pool_remember(galloc_pool *pool, size_t entries)
{
    gai_stream *stream;
    gai_history_entry *ring = NULL;
    if (entries > GAI_HISTORY_MOST)
        return gai_fail(cudaErrorInvalidValue, "%zu entries: a history has at most %d", entries, GAI_HISTORY_MOST);
    if (entries) ring = (gai_history_entry *)GALLOC_MALLOC(entries * sizeof *ring);
    if (entries && !ring)
        return gai_fail(cudaErrorMemoryAllocation, "no host memory for a history of %zu entries", entries);
    gai_lock_on(&pool->lock);
    ring = gai_history_begin(pool, ring, entries);
    gai_pool_route_history(pool);
    for (stream = pool->streams; stream; stream = stream->next) gai_cache_set(pool, stream);
    if (entries) gai_pool_flush(pool);
    gai_lock_off(&pool->lock);
    if (ring) GALLOC_FREE(ring);
    return cudaSuccess;
}

/* Has the history keep so many frames of stacks from now on. [no lock] */
static cudaError_t gai_pool_keep_stacks(galloc_pool *pool, size_t frames)
{
    cudaError_t error = cudaSuccess;
    if (frames > GAI_STACK_MOST)
        return gai_fail(cudaErrorInvalidValue, "%zu frames: a stack has at most %d", frames, GAI_STACK_MOST);
    if (frames) error = gai_depot_begin();
    if (error) return error;
    gai_lock_on(&pool->lock);
    pool->frames = frames;
    gai_pool_route_history(pool);
    gai_lock_off(&pool->lock);
    return cudaSuccess;
}

/* Begins a log, in place of a plain file with that name. No link is followed: the file is a new one. With the lock of
   logs. */
static cudaError_t gai_trace_begin(const char *path)
{
    static const char head[] = "Thread,Time,Action,Pointer,Size,Stream,Pool,More\n";
    gai_trace *trace;
    size_t n = strlen(path) + 1;
    if (gai_path_refused(path)) return cudaErrorOperatingSystem;
    trace = (gai_trace *)GALLOC_MALLOC(sizeof *trace + n);
    if (!trace) return gai_fail(cudaErrorMemoryAllocation, "no host memory for a log");
    memset(trace, 0, offsetof(gai_trace, text));
    (void)remove(path);
    trace->file = fopen(path, "wbx");
    if (!trace->file) {
        cudaError_t error = gai_file_failed(path, "opened", errno);
        GALLOC_FREE(trace);
        return error;
    }
    (void)setvbuf(trace->file, NULL, _IONBF, 0); /* a child of fork has nothing to write */
    trace->path = (char *)(trace + 1);
    memcpy(trace->path, path, n);
    memcpy(trace->text[0], head, sizeof head - 1);
    trace->filled[0] = sizeof head - 1;
    trace->began = GALLOC_CLOCK();
    trace->next = (gai_trace *)gai_process.traces;
    gai_store_pointer(&gai_process.traces, trace);
    return cudaSuccess;
}

/* Has a new pool write the log that GALLOC_CONF names, if any. If that cannot begin the pool does without. [no lock] */
static void gai_pool_join_trace(galloc_pool *pool)
{
    char path[GAI_PATH_BYTES];
    gai_callback_frame saved;
    gai_trace *trace;
    cudaError_t error = cudaSuccess;
    int in = 0;
    if (!gai_conf_path("trace", pool->config.device, path, sizeof path)) return;
    gai_callback_begin(&in, &saved);
    gai_lock_on(&gai_locks.trace);
    for (trace = (gai_trace *)gai_process.traces; trace && strcmp(trace->path, path); trace = trace->next) continue;
    if (!trace) error = gai_trace_begin(path);
    if (!trace && !error) trace = (gai_trace *)gai_process.traces;
    if (trace) pool->traced = ++trace->pools;
    gai_lock_off(&gai_locks.trace);
    gai_lock_on(&pool->lock);
    pool->trace = trace;
    gai_pool_route_history(pool);
    gai_lock_off(&pool->lock);
    (void)gai_end("trace", error);
    gai_callback_end(&in, &saved);
}

/* Creates a pool. *out is the existing default pool if another thread has created it meanwhile. Creating a context
   takes long. [no lock] */
static cudaError_t gai_pool_new(galloc_pool **out, const galloc_config *config, int is_default)
{
    CUresult result;
    galloc_pool *pool;
    int devices = 0;
    cudaError_t error = gai_config_check(config, &devices);
    if (error) return error;
    pool = gai_pool_memory();
    if (!pool) return gai_fail(cudaErrorMemoryAllocation, "no host memory for a pool");
    gai_lock_on(&pool->lock);
    gai_pool_init(pool, config);
    gai_lock_off(&pool->lock);
    error = gai_pool_remember(pool, (size_t)config->history);
    if (!error) error = gai_pool_keep_stacks(pool, (size_t)config->history_stacks);
    if (!error && config->device == -1) error = gai_current_device(&pool->config.device);
    if (!error) {
        result = gai_pool_open(pool);
        if (result) error = gai_driver_failed(result, "opening the device");
    }
    if (error) {
        gai_pool_discard(pool);
        return error;
    }
    gai_pool_join_trace(pool);
    pool->is_default = is_default;
    pool->one_context = !pool->config.stream_check && devices == 1;
    gai_lock_on(&pool->lock);
    gai_pool_start_collector(pool);
    gai_lock_off(&pool->lock);
    *out = gai_pool_publish(pool);
    if (!*out) {
        *out = pool;
        gai_guards_ready(pool);
        return cudaSuccess;
    }
    if (pool->variant.close) (void)pool->variant.close(pool);
    (void)gai_cu.DevicePrimaryCtxRelease(pool->config.device);
    gai_pool_discard(pool);
    if (gai_thread.message_is_new == GAI_NOTE) gai_thread.message_is_new = 0; /* the other thread logs it */
    return cudaSuccess;
}

/* Removes the pool from its limits and from all lists, so that no call finds it. */
static void gai_pool_unlink(galloc_pool *pool)
{
    galloc_pool **at = &gai_process.pools;
    gai_budget_leave(pool);
    gai_lock_on(&gai_locks.global);
    while (*at != pool) at = &(*at)->next;
    *at = pool->next;
    if (pool->variant.around) gai_store(&gai_process.given_pools, gai_load(&gai_process.given_pools) - 1);
    if (pool->is_default) gai_store_pointer(&gai_process.default_pool[pool->config.device], NULL);
    gai_generation_end();
    gai_lock_off(&gai_locks.global);
}

/* Returns the settings in effect. [lock] */
static void gai_pool_read_config(const galloc_pool *pool, galloc_config *config)
{
    gai_lock_on(&gai_locks.budget);
    *config = pool->config;
    gai_lock_off(&gai_locks.budget);
    config->overhead = pool->tuning.overhead;
    config->growth = pool->tuning.growth;
    config->history = pool->history.size;
    config->history_stacks = pool->frames;
    if (pool->tuning.frozen) config->strategy = GALLOC_STRATEGY_CACHING;
}

/* ---- callbacks on existing mappings ---- */

static gai_range gai_mapping_range(const gai_mapping *mapping)
{
    gai_range range = {mapping->addr, mapping->bytes};
    return range;
}

/* Lists all ranges that are mapped and are not being unmapped. Returns their number. [paging, lock] */
static size_t gai_pool_ranges(const galloc_pool *pool, gai_range *array)
{
    const gai_segment *segment;
    const gai_block *block;
    size_t n = 0;
    for (segment = pool->segments; segment; segment = segment->next) {
        for (block = segment->lost ? NULL : segment->first; block; block = block->next) {
            uintptr_t at = block->addr, end = block->addr + block->bytes;
            if (block->kind == GAI_ALIAS) array[n++] = gai_mapping_range(block->alias);
            while (gai_block_is_mapped(block) && at < end) {
                const gai_mapping *mapping = gai_page_at(at);
                if (mapping->addr >= block->addr) array[n++] = gai_mapping_range(mapping);
                at = mapping->addr + mapping->bytes;
            }
        }
    }
    return n;
}

/* Calls on_map for all mapped ranges with `paging` released; `walking` prevents unmapping meanwhile. Each range has a
   descriptor of its own. Returns 0 if host memory is missing. */
static int gai_pool_walk(galloc_pool *pool, const galloc_callbacks *call, uint64_t *settings)
{
    gai_range *ranges;
    gai_callback_frame saved;
    size_t n, i;
    gai_lock_on(&pool->lock);
    ranges = (gai_range *)GALLOC_MALLOC((pool->mappings.made + 1) * sizeof *ranges);
    n = ranges ? gai_pool_ranges(pool, ranges) : 0;
    if (ranges) pool->callbacks = *call;
    if (ranges) *settings = ++pool->settings;
    gai_lock_off(&pool->lock);
    if (!ranges) return 0;
    pool->walking = 1;
    pool->telling++;
    gai_lock_off(&pool->paging);
    gai_callback_begin(&gai_thread.in_mapping, &saved);
    for (i = 0; i < n; i++) call->on_map(pool->handle, (void *)ranges[i].addr, ranges[i].bytes, call->user);
    gai_callback_end(&gai_thread.in_mapping, &saved);
    gai_lock_on(&pool->paging);
    pool->telling--;
    pool->walking = 0;
    GALLOC_FREE(ranges);
    return 1;
}

/* Waits for calls of on_map and on_unmap about this pool in other threads, which another pool's borrowing may have
   started. A thread inside a callback does not wait for itself. [paging] */
static void gai_pool_await_told(galloc_pool *pool)
{
    unsigned round;
    for (round = 0; pool->telling && !gai_thread.in_mapping; round++) {
        gai_lock_off(&pool->paging);
        gai_latch_rest(round);
        gai_lock_on(&pool->paging);
    }
}

/* Sets the callbacks of a pool. In the pool's context. [paging] */
static cudaError_t gai_pool_call(galloc_pool *pool, const galloc_callbacks *call, uint64_t *settings)
{
    gai_pool_await_told(pool);
    if (pool->telling)
        return gai_fail(cudaErrorNotPermitted, "called within on_map or on_unmap, while one of this pool runs");
    if (pool->variant.one_each && (call->on_map || call->on_unmap))
        return gai_fail(cudaErrorNotSupported, "on_map and on_unmap need backend:native, since other backends "
                        "map no pages");
    if (call->on_map)
        return gai_pool_walk(pool, call, settings)
                   ? cudaSuccess
                   : gai_fail(cudaErrorMemoryAllocation, "no host memory for a list of ranges");
    gai_lock_on(&pool->lock);
    pool->callbacks = *call;
    *settings = ++pool->settings;
    gai_lock_off(&pool->lock);
    return cudaSuccess;
}

/* Returns whether an on_oom or on_reject of functions before the given ones is under way. [no lock] */
static int gai_pool_still_asks(galloc_pool *pool, uint64_t settings)
{
    const gai_asking *asking;
    gai_lock_on(&pool->lock);
    for (asking = pool->asking; asking && asking->settings >= settings;) asking = asking->next;
    gai_lock_off(&pool->lock);
    return asking != NULL;
}

/* Waits for the on_oom and on_reject that have been replaced, in other threads. A thread inside a callback waits for
   none: another thread's callback could wait for it in turn. [no lock] */
static void gai_pool_await_asked(galloc_pool *pool, uint64_t settings)
{
    unsigned round = 0;
    if (gai_thread.in_shortage || gai_thread.in_mapping) return;
    while (gai_pool_still_asks(pool, settings)) gai_latch_rest(round++);
}

/* ==== POOL END ==================================================================================================== */
/* >>poolend */

/* Trimming, and the end of a pool. A call pins a pool to stay inside it: pool->users counts such calls, and a pool
   ends only when no other call is inside. No lock that other calls want is held while the device is waited for. May
   call all sections before it. */

/* Returns whether any recorded event was incomplete at the last poll. */
static int gai_pool_has_events_out(galloc_pool *pool)
{
    const gai_stream *stream;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream && !stream->recorded; stream = stream->next) continue;
    gai_lock_off(&pool->lock);
    return stream != NULL;
}

/* Makes the stream for checks of the quarantine, if there is none. [lock], released meanwhile. */
static int gai_site_has_stream(galloc_pool *pool, gai_site *site)
{
    if (site->handle) return 1;
    gai_lock_off(&pool->lock);
    if (gai_cu.StreamCreate(&site->handle, CU_STREAM_NON_BLOCKING)) site->handle = NULL;
    gai_lock_on(&pool->lock);
    return site->handle != NULL;
}

/* Checks what is in quarantine, and frees it. `waits`: waits for the device before; otherwise blocks stay from the
   first one on whose marks are not known to be complete. Then waits for a copy from each block, on a stream for these
   copies alone. A copy that cannot be waited for is work on an unknown stream. Returns the number of blocks freed. In
   the pool's context. [paging] */
static size_t gai_pool_end_quarantine(galloc_pool *pool, int waits)
{
    gai_site site;
    size_t n, freed;
    gai_lock_on(&pool->lock);
    n = pool->guards.kept;
    gai_lock_off(&pool->lock);
    if (!n) return 0;
    memset(&site, 0, sizeof site);
    site.context = pool->context;
    site.own_context = 1;
    if (waits) (void)gai_pool_wait(pool);
    gai_lock_on(&pool->lock);
    for (freed = 0; freed < n && pool->guards.kept; freed++) {
        int can, checks;
        gai_block *block = pool->guards.oldest;
        gai_mark *mark = block->marks;
        while (mark && gai_mark_is_complete(mark)) mark = mark->next;
        if (mark && !waits) break;
        (void)gai_kept_pop(pool, &can);
        checks = can && !mark && gai_site_has_stream(pool, &site);
        pool->stats.unchecked += !checks;
        if (checks && gai_kept_check(pool, block, &site, 1))
            gai_block_stamp(pool, block, gai_mark_of(pool, gai_pool_unknown_streams(pool)));
        gai_block_put(pool, block);
    }
    gai_lock_off(&pool->lock);
    if (site.handle) (void)gai_cu.StreamDestroy(site.handle);
    gai_pool_sweep_lost(pool);
    return freed;
}

/* Releases unused pages until at most `keep` bytes remain. If too few are known to be complete, ends the quarantine,
   and then waits for the device. `synchronised`: waits only if no event is known to be incomplete. [paging], so nothing
   is created meanwhile. */
static cudaError_t gai_pool_shrink(galloc_pool *pool, size_t keep, int synchronised, size_t *released)
{
    CUresult result = CUDA_SUCCESS;
    size_t before;
    int ended = 0, waited = 0;
    if (pool->variant.refresh) pool->variant.refresh(pool);
    before = gai_pool_held(pool);
    gai_pool_sweep_lost(pool);
    gai_pool_retry(pool);
    *released = before - gai_pool_held(pool);
    gai_pool_poll(pool);
    gai_pool_limit_stale(pool);
    for (;;) {
        size_t gone = 0, held = gai_pool_held(pool);
        if (held > keep) pool->replaceable = 0; /* less is to be held than when those pages were given back */
        if (held > keep) gone = gai_pool_release(pool, held - keep);
        *released += gone;
        if (held - gone <= keep) break;
        if (!ended++ && gai_pool_end_quarantine(pool, !synchronised)) continue;
        if (waited++ || (synchronised && gai_pool_has_events_out(pool))) break;
        result = gai_pool_wait(pool);
        gai_pool_count(pool, GAI_COUNT_WAIT);
    }
    gai_guards_look(pool);
    if (!result) return cudaSuccess;
    gai_pool_note(pool, result);
    return gai_driver_failed(result, "waiting for the device");
}

/* ---- the end of a pool ----

   gai_pool_part            releases memory while on_unmap can still be called
   gai_pool_shut_out        refuses new calls, and waits for the calls inside
   gai_pool_end_route       closes the stream caches and the short path, which do not check for the end of the pool
   gai_pool_close           releases the remaining memory, the addresses and the driver's pool
   gai_pool_unlink          removes the pool from its limits and lists, and invalidates all thread cache entries
   gai_pool_leave_streams   waits for calls that still record events, and destroys the events
   gai_pool_discard         keeps the host memory for the next pool */

/* Frees all reserved addresses, in which nothing is mapped any more. */
static CUresult gai_pool_unreserve(galloc_pool *pool)
{
    while (pool->segments) {
        CUresult result;
        gai_segment *segment = pool->segments;
        GAI_TELL(pool, gai_segment_untell(segment));
        result = GAI_CALL(pool, unreserve, MemAddressFree, ((CUdeviceptr)segment->addr, segment->bytes));
        if (result) return result;
        gai_lock_on(&pool->lock);
        gai_hole_unlink(pool, segment->first);
        pool->stats.addresses -= segment->bytes;
        gai_segment_end(pool, segment);
        gai_lock_off(&pool->lock);
    }
    return CUDA_SUCCESS;
}

/* Compares the last guards, and frees the memory that they were copied to. The pool holds no memory any more, so their
   work is complete. In the pool's context. [paging] */
static CUresult gai_guards_end(galloc_pool *pool)
{
    gai_guards *guards = &pool->guards;
    CUresult result = CUDA_SUCCESS;
    gai_guards_look(pool);
    if (guards->host) result = gai_pinned_free(pool, guards->host, pool->context, guards->context_id);
    gai_lock_on(&pool->lock);
    if (!result) gai_guards_lose(pool);
    gai_lock_off(&pool->lock);
    return result;
}

/* Releases all driver objects of the pool. In the pool's context; no block is in use. [paging] */
static cudaError_t gai_pool_close(galloc_pool *pool)
{
    gai_stream *stream;
    CUresult result;
    size_t gone;
    cudaError_t error = gai_pool_shrink(pool, 0, 0, &gone);
    if (error) return error;
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->silent)
            return gai_fail(cudaErrorUnknown, "cuCtxGetId: the driver does not say whether a stream's context exists");
    if (pool->stats.reserved.current > pool->kept && gai_pool_is_still(pool))
        return gai_fail(cudaErrorNotPermitted, "a pool with on_map or on_unmap cannot end within one of them: "
                        "it holds %zu bytes that are not unmapped there", pool->stats.reserved.current);
    if (pool->stats.reserved.current > pool->kept)
        return gai_fail(cudaErrorUnknown, "the pool of device %d still holds %zu bytes that the driver refused to "
                        "take back", pool->config.device, pool->stats.reserved.current);
    result = gai_pool_unreserve(pool);
    if (result) return gai_driver_failed(result, "cuMemAddressFree");
    result = gai_guards_end(pool);
    if (!result) result = gai_fence_drop(pool);
    if (result) return gai_driver_failed(result, "cuMemFreeHost");
    if (pool->variant.close) result = pool->variant.close(pool);
    if (result) return gai_driver_failed(result, "cuMemPoolDestroy");
    return cudaSuccess;
}

/* Returns whether the driver has shut down, which has freed all device memory. */
static int gai_pool_is_orphaned(const galloc_pool *pool)
{
    unsigned long long id = 0;
    return gai_is_driver_gone((CUresult)gai_load(&pool->broken)) ||
           gai_is_driver_gone(gai_cu.CtxGetId(pool->context, &id));
}

/* Returns an error if the program still holds blocks. */
static cudaError_t gai_pool_is_used(galloc_pool *pool)
{
    galloc_stats now;
    size_t blocks, bytes;
    gai_lock_on(&pool->lock);
    gai_stats_now(pool, &now);
    gai_lock_off(&pool->lock);
    blocks = now.blocks.current;
    bytes = now.live.current;
    if (!blocks) return cudaSuccess;
    return gai_fail(cudaErrorNotPermitted, "blocks of the pool of device %d are in use: %zu, of %zu bytes; free them "
                    "first", pool->config.device, blocks, bytes);
}

/* Returns an error if graphs own memory of the pool, which they may still use, so that it must not be unmapped. */
static cudaError_t gai_pool_is_captured(galloc_pool *pool)
{
    CUresult result = CUDA_SUCCESS;
    size_t bytes;
    if (gai_pool_await_graphs(pool, GAI_GRAPH_LOOKS_LAST, &result)) return cudaSuccess;
    gai_lock_on(&pool->lock);
    bytes = gai_pool_captured(pool);
    gai_lock_off(&pool->lock);
    return gai_fail(cudaErrorNotPermitted, "graphs own %zu bytes of the pool of device %d: destroy them and their "
                    "instances first", bytes, pool->config.device);
}

#define GAI_PARTINGS 8 /* attempts to release all memory of a pool that ends, while on_unmap may free blocks */

/* Releases the memory of a pool that is about to end, while on_unmap can still be called because no lock is held. What
   is in use then cannot be unmapped later: that is an error, also if it is freed at the next moment. */
static cudaError_t gai_pool_part(galloc_pool *pool)
{
    gai_scope scope;
    cudaError_t error = cudaSuccess;
    size_t gone = 1;
    int told, tries;
    gai_lock_on(&pool->lock);
    told = pool->callbacks.on_unmap != NULL;
    gai_lock_off(&pool->lock);
    if (!told || gai_pool_is_orphaned(pool) || gai_pool_enter(pool, &scope)) return cudaSuccess;
    if (!pool->is_default) error = gai_pool_is_used(pool);
    if (!error && !pool->is_default) error = gai_pool_is_captured(pool);
    /* A block that on_unmap frees may enter the quarantine and keep its page, until the next attempt. */
    for (tries = 0; !error && tries < GAI_PARTINGS && gone; tries++) {
        gone = 0;
        (void)gai_pool_shrink(pool, 0, 0, &gone);
    }
    if (!error) gai_pool_await_told(pool);
    gai_scope_leave(&scope);
    gai_lock_off(&pool->paging);
    return error;
}

/* Lets calls enter the pool again. */
static void gai_pool_let_in(galloc_pool *pool)
{
    uint64_t users = gai_load(&pool->users);
    while (!gai_swap(&pool->users, users, users & ~GAI_ENDED)) users = gai_load(&pool->users);
}

/* Refuses new calls and waits until this call is the only one inside. Fails if a block is allocated meanwhile, because
   the free of that block waits for this pool (gai_pool_around). */
static cudaError_t gai_pool_shut_out(galloc_pool *pool, int orphaned)
{
    cudaError_t error = cudaSuccess;
    uint64_t users;
    unsigned round;
    do {
        users = gai_load(&pool->users);
        if (users & GAI_ENDED || (users % GAI_USER_OF_ALL > 1 && (gai_thread.in_mapping || gai_thread.in_shortage)))
            return gai_fail(cudaErrorNotPermitted, "the pool is being destroyed by another thread, or is in use "
                            "by another call: the one that made this callback, or one on all pools");
    } while (!gai_swap(&pool->users, users, users | GAI_ENDED));
    for (round = 0; !error && gai_load(&pool->users) != (GAI_ENDED | 1); round++) {
        gai_latch_rest(round);
        error = orphaned ? cudaSuccess : gai_pool_is_used(pool);
    }
    if (error) gai_pool_let_in(pool);
    return error;
}

/* Closes the stream caches and the short path while a pool ends, because these do not check whether it has ended. */
static void gai_pool_end_route(galloc_pool *pool, int shut)
{
    gai_stream *stream;
    gai_lock_on(&pool->lock);
    pool->caches_off = (pool->caches_off & ~2) | shut << 1;
    pool->special = (pool->special & ~(uint64_t)GAI_ROUTE_ENDS) | (shut ? GAI_ROUTE_ENDS : 0);
    for (stream = pool->streams; stream; stream = stream->next) gai_cache_set(pool, stream);
    if (shut) gai_pool_flush(pool);
    gai_lock_off(&pool->lock);
}

/* Releases all memory of a pool without used blocks. A default pool with used blocks releases only what is unused.
   Calls no callback. */
static cudaError_t gai_pool_empty(galloc_pool *pool)
{
    gai_scope scope;
    size_t gone;
    cudaError_t error = gai_pool_enter(pool, &scope);
    if (error) return error;
    gai_pool_end_route(pool, 1);
    pool->walking = pool->callbacks.on_unmap != NULL;
    error = gai_pool_is_used(pool);
    if (!error) error = gai_pool_is_captured(pool);
    if (error && pool->is_default) (void)gai_pool_shrink(pool, 0, 0, &gone);
    if (!error) error = gai_pool_close(pool);
    if (error) gai_pool_end_route(pool, 0);
    pool->walking = 0;
    gai_scope_leave(&scope);
    gai_lock_off(&pool->paging);
    return error;
}

/* Invalidates the lives of all stream states, so that thread cache entries no longer match. Waits for calls that have
   released the lock to record an event, then destroys the events. */
static void gai_pool_leave_streams(galloc_pool *pool, int orphaned)
{
    gai_stream *stream;
    unsigned round = 0;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = stream->next) stream->life = 0;
    for (stream = pool->streams; stream;) {
        if (stream->busy) {
            gai_lock_off(&pool->lock);
            gai_latch_rest(round++);
            gai_lock_on(&pool->lock);
        } else {
            stream = stream->next;
        }
    }
    gai_lock_off(&pool->lock);
    for (stream = orphaned ? NULL : pool->streams; stream; stream = stream->next)
        gai_stream_drop_events(pool, stream, gai_stream_health(stream) != GAI_DEAD);
}

/* Ends a pool that this call is inside of; after an error the pool continues. If the driver is gone, only host memory
   is freed. It may wait for the device or for other threads. [no lock] */
static cudaError_t gai_pool_end(galloc_pool *pool)
{
    int orphaned = gai_pool_is_orphaned(pool);
    cudaError_t error = orphaned || pool->is_default ? cudaSuccess : gai_pool_is_used(pool);
    if (!error) error = gai_pool_shut_out(pool, orphaned);
    if (error) return error;
    if (!orphaned) error = gai_pool_empty(pool);
    if (error) {
        gai_pool_let_in(pool);
        return error;
    }
    gai_pool_unlink(pool);
    gai_pool_leave_streams(pool, orphaned);
    gai_store(&pool->users, GAI_ENDED);
    if (!orphaned) (void)gai_cu.DevicePrimaryCtxRelease(pool->config.device);
    gai_pool_discard(pool);
    return cudaSuccess;
}

/* ==== SNAPSHOT ================================================================================================== */
/* >>snapshot */

/* galloc_snapshot. The state of the heap is copied with `paging`, `lock` and all latches held (gai_copy_new), so that
   its sums agree with its counters, and written with no lock held. One emitter writes JSON or a pickle (protocol 2),
   with the keys and types of torch.cuda.memory._snapshot(); all that PyTorch has no key for stands under "galloc". Owns
   nothing. May call the sections before it. */

/* A block or a page. */
typedef struct gai_snapshot_item {
    uintptr_t addr;
    size_t bytes, requested;
    unsigned long long stream_id, capture_id;
    uint32_t tag, stack;
    char state;  /* an index of gai_item_states */
    char begins; /* the item before it ends elsewhere, or in another segment */
} gai_snapshot_item;

static const char *const gai_item_states[] = { "inactive", "active_pending_free", "active_allocated" };

/* The state of a pool at one time: items[0 .. blocks) are blocks, items[blocks .. n) are pages.
   requested bytes of blocks in state 2 == stats.live.current
   bytes of pages + kept == stats.reserved.current, except while on_map or on_unmap is running */
typedef struct gai_snapshot_info {
    struct gai_snapshot_info *next;
    galloc_stats stats;
    galloc_config config;
    unsigned number; /* of those that the program has created, from 1 on; 0: a default pool */
    size_t kept; /* also by a driver that failed to take pages back: to the history they are gone */
    gai_snapshot_item *items;            /* NULL: they are only counted */
    size_t n, blocks;
    const gai_segment *segment; /* of the last item, and its end */
    uintptr_t end;
    gai_history history; /* its ring is a copy, the oldest entry first; NULL: there is none */
    size_t told;         /* entries of it that have been written */
} gai_snapshot_info;

/* ---- copying ---- */

static void gai_copy_add(gai_snapshot_info *copy, const gai_segment *segment, const gai_snapshot_item *item)
{
    if (copy->items) {
        copy->items[copy->n] = *item;
        copy->items[copy->n].begins = segment != copy->segment || item->addr != copy->end;
    }
    copy->segment = segment;
    copy->end = item->addr + item->bytes;
    copy->n++;
}

/* One stream at least can have a free block at once, unless a graph owns it or work of several streams may still use
   it. */
static char gai_item_state(const gai_block *block)
{
    const gai_mark *mark;
    const gai_stream *stream = NULL;
    if (block->kind == GAI_USED) return block->tag & GAI_IN_CACHE ? 0 : 2;
    for (mark = block->marks; mark; mark = mark->next) {
        if (gai_mark_is_complete(mark)) continue;
        if (mark->stream->capture || (stream && stream != mark->stream)) return 1;
        stream = mark->stream;
    }
    return 0;
}

static void gai_copy_block(gai_snapshot_info *copy, const gai_block *block)
{
    gai_snapshot_item item;
    memset(&item, 0, sizeof item);
    if (!gai_block_has_pages(block)) return;
    item.addr = block->addr;
    item.bytes = block->bytes;
    item.state = gai_item_state(block);
    item.stream_id = gai_counted(&block->stream_id);
    item.capture_id = gai_block_capture_id(block);
    if (item.state == 2) {
        item.requested = (size_t)gai_counted(&block->requested);
        item.tag = (uint32_t)gai_counted(&block->tag);
        item.stack = (uint32_t)(gai_counted(&block->tag) >> GAI_STACK_SHIFT);
    }
    gai_copy_add(copy, block->segment, &item);
}

static void gai_copy_page(gai_snapshot_info *copy, const gai_segment *segment, uintptr_t addr, size_t bytes)
{
    gai_snapshot_item item;
    memset(&item, 0, sizeof item);
    item.addr = addr;
    item.bytes = bytes;
    gai_copy_add(copy, segment, &item);
}

/* The pages that begin in a block. Of a lost segment only the used blocks count. */
static void gai_copy_pages(gai_snapshot_info *copy, const gai_block *block)
{
    uintptr_t at = gai_down(block->addr, GAI_FIXED_SMALL), end = block->addr + block->bytes;
    const gai_segment *segment = block->segment;
    if (!gai_block_has_pages(block)) return;
    if (segment->lost) gai_copy_page(copy, segment, block->addr, block->bytes);
    else if (segment->given && block == segment->first) gai_copy_page(copy, segment, segment->addr, segment->bytes);
    while (at < end && !segment->lost && !segment->given) {
        const gai_mapping *mapping = gai_page_at(at);
        if (mapping->addr >= block->addr) gai_copy_page(copy, segment, mapping->addr, mapping->bytes);
        at = mapping->addr + mapping->bytes;
    }
}

/* Sets or clears GAI_IN_CACHE of a list of blocks. */
static void gai_blocks_flag(gai_block *block, int on)
{
    for (; block; block = block->next_bin)
        gai_set_relaxed(&block->tag, (block->tag & ~GAI_IN_CACHE) | (on ? GAI_IN_CACHE : 0));
}

/* The same for all blocks in stream caches and in quarantine. A used block that neither they nor the program hold is
   about to be freed, and counts as used until then. [lock, latches] */
static void gai_caches_flag(const galloc_pool *pool, int on)
{
    const gai_stream *stream;
    size_t i;
    gai_blocks_flag(pool->guards.oldest, on);
    for (stream = pool->streams; stream; stream = stream->next) {
        gai_blocks_flag(stream->cache.unconfirmed, on);
        gai_blocks_flag(stream->cache.orphans, on);
        for (i = 0; i < GAI_CACHE_BINS; i++)
            if (stream->cache.filled >> i & 1) gai_blocks_flag(stream->cache.bins[i].first, on);
    }
}

/* Copies, or counts, all items. [lock, latches] */
static void gai_copy_items(gai_snapshot_info *copy, const galloc_pool *pool)
{
    const gai_segment *segment;
    const gai_block *block;
    copy->n = 0;
    copy->segment = NULL;
    for (segment = pool->segments; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next) gai_copy_block(copy, block);
    copy->blocks = copy->n;
    copy->segment = NULL;
    for (segment = pool->segments; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next) gai_copy_pages(copy, block);
}

/* Copies the history to `entries`, which has room for all of it, with a last entry for the snapshot. While on_map or
   on_unmap runs, pages are on their way, and the history does not fit the blocks. [paging, lock] */
static void gai_copy_history(gai_snapshot_info *copy, galloc_pool *pool, gai_history_entry *entries)
{
    gai_history *history = &pool->history;
    size_t n, last;
    if (!entries || !history->ring || pool->telling) {
        if (entries) GALLOC_FREE(entries);
        return;
    }
    gai_history_event(pool, GAI_SNAPSHOT_TAKEN, 0, 0, 0, 0);
    gai_history_convert(history);
    copy->history = *history;
    n = gai_min((size_t)history->noted, history->size);
    last = n < history->size ? 0 : history->size - history->next; /* entries from `next` to the end of a full ring */
    copy->history.size = n;
    copy->history.ring = entries;
    memcpy(entries, history->ring + history->next, last * sizeof *entries);
    memcpy(entries + last, history->ring, (n - last) * sizeof *entries);
}

static void gai_copies_free(gai_snapshot_info *copy)
{
    while (copy) {
        gai_snapshot_info *next = copy->next;
        if (copy->history.ring) GALLOC_FREE(copy->history.ring);
        if (copy->items) GALLOC_FREE(copy->items);
        GALLOC_FREE(copy);
        copy = next;
    }
}

/* Stops all calls that change the pool: `paging` stops jobs, so that no page is on its way, and no job has a block that
   is not counted yet; `lock` all calls in the pool; the latches those that stream caches serve. [no lock] */
static void gai_copy_lock(galloc_pool *pool)
{
    gai_lock_on(&pool->paging);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    gai_pool_lock_caches(pool);
}

static void gai_copy_unlock(galloc_pool *pool)
{
    gai_pool_unlock_caches(pool);
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->paging);
}

#define GAI_COPY_ROUNDS 4

/* Allocates memory for all items and the history, which are many, and returns with the locks of gai_copy_lock. Without
   them others can add items meanwhile: then the memory is allocated again, and after GAI_COPY_ROUNDS times with the
   locks. 0: no host memory. [no lock] */
static int gai_copy_begin(gai_snapshot_info *copy, galloc_pool *pool)
{
    gai_snapshot_item *items = NULL;
    gai_history_entry *entries = NULL;
    size_t most = 0, kept = 0;
    int round;
    gai_copy_lock(pool);
    gai_copy_items(copy, pool); /* counts only, as long as copy->items is NULL */
    for (round = 0; !items || copy->n > most || pool->history.size > kept; round++) {
        most = copy->n + copy->n / 16 + 1;
        kept = pool->history.size;
        if (round < GAI_COPY_ROUNDS) gai_copy_unlock(pool);
        if (items) GALLOC_FREE(items);
        if (entries) GALLOC_FREE(entries);
        items = (gai_snapshot_item *)GALLOC_MALLOC(most * sizeof *items);
        entries = kept ? (gai_history_entry *)GALLOC_MALLOC(kept * sizeof *entries) : NULL;
        if (round < GAI_COPY_ROUNDS) gai_copy_lock(pool);
        copy->items = items; /* the copy's from now on: gai_copies_free */
        copy->history.ring = entries;
        if (!items || (kept && !entries)) return 0;
        copy->items = NULL;
        copy->history.ring = NULL;
        gai_copy_items(copy, pool);
    }
    gai_copy_history(copy, pool, entries);
    copy->items = items;
    return 1;
}

/* Adds a copy of the pool's state to a list. To the pool a block in a stream cache is used: GAI_IN_CACHE is set on it
   meanwhile, so it is copied as free, which is how gai_stats_locked counts it. [no lock] */
static cudaError_t gai_copy_new(gai_snapshot_info **list, galloc_pool *pool)
{
    gai_snapshot_info *copy = (gai_snapshot_info *)GALLOC_MALLOC(sizeof *copy);
    int ready;
    if (!copy) return gai_fail(cudaErrorMemoryAllocation, "no host memory for the snapshot");
    memset(copy, 0, sizeof *copy);
    ready = gai_copy_begin(copy, pool);
    gai_caches_flag(pool, 1);
    if (ready) gai_copy_items(copy, pool);
    gai_caches_flag(pool, 0);
    gai_stats_locked(pool, &copy->stats);
    copy->kept = pool->kept + pool->stats.quarantined;
    gai_pool_unlock_caches(pool);
    copy->stats.graph_bytes = gai_pool_captured(pool);
    gai_pool_read_config(pool, &copy->config);
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->paging);
    if (!ready) {
        gai_copies_free(copy);
        return gai_fail(cudaErrorMemoryAllocation, "no host memory for the snapshot");
    }
    copy->number = !pool->is_default;
    for (; *list; list = &(*list)->next) copy->number += !pool->is_default && (*list)->number;
    *list = copy;
    return cudaSuccess;
}

/* ---- emitting ---- */

#define GAI_EMITTER_DEPTH 12
#define GAI_EMITTER_KEYS 128 /* keys that a pickle remembers, so that it names them by a number */
#define GAI_SYMBOLS_LOG2 9

/* What an emitter remembers of stacks. */
typedef struct gai_symbols {
    uint32_t memo[GAI_STACKS]; /* of a pickle, by stack: 1 + the number of its list of frames; 0: it has not been */
    gai_symbol symbols[1 << GAI_SYMBOLS_LOG2]; /* those found last */
} gai_symbols;

typedef struct gai_emitter {
    galloc_write write;
    void *user;
    int pickle;
    int refused; /* `write` did not return 0 */
    int depth;
    char open[GAI_EMITTER_DEPTH];  /* what values stand in: { or [ */
    char first[GAI_EMITTER_DEPTH]; /* none stands there yet */
    const char *keys[GAI_EMITTER_KEYS];
    uint32_t key_memos[GAI_EMITTER_KEYS];
    int n_keys, last_key;
    int key_after[GAI_EMITTER_KEYS]; /* the key that came after this one */
    uint32_t memos; /* values that the pickle remembers */
    gai_symbols *symbols; /* NULL: there are no stacks */
    size_t used;
    unsigned char buffer[4096];
} gai_emitter;

static void gai_emit_flush(gai_emitter *e)
{
    if (e->used && !e->refused) e->refused = e->write(e->user, e->buffer, e->used) != 0;
    e->used = 0;
}

static void gai_emit_bytes(gai_emitter *e, const void *data, size_t n)
{
    const unsigned char *from = (const unsigned char *)data;
    while (n) {
        size_t part = gai_min(n, sizeof e->buffer - e->used);
        memcpy(e->buffer + e->used, from, part);
        e->used += part;
        from += part;
        n -= part;
        if (e->used == sizeof e->buffer) gai_emit_flush(e);
    }
}

static GAI_INLINE void gai_emit_byte(gai_emitter *e, int byte)
{
    e->buffer[e->used++] = (unsigned char)byte;
    if (e->used == sizeof e->buffer) gai_emit_flush(e);
}

/* The low bytes of a number, the lowest first. */
static void gai_emit_little(gai_emitter *e, uint64_t n, int bytes)
{
    for (; bytes--; n >>= 8) gai_emit_byte(e, (int)(n & 255));
}

/* Before a value of a JSON list, or a key, that is not the first. */
static void gai_emit_comma(gai_emitter *e)
{
    if (!e->pickle && !e->first[e->depth]) gai_emit_byte(e, ',');
    e->first[e->depth] = 0;
}

static void gai_emit_value(gai_emitter *e)
{
    if (e->open[e->depth] == '[') gai_emit_comma(e);
}

/* After a value: a pickle puts it into the dictionary (SETITEM) or list (APPEND). */
static void gai_emit_done(gai_emitter *e)
{
    if (e->pickle && e->depth) gai_emit_byte(e, e->open[e->depth] == '{' ? 's' : 'a');
}

/* A text of ASCII: BINUNICODE. */
static void gai_emit_text(gai_emitter *e, const char *text)
{
    size_t n = strlen(text);
    if (e->pickle) {
        gai_emit_byte(e, 'X');
        gai_emit_little(e, n, 4);
        gai_emit_bytes(e, text, n);
        return;
    }
    gai_emit_byte(e, '"');
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') gai_emit_byte(e, '\\');
        gai_emit_byte(e, (unsigned char)*text < ' ' ? ' ' : *text);
    }
    gai_emit_byte(e, '"');
}

/* The opcode for few numbers, or that for all (LONG_...), and the number. */
static void gai_emit_memo(gai_emitter *e, int few, int all, uint32_t number)
{
    gai_emit_byte(e, number < 256 ? few : all);
    gai_emit_little(e, number, number < 256 ? 1 : 4);
}

/* The pickle remembers the value before (BINPUT). Returns its number. */
static uint32_t gai_emit_put(gai_emitter *e)
{
    gai_emit_memo(e, 'q', 'r', e->memos);
    return e->memos++;
}

/* A value that it remembers (BINGET). */
static void gai_emit_get(gai_emitter *e, uint32_t number) { gai_emit_memo(e, 'h', 'j', number); }

/* A key of the dictionary; a pickle remembers it, and names it by number from then on. */
static void gai_emit_key(gai_emitter *e, const char *key)
{
    int i = e->key_after[e->last_key];
    gai_emit_comma(e);
    if (!e->pickle) {
        gai_emit_byte(e, '"');
        gai_emit_bytes(e, key, strlen(key));
        gai_emit_bytes(e, "\":", 2);
        return;
    }
    if (i == e->n_keys || strcmp(e->keys[i], key)) /* rarely: entries of one kind follow each other */
        for (i = 0; i < e->n_keys && strcmp(e->keys[i], key);) i++;
    if (i < e->n_keys) {
        e->last_key = e->key_after[e->last_key] = i;
        gai_emit_get(e, e->key_memos[i]);
        return;
    }
    gai_emit_text(e, key);
    if (i == GAI_EMITTER_KEYS) return;
    e->keys[e->n_keys++] = key;
    e->key_memos[i] = gai_emit_put(e);
}

/* Begins a dictionary or a list. key: NULL: it has none. */
static void gai_emit_open(gai_emitter *e, const char *key, char what)
{
    if (key) gai_emit_key(e, key);
    gai_emit_value(e);
    gai_emit_byte(e, !e->pickle ? what : what == '{' ? '}' : ']'); /* EMPTY_DICT, EMPTY_LIST */
    e->depth++;
    e->open[e->depth] = what;
    e->first[e->depth] = 1;
}

static void gai_emit_close(gai_emitter *e)
{
    if (!e->pickle) gai_emit_byte(e, e->open[e->depth] == '{' ? '}' : ']');
    e->depth--;
    gai_emit_done(e);
}

static void gai_emit_string(gai_emitter *e, const char *key, const char *text)
{
    gai_emit_key(e, key);
    gai_emit_value(e);
    gai_emit_text(e, text);
    gai_emit_done(e);
}

/* BININT1, BININT2, BININT, or LONG1 of 9 bytes. */
static void gai_emit_number(gai_emitter *e, const char *key, uint64_t n)
{
    char digits[20];
    size_t at = sizeof digits;
    if (key) gai_emit_key(e, key);
    gai_emit_value(e);
    if (!e->pickle) { /* printf takes three times as long */
        do digits[--at] = (char)('0' + n % 10);
        while (n /= 10);
        gai_emit_bytes(e, digits + at, sizeof digits - at);
    } else if (n < 256) {
        gai_emit_byte(e, 'K');
        gai_emit_little(e, n, 1);
    } else if (n < 65536) {
        gai_emit_byte(e, 'M');
        gai_emit_little(e, n, 2);
    } else if (n < (uint64_t)1 << 31) {
        gai_emit_byte(e, 'J');
        gai_emit_little(e, n, 4);
    } else {
        gai_emit_byte(e, 0x8a);
        gai_emit_byte(e, 9);
        gai_emit_little(e, n, 8);
        gai_emit_byte(e, 0);
    }
    gai_emit_done(e);
}

/* NEWTRUE, NEWFALSE. */
static void gai_emit_switch(gai_emitter *e, const char *key, int on)
{
    gai_emit_key(e, key);
    if (e->pickle) gai_emit_byte(e, on ? 0x88 : 0x89);
    else gai_emit_bytes(e, on ? "true" : "false", on ? 4 : 5);
    gai_emit_done(e);
}

/* PyTorch's pool ids are pairs; a pickle has them as tuples (TUPLE2). */
static void gai_emit_pair(gai_emitter *e, const char *key, unsigned a, unsigned b)
{
    char text[32];
    gai_emit_key(e, key);
    if (e->pickle) {
        gai_emit_byte(e, 'J');
        gai_emit_little(e, a, 4);
        gai_emit_byte(e, 'J');
        gai_emit_little(e, b, 4);
        gai_emit_byte(e, 0x86);
    } else {
        gai_emit_bytes(e, text, (size_t)snprintf(text, sizeof text, "[%u,%u]", a, b));
    }
    gai_emit_done(e);
}

static void gai_emit_empty_list(gai_emitter *e, const char *key)
{
    gai_emit_open(e, key, '[');
    gai_emit_close(e);
}

static void gai_emit_frame(gai_emitter *e, const char *file, uint64_t line, const char *name)
{
    gai_emit_open(e, NULL, '{');
    gai_emit_string(e, "filename", file);
    gai_emit_number(e, "line", line);
    gai_emit_string(e, "name", name);
    gai_emit_close(e);
}

/* The frames of a stack, but for public functions of galloc's at its beginning. */
static void gai_emit_stack(gai_emitter *e, uint32_t stack)
{
    const gai_depot *depot = (const gai_depot *)gai_load_pointer(&gai_process.depot);
    uint32_t i, own = 1;
    for (i = depot->begins[stack]; i < depot->begins[stack + 1]; i++) {
        void *at = depot->addresses[i];
        uint64_t key = (uintptr_t)at * 0x9e3779b97f4a7c15u;
        gai_symbol *symbol = &e->symbols->symbols[key >> (64 - GAI_SYMBOLS_LOG2)];
        if (symbol->at != at) gai_symbol_find(symbol, at);
        own = own && !strncmp(symbol->name, "galloc_", 7);
        if (!own) gai_emit_frame(e, symbol->file, symbol->position, symbol->name);
    }
}

/* A frame with the name of the tag, if it has one, where PyTorch has lines of Python; and those of the stack. A pickle
   names a list of frames that it has had. */
static void gai_emit_frames(gai_emitter *e, uint32_t tag, uint32_t stack)
{
    char name[GAI_NOTE_TEXT];
    int named = tag && gai_tag_get(tag, name);
    uint32_t *memo = e->pickle && stack && !named ? &e->symbols->memo[stack] : NULL;
    gai_emit_key(e, "frames");
    if (memo && *memo) {
        gai_emit_get(e, *memo - 1);
        gai_emit_done(e);
        return;
    }
    gai_emit_open(e, NULL, '[');
    if (memo) *memo = 1 + gai_emit_put(e);
    if (named) gai_emit_frame(e, "galloc", tag, name);
    if (stack) gai_emit_stack(e, stack);
    gai_emit_close(e);
}

/* ---- the dictionary ---- */

/* The state of a block. PyTorch's viewer expects of each pending block that the history has its free and not yet its
   completion. In galloc's history they are one, so such a block is free there, with a key of its own. */
static char gai_emitted_state(const gai_snapshot_info *copy, const gai_snapshot_item *item)
{
    return item->state == 1 && copy->history.ring ? 0 : item->state;
}

static void gai_emit_block(gai_emitter *e, const gai_snapshot_info *copy, const gai_snapshot_item *item)
{
    char state = gai_emitted_state(copy, item);
    gai_emit_open(e, NULL, '{');
    gai_emit_number(e, "address", item->addr);
    gai_emit_number(e, "size", item->bytes);
    gai_emit_number(e, "requested_size", item->requested);
    gai_emit_string(e, "state", gai_item_states[(int)state]);
    if (state != item->state) gai_emit_switch(e, "pending", 1);
    gai_emit_number(e, "stream", item->stream_id);
    if (item->capture_id) gai_emit_number(e, "capture", item->capture_id);
    if (item->tag) gai_emit_number(e, "tag", item->tag);
    gai_emit_frames(e, item->tag, item->stack);
    gai_emit_close(e);
}

/* One of PyTorch's segments: blocks without a gap between them. Returns the number of items. */
static size_t gai_emit_segment(gai_emitter *e, const gai_snapshot_info *copy, size_t at)
{
    const gai_snapshot_item *first = &copy->items[at];
    size_t i = at, total = 0, allocated = 0, active = 0, requested = 0;
    gai_emit_open(e, NULL, '{');
    gai_emit_number(e, "device", (uint64_t)copy->config.device);
    gai_emit_number(e, "address", first->addr);
    gai_emit_number(e, "stream", copy->history.ring ? 0 : first->stream_id); /* that of its pages in the history */
    gai_emit_string(e, "segment_type", "large");
    gai_emit_pair(e, "segment_pool_id", 0, copy->number);
    gai_emit_switch(e, "is_expandable", copy->config.expandable_segments);
    gai_emit_open(e, "blocks", '[');
    do {
        const gai_snapshot_item *item = &copy->items[i];
        gai_emit_block(e, copy, item);
        total += item->bytes;
        active += gai_emitted_state(copy, item) ? item->bytes : 0;
        allocated += item->state == 2 ? item->bytes : 0;
        requested += item->requested;
    } while (++i < copy->blocks && !copy->items[i].begins);
    gai_emit_close(e);
    gai_emit_number(e, "total_size", total);
    gai_emit_number(e, "allocated_size", allocated);
    gai_emit_number(e, "active_size", active);
    gai_emit_number(e, "requested_size", requested);
    gai_emit_empty_list(e, "frames");
    gai_emit_close(e);
    return i - at;
}

/* A pool's counters, settings and pages, which PyTorch has no keys for. */
static void gai_emit_pool(gai_emitter *e, const gai_snapshot_info *copy)
{
    char text[GALLOC_CONFIG_TEXT];
    size_t i;
    gai_emit_open(e, NULL, '{');
    gai_emit_number(e, "device", (uint64_t)copy->config.device);
    gai_emit_pair(e, "segment_pool_id", 0, copy->number);
    (void)gai_config_print(&copy->config, text, sizeof text);
    gai_emit_string(e, "settings", text);
    gai_emit_number(e, "live", copy->stats.live.current);
    gai_emit_number(e, "live_peak", copy->stats.live.peak);
    gai_emit_number(e, "allocated", copy->stats.allocated.current);
    gai_emit_number(e, "reserved", copy->stats.reserved.current);
    gai_emit_number(e, "reserved_peak", copy->stats.reserved.peak);
    gai_emit_number(e, "kept_by_driver", copy->kept);
    gai_emit_number(e, "blocks", copy->stats.blocks.current);
    gai_emit_number(e, "mallocs", copy->stats.mallocs);
    gai_emit_number(e, "frees", copy->stats.frees);
    gai_emit_number(e, "failures", copy->stats.failures);
    gai_emit_number(e, "moves", copy->stats.moves);
    gai_emit_number(e, "moved_bytes", copy->stats.moved_bytes);
    gai_emit_number(e, "waits", copy->stats.waits);
    gai_emit_number(e, "graph_bytes", copy->stats.graph_bytes);
    if (copy->history.ring) {
        gai_emit_open(e, "history", '{');
        gai_emit_number(e, "entries", copy->history.size);
        gai_emit_number(e, "overwritten", copy->history.noted - copy->history.size);
        gai_emit_close(e);
    }
    gai_emit_open(e, "pages", '[');
    for (i = copy->blocks; i < copy->n; i++) {
        gai_emit_open(e, NULL, '[');
        gai_emit_number(e, NULL, copy->items[i].addr);
        gai_emit_number(e, NULL, copy->items[i].bytes);
        gai_emit_close(e);
    }
    gai_emit_close(e);
    gai_emit_close(e);
}

/* ---- the history ---- */

/* PyTorch's words, and galloc's where it has none. */
static const char *const gai_history_actions[] = {"alloc", "free_requested", "segment_map", "segment_unmap",
                                                  "segment_alloc", "segment_free", "wait", "oom", "snapshot",
                                                  "annotate"};

/* One event of PyTorch's. completed: the second event of a free. */
static void gai_emit_event(gai_emitter *e, const gai_history_entry *entry, int completed)
{
    const char *action = completed ? "free_completed" : gai_history_actions[entry->action];
    gai_history_entry said = *entry;
    if (entry->action == GAI_ANNOTATED) memset(&said.is, 0, sizeof said.is);
    gai_emit_open(e, NULL, '{');
    gai_emit_string(e, "action", action);
    if (entry->action == GAI_RAN_OUT) gai_emit_number(e, "device_free", said.is.at.other);
    else gai_emit_number(e, "addr", said.is.at.addr);
    gai_emit_number(e, "size", said.is.at.bytes);
    gai_emit_number(e, "stream", said.is.at.stream_id);
    gai_emit_number(e, "time_us", gai_load(&gai_process.epoch_us) + entry->time / 1000);
    if (entry->tag) gai_emit_number(e, "tag", entry->tag);
    if (entry->action == GAI_WAITED) gai_emit_number(e, "on_stream", said.is.at.other);
    if (entry->action < GAI_SEGMENT_MADE && said.is.at.other) gai_emit_switch(e, "moved", 1);
    if (entry->action == GAI_ANNOTATED) gai_emit_string(e, "user_metadata", entry->is.text);
    gai_emit_frames(e, entry->tag, entry->action > GAI_FREED || completed ? 0 : entry->is.at.stack);
    gai_emit_close(e);
}

/* The copy whose next entry is the oldest one of the device, or NULL. */
static gai_snapshot_info *gai_copies_oldest(gai_snapshot_info *copies, int device)
{
    gai_snapshot_info *copy, *oldest = NULL;
    for (copy = copies; copy; copy = copy->next) {
        if (copy->config.device != device || copy->told == copy->history.size) continue;
        if (!oldest || copy->history.ring[copy->told].time < oldest->history.ring[oldest->told].time) oldest = copy;
    }
    return oldest;
}

/* The entries of all pools of a device, in the order of their times. A free is complete at once: the memory is the
   heap's from then on. */
static void gai_emit_trace(gai_emitter *e, gai_snapshot_info *copies, int device)
{
    gai_snapshot_info *copy;
    gai_emit_open(e, NULL, '[');
    while ((copy = gai_copies_oldest(copies, device)) != NULL) {
        const gai_history_entry *entry = &copy->history.ring[copy->told++];
        gai_emit_event(e, entry, 0);
        if (entry->action == GAI_FREED) gai_emit_event(e, entry, 1);
    }
    gai_emit_close(e);
}

/* ---- the whole ---- */

/* How many stacks the process keeps, and what did not go in. */
static void gai_emit_depot(gai_emitter *e, const gai_depot *depot)
{
    uint64_t kept, frames, lost;
    gai_lock_on(&gai_locks.depot);
    kept = depot->n;
    frames = depot->begins[depot->n + 1];
    lost = depot->lost;
    gai_lock_off(&gai_locks.depot);
    gai_emit_open(e, "stacks", '{');
    gai_emit_number(e, "kept", kept);
    gai_emit_number(e, "frames", frames);
    gai_emit_number(e, "lost", lost);
    gai_emit_close(e);
}

/* The settings of the first pool, by PyTorch's names. */
static void gai_emit_settings(gai_emitter *e, const gai_snapshot_info *copy)
{
    char text[GALLOC_CONFIG_TEXT];
    gai_emit_open(e, "allocator_settings", '{');
    if (copy) {
        gai_emit_switch(e, "expandable_segments", copy->config.expandable_segments);
        gai_emit_number(e, "max_split_size", copy->config.max_split_size);
        gai_emit_number(e, "trace_alloc_max_entries", copy->config.history);
        gai_emit_switch(e, "trace_alloc_overflowed", copy->history.noted > copy->history.size);
        (void)gai_config_print(&copy->config, text, sizeof text);
        gai_emit_string(e, "PYTORCH_CUDA_ALLOC_CONF", text);
    }
    gai_emit_close(e);
}

static void gai_emit_snapshot(gai_emitter *e, gai_snapshot_info *copies)
{
    const gai_snapshot_info *copy;
    size_t i;
    int device, devices = 0;
    if (e->pickle) gai_emit_bytes(e, "\x80\x02", 2);
    gai_emit_open(e, NULL, '{');
    gai_emit_open(e, "segments", '[');
    for (copy = copies; copy; copy = copy->next) {
        for (i = 0; i < copy->blocks;) i += gai_emit_segment(e, copy, i);
        if (devices <= copy->config.device) devices = copy->config.device + 1;
    }
    gai_emit_close(e);
    gai_emit_open(e, "device_traces", '[');
    for (device = 0; device < devices; device++) gai_emit_trace(e, copies, device);
    gai_emit_close(e);
    gai_emit_empty_list(e, "external_annotations");
    gai_emit_settings(e, copies);
    gai_emit_open(e, "galloc", '{');
    gai_emit_string(e, "version", GALLOC_VERSION_STRING);
    if (e->symbols) gai_emit_depot(e, (const gai_depot *)gai_load_pointer(&gai_process.depot));
    gai_emit_open(e, "pools", '[');
    for (copy = copies; copy; copy = copy->next) gai_emit_pool(e, copy);
    gai_emit_close(e);
    gai_emit_close(e);
    gai_emit_close(e);
    if (e->pickle) gai_emit_byte(e, '.');
    gai_emit_flush(e);
}

/* ==== SNAPSHOT FILES ============================================================================================ */
/* >>snapshotfile */

/* Snapshots of all pools and in files, snapshot_on_oom, and what is live as text. Files are written under another name
   and then renamed, with no lock held. Owns nothing. May call the sections before it. */


/* Pins all pools, so that they are reached without the global lock. NULL: no host memory. */
static galloc_pool **gai_pools_pin(size_t *n)
{
    galloc_pool *pool, **pools;
    size_t count = 1;
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool; pool = pool->next) count++;
    pools = (galloc_pool **)GALLOC_MALLOC(count * sizeof *pools);
    *n = 0;
    for (pool = pools ? gai_process.pools : NULL; pool; pool = pool->next)
        if (gai_pool_pin(pool)) pools[(*n)++] = pool;
    gai_lock_off(&gai_locks.global);
    return pools;
}

/* Copies the state of one pool, or of all (NULL). */
static cudaError_t gai_copies_take(gai_snapshot_info **list, galloc_pool *pool)
{
    galloc_pool **pools;
    size_t i, n;
    cudaError_t error = gai_begin();
    *list = NULL;
    if (error || pool) {
        if (!error) error = gai_pool_find(&pool);
        if (error) return error;
        error = gai_copy_new(list, pool);
        gai_pool_unpin(pool);
        return error;
    }
    for (i = 0, pools = gai_pools_pin(&n); i < n; i++) {
        if (!error) error = gai_copy_new(list, pools[i]);
        gai_pool_unpin(pools[i]);
    }
    if (!pools) return gai_fail(cudaErrorMemoryAllocation, "no host memory for a list of pools");
    GALLOC_FREE(pools);
    if (error) gai_copies_free(*list);
    return error;
}

/* Writes a snapshot; the message of an error is there. */
static cudaError_t gai_snapshot(galloc_pool *pool, int format, galloc_write write, void *user)
{
    gai_emitter emitter;
    gai_snapshot_info *copies;
    cudaError_t error;
    if (!write) return gai_fail(cudaErrorInvalidValue, "write is NULL");
    if (format != GALLOC_SNAPSHOT_JSON && format != GALLOC_SNAPSHOT_PICKLE)
        return gai_fail(cudaErrorInvalidValue, "format %d is no GALLOC_SNAPSHOT_...", format);
    gai_trace_want(1);
    error = gai_copies_take(&copies, pool);
    if (error) return error;
    memset(&emitter, 0, offsetof(gai_emitter, buffer));
    emitter.write = write;
    emitter.user = user;
    emitter.pickle = format == GALLOC_SNAPSHOT_PICKLE;
    if (gai_load_pointer(&gai_process.depot)) {
        emitter.symbols = (gai_symbols *)GALLOC_MALLOC(sizeof *emitter.symbols);
        if (emitter.symbols) memset(emitter.symbols, 0, sizeof *emitter.symbols);
        else error = gai_fail(cudaErrorMemoryAllocation, "no host memory for the frames of a snapshot");
    }
    if (!error) gai_emit_snapshot(&emitter, copies);
    gai_copies_free(copies);
    if (emitter.symbols) GALLOC_FREE(emitter.symbols);
    if (error) return error;
    if (emitter.refused) return gai_fail(cudaErrorOperatingSystem, "write has stopped the snapshot");
    return cudaSuccess;
}

/* A file that is being written. */
typedef struct gai_file {
    FILE *stream;
    const char *name;
} gai_file;

static int gai_write_file(void *user, const void *data, size_t bytes)
{
    const gai_file *file = (const gai_file *)user;
    if (fwrite(data, 1, bytes, file->stream) == bytes) return 0;
    (void)gai_file_failed(file->name, "written", errno);
    return 1;
}

/* Writes a snapshot to `partial`, and renames that to `path`. */
static cudaError_t gai_snapshot_write(galloc_pool *pool, const char *path, const char *partial)
{
    const char *end = strrchr(path, '.');
    int refused, pickle = end && (!strcmp(end, ".pickle") || !strcmp(end, ".pkl"));
    gai_file file;
    cudaError_t error;
    file.name = partial;
    file.stream = fopen(partial, "wb");
    if (!file.stream) return gai_file_failed(partial, "opened", errno);
    error = gai_snapshot(pool, pickle ? GALLOC_SNAPSHOT_PICKLE : GALLOC_SNAPSHOT_JSON, gai_write_file, &file);
    if (fclose(file.stream) && !error) error = gai_file_failed(partial, "written", errno);
    refused = error ? 0 : gai_rename(partial, path);
    if (refused) error = gai_file_failed(partial, "renamed", refused);
    if (error) (void)remove(partial);
    return error;
}

static cudaError_t gai_snapshot_save(galloc_pool *pool, const char *path)
{
    char *partial;
    cudaError_t error;
    size_t n = path ? strlen(path) + 64 : 0; /* two numbers and an ending */
    if (!path || !*path) return gai_fail(cudaErrorInvalidValue, "path is %s", path ? "empty" : "NULL");
    if (gai_path_refused(path)) return cudaErrorOperatingSystem;
    partial = (char *)GALLOC_MALLOC(n);
    if (!partial) return gai_fail(cudaErrorMemoryAllocation, "no host memory for the path");
    /* A name of its own: several threads, or processes that run out together, may save to one path. */
    (void)snprintf(partial, n, "%s.%lu-%zx.partial", path, gai_process_id(), (size_t)partial);
    error = gai_snapshot_write(pool, path, partial);
    GALLOC_FREE(partial);
    return error;
}

/* ---- what is live ---- */

/* Used blocks that have tag, size and stream in common, or the stack of their allocation. */
typedef struct gai_live_group {
    size_t blocks, bytes, requested; /* their number; bytes of all of them, of each */
    unsigned long long stream_id;
    uint32_t tag, stack;
} gai_live_group;

/* Both, each with most bytes first. */
typedef struct gai_live_groups {
    gai_live_group *kinds, *stacks; /* of one allocation */
    size_t n_kinds, n_stacks; /* with stack 0, of blocks without one */
} gai_live_groups;

#define GAI_LIVE_SHOWN 16 /* kinds that a text names */
#define GAI_LIVE_STACKS 3 /* stacks, and frames of each; GALLOC_REPORT_TEXT suffices for them */
#define GAI_LIVE_FRAMES 8

static int gai_live_by_kind(const void *one, const void *other)
{
    const gai_live_group *a = (const gai_live_group *)one, *b = (const gai_live_group *)other;
    if (a->tag != b->tag) return a->tag < b->tag ? -1 : 1;
    if (a->requested != b->requested) return a->requested < b->requested ? -1 : 1;
    return a->stream_id == b->stream_id ? 0 : a->stream_id < b->stream_id ? -1 : 1;
}

static int gai_live_by_bytes(const void *one, const void *other)
{
    const gai_live_group *a = (const gai_live_group *)one, *b = (const gai_live_group *)other;
    return a->bytes == b->bytes ? gai_live_by_kind(one, other) : a->bytes > b->bytes ? -1 : 1;
}

static int gai_live_by_stack(const void *one, const void *other)
{
    const gai_live_group *a = (const gai_live_group *)one, *b = (const gai_live_group *)other;
    return a->stack == b->stack ? 0 : a->stack < b->stack ? -1 : 1;
}

/* Joins blocks that are equal, and puts those with most bytes first. Returns the number of what is left. */
static size_t gai_live_join(gai_live_group *live, size_t n, int (*order)(const void *, const void *))
{
    size_t i, kinds = 0;
    qsort(live, n, sizeof *live, order);
    for (i = 0; i < n; i++) {
        if (!kinds || order(&live[kinds - 1], &live[i])) {
            live[kinds++] = live[i];
        } else {
            live[kinds - 1].blocks++;
            live[kinds - 1].bytes += live[i].bytes;
        }
    }
    qsort(live, kinds, sizeof *live, gai_live_by_bytes);
    return kinds;
}

/* What is used in the copies. live->kinds is NULL: no host memory. */
static void gai_copies_live(const gai_snapshot_info *copies, gai_live_groups *live)
{
    const gai_snapshot_info *copy;
    size_t i, most = 1, n = 0;
    for (copy = copies; copy; copy = copy->next) most += copy->blocks;
    live->kinds = (gai_live_group *)GALLOC_MALLOC(2 * most * sizeof *live->kinds);
    if (!live->kinds) return;
    live->stacks = live->kinds + most;
    for (copy = copies; copy; copy = copy->next) {
        for (i = 0; i < copy->blocks; i++) {
            const gai_snapshot_item *item = &copy->items[i];
            gai_live_group *at = &live->kinds[n];
            if (item->state != 2) continue;
            at->blocks = 1;
            at->bytes = at->requested = item->requested;
            at->stream_id = item->stream_id;
            at->tag = item->tag;
            at->stack = item->stack;
            n++;
        }
    }
    memcpy(live->stacks, live->kinds, n * sizeof *live->kinds);
    live->n_kinds = gai_live_join(live->kinds, n, gai_live_by_kind);
    live->n_stacks = gai_live_join(live->stacks, n, gai_live_by_stack);
}

static void gai_print_live(gai_string *string, const gai_live_group *live)
{
    char name[GAI_NOTE_TEXT];
    gai_print(string, "%zu of %zu bytes", live->blocks, live->requested);
    if (live->tag) gai_print(string, ", tag %u", (unsigned)live->tag);
    if (gai_tag_get(live->tag, name)) gai_print(string, " (%s)", name);
    gai_print(string, ", stream %llu", live->stream_id);
}

static void gai_print_lives(gai_string *string, const gai_live_group *live, size_t kinds)
{
    size_t i, blocks = 0, bytes = 0;
    for (i = 0; i < kinds; i++) {
        blocks += live[i].blocks;
        bytes += live[i].bytes;
    }
    gai_print(string, "blocks in use: %zu, of %zu bytes\n", blocks, bytes);
    for (i = 0; i < kinds && i < GAI_LIVE_SHOWN; i++) {
        gai_print(string, "  ");
        gai_print_live(string, &live[i]);
        gai_print(string, "\n");
    }
    if (i < kinds) gai_print(string, "  and others, of %zu kinds\n", kinds - i);
}

/* Appends the stacks that hold most. */
static void gai_print_stacks(gai_string *string, const gai_live_groups *live)
{
    size_t i, shown = 0;
    for (i = 0; i < live->n_stacks && shown < GAI_LIVE_STACKS; i++) {
        const gai_live_group *at = &live->stacks[i];
        if (!at->stack) continue;
        if (!shown++) gai_print(string, "most by stack:\n");
        gai_print(string, "  %zu bytes in %zu blocks", at->bytes, at->blocks);
        gai_print_frames(string, at->stack, GAI_LIVE_FRAMES, "\n      ", "\n      ", 1);
        gai_print(string, "\n");
    }
}

/* What is used of a pool, or of all (NULL). */
static cudaError_t gai_live_take(galloc_pool *pool, gai_live_groups *live)
{
    gai_snapshot_info *copies;
    cudaError_t error = gai_copies_take(&copies, pool);
    memset(live, 0, sizeof *live);
    if (error) return error;
    gai_copies_live(copies, live);
    gai_copies_free(copies);
    return live->kinds ? cudaSuccess : gai_fail(cudaErrorMemoryAllocation, "no host memory for a list of blocks");
}

/* Appends to the message of a call that fails since blocks are used which kind has most bytes. */
static void gai_say_live(galloc_pool *pool)
{
    gai_callback_frame saved;
    gai_live_groups live;
    gai_string string;
    size_t length;
    int in = 0, taken;
    gai_callback_begin(&in, &saved);
    taken = !gai_live_take(pool, &live);
    gai_callback_end(&in, &saved);
    if (!taken) return;
    length = strlen(gai_thread.message);
    string.at = gai_thread.message + length;
    string.left = sizeof gai_thread.message - length;
    if (live.n_kinds) gai_print(&string, "; most: ");
    if (live.n_kinds) gai_print_live(&string, &live.kinds[0]);
    GALLOC_FREE(live.kinds);
}

/* After an allocation that failed since memory ran out: writes the file of snapshot_on_oom, once for each pool. In a
   callback the call outside does it. The message of the failure stays. The pool is pinned. [no lock] */
GAI_APART
static void gai_dump(galloc_pool *pool)
{
    gai_callback_frame saved;
    char path[GAI_PATH_BYTES];
    cudaError_t error;
    int due = gai_thread.ran_out && !gai_thread.in_shortage && !gai_thread.in_mapping;
    gai_thread.ran_out = 0;
    if (!due || !gai_conf_path("snapshot_on_oom", pool->config.device, path, sizeof path)) return;
    if (!gai_swap(&pool->dumped, 0, 1)) return;
    gai_callback_begin(&gai_thread.in_shortage, &saved);
    error = gai_snapshot_save(NULL, path);
    if (!error) gai_note("memory has run out: the state is in %s", path);
    (void)gai_end("snapshot_on_oom", error);
    gai_callback_end(&gai_thread.in_shortage, &saved);
}

/* ==== DEFAULT POOLS =============================================================================================== */
/* >>defaultpools */

/* The pool of a device, of a stream and of an address; GALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF. The global lock guards
   gai_process.default_pool. May call all sections before it. */

/* Returns whether a setting of PyTorch concerns a feature that galloc does not have. */
static int gai_is_foreign_setting(gai_text pair)
{
    static const char *const names[] = {"pinned_", "expandable_segments_reserve", "graph_capture_record_stream_reuse"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t length = strlen(names[i]);
        if (pair.length >= length && !memcmp(pair.at, names[i], length)) return 1;
    }
    return 0;
}

/* Copies PyTorch's settings without blanks and without unsupported ones. `stood` receives the original position of each
   character and of the end. Returns 0 if the text is too long. */
static int gai_text_of_torch(const char *from, char *text, uint32_t *stood, size_t size)
{
    gai_text rest = gai_text_of(text), pair;
    size_t n = 0, i;
    int more = 1;
    for (i = 0; from[i]; i++) {
        if (n + 1 >= size) return 0;
        if (strchr(" \t\r\n", from[i])) continue;
        stood[n] = (uint32_t)i;
        text[n++] = from[i];
    }
    stood[n] = (uint32_t)i;
    rest.length = n;
    for (n = 0; more;) {
        more = gai_text_cut_pair(&rest, &pair);
        if (gai_is_foreign_setting(pair)) continue;
        if (n) text[n++] = ',';
        for (i = 0; i < pair.length; i++, n++) {
            stood[n] = stood[(size_t)(pair.at - text) + i];
            text[n] = pair.at[i];
        }
    }
    stood[n] = stood[rest.at - text];
    text[n] = 0;
    return 1;
}

/* Applies PyTorch's variable, which GALLOC_CONF overrides. *name: which variable it is; *seen: the settings in it. */
static cudaError_t gai_config_of_torch(galloc_config *config, const char **name, gai_seen *seen)
{
    char message[GAI_MESSAGE], text[1024] = "";
    uint32_t stood[sizeof text];
    const char *given = getenv(*name = "PYTORCH_CUDA_ALLOC_CONF");
    if (!given) given = getenv(*name = "PYTORCH_ALLOC_CONF");
    if (!given) return cudaSuccess;
    if (!gai_text_of_torch(given, text, stood, sizeof text))
        return gai_fail(cudaErrorInvalidValue, "%s: longer than %zu characters", *name, sizeof text - 1);
    if (gai_parse(config, text, stood, seen, message)) return cudaSuccess;
    return gai_fail(cudaErrorInvalidValue, "%s: %s", *name, message);
}

/* Returns the settings of default pools: the built-in ones, changed by GALLOC_CONF. */
static cudaError_t gai_config_of_environment(galloc_config *config)
{
    char message[GAI_MESSAGE];
    gai_seen seen = {0, 0}, seen_there = {0, 0};
    cudaError_t error = cudaSuccess;
    const char *text = getenv("GALLOC_CONF"), *there = "";
    int right;
    *config = gai_config_default();
    if (!text) return cudaSuccess;
    right = gai_parse(config, text, NULL, &seen, message);
    if (right && config->like == GALLOC_LIKE_PYTORCH) {
        *config = gai_config_default();
        gai_config_like(config, GALLOC_LIKE_PYTORCH);
        error = gai_config_of_torch(config, &there, &seen_there);
        if (!error) right = gai_parse(config, text, NULL, &seen, message);
    }
    if (!error && !right) error = gai_fail(cudaErrorInvalidValue, "GALLOC_CONF: %s", message);
    if (error) {
        gai_log_failures();
        return error;
    }
    right = (seen_there.plain | seen_there.in_mib) != 0;
    seen.plain |= seen_there.plain;
    seen.in_mib |= seen_there.in_mib;
    gai_config_say_idle(config, &seen, message);
    if (message[0]) gai_note("GALLOC_CONF%s%s: %s", right ? " and " : "", right ? there : "", message);
    return cudaSuccess;
}

/* Returns the default pool of a device, pinned, and creates it if needed. *pool is NULL after an error. */
static cudaError_t gai_pool_of_device(galloc_pool **pool, int device)
{
    galloc_config config;
    cudaError_t error = cudaSuccess;
    *pool = NULL;
    if (device < 0 || device >= GAI_DEVICES)
        return gai_fail(cudaErrorInvalidDevice, "device %d does not exist", device);
    *pool = (galloc_pool *)gai_load_pointer(&gai_process.default_pool[device]);
    if (!*pool) {
        error = gai_config_of_environment(&config);
        config.device = device;
        if (!error) error = gai_pool_new(pool, &config, 1);
    }
    if (!error && !gai_pool_pin(*pool)) error = gai_pool_is_gone(*pool);
    if (error) *pool = NULL;
    return error;
}

/* Returns the device of the stream's context. */
static cudaError_t gai_site_device(gai_site *site, int *device)
{
    gai_scope scope;
    CUresult result = gai_site_context(site);
    if (!result) result = gai_scope_push(&scope, site->context);
    if (!result) {
        result = gai_cu.CtxGetDevice(device);
        gai_scope_leave(&scope);
    }
    return result ? gai_driver_failed(result, "cuCtxGetDevice") : cudaSuccess;
}

/* ---- from an address to its pool ---- */

static int gai_is_used(const void *ptr)
{
    const gai_block *block = gai_block_at((uintptr_t)ptr);
    return block && gai_block_addr(block) == (uintptr_t)ptr && gai_load_pointer(&block->lent);
}

/* Pins the pool that may contain an address; NULL: there is none. The pool may have changed since the look-up, so the
   caller looks the address up again under the lock. A pool with a used block never ends, so a failed attempt to end it
   is waited for. */
static galloc_pool *gai_pool_around(const void *ptr)
{
    galloc_pool *pool = gai_pool_of(ptr);
    unsigned round;
    for (round = 0; pool && !gai_pool_pin(pool); round++) {
        if (!gai_is_used(ptr)) return NULL;
        gai_latch_rest(round);
        pool = gai_pool_of(ptr);
    }
    return pool;
}

/* The beginning of every function that takes a used block; pins the pool. *pool is NULL if there is nothing to do: no
   pointer. */
static cudaError_t gai_find_pool(galloc_pool **pool, void *ptr, cudaStream_t stream, gai_site *site)
{
    cudaError_t error;
    *pool = NULL;
    error = gai_begin();
    if (error || !ptr) return error;
    error = gai_site_of(stream, site);
    if (error) return error;
    *pool = gai_pool_around(ptr);
    return *pool ? cudaSuccess : gai_pointer_refused(NULL, ptr);
}

GAI_APART
static cudaError_t gai_free_after(void *ptr, const cudaStream_t *streams, int n, cudaStream_t zero)
{
    galloc_pool *pool;
    gai_site site;
    cudaError_t error;
    gai_thread.caller = GAI_RETURN_ADDRESS();
    if (!streams)
        return gai_fail(cudaErrorInvalidValue, "streams is NULL: it must be an array of the n = %d streams", n);
    if (n < 1) return gai_fail(cudaErrorInvalidValue, "n is %d: give the streams that use the block, at least one", n);
    error = gai_find_pool(&pool, ptr, streams[0] ? streams[0] : zero, &site);
    if (!pool) return error;
    error = gai_pool_free_after(pool, ptr, streams, n, zero);
    gai_pool_unpin(pool);
    return error;
}

/* ==== THREAD CACHE ================================================================================================ */
/* >>threadcache */

/* The fast path of galloc_malloc and galloc_free, and the slower paths behind it. Each thread keeps a table of recently
   used streams (gai_tcache), which leads from a stream and a pool to the stream cache without a shared lock; then only
   the latch of the stream cache is taken. The outcome (enum gai_outcome) selects what follows: the pool's short path
   with one lock, or a full call. May call all sections before it. */

/* A thread cache entry: what this thread remembers of a stream that it used recently. It is checked before each use:
   the generation is current          no pool has ended or changed its sizes since the entry was written
   the stream has the same id         with default streams: the same context id (gai_cache says why this is needed)
   stream->cache.open == site.life    under the latch: the stream state still belongs to that stream */
typedef struct gai_tcache_entry {
    uint64_t generation; /* valid only if it equals gai_process.generation */
    const galloc_pool *key; /* the pool's handle; NULL: the default pool of the stream's device */
    galloc_pool *pool;
    short looks;    /* config.stream_check of the pool. It and the next are copies, because the pool may have ended */
    short uncached; /* variant.no_caches of the pool */
    int asks;  /* whether to query the current context, for a default stream. 0: never. 2: always. 1: not to free the
                  block allocated last, since stream_check:off promises that it is freed in the same context */
    gai_site site;
    gai_block *last; /* the block last allocated through this entry, and its address */
    uintptr_t last_ptr;
    size_t plain; /* larger requests are rounded beyond 512 bytes */
} gai_tcache_entry;

#define GAI_TCACHE_LOG2 5
#define GAI_TCACHE_ENTRIES 32
#define GAI_TCACHE_PROBES 4 /* neighbouring places that an entry may take */

static GAI_THREAD_LOCAL struct {
    gai_tcache_entry entries[GAI_TCACHE_ENTRIES];
    gai_tcache_entry *last; /* the one that allocated last; NULL: replaced since */
    int one_context;        /* some entry is, or was, of a pool with one_context */
} gai_tcache;

/* Stream 0 is the legacy stream, whose handle is 1. */
static GAI_INLINE CUstream gai_named_stream(cudaStream_t stream)
{
    return (CUstream)((uintptr_t)stream + (stream == NULL));
}

/* Returns the first place of an entry. The others are that place ^ 1 .. GAI_TCACHE_PROBES - 1. */
static GAI_INLINE size_t gai_tcache_at(CUstream stream, CUcontext context, const galloc_pool *key)
{
    uint64_t mixed = (uint64_t)(uintptr_t)stream ^ (uint64_t)(uintptr_t)context << 1 ^ (uint64_t)(uintptr_t)key << 2;
    return (size_t)(mixed * 0x9e3779b97f4a7c15u >> (64 - GAI_TCACHE_LOG2));
}

static GAI_INLINE int gai_tcache_leads(const gai_tcache_entry *entry, uint64_t generation, CUstream stream)
{
    return entry->site.handle == stream && entry->generation == generation;
}

static GAI_INLINE int gai_tcache_is(const gai_tcache_entry *entry, uint64_t generation, CUstream stream,
                                    CUcontext context, const galloc_pool *key)
{
    return gai_tcache_leads(entry, generation, stream) && entry->key == key &&
           (!context || entry->site.context == context);
}

/* The entry is not in its first place. */
GAI_APART
static gai_tcache_entry *gai_tcache_search(uint64_t generation, CUstream stream, CUcontext context,
                                           const galloc_pool *key)
{
    size_t at = gai_tcache_at(stream, context, key), probes;
    for (probes = 1; probes < GAI_TCACHE_PROBES; probes++)
        if (gai_tcache_is(&gai_tcache.entries[at ^ probes], generation, stream, context, key))
            return &gai_tcache.entries[at ^ probes];
    return NULL;
}

static GAI_INLINE gai_tcache_entry *gai_tcache_look_up(uint64_t generation, CUstream stream, CUcontext context,
                                                       const galloc_pool *key)
{
    gai_tcache_entry *entry = &gai_tcache.entries[gai_tcache_at(stream, context, key)];
    return gai_tcache_is(entry, generation, stream, context, key) ? entry
                                                                 : gai_tcache_search(generation, stream, context, key);
}

/* A default stream belongs to a context, so the current context is queried. */
GAI_APART
static gai_tcache_entry *gai_tcache_find_default(CUstream stream, const galloc_pool *key)
{
    uint64_t generation = gai_load(&gai_process.generation);
    CUcontext context = NULL;
    gai_tcache_entry *entry = gai_tcache.one_context ? gai_tcache_look_up(generation, stream, NULL, key) : NULL;
    if (entry && !entry->asks) return entry;
    if (!generation || gai_cu.CtxGetCurrent(&context) || !context) return NULL;
    return gai_tcache_look_up(generation, stream, context, key);
}

/* Returns this thread's entry, or NULL. */
static GAI_INLINE gai_tcache_entry *gai_tcache_find(cudaStream_t named, const galloc_pool *key)
{
    CUstream stream = (CUstream)named;
    if (gai_is_default_stream(stream)) return gai_tcache_find_default(gai_named_stream(named), key);
    return gai_tcache_look_up(gai_load(&gai_process.generation), stream, NULL, key);
}

/* The context of a default stream must not have been reset, and a per-thread stream must not be captured. The legacy
   stream cannot be captured, so it is not queried. */
GAI_APART
static int gai_tcache_is_free_default(const gai_tcache_entry *entry)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    if (entry->site.handle != CU_STREAM_LEGACY && gai_cu.StreamIsCapturing(entry->site.handle, &status)) return 0;
    if (status != CU_STREAM_CAPTURE_STATUS_NONE) return 0;
    return !gai_cu.CtxGetId(entry->site.context, &id) && id == entry->site.context_id;
}

static GAI_INLINE int gai_tcache_is_free_named(const gai_tcache_entry *entry)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return !gai_cu.StreamIsCapturing(entry->site.handle, &status) && status == CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Returns whether the stream can be used, as far as is known without its id: a captured stream cannot. */
static GAI_INLINE int gai_tcache_is_free(const gai_tcache_entry *entry)
{
    if (!entry->looks) return 1;
    return gai_is_default_stream(entry->site.handle) ? gai_tcache_is_free_default(entry)
                                                     : gai_tcache_is_free_named(entry);
}

/* Returns whether the handle still belongs to the same stream. Called only after gai_tcache_is_free, because the id of
   a captured stream must not be queried. */
static GAI_INLINE int gai_tcache_same_id(const gai_tcache_entry *entry)
{
    unsigned long long id = 0;
    return !gai_cu.StreamGetId(entry->site.handle, &id) && id == entry->site.stream_id;
}

/* Returns whether the call may confirm blocks. A default stream is identified by its context, which has been
   checked. */
static int gai_tcache_confirms(const gai_tcache_entry *entry)
{
    return !entry->looks || gai_is_default_stream(entry->site.handle) || gai_tcache_same_id(entry);
}

/* gai_tcache_is_free and, except on default streams, gai_tcache_same_id. */
static GAI_INLINE int gai_tcache_is_sure(const gai_tcache_entry *entry)
{
    if (!entry->looks) return 1;
    if (gai_is_default_stream(entry->site.handle)) return gai_tcache_is_free_default(entry);
    return gai_tcache_is_free_named(entry) && gai_tcache_same_id(entry);
}

/* Pins the pool of an entry. Returns 0 if the pool has ended since. */
static int gai_tcache_pin(const gai_tcache_entry *entry)
{
    galloc_pool *pool = entry->pool;
    if (!gai_pool_pin(pool)) return 0;
    if (entry->generation == gai_load(&gai_process.generation)) return 1;
    gai_pool_unpin(pool);
    return 0;
}

/* ---- end of a thread, and unloading of the code ---- */

#define GAI_UNWATCHED 0
#define GAI_WATCHED 1  /* the key exists */
#define GAI_UNLOADED 2 /* no destructor of a thread may call galloc any more */

/* When a thread ends, flushes the stream caches of its per-thread streams, so that other streams find their blocks.
   Calls nothing of CUDA. Does not use the thread cache entries, which may have been replaced. */
static void GAI_AT_THREAD_END gai_thread_ends(void *number)
{
    galloc_pool *pool;
    gai_stream *stream;
    if (gai_load_pointer(&gai_process.forked) || gai_load(&gai_process.ends) != GAI_WATCHED) return;
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool; pool = pool->next) {
        gai_lock_on(&pool->lock);
        for (stream = pool->streams; stream; stream = stream->next)
            if (stream->thread == (uintptr_t)number) (void)gai_stream_flush(pool, stream, 0);
        gai_lock_off(&pool->lock);
    }
    gai_lock_off(&gai_locks.global);
}

/* Writes the rest of the logs, unless a thread that writes them is in the way. What comes later is written at once. */
static void gai_traces_unload(void)
{
    gai_trace *trace;
    gai_trace_want(2);
    if (gai_load_pointer(&gai_process.forked) || !gai_lock_try(&gai_locks.trace)) return;
    for (trace = (gai_trace *)gai_process.traces; trace; trace = trace->next)
        if (!gai_load(&trace->latch)) gai_trace_write(trace);
    gai_lock_off(&gai_locks.trace);
}

/* The code may be unloaded, or the process may end, while threads still run that have used it. Static destructors and
   atexit functions may call galloc before or after this function. It takes no lock, because a thread may have died
   holding one, and calls nothing of CUDA. */
GAI_AT_UNLOAD
static void gai_unload(void)
{
    gai_traces_unload();
    while (!gai_swap(&gai_process.ends, GAI_UNWATCHED, GAI_UNLOADED)) {
        if (gai_load(&gai_process.ends) == GAI_UNLOADED) return;
        if (!gai_swap(&gai_process.ends, GAI_WATCHED, GAI_UNLOADED)) continue;
        gai_thread_key_end(gai_process.end_key);
        return;
    }
}

/* [global lock] */
static int gai_watch_ends(void)
{
    if (gai_load(&gai_process.ends) != GAI_UNWATCHED) return gai_load(&gai_process.ends) == GAI_WATCHED;
    if (!gai_process.unload_is_watched) gai_process.unload_is_watched = gai_watch_unload(gai_unload);
    if (!gai_process.unload_is_watched || !gai_thread_key_new(&gai_process.end_key, gai_thread_ends)) return 0;
    if (gai_swap(&gai_process.ends, GAI_UNWATCHED, GAI_WATCHED)) return 1;
    gai_thread_key_end(gai_process.end_key);
    return 0;
}

/* Sets the key for the calling thread, so that gai_thread_ends runs at its end. */
static void gai_thread_watch(void)
{
    uint64_t generation = gai_load(&gai_process.generation);
    uintptr_t number = (uintptr_t)gai_thread_number();
    if (gai_thread.watched == generation) return;
    gai_lock_on(&gai_locks.global);
    if (gai_watch_ends() && gai_thread_key_set(gai_process.end_key, (void *)number)) gai_thread.watched = generation;
    gai_lock_off(&gai_locks.global);
}

/* Stops watching the ends of threads. On Windows, deleting the key would call the destructor for every living thread,
   so the key is kept until the code is unloaded. [global lock] */
static void gai_threads_forget(void)
{
#if !defined(_WIN32)
    if (gai_swap(&gai_process.ends, GAI_WATCHED, GAI_UNWATCHED)) gai_thread_key_end(gai_process.end_key);
#endif
}

/* ---- writing entries ---- */

/* Writes an entry for a call that succeeded. It replaces the old entry of the stream, an outdated entry, or any other.
   There is none for a stream that can outlive the pool's memory (gai_pool_look_for_reset). */
static void gai_tcache_note(const gai_site *site, galloc_pool *pool, const galloc_pool *key)
{
    uint64_t generation = gai_load(&gai_process.generation);
    int asks = gai_is_default_stream(site->handle) && !pool->one_context;
    CUcontext context = asks ? site->context : NULL;
    size_t at = gai_tcache_at(site->handle, context, key), probes;
    gai_tcache_entry *entry = &gai_tcache.entries[at ^ site->life % GAI_TCACHE_PROBES];
    if (!site->life || site->capture || site->broken || pool->variant.one_each) return;
    if (pool->lost_on_reset && !site->own_context) return;
    for (probes = GAI_TCACHE_PROBES; probes-- > 0;)
        if (gai_tcache.entries[at ^ probes].generation != generation) entry = &gai_tcache.entries[at ^ probes];
    for (probes = 0; probes < GAI_TCACHE_PROBES; probes++)
        if (gai_tcache_is(&gai_tcache.entries[at ^ probes], generation, site->handle, context, key))
            entry = &gai_tcache.entries[at ^ probes];
    if (entry == gai_tcache.last) gai_tcache.last = NULL;
    entry->generation = generation;
    entry->key = key;
    entry->pool = pool;
    entry->looks = (short)pool->config.stream_check;
    entry->uncached = (short)pool->variant.no_caches;
    entry->asks = asks && entry->looks ? 2 : asks;
    gai_tcache.one_context |= pool->one_context;
    entry->plain = pool->plain;
    entry->site = *site;
    entry->site.capture_forbids = 0; /* may change; see gai_tcache_may_act */
    if (site->handle == CU_STREAM_PER_THREAD) gai_thread_watch();
}

/* ---- the fast path ---- */

/* Returns whether driver calls on the legacy stream are allowed: not while a blocking stream is captured, which makes
   this query fail. The stream cache needs no such call. */
GAI_APART
static int gai_legacy_may_act(const gai_tcache_entry *entry)
{
    CUstreamCaptureStatus status;
    return !entry->looks || !gai_cu.StreamIsCapturing(CU_STREAM_LEGACY, &status);
}

static GAI_INLINE int gai_tcache_may_act(const gai_tcache_entry *entry)
{
    return entry->site.handle != CU_STREAM_LEGACY || gai_legacy_may_act(entry);
}

/* Returns the outcome when the stream cache has not served the call; GAI_LONG: the stream cache was shut. Without
   stream_check only an open stream cache proves that the stream has not been retired. */
static enum gai_outcome gai_tcache_outcome(const gai_tcache_entry *entry, enum gai_outcome outcome)
{
    if ((outcome == GAI_LONG && !entry->looks) || !gai_tcache_may_act(entry)) return GAI_LONG;
    return outcome == GAI_LONG ? GAI_KNOWN : outcome;
}

/* Notes a block that was allocated through this entry. */
static GAI_INLINE void gai_tcache_gave(gai_tcache_entry *entry, gai_block *block, uintptr_t addr, void **ptr)
{
    entry->last_ptr = addr;
    entry->last = block;
    gai_tcache.last = entry;
    *ptr = (void *)addr;
}

/* The fast path of an allocation: checks the entry and takes a block out of the stream cache. Takes no lock but the
   latch. The looks at the stream are made under it: threads that share the stream would look one after the other in any
   case, and so the thread that has the latch goes on with it (docs/experiments.md). The rounding, too, is read under
   the latch of an open stream cache: before that, the pool may have ended and another may have begun in its memory. */
static GAI_INLINE enum gai_outcome gai_malloc_by_entry(void **ptr, size_t bytes, uint32_t tag, cudaStream_t stream,
                                                     const galloc_pool *key, gai_tcache_entry **found)
{
    gai_tcache_entry *entry = *found = gai_tcache_find(stream, key);
    gai_block *block = NULL;
    gai_cache *cache;
    uintptr_t addr;
    enum gai_outcome outcome = GAI_LONG;
    int sure;
    if (!entry) return GAI_LONG;
    cache = &entry->site.stream->cache;
    gai_latch_on(&cache->latch);
    sure = gai_tcache_is_sure(entry);
    if (sure && cache->open == entry->site.life)
        block = gai_cache_pop(cache, GAI_MOSTLY(bytes <= entry->plain) ? gai_up(bytes, GAI_UNIT)
                                                                       : gai_rounded(entry->pool, bytes),
                              bytes, tag, &outcome);
    gai_latch_off(&cache->latch);
    if (!block) return sure ? gai_tcache_outcome(entry, outcome) : GAI_LONG;
    addr = block->addr;
    gai_store_pointer(&block->lent, entry->site.stream);
    gai_tcache_gave(entry, block, addr, ptr);
    return GAI_DONE;
}

static enum gai_outcome gai_block_by_entry(gai_block *block, void *ptr, const gai_tcache_entry *entry, int confirmed)
{
    enum gai_outcome outcome;
    gai_latch_on(&entry->site.stream->cache.latch);
    outcome = gai_cache_put(entry->site.stream, entry->site.life, block, ptr, confirmed);
    gai_latch_off(&entry->site.stream->cache.latch);
    return outcome;
}

/* The rest of gai_free_by_entry: the stream cache takes the block if the handle still is the same stream's. [latch] */
GAI_APART
static enum gai_outcome gai_block_confirmed(gai_block *block, void *ptr, const gai_tcache_entry *entry)
{
    if (!gai_tcache_confirms(entry)) return GAI_ASK;
    return gai_cache_put(entry->site.stream, entry->site.life, block, ptr, 1);
}

/* The fast path of a free. *is_free: the stream is not captured, as far as is known without its id; else nothing was
   done. */
static GAI_INLINE enum gai_outcome gai_free_by_entry(gai_block *block, void *ptr, const gai_tcache_entry *entry,
                                                     int *is_free)
{
    enum gai_outcome outcome = GAI_LONG;
    gai_latch_on(&entry->site.stream->cache.latch);
    *is_free = gai_tcache_is_free(entry);
    if (*is_free) outcome = gai_cache_put(entry->site.stream, entry->site.life, block, ptr, 0);
    if (outcome == GAI_ASK) outcome = gai_block_confirmed(block, ptr, entry);
    gai_latch_off(&entry->site.stream->cache.latch);
    return outcome;
}

/* Frees a block of another stream state. Without marks and without use by a stream cache, the block changes over to
   this stream state and enters its cache; the other stream gets no mark, since the program has ordered its work before
   this free. Other blocks stay claimed for the full call, if stream_check shows that the stream is not retired, and if
   like:pytorch is off. */
static enum gai_outcome gai_foreign_by_entry(gai_block *block, void *ptr, const gai_tcache_entry *entry)
{
    int suits;
    if (!gai_block_acquire(block, ptr)) return GAI_LONG;
    suits = !(block->tag & (GAI_SPECIAL | GAI_CACHED)) && !block->marks;
    if (!suits && entry->looks && !entry->uncached) return GAI_TAKEN;
    if (suits) gai_set_relaxed(&block->stream_id, entry->site.stream_id);
    if (suits) block->life = entry->site.life;
    gai_store_pointer(&block->lent, entry->site.stream);
    return suits ? gai_block_by_entry(block, ptr, entry, 0) : GAI_LONG;
}

/* After the stream cache has refused a block: queries the stream's id, and with GAI_ASK tries the stream cache again.
   If the pool cannot take the block on its short path either, the program holds the block again. */
GAI_APART
static enum gai_outcome gai_free_asked(enum gai_outcome outcome, gai_block *block, void *ptr,
                                       const gai_tcache_entry *entry)
{
    int confirms, taken;
    if (outcome == GAI_FOREIGN) { /* the address may belong to another pool's block now */
        if (gai_block_at((uintptr_t)ptr) != block) return GAI_LONG;
        outcome = gai_foreign_by_entry(block, ptr, entry);
    }
    if (outcome == GAI_DONE) return GAI_DONE;
    confirms = gai_tcache_confirms(entry);
    if (outcome == GAI_ASK && confirms) outcome = gai_block_by_entry(block, ptr, entry, 1);
    if (outcome == GAI_DONE) return GAI_DONE;
    taken = outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY;
    if (taken && confirms && gai_tcache_may_act(entry)) return outcome;
    if (taken) gai_store_pointer(&block->lent, entry->site.stream);
    return confirms ? gai_tcache_outcome(entry, GAI_LONG) : GAI_LONG;
}

/* Returns whether the block allocated last can be freed without a query for the context. It may have been freed, and
   its address reused on a default stream of another device; hence the check of `lent`. */
static GAI_INLINE int gai_tcache_same_context(const gai_tcache_entry *entry)
{
    return !entry->asks || (entry->asks == 1 && gai_load_pointer(&entry->last->lent) == entry->site.stream);
}

/* A thread often frees the block that it allocated last; this saves the look-up in the block map. If the address
   belongs to another block by now, the stream cache finds that `lent` or the address differs. */
static GAI_INLINE gai_block *gai_block_and_entry(void *ptr, cudaStream_t stream, gai_tcache_entry **found)
{
    gai_tcache_entry *entry = *found = gai_tcache.last;
    const galloc_pool *pool;
    gai_block *block;
    if (entry && entry->last_ptr == (uintptr_t)ptr &&
        gai_tcache_leads(entry, gai_load(&gai_process.generation), gai_named_stream(stream)) &&
        gai_tcache_same_context(entry))
        return entry->last;
    *found = NULL;
    block = gai_block_at((uintptr_t)ptr);
    if (!block) return NULL;
    pool = (const galloc_pool *)gai_load_pointer(&block->pool);
    *found = gai_tcache_find(stream, (const galloc_pool *)gai_load_pointer(&pool->key));
    return *found && (*found)->pool == pool ? block : NULL;
}

/* ---- slower paths ---- */

/* Allocates in a pinned pool. If *pool is NULL, pins the default pool first, also of a stream whose capture is
   invalidated: the pool counts the failure. */
static cudaError_t gai_alloc_in(galloc_pool **pool, void **ptr, const galloc_request *request)
{
    gai_site site;
    int device = 0;
    cudaError_t error = cudaSuccess;
    if (!ptr) error = gai_fail(cudaErrorInvalidValue, "ptr is NULL: it must point to the place for the address");
    if (!error && *pool) error = gai_pool_refuses(*pool);
    if (!error) error = gai_site_of(request->stream, &site);
    if (!error && !*pool) {
        error = gai_site_device(&site, &device);
        if (!error) error = gai_pool_of_device(pool, device);
    }
    if (!error) error = gai_site_is_sound(&site);
    if (error) {
        gai_thread.has_report = 0;
        if (*pool) gai_pool_count_failure(*pool, 0);
        return error;
    }
    error = gai_pool_alloc(*pool, ptr, request, &site);
    if (error) gai_dump(*pool);
    else gai_tcache_note(&site, *pool, request->pool);
    return error;
}

/* A full call without an entry. */
static cudaError_t gai_alloc_at(galloc_pool *pool, void **ptr, const galloc_request *request)
{
    cudaError_t error;
    if (ptr) *ptr = NULL;
    error = gai_begin();
    if (!error && pool) error = gai_pool_find(&pool);
    if (error) {
        gai_thread.has_report = 0;
        return error;
    }
    if (request->bytes || !ptr) error = gai_alloc_in(&pool, ptr, request);
    if (pool) gai_pool_unpin(pool);
    return error;
}

/* Returns whether any cached block of sufficient size can serve the request. */
static int gai_request_is_plain(const galloc_request *request)
{
    return !request->max_bytes && request->lifetime == GALLOC_LIFETIME_ANY && request->alignment <= GAI_UNIT &&
           !(request->alignment & (request->alignment - 1));
}

/* After a miss in the stream cache: the pool's short path. */
GAI_APART
static int gai_malloc_near(enum gai_outcome outcome, gai_tcache_entry *entry, void **ptr, size_t bytes, uint32_t tag)
{
    gai_block *block = NULL;
    if (outcome == GAI_LONG || bytes > (size_t)1 << (GAI_ADDRESS_BITS - 2)) return 0;
    if (outcome == GAI_DUE) block = gai_cache_pop_seen(entry->pool, &entry->site, bytes, tag);
    if (!block) block = gai_pool_take_near(entry->pool, &entry->site, bytes, tag, outcome == GAI_KNOWN_EMPTY);
    if (!block) return 0;
    gai_tcache_gave(entry, block, block->addr, ptr);
    return 1;
}

/* A full call. It may call the program, whose calls may replace the entry, so the entry is copied. If the stream state
   has changed, a new entry is written. */
static cudaError_t gai_alloc_far(enum gai_outcome outcome, const gai_tcache_entry *entry, void **ptr,
                                 const galloc_request *request)
{
    galloc_pool *pool;
    gai_site site;
    uint64_t life;
    cudaError_t error;
    if (outcome == GAI_LONG || !gai_tcache_pin(entry)) return gai_alloc_at(request->pool, ptr, request);
    *ptr = NULL;
    pool = entry->pool;
    site = entry->site;
    life = site.life;
    error = gai_pool_alloc(pool, ptr, request, &site);
    if (error) gai_dump(pool);
    if (!error && site.life != life) gai_tcache_note(&site, pool, request->pool);
    gai_pool_unpin(pool);
    return error;
}

/* A separate function, so that its callers stay short. */
GAI_APART
static cudaError_t gai_alloc_slowly(const char *function, enum gai_outcome outcome, gai_tcache_entry *entry, void **ptr,
                                    const galloc_request *request)
{
    gai_thread.caller = GAI_RETURN_ADDRESS();
    return gai_end(function, gai_alloc_far(outcome, entry, ptr, request));
}

GAI_APART
static cudaError_t gai_malloc_slowly(enum gai_outcome outcome, gai_tcache_entry *entry, galloc_pool *pool, void **ptr,
                                     size_t bytes, cudaStream_t stream)
{
    galloc_request request;
    if (gai_malloc_near(outcome, entry, ptr, bytes, 0)) return cudaSuccess;
    gai_thread.caller = GAI_RETURN_ADDRESS();
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    request.stream = stream;
    request.pool = pool;
    return gai_end(pool ? "galloc_pool_malloc" : "galloc_malloc", gai_alloc_far(outcome, entry, ptr, &request));
}

/* An allocation tries, in this order:
   gai_malloc_by_entry   the stream cache, under its latch
   gai_malloc_near       free blocks of the pool, under the pool's lock, which is taken once
   gai_alloc_far         a full call in the pool of the entry: search, then the ladder
   gai_alloc_at          a full call without an entry, which writes one
   A free tries, in this order:
   gai_free_by_entry     the stream cache, under its latch
   gai_free_asked        the stream cache again, after a query for the stream's id or for a block of another stream
   gai_pool_free_near    the free set of the stream, under the pool's lock, which is taken once
   gai_free_long         a full call */

static GAI_INLINE cudaError_t gai_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream)
{
    gai_tcache_entry *entry = NULL;
    enum gai_outcome outcome = GAI_LONG;
    if (ptr && bytes) outcome = gai_malloc_by_entry(ptr, bytes, 0, stream, pool, &entry);
    if (outcome == GAI_DONE) return cudaSuccess;
    return gai_malloc_slowly(outcome, entry, pool, ptr, bytes, stream);
}

static GAI_INLINE cudaError_t gai_alloc(void **ptr, const galloc_request *request)
{
    gai_tcache_entry *entry = NULL;
    enum gai_outcome outcome = GAI_LONG;
    if (ptr && request->bytes && gai_request_is_plain(request))
        outcome = gai_malloc_by_entry(ptr, request->bytes, request->tag, request->stream, request->pool, &entry);
    if (outcome == GAI_DONE) return cudaSuccess;
    if (gai_malloc_near(outcome, entry, ptr, request->bytes, request->tag)) return cudaSuccess;
    return gai_alloc_slowly("galloc_alloc", outcome, entry, ptr, request);
}

/* A full call, which writes an entry if there was none. */
GAI_APART
static cudaError_t gai_free_long(enum gai_outcome outcome, const gai_tcache_entry *entry, void *ptr, gai_block *block,
                                 cudaStream_t stream)
{
    galloc_pool *pool = NULL;
    gai_site site;
    cudaError_t error = cudaSuccess;
    int taken = outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY;
    if (taken || (outcome != GAI_LONG && gai_tcache_pin(entry))) { /* a used block keeps its pool alive */
        pool = entry->pool;
        site = entry->site;
    } else {
        error = gai_find_pool(&pool, ptr, stream, &site);
    }
    if (!pool) return gai_end_giving("galloc_free", error);
    error = gai_pool_free(pool, ptr, &site, taken ? block : NULL);
    if (taken && !gai_pool_pin(pool)) return gai_end_giving("galloc_free", error);
    if (!error && !(entry && site.life == entry->site.life) && (site.own_context || !pool->is_default))
        gai_tcache_note(&site, pool, (const galloc_pool *)pool->key);
    gai_pool_unpin(pool);
    return gai_end_giving("galloc_free", error);
}

/* The free of a block with a sampled guard: queues the check, and goes on as without debug. */
static cudaError_t gai_free_checked(const gai_tcache_entry *entry, void *ptr, gai_block *block, cudaStream_t stream)
{
    galloc_pool *pool = entry->pool;
    gai_site site = entry->site;
    enum gai_outcome outcome;
    int freed;
    gai_pool_check_near(pool, block, &site);
    gai_store_pointer(&block->lent, site.stream);
    outcome = gai_block_by_entry(block, ptr, entry, 1);
    freed = outcome == GAI_DONE;
    if (outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY)
        freed = gai_pool_free_near(pool, block, &site, outcome == GAI_TAKEN_EMPTY);
    if (!freed) return gai_free_long(outcome, entry, ptr, block, stream);
    gai_guards_tend(pool);
    return gai_end("galloc_free", cudaSuccess);
}

GAI_APART
static cudaError_t gai_free_slowly(enum gai_outcome outcome, const gai_tcache_entry *entry, void *ptr, gai_block *block,
                                   cudaStream_t stream)
{
    int taken = outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY;
    int watched = taken && gai_counted(&block->tag) & GAI_WATCHED_BLOCK;
    if (taken && gai_pool_free_near(entry->pool, block, &entry->site, outcome == GAI_TAKEN_EMPTY)) return cudaSuccess;
    gai_thread.caller = GAI_RETURN_ADDRESS();
    if (watched && gai_pool_checks_apart(entry->pool) && !gai_is_default_stream(entry->site.handle))
        return gai_free_checked(entry, ptr, block, stream);
    return gai_free_long(outcome, entry, ptr, block, stream);
}

static GAI_INLINE cudaError_t gai_free(void *ptr, cudaStream_t stream)
{
    gai_tcache_entry *entry = NULL;
    gai_block *block = gai_block_and_entry(ptr, stream, &entry);
    enum gai_outcome outcome = GAI_LONG;
    int is_free = 0;
    if (block) outcome = gai_free_by_entry(block, ptr, entry, &is_free);
    if (!is_free) return gai_free_slowly(GAI_LONG, entry, ptr, block, stream);
    if (outcome != GAI_DONE) outcome = gai_free_asked(outcome, block, ptr, entry);
    return outcome == GAI_DONE ? cudaSuccess : gai_free_slowly(outcome, entry, ptr, block, stream);
}

/* ==== PUBLIC ==================================================================================================== */
/* >>public */

/* The public functions. Each one checks its arguments, finds and pins the pool, and calls the sections above. Errors
   are returned through gai_end, which completes and logs the message. The variants with _ptsz map stream 0 to the
   per-thread default stream. */

static cudaStream_t gai_per_thread(cudaStream_t stream) { return stream ? stream : cudaStreamPerThread; }

/* Functions that take streams: their parameters, and the same for files compiled for per-thread default streams. A file
   sees one of each pair under the plain name; the implementation has both. */
#define GAI_STREAM_FUNCTIONS(X)                                                                                        \
    X(galloc_malloc, (void **ptr, size_t bytes, cudaStream_t stream),                                                  \
      galloc_malloc(ptr, bytes, gai_per_thread(stream)))                                                               \
    X(galloc_malloc_growable, (void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream),                       \
      galloc_malloc_growable(ptr, bytes, max_bytes, gai_per_thread(stream)))                                           \
    X(galloc_free, (void *ptr, cudaStream_t stream), galloc_free(ptr, gai_per_thread(stream)))                         \
    X(galloc_free_after, (void *ptr, const cudaStream_t *streams, int n),                                              \
      gai_end_giving("galloc_free_after", gai_free_after(ptr, streams, n, cudaStreamPerThread)))                       \
    X(galloc_alloc, (void **ptr, const galloc_request *request), gai_alloc_per_thread(ptr, request))                   \
    X(galloc_pool_malloc, (galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream),                          \
      galloc_pool_malloc(pool, ptr, bytes, gai_per_thread(stream)))                                                    \
    X(galloc_record_stream, (void *ptr, cudaStream_t stream), galloc_record_stream(ptr, gai_per_thread(stream)))       \
    X(galloc_stream_retire, (cudaStream_t stream), galloc_stream_retire(gai_per_thread(stream)))                       \
    X(galloc_resize, (void *ptr, size_t bytes, cudaStream_t stream),                                                   \
      galloc_resize(ptr, bytes, gai_per_thread(stream)))                                                               \
    X(galloc_graph_begin, (galloc_graph **graph, galloc_pool *pool, cudaStream_t stream),                              \
      galloc_graph_begin(graph, pool, gai_per_thread(stream)))                                                         \
    X(galloc_graph_release, (galloc_graph *graph, cudaStream_t stream),                                                \
      galloc_graph_release(graph, gai_per_thread(stream)))

#define GAI_DECLARE(name, parameters, call)                                                                            \
    GALLOC_API cudaError_t name parameters;                                                                            \
    GALLOC_API cudaError_t name##_ptsz parameters;
GAI_STREAM_FUNCTIONS(GAI_DECLARE)

GALLOC_API const char *galloc_last_message(void) { return gai_thread.last; }

GALLOC_API void galloc_set_log(void (*call)(int level, const char *text, void *user), void *user)
{
    uint64_t next;
    gai_log_lock();
    next = 1 - gai_process.log_function;
    gai_process.log_functions[next].call = call;
    gai_process.log_functions[next].user = user;
    gai_store(&gai_process.log_function, next);
    gai_lock_off(&gai_locks.log);
}

GALLOC_API galloc_config galloc_config_default(void) { return gai_config_default(); }

/* Copies as much as fits. Compilers that know the sizes warn about snprintf here. */
static void gai_copy_text(char *to, size_t size, const char *from)
{
    size_t length = gai_min(strlen(from), size - 1);
    memcpy(to, from, length);
    to[length] = 0;
}

GALLOC_API cudaError_t galloc_config_parse(galloc_config *config, const char *text, char *message, size_t size)
{
    char answer[GAI_MESSAGE];
    gai_seen seen = {0, 0};
    int right;
    if (!config || !text) gai_copy_text(answer, sizeof answer, "config and text must not be NULL");
    right = config && text && gai_parse(config, text, NULL, &seen, answer);
    if (right) gai_config_say_idle(config, &seen, answer);
    if (right) gai_say_idle(&seen, "log,snapshot_on_oom,trace", "but in the variable GALLOC_CONF", answer);
    if (message && size) gai_copy_text(message, size, answer);
    return right ? cudaSuccess : gai_end(__func__, gai_fail(cudaErrorInvalidValue, "configuration: %s", answer));
}

GALLOC_API cudaError_t galloc_config_print(const galloc_config *config, char *text, size_t size)
{
    char message[GAI_MESSAGE];
    if (text && size) text[0] = 0;
    if (!config || !text || !size)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "config and text must not be NULL, nor size 0"));
    if (!gai_config_is_right(config, message))
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "config: %s", message));
    if (gai_config_print(config, text, size)) return cudaSuccess;
    text[0] = 0;
    return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "a buffer of %zu bytes is too small: GALLOC_CONFIG_TEXT "
                                      "bytes suffice", size));
}

static const char gai_no_array[] = "array must not be NULL unless n is 0, nor n negative";

/* Looks up and pins the pool that a call names. wrong: what is wrong with its other arguments, or NULL. */
static cudaError_t gai_pool_of_call(galloc_pool **pool, const char *wrong)
{
    cudaError_t error = gai_begin();
    if (!error && !*pool) wrong = "pool is NULL";
    if (!error && wrong) error = gai_fail(cudaErrorInvalidValue, "%s", wrong);
    return error ? error : gai_pool_find(pool);
}

/* Ends a call in a pinned pool. */
static cudaError_t gai_end_in(galloc_pool *pool, const char *function, cudaError_t error)
{
    gai_pool_unpin(pool);
    return gai_end(function, error);
}

GALLOC_API cudaError_t galloc_pool_create(galloc_pool **pool, const galloc_config *config)
{
    galloc_config defaults = galloc_config_default();
    galloc_pool *made = NULL;
    cudaError_t error;
    if (!pool) return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "pool is NULL"));
    *pool = NULL;
    error = gai_begin();
    if (!error) error = gai_pool_new(&made, config ? config : &defaults, 0);
    if (!error) *pool = made->handle;
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_destroy(galloc_pool *pool)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end_giving(__func__, error);
    if (pool->is_default) {
        error = gai_fail(cudaErrorNotPermitted, "a default pool can only be ended by galloc_shutdown");
    } else {
        error = gai_pool_part(pool);
        if (!error) error = gai_pool_end(pool);
        if (error == cudaErrorNotPermitted) gai_say_live(pool->handle);
    }
    if (error) gai_pool_unpin(pool);
    return gai_end_giving(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_default(galloc_pool **pool, int device)
{
    galloc_pool *found;
    cudaError_t error;
    if (!pool) return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "pool is NULL"));
    *pool = NULL;
    error = gai_begin();
    if (!error && device == -1) error = gai_current_device(&device);
    if (!error) error = gai_pool_of_device(&found, device);
    if (error) return gai_end(__func__, error);
    *pool = found->handle;
    gai_pool_unpin(found);
    return gai_end(__func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_alloc(void **ptr, const galloc_request *request)
{
    if (!request) {
        if (ptr) *ptr = NULL;
        gai_thread.has_report = 0;
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "request is NULL"));
    }
    return gai_alloc(ptr, request);
}

GALLOC_API cudaError_t galloc_malloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    return gai_malloc(NULL, ptr, bytes, stream);
}

GALLOC_API cudaError_t galloc_malloc_growable(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    galloc_request request;
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    request.max_bytes = gai_max(bytes, max_bytes);
    request.stream = stream;
    return gai_alloc_slowly(__func__, GAI_LONG, NULL, ptr, &request);
}

GALLOC_API cudaError_t galloc_pool_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream)
{
    if (!pool) {
        if (ptr) *ptr = NULL;
        gai_thread.has_report = 0;
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "pool is NULL"));
    }
    return gai_malloc(pool, ptr, bytes, stream);
}

GALLOC_API cudaError_t galloc_free(void *ptr, cudaStream_t stream)
{
    return gai_free(ptr, stream);
}

GALLOC_API cudaError_t galloc_free_after(void *ptr, const cudaStream_t *streams, int n)
{
    return gai_end_giving(__func__, gai_free_after(ptr, streams, n, cudaStreamLegacy));
}

GALLOC_API cudaError_t galloc_resize(void *ptr, size_t bytes, cudaStream_t stream)
{
    galloc_pool *pool = NULL;
    gai_site site;
    int reported = 0;
    cudaError_t error = cudaSuccess;
    if (!ptr) error = gai_fail(cudaErrorInvalidDevicePointer, "ptr is NULL");
    else if (!bytes) error = gai_fail(cudaErrorInvalidValue, "0 bytes: must be at least 1; galloc_free frees");
    else if (bytes > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        error = gai_fail(cudaErrorNotSupported, "no address range of %zu bytes is left", bytes);
    if (!error) error = gai_find_pool(&pool, ptr, stream, &site);
    if (!error)
        error = gai_site_is_free(&site) ? cudaErrorNotSupported : gai_pool_resize(pool, ptr, bytes, &site, &reported);
    if (error) gai_thread.has_report = reported;
    if (error && pool) gai_dump(pool);
    if (pool) gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_record_stream(void *ptr, cudaStream_t stream)
{
    galloc_pool *pool;
    gai_site site;
    cudaError_t error;
    if (!ptr) return gai_end(__func__, gai_fail(cudaErrorInvalidDevicePointer, "ptr is NULL"));
    error = gai_find_pool(&pool, ptr, stream, &site);
    if (!pool) return gai_end_giving(__func__, error);
    error = gai_site_is_sound(&site);
    if (!error) error = gai_pool_record_stream(pool, ptr, &site);
    gai_pool_unpin(pool);
    return gai_end_giving(__func__, error);
}

GALLOC_API cudaError_t galloc_stream_retire(cudaStream_t stream)
{
    gai_site site;
    cudaError_t error = gai_begin();
    if (!error) error = gai_site_of(stream, &site);
    if (!error) error = gai_site_is_free(&site);
    if (error) return gai_end_giving(__func__, error);
    gai_lock_on(&gai_locks.global);
    error = gai_retire(&site);
    gai_lock_off(&gai_locks.global);
    return gai_end_giving(__func__, error);
}

/* Pins the pool of an existing group, or the pool for a new one. */
static cudaError_t gai_graph_pool(const galloc_graph *graph, galloc_pool *named, gai_site *site, galloc_pool **out)
{
    galloc_pool *pool = NULL;
    int device = 0;
    cudaError_t error = named ? gai_pool_find(&named) : cudaSuccess;
    if (error) return error;
    if (graph) error = gai_graph_find(graph, &pool);
    if (!error && !graph && !named) error = gai_site_device(site, &device);
    if (!error && !graph && !named) error = gai_pool_of_device(&pool, device);
    if (!error && named && pool && named != pool)
        error = gai_fail(cudaErrorInvalidValue, "the graph belongs to another pool");
    if (named && pool) gai_pool_unpin(pool);
    *out = named ? named : pool;
    if (error && *out) gai_pool_unpin(*out);
    return error;
}

GALLOC_API cudaError_t galloc_graph_begin(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream)
{
    gai_site site;
    cudaError_t error = gai_begin();
    if (!error && !graph) error = gai_fail(cudaErrorInvalidValue, "graph is NULL");
    if (!error && (!stream || stream == cudaStreamLegacy))
        error = gai_fail(cudaErrorInvalidValue, "the legacy stream cannot be captured");
    if (!error) error = gai_site_of(stream, &site);
    if (!error) error = gai_site_is_sound(&site);
    if (!error) error = gai_graph_pool(*graph, pool, &site, &pool);
    if (error) return gai_end(__func__, error);
    error = *graph ? gai_graph_begin(pool, *graph, NULL, &site) : gai_graph_begin_new(graph, pool, &site);
    return gai_end_in(pool, __func__, error);
}

GALLOC_API cudaError_t galloc_graph_end(galloc_graph *graph)
{
    galloc_pool *pool;
    cudaError_t error = gai_begin();
    if (!error && !graph) error = gai_fail(cudaErrorInvalidValue, "graph is NULL");
    if (!error) error = gai_graph_find(graph, &pool);
    if (error) return gai_end(__func__, error);
    return gai_end_in(pool, __func__, gai_graph_end(pool, graph));
}

GALLOC_API cudaError_t galloc_graph_release(galloc_graph *graph, cudaStream_t stream)
{
    gai_site site;
    gai_scope scope;
    galloc_pool *pool;
    int has_stream = stream != GALLOC_NO_STREAM;
    CUresult result = CUDA_SUCCESS;
    cudaError_t error = gai_begin();
    if (!error && !graph) error = gai_fail(cudaErrorInvalidValue, "graph is NULL");
    if (!error && has_stream) error = gai_site_of(stream, &site);
    if (!error && has_stream) error = gai_site_is_free(&site);
    if (!error && has_stream) result = gai_site_context(&site); /* a default stream is the current context's */
    if (result) error = gai_driver_failed(result, "looking at the stream");
    if (!error) error = gai_graph_find(graph, &pool);
    if (error) return gai_end_giving(__func__, error);
    error = has_stream ? gai_pool_enter(pool, &scope) : gai_graph_leave(pool, graph);
    if (!error && has_stream) {
        error = gai_graph_release(pool, graph, &site);
        gai_pool_leave(pool, &scope, 0);
    }
    gai_pool_unpin(pool);
    return gai_end_giving(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_reserve(galloc_pool *pool, size_t bytes)
{
    gai_job job;
    galloc_request request;
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end(__func__, error);
    memset(&job, 0, sizeof job);
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    job.pool = pool;
    if (pool->variant.one_each)
        error = gai_fail(cudaErrorNotSupported, "galloc_pool_reserve needs backend:native, since others keep no "
                         "free memory");
    if (!error) error = gai_pool_refuses(pool);
    if (!error) error = gai_params_of(pool, &request, &job.params);
    if (!error && bytes) {
        job.params.just_ready = 1;
        gai_job_run(&job);
        error = job.error;
        if (error) gai_thread.has_report = job.reported;
        if (error) gai_dump(pool);
    }
    return gai_end_in(pool, __func__, error);
}

/* Trims a pinned pool and unpins it. */
static cudaError_t gai_pool_give_back(galloc_pool *pool, size_t keep_bytes, int synchronised, size_t *released)
{
    gai_scope scope;
    size_t gone = 0;
    cudaError_t error = gai_pool_enter(pool, &scope);
    if (!error) {
        error = gai_pool_shrink(pool, keep_bytes, synchronised, &gone);
        gai_pool_leave(pool, &scope, !synchronised);
    }
    if (released) *released = gone;
    gai_pool_unpin(pool);
    return error;
}

GALLOC_API cudaError_t galloc_pool_trim(galloc_pool *pool, size_t keep_bytes, size_t *released)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (released) *released = 0;
    return gai_end_giving(__func__, error ? error : gai_pool_give_back(pool, keep_bytes, 0, released));
}

GALLOC_API cudaError_t galloc_pool_sync_point(galloc_pool *pool, size_t *released)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (released) *released = 0;
    if (!error) error = gai_pool_give_back(pool, pool->config.release_threshold, 1, released);
    return gai_end_giving(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_set_limit(galloc_pool *pool, size_t bytes)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end(__func__, error);
    gai_budget_set_own(pool, bytes);
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_pool_config(galloc_pool *pool, galloc_config *config)
{
    cudaError_t error = gai_pool_of_call(&pool, config ? NULL : "config is NULL");
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    gai_pool_read_config(pool, config);
    gai_lock_off(&pool->lock);
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_pool_decisions(galloc_pool *pool, galloc_decision *array, int n, int *count)
{
    int i;
    cudaError_t error = gai_pool_of_call(&pool, n < 0 || (n && !array) ? gai_no_array : NULL);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    for (i = 0; i < n && i < pool->tuning.decided; i++) array[i] = pool->tuning.decisions[i];
    if (count) *count = pool->tuning.decided;
    gai_lock_off(&pool->lock);
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_pool_freeze(galloc_pool *pool)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    pool->tuning.watching = 0;
    pool->tuning.frozen = pool->config.strategy == GALLOC_STRATEGY_HEURISTIC;
    gai_lock_off(&pool->lock);
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_pool_history(galloc_pool *pool, size_t entries)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end(__func__, error);
    return gai_end_in(pool, __func__, gai_pool_remember(pool, entries));
}

GALLOC_API cudaError_t galloc_pool_history_stacks(galloc_pool *pool, size_t frames)
{
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end(__func__, error);
    return gai_end_in(pool, __func__, gai_pool_keep_stacks(pool, frames));
}

/* Notes a text in all pools that have a history. */
static void gai_annotate(const char *text)
{
    galloc_pool *pool;
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool; pool = pool->next) {
        gai_lock_on(&pool->lock);
        gai_history_annotation(pool, text);
        gai_lock_off(&pool->lock);
    }
    gai_lock_off(&gai_locks.global);
    gai_trace_want(1);
}

GALLOC_API cudaError_t galloc_annotate(const char *text)
{
    cudaError_t error = gai_begin_apart();
    if (!error && !text) error = gai_fail(cudaErrorInvalidValue, "text is NULL");
    if (!error) gai_annotate(text);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_tag_name(uint32_t tag, const char *name)
{
    cudaError_t error = gai_begin_apart();
    if (!error && !gai_tag_set(tag, name))
        error = gai_fail(cudaErrorMemoryAllocation, "%d tags have names already", GAI_TAG_NAMES);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_set_callbacks(galloc_pool *pool, const galloc_callbacks *callbacks)
{
    galloc_callbacks call;
    gai_scope scope;
    uint64_t settings = 0;
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    memset(&call, 0, sizeof call);
    if (callbacks) call = *callbacks;
    if (error) return gai_end(__func__, error);
    error = gai_pool_enter(pool, &scope);
    if (!error) {
        error = gai_pool_call(pool, &call, &settings);
        gai_pool_leave(pool, &scope, 0);
        if (!error) gai_pool_await_asked(pool, settings);
    }
    return gai_end_in(pool, __func__, error);
}

GALLOC_API cudaError_t galloc_oom_report(galloc_report *report)
{
    if (!report) return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "report is NULL"));
    if (!gai_thread.has_report)
        return gai_end(__func__, gai_fail(cudaErrorNotReady, "no allocation of this thread ran out of memory"));
    *report = gai_thread.report;
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_report_text(const galloc_report *report, char *text, size_t size)
{
    if (text && size) text[0] = 0;
    if (!report || !text || !size)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "report and text must not be NULL, nor size 0"));
    if (gai_report_print(report, text, size)) return cudaSuccess;
    text[0] = 0;
    return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "a buffer of %zu bytes is too small: GALLOC_REPORT_TEXT "
                                      "bytes suffice", size));
}

#define GAI_CALL_READ(name, function)                                        \
    stats->driver.name = gai_counted(&pool->stats.driver.name);              \
    stats->driver_ns.name = gai_counted(&pool->stats.driver_ns.name);        \
    stats->driver_longest_ns.name = gai_counted(&pool->stats.driver_longest_ns.name);
#define GAI_CALL_RESET(name, function)                    \
    gai_set_relaxed(&pool->stats.driver.name, 0);         \
    gai_set_relaxed(&pool->stats.driver_ns.name, 0);      \
    gai_set_relaxed(&pool->stats.driver_longest_ns.name, 0);

GALLOC_API cudaError_t galloc_pool_stats(galloc_pool *pool, galloc_stats *stats)
{
    const gai_capture *capture;
    cudaError_t error = gai_pool_of_call(&pool, stats ? NULL : "stats is NULL");
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    gai_pool_lock_caches(pool);
    gai_stats_locked(pool, stats);
    gai_stats_derive(pool, stats);
    gai_pool_unlock_caches(pool);
    gai_stat_keep_peaks(pool, stats); /* what was told does not fall */
    stats->graph_bytes = gai_pool_captured(pool);
    for (capture = pool->captures; capture; capture = capture->next) stats->graphs++;
    GALLOC_DRIVER_CALLS(GAI_CALL_READ)
    gai_lock_off(&pool->lock);
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_pool_torch_stats(galloc_pool *pool, galloc_torch_stats *stats)
{
    cudaError_t error = gai_pool_of_call(&pool, stats ? NULL : "stats is NULL");
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    if (pool->mixed.counted) *stats = pool->torch_stats;
    else error = gai_fail(cudaErrorNotSupported, "the pool is not like:pytorch with "
                          "expandable_segments:False");
    gai_lock_off(&pool->lock);
    return gai_end_in(pool, __func__, error);
}

GALLOC_API cudaError_t galloc_pool_streams(galloc_pool *pool, galloc_stream_stats *array, int n, int *count)
{
    gai_stream *stream;
    int i = 0;
    cudaError_t error = gai_pool_of_call(&pool, n < 0 || (n && !array) ? gai_no_array : NULL);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = stream->next) {
        if (!gai_stream_is_plain(stream)) continue;
        if (i < n) gai_stream_read(pool, stream, &array[i]);
        i++;
    }
    gai_lock_off(&pool->lock);
    if (count) *count = i;
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_pool_stats_reset(galloc_pool *pool)
{
    galloc_stats now, *stats;
    cudaError_t error = gai_pool_of_call(&pool, NULL);
    if (error) return gai_end(__func__, error);
    stats = &pool->stats;
    gai_lock_on(&pool->lock);
    gai_pool_shut_caches(pool); /* the pool would not see the blocks that they reuse, though these count as new now */
    gai_stats_now(pool, &now);
    gai_stat_reset(&stats->live, &now.live);
    gai_stat_reset(&stats->allocated, &now.allocated);
    gai_stat_reset(&stats->reserved, &now.reserved);
    gai_stat_reset(&stats->cached, &now.cached);
    gai_stat_reset(&stats->blocks, &now.blocks);
    stats->mallocs -= now.mallocs;
    pool->watch_at -= now.mallocs;
    pool->look_at -= now.mallocs;
    stats->frees -= now.frees;
    stats->hits -= now.hits;
    stats->failures = stats->rejections = stats->grows = 0;
    stats->splits = stats->merges = stats->marks = stats->waits = stats->moves = stats->moved_bytes = 0;
    stats->collections = stats->collected_bytes = stats->checks = stats->unchecked = stats->damages = 0;
    if (pool->variant.count) pool->variant.count(pool, GAI_COUNT_RESET, NULL);
    GALLOC_DRIVER_CALLS(GAI_CALL_RESET)
    gai_lock_off(&pool->lock);
    return gai_end_in(pool, __func__, cudaSuccess);
}

GALLOC_API cudaError_t galloc_snapshot(galloc_pool *pool, int format, galloc_write write, void *user)
{
    return gai_end(__func__, gai_snapshot(pool, format, write, user));
}

GALLOC_API cudaError_t galloc_snapshot_save(galloc_pool *pool, const char *path)
{
    return gai_end(__func__, gai_snapshot_save(pool, path));
}

GALLOC_API cudaError_t galloc_live_text(galloc_pool *pool, char *text, size_t size)
{
    gai_string string = {text, size};
    gai_live_groups live;
    cudaError_t error;
    if (!text || !size)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "text must not be NULL, nor size 0"));
    text[0] = 0;
    error = gai_live_take(pool, &live);
    if (error) return gai_end(__func__, error);
    gai_print_lives(&string, live.kinds, live.n_kinds);
    gai_print_stacks(&string, &live);
    GALLOC_FREE(live.kinds);
    if (!string.left)
        error = gai_fail(cudaErrorInvalidValue, "a buffer of %zu bytes is too small: GALLOC_REPORT_TEXT bytes suffice",
                         size);
    if (error) text[0] = 0;
    return gai_end(__func__, error);
}

GALLOC_API int galloc_pool_check(galloc_pool *pool)
{
    int broken;
    if (!pool || gai_begin()) return -1;
    if (gai_pool_find(&pool)) {
        (void)gai_end(__func__, cudaErrorInvalidResourceHandle);
        return -1;
    }
    gai_lock_on(&pool->paging);
    gai_lock_on(&pool->lock);
    gai_pool_lock_caches(pool);
    broken = gai_check_pool(pool);
    gai_pool_unlock_caches(pool);
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->paging);
    gai_pool_unpin(pool);
    return broken;
}

GALLOC_API cudaError_t galloc_pointer_info(const void *ptr, galloc_pointer *info)
{
    galloc_pool *pool;
    gai_block *block;
    int used;
    cudaError_t error = gai_begin();
    if (error) return gai_end(__func__, error);
    if (!info) return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "info is NULL"));
    memset(info, 0, sizeof *info);
    pool = gai_pool_around(ptr);
    if (!pool) return cudaSuccess;
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    block = gai_block_around(pool, (uintptr_t)ptr);
    if (block && gai_block_has_pages(block)) {
        info->pool = pool->handle;
        info->base = (void *)block->addr;
        used = gai_load_pointer(&block->lent) != NULL;
        info->requested = used ? (size_t)gai_counted(&block->requested) : 0;
        info->usable = gai_block_usable(block);
        if (used && gai_counted(&block->tag) & GAI_WATCHED_BLOCK && pool->config.debug & GALLOC_DEBUG_GUARDS)
            info->usable = info->requested;
        info->room = gai_max(info->usable, block->segment->given ? 0 : block->room);
        info->stream_id = gai_counted(&block->stream_id);
        info->capture_id = gai_block_capture_id(block);
        info->device = pool->config.device;
        info->tag = used ? (uint32_t)gai_counted(&block->tag) : 0;
        info->state = used ? GALLOC_STATE_USED : GALLOC_STATE_FREE;
    }
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return cudaSuccess;
}

/* The pool of the current device for memory that is for all streams: it is freed on the legacy stream after all work
   with it, so that what is free there is free for all. Of two threads that make it one succeeds. */
static cudaError_t gai_override_pool(galloc_pool **pool)
{
    galloc_config config;
    galloc_pool *made = NULL;
    void **place;
    int device;
    cudaError_t error = gai_begin();
    if (!error) error = gai_current_device(&device);
    if (error) return gai_end("galloc_override_malloc", error);
    error = galloc_pool_default(&made, device); /* which knows whether there is such a device */
    if (error) return error;
    place = &gai_process.override_pool[device];
    *pool = (galloc_pool *)gai_load_pointer(place);
    if (*pool) return cudaSuccess;
    error = galloc_pool_config(made, &config);
    if (!error) error = galloc_pool_create(&made, &config);
    if (error) return error;
    gai_lock_on(&gai_locks.global);
    if (!*place) gai_store_pointer(place, made);
    *pool = (galloc_pool *)*place;
    gai_lock_off(&gai_locks.global);
    if (*pool != made) (void)galloc_pool_destroy(made);
    return cudaSuccess;
}

/* Waits for the legacy stream of the current context. It ends no capture of another thread, whose stream may be a
   blocking one. */
static CUresult gai_override_await_legacy(void)
{
    CUstreamCaptureStatus status;
    CUcontext context = NULL;
    gai_scope scope;
    CUresult result = gai_cu.StreamIsCapturing(CU_STREAM_LEGACY, &status);
    if (!result) result = gai_cu.CtxGetCurrent(&context);
    if (!result) result = gai_scope_enter(&scope, context);
    if (result) return result;
    result = gai_cu.StreamSynchronize(CU_STREAM_LEGACY);
    gai_scope_leave(&scope);
    return result;
}

/* Returns whether the driver allocates a block in stream order (cudaMallocAsync). */
static int gai_override_is_queued(const void *ptr)
{
    gai_block *block;
    int queued;
    galloc_pool *pool = gai_pool_around(ptr);
    if (!pool) return 0;
    gai_lock_on(&pool->lock);
    block = gai_block_around(pool, (uintptr_t)ptr);
    queued = block && pool->variant.alloc && !block->segment->outside;
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return queued;
}

/* Waits until the driver has allocated what cudaMalloc returns. */
static cudaError_t gai_override_allocated(void **ptr)
{
    CUresult result = gai_override_is_queued(*ptr) ? gai_override_await_legacy() : CUDA_SUCCESS;
    if (!result) return cudaSuccess;
    if (galloc_free(*ptr, cudaStreamLegacy)) (void)galloc_free(*ptr, cudaStreamLegacy); /* one call may have failed */
    *ptr = NULL;
    return gai_end("galloc_override_malloc", gai_driver_failed(result, "cuStreamSynchronize"));
}

GALLOC_API cudaError_t galloc_override_malloc(void **ptr, size_t bytes)
{
    galloc_pool *pool = NULL;
    cudaError_t error = gai_override_pool(&pool);
    if (error && ptr) *ptr = NULL;
    if (!error) error = galloc_pool_malloc(pool, ptr, bytes, cudaStreamLegacy);
    return error || !gai_load(&gai_process.given_pools) ? error : gai_override_allocated(ptr);
}

/* Waits for all work of a context, if it is one of the device. */
static CUresult gai_override_wait_in(CUcontext context, CUdevice device)
{
    gai_scope scope;
    CUdevice its = -1;
    CUresult result = gai_scope_push(&scope, context);
    if (result) return result;
    result = gai_cu.CtxGetDevice(&its);
    if (!result && its == device) result = gai_cu.CtxSynchronize();
    gai_scope_leave(&scope);
    return result;
}

/* Waits for all work of a device: cudaMalloc's memory is for every stream. */
static CUresult gai_override_wait(CUcontext primary, CUdevice device)
{
    CUcontext context = NULL;
    unsigned long long id;
    enum gai_health health;
    size_t n;
    CUresult result = gai_override_wait_in(primary, device);
    if (!result) result = gai_cu.CtxGetCurrent(&context);
    if (!result && context && context != primary) result = gai_override_wait_in(context, device);
    for (n = 0; !result && gai_context_known(n, &context, &id); n++) {
        result = gai_context_look(context, id, &health);
        if (health == GAI_ALIVE) result = gai_override_wait_in(context, device);
        /* Nothing runs any more in a context that has ended, or has failed for good. */
        if (health == GAI_DEAD || (health == GAI_ALIVE && gai_is_sticky(result))) result = CUDA_SUCCESS;
    }
    return result;
}

/* In CUDA, a free on the legacy stream is work there: it comes after earlier work of all blocking streams, and before
   their later work. A free on a blocking stream comes after earlier work of the legacy stream. galloc queues no work,
   so an event does it. While a blocking stream is captured, an event would end the capture; then the driver's answer
   about the legacy stream is an error. */
static CUresult gai_override_order(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUevent event = NULL;
    CUresult result = gai_cu.StreamIsCapturing(stream, &status);
    if (!result) result = gai_cu.EventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result) return result;
    result = gai_cu.EventRecord(event, stream);
    (void)gai_cu.EventDestroy(event);
    return result;
}

/* Waits for the work that comes before a stream's next operation. It ends no capture of another stream. */
static CUresult gai_override_finish(gai_site *site)
{
    gai_scope scope;
    CUresult result = gai_site_context(site);
    if (!result) result = gai_scope_enter(&scope, site->context);
    if (result) return result;
    result = site->capture ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : gai_override_order(site->handle);
    if (!result) result = gai_cu.StreamSynchronize(site->handle);
    gai_scope_leave(&scope);
    return result;
}

/* Once the driver has shut down, a free succeeds and does nothing. */
static cudaError_t gai_override_failed(void *ptr, CUresult result, const char *call)
{
    return gai_is_driver_gone(result) ? galloc_free(ptr, cudaStreamLegacy) : gai_driver_failed(result, call);
}

/* Frees a block on the legacy stream of the device, after a wait for the site's stream or the device. */
static cudaError_t gai_override_return(void *ptr, CUdevice device, gai_site *site, int how)
{
    gai_scope scope;
    CUcontext primary = NULL;
    cudaError_t error;
    CUresult result = CUDA_SUCCESS;
    if (how == GALLOC_OVERRIDE_STREAM) result = gai_override_finish(site);
    if (result) return gai_override_failed(ptr, result, "waiting for the stream");
    result = gai_cu.DevicePrimaryCtxRetain(&primary, device);
    if (result) return gai_override_failed(ptr, result, "cuDevicePrimaryCtxRetain");
    if (how == GALLOC_OVERRIDE_DEVICE) result = gai_override_wait(primary, device);
    if (result) {
        error = gai_override_failed(ptr, result, "waiting for the device");
    } else if ((result = gai_scope_push(&scope, primary)) != CUDA_SUCCESS) {
        error = gai_override_failed(ptr, result, "cuCtxPushCurrent");
    } else {
        error = galloc_free(ptr, cudaStreamLegacy);
        gai_scope_leave(&scope);
    }
    (void)gai_cu.DevicePrimaryCtxRelease(device);
    return error;
}

GALLOC_API cudaError_t galloc_override_free(void *ptr, cudaStream_t stream, int how)
{
    galloc_pointer info;
    gai_site site;
    CUresult result;
    cudaError_t error = gai_begin();
    if (error == cudaErrorCudartUnloading) return galloc_free(ptr, stream);
    if (error) return gai_end(__func__, error);
    error = galloc_pointer_info(ptr, &info);
    if (error) return error;
    if (how < GALLOC_OVERRIDE_DEVICE || how > GALLOC_OVERRIDE_ORDERED)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "how is %d: must be GALLOC_OVERRIDE_...", how));
    if (info.state != GALLOC_STATE_USED) return galloc_free(ptr, stream); /* which says what is wrong */
    if (how == GALLOC_OVERRIDE_ORDERED && info.pool == gai_load_pointer(&gai_process.override_pool[info.device]))
        how = GALLOC_OVERRIDE_STREAM;
    /* Also binds a context, which a thread may lack. */
    if (how != GALLOC_OVERRIDE_DEVICE) error = gai_site_of(stream, &site);
    if (error == cudaErrorCudartUnloading) return galloc_free(ptr, stream);
    if (error) return gai_end(__func__, error);
    if (how != GALLOC_OVERRIDE_ORDERED) return gai_end(__func__, gai_override_return(ptr, info.device, &site, how));
    result = stream && stream != CU_STREAM_LEGACY ? CUDA_SUCCESS : gai_override_order(stream);
    if (result) return gai_end(__func__, gai_override_failed(ptr, result, "ordering the legacy stream"));
    return galloc_free(ptr, stream);
}

/* Ends a pinned pool. */
static cudaError_t gai_shutdown_pool(galloc_pool *pool)
{
    cudaError_t error = cudaErrorUnknown;
    int tries; /* a graph that ends between both leaves pages that on_unmap could not be told of */
    for (tries = 0; error == cudaErrorUnknown && tries < 2; tries++) {
        error = gai_pool_part(pool);
        if (!error) error = gai_pool_end(pool);
    }
    if (error) gai_pool_unpin(pool);
    return error;
}

/* Ends the pools of a device that the program has not created, as far as they end. */
static cudaError_t gai_shutdown_device(int device)
{
    void **of_override = &gai_process.override_pool[device];
    galloc_pool *pool = (galloc_pool *)gai_load_pointer(of_override);
    cudaError_t first = cudaSuccess, error = cudaSuccess;
    if (pool && !gai_pool_find(&pool)) first = gai_shutdown_pool(pool);
    if (!first) gai_store_pointer(of_override, NULL);
    pool = (galloc_pool *)gai_load_pointer(&gai_process.default_pool[device]);
    if (pool && gai_pool_pin(pool)) error = gai_shutdown_pool(pool);
    return first ? first : error;
}

GALLOC_API cudaError_t galloc_shutdown(void)
{
    galloc_pool *pool;
    int device;
    cudaError_t error = gai_begin(), first = cudaSuccess;
    if (error) return gai_end_giving(__func__, error);
    for (device = 0; device < GAI_DEVICES; device++) {
        error = gai_shutdown_device(device);
        if (error && !first) first = error;
    }
    if (gai_thread.damaged) gai_damages_say(); /* while there are stacks */
    gai_lock_on(&gai_locks.global);
    for (pool = gai_process.pools; pool && pool->is_default; pool = pool->next) continue;
    if (pool)
        error = gai_fail(cudaErrorNotPermitted, "a pool of galloc_pool_create still exists: destroy it first");
    if (pool && !first) first = error;
    if (!gai_process.pools) {
        gai_pools_free();
        gai_map_end(&gai_process.block_map);
        gai_map_end(&gai_process.page_map);
        gai_list_free(gai_process.known_contexts);
        gai_process.known_contexts = NULL;
        gai_store_pointer(&gai_process.driver_ready, NULL);
        gai_generation_end();
        gai_threads_forget();
    }
    gai_lock_off(&gai_locks.global);
    if (first == cudaErrorNotPermitted) gai_say_live(NULL);
    return gai_end_giving(__func__, first);
}

static cudaError_t gai_alloc_per_thread(void **ptr, const galloc_request *request)
{
    galloc_request mapped;
    if (!request) return galloc_alloc(ptr, request);
    mapped = *request;
    mapped.stream = gai_per_thread(request->stream);
    return galloc_alloc(ptr, &mapped);
}

#define GAI_DEFINE_PER_THREAD(name, parameters, call)                                                                  \
    GALLOC_API cudaError_t name##_ptsz parameters { return call; }
GAI_STREAM_FUNCTIONS(GAI_DEFINE_PER_THREAD)

#if defined(CUDA_API_PER_THREAD_DEFAULT_STREAM) || defined(__CUDA_API_PER_THREAD_DEFAULT_STREAM)
#define galloc_malloc galloc_malloc_ptsz
#define galloc_malloc_growable galloc_malloc_growable_ptsz
#define galloc_free galloc_free_ptsz
#define galloc_free_after galloc_free_after_ptsz
#define galloc_alloc galloc_alloc_ptsz
#define galloc_pool_malloc galloc_pool_malloc_ptsz
#define galloc_record_stream galloc_record_stream_ptsz
#define galloc_stream_retire galloc_stream_retire_ptsz
#define galloc_resize galloc_resize_ptsz
#define galloc_graph_begin galloc_graph_begin_ptsz
#define galloc_graph_release galloc_graph_release_ptsz
#endif

#if defined(__cplusplus)
} /* extern "C++" */
#endif

#endif /* GALLOC_IMPLEMENTATION */

/* LICENSE: choose either of these.

   MIT No Attribution. Copyright (c) 2026 the galloc authors. Permission is hereby granted, free of charge, to any
   person obtaining a copy of this software and associated documentation files, to deal in the software without
   restriction, including without limitation the rights to use, copy, modify, merge, publish, distribute, sublicense,
   and/or sell copies of it, and to permit persons to whom it is furnished to do so. The software is provided "as is",
   without warranty of any kind, express or implied, including but not limited to the warranties of merchantability,
   fitness for a particular purpose and noninfringement. In no event shall the authors be liable for any claim,
   damages or other liability arising from the software or its use.

   Public domain (unlicense.org). This is free and unencumbered software released into the public domain. Anyone is
   free to copy, modify, publish, use, compile, sell, or distribute it, for any purpose and by any means. */
