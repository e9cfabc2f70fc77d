"""What a call of `headway tune` asks for: its machines with their prices, its work and its promises."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError
from headway.front.roles import TOGETHER
from headway_lab.charts.html_page import write_page
from headway_lab.sim.sim_flags import load_calibration
from headway_lab.sim.sim_report import trust_notes
from headway_lab.tune.formats import Formats, check_calibrations
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_search import SearchLimits
from headway_lab.workload.bench_requests import BenchRequest

if TYPE_CHECKING:
    from headway_lab.charts import Page
    from headway_lab.sim.calibration import Calibration
    from headway_lab.sim.cost_model import Link
    from headway_lab.tune.tune_goal import Goal


@dataclass(frozen=True)
class Machine:
    """A calibration that was given."""

    name: str
    calibration: Calibration
    price_per_hour: float | None
    """The price of one of its devices."""


def machines_of(names: Sequence[str], prices: Sequence[float]) -> list[Machine]:
    """The calibrations of these names, which differ in formats or ranks. A single price is that of all devices."""
    if len(prices) not in (0, 1, len(names)):
        raise ConfigError(
            f"--price-per-hour: give it once, or once for each --calibration, in their order: there are {len(names)} "
            f"calibrations and {len(prices)} prices."
        )
    found = [load_calibration(name) for name in names]
    check_calibrations(found)
    each: Sequence[float | None] = prices if len(prices) == len(names) else [*prices, None][:1] * len(names)
    return [Machine(*one) for one in zip(map(_file_name, names), found, each, strict=True)]


@dataclass(frozen=True)
class Asked:
    """A call of the command, checked."""

    arguments: argparse.Namespace
    machines: Sequence[Machine]
    work: Sequence[BenchRequest]
    goal: Goal
    fixed: dict[str, Any]
    """The options of scheduler and cache that were given."""
    link: Link
    formats: Formats

    @property
    def limits(self) -> SearchLimits:
        return SearchLimits(self.arguments.trials, self.arguments.search_seed)

    @property
    def title(self) -> str:
        """The name of the work."""
        return Path(self.arguments.workload or self.arguments.traffic[0]).stem

    def space(self, machine: Machine) -> Space:
        """What can be searched on one machine."""
        return Space.of(
            machine.calibration,
            self.work,
            self.fixed,
            link=self.link,
            formats=self.formats,
            price_per_hour=machine.price_per_hour,
        )

    def notes(self, space: Space) -> list[str]:
        """How far the answer is to be trusted, and what was searched."""
        calibrations = [machine.calibration for machine in self.machines]
        told = [
            *trust_notes(space.calibration),
            *self._link_notes(),
            f"Searched: {', '.join(space.knobs)}; given: {', '.join(space.fixed) or 'none'}.",
            self.formats.not_searched(calibrations, self.fixed),
        ]
        if "kv_cache_dtype" in space.knobs:
            told.append(
                "Smaller KV formats are derived from the calibration: more tokens fit, and reading one takes less time "
                "in proportion to its bytes. They change answers a little: docs/kv_quantisation.md."
            )
        return [one for one in told if one]

    def write_page(self, page: Page, calibration: Calibration) -> None:
        """Write the page of --html."""
        seeds = f"{self.arguments.work_seed} of the work, {self.arguments.search_seed} of the search"
        machine = f"{calibration.model} on {calibration.device_name}, simulated"
        write_page(self.arguments, page, seed=seeds, machine=machine)

    def _link_notes(self) -> list[str]:
        has_ranks = any(machine.calibration.tensor_parallel_size > 1 for machine in self.machines)
        if self.arguments.roles == TOGETHER and not has_ranks:
            return []
        return [
            f"The link between devices is simulated, with {self.link.gb_s:g} GB/s and {1e6 * self.link.latency_s:g} µs."
        ]


def _file_name(text: str) -> str:
    return Path(text).name
