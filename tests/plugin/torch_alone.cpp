/* torch_alone.cpp LIBRARY - memory runs out in libgalloc_torch.so where libc10_cuda.so is not loaded: the exception is
   std::bad_alloc. */

#include <dlfcn.h>
#include <new>

#include <cuda_runtime_api.h>

#include "sim.h"
#include "test.h"

static const char *library_path;

TEST(running_out_without_pytorch_is_bad_alloc)
{
    sim_options options = sim_defaults();
    int caught = 0;
    setenv("GALLOC_CONF", "memory_limit:64M,log:off", 1);
    EXPECT_EQ(sim_start(&options), 0);
    void *library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
    if (!EXPECT(library)) return;
    auto torch_malloc =
        reinterpret_cast<void *(*)(size_t, int, cudaStream_t)>(dlsym(library, "galloc_hook_malloc"));
    try {
        (void)torch_malloc(size_t(100) << 20, 0, nullptr);
    } catch (const std::bad_alloc &) {
        caught = 1;
    }
    EXPECT_EQ(caught, 1);
    sim_stop();
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    library_path = argv[1];
    return test_main(1, argv);
}
