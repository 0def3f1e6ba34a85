/* Rows of 4-bit codes, unpacked for products with many tokens (`coded_many.c`): 16 rows side by side. */

#pragma once

#include "coded_activations.h"

enum {
    ROWS = 16,  /* lanes of a vector */
    CHUNK = 32, /* runs that are unpacked together */
};

/* A chunk of the columns of ROWS rows. */
typedef struct {
    _Alignas(64) uint8_t codes[CHUNK * WORDS * ROWS * 4]; /* [runs, WORDS, ROWS, 4] */
    float scale[CHUNK * ROWS], offset[CHUNK * ROWS];          /* [groups, ROWS] */
    _Alignas(64) int32_t pairs[CHUNK * ROWS]; /* [runs, ROWS]: both as 16 bits (`coded_one_digit.h`) */
    float unit[ROWS];                         /* of the pairs */
} rows_t;

INLINE int64_t row_within(const coded_t *w, int64_t row) { return row < w->rows ? row : w->rows - 1; }

/* The codes of the rows side by side, a byte each. A word of memory holds columns i to i + 3 of a run, and those 16
 * further on. */
static void unpack_codes(const coded_t *w, int64_t row, int64_t first, int64_t runs, uint8_t *to)
{
    const __m512i low = _mm512_set1_epi8(0x0f);
    const uint8_t *from[ROWS];
    for (int r = 0; r < ROWS; r++)
        from[r] = w->low + (row_within(w, row + r) * w->columns + first * RUN) / 2;
    for (int64_t run = 0; run < runs; run++) {
        __m512i four[4]; /* lane i of vector j: row 4 i + j */
        for (int j = 0; j < 4; j++) {
#define PART(i) _mm_loadu_si128((const __m128i *)(from[4 * (i) + j] + run * (RUN / 2)))
            const __m256i upper = _mm256_inserti128_si256(_mm256_castsi128_si256(PART(2)), PART(3), 1);
            const __m256i lower = _mm256_inserti128_si256(_mm256_castsi128_si256(PART(0)), PART(1), 1);
            four[j] = _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
#undef PART
        }
        const __m512i a = _mm512_unpacklo_epi32(four[0], four[1]), b = _mm512_unpacklo_epi32(four[2], four[3]);
        const __m512i c = _mm512_unpackhi_epi32(four[0], four[1]), d = _mm512_unpackhi_epi32(four[2], four[3]);
        const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                                  _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
        for (int i = 0; i < 4; i++) {
            const __m512i above = _mm512_srli_epi32(words[i], 4);
            _mm512_storeu_si512(to + i * ROWS * 4, _mm512_and_si512(words[i], low));
            _mm512_storeu_si512(to + (i + 4) * ROWS * 4, _mm512_and_si512(above, low));
        }
        to += WORDS * ROWS * 4;
    }
}

/* `runs` runs, starting at number `first`, of ROWS rows starting at `row`. Rows that do not exist are copies of the
 * last one. `first` is a multiple of CHUNK. */
static void unpack_rows(const coded_t *w, int64_t row, int64_t first, int64_t runs, rows_t *to)
{
    const int64_t each = w->group / RUN, groups = (runs + each - 1) / each;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i apart = _mm512_mullo_epi32(lane, _mm512_set1_epi32(CHUNK));
    float scale[ROWS * CHUNK], offset[ROWS * CHUNK];
    unpack_codes(w, row, first, runs, to->codes);
    for (int r = 0; r < ROWS; r++)
        read_groups(w, (row_within(w, row + r) * w->columns + first * RUN) / w->group, groups, scale + r * CHUNK,
                    offset + r * CHUNK);
    for (int64_t group = 0; group < groups; group++) {
        _mm512_storeu_ps(to->scale + group * ROWS, _mm512_i32gather_ps(apart, scale + group, 4));
        _mm512_storeu_ps(to->offset + group * ROWS, _mm512_i32gather_ps(apart, offset + group, 4));
    }
}
