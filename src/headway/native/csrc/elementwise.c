/* Row-wise kernels: RMS norm, residual add + norm, SiLU gate, rotary embedding with the KV cache write. Each row is
 * computed by one thread in a fixed order; threads are used only where the work pays for the fork. */
#include "headway.h"
#include "kv_numbers.h"
#include "simd.h"

#define PARALLEL_VALUES 16384
#define VALUES_PER_ITEM 8192

typedef struct {
    const float *x, *weight;
    float *residual, *out;
    float eps;
    int64_t rows, width, rows_per_item;
} row_job;

static void run_rows(hw_task task, row_job *job, int64_t values_per_row) {
    if (job->rows * values_per_row < PARALLEL_VALUES) {
        job->rows_per_item = job->rows;
        if (job->rows) task(job, 0);
        return;
    }
    job->rows_per_item = (VALUES_PER_ITEM + values_per_row - 1) / values_per_row;
    hw_parallel(task, job, (job->rows + job->rows_per_item - 1) / job->rows_per_item);
}

static int64_t end_row(const row_job *job, int64_t item) {
    int64_t end = (item + 1) * job->rows_per_item;
    return end < job->rows ? end : job->rows;
}

HW_INLINE float inverse_rms(const float *x, int64_t width, float eps) {
    vf sum[4] = {vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f), vf_set1(0.0f)};
    int64_t i = 0;
    for (; i + 4 * HW_VL <= width; i += 4 * HW_VL) {
        HW_UNROLL
        for (int j = 0; j < 4; j++) {
            vf v = vf_load(x + i + j * HW_VL);
            sum[j] = vf_fma(v, v, sum[j]);
        }
    }
    float total = vf_reduce_add(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
    for (; i < width; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)width + eps);
}

HW_INLINE void scale_row(const float *x, float factor, const float *weight, int64_t width, float *out) {
    int64_t i = 0;
    vf f = vf_set1(factor);
    for (; i + HW_VL <= width; i += HW_VL) vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), f), vf_load(weight + i)));
    for (; i < width; i++) out[i] = x[i] * factor * weight[i];
}

static void rms_norm_task(void *context, int64_t item) {
    const row_job *job = context;
    for (int64_t r = item * job->rows_per_item; r < end_row(job, item); r++) {
        const float *x = job->x + r * job->width;
        scale_row(x, inverse_rms(x, job->width, job->eps), job->weight, job->width, job->out + r * job->width);
    }
}

void hw_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out) {
    row_job job = {.x = x, .weight = weight, .out = out, .eps = eps, .rows = rows, .width = width};
    run_rows(rms_norm_task, &job, width);
}

static void add_rms_norm_task(void *context, int64_t item) {
    const row_job *job = context;
    for (int64_t r = item * job->rows_per_item; r < end_row(job, item); r++) {
        const float *x = job->x + r * job->width;
        float *residual = job->residual + r * job->width;
        int64_t i = 0;
        for (; i + HW_VL <= job->width; i += HW_VL)
            vf_store(residual + i, vf_add(vf_load(residual + i), vf_load(x + i)));
        for (; i < job->width; i++) residual[i] += x[i];
        scale_row(residual, inverse_rms(residual, job->width, job->eps), job->weight, job->width,
                  job->out + r * job->width);
    }
}

void hw_add_rms_norm(const float *x, float *residual, const float *weight, float eps, int64_t rows, int64_t width,
                     float *out) {
    row_job job = {
        .x = x, .residual = residual, .weight = weight, .out = out, .eps = eps, .rows = rows, .width = width};
    run_rows(add_rms_norm_task, &job, width);
}

/* out = gate / (1 + exp(-gate)) * up for `count` vectors. */
HW_INLINE void silu_times(const float *gate, const float *up, float *out, const int count) {
    vf e[4];
    HW_UNROLL
    for (int i = 0; i < count; i++) e[i] = vf_min(vf_sub(vf_set1(0.0f), vf_load(gate + i * HW_VL)), vf_set1(88.0f));
    vf_exp_many(e, count);
    HW_UNROLL
    for (int i = 0; i < count; i++) {
        vf share = vf_div(vf_load(gate + i * HW_VL), vf_add(vf_set1(1.0f), e[i]));
        vf_store(out + i * HW_VL, vf_mul(share, vf_load(up + i * HW_VL)));
    }
}

static void silu_mul_task(void *context, int64_t item) {
    const row_job *job = context;
    for (int64_t r = item * job->rows_per_item; r < end_row(job, item); r++) {
        const float *gate = job->x + r * 2 * job->width, *up = gate + job->width;
        float *out = job->out + r * job->width;
        int64_t i = 0;
        for (; i + 4 * HW_VL <= job->width; i += 4 * HW_VL) silu_times(gate + i, up + i, out + i, 4);
        for (; i + HW_VL <= job->width; i += HW_VL) silu_times(gate + i, up + i, out + i, 1);
        if (i < job->width) {
            float g[HW_VL] = {0}, u[HW_VL] = {0}, o[HW_VL];
            memcpy(g, gate + i, (size_t)(job->width - i) * sizeof(float));
            memcpy(u, up + i, (size_t)(job->width - i) * sizeof(float));
            silu_times(g, u, o, 1);
            memcpy(out + i, o, (size_t)(job->width - i) * sizeof(float));
        }
    }
}

void hw_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *out) {
    row_job job = {.x = gate_up, .out = out, .rows = rows, .width = width};
    run_rows(silu_mul_task, &job, width * 4);
}

typedef struct {
    row_job rows; /* x = qkv, out = q */
    const int64_t *positions, *slots;
    const float *cos_sin, *q_norm, *k_norm;
    hw_kv_cache cache;
    int64_t block_size, heads, kv_heads, dim;
} rope_job;

HW_INLINE void rotate(const float *x, const float *cos_sin, int64_t dim, float *out) {
    int64_t half = dim / 2, i = 0;
    for (; i + HW_VL <= half; i += HW_VL) {
        vf a = vf_load(x + i), b = vf_load(x + half + i), c = vf_load(cos_sin + i), s = vf_load(cos_sin + half + i);
        vf_store(out + i, vf_sub(vf_mul(a, c), vf_mul(b, s)));
        vf_store(out + half + i, vf_add(vf_mul(b, c), vf_mul(a, s)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
        out[i] = a * c - b * s;
        out[half + i] = b * c + a * s;
    }
}

HW_INLINE void norm_and_rotate(const float *x, const float *norm, const rope_job *job, const float *cos_sin,
                               float *out) {
    float normed[HW_MAX_HEAD_DIM];
    if (norm) {
        scale_row(x, inverse_rms(x, job->dim, job->rows.eps), norm, job->dim, normed);
        x = normed;
    }
    rotate(x, cos_sin, job->dim, out);
}

HW_INLINE void store_halves(const float *x, int64_t dim, uint16_t *out, int32_t *not_finite) {
    int64_t d = 0;
    uint16_t largest = 0;
    for (; d + HW_VL <= dim; d += HW_VL) vf_store_half(out + d, vf_load(x + d));
    if (d < dim) {
        float tail[HW_VL] = {0};
        uint16_t packed[HW_VL];
        memcpy(tail, x + d, (size_t)(dim - d) * sizeof(float));
        vf_store_half(packed, vf_load(tail));
        memcpy(out + d, packed, (size_t)(dim - d) * sizeof(uint16_t));
    }
    for (d = 0; d < dim; d++) {
        uint16_t magnitude = out[d] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= 0x7c00u) __atomic_store_n(not_finite, 1, __ATOMIC_RELAXED);
}

/* K goes in transposed: number d of the token lands `block_size` elements after number d - 1. `scale` is where the
 * key's scale goes, in a cache that has them. */
HW_INLINE void write_key(const rope_job *job, const float *key, int64_t base, uint16_t *scale) {
    int64_t dim = job->dim, size = job->block_size;
    if (job->cache.k_numbers == HW_KV_F32) {
        float *out = (float *)job->cache.k + base;
        for (int64_t d = 0; d < dim; d++) out[d * size] = key[d];
    } else if (job->cache.k_numbers == HW_KV_F16) {
        uint16_t packed[HW_MAX_HEAD_DIM], *out = (uint16_t *)job->cache.k + base;
        store_halves(key, dim, packed, job->cache.not_finite);
        for (int64_t d = 0; d < dim; d++) out[d * size] = packed[d];
    } else {
        uint8_t codes[HW_MAX_HEAD_DIM], *out = (uint8_t *)job->cache.k + base;
        *scale = kv_encode(key, dim, job->cache.k_numbers, codes);
        for (int64_t d = 0; d < dim; d++) out[d * size] = codes[d];
    }
}

HW_INLINE void write_value(const rope_job *job, const float *value, int64_t base, uint16_t *scale) {
    void *out = (char *)job->cache.v + kv_bytes(base, job->cache.v_numbers);
    if (job->cache.v_numbers == HW_KV_F32)
        memcpy(out, value, (size_t)job->dim * sizeof(float));
    else if (job->cache.v_numbers == HW_KV_F16)
        store_halves(value, job->dim, out, job->cache.not_finite);
    else
        *scale = kv_encode(value, job->dim, job->cache.v_numbers, out);
}

static void rope_task(void *context, int64_t item) {
    const rope_job *job = context;
    int64_t dim = job->dim, width = (job->heads + 2 * job->kv_heads) * dim;
    for (int64_t t = item * job->rows.rows_per_item; t < end_row(&job->rows, item); t++) {
        const float *x = job->rows.x + t * width, *cos_sin = job->cos_sin + job->positions[t] * dim;
        int64_t block = job->slots[t] / job->block_size, offset = job->slots[t] % job->block_size;
        float key[HW_MAX_HEAD_DIM];
        for (int64_t h = 0; h < job->heads; h++)
            norm_and_rotate(x + h * dim, job->q_norm, job, cos_sin, job->rows.out + (t * job->heads + h) * dim);
        x += job->heads * dim;
        for (int64_t h = 0; h < job->kv_heads; h++) {
            int64_t base = (block * job->kv_heads + h) * dim * job->block_size;
            norm_and_rotate(x + h * dim, job->k_norm, job, cos_sin, key);
            uint16_t *scales = job->cache.scales;
            if (scales) scales += ((block * job->kv_heads + h) * job->block_size + offset) * 2;
            write_key(job, key, base + offset, scales);
            write_value(job, x + (job->kv_heads + h) * dim, base + offset * dim, scales ? scales + 1 : NULL);
        }
    }
}

void hw_rope_write_kv(const hw_heads *layer, const float *qkv, const int64_t *positions, const int64_t *slots,
                      int64_t tokens, float *q_out) {
    rope_job job = {
        .rows = {.x = qkv, .out = q_out, .eps = layer->eps, .rows = tokens},
        .positions = positions,
        .slots = slots,
        .cos_sin = layer->cos_sin,
        .q_norm = layer->q_norm,
        .k_norm = layer->k_norm,
        .cache = *layer->cache,
        .block_size = layer->block_size,
        .heads = layer->heads,
        .kv_heads = layer->kv_heads,
        .dim = layer->dim,
    };
    run_rows(rope_task, &job.rows, (layer->heads + 2 * layer->kv_heads) * layer->dim * 2);
}
