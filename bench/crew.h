/* crew.h - threads that work one at a time, each when it is told to. */

#ifndef BENCH_CREW_H
#define BENCH_CREW_H

#include <stdint.h>

typedef struct crew crew;

/* Starts so many threads. NULL: they cannot be had. */
crew *crew_start(uint32_t threads);

/* Has one of them do the work, and waits until it is done. Returns what `work` returns. */
int crew_do(crew *c, uint32_t thread, int (*work)(void *), void *user);

void crew_end(crew *c); /* may be NULL */

#endif
