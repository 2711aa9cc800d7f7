/* content.h - threads that fill blocks, check them and free them, in every way that galloc has.

   Several host threads, each with several streams, allocate blocks of 512 B to 64 MiB at random from one pool that is
   too small for all of them. A kernel fills each block with a pattern made of the block's number; a kernel compares all
   of it before the block is freed, on the same stream or on another, by one thread or by another. Blocks are freed in
   every way that galloc has; streams are held up at random, so that their work overlaps; now and then one is destroyed
   and another created. Two blocks that share memory at the same time, or a page that goes too early, show as wrong
   words. */

#ifndef CONTENT_H
#define CONTENT_H

#include "work.h"

#include <mutex>

static int seconds = 24, thread_count = 4;
static size_t limit = (size_t)4 << 30;
static uint64_t seed;

enum { STREAMS = 3, LARGEST_LOG2 = 26 };

static int streams_each = STREAMS; /* of a thread, 2 at least */
static uint32_t delay_one_in = 8, delay_us = 300; /* how often a stream is held up, how long at most */

typedef struct block {
    void *p;
    size_t bytes;
    uint32_t tag;
    int stream; /* which of the thread's */
} block;

/* A block on its way to another thread; `written` comes after all work on it so far. */
typedef struct parcel {
    block b;
    cudaEvent_t written;
} parcel;

/* ---- a round with one pool --------------------------------------------------------------------------------------- */

typedef struct worker worker;

/* Somebody who looks on: at a block that was just allocated or resized; after work on it was queued on a stream. */
typedef struct onlooker {
    void (*got)(const block *b, cudaStream_t stream);
    void (*used)(const block *b, cudaStream_t stream);
} onlooker;

typedef struct content {
    galloc_pool *pool;
    const onlooker *watch;   /* or NULL */
    int keeps_streams;       /* none is destroyed, and nothing is trimmed */
    void (*spoil)(worker *); /* frees a block in a way that is wrong, now and then; nothing grows; NULL: never */
    std::atomic<uint32_t> next_tag;
    std::atomic<unsigned long long> compared, bytes, refused, handed_over, other_stream, resized, streams, trims;
    std::mutex lock;
    std::vector<parcel> mail;
} content;

struct worker {
    content *c;
    dice d;
    cudaStream_t streams[STREAMS];
    std::vector<block> held;
    size_t held_bytes;
};

static cudaStream_t stream_of(worker *w, const block *b) { return w->streams[b->stream]; }

static void check_on(worker *w, const block *b, cudaStream_t stream)
{
    device_check(stream, b->p, b->bytes, b->tag);
    w->c->compared++;
    w->c->bytes += b->bytes;
    if (w->c->watch) w->c->watch->used(b, stream);
}

/* Holds a stream up now and then, so that the others overtake it. */
static void maybe_delay(worker *w, cudaStream_t stream)
{
    if (roll_below(&w->d, delay_one_in) == 0) device_delay(stream, 20 + roll_below(&w->d, delay_us));
}

static void fill(worker *w, block *b)
{
    b->tag = ++w->c->next_tag;
    maybe_delay(w, stream_of(w, b));
    device_fill(stream_of(w, b), b->p, b->bytes, b->tag);
}

/* ---- freeing ----------------------------------------------------------------------------------------------------- */

static void free_on_its_stream(worker *w, const block *b)
{
    check_on(w, b, stream_of(w, b));
    OK(galloc_free(b->p, stream_of(w, b)));
}

/* Another stream reads the block; then it is freed in one of the ways that allow that. */
static void free_after_other_stream(worker *w, const block *b)
{
    cudaStream_t s = stream_of(w, b), t = w->streams[(b->stream + 1) % streams_each], both[2] = {s, t};
    order(s, t);
    maybe_delay(w, t);
    check_on(w, b, t);
    w->c->other_stream++;
    uint32_t way = roll_below(&w->d, 4);
    if (way == 0) {
        OK(galloc_free(b->p, t));
    } else if (way == 1) {
        OK(galloc_record_stream(b->p, t));
        OK(galloc_free(b->p, s));
    } else if (way == 2) {
        OK(galloc_free_after(b->p, both, 2));
    } else {
        order(t, s);
        OK(galloc_free(b->p, s));
    }
}

static void hand_over(worker *w, const block *b)
{
    parcel out = {*b, NULL};
    OK(cudaEventCreateWithFlags(&out.written, cudaEventDisableTiming));
    OK(cudaEventRecord(out.written, stream_of(w, b)));
    std::lock_guard<std::mutex> guard(w->c->lock);
    w->c->mail.push_back(out);
    w->c->handed_over++;
}

static int receive(worker *w)
{
    parcel in = {};
    {
        std::lock_guard<std::mutex> guard(w->c->lock);
        if (w->c->mail.empty()) return 0;
        in = w->c->mail.back();
        w->c->mail.pop_back();
    }
    in.b.stream = (int)roll_below(&w->d, (uint32_t)streams_each);
    OK(cudaStreamWaitEvent(stream_of(w, &in.b), in.written, 0));
    OK(cudaEventDestroy(in.written));
    free_on_its_stream(w, &in.b);
    return 1;
}

/* One of the blocks that the thread holds, at random. */
static block take_one(worker *w)
{
    size_t i = roll(&w->d) % w->held.size();
    block b = w->held[i];
    w->held[i] = w->held.back();
    w->held.pop_back();
    w->held_bytes -= b.bytes;
    return b;
}

static void free_one(worker *w)
{
    if (w->held.empty()) return;
    block b = take_one(w);
    uint32_t way = roll_below(&w->d, 16);
    if (way == 0) hand_over(w, &b);
    else if (way < 6) free_after_other_stream(w, &b);
    else free_on_its_stream(w, &b);
}

/* ---- allocating -------------------------------------------------------------------------------------------------- */

/* 512 B .. 64 MiB, every power of two as likely as the others. */
static size_t random_bytes(worker *w)
{
    size_t top = (size_t)1 << (10 + roll_below(&w->d, LARGEST_LOG2 - 9));
    return top / 2 + roll(&w->d) % (top / 2 + 1);
}

static void allocate_one(worker *w)
{
    galloc_request request = {};
    block b = {};
    b.bytes = random_bytes(w);
    b.stream = (int)roll_below(&w->d, (uint32_t)streams_each);
    request.bytes = b.bytes;
    request.max_bytes = roll_below(&w->d, 64) || w->c->spoil ? 0 : 2 * b.bytes;
    request.stream = stream_of(w, &b);
    request.pool = w->c->pool;
    request.lifetime = roll_below(&w->d, 8) ? GALLOC_LIFETIME_ANY : GALLOC_LIFETIME_LONG;
    cudaError_t error = galloc_alloc(&b.p, &request);
    if (error == cudaErrorMemoryAllocation) {
        w->c->refused++;
        for (size_t n = w->held.size() / 2 + 1; n > 0; n--) free_one(w);
        return;
    }
    if (!OK(error)) return;
    if (w->c->watch) w->c->watch->got(&b, stream_of(w, &b));
    fill(w, &b);
    w->held.push_back(b);
    w->held_bytes += b.bytes;
}

/* What was written stays when a block changes its size. */
static void resize_one(worker *w)
{
    if (w->held.empty()) return;
    block *b = &w->held[roll(&w->d) % w->held.size()];
    cudaStream_t s = stream_of(w, b);
    size_t bytes = roll_below(&w->d, 2) ? b->bytes / 2 + 1 : b->bytes + b->bytes / 2;
    cudaError_t error = galloc_resize(b->p, bytes, s);
    if (error == cudaErrorNotSupported || error == cudaErrorMemoryAllocation) return;
    if (!OK(error)) return;
    w->held_bytes += bytes - b->bytes;
    if (bytes < b->bytes) b->bytes = bytes;
    check_on(w, b, s);
    b->bytes = bytes;
    if (w->c->watch) w->c->watch->got(b, s);
    fill(w, b);
    w->c->resized++;
}

/* ---- streams, threads -------------------------------------------------------------------------------------------- */

/* The stream's blocks are freed on it; then it is destroyed with its work still running, announced or not. */
static void replace_stream(worker *w)
{
    int gone = (int)roll_below(&w->d, (uint32_t)streams_each);
    std::vector<block> rest;
    for (size_t i = 0; i < w->held.size(); i++) {
        if (w->held[i].stream == gone) {
            free_on_its_stream(w, &w->held[i]);
            w->held_bytes -= w->held[i].bytes;
        } else {
            rest.push_back(w->held[i]);
        }
    }
    w->held = rest;
    if (roll_below(&w->d, 2)) OK(galloc_stream_retire(w->streams[gone]));
    OK(cudaStreamDestroy(w->streams[gone]));
    w->streams[gone] = stream_new();
    w->c->streams++;
}

static void work_on(content *c, uint64_t number, std::chrono::steady_clock::time_point end)
{
    worker w = {c, {seed + 7919 * number}, {}, {}, 0};
    size_t share = limit / (size_t)thread_count;
    OK(cudaSetDevice(0));
    for (int i = 0; i < streams_each; i++) w.streams[i] = stream_new();
    for (uint32_t i = 1; std::chrono::steady_clock::now() < end; i++) {
        if (w.held_bytes < share && roll_below(&w.d, 8)) allocate_one(&w);
        else free_one(&w);
        if (i % 8 == 0) receive(&w);
        if (i % 32 == 0 && !c->spoil) resize_one(&w);
        if (i % 64 == 0 && c->spoil) c->spoil(&w);
        if (i % 512 == 0 && !c->keeps_streams) replace_stream(&w);
        if (i % 2048 == 0 && !c->keeps_streams) {
            OK(galloc_pool_trim(c->pool, limit / 4 * roll_below(&w.d, 4), NULL));
            c->trims++;
        }
        if (i % 4096 == 0) EXPECT_EQ(galloc_pool_check(c->pool), 0);
    }
    while (!w.held.empty()) free_one(&w);
    while (receive(&w)) continue;
    for (int i = 0; i < streams_each; i++) {
        OK(cudaStreamSynchronize(w.streams[i]));
        OK(cudaStreamDestroy(w.streams[i]));
    }
}

#endif
