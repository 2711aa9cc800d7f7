/* hotpath.c - the host cost of an alloc/free pair, galloc's beside that of every other allocator that was built in.

   Each case is repeated, and the median is printed. build/hotpath --help says what the cases are. */

#define _GNU_SOURCE
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"
#include "device.h"
#include "floor.h"
#include "pairs.h"

static const char help[] =
    "usage: hotpath [--json] [--allocator NAME]... [--conf STRING]... [--devices N] [--backend sim|cuda] [--list]\n"
    "\n"
    "Measures the host time of an alloc/free pair.\n"
    "\n"
    "  hot                 a block allocated and freed, over and over, on a stream of one's own\n"
    "  hot_default_stream, hot_per_thread_stream\n"
    "                      the same on stream 0, and on cudaStreamPerThread\n"
    "  hot_two_devices, hot_two_devices_default_stream\n"
    "                      the same, 64 pairs on one device and 64 on the other in turn, where there are two\n"
    "  holes               1 KiB, while so many free holes lie between used blocks\n"
    "  holes_bins          sizes in turn, so that the block freed last is never the one wanted\n"
    "  churn               2048 live blocks of 512 B .. 32 MiB, one after the other freed and replaced\n"
    "  churn_two_streams   the same, after another stream has had a block\n"
    "  threads_own_stream  `hot` with 64 KiB on so many threads at once, each with a stream of its own\n"
    "  threads_one_stream  the same, all on one stream\n"
    "  threads_in_turn_N   the same, two threads: one makes N pairs, then the other, in turn\n"
    "  looks, looks_one_stream, looks_default_stream\n"
    "                      no allocator: the driver is asked about the stream, as an allocator must; a stream each,\n"
    "                      or one for all threads\n"
    "\n"
    "Allocators, each measured in a process of its own, all of them unless some are named:\n"
    "\n"
    "  galloc              galloc_malloc and galloc_free, with defaults and with stream_check:off\n"
    "  malloc, cudamalloc  the C library's, and the driver's without a cache; not in all cases\n"
    "  driver              looks; settings are what is asked at an alloc and at a free: capturing+id,capturing\n"
    "  async, cub, torch   cudaMallocAsync, CUB's and PyTorch's caching allocators, if found at build time; with\n"
    "                      --backend cuda; torch with its defaults and with expandable_segments:True\n"
    "\n"
    "  --conf STRING       settings, as in GALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, in place of those above; for the\n"
    "                      allocators that are named, else for galloc. Several are measured one after the other\n"
    "  --only NAME         this allocator, in this process, with the first --conf or what the environment says,\n"
    "                      without the head of a table: what is done for each of the others\n"
    "  --list              say which allocators were built in, and why others were not\n"
    "  --devices N         of the simulated device: how many (1); on a GPU's host: use no more than these\n"
    "\n"
    "bytes is the size of a block, where there are several that of the largest.\n"
    "ns_per_pair is what a pair takes on its thread, pairs_per_s what all threads do together; medians.\n"
    "On the simulated device the host time has the simulation's own look-ups and its lock in it: it tells one version\n"
    "from the next, not what a GPU's host would need.\n"
    "\n"
    "Exit status: 0; 1 when an allocator failed, of which the others' lines do not suffer; 2 for a wrong option.\n";

enum { HOLES_MAX = 65536, JOBS_MAX = 64, NAMED_MAX = 8, JOB_SECONDS = 120 };
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

/* One allocator with one set of settings. */
typedef struct job {
    const char *allocator, *conf; /* conf: NULL for what the environment says */
} job;

typedef struct settings {
    bool json, list;
    const char *only, *backend;
    const char *allocator[NAMED_MAX], *conf[NAMED_MAX];
    int allocators, confs, devices;
    job job[JOBS_MAX];
    int jobs;
} settings;

/* What is being measured. */
typedef struct bench {
    const allocator *a;
    const char *conf;
    bool json;
    int devices;
    cudaStream_t stream[PAIRS_THREADS];
    cudaStream_t other; /* on device 1; NULL: there is none */
} bench;

/* ---- printing ---------------------------------------------------------------------------------------------------- */

static void print_head(void)
{
    char device[256];
    device_describe(device, sizeof device);
    printf("host time of an alloc/free pair, on: %s\n", device);
    if (!strcmp(device_backend, "sim"))
        printf("the simulation's look-ups and its lock are part of every figure but malloc's\n");
    printf("\n%-30s %-10s %10s %6s %8s %12s %13s  %s\n", "case", "allocator", "bytes", "holes", "threads",
           "ns per pair", "pairs per s", "settings");
}

/* While work goes on, a line on a terminal says which. */
static void progress(const bench *b, const char *what, int holes, int threads)
{
    if (!isatty(STDERR_FILENO)) return;
    fprintf(stderr, "\r\033[K%s %s: %s, %d holes, %d threads", b->a->name, b->conf, what, holes, threads);
}

static void measure(const bench *b, const char *name, worker *w, int holes, int threads)
{
    progress(b, name, holes, threads);
    double ns = pairs_ns(w, threads), rate = threads * 1e9 / ns;
    if (isatty(STDERR_FILENO)) fputs("\r\033[K", stderr);
    if (b->json) {
        printf("{\"case\": \"%s\", \"allocator\": \"%s\", \"bytes\": %zu, \"holes\": %d, \"threads\": %d, \"conf\": ",
               name, b->a->name, w->bytes, holes, threads);
        cli_json_text(stdout, b->conf);
        printf(", \"ns_per_pair\": %.1f, \"pairs_per_s\": %.0f}\n", ns, rate);
    } else {
        printf("%-30s %-10s %10zu %6d %8d %12.1f %13.0f  %s\n", name, b->a->name, w->bytes, holes, threads, ns, rate,
               b->conf);
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

static worker worker_on(const bench *b, cudaStream_t stream, size_t bytes)
{
    return (worker){.a = b->a, .stream = stream, .bytes = bytes};
}

static void hot(const bench *b, const char *name, cudaStream_t stream, size_t bytes)
{
    worker w = worker_on(b, stream, bytes);
    measure(b, name, &w, 0, 1);
}

static void hot_two_devices(const bench *b, const char *name, cudaStream_t first, cudaStream_t second)
{
    worker w = worker_on(b, first, 64 * KIB);
    w.turns = true;
    w.turn[0] = first;
    w.turn[1] = second;
    measure(b, name, &w, 0, 1);
}

/* All sizes of holes that holes_bins makes, in mixed order. */
static void mix_sizes(size_t *size)
{
    for (size_t i = 0; i < PAIRS_SIZES; i++) size[i] = KIB + i * 512;
    for (size_t i = PAIRS_SIZES - 1; i > 0; i--) {
        size_t other = roll() % (i + 1), swap = size[i];
        size[i] = size[other];
        size[other] = swap;
    }
}

/* Twice as many blocks as holes are wanted, of `sizes` different sizes from 1 KiB on; every second one is freed. */
static void **make_holes(const bench *b, int holes, unsigned sizes)
{
    void **block = malloc(2 * HOLES_MAX * sizeof *block);
    if (!block) pairs_check(&allocator_libc, cudaErrorMemoryAllocation);
    progress(b, "making holes", holes, 1);
    for (int i = 0; i < 2 * holes; i++)
        pairs_check(b->a, b->a->alloc(&block[i], KIB + roll() % sizes * 512, b->stream[0]));
    for (int i = 0; i < 2 * holes; i += 2) pairs_check(b->a, b->a->free(block[i], b->stream[0]));
    return block;
}

static void fill_holes(const bench *b, void **block, int holes)
{
    for (int i = 1; i < 2 * holes; i += 2) pairs_check(b->a, b->a->free(block[i], b->stream[0]));
    free(block);
}

static void with_holes(const bench *b, int holes)
{
    worker w = worker_on(b, b->stream[0], KIB);
    void **block = make_holes(b, holes, 64);
    measure(b, "holes", &w, holes, 1);
    fill_holes(b, block, holes);
}

static void with_holes_in_turn(const bench *b, int holes)
{
    size_t size[PAIRS_SIZES];
    worker w = worker_on(b, b->stream[0], KIB + (PAIRS_SIZES - 1) * 512); /* at most */
    void **block = make_holes(b, holes, PAIRS_SIZES);
    mix_sizes(size);
    w.size = size;
    measure(b, "holes_bins", &w, holes, 1);
    fill_holes(b, block, holes);
}

/* Every order of magnitude as likely as the others. */
static void churn(const bench *b, const char *name)
{
    size_t size[PAIRS_SIZES];
    void *live[PAIRS_LIVE];
    worker w = worker_on(b, b->stream[0], 32 * MIB); /* at most */
    for (int i = 0; i < PAIRS_SIZES; i++) size[i] = (size_t)exp2(9 + 16 * (roll() % 65536 / 65536.0));
    for (int i = 0; i < PAIRS_LIVE; i++)
        pairs_check(b->a, b->a->alloc(&live[i], size[roll() % PAIRS_SIZES], w.stream));
    w.size = size;
    w.live = live;
    measure(b, name, &w, 0, 1);
    for (int i = 0; i < PAIRS_LIVE; i++) pairs_check(b->a, b->a->free(live[i], w.stream));
}

static void threads(const bench *b, const char *name, int n, size_t bytes, bool own_stream)
{
    worker w[PAIRS_THREADS];
    for (int i = 0; i < n; i++) w[i] = worker_on(b, b->stream[own_stream ? i : 0], bytes);
    measure(b, name, w, 0, n);
}

static void looks(const bench *b)
{
    for (int n = 1; n <= PAIRS_THREADS; n *= 2) threads(b, "looks", n, 0, true);
    for (int n = 1; n <= PAIRS_THREADS; n *= 2) threads(b, "looks_one_stream", n, 0, false);
    hot(b, "looks_default_stream", NULL, 0);
}

static void libc(const bench *b)
{
    hot(b, "hot", NULL, 512);
}

static void hot_sizes(const bench *b)
{
    static const size_t sizes[] = {512, 64 * KIB, MIB, 20 * MIB, 256 * MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) hot(b, "hot", b->stream[0], sizes[i]);
}

static void hot_default(const bench *b)
{
    hot(b, "hot_default_stream", NULL, 64 * KIB);
}

static void hot_per_thread(const bench *b)
{
    hot(b, "hot_per_thread_stream", cudaStreamPerThread, 64 * KIB);
}

static const int hole_counts[] = {0, 4096, 16384, HOLES_MAX};

static void holes_of_few_sizes(const bench *b)
{
    for (size_t i = 0; i < sizeof hole_counts / sizeof *hole_counts; i++) with_holes(b, hole_counts[i]);
}

static void holes_of_many_sizes(const bench *b)
{
    for (size_t i = 0; i < sizeof hole_counts / sizeof *hole_counts; i++) with_holes_in_turn(b, hole_counts[i]);
}

static void churn_alone(const bench *b)
{
    churn(b, "churn");
}

static void churn_beside(const bench *b)
{
    void *other;
    pairs_check(b->a, b->a->alloc(&other, MIB, b->stream[1]));
    pairs_check(b->a, b->a->free(other, b->stream[1]));
    churn(b, "churn_two_streams");
}

static void threads_own(const bench *b)
{
    for (int n = 1; n <= PAIRS_THREADS; n *= 2) threads(b, "threads_own_stream", n, 64 * KIB, true);
}

static void threads_one(const bench *b)
{
    for (int n = 1; n <= PAIRS_THREADS; n *= 2) threads(b, "threads_one_stream", n, 64 * KIB, false);
}

static void threads_in_turn(const bench *b)
{
    static const struct {
        const char *name;
        long pairs;
    } turns[] = {{"threads_in_turn_1", 1}, {"threads_in_turn_100", 100}, {"threads_in_turn_10000", 10000}};
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        worker w[2];
        for (int k = 0; k < 2; k++) {
            w[k] = worker_on(b, b->stream[0], 64 * KIB);
            w[k].in_turn = turns[i].pairs;
        }
        measure(b, turns[i].name, w, 0, 2);
    }
}

static void two_devices(const bench *b)
{
    if (b->other) hot_two_devices(b, "hot_two_devices", b->stream[0], b->other);
}

static void two_devices_default(const bench *b)
{
    if (b->other) hot_two_devices(b, "hot_two_devices_default_stream", NULL, NULL);
}

/* Each group begins with an allocator that has seen no stream yet. */
typedef void (*group)(const bench *);

static const group groups_libc[] = {libc, NULL}, groups_looks[] = {looks, NULL};
/* cudaMalloc and cudaFree go to the driver each time, whatever lies around. */
static const group groups_plain[] = {hot_sizes, churn_alone, threads_own, threads_one, NULL};
static const group groups_caching[] = {hot_sizes,   hot_default,         hot_per_thread, holes_of_few_sizes,
                                       holes_of_many_sizes, churn_alone, churn_beside,   threads_own,
                                       threads_one, threads_in_turn,     two_devices,    two_devices_default,
                                       NULL};

static const group *groups_of(const allocator *a)
{
    if (a == &allocator_libc) return groups_libc;
    if (a == &allocator_looks) return groups_looks;
    return a->caching ? groups_caching : groups_plain;
}

/* ---- a job ------------------------------------------------------------------------------------------------------- */

static const allocator *load(const job *j)
{
    if (!strcmp(j->allocator, "driver")) return &allocator_looks;
    if (!strcmp(j->allocator, "malloc") && !j->conf) return &allocator_libc;
    if (!strcmp(j->allocator, "malloc")) {
        fprintf(stderr, "--conf is for allocators that have settings, and malloc has none\n");
        return NULL;
    }
    const allocator *a = allocator_load(j->allocator, j->conf);
    return a == &allocator_galloc ? &allocator_galloc_default : a;
}

static void open_streams(bench *b, int devices)
{
    int there = 0;
    for (int i = 0; i < PAIRS_THREADS; i++)
        pairs_check(b->a, cudaStreamCreateWithFlags(&b->stream[i], cudaStreamNonBlocking));
    pairs_check(b->a, cudaGetDeviceCount(&there));
    if (there < 2 || devices == 1) return;
    pairs_check(b->a, cudaSetDevice(1));
    pairs_check(b->a, cudaStreamCreateWithFlags(&b->other, cudaStreamNonBlocking));
    pairs_check(b->a, cudaSetDevice(0));
}

static void close_streams(bench *b)
{
    for (int i = 0; i < PAIRS_THREADS; i++) pairs_check(b->a, cudaStreamDestroy(b->stream[i]));
    if (b->other) pairs_check(b->a, cudaStreamDestroy(b->other));
}

static int run_job(const settings *s, const job *j)
{
    bench b = {.a = load(j), .json = s->json};
    if (!b.a) return CLI_USAGE;
    b.conf = allocator_settings(b.a, j->conf);
    if (s->devices) device_count(s->devices);
    if (device_start(false)) return 1;
    open_streams(&b, s->devices);
    for (const group *cases = groups_of(b.a); *cases; cases++) {
        if (b.a->open(j->conf, SIZE_MAX)) return 1;
        (*cases)(&b);
        if (b.a->close()) return 1;
    }
    close_streams(&b);
    device_stop();
    return 0;
}

/* The same program again, for this job alone. */
static void become(const settings *s, const job *j, char *program)
{
    char devices[16];
    char *argv[16] = {program, "--only", (char *)j->allocator};
    int n = 3;
    snprintf(devices, sizeof devices, "%d", s->devices);
    if (s->json) argv[n++] = "--json";
    if (j->conf) argv[n++] = "--conf", argv[n++] = (char *)j->conf;
    if (s->devices) argv[n++] = "--devices", argv[n++] = devices;
    alarm(JOB_SECONDS);
    execv("/proc/self/exe", argv);
    perror("hotpath: /proc/self/exe");
    _exit(1);
}

/* An allocator that fails, crashes or hangs takes none of the others with it. */
static int run_apart(const settings *s, const job *j, char *program)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (!child) become(s, j, program);
    if (child < 0 || waitpid(child, &status, 0) < 0) perror("hotpath");
    else if (WIFEXITED(status) && !WEXITSTATUS(status)) return 0;
    fprintf(stderr, "hotpath: %s with settings \"%s\" ", j->allocator, j->conf ? j->conf : "");
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM) fprintf(stderr, "took over %d s\n", JOB_SECONDS);
    else if (WIFSIGNALED(status)) fprintf(stderr, "was ended by signal %d\n", WTERMSIG(status));
    else fprintf(stderr, "failed with exit status %d\n", WEXITSTATUS(status));
    return 1;
}

/* ---- which jobs -------------------------------------------------------------------------------------------------- */

static const job usual[] = {{"galloc", NULL},
                            {"galloc", "stream_check:off"},
                            {"malloc", NULL},
                            {"cudamalloc", NULL},
                            {"driver", "capturing"},
                            {"driver", "id"},
                            {"driver", "capturing+id,capturing"},
                            {"driver", "capturing+id,capturing+id"},
                            {"async", NULL},
                            {"cub", NULL},
                            {"torch", ""},
                            {"torch", "expandable_segments:True"}};
enum { USUAL = sizeof usual / sizeof *usual };

static void add_job(settings *s, const char *name, const char *conf)
{
    if (s->jobs < JOBS_MAX) s->job[s->jobs++] = (job){name, conf};
}

static bool is_built(const char *name)
{
    return !strcmp(name, "malloc") || !strcmp(name, "driver") || allocator_built(name);
}

/* Of the usual jobs, those that can be done with what was built in; what cannot is said. */
static void add_usual(settings *s, const char *name)
{
    galloc_config config = galloc_config_default();
    if (!is_built(name)) fprintf(stderr, "hotpath: %s is not built in\n", name);
    for (int i = 0; i < USUAL && is_built(name); i++) {
        const job *j = &usual[i];
        if (strcmp(name, j->allocator)) continue;
        if (strcmp(name, "galloc") || !j->conf || !galloc_config_parse(&config, j->conf, NULL, 0))
            add_job(s, name, j->conf);
        else fprintf(stderr, "hotpath: galloc does not know %s: left out\n", j->conf);
    }
}

static bool add_named(settings *s, const char *name)
{
    if (!is_built(name)) return allocator_load(name, NULL); /* it says what is wrong */
    for (int i = 0; i < s->confs; i++) add_job(s, name, s->conf[i]);
    if (!s->confs) add_usual(s, name);
    return true;
}

static bool choose_jobs(settings *s)
{
    static const char *const all[] = {"galloc", "malloc", "cudamalloc", "driver", "async", "cub", "torch"};
    for (int i = 0; i < s->allocators; i++)
        if (!add_named(s, s->allocator[i])) return false;
    for (size_t i = 0; i < sizeof all / sizeof *all && !s->allocators; i++) {
        if (i == 0) add_named(s, all[i]);
        else add_usual(s, all[i]);
    }
    return true;
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

enum { JSON = 1, ONLY, ALLOCATOR, CONF, DEVICES, LIST, BACKEND, HELP };

static bool set_option(settings *s, int option)
{
    uint64_t n = 0;
    switch (option) {
    case JSON: s->json = true; return true;
    case ONLY: s->only = optarg; return true;
    case ALLOCATOR: return s->allocators < NAMED_MAX && (s->allocator[s->allocators++] = optarg);
    case CONF: return s->confs < NAMED_MAX && (s->conf[s->confs++] = optarg);
    case DEVICES:
        if (!cli_number("--devices", optarg, 1, 8, &n)) return false;
        s->devices = (int)n;
        return true;
    case LIST: s->list = true; return true;
    case BACKEND: s->backend = optarg; return true;
    case HELP: fputs(help, stdout); exit(0);
    default: return false; /* getopt has said why */
    }
}

static bool read_options(settings *s, int argc, char **argv)
{
    static const struct option options[] = {
        {"json", no_argument, NULL, JSON},
        {"only", required_argument, NULL, ONLY},
        {"allocator", required_argument, NULL, ALLOCATOR},
        {"conf", required_argument, NULL, CONF},
        {"devices", required_argument, NULL, DEVICES},
        {"list", no_argument, NULL, LIST},
        {"backend", required_argument, NULL, BACKEND},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}
    };
    galloc_config config;
    int option;
    *s = (settings){.json = false};
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1)
        if (!set_option(s, option)) return false;
    if (optind < argc) fprintf(stderr, "unexpected argument \"%s\"\n", argv[optind]);
    for (int i = 0; i < s->confs && !s->allocators && !s->only; i++)
        if (!allocator_conf(&config, s->conf[i])) return false;
    return optind == argc;
}

int main(int argc, char **argv)
{
    settings s;
    int failures = 0;
    if (!read_options(&s, argc, argv)) {
        fprintf(stderr, "hotpath --help lists the options\n");
        return CLI_USAGE;
    }
    if (!cli_backend(s.backend, argv)) return CLI_USAGE;
    if (s.list) return allocator_list(stdout), 0;
    if (s.only) return run_job(&s, &(job){s.only, s.confs ? s.conf[0] : NULL});
    if (!choose_jobs(&s)) return CLI_USAGE;
    if (!s.json) print_head();
    for (int i = 0; i < s.jobs; i++) failures += run_apart(&s, &s.job[i], argv[0]);
    return failures ? 1 : 0;
}
