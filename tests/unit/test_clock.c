/* test_clock.c - time and log as programs have them: the system's clock, whose name strict C hides, for a history the
   processor's counter, and stderr. Other tests have a clock and a log of their own, and this program its own galloc. */

#define _GNU_SOURCE
#include <time.h>

int program_clock(int clock, struct timespec *now);
int program_yield(void);
time_t program_time(time_t *at);
#define clock_gettime program_clock
#define sched_yield program_yield
#define time(at) program_time(at)
#define INSIDE_COUNTER
#define INSIDE_STDERR
#define INSIDE_STRICT_C
#include "inside.c"
#undef clock_gettime
#undef sched_yield
#undef time

#include "setup.h"

#include "events.h"

static time_t set_ahead; /* seconds by which the time of day has been set */
static long late; /* so many nanoseconds after its reading the clock is heard */
static long stalls; /* so many readings of the clock last 20 ms longer */
static long yields, slept; /* so many seconds were others let run; from 1 on each yield takes one */

int program_clock(int clock, struct timespec *now)
{
    int result = clock_gettime(clock, now);
    if (stalls > 0) {
        stalls--;
        usleep(20000);
    }
    if (clock == CLOCK_REALTIME) now->tv_sec += set_ahead;
    now->tv_sec += slept;
    now->tv_nsec -= late;
    if (now->tv_nsec < 0) {
        now->tv_nsec += 1000000000;
        now->tv_sec--;
    }
    return result;
}

time_t program_time(time_t *at) { return time(at) + set_ahead; }

int program_yield(void)
{
    yields++;
    slept += slept > 0;
    return 0;
}

/* On a busy host, where a yield takes long, calls beside a graph that stays look only once more for its end. */
TEST(a_graph_that_stays_is_not_waited_for_long)
{
    begin();
    cudaStream_t s = stream_new();
    galloc_pool *pool = pool_new(NULL);
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(galloc_free(get(pool, MIB(3), s), s));
    OK(cudaStreamEndCapture(s, &graph));
    for (int busy = 0; busy < 2; busy++) {
        slept = busy;
        yields = 0;
        OK(galloc_pool_trim(pool, 0, NULL));
        EXPECT(busy ? yields <= 1 : yields >= 1);
        EXPECT_EQ(galloc_pool_destroy(pool), cudaErrorNotPermitted);
    }
    slept = 0;
    OK(cudaGraphDestroy(graph));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* What is idle for a moment is not old because the time of day is set ahead, again and again. */
TEST(nothing_ages_when_the_time_of_day_is_set)
{
    galloc_config config = config_limit(GIB(1));
    begin();
    cudaStream_t s = stream_new();
    config.gc_age = (uint64_t)3600 * 1000000000;
    config.lane_bytes = 0;
    galloc_pool *pool = pool_new(&config);
    void *p = get(pool, MIB(20), s), *keep = get(pool, MIB(3), s);
    OK(galloc_free(p, s));
    for (int i = 0; i < 1000; i++) {
        if (i >= 500 && i % 10 == 0) set_ahead += 300;
        OK(galloc_free(get(pool, 1000, s), s));
    }
    EXPECT_EQ(stats_of(pool).collections, 0);
    set_ahead = 0;
    OK(galloc_free(keep, s));
    pool_end(pool);
    stream_end(s);
    finish();
}

/* The times of entries that a snapshot has shown are the same in the next one, and those between lie between. */
TEST(a_second_snapshot_has_the_same_times)
{
    galloc_config config = config_limit(GIB(1));
    double before[3] = {0}, times[3];
    begin();
    config.history = 100;
    galloc_pool *pool = pool_new(&config);
    for (int round = 0; round < 3; round++) {
        OK(galloc_pool_history(pool, 100)); /* begins with no entry */
        for (int part = 0; part < 3; part++) {
            int n = 0;
            OK(galloc_free(get(pool, 1000, NULL), NULL));
            usleep(2000);
            value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
            for (const value *e = events_of(v)->first; e; e = e->next)
                if (!strcmp(text_of(e, "action"), "alloc") && n < 3) times[n++] = (double)number_of(e, "time_us");
            EXPECT_EQ(n, part + 1);
            EXPECT_EQ(galloc_pool_check(pool), 0); /* right also if the next entry's processor is behind */
            for (int i = 0; i < part; i++) EXPECT(times[i] == before[i]);
            for (int i = 1; i < n; i++) EXPECT(times[i] - times[i - 1] >= 1999 && times[i] - times[i - 1] < 5e6);
            memcpy(before, times, sizeof before);
            value_free(v);
        }
    }
    pool_end(pool);
    finish();
}

/* Also after more snapshots than there are timestamps kept, the times are right, and those of one snapshot and the next
   the same but for the oldest. */
TEST(the_times_stay_right_over_many_snapshots)
{
    galloc_config config = config_limit(GIB(1));
    uint64_t since[70], until[70], times[70], before[70];
    begin();
    galloc_pool *pool = pool_new(&config), *other = pool_new(&config);
    OK(galloc_pool_history(pool, 1000));
    for (int round = 0; round < 70; round++) {
        int n = 0;
        set_ahead = round >= 20 ? 100 : 0;
        if (round == 20) OK(galloc_pool_history(other, 10));
        since[round] = inside_clock();
        OK(galloc_free(get(pool, 1000, NULL), NULL));
        until[round] = inside_clock();
        usleep(200);
        late = round % 5 == 0 ? 300000 : 0;
        value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        late = 0;
        for (const value *e = events_of(v)->first; e; e = e->next)
            if (!strcmp(text_of(e, "action"), "alloc") && n < 70) times[n++] = number_of(e, "time_us");
        value_free(v);
        if (!EXPECT_EQ(n, round + 1)) break;
        for (int i = 0; i < round; i++) EXPECT(times[i] == before[i] || i < round - 28);
        for (int i = 1; i < n; i++) {
            EXPECT(times[i] - times[0] + 2000 > (since[i] - until[0]) / 1000);
            EXPECT(times[i] - times[0] < (until[i] - since[0]) / 1000 + 2000);
        }
        memcpy(before, times, sizeof before);
    }
    set_ahead = 0;
    pool_end(other);
    pool_end(pool);
    finish();
}

/* Each entry is converted once, also where the ring has been overwritten more than once since the last snapshot, or not
   at all. */
TEST(the_times_of_an_overwritten_history_are_times_of_day)
{
    galloc_config config = config_limit(GIB(1));
    config.history = 100;
    begin();
    galloc_pool *pool = pool_new(&config);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 120; i++) {
            OK(galloc_free(get(pool, 1000, NULL), NULL));
            usleep(100);
        }
        value_free(snapshot(pool, GALLOC_SNAPSHOT_JSON));
        value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
        uint64_t now = (uint64_t)time(NULL) * 1000000, before = 0;
        EXPECT(value_count(events_of(v)) >= 100);
        for (const value *e = events_of(v)->first; e; e = e->next) {
            uint64_t at = number_of(e, "time_us");
            EXPECT(at >= before && at > now - 60000000 && at < now + 60000000);
            before = at;
        }
        value_free(v);
    }
    pool_end(pool);
    finish();
}

/* What lies between two snapshots has its time there, not a share of the time since the history began. */
TEST(the_times_between_later_snapshots_are_right)
{
    galloc_config config = config_limit(GIB(1));
    uint64_t from, to, at[2] = {0};
    int n = 0;
    begin();
    config.history = 100;
    galloc_pool *pool = pool_new(&config);
    usleep(60000);
    from = inside_clock();
    OK(galloc_free(get(pool, 1000, NULL), NULL));
    value_free(snapshot(pool, GALLOC_SNAPSHOT_JSON));
    OK(galloc_free(get(pool, 1000, NULL), NULL));
    to = inside_clock();
    usleep(60000);
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (const value *e = events_of(v)->first; e; e = e->next)
        if (!strcmp(text_of(e, "action"), "alloc") && n < 2) at[n++] = number_of(e, "time_us");
    EXPECT_EQ(n, 2);
    EXPECT(at[1] - at[0] <= (to - from) / 1000 + 1000);
    value_free(v);
    pool_end(pool);
    finish();
}

/* Where the thread loses its processor between the readings of counter and clock, the times are right all the same. */
TEST(a_slow_reading_of_the_clock_is_not_used)
{
    galloc_config config = config_limit(GIB(1));
    begin();
    galloc_pool *pool = pool_new(&config);
    stalls = 2; /* one of them is that of the time of day */
    OK(galloc_pool_history(pool, 100));
    stalls = 0;
    uint64_t before = (uint64_t)time(NULL) * 1000000, from = inside_clock();
    OK(galloc_free(get(pool, 1000, NULL), NULL));
    usleep(1000);
    OK(galloc_free(get(pool, 1000, NULL), NULL));
    uint64_t to = inside_clock(), at[2] = {0}, n = 0;
    value *v = snapshot(pool, GALLOC_SNAPSHOT_JSON);
    for (const value *e = events_of(v)->first; e; e = e->next)
        if (!strcmp(text_of(e, "action"), "alloc") && n < 2) at[n++] = number_of(e, "time_us");
    EXPECT_EQ(n, 2);
    EXPECT(at[1] - at[0] >= 1000 && at[1] - at[0] <= (to - from) / 1000 + 1);
    EXPECT(at[0] + 2000000 > before);
    value_free(v);
    pool_end(pool);
    finish();
}

/* An address that one pool returned and another got: its entries stand in this order, also where the thread lost its
   processor while one of the histories began. */
TEST(entries_of_two_pools_stand_in_their_order)
{
    galloc_config config = config_limit(GIB(1));
    galloc_pool *pools[2];
    config.expandable_segments = 0;
    for (int second = 0; second < 2; second++) {
        begin();
        for (int i = 0; i < 2; i++) {
            pools[i] = pool_new(&config);
            late = i == second ? 2000000 : 0;
            OK(galloc_pool_history(pools[i], 100));
            late = 0;
            OK(galloc_free(get(pools[i], 1000, NULL), NULL));
        }
        for (int i = 0; i < 10; i++) {
            OK(galloc_free(get(pools[i % 2], MIB(30), NULL), NULL));
            OK(galloc_pool_trim(pools[i % 2], 0, NULL));
        }
        value *v = snapshot(NULL, GALLOC_SNAPSHOT_JSON);
        uint64_t there = 0, n = 0, before = 0;
        for (const value *e = events_of(v)->first; e; e = e->next) {
            EXPECT(number_of(e, "time_us") >= before);
            before = number_of(e, "time_us");
            if (number_of(e, "size") != MIB(30) || strncmp(text_of(e, "action"), "segment_", 8)) continue;
            EXPECT_EQ(!strcmp(text_of(e, "action"), "segment_alloc"), !there);
            there = !there;
            n++;
        }
        EXPECT_EQ(n, 20);
        value_free(v);
        pool_end(pools[0]);
        pool_end(pools[1]);
        finish();
    }
}

TEST(each_message_is_a_line_of_stderr)
{
    char line[1024];
    int lines = 0, saved = dup(2);
    FILE *file = tmpfile();
    begin();
    fflush(stderr);
    if (!EXPECT(file && saved >= 0 && dup2(fileno(file), 2) >= 0)) return;
    EXPECT_EQ(galloc_malloc(NULL, 1, NULL), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_free(line, NULL), cudaErrorInvalidDevicePointer);
    fflush(stderr);
    dup2(saved, 2);
    close(saved);
    rewind(file);
    while (fgets(line, sizeof line, file)) lines += !strncmp(line, "galloc: ", 8) && strchr(line, '\n');
    EXPECT_EQ(lines, 2);
    fclose(file);
    finish();
}

TEST_MAIN()
