/* The arithmetic of attention on one tile: `rows` query rows that share a KV head, against one segment of keys. */
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
    int64_t rows;
    const void *k_cache, *v_cache;
    int half;              /* is the cache float16? */
    const int32_t *blocks; /* the request's row of the block table */
    int64_t kv_head;
    int64_t first_limit; /* keys visible to the first query; each next query sees one more */
    int64_t keys;        /* keys visible to the last query */
    float *queries;      /* packed [row block][dim][4 rows], scaled by 1 / sqrt(dim) */
    float *scores;       /* [rows][HW_SEGMENT] */
    float *gathered;     /* staging for keys [dim][16 * n] or values [n][dim] */
} hw_attention_tile;

/* Takes the tile's buffers from this thread's scratch; returns `extra` more floats for the caller. */
float *hw_attention_tile_init(hw_attention_tile *tile, const hw_attention_shape *shape, int64_t rows, int64_t extra);
/* q points at the first query's first head of the group. */
void hw_attention_pack_queries(hw_attention_tile *tile, const float *q);
/* Writes per row: the segment's maximum score (-inf if it sees none of the keys), sum of exponentials, weighted V. */
void hw_attention_segment(hw_attention_tile *tile, int64_t segment, float *top, float *sum, float *acc);

#endif
