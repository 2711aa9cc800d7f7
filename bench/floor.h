/* floor.h - what no caching allocator for a GPU can be faster than, as allocators. */

#ifndef BENCH_FLOOR_H
#define BENCH_FLOOR_H

#include "allocator.h"

extern const allocator allocator_libc; /* malloc and free */

/* The driver's own looks at a stream, without an allocator around them. Settings: LOOKS,LOOKS for what is asked in the
   place of an alloc and of a free; LOOKS is capturing (cuStreamIsCapturing), id (cuStreamGetId), both with '+', or
   nothing. */
extern const allocator allocator_looks;

#endif
