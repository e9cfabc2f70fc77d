/* Headway's native CPU kernels: what the library exports, and what its files share.
 *
 * Contract of every kernel: the result of a row depends on that row's inputs alone, to the last bit, whatever else is
 * in the batch, however work is split, and with any number of threads. */
#ifndef HEADWAY_H
#define HEADWAY_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <stddef.h>
#include <stdint.h>

#define HW_EXPORT __attribute__((visibility("default")))

#define HW_GROUP 64 /* values along K that share one int8 scale */
#define HW_TILE 16  /* output channels packed together */
#define HW_GROUP_BYTES (HW_GROUP * HW_TILE + HW_TILE * 4)
#define HW_MAX_THREADS 256

/* In which numbers keys or values are cached; what they mean: headway/kv_formats.py. Keys are never int4. */
enum hw_kv_numbers { HW_KV_F32, HW_KV_F16, HW_KV_INT8, HW_KV_FP8, HW_KV_INT4 };

/* One layer's KV cache. scales: float16 [blocks][kv_heads][block_size][2], of the key and of the value; or NULL.
 * not_finite becomes 1 when a float16 is written that is NaN or infinite. */
typedef struct {
    void *k, *v;
    uint16_t *scales;
    int32_t *not_finite;
    int32_t k_numbers, v_numbers; /* enum hw_kv_numbers */
} hw_kv_cache;

typedef void (*hw_task)(void *context, int64_t item);

/* Runs task(context, i) for i in [0, items) on the pool, the calling thread included; returns when all are done. */
void hw_parallel(hw_task task, void *context, int64_t items);
int hw_threads(void);

/* Per-thread scratch memory, 64-byte aligned, valid until the thread asks for the same slot again. */
enum hw_scratch_slot {
    HW_SCRATCH_LINEAR,
    HW_SCRATCH_TILE,
    HW_SCRATCH_NORM,
    HW_SCRATCH_GATES,
    HW_SCRATCH_ACTIVATED,
    HW_SCRATCH_PACK,
    HW_SCRATCH_QUERIES,
    HW_SCRATCH_ATTENTION,
    HW_SCRATCH_SAMPLING,
    HW_SCRATCH_SLOTS
};
void *hw_scratch(enum hw_scratch_slot slot, size_t bytes);

/* Asks for huge pages behind a large buffer that is about to be filled. */
HW_EXPORT void hw_advise_huge(void *data, size_t bytes);

HW_EXPORT const char *hw_isa(void);
HW_EXPORT void hw_set_num_threads(int n);
HW_EXPORT int hw_get_num_threads(void);
/* Cost of one parallel section beyond its work: one item of 3 us per thread, averaged. */
HW_EXPORT double hw_fork_join_ns(int64_t repeats);

HW_EXPORT int64_t hw_int8_packed_bytes(int64_t n, int64_t k);
HW_EXPORT void hw_int8_pack(const float *weight, int64_t n, int64_t k, uint8_t *packed);
HW_EXPORT void hw_int8_linear(const float *x, int64_t m, int64_t k, const uint8_t *packed, int64_t n, const float *bias,
                              float *y);

/* How 4-bit weights are packed: the first bytes of `packed`. Codes are -8 to 7, or 0 to 15 and then have offsets. */
typedef struct {
    int32_t is_signed, has_offsets, is_half; /* is_half: scales and offsets are float16, else float32 */
} hw_int4_form;
HW_EXPORT int64_t hw_int4_packed_bytes(hw_int4_form form, int64_t n, int64_t k);
/* scales, and offsets where the form has them: float32 [n][ceil(k / 32)], which float16 holds exactly if is_half. */
HW_EXPORT void hw_int4_pack(hw_int4_form form, const int8_t *codes, const float *scales, const float *offsets,
                            int64_t n, int64_t k, uint8_t *packed);
HW_EXPORT void hw_int4_linear(const float *x, int64_t m, int64_t k, const uint8_t *packed, int64_t n, const float *bias,
                              float *y);

HW_EXPORT int64_t hw_f32_packed_bytes(int64_t n, int64_t k);
HW_EXPORT void hw_f32_pack(const float *weight, int64_t n, int64_t k, float *packed);
HW_EXPORT void hw_f32_linear(const float *x, int64_t m, int64_t k, const float *packed, int64_t n, const float *bias,
                             float *y);

HW_EXPORT void hw_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t width, float *out);
HW_EXPORT void hw_add_rms_norm(const float *x, float *residual, const float *weight, float eps, int64_t rows,
                               int64_t width, float *out);
HW_EXPORT void hw_silu_mul(const float *gate_up, int64_t rows, int64_t width, float *out);
enum hw_weights { HW_WEIGHTS_INT8, HW_WEIGHTS_INT4, HW_WEIGHTS_F32 };
/* `NativeLinear` in headway/layers/native_ops.py. */
typedef struct {
    const void *packed;
    const float *bias; /* may be NULL */
    int64_t n, k;
    int32_t kind; /* enum hw_weights */
} hw_linear;
/* residual += delta (may be NULL); y = linear(norm of residual), or the gated half of that. */
HW_EXPORT void hw_norm_linear(const hw_linear *linear, float *residual, const float *delta, const float *norm, float eps,
                              int64_t m, int is_gated, float *y);
/* The same with gates, and a second linear layer behind them. */
HW_EXPORT void hw_norm_mlp(const hw_linear *gate_up, const hw_linear *down, float *residual, const float *delta,
                           const float *norm, float eps, int64_t m, float *y);
/* A layer's heads, rotary table and cache: `NativeHeads` in headway/attention/cpu.py. */
typedef struct {
    const float *cos_sin, *q_norm, *k_norm; /* the norms may be NULL */
    const hw_kv_cache *cache;
    int64_t block_size, heads, kv_heads, dim;
    float eps;
} hw_heads;
HW_EXPORT void hw_rope_write_kv(const hw_heads *layer, const float *qkv, const int64_t *positions, const int64_t *slots,
                                int64_t tokens, float *q_out);

typedef struct hw_attention_plan hw_attention_plan;
HW_EXPORT hw_attention_plan *hw_attention_plan_new(int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size);
HW_EXPORT void hw_attention_plan_free(hw_attention_plan *plan);
HW_EXPORT int hw_attention_plan_set(hw_attention_plan *plan, int64_t requests, const int32_t *query_start,
                                    const int32_t *seq_lens, const int32_t *block_table, int64_t table_stride);
HW_EXPORT void hw_attention_run(hw_attention_plan *plan, const float *q, const hw_kv_cache *cache, float *out);
/* hw_rope_write_kv, then hw_attention_run: with a few tokens, calls from Python take as long as the work. */
HW_EXPORT void hw_attend(hw_attention_plan *plan, const hw_heads *layer, const float *qkv, const int64_t *positions,
                         const int64_t *slots, int64_t tokens, float *out);

/* kind: 0 = Q4_0, 1 = Q4_1, 2 = Q8_0 */
HW_EXPORT void hw_dequantize(const uint8_t *raw, int kind, int64_t blocks, float *out);
/* Whether none of the values is NaN or infinite. */
HW_EXPORT int hw_is_finite(const float *x, int64_t count);

/* Ranks that are processes and meet in shared memory, which begins as zeros. `turn` counts the meetings from 1. Both
 * return 0 if the meeting was aborted. */
HW_EXPORT int64_t hw_meeting_bytes(int64_t ranks, int64_t place_bytes);
HW_EXPORT void hw_meeting_abort(void *memory);
/* x = the sum over the ranks, added up in their order. */
HW_EXPORT int hw_ranks_sum(void *memory, int64_t rank, int64_t ranks, int64_t place_bytes, uint64_t turn, float *x,
                           int64_t count);
/* out[other * stride ...] = the part of each. */
HW_EXPORT int hw_ranks_gather(void *memory, int64_t rank, int64_t ranks, int64_t place_bytes, uint64_t turn,
                              const void *part, int64_t bytes, char *out, int64_t stride);

/* What a row asks of sampling: `RowRecord` in headway/runner/sampler.py, where sampling is defined. */
typedef struct {
    uint64_t seed;
    double top_p;
    float inverse_temperature; /* 0: greedy */
    int32_t top_k;             /* 0: all */
    float min_p_offset, repetition, frequency, presence;
} hw_sampling_record;
/* One token for each of `lines` rows of logits, or a code below zero. */
HW_EXPORT void hw_sample_tokens(const float *logits, int64_t lines, int64_t vocab, const int64_t *rows,
                                const int64_t *positions, const hw_sampling_record *records, int32_t *tokens);
/* Rule out what masks do not allow: bit i of word w of mask m is token 32 w + i of line lines[m]. */
HW_EXPORT void hw_mask_logits(float *logits, int64_t vocab, const int32_t *lines, const uint32_t *masks,
                              int64_t num_masks, int64_t words_per_mask);

#endif
