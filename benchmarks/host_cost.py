"""What the host does per step, without a model: what it costs, and that it does not grow with the queue.

A step's host work must hide behind the device's, which decodes 64 requests in about a millisecond. Four layers are
timed, each containing the one before:

    scheduler   schedule() and update()
    core        EngineCore.step(): also snapshot, pipeline, report
    engine      LLMEngine.step(): also the outputs of requests that do not stream
    stream      the same with an output per request and step

Each runs a full batch with a queue behind it; whoever finishes is replaced outside the measured time, so that the load
stays the same. Sides take turns, so that a noisy machine is noisy for all; the median over rounds is printed. The time
of the stand-in for the model is taken out. What the scheduler costs under each policy: `scheduler_cost.py`.

    python benchmarks/host_cost.py --running 64 256 --waiting 1000 100000
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable

from headway.config import EngineConfig, SchedulerConfig
from headway.core import KVCacheManager, ModelRunnerOutput, Request, SampledTokens, Scheduler, SchedulerOutput
from headway.core.request_options import RequestOptions
from headway.engine.engine_core import EngineCore
from headway.engine.llm_engine import LLMEngine
from headway.models.decoder_config import DecoderConfig
from headway.sampling_params import SamplingParams
from headway.worker.memory_plan import MemoryPlan

BLOCK_SIZE = 16
TOKEN = SampledTokens((7,))
Step = Callable[[], float]


class FinishedStep:
    """A step that has run."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class InstantExecutor:
    """The same token for everybody. Counts the seconds it takes itself."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.verifies_ahead = False
        self.transfers = None
        self.spent_s = 0.0

    def submit(self, output: SchedulerOutput) -> FinishedStep:
        started = time.perf_counter()
        result = answer(output)
        self.spent_s += time.perf_counter() - started
        return FinishedStep(result)

    def shutdown(self) -> None:
        """Nothing to free."""


def answer(output: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput({s.request_id: TOKEN for s in output.scheduled if s.samples}, {})


class Lengths:
    """Random prompt and output lengths and priorities, the same for every side."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._ids = itertools.count()

    def request(self) -> Request:
        return Request(
            f"r{next(self._ids)}",
            range(self._draw()),
            max_tokens=self._draw(),
            options=RequestOptions(priority=self._rng.randint(0, 9)),
        )

    def submit_to(self, engine: LLMEngine, *, stream: bool) -> None:
        params = SamplingParams(max_tokens=self._draw(), detokenize=False, ignore_eos=True)
        prompt, priority = list(range(self._draw())), self._rng.randint(0, 9)
        engine.add_request(f"r{next(self._ids)}", prompt, params, RequestOptions(priority=priority), stream=stream)

    def _draw(self) -> int:
        return self._rng.randint(16, 256)


def config_for(num_running: int, policy: str) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=num_running, max_num_batched_tokens=max(512, 2 * num_running), scheduling_policy=policy
    )


def num_blocks_for(num_running: int) -> int:
    """Twice what the batch needs, so that memory is not what decides."""
    return num_running * 64


def make_scheduler(num_running: int, policy: str) -> Scheduler:
    kv_cache = KVCacheManager(num_blocks=num_blocks_for(num_running), block_size=BLOCK_SIZE)
    return Scheduler(config_for(num_running, policy).resolve("cpu"), kv_cache)


def scheduler_side(num_running: int, num_waiting: int, policy: str, _max_in_flight: int) -> Step:
    scheduler, lengths = make_scheduler(num_running, policy), Lengths()
    for _ in range(num_running + num_waiting):
        scheduler.add_request(lengths.request())

    def step() -> float:
        started = time.perf_counter()
        output = scheduler.schedule()
        planned = time.perf_counter()
        result = answer(output)
        answered = time.perf_counter()
        updates = scheduler.update(output, result)
        spent = time.perf_counter() - answered + planned - started
        for update in updates:
            if update.finish_status is not None:
                scheduler.add_request(lengths.request())
        return spent

    return step


def core_side(num_running: int, num_waiting: int, policy: str, max_in_flight: int) -> Step:
    executor, lengths = InstantExecutor(max_in_flight), Lengths()
    core = EngineCore(make_scheduler(num_running, policy), executor, now=time.perf_counter)
    for _ in range(num_running + num_waiting):
        core.add_request(lengths.request())

    def step() -> float:
        executor.spent_s = 0.0
        started = time.perf_counter()
        done = core.step()
        spent = time.perf_counter() - started - executor.spent_s
        for update in done.updates:
            if update.finish_status is not None:
                core.add_request(lengths.request())
        return spent

    return step


def engine_side(num_running: int, num_waiting: int, policy: str, max_in_flight: int, *, stream: bool = False) -> Step:
    executor, lengths = InstantExecutor(max_in_flight), Lengths()
    model = DecoderConfig(
        architecture="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        max_position=1024,
    )
    plan = MemoryPlan(
        device="none",
        dtype="none",
        weight_bytes=0,
        kv_dtype="none",
        num_blocks=num_blocks_for(num_running),
        block_size=BLOCK_SIZE,
        bytes_per_block=1,
        max_model_len=1024,
    )
    config = EngineConfig(scheduler=config_for(num_running, policy)).resolve("cpu")
    engine = LLMEngine(config, executor=executor, tokenizer=None, model_config=model, plan=plan)
    for _ in range(num_running + num_waiting):
        lengths.submit_to(engine, stream=stream)

    def step() -> float:
        executor.spent_s = 0.0
        started = time.perf_counter()
        outputs = engine.step().outputs
        spent = time.perf_counter() - started - executor.spent_s
        for output in outputs:
            if output.finished:
                lengths.submit_to(engine, stream=stream)
        return spent

    return step


def stream_side(num_running: int, num_waiting: int, policy: str, max_in_flight: int) -> Step:
    return engine_side(num_running, num_waiting, policy, max_in_flight, stream=True)


LAYERS = {"scheduler": scheduler_side, "core": core_side, "engine": engine_side, "stream": stream_side}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--waiting", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--policies", nargs="+", default=["fcfs", "priority"])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--max-in-flight", type=int, default=2, help="of core, engine and stream")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50, help="steps per round")
    options = parser.parse_args()
    for layer, policy, running in itertools.product(options.layers, options.policies, options.running):
        sides = {n: LAYERS[layer](running, n, policy, options.max_in_flight) for n in options.waiting}
        medians = measure(sides, num_rounds=options.rounds, num_steps=options.steps)
        base = medians[options.waiting[0]]
        for waiting, median in medians.items():
            print(
                f"{layer:9} {policy:8} {running:4} running {waiting:8,} waiting  {median:8.1f} us/step  "
                f"{median / running:5.2f} us/request  ratio {median / base:5.2f}",
                flush=True,
            )


def measure(sides: dict[int, Step], *, num_rounds: int, num_steps: int) -> dict[int, float]:
    """Median microseconds per step of each side."""
    rounds: dict[int, list[float]] = {waiting: [] for waiting in sides}
    gc.collect()
    gc.freeze()  # the queues are live data; walking them again is not the scheduler's cost
    for step in sides.values():
        for _ in range(100):
            step()
    for _ in range(num_rounds):
        for waiting, step in sides.items():
            rounds[waiting].append(1e6 * statistics.fmean(step() for _ in range(num_steps)))
    gc.unfreeze()
    return {waiting: statistics.median(values) for waiting, values in rounds.items()}


if __name__ == "__main__":
    main()
