/* viewer.js - `node viewer.js docs/viewer.html FOLDER`: runs the part of the page that reads and adds up, on the
   snapshots of snapshots.c in FOLDER and on hostile files. check_viewer.sh calls it. */

"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm"), zlib = require("zlib");

const [page, folder] = process.argv.slice(2);
const html = fs.readFileSync(page, "utf8");
const script = html.slice(html.indexOf("<script nonce"), html.lastIndexOf("</script>")).replace(/^<script[^>]*>/, "");
const context = vm.createContext({ TextDecoder, DecompressionStream, Blob, Uint8Array, console });
vm.runInContext(script, context);
const { load, LIMITS, holdersAt, noteAt, Unpickler } =
    vm.runInContext("({ load, LIMITS, holdersAt, noteAt, Unpickler })", context);

let failures = 0, checks = 0;
function expect(holds, what) {
    checks++;
    if (!holds && ++failures <= 20) console.log("  " + what);
}
function file(name) { return new Uint8Array(fs.readFileSync(path.join(folder, name))); }

/* Ends in a heap or in words, and does not hang: a file that makes the page work without end takes minutes. */
const ENDLESS = 20e6; /* microseconds of the processor's time, which other programs do not add to */
async function calm(bytes, what) {
    const begun = process.cpuUsage();
    let found;
    try {
        found = await load(bytes);
        expect(found.heap || (typeof found.error === "string" && found.error.length > 10 && found.error.length < 600),
            what + ": neither a heap nor words: " + found.error);
    } catch (e) {
        expect(false, what + " throws " + e);
    }
    expect(process.cpuUsage(begun).user < ENDLESS, what + " does not end soon");
    return found || {};
}
async function refused(bytes, words, what) {
    const found = await calm(bytes, what);
    expect(found.error && words.test(found.error), what + ": " + (found.error || "is taken"));
}
function text(value) { return new TextEncoder().encode(typeof value === "string" ? value : JSON.stringify(value)); }

/* ---- true files: each format has the sums of the counters ---- */

function summary(heap) {
    return JSON.stringify([heap.sums, [...heap.sums.runs], [...heap.pageSizes], [...heap.addr], [...heap.state],
        [...heap.tag].map(i => heap.tags.labels[i]), [...heap.stream].map(i => heap.streams.labels[i])]);
}

async function trueFiles() {
    for (const line of fs.readFileSync(path.join(folder, "counters"), "utf8").trim().split("\n")) {
        const [name, ...counters] = line.split(" ");
        const wanted = new Set();
        for (const ending of [".json", ".pickle", ".json.gz", ".pickle.gz"]) {
            const { heap, error } = await load(file(name + ending)), what = name + ending;
            if (!heap) { expect(false, what + ": " + error); continue; }
            const { live, reserved, usedBlocks, graphs } = heap.sums;
            expect([live, reserved, usedBlocks, graphs].join(" ") === counters.join(" "), what + ": other sums than " +
                counters.join(" ") + ": " + [live, reserved, usedBlocks, graphs].join(" "));
            expect(!heap.warnings.length, what + ": " + heap.warnings.join("; "));
            wanted.add(summary(heap));
        }
        expect(wanted.size === 1, name + ": formats differ");
    }
    const { heap } = await load(file("many.json"));
    expect(heap.n > 500 && heap.streams.labels.length > 3 && heap.tags.labels.length > 9 &&
        heap.pools.labels.length === 3 &&
        heap.sums.graphs > 0 && heap.sums.pending > heap.sums.graphs, "many.json has little in it");
}

/* The history begins where many.json ends: going back from the end, the same is live there, by the same tags. */
async function past() {
    const before = (await load(file("many.json"))).heap;
    for (const name of ["past.json", "past.pickle"]) {
        const { heap } = await load(file(name)), past = heap && heap.past;
        if (!past) { expect(false, name + " has no past"); continue; }
        expect(past.n > 4000 && past.live[past.n - 1] === heap.sums.live && past.held[past.n - 1] === heap.sums.held,
            name + ": the end of the past is not now");
        const first = past.action.findIndex(action => action < 5);
        expect(past.live[first] + (past.action[first] === 2 ? past.size[first] : -past.size[first]) ===
            before.sums.live, name + ": the beginning of the past has other live bytes than many.json");
        for (const at of [0, 999, past.n - 1]) {
            const rows = holdersAt(heap, past, at);
            expect(rows.reduce((sum, row) => sum + row.bytes, 0) === past.live[at], name + ": who holds most at " + at);
            expect(rows.every((row, i) => !i || rows[i - 1].bytes >= row.bytes), name + ": the order at " + at);
        }
        const were = holdersAt(heap, past, 0).map(row => row.label.replace(/ \(.*/, "") + " " + row.bytes).sort();
        const by = new Map();
        for (let i = 0; i < before.n; i++) if (before.state[i] === 2) by.set(before.tags.labels[before.tag[i]],
            (by.get(before.tags.labels[before.tag[i]]) || 0) + before.requested[i]);
        expect(were.join() === [...by].map(([label, bytes]) => label + " " + bytes).sort().join(),
            name + ": other tags held memory at the beginning");
        expect([...past.action].filter(action => action === 5).length === 1, name + ": memory ran out once");
        expect(noteAt(past, 0) === "step 0 </script>" && noteAt(past, past.n - 1) === "step 9 </script>",
            name + ": annotations: " + noteAt(past, past.n - 1));
        expect(heap.sums.pending > 0 && heap.tags.labels.includes("tag 3 (<img src=x> weights)"), name +
            ": pending blocks, or the name of a tag");
    }
}

/* Where calls have stacks, who held memory is the place of the allocation, not of the free. */
async function holders() {
    const segments = JSON.parse(fs.readFileSync(path.join(folder, "one.json"), "utf8")).segments;
    const event = (action, addr, name) =>
        ({ action, addr, size: 10, frames: [{ filename: "a", name, line: 1 }] });
    const trace = [event("alloc", 512, "load"), event("alloc", 1024, "cache"), event("free_requested", 512, "end"),
        event("alloc", 512, "again"), event("free_requested", 512, "end"), event("free_requested", 1024, "end"),
        event("free_requested", 2048, "end"), { ...event("free_requested", 4096, "x"), tag: 7 }];
    const { heap } = await calm(text({ segments, device_traces: [trace] }), "stacks");
    const names = at => holdersAt(heap, heap.past, at).map(row => row.label.split(" a:")[0]).sort().join();
    const older = "allocated before the history,";
    expect(heap && names(1).startsWith(older + "cache,load,"), "holders at 1: " + names(1));
    expect(heap && names(3).startsWith("again," + older + "cache,"), "holders at 3: " + names(3));
    expect(heap && names(5).includes(older) && names(5).includes("tag 7") && !names(5).includes("end"),
        "holders at 5: " + names(5));
}

/* Events can be anything. */
async function hostilePasts() {
    const segments = JSON.parse(fs.readFileSync(path.join(folder, "one.json"), "utf8")).segments;
    const bad = [null, 7, [], {}, { action: "alloc" }, { action: "alloc", addr: -1, size: 1e300, time_us: {} },
        { action: "__proto__", size: 3 }, { action: "constructor" }, { action: ["alloc"], frames: 7, tag: {} },
        { action: "free_requested", addr: 512, size: 7, frames: [null] }, { action: "annotate", user_metadata: [1] }];
    const { heap } = await calm(text({ segments, device_traces: [bad] }), "a hostile past");
    expect(heap && heap.past && heap.past.n === 8, "hostile events: " + (heap && heap.past && heap.past.n));
    expect(heap && holdersAt(heap, heap.past, 0).length === 1, "who holds most in a hostile past");
    const more = await calm(text({ segments, device_traces: [[{ action: "alloc", addr: 0, size: 2 ** 50 }]] }), "much");
    expect(more.heap && more.heap.warnings.length === 1, "a past with more than there is has no warning");
    const two = await calm(text({ segments, device_traces: [[{ action: "oom" }], [{ action: "oom" }]] }), "two devices");
    expect(two.heap && two.heap.past === null, "two pasts at once");
    const sizes = [2 ** 63, 2 ** 64, 2 ** 65, -1, 0.5, "7"].map(bytes => ({ action: "oom", size: bytes }));
    const out = await calm(text({ segments, device_traces: [sizes] }), "failed requests");
    expect(out.heap && [...out.heap.past.size].join() === [2 ** 63, 2 ** 64, 0, 0, 0, 0].join(),
        "sizes of failed requests: " + (out.heap && [...out.heap.past.size].join()));
    for (const traces of [7, [7], {}, [null, [[]]]]) await calm(text({ segments, device_traces: traces }), "traces");
}

/* A file that does not agree with itself is shown with warnings. */
async function warnings() {
    for (const [key, by] of [["live", 1], ["reserved", 1], ["blocks", 1], ["kept_by_driver", 1]]) {
        const dict = JSON.parse(fs.readFileSync(path.join(folder, "many.json"), "utf8"));
        dict.galloc.pools[0][key] += by;
        const { heap } = await calm(text(dict), "wrong " + key);
        expect(heap && heap.warnings.length > 0, "a wrong " + key + " has no warning");
    }
    for (const key of ["total_size", "allocated_size", "requested_size"]) {
        const dict = JSON.parse(fs.readFileSync(path.join(folder, "one.json"), "utf8"));
        dict.segments[0][key]++;
        const { heap } = await calm(text(dict), "wrong " + key);
        expect(heap && heap.warnings.length > 0, "a wrong " + key + " has no warning");
    }
}

/* ---- hostile files ---- */

async function cutAndChanged() {
    let random = 1;
    const next = n => (random = (Math.imul(random, 1103515245) + 12345) >>> 0, (random >>> 8) % n);
    for (const name of ["one.json", "one.pickle", "one.json.gz", "one.pickle.gz"]) {
        const bytes = file(name), end = name.endsWith(".json") ? bytes.length - 1 : bytes.length;
        for (let n = 0; n < end; n++) await refused(bytes.slice(0, n), /./, name + " cut at " + n);
    }
    for (const name of ["many.json", "many.pickle", "one.pickle", "one.pickle.gz"]) {
        for (let i = 0; i < 300; i++) {
            const bytes = file(name);
            for (let k = next(8); k >= 0; k--) bytes[next(bytes.length)] = next(256);
            await calm(bytes, name + " changed, " + i);
        }
    }
}

function pickle(...codes) { return Uint8Array.from([0x80, 2, ...codes.flat()]); }
function word(w) { return [0x8c, w.length, ...text(w)]; }

/* Short texts are found again by their bytes: many of a length, some of them equal, others than ASCII, none. */
function texts() {
    const said = [""];
    for (let i = 0; i < 20000; i++)
        said.push("t" + (i * 7919 % 10007), ["ä", "日本", "x".repeat(24), "y".repeat(25)][i % 4]);
    const codes = said.map(one => { const of = [...text(one)]; return [0x8c, of.length, ...of, 0x61]; });
    const found = new Unpickler(Uint8Array.from([0x80, 2, 0x5d, ...codes.flat(), 0x2e])).run();
    expect(found.join() === said.join(), "short texts of a pickle are others");
}

async function hostilePickles() {
    const deep = n => [new Array(n).fill(0x5d), new Array(n - 1).fill(0x61), 0x2e].flat();
    await refused(pickle([...text("cos\nsystem\n")]), /opcode 0x63/, "GLOBAL");
    await refused(pickle(word("a"), word("b"), 0x93, 0x2e), /opcode 0x93/, "STACK_GLOBAL");
    await refused(pickle(0x29, 0x29, 0x52, 0x2e), /opcode 0x52/, "REDUCE");
    await refused(pickle(0x29, 0x29, 0x81, 0x2e), /opcode 0x81/, "NEWOBJ");
    await refused(pickle(0x7d, 0x7d, 0x62, 0x2e), /opcode 0x62/, "BUILD");
    await refused(pickle(0x58, 255, 255, 255, 255, 65, 0x2e), /too early/, "a text of 4 GiB");
    await refused(pickle(0x8d, 255, 255, 255, 255, 255, 255, 255, 255, 0x2e), /too early/, "a text of 16 EiB");
    await refused(pickle(0x8a, 255, ...new Array(255).fill(1), 0x2e), /255 bytes/, "a number of 255 bytes");
    await refused(pickle(0x6a, 255, 255, 255, 255, 0x2e), /remembered/, "a memo that is not there");
    await refused(pickle(0x61, 0x2e), /not there/, "APPEND to nothing");
    await refused(pickle(0x4b, 1, 0x4b, 1, 0x61, 0x2e), /no list/, "APPEND to a number");
    await refused(pickle(0x5d, 0x28, 0x61, 0x2e), /not there/, "APPEND across a mark");
    await refused(pickle(0x7d, 0x5d, 0x4b, 1, 0x73, 0x2e), /no text/, "a list as a key");
    await refused(pickle(deep(200000)), /no dictionary/, "lists in lists");
    await refused(new Uint8Array(2e6).fill(0x4e).fill(0x80, 0, 1), /./, "two million values");
    /* A list that holds itself, and a short file that names a long list often. */
    await refused(pickle(0x7d, word("segments"), 0x5d, 0x94, 0x68, 0, 0x61, 0x73, 0x2e), /no dictionary/,
        "a list in itself");
    const many = new Array(60000).fill([0x68, 0, 0x61]).flat(), often = new Array(60000).fill([0x68, 1, 0x61]).flat();
    await refused(pickle(0x5d, 0x7d, 0x71, 0, 0x30), /opcode 0x30/, "POP");
    await refused(pickle(0x5d, 0x72, 255, 255, 255, 127, 0x2e), /out of order/, "a memo of two billion");
    await refused(pickle(0x5d, 0x7d, 0x71, 0, 0x71, 1, word("address"), 0x4b, 0, 0x73, word("total_size"), 0x4b, 0,
        0x73,
        word("blocks"), 0x5d, 0x7d, 0x71, 0, 0x61, many, 0x73, 0x61, often, 0x2e), /blocks; the most/,
            "blocks named often");
}

async function hostileJson() {
    const block = { address: 0, size: 512, requested_size: 1, state: "active_allocated" };
    const segment = { address: 0, total_size: 512, blocks: [block] };
    await refused(text("[".repeat(1e6)), /JSON/, "deep JSON");
    await refused(text("[".repeat(1e5) + "]".repeat(1e5)), /segments|read/, "deep and whole JSON");
    await refused(text("{}"), /no list of segments/, "no segments");
    await refused(text("null"), /no list of segments/, "null");
    await refused(text(""), /empty/, "nothing");
    await refused(Uint8Array.from([255, 254, 0]), /neither/, "neither");
    await refused(text({ segments: {} }), /no list of segments/, "segments are no list");
    await refused(text({ segments: [1] }), /no dictionary/, "a number as a segment");
    await refused(text({ segments: { length: 1e9 } }), /no list/, "a length without a list");
    for (const size of [-1, 1.5, 1e300, "</script>", null, [], {}, true])
        await refused(text({ segments: [{ ...segment, blocks: [{ ...block, size }] }] }), /whole number/, "size " +
            size);
    await refused(text({ segments: [{ ...segment, blocks: [{ ...block, state: "</script>" }] }] }), /state/, "a state");
    await refused(text({ segments: [segment], galloc: { pools: 7 } }), /no list/, "pools");
    await refused(text({ segments: [segment], galloc: { pools: [{ pages: [[1]] }] } }), /pair/, "pages");
    const named = text(JSON.stringify({ segments: [{ ...segment, stream: 7 }] }).replace("7", "1e999"));
    const { heap } = await calm(named, "a stream without end");
    expect(heap && heap.streams.labels.join() === "stream ?", "a stream that is no number has a number's name");
    await prototypes(segment, block);
}

/* Keys and tags with the names of what every object has are like others. */
async function prototypes(segment, block) {
    const names = ["__proto__", "constructor", "toString", "hasOwnProperty", "</script>"];
    const blocks = names.map((tag, i) => ({ ...block, address: 512 * i, tag, stream: tag }));
    const dict = JSON.stringify({ segments: [{ ...segment, total_size: 512 * names.length, blocks }] });
    const { heap } = await calm(text(dict.replace("{", "{\"__proto__\":{\"galloc\":7},\"constructor\":1,")), "names");
    expect(heap && heap.tags.labels.join() === names.map(name => "tag " + name).join(), "tags named as methods");
    expect(heap && !heap.hasCounters, "a prototype is taken for the file's own");
    await refused(pickle(0x7d, word("__proto__"), 0x7d, word("segments"), 0x5d, 0x73, 0x73, 0x2e),
        /no list of segments/,
        "a prototype in a pickle");
    expect(({}).segments === undefined && vm.runInContext("({}).segments", context) === undefined,
        "Object has segments");
}

/* What unpacks to more than the limit is refused on the way. */
async function bombs() {
    const limit = LIMITS.bytes;
    LIMITS.bytes = 1e6;
    await refused(new Uint8Array(zlib.gzipSync(Buffer.alloc(2e7))), /larger than/, "a gzip bomb");
    await refused(new Uint8Array(2e6), /larger than/, "a large file");
    LIMITS.bytes = limit;
    await refused(new Uint8Array(zlib.gzipSync(zlib.gzipSync("{}"))), /neither|JSON/, "gzip in gzip");
}

/* ---- PyTorch's dumps: other opcodes, frames in place of tags ---- */

async function torch() {
    const frames = [{ filename: "??", line: 0, name: "c10" }, { filename: "train.py", line: 7, name: "step" }];
    const dict = { device_traces: [[1, 2]], segments: [{ address: 4096, total_size: 2048, stream: 0, device: 1,
        allocated_size: 512, active_size: 1024, segment_pool_id: [0, 0], blocks: [
            { size: 512, requested_size: 500, state: "active_allocated", frames },
            { size: 512, requested_size: 0, state: "active_awaiting_free", frames: [] },
            { size: 1024, requested_size: 0, state: "inactive", frames: [] }] }] };
    const { heap } = await calm(text(dict), "PyTorch's");
    expect(heap && heap.sums.live === 500 && heap.sums.free === 1024 && heap.sums.pending === 512 &&
        heap.events === 2 &&
        heap.tags.labels[0] === "step train.py:7" && !heap.warnings.length, "a dump of PyTorch: " + (heap &&
            heap.warnings));
    /* Protocol 4: frames, short texts, memos without numbers, whole lists and dictionaries at once. */
    const of = pickle(0x95, 0, 0, 0, 0, 0, 0, 0, 0, 0x7d, 0x94, 0x28, word("segments"), 0x94, 0x5d, 0x94, 0x28, 0x7d,
        0x28,
        word("address"), 0x4d, 0, 16, word("total_size"), 0x4b, 0, word("blocks"), 0x5d, 0x75, 0x65, word("x"), 0x4e,
            0x75, 0x2e);
    const found = await calm(of, "protocol 4");
    expect(found.heap && found.heap.segments[0].address === 4096, "protocol 4: " + found.error);
}

(async () => {
    for (const part of [trueFiles, past, holders, hostilePasts, warnings, cutAndChanged, texts, hostilePickles,
        hostileJson, bombs, torch]) await part();
    console.log(checks - failures + " hold, " + failures + " do not");
    process.exit(failures || !checks ? 1 : 0);
})();
