/* The operations of a decoder layer for a few tokens: matrix products, RMS norms, rotary embeddings, gates; and the
 * two halves of a layer, before and after attention, as one call each.
 *
 * Products are memory-bound: each weight is read once and used for all tokens. The other operations are small and
 * run on one thread, in less time than it takes to wake another. `few_tokens.py` has the same in torch.
 *
 * A token's result is bit-identical in any batch and with any number of threads: the order of summation depends
 * only on the length of its row. NaN stays NaN.
 */

#include <stdint.h>
#include <stdlib.h>

#include "layer_operations.h"
#include "vectors.h"

#if !defined(__AVX2__) && !defined(__ARM_NEON)
#error "without wide vectors torch is faster"
#endif

enum {
    ROWS = 2,           /* weight rows in a tile */
    TOKENS = LANES / 2, /* tokens in a tile: the registers hold ROWS * TOKENS sums */
    AHEAD = 4,          /* rows to prefetch ahead */
    SHARES = 4,         /* shares of rows per thread, so that all threads end at about the same time */
    LEAST = 16,         /* minimum number of rows in a share */
};

/* ---- out[t, o] = given[t, :] . weight[o, :] + bias[o] */

typedef struct {
    const float *given;  /* [tokens, inner] */
    const float *weight; /* [outer, inner] */
    const float *bias;   /* [outer], or NULL */
    float *out;          /* [tokens, outer] */
    int64_t tokens, inner, outer;
    int64_t share;      /* rows that a thread claims at a time */
    int64_t next_share; /* index of the next unclaimed share */
} product_t;

/* One tile: `rows` weight rows starting at `row`, by `tokens` tokens starting at `token`. */
INLINE void tile(const product_t *p, int64_t row, int rows, int64_t token, int tokens)
{
    const int64_t inner = p->inner, even = inner - inner % LANES;
    const float *weight = p->weight + row * inner, *given = p->given + token * inner;
    vec sums[ROWS][TOKENS] = {0};
    for (int64_t i = 0; i < even; i += LANES) {
        vec own[ROWS];
        for (int r = 0; r < rows; r++) {
            __builtin_prefetch(weight + (r + AHEAD) * inner + i);
            own[r] = *(const vec *)(weight + r * inner + i);
        }
        for (int t = 0; t < tokens; t++) {
            const vec value = *(const vec *)(given + t * inner + i);
            for (int r = 0; r < rows; r++)
                sums[r][t] += own[r] * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++) {
            float sum = sum_of(sums[r][t]);
            for (int64_t i = even; i < inner; i++)
                sum += weight[r * inner + i] * given[t * inner + i];
            p->out[(token + t) * p->outer + row + r] = sum + (p->bias ? p->bias[row + r] : 0.0f);
        }
}

/* `rows` weight rows by all tokens. Each possible remainder of tokens has a specialised loop. */
INLINE void tiles(const product_t *p, int64_t row, int rows)
{
    int64_t token = 0;
    for (; token + TOKENS <= p->tokens; token += TOKENS)
        tile(p, row, rows, token, TOKENS);
    switch (p->tokens - token) {
    case 1: return tile(p, row, rows, token, 1);
    case 2: return tile(p, row, rows, token, 2);
    case 3: return tile(p, row, rows, token, 3);
#if defined(__AVX512F__)
    case 4: return tile(p, row, rows, token, 4);
    case 5: return tile(p, row, rows, token, 5);
    case 6: return tile(p, row, rows, token, 6);
    case 7: return tile(p, row, rows, token, 7);
#endif
    }
}

static void work(void *data)
{
    product_t *p = data;
    for (;;) {
        int64_t row = p->share * __atomic_fetch_add(&p->next_share, 1, __ATOMIC_RELAXED);
        if (row >= p->outer)
            return;
        const int64_t end = row + p->share < p->outer ? row + p->share : p->outer;
        for (; row + ROWS <= end; row += ROWS)
            tiles(p, row, ROWS);
        for (; row < end; row++)
            tiles(p, row, 1);
    }
}

void skim_product(const float *given, const float *weight, const float *bias, float *out, int64_t tokens,
                  int64_t inner, int64_t outer, team_t team, unsigned threads)
{
    const int64_t share = outer / (SHARES * (int64_t)threads) / LEAST * LEAST;
    product_t p = {given, weight, bias, out, tokens, inner, outer, share > LEAST ? share : LEAST, 0};
    run_shared(team, outer > LEAST ? threads : 1, work, &p);
}

/* ---- The other operations, on one thread: in less time than it takes to wake another. */

void skim_norm(float *x, const float *other, int64_t stride, const float *weight, double epsilon, float *out,
               int64_t out_stride, int64_t tokens, int64_t heads, int64_t dim)
{
    norm_tokens(x, other, stride, weight, epsilon, out, out_stride, tokens, heads, dim);
}

void skim_rotate(float *x, int64_t stride, const float *cosine, const float *sine, int64_t tokens, int64_t heads,
                 int64_t dim)
{
    rotate_tokens(x, stride, cosine, sine, tokens, heads, dim);
}

void skim_gate(const float *x, float *out, int64_t tokens, int64_t inner) { gate_tokens(x, out, tokens, inner); }

/* ---- The halves of a layer. Each does what the operations above do one after another, to the last bit. */

/* `skim_coded_product`, which is in another library. */
typedef void (*coded_product_t)(const void *weight, const float *given, const float *bias, float *out, int64_t tokens,
                                team_t team, unsigned threads);

typedef struct {
    const void *coded;   /* a `coded_t`, or NULL */
    const float *weight; /* [outer, inner], if it is not coded */
    const float *bias;   /* [outer], or NULL */
    int64_t inner, outer;
} matrix_t;

typedef struct {
    const float *weight; /* NULL: no norm */
    double epsilon;
} norm_t;

typedef struct {
    matrix_t qkv, output, gate_up, down;
    norm_t before, after, query, key; /* of the hidden state, and of heads */
    int64_t queries, keys, dim;       /* heads, and their size */
    coded_product_t coded_product;
    team_t team;
} layer_t;

static void multiply(const layer_t *layer, const matrix_t *by, const float *given, float *out, int64_t tokens,
                     unsigned threads)
{
    if (by->coded)
        layer->coded_product(by->coded, given, by->bias, out, tokens, layer->team, threads);
    else
        skim_product(given, by->weight, by->bias, out, tokens, by->inner, by->outer, layer->team, threads);
}

/* Write queries, keys and values. out: [tokens, heads of all three, dim]. Returns 0 if there is no memory. */
int skim_begin_layer(const layer_t *layer, float *hidden, const float *cosine, const float *sine, float *out,
                     int64_t tokens, unsigned threads)
{
    const int64_t width = layer->qkv.inner, stride = layer->qkv.outer, queries = layer->queries, dim = layer->dim;
    float *normed = malloc((size_t)(tokens * width) * sizeof(float));
    if (!normed)
        return 0;
    skim_norm(hidden, NULL, width, layer->before.weight, layer->before.epsilon, normed, width, tokens, 1, width);
    multiply(layer, &layer->qkv, normed, out, tokens, threads);
    free(normed);
    float *key = out + queries * dim;
    if (layer->query.weight)
        skim_norm(out, NULL, stride, layer->query.weight, layer->query.epsilon, out, stride, tokens, queries, dim);
    if (layer->key.weight)
        skim_norm(key, NULL, stride, layer->key.weight, layer->key.epsilon, key, stride, tokens, layer->keys, dim);
    skim_rotate(out, stride, cosine, sine, tokens, queries + layer->keys, dim);
    return 1;
}

/* The rest of a layer, given what attention returned for the layer's input `hidden`. hidden and out: [tokens, width].
 * Returns 0 if there is no memory. */
int skim_end_layer(const layer_t *layer, const float *attended, const float *hidden, float *out, int64_t tokens,
                   unsigned threads)
{
    const int64_t width = layer->output.outer, inner = layer->down.inner;
    float *sum = malloc((size_t)(tokens * (2 * width + 3 * inner)) * sizeof(float));
    if (!sum)
        return 0;
    float *normed = sum + tokens * width, *both = normed + tokens * width, *gated = both + tokens * 2 * inner;
    multiply(layer, &layer->output, attended, sum, tokens, threads);
    skim_norm(sum, hidden, width, layer->after.weight, layer->after.epsilon, normed, width, tokens, 1, width);
    multiply(layer, &layer->gate_up, normed, both, tokens, threads);
    skim_gate(both, gated, tokens, inner);
    multiply(layer, &layer->down, gated, out, tokens, threads);
#pragma omp simd
    for (int64_t i = 0; i < tokens * width; i++)
        out[i] += sum[i];
    free(sum);
    return 1;
}
