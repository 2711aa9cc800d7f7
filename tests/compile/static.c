/* static.c - everything static and nothing used: silent. */

#define GALLOC_STATIC
#define GALLOC_IMPLEMENTATION
#include "galloc.h"

extern int nothing_is_used;
int nothing_is_used;
