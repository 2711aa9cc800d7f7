#define _POSIX_C_SOURCE 200809L
#include "crew.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

typedef struct member {
    crew *of;
    pthread_t thread;
    pthread_cond_t called;
    bool due;
} member;

struct crew {
    pthread_mutex_t lock; /* guards all of it */
    pthread_cond_t done;
    bool is_done, ends;
    int (*work)(void *);
    void *user;
    int result;
    uint32_t n; /* that have been started */
    member members[];
};

static void *serve(void *user)
{
    member *m = user;
    crew *c = m->of;
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (!m->due && !c->ends) pthread_cond_wait(&m->called, &c->lock);
        if (c->ends) break;
        m->due = false;
        c->result = c->work(c->user);
        c->is_done = true;
        pthread_cond_signal(&c->done);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

crew *crew_start(uint32_t threads)
{
    crew *c = calloc(1, sizeof *c + threads * sizeof *c->members);
    if (!c) return NULL;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->done, NULL);
    while (c->n < threads) {
        member *m = &c->members[c->n];
        m->of = c;
        pthread_cond_init(&m->called, NULL);
        if (pthread_create(&m->thread, NULL, serve, m)) break;
        c->n++;
    }
    if (c->n == threads) return c;
    crew_end(c);
    return NULL;
}

int crew_do(crew *c, uint32_t thread, int (*work)(void *), void *user)
{
    pthread_mutex_lock(&c->lock);
    c->work = work;
    c->user = user;
    c->is_done = false;
    c->members[thread].due = true;
    pthread_cond_signal(&c->members[thread].called);
    while (!c->is_done) pthread_cond_wait(&c->done, &c->lock);
    pthread_mutex_unlock(&c->lock);
    return c->result;
}

void crew_end(crew *c)
{
    if (!c) return;
    pthread_mutex_lock(&c->lock);
    c->ends = true;
    for (uint32_t i = 0; i < c->n; i++) pthread_cond_signal(&c->members[i].called);
    pthread_mutex_unlock(&c->lock);
    for (uint32_t i = 0; i < c->n; i++) pthread_join(c->members[i].thread, NULL);
    free(c);
}
