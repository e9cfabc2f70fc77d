"""Kinds of requests in a workload: which share of them is scheduled with which options."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.request_options import DEFAULT_OPTIONS, OPTION_NAMES, RequestOptions
from headway.errors import InvalidRequestError
from headway.lab.workload.options_table import OptionsTable

_OPTIONS = tuple(name for name in OPTION_NAMES if name != "predicted_tokens")
"""How long answers get is drawn with the work; what is predicted of it depends on the engine."""


@dataclass(frozen=True)
class RequestClass:
    """Requests come from it as often as its weight says, among all weights."""

    weight: float = 1.0
    options: RequestOptions = DEFAULT_OPTIONS


def draw_options(classes: Sequence[RequestClass], rng: random.Random) -> RequestOptions:
    """Of one request."""
    if not classes:
        return DEFAULT_OPTIONS
    return rng.choices(classes, [one.weight for one in classes])[0].options


def read_classes(tables: object) -> tuple[RequestClass, ...]:
    """From the list `[[classes]]`."""
    if not isinstance(tables, list) or not tables:
        OptionsTable({}, "classes: ").fail("a list of tables is expected: [[classes]]")
    return tuple(_read(OptionsTable(table, f"classes[{number}]: ")) for number, table in enumerate(tables))


def _read(table: OptionsTable) -> RequestClass:
    table.only("weight", *_OPTIONS)
    try:
        options = RequestOptions(**{key: table.raw(key) for key in _OPTIONS if key in table})
    except InvalidRequestError as error:
        table.fail(str(error))
    return RequestClass(table.number("weight", 1.0), options)
