"""What galloc_torch.py uses of PyTorch, for tests/plugin/torch_module.py."""

import ctypes
import types

__version__ = "2.11.0+cu130"
version = types.SimpleNamespace(hip=None, cuda="13.0")
_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
current = []  # the allocator that has been made PyTorch's


class Setters(dict):
    """PyTorch's object: the hooks by the names of their setters."""

    def set_record_stream_fn(self, address):
        self["record_stream"] = address

    def set_reset_fn(self, address):
        self["reset"] = address


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        self.setters = Setters(malloc=getattr(library, malloc), free=getattr(library, free))

    def allocator(self):
        return self.setters


def change_current_allocator(allocator):
    if current:
        raise RuntimeError("Can't swap an already initialized allocator")
    current.append(allocator)


cuda = types.SimpleNamespace(memory=types.SimpleNamespace(CUDAPluggableAllocator=CUDAPluggableAllocator,
                                                          change_current_allocator=change_current_allocator))
