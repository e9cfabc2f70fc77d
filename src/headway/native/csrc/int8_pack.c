/* Packing float32 weights [n, k] into int8 tiles.
 *
 *     tile of 16 channels, one record of 1,088 bytes per 64 values of k:
 *       [k / 4 = 16][16 channels][4 values]  int8    64 bytes = one k-quad of all 16 channels
 *       [16 channels]                        float32 scales
 *
 * Symmetric: scale = max|w| / 127 per (channel, group). Where the dot instruction multiplies unsigned by signed bytes
 * the weights are stored with the top bit flipped (w + 128), see int8_kernels.h. */
#include "headway.h"
#include "int8_kernels.h"
#include "simd.h"

int64_t hw_int8_packed_bytes(int64_t n, int64_t k) {
    return (n + HW_TILE - 1) / HW_TILE * ((k + HW_GROUP - 1) / HW_GROUP) * HW_GROUP_BYTES;
}

typedef struct {
    const float *weight;
    int64_t n, k;
    uint8_t *packed;
} pack_job;

static void pack_tile(void *context, int64_t tile) {
    const pack_job *job = context;
    int64_t groups = (job->k + HW_GROUP - 1) / HW_GROUP;
    int8_t *values = hw_scratch(HW_SCRATCH_PACK, (size_t)groups * (HW_GROUP + sizeof(float)));
    float *scale = (float *)(values + groups * HW_GROUP);
    for (int c = 0; c < HW_TILE; c++) {
        int64_t channel = tile * HW_TILE + c;
        if (channel < job->n)
            hw_quantise_row(job->weight + channel * job->k, job->k, values, scale);
        else
            memset(values, 0, (size_t)groups * (HW_GROUP + sizeof(float)));
        for (int64_t g = 0; g < groups; g++) {
            uint8_t *record = job->packed + (tile * groups + g) * HW_GROUP_BYTES;
            ((float *)(record + HW_GROUP * HW_TILE))[c] = scale[g];
            for (int quad = 0; quad < HW_GROUP / 4; quad++) {
                uint32_t four;
                memcpy(&four, values + g * HW_GROUP + quad * 4, 4);
                four ^= HW_WEIGHT_XOR;
                memcpy(record + quad * 64 + c * 4, &four, 4);
            }
        }
    }
}

void hw_int8_pack(const float *weight, int64_t n, int64_t k, uint8_t *packed) {
    pack_job job = {weight, n, k, packed};
    hw_advise_huge(packed, (size_t)hw_int8_packed_bytes(n, k));
    hw_parallel(pack_tile, &job, (n + HW_TILE - 1) / HW_TILE);
}
