/* Compares the operations for many tokens with plain loops, on random shapes. */

#include "many_tokens.c"
#include "drive.h"

static void operations(int64_t tokens, unsigned threads)
{
    const int64_t heads = draw(3), dim = 2 * draw(40), stride = heads * dim, all = tokens * stride;
    float *x = floats(all), *other = floats(all), *weight = floats(dim), *out = floats(all), *before = floats(all);
    for (int64_t i = 0; i < all; i++)
        before[i] = x[i] + other[i];
    skim_norm_many(x, other, stride, weight, 1e-5, out, stride, tokens, heads, dim, team, threads);
    for (int64_t row = 0; row < tokens * heads; row++) {
        double sum = 0;
        for (int64_t i = 0; i < dim; i++)
            sum += (double)before[row * dim + i] * before[row * dim + i];
        for (int64_t i = 0; i < dim; i++)
            expect("norm", out[row * dim + i], before[row * dim + i] / sqrt(sum / (double)dim + 1e-5) * weight[i]);
    }
    float *cosine = floats(tokens * dim), *sine = floats(tokens * dim);
    for (int64_t i = 0; i < all; i++)
        before[i] = out[i];
    skim_rotate_many(out, stride, cosine, sine, tokens, heads, dim, team, threads);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < dim; i++) {
                const float *own = before + t * stride + h * dim;
                const double turned = i < dim / 2 ? -own[i + dim / 2] : own[i - dim / 2];
                const double wanted = own[i] * (double)cosine[t * dim + i] + turned * sine[t * dim + i];
                expect("rotate", out[t * stride + h * dim + i], wanted);
            }
    const int64_t inner = draw(100);
    float *given = floats(tokens * 2 * inner), *gated = floats(tokens * inner);
    skim_gate_many(given, gated, tokens, inner, team, threads);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < inner; i++) {
            const double g = given[t * 2 * inner + i], passed = given[t * 2 * inner + inner + i];
            expect("gate", gated[t * inner + i], g / (1 + exp(-g)) * passed);
        }
    free(x), free(other), free(weight), free(out), free(before);
    free(cosine), free(sine), free(given), free(gated);
}

int main(void)
{
    for (int turn = 0; turn < 60; turn++)
        operations(draw(80), (unsigned)draw(4));
    puts("many tokens: ok");
}
