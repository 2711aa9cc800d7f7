/* fuzz_viewer_files.js - what fuzz_viewer.js opens: snapshots changed at random, as values or as bytes. */

"use strict";

/* ---- random numbers, and what is hostile ---- */

let state = 1n;
function begin(seed) { state = BigInt(seed); }
function next(n) {
    state = state * 6364136223846793005n + 1442695040888963407n & 0xffffffffffffffffn;
    return Number(state >> 33n) % n;
}
function pick(list) { return list[next(list.length)]; }
const MARKUP = "</script><img src=x onerror=alert(1)>";
const WORDS = ["__proto__", "constructor", "prototype", "toString", "hasOwnProperty", "length", "then", MARKUP, "", "a",
    "active_allocated", "inactive", "active_pending_free", "segments", "blocks", "galloc", "device_traces", "frames",
    "alloc", "free_requested", "oom", "annotate", "\u2028\u0000\ud83d\ude00", "\ud83d", "x".repeat(70000), "\\u0000",
    "é".repeat(300)];
const NUMBERS = [0, 1, -1, 0.5, 255, 256, 65536, 2 ** 31, 2 ** 32, 2 ** 40, 2 ** 53, 2 ** 53 - 1, 2 ** 53 - 512,
    2 ** 63, 2 ** 64, 1e300, -1e300, 5e-324, 512, 4096, 2 ** 21];
function nested(n) { let v = []; for (let i = 0; i < n; i++) v = next(2) ? [v] : { a: v }; return v; }
function hostile() {
    const kinds = [() => pick(NUMBERS), () => pick(WORDS), () => null, () => true, () => [], () => ({}),
        () => nested(next(300)), () => next(2 ** 20), () => pick(NUMBERS) + next(1024),
        () => new Array(next(2000)).fill(7),
        () => JSON.parse("{\"__proto__\":{\"segments\":[],\"tag\":7},\"constructor\":{\"a\":1}}")];
    return pick(kinds)();
}

/* ---- values: a path is walked at random, and what lies at its end becomes something else ---- */

function change(value, most) {
    let at = value, up = null, key = null;
    for (let depth = next(9); depth >= 0 && typeof at === "object" && at !== null; depth--) {
        const keys = Object.keys(at);
        if (!keys.length) break;
        up = at;
        key = pick(keys);
        at = at[key];
    }
    if (!up) return;
    const list = Array.isArray(up);
    switch (next(7)) {
    case 0: if (list) up.splice(key, 1); else delete up[key]; break;
    case 1: Object.defineProperty(up, list ? next(up.length + 1) : pick(WORDS), { value: at, configurable: true,
        enumerable: true, writable: true }); break;
    case 2: if (list) for (let n = next(most); n > 0; n--) up.push(at); break;
    case 3: if (typeof at === "number") up[key] = at + pick([1, -1, 512, -512, 2 ** 20]); break;
    case 4: if (list) up.splice(key, 0, up[next(up.length)]); break;
    default: up[key] = hostile();
    }
}

/* A pickle of a value, with some numbers as floats. What comes again is named by what is remembered. */
function pickled(value) {
    const parts = [Buffer.from([0x80, 2])];
    const known = new Map();
    let memo = 0;
    const put = (code, bytes, write, n) => {
        const b = Buffer.alloc(1 + bytes);
        b[0] = code;
        if (bytes) b[write](n, 1);
        parts.push(b);
    };
    const number = n => {
        if (!Number.isInteger(n) || Math.abs(n) > 2 ** 62 || !next(50)) return put(0x47, 8, "writeDoubleBE", n);
        if (Math.abs(n) < 2 ** 31) return put(0x4a, 4, "writeInt32LE", n);
        parts.push(Buffer.from([0x8a]));
        return put(8, 8, "writeBigInt64LE", BigInt(n));
    };
    const text = s => {
        const bytes = Buffer.from(s);
        put(0x58, 4, "writeUInt32LE", bytes.length);
        parts.push(bytes);
    };
    const write = v => {
        if (v === null || v === undefined) return put(0x4e, 0);
        if (typeof v === "boolean") return put(v ? 0x88 : 0x89, 0);
        if (typeof v === "number") return number(v);
        if (typeof v === "string") return text(v);
        if (known.has(v)) return put(0x6a, 4, "writeUInt32LE", known.get(v));
        if (memo && !next(200)) return put(0x6a, 4, "writeUInt32LE", next(memo));
        const list = Array.isArray(v);
        put(list ? 0x5d : 0x7d, 0);
        known.set(v, memo);
        put(0x72, 4, "writeUInt32LE", memo++);
        for (const key of Object.keys(v)) {
            if (!list) text(key);
            write(v[key]);
            put(list ? 0x61 : 0x73, 0);
        }
    };
    write(value);
    put(0x2e, 0);
    return Buffer.concat(parts);
}

/* ---- bytes ---- */

const CODES = [0x28, 0x7d, 0x5d, 0x29, 0x73, 0x75, 0x61, 0x65, 0x74, 0x85, 0x86, 0x87, 0x4e, 0x88, 0x4b, 0x4d, 0x4a,
    0x8a, 0x47, 0x58, 0x8c, 0x8d, 0x71, 0x72, 0x94, 0x68, 0x6a, 0x2e, 0x95, 0x63, 0x52, 0x30];
const PIECES = [() => Buffer.alloc(next(3000), 0x5d), () => Buffer.alloc(next(3000), 0x28),
    () => Buffer.alloc(next(3000), 0x29), () => Buffer.from("{\"a\":".repeat(next(500))),
    () => Buffer.from([0x6a, next(256), next(4), 0, 0, 0x61]),
    () => Buffer.from(new Array(3 * next(300)).fill([0x68, next(8), 0x61]).flat()), () => Buffer.from(pick(WORDS)),
    () => Buffer.from([0x8c, 9, ...Buffer.from("__proto__")]), () => Buffer.from("1e999"), () => Buffer.from([0, 0xff]),
    () => Buffer.from(String(pick(NUMBERS))), () => Buffer.from([0x58, 255, 255, 255, next(256)])];

function changeBytes(bytes, others) {
    const at = next(bytes.length + 1), n = next(next(2) ? 9 : 2000), put = (part, cut) =>
        Buffer.concat([bytes.subarray(0, at), part, bytes.subarray(at + (cut || 0))]);
    switch (next(9)) {
    case 0: if (at < bytes.length) bytes[at] ^= 1 << next(8); return bytes;
    case 1: if (at < bytes.length) bytes[at] = next(256); return bytes;
    case 2: if (at < bytes.length) bytes[at] = pick(CODES); return bytes;
    case 3: return next(8) ? bytes : bytes.subarray(0, at);
    case 4: return put(Buffer.alloc(0), n);
    case 5: { const from = next(bytes.length + 1); return put(bytes.subarray(from, from + n), next(2) * n); }
    case 6: { const other = pick(others), from = next(other.length); return put(other.subarray(from, from + n), n); }
    case 7: { const b = Buffer.alloc(4); b.writeUInt32LE(pick([0, 1, 255, 65536, 2 ** 31, 2 ** 32 - 1, next(1000)]));
        return put(b, 4); }
    default: return put(pick(PIECES)(), next(2) * n);
    }
}

module.exports = { begin, next, pick, change, pickled, changeBytes, MARKUP };
