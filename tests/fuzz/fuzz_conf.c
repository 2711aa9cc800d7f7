/* fuzz_conf.c - a fuzzer for galloc_config_parse: whatever the text, it is taken whole or not at all, the message ends
   inside its buffer, and what was taken can be printed and read back. With FUZZ_MAIN defined: a program that runs the
   files it is given. */

#include "setup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(int holds, const char *what)
{
    if (holds) return;
    fprintf(stderr, "fuzz_conf: %s\n", what);
    abort();
}

static int same_config(const galloc_config *a, const galloc_config *b) { return memcmp(a, b, sizeof *a) == 0; }

/* What was accepted is printed, and read back as the same. */
static void require_round_trip(const galloc_config *config)
{
    char text[GALLOC_CONFIG_TEXT], again[GALLOC_CONFIG_TEXT];
    galloc_config back = galloc_config_default();
    require(galloc_config_print(config, text, sizeof text) == cudaSuccess, "settings that cannot be printed");
    require(galloc_config_parse(&back, text, NULL, 0) == cudaSuccess, "a printed text is not understood");
    require(galloc_config_print(&back, again, sizeof again) == cudaSuccess, "what was read back cannot be printed");
    require(strcmp(text, again) == 0, "what is read back is something else");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char message[512], text[1024];
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
    require_round_trip(&config);
    if (err == cudaSuccess) return 0;
    require(err == cudaErrorInvalidValue, "another error than invalid value");
    require(room <= 1 || message[0] != 0, "an error without a message");
    require(same_config(&config, &before), "half applied");
    return 0;
}

#ifdef FUZZ_MAIN
#include "fuzz_main.h"
#endif
