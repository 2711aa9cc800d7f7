/* replay.c - replays allocator traces and prints what they cost: memory, time, calls into the driver.

   build/replay --help says how it is called and what the figures mean. */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "cli.h"
#include "device.h"
#include "run.h"
#include "whatif.h"

static const char help[] =
    "usage: replay [options] TRACE...\n"
    "\n"
    "Replays logs of allocator calls and prints a table: RMM's, and those of galloc's setting trace; plain or gzip.\n"
    "\n"
    "  --json              a line of JSON for each trace instead\n"
    "  --allocator NAME    galloc (default) or cudamalloc; with --backend cuda, where they were found when this was\n"
    "                      built, also async (cudaMallocAsync), cub (CUB's caching allocator) and torch (PyTorch's)\n"
    "  --conf STRING       settings of galloc's pool, as in GALLOC_CONF, or of torch, as in PYTORCH_CUDA_ALLOC_CONF\n"
    "  --limit-mib N       the allocator may hold at most N MiB\n"
    "  --fit               also find the smallest limit that replays with no out-of-memory, in steps of 2 MiB\n"
    "  --repeat N          replay N times in the same process and pool\n"
    "  --no-room           blocks get no room to grow, whatever galloc's log says; what does not fit is copied\n"
    "  --busy              queued work that runs well behind the host uses every block\n"
    "  --verify            queued work writes every byte of every block and checks it before the free\n"
    "  --timeline FILE     also write live and held bytes over the calls, at most 120 rows for a pass: the most since\n"
    "                      the row before\n"
    "  --threads           each thread of the log is one here, too; they take turns, in the order of the log\n"
    "  --snapshot FILE     also save galloc's state after the last row, as galloc_snapshot_save does, before what is\n"
    "                      left is freed\n"
    "  --calls             also print which of the driver's functions are called, how often and for how long, counted\n"
    "                      by functions that stand before them; all the while work is held that only then ends, so\n"
    "                      that a call which waits for the device is found\n"
    "  --what-if           replay with other settings and other allocators' rules instead, and say which one suits the\n"
    "                      trace; --conf, several times if need be, adds settings\n"
    "  --svg FILE          with --what-if: also draw what was held, and driver time\n"
    "  --backend NAME      sim (default: a simulated device) or cuda (a GPU)\n"
    "  --help              this text\n"
    "\n"
    "Memory and calls are counted by the device, and galloc's own counters must agree.\n"
    "reserved_ratio is peak_reserved_bytes, and fit_ratio the limit found by --fit, over peak_live_bytes.\n"
    "mean_reserved_bytes is what was held after each 64th call, on the average; collections are galloc's count.\n"
    "ns_per_op is the host time of a call in the first pass, ns_per_op_own without the time in the driver (as galloc\n"
    "measures it), ns_per_op_warm in the last.\n"
    "What async and torch hold is by their own account, and what peers call is not counted.\n"
    "driver_calls and driver_us_model (time, by a model of an H200) leave out looks: which stream or context is it,\n"
    "is it being captured? looks and looks_us_model have them. In the time, not in the count, are calls for start,\n"
    "end, contexts and capture modes. These keys are about all passes, those with _warm about the last of several.\n"
    "With --busy or --verify the device says what blocks went through before their first use. moves_seen counts pages\n"
    "used last at other addresses (in moves, galloc's count, are also pages never used), moves_busy those that work\n"
    "in the queue still used; handovers counts blocks with bytes that another stream used last, handovers_busy those\n"
    "where that work was still in the queue.\n"
    "--what-if is for the simulated device. Each setting has a process of its own, and queued work runs behind the\n"
    "host as with --busy. PyTorch's rules and cudaMalloc know no room: they are tried with --no-room. Two runs print\n"
    "the same, but for settings in which time counts (gc_age, gc_threshold). The smallest limit is sought as with\n"
    "--fit. docs/what-if.md has the rules of what is recommended, and says what --json prints.\n"
    "A log may have up to 2^24 streams. Once 1024 are open, those that the log names no more are retired and\n"
    "destroyed.\n"
    "verify_errors counts all that the device found wrong, races too. What does not apply is null.\n"
    "\n"
    "Exit status: 0; 1 for a failure or something found wrong; 2 for a wrong option, or one for something that is\n"
    "not built in; 3 when galloc's counters and the device's differ.\n";

typedef struct settings {
    run_options run;
    bool json;
    const char *allocator, *backend, *timeline;
    bool what_if;
    whatif_options other; /* for what_if */
} settings;

/* ---- options ----------------------------------------------------------------------------------------------------- */

enum { JSON = 1, ALLOCATOR, CONF, LIMIT_MIB, FIT, REPEAT, NO_ROOM, BUSY, VERIFY, TIMELINE, THREADS, SNAPSHOT, CALLS,
       WHAT_IF, SVG, BACKEND, HELP };

static const struct option long_options[] = {
    {"json", no_argument, NULL, JSON},
    {"allocator", required_argument, NULL, ALLOCATOR},
    {"conf", required_argument, NULL, CONF},
    {"limit-mib", required_argument, NULL, LIMIT_MIB},
    {"fit", no_argument, NULL, FIT},
    {"repeat", required_argument, NULL, REPEAT},
    {"no-room", no_argument, NULL, NO_ROOM},
    {"busy", no_argument, NULL, BUSY},
    {"verify", no_argument, NULL, VERIFY},
    {"timeline", required_argument, NULL, TIMELINE},
    {"threads", no_argument, NULL, THREADS},
    {"snapshot", required_argument, NULL, SNAPSHOT},
    {"calls", no_argument, NULL, CALLS},
    {"what-if", no_argument, NULL, WHAT_IF},
    {"svg", required_argument, NULL, SVG},
    {"backend", required_argument, NULL, BACKEND},
    {"help", no_argument, NULL, HELP},
    {NULL, 0, NULL, 0}
};

static bool set_option(settings *s, int option)
{
    uint64_t n = 0;
    switch (option) {
    case JSON: s->json = true; return true;
    case ALLOCATOR: s->allocator = optarg; return true;
    case CONF:
        if (s->other.confs < WHATIF_CONFS_MAX) s->other.conf[s->other.confs] = optarg;
        s->other.confs++;
        s->run.conf = optarg;
        return true;
    case LIMIT_MIB:
        if (!cli_number("--limit-mib", optarg, 1, SIZE_MAX >> 20, &n)) return false;
        s->run.limit = (size_t)n << 20;
        return true;
    case FIT: s->run.fit = true; return true;
    case REPEAT:
        if (!cli_number("--repeat", optarg, 1, 1000000, &n)) return false;
        s->run.repeat = (int)n;
        return true;
    case NO_ROOM: s->run.no_room = true; return true;
    case BUSY: s->run.busy = true; return true;
    case VERIFY: s->run.verify = true; return true;
    case TIMELINE: s->timeline = optarg; return true;
    case THREADS: s->run.threads = true; return true;
    case SNAPSHOT: s->run.snapshot = optarg; return true;
    case CALLS: s->run.calls = true; return true;
    case WHAT_IF: s->what_if = true; return true;
    case SVG: s->other.svg = optarg; return true;
    case BACKEND: s->backend = optarg; return true;
    case HELP: fputs(help, stdout); exit(0);
    default: return false; /* getopt has said why */
    }
}

static bool agree_on_what_if(const settings *s)
{
    if (!s->what_if && s->other.svg) fprintf(stderr, "--svg is for --what-if\n");
    else if (s->what_if && (s->allocator || s->timeline || s->run.threads || s->run.snapshot || s->run.verify ||
                            s->run.calls || s->run.no_room))
        fprintf(stderr, "--what-if has no --allocator, --timeline, --threads, --snapshot, --verify, --calls or "
                        "--no-room\n");
    else if (s->what_if && s->other.confs > WHATIF_CONFS_MAX)
        fprintf(stderr, "--what-if takes --conf %d times at most\n", WHATIF_CONFS_MAX);
    else return true;
    return false;
}

static bool read_options(settings *s, int argc, char **argv)
{
    int option;
    *s = (settings){.run = {.limit = SIZE_MAX, .repeat = 1}};
    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1)
        if (!set_option(s, option)) return false;
    if (!agree_on_what_if(s)) return false;
    if (!s->allocator) s->allocator = "galloc";
    if (s->run.fit && s->run.limit != SIZE_MAX) fprintf(stderr, "--fit seeks a limit: leave out --limit-mib\n");
    else if (s->run.calls && strcmp(s->allocator, "galloc")) fprintf(stderr, "--calls is for galloc\n");
    else if (s->run.calls && s->run.fit) fprintf(stderr, "--fit runs out of memory on purpose: leave out --calls\n");
    else if (s->run.calls && s->run.threads) fprintf(stderr, "--calls are those of one thread: leave out --threads\n");
    else if (s->run.snapshot && strcmp(s->allocator, "galloc")) fprintf(stderr, "--snapshot is for galloc\n");
    else if (s->run.snapshot && s->run.fit) fprintf(stderr, "--snapshot is of one replay: leave out --fit\n");
    else if (s->timeline && s->run.fit) fprintf(stderr, "--timeline is of one replay: leave out --fit\n");
    else if (optind == argc) fprintf(stderr, "no trace is given; there are ten in bench/traces\n");
    else return true;
    return false;
}

/* ---- figures ----------------------------------------------------------------------------------------------------- */

static double reserved_ratio(const run_result *r)
{
    return (double)r->peak_reserved / (double)r->peak_live;
}

static double fit_ratio(const run_result *r)
{
    return r->fit_limit ? (double)r->fit_limit / (double)r->peak_live : NAN;
}

static int64_t verify_errors(const settings *s, const run_result *r)
{
    return s->run.verify ? r->findings : -1;
}

/* A count of calls; -1 where the account does not see those of this allocator. */
static int64_t seen(const settings *s, int64_t calls)
{
    return s->run.allocator->counted ? calls : -1;
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static void json_integer(const char *key, int64_t value)
{
    if (value < 0) printf(", \"%s\": null", key);
    else printf(", \"%s\": %" PRId64, key, value);
}

static void json_text(const char *key, const char *value)
{
    printf(", \"%s\": ", key);
    cli_json_text(stdout, value);
}

static void json_real(const char *key, double value, int digits)
{
    if (isnan(value)) printf(", \"%s\": null", key);
    else printf(", \"%s\": %.*f", key, digits, value);
}

static void print_json(const settings *s, const trace *t, const run_result *r)
{
    fputs("{\"trace\": ", stdout);
    cli_json_text(stdout, t->name);
    printf(", \"allocator\": \"%s\", \"backend\": \"%s\"", s->run.allocator->name, device_backend);
    json_integer("ops", (int64_t)r->ops);
    json_integer("peak_live_bytes", (int64_t)r->peak_live);
    json_integer("peak_reserved_bytes", (int64_t)r->peak_reserved);
    json_real("reserved_ratio", reserved_ratio(r), 4);
    json_real("fit_ratio", fit_ratio(r), 4);
    json_integer("oom", (int64_t)r->oom);
    json_real("ns_per_op", r->ns_per_op, 1);
    json_real("ns_per_op_warm", r->ns_per_op_warm, 1);
    json_real("ns_per_op_own", r->ns_per_op_own, 1);
    json_integer("driver_calls", seen(s, r->driver_calls));
    json_real("driver_us_model", r->driver_us, 1);
    json_integer("moves", r->moves);
    json_integer("verify_errors", verify_errors(s, r));
    json_text("conf", allocator_settings(s->run.allocator, s->run.conf));
    json_integer("driver_calls_warm", seen(s, r->driver_calls_warm));
    json_integer("waits", r->waits);
    json_integer("findings", r->findings);
    json_integer("races", r->races);
    json_real("unfinished_at_free", r->unfinished, 4);
    json_integer("looks", r->looks);
    json_real("looks_us_model", r->looks_us, 1);
    json_real("driver_us_model_warm", r->driver_us_warm, 1);
    json_real("looks_us_model_warm", r->looks_us_warm, 1);
    json_integer("moves_seen", r->moves_seen);
    json_integer("moves_busy", r->moves_busy);
    json_integer("handovers", r->handovers);
    json_integer("handovers_busy", r->handovers_busy);
    json_real("mean_reserved_bytes", r->mean_reserved, 0);
    json_integer("collections", r->collections);
    puts("}");
}

/* ---- a table ----------------------------------------------------------------------------------------------------- */

static void cell_integer(int width, int64_t value)
{
    if (value < 0) printf(" %*s", width, "-");
    else printf(" %*" PRId64, width, value);
}

static void cell_real(int width, double value, int digits)
{
    if (isnan(value)) printf(" %*s", width, "-");
    else printf(" %*.*f", width, digits, value);
}

static void print_head(const settings *s)
{
    char device[256];
    device_describe(device, sizeof device);
    printf("%s on: %s\n\n", s->run.allocator->name, device);
    printf("%-24s %7s %9s %9s %7s %7s %4s %7s %7s %9s %10s %6s %6s\n", "trace", "calls", "live MiB", "held MiB",
           "held", "fit", "oom", "ns/call", "warm", "driver", "driver ms", "moves", "errors");
    printf("%-24s %7s %9s %9s %7s %7s %4s %7s %7s %9s %10s\n", "", "", "peak", "peak", "/live", "/live", "", "", "",
           "calls", "model");
}

static void print_row(const settings *s, const trace *t, const run_result *r)
{
    printf("%-24.24s", t->name);
    cell_integer(7, (int64_t)r->ops);
    cell_integer(9, (int64_t)(r->peak_live >> 20));
    cell_integer(9, (int64_t)(r->peak_reserved >> 20));
    cell_real(7, reserved_ratio(r), 3);
    cell_real(7, fit_ratio(r), 3);
    cell_integer(4, (int64_t)r->oom);
    cell_real(7, r->ns_per_op, 0);
    cell_real(7, r->ns_per_op_warm, 0);
    cell_integer(9, seen(s, r->driver_calls));
    cell_real(10, r->driver_us / 1e3, 2);
    cell_integer(6, r->moves);
    cell_integer(6, verify_errors(s, r));
    putchar('\n');
    fflush(stdout);
}

/* Sums; of ratios and times per call, the sums of logarithms. */
typedef struct totals {
    int n;
    double held, fit, ns, warm;
    double driver_us;
    int64_t ops, oom, driver_calls, moves, errors, findings;
} totals;

static void add(totals *sum, const settings *s, const run_result *r)
{
    sum->n++;
    sum->held += log(reserved_ratio(r));
    sum->fit += log(fit_ratio(r));
    sum->ns += log(r->ns_per_op);
    sum->warm += log(r->ns_per_op_warm);
    sum->ops += (int64_t)r->ops;
    sum->oom += (int64_t)r->oom;
    sum->driver_calls += seen(s, r->driver_calls);
    sum->driver_us += r->driver_us;
    sum->moves += r->moves;
    sum->errors += verify_errors(s, r);
    sum->findings += r->findings;
}

static void print_totals(const totals *sum)
{
    double n = sum->n;
    printf("\n%-24s %7s %9s %9s", "geometric mean", "", "", "");
    cell_real(7, exp(sum->held / n), 3);
    cell_real(7, exp(sum->fit / n), 3);
    printf(" %4s", "");
    cell_real(7, exp(sum->ns / n), 0);
    cell_real(7, exp(sum->warm / n), 0);
    printf("\n%-24s", "total");
    cell_integer(7, sum->ops);
    printf(" %9s %9s %7s %7s", "", "", "", "");
    cell_integer(4, sum->oom);
    printf(" %7s %7s", "", "");
    cell_integer(9, sum->driver_calls);
    cell_real(10, sum->driver_us / 1e3, 2);
    cell_integer(6, sum->moves);
    cell_integer(6, sum->errors);
    putchar('\n');
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

static int replay_file(const settings *s, const char *path, totals *sum)
{
    trace t;
    run_result result;
    run_progress("%s: reading", path);
    if (trace_load(&t, path)) return RUN_FAILED;
    int status = run_trace(&t, &s->run, &result);
    if (!status) {
        if (s->json) print_json(s, &t, &result);
        else print_row(s, &t, &result);
        fflush(stdout);
        add(sum, s, &result);
    }
    trace_free(&t);
    return status;
}

static bool timeline_open(settings *s)
{
    if (!s->timeline) return true;
    s->run.timeline = fopen(s->timeline, "w");
    if (s->run.timeline) fputs(RUN_TIMELINE_HEAD "\n", s->run.timeline);
    else fprintf(stderr, "%s cannot be written: %s\n", s->timeline, strerror(errno));
    return s->run.timeline != NULL;
}

static bool timeline_close(const settings *s)
{
    if (!s->run.timeline || !fclose(s->run.timeline)) return true;
    fprintf(stderr, "%s cannot be written: %s\n", s->timeline, strerror(errno));
    return false;
}

static int what_if(settings *s, char **path, int paths)
{
    galloc_config config;
    if (strcmp(device_backend, "sim")) {
        fprintf(stderr, "--what-if is for the simulated device: leave out --backend\n");
        return CLI_USAGE;
    }
    for (int i = 0; i < s->other.confs; i++)
        if (!allocator_conf(&config, s->other.conf[i])) return CLI_USAGE;
    s->other.limit = s->run.limit;
    s->other.repeat = s->run.repeat;
    s->other.json = s->json;
    return whatif(&s->other, path, paths);
}

int main(int argc, char **argv)
{
    settings s;
    totals sum = {0};
    int status = RUN_OK;
    if (!read_options(&s, argc, argv)) {
        fprintf(stderr, "replay --help lists the options\n");
        return CLI_USAGE;
    }
    if (!cli_backend(s.backend, argv)) return CLI_USAGE;
    if (s.what_if) return what_if(&s, argv + optind, argc - optind);
    s.run.allocator = allocator_load(s.allocator, s.run.conf);
    if (!s.run.allocator) return CLI_USAGE;
    if (!timeline_open(&s)) return RUN_FAILED;
    if (s.run.calls) calls_watch();
    if (!s.json) print_head(&s);
    for (int i = optind; i < argc && !status; i++) status = replay_file(&s, argv[i], &sum);
    if (!s.json && sum.n) print_totals(&sum);
    if (s.run.calls) calls_print(s.json);
    if (!timeline_close(&s) && !status) status = RUN_FAILED;
    return status || !sum.findings ? status : RUN_FAILED;
}
