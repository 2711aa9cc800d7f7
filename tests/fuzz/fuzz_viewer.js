/* fuzz_viewer.js - a fuzzer for docs/viewer.html: `node fuzz_viewer.js PAGE FOLDER SECONDS SEED` changes the snapshots
   in FOLDER, as bytes and as values, opens them in the page and uses it, without a browser. `... PAGE FILE` opens a
   file again. Whatever a file says, opening ends within a bound of time and memory, in a heap or in words; no object
   inherits what a file says; the page gets text as text. What goes wrong is kept as FOLDER/finding. */

"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm"), zlib = require("zlib");
const { Worker, isMainThread, parentPort, workerData } = require("worker_threads");
const { begin, next, pick, change, pickled, changeBytes, MARKUP } = require("./fuzz_viewer_files.js");

const MOST_BYTES = 1 << 20, MOST_MS = 30000, MOST_MIB = 768, MOST_ELEMENTS = 30000, MOST_TEXT = 20000;
const [page, folder, seconds, seed] = isMainThread ? process.argv.slice(2) : workerData.args;

/* ---- the thread that watches: the other one does not come back from an endless loop ---- */

function watch() {
    const shared = new SharedArrayBuffer(8 + MOST_BYTES), state = new Int32Array(shared, 0, 2);
    const worker = new Worker(__filename, { workerData: { args: process.argv.slice(2), shared },
        resourceLimits: { maxOldGenerationSizeMb: MOST_MIB } });
    const end = words => {
        const single = !fs.statSync(folder).isDirectory(), kept = path.join(folder, "finding");
        if (!single) fs.writeFileSync(kept, Buffer.from(shared, 8, state[1]));
        console.log("fuzz_viewer: " + words + (single ? "" : ": " + kept + ", after " + state[0] + " files"));
        process.exit(1);
    };
    let before = -1, since = Date.now();
    setInterval(() => {
        if (state[0] !== before) { before = state[0]; since = Date.now(); }
        else if (Date.now() - since > MOST_MS) end("a file that does not end soon");
    }, 500);
    worker.on("message", ({ found, said }) => {
        if (found) end(found);
        console.log(said);
        process.exit(0);
    });
    worker.on("error", e => end(String(e && e.stack || e)));
}

/* ---- a page without a browser. It refuses whatever could make markup or code of a text ---- */

class Finding extends Error {}
function require_(holds, what) { if (!holds) throw new Finding(what); }

let made = 0;
const frames = [];
const NAMES = /^(button|canvas|i|b|span|div|option|tr|td|th|thead|tbody)$/;
const SETTABLE = { id: /^sum-[a-z]+$/, className: /^[a-z]+$/, type: /^button$/, scope: /^col$/, title: /^/, value: /^/,
    width: /^[0-9]+$/, height: /^[0-9]+$/ };
const STYLES = { background: /^(#[0-9a-f]{6}|repeating-linear-gradient\(45deg(, #[0-9a-f]{6} [02](px)? [25]px){2}\))$/,
    width: /^-?[0-9.e+-]+%$/, left: /^-?[0-9.e+-]+px$/, top: /^-?[0-9.e+-]+px$/ };
const DATA = { value: /^-?[0-9.e+-]+$/, live: /^-?[0-9.e+-]+$/, theme: /^[a-z]+$/ };

function strict(rules, what) {
    return new Proxy({}, { set(to, key, value) {
        require_(rules[key] && rules[key].test(String(value)), what + key + " is set to " + String(value).slice(0, 99));
        to[key] = value;
        return true;
    } });
}

function plainText(text) {
    text = String(text);
    require_(text.length < MOST_TEXT, "a text of " + text.length + " letters");
    require_(!/\bNaN\b|\bundefined\b|\[object|Infinity/.test(text), "a text without sense: " + text.slice(0, 300));
    return text;
}

const drawing = new Proxy({}, { get: (to, key) => key in to ? to[key] : () => drawing, set(to, key, value) {
    if (key === "fillStyle" || key === "strokeStyle")
        require_(value === drawing || /^#[0-9a-f]{3,6}$/.test(value), "a colour is a " + typeof value);
    to[key] = value;
    return true;
} });

function element(name) {
    require_(NAMES.test(name), "an element of the kind " + name);
    require_(++made < MOST_ELEMENTS, "too many elements");
    const self = { children: [], classes: new Set(), clientWidth: 900, clientHeight: 400, offsetWidth: 200,
        offsetHeight: 80, width: 300, height: 150, value: "", tagName: name.toUpperCase(),
        style: strict(STYLES, "style."), dataset: strict(DATA, "dataset."), said: "",
        classList: { toggle: (one, on) => on ? self.classes.add(one) : self.classes.delete(one),
            add: one => self.classes.add(one), remove: one => self.classes.delete(one) },
        appendChild: child => { self.children.push(child); return child; }, addEventListener: () => {},
        setAttribute(key, value) { require_(/^aria-[a-z]+$/.test(key), "the attribute " + key); plainText(value); },
        getContext: () => drawing, focus: () => {}, click: () => {}, setPointerCapture: () => {} };
    return new Proxy(self, { get(to, key) {
        require_(key in to || /^(textContent|onclick|onchange|then)$/.test(String(key)), "asks for " + String(key));
        return key === "textContent" ? to.said : to[key];
    }, set(to, key, value) {
        if (key === "textContent") { to.said = plainText(value); to.children = []; return true; }
        if (/^on(click|change)$/.test(key)) require_(typeof value === "function", key + " is no function");
        else require_(SETTABLE[key] && SETTABLE[key].test(String(value)), key + " is set");
        to[key] = value;
        return true;
    } });
}

const byId = new Map();
const documentOf = { documentElement: element("div"), createElement: element,
    createTextNode: text => ({ text: plainText(text) }), getElementById(id) {
        if (id === "embedded") return null;
        if (!byId.has(id)) byId.set(id, element("div"));
        return byId.get(id);
    } };
const context = vm.createContext({ TextDecoder, DecompressionStream, Blob, Uint8Array, console,
    document: documentOf, window: { addEventListener: () => {}, devicePixelRatio: 1 },
    matchMedia: () => ({ addEventListener: () => {} }), getComputedStyle: () => ({ getPropertyValue: () => "#14171b" }),
    requestAnimationFrame: f => frames.push(f) });
const html = fs.readFileSync(page, "utf8");
const script = html.slice(html.indexOf("<script nonce"), html.lastIndexOf("</script>")).replace(/^<script[^>]*>/, "");
vm.runInContext(script, context);
const p = vm.runInContext("({ page, LIMITS, Dict, Unpickler, openBytes, hoverAt, step, search, goBackTo, " +
    "chooseDevice, zoomAt, moveBy, showHolders, setFilter, recolour, GROUPS })", context);
Object.assign(p.LIMITS, { bytes: 8e6, values: 4e5, stack: 1e5, blocks: 1e5, segments: 2e4, events: 5e4 });
const inherited = vm.runInContext("() => [Object, Array, String, Number, Boolean, Function, Map, Set, Dict]" +
    ".map(of => Reflect.ownKeys(of.prototype).length + ' ' + Reflect.ownKeys(of).length).join()", context);
const own = inherited();

/* No key of a pickle is more than a key. */
const run = p.Unpickler.prototype.run;
p.Unpickler.prototype.run = function () {
    const top = run.call(this), seen = new Set([top]);
    for (const at of seen) {
        if (at instanceof p.Dict) require_(Object.getPrototypeOf(at) === p.Dict.prototype, "a key is a prototype");
        for (const key of Object.keys(at || 0))
            if (typeof at[key] === "object" && at[key] && seen.size < 3000) seen.add(at[key]);
    }
    return top;
};

/* ---- a file in the page, and a user ---- */

function errorSaid() { return byId.get("error").classes.has("hidden") ? "" : byId.get("error").textContent; }

/* What a user may do with a heap. */
function use() {
    const heap = p.page.heap, kinds = Object.keys(p.GROUPS), past = heap.past;
    for (let n = next(4); n >= 0; n--) {
        const kind = pick(kinds);
        p.page.tab = kind === "state" ? "tag" : kind;
        p.page.colour = kind;
        p.page.sort = { key: pick(["label", "used", "share", "requested", "blocks", "free"]), down: next(2) > 0 };
        p.showHolders();
        p.recolour();
        p.hoverAt(next(900), next(400));
        p.zoomAt(next(900), next(400), pick([0.1, 2, 50, 1e6]));
        p.moveBy(next(1000) - 500, next(1000) - 500);
        if (heap.n) p.step(pick([1, -1]));
        if (heap.n) p.search(pick(["0x" + heap.addr[next(heap.n)].toString(16), MARKUP, "0", "99999999999999"]));
        if (heap.n) p.setFilter(next(2) ? { kind, id: p.GROUPS[kind].of(heap)[next(heap.n)], label: MARKUP } : null);
        if (past) p.goBackTo(next(past.n));
        draw();
    }
    if (heap.devices.length > 1) p.chooseDevice(pick(["", String(pick(heap.devices)), MARKUP]));
    draw();
}

function draw() {
    while (frames.length) frames.shift()();
}

/* Opens a file. Returns what is new about it: the words of the error or of the warnings, without numbers. */
async function open(bytes) {
    const before = p.page.heap;
    made = 0;
    await p.openBytes(new Uint8Array(bytes), MARKUP);
    const error = errorSaid(), shown = p.page.heap !== before;
    require_(shown || error.length > 10, "neither a heap nor words");
    require_(error.length < 900, "long words: " + error.slice(0, 200));
    require_(!/The file cannot be read/.test(error), "an error that is not the file's: " + error);
    if (shown) use();
    require_(!/The file cannot be read/.test(errorSaid()), "an error that is not the file's: " + errorSaid());
    require_(inherited() === own, "what objects inherit has changed");
    return (error || p.page.heap.warnings.join()).replace(/[0-9]|"[^"]*"|JSON file: .*/g, "");
}

/* ---- rounds ---- */

function gzip(bytes) {
    const packed = zlib.gzipSync(bytes, { level: 1 });
    return next(2) ? packed : changeBytes(packed, [packed]);
}

/* What is small is soon opened: of a history the first events and the last, of many segments the first. */
function cut(text, events, segments) {
    const dict = JSON.parse(text);
    dict.device_traces = dict.device_traces.map(trace => [...trace.slice(0, events), ...trace.slice(-3)]);
    dict.segments = dict.segments.slice(0, segments);
    return JSON.stringify(dict);
}

function someFile(texts, kept) {
    if (next(2)) {
        const dict = JSON.parse(pick(texts));
        const most = pick([100, 100, 3000]); /* so many times one value: only a pickle can name it often */
        for (let n = next(6); n > 0; n--) change(dict, most);
        return most > 100 || next(2) ? pickled(dict) : Buffer.from(JSON.stringify(dict));
    }
    let bytes = Buffer.from(pick(kept));
    for (let n = next(next(2) ? 3 : 12); n >= 0; n--) bytes = changeBytes(bytes, kept);
    return bytes;
}

async function rounds() {
    const shared = workerData.shared, count = new Int32Array(shared, 0, 2), copy = new Uint8Array(shared, 8);
    const single = !fs.statSync(folder).isDirectory(), until = Date.now() + 1000 * seconds;
    const known = new Set(), say = message => parentPort.postMessage(message);
    if (single) return say({ said: (await open(fs.readFileSync(folder))) || "no words" });
    const names = fs.readdirSync(folder), texts = [], kept = [];
    for (const name of names.filter(name => name.endsWith(".json"))) {
        const text = fs.readFileSync(path.join(folder, name));
        texts.push(cut(text, 300, 60), cut(text, 3, 1), cut(text, 30, 4));
    }
    for (const text of texts) kept.push(pickled(JSON.parse(text)), Buffer.from(text));
    begin(seed);
    while (Date.now() < until) {
        let bytes = someFile(texts, kept).subarray(0, MOST_BYTES);
        if (!next(12)) bytes = gzip(bytes).subarray(0, MOST_BYTES);
        copy.set(bytes);
        count[1] = bytes.length;
        count[0]++;
        const words = await open(bytes);
        if (!known.has(words) && bytes.length < 50000) kept.push(bytes);
        known.add(words);
    }
    return say({ said: "fuzz_viewer: " + count[0] + " files, " + known.size + " kinds of answers" });
}

if (isMainThread) watch();
else rounds().catch(e => parentPort.postMessage({ found: String(e instanceof Finding ? e.message : e.stack) }));
