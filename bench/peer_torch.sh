#!/bin/sh
# peer_torch.sh LIBRARY - builds PyTorch's allocator (peer_torch.cpp) as LIBRARY, where a Python with PyTorch for CUDA
# is found. LIBRARY with .txt in place of .so says what was built, or why nothing was: that is no failure.
#
# Environment
#   PYTHON   the Python that has PyTorch (python3)
#   CXX      a C++ compiler (g++)
#   TOOLKIT  the folder of CUDA's headers

export LC_ALL=C # numbers have a point, whatever the locale
cd "$(dirname "$0")/.." || exit 1
library=$1
report=${library%.so}.txt
python=${PYTHON:-python3} compiler=${CXX:-g++}
mkdir -p "$(dirname "$library")" || exit 1
rm -f "$library" "$report"

say() {
    echo "$*" >"$report"
    echo "  allocator torch: $*"
    exit 0
}

# Its folder and version, without importing it: that takes seconds.
find_torch='
import importlib.util, os, runpy
spec = importlib.util.find_spec("torch")
if spec is None: raise SystemExit(1)
folder = os.path.dirname(spec.origin)
version = runpy.run_path(os.path.join(folder, "version.py"))
print(folder, version["__version__"], version.get("cuda"))'

command -v "$python" >/dev/null 2>&1 || say "not built: $python is not found"
found=$("$python" -c "$find_torch" 2>/dev/null) || say "not built: $python has no PyTorch"
cuda=${found##* } rest=${found% *}
version=${rest##* } folder=${rest% *}
[ "$cuda" != None ] || say "not built: PyTorch $version is not for CUDA"
[ -e "$folder/lib/libc10_cuda.so" ] || say "not built: PyTorch $version has no libc10_cuda.so in $folder/lib"
[ -e "$folder/include/c10/cuda/CUDACachingAllocator.h" ] || say "not built: PyTorch $version came without its headers"
command -v "$compiler" >/dev/null 2>&1 || say "not built: $compiler is not found"

[ ! "$TOOLKIT" -ef /usr/include ] || TOOLKIT=bench # g++ finds nothing when it is told to look there first

# Newer versions ask for a newer C++.
for standard in c++17 c++20; do
    "$compiler" -std=$standard -O2 -fPIC -shared -I. -I"$folder/include" -isystem "$TOOLKIT" bench/peer_torch.cpp \
        -o "$library" -L"$folder/lib" -lc10_cuda -lc10 -Wl,-rpath,"$folder/lib" >"$report.log" 2>&1 || continue
    rm -f "$report.log"
    say "PyTorch $version"
done
reason=$(grep -m 1 'error' "$report.log")
say "not built: PyTorch $version does not compile: $reason (all of it in $report.log)"
