/* Products of codes with activations in digits, by instructions that multiply 8-bit integers (AVX-512 VNNI).
 *
 * Float products decode each code to a float and are bound by that, not by memory. Here the activations of a run of
 * 32 columns become integers of 24 bits, relative to the largest of the run, and these become three digits of 8
 * bits: the products of codes and digits are exact integers. What is lost is a rounding to 24 bits, as in float32.
 *
 * Codes are read in blocks of 64 bytes. A vector lane sums four neighbouring bytes, so all codes of a lane belong
 * to one run.
 */

#pragma once

#include "coded.h"

#include <stdlib.h>

enum {
    BLOCK = 64,        /* bytes of codes in a vector */
    DIGITS = 3,
    DIGIT_ROWS = 4,    /* weight rows in a tile */
    DIGIT_TOKENS = 4,  /* tokens in a tile */
    PREFETCH = 16384,  /* bytes ahead, into the second cache: the first could not hold enough reads */
};

static const float LARGEST = 8.3e6f; /* of an integer: 3 digits hold it, and sums with 6-bit codes fit 32 bits */

/* One token. With codes below 8 bits a block has two halves: columns 0 to 15 of its four runs, and 16 to 31. */
typedef struct {
    int8_t *digits; /* [blocks, DIGITS, halves, BLOCK], most significant digit first */
    float *steps;   /* [blocks, 16]: the unit of each lane */
    float *sums;    /* [groups]: the sum of the activations */
    int fits; /* 0: values are not finite, or too large */
} digits_t;

INLINE int64_t block_columns(int bits) { return bits == 8 ? BLOCK : 2 * BLOCK; }

/* Write 16 columns as digits; return the sum of their integers. Digits are `apart` bytes from each other. */
INLINE int32_t write_digits(__m512 x, float inverse, int8_t *to, int64_t apart)
{
    const __m512i half = _mm512_set1_epi32(128);
    const __m512i all = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
    __m512i rest = all;
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        _mm_storeu_si128((__m128i *)(to + digit * apart), _mm512_cvtepi32_epi8(rest));
        rest = _mm512_srai_epi32(_mm512_add_epi32(rest, half), 8);
    }
    return _mm512_reduce_add_epi32(all);
}

static void prepare_digits(const float *x, const coded_t *w, digits_t *to)
{
    const int whole = w->bits == 8;
    const int64_t runs = w->columns / RUN, each = block_columns(w->bits) / RUN;
    const int64_t apart = whole ? BLOCK : 2 * BLOCK;
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    to->fits = 1;
    memset(to->sums, 0, (size_t)(w->columns / w->group) * sizeof(float));
    for (int64_t run = 0; run < runs; run++) {
        const __m512 one = _mm512_loadu_ps(x + run * RUN), other = _mm512_loadu_ps(x + run * RUN + 16);
        const __m512i both = _mm512_max_epu32(_mm512_and_epi32(_mm512_castps_si512(one), magnitude),
                                              _mm512_and_epi32(_mm512_castps_si512(other), magnitude));
        const float most = float_of_bits(_mm512_reduce_max_epu32(both)); /* as integers: so NaN is the largest */
        if (!(most <= 1e30f)) /* also where sums of digits could overflow */
            to->fits = 0;
        const int usable = to->fits && most > 1e-30f;
        const float inverse = usable ? LARGEST / most : 0.0f, step = usable ? most / LARGEST : 0.0f;
        const int64_t block = run / each, within = run % each;
        int8_t *at = to->digits + block * DIGITS * apart + within * (whole ? RUN : RUN / 2);
        const __m512 left = usable ? one : _mm512_setzero_ps(), right = usable ? other : _mm512_setzero_ps();
        const float first = (float)write_digits(left, inverse, at, apart) * step;
        const float second = (float)write_digits(right, inverse, at + (whole ? 16 : BLOCK), apart) * step;
        to->sums[run * RUN / w->group] += first;
        to->sums[(run * RUN + 16) / w->group] += second;
        for (int64_t lane = within * 16 / each; lane < (within + 1) * 16 / each; lane++)
            to->steps[block * 16 + lane] = step;
    }
}

/* A block's codes as bytes: columns 0 to 15 of the runs in out[0], 16 to 31 in out[1]; 8 bits: all in out[0]. */
INLINE void codes_of_block(const uint8_t *low, const uint8_t *high, __mmask64 there, int bits, __m512i *out)
{
    const __m512i all = _mm512_maskz_loadu_epi8(there, low), four = _mm512_set1_epi8(15);
    out[0] = all;
    if (bits == 8)
        return;
    out[0] = _mm512_and_si512(all, four);
    out[1] = _mm512_and_si512(_mm512_srli_epi16(all, 4), four);
    if (bits == 5) {
        /* 16 bits of each run's 32 belong to its first half */
        const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        const __m128i words = _mm_shuffle_epi8(_mm_maskz_loadu_epi32((__mmask8)_pext_u64(there, 0x1000100010001), high), order);
        const __m512i bit = _mm512_set1_epi8(16);
        out[0] = _mm512_or_si512(out[0], _mm512_maskz_mov_epi8((__mmask64)_mm_cvtsi128_si64(words), bit));
        out[1] = _mm512_or_si512(out[1], _mm512_maskz_mov_epi8((__mmask64)_mm_extract_epi64(words, 1), bit));
    } else if (bits == 6) {
        /* a run's 8 bytes twice, shifted so that the two bits of a column are bits 4 and 5 */
        const __m256i bytes = _mm256_maskz_loadu_epi64((__mmask8)_pext_u64(there, 0x1000100010001), high);
        const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_castsi256_si512(bytes));
        const __m512i two = _mm512_set1_epi8(0x30);
        const __m512i first = _mm512_rolv_epi64(twice, _mm512_setr_epi64(4, 2, 4, 2, 4, 2, 4, 2));
        const __m512i second = _mm512_rorv_epi64(twice, _mm512_setr_epi64(0, 2, 0, 2, 0, 2, 0, 2));
        out[0] = _mm512_or_si512(out[0], _mm512_and_si512(first, two));
        out[1] = _mm512_or_si512(out[1], _mm512_and_si512(second, two));
    }
}

/* Sums of codes times integers, for each lane. `both`: the two halves share their scales. Rows take turns: the
 * products of one row wait for each other. */
INLINE void digit_products(__m512i codes[][2], int rows, const int8_t *digits, int bits, int both, __m512 out[][2])
{
    const int halves = bits == 8 ? 1 : 2, parts = bits == 8 || both ? 1 : 2;
    __m512i sums[DIGIT_ROWS][2], lower[DIGIT_ROWS];
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = lower[r] = _mm512_setzero_si512();
    for (int i = 0; i < DIGITS; i++)
        for (int half = 0; half < halves; half++) {
            const __m512i digit = _mm512_loadu_si512(digits + (i * halves + half) * BLOCK);
            const int to = parts == 1 ? 0 : half, shifted = i > 0 && (half == 0 || parts == 2);
            for (int r = 0; r < rows; r++)
                if (bits == 8 && i == DIGITS - 1) /* sums with all three digits would not fit */
                    lower[r] = _mm512_dpbusd_epi32(lower[r], codes[r][half], digit);
                else
                    sums[r][to] = _mm512_dpbusd_epi32(shifted ? _mm512_slli_epi32(sums[r][to], 8) : sums[r][to],
                                                      codes[r][half], digit);
        }
    for (int part = 0; part < parts; part++)
        for (int r = 0; r < rows; r++) {
            out[r][part] = _mm512_cvtepi32_ps(sums[r][part]);
            if (bits == 8)
                out[r][part] = _mm512_fmadd_ps(out[r][part], _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(lower[r]));
        }
}

/* The sum of each of four vectors. */
INLINE __m128 four_sums(const __m512 *all)
{
    __m128 four[4];
    for (int i = 0; i < 4; i++) {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all[i]), _mm512_extractf32x8_ps(all[i], 1));
        four[i] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    }
    return _mm_hadd_ps(_mm_hadd_ps(four[0], four[1]), _mm_hadd_ps(four[2], four[3]));
}

/* A tile of `rows` rows starting at `row`, by `tokens` tokens. out: [token][row] of the whole product. */
INLINE void digit_tile(const coded_t *w, int64_t row, int rows, const float *scale, const float *offset,
                       const digits_t *given, int tokens, const float *bias, float *out, int bits, int fine)
{
    const int64_t columns = w->columns, groups = columns / w->group, wide = low_bytes(w);
    const int64_t apart = high_bytes(columns, bits), each = block_columns(bits);
    const int64_t blocks = (columns + each - 1) / each;
    const int halves = bits == 8 ? 1 : 2, both = bits != 6 && !fine;
    const int parts = bits == 8 || both ? 1 : 2; /* sums of a block with scales of their own */
    const int shift = __builtin_ctz((unsigned)w->group);
    const int64_t size = halves * DIGITS * BLOCK;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i index[2]; /* the group of each lane, counted from the block's first */
    if (bits == 8)
        index[0] = fine ? _mm512_srli_epi32(lane, 2) : _mm512_srlv_epi32(lane, _mm512_set1_epi32(w->group == 32 ? 3 : 4));
    else if (fine) {
        index[0] = _mm512_slli_epi32(_mm512_srli_epi32(lane, 2), 1);
        index[1] = _mm512_add_epi32(index[0], _mm512_set1_epi32(1));
    } else
        index[0] = index[1] = _mm512_srlv_epi32(lane, _mm512_set1_epi32(w->group == 32 ? 2 : w->group == 64 ? 3 : 4));
    __m512 sums[DIGIT_ROWS][DIGIT_TOKENS];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++)
            sums[r][t] = _mm512_setzero_ps();
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t left = wide - block * BLOCK, group = block * each >> shift;
        const __mmask64 there = left >= BLOCK ? ~(__mmask64)0 : ((__mmask64)1 << left) - 1;
        const __mmask8 some = groups - group >= 8 ? 0xff : (__mmask8)((1u << (groups - group)) - 1);
        __m512i codes[DIGIT_ROWS][2];
        __m512 scales[DIGIT_ROWS][2];
        for (int r = 0; r < rows; r++) {
            const uint8_t *low = w->low + (row + r) * wide + block * BLOCK;
            __builtin_prefetch(low + PREFETCH, 0, 2);
            codes_of_block(low, w->high + (row + r) * apart + block * high_bytes(2 * BLOCK, bits), there, bits, codes[r]);
            const __m512 own = _mm512_castps256_ps512(_mm256_maskz_loadu_ps(some, scale + r * groups + group));
            for (int i = 0; i < parts; i++)
                scales[r][i] = _mm512_permutexvar_ps(index[i], own);
        }
        for (int t = 0; t < tokens; t++) {
            const __m512 step = _mm512_loadu_ps(given[t].steps + block * 16);
            __m512 products[DIGIT_ROWS][2];
            digit_products(codes, rows, given[t].digits + block * size, bits, both, products);
            for (int i = 0; i < parts; i++)
                for (int r = 0; r < rows; r++)
                    sums[r][t] = _mm512_fmadd_ps(_mm512_mul_ps(products[r][i], step), scales[r][i], sums[r][t]);
        }
    }
    for (int t = 0; t < tokens; t++) {
        __m512 totals[DIGIT_ROWS];
        for (int r = 0; r < DIGIT_ROWS; r++)
            totals[r] = r < rows ? sums[r][t] : _mm512_setzero_ps();
        for (int64_t group = 0; group < groups; group += 16) {
            const __mmask16 some = groups - group >= 16 ? 0xffff : (__mmask16)((1u << (groups - group)) - 1);
            const __m512 given_sums = _mm512_maskz_loadu_ps(some, given[t].sums + group);
            for (int r = 0; r < rows; r++)
                totals[r] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, offset + r * groups + group), given_sums, totals[r]);
        }
        const __mmask8 there = (__mmask8)((1u << rows) - 1);
        const __m128 own = bias ? _mm_maskz_loadu_ps(there, bias + row) : _mm_setzero_ps();
        _mm_mask_storeu_ps(out + t * w->rows + row, there, _mm_add_ps(four_sums(totals), own));
    }
}

INLINE void digit_rows(const coded_t *w, int64_t row, int64_t count, const affine_t *affine, const digits_t *given,
                       int64_t tokens, const float *bias, float *out, int bits, int fine)
{
    const int64_t groups = w->columns / w->group;
#define TILE(r, n) digit_tile(w, row + i, r, scale, offset, given + t, n, bias, out + t * w->rows, bits, fine)
    for (int64_t i = 0; i < count;) {
        const float *scale = affine->scale + i * groups, *offset = affine->offset + i * groups;
        int64_t t = 0;
        if (count - i < DIGIT_ROWS) {
            for (; t < tokens; t++)
                TILE(1, 1);
            i++;
            continue;
        }
        for (; t + DIGIT_TOKENS <= tokens; t += DIGIT_TOKENS)
            TILE(DIGIT_ROWS, DIGIT_TOKENS);
        if (t + 2 <= tokens) {
            TILE(DIGIT_ROWS, 2);
            t += 2;
        }
        if (t < tokens)
            TILE(DIGIT_ROWS, 1);
        i += DIGIT_ROWS;
    }
#undef TILE
}

/* Allocates all tokens' digits in one piece, which the caller frees; NULL if there is no memory. */
static void *digits_of(const float *x, const coded_t *w, int64_t tokens, digits_t *to)
{
    const int64_t blocks = (w->columns + block_columns(w->bits) - 1) / block_columns(w->bits);
    const int64_t halves = w->bits == 8 ? 1 : 2, groups = w->columns / w->group;
    const int64_t digits = blocks * DIGITS * halves * BLOCK, steps = blocks * 16 * (int64_t)sizeof(float);
    const int64_t each = digits + steps + (groups + 15) / 16 * 16 * (int64_t)sizeof(float);
    uint8_t *memory = aligned_alloc(64, (size_t)(tokens * each));
    if (!memory)
        return NULL;
    for (int64_t t = 0; t < tokens; t++) {
        uint8_t *own = memory + t * each;
        to[t] = (digits_t){(int8_t *)own, (float *)(own + digits), (float *)(own + digits + steps), 0};
        if (w->columns % block_columns(w->bits))
            memset(own + (blocks - 1) * DIGITS * halves * BLOCK, 0, (size_t)(DIGITS * halves * BLOCK));
        memset(to[t].steps, 0, (size_t)steps);
        prepare_digits(x + t * w->columns, w, &to[t]);
    }
    return memory;
}
