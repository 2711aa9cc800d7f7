/* galloc_python.c - galloc as the shared library of galloc.py. `make adapters` builds it.

   Besides galloc's own functions the library has these few. They take plain numbers, so that galloc.py needs to know no
   struct of galloc.h. galloc takes the current context for streams 0, 1 and 2, but Python may free a block while
   another one is current. So these functions name the device whose default streams are meant: those of its primary
   context. All return a cudaError_t; galloc_python_message() has the text until the thread's next one. */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>

/* A call of the runtime leaves no error behind, unless one was there before. */
static cudaError_t quiet(cudaError_t before, cudaError_t error)
{
    if (error != cudaSuccess && before == cudaSuccess) (void)cudaGetLastError();
    return error;
}

/* About the error of the thread's last galloc_python_... call, if galloc did not find it; else "". Each of these calls
   begins without. */
static __thread char own[200];

static cudaError_t says(cudaError_t error, const char *what)
{
    (void)snprintf(own, sizeof own, "galloc_python: %s: %s", what, cudaGetErrorString(error));
    return error;
}

/* The message of this thread's last galloc_python_... call, if that has failed. galloc's own functions have theirs in
   galloc_last_message(). */
GALLOC_API const char *galloc_python_message(void) { return own[0] ? own : galloc_last_message(); }

/* ---- the current context ----------------------------------------------------------------------------------------- */

#define MAX_DEVICES 64

/* Reads a function of the driver into a pointer to it; NULL: the driver does not have it. *found keeps the address. Any
   thread may call it. */
static void find_in_driver(const char *name, void **found, void *function)
{
    void *symbol = __atomic_load_n(found, __ATOMIC_RELAXED);
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (!symbol) {
        cudaError_t last = cudaPeekAtLastError(), error;
#if CUDART_VERSION >= 12050
        error = cudaGetDriverEntryPointByVersion(name, &symbol, 12000, cudaEnableDefault, &result);
#else
        error = cudaGetDriverEntryPoint(name, &symbol, cudaEnableDefault, &result);
#endif
        (void)quiet(last, error);
        if (result != cudaDriverEntryPointSuccess) symbol = NULL;
        __atomic_store_n(found, symbol, __ATOMIC_RELAXED);
    }
    memcpy(function, &symbol, sizeof symbol);
}

/* NULL: the thread has none, as before the first call of CUDA. */
static cudaError_t current_context(CUcontext *context)
{
    static void *found;
    CUresult(CUDAAPI *get_current)(CUcontext *);
    CUresult result;
    find_in_driver("cuCtxGetCurrent", &found, &get_current);
    *context = NULL;
    result = get_current ? get_current(context) : CUDA_ERROR_NOT_FOUND;
    return result == CUDA_ERROR_NOT_INITIALIZED ? cudaSuccess : (cudaError_t)result;
}

static cudaError_t set_current_context(CUcontext context)
{
    static void *found;
    CUresult(CUDAAPI *set_current)(CUcontext);
    find_in_driver("cuCtxSetCurrent", &found, &set_current);
    return set_current ? (cudaError_t)set_current(context) : cudaErrorSymbolNotFound;
}

/* What was current before a call. */
typedef struct previous {
    CUcontext context; /* NULL: none */
    int device;
    int is_left;
} previous;

static CUcontext primaries[MAX_DEVICES]; /* by device, as last seen; NULL: not seen. Any thread reads and writes them */

static int is_primary(CUcontext context, int device)
{
    return context && device < MAX_DEVICES && context == __atomic_load_n(&primaries[device], __ATOMIC_RELAXED);
}

/* Makes the primary context of a device current. cudaDeviceReset may have replaced the one that was seen. */
static cudaError_t make_current(int device, previous *before)
{
    CUcontext primary = NULL;
    cudaError_t last = cudaPeekAtLastError(), error = current_context(&before->context);
    if (error != cudaSuccess || is_primary(before->context, device)) return error;
    error = quiet(last, cudaSetDevice(device));
    if (error != cudaSuccess) return error;
    before->is_left = 1;
    (void)current_context(&primary);
    if (device < MAX_DEVICES) __atomic_store_n(&primaries[device], primary, __ATOMIC_RELAXED);
    return cudaSuccess;
}

/* The first call of those that need a device. Makes its primary context current; -1: the current one stays. *before:
   for leave(). */
static cudaError_t enter(int device, previous *before)
{
    cudaError_t last = cudaPeekAtLastError(), error;
    memset(before, 0, sizeof *before);
    error = quiet(last, cudaGetDevice(&before->device));
    own[0] = 0;
    if (error == cudaSuccess && device >= 0) error = make_current(device, before);
    if (error == cudaSuccess || error == cudaErrorCudartUnloading) return error;
    return says(error, "the device cannot be made current");
}

static cudaError_t go_back(const previous *before, cudaError_t last)
{
    cudaError_t code;
    if (!before->context) return quiet(last, cudaSetDevice(before->device));
    code = set_current_context(before->context);
    if (code == cudaErrorContextIsDestroyed || code == cudaErrorDeviceUninitialized)
        code = set_current_context(NULL); /* it has ended meanwhile */
    return code;
}

/* A thread that had no context gets its device back. A call that failed changed nothing, so it is made again. Returns
   `error`, that of the call, or the one of going back. */
static cudaError_t leave(const previous *before, cudaError_t error)
{
    cudaError_t last = cudaPeekAtLastError(), failed;
    if (!before->is_left || go_back(before, last) == cudaSuccess) return error;
    failed = go_back(before, last);
    if (error != cudaSuccess || failed == cudaSuccess) return error;
    return says(failed, "the context of the thread cannot be made current again");
}

static cudaError_t device_of_current(int *device)
{
    static void *found;
    CUresult(CUDAAPI *get_device)(CUdevice *);
    find_in_driver("cuCtxGetDevice", &found, &get_device);
    return get_device ? (cudaError_t)get_device(device) : cudaErrorSymbolNotFound;
}

/* The device of a stream; the current one for a default stream, and where CUDA does not say: the call that comes next
   says why. */
GALLOC_API int galloc_python_device(size_t stream)
{
    static void *found;
    CUresult(CUDAAPI *context_of)(CUstream, CUcontext *);
    CUcontext context = NULL, before = NULL;
    cudaError_t last = cudaPeekAtLastError();
    int device = 0;
    if (quiet(last, cudaGetDevice(&device)) != cudaSuccess) return 0;
    if (stream <= 2) return device;
    (void)quiet(last, cudaSetDevice(device)); /* a thread without a context gets one, as by any call of the runtime */
    if (current_context(&before) != cudaSuccess) return device;
    find_in_driver("cuStreamGetCtx", &found, &context_of);
    if (!context_of || context_of((CUstream)stream, &context) != CUDA_SUCCESS || context == before) return device;
    if (set_current_context(context) == cudaSuccess) {
        (void)device_of_current(&device);
        if (set_current_context(before) != cudaSuccess) (void)set_current_context(before);
    }
    return device;
}

/* ---- several devices --------------------------------------------------------------------------------------------- */

/* Mapped pages are accessible to their own device only, but packages copy between devices as if each could reach the
   other's memory. So from the second device on, all pages become accessible to each device that has a pool here and can
   be a peer. */

typedef struct known_pool {
    struct known_pool *next;
    galloc_pool *pool;
    int device;
} known_pool;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static known_pool *known_pools;
static uint64_t used;               /* devices that have had a pool, as a bit mask */
static uint64_t peers[MAX_DEVICES]; /* devices that may use the memory of each. Read without the lock, too */

typedef CUresult(CUDAAPI *set_access_function)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);

static void say_no_access(int device, int user)
{
    static int said;
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        (void)fprintf(stderr,
                      "galloc_python: device %d gets no access to some memory of device %d. With "
                      "GALLOC_CONF=expandable_segments:False CUDA gives the access\n",
                      user, device);
}

/* on_map of a pool whose device has peers; `user` is its element of `peers`. */
static void give_access(galloc_pool *pool, void *addr, size_t bytes, void *user)
{
    uint64_t mask = __atomic_load_n((uint64_t *)user, __ATOMIC_ACQUIRE);
    static void *found;
    set_access_function set_access;
    CUmemAccessDesc access;
    int i;
    (void)pool;
    find_in_driver("cuMemSetAccess", &found, &set_access);
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (i = 0; i < MAX_DEVICES; i++) {
        access.location.id = i;
        if (mask >> i & 1 && (!set_access || set_access((CUdeviceptr)(uintptr_t)addr, bytes, &access, 1)))
            say_no_access((int)((uint64_t *)user - peers), i);
    }
}

/* Lets the pool tell give_access of all pages, present and new. Memory of cudaMalloc follows the peer access that the
   program enables. [lock] */
static void share(const known_pool *known)
{
    galloc_config config;
    galloc_callbacks callbacks;
    if (!peers[known->device] || galloc_pool_config(known->pool, &config) || !config.expandable_segments) return;
    memset(&callbacks, 0, sizeof callbacks);
    callbacks.on_map = give_access;
    callbacks.user = &peers[known->device];
    if (galloc_pool_set_callbacks(known->pool, &callbacks) != cudaSuccess)
        say_no_access(known->device, __builtin_ctzll(peers[known->device]));
}

static void add_peer(int device, int peer)
{
    cudaError_t last = cudaPeekAtLastError();
    int can = 0;
    if (quiet(last, cudaDeviceCanAccessPeer(&can, peer, device)) != cudaSuccess) say_no_access(device, peer);
    else if (can) __atomic_fetch_or(&peers[device], (uint64_t)1 << peer, __ATOMIC_RELEASE);
}

/* Takes note of a pool. With the first one of a device, that device and the others become peers. [lock] */
static void know_pool(known_pool *added)
{
    const known_pool *known;
    int is_first = !(used >> added->device & 1), i;
    for (i = 0; i < MAX_DEVICES && is_first; i++) {
        if (!(used >> i & 1)) continue;
        add_peer(i, added->device);
        add_peer(added->device, i);
    }
    used |= (uint64_t)1 << added->device;
    added->next = known_pools;
    known_pools = added;
    for (known = added; known; known = is_first ? known->next : NULL) share(known);
}

/* conf: the settings of a new pool. NULL: the device's default pool, whose settings are those of GALLOC_CONF. */
static cudaError_t make_pool(galloc_pool **pool, const char *conf, int device)
{
    galloc_config config = galloc_config_default();
    cudaError_t error;
    if (!conf) return galloc_pool_default(pool, device);
    config.device = device;
    error = galloc_config_parse(&config, conf, NULL, 0);
    return error == cudaSuccess ? galloc_pool_create(pool, &config) : error;
}

GALLOC_API cudaError_t galloc_python_pool(galloc_pool **pool, const char *conf, int device)
{
    known_pool *known = (known_pool *)malloc(sizeof *known);
    cudaError_t error;
    own[0] = 0;
    *pool = NULL;
    if (!known) return says(cudaErrorMemoryAllocation, "no host memory for a pool");
    error = make_pool(pool, conf, device);
    if (error != cudaSuccess || device >= MAX_DEVICES) return free(known), error;
    known->pool = *pool;
    known->device = device;
    (void)pthread_mutex_lock(&lock);
    know_pool(known);
    (void)pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

GALLOC_API cudaError_t galloc_python_pool_destroy(galloc_pool *pool)
{
    known_pool **at = &known_pools, *known;
    cudaError_t error;
    own[0] = 0;
    error = galloc_pool_destroy(pool);
    if (error != cudaSuccess) return error;
    (void)pthread_mutex_lock(&lock);
    while ((known = *at) != NULL) {
        if (known->pool == pool) *at = known->next, free(known);
        else at = &known->next;
    }
    (void)pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Python frees a block in any thread, and there the per-thread default stream is another one than where the block was
   allocated, whose work the free does not know. So the tag of such a block is the number of its thread. */
static uint32_t thread_of(size_t stream)
{
    static uint32_t threads;
    static __thread uint32_t number;
    if (stream != (uintptr_t)cudaStreamPerThread) return 0;
    if (!number) number = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return number;
}

static int is_of_another_thread(const void *ptr, size_t stream)
{
    galloc_pointer block;
    uint32_t thread = thread_of(stream);
    return thread && galloc_pointer_info(ptr, &block) == cudaSuccess && block.tag && block.tag != thread;
}

GALLOC_API cudaError_t galloc_python_malloc(galloc_pool *pool, void **ptr, size_t bytes, size_t stream, int device)
{
    previous before;
    cudaError_t error = enter(device, &before), left;
    *ptr = NULL;
    if (error == cudaSuccess) {
        galloc_request request;
        memset(&request, 0, sizeof request);
        request.bytes = bytes;
        request.stream = (cudaStream_t)stream;
        request.pool = pool;
        request.tag = thread_of(stream);
        error = galloc_alloc(ptr, &request);
    }
    left = leave(&before, error);
    if (left != error) {
        (void)galloc_free(*ptr, (cudaStream_t)stream); /* the device is still current */
        *ptr = NULL;
    }
    return left;
}

/* Waits for all work of the current context. Unlike cudaDeviceSynchronize, freeing pinned memory harms no capture. */
static cudaError_t wait_beside_captures(void)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    void *fence = NULL;
    cudaError_t last = cudaPeekAtLastError(), error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess) {
        error = cudaHostAlloc(&fence, 512, cudaHostAllocDefault);
        if (error == cudaSuccess) error = cudaFreeHost(fence);
        (void)cudaThreadExchangeStreamCaptureMode(&mode);
    }
    return quiet(last, error);
}

/* After enter(). A context of the caller's own on that device is waited for, too. */
static cudaError_t wait_for_device(int device, const previous *before)
{
    CUcontext primary = NULL;
    cudaError_t error = wait_beside_captures(), back;
    if (error == cudaSuccess) error = current_context(&primary);
    if (error == cudaSuccess && before->context && before->context != primary && before->device == device) {
        error = set_current_context(before->context);
        if (error == cudaSuccess) error = wait_beside_captures();
        back = set_current_context(primary);
        if (error == cudaSuccess) error = back;
    }
    return error == cudaSuccess ? cudaSuccess : says(error, "waiting for the device");
}

/* The device of a block; -1: the address is that of no block. */
static int device_of(const void *ptr)
{
    galloc_pointer block;
    return galloc_pointer_info(ptr, &block) == cudaSuccess && block.state == GALLOC_STATE_USED ? block.device : -1;
}

/* *is_free: the block is free, also after an error of going back. */
static cudaError_t free_now(void *ptr, size_t stream, int device, int wait, int *is_free)
{
    cudaError_t error;
    previous before;
    *is_free = 0;
    if (device < 0 && (wait || stream <= (size_t)cudaStreamPerThread)) device = device_of(ptr);
    error = enter(device, &before);
    if (error == cudaErrorCudartUnloading) return cudaSuccess; /* the process ends, and the driver is gone */
    if (error == cudaSuccess && (wait || is_of_another_thread(ptr, stream))) error = wait_for_device(device, &before);
    if (error == cudaSuccess) error = galloc_free(ptr, (cudaStream_t)stream);
    *is_free = error == cudaSuccess;
    return leave(&before, error);
}

/* Python reads the handle of a stream and then calls a function here that frees. Meanwhile another thread may close the
   stream, and so may a finaliser or a signal handler in the same one. So the caller passes `since`, the number of
   retirements before it read the handle, or before the memory was allocated. A free whose stream was retired after
   that does not use the handle: it waits for the device. A free holds this lock, for which galloc_python_retire waits;
   none that waits for the device does. */
static pthread_mutex_t closing = PTHREAD_MUTEX_INITIALIZER;
static size_t retirements;
static void *retired; /* the retired handles, a tree of tsearch() */

typedef struct retirement {
    size_t stream;
    size_t number; /* the last one of this handle; the first is 1 */
} retirement;

static int compare_streams(const void *a, const void *b)
{
    size_t one = ((const retirement *)a)->stream, other = ((const retirement *)b)->stream;
    return (one > other) - (one < other);
}

/* The thread that had the lock does not exist in the child, where no memory can be freed. */
static void renew_closing(void)
{
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    memcpy(&closing, &fresh, sizeof fresh);
    retired = NULL;
}

__attribute__((constructor)) static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, renew_closing); }

GALLOC_API size_t galloc_python_retirements(void) { return __atomic_load_n(&retirements, __ATOMIC_ACQUIRE); }

/* Notes that a handle ends. 0: no host memory. [closing] */
static int note_retirement(size_t stream)
{
    retirement key = {stream, 0}, *made, **found = (retirement **)tfind(&key, &retired, compare_streams);
    if (!found) {
        made = (retirement *)malloc(sizeof *made);
        if (made) *made = key;
        found = made ? (retirement **)tsearch(made, &retired, compare_streams) : NULL;
        if (!found) free(made);
    }
    if (found) (*found)->number = retirements + 1;
    if (found) __atomic_store_n(&retirements, retirements + 1, __ATOMIC_RELEASE);
    return found != NULL;
}

/* galloc_stream_retire, after the frees that use the handle. Default streams exist on. */
GALLOC_API cudaError_t galloc_python_retire(size_t stream)
{
    int noted = 1;
    own[0] = 0;
    if (stream > (size_t)cudaStreamPerThread) {
        (void)pthread_mutex_lock(&closing);
        noted = note_retirement(stream);
        (void)pthread_mutex_unlock(&closing);
    }
    return noted ? galloc_stream_retire((cudaStream_t)stream) :
        says(cudaErrorMemoryAllocation, "no host memory to note that a stream ends");
}

/* Takes the lock if the stream has not been retired. */
static int use_stream(size_t stream, size_t since)
{
    retirement key = {stream, 0}, **found;
    (void)pthread_mutex_lock(&closing);
    found = (retirement **)tfind(&key, &retired, compare_streams);
    if (!found || (*found)->number <= since) return 1;
    (void)pthread_mutex_unlock(&closing);
    return 0;
}

static cudaError_t free_block(void *ptr, size_t stream, int device, int wait, size_t since, int *is_free)
{
    cudaError_t error;
    int may_close = !wait && stream > (size_t)cudaStreamPerThread;
    if (may_close && !use_stream(stream, since)) return free_now(ptr, 0, device, 1, is_free);
    error = free_now(ptr, stream, device, wait, is_free);
    if (may_close) (void)pthread_mutex_unlock(&closing);
    return error;
}

/* device: its default streams are meant; -1: those of the block's device.
   wait: all work of the device is waited for before, as cudaFree does. since: see `closing`. */
GALLOC_API cudaError_t galloc_python_free(void *ptr, size_t stream, int device, int wait, size_t since)
{
    int is_free;
    return free_block(ptr, stream, device, wait, since, &is_free);
}

/* For finalisers, of which Python reports no error: a free that fails is tried again, and then the log has a line:
   here about an error that galloc did not find, but for one in a child of fork, where no block can be freed. It may
   come between another call and the question for its message, so that call keeps its words, of whoever they are. */
GALLOC_API cudaError_t galloc_python_drop(void *ptr, size_t stream, int device, int wait, size_t since)
{
    char words[sizeof own];
    int is_free;
    cudaError_t error;
    (void)snprintf(words, sizeof words, "%s", galloc_python_message());
    error = free_block(ptr, stream, device, wait, since, &is_free);
    if (error != cudaSuccess && !is_free) error = free_block(ptr, stream, device, wait, since, &is_free);
    if (error != cudaSuccess && error != cudaErrorInitializationError && own[0])
        (void)fprintf(stderr, "%s; the block at %p %s\n", own, ptr, is_free ? "is free" : "stays in use");
    memcpy(own, words, sizeof own);
    return error;
}

/* The same for the address in *place, which is NULL afterwards: Python may be interrupted right after each call. Of
   several calls one frees. If the first one does not free the block, it leaves the address there. */
GALLOC_API cudaError_t galloc_python_free_at(void **place, size_t stream, int device, int wait, size_t since)
{
    void *ptr = __atomic_exchange_n(place, NULL, __ATOMIC_ACQ_REL);
    int is_free = 0;
    cudaError_t error = ptr ? free_block(ptr, stream, device, wait, since, &is_free) : cudaSuccess;
    if (error != cudaSuccess && !is_free) __atomic_store_n(place, ptr, __ATOMIC_RELEASE);
    return error;
}

GALLOC_API cudaError_t galloc_python_drop_at(void **place, size_t stream, int device, int wait, size_t since)
{
    void *ptr = __atomic_exchange_n(place, NULL, __ATOMIC_ACQ_REL);
    return ptr ? galloc_python_drop(ptr, stream, device, wait, since) : cudaSuccess;
}

/* device: the block's. Its default streams are meant. */
GALLOC_API cudaError_t galloc_python_record_stream(void *ptr, size_t stream, int device)
{
    previous before;
    cudaError_t error = enter(device, &before);
    if (error == cudaSuccess) error = galloc_record_stream(ptr, (cudaStream_t)stream);
    return leave(&before, error);
}

/* The text of a snapshot, and the room that it has. */
typedef struct snapshot_text {
    char *at;
    size_t used, room;
} snapshot_text;

static int append(void *user, const void *data, size_t bytes)
{
    snapshot_text *text = (snapshot_text *)user;
    if (text->room - text->used < bytes) {
        size_t room = 2 * (text->room + bytes);
        char *more = (char *)realloc(text->at, room);
        if (!more) return 1;
        text->at = more;
        text->room = room;
    }
    memcpy(text->at + text->used, data, bytes);
    text->used += bytes;
    return 0;
}

/* pool: NULL: all. *text: to be given to galloc_python_forget; NULL after a failure. */
GALLOC_API cudaError_t galloc_python_snapshot(galloc_pool *pool, char **text, size_t *bytes)
{
    snapshot_text written = {NULL, 0, 0};
    cudaError_t error;
    own[0] = 0;
    error = galloc_snapshot(pool, GALLOC_SNAPSHOT_JSON, append, &written);
    if (error != cudaSuccess) free(written.at);
    *text = error == cudaSuccess ? written.at : NULL;
    *bytes = written.used;
    return error;
}

GALLOC_API void galloc_python_forget(char *text) { free(text); }

/* Bytes live, their peak, bytes held, their peak. */
GALLOC_API cudaError_t galloc_python_memory(galloc_pool *pool, size_t numbers[4])
{
    galloc_stats stats;
    cudaError_t error;
    own[0] = 0;
    error = galloc_pool_stats(pool, &stats);
    memset(numbers, 0, 4 * sizeof *numbers);
    if (error != cudaSuccess) return error;
    numbers[0] = stats.live.current;
    numbers[1] = stats.live.peak;
    numbers[2] = stats.reserved.current;
    numbers[3] = stats.reserved.peak;
    return cudaSuccess;
}
