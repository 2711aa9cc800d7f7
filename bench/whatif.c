/* whatif.c - whatif.h, but for the chart. Each replay is a process of its own: none knows anything of another one. */

#define _GNU_SOURCE
#include "whatif.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"
#include "device.h"

#define LIVE_ROW 0
#define EVERY 64 /* calls: how often run.c looks at what is held */

/* What is always tried. Times of the host decide what gc_threshold and gc_age do: two replays could differ. What
   lane_bytes and stats save is time in galloc, of which nothing is told here. PyTorch and cudaMalloc know no room
   (it would be memory there): their users copy. */
static const whatif_row tried[] = {
    {.name = "live bytes: nothing holds less", .kind = ADVICE_OTHER},
    {.name = "the defaults", .allocator = "galloc", .conf = "", .kind = ADVICE_DEFAULTS},
    {.name = "overhead:0", .allocator = "galloc", .conf = "overhead:0", .kind = ADVICE_SETTING},
    {.name = "overhead:0.1", .allocator = "galloc", .conf = "overhead:0.1", .kind = ADVICE_SETTING},
    {.name = "overhead:0.2", .allocator = "galloc", .conf = "overhead:0.2", .kind = ADVICE_SETTING},
    {.name = "growth:16M", .allocator = "galloc", .conf = "growth:16M", .kind = ADVICE_SETTING},
    {.name = "growth:64M", .allocator = "galloc", .conf = "growth:64M", .kind = ADVICE_SETTING},
    {.name = "growth:256M", .allocator = "galloc", .conf = "growth:256M", .kind = ADVICE_SETTING},
    {.name = "strategy:heuristic", .allocator = "galloc", .conf = "strategy:heuristic", .kind = ADVICE_SETTING},
    {.name = "strategy:pooled", .allocator = "galloc", .conf = "strategy:pooled", .kind = ADVICE_SETTING},
    {.name = "reuse:completed+followed", .allocator = "galloc", .conf = "reuse:completed+followed",
     .kind = ADVICE_SETTING},
    {.name = "expandable_segments:False", .allocator = "galloc", .conf = "expandable_segments:False",
     .kind = ADVICE_SETTING},
    {.name = "like:pytorch,expandable_segments:True", .allocator = "galloc",
     .conf = "like:pytorch,expandable_segments:True", .kind = ADVICE_SETTING},
    {.name = "like:pytorch (PyTorch's rules)", .allocator = "galloc", .conf = "like:pytorch", .kind = ADVICE_PYTORCH,
     .no_room = true},
    {.name = "backend:cudaMalloc", .allocator = "galloc", .conf = "backend:cudaMalloc", .kind = ADVICE_OTHER,
     .no_room = true},
    {.name = "cudaMalloc, without galloc", .allocator = "cudamalloc", .conf = "", .kind = ADVICE_CUDAMALLOC},
};
enum { TRIED = sizeof tried / sizeof *tried };

bool whatif_runs(const whatif_row *row)
{
    return !row->status;
}

bool whatif_fits(const whatif_row *row)
{
    return whatif_runs(row) && !row->r.oom;
}

/* ---- replaying, in a process for each setting -------------------------------------------------------------------- */

/* The queued work of a GPU's program runs behind the host: so it does here. */
static int measure(const whatif_options *o, const trace *t, const whatif_row *row, bool fit, int out)
{
    run_options options = {.conf = row->conf, .limit = fit ? SIZE_MAX : o->limit, .repeat = o->repeat, .busy = true,
                           .no_room = row->no_room, .fit = fit};
    run_result result;
    options.allocator = allocator_load(row->allocator, row->conf);
    int status = options.allocator ? run_trace(t, &options, &result) : RUN_FAILED;
    if (!status && result.findings) status = RUN_FAILED;
    if (!status && write(out, &result, sizeof result) != (ssize_t)sizeof result) status = RUN_FAILED;
    return status;
}

static int answer(pid_t child, int in, run_result *result)
{
    size_t got = 0;
    int status = 0;
    while (got < sizeof *result) {
        ssize_t n = read(in, (char *)result + got, sizeof *result - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        got += (size_t)n;
    }
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return RUN_FAILED;
    if (WIFSIGNALED(status)) return 128 + WTERMSIG(status);
    if (!WEXITSTATUS(status) && got < sizeof *result) return RUN_FAILED;
    return WEXITSTATUS(status);
}

/* The process that calls this calls nothing of CUDA, or it could not fork. */
static void replay_row(const whatif_options *o, const trace *t, whatif_row *row, bool fit)
{
    int ends[2];
    row->status = RUN_FAILED;
    fflush(NULL);
    if (pipe(ends)) return;
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        int status = measure(o, t, row, fit, ends[1]);
        fflush(NULL);
        _exit(status);
    }
    close(ends[1]);
    if (child > 0) row->status = answer(child, ends[0], &row->r);
    close(ends[0]);
    run_progress(NULL);
    if (row->status && row->status != RUN_FAILED && row->status != RUN_MISMATCH)
        fprintf(stderr, "%s: the replay with %s ended by signal %d\n", t->name, row->name, row->status - 128);
    else if (row->status)
        fprintf(stderr, "%s: no replay with %s\n", t->name, row->name);
}

/* ---- a log ------------------------------------------------------------------------------------------------------- */

/* The least that could have been held, looked at as often as what was. All passes are alike. */
static bool live_row(const trace *t, whatif_row *row)
{
    uint64_t *bytes = calloc(t->slots, sizeof *bytes), live = 0;
    double sum = 0;
    size_t looks = 0;
    if (!bytes) return false;
    for (size_t i = 0; i < t->n; i++) {
        const trace_op *op = &t->op[i];
        live += op->bytes ? op->bytes : -bytes[op->slot];
        bytes[op->slot] = op->bytes;
        if (i % EVERY) continue;
        sum += (double)live;
        looks++;
    }
    free(bytes);
    row->r = (run_result){.ops = t->n, .peak_live = t->peak_live, .peak_reserved = t->peak_live,
                          .mean_reserved = sum / (double)looks, .driver_calls = -1, .driver_us = NAN, .moves = -1,
                          .waits = -1, .looks = -1, .looks_us = NAN};
    return true;
}

static void add_user_rows(const whatif_options *o, whatif_log *log)
{
    for (int i = 0; i < o->confs; i++)
        log->row[log->rows++] = (whatif_row){.name = o->conf[i], .allocator = "galloc", .conf = o->conf[i],
                                             .kind = ADVICE_SETTING};
}

/* The smallest limit is sought with the defaults, and is then a setting like others. */
static void add_fit_row(const whatif_options *o, const trace *t, whatif_log *log)
{
    whatif_row seek = tried[1], *row = &log->row[log->rows];
    run_progress_of("the smallest limit: ");
    replay_row(o, t, &seek, true);
    log->fit = whatif_runs(&seek) ? seek.r.fit_limit : 0;
    if (!log->fit) return;
    snprintf(log->fit_name, sizeof log->fit_name, "memory_limit:%zuM", log->fit >> 20);
    *row = (whatif_row){.name = log->fit_name, .allocator = "galloc", .conf = log->fit_name, .kind = ADVICE_OTHER};
    log->rows++;
    whatif_options alone = *o;
    alone.limit = SIZE_MAX;
    replay_row(&alone, t, row, false);
}

static void advise(whatif_log *log)
{
    advice_row row[WHATIF_ROWS_MAX];
    advice_log a = {.row = row, .rows = log->rows, .seconds = log->seconds, .live = log->live, .limit = log->limit,
                    .fit = log->fit, .fit_us = NAN};
    for (int i = 0; i < log->rows; i++) {
        const whatif_row *w = &log->row[i];
        row[i] = (advice_row){.name = w->name, .kind = w->kind, .fits = whatif_fits(w), .held = w->r.peak_reserved,
                              .driver_calls = w->r.driver_calls, .driver_us = w->r.driver_us};
    }
    if (log->fit && whatif_fits(&log->row[log->rows - 1])) a.fit_us = log->row[log->rows - 1].r.driver_us;
    advice_give(&a, &log->advice);
}

/* What went wrong first, though the other settings are replayed nevertheless. */
static int replay_log(const whatif_options *o, const trace *t, whatif_log *log)
{
    char progress[160];
    int status = RUN_OK;
    *log = (whatif_log){.calls = t->n, .live = t->peak_live, .seconds = t->seconds * o->repeat, .limit = o->limit,
                        .rows = TRIED};
    snprintf(log->name, sizeof log->name, "%s", t->name);
    memcpy(log->row, tried, sizeof tried);
    add_user_rows(o, log);
    if (!live_row(t, &log->row[LIVE_ROW])) return RUN_FAILED;
    for (int i = LIVE_ROW + 1; i < log->rows; i++) {
        snprintf(progress, sizeof progress, "%d of %d, %.80s: ", i, log->rows - 1, log->row[i].name);
        run_progress_of(progress);
        replay_row(o, t, &log->row[i], false);
    }
    add_fit_row(o, t, log);
    run_progress_of("");
    for (int i = 0; i < log->rows && !status; i++) status = log->row[i].status;
    advise(log);
    return status > RUN_MISMATCH ? RUN_FAILED : status;
}

/* ---- a table ----------------------------------------------------------------------------------------------------- */

static void cell(int width, int64_t value)
{
    if (value < 0) printf(" %*s", width, "-");
    else printf(" %*" PRId64, width, value);
}

static void note(const whatif_log *log, int i)
{
    const whatif_row *w = &log->row[i];
    if (w->r.oom) printf("  out of memory, %zu times", w->r.oom);
    else if (i == log->advice.recommended) printf("  recommended");
}

static void print_row(const whatif_log *log, int i)
{
    const whatif_row *w = &log->row[i];
    const run_result *r = &w->r;
    printf("%-38.38s", w->name);
    if (!whatif_runs(w)) {
        puts(" failed");
        return;
    }
    cell(9, (int64_t)(r->peak_reserved >> 20));
    cell(9, (int64_t)r->mean_reserved >> 20);
    printf(" %9.3f", (double)r->peak_reserved / (double)r->peak_live);
    cell(8, r->driver_calls);
    if (isnan(r->driver_us)) printf(" %10s", "-");
    else printf(" %10.2f", r->driver_us / 1e3);
    cell(7, r->moves);
    cell(6, r->waits);
    note(log, i);
    putchar('\n');
}

/* Broken into lines between words. */
static void print_advice(const char *text)
{
    size_t column = 0;
    while (*text) {
        size_t n = strcspn(text, " ");
        if (column && column + 1 + n > 116) printf("\n   "), column = 3;
        column += (size_t)printf(column ? " %.*s" : "%.*s", (int)n, text);
        text += n;
        while (*text == ' ') text++;
    }
    putchar('\n');
}

static void print_log(const whatif_log *log)
{
    printf("%s: %zu calls", log->name, log->calls);
    if (log->seconds > 0) printf(" in %.1f s", log->seconds);
    printf(", %zu MiB live at most", log->live >> 20);
    if (log->limit != SIZE_MAX) printf("; not more than %zu MiB may be held", log->limit >> 20);
    printf("\n\n%-38s %9s %9s %9s %8s %10s %7s %6s\n", "settings", "held MiB", "held MiB", "held", "driver",
           "driver ms", "moves", "waits");
    printf("%-38s %9s %9s %9s %8s %10s\n", "", "peak", "mean", "/live", "calls", "model");
    for (int i = 0; i < log->rows; i++) print_row(log, i);
    putchar('\n');
    for (int i = 0; i < log->advice.lines; i++) print_advice(log->advice.line[i]);
    putchar('\n');
    fflush(stdout);
}

static void print_head(void)
{
    char device[256];
    device_describe(device, sizeof device);
    printf("What if? On: %s;\nqueued work runs behind the host\n\n", device);
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static void json_text(const char *key, const char *value)
{
    printf("\"%s\": ", key);
    cli_json_text(stdout, value);
}

static void json_integer(const char *key, int64_t value)
{
    if (value < 0) printf(", \"%s\": null", key);
    else printf(", \"%s\": %" PRId64, key, value);
}

static void json_real(const char *key, double value, int digits)
{
    if (isnan(value)) printf(", \"%s\": null", key);
    else printf(", \"%s\": %.*f", key, digits, value);
}

static void json_row(const whatif_log *log, int i)
{
    const whatif_row *w = &log->row[i];
    const run_result *r = &w->r;
    fputc('{', stdout);
    json_text("trace", log->name);
    fputs(", ", stdout);
    json_text("settings", w->name);
    printf(", \"allocator\": ");
    if (w->allocator) printf("\"%s\", ", w->allocator);
    else printf("null, ");
    json_text("conf", w->conf ? w->conf : "");
    printf(", \"result\": \"%s\"", !whatif_runs(w) ? "failed" : r->oom ? "out of memory" : "ok");
    if (whatif_runs(w)) {
        json_integer("peak_live_bytes", (int64_t)r->peak_live);
        json_integer("peak_reserved_bytes", (int64_t)r->peak_reserved);
        json_real("mean_reserved_bytes", r->mean_reserved, 0);
        json_real("reserved_ratio", (double)r->peak_reserved / (double)r->peak_live, 4);
        json_integer("oom", (int64_t)r->oom);
        json_integer("driver_calls", r->driver_calls);
        json_real("driver_us_model", r->driver_us, 1);
        json_integer("looks", r->looks);
        json_real("looks_us_model", r->looks_us, 1);
        json_integer("moves", r->moves);
        json_integer("waits", r->waits);
    }
    printf(", \"recommended\": %s}\n", i == log->advice.recommended ? "true" : "false");
}

static void json_log(const whatif_log *log)
{
    const advice *a = &log->advice;
    for (int i = 0; i < log->rows; i++) json_row(log, i);
    fputc('{', stdout);
    json_text("trace", log->name);
    json_real("seconds", log->seconds > 0 ? log->seconds : NAN, 6);
    json_integer("smallest_limit_bytes", log->fit ? (int64_t)log->fit : -1);
    printf(", \"recommended_conf\": ");
    if (a->recommended < 0) printf("null");
    else cli_json_text(stdout, log->row[a->recommended].conf);
    printf(", \"advice\": [");
    for (int i = 0; i < a->lines; i++) {
        if (i) printf(", ");
        cli_json_text(stdout, a->line[i]);
    }
    puts("]}");
    fflush(stdout);
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

/* Before the work, lest it be in vain. */
static bool chart_open(const char *file, FILE **svg)
{
    if (!file) return true;
    *svg = fopen(file, "w");
    if (!*svg) fprintf(stderr, "%s cannot be written: %s\n", file, strerror(errno));
    return *svg != NULL;
}

static bool chart_close(const char *file, FILE *svg)
{
    bool broken = svg && ferror(svg);
    if (!svg || (!fclose(svg) && !broken)) return true;
    fprintf(stderr, "%s cannot be written: %s\n", file, strerror(errno));
    return false;
}

int whatif(const whatif_options *o, char **path, int paths)
{
    whatif_log *log = calloc((size_t)paths, sizeof *log);
    FILE *svg = NULL;
    int status = log && chart_open(o->svg, &svg) ? RUN_OK : RUN_FAILED, logs = 0;
    if (!o->json && !status) print_head();
    for (; logs < paths && !status; logs++) {
        trace t;
        run_progress("%s: reading", path[logs]);
        status = trace_load(&t, path[logs]) ? RUN_FAILED : RUN_OK;
        run_progress(NULL);
        if (status) break;
        status = replay_log(o, &t, &log[logs]);
        trace_free(&t);
        if (o->json) json_log(&log[logs]);
        else print_log(&log[logs]);
    }
    if (svg && !status) whatif_chart(svg, log, logs);
    if (!chart_close(o->svg, svg)) status = RUN_FAILED;
    free(log);
    return status;
}
