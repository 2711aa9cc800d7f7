"""galloc as CuPy's allocator. Needs galloc.py.

    import galloc_cupy
    galloc_cupy.install()       # all arrays from now on

    with cupy.cuda.using_allocator(galloc_cupy.allocator):    # or: those of this thread in this block
        x = cupy.zeros(...)

An array belongs to the stream that is current when it is made, as with CuPy's own pool: its memory may be reused by
later work of that stream when it is gone. Who uses it on another stream orders that stream's work before that.
"""

import cupy

import galloc

__all__ = ["install", "allocator"]


class OutOfMemoryError(cupy.cuda.memory.OutOfMemoryError):
    """CuPy's exception, with galloc's message."""

    def __init__(self, text):
        MemoryError.__init__(self, text)

    def __str__(self):
        return str(self.args[0])

    def __reduce__(self):
        return type(self), self.args


def allocator(nbytes):
    """For cupy.cuda.set_allocator."""
    device = cupy.cuda.runtime.getDevice()
    try:
        block = galloc.Block(nbytes, cupy.cuda.get_current_stream(), device)
    except MemoryError as error:
        raise OutOfMemoryError(str(error)) from None
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(block.ptr, nbytes, block, device), 0)


def install():
    cupy.cuda.set_allocator(allocator)
