/* See int8_kernels.h. In plain C. Nibbles are always made wide, as the codes that they stand for. */
#define HW_INT8_ROWS 1
#define HW_INT8_TILES 1
#define HW_CODE_START(form, sum) 0

HW_INLINE void hw_tile(const hw_int8_args *a, const int kind) {
    const int halves = HW_HALVES(kind);
    float y[HW_TILE] = {0};
    for (int64_t g = 0; g < a->groups; g++) {
        const int8_t *record = (const int8_t *)a->weights + g * hw_record_bytes(a, kind);
        const float *scale = (const float *)(record + HW_GROUP * HW_TILE);
        int32_t sum[2][HW_TILE] = {{0}};
        for (int quad = 0; quad < HW_GROUP / 4; quad++) {
            const int8_t *x = a->x + g * HW_GROUP + quad * 4;
            int half = quad * 4 * halves / HW_GROUP;
            for (int c = 0; c < HW_TILE; c++) {
                const int8_t *wc = record + quad * 64 + c * 4;
                sum[half][c] += wc[0] * x[0] + wc[1] * x[1] + wc[2] * x[2] + wc[3] * x[3];
            }
        }
        if (kind == HW_INT8) {
            for (int c = 0; c < HW_TILE; c++) y[c] += (float)sum[0][c] * (scale[c] * a->x_scale[g]);
            continue;
        }
        for (int c = 0; c < HW_TILE; c++) {
            if (a->x_sums) y[c] += scale[2 * HW_TILE + c] * a->x_sums[2 * g];
            y[c] += ((float)sum[0][c] * scale[c] + (float)sum[1][c] * scale[HW_TILE + c]) * a->x_scale[g];
            if (a->x_sums) y[c] += scale[3 * HW_TILE + c] * a->x_sums[2 * g + 1];
        }
    }
    hw_store_tile(a, 0, 0, y, HW_TILE);
}

HW_INLINE void hw_int8_rows(const hw_int8_args *a, int rows, int tiles) {
    (void)rows, (void)tiles;
    hw_tile(a, HW_INT8);
}

HW_INLINE void hw_wide_rows(const hw_int8_args *a, int rows, int tiles) {
    (void)rows, (void)tiles;
    hw_tile(a, HW_WIDE);
}

HW_INLINE void hw_widen_codes(const uint8_t *nibbles, hw_int4_form form, int8_t *codes) {
    int lowest = form.is_signed ? -8 : 0;
    for (int i = 0; i < HW_NIBBLE_BYTES; i++) {
        int8_t *quad = codes + i / 32 * 64 + i % 32;
        quad[0] = (int8_t)((nibbles[i] & 15) + lowest);
        quad[32] = (int8_t)((nibbles[i] >> 4) + lowest);
    }
}
