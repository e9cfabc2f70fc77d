"""The panels of the dashboards in deploy/grafana, and of expressions that read vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.monitoring.vllm_facts import BUCKETS, READ, Family

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Target:
    """One expression of one panel."""

    dashboard: str
    panel: str
    expression: str


def targets(path: Path) -> Iterator[Target]:
    """Yield all expressions of a dashboard, those of its variables too."""
    dashboard = json.loads(path.read_text(encoding="utf-8"))
    for panel in panels(dashboard):
        for target in panel.get("targets", ()):
            yield Target(path.stem, panel["title"], target["expr"])


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the panels that show something, also those inside of rows."""
    for panel in dashboard["panels"]:
        yield from panels(panel) if panel.get("panels") else ()
        if panel["type"] != "row":
            yield panel


def vllm_targets() -> Iterator[Target]:
    """Yield the expressions that vLLM's dashboards make of the names they read."""
    for name, family in READ.items():
        for matcher in _matchers(name, family):
            for expression in _expressions(name, family, matcher):
                yield Target("vLLM's", name, expression)


def _matchers(name: str, family: Family) -> Iterator[str]:
    own = 'job=~"$job", instance=~"$instance"' + (', model_name=~"$model_name"' if family.has_model else "")
    yield own
    for label, value in family.values:
        yield f'{own}, {label}="{value}"'


def _expressions(name: str, family: Family, matcher: str) -> Iterator[str]:
    by = ", ".join(sorted(family.labels))
    if family.kind == "gauge":
        yield f"sum by ({by}) ({name}{{{matcher}}})"
    elif family.kind == "counter":
        yield f"sum by ({by}) (rate({name}_total{{{matcher}}}[$__rate_interval]))"
    else:
        yield f"histogram_quantile(0.95, sum by (le) (rate({name}_bucket{{{matcher}}}[$__rate_interval])))"
        yield f"rate({name}_sum{{{matcher}}}[$__rate_interval]) / rate({name}_count{{{matcher}}}[$__rate_interval])"
        for bound in BUCKETS.get(name, ()):
            yield f'sum(rate({name}_bucket{{{matcher}, le="{bound}"}}[$__rate_interval]))'
