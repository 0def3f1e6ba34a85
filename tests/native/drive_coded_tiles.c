/* The same as `drive_coded_many.c`, by tile registers. */

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define TILES
#include "drive_coded_many.c"
#else
#include <stdio.h>
int main(void) { puts("many tokens: this processor has no tile registers"); }
#endif
