"""The real engine: loaded once, with another scheduler for each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headway.bench.online import replay
from headway.bench.rounds import check_room
from headway.claims.claim import Where
from headway.claims.place import Progress, Run
from headway.engine.reschedule import reschedule
from headway.workload.requests import BenchRequest, Work, highest_token_id

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.outputs import RequestOutput

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
        self._engine = self._first_load({})

    def _first_load(self, options: dict[str, Any]) -> LLMEngine:
        engine = self._load(**options)
        self._config, self._plan = engine.config, engine.plan
        return engine

    @property
    def description(self) -> str:
        plan = self._plan
        return f"engine: {self._name} on {_device_name(plan.device)}, {plan.dtype}, KV {plan.kv_dtype}"

    @property
    def trust(self) -> str:
        return ""

    @property
    def is_cpu(self) -> bool:
        return self._plan.device == "cpu"

    @property
    def vocab_size(self) -> int:
        return highest_token_id(self._engine.model_config.vocab_size) + 1

    @property
    def max_num_seqs(self) -> int:
        return self._config.scheduler.limits.max_num_seqs

    @property
    def bytes_per_token(self) -> float:
        return self._plan.bytes_per_block / self._plan.block_size

    @property
    def block_size(self) -> int:
        return self._plan.block_size

    @property
    def kv_tokens(self) -> int:
        return self._plan.num_tokens

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
        self._renew(kv_tokens, max_model_len, options)
        check_room(work, self._engine.plan.max_model_len)
        if not self.is_cpu:
            replay(self._engine, _warm_up(work), temperature=0.0)
            self._renew(kv_tokens, max_model_len, options)
        watch = _Watch(self._engine)
        done = replay(self._engine, work, temperature=0.0, step=watch.step, progress=progress)
        if done.num_lost:
            raise RuntimeError(f"{done.num_lost} requests did not get their tokens; the measurement is void")
        return Run(done.timelines, done.duration_s, watch.waste, watch.num_running)

    def use_kv_dtype(self, kv_dtype: str | None) -> None:
        """Loads the model again: memory was laid out for the other format."""
        self._engine.shutdown()
        self._engine = self._first_load({} if kv_dtype is None else {"kv_cache_dtype": kv_dtype})

    def close(self) -> None:
        """The model is not needed any more."""
        self._engine.shutdown()

    def _renew(self, kv_tokens: int | None, max_model_len: int | None, options: dict[str, Any]) -> None:
        """Another scheduler, with the options of the loaded engine where none are given, and a part of its memory."""
        plan, engine = self._plan, self._engine
        engine.config = self._config
        engine.plan = dataclasses.replace(
            plan,
            num_blocks=max(1, min(plan.num_blocks, (kv_tokens or plan.num_tokens) // plan.block_size)),
            max_model_len=min(max_model_len or plan.max_model_len, plan.max_model_len),
        )
        self._engine = reschedule(engine, **{"prefix_caching": "off", **options})


class _Watch:
    """The engine's step, and what the batch was like before it."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.waste: list[float] = []
        self.num_running: list[int] = []

    def step(self) -> list[RequestOutput]:
        scheduler = self._engine.core.scheduler
        reserved = scheduler.kv_cache.num_reserved_blocks * scheduler.kv_cache.block_size
        if reserved:
            self.waste.append(1.0 - scheduler.num_used_slots / reserved)
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
    from headway.sim.surroundings import device_name

    return device_name(device)
