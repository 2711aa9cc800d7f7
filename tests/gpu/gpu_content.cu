/* gpu_content.cu - does every block keep what was written to it until it is freed? content.h says what the threads do;
   here they do it with each kind of segment.

   gpu_content [--seconds N] [--threads N] [--limit-mib N] [--seed N] */

#include "content.h"

#include <unistd.h>

static void show_progress(int left)
{
    fprintf(stderr, "\r%4d s left ", left);
    if (left == 0) fprintf(stderr, "\r             \r");
}

static void run_round(const char *name, int expandable, double overhead)
{
    content c = {};
    galloc_config config = galloc_config_default();
    int ours = seconds / 3 > 0 ? seconds / 3 : 1;
    config.expandable_segments = expandable;
    config.overhead = overhead;
    config.memory_limit = limit;
    OK(galloc_pool_create(&c.pool, &config));
    std::chrono::steady_clock::time_point end = std::chrono::steady_clock::now() + std::chrono::seconds(ours);
    std::vector<std::thread> threads;
    for (int i = 0; i < thread_count; i++) threads.push_back(std::thread(work_on, &c, (uint64_t)i + 1, end));
    for (int left = ours; left > 0; left--) {
        if (isatty(2)) show_progress(left);
        std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    if (isatty(2)) show_progress(0);
    for (size_t i = 0; i < threads.size(); i++) threads[i].join();

    unsigned long long wrong = device_wrong();
    galloc_stats stats = stats_of(c.pool);
    printf("%s: %u blocks filled, %llu comparisons of %.1f GiB in all, %llu wrong words\n", name, c.next_tag.load(),
           c.compared.load(), (double)c.bytes.load() / (1 << 30), wrong);
    printf("    %llu used by a second stream, %llu by a second thread, %llu resized, %llu refused for want of memory\n",
           c.other_stream.load(), c.handed_over.load(), c.resized.load(), c.refused.load());
    printf("    %llu streams replaced, %llu trims, %zu MiB held at most of %zu\n", c.streams.load(), c.trims.load(),
           stats.reserved.peak >> 20, limit >> 20);
    printf("    %llu marks, %llu waits, %llu pages moved\n", (unsigned long long)stats.marks,
           (unsigned long long)stats.waits, (unsigned long long)stats.moves);
    EXPECT_EQ(wrong, 0);
    EXPECT(c.compared > 0);
    EXPECT(stats.reserved.peak <= limit);
    EXPECT_EQ(stats.live.current, 0);
    OK(galloc_pool_trim(c.pool, 0, NULL));
    EXPECT_EQ(stats_of(c.pool).reserved.current, 0);
    pool_end(c.pool);
    finish();
}

TEST(contents_with_expandable_segments) { run_round("expandable segments", 1, galloc_config_default().overhead); }

TEST(contents_with_pages_that_move_at_once) { run_round("expandable segments, overhead 0", 1, 0); }

TEST(contents_with_fixed_segments) { run_round("fixed segments", 0, 0); }

int main(int argc, char **argv)
{
    seed = test_seed();
    for (int i = 1; i < argc; i += 2) {
        unsigned long long value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (value && !strcmp(argv[i], "--seconds")) seconds = (int)value;
        else if (value && !strcmp(argv[i], "--threads")) thread_count = (int)value;
        else if (value && !strcmp(argv[i], "--limit-mib")) limit = mib(value);
        else if (value && !strcmp(argv[i], "--seed")) seed = value;
        else return fprintf(stderr, "%s [--seconds N] [--threads N] [--limit-mib N] [--seed N]\n", argv[0]), 1;
    }
    int status = work_start();
    if (status) return status;
    printf("seed %llu, %d threads, %d streams each, a limit of %zu MiB\n", (unsigned long long)seed, thread_count,
           (int)STREAMS, limit >> 20);
    return test_main(1, argv);
}
