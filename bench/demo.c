/* demo.c - what galloc holds and costs with real programs' allocations, beside what such programs use today: replays
   traces, prints a table, draws a chart. Called by `make demo`.

   On a GPU every allocator that was built in is measured, one after the other. The simulated device has galloc, and
   galloc by PyTorch's rules; the driver's pool cannot be simulated, so what others held on a GPU is read from a file and
   stands in columns of its own. Each allocator has a process of its own, since PyTorch reads its settings only once. */

#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli.h"
#include "device.h"
#include "run.h"

static const char help[] =
    "usage: demo [--backend sim|cuda] [--measured FILE] [--svg FILE] TRACE...\n"
    "\n"
    "Replays traces through galloc and its peers, and prints what they held and, on a GPU, what a call cost.\n"
    "\n"
    "  --backend NAME   sim (default: a simulated device) or cuda (a GPU)\n"
    "  --measured FILE  also print what was held on a GPU, from a summary of bench/gpu.sh\n"
    "  --svg FILE       also draw a chart\n";

enum { TRACES_MAX = 64, COLUMNS_MAX = 5, MEASURED = 4 };

/* What is measured: an allocator with settings. */
typedef struct column {
    const char *name, *head[2];
    const char *allocator, *conf;
    const char *color;
} column;

static const column on_gpu[] = {
    {"galloc", {"", "galloc"}, "galloc", "", "#1a9850"},
    {"PyTorch, native", {"PyTorch", "native"}, "torch", "", "#d4553f"},
    {"PyTorch, expandable segments", {"PyTorch", "expandable"}, "torch", "expandable_segments:True", "#8f6fd1"},
    {"cudaMallocAsync", {"cudaMal-", "locAsync"}, "async", "", "#3a8fd0"},
    {"CUB", {"", "CUB"}, "cub", "", "#b08a1e"},
};
static const column simulated[] = {
    {"galloc", {"", "galloc"}, "galloc", "", "#1a9850"},
    {"PyTorch's rules (galloc with like:pytorch)", {"PyTorch's", "rules"}, "galloc",
     "like:pytorch,expandable_segments:False", "#d4553f"},
};

/* A figure of a trace: NAN where it was not measured, INFINITY where memory ran out. */
typedef struct figures {
    double held; /* peak of held over peak of live bytes */
    double ns;   /* of a call, third pass */
    size_t calls, live;
} figures;

typedef struct demo {
    const char *backend, *measured_file, *svg_file;
    char **path;
    int traces, columns;
    const column *column;
    bool gpu;
    char device[256];
    char name[TRACES_MAX + 1][64]; /* of the traces; the last one: their means */
    figures own[COLUMNS_MAX][TRACES_MAX + 1];
    bool absent[COLUMNS_MAX]; /* not built in, or it failed */
    char measured_on[256];    /* GPU, driver, date; "": no file */
    double measured[MEASURED][TRACES_MAX + 1];
} demo;

/* ---- measuring, in a process for each allocator ------------------------------------------------------------------ */

static int measure_trace(const demo *d, const allocator *a, const column *c, int i, figures *f)
{
    const run_options options = {.allocator = a, .conf = c->conf, .limit = SIZE_MAX, .repeat = d->gpu ? 3 : 1};
    trace t;
    run_result result;
    if (trace_load(&t, d->path[i])) return RUN_FAILED;
    int status = run_trace(&t, &options, &result);
    trace_free(&t);
    if (!status && result.findings) status = RUN_FAILED;
    if (status) return status;
    *f = (figures){.held = result.oom ? INFINITY : (double)result.peak_reserved / (double)result.peak_live,
                   .ns = result.ns_per_op_warm, .calls = result.ops, .live = result.peak_live};
    return RUN_OK;
}

/* In the child: the figures of all traces, each sent when it is there. */
static int measure(const demo *d, const column *c, int out)
{
    const allocator *a = allocator_load(c->allocator, c->conf);
    int status = a ? RUN_OK : RUN_FAILED;
    for (int i = 0; i < d->traces && !status; i++) {
        figures f;
        run_progress("%s: %s", c->name, d->name[i]);
        status = measure_trace(d, a, c, i, &f);
        if (!status && write(out, &f, sizeof f) != (ssize_t)sizeof f) status = RUN_FAILED;
    }
    run_progress(NULL);
    return status;
}

/* In the child: what the figures are measured on. The parent calls nothing of CUDA, or it could not fork. */
static int describe(const demo *d, int out)
{
    char text[sizeof d->device] = "";
    device_describe(text, sizeof text);
    return write(out, text, sizeof text) == (ssize_t)sizeof text ? RUN_OK : RUN_FAILED;
}

/* Runs one of them in a child. Returns its status; the answer has `size` bytes at most. */
static int in_child(const demo *d, const column *c, void *answer, size_t size)
{
    int ends[2], status = 0;
    if (pipe(ends)) return RUN_FAILED;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        status = c ? measure(d, c, ends[1]) : describe(d, ends[1]);
        fflush(NULL);
        _exit(status);
    }
    close(ends[1]);
    for (size_t got = 0; child > 0 && got < size;) {
        ssize_t n = read(ends[0], (char *)answer + got, size - got);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        got += (size_t)n;
    }
    close(ends[0]);
    if (child < 0 || waitpid(child, &status, 0) != child) return RUN_FAILED;
    return WIFEXITED(status) ? WEXITSTATUS(status) : RUN_FAILED;
}

static int measure_all(demo *d)
{
    for (int k = 0; k < d->columns; k++) {
        const column *c = &d->column[k];
        for (int i = 0; i <= d->traces; i++) d->own[k][i] = (figures){.held = NAN, .ns = NAN};
        d->absent[k] = !allocator_built(c->allocator);
        if (d->absent[k]) continue;
        int status = in_child(d, c, d->own[k], (size_t)d->traces * sizeof **d->own);
        if (status && k == 0) return status;
        d->absent[k] = status != RUN_OK;
    }
    return RUN_OK;
}

/* ---- what was measured elsewhere --------------------------------------------------------------------------------- */

/* The order of bench/compare.sh, and that of the columns here: galloc, native, expandable, async. */
#define SUMMARY_HEAD "held / live, peaks galloc async cub torch expandable"

static bool is_head(const char *line)
{
    char text[256], *to = text;
    for (const char *c = line; *c && to < text + sizeof text - 1; c++)
        if (*c != ' ' || (to > text && to[-1] != ' ')) *to++ = *c;
    *to = '\0';
    return !strncmp(text, SUMMARY_HEAD, strlen(SUMMARY_HEAD));
}

static bool read_row(demo *d, const char *line)
{
    char name[64];
    double galloc, async, cub, native, expandable;
    if (sscanf(line, "%63s %lf %lf %lf %lf %lf", name, &galloc, &async, &cub, &native, &expandable) != 6) return false;
    for (int i = 0; i < d->traces; i++) {
        if (strcmp(d->name[i], name)) continue;
        const double row[MEASURED] = {galloc, native, expandable, async};
        for (int k = 0; k < MEASURED; k++) d->measured[k][i] = row[k];
    }
    return true;
}

static void read_summary(demo *d, FILE *file)
{
    char line[512], date[32] = "", gpu[64] = "", driver[32] = "";
    bool inside = false;
    while (fgets(line, sizeof line, file)) {
        if (!*date) sscanf(line, "date %31s", date);
        if (!*gpu) sscanf(line, "GPU %63[^,\n]", gpu);
        if (!*driver) sscanf(line, "driver %31s", driver);
        if (inside && !read_row(d, line)) break;
        inside = inside || is_head(line);
    }
    if (inside && *driver) snprintf(d->measured_on, sizeof d->measured_on, "%s, driver %s, %s", gpu, driver, date);
}

static bool read_measured(demo *d)
{
    for (int k = 0; k < MEASURED; k++)
        for (int i = 0; i <= d->traces; i++) d->measured[k][i] = NAN;
    if (!d->measured_file) return true;
    FILE *file = fopen(d->measured_file, "r");
    if (file) read_summary(d, file);
    if (!file) fprintf(stderr, "%s: %s\n", d->measured_file, strerror(errno));
    else if (!*d->measured_on) fprintf(stderr, "%s: not a summary of bench/gpu.sh\n", d->measured_file);
    if (file) fclose(file);
    return *d->measured_on;
}

/* ---- means, over the traces that all of them could do ------------------------------------------------------------ */

static bool complete(const demo *d, int i)
{
    for (int k = 0; k < d->columns; k++)
        if (!d->absent[k] && !isfinite(d->own[k][i].held)) return false;
    return true;
}

static void add_means(demo *d)
{
    int n = 0;
    double held[COLUMNS_MAX] = {0}, ns[COLUMNS_MAX] = {0}, measured[MEASURED] = {0};
    for (int i = 0; i < d->traces; i++) {
        if (!complete(d, i)) continue;
        n++;
        for (int k = 0; k < d->columns; k++) held[k] += log(d->own[k][i].held), ns[k] += log(d->own[k][i].ns);
        for (int k = 0; k < MEASURED; k++) measured[k] += log(d->measured[k][i]);
    }
    snprintf(d->name[d->traces], sizeof *d->name, "geometric mean");
    for (int k = 0; k < d->columns; k++)
        d->own[k][d->traces] = (figures){.held = n ? exp(held[k] / n) : NAN, .ns = n ? exp(ns[k] / n) : NAN};
    for (int k = 0; k < MEASURED; k++) d->measured[k][d->traces] = n ? exp(measured[k] / n) : NAN;
}

/* ---- a table ----------------------------------------------------------------------------------------------------- */

static void cell(double value, int digits)
{
    if (isnan(value)) printf(" %10s", "-");
    else if (isinf(value)) printf(" %10s", "no memory");
    else printf(" %10.*f", digits, value);
}

static void heads(const demo *d, int line)
{
    for (int k = 0; k < d->columns; k++) printf(" %10s", d->column[k].head[line]);
}

/* Two groups of columns: memory as counted here; and cost on a GPU, or memory measured elsewhere. */
static void print_heads(const demo *d)
{
    int width = 11 * d->columns + 3;
    printf("\nThe allocations of real programs, replayed on:\n  %s\n\n", d->device);
    printf("%-40s%-*s", "", width, d->gpu ? " held / live, measured" : " held / live, SIMULATED");
    if (d->gpu) printf("| ns per call, third pass, measured");
    else if (*d->measured_on) printf("| held / live, MEASURED earlier on another machine:");
    printf("\n%-40s%-*s", "                               MiB live", width, "");
    if (!d->gpu && *d->measured_on) printf("| one %s", d->measured_on);
    else if (d->gpu) printf("|");
    for (int line = 0; line < 2; line++) {
        printf("\n%-22s %7s %8s ", line ? "program" : "", line ? "calls" : "", line ? "(peak)" : "");
        heads(d, line);
        if (d->gpu || *d->measured_on) printf("   |");
        if (d->gpu) heads(d, line);
        for (int k = 0; k < MEASURED && !d->gpu && *d->measured_on; k++) printf(" %10s", on_gpu[k].head[line]);
    }
    putchar('\n');
}

static void print_row(const demo *d, int i)
{
    const figures *f = d->own[0];
    if (i == d->traces) printf("%-22s %7s %8s ", d->name[i], "", "");
    else printf("%-22.22s %7zu %8zu ", d->name[i], f[i].calls, f[i].live >> 20);
    for (int k = 0; k < d->columns; k++) cell(d->own[k][i].held, 3);
    if (d->gpu || *d->measured_on) printf("   |");
    for (int k = 0; k < d->columns && d->gpu; k++) cell(d->own[k][i].ns, 0);
    for (int k = 0; k < MEASURED && !d->gpu && *d->measured_on; k++) cell(d->measured[k][i], 3);
    putchar('\n');
}

static void print_notes(const demo *d)
{
    puts("\nheld / live: the most memory that the allocator held over the most that the program used; 1 is the least");
    puts("calls: allocations and frees of the program, without its kernels");
    if (!d->gpu) {
        puts("PyTorch's rules: galloc with like:pytorch, which held what PyTorch's native allocator held on nine of");
        puts("these ten, to within 0.02 of live bytes; llm_serve_kvgrow depends on where cudaMalloc puts its segments");
        puts("No time is shown, for a simulated device has none. cudaMallocAsync's pool is inside NVIDIA's driver: it");
        puts("cannot be simulated, so its figures are those measured. On a GPU `make demo` measures all of them.");
    }
    for (int k = 0; k < d->columns; k++)
        if (d->absent[k]) printf("not measured: %s\n", d->column[k].name);
    for (int k = 0; k < d->columns; k++)
        if (d->absent[k]) return allocator_list(stdout);
}

/* ---- a chart ----------------------------------------------------------------------------------------------------- */

enum { LEFT = 190, RIGHT = 70, WIDTH = 860, TOP = 92, BAR = 11, GAP = 14 };
#define PLOT (WIDTH - LEFT - RIGHT)
#define CHART_TOP_PERCENT 100.0

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
    fprintf(svg,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" "
            "font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            WIDTH, height, WIDTH, height);
    svg_text(svg, 16, 28, "font-size=\"18\" font-weight=\"bold\"", "Memory held beyond what is live, at the peak");
    svg_text(svg, 16, 48, "fill=\"#555\"", d->device);
    for (int k = 0, x = 16; k < d->columns; k++) {
        if (d->absent[k]) continue;
        fprintf(svg, "<rect x=\"%d\" y=\"64\" width=\"11\" height=\"11\" fill=\"%s\"/>\n", x, d->column[k].color);
        svg_text(svg, x + 16, 74, "", d->column[k].name);
        x += 34 + 7 * (int)strlen(d->column[k].name);
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
static void svg_bar(FILE *svg, const column *c, double held, int y, bool first)
{
    char label[32];
    double percent = 100 * (held - 1), width = PLOT * fmin(percent, CHART_TOP_PERCENT) / CHART_TOP_PERCENT;
    fprintf(svg, "<rect x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\" fill=\"%s\"/>\n", LEFT, y, fmax(width, 1),
            BAR - 1, c->color);
    snprintf(label, sizeof label, percent > CHART_TOP_PERCENT ? "%.0f %% \xe2\x86\x92" : "%.1f %%", percent);
    const char *style = first ? "font-size=\"10\" font-weight=\"bold\"" : "font-size=\"10\"";
    svg_text(svg, LEFT + width + 5, y + BAR - 2, style, label);
}

static bool draw(const demo *d)
{
    int group = d->columns * BAR + GAP, bottom = TOP + (d->traces + 1) * group;
    FILE *svg = fopen(d->svg_file, "w");
    if (svg) {
        svg_head(d, svg, bottom + 32);
        svg_grid(svg, bottom);
        for (int i = 0; i <= d->traces; i++) {
            int y = TOP + i * group + 8;
            const char *style = i == d->traces ? "text-anchor=\"end\" font-weight=\"bold\"" : "text-anchor=\"end\"";
            svg_text(svg, LEFT - 10, y + d->columns * BAR / 2 + 4, style, d->name[i]);
            for (int k = 0; k < d->columns; k++)
                if (isfinite(d->own[k][i].held)) svg_bar(svg, &d->column[k], d->own[k][i].held, y + k * BAR, k == 0);
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
    enum { BACKEND = 1, FROM, SVG, HELP };
    static const struct option options[] = {
        {"backend", required_argument, NULL, BACKEND},
        {"measured", required_argument, NULL, FROM},
        {"svg", required_argument, NULL, SVG},
        {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}
    };
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == BACKEND) d->backend = optarg;
        else if (option == FROM) d->measured_file = optarg;
        else if (option == SVG) d->svg_file = optarg;
        else if (option == HELP) fputs(help, stdout), exit(0);
        else return false; /* getopt has said why */
    }
    d->path = argv + optind;
    d->traces = argc - optind;
    if (d->traces > 0 && d->traces <= TRACES_MAX) return true;
    fprintf(stderr, "give 1 to %d traces; there are ten in bench/traces\n", TRACES_MAX);
    return false;
}

static void choose_columns(demo *d)
{
    d->gpu = !strcmp(device_backend, "cuda");
    d->column = d->gpu ? on_gpu : simulated;
    d->columns = d->gpu ? (int)(sizeof on_gpu / sizeof *on_gpu) : (int)(sizeof simulated / sizeof *simulated);
    for (int i = 0; i < d->traces; i++) {
        const char *slash = strrchr(d->path[i], '/');
        snprintf(d->name[i], sizeof *d->name, "%s", slash ? slash + 1 : d->path[i]);
        d->name[i][strcspn(d->name[i], ".")] = '\0';
    }
}

int main(int argc, char **argv)
{
    static demo d;
    if (!read_options(&d, argc, argv)) {
        fprintf(stderr, "demo --help lists the options\n");
        return CLI_USAGE;
    }
    if (!cli_backend(d.backend, argv)) return CLI_USAGE;
    choose_columns(&d);
    if (!read_measured(&d) || in_child(&d, NULL, d.device, sizeof d.device)) return RUN_FAILED;
    int status = measure_all(&d);
    if (status) return status;
    add_means(&d);
    print_heads(&d);
    for (int i = 0; i <= d.traces; i++) print_row(&d, i);
    print_notes(&d);
    return d.svg_file && !draw(&d) ? RUN_FAILED : RUN_OK;
}
