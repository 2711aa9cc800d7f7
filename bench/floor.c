#include "floor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

static int nothing_to_close(void)
{
    return 0;
}

/* ---- the C library's --------------------------------------------------------------------------------------------- */

static int libc_open(const char *conf, size_t limit)
{
    (void)conf;
    (void)limit;
    return 0;
}

static cudaError_t libc_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    *ptr = malloc(bytes);
    __asm__ volatile("" : : "r"(*ptr) : "memory"); /* or the compiler drops the pair */
    return *ptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

static cudaError_t libc_free(void *ptr, cudaStream_t stream)
{
    (void)stream;
    free(ptr);
    return cudaSuccess;
}

static const char *libc_message(void)
{
    return "no memory";
}

const allocator allocator_libc = {
    .name = "malloc", .open = libc_open, .alloc = libc_alloc, .free = libc_free, .close = nothing_to_close,
    .message = libc_message
};

/* ---- looks ------------------------------------------------------------------------------------------------------- */

enum { CAPTURING = 1, ID = 2 };

static CUresult (*is_capturing)(CUstream, CUstreamCaptureStatus *);
static CUresult (*get_id)(CUstream, unsigned long long *);
static int at_alloc, at_free; /* CAPTURING, ID, both or none */

static cudaError_t fetch(const char *name, void *slot, size_t size)
{
    void *function = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableLegacyStream, &found);
#else
    cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableLegacyStream, &found);
#endif
    if (error || found != cudaDriverEntryPointSuccess) return error ? error : cudaErrorInsufficientDriver;
    memcpy(slot, &function, size);
    return cudaSuccess;
}

/* What a text up to its end or a comma names; -1: something else. */
static int looks_of(const char **text)
{
    int looks = 0;
    while (**text && **text != ',') {
        size_t n = strcspn(*text, "+,");
        if (n == 9 && !strncmp(*text, "capturing", n)) looks |= CAPTURING;
        else if (n == 2 && !strncmp(*text, "id", n)) looks |= ID;
        else return -1;
        *text += n + ((*text)[n] == '+');
    }
    *text += **text == ',';
    return looks;
}

static int looks_open(const char *conf, size_t limit)
{
    const char *rest = conf ? conf : "";
    (void)limit;
    at_alloc = looks_of(&rest);
    at_free = looks_of(&rest);
    if (at_alloc < 0 || at_free < 0 || *rest) {
        fprintf(stderr, "--conf %s: looks are LOOKS,LOOKS, of capturing and id joined by '+'\n", conf);
        return -1;
    }
    cudaError_t error = fetch("cuStreamIsCapturing", &is_capturing, sizeof is_capturing);
    if (!error) error = fetch("cuStreamGetId", &get_id, sizeof get_id);
    if (!error) return 0;
    fprintf(stderr, "the driver's functions cannot be had: %s\n", cudaGetErrorString(error));
    return -1;
}

static cudaError_t look(int looks, cudaStream_t stream)
{
    CUstreamCaptureStatus status;
    unsigned long long id;
    CUresult result = CUDA_SUCCESS;
    if (looks & CAPTURING) result = is_capturing(stream, &status);
    if (looks & ID && !result) result = get_id(stream, &id);
    return (cudaError_t)(int)result;
}

static cudaError_t looks_alloc(void **ptr, size_t bytes, cudaStream_t stream)
{
    (void)bytes;
    *ptr = NULL;
    return look(at_alloc, stream);
}

static cudaError_t looks_free(void *ptr, cudaStream_t stream)
{
    (void)ptr;
    return look(at_free, stream);
}

static const char *looks_message(void)
{
    return "a look at a stream";
}

const allocator allocator_looks = {
    .name = "driver", .open = looks_open, .alloc = looks_alloc, .free = looks_free, .close = nothing_to_close,
    .message = looks_message
};
