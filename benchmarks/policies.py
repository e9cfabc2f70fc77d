"""What scheduling policies are worth, each on the load that it is made for; fcfs is the peer in the same run.

    ltr     real prompts with the lengths of real answers, arriving faster than they can be served: a learned ranking
            of lengths against order of arrival and against an oracle (sjf with the true lengths)
    slo     half of the requests are interactive, with targets of 0.5 s to the first token and 50 ms between tokens, the
            others have none; at the load where fcfs keeps about 60% of the targets
    fair    a tenant that stays within its share beside one that sends ten times as much; compared with the first one
            alone at its share, that is on a machine of half the speed; or several such tenants (--tenants)

On the real engine, or with `--calibration` in the simulator, which runs the same scheduler:

    python benchmarks/policies.py ltr --model llama31-8b --lengths lengths.jsonl
    python benchmarks/policies.py slo --calibration h200.json --kv-tokens 262144 --trace azure_conv_first2000.csv

The lengths file is made by length_prediction.py. A fifth of its prompts is served, the others train the ranker.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import CacheConfig, EngineConfig
from headway_lab.bench.replay import replay
from headway_lab.bench.timelines import RequestTimeline, percentile
from headway_lab.sim import Calibration, simulate
from headway_lab.workload.bench_requests import BenchRequest

TTFT_S, TPOT_S = 0.5, 0.05
HEAVY = 10
Lengths = Sequence[tuple[Sequence[int], int]]
"""(prompt, tokens of the answer)"""


@dataclass(frozen=True)
class Outcome:
    timelines: Sequence[RequestTimeline]
    duration_s: float

    def of(self, chosen: Sequence[bool]) -> list[RequestTimeline]:
        return [timeline for timeline, is_chosen in zip(self.timelines, chosen, strict=True) if is_chosen]

    @property
    def output_tok_s(self) -> float:
        return sum(len(timeline.token_times_s) for timeline in self.timelines) / self.duration_s

    def tok_s_until(self, end_s: float) -> float:
        """Tokens per second while all tenants send."""
        return sum(time_s <= end_s for timeline in self.timelines for time_s in timeline.token_times_s) / end_s


Run = Callable[..., Outcome]
"""(policy, work, options of the scheduler) → what came of it"""


def make_run(options: argparse.Namespace, *, speed: float = 1.0) -> Run:
    """On the real engine, or in the simulator, there also at another speed."""
    if options.calibration:
        return _simulated(options, speed)
    if speed != 1.0:
        raise SystemExit("Another speed is for the simulator: give --calibration.")
    return _real(options)


def _simulated(options: argparse.Namespace, speed: float) -> Run:
    calibration = Calibration.load(options.calibration).scaled(1 / speed)
    machine = calibration.machine(num_blocks=options.kv_tokens and options.kv_tokens // calibration.block_size)

    def run(policy: str, work: Sequence[BenchRequest], **more: Any) -> Outcome:
        config = calibration.scheduler_settings(max_num_seqs=options.max_num_seqs, scheduling_policy=policy, **more)
        result = simulate(work, machine, config, CacheConfig(enable_prefix_caching=False).resolve("cpu"))
        return Outcome(result.timelines, result.duration_s)

    return run


def _real(options: argparse.Namespace) -> Run:
    from headway.engine.llm_engine import LLMEngine
    from headway.engine.loaded_model import LoadedModel
    from headway.loader.builtin_shapes import BUILTIN_SHAPES

    shape = {"load_format": "dummy", "dtype": "bfloat16"} if options.model in BUILTIN_SHAPES else {}

    config = EngineConfig.from_options(
        model=options.model,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
        **shape,
    )
    model = LoadedModel(LLMEngine.from_config(config))

    def run(policy: str, work: Sequence[BenchRequest], **more: Any) -> Outcome:
        engine = model.reschedule(scheduling_policy=policy, **more)
        work = [_folded(one, engine.model_config.vocab_size) for one in work]
        replay(engine, [dataclasses.replace(one, arrival_s=0.0) for one in work[:32]], temperature=0.0)
        result = replay(engine, work, temperature=0.0)
        return Outcome(result.timelines, result.duration_s)

    return run


def _folded(request: BenchRequest, vocab_size: int) -> BenchRequest:
    """Prompts may be of another model's tokens: only their number counts here."""
    return dataclasses.replace(request, prompt_token_ids=[token % vocab_size for token in request.prompt_token_ids])


def poisson(lengths: Lengths, rate: float, count: int, *, seed: int = 0) -> list[BenchRequest]:
    rng, now_s, work = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        prompt, num_out = lengths[rng.randrange(len(lengths))]
        work.append(BenchRequest(prompt, num_out, arrival_s=now_s))
    return work


def capacity(run: Run, lengths: Lengths, count: int) -> float:
    """Requests per second when all are there at once."""
    work = [dataclasses.replace(one, arrival_s=0.0) for one in poisson(lengths, 1.0, count)]
    return count / run("fcfs", work).duration_s


def rates_of(options: argparse.Namespace, run: Run, lengths: Lengths, *, share: float = 1.0) -> list[float]:
    """Requests per second, as they are given, or as parts of what can be served of a share of it."""
    if options.rates:
        return list(options.rates)
    top = capacity(run, lengths, 512)
    print(f"{top:.1f} requests/s can be served")
    return [load * share * top for load in options.loads]


# ---------------------------------------------------------------------------------------------------------------- ltr


Row = dict[str, Any]


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """For training, and held out: whole conversations, so that no turn of one is learnt from another."""
    names = sorted({conversation(row) for row in rows})
    held_out = set(random.Random(0).sample(names, len(names) // 5))
    return [row for row in rows if conversation(row) not in held_out], [
        row for row in rows if conversation(row) in held_out
    ]


def conversation(row: Row) -> str:
    return str(row["key"]).split("#")[0]


def predict(training: Sequence[Row], held_out: Sequence[Row]) -> list[float]:
    """What a ranker that was trained on some rows says about others."""
    from headway.predict import LearnedRanker, PromptView
    from headway.predict.features import prompt_features
    from headway.predict.traffic_log import TrafficRecord
    from headway_lab.predictor.training import count_pairs, train_ranker

    def view(row: Row) -> PromptView:
        return PromptView(row["prompt_token_ids"], row["max_tokens"], row["temperature"], row["text"])

    records = [
        TrafficRecord(prompt_features(view(row)), row["num_output_tokens"], row["finish_reason"] == "length", None)
        for row in training
    ]
    trained = train_ranker(records)
    predictions = LearnedRanker(trained.model).predict([view(row) for row in held_out])
    pairs = count_pairs(predictions, [row["num_output_tokens"] for row in held_out])
    print(f"trained on {len(training):,} requests: Kendall tau {pairs.kendall_tau:.3f} on {len(held_out):,} held out")
    return list(predictions)


def ltr(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in Path(options.lengths).read_text().splitlines()]
    training, held_out = split(rows)
    if "predicted_tokens" in held_out[0]:
        predictions = [row["predicted_tokens"] for row in held_out]
    else:
        predictions = predict(training, held_out)
    if options.write_predictions:
        rows = [{**row, "predicted_tokens": value} for row, value in zip(held_out, predictions, strict=True)]
        Path(options.write_predictions).write_text("".join(json.dumps(row) + "\n" for row in [*training, *rows]))
        return
    lengths = [(row["prompt_token_ids"], max(row["num_output_tokens"], 1)) for row in held_out]
    predicted = {id(prompt): value for (prompt, _), value in zip(lengths, predictions, strict=True)}
    run = make_run(options)
    rate = options.rates[0] if options.rates else options.load * capacity(run, lengths, min(options.requests, 512))
    work = poisson(lengths, rate, options.requests)
    sides = {
        "fcfs": ("fcfs", work),
        # What ltr does with a predictor of its own; here the predictions come with the requests.
        "ltr": ("sjf", [_with(one, predicted_tokens=predicted[id(one.prompt_token_ids)]) for one in work]),
        "oracle": ("sjf", [_with(one, predicted_tokens=float(one.num_output_tokens)) for one in work]),
    }
    print(
        f"{len(work)} requests at {rate:.1f}/s"
        + ("" if options.rates else f", {options.load:g} times what can be served")
        + f", of {len(lengths)} prompts held out of training"
    )
    print(f"{'':8}{'s/token':>10}{'TTFT mean':>11}{'P99':>8}{'max':>8}{'TPOT P99 ms':>13}{'tok/s':>9}")
    results = {}
    for name, (policy, side) in sides.items():
        outcome = run(policy, side, starvation_stretch=options.starvation_stretch)
        per_token = statistics.fmean(t.e2e_s / len(t.token_times_s) for t in outcome.timelines)
        ttfts = [timeline.ttft_s for timeline in outcome.timelines]
        tpots = [timeline.tpot_s for timeline in outcome.timelines if timeline.tpot_s is not None]
        mean_s = statistics.fmean(timeline.e2e_s for timeline in outcome.timelines)
        results[name] = (per_token, statistics.fmean(ttfts), percentile(tpots, 99), mean_s)
        print(
            f"{name:8}{per_token:>10.4f}{results[name][1]:>11.2f}{percentile(ttfts, 99):>8.2f}{max(ttfts):>8.2f}"
            f"{1e3 * results[name][2]:>13.1f}{outcome.output_tok_s:>9,.0f}",
            flush=True,
        )
    fcfs, learned, oracle = results["fcfs"], results["ltr"], results["oracle"]
    print(
        f"ltr against fcfs: latency per token {fcfs[0] / learned[0]:.2f} times less, TTFT {fcfs[1] / learned[1]:.2f} "
        f"times less, P99 TPOT {learned[2] / fcfs[2]:.2f} times; against the oracle: latency per token "
        f"{learned[0] / oracle[0]:.2f}, TTFT {learned[1] / oracle[1]:.2f}, e2e {learned[3] / oracle[3]:.2f} times"
    )


def _with(request: BenchRequest, **options: Any) -> BenchRequest:
    return dataclasses.replace(request, options=dataclasses.replace(request.options, **options))


# ---------------------------------------------------------------------------------------------------------------- slo


def slo(options: argparse.Namespace) -> None:
    run, lengths = make_run(options), trace_lengths(options.trace)
    rates = rates_of(options, run, lengths)
    print(f"half are interactive: {TTFT_S:g} s to the first token, {TPOT_S:g} s after")
    print(f"{'rate':>6}{'policy':>8}{'kept':>8}{'tok/s':>9}{'others, mean s':>16}{'max s':>8}")
    for rate in rates:
        work = poisson(lengths, rate, options.requests)
        rng = random.Random(1)
        work = [_with(one, ttft_target_s=TTFT_S, tpot_target_s=TPOT_S) if rng.random() < 0.5 else one for one in work]
        is_interactive = [bool(one.options) for one in work]
        for policy in ("fcfs", "slo"):
            outcome = run(policy, work)
            kept = [t.ttft_s <= TTFT_S and (t.tpot_s or 0.0) <= TPOT_S for t in outcome.of(is_interactive)]
            others = [t.e2e_s for t in outcome.of([not one for one in is_interactive])]
            print(
                f"{rate:>6.2f}{policy:>8}{statistics.fmean(kept):>8.1%}{outcome.output_tok_s:>9,.0f}"
                f"{statistics.fmean(others):>16.2f}{max(others):>8.1f}",
                flush=True,
            )


def trace_lengths(path: str) -> Lengths:
    """Prompts of nothing but length."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        rows = [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [(range(min(num_in, 7000)), min(max(num_out, 2), 1000)) for num_in, num_out in rows]


# --------------------------------------------------------------------------------------------------------------- fair


def fair(options: argparse.Namespace) -> None:
    run, lengths = make_run(options), trace_lengths(options.trace)
    share = 1 / (options.tenants + 1)
    rates = rates_of(options, run, lengths, share=share)
    print(f"{options.tenants} of {options.tenants + 1} tenants within their share")
    print(f"{'rate':>8}{'alone s':>9}{'at its share s':>16}{'policy':>8}{'mean s':>8}{'times':>7}{'tok/s':>9}")
    for rate in rates:
        own = [
            _tenant(f"own {i}", poisson(lengths, rate, options.requests, seed=10 * i)) for i in range(options.tenants)
        ]
        heavy = _tenant("heavy", poisson(lengths, HEAVY * rate, HEAVY * options.requests, seed=1))
        work = sorted([*itertools.chain(*own), *heavy], key=lambda one: one.arrival_s)
        first = [one.options.tenant == "own 0" for one in work]
        both_s = min(requests[-1].arrival_s for requests in (*own, heavy))
        alone_s = _mean(run("fcfs", own[0]).timelines)
        share_s = _mean(make_run(options, speed=share)("fcfs", own[0]).timelines) if options.calibration else math.nan
        for policy in ("fcfs", "fair"):
            outcome = run(policy, work)
            mean_s = _mean(outcome.of(first))
            print(
                f"{rate:>8.2f}{alone_s:>9.2f}{share_s:>16.2f}{policy:>8}{mean_s:>8.2f}{mean_s / share_s:>7.2f}"
                f"{outcome.tok_s_until(both_s):>9,.0f}",
                flush=True,
            )


def _tenant(name: str, work: Sequence[BenchRequest]) -> list[BenchRequest]:
    return [_with(one, tenant=name) for one in work]


def _mean(timelines: Sequence[RequestTimeline]) -> float:
    return statistics.fmean(timeline.e2e_s for timeline in timelines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("ltr", "slo", "fair"))
    parser.add_argument("--model", help="a built-in shape, a folder or a file; default: the embedded model")
    parser.add_argument("--calibration", metavar="FILE", help="simulate the machine that this was measured on")
    parser.add_argument(
        "--kv-tokens", type=int, help="of the simulated machine, where it is not to have what was measured"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--load", type=float, default=1.3, help="ltr: arrivals, as a multiple of what can be served")
    parser.add_argument("--starvation-stretch", type=float, default=10.0, help="ltr: of the guard")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.9, 1.0, 1.1], help="slo, fair: likewise, several")
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second (fair: of one tenant), not loads")
    parser.add_argument(
        "--tenants", type=int, default=1, help="fair: so many stay within their share beside a heavy one"
    )
    parser.add_argument("--lengths", metavar="FILE", help="ltr: prompts and lengths of answers")
    parser.add_argument(
        "--write-predictions",
        metavar="FILE",
        help="ltr: only train, and write the rows with predictions, for machines without LightGBM",
    )
    parser.add_argument("--trace", metavar="FILE", help="slo, fair: a CSV file with input_tokens and output_tokens")
    options = parser.parse_args()
    {"ltr": ltr, "slo": slo, "fair": fair}[options.experiment](options)


if __name__ == "__main__":
    main()
