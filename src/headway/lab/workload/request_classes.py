"""Kinds of requests in a workload: which share of them is scheduled with which options."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.core.request_options import RequestOptions as CheckedOptions
from headway.engine.request_options import RequestOptions
from headway.errors import InvalidRequestError
from headway.lab.workload.input_files import OptionsTable

_OPTIONS = ("priority", "tenant", "ttft_target_s", "tpot_target_s", "cache_salt")


@dataclass(frozen=True)
class RequestClass:
    """Requests come from it as often as its weight says, among all weights."""

    weight: float = 1.0
    options: RequestOptions = field(default_factory=RequestOptions)


def draw_options(classes: Sequence[RequestClass], rng: random.Random) -> RequestOptions:
    """Of one request."""
    if not classes:
        return RequestOptions()
    return rng.choices(classes, [one.weight for one in classes])[0].options


def read_classes(tables: object) -> tuple[RequestClass, ...]:
    """From the list `[[classes]]`."""
    if not isinstance(tables, list) or not tables:
        OptionsTable({}, "classes: ").fail("a list of tables is expected: [[classes]]")
    return tuple(_read(OptionsTable(table, f"classes[{number}]: ")) for number, table in enumerate(tables))


def _read(table: OptionsTable) -> RequestClass:
    table.only("weight", *_OPTIONS)
    options = RequestOptions(**{key: table.raw(key) for key in _OPTIONS if key in table})  # type: ignore[typeddict-item]
    try:
        CheckedOptions(**options)
    except InvalidRequestError as error:
        table.fail(str(error))
    return RequestClass(table.number("weight", 1.0), options)
