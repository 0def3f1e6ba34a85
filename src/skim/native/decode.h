/* Decode attention (one query per row) over a paged pool: what the kernels of all KV formats share.
 *
 * One call serves one layer and every decode row of a step. Keys and values are read in place, through runs of
 * neighbouring slots, so a fragmented block table costs no copies. The work is memory-bound: the loops follow
 * memory order, and a slot is used for all heads while it is in cache.
 *
 * A row's keys are split into chunks. Each chunk is reduced to its partial: for each head a maximum, a sum and
 * a weighted sum of values. The thread that finishes a row's last chunk merges the row's partials in order. Some
 * rows must be prepared before their chunks: a fast row chooses its blocks. With several threads, later rows are
 * prepared before a row's chunks, so that hardly any chunk waits. Keys that were compared are soon read again. The
 * boundaries of chunks and tiles depend only on the number of keys. So a row's result is bit-identical with any
 * number of threads, in any batch, and for any location of its slots in the pool.
 *
 * Only `omp simd` relaxes the arithmetic: it lets the loops that it marks sum in another order. A score that is
 * NaN or +infinity makes that head's result NaN.
 */

#pragma once

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#include "exp.h"
#include "team.h"

enum {
    LANES = 8,       /* floats in a vector; wider vectors gain nothing, since memory is the limit */
    QUAD = 4,        /* keys scored together */
    TILE = 32,       /* keys whose scores are held at a time; one tile is prefetched */
    CHUNK = 256,     /* keys in a chunk: enough to pay for its partial, few enough for many threads */
    MAX_CHUNKS = 64, /* in one row; the chunks of longer rows are longer */
    MAX_HEADS = 256, /* `native_kernel.py` repeats LANES, MAX_CHUNKS and this limit */
    CACHE_LINE = 64, /* in bytes */
    SPINS = 4096,    /* between yields, while a thread waits for another */
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
    int64_t head;     /* 0 reads all KV heads; a fast row has one row_t for each of them, from 1 */
} row_t;

/* Slow-fast decode of one row; all zero without it. See glance.h and `Picks` in `attention/glance.py`. */
typedef struct {
    const int64_t *blocks;                      /* [count]: the row's blocks */
    int64_t count, full, sinks, recent, reads;
    int64_t sure, compares; /* blocks taken by rank before others are compared; blocks that are compared, or 0 */
    int64_t last;                               /* slots in the last block */
    float *evidence;                            /* [layers, kv_heads, blocks], or NULL */
    int64_t layer_stride, head_stride;
    double trust;                               /* the weight of evidence in a rank */
    double kept;                                /* of earlier evidence, at a slow step */
    double spread;                              /* the weight of the variance in an estimate */
    int64_t near;                               /* blocks on either side whose evidence counts for a block */
    float *scratch; /* fast: [group + 7, full] and [group, 2, key_dim]; slow: [heads, tiles, 1 + TILE] */
    float *total;                               /* of the row's mass */
    float weight, mass;
} glance_t;

/* One step, for all layers that read the same keys. */
typedef struct {
    run_t *runs;
    row_t *rows;
    int64_t row_count;
    int64_t *chunks_at;  /* [row_count + 1]: first chunk of each row */
    int64_t *unfinished; /* [row_count]: number of unfinished chunks of each row */
    int64_t *ready;      /* [row_count]: 1 once a row is prepared */
    int64_t *pieces;     /* in the order in which they are claimed: a chunk, or -1 - row to prepare this row */
    int64_t piece_count;
    int64_t next;        /* index of the next unclaimed piece */
    glance_t *glances;   /* [row_count], or NULL without slow-fast decode */
} step_t;

/* A tensor [tokens, heads, dim] whose last dimension is contiguous; strides in floats. */
typedef struct {
    const float *data;
    int64_t token_stride, head_stride;
} tokens_t;

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

/* ---- Slots of a chunk, tile by tile. */

typedef struct {
    int64_t slabs[TILE], slots[TILE]; /* a shorter tile repeats its last slot */
    int count;
} tile_t;

typedef struct {
    const run_t *run;
    int64_t offset, left; /* index of the slot in its run; slots left in the chunk */
} cursor_t;

INLINE void next_tile(cursor_t *at, tile_t *tile)
{
    tile->count = at->left < TILE ? (int)at->left : TILE;
    at->left -= tile->count;
    for (int j = 0; j < tile->count; j++, at->offset++) {
        if (at->offset == at->run->count) {
            at->run++;
            at->offset = 0;
        }
        tile->slabs[j] = at->run->slab;
        tile->slots[j] = at->run->start + at->offset;
    }
    for (int j = tile->count; j > 0 && j < TILE; j++) {
        tile->slabs[j] = tile->slabs[j - 1];
        tile->slots[j] = tile->slots[j - 1];
    }
}

/* The addresses of a tile's slots in one plane, of which a slot takes `bytes`. */
INLINE void locate(const void *const *plane, int64_t bytes, const tile_t *tile, const void **places)
{
    for (int j = 0; tile->count > 0 && j < TILE; j++)
        places[j] = (const char *)plane[tile->slabs[j]] + tile->slots[j] * bytes;
}

/* Hardware prefetching stops at page boundaries and fails when keys and values alternate. A tile goes to the second
 * cache: with many heads it is larger than the first. */
INLINE void fetch(const void *place, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += CACHE_LINE)
        __builtin_prefetch((const char *)place + i, 0, 2);
}

/* Read one byte of each line, in order. Arithmetic reads a tile in another order, which hardware does not foresee; after
 * this it finds the tile in the first cache. */
INLINE void touch(const void *place, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += CACHE_LINE)
        (void)*((const volatile char *)place + i);
}

/* Turn a tile's raw scores, `width` with padding, into weights relative to the largest so far; rescale the earlier
 * sums. */
INLINE void softmax_tile(float *scores, int count, int width, float scale, float *maximum, float *sum, float *out,
                         int64_t dim)
{
    float top = *maximum, added = 0;
    for (int j = count; j < width; j++)
        scores[j] = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int j = 0; j < width; j++) {
        scores[j] *= scale;
        top = scores[j] > top ? scores[j] : top;
    }
#pragma omp simd reduction(+ : added)
    for (int j = 0; j < width; j++) {
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

/* ---- A step: free threads claim pieces. */

INLINE int64_t chunk_keys(int64_t keys)
{
    int64_t tiles = (keys + MAX_CHUNKS * TILE - 1) / (MAX_CHUNKS * TILE);
    return tiles * TILE > CHUNK ? tiles * TILE : CHUNK;
}

INLINE int64_t tiles_of(int64_t keys) { return (keys + TILE - 1) / TILE; }

typedef struct {
    float *tops, *weights; /* [heads, tiles], [heads, tiles, TILE]; NULL to keep nothing */
    int64_t tiles, tile;   /* number of the row's tiles, and the next one */
} record_t;

INLINE record_t record_of(const step_t *step, int64_t index, int64_t chunk, int64_t heads)
{
    const glance_t *glance = step->glances ? step->glances + index : NULL;
    const row_t *row = step->rows + index;
    if (!glance || !glance->evidence || row->head > 0)
        return (record_t){0};
    const int64_t tiles = tiles_of(row->keys);
    const int64_t first = (chunk - step->chunks_at[index]) * chunk_keys(row->keys);
    return (record_t){glance->scratch, glance->scratch + heads * tiles, tiles, first / TILE};
}

/* Keep a tile's weights, relative to the maxima so far. */
INLINE void record_tile(record_t *to, int64_t heads, const float (*weights)[TILE], const float *maxima)
{
    for (int64_t h = 0; to->weights && h < heads; h++) {
        to->tops[h * to->tiles + to->tile] = maxima[h];
        memcpy(to->weights + (h * to->tiles + to->tile) * TILE, weights[h], sizeof(weights[h]));
    }
    to->tile++;
}

/* True for a row that must be prepared: any row of a kernel that asks for it, otherwise a fast one. */
INLINE int needs_preparation(const row_t *row) { return PREPARES_ALL || row->head > 0; }

/* Fill in `chunks_at` and `pieces`, and return the number of chunks. A layer has one partial for each. */
int64_t skim_count_chunks(step_t *step, unsigned threads)
{
    int64_t prepared = 0, count = 0;
    step->chunks_at[0] = 0;
    for (int64_t i = 0; i < step->row_count; i++) {
        int64_t keys = step->rows[i].keys, size = chunk_keys(keys);
        step->chunks_at[i + 1] = step->chunks_at[i] + (keys + size - 1) / size;
        for (; prepared < step->row_count && prepared < i + (int64_t)threads; prepared++)
            if (needs_preparation(step->rows + prepared))
                step->pieces[count++] = -1 - prepared;
        for (int64_t chunk = step->chunks_at[i]; chunk < step->chunks_at[i + 1]; chunk++)
            step->pieces[count++] = chunk;
    }
    step->piece_count = count;
    return step->chunks_at[step->row_count];
}

/* Wait until a row is prepared. Its piece precedes its chunks, so a thread has claimed it. */
INLINE void await(const int64_t *ready)
{
    for (int tries = 1; !__atomic_load_n(ready, __ATOMIC_ACQUIRE); tries++)
        if (tries % SPINS == 0)
            sched_yield();
}

/* Claim pieces until none is left: `prepare` rows, reduce chunks to partials by `attend`, and `merge` the rows whose
 * last chunk this thread finished. */
INLINE void run_pieces(step_t *step, const void *job, void (*prepare)(const void *job, int64_t row),
                       void (*attend)(const void *job, int64_t row, cursor_t at, int64_t chunk),
                       void (*merge)(const void *job, int64_t row))
{
    int64_t index = 0, claimed;
    while ((claimed = __atomic_fetch_add(&step->next, 1, __ATOMIC_RELAXED)) < step->piece_count) {
        const int64_t chunk = step->pieces[claimed];
        if (chunk < 0) {
            prepare(job, -1 - chunk);
            __atomic_store_n(&step->ready[-1 - chunk], 1, __ATOMIC_RELEASE);
            continue;
        }
        while (chunk >= step->chunks_at[index + 1])
            index++;
        const row_t *row = step->rows + index;
        if (needs_preparation(row))
            await(&step->ready[index]);
        const int64_t size = chunk_keys(row->keys), first = (chunk - step->chunks_at[index]) * size;
        cursor_t at = {step->runs + row->runs_at, first, row->keys - first < size ? row->keys - first : size};
        for (; at.offset >= at.run->count; at.run++)
            at.offset -= at.run->count;
        attend(job, index, at, chunk);
        if (__atomic_sub_fetch(&step->unfinished[index], 1, __ATOMIC_ACQ_REL) == 0)
            merge(job, index);
    }
}

/* The KV heads of a row: from `first` to before `end`. */
typedef struct {
    int64_t first, end;
} range_t;

INLINE range_t heads_of(const row_t *row, int64_t kv_heads)
{
    return row->head > 0 ? (range_t){row->head - 1, row->head} : (range_t){0, kv_heads};
}

/* Merge a row's partials, each [heads, 2 + dim]: maxima, sums, weighted sums. out: [heads, dim] */
INLINE void merge_partials(const step_t *step, int64_t index, int64_t heads, int64_t kv_heads, int64_t dim,
                           const float *partials, const float *sinks, float *out)
{
    const int64_t group = heads / kv_heads;
    const range_t own = heads_of(step->rows + index, kv_heads);
    const int64_t size = heads * (2 + dim);
    const float *begin = partials + step->chunks_at[index] * size;
    const float *end = partials + step->chunks_at[index + 1] * size;
    out += own.first * group * dim;
    for (int64_t h = own.first * group; h < own.end * group; h++, out += dim) {
        float sink = sinks ? sinks[h] * LOG2_E : -INFINITY, top = sink;
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

/* Run all pieces on all threads, or on this one if there is too little to share. `team` may be NULL. */
INLINE void run_step(step_t *step, void (*work)(void *), void *job, team_t team, unsigned threads)
{
    step->next = 0;
    for (int64_t i = 0; i < step->row_count; i++) {
        step->ready[i] = 0;
        step->unfinished[i] = step->chunks_at[i + 1] - step->chunks_at[i];
    }
    run_shared(team, team && step->chunks_at[step->row_count] > 1 ? threads : 1, work, job);
}
