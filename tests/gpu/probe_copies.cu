/* probe_copies.cu - asks the driver which copies find memory while the context of another device is current, and prints
   the answers: memory of cuMemAlloc beside mapped memory (cuMemMap) and memory of a pool (cuMemAllocFromPoolAsync), of
   which only their own device has the access, and no peer access is enabled. It tests nothing, and needs two devices.
   Each answer is the result of the call, or the first error of the wait for its stream; "wrong" means that other bytes
   arrived. */

#include <cuda.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static CUcontext context[2];
static CUstream stream[2];
static CUdeviceptr memory[3][2][2]; /* of cuMemAlloc, mapped, of a pool; of device 0, 1; source, target */
static unsigned char *pinned, *pageable;
static const size_t bytes = 4 << 20;

static const char *text(CUresult result)
{
    const char *name = "?";
    if (result == CUDA_SUCCESS) return "yes";
    if (result == (CUresult)-1) return "wrong";
    cuGetErrorName(result, &name);
    return strncmp(name, "CUDA_ERROR_", 11) ? name : name + 11;
}

#define OK(call) ok((call), #call)
static void ok(CUresult result, const char *call)
{
    if (!result) return;
    printf("%s: %s\n", call, text(result));
    exit(1);
}

static CUdeviceptr mapped_memory(int device)
{
    CUmemAllocationProp prop = {};
    CUmemAccessDesc access = {};
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p;
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    OK(cuMemCreate(&handle, bytes, &prop, 0));
    OK(cuMemAddressReserve(&p, bytes, 0, 0, 0));
    OK(cuMemMap(p, bytes, 0, handle, 0));
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(cuMemSetAccess(p, bytes, &access, 1));
    return p;
}

static CUdeviceptr memory_of_a_pool(int device)
{
    CUmemPoolProps props = {};
    CUmemoryPool pool;
    CUdeviceptr p;
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    props.location.id = device;
    OK(cuMemPoolCreate(&pool, &props));
    OK(cuMemAllocFromPoolAsync(&p, bytes, pool, stream[device]));
    OK(cuStreamSynchronize(stream[device]));
    return p;
}

/* ---- the copies -------------------------------------------------------------------------------------------------- */

struct sides {
    CUdeviceptr from, to;
    int from_device, to_device;
    CUstream stream;
};

static CUDA_MEMCPY2D flat(const sides *s)
{
    CUDA_MEMCPY2D c = {};
    c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    c.srcDevice = s->from;
    c.dstDevice = s->to;
    c.srcPitch = c.dstPitch = c.WidthInBytes = 4096;
    c.Height = bytes / 4096;
    return c;
}

static CUDA_MEMCPY3D solid(const sides *s)
{
    CUDA_MEMCPY3D c = {};
    c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    c.srcDevice = s->from;
    c.dstDevice = s->to;
    c.srcPitch = c.dstPitch = c.WidthInBytes = 4096;
    c.srcHeight = c.dstHeight = c.Height = bytes / 4096;
    c.Depth = 1;
    return c;
}

/* Of one row; a host address has no context. */
static CUDA_MEMCPY3D_PEER peer(const sides *s, const void *from_host, void *to_host)
{
    CUDA_MEMCPY3D_PEER c = {};
    c.srcMemoryType = from_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    c.dstMemoryType = to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    c.srcDevice = s->from;
    c.dstDevice = s->to;
    c.srcHost = from_host;
    c.dstHost = to_host;
    c.srcContext = from_host ? NULL : context[s->from_device];
    c.dstContext = to_host ? NULL : context[s->to_device];
    c.WidthInBytes = bytes;
    c.Height = c.Depth = 1;
    return c;
}

enum { TO_DEVICE = 1, FROM_DEVICE = 2, ALL = 3, SET = 4 };

typedef struct copy {
    const char *name;
    int what;
    CUresult (*call)(const sides *s);
} copy;

#define COPY(name, what_, ...) {name, what_, [](const sides *s) -> CUresult { __VA_ARGS__ }}
#define FLAT(change, call) CUDA_MEMCPY2D c = flat(s); change; return call;
#define SOLID(call) CUDA_MEMCPY3D c = solid(s); return call;
#define PEER(from, to, call) CUDA_MEMCPY3D_PEER c = peer(s, from, to); return call;
#define HOST(p) ((CUdeviceptr)(size_t)(p))

static const copy copies[] = {
    COPY("cuMemcpyAsync", ALL, return cuMemcpyAsync(s->to, s->from, bytes, s->stream);),
    COPY("cuMemcpyDtoDAsync", ALL, return cuMemcpyDtoDAsync(s->to, s->from, bytes, s->stream);),
    COPY("cuMemcpy", ALL, return cuMemcpy(s->to, s->from, bytes);),
    COPY("cuMemcpyDtoD", ALL, return cuMemcpyDtoD(s->to, s->from, bytes);),
    COPY("cuMemcpy2DAsync", ALL, FLAT(, cuMemcpy2DAsync(&c, s->stream))),
    COPY("cuMemcpy2DAsync, unified", ALL,
         FLAT(c.srcMemoryType = c.dstMemoryType = CU_MEMORYTYPE_UNIFIED, cuMemcpy2DAsync(&c, s->stream))),
    COPY("cuMemcpy2D", ALL, FLAT(, cuMemcpy2D(&c))),
    COPY("cuMemcpy2DUnaligned", ALL, FLAT(, cuMemcpy2DUnaligned(&c))),
    COPY("cuMemcpy3DAsync", ALL, SOLID(cuMemcpy3DAsync(&c, s->stream))),
    COPY("cuMemcpy3D", ALL, SOLID(cuMemcpy3D(&c))),
    COPY("cuMemcpyPeerAsync", ALL,
         return cuMemcpyPeerAsync(s->to, context[s->to_device], s->from, context[s->from_device], bytes, s->stream);),
    COPY("cuMemcpyPeer", ALL,
         return cuMemcpyPeer(s->to, context[s->to_device], s->from, context[s->from_device], bytes);),
    COPY("cuMemcpy3DPeerAsync", ALL, PEER(NULL, NULL, cuMemcpy3DPeerAsync(&c, s->stream))),
    COPY("cuMemcpy3DPeerAsync, stream 0", ALL, PEER(NULL, NULL, cuMemcpy3DPeerAsync(&c, NULL))),
    COPY("cuMemcpy3DPeer", ALL, PEER(NULL, NULL, cuMemcpy3DPeer(&c))),
#if CUDA_VERSION >= 13000
    COPY("cuMemcpyBatchAsync", ALL, CUdeviceptr to = s->to, from = s->from; size_t n = bytes, first = 0;
         CUmemcpyAttributes a = {}; a.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
         return cuMemcpyBatchAsync(&to, &from, &n, 1, &a, &first, 1, s->stream);),
#endif
    COPY("cuMemcpyHtoDAsync, pageable", TO_DEVICE, return cuMemcpyHtoDAsync(s->to, pageable, bytes, s->stream);),
    COPY("cuMemcpyHtoDAsync, pinned", TO_DEVICE, return cuMemcpyHtoDAsync(s->to, pinned, bytes, s->stream);),
    COPY("cuMemcpyHtoD, pageable", TO_DEVICE, return cuMemcpyHtoD(s->to, pageable, bytes);),
    COPY("cuMemcpyAsync from pinned", TO_DEVICE, return cuMemcpyAsync(s->to, HOST(pinned), bytes, s->stream);),
    COPY("cuMemcpy2DAsync from pageable", TO_DEVICE,
         FLAT(c.srcMemoryType = CU_MEMORYTYPE_HOST; c.srcHost = pageable, cuMemcpy2DAsync(&c, s->stream))),
    COPY("3DPeerAsync, pageable to device", TO_DEVICE, PEER(pageable, NULL, cuMemcpy3DPeerAsync(&c, s->stream))),
    COPY("3DPeerAsync, pinned to device", TO_DEVICE, PEER(pinned, NULL, cuMemcpy3DPeerAsync(&c, s->stream))),
    COPY("3DPeerAsync, pinned, stream 0", TO_DEVICE, PEER(pinned, NULL, cuMemcpy3DPeerAsync(&c, NULL))),
    COPY("3DPeer, pageable to device", TO_DEVICE, PEER(pageable, NULL, cuMemcpy3DPeer(&c))),
    COPY("cuMemcpyDtoHAsync, pageable", FROM_DEVICE, return cuMemcpyDtoHAsync(pageable, s->from, bytes, s->stream);),
    COPY("cuMemcpyDtoHAsync, pinned", FROM_DEVICE, return cuMemcpyDtoHAsync(pinned, s->from, bytes, s->stream);),
    COPY("cuMemcpyDtoH, pageable", FROM_DEVICE, return cuMemcpyDtoH(pageable, s->from, bytes);),
    COPY("cuMemcpyAsync to pinned", FROM_DEVICE, return cuMemcpyAsync(HOST(pinned), s->from, bytes, s->stream);),
    COPY("3DPeerAsync, device to pageable", FROM_DEVICE, PEER(NULL, pageable, cuMemcpy3DPeerAsync(&c, s->stream))),
    COPY("3DPeerAsync, device to pinned", FROM_DEVICE, PEER(NULL, pinned, cuMemcpy3DPeerAsync(&c, s->stream))),
    COPY("3DPeer, device to pageable", FROM_DEVICE, PEER(NULL, pageable, cuMemcpy3DPeer(&c))),
    COPY("cuMemsetD8Async", SET, return cuMemsetD8Async(s->to, 7, bytes, s->stream);),
    COPY("cuMemsetD2D8Async", SET, return cuMemsetD2D8Async(s->to, 4096, 7, 4096, bytes / 4096, s->stream);),
    COPY("cuMemsetD8", SET, return cuMemsetD8(s->to, 7, bytes);),
    COPY("cuMemsetD32", SET, return cuMemsetD32(s->to, 0x07070707, bytes / 4);),
};

/* ---- the questions ----------------------------------------------------------------------------------------------- */

static void settle(void)
{
    for (int d = 0; d < 2; d++) {
        OK(cuCtxSetCurrent(context[d]));
        OK(cuCtxSynchronize());
    }
}

static void fill(CUdeviceptr p, int device, int value)
{
    OK(cuCtxSetCurrent(context[device]));
    OK(cuMemsetD8(p, (unsigned char)value, bytes));
    settle();
}

static bool has(CUdeviceptr p, int device, int value)
{
    static unsigned char *seen;
    if (!seen) seen = (unsigned char *)malloc(bytes);
    OK(cuCtxSetCurrent(context[device]));
    OK(cuMemcpyDtoH(seen, p, bytes));
    return seen[0] == value && seen[bytes / 2] == value && seen[bytes - 1] == value;
}

/* The copy, with `current`'s context current; the source and pinned and pageable memory have 7s. */
static CUresult answer(const copy *c, const sides *s, int current)
{
    if (c->what & FROM_DEVICE) fill(s->from, s->from_device, 7);
    if (c->what & (TO_DEVICE | SET)) fill(s->to, s->to_device, 1);
    memset(pinned, c->what & TO_DEVICE ? 7 : 1, bytes);
    memset(pageable, c->what & TO_DEVICE ? 7 : 1, bytes);
    OK(cuCtxSetCurrent(context[current]));
    CUresult result = c->call(s);
    CUresult after = cuStreamSynchronize(s->stream);
    if (result || after) return result ? result : after;
    settle();
    if (c->what & (TO_DEVICE | SET)) return has(s->to, s->to_device, 7) ? CUDA_SUCCESS : (CUresult)-1;
    return pinned[bytes - 1] == 7 || pageable[bytes - 1] == 7 ? CUDA_SUCCESS : (CUresult)-1;
}

int main()
{
    int devices = 0;
    OK(cuInit(0));
    OK(cuDeviceGetCount(&devices));
    if (devices < 2) return puts("needs two devices"), 0;
    for (int d = 0; d < 2; d++) {
        OK(cuDevicePrimaryCtxRetain(&context[d], d));
        OK(cuCtxSetCurrent(context[d]));
        OK(cuStreamCreate(&stream[d], CU_STREAM_NON_BLOCKING));
        for (int i = 0; i < 2; i++) {
            OK(cuMemAlloc(&memory[0][d][i], bytes));
            memory[1][d][i] = mapped_memory(d);
            memory[2][d][i] = memory_of_a_pool(d);
        }
    }
    pageable = (unsigned char *)malloc(bytes);
    OK(cuMemHostAlloc((void **)&pinned, bytes, CU_MEMHOSTALLOC_PORTABLE));

    printf("memory of device 1              "
           "cuMemAlloc       mapped           mapped           mapped           pool\n"
           "current device, stream of       "
           "0, 1             0, 1             0, 0             1, 1             0, 1\n");
    for (const copy &c : copies) {
        printf("%-32s", c.name);
        for (int k = 0; k < 5; k++) {
            int kind = k == 4 ? 2 : k > 0;
            sides s = {memory[kind][1][0], memory[kind][1][1], 1, 1, stream[k != 2]};
            printf("%-17s", text(answer(&c, &s, k == 3)));
        }
        puts("");
    }
    printf("\nfrom device 0 to device 1       cuMemAlloc       cuMemAlloc       mapped           mapped"
           "           mapped, cuMemAlloc  cuMemAlloc, mapped\n"
           "current device and stream of    0                1                0                1                0"
           "                   0\n");
    for (const copy &c : copies) {
        if (c.what != ALL) continue;
        printf("%-32s", c.name);
        for (int k = 0; k < 6; k++) {
            int now = k < 4 && k & 1, from = k >= 2 && k <= 4, to = k >= 2 && k != 4;
            sides s = {memory[from][0][0], memory[to][1][1], 0, 1, stream[now]};
            printf(k < 4 ? "%-17s" : "%-20s", text(answer(&c, &s, now)));
        }
        puts("");
    }
    return 0;
}
