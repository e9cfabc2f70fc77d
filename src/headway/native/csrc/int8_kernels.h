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

/* Quantises up to 64 values, pads with zeros; scale = max|x| / 127; *sum = sum of the quantised values. */
HW_INLINE void hw_quantise_group(const float *x, int64_t valid, int8_t *out, float *scale, int32_t *sum) {
    float padded[HW_GROUP];
    if (valid < HW_GROUP) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, (size_t)valid * sizeof(float));
        x = padded;
    }
    vf top[4];
    HW_UNROLL
    for (int i = 0; i < 4; i++) top[i] = vf_abs(vf_load(x + i % (HW_GROUP / HW_VL) * HW_VL));
    HW_UNROLL
    for (int i = 4; i < HW_GROUP / HW_VL; i++) top[i % 4] = vf_max(top[i % 4], vf_abs(vf_load(x + i * HW_VL)));
    float largest = vf_reduce_max(vf_max(vf_max(top[0], top[1]), vf_max(top[2], top[3])));
    float factor = largest > 1e-30f ? 127.0f / largest : 0.0f;
    *scale = largest > 1e-30f ? largest / 127.0f : 0.0f;
    HW_UNROLL
    for (int i = 0; i < HW_GROUP; i += 16) hw_quant16(x + i, factor, out + i);
    *sum = 0;
#if HW_WEIGHT_XOR
    int32_t total = 0;
    for (int i = 0; i < HW_GROUP; i++) total += out[i];
    *sum = total;
#endif
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

HW_INLINE void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
    (void)tiles;
    switch (rows) {
    case 1: hw_int8_block(a, 1, 4, 0); break;
    case 2: hw_int8_block(a, 2, 4, 0); break;
    case 3: hw_int8_block(a, 3, 2, 0), hw_int8_block(a, 3, 2, 8); break;
    default: hw_int8_block(a, 4, 2, 0), hw_int8_block(a, 4, 2, 8);
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

HW_INLINE void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
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

HW_INLINE void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
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

HW_INLINE void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) {
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
