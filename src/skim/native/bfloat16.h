/* Floats as sums of bfloat16 numbers, in the layouts of tile registers (AMX).
 *
 * Level 0 of a float is the nearest bfloat16 number, level 1 the nearest to the rest, and so on. Three levels hold
 * all 24 bits. A tile has 16 rows of 16 pairs of numbers; the pairs are neighbours along the axis that is summed over.
 */

#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "exp.h"

enum {
    ROWS = 16,        /* of a tile */
    DEPTH = 32,       /* numbers in a row of a tile */
    TILE_BYTES = 1024,
};

/* The first `most` of 16 floats; the others become 0 and are not read. */
INLINE __m512 some_floats(const float *from, int64_t most)
{
    return _mm512_maskz_loadu_ps((__mmask16)(most >= 16 ? 0xffff : most > 0 ? (1 << most) - 1 : 0), from);
}

/* A row of a tile: 16 floats and the 16 that follow. Levels are TILE_BYTES apart. */
INLINE void put_row(int levels, __m512 first, __m512 second, char *to)
{
    for (int level = 0; level < levels; level++) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        _mm512_store_si512(to + level * TILE_BYTES, both);
        first -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
        second -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
    }
}

/* A row of a tile: pairs of one number of `even` and one of `odd`, none of which is negative. Numbers are cut off,
 * which takes fewer operations, but the last level is rounded. NaN need not stay NaN. */
INLINE void put_pairs(int levels, __m512 even, __m512 odd, char *to)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000), half = _mm512_set1_epi32(0x8000);
    for (int level = 0; level < levels; level++) {
        __m512i one = (__m512i)even, other = (__m512i)odd;
        if (level == levels - 1) {
            one = _mm512_add_epi32(one, half);
            other = _mm512_add_epi32(other, half);
        }
        _mm512_store_si512(to + level * TILE_BYTES,
                           _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(one, 16), other));
        even -= (__m512)_mm512_and_si512(one, high);
        odd -= (__m512)_mm512_and_si512(other, high);
    }
}

/* Transpose 16 rows of 16 numbers of 32 bits. */
INLINE void transpose(__m512i *rows)
{
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            a[i + j] = _mm512_shuffle_i32x4(b[i + j], b[i + j + 4], 0x88);
            a[i + j + 4] = _mm512_shuffle_i32x4(b[i + j], b[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        rows[j] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_i32x4(a[j], a[j + 8], 0xdd);
    }
}

/* True if a number is NaN, infinite, or so large that bfloat16 might round it to infinity. */
INLINE int is_unfit(const float *from, int64_t count)
{
    __m512 sums = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16)
        sums = _mm512_fmadd_ps(some_floats(from + i, count - i) * 2.0f, _mm512_setzero_ps(), sums);
    return _mm512_cmp_ps_mask(sums, sums, _CMP_UNORD_Q) != 0;
}
