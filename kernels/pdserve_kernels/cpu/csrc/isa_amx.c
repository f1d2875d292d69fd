/* x86-64 with AMX: bfloat16 products in tiles at every number of rows, the rest as with AVX-512. */
#if defined(__x86_64__)
#include <stdlib.h>
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,prefer-vector-width=512,amx-tile,amx-bf16")
#define PD_AVX512
#define PD_AMX
#define PD_TABLE kernels_amx
#define PD_NAME "amx"
#include "isa.inc"
#endif
