/* adversary.c - writes traces that are built to hurt an allocator, in the format that replay reads. Each is the same on
   every machine: integers only, and a generator of its own. No trace of a real program looks like these; an allocator
   that does well on them has not been fitted to a few programs. */

#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "usage: adversary [options] FOLDER [NAME...]\n"
    "\n"
    "Writes FOLDER/NAME.csv for each adversary, or for those named: logs of allocator calls, built to hurt.\n"
    "\n"
    "  --list      print the names, and what each does\n"
    "  --quick     small ones, for a test\n"
    "  --seed N    other sizes and orders (1)\n"
    "  --help      this text\n";

enum { USAGE = 2 }; /* exit status: a wrong option or name */

#define KIB ((uint64_t)1 << 10)
#define MIB ((uint64_t)1 << 20)

/* ---- a log that is being written --------------------------------------------------------------------------------- */

typedef struct block {
    uint64_t id; /* its pointer in the log, never given twice */
    uint64_t bytes;
    uint32_t stream;
} block;

typedef struct list {
    block *block;
    size_t n, capacity;
    size_t first; /* those before it were taken from the front */
} list;

typedef struct writer {
    FILE *file;
    uint64_t memory; /* bytes that the program wants to have live */
    uint64_t steps;  /* about as many calls are made */
    uint64_t random;
    uint64_t rows, ids;
    uint64_t live;
} writer;

static uint64_t any(writer *w)
{
    uint64_t x = w->random += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t below(writer *w, uint64_t n) { return any(w) % n; }

/* Each doubling between the two is as likely as the next; within one all sizes are, in steps of 4 bytes. */
static uint64_t size_between(writer *w, uint64_t least, uint64_t most)
{
    int doublings = 0;
    while (least << (doublings + 1) <= most) doublings++;
    uint64_t bytes = least << below(w, (uint64_t)doublings);
    return (bytes + below(w, bytes)) / 4 * 4;
}

static void row(writer *w, const char *action, const block *b, uint32_t stream)
{
    fprintf(w->file, "0,%" PRIu64 ".%06" PRIu64 ",%s,0x%" PRIx64 ",%" PRIu64 ",%" PRIu32 "\n", w->rows / 1000000,
            w->rows % 1000000, action, b->id, b->bytes, stream);
    w->rows++;
}

static block take(writer *w, uint64_t bytes, uint32_t stream)
{
    block b = {++w->ids << 9, bytes, stream};
    w->live += bytes;
    row(w, "allocate", &b, stream);
    return b;
}

static void give_on(writer *w, block b, uint32_t stream)
{
    w->live -= b.bytes;
    row(w, "free", &b, stream);
}

static void give(writer *w, block b) { give_on(w, b, b.stream); }

/* ---- lists of live blocks ---------------------------------------------------------------------------------------- */

static size_t count(const list *l) { return l->n - l->first; }

static void push(list *l, block b)
{
    if (l->n == l->capacity) {
        l->capacity = l->capacity ? 2 * l->capacity : 256;
        l->block = realloc(l->block, l->capacity * sizeof *l->block);
        if (!l->block) {
            fprintf(stderr, "the host has no memory\n");
            exit(1);
        }
    }
    l->block[l->n++] = b;
}

static block pop_oldest(list *l) { return l->block[l->first++]; }
static block pop_newest(list *l) { return l->block[--l->n]; }

static block pop_any(writer *w, list *l)
{
    size_t i = l->first + below(w, count(l));
    block b = l->block[i];
    l->block[i] = l->block[--l->n];
    return b;
}

static void clear(list *l)
{
    free(l->block);
    *l = (list){NULL, 0, 0, 0};
}

/* Allocates once `most` suffices, after having freed the oldest, or any. */
static void replace_oldest(writer *w, list *l, uint64_t bytes, uint64_t most)
{
    while (count(l) && w->live + bytes > most) give(w, pop_oldest(l));
    push(l, take(w, bytes, 0));
}

static void replace_any(writer *w, list *l, uint64_t bytes, uint64_t most)
{
    while (count(l) && w->live + bytes > most) give(w, pop_any(w, l));
    push(l, take(w, bytes, 0));
}

/* ---- sizes ------------------------------------------------------------------------------------------------------- */

/* Whatever is freed is a little too small for what comes; then too large by little. */
static void ramp(writer *w)
{
    list l = {0};
    while (w->rows < w->steps) {
        for (uint64_t n = 4 * KIB; n < w->memory / 8; n += n / 32 / 512 * 512 + 512) replace_oldest(w, &l, n, w->memory);
        for (uint64_t n = w->memory / 8; n > 4 * KIB; n -= n / 32 / 512 * 512 + 512) replace_oldest(w, &l, n, w->memory);
    }
    clear(&l);
}

static void small_and_huge(writer *w)
{
    list small = {0}, huge = {0};
    while (w->rows < w->steps) {
        push(&small, take(w, size_between(w, 512, 64 * KIB), 0));
        if (count(&small) > w->steps / 16) give(w, pop_any(w, &small));
        if (count(&huge) > 3) give(w, pop_oldest(&huge));
        push(&huge, take(w, size_between(w, w->memory / 64, w->memory / 4), 0));
    }
    clear(&small);
    clear(&huge);
}

static void log_uniform(writer *w)
{
    list l = {0};
    while (w->rows < w->steps) replace_any(w, &l, size_between(w, 512, w->memory / 16), w->memory);
    clear(&l);
}

/* A little more than whole pages of any size: what is freed covers few pages wholly. */
static void straddle(writer *w)
{
    static const uint64_t pages[] = {1, 1, 1, 2, 2, 3, 5, 8, 13, 21};
    list l = {0};
    while (w->rows < w->steps) {
        uint64_t n = pages[below(w, sizeof pages / sizeof *pages)] * (w->memory / 2048);
        replace_any(w, &l, n + 512 * (1 + below(w, 3)), w->memory);
    }
    clear(&l);
}

/* Vectors that grow by a half or to the double, each into a new block beside the old one. */
static void vectors(writer *w)
{
    enum { VECTORS = 24 };
    block v[VECTORS];
    for (int i = 0; i < VECTORS; i++) v[i] = take(w, 64 * KIB + 4 * below(w, 4 * KIB), 0);
    while (w->rows < w->steps) {
        size_t i = below(w, VECTORS);
        uint64_t bytes = i % 2 ? 2 * v[i].bytes : v[i].bytes + v[i].bytes / 2;
        if (bytes > w->memory / VECTORS) bytes = 64 * KIB + 4 * below(w, 4 * KIB);
        block grown = take(w, bytes, 0);
        give(w, v[i]);
        v[i] = grown;
    }
}

/* ---- lifetimes --------------------------------------------------------------------------------------------------- */

/* Fills memory, then lets go of all but one block in fifty, which lives for four teeth more. */
static void sawtooth(writer *w)
{
    list tooth = {0}, kept[4] = {{0}};
    for (int i = 0; w->rows < w->steps; i++) {
        uint64_t most = w->memory >> (5 + below(w, 4)), bytes;
        list *k = &kept[i % 4];
        while (count(k)) give(w, pop_any(w, k));
        while (bytes = size_between(w, most / 256, most), w->live + bytes <= w->memory)
            push(&tooth, take(w, bytes, 0));
        while (count(&tooth)) {
            block b = pop_any(w, &tooth);
            if (below(w, 50)) give(w, b);
            else push(k, b);
        }
    }
    clear(&tooth);
    for (int i = 0; i < 4; i++) clear(&kept[i]);
}

/* Robson's: of all blocks every second one goes, then come blocks of twice the size, which fit nowhere between those
   that are left. Placed one behind the other, that is; an allocator may do otherwise. */
static void checkerboard(writer *w, uint64_t bytes, uint64_t memory)
{
    list l = {0}, left = {0};
    for (; bytes <= memory / 8; bytes *= 2) {
        while (w->live + bytes <= memory) push(&l, take(w, bytes, 0));
        for (size_t i = 0; i < l.n; i++) {
            if (i % 2) push(&left, l.block[i]);
            else give(w, l.block[i]);
        }
        list empty = l;
        l = left;
        empty.n = 0;
        left = empty;
    }
    while (count(&l)) give(w, pop_oldest(&l));
    clear(&l);
    clear(&left);
}

static void checker_pages(writer *w)
{
    for (uint64_t bytes = w->memory / 1024; w->rows < w->steps; bytes += w->memory / 8192) {
        if (bytes > w->memory / 512) bytes = w->memory / 1024;
        checkerboard(w, bytes, w->memory);
    }
}

static void checker_small(writer *w) { checkerboard(w, w->memory / w->steps, w->memory / 4); }

/* Between large blocks that come and go, tiny ones that stay. */
static void slow_leak(writer *w)
{
    list l = {0};
    while (w->rows < w->steps) {
        replace_any(w, &l, size_between(w, w->memory / 512, w->memory / 16), w->memory);
        take(w, size_between(w, 512, 8 * KIB), 0);
    }
    clear(&l);
}

/* The steps of a training whose batch grows: each frees in the reverse order what it allocated, and the next one's
   blocks are all a little larger. */
static void growing_batch(writer *w)
{
    enum { LAYERS = 64 };
    uint64_t width[LAYERS], all = 0, steps = w->steps / (4 * LAYERS);
    for (int i = 0; i < LAYERS; i++) all += width[i] = size_between(w, 16, 256);
    for (int i = 0; i < LAYERS; i++) take(w, w->memory / 8 * width[i] / all, 0);
    for (uint64_t batch = steps / 4; batch < steps / 4 + steps; batch++) {
        uint64_t scale = w->memory / 2 / all * batch / (2 * steps);
        list l = {0};
        for (int i = 0; i < LAYERS; i++) push(&l, take(w, width[i] * scale, 0));
        for (int i = LAYERS - 1; i >= 0; i--) {
            block gradient = take(w, width[i] * scale * 2, 0);
            give(w, pop_newest(&l));
            give(w, gradient);
        }
        clear(&l);
    }
}

/* Fills, then empties nine tenths: the newest first, the oldest first, or any. */
static void phases(writer *w)
{
    list l = {0};
    for (int phase = 0; w->rows < w->steps; phase++) {
        uint64_t most = w->memory >> (4 + below(w, 6)), bytes;
        while (bytes = size_between(w, most / 64, most), w->live + bytes <= w->memory) push(&l, take(w, bytes, 0));
        while (w->live > w->memory / 10)
            give(w, phase % 3 == 0 ? pop_newest(&l) : phase % 3 == 1 ? pop_oldest(&l) : pop_any(w, &l));
    }
    clear(&l);
}

/* How long a block lives says nothing of its size: each doubling of a lifetime is as likely as the next. */
static void lifetimes(writer *w)
{
    uint64_t n = w->steps / 2;
    list *ends = calloc(n, sizeof *ends);
    if (!ends) exit(1);
    for (uint64_t i = 0; i < n; i++) {
        while (count(&ends[i])) give(w, pop_newest(&ends[i]));
        clear(&ends[i]);
        uint64_t end = i + size_between(w, 4, n / 4);
        block b = take(w, size_between(w, 512, w->memory / 64), 0);
        if (end < n) push(&ends[end], b);
    }
    free(ends);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

/* A few streams do most of the work; which ones they are changes, and what they freed stays behind. */
static void uneven_streams(writer *w)
{
    enum { STREAMS = 32, TURNS = 8 };
    list l[STREAMS] = {{0}};
    while (w->rows < w->steps) {
        uint64_t turn = w->rows * TURNS / w->steps, low = below(w, STREAMS);
        uint32_t s = (uint32_t)((below(w, low + 1) * (low + 1) / STREAMS + 5 * turn) % STREAMS);
        uint64_t bytes = size_between(w, 64 * KIB, w->memory / 32);
        if (count(&l[s]) && (below(w, 2) || w->live + bytes > w->memory)) give(w, pop_any(w, &l[s]));
        else if (w->live + bytes <= w->memory) push(&l[s], take(w, bytes, s));
        for (uint32_t i = 0; w->live > w->memory - w->memory / 16 && i < STREAMS; i++)
            if (count(&l[i])) give(w, pop_any(w, &l[i]));
    }
    for (int i = 0; i < STREAMS; i++) clear(&l[i]);
}

/* Each phase has streams of its own, which never come again. Half of what it allocates the next one frees. */
static void fresh_streams(writer *w)
{
    enum { STREAMS = 3, ROWS = 1024 };
    list l = {0}, rest = {0};
    for (uint32_t phase = 0; w->rows < w->steps; phase++) {
        while (w->rows < (phase + 1) * ROWS) {
            uint32_t s = phase * STREAMS + (uint32_t)below(w, STREAMS);
            uint64_t bytes = size_between(w, 64 * KIB, w->memory / 32);
            if (count(&rest) && below(w, 2)) give_on(w, pop_any(w, &rest), s);
            while (count(&rest) + count(&l) && w->live + bytes > w->memory)
                if (count(&rest)) give_on(w, pop_any(w, &rest), s);
                else give(w, pop_any(w, &l));
            push(&l, take(w, bytes, s));
        }
        while (count(&l)) {
            block b = pop_any(w, &l);
            if (below(w, 2)) give(w, b);
            else push(&rest, b);
        }
    }
    clear(&l);
    clear(&rest);
}

/* A pipeline: what one stream allocates the next one frees, some time later; the sizes change with time. */
static void pipeline(writer *w)
{
    enum { STAGES = 6 };
    list l[STAGES] = {{0}};
    while (w->rows < w->steps) {
        uint32_t s = (uint32_t)below(w, STAGES);
        uint64_t most = w->memory >> (5 + w->rows * 4 / w->steps), bytes = size_between(w, most / 16, most);
        push(&l[s], take(w, bytes, s));
        while (w->live > w->memory - most) {
            uint32_t from = (uint32_t)below(w, STAGES);
            if (count(&l[from])) give_on(w, pop_oldest(&l[from]), (from + 1) % STAGES);
        }
    }
    for (int i = 0; i < STAGES; i++) clear(&l[i]);
}

/* ---- main -------------------------------------------------------------------------------------------------------- */

typedef struct adversary {
    const char *name;
    void (*write)(writer *w);
    const char *what;
} adversary;

static const adversary adversaries[] = {
    {"ramp", ramp, "sizes that rise by 3 % a step, and fall"},
    {"small_huge", small_and_huge, "small blocks that stay, huge ones that come and go"},
    {"log_uniform", log_uniform, "all sizes alike, any block replaced"},
    {"straddle", straddle, "sizes a little above whole pages"},
    {"vectors", vectors, "vectors that grow into new blocks"},
    {"sawtooth", sawtooth, "fills all memory, empties it but for a few blocks"},
    {"checker_pages", checker_pages, "every second block freed, twice the size asked; from page size on"},
    {"checker_small", checker_small, "the same from small blocks on: Robson's"},
    {"slow_leak", slow_leak, "tiny blocks that stay between large ones"},
    {"growing_batch", growing_batch, "a training whose batch grows each step"},
    {"phases", phases, "fills; empties newest first, oldest first, any"},
    {"lifetimes", lifetimes, "lifetimes of all lengths, whatever the size"},
    {"uneven_streams", uneven_streams, "32 streams, most work on a few, on others later"},
    {"fresh_streams", fresh_streams, "streams that never come again"},
    {"pipeline", pipeline, "freed on another stream than allocated"},
};
enum { ADVERSARIES = sizeof adversaries / sizeof *adversaries };

static int write_file(const adversary *a, const char *folder, writer w)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.csv", folder, a->name);
    w.file = fopen(path, "w");
    if (w.file) {
        for (const char *c = a->name; *c; c++) w.random = w.random * 31 + (unsigned char)*c;
        fputs("Thread,Time,Action,Pointer,Size,Stream\n", w.file);
        a->write(&w);
    }
    if (w.file && !ferror(w.file) && !fclose(w.file)) return 0;
    fprintf(stderr, "%s cannot be written: %s\n", path, strerror(errno));
    return 1;
}

static const adversary *find(const char *name)
{
    for (int i = 0; i < ADVERSARIES; i++)
        if (!strcmp(adversaries[i].name, name)) return &adversaries[i];
    fprintf(stderr, "no adversary is called \"%s\": adversary --list has the names\n", name);
    return NULL;
}

static void print_list(void)
{
    for (int i = 0; i < ADVERSARIES; i++) printf("%-16s %s\n", adversaries[i].name, adversaries[i].what);
}

static bool read_options(writer *w, int argc, char **argv)
{
    enum { LIST = 1, QUICK, SEED, HELP };
    static const struct option options[] = {
        {"list", no_argument, NULL, LIST},      {"quick", no_argument, NULL, QUICK},
        {"seed", required_argument, NULL, SEED}, {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}
    };
    char *end = NULL;
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == LIST) print_list(), exit(0);
        else if (option == QUICK) w->memory = 512 * MIB, w->steps = 8192;
        else if (option == SEED) w->random = strtoull(optarg, &end, 10);
        else if (option == HELP) fputs(help, stdout), exit(0);
        else return false; /* getopt has said why */
        if (option == SEED && (*optarg < '0' || *optarg > '9' || *end))
            return fprintf(stderr, "--seed %s: a whole number is needed\n", optarg), false;
    }
    if (optind == argc) fprintf(stderr, "no folder is given\n");
    return optind < argc;
}

int main(int argc, char **argv)
{
    writer w = {.memory = 8192 * MIB, .steps = 131072, .random = 1};
    int status = 0;
    if (!read_options(&w, argc, argv)) {
        fprintf(stderr, "adversary --help lists the options\n");
        return USAGE;
    }
    const char *folder = argv[optind++];
    for (int i = optind; i < argc; i++)
        if (!find(argv[i])) return USAGE;
    for (int i = optind; i < argc; i++) status |= write_file(find(argv[i]), folder, w);
    for (int i = 0; optind == argc && i < ADVERSARIES; i++) status |= write_file(&adversaries[i], folder, w);
    return status;
}
