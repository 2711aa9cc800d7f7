/* sim_work.c - the work that touches memory: what is asked of a stream, what the ledger is told of it, and what it does
   to real bytes when it runs. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* ---- real bytes (backed mode) ------------------------------------------------------------------------------------ */

/* The physical memory behind a range, as it is mapped now. Holes are left out: the ledger has told of them. */
static sm_parts parts_of(uint64_t address, size_t bytes) {
    sm_parts p = {NULL, 0};
    size_t cap = 0;
    while (bytes) {
        size_t left;
        sm_mapping *m = sm_mapping_at(address, &left);
        if (left > bytes) left = bytes;
        if (m) {
            p.part = sm_grow(p.part, (size_t)p.n, &cap, sizeof *p.part);
            p.part[p.n++] = (sm_part){m->handle, address - m->address, left};
            m->handle->users++;
        }
        address += left;
        bytes -= left;
    }
    return p;
}

static void parts_drop(sm_parts *p) {
    for (int i = 0; i < p->n; i++) {
        sm_handle *h = p->part[i].handle;
        h->users--;
        sm_handle_settle(h);
    }
    free(p->part);
}

/* Each aligned word of the range becomes the tag, and so do its first and last 8 bytes. */
static void fill_tag(char *p, size_t bytes, uint64_t tag) {
    char *end = p + bytes;
    if (bytes < 8) {
        memcpy(p, &tag, bytes);
        return;
    }
    for (char *w = (char *)sm_round_up((uintptr_t)p, 8); w + 8 <= end; w += 8) memcpy(w, &tag, 8);
    memcpy(p, &tag, 8);
    memcpy(end - 8, &tag, 8);
}

static bool holds_tag(const char *p, uint64_t tag) { return !memcmp(p, &tag, 8); }

/* Looks at the first and last aligned word, and one in each 4 KiB. Words that overlap an unaligned end are left out. */
static bool check_tag(const char *p, size_t bytes, uint64_t tag) {
    const char *end = p + bytes, *first = (const char *)sm_round_up((uintptr_t)p, 8);
    if (first != p) first += 8;
    const char *last = (uintptr_t)end % 8 ? (const char *)((uintptr_t)end / 8 * 8) - 16 : end - 8;
    if (last < first) return true;
    for (const char *w = first; w <= last; w = (const char *)sm_round_up((uintptr_t)w + 1, 4096))
        if (!holds_tag(w, tag)) return false;
    return holds_tag(last, tag);
}

static void check_parts(const sim_access *a, const sm_parts *p) {
    for (int i = 0; i < p->n; i++) {
        const sm_part *part = &p->part[i];
        if (check_tag(part->handle->view + part->offset, part->bytes, a->tag)) continue;
        sm_find(SIM_STALE, "the bytes of %p, %zu, are not %llx", a->ptr, a->bytes, (unsigned long long)a->tag);
        return;
    }
}

static void fill_parts(const sim_access *a, const sm_parts *p) {
    for (int i = 0; i < p->n; i++) fill_tag(p->part[i].handle->view + p->part[i].offset, p->part[i].bytes, a->tag);
}

/* A place in a list of parts, or in host memory when there is none. */
typedef struct cursor {
    const sm_parts *parts;
    int i;
    size_t in;
    char *host;
} cursor;

static char *cursor_at(cursor *c, size_t *room) {
    if (c->host) return c->host + c->in;
    while (c->i < c->parts->n && c->in == c->parts->part[c->i].bytes) c->i++, c->in = 0;
    if (c->i == c->parts->n) return NULL;
    const sm_part *p = &c->parts->part[c->i];
    if (*room > p->bytes - c->in) *room = p->bytes - c->in;
    return p->handle->view + p->offset + c->in;
}

static void copy_bytes(cursor to, cursor from, size_t bytes) {
    while (bytes) {
        size_t n = bytes;
        char *a = cursor_at(&to, &n), *b = cursor_at(&from, &n);
        if (!a || !b) return;
        memmove(a, b, n);
        to.in += n;
        from.in += n;
        bytes -= n;
    }
}

/* ---- what an operation does when it runs ------------------------------------------------------------------------- */

void sm_action_begin(sm_action *a) {
    for (int i = 0; i < a->n; i++)
        if (a->access[i].how & SIM_CHECK) check_parts(&a->access[i], &a->parts[i]);
}

/* Ledger mode: a copy to the host says what the ledger knows, each word the tag of its bytes. */
static void write_runs(char *to, const uint64_t *runs, int n) {
    for (int i = 0; i < n; i++) {
        for (uint64_t k = 0; k < runs[2 * i]; k++) to[k] = (char)(runs[2 * i + 1] >> (k % 8 * 8));
        to += runs[2 * i];
    }
}

/* An element lies at a multiple of its size, so no part begins within one. */
static void set_part(const sm_part *p, const sm_work *w) {
    char *at = p->handle->view + p->offset;
    if (w->element == 1) memset(at, (int)(w->value & 0xff), p->bytes);
    else
        for (size_t i = 0; i < p->bytes; i += (size_t)w->element) memcpy(at + i, &w->value, (size_t)w->element);
}

static void move(sm_action *a) {
    const sm_work *w = &a->copy;
    char *host_to = w->to_device ? NULL : (char *)(uintptr_t)w->to;
    char *host_from = w->staged ? w->staged : w->from_device ? NULL : (char *)(uintptr_t)w->from;
    if (a->runs) write_runs(host_to, a->runs, a->nruns);
    else if (w->kind == WORK_COPY)
        copy_bytes((cursor){&a->to, 0, 0, host_to}, (cursor){&a->from, 0, 0, host_from}, w->bytes);
    else
        for (int i = 0; i < a->to.n; i++) set_part(&a->to.part[i], w);
}

void sm_action_end(sm_action *a) {
    for (int i = 0; i < a->n; i++)
        if (a->access[i].how & SIM_WRITE) fill_parts(&a->access[i], &a->parts[i]);
    if (a->copy.bytes) move(a);
    if (a->frame) sm_frame_run(a->frame);
    if (a->call) a->call(a->arg);
}

void sm_action_drop(sm_action *a) {
    for (int i = 0; i < a->n; i++) parts_drop(&a->parts[i]);
    parts_drop(&a->to);
    parts_drop(&a->from);
    sm_frame_drop(a->frame);
    free(a->copy.staged);
    free(a->runs);
    free(a->access);
    free(a->parts);
    free(a);
}

/* ---- work: what is asked of a stream ----------------------------------------------------------------------------- */

void sm_work_copy(sm_work *to, const sm_work *from) {
    *to = *from;
    sm_frame_keep(to->frame);
    to->access = sm_alloc((size_t)from->n * sizeof *to->access);
    if (from->n) memcpy(to->access, from->access, (size_t)from->n * sizeof *to->access);
}

void sm_work_drop(sm_work *w) {
    sm_frame_drop(w->frame);
    free(w->access);
}

static void launch_accesses(sm_stream *s, sm_op *op, const sm_work *w) {
    for (int i = 0; i < w->n; i++)
        if (w->access[i].bytes) sm_touch(s, &w->access[i]);
    if (!w->call && !sm_backed()) return; /* without memory a body cannot run */
    sm_action *a = op->action = sm_alloc(sizeof *a);
    a->call = w->call;
    a->arg = w->arg;
    if (sm_backed()) a->frame = sm_frame_keep(w->frame);
    if (!sm_backed() || !w->n || w->frame) return;
    a->n = w->n;
    a->access = sm_alloc((size_t)w->n * sizeof *a->access);
    a->parts = sm_alloc((size_t)w->n * sizeof *a->parts);
    for (int i = 0; i < w->n; i++) {
        a->access[i] = w->access[i];
        a->parts[i] = parts_of((uint64_t)(uintptr_t)w->access[i].ptr, w->access[i].bytes);
    }
}

/* What a copy from the host writes is known to the ledger by its first bytes. */
static uint64_t host_tag(const sm_work *w) {
    uint64_t tag = 0;
    memcpy(&tag, (const void *)(uintptr_t)w->from, w->bytes < 8 ? w->bytes : 8);
    return tag;
}

static void touch_range(sm_stream *s, uint64_t address, size_t bytes, int how, uint64_t tag) {
    sim_access a = {(const void *)(uintptr_t)address, bytes, how, tag};
    sm_touch(s, &a);
}

/* Tags go with the bytes that are copied. */
static void touch_copy(sm_stream *s, const sm_work *w, uint64_t **runs, int *n) {
    int how = w->peer ? SM_COPY | SM_PEER : SM_COPY;
    *runs = NULL;
    *n = 0;
    if (w->from_device) {
        touch_range(s, w->from, w->bytes, SIM_READ | how, 0);
        *n = sm_tag_runs(w->from, w->bytes, runs);
    }
    if (!w->to_device) return;
    if (!w->from_device) touch_range(s, w->to, w->bytes, SIM_WRITE | how, host_tag(w));
    uint64_t at = w->to;
    for (int i = 0; i < *n; i++) {
        touch_range(s, at, (*runs)[2 * i], SIM_WRITE | how, (*runs)[2 * i + 1]);
        at += (*runs)[2 * i];
    }
}

static void *stage(const sm_work *w) {
    const void *from = (const void *)(uintptr_t)w->from;
    if (w->kind != WORK_COPY || w->from_device || sm_is_pinned(from, w->bytes)) return NULL;
    return memcpy(sm_alloc(w->bytes), from, w->bytes);
}

static void launch_copy(sm_stream *s, sm_op *op, const sm_work *w) {
    uint64_t *runs = NULL;
    int n = 0;
    if (w->kind == WORK_COPY) touch_copy(s, w, &runs, &n);
    else touch_range(s, w->to, w->bytes, SIM_WRITE, w->value * 0x0000000100000001u);
    bool moves = sm_backed() || !w->to_device;
    if (moves) {
        sm_action *a = op->action = sm_alloc(sizeof *a);
        a->copy = *w;
        a->copy.staged = sm_backed() ? stage(w) : NULL;
        if (sm_backed() && w->to_device) a->to = parts_of(w->to, w->bytes);
        if (sm_backed() && w->from_device) a->from = parts_of(w->from, w->bytes);
        if (!sm_backed() && w->from_device) {
            a->runs = runs;
            a->nruns = n;
            return;
        }
    }
    free(runs);
}

void sm_work_launch(sm_stream *s, const sm_work *w) {
    sm_op *op = sm_queue(s, OP_WORK);
    if (w->kind == WORK_ACCESS) launch_accesses(s, op, w);
    else launch_copy(s, op, w);
}

/* Queues the work, or captures it; stamp, where given, is its place (none when it was captured). */
int sm_work_queue(CUstream handle, const sm_work *w, sm_stamp *stamp) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (error) return error;
    if (w->kind == WORK_ACCESS && s->context != sm_current()) return E_HANDLE;
    if (s->capture) {
        sm_capture_work(s, w);
        return 0;
    }
    sm_work_launch(s, w);
    if (stamp) *stamp = sm_stamp_of(s);
    return 0;
}

static bool is_mapped(uint64_t address, size_t bytes) {
    while (bytes) {
        size_t left;
        if (!sm_mapping_at(address, &left)) {
            sm_find(SIM_HOLE, "%p is not mapped", (void *)(uintptr_t)address);
            return false;
        }
        if (left > bytes) left = bytes;
        address += left;
        bytes -= left;
    }
    return true;
}

int sm_work_of_copy(sm_work *w, uint64_t to, uint64_t from, size_t bytes, int kind) {
    if (kind < 0 || kind > 4) return 21; /* cudaErrorInvalidMemcpyDirection */
    *w = (sm_work){.kind = WORK_COPY, .to = to, .from = from, .bytes = bytes};
    w->to_device = kind == 4 ? sm_region_at(to) != NULL : kind == 1 || kind == 3;
    w->from_device = kind == 4 ? sm_region_at(from) != NULL : kind >= 2;
    return (w->to_device && !is_mapped(to, bytes)) || (w->from_device && !is_mapped(from, bytes)) ? E_VALUE : 0;
}

/* Of elements of 1, 2 or 4 bytes. */
int sm_work_of_set(sm_work *w, uint64_t to, unsigned value, int element, size_t bytes) {
    *w = (sm_work){.kind = bytes ? WORK_SET : WORK_ACCESS, .to = to, .to_device = true, .bytes = bytes};
    w->element = element;
    w->value = element == 4 ? value : element == 2 ? (value & 0xffff) * 0x10001u : (value & 0xff) * 0x1010101u;
    return is_mapped(to, bytes) ? 0 : E_VALUE;
}

/* Whether a context's device may use all of a range; memory of cudaMalloc, any. */
static bool may_use(const sm_context *c, uint64_t address, size_t bytes, bool write) {
    while (c && bytes) {
        size_t left;
        const sm_mapping *m = sm_mapping_at(address, &left);
        if (!m->plain && !((write ? m->write : m->read) >> c->device & 1)) return false;
        if (left > bytes) left = bytes;
        address += left;
        bytes -= left;
    }
    return true;
}

/* A copy finds mapped memory by the access of the current context's device, whatever the stream's. Measured:
   tests/gpu/probe_copies.cu. Memory of a pool has the same access rights, and is taken to be like that. */
static bool current_may_copy(const sm_work *w) {
    return (!w->to_device || may_use(sm_current(), w->to, w->bytes, true)) &&
           (!w->from_device || may_use(sm_current(), w->from, w->bytes, false));
}

/* A copy to pageable memory returns only when it is done. */
int sm_copy(uint64_t to, uint64_t from, size_t bytes, int kind, CUstream stream, bool wait) {
    sm_work w;
    sm_stamp stamp = {NULL, 0, NULL};
    int error = sm_work_of_copy(&w, to, from, bytes, kind);
    if (!error && bytes && !current_may_copy(&w)) error = E_VALUE;
    if (!error && bytes) error = sm_work_queue(stream, &w, &stamp);
    if (error) return error;
    if (!w.to_device && !sm_is_pinned((void *)(uintptr_t)to, bytes)) wait = true;
    if (wait) error = sm_wait(&stamp);
    sm_clock_drop(stamp.clock);
    return error;
}

int sm_set(uint64_t to, int value, size_t bytes, CUstream stream) {
    sm_work w;
    sm_stream *s;
    int error = sm_work_of_set(&w, to, (unsigned)value, 1, bytes);
    if (!error) error = sm_stream_find(stream, &s);
    if (!error && !may_use(s->context, to, bytes, true)) error = E_VALUE; /* the stream's device sets */
    return error ? error : sm_work_queue(stream, &w, NULL);
}

static int launch(cudaStream_t stream, const sim_access *accesses, int n, void (*call)(void *), void *arg) {
    sm_work w = {.kind = WORK_ACCESS, .access = (sim_access *)(uintptr_t)accesses, .n = n, .call = call, .arg = arg};
    return sm_work_queue(stream, &w, NULL);
}

cudaError_t sim_launch(cudaStream_t stream, const sim_access *accesses, int n) {
    SM_RUNTIME(sim_launch, launch(stream, accesses, n, NULL, NULL));
}

cudaError_t sim_launch_call(cudaStream_t stream, const sim_access *accesses, int n, void (*call)(void *), void *arg) {
    SM_RUNTIME(sim_launch, launch(stream, accesses, n, call, arg));
}
