/* y = x Wᵀ + bias with int8 weights and activations quantised per (row, group of 64) inside the call.
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
    const uint8_t *packed;
    float *y;
    int64_t m, k, n, tiles, tiles_per_item, row_blocks, row_block;
    hw_quantised q;
} linear_job;

static void quantise_rows(const linear_job *job, int64_t first, int64_t last) {
    int64_t groups = job->q.groups;
    for (int64_t r = first; r < last; r++)
        hw_quantise_row(job->x + r * job->k, job->k, job->q.values + r * groups * HW_GROUP, job->q.scale + r * groups,
                        job->q.start + r * groups);
}

static void quantise_task(void *context, int64_t item) {
    const linear_job *job = context;
    int64_t first = item * QUANTISE_ROWS;
    quantise_rows(job, first, first + QUANTISE_ROWS < job->m ? first + QUANTISE_ROWS : job->m);
}

static void linear_task(void *context, int64_t item) {
    const linear_job *job = context;
    int64_t groups = job->q.groups, tile_bytes = groups * HW_GROUP_BYTES;
    int64_t row0 = item % job->row_blocks * job->row_block;
    int64_t row1 = row0 + job->row_block < job->m ? row0 + job->row_block : job->m;
    int64_t tile = item / job->row_blocks * job->tiles_per_item;
    int64_t last = tile + job->tiles_per_item < job->tiles ? tile + job->tiles_per_item : job->tiles;
    while (tile < last) {
        int tiles = tile + HW_INT8_TILES <= last ? HW_INT8_TILES : 1;
        int64_t channel = tile * HW_TILE;
        for (int64_t r = row0; r < row1; r += HW_INT8_ROWS) {
            hw_int8_args args = {
                .weights = job->packed + tile * tile_bytes,
                .tile_bytes = tile_bytes,
                .x = job->q.values + r * groups * HW_GROUP,
                .x_scale = job->q.scale + r * groups,
                .x_start = job->q.start + r * groups,
                .groups = groups,
                .y = job->y + r * job->n + channel,
                .y_stride = job->n,
                .bias = job->bias ? job->bias + channel : NULL,
                .channels = job->n - channel,
            };
            hw_int8_tile(&args, row1 - r < HW_INT8_ROWS ? (int)(row1 - r) : HW_INT8_ROWS, tiles);
        }
        tile += tiles;
    }
}

void hw_int8_linear(const float *x, int64_t m, int64_t k, const uint8_t *packed, int64_t n, const float *bias,
                    float *y) {
    int64_t groups = (k + HW_GROUP - 1) / HW_GROUP, cells = m * groups;
    linear_job job = {.x = x, .bias = bias, .packed = packed, .y = y, .m = m, .k = k, .n = n};
    if (m == 0 || n == 0) return;
    int8_t *scratch = hw_scratch(HW_SCRATCH_LINEAR, (size_t)cells * (HW_GROUP + 8));
    float *scale = (float *)(scratch + cells * HW_GROUP);
    job.q = (hw_quantised){scratch, scale, (int32_t *)(scale + cells), groups};
    if (m * k < PARALLEL_QUANTISE)
        quantise_rows(&job, 0, m);
    else
        hw_parallel(quantise_task, &job, (m + QUANTISE_ROWS - 1) / QUANTISE_ROWS);

    job.tiles = (n + HW_TILE - 1) / HW_TILE;
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
