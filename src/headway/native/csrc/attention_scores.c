/* Scores of a tile's query rows against paged keys: vectorised over keys (K is transposed inside a block), in the order
 * of the head dimension. */
#include "attention_blocks.h"

/* Loads (and converts) the keys' values of dimension d. */
HW_INLINE void load_keys(vf *k, const void *const *keys, int64_t index, const int groups, const int numbers) {
    HW_UNROLL
    for (int g = 0; g < groups; g++) kv_load_many(k + g * GROUP_VECTORS, keys[g], index, GROUP_VECTORS, numbers);
}

/* acc[r][v] += k[v] * q[r] for the rows whose packed queries start at q. */
HW_INLINE void score_step(vf acc[][GROUPS_AT_ONCE * GROUP_VECTORS], const vf *k, const float *q, const int rows,
                          const int groups) {
#if defined(HW_NEON)
    float32x4_t lanes = vld1q_f32(q);
    HW_UNROLL
    for (int v = 0; v < groups * GROUP_VECTORS; v++) {
        acc[0][v] = vfmaq_laneq_f32(acc[0][v], k[v], lanes, 0);
        if (rows > 1) acc[1][v] = vfmaq_laneq_f32(acc[1][v], k[v], lanes, 1);
        if (rows > 2) acc[2][v] = vfmaq_laneq_f32(acc[2][v], k[v], lanes, 2);
        if (rows > 3) acc[3][v] = vfmaq_laneq_f32(acc[3][v], k[v], lanes, 3);
    }
#else
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        vf scalar = vf_set1(q[r]);
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) acc[r][v] = vf_fma(k[v], scalar, acc[r][v]);
    }
#endif
}

/* scores[r][0 .. 16 * groups) = q[r] . k for `rows` packed queries and `groups` runs of 16 keys; `next` are the keys to
 * come, brought into the cache meanwhile. Two dimensions per turn (their number is even): the second one's keys are
 * converted while the first one's are used. */
HW_INLINE void score_block(const float *q, const void *const *keys, const void *const *next, int64_t key_stride,
                           int64_t dim, float *scores, const int rows, const int groups, const int numbers) {
    enum { WIDTH = GROUPS_AT_ONCE * GROUP_VECTORS };
    vf acc[ROW_BLOCK][WIDTH], even[WIDTH], odd[WIDTH];
    int64_t row_bytes = kv_bytes(key_stride, numbers);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) acc[r][v] = vf_set1(0.0f);
    }
    load_keys(even, keys, 0, groups, numbers);
    for (int64_t d = 0; d < dim; d += 2) {
        HW_UNROLL
        for (int g = 0; g < groups; g++) {
            __builtin_prefetch((const char *)next[g] + d * row_bytes);
            if (numbers == HW_KV_F32) __builtin_prefetch((const char *)next[g] + (d + 1) * row_bytes);
        }
        load_keys(odd, keys, (d + 1) * key_stride, groups, numbers);
        score_step(acc, even, q + d * ROW_BLOCK, rows, groups);
        load_keys(even, keys, (d + 2 < dim ? d + 2 : d) * key_stride, groups, numbers);
        score_step(acc, odd, q + (d + 1) * ROW_BLOCK, rows, groups);
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) vf_store(scores + r * HW_SEGMENT + v * HW_VL, acc[r][v]);
    }
}

typedef void (*score_kernel)(const float *q, const void *const *keys, const void *const *next, int64_t key_stride,
                             int64_t dim, float *scores);
#define INSTANCE(rows, groups, numbers)                                                                                \
    HW_KERNEL void score_##rows##_##groups##_##numbers(const float *q, const void *const *keys,                        \
                                                       const void *const *next, int64_t key_stride, int64_t dim,       \
                                                       float *scores) {                                                \
        score_block(q, keys, next, key_stride, dim, scores, rows, groups, numbers);                                    \
    }
#define INSTANCES(groups, numbers)                                                                                     \
    INSTANCE(1, groups, numbers) INSTANCE(2, groups, numbers) INSTANCE(3, groups, numbers) INSTANCE(4, groups, numbers)
#define EACH_NUMBERS(groups)                                                                                           \
    INSTANCES(groups, HW_KV_F32) INSTANCES(groups, HW_KV_F16) INSTANCES(groups, HW_KV_INT8) INSTANCES(groups, HW_KV_FP8)
EACH_NUMBERS(1)
#if GROUPS_AT_ONCE > 1
EACH_NUMBERS(4)
#endif

#define ROWS(groups, numbers)                                                                                          \
    {score_1_##groups##_##numbers, score_2_##groups##_##numbers, score_3_##groups##_##numbers,                         \
     score_4_##groups##_##numbers}
#define TABLE(groups)                                                                                                  \
    {ROWS(groups, HW_KV_F32), ROWS(groups, HW_KV_F16), ROWS(groups, HW_KV_INT8), ROWS(groups, HW_KV_FP8)}
/* [more than one group][numbers][rows - 1] */
static const score_kernel score_kernels[][4][ROW_BLOCK] = {
    TABLE(1),
#if GROUPS_AT_ONCE > 1
    TABLE(4),
#endif
};
#undef TABLE
#undef ROWS
#undef EACH_NUMBERS
#undef INSTANCES
#undef INSTANCE

/* All rows of one head against 16 keys or more; the `next` ones are prefetched once. */
static void score_rows(const hw_attention_tile *tile, int64_t head, const void *const *keys, const void *const *next,
                       int64_t key_stride, int64_t at, int groups, int numbers) {
    int64_t dim = tile->shape->dim;
    const float *q = tile->queries + head * tile->query_floats;
    float *scores = tile->scores + head * tile->rows * HW_SEGMENT + at;
    for (int64_t row = 0; row < tile->rows; row += ROW_BLOCK) {
        int64_t rows = tile->rows - row < ROW_BLOCK ? tile->rows - row : ROW_BLOCK;
        score_kernels[groups > 1][numbers][rows - 1](q + row * dim, keys, row == 0 ? next : keys, key_stride, dim,
                                                     scores + row * HW_SEGMENT);
    }
}

/* Copies 16 keys [dim][16] into the staging buffer as float32, whatever the block size and type. */
static void gather_keys(const hw_attention_tile *tile, int64_t head, int64_t key, int64_t end) {
    const hw_attention_shape *shape = tile->shape;
    int64_t size = shape->block_size, count = end - key < KEY_GROUP ? end - key : KEY_GROUP;
    for (int64_t i = 0; i < KEY_GROUP;) {
        int64_t block, offset, run;
        if (i >= count) {
            for (int64_t d = 0; d < shape->dim; d++)
                for (int64_t j = i; j < KEY_GROUP; j++) tile->gathered[d * KEY_GROUP + j] = 0.0f;
            return;
        }
        block = tile->blocks[(key + i) / size];
        offset = (key + i) % size;
        run = size - offset < count - i ? size - offset : count - i;
        int64_t base = (block * shape->kv_heads + tile->first_head + head) * shape->dim * size + offset;
        for (int64_t d = 0; d < shape->dim; d++) {
            float *out = tile->gathered + d * KEY_GROUP + i;
            int64_t from = base + d * size;
            if (run == KEY_GROUP)
                for (int v = 0; v < GROUP_VECTORS; v++)
                    vf_store(out + v * HW_VL, kv_load(tile->cache.k, from + v * HW_VL, tile->cache.k_numbers));
            else
                for (int64_t j = 0; j < run; j++)
                    out[j] = kv_to_float(tile->cache.k, from + j, tile->cache.k_numbers);
        }
        i += run;
    }
}

static const void *key_address(const hw_attention_tile *tile, int64_t head, int64_t key) {
    const hw_attention_shape *shape = tile->shape;
    int64_t block = tile->blocks[key / shape->block_size], offset = key % shape->block_size;
    int64_t index = (block * shape->kv_heads + tile->first_head + head) * shape->dim * shape->block_size + offset;
    return (const char *)tile->cache.k + kv_bytes(index, tile->cache.k_numbers);
}

/* `groups` runs of 16 keys from `key` on, for all heads of the tile; their keys lie side by side in a block. */
static void score_groups(const hw_attention_tile *tile, int64_t first, int64_t key, int groups) {
    for (int64_t head = 0; head < tile->heads; head++) {
        const void *keys[GROUPS_AT_ONCE], *next[GROUPS_AT_ONCE];
        for (int g = 0; g < groups; g++) {
            int64_t ahead = key + (groups + g) * KEY_GROUP;
            keys[g] = key_address(tile, head, key + g * KEY_GROUP);
            next[g] = ahead < tile->keys ? key_address(tile, head, ahead) : keys[g];
        }
        score_rows(tile, head, keys, next, tile->shape->block_size, key - first, groups, tile->cache.k_numbers);
    }
}

void hw_attention_scores(const hw_attention_tile *tile, int64_t first, int64_t end) {
    int staged = tile->shape->block_size % KEY_GROUP != 0 || !reads_in_place(tile, tile->cache.k_numbers);
    for (int64_t key = first; key < end;) {
        int groups = !staged && end - key > (GROUPS_AT_ONCE - 1) * KEY_GROUP ? GROUPS_AT_ONCE : 1;
        if (staged) {
            const void *keys = tile->gathered;
            for (int64_t head = 0; head < tile->heads; head++) {
                gather_keys(tile, head, key, end);
                score_rows(tile, head, &keys, &keys, KEY_GROUP, key - first, 1, HW_KV_F32);
            }
        } else {
            score_groups(tile, first, key, groups);
        }
        key += groups * KEY_GROUP;
    }
}
