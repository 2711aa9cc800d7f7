/* gpu_pressure.cu - running out of memory on a card that is full: others hold all of it but 1 GiB. What is refused is
   reported, and the numbers of the report add up; what is given back, others can have; what waits, waits for just
   enough; nothing that is live is ever touched. Prints how long the calls took.

       gpu_pressure [SECONDS]   for each of the three runs of the longest test; 10 */

#include "work.h"

static int seconds = 10;

static double now_ms(void)
{
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::milli>(now).count();
}

/* ---- a full card ------------------------------------------------------------------------------------------------- */

enum { LEFT_MIB = 1024 };

static std::vector<void *> ballast;

static size_t device_free(void)
{
    size_t bytes = 0, total = 0;
    OK(cudaMemGetInfo(&bytes, &total));
    return bytes;
}

static void fill_the_card(size_t leave)
{
    for (size_t piece = mib(4096); piece >= mib(2); piece /= 2)
        while (device_free() >= leave + piece) {
            void *p = NULL;
            if (cudaMalloc(&p, piece) != cudaSuccess) {
                (void)cudaGetLastError();
                break;
            }
            ballast.push_back(p);
        }
}

static void empty_the_card(void)
{
    for (void *p : ballast) OK(cudaFree(p));
    ballast.clear();
}

/* ---- reports ----------------------------------------------------------------------------------------------------- */

/* The equations above galloc_report. Others may take or free memory of the device at any time: not asserted. */
static void expect_adds_up(const galloc_report *r)
{
    size_t stranded = r->more_stranded;
    for (int i = 0; i < GALLOC_REPORT_STREAMS; i++) stranded += r->streams[i].bytes;
    EXPECT_EQ(r->live + r->rounding + r->cached, r->held);
    EXPECT_EQ(r->usable + r->stranded + r->graph_bytes + r->quarantined + r->busy, r->cached);
    EXPECT_EQ(stranded, r->stranded);
    EXPECT(r->usable_in_pages <= r->usable);
    EXPECT(r->largest_usable <= r->usable);
    EXPECT(r->held <= r->limit);
    EXPECT_EQ(r->room, r->limit - r->held);
    EXPECT(r->device_known);
}

static void show(const galloc_report *report)
{
    static char text[GALLOC_REPORT_TEXT];
    OK(galloc_report_text(report, text, sizeof text));
    printf("%s\n", text);
}

/* ---- live blocks ------------------------------------------------------------------------------------------------- */

typedef struct piece {
    void *p;
    size_t bytes;
    uint32_t tag;
    int stream;
} piece;

typedef struct crowd {
    galloc_pool *pool;
    cudaStream_t streams[4];
    std::vector<piece> held;
    size_t bytes;
    dice d;
    uint32_t tags;
    long refused, served;
    double slowest_served, slowest_refused; /* ms */
} crowd;

static void crowd_open(crowd *c, const char *conf)
{
    galloc_config config = galloc_config_default();
    OK(galloc_config_parse(&config, conf, NULL, 0));
    c->pool = NULL;
    OK(galloc_pool_create(&c->pool, &config));
    for (cudaStream_t &stream : c->streams) stream = stream_new();
    c->d.state = test_seed();
    c->bytes = 0;
    c->tags = 0;
    c->refused = c->served = 0;
    c->slowest_served = c->slowest_refused = 0;
}

static void crowd_drop(crowd *c, size_t i)
{
    piece b = c->held[i];
    device_check(c->streams[b.stream], b.p, b.bytes, b.tag);
    OK(galloc_free(b.p, c->streams[b.stream]));
    c->bytes -= b.bytes;
    c->held[i] = c->held.back();
    c->held.pop_back();
}

static void crowd_thin(crowd *c, size_t to)
{
    while (c->held.size() > to) crowd_drop(c, roll_below(&c->d, (uint32_t)c->held.size()));
}

static void crowd_close(crowd *c)
{
    crowd_thin(c, 0);
    for (cudaStream_t stream : c->streams) {
        OK(galloc_stream_retire(stream));
        OK(cudaStreamDestroy(stream));
    }
    pool_end(c->pool);
    finish();
}

/* 0: refused, and the report is right. */
static int crowd_get(crowd *c, size_t bytes)
{
    piece b = {NULL, bytes, ++c->tags, (int)roll_below(&c->d, 4)};
    double began = now_ms(), took;
    cudaError_t error = galloc_pool_malloc(c->pool, &b.p, bytes, c->streams[b.stream]);
    took = now_ms() - began;
    if (error) {
        galloc_report report;
        EXPECT_EQ(error, cudaErrorMemoryAllocation);
        EXPECT(b.p == NULL);
        OK(galloc_oom_report(&report));
        expect_adds_up(&report);
        EXPECT_EQ(report.asked, bytes);
        EXPECT_EQ(report.live, c->bytes);
        if (!c->refused++) show(&report);
        if (took > c->slowest_refused) c->slowest_refused = took;
        return 0;
    }
    if (took > c->slowest_served) c->slowest_served = took;
    c->served++;
    device_fill(c->streams[b.stream], b.p, bytes, b.tag);
    if (roll_below(&c->d, 16) == 0) device_delay(c->streams[b.stream], 200);
    c->held.push_back(b);
    c->bytes += bytes;
    return 1;
}

static size_t any_size(dice *d)
{
    size_t bytes = (size_t)512 << roll_below(d, 18);
    return bytes + roll_below(d, (uint32_t)bytes);
}

/* ---- tests ------------------------------------------------------------------------------------------------------- */

/* Allocates until nothing is left, frees half, and goes on. */
static void run_out_again_and_again(const char *conf)
{
    crowd c;
    double began = now_ms();
    long rounds = 0;
    crowd_open(&c, conf);
    while (now_ms() - began < 1e3 * seconds || rounds < 2) {
        for (int misses = 0; misses < 4;) misses += !crowd_get(&c, any_size(&c.d));
        EXPECT_EQ(galloc_pool_check(c.pool), 0);
        crowd_thin(&c, c.held.size() / 2);
        rounds++;
    }
    galloc_stats s = stats_of(c.pool);
    printf("%s: %ld rounds, %ld served, %ld refused, live at most %zu MiB of %zu MiB held; the slowest call that was "
           "served %.2f ms, refused %.2f ms\n", conf[0] ? conf : "defaults", rounds, c.served, c.refused,
           s.live.peak >> 20, s.reserved.peak >> 20, c.slowest_served, c.slowest_refused);
    EXPECT_EQ(s.failures, c.refused);
    crowd_close(&c);
}

TEST(a_full_card_is_used_to_its_end)
{
    fill_the_card(mib(LEFT_MIB));
    printf("the card has %zu MiB left\n", device_free() >> 20);
    run_out_again_and_again("");
    run_out_again_and_again("expandable_segments:False");
    run_out_again_and_again("reuse:completed,wait_limit_ms:1");
    empty_the_card();
}

/* After all that, nearly all of it is to be had in one piece. */
TEST(what_was_in_pieces_is_whole_again)
{
    crowd c;
    fill_the_card(mib(LEFT_MIB));
    crowd_open(&c, "");
    while (crowd_get(&c, any_size(&c.d))) continue;
    size_t held = stats_of(c.pool).reserved.current;
    crowd_thin(&c, 0);
    double began = now_ms();
    EXPECT_EQ(crowd_get(&c, held - mib(64)), 1);
    printf("%zu of %zu MiB in one piece: %.2f ms\n", (held >> 20) - 64, held >> 20, now_ms() - began);
    crowd_close(&c);
    empty_the_card();
}

/* What is idle goes back to the device, without a call that waits, and others get it. */
static void collected(const char *conf, const char *what)
{
    crowd c;
    fill_the_card(mib(LEFT_MIB));
    crowd_open(&c, conf);
    while (c.bytes < mib(600)) EXPECT_EQ(crowd_get(&c, mib(1) + roll_below(&c.d, (uint32_t)mib(8))), 1);
    size_t held = stats_of(c.pool).reserved.current;
    crowd_thin(&c, 4);
    OK(cudaDeviceSynchronize());
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    double began = now_ms();
    for (int i = 0; i < 4000 || now_ms() - began < 200; i++) { /* goes on with little */
        EXPECT_EQ(crowd_get(&c, any_size(&c.d) / 8 + 1), 1);
        crowd_thin(&c, 4);
    }
    galloc_stats s = stats_of(c.pool);
    void *other = NULL;
    printf("%s: held %zu MiB, then %zu MiB; the slowest call %.2f ms\n", what, held >> 20, s.reserved.current >> 20,
           c.slowest_served);
    EXPECT(s.reserved.current < held / 2);
    EXPECT_EQ(s.driver.event_synchronize + s.driver.stream_synchronize + s.driver.host_free, 0);
    OK(cudaMalloc(&other, held / 2));
    OK(cudaFree(other));
    crowd_close(&c);
    empty_the_card();
}

TEST(idle_memory_goes_back_by_age) { collected("gc_age:20ms", "gc_age:20ms"); }
TEST(idle_memory_goes_back_by_threshold) { collected("memory_limit:800M,gc_threshold:0.3", "gc_threshold:0.3"); }

/* The program has a cache of its own, which it gives up when asked. */
typedef struct cache {
    void *p;
    cudaStream_t stream;
    int asked;
} cache;

static int give_up_cache(const galloc_report *report, void *user)
{
    cache *own = (cache *)user;
    own->asked++;
    expect_adds_up(report);
    if (!own->p) return 0;
    OK(galloc_free(own->p, own->stream));
    own->p = NULL;
    return 1;
}

TEST(the_program_gives_up_its_cache_when_asked)
{
    crowd c;
    fill_the_card(mib(LEFT_MIB));
    crowd_open(&c, "");
    cache own = {get(c.pool, mib(512), c.streams[0]), c.streams[0], 0};
    galloc_callbacks calls = galloc_callbacks();
    calls.on_oom = give_up_cache;
    calls.user = &own;
    OK(galloc_pool_set_callbacks(c.pool, &calls));
    EXPECT_EQ(crowd_get(&c, mib(700)), 1);
    EXPECT_EQ(own.asked, 1);
    EXPECT(own.p == NULL);
    OK(galloc_pool_set_callbacks(c.pool, NULL));
    crowd_close(&c);
    empty_the_card();
}

int main(int argc, char **argv)
{
    if (argc > 1) seconds = atoi(argv[1]);
    int status = work_start();
    return status ? status : test_main(1, argv);
}
