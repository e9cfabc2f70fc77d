"""Attention on the CPU kernels: the whole batch of a layer in one call, for every format of the cache but bfloat16.

A row's result is the same to the last bit in any batch, chunking, block size and number of threads.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from headway.attention.base import AttentionBackend, AttentionBatch, HeadNorms, Heads
from headway.errors import ConfigError
from headway.kv.codes import SCALE_DTYPE, stored_dtype
from headway.kv.layer_cache import LayerKVCache
from headway.native.lib import MAX_HEAD_DIM, NativeLibrary, check, load

_NUMBERS = ("float32", "float16", "int8", "fp8", "int4")
"""The names of `enum hw_kv_numbers` in csrc/headway.h, in its order."""


class NativeKVCache(ctypes.Structure):
    """`hw_kv_cache` of csrc/headway.h. It keeps no tensor alive."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("not_finite", ctypes.c_void_p),
        ("k_numbers", ctypes.c_int32),
        ("v_numbers", ctypes.c_int32),
    )

    @staticmethod
    def of(cache: LayerKVCache) -> NativeKVCache:
        """The addresses of one layer's tensors. Raises ValueError for tensors that the kernels cannot read."""
        format, scales = cache.format, cache.scales
        if "native" not in format.kernels:
            raise ValueError(f"the CPU kernels know no cache in {format.name}")
        check(cache.k, stored_dtype(format.keys), "the key cache (within a block transposed, not token_major)")
        check(cache.v, stored_dtype(format.values), "the value cache")
        if (scales is not None) != format.is_scaled:
            raise ValueError(f"a cache in {format.name} {'has no' if scales is None else 'takes no'} scales")
        if scales is not None:
            check(scales, SCALE_DTYPE, "the cache's scales")
        return NativeKVCache(
            cache.k.data_ptr(),
            cache.v.data_ptr(),
            None if scales is None else scales.data_ptr(),
            check(cache.not_finite, torch.int32, "not_finite").data_ptr(),
            _NUMBERS.index(format.keys.name),
            _NUMBERS.index(format.values.name),
        )


class NativeHeads(ctypes.Structure):
    """`hw_heads` of csrc/headway.h: what stays the same in all calls of a layer, checked once."""

    _fields_ = (
        ("cos_sin", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("block_size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )

    @staticmethod
    def of(kv: LayerKVCache, heads: Heads, norms: HeadNorms | None) -> NativeHeads:
        """The heads of one layer. Raises ValueError for tensors that the kernels cannot read."""
        if heads.head_dim % 2 or heads.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"heads of {heads.head_dim} elements: an even number of at most {MAX_HEAD_DIM} is possible"
            )
        check(heads.cos_sin, torch.float32, "cos_sin")
        for norm in () if norms is None else (norms.q, norms.k):
            if check(norm, torch.float32, "norm weight").numel() != heads.head_dim:
                raise ValueError(f"norm weight has {norm.numel()} values for rows of {heads.head_dim}")
        cache = NativeKVCache.of(kv)
        made = NativeHeads(
            heads.cos_sin.data_ptr(),
            None if norms is None else norms.q.data_ptr(),
            None if norms is None else norms.k.data_ptr(),
            ctypes.addressof(cache),
            kv.block_size,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            heads.eps,
        )
        made.kept = cache
        made.width = heads.qkv_size
        made.made_of = (weakref.ref(kv), weakref.ref(heads), None if norms is None else weakref.ref(norms))
        return made

    def is_of(self, kv: LayerKVCache, heads: Heads, norms: HeadNorms | None) -> bool:
        own_kv, own_heads, own_norms = self.made_of
        return own_kv() is kv and own_heads() is heads and (None if own_norms is None else own_norms()) is norms

    def check_step(self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor) -> int:
        """The number of tokens in a step's tensors. Raises ValueError if the tensors do not fit together."""
        tokens, width = check(qkv, torch.float32, "qkv").shape
        if width != self.width:
            raise ValueError(f"qkv has {width} columns, the layer's heads take {self.width}")
        if check(positions, torch.int64, "positions").numel() != tokens:
            raise ValueError(f"{positions.numel()} positions for {tokens} tokens")
        if check(slot_mapping, torch.int64, "slot_mapping").numel() != tokens:
            raise ValueError(f"{slot_mapping.numel()} slots for {tokens} tokens")
        return tokens


class CpuAttention(AttentionBackend):
    """Plans work items once per step in C, and runs them for each layer."""

    name = "cpu"

    def __init__(self, kv_caches: Sequence[LayerKVCache], num_heads: int, library: NativeLibrary | None = None) -> None:
        if reason := unsupported_reason(kv_caches, num_heads):
            raise ConfigError(f"the cpu attention backend cannot be used: {reason}; use torch_padded")
        self.kv_caches = kv_caches
        self.num_heads = num_heads
        cache = kv_caches[0]
        self._head_dim = cache.head_dim
        self._block_size = cache.block_size
        self._num_blocks = cache.num_blocks
        self._native = [NativeKVCache.of(layer) for layer in kv_caches]
        functions = (library or load()).released
        for layer in kv_caches:  # blocks are read in any order, so large pages save address translations
            for tensor in layer.tensors:
                functions.hw_advise_huge(tensor.data_ptr(), tensor.nbytes)
        self._run = functions.hw_attention_run
        self._attend = functions.hw_attend
        self._heads: list[NativeHeads | None] = [None] * len(kv_caches)
        self._set_plan = functions.hw_attention_plan_set
        self._plan = functions.hw_attention_plan_new(num_heads, cache.num_kv_heads, cache.head_dim, cache.block_size)
        if not self._plan:
            raise MemoryError("no memory for an attention plan")
        weakref.finalize(self, functions.hw_attention_plan_free, self._plan)

    def plan(self, batch: AttentionBatch) -> None:
        """Divide the step into work items. The batch's tensors are kept alive, and every `run` reads them again."""
        check(batch.query_start, torch.int32, "query_start")
        check(batch.seq_lens, torch.int32, "seq_lens")
        table = batch.block_table
        if table.dtype is not torch.int32 or table.device.type != "cpu" or table.stride(-1) != 1:
            raise ValueError("block_table must be an int32 tensor on the CPU with contiguous rows")
        needed = -(-batch.max_seq_len // self._block_size)
        if table.shape[1] < needed or batch.query_start.numel() != batch.num_requests + 1:
            raise ValueError(
                f"block_table {tuple(table.shape)} and query_start {tuple(batch.query_start.shape)} do not describe "
                f"{batch.num_requests} requests of up to {needed} blocks"
            )
        self.batch = batch
        failed = self._set_plan(
            self._plan,
            batch.num_requests,
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            table.data_ptr(),
            table.stride(0),
        )
        if failed:
            raise MemoryError("no memory for an attention plan")

    @property
    def takes_qkv(self) -> bool:
        return True

    def run_qkv(self, layer: int, qkv: Tensor, positions: Tensor, heads: Heads, norms: HeadNorms | None) -> Tensor:
        """qkv [num_tokens, heads.qkv_size] -> [num_tokens, num_heads * head_dim]"""
        native = self._heads[layer]
        if native is None or not native.is_of(self.kv_caches[layer], heads, norms):
            native = self._heads[layer] = NativeHeads.of(self.kv_caches[layer], heads, norms)
        slots = self.batch.slot_mapping
        tokens = native.check_step(qkv, positions, slots)
        if tokens != self.batch.num_tokens:
            raise ValueError(f"qkv has {tokens} rows for {self.batch.num_tokens} tokens")
        out = torch.empty(tokens, self.num_heads * self._head_dim)
        self._attend(
            self._plan,
            ctypes.addressof(native),
            qkv.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            tokens,
            out.data_ptr(),
        )
        return out

    def run(self, layer: int, q: Tensor) -> Tensor:
        """q [num_tokens, num_heads, head_dim] -> [num_tokens, num_heads * head_dim]"""
        tokens = self.batch.num_tokens
        if check(q, torch.float32, "q").shape != (tokens, self.num_heads, self._head_dim):
            raise ValueError(f"q has shape {tuple(q.shape)} for {tokens} tokens and {self.num_heads} heads")
        out = torch.empty(tokens, self.num_heads * self._head_dim)
        self._run(self._plan, q.data_ptr(), ctypes.addressof(self._native[layer]), out.data_ptr())
        return out


def unsupported_reason(kv_caches: Sequence[LayerKVCache], num_heads: int) -> str | None:
    """Why the kernels cannot read these caches, or None if they can."""
    first = kv_caches[0]
    if first.k.device.type != "cpu":
        return f"the KV cache is on {first.k.device}"
    if "native" not in first.format.kernels:
        return f"its kernels know no KV cache in {first.format.name}"
    if first.head_dim % 2:
        return f"the head size {first.head_dim} is odd"
    if num_heads % first.num_kv_heads:
        return f"{num_heads} heads do not divide among {first.num_kv_heads} KV heads"
    if first.k.transpose(2, 3).is_contiguous() and not first.k.is_contiguous():
        return "its keys are stored token by token (token_major), not transposed within a block"
    for cache in kv_caches:
        is_alike = cache.format == first.format and cache.k.shape == first.k.shape
        if not is_alike or not all(tensor.is_contiguous() for tensor in cache.tensors):
            return "its layers differ in shape or dtype, or are not contiguous"
    return None
