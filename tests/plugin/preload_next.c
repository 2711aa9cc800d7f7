/* preload_next.c - a library that is in LD_PRELOAD twice, under two names: its function asks for the next one of the
   same name, and counts how many there are. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

int galloc_test_next(void);
int galloc_test_next(void)
{
    int (*next)(void) = NULL;
    void *found = dlsym(RTLD_NEXT, "galloc_test_next");
    memcpy(&next, &found, sizeof next);
    return 1 + (next ? next() : 0);
}
