/* sim_capture.c - stream capture, graphs, user objects.

   A graph is the list of what was asked of the captured streams, in that order; each stream that took part is a lane.
   A launch asks the same again: lane 0 of the launch stream, the others of streams of the graph's own. So work in
   different lanes is ordered by what was captured, and by nothing else. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

typedef enum item_kind {
    ITEM_WORK, ITEM_VALUE, ITEM_MARK, ITEM_WAIT, ITEM_RECORD_EXTERNAL, ITEM_WAIT_EXTERNAL
} item_kind;

typedef struct item {
    item_kind kind;
    int lane;
    sm_work work;              /* WORK */
    uint32_t *word, value;     /* VALUE */
    unsigned flags;
    bool write;
    int mark;                  /* MARK, WAIT */
    sm_event *event;           /* the external ones */
    unsigned long long birth;
} item;

typedef struct held_object {
    cudaUserObject_t object;
    unsigned count;
} held_object;

/* Points of streams. */
typedef struct stamps {
    sm_stamp *at;
    size_t n, cap;
} stamps;

/* Nodes that something comes after, each of them once. */
typedef struct node_list {
    CUgraphNode *at;
    size_t n, cap;
} node_list;

/* A node of a captured graph, as far as the order of nodes goes. */
struct CUgraphNode_st {
    node_list after;
};

/* Lives as long as the graph's handle, an instance, or a launch that runs. */
struct CUgraph_st {
    sm_graph *next;
    int refs;
    bool live; /* the handle */
    item *items;
    size_t nitems, capitems;
    int lanes, marks;
    node_list nodes; /* of a clone: none */
    held_object *objects;
    size_t nobjects, capobjects;
    stamps launches; /* their ends */
};

struct CUgraphExec_st {
    struct CUgraphExec_st *next;
    sm_graph *graph;
    sm_stream *lane[SM_LANES]; /* from 1 */
    sm_stamp last;             /* launches of one instance do not overlap */
};

struct CUuserObject_st {
    struct CUuserObject_st *next;
    unsigned refs;
    cudaHostFn_t destroy;
    void *ptr;
    stamps launches; /* of graphs that held it */
};

/* How many pieces of work of each lane come before a point of the capture. */
typedef struct seen {
    int work[SM_LANES];
} seen;

struct sm_capture {
    sm_capture *next;
    unsigned long long id;
    int mode;
    sm_thread *thread;
    bool lost;
    sm_graph *graph;
    sm_stream *stream[SM_LANES];
    int lanes;
    seen at[SM_LANES]; /* the end of each lane */
    node_list end[SM_LANES]; /* the same in nodes: what comes next on it comes after these */
    seen *mark;
    size_t nmarks, capmarks;
    node_list *mark_end; /* by mark */
    size_t capends;
};

static bool is_blocking(const sm_stream *s) { return !s->legacy && !(s->flags & CU_STREAM_NON_BLOCKING); }

/* ---- nodes ----------------------------------------------------------------------------------------------------- */

static void nodes_add(node_list *list, CUgraphNode node) {
    for (size_t i = 0; i < list->n; i++)
        if (list->at[i] == node) return;
    list->at = sm_grow(list->at, list->n, &list->cap, sizeof *list->at);
    list->at[list->n++] = node;
}

static void nodes_add_all(node_list *list, const node_list *more) {
    for (size_t i = 0; i < more->n; i++) nodes_add(list, more->at[i]);
}

static void nodes_drop(node_list *list) {
    free(list->at);
    memset(list, 0, sizeof *list);
}

/* The stream's next node: it comes after what the stream's end was, and is that now. */
static void add_node(sm_stream *s) {
    node_list *end = &s->capture->end[s->lane];
    node_list *all = &s->capture->graph->nodes;
    CUgraphNode node = sm_alloc(sizeof *node);
    nodes_add_all(&node->after, end);
    end->n = 0;
    nodes_add(end, node);
    all->at = sm_grow(all->at, all->n, &all->cap, sizeof *all->at);
    all->at[all->n++] = node;
}

static bool is_node(CUgraphNode node) {
    for (sm_graph *g = sm.graphs; g; g = g->next)
        for (size_t i = 0; i < g->nodes.n; i++)
            if (g->nodes.at[i] == node) return true;
    return false;
}

/* What the stream's next node will come after. The array is the capture's. */
int sm_capture_end_nodes(CUstream handle, const CUgraphNode **nodes, size_t *n) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    if (nodes) *nodes = NULL;
    if (n) *n = 0;
    if (!s->capture || sm_capture_lost(s->capture)) return 0;
    if (nodes) *nodes = s->capture->end[s->lane].at;
    if (n) *n = s->capture->end[s->lane].n;
    return 0;
}

/* With no array it says how many there are, else how many of them it gave; the rest of the array is cleared. */
int sm_node_after(CUgraphNode node, CUgraphNode *nodes, size_t *n) {
    if (!node || !n) return E_VALUE;
    if (!is_node(node)) {
        sm_find(SIM_DEAD_HANDLE, "node %p is of no graph", (void *)node);
        return E_VALUE;
    }
    for (size_t i = 0; nodes && i < *n; i++) nodes[i] = i < node->after.n ? node->after.at[i] : NULL;
    if (!nodes || *n > node->after.n) *n = node->after.n;
    return 0;
}

/* ---- user objects and graphs ----------------------------------------------------------------------------------- */

static void stamps_add(stamps *list, sm_stamp stamp) {
    list->at = sm_grow(list->at, list->n, &list->cap, sizeof *list->at);
    if (stamp.clock) stamp.clock->refs++;
    list->at[list->n++] = stamp;
}

static void stamps_drop(stamps *list) {
    for (size_t i = 0; i < list->n; i++) sm_clock_drop(list->at[i].clock);
    free(list->at);
}

int sm_object_create(cudaUserObject_t *out, void *ptr, cudaHostFn_t destroy, unsigned refs, unsigned flags) {
    if (!out || !destroy || !refs || flags != 1) return E_VALUE;
    struct CUuserObject_st *o = sm_alloc(sizeof *o);
    o->next = sm.objects;
    o->refs = refs;
    o->destroy = destroy;
    o->ptr = ptr;
    sm.objects = o;
    *out = o;
    return 0;
}

int sm_object_retain(cudaUserObject_t o, unsigned count) {
    if (!o || !count) return E_VALUE;
    o->refs += count;
    return 0;
}

int sm_object_release(cudaUserObject_t o, unsigned count) {
    if (!o || !count || o->refs < count) return E_VALUE;
    if (o->refs -= count) return 0;
    for (size_t i = 0; i < o->launches.n; i++) sm_host_saw(&o->launches.at[i]); /* that it is called says so */
    stamps_drop(&o->launches);
    sm_later(o->destroy, o->ptr);
    struct CUuserObject_st **at = &sm.objects;
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    free(o);
    return 0;
}

/* With cudaGraphUserObjectMove (1) the caller's own references pass to the graph. */
int sm_graph_retain(cudaGraph_t g, cudaUserObject_t o, unsigned count, unsigned flags) {
    if (!g || !g->live || !o || !count || flags > 1) return E_VALUE;
    if (!flags) o->refs += count;
    g->objects = sm_grow(g->objects, g->nobjects, &g->capobjects, sizeof *g->objects);
    g->objects[g->nobjects++] = (held_object){o, count};
    return 0;
}

static sm_graph *graph_new(void) {
    sm_graph *g = sm_alloc(sizeof *g);
    g->refs = 1;
    g->live = true;
    g->next = sm.graphs;
    return sm.graphs = g;
}

static void graph_free(sm_graph *g) {
    for (size_t i = 0; i < g->nitems; i++)
        if (g->items[i].kind == ITEM_WORK) sm_work_drop(&g->items[i].work);
    free(g->items);
    for (size_t i = 0; i < g->nodes.n; i++) {
        nodes_drop(&g->nodes.at[i]->after);
        free(g->nodes.at[i]);
    }
    nodes_drop(&g->nodes);
    free(g->objects);
    stamps_drop(&g->launches);
    free(g);
}

void sm_graph_drop(sm_graph *g) {
    if (--g->refs) return;
    sm_graph_memory_drop(g);
    for (size_t i = 0; i < g->nobjects; i++) {
        for (size_t k = 0; k < g->launches.n; k++) stamps_add(&g->objects[i].object->launches, g->launches.at[k]);
        sm_object_release(g->objects[i].object, g->objects[i].count);
    }
    sm_graph **at = &sm.graphs;
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    graph_free(g);
}

/* A clone keeps what its original keeps, and lives on its own. */
int sm_graph_clone(cudaGraph_t *out, cudaGraph_t from) {
    if (!out || !from || !from->live) return E_VALUE;
    sm_graph *g = graph_new();
    g->lanes = from->lanes;
    g->marks = from->marks;
    for (size_t i = 0; i < from->nitems; i++) {
        g->items = sm_grow(g->items, g->nitems, &g->capitems, sizeof *g->items);
        g->items[g->nitems] = from->items[i];
        if (from->items[i].kind == ITEM_WORK) sm_work_copy(&g->items[g->nitems].work, &from->items[i].work);
        g->nitems++;
    }
    for (size_t i = 0; i < from->nobjects; i++)
        (void)sm_graph_retain(g, from->objects[i].object, from->objects[i].count, 0);
    *out = g;
    return 0;
}

int sm_graph_destroy(cudaGraph_t g) {
    if (!g || !g->live) return E_VALUE;
    g->live = false;
    sm_graph_drop(g);
    return 0;
}

/* ---- captures -------------------------------------------------------------------------------------------------- */

static sm_capture *capture_of(unsigned long long id) {
    sm_capture *c = sm.captures;
    while (c && c->id != id) c = c->next;
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
    c->graph->lanes = c->lanes;
    s->context->captures += is_blocking(s);
}

int sm_capture_begin(CUstream handle, int mode) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (error) return error;
    if (mode < 0 || mode > 2) return E_VALUE;
    if (s->legacy) return E_CAPTURE_UNSUPPORTED;
    if (s->capture) return E_STATE;
    sm_capture *c = sm_alloc(sizeof *c);
    c->id = ++sm.ids;
    c->mode = mode;
    c->thread = sm_self();
    c->graph = graph_new();
    c->next = sm.captures;
    sm.captures = c;
    add_lane(c, s);
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
    for (int i = 0; i < c->lanes; i++) nodes_drop(&c->end[i]);
    for (size_t i = 0; i < c->nmarks; i++) nodes_drop(&c->mark_end[i]);
    free(c->mark_end);
    free(c->mark);
    free(c);
}

/* Does all captured work come before the end of lane 0? */
static bool is_joined(const sm_capture *c) {
    for (int i = 1; i < c->lanes; i++)
        if (c->at[0].work[i] < c->at[i].work[i]) return false;
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
    sm_graph *g = c->graph;
    capture_free(c);
    if (error || !out) {
        g->live = false;
        sm_graph_drop(g);
    } else
        *out = g;
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
    if (id) *id = s->capture->id;
    if (graph) *graph = s->capture->graph;
    return 0;
}

void sm_capture_of_context_dies(sm_context *context) {
    for (sm_capture *c = sm.captures, *next; c; c = next) {
        next = c->next;
        if (c->stream[0]->context != context) continue;
        sm_graph *g = c->graph;
        capture_free(c);
        g->live = false;
        sm_graph_drop(g);
    }
}

/* ---- what is captured ------------------------------------------------------------------------------------------ */

static item *add_item(sm_stream *s, item_kind kind) {
    sm_graph *g = s->capture->graph;
    g->items = sm_grow(g->items, g->nitems, &g->capitems, sizeof *g->items);
    item *i = &g->items[g->nitems++];
    memset(i, 0, sizeof *i);
    i->kind = kind;
    i->lane = s->lane;
    return i;
}

void sm_capture_work(sm_stream *s, const sm_work *w) {
    sm_work_copy(&add_item(s, ITEM_WORK)->work, w);
    add_node(s);
    s->capture->at[s->lane].work[s->lane]++;
}

void sm_capture_value(sm_stream *s, uint32_t *word, uint32_t value, unsigned flags, bool write) {
    item *i = add_item(s, ITEM_VALUE);
    i->word = word;
    i->value = value;
    i->flags = flags;
    i->write = write;
    add_node(s);
    s->capture->at[s->lane].work[s->lane]++;
}

static int add_external(sm_stream *s, sm_event *e, item_kind kind) {
    item *i = add_item(s, kind);
    i->event = e;
    i->birth = e->birth;
    add_node(s);
    return 0;
}

int sm_capture_record(sm_stream *s, sm_event *e, bool external) {
    if (external) return add_external(s, e, ITEM_RECORD_EXTERNAL);
    sm_capture *c = s->capture;
    c->mark = sm_grow(c->mark, c->nmarks, &c->capmarks, sizeof *c->mark);
    c->mark[c->nmarks] = c->at[s->lane];
    c->mark_end = sm_grow(c->mark_end, c->nmarks, &c->capends, sizeof *c->mark_end);
    memset(&c->mark_end[c->nmarks], 0, sizeof *c->mark_end);
    nodes_add_all(&c->mark_end[c->nmarks], &c->end[s->lane]);
    sm_stamp_set(&e->stamp, (sm_stamp){NULL, 0, NULL});
    e->capture = c->id;
    e->mark = add_item(s, ITEM_MARK)->mark = (int)c->nmarks++;
    c->graph->marks = (int)c->nmarks;
    return 0;
}

static void wait_for_mark(sm_stream *s, int mark) {
    sm_capture *c = s->capture;
    add_item(s, ITEM_WAIT)->mark = mark;
    nodes_add_all(&c->end[s->lane], &c->mark_end[mark]);
    for (int i = 0; i < c->lanes; i++)
        if (c->at[s->lane].work[i] < c->mark[mark].work[i]) c->at[s->lane].work[i] = c->mark[mark].work[i];
}

/* A captured stream waits. Only for its own capture, or for an event that it is told lies outside. */
static int captured_waits(sm_stream *s, sm_event *e, bool external) {
    if (external) return add_external(s, e, ITEM_WAIT_EXTERNAL);
    if (e->capture == s->capture->id) {
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

/* ---- instances ------------------------------------------------------------------------------------------------- */

int sm_graph_instantiate(cudaGraphExec_t *out, cudaGraph_t g) {
    if (!out || !g || !g->live) return E_VALUE;
    struct CUgraphExec_st *x = sm_alloc(sizeof *x);
    x->graph = g;
    g->refs++;
    for (int i = 1; i < g->lanes; i++) x->lane[i] = sm_stream_new(sm_current(), CU_STREAM_NON_BLOCKING, 0, false);
    x->next = sm.execs;
    sm.execs = x;
    *out = x;
    return 0;
}

static void launch_item(const item *i, sm_stream *s, sm_stamp *marks) {
    bool live = i->event && i->event->live && i->event->birth == i->birth;
    switch (i->kind) {
    case ITEM_WORK: sm_work_launch(s, &i->work); break;
    case ITEM_VALUE: sm_value_queue(s, i->word, i->value, i->flags, i->write); break;
    case ITEM_MARK: sm_stamp_set(&marks[i->mark], sm_stamp_of(s)); break;
    case ITEM_WAIT: sm_after(s, &marks[i->mark]); break;
    case ITEM_RECORD_EXTERNAL:
        if (live) sm_event_mark(i->event, s);
        break;
    case ITEM_WAIT_EXTERNAL:
        if (live) sm_after(s, &i->event->stamp);
        break;
    }
}

int sm_graph_launch(cudaGraphExec_t x, CUstream handle) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (error || !x) return error ? error : E_VALUE;
    if (s->capture) return E_NOT_SUPPORTED;
    sm_graph *g = x->graph;
    error = sm_graph_memory_launch(g);
    if (error) return error;
    sm_stamp *marks = sm_alloc((size_t)g->marks * sizeof *marks);
    if (x->last.stream) sm_after(s, &x->last);
    for (size_t i = 0; i < g->nitems; i++) {
        int lane = g->items[i].lane;
        launch_item(&g->items[i], lane ? x->lane[lane] : s, marks);
    }
    for (int i = 0; i < g->marks; i++) sm_clock_drop(marks[i].clock);
    free(marks);
    g->refs++;
    sm_queue(s, OP_MARK)->graph = g;
    sm_stamp_set(&x->last, sm_stamp_of(s));
    if (g->nobjects) stamps_add(&g->launches, x->last);
    return 0;
}

int sm_exec_destroy(cudaGraphExec_t x) {
    if (!x) return E_VALUE;
    struct CUgraphExec_st **at = &sm.execs;
    while (*at && *at != x) at = &(*at)->next;
    if (!*at) return E_VALUE;
    *at = x->next;
    for (int i = 1; i < x->graph->lanes; i++) sm_stream_end(x->lane[i]);
    sm_clock_drop(x->last.clock);
    sm_graph_drop(x->graph);
    free(x);
    return 0;
}

/* Of a process that ends: nobody's destructor is called. */
void sm_captures_clear(void) {
    while (sm.captures) capture_free(sm.captures);
    for (struct CUgraphExec_st *x = sm.execs, *next; x; x = next) {
        next = x->next;
        sm_clock_drop(x->last.clock);
        free(x);
    }
    for (sm_graph *g = sm.graphs, *next; g; g = next) next = g->next, graph_free(g);
    for (struct CUuserObject_st *o = sm.objects, *next; o; o = next) next = o->next, stamps_drop(&o->launches), free(o);
    sm.execs = NULL;
    sm.graphs = NULL;
    sm.objects = NULL;
}
