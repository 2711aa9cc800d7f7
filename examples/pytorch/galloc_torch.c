/* galloc_torch.c - galloc as PyTorch's CUDA allocator: the hooks of torch.cuda.memory.CUDAPluggableAllocator, in C.

   Build:  gcc -O2 -fPIC -shared -fexceptions -I<galloc> -I<cuda>/include galloc_torch.c -o libgalloc_torch.so -lcudart
   Use:    import galloc_torch; galloc_torch.install()     (galloc_torch.py; README.md beside this file has the rest)

   PyTorch passes the stream that a tensor was allocated for to each free, and other streams to record_stream. galloc
   reuses memory in stream order by the same rule, so that each hook is one call of galloc. Three things need more:

   - Out of memory. PyTorch does not look whether an allocation hook returned NULL. So galloc_hook_malloc throws
     PyTorch's own exception: torch.OutOfMemoryError with galloc's report as its text. This file is C; it makes the C++
     exception with the functions that PyTorch and the C++ library export (throw_error). Where they are not found, the
     exception is std::bad_alloc, which Python sees as RuntimeError.
   - Graphs that share a pool (torch.cuda.graph(g, pool=...)). PyTorch names the pool before it captures its current
     stream (current_stream). The first allocation in the capture puts it into the pool's galloc_graph.
   - Several devices in one process. Mapped pages are accessible to their own device only, but PyTorch copies between
     devices as if each could reach the other's memory, and its kernels write to a peer's. So each device's pages become
     accessible to all other devices with a pool here that can be its peers (share_with).

   Threads: as galloc, any hook on any thread. No hook waits for the device, except galloc_hook_reset
   (torch.cuda.empty_cache) and an allocation that memory has run out for. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_NOLOAD */
#endif
#define GALLOC_STATIC /* a heap of its own, and no names that another library could have */
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>

#define HOOK __attribute__((visibility("default")))
#define MAX_DEVICES 64

/* ---- PyTorch's exceptions, from C -------------------------------------------------------------------------------- */

/* c10::SourceLocation, and std::string as libstdc++ has had it since its version 5. */
typedef struct source_location {
    const char *function, *file;
    uint32_t line;
} source_location;

typedef struct cxx_string {
    char *data;
    size_t size;
    char local[16];
} cxx_string;

/* Functions of the C++ library, and what makes a c10::Error and a c10::OutOfMemoryError, which derives from it. */
typedef struct cxx {
    void *(*allocate)(size_t bytes);                                         /* __cxa_allocate_exception */
    void (*raise)(void *exception, void *type, void (*destroy)(void *));     /* __cxa_throw */
    void *(*make)(size_t bytes);                                             /* operator new */
    void (*construct)(void *error, source_location where, cxx_string *text); /* c10::Error::Error */
    void *error, *out_of_memory;                                             /* typeid */
    void **error_table, **out_of_memory_table;                               /* tables of virtual functions */
} cxx;

#define ERROR_BYTES 4096 /* more than a c10::Error needs: less than 300 in 2.0 to 2.15 */

/* Reads the address of a symbol into a pointer to a function or an object: the one that the library itself uses. A
   program or a preloaded library can have an operator new of its own, and then its operator delete frees the text. */
static int find(void *library, const char *name, void *pointer)
{
    void *symbol = dlsym(RTLD_DEFAULT, name);
    if (!symbol) symbol = dlsym(library, name);
    memcpy(pointer, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int cxx_find(cxx *to)
{
    void *c10 = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return c10 && find(c10, "__cxa_allocate_exception", &to->allocate) && find(c10, "__cxa_throw", &to->raise) &&
        find(c10, "_Znwm", &to->make) && find(c10, "_ZTIN3c105ErrorE", &to->error) &&
        find(c10, "_ZTVN3c105ErrorE", &to->error_table) &&
        find(c10, "_ZTIN3c1016OutOfMemoryErrorE", &to->out_of_memory) &&
        find(c10, "_ZTVN3c1016OutOfMemoryErrorE", &to->out_of_memory_table) &&
        find(c10, "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
             &to->construct);
}

/* Throws c10::OutOfMemoryError(text), or c10::Error(text): torch.OutOfMemoryError and RuntimeError in Python. Does not
   return. */
static void throw_error(const char *text, int out_of_memory)
{
    cxx c;
    if (cxx_find(&c)) {
        static const source_location where = { "galloc", "galloc_torch.c", 0 };
        size_t bytes = strlen(text);
        void **error = c.allocate(ERROR_BYTES), **table = out_of_memory ? c.out_of_memory_table : c.error_table;
        cxx_string string;
        memset(error, 0, ERROR_BYTES);
        string.data = c.make(bytes + 1); /* the error takes it over */
        string.size = bytes;
        memcpy(string.data, text, bytes + 1);
        memcpy(string.local, &bytes, sizeof bytes); /* where a string that is not in `local` has its capacity */
        c.construct(error, where, &string);
        error[0] = table + 2; /* a table begins with an offset and the type; then comes the destructor */
        c.raise(error, out_of_memory ? c.out_of_memory : c.error, (void (*)(void *))table[2]);
    } else {
        void (*bad_alloc)(void);
        (void)fprintf(stderr, "galloc_torch: %s\n", text);
        if (find(RTLD_DEFAULT, "_ZSt17__throw_bad_allocv", &bad_alloc)) bad_alloc();
        abort(); /* no C++ library: PyTorch cannot be the caller */
    }
}

/* c10::cuda::CUDAStream, as its functions return it since PyTorch 2.0: a device and a number. */
typedef struct torch_stream {
    int64_t device, id;
} torch_stream;

/* The calling thread's current stream of a device: the one that PyTorch captures. NULL: a default stream, or PyTorch's
   functions are not found. */
static cudaStream_t current_stream(int device)
{
    torch_stream (*current)(signed char);
    cudaStream_t (*handle)(const torch_stream *);
    torch_stream stream;
    void *c10 = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!c10 || !find(c10, "_ZN3c104cuda20getCurrentCUDAStreamEa", &current) ||
        !find(c10, "_ZNK3c104cuda10CUDAStream6streamEv", &handle)) return NULL;
    stream = current((signed char)device);
    return handle(&stream);
}

/* Appends a text like printf; what does not fit is left out. */
static void append(char *text, size_t size, const char *format, ...)
{
    size_t length = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    if (length < size) (void)vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

/* Appends a number of bytes as PyTorch writes it. */
static void append_size(char *text, size_t size, size_t bytes)
{
    if (bytes <= 1 << 10) append(text, size, "%zu bytes", bytes);
    else if (bytes <= 1 << 20) append(text, size, "%.2f KiB", (double)bytes / (1 << 10));
    else if (bytes <= 1 << 30) append(text, size, "%.2f MiB", (double)bytes / (1 << 20));
    else append(text, size, "%.2f GiB", (double)bytes / (1 << 30));
}

/* A call of the runtime leaves no error behind, unless one was there before. */
static cudaError_t quiet(cudaError_t before, cudaError_t error)
{
    if (error != cudaSuccess && before == cudaSuccess) (void)cudaGetLastError();
    return error;
}

/* ---- the current context ----------------------------------------------------------------------------------------- */

/* Reads a function of the driver into a pointer to it; NULL: the driver does not have it. *found keeps the address.
   Several threads may call it at once. */
static void find_in_driver(const char *name, void **found, void *function)
{
    void *symbol = __atomic_load_n(found, __ATOMIC_RELAXED);
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (!symbol) {
        cudaError_t before = cudaPeekAtLastError(), err;
#if CUDART_VERSION >= 12050
        err = cudaGetDriverEntryPointByVersion(name, &symbol, 12000, cudaEnableDefault, &result);
#else
        err = cudaGetDriverEntryPoint(name, &symbol, cudaEnableDefault, &result);
#endif
        (void)quiet(before, err);
        if (result != cudaDriverEntryPointSuccess) symbol = NULL;
        __atomic_store_n(found, symbol, __ATOMIC_RELAXED);
    }
    memcpy(function, &symbol, sizeof symbol);
}

/* NULL: the thread has none, as before the first call of CUDA. */
static cudaError_t current_context(CUcontext *context)
{
    static void *found;
    CUresult (CUDAAPI *get_current)(CUcontext *);
    CUresult result;
    find_in_driver("cuCtxGetCurrent", &found, &get_current);
    *context = NULL;
    result = get_current ? get_current(context) : CUDA_ERROR_NOT_FOUND;
    return result == CUDA_ERROR_NOT_INITIALIZED ? cudaSuccess : (cudaError_t)result;
}

static cudaError_t set_current_context(CUcontext context)
{
    static void *found;
    CUresult (CUDAAPI *set_current)(CUcontext);
    find_in_driver("cuCtxSetCurrent", &found, &set_current);
    return set_current ? (cudaError_t)set_current(context) : cudaErrorSymbolNotFound;
}

/* What was current before a hook. */
typedef struct previous {
    CUcontext context; /* NULL: none */
    int device;
    int is_left;
} previous;

static CUcontext primaries[MAX_DEVICES]; /* by device, as last seen; NULL: not seen. Any thread reads and writes them */

/* Makes the primary context of a device current. cudaDeviceReset may have replaced the one that was seen. *before: for
   leave(). */
static cudaError_t enter(int device, previous *before)
{
    CUcontext primary = NULL;
    cudaError_t error, err = current_context(&before->context);
    before->is_left = 0;
    if (err != cudaSuccess) return err;
    if (before->context && before->context == __atomic_load_n(&primaries[device], __ATOMIC_RELAXED)) return cudaSuccess;
    error = cudaPeekAtLastError();
    err = quiet(error, cudaGetDevice(&before->device));
    if (err == cudaSuccess) err = quiet(error, cudaSetDevice(device));
    if (err != cudaSuccess) return err;
    before->is_left = 1;
    (void)current_context(&primary);
    __atomic_store_n(&primaries[device], primary, __ATOMIC_RELAXED);
    return cudaSuccess;
}

static cudaError_t go_back(const previous *before)
{
    cudaError_t error = cudaPeekAtLastError();
    cudaError_t code;
    if (!before->context) return quiet(error, cudaSetDevice(before->device));
    code = set_current_context(before->context);
    if (code == cudaErrorContextIsDestroyed || code == cudaErrorDeviceUninitialized)
        code = set_current_context(NULL); /* it has ended meanwhile */
    return code;
}

/* A thread that had no context gets its device back. A call that failed changed nothing, so it is made again. */
static cudaError_t leave(const previous *before)
{
    if (!before->is_left || go_back(before) == cudaSuccess) return cudaSuccess;
    return go_back(before);
}

/* The same where no error can be returned. */
static void leave_and_log(const previous *before)
{
    cudaError_t err = leave(before);
    if (err == cudaSuccess || err == cudaErrorCudartUnloading) return;
    (void)fprintf(stderr, "galloc_torch: the context of the thread cannot be made current again: %s\n",
                  cudaGetErrorString(err));
}

/* ---- the words of a failure -------------------------------------------------------------------------------------- */

/* Of the current device. It leaves no error in the runtime. */
static cudaError_t memory_info(size_t *left, size_t *total)
{
    cudaError_t before = cudaPeekAtLastError();
    return quiet(before, cudaMemGetInfo(left, total));
}

/* The first words of PyTorch's own text, which programs search for. */
static void append_out_of_memory(char *text, size_t size, size_t bytes, int device)
{
    size_t left, total;
    previous before;
    (void)enter(device, &before);
    append(text, size, "CUDA out of memory. Tried to allocate ");
    if (bytes >> 60) append(text, size, "more than 1EB memory");
    else append_size(text, size, bytes);
    append(text, size, ". GPU %d", device);
    if (memory_info(&left, &total) == cudaSuccess) {
        append(text, size, " has a total capacity of ");
        append_size(text, size, total);
        append(text, size, " of which ");
        append_size(text, size, left);
        append(text, size, " is free");
    }
    append(text, size, ". ");
    leave_and_log(&before);
}

/* A hook has failed: throws. words: about an error that galloc did not find; NULL: galloc's last message has them. */
static void throw_failure(cudaError_t err, const char *words, size_t bytes, int device)
{
    char text[GALLOC_REPORT_TEXT + 1024] = "";
    galloc_report report;
    const char *message = words ? words : galloc_last_message();
    if (err != cudaErrorMemoryAllocation) {
        append(text, sizeof text, "CUDA error: %s. %s", cudaGetErrorString(err), message);
        throw_error(text, 0);
    } else {
        append_out_of_memory(text, 1024, bytes, device);
        append(text, 1024, "%s\n", message);
        if (galloc_oom_report(&report) == cudaSuccess)
            (void)galloc_report_text(&report, text + strlen(text), GALLOC_REPORT_TEXT);
        throw_error(text, 1);
    }
}

/* ---- pools ------------------------------------------------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static galloc_pool *pools[MAX_DEVICES];                  /* by device; NULL: not used yet. Read without the lock */

/* Tensors end in a child of fork, too. Another thread may have held the lock, so the child gets a new one. What it
   guards is of use at any moment. */
static void forked_child(void) { lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; }

__attribute__((constructor)) static void watch_forks(void) { (void)pthread_atfork(NULL, NULL, forked_child); }

/* Pages of 2 MiB, unless GALLOC_CONF names `growth`. Tensors of a program that runs for minutes repay the driver calls
   of its first steps: README.md beside this file has the figures. */
static int wants_small_pages(const galloc_config *config)
{
    const char *text = getenv("GALLOC_CONF"), *at = text;
    if (config->like != GALLOC_LIKE_GALLOC || config->strategy != GALLOC_STRATEGY_CACHING || config->growth) return 0;
    for (; at && (at = strstr(at, "growth")) != NULL; at++)
        if ((at == text || at[-1] == ',' || at[-1] == ' ') && strspn(at + 6, ":_ ")) return 0; /* a key, not a value */
    return 1;
}

/* Makes the pool of a device, with the settings of its default pool. */
static cudaError_t make_pool(galloc_pool **pool, int device)
{
    galloc_config config = galloc_config_default();
    cudaError_t err = galloc_pool_default(pool, device);
    if (err == cudaSuccess) err = galloc_pool_config(*pool, &config);
    if (err != cudaSuccess || !wants_small_pages(&config)) return err;
    config.growth = (size_t)2 << 20;
    return galloc_pool_create(pool, &config);
}

/* Devices that may use the memory of the device, as a bit mask. Written with the lock, read without it. */
static uint64_t peers[MAX_DEVICES];

static void say_no_access(int device, int user)
{
    static int said;
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        (void)fprintf(stderr,
                      "galloc_torch: device %d gets no access to some memory of device %d. With "
                      "GALLOC_CONF=expandable_segments:False CUDA gives the access\n",
                      user, device);
}

typedef CUresult (CUDAAPI *set_access_function)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);

/* on_map of a pool whose device has peers; `user` is its element of `peers`. A failure does not touch the allocation:
   its own device can use the memory. */
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

/* Adds a peer of the device, and lets the pool tell give_access of all pages, present and new. Memory of cudaMalloc
   follows the peer access that PyTorch enables. [lock] */
static void add_peer(int device, galloc_pool *pool, int peer)
{
    galloc_config config = galloc_config_default();
    galloc_callbacks callbacks;
    cudaError_t before = cudaPeekAtLastError();
    int can = 0;
    if (quiet(before, cudaDeviceCanAccessPeer(&can, peer, device)) != cudaSuccess) {
        say_no_access(device, peer);
        return;
    }
    if (!can || galloc_pool_config(pool, &config) != cudaSuccess || !config.expandable_segments) return;
    __atomic_store_n(&peers[device], peers[device] | (uint64_t)1 << peer, __ATOMIC_RELEASE);
    memset(&callbacks, 0, sizeof callbacks);
    callbacks.on_map = give_access;
    callbacks.user = &peers[device];
    if (galloc_pool_set_callbacks(pool, &callbacks) != cudaSuccess) say_no_access(device, peer);
}

/* The device gets its pool: it and each device that has one become peers. [lock] */
static void share_with(int device, galloc_pool *pool)
{
    int i;
    for (i = 0; i < MAX_DEVICES; i++) {
        if (!pools[i] || i == device) continue;
        add_peer(i, pools[i], device);
        add_peer(device, pool, i);
    }
}

/* The pool of a device. NULL, with an error: GALLOC_CONF is wrong, or the device is. *words: for throw_failure. */
static galloc_pool *pool_of(int device, cudaError_t *err, const char **words)
{
    galloc_pool *pool = NULL;
    *err = cudaErrorInvalidDevice;
    *words = "";
    if (device < 0 || device >= MAX_DEVICES) return NULL;
    pool = __atomic_load_n(&pools[device], __ATOMIC_ACQUIRE);
    *err = cudaSuccess;
    *words = NULL;
    if (pool) return pool;
    (void)pthread_mutex_lock(&lock);
    pool = pools[device];
    if (!pool) {
        *err = make_pool(&pool, device);
        if (*err == cudaSuccess) share_with(device, pool);
        if (*err == cudaSuccess) __atomic_store_n(&pools[device], pool, __ATOMIC_RELEASE);
        else pool = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    return pool;
}

static const char not_current[] = "The device cannot be made current."; /* words about an error of enter */
static const char not_back[] = "The context of the thread cannot be made current again."; /* of leave */

static int is_default(cudaStream_t stream) { return (uintptr_t)stream <= 2; }

/* A default stream is that of the current context. So the primary one becomes current if the stream is one. When the
   process ends and the runtime is gone, galloc knows what to do. It refuses a child of fork, and its log folds the
   lines. Logs another error. */
static cudaError_t enter_for(cudaStream_t stream, int device, previous *before)
{
    cudaError_t err;
    memset(before, 0, sizeof *before);
    err = is_default(stream) ? enter(device, before) : cudaSuccess;
    if (err == cudaSuccess || err == cudaErrorCudartUnloading || err == cudaErrorInitializationError)
        return cudaSuccess;
    (void)fprintf(stderr, "galloc_torch: device %d cannot be made current: %s\n", device, cudaGetErrorString(err));
    return err;
}

/* ---- graphs that share memory ------------------------------------------------------------------------------------ */

/* PyTorch's name of a memory pool: MempoolId_t, a std::pair. */
typedef struct pool_id {
    unsigned long long first, second;
} pool_id;

/* The captures into one pool of PyTorch share memory. */
typedef struct group {
    struct group *next;
    pool_id id;
    int device;
    galloc_graph *graph;    /* NULL: no capture has allocated yet */
    struct capture *joined; /* the capture that galloc_graph_begin was called for and galloc_graph_end was not */
    int uses;               /* begins that PyTorch has not released */
} group;

/* A begin without an end. */
typedef struct capture {
    struct capture *next;
    group *group;
    unsigned long long key; /* 2.0 to 2.2 name it at the end, in place of the pool */
    unsigned long long id;  /* of the capture; 0: not known before the first allocation */
    cudaStream_t stream;    /* NULL: likewise */
} capture;

static group *groups;
static capture *captures; /* the last begin first */
static int open_captures; /* their number; read without the lock */

static group *group_find(int device, pool_id id)
{
    group *g = groups;
    while (g && (g->device != device || g->id.first != id.first || g->id.second != id.second)) g = g->next;
    return g;
}

/* Whether a stream is captured, and the number of its capture. */
static int is_captured(cudaStream_t stream, unsigned long long *id)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaPeekAtLastError();
#if CUDART_VERSION >= 13000
    cudaError_t err = cudaStreamGetCaptureInfo(stream, &status, id, NULL, NULL, NULL, NULL);
#elif CUDART_VERSION >= 12000
    cudaError_t err = cudaStreamGetCaptureInfo(stream, &status, id, NULL, NULL, NULL);
#else
    cudaError_t err = cudaStreamGetCaptureInfo(stream, &status, id);
#endif
    return quiet(error, err) == cudaSuccess && status == cudaStreamCaptureStatusActive;
}

/* [lock] */
static void capture_end(capture *c)
{
    capture **link = &captures;
    if (!c) return;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    (void)__atomic_sub_fetch(&open_captures, 1, __ATOMIC_RELAXED);
    if (c->group->joined == c) {
        (void)galloc_graph_end(c->group->graph);
        c->group->joined = NULL;
    }
    free(c);
}

/* Whether the capture that a group has begun with is over. */
static int has_ended(const capture *c)
{
    unsigned long long id;
    return c->group->joined == c && !(is_captured(c->stream, &id) && id == c->id);
}

/* Ends the captures that are over when another one begins, on `stream` if that is not NULL. PyTorch 2.3 and later do
   not name the end of a pool whose capture has failed. [lock] */
static void end_failed_captures(int device, const group *begins, cudaStream_t stream)
{
    capture *c, *next;
    for (c = captures; c; c = next) {
        next = c->next;
        if (c->group->device != device) continue;
        if (c->stream ? c->stream == stream : c->group == begins) capture_end(c);
    }
}

/* [lock] */
static group *group_get(int device, pool_id id)
{
    group *g = group_find(device, id);
    if (!g && (g = calloc(1, sizeof *g)) != NULL) {
        g->id = id;
        g->device = device;
        g->next = groups;
        groups = g;
    }
    return g;
}

/* A capture of the device belongs to this pool from now on: the one of `stream`, or the next one if that is NULL. A
   stream that is captured already is no new capture (torch.cuda.use_mem_pool). Without host memory each graph has
   memory of its own. */
static void group_begin(int device, pool_id id, unsigned long long key, cudaStream_t stream)
{
    group *g;
    unsigned long long other;
    capture *c = stream && is_captured(stream, &other) ? NULL : calloc(1, sizeof *c);
    (void)pthread_mutex_lock(&lock);
    g = group_get(device, id);
    if (c) end_failed_captures(device, g, stream);
    if (g) g->uses++;
    if (g && c) {
        c->group = g;
        c->key = key;
        c->stream = stream;
        c->next = captures;
        captures = c;
        c = NULL;
        (void)__atomic_add_fetch(&open_captures, 1, __ATOMIC_RELAXED);
    }
    (void)pthread_mutex_unlock(&lock);
    free(c);
}

/* Ends the capture of `stream` into a pool, or the last one into it whose stream is not known. stream: NULL: PyTorch's
   current stream is not known, so it is the last one. */
static void group_end_named(int device, pool_id id, cudaStream_t stream)
{
    capture *c, *ended = NULL;
    const group *g;
    (void)pthread_mutex_lock(&lock);
    g = group_find(device, id);
    for (c = captures; g && c; c = c->next) {
        if (c->group != g) continue;
        if (stream && c->stream == stream) ended = c;
        else if (!ended && !(stream && c->stream)) ended = c;
    }
    capture_end(ended);
    (void)pthread_mutex_unlock(&lock);
}

static void group_end_keyed(int device, unsigned long long key)
{
    capture *c;
    (void)pthread_mutex_lock(&lock);
    c = captures;
    while (c && (c->group->device != device || c->key != key)) c = c->next;
    capture_end(c);
    (void)pthread_mutex_unlock(&lock);
}

/* PyTorch will not use one of the captures again; it destroys the graph after this. The memory returns to the heap when
   all graphs of the group are gone and their launches done: PyTorch names no stream that is ordered after these. */
static void group_release(int device, pool_id id)
{
    group *g, **link = &groups;
    capture *c, *next;
    (void)pthread_mutex_lock(&lock);
    g = group_find(device, id);
    if (g && --g->uses <= 0) {
        for (c = captures; c; c = next) {
            next = c->next;
            if (c->group == g) capture_end(c);
        }
        if (g->graph) (void)galloc_graph_release(g->graph, GALLOC_NO_STREAM);
        while (*link != g) link = &(*link)->next;
        *link = g->next;
        free(g);
    }
    (void)pthread_mutex_unlock(&lock);
}

/* The begin that a stream's capture belongs to. Of begins without a known stream it is the last one, if all of them
   name one pool. The stream of an older begin is not asked: the program may have destroyed it after a failure.
   [lock] */
static capture *capture_of(int device, cudaStream_t stream, unsigned long long id)
{
    capture *c, *unknown = NULL;
    unsigned long long other = 0;
    int is_one_pool = 1, is_last = 1;
    for (c = captures; c; c = c->next) {
        if (c->group->device == device && c->id == id) return c;
    }
    for (c = captures; c; c = c->next) {
        if (c->group->device != device || c->id) continue;
        if (!c->stream) {
            if (!unknown) unknown = c;
            is_one_pool = is_one_pool && unknown->group == c->group;
        } else {
            if (c->stream == stream || (is_last && is_captured(c->stream, &other) && other == id)) return c;
            is_last = 0;
        }
    }
    return is_one_pool ? unknown : NULL;
}

/* The begin that the capture of a call's stream belongs to, or NULL. Ends the failed ones: otherwise later captures,
   into other pools or of the program itself, would share their memory. [lock] */
static capture *capture_now(int device, cudaStream_t stream)
{
    unsigned long long id = 0;
    capture *c, *next;
    if (!is_captured(stream, &id)) return NULL;
    for (c = captures; c; c = next) {
        next = c->next;
        if (c->group->device == device && has_ended(c)) capture_end(c);
    }
    c = capture_of(device, stream, id);
    if (c) c->id = id;
    return c;
}

/* Before an allocation: puts the capture of its stream into the pool that has begun on this device, if there is one. */
static void group_join(int device, galloc_pool *pool, cudaStream_t stream)
{
    capture *c;
    if (is_default(stream)) return; /* cannot be captured, or names another stream in each thread (per-thread) */
    (void)pthread_mutex_lock(&lock);
    c = capture_now(device, stream);
    if (c && !c->stream) c->stream = stream;
    if (c && !c->group->joined && galloc_graph_begin(&c->group->graph, pool, c->stream) == cudaSuccess)
        c->group->joined = c;
    (void)pthread_mutex_unlock(&lock);
}

/* Before a free or a recorded use: galloc settles the group of a capture at its first call in it. */
static void end_failed_before(int device, cudaStream_t stream)
{
    if (!__atomic_load_n(&open_captures, __ATOMIC_RELAXED) || is_default(stream)) return;
    (void)pthread_mutex_lock(&lock);
    (void)capture_now(device, stream);
    (void)pthread_mutex_unlock(&lock);
}

/* ---- blocks whose free has failed -------------------------------------------------------------------------------- */

/* The driver refused to say which stream it is. Tried again when memory runs out and by galloc_hook_reset. */
typedef struct unfreed {
    struct unfreed *next;
    void *ptr;
    cudaStream_t stream;
    int device;
} unfreed;

static unfreed *unfreed_blocks;

static void keep_unfreed(unfreed *u)
{
    (void)pthread_mutex_lock(&lock);
    u->next = unfreed_blocks;
    unfreed_blocks = u;
    (void)pthread_mutex_unlock(&lock);
}

/* ---- hooks ------------------------------------------------------------------------------------------------------- */

/* The per-thread default stream of another thread has no name here. So the tag of a block on such a stream is the
   number of its thread. */
static uint32_t thread_of(cudaStream_t stream)
{
    static uint32_t threads;
    static __thread uint32_t number;
    if (stream != cudaStreamPerThread) return 0;
    if (!number) number = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return number;
}

/* The stream to free a block on. The legacy stream comes after the per-thread default stream of any thread. */
static cudaStream_t stream_to_free_on(const void *ptr, cudaStream_t stream)
{
    galloc_pointer block;
    uint32_t thread = thread_of(stream);
    if (!thread || galloc_pointer_info(ptr, &block) != cudaSuccess) return stream;
    return block.tag && block.tag != thread ? cudaStreamLegacy : stream;
}

static cudaError_t allocate_tagged(void **p, size_t size, galloc_pool *pool, cudaStream_t stream)
{
    galloc_request request;
    memset(&request, 0, sizeof request);
    request.bytes = size;
    request.stream = stream;
    request.pool = pool;
    request.tag = thread_of(stream);
    return galloc_alloc(p, &request);
}

/* *words: about an error, for throw_failure. */
static cudaError_t allocate(void **p, size_t size, int device, cudaStream_t stream, const char **words)
{
    cudaError_t err, left;
    previous before;
    galloc_pool *pool = pool_of(device, &err, words);
    *p = NULL;
    if (!pool) return err;
    err = enter_for(stream, device, &before);
    if (err != cudaSuccess) return *words = not_current, err;
    if (__atomic_load_n(&open_captures, __ATOMIC_RELAXED)) group_join(device, pool, stream);
    if (stream == cudaStreamPerThread) err = allocate_tagged(p, size, pool, stream);
    else err = galloc_pool_malloc(pool, p, size, stream);
    left = leave(&before);
    if (err != cudaSuccess || left == cudaSuccess) return err;
    (void)galloc_free(*p, stream); /* the device is still current */
    *p = NULL;
    *words = not_back;
    return left;
}

static int release(void *ptr, int device, cudaStream_t stream)
{
    previous before;
    cudaError_t err = enter_for(stream, device, &before);
    if (err != cudaSuccess) return 0;
    end_failed_before(device, stream);
    err = galloc_free(ptr, stream_to_free_on(ptr, stream));
    leave_and_log(&before);
    /* another try would find nothing either, or could do nothing, in a child of fork */
    return err == cudaSuccess || err == cudaErrorInvalidDevicePointer || err == cudaErrorInitializationError;
}

/* Frees what could not be freed before. Returns whether it tried: then galloc's last message may be about that. */
static int release_again(void)
{
    unfreed *u, *list;
    int tried;
    (void)pthread_mutex_lock(&lock);
    list = unfreed_blocks;
    unfreed_blocks = NULL;
    (void)pthread_mutex_unlock(&lock);
    tried = list != NULL;
    while ((u = list) != NULL) {
        list = u->next;
        if (release(u->ptr, u->device, u->stream)) free(u);
        else keep_unfreed(u);
    }
    return tried;
}

/* Throws when it fails; NULL: with the error `returned`. */
static void *allocate_or_throw(size_t size, int device, cudaStream_t stream, cudaError_t returned)
{
    void *p;
    const char *words;
    cudaError_t err = allocate(&p, size, device, stream, &words);
    if (err == cudaErrorMemoryAllocation && release_again()) err = allocate(&p, size, device, stream, &words);
    if (err != cudaSuccess && err != returned) throw_failure(err, words, size, device);
    return p;
}

/* For change_current_allocator: throws when it fails. */
HOOK void *galloc_hook_malloc(size_t size, int device, cudaStream_t stream)
{
    return allocate_or_throw(size, device, stream, cudaSuccess);
}

/* Called by destructors, so that a failure cannot be reported: galloc logs it, and the block is freed later. */
HOOK void galloc_hook_free(void *ptr, size_t size, int device, cudaStream_t stream)
{
    unfreed *u;
    (void)size;
    if (release(ptr, device, stream)) return;
    u = malloc(sizeof *u);
    if (!u) return;
    u->ptr = ptr;
    u->device = device;
    u->stream = stream;
    keep_unfreed(u);
}

/* For MemPool: NULL when memory has run out. PyTorch's allocator then frees its cache, tries again, and reports. It
   would report each NULL so, and therefore other failures throw. */
HOOK void *galloc_hook_segment(size_t size, int device, cudaStream_t stream)
{
    return allocate_or_throw(size, device, stream, cudaErrorMemoryAllocation);
}

/* tensor.record_stream(stream). A default stream is the one of the tensor's device. As in PyTorch's own allocator,
   nothing happens for an empty tensor, whose address is NULL, and for memory of others. */
HOOK void galloc_hook_record_stream(void *ptr, cudaStream_t stream)
{
    galloc_pointer info;
    const char *words = NULL;
    previous before = { NULL, 0, 0 };
    cudaError_t err = cudaSuccess, left;
    if (!ptr) return;
    if (galloc_pointer_info(ptr, &info) == cudaSuccess) {
        if (info.state == GALLOC_STATE_FOREIGN) return;
        if (info.state == GALLOC_STATE_USED) err = enter_for(stream, info.device, &before);
        if (err == cudaSuccess) end_failed_before(info.device, stream);
    }
    if (err == cudaSuccess) err = galloc_record_stream(ptr, stream);
    else words = not_current;
    left = leave(&before);
    if (err == cudaSuccess && left != cudaSuccess) err = left, words = not_back;
    if (err != cudaSuccess) throw_failure(err, words, 0, 0);
}

HOOK void galloc_hook_init(int device_count) { (void)device_count; }

/* torch.cuda.empty_cache() */
HOOK void galloc_hook_reset(void)
{
    int i;
    (void)release_again();
    for (i = 0; i < MAX_DEVICES; i++) {
        galloc_pool *pool = __atomic_load_n(&pools[i], __ATOMIC_ACQUIRE);
        if (pool) (void)galloc_pool_trim(pool, 0, NULL);
    }
}

/* torch.cuda.set_per_process_memory_fraction(fraction, device). It replaces the one of GALLOC_CONF, whose memory_limit
   still counts. */
HOOK void galloc_hook_memory_fraction(double fraction, int device)
{
    static struct { int known; size_t bytes; } settings[MAX_DEVICES]; /* memory_limit */
    galloc_config config = galloc_config_default();
    size_t unused, total;
    cudaError_t err, left;
    const char *words;
    previous before;
    galloc_pool *pool = pool_of(device, &err, &words);
    if (!pool) throw_failure(err, words, 0, device);
    err = enter(device, &before);
    if (err != cudaSuccess) throw_failure(err, not_current, 0, device);
    err = memory_info(&unused, &total);
    if (err != cudaSuccess) words = "The device does not say how much memory it has.";
    (void)pthread_mutex_lock(&lock);
    if (err == cudaSuccess && !settings[device].known) {
        err = galloc_pool_config(pool, &config);
        settings[device].known = err == cudaSuccess;
        settings[device].bytes = config.memory_limit;
    }
    if (err == cudaSuccess) {
        size_t bytes = fraction >= 1 ? SIZE_MAX : fraction > 0 ? (size_t)(fraction * (double)total) : 0;
        err = galloc_pool_set_limit(pool, bytes < settings[device].bytes ? bytes : settings[device].bytes);
    }
    (void)pthread_mutex_unlock(&lock);
    left = leave(&before);
    if (err == cudaSuccess && left != cudaSuccess) err = left, words = not_back;
    if (err != cudaSuccess) throw_failure(err, words, 0, device);
}

/* Start and size of the block that contains an address. */
HOOK void *galloc_hook_base_alloc(void *ptr, size_t *size)
{
    galloc_pointer info;
    if (galloc_pointer_info(ptr, &info) != cudaSuccess || info.state != GALLOC_STATE_USED)
        throw_error("galloc: the address is in none of its tensors", 0);
    if (size) *size = info.usable;
    return info.base;
}

/* PyTorch 2.3 and later. The fourth argument, a std::function, comes as a pointer to it; it is not used. */
HOOK void galloc_hook_begin_allocate_to_pool(int device, pool_id id, void *filter)
{
    (void)filter;
    group_begin(device, id, 0, current_stream(device));
}

HOOK void galloc_hook_end_allocate_to_pool(int device, pool_id id)
{
    group_end_named(device, id, current_stream(device));
}

HOOK void galloc_hook_release_pool(int device, pool_id id) { group_release(device, id); }

/* For galloc_torch.cpp: the pool of a stream's capture; { 0, 0 }: none. */
HOOK pool_id galloc_hook_pool_of_stream(int device, cudaStream_t stream)
{
    pool_id none = { 0, 0 };
    const capture *c;
    if (is_default(stream) || !__atomic_load_n(&open_captures, __ATOMIC_RELAXED)) return none;
    (void)pthread_mutex_lock(&lock);
    c = capture_now(device, stream);
    if (c) none = c->group->id;
    (void)pthread_mutex_unlock(&lock);
    return none;
}

/* PyTorch 2.1 and 2.2: the end names the stream. */
HOOK void galloc_hook_begin_allocate_stream_to_pool(int device, cudaStream_t stream, pool_id id)
{
    group_begin(device, id, (unsigned long long)(uintptr_t)stream, is_default(stream) ? NULL : stream);
}

HOOK void galloc_hook_end_allocate_stream_to_pool(int device, cudaStream_t stream)
{
    group_end_keyed(device, (unsigned long long)(uintptr_t)stream);
}

/* PyTorch 2.0: the end names the capture. */
HOOK void galloc_hook_capture_begin(int device, unsigned long long capture_id, pool_id id)
{
    group_begin(device, id, capture_id, NULL);
}

HOOK void galloc_hook_capture_ended(int device, unsigned long long capture_id) { group_end_keyed(device, capture_id); }

/* ---- for galloc_torch.py ----------------------------------------------------------------------------------------- */

/* What galloc's counters have lost by resets of the peaks, which set its counts and totals to zero as well. */
typedef struct past {
    uint64_t failures, moves, moved_bytes, waits, released;
    size_t reserved;
    size_t most_pages; /* number of pages at most, as far as it was seen since the reset */
} past;

static past pasts[MAX_DEVICES]; /* with the lock */

/* Pages or segments that the driver has taken back. */
static uint64_t released(const galloc_driver *calls) { return calls->release + calls->mem_free + calls->pool_free; }

/* galloc's counters of a device, and their past. Returns the device's pool; NULL: it has none yet. [lock] */
static galloc_pool *read_counters(int device, galloc_stats *stats, past **before)
{
    galloc_pool *pool = device < 0 || device >= MAX_DEVICES ? NULL : pools[device];
    if (!pool || galloc_pool_stats(pool, stats) != cudaSuccess) return NULL;
    *before = &pasts[device];
    return pool;
}

/* The counters of a device as JSON, the names of torch.cuda.memory_stats() where they mean the same. Returns the number
   of bytes, or 0: there is no pool yet, or `size` does not suffice. */
HOOK size_t galloc_hook_stats(int device, char *json, size_t size)
{
    galloc_stats s;
    past *before, p;
    const galloc_pool *pool;
    int n;
    (void)pthread_mutex_lock(&lock);
    pool = read_counters(device, &s, &before);
    if (pool) p = *before;
    (void)pthread_mutex_unlock(&lock);
    if (!pool) return 0;
    n = snprintf(json, size,
                 "{\"requested_bytes.all.current\": %zu, \"requested_bytes.all.peak\": %zu, "
                 "\"allocated_bytes.all.current\": %zu, \"allocated_bytes.all.peak\": %zu, "
                 "\"reserved_bytes.all.current\": %zu, \"reserved_bytes.all.peak\": %zu, "
                 "\"allocation.all.current\": %zu, \"allocation.all.peak\": %zu, \"num_ooms\": %llu, "
                 "\"galloc.moves\": %llu, \"galloc.moved_bytes\": %llu, \"galloc.waits\": %llu, "
                 "\"galloc.graph_bytes\": %zu, \"galloc.free_bytes\": %zu, \"galloc.largest_free\": %zu}",
                 s.live.current, s.live.peak, s.allocated.current, s.allocated.peak, s.reserved.current,
                 s.reserved.peak, s.blocks.current, s.blocks.peak, (unsigned long long)(s.failures + p.failures),
                 (unsigned long long)(s.moves + p.moves), (unsigned long long)(s.moved_bytes + p.moved_bytes),
                 (unsigned long long)(s.waits + p.waits), s.graph_bytes, s.free_bytes, s.largest_free);
    return n > 0 && (size_t)n < size ? (size_t)n : 0;
}

static size_t count_pages(const galloc_stats *stats)
{
    size_t pages = 0;
    int i;
    for (i = 0; i < GALLOC_PAGE_SIZES; i++) pages += stats->pages[i].count;
    return pages;
}

/* Resets the peaks only. */
HOOK void galloc_hook_stats_reset(int device)
{
    galloc_stats s;
    past *p;
    galloc_pool *pool;
    (void)pthread_mutex_lock(&lock);
    pool = read_counters(device, &s, &p);
    if (pool && galloc_pool_stats_reset(pool) == cudaSuccess) {
        p->failures += s.failures;
        p->moves += s.moves;
        p->moved_bytes += s.moved_bytes;
        p->waits += s.waits;
        p->released += released(&s.driver);
        p->reserved += s.reserved.total;
        p->most_pages = count_pages(&s);
    }
    (void)pthread_mutex_unlock(&lock);
}

/* As PyTorch counts: now, at most, and all that have come and gone. */
typedef struct held_stat {
    size_t current, peak, allocated, freed;
} held_stat;

typedef struct held {
    held_stat bytes, pages;
    size_t largest_free;
} held;

/* galloc does not count the most pages. They follow from the most bytes where all pages have one size, as they have
   unless GALLOC_CONF names `growth`; otherwise they are estimated. */
static void fill_held(held *to, const galloc_stats *s, past *p)
{
    size_t pages = count_pages(s), page_bytes = pages ? s->reserved.current / pages : (size_t)2 << 20;
    size_t total = p->reserved + s->reserved.total;
    if (page_bytes && p->most_pages < s->reserved.peak / page_bytes) p->most_pages = s->reserved.peak / page_bytes;
    to->bytes.current = s->reserved.current;
    to->bytes.peak = s->reserved.peak;
    to->bytes.freed = total > s->reserved.current ? total - s->reserved.current : 0;
    to->bytes.allocated = to->bytes.freed + s->reserved.current;
    to->pages.current = pages;
    to->pages.peak = p->most_pages;
    to->pages.freed = (size_t)(p->released + released(&s->driver));
    to->pages.allocated = to->pages.freed + pages;
    to->largest_free = s->largest_free;
}

/* For galloc_torch.cpp: what a device holds. Returns 0, and zeros, when the device has no pool yet. */
HOOK int galloc_hook_held(int device, held *to)
{
    galloc_stats s;
    past *p;
    const galloc_pool *pool;
    memset(to, 0, sizeof *to);
    (void)pthread_mutex_lock(&lock);
    pool = read_counters(device, &s, &p);
    if (pool) fill_held(to, &s, p);
    (void)pthread_mutex_unlock(&lock);
    return pool != NULL;
}
