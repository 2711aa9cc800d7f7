/* fuzz_environment.c - a fuzzer for the variables that the default pool reads, GALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF,
   which the input has on both sides of a byte 0: the pool is there and serves, or the error has words. The mutator
   knows keys. Names of files are left out: galloc would write them. With FUZZ_MAIN defined: a program that runs the
   files it is given. */

#include "setup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);

static void require(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz_environment: %s\n", what);
    print_findings();
    abort();
}

static void use(galloc_pool *pool)
{
    char text[GALLOC_CONFIG_TEXT];
    galloc_config config, back = galloc_config_default();
    void *p = NULL;
    require(galloc_pool_config(pool, &config) == cudaSuccess, "no settings");
    require(galloc_config_print(&config, text, sizeof text) == cudaSuccess, "settings that cannot be printed");
    require(galloc_config_parse(&back, text, NULL, 0) == cudaSuccess, "a printed text is not understood");
    if (galloc_malloc(&p, 5000, NULL) == cudaSuccess) put(NULL, p, 5000, 1);
    require(galloc_free(p, NULL) == cudaSuccess, "a block cannot be freed");
    require(galloc_pool_check(pool) == 0, "the heap is broken");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[3000], leaked[256] = "";
    sim_options options = sim_defaults();
    galloc_pool *pool = NULL;
    cudaError_t err;
    const char *second;
    if (size >= sizeof text - 1) return 0;
    memcpy(text, data, size);
    text[size] = text[size + 1] = 0;
    second = text + strlen(text) + 1;
    if (strstr(text, "trace") || strstr(text, "snapshot_on_oom")) return 0;
    setenv("GALLOC_CONF", text, 1);
    if ((size_t)(second - text) <= size) setenv("PYTORCH_CUDA_ALLOC_CONF", second, 1);
    inside_log_anew();
    options.memory = MIB(96);
    require(sim_start(&options) == 0, "no device");
    err = galloc_pool_default(&pool, 0);
    require(err || pool, "neither a pool nor an error");
    require(!err || strlen(galloc_last_message()) > 10, "an error without words");
    require(strlen(galloc_last_message()) < inside_message_size(), "a message that is too long");
    if (!err) use(pool);
    unsetenv("GALLOC_CONF");
    unsetenv("PYTORCH_CUDA_ALLOC_CONF");
    require(galloc_shutdown() == cudaSuccess, "no shutdown");
    sim_run(-1);
    require(sim_findings(SIM_ANY) == 0, "the device found something");
    require(test_failures == 0, "a check failed");
    require(sim_leaks(leaked, sizeof leaked) == 0, leaked);
    require(sim_malloc_live() == 0, "host memory leaked");
    sim_stop();
    return 0;
}

/* A setting from the printed defaults, or what else the variables may have, comes to a place behind a comma. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    static const char *const more[] = {"like:pytorch", "backend:cudaMallocAsync", "max_split_size_mb:20",
                                       "pinned_use_cuda_host_register:True", "roundup_power2_divisions:[256:1,>:4]",
                                       "garbage_collection_threshold:0.6", "log:off", "history:100", "_mb:1", "%p"};
    char text[GALLOC_CONFIG_TEXT + 64], *piece = text;
    galloc_config config = galloc_config_default();
    size_t n, at = seed / 512 % (size + 1), skip = seed / 16 % 32;
    if (seed % 8 < 5) return LLVMFuzzerMutate(data, size, room);
    (void)galloc_config_print(&config, text, sizeof text);
    while (skip-- && strchr(piece, ',')) piece = strchr(piece, ',') + 1;
    piece[strcspn(piece, ",")] = 0;
    if (seed % 8 == 5) strcpy(piece = text, more[seed / 16 % (sizeof more / sizeof *more)]);
    strcat(piece, ",");
    n = strlen(piece);
    if (size + n > room) return LLVMFuzzerMutate(data, size, room);
    while (at && data[at - 1] != ',' && data[at - 1]) at--;
    memmove(data + at + n, data + at, size - at);
    memcpy(data + at, piece, n);
    return size + n;
}

#ifdef FUZZ_MAIN
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room)
{
    (void)data, (void)room;
    return size;
}
#include "fuzz_main.h"
#endif
