/* test_advice.c - what `replay --what-if` recommends (bench/advice.c), from figures that are made up. */

#include <math.h>

#include "test.h"

#include "bench/advice.c"

#define MIB ((size_t)1 << 20)
#define MS 1000.0

/* The defaults hold 1000 MiB for 10 ms of the driver's. */
static advice_row rows[8];
static advice_log one_log;

static void row(int i, const char *name, int kind, size_t mib, double ms)
{
    rows[i] = (advice_row){.name = name, .kind = kind, .fits = true, .held = mib * MIB, .driver_us = ms * MS,
                           .driver_calls = 100};
    one_log.rows = i + 1;
}

static void begin_log(double seconds)
{
    one_log = (advice_log){.row = rows, .seconds = seconds, .live = 900 * MIB, .limit = SIZE_MAX, .fit_us = NAN};
    row(0, "the defaults", ADVICE_DEFAULTS, 1000, 10);
}

static advice given(void)
{
    advice a;
    advice_give(&one_log, &a);
    return a;
}

static int says(const advice *a, const char *text)
{
    for (int i = 0; i < a->lines; i++)
        if (strstr(a->line[i], text)) return 1;
    printf("    \"%s\" is in none of:\n", text);
    for (int i = 0; i < a->lines; i++) printf("    %s\n", a->line[i]);
    return 0;
}

/* ---- one setting beside the defaults ----------------------------------------------------------------------------- */

/* Which is recommended of the defaults and of one that holds `mib` for `ms`. */
static int choice(double seconds, size_t mib, double ms)
{
    begin_log(seconds);
    row(1, "overhead:0", ADVICE_SETTING, mib, ms);
    return given().recommended;
}

TEST(memory_is_worth_a_tenth_of_the_same_part_of_the_time)
{
    EXPECT_EQ(choice(10, 960, 10 + 39), 0); /* 4 % less for 0.39 % of 10 s: 0.1 % better */
    EXPECT_EQ(choice(10, 960, 10 + 31), 0); /* 0.9 % better */
    EXPECT_EQ(choice(10, 960, 10 + 29), 1); /* 1.1 % better */
    EXPECT_EQ(choice(100, 960, 10 + 290), 1); /* a longer program pays more */
    EXPECT_EQ(choice(1, 960, 10 + 29), 0);
}

TEST(time_is_bought_with_memory_too)
{
    EXPECT_EQ(choice(1, 1050, 3), 1);  /* 5 % more, saves 0.7 % of the time: 2 % better */
    EXPECT_EQ(choice(1, 1065, 3), 0);  /* 0.5 % better */
    EXPECT_EQ(choice(10, 1050, 3), 0); /* saves 0.07 % of the time */
}

TEST(the_defaults_stay_where_little_is_won)
{
    EXPECT_EQ(choice(10, 1000, 10), 0);
    EXPECT_EQ(choice(10, 991, 10), 0);
    EXPECT_EQ(choice(10, 989, 10), 1);
}

TEST(a_log_without_times_counts_by_the_driver_time_of_the_defaults)
{
    EXPECT_EQ(choice(0, 960, 21), 0); /* 4 % less for 2.1 times the driver time: 1.5 % worse */
    EXPECT_EQ(choice(0, 960, 11), 1); /* for 1.1 times: 3.5 % better */
    begin_log(0);
    row(1, "overhead:0", ADVICE_SETTING, 960, 21);
    advice a = given();
    EXPECT(says(&a, "Recommended: the defaults. No other setting is worth its price (the log tells no time: 1 % of "
                    "memory counts as much as 20 % of the driver time)."));
    EXPECT(says(&a, "Memory: overhead:0 holds 4.0 % less for 2.1 times the driver time (21.0 ms): not worth it unless "
                    "memory is short."));
}

/* Where the driver calls take longer than all of the log, its times are no program's. */
TEST(a_log_shorter_than_its_driver_time_counts_as_one_without_times)
{
    EXPECT_EQ(choice(0.009, 960, 21), 0);
    EXPECT_EQ(choice(0.009, 960, 11), 1);
    begin_log(0.009);
    row(1, "overhead:0", ADVICE_SETTING, 960, 21);
    advice a = given();
    EXPECT(says(&a, "(the log is too short, its times tell nothing: the driver time of a replay exceeds them; 1 % of "
                    "memory counts as much as 20 % of the driver time)."));
    EXPECT(says(&a, "for 2.1 times the driver time (21.0 ms): not worth it"));
    begin_log(0.011);
    row(1, "overhead:0", ADVICE_SETTING, 960, 21);
    a = given();
    EXPECT(says(&a, "of the log's 0.0 s)."));
}

/* ---- among several ----------------------------------------------------------------------------------------------- */

TEST(the_best_of_several_is_recommended_and_the_ends_are_named)
{
    begin_log(10);
    row(1, "overhead:0", ADVICE_SETTING, 950, 110);   /* 5 % less, 1 % of the time: 5 % worse */
    row(2, "growth:16M", ADVICE_SETTING, 970, 12);    /* 3 % less, 0.02 %: 2.8 % better */
    row(3, "growth:256M", ADVICE_SETTING, 1100, 2);
    row(4, "backend:cudaMalloc", ADVICE_OTHER, 500, 1);
    advice a = given();
    EXPECT_EQ(a.recommended, 2);
    EXPECT(says(&a, "Recommended: growth:16M. It holds 3.0 % less (970 MiB, the defaults 1000) for 1.2 times the "
                    "driver time (12.0 ms, 0.12 % of the log's time): worth it (1 % of memory counts as much as 0.1 % "
                    "of the log's 10.0 s)."));
    EXPECT(says(&a, "Memory: overhead:0 holds 5.0 % less for 11.0 times the driver time (110.0 ms, 1.10 % of the log's "
                    "time): not worth it unless memory is short."));
    EXPECT(says(&a, "Time: growth:256M takes 0.2 times the driver time (2.0 ms, 0.02 % of the log's time) and holds "
                    "10.0 % more: not worth it unless driver calls hurt."));
    EXPECT_EQ(a.lines, 3);
}

TEST(ends_that_are_near_are_told_so)
{
    begin_log(10);
    row(1, "overhead:0", ADVICE_SETTING, 995, 10);
    advice a = given();
    EXPECT(says(&a, "Memory: no setting holds 1 % less than the defaults."));
    EXPECT(says(&a, "Time: no setting takes 10 % less driver time than the defaults."));
}

TEST(an_end_that_is_recommended_is_not_called_a_price)
{
    begin_log(10);
    row(1, "overhead:0", ADVICE_SETTING, 900, 9);
    advice a = given();
    EXPECT_EQ(a.recommended, 1);
    for (int i = 0; i < a.lines; i++) EXPECT(!strstr(a.line[i], "unless"));
}

TEST(other_allocators_are_compared_and_never_recommended)
{
    begin_log(10);
    row(1, "like:pytorch", ADVICE_PYTORCH, 500, 1);
    row(2, "cudaMalloc", ADVICE_CUDAMALLOC, 400, 1000);
    advice a = given();
    EXPECT_EQ(a.recommended, 0);
    EXPECT(says(&a, "PyTorch's rules: 50.0 % less memory for 0.1 times the driver time (1.0 ms, 0.01 % of the log's "));
    EXPECT(says(&a, "cudaMalloc: 60.0 % less memory for 100.0 times the driver time (1000.0 ms, 10.00 % of the log's "
                    "time); in that time is no wait of cudaFree for the device."));
    rows[1].fits = false;
    a = given();
    EXPECT(says(&a, "PyTorch's rules: out of memory."));
}

/* ---- memory runs out --------------------------------------------------------------------------------------------- */

TEST(where_the_defaults_do_not_fit_another_setting_is_recommended)
{
    begin_log(10);
    one_log.limit = 950 * MIB;
    rows[0].fits = false;
    row(1, "overhead:0", ADVICE_SETTING, 930, 110);
    row(2, "growth:16M", ADVICE_SETTING, 940, 20);
    row(3, "growth:64M", ADVICE_SETTING, 800, 1);
    rows[3].fits = false;
    advice a = given();
    EXPECT_EQ(a.recommended, 2);
    EXPECT(says(&a, "Recommended: growth:16M. With the defaults the log does not replay within 950 MiB; it holds 940 "
                    "MiB, for 20.0 ms of driver time."));
}

TEST(where_nothing_fits_nothing_is_recommended)
{
    begin_log(10);
    rows[0].fits = false;
    one_log.limit = 800 * MIB;
    one_log.fit = 910 * MIB;
    advice a = given();
    EXPECT_EQ(a.recommended, -1);
    EXPECT(says(&a, "Recommended: none. No setting of galloc replays the log within 800 MiB; 900 MiB are live "
                    "at most."));
    EXPECT(says(&a, "Limit: memory_limit:910M is the smallest with which the log replays, 1.1 % more than is live. It "
                    "is more than the limit given."));
    one_log.limit = SIZE_MAX;
    a = given();
    EXPECT(says(&a, "within the device's memory; 900 MiB are live"));
}

TEST(the_smallest_limit_and_its_price_are_told)
{
    begin_log(10);
    one_log.fit = 918 * MIB;
    one_log.fit_us = 41 * MS;
    advice a = given();
    EXPECT(says(&a, "Limit: memory_limit:918M is the smallest with which the log replays, 2.0 % more than is live; its "
                    "small pages take 4.1 times the driver time (41.0 ms, 0.41 % of the log's time)."));
    one_log.fit = 900 * MIB;
    a = given();
    EXPECT(says(&a, "with which the log replays, as much as is live; its small pages take "));
    one_log.fit_us = NAN;
    a = given();
    EXPECT(says(&a, "with which the log replays, as much as is live."));
}

TEST(figures_of_zero_give_words)
{
    begin_log(0);
    rows[0].driver_us = 0;
    row(1, "overhead:0", ADVICE_SETTING, 900, 0);
    advice a = given();
    EXPECT_EQ(a.recommended, 1);
    for (int i = 0; i < a.lines; i++) EXPECT(!strstr(a.line[i], "nan") && !strstr(a.line[i], "inf"));
}

TEST_MAIN()
