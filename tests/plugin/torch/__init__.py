"""What galloc_torch.py uses of PyTorch, for tests/plugin/torch_module.py."""

import ctypes
import types

__version__ = "2.11.0+cu130"
version = types.SimpleNamespace(hip=None, cuda="13.0")
_C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
current = []  # the allocator that has been made PyTorch's

SETTERS = ("set_init_fn", "set_reset_fn", "set_memory_fraction_fn", "set_base_alloc_fn", "set_record_stream_fn",
           # PyTorch 2.3 and later; 2.1 and 2.2; 2.0
           "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool",
           "set_begin_allocate_stream_to_pool", "set_end_allocate_stream_to_pool_fn",
           "set_capture_begin_fn", "set_capture_about_to_end_fn", "set_capture_ended_fn", "set_capture_destroy_fn")


class Setters(dict):
    """PyTorch's object: the addresses of the hooks by the names of their setters. It has the setters of all releases."""


for setter in SETTERS:
    setattr(Setters, setter, lambda self, address, name=setter: self.update({name: address}))


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        self.functions = getattr(library, malloc), getattr(library, free)
        self.setters = Setters()

    def allocator(self):
        return self.setters


def change_current_allocator(allocator):
    if current:
        raise RuntimeError("Can't swap an already initialized allocator")
    current.append(allocator)


cuda = types.SimpleNamespace(memory=types.SimpleNamespace(CUDAPluggableAllocator=CUDAPluggableAllocator,
                                                          change_current_allocator=change_current_allocator))
