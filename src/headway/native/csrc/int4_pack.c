/* Packing 4-bit codes [n, k] with a scale, and perhaps an offset, for every 32 values of k.
 *
 *     tile of 16 channels, one record per 64 values of k:
 *       [64 / 4 = 16][8 channels][4 values]   bytes: low nibbles are codes of channels 0 to 7, high ones of 8 to 15
 *       [2 halves][16 channels]               scales, float16 or float32
 *       [2 halves][16 channels]               offsets, where there are any
 *
 * Nothing is rounded. Codes are stored with their top bit flipped where kernels want signed ones unsigned or unsigned
 * ones signed, see int8_kernels.h. */
#include "headway.h"
#include "int8_kernels.h"
#include "simd.h"

int64_t hw_int4_packed_bytes(hw_int4_form form, int64_t n, int64_t k) {
    int64_t records = (n + HW_TILE - 1) / HW_TILE * ((k + HW_GROUP - 1) / HW_GROUP);
    return HW_INT4_HEADER + records * hw_int4_record_bytes(form);
}

typedef struct {
    hw_int4_form form;
    const int8_t *codes;
    const float *parts[2]; /* scales, offsets */
    int64_t n, k;
    uint8_t *records;
} pack_job;

HW_INLINE void put_float(const pack_job *job, uint8_t *floats, int index, float value) {
    if (job->form.is_half)
        ((uint16_t *)floats)[index] = hw_float_to_half(value);
    else
        ((float *)floats)[index] = value;
}

/* What pads a tile or a group has scale 0: its codes do not matter. */
static void pack_tile(void *context, int64_t tile) {
    const pack_job *job = context;
    int64_t groups = (job->k + HW_GROUP - 1) / HW_GROUP, halves = (job->k + HW_HALF - 1) / HW_HALF;
    int64_t bytes = hw_int4_record_bytes(job->form);
    uint8_t flip[2] = {hw_code_flip(job->form, 0), hw_code_flip(job->form, 1)};
    int valid = job->n - tile * HW_TILE < HW_TILE ? (int)(job->n - tile * HW_TILE) : HW_TILE;
    for (int64_t g = 0; g < groups; g++) {
        uint8_t *record = job->records + (tile * groups + g) * bytes;
        memset(record, 0, (size_t)bytes);
        for (int c = 0; c < valid; c++) {
            int64_t channel = tile * HW_TILE + c;
            const int8_t *codes = job->codes + channel * job->k + g * HW_GROUP;
            int64_t count = job->k - g * HW_GROUP < HW_GROUP ? job->k - g * HW_GROUP : HW_GROUP;
            int high = c >= HW_TILE / 2;
            for (int i = 0; i < count; i++)
                record[i / 4 * 32 + c % 8 * 4 + i % 4] |= (uint8_t)(((codes[i] & 15) ^ flip[high]) << (4 * high));
            for (int part = 0; part < (job->form.has_offsets ? 2 : 1); part++) {
                for (int half = 0; half < 2 && 2 * g + half < halves; half++)
                    put_float(job, record + HW_NIBBLE_BYTES, (part * 2 + half) * HW_TILE + c,
                              job->parts[part][channel * halves + 2 * g + half]);
            }
        }
    }
}

void hw_int4_pack(hw_int4_form form, const int8_t *codes, const float *scales, const float *offsets, int64_t n,
                  int64_t k, uint8_t *packed) {
    pack_job job = {form, codes, {scales, offsets}, n, k, packed + HW_INT4_HEADER};
    hw_advise_huge(packed, (size_t)hw_int4_packed_bytes(form, n, k));
    memset(packed, 0, HW_INT4_HEADER);
    memcpy(packed, &form, sizeof form);
    hw_parallel(pack_tile, &job, (n + HW_TILE - 1) / HW_TILE);
}
