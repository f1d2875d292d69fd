/* Vectors of float32 in the width of an instruction family. Included by isa_*.c after its choice of one:
 * PD_AVX512, PD_AVX2, or neither. Every function is defined in each of them, with the bits of that family. */
#include <string.h>

#include "kernels.h"
#include "numbers.h"

INLINE float bf16_to_float(bf16 x) { return float_of((uint32_t)x << 16); }

/* Nearest, ties to even. */
INLINE bf16 float_to_bf16(float x)
{
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(PD_AVX512)

#include <immintrin.h>
typedef __m512 vf;
enum { VW = 16 };
INLINE vf vset1(float x) { return _mm512_set1_ps(x); }
INLINE vf vload(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vstore(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vround(vf x) { return _mm512_roundscale_ps(x, 8); }
INLINE vf vscale2(vf x, vf n) { return _mm512_scalef_ps(x, n); }
INLINE vf vload_bf16(const bf16 *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void vstore_bf16(bf16 *p, vf x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
/* Of two vectors at once. */
INLINE void vstore_bf16_pair(bf16 *p, vf x, vf y) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(y, x)); }
INLINE vf vload_int8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* Codes of e4m3. An exponent of 0 gets the 1 before its fraction taken away again. */
INLINE vf vload_e4m3(const uint8_t *p)
{
    __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    __m512i magnitude = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x7F)), 20);
    __m512 x = _mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(120 << 23)));
    __m512 small = _mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(121 << 23)));
    __mmask16 is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(1 << 23));
    x = _mm512_mask_sub_ps(x, is_small, small, _mm512_set1_ps(0x1p-6f));
    __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign));
}
INLINE float vhmax(vf x) { return _mm512_reduce_max_ps(x); }
INLINE int vany_above(vf x, float limit) { return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0; }
/* Lanes whose index is in [first, last) keep x, the others get `other`. */
INLINE vf vkeep(vf x, int64_t first, int64_t last, float other)
{
    first = first < 0 ? 0 : first > 16 ? 16 : first;
    last = last < first ? first : last > 16 ? 16 : last;
    __mmask16 mask = (__mmask16)(((1u << last) - 1) & ~((1u << first) - 1));
    return _mm512_mask_blend_ps(mask, _mm512_set1_ps(other), x);
}

#elif defined(PD_AVX2)

#include <immintrin.h>
typedef __m256 vf;
enum { VW = 8 };
INLINE vf vset1(float x) { return _mm256_set1_ps(x); }
INLINE vf vload(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vstore(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vround(vf x) { return _mm256_round_ps(x, 8); }
/* n is whole and at least -126. */
INLINE vf vscale2(vf x, vf n)
{
    __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return x * _mm256_castsi256_ps(exponent);
}
INLINE vf vload_bf16(const bf16 *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE void vstore_bf16(bf16 *p, vf x)
{
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
INLINE vf vload_int8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE vf vload_e4m3(const uint8_t *p)
{
    __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(0x7F)), 20);
    __m256 x = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(120 << 23)));
    __m256 small = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(121 << 23)));
    __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(1 << 23), magnitude);
    x = _mm256_blendv_ps(x, small - _mm256_set1_ps(0x1p-6f), _mm256_castsi256_ps(is_small));
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(0x80)), 24);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(x), sign));
}

#else

typedef float vf __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t vmask __attribute__((vector_size(16)));
enum { VW = 4 };
INLINE vf vselect(vmask mask, vf a, vf b) { return (vf)((mask & (vmask)a) | (~mask & (vmask)b)); }
INLINE vf vset1(float x) { return (vf){x, x, x, x}; }
INLINE vf vload(const float *p) { return *(const vf *)p; }
INLINE void vstore(float *p, vf x) { *(vf *)p = x; }
INLINE vf vfma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vmax(vf a, vf b) { return vselect(a > b, a, b); }
INLINE vf vround(vf x)
{
    vf magic = vset1(12582912.0f); /* 1.5 * 2^23: adding it leaves no fraction */
    return x + magic - magic;
}
INLINE vf vscale2(vf x, vf n)
{
    vf y;
    for (int i = 0; i < VW; i++) {
        uint32_t bits = (uint32_t)((int32_t)n[i] + 127) << 23;
        float power;
        memcpy(&power, &bits, 4);
        y[i] = x[i] * power;
    }
    return y;
}
INLINE vf vload_bf16(const bf16 *p)
{
    return (vf){bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
INLINE void vstore_bf16(bf16 *p, vf x)
{
    for (int i = 0; i < VW; i++)
        p[i] = float_to_bf16(x[i]);
}
INLINE vf vload_int8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
INLINE vf vload_e4m3(const uint8_t *p)
{
    return (vf){from_e4m3(p[0]), from_e4m3(p[1]), from_e4m3(p[2]), from_e4m3(p[3])};
}

#endif

#if !defined(PD_AVX512)
INLINE void vstore_bf16_pair(bf16 *p, vf x, vf y)
{
    vstore_bf16(p, x);
    vstore_bf16(p + VW, y);
}
INLINE float vhmax(vf x)
{
    float y = x[0];
    for (int i = 1; i < VW; i++)
        y = x[i] > y ? x[i] : y;
    return y;
}
INLINE int vany_above(vf x, float limit) { return vhmax(x) > limit; }
INLINE vf vkeep(vf x, int64_t first, int64_t last, float other)
{
    for (int i = 0; i < VW; i++)
        x[i] = i >= first && i < last ? x[i] : other;
    return x;
}
#endif

/* The sum of the lanes, halves upon halves. */
INLINE float vhsum(vf x)
{
    float lanes[VW];
    vstore(lanes, x);
    for (int width = VW / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

/* 2^x for finite x <= 127: a polynomial of degree 5 on [-1/2, 1/2], relative error below 2e-7. Exactly 1 at 0, and 0
 * where x is far below the smallest numbers. */
INLINE vf vexp2(vf x)
{
#if !defined(PD_AVX512)
    vf given = x;
    x = vmax(x, vset1(-126.0f));
#endif
    vf n = vround(x), f = x - n;
    vf p = vset1(1.32647087e-3f);
    p = vfma(p, f, vset1(9.67151113e-3f));
    p = vfma(p, f, vset1(5.55073373e-2f));
    p = vfma(p, f, vset1(2.40222424e-1f));
    p = vfma(p, f, vset1(6.93147004e-1f));
    p = vfma(p, f, vset1(1.0f));
    p = vscale2(p, n);
#if defined(PD_AVX512)
    return p;
#elif defined(PD_AVX2)
    return _mm256_and_ps(p, _mm256_cmp_ps(given, _mm256_set1_ps(-125.0f), _CMP_GE_OQ));
#else
    return vselect(given >= vset1(-125.0f), p, vset1(0.0f));
#endif
}

/* x / (1 + e^-x). */
INLINE vf vsilu(vf x)
{
    vf d = vset1(1.0f) + vexp2(-vmax(vset1(1.44269504f) * x, vset1(-126.0f)));
#if defined(PD_AVX512)
    /* A reciprocal of 14 bits, made one of 23: far sooner there than a quotient. */
    vf near = _mm512_rcp14_ps(d);
    return x * vfma(near, vfma(-d, near, vset1(1.0f)), near);
#else
    return x / d;
#endif
}

/* Rows of numbers to float32 and back; counts need not be multiples of the vector width. */
INLINE void to_floats(enum dtype dtype, const void *from, float *to, int64_t count)
{
    if (dtype == F32) {
        memcpy(to, from, (size_t)count * 4);
        return;
    }
    const bf16 *p = from;
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        vstore(to + i, vload_bf16(p + i));
    for (; i < count; i++)
        to[i] = bf16_to_float(p[i]);
}

INLINE void from_floats(enum dtype dtype, const float *from, void *to, int64_t count)
{
    if (dtype == F32) {
        memcpy(to, from, (size_t)count * 4);
        return;
    }
    bf16 *p = to;
    int64_t i = 0;
    for (; i + VW <= count; i += VW)
        vstore_bf16(p + i, vload(from + i));
    if (i < count) {
        float rest[VW] = {0};
        bf16 rounded[VW];
        memcpy(rest, from + i, (size_t)(count - i) * 4);
        vstore_bf16(rounded, vload(rest));
        memcpy(p + i, rounded, (size_t)(count - i) * 2);
    }
}

INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }
