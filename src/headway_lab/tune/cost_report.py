"""The report of a search for the cheapest options: a sentence, tables, JSON and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.price import price_text
from headway_lab.charts import Page, bar_chart
from headway_lab.tune.ablation import Gains, all_in_price
from headway_lab.tune.formats import name_of_machine
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_goal import Goal
from headway_lab.tune.tune_report import Table, Verified, name_of, trial_json, verified_table
from headway_lab.tune.tune_search import Trial, Tuned

_SHOWN = (("ttft", 50), ("ttft", 99), ("itl", 50), ("itl", 99), ("tpot", 99))
_TITLES = ["", "requests/s", "tok/s", "price/M in", "price/M out", "all in"]
_LATENCIES = ["P50 TTFT ms", "P99 TTFT ms", "P50 ITL ms", "P99 ITL ms", "P99 TPOT ms"]


@dataclass(frozen=True)
class Searched:
    """One calibration, and what was found on it."""

    name: str
    """The calibration's file, or the name of a shipped one."""
    space: Space
    tuned: Tuned | None
    """`None` if no options keep the promises on it."""
    problem: str = ""

    @property
    def price(self) -> float | None:
        """The lowest price; `None` if there is none."""
        return None if self.tuned is None else all_in_price(self.tuned.best)


@dataclass(frozen=True)
class Answer:
    """The cheapest of all calibrations, and what is said about it."""

    goal: Goal
    each: Sequence[Searched]
    best: Searched
    tuned: Tuned
    """What was found on the best one."""
    gains: Gains | None
    notes: Sequence[str]
    verified: Sequence[Verified] = ()

    @property
    def trial(self) -> Trial:
        """The cheapest options, at their highest load."""
        return self.tuned.best

    @property
    def num_simulated(self) -> int:
        return sum(one.tuned.num_simulated for one in self.each if one.tuned is not None)


def sentence(answer: Answer) -> str:
    """The answer. What it is compared with is the default on the first calibration."""
    trial, first = answer.trial, answer.each[0].tuned
    machine = f"--calibration {answer.best.name} " if len(answer.each) > 1 else ""
    found = f"{price_text(all_in_price(trial))} per million output tokens, all in, at {trial.rate:.3g} requests/s"
    told = f"({answer.num_simulated} simulations)"
    if first is not None and trial is first.default:
        return f"Nothing is clearly cheaper than {machine}the default: {found} {told}."
    default = None if first is None else first.default
    if default is None or default.rate is None:
        beside = "the default keeps the targets at no load"
    else:
        beside = f"{price_text(all_in_price(default))} at {default.rate:.3g} requests/s by default"
    return f"Cheapest: {machine}{name_of(answer.best.space, trial)} · {found}; {beside} {told}."


def cost_table(answer: Answer, *, most: int = 6) -> Table:
    """The default and the cheapest options of each calibration, and what was found on the way on the best one."""
    rows = []
    for one in answer.each:
        machine = f"{name_of_machine(one.space.calibration)}: " if len(answer.each) > 1 else ""
        if one.tuned is None:
            rows.append([f"{machine}{one.problem}", *["–"] * (len(_TITLES) + len(_LATENCIES) - 1)])
            continue
        shown = one.tuned.trials[:most] if one is answer.best else [one.tuned.best]
        shown = list({id(trial): trial for trial in [one.tuned.best, *shown, one.tuned.default]}.values())
        rows += [[f"{machine}{name_of(one.space, trial)}", *_cells(trial)] for trial in shown]
    return [*_TITLES, *_LATENCIES], rows


def cost_json(answer: Answer) -> dict[str, Any]:
    space, trial = answer.best.space, answer.trial
    return {
        "simulated": True,
        "objective": "cost",
        "slo": {objective.key: objective.bound for objective in answer.goal.objectives},
        "targets": str(answer.goal),
        "calibration": answer.best.name,
        "recommended": space.changes(trial.options),
        "is_default": answer.tuned.is_default_best,
        "rate": trial.rate,
        **({} if trial.metrics.prices is None else trial.metrics.prices.as_json()),
        "default": trial_json(answer.tuned.default),
        "trials": [trial_json(one) for one in answer.tuned.trials],
        "gains": [] if answer.gains is None else answer.gains.as_json(),
        "by_calibration": [_searched_json(one) for one in answer.each],
        "notes": list(answer.notes),
        "num_simulated": answer.num_simulated,
        "verified": [
            {
                "options": dict(one.trial.options),
                "rate": one.trial.rate,
                "predicted": one.trial.metrics.as_json(),
                "measured": one.metrics.as_json(),
            }
            for one in answer.verified
        ],
    }


def cost_page(answer: Answer, *, title: str) -> Page:
    """A page with the answer at its top and notes at its end."""
    page = Page(f"The price of tokens for {title}", str(answer.goal))
    page.text(sentence(answer))
    page.chart(
        bar_chart("The lowest price that keeps the targets", y="per 1M output tokens, all in", bars=_bars(answer)),
        "At the highest load that keeps the targets: the price of the devices, divided by the output tokens alone.",
    )
    page.heading("What was found")
    page.table(*cost_table(answer))
    if answer.gains is not None:
        page.heading(answer.gains.title)
        page.table(*answer.gains.table())
    if answer.verified:
        page.heading("Predicted and measured")
        page.table(*verified_table(answer.best.space, answer.verified))
    for note in answer.notes:
        page.text(note)
    return page


def _bars(answer: Answer) -> Mapping[str, float]:
    bars = {}
    for one in answer.each:
        machine = f"{one.name}, " if len(answer.each) > 1 else ""
        if one.tuned is not None:
            for name, trial in (("default", one.tuned.default), ("cheapest", one.tuned.best)):
                if (price := all_in_price(trial)) is not None:
                    bars[f"{machine}{name}"] = price
    return bars


def _searched_json(one: Searched) -> dict[str, Any]:
    tuned = one.tuned
    return {
        "calibration": one.name,
        "formats": name_of_machine(one.space.calibration),
        "price_per_million_output_tokens_all_in": one.price,
        "rate": None if tuned is None else tuned.best.rate,
        "recommended": None if tuned is None else one.space.changes(tuned.best.options),
        "problem": one.problem,
    }


def _cells(trial: Trial) -> list[str]:
    metrics = trial.metrics
    prices = ["–"] * 3 if metrics.prices is None else [*metrics.prices.cells(), price_text(all_in_price(trial))]
    return [
        "none" if trial.rate is None else f"{trial.rate:.2f}",
        f"{metrics.output_tok_s:,.1f}",
        *prices,
        *(metrics.percentile_text(name, percent) for name, percent in _SHOWN),
    ]
