"""torch_module.py FOLDER - examples/pytorch/galloc_torch.py in odd environments. FOLDER has it, galloc_torch.cpp, a
libgalloc_torch.so with all hooks, cuda_home/include, and compiler, which writes a library in place of a C++ compiler.
PyTorch is the folder `torch` beside this file. Each test is a process."""

import os
import shlex
import subprocess
import sys

here = os.path.dirname(os.path.abspath(__file__))
folder = os.path.abspath(sys.argv[1])
passed = failed = 0


def test(name, code, expected, cwd=folder, **environment):
    """The code ends without an error (expected is ""), or with one whose last lines have the expected text."""
    global passed, failed
    fixed = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([here, folder]), "PYTHONDONTWRITEBYTECODE": "1",
             "HOME": os.path.join(folder, "home"), "TMPDIR": os.path.join(folder, "tmp"),
             "CUDA_HOME": os.path.join(folder, "cuda_home"), "CXX": shlex.quote(os.path.join(folder, "compiler"))}
    result = subprocess.run([sys.executable, "-c", "import galloc_torch, torch\n" + code], cwd=cwd, text=True,
                            env={**fixed, **environment}, capture_output=True)
    last = result.stderr.strip().split("\n")[-1]
    if result.returncode == 0 if not expected else expected in last and "Error: galloc_torch: " in last:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {name}\n{result.stderr}")


install = "galloc_torch.install()"
full = "galloc_torch.install(full=True)"
for name in "home", "tmp", "elsewhere":
    os.makedirs(os.path.join(folder, name), exist_ok=True)

test("install", install + "\nassert torch.current and galloc_torch.installed()\n" + install, "")
test("each setter gets the hook of its name", """
import ctypes
given = galloc_torch.allocator().allocator()
assert set(torch.SETTERS) - set(given) == {"set_capture_about_to_end_fn"}, given
for setter, address in given.items():
    hook = "release_pool" if setter == "set_capture_destroy_fn" else setter[4:].replace("_fn", "")
    function = getattr(galloc_torch._load(), "galloc_hook_" + hook)
    assert address == ctypes.cast(function, ctypes.c_void_p).value, setter
""", "")
test("full after install", install + "\n" + full, "is installed without full=True")
test("install after full", full + "\n" + install + "\n" + full, "")
test("a library in the current folder", install, "", GALLOC_TORCH_LIBRARY="libgalloc_torch.so")
test("a relative path", install, "", cwd=os.path.join(folder, "elsewhere"),
     GALLOC_TORCH_LIBRARY="../libgalloc_torch.so")
test("no library", install, "is not there", GALLOC_TORCH_LIBRARY="/nowhere.so")
test("a file that is no library", install, "with CUDA 13.0", GALLOC_TORCH_LIBRARY=os.path.abspath(__file__))
test("another allocator", "torch.current.append(1)\n" + install, "must come before the first use")

test("full", full, "")
test("a compiler with arguments", full, "", CXX=shlex.quote(os.path.join(folder, "compiler")) + " -m64")
test("no compiler", full, "CXX=... names one", CXX="/nowhere/c++")
test("an empty CXX is c++", full, "CXX=... names one", CXX="", PATH="/nowhere")
test("a home that cannot be made", full, "", HOME="/dev/null/home")
test("a home that nobody knows", full + "\nimport os\nassert not os.path.exists('~')", "", HOME="~")
test("a cache that is no folder", full, "", XDG_CACHE_HOME="/dev/null")
test("processes of several machines with one cache", """
import os
import shutil
names = []

def copy(made, target):
    names.append(made)
    shutil.copy(made, target)

os.getpid, os.rename = lambda: 7, copy
for machine in range(2):
    for path in os.listdir("cache/galloc_torch") if machine else []:
        os.remove("cache/galloc_torch/" + path)
    galloc_torch._load_full()
assert names[0] != names[1], names
assert len(os.listdir("cache/galloc_torch")) == 1
""", "", XDG_CACHE_HOME=os.path.join(folder, "cache"))

print(f"{passed} passed, {failed} failed")
sys.exit(failed != 0)
