/* Compares the operations for a few tokens with plain loops, on random shapes. */

#include "few_tokens.c"
#include "drive.h"

static void product(int64_t tokens, unsigned threads)
{
    const int64_t inner = draw(2) == 1 ? LANES * draw(9) : draw(100), outer = draw(200);
    float *given = floats(tokens * inner), *weight = floats(outer * inner), *out = floats(tokens * outer);
    float *bias = draw(2) == 1 ? floats(outer) : NULL;
    skim_product(given, weight, bias, out, tokens, inner, outer, team, threads);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t o = 0; o < outer; o++) {
            double sum = bias ? bias[o] : 0;
            for (int64_t i = 0; i < inner; i++)
                sum += (double)given[t * inner + i] * weight[o * inner + i];
            expect("product", out[t * outer + o], sum);
        }
    free(given), free(weight), free(out), free(bias);
}

static void small(int64_t tokens)
{
    const int64_t heads = draw(3), dim = 2 * draw(40), stride = heads * dim, all = tokens * stride;
    float *x = floats(all), *other = floats(all), *weight = floats(dim), *out = floats(all), *before = floats(all);
    for (int64_t i = 0; i < all; i++)
        before[i] = x[i] + other[i];
    skim_norm(x, other, stride, weight, 1e-5, out, stride, tokens, heads, dim);
    for (int64_t row = 0; row < tokens * heads; row++) {
        double sum = 0;
        for (int64_t i = 0; i < dim; i++)
            sum += (double)before[row * dim + i] * before[row * dim + i];
        for (int64_t i = 0; i < dim; i++)
            expect("norm", out[row * dim + i], before[row * dim + i] / sqrt(sum / dim + 1e-5) * weight[i]);
    }
    float *cosine = floats(tokens * dim), *sine = floats(tokens * dim);
    for (int64_t i = 0; i < all; i++)
        before[i] = out[i];
    skim_rotate(out, stride, cosine, sine, tokens, heads, dim);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < dim; i++) {
                const float *own = before + t * stride + h * dim;
                double turned = i < dim / 2 ? -own[i + dim / 2] : own[i - dim / 2];
                double wanted = own[i] * (double)cosine[t * dim + i] + turned * sine[t * dim + i];
                expect("rotate", out[t * stride + h * dim + i], wanted);
            }
    const int64_t inner = draw(100);
    float *gate = floats(tokens * 2 * inner), *gated = floats(tokens * inner);
    skim_gate(gate, gated, tokens, inner);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < inner; i++) {
            double g = gate[t * 2 * inner + i], passed = gate[t * 2 * inner + inner + i];
            expect("gate", gated[t * inner + i], g / (1 + exp(-g)) * passed);
        }
    free(x), free(other), free(weight), free(out), free(before);
    free(cosine), free(sine), free(gate), free(gated);
}

/* Stands in for the product of the other library: the weight is a `matrix_t`. */
static void coded_product(const void *weight, const float *given, const float *bias, float *out, int64_t tokens,
                          team_t its_team, unsigned threads)
{
    const matrix_t *as = weight;
    skim_product(given, as->weight, bias, out, tokens, as->inner, as->outer, its_team, threads);
}

static matrix_t matrix(int64_t outer, int64_t inner)
{
    return (matrix_t){NULL, floats(outer * inner), draw(2) == 1 ? floats(outer) : NULL, inner, outer};
}

static norm_t norm(int64_t size) { return (norm_t){floats(size), 1e-5}; }

/* Both halves against the operations one by one. */
static void layer(int64_t tokens, unsigned threads)
{
    const int64_t width = draw(70), dim = 2 * draw(20), queries = draw(4), keys = draw(2), inner = draw(60);
    const int64_t all = (queries + 2 * keys) * dim;
    layer_t own = {matrix(all, width), matrix(width, queries * dim), matrix(2 * inner, width), matrix(width, inner),
                   norm(width), norm(width), {NULL, 0}, {NULL, 0}, queries, keys, dim, coded_product, team};
    const matrix_t gate_up = own.gate_up;
    if (draw(2) == 1)
        own.query = norm(dim), own.key = norm(dim);
    if (draw(2) == 1)
        own.gate_up.coded = &gate_up, own.gate_up.weight = NULL;
    float *hidden = floats(tokens * width), *cosine = floats(tokens * dim), *sine = floats(tokens * dim);
    float *out = floats(tokens * all), *wanted = floats(tokens * all), *normed = floats(tokens * width);
    skim_norm(hidden, NULL, width, own.before.weight, 1e-5, normed, width, tokens, 1, width);
    skim_product(normed, own.qkv.weight, own.qkv.bias, wanted, tokens, width, all, team, 1);
    if (own.query.weight) {
        float *key = wanted + queries * dim;
        skim_norm(wanted, NULL, all, own.query.weight, 1e-5, wanted, all, tokens, queries, dim);
        skim_norm(key, NULL, all, own.key.weight, 1e-5, key, all, tokens, keys, dim);
    }
    skim_rotate(wanted, all, cosine, sine, tokens, queries + keys, dim);
    if (!skim_begin_layer(&own, hidden, cosine, sine, out, tokens, threads))
        exit(2);
    for (int64_t i = 0; i < tokens * all; i++)
        expect("begin", out[i], wanted[i]);

    float *attended = floats(tokens * queries * dim), *sum = floats(tokens * width), *end = floats(tokens * width);
    float *both = floats(tokens * 2 * inner), *gated = floats(tokens * inner), *last = floats(tokens * width);
    skim_product(attended, own.output.weight, own.output.bias, sum, tokens, queries * dim, width, team, 1);
    skim_norm(sum, hidden, width, own.after.weight, 1e-5, normed, width, tokens, 1, width);
    skim_product(normed, gate_up.weight, gate_up.bias, both, tokens, width, 2 * inner, team, 1);
    skim_gate(both, gated, tokens, inner);
    skim_product(gated, own.down.weight, own.down.bias, last, tokens, inner, width, team, 1);
    if (!skim_end_layer(&own, attended, hidden, end, tokens, threads))
        exit(2);
    for (int64_t i = 0; i < tokens * width; i++)
        expect("end", end[i], (double)last[i] + sum[i]);

    const float *used[] = {own.qkv.weight, own.qkv.bias, own.output.weight, own.output.bias, gate_up.weight,
                           gate_up.bias, own.down.weight, own.down.bias, own.before.weight, own.after.weight,
                           own.query.weight, own.key.weight, hidden, cosine, sine, out, wanted, normed, attended, sum,
                           end, both, gated, last};
    for (size_t i = 0; i < sizeof(used) / sizeof(*used); i++)
        free((void *)used[i]);
}

int main(void)
{
    for (int turn = 0; turn < 120; turn++) {
        product(draw(16), (unsigned)draw(4));
        small(draw(16));
        layer(draw(16), (unsigned)draw(4));
    }
    puts("few tokens: ok");
}
