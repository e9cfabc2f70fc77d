/* What the two halves of a tile's work share: block sizes, and how a cache value becomes a float. */
#ifndef HEADWAY_ATTENTION_BLOCKS_H
#define HEADWAY_ATTENTION_BLOCKS_H

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

/* Vectors of the head dimension summed at once for one row, and for all rows together. */
#if defined(HW_NEON)
#define MOST_VECTORS 8
#define MOST_SUMS 24
#else
#define MOST_VECTORS 4
#define MOST_SUMS 16
#endif

HW_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* With few rows a float16 cache is read in place; many rows repay converting it to float32 once. */
HW_INLINE int reads_halves(const hw_attention_tile *tile) { return tile->half && tile->rows <= ROW_BLOCK; }

HW_INLINE vf load_as(const void *base, int64_t index, const int half) {
    return half ? vf_load_half_scaled((const uint16_t *)base + index) : vf_load((const float *)base + index);
}

/* Fills the tile's scores for keys [first, end). */
void hw_attention_scores(const hw_attention_tile *tile, int64_t first, int64_t end);
/* Adds to acc [heads][rows][dim] the values of keys [first, end) weighted by the tile's scores. */
void hw_attention_weigh(const hw_attention_tile *tile, int64_t first, int64_t end, float *acc);

#endif
