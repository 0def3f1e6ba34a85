/* Attention of prefill chunks over a paged pool of float32 keys and values.
 *
 * One call serves one layer and every chunk of a step. Keys and values are read in place, through runs of
 * neighbouring slots. The work is compute-bound: nearly all of it is fused multiply-adds of registers.
 *
 * A lane of a vector is one query head of one token. The query heads that share a key head are stacked, and a panel
 * of WIDTH of them is transposed once. Then a key is a row of scalars that are multiplied with vectors, so keys and
 * values are never rearranged, and the softmax needs no sums across lanes. Panels of a block share each tile of keys
 * while it is in cache.
 *
 * Tiles end at multiples of TILE slots, and keys that a query does not see leave its sums as they are. So a
 * token's result is bit-identical with any number of threads, in any batch, for any location of its slots, and
 * wherever chunks are cut. A score that is NaN or +infinity makes that head's result NaN. This file links no OpenMP
 * runtime; see `decode.h`.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum {
    VECTORS = 3,             /* of a panel: with SCALARS, their products' sums fill the registers */
    SCALARS = LANES / 2,     /* keys, or values' columns, that are multiplied with a panel at once */
    WIDTH = VECTORS * LANES, /* lanes of a panel */
    PANELS = 8,              /* of a block, at most */
    SHARES = 4,              /* blocks per thread, so that all threads end at about the same time */
    TILE = 64,               /* keys whose scores are held at a time */
    CACHE_LINE = 64,         /* in bytes */
};

/* ---- Arguments of the caller; `native_prefill.py` has the same structures. */

typedef struct {
    int64_t slab, start, count; /* `count` neighbouring slots of a slab, starting at slot `start` */
} run_t;

typedef struct {
    int64_t token;   /* index of the first query among the step's tokens */
    int64_t queries; /* query i reads slots up to `context + i` */
    int64_t context;
    int64_t first;   /* the sequence's slot at which the runs begin */
    int64_t runs_at; /* the first of them */
} chunk_t;

/* Keys or values by slab. Strides in floats. */
typedef struct {
    const float *const *slabs;
    int64_t slot_stride, head_stride;
} plane_t;

typedef struct {
    const run_t *runs;
    const chunk_t *chunks;
    int64_t chunk_count;
    int64_t heads, kv_heads, key_dim, value_dim; /* dims are multiples of 8 */
    plane_t keys, values;
    const float *query; /* [tokens, heads, key_dim], a token's heads `query_stride` floats apart */
    int64_t token_stride, query_stride;
    const int32_t *since; /* [tokens]: the first slot that a query reads, or NULL for 0 */
    const float *sinks;   /* [heads], or NULL */
    float *out;           /* [tokens, heads, value_dim] */
    double scale;
    float *scratch; /* [threads, skim_prefill_scratch] */
    int64_t next_block, next_thread, panels; /* the last: of a block */
} prefill_t;

/* ---- A panel of queries. */

typedef struct {
    float *query; /* [key_dim, WIDTH], scaled */
    float *out;   /* [value_dim, WIDTH]: weighted sums of values */
    vec maxima[VECTORS], sums[VECTORS];
    ivec since[VECTORS], until[VECTORS]; /* the first and the last slot that each lane reads */
    int32_t lowest, highest;             /* the first and the last slot that any lane reads */
    int32_t all_since, all_until;        /* every lane reads these slots and those between */
    int lanes, vectors;                  /* in use */
} panel_t;

int64_t skim_prefill_scratch(int64_t key_dim, int64_t value_dim)
{
    return (PANELS * (key_dim + value_dim) + TILE) * WIDTH;
}

/* Lane i is stacked query `first + i`: its token is the quotient by the number of heads, its head the remainder. */
static void begin_panel(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, int64_t count,
                        panel_t *panel)
{
    const int64_t group = p->heads / p->kv_heads;
    const float scale = (float)(p->scale * (double)LOG2_E);
    panel->lanes = count < WIDTH ? (int)count : WIDTH;
    panel->vectors = (panel->lanes + LANES - 1) / LANES;
    panel->lowest = panel->all_until = INT32_MAX;
    panel->highest = panel->all_since = 0;
    for (int lane = 0; lane < panel->vectors * LANES; lane++) {
        const int64_t stacked = first + (lane < panel->lanes ? lane : panel->lanes - 1); /* the last fills up */
        const int64_t index = stacked / group, token = chunk->token + index, head = kv_head * group + stacked % group;
        const float *from = p->query + token * p->token_stride + head * p->query_stride;
        for (int64_t d = 0; d < p->key_dim; d++)
            panel->query[d * WIDTH + lane] = from[d] * scale;
        const int32_t since = p->since ? p->since[token] : 0, until = (int32_t)(chunk->context + index);
        panel->since[lane / LANES][lane % LANES] = since;
        panel->until[lane / LANES][lane % LANES] = until;
        panel->lowest = since < panel->lowest ? since : panel->lowest;
        panel->highest = until > panel->highest ? until : panel->highest;
        panel->all_since = since > panel->all_since ? since : panel->all_since;
        panel->all_until = until < panel->all_until ? until : panel->all_until;
    }
    for (int i = 0; i < panel->vectors; i++) {
        panel->maxima[i] = (vec){0} - FLT_MAX; /* finite: a lane may see nothing of its first tiles */
        panel->sums[i] = (vec){0};
    }
    memset(panel->out, 0, (size_t)(p->value_dim * WIDTH) * sizeof(float));
}

/* Divide by the sums and write the lanes' results. A sink is a key with a score and no value. */
static void end_panel(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, const panel_t *panel)
{
    const int64_t group = p->heads / p->kv_heads;
    for (int lane = 0; lane < panel->lanes; lane++) {
        const int64_t stacked = first + lane, token = chunk->token + stacked / group;
        const int64_t head = kv_head * group + stacked % group;
        const float maximum = panel->maxima[lane / LANES][lane % LANES], sum = panel->sums[lane / LANES][lane % LANES];
        const float sink = p->sinks ? p->sinks[head] * LOG2_E : -INFINITY, top = sink > maximum ? sink : maximum;
        const float shrink = exp2_nonpositive(maximum - top);
        const float factor = shrink / (sum * shrink + exp2_nonpositive(sink - top));
        float *to = p->out + (token * p->heads + head) * p->value_dim;
        for (int64_t d = 0; d < p->value_dim; d++)
            to[d] = panel->out[d * WIDTH + lane] * factor;
    }
}

/* ---- A tile of keys. */

typedef struct {
    const float *keys[TILE], *values[TILE]; /* the rest of a multiple of SCALARS repeats the last */
} tile_t;

typedef struct {
    const run_t *run;
    int64_t offset; /* of the next slot in its run */
} cursor_t;

static void locate(const prefill_t *p, int64_t kv_head, cursor_t *at, int64_t count, tile_t *tile)
{
    for (int64_t j = 0; j < TILE; j++) {
        if (j < count) {
            for (; at->offset >= at->run->count; at->run++)
                at->offset -= at->run->count;
            const int64_t slot = at->run->start + at->offset++;
            tile->keys[j] = p->keys.slabs[at->run->slab] + slot * p->keys.slot_stride + kv_head * p->keys.head_stride;
            tile->values[j] = p->values.slabs[at->run->slab] + slot * p->values.slot_stride + kv_head * p->values.head_stride;
        } else {
            tile->keys[j] = tile->keys[j - 1];
            tile->values[j] = tile->values[j - 1];
        }
    }
}

/* The end of a tile that begins at `slot`: tiles end at multiples of TILE, and at `end`. */
INLINE int64_t tile_end(int64_t slot, int64_t end)
{
    const int64_t next = (slot / TILE + 1) * TILE;
    return next < end ? next : end;
}

/* Hardware does not foresee the rows of one head. Into the second cache: the first is full. */
static void fetch(const prefill_t *p, const tile_t *tile, int64_t count)
{
    for (int64_t j = 0; j < count; j++) {
        for (int64_t i = 0; i < p->key_dim; i += CACHE_LINE / (int64_t)sizeof(float))
            __builtin_prefetch(tile->keys[j] + i, 0, 2);
        for (int64_t i = 0; i < p->value_dim; i += CACHE_LINE / (int64_t)sizeof(float))
            __builtin_prefetch(tile->values[j] + i, 0, 2);
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

/* Scores that a lane does not see become -infinity. top: the largest so far that it sees */
INLINE void mask(int vectors, const panel_t *panel, int32_t slot, int count, float *scores, vec *top)
{
    for (int i = 0; i < vectors; i++)
        top[i] = panel->maxima[i];
    for (int j = 0; j < count; j++)
        for (int i = 0; i < vectors; i++) {
            const ivec hidden = (panel->until[i] < slot + j) | (panel->since[i] > slot + j);
            vec *at = (vec *)(scores + j * WIDTH + i * LANES);
            const vec seen = blend(hidden, (vec){0} - INFINITY, *at);
            *at = seen;
            top[i] = larger(seen, top[i]);
        }
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
    if (panel->all_since > slot || panel->all_until < slot + count - 1 || count % SCALARS)
        mask(vectors, panel, slot, count, scores, top);
    softmax(vectors, panel, count, scores, top, shrink);
    for (int64_t column = 0; column < p->value_dim; column += SCALARS)
        add_columns(vectors, count, scores, tile->values, column, shrink, panel->out);
}

/* ---- Blocks of panels: free threads claim them, later tokens first, which read more. */

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
    locate(p, kv_head, &at, tile_end(begin, end) - begin, tile);
    for (int64_t slot = begin, following; slot < end; slot = following) {
        following = tile_end(slot, end);
        if (following < end) {
            locate(p, kv_head, &at, tile_end(following, end) - following, next);
            fetch(p, next, tile_end(following, end) - following);
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
        end_panel(p, chunk, kv_head, first + i * WIDTH, panels + i);
}

static void work(void *data)
{
    prefill_t *p = data;
    const int64_t thread = __atomic_fetch_add(&p->next_thread, 1, __ATOMIC_RELAXED);
    float *scratch = p->scratch + thread * skim_prefill_scratch(p->key_dim, p->value_dim);
    const int64_t group = p->heads / p->kv_heads, size = p->panels * WIDTH;
    int64_t passed = 0, index = 0;
    for (;;) {
        const int64_t claimed = __atomic_fetch_add(&p->next_block, 1, __ATOMIC_RELAXED);
        for (;; index++) {
            if (index == p->chunk_count)
                return;
            const chunk_t *chunk = p->chunks + index;
            const int64_t stacked = chunk->queries * group, blocks = (stacked + size - 1) / size;
            if (claimed - passed >= blocks * p->kv_heads) {
                passed += blocks * p->kv_heads;
                continue;
            }
            const int64_t block = blocks - 1 - (claimed - passed) / p->kv_heads;
            attend_block(p, chunk, (claimed - passed) % p->kv_heads, block * size, stacked, scratch);
            break;
        }
    }
}

void skim_prefill(prefill_t *p, team_t team, unsigned threads)
{
    const int64_t group = p->heads / p->kv_heads;
    int64_t panels = 0;
    for (int64_t i = 0; i < p->chunk_count; i++)
        panels += (p->chunks[i].queries * group + WIDTH - 1) / WIDTH * p->kv_heads;
    panels /= SHARES * (int64_t)threads;
    p->panels = panels < 1 ? 1 : panels > PANELS ? PANELS : panels;
    p->next_block = p->next_thread = 0;
    if (threads > 1)
        team(work, p, threads, 0);
    else
        work(p);
}
