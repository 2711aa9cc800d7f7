/* sim_user.c - programs that never call sim_start. The first call of CUDA starts a device for them, as the environment
   says, with memory behind it. When they end, what was queued is run, and what was found is printed; a program that
   would have ended well then ends with status 1. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sim_internal.h"

enum { TOLD = 20 }; /* so many different findings are printed */
enum { FINDINGS_FAIL, FINDINGS_PRINT, FINDINGS_IGNORE };

static int findings = FINDINGS_FAIL, leaks_wanted; /* leaks_wanted: 0 or 1 */
static pid_t owner; /* a child that was forked reports nothing */

/* ---- the environment -------------------------------------------------------------------------------------------- */

static void wrong(const char *name, const char *value, const char *may) {
    fprintf(stderr, "sim: %s=%s: it may be %s\n", name, value, may);
    _exit(2);
}

static void out_of_range(const char *name, const char *value, const char *may) {
    fprintf(stderr, "sim: %s=%s is out of range: it may be %s\n", name, value, may);
    _exit(2);
}

/* The place of the variable's value in a list that ends with NULL; `normally` when it is not set. */
static int choice(const char *name, const char *const *list, int normally, const char *may) {
    const char *value = getenv(name);
    if (!value || !*value) return normally;
    for (int i = 0; list[i]; i++)
        if (!strcmp(value, list[i])) return i;
    wrong(name, value, may);
    return normally;
}

/* With K, M, G or T behind it. */
static unsigned long long number(const char *name, unsigned long long normally, unsigned long long least,
                                 unsigned long long most, const char *may) {
    static const char units[] = "KMGT";
    const char *value = getenv(name), *unit;
    if (!value || !*value) return normally;
    char *end;
    errno = 0;
    unsigned long long n = strtoull(value, &end, 10);
    int shift = *end && (unit = strchr(units, *end)) ? (int)(unit - units + 1) * 10 : 0;
    if (shift) end++;
    if (*value < '0' || *value > '9' || *end) wrong(name, value, may);
    if (errno || n > most >> shift || n << shift < least) out_of_range(name, value, may);
    return n << shift;
}

static sim_options options(void) {
    static const char *const modes[] = {"ledger", "backed", NULL}, *const paces[] = {"random", "still", "prompt", NULL};
    static const char *const what[] = {"fail", "print", "ignore", NULL}, *const switched[] = {"0", "1", NULL};
    sim_options o = sim_defaults();
    o.mode = choice("SIM_MODE", modes, SIM_BACKED, "backed or ledger");
    bool backed = o.mode == SIM_BACKED;
    unsigned long long memory = backed ? 4ull << 30 : 64ull << 30, most = backed ? 1ull << 40 : 1ull << 44;
    o.memory = (size_t)number("SIM_MEMORY", memory, SM_PAGE, most,
                              backed ? "a number of bytes from 2M to 1T, with K, M, G or T: 8G"
                                     : "a number of bytes from 2M to 16T, with K, M, G or T: 8G");
    o.memory -= o.memory % SM_PAGE;
    o.devices = (int)number("SIM_DEVICES", 1, 1, SM_DEVICES, "1 to 16");
    o.seed = number("SIM_SEED", 1, 0, ~0ull, "a number");
    o.pace = choice("SIM_PACE", paces, 0, "random, still or prompt") - 1;
    findings = choice("SIM_FINDINGS", what, FINDINGS_FAIL, "fail, print or ignore");
    leaks_wanted = choice("SIM_LEAKS", switched, 0, "0 or 1");
    return o;
}

/* ---- what was found --------------------------------------------------------------------------------------------- */

/* Are two findings the same but for the numbers of operations? */
static bool alike(const char *a, const char *b) {
    static const char word[] = "operation ";
    while (*a && *a == *b) {
        bool number = !strncmp(a, word, sizeof word - 1) && !strncmp(b, word, sizeof word - 1);
        a += number ? sizeof word - 1 : 1;
        b += number ? sizeof word - 1 : 1;
        if (!number) continue;
        a += strspn(a, "0123456789");
        b += strspn(b, "0123456789");
    }
    return *a == *b;
}

/* A program may crash, or end by _exit: the first finding is told at once. Is it like one that is noted? */
bool sm_user_found(const char *text) {
    if (findings != FINDINGS_IGNORE && sm.findings[SIM_ANY] == 1 && getpid() == owner)
        fprintf(stderr, "sim: found: %s\n", text);
    for (int i = 0; i < sm.nfindings; i++) {
        if (!alike(sm.finding[i], text)) continue;
        sm.alike[i]++;
        return true;
    }
    return false;
}

static void print_findings(void) {
    long told = 0, all = sm.findings[SIM_ANY];
    fprintf(stderr, "sim: %ld finding%s on the simulated device:\n", all, all == 1 ? "" : "s");
    for (int i = 0; i < sm.nfindings && i < TOLD; i++) {
        fprintf(stderr, "sim:   %s", sm.finding[i]);
        if (sm.alike[i] > 1) fprintf(stderr, " (and %ld more like it)", sm.alike[i] - 1);
        fputc('\n', stderr);
        told += sm.alike[i];
    }
    if (told < all) fprintf(stderr, "sim:   and %ld others\n", all - told);
    fprintf(stderr, "sim: SIM_SEED=%llu has the same order of events again; SIM_FINDINGS=print keeps the exit status, "
            "SIM_FINDINGS=ignore says nothing; docs/simulated-device.md explains\n", (unsigned long long)sm.opt.seed);
}

static void print_leaks(void) {
    char text[256];
    if (leaks_wanted && sim_leaks(text, sizeof text))
        fprintf(stderr, "sim: note: never given back: %s", text);
}

/* ---- the end of the process ------------------------------------------------------------------------------------- */

static bool is_mine(void) { return sm.user && getpid() == owner; }

/* While the program's own objects are still there: kernels that were queued may use them. */
static void run_rest(void) {
    if (!is_mine() || sm_lock_for(5)) return;
    if (!sm_self()->calling) sm_run_all();
    (void)sm_end(0);
}

/* As late as can be: destructors of the program's objects call CUDA too. */
static void report(int status, void *unused) {
    (void)unused;
    if (!is_mine()) return;
    bool locked = !sm_lock_for(5);
    if (locked && !sm_self()->calling) sm_run_all();
    if (!locked) fprintf(stderr, "sim: a thread is still inside a call of CUDA\n");
    long pending = sm.pending, n = findings == FINDINGS_IGNORE ? 0 : sm.findings[SIM_ANY];
    if (pending) fprintf(stderr, "sim: note: %ld operations never ran: they wait for something\n", pending);
    if (n) print_findings();
    print_leaks();
    sm.user = false; /* said once */
    if (locked) sm_unlock();
    if (!n || status || findings != FINDINGS_FAIL) return;
    fflush(NULL);
    _exit(1);
}

/* Registered before the program's own handlers and objects, so that it comes after them. */
__attribute__((constructor(101))) static void prepare(void) { on_exit(report, NULL); }

/* The lock is held. */
void sm_user_start(void) {
    static bool registered;
    sim_options o = options();
    if (sm_start(&o)) {
        fprintf(stderr, "sim: the device cannot be started; SIM_MODE=ledger needs no memory behind it\n");
        _exit(2);
    }
    sm.user = true;
    owner = getpid();
    if (!registered) atexit(run_rest);
    registered = true;
}
