/* Attention of prefill chunks: the parts that do not depend on how numbers are multiplied.
 *
 * One call serves one layer and every chunk of a step. Keys and values are read in place, through runs of
 * neighbouring slots. The query heads that share a key head are stacked. A lane of a vector is one query head of one
 * token, so the softmax needs no sums across lanes. A panel has WIDTH lanes. Panels of a block share each tile of
 * keys while it is in cache.
 *
 * Tiles end at multiples of TILE slots, and keys that a query does not see leave its sums as they are. So a
 * token's result is bit-identical with any number of threads, in any batch, for any location of its slots, and
 * wherever chunks are cut. A score that is NaN or +infinity makes that head's result NaN.
 *
 * A source that includes this header defines VECTORS, PANELS and TILE before, and `attend_block` and `work` after.
 */

#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum {
    WIDTH = VECTORS * LANES, /* lanes of a panel */
    SHARES = 4,              /* blocks per thread, so that all threads end at about the same time */
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
    float *scratch;  /* [threads, skim_prefill_scratch] */
    int64_t rounded; /* nonzero: inputs may be rounded to bfloat16 */
    int64_t next_block, next_thread, panels; /* the last: of a block */
} prefill_t;

/* Floats of scratch space for each thread. */
int64_t skim_prefill_scratch(int64_t key_dim, int64_t value_dim);

/* Claims blocks until none is left. data: the call's prefill_t */
static void work(void *data);

/* Attend with the stacked queries of one block: panels that start at `first`, of the `stacked` ones of a chunk. */
static void attend_block(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, int64_t stacked,
                         float *scratch);

/* ---- A panel of queries. */

typedef struct {
    float *query; /* scaled, in the layout of the kernel */
    float *out;   /* [value_dim, WIDTH]: weighted sums of values */
    vec maxima[VECTORS], sums[VECTORS];
    ivec since[VECTORS], until[VECTORS]; /* the first and the last slot that each lane reads */
    int32_t lowest, highest;             /* the first and the last slot that any lane reads */
    int32_t all_since, all_until;        /* every lane reads these slots and those between */
    int lanes, vectors;                  /* in use */
    int64_t tokens[WIDTH], heads[WIDTH]; /* of each lane */
} panel_t;

/* All of a panel but its queries and weighted sums. Lane i is stacked query `first + i`: its token is the quotient by
 * the number of heads, its head the remainder. Lanes that are not in use repeat the last. */
static void begin_lanes(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, int64_t count,
                        panel_t *panel)
{
    const int64_t group = p->heads / p->kv_heads;
    int64_t index = first / group, member = first % group;
    panel->lanes = count < WIDTH ? (int)count : WIDTH;
    panel->vectors = (panel->lanes + LANES - 1) / LANES;
    panel->lowest = panel->all_until = INT32_MAX;
    panel->highest = panel->all_since = 0;
    for (int lane = 0; lane < panel->vectors * LANES; lane++) {
        const int32_t since = p->since ? p->since[chunk->token + index] : 0, until = (int32_t)(chunk->context + index);
        panel->tokens[lane] = chunk->token + index;
        panel->heads[lane] = kv_head * group + member;
        panel->since[lane / LANES][lane % LANES] = since;
        panel->until[lane / LANES][lane % LANES] = until;
        panel->lowest = since < panel->lowest ? since : panel->lowest;
        panel->highest = until > panel->highest ? until : panel->highest;
        panel->all_since = since > panel->all_since ? since : panel->all_since;
        panel->all_until = until < panel->all_until ? until : panel->all_until;
        if (lane + 1 < panel->lanes && ++member == group) {
            member = 0;
            index++;
        }
    }
    for (int i = 0; i < panel->vectors; i++) {
        panel->maxima[i] = (vec){0} - FLT_MAX; /* finite: a lane may see nothing of its first tiles */
        panel->sums[i] = (vec){0};
    }
}

INLINE const float *query_of(const prefill_t *p, const panel_t *panel, int lane)
{
    return p->query + panel->tokens[lane] * p->token_stride + panel->heads[lane] * p->query_stride;
}

INLINE float *out_of(const prefill_t *p, const panel_t *panel, int lane)
{
    return p->out + (panel->tokens[lane] * p->heads + panel->heads[lane]) * p->value_dim;
}

/* The factor that turns a lane's weighted sums into its result. A sink is a key with a score and no value. */
INLINE float factor_of(const prefill_t *p, const panel_t *panel, int lane)
{
    const float maximum = panel->maxima[lane / LANES][lane % LANES], sum = panel->sums[lane / LANES][lane % LANES];
    if (!p->sinks)
        return 1.0f / sum;
    const float sink = p->sinks[panel->heads[lane]] * LOG2_E, top = sink > maximum ? sink : maximum;
    const float shrink = exp2_nonpositive(maximum - top);
    return shrink / (sum * shrink + exp2_nonpositive(sink - top));
}

/* Scores that a lane does not see become -infinity. top: the largest so far that it sees. scores: [count, WIDTH], of
 * slots that begin at `slot` */
INLINE void mask(int vectors, const panel_t *panel, int32_t slot, int count, float *scores, vec *top)
{
    for (int j = 0; j < count; j++)
        for (int i = 0; i < vectors; i++) {
            const ivec hidden = (panel->until[i] < slot + j) | (panel->since[i] > slot + j);
            vec *at = (vec *)(scores + j * WIDTH + i * LANES);
            const vec seen = blend(hidden, (vec){0} - INFINITY, *at);
            *at = seen;
            top[i] = larger(seen, top[i]);
        }
}

/* ---- Tiles of keys. */

typedef struct {
    const run_t *run;
    int64_t offset; /* of the next slot in its run */
} cursor_t;

/* The keys and values of the next `count` slots. */
static void locate(const prefill_t *p, int64_t kv_head, cursor_t *at, int64_t count, const float **keys,
                   const float **values)
{
    for (int64_t j = 0; j < count; j++) {
        for (; at->offset >= at->run->count; at->run++)
            at->offset -= at->run->count;
        const int64_t slot = at->run->start + at->offset++;
        keys[j] = p->keys.slabs[at->run->slab] + slot * p->keys.slot_stride + kv_head * p->keys.head_stride;
        values[j] = p->values.slabs[at->run->slab] + slot * p->values.slot_stride + kv_head * p->values.head_stride;
    }
}

/* The end of a tile that begins at `slot`: tiles end at multiples of TILE, and at `end`. */
INLINE int64_t tile_end(int64_t slot, int64_t end)
{
    const int64_t next = (slot / TILE + 1) * TILE;
    return next < end ? next : end;
}

/* Prefetch into the second cache, because the first is full. Hardware does not predict the rows of one head. */
static void fetch(const prefill_t *p, const float *const *keys, const float *const *values, int64_t count)
{
    for (int64_t j = 0; j < count; j++) {
        for (int64_t i = 0; i < p->key_dim; i += CACHE_LINE / (int64_t)sizeof(float))
            __builtin_prefetch(keys[j] + i, 0, 2);
        for (int64_t i = 0; i < p->value_dim; i += CACHE_LINE / (int64_t)sizeof(float))
            __builtin_prefetch(values[j] + i, 0, 2);
    }
}

/* ---- Blocks of panels: free threads claim them, later tokens first, which read more. */

static void attend_blocks(prefill_t *p)
{
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
    run_shared(team, threads, work, p);
}
