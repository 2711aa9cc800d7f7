/* 04_graphs.c - allocate while a stream is captured, and let graphs share memory.

   Captures a graph for each of four batch sizes, as an inference server would. Each needs temporaries, which it
   allocates and frees in the capture; the memory stays the graph's, so that it can be launched at any time. Put into
   one group the four need the memory of the largest. Released, or when the graphs are destroyed, it is everybody's
   again. Plain C with memsets for the only work.

   Run       make examples, then build/examples/04_graphs-cuda (GPU) or build/examples/04_graphs
   Expected
       each by itself: 4 graphs own 30 MiB
       in a group:     4 graphs own 16 MiB
       released:       0 graphs own 0 MiB */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <stdio.h>

#define CHECK(call) \
    if ((call) != cudaSuccess) return printf("%s failed\n", #call), 1

#define GRAPHS 4
#define MIB ((size_t)1 << 20)

/* One graph: two temporaries of `bytes`, used and freed in the order of the stream. */
static int capture(cudaGraphExec_t *exec, size_t bytes, cudaStream_t stream)
{
    cudaGraph_t graph;
    void *a, *b;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(galloc_malloc(&a, bytes, stream)); /* in a capture as anywhere */
    CHECK(cudaMemsetAsync(a, 1, bytes, stream));
    CHECK(galloc_malloc(&b, bytes, stream));
    CHECK(cudaMemsetAsync(b, 2, bytes, stream));
    CHECK(galloc_free(a, stream)); /* the graph's own, for what is captured after this */
    CHECK(galloc_free(b, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(exec, graph, 0));
    CHECK(cudaGraphDestroy(graph)); /* the instance keeps the memory */
    return 0;
}

/* Largest first, so that the others find room in what it had. */
static int capture_all(cudaGraphExec_t *exec, cudaStream_t stream)
{
    int i;
    for (i = 0; i < GRAPHS; i++)
        if (capture(&exec[i], 8 * MIB >> i, stream)) return 1;
    return 0;
}

static int end_all(cudaGraphExec_t *exec)
{
    int i;
    for (i = 0; i < GRAPHS; i++) CHECK(cudaGraphExecDestroy(exec[i]));
    return 0;
}

static int say(const char *what)
{
    galloc_pool *pool;
    galloc_stats stats;
    CHECK(galloc_pool_default(&pool, -1));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("%-15s %d graphs own %d MiB\n", what, (int)stats.graphs, (int)(stats.graph_bytes / MIB));
    return 0;
}

int main(void)
{
    cudaStream_t stream;
    cudaGraphExec_t exec[GRAPHS];
    galloc_graph *group = NULL;
    int i;

    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (capture_all(exec, stream) || say("each by itself:") || end_all(exec)) return 1;

    CHECK(galloc_graph_begin(&group, NULL, stream)); /* NULL: a new group, in the default pool */
    if (capture_all(exec, stream) || say("in a group:")) return 1;
    CHECK(galloc_graph_end(group));
    for (i = 0; i < GRAPHS; i++) CHECK(cudaGraphLaunch(exec[i], stream)); /* never two at once: that is the promise */
    CHECK(galloc_graph_release(group, stream)); /* no launch comes after this point of the stream */
    if (say("released:") || end_all(exec)) return 1;

    CHECK(cudaStreamSynchronize(stream));
    CHECK(galloc_stream_retire(stream));
    CHECK(cudaStreamDestroy(stream));
    CHECK(galloc_shutdown());
    return 0;
}
