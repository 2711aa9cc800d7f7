/* test_config.c - the language of GALLOC_CONF: what each key takes, its bounds, what is said when it is wrong, which
   settings have no effect beside others, and that what is printed can be read back. What the settings do is tested
   where it is done. */

#include "setup.h"
#include "test.h"

static galloc_config parsed(const char *text)
{
    galloc_config config = galloc_config_default();
    char message[400] = "x";
    cudaError_t err = galloc_config_parse(&config, text, message, sizeof message);
    if (err) printf("    \"%s\": %s\n", text, message);
    EXPECT_EQ(err, cudaSuccess);
    return config;
}

static const char *printed(const galloc_config *config)
{
    static char texts[2][GALLOC_CONFIG_TEXT];
    static int turn;
    char *text = texts[turn ^= 1];
    EXPECT_EQ(galloc_config_print(config, text, GALLOC_CONFIG_TEXT), cudaSuccess);
    return text;
}

/* Does `pair` stand between the commas of the configuration as it is printed? */
static int prints(const galloc_config *config, const char *pair)
{
    char text[GALLOC_CONFIG_TEXT + 2], wanted[400];
    snprintf(text, sizeof text, ",%s,", printed(config));
    snprintf(wanted, sizeof wanted, ",%s,", pair);
    return strstr(text, wanted) != NULL;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

typedef struct value_case {
    const char *text;
    const char *canon; /* as it is printed; NULL: like `text` */
} value_case;

/* The least and the greatest value of each key, every word, every unit. */
static const value_case values[] = {
    {"like:galloc", NULL},
    {"like:pytorch", NULL},
    {"backend:native", NULL},
    {"backend:cudaMalloc", NULL},
    {"backend:cudaMallocAsync", NULL},
    {"strategy:caching", NULL},
    {"strategy:pooled", NULL},
    {"strategy:heuristic", NULL},
    {"expandable_segments:True", NULL},
    {"expandable_segments:False", NULL},
    {"reuse:none", NULL},
    {"reuse:completed", NULL},
    {"reuse:followed", NULL},
    {"reuse:wait", NULL},
    {"reuse:wait+completed", "reuse:completed+wait"},
    {"reuse:completed+followed+wait", NULL},
    {"stream_check:on", NULL},
    {"stream_check:off", NULL},
    {"stats:exact", NULL},
    {"stats:fast", NULL},
    {"memory_limit:0", NULL},
    {"memory_limit:1", NULL},
    {"memory_limit:1025", NULL},
    {"memory_limit:1024", "memory_limit:1K"},
    {"memory_limit:512K", NULL},
    {"memory_limit:20M", NULL},
    {"memory_limit:2048M", "memory_limit:2G"},
    {"memory_limit:17179869183G", NULL},
    {"memory_limit:18446744073709551614", NULL},
    {"memory_limit:none", NULL},
    {"memory_limit:18446744073709551615", "memory_limit:none"},
    {"memory_limit_mb:20", "memory_limit:20M"},
    {"memory_limit_mb:17592186044415", "memory_limit:17592186044415M"},
    {"per_process_memory_fraction:0", NULL},
    {"per_process_memory_fraction:0.0", "per_process_memory_fraction:0"},
    {"per_process_memory_fraction:0.5", NULL},
    {"per_process_memory_fraction:0.499", NULL},
    {"per_process_memory_fraction:1", NULL},
    {"per_process_memory_fraction:1.000000", "per_process_memory_fraction:1"},
    {"device_limit:3G", NULL},
    {"device_limit:none", NULL},
    {"device_limit_mb:1", "device_limit:1M"},
    {"overhead:0", NULL},
    {"overhead:0.02", NULL},
    {"overhead:.125", "overhead:0.125"},
    {"overhead:0.000001", NULL},
    {"overhead:100", NULL},
    {"growth:auto", NULL},
    {"growth:2M", NULL},
    {"growth:1G", NULL},
    {"growth_mb:64", "growth:64M"},
    {"lane_bytes:0", NULL},
    {"lane_bytes:1", NULL},
    {"lane_bytes:1M", NULL},
    {"lane_bytes:64M", NULL},
    {"lane_bytes_mb:3", "lane_bytes:3M"},
    {"large_segment_size:20M", NULL},
    {"large_segment_size:10485761", NULL},
    {"large_segment_size_mb:11", "large_segment_size:11M"},
    {"large_segment_size:1024G,max_split_size:none", "large_segment_size:1024G"},
    {"max_split_size:20M", NULL},
    {"max_split_size_mb:128", "max_split_size:128M"},
    {"max_split_size:none", NULL},
    {"max_non_split_rounding:20M", NULL},
    {"max_non_split_rounding:auto", NULL},
    {"max_non_split_rounding_mb:40", "max_non_split_rounding:40M"},
    {"roundup_power2_divisions:0", NULL},
    {"roundup_power2_divisions:1", NULL},
    {"roundup_power2_divisions:8", NULL},
    {"roundup_power2_divisions:1073741824", NULL},
    {"gc_threshold:0", NULL},
    {"gc_threshold:0.8", NULL},
    {"gc_threshold:0.999999", NULL},
    {"garbage_collection_threshold:0.6", "gc_threshold:0.6"},
    {"gc_age:none", NULL},
    {"gc_age:0ms", NULL},
    {"gc_age:500ms", NULL},
    {"gc_age:1000ms", "gc_age:1s"},
    {"gc_age:30s", NULL},
    {"gc_age:90s", NULL},
    {"gc_age:5m", NULL},
    {"gc_age:24h", NULL},
    {"gc_age:18446744073709ms", NULL},
    {"release_threshold:0", NULL},
    {"release_threshold:none", NULL},
    {"release_threshold_mb:7", "release_threshold:7M"},
    {"wait_limit_ms:0", NULL},
    {"wait_limit_ms:1000000000", NULL},
    {"wait_limit_ms:none", NULL},
    {"max_retries:0", NULL},
    {"max_retries:1000", NULL},
    {"throw_on_cudamalloc_oom:True", NULL},
    {"throw_on_cudamalloc_oom:False", NULL},
    {"history:0", "history:off"},
    {"history:off", NULL},
    {"history:1", NULL},
    {"history:16777216", NULL},
    {"history_stacks:0", "history_stacks:off"},
    {"history_stacks:32", NULL},
    {"gpu_direct_rdma:True", NULL},
    {"gpu_direct_rdma:False", NULL},
};

TEST(each_value_is_read_and_printed)
{
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        galloc_config config = parsed(values[i].text);
        const char *canon = values[i].canon ? values[i].canon : values[i].text;
        if (!prints(&config, canon)) {
            /* `like` has no comma before it */
            int first = strncmp(printed(&config), canon, strlen(canon)) == 0;
            if (!first) printf("    \"%s\" becomes \"%s\"\n", values[i].text, printed(&config));
            EXPECT(first);
        }
        EXPECT_EQ(config.device, -1);
    }
}

/* Most fractions are no exact numbers in binary. */
TEST(fractions_come_back_as_they_were_written)
{
    for (int i = 1; i < 1000; i += 1 + (i % 10 == 9)) { /* none ends in a 0 */
        char text[64];
        snprintf(text, sizeof text, "overhead:0.%06d", i);
        galloc_config config = parsed(text);
        EXPECT(prints(&config, text));
    }
}

/* Digits after the sixth behind the point do not count, nor do they make a fraction too large. */
TEST(fractions_have_six_digits)
{
    galloc_config config = parsed("overhead:0.0200009,gc_threshold:0.9999999,per_process_memory_fraction:1.0000009");
    EXPECT(config.overhead == 0.02);
    EXPECT(config.gc_threshold == 0.999999);
    EXPECT(config.per_process_memory_fraction == 1);
    config = parsed("overhead:0.00000099999999999999999999999999999999999999999999");
    EXPECT(config.overhead == 0);
}

/* expandable_segments:False and reuse:none, unless the text says otherwise. */
TEST(like_pytorch_has_its_own_defaults)
{
    static const struct {
        const char *text;
        int expandable_segments, reuse;
    } cases[] = {
        {"like:galloc", 1, GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT},
        {"like:pytorch", 0, 0},
        {"like:pytorch,expandable_segments:True", 1, 0},
        {"like:pytorch,reuse:wait", 0, GALLOC_REUSE_WAIT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        galloc_config config = parsed(cases[i].text);
        EXPECT_EQ(config.expandable_segments, cases[i].expandable_segments);
        EXPECT_EQ(config.reuse, cases[i].reuse);
    }
}

TEST(values_reach_the_members)
{
    galloc_config c = parsed("like:pytorch,backend:cudaMallocAsync,strategy:pooled,expandable_segments:True,"
                             "reuse:followed,stream_check:off,stats:exact,memory_limit:1G,"
                             "per_process_memory_fraction:0.25,device_limit:2G,overhead:0.125,growth:4M,"
                             "lane_bytes:5M,large_segment_size:24M,max_split_size:48M,max_non_split_rounding:32M,"
                             "roundup_power2_divisions:4,gc_threshold:0.75,gc_age:3s,release_threshold:5M,"
                             "wait_limit_ms:7,max_retries:3,throw_on_cudamalloc_oom:True,history:77,"
                             "history_stacks:8,gpu_direct_rdma:True");
    EXPECT_EQ(c.like, GALLOC_LIKE_PYTORCH);
    EXPECT_EQ(c.backend, GALLOC_BACKEND_CUDA_MALLOC_ASYNC);
    EXPECT_EQ(c.strategy, GALLOC_STRATEGY_POOLED);
    EXPECT_EQ(c.expandable_segments, 1);
    EXPECT_EQ(c.reuse, GALLOC_REUSE_FOLLOWED);
    EXPECT_EQ(c.stream_check, 0);
    EXPECT_EQ(c.stats_exact, 1);
    EXPECT_EQ(c.memory_limit, GIB(1));
    EXPECT(c.per_process_memory_fraction == 0.25);
    EXPECT_EQ(c.device_limit, GIB(2));
    EXPECT(c.overhead == 0.125);
    EXPECT_EQ(c.growth, MIB(4));
    EXPECT_EQ(c.lane_bytes, MIB(5));
    EXPECT_EQ(c.large_segment_size, MIB(24));
    EXPECT_EQ(c.max_split_size, MIB(48));
    EXPECT_EQ(c.max_non_split_rounding, MIB(32));
    for (int i = 0; i < GALLOC_DIVISIONS; i++) EXPECT_EQ(c.roundup_power2_divisions[i], 4);
    EXPECT(c.gc_threshold == 0.75);
    EXPECT_EQ(c.gc_age, 3000000000);
    EXPECT_EQ(c.release_threshold, MIB(5));
    EXPECT_EQ(c.wait_limit_ms, 7);
    EXPECT_EQ(c.max_retries, 3);
    EXPECT_EQ(c.throw_on_cudamalloc_oom, 1);
    EXPECT_EQ(c.history, 77);
    EXPECT_EQ(c.history_stacks, 8);
    EXPECT_EQ(c.gpu_direct_rdma, 1);
}

/* PyTorch's rules: a pair [B:d] sets sizes from B to 2 B MiB, the first one all below as well, > all above the last
   one; what is between is not set. */
TEST(lists_of_divisions)
{
    static const struct {
        const char *text, *canon;
        unsigned is[GALLOC_DIVISIONS];
    } cases[] = {
        {"[256:1,512:2,1024:4,>:8]", "[1:1,2:1,4:1,8:1,16:1,32:1,64:1,128:1,256:1,512:2,1024:4,>:8]",
         {1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8}},
        {"[64:8]", "[1:8,2:8,4:8,8:8,16:8,32:8,64:8,>:0]", {8, 8, 8, 8, 8, 8, 8}},
        {"[1:2,4:4]", "[1:2,2:0,4:4,>:0]", {2, 0, 4}},
        {"[>:2]", "2", {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}},
        {"[32768:2,>:4]", "2", {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}},
        {"[32768:2]", "2", {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2}},
        {"[1:0,>:4]", "[1:0,>:4]", {0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[300], canon[300];
        snprintf(text, sizeof text, "roundup_power2_divisions:%s,memory_limit:1G", cases[i].text);
        snprintf(canon, sizeof canon, "roundup_power2_divisions:%s", cases[i].canon);
        galloc_config config = parsed(text);
        for (int k = 0; k < GALLOC_DIVISIONS; k++) EXPECT_EQ(config.roundup_power2_divisions[k], cases[i].is[k]);
        EXPECT_EQ(config.memory_limit, GIB(1));
        EXPECT(prints(&config, canon));
        const galloc_config plain = parsed("memory_limit:1G");
        memset(config.roundup_power2_divisions, 0, sizeof config.roundup_power2_divisions);
        EXPECT_EQ(memcmp(&config, &plain, sizeof config), 0); /* what stands behind the list is as it was */
    }
}

/* ---- errors ------------------------------------------------------------------------------------------------------ */

typedef struct wrong_case {
    const char *text;
    const char *says[3]; /* parts of the message: the place, the text, what would be right */
} wrong_case;

static const wrong_case wrong[] = {
    {"overhed:0.02", {"at 1:", "unknown key 'overhed'", "perhaps overhead?"}},
    {"memory_limit:1G,gc_treshold:0.5", {"at 17:", "'gc_treshold'", "perhaps gc_threshold?"}},
    {"max_split_size_kb:5", {"at 1:", "'max_split_size_kb'", "perhaps max_split_size?"}},
    {"zzz:1", {"at 1:", "'zzz'", "the keys are the members of galloc_config"}},
    {"overhead_mb:1", {"at 1:", "unknown key 'overhead_mb'", NULL}},
    {"max_retries_mb:1", {"at 1:", "unknown key 'max_retries_mb'", NULL}},
    {"_mb:1", {"at 1:", "unknown key '_mb'", NULL}},
    {"memory_limit", {"at 1:", "'memory_limit' needs ':'", "bytes, or a number with K, M or G, or none"}},
    {"overhead:0,memory_limit_mb", {"at 12:", "'memory_limit_mb' needs ':'", "a whole number of MiB"}},
    {",", {"at 1:", "a key is missing", "key:value pairs with commas between"}},
    {"memory_limit:1G,", {"at 17:", "a key is missing", NULL}},
    {"memory_limit:1G,,overhead:0", {"at 17:", "a key is missing", NULL}},
    {":1", {"at 1:", "a key is missing", NULL}},
    {"memory_limit=1G", {"at 1:", "'memory_limit=1G'", "':' for '='"}},
    {" overhead:0", {"at 1:", "unknown key ' overhead'", "perhaps overhead?"}},
    {"Memory_Limit:1G", {"unknown key 'Memory_Limit'", "perhaps memory_limit?", NULL}},
    {"OVERHEAD:0", {"unknown key 'OVERHEAD'", "perhaps overhead?", NULL}},
    {"memory_limit:1G\n", {"'1G?' is no value for memory_limit", NULL, NULL}},
    {"\nmemory_limit:1G", {"unknown key '?memory_limit'", "perhaps memory_limit?", NULL}},
    {"memory_limit\033c\177:1", {"unknown key 'memory_limit?c?'", NULL, NULL}},
    {"overhead_limit\t", {"unknown key 'overhead_limit?'", NULL, NULL}},
    {"reuse:wait,reuse:wait", {"at 12:", "'reuse' is given twice", NULL}},
    {"memory_limit:1G,memory_limit_mb:5", {"at 17:", "'memory_limit' is given twice", NULL}},
    {"gc_threshold:0.5,garbage_collection_threshold:0.6", {"at 18:", "'garbage_collection_threshold' is given twice"}},
    {"overhead:0.1,like:pytorch", {"at 14:", "'like' must come first", NULL}},
    {"memory_limit_mb:100,like:pytorch", {"at 21:", "'like' must come first", NULL}},
    {"like:torch", {"at 1:", "'torch' is no value for like", "galloc or pytorch"}},
    {"backend:cudamalloc", {"'cudamalloc' is no value for backend", "native, cudaMalloc or cudaMallocAsync"}},
    {"strategy:", {"'' is no value for strategy", "caching, pooled or heuristic"}},
    {"expandable_segments:true", {"'true'", "expandable_segments", "True or False"}},
    {"reuse:none+wait", {"'none+wait' is no value for reuse", "joined by '+'", NULL}},
    {"reuse:wait+wait", {"'wait+wait'", "reuse", "joined by '+'"}},
    {"stream_check:True", {"'True'", "stream_check", "on or off"}},
    {"stats:slow", {"'slow'", "stats", "exact or fast"}},
    {"memory_limit:1T", {"'1T'", "memory_limit", "K, M or G, or none"}},
    {"memory_limit:17179869184G", {"'17179869184G' is out of range for memory_limit: must be less than 2^64 bytes: ",
                                   "bytes: bytes, or a number with K, M or G, or none", NULL}},
    {"memory_limit:18446744073709551616", {"out of range for memory_limit", "less than 2^64 bytes", NULL}},
    {"memory_limit_mb:17592186044416", {"out of range for memory_limit_mb", "2^64 bytes: a whole number of MiB", NULL}},
    {"memory_limit:18446744073709551616T", {"no value for memory_limit", NULL, NULL}},
    {"memory_limit_mb:17592186044416M", {"no value for memory_limit_mb", NULL, NULL}},
    {"memory_limit:-18446744073709551616", {"no value for memory_limit", NULL, NULL}},
    {"growth:18446744073709551616", {"out of range for growth: must be a power of two from 2M to 1G", NULL, NULL}},
    {"max_retries:18446744073709551616", {"out of range for max_retries", "from 0 to 1000", NULL}},
    {"gc_age:5124096h", {"out of range for gc_age", "less than 2^64 ns: whole ms, as a number with ms", NULL}},
    {"memory_limit_mb:5M", {"'5M' is no value for memory_limit_mb", "a whole number of MiB", NULL}},
    {"memory_limit:auto", {"'auto'", "must be bytes, or a number with K, M or G, or none", NULL}},
    {"per_process_memory_fraction:-0.1", {"'-0.1'", "per_process_memory_fraction", "from 0 to 1"}},
    {"per_process_memory_fraction:1.1", {"'1.1' is out of range", "per_process_memory_fraction", "from 0 to 1"}},
    {"per_process_memory_fraction:1.000001", {"is out of range", "from 0 to 1", NULL}},
    {"device_limit:lots", {"'lots'", "device_limit", "must be bytes, or a number with K, M or G, or none"}},
    {"overhead:100.000001", {"is out of range for overhead", "from 0 to 100", NULL}},
    {"overhead:0.0.2", {"'0.0.2' is no value for overhead", "a fraction", NULL}},
    {"overhead:nan", {"'nan'", "overhead", "a fraction"}},
    {"growth:1M", {"'1M' is out of range for growth", "a power of two from 2M to 1G, or auto", NULL}},
    {"growth:2G", {"out of range for growth", NULL, NULL}},
    {"growth:6M", {"out of range for growth", "a power of two", NULL}},
    {"growth:none", {"no value for growth", "auto", NULL}},
    {"lane_bytes:67108865", {"'67108865' is out of range for lane_bytes", "0 to 64M", NULL}},
    {"lane_bytes:65M", {"out of range for lane_bytes", NULL, NULL}},
    {"lane_bytes:none", {"'none' is no value for lane_bytes", "0 to 64M", NULL}},
    {"lane_byte:1M", {"unknown key 'lane_byte'", "perhaps lane_bytes?", NULL}},
    {"large_segment_size:10M", {"out of range for large_segment_size", "more than 10M", NULL}},
    {"large_segment_size_mb:10", {"out of range for large_segment_size_mb", "more than 10M", NULL}},
    {"large_segment_size:1025G", {"out of range for large_segment_size", "at most 1024G", NULL}},
    {"max_split_size:auto", {"'auto'", "max_split_size", "must be bytes, or a number with K, M or G, or none"}},
    {"max_split_size_mb:19", {"at 1:", "max_split_size is 19M", "at least large_segment_size, which is 20M"}},
    {"max_split_size:0", {"at 1:", "max_split_size is 0:", "at least large_segment_size, which is 20M"}},
    {"overhead:0,max_split_size:20M,large_segment_size:21M",
     {"at 31:", "max_split_size is 20M", "large_segment_size, which is 21M"}},
    {"large_segment_size:21M,max_split_size:20971521", {"at 24:", "max_split_size is 20971521:", NULL}},
    {"max_non_split_rounding:none",
     {"'none'", "max_non_split_rounding", "must be bytes, or a number with K, M or G, or auto"}},
    {"max_non_split_rounding:19M",
     {"at 1:", "max_non_split_rounding is 19M", "at least large_segment_size, which is 20M"}},
    {"roundup_power2_divisions:3", {"out of range for roundup_power2_divisions", "two up to 1073741824", NULL}},
    {"roundup_power2_divisions:-4", {"no value for roundup_power2_divisions", NULL, NULL}},
    {"roundup_power2_divisions:2147483648", {"out of range for roundup_power2_divisions", "up to 1073741824", NULL}},
    {"roundup_power2_divisions:2147483648M", {"no value for roundup_power2_divisions", NULL, NULL}},
    {"roundup_power2_divisions:[]", {"'[]'", "a list such as [256:1,512:2,>:4]", NULL}},
    {"roundup_power2_divisions:[256:1", {"no value for roundup_power2_divisions", NULL, NULL}},
    {"roundup_power2_divisions:[256:12", {"no value for roundup_power2_divisions", NULL, NULL}},
    {"roundup_power2_divisions:[256]", {"no value for roundup_power2_divisions", NULL, NULL}},
    {"roundup_power2_divisions:[256:3]", {"out of range for roundup_power2_divisions", NULL, NULL}},
    {"roundup_power2_divisions:[300:1]", {"no value for", "rising powers of two", NULL}},
    {"roundup_power2_divisions:[512:1,256:2]", {"no value for", "rising powers of two", NULL}},
    {"roundup_power2_divisions:[256:1,256:2]", {"no value for", NULL, NULL}},
    {"roundup_power2_divisions:[>:1,256:2]", {"no value for", NULL, NULL}},
    {"roundup_power2_divisions:[32768:1,>:2,>:2]", {"no value for", NULL, NULL}},
    {"roundup_power2_divisions:[32768:1,32768:2]", {"no value for", NULL, NULL}},
    {"roundup_power2_divisions:[65536:1]", {"no value for", "rising powers of two up to 32768", NULL}},
    {"roundup_power2_divisions:[0:1]", {"no value for", NULL, NULL}},
    {"roundup_power2_divisions:[256:1,]", {"no value for", NULL, NULL}},
    {"roundup_power2_divisions:[[256:1]]", {"no value for", NULL, NULL}},
    {"gc_threshold:1", {"'1' is out of range for gc_threshold", "from 0 to 0.999999", NULL}},
    {"garbage_collection_threshold:1", {"'1' is out of range for garbage_collection_threshold", "0.999999", NULL}},
    {"garbage_collection_threshold:1.2", {"'1.2' is out of range for garbage_collection_threshold", "0.999999", NULL}},
    {"gc_age:5", {"'5' is no value for gc_age", "ms, s, m or h, or none", NULL}},
    {"gc_age:5 s", {"no value for gc_age", NULL, NULL}},
    {"gc_age:s", {"no value for gc_age", NULL, NULL}},
    {"gc_age:1.5s", {"no value for gc_age", NULL, NULL}},
    {"gc_age:0", {"'0' is no value for gc_age", "whole ms, as a number with ms, s, m or h, or none", NULL}},
    {"gc_age:18446744073710ms", {"out of range for gc_age", NULL, NULL}},
    {"gc_age:99999999999h", {"out of range for gc_age", NULL, NULL}},
    {"release_threshold:-1",
     {"'-1'", "no value for release_threshold", "must be bytes, or a number with K, M or G, or none"}},
    {"wait_limit_ms:1000000001", {"out of range for wait_limit_ms", "at most 1000000000", NULL}},
    {"wait_limit_ms:5s", {"no value for wait_limit_ms", NULL, NULL}},
    {"max_retries:1001", {"out of range for max_retries", "from 0 to 1000", NULL}},
    {"max_retries:none", {"no value for max_retries", NULL, NULL}},
    {"throw_on_cudamalloc_oom:1", {"no value for throw_on_cudamalloc_oom", "True or False", NULL}},
    {"history_stacks:33", {"out of range for history_stacks", "frames up to 32, or off", NULL}},
    {"history:16777217", {"out of range for history", "up to 16777216, or off", NULL}},
    {"snapshot_on_oom:", {"no value for snapshot_on_oom", "%p, %d and %%", NULL}},
    {"snapshot_on_oom:a%", {"'a%' is no value for snapshot_on_oom", NULL, NULL}},
    {"snapshot_on_oom:%%%", {"no value for snapshot_on_oom", NULL, NULL}},
    {"snapshot_on_oom:%s", {"no value for snapshot_on_oom", NULL, NULL}},
    {"trace:", {"no value for trace", "%p, %d and %%", NULL}},
    {"trace:%s", {"no value for trace", NULL, NULL}},
    {"trace:a,snapshot_on_oom:b,trace:c", {"at 27: 'trace' is given twice", NULL, NULL}},
    {"trace:[a,memory_limt:4M", {"at 10: unknown key 'memory_limt'", NULL, NULL}},
    {"snapshot_on_oom:a[b,log:off,trace:[]%s,c]", {"at 29: '[]%s' is no value for trace", NULL, NULL}},
    {"snapshot_on_oom:a\nb", {"'a?b' is no value for snapshot_on_oom", NULL, NULL}},
    {"trace:a\177b", {"'a?b' is no value for trace", NULL, NULL}},
    {"history:1K", {"'1K' is no value for history", NULL, NULL}},
    {"history:/", {"'/' is no value for history", NULL, NULL}},
    {"history::", {"':' is no value for history", NULL, NULL}},
    {"gpu_direct_rdma:yes", {"'yes' is no value for gpu_direct_rdma", "True or False", NULL}},
    {"release_lock_on_cudamalloc:none", {"no value for release_lock_on_cudamalloc", "True or False", NULL}},
    {"release_lock_on_cudamalloc:True,release_lock_on_cudamalloc:True", {"at 33:", "given twice", NULL}},
};

TEST(what_is_wrong_is_said_with_its_place_and_what_would_be_right)
{
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        galloc_config config = galloc_config_default();
        const galloc_config before = config;
        char message[600] = "";
        EXPECT_EQ(galloc_config_parse(&config, wrong[i].text, message, sizeof message), cudaErrorInvalidValue);
        for (int k = 0; k < 3 && wrong[i].says[k]; k++) {
            int said = strstr(message, wrong[i].says[k]) != NULL;
            if (!said) printf("    \"%s\": \"%s\" lacks \"%s\"\n", wrong[i].text, message, wrong[i].says[k]);
            EXPECT(said);
        }
        EXPECT(strstr(galloc_last_message(), message) != NULL);
        EXPECT(memcmp(&config, &before, sizeof config) == 0);
    }
}

TEST(the_name_of_a_file_is_bounded)
{
    char text[300] = "snapshot_on_oom:", message[300];
    galloc_config config = galloc_config_default();
    begin();
    memset(text + 16, 'x', 200);
    OK(galloc_config_parse(&config, text, message, sizeof message));
    EXPECT(!strcmp(message, "snapshot_on_oom: no effect but in the variable GALLOC_CONF"));
    OK(galloc_config_parse(&config, "trace:a,log:info,snapshot_on_oom:b", message, sizeof message));
    EXPECT(!strcmp(message, "log, snapshot_on_oom, trace: no effect but in the variable GALLOC_CONF"));
    text[16 + 200] = 'x';
    EXPECT_EQ(galloc_config_parse(&config, text, message, sizeof message), cudaErrorInvalidValue);
    memset(text + 16, '%', 200); /* expanded it would be too long */
    for (int i = 1; i < 200; i += 2) text[16 + i] = 'p';
    text[16 + 200] = 0;
    config = galloc_config_default();
    EXPECT_EQ(galloc_config_parse(&config, text, message, sizeof message),
              100 * snprintf(NULL, 0, "%ld", (long)getpid()) >= 512 ? cudaErrorInvalidValue : cudaSuccess);
    finish();
}

/* Only a list keeps what is in brackets together. */
TEST(a_bracket_in_the_name_of_a_file_is_a_character_as_others)
{
    static const char *const names[] = {"a[", "[", "[a", "a[1", "a[1]", "a]", "[a]b["};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char text[200], file[100] = "/tmp/galloc_config.XXXXXX", *folder = mkdtemp(file);
        void *p;
        EXPECT(folder);
        snprintf(text, sizeof text, "roundup_power2_divisions:[1:2,>:4],snapshot_on_oom:%s,memory_limit:4M", names[i]);
        EXPECT_EQ(parsed(text).memory_limit, MIB(4));
        begin();
        snprintf(text, sizeof text, "trace:%s/%s,memory_limit:4M,roundup_power2_divisions:[1:2,>:4]", file, names[i]);
        setenv("GALLOC_CONF", text, 1);
        EXPECT_EQ(galloc_malloc(&p, MIB(8), 0), cudaErrorMemoryAllocation);
        unsetenv("GALLOC_CONF");
        finish();
        snprintf(text, sizeof text, "%s/%s", file, names[i]);
        EXPECT_EQ(unlink(text), 0);
        EXPECT_EQ(rmdir(file), 0);
    }
}

/* The same bounds hold for members that are set by hand. */
TEST(members_out_of_range_are_refused)
{
    static const char *const says[] = {"like", "like", "backend", "strategy", "expandable_segments", "reuse",
        "stream_check", "stats", "per_process_memory_fraction", "per_process_memory_fraction", "overhead", "overhead",
        "growth", "growth", "large_segment_size", "max_split_size is 19M: must be at least large_segment_size",
        "max_non_split_rounding is 19M: must be", "roundup_power2_divisions", "gc_threshold", "gc_threshold",
        "wait_limit_ms", "max_retries", "throw_on_cudamalloc_oom", "gc_age", "overhead",
        "lane_bytes", "gpu_direct_rdma", "history", "history_stacks", "stream_check"};
    begin();
    for (int i = 0; i < 30; i++) {
        galloc_config c = galloc_config_default();
        galloc_pool *pool = NULL;
        char text[GALLOC_CONFIG_TEXT];
        switch (i) {
        case 0: c.like = 2; break;
        case 1: c.like = -1; break;
        case 2: c.backend = 3; break;
        case 3: c.strategy = 3; break;
        case 4: c.expandable_segments = 2; break;
        case 5: c.reuse = 8; break;
        case 6: c.stream_check = -1; break;
        case 7: c.stats_exact = 2; break;
        case 8: c.per_process_memory_fraction = 1.5; break;
        case 9: c.per_process_memory_fraction = -0.5; break;
        case 10: c.overhead = -1; break;
        case 11: c.overhead = 100.5; break;
        case 12: c.growth = MIB(3); break;
        case 13: c.growth = MIB(1); break;
        case 14: c.large_segment_size = MIB(10); break;
        case 15: c.max_split_size = MIB(19); break;
        case 16: c.max_non_split_rounding = MIB(19); break;
        case 17: c.roundup_power2_divisions[7] = 5; break;
        case 18: c.gc_threshold = 1; break;
        case 19: c.gc_threshold = -0.1; break;
        case 20: c.wait_limit_ms = 1000000001; break;
        case 21: c.max_retries = 1001; break;
        case 22: c.throw_on_cudamalloc_oom = 2; break;
        case 23: c.gc_age = 1500001; break;
        case 24: c.overhead = strtod("nan", NULL); break;
        case 25: c.lane_bytes = MIB(64) + 1; break;
        case 26: c.gpu_direct_rdma = 2; break;
        case 27: c.history = 16777217; break;
        case 28: c.history_stacks = 33; break;
        default: c.stream_check = 2; break;
        }
        EXPECT_EQ(galloc_pool_create(&pool, &c), cudaErrorInvalidValue);
        EXPECT(pool == NULL);
        const char *said = strstr(log_text, ": config: ");
        if (!EXPECT(said && !strncmp(said + 10, says[i], strlen(says[i]))))
            printf("    %d: %s\n", i, log_text);
        EXPECT(strstr(log_text, "must be ") != NULL);
        EXPECT_EQ(galloc_config_print(&c, text, sizeof text), cudaErrorInvalidValue);
        EXPECT_EQ(text[0], 0);
    }
    finish();
}

/* The bounds that messages name are accepted, and what lies beyond them by the least that can be said is not. */
TEST(bounds_in_messages_are_true)
{
    static const char *const texts[] = {"gc_threshold:0.999999", "garbage_collection_threshold:0.999999",
        "roundup_power2_divisions:1073741824", "roundup_power2_divisions:[32768:1073741824]", "gc_age:18446744073709ms",
        "history_stacks:32", "wait_limit_ms:1000000000", "growth:1G", "lane_bytes:64M", "large_segment_size:1024G",
        "large_segment_size:10485761", "max_retries:1000", "debug_sample:1000000000", "overhead:100"};
    static const char *const says[] = {"gc_threshold is out of range: must be a fraction from 0 to 0.999999",
        "roundup_power2_divisions is out of range: must be 0 or a power of two up to 1073741824,",
        "gc_age is out of range: must be whole ms, "};
    begin();
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        galloc_config c = galloc_config_default();
        char message[600] = "", text[GALLOC_CONFIG_TEXT];
        OK(galloc_config_parse(&c, texts[i], message, sizeof message));
        OK(galloc_config_print(&c, text, sizeof text));
    }
    for (int i = 0; i < 3; i++) {
        galloc_config c = galloc_config_default();
        char text[GALLOC_CONFIG_TEXT];
        if (i == 0) c.gc_threshold = 0.9999999;
        if (i == 1) c.roundup_power2_divisions[0] = 2147483648u;
        if (i == 2) c.gc_age = 1500000;
        EXPECT_EQ(galloc_config_print(&c, text, sizeof text), cudaErrorInvalidValue);
        if (!EXPECT(strstr(galloc_last_message(), says[i]) != NULL)) printf("    %s\n", galloc_last_message());
    }
    finish();
}

/* As many digits as each setting may have. */
TEST(the_longest_text_has_room)
{
    char text[GALLOC_CONFIG_TEXT];
    galloc_config c = galloc_config_default(), again = c;
    begin();
    for (int i = 0; i < 16; i++) c.roundup_power2_divisions[i] = i & 1 ? 1u << 29 : 1u << 30;
    size_t *const bytes[] = {&c.memory_limit, &c.device_limit, &c.max_split_size, &c.max_non_split_rounding,
                             &c.release_threshold, &c.quarantine_bytes};
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) *bytes[i] = SIZE_MAX - 1;
    c.per_process_memory_fraction = 0.123457;
    c.gc_threshold = 0.987654;
    c.overhead = 98.765432;
    c.gc_age = UINT64_MAX / 1000000 * 1000000;
    c.lane_bytes = MIB(64) - 1;
    c.history = (1 << 24) - 1;
    c.history_stacks = 32;
    c.reuse = GALLOC_REUSE_COMPLETED | GALLOC_REUSE_FOLLOWED | GALLOC_REUSE_WAIT;
    c.debug = GALLOC_DEBUG_GUARDS | GALLOC_DEBUG_POISON | GALLOC_DEBUG_QUARANTINE;
    c.debug_sample = 999999999;
    c.max_retries = 999;
    OK(galloc_config_print(&c, text, sizeof text));
    OK(galloc_config_parse(&again, text, NULL, 0));
    EXPECT(again.quarantine_bytes == SIZE_MAX - 1 && again.gc_age == c.gc_age);
    EXPECT_EQ(again.debug_sample, 999999999);
    finish();
}

/* ---- settings that stand in each other's way */

/* All that is said, each time: `says` is the whole message. */
TEST(settings_without_effect_are_named)
{
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"", ""},
        {"expandable_segments:True,overhead:0.1,growth:4M", ""},
        {"expandable_segments:False,large_segment_size:40M,max_split_size:80M,max_non_split_rounding:80M", ""},
        {"max_split_size_mb:128", "max_split_size_mb: no effect unless expandable_segments is False"},
        {"expandable_segments:True,large_segment_size_mb:40,max_split_size:64M",
         "large_segment_size_mb, max_split_size: no effect unless expandable_segments is False"},
        {"expandable_segments:False,overhead:0.1,gc_age:5s",
         "overhead, gc_age: no effect unless expandable_segments is True"},
        {"expandable_segments:False,gc_threshold:0.5",
         "gc_threshold: no effect on fixed segments, since cudaFree waits"},
        {"expandable_segments:False,max_non_split_rounding:40M",
         "max_non_split_rounding: no effect unless max_split_size is given"},
        {"strategy:heuristic,expandable_segments:False,growth:4M",
         "strategy, growth: no effect unless expandable_segments is True"},
        {"expandable_segments:False,gpu_direct_rdma:True",
         "gpu_direct_rdma: no effect unless expandable_segments is True"},
        {"strategy:heuristic,expandable_segments:False,gpu_direct_rdma:True",
         "strategy, gpu_direct_rdma: no effect unless expandable_segments is True"},
        {"gpu_direct_rdma:True", ""},
        {"backend:cudaMallocAsync,gpu_direct_rdma:True", "gpu_direct_rdma: no effect unless backend is native"},
        {"strategy:heuristic,overhead:0.1,growth:4M", ""},
        {"strategy:pooled,expandable_segments:False,roundup_power2_divisions:4", ""},
        {"backend:cudaMalloc,overhead:0.1,memory_limit:1G", "overhead: no effect unless backend is native"},
        {"backend:cudaMalloc,reuse:none,release_threshold:0",
         "reuse, release_threshold: no effect with backend:cudaMalloc"},
        {"backend:cudaMallocAsync,reuse:none,release_threshold:0", ""},
        {"backend:cudaMalloc,lane_bytes:2M", "lane_bytes: no effect unless backend is native"},
        {"like:pytorch,lane_bytes:2M", "lane_bytes: no effect with like:pytorch unless expandable_segments is True"},
        {"stats:exact,lane_bytes:2M", "lane_bytes: no effect with stats:exact, since no cache is used then"},
        {"stats:exact,strategy:heuristic,lane_bytes:2M",
         "lane_bytes: no effect with stats:exact, since no cache is used then"},
        {"stats:fast,lane_bytes:2M", ""},
        {"history_stacks:8", "history_stacks: no effect without history"},
        {"history_stacks:8,history:10", ""},
        {"like:pytorch,strategy:pooled", "strategy: no effect with like:pytorch"},
        {"like:pytorch,strategy:heuristic", "strategy: no effect with like:pytorch"},
        {"like:pytorch,reuse:wait,stats:exact,stream_check:off",
         "reuse, stats, stream_check: no effect with like:pytorch unless expandable_segments is True"},
        {"like:pytorch,expandable_segments:True,reuse:wait,stream_check:off", ""},
        {"like:pytorch,gc_threshold:0.5", "gc_threshold: no effect with like:pytorch unless there is a limit"},
        {"like:pytorch,garbage_collection_threshold:0.5",
         "garbage_collection_threshold: no effect with like:pytorch unless there is a limit"},
        {"like:pytorch,gc_threshold:0.5,memory_limit:1G", ""},
        {"like:pytorch,gc_threshold:0.5,device_limit:1G", ""},
        {"like:pytorch,gc_threshold:0.5,per_process_memory_fraction:0.5", ""},
        {"stats:exact,stream_check:off", "stream_check: no effect with stats:exact, since every call looks then"},
        {"like:pytorch,expandable_segments:True,stats:exact,stream_check:off",
         "stream_check: no effect with stats:exact, since every call looks then"},
        {"stats:fast,stream_check:off", ""},
        {"throw_on_cudamalloc_oom:True,wait_limit_ms:5,max_retries:2",
         "wait_limit_ms, max_retries: no effect with throw_on_cudamalloc_oom:True"},
        {"throw_on_cudamalloc_oom:False,wait_limit_ms:5,max_retries:2", ""},
        {"release_lock_on_cudamalloc:True",
         "release_lock_on_cudamalloc: no effect since such a lock is never held there"},
        {"backend:cudaMalloc,strategy:pooled,expandable_segments:True,stats:exact,overhead:1,growth:2M,"
         "large_segment_size:20M,max_split_size:20M,max_non_split_rounding:20M,roundup_power2_divisions:4,"
         "gc_threshold:0.5,gc_age:5s,stream_check:off,reuse:none,release_threshold:5,"
         "throw_on_cudamalloc_oom:True,wait_limit_ms:3,max_retries:4,gpu_direct_rdma:True,"
         "release_lock_on_cudamalloc:True",
         "strategy, expandable_segments, stats, overhead, growth, large_segment_size, max_split_size, "
         "max_non_split_rounding, roundup_power2_divisions, gc_threshold, gc_age, stream_check, gpu_direct_rdma: "
         "no effect unless backend is native; reuse, release_threshold: no effect with backend:cudaMalloc; "
         "wait_limit_ms, max_retries: no effect with throw_on_cudamalloc_oom:True; release_lock_on_cudamalloc: "
         "no effect since such a lock is never held there"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        galloc_config config = galloc_config_default();
        char message[600] = "x";
        EXPECT_EQ(galloc_config_parse(&config, cases[i].text, message, sizeof message), cudaSuccess);
        if (!EXPECT(!strcmp(message, cases[i].says))) printf("    \"%s\": \"%s\"\n", cases[i].text, message);
    }
}

/* What is said to have no effect has none: with each of these no call asks less about its stream. */
TEST(settings_that_are_called_idle_are)
{
    static const char *const texts[] = {"stats:exact", "like:pytorch", "backend:cudaMalloc"};
    for (int i = 0; i < 3; i++) {
        long looks[2];
        for (int off = 0; off < 2; off++) {
            char text[100];
            begin();
            snprintf(text, sizeof text, "%s%s", texts[i], off ? ",stream_check:off" : "");
            galloc_config config = parsed(text);
            galloc_pool *pool = pool_new(&config);
            cudaStream_t s = stream_new();
            for (int k = 0; k < 20; k++) OK(galloc_free(get(pool, 4096, s), s));
            looks[off] = sim_calls("cuStreamGetId");
            pool_end(pool);
            stream_end(s);
            finish();
        }
        EXPECT(looks[0] >= 40);
        EXPECT_EQ(looks[0], looks[1]);
    }
}

/* ---- printing ---------------------------------------------------------------------------------------------------- */

TEST(what_is_printed_can_be_read_back)
{
    uint64_t random = test_seed();
    for (int round = 0; round < 3000; round++) {
        galloc_config config = galloc_config_default(), back = galloc_config_default();
        for (int n = 0; n < 6; n++) {
            char message[400];
            random = random * 6364136223846793005u + 1442695040888963407u;
            (void)galloc_config_parse(&config, values[(random >> 33) % (sizeof values / sizeof *values)].text, message,
                                      sizeof message);
        }
        const char *text = printed(&config);
        EXPECT_EQ(galloc_config_parse(&back, text, NULL, 0), cudaSuccess);
        EXPECT(memcmp(&config, &back, sizeof config) == 0);
        EXPECT(strcmp(text, printed(&back)) == 0);
    }
}

TEST(a_text_that_does_not_fit_is_refused_whole)
{
    galloc_config config = galloc_config_default();
    const char *whole = printed(&config);
    char text[GALLOC_CONFIG_TEXT];
    size_t size = strlen(whole) + 1;
    memset(text, '#', sizeof text);
    OK(galloc_config_print(&config, text, size));
    EXPECT(strcmp(text, whole) == 0);
    EXPECT_EQ(text[size], '#');
    for (size_t n = 1; n < size; n++) {
        memset(text, '#', sizeof text);
        EXPECT_EQ(galloc_config_print(&config, text, n), cudaErrorInvalidValue);
        EXPECT_EQ(text[0], 0);
        EXPECT_EQ(text[n], '#');
    }
    EXPECT_EQ(galloc_config_print(&config, text, 0), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_config_print(&config, NULL, 10), cudaErrorInvalidValue);
    EXPECT_EQ(galloc_config_print(NULL, text, 10), cudaErrorInvalidValue);
}

/* ---- the environment --------------------------------------------------------------------------------------------- */

static galloc_config config_in_effect(void)
{
    galloc_pool *pool = NULL;
    galloc_config config = galloc_config_default();
    OK(galloc_pool_default(&pool, 0));
    if (pool) OK(galloc_pool_config(pool, &config));
    return config;
}

TEST(the_environment_says_what_has_no_effect)
{
    begin();
    setenv("GALLOC_CONF", "max_split_size_mb:128", 1);
    galloc_config config = config_in_effect();
    EXPECT_EQ(config.max_split_size, MIB(128));
    EXPECT_EQ(log_lines, 1);
    EXPECT(strstr(log_text, "GALLOC_CONF: max_split_size_mb: no effect") != NULL);
    unsetenv("GALLOC_CONF");
    finish();
}

TEST(pytorchs_variable_is_read_only_where_it_was_asked_for)
{
    static const struct {
        const char *ours, *theirs;
        size_t max_split;
        double threshold;
        int expandable;
    } cases[] = {
        {NULL, "max_split_size_mb:64", SIZE_MAX, 0, 1},
        {"overhead:0.1", "max_split_size_mb:64", SIZE_MAX, 0, 1},
        {"like:galloc", "max_split_size_mb:64", SIZE_MAX, 0, 1},
        {"like:pytorch", "max_split_size_mb:64", MIB(64), 0, 0},
        {"like:pytorch", " max_split_size_mb:64, garbage_collection_threshold : 0.5 ", MIB(64), 0.5, 0},
        {"like:pytorch,max_split_size:80M", "max_split_size_mb:64,garbage_collection_threshold:0.5", MIB(80), 0.5, 0},
        {"like:pytorch", "expandable_segments:True", SIZE_MAX, 0, 1},
        {"like:pytorch,expandable_segments:False", "expandable_segments:True", SIZE_MAX, 0, 0},
        {"like:pytorch", "pinned_use_cuda_host_register:True,max_split_size_mb:64,pinned_num_register_threads:8",
         MIB(64), 0, 0},
        {"like:pytorch", "graph_capture_record_stream_reuse:True", SIZE_MAX, 0, 0},
        {"like:pytorch", "expandable_segments_reserve_by_class:[a:0.5,b:40G],garbage_collection_threshold:0.5",
         SIZE_MAX, 0.5, 0},
        {"like:pytorch", "", SIZE_MAX, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin();
        if (cases[i].ours) setenv("GALLOC_CONF", cases[i].ours, 1);
        setenv("PYTORCH_CUDA_ALLOC_CONF", cases[i].theirs, 1);
        galloc_config config = config_in_effect();
        EXPECT_EQ(config.max_split_size, cases[i].max_split);
        EXPECT(config.gc_threshold == cases[i].threshold);
        EXPECT_EQ(config.expandable_segments, cases[i].expandable);
        unsetenv("GALLOC_CONF");
        unsetenv("PYTORCH_CUDA_ALLOC_CONF");
        finish();
    }
}

/* As strictly as GALLOC_CONF: an empty setting is a mistake, wherever it stands. */
TEST(pytorchs_variable_has_no_empty_settings)
{
    static const char *const texts[] = {",max_split_size_mb:64", ",,max_split_size_mb:64", "max_split_size_mb:64,", ",",
                                        "max_split_size_mb:64,,garbage_collection_threshold:0.5"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        void *p = NULL;
        begin();
        setenv("GALLOC_CONF", "like:pytorch", 1);
        setenv("PYTORCH_CUDA_ALLOC_CONF", texts[i], 1);
        EXPECT_EQ(galloc_malloc(&p, 100, NULL), cudaErrorInvalidValue);
        EXPECT(strstr(galloc_last_message(), "PYTORCH_CUDA_ALLOC_CONF: ") != NULL);
        unsetenv("GALLOC_CONF");
        unsetenv("PYTORCH_CUDA_ALLOC_CONF");
        finish();
    }
}

TEST(settings_of_pytorchs_variable_without_effect_are_named)
{
    static const struct {
        const char *ours, *variable, *theirs, *says; /* NULL: no line */
    } cases[] = {
        {"like:pytorch", "PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6",
         "GALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: garbage_collection_threshold: no effect with like:pytorch "
         "unless there is a limit"},
        {"like:pytorch", "PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512",
         "GALLOC_CONF and PYTORCH_ALLOC_CONF: max_split_size_mb: no effect unless expandable_segments is False"},
        {"like:pytorch,strategy:pooled", "PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6",
         "GALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF: strategy: no effect with like:pytorch; "
         "garbage_collection_threshold: no effect with like:pytorch unless there is a limit"},
        {"like:pytorch,strategy:pooled", "PYTORCH_CUDA_ALLOC_CONF", "pinned_num_register_threads:8",
         "GALLOC_CONF: strategy: no effect with like:pytorch"},
        {"like:pytorch,expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF",
         "expandable_segments:True,max_split_size_mb:512", NULL},
        {"like:pytorch,memory_limit:1G", "PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6", NULL},
        {"overhead:0.1", "PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin();
        setenv("GALLOC_CONF", cases[i].ours, 1);
        setenv(cases[i].variable, cases[i].theirs, 1);
        (void)config_in_effect();
        EXPECT_EQ(log_lines, cases[i].says ? 1 : 0);
        if (cases[i].says && !EXPECT(!strcmp(log_text, cases[i].says))) printf("    %zu: %s\n", i, log_text);
        unsetenv("GALLOC_CONF");
        unsetenv(cases[i].variable);
        finish();
    }
}

TEST(pytorchs_newer_variable_comes_second)
{
    begin();
    setenv("GALLOC_CONF", "like:pytorch", 1);
    setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64", 1);
    EXPECT_EQ(config_in_effect().max_split_size, MIB(64));
    finish();
    begin();
    setenv("GALLOC_CONF", "like:pytorch", 1);
    setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", 1);
    EXPECT_EQ(config_in_effect().max_split_size, MIB(128));
    finish();
    unsetenv("GALLOC_CONF");
    unsetenv("PYTORCH_ALLOC_CONF");
    unsetenv("PYTORCH_CUDA_ALLOC_CONF");
}

TEST(an_error_in_pytorchs_variable_is_one)
{
    static const struct { const char *text, *says; } bad[] = {
        {"max_split_size_mb:none:x", "at 1: 'none:x' is no value for max_split_size_mb"},
        {"max_split_size_mb:2", "at 1: max_split_size is 2M: must be at least"},
        {"unknown:1", "at 1: unknown key 'unknown'"}, {"backend:cuda", "at 1: 'cuda' is no value for backend"},
        {"garbage_collection_threshold:1.2", "at 1: '1.2' is out of range"}, {"backend", "at 1: 'backend' needs ':'"},
        {"  max_split_size_mb : 64,\tunknown:1", "at 27: unknown key 'unknown'"},
        {"pinned_num_register_threads:8,unknown:1", "at 31: unknown key 'unknown'"},
        {"backend:native, pinned_num_register_threads:8, max_split_size_mb: 2", "at 48: max_split_size is 2M"},
        {"backend:native, ", "at 17: a key is missing"},
        {"pinned_num_register_threads:8,max_split_size_mb:64,", "at 52: a key is missing"},
        {"max_split_size_mb:64, pinned_num_register_threads:8 , ", "at 55: a key is missing"},
        {NULL, "longer than 1023 characters"}};
    char wide[3000];
    memset(wide, 'x', sizeof wide);
    wide[sizeof wide - 1] = 0;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *text = bad[i].text ? bad[i].text : wide;
        galloc_pool *pool = NULL;
        begin();
        setenv("GALLOC_CONF", "like:pytorch", 1);
        setenv("PYTORCH_CUDA_ALLOC_CONF", text, 1);
        EXPECT_EQ(galloc_pool_default(&pool, 0), cudaErrorInvalidValue);
        EXPECT(pool == NULL);
        EXPECT_EQ(log_lines, 1);
        EXPECT(strstr(log_text, "PYTORCH_CUDA_ALLOC_CONF: ") != NULL);
        if (!EXPECT(strstr(log_text, bad[i].says) != NULL)) printf("    %s\n", log_text);
        setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", 1);
        OK(galloc_pool_default(&pool, 0));
        finish();
    }
    unsetenv("GALLOC_CONF");
    unsetenv("PYTORCH_CUDA_ALLOC_CONF");
}

/* A text of PyTorch's fits to the last character, or is refused. */
TEST(pytorchs_variable_has_1023_characters_at_most)
{
    static const char begins[] = "pinned_", ends[] = ":1";
    char text[1100];
    for (size_t length = 1000; length < 1060; length++) {
        void *p = NULL;
        begin();
        memset(text, 'x', sizeof text);
        memcpy(text, begins, strlen(begins));
        memcpy(text + length - strlen(ends), ends, sizeof ends);
        setenv("GALLOC_CONF", "like:pytorch", 1);
        setenv("PYTORCH_CUDA_ALLOC_CONF", text, 1);
        EXPECT_EQ(galloc_malloc(&p, 1000, 0), length > 1023 ? cudaErrorInvalidValue : cudaSuccess);
        if (length > 1023) EXPECT(strstr(galloc_last_message(), "longer than 1023 characters") != NULL);
        OK(galloc_free(p, 0));
        unsetenv("PYTORCH_CUDA_ALLOC_CONF");
        unsetenv("GALLOC_CONF");
        finish();
    }
}

/* What a pool takes can be printed and read again. */
TEST(divisions_that_no_text_can_say_are_refused)
{
    begin();
    galloc_config config = galloc_config_default(), read = config;
    galloc_pool *pool = NULL;
    char text[GALLOC_CONFIG_TEXT];
    config.roundup_power2_divisions[3] = 1u << 31;
    EXPECT_EQ(galloc_pool_create(&pool, &config), cudaErrorInvalidValue);
    config.roundup_power2_divisions[3] = 1u << 30;
    OK(galloc_pool_create(&pool, &config));
    OK(galloc_config_print(&config, text, sizeof text));
    OK(galloc_config_parse(&read, text, NULL, 0));
    EXPECT_EQ(read.roundup_power2_divisions[3], 1u << 30);
    pool_end(pool);
    finish();
}

TEST_MAIN()
