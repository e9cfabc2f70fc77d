/* The arithmetic of attention on one tile: query rows that share a KV head, against one segment of keys. A tile may
 * span several KV heads, each with its own rows: their blocks are neighbours in memory and are read together. */
#ifndef HEADWAY_ATTENTION_H
#define HEADWAY_ATTENTION_H

#include "headway.h"
#include "simd.h"

#define HW_SEGMENT 256 /* keys per segment; part of the arithmetic, see attention.c */

typedef struct {
    int64_t heads, kv_heads, group, dim, block_size;
} hw_attention_shape;

typedef struct {
    const hw_attention_shape *shape;
    int64_t rows;              /* per KV head */
    int64_t first_head, heads; /* the KV heads of this tile */
    hw_kv_cache cache;
    const int32_t *blocks; /* the request's row of the block table */
    int64_t first_limit; /* keys visible to the first query; each next query sees one more */
    int64_t keys;        /* keys visible to the last query */
    int64_t query_floats; /* packed queries of one head */
    float *queries;       /* [heads][row block][dim][4 rows], scaled by 1 / sqrt(dim) */
    float *scores;        /* [heads][rows][HW_SEGMENT] */
    float *gathered;     /* staging for keys [dim][16 * n] or values [n][dim] */
    float *scales;       /* [HW_SEGMENT]: of one head's keys or values, for a cache that has them */
} hw_attention_tile;

/* Takes the tile's buffers from this thread's scratch; returns `extra` more floats for the caller. */
float *hw_attention_tile_init(hw_attention_tile *tile, const hw_attention_shape *shape, int64_t rows, int64_t heads,
                              int64_t extra);
/* q points at the first query's first head. */
void hw_attention_pack_queries(hw_attention_tile *tile, const float *q);
/* Writes per (head, row): the segment's maximum score (-inf if the row sees none of its keys), the sum of exponentials,
 * the weighted V. */
void hw_attention_segment(hw_attention_tile *tile, int64_t segment, float *top, float *sum, float *acc);

#endif
