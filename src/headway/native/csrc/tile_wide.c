/* The kernel for weights of 4 bits that were made wide: see int8_kernels.h. */
#include "int8_kernels.h"

void hw_wide_tile(const hw_int8_args *a, int rows, int tiles) { hw_wide_rows(a, rows, tiles); }
