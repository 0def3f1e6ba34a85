/* Fast decode rows: rank blocks by their summaries and the row's evidence, compare the keys of the best, and choose
 * those that are read; and the evidence that slow rows leave. `attention/glance.py` is the plain twin and says what
 * is chosen.
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

/* The query heads of one KV head that reads a layer. */
typedef struct {
    const float *query; /* [group, dim] by its stride */
    int64_t stride, group, head, kv_heads, dim;
    double scale;
} look_t;

/* The logs to the base 2 of the mean mass of a block's keys, for each query head, and prefetches the keys of `next`.
 * logs: [group] by its stride */
typedef void compare_t(const void *layer, const look_t *look, const run_t *block, const run_t *next, float *logs,
                       int64_t stride);

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

/* Estimated logs, to the base 2, of the mean mass of a full block's keys. scaled: [group, 2, dim]; logs: [group, full] */
static void estimate(const glance_t *glance, const summaries_t *layer, const look_t *look, float *scaled, float *logs)
{
    const int64_t full = glance->full, group = look->group, dim = look->dim, kv_heads = look->kv_heads;
    const int64_t head = look->head;
    const float s = (float)(look->scale * LOG2_E), v = (float)(look->scale * look->scale * LOG2_E / 2 * glance->spread);
    for (int64_t g = 0; g < group; g++)
        for (int64_t d = 0; d < dim; d++) {
            const float q = look->query[g * look->stride + d];
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
}

/* The shares of attention mass of one KV head: their mean over its query heads and, unless NULL, the highest.
 * logs: [group, full]; scratch, shares, highest: [full] */
static void share(const float *logs, int64_t group, int64_t full, float *scratch, float *shares, float *highest)
{
    memset(shares, 0, full * sizeof(float));
    for (int64_t b = 0; highest && b < full; b++)
        highest[b] = 0;
    for (int64_t g = 0; g < group; g++) {
        const float *log = logs + g * full;
        float top = -INFINITY, sum = 0;
        for (int64_t b = 0; b < full; b++)
            top = log[b] > top ? log[b] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t b = 0; b < full; b++) {
            scratch[b] = exp2_nonpositive(log[b] - top);
            sum += scratch[b];
        }
        const float factor = 1.0f / (sum * (float)group);
        for (int64_t b = 0; b < full; b++)
            shares[b] += scratch[b] * factor;
        for (int64_t b = 0; highest && b < full; b++)
            highest[b] = scratch[b] * factor > highest[b] ? scratch[b] * factor : highest[b];
    }
}

/* The bits of a number that is not negative, which have its order; -1 for a NaN. */
INLINE int32_t bits_of(float number)
{
    union {
        float value;
        int32_t bits;
    } x = {number};
    return number == number ? x.bits : -1;
}

/* The places of the `wanted` largest numbers, ascending. None is negative. Of equal ones the first count, and a NaN is
 * least. bits: [count] */
static void find_largest(const float *x, int64_t count, int64_t wanted, int32_t *bits, int32_t *places)
{
    int32_t low = -1, high = 0x7f800001; /* of each number and of none: the threshold is between them */
    int64_t reached = count, above = 0;  /* numbers that reach `low`, and `high` */
    for (int64_t i = 0; i < count; i++)
        bits[i] = bits_of(x[i]);
    while (reached > wanted && high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        int32_t found = 0;
#pragma omp simd reduction(+ : found)
        for (int64_t i = 0; i < count; i++)
            found += bits[i] >= middle;
        if (found >= wanted) {
            low = middle;
            reached = found;
        } else {
            high = middle;
            above = found;
        }
    }
    int64_t ties = reached > wanted ? wanted - above : count; /* more than `wanted` reach it: they are equal to it */
    for (int64_t i = 0, found = 0; i < count && found < wanted; i++)
        if (bits[i] > low || (bits[i] == low && ties-- > 0))
            places[found++] = (int32_t)i;
}

/* A block of the pool as a run. */
INLINE run_t run_of(const summaries_t *layer, int64_t block, int64_t slots)
{
    return (run_t){block / layer->slab_blocks, block % layer->slab_blocks * layer->block_size, slots};
}

/* The slot of a row's new token. */
INLINE void find_new(const step_t *step, int64_t index, const summaries_t *layer, int64_t *slab, int64_t *slot)
{
    const row_t *row = step->rows + index;
    run_t last;
    if (row->head > 0) /* its runs are not chosen yet */
        last = run_of(layer, step->glances[index].blocks[step->glances[index].count - 1], step->glances[index].last);
    else
        last = step->runs[row->runs_end - 1];
    *slab = last.slab;
    *slot = last.start + last.count - 1;
}

/* Append a block to the runs of a row; `slots` of it are read. */
INLINE void add_block(step_t *step, row_t *row, const summaries_t *layer, int64_t block, int64_t slots)
{
    const run_t run = run_of(layer, block, slots);
    run_t *last = step->runs + row->runs_end - 1;
    if (row->runs_end > row->runs_at && last->slab == run.slab && last->start + last->count == run.start)
        last->count += slots;
    else
        step->runs[row->runs_end++] = run;
}

/* The ranks of some full blocks, from `first` on: their shares, and the highest evidence of the blocks near each. */
static void rank(const glance_t *glance, const float *evidence, int64_t first, int64_t count, const float *shares,
                 float *ranks)
{
    for (int64_t i = 0; i < count; i++)
        ranks[i] = evidence ? evidence[first + i] : 0;
    for (int64_t away = 1; evidence && away <= glance->near; away++) {
        const int64_t skip = away > first ? away - first : 0; /* earlier ones have no block this far before them */
        const int64_t end = glance->full - first - away;      /* from here on, none is this far behind */
        for (int64_t i = skip; i < count; i++)
            ranks[i] = evidence[first + i - away] > ranks[i] ? evidence[first + i - away] : ranks[i];
        for (int64_t i = 0; i < (count < end ? count : end); i++)
            ranks[i] = evidence[first + i + away] > ranks[i] ? evidence[first + i + away] : ranks[i];
    }
    for (int64_t i = 0; i < count; i++)
        ranks[i] = shares[first + i] + (float)glance->trust * ranks[i];
}

/* Write the true logs of the candidates that are not sure: those with a finite rank. places: of the candidates */
static void compare_all(const glance_t *glance, const summaries_t *layer, const look_t *look, const void *kernel,
                        compare_t compare, const float *ranks, const int32_t *places, int64_t candidates, float *logs)
{
    int64_t now = -1;
    for (int64_t next = 0; next <= candidates; next++) {
        if (next < candidates && ranks[next] == INFINITY)
            continue;
        if (now >= 0) {
            const int64_t ahead = next < candidates ? next : now;
            const run_t here = run_of(layer, glance->blocks[glance->sinks + places[now]], layer->block_size);
            const run_t there = run_of(layer, glance->blocks[glance->sinks + places[ahead]], layer->block_size);
            compare(kernel, look, &here, &there, logs + places[now], glance->full);
        }
        now = next;
    }
}

/* Choose the blocks of row `index`. */
static void choose(step_t *step, int64_t index, const summaries_t *layer, const look_t *look, const void *kernel,
                   compare_t compare)
{
    row_t *row = step->rows + index;
    glance_t *glance = step->glances + index;
    const int64_t full = glance->full, sinks = glance->sinks, between = glance->recent - sinks;
    const int64_t best = glance->reads - sinks - (glance->count - glance->recent);
    float *logs = glance->scratch, *shares = logs + look->group * full, *highest = shares + full;
    float *ranks = highest + full, *scratch = ranks + full, *scaled = scratch + full;
    int32_t *places = (int32_t *)(scaled + 2 * look->group * look->dim), *chosen = places + full, *bits = chosen + full;
    estimate(glance, layer, look, scaled, logs);
    share(logs, look->group, full, scratch, shares, NULL);
    const int64_t known = layer->place * glance->layer_stride + look->head * glance->head_stride;
    const float *evidence = glance->evidence ? glance->evidence + known : NULL;
    rank(glance, evidence, sinks, between, shares, ranks);
    if (glance->compares == 0) {
        find_largest(ranks, between, best, bits, chosen);
    } else {
        const int64_t candidates = glance->sure + glance->compares;
        find_largest(ranks, between, candidates, bits, places);
        for (int64_t j = 0; j < candidates; j++)
            ranks[j] = ranks[places[j]];
        find_largest(ranks, candidates, glance->sure, bits, chosen);
        for (int64_t j = 0; j < glance->sure; j++)
            ranks[chosen[j]] = INFINITY;
        compare_all(glance, layer, look, kernel, compare, ranks, places, candidates, logs + sinks);
        share(logs, look->group, full, scratch, shares, highest);
        for (int64_t j = 0; j < candidates; j++)
            ranks[j] = ranks[j] == INFINITY ? INFINITY : highest[sinks + places[j]];
        find_largest(ranks, candidates, best, bits, chosen);
        for (int64_t j = 0; j < best; j++)
            chosen[j] = places[chosen[j]];
    }
    float mass = 0;
    row->runs_end = row->runs_at;
    for (int64_t b = 0, taken = 0; b < glance->count; b++) {
        if (b >= sinks && b < glance->recent) {
            if (taken == best || chosen[taken] != b - sinks)
                continue;
            taken++;
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
