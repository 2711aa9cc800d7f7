"""galloc for Python: device memory from galloc's library, by ctypes. Needs libgalloc_python.so (make adapters) beside
this file or in GALLOC_PYTHON_LIBRARY. GALLOC_CONF has galloc's settings.

    import galloc
    p = galloc.malloc(1 << 20, stream)      # an address; stream: 0, a handle, or an object of CuPy, PyTorch, cuda.core
    galloc.free(p, stream)                  # on the stream that used it last

    block = galloc.Block(1 << 20, stream)   # the same, freed with the object
    pool = galloc.Pool("memory_limit:4G")   # a pool of its own: pool.malloc, pool.block, pool.memory, pool.trim
"""

import ctypes
import gc
import json
import operator
import os
import weakref

__all__ = ["malloc", "free", "Block", "Pool", "Known", "default_pool", "retire", "snapshot", "handle"]

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_MOST = ctypes.c_size_t(-1).value
_library = None


def _load():
    """The library; an error says how to build it."""
    global _library
    if _library is not None:
        return _library
    path = os.environ.get("GALLOC_PYTHON_LIBRARY")
    path = path or os.path.join(os.path.dirname(os.path.abspath(__file__)), "libgalloc_python.so")
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise ImportError(f"galloc: {path} is not there. Build it in galloc's folder (make adapters, which writes it "
                          "to build/), and put it beside galloc.py or name it in GALLOC_PYTHON_LIBRARY")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"galloc: {path} cannot be loaded: {error}") from error
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    out = ctypes.POINTER(pointer)
    for name, arguments in {
        "galloc_python_pool": [out, ctypes.c_char_p, number],
        "galloc_python_malloc": [pointer, out, size, size, number],
        "galloc_python_device": [size],
        "galloc_python_retirements": [],
        "galloc_python_free": [pointer, size, number, number, size],
        "galloc_python_drop": [pointer, size, number, number, size],
        "galloc_python_free_at": [out, size, number, number, size],
        "galloc_python_drop_at": [out, size, number, number, size],
        "galloc_python_record_stream": [pointer, size, number],
        "galloc_python_memory": [pointer, ctypes.POINTER(size)],
        "galloc_pool_trim": [pointer, size, ctypes.POINTER(size)],
        "galloc_python_pool_destroy": [pointer],
        "galloc_python_retire": [size],
        "galloc_python_snapshot": [pointer, out, ctypes.POINTER(size)],
        "galloc_python_forget": [pointer],
    }.items():
        try:
            getattr(library, name).argtypes = arguments
        except AttributeError as error:
            raise ImportError(f"galloc: {path} is another library, or of another version: {error}") from error
    library.galloc_python_retirements.restype = size
    library.galloc_python_message.restype = library.galloc_last_message.restype = ctypes.c_char_p
    _library = library
    return library


def _check(name, error):
    """The result of a function of the library, whose kind has the message."""
    if error:
        library = _load()
        message = library.galloc_python_message if name.startswith("galloc_python_") else library.galloc_last_message
        raise (MemoryError if error == _OUT_OF_MEMORY else RuntimeError)(message().decode(errors="replace"))


def _call(name, *arguments):
    _check(name, getattr(_load(), name)(*arguments))


def _size(nbytes):
    """A size for C, where larger numbers would wrap. No device has as much as the largest."""
    nbytes = operator.index(nbytes)
    if nbytes < 0:
        raise ValueError("galloc: a negative size")
    return min(nbytes, _MOST)


def handle(stream):
    """The cudaStream_t of a stream as a number. Streams are numbers, None (the legacy stream), objects with
    __cuda_stream__ (cuda.core, CuPy, RMM), or with ptr (CuPy), cuda_stream (PyTorch) or handle (Numba)."""
    if stream is None:
        return 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        number = int((protocol() if callable(protocol) else protocol)[1])
    else:
        for name in ("ptr", "cuda_stream", "handle"):
            value = getattr(stream, name, None)
            if value is not None:
                number = int(getattr(value, "value", value) or 0)
                break
        else:
            number = operator.index(stream)
    if not 0 <= number <= _MOST:
        raise ValueError(f"galloc: {number} is no stream")
    return number


def _retirements():
    """How often retire() was called. Memory that is older does not use the handle (galloc_python.c)."""
    return _load().galloc_python_retirements()


class Known:
    """The handle of a stream when memory was allocated for it; for Pool.drop."""

    __slots__ = ("number", "since")

    def __init__(self, stream):
        self.since = _retirements()
        self.number = handle(stream)


def _device(number):
    number = operator.index(number)
    if not 0 <= number < 1 << 31:  # -1 has a meaning of its own in C
        raise ValueError(f"galloc: there is no device {number}")
    return number


def _free(ptr, stream, device=-1, wait=False):
    """Frees memory. device: whose default streams are meant; -1: those of the memory's device."""
    ptr = 0 if ptr is None else operator.index(ptr)
    if not 0 <= ptr <= _MOST:
        raise ValueError(f"galloc: {ptr:#x} is no address")
    since = _retirements()
    _call("galloc_python_free", ptr, handle(stream), device, wait, since)


def _refuse_copy(self, protocol=None):
    """__reduce_ex__ of what owns memory: for copy.copy, copy.deepcopy and pickle. A copy would free it as well."""
    raise TypeError(f"galloc: {type(self).__name__} objects cannot be copied or pickled, since each owns its memory")


class Pool:
    """One heap on one device, with settings of its own (docs/settings.md). Close it when all its memory is freed."""

    def __init__(self, conf="", device=0):
        self.device = device = _device(device)
        if conf is not None and "\0" in conf:
            raise ValueError("galloc: the settings contain a NUL character")
        self._pool = ctypes.c_void_p()
        _call("galloc_python_pool", ctypes.byref(self._pool), None if conf is None else conf.encode(), device)

    __reduce_ex__ = _refuse_copy

    def _open(self):
        if not self._pool:
            raise RuntimeError("galloc: the pool is closed")
        return self._pool

    def malloc(self, nbytes, stream=None):
        """Allocates memory that work queued on the stream from now on may use; 0 bytes: 0. Raises MemoryError."""
        ptr = ctypes.c_void_p()
        self._malloc(ptr, nbytes, stream)
        return ptr.value or 0

    def _malloc(self, ptr, nbytes, stream):
        """The same; the C function writes the address to `ptr`."""
        arguments = self._open(), ptr, _size(nbytes), handle(stream), self.device
        error = _load().galloc_python_malloc(*arguments)
        if error == _OUT_OF_MEMORY and gc.collect() + _sweep():  # cycles may hold blocks
            error = _load().galloc_python_malloc(*arguments)
        _check("galloc_python_malloc", error)

    def free(self, ptr, stream=None, wait=False):
        """Frees memory on the stream that used it last; a default stream is that of the memory's device. wait: that
        device has finished all work first (cudaFree)."""
        _free(ptr, stream, wait=wait)

    def drop(self, ptr, stream=None, wait=False, known=None):
        """free() for finalisers, whose exceptions are lost: a free that fails is tried again, then the log has a line.
        A default stream is that of the pool's device. If the stream has no handle any more, the free waits. known: a
        Known of the stream at the allocation. Then the free also waits if that one was retired, or if the handle is 0
        and was not before."""
        ptr, since = operator.index(ptr), known.since if known else _retirements()
        try:
            number = handle(stream)
            wait = wait or bool(known and known.number and not number)
        except Exception:
            number, wait = 0, True
        _load().galloc_python_drop(ptr, number, self.device, wait, since)

    def block(self, nbytes, stream=None):
        """Memory that is freed with the object."""
        return Block(nbytes, stream, pool=self)

    def memory(self):
        """{"live": ..., "live_peak": ..., "held": ..., "held_peak": ...}, in bytes."""
        numbers = (ctypes.c_size_t * 4)()
        _call("galloc_python_memory", self._open(), numbers)
        return dict(zip(("live", "live_peak", "held", "held_peak"), numbers))

    def trim(self, keep=0):
        """Returns free memory to the device until the pool holds `keep` bytes. Waits. The bytes returned."""
        released = ctypes.c_size_t()
        _call("galloc_pool_trim", self._open(), _size(keep), ctypes.byref(released))
        return released.value

    def snapshot(self):
        """The state of the pool (docs/viewer.md), as Python's own types."""
        return snapshot(self)

    def close(self):
        """Ends the pool. All its memory must have been freed."""
        pool, self._pool = self._pool, ctypes.c_void_p()
        if pool:
            error = _load().galloc_python_pool_destroy(pool)
            if error and _sweep():
                error = _load().galloc_python_pool_destroy(pool)
            if error:
                self._pool = pool
            _check("galloc_python_pool_destroy", error)


# A reference cycle (that of an exception's traceback, say) may hold a stream's object and blocks on it. The garbage
# collector then calls their finalisers in any order, and the stream may be gone when its blocks are freed: a crash in
# the driver. But first, in Python 3.9 to 3.14, it clears weak references and calls the callbacks of those that are
# not garbage. So each stream object has one here, whose callback frees the blocks that are left. Callbacks of one
# object are called from the newest to the oldest: this one comes before that of a weakref.finalize which an object
# made to destroy its stream. The program may have closed the stream before, and a dead object does not tell. So the
# device is waited for. A block that finds the reference dead, after an interrupt in the callback, does the same.
# Without a cycle the blocks keep the object, so none is left in the callback, which then makes no CUDA call.
_streams = {}  # id of the object (equal ones may differ): the reference, and its blocks, as in _kept without the stream
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_streams))  # also when the interpreter ends it is not garbage

# The blocks on numbers, and on objects without weak references: {id of place: (place, device, reference to the block,
# stream)}. Such an object has no attributes of its own, as a rule, by which it could hold blocks. So it is kept from
# here, and goes after its last block.
_kept = {}


def _free_all(blocks, drop):
    while blocks:
        place, device = blocks.popitem()[1][:2]
        drop(place, 0, device, True, 0)


def _blocks_on(stream):
    """The weak reference to a stream, or None, and the list of its blocks."""
    if stream is None or type(stream) is int:
        return None, _kept
    key, drop = id(stream), _load().galloc_python_drop_at
    found = _streams.get(key)
    if found is not None:
        if found[0]() is stream:
            return found
        _free_all(found[1], drop)  # an interrupt ended the callback of an object that had this id
    blocks = {}

    def gone(reference, streams=_streams, free_all=_free_all):
        free_all(blocks, drop)
        if streams.get(key, (None,))[0] is reference:  # last: _sweep finds what an interrupt leaves
            del streams[key]

    try:
        made = weakref.ref(stream, gone), blocks
    except TypeError:
        return None, _kept
    if found is not None:
        _streams.pop(key, None)
    return _streams.setdefault(key, made)  # another thread may have been first


_OWN = globals().get("_OWN") or object()  # the stream of the block; a reload of the module keeps it


def _sweep():
    """Frees the memory of blocks whose finaliser an interrupt (Ctrl-C) has ended too early. Their number."""
    found = 0
    for blocks in [_kept] + [known[1] for known in list(_streams.values())]:
        for key, (place, device, block, _) in list(blocks.items()):
            if block() is None:
                found += bool(place)
                _load().galloc_python_drop_at(place, 0, device, True, 0)
                blocks.pop(key, None)
    return found


class Block:
    """Memory that is freed with the object, on the stream that it was allocated for. The object keeps the stream. If
    the garbage collector finds the object in a cycle, the memory may be freed first, and is if the stream is in that
    cycle: finalisers in the cycle must not use it."""

    __slots__ = ("size", "pool", "_place", "_stream", "_reference", "_number", "_since", "_blocks", "_drop",
                 "__weakref__")

    __reduce_ex__ = _refuse_copy

    def __init__(self, nbytes, stream=None, device=None, pool=None):
        self._place = place = ctypes.c_void_p()  # C functions write the address to it: an interrupt may follow
        self.size = nbytes
        self._stream = stream
        self._drop = _load().galloc_python_drop_at  # globals may be gone when the interpreter ends
        self._since = _retirements()
        self._number = handle(stream)
        self.pool = pool or default_pool(device, self._number)
        self._reference, self._blocks = _, blocks = _blocks_on(stream)
        blocks[id(place)] = place, self.pool.device, weakref.ref(self), stream if blocks is _kept else None
        self.pool._malloc(place, nbytes, self._number)

    @property
    def ptr(self):
        return self._place.value or 0

    @property
    def stream(self):
        return self._stream

    def _handle(self):
        """The handle of the block's stream. Raises if the stream was closed: some objects then have the handle 0."""
        number = handle(self._stream)
        if number != self._number:
            raise RuntimeError("galloc: the stream of the block was closed. Name one that is ordered after its work")
        return number

    def free(self, stream=_OWN):
        """Frees the memory now; on another stream than the one it was allocated for if one is given (None: the legacy
        stream). After an error the block still has its memory, unless the thread has lost its context."""
        since = _retirements()
        number = self._handle() if stream is _OWN else handle(stream)
        if self._place:
            _call("galloc_python_free_at", self._place, number, -1, False, since)
        self._blocks.pop(id(self._place), None)

    def record_stream(self, stream):
        """Another stream uses the memory too: after the free it is reused only when both are done with it."""
        number = handle(stream)
        if self.size:
            _call("galloc_python_record_stream", self._place, number, self.pool.device)

    def __del__(self):
        place = getattr(self, "_place", None)
        if place:
            number, wait = 0, True
            try:
                if self._reference is None or self._reference() is not None:
                    number, wait = self._handle(), False
            except Exception:  # the stream was closed, and its work may go on
                pass
            finally:  # also after an interrupt
                self._drop(place, number, self.pool.device, wait, self._since)
        blocks = getattr(self, "_blocks", None)
        if blocks is not None:
            blocks.pop(id(place), None)


_default_pools = {}


def default_pool(device=None, stream=None):
    """The default pool of a device; if none is named, of the stream's (a default stream: the current one)."""
    if device is None:
        device = _load().galloc_python_device(handle(stream))
    else:
        device = _device(device)
    pool = _default_pools.get(device)
    if pool is None:
        pool = _default_pools.setdefault(device, Pool(None, device))
    return pool


def malloc(nbytes, stream=None, device=None):
    """Allocates from default_pool(device, stream)."""
    number = handle(stream)
    return default_pool(device, number).malloc(nbytes, number)


def free(ptr, stream=None, device=None):
    """Frees memory of any pool on the stream that used it last. A default stream is that of the memory's device, or of
    another one if it is named."""
    _free(ptr, stream, -1 if device is None else _device(device))


def retire(stream):
    """Call it before a stream is destroyed: later calls of galloc then know that its work ends. Finalisers of blocks
    that were allocated for it no longer use its handle: they wait for the device."""
    _call("galloc_python_retire", handle(stream))


def snapshot(pool=None):
    """The state of one pool, or of all, as Python's own types."""
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    try:  # all in C: a callback into Python would lose Ctrl-C
        _call("galloc_python_snapshot", None if pool is None else pool._open(), ctypes.byref(text), ctypes.byref(size))
        return json.loads(ctypes.string_at(text.value, size.value))
    finally:
        _load().galloc_python_forget(text)
