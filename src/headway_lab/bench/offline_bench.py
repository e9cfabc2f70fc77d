"""`headway bench latency` and `throughput`: fixed scenarios, the numbers of a round, flags, rounds and results.

Common to all scenarios: temperature 0.6, end-of-sequence ignored, nothing detokenised, prompts of random ids from seed
0, all requests there at once (`online` apart), the engine warm. A ratio is always of times, measured over floor,
whether the number is a time or a rate: 1 is the floor, 2 takes twice as long.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.config import OFFLINE_OPTIONS, EngineConfig
from headway.console.flags import add_flags, chosen, engine_flags, with_shape_defaults
from headway.console.output_files import check_writable, write_json
from headway.console.step_profiler import add_profile_flags, profile_steps
from headway.errors import ConfigError
from headway.progress import progress_bar
from headway_lab.bench.pricing import Pricing, add_price_flag, price_measures, round_prices
from headway_lab.bench.timelines import Measure, RoundTimes
from headway_lab.workload.bench_requests import (
    HIGHEST_TOKEN_ID,
    BenchRequest,
    LengthRange,
    TraceLimits,
    Work,
    describe,
    draw_work,
    highest_token_id,
    trace_work,
)

if TYPE_CHECKING:
    from rich.console import Console

    from headway.core.utilisation import Utilisation
    from headway.engine.llm_engine import LLMEngine
    from headway.worker.ceilings import Ceilings
    from headway_lab.bench.offline_report import Setting
    from headway_lab.bench.online_metrics import OnlineMetrics
    from headway_lab.bench.replay import Round


SCENARIO_TEMPERATURE = 0.6

PLAIN_TEMPERATURE = 1.0
"""The temperature of runs without a scenario, which is vLLM's."""

ResultOf = Callable[[Sequence[RoundTimes]], dict[str, Any]]


def _pace_ms(times: RoundTimes) -> float | None:
    return None if times.pace_s is None else 1000 * times.pace_s


OUTPUT_RATE = Measure("output_tok_s", "output tok/s", lambda times: times.output_tok_s, True, 1)

LATENCY_MEASURES: Sequence[Measure] = (
    Measure("latency_s", "latency s", lambda times: times.elapsed_s, False, 4),
    Measure("ms_per_token", "ms/token", _pace_ms, False, 3),
    OUTPUT_RATE,
)
"""`ms/token` is the pace of decoding: the time from the first to the last token, over the tokens after the first."""

THROUGHPUT_MEASURES: Sequence[Measure] = (
    Measure("elapsed_s", "elapsed s", lambda times: times.elapsed_s, False, 3),
    OUTPUT_RATE,
    Measure("input_tok_s", "input tok/s", lambda times: times.input_tok_s, True, 1),
    Measure("requests_s", "requests/s", lambda times: times.requests_s, True, 2),
)


def values_json(measures: Sequence[Measure], times: RoundTimes) -> dict[str, float | None]:
    """The numbers of one round, or of the floor, by their keys."""
    return {measure.key: measure.of(times) for measure in measures}


def ratios_json(measures: Sequence[Measure], times: RoundTimes, floor: RoundTimes) -> dict[str, float | None]:
    """The ratios of one round to the floor, by their keys."""
    return {measure.key: measure.ratio(times, floor) for measure in measures}


@dataclass(frozen=True)
class Scenario:
    name: str
    num_requests: int
    input_len: LengthRange
    output_len: LengthRange
    max_model_len: int = 4096
    is_online: bool = False
    """Requests arrive as in a recorded trace; the lengths above are the limits that the trace's own are clamped to."""
    num_rounds: int = 3
    num_warmup_rounds: int = 1

    @property
    def summary(self) -> str:
        """A description in one line."""
        plural = "s" if self.num_requests != 1 else ""
        arrivals = ", arriving as in a trace" if self.is_online else ""
        return f"{self.num_requests:,} request{plural}, {self.input_len} in, {self.output_len} out{arrivals}"

    def draw(
        self, seed: int, vocab_size: int, *, trace: str | None = None, speedup: float = TraceLimits.speedup
    ) -> list[BenchRequest]:
        """Draw the requests. An online scenario needs the file of its trace."""
        rng = random.Random(seed)
        if self.is_online:
            if trace is None:
                raise ConfigError(f"The scenario '{self.name}' replays a trace: name the file with --trace.")
            limits = TraceLimits(self.num_requests, speedup, self.input_len, self.output_len)
            return trace_work(trace, rng, vocab_size=vocab_size, limits=limits)
        return draw_work(
            rng, self.num_requests, input_len=self.input_len, output_len=self.output_len, vocab_size=vocab_size
        )


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("b1", 1, LengthRange.exactly(128), LengthRange.exactly(256)),
        Scenario("b64", 64, LengthRange.exactly(128), LengthRange.exactly(256)),
        Scenario("nano", 256, LengthRange(100, 1024), LengthRange(100, 1024)),
        Scenario("prefill", 128, LengthRange.exactly(2048), LengthRange.exactly(1)),
        Scenario(
            "online",
            TraceLimits.num_requests,
            TraceLimits.input_len,
            TraceLimits.output_len,
            max_model_len=8192,
            is_online=True,
            num_rounds=1,
        ),
    )
}

LATENCY_SCENARIOS = ("b1", "b64")
"""The scenarios that make one batch of equal requests."""


@dataclass(frozen=True)
class Job:
    """A benchmark as the command line describes it."""

    title: str
    draw: Callable[[int, int], list[BenchRequest]]
    """(seed, size of the vocabulary) → the work."""
    scenario: Scenario | None
    num_rounds: int
    num_warmup_rounds: int
    measures: Sequence[Measure]
    result: ResultOf
    """Makes the keys that vLLM's command writes, from the measured rounds."""

    @property
    def temperature(self) -> float:
        return PLAIN_TEMPERATURE if self.scenario is None else SCENARIO_TEMPERATURE


def add_common_flags(parser: argparse.ArgumentParser, scenarios: Sequence[str]) -> None:
    """Add the flags that every benchmark has, and those of the engine."""
    summaries = "; ".join(f"{name}: {SCENARIOS[name].summary}" for name in scenarios)
    parser.add_argument("--scenario", choices=scenarios, help=f"A fixed measurement. {summaries}.")
    parser.add_argument("--output-json", metavar="FILE", help="Write the result here.")
    parser.add_argument(
        "--start-up", action="store_true", help="Only measure the time from process start to a first token."
    )
    add_price_flag(parser)
    add_profile_flags(parser, "of one more round")
    add_flags(parser, engine_flags())


def chosen_scenario(arguments: argparse.Namespace, fixed: Sequence[str]) -> Scenario | None:
    """The scenario, if one was named. It fixes the work, so flags that describe work are refused beside it."""
    if arguments.scenario is None:
        return None
    for name in fixed:
        if getattr(arguments, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is fixed by the scenario '{arguments.scenario}'; give one of the two.")
    return SCENARIOS[arguments.scenario]


def either(value: Any, default: Any) -> Any:
    """`value` unless the flag was not given."""
    return default if value is None else value


def run_job(arguments: argparse.Namespace, job: Job) -> int:
    """Load, measure, print, write."""
    check_writable(arguments.output_json, arguments.profile)
    config = _engine_config(arguments, job.scenario)

    from headway_lab.bench.replay import check_room

    # Of a vocabulary of any size, since bad work is to be known before a model is loaded.
    work = job.draw(config.model.seed, HIGHEST_TOKEN_ID + 1)
    if config.model.max_model_len is not None:
        check_room(work, config.model.max_model_len)

    from rich.console import Console

    from headway.console.loading import load_engine, model_title, stderr_console
    from headway.worker.ceilings import measure_ceilings
    from headway_lab.bench.environment import measure_start_up
    from headway_lab.bench.offline_report import describe_setting, print_setting

    engine = load_engine(config, stderr_console(), quiet=True)
    start_up = measure_start_up(engine)
    console = Console(highlight=False)
    if arguments.start_up:
        console.print(str(start_up))
        if arguments.output_json is not None:
            found = {"ready_s": start_up.ready_s, "first_token_s": start_up.first_token_s}
            write_json(arguments.output_json, found)
        return 0
    engine.warm_up()
    work = job.draw(config.model.seed, engine.model_config.vocab_size)
    check_room(work, engine.plan.max_model_len)
    ceilings = measure_ceilings(engine.plan.device, engine.plan.dtype)
    setting = describe_setting(
        engine,
        model=model_title(config),
        work=describe(work),
        notes=_notes(engine),
        start_up=start_up,
        ceilings=ceilings,
    )
    print_setting(console, job.title, setting)
    run = _Run(arguments, job, engine, work, ceilings, setting, console)
    return run.online() if job.scenario is not None and job.scenario.is_online else run.batch()


@dataclass(frozen=True)
class _Run:
    """A benchmark whose engine is loaded and whose work is drawn."""

    arguments: argparse.Namespace
    job: Job
    engine: LLMEngine
    work: Work
    ceilings: Ceilings
    setting: Setting
    console: Console

    def batch(self) -> int:
        """Run rounds in which everything is there at once, and return the exit code."""
        from headway.worker.step_costs import planned_costs
        from headway_lab.bench.floors import work_floor
        from headway_lab.bench.offline_report import print_rounds
        from headway_lab.bench.replay import run_round

        run_one = functools.partial(run_round, self.engine, self.work, temperature=self.job.temperature)
        measured: list[Round] = self._rounds(run_one)
        rounds = [one.times for one in measured]
        floor = work_floor(
            self.work,
            planned_costs(self.engine.model_config, self.engine.plan),
            self.ceilings,
            max_num_seqs=self.engine.config.scheduler.max_num_seqs,
        )
        per_hour, num_devices = self.arguments.price_per_hour, self.engine.plan.num_ranks
        priced = [] if per_hour is None else price_measures(per_hour, num_devices)
        measures = [*self.job.measures, *priced]
        print_rounds(self.console, measures, rounds, floor.times)
        best = min(measured, key=lambda one: one.times.elapsed_s)
        prices = None if per_hour is None else round_prices(best.times, per_hour, num_devices)
        if prices is not None:
            self.console.print(prices.note)
        result = (
            self.job.result(rounds)
            | ({} if prices is None else prices.as_json())
            | {
                "rounds": [values_json(measures, times) for times in rounds],
                "floor": values_json(self.job.measures, floor.times),
                "ratio": ratios_json(self.job.measures, best.times, floor.times),
                "num_steps": best.num_steps,
                "num_preemptions": best.num_preemptions,
                "utilisation": best.utilisation.as_json(),
            }
        )
        self._show(best.utilisation)
        self._finish(result, run_one, best.num_steps)
        return 0

    def online(self) -> int:
        """Run rounds in which requests arrive as in a trace, and return the exit code."""
        from headway.worker.step_costs import planned_costs
        from headway_lab.bench.floors import timeline_alone
        from headway_lab.bench.offline_report import print_online
        from headway_lab.bench.online_metrics import OnlineMetrics
        from headway_lab.bench.replay import replay

        run_one = functools.partial(replay, self.engine, self.work, temperature=self.job.temperature)
        # To be warm the engine must have seen the batch sizes of the trace, which its beginning has too.
        beginning = self.work[: -(-len(self.work) // 5)]
        replays = self._rounds(
            run_one, functools.partial(replay, self.engine, beginning, temperature=self.job.temperature)
        )
        rounds = [self._priced(OnlineMetrics.of(one.timelines, one.duration_s), one.prompt_share) for one in replays]
        costs = planned_costs(self.engine.model_config, self.engine.plan)
        alone = [timeline_alone(request, costs, self.ceilings) for request in self.work]
        floor = OnlineMetrics.of(alone, max(timeline.token_times_s[-1] for timeline in alone))
        for number, metrics in enumerate(rounds, start=1):
            print_online(self.console, metrics, floor, title=f"round {number}")
        best, best_replay = min(zip(rounds, replays), key=lambda pair: _unevenness(pair[0]))
        self._show(best_replay.utilisation)
        result = best.as_json() | {
            "utilisation": best_replay.utilisation.as_json(),
            "rounds": [metrics.as_json() for metrics in rounds],
            "floor": floor.as_json(),
        }
        self._finish(result, run_one, min(one.num_steps for one in replays))
        num_lost = sum(metrics.num_lost for metrics in rounds)
        if num_lost:
            print(f"headway: error: {num_lost} requests did not get exactly their tokens.", file=sys.stderr)
        return 1 if num_lost else 0

    def _priced(self, metrics: OnlineMetrics, prompt_share: float | None) -> OnlineMetrics:
        """The metrics with prices, if the price of a device is given."""
        per_hour = self.arguments.price_per_hour
        return (
            metrics if per_hour is None else metrics.priced(Pricing(per_hour, self.engine.plan.num_ranks, prompt_share))
        )

    def _rounds(self, run_one: Callable[..., Any], warm_up: Callable[..., Any] | None = None) -> list[Any]:
        """The measured rounds, after those that only warm the engine, where `warm_up` may run instead."""
        num_warmup, num_measured = self.job.num_warmup_rounds, self.job.num_rounds
        with progress_bar(len(self.work) * (num_warmup + num_measured)) as progress:
            for _ in range(num_warmup):
                (warm_up or run_one)(progress=progress)
            return [run_one(progress=progress) for _ in range(num_measured)]

    def _show(self, used: Utilisation) -> None:
        self.console.print(f"device, best round: {used}")

    def _finish(self, result: dict[str, Any], run_one: Callable[..., Any], num_steps: int) -> None:
        """Write the result, then the profile: a profile that fails must not lose the result."""
        if self.arguments.output_json is not None:
            write_json(self.arguments.output_json, result | {"setting": self.setting.as_json()})
        if self.arguments.profile is not None:
            from headway.console.step_profiler import first_step_of

            profile_steps(
                self.engine.step,
                lambda step: run_one(step=step),
                path=self.arguments.profile,
                first_step=first_step_of(num_steps),
                num_steps=self.arguments.profile_steps,
                console=self.console,
            )


def _engine_config(arguments: argparse.Namespace, scenario: Scenario | None) -> EngineConfig:
    """The engine's options: the given ones override the scenario's, and these override those that a shape without
    weights needs."""
    given = chosen(arguments, engine_flags())
    # Every round has the same prompts: with a prefix cache only the first would measure their computation.
    defaults: dict[str, Any] = {"enable_prefix_caching": False, **OFFLINE_OPTIONS}
    if scenario is not None:
        defaults["max_model_len"] = scenario.max_model_len
    return EngineConfig.from_options(**{**defaults, **with_shape_defaults(given)})


def _notes(engine: LLMEngine) -> list[str]:
    """Notes on how this measurement differs from others of its name."""
    notes = []
    highest = highest_token_id(engine.model_config.vocab_size)
    if highest < HIGHEST_TOKEN_ID:
        notes.append(f"prompt ids are drawn from 0 to {highest:,}: the vocabulary has no more")
    if engine.plan.device == "cpu" and "weights" in engine.plan.dtype:
        notes.append("codes can be faster than the float32 matmul of the ceilings: the floor of prompts is no bound")
    return notes


def _unevenness(metrics: OnlineMetrics) -> float:
    """The P99 of the time between tokens, in which the best replay is the lowest."""
    return metrics.itl.percentiles[99]
