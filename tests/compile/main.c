/* main.c - the file of a program that holds the implementation: the header before it, the implementation, and both
   again after it. As C and as C++. */

#include "galloc.h"
#include "galloc.h"

#define GALLOC_IMPLEMENTATION
#define GALLOC_LOG(text) ((void)(text))
#include "galloc.h"
#include "galloc.h"

#undef GALLOC_IMPLEMENTATION
#include "galloc.h"

#include <stdio.h>

#include "parts.h"
#include "sim.h"

int main(int argc, char **argv)
{
    sim_options options = sim_defaults();
    int bad = sim_start(&options) != 0;
    bad |= use_from_c() ? 2 : 0;
    bad |= use_per_thread() ? 4 : 0;
    if (argc > 1) bad |= !strcmp(argv[1], "with_cpp") && use_from_cpp && !use_from_cpp() ? 0 : 8;
    bad |= galloc_shutdown() != cudaSuccess ? 16 : 0;
    bad |= sim_findings(SIM_ANY) || sim_leaks(NULL, 0) ? 32 : 0;
    if (bad) printf("parts that failed: %d (%s)\n", bad, galloc_last_message());
    return bad;
}
