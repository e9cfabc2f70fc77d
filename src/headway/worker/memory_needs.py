"""The memory that a model needs, from its shape and the engine's options: nothing is loaded.

`headway plan` prints it, and `headway size` fills devices with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import EngineConfig
from headway.models.decoder_config import DecoderConfig

MODEL_OPTIONS = (
    "model", "revision", "offline", "draft_model", "load_format", "dtype", "quantization", "max_model_len",
    "gpu_memory_utilization", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "speculation",
    "max_draft_tokens", "device", "tensor_parallel_size",
)  # fmt: skip
"""The engine options that these needs depend on."""


@dataclass(frozen=True)
class Needs:
    """The memory a model needs, in bytes."""

    on_cuda: bool
    formats: str
    num_parameters: int
    weight_bytes: int
    working_bytes: int
    """The working memory of the largest step and of the device's libraries."""
    kv_dtype: str
    kv_bytes_per_token: int
    max_model_len: int
    num_ranks: int
    """The number of devices; each needs this much."""

    def room(self, memory_bytes: float, gpu_memory_utilization: float) -> int:
        """Bytes that a device of this memory has left for the KV cache; 0: the weights do not fit."""
        usable = memory_bytes * gpu_memory_utilization if self.on_cuda else memory_bytes
        return max(0, int(usable) - self.weight_bytes - self.working_bytes)


@dataclass(frozen=True)
class PlannedModel:
    """A model that is not loaded, and what it needs."""

    title: str
    config: DecoderConfig
    """The whole model."""
    needs: Needs
    step_weight_bytes: int
    """Bytes of the weights that every step of a rank multiplies with."""
    output_weight_bytes: int
    """The part of them that belongs to the output projection."""


def planned_model(config: EngineConfig) -> PlannedModel:
    """Read the model's shape, and compute what each rank needs."""
    from headway.loader.chosen_model import open_draft, open_model
    from headway.models.decoder_config import Shard
    from headway.worker.formats import planned_formats
    from headway.worker.memory_plan import bytes_per_token, estimated_weights, estimated_working_space, longest_request

    model = config.model
    checkpoint, draft = open_model(model), open_draft(model)
    formats = planned_formats(config, checkpoint.config)
    num_ranks = config.device.tensor_parallel_size
    shard = None if num_ranks == 1 else Shard.largest(checkpoint.config, num_ranks)
    shape = checkpoint.config if shard is None else shard.config
    longest = longest_request(model.max_model_len, shape)
    both = [checkpoint] if draft is None else [checkpoint, draft]
    weights = [estimated_weights(one, formats, longest, shard if one is checkpoint else None) for one in both]
    needs = Needs(
        on_cuda=formats.device.type == "cuda",
        formats=str(formats),
        num_parameters=sum(one.config.num_parameters for one in both),
        weight_bytes=sum(weights),
        working_bytes=estimated_working_space(shape, formats, config.scheduler.resolve(formats.device.type)),
        kv_dtype=formats.kv_format.name,
        kv_bytes_per_token=sum(bytes_per_token(shape if one is checkpoint else one.config, formats) for one in both),
        max_model_len=longest,
        num_ranks=num_ranks,
    )
    table = checkpoint.config.vocab_size * checkpoint.config.hidden_size * formats.dtype.itemsize // num_ranks
    beside = longest * shape.head_dim * 4 + (0 if checkpoint.config.tie_embeddings else table)
    return PlannedModel(
        title=" and ".join(one.name for one in both),
        config=checkpoint.config,
        needs=needs,
        step_weight_bytes=weights[0] - beside,
        output_weight_bytes=table,
    )
