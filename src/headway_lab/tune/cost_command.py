"""`headway tune --objective cost`: the options with which a machine does the work at the lowest price per token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.console.output_files import print_table, write_json
from headway.errors import ConfigError
from headway.progress import Meter, meter
from headway_lab.tune.ablation import COST, Gains, Without, gains_of
from headway_lab.tune.asked import Asked
from headway_lab.tune.cost_report import Answer, Searched, cost_json, cost_page, cost_table, sentence
from headway_lab.tune.cost_search import CostSearch, Load
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_report import Verified, verified_table
from headway_lab.tune.tune_search import Trial

Verify = Callable[[Load, Searched], Sequence[Verified]]
"""Measures the best trials of a search on the engine, if that is asked for."""


def run_cost(asked: Asked, load: Load, verify: Verify) -> int:
    """Search on each machine, and show the cheapest."""
    arguments = asked.arguments
    spaces, num_trials = [asked.space(machine) for machine in asked.machines], asked.limits.num_trials
    searches: list[CostSearch] = []
    each: list[Searched] = []
    with meter(num_trials * len(spaces), "Searching") as shown:
        for machine, space in zip(asked.machines, spaces, strict=True):
            before = num_trials * len(each)
            searches.append(CostSearch(space, asked.goal, load, asked.limits, functools.partial(_show, shown, before)))
            each.append(_searched(machine.name, space, searches[-1]))
    found = [one for one in each if one.price is not None]
    if not found:
        raise ConfigError(each[0].problem)
    best = min(found, key=lambda one: one.price or 0.0)
    assert best.tuned is not None
    gains = _gains(each, searches, best)
    verified = verify(load, best)
    answer = Answer(asked.goal, each, best, best.tuned, gains, _notes(asked, best), verified)
    print(f"{asked.goal}\n")
    print_table(*cost_table(answer))
    if gains is not None:
        print(f"\n{gains.title}:")
        print_table(*gains.table())
    if verified:
        print("\nPredicted and measured:")
        print_table(*verified_table(best.space, verified))
    print("\n" + "\n".join([sentence(answer), *answer.notes]))
    if arguments.output_json is not None:
        write_json(arguments.output_json, cost_json(answer))
    if arguments.html is not None:
        asked.write_page(cost_page(answer, title=asked.title), best.space.calibration)
    return 0


def _show(shown: Meter, before: int, num_simulated: int) -> None:
    shown.at(before + num_simulated)


def _searched(name: str, space: Space, search: CostSearch) -> Searched:
    """Search on one machine. With several, one that cannot keep the promises leaves the choice to the others."""
    try:
        return Searched(name, space, search.run())
    except ConfigError as error:
        return Searched(name, space, None, str(error))


def _gains(each: Sequence[Searched], searches: Sequence[CostSearch], best: Searched) -> Gains | None:
    """What each flag of the answer gains. The choice of a calibration is one of them: it is compared with the first."""
    place = next(place for place, one in enumerate(each) if one is best)
    assert best.tuned is not None
    trial = best.tuned.best
    more = []
    if place:
        first = each[0]
        on_first = _on_first(first, searches[0], trial)
        more.append(
            Without(
                "calibration",
                f"--calibration {best.name}",
                first.name,
                on_first,
                "" if on_first else "misses the targets at any load",
            )
        )
    with meter(len(best.space.changes(trial.options)), "What each flag gains", unit="flags") as shown:

        def highest(options: Mapping[str, Any]) -> Trial | None:
            found = searches[place].highest(options)
            shown.advance()
            return found

        return gains_of(best.space, trial, highest, COST, more=more)


def _on_first(first: Searched, search: CostSearch, trial: Trial) -> Trial | None:
    """The answer's options on the first calibration, with its own values of options that only the other one has."""
    options = {name: trial.options.get(name, default) for name, default in first.space.default.items()}
    return search.highest(options) if first.space.is_valid(options) else None


def _notes(asked: Asked, best: Searched) -> list[str]:
    assert best.tuned is not None
    prices = best.tuned.best.metrics.prices
    return [
        *([] if prices is None else [prices.note]),
        "The load is the highest that keeps the targets and is not beyond capacity, to 1%. At a lower load the same "
        "devices cost more for each token; with --replicas the command finds how many a given load needs.",
        f"The price is that of a run of {len(asked.work):,} requests, at whose end the batch empties. More --requests "
        "come closer to the lower price of a steady load.",
        *asked.notes(best.space),
    ]
