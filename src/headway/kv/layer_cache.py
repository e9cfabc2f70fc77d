"""One layer's paged KV cache: a pair of tensors cut into fixed-size blocks.

    k [num_blocks, num_kv_heads, head_dim, block_size]
    v [num_blocks, num_kv_heads, block_size, head_dim]

All code indexes them this way, but keys are stored in one of two layouts. On the CPU the layout is as written, so that
the scores of one query against a block's tokens are read contiguously over tokens. On CUDA keys are stored token by
token (`token_major`), like the values, and k is a transposed view: a token's key is contiguous, which suits both matrix
units and writes. Code that uses indices or strides does not depend on the layout.

The cache of a scaled format holds codes in k and v, where two dimensions may share an element, and beside them

    scales [num_blocks, num_kv_heads, block_size, 2]    of the key and of the value, float16

A token is in slot = block_id * block_size + offset. The i-th token of request r is in block
block_table[r, i // block_size] at offset i % block_size. `Ops.rope_write_kv` fills the cache; backends only read it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headway.kv.codes import SCALE_DTYPE, decode, encode, plain_format, stored_dtype
from headway.kv_formats import KVFormat

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class LayerKVCache:
    """Keys and values of one layer, for all requests (layout above)."""

    format: KVFormat
    """The number format of the stored keys and values."""
    k: Tensor
    v: Tensor
    scales: Tensor | None = None
    """The scales of a token's key and value are side by side, so that one load reads both."""
    not_finite: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    """On the CPU: becomes 1 once a NaN or infinite float16 is written. Until then kernels use a faster read."""

    @staticmethod
    def zeros(
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        *,
        dtype: torch.dtype | KVFormat,
        device: torch.device | str = "cpu",
        token_major: bool | None = None,
    ) -> LayerKVCache:
        """An empty cache of `num_blocks` blocks. `token_major` is explained above; `None` picks the device's best
        layout."""
        format = dtype if isinstance(dtype, KVFormat) else plain_format(dtype)
        zeros = _untouched_zeros if torch.device(device).type == "cpu" else torch.zeros
        if token_major is None:
            token_major = torch.device(device).type == "cuda"
        k_width, v_width = (head_dim // numbers.dims_per_element for numbers in (format.keys, format.values))
        tokens = (num_blocks, num_kv_heads, block_size)
        transposed = (num_blocks, num_kv_heads, k_width, block_size)
        k = zeros((*tokens, k_width) if token_major else transposed, dtype=stored_dtype(format.keys), device=device)
        return LayerKVCache(
            format,
            k=k.transpose(2, 3) if token_major else k,
            v=zeros((*tokens, v_width), dtype=stored_dtype(format.values), device=device),
            scales=zeros((*tokens, 2), dtype=SCALE_DTYPE, device=device) if format.is_scaled else None,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache. A block's number is the first index of each."""
        return [self.k, self.v] if self.scales is None else [self.k, self.v, self.scales]

    @property
    def num_blocks(self) -> int:
        return self.k.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @functools.cached_property
    def head_dim(self) -> int:
        return self.k.shape[2] * self.format.keys.dims_per_element

    @property
    def block_size(self) -> int:
        return self.k.shape[3]

    def write(self, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store keys and values [tokens, num_kv_heads, head_dim], token i in slot offsets[i] of block blocks[i]."""
        k_stored, k_scale = encode(self.format.keys, k)
        v_stored, v_scale = encode(self.format.values, v)
        if k_stored.dtype is torch.float16 and k_stored.is_cpu:
            is_finite = k_stored.isfinite().all() & v_stored.isfinite().all()
            self.not_finite.bitwise_or_((~is_finite).int())
        self.k[blocks, :, :, offsets] = k_stored
        self.v[blocks, :, offsets] = v_stored
        if self.scales is not None and k_scale is not None and v_scale is not None:
            self.scales[blocks, :, offsets] = torch.stack((k_scale, v_scale), -1)

    def read_tokens(self, blocks: Tensor, offsets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of these slots as numbers, each [tokens, num_kv_heads, head_dim]."""
        scales = (None, None) if self.scales is None else self.scales[blocks, :, offsets].unbind(-1)
        return (
            decode(self.format.keys, self.k[blocks, :, :, offsets], scales[0], dtype),
            decode(self.format.values, self.v[blocks, :, offsets], scales[1], dtype),
        )

    def read_blocks(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole blocks as numbers, each [*blocks.shape, num_kv_heads, block_size, head_dim]."""
        scales = (None, None) if self.scales is None else self.scales[blocks].unbind(-1)
        return (
            decode(self.format.keys, self.k[blocks].transpose(-1, -2), scales[0], dtype),
            decode(self.format.values, self.v[blocks], scales[1], dtype),
        )


def _untouched_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros on the CPU that take memory only once they are written: the operating system's zero pages."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _PAGE_BYTES, dtype=np.uint8)  # torch.zeros would write every page
    start = -memory.ctypes.data % _PAGE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape).to(device)
