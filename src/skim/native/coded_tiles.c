/* Products of coded weights with many tokens, by tile registers (AMX).
 *
 * Codes are restored to floats, and floats become sums of bfloat16 numbers (`bfloat16.h`). With three levels, products
 * are as precise as those of floats. Forwards that only rank tokens use one level. Nothing is scaled after a product.
 *
 * A thread claims a panel of rows. It restores a chunk of their columns and multiplies it with all tokens. A token's
 * result is bit-identical in any batch and with any number of threads.
 */

#include <stdlib.h>

#include "amx.h"

#if !defined(__AMX_BF16__) || !defined(__AMX_TILE__) || !defined(__AVX512BF16__)
#error "this processor has no tile registers"
#endif

#include "bfloat16.h"
#include "coded.h"

enum {
    PANEL = 8,   /* times ROWS rows: the most that a thread claims; a chunk of them fits the second cache */
    SHARES = 4,  /* claims per thread, if that takes smaller panels */
    CHUNK = 32,  /* runs of columns that are restored together */
    GROUPS = 64, /* most groups in a chunk */
};

typedef struct {
    const coded_t *weight;
    const float *given; /* [tokens, columns] */
    const float *bias;  /* [rows], or NULL */
    float *out;         /* [tokens, rows] */
    int64_t tokens, runs;
    int levels;        /* 1 or 3 */
    char *activations; /* tiles: [token tiles, runs, levels]; the number of token tiles is even */
    char *restored;    /* tiles: [threads, panel, CHUNK, levels] */
    float *sums;       /* tiles: [threads, token tiles, panel] */
    int64_t panel;     /* times ROWS rows that a thread claims; even */
    int64_t next_tile, next_panel, next_thread;
    int misfit; /* set if activations are not finite, or too large */
} tiles_t;

int skim_tiles_permitted(void) { return amx_permitted(); }

/* ---- Activations. */

/* A tile of tokens. Tokens that do not exist are 0. */
INLINE void split_tokens(tiles_t *p, int64_t tile, int levels)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const int64_t left = p->tokens - tile * ROWS, count = left < ROWS ? left : ROWS, columns = p->weight->columns;
    const float *from = p->given + tile * ROWS * columns;
    char *to = p->activations + tile * p->runs * levels * TILE_BYTES;
    __m512i most = _mm512_setzero_si512(); /* as integers: so NaN is the largest */
    for (int64_t run = 0; run < p->runs; run++, to += levels * TILE_BYTES)
        for (int64_t t = 0; t < ROWS; t++) {
            __m512 first = _mm512_setzero_ps(), second = first;
            if (t < count) {
                first = _mm512_loadu_ps(from + t * columns + run * RUN);
                second = _mm512_loadu_ps(from + t * columns + run * RUN + RUN / 2);
                most = _mm512_max_epu32(most, _mm512_and_epi32(_mm512_castps_si512(first), magnitude));
                most = _mm512_max_epu32(most, _mm512_and_epi32(_mm512_castps_si512(second), magnitude));
            }
            put_row(levels, first, second, to + t * 2 * DEPTH);
        }
    if (!(float_of_bits(_mm512_reduce_max_epu32(most)) <= 1e30f))
        __atomic_store_n(&p->misfit, 1, __ATOMIC_RELAXED);
}

INLINE int64_t token_tiles(int64_t tokens) { return (tokens + 2 * ROWS - 1) / (2 * ROWS) * 2; }

static void split(void *data)
{
    tiles_t *p = data;
    for (int64_t tile; (tile = __atomic_fetch_add(&p->next_tile, 1, __ATOMIC_RELAXED)) < token_tiles(p->tokens);)
        if (p->levels == 1)
            split_tokens(p, tile, 1);
        else
            split_tokens(p, tile, 3);
}

/* ---- Weights. */

/* `runs` runs, starting at number `first`, of ROWS rows starting at `row`. Rows that do not exist are copies of the last
 * one. `first` is a multiple of CHUNK. */
INLINE void restore_bits(const coded_t *w, int64_t row, int64_t first, int64_t runs, int levels, int bits, int fine,
                         char *to)
{
    const int64_t column = first * RUN, groups = (runs * RUN + w->group - 1) / w->group;
    const int64_t high = high_bytes(w->columns, bits), run_bytes = bits >= 8 ? RUN : RUN / 2;
    const int shift = fine ? 0 : __builtin_ctz((unsigned)w->group / RUN);
    float scale[ROWS][GROUPS], offset[ROWS][GROUPS];
    const uint8_t *lows[ROWS], *highs[ROWS];
    for (int64_t r = 0; r < ROWS; r++) {
        const int64_t own = row + r < w->rows ? row + r : w->rows - 1;
        lows[r] = w->low + own * low_bytes(w) + first * run_bytes;
        highs[r] = w->high + own * high + first * high_bytes(RUN, bits);
        read_groups(w, (own * w->columns + column) / w->group, groups, scale[r], offset[r]);
    }
    for (int64_t run = 0; run < runs; run++, to += levels * TILE_BYTES) {
        _Alignas(64) char split_rows[3 * TILE_BYTES];
        for (int r = 0; r < ROWS; r++) {
            vec values[PARTS];
            restore_run(lows[r], highs[r], scale[r], offset[r], run, bits, fine, shift, values);
            put_row(levels, (__m512)values[0], (__m512)values[1], split_rows + r * 2 * DEPTH);
        }
        for (int level = 0; level < levels; level++) {
            __m512i words[ROWS]; /* pairs of columns */
            for (int r = 0; r < ROWS; r++)
                words[r] = _mm512_load_si512(split_rows + level * TILE_BYTES + r * 2 * DEPTH);
            transpose(words);
            for (int r = 0; r < ROWS; r++)
                _mm512_store_si512(to + level * TILE_BYTES + r * 2 * DEPTH, words[r]);
        }
    }
}

INLINE void restore_rows(const coded_t *w, int64_t row, int64_t first, int64_t runs, int levels, char *to)
{
#define WITH(bits)                                                                                                     \
    case bits:                                                                                                         \
        if (w->group == RUN / 2)                                                                                       \
            restore_bits(w, row, first, runs, levels, bits, 1, to);                                                    \
        else                                                                                                           \
            restore_bits(w, row, first, runs, levels, bits, 0, to);                                                    \
        return
    switch (w->bits) {
        WITH(4);
        WITH(5);
        WITH(6);
        WITH(8);
        WITH(EIGHT_BIT_FLOATS);
    }
#undef WITH
}

/* ---- Products: 2 tiles of tokens by 2 of rows. Registers 0 to 3 hold sums, 4 and 5 tokens, 6 and 7 rows. */

INLINE void load_tokens(const char *one, const char *other)
{
    LOAD(4, one, 2 * DEPTH);
    LOAD(5, other, 2 * DEPTH);
}

INLINE void load_rows(const char *one, const char *other)
{
    LOAD(6, one, 2 * DEPTH);
    LOAD(7, other, 2 * DEPTH);
}

INLINE void add_products(void)
{
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

/* tokens, rows: tiles, [runs, levels], of the first of two; the second begins `tokens_apart` or `rows_apart` after it */
INLINE void multiply(const char *tokens, int64_t tokens_apart, const char *rows, int64_t rows_apart, int64_t runs, int levels)
{
    for (int64_t run = 0; run < runs; run++, tokens += levels * TILE_BYTES, rows += levels * TILE_BYTES) {
        load_tokens(tokens, tokens + tokens_apart);
        for (int level = levels - 1; level >= 0; level--) {
            load_rows(rows + level * TILE_BYTES, rows + level * TILE_BYTES + rows_apart);
            add_products();
        }
        for (int level = 1; level < levels; level++) { /* the products of all levels would be smaller than rounding */
            load_tokens(tokens + level * TILE_BYTES, tokens + level * TILE_BYTES + tokens_apart);
            for (int other = 0; other < levels - level; other++) {
                if (level > 1 || other > 0)
                    load_rows(rows + other * TILE_BYTES, rows + other * TILE_BYTES + rows_apart);
                add_products();
            }
        }
    }
}

/* Write a tile of sums to its place in `out`, which may have fewer rows or tokens. */
INLINE void write_sums(const tiles_t *p, const float *sums, int64_t token, int64_t row)
{
    const int64_t all = p->weight->rows, rows = all - row, left = p->tokens - token, tokens = left < ROWS ? left : ROWS;
    if (rows <= 0)
        return;
    const __mmask16 there = rows < ROWS ? (__mmask16)((1u << rows) - 1) : 0xffff;
    const __m512 bias = p->bias ? _mm512_maskz_loadu_ps(there, p->bias + row) : _mm512_setzero_ps();
    for (int64_t t = 0; t < tokens; t++)
        _mm512_mask_storeu_ps(p->out + (token + t) * all + row, there, _mm512_add_ps(_mm512_load_ps(sums + t * ROWS), bias));
}

/* A chunk of 2 tiles of tokens by 2 of rows. sums: 2 tiles of the first tokens; the others' begin `apart` floats later */
INLINE void add_chunk(const char *tokens, int64_t tokens_apart, const char *rows, int64_t runs, int levels, int begins,
                      float *sums, int64_t apart)
{
    if (begins) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        LOAD(0, sums, 2 * DEPTH);
        LOAD(1, sums + ROWS * ROWS, 2 * DEPTH);
        LOAD(2, sums + apart, 2 * DEPTH);
        LOAD(3, sums + apart + ROWS * ROWS, 2 * DEPTH);
    }
    multiply(tokens, tokens_apart, rows, CHUNK * levels * TILE_BYTES, runs, levels);
    _tile_stored(0, sums, 2 * DEPTH);
    _tile_stored(1, sums + ROWS * ROWS, 2 * DEPTH);
    _tile_stored(2, sums + apart, 2 * DEPTH);
    _tile_stored(3, sums + apart + ROWS * ROWS, 2 * DEPTH);
}

/* A panel of `count` times ROWS rows starting at `row`, restored chunk by chunk. sums: tiles, [token tiles, panel] */
INLINE void work_panel(const tiles_t *p, int64_t row, int64_t count, char *restored, float *sums, int levels)
{
    const int64_t tile_bytes = levels * TILE_BYTES, apart = p->panel * ROWS * ROWS;
    for (int64_t first = 0; first < p->runs; first += CHUNK) {
        const int64_t left = p->runs - first, runs = left < CHUNK ? left : CHUNK;
        for (int64_t i = 0; i < count; i++)
            restore_rows(p->weight, row + i * ROWS, first, runs, levels, restored + i * CHUNK * tile_bytes);
        for (int64_t tile = 0; tile < token_tiles(p->tokens); tile += 2)
            for (int64_t i = 0; i < count; i += 2) {
                float *own = sums + tile * apart + i * ROWS * ROWS;
                add_chunk(p->activations + (tile * p->runs + first) * tile_bytes, p->runs * tile_bytes,
                          restored + i * CHUNK * tile_bytes, runs, levels, first == 0, own, apart);
                for (int j = 0; j < 4 && runs == left; j++)
                    write_sums(p, own + j / 2 * apart + j % 2 * ROWS * ROWS, (tile + j / 2) * ROWS, row + (i + j % 2) * ROWS);
            }
    }
}

static void work(void *data)
{
    tiles_t *p = data;
    const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED), rows = p->weight->rows;
    char *restored = p->restored + thread * p->panel * CHUNK * p->levels * TILE_BYTES;
    float *sums = p->sums + thread * token_tiles(p->tokens) * p->panel * ROWS * ROWS;
    begin_tiles();
    for (int64_t row; (row = p->panel * ROWS * __atomic_fetch_add(&p->next_panel, 1, __ATOMIC_RELAXED)) < rows;) {
        const int64_t left = (rows - row + 2 * ROWS - 1) / (2 * ROWS) * 2, count = left < p->panel ? left : p->panel;
        if (p->levels == 1)
            work_panel(p, row, count, restored, sums, 1);
        else
            work_panel(p, row, count, restored, sums, 3);
    }
    _tile_release();
}

/* The product. `levels` is 1 or 3, and `skim_tiles_permitted` has returned 1. Returns 0, with `out` undefined, if values
 * of `given` are not finite or too large, or if there is no memory. */
int skim_coded_tiles(const coded_t *weight, const float *given, const float *bias, float *out, int64_t tokens,
                     int levels, team_t team, unsigned threads)
{
    const int64_t runs = weight->columns / RUN;
    const int64_t shares = weight->rows / (SHARES * ROWS * (int64_t)threads) / 2 * 2;
    const int64_t panel = shares < 2 ? 2 : shares < PANEL ? shares : PANEL;
    const size_t each = (size_t)(levels * TILE_BYTES);
    const size_t activations = (size_t)(token_tiles(tokens) * runs) * each, restored = (size_t)(panel * CHUNK) * each;
    const size_t sums = (size_t)(token_tiles(tokens) * panel) * TILE_BYTES;
    char *memory = aligned_alloc(64, activations + (restored + sums) * threads);
    if (!memory)
        return 0;
    tiles_t p = {.weight = weight, .given = given, .bias = bias, .out = out, .tokens = tokens, .runs = runs,
                 .levels = levels, .activations = memory, .restored = memory + activations,
                 .sums = (float *)(memory + activations + restored * threads), .panel = panel};
    run_shared(team, threads, split, &p);
    if (!p.misfit)
        run_shared(team, threads, work, &p);
    free(memory);
    return !p.misfit;
}
