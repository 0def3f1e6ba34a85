/* The same as `drive_prefill.c`, by tile registers. */

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define TILES
#include "drive_prefill.c"
#else
#include <stdio.h>
int main(void) { puts("prefill: this processor has no tile registers"); }
#endif
