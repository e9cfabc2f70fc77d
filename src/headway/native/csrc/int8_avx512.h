/* See int8_kernels.h. For AVX-512 with VNNI. */
#define HW_INT8_ROWS 6
#define HW_INT8_TILES 2
/* What sums of 4-bit codes start at: signed ones are stored + 8. */
#define HW_CODE_START(form, sum) ((form).is_signed ? -8 * (sum) : 0)

/* The 16 channels of 4 values. Of nibbles: 32 bytes twice, of which the second time the high ones are wanted. */
HW_INLINE __m512i hw_codes(const uint8_t *w, const int kind, const int quad) {
    if (kind != HW_NIBBLES) return _mm512_loadu_si512(w + quad * 64);
    __m512i bytes = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(w + quad * 32)));
    return _mm512_and_si512(_mm512_mask_srli_epi64(bytes, 0xf0, bytes, 4), _mm512_set1_epi8(15));
}

/* `sets` independent sums per output hide the latency of the dot instruction where there are few rows. */
HW_INLINE void hw_block(const hw_int8_args *a, const int kind, const int rows, const int tiles, const int sets) {
    const int halves = HW_HALVES(kind);
    __m512 y[6][2], partial[6][2];
    int64_t x_stride = a->groups * HW_GROUP, bytes = hw_record_bytes(a, kind);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int t = 0; t < tiles; t++) y[r][t] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < a->groups; g++) {
        const uint8_t *w = a->weights + g * bytes;
        HW_UNROLL
        for (int half = 0; half < halves; half++) {
            const int8_t *x = a->x + g * HW_GROUP + half * HW_HALF;
            __m512i sum[4][6][2];
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                HW_UNROLL
                for (int t = 0; t < tiles; t++) {
                    sum[0][r][t] = _mm512_set1_epi32(a->x_start[(r * a->groups + g) * halves + half]);
                    HW_UNROLL
                    for (int s = 1; s < sets; s++) sum[s][r][t] = _mm512_setzero_si512();
                }
            }
            HW_UNROLL
            for (int quad = 0; quad < HW_GROUP / 4 / halves; quad++) {
                __m512i wv[2];
                HW_UNROLL
                for (int t = 0; t < tiles; t++) wv[t] = hw_codes(w + t * a->tile_bytes, kind, half * (HW_HALF / 4) + quad);
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
                __m512 sw = hw_scales(a, kind, w + t * a->tile_bytes, half, 0);
                HW_UNROLL
                for (int r = 0; r < rows; r++) {
                    __m512i total = sum[0][r][t];
                    HW_UNROLL
                    for (int s = 1; s < sets; s++) total = _mm512_add_epi32(total, sum[s][r][t]);
                    __m512 value = _mm512_cvtepi32_ps(total), sx = _mm512_set1_ps(a->x_scale[r * a->groups + g]);
                    if (kind == HW_INT8)
                        y[r][t] = _mm512_fmadd_ps(value, _mm512_mul_ps(sw, sx), y[r][t]);
                    else if (half == 0)
                        partial[r][t] = _mm512_mul_ps(value, sw);
                    else
                        y[r][t] = _mm512_fmadd_ps(_mm512_fmadd_ps(value, sw, partial[r][t]), sx, y[r][t]);
                }
            }
            if (kind == HW_INT8 || !a->x_sums) continue;
            HW_UNROLL
            for (int t = 0; t < tiles; t++) {
                __m512 offset = hw_scales(a, kind, w + t * a->tile_bytes, 2 + half, 0);
                HW_UNROLL
                for (int r = 0; r < rows; r++)
                    y[r][t] = vf_fma_n(y[r][t], offset, a->x_sums[(r * a->groups + g) * 2 + half]);
            }
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int t = 0; t < tiles; t++) hw_store_vector(a, r, t * HW_TILE, y[r][t]);
    }
}

HW_INLINE void hw_tile(const hw_int8_args *a, const int kind, int rows, int tiles) {
    if (tiles == 2) {
        switch (rows) {
        case 1: hw_block(a, kind, 1, 2, 4); break;
        case 2: hw_block(a, kind, 2, 2, 2); break;
        case 3: hw_block(a, kind, 3, 2, 1); break;
        case 4: hw_block(a, kind, 4, 2, 1); break;
        case 5: hw_block(a, kind, 5, 2, 1); break;
        default: hw_block(a, kind, 6, 2, 1);
        }
    } else {
        switch (rows) {
        case 1: hw_block(a, kind, 1, 1, 4); break;
        case 2: hw_block(a, kind, 2, 1, 4); break;
        case 3: hw_block(a, kind, 3, 1, 2); break;
        case 4: hw_block(a, kind, 4, 1, 2); break;
        case 5: hw_block(a, kind, 5, 1, 2); break;
        default: hw_block(a, kind, 6, 1, 1);
        }
    }
}

HW_INLINE void hw_int8_rows(const hw_int8_args *a, int rows, int tiles) { hw_tile(a, HW_INT8, rows, tiles); }
HW_INLINE void hw_wide_rows(const hw_int8_args *a, int rows, int tiles) { hw_tile(a, HW_WIDE, rows, tiles); }
HW_INLINE void hw_nibble_rows(const hw_int8_args *a, int rows, int tiles) { hw_tile(a, HW_NIBBLES, rows, tiles); }

HW_INLINE void hw_widen_codes(const uint8_t *nibbles, hw_int4_form form, int8_t *codes) {
    (void)form;
    for (int quad = 0; quad < HW_GROUP / 4; quad++)
        _mm512_storeu_si512(codes + quad * 64, hw_codes(nibbles, HW_NIBBLES, quad));
}
