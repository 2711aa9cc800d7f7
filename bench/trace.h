/* trace.h - the allocator calls of a program, read from a log in RMM's format:

       Thread,Time,Action,Pointer,Size,Stream
       0,0.017929,allocate,0x7faf38800000,1572864,0
       0,0.017955,free,0x7faf38800000,1572864,0

   Pointers are turned into slots, so that a replay needs no look-up: a slot holds one live block at a time. */

#ifndef BENCH_TRACE_H
#define BENCH_TRACE_H

#include <stddef.h>
#include <stdint.h>

typedef struct trace_op {
    uint64_t bytes; /* 0: a free */
    uint32_t slot;
    uint32_t stream;
} trace_op;

typedef struct trace {
    char name[256]; /* of the file, without folders and endings */
    trace_op *op;
    size_t n;
    uint32_t slots, streams;
    size_t peak_live; /* the most bytes that were asked for and not freed */
} trace;

/* Reads a log, plain or gzip; a file that is not one is refused, whatever is in it. Left out are allocations of 0
   bytes, frees of pointers that are not live, and "allocate failure" rows. Returns 0, or -1 with a line on stderr that
   names the place. */
int trace_load(trace *t, const char *path);
void trace_free(trace *t);

#endif
