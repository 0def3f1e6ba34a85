/* Attention of prefill chunks over a paged pool of float32 keys and values, by fused multiply-adds.
 *
 * `prefill.h` has the arguments, the panels and the blocks, and says what is promised. The work is compute-bound:
 * nearly all of it is fused multiply-adds of registers. A panel is transposed once. Then a key is a row of scalars
 * that are multiplied with vectors, so keys and values are never rearranged.
 */

#include <stdint.h>
#include <string.h>

enum {
    VECTORS = 3, /* of a panel: with SCALARS, their products' sums fill the registers */
    PANELS = 8,  /* of a block, at most */
    TILE = 64,   /* keys whose scores are held at a time */
};

#include "prefill.h"

enum {
    SCALARS = LANES / 2, /* keys, or values' columns, that are multiplied with a panel at once */
};

int64_t skim_prefill_scratch(int64_t key_dim, int64_t value_dim)
{
    return (PANELS * (key_dim + value_dim) + TILE) * WIDTH;
}

/* query: [key_dim, WIDTH] */
static void begin_panel(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, int64_t count,
                        panel_t *panel)
{
    const float scale = (float)(p->scale * (double)LOG2_E);
    begin_lanes(p, chunk, kv_head, first, count, panel);
    for (int lane = 0; lane < panel->vectors * LANES; lane++) {
        const float *from = query_of(p, panel, lane);
        for (int64_t d = 0; d < p->key_dim; d++)
            panel->query[d * WIDTH + lane] = from[d] * scale;
    }
    memset(panel->out, 0, (size_t)(p->value_dim * WIDTH) * sizeof(float));
}

static void end_panel(const prefill_t *p, const panel_t *panel)
{
    for (int lane = 0; lane < panel->lanes; lane++) {
        const float factor = factor_of(p, panel, lane);
        float *to = out_of(p, panel, lane);
        for (int64_t d = 0; d < p->value_dim; d++)
            to[d] = panel->out[d * WIDTH + lane] * factor;
    }
}

/* ---- A tile of keys. */

typedef struct {
    const float *keys[TILE], *values[TILE]; /* the rest of a multiple of SCALARS repeats the last */
} tile_t;

static void next_tile(const prefill_t *p, int64_t kv_head, cursor_t *at, int64_t count, tile_t *tile)
{
    locate(p, kv_head, at, count, tile->keys, tile->values);
    for (int64_t j = count; j % SCALARS; j++) {
        tile->keys[j] = tile->keys[j - 1];
        tile->values[j] = tile->values[j - 1];
    }
}

/* Scores of SCALARS keys, and the largest so far. query: [dim, WIDTH]; to: [SCALARS, WIDTH] */
INLINE void score(int vectors, int64_t dim, const float *query, const float *const *keys, float *to, vec *top)
{
    vec sums[SCALARS][VECTORS];
    const float *rows[SCALARS];
    for (int j = 0; j < SCALARS; j++) {
        rows[j] = keys[j];
        for (int i = 0; i < vectors; i++)
            sums[j][i] = (vec){0};
    }
    for (int64_t d = 0; d < dim; d++) {
        vec own[VECTORS];
        for (int i = 0; i < vectors; i++)
            own[i] = *(const vec *)(query + d * WIDTH + i * LANES);
        for (int j = 0; j < SCALARS; j++)
            for (int i = 0; i < vectors; i++)
                sums[j][i] += own[i] * rows[j][d];
    }
    for (int j = 0; j < SCALARS; j++)
        for (int i = 0; i < vectors; i++) {
            *(vec *)(to + j * WIDTH + i * LANES) = sums[j][i];
            top[i] = larger(sums[j][i], top[i]);
        }
}

/* Add SCALARS columns of the weighted values, starting at `column`. weights: [count, WIDTH]; out: [value_dim, WIDTH] */
INLINE void add_columns(int vectors, int count, const float *weights, const float *const *values, int64_t column,
                        const vec *shrink, float *out)
{
    vec sums[SCALARS][VECTORS];
    for (int c = 0; c < SCALARS; c++)
        for (int i = 0; i < vectors; i++)
            sums[c][i] = *(const vec *)(out + (column + c) * WIDTH + i * LANES) * shrink[i];
    for (int j = 0; j < count; j++) {
        vec own[VECTORS];
        const float *value = values[j] + column;
        for (int i = 0; i < vectors; i++)
            own[i] = *(const vec *)(weights + j * WIDTH + i * LANES);
        for (int c = 0; c < SCALARS; c++)
            for (int i = 0; i < vectors; i++)
                sums[c][i] += own[i] * value[c];
    }
    for (int c = 0; c < SCALARS; c++)
        for (int i = 0; i < vectors; i++)
            *(vec *)(out + (column + c) * WIDTH + i * LANES) = sums[c][i];
}

/* Turn scores into weights relative to the largest so far, `top`. shrink: the factors of the earlier sums */
INLINE void softmax(int vectors, panel_t *panel, int count, float *scores, const vec *top, vec *shrink)
{
    vec sum[VECTORS];
    for (int i = 0; i < vectors; i++)
        sum[i] = (vec){0};
    for (int j = 0; j < count; j++)
        for (int i = 0; i < vectors; i++) {
            vec *at = (vec *)(scores + j * WIDTH + i * LANES);
            const vec weight = exp2_lanes(*at - top[i]);
            *at = weight;
            sum[i] += weight;
        }
    for (int i = 0; i < vectors; i++) {
        shrink[i] = exp2_lanes(panel->maxima[i] - top[i]);
        panel->sums[i] = panel->sums[i] * shrink[i] + sum[i];
        panel->maxima[i] = top[i];
    }
}

/* One tile, whose first slot in the sequence is `slot`, of which the panel reads `count` keys. */
INLINE void attend_tile(int vectors, const prefill_t *p, panel_t *panel, const tile_t *tile, int32_t slot, int count,
                        float *scores)
{
    vec top[VECTORS], shrink[VECTORS];
    for (int i = 0; i < vectors; i++)
        top[i] = panel->maxima[i];
    for (int j = 0; j < count; j += SCALARS)
        score(vectors, p->key_dim, panel->query, tile->keys + j, scores + j * WIDTH, top);
    if (panel->all_since > slot || panel->all_until < slot + count - 1 || count % SCALARS) {
        for (int i = 0; i < vectors; i++)
            top[i] = panel->maxima[i];
        mask(vectors, panel, slot, count, scores, top);
    }
    softmax(vectors, panel, count, scores, top, shrink);
    for (int64_t column = 0; column < p->value_dim; column += SCALARS)
        add_columns(vectors, count, scores, tile->values, column, shrink, panel->out);
}

static void attend_block(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, int64_t stacked,
                         float *scratch)
{
    panel_t panels[PANELS];
    int count = 0;
    for (; count < p->panels && first + count * WIDTH < stacked; count++) {
        panel_t *panel = panels + count;
        panel->query = scratch + count * (p->key_dim + p->value_dim) * WIDTH;
        panel->out = panel->query + p->key_dim * WIDTH;
        begin_panel(p, chunk, kv_head, first + count * WIDTH, stacked - first - count * WIDTH, panel);
    }
    float *scores = scratch + PANELS * (p->key_dim + p->value_dim) * WIDTH;
    const int64_t begin = panels[0].lowest, end = panels[count - 1].highest + 1;
    cursor_t at = {p->runs + chunk->runs_at, begin - chunk->first};
    tile_t tiles[2], *tile = &tiles[0], *next = &tiles[1];
    next_tile(p, kv_head, &at, tile_end(begin, end) - begin, tile);
    for (int64_t slot = begin, following; slot < end; slot = following) {
        following = tile_end(slot, end);
        if (following < end) {
            next_tile(p, kv_head, &at, tile_end(following, end) - following, next);
            fetch(p, next->keys, next->values, tile_end(following, end) - following);
        }
        for (int i = 0; i < count; i++) {
            panel_t *panel = panels + i;
            const int64_t reads = (panel->highest < following ? panel->highest + 1 : following) - slot;
            if (reads <= 0 || panel->lowest >= following)
                continue;
            if (panel->vectors == 3)
                attend_tile(3, p, panel, tile, (int32_t)slot, (int)reads, scores);
            else if (panel->vectors == 2)
                attend_tile(2, p, panel, tile, (int32_t)slot, (int)reads, scores);
            else
                attend_tile(1, p, panel, tile, (int32_t)slot, (int)reads, scores);
        }
        tile_t *const used = tile;
        tile = next;
        next = used;
    }
    for (int i = 0; i < count; i++)
        end_panel(p, panels + i);
}

static void work(void *data) { attend_blocks(data); }
