"""The report of a search: measures the best candidates on the real engine, and makes tables, JSON and a page."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.config import EngineConfig
from headway.engine.llm_engine import LLMEngine
from headway.front.roles import TOGETHER
from headway.price import price_text
from headway_lab.bench.online_metrics import OnlineMetrics
from headway_lab.bench.pricing import Pricing, price_cells, price_titles
from headway_lab.bench.replay import replay
from headway_lab.charts import Page, Series, line_chart
from headway_lab.sim.sim_accuracy import apart, at_once, percent_text
from headway_lab.sim.sim_comparison import BEYOND
from headway_lab.tune.ablation import Gains
from headway_lab.tune.flags_text import flags_text
from headway_lab.tune.tune_goal import Goal, Score
from headway_lab.tune.tune_search import Fleet, Sized, Space, Trial, Tuned
from headway_lab.workload.bench_requests import BenchRequest

_WARM_UP_REQUESTS = 32

Load = Callable[[EngineConfig], LLMEngine]

Table = tuple[list[str], list[list[str]]]

_SHOWN = (("ttft", 50), ("ttft", 99), ("itl", 50), ("itl", 99), ("tpot", 99))
_LATENCIES = ["P50 TTFT ms", "P99 TTFT ms", "P50 ITL ms", "P99 ITL ms", "P99 TPOT ms"]
TITLES = ["", "goodput/s", "good", "requests/s", "tok/s", *_LATENCIES]


@dataclass(frozen=True)
class Verified:
    """A trial that was also measured."""

    trial: Trial
    metrics: OnlineMetrics
    score: Score


def candidates(tuned: Tuned, num_best: int) -> list[Trial]:
    """The default, and the best few trials that are better than it and behave differently from each other."""
    better = [trial for trial in tuned.distinct if trial.score.is_better_than(tuned.default.score)]
    return [tuned.default, *better[:num_best]]


def verify(
    trial: Trial,
    work: Sequence[BenchRequest],
    goal: Goal,
    *,
    options: Mapping[str, Any],
    load: Load,
    temperature: float,
) -> Verified:
    """Measure a trial on an engine with `options` and the trial's own options over them."""
    engine = load(EngineConfig.from_options(**{**options, **trial.options}))
    num_devices = engine.plan.num_ranks
    try:
        # To be warm the engine must have seen steps of all sizes.
        beginning = at_once([r for r in work if r.after is None][:_WARM_UP_REQUESTS])
        replay(engine, apart(beginning, "warm-up"), temperature=temperature)
        result = replay(engine, work, temperature=temperature)
    finally:
        engine.shutdown()
        del engine
        _free()
    metrics = OnlineMetrics.of(result.timelines, result.duration_s)
    if trial.metrics.prices is not None:
        per_hour = trial.metrics.prices.pricing.per_hour
        metrics = metrics.priced(Pricing(per_hour, num_devices, result.prompt_share))
    return Verified(trial, metrics, goal.score(result.timelines, metrics))


def recommended(verified: Sequence[Verified]) -> Trial:
    """The measured trial that is best on the engine; the default, which comes first, unless another one is clearly
    better."""
    default, *others = verified
    best = default
    for one in others:
        if one.score.is_better_than(best.score):
            best = one
    return best.trial


def _free() -> None:
    """Free the engine's memory on the device before the next engine measures how much there is."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def name_of(space: Space, trial: Trial) -> str:
    """The options that distinguish a trial from others."""
    return flags_text(space.changes(trial.options)) or "default"


def trial_table(space: Space, tuned: Tuned, *, most: int = 8) -> Table:
    """The best trials and the default; latencies in milliseconds."""
    shown = tuned.distinct[:most]
    if tuned.default not in shown:
        shown.append(tuned.default)
    rows = [[name_of(space, trial), *_cells(trial.score, trial.metrics)] for trial in shown]
    return with_prices((TITLES, rows), [trial.metrics for trial in shown])


def with_prices(table: Table, metrics: Sequence[OnlineMetrics]) -> Table:
    """The table with columns of prices, if there are any. Its rows have these metrics."""
    titles, rows = table
    prices = [each.prices for each in metrics]
    priced = [[*row, *price_cells(prices, place)] for place, row in enumerate(rows)]
    return [*titles, *price_titles(prices)], priced


def verified_table(space: Space, verified: Sequence[Verified]) -> Table:
    """Predicted values with the measured ones below them."""
    rows, metrics = [], []
    for one in verified:
        rows.append([f"{name_of(space, one.trial)}: predicted", *_cells(one.trial.score, one.trial.metrics)])
        rows.append(["    measured", *_cells(one.score, one.metrics)])
        metrics += [one.trial.metrics, one.metrics]
    titles, priced = with_prices((TITLES, rows), metrics)
    table = []
    for place, one in enumerate(verified):
        errors = ["    error", *_errors(one)]
        table += [*priced[2 * place : 2 * place + 2], [*errors, *[""] * (len(titles) - len(errors))]]
    return titles, table


def tuned_json(
    space: Space, goal: Goal, tuned: Tuned, verified: Sequence[Verified], best: Trial, *, gains: Gains | None = None
) -> dict[str, Any]:
    return {
        "simulated": True,
        "slo": {objective.key: objective.bound for objective in goal.objectives},
        "targets": str(goal),
        "recommended": space.changes(best.options),
        "is_default": best is tuned.default,
        "gains": [] if gains is None else gains.as_json(),
        "default": trial_json(tuned.default),
        "trials": [trial_json(trial) for trial in tuned.trials],
        "pareto_front": [dict(trial.options) for trial in tuned.front],
        "num_simulated": tuned.num_simulated,
        "verified": [
            {
                "options": dict(one.trial.options),
                "predicted": one.trial.metrics.as_json(),
                "predicted_goodput": one.trial.score.goodput,
                "measured": one.metrics.as_json(),
                "measured_goodput": one.score.goodput,
            }
            for one in verified
        ],
    }


def tuned_page(
    space: Space,
    goal: Goal,
    tuned: Tuned,
    verified: Sequence[Verified],
    best: Trial,
    *,
    title: str,
    gains: Gains | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str],
) -> Page:
    """A page with the Pareto front; `warnings` are at its top, `notes` at its end."""
    page = Page(f"Tuning for {title}", str(goal))
    for text in (recommendation(space, tuned, best, verified), *warnings):
        page.text(text)
    front = _series("Pareto front", tuned.front, space, _itl_p99, kind="step")
    page.chart(
        line_chart(
            "Throughput against the tail",
            x="P99 of the time between tokens (ms)",
            y="output tokens/s",
            series=[*_clouds(space, tuned, best, _itl_p99, lambda t: t.metrics.output_tok_s), front],
            log_x=True,
            x_lines=_bounds(goal, "p99_itl_ms"),
        ),
        "Every point is a simulation of the whole work. On the front, more throughput costs a longer tail.",
    )
    for key in dict.fromkeys([o.key for o in goal.objectives if o.key != "p99_itl_ms"]):
        page.chart(_goodput_chart(space, goal, tuned, best, key))
    if goal.targets is not None:
        page.chart(
            line_chart(
                "Goodput against the tail",
                x="P99 of the requests' largest latency, as a multiple of its target",
                y="good requests/s",
                series=_clouds(space, tuned, best, lambda t: t.score.tail, lambda t: t.score.goodput),
                log_x=True,
                x_lines={"targets": 1.0},
            )
        )
    page.heading("The best and the default, predicted")
    page.table(*trial_table(space, tuned))
    if gains is not None:
        page.heading(gains.title)
        page.table(*gains.table())
    if verified:
        page.heading("Predicted and measured")
        page.table(*verified_table(space, verified))
    for note in notes:
        page.text(note)
    return page


def recommendation(space: Space, tuned: Tuned, best: Trial, verified: Sequence[Verified] = ()) -> str:
    """The recommendation as a sentence, with what was measured, if anything was."""
    if best is tuned.default:
        return f"Nothing is clearly better than the default: keep it ({tuned.num_simulated} simulations)."
    found = [f"predicted {_gain(best.score, tuned.default.score)}"]
    scores = {id(one.trial): one.score for one in verified}
    if id(best) in scores:
        found.append(f"measured {_gain(scores[id(best)], scores[id(tuned.default)])}")
    flags = flags_text(space.changes(best.options))
    return f"Recommended: {flags} · {'; '.join(found)} ({tuned.num_simulated} simulations)."


def fleet_table(fleet: Fleet) -> Table:
    """A row for every number of replicas that was tried, with the best options found for it."""
    rows = [
        [
            sized_flags(one),
            ("beyond capacity" if one.overload is not None else "kept") if one.trial.score.is_kept else "missed",
            *_cells(one.trial.score, one.trial.metrics),
        ]
        for one in fleet.tried
    ]
    return with_prices((["", "targets", *TITLES[1:]], rows), [one.trial.metrics for one in fleet.tried])


def sized_flags(sized: Sized) -> str:
    """The flags to give: the number of replicas, ranks if there are several, the router if there is more than one
    replica, and changed options."""
    changes = sized.space.changes(sized.trial.options)
    router = {"router": sized.trial.options["router"]} if sized.num_replicas > 1 else {}
    num_ranks = sized.space.calibration.tensor_parallel_size
    ranks = {"tensor_parallel_size": num_ranks} if num_ranks > 1 else {}
    return flags_text({"replicas": sized.num_replicas, **ranks, **router, **changes})


def fleet_recommendation(goal: Goal, fleet: Fleet) -> list[str]:
    """The number of replicas that is enough, and what the next smaller number misses."""
    told = f"({fleet.num_simulated} simulations)."
    lines = []
    if fleet.enough is None:
        lines.append(f"No number of replicas that was given keeps the targets {told}")
    else:
        lines.append(f"Recommended: {sized_flags(fleet.enough)} · the fewest that keep the targets {told}")
        prices = fleet.enough.trial.metrics.prices
        if prices is not None:
            lines.append(f"{price_text(prices.tokens.all_in)} per million output tokens, all in. {prices.note}")
    fewer = fleet.too_few
    if fewer is None:
        lines.append("That is the smallest number that was given.")
    else:
        missed = goal.missed_by(fewer.trial.score, fewer.trial.metrics) or "keeps the targets, but not for long"
        good = f"{fewer.trial.score.good_share:.1%} of requests are good"
        lines.append(f"Not enough, at their best: {sized_flags(fewer)} · {missed}; {good}.")
        if fewer.overload is not None:
            lines.append(f"Beyond capacity with {fewer.num_replicas}: {fewer.overload}. {BEYOND}")
    return lines


def fleet_json(goal: Goal, fleet: Fleet, *, gains: Gains | None = None) -> dict[str, Any]:
    enough = fleet.enough
    return {
        "simulated": True,
        "slo": {objective.key: objective.bound for objective in goal.objectives},
        "targets": str(goal),
        "replicas": None if enough is None else enough.num_replicas,
        "tensor_parallel_size": fleet.tried[0].space.calibration.tensor_parallel_size,
        "router": None if enough is None else enough.trial.options.get("router"),
        "roles": None if enough is None else enough.trial.options.get("roles", TOGETHER),
        "recommended": {} if enough is None else enough.space.changes(enough.trial.options),
        "gains": [] if gains is None else gains.as_json(),
        "tried": [
            {
                "replicas": one.num_replicas,
                "is_enough": one.is_enough,
                "beyond_capacity": one.overload is not None,
                "missed": goal.missed_by(one.trial.score, one.trial.metrics),
                **trial_json(one.trial),
            }
            for one in fleet.tried
        ],
        "num_simulated": fleet.num_simulated,
    }


def fleet_page(goal: Goal, fleet: Fleet, *, title: str, gains: Gains | None = None, notes: Sequence[str]) -> Page:
    """A page with `notes` at its end."""
    page = Page(f"Replicas for {title}", str(goal))
    for text in fleet_recommendation(goal, fleet):
        page.text(text)
    numbers = [float(one.num_replicas) for one in fleet.tried]
    tails = [one.trial.score.tail for one in fleet.tried]
    page.chart(
        line_chart(
            "The tail by the number of replicas",
            x="replicas",
            y="the largest promised latency, as a multiple of its bound",
            series=[Series("at their best", numbers, tails, kind="points")],
            log_y=True,
            lines={"targets": 1.0},
        )
    )
    page.table(*fleet_table(fleet))
    if gains is not None:
        page.heading(gains.title)
        page.table(*gains.table())
    for note in notes:
        page.text(note)
    return page


def _gain(score: Score, default: Score) -> str:
    times = score.goodput / default.goodput if default.goodput else float("inf")
    return (
        f"goodput {score.goodput:.3g}/s against {default.goodput:.3g}/s by default ({times:.2f} times), "
        f"tail {score.tail:.3g} against {default.tail:.3g}"
    )


Value = Callable[[Trial], float]


def _itl_p99(trial: Trial) -> float:
    return trial.metrics.itl.percentiles[99]


def _bounds(goal: Goal, key: str) -> dict[str, float]:
    return {str(objective): objective.bound for objective in goal.objectives if objective.key == key}


def _goodput_chart(space: Space, goal: Goal, tuned: Tuned, best: Trial, key: str) -> str:
    """A chart of goodput against another promised key."""

    def value(trial: Trial) -> float:
        found = trial.metrics.as_json().get(key)
        return math.nan if found is None else found

    return line_chart(
        f"Goodput against {key}",
        x="milliseconds",
        y="good requests/s",
        series=_clouds(space, tuned, best, value, lambda t: t.score.goodput),
        log_x=True,
        x_lines=_bounds(goal, key),
    )


def _clouds(space: Space, tuned: Tuned, best: Trial, x: Value, y: Value) -> list[Series]:
    """The points of all trials, with the important ones on top."""
    shown = [_series("tried", tuned.trials, space, x, y), _series("default", [tuned.default], space, x, y, named=True)]
    if best is not tuned.default:
        shown.append(_series("recommended", [best], space, x, y, named=True))
    return shown


def _series(
    name: str,
    trials: Sequence[Trial],
    space: Space,
    x: Value,
    y: Value = lambda trial: trial.metrics.output_tok_s,
    kind: Any = "points",
    *,
    named: bool = False,
) -> Series:
    ordered = sorted(trials, key=x)
    labels = [name_of(space, trial) for trial in ordered] if named else ()
    return Series(name, [x(trial) for trial in ordered], [y(trial) for trial in ordered], kind=kind, labels=labels)


def _numbers(score: Score, metrics: OnlineMetrics) -> list[float]:
    return [
        score.goodput,
        100 * score.good_share,
        metrics.requests_s,
        metrics.output_tok_s,
        *(metrics.latencies[name].percentiles[percent] for name, percent in _SHOWN),
    ]


def _price_numbers(metrics: OnlineMetrics) -> list[float]:
    """The prices in the order of their columns; empty if there are none."""
    if metrics.prices is None:
        return []
    tokens = metrics.prices.tokens
    return [tokens.input or 0.0, tokens.output or 0.0]


def _cells(score: Score, metrics: OnlineMetrics) -> list[str]:
    goodput, share, requests_s, tok_s, *_ = _numbers(score, metrics)
    return [
        f"{goodput:.3f}",
        f"{share:.1f}%",
        f"{requests_s:.3f}",
        f"{tok_s:,.1f}",
        *(metrics.percentile_text(name, percent) for name, percent in _SHOWN),
    ]


def _errors(one: Verified) -> list[str]:
    predicted = [*_numbers(one.trial.score, one.trial.metrics), *_price_numbers(one.trial.metrics)]
    measured = [*_numbers(one.score, one.metrics), *_price_numbers(one.metrics)]
    return [percent_text(p / m - 1.0) if m else "" for p, m in zip(predicted, measured, strict=True)]


def trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "options": dict(trial.options),
        "goodput": trial.score.goodput,
        "good_share": trial.score.good_share,
        "tail": trial.score.tail,
        **({} if trial.rate is None else {"rate": trial.rate}),
        "predicted": trial.metrics.as_json(),
    }
