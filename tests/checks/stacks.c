/* stacks.c - for check_stacks.sh: allocates from a few places, and says in which lines. `stacks FOLDER [LIBRARY]`
   writes FOLDER/stacks.json. The library calls back from code that is unloaded before a second snapshot,
   FOLDER/after.json. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(WHOLE)
#define GALLOC_IMPLEMENTATION
#endif
#include "galloc.h"

#define SITE __attribute__((noinline))
#define SAY(line) printf("%s %d\n", __func__, line)

void *in_loop(galloc_pool *pool);
void *in_library(galloc_pool *pool);
void in_free(void *ptr);

static void must(int right)
{
    if (right) return;
    printf("failed: %s\n", galloc_last_message());
    exit(1);
}

SITE void *in_loop(galloc_pool *pool)
{
    void *ptr = NULL;
    must(galloc_pool_malloc(pool, &ptr, 5000, NULL) == cudaSuccess), SAY(__LINE__);
    return ptr;
}

SITE void *in_library(galloc_pool *pool)
{
    galloc_request request = {.bytes = 7000, .pool = pool};
    void *ptr = NULL;
    must(galloc_alloc(&ptr, &request) == cudaSuccess), SAY(__LINE__);
    return ptr;
}

SITE void in_free(void *ptr)
{
    must(galloc_free(ptr, NULL) == cudaSuccess), SAY(__LINE__);
}

int main(int argc, char **argv)
{
    galloc_config config = galloc_config_default();
    galloc_pool *pool = NULL;
    void *blocks[4] = {NULL}, *library = NULL;
    void *(*call)(void *(*back)(galloc_pool *), galloc_pool *) = NULL;
    char path[1000];
    int i;
    must(argc > 1);
    must(!galloc_config_parse(&config, "memory_limit:1G,history:1000,history_stacks:8", NULL, 0));
    must(!galloc_pool_create(&pool, &config));
    for (i = 0; i < 3; i++) blocks[i] = in_loop(pool);
    if (argc > 2) library = dlopen(argv[2], RTLD_NOW);
    if (library) *(void **)(void *)&call = dlsym(library, "through_library");
    if (call) blocks[3] = call(in_library, pool);
    must(argc < 3 || blocks[3]);
    in_free(blocks[0]);
    snprintf(path, sizeof path, "%s/stacks.json", argv[1]);
    must(!galloc_snapshot_save(pool, path));
    if (library) dlclose(library);
    snprintf(path, sizeof path, "%s/after.json", argv[1]);
    must(!galloc_snapshot_save(pool, path));
    for (i = 1; i < 4; i++) must(!galloc_free(blocks[i], NULL));
    must(!galloc_pool_destroy(pool) && !galloc_shutdown());
    return 0;
}
