/* Argmax over logits, GGUF block dequantisation, and what the library says about itself. */
#include "headway.h"
#include "int8_kernels.h"
#include "simd.h"

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

#define ARGMAX_CHUNK 8192

typedef struct {
    const float *logits;
    int64_t rows, width, chunks;
    int64_t *best; /* [rows][chunks] */
} argmax_job;

/* First index of the largest value; NaN never wins. */
static int64_t argmax_range(const float *x, int64_t first, int64_t last) {
    int64_t i = first;
    float top = -INFINITY;
    if (last - first >= 4 * HW_VL) {
        vf m[4] = {vf_set1(top), vf_set1(top), vf_set1(top), vf_set1(top)};
        for (; i + 4 * HW_VL <= last; i += 4 * HW_VL) {
            HW_UNROLL
            for (int j = 0; j < 4; j++) m[j] = vf_max(vf_load(x + i + j * HW_VL), m[j]);
        }
        top = vf_reduce_max(vf_max(vf_max(m[0], m[1]), vf_max(m[2], m[3])));
    }
    for (; i < last; i++)
        if (x[i] > top) top = x[i];
    for (i = first; i < last; i++)
        if (x[i] == top) return i;
    int64_t best = first; /* a NaN spoilt the vector maximum: look value by value */
    for (i = first, top = -INFINITY; i < last; i++)
        if (x[i] > top) top = x[i], best = i;
    return best;
}

static void argmax_task(void *context, int64_t item) {
    const argmax_job *job = context;
    int64_t row = item / job->chunks, first = item % job->chunks * ARGMAX_CHUNK;
    int64_t last = first + ARGMAX_CHUNK < job->width ? first + ARGMAX_CHUNK : job->width;
    job->best[item] = argmax_range(job->logits + row * job->width, first, last);
}

void hw_argmax(const float *logits, int64_t rows, int64_t width, int64_t *out) {
    argmax_job job = {logits, rows, width, (width + ARGMAX_CHUNK - 1) / ARGMAX_CHUNK, NULL};
    job.best = hw_scratch(HW_SCRATCH_ARGMAX, (size_t)(rows * job.chunks) * sizeof(int64_t));
    hw_parallel(argmax_task, &job, rows * job.chunks);
    for (int64_t r = 0; r < rows; r++) {
        const float *x = logits + r * width;
        int64_t best = job.best[r * job.chunks];
        for (int64_t c = 1; c < job.chunks; c++) {
            int64_t candidate = job.best[r * job.chunks + c];
            if (x[candidate] > x[best] || x[best] != x[best]) best = candidate;
        }
        out[r] = x[best] == x[best] ? best : 0;
    }
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
