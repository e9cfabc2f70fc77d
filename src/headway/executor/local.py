"""The executor in this process: loads the model onto one device, sizes the KV cache, runs steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway import native
from headway.attention import LayerKVCache, create_backend
from headway.config import EngineConfig
from headway.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from headway.errors import ConfigError
from headway.layers import create_ops
from headway.loader import Checkpoint
from headway.models import load_decoder
from headway.models.decoder import Decoder
from headway.runner.memory_plan import MemoryPlan, plan_memory
from headway.runner.model_runner import ModelRunner

Progress = Callable[[int, int], None]


class LocalExecutor:
    """One model on one device."""

    def __init__(self, runner: ModelRunner, plan: MemoryPlan, *, torch_threads: int | None = None) -> None:
        self._runner: ModelRunner | None = runner
        self._torch_threads = torch_threads
        self.plan = plan

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
        device = _choose_device(config.device.device)
        formats = _choose_formats(config, checkpoint.config.torch_dtype, device)
        torch_threads = _torch_threads(config.device.num_threads, device, uses_native=formats.native)
        decoder = load_decoder(
            checkpoint,
            device=device,
            dtype=formats.dtype,
            quantization=formats.quantization,
            ops=create_ops("native" if formats.native else "torch", device=device, dtype=formats.dtype),
            max_model_len=max_model_len,
            progress=progress,
        )
        plan = plan_memory(
            config,
            decoder.config,
            device=device,
            dtype_name=str(formats),
            weight_bytes=decoder.num_bytes,
            kv_dtype=formats.kv_dtype,
            max_model_len=max_model_len,
            free_bytes=_free_cuda_bytes(config, decoder, device) if device.type == "cuda" else None,
        )
        attention = create_backend(
            config.device.attention_backend if config.device.attention_backend != "auto" else formats.attention_backend,
            _allocate(plan, decoder, formats.kv_dtype, device),
            decoder.config.num_heads,
        )
        runner = ModelRunner(
            decoder,
            attention,
            device=device,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=plan.max_model_len,
            block_size=config.cache.block_size,
            eos_token_ids=eos_token_ids,
            seed=config.model.seed,
        )
        return cls(runner, plan, torch_threads=torch_threads)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        if self._runner is None:
            raise RuntimeError("the executor is shut down")
        if self._torch_threads is None:
            return self._runner.execute(output)
        # The rest of the process may want torch's threads for itself, so they are only borrowed.
        callers_threads = torch.get_num_threads()
        torch.set_num_threads(self._torch_threads)
        try:
            return self._runner.execute(output)
        finally:
            torch.set_num_threads(callers_threads)

    def shutdown(self) -> None:
        """Drop the model and its cache."""
        self._runner = None


class _Formats:
    """Which number formats and kernels a model runs with."""

    def __init__(self, dtype: torch.dtype, quantization: str, *, native: bool) -> None:
        self.dtype = dtype
        self.quantization = quantization
        self.native = native
        # With quantised weights the exact reference is given up anyway; half the KV bytes then cost next to nothing.
        self.kv_dtype = torch.float16 if quantization == "int8" else dtype
        self.attention_backend = "cpu" if native else "torch_padded"

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return name if self.quantization == "none" else f"{self.quantization} weights, {name} activations"


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' was asked for, but torch sees no CUDA device. Use device 'cpu' or 'auto'.")
    return torch.device(name)


def _choose_formats(config: EngineConfig, checkpoint_dtype: str, device: torch.device) -> _Formats:
    """Settle `auto` dtype and quantization for this device."""
    wanted = config.model
    if device.type == "cuda":
        if wanted.quantization == "int8":
            raise ConfigError("quantization 'int8' runs on the CPU only; use quantization 'none' on CUDA.")
        name = checkpoint_dtype if wanted.dtype == "auto" else wanted.dtype
        return _Formats(getattr(torch, name), "none", native=False)
    name = "float32" if wanted.dtype == "auto" else wanted.dtype
    has_native = name == "float32" and native.is_available()
    if wanted.quantization == "int8" and not has_native:
        native.load()  # raises with the compiler's own words
    quantize = wanted.quantization == "int8" or (
        wanted.quantization == "auto" and wanted.dtype == "auto" and has_native
    )
    return _Formats(getattr(torch, name), "int8" if quantize else "none", native=has_native)


def _torch_threads(num_threads: int | None, device: torch.device, *, uses_native: bool) -> int | None:
    """How many threads torch gets during a step; `None`: as many as it has."""
    if device.type != "cpu":
        return None
    if uses_native:
        if num_threads is not None:
            native.set_num_threads(num_threads)
        return 1  # the native kernels have their own threads; torch's would only fight them for the same cores
    return num_threads


def _allocate(plan: MemoryPlan, decoder: Decoder, kv_dtype: torch.dtype, device: torch.device) -> list[LayerKVCache]:
    model = decoder.config
    return [
        LayerKVCache.zeros(
            plan.num_blocks, model.num_kv_heads, model.head_dim, plan.block_size, dtype=kv_dtype, device=device
        )
        for _ in range(model.num_layers)
    ]


def _free_cuda_bytes(config: EngineConfig, decoder: Decoder, device: torch.device) -> int:
    """What `gpu_memory_utilization` leaves for the KV cache after weights and the working space of the largest step."""
    num_tokens, num_rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    model = decoder.config
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        hidden = torch.zeros(num_tokens, model.hidden_size, dtype=decoder.embedding.dtype, device=device)
        decoder.layers[0].down(decoder.ops.silu_mul(decoder.layers[0].gate_up(hidden)))
        logits = decoder.logits(hidden[: min(num_rows, num_tokens)])
        # The sampler keeps a few float32 and float64 copies of the logits when requests filter by top_p.
        scratch = torch.empty(4 * logits.numel(), dtype=torch.float64, device=device)
        del hidden, logits, scratch
    working = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    reserve = _ATTENTION_SCRATCH_BYTES + 256 * 2**20
    return int(free - (1.0 - config.cache.gpu_memory_utilization) * total - working - reserve)


# torch_padded gathers keys and values in slices of at most about this size.
_ATTENTION_SCRATCH_BYTES = 2 * 2**30
