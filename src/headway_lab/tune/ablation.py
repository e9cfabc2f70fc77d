"""What each flag of an answer gains alone: the answer is simulated again with that one flag at its default.

Flags can depend on each other, so the gains do not add up to the whole gain. A flag that gains nothing alone may still
be needed by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway_lab.sim.sim_accuracy import percent_text
from headway_lab.tune.flags_text import flags_text
from headway_lab.tune.search_space import Space
from headway_lab.tune.tune_search import Trial

Simulate = Callable[[Mapping[str, Any]], Trial | None]
"""(options) → their trial; `None` if they cannot keep the promises at any load"""


@dataclass(frozen=True)
class Value:
    """One number of a trial that the goal depends on."""

    key: str
    title: str
    of: Callable[[Trial], float | None]
    digits: int = 3


GOODPUT = (
    Value("goodput", "goodput/s", lambda trial: trial.score.goodput),
    Value("tail", "tail", lambda trial: trial.score.tail),
)
"""The values of the goal of goodput. The tail decides between equal goodputs."""
PROMISES = (Value("tail", "largest latency, bound = 1", lambda trial: trial.score.tail),)
"""The value that decides whether some replicas are enough."""


def all_in_price(trial: Trial) -> float | None:
    """The price of a million output tokens that the goal of cost compares."""
    return None if trial.metrics.prices is None else trial.metrics.prices.tokens.all_in


COST = (
    Value("price_per_million_output_tokens_all_in", "price/M out, all in", all_in_price, digits=4),
    Value("rate", "requests/s", lambda trial: trial.rate),
)


@dataclass(frozen=True)
class Without:
    """The answer without one of its flags."""

    name: str
    flag: str
    default: str
    trial: Trial | None
    """`None` if it cannot run like that, or keeps the promises at no load."""
    reason: str = ""
    """Why there is no trial."""


@dataclass(frozen=True)
class Gains:
    """The gain of each flag of an answer."""

    values: Sequence[Value]
    best: Trial
    each: Sequence[Without]

    title = "What each flag gains alone: the answer without it"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A row for the answer, and one for each flag at its default."""
        titles = ["without", "default", *(value.title for value in self.values), f"{self.values[0].title}, change"]
        rows = [["(the answer)", "", *(_cell(value, self.best) for value in self.values), ""]]
        for one in self.each:
            cells = [_cell(value, one.trial) for value in self.values]
            rows.append([one.flag, one.default, *cells, self._change(one) or one.reason])
        return titles, rows

    def as_json(self) -> list[dict[str, Any]]:
        """For each flag the goal's values with it and without it."""
        return [
            {
                "option": one.name,
                "flag": one.flag,
                "default": one.default,
                "with": {value.key: value.of(self.best) for value in self.values},
                "without": None if one.trial is None else {value.key: value.of(one.trial) for value in self.values},
                "reason": one.reason,
            }
            for one in self.each
        ]

    def _change(self, one: Without) -> str:
        value = self.values[0]
        best, other = value.of(self.best), None if one.trial is None else value.of(one.trial)
        return percent_text(other / best - 1.0) if best and other is not None else ""


def gains_of(
    space: Space, best: Trial, simulate: Simulate, values: Sequence[Value], *, more: Sequence[Without] = ()
) -> Gains | None:
    """The gain of each option of `best` that is not at its default; `None` if there are none. `more` are flags that
    are no options of the space."""
    each = list(more)
    for name, value in space.changes(best.options).items():
        default = space.default[name]
        options = {**best.options, name: default}
        trial, reason = None, "the engine refuses the rest without it"
        if space.is_valid(options):
            trial, reason = simulate(options), "misses the targets at any load"
        each.append(
            Without(name, flags_text({name: value}), _default_text(name, default), trial, "" if trial else reason)
        )
    return Gains(values, best, each) if each else None


def _default_text(name: str, default: Any) -> str:
    return flags_text({name: default}).partition(" ")[2]


def _cell(value: Value, trial: Trial | None) -> str:
    number = None if trial is None else value.of(trial)
    return "–" if number is None else f"{number:,.{value.digits}f}"
