/* Products of 4-bit codes with many tokens, by instructions that multiply 8-bit integers (AVX-512 VNNI).
 *
 * As in `coded_digits.h`, the activations of a run of 32 columns become integers, and these become digits of 8 bits
 * (`coded_activations.h`). The products of codes and digits are exact integers. Three digits round activations to 23
 * bits, about as float32 does. Forwards that only rank tokens use one digit (`coded_one_digit.h`).
 *
 * A lane of a vector is a weight row. A thread claims a panel of rows. It unpacks a chunk of their columns
 * (`coded_rows.h`) and multiplies it with all tokens, a block of them at a time. The totals of a block stay in
 * registers during a chunk and in `out` between chunks. A token's result is bit-identical in any batch and with any
 * number of threads.
 */

#include <stdlib.h>

#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "without instructions that multiply 8-bit integers float32 is faster"
#endif

#include "coded_one_digit.h"

enum {
    PANEL = 16, /* times ROWS rows: the most that a thread claims; a chunk of them fits the second cache */
    NEAR = 3,   /* blocks of tokens that a tile's rows are multiplied with while they are in the first cache */
    DIGITS = 3, /* if not one */
    SHARES = 2, /* claims per thread if all were as large as the next one */
};

typedef struct {
    activations_t given;
    const coded_t *weight;
    const float *bias; /* [rows], or NULL */
    float *out;        /* [tokens, rows] */
    rows_t *unpacked;  /* [threads, PANEL] */
    int64_t threads;
    int64_t next_vector, next_thread; /* of ROWS rows */
} many_t;

/* Add a chunk of ROWS rows by a block of tokens to its totals, with three digits. */
INLINE void multiply_rows(const activations_t *p, const rows_t *rows, int64_t first, int64_t runs, int shift,
                          int64_t block, __m512 total[TOKENS])
{
    const int64_t begin = block * p->runs + first;
    const int32_t *words = (const int32_t *)p->bytes + begin * DIGITS * TOKENS * WORDS;
    for (int64_t run = 0; run < runs; run++) {
        __m512i sums[TOKENS];
        for (int t = 0; t < TOKENS; t++)
            sums[t] = _mm512_setzero_si512();
        for (int digit = 0; digit < DIGITS; digit++, words += TOKENS * WORDS) {
            if (digit > 0)
                for (int t = 0; t < TOKENS; t++)
                    sums[t] = _mm512_slli_epi32(sums[t], 8);
#pragma GCC unroll 8
            for (int word = 0; word < WORDS; word++) {
                const __m512i own = _mm512_load_si512(rows->codes + (run * WORDS + word) * ROWS * 4);
#pragma GCC unroll 12
                for (int t = 0; t < TOKENS; t++)
                    sums[t] = _mm512_dpbusd_epi32(sums[t], own, _mm512_set1_epi32(words[t * WORDS + word]));
            }
        }
        const int64_t at = (begin + run) * TOKENS, group = run >> shift;
        const __m512 scale = _mm512_loadu_ps(rows->scale + group * ROWS);
        const __m512 offset = _mm512_loadu_ps(rows->offset + group * ROWS);
#pragma GCC unroll 12
        for (int t = 0; t < TOKENS; t++) {
            const __m512 whole = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[t]), _mm512_set1_ps(p->steps[at + t]));
            total[t] = _mm512_fmadd_ps(whole, scale, total[t]);
            total[t] = _mm512_fmadd_ps(offset, _mm512_set1_ps(p->sums[at + t]), total[t]);
        }
    }
}

/* The first `left` lanes of a vector. */
INLINE __mmask16 lanes_of(int64_t left)
{
    return left >= ROWS ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
}

/* A chunk of ROWS rows by a block of tokens, with three digits. Totals of the chunks before it are in `out`. The
 * last chunk adds the bias. */
INLINE void multiply_block(const many_t *p, int64_t row, const rows_t *rows, int64_t first, int64_t runs,
                           int64_t block)
{
    const activations_t *given = &p->given;
    const int shift = __builtin_ctz((unsigned)p->weight->group / RUN);
    const int64_t all = p->weight->rows, left = given->tokens - block * TOKENS;
    const int begins = first == 0, ends = first + runs == given->runs;
    const __mmask16 there = lanes_of(all - row);
    const __m512 bias = ends && p->bias ? _mm512_maskz_loadu_ps(there, p->bias + row) : _mm512_setzero_ps();
    float *out = p->out + block * TOKENS * all + row;
    __m512 total[TOKENS];
#pragma GCC unroll 12
    for (int t = 0; t < TOKENS; t++)
        total[t] = _mm512_maskz_loadu_ps(begins || t >= left ? 0 : there, out + t * all);
    multiply_rows(given, rows, first, runs, shift, block, total);
#pragma GCC unroll 12
    for (int t = 0; t < TOKENS; t++)
        _mm512_mask_storeu_ps(out + t * all, t < left ? there : 0, ends ? _mm512_add_ps(total[t], bias) : total[t]);
}

/* A chunk of a tile's rows by its tokens, with one digit. Loads of `out` precede all stores: if rows lie a multiple
 * of 4096 bytes apart, a load would wait for the store before it. */
INLINE void multiply_tile(const many_t *p, int64_t row, const rows_t *rows, int64_t first, int64_t runs,
                          int64_t block, int token)
{
    const activations_t *given = &p->given;
    const int64_t all = p->weight->rows, left = given->tokens - block * TOKENS - token;
    const int begins = first == 0, ends = first + runs == given->runs;
    __m512 total[TILE_ROWS][TILE_TOKENS];
    for (int v = 0; v < TILE_ROWS; v++)
        for (int t = 0; t < TILE_TOKENS; t++)
            total[v][t] = _mm512_setzero_ps();
    add_tile(given, rows, first, runs, block, token, total);
    for (int v = 0; v < TILE_ROWS; v++) {
        const int64_t own = row + v * ROWS;
        const __mmask16 there = lanes_of(all - own);
        const __m512 unit = _mm512_loadu_ps(rows[v].unit);
        const __m512 bias = ends && p->bias ? _mm512_maskz_loadu_ps(there, p->bias + own) : _mm512_setzero_ps();
        float *out = p->out + (block * TOKENS + token) * all + own;
#pragma GCC unroll 6
        for (int t = 0; t < TILE_TOKENS; t++) {
            __m512 before = bias;
            if (!begins)
                before = _mm512_add_ps(before, _mm512_maskz_loadu_ps(t < left ? there : 0, out + t * all));
            total[v][t] = _mm512_fmadd_ps(total[v][t], unit, before);
        }
#pragma GCC unroll 6
        for (int t = 0; t < TILE_TOKENS; t++)
            _mm512_mask_storeu_ps(out + t * all, t < left ? there : 0, total[v][t]);
    }
}

/* A chunk of `count` vectors of rows by all tokens, with one digit. */
INLINE void multiply_tiles(const many_t *p, int64_t row, int64_t count, const rows_t *rows, int64_t first,
                           int64_t runs)
{
    const int64_t tokens = p->given.tokens;
    for (int64_t near = 0; near < tokens; near += NEAR * TOKENS)
        for (int64_t i = 0; i < count; i += TILE_ROWS)
            for (int64_t at = near; at < near + NEAR * TOKENS && at < tokens; at += TILE_TOKENS)
                multiply_tile(p, row + i * ROWS, rows + i, first, runs, at / TOKENS, (int)(at % TOKENS));
}

/* Claim neighbouring vectors of rows, starting at number `first`, and return how many: fewer when few are left, so
 * that all threads end at about the same time. */
static int64_t claim(many_t *p, int64_t *first)
{
    const int64_t all = (p->weight->rows + ROWS - 1) / ROWS;
    int64_t count;
    *first = __atomic_load_n(&p->next_vector, __ATOMIC_RELAXED);
    do {
        if (*first >= all)
            return 0;
        count = (all - *first) / (SHARES * p->threads * TILE_ROWS) * TILE_ROWS;
        count = count < TILE_ROWS ? TILE_ROWS : count > PANEL ? PANEL : count;
    } while (!__atomic_compare_exchange_n(&p->next_vector, first, *first + count, 0, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return all - *first < count ? all - *first : count;
}

INLINE void work_through(many_t *p, rows_t *rows, int digits)
{
    const coded_t *w = p->weight;
    const int64_t blocks = (p->given.tokens + TOKENS - 1) / TOKENS, all = p->given.runs;
    int64_t count;
    for (int64_t vector; (count = claim(p, &vector));) {
        const int64_t row = vector * ROWS;
        const int64_t made = (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; /* a tile's rows may exist in part */
        for (int64_t first = 0; first < all; first += CHUNK) {
            const int64_t runs = all - first < CHUNK ? all - first : CHUNK;
            for (int64_t i = 0; i < made; i++) {
                unpack_rows(w, row + i * ROWS, first, runs, rows + i);
                if (digits == 1)
                    pair_scales(rows + i, runs, __builtin_ctz((unsigned)w->group / RUN));
            }
            if (digits == 1)
                multiply_tiles(p, row, count, rows, first, runs);
            else
                for (int64_t block = 0; block < blocks; block++)
                    for (int64_t i = 0; i < count; i++)
                        multiply_block(p, row + i * ROWS, rows + i, first, runs, block);
        }
    }
}

/* A thread's share. Each call of `work_through` is compiled for its constants. */
static void work(void *data)
{
    many_t *p = data;
    const int digits = p->given.digits;
    rows_t *rows = p->unpacked + __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED) * PANEL;
    if (digits == 1)
        work_through(p, rows, 1);
    else
        work_through(p, rows, DIGITS);
}

/* The product, if the weight has codes of 4 bits in groups of at least 32. `digits` is 1 or 3. Returns 0, with
 * `out` undefined, if values of `given` are not finite or too large, or if there is no memory. */
int skim_coded_many(const coded_t *weight, const float *given, const float *bias, float *out, int64_t tokens,
                    int digits, team_t team, unsigned threads)
{
    if (!tokens)
        return 1;
    const int64_t blocks = (tokens + TOKENS - 1) / TOKENS, runs = weight->columns / RUN;
    const int64_t each = runs * TOKENS; /* of a block */
    const size_t last = (size_t)(each * RUN * digits);
    const size_t bytes = last * (size_t)blocks, units = (size_t)(blocks * each) * sizeof(float);
    const size_t unpacked = sizeof(rows_t) * PANEL * threads;
    uint8_t *memory = aligned_alloc(64, (unpacked + bytes + 2 * units + 63) / 64 * 64);
    if (!memory)
        return 0;
    float *steps = (float *)(memory + unpacked + bytes), *sums = steps + blocks * each;
    memset(memory + unpacked + bytes - last, 0, last); /* the last block may have fewer tokens */
    memset(steps + (blocks - 1) * each, 0, (size_t)each * sizeof(float));
    memset(sums + (blocks - 1) * each, 0, (size_t)each * sizeof(float));
    many_t p = {.given = {.given = given, .tokens = tokens, .runs = runs, .digits = digits,
                          .bytes = memory + unpacked, .steps = steps, .sums = sums, .starts = (int32_t *)sums},
                .weight = weight, .bias = bias, .out = out, .unpacked = (rows_t *)memory, .threads = threads};
    run_shared(team, threads, prepare, &p.given);
    if (!p.given.misfit)
        run_shared(team, threads, work, &p);
    free(memory);
    return !p.given.misfit;
}
