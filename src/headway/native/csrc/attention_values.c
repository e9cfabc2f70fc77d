/* The weighted sum of paged values: vectorised over the head dimension, in the order of keys. */
#include "attention_blocks.h"

/* Up to VALUE_RUN consecutive keys' values, in contiguous pieces, and what to bring into the cache meanwhile. */
typedef struct {
    int pieces;
    const void *values[VALUE_RUN], *next[VALUE_RUN];
    int64_t count[VALUE_RUN];
} value_run;

/* acc[r][0 .. vectors * VL) += sum over the run's keys of weights[r][key] * values[key][offset ...]. The next run is
 * prefetched front to back: each pass over the head dimension takes its share. */
HW_INLINE void weigh_block(const float *weights, const value_run *run, int64_t offset, int64_t dim, float *acc,
                           const int rows, const int vectors, const int numbers, const int prefetch) {
    vf sum[ROW_BLOCK][MOST_VECTORS];
    const int step = (int)kv_bytes(vectors * HW_VL, numbers);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) sum[r][v] = vf_load(acc + r * dim + v * HW_VL);
    }
    for (int piece = 0; piece < run->pieces; piece++) {
        const void *values = run->values[piece];
        int64_t key = 0, count = run->count[piece];
        const char *next = (const char *)run->next[piece] + kv_bytes(offset * count, numbers);
#define PREFETCH(lane) /* of key + lane, unless the key before was in the same cache line */                           \
    if (prefetch && lane * step % CACHE_LINE == 0)                                                                     \
        for (int line = 0; line < step; line += CACHE_LINE) __builtin_prefetch(next + (key + lane) * step + line);
#if defined(HW_NEON)
#define LOAD(value, lane)                                                                                              \
    PREFETCH(lane)                                                                                                     \
    kv_load_many(value, values, offset + (key + lane) * dim, vectors, numbers);
#define STEP(value, lane)                                                                                              \
    HW_UNROLL                                                                                                          \
    for (int v = 0; v < vectors; v++) {                                                                                \
        HW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) sum[r][v] = vfmaq_laneq_f32(sum[r][v], value[v], w[r], lane);                   \
    }
#define LOAD_AND_STEP(lane)                                                                                            \
    PREFETCH(lane)                                                                                                     \
    HW_UNROLL                                                                                                          \
    for (int v = 0; v < vectors; v++) {                                                                                \
        vf value = kv_load_scaled(values, offset + (key + lane) * dim + v * HW_VL, numbers);                           \
        HW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) sum[r][v] = vfmaq_laneq_f32(sum[r][v], value, w[r], lane);                      \
    }
        for (; key + 4 <= count; key += 4) {
            vf w[ROW_BLOCK], even[MOST_VECTORS], odd[MOST_VECTORS];
            HW_UNROLL
            for (int r = 0; r < rows; r++) w[r] = vf_load(weights + r * HW_SEGMENT + key);
            if (numbers != HW_KV_F32) { /* converted one key ahead of use */
                LOAD(even, 0)
                LOAD(odd, 1)
                STEP(even, 0)
                LOAD(even, 2)
                STEP(odd, 1)
                LOAD(odd, 3)
                STEP(even, 2)
                STEP(odd, 3)
            } else {
                LOAD_AND_STEP(0)
                LOAD_AND_STEP(1)
                LOAD_AND_STEP(2)
                LOAD_AND_STEP(3)
            }
        }
#undef LOAD_AND_STEP
#undef LOAD
#undef STEP
#endif
        for (; key < count; key++) {
            vf value[MOST_VECTORS];
            PREFETCH(0)
            kv_load_many(value, values, offset + key * dim, vectors, numbers);
            HW_UNROLL
            for (int r = 0; r < rows; r++) {
                vf w = vf_set1(weights[r * HW_SEGMENT + key]);
                HW_UNROLL
                for (int v = 0; v < vectors; v++) sum[r][v] = vf_fma(value[v], w, sum[r][v]);
            }
        }
        weights += count;
    }
#undef PREFETCH
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) vf_store(acc + r * dim + v * HW_VL, sum[r][v]);
    }
}

/* One dimension of one row; for head sizes that are no multiple of the vector length. */
static float weigh_scalar(const float *weights, const value_run *run, int64_t d, int64_t dim, float sum,
                          int numbers) {
    for (int piece = 0; piece < run->pieces; piece++) {
        for (int64_t key = 0; key < run->count[piece]; key++) {
            sum += weights[key] * kv_to_float_scaled(run->values[piece], key * dim + d, numbers);
        }
        weights += run->count[piece];
    }
    return sum;
}

HW_INLINE void weigh_all_dims(const float *weights, const value_run *run, int64_t dim, float *acc, const int rows,
                              const int numbers, const int prefetch) {
    const int vectors = numbers == HW_KV_F32 && rows * MOST_VECTORS <= MOST_SUMS ? MOST_VECTORS : 4;
    int64_t d = 0;
    for (; d + vectors * HW_VL <= dim; d += vectors * HW_VL)
        weigh_block(weights, run, d, dim, acc + d, rows, vectors, numbers, prefetch);
    for (; vectors > 4 && d + 4 * HW_VL <= dim; d += 4 * HW_VL)
        weigh_block(weights, run, d, dim, acc + d, rows, 4, numbers, 0);
    for (; d + HW_VL <= dim; d += HW_VL) weigh_block(weights, run, d, dim, acc + d, rows, 1, numbers, 0);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++)
            acc[r * dim + d] = weigh_scalar(weights + r * HW_SEGMENT, run, d, dim, acc[r * dim + d], numbers);
}

#define INSTANCE(rows, numbers)                                                                                        \
    HW_KERNEL void weigh_##rows##_##numbers(const float *weights, const value_run *run, int64_t dim, float *acc) {     \
        weigh_all_dims(weights, run, dim, acc, rows, numbers, rows < ROW_BLOCK);                                       \
    }
#define INSTANCES(numbers) INSTANCE(1, numbers) INSTANCE(2, numbers) INSTANCE(3, numbers) INSTANCE(4, numbers)
INSTANCES(HW_KV_F32)
INSTANCES(HW_KV_F16)
INSTANCES(HW_KV_INT8)
INSTANCES(HW_KV_FP8)
INSTANCES(HW_KV_INT4)

#define ROWS(numbers) {weigh_1_##numbers, weigh_2_##numbers, weigh_3_##numbers, weigh_4_##numbers}
static void (*const weigh_row_block[5][ROW_BLOCK])(const float *, const value_run *, int64_t, float *) = {
    ROWS(HW_KV_F32), ROWS(HW_KV_F16), ROWS(HW_KV_INT8), ROWS(HW_KV_FP8), ROWS(HW_KV_INT4),
};
#undef ROWS
#undef INSTANCES
#undef INSTANCE

static void weigh_rows(const hw_attention_tile *tile, const float *weights, const value_run *run, float *acc,
                       int numbers) {
    int64_t dim = tile->shape->dim;
    for (int64_t row = 0; row < tile->rows; row += ROW_BLOCK) {
        int64_t count = tile->rows - row < ROW_BLOCK ? tile->rows - row : ROW_BLOCK;
        weigh_row_block[numbers][count - 1](weights + row * HW_SEGMENT, run, dim, acc + row * dim);
    }
}

static const void *value_address(const hw_attention_tile *tile, int64_t head, int64_t key) {
    const hw_attention_shape *shape = tile->shape;
    int64_t block = tile->blocks[key / shape->block_size], offset = key % shape->block_size;
    int64_t index = ((block * shape->kv_heads + tile->first_head + head) * shape->block_size + offset) * shape->dim;
    return (const char *)tile->cache.v + kv_bytes(index, tile->cache.v_numbers);
}

static void stage_values(const void *values, int numbers, int64_t floats, float *out) {
    if (numbers == HW_KV_F32) {
        memcpy(out, values, (size_t)floats * sizeof(float));
        return;
    }
    int64_t i = 0;
    for (; i + HW_VL <= floats; i += HW_VL) vf_store(out + i, kv_load(values, i, numbers));
    for (; i < floats; i++) out[i] = kv_to_float(values, i, numbers);
}

/* Describes the values of keys [key, key + count) where they lie, or as copied to the staging buffer. */
static void find_values(const hw_attention_tile *tile, int64_t head, int64_t key, int64_t count, int direct,
                        value_run *run) {
    int64_t size = tile->shape->block_size, dim = tile->shape->dim;
    run->pieces = 0;
    for (int64_t i = 0; i < count;) {
        int64_t part = size - (key + i) % size < count - i ? size - (key + i) % size : count - i;
        int64_t ahead = key + i + VALUE_RUN;
        const void *values = value_address(tile, head, key + i);
        if (direct) {
            run->values[run->pieces] = values;
            run->next[run->pieces] = ahead < tile->keys ? value_address(tile, head, ahead) : values;
            run->count[run->pieces++] = part;
        } else {
            stage_values(values, tile->cache.v_numbers, part * dim, tile->gathered + i * dim);
        }
        i += part;
    }
    if (!direct) {
        run->pieces = 1;
        run->values[0] = run->next[0] = tile->gathered;
        run->count[0] = count;
    }
}

void hw_attention_weigh(const hw_attention_tile *tile, int64_t first, int64_t end, float *acc) {
    int numbers = tile->cache.v_numbers;
    int direct = tile->shape->block_size >= KEY_GROUP && reads_in_place(tile, numbers);
    if (direct && numbers == HW_KV_F16 && HW_HALF_UNSCALE != 1.0f)
        for (int64_t i = 0; i < tile->heads * tile->rows * HW_SEGMENT; i += HW_VL)
            vf_store(tile->scores + i, vf_mul(vf_load(tile->scores + i), vf_set1(HW_HALF_UNSCALE)));
    for (int64_t key = first; key < end; key += VALUE_RUN)
        for (int64_t head = 0; head < tile->heads; head++) {
            value_run run;
            const float *weights = tile->scores + head * tile->rows * HW_SEGMENT + (key - first);
            float *sums = acc + head * tile->rows * tile->shape->dim;
            find_values(tile, head, key, end - key < VALUE_RUN ? end - key : VALUE_RUN, direct, &run);
            weigh_rows(tile, weights, &run, sums, direct ? numbers : HW_KV_F32);
        }
}
