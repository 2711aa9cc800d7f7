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
     - access device memory: all bookkeeping is on the host
     - change the current device, or the error that cudaGetLastError returns
     - allocate managed, pinned or peer-mapped memory

   OPTIONS             default   define where           effect
     GALLOC_STATIC        off    every file             All functions are static. Each file that calls them must also
                                                        define GALLOC_IMPLEMENTATION, and has a heap and limits of
                                                        its own: memory of one file cannot be freed in another
     GALLOC_MALLOC, _FREE malloc implementation         Allocate and free host memory, about 300 bytes per block.
                                                        Define both or neither. Called with locks held: they must
                                                        call neither galloc nor CUDA
     GALLOC_LOG(text)     stderr implementation         Gets one line for each call that fails; no lock is held.
                                                        galloc_set_log sets a function at run time
     GALLOC_CLOCK()       system implementation         Nanoseconds (uint64_t) of a clock that never goes back
     GALLOC_ASSERT(c)     none   implementation         Internal checks; they cost nothing when it is not defined

   STEP BY STEP
     1  galloc_malloc and galloc_free use the default pool of the stream's device. The first call creates it.
     2  galloc_malloc_growable allocates a block that galloc_resize can grow in place. galloc_resize takes any block,
        but without reserved addresses it may return cudaErrorNotSupported; then copy the contents to a new block.
     3  galloc_pool_create makes a pool of your own: for another limit, another device, or a heap that ends as a whole.
        Start from galloc_config_default(). galloc_pool_malloc allocates from that pool; galloc_alloc takes a
        galloc_request with all parameters. galloc_free and galloc_resize find the pool of a block themselves.
     4  galloc_pool_reserve creates memory in advance, so that later allocations need no driver call.
     5  galloc_pool_stats and galloc_pool_streams show the state of a pool (galloc_pool_default gives the default pool).
        galloc_pointer_info describes an address. galloc_pool_trim gives free memory back to the device.
     6  Call galloc_stream_retire before cudaStreamDestroy. Call galloc_shutdown at the end if you want to find leaks.
     The variable GALLOC_CONF sets the default pools' settings: GALLOC_CONF=memory_limit:20G,growth:64M ./program

   ON STREAMS
     Free a block on the stream that used it last: all work queued on that stream before galloc_free may still use the
     block, and galloc reuses the memory only in an order that is safe for this work:
       - Later work on the same stream may reuse the memory at once. No event is recorded and nothing waits.
       - Work on another stream may reuse it when the earlier work is known to be complete (reuse:completed); when a
         wait that galloc queued already orders that stream after the earlier work (reuse:followed); or after galloc
         queues such a wait (reuse:wait), which it does only when memory is short (ON RUNNING OUT).
       - The legacy stream and the blocking streams of its context share freed memory at once, since CUDA orders them.
     Several streams: if more than one stream uses a block, name them all. Free it with galloc_free_after, or call
     galloc_record_stream for each further stream before galloc_free.
     New memory: memory from galloc_malloc is ready for work queued on that stream after the call, and for work ordered
     after such work. cudaMemcpy right after galloc_malloc on a non-blocking stream is a race: cudaMemcpy runs on the
     legacy stream, which is not ordered after yours. Use cudaMemcpyAsync on the same stream.
     Destroyed streams: you may destroy a stream whose freed blocks are still cached: galloc identifies streams by id,
     because CUDA reuses handles. Call galloc_stream_retire first; otherwise galloc finds the memory that the stream
     freed last only when memory runs out. The call is required with stream_check:off (ON THREADS), and for a stream
     that galloc_record_stream named for a block not yet freed.
     Deadlocks: set reuse:completed+followed if streams synchronise by other means than events (NCCL kernels on two
     streams, cuStreamWaitValue, spinning kernels). There, a wait that galloc queues can cause a deadlock.
     Events: galloc records an event on a stream only in a call that names the stream (with galloc_record_stream: at the
     free), and only when a second stream is in use: about one event per 2 MiB freed. An event on the legacy stream
     makes all blocking streams wait for each other, so galloc records one there only when another stream needs the
     memory.
     Contexts: streams of any context of the device may be used. galloc learns of a context other than the primary one
     at the first allocation on one of its streams. Before that, free nothing on its streams, unless all streams are
     retired: galloc could take a reused handle for the old stream and not wait for the new stream's work. While a
     context is destroyed or a device is reset, no other thread may be inside a galloc call that may use it. Before you
     destroy a green context wait for its work, which galloc then takes for complete.
     Programmatic dependent launch orders less than a stream does: end such a chain before you free what it uses.

   ON MEMORY
     A pool keeps freed memory for later requests and gives it back only as ON LIMITS AND COLLECTION says. Sizes are
     rounded up to 512 bytes. Free neighbours merge. Each pool has one address range for all sizes and streams. Physical
     pages of 2 MiB to 256 MiB are mapped into it.
     Moving pages: when the memory held would exceed the peak of live bytes by more than `overhead`, galloc remaps pages
     that are completely free instead of creating new ones. Nothing is copied and nothing waits. The old addresses stay
     mapped, so that a page can return without a driver call. A program that repeats itself, and frees everything each
     time, soon makes no driver calls for pages. The first move of a page costs about 50 us of host time, and so does
     the creation of a page. On ten traces of real programs overhead:0 holds 1.008 times the peak of live bytes for 2.3
     s of driver time, the default 0.02 holds 1.028 for 0.4 s, 0.2 holds 1.084 for 0.2 s
     (bench/results/sim-overhead.csv). Under a memory_limit pages are small, so that nearly all of it can be used.
     Stream cache: each stream has a cache of up to lane_bytes of recently freed blocks. It serves requests of exactly
     their sizes, without the pool's lock. The first request that it cannot serve empties it.
     Growing in place: galloc_resize extends a block into the free memory and unused addresses behind it. The room of a
     block is what galloc_malloc_growable (galloc_request.max_bytes) reserves behind it: addresses, or in fixed segments
     memory. Blocks with room are multiples of 2 MiB and can grow until memory runs out. When one is freed its pages
     stay mapped; the next block with the same max_bytes reuses them once the work that used them is complete.
     Rounding: roundup_power2_divisions rounds requests, except those with room and galloc_resize, to fewer sizes.
     strategy:pooled is for programs with few sizes. It rounds requests of up to 1 MiB to size classes (512 bytes apart
     up to 4 KiB, then eight per power of two, or as roundup_power2_divisions says) and keeps a freed block for its
     class. Blocks with room, alignment above 512 or GALLOC_LIFETIME_LONG are exempt.
     strategy:heuristic adapts overhead, growth, lane_bytes and roundup_power2_divisions (below 2 MiB) to the program:
     more overhead once moving and creating pages has cost more than the memory is worth, larger pages while the program
     only grows, larger caches or coarser rounding where that saves misses. galloc_pool_decisions gives its few changes
     with reasons; galloc_pool_freeze stops it.
     Fixed segments: they replace pages with expandable_segments:False, or where the device has no virtual memory
     management: cudaMalloc segments of 2 MiB for requests up to 1 MiB, of 20 MiB (large_segment_size) below 10 MiB,
     otherwise of the request rounded up to 2 MiB. Blocks of max_split_size and more are never split there.

   ON LIMITS AND COLLECTION
     Set memory_limit to bound a pool, device_limit to bound all pools of a device together: a pool never holds more
     than the least of memory_limit, per_process_memory_fraction of the device, and what the lowest device_limit of the
     device's pools leaves. Bytes are charged to every limit before the driver call, so concurrent growth never exceeds
     one (ON BACKENDS has the exception). A pool that device_limit or a full device stops gets unused memory of the
     device's other pools; as the last step it waits for memory that they have freed. `growth` sets the size of new
     pages; close to a limit they are smaller.
     galloc returns cached memory to the device when memory runs out, in galloc_pool_trim and galloc_pool_sync_point,
     and by collection. Collection returns whole pages that no work and no launchable graph can still use:
       - gc_threshold: when more than this fraction of the limit is held, the longest idle pages are returned, until
         1/16 less than the threshold is held; above the threshold pages move rather than new ones are created.
       - gc_age: pages that have been idle for this time are returned.
     Collection waits for nothing, and pauses when the program soon needs the memory again. It runs in calls that no
     stream cache serves, since galloc has no thread: a program that makes no such calls keeps its memory. Fixed
     segments are not collected, since cudaFree waits. docs/tuning.md says which setting helps when.

   LIKE PYTORCH
     like:pytorch makes a pool hold what PyTorch's caching allocator holds for the same calls: the same segments,
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
     backend:cudaMalloc makes one cudaMalloc of the exact size per block, so that compute-sanitizer sees where it ends.
     A freed block gets an event, also on the legacy stream. Once that is complete a later allocation or trim frees the
     block by cudaFree, which waits for the device. A captured allocation is a new block of the graph (ON GRAPHS).
     backend:cudaMallocAsync uses a memory pool of the driver. A block that only the freeing stream used, and was
     allocated for, returns to the driver at the free; others once all their streams' work is complete. `reuse` and
     release_threshold set the driver's pool attributes of that meaning. Memory that the driver keeps counts as held and
     free, as of the last allocation or trim; until then, and by the driver's rounding, a limit can be exceeded.
     Captures with cudaMallocAsync: allocations and frees are graph nodes. A block that is not freed in the capture must
     be freed on one stream after the graph has run (or when it never will) and before the graph is destroyed; then no
     launch can use it any more. (A failed capture destroys its graph, and with it such blocks.) While a blocking stream
     is captured, allocations on the legacy stream, and frees of a graph's blocks there, return
     cudaErrorStreamCaptureImplicit.
     With both backends a block can be resized only up to the size requested for it; room is memory, in steps of 512
     bytes. galloc_pool_reserve, and with cudaMallocAsync galloc_graph_begin, return cudaErrorNotSupported.

   ON GRAPHS
     Allocate and free on a captured stream as on any other; the memory then belongs to the graph, which uses the same
     addresses at each launch; no other work gets it until the graph can no longer be launched.
       - An allocation in a capture gets memory that the graph owns, free memory that no queued work can still use, or
         new pages. It neither waits nor records an event. If that does not suffice it fails; the capture stays valid.
       - A block that is freed on a captured stream, or was recorded for one (galloc_free_after, galloc_record_stream),
         belongs to the graph once it is freed. Later captured work of the same stream may reuse it at once. Captured
         work of another stream may reuse it if the graph orders that work after the free (reuse:followed): its stream
         waited for an event recorded after the free, or joined the capture by such a wait. Other captured work never
         gets it. A block that was in use before the capture is not reused in the capture either: when that use ends is
         not known.
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
     (CUDA Runtime API, "Graph object thread safety"). Do not destroy a stream during its capture. With stream_check:off
     nothing may be captured. If the program moves a captured stream to another position of the graph (by
     cudaStreamUpdateCaptureDependencies or a second capture into the graph), the stream reuses its earlier frees only
     if the new position comes after the old one. A conditional node's body is a graph of its own.
     No galloc call ends a capture or adds a stream to one, in any thread and capture mode. The exception is a capture
     that another thread begins during the call: on the stream of the call, or, if the call names the legacy stream or a
     block recorded for it, on a blocking stream. A free on a stream whose capture was invalidated succeeds.
     galloc_stats.graph_bytes counts the free memory that graphs own. galloc_pool_trim leaves it alone, and
     galloc_pool_destroy and galloc_shutdown fail while there is any.

   ON RUNNING OUT
     A request that no free block fits takes these steps, with a new search after each; when all have failed it returns
     cudaErrorMemoryAllocation:
       1  use memory of other streams whose work is complete; collect (gc_threshold)
       2  move or create pages within `overhead`
       3  make the stream wait for memory that other streams freed (reuse:wait), if the pool holds 1/64 of its limit
       4  create pages up to the limit; return free pages and create others; take unused memory of other pools
       5  make the stream wait, also in a smaller pool
       6  wait on the host for events, one by one, then for the device; return everything cached, of other pools too
       7  call the callback on_oom (galloc_pool_set_callbacks); if it returns 1, begin again, at most max_retries times
     The message names the bytes requested, live and held, and the cause. galloc_oom_report has all figures: which
     streams keep free memory, what each step gained, what else the device holds. galloc_report_text adds advice.
     Host waits: a host wait is a wait for your own queued work, and other threads that need the driver for this pool
     wait too. If that work depends on what one of these threads does next, the wait is a deadlock. wait_limit_ms bounds
     the host waits of one allocation to within 2 ms (not the time in which other threads use the driver). With it,
     galloc polls events, and leaves out what it cannot bound: cudaFree of fixed segments, and waiting for the device
     (so memory that a live stream freed after its last event is out of reach). throw_on_cudamalloc_oom fails a request
     instead of any step that waits, queues a wait or returns memory.

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
     words, and the log gets one line (GALLOC_LOG, galloc_set_log, GALLOC_CONF=log:...).
     Resets: after an error that ends the context (an illegal address, for example) its pools refuse requests until
     cudaDeviceReset, which galloc detects. Pages survive the reset, cudaMalloc segments do not. A block in such a
     segment may be freed; once the driver hands out its addresses again they belong to the new block, and the old one
     counts as freed. Once the driver has shut down, frees succeed and do nothing.

   SECTIONS (search for the tag)
     >>config >>types >>api
     >>platform >>cuda >>structs >>slab >>map >>bins >>marks >>blocks >>budget >>statistics >>take
     >>streamcache >>capture >>streams >>events >>pages >>callbacks >>backends >>release >>parking >>torch >>users
     >>collection >>search >>behind >>waits >>planner >>growth >>ladder >>devicewait >>borrow >>steps
     >>outofmemory >>heuristic >>job >>alloc >>free >>several >>resize >>graphs >>configuration >>log >>report
     >>check >>pools >>threadcache >>public

   Each section of the implementation calls only those before it. Terms and invariants stand above the private structs;
   galloc_pool_check computes the invariants. The licence is at the end of the file. */

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
    GALLOC_REUSE_WAIT = 4       /* when memory is short, galloc makes the requesting stream wait for that work */
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
    GALLOC_LOG_OFF = 0,
    GALLOC_LOG_ERROR = 1, /* one line for each call that fails. Of lines that differ only in numbers, the first, the
                             10th, the 100th and so on are logged, and otherwise one a second, with a count: "(and 89
                             more like it)" */
    GALLOC_LOG_INFO = 2,  /* (default) also the decisions of strategy:heuristic, and settings that have no effect */
    GALLOC_LOG_DEBUG = 3  /* as info, and every repeated line */
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
    size_t lane_bytes;       /* the most that each stream's cache holds, 0 .. 64 MiB, default 1 MiB. Once a second
                                stream is in use, a cache takes no block while it holds more than this, and never holds
                                more than 2 MiB */
    size_t large_segment_size; /* fixed segments: size of a segment for requests above 1 MiB and below 10 MiB; more than
                                  10 MiB, rounded up to 2 MiB; default 20 MiB */
    size_t max_split_size;   /* fixed segments: blocks of this size and more are not split, and serve only requests of
                                this size and more; at least large_segment_size; SIZE_MAX (default): all blocks are
                                split */
    size_t max_non_split_rounding; /* such a block may exceed its request by less than this; at least
                                      large_segment_size; 0 (default): large_segment_size */
    unsigned roundup_power2_divisions[GALLOC_DIVISIONS]; /* sizes are rounded up to this many steps between two powers
                                                            of two; a power of two; 0 (default) or 1: to 512 bytes only.
                                                            [0] is for sizes below 2 MiB, [i] for sizes from 2^i MiB,
                                                            [15] from 32 GiB */
    double gc_threshold;     /* idle pages are collected when the pool holds more than this fraction of its limit; below
                                1; 0 (default): never. In a text also garbage_collection_threshold */
    uint64_t gc_age;         /* pages that have been idle for this many nanoseconds (whole milliseconds) are collected;
                                UINT64_MAX (default): never. In a text with a unit: 500ms, 30s, 5m */
    size_t release_threshold; /* bytes that galloc_pool_sync_point leaves in the pool; SIZE_MAX (default): all */
    uint64_t wait_limit_ms;  /* milliseconds that one allocation may wait on the host, at most 10^9; 0: it never waits;
                                UINT64_MAX (default): no bound; see ON RUNNING OUT */
    uint64_t max_retries;    /* how often on_oom can ask for another attempt, for one allocation; 0 .. 1000, default
                                8 */
    int throw_on_cudamalloc_oom; /* 1: a request that needs new pages beyond the limit or the device's memory fails
                                    at once: galloc neither waits nor returns memory, and does not call on_oom;
                                    default 0 */
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
    size_t max_bytes;    /* the size up to which galloc_resize can grow the block; less than `bytes` counts as `bytes`;
                            0: no room is reserved */
    size_t alignment;    /* a power of two, 1 .. 2^55 bytes; 0: 512 */
    cudaStream_t stream; /* the stream that uses the memory first */
    galloc_pool *pool;   /* NULL: the default pool of the stream's device */
    uint32_t tag;        /* any number; galloc_pointer_info returns it */
    int lifetime;        /* GALLOC_LIFETIME_... */
} galloc_request;

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
                                     other backends the bytes asked of the driver */
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
    X(pool_free, "cuMemFreeAsync")
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
   stream is in use, except for the rounding of blocks that its cache reuses; with several streams they can miss blocks
   that the stream caches reused between two updates.
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
    uint64_t failures;     /* failed allocations */
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
    size_t leaving;        /* bytes of stale aliases: addresses that are still mapped after their page moved */
    size_t addresses;      /* bytes of address space reserved */
    size_t quarantined;    /* bytes that the driver failed to take back; galloc_pool_trim tries again */
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
    size_t lane_bytes;  /* likewise */
    unsigned divisions; /* likewise: roundup_power2_divisions[0], for sizes below 2 MiB */
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
#define GALLOC_REPORT_STEPS 15
#define GALLOC_REPORT_TEXT 8192 /* bytes that suffice for galloc_report_text */

/* Free bytes that the requesting stream cannot have because of the work of one other stream alone. */
typedef struct galloc_stranded {
    unsigned long long stream_id, context_id;  /* as in galloc_stream_stats; both 0: the streams are not known */
    size_t bytes;
} galloc_stranded;

/* One step of ON RUNNING OUT. */
typedef struct galloc_step {
    const char *name;
    const char *left_out;  /* why the step was left out, in words; NULL: it was taken */
    size_t gained;         /* bytes that it made available to the requesting stream or returned to the device */
} galloc_step;

/* The state of pool and device when an allocation (or the growth of a block) failed because memory ran out, as seen by
   the requesting stream. Bytes of the pool:
     live + rounding + cached == held
     usable + stranded + graph_bytes + quarantined + busy == cached
     the bytes of streams[] and more_stranded added up == stranded
     usable_in_pages <= usable,  largest_usable <= usable
     held + room <= limit, or held > limit and room == 0; equal but for a device_limit that pools share
   Bytes of the device, if device_known:
     held + others_held + outside + device_free == device_total, but for changes while it is read */
typedef struct galloc_report {
    galloc_pool *pool;       /* the pool; valid as long as the pool exists */
    int device;
    char cause[112];         /* the last obstacle, in words */
    size_t asked;            /* bytes requested; for a growth, the bytes that were missing */
    size_t rounded;          /* the same after rounding */
    unsigned long long stream_id; /* the requesting stream; 0: legacy, captured, or none (galloc_pool_reserve) */
    int captured;            /* 1: that stream was being captured */
    int grows;               /* 1: the request was to grow a block in place */
    int rejected;            /* 1: the request failed at once; see galloc_stats.rejections */
    unsigned rounds;         /* how often on_oom asked for another attempt */

    size_t live;             /* bytes that the program had requested */
    size_t rounding;         /* bytes by which used blocks were larger */
    size_t cached;           /* bytes held that were in no used block */
    size_t held;

    size_t usable;           /* free bytes that the stream could have used, had they been in one piece */
    size_t usable_in_pages;  /* the part of `usable` that cannot move, since used blocks lie in the same pages; in fixed
                                segments all of it */
    size_t stranded;         /* free bytes whose earlier work on other streams was not known to be complete */
    size_t graph_bytes;      /* free bytes that captured graphs owned */
    size_t quarantined;      /* bytes that the driver failed to take back */
    size_t busy;             /* bytes that other calls were mapping or returning */
    size_t largest_usable;   /* size of the largest piece of `usable` */
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

    int backend, expandable_segments, reuse; /* settings of the pool that matter here */
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
              error. A call that fails changes nothing, writes one line to GALLOC_LOG, and keeps it for
              galloc_last_message. The runtime's last error stays as it was.
     Streams  may be captured (ON GRAPHS), except with galloc_resize (cudaErrorNotSupported), galloc_stream_retire and
              galloc_graph_release (cudaErrorStreamCaptureUnsupported). Stream 0 is the legacy or the per-thread default
              stream, as in the calling file. cudaStreamPerThread is refused while a green context is current, as in
              CUDA.
     Threads  may be called by any thread at any time.
     Device   does not wait for the device. With backend:cudaMalloc, allocations may wait, as cudaFree does. */

/* Allocates `bytes` bytes of device memory for `stream`, from the default pool of the stream's device (for the default
   streams: of the current device). Work queued on `stream` after this call, and work that is ordered after such work,
   may use the memory. Its contents are undefined.
     ptr      receives the address, aligned to 512 bytes; NULL if bytes is 0, and after every failure
     bytes    0 .. SIZE_MAX; more than the device can hold fails
     Returns  also cudaErrorMemoryAllocation: the device or the pool's limit has no more memory (ON RUNNING OUT);
              cudaErrorStreamCaptureInvalidated: the stream's capture has been invalidated
     Device   waits only when memory has run out, for no longer than it needs to, and never in a capture */
GALLOC_API cudaError_t galloc_malloc(void **ptr, size_t bytes, cudaStream_t stream);

/* Frees a block. Work queued on `stream` before this call may still use it: later work of the same stream may reuse the
   memory at once, other streams when that is safe (ON STREAMS).
     ptr      from any allocating function; NULL does nothing
     stream   any stream of any device; all work that uses the block must be ordered before this point of the stream
     Returns  also cudaErrorInvalidDevicePointer: `ptr` is not the start of a used block. The message says whether it is
              foreign, inside a block, or already freed
     Device   does not wait. Only if the host has no memory for a stream that the pool has not seen before, it waits for
              that stream; if that stream is being captured, it returns cudaErrorMemoryAllocation or the driver's error
              instead, and the block stays used */
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
     bytes      as for galloc_malloc; rounded up to 2 MiB
     max_bytes  the largest size that the block may reach, rounded up to 2 MiB; less than `bytes` counts as `bytes`
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
              the stream is being captured; cudaErrorMemoryAllocation: the addresses are free, but device memory or
              host memory has run out. After an error the block and its room are as before, but the room may have got
              some of its memory already
     Threads  one call at a time for each block
     Device   waits only when memory has run out, or when the block was shrunk on another stream whose work is not
              complete and reuse:wait is off */
GALLOC_API cudaError_t galloc_resize(void *ptr, size_t bytes, cudaStream_t stream);

/* Notes that `stream` uses a block too. When the block is freed, all work queued on `stream` until then counts as use:
   no stream, the freeing stream included, gets the memory before that work is complete or waited for.
     ptr      start of a used block
     stream   must live until the block is freed, or be retired before it is destroyed. For a stream that is being
              captured, the use is that of the capture's graph; its other work needs a call before or after the capture
     Returns  also cudaErrorInvalidDevicePointer, cudaErrorMemoryAllocation (host), cudaErrorStreamCaptureInvalidated */
GALLOC_API cudaError_t galloc_record_stream(void *ptr, cudaStream_t stream);

/* Announces cudaStreamDestroy: memory freed on the stream becomes available to other streams as soon as the stream's
   work is complete, and galloc forgets the stream. Queue no work on it between this call and cudaStreamDestroy. Without
   this call reuse is still safe, but the memory that the stream freed last is found only when memory runs out, or after
   a thousand such streams: up to 2 MiB, or the stream's share of 1/128 of the heap if that is more (of half of the heap
   in a program that repeats itself). A stream that is passed to galloc again counts as not retired.
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
     Returns  also cudaErrorNotPermitted: the group has begun already, or another one has with this stream or capture;
              cudaErrorNotSupported with backend:cudaMallocAsync; cudaErrorStreamCaptureInvalidated;
              cudaErrorMemoryAllocation (host). After an error *graph is as before */
GALLOC_API cudaError_t galloc_graph_begin(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream);

/* Ends the capturing of a group: later captures do not belong to it. Call it after the last capture has ended. The
   group keeps its memory.
     Returns  also cudaErrorNotPermitted: the group has not begun */
GALLOC_API cudaError_t galloc_graph_end(galloc_graph *graph);

/* Returns the memory of a group to its pool and ends the group; `graph` is invalid afterwards. The program promises
   that the group's graphs are not launched again, and that all their launches are ordered before this point of
   `stream`, as work is before galloc_free. The graphs may still exist, and their work may still run. The memory of a
   group that is never released returns when its graphs are gone; the group then ends with its pool.
     stream   not captured
     Returns  also cudaErrorNotPermitted before galloc_graph_end; cudaErrorMemoryAllocation (host), nothing has changed
     Device   does not wait; takes time in proportion to the pool's blocks */
GALLOC_API cudaError_t galloc_graph_release(galloc_graph *graph, cudaStream_t stream);

/* Returns the default settings. */
GALLOC_API galloc_config galloc_config_default(void);

/* Changes settings by a text of key:value pairs, separated by commas; GALLOC_CONF has the same syntax. The keys are the
   members of galloc_config; PyTorch's garbage_collection_threshold and any size's key with _mb appended (in MiB) are
   accepted too.
     bytes       a number, or one with K, M or G; `none` for a limit that may be absent (SIZE_MAX); `auto` where galloc
                 chooses (0)
     fractions   such as 0.02; digits after the sixth behind the point do not count
     switches    True or False; stream_check: on or off; stats: exact or fast
     times       a whole number with ms, s, m or h, or none; wait_limit_ms: a plain number, or none
     reuse       none, or completed, followed, wait joined by '+'
     roundup_power2_divisions   one number for all sizes, or [256:1,512:2,>:4]: below 512 MiB, from 512 MiB, from 1 GiB
     log         off, error, info or debug: what the process logs (GALLOC_LOG_...); only in GALLOC_CONF
   release_lock_on_cudamalloc is accepted without effect. Anything else is an error, and then no setting changes.
     message  receives what is wrong, where, and what would be right; on success the settings of the text that have no
              effect beside others, else "". NULL with size 0 if it is not wanted
     size     bytes at `message` */
GALLOC_API cudaError_t galloc_config_parse(galloc_config *config, const char *text, char *message, size_t size);

/* Writes all settings except `device` as a text that galloc_config_parse accepts, each key once.
     text     receives the text, terminated by 0
     size     bytes at `text`; GALLOC_CONFIG_TEXT always suffices
     Returns  also cudaErrorInvalidValue: the text does not fit; then `text` is "" */
GALLOC_API cudaError_t galloc_config_print(const galloc_config *config, char *text, size_t size);

/* Creates a pool.
     pool     receives the pool; NULL after a failure
     config   NULL: the defaults, for the current device
     Returns  also cudaErrorInvalidDevice, cudaErrorMemoryAllocation (host memory or address space) */
GALLOC_API cudaError_t galloc_pool_create(galloc_pool **pool, const galloc_config *config);

/* Destroys a pool and returns its memory to the device.
     Returns  also cudaErrorNotPermitted: blocks of the pool are still used, or graphs own memory of it; it is a default
              pool; the call comes from a callback while another call is in the pool; or it comes from on_map or
              on_unmap and the pool has one of these callbacks and holds memory. After a driver's error the pool
              still exists
     Threads  no other thread should use this pool: the call waits for calls in the pool, and later calls fail
     Device   waits for the device; calls on other pools go on meanwhile */
GALLOC_API cudaError_t galloc_pool_destroy(galloc_pool *pool);

/* Gives the default pool of a device: the pool of galloc_malloc. The first use creates it, with the settings of the
   environment variable GALLOC_CONF. If that begins with like:pytorch, galloc first reads PYTORCH_CUDA_ALLOC_CONF (or,
   if that is not set, PYTORCH_ALLOC_CONF), except its settings on pinned host memory, on addresses reserved by class,
   and on reuse in captures.
     pool     receives the pool
     device   ordinal; -1: the current device
     Returns  also cudaErrorInvalidDevice; cudaErrorInvalidValue: GALLOC_CONF is not understood */
GALLOC_API cudaError_t galloc_pool_default(galloc_pool **pool, int device);

/* Allocates from a pool of your own; all else as galloc_malloc. If the stream belongs to another device than the pool,
   the program must enable that device's access to the memory. */
GALLOC_API cudaError_t galloc_pool_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream);

/* Makes sure that `bytes` bytes, in one piece or in several, can be allocated on any stream without a driver call. With
   like:pytorch it makes a segment for the first stream that needs one of its kind.
     Returns  also cudaErrorMemoryAllocation; cudaErrorNotSupported with other backends
     Device   as galloc_malloc */
GALLOC_API cudaError_t galloc_pool_reserve(galloc_pool *pool, size_t bytes);

/* Returns free memory to the device until the pool holds at most `keep_bytes`, or nothing more can go. Single pages go,
   also from the middle of segments, the longest unused first.
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

/* Sets functions that the pool calls. They run in the thread whose call leads to them, with no lock of galloc held.
   They may call galloc, also for this pool, but not this function. They must return (no longjmp, no exception) and
   leave the current device as it was.
     on_oom     an allocation is about to fail, after all steps of ON RUNNING OUT. Return 1 to try all steps again,
                after freeing memory, say: at most max_retries times for one allocation; or 0 to let it fail. Not called
                for requests that exceed what the pool may ever hold, nor for allocations within a callback
     on_reject  an allocation has failed at once (galloc_stats.rejections); not called within on_oom or on_reject
     on_map     [addr, addr + bytes) has memory from now on, and no block uses it yet; to register it with a network
                library, say. The pool's device is current. A page that moves appears at a second address. Pages that
                are created while on_map is set support GPUDirect RDMA if the device does, earlier ones only with
                gpu_direct_rdma
     on_unmap   the same range loses its memory when this returns; no work uses it any more. A range is unmapped as a
                whole, as it was mapped. Memory lost by cudaDeviceReset is not reported
   Within on_map and on_unmap galloc serves requests from the memory of the pool, without mapping or unmapping anything.
   With on_map set, this function calls it for all present mappings before it returns; the pool returns no memory
   meanwhile.
     callbacks  copied; NULL: none from now on
     Returns    also cudaErrorNotPermitted while on_map or on_unmap is under way in any thread; cudaErrorNotSupported
                for on_map or on_unmap with another backend than native; cudaErrorMemoryAllocation (host) */
GALLOC_API cudaError_t galloc_pool_set_callbacks(galloc_pool *pool, const galloc_callbacks *callbacks);

/* Reads the report of the calling thread's last failed allocation (or growth of a block).
     Returns  also cudaErrorNotReady: none has failed, or the last one failed for another reason than device memory */
GALLOC_API cudaError_t galloc_oom_report(galloc_report *report);

/* Writes a report as a text of about 30 lines, with advice.
     text     receives the text, terminated by 0
     size     bytes at `text`; GALLOC_REPORT_TEXT always suffices
     Returns  also cudaErrorInvalidValue: the text does not fit; then `text` is "" */
GALLOC_API cudaError_t galloc_report_text(const galloc_report *report, char *text, size_t size);

/* Reads the settings in effect: `device` is an ordinal; expandable_segments is 0 where the device does not support it,
   and with other backends, for which stats_exact is 1. With strategy:heuristic, overhead, growth, lane_bytes and
   roundup_power2_divisions[0] are those of the last decision. */
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
   galloc_pool_stats_reset sets peaks to the current values, and totals, counts and times to zero. */
GALLOC_API cudaError_t galloc_pool_stats(galloc_pool *pool, galloc_stats *stats);
GALLOC_API cudaError_t galloc_pool_stats_reset(galloc_pool *pool);

/* Reads the counters of torch.cuda.memory_stats; galloc_pool_stats_reset resets these as well.
     Returns  also cudaErrorNotSupported: the pool is not like:pytorch with expandable_segments:False */
GALLOC_API cudaError_t galloc_pool_torch_stats(galloc_pool *pool, galloc_torch_stats *stats);

/* Reads the state of each stream that has allocated or freed and is not forgotten. Work in captures is not included
   (see galloc_stats.graph_bytes). The driver is not asked: work whose end galloc has not noticed counts as unfinished
   (galloc_pool_trim(pool, SIZE_MAX, NULL) notices it, and returns no memory). Streams that are ordered after a stream
   may still have some of its stranded bytes. Takes time in proportion to the stranded free blocks, with the pool's lock
   held.
     array    receives the first `n` streams, in no particular order; may be NULL when n is 0
     count    receives the number of streams, which may exceed n; NULL if it is not wanted */
GALLOC_API cudaError_t galloc_pool_streams(galloc_pool *pool, galloc_stream_stats *array, int n, int *count);

/* Checks the whole heap, for tests and debugging. Takes time in proportion to the number of blocks.
     Returns  the number of violated invariants, 0 for a healthy heap; -1 for a pool that is NULL or has ended, and in
              the child of a fork */
GALLOC_API int galloc_pool_check(galloc_pool *pool);

/* Describes any address, at any time. For an address outside galloc's memory it returns cudaSuccess, with the state
   GALLOC_STATE_FOREIGN. */
GALLOC_API cudaError_t galloc_pointer_info(const void *ptr, galloc_pointer *info);

/* Destroys the default pools and all other state; afterwards galloc may be used again from the beginning.
     Returns  cudaErrorNotPermitted: blocks are still used, graphs own memory, or a pool of your own still exists;
              unused memory is returned all the same
     Threads  no other thread may be inside galloc
     Device   waits for the device */
GALLOC_API cudaError_t galloc_shutdown(void);

/* Returns the calling thread's last error in words, with the name of the function that failed; "" if there was none.
   The text is valid until the thread's next error. */
GALLOC_API const char *galloc_last_message(void);

/* Sends all log lines of the process to a function of the program, in place of GALLOC_LOG. GALLOC_CONF=log:... sets how
   much is logged; it is read with the first line.
     call   called by the thread whose call logs, with no lock held; level is GALLOC_LOG_ERROR or GALLOC_LOG_INFO, text
            is valid during the call. It may call galloc: calls that fail there return their errors and are not logged.
            Another thread may still be in a function that has just been replaced. NULL: GALLOC_LOG again
     user   its last argument */
GALLOC_API void galloc_set_log(void (*call)(int level, const char *text, void *user), void *user);

#ifdef __cplusplus
/* Typed variants, as CUDA has for cudaMalloc: float *p; galloc_malloc(&p, bytes, stream). */
template <class T> static inline cudaError_t galloc_malloc(T **ptr, size_t bytes, cudaStream_t stream)
{
    void *p = NULL;
    cudaError_t err = galloc_malloc(ptr ? &p : (void **)NULL, bytes, stream);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
template <class T>
static inline cudaError_t galloc_malloc_growable(T **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    void *p = NULL;
    cudaError_t err = galloc_malloc_growable(ptr ? &p : (void **)NULL, bytes, max_bytes, stream);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
template <class T> static inline cudaError_t galloc_alloc(T **ptr, const galloc_request *request)
{
    void *p = NULL;
    cudaError_t err = galloc_alloc(ptr ? &p : (void **)NULL, request);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
template <class T>
static inline cudaError_t galloc_pool_malloc(galloc_pool *pool, T **ptr, size_t bytes, cudaStream_t stream)
{
    void *p = NULL;
    cudaError_t err = galloc_pool_malloc(pool, ptr ? &p : (void **)NULL, bytes, stream);
    if (ptr) *ptr = static_cast<T *>(p);
    return err;
}
} /* extern "C++" */
#endif

#endif /* GALLOC_H */

/* ==== IMPLEMENTATION ============================================================================================ */

#if defined(GALLOC_IMPLEMENTATION) && !defined(GALLOC_IMPLEMENTATION_DONE)
#define GALLOC_IMPLEMENTATION_DONE

#if defined(__cplusplus)
extern "C++" {
#endif

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#if defined(_WIN32)
#ifndef WIN32_LEAN_AND_MEAN
#define WIN32_LEAN_AND_MEAN
#endif
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <time.h>
#endif
#if defined(__linux__)
#include <unistd.h>
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

#if defined(__GNUC__)
#define GAI_FORMAT(string, first) __attribute__((format(printf, string, first)))
#else
#define GAI_FORMAT(string, first)
#endif

/* The fast path is put together into each of the few functions that take it, and what it leads to when it does not
   serve is kept out of them: so nothing is saved and restored on the way. */
#if defined(__GNUC__)
#define GAI_THREAD_LOCAL __thread
#define GAI_INLINE inline __attribute__((always_inline))
#define GAI_APART __attribute__((noinline))
#define GAI_MOSTLY(condition) __builtin_expect((condition), 1)
#else
#define GAI_THREAD_LOCAL __declspec(thread)
#define GAI_INLINE __forceinline
#define GAI_APART __declspec(noinline)
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

/* Pointers and counters that are read without a lock. A pointer is published after what it points to. */
#if defined(__GNUC__)
static void *gai_load_pointer(void *const *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void gai_store_pointer(void **p, void *value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static void gai_count(uint64_t *p, uint64_t n) { (void)__atomic_fetch_add(p, n, __ATOMIC_RELAXED); }
static int gai_count_is(uint64_t *p, uint64_t old, uint64_t now)
{
    return __atomic_compare_exchange_n(p, &old, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
static uint64_t gai_counted(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static void gai_set_relaxed(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }
static void gai_count_reset(uint64_t *p) { __atomic_store_n(p, 0, __ATOMIC_RELAXED); }
static uint64_t gai_load(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static void gai_store(uint64_t *p, uint64_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
static uint64_t gai_next(uint64_t *p) { return __atomic_add_fetch(p, 1, __ATOMIC_RELAXED); }
static int gai_swap(uint64_t *p, uint64_t from, uint64_t to)
{
    return __atomic_compare_exchange_n(p, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}
#elif defined(_MSC_VER)
static void *gai_load_pointer(void *const *p) { return InterlockedCompareExchangePointer((void **)p, NULL, NULL); }
static void gai_store_pointer(void **p, void *value) { (void)InterlockedExchangePointer(p, value); }
static void gai_count(uint64_t *p, uint64_t n) { (void)InterlockedExchangeAdd64((volatile LONG64 *)p, (LONG64)n); }
static int gai_count_is(uint64_t *p, uint64_t old, uint64_t now)
{
    return InterlockedCompareExchange64((volatile LONG64 *)p, (LONG64)now, (LONG64)old) == (LONG64)old;
}
static uint64_t gai_counted(const uint64_t *p)
{
    return (uint64_t)InterlockedCompareExchange64((volatile LONG64 *)p, 0, 0);
}
static void gai_count_reset(uint64_t *p) { (void)InterlockedExchange64((volatile LONG64 *)p, 0); }
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

static void gai_count_max(uint64_t *p, uint64_t n)
{
    uint64_t most = gai_counted(p);
    while (most < n && !gai_count_is(p, most, n)) most = gai_counted(p);
}

#ifndef GALLOC_CLOCK
#define GALLOC_CLOCK() gai_clock()
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
#define GAI_CLOCK 1 /* it is there, but <time.h> keeps it from strict C: the number and the types are the ABI's */
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

/* A spin lock for a few dozen instructions, in which no other lock is taken: one atomic step where a mutex needs two.
   A thread that finds it taken spins, then yields, and at last sleeps, so that also a thread of lower priority comes to
   the end of its turn. 1: taken. */
typedef uint64_t gai_latch;

#define GAI_LATCH_SPINS 8 /* rounds of 1, 2, 4 ... pauses */
#define GAI_LATCH_YIELDS 64

static void gai_pause(unsigned round)
{
    volatile unsigned n = 1u << round; /* the loop must take time, not be thrown out */
    while (n > 0) n = n - 1;
}

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

/* Locks for what all pools share. Global: the driver table, the list of pools; taken before any other. Map: the inner
   nodes of the address maps; budget: what the pools of each device hold together; log: where lines go and which were
   seen; context: the contexts that are known; each of these four taken after any other. */
static gai_lock gai_global_lock = GAI_LOCK_STATIC;
static gai_lock gai_map_lock = GAI_LOCK_STATIC;
static gai_lock gai_budget_lock = GAI_LOCK_STATIC;
static gai_lock gai_log_lock = GAI_LOCK_STATIC;
static gai_lock gai_context_lock = GAI_LOCK_STATIC;

/* What threads remember of pools is worth nothing once a pool has ended, or has changed what it goes by: then this goes
   on. 0: there is nothing to
   remember yet, or never, in a child of fork. */
static uint64_t gai_generation;

static void gai_generation_end(void)
{
    uint64_t now = gai_load(&gai_generation);
    while (!gai_swap(&gai_generation, now, now + 1)) now = gai_load(&gai_generation);
}

/* A child of fork inherits the heap but not the driver: it must not touch either. It may say so, and so needs the lock
   of the log. */
static void *gai_forked;
static int gai_forks_are_watched;

#if !defined(_WIN32)
static void gai_before_fork(void) { gai_lock_on(&gai_log_lock); }
static void gai_after_fork(void) { gai_lock_off(&gai_log_lock); }
static void gai_on_fork(void)
{
    gai_store_pointer(&gai_forked, &gai_forked);
    gai_store(&gai_generation, 0);
    gai_lock_off(&gai_log_lock);
}
static int gai_watch_forks(void) { return pthread_atfork(gai_before_fork, gai_after_fork, gai_on_fork); }
#else
static int gai_watch_forks(void) { return 0; }
#endif

/* A function that is called when a thread ends for which a value was set. */
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

/* A function that is called before the code goes: at dlclose (FreeLibrary), or when the process ends. */
#if defined(__GNUC__)
#define GAI_AT_UNLOAD __attribute__((destructor))
static int gai_watch_unload(void (*call)(void)) { return call != NULL; }
#else
#define GAI_AT_UNLOAD
static int gai_watch_unload(void (*call)(void)) { return !atexit(call); } /* in a DLL: when that goes */
#endif

/* This thread's last error in words, and whether it is still to be logged: that happens when the public function
   ends, with no lock held, so that GALLOC_LOG may do what it likes. */
static GAI_THREAD_LOCAL char gai_message[544];
static GAI_THREAD_LOCAL int gai_message_is_new; /* 0, 1 or GAI_NOTE */

#define GAI_NOTE 2

/* Says what is wrong, where it is found. The first to say something knows best: the rest of the call is silent. */
GAI_FORMAT(2, 3)
static cudaError_t gai_fail(cudaError_t error, const char *format, ...)
{
    va_list arguments;
    if (gai_message_is_new == 1) return error;
    gai_message_is_new = 1;
    va_start(arguments, format);
    (void)vsnprintf(gai_message, sizeof gai_message, format, arguments);
    va_end(arguments);
    return error;
}

/* Says what the program may like to know though nothing is wrong. */
GAI_FORMAT(1, 2)
static void gai_note(const char *format, ...)
{
    va_list arguments;
    if (gai_message_is_new) return;
    gai_message_is_new = GAI_NOTE;
    va_start(arguments, format);
    (void)vsnprintf(gai_message, sizeof gai_message, format, arguments);
    va_end(arguments);
}

/* ---- sizes ---- */

#define GAI_UNIT ((size_t)512)       /* blocks are multiples of this; what cudaMalloc aligns to, at least */
#define GAI_UNIT_LOG2 9
#define GAI_MIB ((size_t)1 << 20)
#define GAI_ADDRESS_BITS 57          /* as far as five-level page tables reach */

static size_t gai_min(size_t a, size_t b) { return a < b ? a : b; }
static size_t gai_max(size_t a, size_t b) { return a > b ? a : b; }

static int gai_is_power_of_two(size_t n) { return n && !(n & (n - 1)); }
static size_t gai_down(size_t n, size_t multiple) { return n & ~(multiple - 1); }
static size_t gai_up(size_t n, size_t multiple) { return gai_down(n + (multiple - 1), multiple); }

/* Rounds up a size that came from outside; 0 when that leaves the range of addresses. */
static int gai_round(size_t n, size_t multiple, size_t *out)
{
    if (n > ((size_t)1 << GAI_ADDRESS_BITS) - multiple) return 0;
    *out = gai_up(n, multiple);
    return 1;
}

/* Index of the highest bit set; n > 0. */
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

/* Index of the lowest bit set; n > 0. */
static int gai_lowest(uint64_t n) { return gai_log2(n & (~n + 1)); }

/* The largest power of two that is no larger than n; n > 0. */
static size_t gai_power_below(size_t n) { return (size_t)1 << gai_log2(n); }

/* Rounded up to one of so many steps between two powers of two, or where these are finer to 512 bytes. */
static size_t gai_up_by_steps(size_t bytes, size_t divisions)
{
    if (divisions < 2 || bytes <= GAI_UNIT * divisions) return gai_up(bytes, GAI_UNIT);
    return gai_up(bytes, gai_power_below(bytes) / divisions);
}

/* ==== CUDA ====================================================================================================== */
/* >>cuda */

/* The driver's functions are fetched from the runtime, so that no program must link libcuda, and called instead of
   the runtime's, so that the program's last error is never touched and a look at a stream costs a third. Their result
   codes are the runtime's (driver_types.h keeps the numbers equal). */
#define GAI_DRIVER_FUNCTIONS(X)                                                                                        \
    X(Init, (unsigned int))                                                                                            \
    X(CtxGetCurrent, (CUcontext *))                                                                                    \
    X(CtxPushCurrent, (CUcontext))                                                                                     \
    X(CtxPopCurrent, (CUcontext *))                                                                                    \
    X(CtxGetId, (CUcontext, unsigned long long *))                                                                     \
    X(CtxGetDevice, (CUdevice *))                                                                                      \
    X(DeviceGetCount, (int *))                                                                                         \
    X(DeviceGetAttribute, (int *, CUdevice_attribute, CUdevice))                                                       \
    X(DeviceTotalMem, (size_t *, CUdevice))                                                                            \
    X(DevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                                 \
    X(DevicePrimaryCtxRelease, (CUdevice))                                                                             \
    X(DevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *))                                                     \
    X(StreamGetCtx, (CUstream, CUcontext *))                                                                           \
    X(StreamGetId, (CUstream, unsigned long long *))                                                                   \
    X(StreamGetFlags, (CUstream, unsigned int *))                                                                      \
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

/* Since CUDA 12.3 there are longer forms of these two functions. Runtimes from there on to 12.4 give those, later ones
   what they are asked for (12.0). An edge of a graph that means less than one after the other is an error for the short
   forms, and for the long ones when they are given no place to tell of it. */
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
    if (!error) error = gai_load_function("cu" #name, &cu->name, sizeof cu->name);

typedef struct gai_driver_table {
    GAI_DRIVER_FUNCTIONS(GAI_DRIVER_POINTER)
} gai_driver_table;

static gai_driver_table gai_cu;
static void *gai_cu_ready; /* not NULL once the table is full */

/* The runtime keeps the last error of a call of ours that failed; the program had none then, and must have none
   after. */
static cudaError_t gai_forget_error(cudaError_t before, cudaError_t error)
{
    if (error != cudaSuccess && before == cudaSuccess) (void)cudaGetLastError();
    return error;
}

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
    memcpy(into, &function, size);
    return cudaSuccess;
}

static cudaError_t gai_driver_load(gai_driver_table *cu)
{
    cudaError_t error = cudaSuccess;
    CUresult result;
    GAI_DRIVER_FUNCTIONS(GAI_DRIVER_LOAD)
    if (error) return error;
    result = cu->Init(0);
    if (result) return gai_fail((cudaError_t)(int)result, "cuInit: %s", cudaGetErrorString((cudaError_t)(int)result));
    if (!gai_forks_are_watched && gai_watch_forks())
        return gai_fail(cudaErrorMemoryAllocation, "pthread_atfork: no host memory");
    gai_forks_are_watched = 1;
    return cudaSuccess;
}

/* Every public function begins here. */
static cudaError_t gai_begin(void)
{
    cudaError_t error = cudaSuccess;
    if (gai_load_pointer(&gai_forked))
        return gai_fail(cudaErrorInitializationError, "CUDA cannot be used in a child made by fork");
    if (gai_load_pointer(&gai_cu_ready)) return cudaSuccess;
    gai_lock_on(&gai_global_lock);
    if (!gai_cu_ready) {
        error = gai_driver_load(&gai_cu);
        if (!error) gai_store_pointer(&gai_cu_ready, &gai_cu);
        if (!error) gai_generation_end();
    }
    gai_lock_off(&gai_global_lock);
    return error;
}

/* A thread that never called the runtime has no context: it gets the one that the runtime would give it. */
static cudaError_t gai_bind_context(void)
{
    cudaError_t before = cudaPeekAtLastError();
    int device = 0;
    cudaError_t error = gai_forget_error(before, cudaGetDevice(&device));
    if (!error) error = gai_forget_error(before, cudaSetDevice(device));
    if (error) return gai_fail(error, "no CUDA context for this thread: %s", cudaGetErrorString(error));
    return cudaSuccess;
}

/* Not the driver's: what it was to be called for could not be noted. A number that CUDA does not use. */
#define GAI_NO_HOST_MEMORY ((CUresult)1023)

static cudaError_t gai_driver_failed(CUresult result, const char *function)
{
    cudaError_t error = (cudaError_t)(int)result;
    if (result == GAI_NO_HOST_MEMORY) return gai_fail(cudaErrorMemoryAllocation, "no host memory for %s", function);
    return gai_fail(error, "%s: %s", function, cudaGetErrorString(error));
}

/* Errors after which the context, or the driver, is of no use any more: nothing is gained by trying on. */
static int gai_is_sticky(CUresult result)
{
    int code = (int)result;
    return code == 214 /* uncorrectable ECC error */ || code == 220 /* uncorrectable NVLINK error */ ||
           code == 700 /* illegal address */ || code == 702 /* launch timeout */ || code == 709 /* context gone */ ||
           code == 710 /* device assert */ || (code >= 714 && code <= 719) /* hardware and launch failures */;
}

static int gai_is_driver_gone(CUresult result) { return result == CUDA_ERROR_DEINITIALIZED; }

enum gai_health { GAI_ALIVE, GAI_DEAD, GAI_UNKNOWN };

/* Does the context with this id exist? An odd error proves neither: then nothing that was in it may be taken for
   complete, and nothing in it may be asked, since a call on an event or stream that is gone crashes. */
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

/* The contexts that streams of galloc's calls have been in, beside the primary ones of their pools. CUDA has no list of
   a process's contexts, and work that nobody can name may be in any of them. Entries stay, and are used again when
   their context has ended. Guarded by a lock of their own. */
typedef struct gai_known_context {
    struct gai_known_context *next;
    CUcontext context;
    unsigned long long id;
} gai_known_context;

static gai_known_context *gai_known_contexts;

/* 0: no host memory. */
static int gai_context_know(CUcontext context, unsigned long long id)
{
    gai_known_context *known, *unused = NULL;
    gai_lock_on(&gai_context_lock);
    for (known = gai_known_contexts; known && (known->context != context || known->id != id); known = known->next)
        if (gai_context_health(known->context, known->id) == GAI_DEAD) unused = known;
    if (!known && !unused) {
        unused = (gai_known_context *)GALLOC_MALLOC(sizeof *unused);
        if (unused) unused->next = gai_known_contexts;
        if (unused) gai_known_contexts = unused;
    }
    if (!known && unused) {
        unused->context = context;
        unused->id = id;
    }
    gai_lock_off(&gai_context_lock);
    return known || unused;
}

/* The n-th of them. 0: there are no more. */
static int gai_context_known(size_t n, CUcontext *context, unsigned long long *id)
{
    const gai_known_context *known;
    gai_lock_on(&gai_context_lock);
    for (known = gai_known_contexts; known && n; n--) known = known->next;
    if (known) *context = known->context;
    if (known) *id = known->id;
    gai_lock_off(&gai_context_lock);
    return known != NULL;
}

static void gai_contexts_forget(void)
{
    while (gai_known_contexts) {
        gai_known_context *known = gai_known_contexts;
        gai_known_contexts = known->next;
        GALLOC_FREE(known);
    }
}

/* Where a call stands. Streams are told apart by their ids, which CUDA never gives twice, since handles come back
   after cudaStreamDestroy. The legacy stream has id 0 here and is told apart by its context: its own id cannot be
   asked for at all times. Neither can that of a stream that is being captured: it is told apart by the capture and its
   handle, which means one stream as long as the capture lasts. */
typedef struct gai_site {
    CUstream handle;
    unsigned long long stream_id;
    struct gai_stream *stream; /* where the call led, if it came that far, and in which of its lives */
    uint64_t life;
    CUcontext context; /* NULL: not asked for yet */
    unsigned long long context_id;
    unsigned long long capture; /* the one that the stream is part of; 0: none */
    CUresult refused; /* the driver would not have the graph tell of its end */
    char broken;    /* it is captured, but the capture has been invalidated: what it recorded will never run */
    char capture_forbids; /* captured, or legacy while a blocking stream is: most calls would break the capture */
    char own_context; /* the stream's context is the pool's: the pool of its device */
} gai_site;

/* By its handle, of which 0, 1 and 2 are none of a stream that was created. */
static int gai_is_default_stream(CUstream stream) { return (uintptr_t)stream <= (uintptr_t)CU_STREAM_PER_THREAD; }

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

static uint64_t gai_threads; /* that have had a number */
static GAI_THREAD_LOCAL uint64_t gai_thread_number;

/* What stands for the handle of a stream: within a capture it means one stream, but for the per-thread one, which is
   each thread's own. No handle of a stream that was created is as small as a thread's number. */
static unsigned long long gai_stream_key(CUstream stream)
{
    if (stream != CU_STREAM_PER_THREAD) return (unsigned long long)(uintptr_t)stream;
    if (!gai_thread_number) gai_thread_number = gai_next(&gai_threads);
    return gai_thread_number;
}

/* Which capture the stream is part of now; 0: of none. */
static CUresult gai_capture_of(CUstream stream, CUstreamCaptureStatus *status, unsigned long long *id, CUgraph *graph)
{
    cuuint64_t number = 0;
    CUresult result = gai_cu.StreamGetCaptureInfo(stream, status, &number, graph, NULL, GAI_NO_EDGES NULL);
    *id = !result && *status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? number : 0;
    return result;
}

/* The nodes that what is captured next on the stream will come after: all that it was given so far comes before them or
   is one of them. Copies them. 0: they cannot be had, or are more than `most`, or the capture is not this one. */
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

/* Whether it is captured comes first: asking a captured stream for its id or flags, or the legacy stream for anything
   while a blocking stream is captured, loses that capture in every mode (measured: docs/design.md). */
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
    if (gai_is_driver_gone(result)) return cudaErrorCudartUnloading;
    return result ? gai_driver_failed(result, "looking at the stream") : cudaSuccess;
}

/* For what cannot be done on a stream while it is captured. */
static cudaError_t gai_site_is_free(const gai_site *site)
{
    if (!site->capture && !site->broken) return cudaSuccess;
    return gai_fail(cudaErrorStreamCaptureUnsupported, "this cannot be done on a stream that is being captured");
}

/* For what would be of use to the capture only. */
static cudaError_t gai_site_is_sound(const gai_site *site)
{
    if (!site->broken) return cudaSuccess;
    return gai_fail(cudaErrorStreamCaptureInvalidated, "the capture that the stream is part of has been invalidated");
}

/* While it lasts, `context` is current and no call of this thread can break a capture of another (relaxed mode). */
typedef struct gai_scope {
    CUstreamCaptureMode mode;
    int pushed;
} gai_scope;

static CUresult gai_scope_enter(gai_scope *scope, CUcontext context)
{
    CUcontext current = NULL;
    CUresult result = gai_cu.CtxGetCurrent(&current);
    scope->pushed = 0;
    scope->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!result && current != context) {
        result = gai_cu.CtxPushCurrent(context);
        scope->pushed = !result;
    }
    if (!result) result = gai_cu.ThreadExchangeStreamCaptureMode(&scope->mode);
    if (result && scope->pushed) (void)gai_cu.CtxPopCurrent(&current);
    return result;
}

static void gai_scope_leave(gai_scope *scope)
{
    CUcontext popped;
    (void)gai_cu.ThreadExchangeStreamCaptureMode(&scope->mode);
    if (scope->pushed) (void)gai_cu.CtxPopCurrent(&popped);
}

/* ==== STRUCTS =================================================================================================== */
/* >>structs */

/* page      one physical memory handle, mapped at one range of addresses; in a fixed segment, its one cudaMalloc
   segment   a contiguous range of addresses: expandable (reserved, pages come and go) or fixed (one cudaMalloc)
   block     a tile of a segment:
               used     the program's
               free     mapped, in exactly one free set
               slot     the same, where strategy:pooled: cut with others of its size out of one free block (a run of
                        slots), and kept as it is for the next request of that size
               hole     addresses without a page
               room     a hole kept for the used block before it, which may grow into it: with other rooms, and what
                        the driver would not undo, all of the block's room that is not yet the block itself
               busy     taken out of sight while the driver is called on it, or after the driver refused to undo a
               step
               away     mapped, but in no use: its page is at another address, or is parked here
   mark      "these bytes may be used by others after this position of that stream"
   epoch     positions of a stream are counted by its stream state: a free is stamped with the stream state's epoch, and
   an event
             recorded at epoch e (after the count went on to e + 1) stands for all frees stamped e or less
   stream state      what a pool knows of one stream
   stream cache     the stream state's cache of blocks by exact size, which calls on its stream use with no other lock
   than its latch cache bin     the stream cache's blocks of one size, the last one in first. To the rest of the pool
   they are used blocks; that
             nobody holds them is said by `held` alone
   life      stream states are used again for other streams, inside their pool; a number never given twice tells which
   capture   one of the program's, of a graph that uses memory of the pool. A stream that takes part in it has a stream
   state of
             its own for that time, whose work does not end before the graph, its instances and their launches are gone
   position      a position of a captured stream, in nodes of the graph; what an event is for others. No event can be
             recorded there, and none is needed: the graph itself says what comes after
   outside   the stream state of what was freed on captured streams, but used before on streams that nobody can name
   free set  the free blocks whose marks name the same stream state (its stream state's set), several stream states
   (mixed), none (common) home      where like:pytorch: the segments that were made for requests of one kind, small or
   large, of one stream,
             or of one stream in the captures of a group. A free block is in its home's set, or while somebody else may
             still use it in `mixed` */

/* Those up to GAI_SLOT are mapped. */
enum gai_kind { GAI_USED, GAI_FREE, GAI_SLOT, GAI_HOLE, GAI_ROOM, GAI_BUSY, GAI_ALIAS };

typedef struct gai_stream gai_stream;
typedef struct gai_set gai_set;
typedef struct gai_block_pool gai_block_pool;
typedef struct gai_segment gai_segment;

/* begin < end, both within the block;  mark is complete == (epoch <= stream->done)
   no two marks of a block name the same stream state and a common byte: the later one stands for both */
typedef struct gai_mark {
    struct gai_mark *next;
    gai_stream *stream;
    uint64_t epoch;
    uintptr_t begin, end; /* the bytes it is about */
} gai_mark;

/* The program's hold on a block. held != NULL while the program has it, only in used blocks; NULL also on a cache bin.
   It is a stream state of the pool, and makes the latch of that stream's cache the one that guards it: who changes it
   to NULL does so with this latch, and has the block to himself from there on. That is the free, a second one finds
   NULL and is refused, in whichever thread and on whatever stream. Mostly it is the stream state on which the block is
   freed: then the latch that its stream cache needs anyhow is the only one.

   addr % GAI_UNIT == 0,  bytes % GAI_UNIT == 0,  bytes > 0
   next->addr == addr + bytes, next->prev == this              (segments are tiled without gaps)
   (kind == GAI_FREE || kind == GAI_SLOT)  ==  (set != NULL)
   set == gai_set_of(marks), as far as completed marks have been dropped; in a home: gai_block_pool_set
   kind == GAI_SLOT implies slot != 0;  slot != 0: bytes are those of a class
   used, free, slot: found in the block map under addr and nowhere else, and every byte has a page
   holes and rooms: no byte has one;  kind == GAI_ALIAS  ==  (away != NULL), one mapping to a block
   used: stream->blocks counts it, and two marks are promised to it    (a free needs no host memory) */
typedef struct gai_block {
    struct gai_block *next_bin;      /* same bin of the set, or cache bin; also links unused descriptors */
    void *held;                      /* read without a lock, also by calls that come too late */
    uintptr_t addr;
    size_t bytes;
    uint64_t requested;              /* in a stream cache: as it was */
    uint64_t tag;                    /* the program's 32 bits, and GAI_CACHED to GAI_DROPPED */
    uint64_t life; /* used: of the stream state that it was given to, or that freed it onto a cache bin */
    gai_stream *stream;                  /* used: of the stream that the pool gave it to. A hot pair touches no more */
    struct gai_block *prev_bin;
    struct gai_block *next, *prev;   /* by address, within the segment */
    struct gai_block *newer, *older; /* of the set, by time of free */
    gai_set *set;
    gai_mark *marks;
    enum gai_kind kind;
    unsigned char row, column;       /* in a set: its bin */
    unsigned char slot;              /* GAI_STRIP_...; the line ends here: what merges touches no more of others */
    void *pool;                      /* read without a lock; a descriptor never changes its pool */
    void **map_entry;                /* used, free: where the block map has it */
    uint64_t stream_id;
    uint64_t age;                    /* time of the free, counted in frees; used: see GAI_DROPPED */
    gai_segment *segment;
    gai_mark *recorded_uses; /* used: streams that record_stream named; their epochs are set when it is freed */
    struct gai_mapping *alias; /* away: what is still mapped here */
    size_t room;  /* used: bytes from its start on that are kept for it, addresses or memory; 0: it asked for none
                     away: how far it lies behind the start of the used block in whose room it is; 0: in none */
} gai_block;

#define GAI_RUN_SLOT 1  /* a block that was cut as a slot, and has kept its size */
#define GAI_RUN_FIRST 2 /* the first of its run */

#define GAI_CACHED                                                                                                     \
    ((uint64_t)1 << 32) /* stream state `life` used it before, and its marks do not speak of that stream */
#define GAI_SPECIAL ((uint64_t)1 << 33) /* there is more to its free than a stream cache can do */
#define GAI_DROPPED ((uint64_t)1 << 34) /* besides GAI_CACHED: `age` is the stamp of the mark that did */

/* shown: all mappings with mapping->page == this, `mappings` of them mapped; current is one of them
   Each of them but current is away;  current is away too == the page is parked, its bytes are in no block
   Old mappings stay, so that a page can come back to where it was with no call into the driver. */
typedef struct gai_page {
    struct gai_page *next_unused; /* links unused descriptors */
    CUmemGenericAllocationHandle handle; /* 0 in fixed segments */
    struct gai_mapping *current; /* where its bytes belong to blocks, or did last; NULL: on its way in or out */
    struct gai_mapping *shown;
    struct gai_block *holder; /* planning: the free block that may give it up, or over which it is parked, or NULL */
    uint64_t used;            /* when a part of it was freed last, or it was created, counted in frees; see collects */
    uint64_t looked;          /* planning: when `holder` was found out, counted in plans */
    size_t bytes;
    int mappings; /* ranges of addresses that show it */
    int counted;  /* in reserved */
    int stuck;    /* in quarantined */
    int taken;    /* planning: it is to come to the range that is being looked at */
} gai_page;

/* bytes == page->bytes;  away == (block && block->kind == GAI_ALIAS && block->alias == this) */
typedef struct gai_mapping {
    struct gai_mapping *next; /* links unused descriptors, batches, the quarantine */
    struct gai_mapping *newer, *older; /* away: by the time that it became so */
    struct gai_mapping *next_shown;    /* of the page */
    void *pool;               /* read without a lock; a descriptor never changes its pool */
    gai_segment *segment;
    gai_page *page;
    gai_block *block; /* over the same addresses: busy while it comes or goes, away while its page is elsewhere */
    uintptr_t addr;   /* 0: unmapped */
    size_t bytes;
    uintptr_t within; /* where the free block began that it was in when it was last looked for; a guess, or 0 */
    uint64_t number; /* mappings are numbered as they are made */
    int standing;    /* in a batch: it was away before, and is again if the batch comes to nothing */
} gai_mapping;

struct gai_segment {
    gai_segment *next, *prev;
    struct galloc_pool *pool;
    gai_block *first;
    uintptr_t addr;
    size_t bytes; /* sum of the blocks' bytes */
    int fixed;
    gai_mapping *whole; /* fixed: its one mapping */
    gai_block_pool *block_pool;     /* NULL: it is for all streams and sizes */
    uint64_t searches;  /* of the pool's block_pool->small, when the last of its blocks came home */
    uint64_t age;       /* of that block */
    size_t given; /* of another backend, with one used block at most: what the driver was asked for; else 0. Such
                     addresses are not in the map of pages: several of them may share 2 MiB */
    int of_graph; /* cudaMallocAsync: allocated in a capture, so that it is the graph's and not the driver's pool's */
    int lost; /* its context was reset: the memory is gone, the addresses may be somebody else's */
};

/* An event that was recorded on the stream state's stream, or waits to be used again. */
typedef struct gai_event {
    struct gai_event *next;
    CUevent event;
    uint64_t epoch; /* it stands for all frees stamped so or less */
    uint64_t clock; /* when it was recorded, counted in frees */
    uint64_t occasion; /* its number; 0: none */
} gai_event;

/* "`stream` has a wait in its queue for everything that `on` freed up to `epoch`" */
typedef struct gai_wait {
    struct gai_wait *next;
    gai_stream *on;
    uint64_t epoch;
} gai_wait;

#define GAI_POSITION_NODES 13

/* All that the captured stream was given up to a position comes before these nodes of the graph or is one of them. */
typedef struct gai_position {
    struct gai_position *older;
    uint64_t epoch; /* it stands for all frees stamped so or less */
    size_t n;
    CUgraphNode nodes[GAI_POSITION_NODES];
} gai_position;

/* Two-level segregated fit. In units of 512 bytes: sizes below 32 have a bin each; above, every power of two is cut
   into 32 bins, so that neighbours are 1/32 = 3.1 % apart at most. */
#define GAI_COLUMNS_LOG2 5
#define GAI_COLUMNS 32
#define GAI_ROWS (GAI_ADDRESS_BITS - GAI_UNIT_LOG2 - GAI_COLUMNS_LOG2 + 1)

/* Cells have rows of their own, behind the others, in which no search comes to a larger block. In each bin there they
   are of one size. */
#define GAI_SLOT_MOST GAI_MIB /* the largest class: no slot has a page of its own */
#define GAI_SLOT_ROWS 8

/* bit r of rows == (columns[r] != 0), but for slots' rows, where it is 0;  bit c of columns[r] == (bins[r][c] != NULL)
   bytes == sum of the blocks' */
struct gai_set {
    gai_stream *stream; /* NULL: common or mixed */
    uint64_t rows;
    uint32_t columns[GAI_ROWS + GAI_SLOT_ROWS];
    gai_block *bins[GAI_ROWS + GAI_SLOT_ROWS][GAI_COLUMNS];
    gai_block *oldest, *newest;
    size_t bytes;
    int counted; /* what comes and goes is counted in torch_stats */
};

/* stream states == stream states that have it in `block_pool`;  segments == segments with segment->block_pool == this;
   one of them is not 0, or `awaited` is not Stream states that share one are ordered with each other. When the last of
   them is forgotten, whoever lacks memory takes over the segments that are free as a whole, unless they were a graph's.
   */
struct gai_block_pool {
    gai_block_pool *next; /* of the pool */
    gai_stream *stream; /* one of them; NULL: it is gone */
    int small, captured;
    size_t streams, segments;
    size_t awaited; /* segments on their way to it, while `growth` may be let go */
    gai_set free;
};

#define GAI_CACHE_BINS_LOG2 6
#define GAI_CACHE_BINS 64

typedef struct gai_cache_bin {
    size_t bytes;
    gai_block *first;
} gai_cache_bin;

/* Guarded by the latch, which is taken after any other lock. `open`, `most`, `enough`, `alone` and `trusted` are
   changed only with the pool's lock held as well, so that either lets them be read.
   bit i of filled == (cache bins[i].first != NULL);  blocks, bytes: of all cache bins
   unconfirmed_blocks, unconfirmed_bytes: of `unconfirmed` and `orphans`
   blocks + unconfirmed_blocks <= GAI_CACHE_BLOCKS,  bytes + unconfirmed_bytes <= most
   not trusted: unconfirmed_blocks <= GAI_UNCONFIRMED_BLOCKS,  unconfirmed_bytes <= GAI_MARK_BYTES
   Since the cache bins were emptied last, which is when the pool's counters are told, have gone out: mallocs in calls,
   allocated_in in bytes held, live_in in bytes asked for. What has come onto the cache bins is that and what is there
   now; live_out says it in bytes asked for. What is fresh has not been told.

   Who vouches for a free. A stream's handle comes back after cudaStreamDestroy, its id never. A free looks only whether
   the handle is captured; that the handle is still the stream S whose stream state this is, it does not ask. So its
   block is `unconfirmed`: it may turn out to have been freed on another stream. A later call that is given the stream,
   and asks for its id, finds S: S is alive then, so it was alive all the time since it was seen first, and since one
   handle is one living stream, each handle that led here in between was S. It vouches for all that is fresh. If S is
   dead no such call ever comes. Hence:
     - only a call that has asked for the id takes blocks out, or lets the pool have what is fresh;
     - who empties the stream cache for others' sake leaves what is fresh where it is;
     - a free that finds no room here asks for the id: what a stream that dies unannounced leaves behind is no more
       than GAI_MARK_BYTES, and than GAI_UNCONFIRMED_BLOCKS;
     - once all contexts that are known have been waited for, what was fresh before is nobody's any more (`orphans`
       while they are);
     - a retired stream state is shut.
   Where every call asks (default streams) or none does (stream_check:off) all of it is trusted.

   run of frees: frees since the stream state last held nothing, less those that the stream state's own `busy_frees`
   counts. The stream state holds stream->blocks - blocks - unconfirmed_blocks, but for blocks that were given to
   another stream state and freed here. The free that leaves it nothing after a run of frees of GAI_MARK_FREES or more
   goes to the pool: it may be the last for long.

   Where threads share a stream cache, calls wait for cache lines to come from another processor: a pair changes two,
   which begin with the stream cache. Counters that change together are apart: as neighbours they would become a vector.
   */
typedef struct gai_cache {
    gai_latch latch;
    uint64_t open;     /* the stream state's life while calls may use the stream cache, else 0 */
    size_t unconfirmed_blocks;
    gai_block *unconfirmed;  /* linked by next_bin, as `orphans` */
    size_t unconfirmed_bytes;
    size_t alone;      /* what a stream cache that is empty takes unasked */
    size_t blocks;
    size_t mallocs;
    size_t live_in;    /* begins the second line */
    uint64_t busy_frees;
    size_t live_out;
    uint64_t filled;
    size_t allocated_in;
    size_t most;
    size_t bytes;
    size_t enough;     /* with more in it, it takes no further block: lane_bytes */
    gai_block *orphans;
    int trusted;
    gai_cache_bin bins[GAI_CACHE_BINS];
    char after[GAI_CACHE_LINE];
} gai_cache;

/* One capture, as a pool knows it. CUDA's graph has a share in it as well, as long as it, an instance of it or one of
   their launches lasts; whoever gives up the second share frees it. So the graph may be gone before the pool, or
   outlive it, and nothing but this is ever touched by whoever destroys it.

   owners: 2, then 1 once the pool or the graph has given up its share */
typedef struct gai_capture {
    struct gai_capture *next; /* of the pool */
    unsigned long long id;
    galloc_graph *graph; /* the group whose memory it shares; NULL: it has its own */
    uint64_t owners;
    int lost; /* its context was reset: the graph will not run any more */
} gai_capture;

/* Captures that share memory. */
struct galloc_graph {
    galloc_graph *next;   /* of the pool */
    galloc_graph *handle; /* what the program has: a number never given twice */
    CUstream captured;      /* captures of it are of the group; NULL: none is any more */
    unsigned long long key; /* of that handle */
};

#define GAI_UNKNOWN_STREAMS (~0ull)

/* done < epoch;  freed, handed <= epoch;  done < recorded->epoch < recorded->next->epoch < ... < epoch
   epoch > positions->epoch > positions->older->epoch > ... > done;  positions: only while capture != NULL
   uses == marks that name it, in blocks of any kind, recorded uses included
   capture, outside: asked, so that its stream cache is shut, and empty; no event is recorded for it; it waits for
   nobody, but what it follows in its own capture, by the graph, is noted as if it did capture: its marks complete when
   the capture is forgotten, none does before;  a used block that was given to it has a mark of it over all its bytes */
struct gai_stream {
    gai_stream *next, *next_indexed;
    unsigned long long capture_id; /* of a captured stream; 0: of one that is not; outside: GAI_UNKNOWN_STREAMS */
    gai_capture *capture; /* the same, while its graph may be launched */
    CUcontext context;
    unsigned long long context_id;
    unsigned long long stream_id; /* 0: legacy, or captured: that cannot be asked */
    unsigned long long key;       /* by which it is found: the id; captured: what stands for the handle */
    CUstream handle;     /* only good during a call that was given it, and for recorded uses (see ON STREAMS) */
    int blocking;        /* perhaps in order with others: with the legacy stream; captured: with those of its group */
    int asked;           /* somebody waits for a mark: record one at the next opportunity */
    int wanted;          /* somebody once asked: on legacy, only then is it worth an event */
    int due;             /* record an event as soon as the lock is let go: record_stream's rule */
    short retired;       /* its stream is, or is about to be, destroyed */
    short silent;        /* its context did not say whether it exists: nothing in it is asked */
    int busy;            /* calls that hold on to it with no lock held */
    uint64_t epoch;      /* of frees from now on */
    uint64_t done;       /* all frees stamped so or less are complete */
    uint64_t freed;      /* the latest stamp given to what was freed; captured: of no use */
    uint64_t handed;     /* the same for blocks that went out again, and lost their mark, or never had one */
    uint64_t waited_for; /* the epoch that a wait for the device, now under way, will complete */
    uint64_t uses;
    uint64_t life;       /* never changes while the stream state is in the pool; 0: unused */
    size_t unmarked;     /* bytes freed since the last mark or occasion, but for those in the stream cache */
    size_t passed;       /* bytes freed between the last mark and the last occasion */
    uint64_t occasion;   /* the number of that one, if there was no mark; else 0 */
    uint64_t blocks; /* used ones that the pool gave to it, those in stream caches among them; read without a lock */
    uint64_t busy_frees;      /* with the stream cache's: frees since it last held nothing; read without a lock */
    size_t stranded;     /* by it, in a report that is being made */
    size_t events;       /* length of `recorded` */
    gai_event *recorded; /* in order of epoch */
    gai_event *idle;
    gai_wait *waits;
    gai_block_pool *block_pool[2]; /* of large and of small blocks; NULL: none so far */
    gai_position *positions; /* captured; the newest first */
    gai_position here;   /* captured: where its stream was at its last call; more nodes than it has: not known */
    gai_cache cache;
    gai_set free;
    unsigned long long thread; /* the number of the one whose per-thread stream it is; 0: no such stream */
    void *memory; /* in which it lies, where a line of memory begins */
};

/* Unused descriptors of one kind; chunks stay until the pool ends. */
typedef struct gai_slab {
    size_t size;      /* of a descriptor */
    void *unused;     /* linked by their first word */
    size_t available; /* length of that list */
    size_t promised;  /* of these, kept for what must not fail; <= available while the pool's lock is free */
    void *chunks;
} gai_slab;

/* When pages are parked; see gai_pool_should_park. */
typedef struct gai_parking {
    uint64_t mapped;   /* times that pages were mapped since the last time */
    uint64_t calm;     /* times in a row that none was */
    uint64_t patience; /* so many are enough */
} gai_parking;

/* A plan that was carried out with old mappings alone. */
typedef struct gai_memo {
    struct gai_mapping *first; /* the descriptor may have another number by now, and be another mapping's */
    uint64_t number;
    uintptr_t at;
    size_t bytes;
} gai_memo;

#define GAI_MEMOS 2048

/* The last plans, in turn. As long as a program repeats itself, what comes next is what came after the same plan the
   last time: `next` is where that stands, and `agreed` how often in a row it was right. */
typedef struct gai_plan_predictor {
    gai_memo memos[GAI_MEMOS];
    uint64_t written, next; /* next >= written: nothing is expected */
    int agreed;
} gai_plan_predictor;

/* A time at which a mark was due. */
typedef struct gai_occasion {
    uint64_t
        key; /* of the stream state, the bytes that were to be marked, the frees and looks since the occasion before */
    int useless;  /* when somebody looked at the event, a later one was complete as well */
} gai_occasion;

#define GAI_OCCASIONS 2048

/* The last occasions, in turn, numbered from 1 on. `latest`: of those whose keys have the same place there. `next` and
   `agreed`: as in the plan predictor. */
typedef struct gai_mark_predictor {
    gai_occasion occasions[GAI_OCCASIONS];
    uint64_t latest[GAI_OCCASIONS];
    uint64_t noted, next, agreed;
    uint64_t clock; /* of the last one */
    uint64_t looks; /* since then, at what streams have done */
} gai_mark_predictor;

#define GAI_SAMPLES 16

/* How many frees there had been at some time. */
typedef struct gai_sample {
    uint64_t frees, ns;
} gai_sample;

/* When free pages are given back without anybody's asking; see gai_pool_collect. */
typedef struct gai_collector {
    uint64_t look;     /* the pool's clock when it is to be seen whether something is due; UINT64_MAX: never */
    uint64_t stride;   /* frees from one look to the next */
    uint64_t sampled;  /* samples taken so far */
    uint64_t aged;     /* pages that were not used since then, counted in frees, have been collected for their age */
    uint64_t rest;     /* above gc_threshold nothing is collected before this free */
    uint64_t patience; /* so many frees it rests */
    uint64_t ns;       /* when that was changed last; */
    size_t collected;  /* bytes collected above gc_threshold since then, */
    size_t created;    /* and bytes of pages created */
    gai_sample samples[GAI_SAMPLES]; /* in turn */
} gai_collector;

/* What a stream cache would hold that took more, or other sizes: how many blocks of each. It is looked into at misses
   only, so what it would have served are hits that the stream cache has not had. bit i of filled == (counts[i] != 0);
   blocks, bytes: of all sizes;  most: the most bytes that were in it */
typedef struct gai_ghost {
    uint64_t filled;
    size_t sizes[GAI_CACHE_BINS];
    size_t counts[GAI_CACHE_BINS];
    size_t blocks, bytes, most, hits;
} gai_ghost;

/* What strategy:heuristic has set and seen. Without it the settings are those of the configuration.
   lane_bytes, divisions: changed with the lock held, and read without
   decided <= GALLOC_DECISIONS */
typedef struct gai_tuning {
    int watching;    /* settings may still change */
    int frozen;      /* by galloc_pool_freeze */
    double overhead; /* in effect */
    size_t growth;
    uint64_t lane_bytes;
    uint64_t divisions; /* of sizes below 2 MiB */
    int pressed;     /* memory is nearly used up; `eased` is the overhead for better times */
    double eased;
    double asked;    /* bytes that misses asked for */
    size_t moves;    /* pages that moved since the last decision */
    size_t created;  /* and that were created */
    int churned;     /* the program has begun to free, too */
    gai_ghost same, alike; /* stream caches for the sizes that there are, and for sizes rounded to GAI_TUNE_STEPS */
    uint64_t life;   /* of the stream state whose calls they follow; 0: of the next one that misses */
    size_t watched, passed; /* misses of that stream state, and of all, since they were empty */
    uint64_t rest;   /* they are left alone before this free */
    uint64_t patience; /* so many frees they rest the next time */
    size_t unsized;  /* misses watched since rounding was last looked at */
    galloc_decision decisions[GALLOC_DECISIONS];
    int decided;
} gai_tuning;

#define GAI_STREAM_INDEX 64

#define GAI_DEVICES 64 /* that can be used; CUDA itself stops at fewer */

/* What the pools of a device hold together, and may hold. Guarded by the budget lock.
   held == what they have taken, added up;  held <= most
   limit: the lowest device_limit that one of them names;  most: the same, or where that was lowered beneath what was
   held, that */
typedef struct gai_budget {
    galloc_pool *pools; /* linked by next_sharing */
    size_t held, limit, most;
} gai_budget;

static gai_budget gai_budgets[GAI_DEVICES];

/* reserved.current == bytes of pages in blocks + parked + quarantined
   taken == the same + pages on their way in, which are taken from the budget before the driver is asked
   leaving + parked == bytes of mappings that are away
   cudaMallocAsync: reserved.current counts `kept` as well, what the driver's pool holds beyond the blocks of ours
   allocated.current == bytes of used blocks, those on cache bins among them; likewise the other counters: what the
   stream caches know is added by gai_stats_now. It makes live, allocated and blocks less, hardly ever more Three locks.
   `lock` guards all of it, for short: no driver call is made while it is held. `growth` is held around everything that
   changes pages or takes events and stream states away; it is taken before, and let go around callbacks of the
   program's, with what they are about out of sight. `marking` is held while events are recorded on streams that the
   call was not given (rule 6), and while groups of graphs begin, end, and are asked for their streams; it is taken
   before `lock`, never together with `growth`. Last of all come the latches of the stream caches. Handles. The program
   may name a pool that has ended, in a call or by an address, while another thread ends it. So what is read without a
   lock is never given back to the host before galloc_shutdown, and is never used for anything else: the pool itself
   with its locks, its stream states, the descriptors of blocks and mappings. All that serves the next pool. A handle is
   never dereferenced. It is an address within the pool, another one for each pool that this has been, until all are
   used up. A call with a handle, or with an address that it has looked up, counts among the users before it does
   anything, and who ends the pool waits for them. Calls by way of a stream cache do not: a stream state's life tells.
   */
struct galloc_pool {
    galloc_config config; /* as `is_default` not changed while the pool exists, and read without a lock */
    int is_default;
    int one_context; /* by promise all calls with default streams are made in it */
    void *key;       /* by which ways find it: the handle, or of a default pool NULL. Read by threads that come late */
    char apart[GAI_CACHE_LINE];
    struct galloc_pool *next;
    gai_lock lock, growth, marking;
    int due; /* some stream state is */
    int lost; /* segments that are */
    int retires; /* guarded by the global lock: the call that retires a stream everywhere has done so here */
    int collects; /* pages note their use, for gc_threshold or gc_age */
    int unfronted;    /* no stream's cache may be used: stats_exact, torch, or while the pool ends */
    int mortal;       /* its memory is of cudaMalloc, and goes with `context`; not changed any more */
    int torch;        /* like:pytorch with fixed segments: all of them have a home */
    int pooled;       /* strategy:pooled: small requests have slots */
    int sorts;        /* torch or pooled: not every free block merges with its neighbours */
    uint64_t freed_slots;   /* slots that became free since runs were looked at */
    int oversize;     /* there are blocks that are never cut: max_split_size */
    uint64_t special; /* what is asked for is not served in the short way, or in another one: GAI_ENTRY_... or-ed */
    uint64_t plain;   /* requests up to here are rounded to 512 bytes and no further; read without a lock */
    CUcontext context;
    unsigned long long context_id;
    size_t granularity, device_bytes;
    int rdma;            /* pages can be made capable of it */
    gai_budget *budget;  /* of its device */
    galloc_pool *next_sharing;
    size_t taken;        /* from the budget, and guarded by its lock; so is */
    int visitors;        /* threads of other pools that look for what is idle here */
    void *fence;         /* pinned host memory that the driver would not take back; see gai_device_wait */
    CUcontext fence_context; /* where that was allocated */
    unsigned long long fence_context_id;
    uint64_t broken;     /* a sticky error: the pool refuses from then on */
    int driver_gone;
    size_t live_peak;    /* of live bytes, since the pool exists */
    uint64_t clock;      /* frees so far */
    gai_segment *segments;
    gai_stream *streams,
        *unused_streams;            /* threads may still look at one that they used once, in this pool or another */
    size_t stream_count;            /* plain stream states in use */
    gai_stream *stream_index[GAI_STREAM_INDEX]; /* by key */
    gai_block *holes;     /* linked by next_bin, prev_bin */
    gai_mapping *oldest_alias, *newest_alias; /* kept for the return of their pages */
    size_t parked;        /* bytes of pages that are */
    size_t old;           /* mappings that are away and not parked */
    uint64_t plans, numbers; /* ranges planned and mappings made so far */
    gai_parking parking;
    gai_collector collector;
    gai_tuning tuning;
    gai_plan_predictor plan_predictor;
    gai_mark_predictor mark_predictor;
    gai_mapping *quarantine;      /* that the driver would not unmap, or whose page it would not release */
    gai_capture *captures;
    galloc_graph *graphs;
    gai_stream outside;             /* among the stream states once there is need for it */
    gai_set common, mixed;
    gai_slab blocks, marks, pages, mappings, events, waits, positions;
    galloc_callbacks callbacks; /* guarded by `growth` and `lock`: either lets them be read */
    int telling;         /* calls of on_map and on_unmap that are under way; guarded by `growth` */
    int walking;         /* 1: on_map is being told of all there is; guarded by `growth` */
    gai_block_pool *block_pools;
    size_t promised_jobs; /* marks that are promised to jobs under way */
    uint64_t searches[2]; /* for large and for small requests, where gc_threshold counts them */
    galloc_torch_stats torch_stats;
    CUmemoryPool driver_pool; /* cudaMallocAsync: where the memory comes from; NULL: the context was reset */
    size_t kept, of_graphs;   /* cudaMallocAsync: see above; bytes of segments that are graphs' */
    galloc_stats stats;
    uint64_t users;  /* calls that are in the pool, GAI_PASSING, and GAI_ENDED */
    galloc_pool *handle;
    size_t lives;    /* pools that this has been; of the handles used up */
    void *known;     /* the next of gai_known_pools */
};

#define GAI_PASSING ((uint64_t)1 << 32) /* a call that concerns all pools is in this one, and calls no program there */
#define GAI_ENDED ((uint64_t)1 << 63) /* there is no pool here, or it is about to end: nobody comes in */

#define GAI_ROUTE_LONG 1    /* torch, oversize */
#define GAI_ROUTE_SLOTS 2   /* pooled */
#define GAI_ROUTE_ROUNDED 4 /* some sizes are rounded further than to 512 bytes */
#define GAI_ROUTE_TUNE 8    /* the long one, once: sizes have been watched for long enough */
#define GAI_ROUTE_ENDS 16   /* none: the pool is about to end */

static galloc_pool *gai_pools;       /* all of them; guarded by the global lock, as */
static galloc_pool *gai_ended_pools; /* what serves the next ones */
static void *gai_known_pools;        /* both, and those about to begin or to end; read without a lock */

/* What an allocation looks for. */
typedef struct gai_params {
    size_t bytes, alignment, room; /* rounded; room: addresses wanted from the start of the block on, 0: just bytes */
    size_t requested;
    uint32_t tag;
    int just_ready; /* galloc_pool_reserve: have it, do not take it */
    int growable;   /* it has room, be it addresses or, in fixed segments, memory */
    int far;        /* place it at the far end of a free block */
    int small;      /* like:pytorch: it is one for small segments */
    int slot;       /* it has a class */
    gai_stream *stream; /* NULL: for nobody in particular, so only what anybody may have */
} gai_params;

/* ==== SLAB ====================================================================================================== */
/* >>slab */

#ifndef GAI_CHUNK_BYTES
#define GAI_CHUNK_BYTES ((size_t)32 << 10)
#endif

static void gai_slab_give(gai_slab *slab, void *descriptor)
{
    *(void **)descriptor = slab->unused;
    slab->unused = descriptor;
    slab->available++;
}

/* Descriptors are on a line of memory of their own if their size allows it. */
static void gai_slab_spread(gai_slab *slab, char *chunk)
{
    size_t at = gai_up((uintptr_t)chunk + sizeof(void *), GAI_CACHE_LINE) - (uintptr_t)chunk;
    for (; at + slab->size <= GAI_CHUNK_BYTES; at += slab->size) gai_slab_give(slab, chunk + at);
}

/* Makes sure that `n` descriptors can be taken, besides those that are promised. They begin as zeros. */
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

/* What giving memory back needs is kept for it: that must not fail because the host has no memory left. */
#define GAI_SLAB_KEPT 4

static GAI_INLINE int gai_slab_need(gai_slab *slab, size_t n)
{
    return slab->available >= slab->promised + n + GAI_SLAB_KEPT || gai_slab_has(slab, n + GAI_SLAB_KEPT);
}

/* Cannot fail after gai_slab_need or gai_slab_has, nor where it was promised. */
static void *gai_slab_take(gai_slab *slab)
{
    void *descriptor = slab->unused;
    GALLOC_ASSERT(slab->available > 0);
    slab->unused = *(void **)descriptor;
    slab->available--;
    return descriptor;
}

static void gai_slab_end(gai_slab *slab)
{
    while (slab->chunks) {
        void *next = *(void **)slab->chunks;
        GALLOC_FREE(slab->chunks);
        slab->chunks = next;
    }
    slab->unused = NULL;
    slab->available = slab->promised = 0;
}

/* All descriptors are unused again. */
static void gai_slab_reset(gai_slab *slab)
{
    char *chunk;
    slab->unused = NULL;
    slab->available = slab->promised = 0;
    for (chunk = (char *)slab->chunks; chunk; chunk = *(char **)(void *)chunk) gai_slab_spread(slab, chunk);
}

/* ==== MAP ======================================================================================================= */
/* >>map */

/* Two maps for all pools, read without a lock: from the address of a block to its descriptor, and from any address,
   cut to 2 MiB, to the page that is mapped there. Radix trees of fixed depth; inner nodes stay until galloc_shutdown.
   Entries are written under the lock of the pool that owns the address.
   The map of blocks has an entry for 64 KiB: nothing, or the one block that begins there, or, told apart by its lowest
   bit, a leaf with a slot for every 512 bytes. Large blocks do without leaves, which are a KiB each. So do only
   expandable segments: the addresses of others may be given to another pool before it is known that they are lost. */
#define GAI_MAP_LEVELS 4
#define GAI_MAP_ROOT_LOG2 14
#define GAI_PAGE_LOG2 21
#define GAI_LEAF_LOG2 16
#define GAI_LEAF_SLOTS (1 << (GAI_LEAF_LOG2 - GAI_UNIT_LOG2))

/* Nothing in it is set beforehand, so that it takes no place in the program's file. */
typedef struct gai_map {
    void *root[1 << GAI_MAP_ROOT_LOG2];
    void *nodes; /* all inner nodes, linked by their first word */
} gai_map;

static gai_map gai_block_map, gai_page_map;

static const int gai_map_log2[GAI_MAP_LEVELS] = {GAI_MAP_ROOT_LOG2, 13, 9, 5}; /* width of each level, root first */
static const int gai_map_shift[GAI_MAP_LEVELS] = {43, 30, 21, GAI_LEAF_LOG2}; /* what the levels after it take */

/* Below the root; the map of pages has no use for the last one. */
static int gai_map_levels(const gai_map *map) { return map == &gai_block_map ? GAI_MAP_LEVELS : GAI_MAP_LEVELS - 1; }

/* The node's slots begin behind its link. */
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

/* The slot of an address, or NULL where there is no node for it. */
static void **gai_map_slot(gai_map *map, uintptr_t addr)
{
    void **children = map->root;
    int level;
    if (addr >> GAI_ADDRESS_BITS) return NULL;
    for (level = 0; level < gai_map_levels(map) - 1; level++) {
        children = (void **)gai_load_pointer(&children[gai_map_digit(level, addr)]);
        if (!children) return NULL;
    }
    return &children[gai_map_digit(level, addr)];
}

static int gai_is_leaf(const void *in) { return (int)((uintptr_t)in & 1); }

static void **gai_leaf(void *in) { return (void **)((uintptr_t)in - 1); }

static size_t gai_leaf_digit(uintptr_t addr) { return (size_t)(addr >> GAI_UNIT_LOG2) & (GAI_LEAF_SLOTS - 1); }

/* What a map has for the 2 MiB around an address, or NULL: gai_map_slot with the numbers written out, since most calls
   come by here. */
static GAI_INLINE void **gai_map_entry_at(gai_map *map, uintptr_t addr)
{
    void **children;
    if (addr >> GAI_ADDRESS_BITS) return NULL;
    children = (void **)gai_load_pointer(&map->root[addr >> 43]);
    if (children) children = (void **)gai_load_pointer(&children[addr >> 30 & 0x1fff]);
    return children ? &children[addr >> GAI_PAGE_LOG2 & 0x1ff] : NULL;
}

/* The entry of an address in the map of blocks, or NULL. */
static GAI_INLINE void **gai_block_entry(uintptr_t addr)
{
    void **children = gai_map_entry_at(&gai_block_map, addr);
    if (children) children = (void **)gai_load_pointer(children);
    return children ? &children[addr >> GAI_LEAF_LOG2 & 0x1f] : NULL;
}

/* Its address, for who has no lock. */
static uintptr_t gai_block_addr(const gai_block *block)
{
    return (uintptr_t)gai_counted((const uint64_t *)&block->addr);
}

static GAI_INLINE void gai_block_set_addr(gai_block *block, uintptr_t addr)
{
    gai_set_relaxed((uint64_t *)&block->addr, addr);
}

/* The only used or free block that may start at an address, or NULL; where it does start is for the caller to
   compare. */
static GAI_INLINE gai_block *gai_block_at(uintptr_t addr)
{
    void **entry = gai_block_entry(addr), *in = entry ? gai_load_pointer(entry) : NULL;
    return (gai_block *)(gai_is_leaf(in) ? gai_load_pointer(&gai_leaf(in)[gai_leaf_digit(addr)]) : in);
}

/* Makes the nodes on the way to an address; the only step of the map that can fail. */
static int gai_map_need(gai_map *map, uintptr_t addr)
{
    void **children = map->root;
    int level;
    if (addr >> GAI_ADDRESS_BITS) return 0;
    if (gai_map_slot(map, addr)) return 1;
    gai_lock_on(&gai_map_lock);
    for (level = 0; level < gai_map_levels(map) - 1 && children; level++) {
        void **child = &children[gai_map_digit(level, addr)];
        if (!*child) gai_store_pointer(child, gai_map_node_new(map, (size_t)1 << gai_map_log2[level + 1]));
        children = (void **)*child;
    }
    gai_lock_off(&gai_map_lock);
    return children != NULL;
}

/* Not 0 when one of two slots is in use. */
static uintptr_t gai_map_pair(void *const *children)
{
    return (uintptr_t)gai_load_pointer(children) | (uintptr_t)gai_load_pointer(children + 1);
}

/* One behind the last slot in use of the first `n`; 0: there is none. Most are empty, so they are looked at in
   eights. */
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

/* The same below a node of the map of blocks. Beside the address's own way all of an entry lies before it. */
static gai_block *gai_block_floor(void **children, int level, uintptr_t addr)
{
    size_t own = gai_map_digit(level, addr), n;
    for (n = gai_map_last(children, own + 1); n > 0; n = gai_map_last(children, n - 1)) {
        uintptr_t last = n - 1 == own ? addr : ~(uintptr_t)0;
        void *in = gai_load_pointer(&children[n - 1]);
        gai_block *block = NULL;
        if (level >= GAI_MAP_LEVELS - 1) block = gai_entry_last(in, last);
        else if (in) block = gai_block_floor((void **)in, level + 1, last);
        if (block) return block;
    }
    return NULL;
}

static gai_block *gai_block_before(uintptr_t addr)
{
    return addr >> GAI_ADDRESS_BITS ? NULL : gai_block_floor(gai_block_map.root, 0, addr);
}

/* A leaf for an entry; the block that was alone there goes into it. Not in other pools' addresses. 0: no host
   memory. */
static int gai_leaf_new(void **entry)
{
    void *in;
    gai_lock_on(&gai_map_lock);
    in = gai_load_pointer(entry);
    if (!gai_is_leaf(in)) {
        gai_block *block = (gai_block *)in;
        void **leaf = gai_map_node_new(&gai_block_map, GAI_LEAF_SLOTS);
        if (leaf && block) {
            block->map_entry = &leaf[gai_leaf_digit(block->addr)];
            *block->map_entry = block;
        }
        if (leaf) gai_store_pointer(entry, (void *)((uintptr_t)leaf + 1));
    }
    gai_lock_off(&gai_map_lock);
    return gai_is_leaf(gai_load_pointer(entry));
}

/* Makes sure that a block can be shown at an address, whatever else begins in the 64 KiB around it. 0: no host
   memory. */
static int gai_block_map_need(uintptr_t addr)
{
    void **entry;
    if (!gai_map_need(&gai_block_map, addr)) return 0;
    entry = gai_block_entry(addr);
    return gai_is_leaf(gai_load_pointer(entry)) || gai_leaf_new(entry);
}

/* The same for a block that is shown before the pool's lock is let go, with at most one more, at `other`: in an
   expandable segment it may be alone. */
static GAI_INLINE int gai_block_map_need_for(const gai_segment *segment, uintptr_t addr, uintptr_t other)
{
    void **entry = gai_block_entry(addr), *in = entry ? gai_load_pointer(entry) : NULL;
    if (gai_is_leaf(in)) return 1;
    if (entry && !in && !segment->fixed && addr >> GAI_LEAF_LOG2 != other >> GAI_LEAF_LOG2) return 1;
    return gai_block_map_need(addr);
}

/* The block is found by its address from now on. The map has room for it. */
static GAI_INLINE void gai_block_show(gai_block *block)
{
    void **entry = gai_block_entry(block->addr), *in = gai_load_pointer(entry);
    block->map_entry = gai_is_leaf(in) ? &gai_leaf(in)[gai_leaf_digit(block->addr)] : entry;
    gai_store_pointer(block->map_entry, block);
}

/* Not any more, unless somebody else has taken its place already. */
static GAI_INLINE void gai_block_hide(const gai_block *block)
{
    if (block->map_entry && gai_load_pointer(block->map_entry) == block) gai_store_pointer(block->map_entry, NULL);
}

static void gai_map_end(gai_map *map)
{
    while (map->nodes) {
        void *next = *(void **)map->nodes;
        GALLOC_FREE(map->nodes);
        map->nodes = next;
    }
    memset(map->root, 0, sizeof map->root);
}

/* ==== BINS ====================================================================================================== */
/* >>bins */

#define GAI_LOOKS 4 /* blocks compared for the best fit within a bin; more gain nothing (docs/design.md) */

typedef struct gai_bin {
    int row, column;
} gai_bin;

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

/* The next bin with a block in it, strictly after this one; 0 when there is none. */
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

/* Where the slots of a size are. */
static GAI_INLINE gai_block **gai_slot_bin(gai_set *set, gai_bin bin)
{
    return &set->bins[GAI_ROWS + bin.row][bin.column];
}

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

/* The set's list by age is kept in order near its ends, which is where blocks enter it: newest by a free, anywhere by
   a split. A block that belongs further inside is put GAI_AGE_STEPS from an end. */
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

/* Adds to a number that is counted of all blocks and of those of each kind, or takes off it. */
static void gai_torch_add_one(galloc_stat *stat, size_t n, int new_ones)
{
    stat->current += n;
    stat->total += new_ones ? n : 0;
    if (stat->current > stat->peak) stat->peak = stat->current;
}

static void gai_torch_add(galloc_torch_stat *stat, int small, size_t n, int new_ones)
{
    gai_torch_add_one(&stat->all, n, new_ones);
    gai_torch_add_one(small ? &stat->small_pool : &stat->large_pool, n, new_ones);
}

static void gai_torch_subtract(galloc_torch_stat *stat, int small, size_t n)
{
    stat->all.current -= n;
    if (small) stat->small_pool.current -= n;
    else stat->large_pool.current -= n;
}

static int gai_block_is_whole(const gai_block *block) { return block->bytes == block->segment->bytes; }

/* A free block of a home comes into a set. */
static void gai_torch_count_in(const gai_set *set, const gai_block *block)
{
    const gai_segment *segment = block->segment;
    galloc_torch_stats *stats = &segment->pool->torch_stats;
    int small = segment->block_pool->small;
    if (set == &segment->pool->mixed) {
        gai_torch_add(&stats->active, small, 1, 0);
        gai_torch_add(&stats->active_bytes, small, block->bytes, 0);
    } else if (!gai_block_is_whole(block)) {
        gai_torch_add(&stats->inactive_split, small, 1, 1);
        gai_torch_add(&stats->inactive_split_bytes, small, block->bytes, 1);
    }
}

/* The same when it goes; its size is what it was. */
GAI_APART
static void gai_torch_count_out(const gai_set *set, const gai_block *block)
{
    const gai_segment *segment = block->segment;
    galloc_torch_stats *stats = &segment->pool->torch_stats;
    int small = segment->block_pool->small;
    if (set == &segment->pool->mixed) {
        gai_torch_subtract(&stats->active, small, 1);
        gai_torch_subtract(&stats->active_bytes, small, block->bytes);
    } else if (!gai_block_is_whole(block)) {
        gai_torch_subtract(&stats->inactive_split, small, 1);
        gai_torch_subtract(&stats->inactive_split_bytes, small, block->bytes);
    }
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
    if (set->counted) gai_torch_count_out(set, block);
    gai_bin_remove(set, block);
    gai_age_remove(set, block);
    set->bytes -= block->bytes;
    block->set = NULL;
}

/* Where in [begin, end) the wanted bytes go; 0 when they do not fit. */
static uintptr_t gai_place(uintptr_t begin, uintptr_t end, const gai_params *params)
{
    uintptr_t at;
    if (end - begin < params->bytes) return 0;
    at = params->far ? gai_down(end - params->bytes, params->alignment) : gai_up(begin, params->alignment);
    return at >= begin && at <= end - params->bytes ? at : 0;
}

static int gai_is_better(const gai_block *a, const gai_block *b)
{
    return !b || a->bytes < b->bytes || (a->bytes == b->bytes && a->addr < b->addr);
}

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

/* The same where every block that is large enough will do: the first that fits exactly ends it. */
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

/* The best of a few: looks into `bin`, which is that of the size itself, then into the first bin whose blocks all
   suffice. */
static GAI_INLINE gai_block *gai_set_find_plain(const gai_set *set, gai_bin bin, size_t bytes)
{
    gai_block *best = NULL;
    if (!(set->rows >> bin.row)) return NULL;
    if (set->columns[bin.row] >> bin.column & 1) best = gai_bin_best_plain(set->bins[bin.row][bin.column], bytes);
    if (best || !gai_bin_next(set, &bin)) return best;
    return gai_bin_best_plain(set->bins[bin.row][bin.column], bytes);
}

/* The same with an alignment: blocks of the size need not fit, those as large as the alignment's worst case do. */
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

/* The largest of the set's free blocks, by GAI_LOOKS of those in the highest bin: none there is GAI_COLUMNS-th
   larger. 0: there is none. */
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

#define GAI_MARKS_MAX 16 /* a longer list is made coarser: one mark per stream state, for all that it spans */

static gai_mark *gai_mark_new(galloc_pool *pool, gai_stream *stream, uint64_t epoch, uintptr_t begin, uintptr_t end)
{
    gai_mark *mark = (gai_mark *)gai_slab_take(&pool->marks);
    mark->next = NULL;
    mark->stream = stream;
    mark->epoch = epoch;
    mark->begin = begin;
    mark->end = end;
    if (stream) stream->uses++;
    return mark;
}

static void gai_mark_end(galloc_pool *pool, gai_mark *mark)
{
    if (mark->stream) mark->stream->uses--;
    gai_slab_give(&pool->marks, mark);
}

static int gai_mark_is_complete(const gai_mark *mark) { return mark->epoch <= mark->stream->done; }

static size_t gai_marks_count(const gai_mark *mark)
{
    size_t n = 0;
    for (; mark; mark = mark->next) n++;
    return n;
}

static void gai_marks_prune(galloc_pool *pool, gai_mark **list)
{
    while (*list) {
        gai_mark *mark = *list;
        if (gai_mark_is_complete(mark)) {
            *list = mark->next;
            gai_mark_end(pool, mark);
        } else {
            list = &mark->next;
        }
    }
}

static void gai_marks_end(galloc_pool *pool, gai_mark **list)
{
    while (*list) {
        gai_mark *mark = *list;
        *list = mark->next;
        gai_mark_end(pool, mark);
    }
}

static void gai_mark_drop(galloc_pool *pool, gai_mark **at)
{
    gai_mark *mark = *at;
    *at = mark->next;
    gai_mark_end(pool, mark);
}

/* Of two marks of one stream state that overlap, the later one counts where they do. Returns the one that says nothing
   more, or NULL. */
static gai_mark *gai_mark_settle(gai_mark *a, gai_mark *b)
{
    gai_mark *late = a->epoch > b->epoch ? a : b, *early = late == a ? b : a;
    if (early->begin >= late->begin && early->end <= late->end) return early;
    if (early->begin < late->begin && early->end > late->end) { /* asks for a little more than is needed */
        early->epoch = late->epoch;
        return late;
    }
    if (early->begin < late->begin) early->end = late->begin;
    else early->begin = late->end;
    return NULL;
}

/* Marks of one stream state and epoch that touch become one: says the same with less. Marks of one stream state do not
   overlap. A mark that has taken another in touches none before it: they touched neither. */
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

static void gai_marks_join(galloc_pool *pool, gai_mark **list, gai_mark *more)
{
    while (more) {
        gai_mark *next = more->next;
        gai_marks_add(pool, list, more);
        more = next;
    }
}

/* What stands in both lists, of bytes that touch, the one's before the other's: mostly that is a mark each, of one
   stream state and one epoch. */
static GAI_INLINE gai_mark *gai_marks_meet(galloc_pool *pool, gai_mark *left, gai_mark *right)
{
    if (!left || !right) return left ? left : right;
    if (!left->next && !right->next && left->stream == right->stream && left->epoch == right->epoch &&
        left->end == right->begin) {
        left->end = right->end;
        gai_mark_end(pool, right);
        return left;
    }
    gai_marks_join(pool, &left, right);
    return left;
}

/* Asks for more than is needed, never for less: of each stream state one mark stays, the latest, over all that its
   marks span. */
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

/* Keeps a list short: what is complete goes, and of what is left no more stays than is looked through in no time. */
static void gai_marks_trim(galloc_pool *pool, gai_mark **list)
{
    if (!*list || (!(*list)->next && !gai_mark_is_complete(*list))) return;
    gai_marks_prune(pool, list);
    if (gai_marks_count(*list) > GAI_MARKS_MAX) gai_marks_coarsen(pool, *list);
}

/* Leaves what is about bytes before `at` in *left and returns the rest. Takes a new mark for each one that is cut. */
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

static gai_set *gai_set_of(galloc_pool *pool, const gai_mark *marks)
{
    const gai_mark *mark;
    if (!marks) return &pool->common;
    for (mark = marks->next; mark; mark = mark->next)
        if (mark->stream != marks->stream) return &pool->mixed;
    return &marks->stream->free;
}

/* Graphs of one group never run at once: so the program has promised. What is captured within one graph on two streams
   may. */
static int gai_captures_share(const gai_capture *a, const gai_capture *b)
{
    return a && b && a->graph && a->graph == b->graph && a->id != b->id;
}

/* Does later work of `after` come after earlier work of `before` by CUDA's own rules? Legacy is ordered with every
   blocking stream of its context, both ways; nothing follows from that for two blocking streams, nor for what was
   captured, also when its graph is gone. A context that came to an end has no work left, and one that is where it was
   comes after all of that: their ids need not be compared. */
static int gai_stream_is_ordered(const gai_stream *after, const gai_stream *before)
{
    if (after == before) return 1;
    if (after->capture_id || before->capture_id) return gai_captures_share(after->capture, before->capture);
    if (after->context != before->context) return 0;
    if (before->handle == CU_STREAM_LEGACY) return after->blocking;
    return after->handle == CU_STREAM_LEGACY && before->blocking;
}

/* Of a stream that is not captured. */
static int gai_stream_is_plain(const gai_stream *stream) { return !stream->capture_id; }

static uint64_t gai_stream_waited(const gai_stream *stream, const gai_stream *on)
{
    const gai_wait *wait = stream->waits;
    while (wait && wait->on != on) wait = wait->next;
    return wait ? wait->epoch : 0;
}

/* The recorded event that stands for the mark, or NULL while there is none that may be asked. */
static gai_event *gai_mark_event(const gai_mark *mark)
{
    gai_event *event = mark->stream->silent ? NULL : mark->stream->recorded;
    while (event && event->epoch < mark->epoch) event = event->next;
    return event;
}

/* May `stream` use bytes with this mark, with nothing else done? */
static int gai_mark_allows(const galloc_pool *pool, const gai_mark *mark, const gai_stream *stream)
{
    if (gai_mark_is_complete(mark)) return 1;
    if (!stream) return 0;
    if (gai_stream_is_ordered(stream, mark->stream)) return 1;
    return (pool->config.reuse & GALLOC_REUSE_FOLLOWED) && gai_stream_waited(stream, mark->stream) >= mark->epoch;
}

/* Calls that come from now on find it shut. With the pool's lock held. */
static void gai_cache_shut(gai_cache *cache)
{
    if (!cache->open) return;
    gai_latch_on(&cache->latch);
    cache->open = 0;
    gai_latch_off(&cache->latch);
}

/* Somebody waits for a mark on the stream state's stream: its next call must come to the pool, not end in the stream
   cache. */
static void gai_stream_ask(gai_stream *stream)
{
    stream->asked = 1;
    gai_cache_shut(&stream->cache);
}

/* The same for a mark that memory hangs on. */
static void gai_stream_want_mark(gai_stream *stream)
{
    gai_stream_ask(stream);
    stream->wanted = 1;
}

/* The first mark in the way of `params` over [at, at + bytes); with `may_wait`, one that has an event is not in the
   way. */
static const gai_mark *gai_marks_forbid(const galloc_pool *pool, const gai_mark *mark, uintptr_t at,
                                        const gai_params *params, int may_wait)
{
    for (; mark; mark = mark->next) {
        if (mark->end <= at || mark->begin >= at + params->bytes) continue;
        if (gai_mark_allows(pool, mark, params->stream)) continue;
        if (may_wait && gai_mark_event(mark)) continue;
        if (!gai_mark_event(mark)) gai_stream_want_mark(mark->stream);
        return mark;
    }
    return NULL;
}

/* The first place in a block whose marks allow it; 0 when there is none. */
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

/* The caller has made sure of a descriptor. Field by field: compilers make a loop in microcode of a memset that is as
   short as this. */
static gai_block *gai_block_new(galloc_pool *pool, gai_segment *segment, uintptr_t addr, size_t bytes,
                                enum gai_kind kind)
{
    gai_block *block = (gai_block *)gai_slab_take(&pool->blocks);
    GALLOC_ASSERT(!block->held);
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

static int gai_block_is_parked(const gai_block *block)
{
    return block && block->kind == GAI_ALIAS && block->alias->page->current == block->alias;
}

/* Are pages found under its addresses? */
static int gai_block_has_pages(const gai_block *block)
{
    return gai_block_is_mapped(block) || gai_block_is_parked(block);
}

static void gai_block_link(gai_block *left, gai_block *block)
{
    block->prev = left;
    block->next = left->next;
    if (left->next) left->next->prev = block;
    left->next = block;
}

/* Cuts a block in two at `at` and returns the right one, of the given kind, with the marks of its bytes. The block is
   in no set. The caller has made sure of a descriptor, a mark for each of the block's, and, if the right one is to be
   free or used, of the map's nodes for `at`. */
static gai_block *gai_block_split(galloc_pool *pool, gai_block *block, uintptr_t at, enum gai_kind kind)
{
    gai_block *right = gai_block_new(pool, block->segment, at, block->addr + block->bytes - at, kind);
    right->age = block->age;
    right->stream_id = block->stream_id;
    block->bytes = at - block->addr;
    gai_block_link(block, right);
    right->marks = gai_marks_cut(pool, &block->marks, at);
    if (gai_block_is_mapped(right)) {
        gai_block_show(right);
        pool->stats.splits++;
    }
    return right;
}

/* Takes the right neighbour in. Both are of one kind and in no set. */
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

/* Free neighbours are one block when whoever may have the one may have the other: same set, or one of them common.
   Else each of two streams would lose sight of memory that is its own. `all`: whatever the sets. */
static int gai_sets_merge(const galloc_pool *pool, const gai_set *a, const gai_set *b, int all)
{
    return all || a == b || a == &pool->common || b == &pool->common;
}

/* Does a neighbour, where there is one, merge with a block of this set? */
static GAI_INLINE int gai_block_meets(const galloc_pool *pool, const gai_block *other, const gai_set *set, int all)
{
    return other && other->kind == GAI_FREE && gai_sets_merge(pool, other->set, set, all);
}

/* The neighbour that a block of this set merges with, or NULL. */
static GAI_INLINE gai_block *gai_block_plain_partner(galloc_pool *pool, const gai_block *block, const gai_set *set,
                                                     int all)
{
    if (gai_block_meets(pool, block->prev, set, all)) return block->prev;
    return gai_block_meets(pool, block->next, set, all) ? block->next : NULL;
}

/* A capture whose graph owns bytes of a block; 0: none does. */
static unsigned long long gai_block_capture_id(const gai_block *block)
{
    const gai_mark *mark = block->marks;
    while (mark && !mark->stream->capture) mark = mark->next;
    return mark ? mark->stream->capture_id : 0;
}

/* The same where there are graphs. What they own stays by itself, or with its like, since it may do so for long. */
static int gai_blocks_merge(galloc_pool *pool, const gai_block *a, const gai_block *b, int all)
{
    const gai_set *set = gai_set_of(pool, a->marks);
    if (!b || b->kind != GAI_FREE || !gai_sets_merge(pool, b->set, set, all)) return 0;
    if (set == b->set && set != &pool->mixed) return 1;
    return !gai_block_capture_id(a) && !gai_block_capture_id(b);
}

GAI_APART
static gai_block *gai_block_captured_partner(galloc_pool *pool, const gai_block *block, int all)
{
    if (gai_blocks_merge(pool, block, block->prev, all)) return block->prev;
    return gai_blocks_merge(pool, block, block->next, all) ? block->next : NULL;
}

static GAI_INLINE gai_block *gai_block_partner(galloc_pool *pool, const gai_block *block, int all)
{
    if (pool->captures) return gai_block_captured_partner(pool, block, all);
    return gai_block_plain_partner(pool, block, gai_set_of(pool, block->marks), all);
}

/* May those whose home it is have the bytes of an incomplete mark, with nothing else done? */
static int gai_block_pool_allows(const gai_block_pool *block_pool, const gai_mark *mark)
{
    if (mark->stream->block_pool[block_pool->small] == block_pool) return 1;
    return block_pool->stream && gai_stream_is_ordered(block_pool->stream, mark->stream);
}

/* The set that a free block of a home belongs to: nobody else gets it. */
static gai_set *gai_block_pool_set(galloc_pool *pool, const gai_block *block)
{
    gai_block_pool *block_pool = block->segment->block_pool;
    const gai_mark *mark = block->marks;
    while (mark && gai_block_pool_allows(block_pool, mark)) mark = mark->next;
    return mark ? &pool->mixed : &block_pool->free;
}

/* Those that have used it without being at home there are asked for an event: it comes back when they have done. */
static void gai_block_ask_users(const gai_block *block)
{
    const gai_mark *mark;
    for (mark = block->marks; mark; mark = mark->next)
        if (!gai_block_pool_allows(block->segment->block_pool, mark) && !gai_mark_event(mark))
            gai_stream_ask(mark->stream);
}

static int gai_block_is_at_block_pool(const gai_block *block)
{
    return block && block->kind == GAI_FREE && block->set == &block->segment->block_pool->free;
}

/* A segment that is free as a whole from now on notes how often has been searched. */
static void gai_segment_note_search(const galloc_pool *pool, const gai_block *block)
{
    gai_segment *segment = block->segment;
    if (!gai_block_is_whole(block) || segment->age == block->age) return; /* it is filed again */
    segment->age = block->age;
    segment->searches = pool->searches[segment->block_pool->small];
}

/* Files a block of a home: merged with its neighbours unless it has yet to come back, or they have. */
static gai_block *gai_block_file_block_pool(galloc_pool *pool, gai_block *block)
{
    gai_set *set = gai_block_pool_set(pool, block);
    int i;
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
    gai_torch_count_in(set, block);
    return block;
}

/* Files a slot, which merges with nothing. */
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

GAI_APART
static gai_block *gai_block_file_sorted(galloc_pool *pool, gai_block *block, int all)
{
    if (pool->torch) return gai_block_file_block_pool(pool, block);
    return block->slot ? gai_block_file_slot(pool, block) : gai_block_file_merged(pool, block, all);
}

/* Makes a block free and known to be: drops complete marks, merges with its neighbours, and enters a set. Returns the
   block that it has become part of. */
static gai_block *gai_block_file(galloc_pool *pool, gai_block *block, int all)
{
    block->kind = GAI_FREE;
    gai_marks_prune(pool, &block->marks);
    return pool->sorts ? gai_block_file_sorted(pool, block, all) : gai_block_file_merged(pool, block, all);
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

/* The used block in whose room a block lies, or NULL. */
static gai_block *gai_room_owner(const gai_block *block)
{
    gai_block *owner = block->prev;
    while (owner && (owner->kind == GAI_ROOM || owner->kind == GAI_BUSY || (owner->kind == GAI_ALIAS && owner->room)))
        owner = owner->prev;
    return owner && owner->kind == GAI_USED && block->addr - owner->addr < owner->room ? owner : NULL;
}

/* Makes a block without pages a hole, one with the holes beside it; in the room of a used block, its room. */
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

/* An old mapping, or a parked page, may lie in a room: nothing that still runs can touch it, so that the block can have
   the page back, or the addresses for another one, with no wait. */
static int gai_block_suits_room(const gai_block *block)
{
    const gai_mark *mark = block->marks;
    while (mark && gai_mark_is_complete(mark)) mark = mark->next;
    return block->kind == GAI_ALIAS && !block->room && !mark;
}

/* Keeps the holes and old mappings behind a block for it, up to `room` bytes from its start; with no host memory to cut
   the last hole there, all of that. Lock held. */
static void gai_block_keep_room(galloc_pool *pool, gai_block *block, size_t room)
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

/* The room of a block becomes anybody's. Lock held. */
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

/* Marks that the free of a used block takes at most, if it is on one stream; they are promised to it. */
#define GAI_FREE_MARKS 2

/* Host memory for cutting [at, at + bytes) out of a block and using it, all at once, so that nothing fails later. */
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

/* Limits. Owns gai_budgets, guarded by the budget lock. Bytes are charged to every limit before the driver
   call, so that concurrent growth exceeds none. Calls nothing but the platform. */

/* What the pool may hold by its own settings. */
static size_t gai_pool_share(const galloc_pool *pool)
{
    double fraction = pool->config.per_process_memory_fraction * (double)pool->device_bytes;
    size_t most = pool->config.memory_limit;
    return fraction < (double)most ? (size_t)fraction : most;
}

/* What it may hold at most, though its device's other pools hold nothing. */
static size_t gai_pool_capacity(const galloc_pool *pool)
{
    size_t limit;
    gai_lock_on(&gai_budget_lock);
    limit = pool->budget->limit;
    gai_lock_off(&gai_budget_lock);
    return gai_min(gai_pool_share(pool), limit);
}

static size_t gai_left(size_t most, size_t held) { return most > held ? most - held : 0; }

/* The same for the budget lock held: what it may take now. */
static size_t gai_budget_left(const galloc_pool *pool)
{
    size_t own = gai_left(gai_pool_share(pool), pool->taken);
    return gai_min(own, gai_left(pool->budget->limit, pool->budget->held));
}

/* Bytes that the pool may get from the driver now, unless other pools of the device are faster. */
static size_t gai_pool_headroom(const galloc_pool *pool)
{
    size_t left;
    gai_lock_on(&gai_budget_lock);
    left = gai_budget_left(pool);
    gai_lock_off(&gai_budget_lock);
    return left;
}

/* To be called before the driver is asked for memory: takes it out of all limits at once. 0: they do not allow it. */
static int gai_budget_take(galloc_pool *pool, size_t bytes)
{
    int taken;
    gai_lock_on(&gai_budget_lock);
    taken = bytes <= gai_budget_left(pool);
    if (taken) pool->taken += bytes;
    if (taken) pool->budget->held += bytes;
    gai_lock_off(&gai_budget_lock);
    return taken;
}

/* To be called when the driver has the memory again, or would not give it. */
static void gai_budget_give(galloc_pool *pool, size_t bytes)
{
    gai_budget *budget = pool->budget;
    gai_lock_on(&gai_budget_lock);
    pool->taken -= bytes;
    budget->held -= bytes;
    budget->most = gai_max(budget->limit, gai_min(budget->most, budget->held));
    gai_lock_off(&gai_budget_lock);
}

/* The driver's pool holds so much: takes what is more than before. 0: the limits do not allow it. */
static int gai_budget_raise(galloc_pool *pool, size_t total)
{
    size_t more;
    int allowed;
    gai_lock_on(&gai_budget_lock);
    more = gai_left(total, pool->taken);
    allowed = more <= gai_budget_left(pool);
    if (allowed) pool->taken += more;
    if (allowed) pool->budget->held += more;
    gai_lock_off(&gai_budget_lock);
    return allowed;
}

/* What the pool holds is what it has taken, whatever the limits say. With the pool's lock held. */
static void gai_budget_settle(galloc_pool *pool)
{
    gai_budget *budget = pool->budget;
    gai_lock_on(&gai_budget_lock);
    budget->held += pool->stats.reserved.current - pool->taken;
    pool->taken = pool->stats.reserved.current;
    budget->most = gai_max(budget->most, budget->held);
    gai_lock_off(&gai_budget_lock);
}

/* The limit is the lowest of those that the pools name. With the budget lock held. */
static void gai_budget_set_limit(gai_budget *budget)
{
    const galloc_pool *pool;
    budget->limit = SIZE_MAX;
    for (pool = budget->pools; pool; pool = pool->next_sharing)
        budget->limit = gai_min(budget->limit, pool->config.device_limit);
    budget->most = gai_max(budget->limit, budget->held);
}

static void gai_budget_join(galloc_pool *pool)
{
    gai_lock_on(&gai_budget_lock);
    pool->next_sharing = pool->budget->pools;
    pool->budget->pools = pool;
    gai_budget_set_limit(pool->budget);
    gai_lock_off(&gai_budget_lock);
}

/* The pool behind `pool` in the list of the device's, or with NULL the first; the visit to `pool` ends. */
static galloc_pool *gai_budget_visit(gai_budget *budget, galloc_pool *pool)
{
    galloc_pool *next;
    gai_lock_on(&gai_budget_lock);
    next = pool ? pool->next_sharing : budget->pools;
    if (pool) pool->visitors--;
    if (next) next->visitors++;
    gai_lock_off(&gai_budget_lock);
    return next;
}

/* The same for the pools of all devices. */
static galloc_pool *gai_pool_visit(galloc_pool *pool)
{
    gai_budget *budget = pool ? pool->budget + 1 : gai_budgets;
    galloc_pool *next;
    gai_lock_on(&gai_budget_lock);
    next = pool ? pool->next_sharing : NULL;
    for (; !next && budget < gai_budgets + GAI_DEVICES; budget++) next = budget->pools;
    if (pool) pool->visitors--;
    if (next) next->visitors++;
    gai_lock_off(&gai_budget_lock);
    return next;
}

/* What the pool still had went with the driver. Visitors go before it does. */
static void gai_budget_leave(galloc_pool *pool)
{
    galloc_pool **at = &pool->budget->pools;
    unsigned round;
    gai_budget_give(pool, pool->taken);
    gai_lock_on(&gai_budget_lock);
    for (round = 0; pool->visitors; round++) {
        gai_lock_off(&gai_budget_lock);
        gai_latch_rest(round);
        gai_lock_on(&gai_budget_lock);
    }
    while (*at != pool) at = &(*at)->next_sharing;
    *at = pool->next_sharing;
    gai_budget_set_limit(pool->budget);
    gai_lock_off(&gai_budget_lock);
}

/* ==== STATISTICS ================================================================================================== */
/* >>statistics */

/* Owns pool->stats, guarded by the pool's lock; what stream caches count is added on request. */

static void gai_stat_add(galloc_stat *stat, size_t bytes)
{
    stat->current += bytes;
    stat->total += bytes;
    stat->peak = gai_max(stat->peak, stat->current);
}

/* What is cached follows from the other two. */
static void gai_stat_cached(galloc_pool *pool)
{
    galloc_stat *cached = &pool->stats.cached;
    size_t now = pool->stats.reserved.current - pool->stats.allocated.current;
    if (now > cached->current) cached->total += now - cached->current;
    cached->current = now;
    cached->peak = gai_max(cached->peak, now);
}

/* The place of pages of a size among galloc_stats.pages. Only blocks of other backends have less than 2 MiB. */
static int gai_page_class(size_t bytes)
{
    return (int)gai_min((size_t)gai_log2(bytes >> GAI_PAGE_LOG2 | 1), GALLOC_PAGE_SIZES - 1);
}

/* A page is held from now on. */
static void gai_stat_page(galloc_pool *pool, gai_page *page)
{
    galloc_pages *pages = &pool->stats.pages[gai_page_class(page->bytes)];
    if (page->counted) return;
    page->counted = 1;
    page->used = pool->clock + 1; /* no sample that was taken before says that it is old */
    pool->collector.created += page->bytes;
    pool->tuning.created++;
    pages->count++;
    pages->bytes += page->bytes;
    gai_stat_add(&pool->stats.reserved, page->bytes);
}

/* So many bytes of it are held no longer; `last`: the page is not. */
static void gai_stat_page_gone(galloc_pool *pool, const gai_page *page, size_t bytes, int last)
{
    galloc_pages *pages = &pool->stats.pages[gai_page_class(page->bytes)];
    gai_budget_give(pool, bytes);
    if (!page->counted) return;
    pages->count -= (size_t)last;
    pages->bytes -= bytes;
    pool->stats.reserved.current -= bytes;
}

static int gai_pool_is_async(const galloc_pool *pool)
{
    return pool->config.backend == GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
}

/* What the driver's pool holds beyond the blocks. It stands among the smallest pages, though nobody knows its sizes. */
static void gai_stat_kept(galloc_pool *pool, size_t kept)
{
    pool->stats.pages[0].bytes += kept - pool->kept;
    pool->stats.reserved.current += kept - pool->kept;
    pool->kept = kept;
}

/* The driver's pool holds so much. With all blocks and these bytes of one to come, it keeps the rest. */
static void gai_stat_held(galloc_pool *pool, size_t held, size_t coming)
{
    galloc_stat *reserved = &pool->stats.reserved;
    size_t before = reserved->current, blocks = before - pool->kept - pool->of_graphs + coming;
    gai_stat_kept(pool, held > blocks ? held - blocks : 0);
    if (reserved->current + coming > before) reserved->total += reserved->current + coming - before;
    reserved->peak = gai_max(reserved->peak, reserved->current + coming);
    reserved->total -= coming;
}

/* Adds what a stream cache knows and the counters do not: of its cache bins, and of what is fresh. */
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

/* Bytes that were asked for, in what is fresh. */
static size_t gai_unconfirmed_live(const gai_cache *cache)
{
    const gai_block *block;
    size_t live = 0;
    for (block = cache->unconfirmed; block; block = block->next_bin) live += (size_t)block->requested;
    for (block = cache->orphans; block; block = block->next_bin) live += (size_t)block->requested;
    return live;
}

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

/* While it lasts no stream cache changes, and what they say together is true. With the lock held. */
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

/* The counters, but for those of driver calls, with what the stream caches know. With the lock held, frozen. */
static void gai_stats_locked(const galloc_pool *pool, galloc_stats *stats)
{
    const gai_stream *stream;
    memcpy(stats, &pool->stats, offsetof(galloc_stats, driver));
    for (stream = pool->streams; stream; stream = stream->next) {
        const gai_cache *cache = &stream->cache;
        gai_cache_tell(cache, stats);
        gai_unconfirmed_tell(stats, cache->unconfirmed_blocks, cache->unconfirmed_bytes, gai_unconfirmed_live(cache));
    }
    stats->cached.current = stats->reserved.current - stats->allocated.current;
    gai_stat_peak(&stats->live);
    gai_stat_peak(&stats->allocated);
    gai_stat_peak(&stats->cached);
    gai_stat_peak(&stats->blocks);
}

static void gai_stats_now(galloc_pool *pool, galloc_stats *stats)
{
    gai_pool_lock_caches(pool);
    gai_stats_locked(pool, stats);
    gai_pool_unlock_caches(pool);
}

/* Bytes that the program has. */
static size_t gai_pool_live(galloc_pool *pool)
{
    const gai_stream *stream;
    size_t live = pool->stats.live.current;
    gai_pool_lock_caches(pool);
    for (stream = pool->streams; stream; stream = stream->next)
        live += stream->cache.live_in - stream->cache.live_out - gai_unconfirmed_live(&stream->cache);
    gai_pool_unlock_caches(pool);
    return live;
}

/* Notes new peaks. The counters alone say too much, what lies in stream caches being counted as used: so the stream
   caches are asked only when that would be a peak. */
static void gai_stat_peaks(galloc_pool *pool)
{
    galloc_stats now, *stats = &pool->stats;
    if (stats->live.current <= stats->live.peak && stats->allocated.current <= stats->allocated.peak &&
        stats->blocks.current <= stats->blocks.peak)
        return;
    gai_stats_now(pool, &now);
    stats->live.peak = now.live.peak;
    stats->allocated.peak = now.allocated.peak;
    stats->blocks.peak = now.blocks.peak;
    pool->live_peak = gai_max(pool->live_peak, now.live.current);
}

/* The counters for a block that becomes the program's (or, with grown bytes, is already). */
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

/* The longest run of parked pages: one plan makes a block of it. */
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

/* What is found by looking at the bins, the stream caches and parked pages instead of being counted along. With the
   lock held, frozen. */
static void gai_stats_derive(const galloc_pool *pool, galloc_stats *stats)
{
    const gai_stream *stream;
    const gai_block_pool *block_pool;
    stats->free_bytes = pool->common.bytes + pool->mixed.bytes + pool->parked + pool->kept;
    stats->largest_free = gai_max(gai_set_largest(&pool->common), gai_set_largest(&pool->mixed));
    stats->largest_free = gai_max(stats->largest_free, pool->kept); /* the driver does not say */
    stats->largest_free = gai_max(stats->largest_free, gai_pool_largest_parked(pool));
    for (stream = pool->streams; stream; stream = stream->next) {
        stats->free_bytes += stream->free.bytes + stream->cache.bytes + stream->cache.unconfirmed_bytes;
        stats->largest_free = gai_max(stats->largest_free, gai_set_largest(&stream->free));
        stats->largest_free = gai_max(stats->largest_free, gai_cache_largest(&stream->cache));
    }
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        stats->free_bytes += block_pool->free.bytes;
        stats->largest_free = gai_max(stats->largest_free, gai_set_largest(&block_pool->free));
    }
    stats->external_fragmentation = 0;
    if (stats->free_bytes) stats->external_fragmentation = 1 - (double)stats->largest_free / (double)stats->free_bytes;
    stats->internal_fragmentation = 1;
    if (stats->live.current)
        stats->internal_fragmentation = (double)stats->allocated.current / (double)stats->live.current;
}

/* ==== TAKE ======================================================================================================== */
/* >>take */

/* Cuts a free block to a request and gives it to the program; takes a used block back from it. Guarded by the
   pool's lock, a used block's `held` by the latch of a stream cache. Calls blocks, marks, statistics. */

/* Would what is left of a block of the set, once filed, be a block of the set again? */
static int gai_block_stays(galloc_pool *pool, const gai_block *rest, const gai_set *set)
{
    const gai_mark *mark = rest->marks;
    if (mark && (mark->stream != set->stream || mark->next || gai_mark_is_complete(mark))) return 0;
    return (mark || set == &pool->common) && !gai_block_partner(pool, rest, 0);
}

/* Puts the rest in the place of a block that is in no bin any more, in the order of age. */
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

/* Is what a free block has behind `cut` of the same set as all of it? */
static GAI_INLINE int gai_block_is_even(const galloc_pool *pool, const gai_block *block, uintptr_t cut)
{
    const gai_mark *mark = block->marks;
    if (!mark) return block->set == &pool->common;
    return mark->stream == block->set->stream && !mark->next && mark->end > cut && !gai_mark_is_complete(mark);
}

/* Cuts off the beginning of a free block whose rest stays in the set: the rest keeps the descriptor, and with it the
   place in the order of age and in memory that the host has at hand. What is cut off has no marks yet. */
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

/* The same with its marks. */
static gai_block *gai_block_cut_off_marked(galloc_pool *pool, gai_block *rest, size_t bytes)
{
    gai_block *block = gai_block_cut_off(pool, rest, bytes);
    gai_mark *mark = rest->marks;
    if (mark && mark->begin < rest->addr) {
        block->marks = gai_mark_new(pool, mark->stream, mark->epoch, mark->begin, rest->addr);
        mark->begin = rest->addr;
    }
    return block;
}

/* Cuts [at, at + bytes) out of a free block; what is left of it stays free. The caller has made sure of what it
   takes. */
static gai_block *gai_block_cut_out(galloc_pool *pool, gai_block *block, uintptr_t at, size_t bytes,
                                    enum gai_kind kind)
{
    gai_block *before = NULL, *after = NULL, *whole = block;
    gai_set *set = block->set;
    if (kind == GAI_USED && at == block->addr && bytes < block->bytes && gai_block_is_even(pool, block, at + bytes) &&
        !gai_block_meets(pool, block->next, set, 0)) /* what has just been mapped may not have merged yet */
        return gai_block_cut_off_marked(pool, block, bytes);
    if (set->counted) gai_torch_count_out(set, block);
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

/* A block that a captured stream is given is the graph's from then on, on whatever stream it is freed. Its marks change
   while the program has it, should a group be released: no call may look at them without the lock. */
static void gai_block_mark_captured(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    block->tag |= GAI_SPECIAL;
    gai_marks_add(pool, &block->marks,
                  gai_mark_new(pool, stream, stream->epoch, block->addr, block->addr + block->bytes));
}

/* Counts a block that the stream state is given. */
static void gai_stream_give(galloc_pool *pool, gai_stream *stream, gai_block *block)
{
    block->stream_id = stream->stream_id;
    block->life = stream->life;
    if (!stream->blocks) gai_set_relaxed(&stream->busy_frees, 0);
    gai_set_relaxed(&stream->blocks, stream->blocks + 1);
    if (stream->capture && !block->segment->of_graph) gai_block_mark_captured(pool, block, stream);
}

/* The same as marking it, as it is now: what it has grown by may have brought marks of the same stream along, and so
   may what it has shrunk by. One stands for all of them. */
static void gai_block_renew_captured(galloc_pool *pool, gai_block *block)
{
    gai_mark **at = &block->marks, *own = NULL;
    if (!block->stream || !block->stream->capture) return;
    while (*at) {
        gai_mark *mark = *at;
        if (mark->stream != block->stream || !own) {
            if (mark->stream == block->stream) own = mark;
            at = &mark->next;
        } else {
            *at = mark->next;
            gai_mark_end(pool, mark);
        }
    }
    if (!own) return;
    own->begin = block->addr;
    own->end = block->addr + block->bytes;
    own->epoch = block->stream->epoch;
}

/* What the stream state did with a block that it is given anew comes before all that it will do. Its own mark is of use
   again only if another stream frees the block: then one is made, with the same stamp. (Of a block from a stream cache
   the stamp is not known, and it is that of now; a stream that does not come again may never have an event for it.) */
static GAI_INLINE void gai_stream_drops(gai_stream *stream, const gai_mark *mark)
{
    if (mark->epoch > stream->handed) stream->handed = mark->epoch;
}

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

/* The same for a used block that has just been cut out. */
static GAI_INLINE void gai_block_assign(galloc_pool *pool, gai_block *block, gai_stream *stream, size_t requested,
                                        uint64_t tag)
{
    pool->marks.promised += GAI_FREE_MARKS;
    block->requested = requested;
    block->tag = tag;
    block->stream_id = block->life = 0;
    block->stream = stream;
    if (!stream) return;
    gai_block_drop_own(pool, block, stream);
    gai_stream_give(pool, stream, block);
}

/* Gives bytes of a free block to the program. Marks of others stay on it: they are what a third stream must honour
   should the block be freed on another stream than the one it is given to. NULL: no host memory, nothing changed. */
static gai_block *gai_block_take(galloc_pool *pool, gai_block *block, uintptr_t at, const gai_params *params)
{
    if (!gai_block_need(pool, block, at, params->bytes)) return NULL;
    block = gai_block_cut_out(pool, block, at, params->bytes, GAI_USED);
    block->room = params->growable ? params->bytes : 0;
    gai_block_assign(pool, block, params->stream, params->requested,
                     params->growable ? params->tag | GAI_SPECIAL : params->tag);
    return block;
}

/* The same for the beginning of a block that a search has found, which has merged with all that it can: so has its
   rest. For a stream state that is not captured, without room. Of what is cut off the stream state's own mark is
   dropped at once. */
static GAI_INLINE gai_block *gai_block_take_first(galloc_pool *pool, gai_block *block, size_t bytes, gai_stream *stream,
                                                  size_t requested, uint64_t tag)
{
    uintptr_t cut = block->addr + bytes;
    gai_mark *mark = block->marks;
    if (!gai_block_need(pool, block, block->addr, bytes)) return NULL;
    if (bytes < block->bytes && (!mark || mark->stream == stream) && gai_block_is_even(pool, block, cut)) {
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

/* The block is no longer the program's, and in no set yet. */
static void gai_block_untake(galloc_pool *pool, gai_block *block)
{
    block->requested = 0;
    block->tag = 0;
    block->room = 0;
    pool->marks.promised -= GAI_FREE_MARKS;
    if (block->stream) gai_set_relaxed(&block->stream->blocks, block->stream->blocks - 1);
    block->stream = NULL;
    block->kind = GAI_BUSY;
}

/* The block that the program holds and that starts at an address, or NULL. With the lock held. */
static gai_block *gai_block_used(galloc_pool *pool, const void *ptr)
{
    gai_block *block = gai_block_at((uintptr_t)ptr);
    if (!block || gai_load_pointer(&block->pool) != pool || !gai_load_pointer(&block->held)) return NULL;
    return block->addr == (uintptr_t)ptr ? block : NULL;
}

/* Takes it from the program: no other call can have it until it is let go or given out again. */
static int gai_block_acquire(gai_block *block, const void *ptr)
{
    gai_stream *guard = (gai_stream *)gai_load_pointer(&block->held);
    int had;
    if (!guard) return 0;
    gai_latch_on(&guard->cache.latch);
    had = gai_load_pointer(&block->held) == guard && block->addr == (uintptr_t)ptr;
    if (had) gai_store_pointer(&block->held, NULL);
    gai_latch_off(&guard->cache.latch);
    return had;
}

static gai_block *gai_block_claim(galloc_pool *pool, const void *ptr)
{
    gai_block *block = gai_block_at((uintptr_t)ptr);
    if (!block || gai_load_pointer(&block->pool) != pool) return NULL;
    return gai_block_acquire(block, ptr) ? block : NULL;
}

/* The program has it from now on, or again. */
static void gai_block_let_go(gai_block *block) { gai_store_pointer(&block->held, block->stream); }

/* The block is claimed. */
static void gai_block_set_requested(galloc_pool *pool, gai_block *block, size_t bytes)
{
    size_t before = (size_t)block->requested;
    gai_set_relaxed(&block->requested, bytes);
    pool->stats.live.current += bytes - before;
    if (bytes > before) pool->stats.live.total += bytes - before;
    gai_stat_peaks(pool);
}

/* ==== STREAM CACHE ================================================================================================ */
/* >>streamcache */

/* Freed on a stream before an event is recorded for it, and at least this part of the heap: bounds what a stream that
   dies unannounced leaves unmarked, and the events recorded. Finer marks saved no memory (docs/design.md). */
#define GAI_MARK_BYTES (2 * GAI_MIB)
#define GAI_MARK_PART 128 /* of the heap may be freed by streams that never come again, all together */
#define GAI_MARK_FREES 64 /* since it last held nothing, before a stream that holds nothing more is marked */
#define GAI_EVENTS 128

/* What a stream cache holds does not merge, so large blocks do not go there unless lane_bytes says so: on the ten
   traces blocks of 2 MiB and more would cost 0.2 to 1 % of memory. */
#define GAI_CACHE_BLOCKS 256
#define GAI_CACHE_BYTES GAI_MIB /* lane_bytes by default, */
#define GAI_CACHE_MOST (64 * GAI_MIB) /* and at most */
#define GAI_UNCONFIRMED_BLOCKS 64
#define GAI_CACHE_BIN_PROBES 4      /* neighbouring cache bins that a size may be on */

static int gai_pool_has_one_stream(const galloc_pool *pool) { return !pool->streams || !pool->streams->next; }

static int gai_stream_is_unknown(const gai_stream *stream) { return stream->capture_id == GAI_UNKNOWN_STREAMS; }

/* ---- without the pool's lock ---- */

static size_t gai_cache_bin_of(size_t bytes)
{
    return (size_t)((uint64_t)(bytes >> GAI_UNIT_LOG2) * 0x9e3779b97f4a7c15u >> (64 - GAI_CACHE_BINS_LOG2));
}

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

static gai_block *gai_cache_bin_pop(gai_cache *cache, size_t bytes)
{
    size_t at = gai_cache_bin_of(bytes), probes;
    for (probes = 0; probes < GAI_CACHE_BIN_PROBES; probes++, at = (at + 1) % GAI_CACHE_BINS) {
        gai_cache_bin *bin = &cache->bins[at];
        gai_block *block = bin->first;
        if (!(cache->filled >> at & 1) || bin->bytes != bytes) continue;
        bin->first = block->next_bin;
        if (!bin->first) cache->filled ^= (uint64_t)1 << at;
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
    cache->unconfirmed_blocks--;
    cache->unconfirmed_bytes -= block->bytes;
    return block;
}

/* Somebody has asked for the id: what is fresh belongs on the cache bins, the oldest first. What finds no place there
   stays as it was. */
static void gai_cache_confirm(gai_cache *cache)
{
    gai_block *list[2] = {NULL, NULL};
    int i;
    list[0] = cache->unconfirmed;
    list[1] = cache->orphans;
    cache->unconfirmed = cache->orphans = NULL;
    cache->unconfirmed_blocks = cache->unconfirmed_bytes = 0;
    for (i = 1; i >= 0; i--) {
        gai_block *turned = NULL;
        while (list[i]) {
            gai_block *next = list[i]->next_bin;
            list[i]->next_bin = turned;
            turned = list[i];
            list[i] = next;
        }
        while (turned) {
            gai_block *next = turned->next_bin;
            if (!gai_cache_bin_push(cache, turned)) gai_unconfirmed_push(cache, turned);
            turned = next;
        }
    }
}

GAI_APART
static gai_block *gai_cache_search(gai_cache *cache, size_t bytes)
{
    if (cache->unconfirmed_blocks) gai_cache_confirm(cache);
    return gai_cache_bin_pop(cache, bytes);
}

/* What a stream cache that has no block for a call is like. */
enum gai_cache_state { GAI_SHUT, GAI_OPEN, GAI_EMPTY };

/* It holds nothing, and has nothing to tell but its run of frees: for a call to see all that is free it need not be
   emptied. */
static GAI_INLINE int gai_cache_is_empty(const gai_cache *cache)
{
    return !(cache->unconfirmed_blocks | cache->blocks | cache->mallocs);
}

/* The last block of this size to come, which becomes the program's. NULL: there is none, and *state says why. The
   stream cache is open, its latch held, and the caller vouches. */
static GAI_INLINE gai_block *gai_cache_pop(gai_cache *cache, size_t bytes, size_t requested, uint32_t tag,
                                           enum gai_cache_state *state)
{
    gai_block *block = NULL;
    if (cache->unconfirmed && cache->unconfirmed->bytes == bytes) {
        block = gai_unconfirmed_pop(cache, &cache->unconfirmed);
        cache->live_out += (size_t)block->requested;
    } else if (cache->unconfirmed_blocks > 1 || cache->filled) { /* the last one did not fit: is there any other? */
        block = gai_cache_search(cache, bytes);
    }
    if (block) {
        cache->mallocs++;
        cache->live_in += requested;
        cache->allocated_in += bytes;
        gai_set_relaxed(&block->requested, requested);
        gai_set_relaxed(&block->tag, GAI_CACHED | tag);
    } else {
        *state = gai_cache_is_empty(cache) ? GAI_EMPTY : GAI_OPEN;
    }
    return block;
}

/* The same for a stream cache that may be shut. */
static GAI_INLINE gai_block *gai_cache_take(gai_cache *cache, uint64_t life, size_t bytes, size_t requested,
                                            uint32_t tag, enum gai_cache_state *state)
{
    gai_block *block = NULL;
    gai_latch_on(&cache->latch);
    if (cache->open == life) block = gai_cache_pop(cache, bytes, requested, tag, state);
    gai_latch_off(&cache->latch);
    return block;
}

/* What calls that know their stream state come to. */
enum gai_outcome {
    GAI_DONE,  /* served */
    GAI_FOREIGN, /* the block is guarded by another stream state's latch, or is not the program's */
    GAI_ASK,   /* the stream cache would take it from who has asked for the stream's id */
    GAI_TAKEN, /* the pool must do it; the block has been taken from the program already */
    GAI_TAKEN_EMPTY, /* the same, and the stream cache was found bare */
    GAI_KNOWN, /* the pool must do it; the stream has been looked at */
    GAI_KNOWN_EMPTY, /* the same, and the stream cache was found bare */
    GAI_LONG   /* from the beginning */
};

/* The stream cache is open. */
GAI_APART
static enum gai_outcome gai_cache_put_more(gai_cache *cache, gai_block *block, int confirmed)
{
    size_t held = cache->bytes + cache->unconfirmed_bytes;
    if (block->bytes > cache->most - held || held > cache->enough ||
        cache->blocks + cache->unconfirmed_blocks >= GAI_CACHE_BLOCKS)
        return gai_cache_is_empty(cache) ? GAI_TAKEN_EMPTY : GAI_TAKEN;
    if (cache->unconfirmed_blocks < GAI_UNCONFIRMED_BLOCKS &&
        (cache->trusted || cache->unconfirmed_bytes + block->bytes <= GAI_MARK_BYTES)) {
        gai_unconfirmed_push(cache, block);
        return GAI_DONE;
    }
    if (!cache->trusted && !confirmed) return GAI_ASK;
    gai_cache_confirm(cache);
    return gai_cache_bin_push(cache, block) ? GAI_DONE : GAI_TAKEN;
}

/* Is a block that is freed the last that the stream state holds, so that the pool is to see it? */
static GAI_INLINE int gai_cache_shows(gai_cache *cache, const gai_stream *stream, const gai_block *block)
{
    if (cache->blocks + cache->unconfirmed_blocks + 1 != gai_counted(&stream->blocks) || block->stream != stream)
        return 0;
    if (cache->busy_frees + gai_counted(&stream->busy_frees) >= GAI_MARK_FREES) return 1;
    cache->busy_frees = 0 - gai_counted(&stream->busy_frees); /* together nothing */
    return 0;
}

/* May the stream's cache have a block that was freed on its stream, and give it out again with nothing looked at? What
   was given to this very stream state, yes: it comes after all its marks. */
static GAI_INLINE int gai_block_suits(const gai_block *block, uint64_t life)
{
    return block->life == life && !(block->tag & GAI_SPECIAL);
}

/* Takes a block from the program and puts it into the stream's cache, or with GAI_TAKEN, or GAI_TAKEN_EMPTY, leaves it
   to the pool. Else it stays the program's: with GAI_LONG the stream cache is shut. */
static GAI_INLINE enum gai_outcome gai_cache_put(gai_stream *stream, uint64_t life, gai_block *block, const void *ptr,
                                                 int confirmed)
{
    gai_cache *cache = &stream->cache;
    enum gai_outcome outcome = GAI_LONG;
    gai_latch_on(&cache->latch);
    if (gai_load_pointer(&block->held) != stream || block->addr != (uintptr_t)ptr) {
        outcome = GAI_FOREIGN;
    } else if (cache->open == life) {
        if (!gai_block_suits(block, life) || gai_cache_shows(cache, stream, block)) {
            outcome = GAI_TAKEN;
        } else if (!cache->unconfirmed_blocks && !cache->blocks &&
                   block->bytes <= cache->alone) { /* mostly after a pair */
            gai_unconfirmed_push(cache, block);
            outcome = GAI_DONE;
        } else {
            outcome = gai_cache_put_more(cache, block, confirmed);
        }
        if (outcome != GAI_ASK) gai_store_pointer(&block->held, NULL);
        cache->busy_frees += outcome == GAI_DONE;
    }
    gai_latch_off(&cache->latch);
    return outcome;
}

/* ---- with it ---- */

/* Frees made now on the stream state's stream are stamped with this. A retired stream has had its last event. */
static uint64_t gai_stream_stamp(const gai_stream *stream)
{
    return stream->retired ? stream->epoch - 1 : stream->epoch;
}

/* Drops the marks that a free on `stream` stands for as well: complete ones, earlier ones of the same stream, those
   that it waits for already. What it does not stand for stays: that block was given to another stream and not used
   there. */
static void gai_block_inherit(galloc_pool *pool, gai_block *block, const gai_stream *stream)
{
    gai_mark **at = &block->marks;
    while (*at) {
        gai_mark *mark = *at;
        if (gai_mark_is_complete(mark) || mark->stream == stream ||
            gai_stream_waited(stream, mark->stream) >= mark->epoch) {
            *at = mark->next;
            gai_mark_end(pool, mark);
        } else {
            at = &mark->next;
        }
    }
}

/* Stamps [begin, end) as freed on the stream of the mark's stream state. */
static GAI_INLINE void gai_mark_stamp(gai_mark *mark, uintptr_t begin, uintptr_t end)
{
    gai_stream *stream = mark->stream;
    stream->uses++;
    mark->epoch = stream->freed = gai_stream_stamp(stream);
    mark->begin = begin;
    mark->end = end;
    stream->unmarked += end - begin;
}

/* A mark for the free of a used block, to which it was promised. It names the stream state, and nothing else yet. */
static gai_mark *gai_mark_promised(galloc_pool *pool, gai_stream *stream)
{
    gai_mark *mark = (gai_mark *)gai_slab_take(&pool->marks);
    mark->next = NULL;
    mark->stream = stream;
    return mark;
}

/* Stamps a used block without marks as freed on the stream state's stream. */
static GAI_INLINE void gai_block_stamp_own(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    block->marks = gai_mark_promised(pool, stream);
    gai_mark_stamp(block->marks, block->addr, block->addr + block->bytes);
}

/* Stamps a list of marks that name stream states and nothing else, and adds them to the block's. */
static void gai_block_stamp(galloc_pool *pool, gai_block *block, gai_mark *marks)
{
    while (marks) {
        gai_mark *mark = marks, *own = block->marks;
        marks = mark->next;
        if (own && !own->next && own->stream == mark->stream) { /* mostly: it is stamped anew */
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

/* The page that is mapped at an address, or NULL. */
static GAI_INLINE gai_mapping *gai_page_at(uintptr_t addr)
{
    void **child = gai_map_entry_at(&gai_page_map, addr);
    return child ? (gai_mapping *)gai_load_pointer(child) : NULL;
}

/* The block's pages have been in use until now. */
static void gai_block_touch(const galloc_pool *pool, const gai_block *block)
{
    uintptr_t at = block->addr, end = block->addr + block->bytes;
    while (at < end) {
        gai_mapping *mapping = gai_page_at(at);
        mapping->page->used = pool->clock;
        at = mapping->addr + mapping->bytes;
    }
}

/* To the free blocks, or, where the memory itself is lost, to nowhere. */
static void gai_block_give(galloc_pool *pool, gai_block *block)
{
    block->age = ++pool->clock;
    block->kind = GAI_BUSY;
    if (!block->segment->lost) {
        if (pool->collects) gai_block_touch(pool, block);
        (void)gai_block_file(pool, block, 0);
        return;
    }
    gai_stat_page_gone(pool, block->segment->whole->page, block->bytes, 0);
    gai_stat_cached(pool);
}

/* ---- what other stream caches would have served ---- */

#define GAI_TUNE_WINDOW 4096 /* misses that are watched at a time */
#define GAI_TUNE_REST (128 * GAI_TUNE_WINDOW)
#define GAI_TUNE_STEPS 8     /* between two powers of two, when rounding is set */
#define GAI_TUNE_SMALL (2 * GAI_MIB) /* smaller sizes may be rounded */

/* Where a size is, or could be; GAI_CACHE_BINS: nowhere. */
static size_t gai_ghost_place(const gai_ghost *ghost, size_t bytes, int empty)
{
    size_t at = gai_cache_bin_of(bytes), probes;
    for (probes = 0; probes < GAI_CACHE_BIN_PROBES; probes++, at = (at + 1) % GAI_CACHE_BINS)
        if (ghost->filled >> at & 1 ? ghost->sizes[at] == bytes : empty) return at;
    return GAI_CACHE_BINS;
}

static void gai_ghost_put(gai_ghost *ghost, size_t bytes)
{
    size_t at = gai_ghost_place(ghost, bytes, 1);
    if (at == GAI_CACHE_BINS || ghost->blocks == GAI_CACHE_BLOCKS || ghost->bytes + bytes > GAI_CACHE_MOST) return;
    if (!(ghost->filled >> at & 1)) ghost->counts[at] = 0;
    ghost->filled |= (uint64_t)1 << at;
    ghost->sizes[at] = bytes;
    ghost->counts[at]++;
    ghost->blocks++;
    ghost->bytes += bytes;
    ghost->most = gai_max(ghost->most, ghost->bytes);
}

/* A stream cache that has not the size is emptied. */
static void gai_ghost_take(gai_ghost *ghost, size_t bytes)
{
    size_t at = gai_ghost_place(ghost, bytes, 0);
    if (at == GAI_CACHE_BINS) {
        ghost->filled = 0;
        ghost->blocks = ghost->bytes = 0;
        return;
    }
    if (!--ghost->counts[at]) ghost->filled ^= (uint64_t)1 << at;
    ghost->blocks--;
    ghost->bytes -= bytes;
    ghost->hits++;
}

static size_t gai_block_alike(const gai_block *block)
{
    size_t bytes = (size_t)block->requested;
    return bytes < GAI_TUNE_SMALL ? gai_max(gai_up_by_steps(bytes, GAI_TUNE_STEPS), block->bytes) : block->bytes;
}

/* A used block of the stream state that is watched comes back to the pool. */
GAI_APART
static void gai_pool_watch_free(galloc_pool *pool, const gai_block *block)
{
    if (block->life != pool->tuning.life || pool->clock < pool->tuning.rest || block->tag & GAI_SPECIAL) return;
    gai_ghost_put(&pool->tuning.same, block->bytes);
    gai_ghost_put(&pool->tuning.alike, gai_block_alike(block));
}

static void gai_tune_anew(gai_tuning *tuning)
{
    memset(&tuning->same, 0, sizeof tuning->same);
    memset(&tuning->alike, 0, sizeof tuning->alike);
    tuning->life = 0;
    tuning->watched = tuning->passed = 0;
}

/* Nothing came of it: the next time is later. */
static void gai_tune_rest(const galloc_pool *pool, gai_tuning *tuning)
{
    tuning->patience = tuning->patience ? 2 * gai_min(tuning->patience, GAI_TUNE_REST) : GAI_TUNE_WINDOW;
    tuning->rest = pool->clock + tuning->patience;
}

/* A block is given out that no stream cache had. After so many the next call that misses goes the long way, where it is
   seen what to make of it. */
GAI_APART
static void gai_pool_watch_given(galloc_pool *pool, const gai_block *block)
{
    gai_tuning *tuning = &pool->tuning;
    if (pool->clock < tuning->rest) return;
    if (!tuning->life) tuning->life = block->life;
    tuning->passed++;
    if (block->life == tuning->life) {
        gai_ghost_take(&tuning->same, block->bytes);
        gai_ghost_take(&tuning->alike, gai_block_alike(block));
        tuning->watched++;
    }
    if (tuning->watched >= GAI_TUNE_WINDOW) pool->special |= GAI_ROUTE_TUNE;
    else if (tuning->passed >= 4 * GAI_TUNE_WINDOW) gai_tune_anew(tuning);
}

/* ---- back to the pool ---- */

static gai_stream *gai_stream_of_life(const galloc_pool *pool, uint64_t life)
{
    gai_stream *stream = pool->streams;
    while (stream && stream->life != life) stream = stream->next;
    return stream;
}

/* How much the stream cache may hold: once a second stream is in play what it holds counts as unmarked, except on
   legacy, where nothing is recorded unless somebody asks. */
static GAI_INLINE size_t gai_cache_bound(const galloc_pool *pool, const gai_stream *stream)
{
    if (gai_pool_has_one_stream(pool) || (stream->handle == CU_STREAM_LEGACY && !stream->wanted))
        return gai_min(pool->device_bytes / 256, (size_t)pool->tuning.lane_bytes);
    if (!pool->tuning.lane_bytes) return 0;
    return GAI_MARK_BYTES - gai_min(stream->unmarked + 1, GAI_MARK_BYTES);
}

GAI_APART
static void gai_cache_change(const galloc_pool *pool, gai_stream *stream, uint64_t open, size_t most)
{
    gai_cache *cache = &stream->cache;
    gai_latch_on(&cache->latch);
    cache->open = open;
    cache->most = gai_max(most, cache->bytes + cache->unconfirmed_bytes);
    cache->enough = (size_t)pool->tuning.lane_bytes;
    cache->trusted = !pool->config.stream_check || gai_is_default_stream(stream->handle);
    cache->alone = cache->trusted ? most : gai_min(most, GAI_MARK_BYTES);
    gai_latch_off(&cache->latch);
}

/* Opens the stream cache for calls that do not come to the pool, or shuts it. */
static GAI_INLINE void gai_cache_set(const galloc_pool *pool, gai_stream *stream)
{
    int shut = pool->driver_gone | pool->lost | pool->unfronted | stream->retired | stream->asked;
    uint64_t open = shut || pool->broken ? 0 : stream->life;
    size_t most = gai_cache_bound(pool, stream);
    if (stream->cache.open != open || stream->cache.most != most) gai_cache_change(pool, stream, open, most);
}

/* A block that went out to its own stream again has no mark for the free before: calls on the same stream need
   none. Freed on another stream, which may be in no order to it, it gets one now: it says more than is needed. A stream
   state that is forgotten has nothing left to wait for. */
static void gai_block_stamp_cache(galloc_pool *pool, gai_block *block)
{
    gai_stream *stream = gai_stream_of_life(pool, block->life);
    gai_mark *mark;
    if (!stream || (block->tag & GAI_DROPPED && block->age <= stream->done)) return;
    mark = gai_mark_promised(pool, stream);
    if (block->tag & GAI_DROPPED) {
        stream->uses++;
        mark->epoch = block->age;
        mark->begin = block->addr;
        mark->end = block->addr + block->bytes;
        gai_marks_add(pool, &block->marks, mark);
        return;
    }
    gai_block_stamp(pool, block, mark);
    gai_cache_set(pool, stream); /* there is more unmarked */
}

/* A block of a stream cache becomes free like any other. It is stamped with the stream state's epoch of now: that is
   later than the free was, so it asks for more than is needed, never for less. */
static void gai_block_uncache(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    if (block->marks) gai_block_stamp(pool, block, gai_mark_promised(pool, stream));
    else gai_block_stamp_own(pool, block, stream);
    if (pool->tuning.watching) gai_pool_watch_free(pool, block);
    gai_block_untake(pool, block);
    gai_block_give(pool, block);
}

/* Puts a list before another. */
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

/* Empties the stream cache into the bins, where its blocks merge and are anybody's as far as their marks go. What is
   fresh only if the call has been given the stream and asked for its id. Returns whether there was anything. */
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
        cache->unconfirmed_blocks = cache->unconfirmed_bytes = 0;
    }
    if (cache->busy_frees) gai_set_relaxed(&stream->busy_frees, stream->busy_frees + cache->busy_frees);
    cache->busy_frees = 0;
    if (cache->mallocs || cache->blocks) {
        gai_cache_tell(cache, &pool->stats);
        if (cache->mallocs) stream->handed = gai_stream_stamp(stream);
        cache->mallocs = 0;
        cache->live_in = cache->live_out = cache->allocated_in = 0;
        cache->blocks = cache->bytes = 0;
    }
    for (; cache->filled; cache->filled &= cache->filled - 1)
        list = gai_blocks_join(cache->bins[gai_lowest(cache->filled)].first, list);
    gai_latch_off(&cache->latch);
    while (list) {
        gai_block *block = list;
        list = block->next_bin;
        gai_block_uncache(pool, block, stream);
    }
    return 1;
}

/* Before all devices are waited for: what is fresh now will have been done with then, on whatever stream it was freed.
   Returns whether there is any. */
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

/* After: they need no mark. */
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

static void gai_pool_flush(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) (void)gai_stream_flush(pool, stream, 0);
}

/* Nothing may be given out any more that the pool has not looked at. */
static void gai_pool_shut_caches(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) gai_cache_shut(&stream->cache);
}

/* ==== CAPTURE =================================================================================================== */
/* >>capture */

/* ---- the order that is captured ---- */

#define GAI_WALK 512       /* nodes that are found at most, from a stream's present end backwards: the nearest */
#define GAI_WALK_WIDTH 64  /* of those right before a node */
#define GAI_WALK_INDEX 1024

/* Nodes that everything comes after which is captured on a stream from now on. */
typedef struct gai_walk {
    size_t n;
    int partial; /* there may be others: what could not be had, or is too far away */
    CUgraphNode nodes[GAI_WALK];
    unsigned short index[GAI_WALK_INDEX]; /* 1 + a node's place in `nodes`, where its hash says or after it; 0: none */
} gai_walk;

/* Where the index has the node, or would have it. */
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

/* Where the stream is now. */
static void gai_walk_begin(gai_walk *walk, CUstream stream, unsigned long long capture)
{
    CUgraphNode nodes[GAI_WALK_WIDTH];
    size_t n;
    memset(walk, 0, sizeof *walk);
    walk->partial = !gai_capture_nodes(stream, capture, nodes, &n, GAI_WALK_WIDTH);
    if (!walk->partial) gai_walk_add(walk, nodes, n);
}

/* What comes right before the node at `at`. */
static void gai_walk_on(gai_walk *walk, size_t at)
{
    CUgraphNode nodes[GAI_WALK_WIDTH];
    size_t n = GAI_WALK_WIDTH;
    CUresult result = gai_cu.GraphNodeGetDependencies(walk->nodes[at], nodes, GAI_NO_EDGES &n);
    walk->partial |= result || n >= GAI_WALK_WIDTH;
    if (!result) gai_walk_add(walk, nodes, gai_min(n, GAI_WALK_WIDTH));
}

static int gai_walk_covers(const gai_walk *walk, const gai_position *position)
{
    size_t i = 0;
    while (i < position->n && walk->index[gai_walk_find(walk, position->nodes[i])]) i++;
    return i == position->n;
}

/* 0: the stream does not come after the position. Where that cannot be found out it is taken to do so. */
static int gai_walk_reaches(gai_walk *walk, const gai_position *position)
{
    size_t at = 0;
    while (!gai_walk_covers(walk, position)) {
        if (at == walk->n) return walk->partial;
        gai_walk_on(walk, at++);
    }
    return 1;
}

/* ---- captures ---- */

/* Gives up one of the two shares in a capture. */
static void gai_capture_drop(gai_capture *capture)
{
    if (gai_swap(&capture->owners, 2, 1)) return;
    (void)gai_load(&capture->owners); /* what the other one did with it is done */
    GALLOC_FREE(capture);
}

/* Called by CUDA when the graph, its instances and their launches are gone, in any thread, perhaps with locks of the
   driver's or the pool's held: so it takes none, and calls nothing of CUDA. */
static void CUDAAPI gai_capture_ends(void *capture) { gai_capture_drop((gai_capture *)capture); }

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

/* Gives the graph that is being captured a share in the capture, to be given up at its end. In a scope. */
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
    if (result) (void)gai_cu.UserObjectRelease(object, 1); /* that is the end of its share */
    return result;
}

/* A new capture in which the graph has its share; NULL: site->refused says why, or there is no host memory. */
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

/* The n-th group that captures are put into now, or NULL. */
static galloc_graph *gai_graph_begun(galloc_pool *pool, size_t n)
{
    galloc_graph *graph;
    gai_lock_on(&pool->lock);
    for (graph = pool->graphs; graph; graph = graph->next)
        if (graph->captured && !n--) break;
    gai_lock_off(&pool->lock);
    return graph;
}

/* Is the stream of a group, which lives as long as captures of it are the group's, part of the site's capture? The
   handle of another thread's default stream means another stream here. */
static int gai_graph_has(const galloc_graph *graph, const gai_site *site)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    if (graph->key == site->stream_id) return 1;
    if (graph->captured == CU_STREAM_PER_THREAD && graph->key != gai_stream_key(graph->captured)) return 0;
    return !gai_capture_of(graph->captured, &status, &id, NULL) && id == site->capture;
}

/* Notes a capture that the pool has not seen before, and to which group it belongs. Two threads may note the same one:
   then both notes end with its graph. While `marking` is held no group begins or ends, so that their streams live.
   A capture cannot wait for the device: streams that have left marks out make up for it. */
static void gai_pool_note_capture(galloc_pool *pool, gai_site *site)
{
    gai_capture *capture = gai_capture_new(site);
    galloc_graph *graph;
    gai_stream *stream;
    size_t n = 0;
    if (!capture) return;
    gai_lock_on(&pool->marking);
    while ((graph = gai_graph_begun(pool, n)) != NULL && !gai_graph_has(graph, site)) n++;
    gai_lock_on(&pool->lock);
    capture->graph = graph;
    capture->next = pool->captures;
    pool->captures = capture;
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->passed) gai_stream_ask(stream);
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->marking);
}

static void gai_stream_forget_positions(galloc_pool *pool, gai_stream *stream)
{
    while (stream->positions) {
        gai_position *position = stream->positions;
        stream->positions = position->older;
        gai_slab_give(&pool->positions, position);
    }
}

/* Another stream state has come to a home, or its stream state's capture is gone: what was kept from it for the sake of
   stream states that this one is ordered with comes back, and what others use that it is not ordered with goes. Lock
   held. */
static void gai_block_pool_sort(galloc_pool *pool, gai_block_pool *block_pool)
{
    gai_block *block = block_pool->free.oldest, *newer;
    while (block) {
        newer = block->newer;
        if (gai_block_pool_set(pool, block) == &pool->mixed) {
            gai_set_remove(block);
            if (gai_block_file(pool, block, 0)->set != &pool->mixed)
                newer = block_pool->free.oldest; /* it has merged */
        }
        block = newer;
    }
    for (block = pool->mixed.oldest; block;) {
        if (block->segment->block_pool != block_pool || gai_block_pool_set(pool, block) == &pool->mixed) {
            block = block->newer;
        } else {
            gai_set_remove(block);
            (void)gai_block_file(pool, block, 0);
            block = pool->mixed.oldest; /* others may have merged with it */
        }
    }
}

/* Its graph will not run any more: all that was freed on the stream state's stream is complete. With the lock held. */
static void gai_stream_end_capture(galloc_pool *pool, gai_stream *stream)
{
    gai_stream_forget_positions(pool, stream);
    stream->done = stream->epoch++;
    stream->unmarked = stream->passed = 0;
    stream->retired = 1;
    stream->capture = NULL;
}

/* Takes a capture out of the pool: its graph is gone, or what it owned is not its own any more. With the lock held. */
static void gai_capture_forget(galloc_pool *pool, gai_capture *gone)
{
    gai_capture **at = &pool->captures;
    gai_block_pool *block_pool;
    gai_stream *stream;
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->capture == gone) gai_stream_end_capture(pool, stream);
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        if (block_pool->captured) gai_block_pool_sort(pool, block_pool);
    gai_capture_drop(gone);
}

/* Is memory of the pool a graph's that may be launched yet? */
static int gai_pool_has_captured(const galloc_pool *pool)
{
    const gai_stream *stream = pool->streams;
    while (stream && !(stream->capture && stream->uses)) stream = stream->next;
    return stream != NULL;
}

/* Bytes of a free block that graphs own; where two do, they may count twice, but never for more than there are. */
static size_t gai_block_captured(const gai_block *block)
{
    const gai_mark *mark;
    size_t bytes = 0;
    for (mark = block->marks; mark; mark = mark->next)
        if (mark->stream->capture) bytes += mark->end - mark->begin;
    return gai_min(bytes, block->bytes);
}

/* Bytes of free memory that graphs own. With the lock held. */
static size_t gai_pool_captured(const galloc_pool *pool)
{
    const gai_stream *stream;
    const gai_block_pool *block_pool;
    const gai_block *block;
    const gai_mapping *mapping;
    size_t bytes = 0;
    if (!gai_pool_has_captured(pool)) return 0;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        for (block = block_pool->free.oldest; block; block = block->newer) bytes += gai_block_captured(block);
    for (stream = pool->streams; stream; stream = stream->next)
        for (block = stream->capture ? stream->free.oldest : NULL; block; block = block->newer)
            bytes += gai_block_captured(block);
    for (block = pool->mixed.oldest; block; block = block->newer) bytes += gai_block_captured(block);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (gai_block_is_parked(mapping->block)) bytes += gai_block_captured(mapping->block);
    return bytes;
}

/* ==== STREAMS =================================================================================================== */
/* >>streams */

/* The context was reset: its cudaMalloc memory is gone. Free blocks there are taken out of sight, used ones stay
   until the program gives them up; then the segment goes without a word to the driver. With the lock held. */
static void gai_segment_lose(galloc_pool *pool, gai_segment *segment)
{
    gai_block *block;
    segment->lost = 1;
    pool->lost++;
    if (segment->of_graph) pool->of_graphs -= segment->bytes;
    for (block = segment->first; block; block = block->next) {
        if (!gai_block_is_free(block)) continue;
        gai_set_remove(block);
        block->kind = GAI_BUSY;
        gai_stat_page_gone(pool, segment->whole->page, block->bytes, 0);
    }
    gai_stat_cached(pool);
}

static void gai_pool_lose_context(galloc_pool *pool)
{
    gai_segment *segment;
    for (segment = pool->segments; segment; segment = segment->next)
        if (segment->fixed && !segment->lost) gai_segment_lose(pool, segment);
    gai_budget_give(pool, pool->kept);
    gai_stat_kept(pool, 0);
    pool->driver_pool = NULL; /* with the context, for all that is known */
    if (!pool->lost) return;
    gai_pool_shut_caches(pool);
    gai_pool_flush(pool);
    (void)gai_pool_gather_orphans(pool); /* no work can use what is gone: nobody need vouch for it */
    gai_pool_file_orphans(pool);
}

static uint64_t gai_lives; /* of all pools */

static gai_stream **gai_stream_bucket(galloc_pool *pool, unsigned long long key)
{
    return &pool->stream_index[key % GAI_STREAM_INDEX];
}

static void gai_stream_link(galloc_pool *pool, gai_stream *stream)
{
    stream->life = gai_next(&gai_lives);
    stream->epoch = 1;
    stream->free.stream = stream;
    stream->next = pool->streams;
    pool->streams = stream;
    pool->stream_count += (size_t)gai_stream_is_plain(stream);
    if (!stream->next || stream->next->next) return;
    stream = stream->next; /* no longer alone */
    if (stream->cache.most > GAI_MARK_BYTES) {
        gai_cache_shut(&stream->cache);
        (void)gai_stream_flush(pool, stream, 0);
    }
    gai_cache_set(pool, stream);
}

/* Work that nobody can name is done when all contexts that are known have been waited for. */
static gai_stream *gai_pool_unknown_streams(galloc_pool *pool)
{
    if (!pool->outside.life) {
        pool->outside.capture_id = GAI_UNKNOWN_STREAMS;
        pool->outside.asked = 1;
        gai_stream_link(pool, &pool->outside);
    }
    return &pool->outside;
}

/* The key is the stream's id, never the handle, which comes back after cudaStreamDestroy for another stream; that of a
   captured stream is the capture's id and the handle. */
static gai_stream *gai_stream_find(galloc_pool *pool, const gai_site *site)
{
    gai_stream *stream = *gai_stream_bucket(pool, site->stream_id ^ site->capture);
    if (site->broken) return gai_pool_unknown_streams(pool);
    while (stream && (stream->key != site->stream_id || stream->capture_id != site->capture ||
                    (site->capture && !stream->capture) || /* of a group that was released in its capture */
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

/* Descriptors come back from stream states that have been forgotten; their stream caches are shut and empty, and may be
   looked at by threads that come late. */
static gai_stream *gai_stream_unused(galloc_pool *pool)
{
    gai_stream *stream = pool->unused_streams;
    if (!stream) return gai_stream_create();
    pool->unused_streams = stream->next;
    memset(stream, 0, offsetof(gai_stream, cache));
    memset(&stream->free, 0, sizeof stream->free);
    return stream;
}

static gai_stream *gai_stream_new(galloc_pool *pool, const gai_site *site, unsigned int flags)
{
    gai_stream *stream = gai_stream_unused(pool);
    if (!stream) return NULL;
    stream->context = site->context;
    stream->context_id = site->context_id;
    stream->stream_id = site->capture ? 0 : site->stream_id;
    stream->thread = site->handle == CU_STREAM_PER_THREAD ? gai_stream_key(site->handle) : 0;
    stream->capture_id = site->capture;
    stream->blocking = !(flags & CU_STREAM_NON_BLOCKING);
    if (stream->context == pool->context && stream->context_id != pool->context_id) gai_pool_lose_context(pool);
    gai_stream_link(pool, stream);
    gai_stream_index_by(pool, stream, site->stream_id);
    return stream;
}

/* What must be known of a stream that is seen for the first time. A stream whose flags cannot be had is taken for a
   non-blocking one, of which nothing follows. */
static CUresult gai_site_introduce(gai_site *site, unsigned int *flags)
{
    *flags = 0;
    if (site->handle != CU_STREAM_LEGACY && gai_cu.StreamGetFlags(site->handle, flags)) *flags = CU_STREAM_NON_BLOCKING;
    return gai_site_context(site);
}

/* A call was given the stream state's stream. */
static GAI_INLINE void gai_stream_note(gai_stream *stream, const gai_site *site)
{
    if (stream->handle != site->handle) stream->handle = site->handle;
    stream->retired = 0;
}

/* The same, and its stream cache is emptied, so that the call sees all that is free. Returns whether it held anything.
   */
static int gai_stream_see(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    gai_stream_note(stream, site);
    return gai_stream_flush(pool, stream, 1);
}

/* The same, and the call holds it from now on, until gai_stream_release. */
static void gai_stream_enter(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    stream->busy++;
    (void)gai_stream_see(pool, stream, site);
}

static gai_stream *gai_stream_introduce(galloc_pool *pool, gai_site *site)
{
    gai_stream *stream;
    unsigned int flags;
    CUresult result;
    int known = 1;
    gai_lock_off(&pool->lock);
    result = gai_site_introduce(site, &flags);
    if (!result && site->context != pool->context) known = gai_context_know(site->context, site->context_id);
    gai_lock_on(&pool->lock);
    if (result || !known) return NULL;
    stream = gai_stream_find(pool, site);
    return stream ? stream : gai_stream_new(pool, site, flags);
}

#define GAI_DRAIN_MISSES 8 /* incomplete blocks passed over before the younger ones are taken to be incomplete too */

/* Re-files the blocks of a set whose marks have completed: they become everybody's, and merge. */
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
            if (newer && (newer == block || newer->set != set)) newer = set->oldest; /* it was merged, or merged away */
        } else {
            misses++;
        }
        block = newer;
    }
}

/* What graphs owned that are gone is everybody's, as far as its marks go. With the lock held. */
static void gai_pool_reap(galloc_pool *pool)
{
    gai_capture *capture, *next;
    gai_stream *stream;
    gai_block_pool *block_pool;
    int some = 0;
    for (capture = pool->captures; capture; capture = next) {
        next = capture->next;
        if (!gai_capture_has_ended(capture)) continue;
        gai_capture_forget(pool, capture);
        some = 1;
    }
    for (stream = some ? pool->streams : NULL; stream; stream = stream->next)
        if (stream->capture_id) gai_set_drain(pool, &stream->free, 1);
    for (block_pool = some ? pool->block_pools : NULL; block_pool; block_pool = block_pool->next)
        gai_set_drain(pool, &block_pool->free, 1);
    if (some) gai_set_drain(pool, &pool->mixed, 1);
}

/* The same for a stream that is being captured. A program that captures again and again may come to nothing else: so it
   is here, too, that graphs which are gone are forgotten. */
static gai_stream *gai_stream_introduce_captured(galloc_pool *pool, gai_site *site)
{
    gai_capture *capture = gai_capture_find(pool, site->capture);
    gai_stream *stream;
    gai_lock_off(&pool->lock);
    site->refused = gai_site_context(site);
    if (!site->refused && site->context != pool->context && !gai_context_know(site->context, site->context_id))
        site->refused = GAI_NO_HOST_MEMORY;
    if (!capture && !site->refused) gai_pool_note_capture(pool, site);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    capture = gai_capture_find(pool, site->capture);
    if (!capture || site->refused) return NULL;
    stream = gai_stream_find(pool, site);
    if (!stream) stream = gai_stream_new(pool, site, CU_STREAM_DEFAULT);
    if (stream) {
        stream->capture = capture;
        stream->asked = 1;
    }
    return stream;
}

/* Has the stream gone on from where its last call was, by the graph? If not, what it freed until then is not before
   what it does from now on: the capture's id is that of all captures into the same graph
   (cudaStreamBeginCaptureToGraph), and a program may say what a captured stream comes after
   (cudaStreamUpdateCaptureDependencies). Called with the lock held; lets it go to ask the driver. */
static int gai_stream_goes_on(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    gai_walk walk;
    gai_position was = stream->here, is;
    int goes_on;
    stream->busy++;
    gai_lock_off(&pool->lock);
    gai_walk_begin(&walk, site->handle, site->capture);
    is.n = walk.partial ? GAI_POSITION_NODES + 1 : walk.n;
    if (is.n <= GAI_POSITION_NODES) memcpy(is.nodes, walk.nodes, is.n * sizeof *is.nodes);
    goes_on = was.n > GAI_POSITION_NODES || gai_walk_reaches(&walk, &was);
    gai_lock_on(&pool->lock);
    stream->here = is;
    stream->busy--;
    return goes_on;
}

/* The stream state of a captured stream. One that it does not go on from is its capture's still, but nobody's to find.
   */
static gai_stream *gai_stream_captured(galloc_pool *pool, gai_site *site)
{
    gai_stream *stream = gai_stream_find(pool, site);
    if (stream && gai_stream_goes_on(pool, stream, site)) return stream;
    if (stream) gai_stream_unindex(pool, stream);
    if (stream) gai_stream_index_by(pool, stream, 0); /* no captured stream's key */
    stream = gai_stream_introduce_captured(pool, site);
    if (stream) (void)gai_stream_goes_on(pool, stream, site); /* it is nowhere so far */
    return stream;
}

/* The stream state of a stream that the current call was given, held until gai_stream_release; NULL: no host memory for
   a new one, or the driver would not tell its context. Called with the lock held; lets it go to ask the driver about a
   stream not seen before. */
static gai_stream *gai_stream_hold(galloc_pool *pool, gai_site *site)
{
    gai_stream *stream = site->stream;
    if (site->life && stream->life == site->life) {
        gai_stream_enter(pool, stream, site);
        return stream;
    }
    stream = site->capture ? gai_stream_captured(pool, site) : gai_stream_find(pool, site);
    if (!stream && !site->capture) stream = gai_stream_introduce(pool, site);
    if (!stream) return NULL;
    site->stream = stream;
    site->life = stream->life;
    site->context = stream->context;
    site->context_id = stream->context_id;
    site->own_context = stream->context == pool->context;
    gai_stream_enter(pool, stream, site);
    return stream;
}

/* Why there is no stream state. */
static cudaError_t gai_stream_refused(gai_site *site)
{
    CUresult result = gai_site_context(site);
    if (result) return gai_driver_failed(result, "cuStreamGetCtx");
    if (site->refused) return gai_driver_failed(site->refused, "noting a captured stream");
    return gai_fail(cudaErrorMemoryAllocation, "no host memory to note a new stream");
}

/* `stream` no longer remembers waits on `on`; NULL: on anybody. */
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

/* A home that nobody has, and that has nothing, is none. Lock held. */
static void gai_block_pool_end(galloc_pool *pool, gai_block_pool *block_pool)
{
    gai_block_pool **at = &pool->block_pools;
    if (block_pool->streams || block_pool->segments || block_pool->awaited) return;
    while (*at != block_pool) at = &(*at)->next;
    *at = block_pool->next;
    GALLOC_FREE(block_pool);
}

/* A new home, of nobody yet. NULL: no host memory. Lock held. */
static gai_block_pool *gai_block_pool_new(galloc_pool *pool, int small)
{
    gai_block_pool *block_pool = (gai_block_pool *)GALLOC_MALLOC(sizeof *block_pool);
    if (!block_pool) return NULL;
    memset(block_pool, 0, sizeof *block_pool);
    block_pool->small = small;
    block_pool->free.counted = 1;
    block_pool->next = pool->block_pools;
    pool->block_pools = block_pool;
    return block_pool;
}

/* The stream state has this home from now on. */
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

/* Where the stream state's blocks of a kind are, or NULL. Captures of one group share the memory of the same stream. A
   stream state of NULL: where those are that were reserved for nobody. Lock held. */
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
    for (other = pool->streams; other; other = other->next)
        if (other->block_pool[small] && other->key == stream->key &&
            gai_captures_share(other->capture, stream->capture))
            break;
    if (!other) return NULL;
    block_pool = gai_block_pool_enter(other->block_pool[small], stream);
    gai_block_pool_sort(pool, block_pool);
    return block_pool;
}

/* The same, made if there is none. NULL: no host memory. Lock held. */
static gai_block_pool *gai_block_pool_for(galloc_pool *pool, gai_stream *stream, int small)
{
    gai_block_pool *block_pool = gai_block_pool_of(pool, stream, small);
    if (block_pool) return block_pool;
    block_pool = gai_block_pool_new(pool, small);
    return stream ? gai_block_pool_enter(block_pool, stream) : block_pool;
}

/* Takes a stream state out of the pool; its events are still to be dropped. */
static void gai_stream_detach(galloc_pool *pool, gai_stream *gone)
{
    gai_stream **at = &pool->streams, *stream;
    while (*at != gone) at = &(*at)->next;
    *at = gone->next;
    pool->stream_count -= (size_t)gai_stream_is_plain(gone);
    gai_stream_unindex(pool, gone);
    gone->life = 0; /* who remembers it must not find it */
    gai_stream_leave_block_pools(pool, gone);
    gai_stream_forget_positions(pool, gone);
    for (stream = pool->streams; stream; stream = stream->next) gai_stream_forget_waits(pool, stream, gone);
    gai_stream_forget_waits(pool, gone, NULL);
}

/* ==== EVENTS ====================================================================================================== */
/* >>events */

/* When an event is recorded on a stream, and what completed ones prove. Owns the events of stream states and the
   predictor of useful marks, guarded by the pool's lock; events are recorded and asked with no lock held but `growth`
   or `marking`. Calls streams, stream cache, marks. */

/* Is it time for an event? Twice as much must have been freed for every GAI_EVENTS that are out, so that their number
   stays bounded however far the device is behind. */
static int gai_stream_is_ripe(const galloc_pool *pool, const gai_stream *stream)
{
    size_t bytes = gai_max(GAI_MARK_BYTES, pool->stats.reserved.current / GAI_MARK_PART / pool->stream_count);
    int scarce = (int)gai_min(stream->events / GAI_EVENTS, 24);
    return stream->unmarked >> scarce >= bytes || (!stream->blocks && stream->busy_frees >> scarce >= GAI_MARK_FREES);
}

/* Most marks are of no use: by the time that somebody looks, a later one is complete as well. Which those are is known
   only afterwards. But a program that repeats itself has the same occasions for a mark again and again: what was of no
   use the last time is left out. When something else comes than was expected, or memory is short, all are taken. */
#define GAI_MARK_PREDICTOR_TRUST 64 /* occasions in a row that came as expected */
#define GAI_PASSED_PART 2  /* of the heap may be freed with marks left out, by all streams together */

static size_t gai_stream_unmarked(const gai_stream *stream) { return stream->unmarked + stream->passed; }

static gai_occasion *gai_mark_predictor_find(gai_mark_predictor *mark_predictor, uint64_t number)
{
    if (!number || number > mark_predictor->noted || mark_predictor->noted - number >= GAI_OCCASIONS) return NULL;
    return &mark_predictor->occasions[number % GAI_OCCASIONS];
}

/* Notes an occasion. Returns what it was the last time if that can be trusted, else NULL. */
static const gai_occasion *gai_mark_predictor_note(gai_mark_predictor *mark_predictor, uint64_t key)
{
    uint64_t *latest = &mark_predictor->latest[key % GAI_OCCASIONS];
    const gai_occasion *before = gai_mark_predictor_find(mark_predictor, mark_predictor->next);
    gai_occasion *now;
    if (before && before->key == key) {
        mark_predictor->agreed++;
        mark_predictor->next++;
    } else {
        mark_predictor->agreed = 0;
        before = gai_mark_predictor_find(mark_predictor, *latest);
        mark_predictor->next = before && before->key == key ? *latest + 1 : 0;
    }
    *latest = ++mark_predictor->noted;
    now = gai_mark_predictor_find(mark_predictor, mark_predictor->noted);
    now->key = key;
    now->useless = 0;
    return mark_predictor->agreed >= GAI_MARK_PREDICTOR_TRUST ? before : NULL;
}

/* Whoever finds no mark waits for the device at last. Where somebody may not, what has none is lost to him. */
static int gai_pool_needs_marks(const galloc_pool *pool)
{
    return pool->captures || pool->config.wait_limit_ms != UINT64_MAX;
}

/* A mark is due. Is it left out? Lock held. */
GAI_APART
static int gai_stream_passes(galloc_pool *pool, gai_stream *stream)
{
    const uint64_t odd = 0x9e3779b97f4a7c15u;
    uint64_t since = (pool->clock - pool->mark_predictor.clock) * odd + pool->mark_predictor.looks;
    uint64_t key = ((stream->life * odd + since) * odd + stream->unmarked) * odd;
    size_t most = pool->stats.reserved.current / GAI_PASSED_PART / pool->stream_count;
    const gai_occasion *before = gai_mark_predictor_note(&pool->mark_predictor, key ^ key >> 32);
    pool->mark_predictor.clock = pool->clock;
    pool->mark_predictor.looks = 0;
    stream->occasion = pool->mark_predictor.noted;
    if (!before || !before->useless || gai_stream_unmarked(stream) > most || gai_pool_needs_marks(pool)) return 0;
    gai_mark_predictor_find(&pool->mark_predictor, pool->mark_predictor.noted)->useless = 1;
    stream->passed += stream->unmarked;
    stream->unmarked = 0;
    return 1;
}

/* Somebody has found the event complete, or waits for it. Lock held. */
static void gai_event_judge(galloc_pool *pool, const gai_event *event, int useless)
{
    gai_occasion *occasion = gai_mark_predictor_find(&pool->mark_predictor, event->occasion);
    if (occasion) occasion->useless = useless;
}

/* An event is recorded only by a call that was given the stream, when others could want what was freed on it. On
   legacy only when asked for: an event there makes every blocking stream wait for every other. A stream that has given
   everything back leaves a mark as well: it may be done for long. With another backend what is freed waits for that to
   go to the driver. */
static int gai_stream_wants_mark(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    if (site->capture_forbids || stream->retired) return 0;
    if ((stream->asked || pool->config.backend) && gai_stream_unmarked(stream)) return 1;
    if (pool->torch) return 0; /* nobody else gets it */
    if (gai_pool_has_one_stream(pool) || (stream->handle == CU_STREAM_LEGACY && !stream->wanted)) return 0;
    return stream->unmarked && gai_stream_is_ripe(pool, stream) && !gai_stream_passes(pool, stream);
}

/* Notes an error after which nothing more can be had from the context, or from the driver. */
static void gai_pool_note(galloc_pool *pool, CUresult result)
{
    if (!gai_is_sticky(result) && !gai_is_driver_gone(result)) return;
    gai_lock_on(&pool->lock);
    if (gai_is_driver_gone(result)) pool->driver_gone = 1;
    else if (!pool->broken) gai_store(&pool->broken, (uint64_t)result);
    gai_pool_shut_caches(pool);
    gai_lock_off(&pool->lock);
}

/* When this thread's call into the driver began. */
static GAI_THREAD_LOCAL uint64_t gai_call_began;

static void gai_call_begin(uint64_t *calls)
{
    gai_count(calls, 1);
    gai_call_began = GALLOC_CLOCK();
}

static CUresult gai_call_end(uint64_t *ns, uint64_t *longest, CUresult result)
{
    uint64_t spent = GALLOC_CLOCK() - gai_call_began;
    gai_count(ns, spent);
    gai_count_max(longest, spent);
    return result;
}

/* Calls the driver, and counts the call and its time. */
#define GAI_CALL(pool, kind, function, arguments) \
    (gai_call_begin(&(pool)->stats.driver.kind),  \
     gai_call_end(&(pool)->stats.driver_ns.kind, &(pool)->stats.driver_longest_ns.kind, gai_cu.function arguments))

static CUresult gai_event_new(galloc_pool *pool, gai_stream *stream, CUevent *event)
{
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, stream->context);
    if (result) return result;
    result = GAI_CALL(pool, event_create, EventCreate, (event, CU_EVENT_DISABLE_TIMING));
    gai_scope_leave(&scope);
    return result;
}

/* An event ready to be recorded: a used one, or a new one. Called with the lock held, which is let go meanwhile. */
static gai_event *gai_event_get(galloc_pool *pool, gai_stream *stream, CUresult *result)
{
    gai_event *event = stream->idle;
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
    *result = gai_event_new(pool, stream, &event->event);
    gai_lock_on(&pool->lock);
    if (!*result) return event;
    gai_slab_give(&pool->events, event);
    return NULL;
}

/* Shows a recorded event, unless a wait for the device has made it superfluous meanwhile. */
static void gai_event_publish(gai_stream *stream, gai_event *event)
{
    gai_event **at = event->epoch > stream->done ? &stream->recorded : &stream->idle;
    while (*at && (*at)->epoch < event->epoch) at = &(*at)->next;
    event->next = *at;
    *at = event;
    stream->events += event->epoch > stream->done;
}

/* Another thread may have begun to capture the stream since it was looked at. An event that was recorded in a capture
   does no harm as long as nobody asks for it: it is as if it had not been. */
static CUresult gai_event_record(galloc_pool *pool, gai_stream *stream, gai_event *event, CUstream handle)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, stream->context);
    if (result) return result;
    result = GAI_CALL(pool, event_record, EventRecord, (event->event, handle));
    if (!result && handle != CU_STREAM_LEGACY) result = gai_cu.StreamIsCapturing(handle, &status);
    if (status != CU_STREAM_CAPTURE_STATUS_NONE) result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    gai_scope_leave(&scope);
    return result;
}

/* Marks the stream's present position: all that was freed on it so far is covered. The order is what makes it true:
   first the epoch goes on, so that a free which comes meanwhile is not covered; then the event is recorded; then it
   is shown. A failure costs nothing but the mark, which the next call tries again. Called with the lock held; lets it
   go meanwhile. */
static CUresult gai_stream_mark(galloc_pool *pool, gai_stream *stream, CUstream handle, int retire)
{
    CUresult result;
    gai_event *event;
    size_t unmarked;
    event = gai_event_get(pool, stream, &result);
    if (event) {
        if (retire) gai_cache_shut(&stream->cache); /* it may have been opened while there was no lock */
        if (retire) (void)gai_stream_flush(pool, stream, 1);
        event->clock = pool->clock;
        event->epoch = stream->epoch++;
        event->occasion = stream->occasion;
        stream->retired = (short)retire;
        unmarked = gai_stream_unmarked(stream);
        stream->unmarked = stream->passed = 0;
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
        stream->retired = 0;
    }
    gai_stream_ask(stream);
    gai_lock_off(&pool->lock);
    gai_pool_note(pool, result);
    gai_lock_on(&pool->lock);
    return result;
}

#define GAI_POSITIONS                                                                                                  \
    64 /* of a stream state; when there are more, every second one goes: the next stands for its frees as well */

static void gai_stream_thin_positions(galloc_pool *pool, gai_stream *stream)
{
    gai_position *position;
    size_t n = 0;
    for (position = stream->positions; position; position = position->older) n++;
    if (n <= GAI_POSITIONS) return;
    for (position = stream->positions; position && position->older; position = position->older) {
        gai_position *gone = position->older;
        position->older = gone->older;
        gai_slab_give(&pool->positions, gone);
    }
}

/* Shows a position. Threads that capture into one graph take turns, so that it is the latest. One that is where the
   last one was takes its room. With the lock held. */
static void gai_stream_show_position(galloc_pool *pool, gai_stream *stream, uint64_t epoch, const CUgraphNode *nodes,
                                     size_t n)
{
    gai_position *position = stream->positions;
    if (!stream->capture || epoch <= stream->done) return;
    if (!position || position->n != n || memcmp(position->nodes, nodes, n * sizeof *nodes)) {
        if (!gai_slab_need(&pool->positions, 1)) return;
        position = (gai_position *)gai_slab_take(&pool->positions);
        position->n = n;
        memcpy(position->nodes, nodes, n * sizeof *nodes);
        position->older = stream->positions;
        stream->positions = position;
    }
    position->epoch = epoch;
    gai_stream_thin_positions(pool, stream);
}

/* Notes where in the graph the stream is now: all that was freed on it so far is covered. In the order of a mark: the
   epoch goes on, then the driver is asked, then the position is shown. What cannot be noted is covered by the next
   position. Called with the lock held; lets it go meanwhile. */
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

/* The end of every call that held a stream state: leaves a mark if one is due. Called with the lock held. */
static void gai_stream_release(galloc_pool *pool, gai_stream *stream, const gai_site *site)
{
    if (gai_stream_wants_mark(pool, stream, site)) (void)gai_stream_mark(pool, stream, site->handle, 0);
    else if (stream->capture && stream->unmarked) gai_stream_position(pool, stream, site);
    stream->busy--;
    gai_cache_set(pool, stream);
}

/* Everything that was stamped up to `epoch` is known to be complete; its events can be used again. */
static void gai_stream_complete(gai_stream *stream, uint64_t epoch)
{
    if (epoch > stream->done) stream->done = epoch;
    while (stream->recorded && stream->recorded->epoch <= stream->done) {
        gai_event *event = stream->recorded;
        stream->recorded = event->next;
        stream->events--;
        event->next = stream->idle;
        stream->idle = event;
    }
}

/* After cudaDeviceReset a context's address lives on under another id: what was queued in it is gone, and touching
   one of its events would crash. */
static enum gai_health gai_stream_health(const gai_stream *stream)
{
    return gai_context_health(stream->context, stream->context_id);
}

/* Gives up the stream state's events: destroyed, or where the context may be dead dropped unasked. Called without the
   lock. */
static void gai_stream_drop_events(galloc_pool *pool, gai_stream *stream, int destroy)
{
    gai_event *list, *event;
    gai_lock_on(&pool->lock);
    for (event = stream->recorded; event && event->next;) event = event->next;
    if (event) event->next = stream->idle;
    list = event ? stream->recorded : stream->idle;
    stream->recorded = stream->idle = NULL;
    stream->events = 0;
    gai_lock_off(&pool->lock);
    for (event = list; destroy && event; event = event->next)
        (void)GAI_CALL(pool, event_destroy, EventDestroy, (event->event));
    gai_lock_on(&pool->lock);
    while (list) {
        event = list;
        list = event->next;
        gai_slab_give(&pool->events, event);
    }
    gai_lock_off(&pool->lock);
}

static void gai_stream_died(galloc_pool *pool, gai_stream *stream)
{
    gai_lock_on(&pool->lock);
    stream->done = stream->epoch++;
    stream->unmarked = stream->passed = 0;
    if (stream->capture) stream->capture->lost = 1;
    gai_lock_off(&pool->lock);
    gai_stream_drop_events(pool, stream, 0);
}

/* Before anything touches an event: what was queued in contexts that have ended is complete, and their events are
   gone. Those of a context that does not answer are left alone until it does. Called with `growth` held. */
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

/* The recorded event halfway to `open`, from where on all are known to be incomplete; while none is known to be, the
   newest. NULL: nothing is left to ask. */
static gai_event *gai_stream_next_to_ask(const gai_stream *stream, const gai_event *open)
{
    gai_event *event = stream->recorded, *middle = stream->recorded;
    size_t n = 0;
    if (event == open || stream->silent) return NULL;
    for (; event->next != open; event = event->next)
        if (++n % 2 == 0) middle = middle->next;
    return open ? middle : event;
}

/* Asks how far the stream state's stream has come. Called with `growth` held, in a scope. */
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

/* Looks which streams have done what they were given, and lets everybody have what that sets free. */
static void gai_pool_poll(galloc_pool *pool)
{
    gai_stream *stream;
    gai_block_pool *block_pool;
    gai_lock_on(&pool->lock);
    stream = pool->streams;
    pool->mark_predictor.looks++;
    gai_lock_off(&pool->lock);
    for (; stream; stream = stream->next) gai_stream_poll(pool, stream);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->free.bytes) gai_set_drain(pool, &stream->free, 0);
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        gai_set_drain(pool, &block_pool->free, 0);
    gai_set_drain(pool, &pool->mixed, 1);
    gai_lock_off(&pool->lock);
}

/* Bytes of a free block that others cannot have, for all that is known, before the stream state's stream has done more.
   */
static size_t gai_block_stranded(const gai_block *block, const gai_stream *stream)
{
    const gai_mark *mark;
    size_t bytes = 0;
    for (mark = block->marks; mark; mark = mark->next)
        if (mark->stream == stream && !gai_mark_is_complete(mark)) bytes += mark->end - mark->begin;
    return bytes;
}

static void gai_stream_read(const galloc_pool *pool, gai_stream *stream, galloc_stream_stats *stats)
{
    gai_cache *cache = &stream->cache;
    size_t in_cache;
    const gai_block_pool *block_pool;
    const gai_block *block;
    const gai_mapping *mapping;
    memset(stats, 0, sizeof *stats);
    stats->stream_id = stream->stream_id;
    stats->context_id = stream->context_id;
    gai_latch_on(&cache->latch);
    in_cache = cache->bytes + cache->unconfirmed_bytes;
    gai_latch_off(&cache->latch);
    stats->stranded = in_cache;
    stats->unmarked = gai_stream_unmarked(stream) + in_cache;
    for (block = stream->free.oldest; block; block = block->newer) stats->stranded += gai_block_stranded(block, stream);
    for (block = pool->mixed.oldest; block; block = block->newer) stats->stranded += gai_block_stranded(block, stream);
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        for (block = block_pool->free.oldest; block; block = block->newer)
            stats->stranded += gai_block_stranded(block, stream);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (gai_block_is_parked(mapping->block)) stats->stranded += gai_block_stranded(mapping->block, stream);
}

/* Stream states of streams that are gone, or that hold nothing, are forgotten once there are many. Called with `growth`
   held. */
#define GAI_STREAMS_KEPT 64

static int gai_stream_is_idle(const gai_stream *stream)
{
    return !stream->uses && !stream->blocks && !stream->busy && !stream->recorded && !stream->free.bytes &&
           stream->handed <= stream->done && !gai_stream_is_unknown(stream);
}

static void gai_pool_sweep_streams(galloc_pool *pool)
{
    gai_stream *stream, *next, *gone = NULL;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = next) {
        next = stream->next;
        if (!gai_stream_is_idle(stream) || (!stream->retired && pool->stream_count <= GAI_STREAMS_KEPT)) continue;
        if (stream->silent) continue; /* its events could not be destroyed */
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

/* ==== PAGES ===================================================================================================== */
/* >>pages */

/* Everything here is called with `growth` held, in a scope of the pool's context; `lock` is taken for the changes of
   state between driver calls, never around one. */

#define GAI_PAGE_MAX (64 * GAI_MIB) /* larger handles cost less per byte, but are harder to move or give back */
#define GAI_OVERHEAD_FRUGAL 0.01
#define GAI_FIXED_SMALL (2 * GAI_MIB) /* PyTorch's cudaMalloc sizes (c10/core/AllocatorConfig.h): 2 MiB for requests */
#define GAI_FIXED_LARGE (20 * GAI_MIB) /* up to 1 MiB, 20 MiB below 10 MiB, then the request rounded up to 2 MiB */
#define GAI_FIXED_OWN (10 * GAI_MIB)

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

/* A segment that is one hole. NULL: no host memory. */
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

static void gai_segment_link(galloc_pool *pool, gai_segment *segment, uintptr_t addr, size_t bytes)
{
    segment->addr = addr;
    gai_block_set_addr(segment->first, addr);
    segment->bytes = segment->first->bytes = bytes;
    segment->next = pool->segments;
    if (segment->next) segment->next->prev = segment;
    pool->segments = segment;
}

static int gai_pool_is_oversize(const galloc_pool *pool, size_t bytes) { return bytes >= pool->config.max_split_size; }

/* A used block of a home's is not used any more. */
GAI_APART
static void gai_torch_count_unused(galloc_pool *pool, const gai_block *block)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    int small = block->segment->block_pool->small;
    gai_torch_subtract(&stats->allocation, small, 1);
    gai_torch_subtract(&stats->active, small, 1);
    gai_torch_subtract(&stats->allocated_bytes, small, block->bytes);
    gai_torch_subtract(&stats->active_bytes, small, block->bytes);
    gai_torch_subtract(&stats->requested_bytes, small, (size_t)block->requested);
    if (gai_pool_is_oversize(pool, block->bytes)) stats->oversize_allocations.current--;
}

/* A segment is made for the streams of a home. Lock held. */
static void gai_segment_enter_block_pool(galloc_pool *pool, gai_segment *segment, gai_block_pool *block_pool)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    segment->block_pool = block_pool;
    segment->searches = pool->searches[block_pool->small];
    block_pool->segments++;
    gai_torch_add(&stats->segment, block_pool->small, 1, 1);
    gai_torch_add(&stats->reserved_bytes, block_pool->small, segment->bytes, 1);
    if (gai_pool_is_oversize(pool, segment->bytes)) gai_torch_add_one(&stats->oversize_segments, 1, 1);
    stats->num_device_alloc++;
}

/* It is given back. */
static void gai_segment_leave_block_pool(galloc_pool *pool, gai_segment *segment)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    gai_block_pool *block_pool = segment->block_pool;
    gai_torch_subtract(&stats->segment, block_pool->small, 1);
    gai_torch_subtract(&stats->reserved_bytes, block_pool->small, segment->bytes);
    if (gai_pool_is_oversize(pool, segment->bytes)) stats->oversize_segments.current--;
    stats->num_device_free++;
    block_pool->segments--;
    gai_block_pool_end(pool, block_pool);
}

static void gai_segment_end(galloc_pool *pool, gai_segment *segment)
{
    if (segment->next) segment->next->prev = segment->prev;
    if (segment->prev) segment->prev->next = segment->next;
    else if (pool->segments == segment) pool->segments = segment->next;
    pool->lost -= segment->lost;
    if (segment->block_pool) gai_segment_leave_block_pool(pool, segment);
    while (segment->first) {
        gai_block *block = segment->first;
        segment->first = block->next;
        gai_slab_give(&pool->blocks, block);
    }
    GALLOC_FREE(segment);
}

/* Lets the mapping be found by its addresses, or no longer. */
static void gai_mapping_show(gai_mapping *mapping, int show)
{
    const uintptr_t page = (uintptr_t)1 << GAI_PAGE_LOG2;
    uintptr_t at, end = mapping->addr + mapping->bytes;
    void **child = NULL;
    if (mapping->segment->given) return;
    for (at = mapping->addr; at < end; at += page) {
        child = child && gai_map_digit(2, at) ? child + 1 : gai_map_entry_at(&gai_page_map, at);
        if (show) gai_store_pointer(child, mapping);
        else if (child && gai_load_pointer(child) == mapping) gai_store_pointer(child, NULL);
    }
}

/* The segment's addresses lead nowhere any more. */
static void gai_segment_hide(galloc_pool *pool, gai_segment *segment)
{
    gai_block *block;
    uintptr_t at;
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

/* A block of lost memory is the program's until it is freed, or until its address is given out again. With the lock
   held. */
static void gai_block_abandon(galloc_pool *pool, gai_block *block)
{
    if (block->kind != GAI_USED || !gai_block_acquire(block, (void *)block->addr)) return;
    gai_stat_unused(pool, block->bytes, (size_t)block->requested);
    pool->stats.blocks.current--;
    pool->stats.frees++;
    if (pool->torch) gai_torch_count_unused(pool, block);
    gai_marks_end(pool, &block->recorded_uses);
    gai_block_untake(pool, block);
    gai_block_give(pool, block);
}

/* What the pool has lost, for all that is known, leaves these addresses: the driver gives them to somebody else. While
   the context exists only that is lost which is noted so; anything else is on its way back to the driver. */
static void gai_pool_leave_range(galloc_pool *pool, enum gai_health health, uintptr_t addr, size_t bytes)
{
    gai_segment *segment;
    gai_block *block;
    gai_lock_on(&pool->lock);
    for (segment = pool->segments; segment; segment = segment->next) {
        if (segment->addr >= addr + bytes || addr >= segment->addr + segment->bytes) continue;
        if (!segment->whole->page->current || (health == GAI_ALIVE && !segment->lost)) continue; /* on its way out */
        if (!segment->lost) gai_pool_lose_context(pool);
        for (block = segment->first; block; block = block->next) gai_block_abandon(pool, block);
        gai_segment_hide(pool, segment);
    }
    gai_lock_off(&pool->lock);
}

/* Has the pool lost memory, for all that is known? */
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

/* The driver has given these addresses out. After a reset they may still be noted as those of memory that is gone, in
   this pool or in one that has made no call since. With no pool's lock held. */
static void gai_addresses_are_new(uintptr_t addr, size_t bytes)
{
    galloc_pool *pool = NULL;
    enum gai_health health;
    while ((pool = gai_pool_visit(pool)) != NULL)
        if (pool->mortal && gai_pool_may_have_lost(pool, &health)) gai_pool_leave_range(pool, health, addr, bytes);
}

/* Reserves addresses: twice the device's memory at once if it can be had, since address space is plentiful and one
   range serves blocks of all sizes and streams. */
static CUresult gai_segment_reserve(galloc_pool *pool, size_t at_least)
{
    size_t bytes = gai_up(gai_max(2 * pool->device_bytes, at_least), pool->granularity);
    CUdeviceptr addr = 0;
    CUresult result;
    gai_segment *segment = gai_segment_new(pool);
    if (!segment) return GAI_NO_HOST_MEMORY;
    for (;;) {
        result = GAI_CALL(pool, reserve, MemAddressReserve, (&addr, bytes, 0, 0, 0));
        if (!result || bytes == at_least || gai_is_sticky(result)) break;
        bytes = gai_up(gai_max(bytes / 2, at_least), pool->granularity);
    }
    if (!result) gai_addresses_are_new((uintptr_t)addr, bytes);
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

/* Makes sure that what is mapped there can be found. 0: no host memory. */
static int gai_page_map_need(uintptr_t addr, size_t bytes)
{
    const uintptr_t node = (uintptr_t)1 << gai_map_shift[1];
    uintptr_t at;
    for (at = gai_down(addr, node); at < addr + bytes; at += node)
        if (!gai_map_need(&gai_page_map, at)) return 0;
    return 1;
}

/* A page appears at an address; if it has no memory yet it gets it. */
static CUresult gai_mapping_do(galloc_pool *pool, gai_mapping *mapping, uintptr_t addr)
{
    CUmemAllocationProp properties = gai_page_properties(pool);
    gai_page *page = mapping->page;
    CUresult result = CUDA_SUCCESS;
    if (!page->handle) result = GAI_CALL(pool, create, MemCreate, (&page->handle, page->bytes, &properties, 0));
    if (result) {
        page->handle = 0;
        return result;
    }
    result = GAI_CALL(pool, map, MemMap, ((CUdeviceptr)addr, page->bytes, 0, page->handle, 0));
    if (result) return result;
    mapping->addr = addr;
    page->mappings++;
    return CUDA_SUCCESS;
}

/* How far the driver let a mapping be undone. */
enum gai_undone { GAI_STUCK, GAI_UNMAPPED, GAI_RELEASED };

/* What a graph was to allocate that has not run, and perhaps never will, the driver does not know. */
static int gai_segment_never_was(const gai_segment *segment, CUresult result)
{
    return segment->of_graph && result == CUDA_ERROR_INVALID_VALUE;
}

static enum gai_undone gai_mapping_undo_fixed(galloc_pool *pool, gai_mapping *mapping)
{
    CUresult result;
    int lost;
    gai_lock_on(&pool->lock);
    lost = mapping->segment->lost;
    gai_lock_off(&pool->lock);
    if (lost) return GAI_RELEASED;
    result = GAI_CALL(pool, mem_free, MemFree, ((CUdeviceptr)mapping->addr));
    if (gai_segment_never_was(mapping->segment, result)) return GAI_RELEASED;
    if (result) gai_pool_note(pool, result);
    return result ? GAI_STUCK : GAI_RELEASED;
}

/* Unmaps, and releases the page when this was the last range to show it. */
static enum gai_undone gai_mapping_undo(galloc_pool *pool, gai_mapping *mapping)
{
    gai_page *page = mapping->page;
    CUresult result = CUDA_SUCCESS;
    if (mapping->segment->fixed) return gai_mapping_undo_fixed(pool, mapping);
    if (mapping->addr) result = GAI_CALL(pool, unmap, MemUnmap, ((CUdeviceptr)mapping->addr, mapping->bytes));
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

/* The end of a page whose memory is the device's again. With the lock held. */
static void gai_page_end(galloc_pool *pool, gai_page *page)
{
    gai_stat_page_gone(pool, page, page->bytes, 1);
    gai_slab_give(&pool->pages, page);
}

/* What the driver would not undo is kept, and tried again later. With the lock held. */
static void gai_mapping_quarantine(galloc_pool *pool, gai_mapping *mapping)
{
    gai_page *page = mapping->page;
    gai_stat_page(pool, page);
    if (!page->current && !page->stuck) pool->stats.quarantined += page->bytes;
    page->stuck = !page->current;
    mapping->next = pool->quarantine;
    pool->quarantine = mapping;
}

static void gai_mapping_end(galloc_pool *pool, gai_mapping *mapping)
{
    gai_mapping **at = &mapping->page->shown;
    while (*at != mapping) at = &(*at)->next_shown;
    *at = mapping->next_shown;
    mapping->number = 0; /* memos may know it */
    gai_slab_give(&pool->mappings, mapping);
}

/* What is given back to the driver's pool is still held: `reserved` does not change, not even in between. 0: it is not
   the pool's. With the lock held. */
static int gai_segment_keep(galloc_pool *pool, gai_segment *segment)
{
    gai_page *page = segment->whole->page;
    galloc_pages *pages = pool->stats.pages, *of_its_size = &pages[gai_page_class(page->bytes)];
    if (segment->lost || !gai_pool_is_async(pool)) return 0;
    if (segment->of_graph) pool->of_graphs -= segment->bytes;
    if (segment->of_graph) return 0;
    of_its_size->count--;
    of_its_size->bytes -= page->bytes;
    pages[0].bytes += page->bytes;
    pool->kept += page->bytes;
    return 1;
}

/* What has become of a mapping whose undoing was tried. With the lock held. */
static void gai_mapping_settle(galloc_pool *pool, gai_mapping *mapping, enum gai_undone undone)
{
    gai_segment *segment = mapping->segment;
    if (mapping->block && (undone != GAI_STUCK || (!mapping->addr && !segment->fixed))) {
        gai_block_to_hole(pool, mapping->block);
        mapping->block = NULL;
    }
    if (undone == GAI_STUCK) {
        gai_mapping_quarantine(pool, mapping);
    } else {
        gai_page *page = mapping->page;
        int kept = segment->given && gai_segment_keep(pool, segment);
        gai_mapping_end(pool, mapping);
        if (kept) gai_slab_give(&pool->pages, page);
        else if (undone == GAI_RELEASED) gai_page_end(pool, page);
        if (segment->fixed) {
            gai_hole_unlink(pool, segment->first);
            gai_segment_end(pool, segment);
        }
    }
    gai_stat_cached(pool);
}

/* Mappings on their way in or out, in order of address, each with a block of its own. */
typedef struct gai_batch {
    gai_mapping *first, **last;
} gai_batch;

static void gai_batch_start(gai_batch *batch)
{
    batch->first = NULL;
    batch->last = &batch->first;
}

static void gai_batch_add(gai_batch *batch, gai_mapping *mapping, gai_block *block)
{
    mapping->next = NULL;
    mapping->block = block;
    *batch->last = mapping;
    batch->last = &mapping->next;
}

/* The mapping's page is, or stays, elsewhere. With the lock held. */
static void gai_alias_add(galloc_pool *pool, gai_mapping *mapping)
{
    mapping->standing = 0;
    mapping->block->kind = GAI_ALIAS;
    mapping->block->alias = mapping;
    mapping->newer = NULL;
    mapping->older = pool->newest_alias;
    if (mapping->older) mapping->older->newer = mapping;
    else pool->oldest_alias = mapping;
    pool->newest_alias = mapping;
    if (mapping->page->current == mapping) pool->parked += mapping->bytes;
    else pool->stats.leaving += mapping->bytes;
    pool->old += mapping->page->current != mapping;
}

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
    pool->old -= mapping->page->current != mapping;
}

static void gai_batch_undo(galloc_pool *pool, gai_batch *batch)
{
    while (batch->first) {
        gai_mapping *mapping = batch->first;
        enum gai_undone undone = GAI_STUCK;
        batch->first = mapping->next;
        if (!mapping->standing) undone = gai_mapping_undo(pool, mapping);
        gai_lock_on(&pool->lock);
        if (mapping->standing) gai_alias_add(pool, mapping);
        else gai_mapping_settle(pool, mapping, undone);
        gai_lock_off(&pool->lock);
    }
}

/* Cuts [addr, addr + bytes) out of a hole or a room, as a busy block. The caller has made sure of two descriptors.
   Lock held. */
static gai_block *gai_hole_cut(galloc_pool *pool, gai_block *hole, uintptr_t addr, size_t bytes)
{
    int room = hole->kind == GAI_ROOM;
    gai_block *rest = NULL;
    if (!room) gai_hole_unlink(pool, hole);
    if (addr + bytes < hole->addr + hole->bytes) rest = gai_block_split(pool, hole, addr + bytes, hole->kind);
    if (rest && !room) gai_hole_link(pool, rest);
    if (addr > hole->addr) {
        gai_block *right = gai_block_split(pool, hole, addr, GAI_BUSY);
        if (!room) gai_hole_link(pool, hole);
        hole = right;
    }
    hole->kind = GAI_BUSY;
    return hole;
}

/* A mapping for the whole of a busy block; page: NULL for a new one. The caller has made sure of the descriptors. */
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
    mapping->standing = 0;
    mapping->number = ++pool->numbers;
    mapping->next_shown = page->shown;
    page->shown = mapping;
    return mapping;
}

/* The bytes at the new address are the bytes at the old one: whoever must be waited for there must be here. */
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

/* How a range is going to be filled: where old mappings stand, by the return of their pages; the hole in it first with
   pages that donors give up, then with new ones. */
typedef struct gai_fill {
    gai_batch returning;       /* old mappings in the range, in order of address */
    gai_batch donors,
        returning_blocks; /* current mappings of pages that move and that return, their blocks out of sight */
    size_t moved, unconfirmed, page_bytes;
} gai_fill;

static size_t gai_batch_marks(const gai_batch *batch)
{
    const gai_mapping *mapping;
    size_t n = 0;
    for (mapping = batch->first; mapping; mapping = mapping->next) n += gai_marks_count(mapping->block->marks);
    return n;
}

/* Makes sure of all that host memory is needed for, but for marks. With the lock held. */
static int gai_fill_need(galloc_pool *pool, const gai_fill *fill, uintptr_t addr)
{
    size_t n = (fill->unconfirmed + fill->page_bytes - 1) / fill->page_bytes, moved = 0;
    const gai_mapping *donor;
    for (donor = fill->donors.first; donor; donor = donor->next) moved++;
    return gai_slab_need(&pool->pages, n) && gai_slab_need(&pool->mappings, n + moved) &&
           gai_slab_need(&pool->blocks, n + moved + 6) &&
           gai_page_map_need(addr, fill->moved + fill->unconfirmed) && gai_block_map_need(addr);
}

/* Lays mappings over [addr, ...) of a hole, as the filling says, each with a busy block. The caller has made sure of
   the descriptors. With the lock held. */
static void gai_batch_over_hole(galloc_pool *pool, gai_batch *batch, gai_block *hole, uintptr_t addr,
                               const gai_fill *fill)
{
    const gai_mapping *donor = fill->donors.first;
    size_t left = fill->moved + fill->unconfirmed;
    gai_block *block = gai_hole_cut(pool, hole, addr, left);
    while (left) {
        size_t bytes = donor ? donor->bytes : gai_min(fill->page_bytes, left);
        gai_block *rest = bytes < left ? gai_block_split(pool, block, block->addr + bytes, GAI_BUSY) : NULL;
        gai_batch_add(batch, gai_mapping_new(pool, block, donor ? donor->page : NULL), block);
        if (donor) gai_marks_copy(pool, donor->block, block);
        if (donor) donor = donor->next;
        left -= bytes;
        block = rest;
    }
}

/* Adds the next returning mapping, with the marks that its page has where it is now. Whoever uses a page is ordered
   after all that used it before, so that the marks that stood here until now are implied. The caller has made sure of
   the marks. With the lock held. */
static void gai_batch_add_returning(galloc_pool *pool, gai_batch *batch, gai_fill *fill)
{
    gai_mapping *mapping = fill->returning.first;
    gai_block *block = mapping->block;
    fill->returning.first = mapping->next;
    if (mapping->page->current != mapping) {
        gai_marks_end(pool, &block->marks);
        gai_marks_copy(pool, mapping->page->current->block, block);
    }
    gai_batch_add(batch, mapping, block);
}

/* Maps what is new in a batch: one range of addresses. */
static CUresult gai_batch_map(galloc_pool *pool, gai_batch *batch)
{
    CUmemAccessDesc access;
    CUresult result = CUDA_SUCCESS;
    gai_mapping *mapping;
    uintptr_t addr = 0;
    size_t bytes = 0;
    for (mapping = batch->first; mapping && !result; mapping = mapping->next) {
        if (mapping->standing) continue;
        if (!bytes) addr = mapping->block->addr;
        bytes += mapping->bytes;
        result = gai_mapping_do(pool, mapping, mapping->block->addr);
    }
    if (result || !bytes) return result;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = pool->config.device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return GAI_CALL(pool, set_access, MemSetAccess, ((CUdeviceptr)addr, bytes, &access, 1));
}

/* The batch is mapped: its pages are at home there and count, its blocks are one, still busy. With the lock held. */
static gai_block *gai_batch_publish(galloc_pool *pool, gai_batch *batch)
{
    gai_block *block = batch->first->block;
    gai_mapping *mapping;
    for (mapping = batch->first; mapping; mapping = mapping->next) {
        gai_page *page = mapping->page;
        gai_mapping_show(mapping, 1);
        mapping->standing = 0;
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

/* on_map and on_unmap. Called under `growth`, which is let go around the program's function. Calls pages. */

/* What this thread is in: then it begins no other of the kind, so that they do not go round for ever. */
static GAI_THREAD_LOCAL int gai_in_mapping, gai_in_shortage; /* on_map or on_unmap; on_oom or on_reject */

/* What the thread's call has had to say so far; the callback may call galloc. */
typedef struct gai_saved_message {
    char text[sizeof gai_message];
    int is_new;
} gai_saved_message;

static void gai_callback_begin(int *in, gai_saved_message *saved)
{
    saved->is_new = gai_message_is_new;
    if (saved->is_new) memcpy(saved->text, gai_message, sizeof gai_message);
    gai_message_is_new = 0;
    *in += 1;
}

static void gai_callback_end(int *in, const gai_saved_message *saved)
{
    *in -= 1;
    if (saved->is_new) memcpy(gai_message, saved->text, sizeof gai_message);
    gai_message_is_new = saved->is_new;
}

/* Must galloc make do with what is mapped, since this thread is being told of mappings? */
static int gai_pool_is_still(const galloc_pool *pool)
{
    return gai_in_mapping && (pool->callbacks.on_map || pool->callbacks.on_unmap);
}

/* The same, or must all stay that is mapped, since the program is being told of it? */
static int gai_pool_keeps(const galloc_pool *pool) { return pool->walking || gai_pool_is_still(pool); }

static void gai_pool_tell_all(galloc_pool *pool, const gai_batch *batch,
                              void (*tell)(galloc_pool *pool, void *addr, size_t bytes, void *user))
{
    void *user = pool->callbacks.user;
    const gai_mapping *mapping;
    gai_saved_message saved;
    pool->telling++;
    gai_lock_off(&pool->growth);
    gai_callback_begin(&gai_in_mapping, &saved);
    for (mapping = batch->first; mapping; mapping = mapping->next)
        if (!mapping->standing && mapping->addr) tell(pool->handle, (void *)mapping->addr, mapping->bytes, user);
    gai_callback_end(&gai_in_mapping, &saved);
    gai_lock_on(&pool->growth);
    pool->telling--;
}

/* What is mapped and not published yet. `growth` is let go meanwhile, so it counts as held from here on: others must
   not take it for missing and create as much once more. */
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

/* What is to be unmapped, and is out of sight. Lets `growth` go meanwhile. */
static void gai_pool_tell_unmap(galloc_pool *pool, const gai_batch *batch)
{
    if (batch->first && pool->callbacks.on_unmap) gai_pool_tell_all(pool, batch, pool->callbacks.on_unmap);
}

/* ==== BACKENDS ==================================================================================================== */
/* >>backends */

/* Memory of cudaMalloc and of cudaMallocAsync: fixed segments and what the driver is asked for. Changed under
   `growth`. Calls pages, callbacks. */

/* Makes the driver's pool: the settings are said in its terms. What of them it does not know it leaves out. */
static CUresult gai_driver_pool_new(galloc_pool *pool)
{
    static const struct { CUmemPool_attribute name; int reuse; } ways[] = {
        {CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, GALLOC_REUSE_COMPLETED},
        {CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, GALLOC_REUSE_FOLLOWED},
        {CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, GALLOC_REUSE_WAIT}};
    cuuint64_t threshold = pool->config.release_threshold == SIZE_MAX ? UINT64_MAX : pool->config.release_threshold;
    size_t i;
    CUmemPoolProps properties;
    CUmemoryPool made = NULL;
    CUresult result;
    memset(&properties, 0, sizeof properties);
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = pool->config.device;
#if CUDART_VERSION >= 12020
    if (gai_pool_share(pool) < pool->device_bytes) /* it grows in such steps, and 0 says no limit */
        properties.maxSize = gai_max(gai_down(gai_pool_share(pool), GAI_FIXED_SMALL), GAI_FIXED_SMALL);
#endif
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

#define GAI_NOT_SAID SIZE_MAX

/* How many bytes the driver's pool holds. */
static size_t gai_driver_pool_held(galloc_pool *pool)
{
    cuuint64_t held = 0;
    CUmemPool_attribute name = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    if (!pool->driver_pool) return GAI_NOT_SAID;
    if (GAI_CALL(pool, pool_get, MemPoolGetAttribute, (pool->driver_pool, name, &held))) return GAI_NOT_SAID;
    return (size_t)held;
}

/* The same with a block that has just come from it; a guess where it does not say. */
static size_t gai_driver_pool_held_with(galloc_pool *pool, size_t bytes)
{
    size_t held = gai_driver_pool_held(pool);
    if (held != GAI_NOT_SAID) return held;
    gai_lock_on(&pool->lock);
    held = pool->stats.reserved.current - pool->of_graphs + gai_left(bytes, pool->kept);
    gai_lock_off(&pool->lock);
    return held;
}

/* Asks for it, and notes it. Called with `growth` held. */
static void gai_pool_ask_held(galloc_pool *pool)
{
    size_t held = gai_pool_is_async(pool) ? gai_driver_pool_held(pool) : GAI_NOT_SAID;
    if (held == GAI_NOT_SAID) return;
    gai_lock_on(&pool->lock);
    gai_stat_held(pool, held, 0);
    gai_budget_settle(pool);
    gai_stat_cached(pool);
    gai_lock_off(&pool->lock);
}

/* Calls the driver's pool for a stream, whose context must be current if it is a default stream. */
static CUresult gai_driver_alloc(galloc_pool *pool, CUdeviceptr *addr, size_t bytes, const gai_site *site)
{
    gai_scope scope;
    CUresult result;
    if (!gai_pool_is_async(pool)) return GAI_CALL(pool, mem_alloc, MemAlloc, (addr, bytes));
    if (site->capture_forbids && !site->capture) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    result = pool->driver_pool ? CUDA_SUCCESS : gai_driver_pool_new(pool);
    if (!result) result = gai_scope_enter(&scope, site->context);
    if (result) return result;
    result = GAI_CALL(pool, pool_alloc, MemAllocFromPoolAsync, (addr, bytes, pool->driver_pool, site->handle));
    gai_scope_leave(&scope);
    return result;
}

static CUresult gai_driver_free(galloc_pool *pool, CUdeviceptr addr, const gai_site *site)
{
    gai_scope scope;
    CUresult result;
    if (!gai_pool_is_async(pool)) return GAI_CALL(pool, mem_free, MemFree, (addr));
    result = gai_scope_enter(&scope, site->context);
    if (result) return result;
    result = GAI_CALL(pool, pool_free, MemFreeAsync, (addr, site->handle));
    gai_scope_leave(&scope);
    return result;
}

/* A fixed segment that has no addresses yet: a busy block and a mapping for it. NULL: no host memory. */
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

/* Fetches the memory of a fixed segment. A step that cannot be undone leaves the address in the mapping. */
static CUresult gai_segment_fetch(galloc_pool *pool, gai_segment *segment, size_t bytes, const gai_site *site,
                                  size_t *held)
{
    size_t unit = segment->given ? GAI_UNIT : (size_t)1 << GAI_PAGE_LOG2;
    CUdeviceptr addr = 0;
    CUresult result = gai_driver_alloc(pool, &addr, segment->given ? segment->given : bytes, site);
    if (result) return result;
    segment->whole->addr = (uintptr_t)addr;
    gai_addresses_are_new((uintptr_t)addr, segment->given ? segment->given : bytes);
    if (gai_pool_is_async(pool) && !segment->of_graph) *held = gai_driver_pool_held_with(pool, bytes);
    if (addr % unit) result = CUDA_ERROR_NOT_SUPPORTED;
    else if ((!segment->given && !gai_page_map_need((uintptr_t)addr, bytes)) ||
             !gai_block_map_need((uintptr_t)addr))
        result = GAI_NO_HOST_MEMORY;
    else if (*held && !gai_budget_raise(pool, *held + pool->of_graphs))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result && !gai_driver_free(pool, addr, site)) segment->whole->addr = 0;
    return result;
}

/* A segment of one cudaMalloc, of bytes that were taken from the budget; *block is its busy block. Of another backend:
   of just the bytes that are `given`, which are the stream's at `site` first. */
static CUresult gai_segment_fixed(galloc_pool *pool, size_t bytes, size_t given, const gai_site *site,
                                  gai_block **block)
{
    gai_batch batch;
    CUresult result;
    size_t held = 0;
    gai_segment *segment = gai_segment_new_fixed(pool, bytes);
    if (!segment) {
        if (!gai_pool_is_async(pool) || site->capture) gai_budget_give(pool, bytes);
        return GAI_NO_HOST_MEMORY;
    }
    segment->given = given;
    segment->of_graph = gai_pool_is_async(pool) && site->capture;
    result = gai_segment_fetch(pool, segment, bytes, site, &held);
    gai_lock_on(&pool->lock);
    if (segment->whole->addr) gai_segment_link(pool, segment, segment->whole->addr, bytes);
    segment->whole->page->mappings = segment->whole->addr != 0;
    gai_batch_start(&batch);
    gai_batch_add(&batch, segment->whole, segment->first);
    if (!result) {
        if (segment->of_graph) pool->of_graphs += bytes;
        else if (gai_pool_is_async(pool)) gai_stat_held(pool, held, bytes);
        gai_lock_off(&pool->lock);
        gai_pool_tell_mapped(pool, &batch);
        gai_lock_on(&pool->lock);
        *block = gai_batch_publish(pool, &batch);
        pool->stats.grows++;
        if (gai_pool_is_async(pool)) gai_budget_settle(pool);
    } else if (segment->whole->addr) {
        gai_mapping_quarantine(pool, segment->whole);
        if (gai_pool_is_async(pool)) gai_budget_settle(pool);
    } else {
        if (!gai_pool_is_async(pool) || segment->of_graph) gai_budget_give(pool, bytes);
        if (gai_pool_is_async(pool))
            site->stream->handed = gai_stream_stamp(site->stream); /* it may have been freed on it */
        gai_slab_give(&pool->pages, segment->whole->page);
        gai_slab_give(&pool->mappings, segment->whole);
        gai_segment_end(pool, segment);
    }
    gai_lock_off(&pool->lock);
    return result;
}

static size_t gai_fixed_bytes(const galloc_pool *pool, size_t bytes)
{
    if (bytes <= GAI_MIB) return GAI_FIXED_SMALL;
    return gai_up(bytes < GAI_FIXED_OWN ? pool->config.large_segment_size : bytes, GAI_FIXED_SMALL);
}

/* ==== RELEASE ===================================================================================================== */
/* >>release */

/* Which pages are spare, and how they are given back to the driver. Under `growth`. Calls pages, backends,
   callbacks. */

/* The page at an address of a pool's heap. */
/* What is looked for in free blocks: at least `wanted` bytes of whole pages if possible, never more than `most`. To be
   used by a request, whose stream may have to wait for recorded events; or with no request to be given back. */
typedef struct gai_page_filter {
    const gai_params *params;
    size_t wanted, most;
    int may_wait;
    int one_place;   /* planning: one place is looked at, not all of them */
    uint64_t before; /* to be given back: only pages that have not been used since then, counted in frees */
} gai_page_filter;

/* Is the work done that used a page at its old addresses? */
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

/* May the page under a mapping be had? A page to be given back must be one that nothing which still runs can touch,
   through this address or an old one. */
static int gai_mapping_is_spare(const galloc_pool *pool, const gai_mapping *mapping, const gai_mark *mark,
                                const gai_page_filter *filter)
{
    if (!filter->params && (mapping->page->used > filter->before || !gai_page_is_quiet(mapping->page))) return 0;
    for (; mark; mark = mark->next) {
        if (mark->end <= mapping->addr || mark->begin >= mapping->addr + mapping->bytes) continue;
        if (gai_mark_allows(pool, mark, filter->params ? filter->params->stream : NULL)) continue;
        if (!filter->may_wait || !gai_mark_event(mark)) return 0;
    }
    return 1;
}

/* The last run of whole pages in a free block that serve the page filter: at its high end, since blocks are placed at
   the low one. Returns its length, 0 if there is none. */
static size_t gai_block_spare_pages(const galloc_pool *pool, const gai_block *block, const gai_page_filter *filter,
                                    uintptr_t *begin)
{
    uintptr_t end = 0, at = block->addr + block->bytes;
    size_t bytes = 0;
    if (block->bytes < GAI_FIXED_SMALL) return 0;
    while (at > block->addr && bytes < filter->wanted) {
        const gai_mapping *mapping = gai_page_at(at - 1);
        int fits = mapping->addr >= block->addr && mapping->addr + mapping->bytes <= block->addr + block->bytes;
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

/* Takes the pages of a free block's range out of sight: each gets a busy block, with the marks of its bytes. 0: no
   host memory, nothing changed. With the lock held. */
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

/* The same for a page filter: what a move takes it may have to put back where it was. */
static int gai_spare_to_batch(galloc_pool *pool, gai_block *block, const gai_page_filter *filter, uintptr_t begin,
                              size_t bytes, gai_batch *batch)
{
    if (filter->params && !gai_block_map_need(begin)) return 0;
    return gai_block_to_batch(pool, block, begin, bytes, batch);
}

/* Takes pages out of a set's free blocks, least recently freed first, and takes them off the page filter. With the lock
   held; 0: no host memory for all of them. */
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
            if (!enough) { /* one page then, and the rest when that is gone */
                gai_page_filter one = *filter;
                one.wanted = 1;
                bytes = gai_block_spare_pages(pool, block, &one, &begin);
                if (!gai_spare_to_batch(pool, block, filter, begin, bytes, batch)) return 0;
            }
            filter->wanted -= gai_min(bytes, filter->wanted);
            filter->most -= bytes;
            if (newer && newer->set != set) newer = set->oldest; /* it was merged away */
        }
        block = newer;
    }
    return enough;
}

static void gai_parked_take(galloc_pool *pool, gai_mapping *mapping, gai_page_filter *filter, gai_batch *batch)
{
    gai_alias_remove(pool, mapping);
    mapping->standing = 1;
    gai_batch_add(batch, mapping, mapping->block);
    filter->wanted -= gai_min(mapping->bytes, filter->wanted);
    filter->most -= mapping->bytes;
}

static int gai_parked_serves(const galloc_pool *pool, const gai_mapping *mapping, const gai_page_filter *filter)
{
    return mapping->page->current == mapping && mapping->bytes <= filter->most &&
           gai_mapping_is_spare(pool, mapping, mapping->block->marks, filter);
}

/* The parked page in a room that lies farthest behind its block, which needs it last; NULL: none serves the page
   filter. */
static gai_mapping *gai_parked_farthest(const galloc_pool *pool, const gai_page_filter *filter)
{
    gai_mapping *mapping, *best = NULL;
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (mapping->block->room > (best ? best->block->room : 0) && gai_parked_serves(pool, mapping, filter))
            best = mapping;
    return best;
}

/* Of two lists of mappings in rooms, each with the farthest behind its block first, makes one. */
static gai_mapping *gai_mappings_merge(gai_mapping *a, gai_mapping *b)
{
    gai_mapping *all = NULL, **last = &all;
    while (a && b) {
        gai_mapping **least = b->block->room > a->block->room ? &b : &a;
        *last = *least;
        last = &(*least)->next;
        *least = *last;
    }
    *last = a ? a : b;
    return all;
}

#define GAI_RUNS 64 /* of 1, 2, 4 ... mappings */

/* Parked pages in rooms, the farthest first: to look for the farthest each time would take too long where many are
   wanted. */
static gai_mapping *gai_parked_in_rooms(const galloc_pool *pool)
{
    gai_mapping *runs[GAI_RUNS], *mapping, *all = NULL;
    int i;
    memset(runs, 0, sizeof runs);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer) {
        gai_mapping *run = mapping;
        if (!mapping->block->room || !gai_block_is_parked(mapping->block)) continue;
        run->next = NULL;
        for (i = 0; runs[i]; i++) {
            run = gai_mappings_merge(runs[i], run);
            runs[i] = NULL;
        }
        runs[i] = run;
    }
    for (i = 0; i < GAI_RUNS; i++) all = gai_mappings_merge(runs[i], all);
    return all;
}

/* Takes parked pages, those that have waited longest first, and those in rooms last. */
static void gai_parked_to_batch(galloc_pool *pool, gai_page_filter *filter, gai_batch *batch)
{
    gai_mapping *mapping, *next;
    for (mapping = pool->oldest_alias; mapping && filter->wanted; mapping = next) {
        next = mapping->newer;
        if (!mapping->block->room && gai_parked_serves(pool, mapping, filter))
            gai_parked_take(pool, mapping, filter, batch);
    }
    mapping = filter->wanted && pool->parked ? gai_parked_farthest(pool, filter) : NULL;
    if (!mapping) return;
    gai_parked_take(pool, mapping, filter, batch);
    for (mapping = filter->wanted ? gai_parked_in_rooms(pool) : NULL; mapping && filter->wanted; mapping = next) {
        next = mapping->next;
        if (gai_parked_serves(pool, mapping, filter)) gai_parked_take(pool, mapping, filter, batch);
    }
}

/* The same over all sets: everybody's, the asking stream's own, then all others. */
static void gai_pool_to_batch(galloc_pool *pool, gai_page_filter *filter, gai_batch *batch)
{
    gai_stream *own = filter->params ? filter->params->stream : NULL, *stream;
    gai_block_pool *block_pool;
    int enough;
    gai_parked_to_batch(pool, filter, batch);
    enough = gai_set_to_batch(pool, &pool->common, filter, batch);
    if (enough && own) enough = gai_set_to_batch(pool, &own->free, filter, batch);
    if (enough) enough = gai_set_to_batch(pool, &pool->mixed, filter, batch);
    for (stream = pool->streams; stream && enough; stream = stream->next)
        if (stream != own) enough = gai_set_to_batch(pool, &stream->free, filter, batch);
    for (block_pool = pool->block_pools; block_pool && enough; block_pool = block_pool->next)
        enough = gai_set_to_batch(pool, &block_pool->free, filter, batch);
}

/* The pages of a batch are going to be given back: their old mappings go with them. With the lock held. */
static void gai_batch_add_aliases(galloc_pool *pool, gai_batch *batch)
{
    gai_mapping *mapping, *last = NULL, *alias;
    for (mapping = batch->first; mapping; mapping = mapping->next) last = mapping;
    for (mapping = batch->first; mapping; mapping = mapping->next) {
        mapping->standing = 0;
        gai_mapping_show(mapping, 0);
        mapping->page->current = NULL;
        for (alias = mapping->page->shown; alias; alias = alias->next_shown) {
            if (alias == mapping) continue;
            gai_alias_remove(pool, alias);
            gai_batch_add(batch, alias, alias->block);
        }
        if (mapping == last) break;
    }
}

/* Gives freed blocks of another backend back that no unfinished work may touch, least recently freed first, until
   `wanted` bytes are given or there are no more. */
static void gai_pool_return_given(galloc_pool *pool, size_t wanted)
{
    gai_batch batch;
    gai_block *block, *newer;
    size_t given = 0;
    gai_batch_start(&batch);
    gai_lock_on(&pool->lock);
    for (block = pool->common.oldest; block && given < wanted; block = newer) {
        gai_segment *segment = block->segment;
        newer = block->newer;
        if (block->bytes != segment->bytes) continue; /* beside a used one, for its alignment */
        gai_set_remove(block);
        block->kind = GAI_BUSY;
        segment->whole->page->current = NULL;
        gai_batch_add(&batch, segment->whole, block);
        given += segment->bytes;
    }
    gai_lock_off(&pool->lock);
    gai_batch_undo(pool, &batch);
}

/* The same, and has the driver's pool give back as much. Returns by how much less is held. */
static size_t gai_pool_release_given(galloc_pool *pool, size_t wanted)
{
    size_t before, held, after;
    gai_lock_on(&pool->lock);
    before = pool->stats.reserved.current;
    gai_lock_off(&pool->lock);
    gai_pool_return_given(pool, gai_pool_is_async(pool) ? SIZE_MAX : wanted);
    held = gai_pool_is_async(pool) ? gai_driver_pool_held(pool) : GAI_NOT_SAID;
    if (held != GAI_NOT_SAID) {
        held = held > wanted ? held - wanted : 0;
        gai_pool_note(pool, GAI_CALL(pool, pool_trim, MemPoolTrimTo, (pool->driver_pool, held)));
        gai_pool_ask_held(pool);
    }
    gai_lock_on(&pool->lock);
    after = pool->stats.reserved.current;
    gai_lock_off(&pool->lock);
    return before > after ? before - after : 0;
}

/* Is the block the first of a run, or of what is left of one, whose slots are all free? */
static int gai_run_is_idle(const gai_block *block)
{
    if (!(block->slot & GAI_RUN_FIRST) && block->prev && block->prev->slot) return 0;
    do {
        if (block->kind != GAI_SLOT) return 0;
        block = block->next;
    } while (block && block->slot && !(block->slot & GAI_RUN_FIRST));
    return 1;
}

/* The slots of such a run become free blocks as others are. Returns the last that they are part of. */
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

/* Lets runs whose slots are all free be of use for other sizes. With the lock held. */
static void gai_pool_coalesce(galloc_pool *pool)
{
    gai_segment *segment;
    gai_block *block;
    if (!pool->freed_slots) return;
    pool->freed_slots = 0;
    for (segment = pool->segments; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next)
            if (block->kind == GAI_SLOT && gai_run_is_idle(block)) block = gai_run_coalesce(pool, block);
}

/* Gives pages back that nobody uses and no unfinished work may touch, and that were not used since `before`, until
   `wanted` bytes are given or there are no more; never more than `most`. Returns the bytes given. Lets `growth`
   go while the program is told. */
static size_t gai_pool_release_within(galloc_pool *pool, size_t wanted, size_t most, uint64_t before)
{
    gai_batch batch;
    size_t held, after, given = 0;
    int some;
    if (gai_pool_keeps(pool)) return 0;
    if (pool->config.backend) return gai_pool_release_given(pool, wanted);
    do {
        gai_page_filter filter;
        filter.params = NULL;
        filter.wanted = wanted - given;
        filter.most = most - gai_min(most, given);
        filter.may_wait = 0;
        filter.before = before;
        gai_batch_start(&batch);
        gai_lock_on(&pool->lock);
        gai_pool_coalesce(pool);
        gai_pool_to_batch(pool, &filter, &batch);
        gai_batch_add_aliases(pool, &batch);
        gai_lock_off(&pool->lock);
        some = batch.first != NULL;
        gai_pool_tell_unmap(pool, &batch);
        gai_lock_on(&pool->lock);
        held = pool->stats.reserved.current;
        gai_lock_off(&pool->lock);
        gai_batch_undo(pool, &batch);
        gai_lock_on(&pool->lock);
        after = pool->stats.reserved.current;
        gai_lock_off(&pool->lock);
        given += held - after;
    } while (some && given < wanted);
    return given;
}

static size_t gai_pool_release(galloc_pool *pool, size_t wanted)
{
    return gai_pool_release_within(pool, wanted, SIZE_MAX, UINT64_MAX);
}

/* ==== PARKING ===================================================================================================== */
/* >>parking */

/* Pages that are free as a whole and are kept unmapped from blocks for the next growth; old mappings that are kept
   or dropped. Under `growth`. Calls release, pages. */

/* Puts the pages of donors back where they were: the move did not happen. With the lock held. */
static void gai_donors_restore(galloc_pool *pool, gai_batch *donors)
{
    gai_block *block = NULL;
    while (donors->first) {
        gai_mapping *mapping = donors->first;
        donors->first = mapping->next;
        if (mapping->standing) {
            gai_alias_add(pool, mapping);
            continue;
        }
        gai_mapping_show(mapping, 1);
        if (!block) block = mapping->block;
        else gai_block_absorb(pool, block, mapping->block);
        mapping->block = NULL;
        if (donors->first && !donors->first->standing && donors->first->block == block->next) continue;
        gai_block_show(block);
        (void)gai_block_file(pool, block, 0);
        block = NULL;
    }
}

/* Puts back what is more than needed: pages of up to `surplus` bytes. Returns the bytes put back. The page behind one
   that goes is the first of its run from then on: it needs the map's nodes for the day that it is put back too. */
static size_t gai_donors_trim(galloc_pool *pool, gai_batch *donors, size_t surplus)
{
    gai_batch kept, back;
    size_t bytes = 0;
    gai_mapping *mapping, *next;
    gai_batch_start(&kept);
    gai_batch_start(&back);
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
    if (!kept.first) donors->last = &donors->first;
    gai_donors_restore(pool, &back);
    return bytes;
}

/* The move has happened: the old ranges stay mapped, away from any use. They keep their marks, which say when they can
   be unmapped; whose stream has no event yet is asked for one. With the lock held. */
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

/* The first run of whole pages in a free block, before `end`. Returns its length, 0 if there is none. */
static size_t gai_block_whole_pages(const gai_block *block, uintptr_t end, uintptr_t *begin)
{
    uintptr_t at = block->addr;
    end = gai_min(end, block->addr + block->bytes);
    while (at < end && gai_page_at(at)->addr < at) at = gai_page_at(at)->addr + gai_page_at(at)->bytes;
    *begin = at;
    while (at < end && at + gai_page_at(at)->bytes <= end) at += gai_page_at(at)->bytes;
    return at > end ? 0 : at - *begin;
}

/* Parks pages that were taken out of a free block. Returns the last one's block. Lock held. */
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

/* Takes whole pages out of a free block: they wait where they are to be used there or elsewhere. With the lock
   held. */
static gai_block *gai_block_park(galloc_pool *pool, gai_block *block, uintptr_t end)
{
    uintptr_t begin;
    size_t bytes = gai_block_whole_pages(block, end, &begin);
    gai_batch batch;
    gai_batch_start(&batch);
    if (!bytes || !gai_block_to_batch(pool, block, begin, bytes, &batch)) return block->next;
    return gai_batch_park(pool, &batch)->next;
}

static int gai_mapping_is_within(const galloc_pool *pool, const gai_mapping *mapping, const gai_block *block)
{
    return block && gai_load_pointer(&block->pool) == pool && block->kind == GAI_FREE &&
           block->addr <= mapping->addr && block->addr + block->bytes >= mapping->addr + mapping->bytes;
}

/* The same for what a block with room has left: the pages wait there for the next one, whose room takes them in, those
   that it will need last for others first. The free block is looked up once: the next page is before the one that was
   cut out of it. */
static void gai_pool_park_room(galloc_pool *pool, uintptr_t begin, uintptr_t end)
{
    gai_block *block = NULL;
    while (begin < end) {
        gai_mapping *mapping = gai_page_at(end - 1);
        gai_batch batch;
        if (!mapping || mapping->block || mapping->addr < begin) return; /* all are parked already, or none is here */
        end = mapping->addr;
        if (!block) block = gai_block_before(end);
        gai_batch_start(&batch);
        if (gai_mapping_is_within(pool, mapping, block) && gai_block_to_batch(pool, block, end, mapping->bytes, &batch))
            block = gai_batch_park(pool, &batch)->prev;
        else
            block = NULL;
    }
}

/* Merges the blocks of a set with free neighbours of other sets, whoever gave those up. */
static void gai_set_join(galloc_pool *pool, gai_set *set)
{
    gai_block *block, *newer;
    for (block = set->oldest; block; block = newer) {
        const gai_block *first = block, *last = block;
        newer = block->newer;
        if (block->kind == GAI_SLOT) continue;
        while (first->prev && first->prev->kind == GAI_FREE) first = first->prev;
        while (last->next && last->next->kind == GAI_FREE) last = last->next;
        if (first == last || !gai_block_partner(pool, block, 1)) continue; /* a graph's merge with none */
        while (newer && newer->addr >= first->addr && newer->addr <= last->addr) newer = newer->newer;
        gai_set_remove(block);
        (void)gai_block_file(pool, block, 1);
    }
}

/* Under pressure free neighbours of different streams are put together, since whoever takes them now will wait
   anyway. Those with the marks of one stream are together already, so that one stream's set can be left out: the
   largest. What has no marks merges with all in any case. */
static void gai_pool_join(galloc_pool *pool)
{
    const gai_set *largest = &pool->mixed;
    gai_stream *stream;
    gai_pool_coalesce(pool);
    for (stream = pool->streams; stream; stream = stream->next)
        if (largest == &pool->mixed || stream->free.bytes > largest->bytes) largest = &stream->free;
    gai_set_join(pool, &pool->mixed);
    for (stream = pool->streams; stream; stream = stream->next)
        if (largest != &stream->free) gai_set_join(pool, &stream->free);
}

/* A program that repeats itself goes through the same requests again and again. If it finds the heap each time as it
   was the time before, each request is served as it was then, and pages that had to move come back to old mappings:
   no call into the driver is left. So when nothing is live, pages are parked: taken out of the bins, to be used again
   in the order in which they were mapped first. Each time a page is taken up again costs a plan, so it is not done for
   its own sake: not again once it has been done some times in a row with no page mapped in between, until one is. */
static int gai_pool_should_park(galloc_pool *pool)
{
    const gai_parking *parking = &pool->parking;
    if (!pool->config.expandable_segments) return 0;
    return (parking->mapped || parking->calm < parking->patience) && !gai_pool_live(pool);
}

/* Parks all pages that are free as a whole. Streams that have not marked what they freed last are asked to. */
static void gai_pool_park(galloc_pool *pool)
{
    gai_parking *parking = &pool->parking;
    gai_segment *segment;
    gai_block *block, *next;
    gai_stream *stream;
    gai_pool_flush(pool);
    gai_pool_join(pool);
    for (segment = pool->segments; segment; segment = segment->next) {
        if (segment->fixed) continue;
        for (block = segment->first; block; block = next) {
            next = block->kind == GAI_FREE ? gai_block_park(pool, block, UINTPTR_MAX) : block->next;
        }
    }
    for (stream = gai_pool_has_one_stream(pool) ? NULL : pool->streams; stream; stream = stream->next)
        if (gai_stream_unmarked(stream)) gai_stream_ask(stream);
    if (parking->mapped && parking->calm >= parking->patience) parking->patience *= 2;
    parking->calm = parking->mapped ? 0 : parking->calm + 1;
    parking->mapped = 0;
}

/* Lets parked pages between two addresses be free blocks again, of which streams may have parts by the marks of their
   bytes; but not those in rooms. */
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

/* Old mappings and addresses in all that are kept, in parts of the memory held, and how many mappings at most, unless
   there are many pages. More spare no more calls, and each costs some host memory, and some time in every plan. */
#define GAI_OLD_KEPT 8
#define GAI_OLD_MAX 2048
#define GAI_ADDRESSES_KEPT 12

/* Unmaps old ranges between two addresses until no more than `keep` bytes and `most` ranges are left, those first that
   were left first; where the work that used them is not known to be done they stay. Never waits. Lets `growth` go
   while the program is told. */
static void gai_pool_drop_old(galloc_pool *pool, uintptr_t begin, uintptr_t end, size_t keep, size_t most)
{
    gai_batch batch;
    gai_mapping *mapping, *newer;
    if (gai_pool_keeps(pool)) return;
    gai_batch_start(&batch);
    gai_lock_on(&pool->lock);
    for (mapping = pool->oldest_alias; mapping && (pool->stats.leaving > keep || pool->old > most); mapping = newer) {
        newer = mapping->newer;
        gai_marks_prune(pool, &mapping->block->marks);
        if (mapping->page->current == mapping || mapping->block->marks) continue;
        if (mapping->addr >= end || mapping->addr + mapping->bytes <= begin) continue;
        gai_alias_remove(pool, mapping);
        gai_batch_add(&batch, mapping, mapping->block);
    }
    gai_lock_off(&pool->lock);
    gai_pool_tell_unmap(pool, &batch);
    gai_batch_undo(pool, &batch);
}

static void gai_pool_limit_old(galloc_pool *pool)
{
    /* A program that repeats itself comes back to all of them in turn: with a few less than it needs, each would go
       just before it is wanted, pass after pass. How many it needs grows with its pages. */
    size_t held, pages = 0;
    int i;
    gai_lock_on(&pool->lock);
    held = pool->stats.reserved.current;
    for (i = 0; i < GALLOC_PAGE_SIZES; i++) pages += pool->stats.pages[i].count;
    gai_lock_off(&pool->lock);
    gai_pool_drop_old(pool, 0, UINTPTR_MAX, held > SIZE_MAX / GAI_OLD_KEPT ? SIZE_MAX : GAI_OLD_KEPT * held,
                      gai_max(GAI_OLD_MAX, pages + pages / 2));
}

/* Tries again what the driver refused to undo. */
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

/* ==== TORCH ===================================================================================================== */
/* >>torch */

/* What PyTorch's caching allocator does (c10/cuda/CUDACachingAllocator.cpp), as far as it is another thing than
   galloc's own: how requests are rounded, and with like:pytorch how blocks are chosen, cut, collected. */

#define GAI_TORCH_SMALL GAI_MIB  /* requests up to here, rounded, get small segments */
#define GAI_TORCH_REMAINS GAI_MIB /* no more than this stays with a block of a large segment */

#define GAI_SLOT_DIVISIONS 8

/* Classes between two powers of two. With more than there are bins, two of them would share one. */
static size_t gai_slot_divisions(const galloc_config *config)
{
    unsigned divisions = config->roundup_power2_divisions[0];
    return divisions < 2 ? GAI_SLOT_DIVISIONS : gai_min(divisions, GAI_COLUMNS);
}

/* Bytes that are held for a request: between two powers of two in so many steps as are set for its size. */
static size_t gai_rounded(const galloc_pool *pool, size_t bytes)
{
    size_t divisions;
    int at;
    if (bytes <= gai_counted(&pool->plain) || bytes > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_up(bytes, GAI_UNIT);
    at = gai_log2(bytes) - 20;
    divisions = at < 1 ? (size_t)gai_counted(&pool->tuning.divisions)
                       : pool->config.roundup_power2_divisions[gai_min((size_t)at, GALLOC_DIVISIONS - 1)];
    if (pool->pooled && bytes <= GAI_SLOT_MOST) divisions = gai_slot_divisions(&pool->config);
    return gai_up_by_steps(bytes, divisions);
}

/* Up to here rounding is to 512 bytes only. */
static uint64_t gai_rounded_plainly(const galloc_pool *pool)
{
    uint64_t plain = pool->pooled ? GAI_UNIT * gai_slot_divisions(&pool->config) : SIZE_MAX, divisions;
    int i;
    if (pool->config.backend) return SIZE_MAX;
    for (i = 0; i < GALLOC_DIVISIONS; i++) {
        divisions = i ? pool->config.roundup_power2_divisions[i] : pool->tuning.divisions;
        if (divisions > 1 && GAI_UNIT * divisions < plain) plain = GAI_UNIT * divisions;
    }
    return plain;
}

/* What follows of the settings for rounding. */
static void gai_pool_choose_rounding(galloc_pool *pool)
{
    gai_set_relaxed(&pool->plain, gai_rounded_plainly(pool));
    pool->special = pool->torch || pool->oversize   ? GAI_ROUTE_LONG
                    : pool->pooled                  ? GAI_ROUTE_SLOTS
                    : pool->plain != SIZE_MAX       ? GAI_ROUTE_ROUNDED
                                                    : 0;
}

/* The largest block that a stream cache may have; with several streams that is 2 MiB. Where streams are not looked at,
   a stream cache is asked about any size: it alone knows whether its stream was retired. */
static uint64_t gai_cache_reach(const galloc_pool *pool)
{
    uint64_t lane_bytes = gai_counted(&pool->tuning.lane_bytes);
    return pool->config.stream_check ? gai_max((size_t)lane_bytes, GAI_MARK_BYTES) : SIZE_MAX;
}

/* May a request take the block, which is the smallest that it fits in? Blocks of max_split_size and more are kept for
   requests of that size and more, and these take one only if it is hardly larger. */
static int gai_block_may_serve(const galloc_pool *pool, const gai_block *block, size_t bytes)
{
    size_t rounding = pool->config.max_non_split_rounding;
    if (!rounding) rounding = pool->config.large_segment_size;
    if (!gai_pool_is_oversize(pool, bytes)) return !gai_pool_is_oversize(pool, block->bytes);
    return block->bytes < bytes || block->bytes - bytes < rounding;
}

/* The smallest block in which the request has a place, of equals the one with the lowest address: that of PyTorch's
   trees. Whole bins are looked through. */
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

/* Bytes that the request gets of a block, from its place to where the block is cut, if it is. */
static size_t gai_block_pool_cut(const galloc_pool *pool, const gai_block *block, uintptr_t at,
                                 const gai_params *params)
{
    size_t all = block->addr + block->bytes - at, remains = all - params->bytes;
    if (params->small) return remains >= GAI_UNIT ? params->bytes : all;
    return remains > GAI_TORCH_REMAINS && !gai_pool_is_oversize(pool, params->bytes) ? params->bytes : all;
}

/* The smallest segment that is free as a whole, of no stream any more, and of no graph; its work is done. */
static gai_block *gai_pool_find_homeless(const galloc_pool *pool, const gai_params *params)
{
    const gai_block_pool *block_pool;
    gai_block *best = NULL, *block;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        if (block_pool->streams || block_pool->captured || block_pool->small != params->small) continue;
        for (block = block_pool->free.oldest; block; block = block->newer)
            if (gai_block_is_whole(block) && !block->marks && gai_is_better(block, best) &&
                gai_place(block->addr, block->addr + block->bytes, params))
                best = block;
    }
    return best;
}

/* A free segment moves. Lock held. */
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

/* Has somebody who is not at home there used free memory, so that to ask whether he has done might gain it? */
static int gai_pool_awaits(const galloc_pool *pool)
{
    const gai_stream *stream = pool->mixed.oldest ? pool->streams : NULL;
    while (stream && !stream->recorded) stream = stream->next;
    return stream != NULL;
}

/* A block is the program's. */
static void gai_torch_count_used(galloc_pool *pool, const gai_block *block)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    int small = block->segment->block_pool->small;
    gai_torch_add(&stats->allocation, small, 1, 1);
    gai_torch_add(&stats->active, small, 1, 1);
    gai_torch_add(&stats->allocated_bytes, small, block->bytes, 1);
    gai_torch_add(&stats->active_bytes, small, block->bytes, 1);
    gai_torch_add(&stats->requested_bytes, small, (size_t)block->requested, 1);
    if (gai_pool_is_oversize(pool, block->bytes)) gai_torch_add_one(&stats->oversize_allocations, 1, 1);
}

static void gai_torch_count_wait(galloc_pool *pool)
{
    gai_lock_on(&pool->lock);
    pool->torch_stats.num_sync_all_streams++;
    gai_lock_off(&pool->lock);
}

static void gai_torch_change(galloc_torch_stat *stat, int small, size_t before, size_t now)
{
    if (now > before) gai_torch_add(stat, small, now - before, 1);
    else gai_torch_subtract(stat, small, before - now);
}

/* A used block has changed its size. */
static void gai_torch_count_resized(galloc_pool *pool, const gai_block *block, size_t bytes, size_t requested)
{
    galloc_torch_stats *stats = &pool->torch_stats;
    int small = pool->torch ? block->segment->block_pool->small : 0;
    if (!pool->torch) return;
    gai_torch_change(&stats->allocated_bytes, small, bytes, block->bytes);
    gai_torch_change(&stats->active_bytes, small, bytes, block->bytes);
    gai_torch_change(&stats->requested_bytes, small, requested, (size_t)block->requested);
    if (gai_pool_is_oversize(pool, bytes)) stats->oversize_allocations.current--;
    if (gai_pool_is_oversize(pool, block->bytes)) gai_torch_add_one(&stats->oversize_allocations, 1, 0);
}

/* ---- collecting ---- */

/* Time is counted in searches: so long has a free segment not been wanted. */
static double gai_segment_age(const galloc_pool *pool, const gai_segment *segment)
{
    return (double)(pool->searches[0] - segment->searches);
}

/* Large segments that are free as a whole are collected, but for those of graphs. */
static int gai_block_pool_is_collected(const gai_block_pool *block_pool)
{
    return !block_pool->small && !block_pool->captured;
}

typedef struct gai_ages {
    double sum;
    size_t count;
} gai_ages;

/* The ages of what can be collected. */
static gai_ages gai_pool_ages(const galloc_pool *pool)
{
    gai_ages ages = {0, 0};
    const gai_block_pool *block_pool;
    const gai_block *block;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        for (block = gai_block_pool_is_collected(block_pool) ? block_pool->free.oldest : NULL; block;
             block = block->newer) {
            if (!gai_block_is_whole(block) || block->marks) continue;
            ages.sum += gai_segment_age(pool, block->segment);
            ages.count++;
        }
    }
    return ages;
}

/* Takes a free segment out of sight, to be given back; 0: no host memory. Lock held. */
static int gai_whole_to_batch(galloc_pool *pool, gai_block *block, gai_batch *batch)
{
    return gai_block_to_batch(pool, block, block->addr, block->bytes, batch);
}

/* Takes all that is as old as the mean or older. It does not stop when that is enough, so that it is not soon needed
   again. Returns the bytes taken. Lock held. */
static size_t gai_pool_collect_older(galloc_pool *pool, gai_ages *ages, gai_batch *batch)
{
    double least = ages->sum / (double)ages->count;
    gai_block_pool *block_pool;
    gai_block *block, *newer;
    size_t taken = 0;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next) {
        for (block = gai_block_pool_is_collected(block_pool) ? block_pool->free.oldest : NULL; block; block = newer) {
            double age = gai_segment_age(pool, block->segment);
            size_t bytes = block->bytes;
            newer = block->newer;
            if (!gai_block_is_whole(block) || block->marks || age < least) continue;
            if (!gai_whole_to_batch(pool, block, batch)) return 0;
            taken += bytes;
            ages->sum -= age;
            ages->count--;
        }
    }
    return taken;
}

/* Gives old segments back until `wanted` bytes are, if so many can be had. */
static void gai_torch_collect(galloc_pool *pool, size_t wanted)
{
    gai_batch batch;
    gai_ages ages;
    size_t taken = 0, more;
    if (gai_pool_keeps(pool)) return;
    gai_batch_start(&batch);
    gai_lock_on(&pool->lock);
    ages = gai_pool_ages(pool);
    while (taken < wanted && ages.count && (more = gai_pool_collect_older(pool, &ages, &batch)) != 0) taken += more;
    gai_batch_add_aliases(pool, &batch);
    gai_lock_off(&pool->lock);
    gai_pool_tell_unmap(pool, &batch);
    gai_batch_undo(pool, &batch);
}

/* The smallest segment of a home that is free as a whole, has no less than `bytes`, and whose work is done; with
   `largest` the largest that has no less. */
static gai_block *gai_block_pool_whole(const gai_block_pool *block_pool, size_t bytes, int largest)
{
    gai_block *best = NULL, *block;
    for (block = block_pool->free.oldest; block; block = block->newer) {
        if (!gai_block_is_whole(block) || block->marks || block->bytes < bytes) continue;
        if (!best || (largest ? block->bytes > best->bytes : gai_is_better(block, best))) best = block;
    }
    return best;
}

/* Gives segments of max_split_size and more back, which requests below that size cannot use: one that has the bytes
   wanted, or else the largest one after the other. */
static void gai_block_pool_release_oversize(galloc_pool *pool, const gai_block_pool *block_pool, size_t bytes)
{
    gai_batch batch;
    gai_block *block;
    size_t wanted = gai_max(bytes, pool->config.max_split_size), taken = 0;
    if (gai_pool_keeps(pool)) return;
    gai_batch_start(&batch);
    gai_lock_on(&pool->lock);
    block = gai_block_pool_whole(block_pool, wanted, 0);
    if (!block) block = gai_block_pool_whole(block_pool, pool->config.max_split_size, 1);
    while (block && taken < wanted) {
        size_t more = block->bytes;
        if (!gai_whole_to_batch(pool, block, &batch)) break;
        taken += more;
        block = gai_block_pool_whole(block_pool, pool->config.max_split_size, 1);
    }
    gai_batch_add_aliases(pool, &batch);
    gai_lock_off(&pool->lock);
    gai_pool_tell_unmap(pool, &batch);
    gai_batch_undo(pool, &batch);
}

/* ==== USERS ======================================================================================================= */
/* >>users */

/* Calls that are in a pool, which keep it from ending; handles of pools; resets of its context. Lock-free, by
   pool->users. Calls streams. */

/* The call, 1 or GAI_PASSING, is in whatever pool this is now, which does not end before it is out. 0: there is
   none. */
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

/* From the program's handle to the pool, in which the call is from then on. */
static cudaError_t gai_pool_find(galloc_pool **pool)
{
    galloc_pool *at = (galloc_pool *)gai_load_pointer(&gai_known_pools);
    while (at && (uintptr_t)*pool - (uintptr_t)at >= sizeof *at) at = (galloc_pool *)at->known;
    if (at && gai_pool_pin(at)) {
        int same = at->handle == *pool;
        if (same) *pool = at;
        if (same) return cudaSuccess;
        gai_pool_unpin(at);
    }
    return gai_pool_is_gone(*pool);
}

/* After cudaDeviceReset the primary context is another one at the same address. Pages and mappings survive that; what
   cudaMalloc gave does not. */
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
    gai_store(&pool->broken, 0);
    gai_pool_lose_context(pool);
    gai_lock_off(&pool->lock);
    return cudaSuccess;
}

/* With the growth lock held, makes the pool's context current, and has all stream caches show what they hold. On
   failure neither is so, and the lock is let go. */
static cudaError_t gai_pool_enter_locked(galloc_pool *pool, gai_scope *scope)
{
    CUresult result;
    cudaError_t error = gai_pool_check_context(pool);
    if (!error) {
        result = gai_scope_enter(scope, pool->context);
        if (result) error = gai_driver_failed(result, "cuCtxPushCurrent");
    }
    if (error) {
        gai_lock_off(&pool->growth);
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

static cudaError_t gai_pool_enter(galloc_pool *pool, gai_scope *scope)
{
    gai_lock_on(&pool->growth);
    return gai_pool_enter_locked(pool, scope);
}

/* ==== COLLECTION ================================================================================================== */
/* >>collection */

/* Idle memory that is given back for gc_threshold and gc_age. Under `growth`. Calls release. */

/* Above gc_threshold, or after gc_age with no use, free pages are given back, those first that were not used for
   longest, if nothing that still runs can touch them: nobody waits and no stream is held up. Fixed segments are left
   alone, since cudaFree waits for the device.
   Age: a free notes its number in the pages that it was in, and now and then it is noted how many frees there had been
   at what time. What was used last before a sample that is gc_age old is that old itself.
   Threshold: down to a little less than where it begins. It rests for some frees then, and for longer each time that
   half of what it gave back was soon created again: so a program that breathes is not made to pay for each breath. */
#define GAI_COLLECT_BELOW 16 /* down to a 16th below gc_threshold */
#define GAI_COLLECT_SOON 10000000000u /* 10 s */
#define GAI_REST_LEAST 64
#define GAI_REST_MOST ((uint64_t)1 << 20)
#define GAI_SAMPLE_LEAST 1000000u /* 1 ms from one sample to the next */
#define GAI_STRIDE_MOST 16

static int gai_pool_has_age(const galloc_pool *pool) { return pool->config.gc_age != UINT64_MAX; }

/* What may be held before collection begins. */
static size_t gai_pool_threshold(const galloc_pool *pool)
{
    if (!pool->collects || !(pool->config.gc_threshold > 0)) return SIZE_MAX;
    return (size_t)(pool->config.gc_threshold * (double)gai_pool_capacity(pool));
}

/* Bytes held above what is left by a collection, when one is due. Lock held. */
static size_t gai_pool_excess(const galloc_pool *pool)
{
    size_t held = pool->stats.reserved.current, begin = gai_pool_threshold(pool);
    if (held <= begin || pool->clock < pool->collector.rest) return 0;
    return held - (begin - begin / GAI_COLLECT_BELOW);
}

/* Notes the time, and returns the number of the last free that is known to be gc_age old. Lock held. */
static uint64_t gai_pool_aged(galloc_pool *pool, uint64_t now)
{
    gai_collector *collector = &pool->collector;
    uint64_t age = pool->config.gc_age, aged = 0, i;
    const gai_sample *last = &collector->samples[(collector->sampled + GAI_SAMPLES - 1) % GAI_SAMPLES];
    if (!gai_pool_has_age(pool)) return 0;
    for (i = 0; i < GAI_SAMPLES && i < collector->sampled; i++) {
        const gai_sample *sample = &collector->samples[i];
        if (now >= sample->ns && now - sample->ns >= age && sample->frees > aged) aged = sample->frees;
    }
    if (!collector->sampled || now - last->ns >= age / (GAI_SAMPLES / 2) + GAI_SAMPLE_LEAST) {
        gai_sample *next = &collector->samples[collector->sampled++ % GAI_SAMPLES];
        next->frees = pool->clock;
        next->ns = now;
    }
    return aged;
}

static void gai_page_list(gai_page *page, gai_page **list)
{
    page->next_unused = *list; /* in use, it is free for this */
    *list = page;
}

static void gai_set_list_spare(const galloc_pool *pool, const gai_set *set, const gai_page_filter *filter,
                               gai_page **list)
{
    const gai_block *block;
    for (block = set->oldest; block; block = block->newer) {
        uintptr_t begin, at;
        size_t bytes = block->bytes < GAI_FIXED_SMALL ? 0 : gai_block_whole_pages(block, UINTPTR_MAX, &begin);
        for (at = bytes ? begin : 0; bytes && at < begin + bytes;) {
            gai_mapping *mapping = gai_page_at(at);
            at += mapping->bytes;
            if (gai_mapping_is_spare(pool, mapping, block->marks, filter)) gai_page_list(mapping->page, list);
        }
    }
}

/* The pages that may be given back, in no order. Lock held. */
static gai_page *gai_pool_list_spare(const galloc_pool *pool, const gai_page_filter *filter)
{
    gai_page *list = NULL;
    const gai_stream *stream;
    const gai_mapping *mapping;
    gai_set_list_spare(pool, &pool->common, filter, &list);
    gai_set_list_spare(pool, &pool->mixed, filter, &list);
    for (stream = pool->streams; stream; stream = stream->next) gai_set_list_spare(pool, &stream->free, filter, &list);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (mapping->page->current == mapping && gai_mapping_is_spare(pool, mapping, mapping->block->marks, filter))
            gai_page_list(mapping->page, &list);
    return list;
}

/* By their last use, the oldest first: lists of one, two, four ... pages that are merged as they come. */
static gai_page *gai_pages_merge(gai_page *a, gai_page *b)
{
    gai_page *merged = NULL, **at = &merged;
    while (a && b) {
        gai_page **least = a->used <= b->used ? &a : &b;
        *at = *least;
        at = &(*at)->next_unused;
        *least = *at;
    }
    *at = a ? a : b;
    return merged;
}

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

/* Gives back up to `excess` bytes of the pages that were not used for longest, but leaves `leave` bytes of spare
   pages: those can move to where they are wanted. */
static size_t gai_pool_collect_oldest(galloc_pool *pool, size_t excess, size_t leave)
{
    gai_page_filter filter;
    gai_page *list, *page;
    size_t spare = 0, chosen = 0;
    uint64_t before = 0;
    filter.params = NULL;
    filter.wanted = filter.most = SIZE_MAX;
    filter.may_wait = filter.one_place = 0;
    filter.before = UINT64_MAX;
    gai_lock_on(&pool->lock);
    list = gai_pages_sort(gai_pool_list_spare(pool, &filter));
    for (page = list; page; page = page->next_unused) spare += page->bytes;
    spare = gai_left(spare, leave);
    for (page = list; page && chosen + page->bytes <= spare; page = page->next_unused) {
        if (chosen && chosen + page->bytes > excess) break;
        chosen += page->bytes;
        before = page->used;
    }
    gai_lock_off(&pool->lock);
    return chosen ? gai_pool_release_within(pool, chosen, chosen, before) : 0;
}

/* How long it rests after a collection above the threshold. Lock held. */
static void gai_collector_rest(galloc_pool *pool, size_t given, uint64_t now)
{
    gai_collector *collector = &pool->collector;
    uint64_t rest = GAI_STRIDE_MOST; /* what was free is perhaps not known to be done with yet */
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

/* Has streams record an event at their next call: one stream alone never does, and then nothing is known to be done
   with. Not the legacy stream, where that makes blocking streams wait for each other, unless there is no other. Lock
   held. */
static void gai_pool_ask_streams(galloc_pool *pool)
{
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next)
        if (gai_stream_unmarked(stream) && (stream->handle != CU_STREAM_LEGACY || gai_pool_has_one_stream(pool)))
            gai_stream_ask(stream);
}

/* Gives back what is due; `leave`: bytes that are about to be asked for. Never waits. With `growth` held, in the pool's
   scope. */
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

/* The next look: soon if a sample was taken late. Lock held. */
static void gai_collector_stride(galloc_pool *pool, uint64_t now)
{
    gai_collector *collector = &pool->collector;
    uint64_t step = pool->config.gc_age / (GAI_SAMPLES / 2) + GAI_SAMPLE_LEAST;
    uint64_t last = collector->samples[(collector->sampled + GAI_SAMPLES - 1) % GAI_SAMPLES].ns;
    collector->stride = gai_min(2 * collector->stride, GAI_STRIDE_MOST);
    if (gai_pool_has_age(pool) && now - last > step) collector->stride = 1;
    collector->look = pool->clock + collector->stride;
}

/* With the growth lock held, which is let go. */
static void gai_pool_collect_due(galloc_pool *pool)
{
    gai_scope scope;
    if (gai_pool_enter_locked(pool, &scope)) {
        gai_message_is_new = 0; /* the free has succeeded all the same */
        return;
    }
    gai_pool_collect(pool, 0);
    gai_lock_on(&pool->lock);
    gai_stat_cached(pool);
    gai_lock_off(&pool->lock);
    gai_scope_leave(&scope);
    gai_lock_off(&pool->growth);
}

/* A free has come to the pool, and it is time to look whether something is due. Where another thread has the growth
   lock, nobody waits for it. The free is over: the pool may have ended. */
GAI_APART
static void gai_pool_tend(galloc_pool *pool)
{
    uint64_t now = GALLOC_CLOCK();
    int due;
    if (!gai_pool_pin(pool)) return;
    gai_lock_on(&pool->lock);
    gai_collector_stride(pool, now);
    due = gai_pool_aged(pool, now) > pool->collector.aged || gai_pool_excess(pool);
    gai_lock_off(&pool->lock);
    if (due && !gai_load(&pool->broken) && gai_lock_try(&pool->growth)) gai_pool_collect_due(pool);
    gai_pool_unpin(pool);
}

/* ==== SEARCH ====================================================================================================== */
/* >>search */

/* Which free block serves a request. Under the pool's lock. Calls bins, marks, take. */

/* One allocation, or the growth of a block where it stands, on its way through the heap. */
typedef struct gai_job {
    galloc_pool *pool;
    gai_params params;      /* of a growth: what it lacks, see gai_job_look */
    gai_site site;
    gai_block *got;     /* from here on a new job is cleared */
    void *grows;        /* the block that is to become grow_to bytes long where it stands; NULL: an allocation */
    size_t grow_to;
    int frugal;         /* create no more than the overhead allows */
    int thrifty;        /* and leave some of that for times when more is live than ever before */
    int may_wait;       /* pages may come from streams that the asking one then waits for */
    int waited;         /* waits were queued for it */
    int grown;          /* times that pages were created or moved for it */
    int searched;       /* like:pytorch: its searches count as one */
    int asked;          /* and it has been asked who has done with what */
    cudaError_t error;  /* set: the end, whatever was not tried yet */
    CUresult saved;      /* by the driver, when it refused memory */
    const char *who;
    uint64_t waited_ns; /* on the host, for events, where that is limited */
    const char *left_out; /* why the step of the ladder that is under way was not taken */
    int rejected;       /* refused with no more tried than costs nothing */
    int reported;       /* it was refused for want of memory, and there is a report */
} gai_job;

static int gai_job_is_done(const gai_job *job) { return job->got || job->error; }

/* What a search may look at, from cheap to costly. */
enum gai_reach {
    GAI_REACH_OWN, /* the stream's own blocks, everybody's, and those of streams that CUDA keeps in order with it */
    GAI_REACH_ALL  /* any part of any block whose marks allow it */
};

typedef struct gai_found {
    gai_block *block;
    uintptr_t at;
} gai_found;

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

/* The best of what the stream state may have at once, where every block that is large enough will do. */
static GAI_INLINE gai_block *gai_find_plain(const galloc_pool *pool, const gai_stream *stream, size_t bytes)
{
    gai_bin bin = gai_bin_of(bytes);
    gai_block *best = stream ? gai_set_find_plain(&stream->free, bin, bytes) : NULL, *block;
    const gai_stream *other;
    if (best && best->bytes == bytes) return best; /* none can be better */
    block = gai_set_find_plain(&pool->common, bin, bytes);
    if (block && gai_is_better(block, best)) best = block;
    if (!stream || !stream->blocking) return best;
    for (other = pool->streams; other; other = other->next) {
        if (other == stream || !gai_stream_is_ordered(stream, other)) continue;
        block = gai_set_find_plain(&other->free, bin, bytes);
        if (block && gai_is_better(block, best)) best = block;
    }
    return best;
}

/* A slot that the stream state may have at once; the one that was freed last. */
static gai_block *gai_find_slot(galloc_pool *pool, gai_stream *stream, size_t bytes)
{
    gai_bin bin = gai_bin_of(bytes);
    gai_block *block = stream ? *gai_slot_bin(&stream->free, bin) : NULL;
    gai_stream *other;
    if (!block) block = *gai_slot_bin(&pool->common, bin);
    if (block || !stream || !stream->blocking) return block;
    for (other = pool->streams; other && !block; other = other->next)
        if (other != stream && gai_stream_is_ordered(stream, other)) block = *gai_slot_bin(&other->free, bin);
    return block;
}

static gai_found gai_find_own(galloc_pool *pool, const gai_params *params)
{
    gai_found best = {NULL, 0};
    gai_stream *stream;
    if (params->slot) best.block = gai_find_slot(pool, params->stream, params->bytes);
    if (best.block) {
        best.at = best.block->addr;
        return best;
    }
    if (params->alignment <= GAI_UNIT) {
        best.block = gai_find_plain(pool, params->stream, params->bytes);
        if (best.block) best.at = gai_place(best.block->addr, best.block->addr + best.block->bytes, params);
        return best;
    }
    if (params->stream) gai_found_in_set(&best, &params->stream->free, params);
    if (best.block && best.block->bytes == params->bytes) return best;
    gai_found_in_set(&best, &pool->common, params);
    if (!params->stream || !params->stream->blocking) return best;
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream != params->stream && gai_stream_is_ordered(params->stream, stream))
            gai_found_in_set(&best, &stream->free, params);
    return best;
}

#define GAI_SCAN 256 /* blocks of a set, oldest first, whose marks are looked at one by one */

static int gai_block_is_for(const gai_block *block, const gai_params *params)
{
    if (block->kind == GAI_SLOT) return params->slot && block->bytes == params->bytes;
    return block->bytes >= params->bytes;
}

static void gai_found_by_marks(gai_found *best, const galloc_pool *pool, const gai_set *set, const gai_params *params,
                               int may_wait)
{
    gai_block *block = set->oldest;
    int looks;
    for (looks = 0; block && looks < GAI_SCAN; looks++, block = block->newer)
        if (gai_block_is_for(block, params)) gai_found_add(best, block, gai_block_place(pool, block, params, may_wait));
}

static gai_found gai_find_all(galloc_pool *pool, const gai_params *params, int may_wait)
{
    gai_found best = gai_find_own(pool, params);
    gai_stream *stream;
    if (best.block) return best;
    gai_found_by_marks(&best, pool, &pool->mixed, params, may_wait);
    for (stream = pool->streams; stream; stream = stream->next)
        gai_found_by_marks(&best, pool, &stream->free, params, may_wait);
    return best;
}

static void gai_job_took(gai_job *job, gai_block *block)
{
    job->got = block;
    if (!block) job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for the description of a block");
}

/* A run: so many slots, and no more bytes. Measured: docs/design.md. */
#define GAI_RUN_SLOTS 16
#define GAI_RUN_BYTES GAI_MIB

/* How many slots are cut at once from `at` on; host memory for them is made sure of. 0: there is none. */
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

/* Gives a slot to the program: a free one, or the first of a run that is cut out of a free block. NULL: no host
   memory, nothing changed. */
static gai_block *gai_slot_take(galloc_pool *pool, gai_block *block, uintptr_t at, const gai_params *params)
{
    size_t i, n;
    uint64_t freed_slots = pool->freed_slots;
    if (block->kind == GAI_SLOT) return gai_block_take(pool, block, at, params);
    n = gai_run_need(pool, block, at, params->bytes);
    if (!n) return NULL;
    block = gai_block_cut_out(pool, block, at, n * params->bytes, GAI_USED);
    for (i = n - 1; i > 0; i--) {
        gai_block *slot = gai_block_split(pool, block, at + i * params->bytes, GAI_FREE);
        slot->slot = GAI_RUN_SLOT;
        (void)gai_block_file(pool, slot, 0);
    }
    pool->freed_slots = freed_slots;
    block->slot = GAI_RUN_SLOT | GAI_RUN_FIRST;
    gai_block_assign(pool, block, params->stream, params->requested, params->tag);
    return block;
}

/* Where there are blocks that are never cut: the request gets all of one, if it may have it. What was made for it just
   now it may; if the alignment wants that, cut. */
static void gai_job_take_uncut(gai_job *job, gai_found found)
{
    galloc_pool *pool = job->pool;
    gai_params params = job->params;
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
    else if (params.slot) gai_job_took(job, gai_slot_take(pool, found.block, found.at, &params));
    else gai_job_took(job, gai_block_take(pool, found.block, found.at, &params));
}

static void gai_job_take(gai_job *job, gai_found found)
{
    if (!found.block) return;
    if (job->pool->oversize) gai_job_take_uncut(job, found);
    else if (job->params.just_ready) job->got = found.block;
    else if (job->params.slot) gai_job_took(job, gai_slot_take(job->pool, found.block, found.at, &job->params));
    else gai_job_took(job, gai_block_take(job->pool, found.block, found.at, &job->params));
}

/* The same in a home, cut as it is the way there. */
static void gai_job_take_at_block_pool(gai_job *job, gai_block *block)
{
    gai_params params = job->params;
    uintptr_t at = gai_place(block->addr, block->addr + block->bytes, &params);
    params.bytes = gai_block_pool_cut(job->pool, block, at, &params);
    gai_job_took(job, params.just_ready ? block : gai_block_take(job->pool, block, at, &params));
}

/* Looks at home; first it is asked who has done with what comes from there, which is for later steps. Lock held. */
static void gai_job_search_block_pool(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block *block;
    if (!job->searched && pool->config.gc_threshold > 0) pool->searches[job->params.small]++;
    job->searched = 1;
    if (!job->asked && gai_pool_awaits(pool)) return;
    block = gai_block_pool_find(gai_block_pool_of(pool, job->params.stream, job->params.small), &job->params);
    if (block && gai_block_may_serve(pool, block, job->params.bytes)) gai_job_take_at_block_pool(job, block);
}

/* Is the whole mapping in a free block that can give up its page? The block, or NULL. In a program that repeats itself
   the block mostly begins where it did the last time. */
static gai_block *gai_mapping_donor(const galloc_pool *pool, gai_mapping *mapping, const gai_page_filter *filter)
{
    gai_block *block = gai_block_at(mapping->within);
    if (!gai_mapping_is_within(pool, mapping, block)) block = gai_block_before(mapping->addr);
    if (!gai_mapping_is_within(pool, mapping, block)) return NULL;
    mapping->within = block->addr;
    return gai_mapping_is_spare(pool, mapping, block->marks, filter) ? block : NULL;
}

/* The free block that would give up the page of an old mapping, or the one over which it is parked, or NULL. What is
   in free blocks was noted, unless this is about one place only. */
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

/* What lies behind a block that is to grow, and whether the block may have it. Under the pool's lock. Calls
   search. */

/* What stands between a block and the length that it is to have; each is worse than those before it. */
enum gai_obstacle {
    GAI_OBSTACLE_NONE,   /* nothing */
    GAI_OBSTACLE_HOLE,   /* holes, or old mappings whose pages may be had, beside free memory that may be had */
    GAI_OBSTACLE_MARKED, /* memory that another stream has not done with */
    GAI_OBSTACLE_BUSY, /* old mappings of pages, what the driver would not unmap, what a stream cache holds, or slots */
    GAI_OBSTACLE_SHUT  /* a used block, the room of one, the end of the segment */
};

typedef struct gai_growth_range {
    gai_block *block; /* that grows */
    uintptr_t end;    /* that it is to have */
    gai_block *hole;  /* the next to fill, in the room perhaps an old mapping: the block's own room last, so that a
                         failure before leaves it alone */
    gai_mark mark;    /* the first that stands in the way */
    int foreign;        /* something in the way is neither the block's nor in its room */
} gai_growth_range;

/* The first mark over [begin, end) that keeps the job's stream from these bytes; a wait that was queued for the job
   itself counts, and marks that say whose a block is, `holder`'s, do not. Who it names is asked for an event. Lock
   held. */
static const gai_mark *gai_job_obstacle(const gai_job *job, const gai_mark *mark, const gai_stream *holder,
                                        uintptr_t begin, uintptr_t end)
{
    for (; mark; mark = mark->next) {
        if (mark->end <= begin || mark->begin >= end || mark->stream == holder) continue;
        if (gai_mark_allows(job->pool, mark, job->params.stream)) continue;
        if (job->waited && gai_stream_waited(job->params.stream, mark->stream) >= mark->epoch) continue;
        if (!gai_mark_event(mark)) gai_stream_want_mark(mark->stream);
        return mark;
    }
    return NULL;
}

static void gai_growth_range_note(gai_growth_range *range, enum gai_obstacle *entry, const gai_mark *mark, int foreign)
{
    if (*entry < GAI_OBSTACLE_MARKED) range->mark = *mark;
    if (*entry < GAI_OBSTACLE_MARKED) *entry = GAI_OBSTACLE_MARKED;
    range->foreign |= foreign;
}

/* Is the page of an old mapping in the room to be had there, with no call into the driver? */
static int gai_job_returns(gai_job *job, const gai_block *piece, const gai_growth_range *range)
{
    gai_page_filter filter;
    const gai_block *holder;
    if (gai_block_is_parked(piece)) return 1;
    memset(&filter, 0, sizeof filter);
    filter.params = &job->params;
    filter.one_place = 1;
    job->pool->plans++;
    holder = gai_plan_holder(job->pool, piece->alias->page, &filter);
    return holder && (holder->addr < range->block->addr || holder->addr >= range->end);
}

/* Notes what is to be filled next: what is not in the block's room before that, which is filled from its start on. */
static enum gai_obstacle gai_growth_range_fill(gai_growth_range *range, gai_block *piece, enum gai_obstacle entry)
{
    if (!range->hole || (piece->kind == GAI_HOLE && range->hole->kind != GAI_HOLE)) range->hole = piece;
    return entry < GAI_OBSTACLE_HOLE ? GAI_OBSTACLE_HOLE : entry;
}

/* One block behind that which grows: makes the way worse, or leaves it. */
static enum gai_obstacle gai_job_look_at(gai_job *job, gai_block *piece, gai_growth_range *range,
                                         enum gai_obstacle entry)
{
    uintptr_t end = gai_min(range->end, piece->addr + piece->bytes);
    int own = piece->addr - range->block->addr < range->block->room;
    const gai_mark *mark;
    switch (piece->kind) {
    case GAI_FREE:
        mark = gai_job_obstacle(job, piece->marks, NULL, piece->addr, end);
        if (mark) gai_growth_range_note(range, &entry, mark, 1);
        return entry;
    case GAI_HOLE:
    case GAI_ROOM:
        job->params.bytes += end - piece->addr;
        return gai_growth_range_fill(range, piece, entry);
    case GAI_ALIAS:
        if (own && gai_job_returns(job, piece, range)) return gai_growth_range_fill(range, piece, entry);
        range->foreign |= !own;
        return GAI_OBSTACLE_BUSY;
    case GAI_SLOT:
    case GAI_BUSY:
        range->foreign |= !own;
        return GAI_OBSTACLE_BUSY;
    case GAI_USED:
        range->foreign |= !own;
        return gai_load_pointer(&piece->held) ? GAI_OBSTACLE_SHUT : GAI_OBSTACLE_BUSY;
    default: return GAI_OBSTACLE_SHUT;
    }
}

/* Looks at all that the block must have to be as long as it is to be, and notes what it lacks. Lock held. */
static enum gai_obstacle gai_job_look(gai_job *job, gai_growth_range *range)
{
    galloc_pool *pool = job->pool;
    gai_block *block = gai_block_used(pool, job->grows), *piece;
    enum gai_obstacle entry = GAI_OBSTACLE_NONE;
    size_t bytes = gai_up(job->grow_to, GAI_UNIT);
    const gai_mark *mark;
    memset(range, 0, sizeof *range);
    if (!block) return GAI_OBSTACLE_SHUT;
    if (bytes <= block->room) bytes = gai_min(gai_up(bytes, pool->granularity), block->room);
    range->block = block;
    range->end = block->addr + bytes;
    job->params.bytes = 0;
    job->params.requested = job->grow_to - gai_min(job->grow_to, (size_t)block->requested);
    mark = gai_job_obstacle(job, block->marks, block->stream && block->stream->capture ? block->stream : NULL,
                            block->addr + block->requested, gai_min(range->end, block->addr + block->bytes));
    if (mark) gai_growth_range_note(range, &entry, mark, 0);
    for (piece = block->next; piece && piece->addr < range->end; piece = piece->next) {
        entry = gai_job_look_at(job, piece, range, entry);
        if (entry == GAI_OBSTACLE_SHUT) return entry;
    }
    return range->end > block->segment->addr + block->segment->bytes ? GAI_OBSTACLE_SHUT : entry;
}

/* Host memory for taking all of an open growth range at once. Lock held. */
static int gai_growth_range_need(galloc_pool *pool, const gai_growth_range *range)
{
    const gai_block *last = range->block;
    while (last->next && last->next->addr < range->end) last = last->next;
    return last == range->block || gai_block_need(pool, last, last->addr, range->end - last->addr);
}

/* The block becomes as long as it is to be: all behind it is free, and its stream may have it. The marks come along.
   Lock held. */
static void gai_job_take_growth_range(gai_job *job, const gai_growth_range *range)
{
    galloc_pool *pool = job->pool;
    gai_block *block = range->block;
    size_t before = block->bytes, requested = (size_t)block->requested;
    if (!gai_growth_range_need(pool, range)) {
        job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for growing a block");
        return;
    }
    if (!gai_block_claim(pool, job->grows)) {
        job->error = gai_fail(cudaErrorInvalidDevicePointer, "%p is freed while it is to grow", job->grows);
        return;
    }
    while (block->addr + block->bytes < range->end) {
        gai_block *piece = block->next;
        size_t bytes = gai_min(piece->bytes, range->end - piece->addr);
        piece = gai_block_cut_out(pool, piece, piece->addr, bytes, GAI_USED);
        gai_block_absorb(pool, block, piece);
        gai_stat_used(pool, bytes, 0);
    }
    if (block->bytes != before) block->slot = 0;
    gai_marks_trim(pool, &block->marks);
    gai_block_renew_captured(pool, block);
    gai_block_set_requested(pool, block, job->grow_to);
    gai_torch_count_resized(pool, block, before, requested);
    gai_block_let_go(block);
    job->got = block;
}

static cudaError_t gai_job_say_not_there(const gai_job *job)
{
    return gai_fail(cudaErrorNotSupported, "the block at %p cannot grow to %zu bytes where it stands", job->grows,
                    job->grow_to);
}

/* Lock held. */
static void gai_job_search_behind(gai_job *job)
{
    gai_growth_range range;
    enum gai_obstacle entry = gai_job_look(job, &range);
    if (entry == GAI_OBSTACLE_NONE) gai_job_take_growth_range(job, &range);
    if (entry == GAI_OBSTACLE_SHUT) job->error = gai_job_say_not_there(job);
}

/* With the lock held. A block with room to grow never comes out of the bins: its room must follow it. */
static void gai_job_search_locked(gai_job *job, enum gai_reach reach)
{
    if (job->grows) gai_job_search_behind(job);
    if (job->grows || job->params.room || job->pool->config.backend) return;
    if (job->pool->torch) {
        gai_job_search_block_pool(job);
        return;
    }
    gai_job_take(job, reach == GAI_REACH_OWN ? gai_find_own(job->pool, &job->params)
                                             : gai_find_all(job->pool, &job->params, 0));
}

static int gai_job_search(gai_job *job, enum gai_reach reach)
{
    gai_lock_on(&job->pool->lock);
    gai_job_search_locked(job, reach);
    gai_lock_off(&job->pool->lock);
    return gai_job_is_done(job);
}

/* ==== WAITS ======================================================================================================= */
/* >>waits */

/* Waits of one stream for another one's marks, queued by galloc (rule 4c). Under `growth`, waits are queued with no
   lock that others want. Calls events, search. */

/* The note of what `stream` waits for on `on`, made if there is none; NULL: no host memory. Lock held. */
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

/* Queues one wait: first the wait, then the note that it is queued, or a third call could rely on a wait that is not
   there yet. Recorded events stay recorded while `growth` is held. */
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
    result = gai_scope_enter(&scope, job->params.stream->context);
    if (result) return result;
    result = GAI_CALL(pool, stream_wait, StreamWaitEvent, (job->site.handle, event->event, 0));
    gai_scope_leave(&scope);
    if (result) return result;
    gai_lock_on(&pool->lock);
    gai_event_judge(pool, event, 0);
    if (event->epoch > wait->epoch) wait->epoch = event->epoch;
    pool->stats.waits++;
    job->waited = 1;
    gai_lock_off(&pool->lock);
    return CUDA_SUCCESS;
}

/* Has the asking stream wait for every mark of the block just taken; if that fails the block goes back with all of
   them. */
static void gai_job_wait(gai_job *job)
{
    galloc_pool *pool = job->pool;
    CUresult result = CUDA_SUCCESS;
    const gai_mark *mark;
    for (mark = job->got->marks; mark && !result; mark = mark->next) {
        int allowed;
        gai_lock_on(&pool->lock);
        allowed = gai_mark_allows(pool, mark, job->params.stream);
        gai_lock_off(&pool->lock);
        if (!allowed) result = gai_job_wait_for(job, mark);
    }
    if (!result) return;
    gai_lock_on(&pool->lock);
    gai_block_give_room(pool, job->got);
    gai_block_untake(pool, job->got);
    (void)gai_block_file(pool, job->got, 0);
    gai_lock_off(&pool->lock);
    job->got = NULL;
    if (result == CUDA_ERROR_NOT_READY) return; /* coarse marks asked for more than is recorded: the ladder goes on */
    job->error = gai_driver_failed(result, "cuStreamWaitEvent");
    gai_pool_note(pool, result);
}

/* Has the asking stream wait for the donors' marks before their pages move: if that fails nothing has happened. */
static CUresult gai_job_wait_for_donors(gai_job *job, const gai_batch *donors)
{
    galloc_pool *pool = job->pool;
    const gai_mapping *donor;
    const gai_mark *mark;
    CUresult result = CUDA_SUCCESS;
    for (donor = donors->first; donor; donor = donor->next) {
        for (mark = donor->block->marks; mark && !result; mark = mark->next) {
            const gai_mark *obstacle;
            gai_lock_on(&pool->lock);
            obstacle = gai_job_obstacle(job, mark, NULL, mark->begin, mark->end);
            gai_lock_off(&pool->lock);
            if (obstacle == mark) result = gai_job_wait_for(job, mark);
        }
    }
    return result;
}

/* Has the stream of a growing block wait for what stands in its way, one mark after the other; then the block takes
   it. Nothing changes before. */
static void gai_job_wait_behind(gai_job *job)
{
    galloc_pool *pool = job->pool;
    CUresult result;
    for (;;) {
        gai_growth_range range;
        enum gai_obstacle entry;
        gai_lock_on(&pool->lock);
        entry = gai_job_look(job, &range);
        if (entry == GAI_OBSTACLE_NONE) gai_job_take_growth_range(job, &range);
        gai_lock_off(&pool->lock);
        if (entry != GAI_OBSTACLE_MARKED) return;
        result = gai_job_wait_for(job, &range.mark);
        if (result == CUDA_ERROR_NOT_READY) return; /* no event stands for it yet */
        if (result) break;
    }
    job->error = gai_driver_failed(result, "cuStreamWaitEvent");
    gai_pool_note(pool, result);
}

/* ==== PLANNER ===================================================================================================== */
/* >>planner */

/* Where pages that lie in free blocks move to: plans of address ranges. Under the pool's lock and `growth`.
   Calls search, release, parking. */

/* Where pages go: into [begin, end), so that [at, until) becomes free together with the free blocks beside it. There
   are old mappings in it, whose pages can come back, and at most one hole. */
typedef struct gai_plan {
    gai_block *left, *right;
    gai_block *held; /* free blocks behind a block that grows, out of sight; linked by next_bin */
    gai_block *first, *hole;
    uintptr_t begin, end, at, until;
    size_t alias;     /* bytes of old mappings */
    uint64_t newest; /* number of the newest of them */
} gai_plan;

static size_t gai_plan_fresh(const gai_plan *plan) { return plan->end - plan->begin - plan->alias; }

/* May the block be part of the answer as it is? */
static int gai_block_is_own(const galloc_pool *pool, const gai_block *block, const gai_params *params)
{
    if (!block || block->kind != GAI_FREE) return 0;
    return block->set == &pool->common || (params->stream && block->set == &params->stream->free);
}

static int gai_block_is_unused(const gai_block *block)
{
    return block && (block->kind == GAI_HOLE || (block->kind == GAI_ALIAS && !block->room));
}

static void gai_block_note_pages(const galloc_pool *pool, gai_block *block, const gai_page_filter *filter)
{
    uintptr_t begin, at;
    size_t bytes = gai_block_whole_pages(block, UINTPTR_MAX, &begin);
    for (at = begin; at < begin + bytes;) {
        gai_mapping *mapping = gai_page_at(at);
        at += mapping->bytes;
        if (mapping->page->mappings == 1) continue;
        mapping->page->looked = pool->plans;
        mapping->page->holder = gai_mapping_is_spare(pool, mapping, block->marks, filter) ? block : NULL;
    }
}

/* Notes for every page that could come back to an old mapping which free block it is in. */
static void gai_set_note_pages(const galloc_pool *pool, const gai_set *set, const gai_page_filter *filter)
{
    gai_bin bin = gai_bin_of(GAI_FIXED_SMALL);
    do {
        gai_block *block;
        for (block = set->bins[bin.row][bin.column]; block; block = block->next_bin)
            gai_block_note_pages(pool, block, filter);
    } while (gai_bin_next(set, &bin));
}

/* A run of holes and old mappings, and the part of it, from `first` to `last`, that is being considered. */
typedef struct gai_window {
    gai_block *left; /* the free block before the run, if the answer begins there */
    gai_block *first, *last, *hole;
    const gai_block *newest; /* of the old mappings in it; NULL: to be found out */
    size_t alias;
} gai_window;

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

/* Is a page of the window in this free block, which is to be part of the answer itself? */
static int gai_window_needs(const gai_window *window, const gai_block *holder)
{
    const gai_block *block = window->first;
    for (;; block = block->next) {
        if (block->kind == GAI_ALIAS && block->alias->page->holder == holder) return 1;
        if (block == window->last) return 0;
    }
}

static uint64_t gai_window_newest(gai_window *window)
{
    const gai_block *block = window->first, *newest = window->newest;
    for (; block && !window->newest; block = block == window->last ? NULL : block->next)
        if (block->kind == GAI_ALIAS && (!newest || block->alias->number > newest->alias->number)) newest = block;
    window->newest = newest;
    return newest ? newest->alias->number : 0;
}

/* What the window would be as a plan, but for `newest`: 0 if it does not do. */
static int gai_window_plan(const galloc_pool *pool, gai_window *window, const gai_params *params, uintptr_t at,
                           gai_plan *plan)
{
    const gai_block *first = window->first, *last = window->last;
    uintptr_t needed = at + params->bytes, last_end = last->addr + last->bytes;
    memset(plan, 0, sizeof *plan);
    plan->begin = first->addr;
    if (at < first->addr) plan->left = window->left;
    else if (first->kind == GAI_HOLE) plan->begin = gai_down(at, pool->granularity);
    if (needed <= first->addr) return 0;
    plan->end = last_end;
    if (last_end < needed) {
        plan->right = last->next;
        if (params->room || !gai_block_is_own(pool, plan->right, params) || gai_window_needs(window, plan->right))
            return 0;
        if (plan->right->addr + plan->right->bytes < needed) return 0;
    } else if (last->kind == GAI_HOLE) {
        plan->end = gai_up(needed, pool->granularity);
    }
    if (params->room && at + params->room > last_end) return 0;
    plan->first = window->first;
    plan->hole = window->hole;
    plan->alias = window->alias;
    plan->at = at;
    plan->until = needed;
    return 1;
}

/* Is plan `a` better than `b`? The one that needs fewer new bytes is. With none needed it is the one
   whose newest mapping is the oldest: that is what was chosen before there were newer ones, and what is to be chosen
   the next time. Then the one with fewer pages that come back, then the lowest address, which takes the free block
   beside it in; for long-lived blocks the highest. */
static int gai_plan_is_better(const gai_page_filter *filter, const gai_plan *a, const gai_plan *b)
{
    size_t unconfirmed_a = gai_plan_fresh(a), unconfirmed_b = gai_plan_fresh(b);
    if (!b->first) return 1;
    if (unconfirmed_a != unconfirmed_b) return unconfirmed_a < unconfirmed_b;
    if (filter->params->far) return a->at > b->at;
    if (!unconfirmed_a && a->newest != b->newest) return a->newest < b->newest;
    if (a->alias != b->alias) return a->alias < b->alias;
    return a->at < b->at;
}

/* Extends the window until it holds what is wanted from `at` on, if it can, and considers it. */
static void gai_window_try(const galloc_pool *pool, gai_window *window, uintptr_t at, const gai_page_filter *filter,
                           gai_plan *best)
{
    gai_plan plan;
    while (!window->last || window->last->addr + window->last->bytes < at + filter->params->bytes)
        if (!gai_window_add(pool, window, window->last ? window->last->next : window->first, filter)) break;
    if (!window->last || !gai_window_plan(pool, window, filter->params, at, &plan)) return;
    if (best->first && gai_plan_fresh(&plan) > gai_plan_fresh(best)) return;
    plan.newest = gai_window_newest(window);
    if (gai_plan_is_better(filter, &plan, best)) *best = plan;
}

static void gai_window_clear(gai_window *window)
{
    while (window->last) gai_window_drop_first(window);
}

static void gai_plan_in_run(const galloc_pool *pool, gai_block *first, const gai_page_filter *filter, gai_plan *best)
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
        if (at < window.first->addr + window.first->bytes && at + params->bytes > at)
            gai_window_try(pool, &window, at, filter, best);
    }
}

static int gai_block_starts_run(const gai_block *block) { return !gai_block_is_unused(block->prev); }

/* With the lock held. */
static int gai_plan_best(galloc_pool *pool, const gai_page_filter *filter, gai_plan *best)
{
    const gai_stream *stream;
    gai_block *hole;
    gai_mapping *mapping;
    memset(best, 0, sizeof *best);
    pool->plans++;
    gai_set_note_pages(pool, &pool->common, filter);
    gai_set_note_pages(pool, &pool->mixed, filter);
    for (stream = pool->streams; stream; stream = stream->next) gai_set_note_pages(pool, &stream->free, filter);
    for (hole = pool->holes; hole; hole = hole->next_bin)
        if (gai_block_starts_run(hole)) gai_plan_in_run(pool, hole, filter, best);
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer)
        if (gai_block_starts_run(mapping->block)) gai_plan_in_run(pool, mapping->block, filter, best);
    return best->first != NULL;
}

/* Rooms of one length stand side by side from their segment's start on, so that a room is found again where one was. */
static uintptr_t gai_room_up(const gai_segment *segment, uintptr_t addr, const gai_params *params)
{
    size_t unit = gai_up(params->room, params->alignment);
    return segment->addr + (addr - segment->addr + unit - 1) / unit * unit;
}

/* Is all from `at` in a block on, as far as the room goes, holes and old mappings that suit it? Mappings are no longer
   than what is asked for: who grows by a little does not get much. Adds up the bytes of pages that are there. */
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

/* Considers a room from `at` on, in a hole or at an old mapping. */
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

/* A place for a room: where one was whose pages are there still, if there is one. With the lock held. */
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

static gai_memo *gai_plan_predictor_memo(gai_plan_predictor *plan_predictor, uint64_t index)
{
    return &plan_predictor->memos[index % GAI_MEMOS];
}

static int gai_memo_is(const gai_memo *a, const gai_memo *b)
{
    return a->number == b->number && a->at == b->at && a->bytes == b->bytes;
}

/* Adds a plan, and finds out what is to be expected after it. */
static void gai_plan_predictor_add(gai_plan_predictor *plan_predictor, const gai_memo *memo)
{
    uint64_t oldest = plan_predictor->written > GAI_MEMOS ? plan_predictor->written - GAI_MEMOS : 0;
    if (plan_predictor->next < plan_predictor->written &&
        gai_memo_is(gai_plan_predictor_memo(plan_predictor, plan_predictor->next), memo)) {
        plan_predictor->next++;
        plan_predictor->agreed++;
    } else {
        plan_predictor->agreed = 0;
        for (plan_predictor->next = plan_predictor->written; plan_predictor->next > oldest; plan_predictor->next--)
            if (gai_memo_is(gai_plan_predictor_memo(plan_predictor, plan_predictor->next - 1), memo)) break;
        if (plan_predictor->next == oldest) plan_predictor->next = UINT64_MAX;
    }
    *gai_plan_predictor_memo(plan_predictor, plan_predictor->written++) = *memo;
}

/* Makes a plan of a memo, if old mappings alone would serve there again. */
static int gai_plan_by_memo(const galloc_pool *pool, const gai_memo *memo, const gai_page_filter *filter,
                            gai_plan *plan)
{
    const gai_params *params = filter->params;
    gai_window window;
    memset(&window, 0, sizeof window);
    window.first = memo->first->block;
    if (memo->first->number != memo->number || !gai_block_is_unused(window.first)) return 0;
    if (memo->bytes != params->bytes || gai_up(memo->at, params->alignment) != memo->at) return 0;
    if (memo->at < window.first->addr) {
        window.left = window.first->prev;
        if (!gai_block_is_own(pool, window.left, params) || memo->at < window.left->addr) return 0;
    }
    gai_window_try(pool, &window, memo->at, filter, plan);
    gai_window_clear(&window);
    return plan->first && !gai_plan_fresh(plan);
}

#define GAI_TRUST 8 /* times in a row that a search came to what was expected */

/* What a program that repeats itself did the last time is found with no search. With the lock held. */
static int gai_plan_again(galloc_pool *pool, gai_page_filter *filter, gai_plan *plan)
{
    gai_plan_predictor *plan_predictor = &pool->plan_predictor;
    int found = 0;
    memset(plan, 0, sizeof *plan);
    if (filter->params->room || plan_predictor->next >= plan_predictor->written || plan_predictor->agreed < GAI_TRUST)
        return 0;
    pool->plans++;
    filter->one_place = 1;
    found = gai_plan_by_memo(pool, gai_plan_predictor_memo(plan_predictor, plan_predictor->next), filter, plan);
    filter->one_place = 0;
    return found;
}

/* The part of the hole that is to be filled. */
static uintptr_t gai_plan_fill_begin(const gai_plan *plan) { return gai_max(plan->begin, plan->hole->addr); }

static int gai_plan_ends_in_hole(const gai_plan *plan)
{
    return plan->hole && plan->end <= plan->hole->addr + plan->hole->bytes;
}

#define GAI_OVERHEAD_SPARED 0.02 /* left alone below the peak: what was enough there is enough here. Saves 0.3 % */

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

/* Pages grow with the heap, so that their number does not; but only a page that is free as a whole can move, so that
   they are half of what may still be created, between an eighth of the overhead and twice the overhead (a 16th at most)
   as parts of the heap. Where every page counts, under a limit or with hardly any overhead, they are 1/1024 of it.
   Small heaps take a few MiB at a time, very large pages are for heaps that leave room for several of them. `growth`
   says it instead. */
static size_t gai_page_size(const galloc_pool *pool, size_t more, size_t allowance)
{
    double held = (double)(pool->stats.reserved.current + more), overhead = pool->tuning.overhead;
    int frugal = gai_pool_capacity(pool) < pool->device_bytes || overhead < GAI_OVERHEAD_FRUGAL;
    size_t finest = (size_t)(held / 1024), coarsest = finest, wish;
    if (pool->tuning.growth) return gai_max(pool->tuning.growth, pool->granularity);
    if (!frugal) {
        finest = gai_max((size_t)(held * overhead / 8), gai_min((size_t)held / 8, 8 * GAI_MIB));
        coarsest = (size_t)(held * (overhead < 1.0 / 32 ? overhead * 2 : 1.0 / 16));
    }
    wish = gai_max(finest, gai_min(coarsest, allowance / 2));
    wish = gai_min(wish, gai_max(GAI_PAGE_MAX, gai_min(allowance / 3, 4 * GAI_PAGE_MAX)));
    return gai_power_below(gai_max(wish, pool->granularity));
}

/* Whole pages rather than a small one at the end, while the hole and the limit allow it. */
static void gai_plan_round(gai_plan *plan, size_t page_bytes, size_t most)
{
    uintptr_t begin = gai_plan_fill_begin(plan), hole_end = plan->hole->addr + plan->hole->bytes;
    size_t bytes = gai_up(plan->end - begin, page_bytes);
    if (bytes <= hole_end - begin && bytes <= most) plan->end = begin + bytes;
}

/* Takes the free blocks that the plan counts on out of sight: nobody else gets them, and their pages do not move. */
static void gai_plan_hold(gai_plan *plan, const gai_block *grows)
{
    gai_block *piece = grows ? grows->next : NULL;
    for (; piece && piece->addr < plan->until; piece = piece->next) {
        if (piece->kind != GAI_FREE) continue;
        gai_set_remove(piece);
        piece->kind = GAI_BUSY;
        piece->next_bin = plan->held;
        plan->held = piece;
    }
    if (plan->left) gai_set_remove(plan->left);
    if (plan->right) gai_set_remove(plan->right);
    if (plan->left) plan->left->kind = GAI_BUSY;
    if (plan->right) plan->right->kind = GAI_BUSY;
}

static void gai_plan_let_go(galloc_pool *pool, gai_plan *plan)
{
    if (plan->left) (void)gai_block_file(pool, plan->left, 0);
    if (plan->right) (void)gai_block_file(pool, plan->right, 0);
    while (plan->held) {
        gai_block *piece = plan->held;
        plan->held = piece->next_bin;
        (void)gai_block_file(pool, piece, 0);
    }
}

/* One block of the new pages and the free blocks that the plan counts on, before any other neighbour can have
   them. */
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

/* ==== GROWTH ====================================================================================================== */
/* >>growth */

/* Carries a plan out, creates pages, asks the driver for fixed segments. Under `growth`; the driver is called with
   the pool's lock let go. Calls planner, waits, pages, budget. */

/* The pages are there: the answer is cut from what has become free, before that merges with blocks whose marks are not
   the answer's business. Lock held. */
static void gai_job_take_grown(gai_job *job, gai_plan *plan, gai_block *block)
{
    galloc_pool *pool = job->pool;
    gai_found found = {NULL, 0};
    found.block = gai_plan_join(pool, plan, block);
    found.at = plan->at;
    job->params.bytes = plan->until - plan->at;
    gai_marks_prune(pool, &found.block->marks);
    gai_set_insert(gai_set_of(pool, found.block->marks), found.block);
    gai_job_take(job, found);
    if (!job->got || job->params.just_ready) {
        gai_set_remove(found.block);
        found.block = gai_block_file(pool, found.block, 0);
        if (job->got) job->got = found.block;
    }
    if (job->got) gai_block_keep_room(pool, job->got, job->params.room);
    if (job->got && !job->params.just_ready && job->got->next && job->got->next->kind == GAI_FREE)
        (void)gai_block_park(pool, job->got->next, plan->end);
}

/* The same for a block that grows. What was mapped into its room is the block's at once, whatever comes. Lock held. */
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

/* The driver said no: for want of memory, and the ladder goes on, or for another reason, and that is the end. */
static void gai_job_refused(gai_job *job, CUresult result, const char *function)
{
    job->saved = result;
    job->who = function;
    if (!result || result == CUDA_ERROR_OUT_OF_MEMORY || job->error) return;
    gai_pool_note(job->pool, result);
    job->error = gai_driver_failed(result, function);
}

/* Plans to fill the next hole behind a block that grows. 0: pages are not what it lacks. Lock held. */
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

/* The driver has no addresses. Blocks that are free or become so need none, but no step leads to a room. */
static void gai_job_lacks_addresses(gai_job *job, CUresult result)
{
    gai_job_refused(job, result, "cuMemAddressReserve");
    if (!job->params.room || job->error) return;
    job->error = gai_fail(cudaErrorMemoryAllocation, "out of memory: there are no addresses for a room of %zu bytes",
                          job->params.room);
}

/* More addresses: when many are kept already those of old mappings, of half of them and then of all; else new ones. */
static CUresult gai_job_find_addresses(gai_job *job, int tries)
{
    galloc_pool *pool = job->pool;
    size_t space = gai_max(job->params.bytes, job->params.room) + gai_max(job->params.alignment, pool->granularity);
    if (tries < 2 && pool->stats.addresses / GAI_ADDRESSES_KEPT > pool->stats.reserved.current) {
        gai_pool_drop_old(pool, 0, UINTPTR_MAX, tries ? 0 : pool->stats.leaving / 2, tries ? 0 : GAI_OLD_MAX);
        return CUDA_SUCCESS;
    }
    return gai_segment_reserve(pool, gai_up(space, pool->granularity));
}

/* Finds the best place, and addresses when there is none: for that it lets the lock go, which it is called with. 0:
   there is none, the job has the reason. */
static int gai_job_plan(gai_job *job, gai_plan *plan)
{
    galloc_pool *pool = job->pool;
    gai_page_filter filter;
    CUresult result = CUDA_SUCCESS;
    int found, tries;
    if (job->grows) return gai_job_plan_behind(job, plan);
    filter.params = &job->params;
    filter.may_wait = job->may_wait;
    filter.wanted = filter.most = 0;
    filter.one_place = 0;
    found = gai_plan_room(pool, &filter, plan) || gai_plan_again(pool, &filter, plan) ||
            gai_plan_best(pool, &filter, plan);
    for (tries = 0; tries < 3 && !found && !result; tries++) {
        gai_lock_off(&pool->lock);
        result = gai_job_find_addresses(job, tries);
        if (result) gai_job_lacks_addresses(job, result);
        gai_lock_on(&pool->lock);
        found = !result && gai_plan_best(pool, &filter, plan);
    }
    if (found) gai_plan_hold(plan, NULL);
    return found;
}

/* A free block, in a set, that does not merge yet. */
static void gai_block_set_aside(galloc_pool *pool, gai_block *block)
{
    block->kind = GAI_FREE;
    gai_set_insert(gai_set_of(pool, block->marks), block);
}

/* Cuts the pages that are taken out of a free block, which is in no set any more; what is left of it is free. It does
   not merge with its neighbours yet, since they may be to lend pages themselves. The caller has made sure of what it
   takes. */
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

/* Makes sure of what lending pages of a block takes. */
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

/* Takes the page of a returning mapping out of where it is now, with all others there that are taken. 0: no host
   memory. */
static int gai_fill_borrow(galloc_pool *pool, gai_fill *fill, gai_page *page)
{
    gai_block *holder = page->holder;
    if (holder->kind == GAI_ALIAS) {
        page->taken = 0;
        gai_alias_remove(pool, page->current);
        page->current->standing = 1;
        gai_batch_add(&fill->returning_blocks, page->current, holder);
        return 1;
    }
    if (!gai_block_give_pages_need(pool, holder)) return 0;
    gai_set_remove(holder);
    gai_block_give_pages(pool, holder, &fill->returning_blocks);
    return 1;
}

/* What lending pages has left of blocks merges with its neighbours again. */
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

/* Takes the old mappings in the planned range, and the pages that are to come back to them, out of sight. 0: no host
   memory. With the lock held. */
static int gai_plan_fetch(galloc_pool *pool, const gai_plan *plan, gai_fill *fill)
{
    gai_block *block;
    gai_mapping *mapping;
    int ready = 1;
    for (block = plan->first; block && block->addr < plan->end; block = block->next) {
        mapping = block->kind == GAI_ALIAS ? block->alias : NULL;
        if (!mapping) continue;
        ready &= gai_block_map_need(block->addr);
        gai_alias_remove(pool, mapping);
        mapping->standing = 1;
        mapping->page->taken = mapping->page->current != mapping;
        gai_batch_add(&fill->returning, mapping, block);
    }
    for (mapping = fill->returning.first; mapping && ready; mapping = mapping->next)
        if (mapping->page->taken) ready = gai_fill_borrow(pool, fill, mapping->page);
    for (mapping = fill->returning.first; mapping && !ready; mapping = mapping->next) mapping->page->taken = 0;
    gai_returning_merge(pool, &fill->returning_blocks);
    return ready;
}

/* Decides how the hole in the planned range is filled: with new pages as far as the overhead allows, then with pages
   moved from free blocks, and if those do not suffice with new ones after all. Where the place is given nothing from
   the bins could serve: there what is held comes first. All of what fills a room is the block's: pages larger than was
   asked for only where nothing new can be had. `exact`: the device has just refused to give as much, so that what is
   held comes first too. 0: the limit does not allow it. With the lock held, the plan's blocks
   out of sight. */
static int gai_job_choose(gai_job *job, gai_plan *plan, gai_fill *fill, int exact)
{
    galloc_pool *pool = job->pool;
    gai_page_filter filter;
    size_t bytes = gai_plan_fresh(plan), most, allowance = gai_job_allowance(job), headroom = gai_pool_headroom(pool);
    int fits;
    int room = job->params.room || (plan->hole && plan->hole->kind == GAI_ROOM), open = gai_plan_ends_in_hole(plan);
    fill->page_bytes = gai_page_size(pool, bytes, allowance);
    if (!bytes) return 1;
    filter.params = &job->params;
    filter.wanted = bytes;
    if (!room && !job->grows && !exact) filter.wanted -= gai_min(bytes, gai_down(allowance, pool->granularity));
    filter.may_wait = job->may_wait;
    most = open ? plan->hole->addr + plan->hole->bytes - gai_plan_fill_begin(plan) : bytes;
    if (job->params.room) most = gai_min(most, job->params.room);
    fill->moved = filter.most = room ? bytes : most;
    if (filter.wanted) gai_pool_to_batch(pool, &filter, &fill->donors);
    fill->moved -= filter.most;
    if (room && (exact || bytes > fill->moved + headroom)) {
        filter.most = most - fill->moved;
        gai_pool_to_batch(pool, &filter, &fill->donors);
        fill->moved = most - filter.most;
    }
    if (fill->moved > bytes) fill->moved -= gai_donors_trim(pool, &fill->donors, fill->moved - bytes);
    fits = bytes <= fill->moved + (job->frugal ? allowance : headroom);
    if (open && !fill->moved && !exact && !room)
        gai_plan_round(plan, fill->page_bytes, pool->tuning.growth ? headroom : allowance);
    bytes = gai_plan_fresh(plan);
    fill->unconfirmed = bytes - gai_min(bytes, fill->moved);
    plan->end += fill->moved + fill->unconfirmed - bytes;
    if (job->params.room) plan->until = plan->end;
    return fits;
}

static void gai_plan_remember(galloc_pool *pool, const gai_plan *plan, gai_mapping *first, size_t bytes)
{
    gai_memo memo;
    memo.first = first;
    memo.number = first->number;
    memo.at = plan->at;
    memo.bytes = bytes;
    gai_plan_predictor_add(&pool->plan_predictor, &memo);
}

/* First with what is to be left alone left alone, then without. */
static int gai_job_choose_within(gai_job *job, gai_plan *plan, gai_fill *fill, int exact)
{
    uintptr_t end = plan->end, until = plan->until;
    int chosen;
    job->thrifty = job->frugal && gai_pool_live(job->pool) + job->params.requested <= job->pool->live_peak;
    chosen = gai_job_choose(job, plan, fill, exact);
    if (chosen || !job->thrifty) return chosen;
    gai_donors_restore(job->pool, &fill->donors);
    gai_batch_start(&fill->donors);
    fill->moved = fill->unconfirmed = 0;
    plan->end = end;
    plan->until = until;
    job->thrifty = 0;
    return gai_job_choose(job, plan, fill, exact);
}

/* What taking the answer will need: other threads may use some of it up meanwhile, a lone one does not fail late. The
   marks of pages that come are copied, and the answer is cut out at both ends. */
static int gai_job_need(gai_job *job, const gai_plan *plan, const gai_fill *fill)
{
    galloc_pool *pool = job->pool;
    const gai_block *piece;
    size_t marks = gai_batch_marks(&fill->donors) + gai_batch_marks(&fill->returning_blocks);
    uintptr_t addr = plan->hole ? gai_plan_fill_begin(plan) : 0;
    for (piece = plan->held; piece; piece = piece->next_bin) marks += gai_marks_count(piece->marks);
    if (plan->left) marks += gai_marks_count(plan->left->marks);
    if (plan->right) marks += gai_marks_count(plan->right->marks);
    return gai_slab_need(&pool->blocks, 4) && gai_slab_need(&pool->marks, 3 * marks + 3) &&
           gai_block_map_need(plan->begin) && gai_block_map_need(plan->at) &&
           gai_block_map_need(plan->until) && gai_fill_need(pool, fill, addr);
}

/* Lays mappings over the planned range, in order of address. The caller has made sure of all descriptors. */
static void gai_batch_over_plan(galloc_pool *pool, gai_batch *batch, const gai_plan *plan, gai_fill *fill)
{
    uintptr_t hole = plan->hole ? plan->hole->addr : plan->end;
    while (fill->returning.first && fill->returning.first->addr < hole)
        gai_batch_add_returning(pool, batch, fill);
    if (plan->hole) gai_batch_over_hole(pool, batch, plan->hole, gai_plan_fill_begin(plan), fill);
    while (fill->returning.first) gai_batch_add_returning(pool, batch, fill);
}

/* Everything that is decided or needs host memory: afterwards only the driver can refuse. With the lock held; 0 if
   growth is not possible (the job may have an error). */
static int gai_job_prepare(gai_job *job, gai_plan *plan, gai_fill *fill, gai_batch *batch, int exact)
{
    galloc_pool *pool = job->pool;
    int fetched;
    gai_batch_start(batch);
    gai_batch_start(&fill->donors);
    gai_batch_start(&fill->returning_blocks);
    gai_batch_start(&fill->returning);
    fill->moved = fill->unconfirmed = 0;
    if (!gai_job_plan(job, plan)) return 0;
    fetched = gai_plan_fetch(pool, plan, fill);
    if (!fetched || gai_job_choose_within(job, plan, fill, exact)) {
        if (!fetched || !gai_job_need(job, plan, fill)) {
            job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory for the description of %zu bytes",
                                  (size_t)(plan->end - plan->begin));
        } else if (gai_budget_take(pool, fill->unconfirmed)) { /* else another pool of the device was faster */
            if (!plan->hole && !job->grows) gai_plan_remember(pool, plan, fill->returning.first, job->params.bytes);
            gai_batch_over_plan(pool, batch, plan, fill);
            return 1;
        }
    }
    gai_donors_restore(pool, &fill->returning);
    gai_donors_restore(pool, &fill->returning_blocks);
    gai_donors_restore(pool, &fill->donors);
    gai_plan_let_go(pool, plan);
    return 0;
}

/* Adds pages to the best place, in whole pages of the heap's page size, or if `exact` just what is needed. */
static CUresult gai_job_grow_expandable(gai_job *job, int exact)
{
    galloc_pool *pool = job->pool;
    gai_plan plan;
    gai_fill fill;
    gai_batch batch;
    CUresult result = CUDA_SUCCESS;
    const char *function = "cuMemCreate";
    int ready;
    gai_lock_on(&pool->lock);
    ready = gai_job_prepare(job, &plan, &fill, &batch, exact);
    gai_lock_off(&pool->lock);
    if (!ready) return CUDA_SUCCESS;
    if (job->grows && job->may_wait) result = gai_job_wait_for_donors(job, &fill.donors);
    if (result) function = "cuStreamWaitEvent";
    else result = gai_batch_map(pool, &batch);
    if (result) gai_batch_undo(pool, &batch);
    else gai_pool_tell_mapped(pool, &batch);
    gai_lock_on(&pool->lock);
    if (result) {
        gai_donors_restore(pool, &fill.returning_blocks);
        gai_donors_restore(pool, &fill.donors);
        gai_plan_let_go(pool, &plan);
    } else {
        gai_block *block = gai_batch_publish(pool, &batch);
        pool->stats.grows += fill.unconfirmed != 0;
        pool->parking.mapped += fill.unconfirmed || fill.moved;
        if (fill.unconfirmed || fill.moved) pool->mark_predictor.agreed = 0;
        if (!job->grows) job->grown += fill.unconfirmed || fill.moved || fill.returning_blocks.first;
        gai_donors_leave(pool, &fill.returning_blocks);
        gai_donors_leave(pool, &fill.donors);
        if (job->grows) gai_job_take_behind(job, &plan, block);
        else gai_job_take_grown(job, &plan, block);
    }
    gai_lock_off(&pool->lock);
    gai_job_refused(job, result, function);
    if (job->got && job->may_wait && !job->grows) gai_job_wait(job);
    return result;
}

/* The job's place in a segment that was just made for it. With the lock held. */
static void gai_job_take_fixed(gai_job *job, gai_block *block)
{
    gai_found found;
    found.block = gai_block_file(job->pool, block, 0);
    found.at = gai_place(found.block->addr, found.block->addr + found.block->bytes, &job->params);
    job->grown = 1;
    gai_job_take(job, found);
}

/* The same for what cudaMallocAsync gave in the order of the job's stream, which may still work with what was there
   before: should the job have no host memory to take it, that is marked. */
static void gai_job_take_given(gai_job *job, gai_block *block)
{
    gai_stream *stream = job->params.stream;
    gai_job_take_fixed(job, block);
    if (job->got || !stream || stream->capture || !gai_pool_is_async(job->pool)) return;
    gai_set_remove(block);
    gai_block_stamp_own(job->pool, block, stream);
    gai_stream_ask(stream);
    (void)gai_block_file(job->pool, block, 0);
}

/* Promises a job a mark, or takes the promise back. 0: no host memory. With the lock held. */
static int gai_pool_promise_mark(galloc_pool *pool)
{
    if (!gai_slab_need(&pool->marks, 1)) return 0;
    pool->marks.promised++;
    pool->promised_jobs++;
    return 1;
}

static void gai_pool_unpromise_mark(galloc_pool *pool)
{
    pool->marks.promised--;
    pool->promised_jobs--;
}

static void gai_job_grow_fixed(gai_job *job)
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

/* Takes the bytes from the budget. What comes from the driver's pool may be held already: then it is seen afterwards
   how much more is. */
static int gai_pool_may_ask(galloc_pool *pool, size_t bytes, const gai_site *site)
{
    size_t kept;
    if (!gai_pool_is_async(pool) || site->capture) return gai_budget_take(pool, bytes);
    gai_lock_on(&pool->lock);
    kept = pool->kept;
    gai_lock_off(&pool->lock);
    return gai_left(bytes, kept) <= gai_pool_headroom(pool);
}

/* Asks the driver for a block: for as many bytes as the program did, so that a memory checker knows where it ends. What
   the driver's pool keeps may serve, and is held already. */
static void gai_job_grow_given(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block *block = NULL;
    CUresult result = GAI_NO_HOST_MEMORY;
    size_t slack = job->params.alignment - GAI_UNIT, bytes = job->params.bytes + slack;
    size_t given = job->params.bytes - job->params.requested >= GAI_UNIT ? job->params.bytes : job->params.requested;
    int promised, asked = 0;
    gai_lock_on(&pool->lock);
    promised = gai_pool_promise_mark(pool);
    gai_lock_off(&pool->lock);
    if (promised) {
        asked = gai_pool_may_ask(pool, bytes, &job->site);
        if (asked) result = gai_segment_fixed(pool, bytes, given + slack, &job->site, &block);
        gai_lock_on(&pool->lock);
        gai_pool_unpromise_mark(pool);
        if (block) gai_job_take_given(job, block);
        gai_lock_off(&pool->lock);
    }
    if (promised && !asked) return;
    gai_job_refused(job, result, gai_pool_is_async(pool) ? "cuMemAllocFromPoolAsync" : "cuMemAlloc");
}

/* ==== LADDER ====================================================================================================== */
/* >>ladder */

/* Running out: the steps, each followed by another search. Under `growth`. Calls growth, waits, collection. */

/* Says why a step is not taken; returns what the step does. */
static int gai_job_leave_out(gai_job *job, const char *why)
{
    job->left_out = why;
    return 0;
}

/* What stands in the way of a block that grows, seen by itself. */
static enum gai_obstacle gai_job_obstacle_behind(gai_job *job, gai_growth_range *range)
{
    enum gai_obstacle entry;
    gai_lock_on(&job->pool->lock);
    entry = gai_job_look(job, range);
    gai_lock_off(&job->pool->lock);
    return entry;
}

/* Old mappings behind a block that grows go, if their pages are not to be had there, and parked pages there are free
   blocks again. */
static void gai_job_clear_behind(gai_job *job)
{
    galloc_pool *pool = job->pool;
    uintptr_t begin = (uintptr_t)job->grows;
    gai_growth_range range;
    if (gai_job_obstacle_behind(job, &range) != GAI_OBSTACLE_BUSY) return;
    gai_lock_on(&pool->lock);
    gai_pool_unpark(pool, begin, begin + job->grow_to);
    gai_lock_off(&pool->lock);
    gai_pool_drop_old(pool, begin, begin + job->grow_to, 0, 0);
}

/* A block that grows may have several holes before it, and fills one after the other. What fills one may be the page
   that was to come back to the next. */
static int gai_step_grow(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int grown;
    job->saved = CUDA_SUCCESS;
    if (gai_pool_is_still(pool)) return gai_job_leave_out(job, "on_map or on_unmap is under way");
    if (job->params.bytes > gai_pool_capacity(pool)) return 0;
    if (pool->config.backend && !job->grows) gai_job_grow_given(job);
    else if (!pool->config.expandable_segments && !job->grows) gai_job_grow_fixed(job);
    if (!pool->config.expandable_segments) return gai_job_is_done(job);
    do {
        grown = job->grown;
        if (job->grows) gai_job_clear_behind(job);
        if (gai_job_grow_expandable(job, 0) == CUDA_ERROR_OUT_OF_MEMORY && !job->error)
            (void)gai_job_grow_expandable(job, 1);
    } while (job->grows && job->grown > grown && !gai_job_is_done(job));
    return gai_job_is_done(job);
}

/* The same within the overhead: with pages moved rather than created. */
static int gai_step_grow_within(gai_job *job)
{
    int done;
    if (!job->pool->config.expandable_segments) return gai_job_leave_out(job, "expandable_segments is off");
    job->frugal = 1;
    done = gai_step_grow(job);
    job->frugal = job->thrifty = 0;
    return done;
}

/* What is captured comes to run some day, perhaps elsewhere and more than once: no wait of now is of use to it. */
static int gai_job_is_captured(const gai_job *job) { return job->params.stream && job->params.stream->capture_id; }

/* ---- the order that is captured ---- */

/* The stream state's newest position that the other stream state does not follow yet; NULL: it does, or cannot by any
   graph. */
static const gai_position *gai_stream_ahead(const gai_stream *stream, const gai_stream *other)
{
    const gai_position *position = stream->positions;
    if (stream == other || stream->capture != other->capture || !stream->uses || !position) return NULL;
    return position->epoch > gai_stream_waited(other, stream) ? position : NULL;
}

/* Could it be of use to know what comes before what? With the lock held. */
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

/* Notes as waits up to where the stream follows others of its capture: the graph will have it wait. Lock held. */
static void gai_job_note_followed(gai_job *job, const gai_walk *walk)
{
    gai_stream *stream, *own = job->params.stream;
    for (stream = own->capture ? job->pool->streams : NULL; stream; stream = stream->next) {
        const gai_position *position = gai_stream_ahead(stream, own);
        gai_wait *wait;
        while (position && !gai_walk_covers(walk, position)) position = position->older;
        if (!position || position->epoch <= gai_stream_waited(own, stream)) continue;
        wait = gai_stream_wait_on(job->pool, own, stream);
        if (wait) wait->epoch = position->epoch;
    }
}

/* What other streams of the same capture freed before a point that this one comes after, by the graph: asked for only
   here, where nothing at hand fits. What cannot be found out, for want of host memory or whatever the driver says, is
   not followed. */
static int gai_step_follow(gai_job *job)
{
    gai_walk *walk;
    size_t at = 0;
    int useful;
    if (!gai_job_is_captured(job)) return gai_job_leave_out(job, "the stream is not captured");
    gai_lock_on(&job->pool->lock);
    useful = gai_job_may_follow(job);
    gai_lock_off(&job->pool->lock);
    walk = useful ? (gai_walk *)GALLOC_MALLOC(sizeof *walk) : NULL;
    if (!walk) return 0;
    gai_walk_begin(walk, job->site.handle, job->params.stream->capture_id);
    while (at < walk->n) gai_walk_on(walk, at++);
    gai_lock_on(&job->pool->lock);
    gai_job_note_followed(job, walk);
    gai_lock_off(&job->pool->lock);
    GALLOC_FREE(walk);
    return gai_job_search(job, GAI_REACH_ALL);
}

/* To look at all runs takes time for each block that there is: at a miss it is not done before a part as many slots
   have become free. */
#define GAI_COALESCE_PART 16

/* What other streams have done with, if the pool may know; and runs of slots that are all free. */
static int gai_step_poll(gai_job *job)
{
    gai_pool_retry(job->pool);
    gai_pool_sweep_lost(job->pool);
    if ((job->pool->config.reuse & GALLOC_REUSE_COMPLETED) || job->pool->config.backend || job->pool->oldest_alias)
        gai_pool_poll(job->pool);
    gai_pool_limit_old(job->pool);
    if (job->pool->config.backend && !gai_job_is_captured(job)) gai_pool_return_given(job->pool, SIZE_MAX);
    gai_lock_on(&job->pool->lock);
    if (job->pool->freed_slots > job->pool->stats.blocks.current / GAI_COALESCE_PART) gai_pool_coalesce(job->pool);
    gai_lock_off(&job->pool->lock);
    if (job->grows) gai_job_clear_behind(job);
    return gai_job_search(job, GAI_REACH_ALL);
}

/* What has not been used for long goes before new pages come. */
static int gai_step_collect(gai_job *job)
{
    if (!job->pool->collects) return gai_job_leave_out(job, "neither gc_threshold nor gc_age is in effect");
    gai_pool_collect(job->pool, job->params.bytes);
    return 0;
}

/* Parts of parked pages. */
static int gai_step_unpark(gai_job *job)
{
    if (job->grows || job->params.room) return gai_job_leave_out(job, "parts of pages are of no use to a room");
    gai_lock_on(&job->pool->lock);
    gai_pool_unpark(job->pool, 0, UINTPTR_MAX);
    gai_lock_off(&job->pool->lock);
    return gai_job_search(job, GAI_REACH_ALL);
}

/* May the asking stream be made to wait? Never the legacy stream: every blocking stream would wait along. */
static int gai_job_can_wait(const gai_job *job)
{
    const galloc_pool *pool = job->pool;
    if (!(pool->config.reuse & GALLOC_REUSE_WAIT) || !job->params.stream || job->params.just_ready) return 0;
    if (pool->config.backend) return 0; /* it is not galloc that gives it to the next */
    if (job->params.stream->handle == CU_STREAM_LEGACY) return 0;
    return !gai_job_is_captured(job);
}

/* Where the addresses behind a block are not to be had, no page helps, and nobody is made to wait for the sake of a
   place. The block's own bytes and room it gets in any case. */
static int gai_step_addresses(gai_job *job)
{
    gai_growth_range range;
    enum gai_obstacle entry;
    if (!job->grows) return gai_job_leave_out(job, "no block is to grow");
    entry = gai_job_obstacle_behind(job, &range);
    if (entry == GAI_OBSTACLE_SHUT || (entry > GAI_OBSTACLE_HOLE && range.foreign))
        job->error = gai_job_say_not_there(job);
    else if (entry == GAI_OBSTACLE_BUSY)
        job->error = gai_fail(cudaErrorMemoryAllocation, "out of memory: the driver does not unmap what is in the room "
                              "of the block at %p", job->grows);
    else if (entry == GAI_OBSTACLE_MARKED && gai_job_can_wait(job))
        gai_job_wait_behind(job);
    return gai_job_is_done(job);
}

/* Where waits are limited, one that nobody can end is not begun. */
static int gai_job_waits_are_limited(const gai_job *job) { return job->pool->config.wait_limit_ms != UINT64_MAX; }

/* Gives back pages of small free blocks, as many as the limit leaves missing, and takes new ones in one piece. When
   it is the device that has no more, all of them. */
static int gai_step_recycle(gai_job *job)
{
    galloc_pool *pool = job->pool;
    size_t wanted = SIZE_MAX, space = gai_up(job->params.bytes, pool->granularity) + pool->granularity;
    gai_growth_range range;
    if (job->grows && gai_job_obstacle_behind(job, &range) != GAI_OBSTACLE_HOLE) return 0;
    if (!pool->config.expandable_segments) { /* cuMemFree waits */
        if (gai_job_is_captured(job)) return gai_job_leave_out(job, "cudaFree waits, and a capture must not");
        if (gai_job_waits_are_limited(job)) return gai_job_leave_out(job, "cudaFree waits, and wait_limit_ms is set");
    }
    if (!job->saved) {
        size_t headroom = gai_pool_headroom(pool);
        if (job->params.bytes > gai_pool_capacity(pool)) return 0;
        wanted = space > headroom ? space - headroom : pool->granularity;
    }
    return gai_pool_release(pool, wanted) && gai_step_grow(job);
}

static const char *gai_job_why_no_wait(const gai_job *job)
{
    if (!(job->pool->config.reuse & GALLOC_REUSE_WAIT)) return "reuse:wait is off";
    if (gai_job_is_captured(job)) return "the stream is captured";
    return job->params.stream ? "the legacy stream is never made to wait" : "no stream asks";
}

/* Memory that another stream has not done with: by a block as it is, then by pages moved from several. */
static int gai_step_wait(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int done;
    gai_lock_on(&pool->lock);
    pool->mark_predictor.agreed = 0;
    gai_lock_off(&pool->lock);
    if (!gai_job_can_wait(job)) return gai_job_leave_out(job, gai_job_why_no_wait(job));
    gai_lock_on(&pool->lock);
    gai_pool_join(pool);
    if (!job->params.room && !job->grows) gai_job_take(job, gai_find_all(pool, &job->params, 1));
    gai_lock_off(&pool->lock);
    if (job->got) gai_job_wait(job);
    if (gai_job_is_done(job)) return 1;
    job->may_wait = 1;
    if (job->grows) gai_job_wait_behind(job);
    done = gai_job_is_done(job) || gai_step_grow_within(job);
    job->may_wait = 0;
    job->left_out = NULL;
    return done;
}

/* A wait that the program did not ask for is a last resort while there is hardly anything to be saved by it. */
#define GAI_WAIT_FRACTION 64

static int gai_step_wait_early(gai_job *job)
{
    const galloc_pool *pool = job->pool;
    if (pool->stats.reserved.current >= gai_pool_capacity(pool) / GAI_WAIT_FRACTION) return gai_step_wait(job);
    return gai_job_leave_out(job, "the pool is small");
}

/* The stream to wait for first: of those with events out, the one that holds most, and of equals the one whose event
   is oldest. *event is its oldest event; NULL: none is out. */
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

/* Waits for an event as long as the job may still wait. The driver has no wait that ends: so it is asked again and
   again, with longer and longer rests, which are no longer than a millisecond. CUDA_ERROR_NOT_READY: the time is up. */
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

/* Has the host wait for one event after another until something fits. What has been waited for is complete whether or
   not the driver says so again: each turn leaves one event less. */
static int gai_step_wait_host(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_stream *stream;
    gai_event *event;
    if (gai_job_is_captured(job)) return gai_job_leave_out(job, "the stream is captured");
    if (!pool->config.wait_limit_ms) return gai_job_leave_out(job, "wait_limit_ms is 0");
    while ((stream = gai_pool_best_stream(pool, &event)) != NULL) {
        CUresult result = gai_job_wait_for_event(job, event);
        if (result && result != CUDA_ERROR_NOT_READY) {
            gai_job_refused(job, result, gai_job_waits_are_limited(job) ? "cuEventQuery" : "cuEventSynchronize");
            return 1;
        }
        gai_lock_on(&pool->lock);
        if (!result) gai_stream_complete(stream, event->epoch);
        gai_lock_off(&pool->lock);
        gai_pool_poll(pool);
        gai_pool_limit_old(pool);
        if (gai_job_search(job, GAI_REACH_ALL) || gai_step_grow(job) || gai_step_recycle(job)) return 1;
        job->left_out = NULL;
        if (result) return gai_job_leave_out(job, "wait_limit_ms was over");
    }
    return 0;
}

/* ==== DEVICE WAIT ================================================================================================= */
/* >>devicewait */

/* Waits for whole contexts and devices, and what they prove. No lock that a fast path wants is held meanwhile.
   Calls events, streams. */

/* Gives back what the driver would not take the last time. What it does not know went with its context; where that has
   ended it is not asked, as the address may be the program's by now. */
static CUresult gai_fence_drop(galloc_pool *pool)
{
    enum gai_health health;
    CUresult result;
    if (!pool->fence) return CUDA_SUCCESS;
    result = gai_context_look(pool->fence_context, pool->fence_context_id, &health);
    if (health == GAI_UNKNOWN) return result;
    if (health == GAI_ALIVE) result = GAI_CALL(pool, host_free, MemFreeHost, (pool->fence));
    if (health == GAI_ALIVE && result && result != CUDA_ERROR_INVALID_VALUE) return result;
    pool->fence = NULL;
    return CUDA_SUCCESS;
}

/* Waits for all work of the current context's device. cuCtxSynchronize would break any capture that is under way, in
   any thread and mode. Giving pinned host memory back waits as well, needs no device memory, and harms no capture
   (measured: docs/design.md). What the driver would not take back goes the next time, but says nothing then: it may be
   another context's. */
static CUresult gai_device_wait(galloc_pool *pool)
{
    void *fence = NULL;
    CUresult result = gai_fence_drop(pool);
    if (!result) result = gai_cu.CtxGetCurrent(&pool->fence_context);
    if (!result) result = gai_cu.CtxGetId(pool->fence_context, &pool->fence_context_id);
    if (!result) result = GAI_CALL(pool, host_alloc, MemHostAlloc, (&fence, GAI_UNIT, 0));
    if (result) return result;
    result = GAI_CALL(pool, host_free, MemFreeHost, (fence));
    if (result) pool->fence = fence;
    return result;
}

/* Does a wait for all that is queued in a context prove anything about what was freed on the stream state's stream? A
   graph may be launched later. */
static int gai_stream_is_of(const gai_stream *stream, CUcontext context, unsigned long long context_id)
{
    return stream->context == context && stream->context_id == context_id && gai_stream_is_plain(stream);
}

/* Waits for everything queued in a context; then all that was freed on its streams is complete, marked or not. */
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

/* Is something that was freed on the stream state's stream not known to be complete? */
static int gai_stream_is_incomplete(galloc_pool *pool, const gai_stream *stream)
{
    int incomplete;
    gai_lock_on(&pool->lock);
    incomplete = (stream->uses && stream->freed > stream->done) || stream->handed > stream->done;
    gai_lock_off(&pool->lock);
    return incomplete && gai_stream_is_plain(stream);
}

static CUresult gai_device_wait_in(galloc_pool *pool, CUcontext context)
{
    gai_scope scope;
    CUresult result = gai_scope_enter(&scope, context);
    if (result) return result;
    result = gai_device_wait(pool);
    gai_scope_leave(&scope);
    return result;
}

/* Waits for all work of a device's primary context, if that is in use; *context says which it is. */
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

/* The same for all other contexts that are known. */
static CUresult gai_known_contexts_wait(galloc_pool *pool, const CUcontext *primary, int devices)
{
    CUcontext context;
    unsigned long long id;
    enum gai_health health;
    CUresult result = CUDA_SUCCESS;
    size_t n;
    int device;
    for (n = 0; !result && gai_context_known(n, &context, &id); n++) {
        for (device = 0; device < devices && primary[device] != context; device++) continue;
        if (device < devices) continue;
        result = gai_context_look(context, id, &health);
        if (health == GAI_ALIVE) result = gai_device_wait_in(pool, context);
        else if (health == GAI_DEAD) result = CUDA_SUCCESS;
    }
    return result;
}

/* For what was freed on streams that nobody vouches for or can name: they may have been of any context. */
static CUresult gai_pool_wait_for_orphans(galloc_pool *pool)
{
    CUcontext primary[GAI_DEVICES];
    int devices = 0, device;
    CUresult result = gai_cu.DeviceGetCount(&devices);
    devices = (int)gai_min((size_t)devices, GAI_DEVICES);
    for (device = 0; device < devices && !result; device++) result = gai_primary_wait(pool, device, &primary[device]);
    if (!result) result = gai_known_contexts_wait(pool, primary, devices);
    if (result) return result;
    gai_lock_on(&pool->lock);
    gai_pool_file_orphans(pool);
    if (pool->outside.waited_for) gai_stream_complete(&pool->outside, pool->outside.waited_for);
    gai_lock_off(&pool->lock);
    gai_pool_sweep_lost(pool);
    return CUDA_SUCCESS;
}

/* CUDA may tell of a graph's end a little after its last launch, or the call that destroyed it: so often is it looked
   for, with nothing but others let run in between, and before a pool is said to be in use. */
#define GAI_GRAPH_LOOKS GAI_LATCH_YIELDS
#define GAI_GRAPH_LOOKS_LAST (GAI_LATCH_YIELDS + 64)

/* Waits for what is queued in a context that captured stream states of the pool have, if that is another than `last`.
   */
static CUresult gai_capture_wait(galloc_pool *pool, const gai_stream *stream, const gai_stream *last)
{
    enum gai_health health;
    CUresult result;
    if (last && last->context == stream->context) return CUDA_SUCCESS;
    result = gai_context_look(stream->context, stream->context_id, &health);
    if (health == GAI_DEAD) return CUDA_SUCCESS;
    return result ? result : gai_device_wait_in(pool, stream->context);
}

/* The same for all of them, and the pool's own. With `growth` held: stream states stay. */
static CUresult gai_pool_wait_for_launches(galloc_pool *pool)
{
    gai_stream *stream, *last = NULL;
    CUresult result = gai_device_wait(pool);
    gai_lock_on(&pool->lock);
    stream = pool->streams;
    gai_lock_off(&pool->lock);
    for (; stream && !result; stream = stream->next) {
        if (!stream->capture_id || gai_stream_is_unknown(stream) || stream->context == pool->context) continue;
        result = gai_capture_wait(pool, stream, last);
        last = stream;
    }
    return result;
}

/* Waits for launches of graphs that have been destroyed, and for word of it. 1: no memory is a graph's any more. In the
   pool's scope. */
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

/* Waits for the device, in every context that freed something, and lets everybody have the result. */
static CUresult gai_pool_wait(galloc_pool *pool)
{
    CUresult result = CUDA_SUCCESS;
    gai_stream *stream;
    int orphans;
    (void)gai_pool_await_graphs(pool, GAI_GRAPH_LOOKS, &result);
    gai_lock_on(&pool->lock);
    stream = pool->streams;
    orphans = gai_pool_gather_orphans(pool);
    if (pool->outside.uses && pool->outside.freed > pool->outside.done) {
        pool->outside.waited_for = pool->outside.epoch++;
        orphans = 1;
    }
    gai_lock_off(&pool->lock);
    if (orphans && !result) result = gai_pool_wait_for_orphans(pool);
    for (; stream; stream = stream->next) {
        CUresult saved = CUDA_SUCCESS;
        if (gai_stream_is_incomplete(pool, stream)) saved = gai_context_wait(pool, stream->context, stream->context_id);
        if (saved) result = saved;
    }
    gai_pool_poll(pool);
    gai_pool_limit_old(pool);
    return result;
}

/* May the job wait for all that a device has queued, however long that takes? If not, why is noted. */
static int gai_job_can_wait_for_devices(gai_job *job)
{
    if (gai_job_is_captured(job)) return gai_job_leave_out(job, "the stream is captured");
    if (gai_job_waits_are_limited(job)) return gai_job_leave_out(job, "wait_limit_ms is set, and this has no end");
    return 1;
}

static int gai_step_wait_device(gai_job *job)
{
    CUresult result;
    if (!gai_job_can_wait_for_devices(job)) return 0;
    result = gai_pool_wait(job->pool);
    if (result && result != CUDA_ERROR_OUT_OF_MEMORY) gai_job_refused(job, result, "cuMemFreeHost");
    if (gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL)) return 1;
    return (job->grows || gai_pool_is_async(job->pool)) && gai_step_grow(job);
}

/* ==== BORROW ====================================================================================================== */
/* >>borrow */

/* Idle memory of other pools that share a limit. Under the budget lock for the look, `growth` of one pool at a
   time. Calls release. */

static size_t gai_pool_held(galloc_pool *pool)
{
    size_t held;
    gai_lock_on(&pool->lock);
    held = pool->stats.reserved.current;
    gai_lock_off(&pool->lock);
    return held;
}

/* What other pools of the device keep and do not use is given back, when the device or the limit that they share has
   no more. A pool that another thread is changing is left out; or at last, since two threads may want each other's,
   this pool's growth lock is let go, and that one waited for, and the device for what it has freed. Only then may the
   program be told of what is unmapped there. */
static size_t gai_pool_borrow(galloc_pool *pool, size_t wanted, int last)
{
    galloc_pool *other = NULL;
    size_t given = 0;
    while ((other = gai_budget_visit(pool->budget, other)) != NULL) {
        gai_scope scope;
        if (other == pool || given >= wanted) continue;
        if (last) {
            gai_lock_off(&pool->growth);
            gai_lock_on(&other->growth);
        } else if (!gai_lock_try(&other->growth)) {
            continue;
        }
        if (!last && other->callbacks.on_unmap) {
            gai_lock_off(&other->growth);
        } else if (gai_pool_enter_locked(other, &scope)) {
            gai_message_is_new = 0; /* that is no reason of this pool's */
        } else {
            gai_pool_poll(other);
            if (last || other->config.expandable_segments) given += gai_pool_release(other, wanted - given);
            if (last && given < wanted && gai_pool_held(other) && !gai_pool_wait(other))
                given += gai_pool_release(other, wanted - given);
            gai_scope_leave(&scope);
            gai_lock_off(&other->growth);
        }
        if (last) gai_lock_on(&pool->growth);
    }
    return given;
}

/* Has other pools give back what stands in the way of so many bytes. 0: they gave nothing. */
static int gai_job_have_others_give(gai_job *job, size_t wanted, int last)
{
    galloc_pool *pool = job->pool;
    size_t own;
    if (!job->saved) {
        size_t headroom = gai_pool_headroom(pool);
        gai_lock_on(&gai_budget_lock);
        own = gai_left(gai_pool_share(pool), pool->taken);
        gai_lock_off(&gai_budget_lock);
        if (own <= headroom) return gai_job_leave_out(job, "no other pool stands in the way");
        wanted = gai_left(wanted, headroom);
    }
    return wanted && gai_pool_borrow(pool, wanted, last);
}

static int gai_job_borrow(gai_job *job, int last)
{
    size_t granularity = job->pool->granularity, wanted = gai_up(job->params.bytes, granularity) + granularity;
    if (!gai_job_have_others_give(job, wanted, last)) return 0;
    return gai_job_search(job, GAI_REACH_ALL) || gai_step_grow(job) || gai_step_recycle(job);
}

static int gai_step_borrow(gai_job *job) { return gai_job_borrow(job, 0); }

static int gai_step_borrow_last(gai_job *job)
{
    return gai_job_can_wait_for_devices(job) && gai_job_borrow(job, 1);
}

/* A step of the ladder. */
typedef struct gai_ladder_step {
    const char *name;
    int at_once; /* also taken with throw_on_cudamalloc_oom: nothing is waited for or given back */
    int (*take)(gai_job *);
} gai_ladder_step;

/* ==== STEPS ======================================================================================================= */
/* >>steps */

/* The steps of PyTorch's allocator, where like:pytorch, and the tables of both ladders. Calls torch, ladder. */

/* What others have done with comes home. */
static int gai_step_torch_poll(gai_job *job)
{
    gai_pool_retry(job->pool);
    gai_pool_sweep_lost(job->pool);
    gai_pool_poll(job->pool);
    job->asked = 1;
    return gai_job_search(job, GAI_REACH_ALL);
}

/* A segment of a stream that is gone. */
static int gai_step_torch_adopt(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_stream *stream = job->params.stream;
    gai_block_pool *block_pool;
    gai_block *block;
    if (!stream || stream->capture_id) return 0;
    gai_lock_on(&pool->lock);
    block = gai_pool_find_homeless(pool, &job->params);
    if (block && !gai_block_may_serve(pool, block, job->params.bytes)) block = NULL;
    block_pool = block ? gai_block_pool_for(pool, stream, job->params.small) : NULL;
    if (block_pool) {
        gai_segment_move(pool, block->segment, block_pool);
        gai_job_search_block_pool(job);
    }
    gai_lock_off(&pool->lock);
    return gai_job_is_done(job);
}

/* Bytes that are held beyond the threshold of collection, which is a part of what a limit allows. */
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

/* Are there free segments of so many bytes and more, of a home or if it is NULL of all that are collected, whose work
   is not known to be done? */
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

/* To give a segment back is to wait for the device (cuMemFree): it is done before, so that all which is done with by
   then can go. */
static void gai_job_finish(gai_job *job, const gai_block_pool *only, size_t bytes)
{
    if (gai_pool_has_unfinished(job->pool, only, bytes))
        gai_job_refused(job, gai_pool_wait(job->pool), "cuMemFreeHost");
}

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

/* Bytes of a segment for the request. */
static size_t gai_torch_bytes(const gai_job *job)
{
    size_t alignment = job->params.alignment;
    return gai_fixed_bytes(job->pool, job->params.bytes + (alignment > GAI_FIXED_SMALL ? alignment : 0));
}

/* A segment for the request, filed at home. Its size does not give way to the limit. */
static int gai_step_torch_grow(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block *block = NULL;
    gai_block_pool *block_pool;
    size_t bytes = gai_torch_bytes(job);
    CUresult result;
    job->saved = CUDA_SUCCESS;
    if (gai_pool_is_still(pool)) return gai_job_leave_out(job, "on_map or on_unmap is under way");
    if (!gai_budget_take(pool, bytes)) return 0;
    gai_lock_on(&pool->lock);
    block_pool = gai_block_pool_for(pool, job->params.stream, job->params.small);
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

/* Segments that only requests of max_split_size and more can use, of the stream itself. */
static int gai_step_torch_oversize(gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_block_pool *block_pool;
    if (!pool->oversize) return gai_job_leave_out(job, "max_split_size is none");
    if (!gai_job_can_wait_for_devices(job)) return 0;
    gai_lock_on(&pool->lock);
    block_pool = gai_block_pool_of(pool, job->params.stream, job->params.small);
    gai_lock_off(&pool->lock);
    if (!block_pool) return 0;
    gai_job_finish(job, block_pool, pool->config.max_split_size);
    if (gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL)) return 1;
    gai_block_pool_release_oversize(pool, block_pool, job->params.bytes);
    return gai_step_torch_grow(job);
}

/* Waits for all streams, so that all that is free has come home, and its work is done. */
static int gai_step_torch_wait(gai_job *job)
{
    galloc_pool *pool = job->pool;
    if (!gai_job_can_wait_for_devices(job)) return 0;
    gai_job_refused(job, gai_pool_wait(pool), "cuMemFreeHost");
    gai_torch_count_wait(pool);
    return gai_job_is_done(job) || gai_job_search(job, GAI_REACH_ALL);
}

/* Gives back all segments that are free as a whole. */
static int gai_step_torch_empty(gai_job *job)
{
    galloc_pool *pool = job->pool;
    if (!gai_job_can_wait_for_devices(job)) return 0;
    gai_lock_on(&pool->lock);
    pool->torch_stats.num_alloc_retries++;
    gai_lock_off(&pool->lock);
    (void)gai_pool_release(pool, SIZE_MAX);
    return gai_step_torch_grow(job) || gai_job_search(job, GAI_REACH_ALL);
}

/* PyTorch has no other pools: they come after all else. */
static int gai_step_torch_borrow(gai_job *job)
{
    return gai_job_have_others_give(job, gai_torch_bytes(job), 0) && gai_step_torch_grow(job);
}

static int gai_step_torch_borrow_last(gai_job *job)
{
    if (!gai_job_can_wait_for_devices(job) || !gai_job_have_others_give(job, gai_torch_bytes(job), 1)) return 0;
    return gai_job_search(job, GAI_REACH_ALL) || gai_step_torch_grow(job);
}

/* In PyTorch's order, with a search after each step. */
static const gai_ladder_step gai_torch_ladder[GALLOC_REPORT_STEPS] = {
    {"take what is finished", 1, gai_step_torch_poll},
    {"take a segment of a stream that is gone", 1, gai_step_torch_adopt},
    {"collect what is idle", 0, gai_step_torch_collect},
    {"a new segment", 1, gai_step_torch_grow},
    {"give oversize segments back for a new one", 0, gai_step_torch_oversize},
    {"wait for the device", 0, gai_step_torch_wait},
    {"give all cached segments back", 0, gai_step_torch_empty},
    {"have other pools give back", 0, gai_step_torch_borrow},
    {"have other pools give back, with a wait", 0, gai_step_torch_borrow_last},
};

/* ---- galloc's own ---- */

/* What is tried, in this order, when nothing that is at hand fits. Each step ends with a search of its own, since
   memory that it made available may be taken by another thread at any time. */
static const gai_ladder_step gai_ladder[GALLOC_REPORT_STEPS] = {
    {"take what comes before it in the graph", 1, gai_step_follow},
    {"take what is finished", 1, gai_step_poll},
    {"collect what is idle", 0, gai_step_collect},
    {"move or create pages within the overhead", 1, gai_step_grow_within},
    {"take parts of parked pages", 1, gai_step_unpark},
    {"have the stream wait, if the pool is large", 0, gai_step_wait_early},
    {"look what stands behind the block", 1, gai_step_addresses},
    {"create pages up to the limit", 1, gai_step_grow},
    {"give pages back for new ones", 0, gai_step_recycle},
    {"have other pools give back", 0, gai_step_borrow},
    {"have the stream wait", 0, gai_step_wait},
    {"wait on the host for events", 0, gai_step_wait_host},
    {"wait for the device", 0, gai_step_wait_device},
    {"give back again", 0, gai_step_recycle},
    {"have other pools give back, with a wait", 0, gai_step_borrow_last},
};

/* ==== OUT OF MEMORY =============================================================================================== */
/* >>outofmemory */

/* Why a request was refused: the report and its messages. Under the pool's lock. Calls ladder steps. */

/* Which limit stands in the way of so many bytes. */
static void gai_pool_say_limit(const galloc_pool *pool, size_t bytes, char *text, size_t size)
{
    size_t share = gai_pool_share(pool), held, limit, own, left;
    gai_lock_on(&gai_budget_lock);
    held = pool->budget->held;
    limit = pool->budget->limit;
    own = gai_left(share, pool->taken);
    gai_lock_off(&gai_budget_lock);
    if (limit < share || (bytes <= share && own > gai_left(limit, held)))
        (void)snprintf(text, size, "the device_limit is %zu, of which the device's pools hold %zu", limit, held);
    else if (share < gai_min(pool->config.memory_limit, pool->device_bytes))
        (void)snprintf(text, size, "per_process_memory_fraction leaves the pool %zu", share);
    else
        (void)snprintf(text, size, "the pool's memory_limit is %zu", pool->config.memory_limit);
    left = gai_min(own, gai_left(limit, held));
    if (!pool->config.backend && bytes <= left && gai_up(bytes, pool->granularity) > left) {
        size_t length = strlen(text);
        (void)snprintf(text + length, size - length, "; pages have %zu bytes", pool->granularity);
    }
}

/* Without addresses apart from memory a segment is as long as the alignment: no device has that. */
static int gai_job_is_misaligned(const gai_job *job)
{
    const galloc_config *config = &job->pool->config;
    return (config->backend || !config->expandable_segments) && job->params.alignment > job->pool->device_bytes;
}

/* More than there can ever be: nothing that is waited for or given back would make it fit. */
static int gai_job_is_hopeless(const gai_job *job)
{
    if (job->grows) return 0;
    return job->params.bytes > gai_pool_capacity(job->pool) || gai_job_is_misaligned(job);
}

/* What a step may change: bytes that the job's stream may have for the asking, and those that the pool holds. */
typedef struct gai_job_bytes {
    size_t free, held;
} gai_job_bytes;

static gai_job_bytes gai_job_count_bytes(const gai_job *job)
{
    galloc_pool *pool = job->pool;
    gai_job_bytes bytes_now;
    gai_lock_on(&pool->lock);
    bytes_now.free = pool->common.bytes + (job->params.stream ? job->params.stream->free.bytes : 0);
    bytes_now.held = pool->stats.reserved.current;
    gai_lock_off(&pool->lock);
    return bytes_now;
}

static size_t gai_gained(const gai_job_bytes *before, const gai_job_bytes *after)
{
    return (after->free > before->free ? after->free - before->free : 0) +
           (before->held > after->held ? before->held - after->held : 0);
}

/* Free memory, as the job's stream sees it. */
typedef struct gai_survey {
    const galloc_pool *pool;
    gai_stream *stream;
    galloc_report *report;
    size_t movable;
} gai_survey;

/* The mark that keeps the byte at `at` from the stream, a graph's if there is one; NULL: none does. *until: up to where
   that is so, `end` at most. */
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

/* Adds [at, end), which is free and in one piece, to what it is: each byte once. */
static void gai_survey_range(gai_survey *survey, const gai_mark *marks, uintptr_t at, uintptr_t end)
{
    galloc_report *report = survey->report;
    uintptr_t begin = at, until;
    for (; at < end; at = until) {
        const gai_mark *bar = gai_survey_bar(survey, marks, at, end, &until);
        if (!bar) {
            report->usable += until - at;
            report->largest_usable = gai_max(report->largest_usable, until - begin);
            continue;
        }
        begin = until;
        if (bar->stream->capture) report->graph_bytes += until - at;
        else gai_survey_strand(survey, bar->stream, until - at);
    }
}

/* Bytes of a free block's whole pages that the stream may have elsewhere. */
static size_t gai_survey_movable(const gai_survey *survey, const gai_block *block)
{
    gai_params params;
    gai_page_filter filter;
    uintptr_t at, begin = 0, end = block->addr + block->bytes;
    size_t bytes = 0;
    if (block->segment->fixed || !gai_block_whole_pages(block, UINTPTR_MAX, &begin)) return 0;
    memset(&params, 0, sizeof params);
    memset(&filter, 0, sizeof filter);
    params.stream = survey->stream;
    filter.params = &params;
    for (at = begin; at < end && at + gai_page_at(at)->bytes <= end; at += gai_page_at(at)->bytes)
        if (gai_mapping_is_spare(survey->pool, gai_page_at(at), block->marks, &filter)) bytes += gai_page_at(at)->bytes;
    return bytes;
}

static void gai_survey_set(gai_survey *survey, const gai_set *set)
{
    const gai_block *block;
    for (block = set->oldest; block; block = block->newer) {
        gai_survey_range(survey, block->marks, block->addr, block->addr + block->bytes);
        survey->movable += gai_survey_movable(survey, block);
    }
}

/* What a stream cache holds is its stream's, in pieces that have not merged. */
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

/* Other homes' blocks are never the stream's, whatever has been done; but those of a stream that is gone are taken
   over. */
static void gai_survey_block_pool(gai_survey *survey, const gai_block_pool *block_pool)
{
    if (block_pool->stream == survey->stream || (!block_pool->stream && !block_pool->captured))
        gai_survey_set(survey, &block_pool->free);
    else if (!block_pool->stream || block_pool->captured) survey->report->graph_bytes += block_pool->free.bytes;
    else gai_survey_strand(survey, block_pool->stream, block_pool->free.bytes);
}

static void gai_survey_all(gai_survey *survey, galloc_pool *pool)
{
    const gai_block_pool *block_pool;
    const gai_mapping *mapping;
    gai_stream *stream;
    for (stream = pool->streams; stream; stream = stream->next) stream->stranded = 0;
    gai_survey_set(survey, &pool->common);
    gai_survey_set(survey, &pool->mixed);
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        gai_survey_block_pool(survey, block_pool);
    for (stream = pool->streams; stream; stream = stream->next) {
        gai_survey_set(survey, &stream->free);
        gai_survey_cache(survey, stream);
    }
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer) {
        size_t before = survey->report->usable;
        if (!gai_block_is_parked(mapping->block)) continue;
        gai_survey_range(survey, mapping->block->marks, mapping->addr, mapping->addr + mapping->bytes);
        if (survey->report->usable - before == mapping->bytes) survey->movable += mapping->bytes;
    }
}

/* Names the streams that strand most, the most first, and adds up the others. */
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

/* In words, what stood in the way at last. */
static void gai_job_cause(const gai_job *job, char *text, size_t size)
{
    const galloc_pool *pool = job->pool;
    const char *at_once = job->rejected && !gai_job_is_hopeless(job) ? "refused at once: " : "";
    size_t length = strlen(at_once);
    (void)snprintf(text, size, "%s", at_once);
    if (job->saved)
        (void)snprintf(text + length, size - length, "%s: %s", job->who,
                       cudaGetErrorString((cudaError_t)(int)job->saved));
    else if (job->params.bytes > pool->device_bytes)
        (void)snprintf(text, size, "the device has %zu", pool->device_bytes);
    else if (gai_job_is_misaligned(job))
        (void)snprintf(text, size, "alignment %zu takes as much memory here, and the device has %zu",
                       job->params.alignment, pool->device_bytes);
    else if (gai_pool_is_still(pool))
        (void)snprintf(text, size, "nothing is mapped while on_map or on_unmap is under way");
    else
        gai_pool_say_limit(pool, job->params.bytes, text + length, size - length);
}

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
    report->largest_usable = gai_max(report->largest_usable, pool->kept); /* the driver does not say */
    gai_pool_unlock_caches(pool);
    gai_report_streams(report, pool);
    report->live = stats.live.current;
    report->rounding = stats.allocated.current - stats.live.current;
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

/* What the device has, and what could be had of it. Asking harms no capture; what is not known stays 0. In the pool's
   scope. */
static void gai_report_device(galloc_report *report, const galloc_pool *pool)
{
    size_t more = report->room;
    report->device_total = pool->device_bytes;
    report->device_known = !gai_cu.MemGetInfo(&report->device_free, &report->device_total);
    if (!report->device_known) report->device_free = 0;
    if (report->device_known) more = gai_min(more, report->device_free);
    report->largest_possible += gai_down(more, pool->granularity);
    report->largest_possible = gai_max(report->largest_possible, report->largest_usable);
}

/* Takes down what there is, now that the job fails. With `growth` held, in a scope. */
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
    report->rounded = job->params.bytes;
    report->stream_id = job->params.stream ? job->params.stream->stream_id : 0;
    report->captured = gai_job_is_captured(job);
    report->grows = job->grows != NULL;
    report->rejected = job->rejected;
    report->backend = pool->config.backend;
    report->expandable_segments = pool->config.expandable_segments;
    report->reuse = pool->config.reuse;
    report->wait_limit_ms = pool->config.wait_limit_ms;
    gai_lock_on(&pool->lock);
    gai_report_pool(report, job);
    gai_lock_off(&pool->lock);
    gai_report_device(report, pool);
}

/* Adds what other pools hold. With no lock held. */
static void gai_report_add_pools(galloc_report *report)
{
    galloc_pool *pool;
    size_t known;
    report->other_pools = report->others_held = report->others_cached = 0;
    gai_lock_on(&gai_global_lock);
    for (pool = gai_pools; pool; pool = pool->next) {
        galloc_stats now;
        if (pool->handle == report->pool || pool->config.device != report->device) continue;
        gai_lock_on(&pool->lock);
        gai_stats_now(pool, &now);
        gai_lock_off(&pool->lock);
        report->other_pools++;
        report->others_held += now.reserved.current;
        report->others_cached += now.cached.current;
    }
    gai_lock_off(&gai_global_lock);
    known = report->held + report->others_held + report->device_free;
    if (report->device_known) report->outside = report->device_total - gai_min(report->device_total, known);
}

/* This thread's last, and whether its last failure was for want of memory. */
static GAI_THREAD_LOCAL galloc_report gai_last_report;
static GAI_THREAD_LOCAL int gai_has_report;

static void gai_job_say_no_memory(gai_job *job, const galloc_report *report)
{
    char graphs[48] = "", stranded[64] = "";
    if (report->graph_bytes) (void)snprintf(graphs, sizeof graphs, ", graphs own %zu", report->graph_bytes);
    if (report->stranded)
        (void)snprintf(stranded, sizeof stranded, ", %zu wait for other streams", report->stranded);
    job->error = gai_fail(cudaErrorMemoryAllocation,
                          "out of memory: asked for %zu %sbytes on device %d; live %zu, held %zu%s%s; %s",
                          report->asked, job->grows ? "more " : "", report->device, report->live, report->held, graphs,
                          stranded, report->cause);
}

/* A program that makes streams and never retires them leaves stream states behind: once there are very many, one wait
   for the device proves all of them complete, and those that hold nothing then are forgotten. */
#define GAI_STREAMS_MANY 1024

static void gai_pool_leave(galloc_pool *pool, gai_scope *scope, int may_wait)
{
    int many;
    gai_lock_on(&pool->lock);
    many = pool->stream_count > GAI_STREAMS_MANY;
    gai_lock_off(&pool->lock);
    if (many && may_wait) (void)gai_pool_wait(pool);
    gai_pool_sweep_streams(pool);
    gai_scope_leave(scope);
    gai_lock_off(&pool->growth);
}

/* The block is as good as given out: only now do the counters say so, and it can be freed. Lock held. */
static void gai_block_count(galloc_pool *pool, gai_block *block, int hit)
{
    pool->stats.blocks.current++;
    pool->stats.blocks.total++;
    gai_stat_used(pool, block->bytes, (size_t)block->requested);
    pool->stats.mallocs++;
    pool->stats.hits += (uint64_t)hit;
    if (pool->tuning.watching) gai_pool_watch_given(pool, block);
    gai_block_let_go(block);
}

static void gai_job_count(gai_job *job)
{
    if (!job->got || job->params.just_ready || job->grows) return;
    gai_block_count(job->pool, job->got, !job->grown);
    if (job->pool->torch) gai_torch_count_used(job->pool, job->got);
}

/* Where segments have homes a block that grows takes what is behind it as it does elsewhere. */
static const gai_ladder_step *gai_job_ladder(const gai_job *job)
{
    return job->pool->torch && !job->grows ? gai_torch_ladder : gai_ladder;
}

/* Takes one step after the other until the job is done, and notes what each one gained. */
static void gai_job_take_steps(gai_job *job, galloc_report *report)
{
    const galloc_pool *pool = job->pool;
    gai_job_bytes before, after;
    int i, hopeless = gai_job_is_hopeless(job);
    report->steps_taken = !hopeless;
    job->rejected = hopeless || pool->config.throw_on_cudamalloc_oom;
    if (hopeless) return;
    before = gai_job_count_bytes(job);
    for (i = 0; i < GALLOC_REPORT_STEPS; i++, before = after) {
        const gai_ladder_step *step = &gai_job_ladder(job)[i];
        if (!step->take) return;
        job->left_out = job->rejected && !step->at_once ? "throw_on_cudamalloc_oom is on" : NULL;
        if (!job->left_out && step->take(job)) return;
        after = gai_job_count_bytes(job);
        report->steps[i].left_out = job->left_out;
        report->steps[i].gained += gai_gained(&before, &after);
    }
}

/* ==== HEURISTIC =================================================================================================== */
/* >>heuristic */

/* strategy:heuristic: settings that follow what the pool sees. Under the pool's lock. Calls stream cache, parking. */

/* It looks at misses only, with `growth` and the lock held, and weighs memory against calls into the driver by one
   rate: one percent of the peak of live bytes is worth the time that it takes to create the peak once, in pages of 64
   MiB. Moving one costs about a quarter of creating such a page and giving it back, on an H200; only that ratio
   counts. */
#define GAI_TUNE_MOVES 4.0       /* moves that cost what a page of 64 MiB costs */
#define GAI_TUNE_PAGES 64        /* smaller heaps are taken for one of so many: their moves say too little */
#define GAI_TUNE_OVERHEAD_MAX 100u /* percent */
#define GAI_TUNE_CREATIONS 2.25  /* small pages, whose creation costs what one of 64 MiB costs: without what grows with
                                    their bytes, and would be paid for large ones too */
#define GAI_TUNE_CREATED 16      /* pages of 64 MiB: smaller heaps create what they must */
#define GAI_TUNE_CREATED_MAX 50u /* thousandths of overhead, for fewer creations */
#define GAI_TUNE_CHURN 1.125     /* asked for over peak: up to here a program only grows */
#define GAI_TUNE_PRESSED 0.9375  /* of what the pool may hold */
#define GAI_TUNE_EASED 0.75

/* Of requests below 2 MiB, what rounding costs in parts of the peak of live bytes: up to here it may begin, and it ends
   above that. */
#define GAI_TUNE_ROUND 1024
#define GAI_TUNE_ROUND_END 256

/* What is set now. */
static galloc_decision gai_tune_settings(const gai_tuning *tuning)
{
    galloc_decision settings;
    memset(&settings, 0, sizeof settings);
    settings.overhead = tuning->overhead;
    settings.growth = tuning->growth;
    settings.lane_bytes = (size_t)tuning->lane_bytes;
    settings.divisions = (unsigned)tuning->divisions;
    return settings;
}

/* Stream caches and ways go by other sizes from now on. What is in a stream cache keeps its size; a thread that still
   goes by an old way may miss, or get a block that is smaller than new ones and yet large enough. */
static void gai_pool_resize_caches(galloc_pool *pool)
{
    gai_stream *stream;
    gai_pool_choose_rounding(pool);
    for (stream = pool->streams; stream; stream = stream->next)
        if (stream->cache.open) gai_cache_change(pool, stream, stream->life, gai_cache_bound(pool, stream));
    gai_generation_end();
}

/* New settings, with the reason. Once the list is full the last ones stay. */
static void gai_pool_decide(galloc_pool *pool, const galloc_decision *settings, const char *reason)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision *decision = &tuning->decisions[tuning->decided++];
    int sizes = tuning->lane_bytes != settings->lane_bytes || tuning->divisions != settings->divisions;
    *decision = *settings;
    tuning->overhead = settings->overhead;
    tuning->growth = settings->growth;
    gai_set_relaxed(&tuning->lane_bytes, settings->lane_bytes);
    gai_set_relaxed(&tuning->divisions, settings->divisions);
    if (sizes) gai_pool_resize_caches(pool);
    tuning->watching = tuning->decided < GALLOC_DECISIONS;
    tuning->moves = tuning->created = 0;
    decision->live = gai_pool_live(pool);
    decision->held = pool->stats.reserved.current;
    decision->reason = reason;
    gai_note("heuristic: overhead %u.%04u, growth %zu MiB, lane_bytes %zu, divisions %u from now on, at %zu bytes "
             "live, %zu held: %s", (unsigned)settings->overhead, (unsigned)(settings->overhead * 10000 + 0.5) % 10000,
             settings->growth / GAI_MIB, settings->lane_bytes, settings->divisions, decision->live, decision->held,
             reason);
}

/* Near the end of memory all of it must be usable: small pages, and moves before pages. */
static int gai_tune_pressure(galloc_pool *pool, int refused)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision settings = gai_tune_settings(tuning);
    double held = (double)pool->stats.reserved.current, most = (double)gai_pool_capacity(pool);
    if (!tuning->pressed && (refused || held > most * GAI_TUNE_PRESSED)) {
        tuning->pressed = 1;
        tuning->eased = tuning->overhead;
        settings.overhead = 0;
        settings.growth = 0;
        settings.lane_bytes = pool->config.lane_bytes;
        settings.divisions = pool->config.roundup_power2_divisions[0];
        gai_pool_decide(pool, &settings, refused ? "the device has no more memory" : "memory is nearly used up");
    } else if (tuning->pressed && !refused && held < most * GAI_TUNE_EASED) {
        tuning->pressed = 0;
        settings.overhead = tuning->eased;
        settings.growth = pool->config.growth;
        gai_pool_decide(pool, &settings, "there is memory again");
    }
    return tuning->pressed;
}

/* While a program only grows, each page is going to be full: large ones need fewer calls. */
static void gai_tune_growth(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision settings = gai_tune_settings(tuning);
    double held = (double)pool->stats.reserved.current;
    size_t page;
    if (tuning->churned || tuning->overhead < GAI_OVERHEAD_FRUGAL) return;
    if (tuning->asked > GAI_TUNE_CHURN * (double)pool->live_peak) {
        tuning->churned = 1;
        if (tuning->growth == pool->config.growth) return;
        settings.growth = pool->config.growth;
        gai_pool_decide(pool, &settings, "blocks come and go: pages that can move");
        return;
    }
    page = gai_power_below(gai_max((size_t)(held * tuning->overhead / 2), 1));
    page = gai_min(page, 4 * GAI_PAGE_MAX);
    if (page <= gai_max(GAI_PAGE_MAX, tuning->growth)) return;
    settings.growth = page;
    gai_pool_decide(pool, &settings, "the program only grows: large pages will be full");
}

/* By so many percent what is held exceeds the peak of live bytes. */
static unsigned gai_percents_above(const galloc_pool *pool)
{
    size_t held = pool->stats.reserved.current, peak = gai_max(pool->live_peak, 1);
    return held > peak ? (unsigned)((double)(held - peak) * 100 / (double)peak) : 0;
}

/* Renting or buying: once moves have cost what the memory is worth that would have spared them, have the memory. What
   is held already costs nothing more. */
static void gai_tune_moves(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision settings = gai_tune_settings(tuning);
    double peak = (double)pool->live_peak, most = (double)gai_pool_capacity(pool);
    double pages = (double)gai_max(pool->live_peak / GAI_PAGE_MAX, GAI_TUNE_PAGES);
    unsigned now = (unsigned)(tuning->overhead * 100 + 0.5), held = gai_percents_above(pool), from, to;
    from = now > held ? now : held;
    to = from + (now ? now : 1);
    if (to > GAI_TUNE_OVERHEAD_MAX) to = GAI_TUNE_OVERHEAD_MAX;
    if (to <= now || peak * (1 + to / 100.0) > most * GAI_TUNE_EASED) return;
    if ((double)tuning->moves < GAI_TUNE_MOVES * pages * (to > from ? to - from : 1)) return;
    settings.overhead = to / 100.0;
    gai_pool_decide(pool, &settings, "moves have cost more than the memory that spares them");
}

/* Pages are parts of the overhead: the more of it, the fewer are created. Once that has cost twice what the overhead is
   worth, have a quarter more. Not where the size of pages is given, or comes from a limit. */
static void gai_tune_creations(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision settings = gai_tune_settings(tuning);
    double pages = (double)(pool->live_peak / GAI_PAGE_MAX), rent = (double)tuning->created / GAI_TUNE_CREATIONS;
    unsigned now = (unsigned)(tuning->overhead * 1000 + 0.5);
    if (tuning->growth || gai_pool_capacity(pool) < pool->device_bytes || pages < GAI_TUNE_CREATED) return;
    if (tuning->overhead < GAI_OVERHEAD_FRUGAL || now >= GAI_TUNE_CREATED_MAX) return;
    if (rent < 2 * tuning->overhead * 100 * pages) return;
    settings.overhead = (double)gai_min(now + now / 4, GAI_TUNE_CREATED_MAX) / 1000.0;
    gai_pool_decide(pool, &settings, "pages are created for more than the memory that spares them");
}

/* With `growth` and the lock held, after a miss; `refused`: the driver had no more memory. */
static void gai_pool_tune(galloc_pool *pool, size_t asked, int refused)
{
    if (!pool->tuning.watching) return;
    pool->tuning.asked += (double)asked;
    if (gai_tune_pressure(pool, refused) || !pool->tuning.watching) return;
    gai_tune_growth(pool);
    if (pool->tuning.watching) gai_tune_creations(pool);
    if (pool->tuning.watching) gai_tune_moves(pool);
}

/* What rounding costs, or would cost, in what is used now. */
static size_t gai_pool_rounding_costs(const galloc_pool *pool)
{
    const gai_segment *segment;
    const gai_block *block;
    size_t costs = 0;
    for (segment = pool->segments; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next)
            if (block->kind == GAI_USED && block->requested < GAI_TUNE_SMALL)
                costs += gai_block_alike(block) - gai_up((size_t)block->requested, GAI_UNIT);
    return costs;
}

/* May small sizes be rounded, or stay so? The heap is walked, at most once for as many misses as it has blocks. */
static int gai_tune_may_round(galloc_pool *pool, size_t part)
{
    size_t costs;
    if (pool->tuning.unsized < pool->stats.blocks.current) return part == GAI_TUNE_ROUND_END;
    pool->tuning.unsized = 0;
    costs = gai_pool_rounding_costs(pool);
    return costs <= pool->live_peak / part;
}

/* Stream states that hold what would have been in this one. 0: those cannot be had, or one has not served half of the
   misses that were watched. */
static size_t gai_tune_streams(const galloc_pool *pool, const gai_ghost *ghost)
{
    size_t bytes;
    if (ghost->hits < GAI_TUNE_WINDOW / 2) return 0;
    bytes = gai_power_below(2 * ghost->most - 1);
    if (bytes > GAI_MARK_BYTES && !gai_pool_has_one_stream(pool)) return 0;
    return gai_max(bytes, (size_t)pool->tuning.lane_bytes);
}

/* Sizes have been watched: had stream caches with room for more of them, or for sizes that are alike, spared half of
   the misses? With the lock held. */
static void gai_pool_tune_sizes(galloc_pool *pool)
{
    gai_tuning *tuning = &pool->tuning;
    galloc_decision settings = gai_tune_settings(tuning);
    unsigned given = pool->config.roundup_power2_divisions[0];
    size_t same = gai_tune_streams(pool, &tuning->same), alike = gai_tune_streams(pool, &tuning->alike);
    if (!tuning->watching) return;
    tuning->unsized += tuning->watched;
    pool->special &= ~(uint64_t)GAI_ROUTE_TUNE;
    gai_tune_anew(tuning);
    if (tuning->pressed) same = alike = 0;
    if (settings.divisions != given && !gai_tune_may_round(pool, GAI_TUNE_ROUND_END)) {
        settings.divisions = given;
        gai_pool_decide(pool, &settings, "rounding has come to cost memory");
    } else if (same > settings.lane_bytes) {
        settings.lane_bytes = same;
        gai_pool_decide(pool, &settings, "the same sizes come again: larger lanes have them at hand");
    } else if (!same && alike && given < 2 && settings.divisions == given && gai_tune_may_round(pool, GAI_TUNE_ROUND)) {
        settings.divisions = GAI_TUNE_STEPS;
        settings.lane_bytes = alike;
        gai_pool_decide(pool, &settings, "sizes that are alike come again: rounded, one serves for the other");
    } else {
        gai_tune_rest(pool, tuning);
    }
}

/* ==== JOB ========================================================================================================= */
/* >>job */

/* One request from search to answer: the ladder, callbacks on_oom and on_reject, the report. Calls all above. */

/* The way for a request that nothing at hand fits. Threads that miss together come here one by one, and search
   first. Frees that the program made for this very call are found: its stream lives, so they were made on it. */
static void gai_job_climb(gai_job *job, galloc_report *report)
{
    galloc_pool *pool = job->pool;
    gai_scope scope;
    job->error = gai_pool_enter(pool, &scope);
    if (job->error) return;
    if (report->rounds && job->params.stream) {
        gai_lock_on(&pool->lock);
        (void)gai_stream_flush(pool, job->params.stream, 1);
        gai_lock_off(&pool->lock);
    }
    if (!gai_job_search(job, GAI_REACH_OWN)) {
        gai_job_take_steps(job, report);
        if (!gai_job_is_done(job)) gai_report_fill(report, job);
    }
    gai_lock_on(&pool->lock);
    gai_job_count(job);
    gai_stat_cached(pool);
    gai_pool_tune(pool, job->got ? job->params.requested : 0, job->saved == CUDA_ERROR_OUT_OF_MEMORY);
    gai_lock_off(&pool->lock);
    gai_pool_leave(pool, &scope, !gai_job_is_captured(job) && !gai_job_waits_are_limited(job));
}

static galloc_callbacks gai_pool_callbacks(galloc_pool *pool)
{
    galloc_callbacks callbacks;
    gai_lock_on(&pool->lock);
    callbacks = pool->callbacks;
    gai_lock_off(&pool->lock);
    return callbacks;
}

/* Everything has failed: asks the program to free something. 1: all is to be tried again. With no lock held. */
static int gai_job_asks(gai_job *job, galloc_report *report)
{
    galloc_callbacks call = gai_pool_callbacks(job->pool);
    gai_saved_message saved;
    int again;
    gai_report_add_pools(report);
    if (!call.on_oom || job->rejected || gai_in_shortage || gai_in_mapping) return 0;
    if (report->rounds >= job->pool->config.max_retries) return 0;
    gai_callback_begin(&gai_in_shortage, &saved);
    again = call.on_oom(report, call.user);
    gai_callback_end(&gai_in_shortage, &saved);
    if (!again) return 0;
    report->rounds++;
    job->saved = CUDA_SUCCESS;
    return 1;
}

/* The end of a job for which there is no memory. */
static void gai_job_refuse(gai_job *job, const galloc_report *report)
{
    galloc_callbacks call = gai_pool_callbacks(job->pool);
    gai_saved_message saved;
    if (job->rejected && call.on_reject && !gai_in_shortage) {
        gai_callback_begin(&gai_in_shortage, &saved);
        call.on_reject(report, call.user);
        gai_callback_end(&gai_in_shortage, &saved);
    }
    gai_lock_on(&job->pool->lock);
    job->pool->torch_stats.num_ooms++;
    gai_lock_off(&job->pool->lock);
    gai_last_report = *report;
    job->reported = 1;
    gai_job_say_no_memory(job, report);
}

static void gai_job_run(gai_job *job)
{
    galloc_report report;
    int i;
    memset(report.steps, 0, sizeof report.steps);
    for (i = 0; i < GALLOC_REPORT_STEPS; i++) report.steps[i].name = gai_job_ladder(job)[i].name;
    report.rounds = 0;
    do gai_job_climb(job, &report);
    while (!gai_job_is_done(job) && gai_job_asks(job, &report));
    if (!gai_job_is_done(job)) gai_job_refuse(job, &report);
}

/* ==== ALLOC ======================================================================================================= */
/* >>alloc */

/* Allocation in a pool. Calls job, search, stream cache. */

/* A pool that met a sticky error gives out nothing until its context is another one. */
static cudaError_t gai_pool_refuses(galloc_pool *pool)
{
    unsigned long long known;
    uint64_t broken;
    gai_lock_on(&pool->lock);
    broken = pool->broken;
    known = pool->context_id;
    gai_lock_off(&pool->lock);
    if (!broken || gai_context_health(pool->context, known) == GAI_DEAD) return cudaSuccess;
    return gai_fail((cudaError_t)(int)broken, "the pool of device %d gives out nothing after: %s", pool->config.device,
                    cudaGetErrorString((cudaError_t)(int)broken));
}

/* Checks a request and rounds it. */
static cudaError_t gai_params_of(const galloc_pool *pool, const galloc_request *request, gai_params *params)
{
    size_t alignment = request->alignment ? request->alignment : GAI_UNIT;
    size_t room = request->max_bytes ? gai_max(request->max_bytes, request->bytes) : 0;
    size_t unit = room && !pool->config.backend ? pool->granularity : GAI_UNIT;
    memset(params, 0, sizeof *params);
    if (!gai_is_power_of_two(alignment) || alignment > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_fail(cudaErrorInvalidValue, "alignment %zu: must be a power of two, at most 2^55",
                        request->alignment);
    if (request->lifetime != GALLOC_LIFETIME_ANY && request->lifetime != GALLOC_LIFETIME_LONG)
        return gai_fail(cudaErrorInvalidValue, "lifetime %d: must be one of GALLOC_LIFETIME_...", request->lifetime);
    if (!gai_round(request->bytes, unit, &params->bytes) || !gai_round(room, unit, &params->room) ||
        params->bytes > ((size_t)1 << (GAI_ADDRESS_BITS - 2)) || params->room > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_fail(cudaErrorMemoryAllocation, "out of memory: %zu bytes are more than there are addresses",
                        gai_max(request->bytes, room));
    if (!room) params->bytes = gai_rounded(pool, request->bytes);
    if (room && !pool->config.expandable_segments) {
        params->bytes = params->room;
        params->room = 0;
    }
    params->alignment = gai_max(alignment, unit);
    params->requested = request->bytes;
    params->tag = request->tag;
    params->growable = room != 0 || pool->config.backend; /* what the driver was asked for stays the block's */
    params->far = request->lifetime == GALLOC_LIFETIME_LONG && !pool->torch; /* there the low end is always taken */
    params->small = params->bytes <= GAI_TORCH_SMALL && params->alignment <= GAI_FIXED_SMALL;
    params->slot = pool->pooled && !room && !params->far && params->alignment <= GAI_UNIT &&
                   params->bytes <= GAI_SLOT_MOST;
    return cudaSuccess;
}

/* A stream of another context than the pool's lives on when that one is reset, and nothing else would tell that what
   the pool has of cudaMalloc is gone. Called with the lock held; lets it go meanwhile. */
static cudaError_t gai_pool_look_for_reset(galloc_pool *pool)
{
    cudaError_t error = cudaSuccess;
    CUcontext context = pool->context;
    unsigned long long id = pool->context_id;
    gai_lock_off(&pool->lock);
    if (gai_context_health(context, id) != GAI_ALIVE) {
        gai_lock_on(&pool->growth);
        error = gai_pool_check_context(pool);
        gai_lock_off(&pool->growth);
    }
    gai_lock_on(&pool->lock);
    return error;
}

/* Serves the request from what is at hand, else by the ladder. */
static cudaError_t gai_job_do(gai_job *job)
{
    galloc_pool *pool = job->pool;
    int done = 0;
    gai_lock_on(&pool->lock);
    if (pool->special & GAI_ROUTE_TUNE) gai_pool_tune_sizes(pool);
    job->params.stream = gai_stream_hold(pool, &job->site);
    if (job->params.stream) {
        if (pool->mortal && !job->site.own_context) job->error = gai_pool_look_for_reset(pool);
        if (!job->error) gai_job_search_locked(job, GAI_REACH_OWN);
        if (!job->error) gai_job_count(job);
        done = gai_job_is_done(job);
        if (done) gai_stream_release(pool, job->params.stream, &job->site);
    }
    gai_lock_off(&pool->lock);
    if (!job->params.stream) return gai_stream_refused(&job->site);
    if (!done) {
        gai_job_run(job);
        gai_lock_on(&pool->lock);
        gai_stream_release(pool, job->params.stream, &job->site);
        gai_lock_off(&pool->lock);
    }
    return job->got ? cudaSuccess : job->error;
}

static cudaError_t gai_pool_alloc(galloc_pool *pool, void **ptr, const galloc_request *request, gai_site *site)
{
    gai_job job;
    cudaError_t error = cudaSuccess;
    memset((char *)&job + offsetof(gai_job, got), 0, sizeof job - offsetof(gai_job, got));
    job.pool = pool;
    job.site = *site;
    if (gai_load(&pool->broken)) error = gai_pool_refuses(pool);
    if (!error) error = gai_params_of(pool, request, &job.params);
    if (!error) error = gai_job_do(&job);
    if (job.site.life != site->life) *site = job.site;
    if (!error) {
        *ptr = (void *)job.got->addr;
        return cudaSuccess;
    }
    gai_has_report = job.reported;
    gai_lock_on(&pool->lock);
    pool->stats.failures++;
    pool->stats.rejections += (uint64_t)(job.reported && job.rejected);
    gai_lock_off(&pool->lock);
    return error;
}

/* The end of a short way, which has kept the lock all the time. What else gai_stream_release does can have become due
   only by a stream cache that was emptied, by bytes freed beside other streams, or by somebody who asks. */
static GAI_INLINE void gai_stream_pass(galloc_pool *pool, gai_stream *stream, const gai_site *site, int changed)
{
    if (!changed && stream->cache.open == stream->life) return; /* nobody asks: that shuts it */
    stream->busy++;
    gai_stream_release(pool, stream, site);
}

/* The same where sizes are rounded, with the lock held. Where strategy:pooled what the stream cache holds is of other
   sizes, and stays there; only for what has no class the stream cache is emptied. */
GAI_APART
static gai_block *gai_pool_take_rounded(galloc_pool *pool, const gai_site *site, size_t bytes, uint32_t tag)
{
    gai_stream *stream = site->stream;
    size_t wanted = gai_rounded(pool, bytes);
    gai_block *block = NULL;
    int changed = 0, slot = pool->pooled && wanted <= GAI_SLOT_MOST;
    if (pool->broken || pool->special & (GAI_ROUTE_LONG | GAI_ROUTE_TUNE | GAI_ROUTE_ENDS)) return NULL;
    if (stream->life != site->life) return NULL;
    if (slot) gai_stream_note(stream, site);
    else changed = gai_stream_see(pool, stream, site);
    block = slot ? gai_find_slot(pool, stream, wanted) : gai_find_plain(pool, stream, wanted);
    if (block) block = gai_block_take_first(pool, block, wanted, stream, bytes, tag);
    if (block) gai_block_count(pool, block, 1);
    gai_stream_pass(pool, stream, site, changed);
    return block;
}

/* The short way of a plain request, for a call that knows its stream state: what is at hand there, with the lock taken
   once and nothing put together for later steps. NULL: the long way may do more; nothing has changed but that the
   stream's cache is empty. `empty`: it was found so. */
static GAI_INLINE gai_block *gai_pool_take_near(galloc_pool *pool, const gai_site *site, size_t bytes, uint32_t tag,
                                                int empty)
{
    gai_block *block = NULL;
    gai_stream *stream = site->stream;
    size_t wanted = gai_up(bytes, GAI_UNIT);
    gai_lock_on(&pool->lock);
    if (stream->life == site->life && !(pool->broken | pool->special)) {
        int changed = (!empty || stream->retired) && gai_stream_see(pool, stream, site);
        block = gai_find_plain(pool, stream, wanted);
        if (block) block = gai_block_take_first(pool, block, wanted, stream, bytes, tag);
        if (block) gai_block_count(pool, block, 1);
        gai_stream_pass(pool, stream, site, changed);
    } else if (pool->special & (GAI_ROUTE_SLOTS | GAI_ROUTE_ROUNDED)) {
        block = gai_pool_take_rounded(pool, site, bytes, tag);
    }
    gai_lock_off(&pool->lock);
    return block;
}

/* ==== FREE ======================================================================================================== */
/* >>free */

/* galloc_free and its marks. Under the pool's lock. Calls take, events. */

/* The block of another backend that an address lies in. With the lock held. */
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

static uint64_t gai_given_pools; /* pools of other backends */

/* Other backends' blocks are in no map of pages. An address inside one is looked for in all of these pools. */
static galloc_pool *gai_pool_of_given(const void *ptr)
{
    galloc_pool *pool;
    gai_block *block = gai_block_at((uintptr_t)ptr);
    int found = 0;
    if (!gai_load(&gai_given_pools)) return NULL;
    if (block) return (galloc_pool *)gai_load_pointer(&block->pool);
    gai_lock_on(&gai_global_lock);
    for (pool = gai_pools; pool; pool = pool->next) {
        if (!pool->config.backend) continue;
        gai_lock_on(&pool->lock);
        found = gai_given_around(pool, (uintptr_t)ptr) != NULL;
        gai_lock_off(&pool->lock);
        if (found) break;
    }
    gai_lock_off(&gai_global_lock);
    return pool;
}

static galloc_pool *gai_pool_of(const void *ptr)
{
    const gai_mapping *mapping = gai_page_at((uintptr_t)ptr);
    return mapping ? (galloc_pool *)gai_load_pointer(&mapping->pool) : gai_pool_of_given(ptr);
}

/* The used, free or parked block that an address lies in. Elsewhere what precedes an address may be another pool's, and
   that must not be looked at. With the lock held. */
static gai_block *gai_block_around(const galloc_pool *pool, uintptr_t addr)
{
    const gai_mapping *mapping = gai_page_at(addr);
    gai_block *block;
    if (pool->config.backend) return gai_given_around(pool, addr);
    if (!mapping || gai_load_pointer(&mapping->pool) != pool) return NULL;
    if (mapping->block) return gai_block_is_parked(mapping->block) ? mapping->block : NULL; /* parked, or on its way */
    block = gai_block_before(addr);
    return block && addr - block->addr < block->bytes ? block : NULL;
}

#if defined(GALLOC_STATIC)
#define GAI_OTHER_COPIES ", or another file's: with GALLOC_STATIC each file has a heap of its own"
#else
#define GAI_OTHER_COPIES ""
#endif

/* Says what is wrong with a pointer that is not the start of a used block. */
static cudaError_t gai_pointer_refused(galloc_pool *pool, const void *ptr)
{
    gai_block *block;
    uintptr_t base = 0;
    size_t bytes = 0;
    int used = 0;
    if (pool) {
        gai_lock_on(&pool->lock);
        block = gai_block_around(pool, (uintptr_t)ptr);
        used = block && gai_load_pointer(&block->held);
        if (used) base = block->addr;
        if (used) bytes = (size_t)gai_counted(&block->requested);
        gai_lock_off(&pool->lock);
    }
    if (used)
        return gai_fail(cudaErrorInvalidDevicePointer, "%p lies inside the block of %zu bytes at %p: give its start",
                        ptr, bytes, (void *)base);
    if (pool) return gai_fail(cudaErrorInvalidDevicePointer, "%p is free memory of galloc: freed already?", ptr);
    return gai_fail(cudaErrorInvalidDevicePointer, "%p is not galloc's: foreign, or given back to the device%s", ptr,
                    GAI_OTHER_COPIES);
}

static void gai_use_is_due(galloc_pool *pool, gai_stream *stream)
{
    stream->due = !stream->retired && gai_stream_is_plain(stream) && !gai_pool_has_one_stream(pool);
    pool->due |= stream->due;
}

/* The same for streams of record_stream, which count as having used the block until now: they are due to be marked as
   soon as the lock is let go. */
static void gai_block_stamp_uses(galloc_pool *pool, gai_block *block, gai_mark *recorded_uses)
{
    gai_mark *use;
    for (use = recorded_uses; use; use = use->next) gai_use_is_due(pool, use->stream);
    gai_block_stamp(pool, block, recorded_uses);
}

static void gai_marks_count_free(const gai_mark *mark)
{
    for (; mark; mark = mark->next) gai_set_relaxed(&mark->stream->busy_frees, mark->stream->busy_frees + 1);
}

/* The same for those of a block that is freed. */
static void gai_block_free_uses(galloc_pool *pool, gai_block *block)
{
    gai_mark *use;
    gai_marks_count_free(block->recorded_uses);
    for (use = block->recorded_uses; use; use = use->next) use->stream->uses--; /* the stamp counts it again */
    gai_block_stamp_uses(pool, block, block->recorded_uses);
    block->recorded_uses = NULL;
}

/* The driver's pool may have given the stream memory that it was still using before. Nothing is known of that but that
   the stream comes to an end of it: the block waits for it as well, on whichever stream it is freed. */
static void gai_block_stamp_first(galloc_pool *pool, gai_block *block, const gai_mark *marks)
{
    if (!gai_pool_is_async(pool) || block->segment->of_graph || !block->stream) return;
    for (; marks; marks = marks->next)
        if (marks->stream == block->stream) return;
    gai_block_stamp(pool, block, gai_mark_promised(pool, block->stream));
    gai_stream_ask(block->stream);
}

/* Bytes of a result that are freed on streams which are not of its graph: they follow nothing that is captured. So what
   was captured up to now may use them, not just what was captured before they were given out. With the lock held. */
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

/* A used block with all its marks becomes free, and is counted. With the lock held. */
static GAI_INLINE void gai_block_put(galloc_pool *pool, gai_block *block)
{
    const gai_stream *stream = block->stream;
    gai_stat_unused(pool, block->bytes, (size_t)block->requested);
    pool->stats.blocks.current--;
    pool->stats.frees++;
    if (pool->tuning.watching) gai_pool_watch_free(pool, block);
    gai_block_untake(pool, block);
    gai_block_give(pool, block);
    if ((!stream || !stream->blocks) && gai_pool_should_park(pool)) gai_pool_park(pool);
}

/* A block with room is freed: the streams of its marks are asked for events, since only what is known to be done can be
   in a room. 0: nobody would get that of a graph. With the lock held. */
static int gai_block_asks_marks(const galloc_pool *pool, const gai_block *block, const gai_mark *marks)
{
    if (block->stream && block->stream->capture) return 0;
    for (; marks; marks = marks->next) {
        if (marks->stream->capture_id) return 0;
        if (marks->stream->handle != CU_STREAM_LEGACY || gai_pool_has_one_stream(pool)) gai_stream_ask(marks->stream);
    }
    return 1;
}

/* Puts a used block back; `marks` name the streams whose work so far may still use it. With the lock held. */
static void gai_block_free(galloc_pool *pool, gai_block *block, gai_mark *marks)
{
    uintptr_t addr = block->addr;
    size_t bytes = block->bytes;
    int roomy = block->room && pool->config.expandable_segments && gai_block_asks_marks(pool, block, marks);
    if (block->stream && block->stream->capture) gai_block_stamp_result(block, block->stream, marks);
    if (marks) block->stream_id = marks->stream->stream_id;
    if (block->tag & GAI_CACHED && !(marks && marks->stream->life == block->life))
        gai_block_stamp_cache(pool, block);
    gai_marks_count_free(marks);
    if (block->segment->given) gai_block_stamp_first(pool, block, marks);
    gai_block_stamp(pool, block, marks);
    if (block->recorded_uses) gai_block_free_uses(pool, block);
    if (block->room) gai_block_give_room(pool, block);
    if (pool->torch) gai_torch_count_unused(pool, block);
    gai_block_put(pool, block);
    if (roomy) gai_pool_park_room(pool, addr, addr + bytes);
}

/* May an event be recorded on a stream that this call was not given, namely one of record_stream's? Not on another
   thread's default stream, which has the same handle here, and not while a capture would notice. A stream that was
   created lives, and its handle is its own; its id is not asked for, since another thread may begin to capture it, and
   would lose that. In its context. */
static int gai_stream_is_reachable(const gai_stream *stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    if (gai_cu.StreamIsCapturing(stream->handle, &status) || status != CU_STREAM_CAPTURE_STATUS_NONE) return 0;
    if (stream->handle != CU_STREAM_PER_THREAD) return 1;
    return !gai_cu.StreamGetId(stream->handle, &id) && id == stream->stream_id;
}

/* Records an event on each stream that record_stream named for a block just freed; what cannot be recorded now is
   asked for and left to the stream's next call. When it returns no other thread is still recording on one of them:
   the program may destroy them now. With the lock held, which is let go meanwhile. */
static void gai_pool_mark_due(galloc_pool *pool)
{
    gai_stream *stream;
    if (!pool->due) return;
    gai_lock_off(&pool->lock);
    gai_lock_on(&pool->marking);
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
        if (reachable && stream->asked) (void)gai_stream_mark(pool, stream, stream->handle, 0);
        stream->busy--;
    }
    gai_lock_off(&pool->marking);
}

/* The host has no memory to note a stream never seen before, but a free must not fail for that: once the stream's
   work is done there is nothing to note. */
static cudaError_t gai_free_after_waiting(galloc_pool *pool, void *ptr, gai_site *site)
{
    gai_scope scope;
    gai_block *block;
    CUresult result = site->capture_forbids ? CUDA_ERROR_OUT_OF_MEMORY : gai_site_context(site);
    if (site->capture) return gai_stream_refused(site); /* it cannot be waited for */
    if (!result) result = gai_scope_enter(&scope, site->context);
    if (!result) {
        result = GAI_CALL(pool, stream_synchronize, StreamSynchronize, (site->handle));
        gai_scope_leave(&scope);
    }
    if (result) return gai_driver_failed(result, "no host memory to note a new stream; waiting for it instead");
    gai_lock_on(&pool->lock);
    block = gai_block_claim(pool, ptr);
    if (block) gai_block_free(pool, block, NULL);
    if (block) gai_pool_mark_due(pool);
    gai_lock_off(&pool->lock);
    return block ? cudaSuccess : gai_pointer_refused(pool, ptr);
}

/* Does a free on the stream state's stream leave out what came before the capture? The graph comes after all that the
   program launches it after; what streams did with the block before, this one among them, they may still be doing when
   the graph is gone. And which they are cannot be found out: a captured stream does not tell who it is. A block that
   was given to a stream of the same capture has never been used but in that. */
static int gai_stream_leaves_out(const gai_stream *stream, const gai_block *block)
{
    return stream->capture_id && !gai_stream_is_unknown(stream) &&
           !(block->stream && block->stream->capture_id == stream->capture_id);
}

/* Adds what stands for these streams to the marks for the free of a block. 0: no host memory. Lock held. */
static int gai_marks_name_unknown(galloc_pool *pool, const gai_block *block, gai_mark *marks)
{
    gai_mark *mark, *last = NULL;
    int outside = 0;
    for (mark = marks; mark; last = mark, mark = mark->next) outside |= gai_stream_leaves_out(mark->stream, block);
    if (!outside) return 1;
    if (!gai_slab_has(&pool->marks, 1)) return 0;
    last->next = gai_mark_new(pool, NULL, 0, 0, 0);
    last->next->stream = gai_pool_unknown_streams(pool);
    return 1;
}

/* The short way of a free of a block that was taken from the program: it was given to the stream state that it is freed
   on, and nothing else is to be noted. `empty`: its stream cache was found so; the stream may have been retired since.
   0: the long way must be taken. */
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
        gai_stream_pass(pool, stream, site, changed);
    }
    due = pool->clock >= pool->collector.look;
    gai_lock_off(&pool->lock);
    if (own && due) gai_pool_tend(pool); /* last: it may ask the program, whose calls may change the way */
    return own;
}

/* Frees a claimed block on a stream. 0: no host memory, nothing changed. Lock held. */
static int gai_block_free_on(galloc_pool *pool, gai_block *block, gai_stream *stream)
{
    gai_mark *mark = gai_mark_promised(pool, stream);
    if (stream->capture_id && !gai_marks_name_unknown(pool, block, mark)) {
        gai_slab_give(&pool->marks, mark);
        gai_block_let_go(block);
        return 0;
    }
    gai_block_free(pool, block, mark);
    gai_pool_mark_due(pool);
    return 1;
}

/* Has nobody but who frees the segment's block now ever used any of it? What its alignment has cut off is free. */
static int gai_segment_is_unmarked(const gai_segment *segment)
{
    const gai_block *block = segment->first;
    while (block && !block->marks) block = block->next;
    return !block;
}

/* May the driver have a block at the free? When the one stream is all that must have done with it. What was allocated
   in a capture may be freed in it. */
static int gai_block_is_drivers(const gai_block *block, const gai_stream *stream, const gai_site *site)
{
    const gai_segment *segment = block->segment;
    if (!gai_pool_is_async(segment->pool) || segment->lost || block->recorded_uses) return 0;
    if (!gai_segment_is_unmarked(segment)) return 0;
    if (site->capture) return segment->of_graph && block->stream->capture_id == site->capture;
    return !site->capture_forbids && (segment->of_graph || block->stream == stream);
}

/* The used block of a given segment becomes, with what is free beside it, the busy block of it all. */
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

/* A claimed block and its segment are no more: the driver has the memory, or there is none. With the lock held. */
static void gai_block_give_up(galloc_pool *pool, gai_block *block)
{
    gai_mapping *whole = block->segment->whole;
    gai_stat_unused(pool, block->bytes, (size_t)block->requested);
    pool->stats.blocks.current--;
    pool->stats.frees++;
    whole->page->current = NULL;
    whole->block = gai_block_gather(pool, block);
    gai_mapping_settle(pool, whole, GAI_RELEASED);
}

/* Frees a claimed block in the order of the stream, by the driver itself. 0: it would not; nothing has changed. With
   the lock held, which is let go meanwhile. */
static int gai_block_free_given(galloc_pool *pool, gai_block *block, gai_stream *stream, const gai_site *site)
{
    gai_segment *segment = block->segment;
    CUresult result;
    CUcontext context = pool->context;
    unsigned long long id = pool->context_id;
    gai_lock_off(&pool->lock);
    if (gai_context_health(context, id) != GAI_ALIVE) result = CUDA_ERROR_INVALID_CONTEXT; /* perhaps not ours now */
    else result = gai_driver_free(pool, (CUdeviceptr)segment->whole->addr, site);
    if (gai_segment_never_was(segment, result)) result = CUDA_SUCCESS;
    if (result) gai_pool_note(pool, result);
    gai_lock_on(&pool->lock);
    if (result || segment->lost) return 0;
    stream->handed = gai_stream_stamp(stream); /* to be waited for before the driver's pool is trimmed */
    gai_block_give_up(pool, block);
    return 1;
}

/* What the driver was to allocate in a capture that is lost it never will. There is nothing to free, and its addresses
   are somebody else's once the capture has ended. */
static int gai_block_never_was(const gai_block *block, const gai_site *sites, size_t n)
{
    const gai_capture *capture = block->segment->of_graph && block->stream ? block->stream->capture : NULL;
    size_t i = 0;
    while (i < n && !sites[i].broken) i++;
    return i < n && capture && !gai_capture_has_ended(capture);
}

static cudaError_t gai_free_unnoted(void)
{
    return gai_fail(cudaErrorMemoryAllocation, "no host memory to note what is freed on a captured stream");
}

/* What a graph has left must go to the driver at once: later the graph may be gone, and if it never ran its addresses
   are somebody else's. On the legacy stream that would break a capture. */
static int gai_block_must_wait(const gai_block *block, const gai_site *site)
{
    return block->segment->of_graph && site->capture_forbids && !site->capture && !site->broken;
}

/* Frees a claimed block that the driver may have at once. 0: it has to be noted. With the lock held. */
static int gai_block_free_at_once(galloc_pool *pool, gai_block *block, gai_stream *stream, const gai_site *site)
{
    if (gai_block_never_was(block, site, 1)) {
        gai_block_give_up(pool, block);
        return 1;
    }
    return gai_block_is_drivers(block, stream, site) && gai_block_free_given(pool, block, stream, site);
}

/* `taken`: the block, if it has been taken from the program already. */
static cudaError_t gai_pool_free(galloc_pool *pool, void *ptr, gai_site *site, gai_block *taken)
{
    gai_block *block = taken;
    gai_stream *stream;
    int freed = 0, refused = 0, due;
    gai_lock_on(&pool->lock);
    stream = gai_stream_hold(pool, site);
    if (stream && !block) block = gai_block_claim(pool, ptr);
    if (stream && block) refused = gai_block_must_wait(block, site);
    if ((!stream || refused) && block) gai_block_let_go(block);
    if (stream && block && !refused)
        freed = gai_block_free_at_once(pool, block, stream, site) || gai_block_free_on(pool, block, stream);
    if (stream) gai_stream_release(pool, stream, site);
    due = pool->clock >= pool->collector.look;
    gai_lock_off(&pool->lock);
    if (due) gai_pool_tend(pool);
    if (!stream) return gai_free_after_waiting(pool, ptr, site);
    if (refused)
        return gai_fail(cudaErrorStreamCaptureImplicit,
                        "what a graph has left cannot be freed on legacy while a blocking stream is captured");
    if (block && !freed) return gai_free_unnoted();
    return block ? cudaSuccess : gai_pointer_refused(pool, ptr);
}

/* ==== SEVERAL STREAMS ============================================================================================= */
/* >>several */

/* galloc_free_after, galloc_record_stream, galloc_stream_retire. Calls free, events. */

/* Adds a mark that names the stream's stream state to a list; the stream state stays held. */
static int gai_marks_name(galloc_pool *pool, gai_mark **list, gai_site *site)
{
    gai_stream *stream;
    gai_mark *mark = NULL;
    gai_lock_on(&pool->lock);
    stream = gai_stream_hold(pool, site);
    if (stream && gai_slab_need(&pool->marks, 1)) {
        mark = gai_mark_new(pool, NULL, 0, 0, 0);
        mark->stream = stream;
        mark->next = *list;
        *list = mark;
    } else if (stream) {
        stream->busy--;
    }
    gai_lock_off(&pool->lock);
    return mark != NULL;
}

/* Notes n streams in a list of marks; on failure as many as went well. */
static cudaError_t gai_marks_name_all(galloc_pool *pool, gai_mark **list, gai_site *sites, const cudaStream_t *streams,
                                      int n, cudaStream_t zero)
{
    int i;
    for (i = 0; i < n; i++) {
        cudaError_t error = gai_site_of(streams[i] ? streams[i] : zero, &sites[i]);
        if (error) return error;
        if (gai_marks_name(pool, list, &sites[i])) continue;
        if (sites[i].refused) return gai_stream_refused(&sites[i]);
        return gai_fail(cudaErrorMemoryAllocation, "no host memory to note %d streams", n);
    }
    return cudaSuccess;
}

/* Frees the block, or with an error just forgets the marks. Then lets the stream states go: the last named is the
   first. */
static cudaError_t gai_pool_free_named(galloc_pool *pool, void *ptr, gai_mark *marks, gai_site *sites,
                                       cudaError_t error)
{
    gai_block *block = NULL;
    size_t named = gai_marks_count(marks);
    int due, gone;
    gai_lock_on(&pool->lock);
    if (!error) block = gai_block_claim(pool, ptr);
    gone = block && gai_block_never_was(block, sites, named);
    if (gone) {
        gai_block_give_up(pool, block);
        block = NULL;
    }
    if (block && !gai_marks_name_unknown(pool, block, marks)) {
        error = gai_free_unnoted();
        gai_block_let_go(block);
        block = NULL;
    }
    if (block) gai_block_free(pool, block, marks);
    if (block) gai_pool_mark_due(pool);
    while (!block && marks) {
        gai_mark *mark = marks;
        marks = mark->next;
        gai_slab_give(&pool->marks, mark);
    }
    for (; named > 0; named--) gai_stream_release(pool, sites[named - 1].stream, &sites[named - 1]);
    due = pool->clock >= pool->collector.look;
    gai_lock_off(&pool->lock);
    if (due) gai_pool_tend(pool);
    return error || block || gone ? error : gai_pointer_refused(pool, ptr);
}

#define GAI_SITES 16 /* streams that galloc_free_after notes without host memory of its own */

static cudaError_t gai_pool_free_after(galloc_pool *pool, void *ptr, const cudaStream_t *streams, int n,
                                       cudaStream_t zero)
{
    gai_site few[GAI_SITES], *sites = few;
    gai_mark *marks = NULL;
    cudaError_t error;
    if (n > GAI_SITES) sites = (gai_site *)GALLOC_MALLOC((size_t)n * sizeof *sites);
    if (!sites) return gai_fail(cudaErrorMemoryAllocation, "no host memory to note %d streams", n);
    error = gai_marks_name_all(pool, &marks, sites, streams, n, zero);
    error = gai_pool_free_named(pool, ptr, marks, sites, error);
    if (sites != few) GALLOC_FREE(sites);
    return error;
}

/* Notes that a stream uses a block, and forgets those that did in captures whose graphs are gone. 0: no host memory.
   With the lock held. */
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

static cudaError_t gai_pool_record_stream(galloc_pool *pool, void *ptr, gai_site *site)
{
    gai_block *block = NULL;
    gai_stream *stream;
    int noted = 0;
    gai_lock_on(&pool->lock);
    stream = gai_stream_hold(pool, site);
    if (stream) {
        block = gai_block_claim(pool, ptr);
        noted = block && gai_block_add_use(pool, block, stream);
        if (noted) block->tag |= GAI_SPECIAL;
        if (block) gai_block_let_go(block);
        gai_stream_release(pool, stream, site);
    }
    gai_lock_off(&pool->lock);
    if (noted) return cudaSuccess;
    if (stream && !block) return gai_pointer_refused(pool, ptr);
    return gai_stream_refused(site);
}

/* The stream's last mark in this pool: frees to come of blocks that it uses are stamped with that; so are, with
   cudaMallocAsync, those of blocks that it was given (gai_block_stamp_first). A record that is due on the stream is
   waited for, and one that becomes due meanwhile is not made any more. */
static cudaError_t gai_pool_retire(galloc_pool *pool, const gai_site *site)
{
    CUresult result = CUDA_SUCCESS;
    gai_stream *stream;
    gai_lock_on(&pool->marking);
    gai_lock_on(&pool->lock);
    stream = gai_stream_find(pool, site);
    pool->retires = stream && !stream->retired;
    if (stream) {
        int named;
        short before = stream->retired;
        gai_cache_shut(&stream->cache);
        (void)gai_stream_flush(pool, stream, 1);
        named = stream->uses || stream->busy || stream->handed > stream->done ||
                (gai_pool_is_async(pool) && stream->blocks);
        stream->busy++;
        if (named && site->capture_forbids) result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        else if (named) result = gai_stream_mark(pool, stream, site->handle, 1);
        else stream->retired = 1;
        stream->due = 0; /* last: a free may have made it due while the lock was let go */
        stream->busy--;
        if (result) stream->retired = before;
        gai_cache_set(pool, stream);
    }
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->marking);
    return result ? gai_driver_failed(result, "marking the stream before it goes") : cudaSuccess;
}

/* Another pool has failed: the stream is as it was before. That there is one event more is no loss, and what was freed
   meanwhile comes after no work of the stream that the event does not stand for: the program has not given it any while
   it retires it. */
static void gai_pool_unretire(galloc_pool *pool, const gai_site *site)
{
    gai_stream *stream;
    gai_lock_on(&pool->lock);
    stream = pool->retires ? gai_stream_find(pool, site) : NULL; /* NULL also where it has been forgotten */
    if (stream) stream->retired = 0;
    if (stream) gai_cache_set(pool, stream);
    gai_lock_off(&pool->lock);
}

/* In all pools or in none. With the global lock held. */
static cudaError_t gai_retire(const gai_site *site)
{
    galloc_pool *pool, *done;
    cudaError_t error = cudaSuccess;
    for (pool = gai_pools; pool && !error; pool = error ? pool : pool->next) {
        pool->retires = 0;
        if (!gai_pool_come_in(pool, GAI_PASSING)) continue; /* it ends, and holds nothing */
        error = gai_pool_retire(pool, site);
        gai_pool_go_out(pool, GAI_PASSING);
    }
    for (done = error ? gai_pools : NULL; done != pool; done = done->next) gai_pool_unretire(done, site);
    return error;
}

/* ==== RESIZE ====================================================================================================== */
/* >>resize */

/* galloc_resize. Calls job, free. */

/* Marks that name the stream state and the block's recorded uses. The caller has made sure of as many. Lock held. */
static gai_mark *gai_block_users(galloc_pool *pool, const gai_block *block, gai_stream *stream)
{
    const gai_mark *use;
    gai_mark *users = gai_mark_new(pool, NULL, 0, 0, 0);
    users->stream = stream;
    for (use = block->recorded_uses; use; use = use->next) {
        gai_mark *user = gai_mark_new(pool, NULL, 0, 0, 0);
        user->stream = use->stream;
        user->next = users->next;
        users->next = user;
    }
    return users;
}

/* Stamps bytes that a used block keeps. */
static void gai_block_stamp_kept(galloc_pool *pool, gai_block *block, gai_mark *users, uintptr_t begin, uintptr_t end)
{
    while (users) {
        gai_mark *user = users;
        users = user->next;
        gai_mark_stamp(user, begin, end);
        gai_marks_add(pool, &block->marks, user);
    }
    gai_marks_trim(pool, &block->marks);
}

/* Makes a block shorter: what is cut off is freed on the stream state's stream. What the block keeps of it, the rest of
   a unit or its room, is marked all the same, since it may grow into that for another stream. 0: no host memory,
   nothing changed. Lock held. */
static int gai_block_shrink(galloc_pool *pool, gai_block *block, gai_stream *stream, size_t bytes)
{
    gai_mark *use;
    uintptr_t begin = block->addr + bytes, end = block->addr + block->requested, cut = block->addr + block->bytes;
    size_t marks = 2 * gai_marks_count(block->marks) + 2 * gai_marks_count(block->recorded_uses) + 4;
    if (begin == end || block->segment->lost) return 1;
    if (!block->room && !block->slot) cut = block->addr + gai_up(bytes, GAI_UNIT);
    if (!gai_block_need(pool, block, cut, 0) || !gai_slab_need(&pool->marks, marks)) return 0;
    if (cut < block->addr + block->bytes) {
        gai_block *tail = gai_block_split(pool, block, cut, GAI_USED);
        tail->stream_id = stream->stream_id;
        if (block->stream && block->stream->capture) gai_block_stamp_result(tail, block->stream, NULL);
        gai_block_stamp(pool, tail, gai_block_users(pool, block, stream));
        gai_stat_unused(pool, tail->bytes, 0);
        gai_block_give(pool, tail);
    }
    if (begin < gai_min(cut, end))
        gai_block_stamp_kept(pool, block, gai_block_users(pool, block, stream), begin, gai_min(cut, end));
    gai_block_renew_captured(pool, block);
    for (use = block->recorded_uses; use; use = use->next) gai_use_is_due(pool, use->stream);
    return 1;
}

/* Before a claimed block changes for another stream than that whose stream cache may have it: no stream cache has it
   any more, and its marks say all. 0: no host memory, nothing changed. Lock held. */
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

/* Bytes of a block that may be used: of another backend just those that the driver was asked for. */
static size_t gai_block_usable(const gai_block *block)
{
    const gai_segment *segment = block->segment;
    return segment->given ? gai_min(block->bytes, segment->addr + segment->given - block->addr) : block->bytes;
}

/* What can be done about the size of a claimed block with the lock alone; then it is let go. Lock held. */
static void gai_job_resize(gai_job *job, gai_block *block)
{
    galloc_pool *pool = job->pool;
    gai_stream *stream = job->params.stream;
    int grows = job->grow_to > block->requested;
    size_t before = block->bytes, requested = (size_t)block->requested;
    if (block->segment->given && job->grow_to > gai_block_usable(block)) {
        job->error = gai_job_say_not_there(job);
    } else if (!gai_block_leave_cache(pool, block, stream) ||
               (!grows && !gai_block_shrink(pool, block, stream, job->grow_to))) {
        job->error = gai_fail(cudaErrorMemoryAllocation, "no host memory to note what is cut off a block");
    } else if (!grows) {
        gai_block_set_requested(pool, block, job->grow_to);
        gai_torch_count_resized(pool, block, before, requested);
        job->got = block;
    }
    gai_block_let_go(block);
    if (job->got) gai_pool_mark_due(pool);
    if (grows && !job->error && !gai_load(&pool->broken)) gai_job_search_locked(job, GAI_REACH_OWN);
}

static cudaError_t gai_pool_resize(galloc_pool *pool, void *ptr, size_t bytes, gai_site *site)
{
    gai_job job;
    gai_block *block;
    memset(&job, 0, sizeof job);
    job.pool = pool;
    job.site = *site;
    job.grows = ptr;
    job.grow_to = bytes;
    job.params.alignment = GAI_UNIT;
    gai_lock_on(&pool->lock);
    job.params.stream = gai_stream_hold(pool, &job.site);
    block = job.params.stream ? gai_block_claim(pool, ptr) : NULL;
    if (block) gai_job_resize(&job, block);
    gai_lock_off(&pool->lock);
    if (!job.params.stream) return gai_stream_refused(&job.site);
    if (block && !gai_job_is_done(&job)) {
        job.error = gai_pool_refuses(pool);
        if (!job.error) gai_job_run(&job);
    }
    if (job.error) gai_has_report = job.reported;
    gai_lock_on(&pool->lock);
    gai_stream_release(pool, job.params.stream, &job.site);
    gai_lock_off(&pool->lock);
    return block ? job.error : gai_pointer_refused(pool, ptr);
}

/* ==== GRAPHS ====================================================================================================== */
/* >>graphs */

/* galloc_graph_begin, _end and _release: captures that share memory. Under `marking`. Calls capture, free. */

static uint64_t gai_graphs; /* that have had a number */

/* The group with a handle, or NULL. With the lock held. */
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

/* The pool of a group, in which the call is from then on. */
static cudaError_t gai_graph_find(const galloc_graph *handle, galloc_pool **out)
{
    galloc_pool *pool;
    gai_lock_on(&gai_global_lock);
    for (pool = gai_pools; pool; pool = pool->next) {
        int found;
        gai_lock_on(&pool->lock);
        found = gai_graph_at(pool, handle) != NULL;
        gai_lock_off(&pool->lock);
        if (found) break;
    }
    if (pool && !gai_pool_pin(pool)) pool = NULL;
    gai_lock_off(&gai_global_lock);
    *out = pool;
    return pool ? cudaSuccess : gai_graph_is_gone(handle);
}

/* Puts captures of the site's stream into the group from now on, the one that is under way included. */
static cudaError_t gai_graph_begin(galloc_pool *pool, const galloc_graph *handle, galloc_graph *made,
                                   const gai_site *site)
{
    galloc_graph *graph = made;
    const galloc_graph *other;
    gai_capture *capture;
    unsigned long long key = gai_stream_key(site->handle);
    int taken;
    gai_lock_on(&pool->marking);
    gai_lock_on(&pool->lock);
    if (!made) graph = gai_graph_at(pool, handle);
    taken = !graph || graph->captured;
    for (other = pool->graphs; other; other = other->next) taken |= other->captured && other->key == key;
    for (capture = site->capture ? pool->captures : NULL; capture; capture = capture->next)
        taken |= capture->id == site->capture && capture->graph && capture->graph != graph;
    if (!taken) {
        graph->captured = site->handle;
        graph->key = key;
        for (capture = site->capture ? pool->captures : NULL; capture; capture = capture->next)
            if (capture->id == site->capture) capture->graph = graph;
        if (made) made->next = pool->graphs;
        if (made) pool->graphs = made;
    }
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->marking);
    if (!taken) return cudaSuccess;
    if (!graph) return gai_graph_is_gone(handle);
    return gai_fail(cudaErrorNotPermitted, "the graph has begun, or the stream with another one");
}

static cudaError_t gai_graph_begin_new(galloc_graph **out, galloc_pool *pool, const gai_site *site)
{
    cudaError_t error;
    galloc_graph *graph, *handle;
    if (gai_pool_is_async(pool))
        return gai_fail(cudaErrorNotSupported, "with backend:cudaMallocAsync the memory of graphs "
                        "is the driver's");
    graph = (galloc_graph *)GALLOC_MALLOC(sizeof *graph);
    if (!graph) return gai_fail(cudaErrorMemoryAllocation, "no host memory for a galloc_graph");
    memset(graph, 0, sizeof *graph);
    graph->handle = handle = (galloc_graph *)(uintptr_t)(gai_next(&gai_graphs) * sizeof *graph);
    error = gai_graph_begin(pool, handle, graph, site);
    if (error) GALLOC_FREE(graph);
    else *out = handle;
    return error;
}

static cudaError_t gai_graph_end(galloc_pool *pool, const galloc_graph *handle)
{
    galloc_graph *graph;
    int begun;
    gai_lock_on(&pool->marking);
    gai_lock_on(&pool->lock);
    graph = gai_graph_at(pool, handle);
    begun = graph && graph->captured;
    if (graph) graph->captured = NULL;
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->marking);
    if (!graph) return gai_graph_is_gone(handle);
    return begun ? cudaSuccess : gai_fail(cudaErrorNotPermitted, "the graph has not begun");
}

static int gai_stream_is_graphs(const gai_stream *stream, const galloc_graph *graph)
{
    return stream->capture && stream->capture->graph == graph;
}

/* Of a list of marks those of the group's stream states become marks of `to`, stamped now; all are put into another
   list. */
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

/* What a block has of marks, or of recorded uses, of the group's stream states becomes a mark of `to`. Returns the
   block that it is a part of then. Lock held. */
static gai_block *gai_block_hand_over(galloc_pool *pool, gai_block *block, const galloc_graph *graph, gai_stream *to)
{
    gai_mark **at = &block->recorded_uses, *marks = block->marks;
    int is_free = gai_block_is_free(block), some = 0;
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
    for (marks = block->marks; marks && !some; marks = marks->next) some = gai_stream_is_graphs(marks->stream, graph);
    if (!some) return block;
    if (is_free) gai_set_remove(block);
    marks = block->marks;
    block->marks = NULL;
    gai_marks_hand_over(pool, marks, graph, to, &block->marks);
    return is_free ? gai_block_file(pool, block, 0) : block;
}

/* The end of a group: what its graphs own is free after this point of the site's stream. In the pool's scope. */
static cudaError_t gai_graph_release(galloc_pool *pool, const galloc_graph *handle, gai_site *site)
{
    galloc_graph *graph, **at = &pool->graphs;
    gai_segment *segment;
    gai_block *block;
    gai_capture *capture, *next;
    gai_stream *stream, *held;
    int begun;
    gai_lock_on(&pool->lock);
    stream = held = gai_stream_hold(pool, site);
    graph = gai_graph_at(pool, handle);
    begun = graph && graph->captured;
    if (!graph || begun) stream = NULL;
    for (segment = stream ? pool->segments : NULL; segment; segment = segment->next)
        for (block = segment->first; block; block = block->next)
            block = gai_block_hand_over(pool, block, graph, stream);
    for (capture = stream ? pool->captures : NULL; capture; capture = next) {
        next = capture->next;
        if (capture->graph == graph) gai_capture_forget(pool, capture);
    }
    while (stream && *at != graph) at = &(*at)->next;
    if (stream) *at = graph->next;
    if (held) gai_stream_release(pool, held, site);
    gai_lock_off(&pool->lock);
    if (!graph) return gai_graph_is_gone(handle);
    if (begun) return gai_fail(cudaErrorNotPermitted, "end the graph first");
    if (!stream) return gai_stream_refused(site);
    GALLOC_FREE(graph);
    return cudaSuccess;
}

/* ==== CONFIGURATION ============================================================================================= */
/* >>configuration */

#define GAI_OVERHEAD_MAX 100
#define GAI_MILLION ((uint64_t)1000000) /* fractions have six digits behind the point */
#define GAI_MESSAGE 480 /* what galloc_config_parse says, all of it */

/* A piece of the text that is being parsed. */
typedef struct gai_text {
    const char *at;
    size_t length;
} gai_text;

enum gai_form {
    GAI_WORDS,     /* int: the number of a word */
    GAI_FLAGS,     /* int: words joined by '+', each a bit; the first word is for none */
    GAI_BYTES,     /* size_t */
    GAI_NUMBER,    /* uint64_t */
    GAI_TIME,      /* uint64_t, nanoseconds */
    GAI_FRACTION,  /* double */
    GAI_ROUNDING,  /* roundup_power2_divisions */
    GAI_NO_SETTING, /* accepted, for PyTorch's sake */
    GAI_OF_PROCESS  /* no pool's, but the process's: the level of the log */
};

/* What the language knows. `odd` is a value with a name of its own, the only one in `words`; least and most bound all
   others, fractions in millionths. */
typedef struct gai_key {
    const char *name;
    enum gai_form form;
    size_t at; /* in galloc_config; keys of one setting have the same */
    const char *words;
    uint64_t odd, least, most;
    const char *values; /* what a value must look like */
} gai_key;

#define GAI_MEMBER(member) offsetof(galloc_config, member)
#define GAI_SWITCHED "False|True", 0, 0, 1, "True or False"
#define GAI_BYTES_LIKE "bytes, or a number with K, M or G"
#define GAI_LOG_LEVELS "off|error|info|debug"

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
     "a power of two or 0, or a list such as [256:1,512:2,>:4] of MiB, rising powers of two"},
    {"gc_threshold", GAI_FRACTION, GAI_MEMBER(gc_threshold), "", 0, 0, GAI_MILLION - 1, "a fraction from 0 to below 1"},
    {"garbage_collection_threshold", GAI_FRACTION, GAI_MEMBER(gc_threshold), "", 0, 0, GAI_MILLION - 1,
     "a fraction from 0 to below 1"},
    {"gc_age", GAI_TIME, GAI_MEMBER(gc_age), "none", UINT64_MAX, 0, UINT64_MAX,
     "a whole number with ms, s, m or h, or none"},
    {"release_threshold", GAI_BYTES, GAI_MEMBER(release_threshold), "none", SIZE_MAX, 0, SIZE_MAX,
     GAI_BYTES_LIKE ", or none"},
    {"wait_limit_ms", GAI_NUMBER, GAI_MEMBER(wait_limit_ms), "none", UINT64_MAX, 0, 1000000000,
     "milliseconds, at most 1000000000, or none"},
    {"max_retries", GAI_NUMBER, GAI_MEMBER(max_retries), "", 0, 0, 1000, "a number from 0 to 1000"},
    {"throw_on_cudamalloc_oom", GAI_WORDS, GAI_MEMBER(throw_on_cudamalloc_oom), GAI_SWITCHED},
    {"gpu_direct_rdma", GAI_WORDS, GAI_MEMBER(gpu_direct_rdma), GAI_SWITCHED},
    {"release_lock_on_cudamalloc", GAI_NO_SETTING, 0, GAI_SWITCHED},
    {"log", GAI_OF_PROCESS, 0, GAI_LOG_LEVELS, 0, 0, 3, "off, error, info or debug"},
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
    return config;
}

/* Takes on the ways of another allocator: what is not said otherwise is as its users know it. */
static void gai_config_like(galloc_config *config, int like)
{
    galloc_config defaults = gai_config_default();
    if (config->like == like) return;
    config->like = like;
    config->expandable_segments = like == GALLOC_LIKE_PYTORCH ? 0 : defaults.expandable_segments;
    config->reuse = like == GALLOC_LIKE_PYTORCH ? 0 : defaults.reuse;
}

/* ---- writing ---- */

static const uint64_t gai_byte_units[] = {1, 1 << 10, 1 << 20, 1 << 30};
static const uint64_t gai_time_units[] = {1000000, 1000000000, 60000000000, 3600000000000}; /* ms, s, m, h */

/* Where a text is being written. */
typedef struct gai_string {
    char *at;
    size_t left; /* the ending 0 included; 0: it was too little */
} gai_string;

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

/* The largest unit of which n is a multiple; names[i] is that of units[i]. */
static void gai_print_units(gai_string *string, uint64_t n, const char *const *names, const uint64_t *units, int count)
{
    int i = count - 1;
    while (i && (!n || n % units[i])) i--;
    gai_print(string, "%llu%s", (unsigned long long)(n / units[i]), names[i]);
}

static void gai_print_bytes(gai_string *string, uint64_t bytes)
{
    static const char *const names[] = {"", "K", "M", "G"};
    gai_print_units(string, bytes, names, gai_byte_units, 4);
}

/* ---- what is right ---- */

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

/* Cuts the piece up to `separator` off the stream cache, brackets left whole; 1 if the separator was there. */
static int gai_text_cut(gai_text *rest, char separator, gai_text *piece)
{
    size_t i;
    int inside = 0, found;
    for (i = 0; i < rest->length && (inside || rest->at[i] != separator); i++)
        inside = rest->at[i] == '[' || (inside && rest->at[i] != ']');
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

/* Is the setting in its range? */
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
            if (divisions && !gai_is_power_of_two(divisions)) return 0;
        }
        return 1;
    }
    n = gai_key_number(config, key);
    if (key->at == GAI_MEMBER(growth) && n && !gai_is_power_of_two((size_t)n)) return 0;
    if (key->form == GAI_TIME && n != key->odd && n % gai_time_units[0]) return 0;
    return (n >= key->least && n <= key->most) || (key->words[0] && n == key->odd && key->form > GAI_FLAGS);
}

/* The number of the first key of the same setting. */
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

/* The setting that is less than another one, large_segment_size, allows; NULL: none is. */
static const gai_key *gai_config_misfit(const galloc_config *config)
{
    size_t least = config->large_segment_size, rounding = config->max_non_split_rounding;
    if (config->max_split_size < least) return gai_key_at(GAI_MEMBER(max_split_size));
    return rounding && rounding < least ? gai_key_at(GAI_MEMBER(max_non_split_rounding)) : NULL;
}

/* place: where the text names the later one of the two; 0: it names neither. */
static void gai_say_misfit(const galloc_config *config, const gai_key *key, size_t place, char *message, size_t size)
{
    gai_string string;
    string.at = message;
    string.left = size;
    if (place) gai_print(&string, "at %zu: ", place);
    gai_print(&string, "%s is ", key->name);
    gai_print_bytes(&string, gai_key_number(config, key));
    gai_print(&string, ": must be at least large_segment_size, which is ");
    gai_print_bytes(&string, config->large_segment_size);
}

/* Are all settings in their ranges? Says which is not. */
static int gai_config_is_right(const galloc_config *config, char *message, size_t size)
{
    const gai_key *misfit;
    int i;
    for (i = 0; i < GAI_KEYS; i++) {
        if (gai_key_is_right(config, &gai_keys[i])) continue;
        (void)snprintf(message, size, "%s is out of its range: must be %s", gai_keys[i].name, gai_keys[i].values);
        return 0;
    }
    misfit = gai_config_misfit(config);
    if (misfit) gai_say_misfit(config, misfit, 0, message, size);
    return !misfit;
}

/* ---- reading ---- */

/* Digits, and nothing else; up to `most`. */
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

/* A number and the name of its unit: one of `names`, which '|' separates. */
static int gai_parse_units(gai_text text, const char *names, const uint64_t *units, uint64_t most, uint64_t *value)
{
    gai_text rest = gai_text_of(names), name, suffix;
    uint64_t unit = 0;
    size_t digits = 0;
    int i, more = 1;
    while (digits < text.length && text.at[digits] >= '0' && text.at[digits] <= '9') digits++;
    suffix.at = text.at + digits;
    suffix.length = text.length - digits;
    for (i = 0; more; i++) {
        more = gai_text_cut(&rest, '|', &name);
        if (gai_texts_are_equal(name, suffix)) unit = units[i];
    }
    text.length = digits;
    if (!unit || !gai_parse_number(text, most / unit, value)) return 0;
    *value *= unit;
    return 1;
}

/* Digits with at most one point among them, whatever the locale. */
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

/* The number of a word among `words`; -1 if it is none of them. */
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

/* One pair of a list of divisions; `next` is the first that no pair before has set. */
static int gai_parse_division(gai_text pair, unsigned *divisions, int *next)
{
    gai_text boundary;
    uint64_t mib = 0, n = 0;
    int from = *next, i;
    if (!gai_text_cut(&pair, ':', &boundary) || !gai_parse_number(pair, 1u << 30, &n)) return 0;
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

/* One number for all sizes, or pairs in brackets. What no pair names stays off. */
static int gai_parse_divisions(gai_text text, unsigned *divisions)
{
    uint64_t n = 0;
    int i, next = 0, more = 1;
    gai_text pair;
    for (i = 0; i < GALLOC_DIVISIONS; i++) divisions[i] = 0;
    if (gai_parse_number(text, 1u << 30, &n)) {
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

static int gai_parse_plain(const gai_key *key, gai_text text, int mib, uint64_t *n)
{
    if (key->words[0] && gai_text_is(text, key->words)) {
        *n = key->odd;
        return 1;
    }
    if (key->form == GAI_NUMBER) return gai_parse_number(text, UINT64_MAX, n);
    if (key->form == GAI_TIME) return gai_parse_units(text, "ms|s|m|h", gai_time_units, UINT64_MAX, n);
    if (!mib) return gai_parse_units(text, "|K|M|G", gai_byte_units, SIZE_MAX, n);
    if (!gai_parse_number(text, SIZE_MAX >> 20, n)) return 0;
    *n <<= 20;
    return 1;
}

/* Reads the value of a key into its setting; mib: it is in MiB. */
static int gai_parse_value(galloc_config *config, const gai_key *key, gai_text text, int mib)
{
    void *at = (char *)config + key->at;
    int word = key->form == GAI_WORDS || key->form >= GAI_NO_SETTING ? gai_word_number(key->words, text) : 0;
    uint64_t n = 0;
    if (word < 0) return 0;
    switch (key->form) {
    case GAI_NO_SETTING:
    case GAI_OF_PROCESS: return 1;
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

/* The key that a name means; sizes may have _mb behind it. NULL: there is none. */
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

static int gai_is_letter(char a, char of) { return (a >= 'A' && a <= 'Z' ? a + ('a' - 'A') : a) == of; }

/* How many letters at the same places from the stream cache, and from the end, a name shares with that of a key, in
   whatever case. */
static size_t gai_names_share(gai_text a, const char *b)
{
    size_t n = gai_min(a.length, strlen(b)), i, j;
    for (i = 0; i < n && gai_is_letter(a.at[i], b[i]); i++) continue;
    for (j = 0; j < n - i && gai_is_letter(a.at[a.length - 1 - j], b[strlen(b) - 1 - j]); j++) continue;
    return i + j;
}

/* The key that an unknown name was meant for, perhaps. */
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

/* The key with values to be joined of which a word is one: after a comma it was meant to follow one more. */
static const char *gai_flags_with(gai_text word)
{
    int i;
    for (i = 0; i < GAI_KEYS; i++)
        if (gai_keys[i].form == GAI_FLAGS && gai_word_number(gai_keys[i].words, word) > 0) return gai_keys[i].name;
    return NULL;
}

static void gai_say_unknown(gai_text key, size_t place, char *message, size_t size)
{
    const char *near = gai_key_near(key), *flags = gai_flags_with(key);
    int shown = (int)gai_min(key.length, 40);
    if (flags)
        (void)snprintf(message, size, "at %zu: '%.*s' is no key, but a value of %s, whose values are joined by '+'",
                       place, shown, key.at, flags);
    else if (near)
        (void)snprintf(message, size, "at %zu: unknown key '%.*s'; perhaps %s?", place, shown, key.at, near);
    else
        (void)snprintf(message, size, "at %zu: unknown key '%.*s'; the keys are the members of galloc_config, such as "
                       "memory_limit, overhead, gc_threshold", place, shown, key.at);
}

/* What has been read of a text so far. */
typedef struct gai_parsing {
    galloc_config config;
    uint64_t seen; /* bit i: gai_keys[i], or another key of the same setting */
    size_t places[GAI_KEYS]; /* and where, counted from 1 */
    char *message;
    size_t size;
} gai_parsing;

static uint64_t gai_key_bit(const gai_key *key) { return (uint64_t)1 << gai_key_index(key); }

/* One key:value pair. Writes what is wrong into the message and returns 0 if something is. */
static int gai_parse_pair(gai_parsing *parsing, gai_text pair, size_t place)
{
    gai_text name;
    int mib, has_value = gai_text_cut(&pair, ':', &name), shown = (int)gai_min(pair.length, 40);
    const gai_key *key = gai_key_find(name, &mib);
    const char *values = mib ? "a whole number of MiB" : key ? key->values : "";
    if (!name.length)
        (void)snprintf(parsing->message, parsing->size, "at %zu: a key is missing; settings are key:value pairs with "
                       "commas between", place);
    else if (!key)
        gai_say_unknown(name, place, parsing->message, parsing->size);
    else if (!has_value)
        (void)snprintf(parsing->message, parsing->size, "at %zu: '%.*s' needs ':' and a value: %s", place,
                       (int)name.length, name.at, values);
    else if (parsing->seen & gai_key_bit(key))
        (void)snprintf(parsing->message, parsing->size, "at %zu: '%s' is given twice", place, key->name);
    else if (key->at == GAI_MEMBER(like) && key->form == GAI_WORDS && parsing->seen)
        (void)snprintf(parsing->message, parsing->size, "at %zu: 'like' must come first", place);
    else if (!gai_parse_value(&parsing->config, key, pair, mib))
        (void)snprintf(parsing->message, parsing->size, "at %zu: '%.*s' is no value for %.*s: must be %s", place, shown,
                       pair.at, (int)name.length, name.at, values);
    else if (!gai_key_is_right(&parsing->config, key))
        (void)snprintf(parsing->message, parsing->size, "at %zu: '%.*s' is out of range for %.*s: must be %s", place,
                       shown, pair.at, (int)name.length, name.at, key->values);
    else {
        parsing->seen |= gai_key_bit(key);
        parsing->places[gai_key_index(key)] = place;
        return 1;
    }
    return 0;
}

/* What a message shows of the program's text may have line ends in it, or a terminal's controls. */
static void gai_make_one_line(char *message)
{
    for (; *message; message++)
        if ((unsigned char)*message < ' ' || *message == 127) *message = '?';
}

/* Reads a text; `config` is changed only if nothing is wrong with it. stood: where each character and the end stood in
   what the program's user wrote; NULL: where they are. */
static int gai_parse(galloc_config *config, const char *text, const uint32_t *stood, uint64_t *seen, char *message,
                     size_t size)
{
    gai_parsing parsing;
    gai_text rest = gai_text_of(text), pair;
    const gai_key *misfit;
    int more = text[0] != 0;
    memset(&parsing, 0, sizeof parsing);
    parsing.config = *config;
    parsing.message = message;
    parsing.size = size;
    while (more) {
        size_t at = (size_t)(rest.at - text), place = (stood ? stood[at] : at) + 1;
        more = gai_text_cut(&rest, ',', &pair);
        if (gai_parse_pair(&parsing, pair, place)) continue;
        gai_make_one_line(message);
        return 0;
    }
    misfit = gai_config_misfit(&parsing.config);
    if (misfit) {
        size_t place = parsing.places[gai_key_index(misfit)];
        place = gai_max(place, parsing.places[gai_key_index(gai_key_at(GAI_MEMBER(large_segment_size)))]);
        gai_say_misfit(&parsing.config, misfit, place, message, size);
        return 0;
    }
    *config = parsing.config;
    *seen = parsing.seen;
    return 1;
}

/* ---- what has no effect ---- */

static int gai_is_seen(uint64_t seen, const char *name)
{
    int mib;
    return (seen & gai_key_bit(gai_key_find(gai_text_of(name), &mib))) != 0;
}

/* Appends "a, b: because" to what has been said. */
static void gai_say_idle(uint64_t seen, const char *const *names, const char *because, char *message, size_t size)
{
    size_t i, saved = 0, length;
    for (i = 0; names[i]; i++) {
        if (!gai_is_seen(seen, names[i])) continue;
        length = strlen(message);
        (void)snprintf(message + length, size - length, "%s%s", saved ? ", " : length ? "; " : "", names[i]);
        saved++;
    }
    length = strlen(message);
    if (saved) (void)snprintf(message + length, size - length, ": no effect %s", because);
}

/* Says which settings of a text have no effect beside others. */
static void gai_config_say_idle(const galloc_config *config, uint64_t seen, char *message, size_t size)
{
    static const char *const heap[] = {"strategy", "expandable_segments", "stats", "overhead", "growth",
                                       "lane_bytes", "large_segment_size", "max_split_size", "max_non_split_rounding",
                                       "roundup_power2_divisions", "gc_threshold", "gc_age", "stream_check",
                                       "gpu_direct_rdma", NULL};
    static const char *const driver[] = {"reuse", "release_threshold", NULL};
    static const char *const fixed[] = {"large_segment_size", "max_split_size", "max_non_split_rounding", NULL};
    static const char *const paged[] = {"overhead", "growth", "gc_age", "gpu_direct_rdma", NULL};
    static const char *const tuned[] = {"strategy", "overhead", "growth", "gc_age", "gpu_direct_rdma", NULL};
    static const char *const waits[] = {"wait_limit_ms", "max_retries", NULL};
    static const char *const looks[] = {"stream_check", NULL};
    static const char *const threshold[] = {"gc_threshold", NULL};
    static const char *const lock[] = {"release_lock_on_cudamalloc", NULL};
    static const char *const oversize[] = {"max_non_split_rounding", NULL};
    static const char *const strategy[] = {"strategy", NULL};
    static const char *const streams[] = {"reuse", "stats", "stream_check", "lane_bytes", NULL};
    static const char *const caches[] = {"lane_bytes", NULL};
    static const char *const collection[] = {"gc_threshold", NULL};
    int limited = config->memory_limit != SIZE_MAX || config->device_limit != SIZE_MAX ||
                  config->per_process_memory_fraction < 1;
    message[0] = 0;
    if (config->backend != GALLOC_BACKEND_NATIVE)
        gai_say_idle(seen, heap, "unless backend is native", message, size);
    else if (config->expandable_segments)
        gai_say_idle(seen, fixed, "unless expandable_segments is False", message, size);
    else
        gai_say_idle(seen, config->strategy == GALLOC_STRATEGY_HEURISTIC && !config->like ? tuned : paged,
                     "unless expandable_segments is True", message, size);
    if (config->backend == GALLOC_BACKEND_CUDA_MALLOC)
        gai_say_idle(seen, driver, "with backend:cudaMalloc", message, size);
    if (!config->backend && !config->expandable_segments && config->max_split_size == SIZE_MAX)
        gai_say_idle(seen, oversize, "unless max_split_size is given", message, size);
    if (!config->backend && !config->expandable_segments && !config->like)
        gai_say_idle(seen, threshold, "on fixed segments, since cudaFree waits", message, size);
    if (!config->backend && config->like) gai_say_idle(seen, strategy, "with like:pytorch", message, size);
    if (!config->backend && config->like && !config->expandable_segments)
        gai_say_idle(seen, streams, "with like:pytorch unless expandable_segments is True", message, size);
    if (!config->backend && config->like && !config->expandable_segments && !limited)
        gai_say_idle(seen, collection, "with like:pytorch unless there is a limit", message, size);
    if (!config->backend && config->stats_exact && (!config->like || config->expandable_segments)) {
        gai_say_idle(seen, looks, "with stats:exact, since every call looks then", message, size);
        gai_say_idle(seen, caches, "with stats:exact, since no cache is used then", message, size);
    }
    if (config->throw_on_cudamalloc_oom)
        gai_say_idle(seen, waits, "with throw_on_cudamalloc_oom:True", message, size);
    gai_say_idle(seen, lock, "since such a lock is never held there", message, size);
}

/* ---- printing ---- */

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

static void gai_print_word(gai_string *string, const char *words, int number)
{
    gai_text rest = gai_text_of(words), word = rest;
    int i;
    for (i = 0; i <= number; i++) (void)gai_text_cut(&rest, '|', &word);
    gai_print(string, "%.*s", (int)word.length, word.at);
}

static void gai_print_flags(gai_string *string, const char *words, int flags)
{
    int i, saved = 0;
    if (!flags) gai_print_word(string, words, 0);
    for (i = 0; flags >> i; i++) {
        if (!(flags >> i & 1)) continue;
        if (saved++) gai_print(string, "+");
        gai_print_word(string, words, i + 1);
    }
}

static void gai_print_value(gai_string *string, const galloc_config *config, const gai_key *key)
{
    static const char *const time_names[] = {"ms", "s", "m", "h"};
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
    else if (key->form == GAI_BYTES) gai_print_bytes(string, n);
    else if (key->form == GAI_TIME) gai_print_units(string, n, time_names, gai_time_units, 4);
    else gai_print(string, "%llu", (unsigned long long)n);
}

/* All settings, as a text that can be read back. 0: there is not room enough. */
static int gai_config_print(const galloc_config *config, char *text, size_t size)
{
    gai_string string;
    int i;
    string.at = text;
    string.left = size;
    for (i = 0; i < GAI_KEYS; i++) {
        const gai_key *key = &gai_keys[i];
        if (key->form >= GAI_NO_SETTING || gai_key_bit(key) != (uint64_t)1 << i) continue;
        gai_print(&string, "%s%s:", i ? "," : "", key->name);
        gai_print_value(&string, config, key);
    }
    return string.left != 0;
}

/* ==== LOG ======================================================================================================= */
/* >>log */

#define GAI_REPEAT_KINDS 16        /* messages that are told from each other, the last ones */
#define GAI_REPEAT_REST 1000000000 /* ns after which a repeat is told again */

/* Messages that differ in numbers only. */
typedef struct gai_log_repeat {
    uint64_t key, count;
    uint64_t when, hidden; /* when one was shown last, and how many were not since */
} gai_log_repeat;

typedef void (*gai_log_call)(int level, const char *text, void *user);

/* All of it is guarded by gai_log_lock. */
static int gai_log_level = -1; /* GALLOC_LOG_...; -1: GALLOC_CONF has not been read */
static gai_log_call gai_log_function;
static void *gai_log_user;
static gai_log_repeat gai_log_repeats[GAI_REPEAT_KINDS];
static unsigned gai_repeat_kinds; /* that have had a place so far */

/* What GALLOC_CONF says of it, wrong as the rest may be: errors in it are to be seen, or not. */
static int gai_log_level_of(const char *text)
{
    gai_text rest = gai_text_of(text ? text : ""), pair, name;
    int more = 1, level = GALLOC_LOG_INFO;
    while (more) {
        more = gai_text_cut(&rest, ',', &pair);
        if (!gai_text_cut(&pair, ':', &name) || !gai_text_is(name, "log")) continue;
        level = gai_word_number(GAI_LOG_LEVELS, pair);
        if (level < 0) level = GALLOC_LOG_INFO;
    }
    return level;
}

/* The same for all texts that differ in numbers only, those of addresses included. */
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

/* Is it to be shown? Repeats are that make a power of ten, and those long after the last one. *hidden: how many were
   not since. */
static int gai_repeat_shows(const char *text, uint64_t *hidden)
{
    uint64_t key = gai_repeat_key(text), now = GALLOC_CLOCK();
    gai_log_repeat *repeat;
    int i = 0;
    while (i < GAI_REPEAT_KINDS && gai_log_repeats[i].key != key) i++;
    repeat = &gai_log_repeats[i < GAI_REPEAT_KINDS ? (unsigned)i : gai_repeat_kinds % GAI_REPEAT_KINDS];
    if (i == GAI_REPEAT_KINDS) {
        gai_repeat_kinds++;
        memset(repeat, 0, sizeof *repeat);
        repeat->key = key;
    }
    if (!gai_is_power_of_ten(++repeat->count) && now - repeat->when < GAI_REPEAT_REST) {
        repeat->hidden++;
        return 0;
    }
    *hidden = repeat->hidden;
    repeat->hidden = 0;
    repeat->when = now;
    return 1;
}

static GAI_THREAD_LOCAL int gai_in_log; /* the program is being told */

/* Tells the program this thread's message. Should it call galloc meanwhile, it is told nothing of that, or else a
   failure there would never end; the message is as before. */
GAI_APART
static void gai_log(int level)
{
    char text[sizeof gai_message + 64];
    size_t length = strlen(gai_message);
    gai_log_call call;
    void *user;
    uint64_t hidden = 0;
    int shows;
    if (gai_in_log) return;
    gai_lock_on(&gai_log_lock);
    if (gai_log_level < 0) gai_log_level = gai_log_level_of(getenv("GALLOC_CONF"));
    shows = level <= gai_log_level && (gai_log_level == GALLOC_LOG_DEBUG || gai_repeat_shows(gai_message, &hidden));
    call = gai_log_function;
    user = gai_log_user;
    gai_lock_off(&gai_log_lock);
    if (!shows) return;
    memcpy(text, gai_message, length + 1);
    if (hidden)
        (void)snprintf(text + length, sizeof text - length, " (and %llu more like it)", (unsigned long long)hidden);
    gai_in_log = 1;
    if (call) call(level, text, user);
    else GALLOC_LOG(text);
    gai_in_log = 0;
    memcpy(gai_message, text, length);
    gai_message[length] = 0;
}

/* Puts the name of the function that fails before what is wrong. */
static void gai_message_begin(const char *function)
{
    size_t length = strlen(function), most = sizeof gai_message - 3 - length;
    size_t told = gai_min(strlen(gai_message), most);
    memmove(gai_message + length + 2, gai_message, told);
    memcpy(gai_message, function, length);
    memcpy(gai_message + length, ": ", 2);
    gai_message[length + 2 + told] = 0;
}

/* Every public function that can fail ends here. */
static cudaError_t gai_end(const char *function, cudaError_t error)
{
    int is_new = gai_message_is_new;
    gai_message_is_new = 0;
    if (is_new == GAI_NOTE) {
        gai_log(GALLOC_LOG_INFO);
    } else if (error && is_new) {
        gai_message_begin(function);
        gai_log(GALLOC_LOG_ERROR);
    }
    return error;
}

/* ==== REPORT ==================================================================================================== */
/* >>report */

/* A number of bytes as people read them, and in full. */
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
        gai_print(string, "nothing was tried: the pool can never hold that much\n");
        return;
    }
    gai_print(string, "what was tried, and the bytes gained");
    if (report->rounds) gai_print(string, " in %u rounds", report->rounds + 1);
    gai_print(string, "\n");
    for (i = 0; i < GALLOC_REPORT_STEPS && report->steps[i].name; i++) {
        const galloc_step *step = &report->steps[i];
        gai_print(string, "  %-42s ", step->name);
        if (step->left_out) gai_print(string, "left out: %s\n", step->left_out);
        else gai_print(string, "%zu\n", step->gained);
    }
}

/* Bytes that must come from somewhere. */
static size_t gai_report_lacks(const galloc_report *report)
{
    return report->rounded > report->largest_possible ? report->rounded - report->largest_possible : 1;
}

/* What would help, as far as it can be told; each only where it is not so already. */
static void gai_report_advise_pool(gai_string *string, const galloc_report *report)
{
    size_t lacks = gai_report_lacks(report);
    if (report->stranded >= lacks && report->captured)
        gai_print(string, "- a captured stream waits for nobody, and %zu bytes wait for other streams: run the "
                         "work before the capture, or reserve memory for it\n", report->stranded);
    else if (report->stranded >= lacks && !report->backend && !(report->reuse & GALLOC_REUSE_WAIT))
        gai_print(string, "- reuse:wait is off while %zu bytes are stranded by other streams\n", report->stranded);
    if (report->stranded >= lacks && !report->captured && report->wait_limit_ms != UINT64_MAX)
        gai_print(string, "- wait_limit_ms is %llu while %zu bytes are stranded by other streams\n",
                  (unsigned long long)report->wait_limit_ms, report->stranded);
    if (report->stranded && report->more_streams)
        gai_print(string, "- many streams strand memory: galloc_stream_retire before cudaStreamDestroy\n");
    if (!report->backend && !report->expandable_segments && report->usable >= report->rounded)
        gai_print(string, "- expandable_segments is off: %zu bytes are free, but the largest piece has %zu\n",
                  report->usable, report->largest_usable);
    if (report->expandable_segments && report->usable_in_pages >= lacks)
        gai_print(string, "- %zu bytes lie beside used blocks in their pages: GALLOC_LIFETIME_LONG for blocks "
                         "that stay keeps them apart\n", report->usable_in_pages);
    if (report->graph_bytes >= lacks)
        gai_print(string, "- graphs own %zu bytes: destroy those that are not launched any more, or let them "
                         "share memory (galloc_graph_begin)\n", report->graph_bytes);
    if (report->quarantined)
        gai_print(string, "- the driver would not take back %zu bytes: galloc_pool_trim tries it again\n",
                  report->quarantined);
}

static void gai_report_advise_device(gai_string *string, const galloc_report *report)
{
    size_t beyond = report->device_free - gai_min(report->device_free, report->room);
    int limited = report->limit < report->device_total && beyond >= gai_report_lacks(report);
    int full = report->device_known && report->device_free < report->rounded && !limited;
    int shared = report->held < report->limit && report->room < report->limit - report->held; /* with other pools */
    if (limited)
        gai_print(string, "- the limit of %zu stands in the way: the device has %zu free\n", report->limit,
                  report->device_free);
    if (report->others_cached && (full || shared))
        gai_print(string, "- other pools of galloc hold %zu bytes that they do not use: galloc_pool_trim\n",
                  report->others_cached);
    if (full && report->outside >= report->device_total / 16)
        gai_print(string, "- %zu bytes are held outside galloc: by other processes, CUDA, or cudaMalloc\n",
                  report->outside);
}

/* 0: there is not room enough. */
static int gai_report_print(const galloc_report *report, char *text, size_t size)
{
    gai_string string;
    const char *before;
    string.at = text;
    string.left = size;
    gai_print(&string, "out of memory: %zu %sbytes (%zu as they are held) on stream %llu%s\ncause: %s\n", report->asked,
              report->grows ? "more " : "", report->rounded, report->stream_id,
              report->captured ? ", which is being captured" : "", report->cause);
    gai_report_print_pool(&string, report);
    gai_report_print_device(&string, report);
    gai_report_print_steps(&string, report);
    gai_print(&string, "what would help\n");
    before = string.at;
    gai_report_advise_pool(&string, report);
    gai_report_advise_device(&string, report);
    if (string.at == before) gai_print(&string, "- less that is live at once, or more memory\n");
    return string.left != 0;
}

/* ==== CHECK ===================================================================================================== */
/* >>check */

/* Each function counts how many of the equations above the structs do not hold. All with the lock held. */

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

static int gai_check_slab(const gai_slab *slab)
{
    void *const *unused = (void *const *)slab->unused;
    size_t n = 0;
    for (; unused; unused = (void *const *)*unused) n++;
    return (n != slab->available) + (slab->promised > slab->available);
}

/* It can be found, and knows of no wait that it cannot have. */
static int gai_check_stream_links(galloc_pool *pool, const gai_stream *stream)
{
    const gai_stream *other = *gai_stream_bucket(pool, stream->key ^ stream->capture_id);
    const gai_wait *wait;
    int broken = stream->free.stream != stream || (stream->due && !pool->due);
    while (other && other != stream) other = other->next_indexed;
    for (wait = stream->waits; wait; wait = wait->next)
        broken += wait->epoch >= wait->on->epoch || (wait->epoch && wait->on->capture_id != stream->capture_id &&
                                                     !(gai_stream_is_plain(wait->on) && gai_stream_is_plain(stream)));
    return broken + (other == NULL && stream != &pool->outside);
}

static int gai_check_positions(const gai_stream *stream)
{
    const gai_position *position;
    uint64_t newer = stream->epoch;
    int broken = stream->positions && !stream->capture;
    for (position = stream->positions; position; position = position->older) {
        broken += position->epoch >= newer || position->epoch <= stream->done || position->n > GAI_POSITION_NODES;
        newer = position->epoch;
    }
    return broken;
}

/* A stream state of a captured stream, or of outside, is not used as others are. */
static int gai_check_captured(const galloc_pool *pool, const gai_stream *stream)
{
    const gai_capture *capture = pool->captures;
    const gai_cache *cache = &stream->cache;
    if (gai_stream_is_plain(stream)) return (stream->capture != NULL) + (stream->positions != NULL);
    while (capture && capture != stream->capture) capture = capture->next;
    return !stream->asked + (cache->blocks + cache->unconfirmed_blocks != 0) + stream->due +
           gai_check_positions(stream) + (stream == &pool->outside && stream->waits != NULL) +
           (stream->recorded != NULL || stream->idle != NULL) +
           (gai_stream_is_unknown(stream) != (stream == &pool->outside)) +
           (stream->capture && (!capture || capture->id != stream->capture_id || stream->done)) +
           (stream != &pool->outside && !stream->capture && stream->done + 1 != stream->epoch);
}

typedef struct gai_census {
    size_t used, requested, blocks, free, largest, holes, bytes, promised;
    galloc_pages pages[GALLOC_PAGE_SIZES];
} gai_census;

static void gai_census_page(gai_census *census, const gai_page *page, size_t bytes, size_t n)
{
    galloc_pages *pages = &census->pages[gai_page_class(page->bytes)];
    pages->bytes += bytes;
    pages->count += n;
}

/* A list of blocks in a stream cache: bytes != 0: all of that size. Takes them off the used ones. */
static int gai_check_blocks(const galloc_pool *pool, const gai_stream *stream, const gai_block *block, size_t bytes,
                            gai_census *census)
{
    int broken = 0;
    for (; block; block = block->next_bin) {
        broken += block->kind != GAI_USED || block->pool != pool || block->life != stream->life || block->recorded_uses;
        broken += gai_load_pointer(&block->held) || block->room || (bytes && block->bytes != bytes);
        census->blocks++;
        census->used += block->bytes;
        census->requested += (size_t)block->requested;
        census->largest = gai_max(census->largest, block->bytes);
    }
    return broken;
}

/* Frozen, as everything here. */
static int gai_check_cache(const galloc_pool *pool, const gai_stream *stream, gai_census *census)
{
    const gai_cache *cache = &stream->cache;
    gai_census unconfirmed, cached;
    size_t i;
    int broken = cache->blocks + cache->unconfirmed_blocks > GAI_CACHE_BLOCKS ||
                 (cache->open && cache->open != stream->life);
    memset(&unconfirmed, 0, sizeof unconfirmed);
    memset(&cached, 0, sizeof cached);
    broken += cache->open && (stream->asked || stream->retired);
    broken += gai_check_blocks(pool, stream, cache->unconfirmed, 0, &unconfirmed);
    broken += gai_check_blocks(pool, stream, cache->orphans, 0, &unconfirmed);
    for (i = 0; i < GAI_CACHE_BINS; i++) {
        const gai_cache_bin *bin = &cache->bins[i];
        if (!(cache->filled >> i & 1)) continue;
        broken += !bin->first;
        broken += gai_check_blocks(pool, stream, bin->first, bin->bytes, &cached);
    }
    broken += unconfirmed.blocks != cache->unconfirmed_blocks || unconfirmed.used != cache->unconfirmed_bytes;
    broken += cached.blocks != cache->blocks || cached.used != cache->bytes;
    broken += cache->bytes + cache->unconfirmed_bytes > cache->most || cache->alone > cache->most;
    broken += !cache->trusted && cache->unconfirmed_bytes > GAI_MARK_BYTES;
    census->blocks -= unconfirmed.blocks + cached.blocks;
    census->used -= unconfirmed.used + cached.used;
    census->requested -= unconfirmed.requested + cached.requested;
    census->free += unconfirmed.used + cached.used;
    census->largest = gai_max(census->largest, gai_max(unconfirmed.largest, cached.largest));
    return broken;
}

static int gai_check_stream(galloc_pool *pool, const gai_stream *stream, gai_census *census)
{
    const gai_event *event;
    const gai_segment *segment;
    const gai_block *block;
    uint64_t last = stream->done, uses = 0;
    int broken = stream->done >= stream->epoch || stream->freed > stream->epoch || stream->handed > stream->epoch;
    for (event = stream->recorded; event; event = event->next) {
        broken += event->epoch <= last || event->epoch >= stream->epoch;
        last = event->epoch;
    }
    for (segment = pool->segments; segment; segment = segment->next) {
        for (block = segment->first; block; block = block->next) {
            const gai_mark *mark;
            for (mark = block->marks; mark; mark = mark->next) uses += mark->stream == stream;
            for (mark = block->recorded_uses; mark; mark = mark->next) uses += mark->stream == stream;
        }
    }
    return broken + (uses != stream->uses) + gai_check_set(&stream->free) + gai_check_stream_links(pool, stream) +
           gai_check_cache(pool, stream, census) + gai_check_captured(pool, stream);
}

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

/* What a captured stream was given, and is not on its way back, is marked as its graph's, and no stream cache's. */
static int gai_check_given(const gai_block *block)
{
    const gai_mark *mark = block->marks;
    if (!block->stream || !block->stream->capture || block->segment->of_graph) return 0;
    while (mark && !(mark->stream == block->stream && mark->begin == block->addr &&
                     mark->end == block->addr + block->bytes))
        mark = mark->next;
    return !mark + !(block->tag & GAI_SPECIAL);
}

/* Every byte of used and free blocks has a page, none of holes and rooms has; busy ones are on the way. */
static int gai_check_pages(const gai_block *block)
{
    uintptr_t at = block->addr, end = block->addr + block->bytes;
    int broken = 0, mapped = gai_block_is_mapped(block);
    if (block->kind == GAI_BUSY) return 0;
    if (block->segment->given) return !block->segment->whole->page->current;
    if (block->kind == GAI_ALIAS) return gai_page_at(at) != (gai_block_is_parked(block) ? block->alias : NULL);
    while (at < end && mapped) {
        const gai_mapping *mapping = gai_page_at(at);
        if (!mapping) return broken + 1;
        broken += at < mapping->addr || at >= mapping->addr + mapping->bytes || mapping->segment != block->segment;
        at = mapping->addr + mapping->bytes;
    }
    for (; at < end && at - block->addr < 64 * GAI_FIXED_SMALL; at += GAI_FIXED_SMALL)
        broken += gai_page_at(at) != NULL;
    return broken;
}

/* Marks of a stream that is gone say nothing. */
static int gai_check_at_block_pool(galloc_pool *pool, const gai_block *block)
{
    const gai_block_pool *block_pool = block->segment->block_pool;
    if (!block_pool || (block->set != &pool->mixed && block->set != &block_pool->free)) return 1;
    if (gai_block_is_at_block_pool(block) && gai_block_is_at_block_pool(block->next)) return 1;
    return block_pool->stream && block->set != gai_block_pool_set(pool, block);
}

/* A free slot is whole and in its set; of a used block only the program knows whether it is one. */
static int gai_check_slot(galloc_pool *pool, const gai_block *block)
{
    int broken = block->slot && (!pool->pooled || block->bytes != gai_rounded(pool, block->bytes));
    if (block->kind == GAI_SLOT) broken += !block->slot + (block->set != gai_set_of(pool, block->marks));
    return broken + (block->kind == GAI_FREE && block->slot);
}

/* It is found by its addresses, and no other block is. What has been freed, and is on its way back to the driver, need
   not be: another block may have its address by now. */
static int gai_check_found(const gai_block *block)
{
    int leaves = block->segment->given && block->kind == GAI_USED && !gai_load_pointer(&block->held);
    if (leaves || !gai_block_is_mapped(block)) return 0;
    return (!block->map_entry || gai_load_pointer(block->map_entry) != block) + (gai_block_at(block->addr) != block) +
           (gai_block_before(block->addr + block->bytes - 1) != block);
}

static int gai_check_block(galloc_pool *pool, const gai_block *block)
{
    const gai_block *next = block->next;
    const void *held = gai_load_pointer(&block->held);
    int broken = block->bytes == 0 || block->bytes % GAI_UNIT || block->addr % GAI_UNIT;
    if (next) broken += next->addr != block->addr + block->bytes || next->prev != block;
    broken += gai_block_is_free(block) != (block->set != NULL);
    broken += gai_check_slot(pool, block);
    broken += block->kind == GAI_USED && block->requested > block->bytes;
    broken += held && (block->kind != GAI_USED || !block->stream);
    broken += gai_check_found(block);
    if (block->kind == GAI_FREE) {
        broken += pool->torch ? gai_check_at_block_pool(pool, block) : block->set != gai_set_of(pool, block->marks);
        broken += !pool->torch && gai_blocks_merge(pool, block, next, 0);
    }
    broken += block->kind == GAI_HOLE && next && next->kind == GAI_HOLE;
    broken += block->kind == GAI_ROOM && next && next->kind == GAI_ROOM;
    if (block->kind != GAI_USED && block->kind != GAI_BUSY)
        broken += (block->kind == GAI_ROOM || block->room) != (gai_room_owner(block) != NULL);
    broken += block->room && block->kind != GAI_USED && block->kind != GAI_BUSY && block->kind != GAI_ALIAS;
    return broken + gai_check_marks(block) + gai_check_given(block) + gai_check_pages(block);
}

/* Counts the pages that begin in a block. */
static void gai_check_mapped(const gai_block *block, gai_census *census)
{
    uintptr_t at = gai_down(block->addr, GAI_FIXED_SMALL), end = block->addr + block->bytes;
    const gai_segment *segment = block->segment;
    if (segment->given && block == segment->first && gai_block_is_mapped(block))
        gai_census_page(census, segment->whole->page, segment->bytes, 1);
    while (at < end && gai_block_is_mapped(block) && !segment->given) {
        const gai_mapping *mapping = gai_page_at(at);
        if (mapping && mapping->addr >= block->addr) gai_census_page(census, mapping->page, mapping->bytes, 1);
        at = mapping ? mapping->addr + mapping->bytes : end;
    }
}

static int gai_check_segment(galloc_pool *pool, const gai_segment *segment, gai_census *census)
{
    const gai_block *block;
    size_t bytes = 0;
    int broken = segment->first->addr != segment->addr || segment->first->prev != NULL;
    if (segment->lost && segment->whole->page->current) gai_census_page(census, segment->whole->page, 0, 1);
    for (block = segment->first; block; block = block->next) {
        if (!segment->lost) broken += gai_check_block(pool, block);
        if (!segment->lost) gai_check_mapped(block, census);
        bytes += block->bytes;
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

/* What is counted along, against what was found. */
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

/* What all pools of the device have taken, against the limits. Other threads may be growing other pools. */
static int gai_check_budget(const galloc_pool *pool)
{
    const gai_budget *budget = pool->budget;
    const galloc_pool *other;
    size_t held = 0;
    int broken;
    gai_lock_on(&gai_budget_lock);
    for (other = budget->pools; other; other = other->next_sharing) held += other->taken;
    broken = held != budget->held;
    broken += budget->held > budget->most;
    broken += pool->taken != pool->stats.reserved.current;
    gai_lock_off(&gai_budget_lock);
    return broken;
}

/* What is counted for like:pytorch, against what is found; but for what a reset has taken, or the driver keeps. */
static int gai_check_torch(galloc_pool *pool, const gai_block_pool *block_pool)
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
        gai_torch_add(&found.segment, block_pool->small, 1, 0);
        gai_torch_add(&found.reserved_bytes, block_pool->small, segment->bytes, 0);
        for (block = segment->first; block; block = block->next) {
            if (block->kind == GAI_USED) {
                gai_torch_add(&found.allocated_bytes, block_pool->small, block->bytes, 0);
                gai_torch_add(&found.allocation, block_pool->small, 1, 0);
                gai_torch_add(&found.requested_bytes, block_pool->small, (size_t)block->requested, 0);
            }
            if (block->kind != GAI_FREE || block->set == &pool->mixed || gai_block_is_whole(block)) continue;
            gai_torch_add(&found.inactive_split, block_pool->small, 1, 0);
            gai_torch_add(&found.inactive_split_bytes, block_pool->small, block->bytes, 0);
        }
    }
#define GAI_TORCH_DIFFERS(field)                                                                       \
    (block_pool->small ? stats->field.small_pool.current != found.field.small_pool.current                   \
                 : stats->field.large_pool.current != found.field.large_pool.current)
    broken += GAI_TORCH_DIFFERS(segment) + GAI_TORCH_DIFFERS(reserved_bytes) + GAI_TORCH_DIFFERS(allocation);
    broken += GAI_TORCH_DIFFERS(allocated_bytes) + GAI_TORCH_DIFFERS(requested_bytes);
    broken += GAI_TORCH_DIFFERS(inactive_split) + GAI_TORCH_DIFFERS(inactive_split_bytes);
    broken += stats->active_bytes.all.current != stats->allocated_bytes.all.current + pool->mixed.bytes;
    return broken + gai_check_set(&block_pool->free) + (segments != block_pool->segments) +
           (streams != block_pool->streams) + (!segments && !streams && !block_pool->awaited);
}

static int gai_check_pool(galloc_pool *pool)
{
    gai_census census;
    const gai_block_pool *block_pool;
    const gai_segment *segment;
    const gai_stream *stream;
    const gai_mapping *mapping;
    const gai_block *hole;
    size_t quarantined = 0, leaving = 0, parked = 0, old = 0, holes = 0, streams = 0, of_graphs = 0;
    int broken = gai_check_set(&pool->common) + gai_check_set(&pool->mixed), lost = 0;
    memset(&census, 0, sizeof census);
    census.pages[0].bytes = census.free = census.largest = pool->kept;
    for (segment = pool->segments; segment; segment = segment->next) {
        broken += gai_check_segment(pool, segment, &census);
        if (!segment->fixed) census.bytes += segment->bytes;
        if (segment->of_graph && !segment->lost) of_graphs += segment->bytes;
        broken += segment->next && segment->next->prev != segment;
        lost += segment->lost;
    }
    for (stream = pool->streams; stream; stream = stream->next) {
        broken += gai_check_stream(pool, stream, &census);
        streams += (size_t)gai_stream_is_plain(stream);
    }
    broken += streams != pool->stream_count;
    for (block_pool = pool->block_pools; block_pool; block_pool = block_pool->next)
        broken += gai_check_torch(pool, block_pool);
    for (mapping = pool->quarantine; mapping; mapping = mapping->next) {
        if (!mapping->page->stuck || mapping->page->shown != mapping) continue;
        quarantined += mapping->bytes;
        gai_census_page(&census, mapping->page, mapping->bytes, 1);
    }
    for (mapping = pool->oldest_alias; mapping; mapping = mapping->newer) {
        int is_parked = mapping->page->current == mapping;
        if (is_parked) parked += mapping->bytes;
        else leaving += mapping->bytes;
        old += (size_t)!is_parked;
        if (is_parked) gai_census_page(&census, mapping->page, mapping->bytes, 1);
        broken += mapping->block->kind != GAI_ALIAS || mapping->block->addr != mapping->addr ||
                  mapping->block->bytes != mapping->bytes || mapping->page->mappings < 1 || !mapping->page->current ||
                  mapping->block->alias != mapping || mapping->page->taken;
    }
    broken += lost != pool->lost || leaving != pool->stats.leaving || parked != pool->parked || old != pool->old;
    for (hole = pool->holes; hole; hole = hole->next_bin) {
        holes++;
        broken += hole->kind != GAI_HOLE || (hole->next_bin && hole->next_bin->prev_bin != hole);
    }
    broken += gai_check_slab(&pool->blocks) + gai_check_slab(&pool->marks) + gai_check_slab(&pool->pages);
    broken += gai_check_slab(&pool->mappings) + gai_check_slab(&pool->events) + gai_check_slab(&pool->waits);
    broken += pool->marks.promised != census.promised + pool->promised_jobs;
    broken += gai_check_slab(&pool->positions);
    broken += census.holes != holes;
    broken += quarantined != pool->stats.quarantined;
    broken += of_graphs != pool->of_graphs;
    census.free += parked;
    census.largest = gai_max(census.largest, gai_pool_largest_parked(pool));
    broken += gai_check_budget(pool);
    if (pool->telling) return broken; /* some bytes are on the way */
    return broken + gai_check_stats(pool, &census);
}

/* ==== POOLS ===================================================================================================== */
/* >>pools */

static void *gai_default_pool[GAI_DEVICES];

/* Has it what no right one can lack? A config that was set to zero has not. */
static int gai_config_is_begun(const galloc_config *config) { return config->large_segment_size != 0; }

static cudaError_t gai_config_check(const galloc_config *config, int *devices)
{
    char message[GAI_MESSAGE];
    CUresult result = gai_cu.DeviceGetCount(devices);
    if (result) return gai_driver_failed(result, "cuDeviceGetCount");
    if (config->device < -1 || config->device >= *devices)
        return gai_fail(cudaErrorInvalidDevice, "config.device is %d: must be -1, or below the number of devices, "
                        "which is %d", config->device, *devices);
    if (!gai_config_is_right(config, message, sizeof message))
        return gai_fail(cudaErrorInvalidValue, "config: %s%s", message, gai_config_is_begun(config) ? "" :
                        "; start from what galloc_config_default() returns");
    return cudaSuccess;
}

static cudaError_t gai_current_device(int *device)
{
    CUresult result = gai_cu.CtxGetDevice(device);
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
        cudaError_t error = gai_bind_context();
        if (error) return error;
        result = gai_cu.CtxGetDevice(device);
    }
    return result ? gai_driver_failed(result, "cuCtxGetDevice") : cudaSuccess;
}

/* What follows of the settings, once it is known what the device can do. */
static void gai_pool_choose_route(galloc_pool *pool)
{
    const galloc_config *config = &pool->config;
    int fixed = !config->expandable_segments && config->backend == GALLOC_BACKEND_NATIVE;
    pool->torch = fixed && config->like == GALLOC_LIKE_PYTORCH;
    pool->oversize = fixed && config->max_split_size != SIZE_MAX;
    pool->pooled = config->strategy == GALLOC_STRATEGY_POOLED && !config->backend && !config->like;
    pool->sorts = pool->torch || pool->pooled;
    pool->mortal = !config->expandable_segments;
    gai_pool_choose_rounding(pool);
    pool->unfronted = pool->torch || config->stats_exact;
    pool->mixed.counted = pool->torch;
}

static CUresult gai_pool_open_driver_pool(galloc_pool *pool)
{
    int pools = 0;
    CUresult result =
        gai_cu.DeviceGetAttribute(&pools, CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, pool->config.device);
    if (!result && !pools) result = CUDA_ERROR_NOT_SUPPORTED;
    return result ? result : gai_driver_pool_new(pool);
}

/* Of what sizes pages are, and for what they can be used. A driver that does not know RDMA of pages has none. Pages are
   made for it some day, perhaps, and are of the same sizes before. */
static CUresult gai_pool_open_pages(galloc_pool *pool)
{
    CUmemAllocationProp properties = gai_page_properties(pool);
    int can = 0;
    pool->rdma = !gai_cu.DeviceGetAttribute(&can, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                            pool->config.device) && can;
    properties.allocFlags.gpuDirectRDMACapable = (unsigned char)pool->rdma;
    return gai_cu.MemGetAllocationGranularity(&pool->granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}

/* What the device can do, and its primary context, retained until the pool ends. */
static CUresult gai_pool_open(galloc_pool *pool)
{
    CUdevice device = pool->config.device;
    int mapping = 0;
    CUresult result = device < GAI_DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
    if (!result) result = gai_cu.DevicePrimaryCtxRetain(&pool->context, device);
    if (result) return result;
    pool->budget = &gai_budgets[device];
    result = gai_cu.CtxGetId(pool->context, &pool->context_id);
    if (!result) result = gai_cu.DeviceTotalMem(&pool->device_bytes, device);
    if (!result)
        result = gai_cu.DeviceGetAttribute(&mapping, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
    if (!mapping || pool->config.backend) pool->config.expandable_segments = 0;
    pool->tuning.watching = pool->config.strategy == GALLOC_STRATEGY_HEURISTIC && !pool->config.like &&
                            pool->config.expandable_segments;
    gai_lock_on(&pool->lock);
    gai_pool_choose_route(pool);
    gai_lock_off(&pool->lock);
    if (!result && gai_pool_is_async(pool)) result = gai_pool_open_driver_pool(pool);
    pool->granularity = GAI_FIXED_SMALL;
    if (!result && pool->config.expandable_segments) result = gai_pool_open_pages(pool);
    pool->config.gpu_direct_rdma &= pool->rdma;
    if (!gai_is_power_of_two(pool->granularity)) pool->granularity = 2 * gai_power_below(pool->granularity);
    pool->granularity = gai_max(pool->granularity, GAI_FIXED_SMALL);
    if (result) (void)gai_cu.DevicePrimaryCtxRelease(device);
    return result;
}

/* What a pool that has ended leaves to the next one. NULL: no host memory. */
static galloc_pool *gai_pool_memory(void)
{
    galloc_pool *pool;
    gai_lock_on(&gai_global_lock);
    pool = gai_ended_pools;
    if (pool) gai_ended_pools = pool->next;
    gai_lock_off(&gai_global_lock);
    if (pool) return pool;
    pool = (galloc_pool *)GALLOC_MALLOC(sizeof *pool);
    if (!pool) return NULL;
    memset(pool, 0, sizeof *pool);
    pool->users = GAI_ENDED;
    gai_lock_init(&pool->lock);
    gai_lock_init(&pool->growth);
    gai_lock_init(&pool->marking);
    gai_lock_on(&gai_global_lock);
    pool->known = gai_known_pools;
    gai_store_pointer(&gai_known_pools, pool);
    gai_lock_off(&gai_global_lock);
    return pool;
}

/* With the lock held: threads may still come to a pool that was here before. */
static void gai_pool_init(galloc_pool *pool, const galloc_config *config)
{
    gai_stream *unused = pool->unused_streams;
    gai_slab blocks = pool->blocks, mappings = pool->mappings;
    memset(&pool->due, 0, offsetof(galloc_pool, users) - offsetof(galloc_pool, due));
    pool->unused_streams = unused;
    pool->blocks = blocks;
    pool->mappings = mappings;
    pool->config = *config;
    if (config->backend) pool->config.stats_exact = 1; /* no stream cache is ever open */
    pool->parking.patience = 8;
    pool->collector.look = UINT64_MAX;
    pool->tuning.overhead = config->overhead;
    pool->tuning.growth = config->growth;
    pool->tuning.lane_bytes = config->lane_bytes;
    pool->tuning.divisions = config->roundup_power2_divisions[0];
    pool->blocks.size = sizeof(gai_block);
    pool->marks.size = sizeof(gai_mark);
    pool->pages.size = sizeof(gai_page);
    pool->mappings.size = sizeof(gai_mapping);
    pool->events.size = sizeof(gai_event);
    pool->waits.size = sizeof(gai_wait);
    pool->positions.size = sizeof(gai_position);
}

/* Nothing is on the cache bins any more, wherever it went. */
static void gai_cache_clear(gai_cache *cache)
{
    gai_latch_on(&cache->latch);
    cache->open = 0;
    cache->unconfirmed = cache->orphans = NULL;
    cache->unconfirmed_blocks = cache->unconfirmed_bytes = cache->mallocs = cache->live_in = cache->live_out = 0;
    cache->blocks = cache->bytes = cache->allocated_in = 0;
    cache->filled = cache->busy_frees = 0;
    gai_latch_off(&cache->latch);
}

static void gai_streams_end(galloc_pool *pool)
{
    while (pool->streams) {
        gai_stream *stream = pool->streams;
        pool->streams = stream->next;
        stream->life = 0; /* who remembers it must not find it */
        gai_cache_clear(&stream->cache);
        if (gai_stream_is_unknown(stream)) continue;
        stream->next = pool->unused_streams;
        pool->unused_streams = stream;
    }
}

/* Frees what the pool has of host memory, but for what threads may look at that come late. With the lock held. */
static void gai_pool_free_host(galloc_pool *pool)
{
    while (pool->segments) {
        gai_segment_hide(pool, pool->segments);
        gai_segment_end(pool, pool->segments);
    }
    while (pool->block_pools) {
        gai_block_pool *next = pool->block_pools->next;
        GALLOC_FREE(pool->block_pools);
        pool->block_pools = next;
    }
    while (pool->captures) gai_capture_forget(pool, pool->captures);
    while (pool->graphs) {
        galloc_graph *next = pool->graphs->next;
        GALLOC_FREE(pool->graphs);
        pool->graphs = next;
    }
    gai_streams_end(pool);
    gai_slab_reset(&pool->blocks);
    gai_slab_reset(&pool->mappings);
    gai_slab_end(&pool->marks);
    gai_slab_end(&pool->pages);
    gai_slab_end(&pool->events);
    gai_slab_end(&pool->waits);
    gai_slab_end(&pool->positions);
}

/* There is no pool here any more, until the next one begins. */
static void gai_pool_discard(galloc_pool *pool)
{
    gai_lock_on(&pool->lock);
    gai_pool_free_host(pool);
    gai_lock_off(&pool->lock);
    gai_lock_on(&gai_global_lock);
    pool->next = gai_ended_pools;
    gai_ended_pools = pool;
    gai_lock_off(&gai_global_lock);
}

/* No pool exists, and no thread is inside: frees what was kept for those that come late. With the global lock held. */
static void gai_pools_free(void)
{
    galloc_pool *pool = (galloc_pool *)gai_known_pools;
    gai_store_pointer(&gai_known_pools, NULL);
    gai_ended_pools = NULL;
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
        gai_lock_end(&pool->growth);
        gai_lock_end(&pool->marking);
        GALLOC_FREE(pool);
        pool = next;
    }
}

static void gai_pool_start_collector(galloc_pool *pool)
{
    gai_collector *collector = &pool->collector;
    pool->collects = pool->config.expandable_segments && !pool->config.backend &&
                     (pool->config.gc_threshold > 0 || gai_pool_has_age(pool));
    collector->patience = GAI_REST_LEAST;
    collector->stride = 1;
    if (pool->collects) collector->look = 0;
}

/* Another handle than all that its memory has had. */
static void gai_pool_name(galloc_pool *pool)
{
    pool->handle = (galloc_pool *)(void *)((char *)pool + pool->lives);
    pool->lives = (pool->lives + 1) % sizeof *pool;
    gai_store_pointer(&pool->key, pool->is_default ? NULL : (void *)pool->handle);
}

/* Lets the program have it, unless another thread has made the default pool first: then returns that one. */
static galloc_pool *gai_pool_publish(galloc_pool *pool)
{
    void **place = pool->is_default ? &gai_default_pool[pool->config.device] : NULL;
    galloc_pool *first;
    gai_lock_on(&gai_global_lock);
    first = place ? (galloc_pool *)*place : NULL;
    if (!first) {
        gai_pool_name(pool);
        gai_budget_join(pool);
        pool->next = gai_pools;
        gai_pools = pool;
        if (pool->config.backend) gai_store(&gai_given_pools, gai_load(&gai_given_pools) + 1);
        gai_store(&pool->users, 0);
        if (place) gai_store_pointer(place, pool);
    }
    gai_lock_off(&gai_global_lock);
    return first;
}

/* With no lock held: to begin a context takes long. */
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
    if (config->device == -1) error = gai_current_device(&pool->config.device);
    if (!error) {
        result = gai_pool_open(pool);
        if (result) error = gai_driver_failed(result, "opening the device");
    }
    if (error) {
        gai_pool_discard(pool);
        return error;
    }
    pool->is_default = is_default;
    pool->one_context = !pool->config.stream_check && devices == 1;
    gai_lock_on(&pool->lock);
    gai_pool_start_collector(pool);
    gai_lock_off(&pool->lock);
    *out = gai_pool_publish(pool);
    if (!*out) {
        *out = pool;
        return cudaSuccess;
    }
    if (pool->driver_pool) (void)GAI_CALL(pool, pool_destroy, MemPoolDestroy, (pool->driver_pool));
    (void)gai_cu.DevicePrimaryCtxRelease(pool->config.device);
    gai_pool_discard(pool);
    if (gai_message_is_new == GAI_NOTE) gai_message_is_new = 0; /* the other thread says it */
    return cudaSuccess;
}

/* The limits that it shared are the others' alone, and no call finds it any more. */
static void gai_pool_unlink(galloc_pool *pool)
{
    galloc_pool **at = &gai_pools;
    gai_budget_leave(pool);
    gai_lock_on(&gai_global_lock);
    while (*at != pool) at = &(*at)->next;
    *at = pool->next;
    if (pool->config.backend) gai_store(&gai_given_pools, gai_load(&gai_given_pools) - 1);
    if (pool->is_default) gai_store_pointer(&gai_default_pool[pool->config.device], NULL);
    gai_generation_end();
    gai_lock_off(&gai_global_lock);
}

/* The settings in effect. With the lock held. */
static void gai_pool_read_config(const galloc_pool *pool, galloc_config *config)
{
    *config = pool->config;
    config->overhead = pool->tuning.overhead;
    config->growth = pool->tuning.growth;
    config->lane_bytes = (size_t)pool->tuning.lane_bytes;
    config->roundup_power2_divisions[0] = (unsigned)pool->tuning.divisions;
    if (pool->tuning.frozen) config->strategy = GALLOC_STRATEGY_CACHING;
}

/* A range of addresses that has memory. */
typedef struct gai_range {
    uintptr_t addr;
    size_t bytes;
} gai_range;

/* Adds the n-th range to an array, if there is one. */
static void gai_range_add(gai_range *array, size_t *n, const gai_mapping *mapping)
{
    if (array) {
        array[*n].addr = mapping->addr;
        array[*n].bytes = mapping->bytes;
    }
    *n += 1;
}

/* All that is mapped and not about to be unmapped; `array` may be NULL. Returns how many. With both locks held. */
static size_t gai_pool_ranges(const galloc_pool *pool, gai_range *array)
{
    const gai_segment *segment;
    const gai_block *block;
    size_t n = 0;
    for (segment = pool->segments; segment; segment = segment->next) {
        for (block = segment->lost ? NULL : segment->first; block; block = block->next) {
            uintptr_t at = block->addr, end = block->addr + block->bytes;
            if (block->kind == GAI_ALIAS) gai_range_add(array, &n, block->alias);
            while (gai_block_is_mapped(block) && at < end) {
                const gai_mapping *mapping = gai_page_at(at);
                if (mapping->addr >= block->addr) gai_range_add(array, &n, mapping);
                at = mapping->addr + mapping->bytes;
            }
        }
    }
    return n;
}

/* Tells on_map of all that is mapped, with `growth` let go; meanwhile nothing is unmapped. 0: no host memory. */
static int gai_pool_walk(galloc_pool *pool, const galloc_callbacks *call)
{
    gai_range *ranges;
    gai_saved_message saved;
    size_t n, i;
    gai_lock_on(&pool->lock);
    n = gai_pool_ranges(pool, NULL);
    gai_lock_off(&pool->lock);
    ranges = (gai_range *)GALLOC_MALLOC((n + 1) * sizeof *ranges);
    if (!ranges) return 0;
    gai_lock_on(&pool->lock);
    n = gai_pool_ranges(pool, ranges);
    pool->callbacks = *call;
    gai_lock_off(&pool->lock);
    pool->walking = 1;
    pool->telling++;
    gai_lock_off(&pool->growth);
    gai_callback_begin(&gai_in_mapping, &saved);
    for (i = 0; i < n; i++) call->on_map(pool->handle, (void *)ranges[i].addr, ranges[i].bytes, call->user);
    gai_callback_end(&gai_in_mapping, &saved);
    gai_lock_on(&pool->growth);
    pool->telling--;
    pool->walking = 0;
    GALLOC_FREE(ranges);
    return 1;
}

/* With `growth` held, in a scope. */
static cudaError_t gai_pool_call(galloc_pool *pool, const galloc_callbacks *call)
{
    if (pool->telling)
        return gai_fail(cudaErrorNotPermitted, "a callback of this pool is under way");
    if (pool->config.backend && (call->on_map || call->on_unmap))
        return gai_fail(cudaErrorNotSupported, "only where the backend is native does the "
                        "pool map anything");
    if (call->on_map)
        return gai_pool_walk(pool, call) ? cudaSuccess
                                         : gai_fail(cudaErrorMemoryAllocation, "no host memory for a list of ranges");
    gai_lock_on(&pool->lock);
    pool->callbacks = *call;
    gai_lock_off(&pool->lock);
    return cudaSuccess;
}

/* Does an event of the pool's wait for work that is not done, or was not when the pool looked? */
static int gai_pool_has_events_out(galloc_pool *pool)
{
    const gai_stream *stream;
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream && !stream->recorded; stream = stream->next) continue;
    gai_lock_off(&pool->lock);
    return stream != NULL;
}

/* Unmaps what nobody uses, waiting for the device if what is known to be unused is too little; if `synchronised`, only
   where the pool knows of no work that it would wait for. With `growth` held: meanwhile nothing is created. */
static cudaError_t gai_pool_shrink(galloc_pool *pool, size_t keep, int synchronised, size_t *released)
{
    CUresult result = CUDA_SUCCESS;
    size_t before, held;
    int round;
    gai_pool_ask_held(pool);
    before = held = gai_pool_held(pool);
    gai_pool_sweep_lost(pool);
    gai_pool_retry(pool);
    *released = before - gai_pool_held(pool);
    gai_pool_poll(pool);
    gai_pool_limit_old(pool);
    for (round = 0; round < 2; round++) {
        size_t gone = 0;
        held = gai_pool_held(pool);
        if (held > keep) gone = gai_pool_release(pool, held - keep);
        *released += gone;
        if (held - gone <= keep || round || (synchronised && gai_pool_has_events_out(pool))) break;
        result = gai_pool_wait(pool);
        gai_torch_count_wait(pool);
    }
    if (!result) return cudaSuccess;
    gai_pool_note(pool, result);
    return gai_driver_failed(result, "waiting for the device");
}

static CUresult gai_pool_unreserve(galloc_pool *pool)
{
    CUresult result = CUDA_SUCCESS;
    while (pool->segments && !result) {
        gai_segment *segment = pool->segments;
        result = GAI_CALL(pool, unreserve, MemAddressFree, ((CUdeviceptr)segment->addr, segment->bytes));
        if (result) break;
        gai_lock_on(&pool->lock);
        gai_hole_unlink(pool, segment->first);
        pool->stats.addresses -= segment->bytes;
        gai_segment_end(pool, segment);
        gai_lock_off(&pool->lock);
    }
    return result;
}

/* Gives everything back that the device knows of. With `growth` held, in a scope; no block is used. */
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
        return gai_fail(cudaErrorNotPermitted, "in on_map or on_unmap a pool that has them does not end: it holds %zu "
                        "bytes that are not unmapped there", pool->stats.reserved.current);
    if (pool->stats.reserved.current > pool->kept)
        return gai_fail(cudaErrorUnknown, "the pool of device %d still holds %zu bytes that the driver would not take",
                        pool->config.device, pool->stats.reserved.current);
    result = gai_pool_unreserve(pool);
    if (result) return gai_driver_failed(result, "cuMemAddressFree");
    result = gai_fence_drop(pool);
    if (result) return gai_driver_failed(result, "cuMemFreeHost");
    if (pool->driver_pool) result = GAI_CALL(pool, pool_destroy, MemPoolDestroy, (pool->driver_pool));
    if (result) return gai_driver_failed(result, "cuMemPoolDestroy");
    pool->driver_pool = NULL;
    return cudaSuccess;
}

static int gai_pool_is_orphaned(galloc_pool *pool)
{
    unsigned long long id = 0;
    return pool->driver_gone || gai_is_driver_gone(gai_cu.CtxGetId(pool->context, &id));
}

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

/* What graphs may use yet must not be unmapped. */
static cudaError_t gai_pool_is_captured(galloc_pool *pool)
{
    CUresult result = CUDA_SUCCESS;
    size_t bytes;
    if (gai_pool_await_graphs(pool, GAI_GRAPH_LOOKS_LAST, &result)) return cudaSuccess;
    gai_lock_on(&pool->lock);
    bytes = gai_pool_captured(pool);
    gai_lock_off(&pool->lock);
    return gai_fail(cudaErrorNotPermitted, "graphs own %zu bytes of the pool of device %d: destroy them first", bytes,
                    pool->config.device);
}

/* Another pool that is short may have this one tell of what goes: what is out of sight then has to have gone before the
   pool ends. A thread in a callback does not wait for itself. With `growth` held. */
static void gai_pool_await_told(galloc_pool *pool)
{
    unsigned round;
    for (round = 0; pool->telling && !gai_in_mapping; round++) {
        gai_lock_off(&pool->growth);
        gai_latch_rest(round);
        gai_lock_on(&pool->growth);
    }
}

/* Gives back what a pool has that is about to end, while no lock keeps the program from being told. */
static void gai_pool_part(galloc_pool *pool)
{
    gai_scope scope;
    size_t gone;
    int ends;
    if (!gai_pool_callbacks(pool).on_unmap || gai_pool_is_orphaned(pool) || gai_pool_enter(pool, &scope)) return;
    ends = pool->is_default || (!gai_pool_is_used(pool) && !gai_pool_is_captured(pool));
    if (ends) (void)gai_pool_shrink(pool, 0, 0, &gone);
    if (ends) gai_pool_await_told(pool);
    gai_scope_leave(&scope);
    gai_lock_off(&pool->growth);
}

/* The pool goes on, and the calls that are in it as before. */
static void gai_pool_let_in(galloc_pool *pool)
{
    uint64_t users = gai_load(&pool->users);
    while (!gai_swap(&pool->users, users, users & ~GAI_ENDED)) users = gai_load(&pool->users);
}

/* Keeps others out, and waits until those are out again that were in. The call itself is in. Memory that was given out
   meanwhile ends that: who has it may wait for the pool, see gai_pool_around. */
static cudaError_t gai_pool_shut_out(galloc_pool *pool, int orphaned)
{
    cudaError_t error = cudaSuccess;
    uint64_t users;
    unsigned round;
    do {
        users = gai_load(&pool->users);
        if (users & GAI_ENDED || (users % GAI_PASSING > 1 && (gai_in_mapping || gai_in_shortage)))
            return gai_fail(cudaErrorNotPermitted, "the pool is being destroyed by another thread, or this is a "
                            "callback and a call is in it, perhaps the one that has called the program");
    } while (!gai_swap(&pool->users, users, users | GAI_ENDED));
    for (round = 0; !error && gai_load(&pool->users) != (GAI_ENDED | 1); round++) {
        gai_latch_rest(round);
        error = orphaned ? cudaSuccess : gai_pool_is_used(pool);
    }
    if (error) gai_pool_let_in(pool);
    return error;
}

/* While a pool ends no call has memory of it by a short way, which does not ask: what is free stays so. */
static void gai_pool_end_route(galloc_pool *pool, int shut)
{
    gai_stream *stream;
    gai_lock_on(&pool->lock);
    pool->unfronted = (pool->unfronted & 1) | shut << 1;
    pool->special = (pool->special & ~(uint64_t)GAI_ROUTE_ENDS) | (shut ? GAI_ROUTE_ENDS : 0);
    for (stream = pool->streams; stream; stream = stream->next) gai_cache_set(pool, stream);
    if (shut) gai_pool_flush(pool);
    gai_lock_off(&pool->lock);
}

/* Gives back what the device knows of, if nothing is used. A default pool that is used gives back what is not. The
   program is told of nothing. */
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
    gai_lock_off(&pool->growth);
    return error;
}

/* Calls that came by a stream cache find no stream state any more. One that did before, and let the lock go to leave a
   mark, is waited for; then the events go. */
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

/* Ends a pool that the call is in; after an error it is still. The memory of a driver that is gone went with it: then
   only the host's is given back. With no lock held: it may wait for the device, or for threads that do. */
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

/* Does a pair of PyTorch's settings speak of what galloc has not: host memory, addresses for each stream? */
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

/* PyTorch's settings as galloc reads them: without blanks, and without what is foreign; `stood` says where each
   character stood, and the end. 0: too long. */
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
        more = gai_text_cut(&rest, ',', &pair);
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

/* PyTorch's variable, beneath what GALLOC_CONF says. */
static cudaError_t gai_config_of_torch(galloc_config *config)
{
    char message[GAI_MESSAGE], text[1024] = "";
    uint32_t stood[sizeof text];
    uint64_t seen;
    const char *name = "PYTORCH_CUDA_ALLOC_CONF", *saved = getenv(name);
    if (!saved) saved = getenv(name = "PYTORCH_ALLOC_CONF");
    if (!saved) return cudaSuccess;
    if (!gai_text_of_torch(saved, text, stood, sizeof text))
        return gai_fail(cudaErrorInvalidValue, "%s: longer than %zu characters", name, sizeof text - 1);
    if (gai_parse(config, text, stood, &seen, message, sizeof message)) return cudaSuccess;
    return gai_fail(cudaErrorInvalidValue, "%s: %s", name, message);
}

/* The settings of default pools: the built-in ones, changed by GALLOC_CONF. */
static cudaError_t gai_config_of_environment(galloc_config *config)
{
    char message[GAI_MESSAGE];
    uint64_t seen = 0;
    cudaError_t error = cudaSuccess;
    const char *text = getenv("GALLOC_CONF");
    int right;
    *config = gai_config_default();
    if (!text) return cudaSuccess;
    right = gai_parse(config, text, NULL, &seen, message, sizeof message);
    if (right && config->like == GALLOC_LIKE_PYTORCH) {
        *config = gai_config_default();
        gai_config_like(config, GALLOC_LIKE_PYTORCH);
        error = gai_config_of_torch(config);
        if (!error) right = gai_parse(config, text, NULL, &seen, message, sizeof message);
    }
    if (error) return error;
    if (!right) return gai_fail(cudaErrorInvalidValue, "GALLOC_CONF: %s", message);
    gai_config_say_idle(config, seen, message, sizeof message);
    if (message[0]) gai_note("GALLOC_CONF: %s", message);
    return cudaSuccess;
}

/* The default pool, in which the call is from then on. *pool is NULL after an error. */
static cudaError_t gai_pool_of_device(galloc_pool **pool, int device)
{
    galloc_config config;
    cudaError_t error = cudaSuccess;
    *pool = NULL;
    if (device < 0 || device >= GAI_DEVICES)
        return gai_fail(cudaErrorInvalidDevice, "device %d: there is none", device);
    *pool = (galloc_pool *)gai_load_pointer(&gai_default_pool[device]);
    if (!*pool) {
        error = gai_config_of_environment(&config);
        config.device = device;
        if (!error) error = gai_pool_new(pool, &config, 1);
    }
    if (!error && !gai_pool_pin(*pool)) error = gai_pool_is_gone(*pool);
    if (error) *pool = NULL;
    return error;
}

/* The device of a stream's context. */
static cudaError_t gai_site_device(gai_site *site, int *device)
{
    CUcontext current = NULL, popped;
    CUresult result = gai_site_context(site);
    if (!result) result = gai_cu.CtxGetCurrent(&current);
    if (!result && current == site->context) {
        result = gai_cu.CtxGetDevice(device);
    } else if (!result) {
        result = gai_cu.CtxPushCurrent(site->context);
        if (!result) {
            result = gai_cu.CtxGetDevice(device);
            (void)gai_cu.CtxPopCurrent(&popped);
        }
    }
    return result ? gai_driver_failed(result, "cuCtxGetDevice") : cudaSuccess;
}

static int gai_is_used(const void *ptr)
{
    const gai_block *block = gai_block_at((uintptr_t)ptr);
    return block && gai_block_addr(block) == (uintptr_t)ptr && gai_load_pointer(&block->held);
}

/* The pool that an address may be of, in which the call is from then on; NULL: there is none. It may be another one
   than it was when the address was looked up: with its lock held the address is looked up again. A pool with a used
   block does not end, whoever tries: that is waited for. */
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

/* What every function that takes a used block begins with; the call is in the pool from then on. *pool is NULL when
   there is nothing to do: no pointer, or no driver any more. */
static cudaError_t gai_find_pool(galloc_pool **pool, void *ptr, cudaStream_t stream, gai_site *site)
{
    cudaError_t error;
    *pool = NULL;
    error = gai_begin();
    if (error || !ptr) return error;
    error = gai_site_of(stream, site);
    if (error == cudaErrorCudartUnloading) return cudaSuccess;
    if (error) return error;
    *pool = gai_pool_around(ptr);
    return *pool ? cudaSuccess : gai_pointer_refused(NULL, ptr);
}

static cudaError_t gai_free_after(void *ptr, const cudaStream_t *streams, int n, cudaStream_t zero)
{
    galloc_pool *pool;
    gai_site site;
    cudaError_t error;
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

/* What this thread remembers of the streams that it used lately: the way from a stream and a pool to the stream's
   cache, without a lock that others share. It is only a memory: what it says is looked at again before it is used. The
   stream must still be the one that it was, by a look at its id, or for the default streams at their context's (who
   vouches for calls that do not ask is said above gai_cache); and the stream cache, once its latch is held, must still
   be open for the life of the stream state that the way led to. */
typedef struct gai_entry {
    uint64_t generation; /* the way is none unless this is of now */
    const galloc_pool *key; /* its handle; NULL: the default pool of the stream's device, whichever that is */
    galloc_pool *pool;
    short looks; /* stream_check */
    short torch; /* of the pool, which may have ended */
    int asks;  /* for the current context: of a default stream, unless by promise that is always the same. 1: not when
                  what was given out last is freed: by promise that comes where it was allocated */
    gai_site site;
    gai_block *last; /* given out on this way, and its address */
    uintptr_t last_ptr;
    size_t reach; /* what is asked for beyond this is no stream cache's, */
    size_t most;  /* and beyond this that, or rounded in another way than mostly */
} gai_entry;

#define GAI_ENTRIES_LOG2 5
#define GAI_ENTRIES 32
#define GAI_ENTRY_PROBES 4 /* neighbouring entries where it may be */

static GAI_THREAD_LOCAL gai_entry gai_entries[GAI_ENTRIES];
static GAI_THREAD_LOCAL gai_entry *gai_last_entry; /* on which `last` was given out; NULL: none since it was noted */
static GAI_THREAD_LOCAL int gai_one_context; /* there is a way to a pool of which this is so, or was */

/* Stream 0 is the legacy one, of which the handle is 1. */
static GAI_INLINE CUstream gai_named_stream(cudaStream_t stream)
{
    return (CUstream)((uintptr_t)stream + (stream == NULL));
}

static GAI_INLINE size_t gai_entry_at(CUstream stream, CUcontext context, const galloc_pool *key)
{
    uint64_t mixed = (uint64_t)(uintptr_t)stream ^ (uint64_t)(uintptr_t)context << 1 ^ (uint64_t)(uintptr_t)key << 2;
    return (size_t)(mixed * 0x9e3779b97f4a7c15u >> (64 - GAI_ENTRIES_LOG2));
}

static GAI_INLINE int gai_entry_leads(const gai_entry *entry, uint64_t generation, CUstream stream)
{
    return entry->site.handle == stream && entry->generation == generation;
}

static GAI_INLINE int gai_entry_is(const gai_entry *entry, uint64_t generation, CUstream stream, CUcontext context,
                                 const galloc_pool *key)
{
    return gai_entry_leads(entry, generation, stream) && entry->key == key &&
           (!context || entry->site.context == context);
}

/* The way is not where it is looked for first. */
GAI_APART
static gai_entry *gai_entry_search(uint64_t generation, CUstream stream, CUcontext context, const galloc_pool *key)
{
    size_t at = gai_entry_at(stream, context, key), probes;
    for (probes = 1; probes < GAI_ENTRY_PROBES; probes++)
        if (gai_entry_is(&gai_entries[at ^ probes], generation, stream, context, key)) return &gai_entries[at ^ probes];
    return NULL;
}

static GAI_INLINE gai_entry *gai_entry_look_up(uint64_t generation, CUstream stream, CUcontext context,
                                           const galloc_pool *key)
{
    gai_entry *entry = &gai_entries[gai_entry_at(stream, context, key)];
    return gai_entry_is(entry, generation, stream, context, key) ? entry
                                                                 : gai_entry_search(generation, stream, context, key);
}

/* The default streams are their context's: it is asked which one is current. */
GAI_APART
static gai_entry *gai_entry_find_default(CUstream stream, const galloc_pool *key)
{
    uint64_t generation = gai_load(&gai_generation);
    CUcontext context = NULL;
    gai_entry *entry = gai_one_context ? gai_entry_look_up(generation, stream, NULL, key) : NULL;
    if (entry && !entry->asks) return entry;
    if (!generation || gai_cu.CtxGetCurrent(&context) || !context) return NULL;
    return gai_entry_look_up(generation, stream, context, key);
}

/* The way that this thread remembers, or NULL. */
static GAI_INLINE gai_entry *gai_entry_find(cudaStream_t named, const galloc_pool *key)
{
    CUstream stream = (CUstream)named;
    if (gai_is_default_stream(stream)) return gai_entry_find_default(gai_named_stream(named), key);
    return gai_entry_look_up(gai_load(&gai_generation), stream, NULL, key);
}

/* The context of a default stream must not have been reset, and per-thread streams may be captured. Legacy never is,
   and is not touched. */
GAI_APART
static int gai_entry_is_free_default(const gai_entry *entry)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    unsigned long long id = 0;
    if (entry->site.handle != CU_STREAM_LEGACY && gai_cu.StreamIsCapturing(entry->site.handle, &status)) return 0;
    if (status != CU_STREAM_CAPTURE_STATUS_NONE) return 0;
    return !gai_cu.CtxGetId(entry->site.context, &id) && id == entry->site.context_id;
}

static GAI_INLINE int gai_entry_is_free_named(const gai_entry *entry)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return !gai_cu.StreamIsCapturing(entry->site.handle, &status) && status == CU_STREAM_CAPTURE_STATUS_NONE;
}

/* May the stream be used, as far as can be seen without its id? A stream that is captured may not. */
static GAI_INLINE int gai_entry_is_free(const gai_entry *entry)
{
    if (!entry->looks) return 1;
    return gai_is_default_stream(entry->site.handle) ? gai_entry_is_free_default(entry)
                                                     : gai_entry_is_free_named(entry);
}

/* Is it still the stream that the way was made for? Asked after gai_entry_is_free only: a captured stream must not be
   asked. */
static GAI_INLINE int gai_entry_keeps_id(const gai_entry *entry)
{
    unsigned long long id = 0;
    return !gai_cu.StreamGetId(entry->site.handle, &id) && id == entry->site.stream_id;
}

static int gai_entry_confirms(const gai_entry *entry)
{
    return !entry->looks || gai_is_default_stream(entry->site.handle) || gai_entry_keeps_id(entry);
}

/* Both. */
static GAI_INLINE int gai_entry_is_sure(const gai_entry *entry)
{
    if (!entry->looks) return 1;
    if (gai_is_default_stream(entry->site.handle)) return gai_entry_is_free_default(entry);
    return gai_entry_is_free_named(entry) && gai_entry_keeps_id(entry);
}

/* Takes the call of a known way into its pool; the way may have ended since. */
static int gai_entry_pin(const gai_entry *entry)
{
    galloc_pool *pool = entry->pool;
    if (!gai_pool_pin(pool)) return 0;
    if (entry->generation == gai_load(&gai_generation)) return 1;
    gai_pool_unpin(pool);
    return 0;
}

/* ---- threads that end, and code that goes before them ---- */

#define GAI_UNWATCHED 0
#define GAI_WATCHED 1  /* there is a key */
#define GAI_UNLOADED 2 /* nothing of galloc may be called any more that nobody waits for */

static gai_thread_key gai_end_key;
static uint64_t gai_ends; /* GAI_UNWATCHED ... */
static GAI_THREAD_LOCAL uint64_t gai_watched; /* the generation in which this thread said that it wants to be */

/* The per-thread streams of a thread that ends are nobody's any more: what their stream caches hold goes where others
   find it. No call of CUDA is made. The thread's own memory of ways is of no use: others may have taken their places
   there. */
static void GAI_AT_THREAD_END gai_thread_ends(void *number)
{
    galloc_pool *pool;
    gai_stream *stream;
    if (gai_load_pointer(&gai_forked) || gai_load(&gai_ends) != GAI_WATCHED) return;
    gai_lock_on(&gai_global_lock);
    for (pool = gai_pools; pool; pool = pool->next) {
        gai_lock_on(&pool->lock);
        for (stream = pool->streams; stream; stream = stream->next)
            if (stream->thread == (uintptr_t)number) (void)gai_stream_flush(pool, stream, 0);
        gai_lock_off(&pool->lock);
    }
    gai_lock_off(&gai_global_lock);
}

/* The code may be unloaded while threads go on that have used it, or the process may end before them. Static
   destructors and functions of atexit, which may call galloc, come before this or after it. It takes no lock, since
   another thread may have died with one, and calls nothing of CUDA. */
GAI_AT_UNLOAD
static void gai_unload(void)
{
    while (!gai_swap(&gai_ends, GAI_UNWATCHED, GAI_UNLOADED)) {
        if (gai_load(&gai_ends) == GAI_UNLOADED) return;
        if (!gai_swap(&gai_ends, GAI_WATCHED, GAI_UNLOADED)) continue;
        gai_thread_key_end(gai_end_key);
        return;
    }
}

static int gai_unload_is_watched; /* guarded by the global lock */

/* With the global lock held. */
static int gai_watch_ends(void)
{
    if (gai_load(&gai_ends) != GAI_UNWATCHED) return gai_load(&gai_ends) == GAI_WATCHED;
    if (!gai_unload_is_watched) gai_unload_is_watched = gai_watch_unload(gai_unload);
    if (!gai_unload_is_watched || !gai_thread_key_new(&gai_end_key, gai_thread_ends)) return 0;
    if (gai_swap(&gai_ends, GAI_UNWATCHED, GAI_WATCHED)) return 1;
    gai_thread_key_end(gai_end_key);
    return 0;
}

static void gai_thread_watch(void)
{
    uint64_t generation = gai_load(&gai_generation);
    uintptr_t number = (uintptr_t)gai_stream_key(CU_STREAM_PER_THREAD);
    if (gai_watched == generation) return;
    gai_lock_on(&gai_global_lock);
    if (gai_watch_ends() && gai_thread_key_set(gai_end_key, (void *)number)) gai_watched = generation;
    gai_lock_off(&gai_global_lock);
}

/* Threads that end need not be seen any more. Windows would call the function for each thread that lives: there the key
   is kept until the code is unloaded. With the global lock held. */
static void gai_threads_forget(void)
{
#if !defined(_WIN32)
    if (gai_swap(&gai_ends, GAI_WATCHED, GAI_UNWATCHED)) gai_thread_key_end(gai_end_key);
#endif
}

/* ---- remembering ---- */

/* Remembers the way that a call has gone. It takes the place of what it replaces, or of what has ended, or of any.
   There is none for a stream that may outlive the pool's memory: see gai_pool_look_for_reset. */
static void gai_entry_note(const gai_site *site, galloc_pool *pool, const galloc_pool *key)
{
    uint64_t generation = gai_load(&gai_generation);
    int asks = gai_is_default_stream(site->handle) && !pool->one_context;
    CUcontext context = asks ? site->context : NULL;
    size_t at = gai_entry_at(site->handle, context, key), probes;
    gai_entry *entry = &gai_entries[at ^ site->life % GAI_ENTRY_PROBES];
    if (!site->life || site->capture || site->broken || pool->config.backend) return;
    if (pool->mortal && !site->own_context) return;
    for (probes = GAI_ENTRY_PROBES; probes-- > 0;)
        if (gai_entries[at ^ probes].generation != generation) entry = &gai_entries[at ^ probes];
    for (probes = 0; probes < GAI_ENTRY_PROBES; probes++)
        if (gai_entry_is(&gai_entries[at ^ probes], generation, site->handle, context, key))
            entry = &gai_entries[at ^ probes];
    if (entry == gai_last_entry) gai_last_entry = NULL;
    entry->generation = generation;
    entry->key = key;
    entry->pool = pool;
    entry->looks = pool->config.stream_check;
    entry->torch = pool->torch;
    entry->asks = asks && entry->looks ? 2 : asks;
    gai_one_context |= pool->one_context;
    entry->reach = (size_t)gai_cache_reach(pool);
    entry->most = gai_min((size_t)gai_counted(&pool->plain), entry->reach);
    entry->site = *site;
    entry->site.capture_forbids = 0; /* of that moment; see gai_entry_may_act */
    if (site->handle == CU_STREAM_PER_THREAD) gai_thread_watch();
}

/* ---- the fast path ---- */

/* May anything be called on legacy? Stream caches serve it unasked, but nothing may while a blocking stream is
   captured. */
GAI_APART
static int gai_legacy_may_act(const gai_entry *entry)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!entry->looks) return 1;
    return !gai_cu.StreamIsCapturing(CU_STREAM_LEGACY, &status) && status == CU_STREAM_CAPTURE_STATUS_NONE;
}

static GAI_INLINE int gai_entry_may_act(const gai_entry *entry)
{
    return entry->site.handle != CU_STREAM_LEGACY || gai_legacy_may_act(entry);
}

/* What is known of the stream when a stream cache has not served. Where there are no looks only an open stream cache
   says that the stream has not been retired. */
static enum gai_outcome gai_entry_outcome(const gai_entry *entry, enum gai_cache_state state)
{
    if ((state == GAI_SHUT && !entry->looks) || !gai_entry_may_act(entry)) return GAI_LONG;
    return state == GAI_EMPTY ? GAI_KNOWN_EMPTY : GAI_KNOWN;
}

/* The program has been given a block on this way. */
static GAI_INLINE void gai_entry_gave(gai_entry *entry, gai_block *block, uintptr_t addr, void **ptr)
{
    entry->last_ptr = addr;
    entry->last = block;
    gai_last_entry = entry;
    *ptr = (void *)addr;
}

/* The same for what is rounded further than to 512 bytes. How that is done is read where the stream cache is open and
   its latch held: until then the pool may have ended, and another one may begin in its place. */
GAI_APART
static enum gai_outcome gai_malloc_rounded(void **ptr, size_t bytes, uint32_t tag, gai_entry *entry)
{
    gai_cache *cache = &entry->site.stream->cache;
    gai_block *block = NULL;
    uintptr_t addr;
    enum gai_cache_state state = GAI_SHUT;
    gai_latch_on(&cache->latch);
    if (cache->open == entry->site.life)
        block = gai_cache_pop(cache, gai_rounded(entry->pool, bytes), bytes, tag, &state);
    gai_latch_off(&cache->latch);
    if (!block) return gai_entry_outcome(entry, state);
    addr = block->addr;
    gai_store_pointer(&block->held, entry->site.stream);
    gai_entry_gave(entry, block, addr, ptr);
    return GAI_DONE;
}

static GAI_INLINE enum gai_outcome gai_malloc_by_entry(void **ptr, size_t bytes, uint32_t tag, cudaStream_t stream,
                                                     const galloc_pool *key, gai_entry **found)
{
    gai_entry *entry = *found = gai_entry_find(stream, key);
    gai_block *block;
    uintptr_t addr;
    enum gai_cache_state state = GAI_SHUT;
    if (!entry || !gai_entry_is_sure(entry)) return GAI_LONG;
    if (bytes > entry->most) {
        if (bytes > entry->reach) return gai_entry_outcome(entry, GAI_SHUT); /* no stream cache has that */
        return gai_malloc_rounded(ptr, bytes, tag, entry);
    }
    block = gai_cache_take(&entry->site.stream->cache, entry->site.life, gai_up(bytes, GAI_UNIT), bytes, tag, &state);
    if (!block) return gai_entry_outcome(entry, state);
    addr = block->addr;
    gai_store_pointer(&block->held, entry->site.stream);
    gai_entry_gave(entry, block, addr, ptr);
    return GAI_DONE;
}

static GAI_INLINE enum gai_outcome gai_block_by_entry(gai_block *block, void *ptr, const gai_entry *entry,
                                                      int confirmed)
{
    return gai_cache_put(entry->site.stream, entry->site.life, block, ptr, confirmed);
}

/* A block that was given to another stream state becomes this one's, if it has no marks and no stream cache has seen
   it, and is put into the stream cache. One that does not suit has not come to the stream cache, which alone knows,
   where there are no looks, whether the stream has been retired; nor, with like:pytorch, whether there is a short way
   to the pool. */
static enum gai_outcome gai_foreign_by_entry(gai_block *block, void *ptr, const gai_entry *entry)
{
    int suits;
    if (!gai_block_acquire(block, ptr)) return GAI_LONG;
    suits = !(block->tag & (GAI_SPECIAL | GAI_CACHED)) && !block->marks;
    if (!suits && entry->looks && !entry->torch) return GAI_TAKEN;
    if (suits) gai_set_relaxed(&block->stream_id, entry->site.stream_id);
    if (suits) block->life = entry->site.life;
    gai_store_pointer(&block->held, entry->site.stream);
    return suits ? gai_block_by_entry(block, ptr, entry, 0) : GAI_LONG;
}

/* What it comes to when the stream cache would not have the block: the stream is asked who it is, and then perhaps the
   stream cache once more. A block that the pool cannot have at once is the program's again. */
GAI_APART
static enum gai_outcome gai_free_asked(enum gai_outcome outcome, gai_block *block, void *ptr, const gai_entry *entry)
{
    int confirms, taken;
    if (outcome == GAI_FOREIGN) { /* perhaps that was here when this way gave it out, and here is another pool's now */
        if (gai_block_at((uintptr_t)ptr) != block) return GAI_LONG;
        outcome = gai_foreign_by_entry(block, ptr, entry);
    }
    if (outcome == GAI_DONE) return GAI_DONE;
    confirms = gai_entry_confirms(entry);
    if (outcome == GAI_ASK && confirms) outcome = gai_block_by_entry(block, ptr, entry, 1);
    if (outcome == GAI_DONE) return GAI_DONE;
    taken = outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY;
    if (taken && confirms && gai_entry_may_act(entry)) return outcome;
    if (taken) gai_store_pointer(&block->held, entry->site.stream);
    return confirms ? gai_entry_outcome(entry, GAI_SHUT) : GAI_LONG;
}

/* May what was given out last be freed with the context not asked for? Its address may have been freed since, and have
   come back on the default stream of another device: the promise speaks of what is still this stream state's. */
static GAI_INLINE int gai_entry_keeps_context(const gai_entry *entry)
{
    return !entry->asks || (entry->asks == 1 && gai_load_pointer(&entry->last->held) == entry->site.stream);
}

/* What the thread allocated last it often frees first: then the block need not be looked for. Should the address be
   another block's by now, the stream cache finds that it does not hold this one. */
static GAI_INLINE gai_block *gai_block_and_entry(void *ptr, cudaStream_t stream, gai_entry **found)
{
    gai_entry *entry = *found = gai_last_entry;
    const galloc_pool *pool;
    gai_block *block;
    if (entry && entry->last_ptr == (uintptr_t)ptr &&
        gai_entry_leads(entry, gai_load(&gai_generation), gai_named_stream(stream)) && gai_entry_keeps_context(entry))
        return entry->last;
    *found = NULL;
    block = gai_block_at((uintptr_t)ptr);
    if (!block) return NULL;
    pool = (const galloc_pool *)gai_load_pointer(&block->pool);
    *found = gai_entry_find(stream, (const galloc_pool *)gai_load_pointer(&pool->key));
    return *found && (*found)->pool == pool ? block : NULL;
}

/* ---- and what becomes of the rest ---- */

/* In a pool that the call is in; where that is NULL, in the default pool, in which it is from then on. */
static cudaError_t gai_alloc_in(galloc_pool **pool, void **ptr, const galloc_request *request)
{
    gai_site site;
    int device = 0;
    cudaError_t error = *pool ? gai_pool_refuses(*pool) : cudaSuccess;
    if (!error) error = gai_site_of(request->stream, &site);
    if (error == cudaErrorCudartUnloading) return gai_fail(error, "the CUDA driver is shutting down");
    if (!error) error = gai_site_is_sound(&site);
    if (!error && !*pool) {
        error = gai_site_device(&site, &device);
        if (!error) error = gai_pool_of_device(pool, device);
    }
    if (error) gai_has_report = 0;
    else error = gai_pool_alloc(*pool, ptr, request, &site);
    if (!error) gai_entry_note(&site, *pool, request->pool);
    return error;
}

static cudaError_t gai_alloc_at(galloc_pool *pool, void **ptr, const galloc_request *request)
{
    cudaError_t error;
    if (!ptr) return gai_fail(cudaErrorInvalidValue, "ptr is NULL: there is nowhere to put the address");
    *ptr = NULL;
    error = gai_begin();
    if (!error && pool) error = gai_pool_find(&pool);
    if (error) {
        gai_has_report = 0;
        return error;
    }
    if (request->bytes) error = gai_alloc_in(&pool, ptr, request);
    if (pool) gai_pool_unpin(pool);
    return error;
}

/* May blocks that somebody gave back serve it as they are? */
static int gai_request_is_plain(const galloc_request *request)
{
    return request->max_bytes <= request->bytes && request->lifetime == GALLOC_LIFETIME_ANY &&
           request->alignment <= GAI_UNIT && !(request->alignment & (request->alignment - 1));
}

/* The stream cache had nothing, the pool perhaps has. */
GAI_APART
static int gai_malloc_near(enum gai_outcome outcome, gai_entry *entry, void **ptr, size_t bytes, uint32_t tag)
{
    gai_block *block = NULL;
    if (outcome == GAI_LONG || bytes > (size_t)1 << (GAI_ADDRESS_BITS - 2)) return 0;
    block = gai_pool_take_near(entry->pool, &entry->site, bytes, tag, outcome == GAI_KNOWN_EMPTY);
    if (!block) return 0;
    gai_entry_gave(entry, block, block->addr, ptr);
    return 1;
}

/* The call may ask the program, whose calls may put another way in the place of this one. If the stream state has
   changed, the way is noted again. */
static cudaError_t gai_alloc_far(enum gai_outcome outcome, const gai_entry *entry, void **ptr,
                                 const galloc_request *request)
{
    galloc_pool *pool;
    gai_site site;
    uint64_t life;
    cudaError_t error;
    if (outcome == GAI_LONG || !gai_entry_pin(entry)) return gai_alloc_at(request->pool, ptr, request);
    *ptr = NULL;
    pool = entry->pool;
    site = entry->site;
    life = site.life;
    error = gai_pool_alloc(pool, ptr, request, &site);
    if (!error && site.life != life) gai_entry_note(&site, pool, request->pool);
    gai_pool_unpin(pool);
    return error;
}

/* Kept out of the functions that call it, which are short without it. */
GAI_APART
static cudaError_t gai_alloc_slowly(enum gai_outcome outcome, gai_entry *entry, void **ptr,
                                    const galloc_request *request)
{
    return gai_end("galloc_alloc", gai_alloc_far(outcome, entry, ptr, request));
}

GAI_APART
static cudaError_t gai_malloc_slowly(enum gai_outcome outcome, gai_entry *entry, galloc_pool *pool, void **ptr,
                                     size_t bytes, cudaStream_t stream)
{
    galloc_request request;
    if (gai_malloc_near(outcome, entry, ptr, bytes, 0)) return cudaSuccess;
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    request.stream = stream;
    request.pool = pool;
    return gai_end(pool ? "galloc_pool_malloc" : "galloc_malloc", gai_alloc_far(outcome, entry, ptr, &request));
}

static GAI_INLINE cudaError_t gai_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream)
{
    gai_entry *entry = NULL;
    enum gai_outcome outcome = GAI_LONG;
    if (ptr && bytes) outcome = gai_malloc_by_entry(ptr, bytes, 0, stream, pool, &entry);
    if (outcome == GAI_DONE) return cudaSuccess;
    return gai_malloc_slowly(outcome, entry, pool, ptr, bytes, stream);
}

static GAI_INLINE cudaError_t gai_alloc(void **ptr, const galloc_request *request)
{
    gai_entry *entry = NULL;
    enum gai_outcome outcome = GAI_LONG;
    if (ptr && request->bytes && gai_request_is_plain(request))
        outcome = gai_malloc_by_entry(ptr, request->bytes, request->tag, request->stream, request->pool, &entry);
    if (outcome == GAI_DONE) return cudaSuccess;
    if (gai_malloc_near(outcome, entry, ptr, request->bytes, request->tag)) return cudaSuccess;
    return gai_alloc_slowly(outcome, entry, ptr, request);
}

GAI_APART
static cudaError_t gai_free_long(enum gai_outcome outcome, const gai_entry *entry, void *ptr, gai_block *block,
                                 cudaStream_t stream)
{
    galloc_pool *pool = NULL;
    gai_site site;
    cudaError_t error = cudaSuccess;
    int taken = outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY;
    if (taken || (outcome != GAI_LONG && gai_entry_pin(entry))) { /* a pool does not end while a block is used */
        pool = entry->pool;
        site = entry->site;
    } else {
        error = gai_find_pool(&pool, ptr, stream, &site);
    }
    if (!pool) return gai_end("galloc_free", error);
    error = gai_pool_free(pool, ptr, &site, taken ? block : NULL);
    if (taken && !gai_pool_pin(pool)) return gai_end("galloc_free", error);
    if (!error && !(entry && site.life == entry->site.life) && (site.own_context || !pool->is_default))
        gai_entry_note(&site, pool, (const galloc_pool *)pool->key);
    gai_pool_unpin(pool);
    return gai_end("galloc_free", error);
}

GAI_APART
static cudaError_t gai_free_slowly(enum gai_outcome outcome, const gai_entry *entry, void *ptr, gai_block *block,
                                   cudaStream_t stream)
{
    int taken = outcome == GAI_TAKEN || outcome == GAI_TAKEN_EMPTY;
    if (taken && gai_pool_free_near(entry->pool, block, &entry->site, outcome == GAI_TAKEN_EMPTY)) return cudaSuccess;
    return gai_free_long(outcome, entry, ptr, block, stream);
}

static GAI_INLINE cudaError_t gai_free(void *ptr, cudaStream_t stream)
{
    gai_entry *entry = NULL;
    gai_block *block = gai_block_and_entry(ptr, stream, &entry);
    enum gai_outcome outcome;
    if (!block || !gai_entry_is_free(entry)) return gai_free_slowly(GAI_LONG, entry, ptr, block, stream);
    outcome = gai_block_by_entry(block, ptr, entry, 0);
    if (outcome != GAI_DONE) outcome = gai_free_asked(outcome, block, ptr, entry);
    return outcome == GAI_DONE ? cudaSuccess : gai_free_slowly(outcome, entry, ptr, block, stream);
}

/* ==== PUBLIC ==================================================================================================== */
/* >>public */

/* A file sees only one of these pairs under its name; the library has both. */
GALLOC_API cudaError_t galloc_malloc(void **ptr, size_t bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_malloc_ptsz(void **ptr, size_t bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_malloc_growable(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_malloc_growable_ptsz(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_free(void *ptr, cudaStream_t stream);
GALLOC_API cudaError_t galloc_free_ptsz(void *ptr, cudaStream_t stream);
GALLOC_API cudaError_t galloc_free_after(void *ptr, const cudaStream_t *streams, int n);
GALLOC_API cudaError_t galloc_free_after_ptsz(void *ptr, const cudaStream_t *streams, int n);
GALLOC_API cudaError_t galloc_alloc(void **ptr, const galloc_request *request);
GALLOC_API cudaError_t galloc_alloc_ptsz(void **ptr, const galloc_request *request);
GALLOC_API cudaError_t galloc_pool_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_pool_malloc_ptsz(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_record_stream(void *ptr, cudaStream_t stream);
GALLOC_API cudaError_t galloc_record_stream_ptsz(void *ptr, cudaStream_t stream);
GALLOC_API cudaError_t galloc_stream_retire(cudaStream_t stream);
GALLOC_API cudaError_t galloc_stream_retire_ptsz(cudaStream_t stream);
GALLOC_API cudaError_t galloc_resize(void *ptr, size_t bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_resize_ptsz(void *ptr, size_t bytes, cudaStream_t stream);
GALLOC_API cudaError_t galloc_graph_begin(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream);
GALLOC_API cudaError_t galloc_graph_begin_ptsz(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream);
GALLOC_API cudaError_t galloc_graph_release(galloc_graph *graph, cudaStream_t stream);
GALLOC_API cudaError_t galloc_graph_release_ptsz(galloc_graph *graph, cudaStream_t stream);

GALLOC_API const char *galloc_last_message(void) { return gai_message; }

GALLOC_API void galloc_set_log(void (*call)(int level, const char *text, void *user), void *user)
{
    gai_lock_on(&gai_log_lock);
    gai_log_function = call;
    gai_log_user = user;
    gai_lock_off(&gai_log_lock);
}

GALLOC_API galloc_config galloc_config_default(void) { return gai_config_default(); }

/* As much as there is room for. Not by snprintf, which compilers that know the sizes warn of. */
static void gai_copy_text(char *to, size_t size, const char *from)
{
    size_t length = gai_min(strlen(from), size - 1);
    memcpy(to, from, length);
    to[length] = 0;
}

GALLOC_API cudaError_t galloc_config_parse(galloc_config *config, const char *text, char *message, size_t size)
{
    static const char *const of_process[] = {"log", NULL};
    char saved[GAI_MESSAGE];
    uint64_t seen = 0;
    int right;
    if (message && size) message[0] = 0;
    if (!config || !text)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "config and text must not be NULL"));
    right = gai_parse(config, text, NULL, &seen, saved, sizeof saved);
    if (right) gai_config_say_idle(config, seen, saved, sizeof saved);
    if (right) gai_say_idle(seen, of_process, "but in the variable GALLOC_CONF", saved, sizeof saved);
    if (message && size) gai_copy_text(message, size, saved);
    return right ? cudaSuccess : gai_end(__func__, gai_fail(cudaErrorInvalidValue, "configuration: %s", saved));
}

GALLOC_API cudaError_t galloc_config_print(const galloc_config *config, char *text, size_t size)
{
    char message[GAI_MESSAGE];
    if (!config || !text || !size)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "config and text must not be NULL"));
    text[0] = 0;
    if (!gai_config_is_right(config, message, sizeof message))
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "config: %s", message));
    if (gai_config_print(config, text, size)) return cudaSuccess;
    text[0] = 0;
    return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "%zu bytes are too few", size));
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
    cudaError_t error = gai_begin();
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    if (pool->is_default) {
        error = gai_fail(cudaErrorNotPermitted, "a default pool ends with galloc_shutdown only");
    } else {
        gai_pool_part(pool);
        error = gai_pool_end(pool);
    }
    if (error) gai_pool_unpin(pool);
    return gai_end(__func__, error);
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
    return gai_end(__func__, gai_alloc_at(NULL, ptr, &request));
}

GALLOC_API cudaError_t galloc_pool_malloc(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream)
{
    if (!pool) {
        if (ptr) *ptr = NULL;
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
    return gai_end(__func__, gai_free_after(ptr, streams, n, cudaStreamLegacy));
}

GALLOC_API cudaError_t galloc_resize(void *ptr, size_t bytes, cudaStream_t stream)
{
    galloc_pool *pool;
    gai_site site;
    cudaError_t error;
    if (!ptr) return gai_end(__func__, gai_fail(cudaErrorInvalidDevicePointer, "ptr is NULL"));
    if (!bytes) return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "0 bytes"));
    if (bytes > (size_t)1 << (GAI_ADDRESS_BITS - 2))
        return gai_end(__func__, gai_fail(cudaErrorNotSupported, "there are no addresses for %zu bytes", bytes));
    error = gai_find_pool(&pool, ptr, stream, &site);
    if (error) gai_has_report = 0;
    if (!pool) return gai_end(__func__, error);
    error = gai_site_is_free(&site) ? cudaErrorNotSupported : gai_pool_resize(pool, ptr, bytes, &site);
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_record_stream(void *ptr, cudaStream_t stream)
{
    galloc_pool *pool;
    gai_site site;
    cudaError_t error;
    if (!ptr) return gai_end(__func__, gai_fail(cudaErrorInvalidDevicePointer, "ptr is NULL"));
    error = gai_find_pool(&pool, ptr, stream, &site);
    if (!pool) return gai_end(__func__, error);
    error = gai_site_is_sound(&site);
    if (!error) error = gai_pool_record_stream(pool, ptr, &site);
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_stream_retire(cudaStream_t stream)
{
    gai_site site;
    cudaError_t error = gai_begin();
    if (!error) error = gai_site_of(stream, &site);
    if (!error) error = gai_site_is_free(&site);
    if (error) return gai_end(__func__, error == cudaErrorCudartUnloading ? cudaSuccess : error);
    gai_lock_on(&gai_global_lock);
    error = gai_retire(&site);
    gai_lock_off(&gai_global_lock);
    return gai_end(__func__, error);
}

/* The pool of a group that exists, or is to be made; the call is in it from then on. */
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
        error = gai_fail(cudaErrorInvalidValue, "the legacy stream is never captured");
    if (!error) error = gai_site_of(stream, &site);
    if (!error) error = gai_site_is_sound(&site);
    if (!error) error = gai_graph_pool(*graph, pool, &site, &pool);
    if (error) return gai_end(__func__, error);
    error = *graph ? gai_graph_begin(pool, *graph, NULL, &site) : gai_graph_begin_new(graph, pool, &site);
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_graph_end(galloc_graph *graph)
{
    galloc_pool *pool;
    cudaError_t error = gai_begin();
    if (!error && !graph) error = gai_fail(cudaErrorInvalidValue, "graph is NULL");
    if (!error) error = gai_graph_find(graph, &pool);
    if (error) return gai_end(__func__, error);
    error = gai_graph_end(pool, graph);
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_graph_release(galloc_graph *graph, cudaStream_t stream)
{
    gai_site site;
    gai_scope scope;
    galloc_pool *pool;
    cudaError_t error = gai_begin();
    if (!error && !graph) error = gai_fail(cudaErrorInvalidValue, "graph is NULL");
    if (!error) error = gai_site_of(stream, &site);
    if (!error) error = gai_site_is_free(&site);
    if (!error) error = gai_graph_find(graph, &pool);
    if (error) return gai_end(__func__, error);
    error = gai_pool_enter(pool, &scope);
    if (!error) {
        error = gai_graph_release(pool, graph, &site);
        gai_pool_leave(pool, &scope, 0);
    }
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_reserve(galloc_pool *pool, size_t bytes)
{
    gai_job job;
    galloc_request request;
    cudaError_t error = gai_begin();
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    memset(&job, 0, sizeof job);
    memset(&request, 0, sizeof request);
    request.bytes = bytes;
    job.pool = pool;
    if (pool->config.backend)
        error = gai_fail(cudaErrorNotSupported, "with this backend the driver is asked each time");
    if (!error) error = gai_pool_refuses(pool);
    if (!error) error = gai_params_of(pool, &request, &job.params);
    if (!error && bytes) {
        job.params.just_ready = 1;
        gai_job_run(&job);
        error = job.error;
        if (error) gai_has_report = job.reported;
    }
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

/* The end of a call that is in the pool. */
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
    cudaError_t error = gai_begin();
    if (released) *released = 0;
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    return gai_end(__func__, error ? error : gai_pool_give_back(pool, keep_bytes, 0, released));
}

GALLOC_API cudaError_t galloc_pool_sync_point(galloc_pool *pool, size_t *released)
{
    cudaError_t error = gai_begin();
    if (released) *released = 0;
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    if (!error) error = gai_pool_give_back(pool, pool->config.release_threshold, 1, released);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_config(galloc_pool *pool, galloc_config *config)
{
    cudaError_t error = gai_begin();
    if (!error && (!pool || !config))
        error = gai_fail(cudaErrorInvalidValue, "pool and config must not be NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    gai_pool_read_config(pool, config);
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_pool_decisions(galloc_pool *pool, galloc_decision *array, int n, int *count)
{
    int i;
    cudaError_t error = gai_begin();
    if (!error && (!pool || n < 0 || (n && !array)))
        error = gai_fail(cudaErrorInvalidValue, "needs a pool, and an array for n decisions");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    for (i = 0; i < n && i < pool->tuning.decided; i++) array[i] = pool->tuning.decisions[i];
    if (count) *count = pool->tuning.decided;
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_pool_freeze(galloc_pool *pool)
{
    cudaError_t error = gai_begin();
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    pool->tuning.watching = 0;
    pool->tuning.frozen = pool->config.strategy == GALLOC_STRATEGY_HEURISTIC;
    pool->special &= ~(uint64_t)GAI_ROUTE_TUNE;
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_pool_set_callbacks(galloc_pool *pool, const galloc_callbacks *callbacks)
{
    galloc_callbacks call;
    gai_scope scope;
    cudaError_t error = gai_begin();
    memset(&call, 0, sizeof call);
    if (callbacks) call = *callbacks;
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    error = gai_pool_enter(pool, &scope);
    if (!error) {
        error = gai_pool_call(pool, &call);
        gai_pool_leave(pool, &scope, 0);
    }
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_oom_report(galloc_report *report)
{
    if (!report) return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "report is NULL"));
    if (!gai_has_report)
        return gai_end(__func__, gai_fail(cudaErrorNotReady, "no allocation failed for want of memory"));
    *report = gai_last_report;
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_report_text(const galloc_report *report, char *text, size_t size)
{
    if (!report || !text || !size)
        return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "report and text must not be NULL"));
    text[0] = 0;
    if (gai_report_print(report, text, size)) return cudaSuccess;
    text[0] = 0;
    return gai_end(__func__, gai_fail(cudaErrorInvalidValue, "%zu bytes are too few", size));
}

#define GAI_CALL_READ(name, function)                                        \
    stats->driver.name = gai_counted(&pool->stats.driver.name);              \
    stats->driver_ns.name = gai_counted(&pool->stats.driver_ns.name);        \
    stats->driver_longest_ns.name = gai_counted(&pool->stats.driver_longest_ns.name);
#define GAI_CALL_RESET(name, function)                    \
    gai_count_reset(&pool->stats.driver.name);            \
    gai_count_reset(&pool->stats.driver_ns.name);         \
    gai_count_reset(&pool->stats.driver_longest_ns.name);

GALLOC_API cudaError_t galloc_pool_stats(galloc_pool *pool, galloc_stats *stats)
{
    const gai_capture *capture;
    cudaError_t error = gai_begin();
    if (!error && (!pool || !stats))
        error = gai_fail(cudaErrorInvalidValue, "pool and stats must not be NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    gai_pool_lock_caches(pool);
    gai_stats_locked(pool, stats);
    gai_stats_derive(pool, stats);
    gai_pool_unlock_caches(pool);
    stats->graph_bytes = gai_pool_captured(pool);
    for (capture = pool->captures; capture; capture = capture->next) stats->graphs++;
    GALLOC_DRIVER_CALLS(GAI_CALL_READ)
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_pool_torch_stats(galloc_pool *pool, galloc_torch_stats *stats)
{
    cudaError_t error = gai_begin();
    if (!error && (!pool || !stats))
        error = gai_fail(cudaErrorInvalidValue, "pool and stats must not be NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    gai_pool_reap(pool);
    if (pool->torch) *stats = pool->torch_stats;
    else error = gai_fail(cudaErrorNotSupported, "the pool is not like:pytorch with "
                          "expandable_segments:False");
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return gai_end(__func__, error);
}

GALLOC_API cudaError_t galloc_pool_streams(galloc_pool *pool, galloc_stream_stats *array, int n, int *count)
{
    gai_stream *stream;
    int i = 0;
    cudaError_t error = gai_begin();
    if (!error && (!pool || n < 0 || (n && !array)))
        error = gai_fail(cudaErrorInvalidValue, "needs a pool, and an array for n streams");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    gai_lock_on(&pool->lock);
    for (stream = pool->streams; stream; stream = stream->next) {
        if (!gai_stream_is_plain(stream)) continue;
        if (i < n) gai_stream_read(pool, stream, &array[i]);
        i++;
    }
    gai_lock_off(&pool->lock);
    if (count) *count = i;
    gai_pool_unpin(pool);
    return cudaSuccess;
}

/* `now` has what the stream caches know as well, and will tell some day: the total is such that nothing is left then.
   */
static void gai_stat_reset(galloc_stat *stat, const galloc_stat *now)
{
    stat->peak = now->current;
    stat->total -= now->total;
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

GALLOC_API cudaError_t galloc_pool_stats_reset(galloc_pool *pool)
{
    galloc_stats now, *stats;
    cudaError_t error = gai_begin();
    if (!error && !pool) error = gai_fail(cudaErrorInvalidValue, "pool is NULL");
    if (!error) error = gai_pool_find(&pool);
    if (error) return gai_end(__func__, error);
    stats = &pool->stats;
    gai_lock_on(&pool->lock);
    gai_stats_now(pool, &now);
    gai_stat_reset(&stats->live, &now.live);
    gai_stat_reset(&stats->allocated, &now.allocated);
    gai_stat_reset(&stats->reserved, &now.reserved);
    gai_stat_reset(&stats->cached, &now.cached);
    gai_stat_reset(&stats->blocks, &now.blocks);
    stats->mallocs -= now.mallocs;
    stats->frees -= now.frees;
    stats->hits -= now.hits;
    stats->failures = stats->rejections = stats->grows = 0;
    stats->splits = stats->merges = stats->marks = stats->waits = stats->moves = stats->moved_bytes = 0;
    stats->collections = stats->collected_bytes = 0;
    gai_torch_stats_reset(&pool->torch_stats);
    GALLOC_DRIVER_CALLS(GAI_CALL_RESET)
    gai_lock_off(&pool->lock);
    gai_pool_unpin(pool);
    return cudaSuccess;
}

GALLOC_API int galloc_pool_check(galloc_pool *pool)
{
    int broken;
    if (!pool || gai_begin()) return -1;
    if (gai_pool_find(&pool)) {
        (void)gai_end(__func__, cudaErrorInvalidResourceHandle);
        return -1;
    }
    gai_lock_on(&pool->growth);
    gai_lock_on(&pool->lock);
    gai_pool_lock_caches(pool);
    broken = gai_check_pool(pool);
    gai_pool_unlock_caches(pool);
    gai_lock_off(&pool->lock);
    gai_lock_off(&pool->growth);
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
    block = gai_block_around(pool, (uintptr_t)ptr);
    if (block && gai_block_has_pages(block)) {
        info->pool = pool->handle;
        info->base = (void *)block->addr;
        used = gai_load_pointer(&block->held) != NULL;
        info->requested = used ? (size_t)gai_counted(&block->requested) : 0;
        info->usable = gai_block_usable(block);
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

GALLOC_API cudaError_t galloc_shutdown(void)
{
    galloc_pool *pool;
    int device;
    cudaError_t error = gai_begin(), first = cudaSuccess;
    if (error) return gai_end(__func__, error);
    for (device = 0; device < GAI_DEVICES; device++) {
        pool = (galloc_pool *)gai_load_pointer(&gai_default_pool[device]);
        if (!pool || !gai_pool_pin(pool)) continue;
        gai_pool_part(pool);
        error = gai_pool_end(pool);
        if (error) gai_pool_unpin(pool);
        if (error && !first) first = error;
    }
    gai_lock_on(&gai_global_lock);
    for (pool = gai_pools; pool && pool->is_default; pool = pool->next) continue;
    if (pool) error = gai_fail(cudaErrorNotPermitted, "a pool of the program's own still exists: destroy it first");
    if (pool && !first) first = error;
    if (!gai_pools) {
        gai_pools_free();
        gai_map_end(&gai_block_map);
        gai_map_end(&gai_page_map);
        gai_contexts_forget();
        gai_store_pointer(&gai_cu_ready, NULL);
        gai_generation_end();
        gai_threads_forget();
    }
    gai_lock_off(&gai_global_lock);
    return gai_end(__func__, first);
}

/* The same for files that are compiled for per-thread default streams. */
static cudaStream_t gai_per_thread(cudaStream_t stream) { return stream ? stream : cudaStreamPerThread; }

GALLOC_API cudaError_t galloc_malloc_ptsz(void **ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_malloc(ptr, bytes, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_malloc_growable_ptsz(void **ptr, size_t bytes, size_t max_bytes, cudaStream_t stream)
{
    return galloc_malloc_growable(ptr, bytes, max_bytes, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_free_ptsz(void *ptr, cudaStream_t stream)
{
    return galloc_free(ptr, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_free_after_ptsz(void *ptr, const cudaStream_t *streams, int n)
{
    return gai_end("galloc_free_after", gai_free_after(ptr, streams, n, cudaStreamPerThread));
}

GALLOC_API cudaError_t galloc_alloc_ptsz(void **ptr, const galloc_request *request)
{
    galloc_request mapped;
    if (!request) return galloc_alloc(ptr, request);
    mapped = *request;
    mapped.stream = gai_per_thread(request->stream);
    return galloc_alloc(ptr, &mapped);
}

GALLOC_API cudaError_t galloc_pool_malloc_ptsz(galloc_pool *pool, void **ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_pool_malloc(pool, ptr, bytes, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_record_stream_ptsz(void *ptr, cudaStream_t stream)
{
    return galloc_record_stream(ptr, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_stream_retire_ptsz(cudaStream_t stream)
{
    return galloc_stream_retire(gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_resize_ptsz(void *ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_resize(ptr, bytes, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_graph_begin_ptsz(galloc_graph **graph, galloc_pool *pool, cudaStream_t stream)
{
    return galloc_graph_begin(graph, pool, gai_per_thread(stream));
}

GALLOC_API cudaError_t galloc_graph_release_ptsz(galloc_graph *graph, cudaStream_t stream)
{
    return galloc_graph_release(graph, gai_per_thread(stream));
}

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
