// extern_c.cpp - included by a program that puts C headers into extern "C", all of it.

extern "C" {
#define GALLOC_IMPLEMENTATION
#define GALLOC_LOG(text) ((void)(text))
#include "galloc.h"
}

float *allocated;

int main()
{
    return galloc_malloc(&allocated, 1000, 0) != cudaSuccess || galloc_free(allocated, 0) != cudaSuccess;
}
