/* whatif_chart.c - the chart of whatif.h: an SVG that shows in light and dark and asks for nothing. */

#define _GNU_SOURCE
#include <math.h>
#include <string.h>

#include "whatif.h"

enum { NAME = 270, BARS = 250, FIGURE = 78, GAP = 20, STEP = 17, BAR = 11 };
enum { HEAD = 88, LOG_HEAD = 82, LOG_GAP = 22, LINE = 150 };
#define HELD_X (NAME + 10)
#define TIME_X (HELD_X + BARS + FIGURE + GAP)
#define WIDTH (TIME_X + BARS + FIGURE + 16)
/* Bars end there, lest one of them make all others too short to be seen; the figure beside it says how long it is. */
#define HELD_MOST 2.0 /* times what is live */
#define TIME_MOST 4.0 /* times what the defaults take */

static const char style[] =
    "<style>\n"
    "svg { color: #1f2328; background: #ffffff; font: 12px Helvetica, Arial, sans-serif; fill: currentColor }\n"
    ".faint { opacity: 0.65 } .grid { stroke: currentColor; opacity: 0.35 }\n"
    ".live { fill: #8c959f } .galloc { fill: #1a9850 } .limit { fill: #3a8fd0 } .pytorch { fill: #d4553f }\n"
    ".cudamalloc { fill: #b08a1e }\n"
    "@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } }\n"
    "</style>\n";

static void text(FILE *svg, double x, double y, const char *attributes, const char *what)
{
    fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    for (; *what; what++) {
        if (*what == '<') fputs("&lt;", svg);
        else if (*what == '>') fputs("&gt;", svg);
        else if (*what == '&') fputs("&amp;", svg);
        else if ((unsigned char)*what < ' ') fputc('?', svg);
        else fputc(*what, svg);
    }
    fputs("</text>\n", svg);
}

/* In lines of what fits, two at most. */
static void text_in_lines(FILE *svg, double x, double y, const char *what)
{
    size_t n = strlen(what), cut = n;
    char line[LINE + 1];
    if (n > LINE)
        for (cut = LINE; cut && what[cut] != ' ';) cut--;
    snprintf(line, sizeof line, "%.*s", (int)cut, what);
    text(svg, x, y, "", line);
    if (what[cut]) text(svg, x, y + 16, "", what + cut + 1);
}

static const char *class_of(const whatif_log *log, int i)
{
    const whatif_row *w = &log->row[i];
    if (!w->allocator) return "live";
    if (w->name == log->fit_name) return "limit";
    if (w->kind == ADVICE_PYTORCH) return "pytorch";
    return w->kind == ADVICE_CUDAMALLOC || !strncmp(w->name, "backend:", 8) ? "cudamalloc" : "galloc";
}

/* A bar of a part of the width; beyond 1 it ends there. */
static void bar(FILE *svg, const char *class, double x, double y, double part, const char *figure)
{
    char label[48];
    double width = fmax(BARS * fmin(part, 1), 1);
    fprintf(svg, "<rect class=\"%s\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\"/>\n", class, x, y, width, BAR);
    snprintf(label, sizeof label, part > 1 ? "%s \xe2\x86\x92" : "%s", figure);
    text(svg, x + width + 5, y + BAR - 1.5, "font-size=\"11\"", label);
}

static void row(FILE *svg, const whatif_log *log, int i, double y, double held_most, double time_most)
{
    const whatif_row *w = &log->row[i];
    char figure[40];
    const char *name = "text-anchor=\"end\"";
    if (i == log->advice.recommended) name = "text-anchor=\"end\" font-weight=\"bold\"";
    snprintf(figure, sizeof figure, "%s", w->name);
    text(svg, NAME, y + BAR - 1, name, figure);
    if (!whatif_fits(w)) {
        text(svg, HELD_X, y + BAR - 1, "class=\"faint\"", whatif_runs(w) ? "out of memory" : "failed");
        return;
    }
    snprintf(figure, sizeof figure, "%zu", w->r.peak_reserved >> 20);
    bar(svg, class_of(log, i), HELD_X, y, (double)w->r.peak_reserved / held_most, figure);
    if (!isfinite(w->r.driver_us)) return;
    snprintf(figure, sizeof figure, "%.1f", w->r.driver_us / 1e3);
    bar(svg, class_of(log, i), TIME_X, y, w->r.driver_us / time_most, figure);
}

static double most_held(const whatif_log *log)
{
    double most = 0;
    for (int i = 0; i < log->rows; i++)
        if (whatif_fits(&log->row[i])) most = fmax(most, (double)log->row[i].r.peak_reserved);
    return fmin(most, HELD_MOST * (double)log->live);
}

static double most_time(const whatif_log *log)
{
    double most = 1, of_defaults = 0;
    for (int i = 0; i < log->rows; i++) {
        const whatif_row *w = &log->row[i];
        if (!whatif_fits(w) || !isfinite(w->r.driver_us)) continue;
        most = fmax(most, w->r.driver_us);
        if (w->kind == ADVICE_DEFAULTS) of_defaults = w->r.driver_us;
    }
    return of_defaults > 0 ? fmin(most, TIME_MOST * of_defaults) : most;
}

static void part(FILE *svg, const whatif_log *log, double y)
{
    char line[400];
    double held_most = most_held(log), time_most = most_time(log), rows = y + LOG_HEAD;
    double live_x = HELD_X + BARS * (double)log->live / held_most;
    snprintf(line, sizeof line, "%.200s: %zu calls, %zu MiB live at most", log->name, log->calls, log->live >> 20);
    text(svg, 16, y + 14, "font-size=\"14\" font-weight=\"bold\"", line);
    if (log->advice.lines) text_in_lines(svg, 16, y + 32, log->advice.line[0]);
    text(svg, HELD_X, y + 72, "class=\"faint\"", "held at most, MiB; the line: live");
    text(svg, TIME_X, y + 72, "class=\"faint\"", "driver time by a model, ms");
    for (int i = 0; i < log->rows; i++) row(svg, log, i, rows + i * STEP, held_most, time_most);
    fprintf(svg, "<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", live_x, rows - 4, live_x,
            rows + log->rows * STEP);
}

/* Is a bar of it cut off? */
static bool is_cut(const whatif_log *log)
{
    double held_most = most_held(log), time_most = most_time(log);
    for (int i = 0; i < log->rows; i++) {
        const run_result *r = &log->row[i].r;
        if (!whatif_fits(&log->row[i])) continue;
        if ((double)r->peak_reserved > held_most || (isfinite(r->driver_us) && r->driver_us > time_most)) return true;
    }
    return false;
}

static void head(FILE *svg, double height, bool cut)
{
    static const char *const key[][2] = {{"live", "live bytes"}, {"galloc", "galloc"}, {"limit", "the smallest limit"},
                                         {"pytorch", "PyTorch's rules"}, {"cudamalloc", "cudaMalloc"}};
    double x = 16;
    fprintf(svg, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%.0f\" viewBox=\"0 0 %d %.0f\">\n",
            WIDTH, height, WIDTH, height);
    fputs(style, svg);
    text(svg, 16, 26, "font-size=\"18\" font-weight=\"bold\"", "What if? The log with other settings");
    text(svg, 16, 46, "class=\"faint\"",
         cut ? "SIMULATED device, no GPU: driver calls are counted, their time is a model; bold: recommended; "
               "arrow: the bar is longer"
             : "SIMULATED device, no GPU: driver calls are counted, their time is a model; bold: recommended");
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        fprintf(svg, "<rect class=\"%s\" x=\"%.1f\" y=\"58\" width=\"11\" height=\"11\"/>\n", key[i][0], x);
        text(svg, x + 16, 68, "", key[i][1]);
        x += 40 + 7 * (double)strlen(key[i][1]);
    }
}

void whatif_chart(FILE *svg, const whatif_log *log, int logs)
{
    double y = HEAD, height = HEAD;
    bool cut = false;
    for (int i = 0; i < logs; i++) {
        height += LOG_HEAD + log[i].rows * STEP + LOG_GAP;
        cut = cut || is_cut(&log[i]);
    }
    head(svg, height, cut);
    for (int i = 0; i < logs; i++) {
        part(svg, &log[i], y);
        y += LOG_HEAD + log[i].rows * STEP + LOG_GAP;
    }
    fputs("</svg>\n", svg);
}
