/* The numbers of a KV cache: how codes become floats in registers, and floats become codes and a scale.
 *
 * The arithmetic is that of headway/kv/codes.py, to the bit. What is read here are codes: the scale of a
 * token is applied to its score or to its weight, never to its numbers. */
#ifndef HEADWAY_KV_NUMBERS_H
#define HEADWAY_KV_NUMBERS_H

#include "headway.h"
#include "simd.h"

#define HW_MAX_HEAD_DIM 1024
#define FP8_LARGEST 448.0f
#define INT8_LARGEST 127.0f
#define INT4_LARGEST 7.0f
#define INT4_ZERO 8 /* what is added to a 4-bit code, so that it is not negative */

/* Bytes of so many numbers; 4-bit ones come in pairs. */
HW_INLINE int64_t kv_bytes(int64_t count, const int numbers) {
    switch (numbers) {
    case HW_KV_F32: return count * 4;
    case HW_KV_F16: return count * 2;
    case HW_KV_INT4: return count / 2;
    default: return count;
    }
}

/* float8 e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities; the code for NaN is never written.
 * Moved into place, its bits are the number times 2^-120 as a float32, or times 2^-8 as a float16. */
HW_INLINE float hw_fp8_to_float(uint8_t code) {
    uint32_t bits = (uint32_t)(code & 0x80u) << 24 | (uint32_t)(code & 0x7fu) << 20;
    float f;
    memcpy(&f, &bits, 4);
    return f * 0x1p120f;
}

/* Round to nearest even; |f| <= 448. */
HW_INLINE uint8_t hw_float_to_fp8(float f) {
    uint32_t bits, sign;
    memcpy(&bits, &f, 4);
    sign = (bits >> 24) & 0x80u;
    bits &= 0x7fffffffu;
    if (bits < 0x3c800000u) { /* below 2^-6: let the float adder round at 2^-9 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 16384.0f;
        memcpy(&bits, &magnitude, 4);
        return (uint8_t)(sign | (bits - 0x46800000u));
    }
    bits += 0x7ffffu + ((bits >> 20) & 1u);
    return (uint8_t)(sign | ((bits - (120u << 23)) >> 20));
}

HW_INLINE int hw_int4_at(const uint8_t *p, int64_t index) { return (p[index / 2] >> (index % 2 * 4) & 15) - INT4_ZERO; }

#if defined(HW_AVX512)
HW_INLINE vf vf_load_int8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
HW_INLINE vf vf_load_fp8(const uint8_t *p) { /* by way of float16 */
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    __m512 f = _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((short)0xbf80)));
    return _mm512_mul_ps(f, _mm512_set1_ps(256.0f));
}
HW_INLINE vf vf_load_int4(const uint8_t *p) {
    const __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i shift = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    __m512i both = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p));
    __m512i code = _mm512_srlv_epi32(_mm512_permutexvar_epi32(which, both), shift);
    code = _mm512_sub_epi32(_mm512_and_si512(code, _mm512_set1_epi32(15)), _mm512_set1_epi32(INT4_ZERO));
    return _mm512_cvtepi32_ps(code);
}
#elif defined(HW_AVX2)
HW_INLINE vf vf_load_int8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
HW_INLINE vf vf_load_fp8(const uint8_t *p) { /* by way of float16 */
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    __m256 f = _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((short)0xbf80)));
    return _mm256_mul_ps(f, _mm256_set1_ps(256.0f));
}
HW_INLINE vf vf_load_int4(const uint8_t *p) {
    int32_t raw;
    memcpy(&raw, p, 4);
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(raw), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    code = _mm256_sub_epi32(_mm256_and_si256(code, _mm256_set1_epi32(15)), _mm256_set1_epi32(INT4_ZERO));
    return _mm256_cvtepi32_ps(code);
}
#elif defined(HW_NEON)
HW_INLINE int16x4_t hw_load4_wide(const void *p, const int shift) {
    int32_t raw;
    memcpy(&raw, p, 4);
    int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(raw));
    return vget_low_s16(shift ? vshll_n_s8(bytes, 7) : vmovl_s8(bytes));
}
HW_INLINE vf vf_load_int8(const int8_t *p) { return vcvtq_f32_s32(vmovl_s16(hw_load4_wide(p, 0))); }
HW_INLINE vf vf_load_fp8(const uint8_t *p) {
    int32x4_t bits = vandq_s32(vshll_n_s16(hw_load4_wide(p, 1), 13), vdupq_n_s32((int32_t)0x87f00000u));
    return vmulq_f32(vreinterpretq_f32_s32(bits), vdupq_n_f32(0x1p120f));
}
HW_INLINE vf vf_load_int4(const uint8_t *p) {
    static const int32_t shifts[4] = {0, -4, -8, -12};
    uint16_t raw;
    memcpy(&raw, p, 2);
    uint32x4_t code = vandq_u32(vshlq_u32(vdupq_n_u32(raw), vld1q_s32(shifts)), vdupq_n_u32(15));
    return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(code), vdupq_n_s32(INT4_ZERO)));
}
#else
HW_INLINE vf vf_load_int8(const int8_t *p) { return (vf){p[0], p[1], p[2], p[3]}; }
HW_INLINE vf vf_load_fp8(const uint8_t *p) {
    return (vf){hw_fp8_to_float(p[0]), hw_fp8_to_float(p[1]), hw_fp8_to_float(p[2]), hw_fp8_to_float(p[3])};
}
HW_INLINE vf vf_load_int4(const uint8_t *p) {
    return (vf){(float)hw_int4_at(p, 0), (float)hw_int4_at(p, 1), (float)hw_int4_at(p, 2), (float)hw_int4_at(p, 3)};
}
#endif

/* HW_VL numbers from number `index` on (even for 4-bit ones); a float16 is divided by HW_HALF_UNSCALE. */
HW_INLINE vf kv_load_scaled(const void *base, int64_t index, const int numbers) {
    const void *p = (const char *)base + kv_bytes(index, numbers);
    switch (numbers) {
    case HW_KV_F32: return vf_load(p);
    case HW_KV_F16: return vf_load_half_scaled(p);
    case HW_KV_INT8: return vf_load_int8(p);
    case HW_KV_FP8: return vf_load_fp8(p);
    default: return vf_load_int4(p);
    }
}

#if defined(HW_NEON)
/* 16 codes at once: a table look-up puts each into the top byte of its lane. */
HW_INLINE void vf_load16_codes(vf *out, const void *p, const int numbers) {
    static const uint8_t tops[4][16] = {
        {255, 255, 255, 0, 255, 255, 255, 1, 255, 255, 255, 2, 255, 255, 255, 3},
        {255, 255, 255, 4, 255, 255, 255, 5, 255, 255, 255, 6, 255, 255, 255, 7},
        {255, 255, 255, 8, 255, 255, 255, 9, 255, 255, 255, 10, 255, 255, 255, 11},
        {255, 255, 255, 12, 255, 255, 255, 13, 255, 255, 255, 14, 255, 255, 255, 15},
    };
    int8x16_t codes;
    if (numbers == HW_KV_INT4) {
        uint8x8_t pairs = vld1_u8(p), low = vand_u8(pairs, vdup_n_u8(15)), high = vshr_n_u8(pairs, 4);
        uint8x16_t natural = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
        codes = vsubq_s8(vreinterpretq_s8_u8(natural), vdupq_n_s8(INT4_ZERO));
    } else {
        codes = vld1q_s8(p);
    }
    HW_UNROLL
    for (int v = 0; v < 4; v++) {
        int32x4_t top = vreinterpretq_s32_s8(vqtbl1q_s8(codes, vld1q_u8(tops[v])));
        if (numbers == HW_KV_FP8) {
            top = vandq_s32(vshrq_n_s32(top, 4), vdupq_n_s32((int32_t)0x87f00000u));
            out[v] = vmulq_f32(vreinterpretq_f32_s32(top), vdupq_n_f32(0x1p120f));
        } else {
            out[v] = vcvtq_n_f32_s32(top, 24);
        }
    }
}
#endif

/* `vectors` vectors side by side. */
HW_INLINE void kv_load_many(vf *out, const void *base, int64_t index, const int vectors, const int numbers) {
#if defined(HW_NEON)
    if (vectors == 4 && numbers >= HW_KV_INT8) {
        vf_load16_codes(out, (const char *)base + kv_bytes(index, numbers), numbers);
        return;
    }
#endif
    HW_UNROLL
    for (int v = 0; v < vectors; v++) out[v] = kv_load_scaled(base, index + v * HW_VL, numbers);
}

HW_INLINE vf kv_load(const void *base, int64_t index, int numbers) {
    return numbers == HW_KV_F16 ? vf_load_half((const uint16_t *)base + index) : kv_load_scaled(base, index, numbers);
}

HW_INLINE float kv_to_float(const void *base, int64_t index, int numbers) {
    switch (numbers) {
    case HW_KV_F32: return ((const float *)base)[index];
    case HW_KV_F16: return hw_half_to_float(((const uint16_t *)base)[index]);
    case HW_KV_INT8: return ((const int8_t *)base)[index];
    case HW_KV_FP8: return hw_fp8_to_float(((const uint8_t *)base)[index]);
    default: return (float)hw_int4_at(base, index);
    }
}

HW_INLINE float kv_to_float_scaled(const void *base, int64_t index, int numbers) {
    float value = kv_to_float(base, index, numbers);
    return numbers == HW_KV_F16 ? value / HW_HALF_UNSCALE : value;
}

HW_INLINE float kv_largest(int numbers) {
    return numbers == HW_KV_INT8 ? INT8_LARGEST : numbers == HW_KV_FP8 ? FP8_LARGEST : INT4_LARGEST;
}

/* The scale of `dim` numbers; leaves x / scale, within the format's limits, in levels. A NaN makes it NaN. */
HW_INLINE uint16_t kv_scale(const float *x, int64_t dim, int numbers, float *levels) {
    float largest = kv_largest(numbers), top = 0.0f;
    int bad = 0;
    for (int64_t d = 0; d < dim; d++) {
        float magnitude = fabsf(x[d]);
        top = magnitude > top ? magnitude : top;
        bad |= magnitude != magnitude;
    }
    if (bad) top = NAN;
    uint16_t scale = hw_float_to_half(top * (1.0f / largest));
    float stored = hw_half_to_float(scale), inverse = stored == 0.0f ? 0.0f : 1.0f / stored;
    for (int64_t d = 0; d < dim; d++) {
        float level = x[d] * inverse;
        level = level > largest ? largest : level;
        levels[d] = level > -largest ? level : -largest; /* a NaN becomes a number that its scale hides */
    }
    return scale;
}

/* Writes codes of `dim` numbers [dim] (for 4-bit ones [dim / 2]) and returns their scale. */
HW_INLINE uint16_t kv_encode(const float *x, int64_t dim, int numbers, uint8_t *codes) {
    float levels[HW_MAX_HEAD_DIM];
    uint16_t scale = kv_scale(x, dim, numbers, levels);
    if (numbers == HW_KV_FP8) {
        for (int64_t d = 0; d < dim; d++) codes[d] = hw_float_to_fp8(levels[d]);
        return scale;
    }
    int8_t rounded[HW_MAX_HEAD_DIM];
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) hw_quant16(levels + d, 1.0f, rounded + d);
    for (; d < dim; d++) rounded[d] = (int8_t)(levels[d] + HW_ROUNDER - HW_ROUNDER);
    if (numbers == HW_KV_INT8)
        memcpy(codes, rounded, (size_t)dim);
    else
        for (d = 0; d < dim; d += 2)
            codes[d / 2] = (uint8_t)((rounded[d] + INT4_ZERO) | (rounded[d + 1] + INT4_ZERO) << 4);
    return scale;
}

#endif
