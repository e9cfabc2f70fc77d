"""Thin wrappers around the compiled kernels: check the tensors, pass their addresses.

Every function also exists as a raw entry of `NativeLibrary` for callers that already hold checked addresses. Short
kernels are called with the interpreter lock held (taking it back under contention would cost more than they run); long
ones release it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
from collections.abc import Iterable, Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import NativeBuildError
from headway.native.build import ISA_VARIABLE, build, load_library, usable_cpus

logger = logging.getLogger(__name__)

GGUF_BLOCKS = {"Q4_0": (0, 18), "Q4_1": (1, 20), "Q8_0": (2, 34)}
"""GGUF types the kernels dequantise: name -> (code, bytes per block of 32 values)."""

RELEASE_LOCK_MACS = 1 << 25
"""A linear layer of at least this many multiply-adds (about 0.3 ms on one core) releases the interpreter lock."""

WEIGHT_KINDS = ("hw_int8_linear", "hw_int4_linear", "hw_f32_linear")
"""Kernels of packed weights, in the order of `hw_weights`."""

TILE = 16
"""The number of outputs that are packed together."""
INT4_GROUP = 32
"""The number of inputs that share a scale in 4-bit weights."""

MAX_HEAD_DIM = 1024
SAMPLING_RECORD_BYTES = 40


class Int4Form(ctypes.Structure):
    """How 4-bit weights are packed: `hw_int4_form`."""

    _fields_ = (("is_signed", ctypes.c_int32), ("has_offsets", ctypes.c_int32), ("is_half", ctypes.c_int32))


_P, _I, _F, _N = c_void_p, c_int64, c_float, c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "hw_isa": (ctypes.c_char_p, ()),
    "hw_set_num_threads": (None, (_N,)),
    "hw_get_num_threads": (_N, ()),
    "hw_fork_join_ns": (c_double, (_I,)),
    "hw_advise_huge": (None, (_P, ctypes.c_size_t)),
    "hw_int8_packed_bytes": (_I, (_I, _I)),
    "hw_int8_pack": (None, (_P, _I, _I, _P)),
    "hw_int8_linear": (None, (_P, _I, _I, _P, _I, _P, _P)),
    "hw_int4_packed_bytes": (_I, (Int4Form, _I, _I)),
    "hw_int4_pack": (None, (Int4Form, _P, _P, _P, _I, _I, _P)),
    "hw_int4_linear": (None, (_P, _I, _I, _P, _I, _P, _P)),
    "hw_f32_packed_bytes": (_I, (_I, _I)),
    "hw_f32_pack": (None, (_P, _I, _I, _P)),
    "hw_f32_linear": (None, (_P, _I, _I, _P, _I, _P, _P)),
    "hw_rms_norm": (None, (_P, _P, _F, _I, _I, _P)),
    "hw_add_rms_norm": (None, (_P, _P, _P, _F, _I, _I, _P)),
    "hw_silu_mul": (None, (_P, _I, _I, _P)),
    "hw_norm_linear": (None, (_P, _P, _P, _P, _F, _I, _N, _P)),
    "hw_norm_mlp": (None, (_P, _P, _P, _P, _P, _F, _I, _P)),
    "hw_rope_write_kv": (None, (_P, _P, _P, _P, _I, _P)),
    "hw_attention_plan_new": (_P, (_I, _I, _I, _I)),
    "hw_attention_plan_free": (None, (_P,)),
    "hw_attention_plan_set": (_N, (_P, _I, _P, _P, _P, _I)),
    "hw_attention_run": (None, (_P, _P, _P, _P)),
    "hw_attend": (None, (_P, _P, _P, _P, _P, _I, _P)),
    "hw_dequantize": (None, (_P, _N, _I, _P)),
    "hw_is_finite": (_N, (_P, _I)),
    "hw_meeting_bytes": (_I, (_I, _I)),
    "hw_meeting_abort": (None, (_P,)),
    "hw_ranks_sum": (_N, (_P, _I, _I, _I, ctypes.c_uint64, _P, _I)),
    "hw_ranks_gather": (_N, (_P, _I, _I, _I, ctypes.c_uint64, _P, _I, _P, _I)),
    "hw_sample_tokens": (None, (_P, _I, _I, _P, _P, _P, _P)),
    "hw_mask_logits": (None, (_P, _I, _P, _P, _I, _I)),
}


class NativeLibrary:
    """One loaded shared library. `held` calls keep the interpreter lock, `released` calls give it up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.held: Any = ctypes.PyDLL(str(path))
            self.released: Any = load_library(path)
            for library in (self.held, self.released):
                for name, (result, arguments) in _SIGNATURES.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise NativeBuildError(
                f"the compiled CPU kernels at {path} cannot be loaded: {error}. Delete it."
            ) from error
        self.isa: str = self.held.hw_isa().decode()
        self.set_num_threads(usable_cpus())

    def set_num_threads(self, n: int) -> None:
        """Set how many threads a kernel may use, the caller included. Workers start when first needed."""
        self.released.hw_set_num_threads(n)

    def get_num_threads(self) -> int:
        return int(self.held.hw_get_num_threads())


@functools.cache
def load() -> NativeLibrary:
    """The library for this process, compiled first if needed. Raises NativeBuildError."""
    library = NativeLibrary(build().path)
    if library.isa == "generic":
        wanted = os.environ.get(ISA_VARIABLE)
        reason = f"{ISA_VARIABLE} is {wanted}" if wanted else "this CPU has neither AVX2 nor NEON"
        logger.warning("the CPU kernels run without vector instructions, several times as slow: %s", reason)
    return library


def set_num_threads(n: int) -> None:
    """Set the number of the kernels' threads. The default is the number of cores the process may use."""
    load().set_num_threads(n)


def get_num_threads() -> int:
    """The number of threads a kernel may use."""
    return load().get_num_threads()


def check(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Raise for a tensor that the kernels cannot read: another dtype or device, or gaps between elements."""
    if tensor.dtype is not dtype or not tensor.is_cpu or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor on the CPU, not {tensor.dtype} on {tensor.device} "
            f"with strides {tuple(tensor.stride())}"
        )
    return tensor


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight in the layout of one kernel, bound to the library that packed it."""

    data: Tensor
    out_features: int
    in_features: int
    library: NativeLibrary
    kernel: str
    """The name of the function that multiplies with it."""


class _Arena:
    """Memory for packed weights, in chunks large enough for huge pages. Without huge pages, reading a model's many
    small weights in turn waits for address translation at every page. A chunk is freed with its last weight."""

    CHUNK_BYTES = 32 << 20

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int, library: NativeLibrary) -> Tensor:
        """uint8 [num_bytes], aligned to a cache line."""
        if num_bytes >= self.CHUNK_BYTES // 8:
            return torch.empty(num_bytes, dtype=torch.uint8)
        begin = -(-(self._chunk.data_ptr() + self._used) // 64) * 64 - self._chunk.data_ptr()
        if begin + num_bytes > len(self._chunk):
            self._chunk, begin = torch.empty(self.CHUNK_BYTES, dtype=torch.uint8), 0
            library.held.hw_advise_huge(self._chunk.data_ptr(), self.CHUNK_BYTES)
        self._used = begin + num_bytes
        return self._chunk[begin : self._used]


_arena = _Arena()


def pack_int8(weight: Tensor, library: NativeLibrary | None = None) -> PackedWeight:
    """Quantise and pack a float32 weight [out, in]; activations are quantised inside each call."""
    return pack_int8_rows([weight], weight.shape[0], library)


def pack_int8_rows(blocks: Iterable[Tensor], out_features: int, library: NativeLibrary | None = None) -> PackedWeight:
    """As `pack_int8`, for a weight given in blocks of outputs. Each block but the last has a multiple of `TILE`."""
    library = library or load()
    data, at, k = torch.empty(0, dtype=torch.uint8), 0, 0
    for block in blocks:
        n, k = check(block, torch.float32, "weight").shape
        if not len(data):
            data = _arena.take(library.held.hw_int8_packed_bytes(out_features, k), library)
        num_bytes = library.held.hw_int8_packed_bytes(n, k)
        if at + num_bytes > len(data):
            raise ValueError(f"blocks of more than {out_features} outputs, or one that is no multiple of {TILE}")
        library.released.hw_int8_pack(block.data_ptr(), n, k, data.data_ptr() + at)
        at += num_bytes
    if at != len(data):
        raise ValueError(f"blocks of less than {out_features} outputs")
    return PackedWeight(data, out_features, k, library, "hw_int8_linear")


def pack_int4(
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None = None,
    *,
    is_signed: bool,
    library: NativeLibrary | None = None,
) -> PackedWeight:
    """Pack int8 codes [out, in], which are -8 to 7 or 0 to 15, with float32 scales and optional offsets [out, groups]
    for each 32 inputs. Nothing is rounded: scales and offsets become float16 only if float16 holds all of them
    exactly."""
    library = library or load()
    n, k = check(codes, torch.int8, "codes").shape
    if offsets is None and not is_signed:
        offsets = torch.zeros_like(scales)
    parts = [check(scales, torch.float32, "scales")]
    if offsets is not None:
        parts.append(check(offsets, torch.float32, "offsets"))
    if any(part.shape != (n, -(-k // INT4_GROUP)) for part in parts):
        raise ValueError(f"scales of shape {tuple(scales.shape)} for codes of shape {(n, k)}")
    is_half = all(torch.equal(part.half().float(), part) for part in parts)
    form = Int4Form(is_signed, offsets is not None, is_half)
    data = _arena.take(library.held.hw_int4_packed_bytes(form, n, k), library)
    library.released.hw_int4_pack(
        form,
        codes.data_ptr(),
        scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        n,
        k,
        data.data_ptr(),
    )
    return PackedWeight(data, n, k, library, "hw_int4_linear")


def pack_float32(weight: Tensor, library: NativeLibrary | None = None) -> PackedWeight:
    """Pack a float32 weight [out, in]. The values are unchanged, and products are summed in the order of `in`."""
    library = library or load()
    n, k = check(weight, torch.float32, "weight").shape
    data = torch.empty(library.held.hw_f32_packed_bytes(n, k) // 4, dtype=torch.float32)
    library.released.hw_f32_pack(weight.data_ptr(), n, k, data.data_ptr())
    return PackedWeight(data, n, k, library, "hw_f32_linear")


def dequantize(type_name: str, raw: Tensor, shape: Sequence[int], library: NativeLibrary | None = None) -> Tensor:
    """Convert the blocks of a GGUF tensor (uint8, any shape) to float32 of `shape`, bit for bit as gguf-py does."""
    library = library or load()
    if type_name not in GGUF_BLOCKS:
        raise ValueError(f"no kernel for GGUF type {type_name}; there are {', '.join(GGUF_BLOCKS)}")
    code, block_bytes = GGUF_BLOCKS[type_name]
    values = math.prod(shape)
    if values % 32 or check(raw, torch.uint8, "raw").numel() != values // 32 * block_bytes:
        raise ValueError(f"{raw.numel()} bytes do not hold {type_name} blocks for a tensor of shape {tuple(shape)}")
    out = torch.empty(tuple(shape))
    library.released.hw_dequantize(raw.data_ptr(), code, values // 32, out.data_ptr())
    return out


def is_finite(tensor: Tensor, library: NativeLibrary | None = None) -> bool:
    """Whether none of the values of a float32 tensor is NaN or infinite."""
    library = library or load()
    return bool(library.released.hw_is_finite(check(tensor, torch.float32, "tensor").data_ptr(), tensor.numel()))


def sample_tokens(
    logits: Tensor,
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    records: NDArray[np.void],
    library: NativeLibrary | None = None,
) -> NDArray[np.int32]:
    """Choose a token, or a negative code, for each line of float32 logits [R, V].

    `records[rows[r]]` has line r's parameters, as `hw_sampling_record`; `positions[r]` is where its token goes.
    """
    library = library or load()
    num_lines, vocab_size = check(logits, torch.float32, "logits").shape
    if records.dtype.itemsize != SAMPLING_RECORD_BYTES or not records.flags.c_contiguous:
        raise ValueError(f"records of {records.dtype.itemsize} bytes, where the kernel reads {SAMPLING_RECORD_BYTES}")
    rows, positions = (np.ascontiguousarray(part, dtype=np.int64) for part in (rows, positions))
    if len(rows) != num_lines or len(positions) != num_lines:
        raise ValueError(f"{num_lines} lines of logits for {len(rows)} rows and {len(positions)} positions")
    if num_lines and not 0 <= rows.min() <= rows.max() < len(records):
        raise ValueError(f"rows {rows.min()} to {rows.max()} of {len(records)}")
    tokens = np.empty(num_lines, dtype=np.int32)
    library.released.hw_sample_tokens(
        logits.data_ptr(),
        num_lines,
        vocab_size,
        rows.ctypes.data,
        positions.ctypes.data,
        records.ctypes.data,
        tokens.ctypes.data,
    )
    return tokens


def mask_logits(
    logits: Tensor, lines: NDArray[np.int32], words: NDArray[np.int32], library: NativeLibrary | None = None
) -> None:
    """Set the logits of tokens that masks do not allow to -inf, in float32 logits [R, V]. Bit i of `words[m, w]` is
    token 32 w + i of line `lines[m]`."""
    library = library or load()
    num_lines, vocab_size = check(logits, torch.float32, "logits").shape
    lines, words = (np.ascontiguousarray(part, dtype=np.int32) for part in (lines, words))
    if words.ndim != 2 or len(words) != len(lines) or 32 * words.shape[1] < vocab_size:
        raise ValueError(f"masks of shape {words.shape} for {len(lines)} lines of {vocab_size} tokens")
    if len(lines) and not 0 <= lines.min() <= lines.max() < num_lines:
        raise ValueError(f"lines {lines.min()} to {lines.max()} of {num_lines}")
    library.released.hw_mask_logits(
        logits.data_ptr(), vocab_size, lines.ctypes.data, words.ctypes.data, len(lines), words.shape[1]
    )


@functools.cache
def is_available() -> bool:
    """Whether the kernels can be built and loaded here. The first call may compile. The answer is kept, and the reason
    for a failure is logged."""
    try:
        load()
    except NativeBuildError as error:
        logger.warning("torch takes the place of the CPU kernels, about 5 times as slow: %s", str(error).split("\n")[0])
        return False
    return True
