"""Breaks galloc.h at places drawn at random, one at a time, and lists the breaks that no test notices.

    random_breaks.py [COUNT [SEED]]          `make test-breaks` runs it; it needs the package libclang

A break removes a statement, makes a condition or one of its terms always true or false, moves a bound by one, swaps +
and -, or returns 0. All of them are compiled into one program, where the environment's BREAK_ID chooses one. So each
test program is compiled once. A first run of each test finds the breaks that it reaches. Then a break runs with those
tests only: first with tests that noticed another break of the same function, then the fastest first. Programs that
include support/inside.c themselves do not take part.

A break that no test notices needs a test and a mutant, or its code has no effect and should go; or it changes nothing
that a test may assert, such as the cost of a call. Environment: BUILD, CC, CUDA_HOME, JOBS (2), FILTER (only breaks
in functions whose names contain this).
"""

import collections
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time

from clang.cindex import CursorKind as Kind, Index

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = os.path.join(ROOT, os.environ.get("BUILD", "build"), "breaks")
CC = os.environ.get("CC", "gcc")
JOBS = int(os.environ.get("JOBS", 2))
MOST_BREAKS = 1 << 16
LEAST_SECONDS, TIMES_LONGER = 10, 4  # a test that runs for longer does not end
INCLUDES = ["-Itests/support", "-Itests/sim", "-isystem", "tests/sim/include", "-idirafter",
            os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")]

# The switch between the breaks, and the file that learns which of them a program reaches.
SWITCH = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static int break_id;
static unsigned char break_unseen[%d], *break_seen = break_unseen;
__attribute__((constructor(101))) static void break_begin(void)
{
    const char *id = getenv("BREAK_ID"), *path = getenv("BREAKS_SEEN");
    int file = path ? open(path, O_RDWR | O_CREAT, 0644) : -1;
    break_id = id ? atoi(id) : 0;
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    if (file >= 0 && !ftruncate(file, sizeof break_unseen)) {
        void *seen = mmap(NULL, sizeof break_unseen, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (seen != MAP_FAILED) break_seen = seen;
    }
}
#define BREAK(n) (break_seen[n] = 1, break_id == (n))
""" % MOST_BREAKS


# ---- the breaks of galloc.h ------------------------------------------------------------------------------------------

BOUNDS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
SIGNS = {"+": "-", "-": "+"}
STATEMENTS = {Kind.CALL_EXPR, Kind.BINARY_OPERATOR, Kind.COMPOUND_ASSIGNMENT_OPERATOR, Kind.UNARY_OPERATOR,
              Kind.CSTYLE_CAST_EXPR, Kind.PAREN_EXPR, Kind.UNEXPOSED_EXPR}


def is_balanced(text):
    text = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])*\'', "0", text)
    depth = 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if depth < 0:
            return False
    return depth == 0 and "#" not in text


class Breaks:
    """All breaks of a header: `found` describes them, `text` is the header with their switches."""

    def __init__(self, path, unfit):
        self.source = open(path, "rb").read()
        self.begin = self.source.index(b"==== IMPLEMENTATION")
        self.unfit, self.number, self.function = unfit, 0, ""
        self.found, self.edits, self.known = {}, [], set()
        arguments = ["-std=gnu11", "-I.", "-I" + compiler_include()] + INCLUDES
        for cursor in Index.create().parse("tests/support/inside.c", args=arguments).cursor.get_children():
            if cursor.kind == Kind.FUNCTION_DECL and cursor.is_definition() and self.place(cursor):
                self.function = cursor.spelling
                self.walk(cursor)

    def place(self, cursor):
        """Where the cursor's text is in galloc.h: two offsets, or None."""
        begin, end = cursor.extent.start, cursor.extent.end
        inside = all(at.file and os.path.basename(at.file.name) == "galloc.h" for at in (begin, end))
        return (begin.offset, end.offset) if inside and self.begin <= begin.offset < end.offset else None

    def of(self, place):
        return self.source[place[0]:place[1]].decode()

    def is_between(self, place, before, after):
        """Is the text what stands there, and not the expansion of a macro?"""
        return place and re.search(before, self.source[max(0, place[0] - 20):place[0]]) and \
            re.match(after, self.source[place[1]:place[1] + 60])

    def add(self, place, kind, prefix, suffix, new):
        if (place, kind) in self.known or not is_balanced(self.of(place)):
            return
        self.known.add((place, kind))
        self.number += 1
        if self.number not in self.unfit:
            switch = f"BREAK({self.number})"
            self.found[self.number] = {"id": self.number, "function": self.function, "kind": kind, "new": new,
                                       "line": self.source.count(b"\n", 0, place[0]) + 1, "old": self.of(place)}
            self.edits.append((*place, prefix.replace("@", switch), suffix.replace("@", switch)))

    def always(self, place, value):
        """The switch is read only where the break makes a difference, so that only such tests count as reaching it."""
        if value:
            self.add(place, "always true", "((", ") || @)", "1")
        else:
            self.add(place, "always false", "((", ") && !@)", "0")

    def instead(self, place, kind, new):
        self.add(place, kind, f"(@ ? ({new}) : (", "))", new)

    def bound(self, place, left, right, new):
        """Of operands without effect the switch is read only if they are equal."""
        if re.search(r"\(|\+\+|--|[^=]=[^=]", left + " " + right):
            self.instead(place, "bound", new)
        else:
            self.add(place, "bound", "((", f") != ({left} == {right} && @))", new)

    def statement(self, cursor):
        place = self.place(cursor)
        end = place and re.match(rb"\s*;", self.source[place[1]:place[1] + 20])
        if end:
            self.add((place[0], place[1] + end.end()), "removed", "{ if (!@) ", " }", "")

    def operator(self, cursor):
        operands, whole = [self.place(child) for child in cursor.get_children()], self.place(cursor)
        if not whole or len(operands) != 2 or None in operands:
            return
        left, right = operands
        if left[0] != whole[0] or right[1] != whole[1] or left[1] > right[0]:
            return
        sign = re.sub(r"/\*.*?\*/", "", self.of((left[1], right[0])), flags=re.S).strip()
        if sign in ("&&", "||"):
            self.always(left, sign == "&&")
            self.always(right, sign == "&&")
        elif sign in BOUNDS:
            self.bound(whole, self.of(left), self.of(right), f"{self.of(left)} {BOUNDS[sign]} {self.of(right)}")
        elif sign in SIGNS and '"' not in self.of(whole):
            self.instead(whole, "sign", f"{self.of(left)} {SIGNS[sign]} {self.of(right)}")

    def walk(self, cursor):
        kind, children = cursor.kind, list(cursor.get_children())
        first = self.place(children[0]) if children else None
        if kind == Kind.COMPOUND_STMT or kind in (Kind.IF_STMT, Kind.FOR_STMT, Kind.WHILE_STMT):
            for child in children if kind in (Kind.COMPOUND_STMT, Kind.IF_STMT) else children[-1:]:
                if child.kind in STATEMENTS:
                    self.statement(child)
        if (kind == Kind.IF_STMT and self.is_between(first, rb"if \($", rb"\)")) or \
                (kind == Kind.CONDITIONAL_OPERATOR and self.is_between(first, rb"", rb"\s*\?")):
            self.always(first, True)
            self.always(first, False)
        elif kind == Kind.WHILE_STMT and self.is_between(first, rb"while \($", rb"\)"):
            self.always(first, False)
        elif kind == Kind.BINARY_OPERATOR:
            self.operator(cursor)
        elif kind == Kind.RETURN_STMT and self.is_between(first, rb"return $", rb"\s*;") and \
                self.of(first) not in ("0", "cudaSuccess", "CUDA_SUCCESS", "NULL"):
            self.add(first, "returns 0", "@ ? 0 : (", ")", "0")
        for child in children:
            self.walk(child)

    def text(self):
        """Of breaks that begin at one place the one of the longer text is outside; of equal ones, the first."""
        before, after = collections.defaultdict(list), collections.defaultdict(list)
        for begin, end, prefix, suffix in self.edits:
            before[begin].append((begin - end, len(before[begin]), prefix))
            after[end].append((end - begin, -len(after[end]), suffix))
        parts, last = [], 0
        for at in sorted(set(before) | set(after)):
            parts.append(self.source[last:at].decode())
            parts += [suffix for *_, suffix in sorted(after[at])] + [prefix for *_, prefix in sorted(before[at])]
            last = at
        return "".join(parts) + self.source[last:].decode()


def compiler_include():
    return subprocess.run([CC, "-print-file-name=include"], capture_output=True, text=True).stdout.strip()


# ---- programs --------------------------------------------------------------------------------------------------------

def compile_c(source, to, *flags):
    command = [CC, "-w", "-c", source, "-o", os.path.join(WORK, to), *flags, *INCLUDES]
    return subprocess.run(command, capture_output=True, text=True)


def compile_breaks():
    """Compiles galloc with all breaks; those that do not compile are left out. Returns the others."""
    unfit = set()
    while True:
        breaks = Breaks("galloc.h", unfit)
        text = breaks.text()
        with open(os.path.join(WORK, "galloc.h"), "w") as file:
            file.write(text)
        done = compile_c("tests/support/inside.c", "inside.o", "-std=gnu11", "-O0", "-include", WORK + "/switch.h",
                         "-I" + WORK)
        if not done.returncode:
            return breaks.found
        lines, before = text.split("\n"), len(unfit)
        for number in re.findall(r"breaks/galloc\.h:(\d+):", done.stderr):
            unfit.update(int(n) for n in re.findall(r"BREAK\((\d+)\)", lines[int(number) - 1]))
        if len(unfit) == before:
            sys.exit(done.stderr)


def build_programs():
    objects = []
    for name in sorted(os.listdir("tests/sim")):
        if name.endswith(".c"):
            objects.append(os.path.join(WORK, "sim_" + name[:-2] + ".o"))
            done = compile_c("tests/sim/" + name, "sim_" + name[:-2] + ".o", "-std=c11", "-O2")
            if done.returncode:
                sys.exit(done.stderr)
    programs = []
    for folder in ("tests/unit", "tests/stress"):
        for name in sorted(os.listdir(folder)):
            source, program = os.path.join(folder, name), name[:-2]
            if not name.endswith(".c") or '#include "inside.c"' in open(source).read() or \
                    compile_c(source, program + ".o", "-std=c11", "-O0", "-I.").returncode:
                continue
            link = [CC, program + ".o", "inside.o", *objects, "-o", program, "-lpthread", "-lm", "-rdynamic"]
            if not subprocess.run(link, cwd=WORK, capture_output=True).returncode:
                programs.append(program)
    return programs


def limit_process():
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))


def tests_of(program):
    """The program's tests: pairs of its name and theirs."""
    names = subprocess.run([os.path.join(WORK, program), "--list"], capture_output=True, text=True).stdout
    return [(program, name) for name in names.split()]


def run(test, seconds, **environment):
    """How the test failed, or None."""
    program, name = test
    process = subprocess.Popen([os.path.join(WORK, program), name], env=dict(os.environ, **environment), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
                               preexec_fn=limit_process)
    late = threading.Event()

    def end():
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    failure = next((line.strip() for line in process.stdout if line.startswith("FAILED")), None)
    timer.cancel()
    if failure:
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return failure or ("does not end" if late.is_set() else f"status {status}" if status else None)


# ---- all of it -------------------------------------------------------------------------------------------------------

def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 30)
    os.chdir(ROOT)
    os.makedirs(WORK, exist_ok=True)
    with open(os.path.join(WORK, "switch.h"), "w") as file:
        file.write(SWITCH)
    breaks = compile_breaks()
    tests = [test for program in build_programs() for test in tests_of(program)]
    print(f"{len(breaks)} breaks, {len(tests)} tests; first each test runs without a break", flush=True)
    seen, times, path = {}, {}, os.path.join(WORK, "seen")
    for test in tests:
        begin = time.time()
        failure = run(test, 600, BREAKS_SEEN=path)
        times[test] = time.time() - begin
        if failure:
            print(f"  {' '.join(test)} is left out: {failure}")
        else:
            seen[test] = open(path, "rb").read()
        os.unlink(path)
    unseen = [b for b in breaks.values() if not any(bits[b["id"]] for bits in seen.values())]
    reached = [b for b in breaks.values() if any(bits[b["id"]] for bits in seen.values())]
    print(f"{len(unseen)} breaks are reached by no test: {WORK}/unreached.txt")
    with open(os.path.join(WORK, "unreached.txt"), "w") as file:
        for b in unseen:
            print(f"galloc.h:{b['line']}: {b['function']}: {' '.join(b['old'].split())}", file=file)

    chosen = [b for b in reached if os.environ.get("FILTER", "") in b["function"]]
    chosen = random.Random(seed).sample(chosen, min(count, len(chosen)))
    left, survivors, lock = list(chosen), [], threading.Lock()
    noticed = collections.Counter()  # by function and test

    def work():
        while True:
            with lock:
                if not left:
                    return
                b = left.pop(0)
            failure = None
            able = [test for test in seen if seen[test][b["id"]]]
            for test in sorted(able, key=lambda test: (-noticed[b["function"], test], times[test])):
                failure = run(test, max(LEAST_SECONDS, TIMES_LONGER * times[test]), BREAK_ID=str(b["id"]))
                if failure:
                    break
            text = f"galloc.h:{b['line']}: {b['function']}: {b['kind']}: {' '.join(b['old'].split())}"
            with lock:
                if failure:
                    noticed[b["function"], test] += 1
                else:
                    survivors.append(text)
                print(f"{text[:100]}: {test[0]}: {failure}" if failure else f"NOT NOTICED {text}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(JOBS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"\n{len(chosen)} breaks (seed {seed}), {len(chosen) - len(survivors)} noticed, {len(survivors)} not:")
    print("\n".join(sorted(survivors)))


if __name__ == "__main__":
    main()
