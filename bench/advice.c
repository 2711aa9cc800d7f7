/* advice.c - advice.h: the rules are those of docs/what-if.md. */

#include "advice.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

__attribute__((format(printf, 2, 3))) static void say(advice *a, const char *format, ...)
{
    va_list args;
    if (a->lines == ADVICE_LINES) return;
    va_start(args, format);
    vsnprintf(a->line[a->lines], sizeof a->line[0], format, args);
    va_end(args);
    a->lines++;
}

/* ---- comparing --------------------------------------------------------------------------------------------------- */

/* The program's time in microseconds, against which driver time counts. */
static double time_us(const advice_log *log, const advice_row *base)
{
    return log->seconds > 0 ? log->seconds * 1e6 : fmax(base->driver_us, 1) / ADVICE_SHARE;
}

/* How much better than the base, as a part of its memory; negative: worse. */
static double worth(const advice_log *log, const advice_row *base, const advice_row *r)
{
    double saved = 1 - (double)r->held / (double)base->held;
    double spent = (r->driver_us - base->driver_us) / time_us(log, base);
    return saved - ADVICE_RATE * spent;
}

static bool eligible(const advice_row *r)
{
    return r->fits && (r->kind == ADVICE_DEFAULTS || r->kind == ADVICE_SETTING);
}

static const advice_row *defaults(const advice_log *log)
{
    for (int i = 0; i < log->rows; i++)
        if (log->row[i].kind == ADVICE_DEFAULTS) return &log->row[i];
    return NULL;
}

/* Of those that fit; of equal ones the first. */
static const advice_row *least_held(const advice_log *log)
{
    const advice_row *least = NULL;
    for (int i = 0; i < log->rows; i++)
        if (eligible(&log->row[i]) && (!least || log->row[i].held < least->held)) least = &log->row[i];
    return least;
}

static const advice_row *least_time(const advice_log *log)
{
    const advice_row *least = NULL;
    for (int i = 0; i < log->rows; i++)
        if (eligible(&log->row[i]) && (!least || log->row[i].driver_us < least->driver_us)) least = &log->row[i];
    return least;
}

static const advice_row *best(const advice_log *log, const advice_row *base)
{
    const advice_row *best = base;
    for (int i = 0; i < log->rows; i++) {
        const advice_row *r = &log->row[i];
        if (eligible(r) && worth(log, base, r) > worth(log, base, best)) best = r;
    }
    return best == base || worth(log, base, best) < ADVICE_LEAST ? base : best;
}

/* ---- words ------------------------------------------------------------------------------------------------------- */

typedef struct words {
    char text[240];
} words;

/* "4.0 % less", "12.3 % more", "as much". */
static words more_or_less(double value, double than)
{
    words w;
    double percent = 100 * (value / than - 1);
    if (!isfinite(percent) || fabs(percent) < 0.05) snprintf(w.text, sizeof w.text, "as much");
    else snprintf(w.text, sizeof w.text, "%.1f %% %s", fabs(percent), percent < 0 ? "less" : "more");
    return w;
}

/* "2.1 times the driver time (262.7 ms, 3.25 % of the log's time)". */
static words driver_time(const advice_log *log, double us, const advice_row *base)
{
    words w;
    char share[48] = "";
    double times = us / fmax(base->driver_us, 1);
    if (log->seconds > 0)
        snprintf(share, sizeof share, ", %.2f %% of the log's time", us / log->seconds / 1e4);
    snprintf(w.text, sizeof w.text, "%.*f times the driver time (%.1f ms%s)", times < 0.1 ? 2 : 1, times, us / 1e3,
             share);
    return w;
}

static words within(const advice_log *log)
{
    words w;
    if (log->limit == SIZE_MAX) snprintf(w.text, sizeof w.text, "the device's memory");
    else snprintf(w.text, sizeof w.text, "%zu MiB", log->limit >> 20);
    return w;
}

static words the_rule(const advice_log *log)
{
    words w;
    if (log->seconds > 0)
        snprintf(w.text, sizeof w.text, "1 %% of memory counts as much as %.1f %% of the log's %.1f s", 1 / ADVICE_RATE,
                 log->seconds);
    else if (log->too_short)
        snprintf(w.text, sizeof w.text, "the log is too short, its times tell nothing: the driver time of a replay "
                 "exceeds them; 1 %% of memory counts as much as %.0f %% of the driver time",
                 1 / ADVICE_RATE / ADVICE_SHARE);
    else
        snprintf(w.text, sizeof w.text, "the log tells no time: 1 %% of memory counts as much as %.0f %% of the driver "
                 "time", 1 / ADVICE_RATE / ADVICE_SHARE);
    return w;
}

static void say_recommended(const advice_log *log, const advice_row *base, const advice_row *r, advice *a)
{
    const advice_row *d = defaults(log);
    if (!d || !d->fits)
        say(a, "Recommended: %s. With the defaults the log does not replay within %s; it holds %zu MiB, for %.1f ms of "
            "driver time.", r->name, within(log).text, r->held >> 20, r->driver_us / 1e3);
    else if (r == d)
        say(a, "Recommended: %s. No other setting is worth its price (%s).", r->name, the_rule(log).text);
    else
        say(a, "Recommended: %s. It holds %s (%zu MiB, the defaults %zu) for %s: worth it (%s).", r->name,
            more_or_less((double)r->held, (double)base->held).text, r->held >> 20, base->held >> 20,
            driver_time(log, r->driver_us, base).text, the_rule(log).text);
}

/* The other ends of the trade. */
static void say_ends(const advice_log *log, const advice_row *base, const advice_row *chosen, advice *a)
{
    const advice_row *frugal = least_held(log), *quick = least_time(log);
    if ((double)frugal->held > (1 - ADVICE_LEAST) * (double)base->held)
        say(a, "Memory: no setting holds %.0f %% less than %s.", 100 * ADVICE_LEAST, base->name);
    else if (frugal != chosen)
        say(a, "Memory: %s holds %s for %s: not worth it unless memory is short.", frugal->name,
            more_or_less((double)frugal->held, (double)base->held).text,
            driver_time(log, frugal->driver_us, base).text);
    if (quick->driver_us > (1 - ADVICE_LESS_TIME) * base->driver_us)
        say(a, "Time: no setting takes %.0f %% less driver time than %s.", 100 * ADVICE_LESS_TIME, base->name);
    else if (quick != chosen)
        say(a, "Time: %s takes %s and holds %s: not worth it unless driver calls hurt.", quick->name,
            driver_time(log, quick->driver_us, base).text,
            more_or_less((double)quick->held, (double)base->held).text);
}

static void say_others(const advice_log *log, const advice_row *base, advice *a)
{
    for (int i = 0; i < log->rows; i++) {
        const advice_row *r = &log->row[i];
        if (r->kind != ADVICE_PYTORCH && r->kind != ADVICE_CUDAMALLOC) continue;
        const char *name = r->kind == ADVICE_PYTORCH ? "PyTorch's rules" : "cudaMalloc";
        if (!r->fits)
            say(a, "%s: out of memory.", name);
        else
            say(a, "%s: %s memory for %s%s.", name, more_or_less((double)r->held, (double)base->held).text,
                driver_time(log, r->driver_us, base).text,
                r->kind == ADVICE_PYTORCH ? "" : "; in that time is no wait of cudaFree for the device");
    }
}

static void say_fit(const advice_log *log, const advice_row *base, advice *a)
{
    if (!log->fit) return;
    const char *beyond = log->fit > log->limit ? " It is more than the limit given." : "";
    words above = more_or_less((double)log->fit, (double)log->live);
    const char *than = strcmp(above.text, "as much") ? "than" : "as";
    if (base && isfinite(log->fit_us))
        say(a, "Limit: memory_limit:%zuM is the smallest with which the log replays, %s %s is live; its small pages "
            "take %s.%s", log->fit >> 20, above.text, than, driver_time(log, log->fit_us, base).text, beyond);
    else
        say(a, "Limit: memory_limit:%zuM is the smallest with which the log replays, %s %s is live.%s",
            log->fit >> 20, above.text, than, beyond);
}

void advice_give(const advice_log *given, advice *a)
{
    const advice_log *log = given;
    const advice_row *base = defaults(log), *chosen = NULL;
    advice_log without_times = *given;
    *a = (advice){.recommended = -1};
    if (!base || !base->fits) base = least_held(log);
    if (base && log->seconds > 0 && base->driver_us > log->seconds * 1e6) {
        without_times.seconds = 0;
        without_times.too_short = true;
        log = &without_times;
    }
    if (base) {
        chosen = best(log, base);
        a->recommended = (int)(chosen - log->row);
        say_recommended(log, base, chosen, a);
        say_ends(log, base, chosen, a);
        say_others(log, base, a);
    } else {
        say(a, "Recommended: none. No setting of galloc replays the log within %s; %zu MiB are live at most.",
            within(log).text, log->live >> 20);
    }
    say_fit(log, base, a);
}
