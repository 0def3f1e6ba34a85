/* Shared by the drivers: random numbers, exact allocations, comparisons, and a team of threads. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t state = 88172645463325252u;

static uint64_t next(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* A number from 1 to `most`. */
static int64_t draw(int64_t most) { return 1 + (int64_t)(next() % (uint64_t)most); }

/* `count` random floats in an allocation of exactly that size, so that a read beyond it is found. */
static float *floats(int64_t count)
{
    float *made = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++)
        made[i] = (float)(next() % 2001) / 1000.0f - 1.0f;
    return made;
}

static void expect_near(const char *what, double found, double wanted, double tolerance)
{
    if (!(fabs(found - wanted) <= tolerance * (1 + fabs(wanted)))) {
        fprintf(stderr, "%s: got %g, expected %g\n", what, found, wanted);
        exit(1);
    }
}

static inline void expect(const char *what, double found, double wanted) { expect_near(what, found, wanted, 1e-4); }

typedef struct {
    void (*work)(void *);
    void *data;
} task_t;

static void *run_task(void *given)
{
    task_t *task = given;
    task->work(task->data);
    return NULL;
}

/* Stands in for GOMP_parallel, with threads that a sanitizer can watch. */
static void team(void (*work)(void *), void *data, unsigned threads, unsigned flags)
{
    (void)flags;
    pthread_t started[16];
    task_t task = {work, data};
    for (unsigned i = 1; i < threads; i++)
        pthread_create(&started[i], NULL, run_task, &task);
    work(data);
    for (unsigned i = 1; i < threads; i++)
        pthread_join(started[i], NULL);
}
