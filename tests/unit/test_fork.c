/* test_fork.c - how galloc begins to watch for forks, with a pthread_atfork that fails or takes its time. This program
   has a galloc of its own; test_errors.c has the other tests of forks. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void handler(void);
static int watch(handler *before, handler *after, handler *child);
static pid_t process(void);
#define pthread_atfork watch
#define getpid process
#include "inside.c"
#undef pthread_atfork
#undef getpid

#include "setup.h"

static int failures; /* calls that are to fail */
static enum { QUICK, SLOW, REGISTERED, GOES_ON } stage;

static void reach(int next) { __atomic_store_n((int *)&stage, next, __ATOMIC_SEQ_CST); }
static int reached(void) { return __atomic_load_n((int *)&stage, __ATOMIC_SEQ_CST); }

static int watch(handler *before, handler *after, handler *child)
{
    int result = failures-- > 0 ? ENOMEM : pthread_atfork(before, after, child);
    if (reached() != SLOW) return result;
    reach(REGISTERED);
    while (reached() != GOES_ON) usleep(100);
    return result;
}

static __thread int slowly;

static pid_t process(void)
{
    if (slowly) usleep(200000);
    return getpid();
}

/* The status of a child process that runs a function; -1 if it does not end within five seconds. */
static int in_child(int run(void))
{
    int status = 0;
    pid_t child = fork();
    if (!child) {
        alarm(5);
        _exit(run());
    }
    EXPECT(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int fail_once(void)
{
    void *p = NULL;
    failures = 1;
    if (galloc_malloc(&p, KIB(4), NULL) != cudaErrorMemoryAllocation || p) return 1;
    return galloc_malloc(&p, KIB(4), NULL) ? 2 : galloc_free(p, NULL) ? 3 : 0;
}

/* Host memory that is missing once fails one call. */
TEST(a_watch_that_fails_is_tried_again) { EXPECT_EQ(in_child(fail_once), 0); }

static int log_a_line(void)
{
    galloc_config config = galloc_config_default();
    return galloc_config_parse(&config, "no_such_key:1", NULL, 0) != cudaErrorInvalidValue;
}

static void *hold_the_log(void *arg)
{
    inside_hold_log(1);
    reach(REGISTERED);
    while (reached() != GOES_ON) usleep(100);
    inside_hold_log(0);
    return arg;
}

static int fork_beside_a_line(void)
{
    pthread_t thread;
    int status;
    if (log_a_line() || pthread_create(&thread, NULL, hold_the_log, NULL)) return 1;
    while (reached() != REGISTERED) usleep(100);
    status = in_child(log_a_line);
    reach(GOES_ON);
    return pthread_join(thread, NULL) || status;
}

/* Calls that only log watch for forks, too: another thread may be writing a line then, which the child does not wait
   for. */
TEST(a_process_whose_calls_only_log_may_fork) { EXPECT_EQ(in_child(fork_beside_a_line), 0); }

static void *name_a_tag(void *arg)
{
    OK(galloc_tag_name(1, "one"));
    return arg;
}

static int nothing(void) { return 0; }

static int fork_again(void)
{
    reach(QUICK);
    if (galloc_tag_name(2, "two")) return 1;
    return in_child(nothing);
}

static int fork_while_it_begins(void)
{
    pthread_t thread;
    int status;
    reach(SLOW);
    if (pthread_create(&thread, NULL, name_a_tag, NULL)) return 1;
    while (reached() != REGISTERED) usleep(100);
    status = in_child(fork_again);
    reach(GOES_ON);
    return pthread_join(thread, NULL) ? 2 : status;
}

/* A child of such a fork registers the handlers again, and may fork. */
TEST(handlers_that_are_registered_twice_lock_once) { EXPECT_EQ(in_child(fork_while_it_begins), 0); }

static void ignore_line(int level, const char *text, void *user);

static void *set_the_log(void *arg)
{
    usleep(100000);
    galloc_set_log(ignore_line, NULL);
    return arg;
}

static int log_while_the_first_fork_begins(void)
{
    pthread_t thread;
    int status;
    void *p = NULL;
    if (galloc_malloc(&p, KIB(4), NULL) || pthread_create(&thread, NULL, set_the_log, NULL)) return 1;
    slowly = 1;
    status = in_child(nothing);
    slowly = 0;
    if (pthread_join(thread, NULL) || status) return 2;
    return galloc_free(p, NULL) ? 3 : 0;
}

/* A thread of the parent that asks whether it is in a child, while another is about to fork for the first time, is
   not. */
TEST(a_thread_beside_the_first_fork_is_in_the_parent) { EXPECT_EQ(in_child(log_while_the_first_fork_begins), 0); }

/* The program's own handlers, registered before galloc's: in the child they run before galloc's does. */
static int uses_driver;
static void *block;

static void ignore_line(int level, const char *text, void *user)
{
    (void)level;
    (void)text;
    (void)user;
}

static void call_around_fork(void)
{
    pthread_t thread;
    EXPECT_EQ(pthread_create(&thread, NULL, name_a_tag, NULL), 0);
    EXPECT_EQ(pthread_join(thread, NULL), 0);
    OK(galloc_tag_name(7, "seven"));
    galloc_set_log(ignore_line, NULL);
    if (uses_driver) EXPECT_EQ(galloc_free(&block, NULL), cudaErrorInvalidDevicePointer); /* logs */
}

static void call_in_child(void)
{
    cudaError_t refused = uses_driver ? cudaErrorInitializationError : cudaSuccess;
    galloc_pointer info;
    EXPECT_EQ(galloc_tag_name(7, "seven"), refused);
    galloc_set_log(ignore_line, NULL);
    if (!uses_driver) return;
    EXPECT_EQ(galloc_pointer_info(block, &info), refused);
    EXPECT_EQ(galloc_free(block, NULL), refused); /* logs */
    EXPECT_EQ(galloc_pool_check(NULL), -1);
}

static int any_failure(void) { return test_failures != 0; }

static int fork_with_handlers(void)
{
    int status;
    EXPECT_EQ(pthread_atfork(call_around_fork, call_around_fork, call_in_child), 0);
    if (uses_driver) OK(galloc_malloc(&block, KIB(4), NULL));
    else OK(galloc_tag_name(7, "seven"));
    status = in_child(any_failure);
    if (uses_driver) OK(galloc_free(block, NULL));
    return status ? status : any_failure();
}

TEST(fork_handlers_of_the_program_may_call_galloc)
{
    for (uses_driver = 0; uses_driver < 2; uses_driver++) EXPECT_EQ(in_child(fork_with_handlers), 0);
}

static cudaError_t first;

static void use_the_driver(void) { first = galloc_malloc(&block, KIB(4), NULL); }

static int use_it_again(void)
{
    OK(first);
    OK(galloc_free(block, NULL));
    OK(galloc_malloc(&block, KIB(4), NULL));
    OK(galloc_free(block, NULL));
    return any_failure();
}

static int fork_before_the_driver(void)
{
    EXPECT_EQ(pthread_atfork(NULL, NULL, use_the_driver), 0);
    OK(galloc_tag_name(7, "seven"));
    return in_child(use_it_again);
}

/* A child whose parent has used no driver may use it, from its first handler on. */
TEST(a_child_may_be_the_first_to_use_the_driver) { EXPECT_EQ(in_child(fork_before_the_driver), 0); }

static int fork_after_a_driver_that_fails(void)
{
    begin();
    sim_fail("cuInit", 1, 0, cudaErrorNoDevice);
    EXPECT_EQ(galloc_malloc(&block, KIB(4), NULL), cudaErrorNoDevice);
    EXPECT_EQ(sim_failed(), 1);
    sim_fail_clear();
    EXPECT_EQ(pthread_atfork(NULL, NULL, use_the_driver), 0);
    return in_child(use_it_again) || any_failure();
}

/* So may one whose parent's first call has failed to begin. */
TEST(a_child_may_use_the_driver_that_its_parent_could_not) { EXPECT_EQ(in_child(fork_after_a_driver_that_fails), 0); }

TEST_MAIN()
