"""The number formats of the KV cache: plain floats, or codes of 8 or 4 bits with a scale per token and head.

A scaled format keeps, for the key and for the value of one token and head, one float16 scale and head_dim codes:

    scale = float16(largest magnitude / largest code)      code = nearest(x / scale)      x ≈ code * scale

    format    keys                 values               bytes per token and head at head_dim 64 / 128
    int8      8-bit integers       8-bit integers       132 / 260
    fp8       float8 (e4m3fn)      float8 (e4m3fn)      132 / 260
    int4      8-bit integers       4-bit integers       100 / 196

Keys stay in 8 bits in `int4`: a few of their dimensions are many times larger than the others, and a 4-bit step sized
for these wipes the others out (docs/kv_quantisation.md has the measurement).

`FORMATS` is the only list of formats. The option's choices, the size of a block and the tensors of the cache follow
from an entry there; docs/adding_a_kv_format.md adds one. How numbers become codes is in `headway/kv/codes.py`. Nothing
here needs torch: core and front ends read options, too.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 2
"""A scale is a float16."""


@dataclass(frozen=True)
class Numbers:
    """How the keys, or the values, of one token and head are stored."""

    name: str
    stored_as: str
    """torch's name for the dtype of the stored tensor."""
    bits: int
    """The number of bits per dimension."""
    largest: float | None = None
    """The largest code of a scaled format; `None`: numbers are stored as they are."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            raise ValueError(f"{self.name}: headway/kv/codes.py packs no numbers of {self.bits} bits")

    @property
    def dims_per_element(self) -> int:
        """The number of dimensions that share one element of the stored tensor."""
        return 2 if self.bits < 8 else 1

    def num_bytes(self, head_dim: int) -> int:
        """The bytes of one token and head, with its scale."""
        return head_dim * self.bits // 8 + (0 if self.largest is None else SCALE_BYTES)


@dataclass(frozen=True)
class KVFormat:
    """How a cache stores keys and values."""

    name: str
    keys: Numbers
    values: Numbers
    kernels: tuple[str, ...] = ("torch",)
    """The kernels that read and write it. Those of torch are the reference and support every format."""

    def __post_init__(self) -> None:
        if (self.keys.largest is None) != (self.values.largest is None):
            raise ValueError(f"{self.name}: keys and values are both stored with scales, or both without")

    @property
    def is_scaled(self) -> bool:
        """Whether there are scales beside the stored numbers."""
        return self.keys.largest is not None

    def num_bytes(self, head_dim: int) -> int:
        """The bytes of the key and the value of one token and head, scales included."""
        return self.keys.num_bytes(head_dim) + self.values.num_bytes(head_dim)


def _plain(name: str, bits: int, *kernels: str) -> KVFormat:
    numbers = Numbers(name, name, bits)
    return KVFormat(name, numbers, numbers, kernels)


_INT8 = Numbers("int8", "int8", 8, largest=127.0)
_FP8 = Numbers("fp8", "float8_e4m3fn", 8, largest=448.0)
_INT4 = Numbers("int4", "uint8", 4, largest=7.0)
_ALL = ("torch", "native", "triton")

FORMATS: dict[str, KVFormat] = {
    format.name: format
    for format in (
        _plain("float32", 32, *_ALL),
        _plain("float16", 16, *_ALL),
        _plain("bfloat16", 16, "torch", "triton"),
        KVFormat("fp8", _FP8, _FP8, _ALL),
        KVFormat("int8", _INT8, _INT8, _ALL),
        KVFormat("int4", _INT8, _INT4, _ALL),
    )
}
