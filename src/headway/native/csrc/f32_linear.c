/* y = x Wᵀ + bias in float32: the exact mode. Weights are packed [n / 16][k][16]; each output is one chain of fused
 * multiply-adds in the order of k, so its value does not depend on the batch, the blocking or the threads. */
#include "headway.h"
#include "simd.h"

#define ROW_BLOCK 64
#define K_BLOCK 640 /* a tile's K_BLOCK x 16 weights stay in cache while rows pass by */
#define ITEM_MACS (1 << 17)
#define TILE_VECTORS (HW_TILE / HW_VL)

#if defined(HW_AVX512)
#define F32_ROWS 8
#define F32_TILES 2
#elif defined(HW_AVX2)
#define F32_ROWS 6
#define F32_TILES 1
#else
#define F32_ROWS 4
#define F32_TILES 1
#endif

int64_t hw_f32_packed_bytes(int64_t n, int64_t k) { return (n + HW_TILE - 1) / HW_TILE * HW_TILE * k * 4; }

typedef struct {
    const float *weight;
    int64_t n, k;
    float *packed;
} pack_job;

static void pack_tile(void *context, int64_t tile) {
    const pack_job *job = context;
    float *out = job->packed + tile * job->k * HW_TILE;
    for (int c = 0; c < HW_TILE; c++) {
        int64_t channel = tile * HW_TILE + c;
        const float *row = job->weight + channel * job->k;
        for (int64_t k = 0; k < job->k; k++) out[k * HW_TILE + c] = channel < job->n ? row[k] : 0.0f;
    }
}

void hw_f32_pack(const float *weight, int64_t n, int64_t k, float *packed) {
    pack_job job = {weight, n, k, packed};
    hw_advise_huge(packed, (size_t)hw_f32_packed_bytes(n, k));
    hw_parallel(pack_tile, &job, (n + HW_TILE - 1) / HW_TILE);
}

typedef struct {
    const float *x, *packed, *bias;
    float *y;
    int64_t m, k, n, tiles, tiles_per_item, row_blocks, row_block, k_block;
} linear_job;

typedef struct {
    const float *weights; /* at the first k of this block */
    int64_t tile_floats;
    const float *x;
    int64_t x_stride, count; /* k values in this block */
    float *y;
    int64_t y_stride, channels;
    const float *bias;
    int first, last; /* is this the first / the last block of k? */
} block_args;

HW_INLINE vf load_partial(const float *p, int64_t valid) {
    if (valid >= HW_VL) return vf_load(p);
    float lanes[HW_VL] = {0};
    for (int64_t i = 0; i < valid; i++) lanes[i] = p[i];
    return vf_load(lanes);
}

HW_INLINE void store_partial(float *p, vf a, int64_t valid) {
    float lanes[HW_VL];
    if (valid >= HW_VL) {
        vf_store(p, a);
        return;
    }
    vf_store(lanes, a);
    for (int64_t i = 0; i < valid; i++) p[i] = lanes[i];
}

HW_INLINE void multiply_block(const block_args *a, const int rows, const int tiles) {
    const int vectors = tiles * TILE_VECTORS;
    vf y[8][8];
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++)
            y[r][v] = a->first ? vf_set1(0.0f)
                               : load_partial(a->y + r * a->y_stride + v * HW_VL, a->channels - v * HW_VL);
    }
    int64_t k = 0;
#if defined(HW_NEON)
#define STEP(lane)                                                                                                     \
    HW_UNROLL                                                                                                          \
    for (int v = 0; v < vectors; v++) {                                                                                \
        vf w = vf_load(a->weights + (k + lane) * HW_TILE + v * HW_VL);                                                 \
        HW_UNROLL                                                                                                      \
        for (int r = 0; r < rows; r++) y[r][v] = vfmaq_laneq_f32(y[r][v], w, x[r], lane);                              \
    }
    for (; k + 4 <= a->count; k += 4) {
        vf x[8];
        HW_UNROLL
        for (int r = 0; r < rows; r++) x[r] = vf_load(a->x + r * a->x_stride + k);
        STEP(0)
        STEP(1)
        STEP(2)
        STEP(3)
    }
#undef STEP
#endif
    HW_UNROLL4
    for (; k < a->count; k++) {
        vf w[8];
        HW_UNROLL
        for (int v = 0; v < vectors; v++)
            w[v] = vf_load(a->weights + v / TILE_VECTORS * a->tile_floats + k * HW_TILE + v % TILE_VECTORS * HW_VL);
        HW_UNROLL
        for (int r = 0; r < rows; r++) {
            vf x = vf_set1(a->x[r * a->x_stride + k]);
            HW_UNROLL
            for (int v = 0; v < vectors; v++) y[r][v] = vf_fma(w[v], x, y[r][v]);
        }
    }
    HW_UNROLL
    for (int r = 0; r < rows; r++) {
        HW_UNROLL
        for (int v = 0; v < vectors; v++) {
            int64_t valid = a->channels - v * HW_VL;
            if (a->last && a->bias) y[r][v] = vf_add(y[r][v], load_partial(a->bias + v * HW_VL, valid));
            store_partial(a->y + r * a->y_stride + v * HW_VL, y[r][v], valid);
        }
    }
}

#define INSTANCE(rows, tiles)                                                                                          \
    HW_KERNEL void multiply_##rows##x##tiles(const block_args *a) { multiply_block(a, rows, tiles); }
INSTANCE(1, 1)
INSTANCE(2, 1)
INSTANCE(3, 1)
INSTANCE(4, 1)
#if F32_ROWS > 4
INSTANCE(5, 1)
INSTANCE(6, 1)
#endif
#if F32_TILES > 1
INSTANCE(7, 1)
INSTANCE(8, 1)
INSTANCE(1, 2)
INSTANCE(2, 2)
INSTANCE(3, 2)
INSTANCE(4, 2)
INSTANCE(5, 2)
INSTANCE(6, 2)
INSTANCE(7, 2)
INSTANCE(8, 2)
#endif
#undef INSTANCE

/* [tiles - 1][rows - 1] */
static void (*const multiply[F32_TILES][F32_ROWS])(const block_args *) = {
#if defined(HW_AVX512)
    {multiply_1x1, multiply_2x1, multiply_3x1, multiply_4x1, multiply_5x1, multiply_6x1, multiply_7x1, multiply_8x1},
    {multiply_1x2, multiply_2x2, multiply_3x2, multiply_4x2, multiply_5x2, multiply_6x2, multiply_7x2, multiply_8x2},
#elif defined(HW_AVX2)
    {multiply_1x1, multiply_2x1, multiply_3x1, multiply_4x1, multiply_5x1, multiply_6x1},
#else
    {multiply_1x1, multiply_2x1, multiply_3x1, multiply_4x1},
#endif
};

static void linear_task(void *context, int64_t item) {
    const linear_job *job = context;
    int64_t row0 = item % job->row_blocks * job->row_block;
    int64_t row1 = row0 + job->row_block < job->m ? row0 + job->row_block : job->m;
    int64_t tile = item / job->row_blocks * job->tiles_per_item;
    int64_t last = tile + job->tiles_per_item < job->tiles ? tile + job->tiles_per_item : job->tiles;
    while (tile < last) {
        int tiles = tile + F32_TILES <= last ? F32_TILES : 1;
        int64_t channel = tile * HW_TILE;
        for (int64_t k = 0; k < job->k; k += job->k_block) {
            for (int64_t r = row0; r < row1; r += F32_ROWS) {
                block_args args = {
                    .weights = job->packed + (tile * job->k + k) * HW_TILE,
                    .tile_floats = job->k * HW_TILE,
                    .x = job->x + r * job->k + k,
                    .x_stride = job->k,
                    .count = job->k - k < job->k_block ? job->k - k : job->k_block,
                    .y = job->y + r * job->n + channel,
                    .y_stride = job->n,
                    .channels = job->n - channel,
                    .bias = job->bias ? job->bias + channel : NULL,
                    .first = k == 0,
                    .last = k + job->k_block >= job->k,
                };
                multiply[tiles - 1][row1 - r < F32_ROWS ? row1 - r - 1 : F32_ROWS - 1](&args);
            }
        }
        tile += tiles;
    }
}

void hw_f32_linear(const float *x, int64_t m, int64_t k, const float *packed, int64_t n, const float *bias, float *y) {
    linear_job job = {.x = x, .packed = packed, .bias = bias, .y = y, .m = m, .k = k, .n = n};
    if (m == 0 || n == 0) return;
    int64_t k_blocks = (k + K_BLOCK - 1) / K_BLOCK;
    job.k_block = ((k + k_blocks - 1) / k_blocks + 3) / 4 * 4;
    job.tiles = (n + HW_TILE - 1) / HW_TILE;
    job.row_blocks = (m + ROW_BLOCK - 1) / ROW_BLOCK;
    job.row_block = (m + job.row_blocks - 1) / job.row_blocks;
    job.row_block = (job.row_block + F32_ROWS - 1) / F32_ROWS * F32_ROWS;
    job.row_blocks = (m + job.row_block - 1) / job.row_block;
    int64_t tile_macs = (job.row_block < m ? job.row_block : m) * k * HW_TILE;
    int64_t by_size = (ITEM_MACS + tile_macs - 1) / tile_macs;
    int64_t by_share = job.tiles * job.row_blocks / (hw_threads() * 4);
    job.tiles_per_item = by_size > by_share && by_share > 0 ? by_share : by_size;
    job.tiles_per_item = (job.tiles_per_item + F32_TILES - 1) / F32_TILES * F32_TILES;
    int64_t runs = (job.tiles + job.tiles_per_item - 1) / job.tiles_per_item;
    hw_parallel(linear_task, &job, runs * job.row_blocks);
}
