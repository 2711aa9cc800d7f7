/* older.c - a program built with an older toolkit than the runtime that it meets. The driver's functions have the form
   that this toolkit knows, or its captures read as nothing, or crash. */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#include "sim.h"

#include <stdio.h>

static int failures;

static void expect(int holds, const char *text)
{
    if (!holds) printf("%s\n", text);
    failures += !holds;
}

int main(void)
{
    cudaStream_t s = NULL;
    cudaGraph_t graph = NULL;
    void *p = NULL, *q = NULL;
    expect(!cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
    expect(!galloc_malloc(&p, (size_t)1 << 20, s) && !galloc_free(p, s), "outside a capture");
    expect(!cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal), "capture");
    expect(!galloc_malloc(&p, (size_t)1 << 20, s), "first block of the capture");
    expect(!cudaMemsetAsync(p, 0, 100, s) && !galloc_free(p, s), "its free");
    expect(!galloc_malloc(&q, (size_t)1 << 20, s) && q == p, "the stream goes on");
    expect(!galloc_free(q, s), "second free");
    expect(!cudaStreamUpdateCaptureDependencies(s, NULL, 0, cudaStreamSetCaptureDependencies), "another branch");
    expect(!galloc_malloc(&q, (size_t)1 << 20, s) && q != p, "its memory is its own");
    expect(!cudaMemsetAsync(q, 0, 100, s) && !galloc_free(q, s), "third free");
    expect(!cudaStreamEndCapture(s, &graph) && !cudaGraphDestroy(graph), "end of the capture");
    expect(!cudaStreamDestroy(s) && !galloc_shutdown(), "end");
    return failures;
}
