/* x86-64 with AVX-512 and its bfloat16 products. */
#if defined(__x86_64__)
#include <stdlib.h>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512")
#define PD_AVX512
#define PD_TABLE kernels_avx512
#define PD_NAME "avx512"
#include "isa.inc"
#endif
