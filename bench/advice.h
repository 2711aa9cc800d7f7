/* advice.h - which setting suits a program, from what replays of its log held and cost. Rules, told in words. */

#ifndef BENCH_ADVICE_H
#define BENCH_ADVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The rule. Memory that a setting saves, as a part of what the defaults hold, is worth a part of the program's time that
   is smaller by this factor: 1 % of the memory counts as much as 0.1 % of the time. */
#define ADVICE_RATE 10.0
/* A setting is recommended when it is better than the defaults by this part of their memory; smaller differences of
   memory are not named. */
#define ADVICE_LEAST 0.01
/* The part of the program's time that the defaults' driver time is taken for, where the log does not tell the time. */
#define ADVICE_SHARE 0.005
/* Less driver time than the defaults is named from this part on. */
#define ADVICE_LESS_TIME 0.1

enum { ADVICE_DEFAULTS, ADVICE_SETTING, ADVICE_PYTORCH, ADVICE_CUDAMALLOC, ADVICE_OTHER }; /* OTHER: not compared */

typedef struct advice_row {
    const char *name; /* of the setting, as in GALLOC_CONF, or in words */
    int kind;         /* ADVICE_...; the defaults and settings may be recommended */
    bool fits;        /* the log was replayed, and memory did not run out */
    size_t held;      /* bytes, at most */
    int64_t driver_calls;
    double driver_us;
} advice_row;

/* What is advised on. One row is of the defaults. */
typedef struct advice_log {
    const advice_row *row;
    int rows;
    double seconds;   /* of the program, by its log; 0: not told */
    bool too_short;   /* seconds were less than the driver time of a replay, and are 0 now; set by advice_give */
    size_t live;      /* bytes, at most */
    size_t limit;     /* that all rows had; SIZE_MAX: none */
    size_t fit;       /* the smallest limit that the log replays with; 0: none was found */
    double fit_us;    /* driver time with that limit; NAN: not known */
} advice_log;

enum { ADVICE_LINES = 8 };

typedef struct advice {
    int recommended; /* row; -1: none */
    int lines;
    char line[ADVICE_LINES][400]; /* the first one says what is recommended, and why */
} advice;

void advice_give(const advice_log *log, advice *a);

#endif
