"""One program on galloc's memory under a package of Python; its last line says what it did. python.sh runs all.

    python_programs.py PROGRAM
"""

import os
import random
import subprocess
import sys
import time


def work():
    """Arrays of CuPy come and go, sizes vary, and every result is checked."""
    import cupy
    random.seed(1)
    held, begin = [], time.perf_counter()
    for step in range(2000):
        n = random.choice((10, 1000, 100000, 3000000))
        a = cupy.full(n, step, dtype=cupy.int64)
        held.append((a + 1, step + 1, n))
        if len(held) > 30:
            b, value, n = held.pop(random.randrange(len(held)))
            assert int(b.sum()) == value * n
    cupy.cuda.runtime.deviceSynchronize()
    return time.perf_counter() - begin


def cupy():
    import cupy
    pool = cupy.get_default_memory_pool()
    own_seconds = work()
    own = pool.total_bytes()
    pool.free_all_blocks()
    import galloc
    import galloc_cupy
    galloc_cupy.install()
    seconds = work()
    memory = galloc.default_pool().memory()
    assert memory["live"] == 0 and pool.total_bytes() == 0
    return (f"held {memory['held_peak'] >> 20} MiB for {memory['live_peak'] >> 20} live in {seconds:.2f} s; "
            f"CuPy's pool {own >> 20} MiB in {own_seconds:.2f} s")


def cupy_streams():
    import cupy
    import galloc
    import galloc_cupy
    galloc_cupy.install()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    sums = []
    for step in range(400):
        i, j = random.randrange(4), random.randrange(4)
        with streams[i]:
            block = galloc.Block(4 << 20, streams[i])
            memory = cupy.cuda.UnownedMemory(block.ptr, block.size, block, 0)
            a = cupy.ndarray(1 << 20, cupy.int32, cupy.cuda.MemoryPointer(memory, 0))
            a.fill(step)
            event = streams[i].record()
        streams[j].wait_event(event)
        with streams[j]:
            sums.append((a.sum(dtype=cupy.int64), step))
        block.free(streams[j])  # on the stream that used it last
        del a
    cupy.cuda.runtime.deviceSynchronize()
    assert all(int(total) == step << 20 for total, step in sums)
    return f"400 arrays on four streams, held {galloc.default_pool().memory()['held_peak'] >> 20} MiB"


def cupy_devices():
    """Two devices: copies in both directions, of old and new pages, and kernels on the other device's arrays."""
    import cupy
    import galloc
    import galloc_cupy
    galloc_cupy.install()
    for step in range(50):
        n = (1000, 1 << 20, (3 << 20) + 1000 * step)[step % 3]
        with cupy.cuda.Device(0):
            a = cupy.full(n, step, dtype=cupy.int64)
            cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Device(1):
            b = cupy.asarray(a)
            c = b + cupy.ones(n, dtype=cupy.int64)
            d = a + b if cupy.cuda.runtime.deviceCanAccessPeer(1, 0) else 2 * b
            cupy.cuda.get_current_stream().synchronize()
            assert int(d.sum()) == 2 * step * n
        with cupy.cuda.Device(0):
            assert int(cupy.asarray(c).sum()) == (step + 1) * n
            cupy.cuda.get_current_stream().synchronize()
        del a, b, c, d
    held = [galloc.default_pool(device).memory()["held_peak"] >> 20 for device in (0, 1)]
    return f"50 rounds on two devices, held {held[0]} and {held[1]} MiB"


def cupy_exhaust():
    import cupy
    import galloc_cupy
    galloc_cupy.install()
    try:
        cupy.zeros(1 << 40, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError as error:
        assert "out of memory" in str(error)
    else:
        raise SystemExit("1 TiB was allocated")
    assert int(cupy.ones(1000).sum()) == 1000
    return "CuPy's exception, and the program goes on"


def numba():
    if os.environ.get("NUMBA_CUDA_MEMORY_MANAGER") != "galloc_numba":
        environment = {**os.environ, "NUMBA_CUDA_MEMORY_MANAGER": "galloc_numba"}
        return subprocess.run([sys.executable, __file__, "numba"], check=True, text=True, stdout=subprocess.PIPE,
                              env=environment).stdout.strip()
    import numpy
    from numba import cuda

    @cuda.jit
    def double(a):
        i = cuda.grid(1)
        if i < a.size:
            a[i] *= 2

    for step in range(300):
        a = numpy.arange(1 + step * 1000, dtype=numpy.int64)
        d = cuda.to_device(a, stream=cuda.stream())
        cuda.synchronize()
        double[(a.size + 255) // 256, 256](d)
        assert (d.copy_to_host() == 2 * a).all()
    import galloc_numba
    memory = galloc_numba._pool(0).memory()
    assert memory["live_peak"] >= 299001 * 8
    return f"300 arrays, held {memory['held_peak'] >> 20} MiB"


def cuda_core():
    from cuda.core import Device
    import galloc
    import galloc_cuda_core
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    resource = galloc_cuda_core.GallocMemoryResource(device)
    for size in (1, 1 << 20, 100 << 20):
        buffer = resource.allocate(size, stream=stream)
        assert buffer.size == size and buffer.is_device_accessible and not buffer.is_host_accessible
        buffer.close(stream)
    stream.sync()
    assert galloc.default_pool().memory()["live"] == 0
    return f"held {galloc.default_pool().memory()['held_peak'] >> 20} MiB"


print(globals()[sys.argv[1]]())
