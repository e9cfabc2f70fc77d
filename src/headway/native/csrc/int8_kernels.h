/* The inner kernels of quantised weights: `rows` rows of int8 values times one or two tiles of 16 channels, per
 * instruction set. Layouts of the weights: int8_pack.c and int4_pack.c.
 *
 * Products are summed exactly in int32 over a group of 64, then added to the float32 result with
 *     y = fma(float(sum), scale_w * scale_x, y)
 * in group order, so a row's result does not depend on how many rows are computed together. Weights of 4 bits have a
 * scale, and may have an offset, for each half of a group:
 *     t = float(sum_0) * scale_0;          y = fma(offset_0, scale_x * sum of x in half 0, y)
 *     t = fma(float(sum_1), scale_1, t);   y = fma(t, scale_x, y);  y = fma(offset_1, scale_x * sum of x in half 1, y)
 * Few rows take the nibbles apart in registers. For more, a tile is made wide once: a byte for each code. */
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
/* What a kernel reads: records of int8, of nibbles, or of nibbles that were made wide. */
enum { HW_INT8, HW_NIBBLES, HW_WIDE };
#define HW_HALVES(kind) ((kind) == HW_INT8 ? 1 : 2)
#define HW_HALF (HW_GROUP / 2)
#define HW_NIBBLE_BYTES (HW_GROUP * HW_TILE / 2)
/* Of wide records: codes, then the scales of both halves, then their offsets. */
#define HW_WIDE_BYTES (HW_GROUP * HW_TILE + 4 * HW_TILE * 4)

/* Of packed weights of 4 bits, the form takes as much as keeps the records aligned. */
#define HW_INT4_HEADER 64

/* What a stored code of 4 bits differs in from its own four bits. All are unsigned, a signed one as code + 8; but for
 * NEON those in high nibbles are signed, an unsigned one as code - 8. */
HW_INLINE uint8_t hw_code_flip(hw_int4_form form, int high) {
#if defined(HW_NEON)
    return high != (form.is_signed != 0) ? 8 : 0;
#else
    (void)high;
    return form.is_signed ? 8 : 0;
#endif
}

HW_INLINE int64_t hw_int4_record_bytes(hw_int4_form form) {
    return HW_NIBBLE_BYTES + 2 * (form.has_offsets ? 2 : 1) * HW_TILE * (form.is_half ? 2 : 4);
}

/* One quantised activation matrix. */
typedef struct {
    int8_t *values; /* [m][groups * 64] */
    float *scale;   /* [m][groups] */
    int32_t *start; /* [m][groups][halves]: what sums start at, where codes are stored as others than they are */
    float *sums;    /* [m][groups][2]: scale * sum of the values, of each half; for weights with offsets */
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

HW_INLINE int32_t hw_half_sum(const int8_t *values) {
#if defined(HW_NEON)
    return vaddlvq_s8(vld1q_s8(values)) + vaddlvq_s8(vld1q_s8(values + 16));
#else
    int32_t total = 0;
    for (int i = 0; i < HW_HALF; i++) total += values[i];
    return total;
#endif
}

/* Quantises a row of k values, padded with zeros to whole groups: values = round(x * 127 / max), scale = max / 127. A
 * group with NaN or infinity gets a scale that is one, so that they show in the result as they do without quantising.
 * The maxima of many groups come first, so that their long chains of operations overlap. */
HW_INLINE void hw_quantise_row(const float *x, int64_t k, int8_t *values, float *scale) {
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
        }
    }
}

typedef struct {
    const uint8_t *weights; /* first record of the (first) tile */
    int64_t tile_bytes;     /* distance to the next tile */
    const int8_t *x;
    const float *x_scale;
    const int32_t *x_start;
    const float *x_sums; /* NULL: there are no offsets */
    int64_t groups;
    hw_int4_form form;
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

/* Scales of 16 channels, or offsets, follow the codes of a record: `at` 0 and 1 are the halves' scales, 2 and 3 their
 * offsets. Returns those from `first` on. */
HW_INLINE vf hw_scales(const hw_int8_args *a, const int kind, const uint8_t *record, const int at, const int first) {
    int index = at * HW_TILE + first;
    if (kind != HW_NIBBLES) return vf_load((const float *)(record + HW_GROUP * HW_TILE) + index);
    if (a->form.is_half) return vf_load_half((const uint16_t *)(record + HW_NIBBLE_BYTES) + index);
    return vf_load((const float *)(record + HW_NIBBLE_BYTES) + index);
}

HW_INLINE int64_t hw_record_bytes(const hw_int8_args *a, const int kind) {
    return kind == HW_INT8 ? HW_GROUP_BYTES : kind == HW_WIDE ? HW_WIDE_BYTES : hw_int4_record_bytes(a->form);
}

/* The kernels, each in a file of its own, so that they are compiled beside each other: they take most of the time. */
void hw_int8_tile(const hw_int8_args *a, int rows, int tiles);
void hw_wide_tile(const hw_int8_args *a, int rows, int tiles);
void hw_nibble_tile(const hw_int8_args *a, int rows, int tiles);

#if defined(HW_NEON)
#include "int8_neon.h"
#elif defined(HW_VNNI512)
#include "int8_avx512.h"
#elif defined(HW_AVX512) || defined(HW_AVX2)
#include "int8_avx2.h"
#else
#include "int8_portable.h"
#endif

/* Nibbles to bytes, scales and offsets to float32. */
HW_INLINE void hw_widen(hw_int4_form form, const uint8_t *record, int64_t records, uint8_t *wide) {
    for (int64_t i = 0; i < records; i++, record += hw_int4_record_bytes(form), wide += HW_WIDE_BYTES) {
        const uint8_t *from = record + HW_NIBBLE_BYTES;
        float *scales = (float *)(wide + HW_GROUP * HW_TILE);
        hw_widen_codes(record, form, (int8_t *)wide);
        for (int at = 0; at < (form.has_offsets ? 4 : 2) * HW_TILE; at += HW_VL)
            vf_store(scales + at, form.is_half ? vf_load_half((const uint16_t *)from + at)
                                               : vf_load((const float *)from + at));
    }
}

#endif
