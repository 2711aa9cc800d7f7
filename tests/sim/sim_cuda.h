/* sim_cuda.h - CUDA C++ for the simulated device: what nvcc adds to C++, for files that a host compiler compiles.

   tests/sim/nvcc.sh includes this file before a .cu file and rewrites its launches:

       kernel<<<grid, block, shared, stream>>>(arguments);

   becomes

       sim::launched<decltype(kernel), kernel>::on(grid, block, shared, stream)(arguments);

   which queues the kernel by cudaLaunchKernel; if the kernel is a template in the same file, sim::deduced looks for the
   kernel that the arguments mean. The threads of a launch run one after another, and no two launches run at the same
   time, so an atomic function is an ordinary one. There is no __syncthreads, no __shared__ and no __constant__: files
   that use them do not compile. The accesses of a launch follow from the parameters, as sim_kernel.h says. */

#ifndef SIM_CUDA_H
#define SIM_CUDA_H

#ifndef __cplusplus
#error "sim_cuda.h: a .cu file is C++"
#endif

#include <math.h>

#include <type_traits>
#include <utility>

#include <cuda_runtime.h>

#include "sim_kernel.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

constexpr int warpSize = 32;

/* ---- launches --------------------------------------------------------------------------------------------------- */

namespace sim {

/* What sim_kernel.c reads of a type: is it a pointer, and to what? */
template <class T> struct text {
    static const char *of() { return ""; }
};
template <class T> struct text<T *> {
    static const char *of() { return std::is_const<T>::value ? "const *" : "*"; }
};

/* A launch without its arguments. As with nvcc, an error is left for cudaGetLastError. */
template <class... P> struct launch {
    const sim_kernel *kernel;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    void operator()(P... argument) const
    {
        void *arguments[] = {(void *)&argument..., nullptr};
        (void)::cudaLaunchKernel((const void *)kernel, grid, block, arguments, shared, stream);
    }
};

template <class F, F *body> struct launched;
template <class... P, void (*body)(P...)> struct launched<void(P...), body> {
    template <size_t... i> static void call(void **argument, std::index_sequence<i...>)
    {
        (void)argument;
        body(*static_cast<P *>(argument[i])...);
    }
    static void run(void **arguments) { call(arguments, std::make_index_sequence<sizeof...(P)>()); }
    static launch<P...> on(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = 0)
    {
        static const sim_parameter parameters[] = {{sizeof(P), text<P>::of()}..., {0, ""}};
        static const sim_kernel self = {SIM_KERNEL_MAGIC, "", sizeof...(P), parameters, run};
        return {&self, grid, block, shared, stream};
    }
};

/* A launch of a kernel template whose arguments follow from those of the call: `find` returns the kernel for them. */
template <class Find> struct deduced_launch {
    Find find;
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
    template <class... A> void operator()(A... argument) const
    {
        decltype(find(argument...))::on(grid, block, shared, stream)(argument...);
    }
};

template <class Find> struct deduction {
    Find find;
    deduced_launch<Find> on(dim3 grid, dim3 block, size_t shared = 0, cudaStream_t stream = 0) const
    {
        return {find, grid, block, shared, stream};
    }
};

template <class Find> deduction<Find> deduced(Find find) { return {find}; }

} // namespace sim

/* ---- device functions ------------------------------------------------------------------------------------------- */

template <class T, class U> inline T atomicExch(T *p, U value)
{
    T old = *p;
    *p = (T)value;
    return old;
}
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T, class U> inline T atomicAdd(T *p, U value) { return atomicExch(p, *p + (T)value); }
template <class T, class U> inline T atomicSub(T *p, U value) { return atomicExch(p, *p - (T)value); }
template <class T, class U> inline T atomicMin(T *p, U value) { return atomicExch(p, (T)value < *p ? (T)value : *p); }
template <class T, class U> inline T atomicMax(T *p, U value) { return atomicExch(p, *p < (T)value ? (T)value : *p); }
template <class T, class U> inline T atomicAnd(T *p, U value) { return atomicExch(p, *p & (T)value); }
template <class T, class U> inline T atomicOr(T *p, U value) { return atomicExch(p, *p | (T)value); }
template <class T, class U> inline T atomicXor(T *p, U value) { return atomicExch(p, *p ^ (T)value); }
template <class T, class U> inline T atomicInc(T *p, U most) { return atomicExch(p, *p >= (T)most ? (T)0 : *p + 1); }
template <class T, class U> inline T atomicDec(T *p, U most)
{
    return atomicExch(p, *p == 0 || *p > (T)most ? (T)most : *p - 1);
}
template <class T, class U, class V> inline T atomicCAS(T *p, U compare, V value)
{
    return *p == (T)compare ? atomicExch(p, value) : *p;
}
inline void __threadfence() {}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

#endif
