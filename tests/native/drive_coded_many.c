/* Compares products of coded weights with many tokens with plain loops, on random shapes. No sanitizer sees masked
 * loads and stores, or what instructions on tiles read and write: so results stand between guards, and weights and
 * activations end at a page that must not be touched. `drive_coded_tiles.c` does the same with the other kernel. */

#include <stdio.h>

#if !defined(TILES) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__))
int main(void) { puts("many tokens: this processor does not multiply 8-bit integers"); }
#else

#ifdef TILES
#include "coded_tiles.c"
#define MULTIPLY skim_coded_tiles
#define BY_DIGITS 0
#else
#include "coded_many.c"
#define MULTIPLY skim_coded_many
#define BY_DIGITS 1
#endif
#include "drive_weights.h"

enum { GUARD = 64 }; /* floats before a result */

/* Space for results, which are NaN until they are written. */
static float *space(int64_t count)
{
    float *made = guarded((count + GUARD) * (int64_t)sizeof(float));
    for (int64_t i = 0; i < count + GUARD; i++)
        made[i] = i < GUARD ? 12345.0f : NAN;
    return made + GUARD;
}

static void check_guard(const float *made)
{
    for (int i = 1; i <= GUARD; i++)
        if (made[-i] != 12345.0f)
            exit(6);
}

static void product(int64_t tokens, unsigned threads)
{
    const coded_t w = random_weight(BY_DIGITS);
    float *given = guarded_floats(tokens * w.columns), *bias = draw(2) == 1 ? guarded_floats(w.rows) : NULL;
    float *out = space(tokens * w.rows), *rough = space(tokens * w.rows);
    double *values = malloc((size_t)w.columns * sizeof(double));
    if (!MULTIPLY(&w, given, bias, out, tokens, 3, team, threads))
        exit(2);
    if (!MULTIPLY(&w, given, bias, rough, tokens, 1, team, threads))
        exit(4);
    for (int64_t r = 0; r < w.rows; r++) {
        double largest = 0;
        for (int64_t c = 0; c < w.columns; c++) {
            values[c] = value_at(&w, r, c);
            largest = fmax(largest, fabs(values[c]));
        }
        for (int64_t t = 0; t < tokens; t++) {
            double sum = bias ? bias[r] : 0, size = 0;
            for (int64_t c = 0; c < w.columns; c++) {
                sum += given[t * w.columns + c] * values[c];
                size += fabs(given[t * w.columns + c] * values[c]);
            }
            const double unit = 1 + size / 1000, exact = out[t * w.rows + r];
            expect("product", exact / unit, sum / unit);
            const double error = (rough[t * w.rows + r] - exact) / (1e-6 + largest * sqrt((double)w.columns));
            expect_near("rough product", error, 0, 0.02); /* 1/254 for each activation, at random */
        }
    }
    if (tokens) {
        given[draw(tokens * w.columns) - 1] = NAN;
        if (MULTIPLY(&w, given, bias, out, tokens, 3, team, threads))
            exit(3);
    }
    check_guard(out), check_guard(rough);
    free(values);
    release();
}

int main(void)
{
#ifdef TILES
    if (!skim_tiles_permitted()) {
        puts("many tokens: tile registers are not permitted");
        return 0;
    }
#endif
    product(0, 2);
    for (int turn = 0; turn < 60; turn++)
        product(draw(40), (unsigned)draw(4));
    puts("many tokens: ok");
}
#endif
