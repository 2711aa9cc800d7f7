/* calls.c - calls.h, by standing before every function of the driver.

   galloc has the driver's functions from the runtime, by cudaGetDriverEntryPoint... alone: it is linked with none of
   them. The program is linked with --wrap for that function. So all of them come by here, and for each one a stand-in
   is handed on that reads the clock, calls the function, reads the clock. There is no list of functions to keep: what
   is fetched is watched. Functions of the driver take whole numbers and pointers, six at most; on x86-64 and 64-bit
   Arm these are in registers, so that a stand-in can pass them on without knowing how many there are. */

#define _POSIX_C_SOURCE 200809L
#include "calls.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device.h"

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "calls.c: how arguments are passed is known for x86-64 and 64-bit Arm"
#endif

#define ARGUMENTS uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f

enum { SLOTS = 64 };

typedef struct slot {
    char name[64];
    void *function; /* the driver's; NULL: no function is fetched for this slot yet */
    uint64_t calls;
    double total_us, longest_us;
} slot;

static slot slots[SLOTS];
static bool watching, counting;

/* Those that wait for work of the device, or may, as NVIDIA's documents say or as was measured. */
static bool can_wait(const char *name)
{
    static const char *const names[] = {"cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemAlloc",
                                        "cuMemFree",        "cuMemHostAlloc",      "cuMemFreeHost"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) return true;
    return !strncmp(name, "cuMemcpy", 8) || !strncmp(name, "cuMemset", 8);
}

/* ---- the stand-ins ----------------------------------------------------------------------------------------------- */

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int pass_on(slot *s, ARGUMENTS)
{
    int (*function)(ARGUMENTS) = (int (*)(ARGUMENTS))s->function;
    if (!counting) return function(a, b, c, d, e, f);
    double start = now_us();
    int result = function(a, b, c, d, e, f);
    double us = now_us() - start;
    s->calls++;
    s->total_us += us;
    if (us > s->longest_us) s->longest_us = us;
    return result;
}

/* Numbered in octal. */
#define EIGHT(X, n) X(0##n##0) X(0##n##1) X(0##n##2) X(0##n##3) X(0##n##4) X(0##n##5) X(0##n##6) X(0##n##7)
#define EACH_SLOT(X) EIGHT(X, 0) EIGHT(X, 1) EIGHT(X, 2) EIGHT(X, 3) EIGHT(X, 4) EIGHT(X, 5) EIGHT(X, 6) EIGHT(X, 7)
#define STAND_IN(i) \
    static int stand_in_##i(ARGUMENTS) { return pass_on(&slots[i], a, b, c, d, e, f); }
#define ADDRESS(i) (void *)stand_in_##i,

EACH_SLOT(STAND_IN)

static void *const stand_ins[SLOTS] = {EACH_SLOT(ADDRESS)};

static void stand_before(const char *symbol, void **function)
{
    int i = 0;
    if (!watching || !*function) return;
    while (i < SLOTS && slots[i].function && strcmp(slots[i].name, symbol)) i++;
    if (i == SLOTS || strlen(symbol) >= sizeof slots[i].name) {
        fprintf(stderr, "calls.c has no room for %s\n", symbol);
        exit(1);
    }
    snprintf(slots[i].name, sizeof slots[i].name, "%s", symbol);
    slots[i].function = *function;
    *function = stand_ins[i];
}

/* ---- the runtime's, wrapped by the linker ------------------------------------------------------------------------ */

#if CUDART_VERSION >= 12050
cudaError_t __real_cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status);
cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status);

cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                                    unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status)
{
    cudaError_t error = __real_cudaGetDriverEntryPointByVersion(symbol, function, version, flags, status);
    if (error) return error;
    stand_before(symbol, function);
    account_stand_before(symbol, function);
    return cudaSuccess;
}
#else
cudaError_t __real_cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *status);
cudaError_t __wrap_cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *status);

cudaError_t __wrap_cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *status)
{
    cudaError_t error = __real_cudaGetDriverEntryPoint(symbol, function, flags, status);
    if (error) return error;
    stand_before(symbol, function);
    account_stand_before(symbol, function);
    return cudaSuccess;
}
#endif

/* ---- counting ---------------------------------------------------------------------------------------------------- */

/* Streams that share a queue of the device would wait behind the work that is held: each is to have its own. */
void calls_watch(void)
{
    watching = true;
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

void calls_begin(void)
{
    counting = true;
}

void calls_end(void)
{
    counting = false;
}

static int by_time(const void *a, const void *b)
{
    double x = ((const slot *)a)->total_us, y = ((const slot *)b)->total_us;
    return (x < y) - (x > y);
}

static void print_line(const slot *s, bool json)
{
    const char *format = "%-32s %9" PRIu64 " %12.1f %11.1f  %s\n";
    if (json)
        format = "{\"call\": \"%s\", \"calls\": %" PRIu64 ", \"total_us\": %.1f, \"longest_us\": %.1f, "
                 "\"can_wait\": \"%s\"}\n";
    printf(format, s->name, s->calls, s->total_us, s->longest_us, can_wait(s->name) ? "yes" : "no");
}

void calls_print(bool json)
{
    slot sorted[SLOTS], all = {.name = "all"};
    uint64_t waiting = 0;
    memcpy(sorted, slots, sizeof sorted);
    qsort(sorted, SLOTS, sizeof *sorted, by_time);
    if (!json)
        printf("\nThe driver's functions while the traces were replayed, seen from outside; host time\n\n"
               "%-32s %9s %12s %11s  %s\n", "function", "calls", "us, total", "us, longest", "can wait");
    for (int i = 0; i < SLOTS; i++) {
        const slot *s = &sorted[i];
        if (!s->calls) continue;
        print_line(s, json);
        all.calls += s->calls;
        all.total_us += s->total_us;
        if (s->longest_us > all.longest_us) all.longest_us = s->longest_us;
        if (can_wait(s->name)) waiting += s->calls;
    }
    if (json) return;
    printf("%-32s %9" PRIu64 " %12.1f %11.1f\n\n", all.name, all.calls, all.total_us, all.longest_us);
    printf("%" PRIu64 " calls of a function that can wait for the device\n", waiting);
}
