/* test.h - a test framework in one header.

       #include "test.h"
       TEST(two_and_two_are_four) { EXPECT_EQ(2 + 2, 4); }
       TEST_MAIN()

   PROGRAM           runs all tests in the order of the file
   PROGRAM TEXT      runs the test of that name; if there is none, those whose name contains TEXT
   PROGRAM --list    prints their names

   A failed check is printed, and its test continues. Any thread may make checks. A test without checks fails. The last
   line of the output is "N passed, M failed". The exit status is 0, 1 after a failure, and 2 if no test ran. */

#ifndef TEST_H
#define TEST_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct test_case {
    const char *name;
    void (*run)(void);
    struct test_case *next;
} test_case;

static test_case *test_first, **test_end = &test_first;
static long test_checks, test_failures; /* of the current test */

/* The seed of random tests. The environment variable GALLOC_SEED reproduces a failure; without it the seed is
   constant. */
static inline uint64_t test_seed(void)
{
    const char *text = getenv("GALLOC_SEED");
    return text && *text ? strtoull(text, NULL, 10) : 20261;
}

static inline void test_register(test_case *test)
{
    *test_end = test;
    test_end = &test->next;
}

static inline int test_count(int holds)
{
    __atomic_add_fetch(&test_checks, 1, __ATOMIC_RELAXED);
    if (!holds) __atomic_add_fetch(&test_failures, 1, __ATOMIC_RELAXED);
    return holds;
}

static inline int test_holds(int holds, const char *file, int line, const char *text)
{
    if (!holds) printf("%s:%d: %s\n", file, line, text);
    return test_count(holds);
}

static inline int test_equals(long long a, long long b, const char *file, int line, const char *text)
{
    if (a != b) printf("%s:%d: %s: %lld and %lld\n", file, line, text, a, b);
    return test_count(a == b);
}

#define TEST(name)                                                                                                     \
    static void test_##name(void);                                                                                     \
    static test_case test_case_##name = {#name, test_##name, NULL};                                                    \
    __attribute__((constructor)) static void test_register_##name(void) { test_register(&test_case_##name); }          \
    static void test_##name(void)

/* Both return 1 if the check succeeds, so that a test can stop: if (!EXPECT(p)) return; */
#define EXPECT(condition) test_holds((condition) ? 1 : 0, __FILE__, __LINE__, #condition)
#define EXPECT_EQ(a, b) test_equals((long long)(a), (long long)(b), __FILE__, __LINE__, #a " == " #b)

static inline int test_passes(const test_case *test)
{
    test_checks = test_failures = 0;
    test->run();
    if (!test_checks) printf("%s checks nothing\n", test->name);
    if (test_checks && !test_failures) return 1;
    printf("FAILED %s (GALLOC_SEED=%llu)\n", test->name, (unsigned long long)test_seed());
    return 0;
}

static inline int test_is_name(const char *text)
{
    for (const test_case *test = test_first; test; test = test->next) {
        if (!strcmp(test->name, text)) return 1;
    }
    return 0;
}

static inline int test_main(int argc, char **argv)
{
    const char *wanted = argc > 1 ? argv[1] : "";
    int list = !strcmp(wanted, "--list"), exact = test_is_name(wanted), passed = 0, failed = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (test_case *test = test_first; test; test = test->next) {
        if (list) {
            printf("%s\n", test->name);
        } else if (exact ? !strcmp(test->name, wanted) : strstr(test->name, wanted) != NULL) {
            if (test_passes(test)) ++passed;
            else ++failed;
        }
    }
    if (list) return 0;
    printf("%d passed, %d failed\n", passed, failed);
    return failed ? 1 : passed ? 0 : 2;
}

#define TEST_MAIN()                                                                                                    \
    int main(int argc, char **argv) { return test_main(argc, argv); }

#endif
