/* A norm, the linear layer that follows, and where wanted the gates and the second layer of an MLP, in one call: at a
 * few rows the calls from Python take as long as the work. */
#include "headway.h"

static void multiply(const hw_linear *linear, const float *x, int64_t m, float *y) {
    int64_t k = linear->k, n = linear->n;
    switch (linear->kind) {
    case HW_WEIGHTS_INT8: hw_int8_linear(x, m, k, linear->packed, n, linear->bias, y); break;
    case HW_WEIGHTS_INT4: hw_int4_linear(x, m, k, linear->packed, n, linear->bias, y); break;
    default: hw_f32_linear(x, m, k, linear->packed, n, linear->bias, y);
    }
}

void hw_norm_linear(const hw_linear *linear, float *residual, const float *delta, const float *norm, float eps,
                    int64_t m, int is_gated, float *y) {
    if (m == 0) return;
    int64_t k = linear->k, n = linear->n;
    float *x = hw_scratch(HW_SCRATCH_NORM, (size_t)(m * k) * sizeof(float));
    float *product = is_gated ? hw_scratch(HW_SCRATCH_GATES, (size_t)(m * n) * sizeof(float)) : y;
    if (delta)
        hw_add_rms_norm(delta, residual, norm, eps, m, k, x);
    else
        hw_rms_norm(residual, norm, eps, m, k, x);
    multiply(linear, x, m, product);
    if (is_gated) hw_silu_mul(product, m, n / 2, y);
}

void hw_norm_mlp(const hw_linear *gate_up, const hw_linear *down, float *residual, const float *delta,
                 const float *norm, float eps, int64_t m, float *y) {
    if (m == 0) return;
    float *activated = hw_scratch(HW_SCRATCH_ACTIVATED, (size_t)(m * down->k) * sizeof(float));
    hw_norm_linear(gate_up, residual, delta, norm, eps, m, 1, activated);
    multiply(down, activated, m, y);
}
