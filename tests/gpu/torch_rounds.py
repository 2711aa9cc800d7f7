"""Rounds of real programs of PyTorch under its own allocators and under galloc, for medians of the time of a step.

    make build/libgalloc_torch.so
    GALLOC_TORCH_LIBRARY=$PWD/build/libgalloc_torch.so setarch -R python3 tests/gpu/torch_rounds.py ROUNDS [STEPS]

STEPS is for instance train=16,prefetch=24,graph=40,generate=16 (the default). One process imports PyTorch; each run of
torch_programs.py is a fork of it. The forks of a round set up side by side and stop before their first step; then they
run one at a time on four cores, in an order that is drawn. Each run prints a line of JSON into OUT (environment; by
default build/gpu/rounds.jsonl); a table comes last. SECONDS (environment) ends the rounds earlier.
"""

import json
import os
import random
import runpy
import statistics
import subprocess
import sys
import time

begin = time.time()
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(root, "examples", "pytorch"))
ALLOCATORS = ("native", "expandable", "galloc", "galloc-full")
most = int(sys.argv[1])
steps = sys.argv[2] if len(sys.argv) > 2 else "train=16,prefetch=24,graph=40,generate=16"
steps = dict(part.split("=") for part in steps.split(","))
seconds = float(os.environ.get("SECONDS", 3600))
out_path = os.environ.get("OUT", os.path.join(root, "build", "gpu", "rounds.jsonl"))

# Way 3 is compiled once, in a process of its own: a fork of this one must find CUDA untouched.
compiling = subprocess.Popen([sys.executable, "-c", "import galloc_torch; galloc_torch._load_full()"],
                             env=dict(os.environ, PYTHONPATH=sys.path[0]))
import torch
import torch.nn.functional

if compiling.wait():
    sys.exit("galloc_torch.cpp did not compile")
cores = sorted(os.sched_getaffinity(0))
few = cores[4:8] or cores


def fork_body(program, allocator, out, ready, go):
    """Runs the program; its first torch.cuda.synchronize(), which comes before the first step, waits for `go`."""
    os.dup2(out, 1)
    os.environ["STEPS"] = steps[program]
    synchronize = torch.cuda.synchronize

    def first(*args):
        synchronize(*args)
        torch.cuda.synchronize = synchronize
        os.write(ready, b"1")
        os.read(go, 1)
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), few)

    torch.cuda.synchronize = first
    sys.argv = ["torch_programs.py", program, allocator]
    try:
        runpy.run_path(os.path.join(root, "tests", "gpu", "torch_programs.py"), run_name="__main__")
    except BaseException as error:
        print(program, allocator, repr(error)[:2000], file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(0)


class Run:
    def __init__(self, program, allocator):
        self.program, self.allocator = program, allocator
        out, ready, go = os.pipe(), os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            for end in (out[0], ready[0], go[1]):
                os.close(end)
            fork_body(program, allocator, out[1], ready[1], go[0])
        for end in (out[1], ready[1], go[0]):
            os.close(end)
        self.out, self.ready, self.go = out[0], ready[0], go[1]

    def finish(self):
        """The result, or None."""
        os.write(self.go, b"1")
        with os.fdopen(self.out) as out:
            text = out.read()
        os.waitpid(self.pid, 0)
        os.close(self.ready)
        os.close(self.go)
        try:
            return json.loads(text.strip().splitlines()[-1])
        except (IndexError, ValueError):
            print(f"no result of {self.program} under {self.allocator}", file=sys.stderr, flush=True)
            return None


results = {(program, allocator): [] for program in steps for allocator in ALLOCATORS}
os.makedirs(os.path.dirname(out_path) or ".", exist_ok=True)
with open(out_path, "w") as log:
    longest = 0.0
    for number in range(most):
        if time.time() - begin + longest > seconds:
            break
        start = time.time()
        runs = [Run(*key) for key in results]
        for run in runs:
            os.read(run.ready, 1)
        random.shuffle(runs)
        for run in runs:
            result = run.finish()
            if result:
                results[run.program, run.allocator].append(result)
                print(json.dumps(dict(result, round=number)), file=log, flush=True)
        longest = max(longest, time.time() - start)
        print(f"round {number + 1} of {most}: {time.time() - start:.0f} s", flush=True)

print(f"{'program':10}{'allocator':14}{'rounds':>7}{'median ms':>11}{'least ms':>10}{'held MiB':>10}{'live MiB':>10}"
      "  median / the fastest of PyTorch's")
wrong = 0
for program in steps:
    times = {a: sorted(r["step_ms"] for r in results[program, a]) for a in ALLOCATORS}
    fastest = min((statistics.median(times[a]) for a in ALLOCATORS[:2] if times[a]), default=0)
    for allocator in ALLOCATORS:
        rows = results[program, allocator]
        wrong += most and not rows
        if not rows:
            continue
        median = statistics.median(times[allocator])
        held, live = (statistics.median(r[key] for r in rows) / 2**20 for key in ("held", "live"))
        ratio = f"  {median / fastest:.3f}" if fastest and allocator.startswith("galloc") else ""
        print(f"{program:10}{allocator:14}{len(rows):7}{median:11.3f}{times[allocator][0]:10.3f}{held:10.1f}"
              f"{live:10.1f}{ratio}")
    equal = len({r["result"] for a in ALLOCATORS for r in results[program, a]}) == 1
    wrong += not equal
    print(f"{program}: results are {'equal' if equal else 'NOT equal'}")
sys.exit(bool(wrong))
