"""galloc as Numba's memory manager. Needs galloc.py.

    NUMBA_CUDA_MEMORY_MANAGER=galloc_numba python program.py

Numba lets any stream use memory at once, and frees it without saying which streams have. So each device has a pool for
Numba alone, and a free waits for the device first, as Numba's own (cuMemFree) does.
"""

import ctypes
import os
import threading

from numba.cuda import HostOnlyCUDAMemoryManager, MemoryPointer
from numba.cuda.cudadrv import driver

import galloc

_pools = {}
_lock = threading.RLock()  # a finaliser that runs while a pool is made may ask for one


def _pool(device):
    """The pool of a device. Threads that ask at the same time get the same one."""
    with _lock:
        if device not in _pools:
            _pools[device] = galloc.Pool(os.environ.get("GALLOC_CONF", ""), device)
        return _pools[device]


class GallocManager(HostOnlyCUDAMemoryManager):
    def initialize(self):
        self.deallocations.memory_capacity = self.get_memory_info().total

    def memalloc(self, size):
        pool, pending = _pool(self.context.device.id), self.deallocations
        try:
            ptr = pool.malloc(size)
        except MemoryError:
            pending.clear()
            try:
                ptr = pool.malloc(size)
            except MemoryError as error:
                raise driver.CudaAPIError(2, f"CUDA_ERROR_OUT_OF_MEMORY: {error}") from None

        def free(ptr):
            pool.drop(ptr, wait=True)

        def finalizer():
            pending.add_item(free, ptr, size)

        return MemoryPointer(self.context, ctypes.c_void_p(ptr), size, finalizer=finalizer)

    def get_memory_info(self):
        return driver.MemoryInfo(*driver.driver.cuMemGetInfo())

    def get_ipc_handle(self, memory):
        raise NotImplementedError("galloc: memory of mapped pages has no cudaIpc handle; "
                                  "without NUMBA_CUDA_MEMORY_MANAGER=galloc_numba it has")

    @property
    def interface_version(self):
        return 1


_numba_memory_manager = GallocManager
