"""One normalised description of a decoder, for every model family and every file format.

It uses only the standard library, so the scheduler, the simulator and the command line can reason about a model
without tensors. `Shard` says which part of a model a rank has:

    q, k, v, gate, up        rows of the weight: each rank computes its own heads and columns
    o, down                  columns of the weight: each rank has a part of every sum
    embedding, output layer  rows: a rank knows some tokens' vectors, and computes their logits
    norms                    whole, on every rank

If there are more ranks than key heads, several ranks have the same key head and divide its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.errors import ConfigError


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by one factor (position interpolation)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth ramp between (Llama 3.1 and later)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: interpolate slow dimensions, keep fast ones, and sharpen attention by `attention_factor`."""

    factor: float
    original_max_position: int
    attention_factor: float
    """Multiplies cosines and sines; already computed from `mscale` and related keys."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by a factor of its own, as a GGUF file's `rope_freqs.weight` gives them."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over the whole head."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and switches of a decoder-only transformer with RMS norm, SwiGLU and rotary positions."""

    architecture: str
    """"llama", "mistral", "qwen2" or "qwen3"."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """The longest context that the model was trained for."""
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = False
    """Whether the output projection is the embedding table."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k has an RMS norm before the rotation."""
    rope: RopeConfig = RopeConfig()
    torch_dtype: str = "float32"
    """The dtype the checkpoint declares: "float32", "float16" or "bfloat16"."""
    stored: str = ""
    """The quantised format of the checkpoint's linear layers, shown to people; empty: floats."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """The KV-cache bytes of one token in all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes

    @property
    def num_parameters(self) -> int:
        """The number of weights in the whole model; a tied embedding counts once."""
        embedding = self.vocab_size * self.hidden_size
        attention = self.hidden_size * (self.qkv_size + self.q_size)
        attention += self.qkv_size * self.qkv_bias + self.hidden_size * self.o_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        layer = attention + mlp + 2 * self.hidden_size
        return embedding * (1 if self.tie_embeddings else 2) + self.num_layers * layer + self.hidden_size


_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Numbers of MLP columns that stay on one rank, largest first: they keep quantisation groups whole and suit kernels."""
_VOCAB_UNIT = 64
_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True)
class Shard:
    """A rank's part of a model."""

    rank: int
    size: int
    heads: range
    kv_heads: range
    columns: range
    """The rank's columns of the MLP."""
    vocab: range
    vocab_width: int
    """The number of tokens per rank; the last rank may have fewer."""
    whole: DecoderConfig

    @classmethod
    def of(cls, config: DecoderConfig, rank: int, size: int) -> Shard:
        """The part of rank `rank` of `size`. Raises `ConfigError` if the model cannot be divided so."""
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} of {size}")
        kv_heads, heads = _heads(config, rank, size)
        width = _vocab_width(config.vocab_size, size)
        first = min(rank * width, config.vocab_size)
        return cls(
            rank=rank,
            size=size,
            heads=heads,
            kv_heads=kv_heads,
            columns=_columns(config.intermediate_size, rank, size),
            vocab=range(first, min(first + width, config.vocab_size)),
            vocab_width=width,
            whole=config,
        )

    @classmethod
    def largest(cls, config: DecoderConfig, size: int) -> Shard:
        """The part of the rank with the most heads."""
        return max((cls.of(config, rank, size) for rank in range(size)), key=lambda shard: len(shard.heads))

    @property
    def config(self) -> DecoderConfig:
        """The model's configuration with this rank's heads and columns, and the whole vocabulary."""
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.columns),
        )

    def part(self, name: str) -> tuple[int, range] | None:
        """The dimension in which this tensor is divided, and the rank's range of it. None: the tensor is whole."""
        kind, end = name.split(".")[-2:]
        head_dim = self.whole.head_dim
        if kind == "q_proj":
            return _ROWS, _scaled(self.heads, head_dim)
        if kind in ("k_proj", "v_proj"):
            return _ROWS, _scaled(self.kv_heads, head_dim)
        if kind in ("gate_proj", "up_proj"):
            return _ROWS, self.columns
        if kind in ("embed_tokens", "lm_head"):
            return _ROWS, self.vocab
        if end == "weight" and kind == "o_proj":
            return _COLUMNS, _scaled(self.heads, head_dim)
        if end == "weight" and kind == "down_proj":
            return _COLUMNS, self.columns
        return None

    def shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the rank's part of a tensor."""
        part = self.part(name)
        return whole if part is None else (*whole[: part[0]], len(part[1]), *whole[part[0] + 1 :])

    def has_bias(self, name: str) -> bool:
        """Whether this rank adds the layer's bias. The bias of a sum over ranks is added by the first rank."""
        return self.rank == 0 or not name.endswith(("o_proj", "down_proj"))


def _scaled(part: range, times: int) -> range:
    return range(part.start * times, part.stop * times)


def _heads(config: DecoderConfig, rank: int, size: int) -> tuple[range, range]:
    """The rank's (key heads, query heads)."""
    num_kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    if size <= num_kv:
        kv = range(rank * num_kv // size, (rank + 1) * num_kv // size)
        return kv, _scaled(kv, group)
    per_head = size // num_kv
    if size % num_kv or group % per_head:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide the model's {config.num_heads} heads over {num_kv} key heads;"
            f" use {_sizes(config)}."
        )
    kv_head, place = divmod(rank, per_head)
    each = group // per_head
    first = kv_head * group + place * each
    return range(kv_head, kv_head + 1), range(first, first + each)


def _sizes(config: DecoderConfig) -> str:
    """The numbers of ranks that work, as text for an error message."""
    num_kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    more = [num_kv * times for times in range(2, group + 1) if group % times == 0]
    return f"1 to {num_kv}" + (f", or {', '.join(map(str, more))}" if more else "")


def _vocab_width(num: int, size: int) -> int:
    """The number of tokens per rank: a multiple of `_VOCAB_UNIT`, if the last rank then still gets some."""
    if num < size:
        raise ConfigError(f"tensor_parallel_size {size} is more than the model's {num} tokens.")
    widths = [-(-num // (size * unit)) * unit for unit in (_VOCAB_UNIT, 1)]
    return next((width for width in widths if (size - 1) * width < num), widths[-1])


def _columns(num: int, rank: int, size: int) -> range:
    units = [unit for unit in _UNITS if num % unit == 0 and num // unit >= size]
    if not units:
        raise ConfigError(f"tensor_parallel_size {size} is more than the model's {num} columns of an MLP.")
    unit = next((unit for unit in units if num // unit % size == 0), units[0])
    places = num // unit
    return range(rank * places // size * unit, (rank + 1) * places // size * unit)
