/* all.c - a file with a heap of its own that calls each function, with arguments that the compiler does not know: for
   the warnings of its optimiser. As C and as C++. */

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

typedef struct arguments {
    void *ptr;
    char *text;
    size_t bytes;
    int n;
    cudaStream_t stream, *streams;
    galloc_pool *pool;
    galloc_graph *graph;
    galloc_config config;
    galloc_request request;
    galloc_callbacks callbacks;
    galloc_decision *decisions;
    galloc_stream_stats *stream_stats;
    galloc_stats stats;
    galloc_torch_stats torch_stats;
    galloc_pointer info;
    galloc_report report;
    void (*log)(int level, const char *text, void *user);
} arguments;

static int of_blocks(arguments *a)
{
    int bad = galloc_malloc(&a->ptr, a->bytes, a->stream) != cudaSuccess;
    bad += galloc_alloc(&a->ptr, &a->request) != cudaSuccess;
    bad += galloc_malloc_growable(&a->ptr, a->bytes, a->bytes, a->stream) != cudaSuccess;
    bad += galloc_pool_malloc(a->pool, &a->ptr, a->bytes, a->stream) != cudaSuccess;
    bad += galloc_resize(a->ptr, a->bytes, a->stream) != cudaSuccess;
    bad += galloc_record_stream(a->ptr, a->stream) != cudaSuccess;
    bad += galloc_pointer_info(a->ptr, &a->info) != cudaSuccess;
    bad += galloc_free(a->ptr, a->stream) != cudaSuccess;
    bad += galloc_free_after(a->ptr, a->streams, a->n) != cudaSuccess;
    bad += galloc_stream_retire(a->stream) != cudaSuccess;
    bad += galloc_graph_begin(&a->graph, a->pool, a->stream) != cudaSuccess;
    bad += galloc_graph_end(a->graph) != cudaSuccess;
    return bad + (galloc_graph_release(a->graph, a->stream) != cudaSuccess);
}

static int of_pools(arguments *a)
{
    int bad = galloc_pool_create(&a->pool, &a->config) != cudaSuccess;
    bad += galloc_pool_default(&a->pool, a->n) != cudaSuccess;
    bad += galloc_pool_reserve(a->pool, a->bytes) != cudaSuccess;
    bad += galloc_pool_trim(a->pool, a->bytes, &a->bytes) != cudaSuccess;
    bad += galloc_pool_sync_point(a->pool, &a->bytes) != cudaSuccess;
    bad += galloc_pool_set_limit(a->pool, a->bytes) != cudaSuccess;
    bad += galloc_pool_set_callbacks(a->pool, &a->callbacks) != cudaSuccess;
    bad += galloc_pool_config(a->pool, &a->config) != cudaSuccess;
    bad += galloc_pool_decisions(a->pool, a->decisions, a->n, &a->n) != cudaSuccess;
    bad += galloc_pool_freeze(a->pool) != cudaSuccess;
    bad += galloc_pool_stats(a->pool, &a->stats) != cudaSuccess;
    bad += galloc_pool_stats_reset(a->pool) != cudaSuccess;
    bad += galloc_pool_torch_stats(a->pool, &a->torch_stats) != cudaSuccess;
    bad += galloc_pool_streams(a->pool, a->stream_stats, a->n, &a->n) != cudaSuccess;
    bad += galloc_pool_check(a->pool);
    return bad + (galloc_pool_destroy(a->pool) != cudaSuccess);
}

static int of_texts(arguments *a)
{
    int bad = galloc_config_parse(&a->config, a->text, a->text, a->bytes) != cudaSuccess;
    a->config = galloc_config_default();
    bad += galloc_config_print(&a->config, a->text, a->bytes) != cudaSuccess;
    bad += galloc_oom_report(&a->report) != cudaSuccess;
    bad += galloc_report_text(&a->report, a->text, a->bytes) != cudaSuccess;
    galloc_set_log(a->log, a->ptr);
    return bad + (galloc_last_message()[0] != 0);
}

extern arguments the_arguments;
arguments the_arguments;

int main(void)
{
    int bad = of_blocks(&the_arguments) + of_pools(&the_arguments) + of_texts(&the_arguments);
    return bad + (galloc_shutdown() != cudaSuccess);
}
