/* override.h - the other files of the program that override.c starts. */

#ifndef OVERRIDE_H
#define OVERRIDE_H

#include <stddef.h>
#include <stdio.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

cudaError_t plain_malloc(void **ptr, size_t bytes);
cudaError_t plain_malloc_async(void **ptr, size_t bytes);
cudaError_t override_use_malloc(void **ptr, size_t bytes);
cudaError_t override_use_free(void *ptr);
int override_use_per_thread(void);
int override_use_typed(void) __attribute__((weak)); /* NULL where the file of C++ is left out */

#ifdef __cplusplus
}
#endif

#endif
