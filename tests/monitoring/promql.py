"""The metrics and labels that an expression reads, by Prometheus' own grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "15s"}
"""Grafana's, as it would fill them in."""


def filled(expression: str) -> str:
    """An expression of a panel with Grafana's variables filled in: every server, every model."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return re.sub(r'"\$\w+"', '".*"', expression)


def reads(expression: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each metric that the expression selects, with the labels that are matched, and grouped by around it."""
    yield from _walk(promql_parser.parse(filled(expression)), frozenset())


def _walk(node: Any, labels: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name, labels | {matcher.name for matcher in node.matchers.matchers}
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _walk(node.vector_selector, labels)
    elif isinstance(node, promql_parser.AggregateExpr):
        grouped = node.modifier.labels if node.modifier is not None else ()
        yield from _walk(node.expr, labels | frozenset(grouped))
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _walk(node.lhs, labels)
        yield from _walk(node.rhs, labels)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _walk(argument, labels)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr | promql_parser.SubqueryExpr):
        yield from _walk(node.expr, labels)
