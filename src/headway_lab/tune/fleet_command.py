"""`headway tune --replicas`: how many replicas keep the promises at this load, and which are the cheapest."""

from __future__ import annotations

from functools import partial

from headway.console.output_files import print_table, write_json
from headway.errors import ConfigError
from headway.front.router import ROUTERS
from headway.progress import meter
from headway_lab.tune.ablation import PROMISES, Gains, gains_of
from headway_lab.tune.asked import Asked, Machine
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_report import fleet_json, fleet_page, fleet_recommendation, fleet_table
from headway_lab.tune.tune_search import Fleet, cheapest, fewest, fewest_devices, most_trials, simulate_trial

_ALL = "all"


def run_fleet(asked: Asked) -> int:
    """Find how many replicas are enough, instead of the best options of one."""
    arguments, goal = asked.arguments, asked.goal
    if goal.is_empty:
        raise ConfigError(
            "--replicas: how many are enough depends on what is promised. Give --slo, e.g. p99_ttft_ms=1000, or a "
            "workload whose classes have targets."
        )
    found = [_fewest(asked, machine) for machine in asked.machines]
    fleets = [fleet for fleet, _ in found]
    print(f"{goal}\n")
    for fleet in fleets:
        print_table(*fleet_table(fleet))
        print()
    is_by_price = arguments.objective == "cost"
    best = cheapest(fleets) if is_by_price else fewest_devices(fleets)
    gains = _gains(asked, fleets[best])
    if gains is not None:
        print(f"{gains.title}:")
        print_table(*gains.table())
        print()
    others = [line for place, fleet in enumerate(fleets) if place != best for line in fleet_recommendation(goal, fleet)]
    lines = fleet_recommendation(goal, fleets[best])
    if others:
        first = "Cheapest" if is_by_price else "With the fewest devices"
        lines = [f"{first}: {lines[0]}", *lines[1:], *(f"Otherwise: {line}" for line in others)]
    notes = asked.notes(found[best][1])
    print("\n".join([*lines, *notes]))
    if arguments.output_json is not None:
        told = [fleet_json(goal, fleet, gains=gains if fleet is fleets[best] else None) for fleet in fleets]
        write_json(
            arguments.output_json,
            told[0] if len(told) == 1 else {"simulated": True, "recommended": told[best], "by_ranks": told},
        )
    if arguments.html is not None:
        shown = [*lines, *notes] if others else notes
        page = fleet_page(goal, fleets[best], title=asked.title, gains=gains, notes=shown)
        asked.write_page(page, asked.machines[best].calibration)
    return 0


def _fewest(asked: Asked, machine: Machine) -> tuple[Fleet, Space]:
    """Find the fewest machines of this calibration."""
    arguments = asked.arguments
    # The first of them is the default.
    routers = list(ROUTERS)[::-1] if arguments.router == _ALL else [arguments.router or "prefix-aware"]
    spaces = [
        Space.of(
            machine.calibration,
            asked.work,
            asked.fixed,
            num_replicas=number,
            routers=routers,
            has_roles=arguments.roles == _ALL,
            link=asked.link,
            formats=asked.formats,
            price_per_hour=machine.price_per_hour,
        )
        for number in arguments.replicas
    ]
    with meter(most_trials(spaces, asked.limits), "Searching") as shown:
        return fewest(spaces, asked.goal, asked.work, limits=asked.limits, progress=shown), spaces[-1]


def _gains(asked: Asked, fleet: Fleet) -> Gains | None:
    """What each flag of the answer gains at its number of replicas."""
    if fleet.enough is None:
        return None
    space = fleet.enough.space
    simulate = partial(simulate_trial, space, asked.goal)
    return gains_of(space, fleet.enough.trial, lambda options: simulate(options, asked.work), PROMISES)
