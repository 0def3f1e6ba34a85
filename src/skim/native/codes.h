/* Codes of keys and values: how they are widened, and how a new token is encoded.
 *
 * The same numbers as `memory/int8.py` and `memory/int4.py`, up to rounding of sums. A vector is one segment of
 * bytes, whose even and odd numbers have a scale each, or two segments of four bits: its first half in the low
 * bits, its second half in the high bits.
 */

#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "decode.h"

enum {
    MOST = 127,      /* of int8 codes */
    LEVELS = 16,     /* of int4 codes */
    CENTRE = 8,      /* the int4 code of a group's middle */
    MAX_DIM = 512,   /* `native_codes.py` repeats this limit */
};

/* Kinds of segments. */
enum { BYTES, LOW, HIGH };

typedef int32_t whole __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef float numbers_t __attribute__((vector_size(LANES * sizeof(float))));

/* LANES bytes as whole numbers, with or without a sign. Compilers find the one instruction too rarely. */
#ifdef __AVX2__
INLINE whole extend(const uint8_t *bytes, int is_signed)
{
    const __m128i packed = _mm_loadl_epi64((const __m128i *)bytes);
    return (whole)(is_signed ? _mm256_cvtepi8_epi32(packed) : _mm256_cvtepu8_epi32(packed));
}
#else
INLINE whole extend(const uint8_t *bytes, int is_signed)
{
    whole found;
    for (int i = 0; i < LANES; i++)
        found[i] = is_signed ? (int8_t)bytes[i] : bytes[i];
    return found;
}
#endif

/* LANES codes as numbers. */
INLINE vec widen(int kind, const uint8_t *codes)
{
    const whole both = extend(codes, kind == BYTES);
    return __builtin_convertvector(kind == BYTES ? both : kind == LOW ? both & (LEVELS - 1) : both >> 4, numbers_t);
}

/* Two numbers, over and over. */
#ifdef __AVX2__
INLINE vec repeat_pair(const float *pair) { return (vec)_mm256_broadcast_sd((const double *)pair); }
#else
INLINE vec repeat_pair(const float *pair)
{
    vec found;
    for (int i = 0; i < LANES; i++)
        found[i] = pair[i % 2];
    return found;
}
#endif

INLINE float from_bf16(uint16_t x)
{
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)x << 16};
    return u.value;
}

/* Round to nearest, ties to even. */
INLINE uint16_t to_bf16(float x)
{
    union {
        float value;
        uint32_t bits;
    } u = {x};
    return x != x ? 0x7fc0 : (uint16_t)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
}

/* out = x * matrix. dim is a multiple of LANES. */
INLINE void multiply(const float *x, const float *matrix, int64_t dim, float *out)
{
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        vec sums[4] = {0};
        for (int64_t i = 0; i < dim; i++)
            for (int j = 0; j < 4; j++)
                sums[j] += load(matrix + i * dim + d + j * LANES) * x[i];
        for (int j = 0; j < 4; j++)
            store(out + d + j * LANES, sums[j]);
    }
    for (; d < dim; d += LANES) {
        vec sum = {0};
        for (int64_t i = 0; i < dim; i++)
            sum += load(matrix + i * dim + d) * x[i];
        store(out + d, sum);
    }
}

/* The code of x, in -most : most - (not `symmetric`). A scale of zero has the code 0. */
INLINE float nearest(float x, float scale, float least, float most)
{
    float code = scale == 0 ? 0 : rintf(x / scale);
    code = code < least ? least : code > most ? most : code;
    return code == code ? code : 0;
}

/* The even and the odd numbers have a scale each. */
INLINE void encode_bytes(const float *x, int64_t dim, uint8_t *codes, uint16_t *scales)
{
    for (int64_t first = 0; first < 2; first++) {
        float top = 0, bad = 0;
        for (int64_t d = first; d < dim; d += 2) {
            top = fabsf(x[d]) > top ? fabsf(x[d]) : top;
            bad += x[d] * 0; /* NaN if a number is not finite */
        }
        scales[first] = to_bf16(top / MOST + bad);
        const float by = from_bf16(scales[first]);
        for (int64_t d = first; d < dim; d += 2)
            codes[d] = (uint8_t)(int8_t)nearest(x[d], by, -MOST, MOST);
    }
}

/* Each group has a scale and a middle. */
INLINE void encode_nibbles(const float *x, int64_t dim, int64_t groups, uint8_t *codes, uint16_t *scales)
{
    const int64_t size = dim / groups, half = dim / 2;
    memset(codes, 0, half);
    for (int64_t g = 0; g < groups; g++, x += size) {
        float low = x[0], high = x[0], bad = 0;
        for (int64_t d = 0; d < size; d++) {
            low = x[d] < low ? x[d] : low;
            high = x[d] > high ? x[d] : high;
            bad += x[d] * 0;
        }
        scales[2 * g] = to_bf16((high - low) / (LEVELS - 1) + bad);
        const float by = from_bf16(scales[2 * g]);
        scales[2 * g + 1] = to_bf16((high + low + by) / 2);
        const float middle = from_bf16(scales[2 * g + 1]);
        for (int64_t d = 0; d < size; d++) {
            int code = CENTRE + (int)nearest(x[d] - middle, by, -CENTRE, LEVELS - 1 - CENTRE);
            int64_t at = g * size + d;
            codes[at % half] |= (uint8_t)(at < half ? code : code << 4);
        }
    }
}
