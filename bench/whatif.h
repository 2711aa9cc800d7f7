/* whatif.h - what a log of allocator calls would have held and cost with other settings: replays it with each of them,
   on the simulated device, and tells which one suits it. */

#ifndef BENCH_WHATIF_H
#define BENCH_WHATIF_H

#include <stdbool.h>
#include <stdio.h>

#include "advice.h"
#include "run.h"

enum { WHATIF_CONFS_MAX = 16, WHATIF_ROWS_MAX = 18 + WHATIF_CONFS_MAX };

typedef struct whatif_options {
    size_t limit;     /* bytes that may be held, with all settings; SIZE_MAX: no limit */
    int repeat;       /* passes in one pool */
    bool json;
    const char *svg;  /* a file for a chart, or NULL */
    const char *conf[WHATIF_CONFS_MAX]; /* settings of the user's, beside the ones that are always tried */
    int confs;
} whatif_options;

/* A setting, and what the log held and cost with it. */
typedef struct whatif_row {
    const char *name;
    const char *allocator, *conf; /* NULL: the live bytes, which no allocator can hold less than */
    int kind;                     /* ADVICE_... */
    bool no_room;                 /* run_options.no_room: as with an allocator that knows none */
    int status;                   /* RUN_..., or 128 and the signal that ended the replay */
    run_result r;
} whatif_row;

typedef struct whatif_log {
    char name[256]; /* the trace's */
    size_t calls, live;
    double seconds;
    size_t limit;
    whatif_row row[WHATIF_ROWS_MAX];
    int rows;
    char fit_name[64]; /* of the last row, where there is a smallest limit */
    size_t fit;
    advice advice;
} whatif_log;

/* Returns RUN_..., with a line on stderr when it is not RUN_OK. */
int whatif(const whatif_options *o, char **path, int paths);

bool whatif_runs(const whatif_row *row); /* its replay went through */
bool whatif_fits(const whatif_row *row); /* and memory did not run out */

/* Bars of what was held, and of driver time. */
void whatif_chart(FILE *svg, const whatif_log *log, int logs);

#endif
