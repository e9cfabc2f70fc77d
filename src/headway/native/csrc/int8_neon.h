/* See int8_kernels.h. For NEON, with the dot product instructions and without. */
#define HW_INT8_ROWS 4
#define HW_INT8_TILES 1
/* What the sums of nibbles start at, of whole bytes and where codes are signed of low ones: see hw_nibble_block. */
#define HW_CODE_START(form, sum) ((form).is_signed ? -8 * (sum) : 128 * (sum))

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

/* Sums start at the bits of 1.5 * 2^23, so that, read as floats, they are 1.5 * 2^23 + sum exactly: this frees the
 * conversion, which only one of the two vector pipes could do. From 1.5 * 2^19 on, floats are multiples of 1/16: so
 * sums of codes times 16 come out right. */
#define HW_START_BITS 0x4b400000
#define HW_START_BITS_16 0x49400000
static const int32_t hw_sum_start[8] = {HW_START_BITS, HW_START_BITS, HW_START_BITS, HW_START_BITS,
                                        HW_START_BITS, HW_START_BITS, HW_START_BITS, HW_START_BITS};

HW_INLINE float32x4_t hw_sum(int32x4_t sum, const int times_16) {
    return vsubq_f32(vreinterpretq_f32_s32(sum), vdupq_n_f32(times_16 ? 786432.0f : 12582912.0f));
}

/* `rows` x (4 * vectors) channels starting at `first` inside the tile. */
HW_INLINE void hw_block(const hw_int8_args *a, const int kind, const int rows, const int vectors, const int first) {
    const int halves = HW_HALVES(kind);
    float32x4_t y[4][4], t[4][4];
    int64_t x_stride = a->groups * HW_GROUP, bytes = hw_record_bytes(a, kind);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) y[r][v] = vdupq_n_f32(0.0f);
    }
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *record = a->weights + g * bytes;
        HW_UNROLL
        for (int half = 0; half < halves; half++) {
            const int8_t *w = (const int8_t *)record + half * HW_HALF * HW_TILE + first * 4;
            const int8_t *x = a->x + g * HW_GROUP + half * HW_HALF;
            int32x4_t sum[4][4];
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                HW_UNROLL
                for (int v = 0; v < vectors; v++) sum[r][v] = vld1q_s32(hw_sum_start);
            }
            HW_UNROLL
            for (int part = 0; part < 4 / halves; part++) {
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
            HW_UNROLL
            for (int v = 0; v < vectors; v++) {
                float32x4_t sw = hw_scales(a, kind, record, half, first + v * 4);
                HW_UNROLL
                for (int r = 0; r < rows; r++) {
                    float32x4_t total = hw_sum(sum[r][v], 0);
                    if (kind == HW_INT8)
                        y[r][v] = vfmaq_f32(y[r][v], total, vmulq_n_f32(sw, a->x_scale[r * a->groups + g]));
                    else if (half == 0)
                        t[r][v] = vmulq_f32(total, sw);
                    else
                        y[r][v] = vfmaq_n_f32(y[r][v], vfmaq_f32(t[r][v], total, sw), a->x_scale[r * a->groups + g]);
                }
                if (kind == HW_INT8 || !a->x_sums) continue;
                float32x4_t offset = hw_scales(a, kind, record, 2 + half, first + v * 4);
                HW_UNROLL
                for (int r = 0; r < rows; r++)
                    y[r][v] = vfmaq_n_f32(y[r][v], offset, a->x_sums[(r * a->groups + g) * 2 + half]);
            }
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) hw_store_vector(a, r, first + v * 4, y[r][v]);
    }
}

/* These wrap around, which signed additions may not. */
HW_INLINE int32x4_t hw_add(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_u32(vaddq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
}
HW_INLINE int32x4_t hw_subtract(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_u32(vsubq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
}

/* `rows` x 8 * pairs channels, half of them from `first` on, half from 8 + `first` on: those of the same bytes. Low codes
 * are unsigned and high ones signed, so a byte is 16 * high + low: the products with bytes, less those with low codes,
 * are those with 16 times the high ones. What codes are more or less than that is in what their sums start at. */
HW_INLINE void hw_nibble_block(const hw_int8_args *a, const int is_signed, const int rows, const int pairs,
                               const int first) {
    float32x4_t y[4][4], t[4][4];
    int32x4_t low_start = vdupq_n_s32(HW_START_BITS);
    int32x4_t whole_start = hw_add(low_start, vdupq_n_s32(HW_START_BITS_16));
    int64_t x_stride = a->groups * HW_GROUP, bytes = hw_record_bytes(a, HW_NIBBLES);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < 2 * pairs; v++) y[r][v] = vdupq_n_f32(0.0f);
    }
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *record = a->weights + g * bytes;
        HW_UNROLL
        for (int half = 0; half < 2; half++) {
            const uint8_t *w = record + half * HW_NIBBLE_BYTES / 2 + first * 4;
            const int8_t *x = a->x + g * HW_GROUP + half * HW_HALF;
            int32x4_t low[4][2], whole[4][2];
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                HW_UNROLL
                for (int p = 0; p < pairs; p++) {
                    int32x4_t more = vld1q_dup_s32(a->x_start + (r * a->groups + g) * 2 + half);
                    low[r][p] = is_signed ? vaddq_s32(low_start, more) : vld1q_s32(hw_sum_start);
                    whole[r][p] = hw_add(whole_start, more);
                }
            }
            HW_UNROLL
            for (int part = 0; part < 2; part++) {
                int8x16_t xv[4];
                HW_UNROLL
                for (int r = 0; r < rows; r++) xv[r] = vld1q_s8(x + r * x_stride + part * 16);
                HW_UNROLL
                for (int lane = 0; lane < 4; lane++) {
                    HW_UNROLL
                    for (int p = 0; p < pairs; p++) {
                        uint8x16_t wv = vld1q_u8(w + (part * 4 + lane) * 32 + p * 16);
                        HW_UNROLL
                        for (int r = 0; r < rows; r++) {
                            int8x16_t codes = vreinterpretq_s8_u8(vandq_u8(wv, vdupq_n_u8(15)));
                            low[r][p] = hw_dot_lane(low[r][p], codes, xv[r], lane);
                            whole[r][p] = hw_dot_lane(whole[r][p], vreinterpretq_s8_u8(wv), xv[r], lane);
                        }
                    }
                }
            }
            HW_UNROLL
            for (int v = 0; v < 2 * pairs; v++) {
                const int high = v >= pairs, channel = first + v % pairs * 4 + high * (HW_TILE / 2);
                float32x4_t sw = hw_scales(a, HW_NIBBLES, record, half, channel);
                HW_UNROLL
                for (int r = 0; r < rows; r++) {
                    int32x4_t sum = low[r][v % pairs];
                    if (high) sum = hw_subtract(whole[r][v % pairs], sum);
                    float32x4_t total = hw_sum(sum, high);
                    if (half == 0)
                        t[r][v] = vmulq_f32(total, sw);
                    else
                        y[r][v] = vfmaq_n_f32(y[r][v], vfmaq_f32(t[r][v], total, sw), a->x_scale[r * a->groups + g]);
                }
                if (!a->x_sums) continue;
                float32x4_t offset = hw_scales(a, HW_NIBBLES, record, 2 + half, channel);
                HW_UNROLL
                for (int r = 0; r < rows; r++)
                    y[r][v] = vfmaq_n_f32(y[r][v], offset, a->x_sums[(r * a->groups + g) * 2 + half]);
            }
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < 2 * pairs; v++)
            hw_store_vector(a, r, first + v % pairs * 4 + v / pairs * (HW_TILE / 2), y[r][v]);
    }
}

#if defined(__ARM_FEATURE_DOTPROD)
/* 4 rows x 8 channels: the sums of a whole group, or of a half of one. In assembler because compilers add a register
 * move to every fifth dot product. The start value is loaded, since loads are free here. */
#define DOT(s, w, x, lane) "sdot %[" s "].4s, %[" w "].16b, %[" x "].4b[" lane "]\n\t"
#define DOTS(w0, w1, lane)                                                                                             \
    DOT("s00", w0, "v0", lane) DOT("s01", w1, "v0", lane) DOT("s10", w0, "v1", lane) DOT("s11", w1, "v1", lane)        \
    DOT("s20", w0, "v2", lane) DOT("s21", w1, "v2", lane) DOT("s30", w0, "v3", lane) DOT("s31", w1, "v3", lane)
#define LOAD_START                                                                                                     \
    "ldp %q[s00], %q[s01], [%[start]]\n\tldp %q[s10], %q[s11], [%[start]]\n\t"                                         \
    "ldp %q[s20], %q[s21], [%[start]]\n\tldp %q[s30], %q[s31], [%[start]]\n\t"
#define LOAD_W(w0, w1, at) "ldp %q[" w0 "], %q[" w1 "], [%[w], #" at "]\n\t"
#define LOAD_X(at)                                                                                                     \
    "ldr %q[v0], [%[p0], #" at "]\n\tldr %q[v1], [%[p1], #" at "]\n\t"                                                 \
    "ldr %q[v2], [%[p2], #" at "]\n\tldr %q[v3], [%[p3], #" at "]\n\t"
#define QUARTER(x_at, w2, w3, w4, w5)                                                                                  \
    LOAD_X(x_at) DOTS("wa", "wb", "0") LOAD_W("wa", "wb", w2) DOTS("wc", "wd", "1") LOAD_W("wc", "wd", w3)             \
    DOTS("wa", "wb", "2") LOAD_W("wa", "wb", w4) DOTS("wc", "wd", "3") LOAD_W("wc", "wd", w5)
#define LAST_QUARTER(x_at, w2, w3)                                                                                     \
    LOAD_X(x_at) DOTS("wa", "wb", "0") LOAD_W("wa", "wb", w2) DOTS("wc", "wd", "1") LOAD_W("wc", "wd", w3)             \
    DOTS("wa", "wb", "2") DOTS("wc", "wd", "3")
#define OPERANDS                                                                                                       \
    : [s00] "=&w"(sum[0][0]), [s01] "=&w"(sum[0][1]), [s10] "=&w"(sum[1][0]), [s11] "=&w"(sum[1][1]),                  \
      [s20] "=&w"(sum[2][0]), [s21] "=&w"(sum[2][1]), [s30] "=&w"(sum[3][0]), [s31] "=&w"(sum[3][1]), [wa] "=&w"(wa),  \
      [wb] "=&w"(wb), [wc] "=&w"(wc), [wd] "=&w"(wd), [v0] "=&w"(v0), [v1] "=&w"(v1), [v2] "=&w"(v2), [v3] "=&w"(v3)   \
    : [w] "r"(w), [p0] "r"(x), [p1] "r"(x + stride), [p2] "r"(x + 2 * stride), [p3] "r"(x + 3 * stride),               \
      [start] "r"(start)                                                                                               \
    : "memory"

HW_INLINE void hw_dots_4x8(const int8_t *w, const int8_t *x, int64_t stride, const int32_t *start, const int halves,
                           int32x4_t sum[4][2]) {
    int8x16_t wa, wb, wc, wd, v0, v1, v2, v3;
    if (halves == 1)
        __asm__(LOAD_START LOAD_W("wa", "wb", "0") LOAD_W("wc", "wd", "64")
                QUARTER("0", "128", "192", "256", "320")
                QUARTER("16", "384", "448", "512", "576")
                QUARTER("32", "640", "704", "768", "832")
                LAST_QUARTER("48", "896", "960") OPERANDS);
    else
        __asm__(LOAD_START LOAD_W("wa", "wb", "0") LOAD_W("wc", "wd", "64")
                QUARTER("0", "128", "192", "256", "320")
                LAST_QUARTER("16", "384", "448") OPERANDS);
}
#undef DOT
#undef DOTS
#undef LOAD_START
#undef LOAD_W
#undef LOAD_X
#undef QUARTER
#undef LAST_QUARTER
#undef OPERANDS

HW_INLINE void hw_block_4x8(const hw_int8_args *a, const int kind, const int first) {
    const int halves = HW_HALVES(kind);
    float32x4_t y[4][2], t[4][2];
    int64_t stride = a->groups * HW_GROUP, bytes = hw_record_bytes(a, kind);
    HW_UNROLL
    for (int r = 0; r < 4; r++) y[r][0] = y[r][1] = vdupq_n_f32(0.0f);
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *record = a->weights + g * bytes;
        HW_UNROLL
        for (int half = 0; half < halves; half++) {
            int32x4_t sum[4][2];
            hw_dots_4x8((const int8_t *)record + half * HW_HALF * HW_TILE + first * 4,
                        a->x + g * HW_GROUP + half * HW_HALF, stride, hw_sum_start, halves, sum);
            float32x4_t sw[2] = {hw_scales(a, kind, record, half, first), hw_scales(a, kind, record, half, first + 4)};
            HW_UNROLL
            for (int r = 0; r < 4; r++) {
                float sx = a->x_scale[r * a->groups + g];
                HW_UNROLL
                for (int v = 0; v < 2; v++) {
                    float32x4_t total = hw_sum(sum[r][v], 0);
                    if (kind == HW_INT8)
                        y[r][v] = vfmaq_f32(y[r][v], total, vmulq_n_f32(sw[v], sx));
                    else if (half == 0)
                        t[r][v] = vmulq_f32(total, sw[v]);
                    else
                        y[r][v] = vfmaq_n_f32(y[r][v], vfmaq_f32(t[r][v], total, sw[v]), sx);
                }
            }
            if (kind == HW_INT8 || !a->x_sums) continue;
            float32x4_t offset[2] = {hw_scales(a, kind, record, 2 + half, first),
                                     hw_scales(a, kind, record, 2 + half, first + 4)};
            HW_UNROLL
            for (int r = 0; r < 4; r++) {
                float sum_x = a->x_sums[(r * a->groups + g) * 2 + half];
                y[r][0] = vfmaq_n_f32(y[r][0], offset[0], sum_x);
                y[r][1] = vfmaq_n_f32(y[r][1], offset[1], sum_x);
            }
        }
    }
    HW_UNROLL
    for (int r = 0; r < 4; r++) {
        hw_store_vector(a, r, first, y[r][0]);
        hw_store_vector(a, r, first + 4, y[r][1]);
    }
}
#else
#define hw_block_4x8(a, kind, first) hw_block(a, kind, 4, 2, first)
#endif

HW_INLINE void hw_tile(const hw_int8_args *a, const int kind, int rows) {
    switch (rows) {
    case 1: hw_block(a, kind, 1, 4, 0); break;
    case 2: hw_block(a, kind, 2, 4, 0); break;
    case 3: hw_block(a, kind, 3, 2, 0), hw_block(a, kind, 3, 2, 8); break;
    default: hw_block_4x8(a, kind, 0), hw_block_4x8(a, kind, 8);
    }
}

HW_INLINE void hw_int8_rows(const hw_int8_args *a, int rows, int tiles) {
    (void)tiles;
    hw_tile(a, HW_INT8, rows);
}

HW_INLINE void hw_wide_rows(const hw_int8_args *a, int rows, int tiles) {
    (void)tiles;
    hw_tile(a, HW_WIDE, rows);
}

HW_INLINE void hw_nibble_blocks(const hw_int8_args *a, const int is_signed, int rows) {
    switch (rows) {
    case 1: hw_nibble_block(a, is_signed, 1, 2, 0); break;
    case 2: hw_nibble_block(a, is_signed, 2, 2, 0); break;
    case 3: hw_nibble_block(a, is_signed, 3, 1, 0), hw_nibble_block(a, is_signed, 3, 1, 4); break;
    default: hw_nibble_block(a, is_signed, 4, 1, 0), hw_nibble_block(a, is_signed, 4, 1, 4);
    }
}

HW_INLINE void hw_nibble_rows(const hw_int8_args *a, int rows, int tiles) {
    (void)tiles;
    if (a->form.is_signed)
        hw_nibble_blocks(a, 1, rows);
    else
        hw_nibble_blocks(a, 0, rows);
}

HW_INLINE void hw_widen_codes(const uint8_t *nibbles, hw_int4_form form, int8_t *codes) {
    int8x16_t more_low = vdupq_n_s8(form.is_signed ? -8 : 0), more_high = vdupq_n_s8(form.is_signed ? 0 : 8);
    HW_UNROLL4
    for (int quad = 0; quad < HW_GROUP / 4; quad++) {
        HW_UNROLL
        for (int v = 0; v < 2; v++) {
            uint8x16_t bytes = vld1q_u8(nibbles + quad * 32 + v * 16);
            int8x16_t low = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
            int8x16_t high = vshrq_n_s8(vreinterpretq_s8_u8(bytes), 4);
            vst1q_s8(codes + quad * 64 + v * 16, vaddq_s8(low, more_low));
            vst1q_s8(codes + quad * 64 + 32 + v * 16, vaddq_s8(high, more_high));
        }
    }
}
