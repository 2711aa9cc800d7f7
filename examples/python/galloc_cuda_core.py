"""galloc as a memory resource of cuda.core. Needs galloc.py.

    resource = galloc_cuda_core.GallocMemoryResource(device)
    buffer = resource.allocate(1 << 20, stream=stream)
    buffer.close(stream)        # on the stream that used it last
"""

from cuda.core import Buffer, MemoryResource

import galloc


class GallocMemoryResource(MemoryResource):
    """Buffers of one device, from its default pool or from a galloc.Pool."""

    def __init__(self, device=0, pool=None):
        self._pool = pool or galloc.default_pool(getattr(device, "device_id", device))
        self._on_streams = {}  # galloc.Known by the address of a buffer: closed streams have the handle 0, or none

    def allocate(self, size, *, stream):
        known = galloc.Known(stream)
        ptr = self._pool.malloc(size, stream)
        try:
            self._on_streams[ptr] = known
            return Buffer.from_handle(ptr, size, self, stream=stream)
        except BaseException:
            self._drop(ptr, stream)
            raise

    def deallocate(self, ptr, size, *, stream):
        self._drop(int(ptr), stream)

    def _drop(self, ptr, stream):  # cuda.core prints an exception and forgets the address
        self._pool.drop(ptr, stream, known=self._on_streams.pop(ptr, None))

    @property
    def device_id(self):
        return self._pool.device

    @property
    def is_device_accessible(self):
        return True

    @property
    def is_host_accessible(self):
        return False

    @property
    def is_managed(self):
        return False
