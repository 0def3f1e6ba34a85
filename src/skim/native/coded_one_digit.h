/* Products of 4-bit codes with activations of one digit, for forwards that only rank tokens.
 *
 * Two execution units multiply, and a product of codes keeps both busy for 96 instructions a run. So the work
 * after each run counts: scale and offset take one multiplication here, not two. A sum of products
 * begins with 65536 * SUM_UNITS * x - MIDDLE * x, where x is the sum of the run's integers. So it ends
 * with SUM_UNITS * x in its upper 16 bits, and in its lower ones with the sum of centred codes times
 * integers, which fits. A group's scale and its centred offset are a pair of 16-bit integers too, in units
 * of a row's largest. One instruction multiplies both and adds. A negative lower half borrows 1 from the
 * upper: less than the rounding of the 32 integers.
 *
 * A tile is TILE_ROWS vectors of rows by TILE_TOKENS tokens. A word of activations is loaded once for both
 * vectors.
 */

#pragma once

#include "coded_rows.h"

enum {
    TILE_ROWS = 2,            /* times ROWS rows */
    TILE_TOKENS = TOKENS / 2, /* the registers hold their totals and sums */
};

static const float MOST_16_BITS = 32767.0f; /* two of the largest products fit 32 bits */

/* The factors of sums of activations in SUM_UNITS. */
INLINE __m512 centred_offset(const rows_t *rows, int64_t at)
{
    const __m512 scale = _mm512_loadu_ps(rows->scale + at), offset = _mm512_loadu_ps(rows->offset + at);
    const __m512 centred = _mm512_fmadd_ps(scale, _mm512_set1_ps(MIDDLE), offset);
    return _mm512_mul_ps(centred, _mm512_set1_ps(1.0f / SUM_UNITS));
}

/* The scales and offsets of a chunk's runs as pairs. If one is not finite, the unit of its row is NaN. */
static void pair_scales(rows_t *rows, int64_t runs, int shift)
{
    const int64_t groups = ((runs - 1) >> shift) + 1;
    __m512 most = _mm512_setzero_ps(), bad = most;
    for (int64_t at = 0; at < groups * ROWS; at += ROWS) {
        const __m512 scale = _mm512_loadu_ps(rows->scale + at), offset = centred_offset(rows, at);
        most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(scale), _mm512_abs_ps(offset)));
        bad = _mm512_add_ps(bad, _mm512_add_ps(_mm512_sub_ps(scale, scale), _mm512_sub_ps(offset, offset)));
    }
    const __mmask16 usable = _mm512_cmp_ps_mask(most, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(usable, _mm512_set1_ps(MOST_16_BITS), most);
    _mm512_storeu_ps(rows->unit, _mm512_add_ps(_mm512_div_ps(most, _mm512_set1_ps(MOST_16_BITS)), bad));
    for (int64_t run = 0; run < runs; run++) {
        const int64_t at = (run >> shift) * ROWS;
        const __m512i scale = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(rows->scale + at), inverse));
        const __m512i offset = _mm512_cvtps_epi32(_mm512_mul_ps(centred_offset(rows, at), inverse));
        const __m512i both = _mm512_mask_blend_epi16(0xaaaaaaaa, scale, _mm512_slli_epi32(offset, 16));
        _mm512_store_si512(rows->pairs + run * ROWS, both);
    }
}

/* Add a chunk of a tile's rows by its tokens, in units of its rows. `token` is its first, within a block. */
INLINE void add_tile(const activations_t *p, const rows_t *rows, int64_t first, int64_t runs, int64_t block,
                     int token, __m512 total[TILE_ROWS][TILE_TOKENS])
{
    const int64_t begin = (block * p->runs + first) * TOKENS + token;
    const int32_t *words = (const int32_t *)p->bytes + begin * WORDS, *starts = p->starts + begin;
    const float *steps = p->steps + begin;
    for (int64_t run = 0; run < runs; run++, words += TOKENS * WORDS, starts += TOKENS, steps += TOKENS) {
        __m512i sums[TILE_ROWS][TILE_TOKENS];
        for (int t = 0; t < TILE_TOKENS; t++)
            for (int v = 0; v < TILE_ROWS; v++)
                sums[v][t] = _mm512_set1_epi32(starts[t]);
#pragma GCC unroll 8
        for (int word = 0; word < WORDS; word++) {
            __m512i codes[TILE_ROWS];
            for (int v = 0; v < TILE_ROWS; v++)
                codes[v] = _mm512_load_si512(rows[v].codes + (run * WORDS + word) * ROWS * 4);
#pragma GCC unroll 6
            for (int t = 0; t < TILE_TOKENS; t++) {
                const __m512i four = _mm512_set1_epi32(words[t * WORDS + word]);
                for (int v = 0; v < TILE_ROWS; v++)
                    sums[v][t] = _mm512_dpbusd_epi32(sums[v][t], codes[v], four);
            }
        }
        __m512i pairs[TILE_ROWS];
        for (int v = 0; v < TILE_ROWS; v++)
            pairs[v] = _mm512_load_si512(rows[v].pairs + run * ROWS);
#pragma GCC unroll 6
        for (int t = 0; t < TILE_TOKENS; t++) {
            const __m512 step = _mm512_set1_ps(steps[t]);
            for (int v = 0; v < TILE_ROWS; v++) {
                const __m512 scaled = _mm512_cvtepi32_ps(_mm512_madd_epi16(sums[v][t], pairs[v]));
                total[v][t] = _mm512_fmadd_ps(scaled, step, total[v][t]);
            }
        }
    }
}
