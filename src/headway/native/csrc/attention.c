/* Causal paged attention for a flat batch of any mixture of prompts, chunks and single tokens: plan and work items.
 *
 * A work item is (request, KV heads, tile of queries, range of segments). A row (one query of one head) walks its keys
 * in segments of HW_SEGMENT: scores, maximum, exponentials, weighted sum of V; segments are then folded in order. Both
 * the arithmetic inside a segment and the fold depend only on the row's own keys, so results are the same to the last
 * bit for any batch, chunking, block size, split of items and number of threads. */
#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>

#define TILE_ROWS 48   /* rows (queries x heads of the group) that share one pass over K and V */
#define SPLIT_SEGMENTS 2 /* smallest number of segments worth an item of its own */

typedef struct {
    int32_t request, kv_head, heads; /* heads: KV heads, from kv_head on */
    int32_t first_query, queries;
    int32_t first_segment, last_segment;
    int32_t split; /* index into splits, or -1: this item sees all of its rows' keys */
    int64_t cost;
} work_item;

typedef struct {
    _Atomic int32_t remaining;
    int32_t segments, parts;
    int64_t offset; /* of this tile's partial results, in floats */
} split_tile;

struct hw_attention_plan {
    hw_attention_shape shape;
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t table_stride;
    work_item *items;
    int64_t num_items, item_capacity;
    split_tile *splits;
    int64_t num_splits, split_capacity;
    float *partials;
    int64_t partial_floats, partial_capacity;
};

hw_attention_plan *hw_attention_plan_new(int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size) {
    hw_attention_plan *plan = calloc(1, sizeof *plan);
    if (plan) plan->shape = (hw_attention_shape){heads, kv_heads, heads / kv_heads, dim, block_size};
    return plan;
}

void hw_attention_plan_free(hw_attention_plan *plan) {
    if (!plan) return;
    free(plan->items);
    free(plan->splits);
    free(plan->partials);
    free(plan);
}

static int reserve(void **data, int64_t *capacity, int64_t needed, size_t size) {
    if (needed <= *capacity) return 0;
    int64_t grown = needed + needed / 2 + 16;
    void *moved = realloc(*data, (size_t)grown * size);
    if (!moved) return -1;
    *data = moved;
    *capacity = grown;
    return 0;
}

static int by_cost_descending(const void *a, const void *b) {
    const work_item *x = a, *y = b;
    if (x->cost != y->cost) return x->cost < y->cost ? 1 : -1;
    return x < y ? -1 : 1;
}

static int64_t tile_keys(const hw_attention_plan *plan, const work_item *item) {
    int32_t request = item->request;
    int32_t queries = plan->query_start[request + 1] - plan->query_start[request];
    return plan->seq_lens[request] - queries + item->first_query + item->queries;
}

/* Reading a key costs about as much as computing two rows with it. */
static int64_t cost_of(const hw_attention_plan *plan, const work_item *item, int64_t keys) {
    return keys * item->heads * (item->queries * plan->shape.group + 2);
}

static int add_tile(hw_attention_plan *plan, work_item tile, int64_t largest_item) {
    int64_t keys = tile_keys(plan, &tile), segments = (keys + HW_SEGMENT - 1) / HW_SEGMENT;
    int64_t parts = cost_of(plan, &tile, keys) / largest_item;
    if (parts > segments / SPLIT_SEGMENTS) parts = segments / SPLIT_SEGMENTS;
    if (parts < 1) parts = 1;
    if (reserve((void **)&plan->items, &plan->item_capacity, plan->num_items + parts, sizeof(work_item))) return -1;
    tile.split = -1;
    if (parts > 1) {
        if (reserve((void **)&plan->splits, &plan->split_capacity, plan->num_splits + 1, sizeof(split_tile))) return -1;
        split_tile *split = &plan->splits[plan->num_splits];
        split->segments = (int32_t)segments;
        split->parts = (int32_t)parts;
        split->offset = plan->partial_floats;
        plan->partial_floats += segments * tile.heads * tile.queries * plan->shape.group * (plan->shape.dim + 2);
        tile.split = (int32_t)plan->num_splits++;
    }
    for (int64_t p = 0; p < parts; p++) {
        tile.first_segment = (int32_t)(segments * p / parts);
        tile.last_segment = (int32_t)(segments * (p + 1) / parts);
        tile.cost = cost_of(plan, &tile, (int64_t)(tile.last_segment - tile.first_segment) * HW_SEGMENT);
        if (parts == 1) tile.cost = cost_of(plan, &tile, keys);
        plan->items[plan->num_items++] = tile;
    }
    return 0;
}

int hw_attention_plan_set(hw_attention_plan *plan, int64_t requests, const int32_t *query_start,
                          const int32_t *seq_lens, const int32_t *block_table, int64_t table_stride) {
    plan->query_start = query_start;
    plan->seq_lens = seq_lens;
    plan->block_table = block_table;
    plan->table_stride = table_stride;
    plan->num_items = plan->num_splits = plan->partial_floats = 0;
    int32_t tile_queries = (int32_t)(TILE_ROWS / plan->shape.group);
    if (tile_queries < 1) tile_queries = 1;

    /* A single query reads K and V faster than it computes: with requests enough for all threads, it takes all KV heads
     * at once, which are neighbours in memory. */
    int32_t kv_heads = (int32_t)plan->shape.kv_heads;
    int32_t together = plan->shape.group <= 4 && requests >= 4 * hw_threads() ? kv_heads : 1;
    int64_t total = 0, largest = INT64_MAX;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t r = 0; r < requests; r++) {
            int32_t queries = query_start[r + 1] - query_start[r];
            for (int32_t q = 0; q < queries; q += tile_queries) {
                work_item tile = {.request = r, .heads = queries == 1 ? together : 1, .first_query = q};
                tile.queries = queries - q < tile_queries ? queries - q : tile_queries;
                if (pass == 0) total += cost_of(plan, &tile, tile_keys(plan, &tile)) * kv_heads / tile.heads;
                for (tile.kv_head = 0; pass == 1 && tile.kv_head < kv_heads; tile.kv_head += tile.heads)
                    if (add_tile(plan, tile, largest)) return -1;
            }
        }
        if (hw_threads() > 1) largest = total / (hw_threads() * 4) + 1;
    }
    if (reserve((void **)&plan->partials, &plan->partial_capacity, plan->partial_floats, sizeof(float))) return -1;
    qsort(plan->items, (size_t)plan->num_items, sizeof(work_item), by_cost_descending);
    return 0;
}

typedef struct {
    hw_attention_plan *plan;
    const float *q;
    const hw_kv_cache *cache;
    float *out;
} run_job;

/* Adds one segment's (maximum, sum, weighted V) to the running ones. */
static void fold(float *top, float *sum, float *acc, float seg_top, float seg_sum, const float *seg_acc, int64_t dim) {
    if (seg_sum == 0.0f) return; /* nothing to see; the sum of a NaN is not 0 */
    float new_top = seg_top > *top ? seg_top : *top;
    float keep = hw_exp(*top - new_top), add = hw_exp(seg_top - new_top);
    *sum = *sum * keep + seg_sum * add;
    *top = new_top;
    int64_t d = 0;
    vf keep_v = vf_set1(keep), add_v = vf_set1(add);
    for (; d + HW_VL <= dim; d += HW_VL)
        vf_store(acc + d, vf_fma(vf_load(acc + d), keep_v, vf_mul(vf_load(seg_acc + d), add_v)));
    for (; d < dim; d++) acc[d] = acc[d] * keep + seg_acc[d] * add;
}

static void write_rows(const run_job *job, const work_item *item, const float *acc, const float *sum) {
    const hw_attention_shape *shape = &job->plan->shape;
    int64_t token = job->plan->query_start[item->request] + item->first_query, rows = item->queries * shape->group;
    for (int64_t row = 0; row < item->heads * rows; row++) {
        int64_t query = row % rows / shape->group, d = 0;
        int64_t head = (item->kv_head + row / rows) * shape->group + row % shape->group;
        float *out = job->out + ((token + query) * shape->heads + head) * shape->dim;
        float inverse = 1.0f / sum[row];
        const float *in = acc + row * shape->dim;
        for (; d + HW_VL <= shape->dim; d += HW_VL) vf_store(out + d, vf_mul(vf_load(in + d), vf_set1(inverse)));
        for (; d < shape->dim; d++) out[d] = in[d] * inverse;
    }
}

/* Partial results of a split tile: per segment [rows] maxima, [rows] sums, [rows][dim] weighted V. */
static void finish_split(const run_job *job, const work_item *item, float *workspace) {
    hw_attention_plan *plan = job->plan;
    split_tile *split = &plan->splits[item->split];
    if (atomic_fetch_sub_explicit(&split->remaining, 1, memory_order_acq_rel) != 1) return;
    int64_t rows = item->heads * item->queries * plan->shape.group, dim = plan->shape.dim, stride = rows * (dim + 2);
    float *base = plan->partials + split->offset;
    memcpy(workspace, base, (size_t)stride * sizeof(float));
    for (int64_t s = 1; s < split->segments; s++) {
        const float *part = base + s * stride;
        for (int64_t r = 0; r < rows; r++)
            fold(workspace + r, workspace + rows + r, workspace + 2 * rows + r * dim, part[r], part[rows + r],
                 part + 2 * rows + r * dim, dim);
    }
    write_rows(job, item, workspace + 2 * rows, workspace + rows);
}

static void attention_task(void *context, int64_t index) {
    const run_job *job = context;
    hw_attention_plan *plan = job->plan;
    const hw_attention_shape *shape = &plan->shape;
    const work_item *item = &plan->items[index];
    int64_t head_rows = item->queries * shape->group, rows = head_rows * item->heads;
    int64_t dim = shape->dim, stride = rows * (dim + 2), keys = tile_keys(plan, item);
    hw_attention_tile tile;
    float *running = hw_attention_tile_init(&tile, shape, head_rows, item->heads, 2 * stride);
    float *segment = running + stride;
    tile.cache = *job->cache;
    tile.blocks = plan->block_table + item->request * plan->table_stride;
    tile.first_head = item->kv_head;
    tile.first_limit = keys - item->queries + 1;
    tile.keys = keys;
    int64_t token = plan->query_start[item->request] + item->first_query;
    hw_attention_pack_queries(&tile, job->q + (token * shape->heads + item->kv_head * shape->group) * dim);

    for (int64_t s = item->first_segment; s < item->last_segment; s++) {
        float *target = s == 0 ? running : segment;
        if (item->split >= 0) target = plan->partials + plan->splits[item->split].offset + s * stride;
        hw_attention_segment(&tile, s, target, target + rows, target + 2 * rows);
        if (item->split >= 0 || s == 0) continue;
        for (int64_t r = 0; r < rows; r++)
            fold(running + r, running + rows + r, running + 2 * rows + r * dim, segment[r], segment[rows + r],
                 segment + 2 * rows + r * dim, dim);
    }
    if (item->split >= 0)
        finish_split(job, item, running);
    else
        write_rows(job, item, running + 2 * rows, running + rows);
}

void hw_attention_run(hw_attention_plan *plan, const float *q, const hw_kv_cache *cache, float *out) {
    run_job job = {plan, q, cache, out};
    for (int64_t i = 0; i < plan->num_splits; i++) atomic_store(&plan->splits[i].remaining, plan->splits[i].parts);
    hw_parallel(attention_task, &job, plan->num_items);
}

void hw_attend(hw_attention_plan *plan, const hw_heads *layer, const float *qkv, const int64_t *positions,
               const int64_t *slots, int64_t tokens, float *out) {
    float *q = hw_scratch(HW_SCRATCH_QUERIES, (size_t)(tokens * layer->heads * layer->dim) * sizeof(float));
    hw_rope_write_kv(layer, qkv, positions, slots, tokens, q);
    hw_attention_run(plan, q, layer->cache, out);
}
