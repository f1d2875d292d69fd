/* Numbers of 8 bits, e4m3, to float32 and back, and the bits of a float32. */
#ifndef PDSERVE_NUMBERS_H
#define PDSERVE_NUMBERS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* To the nearest even, |value| <= 448. Exponents below the least normal one lose digits through an addition. */
INLINE uint8_t to_e4m3(float value)
{
    const uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    const uint32_t denormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
    const uint32_t normal = (magnitude - (120u << 23) + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20;
    return (uint8_t)(sign | (magnitude < 121u << 23 ? denormal : normal));
}

INLINE float from_e4m3(uint8_t code)
{
    const float magnitude = float_of((uint32_t)(code & 0x7F) << 20) * 0x1p120f;
    return float_of(bits_of(magnitude) | (uint32_t)(code & 0x80) << 24);
}

#endif
