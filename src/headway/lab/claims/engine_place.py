"""The real engine: loaded once, with another scheduler for each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.engine.loaded_model import LoadedModel
from headway.lab.bench.online import replay
from headway.lab.bench.rounds import Progress, check_room
from headway.lab.claims.place import Run
from headway.lab.claims.where import Where
from headway.lab.workload.requests import BenchRequest, Work, highest_token_id

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.engine.step_report import EngineStep

Load = Callable[..., "LLMEngine"]
"""(options over those of the command) → a loaded engine"""

_WARM_UP_REQUESTS = 64
_WARM_UP_TOKENS = 24


class EnginePlace:
    """A loaded model."""

    where: Where = "engine"

    def __init__(self, load: Load, *, name: str) -> None:
        self._load = load
        self._name = name
        self._model = LoadedModel(load())

    @property
    def description(self) -> str:
        plan = self._model.plan
        return f"engine: {self._name} on {_device_name(plan.device)}, {plan.dtype}, KV {plan.kv_dtype}"

    @property
    def trust(self) -> str:
        return ""

    @property
    def is_cpu(self) -> bool:
        return self._model.plan.device == "cpu"

    @property
    def vocab_size(self) -> int:
        return highest_token_id(self._model.engine.model_config.vocab_size) + 1

    @property
    def max_num_seqs(self) -> int:
        return self._model.config.scheduler.limits.max_num_seqs

    @property
    def bytes_per_token(self) -> float:
        return self._model.plan.bytes_per_block / self._model.plan.block_size

    @property
    def block_size(self) -> int:
        return self._model.plan.block_size

    @property
    def kv_tokens(self) -> int:
        return self._model.plan.num_tokens

    def run(
        self,
        work: Work,
        *,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> Run:
        """On a GPU some like it go before, until kernels are compiled and graphs are captured."""
        part = {**self._part(kv_tokens, max_model_len), "prefix_caching": "off", **options}
        engine = self._model.reschedule(**part)
        check_room(work, engine.plan.max_model_len)
        if not self.is_cpu:
            replay(engine, _warm_up(work), temperature=0.0)
            engine = self._model.reschedule(**part)
        watch = _Watch(engine)
        done = replay(engine, work, temperature=0.0, step=watch.step, progress=progress)
        if done.num_lost:
            raise RuntimeError(f"{done.num_lost} requests did not get their tokens; the measurement is void")
        return Run(done.timelines, done.duration_s, watch.waste, watch.num_running)

    def use_kv_dtype(self, kv_dtype: str | None) -> None:
        """Loads the model again: memory was laid out for the other format."""
        self._model.shutdown()
        self._model = LoadedModel(self._load(**({} if kv_dtype is None else {"kv_cache_dtype": kv_dtype})))

    def close(self) -> None:
        """The model is not needed any more."""
        self._model.shutdown()

    def _part(self, kv_tokens: int | None, max_model_len: int | None) -> dict[str, int]:
        """Of the memory and the longest request, as much as there is at most."""
        plan = self._model.plan
        num_blocks = plan.num_blocks if kv_tokens is None else kv_tokens // plan.block_size
        return {
            "num_blocks": max(1, min(num_blocks, plan.num_blocks)),
            "max_model_len": min(max_model_len or plan.max_model_len, plan.max_model_len),
        }


class _Watch:
    """The engine's step, and what the batch was like before it."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.waste: list[float] = []
        self.num_running: list[int] = []

    def step(self) -> EngineStep:
        scheduler = self._engine.core.scheduler
        if (waste := scheduler.kv_waste) is not None:
            self.waste.append(waste)
            self.num_running.append(len(scheduler.running) + len(scheduler.held))
        return self._engine.step()


def _warm_up(work: Work) -> list[BenchRequest]:
    """Its first requests, all at once and cut short."""
    return [
        dataclasses.replace(
            one, arrival_s=0.0, after=None, num_output_tokens=min(one.num_output_tokens, _WARM_UP_TOKENS)
        )
        for one in work[:_WARM_UP_REQUESTS]
    ]


def _device_name(device: str) -> str:
    from headway.lab.bench.surroundings import device_name

    return device_name(device)
