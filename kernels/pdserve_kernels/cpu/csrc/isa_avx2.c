/* x86-64 with AVX2 and FMA. */
#if defined(__x86_64__)
#include <stdlib.h>
#pragma GCC target("avx2,fma")
#define PD_AVX2
#define PD_TABLE kernels_avx2
#define PD_NAME "avx2"
#include "isa.inc"
#endif
