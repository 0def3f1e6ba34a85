/* Random coded weights of every kind, and their values by plain loops. A source that includes this header includes
 * `coded.h` before. */

#pragma once

#include <string.h>
#include <sys/mman.h>

#include "drive.h"

enum { PAGE = 4096, PAGES = 16384 };

/* Memory that ends at a page that must not be touched: sanitizers do not see masked loads and stores. What is made
 * lasts until `release`. */
static uint8_t *mapped[16];
static int mappings;

static void *guarded(int64_t size)
{
    uint8_t *all = mmap(NULL, (size_t)PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const int64_t used = (size + PAGE - 1) / PAGE * PAGE;
    if (all == MAP_FAILED || used >= (int64_t)PAGES * PAGE || mprotect(all, (size_t)used, PROT_READ | PROT_WRITE))
        exit(2);
    mapped[mappings++] = all;
    return all + used - size;
}

static void release(void)
{
    while (mappings)
        munmap(mapped[--mappings], (size_t)PAGES * PAGE);
}

static float *guarded_floats(int64_t count)
{
    float *from = floats(count), *made = guarded(count * (int64_t)sizeof(float));
    memcpy(made, from, (size_t)count * sizeof(float));
    free(from);
    return made;
}

static uint8_t *bytes_of(int64_t count)
{
    uint8_t *made = guarded(count);
    for (int64_t i = 0; i < count; i++)
        made[i] = (uint8_t)next();
    return made;
}

/* Scales or offsets of a random type. Halves are between 2^-8 and 2^-7, so that sums stay small. */
static void *numbers(int64_t count, int *type)
{
    const int64_t bytes = *type == FLOAT32 ? 4 : *type <= BFLOAT16 ? 2 : 1;
    uint8_t *made = bytes_of(count * bytes);
    for (int64_t i = 0; i < count; i++) {
        if (*type == FLOAT16)
            ((uint16_t *)made)[i] = (uint16_t)(0x1c00 | next() % 1024 | (next() % 2) << 15);
        else if (*type == BFLOAT16)
            ((uint16_t *)made)[i] = (uint16_t)(0x3b80 | next() % 128 | (next() % 2) << 15);
        else if (*type == FLOAT32)
            ((float *)made)[i] = (float)(next() % 2001) / 1e5f - 0.01f;
    }
    return made;
}

static double number(const void *plane, int type, int64_t i)
{
    switch (type) {
    case FLOAT16: return float_of_half(((const uint16_t *)plane)[i]);
    case BFLOAT16: return float_of_bits((uint32_t)((const uint16_t *)plane)[i] << 16);
    case FLOAT32: return ((const float *)plane)[i];
    case UINT8: return ((const uint8_t *)plane)[i];
    default: return ((const int8_t *)plane)[i];
    }
}

/* 4 bits of exponent and 3 of mantissa. */
static double eight_bit_float(int byte)
{
    const int exponent = byte >> 3 & 15;
    const double magnitude = exponent ? ldexp(8 + (byte & 7), exponent - 10) : ldexp(byte & 7, -9);
    return byte & 0x80 ? -magnitude : magnitude;
}

static double code_at(const coded_t *w, int64_t row, int64_t column)
{
    const int64_t run = column / RUN, j = column % RUN;
    if (w->bits >= 8) {
        const int whole = w->low[row * w->columns + column];
        return w->bits == 8 ? whole : eight_bit_float(whole);
    }
    const uint8_t byte = w->low[row * w->columns / 2 + run * 16 + j % 16];
    int code = j < 16 ? byte & 15 : byte >> 4;
    if (w->bits == 5)
        code |= (w->high[row * w->columns / 8 + run * 4 + j / 8] >> j % 8 & 1) << 4;
    if (w->bits == 6)
        code |= (w->high[row * w->columns / 4 + run * 8 + j % 8] >> j / 8 * 2 & 3) << 4;
    return code;
}

static double value_at(const coded_t *w, int64_t row, int64_t column)
{
    const int64_t group = (row * w->columns + column) / w->group, pair = w->offset_type == NONE ? 1 : 2;
    const uint16_t *factor = w->factor ? w->factor + (row * w->columns + column) / SUPER * pair : NULL;
    const double scale = number(w->scale, w->scale_type, group) * (factor ? float_of_half(factor[0]) : 1);
    const double code = code_at(w, row, column);
    if (w->offset_type == NONE)
        return scale * (code - w->zero);
    const double offset = number(w->offset, w->offset_type, group);
    if (factor)
        return scale * code - offset * float_of_half(factor[1]);
    return w->offset_type == UINT8 ? scale * (code - offset) : scale * code + offset;
}

static int number_type(void) { return (int)(next() % 3); } /* of floats */

/* A random weight whose planes last until `release`. by_digits: only kinds that `coded_many.c` multiplies */
static coded_t random_weight(int by_digits)
{
    const int bits[] = {4, 5, 6, 8, EIGHT_BIT_FLOATS}, groups[] = {32, 64, 128, 16};
    coded_t w = {0};
    w.bits = bits[by_digits ? 0 : next() % 5], w.group = groups[next() % (by_digits ? 3 : 4)], w.rows = draw(70);
    const int super = next() % 3 == 0;
    const int64_t unit = super ? SUPER : w.group > RUN ? w.group : RUN;
    w.columns = unit * draw(super ? 5 : draw(8) == 1 ? 40 : 9);
    const int64_t all = w.rows * w.columns, count = all / w.group;
    w.zero = (int)(next() % 129);
    w.scale_type = super ? (next() % 2 ? UINT8 : INT8) : number_type();
    w.offset_type = next() % 3 == 0 ? NONE : super || next() % 2 ? UINT8 : number_type();
    int type = FLOAT16;
    w.factor = super ? numbers(all / SUPER * (w.offset_type == NONE ? 1 : 2), &type) : NULL;
    w.scale = numbers(count, &w.scale_type);
    w.offset = w.offset_type == NONE ? NULL : numbers(count, &w.offset_type);
    uint8_t *low = bytes_of(w.bits >= 8 ? all : all / 2);
    for (int64_t i = 0; w.bits == EIGHT_BIT_FLOATS && i < all; i++)
        low[i] ^= (low[i] & 0x7f) == 0x7f; /* none is NaN */
    w.low = low;
    w.high = w.bits == 5 || w.bits == 6 ? bytes_of(all * (w.bits - 4) / 8) : NULL;
    return w;
}
