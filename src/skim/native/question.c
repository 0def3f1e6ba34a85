/* What a question's attention adds to prompt blocks: the passes over memory that follow its scores.
 *
 * torch makes a pass for each operation. Plain twins: `rows_in_torch` and `BlockScores`. A pair of a scoring window
 * and a head is one unit of work, and so is a row of block scores. Results are the same with any number of threads.
 * NaN is propagated.
 */

#include <math.h>
#include <string.h>

#include "vectors.h"

enum {
    MOST = 1,     /* a row: the maximum over the question's tokens */
    MEAN = 2,     /* a row: their mean */
    EACH = 4,     /* a row for each group of tokens: their maximum */
    BEFORE = 1,   /* a place counts for the block before its own */
    AFTER = 2,    /* and for the block after it */
    REACH = 2,    /* places on either side that are averaged with a place */
    PLACES = 256, /* that are averaged at a time */
};

/* ---- Scores to rows of attention. `native_rows.py` has the structures of both functions. */

typedef struct {
    float *scores;         /* [windows, heads, count, length]; overwritten with probabilities */
    const uint8_t *hidden; /* [windows, count, length]: not 0 for keys that a query does not read */
    const float *weight;   /* [windows, key_heads, length] */
    const float *sinks;    /* [heads], or NULL */
    const int32_t *kinds;  /* [heads]: which rows a head has */
    const int32_t *most, *mean, *each; /* [heads]: the first of these rows */
    float *out;            /* [windows, rows, length] */
    int64_t windows, heads, key_heads, count, length, rows, group;
    int64_t next;
} rows_t;

/* One query's scores become probabilities; all of them NaN if one that it reads is not finite. */
static void normalise(float *scores, const uint8_t *hidden, int64_t length, const float *sink)
{
    float most = sink ? *sink : -INFINITY, sum = 0;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < length; i++) {
        const float seen = hidden[i] ? -INFINITY : scores[i];
        scores[i] = seen;
        most = seen > most ? seen : most; /* a NaN is lost here, and found in the sum */
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < length; i++) {
        const float weight = exp2_nonpositive((scores[i] - most) * LOG2_E);
        scores[i] = weight;
        sum += weight;
    }
    if (sink)
        sum += exp2_nonpositive((*sink - most) * LOG2_E);
    const float inverse = 1.0f / sum;
#pragma omp simd
    for (int64_t i = 0; i < length; i++)
        scores[i] *= inverse;
}

/* out = the maximum of the rows, times weight. A row is NaN everywhere or nowhere. */
static void largest(const float *rows, int64_t count, int64_t length, const float *weight, float *out)
{
    float nan = 0;
    memcpy(out, rows, (size_t)length * sizeof(float));
    for (int64_t row = 0; row < count; row++) {
        const float *own = rows + row * length;
        nan += own[0] - own[0];
#pragma omp simd
        for (int64_t i = 0; i < length; i++)
            out[i] = own[i] > out[i] ? own[i] : out[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < length; i++)
        out[i] = out[i] * weight[i] + nan;
}

/* out = the mean of the rows, times weight. */
static void mean_of(const float *rows, int64_t count, int64_t length, const float *weight, float *out)
{
    memset(out, 0, (size_t)length * sizeof(float));
    for (int64_t row = 0; row < count; row++) {
        const float *own = rows + row * length;
#pragma omp simd
        for (int64_t i = 0; i < length; i++)
            out[i] += own[i];
    }
    const float share = 1.0f / (float)count;
#pragma omp simd
    for (int64_t i = 0; i < length; i++)
        out[i] *= share * weight[i];
}

static void work_rows(void *data)
{
    rows_t *p = data;
    for (int64_t unit; (unit = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->windows * p->heads;) {
        const int64_t window = unit / p->heads, head = unit % p->heads, count = p->count, length = p->length;
        if (!p->kinds[head])
            continue;
        float *scores = p->scores + unit * count * length, *out = p->out + window * p->rows * length;
        const uint8_t *hidden = p->hidden + window * count * length;
        const float *weight = p->weight + (window * p->key_heads + head * p->key_heads / p->heads) * length;
        for (int64_t i = 0; i < count; i++)
            normalise(scores + i * length, hidden + i * length, length, p->sinks ? p->sinks + head : NULL);
        if (p->kinds[head] & MOST)
            largest(scores, count, length, weight, out + p->most[head] * length);
        if (p->kinds[head] & MEAN)
            mean_of(scores, count, length, weight, out + p->mean[head] * length);
        if (p->kinds[head] & EACH)
            for (int64_t first = 0, row = p->each[head]; first < count; first += p->group, row++) {
                const int64_t some = count - first < p->group ? count - first : p->group;
                largest(scores + first * length, some, length, weight, out + row * length);
            }
    }
}

void skim_question_rows(rows_t *p, team_t team, unsigned threads)
{
    p->next = 0;
    run_shared(team, threads, work_rows, p);
}

/* ---- Rows of attention to scores of blocks. */

typedef struct {
    const float *attention; /* [windows, rows, length] */
    const int64_t *columns; /* [windows, places]: of each place of the prompt in its window */
    const int64_t *block;   /* [windows, places]: of the place */
    const uint8_t *sides;   /* [windows, places]: the neighbours for which the place counts too */
    const int64_t *counts;  /* [windows]: number of places; entries after them are padding */
    float *best;            /* [rows, blocks]: raised to the best smoothed attention */
    int64_t windows, rows, length, most_places, blocks;
    float softer;   /* the weight of a place for a neighbour of its block */
    int32_t finite; /* set to 0 if any attention is not finite */
    int64_t next;
} blocks_t;

INLINE void lift(float *best, float value) { *best = value > *best ? value : *best; }

/* Attention to `some` places from `first` on, each averaged with its neighbours. Returns NaN if one is not finite. */
static float smooth(const float *from, const int64_t *columns, int64_t count, int64_t first, int64_t some, float *to)
{
    float own[PLACES + 2 * REACH], bad = 0;
    for (int64_t i = 0; i < some + 2 * REACH; i++) {
        const int64_t at = first + i - REACH;
        own[i] = at >= 0 && at < count ? from[columns[at]] : 0;
    }
#pragma omp simd reduction(+ : bad)
    for (int64_t i = 0; i < some; i++) {
        float total = own[i] + own[i + 1];
        for (int j = 2; j <= 2 * REACH; j++)
            total += own[i + j];
        to[i] = total;
        bad += own[i + REACH] - own[i + REACH]; /* 0 unless it is not finite */
    }
    for (int64_t i = 0; i < some; i++) {
        const int64_t before = first + i, after = count - 1 - first - i;
        to[i] /= (float)((before < REACH ? before : REACH) + 1 + (after < REACH ? after : REACH));
    }
    return bad;
}

/* Raise the score of a block, and of its neighbours, by neighbouring places of the block. */
INLINE void lift_block(const blocks_t *p, float *best, int64_t block, const float *smoothed, const uint8_t *sides,
                       int64_t count)
{
    float own = -INFINITY, before = own, after = own;
#pragma omp simd reduction(max : own, before, after)
    for (int64_t i = 0; i < count; i++) {
        const float edge = sides[i] & BEFORE ? smoothed[i] : -INFINITY;
        const float other = sides[i] & AFTER ? smoothed[i] : -INFINITY;
        own = smoothed[i] > own ? smoothed[i] : own;
        before = edge > before ? edge : before;
        after = other > after ? other : after;
    }
    lift(best + block, own);
    if (block > 0)
        lift(best + block - 1, p->softer * before);
    if (block + 1 < p->blocks)
        lift(best + block + 1, p->softer * after);
}

static void score_row(blocks_t *p, int64_t row)
{
    float *best = p->best + row * p->blocks, smoothed[PLACES];
    for (int64_t window = 0; window < p->windows; window++) {
        const float *from = p->attention + (window * p->rows + row) * p->length;
        const int64_t at = window * p->most_places, count = p->counts[window];
        for (int64_t first = 0; first < count; first += PLACES) {
            const int64_t some = count - first < PLACES ? count - first : PLACES;
            const int64_t *block = p->block + at + first;
            const uint8_t *sides = p->sides + at + first;
            if (smooth(from, p->columns + at, count, first, some, smoothed) != 0)
                __atomic_store_n(&p->finite, 0, __ATOMIC_RELAXED);
            for (int64_t i = 0, end; i < some; i = end) {
                for (end = i + 1; end < some && block[end] == block[i];)
                    end++;
                lift_block(p, best, block[i], smoothed + i, sides + i, end - i);
            }
        }
    }
}

static void work_blocks(void *data)
{
    blocks_t *p = data;
    for (int64_t row; (row = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->rows;)
        score_row(p, row);
}

void skim_block_scores(blocks_t *p, team_t team, unsigned threads)
{
    p->next = 0;
    run_shared(team, threads, work_blocks, p);
}
