/* The int8 inner kernels: `rows` quantised rows times one or two tiles of 16 channels, per instruction set.
 *
 * Products are summed exactly in int32 over a group of 64, then added to the float32 result with
 *     y = fma(float(sum), scale_w * scale_x, y)
 * in group order, so a row's result does not depend on how many rows are computed together. */
#ifndef HEADWAY_INT8_KERNELS_H
#define HEADWAY_INT8_KERNELS_H

#include "headway.h"
#include "simd.h"

#if defined(HW_AVX512) && defined(__AVX512VNNI__)
#define HW_VNNI512 1
#elif defined(HW_AVX2) && defined(__AVXVNNI__)
#define HW_VNNI256 1
#endif

/* vpdpbusd multiplies unsigned by signed bytes: weights are stored as w + 128 and the sum starts at -128 * sum(x). */
#if defined(HW_VNNI512) || defined(HW_VNNI256)
#define HW_WEIGHT_XOR 0x80808080u
#else
#define HW_WEIGHT_XOR 0u
#endif

/* One quantised activation matrix: values [m][groups * 64], scale and start [m][groups]. */
typedef struct {
    int8_t *values;
    float *scale;
    int32_t *start; /* -128 * sum of the group's values; only read by the unsigned kernels */
    int64_t groups;
} hw_quantised;

HW_INLINE float hw_group_max(const float *x) {
    vf top[4];
    HW_UNROLL
    for (int i = 0; i < 4; i++) top[i] = vf_abs(vf_load(x + i * HW_VL));
    HW_UNROLL
    for (int i = 4; i < HW_GROUP / HW_VL; i++)
        top[i % 4] = vf_max_magnitude(top[i % 4], vf_abs(vf_load(x + i * HW_VL)));
    return vf_reduce_max_magnitude(
        vf_max_magnitude(vf_max_magnitude(top[0], top[1]), vf_max_magnitude(top[2], top[3])));
}

HW_INLINE int32_t hw_group_sum(const int8_t *values) {
    int32_t total = 0;
    for (int i = 0; i < HW_GROUP; i++) total += values[i];
    return total;
}

/* Quantises a row of k values, padded with zeros to whole groups: values = round(x * 127 / max), scale = max / 127. A
 * group with NaN or infinity gets a scale that is one, so that they show in the result as they do without quantising.
 * `start` (may be NULL) receives -128 * sum of each group where the kernels need it. The maxima of many groups come
 * first, so that their long chains of operations overlap. */
HW_INLINE void hw_quantise_row(const float *x, int64_t k, int8_t *values, float *scale, int32_t *start) {
    enum { AT_ONCE = 32 };
    float padded[HW_GROUP] = {0}, factor[AT_ONCE];
    int64_t groups = (k + HW_GROUP - 1) / HW_GROUP, whole = k / HW_GROUP;
    if (whole < groups) memcpy(padded, x + whole * HW_GROUP, (size_t)(k - whole * HW_GROUP) * sizeof(float));
    for (int64_t base = 0; base < groups; base += AT_ONCE) {
        int64_t count = groups - base < AT_ONCE ? groups - base : AT_ONCE;
        for (int64_t g = 0; g < count; g++)
            factor[g] = hw_group_max(base + g < whole ? x + (base + g) * HW_GROUP : padded);
        for (int64_t g = 0; g < count; g++) {
            float largest = factor[g];
            int is_zero = largest <= 1e-30f; /* not of NaN: then the scale is NaN too, and all that it multiplies */
            scale[base + g] = is_zero ? 0.0f : largest / 127.0f;
            factor[g] = is_zero ? 0.0f : 127.0f / largest;
        }
        for (int64_t g = 0; g < count; g++) {
            const float *in = base + g < whole ? x + (base + g) * HW_GROUP : padded;
            int8_t *out = values + (base + g) * HW_GROUP;
            HW_UNROLL
            for (int i = 0; i < HW_GROUP; i += 16) hw_quant16(in + i, factor[g], out + i);
            if (HW_WEIGHT_XOR && start) start[base + g] = -128 * hw_group_sum(out);
        }
    }
}

typedef struct {
    const uint8_t *weights; /* first record of the (first) tile */
    int64_t tile_bytes;     /* distance to the next tile */
    const int8_t *x;
    const float *x_scale;
    const int32_t *x_start;
    int64_t groups;
    float *y;
    int64_t y_stride;
    const float *bias; /* of the first channel, or NULL */
    int64_t channels;  /* valid output channels from here on */
} hw_int8_args;

HW_INLINE void hw_store_tile(const hw_int8_args *a, int row, int64_t channel, const float *values, int64_t count) {
    int64_t valid = a->channels - channel < count ? a->channels - channel : count;
    float *y = a->y + row * a->y_stride + channel;
    for (int64_t i = 0; i < valid; i++) y[i] = a->bias ? values[i] + a->bias[channel + i] : values[i];
}

HW_INLINE void hw_store_vector(const hw_int8_args *a, int row, int64_t channel, vf value) {
    if (channel + HW_VL <= a->channels) {
        if (a->bias) value = vf_add(value, vf_load(a->bias + channel));
        vf_store(a->y + row * a->y_stride + channel, value);
    } else if (channel < a->channels) {
        float lanes[HW_VL];
        vf_store(lanes, value);
        hw_store_tile(a, row, channel, lanes, HW_VL);
    }
}

#if defined(HW_NEON)
#define HW_INT8_ROWS 4
#define HW_INT8_TILES 1

HW_INLINE int32x4_t hw_dot_lane(int32x4_t acc, int8x16_t w, int8x16_t x, const int lane) {
#if defined(__ARM_FEATURE_DOTPROD)
    switch (lane) {
    case 0: return vdotq_laneq_s32(acc, w, x, 0);
    case 1: return vdotq_laneq_s32(acc, w, x, 1);
    case 2: return vdotq_laneq_s32(acc, w, x, 2);
    default: return vdotq_laneq_s32(acc, w, x, 3);
    }
#else
    int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(vgetq_lane_s32(vreinterpretq_s32_s8(x), 0)));
    if (lane == 1) b = vreinterpretq_s8_s32(vdupq_n_s32(vgetq_lane_s32(vreinterpretq_s32_s8(x), 1)));
    if (lane == 2) b = vreinterpretq_s8_s32(vdupq_n_s32(vgetq_lane_s32(vreinterpretq_s32_s8(x), 2)));
    if (lane == 3) b = vreinterpretq_s8_s32(vdupq_n_s32(vgetq_lane_s32(vreinterpretq_s32_s8(x), 3)));
    int32x4_t lo = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(b)));
    int32x4_t hi = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(b)));
    return vaddq_s32(acc, vpaddq_s32(lo, hi));
#endif
}

/* `rows` x (4 * vectors) channels starting at `first` inside the tile. */
HW_INLINE void hw_int8_block(const hw_int8_args *a, const int rows, const int vectors, const int first) {
    float32x4_t y[4][4];
    int64_t x_stride = a->groups * HW_GROUP;
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) y[r][v] = vdupq_n_f32(0.0f);
    }
    for (int64_t g = 0; g < a->groups; g++) {
        const int8_t *w = (const int8_t *)a->weights + g * HW_GROUP_BYTES + first * 4;
        const int8_t *x = a->x + g * HW_GROUP;
        int32x4_t sum[4][4];
        HW_UNROLL
        for (int r = 0; r < rows; r++) {
            HW_UNROLL
            for (int v = 0; v < vectors; v++) sum[r][v] = vdupq_n_s32(0);
        }
        HW_UNROLL
        for (int part = 0; part < 4; part++) {
            int8x16_t xv[4];
            HW_UNROLL
            for (int r = 0; r < rows; r++) xv[r] = vld1q_s8(x + r * x_stride + part * 16);
            HW_UNROLL
            for (int lane = 0; lane < 4; lane++) {
                HW_UNROLL
                for (int v = 0; v < vectors; v++) {
                    int8x16_t wv = vld1q_s8(w + (part * 4 + lane) * 64 + v * 16);
                    HW_UNROLL
                    for (int r = 0; r < rows; r++) sum[r][v] = hw_dot_lane(sum[r][v], wv, xv[r], lane);
                }
            }
        }
        const float *scale = (const float *)(a->weights + g * HW_GROUP_BYTES + HW_GROUP * HW_TILE) + first;
        HW_UNROLL
        for (int v = 0; v < vectors; v++) {
            float32x4_t sw = vld1q_f32(scale + v * 4);
            HW_UNROLL
            for (int r = 0; r < rows; r++)
                y[r][v] = vfmaq_f32(y[r][v], vcvtq_f32_s32(sum[r][v]), vmulq_n_f32(sw, a->x_scale[r * a->groups + g]));
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) hw_store_vector(a, r, first + v * 4, y[r][v]);
    }
}

#if defined(__ARM_FEATURE_DOTPROD)
/* One group for 4 rows x 8 channels. In assembler because compilers add a register move to every fifth dot product.
 * The sums start at the bits of 1.5 * 2^23, so that, read as floats, they are 1.5 * 2^23 + sum exactly: this frees the
 * conversion, which only one of the two vector pipes could do. The start value is loaded, since loads are free here. */
HW_INLINE void hw_dot_group_4x8(const int8_t *w, const int8_t *x0, const int8_t *x1, const int8_t *x2, const int8_t *x3,
                                const int32_t *start, int32x4_t sum[4][2]) {
    int8x16_t wa, wb, wc, wd, v0, v1, v2, v3;
#define DOT(s, w, x, lane) "sdot %[" s "].4s, %[" w "].16b, %[" x "].4b[" lane "]\n\t"
#define DOTS(w0, w1, lane)                                                                                             \
    DOT("s00", w0, "v0", lane) DOT("s01", w1, "v0", lane) DOT("s10", w0, "v1", lane) DOT("s11", w1, "v1", lane)        \
    DOT("s20", w0, "v2", lane) DOT("s21", w1, "v2", lane) DOT("s30", w0, "v3", lane) DOT("s31", w1, "v3", lane)
#define LOAD_W(w0, w1, at) "ldp %q[" w0 "], %q[" w1 "], [%[w], #" at "]\n\t"
#define LOAD_X(at)                                                                                                     \
    "ldr %q[v0], [%[p0], #" at "]\n\tldr %q[v1], [%[p1], #" at "]\n\t"                                                 \
    "ldr %q[v2], [%[p2], #" at "]\n\tldr %q[v3], [%[p3], #" at "]\n\t"
#define QUARTER(x_at, w2, w3, w4, w5)                                                                                  \
    LOAD_X(x_at) DOTS("wa", "wb", "0") LOAD_W("wa", "wb", w2) DOTS("wc", "wd", "1") LOAD_W("wc", "wd", w3)             \
    DOTS("wa", "wb", "2") LOAD_W("wa", "wb", w4) DOTS("wc", "wd", "3") LOAD_W("wc", "wd", w5)
    __asm__("ldp %q[s00], %q[s01], [%[start]]\n\tldp %q[s10], %q[s11], [%[start]]\n\t"
            "ldp %q[s20], %q[s21], [%[start]]\n\tldp %q[s30], %q[s31], [%[start]]\n\t"
            LOAD_W("wa", "wb", "0") LOAD_W("wc", "wd", "64")
            QUARTER("0", "128", "192", "256", "320")
            QUARTER("16", "384", "448", "512", "576")
            QUARTER("32", "640", "704", "768", "832")
            LOAD_X("48") DOTS("wa", "wb", "0") LOAD_W("wa", "wb", "896") DOTS("wc", "wd", "1") LOAD_W("wc", "wd", "960")
            DOTS("wa", "wb", "2") DOTS("wc", "wd", "3")
            : [s00] "=&w"(sum[0][0]), [s01] "=&w"(sum[0][1]), [s10] "=&w"(sum[1][0]), [s11] "=&w"(sum[1][1]),
              [s20] "=&w"(sum[2][0]), [s21] "=&w"(sum[2][1]), [s30] "=&w"(sum[3][0]), [s31] "=&w"(sum[3][1]),
              [wa] "=&w"(wa), [wb] "=&w"(wb), [wc] "=&w"(wc), [wd] "=&w"(wd), [v0] "=&w"(v0), [v1] "=&w"(v1),
              [v2] "=&w"(v2), [v3] "=&w"(v3)
            : [w] "r"(w), [p0] "r"(x0), [p1] "r"(x1), [p2] "r"(x2), [p3] "r"(x3), [start] "r"(start)
            : "memory");
#undef DOT
#undef DOTS
#undef LOAD_W
#undef LOAD_X
#undef QUARTER
}

HW_INLINE void hw_int8_block_4x8(const hw_int8_args *a, const int first) {
    static const int32_t start[8] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000,
                                     0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
    float32x4_t y[4][2], offset = vdupq_n_f32(12582912.0f);
    int64_t stride = a->groups * HW_GROUP;
    HW_UNROLL
    for (int r = 0; r < 4; r++) y[r][0] = y[r][1] = vdupq_n_f32(0.0f);
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *record = a->weights + g * HW_GROUP_BYTES;
        const int8_t *x = a->x + g * HW_GROUP;
        int32x4_t sum[4][2];
        hw_dot_group_4x8((const int8_t *)record + first * 4, x, x + stride, x + 2 * stride, x + 3 * stride, start, sum);
        const float *scale = (const float *)(record + HW_GROUP * HW_TILE) + first;
        float32x4_t sw[2] = {vld1q_f32(scale), vld1q_f32(scale + 4)};
        HW_UNROLL
        for (int r = 0; r < 4; r++) {
            float sx = a->x_scale[r * a->groups + g];
            HW_UNROLL
            for (int v = 0; v < 2; v++)
                y[r][v] = vfmaq_f32(y[r][v], vsubq_f32(vreinterpretq_f32_s32(sum[r][v]), offset),
                                    vmulq_n_f32(sw[v], sx));
        }
    }
    HW_UNROLL
    for (int r = 0; r < 4; r++) {
        hw_store_vector(a, r, first, y[r][0]);
        hw_store_vector(a, r, first + 4, y[r][1]);
    }
}
#else
#define hw_int8_block_4x8(a, first) hw_int8_block(a, 4, 2, first)
#endif

HW_KERNEL void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
    (void)tiles;
    switch (rows) {
    case 1: hw_int8_block(a, 1, 4, 0); break;
    case 2: hw_int8_block(a, 2, 4, 0); break;
    case 3: hw_int8_block(a, 3, 2, 0), hw_int8_block(a, 3, 2, 8); break;
    default: hw_int8_block_4x8(a, 0), hw_int8_block_4x8(a, 8);
    }
}

#elif defined(HW_VNNI512)
#define HW_INT8_ROWS 6
#define HW_INT8_TILES 2

/* `sets` independent sums per output hide the latency of the dot instruction where there are few rows. */
HW_INLINE void hw_int8_block(const hw_int8_args *a, const int rows, const int tiles, const int sets) {
    __m512 y[6][2];
    int64_t x_stride = a->groups * HW_GROUP;
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int t = 0; t < tiles; t++) y[r][t] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *w = a->weights + g * HW_GROUP_BYTES;
        const int8_t *x = a->x + g * HW_GROUP;
        __m512i sum[4][6][2];
        HW_UNROLL
        for (int r = 0; r < rows; r++) {
            HW_UNROLL
            for (int t = 0; t < tiles; t++) {
                sum[0][r][t] = _mm512_set1_epi32(a->x_start[r * a->groups + g]);
                HW_UNROLL
                for (int s = 1; s < sets; s++) sum[s][r][t] = _mm512_setzero_si512();
            }
        }
        HW_UNROLL
        for (int quad = 0; quad < HW_GROUP / 4; quad++) {
            __m512i wv[2];
            HW_UNROLL
            for (int t = 0; t < tiles; t++) wv[t] = _mm512_loadu_si512(w + t * a->tile_bytes + quad * 64);
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + r * x_stride + quad * 4, 4);
                __m512i xv = _mm512_set1_epi32(four);
                HW_UNROLL
                for (int t = 0; t < tiles; t++)
                    sum[quad % sets][r][t] = _mm512_dpbusd_epi32(sum[quad % sets][r][t], wv[t], xv);
            }
        }
        HW_UNROLL
        for (int t = 0; t < tiles; t++) {
            __m512 sw = _mm512_loadu_ps((const float *)(w + t * a->tile_bytes + HW_GROUP * HW_TILE));
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                __m512i total = sum[0][r][t];
                HW_UNROLL
                for (int s = 1; s < sets; s++) total = _mm512_add_epi32(total, sum[s][r][t]);
                __m512 scale = _mm512_mul_ps(sw, _mm512_set1_ps(a->x_scale[r * a->groups + g]));
                y[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, y[r][t]);
            }
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int t = 0; t < tiles; t++) hw_store_vector(a, r, t * HW_TILE, y[r][t]);
    }
}

HW_KERNEL void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
    if (tiles == 2) {
        switch (rows) {
        case 1: hw_int8_block(a, 1, 2, 4); break;
        case 2: hw_int8_block(a, 2, 2, 2); break;
        case 3: hw_int8_block(a, 3, 2, 1); break;
        case 4: hw_int8_block(a, 4, 2, 1); break;
        case 5: hw_int8_block(a, 5, 2, 1); break;
        default: hw_int8_block(a, 6, 2, 1);
        }
    } else {
        switch (rows) {
        case 1: hw_int8_block(a, 1, 1, 4); break;
        case 2: hw_int8_block(a, 2, 1, 4); break;
        case 3: hw_int8_block(a, 3, 1, 2); break;
        case 4: hw_int8_block(a, 4, 1, 2); break;
        case 5: hw_int8_block(a, 5, 1, 2); break;
        default: hw_int8_block(a, 6, 1, 1);
        }
    }
}

#elif defined(HW_AVX512) || defined(HW_AVX2)
#define HW_INT8_ROWS 4
#define HW_INT8_TILES 1

/* Without an unsigned-by-signed dot instruction: |w| * (x with the sign of w). A pair is at most 2 * 127 * 127, so the
 * 16-bit sums of vpmaddubsw never saturate. */
HW_INLINE __m256i hw_dot256(__m256i sum, __m256i w, __m256i x) {
#if defined(HW_VNNI256)
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* `rows` x 8 channels starting at `first` inside the tile. */
HW_INLINE void hw_int8_block(const hw_int8_args *a, const int rows, const int first) {
    __m256 y[4];
    int64_t x_stride = a->groups * HW_GROUP;
    HW_UNROLL
    for (int r = 0; r < rows; r++) y[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *w = a->weights + g * HW_GROUP_BYTES + first * 4;
        const int8_t *x = a->x + g * HW_GROUP;
        __m256i sum[4];
        HW_UNROLL
        for (int r = 0; r < rows; r++)
            sum[r] = HW_WEIGHT_XOR ? _mm256_set1_epi32(a->x_start[r * a->groups + g]) : _mm256_setzero_si256();
        for (int quad = 0; quad < HW_GROUP / 4; quad++) {
            __m256i wv = _mm256_loadu_si256((const __m256i *)(w + quad * 64));
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + r * x_stride + quad * 4, 4);
                sum[r] = hw_dot256(sum[r], wv, _mm256_set1_epi32(four));
            }
        }
        __m256 sw = _mm256_loadu_ps((const float *)(a->weights + g * HW_GROUP_BYTES + HW_GROUP * HW_TILE) + first);
        HW_UNROLL
        for (int r = 0; r < rows; r++) {
            __m256 scale = _mm256_mul_ps(sw, _mm256_set1_ps(a->x_scale[r * a->groups + g]));
            y[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), scale, y[r]);
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        float lanes[8];
        _mm256_storeu_ps(lanes, y[r]);
        hw_store_tile(a, r, first, lanes, 8);
    }
}

HW_KERNEL void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
    (void)tiles;
    switch (rows) {
    case 1: hw_int8_block(a, 1, 0), hw_int8_block(a, 1, 8); break;
    case 2: hw_int8_block(a, 2, 0), hw_int8_block(a, 2, 8); break;
    case 3: hw_int8_block(a, 3, 0), hw_int8_block(a, 3, 8); break;
    default: hw_int8_block(a, 4, 0), hw_int8_block(a, 4, 8);
    }
}

#else
#define HW_INT8_ROWS 1
#define HW_INT8_TILES 1

HW_KERNEL void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
    (void)rows, (void)tiles;
    float y[HW_TILE] = {0};
    for (int64_t g = 0; g < a->groups; g++) {
        const int8_t *w = (const int8_t *)a->weights + g * HW_GROUP_BYTES;
        const float *scale = (const float *)(w + HW_GROUP * HW_TILE);
        int32_t sum[HW_TILE] = {0};
        for (int quad = 0; quad < HW_GROUP / 4; quad++) {
            const int8_t *x = a->x + g * HW_GROUP + quad * 4;
            for (int c = 0; c < HW_TILE; c++) {
                const int8_t *wc = w + quad * 64 + c * 4;
                sum[c] += wc[0] * x[0] + wc[1] * x[1] + wc[2] * x[2] + wc[3] * x[3];
            }
        }
        for (int c = 0; c < HW_TILE; c++) y[c] += (float)sum[c] * (scale[c] * a->x_scale[g]);
    }
    hw_store_tile(a, 0, 0, y, HW_TILE);
}
#endif

#endif
