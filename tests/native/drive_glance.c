/* Compares slow-fast decode with plain loops: blocks chosen, masses, evidence and attention, on random steps. */

#include "decode_attention.c"
#include "drive.h"

enum { SLABS = 3, SLAB_BLOCKS = 40, MOST = SLABS * SLAB_BLOCKS };
#define TRUST 0.5 /* weight of evidence in a rank */
#define KEPT 0.75 /* of earlier evidence, at a slow step */
#define SPREAD 0.6 /* of the variance in an estimate */

typedef struct {
    int64_t blocks[MOST], length;
    int fast;
    float *evidence, *before;
    double total;
} plan_t;

static int64_t block_size, kv_heads, group, heads, dim, near;
static float *keys[SLABS], *values[SLABS], *means[SLABS], *variances[SLABS];

static const float *slot_of(float *const *plane, const plan_t *plan, int64_t slot, int64_t k)
{
    const int64_t block = plan->blocks[slot / block_size], at = block % SLAB_BLOCKS * block_size;
    return plane[block / SLAB_BLOCKS] + ((at + slot % block_size) * kv_heads + k) * dim;
}

/* Attention of one head over the blocks that are marked. Returns the sum of weights; out is not divided. */
static double attend_plainly(const plan_t *plan, const int *read, const float *query, int64_t k, double scale,
                             double *masses, double *out)
{
    double best = -INFINITY, sum = 0;
    for (int64_t d = 0; d < dim; d++)
        out[d] = 0;
    for (int64_t b = 0; b * block_size < plan->length; b++)
        masses[b] = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t s = 0; s < plan->length; s++) {
            double score = 0;
            for (int64_t d = 0; d < dim; d++)
                score += (double)query[d] * slot_of(keys, plan, s, k)[d] * scale;
            if (!read[s / block_size])
                continue;
            if (pass == 0) {
                best = score > best ? score : best;
                continue;
            }
            const double weight = exp(score - best);
            sum += weight;
            masses[s / block_size] += weight;
            for (int64_t d = 0; d < dim; d++)
                out[d] += weight * slot_of(values, plan, s, k)[d];
        }
    return sum;
}

/* The logs of the mean masses of full blocks: estimates, and the truth for the blocks that are compared. */
static void find_logs(const plan_t *plan, const float *query, int64_t k, double scale, const int *compared, double *logs)
{
    for (int64_t b = 0; b < plan->length / block_size; b++) {
        const int64_t block = plan->blocks[b], at = (block % SLAB_BLOCKS * kv_heads + k) * dim;
        logs[b] = 0;
        for (int64_t d = 0; d < dim; d++) {
            const double q = query[d] * scale;
            logs[b] += q * means[block / SLAB_BLOCKS][at + d]
                       + q * q / 2 * SPREAD * variances[block / SLAB_BLOCKS][at + d];
        }
        double sum = 0;
        for (int64_t s = b * block_size; compared[b] && s < (b + 1) * block_size; s++) {
            double score = 0;
            for (int64_t d = 0; d < dim; d++)
                score += (double)query[d] * slot_of(keys, plan, s, k)[d] * scale;
            sum += exp(score);
        }
        if (compared[b])
            logs[b] = log(sum / (double)block_size);
    }
}

/* The shares of a KV head: the mean over its query heads, and the highest. */
static void share_plainly(const plan_t *plan, const float *query, int64_t k, double scale, const int *compared,
                          double *shares, double *highest)
{
    const int64_t full = plan->length / block_size;
    double logs[MOST];
    for (int64_t b = 0; b < full; b++)
        shares[b] = highest[b] = 0;
    for (int64_t g = 0; g < group; g++) {
        double top = -INFINITY, sum = 0;
        find_logs(plan, query + g * dim, k, scale, compared, logs);
        for (int64_t b = 0; b < full; b++)
            top = logs[b] > top ? logs[b] : top;
        for (int64_t b = 0; b < full; b++)
            sum += exp(logs[b] - top);
        for (int64_t b = 0; b < full; b++) {
            shares[b] += exp(logs[b] - top) / sum / (double)group;
            highest[b] = fmax(highest[b], exp(logs[b] - top) / sum / (double)group);
        }
    }
}

/* Mark the `wanted` blocks with the highest ranks among those that may be chosen. */
static void mark_best(const double *ranks, const int *may, int64_t full, int64_t wanted, int *marked)
{
    for (; wanted > 0; wanted--) {
        int64_t best = -1;
        for (int64_t b = 0; b < full; b++)
            if (may[b] && !marked[b] && (best < 0 || ranks[b] > ranks[best]))
                best = b;
        marked[best] = 1;
    }
}

/* The rank of a full block: its share, and the highest evidence of the blocks near it. */
static double rank_of(const double *shares, const float *evidence, int64_t block, int64_t full)
{
    double best = -INFINITY;
    for (int64_t b = 0; b < full; b++)
        if (b - block <= near && block - b <= near && evidence[b] > best)
            best = evidence[b];
    return shares[block] + TRUST * best;
}

static void compare(int64_t count, unsigned threads)
{
    const double scale = 0.4;
    block_size = draw(20), kv_heads = draw(3), group = draw(5), heads = kv_heads * group, dim = LANES * draw(9);
    near = draw(4) - 1;
    for (int i = 0; i < SLABS; i++) {
        keys[i] = floats(SLAB_BLOCKS * block_size * kv_heads * dim);
        values[i] = floats(SLAB_BLOCKS * block_size * kv_heads * dim);
        means[i] = floats(SLAB_BLOCKS * kv_heads * dim);
        variances[i] = floats(SLAB_BLOCKS * kv_heads * dim);
        for (int64_t j = 0; j < SLAB_BLOCKS * kv_heads * dim; j++)
            variances[i][j] = fabsf(variances[i][j]);
    }
    int64_t order[MOST], used = 0;
    for (int64_t i = 0; i < MOST; i++) {
        const int64_t at = draw(i + 1) - 1;
        order[i] = order[at];
        order[at] = i;
    }
    plan_t *plans = calloc((size_t)count, sizeof(plan_t));
    row_t *rows = calloc((size_t)(count * kv_heads), sizeof(row_t));
    glance_t *glances = calloc((size_t)(count * kv_heads), sizeof(glance_t));
    run_t *runs = calloc((size_t)(MOST * (kv_heads + 1)), sizeof(run_t));
    float *totals = calloc((size_t)count, sizeof(float));
    int64_t made = 0, run = 0;
    for (int64_t i = 0; i < count; i++) {
        plan_t *plan = plans + i;
        const int64_t blocks = draw(MOST / count), tail = draw(block_size);
        plan->length = (blocks - 1) * block_size + tail;
        plan->evidence = floats(2 * kv_heads * blocks);
        for (int64_t b = 0; b < 2 * kv_heads * blocks; b++)
            plan->evidence[b] = fabsf(plan->evidence[b]);
        plan->before = malloc((size_t)(2 * kv_heads * blocks) * sizeof(float));
        memcpy(plan->before, plan->evidence, (size_t)(2 * kv_heads * blocks) * sizeof(float));
        for (int64_t b = 0; b < blocks; b++)
            plan->blocks[b] = order[used++];
        const int64_t full = plan->length / block_size;
        glance_t glance = {
            .blocks = plan->blocks, .count = blocks, .full = full, .reads = blocks, .last = tail,
            .evidence = plan->evidence, .layer_stride = kv_heads * blocks, .head_stride = blocks,
            .trust = TRUST, .kept = KEPT, .spread = SPREAD, .near = near,
            .total = totals + i, .weight = 1.0f / (float)kv_heads,
        };
        plan->fast = blocks > 3 && draw(3) > 1;
        if (!plan->fast) {
            const int64_t tiles = tiles_of(plan->length);
            glance.scratch = floats(heads * tiles * (1 + TILE));
            rows[made] = (row_t){i, run, run, plan->length, 0};
            for (int64_t b = 0; b < blocks; b++)
                runs[run++] = (run_t){plan->blocks[b] / SLAB_BLOCKS, plan->blocks[b] % SLAB_BLOCKS * block_size,
                                      b + 1 < blocks ? block_size : tail};
            rows[made].runs_end = run;
            glances[made++] = glance;
            continue;
        }
        glance.recent = 1 + draw(blocks - 2); /* some block before the last */
        glance.sinks = 1;
        const int64_t always = 1 + blocks - glance.recent;
        glance.reads = always + draw(glance.recent) - 1;
        const int64_t best = glance.reads - always, between = glance.recent - 1;
        if (draw(2) == 1 && best < between)
            glance.sure = draw(best + 1) - 1, glance.compares = best - glance.sure + draw(between - best);
        for (int64_t k = 0; k < kv_heads; k++) {
            glance.scratch = floats((group + 7) * full + 2 * group * dim);
            rows[made] = (row_t){i, run, run, plan->length - (blocks - glance.reads) * block_size, k + 1};
            run += glance.reads;
            glances[made++] = glance;
        }
    }
    int64_t *chunks_at = malloc((size_t)(made + 1) * sizeof(int64_t));
    int64_t *unfinished = malloc((size_t)made * sizeof(int64_t));
    int64_t *ready = malloc((size_t)made * sizeof(int64_t));
    int64_t *pieces = malloc((size_t)(made * (MAX_CHUNKS + 1)) * sizeof(int64_t));
    step_t step = {runs, rows, made, chunks_at, unfinished, ready, pieces, 0, 0, glances};
    const int64_t chunks = skim_count_chunks(&step, (unsigned)draw(4));
    float *query = floats(count * heads * dim), *key = floats(count * kv_heads * dim);
    float *value = floats(count * kv_heads * dim), *partials = floats(chunks * heads * (2 + dim));
    float *out = floats(count * heads * dim);
    summaries_t summaries = {(const float *const *)means, (const float *const *)variances, SLAB_BLOCKS, block_size, 1};
    layer_t layer = {
        heads, kv_heads, dim, dim, keys, values,
        {query, heads * dim, dim}, {key, kv_heads * dim, dim}, {value, kv_heads * dim, dim},
        NULL, partials, out, scale, &summaries,
    };
    skim_decode(&step, &layer, team, threads);

    double *wanted = malloc((size_t)dim * sizeof(double)), shares[MOST], highest[MOST], ranks[MOST];
    double masses[MOST], found[MOST];
    int read[MOST];
    for (int64_t i = 0, at = 0; i < count; at += plans[i].fast ? kv_heads : 1, i++) {
        plan_t *plan = plans + i;
        const glance_t *glance = glances + at;
        const int64_t blocks = glance->count, full = glance->full;
        double total = 0;
        for (int64_t k = 0; k < kv_heads; k++) {
            const float *before = plan->before + (kv_heads + k) * blocks; /* of the second layer */
            for (int64_t b = 0; b < blocks; b++)
                read[b] = !plan->fast || b < glance->sinks || b >= glance->recent;
            if (plan->fast) {
                const float *own = query + (i * heads + k * group) * dim;
                const int64_t wanted = glance->reads - 1 - (blocks - glance->recent);
                int between[MOST], compared[MOST] = {0}, best[MOST] = {0};
                for (int64_t b = 0; b < full; b++)
                    between[b] = !read[b];
                share_plainly(plan, own, k, scale, compared, shares, highest);
                for (int64_t b = 0; b < full; b++)
                    ranks[b] = rank_of(shares, before, b, full);
                if (glance->compares) {
                    mark_best(ranks, between, full, glance->sure, best);
                    memcpy(compared, best, sizeof(best));
                    mark_best(ranks, between, full, glance->compares, compared);
                    for (int64_t b = 0; b < full; b++)
                        compared[b] &= !best[b];
                    share_plainly(plan, own, k, scale, compared, shares, highest);
                    mark_best(highest, compared, full, wanted - glance->sure, best);
                } else {
                    mark_best(ranks, between, full, wanted, best);
                }
                for (int64_t b = 0; b < full; b++)
                    read[b] |= best[b];
                for (int64_t b = 0; b < full; b++)
                    total += read[b] ? shares[b] / (double)kv_heads : 0;
            }
            memset(found, 0, sizeof(found));
            for (int64_t h = k * group; h < (k + 1) * group; h++) {
                const double sum =
                    attend_plainly(plan, read, query + (i * heads + h) * dim, k, scale, masses, wanted);
                for (int64_t d = 0; d < dim; d++)
                    expect("attention to chosen blocks", out[(i * heads + h) * dim + d], wanted[d] / sum);
                for (int64_t b = 0; b < full; b++)
                    found[b] += masses[b] / sum / (double)group;
            }
            for (int64_t b = 0; b < blocks; b++) {
                const float *after = plan->evidence + (kv_heads + k) * blocks;
                expect("evidence of another layer", plan->evidence[k * blocks + b], plan->before[k * blocks + b]);
                expect("evidence", after[b],
                       plan->fast || b >= full ? before[b] : fmax(found[b], KEPT * before[b]));
            }
        }
        expect("mass", totals[i], total);
    }
    for (int64_t i = 0; i < made; i++)
        free(glances[i].scratch);
    for (int64_t i = 0; i < count; i++) {
        free(plans[i].evidence);
        free(plans[i].before);
    }
    void *all[] = {plans, rows, glances, runs, totals, chunks_at, unfinished, ready, pieces, query, key, value, partials, out, wanted};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++)
        free(all[i]);
    for (int i = 0; i < SLABS; i++) {
        free(keys[i]);
        free(values[i]);
        free(means[i]);
        free(variances[i]);
    }
}

int main(void)
{
    for (int turn = 0; turn < 40; turn++)
        compare(draw(4), (unsigned)draw(4));
    puts("slow-fast decode: ok");
}
