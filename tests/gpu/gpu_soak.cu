/* gpu_soak.cu - one long run in which pages move all the time: eight streams write and check every byte of blocks of
   512 B to 64 MiB (content.h) in a pool that is too small and creates no page that could be moved instead. The last
   line is the result, in words and numbers by turns.

   It also keeps a book of its own on each page: at which address it was last used, and by which piece of work on which
   stream. A page that comes back at another address while such work is unfinished has moved under running work.

   gpu_soak [--seconds N] [--limit-mib N] [--seed N] [--wrong-order]

   --wrong-order frees blocks on a stream that was not made to wait for their work. It must find wrong words. No page
   is then given back or moved, since work on an address that is no longer mapped would end the program instead. */

#include "content.h"

#include <unordered_map>

enum { ALL_STREAMS = 8, THREADS = 4, PROGRESS_SECONDS = 30 };
enum { BEHIND = 256 }; /* operations, on the simulated device; on a GPU delays make the device the slower one */

/* ---- the book on pages ------------------------------------------------------------------------------------------- */

typedef struct page_entry {
    uintptr_t addr;
    uint32_t last_use[ALL_STREAMS]; /* numbers of pieces of work; 0: none */
} page_entry;

static std::mutex book_lock;
static std::unordered_map<unsigned long long, page_entry> book; /* by handle */
static cudaStream_t book_streams[ALL_STREAMS];
static uint32_t queued[ALL_STREAMS]; /* pieces of work */
static volatile uint32_t *done;      /* so many are done, for each stream; the device writes it */
static uint32_t *done_on_device;
static unsigned long long pages_elsewhere, pages_at_work;

static int book_make(void)
{
    void *host = NULL;
    if (cudaHostAlloc(&host, ALL_STREAMS * sizeof *done, cudaHostAllocMapped) != cudaSuccess) return -1;
    memset(host, 0, ALL_STREAMS * sizeof *done);
    done = (volatile uint32_t *)host;
    return cudaHostGetDevicePointer((void **)&done_on_device, host, 0) == cudaSuccess ? 0 : -1;
}

#ifdef GALLOC_ON_SIM

typedef struct note {
    uint32_t *word, number;
} note;

static void write_note(void *arg)
{
    note *n = (note *)arg;
    *n->word = n->number;
    free(n);
}

static void queue_note(cudaStream_t stream, uint32_t *word, uint32_t number)
{
    note *n = (note *)malloc(sizeof *n);
    n->word = word;
    n->number = number;
    OK(sim_launch_call(stream, NULL, 0, write_note, n));
}

#else

static __global__ void write_note(volatile uint32_t *word, uint32_t number) { *word = number; }

static void queue_note(cudaStream_t stream, uint32_t *word, uint32_t number)
{
    write_note<<<1, 1, 0, stream>>>(word, number);
}

#endif

/* With the lock held. */
static int book_stream(cudaStream_t stream)
{
    int i = 0;
    while (i < ALL_STREAMS - 1 && book_streams[i] && book_streams[i] != stream) i++;
    book_streams[i] = stream;
    return i;
}

static int has_unfinished_work(const page_entry *e)
{
    int unfinished = 0;
    for (int i = 0; i < ALL_STREAMS; i++) unfinished |= e->last_use[i] > done[i];
    return unfinished;
}

/* The pages under a used block stay where they are, so they can be looked at without a lock of galloc's. */
static void book_got(const block *b, cudaStream_t)
{
    std::lock_guard<std::mutex> guard(book_lock);
    for (uintptr_t at = (uintptr_t)b->p; at < (uintptr_t)b->p + b->bytes;) {
        const gai_mapping *mapping = gai_page_at(at);
        page_entry *e = &book[(unsigned long long)mapping->page->handle];
        if (e->addr && e->addr != mapping->addr) {
            pages_elsewhere++;
            pages_at_work += has_unfinished_work(e);
        }
        e->addr = mapping->addr;
        at = mapping->addr + mapping->bytes;
    }
}

static void book_used(const block *b, cudaStream_t stream)
{
    book_lock.lock();
    int i = book_stream(stream);
    uint32_t number = ++queued[i];
    for (uintptr_t at = (uintptr_t)b->p; at < (uintptr_t)b->p + b->bytes;) {
        const gai_mapping *mapping = gai_page_at(at);
        book[(unsigned long long)mapping->page->handle].last_use[i] = number;
        at = mapping->addr + mapping->bytes;
    }
    book_lock.unlock();
    queue_note(stream, done_on_device + i, number); /* only the stream's own thread queues work on it */
}

static const onlooker bookkeeper = {book_got, book_used};

/* ---- work in the wrong order ------------------------------------------------------------------------------------- */

/* The block is freed on another stream than the one that still has to read it, and that stream writes to it. */
static void free_on_wrong_stream(worker *w)
{
    if (w->held.empty()) return;
    block b = take_one(w), next = b;
    cudaStream_t s = stream_of(w, &b);
    next.stream = (b.stream + 1) % streams_each;
    device_delay(s, 500);
    check_on(w, &b, s);
    OK(galloc_free(b.p, stream_of(w, &next)));
    if (!OK(galloc_pool_malloc(w->c->pool, &next.p, next.bytes, stream_of(w, &next)))) return;
    fill(w, &next);
    w->held.push_back(next);
    w->held_bytes += next.bytes;
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

static void show_progress(const content *c, int passed)
{
    galloc_stats stats = stats_of(c->pool);
    printf("%5d s: %u blocks, %.1f GiB checked, %llu pages moved; in the driver %.1f s mapping, %.1f s unmapping, "
           "%.1f s with events\n",
           passed, c->next_tag.load(), (double)c->bytes.load() / (1 << 30), (unsigned long long)stats.moves,
           (double)(stats.driver_ns.map + stats.driver_ns.set_access) / 1e9, (double)stats.driver_ns.unmap / 1e9,
           (double)(stats.driver_ns.event_record + stats.driver_ns.event_query + stats.driver_ns.stream_wait) / 1e9);
}

static void run_threads(content *c)
{
    std::chrono::steady_clock::time_point end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    std::vector<std::thread> threads;
    for (int i = 0; i < thread_count; i++) threads.push_back(std::thread(work_on, c, (uint64_t)i + 1, end));
    for (int passed = 1; passed <= seconds; passed++) {
        std::this_thread::sleep_for(std::chrono::seconds(1));
        if (passed % PROGRESS_SECONDS == 0) show_progress(c, passed);
    }
    for (size_t i = 0; i < threads.size(); i++) threads[i].join();
}

/* Returns the exit status. */
static int soak(int wrong_order)
{
    content c = {};
    galloc_config config = galloc_config_default();
    config.memory_limit = wrong_order ? SIZE_MAX : limit;
    config.overhead = wrong_order ? 100 : 0;
    c.keeps_streams = 1;
    c.watch = wrong_order ? NULL : &bookkeeper;
    c.spoil = wrong_order ? free_on_wrong_stream : NULL;
    OK(galloc_pool_create(&c.pool, &config));
    run_threads(&c);

    unsigned long long wrong = device_wrong();
    galloc_stats stats = stats_of(c.pool);
    printf("    %llu used by a second stream, %llu by a second thread, %llu resized, %llu refused for want of memory\n",
           c.other_stream.load(), c.handed_over.load(), c.resized.load(), c.refused.load());
    printf("    %llu marks, %llu waits of streams, %zu MiB held at most, %llu pages found at another address\n",
           (unsigned long long)stats.marks, (unsigned long long)stats.waits, stats.reserved.peak >> 20,
           pages_elsewhere);
    EXPECT_EQ(stats.live.current, 0);
    if (wrong_order) EXPECT_EQ(stats.moves, 0);
    else EXPECT(stats.reserved.peak <= limit && stats.moves > 0);
    EXPECT(c.compared > 0);
    pool_end(c.pool);
    OK(galloc_shutdown());
    printf("seconds %d streams %d blocks %u gib_checked %.1f moved %llu at_work %llu wrong_words %llu failed %ld\n",
           seconds, thread_count * streams_each, c.next_tag.load(), (double)c.bytes.load() / (1 << 30),
           (unsigned long long)stats.moves, pages_at_work, wrong, test_failures);
    return wrong || test_failures;
}

int main(int argc, char **argv)
{
    int wrong_order = 0;
    seed = test_seed();
    seconds = 480;
    limit = mib(1024);
    thread_count = THREADS;
    streams_each = ALL_STREAMS / THREADS;
    delay_one_in = 2;
    delay_us = 1500;
    behind = BEHIND;
    for (int i = 1; i < argc; i++) {
        unsigned long long value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (!strcmp(argv[i], "--wrong-order")) wrong_order = 1;
        else if (value && !strcmp(argv[i], "--seconds")) seconds = (int)value, i++;
        else if (value && !strcmp(argv[i], "--limit-mib")) limit = mib(value), i++;
        else if (value && !strcmp(argv[i], "--seed")) seed = value, i++;
        else return fprintf(stderr, "%s [--seconds N] [--limit-mib N] [--seed N] [--wrong-order]\n", argv[0]), 1;
    }
    int status = work_start();
    if (status) return status;
    if (book_make()) return printf("no host memory for the device to write to\n"), 1;
    printf("seed %llu, %d threads, %d streams, a limit of %zu MiB%s\n", (unsigned long long)seed, thread_count,
           thread_count * streams_each, limit >> 20, wrong_order ? ", IN THE WRONG ORDER" : "");
    return soak(wrong_order);
}
