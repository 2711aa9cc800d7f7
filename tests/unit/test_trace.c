/* test_trace.c - the setting trace: what its rows say, when they are in the file, and which files it may write.
   checks/check_trace.sh replays such logs. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>

#include "setup.h"

#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>

#define HEAD "Thread,Time,Action,Pointer,Size,Stream,Pool,More\n"

enum { LOSS = 64 << 10 }; /* bytes that a crash may lose */

/* ---- files ------------------------------------------------------------------------------------------------------- */

static char folder[64], path[128], setting[200];

/* A folder for the log, which is named by GALLOC_CONF from now on. */
static void log_to(const char *name)
{
    strcpy(folder, "/tmp/galloc_trace.XXXXXX");
    EXPECT(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(setting, sizeof setting, "trace:%s", path);
    setenv("GALLOC_CONF", setting, 1);
}

static void log_ends(void)
{
    unsetenv("GALLOC_CONF");
    unlink(path);
    EXPECT_EQ(rmdir(folder), 0);
}

static size_t rows_in(const char *name)
{
    char *text = text_in(name);
    size_t n = 0;
    for (const char *at = text; (at = strchr(at, '\n')) != NULL; at++) n++;
    free(text);
    return n ? n - 1 : 0;
}

/* A row as galloc_annotate brings it into the file, without thread and time; the next one at each call, NULL at the
   end. */
static char *log_rows;
static size_t log_at;
static unsigned row_thread;
static double row_time;

static void log_begin(void)
{
    free(log_rows);
    OK(galloc_annotate("now"));
    log_rows = text_in(path);
    EXPECT(!strncmp(log_rows, HEAD, strlen(HEAD)));
    log_at = strlen(HEAD);
    row_time = 0;
}

static const char *log_next(void)
{
    char *row = log_rows + log_at, *end = strchr(row, '\n');
    double before = row_time;
    int n = 0;
    if (!end) return NULL;
    *end = 0;
    log_at = (size_t)(end - log_rows) + 1;
    EXPECT_EQ(sscanf(row, "%u,%lf,%n", &row_thread, &row_time, &n), 2);
    EXPECT(n > 0 && row_time >= before && row_thread > 0);
    return row + n;
}

__attribute__((format(printf, 1, 2))) static void expect_row(const char *format, ...)
{
    char expected[400];
    const char *row = log_next();
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(expected, sizeof expected, format, arguments);
    va_end(arguments);
    if (EXPECT(row) && !EXPECT(!strcmp(row, expected))) printf("    \"%s\"\n    \"%s\" is expected\n", row, expected);
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

TEST(rows_say_what_was_called)
{
    cudaStream_t a, b, c, several[3];
    galloc_request request = {0};
    galloc_pool *pool;
    unsigned long long i, j, k;
    void *p, *q;
    begin();
    log_to("log.csv");
    pool = pool_new(NULL);
    a = stream_new(), b = stream_new(), c = stream_new();
    i = stream_id(a), j = stream_id(b), k = stream_id(c);
    p = get(pool, 1000, a);
    q = get(pool, 1, NULL);
    OK(galloc_free(p, b));
    OK(galloc_free(q, NULL));
    log_begin();
    expect_row("allocate,%p,1000,%llu,1,", p, i);
    expect_row("allocate,%p,1,0,1,", q);
    expect_row("free,%p,1000,%llu,1,", p, j);
    expect_row("free,%p,1,0,1,", q);
    EXPECT(!log_next());

    request.bytes = 5000;
    request.alignment = 8192;
    request.lifetime = GALLOC_LIFETIME_LONG;
    request.tag = UINT32_MAX;
    request.stream = c;
    request.pool = pool;
    OK(galloc_alloc(&p, &request));
    OK(galloc_record_stream(p, a));
    several[0] = c, several[1] = b, several[2] = a;
    OK(galloc_free_after(p, several, 3));
    log_begin();
    for (int n = 0; n < 4; n++) (void)log_next();
    expect_row("allocate,%p,5000,%llu,1,align=8192 long tag=4294967295", p, k);
    expect_row("free,%p,5000,%llu,1,after=%llu+%llu recorded=%llu", p, i, j, k, i);
    EXPECT(!log_next());
    stream_end(a), stream_end(b), stream_end(c);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* A word names 16 streams at most. */
TEST(a_row_has_room_for_its_words)
{
    cudaStream_t streams[40];
    char expected[400] = "after=";
    galloc_pool *pool;
    const char *row;
    void *p;
    begin();
    log_to("log.csv");
    pool = pool_new(NULL);
    for (int i = 0; i < 40; i++) streams[i] = stream_new();
    for (int i = 38; i > 38 - 16; i--)
        sprintf(expected + strlen(expected), "%s%llu", i < 38 ? "+" : "", stream_id(streams[i]));
    strcat(expected, " recorded=");
    for (int i = 39; i > 39 - 16; i--)
        sprintf(expected + strlen(expected), "%s%llu", i < 39 ? "+" : "", stream_id(streams[i]));
    p = get(pool, 1000, streams[0]);
    for (int i = 0; i < 40; i++) OK(galloc_record_stream(p, streams[i]));
    OK(galloc_free_after(p, streams, 40));
    log_begin();
    (void)log_next();
    row = log_next();
    if (!EXPECT(row && strstr(row, ",1,after=") && !strcmp(strstr(row, "after="), expected)))
        printf("    %s\n    %s\n", row, expected);
    for (int i = 0; i < 40; i++) stream_end(streams[i]);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

TEST(a_resize_is_two_rows_at_one_address)
{
    cudaStream_t a, b;
    galloc_pool *pool;
    unsigned long long j;
    void *p;
    begin();
    log_to("log.csv");
    pool = pool_new(NULL);
    a = stream_new(), b = stream_new();
    j = stream_id(b);
    p = get_growable(pool, MIB(3), MIB(64), a);
    OK(galloc_resize(p, MIB(40), b));
    OK(galloc_resize(p, 100, b));
    EXPECT_EQ(galloc_resize(p, GIB(100) + 100, b), cudaErrorMemoryAllocation);
    EXPECT_EQ(galloc_resize(p, (size_t)1 << 56, b), cudaErrorNotSupported); /* no row: it was not tried */
    OK(galloc_free(p, b));
    log_begin();
    expect_row("allocate,%p,%zu,%llu,1,room=%zu", p, MIB(3), stream_id(a), MIB(64));
    expect_row("free,%p,%zu,%llu,1,resize", p, MIB(3), j);
    expect_row("allocate,%p,%zu,%llu,1,resize", p, MIB(40), j);
    expect_row("free,%p,%zu,%llu,1,resize", p, MIB(40), j);
    expect_row("allocate,%p,100,%llu,1,resize", p, j);
    expect_row("allocate failure,0x0,%zu,%llu,1,", GIB(100), j);
    expect_row("free,%p,100,%llu,1,", p, j);
    EXPECT(!log_next());
    stream_end(a), stream_end(b);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* So a replay records them before the resize, too, whose bytes cut off they may use. */
TEST(a_resize_names_the_streams_recorded_before)
{
    begin();
    log_to("log.csv");
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new(), t = stream_new(), u = stream_new();
    unsigned long long i = stream_id(s), j = stream_id(t), k = stream_id(u);
    void *p = get(pool, 9000, s);
    OK(galloc_record_stream(p, t));
    OK(galloc_resize(p, 5000, s));
    OK(galloc_record_stream(p, u));
    OK(galloc_resize(p, 4000, s));
    OK(galloc_free(p, s));
    log_begin();
    expect_row("allocate,%p,9000,%llu,1,", p, i);
    expect_row("free,%p,9000,%llu,1,resize", p, i);
    expect_row("allocate,%p,5000,%llu,1,resize recorded=%llu", p, i, j);
    expect_row("free,%p,5000,%llu,1,resize", p, i);
    expect_row("allocate,%p,4000,%llu,1,resize recorded=%llu+%llu", p, i, k, j);
    expect_row("free,%p,4000,%llu,1,recorded=%llu+%llu", p, i, k, j);
    EXPECT(!log_next());
    stream_end(s), stream_end(t), stream_end(u);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* A room in the log is the one asked for: with a guard, too, and not rounded. */
TEST(rows_have_the_room_of_the_request)
{
    begin();
    log_to("log.csv");
    galloc_config config = galloc_config_default();
    config.debug = GALLOC_DEBUG_GUARDS;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    void *p = get_growable(pool, 1000, MIB(4) - 100, s), *q = get_growable(pool, MIB(3), 1000, s);
    OK(galloc_free(p, s));
    OK(galloc_free(q, s));
    log_begin();
    expect_row("allocate,%p,1000,%llu,1,room=%zu", p, stream_id(s), MIB(4) - 100);
    expect_row("allocate,%p,%zu,%llu,1,room=%zu", q, MIB(3), stream_id(s), MIB(3));
    stream_end(s);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* A log is there to be replayed with other settings, so it has what was asked for, whatever came of it. */
TEST(rows_of_requests_have_the_same_words_with_all_settings)
{
    static const char *const conf[] = {"", "expandable_segments:False", "like:pytorch", "backend:cudaMalloc",
                                       "backend:cudaMallocAsync"};
    for (size_t i = 0; i < sizeof conf / sizeof *conf; i++) {
        galloc_config config = galloc_config_default();
        galloc_request request = {0};
        void *p, *q;
        begin();
        log_to("log.csv");
        OK(galloc_config_parse(&config, conf[i], NULL, 0));
        request.pool = pool_new(&config);
        request.bytes = 1000;
        request.lifetime = GALLOC_LIFETIME_LONG;
        OK(galloc_alloc(&p, &request));
        OK(galloc_free(p, 0));
        request.max_bytes = MIB(8);
        request.alignment = MIB(4);
        OK(galloc_alloc(&q, &request));
        OK(galloc_free(q, 0));
        log_begin();
        expect_row("allocate,%p,1000,0,1,long", p);
        (void)log_next();
        expect_row("allocate,%p,1000,0,1,room=%zu align=%zu long", q, MIB(8), MIB(4));
        pool_end(request.pool);
        free(log_rows), log_rows = NULL;
        log_ends();
        finish();
    }
}

/* With another backend than pages no block begins at a page's boundary by itself, also if it has room. */
TEST(a_row_has_each_alignment_that_a_backend_would_not_give)
{
    static const char *const conf[] = {"", "backend:cudaMalloc", "backend:cudaMallocAsync"};
    for (size_t i = 0; i < sizeof conf / sizeof *conf; i++) {
        galloc_config config = galloc_config_default();
        galloc_request request = {0};
        void *p;
        begin();
        log_to("log.csv");
        OK(galloc_config_parse(&config, conf[i], NULL, 0));
        request.pool = pool_new(&config);
        request.bytes = 1000;
        request.max_bytes = MIB(8);
        request.alignment = MIB(1);
        OK(galloc_alloc(&p, &request));
        OK(galloc_free(p, 0));
        log_begin();
        expect_row("allocate,%p,1000,0,1,room=%zu%s", p, MIB(8), i ? " align=1048576" : "");
        pool_end(request.pool);
        free(log_rows), log_rows = NULL;
        log_ends();
        finish();
    }
}

/* Each kind of request that fails has a row. */
TEST(rows_of_all_requests_that_fail)
{
    begin();
    log_to("log.csv");
    galloc_pool *pool = pool_limited(MIB(64));
    cudaStream_t s = stream_new();
    const char *row;
    int rows = 0;
    void *p = get(pool, MIB(40), s);
    for (int kind = 0; kind < RUN_OUT_KINDS; kind++) ask_in_vain(pool, kind, MIB(40), s);
    log_begin();
    while ((row = log_next()) != NULL) rows += !strncmp(row, "allocate failure,", 17);
    EXPECT_EQ(rows, RUN_OUT_KINDS);
    OK(galloc_free(p, s));
    stream_end(s);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

TEST(rows_of_waits_captures_and_requests_that_fail)
{
    galloc_pool *pool;
    cudaStream_t a, b;
    cudaGraph_t graph = NULL;
    void *p, *q, *first, *none;
    begin_still();
    log_to("log.csv");
    pool = pool_limited(MIB(64));
    a = stream_new(), b = stream_new();
    OK(galloc_free(get(pool, MIB(1), b), b));
    p = get_used(pool, MIB(60), a, 1);
    OK(galloc_free(p, a));
    OK(galloc_free(get(pool, MIB(1), a), a));
    q = get(pool, MIB(60), b);
    EXPECT_EQ(stats_of(pool).waits, 1);
    log_begin();
    for (int n = 0; n < 6; n++) (void)log_next();
    expect_row("allocate,%p,%zu,%llu,1,waits=1", q, MIB(60), stream_id(b));
    EXPECT(!log_next());
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(20), a), cudaErrorMemoryAllocation);
    OK(galloc_free(q, b));
    sim_run(-1);
    OK(galloc_pool_trim(pool, 0, NULL));
    first = q;
    q = get(pool, MIB(4), b);
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
    p = get(pool, MIB(4), a);
    EXPECT_EQ(galloc_pool_malloc(pool, &none, GIB(1), a), cudaErrorMemoryAllocation);
    OK(galloc_free(p, a));
    OK(galloc_free(q, a)); /* who used it before is unknown in the capture, and no stream of that name exists */
    OK(cudaStreamEndCapture(a, &graph));
    OK(cudaGraphDestroy(graph));
    log_begin();
    for (int n = 0; n < 7; n++) (void)log_next();
    expect_row("allocate failure,0x0,%zu,%llu,1,", MIB(20), stream_id(a));
    expect_row("free,%p,%zu,%llu,1,", first, MIB(60), stream_id(b));
    expect_row("allocate,%p,%zu,%llu,1,", q, MIB(4), stream_id(b));
    const char *row = log_next();
    EXPECT(row && !strncmp(row, "allocate,0x", 11) && strstr(row, ",1,capture="));
    expect_row("allocate failure,0x0,%zu,%llu,1,%s", GIB(1), (unsigned long long)(uintptr_t)a, strstr(row, "capture="));
    row = log_next();
    EXPECT(row && !strncmp(row, "free,0x", 7) && strstr(row, ",1,capture="));
    row = log_next();
    EXPECT(row && !strncmp(row, "free,0x", 7) && strstr(row, ",1,capture=") && !strchr(strstr(row, "capture="), ' '));
    EXPECT(!log_next());
    OK(galloc_pool_trim(pool, 0, NULL));
    stream_end(a), stream_end(b);
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* A captured per-thread default stream has a number that is no other stream's id, in each context another one. */
TEST(a_captured_per_thread_stream_has_a_number_of_its_own)
{
    unsigned long long numbers[2] = {0, 0};
    CUcontext own = NULL, other = NULL;
    begin_still();
    log_to("log.csv");
    galloc_pool *pool = pool_limited(MIB(64));
    OK(cuCtxGetCurrent(&own));
    OK(cuCtxCreate(&other, NULL, 0, 0));
    for (int i = 0; i < 2; i++) {
        cudaGraph_t graph = NULL;
        OK(cuCtxSetCurrent(i ? other : own));
        OK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal));
        void *p = get(pool, MIB(4), cudaStreamPerThread);
        OK(galloc_free(p, cudaStreamPerThread));
        OK(cudaStreamEndCapture(cudaStreamPerThread, &graph));
        OK(cudaGraphDestroy(graph));
    }
    log_begin();
    for (int i = 0; i < 4; i++) {
        const char *row = log_next();
        unsigned long long number = 0;
        EXPECT(row && sscanf(row, i % 2 ? "free,%*[^,],%*[^,],%llu" : "allocate,%*[^,],%*[^,],%llu", &number) == 1);
        EXPECT(number >> 63);
        if (i % 2) EXPECT(number == numbers[i / 2]);
        numbers[i / 2] = number;
    }
    EXPECT(numbers[0] != numbers[1]);
    OK(cuCtxSetCurrent(own));
    OK(cuCtxDestroy(other));
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

static void *capture_per_thread(void *pool)
{
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeThreadLocal));
    OK(galloc_free(get(pool, MIB(4), cudaStreamPerThread), cudaStreamPerThread));
    OK(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    OK(cudaGraphDestroy(graph));
    return NULL;
}

TEST(captured_per_thread_streams_of_threads_have_numbers_of_their_own)
{
    enum { THREADS = 40 };
    unsigned long long number[2 * THREADS] = {0};
    begin_still();
    log_to("log.csv");
    galloc_pool *pool = pool_limited(MIB(64));
    for (int i = 0; i < THREADS; i++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, capture_per_thread, pool)) abort();
        pthread_join(thread, NULL);
    }
    log_begin();
    for (int i = 0; i < 2 * THREADS; i++) {
        const char *row = log_next();
        EXPECT(row && sscanf(row, i % 2 ? "free,%*[^,],%*[^,],%llu" : "allocate,%*[^,],%*[^,],%llu", &number[i]) == 1);
    }
    for (int i = 0; i < THREADS; i++) {
        EXPECT(number[2 * i] == number[2 * i + 1]);
        for (int j = 0; j < i; j++) EXPECT(number[2 * i] != number[2 * j]);
    }
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* Pools with one name share a file, in which they have numbers; devices have files of their own where the name has %d.
   A pool that ends leaves its rows. */
TEST(pools_share_a_file_of_one_name)
{
    char second[128], name[60];
    galloc_pool *one, *other, *there;
    galloc_config config = galloc_config_default();
    void *p, *q;
    begin_with_devices(2, sim_defaults().pace);
    snprintf(name, sizeof name, "%ld-0.csv", (long)getpid());
    log_to(name);
    snprintf(setting, sizeof setting, "trace:%s/%%p-%%d.csv,memory_limit:wrong", folder);
    setenv("GALLOC_CONF", setting, 1);
    snprintf(second, sizeof second, "%s/%ld-1.csv", folder, (long)getpid());
    one = pool_new(NULL);
    other = pool_new(NULL);
    config.device = 1;
    there = pool_new(&config);
    p = get(one, 100, NULL);
    q = get(other, 200, NULL);
    OK(galloc_free(p, NULL));
    OK(galloc_free(q, NULL));
    pool_end(one);
    EXPECT_EQ(rows_in(path), 4);
    one = pool_new(NULL);
    OK(galloc_free(get(one, 300, NULL), NULL));
    log_begin();
    expect_row("allocate,%p,100,0,1,", p);
    expect_row("allocate,%p,200,0,2,", q);
    expect_row("free,%p,100,0,1,", p);
    expect_row("free,%p,200,0,2,", q);
    EXPECT(strstr(log_next(), ",300,0,3,"));
    EXPECT_EQ(bytes_in(second), strlen(HEAD));
    OK(cudaSetDevice(1));
    OK(galloc_free(get(there, 1, NULL), NULL));
    OK(cudaSetDevice(0));
    pool_end(one);
    pool_end(other);
    pool_end(there);
    EXPECT_EQ(rows_in(second), 2);
    EXPECT_EQ(rows_in(path), 6);
    unlink(second);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

/* ---- when rows are in the file ----------------------------------------------------------------------------------- */

static void pairs(int n, size_t bytes)
{
    void *p;
    while (n-- > 0) {
        OK(galloc_malloc(&p, bytes, NULL));
        OK(galloc_free(p, NULL));
    }
}

TEST(text_goes_to_the_file_as_it_grows_and_when_it_is_asked_for)
{
    char state[128];
    galloc_pool *pool;
    size_t before;
    begin();
    log_to("log.csv");
    pairs(1, 1000);
    EXPECT_EQ(bytes_in(path), 0);
    pairs(2000, 1000); /* some 180 KB */
    before = bytes_in(path);
    EXPECT(before > LOSS);
    OK(galloc_annotate("now"));
    EXPECT(bytes_in(path) > before && bytes_in(path) - before <= LOSS);
    EXPECT_EQ(rows_in(path), 4002);
    pairs(1, 1000);
    EXPECT_EQ(rows_in(path), 4002);
    snprintf(state, sizeof state, "%s/state.json", folder);
    OK(galloc_snapshot_save(NULL, state));
    unlink(state);
    EXPECT_EQ(rows_in(path), 4004);
    pool = pool_new(NULL);
    pairs(1, 1000);
    pool_end(pool);
    EXPECT_EQ(rows_in(path), 4006);
    pairs(1, 1000);
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 4008);
    pairs(3, 1000); /* the next heap has a log of its own, in place of it */
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 6);
    log_ends();
    finish();
}

/* Rows of a call that is in the log function are written as soon as no room is left for more. */
static void pairs_in_the_log(void) { pairs(2000, 1000); }

TEST(no_row_is_lost_where_nothing_can_be_written_at_the_end_of_a_call)
{
    begin();
    log_to("log.csv");
    pairs(1, 1000);
    log_hook = pairs_in_the_log;
    EXPECT_EQ(galloc_malloc(NULL, 1, NULL), cudaErrorInvalidValue);
    log_hook = NULL;
    EXPECT(bytes_in(path) > LOSS);
    OK(galloc_annotate("now"));
    EXPECT_EQ(rows_in(path), 4002);
    OK(galloc_shutdown());
    log_ends();
    finish();
}

/* Another thread allocates and frees while the log is written. */
static struct {
    int armed; /* the so many-th write waits for the other thread; 0: none does */
    int rounds; /* for so long at most; 0: for ever */
    int empty;  /* writes of no bytes count in place of the others */
    int now, done;
} written;

size_t fwrite(const void *data, size_t size, size_t n, FILE *file)
{
    size_t (*next)(const void *, size_t, size_t, FILE *) = NULL;
    *(void **)(void *)&next = dlsym(RTLD_NEXT, "fwrite");
    int counts = written.armed > 0 && (n == 0) == written.empty;
    if (counts && __atomic_sub_fetch(&written.armed, 1, __ATOMIC_ACQ_REL) == 0) {
        __atomic_store_n(&written.now, 1, __ATOMIC_RELEASE);
        for (int i = written.rounds; !__atomic_load_n(&written.done, __ATOMIC_ACQUIRE) && --i; usleep(100)) {}
    }
    return next(data, size, n, file);
}

static void *pair_meanwhile(void *turns)
{
    while (!__atomic_load_n(&written.now, __ATOMIC_ACQUIRE)) usleep(100);
    pairs(*(int *)turns, 1000);
    __atomic_store_n(&written.done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* They fit, or are more than both halves have room for, so that the other thread has to wait. */
TEST(rows_that_come_while_the_log_is_written_are_written_too)
{
    static int turns[] = {1, 3000};
    for (int i = 0; i < 2; i++) {
        pthread_t thread;
        begin();
        log_to("log.csv");
        pairs(1, 1000);
        memset(&written, 0, sizeof written);
        written.rounds = i ? 500 : 0;
        EXPECT_EQ(pthread_create(&thread, NULL, pair_meanwhile, &turns[i]), 0);
        __atomic_store_n(&written.armed, 1, __ATOMIC_RELEASE);
        OK(galloc_annotate("now"));
        EXPECT(written.now);
        __atomic_store_n(&written.now, 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        OK(galloc_annotate("now"));
        EXPECT_EQ(rows_in(path), 2 + 2 * (size_t)turns[i]);
        OK(galloc_shutdown());
        log_ends();
        finish();
    }
}

/* Nothing is there to be written. Another thread fills more than a half of the log in the middle of that. */
TEST(rows_that_come_while_an_empty_log_is_written_are_written_too)
{
    static int turns = 450;
    for (int nth = 1; nth < 3; nth++) {
        pthread_t thread;
        begin();
        log_to("log.csv");
        pairs(1, 1000);
        OK(galloc_annotate("now"));
        memset(&written, 0, sizeof written);
        written.rounds = 500;
        written.empty = 1;
        EXPECT_EQ(pthread_create(&thread, NULL, pair_meanwhile, &turns), 0);
        __atomic_store_n(&written.armed, nth, __ATOMIC_RELEASE);
        OK(galloc_annotate("now"));
        __atomic_store_n(&written.now, 1, __ATOMIC_RELEASE);
        EXPECT_EQ(pthread_join(thread, NULL), 0);
        OK(galloc_annotate("now"));
        EXPECT_EQ(rows_in(path), 2 + 2 * (size_t)turns);
        OK(galloc_shutdown());
        log_ends();
        finish();
    }
}

/* Both threads are in the log function, so that the rows stay where they are. The first one finds both halves full, and
   while it writes the second one of them, the other thread fills the first one but for less than a row. */
static struct {
    galloc_pool *pool;
    pthread_t thread;
    void *rest;
    size_t pair, rows; /* the bytes of two rows */
} filler;

enum { HALF = LOSS / 2, TURNS = 1000 };

static void fill_a_half(void)
{
    size_t left = HALF, pair = filler.pair, row = (pair + strlen("allocate") - strlen("free")) / 2;
    __atomic_store_n(&written.armed, 2, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&written.now, __ATOMIC_ACQUIRE)) usleep(100);
    for (filler.rows = 2; left >= pair; left -= pair, filler.rows += 2)
        OK(galloc_free(get(filler.pool, 1, NULL), NULL));
    if (left >= row) filler.rest = get(filler.pool, 1, NULL);
    __atomic_store_n(&written.done, 1, __ATOMIC_RELEASE);
}

static void fill_both_halves(void)
{
    if (pthread_equal(pthread_self(), filler.thread)) fill_a_half();
    else pairs(TURNS, MIB(1)); /* each of its rows is longer than those of the other thread */
}

static void *fill_in_the_log(void *arg)
{
    size_t before;
    OK(galloc_annotate("now"));
    before = bytes_in(path);
    OK(galloc_free(get(filler.pool, 1, NULL), NULL));
    OK(galloc_annotate("now"));
    filler.pair = bytes_in(path) - before;
    filler.thread = pthread_self();
    EXPECT_EQ(galloc_malloc(NULL, 1, NULL), cudaErrorInvalidValue);
    return arg;
}

TEST(a_row_is_whole_though_another_thread_fills_the_log_meanwhile)
{
    pthread_t thread;
    begin();
    log_to("log.csv");
    memset(&written, 0, sizeof written);
    memset(&filler, 0, sizeof filler);
    filler.pool = pool_new(NULL);
    log_hook = fill_both_halves;
    EXPECT_EQ(pthread_create(&thread, NULL, fill_in_the_log, NULL), 0);
    while (!__atomic_load_n(&written.armed, __ATOMIC_ACQUIRE)) usleep(100);
    EXPECT_EQ(galloc_malloc(NULL, 1, NULL), cudaErrorInvalidValue);
    EXPECT(written.now);
    __atomic_store_n(&written.now, 1, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    log_hook = NULL;
    if (filler.rest) OK(galloc_free(filler.rest, NULL));
    if (filler.rest) filler.rows += 2;
    pool_end(filler.pool);
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 2 * TURNS + filler.rows);
    log_ends();
    finish();
}

static int open_files(void)
{
    DIR *all = opendir("/proc/self/fd");
    int n = 0;
    while (all && readdir(all)) n++;
    if (all) closedir(all);
    return n;
}

TEST(shutdown_closes_the_log)
{
    int before = open_files();
    for (int i = 0; i < 3; i++) {
        begin();
        log_to("log.csv");
        void *p = NULL;
        OK(galloc_malloc(&p, 1000, NULL));
        OK(galloc_free(p, NULL));
        OK(galloc_shutdown());
        log_ends();
        finish();
    }
    EXPECT_EQ(open_files(), before);
}

/* ---- ends of the process ----------------------------------------------------------------------------------------- */

static void *kept;
static int in_child, pairs_in_child;

/* In the log function, where no call writes the log at its end. */
static void die_in_the_log(void)
{
    pairs(pairs_in_child, 1000);
    raise(SIGKILL);
}

static void leave_in_the_log(void)
{
    pairs(pairs_in_child, 1000);
    exit(0);
}

/* Runs after galloc's own destructor. */
__attribute__((destructor(101))) static void free_late(void)
{
    if (in_child && kept) (void)galloc_free(kept, NULL);
}

/* In a process of its own: so many pairs, and then the end that the variable names. */
__attribute__((constructor)) static void be_the_child(void)
{
    const char *what = getenv("TRACE_CHILD");
    sim_options options = sim_defaults();
    char how[20];
    int n;
    if (!what || sscanf(what, "%d,%19s", &n, how) != 2) return;
    in_child = 1;
    options.devices = 2;
    if (sim_start(&options)) _exit(2);
    pairs_in_child = n;
    if (!strcmp(how, "inside") || !strcmp(how, "leave")) {
        log_hook = strcmp(how, "leave") ? die_in_the_log : leave_in_the_log;
        (void)galloc_malloc(NULL, 1, NULL);
    }
    pairs(n, 1000);
    if (!strcmp(how, "both")) {
        cudaSetDevice(1);
        pairs(n, 1000);
    }
    if (!strcmp(how, "late") && galloc_malloc(&kept, 100, NULL)) _exit(2);
    if (!strcmp(how, "kill")) raise(SIGKILL);
    if (!strcmp(how, "held")) {
        inside_hold_trace();
        alarm(5);
    }
    if (!strcmp(how, "abort")) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        abort();
    }
    exit(0);
}

/* Returns how it ended, as waitpid says it. */
static int run_child(int n, const char *how)
{
    char what[40];
    int status = 0;
    pid_t child;
    snprintf(what, sizeof what, "%d,%s", n, how);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        setenv("TRACE_CHILD", what, 1);
        execl("/proc/self/exe", "test_trace", (char *)NULL);
        _exit(3);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    return status;
}

TEST(a_crash_loses_no_more_than_64_kib)
{
    static const int n[] = {10, 500, 800, 1000, 3000};
    begin();
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        size_t all, rows, bytes;
        log_to("log.csv");
        (void)run_child(n[i], "exit");
        all = bytes_in(path);
        EXPECT_EQ(rows_in(path), 2 * n[i]);
        (void)run_child(n[i], i % 2 ? "kill" : "abort");
        rows = rows_in(path);
        bytes = bytes_in(path);
        EXPECT(rows <= 2 * (size_t)n[i]);
        EXPECT(all <= bytes + LOSS);
        EXPECT(all <= LOSS || rows > 0);
        (void)run_child(n[i], "inside");
        EXPECT(all <= bytes_in(path) + LOSS);
        log_ends();
    }
    finish();
}

TEST(a_process_that_ends_leaves_all_rows)
{
    char *text;
    begin();
    log_to("log.csv");
    (void)run_child(7, "exit");
    EXPECT_EQ(rows_in(path), 14);
    (void)run_child(500, "leave"); /* both halves of the text have rows */
    EXPECT_EQ(rows_in(path), 1000);
    (void)run_child(7, "late");
    EXPECT_EQ(rows_in(path), 16); /* a static destructor has freed a block */
    text = text_in(path);
    EXPECT(strstr(text, ",100,0,1,\n"));
    free(text);
    log_ends();
    finish();
}

TEST(a_process_that_ends_leaves_all_rows_of_each_log)
{
    begin();
    log_to("%d.csv");
    (void)run_child(7, "both");
    for (int device = 0; device < 2; device++) {
        snprintf(path, sizeof path, "%s/%d.csv", folder, device);
        EXPECT_EQ(rows_in(path), 14);
        if (device == 0) unlink(path);
    }
    log_ends();
    finish();
}

/* The thread that adds rows has died, as threads do when a process ends on Windows. */
TEST(a_process_ends_though_a_dead_thread_holds_the_log)
{
    begin();
    log_to("log.csv");
    int status = run_child(7, "held");
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0); /* no alarm */
    log_ends();
    finish();
}

TEST(a_child_of_fork_writes_nothing)
{
    int status = 0;
    void *p;
    pid_t child;
    begin();
    log_to("log.csv");
    pairs(300, 1000);
    OK(galloc_malloc(&p, 1000, NULL));
    EXPECT_EQ(bytes_in(path), 0);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        (void)galloc_free(p, NULL);
        (void)galloc_annotate("now");
        (void)galloc_shutdown();
        exit(0);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT_EQ(bytes_in(path), 0);
    OK(galloc_free(p, NULL));
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 602);
    log_ends();
    finish();
}

static pid_t forked = -1;

static void fork_with_rows_due(void)
{
    if (forked != -1) return;
    pairs(200, 1000); /* the first half of the buffer is full: the next call writes it */
    fflush(stdout);
    forked = fork();
}

/* Nor does it write the rows that its parent was about to write. */
TEST(a_child_of_fork_writes_no_rows_that_are_due)
{
    int status = 0;
    void *p;
    begin();
    log_to("log.csv");
    pairs(300, 1000);
    OK(galloc_malloc(&p, 1000, NULL));
    log_hook = fork_with_rows_due;
    EXPECT_EQ(galloc_free((char *)p + 512, NULL), cudaErrorInvalidDevicePointer);
    if (!forked) {
        (void)galloc_annotate("now");
        exit(0);
    }
    EXPECT(forked > 0 && waitpid(forked, &status, 0) == forked);
    log_hook = NULL;
    OK(galloc_free(p, NULL));
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 1002);
    log_ends();
    finish();
}

/* ---- files that cannot be ---------------------------------------------------------------------------------------- */

TEST(a_full_disk_ends_the_log_and_nothing_else)
{
    struct rlimit limit, little;
    void (*before)(int);
    void *p;
    begin();
    log_to("log.csv");
    if (!getrlimit(RLIMIT_FSIZE, &limit)) {
        little = limit;
        little.rlim_cur = 100000;
        before = signal(SIGXFSZ, SIG_IGN);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
        OK(galloc_malloc(&p, 1000, NULL));
        EXPECT_EQ(galloc_free((char *)p + 512, NULL), cudaErrorInvalidDevicePointer);
        EXPECT_EQ(log_lines, 1);
        pairs(4000, 1000);
        EXPECT_EQ(log_lines, 2);
        EXPECT(strstr(log_text, "trace: "));
        EXPECT(strstr(log_text, path) && strstr(log_text, "the file is too large"));
        EXPECT(strstr(galloc_last_message(), "lies inside the block")); /* that of the last error */
        EXPECT(bytes_in(path) <= 100000);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        signal(SIGXFSZ, before);
        before = NULL;
        pairs(4000, 1000);
        EXPECT(bytes_in(path) <= 100000);
        OK(galloc_free(p, NULL));
        OK(galloc_shutdown());
        EXPECT_EQ(log_lines, 2);
    }
    log_ends();
    finish();
}

static long trace_lines;

/* Makes more rows than the file may have, within the first line of the log. */
static void fill_the_file(void)
{
    trace_lines += !strncmp(log_text, "trace: ", 7);
    if (log_lines == 1) pairs(4000, 1000);
}

/* So it is where that comes up within the log function, which can be told nothing then. */
TEST(a_full_disk_is_told_of_after_the_log_function_has_returned)
{
    struct rlimit limit, little;
    void (*before)(int);
    void *p;
    begin();
    log_to("log.csv");
    if (EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0)) {
        little = limit;
        little.rlim_cur = 100000;
        before = signal(SIGXFSZ, SIG_IGN);
        OK(galloc_malloc(&p, 1000, NULL));
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
        trace_lines = 0;
        log_hook = fill_the_file;
        EXPECT_EQ(galloc_free((char *)p + 512, NULL), cudaErrorInvalidDevicePointer);
        pairs(4000, 1000);
        log_hook = NULL;
        EXPECT_EQ(trace_lines, 1);
        EXPECT(strstr(log_text, path) && strstr(log_text, "the file is too large"));
        EXPECT(bytes_in(path) <= 100000);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        signal(SIGXFSZ, before);
        OK(galloc_free(p, NULL));
        OK(galloc_shutdown());
    }
    log_ends();
    finish();
}

static char lost_files[2][100];
static int lost[2]; /* lines of the log about each of them */

static void count_lost(void)
{
    for (int device = 0; device < 2; device++) lost[device] += strstr(log_text, lost_files[device]) != NULL;
}

/* One call finds out that two logs cannot be written. Each of them has a line. */
TEST(each_log_that_a_full_disk_ends_is_told_of)
{
    struct rlimit limit, little;
    void (*before)(int);
    begin_with_devices(2, SIM_PACE_PROMPT);
    log_to("%d.csv");
    galloc_pool *pool[2];
    galloc_config config = galloc_config_default();
    for (int device = 0; device < 2; device++) {
        config.device = device;
        pool[device] = pool_new(&config);
        snprintf(lost_files[device], sizeof lost_files[device], "%s/%d.csv", folder, device);
        lost[device] = 0;
    }
    if (EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0)) {
        little = limit;
        little.rlim_cur = 0;
        before = signal(SIGXFSZ, SIG_IGN);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &little), 0);
        log_hook = count_lost;
        for (int i = 0; i < 3; i++) {
            for (int device = 0; device < 2; device++) {
                OK(cudaSetDevice(device));
                OK(galloc_free(get(pool[device], 512, NULL), NULL));
            }
            (void)galloc_annotate("now");
        }
        log_hook = NULL;
        for (int device = 0; device < 2; device++) EXPECT_EQ(lost[device], 1);
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
        signal(SIGXFSZ, before);
    }
    for (int device = 0; device < 2; device++) {
        pool_end(pool[device]);
        unlink(lost_files[device]);
    }
    log_ends();
    finish();
}

/* What stands under the name stays, and the program goes on without a log. */
static void expect_no_log(void)
{
    galloc_pool *pool;
    begin();
    setenv("GALLOC_CONF", setting, 1);
    pool = pool_new(NULL);
    EXPECT_EQ(log_lines, 1);
    EXPECT(!strncmp(log_text, "trace: ", 7) && strstr(log_text, folder));
    OK(galloc_free(get(pool, 1000, NULL), NULL));
    pool_end(pool);
    OK(galloc_shutdown());
    finish();
}

TEST(links_pipes_and_folders_stay)
{
    char target[160], found[160];
    struct stat is;
    FILE *file;
    log_to("log.csv");
    snprintf(target, sizeof target, "%s/target", folder);
    for (int exists = 0; exists < 2; exists++) {
        EXPECT_EQ(symlink(target, path), 0);
        if (exists && EXPECT((file = fopen(target, "w")) != NULL)) fclose(file);
        expect_no_log();
        EXPECT(readlink(path, found, sizeof found) > 0);
        EXPECT_EQ(stat(target, &is), exists ? 0 : -1);
        EXPECT_EQ(bytes_in(target), 0);
        unlink(path);
    }
    unlink(target);
    EXPECT_EQ(mkfifo(path, 0600), 0);
    expect_no_log();
    EXPECT(!lstat(path, &is) && S_ISFIFO(is.st_mode));
    unlink(path);
    EXPECT_EQ(mkdir(path, 0700), 0);
    expect_no_log();
    EXPECT_EQ(rmdir(path), 0);
    snprintf(setting, sizeof setting, "trace:%s/nowhere/log.csv", folder);
    expect_no_log();
    EXPECT(strstr(log_text, "cannot be opened: no such folder (errno ") != NULL);
    if (EXPECT((file = fopen(path, "w")) != NULL)) fclose(file);
    snprintf(setting, sizeof setting, "trace:%s/log.csv", path);
    expect_no_log();
    EXPECT(strstr(log_text, "cannot be opened: a part of the path is no folder (errno ") != NULL);
    log_ends();
}

/* Somebody puts a link there after galloc has looked: `remove` is the last call before the file is opened. */
static const char *planted;

int remove(const char *name)
{
    int result = unlink(name);
    if (planted && symlink(planted, name)) return -1;
    return result;
}

TEST(a_link_that_appears_meanwhile_is_not_followed)
{
    char target[160];
    log_to("log.csv");
    snprintf(target, sizeof target, "%s/target", folder);
    planted = target;
    expect_no_log();
    planted = NULL;
    EXPECT_EQ(access(target, F_OK), -1);
    log_ends();
}

TEST(a_plain_file_is_replaced)
{
    FILE *file;
    begin();
    log_to("log.csv");
    if (EXPECT((file = fopen(path, "w")) != NULL)) {
        fputs("older\n", file);
        fclose(file);
    }
    pairs(1, 1000);
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 2);
    EXPECT_EQ(log_lines, 0);
    log_ends();
    finish();
}

TEST(without_a_name_there_is_no_log)
{
    static const char *const none[] = {"trace:", "trace:%s/%%n", "trace:%s/a%%", "log:info",
                                      "snapshot_on_oom:%s/log.csv"};
    galloc_pool *pool;
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        begin();
        log_to("log.csv");
        snprintf(setting, sizeof setting, none[i], folder);
        setenv("GALLOC_CONF", setting, 1);
        pool = pool_new(NULL);
        OK(galloc_free(get(pool, 1000, NULL), NULL));
        pool_end(pool);
        OK(galloc_shutdown());
        EXPECT_EQ(log_lines, 0);
        EXPECT_EQ(access(path, F_OK), -1);
        log_ends();
        finish();
    }
}

TEST(without_host_memory_the_pool_goes_without)
{
    galloc_pool *pool = NULL;
    for (int nth = 1, done = 0; !done; nth++) {
        size_t rows;
        cudaError_t error;
        begin();
        log_to("log.csv");
        sim_fail_malloc(nth, 0);
        error = galloc_pool_create(&pool, NULL);
        done = !sim_failed_mallocs();
        sim_fail_malloc(0, 0);
        if (!error) {
            OK(galloc_free(get(pool, 1000, NULL), NULL));
            pool_end(pool);
            OK(galloc_shutdown());
            rows = rows_in(path);
            EXPECT(rows == 2 || (!done && rows == 0 && strstr(log_text, "trace: no host memory")));
        }
        OK(galloc_shutdown());
        log_ends();
        finish();
        EXPECT(nth < 100);
    }
}

/* ---- with other things ------------------------------------------------------------------------------------------- */

TEST(a_history_may_come_and_go_meanwhile)
{
    galloc_pool *pool;
    begin();
    log_to("log.csv");
    pool = pool_new(NULL);
    for (int i = 0; i < 4; i++) {
        OK(galloc_pool_history(pool, i % 2 ? 0 : 100));
        OK(galloc_free(get(pool, 1000, NULL), NULL));
        OK(galloc_free(get(pool, 1000, NULL), NULL));
        EXPECT_EQ(galloc_pool_check(pool), 0);
    }
    pool_end(pool);
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 16);
    log_ends();
    finish();
}

TEST(rows_of_all_backends)
{
    for (int backend = 0; backend < 3; backend++) {
        galloc_config config = galloc_config_default();
        galloc_pool *pool;
        cudaStream_t a;
        void *p;
        begin();
        log_to("log.csv");
        config.backend = backend;
        pool = pool_new(&config);
        a = stream_new();
        p = get(pool, 1000, a);
        OK(galloc_free(p, a));
        log_begin();
        expect_row("allocate,%p,1000,%llu,1,", p, stream_id(a));
        expect_row("free,%p,1000,%llu,1,", p, stream_id(a));
        EXPECT(!log_next());
        stream_end(a);
        OK(galloc_pool_destroy(pool));
        free(log_rows), log_rows = NULL;
        log_ends();
        finish();
    }
}

/* A reset takes a block, whose address another one gets: its free is in the log before that. */
TEST(a_block_that_a_reset_took_has_a_row_at_last)
{
    galloc_config config = config_fixed();
    galloc_pool *pool;
    void *p, *q;
    begin();
    log_to("log.csv");
    pool = pool_new(&config);
    p = get(pool, MIB(30), NULL);
    OK(cudaDeviceReset());
    q = get(pool, MIB(30), NULL);
    EXPECT(q == p); /* else nothing is tested */
    log_begin();
    expect_row("allocate,%p,%zu,0,1,", p, MIB(30));
    expect_row("free,%p,%zu,0,1,", p, MIB(30));
    expect_row("allocate,%p,%zu,0,1,", q, MIB(30));
    EXPECT(!log_next());
    OK(galloc_free(q, NULL));
    pool_end(pool);
    free(log_rows), log_rows = NULL;
    log_ends();
    finish();
}

static inside_driver driver;
static size_t rows_at_the_free;

static CUresult CUDAAPI free_and_count(CUdeviceptr ptr, CUstream stream)
{
    OK(galloc_annotate("now"));
    rows_at_the_free = rows_in(path);
    return driver.MemFreeAsync(ptr, stream);
}

/* From then on another thread may be given the address, and have a row of it. */
TEST(a_free_has_its_row_before_the_driver_has_the_address)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool;
    cudaStream_t a;
    begin();
    log_to("log.csv");
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    pool = pool_new(&config);
    a = stream_new();
    driver = inside_driver_in_use();
    inside_driver mine = driver;
    mine.MemFreeAsync = free_and_count;
    inside_driver_use(mine);
    OK(galloc_free(get(pool, 1000, a), a));
    inside_driver_use(driver);
    EXPECT_EQ(rows_at_the_free, 2);
    OK(galloc_shutdown() ? cudaSuccess : cudaErrorUnknown); /* the pool is there */
    EXPECT_EQ(rows_in(path), 2);
    stream_end(a);
    OK(galloc_pool_destroy(pool));
    log_ends();
    finish();
}

enum { THREADS = 4, STEPS = 3000 };

static void *pairs_of_a_thread(void *pool)
{
    cudaStream_t stream = stream_new();
    void *blocks[10] = {NULL};
    for (int i = 0; i < STEPS; i++) {
        OK(galloc_free(blocks[i % 10], stream));
        OK(galloc_pool_malloc(pool, &blocks[i % 10], (size_t)(i * 7919) % 100000 + 1, stream));
    }
    for (int i = 0; i < 10; i++) OK(galloc_free(blocks[i], stream));
    stream_end(stream);
    return NULL;
}

/* A free that the driver refuses in stream order is done otherwise, and is one row all the same. */
TEST(a_free_that_the_driver_refuses_is_one_row)
{
    begin();
    log_to("log.csv");
    galloc_config config = galloc_config_default();
    config.backend = GALLOC_BACKEND_CUDA_MALLOC_ASYNC;
    galloc_pool *pool = pool_new(&config);
    cudaStream_t s = stream_new();
    unsigned long long i = stream_id(s);
    void *p = get(pool, 1000, s);
    sim_fail("cuMemFreeAsync", 1, 0, cudaErrorInvalidValue);
    OK(galloc_free(p, s));
    sim_fail_clear();
    EXPECT_EQ(info_of(p).state, GALLOC_STATE_FREE);
    log_begin();
    expect_row("allocate,%p,1000,%llu,1,", p, i);
    expect_row("free,%p,1000,%llu,1,", p, i);
    EXPECT(!log_next());
    free(log_rows), log_rows = NULL;
    stream_end(s);
    OK(galloc_pool_destroy(pool));
    log_ends();
    finish();
}

/* Each row is whole, and each thread's rows are in its order. */
TEST(threads_and_pools_write_one_file)
{
    galloc_pool *pools[2];
    pthread_t threads[THREADS];
    unsigned seen[64] = {0};
    size_t all = 0;
    begin();
    log_to("log.csv");
    pools[0] = pool_new(NULL);
    pools[1] = pool_new(NULL);
    for (int i = 0; i < THREADS; i++)
        EXPECT_EQ(pthread_create(&threads[i], NULL, pairs_of_a_thread, pools[i % 2]), 0);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    pool_end(pools[0]);
    pool_end(pools[1]);
    OK(galloc_shutdown());
    EXPECT_EQ(rows_in(path), 2 * THREADS * STEPS);
    FILE *file = fopen(path, "r");
    char row[200];
    double times[64] = {0};
    EXPECT(file && fgets(row, sizeof row, file));
    while (file && fgets(row, sizeof row, file)) {
        unsigned thread, stream, pool;
        unsigned long long addr, bytes;
        double time;
        char action[20];
        if (!EXPECT_EQ(sscanf(row, "%u,%lf,%19[a-z],0x%llx,%llu,%u,%u,", &thread, &time, action, &addr, &bytes, &stream,
                              &pool), 7) || !EXPECT(thread < 64 && stream < 64 && (pool == 1 || pool == 2))) break;
        EXPECT(!seen[thread] || seen[thread] == stream); /* each thread has used one stream */
        EXPECT(times[thread] <= time);
        seen[thread] = stream;
        times[thread] = time;
        all++;
    }
    if (file) fclose(file);
    EXPECT_EQ(all, 2 * THREADS * STEPS);
    log_ends();
    finish();
}

TEST_MAIN()
