/* The kernel for weights of 4 bits that are taken apart in registers: see int8_kernels.h. */
#include "int8_kernels.h"

#if !defined(HW_PORTABLE)
void hw_nibble_tile(const hw_int8_args *a, int rows, int tiles) { hw_nibble_rows(a, rows, tiles); }
#endif
