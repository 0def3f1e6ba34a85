/* The same as `drive_prefill.c`, by pairs of bfloat16 numbers. */

#ifdef __AVX512BF16__
#define PAIRS
#include "drive_prefill.c"
#else
#include <stdio.h>
int main(void) { puts("prefill: this processor multiplies no pairs of bfloat16 numbers"); }
#endif
