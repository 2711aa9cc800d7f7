/* test_log.c - the messages of calls that fail: the function's name, the cause and the remedy; how much of it is
   logged, where, and what becomes of repeats. */

#include "setup.h"

static uint64_t the_time = 1;
uint64_t inside_clock(void) { return __atomic_load_n(&the_time, __ATOMIC_RELAXED); }

enum { SECOND = 1000000000 };

/* As in a program: GALLOC_CONF is read with the first line, nothing was said before. */
static void begin_logging(const char *conf)
{
    begin();
    if (conf) setenv("GALLOC_CONF", conf, 1);
    inside_log_anew();
}

static void finish_logging(void)
{
    finish();
    unsetenv("GALLOC_CONF");
}

static int says(const char *text)
{
    int found = strstr(galloc_last_message(), text) != NULL;
    if (!found) printf("    \"%s\" is not in: %s\n", text, galloc_last_message());
    return found;
}

static int begins(const char *function)
{
    size_t n = strlen(function);
    int right = !strncmp(galloc_last_message(), function, n) && !strncmp(galloc_last_message() + n, ": ", 2) &&
                !strcmp(galloc_last_message(), log_text);
    if (!right) printf("    %s is not named in: %s, %s\n", function, galloc_last_message(), log_text);
    return right;
}

/* The call fails, and its message begins with the function's name; so does the line that is logged. */
#define NAMED(function, arguments)                                                                                     \
    do {                                                                                                               \
        EXPECT(function arguments != cudaSuccess);                                                                     \
        EXPECT(begins(#function));                                                                                     \
        EXPECT(!strstr(galloc_last_message() + 1, #function));                                                         \
    } while (0)

/* ---- what a message says ----------------------------------------------------------------------------------------- */

TEST(each_message_begins_with_the_function_that_failed)
{
    void *p = NULL, *foreign = &p;
    char small[1];
    galloc_pool *none = NULL;
    galloc_graph *graph = NULL;
    galloc_config config = galloc_config_default();
    galloc_request request = {0};
    galloc_report report;
    cudaStream_t zero[1] = {0};
    begin();
    galloc_pool *pool = pool_new(NULL);
    request.bytes = 1;
    request.alignment = 3;
    memset(&report, 0, sizeof report);
    NAMED(galloc_malloc, (&p, SIZE_MAX, 0));
    NAMED(galloc_malloc_growable, (&p, 1, SIZE_MAX, 0));
    NAMED(galloc_pool_malloc, (pool, &p, SIZE_MAX, 0));
    NAMED(galloc_pool_malloc, (NULL, &p, 1, 0));
    NAMED(galloc_alloc, (&p, &request));
    NAMED(galloc_alloc, (&p, NULL));
    NAMED(galloc_free, (foreign, 0));
    NAMED(galloc_free_after, (foreign, zero, 1));
    NAMED(galloc_resize, (foreign, 1, 0));
    NAMED(galloc_resize, (NULL, 1, 0));
    NAMED(galloc_record_stream, (foreign, 0));
    NAMED(galloc_graph_begin, (&graph, NULL, 0));
    NAMED(galloc_graph_end, (NULL));
    NAMED(galloc_graph_release, (NULL, 0));
    NAMED(galloc_pool_create, (&none, &(galloc_config){0}));
    NAMED(galloc_pool_create, (NULL, NULL));
    NAMED(galloc_pool_destroy, (NULL));
    NAMED(galloc_pool_default, (&none, 99));
    NAMED(galloc_pool_reserve, (pool, SIZE_MAX / 2));
    NAMED(galloc_pool_trim, (NULL, 0, NULL));
    NAMED(galloc_pool_sync_point, (NULL, NULL));
    NAMED(galloc_pool_set_limit, (NULL, 0));
    NAMED(galloc_pool_set_callbacks, (NULL, NULL));
    NAMED(galloc_pool_config, (pool, NULL));
    NAMED(galloc_pool_decisions, (pool, NULL, 1, NULL));
    NAMED(galloc_pool_freeze, (NULL));
    NAMED(galloc_pool_stats, (pool, NULL));
    NAMED(galloc_pool_stats_reset, (NULL));
    NAMED(galloc_pool_torch_stats, (pool, NULL));
    NAMED(galloc_pool_streams, (pool, NULL, 1, NULL));
    NAMED(galloc_pointer_info, (p, NULL));
    NAMED(galloc_oom_report, (NULL));
    NAMED(galloc_report_text, (&report, small, 1));
    NAMED(galloc_config_parse, (&config, "foo", NULL, 0));
    NAMED(galloc_config_print, (&config, small, 1));
    pool_end(pool);
    finish();
}

/* galloc.h declares them to files that are compiled for per-thread default streams. */
cudaError_t galloc_malloc_ptsz(void **ptr, size_t bytes, cudaStream_t stream);
cudaError_t galloc_free_after_ptsz(void *ptr, const cudaStream_t *streams, int n);
cudaError_t galloc_alloc_ptsz(void **ptr, const galloc_request *request);

TEST(the_names_are_those_that_the_program_has_written)
{
    void *p = NULL;
    cudaStream_t zero[1] = {0};
    begin();
    EXPECT(galloc_malloc_ptsz(&p, SIZE_MAX, 0) != cudaSuccess);
    EXPECT(begins("galloc_malloc"));
    EXPECT(galloc_free_after_ptsz(&p, zero, 1) != cudaSuccess);
    EXPECT(begins("galloc_free_after"));
    EXPECT_EQ(galloc_alloc_ptsz(&p, NULL), cudaErrorInvalidValue);
    EXPECT(begins("galloc_alloc"));
    galloc_pool *pool = pool_new(NULL);
    EXPECT_EQ(galloc_shutdown(), cudaErrorNotPermitted);
    EXPECT(begins("galloc_shutdown"));
    pool_end(pool);
    finish();
}

TEST(a_long_message_keeps_its_beginning_and_its_end)
{
    char text[600] = "memory_limit:1G,";
    memset(text + 16, 'x', 400);
    galloc_config config = galloc_config_default();
    begin();
    EXPECT_EQ(galloc_config_parse(&config, text, NULL, 0), cudaErrorInvalidValue);
    EXPECT(begins("galloc_config_parse") && strlen(galloc_last_message()) < inside_message_size());
    finish();
}

/* Of a long file name a message shows the first 300 bytes, so that the function's name has its place before it. */
TEST(the_longest_message_keeps_its_function_and_its_place)
{
    char path[2000];
    void *p = NULL;
    begin();
    for (size_t length = 400; length < sizeof path; length += length < 700 ? 1 : 99) {
        memset(path, 'x', length); /* no file has a name as long */
        path[length] = 0;
        EXPECT(galloc_snapshot_save(NULL, path) != cudaSuccess);
        if (!EXPECT(begins("galloc_snapshot_save") && strlen(galloc_last_message()) < inside_message_size())) break;
    }
    OK(galloc_malloc(&p, KIB(4), 0));
    OK(galloc_free(p, 0));
    finish();
}

/* A call that fails tells why, whatever fails of what it does besides: after some events it asks how far they are, and
   with many guards to be checked, too. */
TEST(what_a_call_does_besides_is_not_why_it_fails)
{
    static const char *const functions[] = {"cuCtxGetId", "cuEventQuery"};
    for (int i = 0; i < 4; i++) {
        long failed = 0;
        galloc_config config = galloc_config_default();
        begin_still();
        cudaStream_t s = stream_new(), t = stream_new();
        config.debug = i < 2 ? 0 : GALLOC_DEBUG_GUARDS;
        galloc_pool *pool = pool_new(&config);
        char *p = get(pool, MIB(8), s), *q = get(pool, KIB(4), t);
        for (int n = 0; n < 300; n++) {
            OK(galloc_free(get_used(pool, KIB(4), s, 1), s));
            inside_ask_for_event(pool, stream_id(s));
            sim_fail(functions[i % 2], 1, 1, cudaErrorUnknown);
            EXPECT_EQ(galloc_resize(p + 512, KIB(4), s), cudaErrorInvalidDevicePointer);
            EXPECT(begins("galloc_resize") && !strstr(galloc_last_message(), "unknown error"));
            failed += sim_failed();
            sim_fail_clear();
        }
        EXPECT(failed > 0);
        OK(galloc_free(p, s));
        OK(galloc_free(q, t));
        pool_end(pool);
        stream_end(s);
        stream_end(t);
        finish();
    }
}

TEST(a_config_of_zeros_is_told_where_to_begin)
{
    galloc_config zeros, half = {0}, wrong = galloc_config_default();
    galloc_pool *pool = NULL;
    begin();
    memset(&zeros, 0, sizeof zeros);
    EXPECT_EQ(galloc_pool_create(&pool, &zeros), cudaErrorInvalidValue);
    EXPECT(says("galloc_config_default()"));
    half.memory_limit = GIB(1);
    half.expandable_segments = 1;
    EXPECT_EQ(galloc_pool_create(&pool, &half), cudaErrorInvalidValue);
    EXPECT(says("galloc_config_default()"));
    wrong.backend = 7;
    EXPECT_EQ(galloc_pool_create(&pool, &wrong), cudaErrorInvalidValue);
    EXPECT(!strstr(galloc_last_message(), "galloc_config_default"));
    finish();
}

TEST(free_after_says_which_argument_is_wrong)
{
    void *p = NULL;
    cudaStream_t zero[1] = {0};
    begin();
    OK(galloc_malloc(&p, 1, 0));
    EXPECT_EQ(galloc_free_after(p, NULL, 2), cudaErrorInvalidValue);
    EXPECT(says("streams is NULL") && says("2"));
    EXPECT_EQ(galloc_free_after(p, zero, 0), cudaErrorInvalidValue);
    EXPECT(says("n is 0"));
    EXPECT_EQ(galloc_free_after(p, zero, -1), cudaErrorInvalidValue);
    EXPECT(says("n is -1"));
    OK(galloc_free_after(p, zero, 1));
    finish();
}

TEST(resize_says_what_to_do_instead)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    void *p = get(pool, MIB(1), s), *behind = get(pool, MIB(1), s);
    EXPECT_EQ(galloc_resize(p, MIB(64), s), cudaErrorNotSupported);
    EXPECT(says("67108864 bytes") && says("copy") && says("galloc_malloc_growable"));
    EXPECT_EQ(galloc_resize(p, 0, s), cudaErrorInvalidValue);
    EXPECT(says("0 bytes") && says("at least 1") && says("galloc_free"));
    OK(galloc_free(p, s));
    OK(galloc_free(behind, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_group_that_has_not_begun_is_told_how_to)
{
    begin();
    galloc_pool *pool = pool_new(NULL);
    cudaStream_t s = stream_new();
    galloc_graph *group = NULL;
    OK(galloc_graph_begin(&group, pool, s));
    OK(galloc_graph_end(group));
    EXPECT_EQ(galloc_graph_end(group), cudaErrorNotPermitted);
    EXPECT(says("the group has not begun") && says("galloc_graph_begin"));
    OK(galloc_graph_release(group, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

TEST(a_buffer_that_is_too_small_is_told_what_suffices)
{
    char text[10];
    galloc_report report;
    void *p = NULL;
    galloc_config config = config_limit(MIB(4));
    begin();
    galloc_pool *pool = pool_new(&config);
    EXPECT_EQ(galloc_config_print(&config, text, sizeof text), cudaErrorInvalidValue);
    EXPECT(says("10 bytes") && says("GALLOC_CONFIG_TEXT"));
    EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(8), 0), cudaErrorMemoryAllocation);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(galloc_report_text(&report, text, sizeof text), cudaErrorInvalidValue);
    EXPECT(says("10 bytes") && says("GALLOC_REPORT_TEXT"));
    p = get(pool, MIB(1), 0);
    EXPECT_EQ(galloc_live_text(pool, text, sizeof text), cudaErrorInvalidValue);
    EXPECT(says("10 bytes") && says("GALLOC_REPORT_TEXT"));
    OK(galloc_free(p, 0));
    pool_end(pool);
    finish();
}

TEST(words_of_reuse_with_a_comma_between_are_to_be_joined)
{
    galloc_config config = galloc_config_default();
    char message[512];
    begin();
    EXPECT_EQ(galloc_config_parse(&config, "reuse:completed,followed", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(strstr(message, "at 17: 'followed'") && strstr(message, "reuse") && strstr(message, "'+'"));
    EXPECT_EQ(galloc_config_parse(&config, "wait:1", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(strstr(message, "'+'") != NULL);
    EXPECT_EQ(galloc_config_parse(&config, "follower:1", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(!strstr(message, "'+'"));
    finish();
}

TEST(a_limit_that_only_the_size_of_pages_defeats_says_so)
{
    void *p = NULL;
    begin();
    for (int how = 0; how < 3; how++) {
        galloc_config config = galloc_config_default();
        if (how == 1) config.device_limit = MIB(1);
        else config.memory_limit = MIB(1);
        config.expandable_segments = how != 2;
        galloc_pool *pool = pool_new(&config);
        EXPECT_EQ(galloc_pool_malloc(pool, &p, 512, 0), cudaErrorMemoryAllocation);
        EXPECT(says("pages have 2097152 bytes") && says("1048576"));
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(1), 0), cudaErrorMemoryAllocation); /* the limit exactly */
        EXPECT(says("pages have 2097152 bytes") && says("1048576"));
        EXPECT_EQ(galloc_pool_malloc(pool, &p, MIB(1) + 512, 0), cudaErrorMemoryAllocation);
        EXPECT(says("1048576") && !strstr(galloc_last_message(), "pages have"));
        pool_end(pool);
    }
    galloc_config config = config_limit(MIB(5));
    galloc_pool *pool = pool_new(&config);
    void *held = get(pool, MIB(4), 0);
    EXPECT_EQ(galloc_pool_malloc(pool, &p, KIB(512), 0), cudaErrorMemoryAllocation);
    EXPECT(says("pages have 2097152 bytes"));
    OK(galloc_free(held, 0));
    pool_end(pool);
    finish();
}

/* What has no pages is not refused for the sake of one: each allocation there is one of the driver's. */
TEST(a_limit_names_no_pages_where_there_are_none)
{
    static const char *const backends[] = {"backend:cudaMalloc,memory_limit:3M",
                                           "backend:cudaMallocAsync,memory_limit:3M"};
    begin();
    for (int i = 0; i < 2; i++) {
        galloc_config config = galloc_config_default();
        galloc_request request = {0};
        void *p = NULL;
        OK(galloc_config_parse(&config, backends[i], NULL, 0));
        request.pool = pool_new(&config);
        request.bytes = KIB(2500);
        request.alignment = MIB(2); /* for which more is asked of the driver than the limit has */
        EXPECT_EQ(galloc_alloc(&p, &request), cudaErrorMemoryAllocation);
        EXPECT(says("the pool's memory_limit is 3145728") && !strstr(galloc_last_message(), "pages have"));
        pool_end(request.pool);
    }
    finish();
}

static struct {
    galloc_pool *pool; /* another one */
    void *held;        /* of it */
    int left;          /* looks at the limits until that is freed */
} lender;

static void *free_what_is_held(void *unused)
{
    OK(cudaSetDevice(0));
    OK(galloc_free(lender.held, 0));
    OK(galloc_pool_trim(lender.pool, 0, NULL));
    return unused;
}

static void let_another_thread_free(void)
{
    pthread_t thread;
    if (lender.left-- != 0) return;
    inside_on_budget = NULL;
    EXPECT_EQ(pthread_create(&thread, NULL, free_what_is_held, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
}

/* Nor where the limit has room by the time it is named. */
TEST(a_limit_that_has_room_meanwhile_names_no_pages)
{
    int refused = 0, over = 0;
    for (int look = 0; !over; look++) {
        begin();
        galloc_config config = galloc_config_default();
        void *p = NULL;
        OK(galloc_config_parse(&config, "backend:cudaMalloc,device_limit:3M", NULL, 0));
        galloc_pool *pool = pool_new(&config);
        lender.pool = pool_new(&config);
        lender.held = get(lender.pool, MIB(2), 0);
        lender.left = look;
        inside_on_budget = let_another_thread_free;
        cudaError_t error = galloc_pool_malloc(pool, &p, KIB(2500), 0);
        over = inside_on_budget != NULL;
        inside_on_budget = NULL;
        if (error) EXPECT(says("the device_limit is 3145728") && !strstr(galloc_last_message(), "pages have"));
        else OK(galloc_free(p, 0));
        refused += error && !over;
        if (over) OK(galloc_free(lender.held, 0));
        pool_end(pool);
        pool_end(lender.pool);
        finish();
        if (!EXPECT(look < 100)) break;
    }
    EXPECT(refused > 0);
}

/* ---- how much is logged ------------------------------------------------------------------------------------------ */

TEST(the_level_of_the_log_is_that_of_the_variable)
{
    static const struct {
        const char *conf;
        int notes, errors;
    } row[] = {{"max_split_size:20M,log:off", 0, 0},   {"max_split_size:20M,log:error", 0, 1},
               {"log:info,max_split_size:20M", 1, 1},  {"log:debug,max_split_size:20M", 1, 1},
               {"max_split_size:20M", 1, 1},           {"log:loud,max_split_size:20M", 0, 2},
               {"max_split_size:20M,foo,log:off", 0, 2}, {"log:off,foo", 0, 2},
               {"log:error,foo", 0, 2}};
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        void *p = NULL;
        begin_logging(row[i].conf);
        cudaError_t error = galloc_malloc(&p, 1, 0);
        EXPECT_EQ(error != cudaSuccess, strstr(row[i].conf, "loud") || strstr(row[i].conf, "foo"));
        EXPECT_EQ(log_lines, error ? row[i].errors == 2 : row[i].notes);
        EXPECT_EQ(galloc_malloc(NULL, 1, 0), cudaErrorInvalidValue);
        EXPECT(says("galloc_malloc: ptr is NULL"));
        EXPECT_EQ(log_lines, row[i].notes + row[i].errors);
        if (!error) OK(galloc_free(p, 0));
        finish_logging();
    }
}

/* All requests are refused then, so the first line says why, also where the mistake is in PyTorch's variable or between
   the two. The level is no higher than it must be. */
TEST(a_mistake_in_the_variables_is_logged_in_any_case)
{
    static const struct {
        const char *ours, *theirs, *says;
    } row[] = {{"log:off,typo", NULL, "galloc_malloc: GALLOC_CONF: at 9: unknown key 'typo'"},
               {"like:pytorch,log:off", "typo:1", "galloc_malloc: PYTORCH_CUDA_ALLOC_CONF: at 1: unknown key 'typo'"},
               {"like:pytorch,log:off,large_segment_size:80M", "max_split_size_mb:64", "galloc_malloc: GALLOC_CONF: "}};
    for (size_t i = 0; i < sizeof row / sizeof row[0]; i++) {
        void *p = NULL;
        begin_logging(row[i].ours);
        if (row[i].theirs) setenv("PYTORCH_CUDA_ALLOC_CONF", row[i].theirs, 1);
        EXPECT_EQ(galloc_malloc(NULL, 1, 0), cudaErrorInvalidValue);
        EXPECT_EQ(log_lines, 0);
        EXPECT_EQ(galloc_malloc(&p, 1, 0), cudaErrorInvalidValue);
        EXPECT_EQ(log_lines, 1);
        if (!EXPECT(!strncmp(log_text, row[i].says, strlen(row[i].says)))) printf("    %s\n", log_text);
        setenv("GALLOC_CONF", "max_split_size:20M", 1); /* a note, which log:error does not show */
        unsetenv("PYTORCH_CUDA_ALLOC_CONF");
        OK(galloc_malloc(&p, 1, 0));
        EXPECT_EQ(log_lines, 1);
        OK(galloc_free(p, 0));
        finish_logging();
    }
}

TEST(the_level_of_the_log_is_no_pools)
{
    galloc_config config = galloc_config_default(), before = config;
    char message[512], text[GALLOC_CONFIG_TEXT];
    begin_logging(NULL);
    OK(galloc_config_parse(&config, "log:off", message, sizeof message));
    EXPECT(strstr(message, "log: no effect but in the variable GALLOC_CONF") != NULL);
    EXPECT(!memcmp(&config, &before, sizeof config));
    EXPECT_EQ(galloc_config_parse(&config, "log:quiet", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(strstr(message, "off, error, info or debug") != NULL);
    EXPECT_EQ(galloc_config_parse(&config, "log:off,log:info", message, sizeof message), cudaErrorInvalidValue);
    EXPECT(strstr(message, "twice") != NULL);
    OK(galloc_config_print(&config, text, sizeof text));
    EXPECT(!strstr(text, "log"));
    EXPECT_EQ(log_lines, 2);
    finish_logging();
}

/* ---- repeats ----------------------------------------------------------------------------------------------------- */

static void free_foreign(int times)
{
    for (int i = 0; i < times; i++)
        EXPECT_EQ(galloc_free((char *)(uintptr_t)0x7a0000000000 + 512 * i, 0), cudaErrorInvalidDevicePointer);
}

TEST(repeats_that_differ_in_numbers_only_are_told_at_powers_of_ten)
{
    begin_logging(NULL);
    free_foreign(1);
    EXPECT_EQ(log_lines, 1);
    EXPECT(!strstr(log_text, "similar lines"));
    free_foreign(8);
    EXPECT_EQ(log_lines, 1);
    free_foreign(1);
    EXPECT_EQ(log_lines, 2);
    EXPECT(strstr(log_text, "(and 8 similar lines)") && !strstr(galloc_last_message(), "similar lines"));
    free_foreign(989);
    EXPECT_EQ(log_lines, 3);
    EXPECT(strstr(log_text, "(and 89 similar lines)") != NULL);
    free_foreign(1);
    EXPECT_EQ(log_lines, 4);
    EXPECT(strstr(log_text, "(and 899 similar lines)") != NULL);
    EXPECT(says("7a000000"));
    finish_logging();
}

TEST(what_is_another_message_or_comes_later_is_no_repeat)
{
    begin_logging(NULL);
    free_foreign(5);
    EXPECT_EQ(log_lines, 1);
    EXPECT_EQ(galloc_resize((void *)(uintptr_t)0x7a0000000000, 1, 0), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(log_lines, 2); /* of another function */
    free_foreign(1);
    EXPECT_EQ(log_lines, 2);
    __atomic_add_fetch(&the_time, SECOND, __ATOMIC_RELAXED);
    free_foreign(1);
    EXPECT_EQ(log_lines, 3);
    EXPECT(strstr(log_text, "(and 5 similar lines)") != NULL);
    free_foreign(1);
    EXPECT_EQ(log_lines, 3);
    finish_logging();
    begin_logging("log:debug");
    free_foreign(50);
    EXPECT_EQ(log_lines, 50);
    finish_logging();
}

/* The letters of an address are part of its number; those of the words after it make another message. */
TEST(words_after_an_address_make_another_message)
{
    static const char *const texts[] = {"0x1 a", "0x1 b", "0xc a", "0xdef2 b"};
    begin_logging(NULL);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        galloc_config config = galloc_config_default();
        EXPECT_EQ(galloc_config_parse(&config, texts[i], NULL, 0), cudaErrorInvalidValue);
        EXPECT(says(texts[i]));
        EXPECT_EQ(log_lines, i ? 2 : 1);
    }
    finish_logging();
}

static void fail_in_kinds(int kinds, int rounds)
{
    for (int i = 0; i < kinds * rounds; i++) {
        char text[] = "aq:1"; /* another key, so another kind of line */
        galloc_config config = galloc_config_default();
        text[0] = (char)('a' + i % kinds);
        EXPECT_EQ(galloc_config_parse(&config, text, NULL, 0), cudaErrorInvalidValue);
    }
}

TEST(sixteen_kinds_of_messages_that_alternate_are_counted)
{
    begin_logging(NULL);
    fail_in_kinds(16, 100);
    EXPECT_EQ(log_lines, 16 * 3);
    finish_logging();
}

/* A kind that is remembered in the place of another one has nothing of that one's count. */
TEST(the_first_message_of_a_kind_has_no_similar_lines)
{
    begin_logging(NULL);
    fail_in_kinds(1, 5);
    fail_in_kinds(17, 1);
    EXPECT_EQ(log_lines, 17);
    EXPECT(!strstr(log_text, "similar"));
    finish_logging();
}

TEST(kinds_of_messages_beyond_those_that_are_remembered_are_all_told)
{
    begin_logging(NULL);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 40; i++) {
            char text[42] = "";
            galloc_config config = galloc_config_default();
            memset(text, 'a', (size_t)i + 1);
            EXPECT_EQ(galloc_config_parse(&config, text, NULL, 0), cudaErrorInvalidValue);
        }
    }
    EXPECT(log_lines >= 40 && log_lines <= 120);
    finish_logging();
}

/* ---- the program's function -------------------------------------------------------------------------------------- */

typedef struct heard {
    long lines[4];
    char text[600];
    int nested; /* it calls galloc, which fails */
} heard;

/* 1: the message is short; 2: it is long. */
static void fail_within(int how)
{
    static const char path[] = "/nowhere/of/a/name/that/makes/the/message/longer/than/that/of/a/call/with/no/pool";
    if (how == 1) EXPECT_EQ(galloc_pool_trim(NULL, 0, NULL), cudaErrorInvalidValue);
    else EXPECT(galloc_snapshot_save(NULL, path) != cudaSuccess);
}

static void hear(int level, const char *text, void *user)
{
    heard *h = (heard *)user;
    __atomic_add_fetch(&h->lines[level], 1, __ATOMIC_RELAXED);
    if (h->nested && h->lines[level] < 100) fail_within(h->nested);
    snprintf(h->text, sizeof h->text, "%s", text);
}

TEST(the_program_is_given_the_lines_with_their_level)
{
    heard h;
    void *p = NULL;
    memset(&h, 0, sizeof h);
    begin_logging("max_split_size:20M");
    galloc_set_log(hear, &h);
    OK(galloc_malloc(&p, 1, 0));
    EXPECT(h.lines[GALLOC_LOG_INFO] == 1 && strstr(h.text, "max_split_size: no effect"));
    free_foreign(1);
    EXPECT(h.lines[GALLOC_LOG_ERROR] == 1 && !strcmp(h.text, galloc_last_message()));
    EXPECT_EQ(log_lines, 0);
    galloc_set_log(NULL, NULL);
    EXPECT_EQ(galloc_resize(NULL, 1, 0), cudaErrorInvalidDevicePointer);
    EXPECT_EQ(h.lines[GALLOC_LOG_ERROR], 1);
    EXPECT_EQ(log_lines, 1);
    OK(galloc_free(p, 0));
    finish_logging();
}

TEST(what_fails_in_the_programs_function_leaves_its_line_alone)
{
    heard h;
    memset(&h, 0, sizeof h);
    begin_logging("log:debug");
    galloc_set_log(hear, &h);
    for (int i = 1; i <= 4; i++) {
        h.nested = 1 + i / 3;
        EXPECT_EQ(galloc_malloc(NULL, 1, 0), cudaErrorInvalidValue);
        EXPECT_EQ(h.lines[GALLOC_LOG_ERROR], i);
        EXPECT(!strncmp(h.text, "galloc_malloc: ", 15));
        EXPECT(!strcmp(h.text, galloc_last_message()));
    }
    galloc_set_log(NULL, NULL);
    finish_logging();
}

static void run_out(int level, const char *text, void *lines)
{
    void *p;
    (void)level, (void)text;
    ++*(int *)lines;
    EXPECT_EQ(galloc_malloc(&p, GIB(4000), 0), cudaErrorMemoryAllocation);
}

TEST(what_runs_out_in_the_programs_function_leaves_the_report_alone)
{
    galloc_report report = {0};
    void *p;
    int lines = 0;
    begin_logging("log:debug");
    galloc_set_log(run_out, &lines);
    EXPECT_EQ(galloc_malloc(&p, GIB(3000), 0), cudaErrorMemoryAllocation);
    EXPECT_EQ(lines, 1);
    OK(galloc_oom_report(&report));
    EXPECT_EQ(report.asked, GIB(3000));
    EXPECT(says("3221225472000"));
    EXPECT_EQ(galloc_malloc(NULL, 1, 0), cudaErrorInvalidValue);
    EXPECT_EQ(lines, 2);
    EXPECT(says("ptr is NULL"));
    galloc_set_log(NULL, NULL);
    EXPECT_EQ(galloc_oom_report(&report), cudaErrorNotReady); /* the last allocation failed for another reason */
    finish_logging();
}

static void count(int level, const char *text, void *user)
{
    (void)text;
    __atomic_add_fetch(&((heard *)user)->lines[level], 1, __ATOMIC_RELAXED);
}

static void *fail_often(void *unused)
{
    (void)unused;
    free_foreign(2000);
    return NULL;
}

static int log_is_set;

static void *set_the_log(void *h)
{
    galloc_set_log(hear, h);
    __atomic_store_n(&log_is_set, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* A thread that logs takes the function and its argument together: nobody sets them in between. */
TEST(the_function_and_its_argument_are_set_together)
{
    static heard h;
    pthread_t thread;
    begin_logging(NULL);
    __atomic_store_n(&log_is_set, 0, __ATOMIC_RELEASE);
    inside_hold_log(1);
    EXPECT_EQ(pthread_create(&thread, NULL, set_the_log, &h), 0);
    for (int i = 0; i < 100 && !__atomic_load_n(&log_is_set, __ATOMIC_ACQUIRE); i++) usleep(1000);
    EXPECT_EQ(__atomic_load_n(&log_is_set, __ATOMIC_ACQUIRE), 0);
    inside_hold_log(0);
    pthread_join(thread, NULL);
    free_foreign(1);
    EXPECT_EQ(h.lines[GALLOC_LOG_ERROR], 1);
    galloc_set_log(NULL, NULL);
    finish_logging();
}

TEST(threads_fail_while_the_function_is_set)
{
    pthread_t threads[3];
    static heard h[2];
    begin_logging("log:debug");
    for (int i = 0; i < 3; i++) EXPECT_EQ(pthread_create(&threads[i], NULL, fail_often, NULL), 0);
    for (int i = 0; i < 500; i++) galloc_set_log(i % 3 ? count : NULL, &h[i % 2]);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    galloc_set_log(NULL, NULL);
    EXPECT_EQ(h[0].lines[GALLOC_LOG_ERROR] + h[1].lines[GALLOC_LOG_ERROR] + log_lines, 6000);
    finish_logging();
}

static void *hold_the_log(void *held)
{
    inside_hold_log(1);
    __atomic_store_n((int *)held, 1, __ATOMIC_RELEASE);
    usleep(100000);
    inside_hold_log(0);
    __atomic_store_n((int *)held, 2, __ATOMIC_RELEASE);
    return NULL;
}

TEST(a_child_of_fork_can_say_that_it_is_one_whatever_other_threads_did)
{
    pthread_t thread;
    static int held; /* 1: the thread has the lock; 2: it is done with it */
    int status = -1;
    void *p = NULL;
    held = 0;
    begin_logging(NULL);
    OK(galloc_malloc(&p, 1, 0));
    EXPECT_EQ(pthread_create(&thread, NULL, hold_the_log, &held), 0);
    pthread_detach(thread); /* the child has nobody to wait for */
    while (!__atomic_load_n(&held, __ATOMIC_ACQUIRE)) usleep(100);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        _exit(galloc_malloc(&p, 1, 0) == cudaErrorInitializationError && log_lines == 1 ? 0 : 1);
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    while (__atomic_load_n(&held, __ATOMIC_ACQUIRE) != 2) usleep(100);
    OK(galloc_free(p, 0));
    finish_logging();
}

static int torn, ends_setting; /* a function was called with the argument of the other one; no thread sets them */

static void with_1(int level, const char *text, void *user)
{
    (void)level;
    (void)text;
    torn |= (uintptr_t)user != 1;
}

static void with_2(int level, const char *text, void *user)
{
    (void)level;
    (void)text;
    torn |= (uintptr_t)user != 2;
}

static void *set_in_turn(void *unused)
{
    while (!__atomic_load_n(&ends_setting, __ATOMIC_ACQUIRE)) {
        galloc_set_log(with_2, (void *)2);
        galloc_set_log(with_1, (void *)1);
    }
    return unused;
}

/* The child finds a function and its argument that were set together, whatever another thread was setting. */
TEST(a_fork_while_the_function_is_set)
{
    enum { FORKS = 400 };
    pthread_t thread;
    void *p = NULL;
    int failed = 0;
    begin_logging(NULL);
    OK(galloc_malloc(&p, 1, 0));
    galloc_set_log(with_1, (void *)1);
    ends_setting = 0;
    EXPECT_EQ(pthread_create(&thread, NULL, set_in_turn, NULL), 0);
    for (int i = 0; i < FORKS && !failed; i++) {
        int status = -1;
        pid_t child = fork();
        if (child == 0) {
            alarm(10);
            _exit(galloc_malloc(&p, 1, 0) != cudaErrorInitializationError || torn);
        }
        failed = child < 0 || waitpid(child, &status, 0) != child || status;
    }
    EXPECT(!failed);
    __atomic_store_n(&ends_setting, 1, __ATOMIC_RELEASE);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    galloc_set_log(NULL, NULL);
    OK(galloc_free(p, 0));
    finish_logging();
}

/* What a default pool has to say of its settings does not take the place of why the call failed. */
TEST(a_note_does_not_hide_an_error)
{
    begin();
    void *p = NULL;
    setenv("GALLOC_CONF", "max_split_size_mb:128", 1);
    EXPECT_EQ(galloc_malloc(&p, (size_t)1 << 50, 0), cudaErrorMemoryAllocation);
    EXPECT(strstr(galloc_last_message(), "galloc_malloc: out of memory") != NULL);
    EXPECT(strstr(log_text, "out of memory") != NULL);
    unsetenv("GALLOC_CONF");
    finish();
}

/* A note goes to the log only: no call has failed. */
TEST(a_note_is_not_the_last_message)
{
    begin();
    char before[600];
    void *p = NULL;
    setenv("GALLOC_CONF", "history_stacks:4", 1);
    snprintf(before, sizeof before, "%s", galloc_last_message());
    log_text[0] = 0;
    OK(galloc_malloc(&p, 4096, 0));
    EXPECT(strstr(log_text, "history_stacks"));
    EXPECT(!strcmp(before, galloc_last_message()));
    OK(galloc_free(p, 0));
    OK(galloc_shutdown());
    unsetenv("GALLOC_CONF");
    finish();
}

/* An error of another pool, which is to give memory back, does not take the place of a note: any call may fail. */
TEST(a_note_outlives_an_error_of_another_pool)
{
    long went = 0, failed = 1;
    for (int nth = 1; failed; nth++) {
        sim_options options = sim_defaults();
        options.memory = MIB(64);
        begin_with(options);
        void *p = NULL;
        galloc_pool *other = pool_new(NULL);
        OK(galloc_free(get(other, MIB(48), 0), 0));
        OK(cudaDeviceSynchronize());
        setenv("GALLOC_CONF", "history_stacks:4", 1);
        log_text[0] = 0;
        sim_fail(NULL, nth, 0, cudaErrorUnknown);
        cudaError_t error = galloc_malloc(&p, MIB(40), 0);
        failed = sim_failed();
        sim_fail_clear();
        if (!error) EXPECT(strstr(log_text, "history_stacks"));
        went += failed && !error;
        if (p) OK(galloc_free(p, 0));
        OK(galloc_pool_destroy(other));
        OK(galloc_shutdown());
        unsetenv("GALLOC_CONF");
        finish();
    }
    EXPECT(went > 3);
}

TEST_MAIN()
