/* Fast decode rows: rank blocks by their summaries and the row's evidence, and choose those that are read; and
 * the evidence that slow rows leave. `attention/glance.py` is the plain twin and says what is chosen.
 *
 * A fast row has a `row_t` for each KV head. `choose` ranks the blocks for it and writes the runs that it reads.
 */

#pragma once

#include "decode.h"

enum { AHEAD = 2 * QUAD }; /* blocks whose summaries are prefetched */

/* What slow-fast decode needs of a layer; `native_glance.py` has the same structure. */
typedef struct {
    const float *const *mean, *const *variance; /* by slab: [blocks, kv_heads, dim] */
    int64_t slab_blocks, block_size;
    int64_t place; /* among the layers with summaries */
} summaries_t;

/* The summary of a block's head: its mean, or its variance. */
INLINE const float *summary(const float *const *plane, const summaries_t *layer, int64_t block, int64_t kv_heads,
                            int64_t head, int64_t dim)
{
    return plane[block / layer->slab_blocks] + (block % layer->slab_blocks * kv_heads + head) * dim;
}

/* The value at place `wanted`, from 0, if the numbers were sorted, the largest first. None may be NaN. */
static float nth_largest(float *x, int64_t count, int64_t wanted)
{
    for (int64_t low = 0, high = count - 1; low < high;) {
        const float pivot = x[(low + high) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot)
                i++;
            while (x[j] < pivot)
                j--;
            if (i <= j) {
                const float kept = x[i];
                x[i++] = x[j];
                x[j--] = kept;
            }
        }
        if (wanted <= j)
            high = j;
        else if (wanted >= i)
            low = i;
        else
            break;
    }
    return x[wanted];
}

/* Estimated logs of `heads` heads for QUAD blocks. scaled: [heads, 2, dim]; logs: [heads][stride] */
INLINE void estimate_quad(int heads, int64_t dim, const float *scaled, const float *const *means,
                          const float *const *variances, float *logs, int64_t stride, int64_t count)
{
    vec sums[3][QUAD] = {0};
    for (int64_t d = 0; d < dim; d += LANES)
        for (int j = 0; j < QUAD; j++) {
            const vec mean = load(means[j] + d), variance = load(variances[j] + d);
            for (int h = 0; h < heads; h++)
                sums[h][j] += load(scaled + 2 * h * dim + d) * mean
                              + load(scaled + (2 * h + 1) * dim + d) * variance;
        }
    for (int h = 0; h < heads; h++) {
        quad found = sum_each(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
        for (int j = 0; j < count; j++)
            logs[h * stride + j] = found[j];
    }
}

/* Estimated shares of attention mass of one KV head. logs: [group, full]; shares: [full] */
static void estimate(const glance_t *glance, const summaries_t *layer, int64_t head, int64_t kv_heads,
                     int64_t group, int64_t dim, const float *query, int64_t stride, double scale,
                     float *scaled, float *logs, float *shares)
{
    const int64_t full = glance->full;
    const float s = (float)(scale * LOG2_E), v = (float)(scale * scale * LOG2_E / 2); /* exponents of two */
    for (int64_t g = 0; g < group; g++)
        for (int64_t d = 0; d < dim; d++) {
            const float q = query[g * stride + d];
            scaled[2 * g * dim + d] = s * q;
            scaled[(2 * g + 1) * dim + d] = v * q * q;
        }
    for (int64_t b = 0; b < full; b += QUAD) {
        const int64_t count = full - b < QUAD ? full - b : QUAD;
        const float *means[QUAD], *variances[QUAD];
        for (int64_t j = 0; j < QUAD; j++) { /* a shorter quad repeats its last block */
            const int64_t block = glance->blocks[b + (j < count ? j : count - 1)], ahead = b + j + AHEAD;
            means[j] = summary(layer->mean, layer, block, kv_heads, head, dim);
            variances[j] = summary(layer->variance, layer, block, kv_heads, head, dim);
            if (ahead < full) {
                const int64_t later = glance->blocks[ahead];
                fetch(summary(layer->mean, layer, later, kv_heads, head, dim), dim * sizeof(float));
                fetch(summary(layer->variance, layer, later, kv_heads, head, dim), dim * sizeof(float));
            }
        }
        for (int64_t g = 0, n; g < group; g += n) {
            const float *q = scaled + 2 * g * dim;
            n = heads_at_once(group - g);
            if (n == 1)
                estimate_quad(1, dim, q, means, variances, logs + g * full + b, full, count);
            else if (n == 2)
                estimate_quad(2, dim, q, means, variances, logs + g * full + b, full, count);
            else
                estimate_quad(3, dim, q, means, variances, logs + g * full + b, full, count);
        }
    }
    memset(shares, 0, full * sizeof(float));
    for (int64_t g = 0; g < group; g++) {
        float *log = logs + g * full, top = -INFINITY, sum = 0;
        for (int64_t b = 0; b < full; b++)
            top = log[b] > top ? log[b] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t b = 0; b < full; b++) {
            log[b] = exp2_nonpositive(log[b] - top);
            sum += log[b];
        }
        const float factor = 1.0f / (sum * (float)group);
        for (int64_t b = 0; b < full; b++)
            shares[b] += log[b] * factor;
    }
}

/* Append a block to the runs of a row; `slots` of it are read. */
INLINE void add_block(step_t *step, row_t *row, const summaries_t *layer, int64_t block, int64_t slots)
{
    const int64_t slab = block / layer->slab_blocks, start = block % layer->slab_blocks * layer->block_size;
    run_t *last = step->runs + row->runs_end - 1;
    if (row->runs_end > row->runs_at && last->slab == slab && last->start + last->count == start)
        last->count += slots;
    else
        step->runs[row->runs_end++] = (run_t){slab, start, slots};
}

/* The highest evidence among the blocks that are near a full block. */
INLINE float near_evidence(const glance_t *glance, const float *evidence, int64_t block)
{
    const int64_t first = block > glance->near ? block - glance->near : 0;
    float found = evidence[block];
    for (int64_t b = first; b <= block + glance->near && b < glance->full; b++)
        found = evidence[b] > found ? evidence[b] : found;
    return found;
}

/* Choose the blocks of row `index`, whose query for its KV head begins at `query`. */
static void choose(step_t *step, int64_t index, const summaries_t *layer, int64_t kv_heads, int64_t group,
                   int64_t dim, const float *query, int64_t stride, double scale)
{
    row_t *row = step->rows + index;
    glance_t *glance = step->glances + index;
    const int64_t full = glance->full, head = row->head - 1, between = glance->recent - glance->sinks;
    float *logs = glance->scratch, *shares = logs + group * full, *ranks = shares + full;
    float *scaled = ranks + full;
    estimate(glance, layer, head, kv_heads, group, dim, query, stride, scale, scaled, logs, shares);
    const int64_t known = layer->place * glance->layer_stride + head * glance->head_stride;
    const float *evidence = glance->evidence ? glance->evidence + known : NULL;
    float *sorted = logs; /* no longer needed */
    for (int64_t i = 0; i < between; i++) {
        const int64_t b = glance->sinks + i;
        const float rank = shares[b] + (evidence ? (float)glance->trust * near_evidence(glance, evidence, b) : 0);
        sorted[i] = ranks[i] = rank == rank ? rank : -INFINITY; /* the mass tells of a NaN */
    }
    const int64_t best = glance->reads - glance->sinks - (glance->count - glance->recent);
    float least = INFINITY;
    int64_t ties = 0;
    if (best > 0) {
        least = nth_largest(sorted, between, best - 1);
        ties = best;
        for (int64_t i = 0; i < between; i++)
            ties -= ranks[i] > least;
    }
    float mass = 0;
    row->runs_end = row->runs_at;
    for (int64_t b = 0; b < glance->count; b++) {
        if (b >= glance->sinks && b < glance->recent) {
            const float rank = ranks[b - glance->sinks];
            if (!(rank > least) && !(rank == least && ties-- > 0))
                continue;
        }
        mass += b < full ? shares[b] : 0;
        add_block(step, row, layer, glance->blocks[b],
                  b + 1 < glance->count ? layer->block_size : glance->last);
    }
    glance->mass = mass;
}

/* Add the masses of fast rows to the totals of the step. Called by one thread. */
static void add_masses(const step_t *step)
{
    for (int64_t i = 0; step->glances && i < step->row_count; i++)
        if (step->rows[i].head > 0)
            *step->glances[i].total += step->glances[i].mass * step->glances[i].weight;
}

INLINE int keeps_evidence(const step_t *step, int64_t index)
{
    return step->glances && step->glances[index].evidence && step->rows[index].head == 0;
}

/* Renew the evidence of a slow row by its recorded weights, once its chunks are done. */
static void renew(const step_t *step, int64_t index, const summaries_t *layer, int64_t heads, int64_t kv_heads,
                  int64_t dim, const float *partials)
{
    const glance_t *glance = step->glances + index;
    const int64_t size = heads * (2 + dim), group = heads / kv_heads, keys = step->rows[index].keys;
    const int64_t tiles = tiles_of(keys);
    float *tops = glance->scratch, *weights = tops + heads * tiles;
    const float *begin = partials + step->chunks_at[index] * size;
    const float *end = partials + step->chunks_at[index + 1] * size;
    for (int64_t h = 0; h < heads; h++) {
        float top = -INFINITY, sum = 0;
        for (const float *partial = begin; partial < end; partial += size)
            top = partial[h] > top ? partial[h] : top;
        for (const float *partial = begin; partial < end; partial += size)
            sum += exp2_nonpositive(partial[h] - top) * partial[heads + h];
        for (int64_t t = 0; t < tiles; t++)
            tops[h * tiles + t] = exp2_nonpositive(tops[h * tiles + t] - top) / (sum * (float)group);
    }
    for (int64_t k = 0; k < kv_heads; k++) {
        float *shares = glance->evidence + layer->place * glance->layer_stride + k * glance->head_stride;
        for (int64_t b = 0; b < glance->full; b++) {
            float found = 0;
            for (int64_t h = k * group; h < (k + 1) * group; h++)
                for (int64_t s = b * layer->block_size; s < (b + 1) * layer->block_size; s++)
                    found += weights[h * tiles * TILE + s] * tops[h * tiles + s / TILE];
            const float before = (float)glance->kept * shares[b];
            shares[b] = found > before ? found : before;
        }
    }
}
