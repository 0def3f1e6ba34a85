/* Coded weights: their planes, and how runs of 32 codes become floats. `models/quantized/format.py` describes the
 * format, and its `restore_stored` is the twin of this file: values are equal bit for bit where the processor has
 * fused multiply-add.
 *
 * Everything is written in vectors that any compiler splits to the processor's width. Kernels are compiled on the
 * machine that runs them, and their cache key contains the processor (`build.py`): that is how AVX2, AVX-512 or
 * NEON is chosen.
 */

#pragma once

#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum {
    RUN = 32,     /* columns that are packed together */
    SUPER = 256,  /* columns with one factor */
    PARTS = RUN / LANES,
    HALF = PARTS / 2, /* vectors in 16 columns */
    MOST = 4096,  /* groups whose scales and offsets are converted together; also the most of a row */
};

enum { FLOAT16, BFLOAT16, FLOAT32, UINT8, INT8, NONE }; /* types of scales and offsets */
enum { EIGHT_BIT_FLOATS = 9 };                          /* beside the numbers of bits 4, 5, 6 and 8 */

typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

typedef struct {
    const uint8_t *low, *high;
    const void *scale, *offset;
    const uint16_t *factor;
    int64_t rows, columns;
    int32_t bits; /* of a code, or EIGHT_BIT_FLOATS */
    int32_t group, zero;
    int32_t scale_type, offset_type;
} coded_t;

/* Scales and offsets of a few rows as float32. */
typedef struct {
    float scale[MOST], offset[MOST];
} affine_t;

INLINE float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

INLINE float float_of_half(uint16_t half)
{
#if defined(__F16C__) && defined(__AVX2__)
    return _cvtsh_ss(half);
#else
    const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
    const float value = float_of_bits(magnitude) * 0x1p112f; /* moves the exponent's bias, also of subnormals */
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return float_of_bits(((half & 0x7c00u) == 0x7c00u ? 0x7f800000u | magnitude : bits) | sign);
#endif
}

static void floats_of_halves(const uint16_t *from, int64_t count, float *to)
{
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
#endif
#if defined(__F16C__) && defined(__AVX2__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; i++)
        to[i] = float_of_half(from[i]);
}

/* `count` numbers of a plane, starting at `first`, as floats. */
static void floats_of(const void *plane, int type, int64_t first, int64_t count, float *to)
{
    switch (type) {
    case FLOAT16: return floats_of_halves((const uint16_t *)plane + first, count, to);
    case BFLOAT16:
        for (int64_t i = 0; i < count; i++)
            to[i] = float_of_bits((uint32_t)((const uint16_t *)plane)[first + i] << 16);
        return;
    case FLOAT32: memcpy(to, (const float *)plane + first, (size_t)count * sizeof(float)); return;
    case UINT8:
        for (int64_t i = 0; i < count; i++)
            to[i] = (float)((const uint8_t *)plane)[first + i];
        return;
    case INT8:
        for (int64_t i = 0; i < count; i++)
            to[i] = (float)((const int8_t *)plane)[first + i];
    }
}

/* Multiply each number by its factor, which 256 columns share. `pair` factors belong together. */
static void times_factors(const coded_t *w, int pair, int which, float sign, int64_t first, int64_t count, float *x)
{
    const int64_t each = SUPER / w->group;
    for (int64_t i = 0; i < count; i += each) {
        const float factor = sign * float_of_half(w->factor[(first + i) / each * pair + which]);
        for (int64_t j = i; j < i + each; j++)
            x[j] *= factor;
    }
}

/* Scales and offsets of `count` neighbouring groups. With factors, `first` begins 256 columns. */
static void read_groups(const coded_t *w, int64_t first, int64_t count, float *scale, float *offset)
{
    const int pair = w->offset_type == NONE ? 1 : 2;
    floats_of(w->scale, w->scale_type, first, count, scale);
    if (w->factor)
        times_factors(w, pair, 0, 1.0f, first, count, scale);
    if (w->offset_type == NONE) {
        for (int64_t i = 0; i < count; i++)
            offset[i] = scale[i] * (float)-w->zero;
        return;
    }
    floats_of(w->offset, w->offset_type, first, count, offset);
    if (w->factor)
        times_factors(w, pair, 1, -1.0f, first, count, offset);
    else if (w->offset_type == UINT8)
        for (int64_t i = 0; i < count; i++)
            offset[i] = scale[i] * -offset[i];
}

/* Scales and offsets of `rows` rows starting at `row`: at most MOST groups. */
INLINE void read_affine(const coded_t *w, int64_t row, int64_t rows, affine_t *to)
{
    const int64_t groups = w->columns / w->group;
    read_groups(w, row * groups, rows * groups, to->scale, to->offset);
}

/* The bytes at `at`, one in each lane. gcc would convert them one by one. */
INLINE ivec integers_at(const uint8_t *at)
{
#if defined(__AVX512F__)
    return (ivec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (ivec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else
    return __builtin_convertvector(*(const bytes *)at, ivec);
#endif
}

/* 8 bytes, repeated to fill the lanes. */
INLINE ivec eight_repeated(const uint8_t *at)
{
#ifdef __AVX512F__
    return (ivec)_mm512_cvtepu8_epi32(_mm_set1_epi64x(*(const int64_t __attribute__((aligned(1), may_alias)) *)at));
#else
    return integers_at(at);
#endif
}

#ifdef __AVX512F__
static const ivec LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const ivec FIELD = {0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2}; /* shifts of 2-bit fields */
#else
static const ivec LANE = {0, 1, 2, 3, 4, 5, 6, 7};
static const ivec FIELD = {0, 0, 0, 0, 0, 0, 0, 0};
#endif

/* 8-bit floats with 4 bits of exponent and 3 of mantissa; the largest magnitude is NaN. */
INLINE vec eight_bit_floats(ivec codes)
{
    const ivec magnitude = codes & 0x7f;
    const vec value = (vec)(magnitude << 20) * 0x1p120f;
    const ivec nan = magnitude == 0x7f; /* all bits where true */
    return (vec)(((ivec)value | (nan & 0x7fc00000)) | (codes & 0x80) << 24);
}

/* The codes of a run as floats. low and high point to the run's bytes. */
INLINE void decode_run(const uint8_t *low, const uint8_t *high, int bits, vec *out)
{
    if (bits == 8 || bits == EIGHT_BIT_FLOATS) {
        for (int i = 0; i < PARTS; i++) {
            const ivec codes = integers_at(low + i * LANES);
            out[i] = bits == 8 ? __builtin_convertvector(codes, vec) : eight_bit_floats(codes);
        }
        return;
    }
    ivec codes[PARTS];
    for (int i = 0; i < HALF; i++) {
        const ivec both = integers_at(low + i * LANES);
        codes[i] = both & 15;
        codes[HALF + i] = both >> 4;
    }
    if (bits == 5) {
        int32_t word;
        memcpy(&word, high, sizeof(word));
        for (int i = 0; i < PARTS; i++)
            codes[i] |= ((word >> (LANE + i * LANES)) & 1) << 4;
    } else if (bits == 6) {
        const ivec rest = eight_repeated(high);
        for (int i = 0; i < PARTS; i++)
            codes[i] |= ((rest >> (FIELD + i * LANES / 4)) & 3) << 4;
    }
    for (int i = 0; i < PARTS; i++)
        out[i] = __builtin_convertvector(codes[i], vec);
}

INLINE int64_t low_bytes(const coded_t *w) { return w->bits >= 8 ? w->columns : w->columns / 2; }
INLINE int64_t high_bytes(int64_t columns, int bits) { return bits == 5 ? columns / 8 : bits == 6 ? columns / 4 : 0; }

/* The values of run number `run` of a row. scale and offset are the row's; `fine`: groups of 16, not more. */
INLINE void restore_run(const uint8_t *low, const uint8_t *high, const float *scale, const float *offset,
                        int64_t run, int bits, int fine, int shift, vec *out)
{
#ifdef __AVX512F__
    if (bits == 4) { /* a group has 16 values: look them up */
        const int64_t one = fine ? 2 * run : run >> shift, other = one + fine;
        const vec code = __builtin_convertvector(LANE, vec);
        const __m512i both = (__m512i)integers_at(low + run * (RUN / 2));
        vec values = code * scale[one] + offset[one];
        out[0] = _mm512_permutexvar_ps(both, values); /* uses the lowest 4 bits of a lane */
        if (fine)
            values = code * scale[other] + offset[other];
        out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), values);
        return;
    }
#endif
    decode_run(low + run * (bits >= 8 ? RUN : RUN / 2), high + run * high_bytes(RUN, bits), bits, out);
    for (int i = 0; i < PARTS; i++) {
        const int64_t group = fine ? 2 * run + i / HALF : run >> shift;
        out[i] = out[i] * scale[group] + offset[group];
    }
}
