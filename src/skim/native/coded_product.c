/* Products of coded weights with a few tokens, and restored rows for more tokens.
 *
 * out[t, o] = sum over i of given[t, i] * (scale * code[o, i] + offset) + bias[o]. Codes are read once and used for
 * all tokens. Activations keep 24 bits, as floats or as digits (`coded_digits.h`), so results differ from products with
 * restored weights by rounding only.
 * With one token values go from registers to sums; with more they are first put in a small buffer.
 *
 * A token's result is bit-identical in any batch and with any number of threads: its sums have one order. NaN and
 * infinity propagate.
 */

#include "coded.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__BMI2__) && !defined(WITHOUT_DIGITS)
#define IN_DIGITS
#include "coded_digits.h"
#endif

enum {
#ifdef __AVX512F__
    ROWS = 4,   /* weight rows in a tile */
    TOKENS = 6, /* tokens in a tile: the registers hold ROWS * TOKENS sums */
#else
    ROWS = 4,
    TOKENS = 2,
#endif
    SPAN = 1024, /* columns that are restored at a time for several tokens: they stay in the nearest cache */
    FEW = 16,    /* most tokens of a product */
    SHARES = 4,  /* shares of rows per thread, so that all threads end at about the same time */
    LEAST = 16,  /* minimum number of rows in a share */
    NEAR = 8,   /* rows whose scales stay in the nearest cache */
};

#ifdef __AVX__
#define IN_REGISTER(value) "v"(value)
#else
#define IN_REGISTER(value) "m"(value)
#endif

typedef struct {
    const coded_t *weight;
    const float *given; /* [tokens, columns] */
    const float *bias;  /* [rows], or NULL */
    float *out;         /* [tokens, rows], or the restored rows */
    const void *digits; /* of the tokens; NULL: compute in floats */
    int64_t tokens;
    int64_t first, end; /* rows to compute */
    int64_t share;      /* rows that a thread claims at a time */
    int64_t next_share; /* index of the next unclaimed share */
} task_of;

INLINE int shift_of(const coded_t *w)
{
    return w->group == 64 ? 1 : w->group == 128 ? 2 : 0; /* runs of a group, as a power of two */
}

INLINE void put(const task_of *p, int64_t token, int64_t row, vec sums)
{
    p->out[token * p->weight->rows + row] = sum_of(sums) + (p->bias ? p->bias[row] : 0.0f);
}

/* ---- one token */

INLINE void rows_by_one(const task_of *p, int64_t row, int rows, const float *scale, const float *offset, int bits,
                        int fine)
{
    const coded_t *w = p->weight;
    const int64_t runs = w->columns / RUN, groups = w->columns / w->group;
    const int64_t wide = low_bytes(w), high = high_bytes(w->columns, bits);
    const int shift = shift_of(w);
    vec sums[ROWS] = {0};
    for (int64_t run = 0; run < runs; run++) {
        vec given[PARTS];
        for (int i = 0; i < PARTS; i++) {
            given[i] = *(const vec *)(p->given + run * RUN + i * LANES);
            __asm__("" : "+" IN_REGISTER(given[i])); /* else it is loaded again for each row */
        }
        for (int r = 0; r < rows; r++) {
            vec own[PARTS];
            restore_run(w->low + (row + r) * wide, w->high + (row + r) * high, scale + r * groups,
                        offset + r * groups, run, bits, fine, shift, own);
            for (int i = 0; i < PARTS; i++)
                sums[r] += own[i] * given[i];
        }
    }
    for (int r = 0; r < rows; r++)
        put(p, 0, row + r, sums[r]);
}

/* ---- several tokens */

INLINE void restore_span(const coded_t *w, int64_t row, int64_t run, int64_t runs, const float *scale,
                         const float *offset, int bits, int fine, float *out)
{
    const uint8_t *low = w->low + row * low_bytes(w), *high = w->high + row * high_bytes(w->columns, bits);
    for (int64_t i = 0; i < runs; i++)
        restore_run(low, high, scale, offset, run + i, bits, fine, shift_of(w), (vec *)(out + i * RUN));
}

/* The span's products with `tokens` tokens starting at `token`, added to `sums`. values: [rows, SPAN] */
INLINE void tile(const task_of *p, const float *values, int rows, int64_t column, int64_t columns, int64_t token,
                 int tokens, vec (*sums)[FEW])
{
    const float *given = p->given + token * p->weight->columns + column;
    vec own[ROWS], total[ROWS][TOKENS];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++)
            total[r][t] = sums[r][token + t];
    for (int64_t i = 0; i < columns; i += LANES) {
        for (int r = 0; r < rows; r++)
            own[r] = *(const vec *)(values + r * SPAN + i);
        for (int t = 0; t < tokens; t++) {
            const vec value = *(const vec *)(given + t * p->weight->columns + i);
            for (int r = 0; r < rows; r++)
                total[r][t] += own[r] * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tokens; t++)
            sums[r][token + t] = total[r][t];
}

/* The span's products with all tokens. Each possible remainder of tokens has a specialised loop. */
INLINE void tiles(const task_of *p, const float *values, int rows, int64_t column, int64_t columns,
                  vec (*sums)[FEW])
{
    int64_t token = 0;
    for (; token + TOKENS <= p->tokens; token += TOKENS)
        tile(p, values, rows, column, columns, token, TOKENS, sums);
    switch (p->tokens - token) {
    case 1: return tile(p, values, rows, column, columns, token, 1, sums);
#ifdef __AVX512F__
    case 2: return tile(p, values, rows, column, columns, token, 2, sums);
    case 3: return tile(p, values, rows, column, columns, token, 3, sums);
    case 4: return tile(p, values, rows, column, columns, token, 4, sums);
    case 5: return tile(p, values, rows, column, columns, token, 5, sums);
#endif
    }
}

static void all_tokens(const task_of *p, const float *values, int rows, int64_t column, int64_t columns,
                       vec (*sums)[FEW])
{
    if (rows == ROWS)
        tiles(p, values, ROWS, column, columns, sums);
    else
        for (int r = 0; r < rows; r++)
            tiles(p, values + r * SPAN, 1, column, columns, sums + r);
}

INLINE void rows_by_some(const task_of *p, int64_t row, int rows, const float *scale, const float *offset, int bits,
                         int fine)
{
    const coded_t *w = p->weight;
    const int64_t groups = w->columns / w->group;
    float values[ROWS * SPAN];
    vec sums[ROWS][FEW];
    memset(sums, 0, sizeof(sums));
    for (int64_t column = 0; column < w->columns; column += SPAN) {
        const int64_t columns = column + SPAN < w->columns ? SPAN : w->columns - column;
        for (int r = 0; r < rows; r++)
            restore_span(w, row + r, column / RUN, columns / RUN, scale + r * groups, offset + r * groups, bits,
                         fine, values + r * SPAN);
        all_tokens(p, values, rows, column, columns, sums);
    }
    for (int r = 0; r < rows; r++)
        for (int64_t t = 0; t < p->tokens; t++)
            put(p, t, row + r, sums[r][t]);
}

/* ---- rows of one kind of codes */

INLINE void rows_of_kind(const task_of *p, int64_t row, int64_t count, const affine_t *affine, int bits, int fine)
{
    const coded_t *w = p->weight;
    const int64_t groups = w->columns / w->group;
#ifdef IN_DIGITS
    if (p->digits && bits <= 8)
        return digit_rows(w, row, count, affine, p->digits, p->tokens, p->bias, p->out, bits, fine);
#endif
    for (int64_t i = 0; i < count;) {
        const float *scale = affine->scale + i * groups, *offset = affine->offset + i * groups;
        const int rows = count - i < ROWS ? 1 : ROWS;
        if (p->tokens == 0) /* restore */
            restore_span(w, row + i, 0, w->columns / RUN, scale, offset, bits, fine,
                         p->out + (row + i - p->first) * w->columns);
        else if (p->tokens > 1)
            rows_by_some(p, row + i, rows, scale, offset, bits, fine);
        else if (rows == ROWS)
            rows_by_one(p, row + i, ROWS, scale, offset, bits, fine);
        else
            rows_by_one(p, row + i, 1, scale, offset, bits, fine);
        i += p->tokens ? rows : 1;
    }
}

static void some_rows(const task_of *p, int64_t row, int64_t count, const affine_t *affine)
{
    const int fine = p->weight->group == 16;
#define KIND(bits) return fine ? rows_of_kind(p, row, count, affine, bits, 1) : rows_of_kind(p, row, count, affine, bits, 0)
    switch (p->weight->bits) {
    case 4: KIND(4);
    case 5: KIND(5);
    case 6: KIND(6);
    case 8: KIND(8);
    case EIGHT_BIT_FLOATS: KIND(EIGHT_BIT_FLOATS);
    }
#undef KIND
}

static void work(void *data)
{
    task_of *p = data;
    affine_t affine;
    const int64_t groups = p->weight->columns / p->weight->group;
    const int64_t most = groups * NEAR <= MOST ? NEAR : MOST / groups; /* rows whose scales are converted together */
    for (;;) {
        int64_t row = p->first + p->share * __atomic_fetch_add(&p->next_share, 1, __ATOMIC_RELAXED);
        if (row >= p->end)
            return;
        const int64_t end = row + p->share < p->end ? row + p->share : p->end;
        while (row < end) {
            int64_t count = end - row < most ? end - row : most;
            if (count > ROWS)
                count -= count % ROWS;
            read_affine(p->weight, row, count, &affine);
            some_rows(p, row, count, &affine);
            row += count;
        }
    }
}

static void start(task_of *p, team_t team, unsigned threads)
{
    const int64_t rows = p->end - p->first, share = rows / (SHARES * (int64_t)threads) / LEAST * LEAST;
    p->share = share > LEAST ? share : LEAST;
    run_shared(team, rows > LEAST ? threads : 1, work, p);
}

/* given: [tokens, columns], 1 to 16 tokens */
void skim_coded_product(const coded_t *weight, const float *given, const float *bias, float *out, int64_t tokens,
                        team_t team, unsigned threads)
{
    task_of p = {weight, given, bias, out, NULL, tokens, 0, weight->rows, 0, 0};
#ifdef IN_DIGITS
    digits_t digits[FEW];
    void *memory = weight->bits <= 8 ? digits_of(given, weight, tokens, digits) : NULL;
    if (memory) {
        p.digits = digits;
        start(&p, team, threads);
        free(memory);
        for (int64_t t = 0; t < tokens; t++)
            if (!digits[t].fits) {
                const int64_t columns = weight->columns;
                task_of one = {weight, given + t * columns, bias, out + t * weight->rows, NULL, 1, 0, weight->rows, 0, 0};
                start(&one, team, threads);
            }
        return;
    }
#endif
    start(&p, team, threads);
}

/* The values of rows `first` to `end`. out: [end - first, columns] */
void skim_coded_rows(const coded_t *weight, int64_t first, int64_t end, float *out, team_t team, unsigned threads)
{
    task_of p = {weight, NULL, NULL, out, NULL, 0, first, end, 0, 0};
    start(&p, team, threads);
}
