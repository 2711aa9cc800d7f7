#define _POSIX_C_SOURCE 200809L
#include "cli.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device.h"

bool cli_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *value)
{
    char *end;
    errno = 0;
    *value = strtoull(text, &end, 10);
    if (*text >= '0' && *text <= '9' && !*end && !errno && *value >= min && *value <= max) return true;
    fprintf(stderr, "%s %s: a whole number from %llu to %llu is needed\n", option, text, (unsigned long long)min,
            (unsigned long long)max);
    return false;
}

bool cli_backend(const char *wanted, char **argv)
{
    char path[PATH_MAX];
    if (!wanted || !strcmp(wanted, device_backend)) return true;
    if (strcmp(wanted, "sim") && strcmp(wanted, "cuda")) {
        fprintf(stderr, "unknown backend \"%s\": sim or cuda\n", wanted);
        return false;
    }
    if (!strcmp(wanted, "sim")) {
        fprintf(stderr, "%s is for the cuda backend: the program without -cuda in its name has the sim\n", argv[0]);
        return false;
    }
    if (snprintf(path, sizeof path, "%s-cuda", argv[0]) < (int)sizeof path) execvp(path, argv);
    fprintf(stderr, "backend cuda is not built in: `make` builds %s-cuda where it finds the CUDA Toolkit's nvcc\n",
            argv[0]);
    return false;
}

void cli_json_text(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') fputc('\\', out);
        if ((unsigned char)*text < ' ') fprintf(out, "\\u%04x", (unsigned char)*text);
        else fputc(*text, out);
    }
    fputc('"', out);
}
