/* host.c PLUGIN [end] [ending] - loads a plug-in that has galloc inside, uses it in two threads, unloads it while the
   second one lives, and has that one end; three times. With `end` galloc_shutdown is called before. With `ending` the
   second one is about to end while the plug-in is unloaded. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sim.h"

static int (*run)(void), (*linger)(void);
static pthread_barrier_t turn;
static long calls; /* of CUDA functions */

static void count(const char *function)
{
    (void)function;
    calls++;
}

static void *use(void *failed)
{
    *(int *)failed = run();
    pthread_barrier_wait(&turn);
    if (linger) (void)linger();
    else pthread_barrier_wait(&turn);
    return NULL;
}

/* From an object to a function: by memcpy, since C knows no such conversion. */
static int (*look_up(void *library, const char *name))(void)
{
    void *symbol = dlsym(library, name);
    int (*function)(void);
    memcpy(&function, &symbol, sizeof function);
    return function;
}

static int load_and_unload(const char *path, int ends, int ending)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    pthread_t thread;
    int failed = 0;
    if (!library) return printf("%s\n", dlerror()), 1;
    run = look_up(library, "plugin_run");
    linger = ending ? look_up(library, "plugin_linger") : NULL;
    if (run()) return printf("the first thread could not use it\n"), 1;
    pthread_create(&thread, NULL, use, &failed);
    pthread_barrier_wait(&turn);
    if (failed) return printf("the second thread could not use it\n"), 1;
    if (ends && look_up(library, "plugin_end")()) return printf("it was still in use\n"), 1;
    if (ending) usleep(20000);
    calls = 0;
    if (dlclose(library)) return printf("%s\n", dlerror()), 1;
    library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library) return printf("it is still loaded\n"), 1;
    if (!ending) pthread_barrier_wait(&turn);
    pthread_join(thread, NULL);
    if (calls && !strstr(path, "++")) return printf("CUDA was called while it was unloaded, or after\n"), 1;
    return 0;
}

int main(int argc, char **argv)
{
    sim_options options = sim_defaults();
    int i, status = 1, ends = argc > 2 && !strcmp(argv[2], "end"), ending = !strcmp(argv[argc - 1], "ending");
    if (argc < 2 || sim_start(&options)) return 2;
    sim_hook(count, NULL);
    pthread_barrier_init(&turn, NULL, 2);
    for (i = 0; i < 3; i++)
        if (load_and_unload(argv[1], ends, ending)) return 1;
    if (!fork()) _exit(0); /* nothing is called there that is gone */
    return wait(&status) < 0 || status;
}
