"""Quantised weights in Hugging Face checkpoints: which tensors make up a weight, and what numbers they mean.

    scheme                              tensors of a layer                         weight
    FP8 blocks (`fp8`)                  weight, weight_scale_inv                   code × scale of its 128×128 block
    FP8, INT8 (`fp8`,                   weight, weight_scale, weight_zero_point    (code - zero) × scale of the tensor,
      `compressed-tensors`)                                                        its row, or its group in the row
    packed INT4, INT8                   weight_packed, weight_scale, weight_shape, the same; 8 or 4 codes to a word
      (`compressed-tensors`)              weight_zero_point, weight_g_idx
    GPTQ                                qweight, qzeros, scales, g_idx             codes along the inputs in a word
    AWQ                                 qweight, qzeros, scales                    codes along the outputs, in its order

All become a `QuantizedWeight`. A layer that a scheme leaves out
has a plain `weight`. What is not understood is refused by name; what cannot be right (a scale that is missing, NaN or
zero, groups that do not divide) with the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.layers.quantized_weight import QuantizedWeight

PART_DTYPES = ("F8_E4M3", "I8", "U8", "I32", "I64")
"""Of the tensors that make up a quantised weight, besides floats."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ has output 8k + j at this place of word k."""
_WORD_BITS = 32
_FLOAT_PARTS = ("weight_scale", "weight_scale_inv", "scales")


class Part(Protocol):
    """A stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def read_part(self) -> Tensor: ...


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one layer's weight, by the ends of their names."""

    name: str
    """Of the layer."""
    source: str
    parts: Mapping[str, Part]
    decode: Callable[[StoredWeight], QuantizedWeight]
    shape: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return sum(part.num_bytes for part in self.parts.values())

    def read(self) -> Tensor:
        """The weight in float32."""
        return self.read_weight().dequantise()

    def read_weight(self) -> QuantizedWeight:
        """The weight as it is stored."""
        return self.decode(self)

    def part(self, end: str) -> Tensor:
        """One of its tensors, which must be there; a scale must be a number."""
        if end not in self.parts:
            raise self.corrupt(end, "is missing")
        tensor = self.parts[end].read_part()
        if end in _FLOAT_PARTS:
            tensor = tensor.float()
            if not bool(torch.isfinite(tensor).all()):
                raise self.corrupt(end, "has values that are no numbers (NaN or infinity)")
            if bool((tensor == 0).any()):
                raise self.corrupt(end, "has a scale of 0")
        return tensor

    def expect(self, end: str, tensor: Tensor, *shape: int) -> None:
        """Refuse a tensor of another shape."""
        if tuple(tensor.shape) != shape:
            raise self.corrupt(end, f"is {list(tensor.shape)}, but the layer's shape implies {list(shape)}")

    def corrupt(self, end: str, what: str) -> CorruptModelError:
        return CorruptModelError(f"{self.source}: tensor {self.name}.{end} {what}; the checkpoint is damaged")

    def num_groups(self, size: int) -> int:
        """Of so many inputs each."""
        num_inputs = self.shape[1]
        if size <= 0 or num_inputs % size:
            raise CorruptModelError(
                f"{self.source}: {self.name} has {num_inputs} inputs, which groups of {size} do not divide"
            )
        return num_inputs // size


def find_weights(
    config: Mapping[str, Any], parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]], source: str
) -> tuple[str, dict[str, StoredWeight]]:
    """The scheme's name and, by the name of the plain weight that they stand for, the quantised weights among the
    tensors of a checkpoint.

    `config`: its `quantization_config`. `shapes`: those that the architecture implies. Raises `UnsupportedModelError`
    for a scheme that is not known.
    """
    scheme = _scheme(config, source)
    layers: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        layer, _, end = name.rpartition(".")
        if end in scheme.ends:
            layers.setdefault(layer, {})[end] = part
    found = {}
    for layer, own in layers.items():
        name, shape = f"{layer}.weight", shapes.get(f"{layer}.weight")
        is_plain = own.keys() == {"weight"}
        if shape is not None and len(shape) == 2 and not is_plain:
            found[name] = StoredWeight(layer, source, own, scheme.decode, (shape[0], shape[1]))
    if not found:
        raise CorruptModelError(f"{source} says that it is quantised ({scheme.name}), but no tensor of it is")
    return scheme.name, found


# ---- schemes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scheme:
    name: str
    ends: frozenset[str]
    decode: Callable[[StoredWeight], QuantizedWeight]


def _scheme(config: Mapping[str, Any], source: str) -> _Scheme:
    method = str(config.get("quant_method", "unknown")).lower()
    if method == "fp8":
        return _fp8(config, source)
    if method == "compressed-tensors":
        return _compressed(config, source)
    if method == "gptq":
        return _gptq(config, source)
    if method == "awq":
        return _awq(config, source)
    raise _refused(source, f"is quantised with {method}")


def _refused(source: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source} {what}, which is not supported; there are fp8, compressed-tensors (INT8, INT4, FP8), gptq and awq. "
        "Use one of them, the original float checkpoint, or a GGUF file of it"
    )


def _fp8(config: Mapping[str, Any], source: str) -> _Scheme:
    block = config.get("weight_block_size")
    ends = frozenset({"weight", "weight_scale", "weight_scale_inv", "input_scale"})
    if block is None:
        return _Scheme("FP8", ends, lambda stored: _scaled(stored, torch.float8_e4m3fn, None))
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise _refused(source, f"has FP8 blocks of {block}")
    return _Scheme("FP8", ends, lambda stored: _fp8_blocks(stored, block[0], block[1]))


def _fp8_blocks(stored: StoredWeight, height: int, width: int) -> QuantizedWeight:
    codes, scales = _codes(stored, torch.float8_e4m3fn), stored.part("weight_scale_inv")
    stored.expect("weight_scale_inv", scales, -(-stored.shape[0] // height), -(-stored.shape[1] // width))
    return QuantizedWeight(codes, scales, tile=(height, width))


def _codes(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """A code to an element, in the type that the scheme says."""
    codes = stored.part("weight")
    stored.expect("weight", codes, *stored.shape)
    if codes.dtype is not dtype:
        raise stored.corrupt("weight", f"is of type {codes.dtype}, not {dtype}")
    if dtype.is_floating_point and not bool(torch.isfinite(codes.float()).all()):
        raise stored.corrupt("weight", "has values that are no numbers")
    return codes


def _compressed(config: Mapping[str, Any], source: str) -> _Scheme:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused(source, "has several quantisations (config_groups), or none")
    weights = next(iter(groups.values())).get("weights") or {}
    kind, bits, size = weights.get("type"), weights.get("num_bits") or 0, weights.get("group_size")
    strategy, form = weights.get("strategy"), str(config.get("format"))
    shown = f"{kind}{bits} by {strategy}, {form}"
    known = (kind == "float" and bits == 8) or (kind == "int" and bits in (4, 8))
    if not known or strategy not in ("tensor", "channel", "group", "block"):
        raise _refused(source, f"is quantised with compressed-tensors ({shown})")
    name = f"{'FP' if kind == 'float' else 'INT'}{bits}"
    ends = frozenset({"weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"})
    dtype = torch.float8_e4m3fn if kind == "float" else torch.int8
    if strategy == "block":
        block = weights.get("block_structure")
        if kind != "float" or not isinstance(block, list) or len(block) != 2:
            raise _refused(source, f"is quantised with compressed-tensors ({shown})")
        tile = int(block[0]), int(block[1])
        return _Scheme(name, ends | {"weight"}, lambda stored: _scaled(stored, dtype, None, tile=tile))
    group_size = int(size) if strategy == "group" and size else None
    if form == "pack-quantized" and kind == "int":
        ends |= {"weight_packed", "weight_shape"}
        return _Scheme(name, ends, lambda stored: _packed(stored, int(bits), group_size))
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        return _Scheme(name, ends | {"weight"}, lambda stored: _scaled(stored, dtype, group_size))
    raise _refused(source, f"is quantised with compressed-tensors ({shown})")


def _scaled(
    stored: StoredWeight, dtype: torch.dtype, group_size: int | None, *, tile: tuple[int, int] | None = None
) -> QuantizedWeight:
    """A code to an element, and scales of the tensor, of rows, of groups in rows, or of tiles."""
    codes = _codes(stored, dtype)
    scales = stored.part("weight_scale")
    if tile is not None:
        stored.expect("weight_scale", scales, -(-stored.shape[0] // tile[0]), -(-stored.shape[1] // tile[1]))
        return QuantizedWeight(codes, scales, tile=tile)
    scales, tile = _by_rows(stored, "weight_scale", scales, group_size)
    zeros = None
    if "weight_zero_point" in stored.parts:
        zeros, _ = _by_rows(stored, "weight_zero_point", stored.part("weight_zero_point"), group_size)
    return QuantizedWeight(codes, scales, zeros, tile=tile)


def _by_rows(stored: StoredWeight, end: str, values: Tensor, group_size: int | None) -> tuple[Tensor, tuple[int, int]]:
    """One value for all, for each row, or for each group of each row: [tiles of outputs, tiles of inputs], and the
    size of a tile."""
    num_outputs, num_inputs = stored.shape
    if group_size is not None:
        stored.expect(end, values, num_outputs, stored.num_groups(group_size))
        return values, (1, group_size)
    if values.numel() == 1:
        return values.reshape(1, 1), (num_outputs, num_inputs)
    values = values.reshape(len(values), -1)
    stored.expect(end, values, num_outputs, 1)
    return values, (1, num_inputs)


def _packed(stored: StoredWeight, bits: int, group_size: int | None) -> QuantizedWeight:
    """Codes along the inputs in words, moved so that none is negative; zeros along the outputs."""
    num_outputs, num_inputs = stored.shape
    per_word, middle = _WORD_BITS // bits, 1 << (bits - 1)
    if "weight_shape" in stored.parts and tuple(stored.part("weight_shape").tolist()) != stored.shape:
        raise stored.corrupt("weight_shape", f"is not {list(stored.shape)}")
    words = stored.part("weight_packed")
    stored.expect("weight_packed", words, num_outputs, -(-num_inputs // per_word))
    codes = (_unpack(words, bits)[:, :num_inputs] - middle).to(torch.int8)
    scales, tile = _by_rows(stored, "weight_scale", stored.part("weight_scale"), group_size)
    zeros = None
    if "weight_zero_point" in stored.parts:
        packed_zeros = stored.part("weight_zero_point")
        stored.expect("weight_zero_point", packed_zeros, -(-num_outputs // per_word), scales.shape[1])
        zeros = _unpack(packed_zeros.t().contiguous(), bits)[:, :num_outputs].t() - middle
    groups = None
    if "weight_g_idx" in stored.parts:
        groups = _checked_groups(stored, "weight_g_idx", scales.shape[1])
    return QuantizedWeight(codes, scales, zeros, groups=groups, tile=tile, bits=bits)


def _gptq(config: Mapping[str, Any], source: str) -> _Scheme:
    bits, size = config.get("bits"), config.get("group_size")
    form = config.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or not isinstance(size, int) or form not in ("gptq", "gptq_v2"):
        raise _refused(source, f"is quantised with gptq ({bits} bits, groups of {size}, format {form})")
    first = 1 if form == "gptq" else 0  # zeros are stored less one

    def decode(stored: StoredWeight) -> QuantizedWeight:
        num_outputs, num_inputs = stored.shape
        per_word = _WORD_BITS // bits
        group_size = num_inputs if size < 0 else size
        num_groups = stored.num_groups(group_size)
        words, scales, zeros = stored.part("qweight"), stored.part("scales"), stored.part("qzeros")
        stored.expect("qweight", words, num_inputs // per_word, num_outputs)
        stored.expect("scales", scales, num_groups, num_outputs)
        stored.expect("qzeros", zeros, num_groups, num_outputs // per_word)
        middle = 1 << (bits - 1)
        codes = (_unpack(words.t().contiguous(), bits) - middle).to(torch.int8)
        own_zeros = (_unpack(zeros, bits) + first - middle).t()
        groups = _checked_groups(stored, "g_idx", num_groups) if "g_idx" in stored.parts else None
        return QuantizedWeight(
            codes, scales.t().contiguous(), own_zeros, groups=groups, tile=(1, group_size), bits=bits
        )

    return _Scheme(f"GPTQ INT{bits}", frozenset({"qweight", "qzeros", "scales", "g_idx"}), decode)


def _checked_groups(stored: StoredWeight, end: str, num_groups: int) -> Tensor:
    groups = stored.part(end).long()
    stored.expect(end, groups, stored.shape[1])
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        raise stored.corrupt(end, f"names a group that is not there: there are {num_groups}")
    return groups


def _awq(config: Mapping[str, Any], source: str) -> _Scheme:
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size"))
    version = str(config.get("version", "gemm")).lower()
    if bits != 4 or not isinstance(size, int) or version != "gemm":
        raise _refused(source, f"is quantised with awq ({bits} bits, groups of {size}, version {version})")

    def decode(stored: StoredWeight) -> QuantizedWeight:
        num_outputs, num_inputs = stored.shape
        group_size = num_inputs if size < 0 else size
        num_groups = stored.num_groups(group_size)
        words, scales, zeros = stored.part("qweight"), stored.part("scales"), stored.part("qzeros")
        stored.expect("qweight", words, num_inputs, num_outputs // 8)
        stored.expect("scales", scales, num_groups, num_outputs)
        stored.expect("qzeros", zeros, num_groups, num_outputs // 8)
        codes = (_unpack(words, 4, _AWQ_ORDER).t().contiguous() - 8).to(torch.int8)
        own_zeros = _unpack(zeros, 4, _AWQ_ORDER).t() - 8
        return QuantizedWeight(codes, scales.t().contiguous(), own_zeros, tile=(1, group_size), bits=4)

    return _Scheme("AWQ INT4", frozenset({"qweight", "qzeros", "scales"}), decode)


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, words] → int32 [rows, codes], the lowest bits first, or by `order`: where in its word each code is."""
    places = torch.tensor(order or range(_WORD_BITS // bits), dtype=torch.int32) * bits
    codes = (words.to(torch.int32)[:, :, None] >> places) & ((1 << bits) - 1)
    return codes.reshape(len(words), -1)
