/* fuzz_snapshot.c - a fuzzer for what galloc writes: after some operations (fuzz_machine.h), with a history, stacks,
   tags, annotations and names of any bytes, snapshots are written in both formats and read back. They say the same, add
   up to the counters, and undo to nothing where the history is whole. Reports end inside their buffers; the trace is
   one that bench/trace.c reads. With FUZZ_MAIN defined: a program that runs the files it is given. */

#include "fuzz_machine.h"
#define MEMO 4096 /* values that a pickle remembers: few keys, and stacks */
#include "value.h"
#include "bench/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct text {
    char *data;
    size_t n, room;
    long parts, stop_at; /* stop_at: the part at which write refuses; 0: none */
} text;

static int keep(void *user, const void *data, size_t bytes)
{
    text *t = user;
    require(bytes > 0 && bytes <= 4096, "a part of another size than was promised");
    if (++t->parts == t->stop_at) return 1;
    if (t->n + bytes > t->room) {
        t->room = 2 * (t->n + bytes);
        t->data = realloc(t->data, t->room);
    }
    memcpy(t->data + t->n, data, bytes);
    t->n += bytes;
    return 0;
}

/* value.h takes any byte in a text, and after a backslash. */
static void check_json(const text *t)
{
    for (size_t i = 0; i < t->n; i++) {
        require(t->data[i] >= ' ' && t->data[i] <= '~', "a byte of JSON that is no printable ASCII");
        if (t->data[i] != '\\') continue;
        i++;
        require(i < t->n && (t->data[i] == '"' || t->data[i] == '\\'), "a backslash of JSON before another letter");
    }
}

static value *snapshot(galloc_pool *pool, int format)
{
    text t = {0};
    value *v;
    require(galloc_snapshot(pool, format, keep, &t) == cudaSuccess, "no snapshot");
    if (format == GALLOC_SNAPSHOT_JSON) check_json(&t);
    v = format == GALLOC_SNAPSHOT_JSON ? value_of_json(t.data, t.n) : value_of_pickle(t.data, t.n);
    require(v != NULL, format == GALLOC_SNAPSHOT_JSON ? "JSON that cannot be read" : "a pickle that cannot be read");
    free(t.data);
    return v;
}

/* Faults of the host, and of the one who writes, are told, and nothing is lost. */
static void try_snapshot(machine *m, galloc_pool *pool)
{
    text t = {.stop_at = next(m) % 8};
    cudaError_t err = galloc_snapshot(pool, (int)next(m) % 2, keep, &t);
    if (t.stop_at && t.parts >= t.stop_at) require(err == cudaErrorOperatingSystem, "a refusal is not told");
    else require(err == cudaSuccess || err == cudaErrorMemoryAllocation, "another error of a snapshot");
    free(t.data);
}

/* ---- the sums ---------------------------------------------------------------------------------------------------- */

typedef struct sums {
    uint64_t total, requested, used;
} sums;

static void add_segment(sums *sum, const value *segment)
{
    uint64_t at = number_of(segment, "address"), bytes = 0, allocated = 0, active = 0, requested = 0;
    const value *block = value_of(segment, "blocks");
    for (block = block ? block->first : NULL; block; block = block->next) {
        const char *state = text_of(block, "state");
        int used = !strcmp(state, "active_allocated");
        require(used || !strcmp(state, "inactive") || !strcmp(state, "active_pending_free"), "a state");
        require(number_of(block, "address") == at, "a gap between blocks");
        require(number_of(block, "requested_size") <= (used ? number_of(block, "size") : 0), "a requested size");
        at += number_of(block, "size");
        bytes += number_of(block, "size");
        if (used) allocated += number_of(block, "size");
        if (strcmp(state, "inactive")) active += number_of(block, "size");
        requested += number_of(block, "requested_size");
        sum->used += (uint64_t)used;
    }
    require(number_of(segment, "total_size") == bytes && number_of(segment, "allocated_size") == allocated, "a size");
    require(number_of(segment, "active_size") == active && number_of(segment, "requested_size") == requested, "a sum");
    sum->total += bytes;
    sum->requested += requested;
}

/* What allocations and frees of the history leave, and mappings and unmappings. */
static int from_begin[POOLS]; /* the pool's history is as old as the pool */

static void check_history(const value *trace, const value *pool, const sums *sum, int whole)
{
    const value *history = value_of(pool, "history"), *e;
    uint64_t live = 0, mapped = 0;
    if (history) require(value_count(trace) >= number_of(history, "entries"), "a number of entries");
    if (!whole || !history || number_of(history, "overwritten")) return;
    for (e = trace->first; e; e = e->next) {
        const char *action = text_of(e, "action");
        if (!strcmp(action, "alloc")) live += number_of(e, "size");
        if (!strcmp(action, "free_completed")) live -= number_of(e, "size");
        if (!strcmp(action, "segment_map") || !strcmp(action, "segment_alloc")) mapped += number_of(e, "size");
        if (!strcmp(action, "segment_unmap") || !strcmp(action, "segment_free")) mapped -= number_of(e, "size");
    }
    require(live == sum->requested, "the history leaves other bytes than are live");
    require(mapped == sum->total, "the history leaves other segments");
}

/* The formats have the same events, but for that of the pickle itself, which was taken later. */
static void check_same(const value *json, const value *pickle, int complete)
{
    const value *a = value_of(json, "device_traces"), *b = value_of(pickle, "device_traces");
    size_t n = 0;
    require(values_equal(value_of(json, "segments")->first, value_of(pickle, "segments")->first), "other segments");
    require(value_count(a) == value_count(b), "other traces");
    a = a->first ? a->first->first : NULL;
    b = b->first ? b->first->first : NULL;
    for (; complete && a && b; a = a->next, b = b->next, n++) {
        value x = *a, y = *b;
        x.next = y.next = NULL;
        require(values_equal(&x, &y), "other events");
    }
    require(!complete || !a, "events that the pickle has not");
}

static void check_snapshots(galloc_pool *pool, int whole)
{
    value *json, *pickle;
    const value *v, *mine;
    galloc_stats stats;
    sums sum = {0};
    uint64_t pages = 0;
    sim_run(-1);
    value_free(snapshot(pool, GALLOC_SNAPSHOT_JSON)); /* from now on no work ends */
    json = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    pickle = snapshot(pool, GALLOC_SNAPSHOT_PICKLE);
    stats = stats_of(pool);
    for (v = value_of(json, "segments")->first; v; v = v->next) add_segment(&sum, v);
    mine = value_of(value_of(json, "galloc"), "pools")->first;
    for (v = value_of(mine, "pages")->first; v; v = v->next) pages += v->first->next->number;
    require(sum.total + number_of(mine, "kept_by_driver") == stats.reserved.current, "segments and reserved");
    require(pages + number_of(mine, "kept_by_driver") == stats.reserved.current, "pages and reserved");
    require(sum.requested == stats.live.current && sum.used == stats.blocks.current, "blocks and live");
    require(number_of(mine, "live") == stats.live.current, "a counter");
    v = value_of(json, "device_traces");
    check_history(v->first, mine, &sum, whole);
    v = value_of(value_of(value_of(pickle, "galloc"), "pools")->first, "history");
    check_same(json, pickle, v && !number_of(v, "overwritten"));
    value_free(json);
    value_free(pickle);
}

/* ---- texts ------------------------------------------------------------------------------------------------------- */

static void check_text(machine *m, galloc_pool *pool)
{
    static char text[GALLOC_REPORT_TEXT + 1];
    size_t size = next(m) % 2 ? GALLOC_REPORT_TEXT : next(m) * 16;
    galloc_report report;
    cudaError_t err;
    memset(text, '#', sizeof text);
    if (next(m) % 2 || galloc_oom_report(&report) != cudaSuccess) err = galloc_live_text(pool, text, size);
    else err = galloc_report_text(&report, text, size);
    require(text[size] == '#', "a text leaves its buffer");
    require(!size || memchr(text, 0, size), "a text does not end");
    require(!err || !size || !text[0], "half a text");
    require(!err || err != cudaErrorInvalidValue || size < GALLOC_REPORT_TEXT, "a text that does not fit");
    for (char *at = text; size && *at; at++) require(*at == '\n' || (*at >= ' ' && *at <= '~'), "a byte of a text");
}

static void say(machine *m)
{
    char name[80];
    uint32_t how = next(m), n = next(m) % sizeof name, i;
    for (i = 0; i + 1 < n; i++) name[i] = (char)next(m);
    name[i] = 0;
    if (how & 1) require(galloc_annotate(how & 2 ? name : "step <b>\"\\") == cudaSuccess, "no annotation");
    else (void)galloc_tag_name(how & 4 ? next(m) : how, how & 8 ? NULL : name);
}

static void step_or_say(machine *m)
{
    uint32_t op = m->at < m->end ? *m->at : 0;
    galloc_pool *pool = m->pool[op / 16 % POOLS];
    if (op % 16 >= 5) {
        step(m);
        return;
    }
    (void)next(m);
    if (op % 16 == 0) say(m);
    else if (op % 16 == 1) check_text(m, op & 64 ? pool : NULL);
    else if (op % 16 == 2) try_snapshot(m, op & 64 ? pool : NULL);
    else if (op % 16 == 3) (void)galloc_pool_history_stacks(pool, next(m) % 33);
    else if (op & 32 && galloc_pool_history(pool, next(m) * 4) == cudaSuccess) from_begin[op / 16 % POOLS] = 0;
}

/* ---- the trace --------------------------------------------------------------------------------------------------- */

static void check_trace(const char *path)
{
    trace t;
    FILE *file = fopen(path, "r");
    char line[128] = "";
    if (!file) return; /* it could not be begun */
    if (fgets(line, sizeof line, file) && fgets(line, sizeof line, file) && strstr(line, "allocate,"))
        require(trace_load(&t, path) == 0, "the trace cannot be read");
    else memset(&t, 0, sizeof t);
    trace_free(&t);
    fclose(file);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const size_t entries[4] = {0, 9, 100, 1000};
    galloc_config config = galloc_config_default();
    char path[64], setting[80];
    machine m;
    uint32_t how = size ? data[size - 1] : 0;
    snprintf(path, sizeof path, "/tmp/fuzz_snapshot.%d.csv", (int)getpid());
    snprintf(setting, sizeof setting, "trace:%s", path);
    config.history = entries[how % 4];
    config.history_stacks = how / 4 % 4 ? 0 : how / 16 % 9;
    if (how >= 224) setenv("GALLOC_CONF", setting, 1);
    inside_log_anew();
    machine_begin(&m, data, size, &config);
    for (int i = 0; i < POOLS; i++) from_begin[i] = 1;
    unsetenv("GALLOC_CONF");
    while (m.at < m.end) step_or_say(&m);
    sim_fail_clear();
    check_snapshots(m.pool[how / 16 % POOLS], from_begin[how / 16 % POOLS]);
    machine_end(&m);
    if (how >= 224) check_trace(path);
    return 0;
}

#ifdef FUZZ_MAIN
#include "fuzz_main.h"
#endif
