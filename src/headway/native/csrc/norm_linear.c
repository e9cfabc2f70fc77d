/* A norm, the linear layer that follows, and where wanted the gates of an MLP, in one call: at a few rows the calls
 * from Python take as long as the work. */
#include "headway.h"

void hw_norm_linear(enum hw_weights kind, float *residual, const float *delta, const float *norm, float eps, int64_t m,
                    int64_t k, const void *packed, int64_t n, const float *bias, int is_gated, float *y) {
    if (m == 0) return;
    float *x = hw_scratch(HW_SCRATCH_NORM, (size_t)(m * k) * sizeof(float));
    float *product = is_gated ? hw_scratch(HW_SCRATCH_GATES, (size_t)(m * n) * sizeof(float)) : y;
    if (delta)
        hw_add_rms_norm(delta, residual, norm, eps, m, k, x);
    else
        hw_rms_norm(residual, norm, eps, m, k, x);
    switch (kind) {
    case HW_WEIGHTS_INT8: hw_int8_linear(x, m, k, packed, n, bias, product); break;
    case HW_WEIGHTS_INT4: hw_int4_linear(x, m, k, packed, n, bias, product); break;
    default: hw_f32_linear(x, m, k, packed, n, bias, product);
    }
    if (is_gated) hw_silu_mul(product, m, n / 2, y);
}
