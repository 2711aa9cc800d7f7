/* sim_kernel.h - kernels that compile with nvcc for a GPU, and with a C or C++ compiler for the simulated device.

       SIM_KERNEL(scale, (float *, p), (float, by), (int, n))
       {
           int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
           if (i < n) p[i] *= by;
       }
       ...
       scale_launch(grid, block, 0, stream, p, 2.0f, n);

   SIM_KERNEL defines a kernel with 1 to 12 parameters, and a function NAME_launch(grid, block, shared bytes, stream,
   arguments...) that returns the result of cudaLaunchKernel. cudaLaunchKernel((const void *)scale, ...) works too. On
   the simulated device the threads of a launch run one after another when the stream reaches the launch. There is no
   __syncthreads, no __shared__ and no atomic function, and a kernel must not call CUDA.

   The accesses of a launch: if the launching thread calls SIM_READS and SIM_WRITES before the launch, exactly these
   count. Otherwise a parameter `const T *` counts as a read of the first byte, and any other `T *` as a write of it.
   With nvcc both macros do nothing. */

#ifndef SIM_KERNEL_H
#define SIM_KERNEL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cuda_runtime_api.h>

/* ---- lists of parameters ---------------------------------------------------------------------------------------- */

#define SIM_JOIN_(a, b) a##b
#define SIM_JOIN(a, b)  SIM_JOIN_(a, b)
#define SIM_COUNT_(a, b, c, d, e, f, g, h, i, j, k, l, n, ...) n
#define SIM_COUNT(...) SIM_COUNT_(__VA_ARGS__, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define SIM_COMMA() ,
#define SIM_NONE()
#define SIM_EACH(m, sep, ...) SIM_JOIN(SIM_EACH_, SIM_COUNT(__VA_ARGS__))(m, sep, __VA_ARGS__)
#define SIM_EACH_1(m, sep, a) m a
#define SIM_EACH_2(m, sep, a, ...) m a sep() SIM_EACH_1(m, sep, __VA_ARGS__)
#define SIM_EACH_3(m, sep, a, ...) m a sep() SIM_EACH_2(m, sep, __VA_ARGS__)
#define SIM_EACH_4(m, sep, a, ...) m a sep() SIM_EACH_3(m, sep, __VA_ARGS__)
#define SIM_EACH_5(m, sep, a, ...) m a sep() SIM_EACH_4(m, sep, __VA_ARGS__)
#define SIM_EACH_6(m, sep, a, ...) m a sep() SIM_EACH_5(m, sep, __VA_ARGS__)
#define SIM_EACH_7(m, sep, a, ...) m a sep() SIM_EACH_6(m, sep, __VA_ARGS__)
#define SIM_EACH_8(m, sep, a, ...) m a sep() SIM_EACH_7(m, sep, __VA_ARGS__)
#define SIM_EACH_9(m, sep, a, ...) m a sep() SIM_EACH_8(m, sep, __VA_ARGS__)
#define SIM_EACH_10(m, sep, a, ...) m a sep() SIM_EACH_9(m, sep, __VA_ARGS__)
#define SIM_EACH_11(m, sep, a, ...) m a sep() SIM_EACH_10(m, sep, __VA_ARGS__)
#define SIM_EACH_12(m, sep, a, ...) m a sep() SIM_EACH_11(m, sep, __VA_ARGS__)

#define SIM_PARAMETER(type, name) type name
#define SIM_MEMBER(type, name)    type name;
#define SIM_ADDRESS(type, name)   (void *)&name
#define SIM_GIVEN(type, name)     given.name
#define SIM_UNPACK(type, name)    memcpy((void *)&given.name, *arguments++, sizeof given.name);
#define SIM_DESCRIBE(type, name)  {sizeof(type), #type}

#define SIM_LAUNCHER(kernel, ...) \
    static inline cudaError_t kernel##_launch(dim3 grid_, dim3 block_, size_t shared_, cudaStream_t stream_, \
                                              SIM_EACH(SIM_PARAMETER, SIM_COMMA, __VA_ARGS__)) \
    { \
        void *arguments_[] = {SIM_EACH(SIM_ADDRESS, SIM_COMMA, __VA_ARGS__)}; \
        return cudaLaunchKernel((const void *)kernel, grid_, block_, arguments_, shared_, stream_); \
    }

#ifdef __CUDACC__

#define SIM_KERNEL(kernel, ...) \
    static __global__ void kernel(SIM_EACH(SIM_PARAMETER, SIM_COMMA, __VA_ARGS__)); \
    SIM_LAUNCHER(kernel, __VA_ARGS__) \
    static __global__ void kernel(SIM_EACH(SIM_PARAMETER, SIM_COMMA, __VA_ARGS__))

#define SIM_READS(ptr, bytes)  ((void)0)
#define SIM_WRITES(ptr, bytes) ((void)0)

#else

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sim_parameter {
    size_t bytes;
    const char *type; /* source text of the type */
} sim_parameter;

/* The simulated kernel. The kernel's name is an array with one element of this type. */
typedef struct sim_kernel {
    uint64_t magic;
    const char *name;
    size_t n;
    const sim_parameter *parameter;
    void (*run)(void **arguments); /* runs one thread */
} sim_kernel;

#define SIM_KERNEL_MAGIC 0x6c656e72656b6d69u

extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim; /* of the kernel thread that runs now */

/* Adds an access to the next kernel that this thread launches. */
void sim_kernel_access(const void *ptr, size_t bytes, int how);
#define SIM_READS(ptr, bytes)  sim_kernel_access(ptr, bytes, 1)
#define SIM_WRITES(ptr, bytes) sim_kernel_access(ptr, bytes, 2)

#ifdef __cplusplus
}
#endif

#define SIM_KERNEL(kernel, ...) \
    static void kernel##_body(SIM_EACH(SIM_PARAMETER, SIM_COMMA, __VA_ARGS__)); \
    static void kernel##_run(void **arguments) \
    { \
        struct { \
            SIM_EACH(SIM_MEMBER, SIM_NONE, __VA_ARGS__) \
        } given; \
        SIM_EACH(SIM_UNPACK, SIM_NONE, __VA_ARGS__) \
        kernel##_body(SIM_EACH(SIM_GIVEN, SIM_COMMA, __VA_ARGS__)); \
    } \
    static const sim_parameter kernel##_parameters[] = {SIM_EACH(SIM_DESCRIBE, SIM_COMMA, __VA_ARGS__)}; \
    static const sim_kernel kernel[1] = {{SIM_KERNEL_MAGIC, #kernel, \
                                          sizeof kernel##_parameters / sizeof kernel##_parameters[0], \
                                          kernel##_parameters, kernel##_run}}; \
    SIM_LAUNCHER(kernel, __VA_ARGS__) \
    static void kernel##_body(SIM_EACH(SIM_PARAMETER, SIM_COMMA, __VA_ARGS__))

#endif
#endif
