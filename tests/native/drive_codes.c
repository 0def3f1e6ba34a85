/* Compares decode attention over codes with plain loops, on random formats, shapes, pools and batches. */

#include "decode_codes.c"
#include "drive.h"

enum { SLABS = 3, SLOTS = 512 };

/* A random side, its slabs allocated exactly. */
static side_t make_side(int64_t bits, int64_t kv_heads, uint8_t **codes, uint16_t **scales)
{
    const int64_t dim = LANES * (bits == 8 ? 1 : 2) * draw(9), groups = bits == 8 ? 1 : draw(2);
    float *matrix = floats(kv_heads * dim * dim), *turn = floats(kv_heads * dim * dim);
    side_t side = {codes, scales, dim, bits, groups, matrix, turn};
    for (int i = 0; i < SLABS; i++) {
        const int64_t bytes = SLOTS * kv_heads * code_bytes(&side), count = SLOTS * kv_heads * numbers(&side);
        codes[i] = malloc((size_t)bytes);
        scales[i] = malloc((size_t)count * sizeof(uint16_t));
        for (int64_t j = 0; j < bytes; j++)
            codes[i][j] = (uint8_t)(next() % 255 + 1); /* -128 is no code */
        for (int64_t j = 0; j < count; j++)
            scales[i][j] = to_bf16((float)(next() % 1000) / (bits == 8 ? 60000.0f : 6000.0f));
    }
    return side;
}

static void free_side(const side_t *side)
{
    for (int i = 0; i < SLABS; i++) {
        free(side->codes[i]);
        free(side->scales[i]);
    }
    free((void *)side->to_stored);
    free((void *)side->turn);
}

/* One stored number, before the basis is undone. */
static double number(const side_t *side, int64_t kv_heads, const run_t *run, int64_t slot, int64_t k, int64_t d)
{
    const uint8_t *codes = side->codes[run->slab] + (slot * kv_heads + k) * code_bytes(side);
    const uint16_t *scales = side->scales[run->slab] + (slot * kv_heads + k) * numbers(side);
    if (side->bits == 8)
        return (double)(int8_t)codes[d] * from_bf16(scales[d % 2]);
    const int64_t half = side->dim / 2, group = d / (side->dim / side->groups);
    const int code = d < half ? codes[d] & 15 : codes[d - half] >> 4;
    return (code - CENTRE) * (double)from_bf16(scales[2 * group]) + from_bf16(scales[2 * group + 1]);
}

/* A row's own slot holds its new token, to half a step of the codes and the rounding of scales. */
static void check_written(const side_t *side, int64_t kv_heads, const run_t *last, const float *new)
{
    const int64_t slot = last->start + last->count - 1, dim = side->dim;
    for (int64_t k = 0; k < kv_heads; k++, new += dim) {
        double stored[MAX_DIM], top = 0;
        for (int64_t d = 0; d < dim; d++) {
            stored[d] = 0;
            for (int64_t i = 0; i < dim; i++)
                stored[d] += (double)new[i] * side->to_stored[(k * dim + i) * dim + d];
            top = fabs(stored[d]) > top ? fabs(stored[d]) : top;
        }
        const double step = side->bits == 8 ? top / MOST : 2 * top / (LEVELS - 1);
        for (int64_t d = 0; d < dim; d++)
            if (!(fabs(number(side, kv_heads, last, slot, k, d) - stored[d]) <= 0.6 * step + 0.01 * top))
                expect("written", number(side, kv_heads, last, slot, k, d), stored[d]);
    }
}

static void compare(int64_t rows, int64_t most_keys, unsigned threads)
{
    const int64_t kv_heads = draw(3), group = draw(5), heads = kv_heads * group, kind = draw(3);
    uint8_t *codes[2][SLABS];
    uint16_t *scales[2][SLABS];
    layer_t layer = {.heads = heads, .kv_heads = kv_heads, .scale = 0.1};
    layer.keys = make_side(kind == 3 ? 4 : 8, kv_heads, codes[0], scales[0]);
    layer.values = make_side(kind == 1 ? 8 : 4, kv_heads, codes[1], scales[1]);
    const int64_t key_dim = layer.keys.dim, value_dim = layer.values.dim;
    run_t *runs = malloc((size_t)(rows * most_keys) * sizeof(run_t));
    row_t *table = malloc((size_t)rows * sizeof(row_t));
    int64_t used = 0;
    for (int64_t i = 0; i < rows; i++) {
        table[i] = (row_t){i, used, used, 0, 0};
        for (int64_t left = draw(most_keys); left > 0;) { /* each row has a stretch of its own to write to */
            int64_t count = draw(left), stretch = SLOTS / rows;
            count = count < stretch ? count : stretch;
            runs[used++] = (run_t){draw(SLABS) - 1, i * stretch + draw(stretch - count + 1) - 1, count};
            table[i].keys += count;
            left -= count;
        }
        table[i].runs_end = used;
    }
    int64_t *chunks_at = malloc((size_t)(rows + 1) * sizeof(int64_t));
    int64_t *unfinished = malloc((size_t)rows * sizeof(int64_t));
    int64_t *ready = malloc((size_t)rows * sizeof(int64_t));
    int64_t *pieces = malloc((size_t)(rows * (MAX_CHUNKS + 1)) * sizeof(int64_t));
    step_t step = {runs, table, rows, chunks_at, unfinished, ready, pieces, 0, 0, NULL};
    const int64_t chunks = skim_count_chunks(&step, (unsigned)draw(4));
    float *query = floats(rows * heads * key_dim), *key = floats(rows * kv_heads * key_dim);
    float *value = floats(rows * kv_heads * value_dim), *out = floats(rows * heads * value_dim);
    layer.query = (tokens_t){query, heads * key_dim, key_dim};
    layer.key = (tokens_t){key, kv_heads * key_dim, key_dim};
    layer.value = (tokens_t){value, kv_heads * value_dim, value_dim};
    layer.turned = floats(rows * heads * width(&layer));
    layer.partials = floats(chunks * heads * (2 + value_dim));
    layer.out = out;
    skim_decode_codes(&step, &layer, team, threads);

    double turned[MAX_DIM], sums[MAX_DIM];
    for (int64_t i = 0; i < rows; i++) {
        check_written(&layer.keys, kv_heads, runs + table[i].runs_end - 1, key + i * kv_heads * key_dim);
        check_written(&layer.values, kv_heads, runs + table[i].runs_end - 1, value + i * kv_heads * value_dim);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t k = h / group;
            for (int64_t d = 0; d < key_dim; d++) {
                turned[d] = 0;
                for (int64_t j = 0; j < key_dim; j++)
                    turned[d] += (double)query[(i * heads + h) * key_dim + j]
                                 * layer.keys.turn[(k * key_dim + j) * key_dim + d];
            }
            double best = -INFINITY, sum = 0;
            memset(sums, 0, sizeof(sums));
            for (int pass = 0; pass < 2; pass++) /* the maximum, then the sums */
                for (const run_t *run = runs + table[i].runs_at; run < runs + table[i].runs_end; run++)
                    for (int64_t s = run->start; s < run->start + run->count; s++) {
                        double score = 0;
                        for (int64_t d = 0; d < key_dim; d++)
                            score += turned[d] * number(&layer.keys, kv_heads, run, s, k, d);
                        score *= layer.scale;
                        if (pass == 0) {
                            best = score > best ? score : best;
                            continue;
                        }
                        sum += exp(score - best);
                        for (int64_t d = 0; d < value_dim; d++)
                            sums[d] += exp(score - best) * number(&layer.values, kv_heads, run, s, k, d);
                    }
            for (int64_t d = 0; d < value_dim; d++) {
                double wanted = 0;
                for (int64_t j = 0; j < value_dim; j++)
                    wanted += sums[j] / sum * layer.values.turn[(k * value_dim + j) * value_dim + d];
                expect("attention over codes", out[(i * heads + h) * value_dim + d], wanted);
            }
        }
    }
    void *made[] = {runs, table, chunks_at, unfinished, ready, pieces, query, key, value, layer.turned, layer.partials, out};
    for (size_t i = 0; i < sizeof(made) / sizeof(*made); i++)
        free(made[i]);
    free_side(&layer.keys);
    free_side(&layer.values);
}

int main(void)
{
    for (int turn = 0; turn < 30; turn++)
        compare(draw(4), turn % 5 == 0 ? 600 : 60, (unsigned)draw(4));
    puts("attention over codes: ok");
}
