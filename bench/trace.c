#define _GNU_SOURCE
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "map.h"

extern char **environ;

#define TRACE_HEADER "Thread,Time,Action,Pointer,Size,Stream"
#define TRACE_HEADER_MORE TRACE_HEADER ",Pool,More"
#define TRACE_LINE_MAX 1024                  /* bytes */
#define TRACE_BYTES_MAX ((uint64_t)1 << 50)  /* live at once: more than any device has, less than could overflow */
#define TRACE_SLOTS_MAX ((uint32_t)1 << 30)
#define TRACE_STREAMS_MAX ((uint32_t)1 << 24)
#define TRACE_THREADS_MAX ((uint32_t)1 << 24)
#define TRACE_ROOM_MAX ((uint64_t)1 << 55)
#define TRACE_SECONDS_MAX 1e12               /* a difference of what the column may have is infinite */
#define TRACE_NAMED_MAX ((uint32_t)1 << 30)

/* ---- lines of a file that may be compressed ---------------------------------------------------------------------- */

typedef struct reader {
    const char *path;
    int fd;
    pid_t gzip; /* the process that unpacks, or 0 */
    long line;  /* the number of the last one read */
    bool ended; /* that line has an end */
    size_t at, end;
    char buffer[1 << 16];
    char text[TRACE_LINE_MAX + 1];
} reader;

__attribute__((format(printf, 2, 3))) static int fail(const reader *r, const char *format, ...)
{
    va_list args;
    fprintf(stderr, "%s:", r->path);
    if (r->line) fprintf(stderr, "%ld:", r->line);
    fputc(' ', stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return -1;
}

/* Fills the buffer. Returns 0 also at the end of the file, when nothing was added. */
static int refill(reader *r)
{
    ssize_t n;
    do n = read(r->fd, r->buffer, sizeof r->buffer);
    while (n < 0 && errno == EINTR);
    if (n < 0) return fail(r, "cannot be read: %s", strerror(errno));
    r->at = 0;
    r->end = (size_t)n;
    return 0;
}

/* Lets gzip read the file from its beginning, and reads from gzip. No shell sees the file's name. */
static int unpack(reader *r)
{
    char *argv[] = {(char *)"gzip", (char *)"-dc", NULL};
    posix_spawn_file_actions_t actions;
    int ends[2], error;
    if (lseek(r->fd, 0, SEEK_SET) < 0) return fail(r, "a compressed trace must be a file, not a pipe");
    if (pipe2(ends, O_CLOEXEC)) return fail(r, "no pipe: %s", strerror(errno));
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, r->fd, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    error = posix_spawnp(&r->gzip, "gzip", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    close(r->fd);
    r->fd = ends[0];
    if (!error) return refill(r);
    r->gzip = 0;
    return fail(r, "is compressed and gzip cannot be run: %s", strerror(error));
}

static int reader_open(reader *r, const char *path)
{
    r->path = path;
    r->line = 0;
    r->gzip = 0;
    r->at = r->end = 0;
    r->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (r->fd < 0) return fail(r, "cannot be opened: %s", strerror(errno));
    if (refill(r)) return -1;
    if (r->end >= 2 && !memcmp(r->buffer, "\x1f\x8b", 2)) return unpack(r);
    return 0;
}

/* Closes, and says whether a compressed file could be unpacked. A gzip that was cut off, since a row was refused, is no
   failure of its own. */
static int reader_close(reader *r)
{
    int status = 0;
    if (r->fd >= 0) close(r->fd);
    if (!r->gzip) return 0;
    while (waitpid(r->gzip, &status, 0) < 0 && errno == EINTR) continue;
    if (!status || (WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE)) return 0;
    r->line = 0;
    return fail(r, "gzip could not unpack it; is the file damaged?");
}

/* The next line, without its end, into `text`. Returns 1, 0 at the end of the file, -1. */
static int next_line(reader *r)
{
    size_t n = 0;
    r->line++;
    r->ended = false;
    for (;;) {
        if (r->at == r->end && refill(r)) return -1;
        if (r->at == r->end) break;
        char c = r->buffer[r->at++];
        r->ended = c == '\n';
        if (r->ended) break;
        if (n == TRACE_LINE_MAX) return fail(r, "line longer than %d bytes", TRACE_LINE_MAX);
        if ((c < ' ' || c > '~') && c != '\r') return fail(r, "a byte that is no printable ASCII: not a trace");
        r->text[n++] = c;
    }
    if (!n && !r->end) return 0;
    if (n && r->text[n - 1] == '\r') n--;
    r->text[n] = '\0';
    return 1;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

enum { THREAD, TIME, ACTION, POINTER, SIZE, STREAM, FIELDS, POOL = FIELDS, MORE, ALL_FIELDS };

static int split(char *text, char **field, int fields)
{
    for (int i = 0; i < fields; i++) {
        field[i] = text;
        text = strchr(text, ',');
        if (!text) return i == fields - 1 ? 0 : -1;
        *text++ = '\0';
    }
    return -1;
}

/* A number and nothing else, decimal or 0x and hexadecimal. */
static bool number(const char *text, uint64_t max, uint64_t *value)
{
    static const char digits[] = "0123456789abcdef";
    unsigned base = 10;
    *value = 0;
    if (text[0] == '0' && text[1] == 'x') {
        base = 16;
        text += 2;
    }
    if (!*text) return false;
    for (; *text; text++) {
        const char *digit = strchr(digits, *text);
        if (!digit || digit - digits >= (int)base) return false;
        if (*value > (max - (uint64_t)(digit - digits)) / base) return false;
        *value = *value * base + (uint64_t)(digit - digits);
    }
    return true;
}

/* What is known while a log is read. */
typedef struct loader {
    trace *t;
    reader *r;
    map live;         /* pointer -> slot */
    map streams;      /* the log's number + 1 -> ours */
    map threads;      /* likewise */
    uint64_t *bytes;  /* of the block in each slot */
    uint32_t *spare;  /* slots that hold none */
    uint32_t nspare;
    size_t capacity, capslots, capmore, capnamed;
    uint32_t mores, named; /* so many elements of the trace's arrays */
    int fields;            /* of a row */
    uint32_t thread;       /* of this row */
    uint32_t found;        /* by number_of */
    uint64_t live_bytes;
    bool timed;       /* a row had a time */
    double began;     /* the first of them */
} loader;

/* Makes room for one more element. */
static bool reserve(void **array, size_t n, size_t *capacity, size_t each)
{
    if (n < *capacity) return true;
    size_t wanted = *capacity ? 2 * *capacity : 1024;
    void *p = realloc(*array, wanted * each);
    if (!p) return false;
    *array = p;
    *capacity = wanted;
    return true;
}

static int no_memory(const loader *l)
{
    return fail(l->r, "the host has no memory to hold this trace");
}

static int add_op(loader *l, uint64_t bytes, uint32_t slot, uint32_t stream, uint32_t more)
{
    trace *t = l->t;
    if (!reserve((void **)&t->op, t->n, &l->capacity, sizeof *t->op)) return no_memory(l);
    t->op[t->n++] = (trace_op){bytes, slot, stream, l->thread, more};
    return 0;
}

/* Our number for one of the log's, in the order in which they come. */
static int number_of(loader *l, map *known, uint64_t logged, uint32_t *n, uint32_t most, const char *what)
{
    uint64_t *found = map_find(known, logged + 1);
    l->found = found ? (uint32_t)*found : *n;
    if (found) return 0;
    if (*n == most) return fail(l->r, "more than %u %s", most, what);
    if (!map_put(known, logged + 1, *n)) return no_memory(l);
    ++*n;
    return 0;
}

static int stream_of(loader *l, uint64_t logged, uint32_t *stream)
{
    if (number_of(l, &l->streams, logged, &l->t->streams, TRACE_STREAMS_MAX, "streams")) return -1;
    *stream = l->found;
    if (!logged && l->fields > FIELDS) l->t->legacy = l->found + 1;
    return 0;
}

static int slot_take(loader *l, uint32_t *slot)
{
    size_t capacity = l->capslots;
    if (l->nspare) {
        *slot = l->spare[--l->nspare];
        return 0;
    }
    if (l->t->slots == TRACE_SLOTS_MAX) return fail(l->r, "more than %u blocks at once", TRACE_SLOTS_MAX);
    if (!reserve((void **)&l->bytes, l->t->slots, &capacity, sizeof *l->bytes) ||
        !reserve((void **)&l->spare, l->t->slots, &l->capslots, sizeof *l->spare))
        return no_memory(l);
    *slot = l->t->slots++;
    return 0;
}

/* Live bytes become `now` where they were `before`. */
static int count_bytes(loader *l, uint64_t before, uint64_t now)
{
    if (now > TRACE_BYTES_MAX - (l->live_bytes - before))
        return fail(l->r, "more than 2^50 bytes live at once: no device has so many");
    l->live_bytes += now - before;
    if (l->live_bytes > l->t->peak_live) l->t->peak_live = (size_t)l->live_bytes;
    return 0;
}

static int add_alloc(loader *l, uint64_t pointer, uint64_t bytes, uint32_t stream, uint32_t more)
{
    uint32_t slot = 0;
    if (!pointer) return fail(l->r, "%llu bytes at pointer 0", (unsigned long long)bytes);
    if (map_find(&l->live, pointer))
        return fail(l->r, "pointer 0x%llx is allocated twice without a free between", (unsigned long long)pointer);
    if (count_bytes(l, 0, bytes) || slot_take(l, &slot)) return -1;
    if (!map_put(&l->live, pointer, slot)) return no_memory(l);
    l->bytes[slot] = bytes;
    return add_op(l, bytes, slot, stream, more);
}

/* The block that is live at the pointer has another size from now on. */
static int add_resize(loader *l, uint32_t slot, uint64_t bytes, uint32_t stream, uint32_t more)
{
    if (count_bytes(l, l->bytes[slot], bytes)) return -1;
    l->bytes[slot] = bytes;
    return add_op(l, 0, slot, stream, more) || add_op(l, bytes, slot, stream, more) ? -1 : 0;
}

static int add_free(loader *l, uint64_t pointer, uint32_t stream, uint32_t more)
{
    uint64_t *known = pointer ? map_find(&l->live, pointer) : NULL;
    if (!known) return 0;
    uint32_t slot = (uint32_t)*known;
    map_remove(&l->live, pointer);
    l->live_bytes -= l->bytes[slot];
    l->spare[l->nspare++] = slot;
    return add_op(l, 0, slot, stream, more);
}

/* ---- the column More ---- */

/* Adds streams "2+3" to those that a row names. */
static int add_named(loader *l, char *text, uint32_t *n)
{
    while (text) {
        uint64_t logged;
        uint32_t stream;
        char *plus = strchr(text, '+');
        if (plus) *plus++ = '\0';
        if (!number(text, UINT64_MAX - 1, &logged)) return fail(l->r, "stream \"%.20s\" is no number", text);
        if (stream_of(l, logged, &stream)) return -1;
        if (l->named == TRACE_NAMED_MAX || !reserve((void **)&l->t->named, l->named, &l->capnamed, sizeof *l->t->named))
            return no_memory(l);
        l->t->named[l->named++] = stream;
        (*n)++;
        text = plus;
    }
    return 0;
}

/* Where the value of a word "name=value" begins; NULL: it is another word. */
static char *value_of(char *word, const char *name)
{
    size_t n = strlen(name);
    return !strncmp(word, name, n) && word[n] == '=' ? word + n + 1 : NULL;
}

static int read_word(loader *l, char *word, trace_more *more)
{
    char *value;
    uint64_t n = 0;
    if (!strcmp(word, "long")) more->lasting = true;
    else if (!strcmp(word, "resize")) more->resize = true;
    else if ((value = value_of(word, "after")) && !more->recorded) return add_named(l, value, &more->after);
    else if ((value = value_of(word, "recorded"))) return add_named(l, value, &more->recorded);
    else if ((value = value_of(word, "room")) && number(value, TRACE_ROOM_MAX, &n)) more->room = n;
    else if ((value = value_of(word, "align")) && number(value, TRACE_ROOM_MAX, &n) && !(n & (n - 1))) more->align = n;
    else if ((value = value_of(word, "tag")) && number(value, UINT32_MAX, &n)) more->tag = (uint32_t)n;
    else if ((value = value_of(word, "capture")) && number(value, UINT64_MAX, &n)) return 0; /* known to the log only */
    else if ((value = value_of(word, "waits")) && number(value, UINT64_MAX, &n)) return 0;
    else return fail(l->r, "\"%.40s\" is not what galloc writes in its last column", word);
    return 0;
}

/* Reads the words of the last column. *at: 0 if there are none. */
static int read_more(loader *l, char *text, uint32_t *at)
{
    trace_more more = {.named = l->named};
    *at = 0;
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) {
        if (read_word(l, word, &more)) return -1;
        *at = 1;
    }
    if (!*at) return 0;
    if (!l->mores) l->mores = 1; /* the empty one */
    if (l->mores == UINT32_MAX || !reserve((void **)&l->t->more, l->mores, &l->capmore, sizeof *l->t->more))
        return no_memory(l);
    l->t->more[0] = (trace_more){0};
    l->t->more[l->mores] = more;
    *at = l->mores++;
    return 0;
}

/* Seconds, or a time of day: hh:mm:ss, whose fraction follows a point or a third colon. NAN: neither. */
static double time_of(const char *text)
{
    unsigned hour = 0, minute = 0;
    double second = 0, micro = 0;
    char *end;
    if (!strchr(text, ':')) {
        second = strtod(text, &end);
        return *end || !isfinite(second) ? NAN : second;
    }
    if (sscanf(text, "%2u:%2u:%lf:%lf", &hour, &minute, &second, &micro) < 3) return NAN;
    return hour * 3600.0 + minute * 60.0 + second + micro / 1e6;
}

/* How long the log is, by its first and its last row. A time of day may have gone through midnight. */
static void note_time(loader *l, const char *text)
{
    double now = time_of(text);
    if (!l->timed) l->began = now;
    l->timed = true;
    l->t->seconds = now - l->began;
    if (l->t->seconds < 0 && strchr(text, ':')) l->t->seconds += 24 * 3600;
    if (!(l->t->seconds > 0 && l->t->seconds < TRACE_SECONDS_MAX)) l->t->seconds = 0;
}

static int add_call(loader *l, bool frees, uint64_t pointer, uint64_t bytes, uint32_t stream, uint32_t more)
{
    uint64_t *known = pointer ? map_find(&l->live, pointer) : NULL;
    bool resize = more && l->t->more[more].resize;
    if (resize && frees) return 0; /* the row after it has the new size */
    if (resize && known && bytes) return add_resize(l, (uint32_t)*known, bytes, stream, more);
    if (frees) return add_free(l, pointer, stream, more);
    return bytes ? add_alloc(l, pointer, bytes, stream, more) : 0;
}

static int add_row(loader *l)
{
    char *field[ALL_FIELDS];
    uint64_t thread, pointer, bytes, logged, pool;
    uint32_t stream, more = 0;
    if (split(l->r->text, field, l->fields))
        return fail(l->r, "a row has %d fields: %s", l->fields, l->fields == FIELDS ? TRACE_HEADER : TRACE_HEADER_MORE);
    if (!strcmp(field[ACTION], "allocate failure")) return 0;
    if (strcmp(field[ACTION], "allocate") && strcmp(field[ACTION], "free"))
        return fail(l->r, "unknown action \"%.20s\": \"allocate\" or \"free\"", field[ACTION]);
    if (!number(field[THREAD], UINT64_MAX - 1, &thread))
        return fail(l->r, "thread \"%.20s\" is no number", field[THREAD]);
    if (!*field[TIME] || field[TIME][strspn(field[TIME], "0123456789.:e-")])
        return fail(l->r, "time \"%.20s\" is neither seconds nor hh:mm:ss", field[TIME]);
    note_time(l, field[TIME]);
    if (!number(field[POINTER], UINT64_MAX, &pointer))
        return fail(l->r, "pointer \"%.20s\" is no number of at most 64 bits", field[POINTER]);
    if (!number(field[SIZE], TRACE_BYTES_MAX, &bytes))
        return fail(l->r, "size \"%.20s\" is no number up to 2^50", field[SIZE]);
    if (!number(field[STREAM], UINT64_MAX - 1, &logged))
        return fail(l->r, "stream \"%.20s\" is no number of at most 64 bits", field[STREAM]);
    if (number_of(l, &l->threads, thread, &l->t->threads, TRACE_THREADS_MAX, "threads")) return -1;
    l->thread = l->found;
    if (stream_of(l, logged, &stream)) return -1;
    if (l->fields > FIELDS && !number(field[POOL], UINT64_MAX, &pool))
        return fail(l->r, "pool \"%.20s\" is no number", field[POOL]);
    if (l->fields > FIELDS && read_more(l, field[MORE], &more)) return -1;
    return add_call(l, field[ACTION][0] == 'f', pointer, bytes, stream, more);
}

static int add_rows(loader *l)
{
    int more = next_line(l->r);
    if (more < 0) return -1;
    l->fields = more && !strcmp(l->r->text, TRACE_HEADER_MORE) ? ALL_FIELDS : FIELDS;
    if (!more || (l->fields == FIELDS && strcmp(l->r->text, TRACE_HEADER)))
        return fail(l->r, "not a trace: the first line must be %s", TRACE_HEADER);
    while ((more = next_line(l->r)) > 0 && (l->r->ended || l->fields == FIELDS))
        if (add_row(l)) return -1;
    if (more < 0) return -1;
    return l->t->n ? 0 : fail(l->r, "no allocations in this trace");
}

/* ---- a whole trace ----------------------------------------------------------------------------------------------- */

static void name_after(trace *t, const char *path)
{
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    snprintf(t->name, sizeof t->name, "%s", name);
    for (char *c = t->name; *c; c++)
        if (*c < ' ' || *c > '~') *c = '?'; /* it comes into charts and JSON */
    for (const char *ending = ".gz"; ending; ending = !strcmp(ending, ".gz") ? ".csv" : NULL) {
        size_t n = strlen(t->name), m = strlen(ending);
        if (n > m && !strcmp(t->name + n - m, ending)) t->name[n - m] = '\0';
    }
}

int trace_load(trace *t, const char *path)
{
    static reader r;
    loader l = {.t = t, .r = &r};
    *t = (trace){.n = 0};
    name_after(t, path);
    int result = reader_open(&r, path);
    if (!result) result = add_rows(&l);
    if (reader_close(&r)) result = -1;
    map_free(&l.live);
    map_free(&l.streams);
    map_free(&l.threads);
    free(l.bytes);
    free(l.spare);
    if (result) trace_free(t);
    return result;
}

void trace_free(trace *t)
{
    free(t->op);
    free(t->more);
    free(t->named);
    *t = (trace){.n = 0};
}
