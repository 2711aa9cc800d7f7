"""One program of PyTorch under one allocator, in a process of its own; prints one line of JSON.

    torch_programs.py PROGRAM ALLOCATOR      (tests/gpu/torch.sh runs all of them and compares)

ALLOCATOR: native, expandable, async (PyTorch's own three), galloc, galloc-full, for the program `pool` galloc-pool, for
`share` galloc-fixed, and galloc-sender, whose other process has PyTorch's own. The result of a program is a number
that must not depend on the allocator; it runs with deterministic algorithms.
"""

import json
import os
import random
import statistics
import sys
import time

program, allocator = sys.argv[1], sys.argv[2]
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
settings = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
if allocator == "galloc-sender" and __name__ != "__main__":
    allocator = "native"
if allocator in settings:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = settings[allocator]

import torch
import torch.nn.functional as F

memory = torch.cuda
if allocator == "galloc":
    import galloc_torch as memory
    memory.install()
elif allocator in ("galloc-full", "galloc-fixed", "galloc-sender"):
    if allocator != "galloc-full":
        os.environ["GALLOC_CONF"] = "expandable_segments:False"
    import galloc_torch
    galloc_torch.install(full=True)

torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
random.seed(1)


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x, past=None):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            if past:
                k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
            past[:] = [k, v]
        a = (q @ k.transpose(2, 3)) * (w // self.heads) ** -0.5
        if n > 1:
            a = a.masked_fill(torch.ones(n, k.shape[2], device=x.device, dtype=torch.bool).triu(1), -1e9)
        x = x + self.out((a.softmax(3) @ v).transpose(1, 2).reshape(b, n, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    def __init__(self, layers=8, width=768, words=8192):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.blocks = torch.nn.ModuleList(Block(width, 12) for _ in range(layers))
        self.head = torch.nn.Linear(width, words)

    def forward(self, tokens, caches=None):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[i])
        return self.head(x)


def tokens(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 8192, (rows, columns), generator=generator).cuda()


def train(steps):
    """Training of a small GPT-2 with lengths that vary from step to step."""
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    total = 0.0
    for step in range(steps):
        yield
        n = random.randrange(64, 1024)
        text = tokens(8, n + 1, step)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


@torch.no_grad()
def generate(steps):
    """Generation: batches come and go, each with a key/value cache that grows by a token a step."""
    model = Model().cuda().eval()
    running, total = [], 0.0
    for step in range(steps):
        yield
        for _ in range(4):
            if len(running) < 24:
                caches = [[] for _ in model.blocks]
                text = tokens(random.randrange(1, 9), random.randrange(16, 512), step)
                running.append((caches, model(text, caches)[:, -1:].argmax(2), random.randrange(8, 128)))
        after = []
        for caches, last, left in running:
            logits = model(last, caches)
            total += logits[0, 0, 0].item() if left == 1 else 0.0
            if left > 1:
                after.append((caches, logits[:, -1:].argmax(2), left - 1))
        running = after
    return total


def prefetch(steps):
    """Fully sharded training, the parameters of each layer gathered on a second stream one layer ahead."""
    layers, width = 12, 1536
    shards = [torch.randn(width * width * 8 // 8, device="cuda") * 0.01 for _ in range(layers)]
    side = torch.cuda.Stream()
    main = torch.cuda.current_stream()
    total = 0.0

    def gather(i):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            whole = shards[i].repeat(8)
        return whole

    for step in range(steps):
        yield
        n = random.randrange(512, 4096)
        x = torch.ones(n, width, device="cuda")
        ahead = gather(0)
        for i in range(layers):
            main.wait_stream(side)
            whole, ahead = ahead, gather(i + 1) if i + 1 < layers else None
            whole.record_stream(main)
            up, down = whole.view(8, width, width)[:4].reshape(4 * width, width), whole.view(2, 4 * width, width)[1]
            x = F.layer_norm(x + F.gelu(x @ up.t()) @ down, (width,))
        total += x.abs().mean().item()
    return total


def graph(steps):
    """Captured inference for several batch sizes; the graphs share one memory pool."""
    model = Model().cuda().eval()
    sizes = [1, 2, 4, 8, 16]
    graphs, total, pool = {}, 0.0, None
    with torch.no_grad():
        for rows in reversed(sizes):
            text = tokens(rows, 256, rows)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model(text)
            torch.cuda.current_stream().wait_stream(side)
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, pool=pool):
                out = model(text)[:, -1].float().logsumexp(1)
            pool = pool or g.pool()
            graphs[rows] = g, text, out
        for step in range(steps):
            yield
            rows = sizes[random.randrange(len(sizes))]
            g, text, out = graphs[rows]
            text.copy_(tokens(rows, 256, step))
            g.replay()
            total += out.sum().item()
            del g, text, out
    return total


def failed(steps):
    """Captures that fail, before or after their first tensor, and others after them that share one memory pool."""
    import gc
    x = torch.ones(1 << 22, device="cuda")
    kept, graphs, total, pool = [], [], 0.0, None
    for i in range(6):
        g = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(g, stream=torch.cuda.Stream() if i % 2 else None):
                y = x * 2 if i % 3 else None
                torch.cuda.synchronize()
            raise SystemExit("the capture did not fail")
        except RuntimeError:
            y = None
        if not allocator.startswith("galloc"):
            kept.append(g)  # PyTorch's own allocator goes on using it
        del g
    gc.collect()
    for i in range(4):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=pool):
            out = (x * (i + 1)).sum()
        pool = pool or g.pool()
        graphs.append((g, out))
        if allocator == "galloc-full":
            names = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot()}
            assert names == {(0, 0), tuple(pool)}, (names, pool)
    if allocator.startswith("galloc"):
        used = sys.modules["galloc_torch"].memory_stats()["galloc.graph_bytes"]
        assert used < 2 * x.nbytes, f"the graphs share no memory: {used} bytes"
    for step in range(steps):
        yield
        g, out = graphs[step % 4]
        g.replay()
        total += out.item()
        del g, out
    return total


def streams(steps):
    """Random tensors on four streams, each used on two of them (record_stream), every element checked."""
    all_streams = [torch.cuda.Stream() for _ in range(4)]
    held = []
    sums = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in all_streams]
    torch.cuda.synchronize()
    for step in range(steps):
        yield
        for _ in range(500):
            i, j = random.randrange(4), random.randrange(4)
            n = random.choice((0, 1, 100, 5000, 300000, 2000000))
            with torch.cuda.stream(all_streams[i]):
                t = torch.full((n,), random.randrange(1000), device="cuda", dtype=torch.int32)
            expect = None if n == 0 else (t, j)
            if expect:
                all_streams[j].wait_stream(all_streams[i])
                with torch.cuda.stream(all_streams[j]):
                    sums[j] += (t != t[0]).sum() + t[0]
                t.record_stream(all_streams[j])
            held.append(t)
            if len(held) > 40:
                del held[random.randrange(len(held))]
            del t, expect
    torch.cuda.synchronize()
    return sum(s.item() for s in sums)


def exhaust(steps):
    """Memory runs out: PyTorch's exception comes, and the program goes on with less."""
    free, _ = torch.cuda.mem_get_info()
    failures = 0
    kept = torch.ones(1 << 20, device="cuda")
    for step in range(steps):
        yield
        try:
            torch.empty(2 * free, dtype=torch.uint8, device="cuda")
            raise SystemExit("an allocation of twice the free memory succeeded")
        except torch.cuda.OutOfMemoryError as error:
            failures += "out of memory" in str(error)
            if allocator.startswith("galloc") and step == 0 and "largest possible block" not in str(error):
                raise SystemExit("galloc's report is not in the text: " + str(error))
        x = torch.ones(1 << 24, device="cuda")
        failures += int((x.sum() + kept.sum()).item() != (1 << 24) + (1 << 20)) * 1000
    return failures


def pool(steps):
    """Tensors of a MemPool whose memory comes from galloc, beside PyTorch's own."""
    total = 0.0
    if allocator != "galloc-pool":
        import contextlib
        context = contextlib.nullcontext
    else:
        import galloc_torch
        mem = galloc_torch._mem_pool()
        context = lambda: galloc_torch.use_pool(mem)
    for step in range(steps):
        yield
        with context():
            a = torch.full((random.randrange(1, 1 << 22),), 2.0, device="cuda")
        total += (a * torch.ones_like(a)).sum().item()
    return total


def compiled(steps):
    """torch.compile with CUDA graphs."""
    model = Model(layers=2).cuda().eval()
    fast = torch.compile(model, mode="reduce-overhead")
    total = 0.0
    with torch.no_grad():
        for step in range(steps):
            yield
            total += fast(tokens(4, 128, step))[:, -1].float().logsumexp(1).sum().item()
    return total


def counters(steps):
    """PyTorch's view of its allocator: what memory_stats, snapshot and history say adds up."""
    torch.cuda.memory._record_memory_history(max_entries=1000)
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda device, allocated, total, free: seen.append(device))
    for step in range(steps):
        yield
        before = torch.cuda.memory_allocated()
        held = [torch.zeros(n, dtype=torch.uint8, device="cuda") for n in (512, 1 << 20, 3 << 20, 77)]
        assert torch.cuda.memory_allocated() - before >= (4 << 20) + 1024, torch.cuda.memory_allocated()
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
        assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
        segments = torch.cuda.memory_snapshot()
        for t in held:
            assert any(b["state"] == "active_allocated" and 0 <= t.data_ptr() - s["address"] < s["total_size"]
                       for s in segments for b in s["blocks"])
        assert sum(s["total_size"] for s in segments) <= torch.cuda.memory_reserved()
        assert "GPU reserved memory" in torch.cuda.memory_summary()
        del held, t
        assert torch.cuda.memory_allocated() == before
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    allocs, frees = (sum(e["action"] == a for e in trace) for a in ("alloc", "free_completed"))
    assert allocs >= 4 * steps and frees >= 4 * steps and trace[-1]["frames"], (allocs, frees)
    try:
        torch.empty(2 * torch.cuda.mem_get_info()[0], dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    assert seen == [0] and torch.cuda.memory_stats()["num_ooms"] == 1, seen
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(enabled=None)
    return 1


def devices(steps):
    """Two devices: copies in both directions on several streams, of old and new pages, and NCCL."""
    from torch.nn.parallel import comm
    here, there = torch.device("cuda", 0), torch.device("cuda", 1)
    side, total = torch.cuda.Stream(there), 0.0
    for step in range(steps):
        yield
        for n in (1000, 1 << 20, (9 << 20) + 1000 * step):
            a = torch.randn(n, device=here)
            b = a.to(there)
            side.wait_stream(torch.cuda.current_stream(there))
            with torch.cuda.stream(side):
                b.record_stream(side)
                c = (2 * b).to(here, non_blocking=True)
            torch.cuda.current_stream(here).wait_stream(side)
            assert torch.equal(c, 2 * a)
            d = comm.reduce_add([a, b], 0)
            e = comm.broadcast(d, (0, 1))[1]
            assert torch.equal(e.to(here), 2 * a)
            total += e[:1000].sum().item()
    return total


def double(connection):
    """The other process of `share`: says the sum of each tensor, doubles it, and keeps the last one for a while."""
    last = None
    while True:
        t = connection.recv()
        if t is None:
            return
        total = t.double().sum().item()
        t.mul_(2)
        torch.cuda.synchronize()
        connection.send(total)
        last = t


def share(steps):
    """Tensors that another process changes, small ones of one segment and large ones."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=double, args=(theirs,), daemon=True)
    child.start()
    total = 0.0
    for step in range(steps):
        yield
        for n in (1000, 3000, 1 << 20, (9 << 20) + 1000 * step):
            beside = torch.ones(n, device="cuda")
            a = torch.randn(n, device="cuda")
            expected = 2 * a
            torch.cuda.synchronize()
            ours.send(a)
            total += ours.recv()
            assert torch.equal(a, expected) and beside.sum().item() == n
    ours.send(None)
    child.join()
    assert child.exitcode == 0, child.exitcode
    return total


PROGRAMS = {
    "train": (train, 40), "generate": (generate, 40), "prefetch": (prefetch, 40), "graph": (graph, 60),
    "streams": (streams, 10), "exhaust": (exhaust, 5), "pool": (pool, 20), "compiled": (compiled, 12),
    "counters": (counters, 3), "devices": (devices, 10), "failed": (failed, 8), "share": (share, 10),
}

def main():
    body, steps = PROGRAMS[program]
    steps = int(os.environ.get("STEPS", steps))
    times, run = [], body(steps)
    try:
        next(run)
        while True:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            try:
                next(run)
            finally:
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
    except StopIteration as end:
        result = end.value
    counters = memory.memory_stats()
    print(json.dumps({
        "program": program, "allocator": allocator, "result": result, "steps": steps,
        "step_ms": round(1000 * statistics.median(times[len(times) // 4:]), 4),
        "seconds": round(sum(times), 3),
        "held": counters.get("reserved_bytes.all.peak", 0),
        "live": counters.get("requested_bytes.all.peak", 0) or counters.get("allocated_bytes.all.peak", 0),
    }), flush=True)


if __name__ == "__main__":
    main()
