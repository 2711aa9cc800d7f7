"""One program that knows nothing of galloc; preload.sh runs it with and without examples/preload.

    preload_programs.py PROGRAM

Prints one line of JSON: a result that must not depend on who allocates; the memory of the device in use at most, beyond
what was in use at the start; and the mean time of a step in microseconds. Exit status 3: the package is missing.
"""

import json
import os
import random
import sys
import time

program = sys.argv[1]
random.seed(1)
most = first = 0


def sample(left_and_total):
    global most, first
    used = left_and_total[1] - left_and_total[0]
    first = first or used
    most = max(most, used - first)


def cupy_program(steps=400):
    """Arrays of varying sizes, their sums and products."""
    import cupy

    if program == "cupy-no-pool":
        cupy.cuda.set_allocator(None)
    elif program == "cupy-async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    cupy.arange(10).sum()
    sample(cupy.cuda.runtime.memGetInfo())
    total, live = 0, []
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    begin = time.perf_counter()
    for step in range(steps):
        with streams[step % 3] as stream:
            n = random.randrange(1, 1 << random.randrange(1, 24))
            a = cupy.arange(n, dtype=cupy.int64)
            b = a * 3 + step
            total ^= int(b.sum())
            stream.synchronize()  # CuPy's arrays do not know on which streams they are used
        live.append(b)
        if len(live) > 12:
            live.pop(random.randrange(12))
        sample(cupy.cuda.runtime.memGetInfo())
    took = time.perf_counter() - begin
    m = cupy.arange(512 * 512, dtype=cupy.float64).reshape(512, 512)
    total ^= int((m @ m).sum() // 1e6)
    return total, took / steps


def torch_program(steps=60):
    """Training of a small network with batches of varying length."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 2048),
                                torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    side = torch.cuda.Stream()
    total = 0.0
    sample(torch.cuda.mem_get_info())
    for step in range(steps):
        if step == 5:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(random.randrange(256, 8192), 512, generator=generator)
        with torch.cuda.stream(side):
            batch = x.pin_memory().cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        loss = F.mse_loss(model(batch), batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item()
        sample(torch.cuda.mem_get_info())
    torch.cuda.synchronize()
    return total, (time.perf_counter() - begin) / (steps - 5)


def jax_program(steps=20):
    """Gradients of a small function, for a few shapes."""
    import jax
    import jax.numpy as jnp

    if jax.devices()[0].platform not in ("gpu", "cuda"):
        sys.exit(3)
    f = jax.jit(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()))
    w, total = jnp.ones((256, 256)) / 256, 0.0
    for step in range(steps):
        if step == 5:
            begin = time.perf_counter()
        x = jnp.arange((1 + step % 3) * 256 * 256, dtype=jnp.float32).reshape(-1, 256) / 65536
        total += float(f(w, x).sum())
    return total, (time.perf_counter() - begin) / (steps - 5)


try:
    if program.startswith("cupy"):
        result, step = cupy_program()
    elif program.startswith("torch"):
        if program == "torch-no-cache":
            os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        elif program == "torch-async":
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        result, step = torch_program()
    else:
        os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
        result, step = jax_program()
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
print(json.dumps({"result": repr(result), "held": most, "us": 1e6 * step}))
