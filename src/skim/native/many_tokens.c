/* The operations of a decoder layer beside its products, for many tokens: threads claim shares of them.
 *
 * Each is one pass over memory. `many_tokens.py` has the same in torch. A token's result has the same bits with any
 * number of threads, and those of `few_tokens.c`.
 */

#include "layer_operations.h"
#include "team.h"

#if !defined(__AVX2__) && !defined(__ARM_NEON)
#error "without wide vectors torch is faster"
#endif

enum { SHARE = 16 }; /* tokens that a thread claims at a time */

/* One operation, with the arguments of its function in `layer_operations.h`. */
typedef struct {
    enum { NORM, ROTATE, GATE } kind;
    float *x;
    const float *other, *weight, *cosine, *sine;
    float *out;
    double epsilon;
    int64_t stride, out_stride, tokens, heads, dim;
    int64_t next; /* index of the next unclaimed share */
} operation_t;

static void some_tokens(const operation_t *p, int64_t token, int64_t tokens)
{
    float *x = p->x + token * p->stride;
    switch (p->kind) {
    case NORM:
        norm_tokens(x, p->other ? p->other + token * p->stride : 0, p->stride, p->weight, p->epsilon,
                    p->out + token * p->out_stride, p->out_stride, tokens, p->heads, p->dim);
        return;
    case ROTATE:
        rotate_tokens(x, p->stride, p->cosine + token * p->dim, p->sine + token * p->dim, tokens, p->heads, p->dim);
        return;
    case GATE: gate_tokens(x, p->out + token * p->dim, tokens, p->dim);
    }
}

static void work(void *data)
{
    operation_t *p = data;
    for (int64_t token; (token = SHARE * __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->tokens;)
        some_tokens(p, token, p->tokens - token < SHARE ? p->tokens - token : SHARE);
}

static void start(operation_t *p, team_t team, unsigned threads)
{
    run_shared(team, p->tokens > SHARE ? threads : 1, work, p);
}

void skim_norm_many(float *x, const float *other, int64_t stride, const float *weight, double epsilon, float *out,
                    int64_t out_stride, int64_t tokens, int64_t heads, int64_t dim, team_t team, unsigned threads)
{
    operation_t p = {.kind = NORM, .x = x, .other = other, .weight = weight, .out = out, .epsilon = epsilon,
                     .stride = stride, .out_stride = out_stride, .tokens = tokens, .heads = heads, .dim = dim};
    start(&p, team, threads);
}

void skim_rotate_many(float *x, int64_t stride, const float *cosine, const float *sine, int64_t tokens, int64_t heads,
                      int64_t dim, team_t team, unsigned threads)
{
    operation_t p = {.kind = ROTATE, .x = x, .cosine = cosine, .sine = sine, .stride = stride, .tokens = tokens,
                     .heads = heads, .dim = dim};
    start(&p, team, threads);
}

/* x is not written. */
void skim_gate_many(float *x, float *out, int64_t tokens, int64_t inner, team_t team, unsigned threads)
{
    operation_t p = {.kind = GATE, .x = x, .out = out, .stride = 2 * inner, .tokens = tokens, .dim = inner};
    start(&p, team, threads);
}
