"""Prepares one model on one device: loads it, profiles its largest step, and allocates the KV cache.

worker = ModelWorker(config, checkpoint.config, eos_token_ids=...)   formats, kernels and the context are settled
worker.load(checkpoint)                                              weights are on the device
free_bytes = worker.profile()                                        what the largest step leaves for KV blocks
plan = worker.plan(free_bytes)                                       how many blocks that is; ranks agree on a number
ready = worker.allocate(plan)                                        KV blocks, those on the host, the runner
ready.runner.submit(output)                                          step after step
"""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from headway import native
from headway.attention import create_backend
from headway.config import ResolvedConfig
from headway.errors import ConfigError
from headway.kv.layer_cache import LayerKVCache
from headway.layers import create_ops
from headway.layers.collectives import Collectives
from headway.models import load_decoder
from headway.models.assembly import Progress
from headway.models.checkpoint import Checkpoint
from headway.models.decoder import Decoder
from headway.models.decoder_config import DecoderConfig
from headway.runner import PagedModel, Runner, RunnerSettings, create_runner
from headway.transfer.block_format import BlockFormat
from headway.transfer.block_store import BlockTransfers
from headway.transfer.disk_store import DiskStore
from headway.transfer.host_blocks import HostBlocks, SharedSlots
from headway.worker.ceilings import Ceilings
from headway.worker.formats import choose_formats
from headway.worker.known_ceilings import known_ceilings
from headway.worker.memory_plan import MemoryPlan, free_cuda_bytes, longest_request, plan_memory

# Each is of another way that a layer takes, or of another size of its programs.
_COMPILED_ROWS = (1, 16, 64, 128, 256)
_NUM_COMPILING = 8


class Allocated(NamedTuple):
    """A model that is ready to run steps."""

    plan: MemoryPlan
    """The plan as carried out, with the measured time to restore a block and the number of blocks on disk."""
    runner: Runner
    transfers: BlockTransfers | None
    """The transfers that fetch and store blocks while steps run, if there are slots for them."""


class ModelWorker:
    """Its methods are called once, in the order of their definition.

    `ranks`: the other ranks, if this worker has one of several parts of the model. All ranks make the same calls.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: DecoderConfig,
        *,
        eos_token_ids: tuple[int, ...],
        ranks: Collectives | None = None,
    ) -> None:
        self.formats = choose_formats(
            config.model,
            config.device,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            checkpoint_dtype=model.torch_dtype,
            stored=model.stored,
        )
        self._config = config
        self._eos_token_ids = eos_token_ids
        self._ranks = ranks
        self._max_model_len = longest_request(config.model.max_model_len, model)
        self._identities: tuple[bytes, ...] = ()  # of the weights, where blocks may leave the device
        self._decoder: Decoder | None = None
        self._draft: Decoder | None = None
        self._ceilings: Ceilings | None = None

    def load(
        self, checkpoint: Checkpoint, progress: Progress | None = None, *, draft: Checkpoint | None = None
    ) -> None:
        """Read the weights onto the device. `progress(done_bytes, total_bytes)` is called meanwhile."""
        if draft is not None:
            self._check_draft(checkpoint.config, draft.config)
        if self.formats.native_threads is not None:
            native.set_num_threads(self.formats.native_threads)
        self._decoder = self._load(checkpoint, progress, self._ranks)
        if draft is not None:
            self._draft = self._load(draft, progress, None)  # small, and so whole on every rank
        cache = self._config.cache
        if (cache.host_cache_memory or cache.arrival_memory) and self._is_first:
            self._identities = tuple(one.identity() for one in (checkpoint, draft) if one is not None)

    @property
    def _is_first(self) -> bool:
        """Whether this worker handles everything outside the engine, such as the disk cache."""
        return self._ranks is None or self._ranks.rank == 0

    def _check_draft(self, model: DecoderConfig, draft: DecoderConfig) -> None:
        if draft.vocab_size != model.vocab_size:
            raise ConfigError(
                f"The draft model has {draft.vocab_size:,} tokens and the model {model.vocab_size:,}: a model can only "
                "guess for one with the same vocabulary."
            )
        if draft.max_position < self._max_model_len:
            raise ConfigError(
                f"The draft model was made for {draft.max_position:,} positions, fewer than requests may have "
                f"({self._max_model_len:,}). Lower max_model_len."
            )

    def _load(self, checkpoint: Checkpoint, progress: Progress | None, ranks: Collectives | None) -> Decoder:
        formats = self.formats
        return load_decoder(
            checkpoint,
            device=formats.device,
            dtype=formats.dtype,
            quantization=formats.quantization,
            keeps_stored=formats.keeps_stored,
            ops=create_ops(formats.kernels, device=formats.device, dtype=formats.dtype),
            max_model_len=self._max_model_len,
            progress=progress,
            ranks=ranks,
        )

    def profile(self) -> int | None:
        """Learn what the device can do at most, and run the largest step's largest parts. Returns the bytes left for
        the KV cache; `None` on a CPU, where only the options limit it."""
        assert self._decoder is not None, "load() comes first"
        if self._is_first:
            self._ceilings = known_ceilings(str(self.formats.device), str(self.formats))
        if self.formats.device.type != "cuda":
            return None
        _compile_ahead(self._decoder, self.formats.device)
        limits = self._config.scheduler
        working_bytes = _working_bytes(
            self._decoder,
            self.formats.device,
            num_tokens=limits.max_num_batched_tokens,
            num_rows=limits.max_num_lines,
        )
        return free_cuda_bytes(
            self.formats.device,
            working_bytes=working_bytes,
            utilization=self._config.cache.gpu_memory_utilization,
        )

    def plan(self, free_bytes: int | None) -> MemoryPlan:
        """Plan the use of the memory that `profile` has found."""
        config, decoder, draft = self._config, self._decoder, self._draft
        assert decoder is not None, "load() comes first"
        plan = plan_memory(
            config.cache,
            decoder.config,
            self.formats,
            draft=None if draft is None else draft.config,
            weight_bytes=decoder.num_bytes + (0 if draft is None else draft.num_bytes),
            step_weight_bytes=decoder.num_step_bytes,
            output_weight_bytes=decoder.lm_head.num_bytes,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.model.max_model_len,
            free_bytes=free_bytes,
        )
        return dataclasses.replace(plan, ceilings=self._ceilings)

    def allocate(self, plan: MemoryPlan, shared: SharedSlots | None = None) -> Allocated:
        """Allocate the KV cache as planned. `shared`: the ranks' shared host memory for blocks, if there is one."""
        config, decoder, draft = self._config, self._decoder, self._draft
        assert decoder is not None, "load() comes first"
        models = [self._paged(plan, one) for one in (decoder, draft) if one is not None]
        host_blocks = None
        if plan.num_host_slots:
            kv_caches = [cache for model in models for cache in model.attention.kv_caches]
            host_blocks = HostBlocks(kv_caches, plan.num_host_slots, on_device=plan.has_device_slots, shared=shared)
            plan = dataclasses.replace(
                plan,
                restore_block_s=host_blocks.measure_restore(),
                block_format=self._block_format(plan, host_blocks.slot_bytes, shared),
            )
        disk = None
        if config.cache.disk_cache and host_blocks is not None and self._is_first:
            disk = self._open_disk(plan)
            plan = dataclasses.replace(
                plan,
                disk_bytes=config.cache.disk_cache_size,
                num_disk_blocks=disk.max_blocks,
                num_known_blocks=len(disk.digests()),
            )
        settings = RunnerSettings(
            device=self.formats.device,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            eos_token_ids=self._eos_token_ids,
            seed=config.model.seed,
            graphs=config.device.graphs,
            max_num_lines=None if config.scheduler.speculation == "off" else config.scheduler.max_num_lines,
            synthetic_acceptance=config.scheduler.synthetic_chance,
            num_threads=self.formats.torch_threads,
        )
        runner = create_runner(models[0], settings, draft=models[1] if draft else None, host_blocks=host_blocks)
        transfers = None if host_blocks is None else BlockTransfers(host_blocks, disk=disk)
        return Allocated(plan, runner, transfers)

    def _block_format(self, plan: MemoryPlan, block_bytes: int, shared: SharedSlots | None) -> BlockFormat:
        formats = self.formats
        return BlockFormat(
            weights=self._identities,
            numbers=f"{formats}, {formats.quantization}",
            kernels=formats.kernels,
            attention_backend=formats.attention_backend,
            device=formats.device.type,
            kv_format=formats.kv_format.name,
            block_size=plan.block_size,
            block_bytes=block_bytes,
            part_bytes=() if shared is None else shared.part_bytes,
            collectives="" if self._ranks is None else type(self._ranks).__name__,
        )

    def _open_disk(self, plan: MemoryPlan) -> DiskStore:
        """Open the disk cache's folder for this engine's block format."""
        cache, block_format = self._config.cache, plan.block_format
        assert block_format is not None
        return DiskStore(
            Path(cache.disk_cache).expanduser(),
            fingerprint=block_format.fingerprint,
            block_bytes=block_format.block_bytes,
            max_bytes=cache.disk_cache_size,
            for_device=block_format.device != "cpu",
        )

    def _paged(self, plan: MemoryPlan, decoder: Decoder) -> PagedModel:
        """A model with its layers of the KV cache."""
        model = decoder.config
        kv_caches = [
            LayerKVCache.zeros(
                plan.num_blocks,
                model.num_kv_heads,
                model.head_dim,
                plan.block_size,
                dtype=self.formats.kv_format,
                device=self.formats.device,
                token_major=self.formats.kernels == "triton",
            )
            for _ in range(model.num_layers)
        ]
        return PagedModel(decoder, create_backend(self.formats.attention_backend, kv_caches, model.num_heads))


def _compile_ahead(decoder: Decoder, device: torch.device) -> None:
    """Compile the kernels of a layer in parallel; the first steps would compile them one by one."""
    layer, forms = decoder.layers[0], decoder.forms_alone

    def rows(num_rows: int, width: int) -> torch.Tensor:
        return torch.zeros(num_rows, width, dtype=decoder.embedding.dtype, device=device)

    def run(num_rows: int, part: str) -> None:
        with torch.cuda.device(device), torch.inference_mode():
            residual = rows(num_rows, layer.qkv.in_features)
            if part == "qkv":
                forms.qkv(residual, None)
            elif part == "o":
                forms.qkv(residual, forms.o(residual, rows(num_rows, layer.o.in_features)))
            else:
                forms.mlp(residual, None)

    with ThreadPoolExecutor(_NUM_COMPILING) as pool:
        list(pool.map(run, *zip(*itertools.product(_COMPILED_ROWS, ("qkv", "o", "mlp")), strict=True)))


def _working_bytes(decoder: Decoder, device: torch.device, *, num_tokens: int, num_rows: int) -> int:
    """Measure the bytes that a step of `num_tokens` tokens needs besides weights and KV cache."""
    model = decoder.config
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        hidden = torch.zeros(num_tokens, model.hidden_size, dtype=decoder.embedding.dtype, device=device)
        decoder.forms_alone.mlp(hidden, None)
        decoder.lm_head(hidden[:num_rows])
        logits = torch.empty(num_rows, model.vocab_size, device=device)
        # Room for what sampling may add to the logits (a float32 copy, logprobs, what each row has seen; float64 sums
        # without Triton) and for the working memory that CUDA graphs keep to themselves.
        scratch = torch.empty(4 * logits.numel(), dtype=torch.float64, device=device)
        del hidden, logits, scratch
    working = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return working
