"""The executor in this process: loads the model onto one device, sizes the KV cache, runs steps."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import os
from pathlib import Path
from typing import Literal

import torch

from headway import native
from headway.attention import FORMATS, KVFormat, create_backend
from headway.cache_dir import temporary_folder, why_not_writable
from headway.config import EngineConfig
from headway.core.scheduler_output import SchedulerOutput
from headway.errors import ConfigError
from headway.executor.base import PendingStep
from headway.kv.block_moves import HostBlocks
from headway.kv.layer_cache import LayerKVCache
from headway.layers import create_ops
from headway.models import load_decoder
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.models.decoder import Decoder
from headway.runner import Runner, RunnerSettings, create_runner
from headway.worker.memory_plan import MemoryPlan, plan_memory

logger = logging.getLogger(__name__)

_NVIDIA_DRIVER = "/proc/driver/nvidia/version"


class LocalExecutor:
    """One model on one device."""

    def __init__(self, runner: Runner, plan: MemoryPlan, *, max_in_flight: int = 1) -> None:
        self._runner: Runner | None = runner
        self.plan = plan
        self.max_in_flight = max_in_flight

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        progress: Progress | None = None,
    ) -> LocalExecutor:
        """Load the weights, then give the KV cache what the budget leaves."""
        device = choose_device(config.device.device)
        config = config.for_device(device.type)
        formats = _choose_formats(config, checkpoint.config.torch_dtype, device)
        kv_format = _choose_kv_format(config.cache.kv_cache_dtype, formats, device)
        decoder = load_decoder(
            checkpoint,
            device=device,
            dtype=formats.dtype,
            quantization=formats.quantization,
            ops=create_ops(formats.kernels, device=device, dtype=formats.dtype),
            max_model_len=max_model_len,
            progress=progress,
        )
        plan = plan_memory(
            config,
            decoder.config,
            device=device,
            dtype_name=str(formats),
            weight_bytes=decoder.num_bytes,
            kv_format=kv_format,
            max_model_len=max_model_len,
            free_bytes=_free_cuda_bytes(config, decoder, device) if device.type == "cuda" else None,
        )
        attention = create_backend(
            formats.attention_backend,
            _allocate(plan, decoder, kv_format, device, token_major=formats.kernels == "triton"),
            decoder.config.num_heads,
        )
        host_blocks = HostBlocks(attention.kv_caches, plan.num_host_slots) if plan.num_host_slots else None
        if host_blocks is not None:
            plan = dataclasses.replace(plan, restore_block_s=host_blocks.measure_restore())
        limits = config.scheduler.limits
        settings = RunnerSettings(
            device=device,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            eos_token_ids=eos_token_ids,
            seed=config.model.seed,
            graphs=_GRAPHS[config.device.cuda_graphs],
            num_threads=_torch_threads(config.device.num_threads, device, decoder.ops.name),
        )
        runner = create_runner(decoder, attention, settings, host_blocks)
        return cls(runner, plan, max_in_flight=2 if config.device.overlap == "on" else 1)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Run a step, or start it."""
        if self._runner is None:
            raise RuntimeError("the executor is shut down")
        return self._runner.submit(output)

    def warm_up(self) -> int:
        """Capture the graphs of all steps, unless they are to be made when they are needed; returns how many."""
        if self._runner is None:
            raise RuntimeError("the executor is shut down")
        try:
            return self._runner.warm_up()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                "There is not enough GPU memory left for the CUDA graphs of all steps. Lower --gpu-memory-utilization "
                f"or --max-num-seqs, or use --cuda-graphs lazy or off. ({error})"
            ) from error

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        if self._runner is not None:
            self._runner.shutdown()
        self._runner = None


class _Formats:
    """Which number formats and kernels a model runs with."""

    def __init__(self, dtype: torch.dtype, quantization: str, kernels: str, attention_backend: str) -> None:
        self.dtype = dtype
        self.quantization = quantization
        self.kernels = kernels
        if attention_backend == "auto":
            attention_backend = {"native": "cpu", "triton": "triton", "torch": "torch_padded"}[kernels]
        self.attention_backend = attention_backend

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return name if self.quantization == "none" else f"{self.quantization} weights, {name} activations"


def choose_device(name: str) -> torch.device:
    """The device that the option names; `ConfigError` if torch does not see it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and os.path.exists(_NVIDIA_DRIVER):
            _warn_once(
                "the model runs on the CPU although this machine has an NVIDIA driver: torch sees no CUDA device"
            )
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device. Use device 'cpu' or 'auto'.")
    return torch.device(name)


def keep_compiled_kernels() -> None:
    """Let Triton compile even where its cache cannot be written: then for this process alone."""
    home = Path(os.environ.get("TRITON_HOME") or Path("~").expanduser())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    error = why_not_writable(folder)
    if error is not None:
        os.environ["TRITON_CACHE_DIR"] = str(temporary_folder() / "triton")
        reason = error.strerror or error
        _warn_once(
            f"the GPU kernels are compiled for this run alone, and will be again at each start, since nothing can be "
            f"written to {folder} ({reason}); set TRITON_CACHE_DIR to a folder that you can write to"
        )


@functools.cache
def _warn_once(message: str) -> None:
    """The same choice is made more than once on the way to a model."""
    logger.warning(message)


def _choose_formats(config: EngineConfig, checkpoint_dtype: str, device: torch.device) -> _Formats:
    """Settle `auto` dtype and quantization for this device, and whose kernels run."""
    wanted = config.model
    backend = config.device.attention_backend
    if device.type == "cuda":
        if wanted.quantization == "int8":
            raise ConfigError("quantization 'int8' runs on the CPU only; use quantization 'none' on CUDA.")
        if backend == "cpu":
            raise ConfigError("attention backend 'cpu' does not run on CUDA; use 'triton', or 'auto'.")
        name = checkpoint_dtype if wanted.dtype == "auto" else wanted.dtype
        has_triton = importlib.util.find_spec("triton") is not None
        if not has_triton:
            _warn_once("torch takes the place of the GPU kernels, several times as slow: there is no package triton")
        elif backend not in ("auto", "triton"):
            _warn_once(f"attention_backend '{backend}' is a slow reference on CUDA, and runs without CUDA graphs")
        else:
            keep_compiled_kernels()
        return _Formats(getattr(torch, name), "none", "triton" if has_triton else "torch", backend)
    name = "float32" if wanted.dtype == "auto" else wanted.dtype
    if backend == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("attention backend 'triton' needs a CUDA device (or, for tests, TRITON_INTERPRET=1).")
        return _Formats(getattr(torch, name), "none", "triton", backend)
    if name != "float32":
        _warn_once(f"torch takes the place of the CPU kernels, several times as slow: they know no {name}; see dtype")
    has_native = name == "float32" and native.is_available()
    if wanted.quantization == "int8" and not has_native:
        native.load()  # raises with the compiler's own words
    quantize = wanted.quantization == "int8" or (
        wanted.quantization == "auto" and wanted.dtype == "auto" and has_native
    )
    kernels = "native" if has_native else "torch"
    return _Formats(getattr(torch, name), "int8" if quantize else "none", kernels, backend)


def _choose_kv_format(name: str, formats: _Formats, device: torch.device) -> KVFormat:
    """Settle `auto`, and refuse what the kernels that will run cannot write or read."""
    if name == "auto":
        # With quantised weights the exact reference is given up anyway; half the KV bytes then cost next to nothing.
        return KVFormat.of(torch.float16 if formats.quantization == "int8" else formats.dtype)
    format = FORMATS[name]
    if formats.kernels == "native" and name == "bfloat16":
        raise ConfigError("kv_cache_dtype 'bfloat16' is not for the CPU kernels; use 'float16', which takes as much.")
    if formats.kernels != "triton":
        return format
    if not format.is_scaled and format != KVFormat.of(formats.dtype):
        own = KVFormat.of(formats.dtype).name
        raise ConfigError(
            f"kv_cache_dtype '{name}' does not go with the Triton kernels and a model in {own}; "
            f"use 'auto' or '{own}', or a quantised format: fp8, int8, int4."
        )
    if name == "fp8" and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype 'fp8' needs a GPU that knows float8, and {torch.cuda.get_device_name(device)} does not; "
            "use 'int8', which takes as much."
        )
    return format


def _torch_threads(num_threads: int | None, device: torch.device, kernels: str) -> int | None:
    """How many threads torch gets during a step; `None`: as many as it has."""
    if device.type != "cpu" or kernels == "triton":
        return None
    if kernels == "native":
        if num_threads is not None:
            native.set_num_threads(num_threads)
        return 1  # the native kernels have their own threads; torch's would only fight them for the same cores
    return num_threads


def _allocate(
    plan: MemoryPlan, decoder: Decoder, kv_format: KVFormat, device: torch.device, *, token_major: bool
) -> list[LayerKVCache]:
    model = decoder.config
    return [
        LayerKVCache.zeros(
            plan.num_blocks,
            model.num_kv_heads,
            model.head_dim,
            plan.block_size,
            dtype=kv_format,
            device=device,
            token_major=token_major,
        )
        for _ in range(model.num_layers)
    ]


def _free_cuda_bytes(config: EngineConfig, decoder: Decoder, device: torch.device) -> int:
    """What `gpu_memory_utilization` leaves for the KV cache after weights and the working space of the largest step."""
    limits = config.scheduler.limits
    num_tokens, num_rows = limits.max_num_batched_tokens, limits.max_num_seqs
    model = decoder.config
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        hidden = torch.zeros(num_tokens, model.hidden_size, dtype=decoder.embedding.dtype, device=device)
        layer = decoder.layers[0]
        layer.down(decoder.ops.norm_swiglu(hidden, None, layer.input_norm, model.rms_norm_eps, layer.gate_up))
        logits = decoder.logits(hidden[: min(num_rows, num_tokens)]).float()
        # Room for what sampling may add to the logits (a float32 copy, logprobs, what each row has seen; float64 sums
        # without Triton) and for the working memory that CUDA graphs keep to themselves.
        scratch = torch.empty(4 * logits.numel(), dtype=torch.float64, device=device)
        del hidden, logits, scratch
    working = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserve = _ATTENTION_SCRATCH_BYTES + 256 * 2**20
    return int(free - (1.0 - config.cache.gpu_memory_utilization) * total - working - reserve)


_GRAPHS: dict[str, Literal["off", "lazy", "all"]] = {"off": "off", "lazy": "lazy", "on": "all"}
# From here on (Ada, Hopper) Triton converts float8 e4m3.
_FP8_CAPABILITY = (8, 9)
# torch_padded gathers keys and values in slices of at most about this size.
_ATTENTION_SCRATCH_BYTES = 2 * 2**30
