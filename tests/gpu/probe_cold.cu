/* probe_cold.cu - what calls of the driver cost the host, one after another and after other memory was touched. No
   galloc. Build: nvcc -O2 probe_cold.cu -o probe_cold -lcuda. Run it on one core: taskset -c 5 ./probe_cold */

#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        CUresult error_ = (call);                                                                                      \
        if (error_) printf("%s: error %d\n", #call, (int)error_), exit(1);                                             \
    } while (0)

enum { CALLS = 400 };

static CUstream stream;
static CUdeviceptr memory;
static CUevent event;
static void *host;
static CUstreamBatchMemOpParams write_ops[4];

static double now()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void memset_512() { OK(cuMemsetD8Async(memory, 0xa5, 512, stream)); }
static void memset_300() { OK(cuMemsetD8Async(memory + 3, 0xa5, 300, stream)); }
static void write_64() { OK(cuStreamWriteValue64(stream, memory, 0xa5a5a5a5a5a5a5a5u, 0)); }
static void write_4x64() { OK(cuStreamBatchMemOp(stream, 4, write_ops, 0)); }
static void copy_16() { OK(cuMemcpyDtoHAsync(host, memory, 16, stream)); }
static void copy_768() { OK(cuMemcpyDtoHAsync(host, memory + 3, 768, stream)); }
static void record() { OK(cuEventRecord(event, stream)); }

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static char junk[2 << 20];

int main()
{
    static const struct { const char *name; void (*call)(); } calls[] = {
        {"memset of 512 bytes", memset_512}, {"memset of 300 bytes, odd", memset_300}, {"write of 8 bytes", write_64},
        {"batch of 4 writes", write_4x64}, {"copy of 16 bytes", copy_16}, {"copy of 768 bytes", copy_768},
        {"event", record}};
    CUdevice device;
    CUcontext context;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc(&memory, 1 << 20));
    OK(cuMemHostAlloc(&host, 1 << 20, 0));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < 4; i++) {
        write_ops[i].operation = write_ops[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        write_ops[i].writeValue.address = memory + 8 * (CUdeviceptr)i;
        write_ops[i].writeValue.value64 = 0xa5a5a5a5a5a5a5a5u;
    }
    printf("ns of the host, median of %d calls\n%-28s %16s %16s\n", CALLS, "", "in a row", "2 MiB touched");
    for (const auto &one : calls) {
        double median[2];
        for (int cold = 0; cold < 2; cold++) {
            static double ns[CALLS];
            for (int i = 0; i < CALLS; i++) {
                double until = now() + 260e3;
                if (!cold && i % 100 == 0) OK(cuCtxSynchronize());
                while (cold && now() < until)
                    for (size_t k = 0; k < sizeof junk; k += 64) junk[k]++;
                double begin = now();
                one.call();
                ns[i] = now() - begin;
            }
            OK(cuCtxSynchronize());
            qsort(ns, CALLS, sizeof *ns, compare);
            median[cold] = ns[CALLS / 2];
        }
        printf("%-28s %16.0f %16.0f\n", one.name, median[0], median[1]);
    }
    return 0;
}
