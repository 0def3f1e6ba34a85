/* Vectors of floats of the processor's width, and the team of threads that kernels share with torch. */

#pragma once

#include <stdint.h>

#include "exp.h"

enum {
#ifdef __AVX512F__
    LANES = 16, /* floats in a vector */
#else
    LANES = 8,
#endif
};

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef float quad __attribute__((vector_size(4 * sizeof(float))));

/* `GOMP_parallel` of torch's OpenMP runtime. Kernels link no runtime; see `decode_attention.c`. */
typedef void (*team_t)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

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
