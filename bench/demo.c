/* demo.c - what galloc does with real programs' allocations: replays traces, prints a table with the figures of other
   allocators beside it, and draws a chart. Called by `make demo`. */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "device.h"
#include "run.h"

static const char help[] =
    "usage: demo [--backend sim|cuda] [--peers FILE] [--svg FILE] TRACE...\n"
    "\n"
    "Replays traces through galloc and prints what it held and called, beside measured figures of other allocators.\n"
    "\n"
    "  --backend NAME  sim (default: a simulated device) or cuda (a GPU)\n"
    "  --peers FILE    the others' figures, as bench/results/peers-h200.csv has them\n"
    "  --svg FILE      also draw a chart\n";

enum { TRACES_MAX = 64 };
enum { GALLOC, EXPANDABLE, ASYNC, NATIVE, ALLOCATORS };

static const char *const allocator_name[ALLOCATORS] = {"galloc", "PyTorch, expandable segments", "cudaMallocAsync",
                                                       "PyTorch, native"};

/* Peak memory held over peak memory live, by trace and allocator; NAN: not known. */
typedef struct row {
    char name[256];
    double held[ALLOCATORS];
} row;

typedef struct demo {
    const char *backend, *peers_file, *svg_file;
    char device[256];
    char peers_from[256]; /* where the others' figures are from: the first line of their file */
    row peer[TRACES_MAX];
    int peers;
    row result[TRACES_MAX + 1]; /* the last one: geometric means */
    int results;
    size_t calls;
    int64_t driver_calls;
} demo;

/* ---- the others' figures ----------------------------------------------------------------------------------------- */

#define PEERS_HEADER "trace,peak_live_mib,native_reserved,native_fit,native_ns,expandable_reserved,"

static bool read_peer(row *r, const char *line)
{
    return sscanf(line, "%255[^,],%*f,%lf,%*f,%*f,%lf,%*f,%*f,%lf,", r->name, &r->held[NATIVE], &r->held[EXPANDABLE],
                  &r->held[ASYNC]) == 4;
}

static bool read_peer_lines(demo *d, FILE *file)
{
    char line[512];
    bool headed = false;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = '\0';
        if (line[0] == '#') {
            if (!d->peers_from[0]) snprintf(d->peers_from, sizeof d->peers_from, "%s", line + 1 + (line[1] == ' '));
        } else if (!headed) {
            headed = !strncmp(line, PEERS_HEADER, strlen(PEERS_HEADER));
            if (!headed) return false;
        } else if (d->peers == TRACES_MAX || !read_peer(&d->peer[d->peers++], line)) {
            return false;
        }
    }
    return headed && d->peers_from[0];
}

static bool read_peers(demo *d)
{
    FILE *file = d->peers_file ? fopen(d->peers_file, "r") : NULL;
    if (!d->peers_file) return true;
    bool read = file && read_peer_lines(d, file);
    if (!file) fprintf(stderr, "%s: %s\n", d->peers_file, strerror(errno));
    else if (!read) fprintf(stderr, "%s: no figures like those of bench/results/peers-h200.csv\n", d->peers_file);
    if (file) fclose(file);
    return read;
}

static const row *find_peer(const demo *d, const char *name)
{
    static const row unknown = {"", {NAN, NAN, NAN, NAN}};
    for (int i = 0; i < d->peers; i++)
        if (!strcmp(d->peer[i].name, name)) return &d->peer[i];
    return &unknown;
}

/* ---- a table ----------------------------------------------------------------------------------------------------- */

static void print_head(const demo *d)
{
    printf("\ngalloc, replaying the allocations of real programs on a\n  %s\n\n", d->device);
    printf("%-22s %7s %7s %8s %9s %9s   peak memory held / peak memory live\n", "", "", "driver", "per 1000",
           "MiB live", "MiB held");
    printf("%-22s %7s %7s %8s %9s %9s   %6s | %7s %10s %9s\n", "trace", "calls", "calls", "calls", "(peak)", "(peak)",
           "galloc", "PyTorch", "PyTorch", "cudaMal-");
    printf("%-22s %7s %7s %8s %9s %9s   %6s | %7s %10s %9s\n", "", "", "", "", "", "", "", "native", "expandable",
           "locAsync");
}

static void print_ratios(const row *r)
{
    printf("   %6.3f |", r->held[GALLOC]);
    if (isnan(r->held[NATIVE])) printf(" %7s %10s %9s\n", "-", "-", "-");
    else printf(" %7.3f %10.3f %9.3f\n", r->held[NATIVE], r->held[EXPANDABLE], r->held[ASYNC]);
}

static void print_calls(const char *name, size_t calls, int64_t made)
{
    printf("%-22.22s %7zu %7lld %8.1f", name, calls, (long long)made, 1000 * (double)made / (double)calls);
}

static void print_row(const row *r, const run_result *result)
{
    print_calls(r->name, result->ops, result->driver_calls);
    printf(" %9zu %9zu", result->peak_live >> 20, result->peak_reserved >> 20);
    print_ratios(r);
    fflush(stdout);
}

/* The means stand behind the last result, as one more row. */
static void print_means(demo *d)
{
    row *mean = &d->result[d->results];
    *mean = (row){.name = "geometric mean"};
    for (int k = 0; k < ALLOCATORS; k++) {
        for (int i = 0; i < d->results; i++) mean->held[k] += log(d->result[i].held[k]) / d->results;
        mean->held[k] = exp(mean->held[k]);
    }
    print_calls("total, geometric mean", d->calls, d->driver_calls);
    printf(" %9s %9s", "", "");
    print_ratios(mean);
}

static void print_notes(const demo *d)
{
    bool simulated = !strcmp(device_backend, "sim");
    puts("\ncalls: the program's allocations and frees; driver calls: galloc's, all that make, map, move or give back");
    puts("memory or order streams, to the pool's end; the others' were not counted, only the memory that they held");
    printf("galloc's figures: counted just now by the %s\n", simulated ? "SIMULATED device" : "program, on this GPU");
    if (d->peers) printf("the others' figures: %s\n", d->peers_from);
}

/* ---- a chart ----------------------------------------------------------------------------------------------------- */

enum { LEFT = 190, RIGHT = 70, WIDTH = 860, TOP = 108, BAR = 11, GROUP = ALLOCATORS * BAR + 14 };
#define PLOT (WIDTH - LEFT - RIGHT)
#define CHART_TOP_PERCENT 100.0

static const char *const color[ALLOCATORS] = {"#1a9850", "#4575b4", "#f09a3e", "#9e9e9e"};

static void svg_text(FILE *svg, double x, double y, const char *attributes, const char *text)
{
    fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    for (; *text; text++) {
        if (*text == '<') fputs("&lt;", svg);
        else if (*text == '&') fputs("&amp;", svg);
        else fputc(*text, svg);
    }
    fputs("</text>\n", svg);
}

static void svg_head(const demo *d, FILE *svg, int height)
{
    char line[512];
    fprintf(svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            WIDTH, height, WIDTH, height);
    svg_text(svg, 16, 28, "font-size=\"18\" font-weight=\"bold\"", "Memory held beyond what is live, at the peak");
    snprintf(line, sizeof line, "galloc: %s", d->device);
    svg_text(svg, 16, 48, "fill=\"#555\"", line);
    if (d->peers) snprintf(line, sizeof line, "others: %s", d->peers_from);
    if (d->peers) svg_text(svg, 16, 64, "fill=\"#555\" font-size=\"11\"", line);
    for (int k = 0, x = LEFT; k < ALLOCATORS; k++) {
        fprintf(svg, "<rect x=\"%d\" y=\"80\" width=\"11\" height=\"11\" fill=\"%s\"/>\n", x, color[k]);
        svg_text(svg, x + 16, 90, "", allocator_name[k]);
        x += 34 + 7 * (int)strlen(allocator_name[k]);
    }
}

static void svg_grid(FILE *svg, int bottom)
{
    for (int percent = 0; percent <= CHART_TOP_PERCENT; percent += 20) {
        char label[16];
        double x = LEFT + PLOT * percent / CHART_TOP_PERCENT;
        fprintf(svg, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#ddd\"/>\n", x, TOP, x, bottom);
        snprintf(label, sizeof label, "%d %%", percent);
        svg_text(svg, x, bottom + 16, "text-anchor=\"middle\" fill=\"#555\"", label);
    }
}

/* A bar that would leave the chart ends at its border; the number beside it says how long it is. */
static void svg_bar(FILE *svg, int k, double held, int y)
{
    char label[32];
    double percent = 100 * (held - 1), width = PLOT * fmin(percent, CHART_TOP_PERCENT) / CHART_TOP_PERCENT;
    if (isnan(held)) return;
    fprintf(svg, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", LEFT, y, fmax(width, 1),
            BAR - 1, color[k]);
    snprintf(label, sizeof label, percent > CHART_TOP_PERCENT ? "%.0f %% \xe2\x86\x92" : "%.1f %%", percent);
    const char *style = k == GALLOC ? "font-size=\"10\" font-weight=\"bold\"" : "font-size=\"10\"";
    svg_text(svg, LEFT + width + 5, y + BAR - 2, style, label);
}

static bool draw(const demo *d)
{
    int groups = d->results + 1, bottom = TOP + groups * GROUP;
    FILE *svg = fopen(d->svg_file, "w");
    if (svg) {
        svg_head(d, svg, bottom + 32);
        svg_grid(svg, bottom);
        for (int i = 0; i < groups; i++) {
            int y = TOP + i * GROUP + 8;
            const char *style = i == d->results ? "text-anchor=\"end\" font-weight=\"bold\"" : "text-anchor=\"end\"";
            svg_text(svg, LEFT - 10, y + ALLOCATORS * BAR / 2 + 4, style, d->result[i].name);
            for (int k = 0; k < ALLOCATORS; k++) svg_bar(svg, k, d->result[i].held[k], y + k * BAR);
        }
        fputs("</svg>\n", svg);
    }
    if (!svg || fclose(svg)) {
        fprintf(stderr, "%s cannot be written: %s\n", d->svg_file, strerror(errno));
        return false;
    }
    printf("chart: %s\n", d->svg_file);
    return true;
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

static bool read_options(demo *d, int argc, char **argv)
{
    enum { BACKEND = 1, PEERS, SVG, HELP };
    static const struct option options[] = {
        {"backend", required_argument, NULL, BACKEND},
        {"peers", required_argument, NULL, PEERS},
        {"svg", required_argument, NULL, SVG},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}
    };
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == BACKEND) d->backend = optarg;
        else if (option == PEERS) d->peers_file = optarg;
        else if (option == SVG) d->svg_file = optarg;
        else if (option == HELP) fputs(help, stdout), exit(0);
        else return false; /* getopt has said why */
    }
    if (optind < argc && argc - optind <= TRACES_MAX) return true;
    fprintf(stderr, "give 1 to %d traces; there are ten in bench/traces\n", TRACES_MAX);
    return false;
}

static int replay_file(demo *d, const char *path)
{
    const run_options options = {.allocator = &allocator_galloc, .limit = SIZE_MAX, .repeat = 1};
    trace t;
    run_result result;
    row *r = &d->result[d->results];
    run_progress("%s: reading", path);
    if (trace_load(&t, path)) return RUN_FAILED;
    *r = *find_peer(d, t.name);
    snprintf(r->name, sizeof r->name, "%s", t.name);
    int status = run_trace(&t, &options, &result);
    trace_free(&t);
    if (status) return status;
    if (result.oom) fprintf(stderr, "%s: %zu allocations found no memory on this device\n", r->name, result.oom);
    if (result.oom || result.findings) return RUN_FAILED;
    r->held[GALLOC] = (double)result.peak_reserved / (double)result.peak_live;
    d->results++;
    d->calls += result.ops;
    d->driver_calls += result.driver_calls;
    print_row(r, &result);
    return RUN_OK;
}

int main(int argc, char **argv)
{
    static demo d;
    if (!read_options(&d, argc, argv)) {
        fprintf(stderr, "demo --help lists the options\n");
        return CLI_USAGE;
    }
    if (!cli_backend(d.backend, argv)) return CLI_USAGE;
    if (!read_peers(&d)) return RUN_FAILED;
    device_describe(d.device, sizeof d.device);
    print_head(&d);
    for (int i = optind; i < argc; i++) {
        int status = replay_file(&d, argv[i]);
        if (status) return status;
    }
    print_means(&d);
    print_notes(&d);
    return d.svg_file && !draw(&d) ? RUN_FAILED : RUN_OK;
}
