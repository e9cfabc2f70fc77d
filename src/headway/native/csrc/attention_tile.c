/* One tile of query rows against one segment of paged keys and values: pack the queries, scores, softmax, sum. */
#include "attention_blocks.h"

float *hw_attention_tile_init(hw_attention_tile *tile, const hw_attention_shape *shape, int64_t rows, int64_t heads,
                              int64_t extra) {
    int64_t queries = round_up(round_up(rows, ROW_BLOCK) * shape->dim, 16), scores = rows * heads * HW_SEGMENT;
    int64_t gathered = round_up(VALUE_RUN * shape->dim, 16);
    size_t floats = (size_t)(queries * heads + scores + gathered + HW_SEGMENT + extra);
    float *base = hw_scratch(HW_SCRATCH_ATTENTION, floats * sizeof(float));
    tile->shape = shape;
    tile->rows = rows;
    tile->heads = heads;
    tile->query_floats = queries;
    tile->queries = base;
    tile->scores = base + queries * heads;
    tile->gathered = tile->scores + scores;
    tile->scales = tile->gathered + gathered;
    return tile->scales + HW_SEGMENT;
}

void hw_attention_pack_queries(hw_attention_tile *tile, const float *q) {
    const hw_attention_shape *shape = tile->shape;
    int direct = shape->block_size % KEY_GROUP == 0 && tile->cache.k_numbers == HW_KV_F16 &&
                 reads_in_place(tile, HW_KV_F16);
    float scale = 1.0f / sqrtf((float)shape->dim), unscale = direct ? HW_HALF_UNSCALE : 1.0f;
    for (int64_t head = 0; head < tile->heads; head++)
        for (int64_t row = 0; row < tile->rows; row++) {
            int64_t query = row / shape->group, q_head = head * shape->group + row % shape->group;
            const float *in = q + (query * shape->heads + q_head) * shape->dim;
            float *out = tile->queries + head * tile->query_floats + row / ROW_BLOCK * ROW_BLOCK * shape->dim;
            for (int64_t d = 0; d < shape->dim; d++) out[d * ROW_BLOCK + row % ROW_BLOCK] = in[d] * scale * unscale;
        }
}

void hw_attention_scale(const hw_attention_tile *tile, int64_t first, int64_t end, int part) {
    const hw_attention_shape *shape = tile->shape;
    int64_t size = shape->block_size, count = end - first, padded = round_up(count, KEY_GROUP);
    for (int64_t i = count; i < padded; i++) tile->scales[i] = 0.0f;
    for (int64_t head = 0; head < tile->heads; head++) {
        for (int64_t i = 0; i < count;) {
            int64_t offset = (first + i) % size, run = size - offset < count - i ? size - offset : count - i;
            int64_t block = tile->blocks[(first + i) / size];
            const uint16_t *in =
                tile->cache.scales + ((block * shape->kv_heads + tile->first_head + head) * size + offset) * 2 + part;
            for (int64_t j = 0; j < run; j++) tile->scales[i + j] = hw_half_to_float(in[2 * j]);
            i += run;
        }
        for (int64_t row = 0; row < tile->rows; row++) {
            float *scores = tile->scores + (head * tile->rows + row) * HW_SEGMENT;
            for (int64_t i = 0; i < padded; i += HW_VL)
                vf_store(scores + i, vf_mul(vf_load(scores + i), vf_load(tile->scales + i)));
        }
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

void hw_attention_segment(hw_attention_tile *tile, int64_t segment, float *top, float *sum, float *acc) {
    int64_t first = segment * HW_SEGMENT, end = first + HW_SEGMENT < tile->keys ? first + HW_SEGMENT : tile->keys;
    int64_t padded = round_up(end - first, KEY_GROUP), rows = tile->heads * tile->rows;
    hw_attention_scores(tile, first, end);
    if (tile->cache.scales) hw_attention_scale(tile, first, end, 0);
    for (int64_t row = 0; row < rows; row++) {
        int64_t visible = tile->first_limit + row % tile->rows / tile->shape->group - first;
        if (visible > end - first) visible = end - first;
        softmax_row(tile->scores + row * HW_SEGMENT, visible < 0 ? 0 : visible, padded, top + row, sum + row);
    }
    memset(acc, 0, (size_t)(rows * tile->shape->dim) * sizeof(float));
    if (tile->cache.scales) hw_attention_scale(tile, first, end, 1);
    hw_attention_weigh(tile, first, end, acc);
}
