"""Whether a model fits into the memory of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from headway.config import EngineConfig
from headway.doctor.checks.memory import gib
from headway.doctor.facts import Facts
from headway.doctor.findings import Finding, error, ok, warning
from headway.worker.memory_needs import Needs

_SUBJECT = "model"


def check_model(facts: Facts, config: EngineConfig, title: str, needs: Needs) -> Iterator[Finding]:
    """Compare what a model needs with what is there. `needs` are those of `headway plan`."""
    if needs.on_cuda:
        yield from _on_gpus(facts, config, title, needs)
        return
    yield from _fit(title, needs, facts.memory.usable, needs.num_ranks, config, where="this machine's memory")


def _on_gpus(facts: Facts, config: EngineConfig, title: str, needs: Needs) -> Iterator[Finding]:
    gpus = facts.cuda.gpus
    if not gpus:
        yield error(
            _SUBJECT,
            f"{title} is to run on a GPU, and torch sees none.",
            "The engine does not start.",
            "See what is said of the GPU, or use '--device cpu'.",
        )
        return
    if len(gpus) < needs.num_ranks:
        yield error(
            _SUBJECT,
            f"tensor_parallel_size is {needs.num_ranks}, and there are {len(gpus)} GPUs.",
            "The engine does not start.",
            f"Lower it to {len(gpus)} or less.",
        )
        return
    smallest = min(gpus[: needs.num_ranks], key=lambda gpu: gpu.free)
    yield from _fit(title, needs, smallest.free, 1, config, where=smallest.name)


def _fit(
    title: str, needs: Needs, free: int, num_sharing: int, config: EngineConfig, *, where: str
) -> Iterator[Finding]:
    """Compare with `free` bytes, which `num_sharing` ranks share."""
    needed = (needs.weight_bytes + needs.working_bytes) * num_sharing
    room = needs.room(free / num_sharing, config.cache.gpu_memory_utilization)
    tokens = room // needs.kv_bytes_per_token
    if not room:
        yield error(
            _SUBJECT,
            f"{title} does not fit: weights and working space take {gib(needed)}, and {gib(free)} of {where} are free.",
            "The engine does not start, or the system kills it.",
            "Use a smaller model or format (--quantization), more devices (--tensor-parallel-size), or end what takes "
            "the memory. 'headway plan' says what would fit.",
        )
    elif tokens < needs.max_model_len:
        yield warning(
            _SUBJECT,
            f"{title} fits, with room for {tokens:,} tokens of KV cache, and its context is {needs.max_model_len:,}.",
            "The context is shortened to that.",
            "Give --max-model-len, a smaller --kv-cache-dtype, or more memory.",
        )
    else:
        requests = tokens / needs.max_model_len
        yield ok(
            _SUBJECT,
            f"{title} fits ({needs.formats}): {gib(needed)} for weights and work, and room for {tokens:,} tokens of KV "
            f"cache, {requests:,.1f} requests of full length.",
        )
