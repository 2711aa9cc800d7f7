/* trace_snapshots.c - snapshots of real programs for check_snapshots.sh: `trace_snapshots FOLDER ENTRIES TRACE...`
   replays traces through a pool with a history of so many entries, on the simulated device, and writes the state after
   each fifth of the calls as NAME.1.json and NAME.1.pickle to NAME.5. For each it prints a line of the counters and of
   what the files took: NAME.1 live reserved blocks json_bytes json_us pickle_bytes pickle_us. */

#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "sim.h"

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "bench/trace.h"

enum { POINTS = 5, STREAMS = 32 };

static int failed;
static void ok(cudaError_t error)
{
    if (error) printf("FAILED %s\n", galloc_last_message());
    if (error) failed = 1;
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void save(const char *folder, const char *name, int point, const char *ending)
{
    char path[600];
    struct stat file = {0};
    double began = now_us();
    snprintf(path, sizeof path, "%s/%s.%d.%s", folder, name, point, ending);
    ok(galloc_snapshot_save(NULL, path));
    double us = now_us() - began;
    if (stat(path, &file)) failed = 1;
    printf(" %lld %.0f", (long long)file.st_size, us);
}

static void save_point(galloc_pool *pool, const char *folder, const char *name, int point)
{
    galloc_stats stats;
    ok(galloc_pool_stats(pool, &stats));
    printf("%s.%d %zu %zu %zu", name, point, stats.live.current, stats.reserved.current, stats.blocks.current);
    save(folder, name, point, "json");
    save(folder, name, point, "pickle");
    putchar('\n');
}

static void use(cudaStream_t stream, void *block, size_t bytes)
{
    sim_access access = {block, bytes, SIM_WRITE, 0};
    if (sim_launch(stream, &access, 1)) failed = 1;
}

static void replay(const trace *t, galloc_pool *pool, cudaStream_t *streams, const char *folder)
{
    void **block = calloc(t->slots, sizeof *block);
    int point = 0;
    for (size_t i = 0; i < t->n; i++) {
        const trace_op *op = &t->op[i];
        cudaStream_t stream = streams[op->stream % STREAMS];
        if (op->bytes) {
            ok(galloc_pool_malloc(pool, &block[op->slot], op->bytes, stream));
            use(stream, block[op->slot], op->bytes);
        } else {
            ok(galloc_free(block[op->slot], stream));
            block[op->slot] = NULL;
        }
        if (i + 1 == t->n * (size_t)(point + 1) / POINTS) save_point(pool, folder, t->name, ++point);
        if (i == t->n / 2) ok(galloc_pool_trim(pool, 0, NULL));
    }
    for (uint32_t i = 0; i < t->slots; i++) ok(galloc_free(block[i], NULL));
    free(block);
}

static void replay_file(const char *folder, size_t entries, const char *path)
{
    sim_options options = sim_defaults();
    galloc_config config = galloc_config_default();
    cudaStream_t streams[STREAMS];
    galloc_pool *pool;
    trace t;
    options.memory = (size_t)141 << 30;
    options.lag = 512;
    config.history = entries;
    if (trace_load(&t, path) || sim_start(&options)) exit(2);
    for (int i = 0; i < STREAMS; i++) ok(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    ok(galloc_pool_create(&pool, &config));
    replay(&t, pool, streams, folder);
    ok(cudaDeviceSynchronize());
    ok(galloc_pool_destroy(pool));
    ok(galloc_shutdown());
    trace_free(&t);
    if (sim_findings(SIM_ANY)) failed = 1;
    sim_stop();
}

int main(int argc, char **argv)
{
    if (argc < 4) return 2;
    for (int i = 3; i < argc; i++) replay_file(argv[1], (size_t)atol(argv[2]), argv[i]);
    return failed;
}
