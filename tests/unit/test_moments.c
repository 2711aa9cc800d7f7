/* test_moments.c - what another thread does between two steps of a call that no function of the driver separates. This
   program has a galloc of its own, whose atomic loads tell of themselves. */

#define _GNU_SOURCE

static void loaded(const volatile void *at);
#define __atomic_load_n(at, order)                                                                                     \
    __extension__({                                                                                                    \
        __typeof__(__atomic_load_n(at, order)) value_ = __atomic_load_n(at, order);                                    \
        loaded(at);                                                                                                    \
        value_;                                                                                                        \
    })
#include "inside.c"
#undef __atomic_load_n

#include "setup.h"

/* ---- the moment after a load ------------------------------------------------------------------------------------- */

static const volatile void *watched; /* the next load from here lets another thread go first; NULL: none does */
static pthread_t watches, other;
static int other_is_there, call_is_over;

static void say(int *what) { __atomic_store_n(what, 1, __ATOMIC_RELEASE); }

static void hear(const int *what)
{
    while (!__atomic_load_n(what, __ATOMIC_ACQUIRE)) usleep(100);
}

static void *destroy(void *pool)
{
    OK(galloc_pool_destroy(pool));
    return NULL;
}

static void loaded(const volatile void *at)
{
    galloc_pool *pool;
    if (!watched || at != watched || !pthread_equal(pthread_self(), watches)) return;
    watched = NULL;
    pool = (galloc_pool *)((uintptr_t)at - offsetof(galloc_pool, users));
    EXPECT_EQ(pthread_create(&other, NULL, destroy, pool->handle), 0);
    hear(&other_is_there);
}

/* The pool has ended but for its host memory. */
static void once_the_pool_is_empty(const char *function)
{
    if (pthread_equal(pthread_self(), watches) || strcmp(function, "cuDevicePrimaryCtxRelease")) return;
    say(&other_is_there);
    hear(&call_is_over);
}

/* ---- calls that come while a pool ends --------------------------------------------------------------------------- */

static void wait_for_the_end(cudaError_t error)
{
    say(&call_is_over);
    if (EXPECT(!watched)) EXPECT_EQ(pthread_join(other, NULL), 0);
    sim_hook(NULL, NULL);
    EXPECT_EQ(error, cudaErrorInvalidResourceHandle);
    finish();
}

static galloc_pool *pool_that_ends(void)
{
    galloc_pool *pool;
    begin();
    pool = pool_new(NULL);
    watches = pthread_self();
    other_is_there = call_is_over = 0;
    watched = &inside_pool(pool)->users;
    sim_hook(once_the_pool_is_empty, NULL);
    return pool;
}

TEST(a_request_that_has_seen_a_pool_before_its_end_is_refused)
{
    void *p = NULL;
    galloc_pool *pool = pool_that_ends();
    wait_for_the_end(galloc_pool_malloc(pool, &p, KIB(4), NULL));
    EXPECT(!p);
}

TEST(a_look_that_has_seen_a_pool_before_its_end_is_refused)
{
    galloc_stats stats;
    galloc_pool *pool = pool_that_ends();
    wait_for_the_end(galloc_pool_stats(pool, &stats));
}

TEST_MAIN()
