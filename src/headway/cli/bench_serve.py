"""`headway bench serve`: a load on any server with OpenAI's API. Flags, lines and keys are those of vLLM's."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headway.bench.online_metrics import SHOWN_PERCENTILES
from headway.bench.served import ServedTimeline
from headway.bench.server_target import ServerTarget
from headway.bench.serving_block import TITLES, serving_block
from headway.bench.slo import targets_by_class
from headway.bench.targets import Outcome
from headway.cli.bench_files import check_writable, progress_bar, write_json, write_page
from headway.cli.bench_target_flags import add_server_flags, server_options
from headway.cli.bench_work import add_judging_flags, add_work_flags, dataset_of, draw_of, judging_of, rate_flag
from headway.errors import ConfigError

MAX_SHOWN_ERRORS = 5
MAX_LATE_S = 0.05
"""If requests go out later than this, the load generator was too slow for the load."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="NAME", help="The model's name. (default: the server's first)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="Folder or .gguf file, for workloads whose prompts are texts."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of prompts and arrivals. (default: 0)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="(default: 0, greedy)")
    parser.add_argument(
        "--request-rate",
        type=rate_flag,
        default=math.inf,
        metavar="X",
        help="Requests a second. inf: all at once, or at the workload's own times. (default: inf)",
    )
    add_judging_flags(parser)
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
    parser.add_argument("--result-dir", default=".", metavar="DIR", help="Where to. (default: here)")
    parser.add_argument(
        "--result-filename", metavar="FILE", help="(default: made from the backend, the rate, the model and the time)"
    )
    parser.add_argument("--html", metavar="FILE", help="Write a report with plots.")
    parser.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    add_work_flags(parser)
    add_server_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    shown, percents = _shown(arguments.percentile_metrics), _percents(arguments.metric_percentiles)
    dataset = dataset_of(arguments)
    judging = judging_of(arguments, percents)
    options = server_options(arguments, model=arguments.model, temperature=arguments.temperature)
    saves = arguments.save_result or arguments.save_detailed or arguments.result_filename is not None
    result_file = _result_file(arguments) if saves and arguments.result_filename else None
    check_writable(result_file, arguments.html)

    target = ServerTarget(options, judging)
    work = target.draw(dataset, draw_of(arguments, rate=arguments.request_rate, seed=arguments.seed))
    with progress_bar(len(work), is_shown=not arguments.disable_tqdm) as progress:
        outcome = target.run(work, progress)
    print(
        serving_block(
            outcome.metrics,
            rate=arguments.request_rate,
            max_concurrency=arguments.max_concurrency,
            shown=shown,
            percents=percents,
        )
    )
    notes = outcome_notes(outcome, ignore_eos=arguments.ignore_eos)
    for note in notes:
        print(f"note: {note}")
    _print_errors(outcome.errors)
    if saves:
        path = result_file or _result_file(arguments, target.facts.model)
        write_json(path, _result(arguments, target, outcome, notes))
        print(f"Wrote {path}", file=sys.stderr)
    if arguments.html is not None:
        from headway.bench.online_page import online_page

        page = online_page(
            f"Load on {target.name}",
            metrics=outcome.metrics,
            timelines=outcome.timelines,
            samples=outcome.samples,
            notes=[*notes, *(f"{number} × {error}" for error, number in _counted(outcome.errors))],
            targets=targets_by_class(judging.targets, [request.options for request in work]),
        )
        write_page(arguments, page, seed=arguments.seed, machine=target.machine)
    return 1 if outcome.errors else 0


def outcome_notes(outcome: Outcome, *, ignore_eos: bool) -> list[str]:
    """What makes the numbers mean something else than a reader would think."""
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
    for error, number in counted[:MAX_SHOWN_ERRORS]:
        print(f"  {number} × {error}", file=sys.stderr)
    if len(counted) > MAX_SHOWN_ERRORS:
        print(f"  and {len(counted) - MAX_SHOWN_ERRORS} other kinds", file=sys.stderr)


def _counted(errors: Sequence[str]) -> list[tuple[str, int]]:
    """The most frequent first."""
    return Counter(errors).most_common()


def _result(
    arguments: argparse.Namespace, target: ServerTarget, outcome: Outcome, notes: Sequence[str]
) -> dict[str, Any]:
    rate = arguments.request_rate
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": arguments.backend,
        "base_url": target.options.base_url,
        "model_id": target.facts.model,
        "num_prompts": len(outcome.timelines),
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **outcome.metrics.as_json(),
        "num_preemptions": None,  # nobody tells
        "num_short": outcome.num_short,
        "p99_late_ms": 1000 * outcome.late_s,
        "notes": list(notes),
        "error_counts": dict(_counted(outcome.errors)),
    }
    return result | _detailed(outcome) if arguments.save_detailed else result


def _detailed(outcome: Outcome) -> dict[str, Any]:
    """vLLM's lists, in the order of the requests; what failed has no times."""
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
        name = f"{arguments.backend}-{rate}qps-{Path(model).name}-{now}.json"
    return Path(arguments.result_dir) / name


def _shown(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in TITLES:
            raise ConfigError(f"--percentile-metrics takes some of {', '.join(TITLES)}, not '{name}'.")
    return names


def _percents(text: str) -> list[float]:
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError:
        percents = [math.nan]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"--metric-percentiles takes numbers from 0 to 100 such as 50,99, not '{text}'.")
    return percents
