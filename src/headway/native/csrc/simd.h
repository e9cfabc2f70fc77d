/* One small vector vocabulary for every instruction set the kernels are compiled for.
 *
 * vf is a vector of HW_VL float32 lanes. All arithmetic that must not be contracted or reordered by the compiler goes
 * through these functions: the sources are built with -ffp-contract=off, so a fused multiply-add happens exactly where
 * vf_fma is written. */
#ifndef HEADWAY_SIMD_H
#define HEADWAY_SIMD_H

/* The kernels are written in the order they should run; gcc's first scheduling pass (on by default on ARM) moves loads
 * up until registers run out. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-schedule-insns")
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#define HW_INLINE static inline __attribute__((always_inline, unused))
/* For each instance of a register-blocked kernel: compilers allocate registers per function. */
#define HW_KERNEL static __attribute__((noinline, unused))

#if defined(__clang__)
#define HW_UNROLL _Pragma("clang loop unroll(full)")
#define HW_UNROLL4 _Pragma("clang loop unroll_count(4)")
#else
#define HW_UNROLL _Pragma("GCC unroll 64")
#define HW_UNROLL4 _Pragma("GCC unroll 4")
#endif

/* ---- float16 in software: exact, round to nearest even ---- */
HW_INLINE float hw_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu, bits;
    float f;
    if (exponent == 0) {
        f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    bits = sign | (mantissa << 13) | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23);
    memcpy(&f, &bits, 4);
    return f;
}

HW_INLINE uint16_t hw_float_to_half(float f) {
    uint32_t bits, sign, rounded;
    memcpy(&bits, &f, 4);
    sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { /* subnormal half: let the float adder round at 2^-24 */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&rounded, &magnitude, 4);
        return (uint16_t)(sign | (rounded - 0x3f000000u));
    }
    rounded = bits + 0xfffu + ((bits >> 13) & 1u);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

HW_INLINE float hw_float_of_bits(int32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

/* vf_max loses a NaN on some machines. vf_max_magnitude, of numbers that are not negative, goes by their bits, which
 * are in the same order and have NaN above infinity above all others. vf_zero_below keeps a NaN. */
#if !defined(HW_GENERIC) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#define HW_AVX512 1
#elif !defined(HW_GENERIC) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HW_AVX2 1
#elif !defined(HW_GENERIC) && defined(__aarch64__) && defined(__ARM_NEON)
#define HW_NEON 1
#else
#define HW_PORTABLE 1
#endif

#if defined(HW_AVX512)
#include <immintrin.h>
#define HW_VL 16
typedef __m512 vf;
HW_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
HW_INLINE void vf_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
HW_INLINE vf vf_set1(float a) { return _mm512_set1_ps(a); }
HW_INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
HW_INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
HW_INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
HW_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
HW_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
HW_INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
HW_INLINE vf vf_abs(vf a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
HW_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
HW_INLINE vf vf_fma_n(vf c, vf a, float b) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
HW_INLINE vf vf_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
HW_INLINE void vf_store_half(uint16_t *p, vf a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HW_INLINE vf vf_shift23(vf a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
HW_INLINE vf vf_zero_below(vf value, vf x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), value);
}
HW_INLINE vf vf_max_magnitude(vf a, vf b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
HW_INLINE float vf_reduce_add(vf a) { return _mm512_reduce_add_ps(a); }
HW_INLINE float vf_reduce_max(vf a) { return _mm512_reduce_max_ps(a); }
HW_INLINE float vf_reduce_max_magnitude(vf a) {
    return hw_float_of_bits(_mm512_reduce_max_epi32(_mm512_castps_si512(a)));
}

#elif defined(HW_AVX2)
#include <immintrin.h>
#define HW_VL 8
typedef __m256 vf;
HW_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
HW_INLINE void vf_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
HW_INLINE vf vf_set1(float a) { return _mm256_set1_ps(a); }
HW_INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
HW_INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
HW_INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
HW_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
HW_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
HW_INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
HW_INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
HW_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
HW_INLINE vf vf_fma_n(vf c, vf a, float b) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }
HW_INLINE vf vf_load_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
HW_INLINE void vf_store_half(uint16_t *p, vf a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
HW_INLINE vf vf_shift23(vf a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
HW_INLINE vf vf_zero_below(vf value, vf x, float limit) {
    return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ), value);
}
HW_INLINE vf vf_max_magnitude(vf a, vf b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
HW_INLINE float vf_reduce_add(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
HW_INLINE float vf_reduce_max(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
HW_INLINE float vf_reduce_max_magnitude(vf a) {
    __m256i bits = _mm256_castps_si256(a);
    __m128i s = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return hw_float_of_bits(_mm_cvtsi128_si32(_mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1))));
}

#elif defined(HW_NEON)
#include <arm_neon.h>
#define HW_VL 4
typedef float32x4_t vf;
HW_INLINE vf vf_load(const float *p) { return vld1q_f32(p); }
HW_INLINE void vf_store(float *p, vf a) { vst1q_f32(p, a); }
HW_INLINE vf vf_set1(float a) { return vdupq_n_f32(a); }
HW_INLINE vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
HW_INLINE vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
HW_INLINE vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
HW_INLINE vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
HW_INLINE vf vf_max(vf a, vf b) { return vmaxq_f32(a, b); }
HW_INLINE vf vf_min(vf a, vf b) { return vminq_f32(a, b); }
HW_INLINE vf vf_abs(vf a) { return vabsq_f32(a); }
HW_INLINE vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
HW_INLINE vf vf_fma_n(vf c, vf a, float b) { return vfmaq_n_f32(c, a, b); }
HW_INLINE vf vf_load_half(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
HW_INLINE void vf_store_half(uint16_t *p, vf a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
/* A finite half times 2^-112, exactly: the bits moved into place. A third of the cost of the conversion instruction. */
#define HW_HALF_UNSCALE 0x1p112f
HW_INLINE vf vf_load_half_scaled(const uint16_t *p) {
    int32x4_t wide = vshll_n_s16(vreinterpret_s16_u16(vld1_u16(p)), 13);
    return vreinterpretq_f32_s32(vandq_s32(wide, vdupq_n_s32((int32_t)0x8fffe000u)));
}
HW_INLINE vf vf_shift23(vf a) { return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(a), 23)); }
HW_INLINE vf vf_zero_below(vf value, vf x, float limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, vdupq_n_f32(limit))));
}
HW_INLINE vf vf_max_magnitude(vf a, vf b) { return vmaxq_f32(a, b); } /* keeps NaN by itself */
HW_INLINE float vf_reduce_add(vf a) { return vaddvq_f32(a); }
HW_INLINE float vf_reduce_max(vf a) { return vmaxvq_f32(a); }
HW_INLINE float vf_reduce_max_magnitude(vf a) { return vmaxvq_f32(a); }

#else
#define HW_VL 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
HW_INLINE vf vf_load(const float *p) { vf a; memcpy(&a, p, 16); return a; }
HW_INLINE void vf_store(float *p, vf a) { memcpy(p, &a, 16); }
HW_INLINE vf vf_set1(float a) { return (vf){a, a, a, a}; }
HW_INLINE vf vf_add(vf a, vf b) { return a + b; }
HW_INLINE vf vf_sub(vf a, vf b) { return a - b; }
HW_INLINE vf vf_mul(vf a, vf b) { return a * b; }
HW_INLINE vf vf_div(vf a, vf b) { return a / b; }
HW_INLINE vf hw_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
HW_INLINE vf vf_max(vf a, vf b) { return hw_select((vi)(a > b), a, b); }
HW_INLINE vf vf_min(vf a, vf b) { return hw_select((vi)(a < b), a, b); }
HW_INLINE vf vf_abs(vf a) { return (vf)((vi)a & (vi){0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff}); }
HW_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
HW_INLINE vf vf_fma_n(vf c, vf a, float b) { return a * vf_set1(b) + c; }
HW_INLINE vf vf_load_half(const uint16_t *p) {
    return (vf){hw_half_to_float(p[0]), hw_half_to_float(p[1]), hw_half_to_float(p[2]), hw_half_to_float(p[3])};
}
HW_INLINE void vf_store_half(uint16_t *p, vf a) {
    for (int i = 0; i < 4; i++) p[i] = hw_float_to_half(a[i]);
}
HW_INLINE vf vf_shift23(vf a) { return (vf)((vi)a << 23); }
HW_INLINE vf vf_zero_below(vf value, vf x, float limit) { return (vf)((vi)value & ~(vi)(x < vf_set1(limit))); }
HW_INLINE vf vf_max_magnitude(vf a, vf b) { return hw_select((vi)a > (vi)b, a, b); }
HW_INLINE float vf_reduce_add(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }
HW_INLINE float vf_reduce_max(vf a) {
    float m = a[0];
    for (int i = 1; i < 4; i++) m = a[i] > m ? a[i] : m;
    return m;
}
HW_INLINE float vf_reduce_max_magnitude(vf a) {
    vi bits = (vi)a;
    int32_t m = bits[0];
    for (int i = 1; i < 4; i++) m = bits[i] > m ? bits[i] : m;
    return hw_float_of_bits(m);
}
#endif

/* 1.5 * 2^23: added to a float below 2^22, it leaves that float, rounded, as an integer in the low bits. */
#define HW_ROUNDER 12582912.0f

/* exp(x) in place for `count` vectors side by side, x <= 88: about 1 ulp; exp(0) is exactly 1; below -87.3 the result
 * is exactly 0, and NaN stays NaN. */
HW_INLINE void vf_exp_many(vf *x, const int count) {
    const float rounder = HW_ROUNDER + 127.0f; /* the low bits become the exponent field of 2^n */
    vf biased[4], r[4], p[4];
#define EACH HW_UNROLL for (int i = 0; i < count; i++)
    EACH biased[i] = vf_fma(x[i], vf_set1(1.44269504088896341f), vf_set1(rounder));
    EACH p[i] = vf_sub(biased[i], vf_set1(rounder));
    EACH r[i] = vf_fma(p[i], vf_set1(-0.693359375f), x[i]);
    EACH r[i] = vf_fma(p[i], vf_set1(2.12194440e-4f), r[i]);
    EACH p[i] = vf_fma(vf_set1(1.3981999507e-3f), r[i], vf_set1(8.3334519073e-3f));
    EACH p[i] = vf_fma(p[i], r[i], vf_set1(4.1665795894e-2f));
    EACH p[i] = vf_fma(p[i], r[i], vf_set1(1.6666665459e-1f));
    EACH p[i] = vf_fma(p[i], r[i], vf_set1(5.0000001201e-1f));
    EACH p[i] = vf_mul(p[i], r[i]);
    EACH p[i] = vf_fma(p[i], r[i], vf_add(r[i], vf_set1(1.0f)));
    EACH p[i] = vf_mul(p[i], vf_shift23(biased[i]));
    EACH x[i] = vf_zero_below(p[i], x[i], -87.3f);
#undef EACH
}

HW_INLINE vf vf_exp(vf x) {
    vf_exp_many(&x, 1);
    return x;
}

#if !defined(HW_HALF_UNSCALE)
#define HW_HALF_UNSCALE 1.0f
HW_INLINE vf vf_load_half_scaled(const uint16_t *p) { return vf_load_half(p); }
#endif

/* vf_exp for one value, so that a scalar tail rounds exactly as the vector body does. */
HW_INLINE float hw_exp(float x) {
    float lanes[HW_VL];
    vf_store(lanes, vf_exp(vf_set1(x)));
    return lanes[0];
}

/* 16 floats times a factor, rounded to nearest even, to int8; results are known to lie in [-127, 127]. */
HW_INLINE void hw_quant16(const float *x, float factor, int8_t *out) {
#if defined(HW_AVX512)
    __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(factor)));
    _mm_storeu_si128((__m128i *)out, _mm512_cvtsepi32_epi8(rounded));
#elif defined(HW_AVX2)
    __m256 f = _mm256_set1_ps(factor);
    __m256i lo = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), f));
    __m256i hi = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), f));
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xd8);
    __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i *)out, _mm_packs_epi16(low, high));
#elif defined(HW_NEON)
    float32x4_t rounder = vdupq_n_f32(HW_ROUNDER);
    int16x8_t a = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x), factor), rounder));
    int16x8_t b = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + 4), factor), rounder));
    int16x8_t c = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + 8), factor), rounder));
    int16x8_t d = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(vld1q_f32(x + 12), factor), rounder));
    vst1q_s8(out, vuzp1q_s8(vreinterpretq_s8_s16(vuzp1q_s16(a, b)), vreinterpretq_s8_s16(vuzp1q_s16(c, d))));
#else
    for (int i = 0; i < 16; i += 4) {
        vi q = (vi)vf_add(vf_mul(vf_load(x + i), vf_set1(factor)), vf_set1(HW_ROUNDER));
        for (int j = 0; j < 4; j++) out[i + j] = (int8_t)q[j];
    }
#endif
}

#endif
