/* Products of 4-bit codes with many tokens, by instructions that multiply 8-bit integers (AVX-512 VNNI).
 *
 * As in `coded_digits.h`, the activations of a run of 32 columns become integers relative to the largest of the run,
 * and these become three digits of 8 bits. The products of codes and digits are exact integers; what is lost is a
 * rounding to 23 bits, about as much as float32 loses.
 *
 * A lane of a vector is a weight row. A tile of 16 rows is arranged once and then multiplied by all tokens, a few at a
 * time. A token's result is bit-identical in any batch and with any number of threads. This file links no OpenMP
 * runtime; see `decode_attention.c`.
 */

#include "coded.h"

#include <stdlib.h>

#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "without instructions that multiply 8-bit integers float32 is faster"
#endif

enum {
    DIGITS = 3,
    ROWS = 16,      /* of a tile: lanes of a vector */
    TOKENS = 6,     /* of a block: the registers hold their sums */
    WORDS = RUN / 8 /* words of 8 codes in a run */
};

static const float LARGEST = 4.4e6f; /* of an integer: a run of them times codes fits 32 bits */

typedef struct {
    const coded_t *weight;
    const float *given; /* [tokens, columns] */
    const float *bias;  /* [rows], or NULL */
    float *out;         /* [tokens, rows] */
    int64_t tokens;
    int8_t *digits; /* [blocks, runs, DIGITS, TOKENS, RUN], most significant digit first */
    float *steps;   /* [blocks, runs, TOKENS]: the unit of the integers */
    float *sums;    /* the same: the sum of the activations */
    int32_t *arranged; /* [threads, runs, WORDS, ROWS]: a thread's tile */
    int64_t next_block, next_tile, next_thread;
    int misfit; /* set if values are not finite, or too large */
} many_t;

/* ---- activations */

/* Write 16 columns as digits; return the sum of their integers. */
INLINE int32_t write_digits(__m512 x, float inverse, int8_t *to)
{
    const __m512i all = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
    __m512i rest = all;
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        _mm_storeu_si128((__m128i *)(to + digit * TOKENS * RUN), _mm512_cvtepi32_epi8(rest));
        rest = _mm512_srai_epi32(_mm512_add_epi32(rest, _mm512_set1_epi32(128)), 8);
    }
    return _mm512_reduce_add_epi32(all);
}

static void prepare_token(many_t *p, int64_t token)
{
    const int64_t runs = p->weight->columns / RUN, block = token / TOKENS, within = token % TOKENS;
    const float *x = p->given + token * p->weight->columns;
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    for (int64_t run = 0; run < runs; run++) {
        const __m512 one = _mm512_loadu_ps(x + run * RUN), other = _mm512_loadu_ps(x + run * RUN + 16);
        const __m512i both = _mm512_max_epu32(_mm512_and_epi32(_mm512_castps_si512(one), magnitude),
                                              _mm512_and_epi32(_mm512_castps_si512(other), magnitude));
        const float most = float_of_bits(_mm512_reduce_max_epu32(both)); /* as integers: so NaN is the largest */
        if (!(most <= 1e30f)) {
            __atomic_store_n(&p->misfit, 1, __ATOMIC_RELAXED);
            return;
        }
        const int usable = most > 1e-30f;
        const float inverse = usable ? LARGEST / most : 0.0f, step = usable ? most / LARGEST : 0.0f;
        const int64_t at = block * runs + run;
        int8_t *to = p->digits + (at * DIGITS * TOKENS + within) * RUN;
        const int32_t sum = write_digits(one, inverse, to) + write_digits(other, inverse, to + 16);
        p->steps[at * TOKENS + within] = step;
        p->sums[at * TOKENS + within] = (float)sum * step;
    }
}

static void prepare(void *data)
{
    many_t *p = data;
    const int64_t blocks = (p->tokens + TOKENS - 1) / TOKENS;
    for (int64_t block; (block = __atomic_fetch_add(&p->next_block, 1, __ATOMIC_RELAXED)) < blocks;)
        for (int64_t token = block * TOKENS; token < (block + 1) * TOKENS && token < p->tokens; token++)
            prepare_token(p, token);
}

/* ---- a tile of rows */

/* Words of the rows side by side. Rows that do not exist have codes, scales and offsets of the last one. */
static void arrange(const coded_t *w, int64_t row, int32_t *to)
{
    const int64_t words = w->columns / 8;
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t from = row + r < w->rows ? row + r : w->rows - 1;
        for (int64_t i = 0; i < words; i++)
            memcpy(to + i * ROWS + r, w->low + (from * words + i) * 4, 4);
    }
}

/* Scales and offsets of the rows side by side. Two of [groups, ROWS] */
static void arrange_affine(const coded_t *w, int64_t row, affine_t *own, affine_t *to)
{
    const int64_t groups = w->columns / w->group;
    for (int64_t r = 0; r < ROWS; r++) {
        read_affine(w, row + r < w->rows ? row + r : w->rows - 1, 1, own);
        for (int64_t group = 0; group < groups; group++) {
            to->scale[group * ROWS + r] = own->scale[group];
            to->offset[group * ROWS + r] = own->offset[group];
        }
    }
}

/* The tile by one block of tokens. */
static void multiply_block(const many_t *p, int64_t row, const int32_t *words, const affine_t *affine, int64_t block)
{
    const coded_t *w = p->weight;
    const int64_t runs = w->columns / RUN;
    const int shift = __builtin_ctz((unsigned)w->group / RUN);
    const __m512i four = _mm512_set1_epi8(15);
    __m512 total[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        total[t] = _mm512_setzero_ps();
    for (int64_t run = 0; run < runs; run++) {
        const int64_t at = block * runs + run;
        const int8_t *digits = p->digits + at * DIGITS * TOKENS * RUN;
        __m512i sums[DIGITS][TOKENS];
        for (int d = 0; d < DIGITS; d++)
            for (int t = 0; t < TOKENS; t++)
                sums[d][t] = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int word = 0; word < WORDS; word++) { /* columns 4 word to 4 word + 3, and those 16 further on */
            const __m512i all = _mm512_loadu_si512(words + (run * WORDS + word) * ROWS);
            const __m512i first = _mm512_and_si512(all, four), second = _mm512_and_si512(_mm512_srli_epi16(all, 4), four);
#pragma GCC unroll 3
            for (int d = 0; d < DIGITS; d++)
#pragma GCC unroll 8
                for (int t = 0; t < TOKENS; t++) {
                    int32_t near, far;
                    memcpy(&near, digits + (d * TOKENS + t) * RUN + 4 * word, 4);
                    memcpy(&far, digits + (d * TOKENS + t) * RUN + 4 * word + 16, 4);
                    sums[d][t] = _mm512_dpbusd_epi32(sums[d][t], first, _mm512_set1_epi32(near));
                    sums[d][t] = _mm512_dpbusd_epi32(sums[d][t], second, _mm512_set1_epi32(far));
                }
        }
        const __m512 scale = _mm512_loadu_ps(affine->scale + (run >> shift) * ROWS);
        const __m512 offset = _mm512_loadu_ps(affine->offset + (run >> shift) * ROWS);
#pragma GCC unroll 8
        for (int t = 0; t < TOKENS; t++) {
            __m512i whole = sums[0][t];
#pragma GCC unroll 2
            for (int d = 1; d < DIGITS; d++)
                whole = _mm512_add_epi32(_mm512_slli_epi32(whole, 8), sums[d][t]);
            const __m512 step = _mm512_set1_ps(p->steps[at * TOKENS + t]);
            total[t] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), step), scale, total[t]);
            total[t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(p->sums[at * TOKENS + t]), total[t]);
        }
    }
    const __mmask16 there = w->rows - row >= ROWS ? 0xffff : (__mmask16)((1u << (w->rows - row)) - 1);
    const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(there, p->bias + row) : _mm512_setzero_ps();
    for (int64_t t = 0; t < TOKENS && block * TOKENS + t < p->tokens; t++)
        _mm512_mask_storeu_ps(p->out + (block * TOKENS + t) * w->rows + row, there, _mm512_add_ps(total[t], bias));
}

static void work(void *data)
{
    many_t *p = data;
    affine_t own, affine;
    const coded_t *w = p->weight;
    const int64_t tiles = (w->rows + ROWS - 1) / ROWS, blocks = (p->tokens + TOKENS - 1) / TOKENS;
    const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED);
    int32_t *words = p->arranged + thread * w->columns / 8 * ROWS;
    for (int64_t tile; (tile = __atomic_fetch_add(&p->next_tile, 1, __ATOMIC_RELAXED)) < tiles;) {
        arrange(w, tile * ROWS, words);
        arrange_affine(w, tile * ROWS, &own, &affine);
        for (int64_t block = 0; block < blocks; block++)
            multiply_block(p, tile * ROWS, words, &affine, block);
    }
}

/* The product, if the weight has codes of 4 bits in groups of at least 32, and at most MOST / ROWS groups in a row.
 * Returns 0, with `out` undefined, if values are not finite or too large, or if there is no memory. */
int skim_coded_many(const coded_t *weight, const float *given, const float *bias, float *out, int64_t tokens,
                    team_t team, unsigned threads)
{
    const int64_t blocks = (tokens + TOKENS - 1) / TOKENS, each = blocks * weight->columns / RUN * TOKENS;
    const size_t digits = (size_t)(each * DIGITS * RUN), units = (size_t)each * sizeof(float);
    const size_t arranged = (size_t)(threads * weight->columns / 8 * ROWS) * sizeof(int32_t);
    uint8_t *memory = calloc(1, digits + 2 * units + arranged);
    if (!memory)
        return 0;
    many_t p = {weight, given, bias, out, tokens, (int8_t *)memory, (float *)(memory + digits),
                (float *)(memory + digits + units), (int32_t *)(memory + digits + 2 * units), 0, 0, 0, 0};
    if (threads > 1)
        team(prepare, &p, threads, 0);
    else
        prepare(&p);
    if (!p.misfit) {
        if (threads > 1)
            team(work, &p, threads, 0);
        else
            work(&p);
    }
    free(memory);
    return !p.misfit;
}
