/* The operations of a decoder layer beside its products, for some tokens on one thread. NaN stays NaN. */

#pragma once

#include <math.h>
#include <stdint.h>

#include "exp.h"

/* RMS norm of each head. x and out are [tokens, heads, dim]: a token's heads are contiguous, and tokens are
 * `stride` and `out_stride` floats apart. x and out may be the same. If `other` is given, laid out like x, it is
 * added to x first. */
static void norm_tokens(float *x, const float *other, int64_t stride, const float *weight, double epsilon, float *out,
                        int64_t out_stride, int64_t tokens, int64_t heads, int64_t dim)
{
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *own = x + t * stride + h * dim, *to = out + t * out_stride + h * dim, sum = 0;
            if (other) {
                const float *more = other + t * stride + h * dim;
#pragma omp simd
                for (int64_t i = 0; i < dim; i++)
                    own[i] += more[i];
            }
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < dim; i++)
                sum += own[i] * own[i];
            const float scale = 1.0f / sqrtf(sum / (float)dim + (float)epsilon);
#pragma omp simd
            for (int64_t i = 0; i < dim; i++)
                to[i] = own[i] * scale * weight[i];
        }
}

/* Rotary embeddings of heads, laid out as above, in place. cosine and sine are [tokens, dim]. */
static void rotate_tokens(float *x, int64_t stride, const float *cosine, const float *sine, int64_t tokens, int64_t heads,
                          int64_t dim)
{
    const int64_t half = dim / 2;
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *low = x + t * stride + h * dim, *high = low + half;
            const float *c = cosine + t * dim, *s = sine + t * dim;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[half + i] + a * s[half + i];
            }
        }
}

/* out[t, i] = silu(x[t, i]) * x[t, inner + i]; x is [tokens, 2 * inner] */
static void gate_tokens(const float *x, float *out, int64_t tokens, int64_t inner)
{
    for (int64_t t = 0; t < tokens; t++) {
        const float *own = x + t * 2 * inner, *passed = own + inner;
        float *to = out + t * inner;
#pragma omp simd
        for (int64_t i = 0; i < inner; i++) {
            const float e = exp2_nonpositive(-fabsf(own[i]) * LOG2_E);
            to[i] = own[i] * (own[i] >= 0 ? 1.0f : e) / (1.0f + e) * passed[i];
        }
    }
}
