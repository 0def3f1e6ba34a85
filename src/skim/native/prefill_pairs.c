/* Attention of prefill chunks over a paged pool of float32 keys and values, rounded to bfloat16 numbers, by
 * instructions that multiply pairs of them (AVX-512 BF16).
 *
 * `prefill.h` has the arguments, the panels and the blocks, and says what is promised. One instruction
 * multiplies a pair of numbers in every lane and adds both products in float32: twice the work of a fused
 * multiply-add. A pair is two neighbouring numbers of a query and a key, or the weights of two neighbouring
 * keys and their values. A block converts each tile of keys and values once. The row of a key within a tile
 * is its slot modulo TILE, so the same keys are paired wherever a tile begins. Sums of weights are not
 * rounded.
 */

#include <stdint.h>
#include <string.h>

enum {
    VECTORS = 3, /* of a panel: with SCALARS, their products' sums fill the registers */
    PANELS = 8,  /* of a block, at most */
    TILE = 64,   /* keys whose scores are held at a time */
};

#include "prefill.h"

#if !defined(__AVX512BF16__) || !defined(__AVX512BW__)
#error "this processor multiplies no pairs of bfloat16 numbers"
#endif

#include "prefill_bfloat16.h"

enum {
    SCALARS = 8, /* keys, or values' columns, that are multiplied with a panel at once */
};

/* ---- Scratch space. Pairs are words of 32 bits. */

typedef struct {
    int64_t key_depths; /* multiples of DEPTH in key_dim, rounded up: a vector of pairs each */
    int64_t columns;    /* value_dim, rounded up to a multiple of LANES */
    int32_t *keys;      /* [TILE, key_depths * LANES] */
    int32_t *values;    /* [TILE / 2, columns] */
    float *scores;      /* [TILE, WIDTH]; later the pairs of weights, [TILE / 2, WIDTH] */
    float *queries[PANELS], *sums[PANELS]; /* pairs, [key_depths * LANES, WIDTH]; and [columns, WIDTH] */
} scratch_t;

typedef struct {
    const float *keys[TILE], *values[TILE]; /* by row; NULL if no panel reads it */
} tile_t;

/* Returns the bytes in use. */
static int64_t lay_out(int64_t key_dim, int64_t value_dim, uintptr_t from, scratch_t *s)
{
    const uintptr_t start = from;
    const int64_t row = WIDTH * sizeof(float);
    s->key_depths = (key_dim + DEPTH - 1) / DEPTH;
    s->columns = (value_dim + LANES - 1) / LANES * LANES;
    s->keys = take(&from, TILE * s->key_depths * CACHE_LINE);
    s->values = take(&from, TILE / 2 * s->columns * (int64_t)sizeof(int32_t));
    s->scores = take(&from, TILE * row);
    for (int i = 0; i < PANELS; i++) {
        s->queries[i] = take(&from, s->key_depths * LANES * row);
        s->sums[i] = take(&from, s->columns * row);
    }
    return (int64_t)(from - start);
}

int64_t skim_prefill_scratch(int64_t key_dim, int64_t value_dim)
{
    scratch_t s;
    return (lay_out(key_dim, value_dim, 0, &s) + CACHE_LINE) / (int64_t)sizeof(float);
}

/* ---- Conversion. */

/* Each lane: a number of `even` and one of `odd`. */
INLINE __m512i pairs_of(__m512 even, __m512 odd)
{
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i high = _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16);
    return _mm512_permutexvar_epi16(_mm512_or_si512(low, high), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

INLINE __m512bh repeated(int32_t pair) { return (__m512bh)_mm512_set1_epi32(pair); }

/* Add the panel's queries, [key_depths * LANES, WIDTH], and clear its sums. */
static void begin_panel(const prefill_t *p, const scratch_t *s, const chunk_t *chunk, int64_t kv_head,
                        int64_t first, int64_t count, panel_t *panel)
{
    const __m512 scale = _mm512_set1_ps((float)(p->scale * (double)LOG2_E));
    begin_lanes(p, chunk, kv_head, first, count, panel);
    for (int64_t depth = 0; depth < s->key_depths; depth++)
        for (int i = 0; i < panel->vectors; i++) {
            __m512i pairs[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                const int64_t left = p->key_dim - depth * DEPTH;
                const float *from = query_of(p, panel, i * LANES + lane) + depth * DEPTH;
                put_row(1, some_floats(from, left) * scale, some_floats(from + LANES, left - LANES) * scale,
                        (char *)(pairs + lane));
            }
            transpose(pairs);
            for (int row = 0; row < LANES; row++)
                _mm512_store_si512(panel->query + (depth * LANES + row) * WIDTH + i * LANES, pairs[row]);
        }
    memset(panel->out, 0, (size_t)(s->columns * WIDTH) * sizeof(float));
}

/* Rows that no panel reads become 0. */
static void convert(const prefill_t *p, const tile_t *tile, const scratch_t *s)
{
    for (int row = 0; row < TILE; row++)
        for (int64_t depth = 0; depth < s->key_depths; depth++) {
            const float *from = tile->keys[row] ? tile->keys[row] + depth * DEPTH : p->query;
            const int64_t left = tile->keys[row] ? p->key_dim - depth * DEPTH : 0;
            put_row(1, some_floats(from, left), some_floats(from + LANES, left - LANES),
                    (char *)(s->keys + (row * s->key_depths + depth) * LANES));
        }
    for (int row = 0; row < TILE; row += 2)
        for (int64_t column = 0; column < s->columns; column += LANES) {
            __m512 both[2];
            for (int i = 0; i < 2; i++) {
                const float *from = tile->values[row + i] ? tile->values[row + i] + column : p->query;
                both[i] = some_floats(from, tile->values[row + i] ? p->value_dim - column : 0);
            }
            _mm512_store_si512(s->values + row / 2 * s->columns + column, pairs_of(both[0], both[1]));
        }
}

/* ---- A tile and a panel. */

/* Scores of SCALARS keys, and the largest so far. to: [SCALARS, WIDTH] */
INLINE void score(int vectors, int64_t pairs, const int32_t *query, const int32_t *keys, int64_t stride,
                  float *to, vec *top)
{
    __m512 sums[SCALARS][VECTORS];
    for (int j = 0; j < SCALARS; j++)
        for (int i = 0; i < vectors; i++)
            sums[j][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < pairs; d++) {
        __m512bh own[VECTORS];
        for (int i = 0; i < vectors; i++)
            own[i] = (__m512bh)_mm512_loadu_si512(query + d * WIDTH + i * LANES);
        for (int j = 0; j < SCALARS; j++)
            for (int i = 0; i < vectors; i++)
                sums[j][i] = _mm512_dpbf16_ps(sums[j][i], own[i], repeated(keys[j * stride + d]));
    }
    for (int j = 0; j < SCALARS; j++)
        for (int i = 0; i < vectors; i++) {
            *(vec *)(to + j * WIDTH + i * LANES) = (vec)sums[j][i];
            top[i] = larger((vec)sums[j][i], top[i]);
        }
}

/* Turn the scores of rows `first` to `end` into pairs of weights relative to the largest so far, `top`.
 * shrink: the factors of the earlier sums */
INLINE void softmax(int vectors, panel_t *panel, int first, int end, float *scores, const vec *top,
                    vec *shrink)
{
    vec sum[VECTORS];
    for (int i = 0; i < vectors; i++)
        sum[i] = (vec){0};
    for (int j = first; j < end; j += 2)
        for (int i = 0; i < vectors; i++) {
            const float *from = scores + j * WIDTH + i * LANES;
            const vec even = exp2_lanes(*(const vec *)from - top[i]);
            const vec odd = exp2_lanes(*(const vec *)(from + WIDTH) - top[i]);
            _mm512_storeu_si512(scores + j / 2 * WIDTH + i * LANES, pairs_of((__m512)even, (__m512)odd));
            sum[i] += even + odd;
        }
    for (int i = 0; i < vectors; i++) {
        shrink[i] = exp2_lanes(panel->maxima[i] - top[i]);
        panel->sums[i] = panel->sums[i] * shrink[i] + sum[i];
        panel->maxima[i] = top[i];
    }
}

/* Add SCALARS columns of the weighted values. weights and values: pairs of rows, [count, WIDTH] and
 * [count, stride]; out: [SCALARS, WIDTH] */
INLINE void add_columns(int vectors, int count, const float *weights, const int32_t *values, int64_t stride,
                        const vec *shrink, float *out)
{
    __m512 sums[SCALARS][VECTORS];
    for (int c = 0; c < SCALARS; c++)
        for (int i = 0; i < vectors; i++)
            sums[c][i] = (__m512)(*(const vec *)(out + c * WIDTH + i * LANES) * shrink[i]);
    for (int j = 0; j < count; j++) {
        __m512bh own[VECTORS];
        for (int i = 0; i < vectors; i++)
            own[i] = (__m512bh)_mm512_loadu_si512(weights + j * WIDTH + i * LANES);
        for (int c = 0; c < SCALARS; c++)
            for (int i = 0; i < vectors; i++)
                sums[c][i] = _mm512_dpbf16_ps(sums[c][i], own[i], repeated(values[j * stride + c]));
    }
    for (int c = 0; c < SCALARS; c++)
        for (int i = 0; i < vectors; i++)
            *(vec *)(out + c * WIDTH + i * LANES) = (vec)sums[c][i];
}

/* `slot` is that of the tile's first row. The panel reads some of its rows. */
INLINE void attend_tile(int vectors, const prefill_t *p, panel_t *panel, const scratch_t *s, int32_t slot)
{
    const int32_t from = panel->lowest - slot, until = panel->highest - slot;
    const int first = from > 0 ? from / SCALARS * SCALARS : 0;
    const int end = until < TILE ? (until / SCALARS + 1) * SCALARS : TILE;
    const int64_t stride = s->key_depths * LANES;
    vec top[VECTORS], shrink[VECTORS];
    for (int i = 0; i < vectors; i++)
        top[i] = panel->maxima[i];
    for (int row = first; row < end; row += SCALARS)
        score(vectors, p->key_dim / 2, (const int32_t *)panel->query, s->keys + row * stride, stride,
              s->scores + row * WIDTH, top);
    if (panel->all_since > slot + first || panel->all_until < slot + end - 1) {
        for (int i = 0; i < vectors; i++)
            top[i] = panel->maxima[i];
        mask(vectors, panel, slot + first, end - first, s->scores + first * WIDTH, top);
    }
    softmax(vectors, panel, first, end, s->scores, top, shrink);
    for (int64_t column = 0; column < p->value_dim; column += SCALARS)
        add_columns(vectors, (end - first) / 2, s->scores + first / 2 * WIDTH,
                    s->values + first / 2 * s->columns + column, s->columns, shrink,
                    panel->out + column * WIDTH);
}

/* ---- Blocks of panels. */

static void attend_block(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first,
                         int64_t stacked, float *scratch)
{
    scratch_t s;
    lay_out(p->key_dim, p->value_dim, ((uintptr_t)scratch + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE, &s);
    panel_t panels[PANELS];
    int count = 0;
    for (; count < p->panels && first + count * WIDTH < stacked; count++) {
        panel_t *panel = panels + count;
        panel->query = s.queries[count];
        panel->out = s.sums[count];
        begin_panel(p, &s, chunk, kv_head, first + count * WIDTH, stacked - first - count * WIDTH, panel);
    }
    const int64_t begin = panels[0].lowest, end = panels[count - 1].highest + 1;
    cursor_t at = {p->runs + chunk->runs_at, begin - chunk->first};
    tile_t tiles[2], *tile = &tiles[0], *next = &tiles[1];
    next_rows(p, kv_head, &at, begin, end, tile->keys, tile->values);
    for (int64_t slot = begin - begin % TILE; slot < end; slot += TILE) {
        const int64_t following = slot + TILE;
        if (following < end)
            next_rows(p, kv_head, &at, following, end, next->keys, next->values);
        convert(p, tile, &s);
        for (int i = 0; i < count; i++) {
            panel_t *panel = panels + i;
            if (panel->highest < slot || panel->lowest >= following)
                continue;
            if (panel->vectors == 3)
                attend_tile(3, p, panel, &s, (int32_t)slot);
            else if (panel->vectors == 2)
                attend_tile(2, p, panel, &s, (int32_t)slot);
            else
                attend_tile(1, p, panel, &s, (int32_t)slot);
        }
        tile_t *const used = tile;
        tile = next;
        next = used;
    }
    for (int i = 0; i < count; i++)
        end_panel(p, panels + i);
}

static void work(void *data) { attend_blocks(data); }
