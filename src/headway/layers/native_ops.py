"""`Ops` on the CPU kernels, and linear layers whose weight is packed for them. Activations are float32; the KV cache
may have any format but bfloat16. A row's result does not depend on the other rows.

`Int8Linear`: symmetric int8 with one scale per output channel and group of 64 inputs; activations are quantised the
same way inside each call. `Int4Linear`: 4-bit codes, scales and offsets as they were stored, one of each per output
channel and group of 32 inputs; activations as above. `Float32Linear`: the exact reference; each output is one chain of
fused multiply-adds in input order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headway import native
from headway.attention.base import HeadNorms, Heads
from headway.attention.cpu import NativeHeads
from headway.kv.layer_cache import LayerKVCache
from headway.layers.linear import AfterNorm, Delta, Gate, Linear, Norm, ScaledRows
from headway.layers.ops import Ops
from headway.layers.quantized_weight import QuantizedWeight, Weight
from headway.native.lib import (
    INT4_GROUP,
    RELEASE_LOCK_MACS,
    WEIGHT_KINDS,
    NativeLibrary,
    PackedWeight,
    check,
    load,
    pack_int8_rows,
)


class NativeOps(Ops):
    """The CPU implementation. Calls hold the interpreter lock, because each takes only microseconds."""

    name = "native"

    def __init__(self, library: NativeLibrary | None = None) -> None:
        functions = (library or load()).held
        self._rms_norm = functions.hw_rms_norm
        self._add_rms_norm = functions.hw_add_rms_norm
        self._silu_mul = functions.hw_silu_mul
        self._rope_write_kv = functions.hw_rope_write_kv
        self._layers: dict[int, NativeHeads] = {}

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return torch.index_select(table, 0, token_ids)

    def norm(self, residual: Tensor, delta: Delta, weight: Tensor, eps: float) -> Tensor:
        rows, width = check(residual, torch.float32, "residual").shape
        _check_norm(weight, width)
        out = torch.empty_like(residual)
        if not isinstance(delta, Tensor):
            self._rms_norm(residual.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
            return out
        if check(delta, torch.float32, "delta").shape != residual.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, residual {tuple(residual.shape)}")
        self._add_rms_norm(delta.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, rows, width, out.data_ptr())
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = check(gate_up, torch.float32, "gate_up").shape
        out = torch.empty(rows, width // 2)
        self._silu_mul(gate_up.data_ptr(), rows, width // 2, out.data_ptr())
        return out

    def rope_write_kv(
        self,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        heads: Heads,
        norms: HeadNorms | None,
        kv: LayerKVCache,
    ) -> Tensor:
        layer = self._layers.get(id(kv))
        if layer is None or not layer.is_of(kv, heads, norms):
            layer = self._layers[id(kv)] = NativeHeads.of(kv, heads, norms)
        tokens = layer.check_step(qkv, positions, slot_mapping)
        q = torch.empty(tokens, heads.num_heads, heads.head_dim)
        self._rope_write_kv(
            ctypes.addressof(layer),
            qkv.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            tokens,
            q.data_ptr(),
        )
        return q


def _check_norm(weight: Tensor, width: int) -> None:
    if check(weight, torch.float32, "norm weight").numel() != width:
        raise ValueError(f"norm weight has {weight.numel()} values for rows of {width}")


def _norm_pointer(norm: Norm, width: int) -> int:
    """The address of the weight of a norm over rows of `width`. The caller must keep the norm alive."""
    _check_norm(norm.weight, width)
    return norm.weight.data_ptr()


_BLOCK_ROWS = 4096


class NativeLinear(ctypes.Structure):
    """`hw_linear` of csrc/headway.h. It keeps no tensor alive."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("kind", ctypes.c_int32),
    )


class PackedLinear(Linear):
    """Keeps only the packed weight. Addresses and functions are looked up once: a decode step is many short calls."""

    def __init__(self, packed: PackedWeight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._packed = packed
        self._bias = None if bias is None else check(bias, torch.float32, "bias")
        if self._bias is not None and self._bias.shape != (self.out_features,):
            raise ValueError(f"bias has shape {tuple(self._bias.shape)}, the weight has {self.out_features} outputs")
        self._weight_pointer = packed.data.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._held = getattr(packed.library.held, packed.kernel)
        self._released = getattr(packed.library.released, packed.kernel)
        kind = WEIGHT_KINDS.index(packed.kernel)
        self._native = NativeLinear(self._weight_pointer, self._bias_pointer, self.out_features, self.in_features, kind)
        self._address = ctypes.addressof(self._native)
        self._library = packed.library
        self._takes_rows_as_they_are = True
        self._long_rows = RELEASE_LOCK_MACS // (self.out_features * self.in_features) + 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed.data,) if self._bias is None else (self._packed.data, self._bias)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, columns = check(x, torch.float32, "x").shape
        if columns != self.in_features:
            raise ValueError(f"x has {columns} columns, the layer takes {self.in_features}")
        product = torch.empty(rows, self.out_features)
        run = self._released if rows >= self._long_rows else self._held
        run(
            x.data_ptr(),
            rows,
            columns,
            self._weight_pointer,
            self.out_features,
            self._bias_pointer,
            product.data_ptr(),
        )
        return product if out is None else out.copy_(product)

    def after_norm(self, norm: Norm, gate: Gate | None = None) -> AfterNorm:
        if not self._takes_rows_as_they_are:
            return super().after_norm(norm, gate)
        is_gated = gate is not None
        width = self.out_features // 2 if is_gated else self.out_features
        norm_pointer = _norm_pointer(norm, self.in_features)
        held, released = self._library.held.hw_norm_linear, self._library.released.hw_norm_linear

        def run(residual: Tensor, delta: Delta) -> Tensor:
            rows, delta_pointer = self._checked(residual, delta)
            product = torch.empty(rows, width)
            (released if rows >= self._long_rows else held)(
                self._address,
                residual.data_ptr(),
                delta_pointer,
                norm_pointer,
                norm.eps,
                rows,
                is_gated,
                product.data_ptr(),
            )
            return product

        return run

    def whole_mlp(self, gate_up: Linear, norm: Norm) -> AfterNorm | None:
        if not isinstance(gate_up, PackedLinear):
            return None
        if not (self._takes_rows_as_they_are and gate_up._takes_rows_as_they_are):
            return None
        if 2 * self.in_features != gate_up.out_features:
            raise ValueError(f"{gate_up.out_features} gates and values for a layer of {self.in_features} inputs")
        norm_pointer = _norm_pointer(norm, gate_up.in_features)
        held, released = self._library.held.hw_norm_mlp, self._library.released.hw_norm_mlp

        def run(residual: Tensor, delta: Delta) -> Tensor:
            rows, delta_pointer = gate_up._checked(residual, delta)
            product = torch.empty(rows, self.out_features)
            (released if rows >= gate_up._long_rows else held)(
                gate_up._address,
                self._address,
                residual.data_ptr(),
                delta_pointer,
                norm_pointer,
                norm.eps,
                rows,
                product.data_ptr(),
            )
            return product

        return run

    def _checked(self, residual: Tensor, delta: Delta) -> tuple[int, int | None]:
        """The number of rows and the address of the delta. Raises ValueError for tensors the kernels cannot read."""
        rows, columns = check(residual, torch.float32, "residual").shape
        if columns != self.in_features:
            raise ValueError(f"residual has {columns} columns, the layer takes {self.in_features}")
        if delta is None:
            return rows, None
        if isinstance(delta, ScaledRows):
            raise ValueError("the CPU kernels take no rows with half a norm")
        if check(delta, torch.float32, "delta").shape != residual.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, residual {tuple(residual.shape)}")
        return rows, delta.data_ptr()


class Int8Linear(PackedLinear):
    """Quantises the weight [out, in] on construction. A weight of codes and scales is converted to floats first."""

    def __init__(self, weight: Weight, bias: Tensor | None = None) -> None:
        packed = pack_int8_rows(_row_blocks(weight), weight.shape[0])
        super().__init__(packed, None if bias is None else _float32(bias))


class Int4Linear(PackedLinear):
    """Packs a 4-bit weight for which `takes` is true."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        order = None
        if weight.groups is not None:
            order = torch.argsort(weight.groups, stable=True)
            weight = replace(weight, codes=weight.codes[:, order], groups=None)
        elif weight.tile[1] >= weight.shape[1]:
            weight = replace(weight, tile=(weight.tile[0], -(-weight.shape[1] // INT4_GROUP) * INT4_GROUP))
        rows = weight.by_rows(INT4_GROUP)
        packed = native.pack_int4(rows.codes.contiguous(), rows.scales, rows.offsets, is_signed=rows.lowest < 0)
        super().__init__(packed, None if bias is None else _float32(bias))
        self._order = order
        self._takes_rows_as_they_are = order is None

    @staticmethod
    def takes(weight: QuantizedWeight) -> bool:
        """Whether the weight has 4 bits and its groups, once in order, have a multiple of 32 inputs."""
        num_inputs, size = weight.shape[1], weight.tile[1]
        if weight.bits != 4 or (size % INT4_GROUP and size < num_inputs):
            return False
        if weight.groups is None:
            return True
        counts = torch.bincount(weight.groups.long(), minlength=weight.scales.shape[1])
        return size % INT4_GROUP == 0 and bool((counts[:-1] == size).all())

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return super().__call__(x if self._order is None else x.index_select(1, self._order), out)


class Float32Linear(PackedLinear):
    """Packs the weight [out, in] on construction."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(native.pack_float32(_float32(weight)), None if bias is None else _float32(bias))


def _row_blocks(weight: Weight) -> Iterator[Tensor]:
    """Yields the weight as float32, a few rows at a time: a whole output layer takes several times its packed size."""
    if isinstance(weight, Tensor):
        yield from map(_float32, weight.split(_BLOCK_ROWS))
    elif weight.tile[0] > 1:
        yield weight.dequantise()
    else:
        parts = {
            name: getattr(weight, name).split(_BLOCK_ROWS)
            for name in ("codes", "scales", "zeros", "offsets")
            if getattr(weight, name) is not None
        }
        for block in zip(*parts.values(), strict=True):
            yield replace(weight, **dict(zip(parts, block, strict=True))).dequantise()


def _float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous()
