/* Tile registers (AMX): permission to use them, their configuration, and loads that compilers understand. */

#pragma once

#if defined(__AMX_TILE__) && defined(__linux__)
#include <immintrin.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* 1 if this process may use tile registers. Linux saves them only for a process that has asked; an older kernel
 * refuses. Asking again changes nothing. */
static int amx_permitted(void)
{
    const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

/* All eight registers have 16 rows of 64 bytes. A thread ends with `_tile_release`. */
static inline void begin_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16]; /* of a row, by register */
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc 12 believes that only 8 bytes are read */
    _tile_loadconfig(&config);
}

/* Compilers do not know that a load of a tile reads memory. They know that a store writes it. */
#define LOAD(tile, from, stride)                                                                                       \
    do {                                                                                                               \
        __asm__ volatile("" ::: "memory");                                                                             \
        _tile_loadd(tile, from, stride);                                                                               \
    } while (0)
#else
static int amx_permitted(void) { return 0; }
#endif
