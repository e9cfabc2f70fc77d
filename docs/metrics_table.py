"""Write the table of all metrics in docs/monitoring.md from their declarations.

    .venv/bin/python docs/metrics_table.py            # rewrite the page (`make docs` does it, too)
    .venv/bin/python docs/metrics_table.py --check    # exit with 1 if the page is stale

The table is that of a server on which everything is known: a device, speculation, two roles.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from prometheus_client.metrics_core import Metric
from written_part import WrittenPart

from headway.core.utilisation import UtilisationStats
from headway.server.admission.queue_limits import QueueLimits
from headway.server.metrics.families import Snapshot
from headway.server.metrics.name_forms import OTHER_NAMES, SAME_NAMES
from headway.server.metrics.server_metrics import ServerMetrics
from headway.wire.engine_stats import EngineStats
from headway.wire.messages import EngineReady

PART = WrittenPart(
    Path(__file__).resolve().parent / "monitoring.md",
    "<!-- metrics: written by docs/metrics_table.py from their declarations -->",
    "<!-- end of metrics -->",
)
DERIVED = {
    "cache_config_info": "`cache_config_info`",
    "http_responses": "`http_requests_total`, no prefix",
    "http_response_time_seconds": "`http_request_duration_seconds`, no prefix",
}
READY = EngineReady("m", 4096, 300, 1000, 16, 8, 64, "cuda", "bfloat16")
MEASURED = UtilisationStats(
    device_busy_s=2.0, read_s=1.0, compute_s=1.0, ceiling_s=1.0, num_step_tokens=1, nvml_busy_s=1.0, nvml_s=1.0
)


def families() -> list[Metric]:
    """All families that a server can have, each with a sample."""
    stats = EngineStats(utilisation=MEASURED)
    stats.drafts.num_accepted_at = [0]
    metrics = ServerMetrics("m")
    metrics.num_devices = lambda: 1
    metrics.observe_step(stats)
    metrics.observe_response("/v1/completions", "POST", 200, 1.0)
    limits = QueueLimits(max_requests=1, max_tokens=1)
    for line in limits.lines.values():
        line.num_refused.setdefault("full", 0)
    engine = SimpleNamespace(
        info=READY,
        stats=stats,
        num_restarts=0,
        num_resumed=0,
        replicas=[SimpleNamespace(place=0, stats=stats, num_restarts=0, role="decode", problem=None)],
        prefill_outcomes={"elsewhere": 0},
    )
    return list(Snapshot(metrics, engine, limits).families())


def table() -> str:
    """A row for each family, in the order of their names."""
    rows = ["| name | kind | labels | vLLM | |", "|---|---|---|---|---|"]
    for family in sorted(families(), key=lambda family: family.name):
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        shown = ", ".join(f"`{label}`" for label in labels if label not in ("model_name", "le"))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(f"| `{name}` | {family.type} | {shown} | {_vllm(family)} | {family.documentation} |")
    return "\n".join(rows)


def _vllm(family: Metric) -> str:
    if family.name in SAME_NAMES:
        return "same"
    other = OTHER_NAMES.get(family.name)
    return DERIVED.get(family.name, "") if other is None else f"`{other}_total`"


if __name__ == "__main__":
    sys.exit(PART.main(table()))
