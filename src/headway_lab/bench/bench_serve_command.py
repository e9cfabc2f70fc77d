"""`headway bench serve`: a load on any server with OpenAI's API. Flags, lines and keys are those of vLLM's."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.console.flags import count, number, parse_number
from headway.console.output_files import check_writable, write_json
from headway.errors import ConfigError
from headway.progress import progress_bar
from headway_lab.bench.datasets import Draw, add_dataset_flags, burstiness_of, dataset_of, new_seed, tokenizer_of
from headway_lab.bench.load_flags import (
    add_judging_flags,
    add_server_flags,
    add_warmup_flag,
    backend_of,
    judging_of,
    server_options,
)
from headway_lab.bench.load_target import Outcome
from headway_lab.bench.online_metrics import SHOWN_PERCENTILES
from headway_lab.bench.pricing import add_price_flag
from headway_lab.bench.served import ServedRequest, ServedTimeline, shared_share
from headway_lab.bench.server_target import ServerTarget
from headway_lab.bench.serving_report import TITLES, serving_block
from headway_lab.bench.slo_targets import targets_by_class
from headway_lab.charts.html_page import write_page
from headway_lab.workload.rates import arrival_rate

MAX_SHOWN_ERRORS = 5
MAX_LATE_S = 0.05
"""If requests are sent later than this, the load generator was too slow for the load."""
MAX_CACHED_SHARE = 0.02
"""The largest share of cached prompt tokens, beyond those that a run's requests have in common, that chance
explains."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="The model's name. (default: the server's first)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="Folder or .gguf file, for workloads whose prompts are texts."
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="Of prompts and arrivals. A server that has seen a seed has its prompts in the prefix cache. (default: "
        "another one each time, which is printed)",
    )
    parser.add_argument(
        "--repeats",
        type=count(1),
        default=1,
        metavar="N",
        help="Number of runs, each with the next seed; all are written into one result: 'bench compare' takes "
        "their spread into account. (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=number(), default=0.0, metavar="X", help="(default: 0, greedy)")
    parser.add_argument(
        "--request-rate",
        type=arrival_rate,
        default=math.inf,
        metavar="X",
        help="Requests a second. inf: all at once, or at the workload's own times. (default: inf)",
    )
    add_judging_flags(parser)
    add_price_flag(parser)
    parser.add_argument(
        "--percentile-metrics",
        default=",".join(TITLES),
        metavar="NAMES",
        help="Which latencies are printed. (default: %(default)s)",
    )
    parser.add_argument(
        "--metric-percentiles",
        default=",".join(map(str, SHOWN_PERCENTILES)),
        metavar="NUMBERS",
        help="Which of their percentiles. (default: %(default)s)",
    )
    parser.add_argument("--save-result", action="store_true", help="Write the result as JSON.")
    parser.add_argument("--save-detailed", action="store_true", help="The same, with the times of every request.")
    parser.add_argument("--result-dir", metavar="DIR", help="Where to. (default: here)")
    parser.add_argument(
        "--result-filename", metavar="FILE", help="(default: made from the backend, the rate, the model and the time)"
    )
    parser.add_argument("--html", metavar="FILE", help="Write a report with plots.")
    parser.add_argument("--disable-tqdm", action="store_true", help="Do not show how far it is.")
    add_warmup_flag(parser)
    add_dataset_flags(parser)
    add_server_flags(parser, has_samples=True)


def run(arguments: argparse.Namespace) -> int:
    shown, percents = _shown(arguments.percentile_metrics), _percents(arguments.metric_percentiles)
    dataset = dataset_of(arguments)
    burstiness = burstiness_of(arguments, [arguments.request_rate])
    tokenizer = tokenizer_of(arguments, dataset)
    judging = judging_of(arguments, percents)
    options = server_options(arguments, model=arguments.model, temperature=arguments.temperature)
    saves = arguments.save_result or arguments.save_detailed or arguments.result_filename is not None
    result_file = _result_file(arguments) if saves else None
    if arguments.result_dir is not None and not saves:
        raise ConfigError("--result-dir is where a result is written: add --save-result.")
    if arguments.html is not None and arguments.repeats > 1:
        raise ConfigError("--html is a report on one run; it does not go with --repeats.")
    check_writable(result_file, arguments.html)

    target = ServerTarget(options, judging)
    first_seed = new_seed() if arguments.seed is None else arguments.seed
    results: list[dict[str, Any]] = []
    outcome, notes = None, []
    for place in range(arguments.repeats):
        seed = first_seed + place
        wanted = Draw(arguments.num_prompts, arguments.request_rate, burstiness, seed, tokenizer=tokenizer)
        work = target.draw(dataset, wanted)
        title = f"run {place + 1} of {arguments.repeats}" if arguments.repeats > 1 else ""
        with progress_bar(len(work), title, is_shown=not arguments.disable_tqdm) as progress:
            outcome = target.run(work, progress)
        print(f"{title}, seed {seed}" if title else f"Seed: {seed}")
        print(
            serving_block(
                outcome.metrics,
                rate=arguments.request_rate,
                max_concurrency=options.max_concurrency,
                shown=shown,
                percents=percents,
            )
        )
        prices = outcome.metrics.prices
        notes = [*outcome_notes(outcome, ignore_eos=options.ignore_eos), *cache_notes(outcome, work)]
        notes += [] if prices is None else [prices.note]
        if used := str(outcome.utilisation):
            print(f"Device: {used}")
        for note in notes:
            print(f"note: {note}")
        _print_errors(outcome.errors)
        results.append(_result(arguments, target, outcome, notes) | {"seed": seed, "burstiness": burstiness})
    assert outcome is not None
    if saves:
        path = _result_file(arguments, target.facts.model)
        write_json(path, results[0] if len(results) == 1 else together(results))
        print(f"Wrote {path}", file=sys.stderr)
    if arguments.html is not None:
        from headway_lab.bench.serving_report import online_page

        page = online_page(
            f"Load on {target.name}",
            metrics=outcome.metrics,
            timelines=outcome.timelines,
            samples=outcome.samples,
            notes=[*notes, *(f"{number} × {error}" for error, number in _counted(outcome.errors))],
            targets=targets_by_class(judging.targets, [request.options for request in work]),
        )
        write_page(arguments, page, seed=first_seed, machine=target.machine)
    return 1 if any(result["error_counts"] for result in results) else 0


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one result: the means of their numbers, and the runs themselves under `runs`."""
    whole = dict(results[0])
    for key in whole:
        values = [result[key] for result in results]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            whole[key] = statistics.fmean(values)
    return whole | {"seed": results[0]["seed"], "runs": list(results)}


def cache_notes(outcome: Outcome, work: Sequence[ServedRequest]) -> list[str]:
    """Notes on whether the server had more of the prompts cached than they have in common."""
    share = outcome.metrics.cached_share
    if share is None or share <= shared_share(work) + MAX_CACHED_SHARE:
        return []
    return [
        f"{share:.0%} of the prompt tokens came from the server's prefix cache, which had seen them before this run: "
        "prompts were cheaper than new ones are. A seed that this server has had before does that (give another, or "
        "none), a file of prompts sent twice, and the beginning of a chat template"
    ]


def outcome_notes(outcome: Outcome, *, ignore_eos: bool) -> list[str]:
    """Warnings for results whose numbers mean something other than a reader would expect."""
    notes = []
    if outcome.metrics.tokens_per_event > 1.01:
        notes.append(
            f"an event carried {outcome.metrics.tokens_per_event:.2f} tokens on average: ITL is between events, TPOT "
            "counts tokens"
        )
    if ignore_eos and outcome.num_short:
        notes.append(f"{outcome.num_short} answers have another number of tokens than asked for")
    if outcome.late_s > MAX_LATE_S and any(timeline.arrival_s for timeline in outcome.timelines):
        notes.append(
            f"requests went out up to {1000 * outcome.late_s:.0f} ms late (P99): this program was too slow for the "
            "load, and latencies have that in them"
        )
    return notes


def _print_errors(errors: Sequence[str]) -> None:
    if not errors:
        return
    counted = _counted(errors)
    print(f"\n{len(errors)} request{'s' if len(errors) != 1 else ''} failed:", file=sys.stderr)
    for error, times in counted[:MAX_SHOWN_ERRORS]:
        print(f"  {times} × {error}", file=sys.stderr)
    if len(counted) > MAX_SHOWN_ERRORS:
        print(f"  and {len(counted) - MAX_SHOWN_ERRORS} other kinds", file=sys.stderr)


def _counted(errors: Sequence[str]) -> list[tuple[str, int]]:
    """The errors with their counts, the most frequent first."""
    return Counter(errors).most_common()


def _result(
    arguments: argparse.Namespace, target: ServerTarget, outcome: Outcome, notes: Sequence[str]
) -> dict[str, Any]:
    rate = arguments.request_rate
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": backend_of(arguments),
        "base_url": target.options.base_url,
        "model_id": target.facts.model,
        "num_prompts": len(outcome.timelines),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "max_concurrency": target.options.max_concurrency,
        **outcome.metrics.as_json(),
        "num_preemptions": None,  # no server reports it
        "num_short": outcome.num_short,
        "utilisation": outcome.utilisation.as_json(),
        "p99_late_ms": 1000 * outcome.late_s,
        "notes": list(notes),
        "error_counts": dict(_counted(outcome.errors)),
    }
    return result | _detailed(outcome) if arguments.save_detailed else result


def _detailed(outcome: Outcome) -> dict[str, Any]:
    """vLLM's lists, in the order of the requests; failed requests have no times."""
    timelines = [timeline for timeline in outcome.timelines if isinstance(timeline, ServedTimeline)]
    return {
        "input_lens": [timeline.num_prompt_tokens for timeline in timelines],
        "output_lens": [timeline.num_output_tokens for timeline in timelines],
        "start_times": [timeline.arrival_s for timeline in timelines],
        "ttfts": [timeline.ttft_s if timeline.is_complete else None for timeline in timelines],
        "itls": [timeline.itls_s for timeline in timelines],
        "errors": [timeline.error or "" for timeline in timelines],
    }


def _result_file(arguments: argparse.Namespace, model: str = "") -> Path:
    name = arguments.result_filename
    if name is None:
        rate = "inf" if math.isinf(arguments.request_rate) else f"{arguments.request_rate:g}"
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = f"{backend_of(arguments)}-{rate}qps-{Path(model).name}-{now}.json"
    return Path(arguments.result_dir or ".") / name


def _shown(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in TITLES:
            raise ConfigError(f"--percentile-metrics takes some of {', '.join(TITLES)}, not '{name}'.")
    return names


def _percents(text: str) -> list[float]:
    try:
        percents = [parse_number(part) for part in text.split(",")]
    except ValueError:
        percents = [math.nan]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100 such as 50,99, not '{text}'.")
    return percents
