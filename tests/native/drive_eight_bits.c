/* Compares rows in 8 bits with plain loops, on random shapes. */

#include "eight_bits.c"
#include "drive.h"

static void compare(unsigned threads)
{
    const int64_t count = draw(70), columns = draw(100);
    float *rows = floats(count * columns), *scale = floats(count);
    int8_t *out = malloc((size_t)(count * columns));
    for (int64_t i = 0; i < columns; i++)
        rows[i] = draw(2) == 1 ? 0 : rows[i];
    const int bad = draw(4) == 1;
    if (bad)
        rows[0] = draw(2) == 1 ? NAN : -INFINITY;
    skim_round_rows(rows, out, scale, count, columns, team, threads);
    for (int64_t r = bad; r < count; r++) {
        double most = 0;
        for (int64_t i = 0; i < columns; i++)
            most = fmax(most, fabs(rows[r * columns + i]));
        expect("scale", scale[r], most / 127);
        for (int64_t i = 0; i < columns; i++)
            expect("rounded", fabs(out[r * columns + i] * (double)scale[r] - rows[r * columns + i]) > 0.501 * scale[r], 0);
    }
    if (bad)
        expect("not finite", isfinite(scale[0]), 0);
    free(rows), free(scale), free(out);
}

int main(void)
{
    for (int turn = 0; turn < 300; turn++)
        compare((unsigned)draw(4));
    puts("8 bits: ok");
}
