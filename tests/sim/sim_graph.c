/* sim_graph.c - graphs: nodes and what they depend on, instances, launches, user objects.

   A node depends on other nodes of its graph and comes after them, and after nothing else. An instance keeps a copy of
   the graph, so later changes of the graph do not reach it. It is laid out as steps in an order that respects all
   dependencies; a child graph's steps lie between a step where it begins and one where it ends. Each step belongs to a
   lane: the first lane is the stream of the launch, the others are streams of the instance. A step continues the lane
   of one that it depends on, or begins a lane, so that a lane orders nothing that the graph does not. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"

/* The numbers of cudaGraphExecUpdateResult. */
enum { UPDATE_SUCCESS = 0, UPDATE_TOPOLOGY = 2, UPDATE_KIND = 3, UPDATE_PARAMETERS = 5 };

typedef struct held_object {
    cudaUserObject_t object;
    unsigned count;
} held_object;

struct CUgraph_st {
    sm_graph *next;
    int refs;
    bool live;               /* the handle */
    unsigned long long capture_id;
    bool owned;              /* by a node of another graph, or by an instance: the program must not destroy it */
    sm_node_list nodes;
    held_object *objects;
    size_t nobjects, capobjects;
    sm_graph *memory;        /* of an instance's copy: the graph whose nodes allocate; NULL: itself */
    sm_stamp launched;       /* the end of the last launch */
};

typedef struct step {
    CUgraphNode node;        /* NULL: where a child graph ends */
    sm_context *context;
    int *after;              /* steps */
    size_t nafter, capafter;
    int lane;
    bool continued;          /* a later step depends on it, or continues its lane */
} step;

typedef struct lane {
    sm_context *context;
    unsigned long long context_id;
    sm_stream *stream;       /* NULL until a launch needs one */
} lane;

struct CUgraphExec_st {
    struct CUgraphExec_st *next;
    sm_graph *graph;         /* a copy */
    step *steps;
    size_t nsteps, capsteps;
    lane *lanes;
    size_t nlanes, caplanes;
    sm_stamp last;           /* launches of one instance do not overlap */
};

struct CUuserObject_st {
    struct CUuserObject_st *next;
    unsigned refs;
    cudaHostFn_t destroy;
    void *ptr;
    sm_stamp *launches;      /* of graphs that held it */
    size_t nlaunches, caplaunches;
};

/* ---- lists of nodes --------------------------------------------------------------------------------------------- */

void sm_nodes_add(sm_node_list *list, CUgraphNode node) {
    for (size_t i = 0; i < list->n; i++)
        if (list->at[i] == node) return;
    list->at = sm_grow(list->at, list->n, &list->cap, sizeof *list->at);
    list->at[list->n++] = node;
}

void sm_nodes_add_all(sm_node_list *list, const sm_node_list *more) {
    for (size_t i = 0; i < more->n; i++) sm_nodes_add(list, more->at[i]);
}

void sm_nodes_drop(sm_node_list *list) {
    free(list->at);
    memset(list, 0, sizeof *list);
}

static bool nodes_have(const sm_node_list *list, CUgraphNode node) {
    for (size_t i = 0; i < list->n; i++)
        if (list->at[i] == node) return true;
    return false;
}

/* Writes nothing where the node is not: programs may read the list. */
void sm_nodes_remove(sm_node_list *list, CUgraphNode node) {
    size_t n = 0;
    if (!nodes_have(list, node)) return;
    for (size_t i = 0; i < list->n; i++)
        if (list->at[i] != node) list->at[n++] = list->at[i];
    list->n = n;
}

/* With no array it says how many there are, else how many of them it gave; the rest of the array is cleared. */
static int nodes_give(const sm_node_list *list, CUgraphNode *out, size_t *n) {
    for (size_t i = 0; out && i < *n; i++) out[i] = i < list->n ? list->at[i] : NULL;
    if (!out || *n > list->n) *n = list->n;
    return 0;
}

/* ---- user objects ----------------------------------------------------------------------------------------------- */

int sm_object_create(cudaUserObject_t *out, void *ptr, cudaHostFn_t destroy, unsigned refs, unsigned flags) {
    if (!out || !destroy || !refs || flags != 1) return E_VALUE;
    struct CUuserObject_st *o = sm_alloc(sizeof *o);
    o->next = sm.objects;
    o->refs = refs;
    o->destroy = destroy;
    o->ptr = ptr;
    sm.objects = o;
    sm_order_before(ptr);
    *out = o;
    return 0;
}

int sm_object_retain(cudaUserObject_t o, unsigned count) {
    if (!o || !count) return E_VALUE;
    o->refs += count;
    return 0;
}

static void object_free(struct CUuserObject_st *o) {
    for (size_t i = 0; i < o->nlaunches; i++) sm_clock_drop(o->launches[i].clock);
    free(o->launches);
    free(o);
}

int sm_object_release(cudaUserObject_t o, unsigned count) {
    if (!o || !count || o->refs < count) return E_VALUE;
    if (o->refs -= count) return 0;
    for (size_t i = 0; i < o->nlaunches; i++) sm_host_saw(&o->launches[i]); /* that it is called says so */
    sm_later(o->destroy, o->ptr);
    struct CUuserObject_st **at = &sm.objects;
    while (*at != o) at = &(*at)->next;
    *at = o->next;
    object_free(o);
    return 0;
}

static void object_launched(cudaUserObject_t o, const sm_stamp *end) {
    if (!end->stream) return;
    o->launches = sm_grow(o->launches, o->nlaunches, &o->caplaunches, sizeof *o->launches);
    if (end->clock) end->clock->refs++;
    o->launches[o->nlaunches++] = *end;
}

/* ---- graphs ----------------------------------------------------------------------------------------------------- */

sm_graph *sm_graph_new(void) {
    sm_graph *g = sm_alloc(sizeof *g);
    g->refs = 1;
    g->live = true;
    g->next = sm.graphs;
    return sm.graphs = g;
}

/* The driver gives all captures into one graph the same id. */
unsigned long long sm_graph_capture_id(sm_graph *g) {
    if (!g->capture_id) g->capture_id = ++sm.ids;
    return g->capture_id;
}

static bool is_graph(cudaGraph_t g) {
    sm_graph *at = sm.graphs;
    while (at && at != g) at = at->next;
    return at && g && g->live;
}

int sm_graph_check(cudaGraph_t g) {
    if (!g || is_graph(g)) return g ? 0 : E_VALUE;
    sm_find(SIM_DEAD_HANDLE, "graph %p was destroyed", (void *)g);
    return E_VALUE;
}

static bool is_node(CUgraphNode node) {
    for (sm_graph *g = sm.graphs; g; g = g->next)
        if (nodes_have(&g->nodes, node)) return true;
    return false;
}

static int node_check(CUgraphNode node) {
    if (!node || is_node(node)) return node ? 0 : E_VALUE;
    sm_find(SIM_DEAD_HANDLE, "node %p is of no graph", (void *)node);
    return E_VALUE;
}

static bool has_memory(const sm_graph *g) {
    for (size_t i = 0; sm.ngraph_regions && i < sm.nregions; i++)
        if (sm.regions[i]->graph == (g->memory ? g->memory : g)) return true;
    return false;
}

static void graph_release_objects(sm_graph *g, const sm_stamp *end) {
    for (size_t i = 0; i < g->nobjects; i++) {
        object_launched(g->objects[i].object, end);
        sm_object_release(g->objects[i].object, g->objects[i].count);
    }
    g->nobjects = 0;
}

static void graph_drop(sm_graph *g, const sm_stamp *end);

static void node_free(CUgraphNode node, const sm_stamp *end) {
    if (node->child) {
        node->child->live = false;
        graph_drop(node->child, end);
    }
    sm_work_drop(&node->work);
    sm_nodes_drop(&node->after);
    free(node);
}

static void graph_empty(sm_graph *g, const sm_stamp *end) {
    graph_release_objects(g, end);
    for (size_t i = 0; i < g->nodes.n; i++) node_free(g->nodes.at[i], end);
    sm_nodes_drop(&g->nodes);
}

/* `end`: of the last launch that used its user objects. */
static void graph_drop(sm_graph *g, const sm_stamp *end) {
    if (--g->refs) return;
    graph_empty(g, end);
    sm_graph_memory_drop(g);
    if (g->memory) sm_graph_drop(g->memory);
    sm_graph **at = &sm.graphs;
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    free(g->objects);
    sm_clock_drop(g->launched.clock);
    free(g);
}

void sm_graph_drop(sm_graph *g) {
    sm_stamp end = g->launched;
    if (end.clock) end.clock->refs++;
    graph_drop(g, &end);
    sm_clock_drop(end.clock);
}

/* The program has it no longer. Instances may still use the memory that its nodes allocate, and nothing else of it. */
static void graph_abandon(sm_graph *g) {
    g->live = false;
    graph_empty(g, &g->launched);
    sm_graph_drop(g);
}

/* The graph goes, also one that the program had before the capture. A child is its node's, and stays. */
void sm_graph_capture_lost(sm_graph *g) {
    if (!g->owned) graph_abandon(g);
}

int sm_graph_create(cudaGraph_t *out, unsigned flags) {
    if (!out || flags) return E_VALUE;
    *out = sm_graph_new();
    return 0;
}

/* The graph itself, or one inside it. */
static bool in_capture(const sm_graph *g) {
    bool is = sm_is_captured_into(g);
    for (size_t i = 0; !is && i < g->nodes.n; i++) is = g->nodes.at[i]->child && in_capture(g->nodes.at[i]->child);
    return is;
}

int sm_graph_destroy(cudaGraph_t g) {
    int error = sm_graph_check(g);
    if (error || g->owned) return E_VALUE;
    if (in_capture(g)) return E_STATE;
    graph_abandon(g);
    return 0;
}

/* With cudaGraphUserObjectMove (1) the caller's own references pass to the graph. */
int sm_graph_retain(cudaGraph_t g, cudaUserObject_t o, unsigned count, unsigned flags) {
    if (sm_graph_check(g) || !o || !count || flags > 1) return E_VALUE;
    if (!flags) o->refs += count;
    g->objects = sm_grow(g->objects, g->nobjects, &g->capobjects, sizeof *g->objects);
    g->objects[g->nobjects++] = (held_object){o, count};
    return 0;
}

static unsigned held_by(const sm_graph *g, cudaUserObject_t o) {
    unsigned n = 0;
    for (size_t i = 0; i < g->nobjects; i++) n += g->objects[i].object == o ? g->objects[i].count : 0;
    return n;
}

int sm_graph_release(cudaGraph_t g, cudaUserObject_t o, unsigned count) {
    if (sm_graph_check(g) || !o || !count || held_by(g, o) < count) return E_VALUE;
    unsigned left = held_by(g, o) - count;
    size_t n = 0;
    for (size_t i = 0; i < g->nobjects; i++)
        if (g->objects[i].object != o) g->objects[n++] = g->objects[i];
    if (left) g->objects[n++] = (held_object){o, left};
    g->nobjects = n;
    return sm_object_release(o, count);
}

/* ---- nodes ------------------------------------------------------------------------------------------------------ */

CUgraphNode sm_node_new(sm_graph *g, sm_node_kind kind, sm_context *context, const sm_node_list *after) {
    CUgraphNode node = sm_alloc(sizeof *node);
    node->graph = g;
    node->kind = kind;
    node->context = context;
    sm_nodes_add_all(&node->after, after);
    g->nodes.at = sm_grow(g->nodes.at, g->nodes.n, &g->nodes.cap, sizeof *g->nodes.at);
    g->nodes.at[g->nodes.n++] = node;
    return node;
}

/* Is the node one of those, or does one of those come after it? */
static void mark_before(CUgraphNode node, unsigned long long mark) {
    if (node->mark == mark) return;
    node->mark = mark;
    for (size_t i = 0; i < node->after.n; i++) mark_before(node->after.at[i], mark);
}

bool sm_nodes_before(const sm_node_list *nodes, const sm_node_list *end) {
    unsigned long long mark = ++sm.births;
    for (size_t i = 0; i < end->n; i++) mark_before(end->at[i], mark);
    for (size_t i = 0; i < nodes->n; i++)
        if (nodes->at[i]->mark != mark) return false;
    return true;
}

/* Nodes of the graph that the program names, each of them once. */
int sm_nodes_named(sm_node_list *list, cudaGraph_t g, const CUgraphNode *nodes, size_t n) {
    *list = (sm_node_list){NULL, 0, 0};
    if (n && !nodes) return E_VALUE;
    for (size_t i = 0; i < n; i++) {
        if (!nodes_have(&g->nodes, nodes[i]) || nodes_have(list, nodes[i])) {
            sm_nodes_drop(list);
            return E_VALUE;
        }
        sm_nodes_add(list, nodes[i]);
    }
    return 0;
}

/* A node that the program adds itself; the caller fills it in. */
int sm_graph_add(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, sm_node_kind kind) {
    sm_node_list list;
    int error = sm_graph_check(g);
    if (error || !out) return E_VALUE;
    error = sm_nodes_named(&list, g, after, n);
    if (error) return error;
    *out = sm_node_new(g, kind, sm_current(), &list);
    sm_nodes_drop(&list);
    return 0;
}

int sm_graph_add_work(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, const sm_work *w) {
    int error = sm_graph_add(out, g, after, n, NODE_WORK);
    if (!error) sm_work_copy(&(*out)->work, w);
    return error;
}

int sm_graph_add_event(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, CUevent e, bool wait) {
    if (!e || !e->live) return E_VALUE;
    int error = sm_graph_add(out, g, after, n, wait ? NODE_WAIT : NODE_RECORD);
    if (error) return error;
    (*out)->event = e;
    (*out)->birth = e->birth;
    return 0;
}

/* The numbers of cudaGraphNodeType. */
int sm_node_type(CUgraphNode node, int *type) {
    static const int work[] = {0, 1, 2}, other[] = {5, 0, 12, 7, 6, 4};
    int error = node_check(node);
    if (error || !type) return E_VALUE;
    *type = other[node->kind];
    if (node->kind == NODE_WORK) *type = node->work.call && !node->work.n ? 3 : work[node->work.kind];
    return 0;
}

/* With no array it says how many there are, else how many of them it gave; the rest of the arrays is cleared. Without an
   array for the data of edges, those that have any are an error. */
int sm_node_after(CUgraphNode node, CUgraphNode *nodes, void *edges, size_t *n) {
    int error = node_check(node);
    if (error || !n || (edges && !nodes)) return E_VALUE;
    if (node->programmatic && nodes && !edges) return E_LOSSY;
    CUgraphEdgeData *data = edges, plain = {0}, programmatic = {1, 0, 1, {0}};
    for (size_t i = 0; data && i < *n; i++) data[i] = node->programmatic && i < node->after.n ? programmatic : plain;
    return nodes_give(&node->after, nodes, n);
}

int sm_node_before(CUgraphNode node, CUgraphNode *nodes, size_t *n) {
    int error = node_check(node);
    if (error || !n) return E_VALUE;
    sm_node_list list = {NULL, 0, 0};
    for (size_t i = 0; i < node->graph->nodes.n; i++)
        if (nodes_have(&node->graph->nodes.at[i]->after, node)) sm_nodes_add(&list, node->graph->nodes.at[i]);
    nodes_give(&list, nodes, n);
    sm_nodes_drop(&list);
    return 0;
}

int sm_graph_nodes(cudaGraph_t g, CUgraphNode *nodes, size_t *n, bool roots) {
    if (sm_graph_check(g) || !n) return E_VALUE;
    sm_node_list list = {NULL, 0, 0};
    for (size_t i = 0; i < g->nodes.n; i++)
        if (!roots || !g->nodes.at[i]->after.n) sm_nodes_add(&list, g->nodes.at[i]);
    nodes_give(&list, nodes, n);
    sm_nodes_drop(&list);
    return 0;
}

int sm_graph_edges(cudaGraph_t g, CUgraphNode *from, CUgraphNode *to, size_t *n) {
    if (sm_graph_check(g) || !n || !from != !to) return E_VALUE;
    size_t all = 0;
    for (size_t i = 0; i < g->nodes.n; i++)
        for (size_t k = 0; k < g->nodes.at[i]->after.n; k++, all++) {
            if (!from || all >= *n) continue;
            from[all] = g->nodes.at[i]->after.at[k];
            to[all] = g->nodes.at[i];
        }
    for (size_t i = all; from && i < *n; i++) from[i] = to[i] = NULL;
    if (!from || *n > all) *n = all;
    return 0;
}

/* Edges that are there, or are not, must all be so: then all are changed, or none. */
int sm_graph_connect(cudaGraph_t g, const CUgraphNode *from, const CUgraphNode *to, size_t n, bool on) {
    if (sm_graph_check(g) || (n && (!from || !to))) return E_VALUE;
    if (!on && has_memory(g)) return E_NOT_SUPPORTED;
    for (size_t i = 0; i < n; i++) {
        if (!nodes_have(&g->nodes, from[i]) || !nodes_have(&g->nodes, to[i]) || from[i] == to[i]) return E_VALUE;
        if (nodes_have(&to[i]->after, from[i]) == on) return E_VALUE;
    }
    for (size_t i = 0; i < n; i++)
        if (on) sm_nodes_add(&to[i]->after, from[i]);
        else sm_nodes_remove(&to[i]->after, from[i]);
    return 0;
}

/* Its edges go with it. */
int sm_node_destroy(CUgraphNode node) {
    int error = node_check(node);
    if (error) return error;
    sm_graph *g = node->graph;
    if (has_memory(g)) return E_NOT_SUPPORTED;
    if (node->child && in_capture(node->child)) return E_STATE;
    sm_capture_forget_node(node);
    sm_nodes_remove(&g->nodes, node);
    for (size_t i = 0; i < g->nodes.n; i++) sm_nodes_remove(&g->nodes.at[i]->after, node);
    node_free(node, &g->launched);
    return 0;
}

/* ---- copies ----------------------------------------------------------------------------------------------------- */

static sm_graph *graph_copy(const sm_graph *from);

static CUgraphNode node_copy(sm_graph *g, CUgraphNode from) {
    static const sm_node_list none;
    CUgraphNode node = sm_node_new(g, from->kind, from->context, &none);
    sm_work_copy(&node->work, &from->work);
    node->word = from->word;
    node->value = from->value;
    node->flags = from->flags;
    node->write = from->write;
    node->programmatic = from->programmatic;
    node->event = from->event;
    node->birth = from->birth;
    node->original = from;
    from->copy = node;
    if (!from->child) return node;
    node->child = graph_copy(from->child);
    node->child->owned = true;
    return node;
}

/* It keeps what its original keeps, and lives on its own. */
static sm_graph *graph_copy(const sm_graph *from) {
    sm_graph *g = sm_graph_new();
    for (size_t i = 0; i < from->nodes.n; i++) node_copy(g, from->nodes.at[i]);
    for (size_t i = 0; i < from->nodes.n; i++)
        for (size_t k = 0; k < from->nodes.at[i]->after.n; k++)
            sm_nodes_add(&g->nodes.at[i]->after, from->nodes.at[i]->after.at[k]->copy);
    for (size_t i = 0; i < from->nobjects; i++)
        (void)sm_graph_retain(g, from->objects[i].object, from->objects[i].count, 0);
    return g;
}

int sm_graph_clone(cudaGraph_t *out, cudaGraph_t from) {
    if (!out || sm_graph_check(from)) return E_VALUE;
    if (has_memory(from)) return E_NOT_SUPPORTED;
    *out = graph_copy(from);
    return 0;
}

int sm_node_in_clone(CUgraphNode *out, CUgraphNode original, cudaGraph_t clone) {
    if (!out || sm_graph_check(clone)) return E_VALUE;
    for (size_t i = 0; i < clone->nodes.n; i++) {
        CUgraphNode node = clone->nodes.at[i];
        if (node->original == original) return *out = node, 0;
        if (node->child && !sm_node_in_clone(out, original, node->child)) return 0;
    }
    return E_VALUE;
}

/* The node runs a copy of the graph. */
int sm_graph_add_child(CUgraphNode *out, cudaGraph_t g, const CUgraphNode *after, size_t n, cudaGraph_t child) {
    if (sm_graph_check(child)) return E_VALUE;
    if (has_memory(child)) return E_NOT_SUPPORTED;
    sm_graph *copy = graph_copy(child); /* before the node is there: a graph may be added to itself */
    int error = sm_graph_add(out, g, after, n, NODE_CHILD);
    if (error) {
        graph_abandon(copy);
        return error;
    }
    copy->owned = true;
    (*out)->child = copy;
    return 0;
}

int sm_node_child(CUgraphNode node, cudaGraph_t *out) {
    int error = node_check(node);
    if (error || !out || !node->child) return E_VALUE;
    *out = node->child;
    return 0;
}

/* ---- instances: steps and lanes --------------------------------------------------------------------------------- */

static int step_new(struct CUgraphExec_st *x, CUgraphNode node, sm_context *context) {
    x->steps = sm_grow(x->steps, x->nsteps, &x->capsteps, sizeof *x->steps);
    x->steps[x->nsteps] = (step){node, context, NULL, 0, 0, -1, false};
    return (int)x->nsteps++;
}

static void step_after(struct CUgraphExec_st *x, int at, int before) {
    step *s = &x->steps[at];
    s->after = sm_grow(s->after, s->nafter, &s->capafter, sizeof *s->after);
    s->after[s->nafter++] = before;
}

static int add_steps(struct CUgraphExec_st *x, sm_graph *g, int begin);

/* The child graph's steps, and one after those that nothing in it comes after. */
static int add_child_steps(struct CUgraphExec_st *x, CUgraphNode node, int begin) {
    const sm_node_list *nodes = &node->child->nodes;
    int error = add_steps(x, node->child, begin);
    if (error) return error;
    int end = node->step = step_new(x, NULL, node->context);
    unsigned long long mark = ++sm.births;
    for (size_t i = 0; i < nodes->n; i++)
        for (size_t k = 0; k < nodes->at[i]->after.n; k++) nodes->at[i]->after.at[k]->mark = mark;
    for (size_t i = 0; i < nodes->n; i++)
        if (nodes->at[i]->mark != mark) step_after(x, end, nodes->at[i]->step);
    if (!nodes->n) step_after(x, end, begin);
    return 0;
}

static int add_step(struct CUgraphExec_st *x, CUgraphNode node, int begin) {
    int at = node->step = step_new(x, node, node->context);
    if (begin >= 0 && !node->after.n) step_after(x, at, begin);
    for (size_t i = 0; i < node->after.n; i++) step_after(x, at, node->after.at[i]->step);
    return node->child ? add_child_steps(x, node, at) : 0;
}

static bool is_ready(const CUgraphNode node) {
    for (size_t i = 0; i < node->after.n; i++)
        if (node->after.at[i]->step < 0) return false;
    return node->step < 0;
}

/* In the order of the graph where the dependencies allow it. A cycle is an error. */
static int add_steps(struct CUgraphExec_st *x, sm_graph *g, int begin) {
    size_t left = g->nodes.n;
    for (size_t i = 0; i < g->nodes.n; i++) g->nodes.at[i]->step = -1;
    while (left) {
        size_t before = left;
        for (size_t i = 0; i < g->nodes.n; i++) {
            if (!is_ready(g->nodes.at[i])) continue;
            int error = add_step(x, g->nodes.at[i], begin);
            if (error) return error;
            left--;
        }
        if (left == before) return E_VALUE;
    }
    return 0;
}

static int lane_new(struct CUgraphExec_st *x, sm_context *context) {
    x->lanes = sm_grow(x->lanes, x->nlanes, &x->caplanes, sizeof *x->lanes);
    x->lanes[x->nlanes] = (lane){context, context->id, NULL};
    return (int)x->nlanes++;
}

static void give_lanes(struct CUgraphExec_st *x) {
    bool *taken = sm_alloc(x->nsteps);
    for (size_t i = 0; i < x->nsteps; i++) {
        step *s = &x->steps[i];
        for (size_t k = 0; k < s->nafter; k++) {
            step *before = &x->steps[s->after[k]];
            before->continued = true;
            if (s->lane >= 0 || taken[s->after[k]] || before->context != s->context) continue;
            s->lane = before->lane;
            taken[s->after[k]] = true;
        }
        if (s->lane < 0) s->lane = lane_new(x, s->context);
    }
    free(taken);
}

static void steps_drop(struct CUgraphExec_st *x) {
    for (size_t i = 0; i < x->nsteps; i++) free(x->steps[i].after);
    free(x->steps);
    x->steps = NULL;
    x->nsteps = x->capsteps = 0;
}

/* A graph of its own, whose memory is that of the graph it was made from. */
static sm_graph *instance_copy(cudaGraph_t from) {
    sm_graph *copy = graph_copy(from);
    copy->live = false;
    copy->owned = true;
    copy->memory = from->memory ? from->memory : from;
    copy->memory->refs++;
    return copy;
}

int sm_graph_instantiate(cudaGraphExec_t *out, cudaGraph_t g) {
    if (!out || sm_graph_check(g)) return E_VALUE;
    struct CUgraphExec_st *x = sm_alloc(sizeof *x);
    x->graph = instance_copy(g);
    int error = add_steps(x, x->graph, -1);
    if (error) {
        steps_drop(x);
        sm_graph_drop(x->graph);
        free(x);
        return error;
    }
    give_lanes(x);
    x->next = sm.execs;
    sm.execs = x;
    *out = x;
    return 0;
}

static struct CUgraphExec_st **exec_place(cudaGraphExec_t x) {
    struct CUgraphExec_st **at = &sm.execs;
    while (*at && *at != x) at = &(*at)->next;
    return at;
}

static int exec_check(cudaGraphExec_t x) {
    if (!x || *exec_place(x)) return x ? 0 : E_VALUE;
    sm_find(SIM_DEAD_HANDLE, "instance %p of a graph was destroyed", (void *)x);
    return E_VALUE;
}

int sm_exec_destroy(cudaGraphExec_t x) {
    int error = exec_check(x);
    if (error) return error;
    *exec_place(x) = x->next;
    for (size_t i = 0; i < x->nlanes; i++)
        if (x->lanes[i].stream) sm_stream_end(x->lanes[i].stream);
    steps_drop(x);
    free(x->lanes);
    sm_clock_drop(x->last.clock);
    sm_graph_drop(x->graph);
    free(x);
    return 0;
}

/* ---- changes of an instance ------------------------------------------------------------------------------------- */

static size_t place_of(const sm_graph *g, CUgraphNode node) {
    size_t i = 0;
    while (i < g->nodes.n && g->nodes.at[i] != node) i++;
    return i;
}

static bool same_edges(CUgraphNode a, CUgraphNode b) {
    if (a->after.n != b->after.n) return false;
    for (size_t i = 0; i < a->after.n; i++) {
        size_t place = place_of(a->graph, a->after.at[i]);
        if (!nodes_have(&b->after, b->graph->nodes.at[place])) return false;
    }
    return true;
}

/* What keeps b from taking the place of a; *where: the node of b. */
static int difference(const sm_graph *a, const sm_graph *b, CUgraphNode *where) {
    *where = NULL;
    if (a->nodes.n != b->nodes.n) return UPDATE_TOPOLOGY;
    for (size_t i = 0; i < a->nodes.n; i++) {
        CUgraphNode p = a->nodes.at[i], q = b->nodes.at[i];
        int was = 0, is = 0;
        *where = q;
        if (!same_edges(p, q)) return UPDATE_TOPOLOGY;
        if (sm_node_type(p, &was) || sm_node_type(q, &is) || was != is) return UPDATE_KIND;
        if (p->context != q->context) return UPDATE_PARAMETERS;
        int below = p->child ? difference(p->child, q->child, where) : 0;
        if (below) return below;
    }
    *where = NULL;
    return UPDATE_SUCCESS;
}

/* The instance takes the place of the old copy with a new one; launches that run keep the old one. */
static void exec_replace(cudaGraphExec_t x, sm_graph *copy) {
    sm_graph *old = x->graph;
    steps_drop(x);
    for (size_t i = 0; i < x->nlanes; i++)
        if (x->lanes[i].stream) sm_stream_end(x->lanes[i].stream);
    x->nlanes = 0;
    x->graph = copy;
    (void)add_steps(x, copy, -1);
    give_lanes(x);
    sm_graph_drop(old);
}

int sm_exec_update(cudaGraphExec_t x, cudaGraph_t g, int *result, CUgraphNode *where) {
    if (exec_check(x) || sm_graph_check(g)) return E_VALUE;
    *result = difference(x->graph, g, where);
    if (*result) return E_UPDATE_FAILURE;
    sm_graph *copy = instance_copy(g);
    for (size_t i = 0; i < copy->nodes.n; i++) copy->nodes.at[i]->original = x->graph->nodes.at[i]->original;
    exec_replace(x, copy);
    return 0;
}

/* The node of the instance that a node of the graph it was made from has become. */
static CUgraphNode exec_node(cudaGraphExec_t x, CUgraphNode original) {
    CUgraphNode node = NULL;
    for (size_t i = 0; i < x->graph->nodes.n; i++)
        if (x->graph->nodes.at[i]->original == original) node = x->graph->nodes.at[i];
    return node;
}

int sm_exec_child(cudaGraphExec_t x, CUgraphNode original, cudaGraph_t child) {
    if (exec_check(x) || sm_graph_check(child)) return E_VALUE;
    CUgraphNode node = exec_node(x, original), where;
    if (!node || !node->child || difference(node->child, child, &where)) return E_VALUE;
    if (has_memory(child)) return E_NOT_SUPPORTED;
    sm_graph *copy = instance_copy(x->graph); /* launches that run keep the old one */
    for (size_t i = 0; i < copy->nodes.n; i++) {
        CUgraphNode mine = copy->nodes.at[i];
        CUgraphNode old = mine->original;
        mine->original = old->original;
        if (old != node) continue;
        graph_abandon(mine->child);
        mine->child = graph_copy(child);
        mine->child->owned = true;
    }
    exec_replace(x, copy);
    return 0;
}

/* Operations that are queued have what they need, so a node may change under them. */
static int set_work(CUgraphNode node, const sm_work *w) {
    sm_work old = node->work;
    bool kernel = old.frame || !old.call;
    if (node->kind != NODE_WORK || old.kind != w->kind || kernel != (w->frame || !w->call)) return E_VALUE;
    sm_work_copy(&node->work, w);
    sm_work_drop(&old);
    return 0;
}

int sm_node_set_work(CUgraphNode node, const sm_work *w) {
    int error = node_check(node);
    return error ? error : set_work(node, w);
}

int sm_exec_set_work(cudaGraphExec_t x, CUgraphNode original, const sm_work *w) {
    if (exec_check(x)) return E_VALUE;
    CUgraphNode node = exec_node(x, original);
    return node ? set_work(node, w) : E_VALUE;
}

/* ---- launches --------------------------------------------------------------------------------------------------- */

static int exec_usable(const struct CUgraphExec_st *x) {
    for (size_t i = 0; i < x->nlanes; i++) {
        const sm_context *c = x->lanes[i].context;
        if (!c->live || c->id != x->lanes[i].context_id) return E_CONTEXT_DEAD;
    }
    return 0;
}

static sm_stream *lane_stream(lane *l, bool first, sm_stream *launch) {
    if (first && l->context == launch->context) return launch;
    if (!l->stream) l->stream = sm_stream_new(l->context, CU_STREAM_NON_BLOCKING, 0, false);
    return l->stream;
}

static void launch_node(CUgraphNode node, sm_stream *s) {
    bool live = node->event && node->event->live && node->event->birth == node->birth;
    if (node->kind == NODE_WORK) sm_work_launch(s, &node->work);
    if (node->kind == NODE_VALUE) sm_value_queue(s, node->word, node->value, node->flags, node->write);
    if (node->kind == NODE_RECORD && live) sm_event_mark(node->event, s);
    if (node->kind == NODE_WAIT && live) sm_after(s, &node->event->stamp);
}

static void launch_step(struct CUgraphExec_st *x, step *s, sm_stream *launch, const sm_stamp *begin, sm_stamp *done) {
    sm_stream *t = lane_stream(&x->lanes[s->lane], s->lane == 0, launch);
    if (!s->nafter && t != launch) sm_after(t, begin);
    for (size_t i = 0; i < s->nafter; i++)
        if (x->steps[s->after[i]].lane != s->lane) sm_after(t, &done[s->after[i]]);
    if (s->node) launch_node(s->node, t);
    done[s - x->steps] = sm_stamp_of(t);
}

static void launch_steps(struct CUgraphExec_st *x, sm_stream *launch) {
    sm_stamp *done = sm_alloc(x->nsteps * sizeof *done);
    sm_after(launch, &x->last);
    sm_stamp begin = sm_stamp_of(launch);
    for (size_t i = 0; i < x->nsteps; i++) launch_step(x, &x->steps[i], launch, &begin, done);
    for (size_t i = 0; i < x->nsteps; i++)
        if (!x->steps[i].continued && done[i].stream != launch) sm_after(launch, &done[i]);
    for (size_t i = 0; i < x->nsteps; i++) sm_clock_drop(done[i].clock);
    sm_clock_drop(begin.clock);
    free(done);
}

int sm_graph_launch(cudaGraphExec_t x, CUstream handle) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (!error) error = exec_check(x);
    if (!error) error = exec_usable(x);
    if (!error) error = sm_capture_touched(s);
    if (error) return error;
    sm_graph *g = x->graph;
    error = sm_graph_memory_launch(g->memory);
    if (error) return error;
    launch_steps(x, s);
    g->refs++;
    sm_queue(s, OP_MARK)->graph = g;
    sm_stamp_set(&x->last, sm_stamp_of(s));
    sm_stamp_set(&g->launched, sm_stamp_of(s));
    return 0;
}

int sm_graph_upload(cudaGraphExec_t x, CUstream handle) {
    sm_stream *s;
    int error = sm_stream_find(handle, &s);
    if (!error) error = sm_usable(s);
    if (!error) error = exec_check(x);
    if (!error && s->capture) error = E_NOT_SUPPORTED;
    if (!error) sm_queue(s, OP_MARK);
    return error;
}

/* Of a process that ends: nobody's destructor is called. */
void sm_graphs_clear(void) {
    for (struct CUgraphExec_st *x = sm.execs, *next; x; x = next) {
        next = x->next;
        steps_drop(x);
        free(x->lanes);
        sm_clock_drop(x->last.clock);
        free(x);
    }
    for (sm_graph *g = sm.graphs, *next; g; g = next) {
        next = g->next;
        for (size_t i = 0; i < g->nodes.n; i++) {
            g->nodes.at[i]->child = NULL;
            node_free(g->nodes.at[i], NULL);
        }
        sm_nodes_drop(&g->nodes);
        sm_clock_drop(g->launched.clock);
        free(g->objects);
        free(g);
    }
    for (struct CUuserObject_st *o = sm.objects, *next; o; o = next) next = o->next, object_free(o);
    sm.execs = NULL;
    sm.graphs = NULL;
    sm.objects = NULL;
}
