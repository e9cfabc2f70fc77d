/* What the two halves of a tile's work share: block sizes, and where in a cache to read. */
#ifndef HEADWAY_ATTENTION_BLOCKS_H
#define HEADWAY_ATTENTION_BLOCKS_H

#include "attention.h"
#include "kv_numbers.h"

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

/* Vectors of the head dimension summed at once for one row, and for all rows together. */
#if defined(HW_NEON)
#define MOST_VECTORS 8
#define MOST_SUMS 24
#else
#define MOST_VECTORS 4
#define MOST_SUMS 16
#endif

HW_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* With few rows a cache that is not float32 is read in place; many rows repay converting it to float32 once. In place a
 * float16 that is NaN or infinite may be read as a number. */
HW_INLINE int reads_in_place(const hw_attention_tile *tile, int numbers) {
    if (numbers == HW_KV_F32) return 1;
    return tile->rows <= ROW_BLOCK && !(numbers == HW_KV_F16 && *tile->cache.not_finite);
}

/* Fills the tile's scores for keys [first, end). */
void hw_attention_scores(const hw_attention_tile *tile, int64_t first, int64_t end);
/* Multiplies the tile's scores of keys [first, end) by the keys' scales (part 0) or the values' (part 1), and those up
 * to the next whole group by 0. */
void hw_attention_scale(const hw_attention_tile *tile, int64_t first, int64_t end, int part);
/* Adds to acc [heads][rows][dim] the values of keys [first, end) weighted by the tile's scores. */
void hw_attention_weigh(const hw_attention_tile *tile, int64_t first, int64_t end, float *acc);

#endif
