/* 05_graphs.cu - a graph for each of four batch sizes, as an inference server has, with temporaries of their own.

   Shows    allocations in a capture: the memory is the graph's, at the same addresses in each launch. Graphs of one
            group share memory, so that all of them need that of the largest.
   Gain     memory: cudaMalloc is refused in a capture, and buffers made beforehand add up. A launch has no nodes for
            allocations, as it has with cudaMallocAsync.
   Look up  galloc_graph_begin, galloc_graph_end, galloc_graph_release, ON GRAPHS in galloc.h */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"

enum { GRAPHS = 4, THREADS = 256 };

static __global__ void fill(uint32_t *p, uint32_t seed, size_t n)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) p[i] = (uint32_t)i * 2654435761u + seed;
}

static __global__ void fold(const uint32_t *a, size_t n, uint32_t *b)
{
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) b[i] = a[i] ^ a[n - 1 - i] >> 7;
}

static __global__ void sum(const uint32_t *b, size_t n, uint32_t *result)
{
    uint32_t s = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x)
        s += b[i];
    atomicAdd(result, s);
}

static uint32_t sum_on_host(uint32_t seed, size_t n)
{
    uint32_t s = 0;
    for (size_t i = 0; i < n; i++)
        s += ((uint32_t)i * 2654435761u + seed) ^ ((uint32_t)(n - 1 - i) * 2654435761u + seed) >> 7;
    return s;
}

struct server {
    cudaStream_t stream;
    cudaGraphExec_t exec[GRAPHS];
    uint32_t *results;          /* one for each graph */
    uint32_t right[GRAPHS];
    size_t n[GRAPHS];           /* words of a temporary; the largest first, so that the others fit into its memory */
    void *beforehand[2 * GRAPHS];
};

/* Captures a graph with two temporaries, which are used and freed in the order of the stream. */
static void capture(server *s, int i)
{
    size_t n = s->n[i], bytes = n * sizeof(uint32_t);
    unsigned blocks = (unsigned)((n + THREADS - 1) / THREADS);
    uint32_t *a = (uint32_t *)s->beforehand[2 * i], *b = (uint32_t *)s->beforehand[2 * i + 1];
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeGlobal));
    if (!a) CHECK(galloc_malloc(&a, bytes, s->stream)); /* in a capture as anywhere */
    fill<<<blocks, THREADS, 0, s->stream>>>(a, (uint32_t)i, n);
    if (!b) CHECK(galloc_malloc(&b, bytes, s->stream));
    fold<<<blocks, THREADS, 0, s->stream>>>(a, n, b);
    if (!s->beforehand[0]) CHECK(galloc_free(a, s->stream)); /* the graph's own, for what is captured after this */
    CHECK(cudaMemsetAsync(s->results + i, 0, sizeof *s->results, s->stream));
    sum<<<(blocks + 15) / 16, THREADS, 0, s->stream>>>(b, n, s->results + i);
    if (!s->beforehand[0]) CHECK(galloc_free(b, s->stream));
    CHECK(cudaStreamEndCapture(s->stream, &graph));
    CHECK(cudaGraphInstantiate(&s->exec[i], graph, 0));
    CHECK(cudaGraphDestroy(graph)); /* the instance keeps the memory */
    CHECK(cudaGetLastError());
}

static void capture_all(server *s)
{
    for (int i = 0; i < GRAPHS; i++) capture(s, i);
}

static void destroy_all(server *s)
{
    for (int i = 0; i < GRAPHS; i++) CHECK(cudaGraphExecDestroy(s->exec[i]));
}

/* Launches each graph once, in turn. */
static void launch_all(void *state)
{
    server *s = (server *)state;
    uint32_t found[GRAPHS];
    for (int i = 0; i < GRAPHS; i++) CHECK(cudaGraphLaunch(s->exec[i], s->stream));
    CHECK(cudaMemcpyAsync(found, s->results, sizeof found, cudaMemcpyDeviceToHost, s->stream));
    CHECK(cudaStreamSynchronize(s->stream));
    for (int i = 0; i < GRAPHS; i++) example_result(found[i] == s->right[i]);
}

static size_t say_memory(const char *what)
{
    galloc_pool *pool;
    galloc_stats stats;
    CHECK(galloc_pool_default(&pool, -1));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("%-18s %d graphs own %5zu KiB\n", what, (int)stats.graphs, stats.graph_bytes / 1024);
    return stats.graph_bytes;
}

/* ---- the comparison ---------------------------------------------------------------------------------------------- */

/* With the allocator whose turn it is: captures, launches many times, destroys. */
static void serve(void *state)
{
    server *s = (server *)state;
    galloc_graph *group = NULL;
    if (example_with == CUDA_MALLOC)
        for (int i = 0; i < 2 * GRAPHS; i++)
            CHECK(galloc_malloc(&s->beforehand[i], s->n[i / 2] * sizeof(uint32_t), s->stream));
    if (example_with == GALLOC) CHECK(galloc_graph_begin(&group, NULL, s->stream));
    capture_all(s);
    if (example_with == GALLOC) CHECK(galloc_graph_end(group));
    for (int i = 0; i < 100; i++) launch_all(s);
    if (example_with == GALLOC) CHECK(galloc_graph_release(group, s->stream));
    destroy_all(s);
    for (int i = 0; i < 2 * GRAPHS; i++) {
        if (s->beforehand[i]) CHECK(galloc_free(s->beforehand[i], s->stream));
        s->beforehand[i] = NULL;
    }
}

int main()
{
    example_begin("05_graphs");
    server s = {};
    CHECK(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    CHECK(galloc_malloc(&s.results, GRAPHS * sizeof(uint32_t), s.stream));
    for (int i = 0; i < GRAPHS; i++) {
        s.n[i] = (size_t)1 << ((example_is_simulated() ? 14 : 21) - i);
        s.right[i] = sum_on_host((uint32_t)i, s.n[i]);
    }

    capture_all(&s);
    size_t apart = say_memory("each by itself:");
    launch_all(&s);
    destroy_all(&s);

    galloc_graph *group = NULL;
    CHECK(galloc_graph_begin(&group, NULL, s.stream)); /* NULL: a new group, in the default pool */
    capture_all(&s);
    CHECK(galloc_graph_end(group));
    size_t together = say_memory("in a group:");
    launch_all(&s); /* never two at once: that is the promise */
    CHECK(galloc_graph_release(group, s.stream)); /* no launch comes after this point of the stream */
    size_t released = say_memory("released:");
    destroy_all(&s);
    example_result_by_default(apart > together);
    example_result(released == 0);

    example_compare("launch", 100 * GRAPHS, serve, &s);

    CHECK(galloc_free(s.results, s.stream));
    CHECK(galloc_stream_retire(s.stream));
    CHECK(cudaStreamDestroy(s.stream));
    return example_end();
}
