/* See int8_kernels.h. For AVX2, with VNNI and without. */
#define HW_INT8_ROWS 4
#define HW_INT8_TILES 1
/* What sums of 4-bit codes start at: signed ones are stored + 8. */
#define HW_CODE_START(form, sum) ((form).is_signed ? -8 * (sum) : 0)

/* Without an unsigned-by-signed dot instruction: |w| * (x with the sign of w). A pair is at most 2 * 127 * 127, so the
 * 16-bit sums of vpmaddubsw never saturate. Codes of 4 bits are never negative, and a half's 8 pairs are at most
 * 16 * 15 * 128: they are summed in 16 bits, and widened at the end. */
HW_INLINE __m256i hw_dot256(__m256i sum, __m256i w, __m256i x, const int kind) {
#if defined(HW_VNNI256)
    (void)kind;
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
    if (kind != HW_INT8) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

HW_INLINE __m256i hw_total256(__m256i sum, const int kind) {
#if !defined(HW_VNNI256)
    if (kind != HW_INT8) return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
    (void)kind;
    return sum;
}

/* Channels 0 to 7 or 8 to 15 of 4 values. */
HW_INLINE __m256i hw_codes(const uint8_t *w, const int kind, const int quad, const int first) {
    if (kind != HW_NIBBLES) return _mm256_loadu_si256((const __m256i *)(w + quad * 64 + first * 4));
    __m256i bytes = _mm256_loadu_si256((const __m256i *)(w + quad * 32));
    return _mm256_and_si256(first ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

/* As hw_scales, of 8 channels: a vf may be wider here. */
HW_INLINE __m256 hw_scales256(const hw_int8_args *a, const int kind, const uint8_t *record, const int at,
                              const int first) {
    int index = at * HW_TILE + first;
    if (kind != HW_NIBBLES) return _mm256_loadu_ps((const float *)(record + HW_GROUP * HW_TILE) + index);
    if (a->form.is_half)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)(record + HW_NIBBLE_BYTES) + index)));
    return _mm256_loadu_ps((const float *)(record + HW_NIBBLE_BYTES) + index);
}

/* `rows` x 8 channels starting at `first` inside the tile. */
HW_INLINE void hw_block(const hw_int8_args *a, const int kind, const int rows, const int first) {
    const int halves = HW_HALVES(kind);
    __m256 y[4], partial[4];
    int64_t x_stride = a->groups * HW_GROUP, bytes = hw_record_bytes(a, kind);
    HW_UNROLL
    for (int r = 0; r < rows; r++) y[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *record = a->weights + g * bytes;
        HW_UNROLL
        for (int half = 0; half < halves; half++) {
            const int8_t *x = a->x + g * HW_GROUP + half * HW_HALF;
            __m256i sum[4];
            HW_UNROLL
            for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_si256();
            for (int quad = 0; quad < HW_GROUP / 4 / halves; quad++) {
                __m256i wv = hw_codes(record, kind, half * (HW_HALF / 4) + quad, first);
                HW_UNROLL
                for (int r = 0; r < rows; r++) {
                    int32_t four;
                    memcpy(&four, x + r * x_stride + quad * 4, 4);
                    sum[r] = hw_dot256(sum[r], wv, _mm256_set1_epi32(four), kind);
                }
            }
            __m256 sw = hw_scales256(a, kind, record, half, first);
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                __m256i total = hw_total256(sum[r], kind);
                if (HW_WEIGHT_XOR || kind != HW_INT8)
                    total = _mm256_add_epi32(total, _mm256_set1_epi32(a->x_start[(r * a->groups + g) * halves + half]));
                __m256 value = _mm256_cvtepi32_ps(total), sx = _mm256_set1_ps(a->x_scale[r * a->groups + g]);
                if (kind == HW_INT8)
                    y[r] = _mm256_fmadd_ps(value, _mm256_mul_ps(sw, sx), y[r]);
                else if (half == 0)
                    partial[r] = _mm256_mul_ps(value, sw);
                else
                    y[r] = _mm256_fmadd_ps(_mm256_fmadd_ps(value, sw, partial[r]), sx, y[r]);
            }
            if (kind == HW_INT8 || !a->x_sums) continue;
            __m256 offset = hw_scales256(a, kind, record, 2 + half, first);
            HW_UNROLL
            for (int r = 0; r < rows; r++)
                y[r] = _mm256_fmadd_ps(offset, _mm256_set1_ps(a->x_sums[(r * a->groups + g) * 2 + half]), y[r]);
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        float lanes[8];
        _mm256_storeu_ps(lanes, y[r]);
        hw_store_tile(a, r, first, lanes, 8);
    }
}

HW_INLINE void hw_tile(const hw_int8_args *a, const int kind, int rows) {
    switch (rows) {
    case 1: hw_block(a, kind, 1, 0), hw_block(a, kind, 1, 8); break;
    case 2: hw_block(a, kind, 2, 0), hw_block(a, kind, 2, 8); break;
    case 3: hw_block(a, kind, 3, 0), hw_block(a, kind, 3, 8); break;
    default: hw_block(a, kind, 4, 0), hw_block(a, kind, 4, 8);
    }
}

#define TILE(name, kind)                                                                                               \
    HW_INLINE void name(const hw_int8_args *a, int rows, int tiles) {                                                  \
        (void)tiles;                                                                                                   \
        hw_tile(a, kind, rows);                                                                                        \
    }
TILE(hw_int8_rows, HW_INT8)
TILE(hw_wide_rows, HW_WIDE)
TILE(hw_nibble_rows, HW_NIBBLES)
#undef TILE

HW_INLINE void hw_widen_codes(const uint8_t *nibbles, hw_int4_form form, int8_t *codes) {
    (void)form;
    for (int quad = 0; quad < HW_GROUP / 4; quad++) {
        _mm256_storeu_si256((__m256i *)(codes + quad * 64), hw_codes(nibbles, HW_NIBBLES, quad, 0));
        _mm256_storeu_si256((__m256i *)(codes + quad * 64 + 32), hw_codes(nibbles, HW_NIBBLES, quad, 8));
    }
}
