/* y = x Wᵀ + bias with weights of 8 or 4 bits and activations quantised per (row, group of 64) inside the call.
 *
 * Work items are (block of rows) x (run of tiles): a tile's weights stay in the L1 cache while the rows pass by. */
#include "headway.h"
#include "int8_kernels.h"

#define ROW_BLOCK 96                /* rows per item: their int8 values stay in the L2 cache */
#define ITEM_MACS (1 << 19)         /* smallest useful item */
#define PARALLEL_QUANTISE (1 << 14) /* below this many activations one thread quantises them */
#define QUANTISE_ROWS 8

typedef struct {
    const float *x, *bias;
    const uint8_t *packed; /* the first record */
    float *y;
    int64_t m, k, n, tiles, tiles_per_item, row_blocks, row_block;
    int is_int4;
    hw_int4_form form; /* of weights of 4 bits */
    hw_quantised q;
} linear_job;

/* What the sums of a row start at, and what offsets multiply. */
static void sum_row(const linear_job *job, int64_t row) {
    const hw_quantised *q = &job->q;
    for (int64_t cell = row * q->groups; cell < (row + 1) * q->groups; cell++) {
        const int8_t *values = q->values + cell * HW_GROUP;
        int32_t sums[2] = {hw_half_sum(values), hw_half_sum(values + HW_HALF)};
        if (!job->is_int4) {
            q->start[cell] = -128 * (sums[0] + sums[1]);
            continue;
        }
        for (int half = 0; half < 2; half++) {
            q->start[2 * cell + half] = HW_CODE_START(job->form, sums[half]);
            q->sums[2 * cell + half] = q->scale[cell] * (float)sums[half];
        }
    }
}

static void quantise_rows(const linear_job *job, int64_t first, int64_t last) {
    int64_t groups = job->q.groups;
    for (int64_t r = first; r < last; r++) {
        hw_quantise_row(job->x + r * job->k, job->k, job->q.values + r * groups * HW_GROUP, job->q.scale + r * groups);
        if (job->is_int4 || HW_WEIGHT_XOR != 0) sum_row(job, r);
    }
}

static void quantise_task(void *context, int64_t item) {
    const linear_job *job = context;
    int64_t first = item * QUANTISE_ROWS;
    quantise_rows(job, first, first + QUANTISE_ROWS < job->m ? first + QUANTISE_ROWS : job->m);
}

static void linear_task(void *context, int64_t item) {
    const linear_job *job = context;
    int64_t groups = job->q.groups, halves = job->is_int4 ? 2 : 1;
    int64_t tile_bytes = groups * (job->is_int4 ? hw_int4_record_bytes(job->form) : HW_GROUP_BYTES);
    int64_t row0 = item % job->row_blocks * job->row_block;
    int64_t row1 = row0 + job->row_block < job->m ? row0 + job->row_block : job->m;
    int64_t tile = item / job->row_blocks * job->tiles_per_item;
    int64_t last = tile + job->tiles_per_item < job->tiles ? tile + job->tiles_per_item : job->tiles;
    void (*kernel)(const hw_int8_args *, int, int) = hw_int8_tile;
    uint8_t *wide = NULL;
    if (job->is_int4) {
#if defined(HW_PORTABLE)
        int is_wide = 1;
#else
        int is_wide = row1 - row0 > HW_INT8_ROWS;
        kernel = hw_nibble_tile;
#endif
        if (is_wide) {
            wide = hw_scratch(HW_SCRATCH_TILE, (size_t)(HW_INT8_TILES * groups * HW_WIDE_BYTES));
            kernel = hw_wide_tile;
        }
    }
    while (tile < last) {
        int tiles = tile + HW_INT8_TILES <= last ? HW_INT8_TILES : 1;
        int64_t channel = tile * HW_TILE;
        const uint8_t *weights = job->packed + tile * tile_bytes;
        if (wide) hw_widen(job->form, weights, tiles * groups, wide);
        for (int64_t r = row0; r < row1; r += HW_INT8_ROWS) {
            hw_int8_args args = {
                .weights = wide ? wide : weights,
                .tile_bytes = wide ? groups * HW_WIDE_BYTES : tile_bytes,
                .x = job->q.values + r * groups * HW_GROUP,
                .x_scale = job->q.scale + r * groups,
                .x_start = job->q.start + r * groups * halves,
                .x_sums = job->form.has_offsets ? job->q.sums + r * groups * 2 : NULL,
                .groups = groups,
                .form = job->form,
                .y = job->y + r * job->n + channel,
                .y_stride = job->n,
                .bias = job->bias ? job->bias + channel : NULL,
                .channels = job->n - channel,
            };
            kernel(&args, row1 - r < HW_INT8_ROWS ? (int)(row1 - r) : HW_INT8_ROWS, tiles);
        }
        tile += tiles;
    }
}

static void run(linear_job job) {
    int64_t m = job.m, k = job.k, groups = (k + HW_GROUP - 1) / HW_GROUP, cells = m * groups;
    if (m == 0 || job.n == 0) return;
    int8_t *scratch = hw_scratch(HW_SCRATCH_LINEAR, (size_t)cells * (HW_GROUP + 20));
    float *scale = (float *)(scratch + cells * HW_GROUP);
    job.q = (hw_quantised){scratch, scale, (int32_t *)(scale + cells), scale + 3 * cells, groups};
    if (m * k < PARALLEL_QUANTISE)
        quantise_rows(&job, 0, m);
    else
        hw_parallel(quantise_task, &job, (m + QUANTISE_ROWS - 1) / QUANTISE_ROWS);

    job.tiles = (job.n + HW_TILE - 1) / HW_TILE;
    job.row_blocks = (m + ROW_BLOCK - 1) / ROW_BLOCK;
    job.row_block = (m + job.row_blocks - 1) / job.row_blocks;
    job.row_block = (job.row_block + HW_INT8_ROWS - 1) / HW_INT8_ROWS * HW_INT8_ROWS;
    job.row_blocks = (m + job.row_block - 1) / job.row_block;
    int64_t tile_macs = (job.row_block < m ? job.row_block : m) * k * HW_TILE;
    int64_t by_size = (ITEM_MACS + tile_macs - 1) / tile_macs;
    int64_t by_share = job.tiles * job.row_blocks / (hw_threads() * 4);
    job.tiles_per_item = by_size > by_share && by_share > 0 ? by_share : by_size;
    job.tiles_per_item = (job.tiles_per_item + HW_INT8_TILES - 1) / HW_INT8_TILES * HW_INT8_TILES;
    int64_t runs = (job.tiles + job.tiles_per_item - 1) / job.tiles_per_item;
    hw_parallel(linear_task, &job, runs * job.row_blocks);
}

void hw_int8_linear(const float *x, int64_t m, int64_t k, const uint8_t *packed, int64_t n, const float *bias,
                    float *y) {
    run((linear_job){.x = x, .bias = bias, .packed = packed, .y = y, .m = m, .k = k, .n = n});
}

void hw_int4_linear(const float *x, int64_t m, int64_t k, const uint8_t *packed, int64_t n, const float *bias,
                    float *y) {
    linear_job job = {.x = x, .bias = bias, .packed = packed + HW_INT4_HEADER, .y = y, .m = m, .k = k, .n = n};
    job.is_int4 = 1;
    memcpy(&job.form, packed, sizeof job.form);
    run(job);
}
