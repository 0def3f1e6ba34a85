/* Compares products with coded weights, and restored rows, with plain loops: every kind, on random shapes. */

#include "coded_product.c"
#include "drive_weights.h"

static void compare(int64_t tokens, unsigned threads)
{
    const coded_t w = random_weight(0);
    float *given = guarded_floats(tokens * w.columns), *out = guarded_floats(tokens * w.rows);
    float *bias = draw(2) == 1 ? guarded_floats(w.rows) : NULL;
    const int64_t first = draw(w.rows) - 1, end = first + draw(w.rows - first);
    float *rows = guarded_floats((end - first) * w.columns);
    skim_coded_product(&w, given, bias, out, tokens, team, threads);
    skim_coded_rows(&w, first, end, rows, team, threads);
    for (int64_t o = 0; o < w.rows; o++)
        for (int64_t t = 0; t < tokens; t++) {
            double sum = bias ? bias[o] : 0, size = 1;
            for (int64_t i = 0; i < w.columns; i++) {
                const double term = given[t * w.columns + i] * value_at(&w, o, i);
                sum += term, size += fabs(term);
            }
            expect("product", out[t * w.rows + o] / size, sum / size);
        }
    for (int64_t o = first; o < end; o++)
        for (int64_t i = 0; i < w.columns; i++)
            expect("restored", rows[(o - first) * w.columns + i], value_at(&w, o, i));
    release();
}

int main(void)
{
    for (int turn = 0; turn < 400; turn++)
        compare(draw(16), (unsigned)draw(4));
    puts("coded weights: ok");
}
