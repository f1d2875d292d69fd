/* Digest, copy and conversion of KV blocks. One thread; results are the same on every instruction family. */
#include <string.h>

#include "landing.h"
#include "numbers.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- XXH3-128 -------------------------------------------------------------------------------------------------- */

enum { LANES = 8, STRIPE = 64, STRIPES = 16, CHUNK_BYTES = STRIPE * STRIPES, SECRET = 192 };

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

/* The default secret of the specification. */
static const uint8_t secret[SECRET] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e,
};

static uint64_t read64(const uint8_t *p)
{
    uint64_t value;
    memcpy(&value, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

/* Stripes of `from`, copied on to `to` unless that is NULL; `full`: a whole chunk, whose end scrambles the lanes. */
typedef void (*stripes_fn)(uint64_t acc[LANES], const uint8_t *from, uint8_t *to, int64_t stripes, int full);

static void stripes_portable(uint64_t acc[LANES], const uint8_t *from, uint8_t *to, int64_t stripes, int full)
{
    for (int64_t n = 0; n < stripes; n++) {
        uint8_t bytes[STRIPE];
        memcpy(bytes, from + n * STRIPE, STRIPE);
        if (to)
            memcpy(to + n * STRIPE, bytes, STRIPE);
        for (int i = 0; i < LANES; i++) {
            uint64_t value = read64(bytes + 8 * i), keyed = value ^ read64(secret + 8 * (n + i));
            acc[i ^ 1] += value;
            acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
    }
    for (int i = 0; full && i < LANES; i++)
        acc[i] = (acc[i] ^ acc[i] >> 47 ^ read64(secret + SECRET - STRIPE + 8 * i)) * PRIME32_1;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void stripes_avx512(uint64_t acc[LANES], const uint8_t *from, uint8_t *to,
                                                              int64_t stripes, int full)
{
    __m512i sum = _mm512_loadu_si512(acc);
    for (int64_t n = 0; n < stripes; n++) {
        const __m512i value = _mm512_loadu_si512(from + n * STRIPE);
        if (to)
            _mm512_storeu_si512(to + n * STRIPE, value);
        const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * n));
        const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        const __m512i swapped = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
        sum = _mm512_add_epi64(product, _mm512_add_epi64(sum, swapped));
    }
    if (full) {
        const __m512i prime = _mm512_set1_epi32((int)PRIME32_1);
        const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)),
                                               _mm512_loadu_si512(secret + SECRET - STRIPE));
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(acc, sum);
}

__attribute__((target("avx2"))) static void stripes_avx2(uint64_t acc[LANES], const uint8_t *from, uint8_t *to,
                                                         int64_t stripes, int full)
{
    for (int half = 0; half < STRIPE; half += 32) {
        __m256i *lanes = (__m256i *)((uint8_t *)acc + half);
        __m256i sum = _mm256_loadu_si256(lanes);
        for (int64_t n = 0; n < stripes; n++) {
            const __m256i value = _mm256_loadu_si256((const __m256i *)(from + n * STRIPE + half));
            if (to)
                _mm256_storeu_si256((__m256i *)(to + n * STRIPE + half), value);
            const __m256i key = _mm256_loadu_si256((const __m256i *)(secret + 8 * n + half));
            const __m256i keyed = _mm256_xor_si256(value, key);
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sum = _mm256_add_epi64(product, _mm256_add_epi64(sum, swapped));
        }
        if (full) {
            const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
            const __m256i key = _mm256_loadu_si256((const __m256i *)(secret + SECRET - STRIPE + half));
            const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), key);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
            sum = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
        }
        _mm256_storeu_si256(lanes, sum);
    }
}
#endif

static stripes_fn best_stripes(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return stripes_avx512;
    if (__builtin_cpu_supports("avx2"))
        return stripes_avx2;
#endif
    return stripes_portable;
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merge(const uint64_t acc[LANES], const uint8_t *key, uint64_t sum)
{
    for (int i = 0; i < LANES; i += 2)
        sum += fold(acc[i] ^ read64(key + 8 * i), acc[i + 1] ^ read64(key + 8 * i + 8));
    sum = (sum ^ sum >> 37) * 0x165667919E3779F9ull;
    return sum ^ sum >> 32;
}

static void put64(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        out[i] = (uint8_t)(value >> (56 - 8 * i));
}

static void run(const uint8_t *from, uint8_t *to, int64_t bytes, uint8_t out[DIGEST_BYTES])
{
    const stripes_fn stripes = best_stripes();
    uint64_t acc[LANES] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const int64_t chunks = (bytes - 1) / CHUNK_BYTES, rest = chunks * CHUNK_BYTES;
    for (int64_t at = 0; at < rest; at += CHUNK_BYTES)
        stripes(acc, from + at, to ? to + at : NULL, STRIPES, 1);
    /* What follows overlaps: it is copied first, and the copy is what is digested. */
    if (to)
        memcpy(to + rest, from + rest, (size_t)(bytes - rest));
    const uint8_t *data = to ? to : from;
    stripes(acc, data + rest, NULL, (bytes - 1 - rest) / STRIPE, 0);
    uint8_t last[STRIPE];
    memcpy(last, data + bytes - STRIPE, STRIPE);
    for (int i = 0; i < LANES; i++) {
        const uint64_t value = read64(last + 8 * i), keyed = value ^ read64(secret + SECRET - STRIPE - 7 + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
    }
    put64(out, merge(acc, secret + SECRET - STRIPE - 11, ~((uint64_t)bytes * PRIME64_2)));
    put64(out + 8, merge(acc, secret + 11, (uint64_t)bytes * PRIME64_1));
}

void digest(const void *from, int64_t bytes, uint8_t out[DIGEST_BYTES]) { run(from, NULL, bytes, out); }

void copy_digest(const void *from, void *to, int64_t bytes, uint8_t out[DIGEST_BYTES]) { run(from, to, bytes, out); }

/* ---- conversion ------------------------------------------------------------------------------------------------ */

#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_FAMILY __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_FAMILY
#endif

static const int64_t number_bytes[] = {2, 4, 1, 1};

/* Below this a row is taken for zeros: its scale would not have an inverse. */
static const float SMALLEST = 1e-30f;

INLINE uint16_t to_bf16(float value)
{
    const uint32_t bits = bits_of(value);
    const uint16_t rounded = (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
    const uint16_t nan = (uint16_t)(bits >> 16 | 0x40u);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded;
}

INLINE float largest(const float *row, int64_t dim)
{
    uint32_t most = 0;
    for (int64_t i = 0; i < dim; i++) {
        const uint32_t magnitude = bits_of(row[i]) & 0x7FFFFFFFu;
        most = magnitude > most ? magnitude : most;
    }
    return float_of(most);
}

INLINE void load_row(float *row, const void *from, enum number number, float scale, int64_t dim)
{
    switch (number) {
    case NUMBER_BF16:
        for (int64_t i = 0; i < dim; i++)
            row[i] = float_of((uint32_t)((const uint16_t *)from)[i] << 16);
        break;
    case NUMBER_F32:
        memcpy(row, from, (size_t)dim * 4);
        break;
    case NUMBER_INT8:
        for (int64_t i = 0; i < dim; i++)
            row[i] = (float)((const int8_t *)from)[i] * scale;
        break;
    case NUMBER_FP8:
        for (int64_t i = 0; i < dim; i++)
            row[i] = from_e4m3(((const uint8_t *)from)[i]) * scale;
        break;
    }
}

/* Returns the scale. */
INLINE float store_row(void *to, const float *row, enum number number, int64_t dim)
{
    const float most = number >= NUMBER_INT8 ? largest(row, dim) : 0.0f;
    const float scale = most < SMALLEST ? 0.0f : most / (number == NUMBER_INT8 ? 127.0f : 448.0f);
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    switch (number) {
    case NUMBER_BF16:
        for (int64_t i = 0; i < dim; i++)
            ((uint16_t *)to)[i] = to_bf16(row[i]);
        break;
    case NUMBER_F32:
        memcpy(to, row, (size_t)dim * 4);
        break;
    case NUMBER_INT8:
        /* The addition rounds to the nearest even and leaves the integer in the low bits. */
        for (int64_t i = 0; i < dim; i++)
            ((uint8_t *)to)[i] = (uint8_t)bits_of(row[i] * inverse + 12582912.0f);
        break;
    case NUMBER_FP8:
        for (int64_t i = 0; i < dim; i++) {
            const float value = row[i] * inverse;
            ((uint8_t *)to)[i] = to_e4m3(value > 448.0f ? 448.0f : value < -448.0f ? -448.0f : value);
        }
        break;
    }
    return scale;
}

FOR_EACH_FAMILY static float quantize(void *to, enum number number, const void *from, enum number from_number, int64_t dim)
{
    float row[MAX_DIM];
    load_row(row, from, from_number, 1.0f, dim);
    return store_row(to, row, number, dim);
}

float quantize_row(void *to, enum number number, const void *from, enum number from_number, int64_t dim)
{
    return quantize(to, number, from, from_number, dim);
}

FOR_EACH_FAMILY static void convert_run(const rows_t *rows, int64_t from, int64_t to)
{
    const enum number from_number = (enum number)rows->from_number, to_number = (enum number)rows->to_number;
    const float *from_scales = (const float *)rows->from_scales;
    float *to_scales = (float *)rows->to_scales;
    float row[MAX_DIM];
    for (int64_t i = 0; i < rows->extent[AXES - 1]; i++) {
        const uint8_t *source = (const uint8_t *)rows->from + from * rows->dim * number_bytes[from_number];
        uint8_t *target = (uint8_t *)rows->to + to * rows->dim * number_bytes[to_number];
        load_row(row, source, from_number, from_scales ? from_scales[from] : 1.0f, rows->dim);
        const float scale = store_row(target, row, to_number, rows->dim);
        if (to_scales)
            to_scales[to] = scale;
        from += rows->from_stride[AXES - 1];
        to += rows->to_stride[AXES - 1];
    }
}

/* Codes travel with their scales as they are: to quantize them again could change both. */
static void copy_run(const rows_t *rows, int64_t from, int64_t to)
{
    const int64_t bytes = rows->dim * number_bytes[rows->from_number];
    const uint8_t *source = (const uint8_t *)rows->from + from * bytes;
    uint8_t *target = (uint8_t *)rows->to + to * bytes;
    const int64_t count = rows->extent[AXES - 1];
    const int64_t from_step = rows->from_stride[AXES - 1] * bytes, to_step = rows->to_stride[AXES - 1] * bytes;
    for (int64_t i = 0; rows->from_scales && i < count; i++)
        ((float *)rows->to_scales)[to + i * rows->to_stride[AXES - 1]] =
            ((const float *)rows->from_scales)[from + i * rows->from_stride[AXES - 1]];
    if (from_step == bytes && to_step == bytes) {
        memcpy(target, source, (size_t)(count * bytes));
        return;
    }
    for (int64_t i = 0; i < count; i++)
        memcpy(target + i * to_step, source + i * from_step, (size_t)bytes);
}

void convert_rows(const rows_t *rows)
{
    const int same = rows->from_number == rows->to_number;
    const int64_t *n = rows->extent, *f = rows->from_stride, *t = rows->to_stride;
    for (int64_t i = 0; i < n[0]; i++)
        for (int64_t j = 0; j < n[1]; j++)
            for (int64_t k = 0; k < n[2]; k++) {
                const int64_t from = i * f[0] + j * f[1] + k * f[2], to = i * t[0] + j * t[1] + k * t[2];
                if (same)
                    copy_run(rows, from, to);
                else
                    convert_run(rows, from, to);
            }
}
