/* sim_kernel.c - kernels with a body: what a launch keeps of its arguments, what it is held to access, and its run. */

#include <stdlib.h>
#include <string.h>

#include "sim_internal.h"
#include "sim_kernel.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

enum { MOST_THREADS = 1024, MOST_SHARED = 227 << 10 };

/* The arguments of a launch, as they were when it was asked for. */
struct sm_frame {
    int refs;
    const sim_kernel *kernel;
    dim3 grid, block;
    void *argument[]; /* and behind them their bytes */
};

sm_frame *sm_frame_keep(sm_frame *f) {
    if (f) f->refs++;
    return f;
}

void sm_frame_drop(sm_frame *f) {
    if (f && --f->refs == 0) free(f);
}

/* ---- what a launch accesses ------------------------------------------------------------------------------------- */

void sim_kernel_access(const void *ptr, size_t bytes, int how) {
    sm_lock();
    sm_thread *t = sm_self();
    t->declared = sm_grow(t->declared, t->ndeclared, &t->capdeclared, sizeof *t->declared);
    t->declared[t->ndeclared++] = (sim_access){ptr, bytes, how, 0};
    sm_unlock();
}

/* By the text of its type; 0: no pointer. */
static int access_of(const char *type) {
    const char *star = strrchr(type, '*'), *word = strstr(type, "const");
    return !star ? 0 : word && word < star ? SIM_READ : SIM_WRITE;
}

static void look_at_arguments(sm_work *w, const sm_frame *f) {
    size_t cap = 0;
    for (size_t i = 0; i < f->kernel->n; i++) {
        void *p;
        int how = access_of(f->kernel->parameter[i].type);
        if (!how) continue;
        memcpy(&p, f->argument[i], sizeof p);
        if (!p || sm_is_pinned(p, 1)) continue;
        w->access = sm_grow(w->access, (size_t)w->n, &cap, sizeof *w->access);
        w->access[w->n++] = (sim_access){p, 1, how, 0};
    }
}

/* ---- launches --------------------------------------------------------------------------------------------------- */

static bool is_kernel(const void *function) {
    uint64_t magic = 0;
    if (function) memcpy(&magic, function, sizeof magic);
    return magic == SIM_KERNEL_MAGIC;
}

static bool is_shape(dim3 grid, dim3 block) {
    size_t threads = (size_t)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) return false;
    return threads && threads <= MOST_THREADS && block.z <= 64 && block.x <= 1024 && block.y <= 1024;
}

static sm_frame *frame_new(const sim_kernel *k, dim3 grid, dim3 block, void **arguments) {
    size_t head = sm_round_up(sizeof(sm_frame) + k->n * sizeof(void *), 16), bytes = head;
    for (size_t i = 0; i < k->n; i++) bytes += sm_round_up(k->parameter[i].bytes, 16);
    sm_frame *f = sm_alloc(bytes);
    f->refs = 1;
    f->kernel = k;
    f->grid = grid;
    f->block = block;
    for (size_t i = 0; i < k->n; i++) {
        f->argument[i] = memcpy((char *)f + head, arguments[i], k->parameter[i].bytes);
        head += sm_round_up(k->parameter[i].bytes, 16);
    }
    return f;
}

int sm_kernel_check(const void *function) { return is_kernel(function) ? 0 : E_FUNCTION; }

/* To be given back by sm_work_drop. */
int sm_work_of_kernel(sm_work *w, const void *function, dim3 grid, dim3 block, void **arguments, size_t shared) {
    *w = (sm_work){.kind = WORK_ACCESS};
    if (!is_kernel(function)) return E_FUNCTION;
    if (!is_shape(grid, block)) return E_CONFIGURATION;
    if (shared > MOST_SHARED || !arguments) return E_VALUE;
    w->frame = frame_new((const sim_kernel *)function, grid, block, arguments);
    sm_thread *t = sm_self();
    if (t->ndeclared) {
        w->access = t->declared;
        w->n = (int)t->ndeclared;
        t->declared = NULL;
        t->ndeclared = t->capdeclared = 0;
    } else
        look_at_arguments(w, w->frame);
    return 0;
}

int sm_kernel_launch(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, CUstream stream) {
    sm_work w;
    int error = sm_work_of_kernel(&w, function, grid, block, arguments, shared);
    if (!error) error = sm_work_queue(stream, &w, NULL);
    sm_work_drop(&w);
    return error;
}

static void run_block(sm_frame *f) {
    for (threadIdx.z = 0; threadIdx.z < f->block.z; threadIdx.z++)
        for (threadIdx.y = 0; threadIdx.y < f->block.y; threadIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < f->block.x; threadIdx.x++) f->kernel->run(f->argument);
}

void sm_frame_run(sm_frame *f) {
    blockDim = (uint3){f->block.x, f->block.y, f->block.z};
    gridDim = (uint3){f->grid.x, f->grid.y, f->grid.z};
    for (blockIdx.z = 0; blockIdx.z < f->grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < f->grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < f->grid.x; blockIdx.x++) run_block(f);
}
