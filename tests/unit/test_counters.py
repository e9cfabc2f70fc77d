"""What follows from a number's declaration: sums, restarts, metrics and names."""

from __future__ import annotations

from typing import Annotated

import pytest

from headway.counters import Counter, Gauge, Statistics, field
from headway.wire.engine_stats import EngineStats


class Tree(Statistics):
    num_apples: Annotated[int, Counter("apples", "Apples that fell.")] = 0
    num_orders: Annotated[int, Counter(of_requests=True)] = 0
    num_at: Annotated[list[int], Counter("apples_at", "By branch.", label="branch")] = field(default_factory=list)
    num_birds: Annotated[int, Gauge("birds", "Birds on it.", by_replica=True)] = 0
    wind_s: float = 0.0


class Orchard(Statistics):
    tree: Tree = field(default_factory=Tree)
    num_paths: Annotated[int, Gauge()] = 0


def orchard() -> Orchard:
    return Orchard(Tree(num_apples=3, num_orders=2, num_at=[2, 1], num_birds=5, wind_s=0.5), num_paths=7)


def test_several_engines_add_up() -> None:
    total = orchard()
    total.add(Orchard(Tree(num_apples=1, num_at=[0, 0, 4], num_birds=1, wind_s=9.0), num_paths=1))
    assert total == Orchard(Tree(4, 2, [2, 1, 4], 6, wind_s=0.5), 8), "the wind is neither a counter nor a gauge"


def test_counters_go_on_and_state_does_not() -> None:
    again = Orchard(Tree(num_apples=1, num_birds=2))
    again.go_on_from(orchard())
    assert again == Orchard(Tree(4, 2, [2, 1], num_birds=2))
    gone = orchard()
    gone.forget_state()
    assert gone == Orchard(Tree(3, 2, [2, 1]))


def test_what_clients_asked_for_can_be_left_out() -> None:
    all_numbers = orchard()
    assert all_numbers.without_requests() == Orchard(Tree(3, 0, [2, 1], 5), 7)
    assert all_numbers == orchard(), "it is a copy"


def test_metrics_are_what_has_a_name() -> None:
    assert [(declared.metric, value) for declared, value in orchard().metrics()] == [
        ("apples", 3),
        ("apples_at", [2, 1]),
        ("birds", 5),
    ]
    assert orchard().as_dict() == {"num_apples": 3, "num_orders": 2, "num_at": [2, 1], "num_birds": 5, "num_paths": 7}


@pytest.mark.parametrize("of", ["metric", "help"])
def test_an_engines_metrics_have_names_and_explanations_of_their_own(of: str) -> None:
    texts = [getattr(declared, of) for declared, _ in EngineStats().metrics()]
    assert len(set(texts)) == len(texts) > 25 and all(texts)


def test_an_engines_numbers_have_names_of_their_own() -> None:
    """The live page gets them without their owners."""
    records = [getattr(EngineStats(), name) for name in EngineStats.__struct_fields__]
    assert sum(len(record.as_dict()) for record in records) == len(EngineStats().as_dict())
