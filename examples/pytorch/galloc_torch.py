"""galloc as PyTorch's CUDA allocator. Needs libgalloc_torch.so (make adapters) beside this file or in
GALLOC_TORCH_LIBRARY.

    import galloc_torch
    galloc_torch.install()                      # before the first CUDA tensor: galloc serves all of them
    galloc_torch.install(full=True)             # the same, and torch.cuda.memory_stats() and its like work; needs g++

    with galloc_torch.use_pool():               # or: only the tensors made in this block, by this thread
        cache = torch.zeros(...)

GALLOC_CONF has galloc's settings: GALLOC_CONF=memory_limit:20G python train.py
"""

import contextlib
import ctypes
import glob
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile

import torch

__all__ = ["install", "installed", "allocator", "use_pool", "trimmed", "memory_stats", "memory_allocated",
           "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"]

# Setters of PyTorch's object, by name, and the hook that each gets. A release has those of its time: the last three
# groups are of 2.3 and later, 2.1 and 2.2, and 2.0.
_SETTERS = {
    "set_init_fn": "init",
    "set_reset_fn": "reset",
    "set_memory_fraction_fn": "memory_fraction",
    "set_base_alloc_fn": "base_alloc",
    "set_record_stream_fn": "record_stream",
    "set_release_pool": "release_pool",
    "set_begin_allocate_to_pool": "begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "end_allocate_to_pool",
    "set_begin_allocate_stream_to_pool": "begin_allocate_stream_to_pool",
    "set_end_allocate_stream_to_pool_fn": "end_allocate_stream_to_pool",
    "set_capture_begin_fn": "capture_begin",
    "set_capture_ended_fn": "capture_ended",
    "set_capture_destroy_fn": "release_pool",
}
# Without these, memory could be reused too early (record_stream).
_REQUIRED = ("set_record_stream_fn",)

_library = None
_installed = None


def _load():
    """The library; an error says how to build it."""
    global _library
    if _library is None:
        path = os.environ.get("GALLOC_TORCH_LIBRARY")
        if not path:
            path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgalloc_torch.so")
        path = os.path.abspath(path)  # a name without a folder would be searched among the system's libraries
        if not os.path.exists(path):
            raise ImportError(f"galloc_torch: {path} is not there. Build it in galloc's folder (make adapters, which "
                              "writes it to build/), and put it beside galloc_torch.py or name it in "
                              "GALLOC_TORCH_LIBRARY")
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise ImportError(f"galloc_torch: {path} cannot be loaded: {error}. Build it with the CUDA Toolkit of "
                              f"PyTorch's major version; this is PyTorch {torch.__version__} with CUDA "
                              f"{torch.version.cuda}") from error
        _library = library
        _library.galloc_hook_stats.restype = ctypes.c_size_t
        _library.galloc_hook_stats.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
        _library.galloc_hook_stats_reset.argtypes = [ctypes.c_int]
    return _library


def _address(name):
    return ctypes.cast(getattr(_load(), "galloc_hook_" + name), ctypes.c_void_p).value


def allocator(malloc="malloc"):
    """A new torch.cuda.memory.CUDAPluggableAllocator with all hooks that this release of PyTorch has.

    malloc="malloc" raises torch.OutOfMemoryError itself, as change_current_allocator needs it; malloc="segment" returns
    NULL when memory has run out, as MemPool needs it.
    """
    if torch.version.hip is not None:
        raise RuntimeError("galloc_torch: galloc is for CUDA; this PyTorch was built for ROCm")
    _load()
    made = torch.cuda.memory.CUDAPluggableAllocator(_library._name, "galloc_hook_" + malloc, "galloc_hook_free")
    inner = made.allocator()
    missing = [name for name in _REQUIRED if not hasattr(inner, name)]
    if missing:
        raise RuntimeError(f"galloc_torch: PyTorch {torch.__version__} has no {', '.join(missing)}: without it a "
                           "tensor that two streams use is not safe. Supported are PyTorch 2.0 and later")
    for setter, hook in _SETTERS.items():
        if hasattr(inner, setter):
            getattr(inner, setter)(_address(hook))
    return made


def install(full=False):
    """Makes galloc the allocator of all CUDA tensors of the process. Call it before the first one is made.

    full=True also serves torch.cuda.memory_stats, memory_summary, memory_allocated, _snapshot, _record_memory_history,
    observers of running out and torch.profiler(profile_memory=True). It compiles galloc_torch.cpp for this release of
    PyTorch, which takes half a minute the first time.
    """
    global _installed
    if _installed is not None:
        if full and not isinstance(_installed, ctypes.CDLL):
            raise RuntimeError("galloc_torch: galloc is installed without full=True, and cannot be installed again")
        return
    advice = ("galloc_torch: install() must come before the first use of CUDA memory, and no other allocator may have "
              "been installed. PyTorch says: ")
    if full:
        library = _load_full()
        message = library.galloc_torch_install()
        if message:
            raise RuntimeError(advice + message.decode())
        _installed = library
    else:
        made = allocator()
        try:
            torch.cuda.memory.change_current_allocator(made)
        except RuntimeError as error:
            raise RuntimeError(advice + str(error)) from error
        _installed = made
    # torch.compile(mode="reduce-overhead"): graph trees need checkpoints of PyTorch's own pools; plain graphs work.
    try:
        import torch._inductor.config as inductor
        inductor.triton.cudagraph_trees = False
    except (ImportError, AttributeError):
        pass  # this PyTorch cannot compile, or has no graph trees


def _cuda_include():
    """The folder of cuda_runtime_api.h: CUDA_HOME, /usr/local/cuda, or the packages that PyTorch brings."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [os.path.join(home, "include") for home in homes if home]
    folders += glob.glob(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia", "*", "include"))
    for folder in folders:
        if os.path.exists(os.path.join(folder, "cuda_runtime_api.h")):
            return folder
    raise RuntimeError("galloc_torch: cuda_runtime_api.h is not found; CUDA_HOME=... says where the CUDA Toolkit is")


def _cached(name):
    """Where a file of the cache is or shall be: ~/.cache/galloc_torch, or a folder of this process where that cannot be
    written or nobody knows what ~ is."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(home, "galloc_torch")
    usable = os.path.isabs(folder)
    try:
        if usable:
            os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        usable = False
    path = os.path.join(folder, name)
    if usable and (os.path.exists(path) or os.access(folder, os.W_OK)):
        return path
    return os.path.join(tempfile.mkdtemp(prefix="galloc_torch."), name)


def _load_full():
    """galloc_torch.cpp, compiled for this PyTorch; the result is kept in ~/.cache/galloc_torch."""
    _load()
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "galloc_torch.cpp")
    base = os.path.dirname(torch.__file__)
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 5):
        raise RuntimeError(f"galloc_torch: full=True needs PyTorch 2.5 or later, this is {torch.__version__}")
    if not os.path.exists(source):
        raise RuntimeError(f"galloc_torch: full=True needs {source}, which comes with galloc_torch.py")
    command = [*shlex.split(os.environ.get("CXX") or "c++"), "-O2", "-fPIC", "-shared", "-w",
               "-std=c++20" if release >= (2, 15) else "-std=c++17",
               f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-I" + base + "/include",
               "-I" + base + "/include/torch/csrc/api/include", "-I" + _cuda_include(), source, _library._name,
               "-L" + base + "/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    with open(source, "rb") as file:
        key = hashlib.sha256(file.read() + " ".join(command).encode() + torch.__version__.encode()).hexdigest()[:16]
    target = _cached(f"galloc_torch-{torch.__version__}-{key}.so")
    if not os.path.exists(target):
        print(f"galloc_torch: compiling for PyTorch {torch.__version__}, once", file=sys.stderr, flush=True)
        # In a folder of its own: processes on several machines may share the cache, and have the same number.
        with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as folder:
            made = os.path.join(folder, "made.so")
            try:
                result = subprocess.run(command + ["-o", made], capture_output=True, text=True)
            except OSError as error:
                raise RuntimeError(f"galloc_torch: full=True needs a C++ compiler ({error}); CXX=... names one. "
                                   "install() without it needs none") from error
            if result.returncode:
                raise RuntimeError("galloc_torch: galloc_torch.cpp does not compile for PyTorch " + torch.__version__ +
                                   ". install() without full=True needs no compiler.\n" + result.stderr[-2000:])
            os.rename(made, target)
    library = ctypes.CDLL(target)
    library.galloc_torch_install.restype = ctypes.c_char_p
    return library


def installed():
    """Whether install() has been called."""
    return _installed is not None


_pool_allocator = None


def _mem_pool():
    global _pool_allocator
    if not hasattr(torch.cuda, "MemPool"):
        raise RuntimeError(f"galloc_torch: PyTorch {torch.__version__} has no torch.cuda.MemPool (2.5 and later have)")
    if installed():
        raise RuntimeError("galloc_torch: after install() galloc serves all tensors; a MemPool is not needed")
    if _pool_allocator is None:
        _pool_allocator = allocator("segment")
    return torch.cuda.MemPool(_pool_allocator.allocator())


@contextlib.contextmanager
def use_pool(pool=None, device=None):
    """PyTorch's allocator takes its segments from galloc for the tensors that this thread makes in the block.

    Yields the torch.cuda.MemPool, for a later use_pool(pool). PyTorch still caches and splits the segments.
    """
    pool = pool or _mem_pool()
    with torch.cuda.use_mem_pool(pool, device):
        yield pool


@contextlib.contextmanager
def trimmed():
    """At the end of the block, also by an exception, all unused memory returns to the device. Waits for the device."""
    try:
        yield
    finally:
        torch.cuda.empty_cache()


def memory_stats(device=None):
    """Counters of a device: those of torch.cuda.memory_stats() that mean the same, and galloc's own ("galloc....")."""
    text = ctypes.create_string_buffer(4096)
    if not _load().galloc_hook_stats(torch.cuda._utils._get_device_index(device, optional=True), text, 4096):
        return {}
    return json.loads(text.value)


def memory_allocated(device=None):
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device=None):
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device=None):
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device=None):
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


def reset_peak_memory_stats(device=None):
    _load().galloc_hook_stats_reset(torch.cuda._utils._get_device_index(device, optional=True))
