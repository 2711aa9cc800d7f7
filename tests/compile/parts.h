/* parts.h - the other translation units of the program that main.c starts. Each returns 0 when all went well. */

#ifndef PARTS_H
#define PARTS_H

#ifdef __cplusplus
extern "C" {
#endif

int use_from_c(void);
int use_from_cpp(void) __attribute__((weak)); /* NULL where that file is left out */
int use_per_thread(void);

/* Of two_heaps.c. */
int another_heap_malloc(void **ptr);
int another_heap_end(void *ptr);

#ifdef __cplusplus
}
#endif

#endif
