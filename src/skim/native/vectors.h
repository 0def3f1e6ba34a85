/* Vectors of floats of the processor's width. */

#pragma once

#include <stdint.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "exp.h"
#include "team.h"

enum {
#ifdef __AVX512F__
    LANES = 16, /* floats in a vector */
#else
    LANES = 8,
#endif
};

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(sizeof(int32_t)), may_alias));
typedef float quad __attribute__((vector_size(4 * sizeof(float))));

INLINE float sum_of(vec lanes)
{
    union {
        vec whole;
        quad parts[LANES / 4];
    } all = {lanes};
    quad four = all.parts[0] + all.parts[1];
    for (int i = 2; i < LANES / 4; i += 2)
        four += all.parts[i] + all.parts[i + 1];
    return (four[0] + four[1]) + (four[2] + four[3]);
}

/* `one` where all bits of `where` are set, `other` where none is. */
INLINE vec blend(ivec where, vec one, vec other) { return (vec)((where & (ivec)one) | (~where & (ivec)other)); }

/* The larger of two; `other` if one of them is NaN. */
INLINE vec larger(vec one, vec other)
{
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)one, (__m512)other);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)one, (__m256)other);
#else
    return blend(one > other, one, other);
#endif
}

/* 2^x of each lane for x <= 0, to about 2 ulp; 1 for 0, 0 below -126 or less; NaN for NaN. */
INLINE vec exp2_lanes(vec x)
{
#ifdef __AVX512DQ__
    const vec f = (vec)_mm512_reduce_ps((__m512)x, 0); /* in [-0.5, 0.5]; 0 for -infinity */
#else
    const vec shift = (vec){0} + 12582912.0f, least = (vec){0} - 126.0f;
    const vec clamped = larger(least, x), whole = clamped + shift; /* rounded to an integer in the low bits */
    const vec f = clamped - (whole - shift);
#endif
    vec p = (vec){0} + 1.326472721e-3f; /* the least relative error, 9e-8, of polynomials with p(0) = 1 */
    p = p * f + 9.671512812e-3f;
    p = p * f + 5.550733745e-2f;
    p = p * f + 2.402224208e-1f;
    p = p * f + 6.931469776e-1f;
    p = p * f + 1.0f;
#ifdef __AVX512DQ__
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
#else
    const vec power = (vec)(((ivec)whole << 23) + 0x3f800000);
    return (vec)((ivec)(p * power) & ~(ivec)(x < least));
#endif
}
