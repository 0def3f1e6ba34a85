/* Compares products of 4-bit codes with many tokens with plain loops, on random shapes. */

#include "coded_many.c"
#include "drive.h"

static void product(int64_t tokens, unsigned threads)
{
    const int64_t group = RUN << (draw(3) - 1), columns = group * draw(4), rows = draw(40), groups = columns / group;
    uint8_t *low = malloc((size_t)(rows * columns / 2));
    for (int64_t i = 0; i < rows * columns / 2; i++)
        low[i] = (uint8_t)next();
    float *scale = floats(rows * groups), *offset = floats(rows * groups), *bias = draw(2) == 1 ? floats(rows) : NULL;
    float *given = floats(tokens * columns), *out = floats(tokens * rows);
    const coded_t weight = {low, NULL, scale, offset, NULL, rows, columns, 4, (int32_t)group, 0, FLOAT32, FLOAT32};
    if (!skim_coded_many(&weight, given, bias, out, tokens, 3, team, threads))
        exit(2);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t r = 0; r < rows; r++) {
            double sum = bias ? bias[r] : 0;
            for (int64_t c = 0; c < columns; c++) {
                const int64_t run = c / RUN, j = c % RUN;
                const uint8_t byte = low[(r * columns + run * RUN) / 2 + j % 16];
                const double code = j < 16 ? byte & 15 : byte >> 4;
                sum += given[t * columns + c] * (scale[r * groups + c / group] * code + offset[r * groups + c / group]);
            }
            expect("product", out[t * rows + r], sum);
        }
    float *rough = floats(tokens * rows);
    if (!skim_coded_many(&weight, given, bias, rough, tokens, 1, team, threads))
        exit(4);
    for (int64_t i = 0; i < tokens * rows; i++) /* at most half a step of 1/127 for each column and the largest code */
        if (!(fabsf(rough[i] - out[i]) <= (float)columns * 16.0f / 250.0f))
            exit(5);
    free(rough);
    given[draw(tokens * columns) - 1] = NAN;
    if (skim_coded_many(&weight, given, bias, out, tokens, 3, team, threads))
        exit(3);
    free(low), free(scale), free(offset), free(bias), free(given), free(out);
}

int main(void)
{
    for (int turn = 0; turn < 60; turn++)
        product(draw(40), (unsigned)draw(4));
    puts("many tokens: ok");
}
