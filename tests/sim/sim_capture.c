/* sim_capture.c - stream capture.

   What is asked of a captured stream becomes a node of the capture's graph. Each stream that takes part is a lane, and
   its end is the list of nodes that its next one will depend on. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

struct sm_capture {
    sm_capture *next;
    unsigned long long number; /* of this one; events name it */
    int mode;
    sm_thread *thread;
    bool lost;
    sm_graph *graph;
    sm_stream *stream[SM_LANES];
    int lanes;
    sm_node_list end[SM_LANES];
    bool weak[SM_LANES];         /* the lane's next node may begin before the nodes at its end have ended */
    sm_node_list *mark;          /* the end of a lane where an event was recorded */
    size_t nmarks, capmarks;
};

static bool is_blocking(const sm_stream *s) { return !s->legacy && !(s->flags & CU_STREAM_NON_BLOCKING); }

/* ---- nodes ----------------------------------------------------------------------------------------------------- */

/* The stream's next node. */
static CUgraphNode add_node(sm_stream *s, sm_node_kind kind) {
    sm_node_list *end = &s->capture->end[s->lane];
    CUgraphNode node = sm_node_new(s->capture->graph, kind, s->context, end);
    end->n = 0;
    sm_nodes_add(end, node);
    node->programmatic = s->capture->weak[s->lane];
    s->capture->weak[s->lane] = false;
    return node;
}

/* What the stream's next node will come after. The array is the capture's. Without a place for the data of edges, those
   that have any are an error. */
int sm_capture_end_nodes(CUstream handle, const CUgraphNode **nodes, const void **edges, size_t *n) {
    static const CUgraphEdgeData weak = {1, 0, 1, {0}};
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    if (nodes) *nodes = NULL;
    if (edges) *edges = NULL;
    if (n) *n = 0;
    if (!s->capture || s->capture->lost) return 0;
    if (s->capture->weak[s->lane] && !edges) return E_LOSSY;
    if (s->capture->weak[s->lane]) *edges = &weak;
    if (nodes) *nodes = s->capture->end[s->lane].at;
    if (n) *n = s->capture->end[s->lane].n;
    return 0;
}

/* The stream's last node, a kernel, was launched so that it may begin before those that it comes after end. */
void sm_capture_programmatic(CUstream handle) {
    sm_stream *s;
    if (sm_stream_find(handle, &s) || !s->capture || s->capture->lost) return;
    CUgraphNode node = s->capture->end[s->lane].at[0];
    for (size_t i = 0; i < node->after.n; i++) node->programmatic |= node->after.at[i]->work.frame != NULL;
}

/* The program's own idea of what the stream's next node depends on: these too (0), or these alone (1). Edges that are
   weaker than full completion ordering are simulated for one node that is set alone. */
int sm_capture_dependencies(CUstream handle, const CUgraphNode *nodes, const void *edges, size_t n, unsigned flags) {
    const CUgraphEdgeData *data = edges;
    bool weak = false;
    sm_stream *s;
    sm_node_list list;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    if (!s->capture) return E_STATE;
    if (s->capture->lost) return E_CAPTURE_LOST;
    for (size_t i = 0; data && i < n; i++) weak |= data[i].type != 0;
    if ((weak || s->capture->weak[s->lane]) && (n != 1 || !flags)) return E_NOT_SUPPORTED;
    error = flags > 1 ? E_VALUE : sm_nodes_named(&list, s->capture->graph, nodes, n);
    if (error) return error;
    s->capture->weak[s->lane] = weak;
    if (flags) s->capture->end[s->lane].n = 0;
    sm_nodes_add_all(&s->capture->end[s->lane], &list);
    sm_nodes_drop(&list);
    return 0;
}

void sm_capture_forget_node(CUgraphNode node) {
    for (sm_capture *c = sm.captures; c; c = c->next) {
        for (int i = 0; i < c->lanes; i++) sm_nodes_remove(&c->end[i], node);
        for (size_t i = 0; i < c->nmarks; i++) sm_nodes_remove(&c->mark[i], node);
    }
}

/* ---- captures -------------------------------------------------------------------------------------------------- */

static sm_capture *capture_of(unsigned long long number) {
    sm_capture *c = sm.captures;
    while (c && c->number != number) c = c->next;
    return c;
}

bool sm_capture_lost(const sm_capture *c) { return c->lost; }
sm_graph *sm_capture_graph(const sm_capture *c) { return c->graph; }

void sm_capture_break(sm_capture *c) {
    if (c->lost) return;
    c->lost = true;
    sm_find(SIM_CAPTURE_BROKEN, "the capture begun on stream %llu is lost", c->stream[0]->id);
}

/* Does the capture forbid this thread the calls that could endanger captures? */
static bool concerns(const sm_capture *c, const sm_thread *t) {
    if (c->lost || c->mode == 2 || t->mode == 2) return false;
    return c->thread == t || (c->mode == 0 && t->mode == 0);
}

int sm_capture_look(void) {
    int error = 0;
    for (sm_capture *c = sm.captures; c; c = c->next) {
        if (!concerns(c, sm_self())) continue;
        sm_capture_break(c);
        error = E_CAPTURE_UNSUPPORTED;
    }
    return error;
}

/* The legacy stream was used while a blocking stream captures. */
int sm_capture_break_blocking(sm_context *context) {
    for (sm_capture *c = sm.captures; c; c = c->next)
        for (int i = 0; i < c->lanes; i++)
            if (is_blocking(c->stream[i]) && c->stream[i]->context == context) sm_capture_break(c);
    return E_CAPTURE_IMPLICIT;
}

/* A captured stream was asked what it does not tell, nor the legacy stream while a blocking one is captured. The mode
   of the capture and that of the thread are of no account. */
int sm_capture_touched(sm_stream *s) {
    if (s->legacy && s->context->captures) return sm_capture_break_blocking(s->context);
    if (!s->capture) return 0;
    sm_capture_break(s->capture);
    return E_CAPTURE_UNSUPPORTED;
}

/* The whole context was to be waited for: every capture in it is lost, whoever asks, and in whatever mode. */
int sm_capture_break_context(sm_context *context) {
    int error = 0;
    for (sm_capture *c = sm.captures; c; c = c->next)
        for (int i = 0; i < c->lanes; i++) {
            if (c->stream[i]->context != context) continue;
            sm_capture_break(c);
            error = E_CAPTURE_UNSUPPORTED;
        }
    return error;
}

int sm_capture_mode(int *mode) {
    if (!mode || *mode < 0 || *mode > 2) return E_VALUE;
    sm_thread *t = sm_self();
    int before = t->mode;
    t->mode = *mode;
    *mode = before;
    return 0;
}

static void add_lane(sm_capture *c, sm_stream *s) {
    s->capture = c;
    s->lane = c->lanes;
    c->stream[c->lanes++] = s;
    s->context->captures += is_blocking(s);
}

static int may_begin(CUstream handle, int mode, sm_stream **s) {
    int error = sm_stream_find(handle, s);
    if (error) return error;
    if (mode < 0 || mode > 2) return E_VALUE;
    if ((*s)->legacy) return E_CAPTURE_UNSUPPORTED;
    return (*s)->capture ? E_STATE : 0;
}

static sm_capture *capture_new(sm_stream *s, sm_graph *g, int mode) {
    sm_capture *c = sm_alloc(sizeof *c);
    c->number = ++sm.ids;
    c->mode = mode;
    c->thread = sm_self();
    c->graph = g;
    c->next = sm.captures;
    sm.captures = c;
    add_lane(c, s);
    return c;
}

int sm_capture_begin(CUstream handle, int mode) {
    sm_stream *s;
    int error = may_begin(handle, mode, &s);
    if (!error) capture_new(s, sm_graph_new(), mode);
    return error;
}

bool sm_is_captured_into(const sm_graph *g) {
    for (sm_capture *c = sm.captures; c; c = c->next)
        if (c->graph == g) return true;
    return false;
}

/* Into a graph that is there already; the first node comes after those. */
int sm_capture_begin_in(CUstream handle, cudaGraph_t g, const CUgraphNode *after, size_t n, int mode) {
    sm_stream *s;
    sm_node_list list;
    int error = may_begin(handle, mode, &s);
    if (!error) error = sm_graph_check(g);
    if (!error && sm_is_captured_into(g)) error = E_STATE;
    if (!error) error = sm_nodes_named(&list, g, after, n);
    if (error) return error;
    capture_new(s, g, mode)->end[0] = list;
    return 0;
}

static void capture_free(sm_capture *c) {
    sm_capture **at = &sm.captures;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    for (int i = 0; i < c->lanes; i++) {
        c->stream[i]->capture = NULL;
        c->stream[i]->context->captures -= is_blocking(c->stream[i]);
    }
    for (int i = 0; i < c->lanes; i++) sm_nodes_drop(&c->end[i]);
    for (size_t i = 0; i < c->nmarks; i++) sm_nodes_drop(&c->mark[i]);
    free(c->mark);
    free(c);
}

static void capture_fail(sm_capture *c) {
    sm_graph *g = c->graph;
    capture_free(c);
    sm_graph_capture_lost(g);
}

/* A capture does without a stream that is destroyed, whose work must have been joined by then; not without the one that
   it began on. */
void sm_capture_stream_ends(sm_stream *s) {
    sm_capture *c = s->capture;
    if (s->lane) return;
    sm_capture_break(c);
    capture_fail(c);
}

/* Does all captured work come before the end of lane 0? */
static bool is_joined(const sm_capture *c) {
    for (int i = 1; i < c->lanes; i++)
        if (!sm_nodes_before(&c->end[i], &c->end[0])) return false;
    return true;
}

int sm_capture_end(CUstream handle, cudaGraph_t *out) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    sm_capture *c = s->capture;
    if (!c) return E_STATE;
    if (out) *out = NULL;
    if (c->mode != 2 && c->thread != sm_self()) return E_CAPTURE_THREAD;
    if (s->lane) {
        sm_capture_break(c);
        return E_CAPTURE_UNMATCHED;
    }
    error = c->lost ? E_CAPTURE_LOST : is_joined(c) ? 0 : E_CAPTURE_UNJOINED;
    if (!error && out) *out = c->graph;
    if (error || !out) capture_fail(c);
    else capture_free(c);
    return error;
}

/* Looking is harmless, also at a legacy stream that is out of bounds. */
int sm_capture_status(CUstream handle, int *status, unsigned long long *id, cudaGraph_t *graph) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    if (!status) return E_VALUE;
    if (s->legacy && s->context->captures) return E_CAPTURE_IMPLICIT;
    *status = !s->capture ? 0 : s->capture->lost ? 2 : 1;
    if (*status != 1) return 0;
    if (id) *id = sm_graph_capture_id(s->capture->graph);
    if (graph) *graph = s->capture->graph;
    return 0;
}

void sm_capture_of_context_dies(sm_context *context) {
    for (sm_capture *c = sm.captures, *next; c; c = next) {
        next = c->next;
        if (c->stream[0]->context == context) capture_fail(c);
    }
}

/* ---- what is captured ------------------------------------------------------------------------------------------ */

void sm_capture_work(sm_stream *s, const sm_work *w) { sm_work_copy(&add_node(s, NODE_WORK)->work, w); }

void sm_capture_value(sm_stream *s, uint32_t *word, uint32_t value, unsigned flags, bool write) {
    CUgraphNode node = add_node(s, NODE_VALUE);
    node->word = word;
    node->value = value;
    node->flags = flags;
    node->write = write;
}

static int add_external(sm_stream *s, sm_event *e, sm_node_kind kind) {
    CUgraphNode node = add_node(s, kind);
    node->event = e;
    node->birth = e->birth;
    return 0;
}

int sm_capture_record(sm_stream *s, sm_event *e, bool external) {
    if (external) return add_external(s, e, NODE_RECORD);
    sm_capture *c = s->capture;
    c->mark = sm_grow(c->mark, c->nmarks, &c->capmarks, sizeof *c->mark);
    c->mark[c->nmarks] = (sm_node_list){NULL, 0, 0};
    sm_nodes_add_all(&c->mark[c->nmarks], &c->end[s->lane]);
    sm_stamp_set(&e->stamp, (sm_stamp){NULL, 0, NULL});
    e->capture = c->number;
    e->mark = (int)c->nmarks++;
    return 0;
}

static void wait_for_mark(sm_stream *s, int mark) {
    sm_nodes_add_all(&s->capture->end[s->lane], &s->capture->mark[mark]);
}

/* A captured stream waits. Only for its own capture, or for an event that it is told lies outside. */
static int captured_waits(sm_stream *s, sm_event *e, bool external) {
    if (external) return add_external(s, e, NODE_WAIT);
    if (e->capture == s->capture->number) {
        wait_for_mark(s, e->mark);
        return 0;
    }
    if (!e->capture && !e->stamp.stream) return 0;
    sm_capture_break(s->capture);
    if (!e->capture) return E_CAPTURE_ISOLATION;
    sm_capture *other = capture_of(e->capture);
    if (other) sm_capture_break(other);
    return other ? E_CAPTURE_MERGE : E_CAPTURED_EVENT;
}

/* One of the two, or both, are captured. A stream that waits for a captured event is drawn into the capture. */
int sm_capture_wait(sm_stream *s, sm_event *e, bool external) {
    if (s->capture) return captured_waits(s, e, external);
    sm_capture *c = capture_of(e->capture);
    if (!c || c->lost) return E_CAPTURED_EVENT;
    if (s->legacy || c->lanes == SM_LANES) {
        sm_capture_break(c);
        return s->legacy ? E_CAPTURE_IMPLICIT : E_NOT_SUPPORTED;
    }
    add_lane(c, s);
    wait_for_mark(s, e->mark);
    return 0;
}

/* A query or a wait of the host, which an event of a capture can never answer. */
int sm_capture_event_touched(const sm_event *e) {
    if (!e->capture) return 0;
    sm_capture *c = capture_of(e->capture);
    if (c) sm_capture_break(c);
    return E_CAPTURED_EVENT;
}

void sm_captures_clear(void) {
    while (sm.captures) capture_free(sm.captures);
}
