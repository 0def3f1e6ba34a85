/* The team of threads that kernels share with torch.
 *
 * Kernels link no OpenMP runtime: the caller passes `GOMP_parallel` of the runtime that torch uses, because two
 * teams of threads on the same cores slow each other down.
 */

#pragma once

typedef void (*team_t)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Run `work` on all threads. With one thread, call it. */
static inline void run_shared(team_t team, unsigned threads, void (*work)(void *), void *data)
{
    if (threads > 1)
        team(work, data, threads, 0);
    else
        work(data);
}
