/* Attention of prefill chunks over a paged pool of float32 keys and values, by tile registers (AMX).
 *
 * `prefill.h` has the arguments, the panels and the blocks, and says what is promised. Tile registers multiply
 * bfloat16 numbers and add products in float32, many times as fast as fused multiply-adds. Every float is a sum of
 * three bfloat16 numbers (`bfloat16.h`). Of the nine products of two such sums the six largest are computed, which
 * together are as precise as float32. Where inputs may be rounded, only the largest is computed.
 *
 * Scores are [keys, lanes] and weighted sums [value_dim, lanes], so the lanes of a panel are columns of tiles
 * everywhere. A block converts each tile of keys and values once. The row of a key within a tile is its slot modulo
 * TILE; rows that no panel reads are 0.
 *
 * A key or a value with a number that is NaN, infinite or at least 2^127 makes the results of queries that read it NaN,
 * and no others.
 */

#include <stdint.h>
#include <string.h>

enum {
    VECTORS = 2, /* of a panel: two by two tiles of sums leave registers for four tiles of factors */
    PANELS = 32, /* of a block, at most */
    TILE = 128,  /* keys whose scores are held at a time */
};

#include "prefill.h"

#if !defined(__AMX_BF16__) || !defined(__AMX_TILE__) || !defined(__AVX512BF16__) || !defined(__AVX512BW__)
#error "this processor multiplies no tiles of bfloat16 numbers"
#endif

#include "prefill_bfloat16.h"
#include "prefill_visits.h"

int skim_permitted(void) { return amx_permitted(); }

/* ---- Scratch space. */

/* Returns the bytes in use. */
static int64_t lay_out(int64_t key_dim, int64_t value_dim, uintptr_t from, scratch_t *s)
{
    const uintptr_t start = from;
    s->key_depths = (key_dim + DEPTH - 1) / DEPTH;
    s->value_pairs = (value_dim + DEPTH - 1) / DEPTH;
    s->keys = take(&from, s->key_depths * (TILE / ROWS) * FLOAT_BYTES);
    s->values = take(&from, s->value_pairs * (TILE / DEPTH) * 2 * FLOAT_BYTES);
    for (int i = 0; i < 2; i++) {
        s->weights[i] = take(&from, TILE / DEPTH * VECTORS * FLOAT_BYTES);
        s->scores[i] = take(&from, TILE * ROW_STRIDE);
    }
    for (int i = 0; i < PANELS; i++) {
        s->queries[i] = take(&from, s->key_depths * VECTORS * FLOAT_BYTES);
        s->sums[i] = take(&from, s->value_pairs * DEPTH * ROW_STRIDE);
    }
    return (int64_t)(from - start);
}

int64_t skim_prefill_scratch(int64_t key_dim, int64_t value_dim)
{
    scratch_t s;
    return (lay_out(key_dim, value_dim, 0, &s) + CACHE_LINE) / (int64_t)sizeof(float);
}

/* ---- Conversion. */

/* Add the panel's queries and clear its sums. */
static void begin_panel(int levels, const prefill_t *p, const scratch_t *s, const chunk_t *chunk, int64_t kv_head,
                        int64_t first, int64_t count, panel_t *panel)
{
    const __m512 scale = _mm512_set1_ps((float)(p->scale * (double)LOG2_E));
    begin_lanes(p, chunk, kv_head, first, count, panel);
    for (int64_t depth = 0; depth < s->key_depths; depth++)
        for (int i = 0; i < panel->vectors; i++) {
            char rows[FLOAT_BYTES] __attribute__((aligned(CACHE_LINE)));
            char *to = (char *)panel->query + (depth * VECTORS + i) * FLOAT_BYTES;
            for (int row = 0; row < ROWS; row++) {
                const int64_t left = p->key_dim - depth * DEPTH;
                const float *from = query_of(p, panel, i * LANES + row) + depth * DEPTH;
                put_row(levels, some_floats(from, left) * scale, some_floats(from + LANES, left - LANES) * scale,
                        rows + row * CACHE_LINE);
            }
            for (int level = 0; level < levels; level++) {
                __m512i pairs[ROWS];
                memcpy(pairs, rows + level * TILE_BYTES, TILE_BYTES);
                transpose(pairs);
                memcpy(to + level * TILE_BYTES, pairs, TILE_BYTES);
            }
        }
    memset(panel->out, 0, (size_t)(s->value_pairs * DEPTH * ROW_STRIDE));
}

/* Keys and values of unfit rows become 0. */
static void find_unfit(const prefill_t *p, tile_t *tile)
{
    tile->any_unfit = 0;
    for (int row = 0; row < TILE; row++) {
        tile->unfit[row] = tile->keys[row] && (is_unfit(tile->keys[row], p->key_dim) ||
                                               is_unfit(tile->values[row], p->value_dim));
        tile->any_unfit |= tile->unfit[row];
        if (tile->unfit[row])
            tile->keys[row] = tile->values[row] = NULL;
    }
}

static void convert_keys(int levels, const prefill_t *p, const scratch_t *s, const tile_t *tile)
{
    for (int row = 0; row < TILE; row++)
        for (int64_t depth = 0; depth < s->key_depths; depth++) {
            const int64_t left = tile->keys[row] ? p->key_dim - depth * DEPTH : 0;
            const float *from = tile->keys[row] ? tile->keys[row] + depth * DEPTH : p->query;
            put_row(levels, some_floats(from, left), some_floats(from + LANES, left - LANES),
                    s->keys + (depth * (TILE / ROWS) + row / ROWS) * FLOAT_BYTES + row % ROWS * CACHE_LINE);
        }
}

static void convert_values(int levels, const prefill_t *p, const scratch_t *s, const tile_t *tile)
{
    for (int64_t column = 0; column < s->value_pairs * DEPTH; column += ROWS)
        for (int part = 0; part < TILE / DEPTH; part++) {
            __m512i halves[2][ROWS];
            for (int row = 0; row < DEPTH; row++) {
                const float *values = tile->values[part * DEPTH + row], *from = values ? values + column : p->query;
                halves[row / ROWS][row % ROWS] = (__m512i)some_floats(from, values ? p->value_dim - column : 0);
            }
            transpose(halves[0]);
            transpose(halves[1]);
            char *to = s->values + ((column / DEPTH * (TILE / DEPTH) + part) * 2 + column / ROWS % 2) * FLOAT_BYTES;
            for (int row = 0; row < ROWS; row++)
                put_row(levels, (__m512)halves[0][row], (__m512)halves[1][row], to + row * CACHE_LINE);
        }
}

/* ---- Blocks of panels. */

INLINE void attend_panels(int levels, const prefill_t *p, const chunk_t *chunk, int64_t kv_head,
                          int64_t first, int64_t stacked, float *scratch)
{
    scratch_t s;
    lay_out(p->key_dim, p->value_dim, ((uintptr_t)scratch + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE, &s);
    panel_t panels[PANELS];
    int count = 0;
    for (; count < p->panels && first + count * WIDTH < stacked; count++) {
        panel_t *panel = panels + count;
        panel->query = (float *)s.queries[count];
        panel->out = s.sums[count];
        begin_panel(levels, p, &s, chunk, kv_head, first + count * WIDTH, stacked - first - count * WIDTH, panel);
    }
    const int64_t begin = panels[0].lowest, end = panels[count - 1].highest + 1;
    cursor_t at = {p->runs + chunk->runs_at, begin - chunk->first};
    tile_t tiles[2], *tile = &tiles[0], *next = &tiles[1];
    next_rows(p, kv_head, &at, begin, end, tile->keys, tile->values);
    for (int64_t slot = begin - begin % TILE; slot < end; slot += TILE) {
        const int64_t following = slot + TILE;
        if (following < end)
            next_rows(p, kv_head, &at, following, end, next->keys, next->values);
        find_unfit(p, tile);
        convert_keys(levels, p, &s, tile);
        convert_values(levels, p, &s, tile);
        attend_tile(levels, &s, tile, (int32_t)slot, panels, count);
        tile_t *const used = tile;
        tile = next;
        next = used;
    }
    for (int i = 0; i < count; i++)
        end_panel(p, panels + i);
}

static void attend_block(const prefill_t *p, const chunk_t *chunk, int64_t kv_head, int64_t first, int64_t stacked,
                         float *scratch)
{
    if (p->rounded)
        attend_panels(1, p, chunk, kv_head, first, stacked, scratch);
    else
        attend_panels(LEVELS, p, chunk, kv_head, first, stacked, scratch);
}

static void work(void *data)
{
    begin_tiles();
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040); /* flush denormals */
    attend_blocks(data);
    _mm_setcsr(before);
    _tile_release();
}
