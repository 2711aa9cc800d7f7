/* header.c - the header alone, as the first thing in a file. */

#include "galloc.h"

extern int nothing_is_used;
int nothing_is_used;
