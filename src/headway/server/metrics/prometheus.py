"""Writes the metrics of server and engine in Prometheus' format, under the names that were asked for.

Beside them stand the numbers of the front end's process (`process_*`), of Python, and the version, which have the same
names whatever the prefix.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from prometheus_client import PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from headway import __version__
from headway.server.admission.queue_limits import QueueLimits
from headway.server.metrics.families import EngineNumbers, Snapshot
from headway.server.metrics.name_forms import FORMS
from headway.server.metrics.server_metrics import ServerMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(metrics: ServerMetrics, engine: EngineNumbers, queue: QueueLimits, forms: Sequence[str]) -> bytes:
    """Return all metrics as text. `forms` are names of `FORMS`, one after another on the page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Page(Snapshot(metrics, engine, queue), forms))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, snapshot: Snapshot, forms: Sequence[str]) -> None:
        self._snapshot = snapshot
        self._forms = forms

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Called by prometheus_client."""
        families = list(self._snapshot.families())
        for form in self._forms:
            yield from FORMS[form](families)
        yield from process_families()


def process_families() -> Iterator[Metric]:
    """Yield what has the same names whatever the prefix."""
    for collector in _process_collectors():
        yield from collector.collect()
    version = GaugeMetricFamily("headway_build_info", "Headway's version. Always 1.", labels=("version",))
    version.add_metric((__version__,), 1)
    yield version


@functools.cache
def _process_collectors() -> tuple[Collector, ...]:
    """What prometheus_client knows about this process; on systems without /proc that is less."""
    return ProcessCollector(registry=None), PlatformCollector(registry=None)
