/* The one file of the program that contains galloc's implementation. */
#define GALLOC_IMPLEMENTATION
#include "galloc.h"
