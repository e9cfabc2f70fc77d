"""The testbeds of claims. A claim is written once and runs on the real engine and in the simulator alike."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from headway.core.utilisation import Utilisation
from headway.errors import ConfigError
from headway_lab.bench.environment import device_name
from headway_lab.bench.replay import check_room, replay
from headway_lab.claims.claim import Where
from headway_lab.claims.run import Run
from headway_lab.sim import Calibration, simulate
from headway_lab.sim.calibration_run import DEFAULT_SECONDS, calibrate
from headway_lab.sim.kv_variant import with_kv_format
from headway_lab.sim.setup import check_work, set_up
from headway_lab.workload.bench_requests import BenchRequest, Work, highest_token_id

if TYPE_CHECKING:
    from headway.engine.llm_engine import LLMEngine
    from headway.engine.loaded_model import LoadedModel
    from headway.engine.step_report import EngineStep
    from headway.progress import Meter
    from headway.worker.ceilings import Ceilings


Load = Callable[..., "LLMEngine"]
"""(options that override those of the command) → a loaded engine"""

_WARM_UP_REQUESTS = 64
_WARM_UP_TOKENS = 24

SHIPPED = "h200-llama31-8b"


class Testbed(Protocol):
    """What serves the work of a claim: the engine or the simulator."""

    where: Where

    @property
    def description(self) -> str:
        """The model and the machine."""
        ...

    @property
    def machine(self) -> str:
        """The machine alone."""
        ...

    @property
    def is_gpu(self) -> bool:
        """Whether that machine is a GPU, real or simulated."""
        ...

    @property
    def trust(self) -> str:
        """A short text on how large the errors of its numbers may be; empty if they are measured."""
        ...

    @property
    def is_cpu(self) -> bool:
        """Whether it is so slow that work has to be small."""
        ...

    @property
    def num_devices(self) -> int:
        """The devices that serve together: one for each rank."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def bytes_per_token(self) -> float:
        """Bytes of KV memory for a token."""
        ...

    @property
    def block_size(self) -> int: ...

    @property
    def kv_tokens(self) -> int:
        """The number of tokens for which the KV memory has room."""
        ...

    def run(
        self,
        work: Work,
        *,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        progress: Meter | None = None,
        **options: Any,
    ) -> Run:
        """Serve the work with these options of scheduler and cache, with defaults for all others, and without a prefix
        cache. The KV memory and the longest request can be made smaller."""
        ...

    def use(self, **options: Any) -> None:
        """Serve with these options from now on, in place of those of the last call: what cannot change once a model is
        loaded. Without options it is as at the start."""
        ...

    def simulated(self) -> SimulatedTestbed:
        """A simulator of this machine, calibrated now if it is a real one."""
        ...


class EngineTestbed:
    where: Where = "engine"

    def __init__(self, load: Load, *, name: str) -> None:
        self._load, self._name = load, name
        self._current = _loaded(load())
        self._loaded_with: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        plan = self._current.plan
        self._device = plan.device
        self._description = f"engine: {name} on {device_name(plan.device)}, {plan.dtype}, KV {plan.kv_dtype}"

    @property
    def _model(self) -> LoadedModel:
        """The model, loaded again if it should have other options."""
        if self._loaded_with != self._options:
            self._current.shutdown()
            self._current = _loaded(self._load(**self._options))
            self._loaded_with = self._options
        return self._current

    @property
    def description(self) -> str:
        """As at the start."""
        return self._description

    @property
    def machine(self) -> str:
        return device_name(self._device)

    @property
    def is_gpu(self) -> bool:
        return not self.is_cpu

    @property
    def trust(self) -> str:
        return ""

    @property
    def is_cpu(self) -> bool:
        return self._device == "cpu"

    @property
    def num_devices(self) -> int:
        return self._model.plan.num_ranks

    @property
    def vocab_size(self) -> int:
        return highest_token_id(self._model.engine.model_config.vocab_size) + 1

    @property
    def max_num_seqs(self) -> int:
        return self._model.config.scheduler.max_num_seqs

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
        progress: Meter | None = None,
        **options: Any,
    ) -> Run:
        """Serve the work. On a GPU similar requests run before, until kernels are compiled and graphs are captured."""
        part = {**self._part(kv_tokens, max_model_len), "enable_prefix_caching": False, **options}
        engine = self._model.reschedule(**part)
        check_room(work, engine.plan.max_model_len)
        if not self.is_cpu:
            replay(engine, _warm_up(work), temperature=0.0)
            engine = self._model.reschedule(**part)
        watch = _Watch(engine)
        done = replay(engine, work, temperature=0.0, step=watch.step, progress=progress)
        if done.num_lost:
            raise RuntimeError(f"{done.num_lost} requests did not get their tokens; the measurement is void")
        used = Utilisation.of(engine.utilisation.stats)
        return Run(done.timelines, done.duration_s, watch.waste, watch.num_running, done.prompt_share, used)

    def use(self, **options: Any) -> None:
        """The model is loaded again when it is needed next, if these are other options."""
        self._options = options

    def simulated(self) -> SimulatedTestbed:
        """Calibrate the engine, with the model as it is loaded."""
        return SimulatedTestbed(calibrate(self._model.reschedule(), model=self._name, seconds=DEFAULT_SECONDS))

    def close(self) -> None:
        """Free the model."""
        self._current.shutdown()

    def engine(self, **options: Any) -> LLMEngine:
        """The engine with a scheduler with these options, for what is no work of fixed lengths. It is that of the
        testbed: use it before the next run."""
        return self._model.reschedule(**options)

    @cached_property
    def ceilings(self) -> Ceilings:
        """What the device can do at most, measured once, within a second."""
        from headway.worker.ceilings import measure_ceilings

        return measure_ceilings(self._model.plan.device, self._model.plan.dtype)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Free the GPU's memory for something else, and load the model again afterwards. On a CPU both have room."""
        if self.is_cpu:
            yield
            return
        self._current.shutdown()
        _free_cached_memory()
        try:
            yield
        finally:
            _free_cached_memory()
            self._current = _loaded(self._load(**self._loaded_with))

    def _part(self, kv_tokens: int | None, max_model_len: int | None) -> dict[str, int]:
        """The memory and the longest request as options, at most as large as the engine's."""
        plan = self._model.plan
        num_blocks = plan.num_blocks if kv_tokens is None else kv_tokens // plan.block_size
        return {
            "num_blocks": max(1, min(num_blocks, plan.num_blocks)),
            "max_model_len": min(max_model_len or plan.max_model_len, plan.max_model_len),
        }


def _loaded(engine: LLMEngine) -> LoadedModel:
    # Imported here: listing the claims takes no torch.
    from headway.engine.loaded_model import LoadedModel

    return LoadedModel(engine)


def _free_cached_memory() -> None:
    """Give memory that torch keeps for later back to the device."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


class _Watch:
    """Steps the engine, and records the batch before each step."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.waste: list[float] = []
        self.num_running: list[int] = []

    def step(self) -> EngineStep:
        scheduler = self._engine.core.scheduler
        if (waste := scheduler.kv_waste) is not None:
            self.waste.append(waste)
            self.num_running.append(len(scheduler.in_batch))
        return self._engine.step()


def _warm_up(work: Work) -> list[BenchRequest]:
    """The first requests, all at once and cut short."""
    return [
        dataclasses.replace(
            one, arrival_s=0.0, after=None, num_output_tokens=min(one.num_output_tokens, _WARM_UP_TOKENS)
        )
        for one in work[:_WARM_UP_REQUESTS]
    ]


class SimulatedTestbed:
    """The real scheduler on a virtual clock."""

    where: Where = "simulator"

    def __init__(self, calibration: Calibration) -> None:
        self._first = self._calibration = calibration

    @classmethod
    def open(cls, path: str | Path | None = None) -> SimulatedTestbed:
        """Load a calibration's file, or a shipped one by its name."""
        return cls(Calibration.find(SHIPPED if path is None else path))

    @property
    def calibration(self) -> Calibration:
        """The simulated machine, for claims that simulate more than one engine."""
        return self._first

    @property
    def description(self) -> str:
        calibration = self._first
        return f"simulator: {calibration.model or 'a model'} on {self.machine}; {self.trust}"

    @property
    def machine(self) -> str:
        return self._first.device_name or self._first.device

    @property
    def is_gpu(self) -> bool:
        return self._first.device_kind == "cuda"

    @property
    def trust(self) -> str:
        cost = self._first.cost
        if not cost.errors:
            return "error of steps not known: costs from single measurements, not fitted"
        return f"mean error of steps {100 * cost.mean_error:.1f}%"

    @property
    def is_cpu(self) -> bool:
        """False, since time is virtual here."""
        return False

    @property
    def num_devices(self) -> int:
        return self._calibration.tensor_parallel_size

    @property
    def vocab_size(self) -> int:
        return self._calibration.vocab_size

    @property
    def max_num_seqs(self) -> int:
        return self._calibration.scheduler_settings().max_num_seqs

    @property
    def bytes_per_token(self) -> float:
        return self._calibration.bytes_per_block / self._calibration.block_size

    @property
    def block_size(self) -> int:
        return self._calibration.block_size

    @property
    def kv_tokens(self) -> int:
        return self._calibration.num_blocks * self._calibration.block_size

    def run(
        self,
        work: Work,
        *,
        kv_tokens: int | None = None,
        max_model_len: int | None = None,
        progress: Meter | None = None,
        **options: Any,
    ) -> Run:
        calibration = self._calibration
        num_blocks = min(self.kv_tokens, kv_tokens or self.kv_tokens) // options.get("block_size", self.block_size)
        setup = set_up(calibration, {"enable_prefix_caching": False, **options, "num_kv_blocks": max(1, num_blocks)})
        longest = min(max_model_len or calibration.max_model_len, calibration.max_model_len)
        machine = dataclasses.replace(setup.machine, max_model_len=longest)
        check_work(work, machine)
        done = simulate(work, machine, setup.scheduler, setup.cache, progress=progress)
        share = done.token_time.prompt_share
        used = None if done.utilisation is None else Utilisation.of(done.utilisation)
        return Run(done.timelines, done.duration_s, done.waste, done.num_running, share, used)

    def use(self, **options: Any) -> None:
        """Adjust what is known without measuring. A KV format: a token takes fewer bytes, so more tokens fit, and
        reading one takes less time. A longest request: the cost model is continued to it."""
        unknown = sorted(options.keys() - {"kv_cache_dtype", "max_model_len", "speculation"})
        if unknown:
            raise ConfigError(f"What '{unknown[0]}' changes cannot be simulated; run the claim with --on engine.")
        self._calibration = self._first
        if (longest := options.get("max_model_len")) is not None:
            self._calibration = dataclasses.replace(self._calibration, max_model_len=longest)
        if (kv_dtype := options.get("kv_cache_dtype")) is not None:
            self._calibration = with_kv_format(self._calibration, kv_dtype)

    def simulated(self) -> SimulatedTestbed:
        return self
