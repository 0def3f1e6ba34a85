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

int main(void)
{
    for (int turn = 0; turn < 120; turn++) {
        product(draw(16), (unsigned)draw(4));
        small(draw(16));
    }
    puts("few tokens: ok");
}
