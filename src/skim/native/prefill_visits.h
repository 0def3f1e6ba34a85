/* Visits: one panel of queries and one tile of keys, by tile registers.
 *
 * A visit has three stages: scores, their softmax, and weighted values. The first and the last are products of tiles.
 * They execute at the same time as the softmax, which is vector code, if the processor finds both within a few hundred
 * instructions. So the stages of three visits alternate in small shares. A visit's result does not depend on that.
 */

#pragma once

#include "amx.h"
#include "bfloat16.h"
#include "prefill.h"

enum {
    LEVELS = 3,                        /* of a float */
    FLOAT_BYTES = LEVELS * TILE_BYTES, /* of a tile of floats */
    ROW_STRIDE = WIDTH * sizeof(float),
};

/* Scratch space of a thread. Each [...] of bytes is of tiles of floats, level by level. */

typedef struct {
    int64_t key_depths, value_pairs; /* multiples of DEPTH in key_dim and in value_dim, rounded up */
    char *keys;                      /* [key_depths, TILE / ROWS] */
    char *values;                    /* [value_pairs, TILE / DEPTH, 2] */
    char *weights[2];                /* [TILE / DEPTH, VECTORS] */
    float *scores[2];                /* [TILE, WIDTH] */
    char *queries[PANELS];           /* [key_depths, VECTORS] */
    float *sums[PANELS];             /* [value_pairs * DEPTH, WIDTH] */
} scratch_t;

typedef struct {
    const float *keys[TILE], *values[TILE]; /* by row; NULL if no panel reads it, or if it is unfit */
    int unfit[TILE], any_unfit;             /* rows whose numbers bfloat16 does not hold */
} tile_t;

typedef struct {
    panel_t *panel;
    int columns;      /* of the panel */
    int first, end;   /* the parts of the tile that the panel reads, DEPTH keys each */
    float *scores;    /* [TILE, WIDTH] */
    char *weights;    /* [TILE / DEPTH, VECTORS] */
    vec top[VECTORS], even[VECTORS], odd[VECTORS]; /* the largest scores so far, and sums of weights */
    int step, steps;  /* of the softmax: pairs of keys of a column */
    int due, rate;    /* 1 / 65536 of the steps that are due, and of those for each group of products */
} visit_t;

/* ---- The softmax. */

/* The largest scores so far. slot: of the tile's first row */
static void begin_softmax(const tile_t *tile, int32_t slot, visit_t *visit)
{
    panel_t *panel = visit->panel;
    const int columns = visit->columns, first = visit->first * DEPTH, end = visit->end * DEPTH;
    const int64_t until = panel->all_until - (int64_t)slot + 1;
    int from = panel->all_since > slot + first ? panel->all_since - slot : first; /* every lane reads these rows, */
    from = (from + 1) / 2 * 2 < end ? (from + 1) / 2 * 2 : end;
    int to = until < end ? (int)until / 2 * 2 : end; /* and those between */
    to = to > from ? to : from;
    visit->step = first / 2 * columns;
    visit->steps = end / 2 * columns;
    for (int i = 0; i < columns; i++) {
        visit->even[i] = visit->odd[i] = (vec){0};
        visit->top[i] = panel->maxima[i];
    }
    for (int j = first; tile->any_unfit && j < end; j++)
        for (int lane = 0; tile->unfit[j] && lane < columns * LANES; lane++)
            visit->scores[j * WIDTH + lane] = NAN;
    mask(columns, panel, slot + first, from - first, visit->scores + first * WIDTH, visit->top);
    mask(columns, panel, slot + to, end - to, visit->scores + to * WIDTH, visit->top);
    for (int i = 0; i < columns; i++) {
        vec one = visit->top[i], other = one;
        for (int j = from; j < to; j += 2) {
            const float *at = visit->scores + j * WIDTH + i * LANES;
            one = larger(*(const vec *)at, one);
            other = larger(*(const vec *)(at + WIDTH), other);
        }
        visit->top[i] = larger(one, other);
    }
}

/* The scores of a pair of keys in a column become weights relative to the largest so far. */
INLINE void weigh_pair(int levels, const visit_t *visit, int row, int i, vec top, vec *even, vec *odd)
{
    const float *from = visit->scores + 2 * row * WIDTH + i * LANES;
    const vec one = exp2_lanes(*(const vec *)from - top), other = exp2_lanes(*(const vec *)(from + WIDTH) - top);
    *even += one;
    *odd += other;
    put_pairs(levels, (__m512)one, (__m512)other,
              visit->weights + (row / ROWS * VECTORS + i) * FLOAT_BYTES + row % ROWS * CACHE_LINE);
}

INLINE void weigh_step(int levels, visit_t *visit)
{
    const int step = visit->step++, two = visit->columns == 2, i = two ? step & 1 : 0, row = two ? step >> 1 : step;
    weigh_pair(levels, visit, row, i, visit->top[i], &visit->even[i], &visit->odd[i]);
}

/* All steps at once, with the sums in registers. */
INLINE void weigh(int levels, visit_t *visit)
{
    for (int i = 0; i < visit->columns; i++) {
        const vec top = visit->top[i];
        vec even = {0}, odd = {0};
        for (int row = visit->first * ROWS; row < visit->end * ROWS; row++)
            weigh_pair(levels, visit, row, i, top, &even, &odd);
        visit->even[i] = even;
        visit->odd[i] = odd;
    }
}

/* Shrink the sums of earlier tiles. */
static void end_softmax(const scratch_t *s, visit_t *visit)
{
    panel_t *panel = visit->panel;
    for (int i = 0; i < visit->columns; i++) {
        const vec shrink = exp2_lanes(panel->maxima[i] - visit->top[i]);
        panel->sums[i] = panel->sums[i] * shrink + (visit->even[i] + visit->odd[i]);
        if (_mm512_cmp_ps_mask((__m512)visit->top[i], (__m512)panel->maxima[i], _CMP_NEQ_UQ))
            for (int64_t d = 0; d < s->value_pairs * DEPTH; d++)
                *(vec *)(panel->out + d * WIDTH + i * LANES) *= shrink;
        panel->maxima[i] = visit->top[i];
    }
}

/* ---- Products of tiles. Registers 0 to 3 hold sums, 4 and 5 left factors, 6 and 7 right factors. */

/* Products of the loaded tiles, and the steps of the softmax that are due. */
INLINE void add_products(int levels, int columns, visit_t *weighed)
{
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (columns > 1) {
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    for (weighed->due += weighed->rate; weighed->step < weighed->due >> 16;)
        weigh_step(levels, weighed);
}

INLINE void load_left(const char *tiles, int level)
{
    LOAD(4, tiles + level * TILE_BYTES, CACHE_LINE);
    LOAD(5, tiles + FLOAT_BYTES + level * TILE_BYTES, CACHE_LINE);
}

INLINE void load_right(int columns, const char *tiles, int level)
{
    LOAD(6, tiles + level * TILE_BYTES, CACHE_LINE);
    if (columns > 1)
        LOAD(7, tiles + FLOAT_BYTES + level * TILE_BYTES, CACHE_LINE);
}

/* Add the products of two tiles of floats and `columns` others to the sums, the smallest first. */
INLINE void multiply(int levels, int columns, const char *left, const char *right, visit_t *weighed)
{
    load_right(columns, right, 0);
    for (int level = levels - 1; level >= 0; level--) {
        load_left(left, level);
        add_products(levels, columns, weighed);
    }
    for (int level = levels - 1; level > 0; level--) {
        load_right(columns, right, level);
        add_products(levels, columns, weighed);
    }
    if (levels == 3) {
        load_left(left, 1);
        add_products(levels, columns, weighed);
    }
}

INLINE void load_sums(int columns, const float *from)
{
    LOAD(0, from, ROW_STRIDE);
    LOAD(2, from + ROWS * WIDTH, ROW_STRIDE);
    if (columns > 1) {
        LOAD(1, from + LANES, ROW_STRIDE);
        LOAD(3, from + ROWS * WIDTH + LANES, ROW_STRIDE);
    }
}

INLINE void store_sums(int columns, float *to)
{
    _tile_stored(0, to, ROW_STRIDE);
    _tile_stored(2, to + ROWS * WIDTH, ROW_STRIDE);
    if (columns > 1) {
        _tile_stored(1, to + LANES, ROW_STRIDE);
        _tile_stored(3, to + ROWS * WIDTH + LANES, ROW_STRIDE);
    }
}

/* Scores of a visit, while those of another become weights. */
INLINE void score(int levels, const scratch_t *s, const visit_t *visit, visit_t *weighed)
{
    for (int part = visit->first; part < visit->end; part++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t depth = 0; depth < s->key_depths; depth++)
            multiply(levels, visit->columns, s->keys + (depth * (TILE / ROWS) + part * 2) * FLOAT_BYTES,
                     (const char *)visit->panel->query + depth * VECTORS * FLOAT_BYTES, weighed);
        store_sums(visit->columns, visit->scores + part * DEPTH * WIDTH);
    }
}

/* Add the weighted values of a visit, while the scores of another become weights. */
INLINE void add_values(int levels, const scratch_t *s, const visit_t *visit, visit_t *weighed)
{
    for (int64_t pair = 0; pair < s->value_pairs; pair++) {
        float *out = visit->panel->out + pair * DEPTH * WIDTH;
        load_sums(visit->columns, out);
        for (int part = visit->first; part < visit->end; part++)
            multiply(levels, visit->columns, s->values + (pair * (TILE / DEPTH) + part) * 2 * FLOAT_BYTES,
                     visit->weights + part * VECTORS * FLOAT_BYTES, weighed);
        store_sums(visit->columns, out);
    }
}

/* Three visits at once, each of which may be NULL: the scores of one, the softmax of another, which has its scores, and
 * the weighted sums of a third, which has its weights. */
INLINE void advance(int levels, const scratch_t *s, const tile_t *tile, int32_t slot, visit_t *scored,
                    visit_t *weighed, visit_t *summed)
{
    const int64_t pairs = (scored ? (scored->end - scored->first) * s->key_depths : 0) +
                          (summed ? (summed->end - summed->first) * s->value_pairs : 0);
    const int64_t groups = pairs * levels * (levels + 1) / 2; /* of products */
    visit_t none = {0}, *softmax = weighed ? weighed : &none;
    if (weighed) {
        begin_softmax(tile, slot, weighed);
        if (!groups)
            weigh(levels, weighed);
        weighed->due = weighed->step << 16;
        weighed->rate = groups ? (int)(((weighed->steps - weighed->step) << 16) / groups) : 0;
    }
    if (scored)
        score(levels, s, scored, softmax);
    if (summed)
        add_values(levels, s, summed, softmax);
    if (weighed) {
        while (groups && weighed->step < weighed->steps)
            weigh_step(levels, weighed);
        end_softmax(s, weighed);
    }
}

/* The visits of all panels that read a tile. `slot` is the tile's first. With three levels the products take the
 * longest, and the softmax of a panel is hidden behind products of its neighbours. */
INLINE void attend_tile(int levels, const scratch_t *s, const tile_t *tile, int32_t slot, panel_t *panels, int count)
{
    visit_t visits[3];
    int first = 0, end = count;
    while (first < count && panels[first].highest < slot)
        first++;
    while (end > first && panels[end - 1].lowest >= slot + TILE)
        end--;
    const int ahead = levels > 1 ? 1 : 0;
    for (int i = first; i < end + 2 * ahead; i++) {
        visit_t *scored = i < end ? &visits[i % 3] : NULL;
        if (scored) {
            const int32_t from = panels[i].lowest - slot, until = panels[i].highest - slot;
            scored->panel = panels + i;
            scored->columns = panels[i].vectors;
            scored->first = from > 0 ? from / DEPTH : 0;
            scored->end = until < TILE ? until / DEPTH + 1 : TILE / DEPTH;
            scored->scores = s->scores[i % 2];
            scored->weights = s->weights[i % 2];
        }
        if (!ahead) {
            advance(levels, s, tile, slot, scored, NULL, NULL);
            advance(levels, s, tile, slot, NULL, scored, NULL);
            advance(levels, s, tile, slot, NULL, NULL, scored);
        } else {
            visit_t *weighed = i - 1 >= first && i - 1 < end ? &visits[(i - 1) % 3] : NULL;
            visit_t *summed = i - 2 >= first ? &visits[(i - 2) % 3] : NULL;
            advance(levels, s, tile, slot, scored, weighed, summed);
        }
    }
}
