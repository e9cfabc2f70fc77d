"""Checks the engine's own count of its utilisation against a profile of the same steps, counted another way.

    engine    bytes, flops and busy time as the engine counts them for /metrics (`headway.core.utilisation`)
    profile   bytes and flops of each operation, from the tensors that are loaded (every linear layer, every layer's
              cache) and from each request's row in each step; on a GPU the time is that in which kernels ran, from
              torch's profiler, on a CPU that of the calls that compute

The bandwidth share is that of the steps of `nano` that only decode, the compute share (MFU) that of `prefill`. Both are
shares of the ceilings measured at the start. NVML's number stands beside them where its library is installed.

    python benchmarks/utilisation.py --model qwen3-0.6b
    python benchmarks/utilisation.py --model embedded --requests 4 --steps 20
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from shape_flags import shape_options, shape_parser
from torch.profiler import ProfilerActivity, profile

from headway.config import OFFLINE_OPTIONS, EngineConfig
from headway.core import SchedulerOutput
from headway.core.utilisation import Utilisation, UtilisationStats
from headway.engine.llm_engine import LLMEngine
from headway.engine.step_report import EngineStep, StepReport
from headway.worker.ceilings import Ceilings
from headway.worker.nvml import NvmlPolling
from headway_lab.bench.offline_bench import SCENARIO_TEMPERATURE, SCENARIOS
from headway_lab.bench.replay import run_round
from headway_lab.workload.bench_requests import Work


@dataclass(frozen=True)
class LoadedTensors:
    """What is in memory, read from the tensors themselves."""

    linear_bytes: int
    linear_weights: int
    """Of the layers, without the output projection."""
    output_bytes: int
    output_weights: int
    kv_bytes_per_token: float
    pair_flops: int

    @staticmethod
    def of(engine: LLMEngine) -> LoadedTensors:
        runner: Any = engine.core.executor._runner  # type: ignore[attr-defined]  # no other way leads to the tensors
        decoder, caches = runner.decoder, runner.attention.kv_caches
        linears = [linear for layer in decoder.layers for linear in layer.linears]
        num_slots = engine.plan.num_blocks * engine.plan.block_size
        kv_bytes = sum(tensor.nbytes for cache in caches for tensor in _tensors(cache))
        model = decoder.config
        return LoadedTensors(
            linear_bytes=sum(linear.num_bytes for linear in linears),
            linear_weights=sum(linear.in_features * linear.out_features for linear in linears),
            output_bytes=decoder.lm_head.num_bytes,
            output_weights=model.vocab_size * model.hidden_size,
            kv_bytes_per_token=kv_bytes / num_slots,
            pair_flops=len(decoder.layers) * model.num_heads * model.head_dim * 4,
        )


def _tensors(record: Any) -> Iterable[torch.Tensor]:
    values = (getattr(record, item.name) for item in dataclasses.fields(record))
    return [value for value in values if isinstance(value, torch.Tensor)]


@dataclass
class ProfiledSteps:
    """Counts steps one operation after the other."""

    tensors: LoadedTensors
    num_steps: int = 0
    num_bytes: float = 0.0
    flops: float = 0.0
    kernel_s: float = 0.0

    def take(self, report: StepReport) -> None:
        tensors, rows = self.tensors, report.rows
        num_sampled = sum(share.samples for share in report.snapshot.output.scheduled)
        self.num_steps += 1
        self.num_bytes += tensors.linear_bytes + (tensors.output_bytes if num_sampled else 0)
        self.flops += 2 * tensors.output_weights * num_sampled
        for row in rows:
            end = row.num_computed_tokens + row.num_tokens
            self.num_bytes += tensors.kv_bytes_per_token * end
            self.flops += 2 * tensors.linear_weights * row.num_tokens
            self.flops += tensors.pair_flops * sum(range(row.num_computed_tokens + 1, end + 1))


class TimedExecutor:
    """Measures the calls that compute, on a CPU."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.computed_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, output: SchedulerOutput) -> Any:
        started_s = time.perf_counter()
        try:
            return self._executor.submit(output)
        finally:
            self.computed_s += time.perf_counter() - started_s


@dataclass
class Window:
    """The steps of a round that are counted twice: `num_steps` of one kind after the first `skip` of them."""

    engine: LLMEngine
    steps: ProfiledSteps
    kind_is: Callable[[StepReport], bool]
    skip: int
    num_steps: int
    counted: UtilisationStats = field(default_factory=UtilisationStats)
    _num_seen: int = 0
    _profile: Any = None
    _timed: TimedExecutor | None = None

    def step(self) -> EngineStep:
        """Step the engine, inside the profile from the first step of the kind after those that are skipped."""
        is_wanted = self._num_seen >= self.skip and self.steps.num_steps < self.num_steps
        if is_wanted and self._profile is None and self._timed is None:
            self._begin()
        before = self.engine.utilisation.stats.copy()
        computed_s = 0.0 if self._timed is None else self._timed.computed_s
        stepped = self.engine.step()
        report = stepped.report
        if report.num_tokens and self.kind_is(report):
            self._num_seen += 1
            if is_wanted:
                self.steps.take(report)
                self.counted.add(self.engine.utilisation.stats.since(before))
                if self._timed is not None:
                    self.steps.kernel_s += self._timed.computed_s - computed_s
        elif is_wanted and self.steps.num_steps and self._profile is not None:
            self.steps.num_steps = self.num_steps  # another kind of step would be in the profile too
        if is_wanted and self.steps.num_steps >= self.num_steps:
            self.end()
        return stepped

    def _begin(self) -> None:
        if self.engine.plan.device.startswith("cuda"):
            torch.cuda.synchronize()
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.__enter__()
        else:
            self._timed = TimedExecutor(self.engine.core.executor)
            self.engine.core.executor = self._timed  # type: ignore[assignment]

    def end(self) -> None:
        """End the profile, and add up the time in which kernels ran."""
        if self._timed is not None:
            self.engine.core.executor = self._timed._executor
            self._timed = None
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.__exit__(None, None, None)
            self.steps.kernel_s = covered_s(
                (event.time_range.start, event.time_range.end) for event in self._profile.events()
            )
            self._profile = None


def covered_s(ranges_us: Iterable[tuple[float, float]]) -> float:
    """The seconds that ranges cover together."""
    total_us = end_us = 0.0
    for start, end in sorted(ranges_us):
        total_us += max(0.0, end - max(start, end_us))
        end_us = max(end_us, end)
    return total_us / 1e6


def measure(engine: LLMEngine, work: Work, *, scenario: str, num_steps: int, ceilings: Ceilings) -> dict[str, Any]:
    """Run a scenario and count the same steps both ways."""
    decodes = scenario == "nano"
    window = Window(
        engine,
        ProfiledSteps(LoadedTensors.of(engine)),
        kind_is=(lambda report: report.num_tokens == len(report.rows)) if decodes else (lambda report: True),
        skip=2 * num_steps if decodes else 2,
        num_steps=num_steps,
    )
    before = engine.utilisation.stats.copy()
    polling = NvmlPolling.of_device(engine.plan.device, engine.utilisation.stats)
    result = run_round(engine, work, temperature=SCENARIO_TEMPERATURE, step=window.step)
    window.end()
    if polling is not None:
        polling.stop()
    steps, counted = window.steps, Utilisation.of(window.counted)
    if not steps.kernel_s:
        raise SystemExit(f"{scenario} has fewer steps than were to be counted; lower --steps or give more --requests.")
    profiled = {
        "bandwidth": steps.num_bytes / steps.kernel_s / ceilings.bandwidth_bytes_s,
        "compute": steps.flops / steps.kernel_s / ceilings.flops_s,
    }
    return {
        "elapsed_s": result.times.elapsed_s,
        "steps": steps.num_steps,
        "engine": counted.as_json(),
        "profile": {name: round(share, 4) for name, share in profiled.items()},
        "bytes_ratio": window.counted.read_bytes / steps.num_bytes,
        "flops_ratio": window.counted.flops / steps.flops,
        "busy_ratio": window.counted.device_busy_s / steps.kernel_s,
        "round": Utilisation.of(engine.utilisation.stats.since(before)).as_json(),
    }


def main() -> None:
    parser = shape_parser(__doc__, model="qwen3-0.6b")
    parser.add_argument("--scenarios", nargs="+", default=["nano", "prefill"], choices=("nano", "prefill"))
    parser.add_argument("--steps", type=int, default=100, help="how many steps are counted twice")
    parser.add_argument("--requests", type=int, help="only so many of the scenario's requests")
    parser.add_argument("--output-json", metavar="FILE")
    options = parser.parse_args()
    own = {"enable_prefix_caching": False} if options.model == "embedded" else shape_options(options)
    config = EngineConfig.from_options(**own, max_model_len=SCENARIOS["nano"].max_model_len, **OFFLINE_OPTIONS)
    engine = LLMEngine.from_config(config)
    engine.warm_up()
    ceilings = engine.plan.ceilings
    if ceilings is None:
        raise SystemExit("The ceilings of this device could not be measured.")
    print(f"{options.model} on {engine.plan.device}: {ceilings}")
    found = {}
    for name in options.scenarios:
        work = SCENARIOS[name].draw(config.model.seed, engine.model_config.vocab_size)[: options.requests]
        run_round(engine, work, temperature=SCENARIO_TEMPERATURE)
        num_steps = min(options.steps, max(2, len(work) // 8)) if name == "prefill" else options.steps
        one = found[name] = measure(engine, work, scenario=name, num_steps=num_steps, ceilings=ceilings)
        share = "bandwidth" if name == "nano" else "compute"
        nvml = one["round"].get("nvml")
        told = "unknown" if nvml is None else f"{nvml:.0%}"
        print(
            f"{name:<8} {one['steps']} steps  {share}: engine {one['engine'][share]:.1%}, profile "
            f"{one['profile'][share]:.1%}  (engine over profile: bytes {one['bytes_ratio']:.3f}, flops "
            f"{one['flops_ratio']:.3f}, time {one['busy_ratio']:.3f})  NVML {told}"
        )
        print(f"         whole round: {json.dumps(one['round'])}")
    if options.output_json:
        with open(options.output_json, "w", encoding="utf-8") as file:
            json.dump({"ceilings": dataclasses.asdict(ceilings), **found}, file, indent=2)


if __name__ == "__main__":
    main()
