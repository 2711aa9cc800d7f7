/* log_of_run.c - a program whose log check_trace.sh replays: `log_of_run STEPS SEED SNAPSHOT SETTINGS [legacy]` takes
   random steps in a pool with these settings, on the simulated device: several streams, with a last argument the legacy
   stream among them, frees on other streams and after several, recorded streams, growable and aligned blocks, tags,
   resizes. Then it saves the state. GALLOC_CONF has the log's name. */

#include <stdio.h>
#include <stdlib.h>

#include "sim.h"

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

enum { STREAMS = 4, BLOCKS = 40, MIB = 1 << 20 };

static galloc_pool *pool;
static cudaStream_t stream[STREAMS];
static void *block[BLOCKS];
static size_t room[BLOCKS]; /* what a block can become in place */
static int growable[BLOCKS];
static unsigned state, failed;

static unsigned roll(unsigned n)
{
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % n;
}

static void ok(cudaError_t error)
{
    if (!error) return;
    printf("FAILED %s\n", galloc_last_message());
    failed = 1;
}

static size_t some_bytes(void)
{
    return roll(3) ? 1 + roll(200000) : 1 + (size_t)roll(40) * MIB;
}

static void allocate(int i, cudaStream_t on)
{
    galloc_request request = {0};
    request.pool = pool;
    request.bytes = some_bytes();
    request.stream = on;
    if (!roll(4)) request.max_bytes = request.bytes + (size_t)roll(64) * MIB;
    if (!roll(8)) request.alignment = (size_t)512 << roll(6);
    if (!roll(8)) request.lifetime = GALLOC_LIFETIME_LONG;
    if (!roll(4)) request.tag = 1 + roll(9);
    growable[i] = request.max_bytes > 0;
    room[i] = request.max_bytes > request.bytes ? request.max_bytes : request.bytes;
    ok(galloc_alloc(&block[i], &request));
}

static void record(int i) { ok(galloc_record_stream(block[i], stream[roll(STREAMS)])); }

static void release(int i)
{
    cudaStream_t streams[3];
    int n = 1 + (int)roll(3);
    for (int k = 0; k < 3; k++) streams[k] = stream[roll(STREAMS)];
    if (!roll(5)) record(i);
    ok(roll(3) ? galloc_free(block[i], streams[0]) : galloc_free_after(block[i], streams, n));
    block[i] = NULL;
}

/* All of them succeed: a log does not know of those that cannot. */
static void resize(int i)
{
    size_t bytes = some_bytes();
    if (bytes > room[i]) bytes = room[i];
    if (!growable[i]) room[i] = bytes;
    if (!roll(5)) record(i);
    ok(galloc_resize(block[i], bytes, stream[roll(STREAMS)]));
}

int main(int argc, char **argv)
{
    sim_options options = sim_defaults();
    galloc_config config = galloc_config_default();
    if (argc < 5 || sim_start(&options)) return 2;
    ok(galloc_config_parse(&config, argv[4], NULL, 0));
    ok(galloc_pool_create(&pool, &config));
    state = (unsigned)atol(argv[2]);
    for (int i = argc > 5; i < STREAMS; i++) ok(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
    for (int i = 0; i < STREAMS; i++) allocate(i, stream[i]); /* so a replay gives them the same numbers */
    for (long i = atol(argv[1]); i > 0; i--) {
        int at = (int)roll(BLOCKS);
        if (!block[at]) allocate(at, stream[roll(STREAMS)]);
        else if (roll(3)) release(at);
        else resize(at);
    }
    ok(galloc_snapshot_save(NULL, argv[3]));
    return failed; /* what is left of the log is written now */
}
