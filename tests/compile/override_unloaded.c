/* override_unloaded.c LIBRARY... - libraries (override_library.c) with a heap each are loaded and unloaded, one after
   the other, by a program that has the same functions. */

#include <dlfcn.h>
#include <stdio.h>

#define GALLOC_OVERRIDE_CUDA
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

int main(int argc, char **argv)
{
    void *p = NULL;
    int i, error = (int)cudaMalloc(&p, 1000);
    for (i = 1; i < argc && !error; i++) {
        int (*call)(void) = NULL;
        void *library = dlopen(argv[i], RTLD_NOW);
        if (library) *(void **)&call = dlsym(library, "override_first");
        error = call ? call() : 1;
        if (error) printf("%s returned %d: %s\n", argv[i], error, library ? "" : dlerror());
        if (library) dlclose(library);
    }
    return error || cudaFree(p);
}
