"""Reads a checkpoint's `quantization_config`.

Each method has a table of its keys. Keys that say how the weights were computed, which layers are quantised, or how
another engine should run them are ignored: the tensors show which layers are quantised, and Headway's own options say
how activations and the cache are rounded. An unknown key is refused by name, and so is a value that would change the
weights in a way that is not implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import CorruptModelError, UnsupportedModelError
from headway.models.hf_config import RawConfig
from headway.models.known_keys import KnownKeys, anything, check_keys, each, names, only, record


@dataclass(frozen=True)
class Fp8:
    """FP8 codes (`fp8`) with a scale for the tensor, for each row, or for each block."""

    block: tuple[int, int] | None
    """The outputs and inputs of a block; None: scales are per tensor or per row."""
    has_default_block: bool
    """Whether `block` is the method's default, which a file without blocks does not follow."""

    @property
    def name(self) -> str:
        return "FP8"


@dataclass(frozen=True)
class Compressed:
    """`compressed-tensors`: one code per element, or integers packed in words."""

    kind: str
    """"int" or "float"."""
    bits: int
    strategy: str
    """What shares a scale: "tensor", "channel", "group" or "block"."""
    group_size: int | None
    block: tuple[int, int] | None
    is_packed: bool
    is_symmetric: bool
    """Whether all zero points are 0, so that none need to be stored."""
    is_reordered: bool
    """Whether the inputs of a group are not contiguous, so that an index is stored."""

    @property
    def name(self) -> str:
        return f"{'FP' if self.kind == 'float' else 'INT'}{self.bits}"


@dataclass(frozen=True)
class Gptq:
    bits: int
    group_size: int | None
    """None: a row is one group."""
    is_reordered: bool
    """As in `Compressed`."""
    stores_zeros_less_one: bool

    @property
    def name(self) -> str:
        return f"GPTQ INT{self.bits}"


@dataclass(frozen=True)
class Awq:
    group_size: int | None
    """None: a row is one group."""

    @property
    def name(self) -> str:
        return "AWQ INT4"


Quantization = Fp8 | Compressed | Gptq | Awq


def read_quantization(values: Mapping[str, Any], source: str) -> Quantization:
    """Read a `quantization_config`; `source` names the file in errors."""
    config = RawConfig(values, f"{source}: quantization_config")
    method = (config.text("quant_method", None) or "unknown").lower()
    if method not in _METHODS:
        raise _refused(source, f"is quantised with {method}")
    known, read = _METHODS[method]
    check_keys(config.source, values, known)
    return read(config)


def _refused(source: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{source} {what}, which is not supported; there are fp8, compressed-tensors (INT8, INT4, FP8), gptq and awq. "
        "Use one of them, the original float checkpoint, or a GGUF file of it"
    )


def _group_size(config: RawConfig, key: str, default: int | None) -> int | None:
    """The group size; None for -1, which means whole rows."""
    if config.values.get(key) == -1:
        return None
    return config.integer(key, default) if default is not None else config.integer(key)


def _block(config: RawConfig, key: str) -> tuple[int, int] | None:
    block = config.values.get(key)
    if isinstance(block, str):  # a former spelling of compressed-tensors, "128x128"
        block = [int(part) if part.isdecimal() and len(part) < 10 else part for part in block.split("x")]
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block):
        raise CorruptModelError(f"{config.source}: {key!r} is {block!r}, which is not two positive integers")
    return block[0], block[1]


# ---- fp8 ------------------------------------------------------------------------------------------------------------

_LAYERS: KnownKeys = {"modules_to_not_convert": names, "ignored_layers": names, "ignore": names}
_FP8: KnownKeys = {
    **_LAYERS,
    "quant_method": anything,
    "weight_block_size": anything,
    "fmt": only(None, "e4m3"),
    "activation_scheme": anything,
    "scale_fmt": anything,
    "dequantize": anything,
    "modules_to_convert": names,
    "expert_dtype": anything,
    "kv_cache_scheme": anything,
    "kv_cache_quant_method": anything,
}
_DEFAULT_FP8_BLOCK = (128, 128)


def _fp8(config: RawConfig) -> Fp8:
    if "weight_block_size" in config.values:
        return Fp8(_block(config, "weight_block_size"), has_default_block=False)
    return Fp8(_DEFAULT_FP8_BLOCK, has_default_block=True)


# ---- compressed-tensors ---------------------------------------------------------------------------------------------

_FLOATS = only(None, *(prefix + name for prefix in ("", "torch.") for name in ("float32", "float16", "bfloat16")))
_REORDERED = (True, "group", "dynamic")
_WEIGHTS: KnownKeys = {
    **dict.fromkeys(("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure"), anything),
    "actorder": only(None, False, "weight", "static", *_REORDERED),
    "dynamic": only(None, False),
    "scale_dtype": _FLOATS,
    "zp_dtype": anything,
    "observer": anything,
    "observer_kwargs": anything,
}
_ACTIVATIONS: KnownKeys = dict.fromkeys(_WEIGHTS, anything)
_SCHEME: KnownKeys = {
    "targets": names,
    "weights": record(_WEIGHTS),
    "input_activations": record(_ACTIVATIONS),
    "output_activations": record(_ACTIVATIONS),
    "format": anything,
}
_INT4, _INT8 = {"num_bits": 4, "group_size": 128}, {"num_bits": 8}
_FP8_CODES = {"num_bits": 8, "type": "float"}
_PRESETS: Mapping[str, Mapping[str, Any]] = {
    **{name: {**_INT8, "strategy": "channel"} for name in ("W8A8", "INT8")},
    "W8A16": {**_INT8, "group_size": 128},
    **dict.fromkeys(("W4A16", "W4A8", "W4AFP8", "W4A4"), _INT4),
    "W4A16_ASYM": {**_INT4, "symmetric": False},
    "FP8": {**_FP8_CODES, "strategy": "tensor"},
    "FP8_DYNAMIC": {**_FP8_CODES, "strategy": "channel"},
    "FP8_BLOCK": {**_FP8_CODES, "strategy": "block", "block_structure": [128, 128]},
}
"""The weight settings of preset schemes. A group may name a preset with a list of targets instead of a full scheme."""


def _group(source: str, key: str, value: Any) -> None:
    """Accept a scheme, or the targets of a preset."""
    if not isinstance(value, list):
        record(_SCHEME)(source, key, value)
        return
    names(source, key, value)
    if key.upper() not in _PRESETS:
        raise UnsupportedModelError(
            f"{source}: preset {key!r} is not supported; supported presets: {', '.join(_PRESETS)}"
        )


_SPARSITY: KnownKeys = {
    "format": only(None, "dense"),
    **dict.fromkeys(
        ("targets", "ignore", "global_sparsity", "sparsity_structure", "registry_requires_subclass"), anything
    ),
}
_COMPRESSED: KnownKeys = {
    "quant_method": anything,
    "config_groups": each(_group),
    "format": anything,
    "ignore": names,
    "transform_config": only(None, {}, {"config_groups": {}}),
    "sparsity_config": record(_SPARSITY),
    "moe_sparsity_config": only(None, {}),
    "kv_cache_scheme": record(_ACTIVATIONS),
    "quantization_status": only(None, "initialized", "calibration", "frozen", "compressed", "decompressed"),
    **dict.fromkeys(("global_compression_ratio", "version", "run_compressed"), anything),
    **dict.fromkeys(("dequantize", "use_optimized_inference"), anything),
}
_PACKED, _PLAIN = "pack-quantized", ("float-quantized", "int-quantized", "naive-quantized")


def _compressed(config: RawConfig) -> Compressed:
    groups = config.section("config_groups")
    if groups is None or len(groups.values) != 1:
        raise _refused(config.source, "has several quantisations (config_groups), or none")
    weights, own_format = _weights_of_group(groups)
    kind, bits = (weights.text("type", None) or "int").lower(), weights.integer("num_bits", 8)
    group_size = None if weights.values.get("group_size") is None else _group_size(weights, "group_size", None)
    block, strategy = _block(weights, "block_structure"), _strategy(weights, group_size)
    form = own_format or config.text("format", None)
    is_packed = form == _PACKED and kind == "int"
    is_known = (kind == "float" and bits == 8) or (kind == "int" and bits in (4, 8) and strategy != "block")
    if not is_known or strategy not in ("tensor", "channel", "group", "block") or not (is_packed or form in _PLAIN):
        raise _refused(weights.source, f"says {kind}{bits} by {strategy}, {form}")
    if (group_size is None) != (strategy != "group") or (block is None) != (strategy != "block"):
        raise CorruptModelError(
            f"{weights.source}: strategy {strategy!r} does not go with 'group_size' {group_size} and "
            f"'block_structure' {block}"
        )
    return Compressed(
        kind=kind,
        bits=bits,
        strategy=strategy,
        group_size=group_size,
        block=block,
        is_packed=is_packed,
        is_symmetric=weights.boolean("symmetric", True),
        is_reordered=weights.values.get("actorder") in _REORDERED,
    )


def _weights_of_group(groups: RawConfig) -> tuple[RawConfig, str | None]:
    """The record of the only group's weights, and the group's own format."""
    name, value = next(iter(groups.values.items()))
    if isinstance(value, list):
        return RawConfig(_PRESETS[name.upper()], f"{groups.source}: {name}"), None
    group = groups.section(name)
    weights = None if group is None else group.section("weights")
    if group is None or weights is None:
        raise _refused(f"{groups.source}: {name}", "has no quantised weights")
    return weights, group.text("format", None)


def _strategy(weights: RawConfig, group_size: int | None) -> str:
    """The strategy that is named, or the one the library infers from the group size."""
    named = weights.text("strategy", None)
    if named is not None:
        return named.lower()
    if group_size is not None:
        return "group"
    return "tensor" if weights.values.get("group_size") is None else "channel"


# ---- gptq and awq ---------------------------------------------------------------------------------------------------

_RECIPE: KnownKeys = dict.fromkeys(
    (
        *(
            "damp_percent",
            "damp_auto_increment",
            "true_sequential",
            "static_groups",
            "act_group_aware",
            "mse",
            "dataset",
        ),
        *("tokenizer", "batch_size", "pad_token_id", "model_seqlen", "max_input_length", "cache_block_outputs", "meta"),
        *("model_name_or_path", "model_file_base_name", "block_name_to_quantize", "module_name_preceding_first_block"),
        *("modules_in_block_to_quantize", "lm_head", "use_cuda_fp16", "use_exllama", "disable_exllama"),
        *("exllama_config", "v2", "parallel_packing", "device", "uri", "quantizer"),
        # AutoRound
        *("iters", "lr", "minmax_lr", "amp", "nsamples", "seqlen", "scale_dtype", "autoround_version", "provider"),
        *("gradient_accumulate_steps", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input"),
        *("low_gpu_mem_usage", "to_quant_block_names", "enable_torch_compile", "packing_format"),
        *("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym"),
    ),
    anything,
)
"""Keys that say how the codes were computed and how other engines run them."""
_GPTQ: KnownKeys = {
    **_LAYERS,
    **_RECIPE,
    **dict.fromkeys(("quant_method", "bits", "group_size", "desc_act", "sym"), anything),
    "format": only(None, "gptq", "gptq_v2"),
    "checkpoint_format": only(None, "gptq", "gptq_v2"),
    "backend": anything,
    "is_marlin_format": only(None, False),
    "pack_dtype": only(None, "int32", "torch.int32"),
    "dynamic": each(only({}, False)),
    "data_type": only(None, "int"),
    "extra_config": only(None, {}),
    **dict.fromkeys(("adapter", "rotation", "super_bits", "super_group_size"), only(None, {})),
}
_AWQ: KnownKeys = {
    **_GPTQ,
    **dict.fromkeys(("w_bit", "q_group_size", "do_fuse", "fuse_max_seq_len", "modules_to_fuse"), anything),
    "zero_point": only(None, True),
    "version": anything,
    "format": anything,
    "checkpoint_format": anything,
    "backend": only(None, "auto", "autoawq", "gptqmodel"),
}


def _gptq(config: RawConfig) -> Gptq:
    bits, group_size = config.integer("bits"), _group_size(config, "group_size", 128)
    if bits not in (4, 8):
        raise _refused(config.source, f"says gptq with {bits} bits")
    form = config.text("checkpoint_format", None) or config.text("format", None) or "gptq"
    config.boolean("sym", True)  # zero points are stored in any case
    is_reordered = config.boolean("desc_act", False) and group_size is not None
    return Gptq(bits, group_size, is_reordered=is_reordered, stores_zeros_less_one=form == "gptq")


def _awq(config: RawConfig) -> Awq:
    bits = config.integer("bits", config.integer("w_bit", 4))
    group_size = _group_size(config, "q_group_size" if "q_group_size" in config.values else "group_size", 128)
    versions = {(config.text(key, None) or "gemm").lower() for key in ("version", "format", "checkpoint_format")}
    if bits != 4 or versions != {"gemm"}:
        raise _refused(config.source, f"says awq with {bits} bits, version {', '.join(sorted(versions - {'gemm'}))}")
    return Awq(group_size)


_METHODS: Mapping[str, tuple[KnownKeys, Callable[[RawConfig], Quantization]]] = {
    "fp8": (_FP8, _fp8),
    "compressed-tensors": (_COMPRESSED, _compressed),
    "gptq": (_GPTQ, _gptq),
    "awq": (_AWQ, _awq),
}
