/* 07_inference_server.cu - threads that each decode a batch of sequences, whose caches grow, within a limit.

   Shows    a pool with a limit, shared by threads with a stream each; key/value caches that grow in place; and
            eviction: when memory runs out, galloc calls the server, which gives up its youngest sequence.
   Gain     a cache takes the memory of the tokens that are there. Without growth in place it takes that of the most
            that there may be, so that fewer sequences fit into the limit at once.
   Look up  galloc_pool_create, galloc_alloc, galloc_resize, galloc_pool_set_callbacks, galloc_pool_destroy */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

enum { WORKERS = 4, SLOTS = 8, TOKEN = 65536, CELLS = TOKEN / 4, THREADS = 128, MIB = 1 << 20 };

struct batch {
    uint32_t *cache[SLOTS], tokens[SLOTS], seed[SLOTS];
};

/* A step of each sequence: the keys and values of a new token, and attention to the earlier ones. Of the cells of a
   token few are used: one for each thread. */
static __global__ void decode(batch b, uint32_t *states)
{
    uint32_t *cache = b.cache[blockIdx.x], tokens = b.tokens[blockIdx.x], sum = 0, i = threadIdx.x * (CELLS / THREADS);
    if (!cache) return;
    for (uint32_t t = 0; t < tokens; t++) sum += cache[t * (size_t)CELLS + i];
    cache[tokens * (size_t)CELLS + i] = (b.seed[blockIdx.x] + tokens) * (2 * threadIdx.x + 1);
    atomicAdd(states + blockIdx.x, sum);
}

/* A sequence's state after all its tokens: each is seen by all later ones; the sum of 2 i + 1 is a square. */
static uint32_t state_on_host(uint32_t seed, uint32_t tokens)
{
    uint32_t state = 0, t;
    for (t = 0; t < tokens; t++) state += (tokens - 1 - t) * (seed + t) * THREADS * THREADS;
    return state;
}

struct sequence {
    uint32_t seed, length, tokens; /* the length shows when it is reached; tokens so far */
    size_t bytes;                  /* of the cache */
    uint32_t *cache;               /* NULL: the slot is free, or the sequence waits in the queue */
};

struct server {
    galloc_pool *pool;
    size_t limit, room; /* of all caches, of one */
    std::vector<sequence> requests, queue;
    std::mutex lock;         /* of the queue */
    std::atomic<int> places; /* caches that the limit still allows, with another allocator than galloc */
    std::atomic<int> unfinished, active, wrong, evicted;
    std::atomic<long> steps[3], at_once[3]; /* with each allocator: of all workers; sequences in them, added up */
};

struct worker {
    server *s;
    cudaStream_t stream;
    uint32_t *states;              /* of the slots, on the device */
    sequence slot[SLOTS], *asking; /* the batch; the sequence whose allocation is under way */
    bool full;                     /* takes no requests until a sequence has ended */
};

static thread_local worker *self; /* the callback runs in the thread whose allocation fails */

/* With galloc a cache grows; with the others it is as long as it can get, if the limit allows. */
static cudaError_t begin_cache(worker *w, sequence *q)
{
    galloc_request r = {};
    r.bytes = q->bytes = example_with == GALLOC ? 2 * MIB : w->s->room;
    r.max_bytes = w->s->room;
    r.stream = w->stream, r.pool = w->s->pool;
    if (example_with == GALLOC) return galloc_alloc(&q->cache, &r);
    if (--w->s->places < 0) return w->s->places++, cudaErrorMemoryAllocation;
    return galloc_malloc(&q->cache, q->bytes, w->stream);
}

static void end_cache(worker *w, sequence *q)
{
    CHECK(galloc_free(q->cache, w->stream));
    q->cache = NULL, w->s->active--, w->s->places += example_with != GALLOC;
}

/* Puts the request of a sequence back into the queue, to begin anew. */
static void evict(worker *w, sequence *q)
{
    if (q->cache) w->s->evicted++, end_cache(w, q);
    std::lock_guard<std::mutex> guard(w->s->lock);
    w->s->queue.push_back({q->seed, q->length, 0, 0, NULL});
    w->full = true;
}

/* galloc's last resort before an allocation fails. 1: something was freed, try again. */
static int on_oom(const galloc_report *, void *)
{
    sequence *youngest = NULL;
    if (!self->asking->cache) return 0; /* nobody gives way to a new sequence */
    for (sequence &q : self->slot)
        if (&q != self->asking && q.cache && (!youngest || q.tokens < youngest->tokens)) youngest = &q;
    return youngest ? evict(self, youngest), 1 : 0;
}

/* Continuous batching: a free slot gets the next request while the other sequences go on. */
static void fill_slots(worker *w)
{
    for (sequence &q : w->slot) {
        if (q.cache || w->full) continue;
        std::unique_lock<std::mutex> guard(w->s->lock);
        if (w->s->queue.empty()) return;
        q = w->s->queue.back(), w->s->queue.pop_back();
        guard.unlock(); /* on_oom takes the lock */
        w->asking = &q;
        if (begin_cache(w, &q) != cudaSuccess) return evict(w, &q);
        w->s->active++;
        CHECK(cudaMemsetAsync(w->states + (&q - w->slot), 0, sizeof *w->states, w->stream));
    }
}

/* A token for each sequence, whose cache may have to grow. 0: there is none. */
static int decode_step(worker *w)
{
    uint32_t found[SLOTS], n = 0;
    batch b = {};
    for (sequence &q : w->slot) {
        w->asking = &q;
        bool grows = q.cache && (q.tokens + 1) * (size_t)TOKEN > q.bytes;
        if (grows && galloc_resize(q.cache, q.bytes += 2 * MIB, w->stream) != cudaSuccess) evict(w, &q);
    }
    for (int i = 0; i < SLOTS; i++)
        if ((b.cache[i] = w->slot[i].cache))
            b.seed[i] = w->slot[i].seed, b.tokens[i] = w->slot[i].tokens++, n++;
    if (!n) return 0;
    w->s->steps[example_with]++, w->s->at_once[example_with] += w->s->active;
    decode<<<SLOTS, THREADS, 0, w->stream>>>(b, w->states);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpyAsync(found, w->states, sizeof found, cudaMemcpyDeviceToHost, w->stream));
    CHECK(cudaStreamSynchronize(w->stream));
    for (sequence &q : w->slot) {
        if (!q.cache || q.tokens < q.length) continue;
        w->s->wrong += found[&q - w->slot] != state_on_host(q.seed, q.length);
        end_cache(w, &q);
        w->s->unfinished--, w->full = false;
    }
    return 1;
}

static void work(server *s)
{
    worker w = {};
    w.s = s, self = &w;
    CHECK(cudaStreamCreateWithFlags(&w.stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&w.states, SLOTS * sizeof *w.states));
    while (s->unfinished) {
        fill_slots(&w);
        if (!decode_step(&w)) w.full = false, std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    CHECK(cudaFree(w.states));
    CHECK(galloc_stream_retire(w.stream));
    CHECK(cudaStreamDestroy(w.stream));
}

static void serve(void *state)
{
    server *s = (server *)state;
    std::vector<std::thread> workers;
    s->queue = s->requests;
    s->unfinished = (int)s->requests.size(), s->places = (int)(s->limit / s->room);
    for (int i = 0; i < WORKERS; i++) workers.emplace_back(work, s);
    for (std::thread &t : workers) t.join();
    example_result(s->wrong == 0 && s->active == 0);
}

int main()
{
    example_begin("07_inference_server");
    server s = {};
    s.room = (example_is_simulated() ? 16 : 32) * MIB;
    s.limit = (example_is_simulated() ? 64 : 256) * MIB;
    uint32_t n = example_is_simulated() ? 80 : 1000, most = (uint32_t)(s.room / TOKEN); /* few are as long as that */
    for (uint32_t i = 0; i < n; i++)
        s.requests.push_back({i * 7919, 1 + (i * 2654435761u >> 8) % (i % 16 ? most / 4 : most), 0, 0, NULL});
    printf("%u requests on %d threads; a limit of %zu MiB for caches of up to %zu MiB\n", n, WORKERS, s.limit / MIB,
           s.room / MIB);
    galloc_config config = galloc_config_default();
    const galloc_callbacks callbacks = {on_oom, NULL, NULL, NULL, NULL};
    config.memory_limit = s.limit;
    CHECK(galloc_pool_create(&s.pool, &config));
    CHECK(galloc_pool_set_callbacks(s.pool, &callbacks));
    galloc_set_log([](int, const char *, void *) {}, NULL); /* an allocation that fails is no error here */
    example_compare("request", (int)n, serve, &s);
    for (int i = 0; i < 3; i++)
        printf("%-16s %5.1f sequences at once\n", example_allocator_name[i], (double)s.at_once[i] / s.steps[i]);
    printf("galloc: %d sequences were evicted\n", (int)s.evicted);
    CHECK(galloc_pool_destroy(s.pool));
    return example_end();
}
