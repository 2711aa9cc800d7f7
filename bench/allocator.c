/* Failures are reported by whoever made the call: to run out of memory is an expected result here. */
#define _GNU_SOURCE
#define GALLOC_LOG(text) ((void)(text))
#define GALLOC_IMPLEMENTATION
#include "allocator.h"

#include "device.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- galloc ------------------------------------------------------------------------------------------------------ */

static galloc_pool *pool;

bool allocator_conf(galloc_config *config, const char *conf)
{
    char message[480] = "";
    *config = galloc_config_default();
    bool right = !conf || !galloc_config_parse(config, conf, message, sizeof message);
    if (message[0]) fprintf(stderr, "--conf %s: %s\n", conf, message);
    return right;
}

static int pool_open(const char *conf, size_t limit)
{
    galloc_config config = galloc_config_default();
    if (conf && galloc_config_parse(&config, conf, NULL, 0)) return -1;
    if (limit < config.memory_limit) config.memory_limit = limit;
    if (!galloc_pool_create(&pool, &config)) return 0;
    fprintf(stderr, "%s\n", galloc_last_message());
    return -1;
}

static cudaError_t pool_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    return galloc_pool_malloc(pool, ptr, bytes, stream);
}

static cudaError_t pool_request(void **ptr, galloc_request request)
{
    request.pool = pool;
    return galloc_alloc(ptr, &request);
}

static int pool_close(void)
{
    cudaError_t error = galloc_pool_destroy(pool);
    if (!error) error = galloc_shutdown();
    if (!error) return 0;
    fprintf(stderr, "%s\n", galloc_last_message());
    return -1;
}

static galloc_pool *pool_under_test(void)
{
    return pool;
}

const allocator allocator_galloc = {
    .name = "galloc", .caching = true, .counted = true, .open = pool_open, .alloc = pool_alloc, .free = galloc_free,
    .request = pool_request, .resize = galloc_resize, .record = galloc_record_stream, .free_after = galloc_free_after,
    .retire = galloc_stream_retire, .close = pool_close, .pool = pool_under_test, .message = galloc_last_message
};

static int default_open(const char *conf, size_t limit)
{
    if (limit != SIZE_MAX) {
        fprintf(stderr, "the default pool is limited by its settings alone\n");
        return -1;
    }
    if (conf) setenv("GALLOC_CONF", conf, 1);
    if (!galloc_pool_default(&pool, -1)) return 0;
    fprintf(stderr, "%s\n", galloc_last_message());
    return -1;
}

static cudaError_t default_request(void **ptr, galloc_request request)
{
    return galloc_alloc(ptr, &request);
}

static int default_close(void)
{
    if (!galloc_shutdown()) return 0;
    fprintf(stderr, "%s\n", galloc_last_message());
    return -1;
}

const allocator allocator_galloc_default = {
    .name = "galloc", .variable = "GALLOC_CONF", .caching = true, .counted = true, .open = default_open,
    .alloc = galloc_malloc, .free = galloc_free, .request = default_request, .resize = galloc_resize,
    .record = galloc_record_stream, .free_after = galloc_free_after, .retire = galloc_stream_retire,
    .close = default_close, .pool = pool_under_test, .message = galloc_last_message
};

/* ---- cudaMalloc and cudaFree ------------------------------------------------------------------------------------- */

static int plain_open(const char *conf, size_t limit)
{
    (void)conf;
    (void)limit;
    return 0;
}

static cudaError_t plain_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    cudaError_t error = cudaMalloc(ptr, bytes);
    if (error) *ptr = NULL;
    if (error == cudaErrorMemoryAllocation) cudaGetLastError();
    return error;
}

static cudaError_t plain_free(void *ptr, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(ptr);
}

static int plain_close(void)
{
    return 0;
}

static const char *plain_message(void)
{
    return cudaGetErrorString(cudaPeekAtLastError());
}

const allocator allocator_cudamalloc = {
    .name = "cudamalloc", .counted = true, .open = plain_open, .alloc = plain_alloc, .free = plain_free,
    .close = plain_close, .message = plain_message
};

/* ---- PyTorch's, in a library of its own -------------------------------------------------------------------------- */

#define TORCH_VARIABLE "PYTORCH_CUDA_ALLOC_CONF"

/* A file beside this program, where `make` puts what it builds for a GPU. */
static void built_path(char path[PATH_MAX], const char *name)
{
    char program[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    program[n < 0 ? 0 : n] = '\0';
    char *slash = strrchr(program, '/');
    if (slash) *slash = '\0';
    if (snprintf(path, PATH_MAX, "%s/bench-cuda/%s", program, name) >= PATH_MAX) path[0] = '\0';
}

static bool torch_built(void)
{
#ifdef BENCH_PEERS
    char path[PATH_MAX];
    built_path(path, "peer_torch.so");
    return !access(path, R_OK);
#else
    return false;
#endif
}

/* It is PyTorch that reads the variable, when its library is loaded. */
static const allocator *torch_load(const char *conf)
{
    char path[PATH_MAX];
    built_path(path, "peer_torch.so");
    if (conf && *conf) setenv(TORCH_VARIABLE, conf, 1);
    else if (conf) unsetenv(TORCH_VARIABLE);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const allocator *peer = library ? dlsym(library, "allocator_torch") : NULL;
    if (!peer) fprintf(stderr, "allocator torch could not be loaded: %s\n", dlerror());
    return peer;
}

/* What its build has reported. */
static void torch_describe(FILE *out)
{
    char path[PATH_MAX], line[512];
    built_path(path, "peer_torch.txt");
    FILE *file = fopen(path, "r");
    if (file && fgets(line, sizeof line, file)) fputs(line, out);
    else fputs("not built\n", out);
    if (file) fclose(file);
}

/* ---- by name ----------------------------------------------------------------------------------------------------- */

static const char *const names[] = {"galloc", "cudamalloc", "async", "cub", "torch"};
enum { NAMES = sizeof names / sizeof *names };

/* Those that are in this program. */
static const allocator *find(const char *name)
{
    if (!strcmp(name, "galloc")) return &allocator_galloc;
    if (!strcmp(name, "cudamalloc")) return &allocator_cudamalloc;
#ifdef BENCH_PEERS
    if (!strcmp(name, "async")) return &allocator_async;
    if (!strcmp(name, "cub")) return allocator_cub;
#endif
    return NULL;
}

bool allocator_built(const char *name)
{
    return find(name) || (!strcmp(name, "torch") && torch_built());
}

void allocator_list(FILE *out)
{
    bool gpu = !strcmp(device_backend, "cuda");
    for (int i = 0; i < NAMES; i++) {
        fprintf(out, "  %-12s", names[i]);
        if (gpu && !strcmp(names[i], "torch")) torch_describe(out);
        else fprintf(out, "%s\n", find(names[i]) ? "built in" : gpu ? "nvcc came without it" : "with --backend cuda");
    }
}

static const allocator *not_built(const char *name)
{
    bool known = false;
    for (int i = 0; i < NAMES; i++) known |= !strcmp(name, names[i]);
    fprintf(stderr, known ? "allocator %s is not built in\n" : "unknown allocator \"%s\"\n", name);
    allocator_list(stderr);
    return NULL;
}

const allocator *allocator_load(const char *name, const char *conf)
{
    galloc_config config;
    if (!allocator_built(name)) return not_built(name);
    if (!strcmp(name, "galloc")) return allocator_conf(&config, conf) ? &allocator_galloc : NULL;
    if (!strcmp(name, "torch")) return torch_load(conf);
    const allocator *a = find(name);
    if (!conf || !*conf) return a;
    fprintf(stderr, "--conf is for allocators that have settings, and %s has none\n", name);
    return NULL;
}

const char *allocator_settings(const allocator *a, const char *conf)
{
    if (!conf && a->variable) conf = getenv(a->variable);
    return conf ? conf : "";
}
