"""Quantised weights in Hugging Face checkpoints: which tensors make up a weight, and how they are decoded.

    scheme                              tensors of a layer                         weight
    FP8 blocks (`fp8`)                  weight, weight_scale_inv                   code × scale of its 128×128 block
    FP8, INT8 (`fp8`,                   weight, weight_scale, weight_zero_point    (code - zero) × scale of the tensor,
      `compressed-tensors`)                                                        its row, or its group in the row
    packed INT4, INT8                   weight_packed, weight_scale, weight_shape, the same; 8 or 4 codes to a word
      (`compressed-tensors`)              weight_zero_point, weight_g_idx
    GPTQ                                qweight, qzeros, scales, g_idx             codes along the inputs in a word
    AWQ                                 qweight, qzeros, scales                    codes along the outputs, in its order

All become a `QuantizedWeight`. A layer that a scheme leaves out has a plain `weight`. `quantization_config` refuses
unknown settings; this module refuses damaged data (a missing part, a scale that is NaN or zero, groups that do not
divide the inputs) with the name of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.errors import CorruptModelError
from headway.layers.quantized_weight import QuantizedWeight
from headway.loader.quantization_config import Awq, Compressed, Fp8, Gptq, Quantization, read_quantization

PART_DTYPES = ("F8_E4M3", "I8", "U8", "I32", "I64")
"""The dtypes, besides floats, of tensors that make up a quantised weight."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ has output 8k + j at this place of word k."""
_WORD_BITS = 32
_FLOAT_PARTS = ("weight_scale", "weight_scale_inv", "scales")


class Part(Protocol):
    """A stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def is_float(self) -> bool: ...
    @property
    def num_bytes(self) -> int: ...
    def read_part(self) -> Tensor: ...


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of one layer's weight, by the ends of their names."""

    name: str
    """The layer's name."""
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

    def require(self, ends: frozenset[str]) -> None:
        """Raise if the layer lacks one of these tensors."""
        for end in sorted(ends - self.parts.keys()):
            raise self.corrupt(end, "is missing")

    def part(self, end: str) -> Tensor:
        """One of the tensors. Raises if it is missing, or is a scale that is not a number."""
        self.require(frozenset({end}))
        tensor = self.parts[end].read_part()
        if end in _FLOAT_PARTS:
            tensor = tensor.float()
            if not bool(torch.isfinite(tensor).all()):
                raise self.corrupt(end, "has values that are no numbers (NaN or infinity)")
            if bool((tensor == 0).any()):
                raise self.corrupt(end, "has a scale of 0")
        return tensor

    def expect(self, end: str, tensor: Tensor, *shape: int) -> None:
        """Raise if a tensor has another shape."""
        if tuple(tensor.shape) != shape:
            raise self.corrupt(end, f"is {list(tensor.shape)}, but the layer's shape implies {list(shape)}")

    def corrupt(self, end: str, what: str) -> CorruptModelError:
        return CorruptModelError(f"{self.source}: tensor {self.name}.{end} {what}; the checkpoint is damaged")

    def num_groups(self, size: int) -> int:
        """The number of groups of `size` inputs in a row."""
        num_inputs = self.shape[1]
        if size <= 0 or num_inputs % size:
            raise CorruptModelError(
                f"{self.source}: {self.name} has {num_inputs} inputs, which groups of {size} do not divide"
            )
        return num_inputs // size


def find_weights(
    config: Mapping[str, Any], parts: Mapping[str, Part], shapes: Mapping[str, tuple[int, ...]], source: str
) -> tuple[str, dict[str, StoredWeight]]:
    """Find the quantised weights among a checkpoint's tensors. Returns the scheme's name, and the weights by the name
    of the plain weight that each replaces.

    `config` is the `quantization_config`, and `shapes` are those that the architecture implies. Raises
    `UnsupportedModelError` for an unknown scheme, and `CorruptModelError` if a part is missing.
    """
    scheme = _scheme(read_quantization(config, source))
    layers: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        layer, _, end = name.rpartition(".")
        if end in scheme.ends:
            layers.setdefault(layer, {})[end] = part
    found = {}
    for layer, own in layers.items():
        name, shape = f"{layer}.weight", shapes.get(f"{layer}.weight")
        is_plain = own.keys() == {"weight"} and own["weight"].is_float
        if shape is not None and len(shape) == 2 and not is_plain:
            found[name] = stored = StoredWeight(layer, source, own, scheme.decode, (shape[0], shape[1]))
            stored.require(scheme.required)
    if not found:
        raise CorruptModelError(f"{source} says that it is quantised ({scheme.name}), but no tensor of it is")
    return scheme.name, found


# ---- schemes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scheme:
    name: str
    ends: frozenset[str]
    """The name endings of the tensors that make up a weight or belong to it."""
    required: frozenset[str]
    """The endings of tensors without which a weight is damaged."""
    decode: Callable[[StoredWeight], QuantizedWeight]


def _scheme(quantization: Quantization) -> _Scheme:
    match quantization:
        case Fp8():
            return _fp8(quantization)
        case Compressed():
            return _compressed(quantization)
        case Gptq():
            return _gptq(quantization)
        case Awq():
            return _awq(quantization)


def _fp8(config: Fp8) -> _Scheme:
    ends = frozenset({"weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale"})
    return _Scheme(config.name, ends, frozenset({"weight"}), partial(_decode_fp8, config))


def _decode_fp8(config: Fp8, stored: StoredWeight) -> QuantizedWeight:
    """Decode FP8. Block scales are named `weight_scale_inv`; scales per tensor or row may have either name."""
    codes = _codes(stored, torch.float8_e4m3fn)
    end = "weight_scale_inv" if "weight_scale_inv" in stored.parts else "weight_scale"
    if config.block is not None and not (config.has_default_block and end == "weight_scale"):
        scales = stored.part("weight_scale_inv")
        _expect_blocks(stored, "weight_scale_inv", scales, config.block)
        return QuantizedWeight(codes, scales, tile=config.block)
    scales = stored.part(end)
    scales, tile = _by_strategy(stored, end, scales, "tensor" if scales.numel() == 1 else "channel", None)
    return QuantizedWeight(codes, scales, tile=tile)


def _expect_blocks(stored: StoredWeight, end: str, values: Tensor, block: tuple[int, int]) -> None:
    stored.expect(end, values, -(-stored.shape[0] // block[0]), -(-stored.shape[1] // block[1]))


def _codes(stored: StoredWeight, dtype: torch.dtype) -> Tensor:
    """The codes, one per element, in the scheme's dtype."""
    codes = stored.part("weight")
    stored.expect("weight", codes, *stored.shape)
    if codes.dtype is not dtype:
        raise stored.corrupt("weight", f"is of type {codes.dtype}, not {dtype}")
    if dtype.is_floating_point and not bool(torch.isfinite(codes.float()).all()):
        raise stored.corrupt("weight", "has values that are no numbers")
    return codes


def _compressed(config: Compressed) -> _Scheme:
    codes = "weight_packed" if config.is_packed else "weight"
    zeros = set() if config.is_symmetric else {"weight_zero_point"}
    index = {"weight_g_idx"} if config.is_reordered else set()
    required = frozenset({codes, "weight_scale"} | zeros | index)
    ends = {"weight", "weight_scale", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"}
    packed = {"weight_packed", "weight_shape"} if config.is_packed else set()
    return _Scheme(config.name, frozenset(ends | packed), required, partial(_decode_compressed, config))


def _decode_compressed(config: Compressed, stored: StoredWeight) -> QuantizedWeight:
    if config.is_packed:
        codes = _unpack_codes(stored, config.bits)
    else:
        codes = _codes(stored, torch.float8_e4m3fn if config.kind == "float" else torch.int8)
    scales, tile = _tiles(config, stored, "weight_scale", stored.part("weight_scale"))
    zeros = _zero_points(config, stored, scales.shape[1])
    groups = None
    if "weight_g_idx" in stored.parts:
        groups = _checked_groups(stored, "weight_g_idx", scales.shape[1])
    return QuantizedWeight(codes, scales, zeros, groups=groups, tile=tile, bits=config.bits)


def _tiles(config: Compressed, stored: StoredWeight, end: str, values: Tensor) -> tuple[Tensor, tuple[int, int]]:
    if config.block is not None:
        _expect_blocks(stored, end, values, config.block)
        return values, config.block
    return _by_strategy(stored, end, values, config.strategy, config.group_size)


def _by_strategy(
    stored: StoredWeight, end: str, values: Tensor, strategy: str, group_size: int | None
) -> tuple[Tensor, tuple[int, int]]:
    """Shape values given once, per row, or per group of each row as [tiles of outputs, tiles of inputs]. Returns them
    and the size of a tile."""
    num_outputs, num_inputs = stored.shape
    if strategy == "group":
        assert group_size is not None
        stored.expect(end, values, num_outputs, stored.num_groups(group_size))
        return values, (1, group_size)
    if strategy == "tensor":
        if values.numel() != 1:
            stored.expect(end, values, 1)
        return values.reshape(1, 1), (num_outputs, num_inputs)
    values = values.reshape(len(values), -1) if values.dim() else values
    stored.expect(end, values, num_outputs, 1)
    return values, (1, num_inputs)


def _unpack_codes(stored: StoredWeight, bits: int) -> Tensor:
    """Unpack codes stored along the inputs in words, shifted so that none is negative."""
    num_outputs, num_inputs = stored.shape
    if "weight_shape" in stored.parts and tuple(stored.part("weight_shape").tolist()) != stored.shape:
        raise stored.corrupt("weight_shape", f"is not {list(stored.shape)}")
    words = stored.part("weight_packed")
    stored.expect("weight_packed", words, num_outputs, -(-num_inputs * bits // _WORD_BITS))
    return (_unpack(words, bits)[:, :num_inputs] - (1 << (bits - 1))).to(torch.int8)


def _zero_points(config: Compressed, stored: StoredWeight, num_groups: int) -> Tensor | None:
    """The zero points, shaped as the scales. Packed weights store them in words along the outputs, unless there is
    one."""
    end = "weight_zero_point"
    if end not in stored.parts:
        return None
    zeros = stored.part(end)
    if zeros.dtype is torch.int32 and config.is_packed and config.strategy != "tensor":
        num_outputs = stored.shape[0]
        stored.expect(end, zeros, -(-num_outputs * config.bits // _WORD_BITS), num_groups)
        zeros = _unpack(zeros.t().contiguous(), config.bits)[:, :num_outputs].t() - (1 << (config.bits - 1))
    else:
        zeros, _ = _tiles(config, stored, end, zeros)
    if not config.is_symmetric:
        return zeros
    if bool((zeros.float() != 0).any()):
        raise stored.corrupt(end, "is not 0, although the configuration says 'symmetric'")
    return None


def _gptq(config: Gptq) -> _Scheme:
    parts = frozenset({"qweight", "qzeros", "scales"})
    index = frozenset({"g_idx"})
    required = parts | index if config.is_reordered else parts
    return _Scheme(config.name, parts | index, required, partial(_decode_gptq, config))


def _decode_gptq(config: Gptq, stored: StoredWeight) -> QuantizedWeight:
    """Decode GPTQ: words pack codes along the inputs and zeros along the outputs."""
    num_outputs, num_inputs = stored.shape
    bits, per_word = config.bits, _WORD_BITS // config.bits
    group_size = config.group_size or num_inputs
    num_groups = stored.num_groups(group_size)
    words, scales, zeros = stored.part("qweight"), stored.part("scales"), stored.part("qzeros")
    stored.expect("qweight", words, num_inputs // per_word, num_outputs)
    stored.expect("scales", scales, num_groups, num_outputs)
    stored.expect("qzeros", zeros, num_groups, num_outputs // per_word)
    middle = 1 << (bits - 1)
    codes = (_unpack(words.t().contiguous(), bits) - middle).to(torch.int8)
    own_zeros = (_unpack(zeros, bits) + config.stores_zeros_less_one - middle).t()
    groups = _checked_groups(stored, "g_idx", num_groups) if "g_idx" in stored.parts else None
    return QuantizedWeight(codes, scales.t().contiguous(), own_zeros, groups=groups, tile=(1, group_size), bits=bits)


def _checked_groups(stored: StoredWeight, end: str, num_groups: int) -> Tensor:
    groups = stored.part(end).long()
    stored.expect(end, groups, stored.shape[1])
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        raise stored.corrupt(end, f"names a group that is not there: there are {num_groups}")
    return groups


def _awq(config: Awq) -> _Scheme:
    parts = frozenset({"qweight", "qzeros", "scales"})
    return _Scheme(config.name, parts, parts, partial(_decode_awq, config))


def _decode_awq(config: Awq, stored: StoredWeight) -> QuantizedWeight:
    """Decode AWQ: words pack codes and zeros along the outputs, in the format's order."""
    num_outputs, num_inputs = stored.shape
    group_size = config.group_size or num_inputs
    num_groups = stored.num_groups(group_size)
    words, scales, zeros = stored.part("qweight"), stored.part("scales"), stored.part("qzeros")
    stored.expect("qweight", words, num_inputs, num_outputs // 8)
    stored.expect("scales", scales, num_groups, num_outputs)
    stored.expect("qzeros", zeros, num_groups, num_outputs // 8)
    codes = (_unpack(words, 4, _AWQ_ORDER).t().contiguous() - 8).to(torch.int8)
    own_zeros = _unpack(zeros, 4, _AWQ_ORDER).t() - 8
    return QuantizedWeight(codes, scales.t().contiguous(), own_zeros, tile=(1, group_size), bits=4)


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[rows, words] → int32 [rows, codes], the lowest bits first, or by `order`: where in its word each code is."""
    places = torch.tensor(order or range(_WORD_BITS // bits), dtype=torch.int32) * bits
    codes = (words.to(torch.int32)[:, :, None] >> places) & ((1 << bits) - 1)
    return codes.reshape(len(words), -1)
