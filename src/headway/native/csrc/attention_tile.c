/* One tile of query rows against one segment of paged keys and values.
 *
 * Scores are vectorised over keys (K is transposed inside a block) and run over the head dimension in order; the
 * weighted sum is vectorised over the head dimension and runs over keys in order. */
#include "attention.h"

#define ROW_BLOCK 4
#define KEY_GROUP 16
#define GROUP_VECTORS (KEY_GROUP / HW_VL)
#define VALUE_RUN 64 /* keys whose values are reused from the L1 cache by all row blocks */

#if defined(HW_AVX512)
#define GROUPS_AT_ONCE 4
#else
#define GROUPS_AT_ONCE 1
#endif

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

float *hw_attention_tile_init(hw_attention_tile *tile, const hw_attention_shape *shape, int64_t rows, int64_t extra) {
    int64_t queries = round_up(rows * shape->dim, 16), scores = rows * HW_SEGMENT;
    int64_t gathered = round_up(VALUE_RUN * shape->dim, 16);
    float *base = hw_scratch(HW_SCRATCH_ATTENTION, (size_t)(queries + scores + gathered + extra) * sizeof(float));
    tile->shape = shape;
    tile->rows = rows;
    tile->queries = base;
    tile->scores = base + queries;
    tile->gathered = tile->scores + scores;
    return tile->gathered + gathered;
}

void hw_attention_pack_queries(hw_attention_tile *tile, const float *q) {
    const hw_attention_shape *shape = tile->shape;
    float scale = 1.0f / sqrtf((float)shape->dim);
    for (int64_t row = 0; row < tile->rows; row++) {
        const float *in = q + (row / shape->group * shape->heads + row % shape->group) * shape->dim;
        int64_t block = row / ROW_BLOCK * ROW_BLOCK;
        int64_t width = tile->rows - block < ROW_BLOCK ? tile->rows - block : ROW_BLOCK;
        float *out = tile->queries + block * shape->dim + row % ROW_BLOCK;
        for (int64_t d = 0; d < shape->dim; d++) out[d * width] = in[d] * scale;
    }
}

HW_INLINE vf load_as(const void *base, int64_t index, const int half) {
    return half ? vf_load_half((const uint16_t *)base + index) : vf_load((const float *)base + index);
}

/* scores[r][0 .. 16 * groups) = q[r] . k for `rows` packed queries and `groups` runs of 16 keys. */
HW_INLINE void score_block(const float *q, const void *const *keys, int64_t key_stride, int64_t dim, float *scores,
                           const int rows, const int groups, const int half) {
    vf acc[ROW_BLOCK][GROUPS_AT_ONCE * GROUP_VECTORS];
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) acc[r][v] = vf_set1(0.0f);
    }
    for (int64_t d = 0; d < dim; d++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) {
            vf k = load_as(keys[v / GROUP_VECTORS], d * key_stride + v % GROUP_VECTORS * HW_VL, half);
            HW_UNROLL
            for (int r = 0; r < rows; r++) acc[r][v] = vf_fma_n(acc[r][v], k, q[d * rows + r]);
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) vf_store(scores + r * HW_SEGMENT + v * HW_VL, acc[r][v]);
    }
}

HW_INLINE void score_rows(const hw_attention_tile *tile, const void *const *keys, int64_t key_stride, float *scores,
                          const int groups, const int half) {
    int64_t dim = tile->shape->dim;
    for (int64_t row = 0; row < tile->rows; row += ROW_BLOCK) {
        const float *q = tile->queries + row * dim;
        float *s = scores + row * HW_SEGMENT;
        switch (tile->rows - row) {
        case 1: score_block(q, keys, key_stride, dim, s, 1, groups, half); break;
        case 2: score_block(q, keys, key_stride, dim, s, 2, groups, half); break;
        case 3: score_block(q, keys, key_stride, dim, s, 3, groups, half); break;
        default: score_block(q, keys, key_stride, dim, s, 4, groups, half);
        }
    }
}

/* Copies 16 keys [dim][16] into the staging buffer as float32, whatever the block size and type. */
static void gather_keys(const hw_attention_tile *tile, int64_t key, int64_t end) {
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
        int64_t base = (block * shape->kv_heads + tile->kv_head) * shape->dim * size + offset;
        for (int64_t d = 0; d < shape->dim; d++) {
            float *out = tile->gathered + d * KEY_GROUP + i;
            if (run == KEY_GROUP)
                for (int v = 0; v < GROUP_VECTORS; v++)
                    vf_store(out + v * HW_VL,
                             tile->half ? vf_load_half((const uint16_t *)tile->k_cache + base + d * size + v * HW_VL)
                                        : vf_load((const float *)tile->k_cache + base + d * size + v * HW_VL));
            else if (tile->half)
                for (int64_t j = 0; j < run; j++)
                    out[j] = hw_half_to_float(((const uint16_t *)tile->k_cache)[base + d * size + j]);
            else
                for (int64_t j = 0; j < run; j++) out[j] = ((const float *)tile->k_cache)[base + d * size + j];
        }
        i += run;
    }
}

static const void *key_address(const hw_attention_tile *tile, int64_t key) {
    const hw_attention_shape *shape = tile->shape;
    int64_t block = tile->blocks[key / shape->block_size], offset = key % shape->block_size;
    int64_t index = (block * shape->kv_heads + tile->kv_head) * shape->dim * shape->block_size + offset;
    return tile->half ? (const void *)((const uint16_t *)tile->k_cache + index)
                      : (const void *)((const float *)tile->k_cache + index);
}

static void score_segment(const hw_attention_tile *tile, int64_t first, int64_t end) {
    const hw_attention_shape *shape = tile->shape;
    int direct = shape->block_size % KEY_GROUP == 0 && (!tile->half || tile->rows <= ROW_BLOCK);
    int64_t key = first;
    if (!direct) {
        const void *staged = tile->gathered;
        for (; key < end; key += KEY_GROUP) {
            gather_keys(tile, key, end);
            score_rows(tile, &staged, KEY_GROUP, tile->scores + (key - first), 1, 0);
        }
        return;
    }
    while (key < end) {
        const void *keys[GROUPS_AT_ONCE];
        int groups = end - key > (GROUPS_AT_ONCE - 1) * KEY_GROUP ? GROUPS_AT_ONCE : 1;
        float *scores = tile->scores + (key - first);
        for (int g = 0; g < groups; g++) keys[g] = key_address(tile, key + g * KEY_GROUP);
        if (groups == 1 && tile->half)
            score_rows(tile, keys, shape->block_size, scores, 1, 1);
        else if (groups == 1)
            score_rows(tile, keys, shape->block_size, scores, 1, 0);
        else if (tile->half)
            score_rows(tile, keys, shape->block_size, scores, GROUPS_AT_ONCE, 1);
        else
            score_rows(tile, keys, shape->block_size, scores, GROUPS_AT_ONCE, 0);
        key += groups * KEY_GROUP;
    }
}

/* Turns a row of scores into exponentials in place; keys the row may not see become exactly 0. */
static void softmax_row(float *scores, int64_t visible, int64_t padded, float *top, float *sum) {
    int64_t used = round_up(visible, KEY_GROUP);
    for (int64_t i = visible; i < used; i++) scores[i] = -INFINITY;
    for (int64_t i = used; i < padded; i++) scores[i] = 0.0f;
    *top = -INFINITY;
    *sum = 0.0f;
    if (visible == 0) return;
    vf m[GROUP_VECTORS], total[GROUP_VECTORS];
    HW_UNROLL
    for (int v = 0; v < GROUP_VECTORS; v++) m[v] = vf_load(scores + v * HW_VL);
    for (int64_t i = KEY_GROUP; i < used; i += KEY_GROUP) {
        HW_UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) m[v] = vf_max(m[v], vf_load(scores + i + v * HW_VL));
    }
    HW_UNROLL
    for (int v = 1; v < GROUP_VECTORS; v++) m[0] = vf_max(m[0], m[v]);
    *top = vf_reduce_max(m[0]);
    HW_UNROLL
    for (int v = 0; v < GROUP_VECTORS; v++) total[v] = vf_set1(0.0f);
    for (int64_t i = 0; i < used; i += KEY_GROUP) {
        HW_UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) {
            vf e = vf_exp(vf_sub(vf_load(scores + i + v * HW_VL), vf_set1(*top)));
            vf_store(scores + i + v * HW_VL, e);
            total[v] = vf_add(total[v], e);
        }
    }
    HW_UNROLL
    for (int v = 1; v < GROUP_VECTORS; v++) total[0] = vf_add(total[0], total[v]);
    *sum = vf_reduce_add(total[0]);
}

/* acc[r][0 .. vectors * VL) += sum over `count` keys of weights[r][key] * values[key][...] */
HW_INLINE void weigh_block(const float *weights, const void *values, int64_t offset, int64_t dim, int64_t count,
                           float *acc, const int rows, const int vectors, const int half) {
    vf sum[ROW_BLOCK][4];
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) sum[r][v] = vf_load(acc + r * dim + v * HW_VL);
    }
    for (int64_t key = 0; key < count; key++) {
        vf value[4];
        HW_UNROLL
        for (int v = 0; v < vectors; v++) value[v] = load_as(values, offset + key * dim + v * HW_VL, half);
        HW_UNROLL
        for (int r = 0; r < rows; r++) {
            float w = weights[r * HW_SEGMENT + key];
            HW_UNROLL
            for (int v = 0; v < vectors; v++) sum[r][v] = vf_fma_n(sum[r][v], value[v], w);
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) vf_store(acc + r * dim + v * HW_VL, sum[r][v]);
    }
}

HW_INLINE void weigh_row_block(const float *weights, const void *values, int64_t dim, int64_t count, float *acc,
                               const int rows, const int half) {
    int64_t d = 0;
    for (; d + 4 * HW_VL <= dim; d += 4 * HW_VL) weigh_block(weights, values, d, dim, count, acc + d, rows, 4, half);
    for (; d + HW_VL <= dim; d += HW_VL) weigh_block(weights, values, d, dim, count, acc + d, rows, 1, half);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++) {
            float sum = acc[r * dim + d];
            for (int64_t key = 0; key < count; key++) {
                float value = half ? hw_half_to_float(((const uint16_t *)values)[key * dim + d])
                                   : ((const float *)values)[key * dim + d];
                sum += weights[r * HW_SEGMENT + key] * value;
            }
            acc[r * dim + d] = sum;
        }
}

HW_INLINE void weigh_rows(const hw_attention_tile *tile, const float *weights, const void *values, int64_t count,
                          float *acc, const int half) {
    int64_t dim = tile->shape->dim;
    for (int64_t row = 0; row < tile->rows; row += ROW_BLOCK) {
        const float *w = weights + row * HW_SEGMENT;
        float *a = acc + row * dim;
        switch (tile->rows - row) {
        case 1: weigh_row_block(w, values, dim, count, a, 1, half); break;
        case 2: weigh_row_block(w, values, dim, count, a, 2, half); break;
        case 3: weigh_row_block(w, values, dim, count, a, 3, half); break;
        default: weigh_row_block(w, values, dim, count, a, 4, half);
        }
    }
}

static const void *value_address(const hw_attention_tile *tile, int64_t key) {
    const hw_attention_shape *shape = tile->shape;
    int64_t block = tile->blocks[key / shape->block_size], offset = key % shape->block_size;
    int64_t index = ((block * shape->kv_heads + tile->kv_head) * shape->block_size + offset) * shape->dim;
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

static void weigh_segment(const hw_attention_tile *tile, int64_t first, int64_t end, float *acc) {
    const hw_attention_shape *shape = tile->shape;
    int64_t size = shape->block_size;
    int direct = size >= KEY_GROUP && (!tile->half || tile->rows <= ROW_BLOCK);
    for (int64_t key = first; key < end;) {
        int64_t run = end - key < VALUE_RUN ? end - key : VALUE_RUN;
        if (direct) {
            int64_t in_block = size - key % size;
            if (run > in_block) run = in_block;
            if (tile->half)
                weigh_rows(tile, tile->scores + (key - first), value_address(tile, key), run, acc, 1);
            else
                weigh_rows(tile, tile->scores + (key - first), value_address(tile, key), run, acc, 0);
        } else {
            for (int64_t i = 0; i < run;) {
                int64_t part = size - (key + i) % size < run - i ? size - (key + i) % size : run - i;
                stage_values(value_address(tile, key + i), tile->half, part * shape->dim,
                             tile->gathered + i * shape->dim);
                i += part;
            }
            weigh_rows(tile, tile->scores + (key - first), tile->gathered, run, acc, 0);
        }
        key += run;
    }
}

void hw_attention_segment(hw_attention_tile *tile, int64_t segment, float *top, float *sum, float *acc) {
    int64_t first = segment * HW_SEGMENT, end = first + HW_SEGMENT < tile->keys ? first + HW_SEGMENT : tile->keys;
    int64_t padded = round_up(end - first, KEY_GROUP);
    score_segment(tile, first, end);
    for (int64_t row = 0; row < tile->rows; row++) {
        int64_t visible = tile->first_limit + row / tile->shape->group - first;
        if (visible > end - first) visible = end - first;
        softmax_row(tile->scores + row * HW_SEGMENT, visible < 0 ? 0 : visible, padded, top + row, sum + row);
    }
    memset(acc, 0, (size_t)(tile->rows * tile->shape->dim) * sizeof(float));
    weigh_segment(tile, first, end, acc);
}
