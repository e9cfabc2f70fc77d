"""A layer's KV cache as the CPU kernels take it: addresses, and in which numbers keys and values are stored."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headway.native.lib import check

# The values of `enum hw_kv_numbers` in csrc/headway.h.
KEY_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
VALUE_NUMBERS = {**KEY_NUMBERS, torch.uint8: 4}


class NativeKVCache(ctypes.Structure):
    """`hw_kv_cache` of csrc/headway.h. It keeps no tensor alive."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("k_numbers", ctypes.c_int32),
        ("v_numbers", ctypes.c_int32),
    )

    @staticmethod
    def of(k: Tensor, v: Tensor, scales: Tensor | None) -> NativeKVCache:
        """The addresses of one layer's tensors; ValueError for what the kernels cannot read."""
        key_dtype = k.dtype if k.dtype in KEY_NUMBERS else torch.float32
        value_dtype = torch.uint8 if key_dtype is torch.int8 and v.dtype is torch.uint8 else key_dtype
        check(k, key_dtype, "the key cache (within a block transposed, not token_major)")
        check(v, value_dtype, "the value cache")
        if (scales is not None) != (key_dtype.itemsize == 1):
            raise ValueError(f"a cache of {key_dtype} {'has no' if scales is None else 'takes no'} scales")
        if scales is not None:
            check(scales, torch.float16, "the cache's scales")
        return NativeKVCache(
            k.data_ptr(),
            v.data_ptr(),
            None if scales is None else scales.data_ptr(),
            KEY_NUMBERS[key_dtype],
            VALUE_NUMBERS[value_dtype],
        )
