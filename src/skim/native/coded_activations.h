/* Activations of many tokens as integers, in the order in which `coded_many.c` multiplies them.
 *
 * The activations of a run of 32 columns become integers relative to the largest of the run. An integer has one
 * digit of 8 bits or three, the most significant first.
 */

#pragma once

#include "coded.h"

enum {
    MIDDLE = 8,      /* of 4-bit codes */
    SUM_UNITS = 8,   /* of 1 in the upper half of a start: as many as 16 bits hold */
    WORDS = RUN / 4, /* words of 4 columns in a run */
    TOKENS = 12,     /* of a block: the registers hold their totals and sums */
};

typedef struct {
    const float *given; /* [tokens, columns] */
    int64_t tokens, runs;
    int digits;      /* 1 or 3 */
    uint8_t *bytes;  /* [blocks, runs, digits, TOKENS, RUN] */
    float *steps;    /* [blocks, runs, TOKENS]: the unit of the integers */
    float *sums;     /* three digits, the same: the sum of the activations */
    int32_t *starts; /* one digit, the same: initial values of sums of products (`coded_one_digit.h`) */
    int64_t next_block;
    int misfit; /* set if values are not finite, or too large */
} activations_t;

/* The largest integer: its digits hold it, and a run of them times codes fits 32 bits. */
INLINE float largest(int digits) { return digits == 1 ? 127.0f : 4.4e6f; }

/* Each lane of the result is the sum of one vector; with `most`, the largest of its numbers without sign. */
INLINE __m512i reduce_each(const __m512i *x, int most)
{
#define BOTH(a, b) (most ? _mm512_max_epu32(a, b) : _mm512_add_epi32(a, b))
    __m512i pairs[8], fours[4], halves[2];
    for (int i = 0; i < 8; i++)
        pairs[i] = BOTH(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        fours[i] = BOTH(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                        _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        halves[i] = BOTH(_mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                         _mm512_shuffle_i32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return BOTH(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88), _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd));
#undef BOTH
}

INLINE void store_bytes(__m512i one, __m512i other, uint8_t *to)
{
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(one));
    _mm_storeu_si128((__m128i *)(to + 16), _mm512_cvtepi32_epi8(other));
}

/* The digits of a token's run. `to` is the block's run. */
INLINE void store_digits(__m512i one, __m512i other, int64_t within, int digits, uint8_t *to)
{
    const __m512i half = _mm512_set1_epi32(128);
    for (int digit = digits - 1; digit >= 0; digit--) {
        store_bytes(one, other, to + (digit * TOKENS + within) * RUN);
        one = _mm512_srai_epi32(_mm512_add_epi32(one, half), 8);
        other = _mm512_srai_epi32(_mm512_add_epi32(other, half), 8);
    }
}

/* `count` runs of a token, at most 16, starting at run number `first`. */
INLINE void prepare_runs(activations_t *p, int64_t token, int64_t first, int count, int digits)
{
    const int64_t within = token % TOKENS, at = token / TOKENS * p->runs + first;
    const int64_t size = digits * TOKENS * RUN;
    const float *x = p->given + (token * p->runs + first) * RUN;
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    __m512i each[16];
    float inverses[16], steps[16], sums[16];
    int32_t starts[16];
    for (int i = 0; i < 16; i++)
        each[i] = _mm512_setzero_si512();
    for (int i = 0; i < count; i++)
        each[i] = _mm512_max_epu32(_mm512_and_epi32(_mm512_loadu_si512(x + i * RUN), magnitude),
                                   _mm512_and_epi32(_mm512_loadu_si512(x + i * RUN + 16), magnitude));
    const __m512 most = _mm512_castsi512_ps(reduce_each(each, 1)); /* as integers: so NaN is the largest */
    if (_mm512_cmp_ps_mask(most, _mm512_set1_ps(1e30f), _CMP_NLE_UQ)) {
        __atomic_store_n(&p->misfit, 1, __ATOMIC_RELAXED);
        return;
    }
    const __mmask16 usable = _mm512_cmp_ps_mask(most, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 step = _mm512_maskz_div_ps(usable, most, _mm512_set1_ps(largest(digits)));
    _mm512_storeu_ps(inverses, _mm512_maskz_div_ps(usable, _mm512_set1_ps(largest(digits)), most));
    _mm512_storeu_ps(steps, step);
    for (int i = 0; i < count; i++) {
        const __m512 inverse = _mm512_set1_ps(inverses[i]);
        const __m512i one = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * RUN), inverse));
        const __m512i other = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * RUN + 16), inverse));
        each[i] = _mm512_add_epi32(one, other);
        store_digits(one, other, within, digits, p->bytes + (at + i) * size);
    }
    const __m512i total = reduce_each(each, 0);
    _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_cvtepi32_ps(total), step));
    _mm512_storeu_si512(starts, _mm512_mullo_epi32(total, _mm512_set1_epi32((SUM_UNITS << 16) - MIDDLE)));
    for (int i = 0; i < count; i++) {
        p->steps[(at + i) * TOKENS + within] = steps[i];
        if (digits == 1)
            p->starts[(at + i) * TOKENS + within] = starts[i];
        else
            p->sums[(at + i) * TOKENS + within] = sums[i];
    }
}

/* 16 runs of all tokens of a block before the next 16, so that writes are neighbours. */
INLINE void prepare_blocks(activations_t *p, int digits)
{
    for (int64_t token; (token = TOKENS * __atomic_fetch_add(&p->next_block, 1, __ATOMIC_RELAXED)) < p->tokens;)
        for (int64_t run = 0; run < p->runs; run += 16)
            for (int64_t i = token; i < token + TOKENS && i < p->tokens; i++)
                if (run + 16 <= p->runs)
                    prepare_runs(p, i, run, 16, digits);
                else
                    prepare_runs(p, i, run, (int)(p->runs - run), digits);
}

/* A thread's share. */
static void prepare(void *data)
{
    activations_t *p = data;
    if (p->digits == 1)
        prepare_blocks(p, 1);
    else
        prepare_blocks(p, 3);
}
