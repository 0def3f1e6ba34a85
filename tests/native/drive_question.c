/* Compares the passes from scores to blocks with plain loops, on random shapes. */

#include "question.c"
#include "drive.h"

static void rows(unsigned threads)
{
    const int64_t windows = draw(3), keys = draw(3), heads = keys * draw(3), count = draw(9), length = draw(70);
    const int64_t group = draw(4), groups = (count + group - 1) / group, each = windows * heads * count * length;
    float *scores = floats(each), *before = malloc((size_t)each * sizeof(float)), *weight = floats(windows * keys * length);
    float *sinks = draw(2) == 1 ? floats(heads) : NULL;
    uint8_t *hidden = malloc((size_t)(windows * count * length));
    int32_t *kinds = malloc((size_t)heads * 4), *most = malloc((size_t)heads * 4), *mean = malloc((size_t)heads * 4);
    int32_t *own = malloc((size_t)heads * 4), all = 0;
    memcpy(before, scores, (size_t)each * sizeof(float));
    for (int64_t i = 0; i < windows * count * length; i++)
        hidden[i] = i % length && draw(3) == 1;
    for (int64_t h = 0; h < heads; h++) {
        kinds[h] = (int32_t)draw(8) - 1;
        most[h] = all, all += !!(kinds[h] & MOST);
        mean[h] = all, all += !!(kinds[h] & MEAN);
        own[h] = all, all += kinds[h] & EACH ? (int32_t)groups : 0;
    }
    float *out = floats(windows * all * length);
    rows_t p = {scores, hidden, weight, sinks, kinds, most, mean, own, out, windows, heads, keys, count, length, all, group, 0};
    skim_question_rows(&p, team, threads);
    double *share = malloc((size_t)count * sizeof(double));
    for (int64_t w = 0; w < windows; w++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < length; i++) {
                double largest = 0, mean_share = 0;
                for (int64_t q = 0; q < count; q++) {
                    const float *row = before + ((w * heads + h) * count + q) * length;
                    double sum = sinks ? exp(sinks[h]) : 0;
                    for (int64_t j = 0; j < length; j++)
                        sum += hidden[(w * count + q) * length + j] ? 0 : exp(row[j]);
                    share[q] = hidden[(w * count + q) * length + i] ? 0 : exp(row[i]) / sum;
                    largest = fmax(largest, share[q]);
                    mean_share += share[q] / (double)count;
                }
                const double by = weight[(w * keys + h * keys / heads) * length + i];
                const float *to = out + w * all * length + i;
                if (kinds[h] & MOST)
                    expect("most", to[most[h] * length], largest * by);
                if (kinds[h] & MEAN)
                    expect("mean", to[mean[h] * length], mean_share * by);
                for (int64_t g = 0; g < groups && kinds[h] & EACH; g++) {
                    double top = 0;
                    for (int64_t q = g * group; q < (g + 1) * group && q < count; q++)
                        top = fmax(top, share[q]);
                    expect("each", to[(own[h] + g) * length], top * by);
                }
            }
    free(scores), free(before), free(weight), free(sinks), free(hidden), free(share);
    free(kinds), free(most), free(mean), free(own), free(out);
}

static void blocks(unsigned threads)
{
    const int64_t windows = draw(2), all = draw(6), length = draw(600), most = draw(length), size = draw(9);
    const int64_t count = windows * most / size + 2, edge = draw(size) / 3;
    float *attention = floats(windows * all * length), *best = floats(all * count), *expected = floats(all * count);
    int64_t *columns = malloc((size_t)(windows * most) * 8), *block = malloc((size_t)(windows * most) * 8);
    int64_t *counts = malloc((size_t)windows * 8);
    uint8_t *sides = malloc((size_t)(windows * most));
    memset(best, 0, (size_t)(all * count) * sizeof(float));
    memset(expected, 0, (size_t)(all * count) * sizeof(float));
    for (int64_t i = 0; i < windows * most; i++) {
        columns[i] = draw(length) - 1;
        block[i] = i / size;
        sides[i] = (uint8_t)(BEFORE * (i % size < edge) | AFTER * (i % size >= size - edge));
    }
    for (int64_t w = 0; w < windows; w++)
        counts[w] = draw(most);
    blocks_t p = {attention, columns, block, sides, counts, best, windows, all, length, most, count, 0.75f, 1, 0};
    skim_block_scores(&p, team, threads);
    for (int64_t w = 0; w < windows; w++)
        for (int64_t r = 0; r < all; r++)
            for (int64_t i = 0; i < counts[w]; i++) {
                const int64_t at = w * most + i;
                double sum = 0, near = 0;
                for (int64_t j = i - REACH; j <= i + REACH; j++)
                    if (j >= 0 && j < counts[w]) {
                        sum += attention[(w * all + r) * length + columns[w * most + j]];
                        near++;
                    }
                float *to = expected + r * count + block[at];
                *to = fmaxf(*to, (float)(sum / near));
                if (sides[at] & BEFORE && block[at] > 0)
                    to[-1] = fmaxf(to[-1], 0.75f * (float)(sum / near));
                if (sides[at] & AFTER && block[at] + 1 < count)
                    to[1] = fmaxf(to[1], 0.75f * (float)(sum / near));
            }
    expect("finite", p.finite, 1);
    for (int64_t i = 0; i < all * count; i++)
        expect("block", best[i], expected[i]);
    free(attention), free(best), free(expected), free(columns), free(block), free(counts), free(sides);
}

int main(void)
{
    for (int turn = 0; turn < 60; turn++) {
        rows((unsigned)draw(4));
        blocks((unsigned)draw(4));
    }
    puts("question: ok");
}
