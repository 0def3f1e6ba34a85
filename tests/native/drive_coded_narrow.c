/* The same with narrow vectors: on processors without AVX-512. */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("no-avx512f")
#endif
#include "drive_coded.c"
