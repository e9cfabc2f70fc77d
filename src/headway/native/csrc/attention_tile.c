/* One tile of query rows against one segment of paged keys and values.
 *
 * Scores are vectorised over keys (K is transposed inside a block) and run over the head dimension in order; the
 * weighted sum is vectorised over the head dimension and runs over keys in order. */
#include "attention.h"

#define ROW_BLOCK 4
#define KEY_GROUP 16
#define GROUP_VECTORS (KEY_GROUP / HW_VL)
#define VALUE_RUN 64 /* keys whose values are reused from the L1 cache by all row blocks */
#define CACHE_LINE 64

#if defined(HW_AVX512)
#define GROUPS_AT_ONCE 4
#else
#define GROUPS_AT_ONCE 1
#endif

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* With few rows a float16 cache is read in place; many rows repay converting it to float32 once. */
static int reads_halves(const hw_attention_tile *tile) { return tile->half && tile->rows <= ROW_BLOCK; }

float *hw_attention_tile_init(hw_attention_tile *tile, const hw_attention_shape *shape, int64_t rows, int64_t extra) {
    int64_t queries = round_up(rows, ROW_BLOCK) * shape->dim, scores = rows * HW_SEGMENT;
    int64_t gathered = round_up(VALUE_RUN * shape->dim, 16);
    queries = round_up(queries, 16);
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
    int direct = shape->block_size % KEY_GROUP == 0 && reads_halves(tile);
    float scale = 1.0f / sqrtf((float)shape->dim), unscale = direct ? HW_HALF_UNSCALE : 1.0f;
    for (int64_t row = 0; row < tile->rows; row++) {
        const float *in = q + (row / shape->group * shape->heads + row % shape->group) * shape->dim;
        float *out = tile->queries + row / ROW_BLOCK * ROW_BLOCK * shape->dim + row % ROW_BLOCK;
        for (int64_t d = 0; d < shape->dim; d++) out[d * ROW_BLOCK] = in[d] * scale * unscale;
    }
}

HW_INLINE vf load_as(const void *base, int64_t index, const int half) {
    return half ? vf_load_half_scaled((const uint16_t *)base + index) : vf_load((const float *)base + index);
}

/* acc[r] += k * q[r] for the rows whose packed queries start at q. */
HW_INLINE void score_step(vf *acc, int64_t stride, vf k, const float *q, const int rows) {
#if defined(HW_NEON)
    float32x4_t lanes = vld1q_f32(q);
    acc[0] = vfmaq_laneq_f32(acc[0], k, lanes, 0);
    if (rows > 1) acc[stride] = vfmaq_laneq_f32(acc[stride], k, lanes, 1);
    if (rows > 2) acc[2 * stride] = vfmaq_laneq_f32(acc[2 * stride], k, lanes, 2);
    if (rows > 3) acc[3 * stride] = vfmaq_laneq_f32(acc[3 * stride], k, lanes, 3);
#else
    HW_UNROLL
    for (int r = 0; r < rows; r++) acc[r * stride] = vf_fma_n(acc[r * stride], k, q[r]);
#endif
}

/* scores[r][0 .. 16 * groups) = q[r] . k for `rows` packed queries and `groups` runs of 16 keys; `next` are the keys to
 * come, brought into the cache meanwhile. */
HW_INLINE void score_block(const float *q, const void *const *keys, const void *const *next, int64_t key_stride,
                           int64_t dim, float *scores, const int rows, const int groups, const int half) {
    enum { WIDTH = GROUPS_AT_ONCE * GROUP_VECTORS };
    vf acc[ROW_BLOCK][WIDTH];
    int64_t row_bytes = key_stride * (half ? 2 : 4);
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) acc[r][v] = vf_set1(0.0f);
    }
    for (int64_t d = 0; d < dim; d++) {
        if (next) {
            HW_UNROLL
            for (int g = 0; g < groups; g++) __builtin_prefetch((const char *)next[g] + d * row_bytes);
        }
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) {
            vf k = load_as(keys[v / GROUP_VECTORS], d * key_stride + v % GROUP_VECTORS * HW_VL, half);
            score_step(&acc[0][v], WIDTH, k, q + d * ROW_BLOCK, rows);
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < groups * GROUP_VECTORS; v++) vf_store(scores + r * HW_SEGMENT + v * HW_VL, acc[r][v]);
    }
}

HW_INLINE void score_rows(const hw_attention_tile *tile, const void *const *keys, const void *const *next,
                          int64_t key_stride, float *scores, const int groups, const int half) {
    int64_t dim = tile->shape->dim, row = 0;
    for (; row + ROW_BLOCK <= tile->rows; row += ROW_BLOCK)
        if (row == 0 && next)
            score_block(tile->queries, keys, next, key_stride, dim, scores, ROW_BLOCK, groups, half);
        else
            score_block(tile->queries + row * dim, keys, NULL, key_stride, dim, scores + row * HW_SEGMENT, ROW_BLOCK,
                        groups, half);
    const float *q = tile->queries + row * dim;
    float *s = scores + row * HW_SEGMENT;
    if (!next) next = keys;
    switch (tile->rows - row) {
    case 1: score_block(q, keys, next, key_stride, dim, s, 1, groups, half); break;
    case 2: score_block(q, keys, next, key_stride, dim, s, 2, groups, half); break;
    case 3: score_block(q, keys, next, key_stride, dim, s, 3, groups, half); break;
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
    int64_t key = first;
    if (shape->block_size % KEY_GROUP != 0 || (tile->half && !reads_halves(tile))) {
        const void *staged = tile->gathered;
        for (; key < end; key += KEY_GROUP) {
            gather_keys(tile, key, end);
            score_rows(tile, &staged, NULL, KEY_GROUP, tile->scores + (key - first), 1, 0);
        }
        return;
    }
    while (key < end) {
        const void *keys[GROUPS_AT_ONCE], *next[GROUPS_AT_ONCE];
        int groups = end - key > (GROUPS_AT_ONCE - 1) * KEY_GROUP ? GROUPS_AT_ONCE : 1;
        float *scores = tile->scores + (key - first);
        for (int g = 0; g < groups; g++) {
            int64_t ahead = key + (groups + g) * KEY_GROUP;
            keys[g] = key_address(tile, key + g * KEY_GROUP);
            next[g] = ahead < tile->keys ? key_address(tile, ahead) : keys[g];
        }
        if (groups == 1 && tile->half)
            score_rows(tile, keys, next, shape->block_size, scores, 1, 1);
        else if (groups == 1)
            score_rows(tile, keys, next, shape->block_size, scores, 1, 0);
        else if (tile->half)
            score_rows(tile, keys, next, shape->block_size, scores, GROUPS_AT_ONCE, 1);
        else
            score_rows(tile, keys, next, shape->block_size, scores, GROUPS_AT_ONCE, 0);
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
    vf largest = vf_set1(*top);
    for (int64_t i = 0; i < used; i += KEY_GROUP) {
        vf e[GROUP_VECTORS];
        HW_UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) e[v] = vf_sub(vf_load(scores + i + v * HW_VL), largest);
        vf_exp_many(e, GROUP_VECTORS);
        HW_UNROLL
        for (int v = 0; v < GROUP_VECTORS; v++) {
            vf_store(scores + i + v * HW_VL, e[v]);
            total[v] = vf_add(total[v], e[v]);
        }
    }
    HW_UNROLL
    for (int v = 1; v < GROUP_VECTORS; v++) total[0] = vf_add(total[0], total[v]);
    *sum = vf_reduce_add(total[0]);
}

/* Up to VALUE_RUN consecutive keys' values, in contiguous pieces, and where the next run's pieces are. */
typedef struct {
    int pieces;
    const void *values[VALUE_RUN], *next[VALUE_RUN];
    int64_t count[VALUE_RUN];
} value_run;

/* Brings the part [first, last) / whole of the next run into the cache. */
HW_INLINE void prefetch_share(const value_run *run, int64_t first, int64_t last, int64_t whole, const int half) {
    for (int piece = 0; piece < run->pieces; piece++) {
        int64_t bytes = run->count[piece] * whole * (half ? 2 : 4);
        if (run->next[piece])
            for (int64_t at = bytes * first / whole; at < bytes * last / whole; at += CACHE_LINE)
                __builtin_prefetch((const char *)run->next[piece] + at);
    }
}

/* acc[r][0 .. vectors * VL) += sum over the run's keys of weights[r][key] * values[key][offset ...] */
HW_INLINE void weigh_block(const float *weights, const value_run *run, int64_t offset, int64_t dim, float *acc,
                           const int rows, const int vectors, const int half) {
    vf sum[ROW_BLOCK][4];
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) sum[r][v] = vf_load(acc + r * dim + v * HW_VL);
    }
    for (int piece = 0; piece < run->pieces; piece++) {
        const void *values = run->values[piece];
        int64_t key = 0, count = run->count[piece];
#if defined(HW_NEON)
#define STEP(lane)                                                                                                     \
    HW_UNROLL                                                                                                          \
    for (int v = 0; v < vectors; v++) {                                                                                \
        vf value = load_as(values, offset + (key + lane) * dim + v * HW_VL, half);                                     \
        HW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) sum[r][v] = vfmaq_laneq_f32(sum[r][v], value, w[r], lane);                      \
    }
        for (; key + 4 <= count; key += 4) {
            vf w[ROW_BLOCK];
            HW_UNROLL
            for (int r = 0; r < rows; r++) w[r] = vf_load(weights + r * HW_SEGMENT + key);
            STEP(0)
            STEP(1)
            STEP(2)
            STEP(3)
        }
#undef STEP
#endif
        for (; key < count; key++) {
            vf value[4];
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

HW_INLINE void weigh_row_block(const float *weights, const value_run *run, int64_t dim, float *acc, const int rows,
                               const int half, const int prefetch) {
    int64_t d = 0;
    for (; d + 4 * HW_VL <= dim; d += 4 * HW_VL) {
        if (prefetch) prefetch_share(run, d, d + 4 * HW_VL, dim, half);
        weigh_block(weights, run, d, dim, acc + d, rows, 4, half);
    }
    for (; d + HW_VL <= dim; d += HW_VL) weigh_block(weights, run, d, dim, acc + d, rows, 1, half);
    for (; d < dim; d++)
        for (int r = 0; r < rows; r++)
            acc[r * dim + d] = weigh_scalar(weights + r * HW_SEGMENT, run, d, dim, acc[r * dim + d], half);
}

HW_INLINE void weigh_rows(const hw_attention_tile *tile, const float *weights, const value_run *run, float *acc,
                          const int half) {
    int64_t dim = tile->shape->dim, row = 0;
    for (; row + ROW_BLOCK <= tile->rows; row += ROW_BLOCK)
        weigh_row_block(weights + row * HW_SEGMENT, run, dim, acc + row * dim, ROW_BLOCK, half, row == 0);
    weights += row * HW_SEGMENT;
    acc += row * dim;
    switch (tile->rows - row) {
    case 1: weigh_row_block(weights, run, dim, acc, 1, half, row == 0); break;
    case 2: weigh_row_block(weights, run, dim, acc, 2, half, row == 0); break;
    case 3: weigh_row_block(weights, run, dim, acc, 3, half, row == 0); break;
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

/* Describes the values of keys [key, key + count) where they lie, or as copied to the staging buffer. */
static void find_values(const hw_attention_tile *tile, int64_t key, int64_t count, int direct, value_run *run) {
    int64_t size = tile->shape->block_size, dim = tile->shape->dim;
    run->pieces = 0;
    for (int64_t i = 0; i < count;) {
        int64_t part = size - (key + i) % size < count - i ? size - (key + i) % size : count - i;
        int64_t ahead = key + i + VALUE_RUN;
        const void *values = value_address(tile, key + i);
        if (direct) {
            run->values[run->pieces] = values;
            run->next[run->pieces] = ahead < tile->keys ? value_address(tile, ahead) : NULL;
            run->count[run->pieces++] = part;
        } else {
            stage_values(values, tile->half, part * dim, tile->gathered + i * dim);
        }
        i += part;
    }
    if (!direct) {
        run->pieces = 1;
        run->values[0] = tile->gathered;
        run->next[0] = NULL;
        run->count[0] = count;
    }
}

static void weigh_segment(const hw_attention_tile *tile, int64_t first, int64_t end, float *acc) {
    int direct = tile->shape->block_size >= KEY_GROUP && (!tile->half || reads_halves(tile));
    if (direct && tile->half && HW_HALF_UNSCALE != 1.0f)
        for (int64_t i = 0; i < tile->rows * HW_SEGMENT; i += HW_VL)
            vf_store(tile->scores + i, vf_mul(vf_load(tile->scores + i), vf_set1(HW_HALF_UNSCALE)));
    for (int64_t key = first; key < end; key += VALUE_RUN) {
        value_run run;
        find_values(tile, key, end - key < VALUE_RUN ? end - key : VALUE_RUN, direct, &run);
        if (direct && tile->half)
            weigh_rows(tile, tile->scores + (key - first), &run, acc, 1);
        else
            weigh_rows(tile, tile->scores + (key - first), &run, acc, 0);
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
