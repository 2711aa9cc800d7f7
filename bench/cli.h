/* cli.h - what the programs here share at their command line. */

#ifndef BENCH_CLI_H
#define BENCH_CLI_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { CLI_USAGE = 2 }; /* exit status: a wrong option, or something that is not built in */

/* A whole number between min and max. False, with a line on stderr that names the option, when the text is none. */
bool cli_number(const char *option, const char *text, uint64_t min, uint64_t max, uint64_t *value);

/* Each backend is a program of its own: PROGRAM for the simulated device, PROGRAM-cuda beside it for a GPU. Goes on in
   the other one if `wanted` is not this one's; NULL: whichever this is. Returns false, with a line on stderr, if that
   cannot be. */
bool cli_backend(const char *wanted, char **argv);

/* Text between quotes. */
void cli_json_text(FILE *out, const char *text);

#endif
