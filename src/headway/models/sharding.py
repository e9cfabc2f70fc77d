"""Which part of a model a rank has: heads, columns of the MLP, tokens of the vocabulary.

    q, k, v, gate, up        rows of the weight: each rank computes its own heads and columns
    o, down                  columns of the weight: each rank has a part of every sum
    embedding, output layer  rows: a rank knows some tokens' vectors, and computes their logits
    norms                    whole, on every rank

Where there are more ranks than key heads, several ranks have the same one and divide its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.errors import ConfigError
from headway.models.decoder_config import DecoderConfig

_UNITS = (256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Columns of the MLP that stay together: groups of quantised weights, and widths that kernels like."""
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
    """Of the MLP."""
    vocab: range
    vocab_width: int
    """Tokens of a rank; the last may have fewer."""
    whole: DecoderConfig

    @classmethod
    def of(cls, config: DecoderConfig, rank: int, size: int) -> Shard:
        """That of rank `rank` of `size`. `ConfigError` if the model cannot be divided so."""
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
        """That of the rank with most heads."""
        return max((cls.of(config, rank, size) for rank in range(size)), key=lambda shard: len(shard.heads))

    @property
    def config(self) -> DecoderConfig:
        """The rank's own heads and columns; the vocabulary is everybody's."""
        return replace(
            self.whole,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.columns),
        )

    def part(self, name: str) -> tuple[int, range] | None:
        """Which dimension of this tensor is divided, and the rank's range of it; None: the tensor is whole."""
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
        """Of the rank's part of a tensor."""
        part = self.part(name)
        return whole if part is None else (*whole[: part[0]], len(part[1]), *whole[part[0] + 1 :])

    def has_bias(self, name: str) -> bool:
        """Whether the bias of this layer is this rank's to add: that of a sum is the first's."""
        return self.rank == 0 or not name.endswith(("o_proj", "down_proj"))


def _scaled(part: range, times: int) -> range:
    return range(part.start * times, part.stop * times)


def _heads(config: DecoderConfig, rank: int, size: int) -> tuple[range, range]:
    """(key heads, query heads)"""
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
    """Those that work, for people."""
    num_kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    more = [num_kv * times for times in range(2, group + 1) if group % times == 0]
    return f"1 to {num_kv}" + (f", or {', '.join(map(str, more))}" if more else "")


def _vocab_width(num: int, size: int) -> int:
    """Even numbers where the last rank still gets some."""
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
