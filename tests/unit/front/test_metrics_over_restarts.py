"""The page of metrics while engines end and come back: what counts goes on counting, under every prefix."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from headway.front.engine_client import EngineClient
from headway.server.admission.queue_limits import QueueLimits
from headway.server.metrics import prometheus
from headway.server.metrics.name_forms import FORMS
from headway.server.metrics.server_metrics import ServerMetrics
from headway.wire.engine_stats import EngineStats
from tests.unit.front.fake_engines import FakeEngines, serving
from tests.unit.front.served import add, read, until
from tests.unit.front.virtual_time import runner  # noqa: F401

NUM_RESTARTS = 5


def one_of_each() -> EngineStats:
    """Every number is 1, and two prompt tokens came, of which one was found."""
    stats = EngineStats()
    for part in msgspec.structs.astuple(stats):
        for name, value in msgspec.structs.asdict(part).items():
            if isinstance(value, list):
                setattr(part, name, [1, 1])
            elif isinstance(value, int | float):
                setattr(part, name, 1)
    stats.batch.prompt_tokens = 2
    return stats


def counters(metrics: ServerMetrics, client: EngineClient) -> dict[str, float]:
    """All samples that may only grow, by name and labels."""
    text = prometheus.render(metrics, client, QueueLimits(max_requests=1, max_tokens=1), tuple(FORMS)).decode()
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram", "summary")
        for sample in family.samples
    }


async def test_five_restarts_make_no_counter_go_back() -> None:
    engines, metrics, pages = FakeEngines(), ServerMetrics("m"), []
    async with serving(engines, num_replicas=2) as client:
        client.add_step_listener(metrics.observe_step)
        for number in range(NUM_RESTARTS):
            place = number % 2
            for engine in engines.engines.values():
                engine.stats.go_on_from(one_of_each())
            for name in "ab":  # both replicas report
                await read(client.submit(add(f"{name}{number}", max_tokens=3)))
            pages.append(counters(metrics, client))
            engines.kill(place)
            await until(lambda place=place: not client.replicas[place].is_ready)
            pages.append(counters(metrics, client))
            await until(lambda number=number: client.num_restarts == number + 1 and client.health.ok)
            pages.append(counters(metrics, client))
    for before, after in pairwise(pages):
        fallen = {name: (value, after.get(name)) for name, value in before.items() if after.get(name, -1.0) < value}
        assert not fallen
    first, last = pages[0], pages[-1]
    for name in (
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_hits",
        "spec_decode_num_drafts",
    ):
        (ours,), (theirs,) = (
            [key for key in last if key.startswith(f"{prefix}:{name}_total[")] for prefix in ("headway", "vllm")
        )
        assert last[ours] == last[theirs] > first[ours]
    assert last["headway:engine_restarts_total[('model_name', 'm')]"] == NUM_RESTARTS
