/* device_sim.c - device.h on the simulated device. */

#include "device.h"

#include "sim.h"

#define DEVICE_MEMORY ((size_t)141 << 30)
#define DEVICE_LAG 512 /* operations that the device runs behind the host */
#define FINDINGS_SHOWN 5

const char *const device_backend = "sim";

static cudaStream_t held_stream;
static int devices_wanted = 1;
static double other_us; /* cost of calls that are the bench's own, and of those before the account began */

/* None of them is called by the bench itself. */
static const char *const looks[] = {
    "cuStreamIsCapturing", "cuStreamGetCaptureInfo", "cuStreamGetId", "cuStreamGetCtx", "cuStreamGetDevice",
    "cuStreamGetFlags",    "cuCtxGetCurrent",        "cuCtxGetId",    "cuCtxGetDevice",
};
enum { LOOKS = sizeof looks / sizeof *looks };

int device_start(bool behind)
{
    sim_options options = sim_defaults();
    options.devices = devices_wanted;
    options.memory = DEVICE_MEMORY;
    options.panic = 0; /* what would crash becomes a finding */
    options.lag = behind ? DEVICE_LAG : 0;
    return sim_start(&options);
}

void device_stop(void)
{
    sim_stop();
}

void device_describe(char *text, size_t size)
{
    snprintf(text, size, "SIMULATED device (no GPU), %zu GiB: driver calls are counted, their cost is a model",
             DEVICE_MEMORY >> 30);
}

void device_count(int devices)
{
    devices_wanted = devices;
}

static cudaError_t launch(cudaStream_t stream, void *ptr, size_t bytes, int how, uint64_t tag)
{
    sim_access access = {ptr, bytes, how, tag};
    return sim_launch(stream, &access, 1);
}

cudaError_t device_write(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag)
{
    return launch(stream, ptr, bytes, SIM_WRITE, tag);
}

cudaError_t device_check(cudaStream_t stream, void *ptr, size_t bytes, uint64_t tag)
{
    return launch(stream, ptr, bytes, SIM_READ | SIM_CHECK, tag);
}

cudaError_t device_use(cudaStream_t stream, void *ptr, size_t bytes)
{
    return launch(stream, ptr, bytes, SIM_WRITE, 0);
}

cudaError_t device_order(cudaStream_t earlier, cudaStream_t later)
{
    double before = sim_cost_us();
    cudaEvent_t event;
    cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error) return error;
    error = cudaEventRecord(event, earlier);
    if (!error) error = cudaStreamWaitEvent(later, event, 0);
    cudaEventDestroy(event);
    other_us += sim_cost_us() - before;
    return error;
}

cudaError_t device_stream_open(cudaStream_t *stream)
{
    double before = sim_cost_us();
    cudaError_t error = cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
    other_us += sim_cost_us() - before;
    return error;
}

cudaError_t device_stream_close(cudaStream_t stream)
{
    double before = sim_cost_us();
    cudaError_t error = cudaStreamDestroy(stream);
    other_us += sim_cost_us() - before;
    return error;
}

bool device_idle(cudaStream_t stream)
{
    return sim_stream_done(stream);
}

cudaError_t device_finish(void)
{
    double before = sim_cost_us();
    cudaError_t error = cudaDeviceSynchronize();
    other_us += sim_cost_us() - before;
    return error;
}

/* The simulated device sees that nothing can go on, and says so at once. */
int device_hold(void)
{
    cudaError_t error = cudaStreamCreateWithFlags(&held_stream, cudaStreamNonBlocking);
    if (!error) {
        sim_hold(held_stream, 1);
        error = sim_launch(held_stream, NULL, 0);
    }
    if (!error) return 0;
    fprintf(stderr, "no work can be held: %s\n", cudaGetErrorString(error));
    return -1;
}

void device_sign(void)
{
}

void device_let_go(void)
{
    sim_hold(held_stream, 0);
    cudaStreamDestroy(held_stream);
}

bool device_past_of(cudaStream_t stream, void *ptr, size_t bytes, device_past *past)
{
    sim_past found = sim_past_of(stream, ptr, bytes);
    *past = (device_past){found.moved, found.moved_busy, found.handed_over != 0, found.handed_over_busy != 0};
    return true;
}

long device_findings(FILE *out)
{
    long n = sim_findings(SIM_ANY);
    for (long i = 0; i < n && i < FINDINGS_SHOWN; i++) fprintf(out, "  found: %s\n", sim_finding(i));
    if (n > FINDINGS_SHOWN) fprintf(out, "  and %ld more\n", n - FINDINGS_SHOWN);
    return n;
}

long device_races(void)
{
    return sim_findings(SIM_RACE);
}

/* The counters of calls begin with the device, before which no allocator calls anything. */
void account_reset(void)
{
    sim_physical_peak_reset(0);
    other_us = sim_cost_us();
}

size_t account_held(void)
{
    return sim_physical(0);
}

size_t account_peak(void)
{
    return sim_physical_peak(0);
}

uint64_t account_calls(const char *function)
{
    return (uint64_t)sim_calls(function);
}

int64_t account_looks(void)
{
    int64_t n = 0;
    for (int i = 0; i < LOOKS; i++) n += sim_calls(looks[i]);
    return n;
}

double account_looks_us(void)
{
    double us = 0;
    for (int i = 0; i < LOOKS; i++) us += sim_cost_us_of(looks[i]);
    return us;
}

double account_us(void)
{
    return sim_cost_us() - other_us - account_looks_us();
}

/* The device counts by itself. */
void account_stand_before(const char *symbol, void **function)
{
    (void)symbol;
    (void)function;
}
