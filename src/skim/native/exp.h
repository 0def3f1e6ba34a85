/* The exponential function in operations that compilers can vectorise. */

#pragma once

#include <stdint.h>

/* Always inlined, so that constant arguments give specialised code. */
#define INLINE static inline __attribute__((always_inline))

static const float LOG2_E = 1.44269504f;

/* 2^x for x <= 0, to about 2 ulp; 0 below -126; NaN for NaN. */
INLINE float exp2_nonpositive(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds x to an integer in the low bits */
    union {
        float value;
        uint32_t bits;
    } whole, power;
    float clamped = x < -126.0f ? -126.0f : x;
    whole.value = clamped + shift;
    float f = clamped - (whole.value - shift); /* in [-0.5, 0.5] */
    float p = 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    power.bits = (whole.bits << 23) + 0x3f800000u;
    return x < -126.0f ? 0.0f : p * power.value;
}
