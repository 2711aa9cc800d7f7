/* gpu_ipc.cu - blocks that another process opens (cudaIpcGetMemHandle). The simulated device is of one process, so
   there it says "skipped". */

#include "work.h"

#ifdef GALLOC_ON_SIM

int main(void)
{
    printf("skipped: the simulated device has no IPC\n");
    return 0;
}

#else

#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

#define HANDLE_TEXT (2 * CUDA_IPC_HANDLE_SIZE + 1)

/* A handle names the whole allocation of cudaMalloc, here galloc's segment. A block has an offset in it. */
typedef struct shared_block {
    cudaIpcMemHandle_t handle;
    size_t offset, bytes;
    uint32_t tag; /* the words that the other process finds there; it leaves those of tag + 1 */
} shared_block;

static void handle_print(const cudaIpcMemHandle_t *handle, char *text)
{
    for (size_t i = 0; i < CUDA_IPC_HANDLE_SIZE; i++) sprintf(text + 2 * i, "%02x", (unsigned char)handle->reserved[i]);
}

static int handle_parse(const char *text, cudaIpcMemHandle_t *handle)
{
    if (strlen(text) != HANDLE_TEXT - 1) return 0;
    for (size_t i = 0; i < CUDA_IPC_HANDLE_SIZE; i++) {
        unsigned byte = 0;
        if (sscanf(text + 2 * i, "%2x", &byte) != 1) return 0;
        handle->reserved[i] = (char)byte;
    }
    return 1;
}

static size_t offset_in_segment(const void *block)
{
    void *function = NULL;
    cudaDriverEntryPointQueryResult found;
    unsigned long long base = 0;
    size_t bytes = 0;
#if CUDART_VERSION >= 12050
    OK(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000, cudaEnableDefault, &found));
#else
    OK(cudaGetDriverEntryPoint("cuMemGetAddressRange", &function, cudaEnableDefault, &found));
#endif
    if (!function) return 0;
    EXPECT_EQ(((int (*)(unsigned long long *, size_t *, unsigned long long))function)(&base, &bytes, (uintptr_t)block),
              0);
    return (uintptr_t)block - base;
}

/* Runs this program as the other process. Returns its exit status. */
static int other_process_opens(const shared_block *block)
{
    char handle[HANDLE_TEXT], offset[32], bytes[32], tag[32];
    char self[] = "/proc/self/exe", open[] = "open";
    char *arguments[] = {self, open, handle, offset, bytes, tag, NULL};
    pid_t child = 0;
    int status = -1;
    handle_print(&block->handle, handle);
    snprintf(offset, sizeof offset, "%zu", block->offset);
    snprintf(bytes, sizeof bytes, "%zu", block->bytes);
    snprintf(tag, sizeof tag, "%u", block->tag);
    fflush(stdout);
    EXPECT_EQ(posix_spawn(&child, self, NULL, NULL, arguments, environ), 0);
    EXPECT(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The other process: checks the words, and writes its own. */
static int open_block(char **arguments)
{
    shared_block block;
    void *base = NULL;
    cudaStream_t s = NULL;
    memset(&block, 0, sizeof block);
    if (!handle_parse(arguments[0], &block.handle)) return 2;
    block.offset = strtoull(arguments[1], NULL, 10);
    block.bytes = strtoull(arguments[2], NULL, 10);
    block.tag = (uint32_t)strtoul(arguments[3], NULL, 10);
    if (work_start()) return 3;
    if (cudaIpcOpenMemHandle(&base, block.handle, cudaIpcMemLazyEnablePeerAccess)) return 4;
    s = stream_new();
    device_check(s, (char *)base + block.offset, block.bytes, block.tag);
    device_fill(s, (char *)base + block.offset, block.bytes, block.tag + 1);
    if (cudaStreamSynchronize(s) || device_wrong()) return 5;
    return cudaIpcCloseMemHandle(base) ? 6 : 0;
}

static galloc_pool *fixed_pool(const char *settings)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    OK(galloc_config_parse(&config, settings, NULL, 0));
    OK(galloc_pool_create(&pool, &config));
    return pool;
}

/* Small blocks lie side by side in one segment, large ones have one of their own. Nothing but the block changes. */
TEST(another_process_opens_blocks_of_cudamalloc_segments)
{
    static const char *const settings[] = {"expandable_segments:False", "backend:cudaMalloc", "like:pytorch"};
    static const size_t sizes[] = {64 << 10, 3 << 20, 40 << 20};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        galloc_pool *pool = fixed_pool(settings[k]);
        cudaStream_t s = stream_new();
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            void *before = get(pool, sizes[i], s), *p = get(pool, sizes[i], s), *after = get(pool, sizes[i], s);
            shared_block block;
            memset(&block, 0, sizeof block);
            device_fill(s, before, sizes[i], 7);
            device_fill(s, p, sizes[i], 8);
            device_fill(s, after, sizes[i], 9);
            OK(cudaStreamSynchronize(s));
            block.offset = offset_in_segment(p);
            block.bytes = sizes[i];
            block.tag = 8;
            OK(cudaIpcGetMemHandle(&block.handle, p));
            EXPECT_EQ(other_process_opens(&block), 0);
            device_check(s, before, sizes[i], 7);
            device_check(s, p, sizes[i], 9);
            device_check(s, after, sizes[i], 9);
            OK(galloc_free(before, s));
            OK(galloc_free(p, s));
            OK(galloc_free(after, s));
        }
        expect_healthy(pool);
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

/* Memory that is not from cudaMalloc has no handle. The error harms nothing. */
TEST(blocks_of_pages_and_of_cudamallocasync_have_no_handle)
{
    static const char *const settings[] = {"expandable_segments:True", "backend:cudaMallocAsync"};
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++) {
        galloc_pool *pool = fixed_pool(settings[k]);
        cudaStream_t s = stream_new();
        cudaIpcMemHandle_t handle;
        void *p = get(pool, mib(3), s);
        EXPECT_EQ(cudaIpcGetMemHandle(&handle, p), cudaErrorInvalidValue);
        (void)cudaGetLastError();
        device_fill(s, p, mib(3), 1);
        device_check(s, p, mib(3), 1);
        OK(galloc_free(p, s));
        pool_end(pool);
        OK(cudaStreamDestroy(s));
    }
    finish();
}

int main(int argc, char **argv)
{
    if (argc == 6 && !strcmp(argv[1], "open")) return open_block(argv + 2);
    int status = work_start();
    return status ? status : test_main(argc, argv);
}

#endif
