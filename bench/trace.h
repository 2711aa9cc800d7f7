/* trace.h - the allocator calls of a program, read from a log in RMM's format:

       Thread,Time,Action,Pointer,Size,Stream
       0,0.017929,allocate,0x7faf38800000,1572864,0
       0,0.017955,free,0x7faf38800000,1572864,0

   The log of galloc's setting trace has two further columns, Pool and More (docs/history.md). Rows of all pools are
   read as if there were one.

   Pointers are turned into slots, so that a replay needs no look-up: a slot holds one live block at a time. */

#ifndef BENCH_TRACE_H
#define BENCH_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct trace_op {
    uint64_t bytes; /* 0: a free */
    uint32_t slot;
    uint32_t stream;
    uint32_t thread;
    uint32_t more; /* what else the log says of it is trace.more[more]; 0: nothing */
} trace_op;

#define TRACE_NAMED_IN_A_ROW 512 /* streams, at most: a row has 1024 bytes */

/* What only galloc's log says. A resize is a free and at once an allocation, of one slot and both with `resize`. */
typedef struct trace_more {
    uint64_t room, align; /* of an allocation: as max_bytes and alignment of galloc_request; 0: none */
    uint32_t tag;
    bool lasting, resize;
    uint32_t named;           /* of a free: trace.named[named] is the first of its other streams */
    uint32_t after, recorded; /* so many were named in the call; and so many more were recorded before */
} trace_more;

typedef struct trace {
    char name[256]; /* of the file, without folders and endings; '?' for all but printable ASCII */
    trace_op *op;
    size_t n;
    uint32_t slots, streams, threads;
    uint32_t legacy;  /* the legacy stream + 1, which only galloc's log tells from others; 0: none */
    trace_more *more; /* the first is empty; NULL: all are */
    uint32_t *named;  /* streams */
    size_t peak_live; /* the most bytes that were asked for and not freed */
    double seconds;   /* from the first row to the last, by its column Time; 0: that does not tell */
} trace;

/* Reads a log, plain or gzip; a file that is not one is refused, whatever is in it. Left out are allocations of 0
   bytes, frees of pointers that are not live, "allocate failure" rows, and what a crash left of the last row of
   galloc's log. Returns 0, or -1 with a line on stderr that names the place. */
int trace_load(trace *t, const char *path);
void trace_free(trace *t);

#endif
