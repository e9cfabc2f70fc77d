/* The kernel for weights of int8: see int8_kernels.h. */
#include "int8_kernels.h"

void hw_int8_tile(const hw_int8_args *a, int rows, int tiles) { hw_int8_rows(a, rows, tiles); }
