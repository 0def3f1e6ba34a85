/* Attention of prefill chunks: the parts that the kernels over bfloat16 numbers share. */

#pragma once

#include "bfloat16.h"
#include "prefill.h"

/* Space of a thread, a piece at a time. */
INLINE void *take(uintptr_t *from, int64_t bytes)
{
    void *taken = (void *)*from;
    *from += (uintptr_t)bytes;
    return taken;
}

/* Find the keys and values of a tile's rows. Keys begin at slot `begin`; rows before it, and those from slot `end`, are
 * NULL. */
static void next_rows(const prefill_t *p, int64_t kv_head, cursor_t *at, int64_t begin, int64_t end,
                      const float **keys, const float **values)
{
    const int64_t row = begin % TILE, count = tile_end(begin, end) - begin;
    memset(keys, 0, TILE * sizeof *keys);
    memset(values, 0, TILE * sizeof *values);
    locate(p, kv_head, at, count, keys + row, values + row);
    fetch(p, keys + row, values + row, count);
}

/* Write the results. The panel's sums are [value_dim rounded up to a multiple of ROWS, WIDTH]. */
static void end_panel(const prefill_t *p, const panel_t *panel)
{
    for (int i = 0; i < panel->vectors; i++) {
        vec factors = {0};
        for (int lane = 0; lane < LANES; lane++)
            factors[lane] = factor_of(p, panel, i * LANES + lane);
        for (int64_t column = 0; column < p->value_dim; column += ROWS) {
            __m512i rows[ROWS];
            for (int row = 0; row < ROWS; row++)
                rows[row] = (__m512i)(*(const vec *)(panel->out + (column + row) * WIDTH + i * LANES) * factors);
            transpose(rows);
            const __mmask16 some = p->value_dim - column >= ROWS ? 0xffff : (1 << (p->value_dim - column)) - 1;
            for (int lane = 0; lane < LANES && i * LANES + lane < panel->lanes; lane++)
                _mm512_mask_storeu_ps(out_of(p, panel, i * LANES + lane) + column, some, (__m512)rows[lane]);
        }
    }
}
