#!/bin/sh
# check_adapters.sh - the adaptors in examples/, called on the simulated device as the programs that they are made for
# call them. Environment: CC, CXX, BUILD (a folder to work in).

cd "$(dirname "$0")/../.." || exit 1
cc=${CC:-gcc} cxx=${CXX:-g++}
work="${BUILD:-build}/check_adapters with blanks" # as galloc's own path may have them
include="-I. -Itests/sim -Itests/support -isystem tests/sim/include"

. tests/support/verdicts.sh
command -v "$cxx" >/dev/null 2>&1 || {
    echo "skipped: $cxx is not found, and the callers are C++"
    echo "0 passed, 0 failed"
    exit 0
}
device=$(tests/support/device.sh "$work/sim") || exit 1

# Adds what a program prints last to the counts.
count() { # program, arguments
    timeout 120 "$@" >"$work/out" 2>&1
    status=$?
    set -- $(sed -n '$s/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$work/out")
    if [ $# -eq 2 ] && [ $status -le 1 ] && [ "$1$2" != 00 ]; then
        passed=$((passed + $1)) failed=$((failed + $2))
    else
        failed=$((failed + 1))
        echo "FAILED: status $status"
        set -- x 1
    fi
    [ "$2" = 0 ] || head -n 40 "$work/out"
}

# ---- examples/pytorch -----------------------------------------------------------------------------------------------

# The same flags as the Makefile's, and all warnings are errors. The run path comes before LD_LIBRARY_PATH, which may
# lead to a real PyTorch. -u: a C++ library that is linked statically has the function that throws, too.
runs_here='-Wl,--disable-new-dtags -Wl,-rpath,$ORIGIN'
# shellcheck disable=SC2086
"$cc" -std=gnu11 -g -Wall -Wextra -Wshadow -Werror -fPIC -shared -fexceptions -fvisibility=hidden $include \
    examples/pytorch/galloc_torch.c -o "$work/libgalloc_torch.so" -lpthread -ldl &&
    "$cxx" -std=c++17 -g -fPIC -shared $include -Wl,-soname,libc10_cuda.so tests/plugin/c10_cuda.cpp \
        -o "$work/libc10_cuda.so" &&
    "$cxx" -std=c++17 -g -Wall -Wextra -rdynamic $include tests/plugin/torch_host.cpp "$device"/*.o \
        -L"$work" -lc10_cuda $runs_here -o "$work/torch_host" -lpthread -lm -ldl &&
    "$cxx" -std=c++17 -g -Wall -Wextra -rdynamic $include -Wl,-u,_ZSt17__throw_bad_allocv \
        tests/plugin/torch_alone.cpp "$device"/*.o \
        -o "$work/torch_alone" -lpthread -lm -ldl &&
    "$cxx" -std=c++17 -g -Wall -Wextra -rdynamic -Itests/plugin -isystem tests/plugin/torch_include $include \
        examples/pytorch/galloc_torch.cpp tests/plugin/torch_full_host.cpp "$device"/*.o -L"$work" -lgalloc_torch \
        -lc10_cuda $runs_here -o "$work/torch_full_host" -lpthread -lm -ldl || exit 1
count "$work/torch_host" "$work/libgalloc_torch.so"
count "$work/torch_alone" "$work/libgalloc_torch.so"
count "$work/torch_full_host"
count env FIXED=1 "$work/torch_full_host" tensors_are_shared

# The Python module, with stand-ins for PyTorch, the library and the compiler of C++.
if command -v python3 >/dev/null 2>&1; then
    module=$work/module
    mkdir -p "$module/cuda_home/include" && : >"$module/cuda_home/include/cuda_runtime_api.h"
    cp examples/pytorch/galloc_torch.py examples/pytorch/galloc_torch.cpp "$module"
    {
        sed -n 's/^HOOK .*\(galloc_hook_[a-z_]*\)(.*/void \1(void) {}/p' examples/pytorch/galloc_torch.c
        echo 'const char *galloc_torch_install(void) { return 0; }'
    } >"$module/hooks.c"
    "$cc" -shared -fPIC -w "$module/hooks.c" -o "$module/libgalloc_torch.so" || exit 1
    cat >"$module/compiler" <<'END'
#!/bin/sh
for last; do :; done # the argument of -o
cp "$(dirname "$0")/libgalloc_torch.so" "$last"
END
    chmod +x "$module/compiler"
    count python3 tests/plugin/torch_module.py "$module"
else
    echo "skipped: python3 is not found: galloc_torch.py"
fi

# ---- examples/cpp ---------------------------------------------------------------------------------------------------

for library in one two; do
    "$cxx" -std=c++11 -g -Wall -Wextra -Wshadow -Werror -fPIC -shared -fvisibility=hidden -DLIBRARY=$library \
        -Iexamples/cpp $include tests/plugin/cpp_library.cpp -o "$work/libcpp_$library.so" || exit 1
done
"$cxx" -std=c++11 -g -Wall -Wextra -Wshadow -Werror -rdynamic -Iexamples/cpp $include tests/plugin/cpp_host.cpp \
    tests/plugin/cpp_per_thread.cpp "$device"/*.o -L"$work" -lcpp_one -lcpp_two $runs_here -o "$work/cpp_host" \
    -lpthread -lm -ldl || exit 1
count "$work/cpp_host"

# A unique symbol would keep a library in memory after dlclose.
if command -v readelf >/dev/null 2>&1; then
    holds "a library with galloc.hpp can be unloaded" sh -c '! readelf -sW "$1" | grep UNIQUE' sh "$work/libcpp_one.so"
fi

mkdir -p "$work/rmm/rmm"
cat >"$work/rmm/rmm/error.hpp" <<'END'
#include <new>
#include <string>
namespace rmm {
struct bad_alloc : std::bad_alloc {
    explicit bad_alloc(const std::string &message) : what_("std::bad_alloc: " + message) {}
    const char *what() const noexcept override { return what_.c_str(); }
    std::string what_;
};
struct out_of_memory : bad_alloc {
    explicit out_of_memory(const std::string &message) : bad_alloc("out_of_memory: " + message) {}
};
}
END
plainly="$cxx -std=c++17 -g -Wall -Wextra -Wshadow -Werror -Iexamples/cpp $include -c tests/plugin/cpp_rmm.cpp"
$plainly -o "$work/cpp_rmm.o" || exit 1
$plainly -DFINDS_RMM "-I$work/rmm" -o "$work/cpp_rmm_found.o" || exit 1
holds "galloc.hpp without RMM, where RMM is found" $plainly -DGALLOC_HPP_ALONE "-I$work/rmm" -o "$work/alone.out"
"$cxx" "$work/cpp_rmm_found.o" "$work/cpp_rmm.o" "$device"/*.o -o "$work/cpp_rmm" -lpthread -lm -ldl || exit 1
count "$work/cpp_rmm"

for file in FIRST SECOND; do
    "$cxx" -std=c++11 -g -Wall -Wextra -Wshadow -Werror -Iexamples/cpp $include -D$file -c tests/plugin/cpp_static.cpp \
        -o "$work/cpp_static_$file.o" || exit 1
done
"$cxx" "$work"/cpp_static_*.o "$device"/*.o -o "$work/cpp_static" -lpthread -lm -ldl || exit 1
count "$work/cpp_static"

# With the toolkit's CCCL also the memory resources, in the generation that it has.
home=${CUDA_HOME:-/usr/local/cuda}
if [ -e "$home/include/cccl/cuda/memory_resource" ]; then
    toolkit=$(INCLUDE=$home/include tests/support/device.sh "$work/toolkit_sim") &&
        "$cxx" -std=c++17 -g -rdynamic -DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE -Iexamples/cpp -I. -Itests/sim \
            -Itests/support -isystem "$home/include/cccl" -isystem "$home/include" tests/plugin/cpp_host.cpp \
            tests/plugin/cpp_per_thread.cpp "$toolkit"/*.o -L"$work" -lcpp_one -lcpp_two $runs_here \
            -o "$work/cpp_host_cccl" -lpthread -lm -ldl || exit 1
    count "$work/cpp_host_cccl"
fi

count_verdicts
