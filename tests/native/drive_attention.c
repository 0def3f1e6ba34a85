/* Compares decode attention with plain loops, on random shapes, pools and batches. */

#include "decode_attention.c"
#include "drive.h"

enum { SLABS = 3, SLOTS = 2048 };

static void compare(int64_t rows, int64_t most_keys, unsigned threads)
{
    const int64_t kv_heads = draw(4), group = draw(5), heads = kv_heads * group;
    const int64_t key_dim = LANES * draw(17), value_dim = draw(2) == 1 ? key_dim : LANES * draw(17);
    float *keys[SLABS], *values[SLABS];
    for (int i = 0; i < SLABS; i++) {
        keys[i] = floats(SLOTS * kv_heads * key_dim);
        values[i] = floats(SLOTS * kv_heads * value_dim);
    }
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
    float *query = floats(rows * heads * key_dim), *sinks = draw(2) == 1 ? floats(heads) : NULL;
    float *key = floats(rows * kv_heads * key_dim), *value = floats(rows * kv_heads * value_dim);
    float *partials = floats(chunks * heads * (2 + value_dim)), *out = floats(rows * heads * value_dim);
    layer_t layer = {
        heads, kv_heads, key_dim, value_dim, keys, values,
        {query, heads * key_dim, key_dim}, {key, kv_heads * key_dim, key_dim},
        {value, kv_heads * value_dim, value_dim}, sinks, partials, out, 0.3, NULL,
    };
    skim_decode(&step, &layer, team, threads);

    double *wanted = malloc((size_t)value_dim * sizeof(double));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++) {
            double best = sinks ? sinks[h] : -INFINITY, sum = 0;
            for (int pass = 0; pass < 2; pass++) { /* the maximum, then the sums */
                if (pass == 1)
                    sum = sinks ? exp(sinks[h] - best) : 0;
                for (int64_t d = 0; d < value_dim; d++)
                    wanted[d] = 0;
                for (const run_t *run = runs + table[i].runs_at; run < runs + table[i].runs_end; run++)
                    for (int64_t s = run->start; s < run->start + run->count; s++) {
                        const float *k = keys[run->slab] + (s * kv_heads + h / group) * key_dim;
                        const float *v = values[run->slab] + (s * kv_heads + h / group) * value_dim;
                        double score = 0;
                        for (int64_t d = 0; d < key_dim; d++)
                            score += (double)query[(i * heads + h) * key_dim + d] * k[d];
                        score *= layer.scale;
                        if (pass == 0) {
                            best = score > best ? score : best;
                            continue;
                        }
                        sum += exp(score - best);
                        for (int64_t d = 0; d < value_dim; d++)
                            wanted[d] += exp(score - best) * v[d];
                    }
            }
            for (int64_t d = 0; d < value_dim; d++)
                expect("attention", out[(i * heads + h) * value_dim + d], wanted[d] / sum);
        }
    void *made[] = {runs, table, chunks_at, unfinished, ready, pieces, query, key, value, sinks, partials, out, wanted};
    for (size_t i = 0; i < sizeof(made) / sizeof(*made); i++)
        free(made[i]);
    for (int i = 0; i < SLABS; i++) {
        free(keys[i]);
        free(values[i]);
    }
}

int main(void)
{
    for (int turn = 0; turn < 40; turn++)
        compare(draw(5), turn % 4 == 0 ? 1500 : 60, (unsigned)draw(4));
    puts("attention: ok");
}
