"""Builds a `Decoder` from a checkpoint: which tensors are needed, which are fused, and the order they are read in.

The checkpoint's index is compared with what the architecture implies before anything is read, so a wrong file fails at
once. Then one tensor at a time is read, put in its place and dropped. The peak memory is the finished model plus one
layer's widest projection.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from headway import native
from headway.attention.base import HeadNorms, Heads
from headway.errors import ConfigError, CorruptModelError, MissingTensorError, OutOfMemoryError, TensorShapeError
from headway.layers import LinearFactory
from headway.layers.collectives import Collectives, SummedLinear
from headway.layers.linear import Linear
from headway.layers.ops import DenseMlp, Ops
from headway.layers.quantized_weight import QuantizedWeight, Weight, stacked
from headway.models.checkpoint import Checkpoint
from headway.models.decoder import Decoder, DecoderLayer, Vocabulary
from headway.models.decoder_config import (
    DecoderConfig,
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    Shard,
    YarnScaling,
)

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read)."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

# Buffers that old exporters saved, and that can be computed from the configuration.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)attn\.(masked_)?bias$")
_MAX_NAMES_SHOWN = 5


def load_decoder(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantization: str = "none",
    keeps_stored: bool = False,
    max_model_len: int | None = None,
    progress: Progress | None = None,
    ranks: Collectives | None = None,
) -> Decoder:
    """Read a checkpoint, or this rank's part of it, into a model on `device` that computes in `dtype`.

    `quantization` and `keeps_stored` say how weights are held (see `LinearFactory`); `max_model_len` limits the
    rotary table.
    """
    config = checkpoint.config
    factory = LinearFactory(quantization, keeps_stored=keeps_stored, device=device, dtype=dtype, kernels=ops.name)
    num_positions = config.max_position if max_model_len is None else max_model_len
    if not 0 < num_positions <= config.max_position:
        raise ConfigError(f"max_model_len {num_positions} is not within the model's context of {config.max_position}")
    check_tensors(checkpoint)
    shard = None if ranks is None else Shard.of(config, ranks.rank, ranks.size)
    reader = _Reader(checkpoint, torch.device(device), dtype, factory, progress, shard)
    try:
        return _assemble(reader, ops, num_positions, ranks)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the weights of {checkpoint.name} ({checkpoint.num_bytes / 2**30:.1f} GiB on disk) "
            f"do not fit on {device}; use a smaller model, a smaller dtype, or a device with more free memory"
        ) from error


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the architecture needs."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise if a tensor is missing or has the wrong shape; warn of tensors the architecture has no place for."""
    expected = expected_tensors(checkpoint.config)
    index = checkpoint.index
    missing = [name for name in expected if name not in index]
    if missing:
        raise MissingTensorError(
            f"{checkpoint.name} lacks {_summary(missing)}, which {checkpoint.config.architecture} needs; "
            "the download may be incomplete, or the configuration may belong to another model"
        )
    wrong = [
        f"{name} is {list(index[name].shape)} but the configuration implies {list(shape)}"
        for name, shape in expected.items()
        if index[name].shape != shape
    ]
    if wrong:
        raise TensorShapeError(f"{checkpoint.name}: {_summary(wrong)}")
    tied = checkpoint.config.tie_embeddings
    unexpected = [
        name for name in index if name not in expected and not _HARMLESS.search(name) and not (tied and name == LM_HEAD)
    ]
    if unexpected:
        logger.warning(
            "%s has tensors that %s does not use: %s",
            checkpoint.name,
            checkpoint.config.architecture,
            _summary(unexpected),
        )


def _summary(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_MAX_NAMES_SHOWN])
    return shown if len(items) <= _MAX_NAMES_SHOWN else f"{shown} and {len(items) - _MAX_NAMES_SHOWN} more"


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. Reads the tensor once, and allocates no tensor of its size."""
    if tensor.is_cpu and tensor.dtype == torch.float32 and tensor.is_contiguous() and native.is_available():
        return native.is_finite(tensor)
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


class _Reader:
    """Reads tensors to the model's device and dtype, and counts the bytes read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        factory: LinearFactory,
        progress: Progress | None,
        shard: Shard | None = None,
    ) -> None:
        self.config = checkpoint.config if shard is None else shard.config
        self.device = device
        self.factory = factory
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._progress = progress
        self._shard = shard
        self._num_bytes_read = 0
        self._names_read: set[str] = set()
        self._num_bytes = sum(checkpoint.index[name].num_bytes for name in expected_tensors(checkpoint.config))

    def tensor(self, name: str) -> Tensor:
        part = self._part(name)
        if part is None:
            read = self._checkpoint.read(name, device=self.device)
        else:
            read = self._checkpoint.read_part(name, *part, device=self.device)
        self._count(name)
        tensor = read.to(device=self.device, dtype=self._dtype)
        if not is_finite(tensor):
            self._refuse(name, read)
        return tensor

    def weight(self, name: str) -> Weight:
        """Read as `tensor` does, or as codes and scales if the weight stays stored so."""
        if not self.stays_stored(name):
            return self.tensor(name)
        weight = self._checkpoint.read_weight(name, device=self.device)
        assert isinstance(weight, QuantizedWeight), name
        self._count(name)
        for numbers in (weight.scales, weight.offsets):
            if numbers is not None and not is_finite(numbers):
                self._refuse(name, numbers)
        part = self._part(name)
        own = weight if part is None else _taken(weight, *part)
        return own.to(self.device) if isinstance(own, QuantizedWeight) else own.to(self.device, self._dtype)

    def stays_stored(self, name: str) -> bool:
        """Whether a weight is stored as codes and scales, and is kept so."""
        return self.factory.keeps_stored and name in self._checkpoint.quantized

    def _part(self, name: str) -> tuple[int, range] | None:
        return None if self._shard is None else self._shard.part(name)

    def _count(self, name: str) -> None:
        if name in self._names_read:
            return  # a tied table is read twice: as floats, and as the output layer's codes
        self._names_read.add(name)
        self._num_bytes_read += self._checkpoint.index[name].num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes_read, self._num_bytes)

    def _refuse(self, name: str, read: Tensor) -> NoReturn:
        """Raise for a weight with values that are not finite. One such value makes every answer NaN or, in a quantised
        weight, plausible and wrong."""
        source = f"{self._checkpoint.name}: tensor {name}"
        if is_finite(read):
            dtype = str(self._dtype).removeprefix("torch.")
            raise ConfigError(f"{source} has values that {dtype} cannot hold; use dtype 'bfloat16' or 'float32'.")
        raise CorruptModelError(
            f"{source} has values that are no numbers (NaN or infinity); the file is damaged: download it again"
        )

    def linear(self, *names: str, bias: bool) -> Linear:
        """One Linear from the projections `names`, their outputs side by side."""
        weights = [f"{name}.weight" for name in names]
        has_bias = bias and (self._shard is None or self._shard.has_bias(names[0]))
        own_bias = self._stacked([f"{name}.bias" for name in names]) if has_bias else None
        if any(self.stays_stored(name) for name in weights):
            return self.factory.linear(stacked([self.weight(name) for name in weights]), own_bias)
        part = self._part(weights[0])
        if part is not None and part[0] == 1 and self.factory.scales_whole_rows:
            return self.factory.linear(self._quantised(weights[0], part[1]), own_bias)
        return self.factory.linear(self._stacked(weights), own_bias)

    def _quantised(self, name: str, columns: range) -> Weight:
        """Quantise a part of a weight with the scales of whole rows, as they are when rows are not divided."""
        read = self._checkpoint.read(name, device=self.device).to(device=self.device, dtype=self._dtype)
        self._count(name)
        if not is_finite(read):
            self._refuse(name, read)
        return self.factory.quantised(read).columns(columns)

    def vocabulary(self, ranks: Collectives | None) -> Vocabulary | None:
        """This rank's tokens, if the vocabulary is divided among ranks; otherwise None."""
        if self._shard is None or ranks is None:
            return None
        return Vocabulary(ranks, own=self._shard.vocab, width=self._shard.vocab_width, size=self.config.vocab_size)

    def _shape(self, name: str) -> tuple[int, ...]:
        whole = self._checkpoint.index[name].shape
        return whole if self._shard is None else self._shard.shape(name, whole)

    def _stacked(self, names: Sequence[str]) -> Tensor:
        if len(names) == 1:
            return self.tensor(names[0])
        shapes = [self._shape(name) for name in names]
        rows = [shape[0] for shape in shapes]
        stacked = torch.empty(sum(rows), *shapes[0][1:], dtype=self._dtype, device=self.device)
        for name, part in zip(names, stacked.split(rows), strict=True):
            part.copy_(self.tensor(name))
        return stacked


def _taken(weight: QuantizedWeight, dim: int, part: range) -> Weight:
    return weight.rows(part) if dim == 0 else weight.columns(part)


def _assemble(reader: _Reader, ops: Ops, num_positions: int, ranks: Collectives | None) -> Decoder:
    config = reader.config
    embedding = reader.tensor(EMBEDDING)
    heads = Heads(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        cos_sin=build_cos_sin(config.rope, config.head_dim, num_positions, device=reader.device),
        eps=config.rms_norm_eps,
    )
    layers = [
        _assemble_layer(config, reader, f"model.layers.{index}.", heads, ranks) for index in range(config.num_layers)
    ]
    norm = reader.tensor(FINAL_NORM)
    head = EMBEDDING if config.tie_embeddings else LM_HEAD
    is_table = config.tie_embeddings and not reader.stays_stored(head)
    lm_head = reader.factory.head(embedding if is_table else reader.weight(head))
    return Decoder(
        config,
        ops=ops,
        embedding=embedding,
        layers=layers,
        norm=norm,
        lm_head=lm_head,
        vocabulary=reader.vocabulary(ranks),
    )


def _assemble_layer(
    config: DecoderConfig, reader: _Reader, prefix: str, heads: Heads, ranks: Collectives | None
) -> DecoderLayer:
    def summed(linear: Linear) -> Linear:
        return linear if ranks is None else SummedLinear(linear, ranks)

    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return DecoderLayer(
        heads=heads,
        input_norm=reader.tensor(prefix + "input_layernorm.weight"),
        qkv=reader.linear(attention + "q_proj", attention + "k_proj", attention + "v_proj", bias=config.qkv_bias),
        head_norms=_head_norms(reader, attention) if config.qk_norm else None,
        o=summed(reader.linear(attention + "o_proj", bias=config.o_bias)),
        post_attention_norm=reader.tensor(prefix + "post_attention_layernorm.weight"),
        mlp=DenseMlp(
            gate_up=reader.linear(mlp + "gate_proj", mlp + "up_proj", bias=config.mlp_bias),
            down=summed(reader.linear(mlp + "down_proj", bias=config.mlp_bias)),
        ),
    )


def _head_norms(reader: _Reader, prefix: str) -> HeadNorms:
    return HeadNorms(q=reader.tensor(prefix + "q_norm.weight"), k=reader.tensor(prefix + "k_norm.weight"))


# ---- rotary tables --------------------------------------------------------------------------------------------------
# The frequencies of a head of D elements are theta^(-2i/D), i < D/2. They are computed in float32, in the same order of
# operations as in Hugging Face transformers: at position 8,000 a last-bit difference in a frequency is visible.


def build_cos_sin(rope: RopeConfig, head_dim: int, num_positions: int, *, device: torch.device | str = "cpu") -> Tensor:
    """The rotary table, float32 [num_positions, head_dim]: each row has the cosines of the head_dim / 2 pairs, then
    their sines."""
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * scaled_frequencies(rope, head_dim)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(device)


def scaled_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """The radians per position of each of the head_dim / 2 pairs, float32."""
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    base = 1.0 / powers
    match rope.scaling:
        case None:
            return base
        case LinearScaling(factor=factor):
            return base / factor
        case FrequencyFactors(factors=factors):
            if len(factors) != head_dim // 2:
                raise CorruptModelError(f"{len(factors)} rope frequency factors for a head of {head_dim} elements")
            return base / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3_frequencies(base, scaling)
        case YarnScaling() as scaling:
            return _yarn_frequencies(powers, rope.theta, head_dim, scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Divide frequencies that turn rarely within the original context by `factor`, keep fast ones, blend between."""
    factor, low, high = scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position
    wavelength = 2 * math.pi / frequencies
    ramp = (original / wavelength - low) / (high - low)
    blended = (1 - ramp) * frequencies / factor + ramp * frequencies
    kept_or_blended = torch.where(wavelength < original / high, frequencies, blended)
    return torch.where(wavelength > original / low, frequencies / factor, kept_or_blended)


def _yarn_frequencies(powers: Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    """Pairs turning more than beta_fast times keep their frequency, fewer than beta_slow divide it by `factor`."""

    def pair_turning(times: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept
