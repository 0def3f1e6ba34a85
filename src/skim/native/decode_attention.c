/* Decode attention over float32 keys and values; see decode.h. */

#define PREPARES_ALL 0
#include "glance.h"

/* One layer of the step; `native_kernel.py` has the same structure. */
typedef struct {
    int64_t heads, kv_heads, key_dim, value_dim; /* dims are multiples of LANES */
    float *const *keys, *const *values;          /* by slab: [slots, kv_heads, dim] */
    tokens_t query, key, value;                  /* new keys and values are written to the pool first */
    const float *sinks;                          /* [heads], or NULL */
    float *partials;                             /* [chunks, heads, 2 + value_dim] */
    float *out;                                  /* [tokens, heads, value_dim] */
    double scale;
    const summaries_t *summaries;                /* NULL if no row is under slow-fast decode */
} layer_t;

typedef struct {
    step_t *step;
    const layer_t *layer;
} job_t;

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

/* The addresses of a tile's keys and values. */
typedef struct {
    const float *keys[TILE], *values[TILE];
    int count;
} places_t;

INLINE void next_places(const layer_t *layer, cursor_t *at, int64_t key_row, int64_t value_row,
                        places_t *places)
{
    tile_t tile;
    next_tile(at, &tile);
    locate((const void *const *)layer->keys, key_row * sizeof(float), &tile, (const void **)places->keys);
    locate((const void *const *)layer->values, value_row * sizeof(float), &tile,
           (const void **)places->values);
    places->count = tile.count;
}

INLINE void attend_chunk(const layer_t *layer, int64_t key_dim, int64_t value_dim, const float *query,
                         range_t own, cursor_t at, float *partial, record_t record)
{
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, group = heads / kv_heads;
    const int64_t key_row = kv_heads * key_dim, value_row = kv_heads * value_dim;
    const int64_t key_bytes = (own.end - own.first) * key_dim * (int64_t)sizeof(float);
    const int64_t value_bytes = (own.end - own.first) * value_dim * (int64_t)sizeof(float);
    const int64_t stride = layer->query.head_stride;
    const float scale = (float)(layer->scale * LOG2_E); /* scores are exponents of two */
    float *maxima = partial, *sums = partial + heads, *outs = partial + 2 * heads;
    float scores[MAX_HEADS][TILE];
    places_t tiles[2], *tile = tiles, *ahead = tiles + 1;

    for (int64_t h = own.first * group; h < own.end * group; h++) {
        maxima[h] = -INFINITY;
        sums[h] = 0;
        memset(outs + h * value_dim, 0, value_dim * sizeof(float));
    }

    next_places(layer, &at, key_row, value_row, tile);
    while (tile->count > 0) {
        next_places(layer, &at, key_row, value_row, ahead);
        for (int j = 0; j < tile->count; j++)
            touch(tile->keys[j] + own.first * key_dim, key_bytes);
        for (int j = 0; j < tile->count; j += QUAD) {
            for (int i = j; ahead->count > 0 && i < j + QUAD; i++) {
                fetch(ahead->keys[i] + own.first * key_dim, key_bytes);
                fetch(ahead->values[i] + own.first * value_dim, value_bytes);
            }
            for (int64_t k = own.first; k < own.end; k++)
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
        for (int64_t h = own.first * group; h < own.end * group; h++)
            softmax_tile(scores[h], tile->count, TILE, scale, maxima + h, sums + h, outs + h * value_dim,
                         value_dim);
        record_tile(&record, heads, scores, maxima);
        for (int j = 0; j < tile->count; j++)
            touch(tile->values[j] + own.first * value_dim, value_bytes);
        for (int64_t k = own.first; k < own.end; k++)
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
        places_t *done = tile;
        tile = ahead;
        ahead = done;
    }
}

/* See `compare_t`. */
INLINE void compare_keys(const layer_t *layer, int64_t dim, const look_t *look, const run_t *block, const run_t *next,
                         float *logs, int64_t stride)
{
    const int64_t row = look->kv_heads * dim, at = look->head * dim;
    const float scale = (float)(look->scale * LOG2_E);
    const float *keys = layer->keys[block->slab] + block->start * row + at;
    const float *ahead = layer->keys[next->slab] + next->start * row + at;
    float maxima[MAX_HEADS], sums[MAX_HEADS], scores[3][TILE];
    for (int64_t g = 0; g < look->group; g++) {
        maxima[g] = -INFINITY;
        sums[g] = 0;
    }
    for (int64_t first = 0; first < block->count; first += TILE) {
        const int count = block->count - first < TILE ? (int)(block->count - first) : TILE;
        const int padded = (count + LANES - 1) / LANES * LANES;
        for (int j = 0; j < count; j++)
            fetch(ahead + (first + j) * row, dim * sizeof(float));
        for (int64_t g = 0, n; g < look->group; g += n) {
            const float *query = look->query + g * look->stride;
            n = heads_at_once(look->group - g);
            for (int j = 0; j < count; j += QUAD) {
                const float *places[QUAD];
                for (int i = 0; i < QUAD; i++) /* a shorter quad repeats its last key */
                    places[i] = keys + (first + (j + i < count ? j + i : count - 1)) * row;
                if (n == 1)
                    score(1, dim, query, look->stride, places, 0, scores[0] + j);
                else if (n == 2)
                    score(2, dim, query, look->stride, places, 0, scores[0] + j);
                else
                    score(3, dim, query, look->stride, places, 0, scores[0] + j);
            }
            for (int64_t i = 0; i < n; i++)
                softmax_tile(scores[i], count, padded, scale, maxima + g + i, sums + g + i, NULL, 0);
        }
    }
    for (int64_t g = 0; g < look->group; g++)
        logs[g * stride] = maxima[g] + log2f(sums[g] / (float)block->count);
}

static void compare_block(const void *data, const look_t *look, const run_t *block, const run_t *next, float *logs,
                          int64_t stride)
{
    const layer_t *layer = data;
    if (look->dim == 64)
        compare_keys(layer, 64, look, block, next, logs, stride);
    else if (look->dim == 128)
        compare_keys(layer, 128, look, block, next, logs, stride);
    else
        compare_keys(layer, look->dim, look, block, next, logs, stride);
}

static void attend(const void *data, int64_t row, cursor_t at, int64_t chunk)
{
    const job_t *job = data;
    const layer_t *layer = job->layer;
    const int64_t key_dim = layer->key_dim, value_dim = layer->value_dim;
    const float *query = layer->query.data + job->step->rows[row].token * layer->query.token_stride;
    float *partial = layer->partials + chunk * layer->heads * (2 + value_dim);
    const range_t own = heads_of(job->step->rows + row, layer->kv_heads);
    const record_t record = record_of(job->step, row, chunk, layer->heads);
    if (key_dim == 64 && value_dim == 64)
        attend_chunk(layer, 64, 64, query, own, at, partial, record);
    else if (key_dim == 128 && value_dim == 128)
        attend_chunk(layer, 128, 128, query, own, at, partial, record);
    else
        attend_chunk(layer, key_dim, value_dim, query, own, at, partial, record);
}

static void merge(const void *data, int64_t row)
{
    const job_t *job = data;
    const layer_t *layer = job->layer;
    float *out = layer->out + job->step->rows[row].token * layer->heads * layer->value_dim;
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, dim = layer->value_dim;
    merge_partials(job->step, row, heads, kv_heads, dim, layer->partials, layer->sinks, out);
    if (keeps_evidence(job->step, row))
        renew(job->step, row, layer->summaries, heads, kv_heads, dim, layer->partials);
}

/* Choose the blocks of a fast row. */
static void prepare(const void *data, int64_t index)
{
    step_t *step = ((const job_t *)data)->step;
    const layer_t *layer = ((const job_t *)data)->layer;
    const row_t *row = step->rows + index;
    const int64_t group = layer->heads / layer->kv_heads, head = row->head - 1;
    const float *query = layer->query.data + row->token * layer->query.token_stride;
    const look_t look = {query + head * group * layer->query.head_stride, layer->query.head_stride, group, head,
                         layer->kv_heads, layer->key_dim, layer->scale};
    choose(step, index, layer->summaries, &look, layer, compare_block);
}

static void work(void *data) { run_pieces(((job_t *)data)->step, data, prepare, attend, merge); }

static void write_token(float *slot, const tokens_t *new, int64_t token, int64_t kv_heads, int64_t dim)
{
    const float *from = new->data + token * new->token_stride;
    for (int64_t k = 0; k < kv_heads; k++)
        memcpy(slot + k * dim, from + k * new->head_stride, dim * sizeof(float));
}

/* Write every row's new key and value into its last slot, then attend. `team` may be NULL for one thread. */
void skim_decode(step_t *step, const layer_t *layer, team_t team, unsigned threads)
{
    const int64_t kv_heads = layer->kv_heads, key_dim = layer->key_dim, value_dim = layer->value_dim;
    job_t job = {step, layer};
    for (int64_t i = 0; i < step->row_count; i++) {
        const row_t *row = step->rows + i;
        if (row->head > 1) /* the row of the first KV head writes for all */
            continue;
        int64_t slab, slot;
        find_new(step, i, layer->summaries, &slab, &slot);
        write_token(layer->keys[slab] + slot * kv_heads * key_dim, &layer->key, row->token, kv_heads, key_dim);
        write_token(layer->values[slab] + slot * kv_heads * value_dim, &layer->value, row->token, kv_heads,
                    value_dim);
    }
    run_step(step, work, &job, team, threads);
    add_masses(step);
}
