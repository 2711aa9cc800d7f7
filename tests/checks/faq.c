/* faq.c - the example of docs/faq.md, "My program ran out of memory. Why?": 280 MiB are used, stream 3 may have another
   280 MiB of 10 MiB each, work of stream 2 keeps 400 MiB, and 700 MiB are asked for stream 3. Prints the report.
   check_docs.sh compares it with the page; it runs the program with the page's settings and SIM_PACE=still. */

#define GALLOC_IMPLEMENTATION
#include "galloc.h"

#define MIB(n) ((size_t)(n) << 20)
#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        if ((call) != cudaSuccess) return 1;                                                                           \
    } while (0)

int main(void)
{
    static char text[GALLOC_REPORT_TEXT];
    cudaStream_t busy, stream;
    void *live[28], *freed[28], *stranded[40], *p;
    galloc_report report;
    int i;
    MUST(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (i = 0; i < 28; i++) { /* in turn, so that what is freed lies between what stays */
        MUST(galloc_malloc(&live[i], MIB(10), stream));
        MUST(galloc_malloc(&freed[i], MIB(10), stream));
    }
    for (i = 0; i < 40; i++) MUST(galloc_malloc(&stranded[i], MIB(10), busy));
    for (i = 0; i < 28; i++) MUST(galloc_free(freed[i], stream));
    for (i = 0; i < 40; i++) {
        MUST(cudaMemsetAsync(stranded[i], 0, 1, busy));
        MUST(galloc_free(stranded[i], busy));
    }
    if (galloc_malloc(&p, MIB(700), stream) != cudaErrorMemoryAllocation) return 1;
    MUST(galloc_oom_report(&report));
    MUST(galloc_report_text(&report, text, sizeof text));
    fputs(text, stdout);
    for (i = 0; i < 28; i++) MUST(galloc_free(live[i], stream));
    return galloc_shutdown() != cudaSuccess;
}
