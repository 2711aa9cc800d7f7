/* fuzz_trace.c - a fuzzer for the reader of traces (bench/trace.c), plain and gzip: whatever the bytes, the trace is
   refused with words, or its operations fit each other: slots are taken and given back in turn, numbers are in range,
   the peak is that of the operations. The mutator knows rows and words. With FUZZ_MAIN defined: a program that runs the
   files it is given. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);

static FILE *said; /* stderr of the reader */

static void require(int holds, const char *what)
{
    if (holds) return;
    printf("fuzz_trace: %s\n", what);
    fflush(stdout);
    abort();
}

/* ---- a trace that was taken -------------------------------------------------------------------------------------- */

static void check_more(const trace *t, const trace_op *op)
{
    const trace_more *more;
    if (!op->more) return;
    require(t->more != NULL, "an operation with words, and no words");
    more = &t->more[op->more];
    require(!(more->align & (more->align - 1)) && more->after + more->recorded <= TRACE_NAMED_IN_A_ROW, "words");
    for (uint32_t i = 0; i < more->after + more->recorded; i++)
        require(t->named[more->named + i] < t->streams, "a stream that is named and not counted");
}

static void check_trace(const trace *t)
{
    uint64_t *bytes = calloc(t->slots + 1, sizeof *bytes), live = 0, peak = 0;
    require(t->n > 0 && t->slots > 0 && t->streams > 0 && t->threads > 0, "a trace of nothing");
    for (size_t i = 0; i < t->n; i++) {
        const trace_op *op = &t->op[i];
        require(op->slot < t->slots && op->stream < t->streams && op->thread < t->threads, "out of range");
        require(!op->bytes == (bytes[op->slot] > 0), "a slot is not taken and given back in turn");
        live += op->bytes - bytes[op->slot];
        bytes[op->slot] = op->bytes;
        if (live > peak) peak = live;
        check_more(t, op);
    }
    require(peak == t->peak_live, "another peak");
    require(t->seconds >= 0 && t->seconds <= 1e12, "a time");
    require(strlen(t->name) < sizeof t->name, "a name");
    free(bytes);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    said = tmpfile();
    return !said;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[40];
    trace t;
    int fd = memfd_create("trace", MFD_CLOEXEC), err = dup(2), result;
    long words;
    require(fd >= 0 && write(fd, data, size) == (ssize_t)size, "no file");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!said) (void)LLVMFuzzerInitialize(NULL, NULL);
    rewind(said);
    require(ftruncate(fileno(said), 0) == 0 && dup2(fileno(said), 2) == 2, "no stderr");
    result = trace_load(&t, path);
    words = (long)lseek(2, 0, SEEK_CUR);
    dup2(err, 2);
    close(err);
    close(fd);
    require(result ? words > 20 && words < 1500 : words == 0, "neither a trace nor words");
    if (!result) check_trace(&t);
    else require(!t.op && !t.more && !t.named, "memory of a trace that was refused");
    trace_free(&t);
    return 0;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

static const char *const pieces[] = {
    "Thread,Time,Action,Pointer,Size,Stream\n", "Thread,Time,Action,Pointer,Size,Stream,Pool,More\n",
    "0,0.5,allocate,0x7f00,512,0\n", "0,0.5,free,0x7f00,512,0\n", "1,12:00:01:5,allocate,0x7f10,4096,3\n",
    "1,23:59:59.9,free,0x7f10,4096,3\r\n", "1,1e300,allocate,0x10,1125899906842624,18446744073709551614\n",
    "1,0.1,allocate,0x7f00,512,0,1,room=4096 align=512 tag=7 long\n",
    "1,0.2,free,0x7f00,512,0,1,after=1+2 recorded=3\n",
    "1,0.3,free,0x7f00,512,0,1,resize\n1,0.3,allocate,0x7f00,9,0,1,resize\n",
    "1,0.4,allocate,0x7f00,512,0,1,waits=2\n",
    "0,-1e308,allocate,0x20,512,0\n", "0,1e308,free,0x20,512,0\n",
    "0,0,allocate failure,0,512,0\n", "0,0,allocate,0x0,0,0\n", " capture=9", " recorded=1+2+3", ",", "\n", "+", "0x",
    "18446744073709551615", "1125899906842625", "36028797018963968", "\r\n", " long", "-", "e", ":", "=",
    "nan", "1e999",
};

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned seed)
{
    const char *piece = pieces[seed / 4 % (sizeof pieces / sizeof *pieces)];
    size_t n = strlen(piece), at = size ? seed / 256 % (size + 1) : 0;
    if (!size || size + n > room || seed % 4 < 2) {
        if (size) return LLVMFuzzerMutate(data, size, room);
        piece = pieces[seed / 4 % 2];
        n = strlen(piece);
        if (n > room) return 0;
    }
    while (seed % 4 == 3 && at && data[at - 1] != '\n') at--; /* a row between two others */
    memmove(data + at + n, data + at, size - at);
    memcpy(data + at, piece, n);
    return size + n;
}

#ifdef FUZZ_MAIN
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room)
{
    (void)data, (void)room;
    return size;
}
#include "fuzz_main.h"
#endif
