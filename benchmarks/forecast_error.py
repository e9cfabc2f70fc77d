"""How good the forecasts of first tokens are: simulated on a calibrated machine, and on the real engine.

    python benchmarks/forecast_error.py sim --trace azure_conv_first2000.csv --rate 20.6
    python benchmarks/forecast_error.py engine --trace azure_conv_first2000.csv --divide 16 --load 0.9 --requests 200

Each request's forecast is made when it arrives. Its error is |expected - actual| / max(actual, 200 ms), over all
requests of a run. Forecasts do not know how long answers will be: in these runs `max_tokens` is the true length, and it
is not used. `--half` takes only one half of the rows, so that what was tuned on the first is measured on the second.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from headway.config import EngineConfig
from headway.core.forecast.answers import RecentAnswers
from headway.engine.llm_engine import LLMEngine
from headway_lab.bench.forecast_errors import ForecastErrors
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.replay import replay
from headway_lab.bench.timelines import RequestTimeline
from headway_lab.sim.calibration import Calibration
from headway_lab.sim.setup import set_up
from headway_lab.sim.sim_accuracy import at_once
from headway_lab.sim.simulate import simulate
from headway_lab.workload.bench_requests import BenchRequest
from headway_lab.workload.workload_file import load_workload

TEMPERATURE = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("sim", "engine"))
    parser.add_argument("--workload", default="azure", metavar="WORKLOAD", help="whose trace is taken")
    parser.add_argument("--trace", required=True, metavar="CSV", help="arrivals and lengths; its folder has the data")
    parser.add_argument("--calibration", default="h200-llama31-8b", help="of the simulated machine")
    parser.add_argument("--rate", type=float, nargs="+", help="requests per second")
    parser.add_argument("--load", type=float, default=0.9, help="without --rate: part of the measured capacity")
    parser.add_argument("--divide", type=int, default=1, help="lengths by this")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--half", choices=("both", "first", "second"), default="both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the prompts, and of simulated steps")
    parser.add_argument("--scheduling-policy", nargs="+", default=["fcfs"])
    options = parser.parse_args()
    print(f"{'':<34}{'requests':>9}{'TTFT P50/P90/P99, ms':>26}{'median':>8}{'P90':>7}{'bias':>7}{'none':>6}")
    for policy in options.scheduling_policy:
        for seed in options.seeds:
            (_simulate if options.where == "sim" else _replay)(options, policy, seed)


def _work(options: argparse.Namespace, seed: int, rate: float | None, vocab_size: int) -> list[BenchRequest]:
    folder = options.trace.rpartition("/")[0] or "."
    drawn = load_workload(options.workload, data_dir=folder).draw(
        seed=seed, vocab_size=vocab_size, rate=rate, num_requests=options.requests
    )
    middle = len(drawn) // 2
    part = {"both": drawn, "first": drawn[:middle], "second": drawn[middle:]}[options.half]
    divide = options.divide
    return [
        dataclasses.replace(
            request,
            arrival_s=request.arrival_s - part[0].arrival_s,
            prompt_token_ids=request.prompt_token_ids[: max(1, request.num_prompt_tokens // divide)],
            num_output_tokens=max(2, request.num_output_tokens // divide),
        )
        for request in part
    ]


def _simulate(options: argparse.Namespace, policy: str, seed: int) -> None:
    setup = set_up(Calibration.find(options.calibration), {"scheduling_policy": policy})
    for rate in options.rate or [None]:
        work = _work(options, seed, rate, vocab_size=1000)
        done = simulate(work, setup.machine, setup.scheduler, setup.cache, seed=seed, forecasts=True)
        _report(f"{policy}, seed {seed}, {rate or 0:g}/s simulated", done.timelines, done.duration_s)


def _replay(options: argparse.Namespace, policy: str, seed: int) -> None:
    engine = LLMEngine.from_config(EngineConfig.from_options(scheduling_policy=policy))
    engine.warm_up()
    vocab_size = engine.model_config.vocab_size
    rates = options.rate
    if rates is None:
        whole = at_once(_work(options, seed, None, vocab_size))
        done = replay(engine, whole, temperature=TEMPERATURE)
        rates = [options.load * len(whole) / done.duration_s]
    for rate in rates:
        engine.core.scheduler.forecaster.answers = RecentAnswers(knows_limits=False)
        run = replay(engine, _work(options, seed + 1, rate, vocab_size), temperature=TEMPERATURE)
        _report(f"{policy}, seed {seed}, {rate:.3g}/s on the engine", run.timelines, run.duration_s)
    engine.shutdown()


def _report(name: str, timelines: Sequence[RequestTimeline], duration_s: float) -> None:
    errors, metrics = ForecastErrors.of(timelines), OnlineMetrics.of(timelines, duration_s)
    ttft = " / ".join(f"{metrics.ttft.percentiles[percent]:,.0f}" for percent in (50, 90, 99))
    print(
        f"{name:<34}{len(timelines):>9,}{ttft:>26}{errors.percentile(50):>8.1%}{errors.percentile(90):>7.1%}"
        f"{errors.bias:>+7.1%}{errors.num_missing:>6}",
        flush=True,
    )


if __name__ == "__main__":
    main()
