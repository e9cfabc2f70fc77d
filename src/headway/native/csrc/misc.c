/* GGUF block dequantisation, a check of weights, and what the library says about itself. */
#include "headway.h"
#include "int8_kernels.h"
#include "simd.h"

#include <stdatomic.h>

const char *hw_isa(void) {
#if defined(HW_VNNI512)
    return "avx512-vnni";
#elif defined(HW_AVX512)
    return "avx512";
#elif defined(HW_VNNI256)
    return "avx2-vnni";
#elif defined(HW_AVX2)
    return "avx2";
#elif defined(HW_NEON) && defined(__ARM_FEATURE_DOTPROD)
    return "neon-dotprod";
#elif defined(HW_NEON)
    return "neon";
#else
    return "generic";
#endif
}

#define BLOCKS_PER_ITEM 2048

typedef struct {
    const uint8_t *raw;
    float *out;
    int kind;
    int64_t blocks;
} dequantize_job;

HW_INLINE float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return hw_half_to_float(h);
}

static void dequantize_task(void *context, int64_t item) {
    const dequantize_job *job = context;
    int64_t block = item * BLOCKS_PER_ITEM;
    int64_t last = block + BLOCKS_PER_ITEM < job->blocks ? block + BLOCKS_PER_ITEM : job->blocks;
    for (; block < last; block++) {
        float *out = job->out + block * 32;
        if (job->kind == 0) {
            const uint8_t *in = job->raw + block * 18;
            float d = half_at(in);
            for (int i = 0; i < 16; i++) out[i] = d * (float)((in[2 + i] & 15) - 8);
            for (int i = 0; i < 16; i++) out[16 + i] = d * (float)((in[2 + i] >> 4) - 8);
        } else if (job->kind == 1) {
            const uint8_t *in = job->raw + block * 20;
            float d = half_at(in), m = half_at(in + 2);
            for (int i = 0; i < 16; i++) out[i] = d * (float)(in[4 + i] & 15) + m;
            for (int i = 0; i < 16; i++) out[16 + i] = d * (float)(in[4 + i] >> 4) + m;
        } else {
            const uint8_t *in = job->raw + block * 34;
            float d = half_at(in);
            for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)in[2 + i];
        }
    }
}

void hw_dequantize(const uint8_t *raw, int kind, int64_t blocks, float *out) {
    dequantize_job job = {raw, out, kind, blocks};
    hw_parallel(dequantize_task, &job, (blocks + BLOCKS_PER_ITEM - 1) / BLOCKS_PER_ITEM);
}

#define FLOATS_PER_ITEM (1 << 16)

typedef struct {
    const float *x;
    int64_t count;
    _Atomic int found;
} finite_job;

static void finite_task(void *context, int64_t item) {
    finite_job *job = context;
    int64_t i = item * FLOATS_PER_ITEM, end = i + FLOATS_PER_ITEM < job->count ? i + FLOATS_PER_ITEM : job->count;
    vf top[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
    for (; i + 4 * HW_VL <= end; i += 4 * HW_VL) {
        HW_UNROLL
        for (int v = 0; v < 4; v++) top[v] = vf_max_magnitude(top[v], vf_abs(vf_load(job->x + i + v * HW_VL)));
    }
    float largest = vf_reduce_max_magnitude(
        vf_max_magnitude(vf_max_magnitude(top[0], top[1]), vf_max_magnitude(top[2], top[3])));
    int found = !isfinite(largest);
    for (; i < end; i++) found |= !isfinite(job->x[i]);
    if (found) job->found = 1;
}

int hw_is_finite(const float *x, int64_t count) {
    finite_job job = {.x = x, .count = count};
    hw_parallel(finite_task, &job, (count + FLOATS_PER_ITEM - 1) / FLOATS_PER_ITEM);
    return !job.found;
}
