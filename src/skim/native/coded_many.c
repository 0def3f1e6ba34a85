/* Products of 4-bit codes with many tokens, by instructions that multiply 8-bit integers (AVX-512 VNNI).
 *
 * As in `coded_digits.h`, the activations of a run of 32 columns become integers relative to the largest of the run,
 * and these become digits of 8 bits. The products of codes and digits are exact integers. With three digits, what is
 * lost is a rounding to 23 bits, about as much as float32 loses. Forwards that only rank tokens have one digit.
 *
 * A lane of a vector is a weight row. Tiles of 16 rows are unpacked once and then multiplied by all tokens, a block of
 * them at a time, whose digits lie in the order in which they are read. A token's result is bit-identical in any batch
 * and with any number of threads. This file links no OpenMP runtime; see `decode.h`.
 */

#include "coded.h"

#include <stdlib.h>

#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "without instructions that multiply 8-bit integers float32 is faster"
#endif

enum {
    ROWS = 16,        /* of a tile: lanes of a vector */
    TOKENS = 12,      /* of a block: the registers hold their sums */
    WORDS = RUN / 4,  /* words of 4 columns in a run */
    TILES = 2,        /* whose rows are multiplied with a block while it is in cache */
    SHARES = 4,       /* claims per thread that TILES must leave */
};

typedef struct {
    const coded_t *weight;
    const float *given; /* [tokens, columns] */
    const float *bias;  /* [rows], or NULL */
    float *out;         /* [tokens, rows] */
    int64_t tokens;
    int digits;         /* 1 or 3 */
    int32_t *words;     /* [blocks, runs, digits, WORDS, TOKENS]: 4 columns' digits, the most significant first */
    float *steps;       /* [blocks, runs, TOKENS]: the unit of the integers */
    float *sums;        /* the same: the sum of the activations */
    uint8_t *unpacked;  /* [threads, TILES, runs, WORDS, ROWS, 4]: a thread's codes */
    int64_t tiles;      /* that a thread claims at a time */
    int64_t next_block, next_tile, next_thread;
    int misfit; /* set if values are not finite, or too large */
} many_t;

/* ---- activations */

/* The largest integer: its digits hold it, and a run of them times codes fits 32 bits. */
INLINE float largest(int digits) { return digits == 1 ? 127.0f : 4.4e6f; }

/* Write 16 columns, 4 words, as digits; return the sum of their integers. */
INLINE int32_t write_digits(__m512 x, float inverse, int digits, int32_t *to)
{
    const __m512i all = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse)));
    __m512i rest = all;
    for (int digit = digits - 1; digit >= 0; digit--) {
        int32_t words[4];
        _mm_storeu_si128((__m128i *)words, _mm512_cvtepi32_epi8(rest));
        for (int i = 0; i < 4; i++)
            to[(digit * WORDS + i) * TOKENS] = words[i];
        rest = _mm512_srai_epi32(_mm512_add_epi32(rest, _mm512_set1_epi32(128)), 8);
    }
    return _mm512_reduce_add_epi32(all);
}

INLINE void prepare_token(many_t *p, int64_t token, int digits)
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
        const float inverse = usable ? largest(digits) / most : 0.0f, step = usable ? most / largest(digits) : 0.0f;
        const int64_t at = block * runs + run;
        int32_t *to = p->words + at * digits * WORDS * TOKENS + within;
        const int32_t sum = write_digits(one, inverse, digits, to) +
                            write_digits(other, inverse, digits, to + WORDS / 2 * TOKENS);
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
            if (p->digits == 1)
                prepare_token(p, token, 1);
            else
                prepare_token(p, token, 3);
}

/* ---- a tile of rows */

/* The codes of the rows side by side, a byte each. Rows that do not exist have codes, scales and offsets of the last
 * one. A word of memory holds columns i to i + 3 of a run, and those 16 further on. */
static void unpack(const coded_t *w, int64_t row, uint8_t *to)
{
    const int64_t words = w->columns / 8;
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t from = row + r < w->rows ? row + r : w->rows - 1;
        for (int64_t i = 0; i < words; i++) {
            uint32_t both;
            memcpy(&both, w->low + (from * words + i) * 4, 4);
            const uint32_t first = both & 0x0f0f0f0f, second = both >> 4 & 0x0f0f0f0f;
            uint8_t *at = to + (((i / 4) * WORDS + i % 4) * ROWS + r) * 4;
            memcpy(at, &first, 4);
            memcpy(at + WORDS / 2 * ROWS * 4, &second, 4);
        }
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
INLINE void multiply_block(const many_t *p, int64_t row, const uint8_t *codes, const affine_t *affine, int64_t block,
                           int digits)
{
    const coded_t *w = p->weight;
    const int64_t runs = w->columns / RUN;
    const int shift = __builtin_ctz((unsigned)w->group / RUN);
    const int32_t *words = p->words + block * runs * digits * WORDS * TOKENS;
    __m512 total[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        total[t] = _mm512_setzero_ps();
    for (int64_t run = 0; run < runs; run++) {
        __m512i sums[TOKENS];
        for (int t = 0; t < TOKENS; t++)
            sums[t] = _mm512_setzero_si512();
        for (int digit = 0; digit < digits; digit++) {
            if (digit > 0)
                for (int t = 0; t < TOKENS; t++)
                    sums[t] = _mm512_slli_epi32(sums[t], 8);
#pragma GCC unroll 8
            for (int word = 0; word < WORDS; word++, words += TOKENS) {
                const __m512i own = _mm512_loadu_si512(codes + (run * WORDS + word) * ROWS * 4);
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++)
                    sums[t] = _mm512_dpbusd_epi32(sums[t], own, _mm512_set1_epi32(words[t]));
            }
        }
        const int64_t at = (block * runs + run) * TOKENS;
        const __m512 scale = _mm512_loadu_ps(affine->scale + (run >> shift) * ROWS);
        const __m512 offset = _mm512_loadu_ps(affine->offset + (run >> shift) * ROWS);
#pragma GCC unroll 12
        for (int t = 0; t < TOKENS; t++) {
            const __m512 whole = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t]), _mm512_set1_ps(p->steps[at + t]));
            total[t] = _mm512_fmadd_ps(whole, scale, total[t]);
            total[t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(p->sums[at + t]), total[t]);
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
    affine_t own, affine[TILES];
    const coded_t *w = p->weight;
    const int64_t tiles = (w->rows + ROWS - 1) / ROWS, blocks = (p->tokens + TOKENS - 1) / TOKENS;
    const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED), size = w->columns * ROWS;
    uint8_t *codes = p->unpacked + thread * TILES * size;
    for (int64_t tile; (tile = p->tiles * __atomic_fetch_add(&p->next_tile, 1, __ATOMIC_RELAXED)) < tiles;) {
        const int64_t count = tiles - tile < p->tiles ? tiles - tile : p->tiles;
        for (int64_t i = 0; i < count; i++) {
            unpack(w, (tile + i) * ROWS, codes + i * size);
            arrange_affine(w, (tile + i) * ROWS, &own, &affine[i]);
        }
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t i = 0; i < count; i++)
                if (p->digits == 1)
                    multiply_block(p, (tile + i) * ROWS, codes + i * size, &affine[i], block, 1);
                else
                    multiply_block(p, (tile + i) * ROWS, codes + i * size, &affine[i], block, 3);
    }
}

/* The product, if the weight has codes of 4 bits in groups of at least 32, and at most MOST / ROWS groups in a row.
 * `digits` is 1 or 3. Returns 0, with `out` undefined, if values are not finite or too large, or if there is no memory. */
int skim_coded_many(const coded_t *weight, const float *given, const float *bias, float *out, int64_t tokens,
                    int digits, team_t team, unsigned threads)
{
    const int64_t blocks = (tokens + TOKENS - 1) / TOKENS, each = blocks * weight->columns / RUN * TOKENS;
    const int64_t tiles = (weight->rows + ROWS - 1) / ROWS;
    const size_t words = (size_t)(each * digits * RUN), units = (size_t)each * sizeof(float);
    const size_t unpacked = (size_t)(threads * TILES * weight->columns * ROWS);
    uint8_t *memory = malloc(words + 2 * units + unpacked);
    if (!memory)
        return 0;
    const size_t last = words / (size_t)blocks; /* of a block: the last may have fewer tokens */
    memset(memory + words - last, 0, last);
    memset(memory + words, 0, 2 * units);
    many_t p = {.weight = weight, .given = given, .bias = bias, .out = out, .tokens = tokens, .digits = digits,
                .words = (int32_t *)memory, .steps = (float *)(memory + words), .sums = (float *)(memory + words + units),
                .unpacked = memory + words + 2 * units, .tiles = tiles < TILES * SHARES * (int64_t)threads ? 1 : TILES};
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
