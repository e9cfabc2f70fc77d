"""Plans the memory for weights, working space and KV blocks, and how many tokens and requests fit."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import ConfigError, OutOfMemoryError
from headway.models.decoder_config import DecoderConfig
from headway.settings import CacheSettings, SchedulerSettings

if TYPE_CHECKING:  # an engine without a model has a plan too, and starts three seconds sooner without torch
    import torch

    from headway.models.checkpoint import Checkpoint
    from headway.models.decoder_config import Shard
    from headway.transfer.block_format import BlockFormat
    from headway.worker.ceilings import Ceilings
    from headway.worker.formats import Formats

logger = logging.getLogger(__name__)

DEFAULT_CPU_KV_BYTES = 512 * 2**20
# torch_padded gathers keys and values in slices of at most about this size.
_ATTENTION_SCRATCH_BYTES = 2 * 2**30
_CUDA_RESERVE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """The result of sizing, in numbers a person can check by hand: `kv_bytes = num_blocks * bytes_per_block`."""

    device: str
    dtype: str
    weight_bytes: int
    kv_dtype: str
    """The name of the KV cache's number format."""
    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    step_weight_bytes: int = 0
    """Bytes of the weights that every step multiplies with, without the table of embeddings."""
    output_weight_bytes: int = 0
    """The part of `step_weight_bytes` that belongs to the output projection."""
    num_host_slots: int = 0
    """The number of slots for blocks besides the cache, in host memory, or on the device if blocks only arrive."""
    has_device_slots: bool = False
    """Whether these slots are on the device."""
    restore_block_s: float = 0.0
    """The measured seconds to copy a block back from a slot."""
    block_format: BlockFormat | None = None
    """The format of blocks in slots. Engines with equal formats can use each other's blocks."""
    disk_bytes: int = 0
    """The size limit of the disk cache, for all ranks together."""
    num_disk_blocks: int = 0
    """The number of blocks that fit into the disk cache."""
    num_known_blocks: int = 0
    """The number of blocks in the disk cache at the start."""
    num_ranks: int = 1
    """The number of ranks. Each has the memory given here."""
    ceilings: Ceilings | None = None
    """What the device can do at most, if that was measured."""

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        """How many tokens the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def num_full_requests(self) -> float:
        """How many requests of the maximum length fit at once."""
        return self.num_tokens / self.max_model_len

    def __str__(self) -> str:
        return (
            f"weights   {_mib(self.weight_bytes)} ({self.dtype}, {self.device})\n"
            f"KV cache  {_mib(self.kv_bytes)} ({self.kv_dtype}) = "
            f"{self.num_blocks:,} blocks of {self.block_size} tokens\n"
            f"capacity  {self.num_tokens:,} tokens = {self.num_full_requests:.1f} requests of full length "
            f"({self.max_model_len:,} tokens)"
            f"{self._host_line}"
            + (f"\nranks     {self.num_ranks}, each with so much" if self.num_ranks > 1 else "")
            + self._disk_line
        )

    @property
    def _host_line(self) -> str:
        if not self.num_host_slots:
            return ""
        rate = f", {self.bytes_per_block / self.restore_block_s / 1e9:.1f} GB/s back" if self.restore_block_s else ""
        where = "arrivals" if self.has_device_slots else "host    "
        return f"\n{where}  {_mib(self.num_host_slots * self.bytes_per_block)} = {self.num_host_slots:,} blocks{rate}"

    @property
    def _disk_line(self) -> str:
        if not self.num_disk_blocks:
            return ""
        return f"\ndisk      {_mib(self.disk_bytes)} = {self.num_disk_blocks:,} blocks, {self.num_known_blocks:,} there"


def longest_request(max_model_len: int | None, model: DecoderConfig) -> int:
    """The context in tokens: the option's value, or the model's maximum. Raises `ConfigError` if the option exceeds
    that."""
    if max_model_len is None:
        return model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {max_model_len} exceeds the {model.max_position} positions that the model was made for."
        )
    return max_model_len


def free_cuda_bytes(device: torch.device, *, working_bytes: int, utilization: float) -> int:
    """Bytes that `gpu_memory_utilization` leaves for the KV cache, after weights and the working space of a step."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1.0 - utilization) * total - working_bytes - _ATTENTION_SCRATCH_BYTES - _CUDA_RESERVE_BYTES)


def plan_memory(
    cache: CacheSettings,
    model: DecoderConfig,
    formats: Formats,
    *,
    draft: DecoderConfig | None = None,
    weight_bytes: int,
    step_weight_bytes: int,
    output_weight_bytes: int,
    max_num_seqs: int,
    max_model_len: int | None,
    free_bytes: int | None,
) -> MemoryPlan:
    """Size the KV cache, whose blocks have the layers of a `draft` model too. `free_bytes`: what the device has left
    for it; `None` where only the budget counts (CPU).

    Without a `max_model_len` of the user's, the context shrinks to what the cache can hold: then every prompt that is
    accepted can also be answered up to the end of the context.
    """
    per_token = sum(bytes_per_token(one, formats) for one in (model, draft) if one is not None)
    bytes_per_block = cache.block_size * per_token
    num_slots = _num_slots(cache, bytes_per_block)
    if cache.arrival_memory is not None and free_bytes is not None:
        free_bytes -= num_slots * bytes_per_block
    longest = longest_request(max_model_len, model)
    most_blocks = max_num_seqs * -(-longest // cache.block_size)  # more could not be in use at the same time
    num_blocks = _num_blocks(cache, bytes_per_block, most_blocks=most_blocks, free_bytes=free_bytes)
    _check_room(num_blocks, bytes_per_block, formats.device, free_bytes)
    num_tokens = num_blocks * cache.block_size
    if max_model_len is None and num_tokens < longest:
        logger.warning(
            "the KV cache holds %d tokens, fewer than the model's context of %d; max_model_len is set to that. "
            "More memory for the cache (kv_cache_memory) lifts it.",
            num_tokens,
            longest,
        )
        longest = num_tokens
    return MemoryPlan(
        device=str(formats.device),
        dtype=str(formats),
        weight_bytes=weight_bytes,
        step_weight_bytes=step_weight_bytes,
        output_weight_bytes=output_weight_bytes,
        kv_dtype=formats.kv_format.name,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        bytes_per_block=bytes_per_block,
        max_model_len=longest,
        num_host_slots=num_slots,
        has_device_slots=cache.arrival_memory is not None,
    )


def bytes_per_token(model: DecoderConfig, formats: Formats) -> int:
    """Bytes of keys and values per token, over all layers."""
    return model.num_layers * model.num_kv_heads * formats.kv_format.num_bytes(model.head_dim)


# ---- what a model would take, without loading it --------------------------------------------------------------------

_CPU_PROCESS_BYTES = 400 * 2**20  # the interpreter and torch


def estimated_weights(checkpoint: Checkpoint, formats: Formats, max_model_len: int, shard: Shard | None = None) -> int:
    """Bytes of weights and rotary tables, or of a rank's part of them, within a few percent."""
    from headway.models.assembly import EMBEDDING, LM_HEAD, expected_tensors

    model, float_bytes, on_cuda = checkpoint.config, formats.dtype.itemsize, formats.device.type == "cuda"
    total = max_model_len * model.head_dim * 4
    for name, whole in expected_tensors(model).items():
        shape = whole if shard is None else shard.shape(name, whole)
        num = math.prod(shape)
        is_head = name == (EMBEDDING if model.tie_embeddings else LM_HEAD)
        if len(shape) == 1 or name == EMBEDDING:
            total += num * float_bytes
        if len(shape) == 1 or (name == EMBEDDING and not is_head):
            continue
        if formats.keeps_stored and name in checkpoint.quantized:
            total += checkpoint.index[name].num_bytes * num // math.prod(whole)
        elif formats.quantization != "none" and not (is_head and on_cuda):
            quantization = "int8" if is_head else formats.quantization
            total += int(num * _code_bytes(quantization, shape[1], on_cuda=on_cuda))
        elif not (name == EMBEDDING and on_cuda):  # a tied head is the table itself
            total += num * float_bytes
    return total


def _code_bytes(quantization: str, num_inputs: int, *, on_cuda: bool) -> float:
    """Bytes of one weight, with its share of scales."""
    if not on_cuda:
        return 1 + 4 / 64 if quantization == "int8" else 0.5 + 4 / 32
    if quantization == "int4":
        from headway.layers.quantized_weight import INT4_GROUPS

        return 0.5 + 2 / next((size for size in INT4_GROUPS if num_inputs % size == 0), num_inputs) + 4 / num_inputs
    return 1 + 4 / num_inputs


def estimated_working_space(model: DecoderConfig, formats: Formats, limits: SchedulerSettings) -> int:
    """Bytes besides weights and KV cache: the largest step's activations, logits, and memory that libraries keep."""
    if formats.device.type != "cuda":
        return _CPU_PROCESS_BYTES
    width = model.hidden_size * 4 + model.intermediate_size * 4 + model.qkv_size
    step = limits.max_num_batched_tokens * width * formats.dtype.itemsize
    logits = limits.max_num_lines * model.vocab_size * (formats.dtype.itemsize + 4 + 32)
    return step + logits + _ATTENTION_SCRATCH_BYTES + _CUDA_RESERVE_BYTES


def _num_slots(cache: CacheSettings, bytes_per_block: int) -> int:
    for name in ("host_cache_memory", "arrival_memory"):
        room = getattr(cache, name)
        if room is not None and room < bytes_per_block:
            raise ConfigError(
                f"{name} of {room:,} bytes has no room for a single KV block of {bytes_per_block:,} bytes."
            )
    return (cache.host_cache_memory or cache.arrival_memory or 0) // bytes_per_block


def _num_blocks(cache: CacheSettings, bytes_per_block: int, *, most_blocks: int, free_bytes: int | None) -> int:
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    budget = cache.kv_cache_memory
    if budget is None:
        budget = DEFAULT_CPU_KV_BYTES if free_bytes is None else free_bytes
    return min(max(budget, 0) // bytes_per_block, most_blocks)


def _check_room(num_blocks: int, bytes_per_block: int, device: torch.device, free_bytes: int | None) -> None:
    """Refuse a cache of no blocks, and one that the device cannot hold."""
    if num_blocks < 1:
        raise OutOfMemoryError(
            f"No KV block fits: one takes {_mib(bytes_per_block).strip()}. Give more memory (kv_cache_memory, "
            "gpu_memory_utilization) or a smaller block_size."
        )
    available = _available_bytes(device)
    if available is None:
        return
    available = max(available, free_bytes or 0)
    if num_blocks * bytes_per_block > available:
        raise OutOfMemoryError(
            f"The KV cache would take {_mib(num_blocks * bytes_per_block).strip()}, but only "
            f"{_mib(available).strip()} are free on {device.type}. Lower kv_cache_memory or num_kv_blocks."
        )


def _available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, or `None` if the system does not report it (macOS has no count of free pages)."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + _reclaimable_bytes()
    except (ValueError, OSError):
        return None


def _reclaimable_bytes() -> int:
    """Bytes of page cache that the kernel frees on demand, where the system reports them."""
    try:
        with open("/proc/meminfo") as meminfo:
            values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo}
        return max(0, values["MemAvailable"] - values["MemFree"])
    except (OSError, KeyError, ValueError, IndexError):
        return 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:9,.1f} MiB"
