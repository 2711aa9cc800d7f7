"""trace_snapshots.py FOLDER - reads what trace_snapshots.c wrote there, with Python's own json and pickle: FOLDER/counters has
its lines. Both formats are one dictionary, the sums are the counters, and going back in time from the segments each
event undoes the one before: no block or page is missing, also where the ring has lost the beginning. A pickle of 100000
events or more takes 90 bytes for each at most. Sizes and speeds are printed; speeds are not judged.
"""

import bisect
import json
import pathlib
import pickle
import sys


class Past:
    """Runs of memory (address -> end) and used blocks (address -> bytes, whether its free is complete)."""

    def __init__(self, segments):
        self.begins, self.ends, self.blocks = [], [], {}
        for segment in segments:
            self.run_comes(segment["address"], segment["total_size"])
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self.blocks[block["address"]] = (block["requested_size"], False)

    def run_comes(self, addr, size):
        i = bisect.bisect_left(self.begins, addr)
        assert i == 0 or self.ends[i - 1] <= addr, "memory comes twice"
        assert i == len(self.begins) or addr + size <= self.begins[i], "memory comes twice"
        self.begins.insert(i, addr)
        self.ends.insert(i, addr + size)
        for at in (i + 1, i):  # what lies side by side is one
            if 0 < at < len(self.begins) and self.ends[at - 1] == self.begins[at]:
                self.ends[at - 1] = self.ends.pop(at)
                self.begins.pop(at)

    def run_of(self, addr, size):
        i = bisect.bisect_right(self.begins, addr) - 1
        assert i >= 0 and addr + size <= self.ends[i], "memory that is not there"
        return i

    def run_goes(self, addr, size):
        i = self.run_of(addr, size)
        begin, end = self.begins.pop(i), self.ends.pop(i)
        for a, b in ((addr + size, end), (begin, addr)):
            if a < b:
                self.begins.insert(i, a)
                self.ends.insert(i, b)

    def undo(self, event):
        action, addr, size = event["action"], event.get("addr", 0), event["size"]
        if action == "alloc":
            assert self.blocks.pop(addr, None) == (size, False), "an allocation of a block that is not there"
        elif action == "free_completed":
            assert addr not in self.blocks, "a block comes over another one"
            self.run_of(addr, size)
            self.blocks[addr] = (size, True)
        elif action == "free_requested":
            assert self.blocks.get(addr) == (size, True), "a request to free a block that is not there"
            self.blocks[addr] = (size, False)
        elif action in ("segment_map", "segment_alloc"):
            self.run_goes(addr, size)
        elif action in ("segment_unmap", "segment_free"):
            self.run_comes(addr, size)
        else:
            assert action in ("wait", "oom", "snapshot", "annotate"), action

    def check_blocks(self):
        """All blocks have memory, and none lies in another one."""
        before = 0
        for addr, (size, _) in sorted(self.blocks.items()):
            assert before <= addr, "a block in another one"
            self.run_of(addr, size)
            before = addr + size


def check_sums(dump, live, reserved, blocks):
    total = requested = used = 0
    for segment in dump["segments"]:
        parts = segment["blocks"]
        assert sum(block["size"] for block in parts) == segment["total_size"], "blocks do not fill a segment"
        of_used = [block for block in parts if block["state"] == "active_allocated"]
        assert sum(block["size"] for block in of_used) == segment["allocated_size"], "allocated_size"
        total += segment["total_size"]
        requested += sum(block["requested_size"] for block in of_used)
        used += len(of_used)
    assert total + sum(pool["kept_by_driver"] for pool in dump["galloc"]["pools"]) == reserved, "reserved"
    assert requested == live, "live"
    assert used == blocks, "blocks"


def present(dump):
    """All but the history, which is an entry longer in the second snapshot; pairs are lists in JSON."""
    rest = json.loads(json.dumps({key: dump[key] for key in dump if key != "device_traces"}))
    for pool in rest["galloc"]["pools"]:
        pool.pop("history")
    return rest


def check(folder, name, live, reserved, blocks):
    """Returns the number of events, and whether the ring has lost the beginning."""
    dump = json.loads((folder / f"{name}.json").read_bytes())
    second = pickle.loads((folder / f"{name}.pickle").read_bytes())
    events = dump["device_traces"][0]
    # The second snapshot's history has a further event: that the first was taken. A full ring lost one for it.
    others = second["device_traces"][0]
    lost = dump["galloc"]["pools"][0]["history"]["overwritten"]
    if others != events:
        assert others[-1]["action"] == "snapshot", "the formats differ"
        begin = len(events) - len(others) + 1
        alike = begin >= 0 and events[begin:] == others[:-1]
        assert alike and (begin == 0 or lost), "the formats differ in their events"
    assert present(dump) == present(second), "the formats differ"
    assert [e["time_us"] for e in events] == sorted(e["time_us"] for e in events), "times go back"
    check_sums(dump, live, reserved, blocks)
    past = Past(dump["segments"])
    past.check_blocks()
    for i, event in enumerate(reversed(events)):
        past.undo(event)
        if i % 1000 == 0:
            past.check_blocks()
    past.check_blocks()
    if not lost:
        assert not past.blocks and not past.begins, "something was before the beginning"
    return len(events), bool(lost)


def main():
    folder = pathlib.Path(sys.argv[1])
    wrong = full = overflowed = large = 0
    for line in (folder / "counters").read_text().splitlines():
        name, *figures = line.split()
        live, reserved, blocks, json_bytes, json_us, pickle_bytes, pickle_us = map(int, figures)
        try:
            events, lost = check(folder, name, live, reserved, blocks)
        except Exception as error:  # whatever a reader finds
            print(f"{name}: {type(error).__name__}: {error}")
            wrong += 1
            continue
        if events >= 100000 and pickle_bytes > 90 * events:
            print(f"{name}: more than 90 bytes for an event")
            wrong += 1
        large += events >= 100000
        full += not lost
        overflowed += lost
        print(f"{name}: {events} events, bytes for each: json {json_bytes / events:.1f}, pickle "
              f"{pickle_bytes / events:.1f}; million events a second: json {events / json_us:.2f}, pickle "
              f"{events / pickle_us:.2f}")
    print(f"{full} whole, {overflowed} overwritten, {large} large, {wrong} wrong")
    sys.exit(bool(wrong) or not full + overflowed)


main()
