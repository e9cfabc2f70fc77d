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
                           const int rows, const int vectors, const int half, const int prefetch) {
    vf sum[ROW_BLOCK][MOST_VECTORS];
    const int step = vectors * HW_VL * (half ? 2 : 4);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) sum[r][v] = vf_load(acc + r * dim + v * HW_VL);
    }
    for (int piece = 0; piece < run->pieces; piece++) {
        const void *values = run->values[piece];
        int64_t key = 0, count = run->count[piece];
        const char *next = (const char *)run->next[piece] + offset * count * (half ? 2 : 4);
#define PREFETCH(lane) /* of key + lane, unless the key before was in the same cache line */                           \
    if (prefetch && lane * step % CACHE_LINE == 0)                                                                     \
        for (int line = 0; line < step; line += CACHE_LINE) __builtin_prefetch(next + (key + lane) * step + line);
#if defined(HW_NEON)
#define LOAD(value, lane)                                                                                              \
    PREFETCH(lane)                                                                                                     \
    HW_UNROLL                                                                                                          \
    for (int v = 0; v < vectors; v++) value[v] = load_as(values, offset + (key + lane) * dim + v * HW_VL, half);
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
        vf value = load_as(values, offset + (key + lane) * dim + v * HW_VL, half);                                     \
        HW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) sum[r][v] = vfmaq_laneq_f32(sum[r][v], value, w[r], lane);                      \
    }
        for (; key + 4 <= count; key += 4) {
            vf w[ROW_BLOCK], even[MOST_VECTORS], odd[MOST_VECTORS];
            HW_UNROLL
            for (int r = 0; r < rows; r++) w[r] = vf_load(weights + r * HW_SEGMENT + key);
            if (half) { /* converted one key ahead of use */
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
            HW_UNROLL
            for (int v = 0; v < vectors; v++) value[v] = load_as(values, offset + key * dim + v * HW_VL, half);
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
static float weigh_scalar(const float *weights, const value_run *run, int64_t d, int64_t dim, float sum, int half) {
    for (int piece = 0; piece < run->pieces; piece++) {
        for (int64_t key = 0; key < run->count[piece]; key++) {
            int64_t index = key * dim + d;
            float value = half ? hw_half_to_float(((const uint16_t *)run->values[piece])[index]) / HW_HALF_UNSCALE
                               : ((const float *)run->values[piece])[index];
            sum += weights[key] * value;
        }
        weights += run->count[piece];
    }
    return sum;
}

HW_INLINE void weigh_all_dims(const float *weights, const value_run *run, int64_t dim, float *acc, const int rows,
                              const int half, const int prefetch) {
    const int vectors = !half && rows * MOST_VECTORS <= MOST_SUMS ? MOST_VECTORS : 4;
    int64_t d = 0;
    for (; d + vectors * HW_VL <= dim; d += vectors * HW_VL)
        weigh_block(weights, run, d, dim, acc + d, rows, vectors, half, prefetch);
    for (; vectors > 4 && d + 4 * HW_VL <= dim; d += 4 * HW_VL)
        weigh_block(weights, run, d, dim, acc + d, rows, 4, half, 0);
    for (; d + HW_VL <= dim; d += HW_VL) weigh_block(weights, run, d, dim, acc + d, rows, 1, half, 0);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++)
            acc[r * dim + d] = weigh_scalar(weights + r * HW_SEGMENT, run, d, dim, acc[r * dim + d], half);
}

#define INSTANCE(rows, half)                                                                                           \
    HW_KERNEL void weigh_##rows##_##half(const float *weights, const value_run *run, int64_t dim, float *acc) {        \
        weigh_all_dims(weights, run, dim, acc, rows, half, rows < ROW_BLOCK);                                  \
    }
INSTANCE(1, 0)
INSTANCE(2, 0)
INSTANCE(3, 0)
INSTANCE(4, 0)
INSTANCE(1, 1)
INSTANCE(2, 1)
INSTANCE(3, 1)
INSTANCE(4, 1)
#undef INSTANCE

static void (*const weigh_row_block[2][ROW_BLOCK])(const float *, const value_run *, int64_t, float *) = {
    {weigh_1_0, weigh_2_0, weigh_3_0, weigh_4_0},
    {weigh_1_1, weigh_2_1, weigh_3_1, weigh_4_1},
};

static void weigh_rows(const hw_attention_tile *tile, const float *weights, const value_run *run, float *acc,
                       int half) {
    int64_t dim = tile->shape->dim;
    for (int64_t row = 0; row < tile->rows; row += ROW_BLOCK) {
        int64_t count = tile->rows - row < ROW_BLOCK ? tile->rows - row : ROW_BLOCK;
        weigh_row_block[half][count - 1](weights + row * HW_SEGMENT, run, dim, acc + row * dim);
    }
}

static const void *value_address(const hw_attention_tile *tile, int64_t head, int64_t key) {
    const hw_attention_shape *shape = tile->shape;
    int64_t block = tile->blocks[key / shape->block_size], offset = key % shape->block_size;
    int64_t index = ((block * shape->kv_heads + tile->first_head + head) * shape->block_size + offset) * shape->dim;
    return tile->half ? (const void *)((const uint16_t *)tile->v_cache + index)
                      : (const void *)((const float *)tile->v_cache + index);
}

static void stage_values(const void *values, int half, int64_t floats, float *out) {
    if (!half) {
        memcpy(out, values, (size_t)floats * sizeof(float));
        return;
    }
    int64_t i = 0;
    for (; i + HW_VL <= floats; i += HW_VL) vf_store(out + i, vf_load_half((const uint16_t *)values + i));
    for (; i < floats; i++) out[i] = hw_half_to_float(((const uint16_t *)values)[i]);
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
            stage_values(values, tile->half, part * dim, tile->gathered + i * dim);
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
    int direct = tile->shape->block_size >= KEY_GROUP && (!tile->half || reads_halves(tile));
    if (direct && tile->half && HW_HALF_UNSCALE != 1.0f)
        for (int64_t i = 0; i < tile->heads * tile->rows * HW_SEGMENT; i += HW_VL)
            vf_store(tile->scores + i, vf_mul(vf_load(tile->scores + i), vf_set1(HW_HALF_UNSCALE)));
    for (int64_t key = first; key < end; key += VALUE_RUN)
        for (int64_t head = 0; head < tile->heads; head++) {
            value_run run;
            const float *weights = tile->scores + head * tile->rows * HW_SEGMENT + (key - first);
            float *sums = acc + head * tile->rows * tile->shape->dim;
            find_values(tile, head, key, end - key < VALUE_RUN ? end - key : VALUE_RUN, direct, &run);
            weigh_rows(tile, weights, &run, sums, direct && tile->half);
        }
}
