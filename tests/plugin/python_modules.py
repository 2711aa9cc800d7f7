"""python_modules.py FOLDER - the modules of examples/python, which FOLDER has with a library on the simulated device.
CuPy, Numba, cuda.core and RMM are stand-ins that do what those packages do with an allocator."""

import contextlib
import copy
import functools
import gc
import os
import pickle
import subprocess
import signal
import sys
import threading
import time
import types
import weakref

folder = os.path.abspath(sys.argv[1])
sys.path.insert(0, folder)
sys.dont_write_bytecode = True
os.environ["GALLOC_CONF"] = "log:off"

import ctypes

import galloc

MIB = 1 << 20
passed = failed = 0


def test(function):
    global passed, failed
    try:
        function()
        assert galloc.default_pool().memory()["live"] == 0, galloc.default_pool().memory()
        passed += 1
    except BaseException:
        import traceback
        traceback.print_exc(file=sys.stdout)
        print(f"FAILED {function.__name__}")
        failed += 1


def raises(kind, text, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        assert text in str(error), str(error)
        return error
    raise AssertionError(f"no {kind.__name__}")


def module(name, **members):
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(members)
    return made


sim = galloc._load()


def new_stream():
    stream = ctypes.c_void_p()
    assert sim.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    return stream.value


OWN = 2  # cudaStreamPerThread


def memset(ptr, stream):
    assert sim.cudaMemsetAsync(ctypes.c_void_p(ptr), 1, ctypes.c_size_t(MIB), ctypes.c_void_p(stream)) == 0


# ---- galloc.py -------------------------------------------------------------------------------------------------------

@test
def memory_comes_back_on_its_stream():
    stream = new_stream()
    first = galloc.malloc(3 * MIB, stream)
    assert first % 512 == 0
    galloc.free(first, stream)
    assert galloc.malloc(3 * MIB, stream) == first
    galloc.free(first, stream)
    assert galloc.malloc(0) == 0
    galloc.free(0)
    raises(ValueError, "negative", galloc.malloc, -1)


@test
def numbers_that_c_would_wrap_are_errors():
    wide = 1 << 64
    for nbytes in (wide - 1, wide, wide + 4096, 1 << 70):
        raises(MemoryError, "out of memory", galloc.malloc, nbytes)
        raises(MemoryError, "out of memory", galloc.Block, nbytes)
    raises(ValueError, "negative", galloc.Block, -wide)
    for nbytes in (1.5, "1", None):
        raises(TypeError, "integer", galloc.malloc, nbytes)
    pool = galloc.Pool()
    pool.free(pool.malloc(MIB), wait=True)
    assert pool.trim(wide) == 0 and pool.trim(wide - 1) == 0
    raises(ValueError, "negative", pool.trim, -1)
    assert pool.trim(0) == 2 * MIB
    pool.close()
    p = galloc.malloc(MIB)
    raises(ValueError, "no address", galloc.free, p + wide)
    raises(ValueError, "no address", galloc.free, -1)
    for stream in (-1, wide, types.SimpleNamespace(ptr=wide)):
        raises(ValueError, "no stream", galloc.malloc, 10, stream)
        raises(ValueError, "no stream", galloc.free, p, stream)
        raises(ValueError, "no stream", galloc.Block, 10, stream)
    for stream in (1.9, 0.0, "1"):
        raises(TypeError, "integer", galloc.malloc, 10, stream)
    for ptr in ("x", b"x", 512.0):
        raises(TypeError, "integer", galloc.free, ptr)
    galloc.free(None)
    galloc.free(p)


@test
def settings_are_read_to_their_end():
    raises(ValueError, "NUL", galloc.Pool, "overhead:0\0,this is junk")
    raises(RuntimeError, "this is junk", galloc.Pool, "overhead:0,this is junk")


@test
def errors_have_their_own_words():
    def stale():
        raises(RuntimeError, "0x10", galloc.free, 16)

    for device in (-1, 1 << 31, 1 << 32):
        stale()
        raises(ValueError, f"no device {device}", galloc.malloc, 10, 0, device)
        raises(ValueError, f"no device {device}", galloc.Pool, "", device)
    stale()
    raises(RuntimeError, "device 99", galloc.malloc, 10, 0, 99)
    raises(ValueError, "no device -1", galloc.free, 512, 0, -1)
    galloc.default_pool(0)
    raises(TypeError, "integer", galloc.malloc, 10, 0, 0.0)  # which equals a device that has a pool
    pool = galloc.Pool()
    p = pool.malloc(10)
    pool.device = 99  # a device that goes away
    for call, *arguments in (pool.malloc, 10), (galloc.free, p, 0, 99):
        stale()
        raises(RuntimeError, "cannot be made current: invalid device", call, *arguments)
    pool.device = 0
    pool.free(p)
    pool.close()
    for call in (pool.malloc, pool.block):
        stale()
        raises(RuntimeError, "the pool is closed", call, 10)
    for call in (pool.memory, pool.trim, pool.snapshot):
        stale()
        raises(RuntimeError, "the pool is closed", call)
    raises(RuntimeError, "the pool is closed", galloc.snapshot, pool)


@test
def streams_of_all_packages_are_understood():
    class Protocol:
        def __cuda_stream__(self):
            return 0, 77

    attribute = types.SimpleNamespace
    assert galloc.handle(None) == 0 and galloc.handle(5) == 5 and galloc.handle(Protocol()) == 77
    assert galloc.handle(attribute(__cuda_stream__=(0, 78))) == 78
    assert galloc.handle(attribute(ptr=79)) == 79 and galloc.handle(attribute(cuda_stream=80)) == 80
    assert galloc.handle(attribute(handle=ctypes.c_void_p(81))) == 81
    assert galloc.handle(attribute(handle=ctypes.c_void_p(None))) == 0


@test
def a_wrong_free_is_an_error_in_words():
    p = galloc.malloc(1000)
    galloc.free(p)
    raises(RuntimeError, "free", galloc.free, p)
    raises(RuntimeError, "0x10", galloc.free, 16)


@test
def a_pool_has_settings_of_its_own_and_says_when_it_is_full():
    pool = galloc.Pool("memory_limit:8M")
    p = pool.malloc(6 * MIB)
    raises(MemoryError, "limit", pool.malloc, 6 * MIB)
    assert pool.memory() == {"live": 6 * MIB, "live_peak": 6 * MIB, "held": 6 * MIB, "held_peak": 6 * MIB}
    raises(RuntimeError, "", pool.close)
    pool.free(p, wait=True)
    assert pool.trim() == 6 * MIB and pool.memory()["held"] == 0
    pool.close()
    pool.close()
    raises(RuntimeError, "", pool.malloc, 1)
    raises(RuntimeError, "no_such", galloc.Pool, "no_such:1")
    raises(RuntimeError, "", galloc.Pool, device=99)


@test
def a_block_goes_with_its_object():
    block = galloc.Block(MIB)
    ptr = block.ptr
    del block
    again = galloc.Block(MIB)
    assert again.ptr == ptr
    other = new_stream()
    again.record_stream(other)
    again.free(other)
    again.free()
    raises(RuntimeError, "ptr is NULL", again.record_stream, other)
    empty = galloc.Block(0, other)
    empty.record_stream(other)
    empty.free()
    raises(MemoryError, "", galloc.Block, 1 << 60)


class Stream:
    """As CuPy's: its finaliser destroys it. The simulated device ends the process if a call names it afterwards."""

    def __init__(self):
        self.ptr = new_stream()

    def __del__(self):
        assert sim.cudaStreamDestroy(ctypes.c_void_p(self.ptr)) == 0


class Equal(Stream):
    """All are equal, as CuPy's with the same handle are."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class Finalized:
    """Destroyed by the callback of a weak reference."""

    def __init__(self):
        self.ptr = new_stream()
        weakref.finalize(self, sim.cudaStreamDestroy, ctypes.c_void_p(self.ptr))


class Slots:
    """Without weak references, as many types of C."""

    __slots__ = "ptr",
    __init__, __del__ = Stream.__init__, Stream.__del__


@contextlib.contextmanager
def frees():
    """A list of the frees that the library sees from blocks made here: (address, stream, result)."""
    names, seen = ("galloc_python_free_at", "galloc_python_drop_at"), []
    real = {name: getattr(sim, name) for name in names}

    def watch(name):
        def free(place, stream, *others):
            ptr = place.value
            error = real[name](place, stream, *others)
            seen.append((ptr, stream, error))
            return error

        setattr(sim, name, free)

    for name in names:
        watch(name)
    try:
        yield seen
    finally:
        for name in names:
            setattr(sim, name, real[name])


@test
def a_stream_that_is_garbage_with_its_blocks_goes_after_them():
    gc.collect()
    known = len(galloc._streams)
    gc.disable()
    for kind in Stream, Equal, Finalized, Slots:
        for blocks_first in False, True:  # finalisers are called in the order in which the objects were made
            for attribute in (False, True) if kind is not Slots else (False,):
                with frees() as seen:
                    expected = set()
                    for _ in range(100):
                        blocks = [galloc.Block.__new__(galloc.Block) for _ in range(3)]
                        stream = kind()
                        if not blocks_first:
                            blocks = [galloc.Block.__new__(galloc.Block) for _ in range(3)]
                        for block in blocks:
                            block.__init__(MIB, stream)
                            expected.add((block.ptr, stream.ptr if kind is Slots else 0, 0))
                        expected.remove((blocks[0].ptr, stream.ptr if kind is Slots else 0, 0))
                        expected.add((blocks[0].ptr, stream.ptr, 0))
                        blocks[0].free()
                        blocks.append(blocks)
                        if attribute:
                            stream.blocks = blocks
                        else:
                            blocks.append(stream)
                        del blocks, stream, block
                    before = len(seen)
                    assert before == 100
                    gc.collect()
                    assert len(seen) == 300 and set(seen) == expected, (kind, blocks_first, len(seen))
    gc.enable()
    assert len(galloc._streams) == known and not galloc._kept


@test
def a_stream_without_a_cycle_goes_after_its_last_block():
    for kind in Stream, Finalized, Slots:
        with frees() as seen:
            stream = kind()
            first, second = galloc.Block(MIB, stream), galloc.Block(MIB, stream)
            number = stream.ptr
            del stream
            assert first.stream.ptr == number
            del first
            second.free()
            second.free()
            del second
            assert [call[1:] for call in seen] == [(number, 0)] * 2
            stream = kind()  # its number may be the same
            galloc.Block(MIB, stream)
            del stream
            assert len(seen) == 3
    assert not galloc._kept


class Closed:
    """As cuda.core's: close() destroys it, and it has no handle after that. Some releases raise then, others name 0."""

    def __init__(self, without):
        self.number, self.without = new_stream(), without

    def __cuda_stream__(self):
        return 0, int(self.without if self.number is None else self.number)

    def close(self):
        number, self.number = self.number, None
        assert sim.cudaStreamDestroy(ctypes.c_void_p(number)) == 0


@test
def a_closed_stream_that_is_garbage_with_its_blocks_is_not_used():
    gc.collect()
    gc.disable()
    for without in None, 0:
        with frees() as seen:
            stream = Closed(without)
            stream.block = galloc.Block(MIB, stream)
            for _ in range(200):
                memset(stream.block.ptr, stream.number)
            stream.close()
            assert sim.sim_pending()
            del stream
            gc.collect()
            assert len(seen) == 1 and seen[0][1:] == (0, 0) and not sim.sim_pending()
    gc.enable()


@test
def a_block_whose_stream_was_closed_goes_after_the_work_of_the_stream():
    sim.sim_pending.restype = ctypes.c_long
    for without, error, text in (None, TypeError, ""), (0, RuntimeError, "the stream of the block was closed"):
        stream = Closed(without)
        block = galloc.Block(MIB, stream)
        for _ in range(200):
            memset(block.ptr, stream.number)
        stream.close()
        raises(error, text, block.free)
        assert galloc.default_pool().memory()["live"] == MIB
        assert sim.sim_pending()
        del block
        assert not sim.sim_pending()


@contextlib.contextmanager
def interrupted(name, error=KeyboardInterrupt):
    """A KeyboardInterrupt, or what a signal handler raises, comes as soon as a function of the library has returned."""
    real = getattr(sim, name)

    def call(*arguments):
        real(*arguments)
        raise error

    setattr(sim, name, call)
    try:
        yield
    finally:
        setattr(sim, name, real)


@test
def interrupts_leave_each_block_one_owner():
    def live():
        return galloc.default_pool().memory()["live"]

    class Interrupts(Stream):
        looks = 0

        @property
        def cuda_stream(self):
            self.looks += 1
            if self.looks == 2:  # the first one was in the constructor
                raise KeyboardInterrupt
            return self.number

    before, kept = live(), len(galloc._kept)
    block = galloc.Block(MIB)
    with interrupted("galloc_python_free_at"):
        raises(KeyboardInterrupt, "", block.free)
    other = galloc.Block(MIB)
    assert not block.ptr and live() == before + MIB
    del block
    assert live() == before + MIB
    del other
    with interrupted("galloc_python_malloc"):
        raises(KeyboardInterrupt, "", galloc.Block, MIB)
    assert live() == before
    stream = Interrupts()
    stream.number, stream.ptr = stream.ptr, None
    block = galloc.Block(MIB, stream)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    del block
    sys.unraisablehook = hook
    assert stream.looks == 2 and live() == before and len(galloc._kept) == kept
    stream.ptr = stream.number


@test
def memory_of_finalisers_that_an_interrupt_ended_comes_back():
    pool = galloc.Pool("memory_limit:8M")
    for stream in None, Stream(), Slots():
        for _ in range(3):
            block = pool.block(6 * MIB, stream)
            finaliser, galloc.Block.__del__ = galloc.Block.__del__, lambda self: None
            del block
            galloc.Block.__del__ = finaliser
    pool.block(6 * MIB).free()
    pool.close()
    assert not galloc._kept


@test
def a_pool_closes_after_an_interrupted_finaliser():
    pool = galloc.Pool()
    block = pool.block(MIB)
    finaliser, galloc.Block.__del__ = galloc.Block.__del__, lambda self: None
    del block
    galloc.Block.__del__ = finaliser
    pool.close()


@test
def a_callback_that_an_interrupt_ended_leaves_no_block_on_a_stream_that_is_gone():
    gc.collect()
    gc.disable()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    real, before = sim.galloc_python_drop_at, galloc.default_pool().memory()["live"]
    for _ in range(20):
        calls = []

        def drop(*arguments, calls=calls):
            real(*arguments)
            calls.append(arguments[1])
            if len(calls) == 1:
                raise KeyboardInterrupt

        sim.galloc_python_drop_at = drop
        stream = Stream()
        stream.blocks = [galloc.Block(MIB, stream) for _ in range(3)]
        del stream
        gc.collect()
        assert calls == [0] * 3
    sim.galloc_python_drop_at, sys.unraisablehook = real, hook
    gc.enable()
    assert galloc.default_pool().memory()["live"] == before


@test
def an_object_at_the_address_of_a_dead_stream_has_a_list_of_its_own():
    stream = Stream()
    block = galloc.Block(MIB, stream)
    reference, blocks = galloc._streams[id(stream)]
    galloc._streams[id(stream)] = weakref.ref(Stream()), {1: (ctypes.c_void_p(), 0, None, None)}  # dead
    other = galloc.Block(MIB, stream)
    assert galloc._streams[id(stream)][0]() is stream and len(galloc._streams[id(stream)][1]) == 1
    del block, other


@test
def a_free_on_none_is_one_on_the_legacy_stream():
    with frees() as seen:
        stream = new_stream()
        galloc.Block(MIB, stream).free(None)
        galloc.Block(MIB, stream).free()
    assert [call[1] for call in seen] == [0, stream]


@test
def a_block_keeps_its_address_and_stream():
    block = galloc.Block(MIB)
    for name in "ptr", "stream":
        raises(AttributeError, "", setattr, block, name, 0)
    raises(TypeError, "", block.free, object())
    assert block.ptr  # and still has its memory
    block.free()
    assert block.ptr == 0


@test
def what_owns_memory_is_not_copied():
    pool = galloc.Pool()
    for owner in galloc.Block(MIB), pool.block(MIB), pool, galloc.default_pool():
        for make in copy.copy, copy.deepcopy, pickle.dumps, lambda owner: pickle.dumps(owner, 0):
            error = raises(TypeError, "galloc: ", make, owner)
            assert type(owner).__name__ in str(error) and "cannot be copied" in str(error), error
    owner.block(MIB).free()
    del owner
    pool.close()


def in_a_process(program, **environment):
    """Runs a program of its own; what it wrote."""
    begin = f"import ctypes, gc, os, sys; sys.path.insert(0, {folder!r}); import galloc; sim = galloc._load()\n"
    ended = subprocess.run([sys.executable, "-c", begin + program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True, env={**os.environ, **environment}, timeout=60)
    assert ended.returncode == 0, (ended.returncode, ended.stdout)
    return ended.stdout


@test
def cycles_that_are_left_when_the_interpreter_ends():
    program = """
gc.disable()
class Stream:
    def __init__(self, destroy=sim.cudaStreamDestroy):
        stream = ctypes.c_void_p()
        assert sim.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        self.ptr, self.destroy = stream.value, destroy
    def __del__(self, pointer=ctypes.c_void_p):
        self.destroy(pointer(self.ptr))
for _ in range(100):
    stream = Stream()
    stream.block = galloc.Block(1 << 20, stream)
    block = galloc.Block(1 << 20, stream)
"""
    assert not in_a_process(program)


@test
def garbage_goes_before_a_request_fails():
    pool = galloc.Pool("memory_limit:8M")
    gc.disable()
    cycle = [pool.block(6 * MIB)]
    cycle.append(cycle)
    del cycle
    pool.block(6 * MIB).free()
    gc.enable()
    pool.close()


@test
def each_device_has_its_pool_and_the_current_device_stays():
    device = ctypes.c_int()
    block = galloc.Block(MIB, device=1)
    assert galloc.default_pool(1).memory()["live"] == MIB
    del block
    assert galloc.default_pool(1).memory()["live"] == 0
    assert sim.cudaGetDevice(ctypes.byref(device)) == 0 and device.value == 0


@contextlib.contextmanager
def current(device):
    before = ctypes.c_int()
    assert sim.cudaGetDevice(ctypes.byref(before)) == 0
    assert sim.cudaSetDevice(device) == 0
    try:
        yield
    finally:
        assert sim.cudaSetDevice(before.value) == 0


@test
def memory_is_of_the_streams_device():
    with current(1):
        stream = ctypes.c_void_p()
        assert sim.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        here = galloc.malloc(MIB), galloc.Block(MIB), galloc.default_pool()
        elsewhere = galloc.malloc(MIB, device=0)
    there = galloc.malloc(MIB, stream.value), galloc.Block(MIB, stream.value)
    there += galloc.Block(MIB, stream.value),
    alone = []  # in a thread that has called nothing of CUDA yet
    thread = threading.Thread(target=lambda: alone.append(galloc.malloc(MIB, stream.value)))
    thread.start()
    thread.join()
    assert galloc.default_pool(1).memory()["live"] == 6 * MIB
    galloc.free(alone[0], stream.value)
    assert galloc.default_pool().memory()["live"] == MIB
    assert here[2] is galloc.default_pool(1) and galloc.default_pool() is galloc.default_pool(0)
    device = ctypes.c_int(7)
    assert sim.cudaGetDevice(ctypes.byref(device)) == 0 and device.value == 0
    galloc.free(here[0])
    galloc.free(elsewhere)
    galloc.free(there[0], stream.value)
    for block in here[1], there[1], there[2]:
        block.free()
    assert galloc.default_pool(1).memory()["live"] == 0
    galloc.retire(stream.value)
    assert sim.cudaStreamDestroy(stream) == 0


def comes_after_work(make, free, default, device):
    """Memory of device 1, which make(pool, stream) gives, is freed while device 0 is current. Work of a default stream of
    the device may still use it then."""
    pool = galloc.Pool("", 1)
    with current(1):
        stream = new_stream()
    made = make(pool, stream)
    ptr = made if type(made) is int else made.ptr
    with current(device):
        assert sim.sim_launch(ctypes.c_void_p(default), None, 0) == 0
        sim.sim_hold(ctypes.c_void_p(default), 1)
    free(made, default)
    later = pool.malloc(MIB, stream)
    pool.free(later, stream)
    with current(device):
        sim.sim_hold(ctypes.c_void_p(default), 0)
    assert pool.trim() > 0
    pool.close()
    return later != ptr


@test
def a_default_stream_is_that_of_the_device_of_the_memory():
    def record_and_free(block, default):
        block.record_stream(default)
        block.free()

    def make(pool, stream):
        return pool.malloc(MIB, stream)

    for default in 0, 1, OWN:
        for free in record_and_free, galloc.Block.free:
            assert comes_after_work(lambda pool, stream: pool.block(MIB, stream), free, default, 1), (free, default)
        for free in galloc.free, galloc.default_pool(0).free, galloc.default_pool(1).free:
            assert comes_after_work(make, free, default, 1), (free, default)
            assert comes_after_work(lambda pool, stream: pool.malloc(MIB, default), free, default, 1), (free, default)
    for free in galloc.free, galloc.default_pool(0).free:  # the stream may be left out
        assert comes_after_work(make, lambda ptr, default: free(ptr), 0, 1), free


@test
def a_default_stream_is_that_of_the_device_that_a_free_names():
    def free(ptr, default):
        with current(1):
            galloc.free(ptr, default, 0)

    for default in 0, 1, OWN:
        assert comes_after_work(lambda pool, stream: pool.malloc(MIB, stream), free, default, 0), default


def current_context():
    context = ctypes.c_void_p()
    assert sim.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


@contextlib.contextmanager
def own_context(device):
    """A context that the program makes, as PyCUDA does, is current. It must be so at the end."""
    context = ctypes.c_void_p()
    assert sim.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
    try:
        yield
        assert current_context() == context.value
    finally:
        assert sim.cuCtxPopCurrent_v2(None) == 0
        assert sim.cuCtxDestroy_v2(context) == 0


@test
def a_context_of_the_program_stays_current():
    for device in 0, 1:
        with own_context(0):
            block = galloc.Block(MIB, device=device)
            assert galloc.default_pool(device).memory()["live"] == MIB
            block.record_stream(1)
            block.free()
            galloc.default_pool(device).free(galloc.malloc(MIB, device=device), wait=True)


@test
def a_thread_without_a_context_keeps_its_device():
    seen = []

    def use():
        device = ctypes.c_int(-1)
        assert current_context() is None
        galloc.free(galloc.malloc(MIB, device=1))
        assert sim.cudaGetDevice(ctypes.byref(device)) == 0
        seen.append(device.value)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [0]


@test
def a_call_that_cannot_go_back_to_the_context_raises():
    """One failure changes nothing. Of two the caller hears; then an allocation has failed, and a free is done."""
    words = "cannot be made current again"
    sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]

    def call(fails, function, *arguments):
        with own_context(0):
            own = current_context()
            sim.sim_fail(b"cuCtxSetCurrent", 1, fails > 1, 999)  # cudaSetDevice enters
            try:
                if fails == 1:
                    return function(*arguments)
                raises(RuntimeError, words, function, *arguments)
            finally:
                assert sim.sim_failed() > 0
                sim.sim_fail_clear()
                assert (current_context() == own) == (fails == 1)
                assert sim.cuCtxSetCurrent(ctypes.c_void_p(own)) == 0

    held = galloc.default_pool(1)
    for fails in (1, 2):
        p = call(fails, galloc.malloc, MIB, None, 1)
        assert (p is None) == (fails > 1) and held.memory()["live"] == (MIB if p else 0)
        if p:
            galloc.free(p)
        call(fails, galloc.free, galloc.malloc(MIB, None, 1))
        assert held.memory()["live"] == 0
        block = galloc.Block(MIB, None, 1)
        call(fails, block.free)
        assert not block.ptr and held.memory()["live"] == 0
        block.free()  # nothing is left to free


@test
def a_default_stream_is_that_of_the_primary_context():
    def in_own_context(free):
        def call(made, default):
            with own_context(1):
                free(made, default)
        return call

    def record_and_free(block, default):
        block.record_stream(default)
        block.free()

    for default in 0, 1, OWN:
        for free in record_and_free, galloc.Block.free:
            free = in_own_context(free)
            assert comes_after_work(lambda pool, stream: pool.block(MIB, stream), free, default, 1), default
        free = in_own_context(galloc.free)
        assert comes_after_work(lambda pool, stream: pool.malloc(MIB, stream), free, default, 1), default
    pool = galloc.Pool()
    p = pool.malloc(MIB)
    sim.sim_hold(None, 1)
    memset(p, None)
    pool.free(p)
    with own_context(0):
        assert pool.malloc(MIB) == p  # memory of that stream, under its work
        pool.free(p)
    sim.sim_hold(None, 0)
    pool.close()


@test
def a_free_that_waits_does_so_for_a_context_of_the_program_too():
    with own_context(0):
        streams = new_stream(), new_stream()
        for stream in streams:  # the second one comes after the wait
            ptr = galloc.malloc(MIB)
            memset(ptr, stream)
            galloc.default_pool().free(ptr, wait=True)
    assert sim.sim_findings(0) == 0  # no race


@test
def a_free_that_waits_does_so_for_the_device_of_the_memory():
    with current(1):
        streams = new_stream(), new_stream()
    for stream in streams:  # the second one comes after the wait
        ptr = galloc.malloc(MIB, device=1)
        with current(1):
            memset(ptr, stream)
        galloc.default_pool(0).free(ptr, wait=True)
    assert sim.sim_findings(0) == 0  # no race


class OwnStream:
    """As cupy.cuda.Stream.ptds: it means the stream of the thread that uses it."""
    ptr = OWN


@contextlib.contextmanager
def memory_of_a_thread(allocate, ended):
    """A list with what allocate() gives in a thread, whose own stream then uses it."""
    made, ready, done = [], threading.Event(), threading.Event()

    def work():
        try:
            made.append(allocate())
            memset(made[0] if type(made[0]) is int else made[0].ptr, OWN)
        finally:
            ready.set()
        done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    if ended:
        done.set()
        thread.join()
    try:
        yield made
    finally:
        done.set()
        thread.join()


def ends_in_another_thread(allocate, end):
    """Memory of a thread's own stream ends in this thread, also while a stream is captured. Its next owner's work comes
    after that of the first one. (The simulated device finds races.)"""
    for ended in False, True:
        for captured in False, True:
            stream, graph = new_stream(), ctypes.c_void_p()
            with memory_of_a_thread(allocate, ended) as made:
                if captured:
                    assert sim.cudaStreamBeginCapture(ctypes.c_void_p(stream), 0) == 0
                end(made)
                for other in OWN, stream:
                    if other == OWN or not captured:
                        block = galloc.Block(MIB, other)
                        memset(block.ptr, other)
                        block.free()
                if captured:
                    assert sim.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0
            assert sim.sim_findings(0) == 0, (ended, captured)
            assert galloc.default_pool().memory()["live"] == 0
            sim.sim_run(-1)


@test
def memory_of_a_threads_own_stream_ends_in_another_thread():
    ends_in_another_thread(lambda: galloc.Block(MIB, OWN), list.clear)
    ends_in_another_thread(lambda: galloc.Block(MIB, OWN), lambda made: made[0].free())
    ends_in_another_thread(lambda: galloc.Block(MIB, OwnStream()), list.clear)
    ends_in_another_thread(lambda: galloc.malloc(MIB, OWN), lambda made: galloc.free(made.pop(), OWN))

    def cycle(made):
        made[0].stream.block = made[0]
        made.clear()
        gc.collect()

    ends_in_another_thread(lambda: galloc.Block(MIB, OwnStream()), cycle)


@test
def only_such_a_free_waits():
    stream = new_stream()
    waits = sim.sim_blocking_calls()
    first = galloc.malloc(MIB, OWN)
    memset(first, OWN)
    galloc.free(first, OWN)
    assert galloc.malloc(MIB, OWN) == first
    galloc.free(first, stream)  # the program has ordered the two
    other = galloc.malloc(MIB, stream)
    galloc.free(other, OWN)
    with memory_of_a_thread(lambda: galloc.malloc(MIB, OWN), True) as made:
        galloc.free(made[0], stream)
    assert sim.sim_blocking_calls() == waits


@test
def a_capture_of_another_thread_goes_on():
    stream = new_stream()

    def work():
        galloc.default_pool(0).free(galloc.malloc(MIB), wait=True)
        galloc.default_pool(1).free(galloc.malloc(MIB, device=1), wait=True)
        block = galloc.Block(MIB, OWN)
        block.record_stream(stream)
        block.free()
        pool = galloc.Pool()
        pool.block(MIB).free()
        pool.trim()
        pool.close()
        seen.append(sim.cudaPeekAtLastError())

    for mode in range(3):  # global, thread-local, relaxed
        graph, captured, seen = ctypes.c_void_p(), ctypes.c_void_p(new_stream()), []
        assert sim.cudaStreamBeginCapture(captured, mode) == 0
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert sim.cudaStreamEndCapture(captured, ctypes.byref(graph)) == 0, mode
        assert seen == [0] and sim.sim_findings(0) == 0


SEVERAL_DEVICES = """
MIB = 1 << 20
class Access(ctypes.Structure):
    _fields_ = ("ptr", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("how", ctypes.c_int), ("tag", ctypes.c_uint64)
def write(device, block):
    # A kernel of the device writes the memory.
    assert sim.cudaSetDevice(device) == 0
    assert sim.sim_launch(None, ctypes.byref(Access(block.ptr, block.size, 2, 1)), 1) == 0
    assert sim.cudaDeviceSynchronize() == 0
    assert sim.cudaSetDevice(0) == 0
def copy(device, to, source):
    # As CuPy copies an array to another device: from the device that is current.
    assert sim.cudaSetDevice(device) == 0
    sim.cudaDeviceEnablePeerAccess(1 - device, 0)
    error = sim.cudaMemcpyAsync(*map(ctypes.c_void_p, (to.ptr, source.ptr, to.size, 4)), None)
    assert sim.cudaDeviceSynchronize() == 0
    assert sim.cudaSetDevice(0) == 0
    return error
def calls(name):
    return sim.sim_calls(name.encode())
"""


def use_of_two_devices(**environment):
    return in_a_process(SEVERAL_DEVICES + """
early = galloc.Block(MIB, device=0)
own = [galloc.Pool("", device) for device in (0, 1)]
galloc.Pool("", 1).close()
blocks = [early] + [pool.block(MIB) for pool in own] + [galloc.Block(30 * MIB, device=d) for d in (1, 0)]
later = galloc.Pool("overhead:0", 0)
blocks.append(later.block(MIB))
results = {copy(d, a, b) for d in (0, 1) for a in blocks for b in blocks if a.size == b.size and a is not b}
results.add(copy(0, blocks[3], blocks[4]))
for device in 0, 1:
    for block in blocks:
        if results == {0} or block.pool.device == device:
            write(device, block)
print(sorted(results), calls("cuMemSetAccess") > 0)
""", GALLOC_CONF=environment.pop("GALLOC_CONF", "log:off"), **environment)


@test
def devices_use_each_others_memory():
    assert use_of_two_devices() == "[0] True\n"
    for conf in "expandable_segments:False,log:off", "backend:cudaMalloc,log:off":
        assert use_of_two_devices(GALLOC_CONF=conf) == "[0] True\n"


@test
def a_pool_that_could_not_close_is_shared_with_a_later_device():
    words = in_a_process(SEVERAL_DEVICES + """
pool = galloc.Pool("", 0)
held = pool.block(MIB)
try:
    pool.close()
    print("closed")
except RuntimeError:
    pass
blocks = [held, galloc.Block(MIB, device=1), pool.block(30 * MIB)]
for device in 0, 1:
    write(device, held)
    write(device, blocks[2])
print(sorted({copy(d, a, b) for d in (0, 1) for a in blocks[:2] for b in blocks[:2] if a is not b}))
del held, blocks
pool.close()
""", GALLOC_CONF="log:off")
    assert words == "[0]\n", words


@test
def a_process_that_uses_one_device_pays_nothing_for_the_others():
    count = SEVERAL_DEVICES + """
galloc.Block(30 * MIB, device=int(os.environ["DEVICE"]))
galloc.Pool("", int(os.environ["DEVICE"])).block(MIB)
print(calls("cuMemSetAccess"), calls("cudaDeviceCanAccessPeer"), calls("cuMemCreate"))
"""
    one = in_a_process(count, SIM_DEVICES="1", DEVICE="0")
    assert one.split()[1] == "0"
    for device in "01":
        assert in_a_process(count, SIM_DEVICES="2", DEVICE=device) == one


@test
def devices_that_are_no_peers_have_their_memory():
    words = in_a_process(SEVERAL_DEVICES + """
sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
x = galloc.Block(MIB, device=0)
sim.sim_fail(b"cudaDeviceCanAccessPeer", 1, 1, 101)
y = galloc.Block(MIB, device=1)
sim.sim_fail_clear()
assert sim.cudaPeekAtLastError() == 0
write(0, x)
write(1, y)
print(copy(0, y, x))
""")
    assert words.splitlines()[-1] == "1"  # cudaErrorInvalidValue


@test
def a_refusal_of_access_loses_no_allocation():
    words = in_a_process(SEVERAL_DEVICES + """
sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
x = galloc.Block(MIB, device=0)
sim.sim_fail(b"cuMemSetAccess", 1, 0, 801)
y = galloc.Block(MIB, device=1)
assert sim.sim_failed() == 1
sim.sim_fail_clear()
write(0, x)
write(1, y)
""")
    assert words.count("galloc_python: device 1 gets no access to some memory of device 0") == 1, words


@test
def a_device_that_another_one_cannot_use_is_named():
    """Each call fails in turn while the second device gets its pool."""
    n, did_fail, refused = 0, True, 0
    while did_fail:
        n += 1
        words = in_a_process(SEVERAL_DEVICES + f"""
sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
blocks = [galloc.Block(MIB)]
sim.sim_fail(None, {n}, 0, 999)
try:
    blocks.append(galloc.Block(MIB, device=1))
except RuntimeError:
    pass
did_fail = sim.sim_failed()
sim.sim_fail_clear()
blocks += [galloc.Block(MIB, device=d) for d in (0, 1)]
sys.stderr.flush()
print(did_fail, {{copy(d, a, b) for d in (0, 1) for a in blocks for b in blocks if a is not b}} == {{0}})
""")
        *named, last = words.splitlines()
        did_fail, works = (word in ("1", "True") for word in last.split())
        refused += not works
        assert len(named) == (not works) and all("gets no access to some memory of device" in w for w in named), words
    assert refused > 2 and 10 < n < 100, (refused, n)


@test
def a_snapshot_is_a_dictionary():
    block = galloc.Block(5 * MIB)
    text = str(galloc.snapshot())
    assert str(5 * MIB) in text
    assert str(5 * MIB) not in str(galloc.default_pool(1).snapshot())
    block.free()


@test
def an_interrupt_ends_a_snapshot():
    """Ctrl-C at any moment raises KeyboardInterrupt, or the snapshot was whole by then."""
    def interrupt(*_):
        raise KeyboardInterrupt

    pool = galloc.Pool()  # how often it is looked into depends on the time; other tests have the default pool
    blocks = [pool.block(MIB) for _ in range(40)]
    before, interrupted = signal.signal(signal.SIGALRM, interrupt), 0
    try:
        for moment in range(1, 100):
            try:
                signal.setitimer(signal.ITIMER_REAL, moment * 2e-5)
                assert str(MIB) in str(pool.snapshot())
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 0
    assert str(MIB) in str(pool.snapshot())
    del blocks
    pool.close()


# ---- failures --------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def one_failing_call(name):
    sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    sim.sim_fail(name.encode(), 1, 0, 999)
    yield
    assert sim.sim_failed() == 1
    sim.sim_fail_clear()


@test
def every_failing_call_is_an_error_or_nothing():
    """Each call of the runtime and of the driver fails in turn: Python gets its memory or an exception, and goes on."""
    sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    stream = new_stream()

    def again(call, *arguments):
        """A call that failed may be made again."""
        try:
            call(*arguments)
        except (RuntimeError, MemoryError):
            call(*arguments)

    def program():
        for n in range(3):
            block = galloc.Block((1 + 30 * n) * MIB, stream if n % 2 else 0)
            block.record_stream(stream)
            block.free()
        pool = galloc.Pool("memory_limit:64M")
        try:
            pool.block(5 * MIB, stream)  # goes with its object
        finally:
            again(pool.close)
        p = galloc.malloc(9 * MIB, stream)
        again(galloc.free, p, stream)
        p = galloc.malloc(MIB, device=1)
        again(galloc.default_pool(1).free, p, None, True)
        galloc.default_pool().memory()
        galloc.snapshot()

    errors, n, did_fail = 0, 0, True
    while did_fail:
        n += 1
        if n % 2:
            galloc.default_pool().trim()
        if n // 2 % 2:  # the program has left an error in the runtime
            assert sim.cudaSetDevice(99) != 0
        last = sim.cudaPeekAtLastError()
        sim.sim_fail(None, n, 0, 999)  # cudaErrorUnknown
        try:
            program()
        except (RuntimeError, MemoryError):
            errors += 1
        gc.collect()
        did_fail = sim.sim_failed() != 0
        sim.sim_fail_clear()
        assert (sim.cudaGetLastError() != 0) == (last != 0), n
        assert galloc.default_pool().memory()["live"] == 0, n
        program()
    assert 40 < n < 2000 and errors > 20, (n, errors)


LOST_BLOCKS = """
sim.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
class Stream:
    ptr = 0
def words(call, *arguments):
    try:
        call(*arguments)
    except (RuntimeError, MemoryError) as error:
        return str(error)
stream = Stream()
block, left = galloc.Block(1 << 20, None, 1), galloc.Block(1 << 20, stream, 1)
at = block.ptr, left.ptr
stream.left = left
def lose(what, block_too):
    # Finalisers run while the device cannot be made current.
    global block, left, stream
    sim.sim_fail(what, 1, 1, 999)
    if block_too:
        block = None
    else:
        left = stream = None
        gc.collect()
    sim.sim_fail_clear()
"""


@test
def a_finaliser_that_frees_nothing_says_so():
    for what in "cudaSetDevice", "cudaGetDevice":
        for block_too in True, False:
            words = in_a_process(LOST_BLOCKS + f"""
gc.disable()
lose({what.encode()!r}, {block_too})
print(f"{{at[{int(not block_too)}]:#x}}", galloc.default_pool(1).memory()["live"] >> 20)
sys.stdout.flush()
os._exit(0)
""").splitlines()
            at, live = words[-1].split()
            assert live == "2" and len(words) == 2, words
            begin = "galloc_python: the device cannot be made current: "
            assert words[0].startswith(begin) and words[0].endswith(f"; the block at {at} stays in use"), words


@test
def a_finaliser_in_a_child_of_fork_says_nothing():
    words = in_a_process(LOST_BLOCKS + """
gc.disable()
if os.fork() == 0:
    sim.sim_fail(b"cudaGetDevice", 1, 1, 3)  # cudaErrorInitializationError
    block = None
    os._exit(0)
os.wait()
os._exit(0)
""")
    assert "galloc_python" not in words, words


@test
def a_finaliser_takes_no_words_from_an_error():
    words = in_a_process(LOST_BLOCKS + """
gc.disable()
sim.sim_fail(b"cudaSetDevice", 1, 1, 999)
assert sim.galloc_python_free(at[0], 0, 1, 0, 0) == 999
sim.sim_fail_clear()
block = None  # it is freed now
print(sim.galloc_python_message().decode())
assert galloc.default_pool(1).memory()["live"] == 1 << 20
""")
    assert words == "galloc_python: the device cannot be made current: unknown error\n", words


@test
def an_error_has_its_own_words():
    words = in_a_process(LOST_BLOCKS + """
pool, gone = galloc.Pool(), galloc.Pool()
held = pool.block(1 << 20)
handle = gone._pool.value
gone.close()
gone._pool = ctypes.c_void_p(handle)
for n, (call, *arguments) in enumerate((
        (galloc.Pool, "no such key"), (pool.close,), (gone.trim,), (gone.memory,), (gone.snapshot,), (gone.malloc, 8),
        (galloc.free, 4096))):
    lost = galloc.Block(1 << 20, None, 1)
    sim.sim_fail(b"cudaSetDevice", 1, 1, 999)
    own = words(lost.free)
    del lost
    sim.sim_fail_clear()
    print(own)
    print(words(call, *arguments))
sys.stdout.flush()
os._exit(0)
""").splitlines()
    said = [line for line in words if "stays in use" not in line]
    assert len(said) == 14 and len(words) == 21, words
    assert set(said[::2]) == {"galloc_python: the device cannot be made current: unknown error"}, said
    expected = "no such key", "galloc_pool_destroy", "galloc_pool_trim", "galloc_pool_stats", "galloc_snapshot", \
        "galloc_alloc", "galloc_free"
    for text, line in zip(expected, said[1::2]):
        assert text in line and "made current" not in line, (text, line)


# ---- the packages ----------------------------------------------------------------------------------------------------

@test
def cupy_arrays_belong_to_the_current_stream():
    class OutOfMemoryError(MemoryError):
        def __init__(self, size, total):
            raise AssertionError("only CuPy knows these")

    class UnownedMemory:
        def __init__(self, ptr, size, owner, device_id):
            self.ptr, self.owner, self.device_id = ptr, owner, device_id

    streams = [types.SimpleNamespace(ptr=new_stream()) for _ in range(2)]
    current = [streams[0], 0]
    allocators = []
    cuda = types.SimpleNamespace(
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError), UnownedMemory=UnownedMemory,
        MemoryPointer=lambda memory, offset: memory, get_current_stream=lambda: current[0],
        set_allocator=allocators.append, runtime=types.SimpleNamespace(getDevice=lambda: current[1]))
    module("cupy", cuda=cuda)
    import galloc_cupy
    galloc_cupy.install()
    allocate = allocators[0]
    a = allocate(2 * MIB)
    first = a.ptr
    calls, drop = [], a.owner._drop
    a.owner._drop = lambda *arguments: calls.append(arguments[1]) or drop(*arguments)
    current[0] = streams[1]
    del a  # goes back on its own stream, not on the current one
    assert calls == [streams[0].ptr]
    current[0] = streams[0]
    a = allocate(2 * MIB)
    assert a.ptr == first and a.owner.stream is streams[0]
    current[1] = 1
    b = allocate(MIB)
    assert b.device_id == 1 and galloc.default_pool(1).memory()["live"] == MIB
    del b
    current[1] = 0
    error = raises(OutOfMemoryError, "out of memory", allocate, 1 << 60)
    assert isinstance(error, MemoryError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    del a


@test
def numba_gets_memory_that_every_stream_may_use():
    class Pending:
        memory_capacity = None

        def __init__(self):
            self.items = []

        def add_item(self, free, handle, size):
            self.items.append((free, handle))

        def clear(self):
            while self.items:
                free, handle = self.items.pop()
                free(handle)

    class HostOnlyCUDAMemoryManager:
        def __init__(self, context):
            self.context, self.deallocations = context, Pending()

    class MemoryPointer:
        def __init__(self, context, pointer, size, finalizer):
            self.pointer, self.finalizer = pointer, finalizer

    class CudaAPIError(Exception):
        def __init__(self, code, text):
            self.code = code
            super().__init__(text)

    driver = module("numba.cuda.cudadrv.driver", CudaAPIError=CudaAPIError,
                    MemoryInfo=lambda free, total: types.SimpleNamespace(free=free, total=total),
                    driver=types.SimpleNamespace(cuMemGetInfo=lambda: (1, 2)))
    module("numba"), module("numba.cuda.cudadrv", driver=driver)
    module("numba.cuda", HostOnlyCUDAMemoryManager=HostOnlyCUDAMemoryManager, MemoryPointer=MemoryPointer)
    os.environ["GALLOC_CONF"] = "log:off,memory_limit:16M"
    import galloc_numba
    manager = galloc_numba._numba_memory_manager(context=types.SimpleNamespace(
        device=types.SimpleNamespace(id=0)))
    manager.initialize()
    assert manager.deallocations.memory_capacity == 2 and manager.interface_version == 1
    a = manager.memalloc(10 * MIB)
    a.finalizer()
    with one_failing_call("cudaHostAlloc"):  # Numba forgets what it has tried to free
        b = manager.memalloc(10 * MIB)  # runs out, frees what is pending, and has it
    assert b.pointer.value == a.pointer.value
    assert raises(CudaAPIError, "out of memory", manager.memalloc, 10 * MIB).code == 2
    raises(NotImplementedError, "cudaIpc", manager.get_ipc_handle, b)
    b.finalizer()
    manager.deallocations.clear()
    assert galloc_numba._pool(0).memory()["live"] == 0
    os.environ["GALLOC_CONF"] = "log:off"


@test
def numba_threads_share_the_pool_of_a_device():
    import galloc_numba
    asked, made, pools = threading.Barrier(4), [], []

    class SlowPool(galloc.Pool):
        def __init__(self, *arguments):
            made.append(self)
            time.sleep(0.1)  # the other threads ask meanwhile
            super().__init__(*arguments)

    def ask():
        asked.wait()
        pools.append(galloc_numba._pool(1))

    real, galloc.Pool = galloc.Pool, SlowPool
    try:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        galloc.Pool = real
    assert len(made) == 1 and pools == made * 4, made


@test
def cuda_core_names_the_stream_of_each_call():
    class Buffer:
        @classmethod
        def from_handle(cls, ptr, size, mr, *, stream):
            if size == 1:
                raise TypeError("no buffer")
            made = cls()
            made.ptr, made.size, made.mr, made.stream = ptr, size, mr, stream
            return made

        def close(self, stream=None):
            self.mr.deallocate(self.ptr, self.size, stream=stream or self.stream)

    module("cuda"), module("cuda.core", Buffer=Buffer, MemoryResource=object)
    import galloc_cuda_core
    resource = galloc_cuda_core.GallocMemoryResource(types.SimpleNamespace(device_id=1))
    assert resource.device_id == 1 and resource.is_device_accessible
    assert not resource.is_host_accessible and not resource.is_managed
    stream = types.SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    buffer = resource.allocate(MIB, stream=stream)
    assert galloc.default_pool(1).memory()["live"] == MIB
    with one_failing_call("cudaGetDevice"):  # cuda.core prints an exception, and forgets the memory
        buffer.close()
    raises(TypeError, "no buffer", resource.allocate, 1, stream=stream)
    assert galloc.default_pool(1).memory()["live"] == 0


@test
def a_buffer_whose_stream_was_closed_goes_after_the_work_of_the_stream():
    import galloc_cuda_core
    resource = galloc_cuda_core.GallocMemoryResource(0)
    before = galloc.default_pool().memory()["live"]
    for without in None, 0:
        stream = Closed(without)
        buffer = resource.allocate(MIB, stream=stream)
        for _ in range(200):
            memset(buffer.ptr, stream.number)
        stream.close()
        assert sim.sim_pending()
        buffer.close()
        assert sim.sim_pending() <= 1  # perhaps an event of galloc
        assert galloc.default_pool().memory()["live"] == before


def close_during(end, stream, is_retired):
    """Another thread closes the stream at the first call of CUDA in end(). Did it before end() went on?"""
    inside, closed, mine, seen = threading.Event(), threading.Event(), threading.get_ident(), []

    def close():
        number = stream.number
        assert inside.wait(20)
        if not is_retired:
            stream.number = None
            galloc.retire(number)
        stream.number = number
        stream.close()
        closed.set()

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def hook(_):
        if threading.get_ident() == mine and not inside.is_set():
            inside.set()
            seen.append(closed.wait(20 if is_retired else 0.1))

    if is_retired:
        galloc.retire(stream)
    thread = threading.Thread(target=close)
    thread.start()
    sim.sim_hook(hook, None)
    try:
        end()
    finally:
        sim.sim_hook(None, None)
        inside.set()
        thread.join()
    return seen


def ends_of_memory():
    """Ways to free memory of a stream that its own finaliser has: the function, and the stream."""
    import galloc_cuda_core
    pool, resource = galloc.default_pool(), galloc_cuda_core.GallocMemoryResource(0)
    for way in "del", "drop", "close":
        stream = Closed(None)
        if way == "del":
            yield [galloc.Block(MIB, stream)].clear, stream
        elif way == "drop":
            yield functools.partial(pool.drop, pool.malloc(MIB, stream), stream, known=galloc.Known(stream)), stream
        else:
            yield resource.allocate(MIB, stream=stream).close, stream


@test
def a_stream_is_retired_after_the_finalisers_that_use_it():
    for end, stream in ends_of_memory():
        assert close_during(end, stream, False) == [False]
    stream = Closed(None)
    assert close_during(galloc.Block(MIB, stream).free, stream, False) == [False]


@test
def a_finaliser_waits_for_no_lock_of_the_program_with_one_of_its_own():
    class Locked(Closed):
        lock, inside, waited_for_ever = threading.Lock(), threading.Event(), False

        def __cuda_stream__(self):
            if not self.inside.is_set():
                return 0, self.number
            if not self.lock.acquire(timeout=10):
                self.waited_for_ever = True
                return 0, 0
            self.lock.release()
            return 0, int(self.number)

        def close(self):
            with self.lock:
                self.inside.set()
                time.sleep(0.05)
                galloc.retire(self.number)
                super().close()

    stream = Locked(None)
    block = galloc.Block(MIB, stream)
    thread = threading.Thread(target=stream.close)
    thread.start()
    assert stream.inside.wait(20)
    del block
    thread.join()
    assert not stream.waited_for_ever


@test
def a_stream_that_is_closed_as_soon_as_its_handle_was_read_is_not_used():
    """As by the garbage collector or a signal handler, in the same thread."""
    class Closing(Closed):
        is_due = False

        def __cuda_stream__(self):
            number = int(self.number)
            if self.is_due:
                galloc.retire(number)
                self.close()
            return 0, number

    pool = galloc.default_pool()
    for way in "del", "block.free", "pool.free", "drop":
        stream = Closing(None)
        block = galloc.Block(MIB, stream) if way in ("del", "block.free") else pool.malloc(MIB, stream)
        for _ in range(200):
            memset(block.ptr if isinstance(block, galloc.Block) else block, stream.number)
        stream.is_due = True
        if way == "block.free":
            block.free()
        elif way == "pool.free":
            pool.free(block, stream)
        elif way == "drop":
            pool.drop(block, stream)
        del block
        assert not sim.sim_pending()


@test
def a_child_of_fork_frees_while_a_thread_of_its_parent_retires():
    program = """
import threading
inside, go_on = threading.Event(), threading.Event()
stream = ctypes.c_void_p()
assert sim.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
block = galloc.Block(1 << 20, stream.value)
@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def hook(_):
    if threading.current_thread() is thread:
        inside.set()
        go_on.wait()
thread = threading.Thread(target=block.free)
sim.sim_hook(hook, None)
thread.start()
inside.wait()
child = os.fork()
if not child:
    try:
        galloc.free(1 << 40, stream.value)
    except RuntimeError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
go_on.set()
thread.join()
"""
    assert not in_a_process(program, PYTHONWARNINGS="ignore")  # Python 3.12 warns of threads


@test
def a_drop_that_a_signal_handler_ends_frees_once():
    address = galloc.malloc(MIB)
    drop, results = sim.galloc_python_drop, []
    sim.galloc_python_drop = lambda *arguments: results.append(drop(*arguments))
    with interrupted("galloc_python_drop", TimeoutError):
        raises(TimeoutError, "", galloc.default_pool().drop, address)
    sim.galloc_python_drop = drop
    assert results == [0]


@test
def finalisers_do_not_use_a_stream_that_was_retired():
    for end, stream in ends_of_memory():
        assert close_during(end, stream, True) == [True]


@test
def rmm_calls_back():
    module("rmm", mr=types.SimpleNamespace(CallbackMemoryResource=lambda *functions: functions))
    import galloc_rmm
    allocate, deallocate = galloc_rmm.resource()
    stream = types.SimpleNamespace(__cuda_stream__=lambda: (0, 0))
    ptr = allocate(MIB, stream)
    raises(MemoryError, "", allocate, 1 << 60, stream)
    with one_failing_call("cudaGetDevice"):  # RMM calls it where nothing may be raised
        deallocate(ptr, MIB, stream)


@test
def packages_free_memory_of_a_threads_own_stream_in_another_thread():
    import galloc_cuda_core
    import galloc_rmm
    allocate, deallocate = galloc_rmm.resource()
    resource = galloc_cuda_core.GallocMemoryResource(0)
    stream = types.SimpleNamespace(__cuda_stream__=lambda: (0, OWN))
    ends_in_another_thread(lambda: allocate(MIB, stream), lambda made: deallocate(made.pop(), MIB, stream))
    ends_in_another_thread(lambda: resource.allocate(MIB, stream=stream), lambda made: made.pop().close())


left = galloc.Block(MIB)  # freed when the interpreter ends
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
