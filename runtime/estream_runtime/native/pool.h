// Threads that carry out the numbered tasks of one call together with the caller.
//
// A pool serves one caller at a time. Between calls its threads wait: awake for up to half a millisecond, since the
// next call often follows at once, then asleep. A process that was forked off has none of them and goes without.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include "rows.h"

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

enum { SPINS = 10000 };

// Carries out task `number` of a call in one of the pool's threads.
typedef void task_function(const void *call, int64_t number, int thread);

typedef struct {
    int threads;
    size_t scratch_bytes;
    char *scratch;   // see scratch_of
    void *workspace; // what a call keeps between its steps, grown as needed
    size_t workspace_bytes;
    pthread_t *workers;
    int started;
    pid_t owner; // the process that they run in
    pthread_mutex_t guard;
    pthread_cond_t wake;
    atomic_uint round; // counts calls
    atomic_int sleeping, busy, ending;
    task_function *function;
    const void *call;
    int64_t count;
    atomic_llong next;
} pool;

typedef struct {
    pool *of;
    int thread;
} worker;

// Memory of one thread's own, of the size that the pool was opened with.
static void *scratch_of(const pool *p, int thread) { return p->scratch + p->scratch_bytes * (size_t)thread; }

// Passes the time until others have done something, which takes little time unless they do not run.
INLINE void wait_a_little(int *spin) {
    if (*spin == SPINS) {
        sched_yield();
        return;
    }
    PAUSE();
    ++*spin;
}

static void take_tasks(pool *p, int thread) {
    for (int64_t task; (task = atomic_fetch_add(&p->next, 1)) < p->count;) p->function(p->call, task, thread);
}

static void *work(void *argument) {
    worker me = *(worker *)argument;
    free(argument);
    pool *p = me.of;
    unsigned seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS && atomic_load(&p->round) == seen; spin++) PAUSE();
        if (atomic_load(&p->round) == seen) {
            pthread_mutex_lock(&p->guard);
            atomic_fetch_add(&p->sleeping, 1);
            while (atomic_load(&p->round) == seen) pthread_cond_wait(&p->wake, &p->guard);
            atomic_fetch_sub(&p->sleeping, 1);
            pthread_mutex_unlock(&p->guard);
        }
        seen++;
        if (atomic_load(&p->ending)) return NULL;
        take_tasks(p, me.thread);
        atomic_fetch_sub(&p->busy, 1);
    }
}

static void next_round(pool *p) {
    atomic_fetch_add(&p->round, 1);
    if (atomic_load(&p->sleeping)) {
        pthread_mutex_lock(&p->guard);
        pthread_cond_broadcast(&p->wake);
        pthread_mutex_unlock(&p->guard);
    }
}

// Carries out tasks 0 to count - 1, each once, and returns when all are done.
static void run_tasks(pool *p, task_function *function, const void *call, int64_t count) {
    p->function = function;
    p->call = call;
    p->count = count;
    atomic_store(&p->next, 0);
    int together = count > 1 && p->started && getpid() == p->owner;
    if (together) {
        atomic_store(&p->busy, p->started);
        next_round(p);
    }
    take_tasks(p, 0);
    for (int spin = 0; together && atomic_load(&p->busy);) wait_a_little(&spin);
}

static void close_pool(pool *p) {
    if (!p) return;
    if (getpid() == p->owner) {
        atomic_store(&p->ending, 1);
        next_round(p);
        for (int each = 0; each < p->started; each++) pthread_join(p->workers[each], NULL);
        pthread_cond_destroy(&p->wake);
        pthread_mutex_destroy(&p->guard);
    }
    free(p->workers);
    free(p->scratch);
    free(p->workspace);
    free(p);
}

// NULL where there is no memory. Threads that the system does not grant are done without.
static pool *open_pool(int threads, size_t scratch_bytes) {
    pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->threads = threads;
    p->owner = getpid();
    p->scratch_bytes = (scratch_bytes + 63) / 64 * 64;
    pthread_mutex_init(&p->guard, NULL);
    pthread_cond_init(&p->wake, NULL);
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    if (!p->workers || posix_memalign((void **)&p->scratch, 64, p->scratch_bytes * (size_t)threads)) {
        p->scratch = NULL;
        close_pool(p);
        return NULL;
    }
    while (p->started < threads - 1) {
        worker *next = malloc(sizeof *next);
        if (!next) break;
        *next = (worker){p, p->started + 1};
        if (pthread_create(&p->workers[p->started], NULL, work, next)) {
            free(next);
            break;
        }
        p->started++;
    }
    return p;
}

// Memory of at least so many bytes, the same until more is asked for; NULL where there is none.
static void *workspace(pool *p, size_t bytes) {
    if (bytes > p->workspace_bytes) {
        free(p->workspace);
        p->workspace_bytes = 0;
        if (posix_memalign(&p->workspace, 64, bytes))
            p->workspace = NULL;
        else
            p->workspace_bytes = bytes;
    }
    return p->workspace_bytes >= bytes ? p->workspace : NULL;
}
