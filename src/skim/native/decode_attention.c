/* Decode attention (one query per row) over a paged pool of float32 keys and values.
 *
 * One call serves one layer and every decode row of a step. Keys and values are read in place, through runs of
 * neighbouring slots, so a fragmented block table costs no copies. The work is memory-bound: the loops follow
 * memory order, and a slot is used for all heads while it is in cache.
 *
 * A row's keys are split into chunks. Each chunk is reduced to its partial: for each head a maximum, a sum and
 * a weighted sum of values. The thread that finishes a row's last chunk merges the row's partials in order. The
 * boundaries of chunks and tiles depend only on the number of keys. So a row's result is bit-identical with any
 * number of threads, in any batch, and for any location of its slots in the pool.
 *
 * This file links no OpenMP runtime: the caller passes `GOMP_parallel` of the runtime that torch uses,
 * because two teams of threads on the same cores slow each other down.
 *
 * Only `omp simd` relaxes the arithmetic: it lets the loops that it marks sum in another order. A score that is
 * NaN or +infinity makes that head's result NaN.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exp.h"

enum {
    LANES = 8,       /* floats in a vector; wider vectors gain nothing, since memory is the limit */
    QUAD = 4,        /* keys scored together */
    TILE = 32,       /* keys whose scores are held at a time; one tile is prefetched */
    CHUNK = 256,     /* keys in a chunk: enough to pay for its partial, few enough for many threads */
    MAX_CHUNKS = 64, /* in one row; the chunks of longer rows are longer */
    MAX_HEADS = 256, /* `native_kernel.py` repeats this limit and LANES */
    CACHE_LINE = 16, /* in floats */
};

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef float quad __attribute__((vector_size(QUAD * sizeof(float)), aligned(sizeof(float)), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t lanes __attribute__((vector_size(LANES * sizeof(int32_t))));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

/* ---- Arguments of the caller; `native_kernel.py` has the same structures. */

typedef struct {
    int64_t slab, start, count; /* `count` neighbouring slots of a slab, starting at slot `start` */
} run_t;

typedef struct {
    int64_t token;    /* index of the query among the step's tokens */
    int64_t runs_at;  /* first of the runs that hold its keys, in order; the token's own slot is the last */
    int64_t runs_end;
    int64_t keys;     /* number of slots in these runs */
} row_t;

/* One step, for all layers that read the same keys. */
typedef struct {
    const run_t *runs;
    const row_t *rows;
    int64_t row_count;
    int64_t *chunks_at;  /* [row_count + 1]: first chunk of each row */
    int64_t *unfinished; /* [row_count]: number of unfinished chunks of each row */
    int64_t next_chunk;  /* index of the next unclaimed chunk */
} step_t;

/* A tensor [tokens, heads, dim] whose last dimension is contiguous; strides in floats. */
typedef struct {
    const float *data;
    int64_t token_stride, head_stride;
} tokens_t;

/* One layer of the step. */
typedef struct {
    int64_t heads, kv_heads, key_dim, value_dim; /* dims are multiples of LANES */
    float *const *keys, *const *values;          /* by slab: [slots, kv_heads, dim] */
    tokens_t query, key, value;                  /* new keys and values are written to the pool first */
    const float *sinks;                          /* [heads], or NULL */
    float *partials;                             /* [chunks, heads, 2 + value_dim] */
    float *out;                                  /* [tokens, heads, value_dim] */
    double scale;
} layer_t;

typedef void (*team_t)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    step_t *step;
    const layer_t *layer;
} job_t;

/* ---- Arithmetic. */

INLINE vec load(const float *p) { return *(const vec *)p; }
INLINE void store(float *p, vec v) { *(vec *)p = v; }

/* The sum of each of four vectors: three shuffled additions instead of four reductions. */
INLINE quad sum_each(vec a, vec b, vec c, vec d)
{
    vec ab = SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    vec cd = SHUFFLE(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
    union {
        vec whole;
        quad half[2];
    } abcd = {SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15)};
    return abcd.half[0] + abcd.half[1];
}

/* Heads to process together. Three share each load, and their twelve sums still fit AVX2's registers. */
INLINE int64_t heads_at_once(int64_t left) { return left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3; }

/* Scores of `heads` heads for QUAD keys, at offset `at` in each slot. scores: [heads][TILE] */
INLINE void score(int heads, int64_t dim, const float *query, int64_t stride, const float *const *keys,
                  int64_t at, float *scores)
{
    vec sums[3][QUAD] = {0};
    for (int64_t d = 0; d < dim; d += LANES)
        for (int j = 0; j < QUAD; j++) {
            vec key = load(keys[j] + at + d);
            for (int h = 0; h < heads; h++)
                sums[h][j] += load(query + h * stride + d) * key;
        }
    for (int h = 0; h < heads; h++)
        *(quad *)(scores + h * TILE) = sum_each(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
}

/* Add `width` vectors of each weighted value to the sums of `heads` heads. sums: [heads][dim] */
INLINE void add_vectors(int heads, int width, int count, const float *const *values, int64_t at,
                        const float *weights, float *sums, int64_t dim)
{
    vec s[3][4];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < width; i++)
            s[h][i] = load(sums + h * dim + i * LANES);
    for (int j = 0; j < count; j++)
        for (int i = 0; i < width; i++) {
            vec value = load(values[j] + at + i * LANES);
            for (int h = 0; h < heads; h++)
                s[h][i] += value * weights[h * TILE + j];
        }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < width; i++)
            store(sums + h * dim + i * LANES, s[h][i]);
}

INLINE void add_values(int heads, int64_t dim, int count, const float *const *values, int64_t at,
                       const float *weights, float *sums)
{
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_vectors(heads, 4, count, values, at + d, weights, sums + d, dim);
    for (; d < dim; d += LANES)
        add_vectors(heads, 1, count, values, at + d, weights, sums + d, dim);
}

/* ---- A chunk, tile by tile. */

typedef struct {
    const float *keys[TILE], *values[TILE]; /* a shorter tile repeats its last slot */
    int count;
} tile_t;

typedef struct {
    const run_t *run;
    int64_t offset, left; /* index of the slot in its run; slots left in the chunk */
} cursor_t;

INLINE void next_tile(const layer_t *layer, cursor_t *at, int64_t key_row, int64_t value_row, tile_t *tile)
{
    tile->count = at->left < TILE ? (int)at->left : TILE;
    at->left -= tile->count;
    for (int j = 0; j < tile->count; j++, at->offset++) {
        if (at->offset == at->run->count) {
            at->run++;
            at->offset = 0;
        }
        int64_t slot = at->run->start + at->offset;
        tile->keys[j] = layer->keys[at->run->slab] + slot * key_row;
        tile->values[j] = layer->values[at->run->slab] + slot * value_row;
    }
    for (int j = tile->count; j > 0 && j < TILE; j++) {
        tile->keys[j] = tile->keys[j - 1];
        tile->values[j] = tile->values[j - 1];
    }
}

/* Hardware prefetching stops at page boundaries and fails when keys and values alternate. */
INLINE void fetch(const float *slot, int64_t floats)
{
    for (int64_t i = 0; i < floats; i += CACHE_LINE)
        __builtin_prefetch(slot + i);
}

/* Turn a tile's raw scores into weights relative to the largest so far; rescale the earlier sums. */
INLINE void softmax_tile(float *scores, int count, float scale, float *maximum, float *sum, float *out,
                         int64_t dim)
{
    float top = *maximum, added = 0;
    for (int j = count; j < TILE; j++)
        scores[j] = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int j = 0; j < TILE; j++) {
        scores[j] *= scale;
        top = scores[j] > top ? scores[j] : top;
    }
#pragma omp simd reduction(+ : added)
    for (int j = 0; j < TILE; j++) {
        scores[j] = exp2_nonpositive(scores[j] - top);
        added += scores[j];
    }
    if (top > *maximum) {
        float shrink = exp2_nonpositive(*maximum - top);
        for (int64_t d = 0; d < dim; d++)
            out[d] *= shrink;
        *sum *= shrink;
        *maximum = top;
    }
    *sum += added;
}

INLINE void attend_chunk(const layer_t *layer, int64_t key_dim, int64_t value_dim, const float *query,
                         cursor_t at, float *partial)
{
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, group = heads / kv_heads;
    const int64_t key_row = kv_heads * key_dim, value_row = kv_heads * value_dim;
    const int64_t stride = layer->query.head_stride;
    const float scale = (float)(layer->scale * LOG2_E); /* scores are exponents of two */
    float *maxima = partial, *sums = partial + heads, *outs = partial + 2 * heads;
    float scores[MAX_HEADS][TILE];
    tile_t tiles[2], *tile = tiles, *ahead = tiles + 1;

    for (int64_t h = 0; h < heads; h++)
        maxima[h] = -INFINITY;
    memset(sums, 0, heads * (1 + value_dim) * sizeof(float));

    next_tile(layer, &at, key_row, value_row, tile);
    while (tile->count > 0) {
        next_tile(layer, &at, key_row, value_row, ahead);
        for (int j = 0; j < tile->count; j += QUAD) {
            for (int i = j; ahead->count > 0 && i < j + QUAD; i++) {
                fetch(ahead->keys[i], key_row);
                fetch(ahead->values[i], value_row);
            }
            for (int64_t k = 0; k < kv_heads; k++)
                for (int64_t h = k * group, n; h < (k + 1) * group; h += n) {
                    const float *q = query + h * stride;
                    n = heads_at_once((k + 1) * group - h);
                    if (n == 1)
                        score(1, key_dim, q, stride, tile->keys + j, k * key_dim, scores[h] + j);
                    else if (n == 2)
                        score(2, key_dim, q, stride, tile->keys + j, k * key_dim, scores[h] + j);
                    else
                        score(3, key_dim, q, stride, tile->keys + j, k * key_dim, scores[h] + j);
                }
        }
        for (int64_t h = 0; h < heads; h++)
            softmax_tile(scores[h], tile->count, scale, maxima + h, sums + h, outs + h * value_dim,
                         value_dim);
        for (int64_t k = 0; k < kv_heads; k++)
            for (int64_t h = k * group, n; h < (k + 1) * group; h += n) {
                float *out = outs + h * value_dim;
                n = heads_at_once((k + 1) * group - h);
                if (n == 1)
                    add_values(1, value_dim, tile->count, tile->values, k * value_dim, scores[h], out);
                else if (n == 2)
                    add_values(2, value_dim, tile->count, tile->values, k * value_dim, scores[h], out);
                else
                    add_values(3, value_dim, tile->count, tile->values, k * value_dim, scores[h], out);
            }
        tile_t *done = tile;
        tile = ahead;
        ahead = done;
    }
}

/* ---- A step: free threads claim chunks. */

INLINE int64_t chunk_keys(int64_t keys)
{
    int64_t tiles = (keys + MAX_CHUNKS * TILE - 1) / (MAX_CHUNKS * TILE);
    return tiles * TILE > CHUNK ? tiles * TILE : CHUNK;
}

static void merge_row(const step_t *step, const layer_t *layer, int64_t index)
{
    const int64_t heads = layer->heads, dim = layer->value_dim, size = heads * (2 + dim);
    const float *begin = layer->partials + step->chunks_at[index] * size;
    const float *end = layer->partials + step->chunks_at[index + 1] * size;
    float *out = layer->out + step->rows[index].token * heads * dim;
    for (int64_t h = 0; h < heads; h++, out += dim) {
        float sink = layer->sinks ? layer->sinks[h] * LOG2_E : -INFINITY, top = sink;
        for (const float *partial = begin; partial < end; partial += size)
            top = partial[h] > top ? partial[h] : top;
        float sum = exp2_nonpositive(sink - top); /* a sink has a score and no value */
        memset(out, 0, dim * sizeof(float));
        for (const float *partial = begin; partial < end; partial += size) {
            const float weight = exp2_nonpositive(partial[h] - top), *part = partial + 2 * heads + h * dim;
            sum += weight * partial[heads + h];
            for (int64_t d = 0; d < dim; d++)
                out[d] += weight * part[d];
        }
        for (int64_t d = 0; d < dim; d++)
            out[d] /= sum;
    }
}

static void work(void *data)
{
    step_t *step = ((job_t *)data)->step;
    const layer_t *layer = ((job_t *)data)->layer;
    const int64_t key_dim = layer->key_dim, value_dim = layer->value_dim;
    const int64_t chunks = step->chunks_at[step->row_count];
    int64_t index = 0, chunk;
    while ((chunk = __atomic_fetch_add(&step->next_chunk, 1, __ATOMIC_RELAXED)) < chunks) {
        while (chunk >= step->chunks_at[index + 1])
            index++;
        const row_t *row = step->rows + index;
        const int64_t size = chunk_keys(row->keys), first = (chunk - step->chunks_at[index]) * size;
        cursor_t at = {step->runs + row->runs_at, first, row->keys - first < size ? row->keys - first : size};
        for (; at.offset >= at.run->count; at.run++)
            at.offset -= at.run->count;
        const float *query = layer->query.data + row->token * layer->query.token_stride;
        float *partial = layer->partials + chunk * layer->heads * (2 + value_dim);
        if (key_dim == 64 && value_dim == 64)
            attend_chunk(layer, 64, 64, query, at, partial);
        else if (key_dim == 128 && value_dim == 128)
            attend_chunk(layer, 128, 128, query, at, partial);
        else
            attend_chunk(layer, key_dim, value_dim, query, at, partial);
        if (__atomic_sub_fetch(&step->unfinished[index], 1, __ATOMIC_ACQ_REL) == 0)
            merge_row(step, layer, index);
    }
}

static void write_token(float *slot, const tokens_t *new, int64_t token, int64_t kv_heads, int64_t dim)
{
    const float *from = new->data + token * new->token_stride;
    for (int64_t k = 0; k < kv_heads; k++)
        memcpy(slot + k * dim, from + k * new->head_stride, dim * sizeof(float));
}

/* Fill in `chunks_at` and return the number of chunks. A layer has one partial for each. */
int64_t skim_count_chunks(step_t *step)
{
    step->chunks_at[0] = 0;
    for (int64_t i = 0; i < step->row_count; i++) {
        int64_t keys = step->rows[i].keys, size = chunk_keys(keys);
        step->chunks_at[i + 1] = step->chunks_at[i] + (keys + size - 1) / size;
    }
    return step->chunks_at[step->row_count];
}

/* Write every row's new key and value into its last slot, then attend. `team` may be NULL for one thread. */
void skim_decode(step_t *step, const layer_t *layer, team_t team, unsigned threads)
{
    const int64_t kv_heads = layer->kv_heads, key_dim = layer->key_dim, value_dim = layer->value_dim;
    for (int64_t i = 0; i < step->row_count; i++) {
        const row_t *row = step->rows + i;
        const run_t *last = step->runs + row->runs_end - 1;
        const int64_t slot = last->start + last->count - 1;
        float *key = layer->keys[last->slab] + slot * kv_heads * key_dim;
        float *value = layer->values[last->slab] + slot * kv_heads * value_dim;
        write_token(key, &layer->key, row->token, kv_heads, key_dim);
        write_token(value, &layer->value, row->token, kv_heads, value_dim);
        step->unfinished[i] = step->chunks_at[i + 1] - step->chunks_at[i];
    }
    step->next_chunk = 0;
    job_t job = {step, layer};
    if (team && threads > 1 && step->chunks_at[step->row_count] > 1)
        team(work, &job, threads, 0);
    else
        work(&job);
}
