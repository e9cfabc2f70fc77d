"""From a GGUF tensor's bytes to floats: the native kernels for the common types, the gguf package for all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway import native
from headway.errors import UnsupportedModelError
from headway.loader import gguf_file
from headway.loader.gguf_file import GGUFTensor

_STORED_AS_FLOATS = {
    gguf_file.F32: torch.float32,
    gguf_file.F16: torch.float16,
    gguf_file.BF16: torch.bfloat16,
}
_NATIVE = (gguf_file.Q4_0, gguf_file.Q4_1, gguf_file.Q8_0)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def dequantize(tensor: GGUFTensor, data: Bytes) -> Tensor:
    """`data` uint8 [rows, bytes per row] -> a float tensor of the tensor's shape; quantised types become float32."""
    dtype = _STORED_AS_FLOATS.get(tensor.type)
    if dtype is not None:
        return torch.from_numpy(data).view(dtype).view(tensor.shape)
    if tensor.type in _NATIVE and native.is_available():
        return native.dequantize(tensor.type.name, torch.from_numpy(data), tensor.shape)
    return _dequantize_with_library(tensor, data)


def _dequantize_with_library(tensor: GGUFTensor, data: Bytes) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as library_dequantize

    try:
        values = library_dequantize(data, GGMLQuantizationType(tensor.type.id))
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {tensor.name} is of GGUF type {tensor.type.name}, which the gguf package cannot dequantise"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(tensor.shape)
