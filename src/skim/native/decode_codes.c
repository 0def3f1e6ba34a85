/* Decode attention over quantized keys and values, read as codes; see decode.h and codes.h.
 *
 * Queries are turned into the basis of the stored keys, and results out of that of the values. Codes are widened
 * in registers. A key's scale multiplies its scores, and a value's scale its weights, once for each head, not
 * for each number. A number of four bits is `scale * code + bias`. Bytes have a scale for even numbers and one
 * for odd ones, which are multiplied in pairs, and no bias.
 */

#define PREPARES_ALL 1
#include "codes.h"
#include "glance.h"

/* Keys or values; `native_codes.py` has the same structures. */
typedef struct {
    uint8_t *const *codes;   /* by slab: [slots, kv_heads, dim * bits / 8] */
    uint16_t *const *scales; /* by slab: [slots, kv_heads, 2], or [slots, kv_heads, groups, 2] */
    int64_t dim;             /* a multiple of LANES; with 4 bits of 2 * LANES */
    int64_t bits, groups;
    const float *to_stored;  /* [kv_heads, dim, dim] */
    const float *turn;       /* [kv_heads, dim, dim]: of queries, or of results */
} side_t;

typedef struct {
    int64_t heads, kv_heads;
    side_t keys, values;
    tokens_t query, key, value; /* new keys and values are written to the pool first */
    float *turned;              /* [rows, heads, the larger dim]: scratch */
    float *partials;            /* [chunks, heads, 2 + values.dim] */
    float *out;                 /* [tokens, heads, values.dim] */
    double scale;
    const summaries_t *summaries; /* NULL if no row is under slow-fast decode */
} layer_t;

typedef struct {
    step_t *step;
    const layer_t *layer;
} job_t;

INLINE int64_t code_bytes(const side_t *side) { return side->dim * side->bits / 8; } /* of one head */
INLINE int64_t numbers(const side_t *side) { return side->bits == 8 ? 2 : 2 * side->groups; }
INLINE int64_t width(const layer_t *layer)
{
    return layer->keys.dim > layer->values.dim ? layer->keys.dim : layer->values.dim;
}

/* ---- A tile. */

typedef struct {
    const uint8_t *codes[TILE];
    const uint16_t *scales[TILE];
} places_t;

INLINE void find_places(const side_t *side, int64_t kv_heads, const tile_t *tile, places_t *places)
{
    locate((const void *const *)side->codes, kv_heads * code_bytes(side), tile, (const void **)places->codes);
    locate((const void *const *)side->scales, kv_heads * numbers(side) * sizeof(uint16_t), tile,
           (const void **)places->scales);
}

/* Scales and biases of one segment of one head. */
typedef struct {
    float pairs[TILE][2];              /* bytes: the scales of even and odd numbers */
    float scales[TILE], biases[TILE]; /* four bits */
} segment_t;

INLINE void read_scales(int bits, int segment, int64_t groups, int64_t head, const places_t *places,
                        segment_t *to)
{
    const int64_t at = 2 * (bits == 8 ? head : head * groups + (groups > 1 ? segment : 0));
    for (int j = 0; j < TILE; j++) {
        const float first = from_bf16(places->scales[j][at]), second = from_bf16(places->scales[j][at + 1]);
        if (bits == 8) {
            to->pairs[j][0] = first;
            to->pairs[j][1] = second;
        } else {
            to->scales[j] = first;
            to->biases[j] = second - CENTRE * first;
        }
    }
}

/* Scores of `heads` heads for QUAD keys over one segment, at offset `at` in each slot. scores: [heads][TILE] */
INLINE void score(int kind, int heads, int64_t dim, const float *query, int64_t stride, const float *totals,
                  const uint8_t *const *codes, int64_t at, const segment_t *segment, int first, float *scores)
{
    vec sums[3][QUAD] = {0};
    for (int64_t d = 0; d < dim; d += LANES)
        for (int j = 0; j < QUAD; j++) {
            vec key = widen(kind, codes[j] + at + d);
            for (int h = 0; h < heads; h++)
                sums[h][j] += load(query + h * stride + d) * key;
        }
    for (int h = 0; h < heads; h++) {
        for (int j = 0; kind == BYTES && j < QUAD; j++)
            sums[h][j] *= repeat_pair(segment->pairs[first + j]);
        quad found = sum_each(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
        if (kind != BYTES)
            found = found * *(const quad *)(segment->scales + first)
                    + *(const quad *)(segment->biases + first) * totals[2 * h];
        if (kind == HIGH)
            found += *(const quad *)(scores + h * TILE);
        *(quad *)(scores + h * TILE) = found;
    }
}

/* Add `width` vectors of each weighted value to the sums of `heads` heads. sums: [heads][stride] */
INLINE void add_vectors(int kind, int heads, int width, int count, const uint8_t *const *codes, int64_t at,
                        const float (*weights)[TILE][2], const float *biases, float *sums, int64_t stride)
{
    vec s[3][4];
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < width; i++)
            s[h][i] = load(sums + h * stride + i * LANES) + biases[h];
    for (int j = 0; j < count; j++)
        for (int i = 0; i < width; i++) {
            vec value = widen(kind, codes[j] + at + i * LANES);
            for (int h = 0; h < heads; h++)
                s[h][i] += value * repeat_pair(weights[h][j]);
        }
    for (int h = 0; h < heads; h++)
        for (int i = 0; i < width; i++)
            store(sums + h * stride + i * LANES, s[h][i]);
}

/* Add one segment of the weighted values. weights: [heads][TILE] */
INLINE void add_values(int kind, int heads, int64_t dim, int count, const uint8_t *const *codes, int64_t at,
                       const segment_t *segment, const float *weights, float *sums, int64_t stride)
{
    float scaled[3][TILE][2], biases[3]; /* by the scales of even and odd numbers */
    for (int h = 0; h < heads; h++) {
        float bias = 0;
#pragma omp simd reduction(+ : bias)
        for (int j = 0; j < TILE; j++) {
            const float weight = weights[h * TILE + j];
            scaled[h][j][0] = weight * (kind == BYTES ? segment->pairs[j][0] : segment->scales[j]);
            scaled[h][j][1] = weight * (kind == BYTES ? segment->pairs[j][1] : segment->scales[j]);
            bias += kind == BYTES ? 0 : weight * segment->biases[j];
        }
        biases[h] = bias;
    }
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_vectors(kind, heads, 4, count, codes, at + d, scaled, biases, sums + d, stride);
    for (; d < dim; d += LANES)
        add_vectors(kind, heads, 1, count, codes, at + d, scaled, biases, sums + d, stride);
}

/* ---- A chunk. */

INLINE void score_head(int kind, int heads, int64_t dim, const float *query, int64_t stride,
                       const float *totals, int count, const places_t *keys, int64_t at,
                       const segment_t *segment, float *scores)
{
    for (int j = 0; j < count; j += QUAD)
        score(kind, heads, dim, query, stride, totals, keys->codes + j, at, segment, j, scores + j);
}

/* Calls a function with a constant number of heads, so that its loops are unrolled. */
#define WITH_HEADS(n, call, kind, ...) \
    ((n) == 1 ? call(kind, 1, __VA_ARGS__) : (n) == 2 ? call(kind, 2, __VA_ARGS__) : call(kind, 3, __VA_ARGS__))

/* The totals of the two segments of a query. */
INLINE void add_up(const float *query, int64_t dim, float *totals)
{
    for (int64_t d = 0; d < dim; d++)
        totals[2 * d >= dim] += query[d];
}

/* Scores of the query heads of one KV head for a tile of keys. scores, totals: of these heads */
INLINE void score_tile(const layer_t *layer, int bits, int64_t head, const float *query, const float (*totals)[2],
                       int count, const places_t *keys, float (*scores)[TILE])
{
    const int64_t group = layer->heads / layer->kv_heads, stride = width(layer);
    const int64_t dim = layer->keys.dim, part_dim = bits == 8 ? dim : dim / 2, at = head * (dim * bits / 8);
    segment_t segment;
    for (int part = 0; part < (bits == 8 ? 1 : 2); part++) {
        read_scales(bits, part, layer->keys.groups, head, keys, &segment);
        for (int64_t g = 0, n; g < group; g += n) {
            const float *q = query + g * stride + part * part_dim;
            n = heads_at_once(group - g);
            if (bits == 8)
                WITH_HEADS(n, score_head, BYTES, part_dim, q, stride, totals[g], count, keys, at, &segment, scores[g]);
            else if (part == 0)
                WITH_HEADS(n, score_head, LOW, part_dim, q, stride, totals[g], count, keys, at, &segment, scores[g]);
            else
                WITH_HEADS(n, score_head, HIGH, part_dim, q, stride, totals[g] + 1, count, keys, at, &segment,
                           scores[g]);
        }
    }
}

INLINE void attend_chunk(const layer_t *layer, int key_bits, int value_bits, const float *query, range_t own,
                         cursor_t at, float *partial, record_t record)
{
    const int64_t key_dim = layer->keys.dim, value_dim = layer->values.dim;
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, group = heads / kv_heads;
    const int64_t stride = width(layer), key_bytes = key_dim * key_bits / 8;
    const int64_t value_bytes = value_dim * value_bits / 8;
    const int64_t value_part = value_bits == 8 ? value_dim : value_dim / 2;
    const float scale = (float)(layer->scale * LOG2_E); /* scores are exponents of two */
    float *maxima = partial, *sums = partial + heads, *outs = partial + 2 * heads;
    float scores[MAX_HEADS][TILE], totals[MAX_HEADS][2] = {0}; /* totals: of a query's segments */
    places_t keys[2], values[2];
    segment_t segment;
    tile_t tiles[2];

    for (int64_t h = own.first * group; h < own.end * group; h++) {
        maxima[h] = -INFINITY;
        sums[h] = 0;
        memset(outs + h * value_dim, 0, value_dim * sizeof(float));
        if (key_bits == 4)
            add_up(query + h * stride, key_dim, totals[h]);
    }

    next_tile(&at, tiles);
    find_places(&layer->keys, kv_heads, tiles, keys);
    find_places(&layer->values, kv_heads, tiles, values);
    for (int now = 0; tiles[now].count > 0; now ^= 1) {
        const int count = tiles[now].count, ahead = now ^ 1;
        next_tile(&at, tiles + ahead);
        find_places(&layer->keys, kv_heads, tiles + ahead, keys + ahead);
        find_places(&layer->values, kv_heads, tiles + ahead, values + ahead);
        for (int64_t k = own.first; k < own.end; k++) {
            for (int j = 0; j < tiles[ahead].count; j++) {
                fetch(keys[ahead].codes[j] + k * key_bytes, key_bytes);
                fetch(values[ahead].codes[j] + k * value_bytes, value_bytes);
            }
            score_tile(layer, key_bits, k, query + k * group * stride, totals + k * group, count, keys + now,
                       scores + k * group);
        }
        for (int64_t h = own.first * group; h < own.end * group; h++)
            softmax_tile(scores[h], count, TILE, scale, maxima + h, sums + h, outs + h * value_dim, value_dim);
        record_tile(&record, heads, scores, maxima);
        for (int64_t k = own.first; k < own.end; k++)
            for (int part = 0; part < (value_bits == 8 ? 1 : 2); part++) {
                read_scales(value_bits, part, layer->values.groups, k, values + now, &segment);
                for (int64_t h = k * group, n; h < (k + 1) * group; h += n) {
                    float *out = outs + h * value_dim + part * value_part;
                    n = heads_at_once((k + 1) * group - h);
                    if (value_bits == 8)
                        WITH_HEADS(n, add_values, BYTES, value_part, count, values[now].codes,
                                   k * value_bytes, &segment, scores[h], out, value_dim);
                    else if (part == 0)
                        WITH_HEADS(n, add_values, LOW, value_part, count, values[now].codes, k * value_bytes,
                                   &segment, scores[h], out, value_dim);
                    else
                        WITH_HEADS(n, add_values, HIGH, value_part, count, values[now].codes,
                                   k * value_bytes, &segment, scores[h], out, value_dim);
                }
            }
    }
}

/* See `compare_t`. */
INLINE void compare_keys(const layer_t *layer, int bits, const look_t *look, const run_t *block, const run_t *next,
                         float *logs, int64_t stride)
{
    const int64_t bytes = look->dim * bits / 8;
    const float scale = (float)(look->scale * LOG2_E);
    float maxima[MAX_HEADS], sums[MAX_HEADS], scores[MAX_HEADS][TILE], totals[MAX_HEADS][2] = {0};
    cursor_t at = {block, 0, block->count}, later = {next, 0, next->count};
    places_t keys, ahead;
    tile_t tile;
    for (int64_t g = 0; g < look->group; g++) {
        maxima[g] = -INFINITY;
        sums[g] = 0;
        if (bits == 4)
            add_up(look->query + g * look->stride, look->dim, totals[g]);
    }
    while (at.left > 0) {
        next_tile(&later, &tile);
        find_places(&layer->keys, look->kv_heads, &tile, &ahead);
        for (int j = 0; j < tile.count; j++)
            fetch(ahead.codes[j] + look->head * bytes, bytes);
        next_tile(&at, &tile);
        find_places(&layer->keys, look->kv_heads, &tile, &keys);
        score_tile(layer, bits, look->head, look->query, totals, tile.count, &keys, scores);
        const int padded = (tile.count + LANES - 1) / LANES * LANES;
        for (int64_t g = 0; g < look->group; g++)
            softmax_tile(scores[g], tile.count, padded, scale, maxima + g, sums + g, NULL, 0);
    }
    for (int64_t g = 0; g < look->group; g++)
        logs[g * stride] = maxima[g] + log2f(sums[g] / (float)block->count);
}

static void compare_block(const void *data, const look_t *look, const run_t *block, const run_t *next, float *logs,
                          int64_t stride)
{
    const layer_t *layer = data;
    if (layer->keys.bits == 8)
        compare_keys(layer, 8, look, block, next, logs, stride);
    else
        compare_keys(layer, 4, look, block, next, logs, stride);
}

static void attend(const void *data, int64_t row, cursor_t at, int64_t chunk)
{
    const step_t *step = ((const job_t *)data)->step;
    const layer_t *layer = ((const job_t *)data)->layer;
    const float *query = layer->turned + row * layer->heads * width(layer);
    const range_t own = heads_of(step->rows + row, layer->kv_heads);
    const record_t record = record_of(step, row, chunk, layer->heads);
    float *partial = layer->partials + chunk * layer->heads * (2 + layer->values.dim);
    if (layer->keys.bits == 8 && layer->values.bits == 8)
        attend_chunk(layer, 8, 8, query, own, at, partial, record);
    else if (layer->keys.bits == 8)
        attend_chunk(layer, 8, 4, query, own, at, partial, record);
    else
        attend_chunk(layer, 4, 4, query, own, at, partial, record);
}

/* Merge a row into the scratch of its query, which is read no more, and turn the result. */
static void merge(const void *data, int64_t row)
{
    const job_t *job = data;
    const layer_t *layer = job->layer;
    const side_t *values = &layer->values;
    const int64_t heads = layer->heads, group = heads / layer->kv_heads, dim = values->dim;
    float *merged = layer->turned + row * heads * width(layer);
    float *out = layer->out + job->step->rows[row].token * heads * dim;
    const range_t own = heads_of(job->step->rows + row, layer->kv_heads);
    merge_partials(job->step, row, heads, layer->kv_heads, dim, layer->partials, NULL, merged);
    if (keeps_evidence(job->step, row))
        renew(job->step, row, layer->summaries, heads, layer->kv_heads, dim, layer->partials);
    for (int64_t h = own.first * group; h < own.end * group; h++)
        multiply(merged + h * dim, values->turn + h / group * dim * dim, dim, out + h * dim);
}

/* ---- New tokens. */

/* Write the new numbers of some KV heads. */
static void write_token(const side_t *side, int64_t slab, int64_t slot, const tokens_t *new, int64_t token,
                        int64_t kv_heads, range_t own)
{
    const int64_t dim = side->dim, bytes = code_bytes(side);
    float stored[MAX_DIM];
    for (int64_t k = own.first; k < own.end; k++) {
        uint8_t *codes = side->codes[slab] + (slot * kv_heads + k) * bytes;
        uint16_t *scales = side->scales[slab] + (slot * kv_heads + k) * numbers(side);
        multiply(new->data + token * new->token_stride + k * new->head_stride, side->to_stored + k * dim * dim, dim,
                 stored);
        if (side->bits == 8)
            encode_bytes(stored, dim, codes, scales);
        else
            encode_nibbles(stored, dim, side->groups, codes, scales);
    }
}

/* Write a row's new key and value into its last slot, turn its queries, and choose its blocks if it is fast. */
static void prepare(const void *data, int64_t index)
{
    step_t *step = ((const job_t *)data)->step;
    const layer_t *layer = ((const job_t *)data)->layer;
    const row_t *row = step->rows + index;
    const int64_t heads = layer->heads, kv_heads = layer->kv_heads, group = heads / kv_heads;
    const int64_t dim = layer->keys.dim, stride = width(layer);
    const range_t own = heads_of(row, kv_heads);
    const float *query = layer->query.data + row->token * layer->query.token_stride;
    float *turned = layer->turned + index * heads * stride;
    int64_t slab, slot;
    find_new(step, index, layer->summaries, &slab, &slot);
    write_token(&layer->keys, slab, slot, &layer->key, row->token, kv_heads, own);
    write_token(&layer->values, slab, slot, &layer->value, row->token, kv_heads, own);
    for (int64_t h = own.first * group; h < own.end * group; h++)
        multiply(query + h * layer->query.head_stride, layer->keys.turn + h / group * dim * dim, dim,
                 turned + h * stride);
    if (row->head > 0) {
        const look_t look = {turned + own.first * group * stride, stride, group, own.first, kv_heads, dim,
                             layer->scale};
        choose(step, index, layer->summaries, &look, layer, compare_block);
    }
}

static void work(void *data) { run_pieces(((job_t *)data)->step, data, prepare, attend, merge); }

/* Write every row's new key and value into its last slot, then attend. `team` may be NULL for one thread. */
void skim_decode_codes(step_t *step, const layer_t *layer, team_t team, unsigned threads)
{
    job_t job = {step, layer};
    run_step(step, work, &job, team, threads);
    add_masses(step);
}
