/* override_users.c - memory of cudaMalloc of one library (override_user.c) is freed by cudaFreeAsync of another one: it
   waits for the work with the memory. For a device that works only while it is waited for (SIM_PACE=still). */

#include <cuda_runtime_api.h>
#include <stdio.h>

int first_malloc(void **ptr, size_t bytes);
int second_free_async(void *ptr);

int main(void)
{
    void *p = NULL;
    int error = first_malloc(&p, 1 << 22), before, after;
    if (!error) error = (int)cudaMemsetAsync(p, 1, 1 << 22, 0);
    before = (int)cudaStreamQuery(0);
    if (!error) error = second_free_async(p);
    after = (int)cudaStreamQuery(0);
    if (!error && before == cudaErrorNotReady && after == cudaSuccess) return 0;
    printf("error %d, the stream before the free: %d, after it: %d\n", error, before, after);
    return 1;
}
