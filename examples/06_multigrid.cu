/* 06_multigrid.cu - a multigrid solver on a domain whose size changes with every step.

   Shows    a real solver that allocates what it needs where it needs it: each level of each cycle takes a residual, a
            coarser grid and a buffer for the smoother. No level has a workspace that would have to fit all domains.
   Gain     the allocations cost next to nothing; with cudaMalloc the solver spends most of its time in them.
   Look up  galloc_malloc, galloc_free, galloc_pool_stats, ON MEMORY in galloc.h */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "example.h"
#include <math.h>

enum { CYCLES = 10, SIDE = 16 }; /* V-cycles for each domain; threads of a block in each direction */

/* A field on the inner points of a rectangle: -laplace(u) = f, and u = 0 at the edge. Point (i, j), from 1, is at
   (i * h, j * h); outside it is 0. */
struct grid {
    int nx, ny;
    double h;
};

static __device__ double at(const double *u, grid g, int i, int j)
{
    return i < 1 || j < 1 || i > g.nx || j > g.ny ? 0 : u[(size_t)(j - 1) * g.nx + i - 1];
}

static __device__ double neighbours(const double *u, grid g, int i, int j)
{
    return at(u, g, i - 1, j) + at(u, g, i + 1, j) + at(u, g, i, j - 1) + at(u, g, i, j + 1);
}

/* The point of this thread; i is 0 for a thread without one. */
static __device__ void my_point(grid g, int *i, int *j)
{
    *i = (int)(blockIdx.x * blockDim.x + threadIdx.x) + 1;
    *j = (int)(blockIdx.y * blockDim.y + threadIdx.y) + 1;
    if (*i > g.nx || *j > g.ny) *i = 0;
}

/* A sweep of the damped Jacobi method. */
static __global__ void smooth(const double *u, const double *f, grid g, double *next)
{
    int i, j;
    my_point(g, &i, &j);
    if (!i) return;
    double jacobi = (g.h * g.h * at(f, g, i, j) + neighbours(u, g, i, j)) / 4;
    next[(size_t)(j - 1) * g.nx + i - 1] = 0.2 * at(u, g, i, j) + 0.8 * jacobi;
}

static __global__ void residual(const double *u, const double *f, grid g, double *r)
{
    int i, j;
    my_point(g, &i, &j);
    if (!i) return;
    double laplace = (4 * at(u, g, i, j) - neighbours(u, g, i, j)) / (g.h * g.h);
    r[(size_t)(j - 1) * g.nx + i - 1] = at(f, g, i, j) - laplace;
}

/* Full weighting: each coarse point takes the mean of the fine ones around it. */
static __global__ void restrict_to(const double *r, grid fine, grid coarse, double *f)
{
    int i, j;
    my_point(coarse, &i, &j);
    if (!i) return;
    double sum = 0;
    for (int dj = -1; dj <= 1; dj++)
        for (int di = -1; di <= 1; di++)
            sum += (2 - (di != 0)) * (2 - (dj != 0)) * at(r, fine, 2 * i + di, 2 * j + dj);
    f[(size_t)(j - 1) * coarse.nx + i - 1] = sum / 16;
}

/* Adds the coarse correction, interpolated linearly. */
static __global__ void correct(const double *e, grid coarse, grid fine, double *u)
{
    int i, j;
    my_point(fine, &i, &j);
    if (!i) return;
    double sum = 0;
    for (int k = 0; k < 4; k++) sum += at(e, coarse, (i + k % 2) / 2, (j + k / 2) / 2);
    u[(size_t)(j - 1) * fine.nx + i - 1] += sum / 4;
}

/* scale * sin(a x) sin(b y); and the greatest distance from that, in units of 1e-9. */
static __global__ void set_wave(grid g, double scale, double a, double b, double *f)
{
    int i, j;
    my_point(g, &i, &j);
    if (i) f[(size_t)(j - 1) * g.nx + i - 1] = scale * sin(a * i * g.h) * sin(b * j * g.h);
}

static __global__ void compare_wave(const double *u, grid g, double scale, double a, double b, unsigned *distance)
{
    int i, j;
    my_point(g, &i, &j);
    if (!i) return;
    double d = fabs(at(u, g, i, j) - scale * sin(a * i * g.h) * sin(b * j * g.h)) * 1e9;
    atomicMax(distance, d < 4e9 ? (unsigned)d : 4000000000u); /* also for what is not a number */
}

/* ---- the solver -------------------------------------------------------------------------------------------------- */

static dim3 blocks(grid g) { return dim3((g.nx + SIDE - 1) / SIDE, (g.ny + SIDE - 1) / SIDE); }
static size_t bytes(grid g) { return (size_t)g.nx * g.ny * sizeof(double); }

static double *take(grid g, cudaStream_t s)
{
    double *p;
    CHECK(galloc_malloc(&p, bytes(g), s));
    return p;
}

/* Two sweeps, there and back. */
static void smooth_twice(double *u, const double *f, grid g, cudaStream_t s)
{
    double *other = take(g, s);
    smooth<<<blocks(g), dim3(SIDE, SIDE), 0, s>>>(u, f, g, other);
    smooth<<<blocks(g), dim3(SIDE, SIDE), 0, s>>>(other, f, g, u);
    CHECK(galloc_free(other, s));
}

static void cycle(double *u, const double *f, grid g, cudaStream_t s)
{
    grid coarse = {(g.nx - 1) / 2, (g.ny - 1) / 2, 2 * g.h};
    if (g.nx % 2 == 0 || g.ny % 2 == 0 || coarse.nx < 1 || coarse.ny < 1) { /* the coarsest: a few points */
        for (int i = 0; i < 30; i++) smooth_twice(u, f, g, s);
        return;
    }
    smooth_twice(u, f, g, s);
    double *r = take(g, s), *below = take(coarse, s);
    residual<<<blocks(g), dim3(SIDE, SIDE), 0, s>>>(u, f, g, r);
    restrict_to<<<blocks(coarse), dim3(SIDE, SIDE), 0, s>>>(r, g, coarse, below);
    CHECK(galloc_free(r, s)); /* the coarser levels use its memory */
    double *e = take(coarse, s);
    CHECK(cudaMemsetAsync(e, 0, bytes(coarse), s));
    cycle(e, below, coarse, s);
    correct<<<blocks(g), dim3(SIDE, SIDE), 0, s>>>(e, coarse, g, u);
    CHECK(galloc_free(below, s));
    CHECK(galloc_free(e, s));
    smooth_twice(u, f, g, s);
}

struct problem {
    cudaStream_t stream;
    int steps, levels;
    unsigned *distances; /* of each step's solution; on the device */
};

/* The right side is a wave, for which the solution of the discrete equations is known. */
static void solve(problem *p, int step)
{
    cudaStream_t s = p->stream;
    int wide = 3 + step * 5 % 6, high = 3 + step * 3 % 5; /* the domain */
    grid g = {(wide << p->levels) - 1, (high << p->levels) - 1, 1.0 / (1 << p->levels)};
    double a = 3.14159265358979 / wide, b = 3.14159265358979 / high;
    double eigenvalue = (4 - 2 * cos(a * g.h) - 2 * cos(b * g.h)) / (g.h * g.h);
    double *u = take(g, s), *f = take(g, s);
    CHECK(cudaMemsetAsync(u, 0, bytes(g), s));
    set_wave<<<blocks(g), dim3(SIDE, SIDE), 0, s>>>(g, eigenvalue, a, b, f);
    for (int i = 0; i < CYCLES; i++) cycle(u, f, g, s);
    compare_wave<<<blocks(g), dim3(SIDE, SIDE), 0, s>>>(u, g, 1, a, b, p->distances + step);
    CHECK(cudaGetLastError());
    CHECK(galloc_free(u, s));
    CHECK(galloc_free(f, s));
}

static void solve_all(void *state)
{
    problem *p = (problem *)state;
    static unsigned distance[64];
    CHECK(cudaMemsetAsync(p->distances, 0, sizeof distance, p->stream));
    for (int step = 0; step < p->steps; step++) solve(p, step);
    CHECK(cudaMemcpyAsync(distance, p->distances, sizeof distance, cudaMemcpyDeviceToHost, p->stream));
    CHECK(cudaStreamSynchronize(p->stream));
    for (int step = 0; step < p->steps; step++) example_result(distance[step] < 2000); /* 2e-6 */
}

int main()
{
    example_begin("06_multigrid");
    problem p = {};
    p.steps = example_is_simulated() ? 4 : 24;
    p.levels = example_is_simulated() ? 3 : 7;
    CHECK(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    CHECK(galloc_malloc(&p.distances, 64 * sizeof(unsigned), p.stream));
    printf("%d domains of %d x %d to %d x %d points, %d cycles on %d levels for each\n", p.steps, (3 << p.levels) - 1,
           (3 << p.levels) - 1, (8 << p.levels) - 1, (7 << p.levels) - 1, CYCLES, p.levels + 1);
    example_compare("solution", p.steps, solve_all, &p);
    galloc_pool *pool;
    galloc_stats stats;
    CHECK(galloc_pool_default(&pool, -1));
    CHECK(galloc_pool_stats(pool, &stats));
    printf("galloc: %d allocations, %d of which added memory; held %zu KiB\n", (int)stats.mallocs, (int)stats.grows,
           stats.reserved.peak / 1024);
    CHECK(galloc_free(p.distances, p.stream));
    CHECK(galloc_stream_retire(p.stream));
    CHECK(cudaStreamDestroy(p.stream));
    return example_end();
}
