/* Rows of floats as 8-bit integers: each row relative to its largest magnitude. `eight_bits.py` has the same in
 * torch, which takes several passes over memory. Results are equal bit for bit. The scale of a row that is not
 * finite is not finite, and its integers are 0.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "team.h"

enum { SHARE = 16 }; /* rows that a thread claims at a time */

typedef struct {
    const float *rows; /* [count, columns] */
    int8_t *out;       /* [count, columns] */
    float *scale;      /* [count] */
    int64_t count, columns;
    int64_t next_share; /* index of the next unclaimed share */
} rounding_t;

static void round_row(const float *x, int8_t *out, float *scale, int64_t columns)
{
    int32_t most = 0; /* magnitudes as integers: they have the order of the floats, and NaN is the largest */
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < columns; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float largest;
    memcpy(&largest, &most, sizeof(largest));
    *scale = largest / 127.0f;
    if (!isfinite(largest)) {
        memset(out, 0, (size_t)columns);
        return;
    }
    const float divisor = *scale > 0x1p-126f ? *scale : 0x1p-126f;
#pragma omp simd
    for (int64_t i = 0; i < columns; i++)
        out[i] = (int8_t)(int32_t)rintf(x[i] / divisor);
}

static void work(void *data)
{
    rounding_t *p = data;
    for (;;) {
        int64_t row = SHARE * __atomic_fetch_add(&p->next_share, 1, __ATOMIC_RELAXED);
        if (row >= p->count)
            return;
        const int64_t end = row + SHARE < p->count ? row + SHARE : p->count;
        for (; row < end; row++)
            round_row(p->rows + row * p->columns, p->out + row * p->columns, p->scale + row, p->columns);
    }
}

void skim_round_rows(const float *rows, int8_t *out, float *scale, int64_t count, int64_t columns, team_t team,
                     unsigned threads)
{
    rounding_t p = {rows, out, scale, count, columns, 0};
    run_shared(team, count > SHARE ? threads : 1, work, &p);
}
