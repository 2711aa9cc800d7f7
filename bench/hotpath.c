/* hotpath.c - the host cost of an alloc/free pair.

   Each case is repeated, and the median is printed. build/hotpath --help says what the cases are. */

#define _GNU_SOURCE
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "allocator.h"
#include "cli.h"
#include "device.h"

static const char help[] =
    "usage: hotpath [--json] [--conf STRING] [--backend sim|cuda]\n"
    "\n"
    "Measures the host time of an alloc/free pair, for galloc, cudaMalloc and the C library's malloc.\n"
    "\n"
    "  hot                 a block allocated and freed, over and over\n"
    "  holes               the same, 1 KiB, while so many free holes lie between used blocks\n"
    "  holes_bins          sizes in turn, so that the block freed last is never the one wanted\n"
    "  churn               2048 live blocks of 512 B .. 32 MiB, one after the other freed and replaced\n"
    "  threads_own_stream  `hot` with 64 KiB on so many threads at once, each with a stream of its own\n"
    "  threads_one_stream  the same, all on one stream\n"
    "\n"
    "bytes is the size of a block, where there are several that of the largest.\n"
    "ns_per_pair is what a pair takes on its thread, pairs_per_s what all threads do together; medians.\n"
    "On the simulated device the host time has the simulation's own look-ups and its lock in it: it tells one version\n"
    "from the next, not what a GPU's host would need.\n";

enum { REPETITIONS = 5, THREADS_MAX = 16, LIVE = 2048, SIZES = 1024, HOLES_MAX = 65536 };
#define REPETITION_NS 15e6 /* a repetition is made at least so long */
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

typedef struct settings {
    bool json;
    const char *conf, *backend;
} settings;

/* One thread's share of a measurement. */
typedef struct worker {
    const allocator *a;
    cudaStream_t stream;
    size_t bytes;
    size_t *size;      /* SIZES of them; NULL: always `bytes` */
    void **live;       /* LIVE blocks to be replaced; NULL: each block is freed at once */
    long pairs;
    unsigned next;     /* in `size` and `live` */
    pthread_barrier_t *barrier;
    pthread_t thread;
    cudaError_t error;
} worker;

/* ---- the C library's, as one more allocator ---------------------------------------------------------------------- */

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

static int libc_close(void)
{
    return 0;
}

static const char *libc_message(void)
{
    return "no memory";
}

static const allocator allocator_libc = {"malloc", libc_open, libc_alloc, libc_free, libc_close, NULL, libc_message};

/* ---- measuring --------------------------------------------------------------------------------------------------- */

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void stop(const allocator *a, cudaError_t error)
{
    fprintf(stderr, "%s failed with %d (%s): %s\n", a->name, (int)error, cudaGetErrorName(error), a->message());
    exit(1);
}

static void check(const allocator *a, cudaError_t error)
{
    if (error) stop(a, error);
}

static cudaError_t pair_at_once(worker *w)
{
    void *ptr;
    size_t bytes = w->size ? w->size[w->next++ % SIZES] : w->bytes;
    cudaError_t error = w->a->alloc(&ptr, bytes, w->stream);
    return error ? error : w->a->free(ptr, w->stream);
}

static cudaError_t pair_replaced(worker *w)
{
    void **ptr = &w->live[w->next * 2654435761u % LIVE];
    cudaError_t error = w->a->free(*ptr, w->stream);
    return error ? error : w->a->alloc(ptr, w->size[w->next++ % SIZES], w->stream);
}

static void *work(void *arg)
{
    worker *w = arg;
    cudaError_t error = cudaSetDevice(0);
    if (w->barrier) pthread_barrier_wait(w->barrier);
    if (w->live)
        for (long i = 0; i < w->pairs && !error; i++) error = pair_replaced(w);
    else
        for (long i = 0; i < w->pairs && !error; i++) error = pair_at_once(w);
    w->error = error;
    return NULL;
}

/* Nanoseconds that n workers take together for `pairs` pairs each. */
static double elapsed(worker *w, int n, long pairs)
{
    pthread_barrier_t barrier;
    double start;
    for (int i = 0; i < n; i++) w[i].pairs = pairs;
    if (n == 1) {
        start = now_ns();
        work(w);
        check(w->a, w->error);
        return now_ns() - start;
    }
    pthread_barrier_init(&barrier, NULL, (unsigned)n + 1);
    for (int i = 0; i < n; i++) {
        w[i].barrier = &barrier;
        if (!pthread_create(&w[i].thread, NULL, work, &w[i])) continue;
        fprintf(stderr, "no thread could be started\n");
        exit(1);
    }
    pthread_barrier_wait(&barrier);
    start = now_ns();
    for (int i = 0; i < n; i++) pthread_join(w[i].thread, NULL);
    double ns = now_ns() - start;
    for (int i = 0; i < n; i++) check(w[i].a, w[i].error);
    pthread_barrier_destroy(&barrier);
    return ns;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median time of a pair, after a warm-up that also finds out how many make a repetition. */
static double ns_per_pair(worker *w, int n)
{
    double ns[REPETITIONS];
    long pairs = 16;
    while (elapsed(w, n, pairs) < REPETITION_NS) pairs *= 2;
    for (int i = 0; i < REPETITIONS; i++) ns[i] = elapsed(w, n, pairs) / (double)pairs;
    qsort(ns, REPETITIONS, sizeof *ns, by_value);
    return ns[REPETITIONS / 2];
}

/* ---- printing ---------------------------------------------------------------------------------------------------- */

static void print_head(const settings *s)
{
    char device[256];
    if (s->json) return;
    device_describe(device, sizeof device);
    printf("host time of an alloc/free pair, on: %s\n", device);
    if (!strcmp(device_backend, "sim"))
        printf("the simulation's look-ups and its lock are part of every figure but malloc's\n");
    printf("\n%-19s %-11s %10s %6s %8s %12s %13s\n", "case", "allocator", "bytes", "holes", "threads", "ns per pair",
           "pairs per s");
}

static void print_case(const settings *s, const char *name, const worker *w, int holes, int threads, double ns)
{
    const char *conf = s->conf ? s->conf : "";
    double rate = threads * 1e9 / ns;
    if (s->json) {
        printf("{\"case\": \"%s\", \"allocator\": \"%s\", \"bytes\": %zu, \"holes\": %d, \"threads\": %d, \"conf\": ",
               name, w->a->name, w->bytes, holes, threads);
        cli_json_text(stdout, w->a->pool ? conf : "");
        printf(", \"ns_per_pair\": %.1f, \"pairs_per_s\": %.0f}\n", ns, rate);
    } else {
        printf("%-19s %-11s %10zu %6d %8d %12.1f %13.0f\n", name, w->a->name, w->bytes, holes, threads, ns, rate);
    }
    fflush(stdout);
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static unsigned random_state = 1;

static unsigned roll(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static void hot(const settings *s, worker *w, size_t bytes)
{
    w->bytes = bytes;
    print_case(s, "hot", w, 0, 1, ns_per_pair(w, 1));
}

/* All sizes of holes that holes_bins makes, in mixed order. */
static void mix_sizes(size_t *size)
{
    for (size_t i = 0; i < SIZES; i++) size[i] = KIB + i * 512;
    for (size_t i = SIZES - 1; i > 0; i--) {
        size_t other = roll() % (i + 1), swap = size[i];
        size[i] = size[other];
        size[other] = swap;
    }
}

/* Twice as many blocks as holes are wanted, of `sizes` different sizes from 1 KiB on; every second one is freed. */
static void **make_holes(const worker *w, int holes, unsigned sizes)
{
    void **block = malloc(2 * HOLES_MAX * sizeof *block);
    if (!block) stop(w->a, cudaErrorMemoryAllocation);
    for (int i = 0; i < 2 * holes; i++) check(w->a, w->a->alloc(&block[i], KIB + roll() % sizes * 512, w->stream));
    for (int i = 0; i < 2 * holes; i += 2) check(w->a, w->a->free(block[i], w->stream));
    return block;
}

static void with_holes(const settings *s, worker *w, int holes)
{
    void **block = make_holes(w, holes, 64);
    w->bytes = KIB;
    print_case(s, "holes", w, holes, 1, ns_per_pair(w, 1));
    for (int i = 1; i < 2 * holes; i += 2) check(w->a, w->a->free(block[i], w->stream));
    free(block);
}

static void with_holes_in_turn(const settings *s, worker *w, int holes)
{
    size_t size[SIZES];
    void **block = make_holes(w, holes, SIZES);
    mix_sizes(size);
    w->size = size;
    w->bytes = KIB + (SIZES - 1) * 512; /* at most */
    print_case(s, "holes_bins", w, holes, 1, ns_per_pair(w, 1));
    w->size = NULL;
    for (int i = 1; i < 2 * holes; i += 2) check(w->a, w->a->free(block[i], w->stream));
    free(block);
}

/* Every order of magnitude as likely as the others. */
static void churn(const settings *s, worker *w)
{
    size_t size[SIZES];
    void *live[LIVE];
    for (int i = 0; i < SIZES; i++) size[i] = (size_t)exp2(9 + 16 * (roll() % 65536 / 65536.0));
    for (int i = 0; i < LIVE; i++) check(w->a, w->a->alloc(&live[i], size[roll() % SIZES], w->stream));
    w->size = size;
    w->live = live;
    w->bytes = 32 * MIB; /* at most */
    print_case(s, "churn", w, 0, 1, ns_per_pair(w, 1));
    w->size = NULL;
    w->live = NULL;
    for (int i = 0; i < LIVE; i++) check(w->a, w->a->free(live[i], w->stream));
}

static void threads(const settings *s, const worker *one, const cudaStream_t *stream, int n, bool own_stream)
{
    worker w[THREADS_MAX];
    for (int i = 0; i < n; i++) {
        w[i] = *one;
        w[i].bytes = 64 * KIB;
        if (own_stream) w[i].stream = stream[i];
    }
    print_case(s, own_stream ? "threads_own_stream" : "threads_one_stream", w, 0, n, ns_per_pair(w, n));
}

/* cudaMalloc and cudaFree go to the driver each time, whatever lies around. */
static void all_cases(const settings *s, const allocator *a, const cudaStream_t *stream)
{
    static const size_t sizes[] = {512, 64 * KIB, MIB, 20 * MIB, 256 * MIB};
    static const int holes[] = {4096, 16384, HOLES_MAX};
    worker w = {.a = a, .stream = stream[0]};
    bool libc = a == &allocator_libc, caching = a->pool != NULL;
    if (a->open(s->conf, SIZE_MAX)) exit(1);
    for (size_t i = 0; i < (libc ? 1 : sizeof sizes / sizeof *sizes); i++) hot(s, &w, sizes[i]);
    for (size_t i = 0; i < 3 && caching; i++) with_holes(s, &w, holes[i]);
    for (size_t i = 0; i < 3 && caching; i++) with_holes_in_turn(s, &w, holes[i]);
    if (!libc) churn(s, &w);
    for (int n = 1; n <= THREADS_MAX && !libc; n *= 2) threads(s, &w, stream, n, true);
    for (int n = 1; n <= THREADS_MAX && !libc; n *= 2) threads(s, &w, stream, n, false);
    if (a->close()) exit(1);
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

static bool read_options(settings *s, int argc, char **argv)
{
    enum { JSON = 1, CONF, BACKEND, HELP };
    static const struct option options[] = {
        {"json", no_argument, NULL, JSON},
        {"conf", required_argument, NULL, CONF},
        {"backend", required_argument, NULL, BACKEND},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}
    };
    galloc_config config;
    int option;
    *s = (settings){.json = false};
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == JSON) s->json = true;
        else if (option == CONF) s->conf = optarg;
        else if (option == BACKEND) s->backend = optarg;
        else if (option == HELP) fputs(help, stdout), exit(0);
        else return false; /* getopt has said why */
    }
    if (optind == argc) return allocator_conf(&config, s->conf);
    fprintf(stderr, "unexpected argument \"%s\"\n", argv[optind]);
    return false;
}

int main(int argc, char **argv)
{
    static const allocator *const allocators[] = {&allocator_galloc, &allocator_libc, &allocator_cudamalloc};
    settings s;
    if (!read_options(&s, argc, argv)) {
        fprintf(stderr, "hotpath --help lists the options\n");
        return CLI_USAGE;
    }
    if (!cli_backend(s.backend, argv)) return CLI_USAGE;
    print_head(&s);
    for (size_t i = 0; i < sizeof allocators / sizeof *allocators; i++) {
        cudaStream_t stream[THREADS_MAX];
        if (device_start(false)) return 1;
        for (int k = 0; k < THREADS_MAX; k++)
            check(allocators[i], cudaStreamCreateWithFlags(&stream[k], cudaStreamNonBlocking));
        all_cases(&s, allocators[i], stream);
        for (int k = 0; k < THREADS_MAX; k++) check(allocators[i], cudaStreamDestroy(stream[k]));
        device_stop();
    }
    return 0;
}
