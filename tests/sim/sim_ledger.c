/* sim_ledger.c - what happens before what, and who last touched which bytes.

   An operation's clock is known when it is queued: its stream's clock, its own place in the stream, and everything that
   the host has seen complete by then. It never depends on what the scheduler happened to run. Since the host's
   knowledge only grows, it is kept in one place (sm.host) and left out of the streams' clocks. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* ---- clocks ---------------------------------------------------------------------------------------------------- */

static sm_clock *clock_new(int room) {
    sm_clock *c = sm_alloc(sizeof *c + (size_t)room * sizeof c->e[0]);
    c->refs = 1;
    return c;
}

void sm_clock_drop(sm_clock *c) {
    if (c && --c->refs == 0) free(c);
}

static uint64_t clock_get(const sm_clock *c, uint32_t stream) {
    int low = 0, high = c ? c->n : 0;
    while (low < high) {
        int mid = (low + high) / 2;
        if (c->e[mid].stream < stream) low = mid + 1;
        else high = mid;
    }
    return c && low < c->n && c->e[low].stream == stream ? c->e[low].no : 0;
}

static bool says_more(const sm_stream *s, sm_epoch e) {
    return e.stream != s->index && e.no > sm.host[e.stream] && e.no > clock_get(s->clock, e.stream);
}

static bool stamp_says_more(const sm_stream *s, const sm_stamp *t) {
    if (says_more(s, (sm_epoch){t->stream->index, t->no})) return true;
    for (int i = 0; t->clock && i < t->clock->n; i++)
        if (says_more(s, t->clock->e[i])) return true;
    return false;
}

static void clock_put(sm_clock *to, sm_epoch e) {
    if (e.no <= sm.host[e.stream]) return;
    sm_epoch *last = to->n ? &to->e[to->n - 1] : NULL;
    if (!last || last->stream != e.stream) to->e[to->n++] = e;
    else if (last->no < e.no) last->no = e.no;
}

/* The next operation of s comes after the stamp. */
void sm_join(sm_stream *s, const sm_stamp *after) {
    if (!after->stream || !stamp_says_more(s, after)) return;
    const sm_clock *a = s->clock, *b = after->clock;
    int na = a ? a->n : 0, nb = b ? b->n : 0, i = 0, k = 0;
    sm_epoch own = {after->stream->index, after->no};
    sm_clock *c = clock_new(na + nb + 1);
    while (i < na || k < nb || own.no) {
        uint32_t least = own.no ? own.stream : UINT32_MAX;
        if (i < na && a->e[i].stream < least) least = a->e[i].stream;
        if (k < nb && b->e[k].stream < least) least = b->e[k].stream;
        if (i < na && a->e[i].stream == least) clock_put(c, a->e[i++]);
        if (k < nb && b->e[k].stream == least) {
            if (least != s->index) clock_put(c, b->e[k]);
            k++;
        }
        if (own.no && own.stream == least) {
            if (least != s->index) clock_put(c, own);
            own.no = 0;
        }
    }
    sm_clock_drop(s->clock);
    s->clock = c;
}

void sm_host_saw(const sm_stamp *t) {
    if (!t->stream) return;
    uint64_t *host = sm.host;
    if (host[t->stream->index] < t->no) host[t->stream->index] = t->no;
    for (int i = 0; t->clock && i < t->clock->n; i++)
        if (host[t->clock->e[i].stream] < t->clock->e[i].no) host[t->clock->e[i].stream] = t->clock->e[i].no;
}

/* Comes e before the operation of s that is being queued, or is it that operation? */
bool sm_before(const sm_stream *s, sm_epoch e) {
    if (e.no <= sm.host[e.stream]) return true;
    if (e.stream == s->index) return e.no <= s->queued;
    return e.no <= clock_get(s->clock, e.stream);
}

/* ---- fronts ---------------------------------------------------------------------------------------------------- */

void sm_front_drop(sm_front *f) {
    sm_clock_drop(f->more);
    *f = (sm_front){{0, 0}, NULL};
}

/* Adds the operation that s queues, and forgets those that come before it. */
void sm_front_add(sm_front *f, const sm_stream *s) {
    sm_epoch now = {s->index, s->queued};
    if (!f->more && sm_before(s, f->last)) {
        f->last = now;
        return;
    }
    int n = f->more ? f->more->n : 0;
    sm_clock *more = clock_new(n + 1);
    for (int i = 0; i < n; i++)
        if (!sm_before(s, f->more->e[i])) more->e[more->n++] = f->more->e[i];
    if (!sm_before(s, f->last)) more->e[more->n++] = f->last;
    sm_clock_drop(f->more);
    f->more = more->n ? more : NULL;
    if (!more->n) sm_clock_drop(more);
    f->last = now;
}

bool sm_host_knows(const sm_front *f) {
    if (f->last.no > sm.host[f->last.stream]) return false;
    for (int i = 0; f->more && i < f->more->n; i++)
        if (f->more->e[i].no > sm.host[f->more->e[i].stream]) return false;
    return true;
}

/* ---- the history of a page ------------------------------------------------------------------------------------- */

/* One access while it is looked up; says at most one thing of each kind. */
typedef struct look {
    const sim_access *access;
    const sm_stream *stream;
    bool raced, stale;
} look;

static void page_room(sm_page *p) {
    size_t cap = (size_t)p->cap;
    p->span = sm_grow(p->span, (size_t)p->n, &cap, sizeof *p->span);
    p->cap = (int)cap;
}

/* The span that holds the byte. */
static int span_at(const sm_page *p, uint32_t at) {
    int low = 0, high = p->n;
    while (high - low > 1) {
        int mid = (low + high) / 2;
        if (p->span[mid].begin <= at) low = mid;
        else high = mid;
    }
    return low;
}

static void span_split(sm_page *p, int i, uint32_t at) {
    page_room(p);
    memmove(&p->span[i + 1], &p->span[i], (size_t)(p->n - i) * sizeof *p->span);
    p->n++;
    if (p->span[i].reads.more) p->span[i].reads.more->refs++;
    p->span[i].end = at;
    p->span[i + 1].begin = at;
}

static void race(look *l, sm_epoch e, const char *earlier) {
    if (l->raced) return;
    l->raced = true;
    sm_find(SIM_RACE, "operation %llu of stream %llu %s %p, %zu bytes, unordered with operation %llu of stream %llu, "
            "which %s some of them",
            (unsigned long long)l->stream->queued, l->stream->id, l->access->how & SIM_WRITE ? "writes" : "reads",
            l->access->ptr, l->access->bytes, (unsigned long long)e.no, sm.streams[e.stream]->id, earlier);
}

static void check_write(look *l, const sm_front *reads) {
    if (reads->last.no && !sm_before(l->stream, reads->last)) race(l, reads->last, "read");
    for (int i = 0; reads->more && i < reads->more->n; i++)
        if (!sm_before(l->stream, reads->more->e[i])) race(l, reads->more->e[i], "read");
}

static void check_tag(look *l, const sm_span *s, uint64_t address) {
    if (l->stale || !(l->access->how & SIM_CHECK) || (s->write.no && s->tag == l->access->tag)) return;
    l->stale = true;
    if (s->write.no)
        sm_find(SIM_STALE, "%p should hold %llx but holds %llx, by operation %llu of stream %llu",
                (void *)(uintptr_t)address, (unsigned long long)l->access->tag, (unsigned long long)s->tag,
                (unsigned long long)s->write.no, sm.streams[s->write.stream]->id);
    else
        sm_find(SIM_STALE, "%p should hold %llx but was never written", (void *)(uintptr_t)address,
                (unsigned long long)l->access->tag);
}

/* Spans i .. j become one, written by the operation. */
static void write_spans(look *l, sm_page *p, int i, int j) {
    sm_epoch now = {l->stream->index, l->stream->queued};
    sm_span all = {p->span[i].begin, p->span[j].end, now, l->access->tag, {{0, 0}, NULL}};
    for (int k = i; k <= j; k++) sm_front_drop(&p->span[k].reads);
    p->span[i] = all;
    memmove(&p->span[i + 1], &p->span[j + 1], (size_t)(p->n - j - 1) * sizeof *p->span);
    p->n -= j - i;
}

/* Bytes from .. to of a page, which the access sees at `address`. */
static void touch_page(look *l, sm_page *p, uint32_t from, uint32_t to, uint64_t address) {
    if (!p->n) {
        page_room(p);
        p->span[p->n++] = (sm_span){0, SM_PAGE, {0, 0}, 0, {{0, 0}, NULL}};
    }
    int i = span_at(p, from);
    if (p->span[i].begin < from) span_split(p, i++, from);
    int j = i;
    while (p->span[j].end < to) j++;
    if (p->span[j].end > to) span_split(p, j, to);
    bool write = l->access->how & SIM_WRITE;
    for (int k = i; k <= j; k++) {
        sm_span *s = &p->span[k];
        if (s->write.no && !sm_before(l->stream, s->write)) race(l, s->write, "wrote");
        if (l->access->how & SIM_READ) check_tag(l, s, address + s->begin - from);
        if (write) check_write(l, &s->reads);
        else sm_front_add(&s->reads, l->stream);
    }
    if (write) write_spans(l, p, i, j);
}

static void touch_mapping(look *l, sm_mapping *m, uint64_t address, size_t bytes) {
    sm_front_add(&m->uses, l->stream);
    m->handle->seen_at = m->address;
    size_t at = address - m->address;
    while (bytes) {
        size_t in = at % SM_PAGE, n = SM_PAGE - in < bytes ? SM_PAGE - in : bytes;
        touch_page(l, &m->handle->page[at / SM_PAGE], (uint32_t)in, (uint32_t)(in + n), address);
        at += n;
        address += n;
        bytes -= n;
    }
}

static const char *why_hole(const sm_mapping *m, int how, const sm_context *c) {
    if (!m) return "is not mapped";
    unsigned may = how & SIM_WRITE ? m->write : m->read;
    if (may && (how & SM_PEER || (m->plain && how & SM_COPY))) return NULL;
    if (m->plain && may && c->peers >> m->handle->device & 1) return NULL;
    return may >> c->device & 1 ? NULL : "may not be accessed";
}

/* The operation that s queues makes this access, through what is mapped now. */
void sm_touch(sm_stream *s, const sim_access *a) {
    look l = {a, s, false, false};
    uint64_t address = (uint64_t)(uintptr_t)a->ptr, end = address + a->bytes;
    bool said = false;
    while (address < end) {
        size_t left;
        sm_mapping *m = sm_mapping_at(address, &left);
        if (left > end - address) left = end - address;
        const char *why = why_hole(m, a->how, s->context);
        if (!why) touch_mapping(&l, m, address, left);
        else if (!said)
            sm_find(SIM_HOLE, "operation %llu of stream %llu accesses %p, which %s", (unsigned long long)s->queued,
                    s->id, (void *)(uintptr_t)address, why);
        said |= why != NULL;
        address += left;
    }
}

/* What a range holds, as pairs of bytes and tag; returns how many. Bytes never written have tag 0. */
int sm_tag_runs(uint64_t address, size_t bytes, uint64_t **runs) {
    size_t n = 0, cap = 0;
    *runs = NULL;
    while (bytes) {
        size_t left;
        sm_mapping *m = sm_mapping_at(address, &left);
        if (left > bytes) left = bytes;
        uint64_t tag = 0;
        if (m) {
            size_t at = address - m->address, in = at % SM_PAGE;
            const sm_page *p = &m->handle->page[at / SM_PAGE];
            const sm_span *s = p->n ? &p->span[span_at(p, (uint32_t)in)] : NULL;
            size_t room = (s ? s->end : SM_PAGE) - in;
            if (left > room) left = room;
            tag = s ? s->tag : 0;
        }
        if (n && (*runs)[n - 1] == tag) (*runs)[n - 2] += left;
        else {
            *runs = sm_grow(*runs, n + 1, &cap, sizeof **runs);
            (*runs)[n++] = left;
            (*runs)[n++] = tag;
        }
        address += left;
        bytes -= left;
    }
    return (int)(n / 2);
}

/* ---- what bytes have seen -------------------------------------------------------------------------------------- */

/* Who used a span last: its readers, or else its writer. Those of the stream itself are left out. */
static void look_back(const sm_span *span, const sm_stream *s, bool *used, bool *busy) {
    const sm_front *reads = &span->reads;
    for (int i = -1; i < (reads->more ? reads->more->n : 0); i++) {
        sm_epoch e = i >= 0 ? reads->more->e[i] : reads->last.no ? reads->last : span->write;
        if (!e.no || (s && e.stream == s->index)) continue;
        *used = true;
        *busy |= e.no > sm.streams[e.stream]->done;
    }
}

static bool is_in_use(const sm_handle *h) {
    bool used = false, busy = false;
    for (size_t i = 0; i < (h->size + SM_PAGE - 1) / SM_PAGE; i++)
        for (int k = 0; k < h->page[i].n && !busy; k++) look_back(&h->page[i].span[k], NULL, &used, &busy);
    return busy;
}

static void look_back_page(const sm_page *p, size_t from, size_t to, const sm_stream *s, sim_past *past) {
    bool used = false, busy = false;
    for (int k = p->n ? span_at(p, (uint32_t)from) : 0; k < p->n && p->span[k].begin < to; k++)
        look_back(&p->span[k], s, &used, &busy);
    past->handed_over |= used;
    past->handed_over_busy |= busy;
}

static void look_back_mapping(const sm_mapping *m, uint64_t address, size_t bytes, const sm_stream *s, sim_past *past) {
    const sm_handle *h = m->handle;
    if (h->seen_at && h->seen_at != m->address) {
        past->moved++;
        past->moved_busy += is_in_use(h);
    }
    for (size_t at = address - m->address, n; bytes; at += n, bytes -= n) {
        size_t in = at % SM_PAGE;
        n = SM_PAGE - in < bytes ? SM_PAGE - in : bytes;
        look_back_page(&h->page[at / SM_PAGE], in, in + n, s, past);
    }
}

sim_past sim_past_of(cudaStream_t stream, const void *ptr, size_t bytes) {
    sim_past past = {0, 0, 0, 0};
    sm_stream *s;
    sm_lock();
    if (sm_stream_find(stream, &s)) bytes = 0;
    for (uint64_t address = (uint64_t)(uintptr_t)ptr, end = address + bytes; address < end;) {
        size_t left;
        const sm_mapping *m = sm_mapping_at(address, &left);
        if (left > end - address) left = end - address;
        if (m) look_back_mapping(m, address, left, s, &past);
        address += left;
    }
    sm_unlock();
    return past;
}

void sm_pages_drop(sm_handle *h) {
    size_t n = (h->size + SM_PAGE - 1) / SM_PAGE;
    for (size_t i = 0; i < n; i++) {
        for (int k = 0; k < h->page[i].n; k++) sm_front_drop(&h->page[i].span[k].reads);
        free(h->page[i].span);
    }
    free(h->page);
}
