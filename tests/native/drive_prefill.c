/* Compares attention of prefill chunks with plain loops, on random pools. */

#ifdef TILES
#include "prefill_tiles.c"
#define ROUNDED_ERROR 2e-2
#elif defined(PAIRS)
#include "prefill_pairs.c"
#define ROUNDED_ERROR 2e-2
#define ROUNDED 1 /* always */
#else
#include "prefill_attention.c"
#define ROUNDED_ERROR 1e-4
#endif
#ifndef ROUNDED
#define ROUNDED (draw(2) - 1)
#endif
#include "drive.h"

enum { SLABS = 3, SLAB_SLOTS = 160, GUARDS = 64 };

/* Sanitizers see neither accesses of tile registers nor masked stores. So results and scratch space lie between floats
 * that must not change. */
static float *guarded(int64_t count)
{
    float *made = floats(count + 2 * GUARDS);
    for (int i = 0; i < GUARDS; i++)
        made[i] = made[GUARDS + count + i] = (float)i;
    return made + GUARDS;
}

static void check_guards(const char *what, const float *made, int64_t count)
{
    for (int i = 0; i < GUARDS; i++)
        if (made[i - GUARDS] != (float)i || made[count + i] != (float)i) {
            fprintf(stderr, "prefill: a write beyond the %s\n", what);
            exit(1);
        }
}

/* The result of one query head, from keys and values that are gathered. */
static void expect_head(const prefill_t *p, const chunk_t *chunk, const run_t *runs, int64_t index, int64_t head)
{
    const int64_t token = chunk->token + index, kv_head = head / (p->heads / p->kv_heads);
    const int64_t since = p->since ? p->since[token] : 0;
    const float *query = p->query + token * p->token_stride + head * p->query_stride;
    double *sums = calloc((size_t)p->value_dim, sizeof(double)), total = p->sinks ? exp(p->sinks[head]) : 0;
    for (int64_t slot = chunk->first; slot <= chunk->context + index; slot++) {
        int64_t offset = slot - chunk->first;
        const run_t *run = runs;
        for (; offset >= run->count; run++)
            offset -= run->count;
        if (slot < since)
            continue;
        const float *key = p->keys.slabs[run->slab] + (run->start + offset) * p->keys.slot_stride + kv_head * p->keys.head_stride;
        const float *value = p->values.slabs[run->slab] + (run->start + offset) * p->values.slot_stride + kv_head * p->values.head_stride;
        double score = 0;
        for (int64_t d = 0; d < p->key_dim; d++)
            score += (double)query[d] * key[d];
        const double weight = exp(score * p->scale);
        total += weight;
        for (int64_t d = 0; d < p->value_dim; d++)
            sums[d] += weight * value[d];
    }
    for (int64_t d = 0; d < p->value_dim; d++)
        expect_near("prefill", p->out[(token * p->heads + head) * p->value_dim + d], sums[d] / total, p->rounded ? ROUNDED_ERROR : 1e-4);
    free(sums);
}

/* most: queries of a chunk */
static void attend(unsigned threads, int64_t kv_heads, int64_t group, int64_t most)
{
    const int64_t heads = kv_heads * group, key_dim = 8 * draw(5), value_dim = 8 * draw(5);
    float *keys[SLABS], *values[SLABS];
    for (int slab = 0; slab < SLABS; slab++) {
        keys[slab] = floats(SLAB_SLOTS * kv_heads * key_dim);
        values[slab] = floats(SLAB_SLOTS * kv_heads * value_dim);
    }
    const int64_t count = draw(3), window = draw(2) == 1 ? draw(100) : 0;
    chunk_t chunks[3];
    run_t *runs = malloc(sizeof(run_t) * 600);
    int64_t tokens = 0, used = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t queries = draw(most), context = draw(140) - 1, first = window && context >= window ? context - window + 1 : 0;
        chunks[i] = (chunk_t){tokens, queries, context, first, used};
        for (int64_t left = context + queries - first; left > 0; left -= runs[used++].count) {
            const int64_t size = draw(left < 70 ? left : 70);
            runs[used] = (run_t){draw(SLABS) - 1, draw(SLAB_SLOTS - size + 1) - 1, size};
        }
        tokens += queries;
    }
    int32_t *since = window ? malloc((size_t)tokens * sizeof(int32_t)) : NULL;
    for (int64_t i = 0; since && i < count; i++)
        for (int64_t q = 0; q < chunks[i].queries; q++) {
            const int64_t from = chunks[i].context + q - window + 1;
            since[chunks[i].token + q] = from > 0 ? (int32_t)from : 0;
        }
    float *query = floats(tokens * heads * key_dim), *out = guarded(tokens * heads * value_dim);
    float *sinks = draw(2) == 1 ? floats(heads) : NULL;
    const int64_t room = (int64_t)threads * skim_prefill_scratch(key_dim, value_dim);
    float *scratch = guarded(room);
    prefill_t p = {.runs = runs, .chunks = chunks, .chunk_count = count, .heads = heads, .kv_heads = kv_heads,
                   .key_dim = key_dim, .value_dim = value_dim,
                   .keys = {(const float *const *)keys, kv_heads * key_dim, key_dim},
                   .values = {(const float *const *)values, kv_heads * value_dim, value_dim},
                   .query = query, .token_stride = heads * key_dim, .query_stride = key_dim, .since = since,
                   .sinks = sinks, .out = out, .scale = 0.3, .scratch = scratch, .rounded = ROUNDED};
    skim_prefill(&p, team, threads);
    check_guards("scratch space", scratch, room);
    check_guards("results", out, tokens * heads * value_dim);
    for (int64_t i = 0; i < count; i++)
        for (int64_t q = 0; q < chunks[i].queries; q++)
            for (int64_t head = 0; head < heads; head++)
                expect_head(&p, chunks + i, runs + chunks[i].runs_at, q, head);
    for (int slab = 0; slab < SLABS; slab++)
        free(keys[slab]), free(values[slab]);
    free(runs), free(since), free(query), free(out - GUARDS), free(sinks), free(scratch - GUARDS);
}

int main(void)
{
#ifdef TILES
    if (!skim_permitted()) {
        puts("prefill: the system does not permit tile registers");
        return 0;
    }
#endif
    for (int turn = 0; turn < 40; turn++)
        attend((unsigned)draw(4), draw(3), draw(5), 90);
    attend(1, 3, 5, 900); /* the longest blocks use all scratch space */
    puts("prefill: ok");
}
