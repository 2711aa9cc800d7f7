/* fuzz_conf.c - a fuzzer for galloc_config_parse: whatever the text, it is taken whole or not at all, and the message
   ends inside its buffer. With FUZZ_MAIN defined: a program that runs the files it is given. */

#include "setup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz_conf: %s\n", what);
    abort();
}

static int same_config(const galloc_config *a, const galloc_config *b)
{
    return a->device == b->device && a->expandable_segments == b->expandable_segments && a->reuse == b->reuse &&
           a->memory_limit == b->memory_limit && memcmp(&a->overhead, &b->overhead, sizeof a->overhead) == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char message[256], text[1024];
    if (size < 1 || size >= sizeof text) return 0;
    size_t room = data[0];
    memcpy(text, data + 1, size - 1);
    text[size - 1] = 0;
    memset(message, '#', sizeof message);
    galloc_config config = galloc_config_default(), before = config, again = config;
    cudaError_t err = galloc_config_parse(&config, text, message, room);
    require(message[room] == '#', "the message leaves its buffer");
    require(room == 0 || memchr(message, 0, room) || err == cudaSuccess, "the message does not end");
    require(galloc_config_parse(&again, text, NULL, 0) == err, "the answer depends on the message");
    require(same_config(&config, &again), "the settings depend on the message");
    require(config.device == before.device, "the device is set by text");
    require(config.overhead >= 0 && config.overhead <= 100, "an overhead out of range");
    require(config.reuse >= 0 && config.reuse <= 7 && (config.expandable_segments & ~1) == 0, "out of range");
    if (err == cudaSuccess) return 0;
    require(err == cudaErrorInvalidValue, "another error than invalid value");
    require(room <= 1 || message[0] != 0, "an error without a message");
    require(same_config(&config, &before), "half applied");
    return 0;
}

#ifdef FUZZ_MAIN
#include "fuzz_main.h"
#endif
