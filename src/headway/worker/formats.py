"""Chooses formats and kernels: the one place that resolves each "auto" which depends on checkpoint, device or kernels.

    device     dtype auto         quantization auto    kernels    attention       KV cache auto
    cuda       the checkpoint's   the checkpoint's     triton     triton          the dtype
    cpu        float32            int8, if dtype auto  native     cpu             float16 with quantised weights
    cpu, where the native kernels cannot run, or do not know the KV format and attention is torch's:
               float32            none                 torch      torch_padded    the dtype

Each choice that makes the engine slower than it could be on this machine is logged once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from headway import native
from headway.cache_dir import private_folder, temporary_folder, why_not_writable
from headway.config import EngineConfig, ModelConfig
from headway.errors import ConfigError
from headway.kv.codes import plain_format
from headway.kv_formats import FORMATS, KVFormat
from headway.models.decoder_config import DecoderConfig
from headway.settings import DeviceSettings

logger = logging.getLogger(__name__)

_KERNELS = {"native": "CPU", "triton": "Triton", "torch": "torch"}
_REFERENCES = ("torch_padded", "torch_reference")
_NVIDIA_DRIVER = "/proc/driver/nvidia/version"
# From here on (Ada, Hopper) Triton converts float8 e4m3.
_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats, kernels and threads of a model on a device."""

    device: torch.device
    dtype: torch.dtype
    """The dtype of activations and of weights that are not quantised."""
    quantization: str
    """The format of linear layers' float weights once loaded: "none" (they stay floats), "fp8", "int8" or "int4"."""
    keeps_stored: bool
    """Whether weights that are quantised in the checkpoint stay as they are."""
    stored: str
    """A readable name of the checkpoint's quantisation; empty: floats."""
    kernels: str
    """The implementation of operations: "native", "triton" or "torch"."""
    attention_backend: str
    kv_format: KVFormat
    torch_threads: int | None
    """The number of torch's threads during a step; `None`: its default."""
    native_threads: int | None
    """The number of the native kernels' threads; `None`: their default."""

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        weights = self.stored if self.keeps_stored and self.stored else self.quantization
        return name if weights == "none" else f"{weights} weights, {name} activations"

    @property
    def is_quantized(self) -> bool:
        return self.quantization != "none" or (self.keeps_stored and self.stored != "")


def choose_device(name: str) -> torch.device:
    """The device that the option names. Raises `ConfigError` if torch does not see it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and os.path.exists(_NVIDIA_DRIVER):
            _warn_once(
                "the model runs on the CPU although this machine has an NVIDIA driver: torch sees no CUDA device"
            )
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device. Use device 'cpu' or 'auto'.")
    return torch.device(name)


def choose_formats(
    model: ModelConfig, device: DeviceSettings, *, kv_cache_dtype: str, checkpoint_dtype: str, stored: str = ""
) -> Formats:
    """Resolve each "auto", and refuse what the device or its kernels cannot run. `stored`: the quantisation of the
    checkpoint's linear layers."""
    on = torch.device(device.kind)
    if device.kind == "cuda":
        kernels = _cuda_kernels(model, device.attention_backend)
        dtype = checkpoint_dtype if model.dtype == "auto" else model.dtype
    else:
        dtype = "float32" if model.dtype == "auto" else model.dtype
        kernels = _cpu_kernels(model, dtype, device.attention_backend, kv_cache_dtype)
    quantization = _quantization(model, kernels, on)
    keeps_stored = kernels != "torch" and (
        model.quantization == "stored" or (model.quantization == "auto" and kernels == "triton")
    )
    torch_dtype = getattr(torch, dtype)
    torch_threads, native_threads = _threads(device, kernels)
    return Formats(
        device=on,
        dtype=torch_dtype,
        quantization=quantization,
        keeps_stored=keeps_stored,
        stored=stored,
        kernels=kernels,
        attention_backend=_attention_backend(device.attention_backend, kernels),
        kv_format=_kv_format(kv_cache_dtype, torch_dtype, quantization, kernels, on),
        torch_threads=torch_threads,
        native_threads=native_threads,
    )


def planned_formats(config: EngineConfig, model: DecoderConfig) -> Formats:
    """Choose formats for a plan only: a CUDA device named in the options need not be in this machine."""
    kind = choose_device("auto").type if config.device.device == "auto" else config.device.device
    return choose_formats(
        config.model,
        config.device.resolve(kind),
        kv_cache_dtype=config.cache.kv_cache_dtype,
        checkpoint_dtype=model.torch_dtype,
        stored=model.stored,
    )


def keep_compiled_kernels() -> None:
    """Have Triton keep what it compiles where this user alone can write; for this process alone where it cannot."""
    home = Path(os.environ.get("TRITON_HOME") or Path("~").expanduser())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    try:
        own = private_folder(folder)
        error = why_not_writable(own)
    except OSError as refusal:
        error = refusal
    if error is None:
        os.environ["TRITON_CACHE_DIR"] = str(own)
    else:
        os.environ["TRITON_CACHE_DIR"] = str(temporary_folder() / "triton")
        reason = error.strerror or error
        _warn_once(
            f"the GPU kernels are compiled for this run alone, and will be again at each start, since nothing can be "
            f"written to {folder} ({reason}); set TRITON_CACHE_DIR to a folder that you can write to"
        )


def _cuda_kernels(model: ModelConfig, backend: str) -> str:
    if backend == "cpu":
        raise ConfigError("attention backend 'cpu' does not run on CUDA; use 'triton', or 'auto'.")
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        if model.quantization not in ("auto", "none"):
            # There are no other kernels for codes on CUDA.
            raise ConfigError(f"quantization '{model.quantization}' needs the package triton, which is not installed.")
        _warn_once("torch takes the place of the GPU kernels, several times as slow: there is no package triton")
        return "torch"
    if backend not in ("auto", "triton"):
        _warn_once(f"attention_backend '{backend}' is a slow reference on CUDA, and runs without CUDA graphs")
    elif torch.cuda.is_available():
        keep_compiled_kernels()
    return "triton"


def _cpu_kernels(model: ModelConfig, dtype: str, backend: str, kv_cache_dtype: str) -> str:
    if backend == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("attention backend 'triton' needs a CUDA device (or, for tests, TRITON_INTERPRET=1).")
        return "triton"
    only_torch = dtype != "float32" or (backend in _REFERENCES and not _is_known(kv_cache_dtype, "native"))
    if only_torch:
        unknown = f"{dtype}; see dtype" if dtype != "float32" else f"KV cache in {kv_cache_dtype}"
        _warn_once(f"torch takes the place of the CPU kernels, several times as slow: they know no {unknown}")
    has_native = not only_torch and native.is_available()
    if model.quantization in ("stored", "int8", "int4"):
        if dtype != "float32":
            raise ConfigError(
                f"quantization '{model.quantization}' computes in float32 on the CPU; it cannot be combined with dtype "
                f"'{dtype}'. Use dtype 'auto' or 'float32'."
            )
        if only_torch:
            raise ConfigError(
                f"quantization '{model.quantization}' needs the CPU kernels, and they know no KV cache in "
                f"'{kv_cache_dtype}'. Use quantization 'none', or another kv_cache_dtype."
            )
        if not has_native:
            native.load()  # raises with the compiler's own words
    if model.quantization == "fp8":
        raise ConfigError("quantization 'fp8' needs a GPU; use 'int8' or 'int4' on the CPU.")
    return "native" if has_native else "torch"


def _is_known(kv_cache_dtype: str, kernels: str) -> bool:
    return kv_cache_dtype == "auto" or kernels in FORMATS[kv_cache_dtype].kernels


def _quantization(model: ModelConfig, kernels: str, device: torch.device) -> str:
    """The format of float weights. The default on the CPU is int8, unless a dtype was requested."""
    if model.quantization in ("auto", "stored"):
        return "int8" if kernels == "native" and (model.dtype == "auto" or model.quantization == "stored") else "none"
    if model.quantization == "fp8" and device.type == "cuda":
        _check_fp8("quantization", device)
    return model.quantization


def _check_fp8(option: str, device: torch.device) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(
            f"{option} 'fp8' needs a GPU that knows float8, and {torch.cuda.get_device_name(device)} does not; "
            "use 'int8', which takes as much."
        )


def _attention_backend(name: str, kernels: str) -> str:
    return {"native": "cpu", "triton": "triton", "torch": "torch_padded"}[kernels] if name == "auto" else name


def _kv_format(name: str, dtype: torch.dtype, quantization: str, kernels: str, device: torch.device) -> KVFormat:
    """Resolve "auto", and refuse a format that the chosen kernels cannot write or read."""
    own = plain_format(dtype)
    if name == "auto":
        # With quantised weights the exact reference is given up anyway; half the KV bytes then cost next to nothing.
        return plain_format(torch.float16) if quantization != "none" and kernels == "native" else own
    format = FORMATS[name]
    if kernels not in format.kernels:
        known = ", ".join(other.name for other in FORMATS.values() if kernels in other.kernels)
        hint = ", or torch's slow kernels with attention_backend 'torch_padded'" if kernels == "native" else ""
        raise ConfigError(f"kv_cache_dtype '{name}' is not for the {_KERNELS[kernels]} kernels; use {known}{hint}.")
    if kernels != "triton":
        return format
    if not format.is_scaled and format != own:
        raise ConfigError(
            f"kv_cache_dtype '{name}' does not go with the Triton kernels and a model in {own.name}; "
            f"use 'auto' or '{own.name}', or a quantised format: fp8, int8, int4."
        )
    if name == "fp8" and device.type == "cuda":
        _check_fp8("kv_cache_dtype", device)
    return format


def _threads(device: DeviceSettings, kernels: str) -> tuple[int | None, int | None]:
    """(torch's, the native kernels')"""
    if device.kind != "cpu":
        return None, None
    if kernels == "native":
        return 1, device.num_threads  # torch's threads would only fight the native ones for the same cores
    return device.num_threads, None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)
